#!/usr/bin/env bash
# CTranslate2 4.8.5: Mistral and Gemma 3 read a prompt wrongly if it is longer than their window.
#
# In these models a token sees a window of tokens before it; in Gemma 3 some layers see all.
# generate_batch() reads a longer prompt in pieces of one window, and shows a token all earlier ones
# of its own piece and of the piece before. So it may see nearly twice as many as in training, and
# the text differs. There is no error or warning. A shorter prompt is right, even if the text then
# grows beyond the window.
#
# One would expect the model's own text, because the pieces are there for such prompts (pull request
# 1524), or an error.
#
# Below is how far the log probabilities of the first new token are from those of transformers
# 5.24.0, and how many of 16 tokens differ. The window is 32. The last rows compare them with
# Mistral in transformers if a mask shows its tokens those pieces.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   Mistral, prompt of  20: off by 0.00,  0 of 16 tokens
#   Mistral, prompt of  48: off by 0.42, 16 of 16 tokens
#   Mistral, prompt of 200: off by 1.24, 15 of 16 tokens
#   Gemma 3, prompt of  20: off by 0.00,  0 of 16 tokens
#   Gemma 3, prompt of  48: off by 0.45, 16 of 16 tokens
#   Gemma 3, prompt of 200: off by 1.20,  9 of 16 tokens
#   Mistral, prompt of  48, in pieces: off by 0.00
#   Mistral, prompt of 200, in pieces: off by 0.00
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
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig
from transformers import PreTrainedTokenizerFast

torch.set_grad_enabled(False)
WINDOW, NEW = 32, 16
words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 64))]
numbers = {word: number for number, word in enumerate(words)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(numbers, unk_token="<unk>")),
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
)
tokens = [1, *np.random.default_rng(0).integers(3, 64, 199).tolist()]
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    sliding_window=WINDOW,
    bos_token_id=1,
    eos_token_id=2,
)


def new_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.mul_(6)  # so that attention matters
    return model.eval()


def text_of(model, prompt):
    """(log probabilities of the first new token, new tokens), without a cache"""
    text, rows = list(prompt), []
    for _ in range(NEW):
        rows.append(model(torch.tensor([text])).logits[0, -1].log_softmax(-1))
        text.append(rows[-1].argmax().item())
    return rows[0], text[len(prompt) :]


def text_of_converted(generator, prompt):
    (result,) = generator.generate_batch(
        [[words[token] for token in prompt]],
        max_length=NEW,
        sampling_topk=1,
        end_token=[],  # it never ends early
        include_prompt_in_result=False,
        return_logits_vocab=True,
    )
    first = torch.tensor(np.array(result.logits[0][0], dtype=np.float32))
    return first.log_softmax(-1), result.sequences_ids[0]


def in_pieces(model, prompt):
    """Log probabilities of the first new token if tokens see their piece and the one before."""
    i = torch.arange(len(prompt))[:, None]
    j = torch.arange(len(prompt))
    seen = (j <= i) & (j >= (i // WINDOW - 1) * WINDOW)
    seen[-1] = j > len(prompt) - 1 - WINDOW  # the last token comes alone, after the pieces
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    return model(torch.tensor([prompt]), attention_mask=mask).logits[0, -1].log_softmax(-1)


def converted(model):
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    ctranslate2.converters.TransformersConverter("model").convert("converted", force=True)
    return ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)


for title, config in {
    "Mistral": MistralConfig(**SIZES),
    "Gemma 3": Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16),
}.items():
    model = new_model(config)
    generator = converted(model)
    for length in (20, 48, 200):
        right, right_text = text_of(model, tokens[:length])
        first, text = text_of_converted(generator, tokens[:length])
        off = (first - right).abs().max().item()
        different = sum(a != b for a, b in zip(text, right_text))
        print(f"{title}, prompt of {length:3}: off by {off:.2f}, {different:2} of {NEW} tokens")
        if length < WINDOW:
            assert off < 1e-2 and different == 0
        else:
            assert off > 0.1 and different > 4

mistral = new_model(MistralConfig(**SIZES))
generator = converted(mistral)
mistral_without_window = new_model(MistralConfig(**SIZES | {"sliding_window": None}))
for length in (48, 200):
    first, _ = text_of_converted(generator, tokens[:length])
    off = (first - in_pieces(mistral_without_window, tokens[:length])).abs().max().item()
    print(f"Mistral, prompt of {length:3}, in pieces: off by {off:.2f}")
    assert off < 1e-2
PYTHON
