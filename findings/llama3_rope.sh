#!/usr/bin/env bash
# CTranslate2 4.8.5: a converted Llama 3.1, 3.2 or 3.3 has no RoPE scaling.
#
# In these models the slow channels of RoPE turn 8 or 32 times more slowly than in Llama 3
# (rope_type "llama3"), so that they can read long texts. The converter knows this type, but writes
# the factor only for type "linear", and the length of the original context not at all. At run time
# the factor is then 1, so nothing is scaled. There is no error or warning.
#
# One would expect the scaling, because the converter has a case for "llama3" (pull request 1751),
# and raises an error for types that it lacks.
#
# Below is how far the log probabilities of a converted model are from those of transformers 5.24.0,
# in the first 256 of 4,096 tokens and in all, and from those of transformers without scaling, in
# all.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   default           off by 0.00 and 0.00, from unscaled by 0.00
#   linear, factor 8  off by 0.00 and 0.00, from unscaled by 2.90
#   llama3, factor 8  off by 0.17 and 1.68, from unscaled by 0.00
#   llama3, factor 32 off by 0.19 and 1.77, from unscaled by 0.00
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0 \
    ctranslate2==4.8.5
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_grad_enabled(False)
T = 4096
words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 64))]
numbers = {word: number for number, word in enumerate(words)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(numbers, unk_token="<unk>")),
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
)
tokens = [1, *np.random.default_rng(0).integers(3, 64, T - 1).tolist()]


def new_model(**rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=dict(rope_theta=500000.0, **rope),
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.mul_(4)  # so that attention matters
    return model


def of_transformers(model):
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


def of_ctranslate2(model):
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    ctranslate2.converters.TransformersConverter("model").convert("converted", force=True)
    generator = ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)
    text = [[words[token] for token in tokens]]
    return np.array(generator.forward_batch(text, return_log_probs=True))[0]


LLAMA3 = dict(
    rope_type="llama3",
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
unscaled = of_transformers(new_model(rope_type="default"))
for title, rope in {
    "default": dict(rope_type="default"),
    "linear, factor 8": dict(rope_type="linear", factor=8.0),
    "llama3, factor 8": dict(factor=8.0, **LLAMA3),
    "llama3, factor 32": dict(factor=32.0, **LLAMA3),
}.items():
    model = new_model(**rope)
    converted = of_ctranslate2(model)
    off = np.abs(converted - of_transformers(model)).max(axis=1)
    off_unscaled = np.abs(converted - unscaled).max()
    print(
        f"{title:17} off by {off[:256].max():.2f} and {off.max():.2f},",
        f"from unscaled by {off_unscaled:.2f}",
    )
    wrong = title.startswith("llama3")
    assert off.max() > 1 if wrong else off.max() < 1e-2
    assert (off_unscaled < 1e-2) == (wrong or title == "default")
PYTHON
