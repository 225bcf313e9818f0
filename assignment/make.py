"""Make an assignment of this repository:   python assignment/make.py ../assignment

    python assignment/make.py ../assignment                  all exercises are open
    python assignment/make.py ../assignment --solved 7       the first seven stay solved
    python assignment/make.py ../assignment --only 1,3,4     only these are open
    python assignment/make.py ../assignment --classroom      with a workflow for GitHub Classroom
    python assignment/make.py --gradescope autograder.zip    the grader, in Gradescope's format

The copy has what git tracks, and nothing else. Each solution that is left out becomes a line
`raise NotImplementedError("exercise N")` between the comments `# exercise N` and
`# end of exercise`. Exercises that stay solved lose their comments.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from grade import EXERCISES, FILES, ROOT, find_holes, without_solutions  # noqa: E402

# ---- 1. Files --------------------------------------------------------------


class MakeError(ValueError):
    """Why there is no assignment. The text is one line for the user."""


def git(*words):
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise MakeError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def tracked_files():
    """The paths of what git tracks, but for this project's own checks. MakeError if they changed."""
    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT:
        raise MakeError(f"{ROOT} is no git repository of its own: clone it")
    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    if changed:
        raise MakeError(f"{changed[0][3:]} has changes that are not committed")
    return [name for name in git("ls-files", "-z").split("\0") if name and name[:4] != ".ci/"]


def students_text(text, numbers):
    """A file's text with these exercises open, and without the comments of the others."""
    text = without_solutions(text, numbers)  # which puts both comments around every hole
    lines = text.splitlines(keepends=True)
    for hole in find_holes(lines):
        if hole.number not in numbers:
            lines[hole.start - 1] = lines[hole.end] = ""
    return "".join(lines)


def write_assignment(folder, numbers, classroom=False):
    """A copy of the repository with these exercises open."""
    for name in tracked_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        contents = (ROOT / name).read_bytes()
        if name in FILES:
            contents = students_text(contents.decode(), numbers).encode()
        target.write_bytes(contents)
    if classroom:
        workflow = folder / ".github/workflows/classroom.yml"
        workflow.parent.mkdir(parents=True, exist_ok=True)
        workflow.write_text(classroom_workflow(numbers))


# ---- 2. GitHub Classroom ---------------------------------------------------

CLASSROOM = """\
# Tests each exercise at each push. Students can change this file: it informs them, and grades nobody.
name: exercises
on: [push]
jobs:
  exercises:
    runs-on: ubuntu-latest
    timeout-minutes: 40
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: install
        run: pip install --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt
"""

CLASSROOM_STEP = """\
      - name: exercise {number}, {title}
        if: always()
        timeout-minutes: 3
        run: python assignment/grade.py {number}
"""


def classroom_workflow(numbers):
    """A GitHub Actions workflow with a step for each exercise."""
    steps = [CLASSROOM_STEP.format(number=n, title=EXERCISES[n].title) for n in numbers]
    return CLASSROOM + "".join(steps)


# ---- 3. Gradescope ---------------------------------------------------------
#
# Gradescope unpacks the zip into /autograder/source, runs setup.sh once, and for each submission
# run_autograder. To try both elsewhere, set AUTOGRADER to another folder.

SETUP = """\
#!/usr/bin/env bash
# Runs once, when the autograder is built.
set -euo pipefail
cd "${AUTOGRADER:-/autograder}"
if ! python3 -m venv venv; then
    apt-get update
    apt-get install -y python3-venv
    python3 -m venv venv
fi
# The small PyTorch for CPUs, unless the environment names another index.
export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu}"
venv/bin/pip install --no-cache-dir -r source/canon-gpt/requirements.txt
"""

RUN = """\
#!/usr/bin/env bash
# Runs for each submission. The grader's exit status is 1 if an exercise is not solved.
cd "${{AUTOGRADER:-/autograder}}" || exit 2
export OMP_NUM_THREADS=1
mkdir -p results
venv/bin/python source/canon-gpt/assignment/grade.py {numbers} \\
    --of submission --json results/results.json
status=$?
[ "$status" -le 1 ]
"""


def write_gradescope(path, numbers):
    """The zip of an autograder: two scripts, and this repository with its solutions."""
    run = RUN.format(numbers=" ".join(map(str, numbers)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("setup.sh", SETUP), ("run_autograder", run)):
            entry = zipfile.ZipInfo(name, date_time=(2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o755 << 16  # executable
            archive.writestr(entry, text)
        for name in tracked_files():
            archive.write(ROOT / name, f"canon-gpt/{name}")


# ---- 4. The command line ---------------------------------------------------


def numbers_of(text):
    return sorted({int(number) for number in text.split(",")})


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write a copy without the exercises' solutions.")
    parser.error = lambda message: parser.exit(2, f"make.py: {message}\n")
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="where to; it must not exist yet")
    add("--solved", type=int, metavar="N", help="leave the first N exercises solved")
    add("--only", type=numbers_of, metavar="N,N", help="open these exercises only")
    add("--classroom", action="store_true", help="add a workflow for GitHub Classroom")
    add("--gradescope", type=Path, metavar="ZIP", help="write Gradescope's autograder")
    args = parser.parse_args(argv)

    last = len(EXERCISES)
    if args.folder is None and args.gradescope is None:
        parser.error("name a folder, or --gradescope with a file")
    if args.classroom and args.folder is None:
        parser.error("--classroom needs a folder")
    if args.solved is not None and args.only is not None:
        parser.error("--solved and --only exclude each other")
    if args.solved is not None and not 0 <= args.solved < last:
        parser.error(f"--solved = {args.solved}: allowed: 0 to {last - 1}")
    numbers = args.only or list(range(1 + (args.solved or 0), last + 1))
    for number in numbers:
        if number not in EXERCISES:
            parser.error(f"--only: {number}: allowed: 1 to {last}")
    for target in (args.folder, args.gradescope):
        if target is not None and target.exists():
            parser.error(f"{target} exists")
    if args.folder is not None and ROOT in args.folder.resolve().parents:
        parser.error(f"{args.folder} is inside the repository")
    try:
        if args.folder is not None:
            write_assignment(args.folder, numbers, args.classroom)
        if args.gradescope is not None:
            write_gradescope(args.gradescope, numbers)
    except MakeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
