"""Check the runs of the experiments:   python assignment/check_runs.py out/

    python assignment/check_runs.py out/           all five experiments
    python assignment/check_runs.py out/ 1 3       two of them

Each experiment of handout.md says what to run. Here stands in which range the last scores should
be. The ranges are wider than what the runs in results/ show, since other machines give other
numbers. A run out of range need not be wrong: say in the report what may have happened.

Exit status: 0 if all is in range, 1 if not, 2 for bad input.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
sys.path.insert(0, str(ROOT))

from claims import hops_mastered  # noqa: E402

import runs as run_folders  # noqa: E402
from canon_gpt import CANONS, MIXERS  # noqa: E402


class Line(NamedTuple):
    good: bool
    text: str


# ---- 1. Finding runs -------------------------------------------------------


def finished(runs, task, **model):
    """The runs of a task at nano that have ended, whose models have these settings."""
    found = []
    for run in runs:
        at_nano = run["preset"] == "nano" and run["task"]["name"] == task
        same = all(run["model"][field] == value for field, value in model.items())
        if at_nano and same and run["seconds"] is not None:
            found.append(run)
    return found


def last_scores(run):
    return run["evals"][-1]["eval"]


def check(runs, name, score, low, high):
    """A Line for each run: whether its last score is within low .. high. One line if none is."""
    if not runs:
        return [Line(False, f"{name}: no finished run")]
    lines = []
    for run in runs:
        value = score(last_scores(run))
        text = f"{name}, seed {run['seed']}: {value:.3g} (expected {low:g} to {high:g})"
        lines.append(Line(low <= value <= high, text))
    return lines


# ---- 2. The experiments ----------------------------------------------------


def copied(scores):
    return scores["sequences"]


def copy_with_and_without(runs):
    """1. One layer copies 64 numbers with Canon, and no list without."""
    size = dict(pos="rope", n_layer=1, d_model=16)
    without = finished(runs, "copy", canon="", **size)
    with_canon = finished(runs, "copy", canon="abcd", **size)
    # results/README.md, Copy: 0% on three seeds, 100% on three seeds
    lines = check(without, "RoPE", copied, 0, 0.05)
    return lines + check(with_canon, "RoPE + Canon", copied, 0.9, 1)


def each_point_alone(runs):
    """2. Without positions, B copies alone. A, C and D do not."""
    lines = []
    for point in "abcd":
        found = finished(runs, "copy", pos="nope", canon=point, n_layer=1, d_model=16)
        # results/README.md, Look inside: B 100%, the others 0%
        low, high = (0.9, 1) if point == "b" else (0, 0.05)
        lines += check(found, f"NoPE + Canon-{point.upper()}", copied, low, high)
    return lines


def hops(runs):
    """3. On Depo0 models without Canon follow no edge. With Canon they follow one at least."""

    def mastered(scores):
        return hops_mastered(scores, list(scores))

    lines = []
    for canon, low, high in (("", 0, 0), ("abcd", 1, 4)):
        found = []
        for pos in ("rope", "nope"):
            found += finished(runs, "depo0", pos=pos, canon=canon)
        found = [run for run in found if run["task"]["K"] == 4]
        name = "Depo0 with Canon, hops" if canon else "Depo0 without Canon, hops"
        # results/README.md, Depo0: 0 without, on all seeds; 1 to 4 with
        lines += check(found, name, mastered, low, high)
    return lines


def text(runs):
    """4. On text Canon saves a tenth of a bit per byte, or more."""

    def bits(scores):
        return scores["bits per byte"]

    without = finished(runs, "text", pos="rope", canon="")
    with_canon = finished(runs, "text", pos="rope", canon="abcd")
    if not (without and with_canon):
        return [Line(False, "text: needs a finished run without and one with Canon")]
    best = min(bits(last_scores(run)) for run in without)
    # results/README.md, Text: RoPE 1.59 to 1.62 bits on three seeds, RoPE + Canon 1.29 to 1.37
    return check(with_canon, "RoPE + Canon, bits per byte", bits, 0, best - 0.1)


def own_layer(runs):
    """5. A mixer or a Canon layer of one's own, trained to the end."""
    own = []
    for run in runs:
        known = set(run["model"]["mixer"].split(",")) <= set(MIXERS)
        known = known and run["model"]["canon_type"] in CANONS
        if not known and run["seconds"] is not None:
            own.append(run)
    if not own:
        return [Line(False, "no finished run with a mixer or a Canon layer of your own")]
    lines = []
    for run in own:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in last_scores(run).items())
        lines.append(Line(True, f"{run['run']}: {scores}"))
    return lines


EXPERIMENTS = (copy_with_and_without, each_point_alone, hops, text, own_layer)

# ---- 3. The command line ---------------------------------------------------


def fail(message):
    """End the program with one line, and status 2."""
    print(f"check_runs.py: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Check the runs of the experiments.")
    parser.error = fail
    parser.add_argument("folder", type=Path, help="with runs in it, such as out/")
    parser.add_argument("experiment", type=int, nargs="*", metavar="N", help="default: all")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        fail(f"{args.folder} is no folder")
    for number in args.experiment:
        if not 1 <= number <= len(EXPERIMENTS):
            fail(f"experiment = {number}: allowed: 1 to {len(EXPERIMENTS)}")

    runs, problems = run_folders.read_all(sorted(args.folder.iterdir()))
    for problem in problems:
        print(f"check_runs.py: {problem}", file=sys.stderr)
    good = True
    for number, experiment in enumerate(EXPERIMENTS, 1):
        if args.experiment and number not in args.experiment:
            continue
        print(experiment.__doc__)
        for line in experiment(runs):
            mark = "in range" if line.good else "CHECK   "
            print(f"   {mark}  {line.text}")
            good = good and line.good
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
