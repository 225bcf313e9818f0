#!/usr/bin/env bash
# torch.optim.Muon with nesterov=False overwrites its momentum if the weights are bfloat16.
#
# Muon divides a bfloat16 copy of the update by its length. If the update is bfloat16 already,
# `.bfloat16()` makes no copy, and without Nesterov's momentum the update is the momentum buffer
# itself. So after each step the buffer has length 1. If gradients are much shorter, they hardly
# turn it any more, and the weights go on in the direction of the first gradient. Float32 weights
# are right, and so is nesterov=True, the default. (PyTorch's pull request 190597 mentions this.)
#
# Here the first gradient is A, which has length 0.01, and the next 60 are -A. The buffer, an
# average of the gradients, should turn around at step 2.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU; 2.14.1 does the same):
#
#   nesterov=True,  float32:  length 0.0005 after a step, turns at step 2
#   nesterov=True,  bfloat16: length 0.0005 after a step, turns at step 2
#   nesterov=False, float32:  length 0.0005 after a step, turns at step 2
#   nesterov=False, bfloat16: length 1.0000 after a step, never turns
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


def trained(dtype, nesterov):
    """(the buffer's length after one step, the first step at which it points along -A)"""
    torch.manual_seed(0)
    A = torch.randn(8, 16)
    A *= 0.01 / A.norm()
    A = A.to(dtype)
    weight = torch.nn.Parameter(torch.zeros(8, 16, dtype=dtype))
    optimizer = torch.optim.Muon([weight], weight_decay=0.0, nesterov=nesterov)
    length = None
    for step in range(1, 62):
        weight.grad = A.clone() if step == 1 else -A
        optimizer.step()
        buffer = optimizer.state[weight]["momentum_buffer"]
        length = length or buffer.norm().item()
        if (buffer * A).sum() < 0:
            return length, step
    return length, None


for nesterov in (True, False):
    for dtype in (torch.float32, torch.bfloat16):
        length, step = trained(dtype, nesterov)
        turns = f"turns at step {step}" if step else "never turns"
        setting = f"{nesterov=}, ".ljust(16) + f"{str(dtype)[6:]}:".ljust(9)
        print(f"{setting} length {length:.4f} after a step, {turns}")
        is_right = step == 2 and length < 0.001
        assert is_right == (nesterov or dtype == torch.float32)
PYTHON
