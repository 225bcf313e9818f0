"""Grade the exercises:   python assignment/grade.py

    python assignment/grade.py                         all exercises, in this copy
    python assignment/grade.py 3                       exercise 3, up to its first failure
    python assignment/grade.py 1 3 4 --of FOLDER       three exercises of somebody else's copy
    python assignment/grade.py --of FOLDER --json results.json         in Gradescope's format
    python assignment/grade.py --of submissions/* --csv grades.csv     several, a row each

Without --of, one exercise is tested in this copy as it stands. With --of, nothing of FOLDER runs but
its code between "# exercise N" and "# end of exercise". It goes into a fresh copy of this
repository, one exercise at a time. That needs the solutions: a student's copy refuses --of.

Exit status: 0 if every exercise that was graded is solved or skipped, 1 if not, 2 for bad input.

Reading order: 1 the exercises and their points; 2 their holes in the files; 3 what runs inside
pytest; 4 grading one exercise; 5 reports; 6 the command line.
"""

import argparse
import ast
import csv
import importlib
import importlib.util
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILES = ("kernels.py", "canon_gpt.py", "tasks.py")  # those with exercises

# ---- 1. The exercises ------------------------------------------------------


class Group(NamedTuple):
    """Tests that give their points together, or none."""

    name: str
    points: int
    tests: tuple  # each a test's name, and perhaps words that its parameters must have


class Exercise(NamedTuple):
    title: str
    groups: tuple
    entries: tuple = ()  # the functions whose holes are watched,
    forbidden: tuple = ()  # and what they must not call
    needs_triton: bool = False

    @property
    def points(self):
        return sum(group.points for group in self.groups)


CONV1D = ("torch.conv1d", "torch.nn.functional.conv1d")
SLOW_CONVOLUTIONS = (*CONV1D, "kernels.causal_conv_reference", "canon_gpt.canon_by_hand")
PYTORCH_CONVOLUTIONS = ("kernels.look_back", "kernels.look_ahead", "kernels.causal_conv_pytorch")

