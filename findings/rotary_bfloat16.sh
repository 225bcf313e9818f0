#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1: for bfloat16 queries, it rounds positions above 256.
#
# rotate_queries_or_keys makes the positions 0, 1, 2 .. in the queries' dtype. Bfloat16 has 8 bits,
# so from 256 on neighbouring positions become equal, and angles are far off; float16 does so from
# 2,048 on. The layer also keeps its table of angles. So after a call in bfloat16 it is as wrong for
# queries in float32, as in an evaluation after training. There is no warning.
#
# One would expect positions in float32, because the same layer switches autocast off while it
# computes angles and turns queries. (Transformers mended such a fault after its issue 25681.)
#
# Below is the largest relative error of the turned queries before position 256, and after.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   float32                  before 0.00, after 0.00; 1001 and 1002 turn differently
#   float16                  before 0.00, after 0.49; 1001 and 1002 turn differently
#   bfloat16                 before 0.00, after 1.15; 1001 and 1002 turn equally
#   float32, after bfloat16  before 0.00, after 1.15; 1001 and 1002 turn equally
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 rotary-embedding-torch==0.9.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from rotary_embedding_torch import RotaryEmbedding

T, WIDTH = 4096, 64
torch.manual_seed(0)
x = torch.randn(1, 1, T, WIDTH).bfloat16()
right = RotaryEmbedding(WIDTH).rotate_queries_or_keys(x.float())


def check(title, layer, dtype, is_right):
    turned = layer.rotate_queries_or_keys(x.to(dtype)).float()
    error = ((turned - right).norm(dim=-1) / right.norm(dim=-1)).flatten()
    before, after = error[:256].max().item(), error[256:].max().item()
    equal = torch.equal(layer.cached_freqs[1001], layer.cached_freqs[1002])
    word = "equally" if equal else "differently"
    print(f"{title:24} before {before:.2f}, after {after:.2f}; 1001 and 1002 turn {word}")
    assert before < 0.01 and (after < 0.01) == is_right and (after > 0.3) != is_right
    return equal


assert not check("float32", RotaryEmbedding(WIDTH), torch.float32, is_right=True)
assert not check("float16", RotaryEmbedding(WIDTH), torch.float16, is_right=False)
layer = RotaryEmbedding(WIDTH)
assert check("bfloat16", layer, torch.bfloat16, is_right=False)
assert check("float32, after bfloat16", layer, torch.float32, is_right=False)
PYTHON
