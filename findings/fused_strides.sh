#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, fused optimizers ignore strides, and step the wrong weights.
#
# With fused=True, Adam, AdamW, SGD and Adagrad walk through the memory of weight, gradient and
# state as if all three were contiguous. Nothing checks that they are. So there are two cases in
# which a step is wrong, without an error:
#
# 1. The parameter is a slice of a larger tensor, such as one of the three matrices that GPT-2 keeps
#    side by side in a single weight. The step updates what comes first in that memory: a part of
#    the parameter, and weights beside it, which were not given to the optimizer.
# 2. Training began with a transposed weight, nn.Parameter(w.t()), and is resumed in a new model,
#    whose weight is contiguous. load_state_dict() copies values into that weight, but the
#    optimizer's state stays transposed. Each weight then gets the state of another one.
#
# One would expect the weights of fused=False, or an error. (On a GPU, people report an error where
# strides differ, "must have same dtype, device, and layout":
# https://github.com/pytorch/pytorch/issues/106951 and /110758.)
#
# Here are two steps at a learning rate of 0.1, and how far the 64 weights are then from those of
# fused=False, at most. In brackets is how many of the 128 weights beside the parameter changed.
# (SGD has momentum.)
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU; 2.14.1 does the same):
#
#   contiguous:          Adam 0.00 (0), AdamW 0.00 (0), SGD 0.00 (0), Adagrad 0.00 (0)
#   contiguous, resumed: Adam 0.00 (0), AdamW 0.00 (0), SGD 0.00 (0), Adagrad 0.00 (0)
#   transposed:          Adam 0.00 (0), AdamW 0.00 (0), SGD 0.00 (0), Adagrad 0.00 (0)
#   transposed, resumed: Adam 0.16 (0), AdamW 0.16 (0), SGD 0.11 (0), Adagrad 0.07 (0)
#   a slice:             Adam 0.38 (40), AdamW 0.38 (40), SGD 0.28 (40), Adagrad 0.38 (40)
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
from torch import nn

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


class Model(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


def trained(name, layout, resumed, fused):
    """(the weights after two steps, how many weights beside them have changed)"""
    torch.manual_seed(0)
    stored = torch.randn(8, 24)  # as in GPT-2: three matrices of 8 by 8 side by side
    before = stored.clone()
    weight = stored[:, :8]  # a slice
    if layout == "contiguous":
        weight = weight.clone()
    elif layout == "transposed":
        weight = weight.clone().t()

    kind, settings = OPTIMIZERS[name]
    settings = dict(settings, lr=0.1, fused=fused)
    model = Model(weight)
    assert model.weight.data_ptr() == weight.data_ptr()
    optimizer = kind(model.parameters(), **settings)
    for step in (1, 2):
        if step == 2 and resumed:
            torch.save((model.state_dict(), optimizer.state_dict()), "checkpoint.pt")
            model = Model(torch.empty(8, 8))
            optimizer = kind(model.parameters(), **settings)
            weights, state = torch.load("checkpoint.pt")
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
    beside = (stored[:, 8:] != before[:, 8:]).sum().item()
    return model.weight.detach(), beside


for layout, resumed in (
    ("contiguous", False),
    ("contiguous", True),
    ("transposed", False),
    ("transposed", True),
    ("a slice", False),
):
    words = []
    for name in OPTIMIZERS:
        expected, beside_expected = trained(name, layout, resumed, fused=False)
        weight, beside = trained(name, layout, resumed, fused=True)
        off = (weight - expected).abs().max().item()
        words.append(f"{name} {off:.2f} ({beside})")
        is_right = off < 1e-5
        assert is_right == (layout == "contiguous" or (layout == "transposed" and not resumed))
        assert beside_expected == 0 and (beside > 0) == (layout == "a slice")
    case = layout + (", resumed:" if resumed else ":")
    print(f"{case:20} {', '.join(words)}")
PYTHON