EXERCISES = {
    1: Exercise(
        "the definition of the convolution",
        (
            Group("values", 3, (
                "test_convolution_by_hand", "test_eq_4_1_number_by_number",
                "test_convolution_streams causal_conv_reference")),
            Group("gradient", 1, ("test_convolution_gradcheck causal_conv_reference",)),
        ),
        entries=("kernels.causal_conv_reference", "canon_gpt.canon_by_hand"),
        forbidden=CONV1D,
    ),
    2: Exercise(
        "the same in place, and its derivative",
        (
            Group("values", 2, ("test_convolution_forward_alone pytorch",)),
            Group("gradient", 3, (
                "test_convolution_equals_the_definition_in_float64 pytorch",
                "test_convolution_gradcheck causal_conv]",
                "test_no_gradient_is_computed_that_nobody_needs")),
            Group("in place", 1, ("test_eager_convolution_makes_no_shifted_copies",)),
        ),
        entries=(
            "kernels.look_back", "kernels.look_ahead", "kernels.PyTorchConvolution.backward"),
        forbidden=SLOW_CONVOLUTIONS,
    ),
    3: Exercise(
        "the Canon layer in a stream",
        (
            Group("values", 2, ("test_a_canon_layer_streams",)),
            Group("memory", 1, ("test_a_canon_layer_keeps_its_tail_only",)),
        ),
    ),
    4: Exercise(
        "rotary positions",
        (
            Group("distance", 2, ("test_rotary_depends_on_the_distance_only",)),
            Group("dtype", 1, ("test_rotary_keeps_the_dtype",)),
        ),
    ),
    5: Exercise(
        "attention with Canon-B",
        (
            Group("values", 3, ("test_attention_is_a_mean_of_values",)),
            Group("stream", 2, ("test_attention_streams",)),
            Group("memory", 1, ("test_attention_keeps_keys_and_values_only",)),
        ),
    ),
    6: Exercise(
        "MLP and block",
        (
            Group("MLP", 2, ("test_mlp_variants",)),
            Group("block", 2, ("test_canon_points_are_where_the_paper_puts_them",)),
            Group("stream", 1, (
                "test_causality pos", "test_causality mlp canon",
                "test_streaming_equals_one_pass pos", "test_streaming_equals_one_pass mlp canon")),
        ),
    ),
    7: Exercise(
        "Depo's edges, questions and answers",
        (
            Group("text", 4, (
                "test_depo_by_an_independent_checker", "test_depo_order_and_sizes_are_random")),
            Group("answers", 1, ("test_depo_scores",)),
        ),
    ),
    8: Exercise(
        "the linear recurrence, as a loop",
        (
            Group("values", 4, (
                "test_recurrence_is_the_formula",
                "test_recurrence_in_bfloat16_keeps_its_state_in_float32")),
        ),
    ),
    9: Exercise(
        "the same by matrix products",
        (
            Group("values and gradients", 3, (
                "test_chunked_equals_the_recurrence gla",
                "test_chunked_equals_the_recurrence mamba2")),
            Group("stable", 2, (
                "test_chunked_is_stable_for_any_decay gla",
                "test_chunked_is_stable_for_any_decay mamba2",
                "test_a_stream_under_autocast_keeps_its_state_in_float32 gla",
                "test_a_stream_under_autocast_keeps_its_state_in_float32 mamba2")),
            Group("cost", 2, (
                "test_chunked_takes_few_operations_and_no_cube gla",
                "test_chunked_takes_few_operations_and_no_cube mamba2")),
        ),
        entries=("canon_gpt.chunked_linear_attention",),
        forbidden=("canon_gpt.linear_recurrence",),
    ),
    10: Exercise(
        "the delta rule by matrix products",
        (
            Group("values and gradients", 3, ("test_chunked_equals_the_recurrence gdn",)),
            Group("stable", 1, (
                "test_chunked_is_stable_for_any_decay gdn",
                "test_a_stream_under_autocast_keeps_its_state_in_float32 gdn",
                "test_linear_mixers_stream_in_constant_memory")),
            Group("cost", 1, ("test_chunked_takes_few_operations_and_no_cube gdn",)),
        ),
        entries=("canon_gpt.chunked_linear_attention",),
        forbidden=("canon_gpt.linear_recurrence",),
    ),
    11: Exercise(
        "Lano's parser and next-token distribution",
        (
            Group("values", 3, ("test_lano_chart_equals_enumeration",)),
            Group("long sentences", 2, ("test_lano_long_sentences_keep_their_probability",)),
        ),
    ),
    12: Exercise(
        "the Triton kernel, forward",
        (
            Group("values", 3, ("test_convolution_forward_alone triton",)),
            Group("segments", 1, ("test_triton_segments_meet_forward",)),
        ),
        entries=("kernels.TritonConvolution.forward",),
        forbidden=SLOW_CONVOLUTIONS + PYTORCH_CONVOLUTIONS,
        needs_triton=True,
    ),
    13: Exercise(
        "the Triton kernel, backward",
        (
            Group("gradient", 2, ("test_convolution_equals_the_definition_in_float64 triton",)),
            Group("segments", 1, ("test_triton_segments_meet_within_a_sequence",)),
        ),
        entries=("kernels.TritonConvolution.backward",),
        forbidden=SLOW_CONVOLUTIONS + PYTORCH_CONVOLUTIONS,
        needs_triton=True,
    ),
}  # fmt: skip


def group_of(test, exercise):
    """The group that a test belongs to, by its name with parameters. None: to none."""
    function = test.split("[")[0]
    for group in exercise.groups:
        for wanted in group.tests:
            name, *words = wanted.split()
            if function == name and all(word in test for word in words):
                return group
    return None


# ---- 2. Holes --------------------------------------------------------------
#
# A hole is the place of a solution. Above it stands the comment `# exercise N`. It goes to the
# comment `# end of exercise`; where that is missing, to the end of the indented block.

OPENS = re.compile(r"( +)# exercise (\d+)\b")
ENDS = "# end of exercise"


class Problem(ValueError):
    """Why an exercise cannot be tested. The text is one line for the student."""


