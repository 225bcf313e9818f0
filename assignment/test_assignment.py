"""The students' copy, and the grader. The exercises' own tests are in test_canon.py."""

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import exercises
import grade
import make
import pytest

HERE = Path(__file__).parent
EXERCISES = list(exercises.FUNCTIONS)


@pytest.fixture
def copy(tmp_path):
    """The students' copy. All exercises are open."""
    make.main([str(tmp_path / "copy")])
    return tmp_path / "copy"


def test_an_open_exercise_fails_its_tests(copy):
    reasons = grade.run_tests(copy, EXERCISES, timeout=600)
    assert EXERCISES == list(range(1, 14))
    assert sum(points for _, points, _ in exercises.TESTS) == 60
    for _, _, test in exercises.TESTS:
        assert reasons[test], test


# Lines of solutions that other functions have, too.
COMMON = ["dtype = torch.promote_types(x.dtype, torch.float32)"]
COMMON += ["qkv = self.canon_b(self.qkv(x), state)", "for i in tl.static_range(len(dw)):"]


def test_the_copy_has_no_solution(copy):
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert {path.relative_to(copy).as_posix() for path in files} == {*exercises.COPIED, "README.md"}
    text = "\n".join(path.read_text() for path in files)
    for file, *names in exercises.FUNCTIONS.values():
        source = (grade.ROOT / file).read_text()
        for name in names:
            function = grade.find_function(ast.parse(source), name)
            solution = source.split("\n")[function.body[0].end_lineno : function.end_lineno]
            lines = [line.partition("#")[0].strip() for line in solution]
            for line in lines:
                assert len(line) < 30 or line in COMMON or line not in text, name


OTHERS = ["conv1d", "pdf", "run_autograder", "setup", "sh"]  # no names of ours


def test_names_in_the_texts_are_in_the_sources():
    sources = [*grade.ROOT.glob("*.py"), HERE / "grade.py", HERE / "exercises.py"]
    known = {*OTHERS}.union(*(re.findall(r"\w+", path.read_text()) for path in sources))
    for page in ("handout.md", "teaching.md"):
        text = (HERE / page).read_text().replace("```", "")
        for code in re.findall(r"`([^`]+)`", text):
            for name in re.findall(r"^[\w.]+$|\w+_\w+", code):
                assert known.issuperset(name.strip(".").split(".")), f"{page}: {name}"


SMALLER = {"--steps 500": "--steps 2", "--steps 800": "--steps 2 --eval-size 4"}


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its code cells in order, in small sizes. IPython's `!` and `%%writefile` are done here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(grade.ROOT))  # the folder that the notebook is in
    names, printed = {}, ""
    for cell in json.loads((HERE / "colab.ipynb").read_text())["cells"]:
        source = "".join(cell["source"]).replace("assignment/", f"{HERE}/")
        for usual, small in SMALLER.items():
            source = source.replace(usual, small)
        first, _, rest = source.partition("\n")
        if cell["cell_type"] == "markdown" or "git clone" in source or "google.colab" in source:
            continue
        assert cell["outputs"]
        if first.startswith("%%writefile "):
            Path(first.split()[1]).write_text(rest)
        elif first.startswith("!python "):
            command = [sys.executable, *first.split()[1:]]
            printed += subprocess.run(command, capture_output=True, text=True).stdout
        else:
            exec(source, names)
    assert "out/mine" in printed and "\nexercise 1    0 of 4\n" in printed


# A repository with two exercises, and the tests of the first.
KERNELS = '''
def double(x):
    """Twice x."""
    return 2 * x

def triple(x):
    """Three times x."""
    return 3 * x
'''
TEST_CANON = '''
import kernels, pytest

@pytest.mark.parametrize("x", [1, 2])
def test_double(x):
    assert kernels.double(x) == 2 * x
    with pytest.raises(NotImplementedError):
        kernels.triple(x)
'''
CONFTEST = '''
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker("exercise1")
        item.user_properties.append(("test", "test_double"))
'''


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """A function that grades a kernels.py. It returns the exit status and the result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grade, "ROOT", Path("ours").absolute())
    monkeypatch.setattr(grade, "COPIED", ["kernels.py", "test_canon.py", "conftest.py"])
    functions = {1: ("kernels.py", "double"), 2: ("kernels.py", "triple")}
    monkeypatch.setattr(grade, "FUNCTIONS", functions)
    monkeypatch.setattr(grade, "TESTS", [(1, 3, "test_double")])
    for folder in ("ours", "theirs"):
        Path(folder).mkdir()
    for name, text in zip(grade.COPIED, (KERNELS, TEST_CANON, CONFTEST)):
        Path("ours", name).write_text(text)

    def grade_submission(kernels, *options):
        Path("theirs/kernels.py").write_text(kernels)
        status = grade.main(["1", "--of", "theirs", "--json", "results.json", *options])
        (result,) = json.loads(Path("results.json").read_text())["tests"]
        return status, result

    return grade_submission


SUBMISSIONS = {
    # What is elsewhere in the file does not count.
    "def double(x):\n    return x + x\n\nan error\n": "",
    "if True:\n  def double(x): # a comment\n   '''Mine.'''\n\n# another\n   return x + x\n)": "",
    "print('passed')\nraise SystemExit\ndef double(x): return x + x": "",
    "def double(x): 0\n@nobody\ndef double(x):\n  def again(x): return 2*x\n  return again(x)": "",
    # Within the function it does.
    "def double(x):\n    return 2\n": "test_double[2]: assert 2 == (2 * 2)",
    "\n\ndef double(x):\n    return x +\n": "invalid syntax (kernels.py, line 4)",
    "def double(x):\n    break\n": "'break' outside loop (kernels.py, line 2)",
    "def twice(x):\n    return x + x\n": "double is missing",
    "def double(x):\n    if x == 2: raise KeyboardInterrupt\n    return x + x": "status 2",
    "def double(x):\n    __import__('os')._exit(0)\n": "status 0",
    "def double(x):\n    __import__('pytest').skip('why?')\n": "test_double[1]: why?",
}


@pytest.mark.parametrize("kernels, words", SUBMISSIONS.items())
def test_a_submission_is_graded(kernels, words, graded, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--color=yes -k nothing")
    status, result = graded(kernels)
    assert (status, result["score"]) == ((1, 0) if words else (0, 3))
    assert words in result["output"] and (words or result["output"] == "")


def test_a_submission_has_a_time_limit(graded):
    _, result = graded("def double(x):\n    while True: pass\n", "--timeout", "1")
    assert result["output"] == "not done in 1 s"


def test_what_a_solution_starts_ends_with_its_tests(graded):
    pid = Path("pid").absolute()
    sleeper = "__import__('subprocess').Popen(['sleep', '99'])"
    graded(f"def double(x):\n    open({str(pid)!r}, 'w').write(str({sleeper}.pid))\n")
    command = ["ps", "-o", "stat=", "-p", pid.read_text()]
    for _ in range(100):  # a killed process takes a moment
        state = subprocess.run(command, capture_output=True, text=True).stdout
        if state == "" or state.startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_the_grader_is_imported_on_windows():
    """Which has neither SIGKILL nor killpg."""
    code = "import os, signal; del signal.SIGKILL, os.killpg; import make"
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True)
