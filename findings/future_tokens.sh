#!/usr/bin/env bash
# x-transformers 2.31.10: three options let a Decoder see tokens that come later.
#
# orthog_residual=True adds only that part of a layer's output which is orthogonal to the residual
# stream, and attn_orthog_projected_values=True does the same between attention's output and values.
# The function orthog_project(x, y) flattens x to (B, T * D), so that a whole sequence is one
# vector. What is subtracted from a token then depends on all tokens, also on later ones. (If it
# projects each token's vector by itself, nothing leaks.) mv_split_residual=True subtracts from each
# token the mean over all tokens. So a model in training can see the tokens that it should predict,
# and its validation loss is not a likelihood. When it generates, there are no later tokens, and
# with a cache it sees one token at a time. So it computes something else than in training.
#
# A Decoder is causal: if the last token changes, nothing before it may change.
#
# Here are models with random weights. `leak` is by how much the logits of earlier tokens change
# when the last of 20 tokens is another one. `cache` is how far logits with a cache are from those
# of one pass. Both are a share of the logits' standard deviation.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   no option:                             leak 0.000, cache 0.000
#   gate_residual:                         leak 0.000, cache 0.000
#   orthog_residual:                       leak 0.066, cache 0.668
#   mv_split_residual:                     leak 0.267, cache 2.766
#   attn_orthog_projected_values:          leak 0.039, cache 1.017
#   attn_orthog_projected_values_per_head: leak 0.039, cache 1.017
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 x-transformers==2.31.10
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from x_transformers import Decoder, TransformerWrapper

T = 20
OPTIONS = (
    "no option",
    "gate_residual",
    "orthog_residual",
    "mv_split_residual",
    "attn_orthog_projected_values",
    "attn_orthog_projected_values_per_head",
)


@torch.no_grad()
def measure(option):
    """(leak, cache)"""
    torch.manual_seed(0)
    options = {} if option == "no option" else {option: True}
    layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, verbose=False, **options)
    net = TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers).eval()
    for weight in net.parameters():
        weight += 0.1 * torch.randn_like(weight)  # a new model's are small
    text = torch.randint(0, 50, (4, T))
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    logits = net(text)
    leak = (net(changed) - logits)[:, :-1].abs().max()
    _, cache = net(text[:, :-1], return_intermediates=True)
    last = net(text, cache=cache)[:, -1]
    return (leak / logits.std()).item(), ((last - logits[:, -1]).abs().max() / logits.std()).item()


for option in OPTIONS:
    leak, cache = measure(option)
    print(f"{option}:".ljust(38), f"leak {leak:.3f}, cache {cache:.3f}")
    if "orthog" in option or "split" in option:
        assert leak > 0.005 and cache > 0.01
    else:
        assert leak < 1e-4 and cache < 1e-4
PYTHON
