"""Grade the exercises:   python assignment/grade.py

    python assignment/grade.py                      all exercises, in this copy
    python assignment/grade.py 3                    exercise 3
    python assignment/grade.py 1 3 --of FOLDER      two exercises of somebody else's copy

Nothing of FOLDER runs but its code between `# exercise N` and `# end of exercise`. It goes into a
fresh copy of this repository, in which later exercises are open. There pytest runs the exercise's
tests: those with `@exercise(N, points)` above them in test_canon.py. A test's points are given if
all of its cases pass.

Exit status: 0 if all these exercises are solved, 1 if not, 2 for bad input.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ("kernels.py", "canon_gpt.py", "tasks.py")  # those with exercises

# A hole: the comment above, with its indent and number; the code; the comment below.
HOLE = re.compile(r"^( +)# exercise (\d+)\b.*\n((?:.*\n)*?)\1# end of exercise\n", re.MULTILINE)

# What no solution needs, and what an exercise is to replace.
FORBIDDEN = {"setattr", "exec", "eval", "open", "testing", "conv1d"}
DEFINITION = {"causal_conv_reference", "canon_by_hand"}
PYTORCH_FORM = {"look_back", "look_ahead", "PyTorchConvolution", "causal_conv_pytorch"}
FORBIDDEN_IN = {
    2: DEFINITION,
    9: {"linear_recurrence"},
    10: {"linear_recurrence"},
    12: DEFINITION | PYTORCH_FORM,
    13: DEFINITION | PYTORCH_FORM,
}


class Unsolved(Exception):
    """Why a solution cannot be tested. The text is one line for the student."""


def opened(hole):
    """The text of a hole, a match of HOLE, without its solution."""
    indent, number, _ = hole.groups()
    first_line, _, _ = hole[0].partition("\n")
    emptied = [f'raise NotImplementedError("exercise {number}")', "# end of exercise"]
    return first_line + "".join(f"\n{indent}{line}" for line in emptied) + "\n"


def check(number, indent, code):
    """Raises Unsolved unless the code is whole statements in their block that call nothing
    forbidden. So a solution can neither leave its function nor swallow what stands below it."""
    for line in code.splitlines():
        if line.strip() and not line.startswith(indent):
            raise Unsolved(f"a line stands further left than its comments: {line.strip()}")
    try:
        tree = ast.parse("if True:\n" + code)
    except SyntaxError as error:
        raise Unsolved(f"this does not parse: {error.msg}: {error.text.strip()}") from None
    forbidden = FORBIDDEN | FORBIDDEN_IN.get(number, set())
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "attr", ""))
        if name in forbidden or name.startswith("__"):
            raise Unsolved(f"a solution must not use {name}")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            raise Unsolved("a solution must not import")


def write_copy(copy, number, submission):
    """This repository with an exercise's solution from the submission, and later ones open."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "out"))
    for name in FILES:
        theirs, ours = (submission / name).read_text(), (ROOT / name).read_text()
        solutions = [hole for hole in HOLE.finditer(theirs) if int(hole[2]) == number]
        expected = [hole for hole in HOLE.finditer(ours) if int(hole[2]) == number]
        if len(solutions) != len(expected):
            raise Unsolved(f"{name}: the comments around exercise {number} were changed")
        for hole in solutions:
            check(number, hole[1], hole[3])
        remaining = iter(solutions)

        def filled(hole):
            if int(hole[2]) == number:
                return next(remaining)[0]
            return opened(hole) if int(hole[2]) > number else hole[0]

        (copy / name).write_text(HOLE.sub(filled, ours))


def run_tests(copy, number, timeout):
    """{test: "passed", or what was wrong with a case of it} of an exercise's tests."""
    report = copy.parent / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-m", f"exercise{number}", f"--junitxml={report}", "test_canon.py"]
    process = subprocess.Popen(
        command,
        cwd=copy,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a process group of its own
    )
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise Unsolved(f"not done after {timeout:g} seconds") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
    if not report.exists():
        raise Unsolved("the tests ended without a report")
    outcomes = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        test = case.get("name").partition("[")[0]
        outcomes.setdefault(test, "passed")
        for problem in case:
            if problem.tag in ("error", "failure", "skipped"):
                outcomes[test] = (problem.get("message") or problem.tag).partition("\n")[0]
    return outcomes


class Points:
    """A plugin of pytest's that notes {exercise: {test: points}}."""

    def __init__(self):
        self.found = {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            for mark in item.iter_markers():
                number = mark.name.removeprefix("exercise")
                if number.isdigit():
                    tests = self.found.setdefault(int(number), {})
                    tests[item.originalname] = mark.kwargs["points"]


def points_of_tests():
    """{exercise: {test: points}}, in order."""
    points = Points()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "test_canon.py")]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(arguments, plugins=[points])
    return dict(sorted(points.found.items()))


def grade(number, points, submission, timeout):
    """What an exercise is worth, as Gradescope's results.json has it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        try:
            write_copy(copy, number, submission)
            outcomes = run_tests(copy, number, timeout)
            problems = [f"{test}: {why}" for test, why in outcomes.items() if why != "passed"]
        except (Unsolved, OSError, ValueError) as error:  # ValueError: a file is no text
            outcomes, problems = {}, [str(error)]
    score = sum(worth for test, worth in points.items() if outcomes.get(test) == "passed")
    return {
        "name": f"exercise {number}",
        "score": score,
        "max_score": sum(points.values()),
        "output": "\n".join(problems),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("exercise", type=int, nargs="*", metavar="N", help="default: all")
    add("--of", type=Path, default=ROOT, metavar="FOLDER", help="somebody else's copy")
    add("--timeout", type=float, default=120, metavar="S", help="seconds an exercise (120)")
    add("--json", type=Path, metavar="FILE", help="write Gradescope's results.json")
    args = parser.parse_args(argv)
    points = points_of_tests()
    for number in args.exercise:
        if number not in points:
            parser.error(f"exercise {number}: allowed: {', '.join(map(str, points))}")
    if not args.of.is_dir():
        parser.error(f"--of {args.of}: is no folder")

    tests = []
    for number in args.exercise or points:
        result = grade(number, points[number], args.of, args.timeout)
        tests.append(result)
        print(f"{result['name']:12}{result['score']:3} of {result['max_score']}", flush=True)
        if result["output"]:
            print(f"    {result['output'].splitlines()[0][:200]}", flush=True)
    score, most = sum(t["score"] for t in tests), sum(t["max_score"] for t in tests)
    print(f"{score} of {most} points")
    if args.json:
        args.json.write_text(json.dumps({"score": score, "tests": tests}, indent=1) + "\n")
    return int(score < most)


if __name__ == "__main__":
    sys.exit(main())
