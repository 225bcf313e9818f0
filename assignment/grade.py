"""Test the exercises:   python assignment/grade.py

    python assignment/grade.py                 all exercises, in this copy of the repository
    python assignment/grade.py 3               exercise 3, with pytest's own report
    python assignment/grade.py --of FOLDER     all exercises of somebody else's copy, by our tests

The last is for teachers: it takes kernels.py, canon_gpt.py and tasks.py from FOLDER, and everything
else, tests included, from here. Exit status: 0 if all tests passed, 1 if not, 2 for bad input.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("kernels.py", "canon_gpt.py", "tasks.py")  # those with exercises
IGNORED = shutil.ignore_patterns(".git", ".ci", ".venv", ".*_cache", "__pycache__", "out")

EXERCISES = (  # what to write, and the tests that pass then, as `pytest -k` selects them
    ("the definition of the convolution",
     "convolution_by_hand or causal_conv_reference and (gradcheck or streams)"),
    ("the same in place, and its derivative",
     "causal_conv_pytorch and (equals or forward_alone) or no_shifted"
     " or gradcheck and not reference or canon_layer_by_hand"),
    ("the Canon layer in a stream", "canon_layer_streams"),
    ("rotary positions", "rotary_depends"),
    ("attention with Canon-B", "attention_is_a_mean"),
    ("MLP and block",
     "canon_points or mlp_variants or (causality or streaming_equals) and not mixer"),
    ("Depo's edges, questions and answers", "depo_by or depo_order or depo_scores"),
    ("the linear recurrence, as a loop", "recurrence_is"),
    ("the same by matrix products",
     "(chunked_equals or is_stable or keeps_its_state) and (gla or mamba2)"),
    ("the delta rule by matrix products",
     "(chunked_equals or is_stable or keeps_its_state) and gdn or constant_memory"),
    ("Lano's parser and next-token distribution", "lano_chart_equals or lano_long"),
    ("the Triton kernel, forward", "forward_alone and triton"),
    ("the Triton kernel, backward", "causal_conv_triton and equals or segments"),
)  # fmt: skip


def run_tests(folder, number, *options):
    """pytest on one exercise's tests in this folder: the finished process."""
    command = [sys.executable, "-m", "pytest", "-k", EXERCISES[number - 1][1], *options]
    return subprocess.run(command, cwd=folder, capture_output="-q" in options, text=True)


def table(folder):
    """Print a line for each exercise; whether all its tests passed, for all of them."""
    every = True
    for number, (title, _) in enumerate(EXERCISES, 1):
        last = run_tests(folder, number, "-q", "--tb=no").stdout.rstrip().splitlines()[-1:]
        counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", "".join(last))}
        passed = counts.get("passed", 0)
        failed = counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
        solved = passed > 0 and failed == 0
        every = every and solved
        mark = "solved" if solved else "skipped" if "skipped" in counts and not failed else "open"
        print(f"{number:3}  {title:44}{mark:8}{passed:4} of {passed + failed} tests", flush=True)
    return every


def main(argv=None):
    parser = argparse.ArgumentParser(description="Test the exercises; see assignment/README.md.")
    parser.error = lambda message: parser.exit(2, f"grade.py: {message}\n")
    parser.add_argument("exercise", type=int, nargs="?", metavar="N", help="default: all")
    parser.add_argument("--of", type=Path, metavar="FOLDER", help="somebody else's copy")
    args = parser.parse_args(argv)
    if args.exercise is not None and not 1 <= args.exercise <= len(EXERCISES):
        parser.error(f"exercise = {args.exercise}: allowed: 1 to {len(EXERCISES)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = ROOT
        if args.of is not None:
            missing = [name for name in FILES if not (args.of / name).is_file()]
            if missing:
                parser.error(f"--of {args.of}: has no {missing[0]}")
            folder = Path(scratch) / "copy"
            shutil.copytree(ROOT, folder, ignore=IGNORED)
            for name in FILES:
                shutil.copy(args.of / name, folder / name)
        if args.exercise is not None:
            return int(run_tests(folder, args.exercise).returncode != 0)
        return int(not table(folder))


if __name__ == "__main__":
    sys.exit(main())
