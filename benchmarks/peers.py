"""A training step and a written token, beside nanoGPT's:   python benchmarks/peers.py MODEL

MODEL is the path of nanoGPT's model.py (github.com/karpathy/nanoGPT). All models have as many
layers, heads and dims, and train on the same windows, in turn, a step each: ours as in our
train.py, nanoGPT as in its own. Then each writes 64 tokens after 64 others, one sequence, eager;
for each token nanoGPT reads the whole text again. `nanogpt` is the ratio to nanoGPT's median, and
`bare` the ratio to that of ours without Canon.

With --author FILE the author's LlamaCanon takes part, with our optimizer. FILE is
huggingface/modeling_llama_canon.py of github.com/zhuzeyuan/PhysicsLM4, tried with transformers
4.53.3 and einops 0.8.2.
"""

import dataclasses
import importlib
import sys
from functools import partial

import torch
from common import Benchmark, times_in_turn
from step import few_batches, make_step
from torch import nn

import train
from canon_gpt import CanonGPT, Config, summed_loss

SIZES = [  # flags of train.py
    "--task text --preset nano",  # 4 layers, 128 dims, 16 x 256 tokens
    "--task depo1 --preset nano",  # 3 layers, 64 dims, 32 x 52 tokens
    "--task depo1 --preset small --batch-size 16",  # 6 layers, 384 dims, 16 x 112 tokens
]


def import_from(path):
    sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def make_nanogpt(code, config):
    sizes = config.block_size, config.vocab_size, config.n_layer, config.n_head, config.d_model
    return code.GPT(code.GPTConfig(*sizes, bias=False))


class LlamaCanon(nn.Module):
    """The author's, called like nanoGPT, with an MLP as wide as ours."""

    def __init__(self, code, config):
        super().__init__()
        hidden = CanonGPT(config).blocks[0].mlp.down.in_features
        sizes = config.vocab_size, config.d_model, hidden, config.n_layer, config.n_head
        self.llama = code.LlamaCanonForCausalLM(code.LlamaCanonConfig(*sizes, canon_set="ABCD"))

    def forward(self, tokens, targets):
        logits = self.llama(tokens, use_cache=False).logits
        return logits, summed_loss(logits, targets) / targets.numel()

    def generate(self, tokens, n):
        return self.llama.generate(tokens, max_new_tokens=n, do_sample=True, eos_token_id=None)


def make_peers_step(make_model, flags):
    """A function that trains a model of another repository by one step, as nanoGPT's train.py."""
    task, config, training, run = train.settings_of(f"{flags} --workers 0".split())
    model = make_model(config).to(run.device)
    if hasattr(model, "configure_optimizers"):  # nanoGPT
        settings = training.weight_decay, training.lr, training.betas
        optimizer = model.configure_optimizers(*settings, device_type=run.device)
    else:
        optimizer = train.make_optimizer(model, training)
    fast_model = train.make_fast_model(model, run, run.compile)
    batches = few_batches(task, training, run)

    def step():
        inputs, targets, _ = next(batches)
        with train.mixed_precision(training, run):
            _, loss = fast_model(inputs, targets.contiguous())  # nanoGPT needs it so
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


def compare_steps(bench, peers, flags, rounds=40):
    torch._dynamo.reset()
    steps = {name: make_peers_step(make, flags) for name, make in peers.items()}
    steps |= {name: make_step(name, flags) for name in ("without Canon", "Canon-ABCD")}
    time_in_turn(bench, steps, rounds, task=flags)


def compare_writing(bench, peers, n_layer, d_model, tokens=64, rounds=5):
    config = Config(256, 2 * tokens, n_layer=n_layer, n_head=n_layer, d_model=d_model)
    models = {name: make(config) for name, make in peers.items()}
    models["without Canon"] = CanonGPT(config)
    models["Canon-ABCD"] = CanonGPT(dataclasses.replace(config, canon="abcd"))
    prompt = torch.randint(256, (1, tokens), device=bench.device)
    writers = {}
    for name, model in models.items():
        writers[name] = partial(model.eval().to(bench.device).generate, prompt, tokens)
    time_in_turn(bench, writers, rounds, f"a token, {n_layer} layers, {d_model} dims", tokens)


def main(argv=None):
    paths = {"model": "nanoGPT's model.py", "--author": "the author's modeling_llama_canon.py"}
    bench = Benchmark(__file__, __doc__, argv, paths)
    peers = {"nanoGPT": partial(make_nanogpt, import_from(bench.arguments.model))}
    if bench.arguments.author is not None:
        peers["LlamaCanon"] = partial(LlamaCanon, import_from(bench.arguments.author))
    train.tune_machine()
    for compiled in ("--compile", "--no-compile"):
        for flags in SIZES:
            compare_steps(bench, peers, f"{flags} {compiled}")
    compare_writing(bench, peers, n_layer=4, d_model=128)
    compare_writing(bench, peers, n_layer=12, d_model=768)


if __name__ == "__main__":
    main()
