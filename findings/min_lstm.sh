#!/usr/bin/env bash
# minGRU-pytorch 0.2.1: minLSTM adds 0.5 to its state when it continues from a state and
# reads several tokens at once.
#
# minGRU and minLSTM read a text either at once, by a parallel scan, or token by token. Both take
# the state of an earlier part as prev_hidden. The scan works on logarithms. minGRU hands it
# log(prev_hidden), but minLSTM hands it log_g(prev_hidden), where g(x) = x + 0.5 for x >= 0 is the
# activation of new values. A state has been through g already, so it goes on as prev_hidden + 0.5.
# If a text is read in pieces, with the state from piece to piece, each piece but the first is
# wrong. There is no error. Token by token, and without a state, it is right.
#
# One would expect what one pass gives, as from minGRU. (Issue 9 there was the same fault in minGRU,
# and has been fixed.)
#
# Below is how far outputs are from those of one pass over 64 tokens, as a share of their standard
# deviation. The text is read in two, four or 64 pieces. In the last row each state goes through the
# inverse of g before it is handed over.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   minGRU                 2 pieces 0.00, 4 pieces 0.00, 64 pieces 0.00
#   minLSTM                2 pieces 1.58, 4 pieces 1.67, 64 pieces 0.00
#   minLSTM, inverse of g  2 pieces 0.00, 4 pieces 0.00
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
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLSTM import minLSTM


def inverse_g(x):
    """g is x + 0.5 for x >= 0, and the sigmoid below."""
    return torch.where(x >= 0.5, x - 0.5, x.clamp(1e-6, 0.5).logit())


@torch.no_grad()
def off(layer, pieces, prepare):
    inputs = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))
    whole = layer(inputs)
    state, outputs = None, []
    for piece in inputs.chunk(pieces, dim=1):
        output, state = layer(piece, state, return_next_prev_hidden=True)
        state = prepare(state)
        outputs.append(output)
    return ((torch.cat(outputs, 1) - whole).abs().max() / whole.std()).item()


def show(title, layer, counts, prepare=lambda state: state):
    found = {pieces: off(layer, pieces, prepare) for pieces in counts}
    words = [f"{pieces} pieces {number:.2f}" for pieces, number in found.items()]
    print(f"{title:23}{', '.join(words)}")
    return found


torch.manual_seed(0)
gru, lstm = minGRU(32), minLSTM(32)
assert max(show("minGRU", gru, (2, 4, 64)).values()) < 0.01
found = show("minLSTM", lstm, (2, 4, 64))
assert found[2] > 0.5 and found[4] > 0.5 and found[64] < 0.01
assert max(show("minLSTM, inverse of g", lstm, (2, 4), inverse_g).values()) < 0.01
PYTHON
