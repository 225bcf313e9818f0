#!/usr/bin/env bash
# RecurrentGemma 1.0.1: in a batch, Sampler cuts off the beginning of the shorter prompts' texts.
#
# Sampler pads the shorter prompts of a batch on the left. With echo=True it returns prompts and
# texts, and cuts off the padding: the first n tokens, if n were added. With echo=False, the
# default, it returns new tokens only, but cuts off the first n of these, too. So if a prompt is 8
# tokens shorter than the longest one, the first 8 tokens of its text are missing, and so are their
# logits. Both forms, for JAX and for PyTorch, do so, and there is no error.
#
# One would expect the text that a prompt gets alone, or with echo=True.
#
# With JAX, padding also changes the new text of a very short prompt, even with echo=True. The
# sampler first reads the prompt, with a token for its beginning, but without its last token. The
# convolutions mask the padding there, but keep the last three inputs unmasked. So if fewer than
# three tokens are read, the state holds padding. (In PyTorch the mask is applied in place, and so
# reaches the state.)
#
# Here are models with random weights, and a vocabulary of letters (_ is any other token). Each text
# should have 24 of them. In the last rows, 27 prompts of n letters have a longer one in their batch
# or not.
#
# Seen on 2026-11-28 (JAX 0.10.2, PyTorch 2.13.0, a CPU):
#
#   JAX
#     the quick brown fox  alone _bpy pc_crmjfjlpommmjmfp, in a batch _bpy pc_crmjfjlpommmjmfp
#     jumps over           alone mtrpfmmjrmmmmmphhhhchhbp, in a batch mmmmmphhhhchhbp
#     the lazy dog         alone rfphhhhhhhhhhhhhhhjvrthk, in a batch hhhhhhhhhhhjvrthk
#     prompts of 1: padding changes 27 of 27 texts
#     prompts of 2: padding changes 27 of 27 texts
#     prompts of 3: padding changes 0 of 27 texts
#   PyTorch
#     the quick brown fox  alone zdvwvdvdvvvvvvvvvvvvvvvv, in a batch zdvwvdvdvvvvvvvvvvvvvvvv
#     jumps over           alone ooooccccc lwvdool vdvdvd, in a batch  lwvdool vdvdvd
#     the lazy dog         alone gggggggggggggo_egnzbeggg, in a batch ggggggo_egnzbeggg
#     prompts of 1: padding changes 0 of 27 texts
#     prompts of 2: padding changes 0 of 27 texts
#     prompts of 3: padding changes 0 of 27 texts
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "recurrentgemma[jax]==1.0.1" jax==0.10.2 flax==0.12.8 \
    torch==2.13.0 numpy==2.3.5
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import jax
import jax.numpy as jnp
import recurrentgemma.jax
import recurrentgemma.torch
import torch
from recurrentgemma.common import GriffinConfig, TemporalBlockType

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PROMPTS = ["the quick brown fox", "jumps over", "the lazy dog"]
NEW = 24
RECURRENT, ATTENTION = TemporalBlockType.RECURRENT, TemporalBlockType.ATTENTION
CONFIG = GriffinConfig(
    vocab_size=len(LETTERS) + 3,
    width=32,
    mlp_expanded_width=64,
    num_heads=4,
    block_types=(RECURRENT, RECURRENT, ATTENTION),
    embeddings_scale_by_sqrt_dim=True,
    attention_window_size=64,
    logits_soft_cap=30.0,
)


class Letters:
    """A vocabulary with the methods of SentencePieceProcessor that Sampler uses"""

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def GetPieceSize(self):
        return CONFIG.vocab_size

    def EncodeAsIds(self, text):
        return [LETTERS.index(letter) + 3 for letter in text]

    def DecodeIds(self, ids):
        return "".join(LETTERS[i - 3] if i > 2 else "_" for i in ids)


def jax_sampler():
    model = recurrentgemma.jax.Griffin(CONFIG, dtype=jnp.float32)
    positions = jnp.arange(4)[None]
    params = model.init(jax.random.key(0), positions, positions)["params"]
    weights, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(3), len(weights))
    weights = [w + 0.5 * jax.random.normal(key, w.shape) for w, key in zip(weights, keys)]
    return recurrentgemma.jax.Sampler(model, Letters(), jax.tree.unflatten(tree, weights))


def torch_sampler():
    torch.manual_seed(3)
    model = recurrentgemma.torch.Griffin(CONFIG, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn_like(weight))
    return recurrentgemma.torch.Sampler(model, Letters())


for name, sampler in (("JAX", jax_sampler()), ("PyTorch", torch_sampler())):

    def texts(prompts, echo=False):
        return sampler(prompts, NEW, echo=echo, end_sampling_at_eos_token=False).text

    print(name)
    together, echoed = texts(PROMPTS), texts(PROMPTS, echo=True)
    for prompt, text, whole in zip(PROMPTS, together, echoed):
        (alone,) = texts([prompt])
        print(f"  {prompt:20} alone {alone}, in a batch {text or '(empty)'}")
        assert len(alone) == NEW and whole == "_" + prompt + alone
        assert text == alone[len(PROMPTS[0]) - len(prompt) :]
    for length in (1, 2, 3):
        prompts = [(letter * length) for letter in LETTERS]
        alone, (*padded, _) = texts(prompts, echo=True), texts([*prompts, PROMPTS[0]], echo=True)
        changed = sum(map(str.__ne__, alone, padded))
        print(f"  prompts of {length}: padding changes {changed} of {len(LETTERS)} texts")
        assert (changed > 0) == (name == "JAX" and length < 3)
PYTHON
