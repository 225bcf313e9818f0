"""Make an assignment of this repository:   python assignment/make.py ../assignment

Writes a copy without the solutions. In kernels.py, canon_gpt.py and tasks.py, "# exercise N" stands
above a solution, which goes to the end of its block, or to "# end of exercise". In the copy each
solution is a line `raise NotImplementedError("exercise N")`. Exercises build only on those before
them. `--solved 7` leaves the first seven in place, for a course that begins later.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from grade import EXERCISES, FILES, IGNORED, ROOT  # noqa: E402

SOLUTION = re.compile(
    r"^( *)# (exercise (\d+).*)\n"
    r"(?:\n*(?!\1# end of exercise)\1.*\S.*\n)+(?:\1# end of exercise\n)?",
    re.MULTILINE,
)


def without_solutions(text, solved=0):
    """The text of a file without the solutions of the exercises after the first `solved`."""

    def blank(match):
        indent, title, number = match.groups()
        if int(number) <= solved:
            return match[0]
        return f'{indent}raise NotImplementedError("{title}")\n'

    return SOLUTION.sub(blank, text)


def write_assignment(folder, solved=0):
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    for name in FILES:
        (folder / name).write_text(without_solutions((ROOT / name).read_text(), solved))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write a copy without the exercises' solutions.")
    parser.error = lambda message: parser.exit(2, f"make.py: {message}\n")
    parser.add_argument("folder", type=Path, help="where to; it must not exist yet")
    parser.add_argument("--solved", type=int, default=0, metavar="N", help="leave the first N in")
    args = parser.parse_args(argv)
    if not 0 <= args.solved < len(EXERCISES):
        parser.error(f"--solved = {args.solved}: allowed: 0 to {len(EXERCISES) - 1}")
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    if ROOT in args.folder.resolve().parents:
        parser.error(f"{args.folder} is inside the repository")
    write_assignment(args.folder, args.solved)


if __name__ == "__main__":
    main()
