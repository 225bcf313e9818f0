#!/usr/bin/env bash
# PyTorch 2.13.0: functional_call with activation checkpointing gives wrong gradients.
#
# functional_call(model, weights, x) runs a model with other weights than its own, as in
# meta-learning, or for a hypernetwork. If the model checkpoints a part of itself, this part runs a
# second time in the backward pass. By then functional_call has returned, and the model has its own
# weights back. So the second run uses these, and the gradients mix both. The loss is right, and
# nothing is reported, because only shapes and dtypes of the second run are checked.
#
# One would expect the gradients of the model without checkpointing, or an error. torch.func.grad
# refuses the same model, and compiled by torch.compile it is right. (The page of checkpoint warns
# of a function that differs in the backward pass, "e.g., due to a global variable". The page of
# functional_call says nothing.)
#
# Here are the gradients of a model of two layers with respect to its input and to the weights
# handed over, and how far they are from those without checkpointing, as a share of their length.
# use_reentrant=False is the form that PyTorch recommends.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU; 2.14.1 does the same):
#
#   without checkpointing:  loss 81.334, off by 0.00 0.00 0.00 0.00 0.00
#   checkpointed:           loss 81.334, off by 0.96 1.60 1.21 1.19 0.00
#   checkpointed, compiled: loss 81.334, off by 0.00 0.00 0.00 0.00 0.00
#   checkpointed, torch.func.grad: RuntimeError
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
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.checkpointed = checkpointed

    def layers(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)


def loss_of(run, weights, x):
    return functional_call(run, weights, (x,)).square().sum()


torch.manual_seed(0)
x = torch.randn(5, 4, requires_grad=True)
plain, checkpointed = Model(False), Model(True)
checkpointed.load_state_dict(plain.state_dict())
others = {name: torch.randn_like(w).requires_grad_() for name, w in plain.named_parameters()}
in_compiled = {f"_orig_mod.{name}": w for name, w in others.items()}
compiled = torch.compile(checkpointed, backend="aot_eager")

right = None
for name, run, weights in (
    ("without checkpointing", plain, others),
    ("checkpointed", checkpointed, others),
    ("checkpointed, compiled", compiled, in_compiled),
):
    loss = loss_of(run, weights, x)
    gradients = torch.autograd.grad(loss, [x, *others.values()])
    right = right or gradients
    off = [((g - r).norm() / r.norm()).item() for g, r in zip(gradients, right)]
    print(f"{name}:".ljust(23), f"loss {loss:.3f}, off by", " ".join(f"{o:.2f}" for o in off))
    if run is checkpointed:
        assert min(off[:4]) > 0.1
    else:
        assert max(off) < 1e-5

try:
    torch.func.grad(lambda weights: loss_of(checkpointed, weights, x.detach()))(others)
    refused = "no error"
except RuntimeError:
    refused = "RuntimeError"
print(f"checkpointed, torch.func.grad: {refused}")
assert refused == "RuntimeError"
PYTHON
