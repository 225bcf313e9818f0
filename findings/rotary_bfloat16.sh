#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1 rounds positions above 256 if the queries are bfloat16.
#
# rotate_queries_or_keys makes the positions 0, 1, 2 .. in the queries' dtype. Bfloat16 has 8
# significant bits, so from 256 on neighbouring positions become equal, and angles are far off; in
# float16 this begins at 2,048. The layer also keeps its table of angles. So after one call in
# bfloat16 it is just as wrong for float32 queries, for example when you evaluate after training.
# There is no warning.
#
# One would expect positions in float32, because the same layer switches autocast off while it
# computes angles and turns queries. (Transformers fixed this:
# github.com/huggingface/transformers/issues/25681.)
#
# Below is the largest relative error of the turned queries before position 256, from there to
# 2,048, and after.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   float32                  0.00, 0.00, 0.00
#   float16                  0.00, 0.00, 0.49
#   bfloat16                 0.00, 1.08, 1.15
#   float32, after bfloat16  0.00, 1.08, 1.15
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


def check(title, layer, dtype, first_wrong):
    turned = layer.rotate_queries_or_keys(x.to(dtype)).float()
    error = ((turned - right).norm(dim=-1) / right.norm(dim=-1)).flatten()
    largest = [part.max().item() for part in error.split([256, 2048 - 256, T - 2048])]
    print(f"{title:24}", ", ".join(f"{number:.2f}" for number in largest))
    for part, number in enumerate(largest):
        assert number > 0.3 if part >= first_wrong else number < 0.01


check("float32", RotaryEmbedding(WIDTH), torch.float32, first_wrong=3)
check("float16", RotaryEmbedding(WIDTH), torch.float16, first_wrong=2)
layer = RotaryEmbedding(WIDTH)
check("bfloat16", layer, torch.bfloat16, first_wrong=1)
check("float32, after bfloat16", layer, torch.float32, first_wrong=1)
PYTHON
