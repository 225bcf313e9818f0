"""What Canon layers and linear mixers cost in a training step:   python benchmarks/step.py

Each row compares two models: a Transformer with Canon layers, or with a relative of them, and one
without; or a linear mixer and attention, both with Canon layers. The two train in turn, a step
each, as train.py trains them. `ratio` is that of their median times. On a GPU it is Depo1's paper
model, 12 layers of 768 dims, on 16 x 2,048 tokens, compiled, in bfloat16; on a CPU the nano models,
compiled and eager.

`first_s`, on a CPU, is the processor time of a model's first step, the C++ compiler's included. No
cache helps it, except in the rows of relatives. The row "x + 1" is what the first compilation of a
process costs in any case.
"""

import itertools
import os
import tempfile

import torch
import torch._inductor.config
from common import Benchmark, times_in_turn

import examples.relatives
import train
from canon_gpt import CANONS, CanonGPT

MODELS = {  # {name: flags of train.py}
    "without Canon": "",
    "Canon-ABCD": "--canon abcd",
    "Canon-AC": "--canon ac",
    "GLA": "--canon abcd --mixer gla",
    "Mamba2": "--canon abcd --mixer mamba2 --no-short-conv",
    "Gated DeltaNet": "--canon abcd --mixer gdn --no-short-conv",
}
LINEAR = ["GLA", "Mamba2", "Gated DeltaNet"]
RELATIVES = [name for name in CANONS if name != "conv"]  # of examples/relatives.py
for name in RELATIVES:
    points = "abc" if CANONS[name] is examples.relatives.Inkling else "abcd"
    MODELS[name] = f"--canon {points} --canon-type {name}"


def few_batches(task, training, run):
    """The first four batches, again and again."""
    drawn = itertools.islice(train.load_batches(task, training, run, steps_done=0), 4)
    return itertools.cycle(list(drawn))


def make_step(model, flags):
    """A function that trains one of MODELS by one step."""
    flags = f"{flags} {MODELS[model]} --workers 0"
    task, config, training, run = train.settings_of(flags.split())
    model = CanonGPT(config).to(run.device)
    optimizer = train.make_optimizer(model, training)
    scaler = train.make_scaler(training, run)
    fast_model = train.make_fast_model(model, run, run.compile)
    autocast = train.mixed_precision(training, run)
    batches = few_batches(task, training, run)

    def step():
        return train.train_step(
            fast_model, optimizer, scaler, next(batches), autocast, training.clip
        )

    return step


def compare(bench, models, flags, rounds, baseline="without Canon"):
    """Rows for these models beside a baseline, all with these flags of train.py."""
    torch._dynamo.reset()
    baseline_step = make_step(baseline, flags)
    baseline_first_s = processor_seconds(baseline_step)
    for name in models:
        step = make_step(name, flags)
        first_s = processor_seconds(step)
        ms = times_in_turn({"baseline": baseline_step, "this": step}, bench.device, rounds)
        bench.add(
            what=name,
            baseline=baseline,
            baseline_ms=ms["baseline"],
            ms=ms["this"],
            ratio=ms["this"][1] / ms["baseline"][1],
            baseline_first_s=baseline_first_s,
            first_s=first_s,
            flags=flags,
        )


def processor_seconds(f):
    """Of this process and of those that it starts."""
    begin = os.times()
    f()
    end = os.times()
    return sum(end[:4]) - sum(begin[:4])  # the fifth is the clock on the wall


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    train.tune_machine()
    if bench.device == "cuda":
        flags = "--preset paper --task depo1 --batch-size 16 --compile"
        compare(bench, ["Canon-ABCD", "Canon-AC"], flags, rounds=30)
        return
    # The compiler must not find what an earlier run has left.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    torch._inductor.config.compile_threads = 1  # its time is counted
    x = torch.ones(1)
    bench.add(what="x + 1", first_s=processor_seconds(lambda: torch.compile(torch.add)(x, 1)))
    for compiled in ("--compile", "--no-compile"):
        flags = f"--preset nano {compiled} --task"
        compare(bench, ["Canon-ABCD"], f"{flags} depo1", rounds=60)
        compare(bench, ["Canon-ABCD"], f"{flags} copy", rounds=60)
        compare(bench, LINEAR, f"{flags} depo0", rounds=30, baseline="Canon-ABCD")
    # Last, because their first steps find loops that models above have compiled.
    torch._dynamo.config.recompile_limit = 32  # each model is another forward
    compare(bench, ["Canon-AC", *RELATIVES], "--preset nano --compile --task depo1", rounds=60)


if __name__ == "__main__":
    main()
