#!/usr/bin/env bash
# transformers 5.24.0: given a cache and several new tokens, Mamba, Falcon-Mamba and Jamba restart
# their recurrence from zero.
#
# A long prompt can be read in chunks, with a cache in between. `generate` does this with
# prefill_chunk_size, and it also goes on from a cache in a chat. In these models the convolution
# goes on from its cache, and so does Jamba's attention. But the recurrence begins each chunk of two
# or more tokens with zeros, so what it had kept of the text is lost. There is no warning.
#
# One would expect the logits of reading everything at once. The documentation of Mamba says that
# with a cache its blocks go on from the previous state, as if the earlier tokens were there
# (https://huggingface.co/docs/transformers/model_doc/mamba). The same was reported about Mamba-2
# (https://github.com/huggingface/transformers/issues/46032), and is fixed there and in its
# relatives. Token by token, or all at once, these models are right.
#
# Here small models with random weights read 24 tokens. The numbers tell how far the logits of the
# last 12 are from those of reading all at once, relative to their size: token by token, in two
# chunks of 12, and in two chunks between which the recurrence's states are set to 0 by hand. Then
# Jamba writes six tokens, with the prompt read at once, and in chunks of 12.
#
# Seen on 2026-11-29 (transformers 5.24.0, PyTorch 2.13.0, a CPU):
#
#   Llama        single 0.000, chunks 0.000, emptied 0.000
#   Mamba-2      single 0.000, chunks 0.000, emptied 0.134
#   Mamba        single 0.000, chunks 0.896, emptied 0.896
#   Falcon-Mamba single 0.000, chunks 0.117, emptied 0.117
#   Jamba        single 0.000, chunks 0.112, emptied 0.112
#   Jamba writes [29, 46, 6, 20, 6, 47], in chunks [29, 25, 20, 20, 40, 19]
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
SIZES = dict(hidden_size=32, num_hidden_layers=2, initializer_range=0.4)
HEADS = dict(intermediate_size=32, num_attention_heads=4, num_key_value_heads=4)
MAMBA2 = dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8)
JAMBA = dict(mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1, num_experts=1)
JAMBA |= dict(num_experts_per_tok=1)

MODELS = {  # {name: (its classes' name, its settings)}
    "Llama": ("Llama", HEADS),
    "Mamba-2": ("Mamba2", MAMBA2),
    "Mamba": ("Mamba", dict(state_size=8)),
    "Falcon-Mamba": ("FalconMamba", dict(state_size=8)),
    "Jamba": ("Jamba", HEADS | JAMBA),
}

torch.manual_seed(0)
tokens = torch.randint(3, 50, (1, 24))


def distance(model, size, emptied=False):
    """Of the last 12 logits, read in chunks of this size, from those of reading all at once."""
    expected = model(tokens).logits[:, 12:]
    cache, logits = None, []
    for chunk in tokens.split(size, dim=1):
        if emptied and cache is not None:
            for layer in cache.layers:
                for state in getattr(layer, "recurrent_states", {}).values():
                    state.zero_()
        outputs = model(chunk, cache=cache, use_cache=True)
        cache = outputs.cache
        logits.append(outputs.logits)
    return ((torch.cat(logits, dim=1)[:, 12:] - expected).norm() / expected.norm()).item()


def text(model, **options):
    mask = torch.ones_like(tokens)
    settings = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    return model.generate(tokens, **settings, **options)[0, tokens.shape[1] :].tolist()


with torch.no_grad():
    for name, (classes, settings) in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{classes}Config")(**TOKENS, **SIZES, **settings)
        model = getattr(transformers, f"{classes}ForCausalLM")(config).eval()
        single, chunks = distance(model, size=1), distance(model, size=12)
        emptied = distance(model, size=12, emptied=True)
        print(f"{name:12} single {single:.3f}, chunks {chunks:.3f}, emptied {emptied:.3f}")
        assert single < 1e-5
        if name in ("Llama", "Mamba-2"):
            assert chunks < 1e-5
        else:
            assert chunks > 0.01 and abs(chunks - emptied) < 1e-5
    assert text(model) == text(model, use_cache=False)
    print(f"Jamba writes {text(model)}, in chunks {text(model, prefill_chunk_size=12)}")
    assert text(model) != text(model, prefill_chunk_size=12)
PYTHON
