#!/usr/bin/env bash
# PyTorch 2.13.0: after 144 skipped steps in a row, GradScaler itself makes the weights inf or NaN.
#
# GradScaler multiplies the loss, divides the gradients by the same number, and skips a step whose
# gradients are not finite, so that no inf or NaN gets into the weights. At each such step it halves
# its scale, for which there is no least value. After 144 in a row, the scale is 2^-128, and
# its inverse overflows float32. Gradients are tested for inf and NaN before they are multiplied by
# this inverse, and not again after it. So the next good step, which is small and finite until then,
# is not skipped: it writes inf into the weights, or NaN (0 times inf) after 166, where the scale
# itself is 0. Nothing is raised, and the loss of the skipped steps may have been finite all along.
#
# One would expect the scale to stop falling, say at 1, or an error that no scale helps. (This wish
# is pytorch/pytorch#99640.)
#
# A layer has one good step, then some whose gradients are NaN, and then another good one, which
# ought to lower each weight by 0.1.
#
# Seen on 2026-11-29 (PyTorch 2.13.0, a CPU):
#
#     0 skipped: scale 6.6e+04, then a weight changes by -0.10
#    16 skipped: scale 1, then a weight changes by -0.10
#   100 skipped: scale 5.2e-26, then a weight changes by -0.10
#   143 skipped: scale 5.9e-39, then a weight changes by -0.10
#   144 skipped: scale 2.9e-39, then a weight changes by -inf
#   160 skipped: scale 4.5e-44, then a weight changes by -inf
#   166 skipped: scale 0, then a weight changes by nan
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


def last_step(skipped):
    """(the scale after so many skipped steps, by how much the next good step changes a weight)"""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor in [1.0, *[torch.nan for _ in range(skipped)], 1.0]:
        before, scale = model.weight[0, 0].item(), scaler.get_scale()
        optimizer.zero_grad()
        loss = (factor * model(torch.ones(8, 4))).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scale, model.weight[0, 0].item() - before


for skipped in (0, 16, 100, 143, 144, 160, 166):
    scale, change = last_step(skipped)
    print(f"{skipped:3} skipped: scale {scale:.2g}, then a weight changes by {change:.2f}")
    if skipped < 144:
        assert abs(change + 0.1) < 1e-3
    else:
        assert not abs(change) < 1e30
PYTHON
