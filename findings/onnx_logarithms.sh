#!/usr/bin/env bash
# PyTorch 2.13.0 with onnxscript 0.7.2: torch.onnx.export replaces logsigmoid, logaddexp,
# logcumsumexp, log1p and expm1 by formulas that overflow or cancel.
#
# These functions exist because their formulas, such as log(sigmoid(x)), fail in floating point. The
# exporter writes just these formulas: Log(Sigmoid(x)), Log(Exp(a) + Exp(b)), Log(x + 1) and
# Exp(x) - 1. In logcumsumexp it subtracts the maximum of the whole text before it takes exponents,
# so a large value at the end makes the small ones before it -inf. Nothing is reported. (The older
# exporter, dynamo=False, does the same to logsigmoid, since pull request 14830 of 2018, and to
# log1p. It refuses logaddexp, logcumsumexp and expm1.)
#
# One would expect PyTorch's own values, as for logsumexp, log_softmax and softplus, which are
# operators of ONNX. -softplus(-x) in place of logsigmoid(x), and a + softplus(b - a) in place of
# logaddexp(a, b), are right.
#
# Recurrences compute with logarithms of their gates, so they meet this. A gated linear attention
# takes its log decay as logsigmoid(x) / 16, so x = -20 keeps 29% of the memory, but 0% in ONNX
# Runtime, whose Sigmoid is 0 below about -17 (pytorch/pytorch#147508). Where a model subtracts two
# such sums of logarithms, -inf becomes NaN.
#
# Below are single values, and then what the memory holds after a token with this gate.
#
# Seen on 2026-11-29 (ONNX Runtime 1.32.0, a CPU):
#
#   logsigmoid(-20)             PyTorch -20       ONNX Runtime -inf
#   logaddexp(100, 100)         PyTorch 100.7     ONNX Runtime inf
#   logcumsumexp(-200, 0)[0]    PyTorch -200      ONNX Runtime -inf
#   log1p(1e-8)                 PyTorch 1e-08     ONNX Runtime 0
#   expm1(1e-8)                 PyTorch 1e-08     ONNX Runtime 0
#   -softplus(20)               PyTorch -20       ONNX Runtime -20
#   100 + softplus(0)           PyTorch 100.7     ONNX Runtime 100.7
#   logsumexp(100, 100)         PyTorch 100.7     ONNX Runtime 100.7
#   log_softmax(-20, 0)[0]      PyTorch -20       ONNX Runtime -20
#   memory, by logsigmoid       PyTorch 0.2865    ONNX Runtime 0
#   memory, by -softplus        PyTorch 0.2865    ONNX Runtime 0.2865
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
import onnxruntime
import torch
from torch import nn
from torch.nn.functional import log_softmax, logsigmoid, softplus


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def both(title, function, x):
    """(PyTorch's first value, ONNX Runtime's)"""
    torch.onnx.export(Model(function), (x,), "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("model.onnx")
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    values = function(x).flatten()[0].item(), float(result.ravel()[0])
    print(f"{title:27} PyTorch {values[0]:<9.4g} ONNX Runtime {values[1]:.4g}")
    return values


def memory(log_gate):
    """a function of the gate's input: what is left of a memory of 1 after this token"""
    return lambda x: (log_gate(x) / 16).exp() * torch.ones(1)


small, pair = torch.tensor([1e-8]), torch.tensor([100.0, 100.0])
gate = torch.tensor([-20.0])
wrong = [
    ("logsigmoid(-20)", logsigmoid, gate),
    ("logaddexp(100, 100)", lambda x: torch.logaddexp(x[0], x[1]), pair),
    ("logcumsumexp(-200, 0)[0]", lambda x: x.logcumsumexp(0), torch.tensor([-200.0, 0.0])),
    ("log1p(1e-8)", torch.log1p, small),
    ("expm1(1e-8)", torch.expm1, small),
]
right = [
    ("-softplus(20)", lambda x: -softplus(-x), gate),
    ("100 + softplus(0)", lambda x: x[0] + softplus(x[1] - x[0]), pair),
    ("logsumexp(100, 100)", lambda x: x.logsumexp(0), pair),
    ("log_softmax(-20, 0)[0]", lambda x: log_softmax(x, 0), torch.tensor([-20.0, 0.0])),
]
wrong_memory = ("memory, by logsigmoid", memory(logsigmoid), gate)
right_memory = ("memory, by -softplus", memory(lambda x: -softplus(-x)), gate)
found = {case[0]: both(*case) for case in [*wrong, *right, wrong_memory, right_memory]}
for title, *_ in [*right, right_memory]:
    expected, seen = found[title]
    assert abs(seen / expected - 1) < 1e-4
assert found["logsigmoid(-20)"][1] == float("-inf")
assert found["logaddexp(100, 100)"][1] == float("inf")
assert found["logcumsumexp(-200, 0)[0]"][1] == float("-inf")
for title in ("log1p(1e-8)", "expm1(1e-8)", "memory, by logsigmoid"):
    assert found[title][0] > 0 and found[title][1] == 0
PYTHON
