"""Make an assignment of this repository:   python assignment/make.py ../assignment

    python assignment/make.py ../assignment                  all exercises are open
    python assignment/make.py ../assignment --only 1 3 4     only these are open

The copy has what git tracks and nothing else. Where an exercise is open, its solution is replaced
by a line `raise NotImplementedError("exercise N")` between the comments `# exercise N` and
`# end of exercise`.
"""

import argparse
import shutil
import subprocess
from pathlib import Path

from grade import FILES, HOLE, ROOT, opened


def write_assignment(folder, only=None):
    """A copy of the repository with these exercises open; all, if `only` is None."""

    def emptied(hole):
        return opened(hole) if only is None or int(hole["number"]) in only else hole[0]

    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    for name in FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        (folder / name).write_text(HOLE.sub(emptied, text), encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="make.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="where to; it must not exist yet")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="open these exercises")
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    write_assignment(args.folder, args.only)


if __name__ == "__main__":
    main()
