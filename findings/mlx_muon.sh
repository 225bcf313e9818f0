#!/usr/bin/env bash
# MLX 0.32.4: with its default weight decay, Muon forgets the gradient, and shrinks the weights.
#
# Muon makes each update orthogonal, so its size doesn't depend on the gradient's. MLX adds
# weight_decay * weight to the gradient before that, as plain SGD does. A matrix has a length of 10
# or more, and its gradient often one of 0.1 or less. So with the default of 0.01 the sum points
# largely along the weight itself, and the orthogonal update takes the weight towards 0, at full
# speed. How much is left of the gradient depends on its size, and so on a factor of the loss. There
# is no warning.
#
# One would expect decay as in AdamW, the weights times 1 - learning rate * weight_decay, and an
# update that doesn't depend on a factor of the loss. By their sources, torch.optim.Muon, Optax and
# Keras do so, and so do MLX's own AdamW and Lion. (MLX's documentation speaks of an "L2 penalty",
# but so does PyTorch's.) weight_decay=0 is right, and one can multiply
# the weights by hand.
#
# Here a model learns a table: the next token from the last two. Muon has its two matrices (a
# learning rate of 0.02), and Adam the rest. Below is the loss after 200 steps, with the loss as it
# is and divided by 100. Without having learnt, it is log(32) = 3.47.
#
# Seen on 2026-11-29 (a CPU):
#
#   no decay        loss: 0.03, divided by 100: 0.03
#   0.01 by default loss: 1.35, divided by 100: 3.30
#   0.01 by hand    loss: 0.03, divided by 100: 0.03
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Adam, Muon, MultiOptimizer

VOCABULARY, D, HIDDEN, RATE = 32, 32, 128, 0.02
TABLE = mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, VOCABULARY)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.first = nn.Linear(2 * D, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def __call__(self, tokens):
        x = nn.gelu(self.first(self.embedding(tokens).flatten(1)))
        return self.head(x + nn.gelu(self.second(x)))


def is_matrix(name, weight):
    return name in ("first.weight", "second.weight")


def loss(model, tokens):
    return nn.losses.cross_entropy(model(tokens), TABLE[tokens[:, 0], tokens[:, 1]]).mean()


def trained(muon, factor, decay_by_hand=0.0):
    """the loss after training"""
    mx.random.seed(0)
    model, draws = Model(), np.random.default_rng(1)
    optimizer = MultiOptimizer([muon, Adam(3e-3)], [is_matrix])
    step = nn.value_and_grad(model, lambda model, tokens: factor * loss(model, tokens))
    for _ in range(200):
        _, gradients = step(model, mx.array(draws.integers(0, VOCABULARY, (128, 2))))
        optimizer.update(model, gradients)
        for layer in (model.first, model.second):
            layer.weight = layer.weight * (1 - RATE * decay_by_hand)
        mx.eval(model.parameters(), optimizer.state)
    return loss(model, mx.array(draws.integers(0, VOCABULARY, (1000, 2)))).item()


def show(title, by_hand=0.0, **options):
    losses = [trained(Muon(RATE, **options), factor, by_hand) for factor in (1, 0.01)]
    print(f"{title:15} loss: {losses[0]:.2f}, divided by 100: {losses[1]:.2f}")
    return losses


none = show("no decay", weight_decay=0.0)
default = show("0.01 by default")
by_hand = show("0.01 by hand", by_hand=0.01, weight_decay=0.0)
assert max(*none, *by_hand) < 0.2
assert default[0] > 0.5 and default[1] > 2.5
PYTHON
