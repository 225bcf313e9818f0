#!/usr/bin/env bash
# PyTorch 2.11.0: inside torch.compile, torch.compiler.is_exporting() is True.
#
# By its documentation it is stricter than is_compiling(), and is True only when torch.export is
# used. But until 2.11, Dynamo puts True in its place in all code that it compiles. So a library
# that asks it before it uses a fast kernel, which no exporter knows, has its slow path in each
# compiled model, and no warning. The results are right, so only a profile shows it.
#
# Seen on 2026-11-28 with 2.7.0, 2.9.1 and 2.11.0 (with a GPU, too); 2.12.0 and 2.13.0 are right.
#
#   eager: False
#   torch.compile: True, although is_compiling() is True and nothing is exported
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def exporting(x):
    return x + 1 if torch.compiler.is_exporting() else x


zero = torch.zeros(())
eager = bool(exporting(zero))
print(f"eager: {eager}")
compiled = bool(torch.compile(exporting, backend="eager")(zero))
print(f"torch.compile: {compiled}, although is_compiling() is True and nothing is exported")
assert (eager, compiled) == (False, True)
PYTHON
