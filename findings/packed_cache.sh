#!/usr/bin/env bash
# transformers 5.24.0: packed documents see earlier ones in training, unless use_cache=False.
#
# DataCollatorWithFlattening packs several documents into one row, with positions that begin again
# at each document. By these, models with the usual attention, SDPA, keep the documents apart. But
# they look at positions only if there is no cache, and the default, use_cache=True, makes one, even
# after model.train(), where nobody reads it. Trainer switches use_cache off; in any other training
# loop, model(**batch) mixes the documents. There is no warning.
#
# One would expect that a cache which is still empty changes no logits. (The collator's page only
# says that attention must be able to handle such a row. Here attention can, but doesn't.)
#
# Below is the loss of three packed documents, next to the mean loss of the same tokens if each
# document is read alone. Then comes how far the last two documents' logits move if the first one is
# changed.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights:
#
#   Llama: alone 7.226
#     default          packed 6.982, moved by 15.70
#     use_cache=False  packed 7.226, moved by 0.00
#   Qwen3: alone 7.823
#     default          packed 7.288, moved by 14.01
#     use_cache=False  packed 7.823, moved by 0.00
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
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

transformers.logging.set_verbosity_error()
SIZE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.5,
)
FIRST = 24  # tokens of the first document
generator = torch.Generator().manual_seed(1)
DOCUMENTS = [torch.randint(64, (length,), generator=generator) for length in (FIRST, 16, 9)]
examples = [{"input_ids": document.tolist()} for document in DOCUMENTS]
batch = DataCollatorWithFlattening(return_tensors="pt")(examples)
assert sorted(batch) == ["input_ids", "labels", "position_ids"]
other = batch | {"input_ids": batch["input_ids"].clone()}
other["input_ids"][:, :FIRST] = (other["input_ids"][:, :FIRST] + 7) % 64


@torch.no_grad()
def loss_alone(model):
    """The mean over all tokens but each document's first."""
    losses, counts = [], [len(document) - 1 for document in DOCUMENTS]
    for document, count in zip(DOCUMENTS, counts):
        row = document[None]
        losses.append(model(input_ids=row, labels=row).loss.item() * count)
    return sum(losses) / sum(counts)


@torch.no_grad()
def packed(model, **cache):
    """(loss, how far later documents' logits move)"""
    usual, changed = model(**batch, **cache), model(**other, **cache)
    moved = (usual.logits - changed.logits)[:, FIRST:].abs().max()
    return usual.loss.item(), moved.item()


for name, config, kind in (
    ("Llama", LlamaConfig, LlamaForCausalLM),
    ("Qwen3", Qwen3Config, Qwen3ForCausalLM),
):
    torch.manual_seed(0)
    model = kind(config(**SIZE)).train()
    alone = loss_alone(model)
    mixed, moved = packed(model)
    apart, unmoved = packed(model, use_cache=False)
    print(f"{name}: alone {alone:.3f}")
    print(f"  default          packed {mixed:.3f}, moved by {moved:.2f}")
    print(f"  use_cache=False  packed {apart:.3f}, moved by {unmoved:.2f}")
    assert abs(mixed - alone) > 0.01 and moved > 1
    assert abs(apart - alone) < 1e-4 and unmoved < 1e-4
PYTHON
