#!/usr/bin/env bash
# ExecuTorch 1.5.1: the remainder of negative integers has the wrong sign.
#
# In PyTorch, as in Python, -1 % 4 is 3: a remainder has the divisor's sign. In a model that was
# exported to ExecuTorch it is -1, as in C, for tensors of all signed integer types, and for numbers
# and tensors as divisors. Floats are right, and so is a // 4, so a == a // 4 * 4 + a % 4 no longer
# holds. Nothing is reported. (In the source, remainder_override() corrects the sign for floats, as
# its comment says, and returns a % b for integers. torch.fmod is C's remainder in both.)
#
# An exported model meets this where it keeps its last inputs or keys in a ring, and asks how old
# each slot is: (newest - slot) % size. Here is a convolution that keeps its last four inputs so,
# and picks the weight by the age. It is right only where the newest input is in the last slot.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   a % 4:            [2, 3, 0, 1, 2] becomes [-2, -1, 0, 1, 2] for int8, int16, int32, int64
#   a % -4:           [-2, -1, 0, -3, -2] becomes [-2, -1, 0, 1, 2] for int8, int16, int32, int64
#   a // 4:           right
#   torch.fmod(a, 4): right
#   a convolution's ring, newest in slot 0, 1, 2, 3: off by 0.96, 0.67, 0.79, 0.00
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet executorch==1.5.1 torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def exported(function, *inputs):
    """The function as an ExecuTorch program"""
    program = to_edge_transform_and_lower(torch.export.export(Model(function), inputs))
    method = Runtime.get().load_program(program.to_executorch().buffer).load_method("forward")
    return lambda *inputs: method.execute(list(inputs))[0]


FUNCTIONS = {
    "a % 4": lambda a: a % 4,
    "a % -4": lambda a: a % -4,
    "a // 4": lambda a: a // 4,
    "torch.fmod(a, 4)": lambda a: torch.fmod(a, 4),
}
DTYPES = torch.float32, torch.int8, torch.int16, torch.int32, torch.int64
for name, function in FUNCTIONS.items():
    wrong = []
    for dtype in DTYPES:
        a = torch.arange(-2, 3).to(dtype)
        right, got = function(a), exported(function, a)(a)
        if not torch.equal(got, right):
            wrong.append(str(dtype)[6:])
            right, got = right.tolist(), got.tolist()
            shown = f"{right} becomes {got} for "
    print(f"{name}:".ljust(17), shown + ", ".join(wrong) if wrong else "right")
    assert wrong == (["int8", "int16", "int32", "int64"] if "%" in name else [])


def step(ring, newest, weight):
    """sum_i weight[i] * x_{t-i}, where the slot `newest` of the ring (4, D) has x_t"""
    age = (newest - torch.arange(4)) % 4
    picked = (age[:, None] == torch.arange(4)).to(weight.dtype)  # (slot, age)
    return (picked @ weight * ring).sum(0)


torch.manual_seed(0)
weight, ring = torch.randn(4, 8), torch.randn(4, 8)
program = exported(step, ring, torch.tensor([0]), weight)
off = []
for slot in range(4):
    inputs = ring, torch.tensor([slot]), weight
    off.append((program(*inputs) - step(*inputs)).norm().item() / step(*inputs).norm().item())
print("a convolution's ring, newest in slot 0, 1, 2, 3: off by", ", ".join(f"{o:.2f}" for o in off))
assert min(off[:3]) > 0.1 and off[3] < 1e-6
PYTHON
