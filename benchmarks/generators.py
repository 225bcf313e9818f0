"""How fast each task makes training data:   python benchmarks/generators.py

Tokens per second that one process makes, in whole batches, for every preset and task. On CUDA,
training has four such processes.
"""

import itertools

from common import Benchmark, times_in_turn

from train import PRESETS, settings_of

ROUNDS = {"nano": 100, "small": 7, "paper": 5}


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv, device="cpu")
    for preset, rounds in ROUNDS.items():
        for name in PRESETS[preset]:
            if name != "other":  # stands for tasks of one's own
                measure(bench, preset, name, rounds)


def measure(bench, preset, name, rounds):
    task, _, training, _ = settings_of(["--task", name, "--preset", preset])
    steps = itertools.count()

    def draw():
        task.batch(training.seed, next(steps), training.batch_size)

    ms = times_in_turn({"draw": draw}, "cpu", rounds)["draw"]
    tokens = training.batch_size * (task.block_size + 1)
    rate = tokens / ms[1] * 1e3
    bench.add(what=name, preset=preset, tokens=tokens, batch_ms=ms, tokens_per_s=rate)


if __name__ == "__main__":
    main()
