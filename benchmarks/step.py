"""What Canon layers and linear mixers cost in a training step:   python benchmarks/step.py

Each row compares a model with another one: a Transformer with Canon layers with the same without
them, a linear mixer with attention, both with Canon layers. The two train in turn, a step each;
`ratio` divides their median times. On a GPU: Depo's paper model, 12 layers of 768 dims, on
16 x 2,048 tokens, compiled, in bfloat16; also with the convolution in plain PyTorch, and Hugging
Face's Llama of the same shape. On a CPU: the nano models, compiled and eager.

`first_s` is what the model's first step took, compiling: on a CPU processor time, the C++
compiler's included, with empty caches. What any first model needs, PyTorch's own headers among it,
is the row "x + 1".
"""

import itertools
import os
import tempfile
import time

import torch
import torch._inductor.config
from common import Benchmark, times_in_turn

import train
from canon_gpt import CANONS, Canon, CanonGPT, Config
from kernels import causal_conv_pytorch
from tasks import make_task


class PyTorchCanon(Canon):
    """Canon that torch.compile may fuse with its neighbours."""

    def forward(self, x, state=None):
        return causal_conv_pytorch(x, self.weight, self.residual)


CANONS["pytorch"] = PyTorchCanon

MODELS = {
    "without Canon": dict(),
    "Canon-ABCD": dict(canon="abcd"),
    "Canon-AC": dict(canon="ac"),
    "Canon-ABCD in PyTorch": dict(canon="abcd", canon_type="pytorch"),
    "GLA": dict(canon="abcd", mixer="gla"),
    "Mamba2": dict(canon="abcd", mixer="mamba2"),
    "Gated DeltaNet": dict(canon="abcd", mixer="gdn"),
}
LINEAR = ["GLA", "Mamba2", "Gated DeltaNet"]


def ours(sizes, **options):
    """A model, and its loss as a function of (forward, tokens, targets, mask)."""
    model = CanonGPT(Config(**{**sizes, **options}))

    def loss(forward, tokens, targets, mask):
        return forward(tokens, targets, mask)[1]

    return model, loss


def llama(sizes):
    """Hugging Face's Llama, likewise."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Compiled, its "sdpa" makes a mask, which rules out flash attention; by another name it won't.
    ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=8 * round(sizes["d_model"] / 3),
        num_hidden_layers=sizes["n_layer"],
        num_attention_heads=sizes["n_head"],
        max_position_embeddings=sizes["block_size"],
        attn_implementation="causal",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    def loss(forward, tokens, targets, mask):
        targets = targets.masked_fill(~mask, -100)
        return forward(input_ids=tokens, labels=targets, shift_labels=targets).loss

    return model, loss


def training_step(model, loss, compiled, batches, device):
    """A function that trains the model by one step, and the seconds that its first call took."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            nats = loss(forward, *next(batches))
        nats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, seconds(step, device)


def seconds(f, device):
    """On a CPU: processor time of this process and of those that it starts."""

    def now():
        if device != "cpu":
            return time.perf_counter()
        times = os.times()
        return time.process_time() + times.children_user + times.children_system

    begin = now()
    f()
    return now() - begin


def compare(bench, name, preset, batch_size, compiled, models, rounds, baseline="without Canon"):
    """Rows for these models at the size of a task's preset, beside a baseline."""
    torch._dynamo.reset()
    recipe = train.make_recipe(**train.preset_parts(preset, name))
    task = make_task(**recipe.task)
    device, sizes = bench.device, vars(recipe.model)
    batches = []
    for number in range(4):
        tokens, mask = (torch.from_numpy(a).to(device) for a in task.batch(0, number, batch_size))
        batches.append((tokens[:, :-1], tokens[:, 1:], mask[:, 1:]))
    batches = itertools.cycle(batches)
    old = ours(sizes, **MODELS[baseline])
    old_step, old_first = training_step(*old, compiled, batches, device)
    for what in models:
        with bench.optional(what):
            model, loss = llama(sizes) if what == "Llama" else ours(sizes, **MODELS[what])
            step, first = training_step(model, loss, compiled, batches, device)
            ms = times_in_turn({"baseline": old_step, "this": step}, device, rounds)
            bench.add(
                what=what,
                task=name,
                how="compiled" if compiled else "eager",
                B=batch_size,
                T=task.block_size,
                parameters=sum(p.numel() for p in model.parameters()),
                baseline=baseline,
                baseline_ms=ms["baseline"],
                ms=ms["this"],
                ratio=ms["this"][1] / ms["baseline"][1],
                tokens_per_s=batch_size * task.block_size / ms["this"][1] * 1e3,
                baseline_first_s=old_first,
                first_s=first,
            )


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    canon = ["Canon-ABCD", "Canon-AC", "Canon-ABCD in PyTorch", "Llama"]
    if bench.toy:
        compare(bench, "copy", "nano", 2, False, canon, rounds=3)
        compare(bench, "copy", "nano", 2, False, LINEAR, rounds=3, baseline="Canon-ABCD")
    elif bench.device == "cuda":
        compare(bench, "depo1", "paper", 16, True, canon, rounds=30)
    else:
        # the compiler must not find what an earlier run has left
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        torch._inductor.config.compile_threads = 1  # whose time is counted
        x = torch.ones(1)
        bench.add(what="x + 1", first_s=seconds(lambda: torch.compile(torch.add)(x, 1), "cpu"))
        for compiled in (True, False):
            for name in ("depo1", "copy"):
                compare(bench, name, "nano", 32, compiled, ["Canon-ABCD"], rounds=60)
            compare(bench, "depo0", "nano", 16, compiled, LINEAR, 30, baseline="Canon-ABCD")
        compare(bench, "copy", "nano", 32, True, LINEAR, 30, baseline="Canon-ABCD")


if __name__ == "__main__":
    main()
