#!/usr/bin/env bash
# titans-pytorch 0.5.5: with the cache, sample() forgets the end of a prompt that is longer than a
# segment.
#
# By default, attention of MemoryAsContextTransformer cuts a text into segments, and a token sees
# only those before it in its own segment. The cache holds the keys of the current segment, and is
# emptied when it is full. After the prompt it holds the last segment_len keys, wherever segments
# begin. So if the prompt ends in its second segment or later, the cache looks full, and is emptied.
# New tokens don't see those of their segment that are in the prompt, and from then on segments
# begin elsewhere. So sample(prompt, length, use_cache=True) writes another text, without a warning.
#
# One would expect the text of use_cache=False. It is right if the prompt is not longer than a
# segment, or fills its segments, and with sliding_window_attn=True. (Issue 61 there, an error in
# the same cache with neural_mem_weight_residual=True, is closed.)
#
# A segment has 16 tokens here. Below is how far the log probabilities in the first step with the
# cache are from those without, and how many of 40 tokens differ if sample() always takes the
# likeliest one.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   prompt  segments            sliding window
#        5  0.00,  0 of 40      0.00,  0 of 40
#       15  0.00,  0 of 40      0.00,  0 of 40
#       16  0.00,  0 of 40      0.00,  0 of 40
#       17  0.29, 30 of 40      0.00,  0 of 40
#       24  0.33, 34 of 40      0.00,  0 of 40
#       31  0.49, 34 of 40      0.00,  0 of 40
#       32  0.00,  0 of 40      0.00,  0 of 40
#       40  0.17, 25 of 40      0.00,  0 of 40
#       48  0.00,  0 of 40      0.00,  0 of 40
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 titans-pytorch==0.5.5 \
    x-transformers==2.31.10 hyper-connections==0.4.11 rotary-embedding-torch==0.9.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from titans_pytorch import MemoryAsContextTransformer

SEGMENT, NEW = 16, 40


def new_model(sliding):
    torch.manual_seed(0)
    model = MemoryAsContextTransformer(
        num_tokens=50,
        dim=32,
        depth=2,
        segment_len=SEGMENT,
        dim_head=8,
        heads=4,
        neural_memory_segment_len=4,
        sliding_window_attn=sliding,
    )
    return model.eval()


@torch.no_grad()
def compare(model, length):
    """(difference in the first step with the cache, number of tokens that differ)"""
    prompt = torch.randint(50, (1, length), generator=torch.Generator().manual_seed(length))
    logits, cache = model(prompt, return_cache=True)
    text = torch.cat((prompt, logits[:, -1:].argmax(-1)), 1)
    cached = model(text, cache=cache, return_cache=True)[0][:, -1].log_softmax(-1)
    off = (cached - model(text)[:, -1].log_softmax(-1)).abs().max().item()

    settings = dict(temperature=0.0, show_progress=False)
    texts = [model.sample(prompt, length + NEW, use_cache=c, **settings) for c in (False, True)]
    return off, (texts[0] != texts[1]).sum().item()


print("prompt  segments            sliding window")
models = [new_model(sliding) for sliding in (False, True)]
for length in (5, 15, 16, 17, 24, 31, 32, 40, 48):
    (off, other), (sliding_off, sliding_other) = (compare(model, length) for model in models)
    words = f"{off:.2f}, {other:2} of {NEW}      {sliding_off:.2f}, {sliding_other:2} of {NEW}"
    print(f"{length:6}  {words}")
    wrong = length > SEGMENT and length % SEGMENT != 0
    assert (off > 0.1) == (other > 0) == wrong
    assert sliding_off < 0.01 and sliding_other == 0
PYTHON
