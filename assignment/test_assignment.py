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


def test_the_notebook_runs(here, monkeypatch):
    """Its code cells in order, in small sizes. IPython's `!` and `%%writefile` are done here."""
    monkeypatch.setenv("PYTHONPATH", str(grade.ROOT))  # the folder that the notebook is in
    names, printed = {}, ""
    for cell in json.loads((HERE / "colab.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        for usual, small in SMALLER.items():
            source = source.replace(usual, small)
        first, _, rest = source.partition("\n")
        if cell["cell_type"] == "markdown" or "git clone" in source or "google.colab" in source:
            continue
        assert cell["outputs"]
        if first.startswith("%%writefile "):
            Path(first.split()[1]).write_text(rest)
        elif first.startswith("!python "):
            words = [word.replace("assignment/", f"{HERE}/") for word in first.split()[1:]]
            command = [sys.executable, *words]
            printed += subprocess.run(command, capture_output=True, text=True).stdout
        else:
            exec(source, names)
    assert "out/mine" in printed and "\nexercise 1    0 of 4\n" in printed


BODIES = {  # of `double` in these files; or what is wrong
    "def double(x):\n    return x + x\n\nan error\n": "return x + x",
    "if True:\n  def double(x): # one\n   'Mine.'\n\n# two\n   return x + x\n)": "return x + x",
    "print('passed')\nraise SystemExit\ndef double(x): return x + x": "return x + x",
    "def f():\n  def double(x): 1\n@f\ndef double(x): 2\n@f\ndef double(x): 3\n": "3",
    "def double(x):\n  def two(): return 2\n  return two": "def two():\n    return 2\nreturn two",
    "\n\ndef double(x):\n    return x +\n": "invalid syntax (kernels.py, line 4)",
    "def double(x):\n    break\n": "'break' outside loop (kernels.py, line 2)",
    "def twice(x):\n    return x + x\n": "double is missing",
}


@pytest.mark.parametrize("text, body", BODIES.items())
def test_only_the_body_of_a_function_is_taken(text, body, tmp_path):
    (tmp_path / "kernels.py").write_text(text)
    try:
        found = grade.read_body(tmp_path / "kernels.py", "double")
    except (SyntaxError, ValueError) as error:
        found = str(error)
    assert found == body


def grade_exercise_1(text, *options):
    """The exit status and the result for this kernels.py."""
    Path("kernels.py").write_text(text)
    status = grade.main(["1", "--of", ".", "--json", "results.json", *options])
    (result,) = json.loads(Path("results.json").read_text())["tests"]
    return status, result["score"], result["output"]


def test_a_solution_gets_its_points_whatever_is_set(here, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--color=yes -k nothing")
    assert grade_exercise_1((grade.ROOT / "kernels.py").read_text()) == (0, 4, "")


def test_a_skipped_test_gives_no_points(here):
    line = "__import__('pytest').skip('why?')"
    status, score, output = grade_exercise_1(f"def causal_conv_reference(): {line}")
    assert (status, score) == (1, 0) and output.startswith("test_convolution_by_hand: why?\n")


def test_a_submission_has_a_time_limit(here):
    line = "while True: pass"
    result = grade_exercise_1(f"def causal_conv_reference():\n {line}", "--timeout", "0.5")
    assert result == (1, 0, "not done in 0.5 s")


def test_what_a_submission_starts_ends_with_its_tests(here):
    pid = Path("pid").resolve()
    sleeper = "__import__('subprocess').Popen(['sleep', '99'])"
    line = f"open({str(pid)!r}, 'w').write(str({sleeper}.pid)); raise KeyboardInterrupt"
    status, score, output = grade_exercise_1(f"def causal_conv_reference(): {line}")
    assert (status, score) == (1, 0) and output.startswith("pytest ended with status 2: ")
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
