#!/usr/bin/env bash
# x-transformers 2.31.10: with shift_tokens, generate() writes other texts than the model would.
#
# Decoder(shift_tokens=1) gives each layer half of its channels from the token before, a convolution
# with fixed weights. generate() keeps keys and values of earlier tokens in a cache, which is the
# default, and then hands the model one token at a time. The cache doesn't keep the inputs of the
# shift, so the shifted channels of each new token are 0. Nothing is reported. The package has a
# flag, can_cache_kv, for models that need more than keys and values, but shift_tokens doesn't clear
# it.
#
# attn_data_dependent_alibi=True, the forgetting transformer, has the same fault. It adds up log
# forget gates over time. With a cache it has the new token's gate only, and forgets nothing.
#
# One would expect the text of cache_kv=False, or that generate() does without a cache, as it does
# for attn_selective=True.
#
# Here models with random weights write 20 tokens, always the likeliest one, with a cache and
# without. `off by` is how far logits with a cache are from those of one pass over the whole text,
# as a share of their standard deviation.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   no option:                 the same texts, off by 0.00
#   rotary_pos_emb:            the same texts, off by 0.00
#   shift_tokens:              other texts, off by 3.66
#   attn_data_dependent_alibi: other texts, off by 0.29
#   attn_selective:            the same texts, has no cache
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
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

PROMPT, NEW = 8, 20
OPTIONS = {
    "no option": {},
    "rotary_pos_emb": dict(rotary_pos_emb=True),
    "shift_tokens": dict(shift_tokens=1),
    "attn_data_dependent_alibi": dict(attn_data_dependent_alibi=True),
    "attn_selective": dict(attn_selective=True),
}


@torch.no_grad()
def compare(options):
    """(whether the texts are the same, how far off the logits are) with a cache"""
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, verbose=False, **options)
    net = TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers).eval()
    for weight in net.parameters():
        weight += 0.1 * torch.randn_like(weight)  # a new model's are small
    model = AutoregressiveWrapper(net)
    prompts = torch.randint(0, 50, (4, PROMPT))
    greedy = dict(seq_len=NEW, temperature=0.0)
    plain = model.generate(prompts, cache_kv=False, **greedy)
    cached = model.generate(prompts, **greedy)
    if not net.can_cache_kv:
        return torch.equal(plain, cached), None
    text = torch.cat([prompts, plain], dim=1)
    right = net(text)
    _, cache = net(text[:, :PROMPT], return_intermediates=True)
    off = 0.0
    for t in range(PROMPT, PROMPT + NEW):
        logits, cache = net(text[:, : t + 1], cache=cache, return_intermediates=True)
        off = max(off, (logits[:, -1] - right[:, t]).abs().max().item())
    return torch.equal(plain, cached), off / right.std().item()


for name, options in OPTIONS.items():
    same, off = compare(options)
    text = "has no cache" if off is None else f"off by {off:.2f}"
    print(f"{name}:".ljust(26), "the same texts," if same else "other texts,", text)
    if name in ("shift_tokens", "attn_data_dependent_alibi"):
        assert not same and off > 0.1
    else:
        assert same and (off is None or off < 1e-3)
PYTHON
