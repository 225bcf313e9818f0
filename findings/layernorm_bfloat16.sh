#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, LayerNorm and Embedding add up their gradients in bfloat16.
#
# The gradient of LayerNorm's weight or bias is a sum over all tokens of a batch, and that of a row
# of an embedding is one over all places of a token. Bfloat16 has 8 significant bits. If one term
# after another is added to a sum in bfloat16, it stops growing at about 256 terms of the same size,
# and the rest is lost. Both backward passes on a CPU add like this. LayerNorm's does so even for
# float32 weights, if its input is bfloat16, for example from a Linear under autocast. So a batch of
# 16,384 tokens may lose most of the gradient. There is no warning.
#
# One would expect a sum in float32, as in RMSNorm, GroupNorm and Linear, and as in the same two
# layers if they are compiled (which needs a C++ compiler).
#
# Below, all terms are 1 at first, so the gradient should be the number of terms: 256, 1,024 or
# 16,384. The last column is how far gradients are from those in float32, as a share of their norm,
# for 16,384 random terms with a mean that isn't 0. (Of the embedding's 100 tokens, number n occurs
# in proportion to 1 / n.)
#
# Seen on 2026-11-28 (a CPU, one thread; 2.14.1 does the same):
#
#   LayerNorm in bfloat16:               256     256     256   off by 0.90
#   LayerNorm with float32 weights:      256     256     256   off by 0.90
#   LayerNorm with autocast:             256     256     256   off by 0.89
#   LayerNorm compiled:                  256    1024   16384   off by 0.00
#   Embedding in bfloat16:               256     256     256   off by 0.48
#   Embedding compiled:                  256    1024   16384   off by 0.00
#   RMSNorm in bfloat16:                 256    1024   16384   off by 0.00
#   GroupNorm in bfloat16:               256    1024   16384   off by 0.00
#   Linear in bfloat16:                  256    1024   16384   off by 0.00
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

torch.set_num_threads(1)
WIDTH, TOKENS = 64, 16_384
ONES = torch.tensor([-1.0, 1.0]).repeat(WIDTH // 2)  # LayerNorm leaves it as it is
LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "Embedding": lambda: nn.Embedding(100, WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(1, WIDTH),
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
}
BFLOAT16 = torch.bfloat16
SETTINGS = {
    "in bfloat16": dict(weights=BFLOAT16),
    "with float32 weights": dict(),
    "compiled": dict(weights=BFLOAT16, compiled=True),
    "with autocast": dict(autocast=True),
}
generator = torch.Generator().manual_seed(0)


def gradients(name, x, g, weights=torch.float32, compiled=False, autocast=False):
    """The gradients of the layer's parameters as one vector. The gradient of its output is g."""
    torch.manual_seed(0)
    layer = LAYERS[name]().to(weights)
    with torch.autocast("cpu", BFLOAT16, enabled=autocast):
        y = (torch.compile(layer) if compiled else layer)(x)
    y.backward(g.to(y.dtype))
    return torch.cat([weight.grad.float().flatten() for weight in layer.parameters()])


def number(name, tokens, settings):
    """The largest gradient if all terms are 1"""
    x = ONES.expand(tokens, -1).to(BFLOAT16)
    if name == "Embedding":
        x = torch.zeros(tokens, dtype=torch.long)
    return gradients(name, x, torch.ones(tokens, WIDTH), **settings).max().item()


def off(name, settings):
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(BFLOAT16)
    if name == "Embedding":
        x = torch.multinomial(1 / torch.arange(1, 101), TOKENS, True, generator=generator)
    g = torch.randn(TOKENS, WIDTH, generator=generator)
    g += 0.5 * torch.randn(WIDTH, generator=generator)
    g = g.to(BFLOAT16).float()
    right = gradients(name, x if name == "Embedding" else x.float(), g)
    found = gradients(name, x, g, **settings)
    return ((found - right).norm() / right.norm()).item()


for name, setting in (
    ("LayerNorm", "in bfloat16"),
    ("LayerNorm", "with float32 weights"),
    ("LayerNorm", "with autocast"),
    ("LayerNorm", "compiled"),
    ("Embedding", "in bfloat16"),
    ("Embedding", "compiled"),
    ("RMSNorm", "in bfloat16"),
    ("GroupNorm", "in bfloat16"),
    ("Linear", "in bfloat16"),
):
    settings = SETTINGS[setting]
    counts = [number(name, tokens, settings) for tokens in (256, 1024, TOKENS)]
    far = off(name, settings)
    numbers = "".join(f"{count:8.0f}" for count in counts)
    print(f"{name} {setting}:".ljust(32) + f"{numbers}   off by {far:.2f}")
    if setting != "compiled" and name in ("LayerNorm", "Embedding"):
        assert counts == [256, 256, 256] and far > 0.3
    else:
        assert counts[0] == 256 and abs(counts[1] - 1024) < 10 and abs(counts[2] - TOKENS) < 200
        assert far < 0.01
PYTHON
