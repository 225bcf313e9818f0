#!/usr/bin/env bash
# PyTorch 2.13.0: a model compiled by AOTInductor reads an input as if it had the strides of export.
#
# A layer that generates token by token takes in its last three inputs, and hands on the next three.
# Often these are a slice of a longer tensor, `seen[:, 1:]`. With two sequences or more, such a slice
# is not contiguous. The compiled step returns it with the right strides; but when it gets it back,
# as its input of the next token, it takes it for contiguous, like the tensor that it was exported
# with. From the second token on its results are wrong, without an error. With one sequence they are
# right, because then the slice is contiguous.
#
# One would expect the results of eager mode and of torch.compile, or an error. There is a check, but
# only for those who set AOTI_RUNTIME_CHECK_INPUTS=1 while the model runs; then the second step ends
# in an error. Whoever writes the layer can return `seen[:, 1:].clone()`.
#
# Here are eight tokens, and how far each way is from eager mode in the last one, at most.
#
# Seen on 2026-11-29 (PyTorch 2.13.0, a CPU):
#
#   sequences 1, a slice: torch.compile right, AOTInductor right
#   sequences 2, a slice: torch.compile right, AOTInductor wrong
#   sequences 2, a copy: torch.compile right, AOTInductor right
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
cat > step.py <<'PYTHON'
import sys

import torch
from torch import nn


class Step(nn.Module):
    """One token of a causal convolution over four."""

    def __init__(self, copies):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))
        self.copies = copies

    def forward(self, x, last):  # (B, 1, 16) and (B, 3, 16)
        seen = torch.cat([last, x], dim=1)
        y = (seen * self.weight).sum(dim=1, keepdim=True)
        following = seen[:, 1:]
        return y, following.clone() if self.copies else following


def eight_tokens(step, sequences):
    torch.manual_seed(1)
    last = torch.zeros(sequences, 3, 16)
    for _ in range(8):
        y, last = step(torch.randn(sequences, 1, 16), last)
    return y


def results(sequences, copies):
    torch.manual_seed(0)
    step = Step(copies).eval()
    example = torch.zeros(sequences, 1, 16), torch.zeros(sequences, 3, 16)
    program = torch.export.export(step, example)
    package = torch._inductor.aoti_compile_and_package(program, package_path="step.pt2")
    return {
        "eager": eight_tokens(step, sequences),
        "torch.compile": eight_tokens(torch.compile(step), sequences),
        "AOTInductor": eight_tokens(torch._inductor.aoti_load_package(package), sequences),
    }


if "--checked" in sys.argv:
    results(2, copies=False)
    sys.exit()
with torch.no_grad():
    for sequences, copies in ((1, False), (2, False), (2, True)):
        found = results(sequences, copies)
        words = []
        for name in ("torch.compile", "AOTInductor"):
            is_right = torch.allclose(found[name], found["eager"], atol=1e-5)
            words.append(f"{name} {'right' if is_right else 'wrong'}")
            assert is_right == (name == "torch.compile" or sequences == 1 or copies)
        print(f"sequences {sequences}, {'a copy' if copies else 'a slice'}: {', '.join(words)}")
PYTHON
venv/bin/python step.py 2> errors.txt || { cat errors.txt; exit 1; }
if AOTI_RUNTIME_CHECK_INPUTS=1 venv/bin/python step.py --checked > checked.txt 2>&1; then
  echo "the check raises no error"
  exit 1
fi
grep -q "stride" checked.txt
