"""How fast each task makes training data:   python benchmarks/generators.py [--peer PATH]

Tokens per second that one process makes, in whole batches, of every preset and task. On CUDA,
training has four such processes. PATH is a clone of the paper's code, as for author.py: then its
generators draw as many tokens, in turn with ours, and `times_peer` says how many times as fast
ours are. His tokens stay lists of documents; ours are arrays of windows, ready for training.
"""

import argparse
import itertools
from pathlib import Path

from common import Benchmark, times_in_turn

from tasks import make_task
from train import PRESETS, preset_parts

ROUNDS = {"nano": 100, "small": 7, "paper": 5}


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peer", type=Path)
    options, others = parser.parse_known_args(argv)
    bench = Benchmark(__file__, __doc__, others, device="cpu")
    rounds = {"nano": 3} if bench.toy else ROUNDS
    for preset in rounds:
        for name in PRESETS[preset]:
            bench.add(**measured(preset, name, options.peer, rounds[preset]))


def measured(preset, name, peer, rounds):
    """A row of the table."""
    parts = preset_parts(preset, name)
    task, batch_size = make_task(**parts["task"]), parts["training"]["batch_size"]
    tokens = batch_size * (task.block_size + 1)
    steps = itertools.count()

    def ours():
        task.batch(0, next(steps), batch_size)

    functions = {"ours": ours}
    if peer is not None:
        from author import peer_batches

        functions |= peer_batches(peer, {"peer": (task, tokens)})
    times = times_in_turn(functions, "cpu", rounds)
    ms = times["ours"]
    row = dict(what=name, preset=preset, tokens=tokens, batch_ms=ms)
    row["tokens_per_s"] = tokens / ms[1] * 1e3
    if peer is not None:
        row |= dict(peer_ms=times.get("peer"), times_peer=None)
        if "peer" in times:  # he has no Copy and no text, and his Capo is English
            row["times_peer"] = times["peer"][1] / ms[1]
    return row


if __name__ == "__main__":
    main()
