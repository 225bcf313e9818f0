"""Pack what you hand in:   python assignment/pack.py

Writes submission.zip: kernels.py, canon_gpt.py and tasks.py, report.pdf or report.md, examples/,
the figures *.png and, of each run in out/, its recipe and log (not its weights, which are large).
"""

import argparse
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = (
    "kernels.py",
    "canon_gpt.py",
    "tasks.py",
    "report.pdf",
    "report.md",
    "*.png",
    "examples/*.py",
    "out/*/config.json",
    "out/*/metrics.jsonl",
)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Pack what you hand in.")
    parser.add_argument("--out", type=Path, default=Path("submission.zip"), metavar="ZIP")
    args = parser.parse_args(argv)
    with zipfile.ZipFile(args.out, "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in CONTENTS:
            paths = sorted(ROOT.glob(pattern))
            for path in paths:
                archive.write(path, path.relative_to(ROOT))
            print(f"{pattern:20} {len(paths)} file{'' if len(paths) == 1 else 's'}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
