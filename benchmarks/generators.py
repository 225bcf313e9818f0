"""How fast each task makes training data:   python benchmarks/generators.py

Tokens per second that one process makes, in whole batches, of every preset and task. On CUDA,
training has four such processes.
"""

import itertools

from common import Benchmark, times_in_turn

from train import PRESETS, settings_of

ROUNDS = {"nano": 100, "small": 7, "paper": 5}


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv, device="cpu")
    for preset, rounds in {"nano": 3}.items() if bench.toy else ROUNDS.items():
        for name in PRESETS[preset]:
            if name != "other":  # stands for tasks of one's own
                bench.add(**measured(preset, name, rounds))


def measured(preset, name, rounds):
    """A row of the table."""
    settings, task, _ = settings_of(["--task", name, "--preset", preset])
    steps = itertools.count()

    def draw():
        task.batch(0, next(steps), settings.batch_size)

    tokens = settings.batch_size * (task.block_size + 1)
    ms = times_in_turn({"draw": draw}, "cpu", rounds)["draw"]
    row = dict(what=name, preset=preset, tokens=tokens, batch_ms=ms)
    return row | dict(tokens_per_s=tokens / ms[1] * 1e3)


if __name__ == "__main__":
    main()
