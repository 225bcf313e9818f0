#!/usr/bin/env bash
# pytorch-optimizer 4.1.0, heavyball 3.2.1 and schedulefree 1.4.1: weights that are unfrozen later
# begin with steps of a wrong size.
#
# Adam's averages begin at 0, so Adam divides them by 1 - beta^t, where t counts the steps of a
# weight. In torch.optim each weight has its own t. These packages count for a whole parameter group
# (group["step"], in schedulefree group["k"]), and go on counting while a weight is frozen, that is,
# while its gradient is None. When it is unfrozen, its averages are 0, but t is large, so they are
# hardly corrected. Its first steps are then up to 25 times too large, or ten times too small,
# depending on the optimizer. There is no error. A group of its own doesn't help, because its t
# counts, too.
#
# One would expect what a new optimizer does, as in torch.optim. This is what happens if weights
# join when they are unfrozen, by add_param_group().
#
# Here the gradient is the same in each step. How far do weights move in their first step, and in
# their first ten, in units of the learning rate? They begin with the optimizer ("new"), or after
# 1,000 steps of other weights: they are then unfrozen, or join by add_param_group(). All settings
# are the defaults, but without weight decay.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#                                   new          unfrozen     add_param_group()
#   torch.optim.AdamW               1.0  10.0    1.0  10.0    1.0  10.0
#   torch.optim.NAdam               1.1   8.1    1.1   8.1    1.1   8.1
#   pytorch_optimizer.AdamP         1.0  10.0    2.5  44.0    1.0  10.0
#   pytorch_optimizer.AdEMAMix      1.0  10.0    2.5  44.3    1.0  10.0
#   pytorch_optimizer.LaProp        1.0  10.0   25.2 161.9    1.0  10.0
#   pytorch_optimizer.StableAdamW   1.0  10.0    0.1   4.1    1.0  10.0
#   heavyball.AdamW                 1.0  10.0    1.0  17.7    1.0  10.0
#   heavyball.NAdam                 1.1   8.1   26.9 103.1    1.1   8.1
#   heavyball.RMSprop               1.0  10.0   10.0  50.6    1.0  10.0
#   schedulefree.AdamWScheduleFree  1.0   5.9    2.5  13.4    1.0   5.9
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 pytorch-optimizer==4.1.0 \
    heavyball==3.2.1 schedulefree==1.4.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import heavyball
import pytorch_optimizer
import schedulefree
import torch

heavyball.utils.compile_mode = None  # so that it needs no compiler
LR = 1e-3
OPTIMIZERS = [
    torch.optim.AdamW,
    torch.optim.NAdam,
    pytorch_optimizer.AdamP,
    pytorch_optimizer.AdEMAMix,
    pytorch_optimizer.LaProp,
    pytorch_optimizer.StableAdamW,
    heavyball.AdamW,
    heavyball.NAdam,
    heavyball.RMSprop,
    schedulefree.AdamWScheduleFree,
]


def moved(kind, frozen, join):
    """How far weights move in their first step, and in ten, after `frozen` steps of others"""
    others, weights = torch.nn.Parameter(torch.ones(6, 8)), torch.nn.Parameter(torch.ones(6, 8))
    gradient = 0.5 + torch.rand(6, 8, generator=torch.Generator().manual_seed(0))
    optimizer = kind([others] if join else [others, weights], lr=LR, weight_decay=0.0)
    if kind is schedulefree.AdamWScheduleFree:
        optimizer.train()
    for _ in range(frozen):
        others.grad = gradient.clone()
        optimizer.step()
    assert (weights == 1).all()
    if join:
        optimizer.add_param_group({"params": [weights]})
    distances = []
    for _ in range(10):
        others.grad, weights.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        distances.append((1 - weights.detach()).mean().item() / LR)
    return torch.tensor([distances[0], distances[-1]])


print(" " * 31, "new          unfrozen     add_param_group()")
for kind in OPTIMIZERS:
    package = kind.__module__.split(".")[0]
    package = "torch.optim" if package == "torch" else package
    new = moved(kind, 0, join=False)
    unfrozen = moved(kind, 1000, join=False)
    joined = moved(kind, 1000, join=True)
    numbers = "   ".join(f"{first:4.1f} {ten:5.1f}" for first, ten in (new, unfrozen, joined))
    print(f"{package}.{kind.__name__}".ljust(30), numbers)
    assert torch.allclose(joined, new, rtol=0.02)
    assert torch.allclose(unfrozen, new, rtol=0.02) == (package == "torch.optim")
PYTHON
