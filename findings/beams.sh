#!/usr/bin/env bash
# Beam search in transformers 5.23.0 does not reorder the recurrent states of MiniMax and
# RecurrentGemma.
#
# After a step of beam search, some beams go on from another beam's text, so generate() reorders the
# cache. MiniMaxCache inherits `reorder_cache`, which reorders keys and values, but not its own
# `linear_cache`. RecurrentGemma keeps its states in its layers, where generate() doesn't look. So a
# beam goes on with the memory of another text. With a cache, beam search writes other texts than
# without, and reports log probabilities that these texts don't have. Greedy search is right. (Mamba
# had the same fault until pull request 46819. It is right here.)
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with three beams, against the same without a cache:
#
#   Mamba           the same texts, log probabilities off by up to 0.00
#   MiniMax         other texts, log probabilities off by up to 0.30
#   RecurrentGemma  other texts, log probabilities off by up to 14.81
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
import transformers

transformers.logging.set_verbosity_error()
sizes = dict(vocab_size=40, hidden_size=32, eos_token_id=None, pad_token_id=0)
heads = dict(intermediate_size=64, num_attention_heads=4, head_dim=8)
CONFIGS = {
    "Mamba": dict(state_size=8, num_hidden_layers=2),
    "MiniMax": dict(heads, num_key_value_heads=2, num_hidden_layers=4, num_local_experts=2,
                    block_size=16),
    "RecurrentGemma": dict(heads, num_key_value_heads=1, num_hidden_layers=3, lru_width=32),
}  # fmt: skip
LENGTH, NEW = 9, 12


def new_model(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **CONFIGS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # so that a token depends on those before it
            if weight.dim() > 1:
                weight.mul_(4)
    return model


@torch.no_grad()
def log_probability(model, tokens):
    """Of the tokens after the prompt."""
    log_probabilities = model(tokens, use_cache=False).logits.log_softmax(-1)[:, LENGTH - 1 : -1]
    return log_probabilities.gather(-1, tokens[:, LENGTH:, None]).sum((1, 2))


for name in CONFIGS:
    model = new_model(name)
    prompts = torch.randint(1, 40, (4, LENGTH))
    settings = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)

    def generated(**more):
        return model.generate(prompts, **settings, **more)

    greedy, greedy_cached = (generated(use_cache=cache).sequences for cache in (False, True))
    assert torch.equal(greedy, greedy_cached)
    right = generated(num_beams=3, use_cache=False).sequences
    found = generated(num_beams=3, use_cache=True, output_scores=True)
    same = torch.equal(found.sequences, right)
    claimed = found.sequences_scores * NEW  # generate() divides by the length
    off = (claimed - log_probability(model, found.sequences)).abs().max().item()
    words = "the same texts" if same else "other texts"
    print(f"{name:16}{words}, log probabilities off by up to {off:.2f}")
    assert same == (off < 0.01) == (name == "Mamba"), name
PYTHON
