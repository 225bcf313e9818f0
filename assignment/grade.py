"""Grade the exercises:   python assignment/grade.py

    python assignment/grade.py                      all exercises, in this copy
    python assignment/grade.py 3                    exercise 3
    python assignment/grade.py 1 3 --of FOLDER      two exercises of somebody else's copy

Of FOLDER, only the code between `# exercise N` and `# end of exercise` counts. It goes into a fresh
copy of this repository in which later exercises are open. There, pytest runs the exercise's tests:
those with `@exercise(N, points)` above them in test_canon.py. A test gives its points if all of its
cases pass.

Exit status: 0 if all these exercises are solved, 1 if not, 2 for bad input.
"""

import argparse
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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ("kernels.py", "canon_gpt.py", "tasks.py")  # those with exercises

HOLE = re.compile(
    r"^(?P<above> *# exercise (?P<number>\d+)\b.*\n)"
    r"(?P<code>(?:.*\n)*?)"
    r"(?P<below>(?P<indent> *)# end of exercise\n)",
    re.MULTILINE,
)


def opened(hole):
    """The text of a hole, a match of HOLE, without its solution."""
    error = f'{hole["indent"]}raise NotImplementedError("exercise {hole["number"]}")\n'
    return hole["above"] + error + hole["below"]


def write_copy(copy, number, submission):
    """This repository with the exercise's solution from the submission, and later ones open."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "out"))
    for name in FILES:
        ours = (ROOT / name).read_text(encoding="utf-8")
        theirs = (submission / name).read_text(encoding="utf-8")
        solutions = [hole[0] for hole in HOLE.finditer(theirs) if int(hole["number"]) == number]
        expected = [hole for hole in HOLE.finditer(ours) if int(hole["number"]) == number]
        if len(solutions) != len(expected):
            raise ValueError(f"{name}: the comments around exercise {number} were changed")
        remaining = iter(solutions)

        def filled(hole):
            if int(hole["number"]) == number:
                return next(remaining)
            return opened(hole) if int(hole["number"]) > number else hole[0]

        text = HOLE.sub(filled, ours)
        compile(text, name, "exec")  # a SyntaxError has the line
        (copy / name).write_text(text, encoding="utf-8")


def run_tests(copy, number, timeout):
    """What pytest prints about an exercise: a line for each case, PASSED or FAILED and why."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rpfEs", "-p", "no:cacheprovider"]
    command += ["-m", f"exercise{number}", "test_canon.py"]
    report = copy.parent / "report.txt"
    with report.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=os.environ | {"COLUMNS": "200"},  # how wide pytest prints
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # in a process group of its own
        )
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not done in {timeout:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return report.read_text(encoding="utf-8", errors="replace")


def points_of_tests():
    """{exercise: {test: points}}, in order, from the marks in test_canon.py."""
    found = {}

    class Plugin:
        def pytest_collection_modifyitems(self, items):
            for item in items:
                for mark in item.iter_markers():
                    number = mark.name.removeprefix("exercise")
                    if number.isdigit():
                        tests = found.setdefault(int(number), {})
                        tests[item.originalname] = mark.kwargs["points"]

    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "test_canon.py")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main(arguments, plugins=[Plugin()])
    if status != 0:  # there is an error in a hole, say
        sys.exit(printed.getvalue())
    return dict(sorted(found.items()))


def grade(number, points, submission, timeout):
    """What an exercise is worth, in the form of Gradescope's results.json."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        try:
            write_copy(copy, number, submission)
            report = run_tests(copy, number, timeout)
        except (OSError, SyntaxError, ValueError) as error:
            report = str(error)
    passed = re.findall(r"^PASSED test_canon\.py::(\w+)", report, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) test_canon\.py::(\w+)", report, re.MULTILINE)
    solved = set(passed) - set(failed)
    problems = re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", report, re.MULTILINE)
    return {
        "name": f"exercise {number}",
        "score": sum(worth for test, worth in points.items() if test in solved),
        "max_score": sum(points.values()),
        "output": "\n".join(problems or report.splitlines()[-1:]),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="grade.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
    )
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
        parser.error(f"--of {args.of}: is not a folder")

    tests = []
    for number in args.exercise or points:
        result = grade(number, points[number], args.of, args.timeout)
        tests.append(result)
        print(f"{result['name']:12}{result['score']:3} of {result['max_score']}", flush=True)
        if result["score"] < result["max_score"]:
            first_problem, _, _ = result["output"].partition("\n")
            print(f"    {first_problem}", flush=True)
    score, most = sum(t["score"] for t in tests), sum(t["max_score"] for t in tests)
    print(f"{score} of {most} points")
    if args.json:
        args.json.write_text(json.dumps({"score": score, "tests": tests}, indent=1) + "\n")
    return int(score < most)


if __name__ == "__main__":
    sys.exit(main())
