"""A training step and a written token, beside nanoGPT's:   python benchmarks/peers.py MODEL

MODEL is the path of nanoGPT's model.py (github.com/karpathy/nanoGPT). All models have as many
layers, heads and dims, and train on the same windows, in turn, a step each. nanoGPT has its own
optimizer. Then each writes 64 tokens after 64 others, one sequence, eager; nanoGPT reads the whole
text again for each. `nanogpt` is the ratio to nanoGPT's median, `bare` to ours without Canon.

With --author FILE the author's LlamaCanon takes part, with our optimizer. FILE is
huggingface/modeling_llama_canon.py of github.com/zhuzeyuan/PhysicsLM4, tried with transformers
4.53.3 and einops 0.8.2.
"""

import dataclasses
import functools
import importlib
import itertools
import sys

import torch
from common import Benchmark, times_in_turn
from torch import nn

import train
from canon_gpt import CanonGPT, Config, summed_loss

SIZES = [  # flags of train.py
    "--task text --preset nano",  # 4 layers, 128 dims, 16 x 256 tokens
    "--task depo1 --preset nano",  # 3 layers, 64 dims, 32 x 52 tokens
    "--task depo1 --preset small --batch-size 16",  # 6 layers, 384 dims, 16 x 112 tokens
]


class LlamaCanon(nn.Module):
    """The author's, called like ours, with the same sizes."""

    def __init__(self, code, ours):
        super().__init__()
        config, hidden = ours.config, ours.blocks[0].mlp.down.in_features
        sizes = config.vocab_size, config.d_model, hidden, config.n_layer, config.n_head
        self.llama = code.LlamaCanonForCausalLM(code.LlamaCanonConfig(*sizes, canon_set="ABCD"))

    def forward(self, tokens, targets):
        logits = self.llama(tokens, use_cache=False).logits
        return logits, summed_loss(logits, targets) / targets.numel()

    def generate(self, tokens, n):
        return self.llama.generate(tokens, max_new_tokens=n, do_sample=True, eos_token_id=None)


def import_from(path):
    sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def make_models(paths, config):
    """{name: model}"""
    code = import_from(paths.model)
    sizes = config.block_size, config.vocab_size, config.n_layer, config.n_head, config.d_model
    with_canon = CanonGPT(dataclasses.replace(config, canon="abcd"))
    models = {"nanoGPT": code.GPT(code.GPTConfig(*sizes, bias=False))}
    models |= {"without Canon": CanonGPT(config), "Canon-ABCD": with_canon}
    if paths.author is not None:
        models["LlamaCanon"] = LlamaCanon(import_from(paths.author), with_canon)
    return models


def make_step(model, batches, training, run):
    """A function that trains the model by one step."""
    model.train().to(run.device)
    if hasattr(model, "configure_optimizers"):  # nanoGPT
        settings = training.weight_decay, training.lr, training.betas
        optimizer = model.configure_optimizers(*settings, device_type=run.device)
    else:
        optimizer = train.make_optimizer(model, training)
    fast_model = train.compiled_and_distributed(model, run, run.compile)

    def step():
        inputs, targets, _ = next(batches)
        with train.mixed_precision(training, run):
            _, loss = fast_model(inputs, targets.contiguous())  # for nanoGPT
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_in_turn(bench, functions, rounds, task, parts=1):
    """Add a row for each of {name: function}, with the time of one of its `parts`."""
    ms = times_in_turn(functions, bench.device, rounds)
    for name, quartiles in ms.items():
        ratios = {"nanogpt": quartiles[1] / ms["nanoGPT"][1]}
        ratios["bare"] = quartiles[1] / ms["without Canon"][1]
        bench.add(what=name, ms=[each / parts for each in quartiles], **ratios, task=task)


def compare_steps(bench, flags, rounds=40):
    torch._dynamo.reset()
    task, config, training, run = train.settings_of(f"{flags} --workers 0".split())
    drawn = itertools.islice(train.load_batches(task, training, run, steps_done=0), 4)
    batches = itertools.cycle(list(drawn))
    steps = {}
    for name, model in make_models(bench.arguments, config).items():
        steps[name] = make_step(model, batches, training, run)
    time_in_turn(bench, steps, rounds, task=flags)


def compare_writing(bench, n_layer, d_model, tokens=64, rounds=5):
    config = Config(256, 2 * tokens, n_layer=n_layer, n_head=n_layer, d_model=d_model)
    prompt = torch.randint(256, (1, tokens), device=bench.device)
    writers = {}
    for name, model in make_models(bench.arguments, config).items():
        generate = model.eval().to(bench.device).generate
        writers[name] = functools.partial(generate, prompt, tokens)
    time_in_turn(bench, writers, rounds, f"a token, {n_layer} layers, {d_model} dims", tokens)


def main(argv=None):
    paths = {"model": "nanoGPT's model.py", "--author": "the author's modeling_llama_canon.py"}
    bench = Benchmark(__file__, __doc__, argv, paths)
    train.keep_memory()
    for compiled in ("--compile", "--no-compile"):
        for flags in SIZES:
            compare_steps(bench, f"{flags} {compiled}")
    compare_writing(bench, n_layer=4, d_model=128)
    compare_writing(bench, n_layer=12, d_model=768)


if __name__ == "__main__":
    main()
