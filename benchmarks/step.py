"""What Canon layers and linear mixers cost in a training step:   python benchmarks/step.py

Each row compares a model with another one: a Transformer with Canon layers with the same without
them, a linear mixer with attention, both with Canon layers. The two train in turn, a step each, as
train.py trains them; `ratio` divides their median times. On a GPU: Depo's paper model, 12 layers of
768 dims, on 16 x 2,048 tokens, compiled, in bfloat16; also with the convolution's definition in
place of the Triton kernels. On a CPU: the nano models, compiled and eager.

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
from canon_gpt import CANONS, Canon, CanonGPT
from kernels import causal_conv_reference


class PlainCanon(Canon):
    """Canon that torch.compile may fuse with its neighbours."""

    def forward(self, x, state=None):
        return causal_conv_reference(x, self.weight, self.residual)


CANONS["definition"] = PlainCanon


MODELS = {  # {name: flags of train.py}
    "without Canon": "",
    "Canon-ABCD": "--canon abcd",
    "Canon-AC": "--canon ac",
    "Canon-ABCD, definition": "--canon abcd --canon-type definition",
    "GLA": "--canon abcd --mixer gla",
    "Mamba2": "--canon abcd --mixer mamba2",
    "Gated DeltaNet": "--canon abcd --mixer gdn",
}
CANON = ["Canon-ABCD", "Canon-AC", "Canon-ABCD, definition"]
LINEAR = ["GLA", "Mamba2", "Gated DeltaNet"]


def make_step(name, flags):
    """A function that trains the model by one step, and the settings of train.py."""
    settings, task, config = train.settings_of(f"{flags} {MODELS[name]} --workers 0".split())
    model = CanonGPT(config).to(settings.device)
    optimizer = train.adamw(model, settings)
    fast_model = train.compiled_and_distributed(model, settings)
    mixed = settings.dtype == "bfloat16"
    autocast = torch.autocast(settings.device, torch.bfloat16, enabled=mixed)
    drawn = itertools.islice(train.load_batches(task, settings, steps_done=0), 4)
    batches = itertools.cycle(list(drawn))

    def step():
        return train.train_step(fast_model, optimizer, next(batches), settings, autocast)

    return step, settings


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


def compare(bench, flags, models, rounds, baseline="without Canon"):
    """Rows for these models beside a baseline, all with these flags of train.py."""
    torch._dynamo.reset()
    baseline_step, _ = make_step(baseline, flags)
    baseline_first_s = seconds(baseline_step, bench.device)
    for name in models:
        step, settings = make_step(name, flags)
        first_s = seconds(step, bench.device)
        ms = times_in_turn({"baseline": baseline_step, "this": step}, bench.device, rounds)
        bench.add(
            what=name,
            task=settings.task,
            how="compiled" if settings.compile else "eager",
            batch_size=settings.batch_size,
            baseline=baseline,
            baseline_ms=ms["baseline"],
            ms=ms["this"],
            ratio=ms["this"][1] / ms["baseline"][1],
            baseline_first_s=baseline_first_s,
            first_s=first_s,
        )


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    nano = "--preset nano --task"
    if bench.toy:
        flags = f"{nano} copy --batch-size 2 --no-compile"
        compare(bench, flags, CANON, rounds=3)
        compare(bench, flags, LINEAR, rounds=3, baseline="Canon-ABCD")
    elif bench.device == "cuda":
        flags = "--preset paper --task depo1 --batch-size 16 --compile"
        compare(bench, flags, CANON, rounds=30)
    else:
        # The compiler must not find what an earlier run has left.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        torch._inductor.config.compile_threads = 1  # whose time is counted
        x = torch.ones(1)
        bench.add(what="x + 1", first_s=seconds(lambda: torch.compile(torch.add)(x, 1), "cpu"))
        for compiled in ("--compile", "--no-compile"):
            compare(bench, f"{nano} depo1 {compiled}", ["Canon-ABCD"], rounds=60)
            compare(bench, f"{nano} copy {compiled}", ["Canon-ABCD"], rounds=60)
            compare(bench, f"{nano} depo0 {compiled}", LINEAR, rounds=30, baseline="Canon-ABCD")


if __name__ == "__main__":
    main()
