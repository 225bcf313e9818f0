#!/usr/bin/env bash
# RWKV in transformers 5.23.0: with a cache, the sequences of a batch mix.
#
# RwkvForCausalLM.generate() writes another text for a prompt if there are other prompts in its
# batch. There is no padding here: both prompts have eight tokens. Alone, or with use_cache=False,
# each gets its own text.
#
# From the second call on, there is one token, `hidden` (B, 1, D). The token before it is in
# state[1][:, :, layer], which is (B, D). Their weighted sum broadcasts to (B, B, D): B tokens for
# each sequence, each mixed with the past of another one. For B = 1 it is right.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   without a cache, both prompts together: as each alone
#   with a cache, each prompt alone: as without a cache
#   with a cache, both prompts together: other texts
#   one token more: logits (2, 2, 40), of which the last are off by 141% and 64%
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from transformers import RwkvConfig, RwkvForCausalLM, logging

logging.set_verbosity_error()
torch.manual_seed(0)
config = RwkvConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, eos_token_id=None)
model = RwkvForCausalLM(config).eval()
with torch.no_grad():
    for weight in model.parameters():  # a new model's are so small that it repeats one token
        weight += 0.2 * torch.randn_like(weight)
prompts = torch.randint(1, 40, (2, 8))


def written(prompts, use_cache):
    settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=use_cache)
    return model.generate(prompts, **settings)[:, 8:].tolist()


alone = [written(prompt[None], use_cache=False)[0] for prompt in prompts]
alone_cached = [written(prompt[None], use_cache=True)[0] for prompt in prompts]
assert written(prompts, use_cache=False) == alone
print("without a cache, both prompts together: as each alone")
assert alone_cached == alone
print("with a cache, each prompt alone: as without a cache")
assert written(prompts, use_cache=True) != alone
print("with a cache, both prompts together: other texts")

with torch.no_grad():
    right = model(prompts).logits[:, -1]
    state = model(prompts[:, :-1], use_cache=True).state
    logits = model(prompts[:, -1:], state=state, use_cache=True).logits
off = (logits[:, -1] - right).norm(dim=-1) / right.norm(dim=-1)
shape = tuple(logits.shape)
print(f"one token more: logits {shape}, of which the last are off by {off[0]:.0%} and {off[1]:.0%}")
assert shape == (2, 2, 40) and off.min() > 0.1
PYTHON
