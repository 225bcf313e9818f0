#!/usr/bin/env bash
# minGRU-pytorch 0.2.1: minGRUAttnHybrid gives attention too small a weight.
#
# The layer runs a recurrence and attention side by side. It averages them, as Hymba does, or, with
# learned_mix=True (the default), weights them by a gate for each token and head. The recurrence
# should have the gate g as its weight, and attention 1 - g. But a bracket closes too late, so
# attention has g * (1 - g). Without a learned gate, where g is 0.5, the recurrence counts twice as
# much as attention. With one, attention has at most a quarter, and if the gate turns to attention,
# the whole output vanishes. There is no error.
#
# One would expect the weights g and 1 - g, because comments in the code speak of an average.
#
# Below are the weights of both, found by a regression of the mixed output on the two norms' outputs
# in each token and head.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   mean     gate 0.50, recurrence 0.50, attention 0.25
#   learned  gate 0.05, recurrence 0.05, attention 0.05
#   learned  gate 0.25, recurrence 0.25, attention 0.19
#   learned  gate 0.50, recurrence 0.50, attention 0.25
#   learned  gate 0.75, recurrence 0.75, attention 0.19
#   learned  gate 0.95, recurrence 0.95, attention 0.05
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 minGRU-pytorch==0.2.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from minGRU_pytorch.hybrid import minGRUAttnHybrid

HEADS, WIDTH = 4, 16


@torch.no_grad()
def weights(learned_mix):
    """(gate, weight of the recurrence, weight of attention) in each token and head"""
    torch.manual_seed(0)
    layer = minGRUAttnHybrid(64, dim_head=WIDTH, heads=HEADS, learned_mix=learned_mix)
    seen = {}
    layer.rnn_out_norm.register_forward_hook(lambda _, __, out: seen.update(rnn=out))
    layer.attn_out_norm.register_forward_hook(lambda _, __, out: seen.update(attention=out))
    layer.to_out.register_forward_pre_hook(lambda _, args: seen.update(mixed=args[0]))
    inputs = torch.randn(4, 256, 64)
    if learned_mix:
        layer.to_mix[1].weight.mul_(5)  # so that there are all gates from 0 to 1
    layer(inputs)
    mixed = seen["mixed"].unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    branches = torch.stack((seen["rnn"], seen["attention"]), -1)
    found = torch.linalg.lstsq(branches, mixed.unsqueeze(-1)).solution.squeeze(-1)
    assert torch.allclose((branches @ found.unsqueeze(-1)).squeeze(-1), mixed, atol=1e-4)
    gate = torch.full_like(found[..., 0], 0.5)
    if learned_mix:
        gate = layer.to_mix(inputs).sigmoid().transpose(1, 2)
    return [numbers.flatten() for numbers in (gate, *found.unbind(-1))]


def show(title, gate, rnn, attention):
    print(f"{title:8} gate {gate:.2f}, recurrence {rnn:.2f}, attention {attention:.2f}")


gate, rnn, attention = weights(False)
show("mean", gate[0], rnn.mean(), attention.mean())
assert torch.allclose(rnn, gate, atol=1e-3) and torch.allclose(attention, gate / 2, atol=1e-3)
gate, rnn, attention = weights(True)
for target in (0.05, 0.25, 0.5, 0.75, 0.95):
    nearest = (gate - target).abs().argmin()
    show("learned", gate[nearest], rnn[nearest], attention[nearest])
assert torch.allclose(rnn, gate, atol=1e-3)
assert torch.allclose(attention, gate * (1 - gate), atol=1e-3)
PYTHON
