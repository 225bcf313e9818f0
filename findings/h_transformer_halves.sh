#!/usr/bin/env bash
# h-transformer-1d 0.1.9: without causal=True, the two halves of a text never see each other; with
# it, each token of a short text sees only itself.
#
# Attention is put together from levels. Level by level, neighbouring blocks see each other, and
# blocks double in length. According to a comment in the code, this continues until there are two
# blocks. But the
# code stops a level early, at four blocks, and these see each other in pairs. No layer connects the
# halves, so the last token knows nothing of the first half, however many layers there are.
#
# With causal=True the mask has a row for each level, and the code takes the first
# log2(length / block_size). If a text isn't longer than block_size, 128 by default, this is 0, and
# a sum over no levels is 0. So all attention is 0, and the model knows the last token only. (In
# longer causal texts the halves see each other, but a level is missing there as well:
# github.com/lucidrains/h-transformer-1d/issues/22.)
#
# There is no error or warning. One would expect that the last token depends on all.
#
# Below is on how many tokens of a text the last one depends, itself included, in a model with
# block_size=16.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   not causal, 1 layers:    32 of 64  64 of 128  128 of 256  256 of 512
#   not causal, 6 layers:    32 of 64  64 of 128  128 of 256  256 of 512
#   causal, 1 layers:        1 of 9  1 of 12  1 of 16
#   causal, 6 layers:        1 of 9  1 of 12  1 of 16
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 h-transformer-1d==0.1.9 \
    rotary-embedding-torch==0.9.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from h_transformer_1d import HTransformer1D


@torch.no_grad()
def seen(causal, depth, length):
    """The places on which the last token's logits depend"""
    torch.manual_seed(0)
    sizes = dict(num_tokens=50, dim=32, heads=4, dim_head=8, max_seq_len=512, block_size=16)
    model = HTransformer1D(**sizes, causal=causal, depth=depth).double().eval()
    tokens = torch.randint(50, (1, length))
    places = torch.arange(length)
    others = tokens.repeat(length, 1)
    others[places, places] = (others[places, places] + 1) % 50  # row i has another token at i
    moved = (model(others)[:, -1] - model(tokens)[:, -1]).abs().amax(-1)
    return (moved > 1e-9).nonzero().flatten().tolist()


for causal, lengths in ((False, (64, 128, 256, 512)), (True, (9, 12, 16))):
    for depth in (1, 6):
        counts = []
        for length in lengths:
            places = seen(causal, depth, length)
            assert places == list(range(length - 1 if causal else length // 2, length))
            counts.append(f"{len(places)} of {length}")
        title = f"{'causal' if causal else 'not causal'}, {depth} layers:"
        print(title.ljust(23), *counts, sep="  ")
PYTHON
