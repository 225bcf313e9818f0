#!/usr/bin/env bash
# transformers 5.24.0: after a prompt that is padded on the right, models with convolutions or
# recurrences go on from the padding, although it is masked.
#
# A batch of prompts of different lengths is padded, and the attention mask says where. In Llama
# nothing follows from padding on the right: with the mask and the right positions, the next token's
# logits are those of the prompt alone. In models with a causal convolution or a recurrence the
# cache keeps what came last, padding included: the convolution's last inputs are of padding, and
# the recurrence has decayed, or taken in more, at each padding token. So the next token's logits
# are wrong, without a warning. One would expect those of the prompt alone, or an error. (The
# library pads on the left in `generate`. A report about Nemotron-H and other relatives of Mamba:
# https://github.com/huggingface/transformers/issues/48256.)
#
# Here six tokens are read with and without four padding tokens on their right, in small models with
# random weights. The numbers tell how far the seventh token's logits are from those of reading all
# seven at once, relative to their size.
#
# Seen on 2026-11-29 (transformers 5.24.0, PyTorch 2.13.0, a CPU):
#
#   Llama        alone 0.000, padded 0.000
#   Mamba        alone 0.000, padded 0.308
#   Mamba2       alone 0.000, padded 1.158
#   Qwen3-Next   alone 0.000, padded 0.044
#   OLMo-Hybrid  alone 0.000, padded 0.052
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2> errors.txt <<'PYTHON' || { cat errors.txt; exit 1; }
import torch
import transformers

TOKENS = dict(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(hidden_size=32, num_hidden_layers=2)
HEADS = dict(intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=4, linear_key_head_dim=8)
LINEAR |= dict(linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
EXPERTS |= dict(shared_expert_intermediate_size=16)
MAMBA2 = dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8)

MODELS = {  # {name: (its classes' name, its settings)}
    "Llama": ("Llama", HEADS),
    "Mamba": ("Mamba", dict(state_size=8)),
    "Mamba2": ("Mamba2", MAMBA2),
    "Qwen3-Next": ("Qwen3Next", HEADS | LINEAR | EXPERTS),
    "OLMo-Hybrid": ("OlmoHybrid", HEADS | LINEAR),
}


def distance(model, name, padding):
    """Of the seventh token's logits, after six tokens and the padding, from the right ones."""
    tokens = torch.tensor([[7, 21, 3, 44, 15, 30, 9]])
    expected = model(tokens).logits[:, -1]
    zeros = torch.zeros(1, padding, dtype=torch.long)
    prompt = torch.cat([tokens[:, :6], zeros], dim=1)
    mask = torch.cat([torch.ones(1, 6, dtype=torch.long), zeros], dim=1)
    cache = model(prompt, attention_mask=mask, use_cache=True).cache
    following = {"cache": cache, "use_cache": True}
    if "Mamba" not in name:  # which has no positions, and looks at nothing earlier
        following["attention_mask"] = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], dim=1)
        following["position_ids"] = torch.tensor([[6]])
    logits = model(tokens[:, 6:], **following).logits[:, -1]
    return ((logits - expected).norm() / expected.norm()).item()


with torch.no_grad():
    for name, (classes, settings) in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{classes}Config")(**TOKENS, **SIZES, **settings)
        model = getattr(transformers, f"{classes}ForCausalLM")(config).eval()
        alone, padded = distance(model, name, padding=0), distance(model, name, padding=4)
        print(f"{name:12} alone {alone:.3f}, padded {padded:.3f}")
        assert alone < 1e-5
        assert padded < 1e-5 if name == "Llama" else padded > 0.01
PYTHON
