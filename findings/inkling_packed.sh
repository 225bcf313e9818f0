#!/usr/bin/env bash
# Inkling in transformers 5.24.0: its convolutions mix packed documents, even with seq_idx.
#
# DataCollatorWithFlattening packs several documents into one row, and marks them with position_ids,
# and with seq_idx if asked (return_seq_idx=True). Attention finds the documents by their positions
# and keeps them apart. A short convolution needs seq_idx. LFM2, Qwen3-Next, Bamba and others hand
# it on to their kernel, and where that is missing, as on a CPU, they raise an error. Inkling's
# convolutions look for seq_idx, too, but its layers don't hand it on. So a document's first three
# tokens see the end of the document before, and attention spreads that to all others. There is no
# error, and a kernel doesn't help, because it isn't told either.
#
# Here are two documents, and how far the second one's logits are from those that it has alone, as a
# share of their standard deviation. With the convolutions' weights at 0 there is no difference.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), with random weights of standard deviation 0.2; Inkling
# in 5.23.0 is the same, and Inkling2, too, which is right in 5.24.0:
#
#   Inkling: off by 3.59
#       its convolutions get: cache, conv_mask
#       with convolutions of 0: off by 0.00
#   Inkling2: ValueError, `causal_conv1d_fn` can't keep packed sequences apart ..
#   LFM2: ValueError, `causal_conv1d_fn` can't keep packed sequences apart ..
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
from transformers import DataCollatorWithFlattening, Lfm2Config, Lfm2ForCausalLM
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2ForCausalLM

transformers.logging.set_verbosity_error()
FIRST, SECOND = [5, 9, 31, 7, 22, 14, 8, 3, 17], [11, 4, 26, 38, 19, 6, 33, 12, 29, 21, 10]
SIZE = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def ready(model):
    """The model with random weights, and the names of the arguments that its convolutions get."""
    torch.manual_seed(0)
    arguments = set()
    for module in model.modules():
        if type(module).__name__.endswith(("ShortConvolution", "ShortConv")):
            module.register_forward_pre_hook(
                lambda module, _, kwargs: arguments.update(kwargs), with_kwargs=True
            )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model.eval(), arguments


@torch.no_grad()
def off(model):
    """How far the second document's logits are from those that it has alone"""
    documents = [{"input_ids": FIRST}, {"input_ids": SECOND}]
    collator = DataCollatorWithFlattening(return_tensors="pt", return_seq_idx=True)
    batch = collator(documents)
    assert batch["seq_idx"].tolist() == [[0] * len(FIRST) + [1] * len(SECOND)]
    packed = model(**batch, use_cache=False).logits[0, len(FIRST) :]
    alone = model(torch.tensor([SECOND]), use_cache=False).logits[0]
    return ((packed - alone).abs().max() / alone.std()).item()


inkling, arguments = ready(InklingForCausalLM(InklingTextConfig(**SIZE)))
mixed = off(inkling)
print(f"Inkling: off by {mixed:.2f}")
assert mixed > 0.1
print("    its convolutions get:", ", ".join(sorted(arguments)))
assert "conv_mask" in arguments and "seq_idx" not in arguments

for name, weight in inkling.named_parameters():
    if "conv1d" in name:
        torch.nn.init.zeros_(weight)
apart = off(inkling)
print(f"    with convolutions of 0: off by {apart:.2f}")
assert apart < 1e-4

inkling2 = Inkling2ForCausalLM(Inkling2TextConfig(**SIZE))
lfm2 = Lfm2ForCausalLM(Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]))
for name, model in (("Inkling2", inkling2), ("LFM2", lfm2)):
    try:
        off(ready(model)[0])
    except ValueError as error:
        print(f"{name}: ValueError, {str(error).split('without')[0]}..")
        assert "packed sequences" in str(error)
    else:
        raise AssertionError(f"{name} raised no error")
PYTHON
