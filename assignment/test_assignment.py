"""The students' copy, and the grader. The exercises' own tests are in test_canon.py."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import grade
import make
import pytest


def test_an_empty_hole_fails_its_tests(tmp_path):
    """Every test of every exercise, in a copy in which all exercises are open."""
    copy = tmp_path / "copy"
    make.write_assignment(copy)
    exercises = " or ".join(f"exercise{number}" for number in range(1, 14))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider"]
    command += ["-m", exercises, "test_canon.py"]
    report = subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout
    failed = set(re.findall(r"^FAILED test_canon\.py::(\w+)", report, re.MULTILINE))
    points = grade.points_of_tests()
    assert list(points) == list(range(1, 14))
    assert sum(sum(tests.values()) for tests in points.values()) == 60
    for tests in points.values():
        assert failed.issuperset(tests)


# A repository with two exercises, and the test of the first.
KERNELS = """
def double(x):
    # exercise 1: twice x
    return 2 * x
    # end of exercise

def triple(x):
    # exercise 2
    return 3 * x
    # end of exercise
"""
TESTS = """
import pytest
from kernels import double, triple

@pytest.mark.exercise1
@pytest.mark.parametrize("x", [1, 2])
def test_double(x):
    assert double(x) == 2 * x
    with pytest.raises(NotImplementedError):
        triple(x)
"""


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """A function that grades a solution of exercise 1, in a file with an error further down. It
    returns the exit status and the result."""
    monkeypatch.setattr(grade, "ROOT", tmp_path / "ours")
    monkeypatch.setattr(grade, "FILES", ["kernels.py"])
    monkeypatch.setattr(grade, "points_of_tests", lambda: {1: {"test_double": 3}})
    monkeypatch.chdir(tmp_path)
    for folder in ("ours", "theirs"):
        Path(folder).mkdir()
    Path("ours/kernels.py").write_text(KERNELS)
    Path("ours/test_canon.py").write_text(TESTS)

    def grade_solution(solution, *options):
        text = KERNELS.replace("    return 2 * x\n", solution)
        Path("theirs/kernels.py").write_text(f"{text}an error\n")
        status = grade.main(["1", "--of", "theirs", "--json", "results.json", *options])
        (result,) = json.loads(Path("results.json").read_text())["tests"]
        return status, result

    return grade_solution


@pytest.mark.parametrize("solution, points, words", [
    ("    return x + x\n", 3, "2 passed"),
    ("    return 2\n", 0, "[2] - assert 2 == (2 * 2)"),
    ("    return x +\n", 0, "invalid syntax (kernels.py, line 4)"),
    ("    # end of exercise\n    # exercise 1\n", 0, "the comments around exercise 1 were changed"),
])  # fmt: skip
def test_a_submission_is_graded(solution, points, words, graded):
    status, result = graded(solution)
    assert result["score"] == points and words in result["output"]
    assert status == (0 if points == 3 else 1)


def test_a_submission_has_a_time_limit(graded):
    _, result = graded("    while True: pass\n", "--timeout", "1")
    assert result["output"] == "not done in 1 s"


def test_what_a_solution_starts_ends_with_its_tests(graded):
    pid = Path("pid").absolute()
    sleeper = "__import__('subprocess').Popen(['sleep', '99'])"
    graded(f"    open({str(pid)!r}, 'w').write(str({sleeper}.pid))\n    return 2 * x\n")
    command = ["ps", "-o", "stat=", "-p", pid.read_text()]
    for _ in range(100):  # a killed process takes a moment
        state = subprocess.run(command, capture_output=True, text=True).stdout
        if state == "" or state.startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail("it still runs")
