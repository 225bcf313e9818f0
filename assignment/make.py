"""Make an assignment of this repository:   python assignment/make.py ../assignment

    python assignment/make.py ../assignment                  all exercises are open
    python assignment/make.py ../assignment --only 1 3 4     only these are open

The copy has the files that exercises.py lists, and handout.md as its README.md. Where an exercise
is open, its functions have only a signature, a docstring, and a line that raises an error.
"""

import shutil
from pathlib import Path

from exercises import FUNCTIONS
from grade import ROOT, copy_repository, make_parser, write_bodies


def main(argv=None):
    parser = make_parser("make.py", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="where to; it must not exist yet")
    add("--only", type=int, nargs="+", default=FUNCTIONS, choices=FUNCTIONS, metavar="N")
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    copy_repository(args.folder)
    shutil.copyfile(ROOT / "assignment/handout.md", args.folder / "README.md")
    for number in args.only:
        write_bodies(args.folder, number)


if __name__ == "__main__":
    main()