class Hole(NamedTuple):
    number: int  # of the exercise
    indent: str  # of the comment above
    start: int  # lines[start:end] is the solution
    end: int


def find_holes(lines):
    """All Holes in the lines of a file, in order."""
    found = []
    for i, line in enumerate(lines):
        match = OPENS.match(line)
        if match:
            indent, number = match.groups()
            found.append(Hole(int(number), indent, i + 1, end_of_hole(lines, i + 1, indent)))
    return found


def end_of_hole(lines, start, indent):
    block_ends = None  # where the indented block does
    for i in range(start, len(lines)):
        if lines[i].startswith(indent + ENDS):
            return i
        if OPENS.match(lines[i]):
            break
        if block_ends is None and lines[i].strip() and not lines[i].startswith(indent):
            block_ends = i
    end = i if block_ends is None else block_ends
    while not lines[end - 1].strip():
        end -= 1
    return end


def blank(hole):
    """What stands in an exercise's hole before it is solved."""
    return [f'{hole.indent}raise NotImplementedError("exercise {hole.number}")\n']


def is_blank(solution):
    return "".join(solution).strip().startswith("raise NotImplementedError(")


def fill_holes(text, contents):
    """The text of a file with contents(hole, its lines) in each Hole, and both comments around."""
    lines = text.splitlines(keepends=True)
    filled, done = [], 0
    for hole in find_holes(lines):
        filled += lines[done : hole.start]
        filled += contents(hole, lines[hole.start : hole.end])
        done = hole.end
        if not lines[done : done + 1] or not lines[done].startswith(hole.indent + ENDS):
            filled.append(f"{hole.indent}{ENDS}\n")
    return "".join(filled + lines[done:])


def without_solutions(text, numbers):
    """The text of a file with the holes of these exercises blank."""

    def contents(hole, solution):
        return blank(hole) if hole.number in numbers else solution

    return fill_holes(text, contents)


