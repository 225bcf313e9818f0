"""Does a Depo model follow hops among more names than in training?

    python results/beyond.py out/RUN ..

A table for each run: its scores among as many names as in training, and among up to twice as many.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where plot.py is

import plot
from canon_gpt import CanonGPT, Refused, require
from sample import load_model
from tasks import Depo, make_task, score_text


def scores_among(names, task, model):
    """The scores of 512 cycles with that many names, which need a longer window."""
    asked = make_task(**task.settings | {"N": names, "block_size": None})
    config = dataclasses.replace(model.config, block_size=asked.block_size)
    wider = CanonGPT(config).eval()
    wider.load_state_dict(model.state_dict())  # no weight depends on the window
    return asked.evaluate(wider, task.run_seed, n=512)


def table(task, model):
    rows = [["names", *task.units]]
    for factor in (1, 1.2, 1.5, 2):
        names = int(factor * task.N)
        scores = scores_among(names, task, model)
        rows.append([str(names), *(score_text(scores[k], task.units[k]) for k in task.units)])
    return plot.markdown(rows)


def main():
    parser = argparse.ArgumentParser(prog="beyond.py", usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="+", help="folders of trained models")
    for folder in parser.parse_args().runs:
        try:
            task, model = load_model(folder)
            require(isinstance(task, Depo), "task", task.name, "allowed: depo0, depo1, depo2")
            print(f"{folder}\n\n{table(task, model)}\n")
        except Refused as error:
            parser.error(error)


if __name__ == "__main__":
    main()
