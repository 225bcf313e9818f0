"""Make an assignment of this repository:   python assignment/make.py ../assignment

    python assignment/make.py ../assignment                  all exercises are open
    python assignment/make.py ../assignment --only 1,3,4     only these are open

The copy has what git tracks, and nothing else. Each solution that is left out becomes a line
`raise NotImplementedError("exercise N")` between the comments `# exercise N` and
`# end of exercise`.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from grade import FILES, HOLE, ROOT, opened


def write_assignment(folder, only):
    """A copy of the repository with these exercises open; all, if `only` is None."""

    def emptied(hole):
        return opened(hole) if only is None or int(hole[2]) in only else hole[0]

    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
        if name in FILES:
            target.write_text(HOLE.sub(emptied, (ROOT / name).read_text()))


def numbers(text):
    return {int(number) for number in text.split(",")}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to; it must not exist yet")
    parser.add_argument("--only", type=numbers, metavar="N,N", help="open these exercises only")
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    write_assignment(args.folder, args.only)


if __name__ == "__main__":
    main()
