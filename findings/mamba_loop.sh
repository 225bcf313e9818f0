#!/usr/bin/env bash
# transformers 5.24.0: in a generation loop written by hand, with a cache and an attention mask,
# Mamba, Falcon-Mamba and Bamba give wrong logits.
#
# By the documentation of caches, in such a loop the attention mask must cover past and new tokens
# (https://huggingface.co/docs/transformers/cache_explanation). One would expect the logits of
# reading everything at once, as in Llama, Mamba-2 and Jamba. There is no warning, and the logits
# have the right shape.
#
# Mamba and Falcon-Mamba multiply the new token's vector by the whole mask, and so get a copy of it
# for each token so far. The recurrence takes the first copy, but the convolution's cache keeps the
# last ones. So from the second step on, the tokens before seem to have been all the same. If the
# mask begins with padding, the first copy is 0, and the token is lost. Without a mask, or with one
# for the new token alone, both are right. `generate` passes a mask with the prompt only.
#
# Bamba's positions begin at 0 in each call, with or without a mask. They are right if position_ids
# are passed, as `generate` does.
#
# Here small models with random weights read six tokens, and then six more, one by one. The numbers
# tell how far the logits of these are from those of reading all twelve at once, relative to their
# size.
#
# Seen on 2026-11-29 (transformers 5.24.0, PyTorch 2.13.0, a CPU):
#
#   Llama                       0.000 0.000 0.000 0.000 0.000 0.000
#   Mamba-2                     0.000 0.000 0.000 0.000 0.000 0.000
#   Jamba                       0.000 0.000 0.000 0.000 0.000 0.000
#   Mamba, no mask              0.000 0.000 0.000 0.000 0.000 0.000
#   Mamba, mask                 0.000 0.607 0.572 0.444 0.975 0.725
#   Mamba, mask, padding        0.537 0.311 0.499 0.471 0.992 0.431
#   Falcon-Mamba, no mask       0.000 0.000 0.000 0.000 0.000 0.000
#   Falcon-Mamba, mask          0.000 0.593 0.569 0.506 1.038 0.705
#   Falcon-Mamba, mask, padding 0.537 0.311 0.504 0.510 1.057 0.441
#   Bamba, position_ids         0.000 0.000 0.000 0.000 0.000 0.000
#   Bamba                       0.039 0.077 0.142 0.064 0.201 0.187
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
SIZES = dict(hidden_size=32, num_hidden_layers=2, initializer_range=0.2)
HEADS = dict(intermediate_size=32, num_attention_heads=4, num_key_value_heads=4)
MAMBA2 = dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8)
JAMBA = dict(mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1, num_experts=1)
JAMBA |= dict(num_experts_per_tok=1)
BAMBA = dict(mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8, mamba_chunk_size=8)
BAMBA |= dict(attn_layer_indices=[1])

MODELS = {  # {name: (its classes' name, its settings)}
    "Llama": ("Llama", HEADS),
    "Mamba-2": ("Mamba2", MAMBA2),
    "Jamba": ("Jamba", HEADS | JAMBA),
    "Mamba": ("Mamba", dict(state_size=8)),
    "Falcon-Mamba": ("FalconMamba", dict(state_size=8)),
    "Bamba": ("Bamba", HEADS | BAMBA),
}


def new_model(name):
    classes, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{classes}Config")(**TOKENS, **SIZES, **settings)
    return getattr(transformers, f"{classes}ForCausalLM")(config).eval()


def distances(model, mask=True, positions=False, padding=0):
    """Of the logits of the tokens that are read one by one."""
    tokens = torch.tensor([[7, 21, 3, 44, 15, 30, 9, 12, 33, 18, 27, 5]])
    expected = model(tokens).logits[0]
    tokens = torch.cat([torch.zeros(1, padding, dtype=torch.long), tokens], dim=1)
    whole_mask = (torch.arange(tokens.shape[1]) >= padding).long()[None]
    start, stop, result = 0, 6 + padding, []
    inputs = {"attention_mask": whole_mask[:, :stop]}
    while True:
        outputs = model(tokens[:, start:stop], use_cache=True, **inputs)
        assert outputs.logits.shape == (1, stop - start, 50)
        right = expected[stop - 1 - padding]
        result.append(((outputs.logits[0, -1] - right).norm() / right.norm()).item())
        if stop == tokens.shape[1]:
            assert result[0] < 1e-5  # the prompt's
            return result[1:]
        start, stop = stop, stop + 1
        inputs = {"cache": outputs.cache}
        inputs |= {"attention_mask": whole_mask[:, :stop]} if mask else {}
        inputs |= {"position_ids": torch.tensor([[start - padding]])} if positions else {}


def show(title, numbers):
    print(f"{title:27}", *(f"{number:.3f}" for number in numbers))
    return numbers


with torch.no_grad():
    for name in ("Llama", "Mamba-2", "Jamba"):
        assert max(show(name, distances(new_model(name)))) < 1e-5
    for name in ("Mamba", "Falcon-Mamba"):
        model = new_model(name)
        assert max(show(f"{name}, no mask", distances(model, mask=False))) < 1e-5
        numbers = show(f"{name}, mask", distances(model))
        assert numbers[0] < 1e-5 and min(numbers[1:]) > 0.1
        assert min(show(f"{name}, mask, padding", distances(model, padding=3))) > 0.1
    model = new_model("Bamba")
    assert max(show("Bamba, position_ids", distances(model, positions=True))) < 1e-5
    assert min(show("Bamba", distances(model))) > 0.005
PYTHON
