#!/usr/bin/env bash
# local-attention 1.11.2: with the cache, which generate() uses, keys are turned again in each step.
#
# LocalMHA puts the prompt's keys into its cache unturned, so the first step with the cache is
# right. But each step puts the keys back after the rotary embedding has turned them, and the next
# step turns them again. So the text differs from that without a cache, and there is no warning.
# (With qk_rmsnorm=True, a step with the cache also divides by the root of the head's width instead
# of multiplying by qk_scale, so the first step is wrong, too.) With use_dynamic_pos_bias=True,
# which replaces the rotary embedding, it is right.
#
# One would expect the same text with a cache and without.
#
# Below is how far the log probabilities in the first, second and last of 30 steps with the cache
# are from those of the whole text at once, and how many tokens of generate() differ.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   default               0.00, 0.56, 0.48; 11 of 30 tokens
#   qk_rmsnorm            0.52, 0.33, 0.58; 14 of 30 tokens
#   use_dynamic_pos_bias  0.00, 0.00, 0.00;  0 of 30 tokens
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 local-attention==1.11.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from local_attention import LocalTransformer

torch.set_grad_enabled(False)
PROMPT, NEW = 10, 30
tokens = torch.randint(50, (1, PROMPT + NEW), generator=torch.Generator().manual_seed(0))


def new_model(**options):
    torch.manual_seed(0)
    model = LocalTransformer(
        num_tokens=50,
        dim=64,
        depth=4,
        heads=4,
        dim_head=16,
        causal=True,
        max_seq_len=128,
        local_attn_window_size=16,
        **options,
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.mul_(3)  # so that attention matters
    return model.eval()


def off_with_cache(model):
    """How far each step's log probabilities are from those of the whole text at once."""
    whole = model(tokens).log_softmax(-1)
    _, cache = model(tokens[:, :PROMPT], return_cache=True)
    off = []
    for length in range(PROMPT + 1, PROMPT + NEW + 1):
        logits, cache = model(tokens[:, :length], cache=cache, return_cache=True)
        last = logits.log_softmax(-1)[:, -1]
        off.append((last - whole[:, length - 1]).abs().max().item())
    return off


def text(model, use_kv_cache):
    prompt = tokens[:, :PROMPT]
    return model.generate(prompt, NEW, temperature=0.0, use_kv_cache=use_kv_cache)


for title, options in {
    "default": {},
    "qk_rmsnorm": dict(qk_rmsnorm=True),
    "use_dynamic_pos_bias": dict(use_dynamic_pos_bias=True),
}.items():
    model = new_model(**options)
    off = off_with_cache(model)
    different = (text(model, True) != text(model, False)).sum().item()
    first, second, last = off[0], off[1], off[-1]
    print(f"{title:20}  {first:.2f}, {second:.2f}, {last:.2f}; {different:2} of {NEW} tokens")
    if title == "use_dynamic_pos_bias":
        assert max(off) < 1e-3 and different == 0
    else:
        assert min(off[1:]) > 0.01 and different > 0
        assert (first > 0.01) == (title == "qk_rmsnorm")
PYTHON
