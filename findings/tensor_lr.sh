#!/usr/bin/env bash
# PyTorch 2.13.0: groups of an optimizer share one learning rate if it is a tensor.
#
# PyTorch's recipe for compiled optimizers says to wrap the learning rate in a tensor if there is
# a scheduler. An optimizer with several groups, say weights with and without decay, gives each
# group its `lr`. It doesn't copy the tensor, so all groups hold the same one. Schedulers write new
# rates into it, group by group. So all groups have the last group's rate, and ReduceLROnPlateau,
# which reads a group's rate just before it writes it, reduces the rate once for each group. There
# is no error, and get_last_lr() shows the wrong rates, too.
#
# With a number, each group has a rate of its own. A tensor for each group, {"params": .., "lr":
# torch.tensor(0.1)}, is right, too. (LambdaLR with a function for each group, OneCycleLR and
# CyclicLR with a list of rates, and SWALR go wrong in the same way as LambdaLR here. Schedulers
# that give all groups the same factor are right.)
#
# Here are two groups, which both start at 0.1. LambdaLR is told to multiply the first by 1, and the
# second by 0.01. ReduceLROnPlateau is told to halve the rate after the second step without
# progress.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU; 2.14.1 does the same):
#
#   LambdaLR, lr=0.1:                           0.1000 and 0.0010; weights moved by 0.300 and 0.003
#   LambdaLR, lr=tensor(0.1):                   0.0010 and 0.0010; weights moved by 0.003 and 0.003
#   LambdaLR, a tensor for each group:          0.1000 and 0.0010; weights moved by 0.300 and 0.003
#   ReduceLROnPlateau, lr=0.1:                  0.1, 0.1, 0.05, 0.05, 0.025
#   ReduceLROnPlateau, lr=tensor(0.1):          0.1, 0.1, 0.025, 0.025, 0.00625
#   ReduceLROnPlateau, a tensor for each group: 0.1, 0.1, 0.05, 0.05, 0.025
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
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau


def two_weights(form):
    """(two weights, an AdamW with a group for each), where the learning rate has this form"""
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    groups = [{"params": [weight]} for weight in weights]
    lr = torch.tensor(0.1) if form == "lr=tensor(0.1)" else 0.1
    if form == "a tensor for each group":
        for group in groups:
            group["lr"] = torch.tensor(0.1)
    return weights, torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


FORMS = "lr=0.1", "lr=tensor(0.1)", "a tensor for each group"
for form in FORMS:
    weights, optimizer = two_weights(form)
    scheduler = LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.01])
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer.step()
        scheduler.step()
    first, second = rates(optimizer)
    moved = [-weight[0].item() for weight in weights]  # Adam moves by its rate in each step
    print(f"LambdaLR, {form}:".ljust(43), end=" ")
    print(f"{first:.4f} and {second:.4f}; weights moved by {moved[0]:.3f} and {moved[1]:.3f}")
    assert abs(second - 0.001) < 1e-6 and abs(moved[1] - 0.003) < 1e-5
    is_right = abs(first - 0.1) < 1e-6 and abs(moved[0] - 0.3) < 1e-5
    is_second = abs(first - 0.001) < 1e-6 and abs(moved[0] - 0.003) < 1e-5
    assert is_second if form == "lr=tensor(0.1)" else is_right

for form in FORMS:
    _, optimizer = two_weights(form)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    history = []
    for _ in range(5):
        optimizer.step()
        scheduler.step(1.0)  # a loss that never falls
        first, second = rates(optimizer)
        assert first == second
        history.append(round(first, 5))
    print(f"ReduceLROnPlateau, {form}:".ljust(43), ", ".join(str(lr) for lr in history))
    factor = 0.25 if form == "lr=tensor(0.1)" else 0.5
    expected = [0.1, 0.1, 0.1 * factor, 0.1 * factor, 0.1 * factor**2]
    assert history == [round(lr, 5) for lr in expected]
PYTHON