def check_syntax(hole, solution):
    """Problem unless a hole's lines are whole statements inside its block.

    So a solution can neither leave its function nor swallow what stands below it.
    """
    for i, line in enumerate(solution, hole.start + 1):
        if line.strip() and not line.startswith(hole.indent):
            raise Problem(f"line {i} stands further left than the comment `# exercise`")
    try:
        ast.parse("if True:\n" + "".join(solution))
    except SyntaxError as error:
        raise Problem(f"line {hole.start + (error.lineno or 1) - 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Problem(f"below line {hole.start}: {error}") from None


def solutions_in(text, number):
    """What the holes of an exercise hold, as lists of lines. Problem names a line that is wrong."""
    lines = text.splitlines(keepends=True)
    found = []
    for hole in find_holes(lines):
        if hole.number == number:
            solution = lines[hole.start : hole.end]
            check_syntax(hole, solution)
            found.append(solution)
    return found


def exercises_in(folder):
    """The numbers of the exercises that have holes in a folder's files."""
    numbers = set()
    for name in FILES:
        text = (folder / name).read_text(encoding="utf-8")
        numbers.update(hole.number for hole in find_holes(text.splitlines(keepends=True)))
    return sorted(numbers)


def open_exercises(folder):
    """The numbers of the exercises that still have a blank hole."""
    numbers = set()
    for name in FILES:
        lines = (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        for hole in find_holes(lines):
            if is_blank(lines[hole.start : hole.end]):
                numbers.add(hole.number)
    return sorted(numbers)


# ---- 3. Inside pytest ------------------------------------------------------
#
# `pytest -p grade` loads this file as a plugin. It selects the exercise's tests, and forbids the
# exercise's functions to call what they are to replace. The canaries run last and compare things
# that differ: should one of them pass, then somebody has changed how tests compare.

WATCHED = "CANON_GPT_EXERCISE"  # the environment variable that names the exercise


def pytest_configure(config):
    if WATCHED not in os.environ:
        return
    try:
        forbid(EXERCISES[int(os.environ[WATCHED])])
    except Exception:  # a file that cannot be imported: pytest will say so when it collects
        pass


def pytest_collection_modifyitems(config, items):
    if WATCHED not in os.environ:
        return
    exercise = EXERCISES[int(os.environ[WATCHED])]
    tests = [item for item in items if group_of(item.name, exercise)]
    canaries = [item for item in items if item.name in CANARIES]
    items[:] = tests + canaries


running = 0  # how many calls of the exercise's functions are under way


def forbid(exercise):
    """While a function in exercise.entries runs, those in exercise.forbidden raise an error."""
    if not exercise.entries:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as test_canon.py, before triton is imported
    for name in exercise.forbidden:
        replace(name, refusing)
    for name in exercise.entries:
        replace(name, counted)


def replace(name, wrap):
    """Put wrap(function, name) in the place of a function, "module.function" or in a class."""
    *owners, last = name.split(".")
    owner = importlib.import_module(owners[0])
    for part in owners[1:]:
        owner = getattr(owner, part)
    wrapped = wrap(getattr(owner, last), last)
    if isinstance(vars(owner)[last], staticmethod):
        wrapped = staticmethod(wrapped)
    setattr(owner, last, wrapped)


def counted(function, name):
    def call(*args, **options):
        global running
        running += 1
        try:
            return function(*args, **options)
        finally:
            running -= 1

    return call


def refusing(function, name):
    def call(*args, **options):
        if running > 0:
            raise NotImplementedError(f"your solution must not call {name}")
        return function(*args, **options)

    return call


def test_canary_assert():
    assert [1, 2] == [1, 3]


def test_canary_assert_close():
    tests().assert_close(tensor(1.0), tensor(2.0))


def test_canary_assert_same():
    tests().assert_same("canary", tensor(1.0), tensor(2.0))


def test_canary_equal():
    assert tests().torch.equal(tensor(1.0), tensor(2.0))


def test_canary_relative_error():
    assert tests().relative_error(tensor(1.0), tensor(2.0)) < 1e-2


def test_canary_gradcheck():
    torch = tests().torch
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    assert tests().gradcheck(lambda u: u.detach() * u, x, raise_exception=False)


def test_canary_numpy():
    tests().np.testing.assert_allclose([1.0], [2.0])


CANARIES = [name for name in globals() if name.startswith("test_canary_")]


def tests():
    return sys.modules["test_canon"]  # the one whose tests have just run


def tensor(value):
    return tests().torch.tensor([value])


# ---- 4. Grading one exercise -----------------------------------------------


class Result(NamedTuple):
    """What one exercise is worth."""

    number: int
    points: int
    groups: dict  # {name: whether its tests passed}
    message: str = ""  # what failed first, a line
    skipped: bool = False

    @property
    def exercise(self):
        return EXERCISES[self.number]

    @property
    def solved(self):
        return self.points == self.exercise.points

    @property
    def mark(self):
        if self.skipped:
            return "skipped"
        if self.solved:
            return "solved"
        return "in part" if self.points > 0 else "open"


def grade(number, submission, timeout):
    """The Result of an exercise, with the solution in the folder `submission`."""
    exercise = EXERCISES[number]
    nothing = {group.name: False for group in exercise.groups}
    if exercise.needs_triton and importlib.util.find_spec("triton") is None:
        return Result(number, 0, nothing, "Triton is not installed here", skipped=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            copy = Path(scratch, "copy")
            write_copy(copy, number, submission)
            outcomes = run_tests(copy, number, timeout)
        except Problem as problem:
            return Result(number, 0, nothing, str(problem))
    return judged(number, outcomes)


def write_copy(copy, number, submission):
    """This repository with an exercise's solution from the submission.

    Later exercises are blank: a solution builds only on those before it. So are earlier ones that
    do not even parse; that happens where students test their own copy.
    """
    solutions = {name: solutions_for(name, number, submission) for name in FILES}
    given = sum(solutions.values(), [])
    if all(is_blank(solution) for solution in given):
        raise Problem("not solved yet")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "out"))
    for name in FILES:
        remaining = iter(solutions[name])

        def contents(hole, solution):
            if hole.number == number:
                return next(remaining)
            if hole.number > number or not parses(hole, solution):
                return blank(hole)
            return solution

        text = (ROOT / name).read_text(encoding="utf-8")
        (copy / name).write_text(fill_holes(text, contents), encoding="utf-8")


def solutions_for(name, number, submission):
    """The solutions of an exercise in a file of the submission. Problem if some are missing."""
    ours = (ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True)
    expected = sum(hole.number == number for hole in find_holes(ours))
    if expected == 0:
        return []
    try:
        text = (submission / name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Problem(f"{name} cannot be read: {type(error).__name__}") from None
    try:
        found = solutions_in(text, number)
    except Problem as problem:
        raise Problem(f"{name}, {problem}") from None
    if len(found) != expected:
        counts = f"{len(found)} of {expected} comments `# exercise {number}`"
        raise Problem(f"{name} has {counts}: do not change them")
    return found


def parses(hole, solution):
    try:
        check_syntax(hole, solution)
        return True
    except Problem:
        return False


def run_tests(copy, number, timeout):
    """{test: what was wrong, a line, or ""} of an exercise's tests. Problem if they did not run."""
    report = copy.parent / "report.xml"
    files = ("test_canon.py", "assignment/grade.py")  # the second has the canaries
    process = subprocess.Popen(
        command_of_tests("-q", "--tb=line", f"--junitxml={report}", *files),
        cwd=copy,
        env=environment_of_tests(copy, number),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a process group of its own
    )
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise Problem(f"not done after {timeout:g} seconds") from None
    finally:
        end_group(process)
    try:
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        raise Problem("the tests ended without a report") from None
    return {case.get("name"): outcome(case) for case in cases}


def command_of_tests(*words):
    return [sys.executable, "-m", "pytest", "-p", "grade", "-p", "no:cacheprovider", *words]


def environment_of_tests(copy, number):
    environment = {**os.environ, WATCHED: str(number), "PYTHONPATH": str(copy / "assignment")}
    environment.pop("PYTEST_ADDOPTS", None)
    return environment


def end_group(process):
    """End the process, and all that it started and did not move elsewhere."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except AttributeError:  # Windows
        process.kill()
    except (ProcessLookupError, PermissionError):  # it has ended
        pass
    process.wait()


def outcome(case):
    """What was wrong with a test, in a line; "" if it passed. A test must not skip itself."""
    for kind in ("error", "failure", "skipped"):
        entry = case.find(kind)
        if entry is None:
            continue
        if kind == "error":  # mostly while collecting: the reason stands at the end
            reasons = [line[1:] for line in (entry.text or "").splitlines() if line[:2] == "E "]
            return one_line("the file cannot be imported: " + " ".join(reasons[-1:]))
        if kind == "skipped":
            return "it was skipped"
        return one_line(entry.get("message") or "it failed")
    return ""


def one_line(text, most=200):
    """A failure's message without what pytest adds to it."""
    words = text.removeprefix("AssertionError: ").split("\nassert ")[0].split()
    return " ".join(words)[:most]


def judged(number, outcomes):
    """The Result of an exercise from its tests' outcomes."""
    exercise = EXERCISES[number]
    passed = {group.name: False for group in exercise.groups}
    if "test_canon" in outcomes:
        return Result(number, 0, passed, outcomes["test_canon"])
    for canary in CANARIES:
        if canary not in outcomes:
            return Result(number, 0, passed, "the tests were cut short")
        if outcomes[canary] == "":
            return Result(number, 0, passed, "the tests were tampered with: a canary passes")

    message, points = "", 0
    for group in exercise.groups:
        tests = [test for test in outcomes if group_of(test, exercise) == group]
        failed = [test for test in tests if outcomes[test]]
        passed[group.name] = bool(tests) and not failed
        if passed[group.name]:
            points += group.points
        elif not message:
            reason = outcomes[failed[0]] if failed else "no test ran"
            message = f"{group.name}: {reason}"
    return Result(number, points, passed, message)


# ---- 5. Reports ------------------------------------------------------------


def print_line(result):
    title = result.exercise.title
    score = f"{result.points} of {result.exercise.points}"
    print(f"{result.number:3}  {title:44}{result.mark:9}{score:>8}", flush=True)
    if result.message:
        print(f"     {result.message}", flush=True)


def total(results):
    """(points, of how many), over the exercises that were not skipped."""
    graded = [result for result in results if not result.skipped]
    return sum(r.points for r in graded), sum(r.exercise.points for r in graded)


def write_json(results, path):
    """Gradescope's results.json: https://gradescope-autograders.readthedocs.io"""
    tests = []
    for result in results:
        test = {
            "name": f"{result.number}. {result.exercise.title}",
            "score": result.points,
            "max_score": 0 if result.skipped else result.exercise.points,
            "output": describe(result),
            "visibility": "visible",
        }
        if not result.skipped:
            test["status"] = "passed" if result.solved else "failed"
        tests.append(test)
    points, most = total(results)
    whole = {"score": points, "output": f"{points} of {most} points", "tests": tests}
    Path(path).write_text(json.dumps(whole, indent=1) + "\n")


def describe(result):
    lines = []
    for group in result.exercise.groups:
        got = group.points if result.groups[group.name] else 0
        lines.append(f"{group.name}: {got} of {group.points}")
    if result.skipped:
        lines = ["skipped"]
    if result.message:
        lines.append(result.message)
    return "\n".join(lines)


def write_csv(table, numbers, path):
    """A row for each submission: its folder, the points of each exercise, their sum."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["folder", *numbers, "points"])
        for folder, results in table.items():
            scores = ["skipped" if result.skipped else result.points for result in results]
            writer.writerow([folder, *scores, total(results)[0]])


# ---- 6. The command line ---------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Grade the exercises; see assignment/handout.md.",
        epilog="Exit status: 0 if all are solved or skipped, 1 if not, 2 for bad input.",
    )
    parser.error = lambda message: parser.exit(2, f"grade.py: {message}\n")
    add = parser.add_argument
    add("exercise", type=int, nargs="*", metavar="N", help="default: all that are set")
    add("--of", type=Path, nargs="+", metavar="FOLDER", help="somebody else's copies")
    add("--timeout", type=float, default=120, metavar="S", help="seconds an exercise (120)")
    add("--json", type=Path, metavar="FILE", help="write Gradescope's results.json")
    add("--csv", type=Path, metavar="FILE", help="write a row for each folder")
    args = parser.parse_args(argv)

    for number in args.exercise:
        if number not in EXERCISES:
            parser.error(f"exercise = {number}: allowed: 1 to {len(EXERCISES)}")
    if args.timeout <= 0:
        parser.error(f"--timeout = {args.timeout:g}: must be positive")
    if args.json and args.of and len(args.of) > 1:
        parser.error("--json is for one folder; for several there is --csv")
    for folder in args.of or []:
        if not folder.is_dir():
            parser.error(f"--of {folder}: is no folder")
    still_open = open_exercises(ROOT)
    if args.of and still_open:
        parser.error(f"--of: exercise {still_open[0]} is open here: grade with the solutions")

    numbers = args.exercise or exercises_in(ROOT)
    for number in numbers:
        if number not in exercises_in(ROOT):
            parser.error(f"exercise {number} has no hole here")
    if len(args.exercise) == 1 and not (args.of or args.json or args.csv):
        return show_pytest(numbers[0])
    table = {}
    for folder in args.of or [ROOT]:
        if args.of:
            print(f"{folder}:")
        table[folder] = []
        for number in numbers:
            result = grade(number, folder, args.timeout)
            print_line(result)
            table[folder].append(result)
        points, most = total(table[folder])
        print(f"{points} of {most} points")
    if args.json:
        write_json(table[folder], args.json)
    if args.csv:
        write_csv(table, numbers, args.csv)
    results = sum(table.values(), [])
    return int(not all(result.solved or result.skipped for result in results))


def show_pytest(number):
    """Test an exercise of this copy, as it stands, up to the first failure. The exit status."""
    command = command_of_tests("-x", "test_canon.py")  # without canaries
    done = subprocess.run(command, cwd=ROOT, env=environment_of_tests(ROOT, number))
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
