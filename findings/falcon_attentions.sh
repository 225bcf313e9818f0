#!/usr/bin/env bash
# Falcon in transformers 5.24.0: output_attentions=True changes the text, and may show later tokens.
#
# By default, attention is PyTorch's SDPA, which gives no weights. With output_attentions=True,
# Falcon computes them itself, but with the mask that was made for SDPA: True where a token may
# look, False where it may not. It adds this mask to the scores, as 1 and 0, and so hides nothing.
# Models with ALiBi, such as falcon-rw-1b, hide the future, but add ALiBi twice, because it is in
# the mask already. They also do so with attn_implementation="eager". There is no warning.
#
# One would expect the same logits, as other models give them. (Issue 29946, of 2024, was about
# ALiBi and output_attentions, too, and is closed.)
#
# Below is how far logits are from the default's, how far earlier logits move if the last token is
# changed, and how many of 30 tokens of generate() differ.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   RoPE  default           off by 0.00, moved by 0.00,  0 of 30 tokens
#   RoPE  output_attentions off by 1.96, moved by 0.05,  2 of 30 tokens
#   RoPE  eager             off by 0.00, moved by 0.00,  0 of 30 tokens
#   ALiBi default           off by 0.00, moved by 0.00,  0 of 30 tokens
#   ALiBi output_attentions off by 0.54, moved by 0.00, 29 of 30 tokens
#   ALiBi eager             off by 0.54, moved by 0.00, 29 of 30 tokens
#   ALiBi output_attentions: weights are off by 0.09 from ALiBi once, 0.00 from ALiBi twice
#   ALiBi eager: weights are off by 0.09 from ALiBi once, 0.00 from ALiBi twice
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import FalconConfig, FalconForCausalLM

transformers.logging.set_verbosity_error()
torch.set_grad_enabled(False)
HEADS, K, T = 4, 16, 48
tokens = torch.randint(100, (1, T), generator=torch.Generator().manual_seed(0))
other = tokens.clone()
other[0, -1] = (other[0, -1] + 1) % 100


def new_model(attention, **options):
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=100,
        hidden_size=HEADS * K,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        eos_token_id=None,
        **options,
    )
    model = FalconForCausalLM._from_config(config, attn_implementation=attention)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.mul_(4)  # so that attention matters
    return model.eval()


def text(model, **options):
    prompt = tokens[:, :16]
    options |= dict(max_new_tokens=30, do_sample=False, return_dict_in_generate=True)
    return model.generate(prompt, **options).sequences


def attention_by_hand(model, times):
    """The first layer's, with ALiBi added so many times."""
    block = model.transformer.h[0]
    x = block.input_layernorm(model.transformer.word_embeddings(tokens))
    qkv = block.self_attention.query_key_value(x).view(T, HEADS, 3, K)
    q, k, _ = qkv.permute(2, 1, 0, 3)
    slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
    bias = slopes[:, None, None] * torch.arange(T)
    scores = (q @ k.mT + times * bias) / K**0.5
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def off_by_hand(model):
    """How far the first layer's attention is from that with ALiBi once, and with ALiBi twice."""
    weights = model(tokens, output_attentions=True).attentions[0][0]
    return [(weights - attention_by_hand(model, n)).abs().max().item() for n in (1, 2)]


def compare(way, model, usual, is_right, looks_ahead=False, **asked):
    logits = model(tokens, **asked).logits
    off = (logits - usual(tokens).logits).abs().max().item()
    moved = (model(other, **asked).logits - logits)[:, :-1].abs().max().item()
    different = (text(model, **asked) != text(usual)).sum().item()
    print(f"{way:23} off by {off:.2f}, moved by {moved:.2f}, {different:2} of 30 tokens")
    if is_right:
        assert off < 1e-3 and different == 0
    else:
        assert off > 0.1 and different > 0
    assert moved > 0.01 if looks_ahead else moved < 1e-3


usual, eager = new_model("sdpa"), new_model("eager")
compare("RoPE  default", usual, usual, is_right=True)
asked = {"output_attentions": True}
compare("RoPE  output_attentions", usual, usual, is_right=False, looks_ahead=True, **asked)
compare("RoPE  eager", eager, usual, is_right=True)

# As in falcon-rw-1b:
RW = dict(
    alibi=True, multi_query=False, new_decoder_architecture=False, parallel_attn=False, bias=True
)
usual, eager = new_model("sdpa", **RW), new_model("eager", **RW)
compare("ALiBi default", usual, usual, is_right=True)
compare("ALiBi output_attentions", usual, usual, is_right=False, **asked)
compare("ALiBi eager", eager, usual, is_right=False)
for way, model in (("output_attentions", usual), ("eager", eager)):
    once, twice = off_by_hand(model)
    off = f"{once:.2f} from ALiBi once, {twice:.2f} from ALiBi twice"
    print(f"ALiBi {way}: weights are off by {off}")
    assert once > 0.01 and twice < 1e-3
PYTHON
