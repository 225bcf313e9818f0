"""Grade the exercises:   python assignment/grade.py

    python assignment/grade.py                      all exercises, in this copy
    python assignment/grade.py 3                    exercise 3
    python assignment/grade.py 1 3 --of FOLDER      two exercises of somebody else's copy

exercises.py says which functions an exercise asks for, and which tests give points. Of FOLDER, only
the bodies of these functions count. They are put into a fresh copy of this repository in which
later exercises are open, and there pytest runs the tests. A test gives its points if all of its
cases pass.

Exit status: 0 if all these exercises are solved, 1 if not, 2 for bad input.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

from exercises import COPIED, FUNCTIONS, TESTS

ROOT = Path(__file__).resolve().parent.parent


# ---- Take functions from a file, and put them into another -----------------


def find_function(tree, name):
    """The function that Python would call by this name: the last one that isn't inside another. A
    method comes after its class: "MLP.forward"."""
    for part in name.split("."):
        kinds = ast.FunctionDef, ast.ClassDef
        named = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.name == part]
        if not named:
            raise ValueError(f"{name} is missing")
        outermost = min(node.col_offset for node in named)
        *_, tree = [node for node in named if node.col_offset == outermost]
    return tree


def lines_of(name, text):
    """Only the lines of one function or class, under their old line numbers: its first line, and
    all lines after it that are indented further, empty, comments or closing brackets."""
    block = rf"^(?P<indent> *)(?:def|class) {name}\b.*\n"
    block += r"(?:(?P=indent)[ \t)\]}].*\n|[ \t]*(?:#.*)?\n)*"
    found = re.search(block, text + "\n", re.MULTILINE)
    if not found:
        return ""
    above = "\n" * text.count("\n", 0, found.start())
    return above[1:] + "if True:\n" + found[0] if found["indent"] else above + found[0]


def read_body(path, name):
    """The body of a function, without docstring, indentation and comments."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        compile(text, path.name, "exec")
    except SyntaxError:  # perhaps the error is in another function
        text = lines_of(name.split(".")[0], text)
        compile(text, path.name, "exec")
    function = find_function(ast.parse(text), name)
    first = 0 if ast.get_docstring(function) is None else 1
    return "\n".join(ast.unparse(statement) for statement in function.body[first:])


def with_body(text, name, body):
    """The text of a file in which a function has another body. Signature and docstring stay."""
    function = find_function(ast.parse(text), name)
    first = function.body[0]
    begin = first.lineno - 1 if ast.get_docstring(function) is None else first.end_lineno
    lines = text.split("\n")
    new = textwrap.indent(body, " " * first.col_offset)
    return "\n".join(lines[:begin] + [new] + lines[function.end_lineno :])


def copy_repository(copy):
    """Only what exercises.py lists, so that no downloaded model is copied, and no git is needed."""
    for name in COPIED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)


def write_bodies(copy, exercise, submission=None):
    """Give an exercise's functions the bodies that they have in a submission; without one, a line
    that raises an error."""
    file, *names = FUNCTIONS[exercise]
    text = (copy / file).read_text(encoding="utf-8")
    for name in names:
        body = f'raise NotImplementedError("exercise {exercise}")'
        if submission is not None:
            body = read_body(submission / file, name)
        text = with_body(text, name, body)
    (copy / file).write_text(text, encoding="utf-8")


# ---- Run the tests ---------------------------------------------------------


def kill(process):
    """End a process and all that it has started. (Windows is untested.)"""
    if sys.platform == "win32":
        command = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(command, capture_output=True)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_tests(copy, exercises, timeout):
    """{test of the table: why it failed}, for the tests of these exercises that ran; a reason for
    each case that did not pass."""
    # Neither the settings of a folder above nor the user's variables matter.
    (copy / "pytest.ini").write_text("[pytest]\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--junitxml=report.xml"]
    command += ["-m", " or ".join(f"exercise{number}" for number in exercises), "test_canon.py"]
    printed = copy / "printed.txt"
    with printed.open("w") as file:
        ends = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(  # in a process group of its own
            command, cwd=copy, env=environment, start_new_session=True, **ends
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done in {timeout:g} s") from None
        finally:
            kill(process)
    if process.returncode not in (0, 1) or not (copy / "report.xml").exists():
        *_, last = ["", *printed.read_text(encoding="utf-8", errors="replace").splitlines()]
        raise ValueError(f"pytest ended with status {process.returncode}: {last}")
    reasons = {}
    for case in ElementTree.parse(copy / "report.xml").iter("testcase"):
        found = [part for part in case if part.tag in ("failure", "error", "skipped")]
        for test in case.iter("property"):
            of_test = reasons.setdefault(test.get("value"), [])
            of_test += [f"{case.get('name')}: {part.get('message')}" for part in found]
    return reasons


def grade(exercise, submission, timeout):
    """What an exercise is worth, in the form of Gradescope's results.json."""
    points = {test: worth for number, worth, test in TESTS if number == exercise}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch, "copy")
        try:
            copy_repository(copy)
            write_bodies(copy, exercise, submission)
            for later in range(exercise + 1, len(FUNCTIONS) + 1):
                write_bodies(copy, later)
            reasons = run_tests(copy, [exercise], timeout)
            problems = chain.from_iterable(reasons.get(test, []) for test in points)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            reasons, problems = {}, [str(error)]
    return {
        "name": f"exercise {exercise}",
        "score": sum(worth for test, worth in points.items() if reasons.get(test) == []),
        "max_score": sum(points.values()),
        "output": "\n".join(problems),
    }


# ---- The command line ------------------------------------------------------


def make_parser(program, doc):
    """As in tasks.py, which is not imported, because it may hold a student's error."""
    return argparse.ArgumentParser(
        prog=program,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
    )


def main(argv=None):
    parser = make_parser("grade.py", __doc__)
    add = parser.add_argument
    add("exercise", type=int, nargs="*", metavar="N", help="default: all")
    add("--of", type=Path, default=ROOT, metavar="FOLDER", help="somebody else's copy")
    add("--timeout", type=float, default=120, metavar="S", help="seconds an exercise (120)")
    add("--json", type=Path, metavar="FILE", help="write Gradescope's results.json")
    args = parser.parse_args(argv)
    for number in args.exercise:
        if number not in FUNCTIONS:
            parser.error(f"exercise {number}: allowed: {', '.join(map(str, FUNCTIONS))}")
    if not args.of.is_dir():
        parser.error(f"--of {args.of}: is not a folder")

    tests = []
    for number in args.exercise or FUNCTIONS:
        result = grade(number, args.of, args.timeout)
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
