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


def scores_among(names, task, trained):
    """The scores of 512 cycles with that many names, which need a longer window."""
    longer = make_task(**task.settings | {"N": names, "block_size": None})
    config = dataclasses.replace(trained.config, block_size=longer.block_size)
    model = CanonGPT(config).eval()
    model.load_state_dict(trained.state_dict())  # no weight depends on the window
    return longer.evaluate(model, seed=0, n=512)


def main():
    parser = argparse.ArgumentParser(prog="beyond.py", usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="+", help="folders of trained models")
    for folder in parser.parse_args().runs:
        try:
            task, trained = load_model(folder)
            require(isinstance(task, Depo), "task", task.name, "allowed: depo0, depo1, depo2")
        except Refused as error:
            parser.error(error)
        rows = []
        for factor in (1, 1.2, 1.5, 2):
            names = int(factor * task.N)
            scores = scores_among(names, task, trained)
            rows.append([str(names), *(score_text(share, "share") for share in scores.values())])
        print(f"{folder}\n\n{plot.markdown([['names', *scores], *rows])}\n")


if __name__ == "__main__":
    main()
