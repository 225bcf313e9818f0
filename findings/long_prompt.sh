#!/usr/bin/env bash
# CTranslate2 4.8.5: Mistral and Gemma 3 read a prompt wrongly if it is longer than their window.
#
# In these models a token sees a window of tokens before it; in Gemma 3 some layers see all.
# generate_batch() reads a longer prompt in pieces of one window, and shows a token all earlier ones
# of its own piece and of the piece before. So it may see nearly twice as many as in training, and
# the text is another one. There is no error or warning. (With the mask of these pieces, Mistral in
# transformers gives the same numbers.) A shorter prompt is right, also if the text then grows
# beyond the window.
#
# One would expect the model's own text, because the pieces are there for such prompts (pull request
# 1524), or an error, as forward_batch() raises one.
#
# Below is how far the log probabilities of the first new token are from those of transformers
# 5.24.0, and how many of 16 tokens are others. The window is 32.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   Mistral, prompt of  20: off by 0.00,  0 of 16 tokens
#   Mistral, prompt of  48: off by 0.42, 16 of 16 tokens
#   Mistral, prompt of 200: off by 1.24, 15 of 16 tokens
#   Gemma 3, prompt of  20: off by 0.00,  0 of 16 tokens
#   Gemma 3, prompt of  48: off by 0.45, 16 of 16 tokens
#   Gemma 3, prompt of 200: off by 1.20,  9 of 16 tokens
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
    text, first = list(prompt), None
    for _ in range(NEW):
        log_probabilities = model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        first = log_probabilities if first is None else first
        text.append(log_probabilities.argmax().item())
    return first, text[len(prompt) :]


def text_of_converted(generator, prompt):
    (result,) = generator.generate_batch(
        [[words[token] for token in prompt]],
        max_length=NEW,
        sampling_topk=1,
        end_token=[],
        include_prompt_in_result=False,
        return_logits_vocab=True,
    )
    first = torch.tensor(np.array(result.logits[0][0], dtype=np.float32))
    return first.log_softmax(-1), result.sequences_ids[0]


for title, config in {
    "Mistral": MistralConfig(**SIZES),
    "Gemma 3": Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16),
}.items():
    model = new_model(config)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    ctranslate2.converters.TransformersConverter("model").convert("converted", force=True)
    generator = ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)
    for length in (20, 48, 200):
        right, text = text_of(model, tokens[:length])
        first, new = text_of_converted(generator, tokens[:length])
        off = (first - right).abs().max().item()
        others = sum(a != b for a, b in zip(new, text))
        print(f"{title}, prompt of {length:3}: off by {off:.2f}, {others:2} of {NEW} tokens")
        assert (off < 1e-2 and others == 0) if length < WINDOW else (off > 0.1 and others > 4)
PYTHON
