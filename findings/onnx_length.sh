#!/usr/bin/env bash
# PyTorch 2.13.0 with onnxscript 0.7.2: with a dynamic length T, torch.onnx.export rounds -(-T // 4)
# down, and replaces int(0.5 * T) by its value for the example.
#
# -(-T // 4) is how many chunks of 4 it takes for T tokens, the last one perhaps not full. Python
# rounds -T // 4 down. The exporter writes it as ONNX's Div, which rounds integers towards 0. So the
# number of chunks is rounded down. If tokens are padded to that many chunks, the padding is
# negative, and cuts off the last ones. There is no error.
#
# For int(0.5 * T), torch.export puts in the example's number and remembers, as a guard, that T must
# give the same. Its own module raises an error if another T doesn't. In ONNX nothing is left of the
# guard, so each T gets the number of the example. Nothing is reported while it is exported.
#
# One would expect Python's numbers, or an error. These are right: (T + 3) // 4, -T % 4,
# math.ceil(T / 4), T // 2, and // of integer tensors, which onnxscript's pull request 2592 mended.
# (For lengths, a comment in its source says that only positive numbers are meant.
# onnx/tensorflow-onnx#2174 reports the same formula there.)
#
# Below are the numbers for T = 5, 8, 11 and 12, exported with an example of T = 7. At last come the
# sums of the numbers from 1 to 5 in chunks of 4.
#
# Seen on 2026-11-29 (ONNX Runtime 1.32.0, a CPU):
#
#   (T + 3) // 4     PyTorch [2, 2, 3, 3], torch.export [2, 2, 3, 3], ONNX Runtime [2, 2, 3, 3]
#   math.ceil(T / 4) PyTorch [2, 2, 3, 3], torch.export [2, 2, 3, 3], ONNX Runtime [2, 2, 3, 3]
#   -T % 4           PyTorch [3, 0, 1, 0], torch.export [3, 0, 1, 0], ONNX Runtime [3, 0, 1, 0]
#   T // 2           PyTorch [2, 4, 5, 6], torch.export [2, 4, 5, 6], ONNX Runtime [2, 4, 5, 6]
#   -(-T // 4)       PyTorch [2, 2, 3, 3], torch.export [2, 2, 3, 3], ONNX Runtime [1, 2, 2, 3]
#   int(0.5 * T)     PyTorch [2, 4, 5, 6], torch.export error, ONNX Runtime [3, 3, 3, 3]
#   sums of chunks   PyTorch [[10.0, 5.0]], torch.export [[10.0, 5.0]], ONNX Runtime [[10.0]]
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import math

import onnxruntime
import torch
from torch import nn
from torch.export import Dim
from torch.nn.functional import pad

LENGTHS = (5, 8, 11, 12)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def first(length):
    return torch.arange(1.0, length + 1)


def by_export(program, x):
    try:
        return program.module()(x).tolist()
    except AssertionError as error:  # a guard
        assert "Guard failed" in str(error)
        return "error"


def results(function, lengths):
    """(PyTorch's, torch.export's, ONNX Runtime's) results for each length"""
    program = torch.export.export(Model(function), (first(7),), dynamic_shapes=({0: Dim.DYNAMIC},))
    torch.onnx.export(program, f="model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("model.onnx")
    name = session.get_inputs()[0].name
    inputs = [first(length) for length in lengths]
    return (
        [function(x).tolist() for x in inputs],
        [by_export(program, x) for x in inputs],
        [session.run(None, {name: x.numpy()})[0].tolist() for x in inputs],
    )


def number(formula):
    """a function of x that has formula(T) ones"""
    return lambda x: (0 * x.sum() + formula(x.shape[0])).long()


def chunk_sums(x):
    T = x.shape[0]
    return pad(x, (0, -(-T // 4) * 4 - T)).unflatten(0, (-1, 4)).sum(1)


def show(title, function, lengths=LENGTHS):
    python, program, onnx = results(function, lengths)
    program = "error" if program == ["error"] * len(lengths) else program
    print(f"{title:16} PyTorch {python}, torch.export {program}, ONNX Runtime {onnx}")
    return python, program, onnx


for title, formula in (
    ("(T + 3) // 4", lambda T: (T + 3) // 4),
    ("math.ceil(T / 4)", lambda T: math.ceil(T / 4)),
    ("-T % 4", lambda T: -T % 4),
    ("T // 2", lambda T: T // 2),
):
    python, program, onnx = show(title, number(formula))
    assert python == program == onnx
python, program, onnx = show("-(-T // 4)", number(lambda T: -(-T // 4)))
assert python == program and onnx == [T // 4 for T in LENGTHS]
python, program, onnx = show("int(0.5 * T)", number(lambda T: int(0.5 * T)))
assert program == "error" and onnx == [3, 3, 3, 3]
python, program, onnx = show("sums of chunks", chunk_sums, lengths=(5,))
assert python == program == [[10.0, 5.0]] and onnx == [[10.0]]
PYTHON
