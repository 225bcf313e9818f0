#!/usr/bin/env bash
# fast-weight-attention 0.3.1: with a forget gate, a causal layer sees tokens that come later.
#
# FastWeightAttention(causal=True) cuts a text into chunks, and carries a memory from chunk to
# chunk: the weights of its own projections. With use_forget_gate=True the memory decays before each
# chunk, by a gate that is computed from the mean of the chunk which is about to be read. All tokens
# of this chunk use the decayed weights, so its first token depends on its last one. (By default,
# chunk_size=None, a chunk is the whole text.) At first the gate's learned strength,
# forget_gate_decay, is 0, and nothing leaks, but not for long. There is no error. In generation
# token by token, the later tokens do not exist yet, so the gate differs from the one in training.
#
# One would expect that a causal layer is causal, as without the gate, or with a gate from the chunk
# before.
#
# Here layers are trained to predict the next vector of random walks, in chunks of eight. Below is
# by how much the outputs of the first 31 tokens change if the last of 32 is another one, as a share
# of their standard deviation: in the last chunk, and before it.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   no gate, 0 steps:        moved by 0.00, before by 0.00
#   no gate, 100 steps:      moved by 0.00, before by 0.00
#   forget gate, 0 steps:    moved by 0.00, before by 0.00
#   forget gate, 100 steps:  moved by 0.15, before by 0.00
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 \
    fast-weight-attention==0.3.1 adam-atan2-pytorch==0.4.1 torch-einops-utils==0.2.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from fast_weight_attention import FastWeightAttention

LENGTH, WIDTH = 32, 16


def walks(count):
    return torch.randn(count, LENGTH + 1, WIDTH).cumsum(1) / 4


def train(steps, gate):
    torch.manual_seed(0)
    settings = dict(chunk_size=8, use_forget_gate=gate)
    layer = FastWeightAttention(WIDTH, dim_head=8, heads=2, causal=True, **settings)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(steps):
        inputs = walks(16)
        outputs, _ = layer(inputs[:, :-1], return_next_memories=True)
        loss = (outputs - inputs[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer.eval()


@torch.no_grad()
def moved(layer):
    inputs = walks(16)[:, 1:]
    others = inputs.clone()
    others[:, -1] = torch.randn(16, WIDTH)
    whole, other = (layer(x, return_next_memories=True)[0] for x in (inputs, others))
    moved = (other - whole).abs().amax((0, 2)) / whole.std()
    return moved[24:31].max().item(), moved[:24].max().item()


for gate in (False, True):
    for steps in (0, 100):
        here, before = moved(train(steps, gate))
        title = f"{'forget gate' if gate else 'no gate'}, {steps} steps:"
        print(f"{title:24} moved by {here:.2f}, before by {before:.2f}")
        assert before == 0 and (here > 0.01 if gate and steps else here == 0)
PYTHON
