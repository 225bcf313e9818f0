#!/usr/bin/env bash
# OpenVINO 2026.4.1: in a model converted from PyTorch, the cumsum of a mask starts again after 255,
# and x[rows, -1 - padding] takes tokens from other rows.
#
# mask.cumsum(1) - 1 gives the positions of tokens, and (tokens == end).cumsum(1) the number of the
# document that a token is in. PyTorch counts in int64. The converted model counts in the mask's own
# type, for which the CPU has 8 bits: 255 is followed by 0. So from the 256th token on, positions
# begin again at -1. A mask of uint8 does the same, and one of int8 is negative from 128 on.
#
# With two index tensors, as in x[rows, columns], OpenVINO makes one number of each pair, row times
# width plus column, and a negative column stays negative. So column -1 of a row is the last token
# of the row before, and for the first row that of the last. The sequences of a batch mix.
#
# One would expect PyTorch's results, or an error. Nothing is reported. PyTorch's documentation
# says that a sum of integers is an int64, and that negative indices count from the end. These are
# right: mask.long().cumsum(1), mask.sum(1), columns that aren't negative, x[:, [-1]], x[rows, -1]
# with a plain number, and each of these models if it goes to OpenVINO by way of ONNX.
# (// of negative integers is wrong, too: https://github.com/openvinotoolkit/openvino/issues/38248.)
#
# Below are the positions of the tokens 253, 254, 255, 256 and 599, counting from 0, of a text of
# 600. Then come the last tokens of three texts, the second of which ends in padding, two zeros.
#
# Seen on 2026-11-29 (PyTorch 2.13.0, a CPU):
#
#   mask.long().cumsum(1) - 1 PyTorch [253, 254, 255, 256, 599], OpenVINO [253, 254, 255, 256, 599]
#   x[rows, 4 - padding]      PyTorch [15, 23, 35], OpenVINO [15, 23, 35]
#   mask.cumsum(1) - 1        PyTorch [253, 254, 255, 256, 599], OpenVINO [253, 254, -1, 0, 87]
#   x[rows, -1 - padding]     PyTorch [15, 23, 35], OpenVINO [35, 13, 0]
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1 torch==2.13.0 packaging==26.4 \
    numpy==2.4.6
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import openvino
import torch
from torch import nn

SHOWN = [253, 254, 255, 256, 599]
TEXT = torch.full((1, 600), 7)
BATCH = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0], [31, 32, 33, 34, 35]])
ROWS = torch.arange(3)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, tokens):
        return self.function(tokens)


def converted(function, tokens):
    """the result of the converted model, which is the same if it was traced and if exported"""
    model = Model(function)
    traced = openvino.convert_model(model, example_input=tokens)
    exported = openvino.convert_model(torch.export.export(model, (tokens,)))
    results = [openvino.compile_model(m, "CPU")(tokens.numpy())[0] for m in (traced, exported)]
    assert (results[0] == results[1]).all()
    return results[0].tolist()


def show(title, function, tokens):
    expected, found = function(tokens).tolist(), converted(function, tokens)
    print(f"{title:25} PyTorch {expected}, OpenVINO {found}")
    return expected, found


def positions(mask):
    return (mask.cumsum(1) - 1)[0, SHOWN]


def padding(tokens):
    return (tokens == 0).sum(1)


for title, function, tokens in (
    ("mask.long().cumsum(1) - 1", lambda tokens: positions((tokens > 0).long()), TEXT),
    ("x[rows, 4 - padding]", lambda tokens: tokens[ROWS, 4 - padding(tokens)], BATCH),
):
    expected, found = show(title, function, tokens)
    assert found == expected
expected, found = show("mask.cumsum(1) - 1", lambda tokens: positions(tokens > 0), TEXT)
assert expected == SHOWN and found == [(token + 1) % 256 - 1 for token in SHOWN]
expected, found = show(
    "x[rows, -1 - padding]", lambda tokens: tokens[ROWS, -1 - padding(tokens)], BATCH
)
flat = BATCH.flatten()
assert expected == [15, 23, 35]
assert found == flat[(5 * ROWS - 1 - padding(BATCH)) % len(flat)].tolist()
PYTHON
