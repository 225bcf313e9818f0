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


@pytest.fixture
def small_repository(tmp_path, monkeypatch):
    """In place of this one: two exercises, in one file."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "kernels.py").write_text(
        "def double(x):\n"
        "    # exercise 1: twice x\n"
        "    return 2 * x\n"
        "    # end of exercise\n\n\n"
        "def triple(x):\n"
        "    # exercise 2\n"
        "    return double(x) + x\n"
        "    # end of exercise\n"
    )
    (root / "test_canon.py").write_text(
        "import pytest\n"
        "from kernels import double, triple\n\n\n"
        "@pytest.mark.exercise1(points=3)\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_double(x):\n"
        "    assert double(x) == 2 * x\n\n\n"
        "@pytest.mark.exercise2(points=2)\n"
        "def test_triple():\n"
        "    assert triple(2) == 6\n"
    )
    monkeypatch.setattr(grade, "ROOT", root)
    monkeypatch.setattr(grade, "FILES", ("kernels.py",))
    monkeypatch.setattr(grade, "points_of_tests", lambda: {1: {"test_double": 3}})
    monkeypatch.chdir(tmp_path)


def grade_solution(solution, *options):
    """Exit status and result for a copy with this solution of exercise 1, and a fault below it."""
    theirs = Path("theirs")
    theirs.mkdir()
    text = (grade.ROOT / "kernels.py").read_text().replace("    return 2 * x\n", solution)
    (theirs / "kernels.py").write_text(f"{text}broken below\n")
    status = grade.main(["--of", "theirs", "--json", "results.json", *options])
    return status, json.loads(Path("results.json").read_text())


@pytest.mark.parametrize("solution, points, words", [
    ("    return x + x\n", 3, "2 passed"),
    ("    return 2\n", 0, "[2] - assert 2 == (2 * 2)"),
    ("    return x +\n", 0, "invalid syntax (kernels.py, line 3)"),
    ("    # end of exercise\n    # exercise 1\n", 0, "the comments around exercise 1 were changed"),
])  # fmt: skip
def test_a_submission_is_graded(solution, points, words, small_repository):
    status, result = grade_solution(solution)
    assert result["score"] == points and status == int(points < 3)
    assert words in result["tests"][0]["output"]


def test_a_submission_has_a_time_limit(small_repository):
    _, result = grade_solution("    while True:\n        pass\n", "--timeout", "1")
    assert result["tests"][0]["output"] == "not done in 1 s"


def test_what_a_solution_starts_ends_with_its_tests(small_repository):
    pid = Path("pid").absolute()
    sleeper = "__import__('subprocess').Popen(['sleep', '99'])"
    grade_solution(f"    open({str(pid)!r}, 'w').write(str({sleeper}.pid))\n    return 2 * x\n")
    command = ["ps", "-o", "stat=", "-p", pid.read_text()]
    for _ in range(100):  # a killed process takes a moment
        state = subprocess.run(command, capture_output=True, text=True).stdout
        if state == "" or state.startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail("it still runs")
