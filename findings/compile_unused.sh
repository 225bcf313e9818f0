#!/usr/bin/env bash
# PyTorch 2.13.0: under torch.compile, an output that the loss doesn't use changes gradients and
# weights.
#
# A model returns logits and something else: the logits of a second head, which is trained in other
# steps, or a number for the log. Without torch.compile, backward() goes only where the loss comes
# from. The compiled backward pass goes through everything, with zeros for the gradients of outputs
# that weren't used. So the second head's gradient is 0 and not None. AdamW then decays its weights,
# although no loss has asked for them. And if the number for the log has an infinite derivative, as
# the root of a mean square that is 0, then 0 times infinity is NaN, and so are the gradients of all
# weights before it. The loss and the number are finite.
#
# One would expect what the model does uncompiled. By the documentation of zero_grad, gradients are
# guaranteed to be None for parameters that did not receive one, and optimizers skip these. The fix
# is to detach what the loss doesn't use. (An open issue reports that the needless gradients cost
# time: https://github.com/pytorch/pytorch/issues/131794.)
#
# Here a small model is trained for ten steps. It has a residual layer that begins with zeros. Next
# to the logits it returns those of a second head, or the RMS of what the layer adds. Below are the
# norm of the embedding's gradient in the first step, and a weight of the second head after the
# last. It was 1, and no loss uses this head. The backend is "aot_eager", which needs no C++
# compiler. The default, "inductor", gives the same numbers.
#
# Seen on 2026-11-29 (PyTorch 2.13.0, and 2.15.0 as well, a CPU):
#
#   second head, eager:    gradient 0.255, weight 1.000
#   second head, compiled: gradient 0.255, weight 0.904
#   second head, detached: gradient 0.255, weight 1.000
#   RMS, eager:            gradient 0.255, weight 1.000
#   RMS, compiled:         gradient nan, weight 1.000
#   RMS, detached:         gradient 0.255, weight 1.000
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH, VOCABULARY, STEPS = 8, 5, 10
TOKENS = torch.arange(VOCABULARY)


class Model(nn.Module):
    """a residual layer that begins with zeros, and two heads; extra is what else it returns"""

    def __init__(self, extra, detach):
        super().__init__()
        torch.manual_seed(0)
        self.extra, self.detach = extra, detach
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head, self.second = (nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(2))
        nn.init.zeros_(self.layer.weight)
        nn.init.ones_(self.second.weight)

    def forward(self, tokens):
        x = self.embedding(tokens)
        update = self.layer(x)
        extra = self.second(x) if self.extra == "second head" else update.square().mean().sqrt()
        return self.head(x + update), extra.detach() if self.detach else extra


def train(extra, compiled, detach=False):
    """the norm of the embedding's first gradient, and a weight of the second head at the end"""
    torch.compiler.reset()
    model = Model(extra, detach)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(STEPS):
        logits, _ = run(TOKENS)
        optimizer.zero_grad()
        cross_entropy(logits, TOKENS).backward()
        if step == 0:
            gradient = model.embedding.weight.grad.norm().item()
        optimizer.step()
    return gradient, model.second.weight[0, 0].item()


for extra in ("second head", "RMS"):
    eager = train(extra, compiled=False)
    compiled = train(extra, compiled=True)
    detached = train(extra, compiled=True, detach=True)
    for title, numbers in (("eager", eager), ("compiled", compiled), ("detached", detached)):
        print(f"{extra}, {title}:".ljust(22), "gradient {:.3f}, weight {:.3f}".format(*numbers))
    assert eager[1] == detached[1] == 1 and abs(eager[0] - detached[0]) < 1e-5
    if extra == "second head":
        assert abs(compiled[0] - eager[0]) < 1e-5
        assert abs(compiled[1] - (1 - 0.1 * 0.1) ** STEPS) < 1e-5
    else:
        assert math.isnan(compiled[0])
PYTHON
