#!/usr/bin/env bash
# MLX 0.32.4: checkpointing draws dropout anew in the backward pass, so gradients are wrong.
#
# mx.checkpoint runs a function a second time in the backward pass, so that its intermediate values
# needn't be kept. But random numbers aren't the same the second time. So the gradient mixes two
# dropout masks, and is that of no loss. It concerns nn.utils.checkpoint, the option `checkpoint` of
# nn.Transformer (which also has dropout), and the flag --grad-checkpoint of mlx-lm, if its LoRA
# layers have dropout. Nothing is reported.
#
# One would expect the gradients of the same loss without checkpointing. PyTorch's checkpoint puts
# the state of the random numbers back for the second run (preserve_rng_state, by default). MLX is
# right if the mask is drawn with a key of its own, which nn.Dropout has no argument for.
#
# Below is how far gradients are from those without checkpointing, with the same seed, as a share of
# their norm, for dropouts of 0, 0.1 and 0.5. The losses are the same.
#
# Seen on 2026-11-28 (mlx-lm 0.32.2, PyTorch 2.13.0, a CPU):
#
#   nn.TransformerEncoder:  off by 0.00, 0.31, 0.83
#   mlx-lm, LoRA:           off by 0.00, 0.38, 0.99
#   nn.utils.checkpoint:    off by 0.00, 0.26, 0.69
#   Linear, own key:        off by 0.00, 0.00, 0.00
#   PyTorch's checkpoint:   off by 0.00, 0.00, 0.00
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlx[cpu]==0.32.4 mlx-lm==0.32.2 torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS = 32, 24


def gradients(model, loss):
    """(loss, all gradients in one vector), always with the same seed"""
    mx.random.seed(1)
    value, tree = nn.value_and_grad(model, loss)()
    return value.item(), np.concatenate([np.ravel(g) for _, g in tree_flatten(tree)])


def perceptron(dropout):
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def utils_checkpoint(dropout, checkpointed):
    model = perceptron(dropout)
    function = nn.utils.checkpoint(model) if checkpointed else model
    x = mx.random.normal((TOKENS, WIDTH))
    return gradients(model, lambda: function(x).square().mean())


def own_key(dropout, checkpointed):
    model, key = nn.Linear(WIDTH, WIDTH), mx.random.key(2)

    def dropped(x):
        y = nn.relu(model(x))
        return y * mx.random.bernoulli(1 - dropout, y.shape, key=key) / (1 - dropout)

    function = nn.utils.checkpoint(model, dropped) if checkpointed else dropped
    x = mx.random.normal((TOKENS, WIDTH))
    return gradients(model, lambda: function(x).square().mean())


def transformer(dropout, checkpointed):
    model = nn.TransformerEncoder(2, WIDTH, 4, dropout=dropout, checkpoint=checkpointed)
    x, target = (mx.random.normal((2, TOKENS, WIDTH)) for _ in range(2))
    return gradients(model, lambda: (model(x, None) - target).square().mean())


def lora(dropout, checkpointed):
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=2, intermediate_size=64, vocab_size=40)
    sizes |= dict(num_attention_heads=4, rms_norm_eps=1e-5, model_type="llama")
    model = llama.Model(llama.ModelArgs.from_dict(sizes))
    model.freeze()
    linear_to_lora_layers(model, 2, dict(rank=4, scale=2.0, dropout=dropout))
    for layer in (m for _, m in model.named_modules() if hasattr(m, "lora_b")):
        layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    usual = llama.TransformerBlock.__call__
    if checkpointed:
        grad_checkpoint(model.layers[0])  # does what --grad-checkpoint does
    tokens = mx.random.randint(0, 40, (2, TOKENS))

    def loss():
        return nn.losses.cross_entropy(model(tokens), tokens, reduction="mean")

    results = gradients(model.train(), loss)
    llama.TransformerBlock.__call__ = usual
    return results


def in_torch(dropout, checkpointed):
    torch.manual_seed(0)
    linears = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layers = [linears[0], torch.nn.ReLU(), torch.nn.Dropout(dropout), linears[1]]
    model, x = torch.nn.Sequential(*layers), torch.randn(TOKENS, WIDTH)
    y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    loss = y.square().mean()
    loss.backward()
    return loss.item(), np.concatenate([w.grad.numpy().ravel() for w in model.parameters()])


WAYS = {
    "nn.TransformerEncoder": transformer,
    "mlx-lm, LoRA": lora,
    "nn.utils.checkpoint": utils_checkpoint,
    "Linear, own key": own_key,
    "PyTorch's checkpoint": in_torch,
}
for name, way in WAYS.items():
    offs = []
    for dropout in (0.0, 0.1, 0.5):
        mx.random.seed(0)
        loss, right = way(dropout, False)
        mx.random.seed(0)
        same, found = way(dropout, True)
        assert abs(loss - same) < 1e-5 * abs(loss)
        offs.append(np.linalg.norm(found - right) / np.linalg.norm(right))
        wrong = dropout > 0 and way in (utils_checkpoint, transformer, lora)
        assert offs[-1] > 0.1 if wrong else offs[-1] < 1e-4, name
    print(f"{name + ':':23} off by {offs[0]:.2f}, {offs[1]:.2f}, {offs[2]:.2f}")
PYTHON
