"""How fast each task makes training data:   python benchmarks/generators.py

Tokens per second that one process makes, in whole batches, of every task and preset. On CUDA,
training has four such processes.
"""

import itertools

from common import Benchmark, times_in_turn

from tasks import TASKS, make_task


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv, device="cpu")
    for preset, rounds in {"nano": 3 if bench.toy else 20, "small": 7, "paper": 3}.items():
        for name in TASKS:
            task = make_task(name, preset)
            batch_size, steps = task.training["batch_size"], itertools.count()
            batches = {name: lambda: task.batch(0, next(steps), batch_size)}
            ms = times_in_turn(batches, "cpu", rounds)[name]
            tokens = batch_size * (task.block_size + 1)
            rate = tokens / ms[1] * 1e3
            bench.add(what=name, preset=preset, tokens=tokens, batch_ms=ms, tokens_per_s=rate)
        if bench.toy:
            return


if __name__ == "__main__":
    main()
