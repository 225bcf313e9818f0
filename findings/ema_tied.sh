#!/usr/bin/env bash
# timm 1.0.31: ModelEma, ModelEmaV2 and ModelEmaV3 average tied weights twice in each update.
#
# Many language models share one weight between embedding and head. state_dict() lists it twice, and
# these classes go through state_dict() and change each entry in place. So the shared weight moves
# twice towards the model's in each update. With a decay of 0.999 it is averaged with 0.998, over
# half as many steps as all other weights. There is no warning.
#
# One would expect one decay for all weights, as in torch.optim.swa_utils.AveragedModel and in
# ema-pytorch, which go through parameters(), where a shared weight occurs once. ModelEmaV3 is right
# with exclude_buffers=True, which does so, too.
#
# Here the averages begin at 0, and the model's weights are 1. After n updates with a decay of 0.9
# an average is 1 - 0.9^n. Below is n, computed from the averages, after ten updates.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   not tied
#     all six:                           embedding 10.0, other weights 10.0
#   tied
#     AveragedModel:                     embedding 10.0, other weights 10.0
#     ema-pytorch:                       embedding 10.0, other weights 10.0
#     timm.ModelEma:                     embedding 20.0, other weights 10.0
#     timm.ModelEmaV2:                   embedding 20.0, other weights 10.0
#     timm.ModelEmaV3:                   embedding 20.0, other weights 10.0
#     timm.ModelEmaV3, exclude_buffers:  embedding 10.0, other weights 10.0
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ema-pytorch==0.8.3
"$folder/venv/bin/pip" install --quiet --no-deps timm==1.0.31 # without torchvision
cd "$folder"
venv/bin/python - <<'PYTHON'
import importlib.util
import math
from pathlib import Path

import torch
from ema_pytorch import EMA
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# `import timm` needs torchvision, but this file needs PyTorch only.
path = Path(importlib.util.find_spec("timm").origin).parent / "utils" / "model_ema.py"
spec = importlib.util.spec_from_file_location("model_ema", path)
timm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(timm)

DECAY, UPDATES = 0.9, 10


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def averaged_model(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first one only copies
    return average.module, lambda: average.update_parameters(model)


def ema_pytorch(model):
    average = EMA(model, beta=DECAY, min_value=DECAY, update_after_step=-1, update_every=1)
    average.update()  # the first one only copies
    return average.ema_model, average.update


def of_timm(kind, **settings):
    def new(model):
        average = kind(model, decay=DECAY, **settings)
        return getattr(average, "ema", None) or average.module, lambda: average.update(model)

    return new


@torch.no_grad()
def counts(new, tied):
    """(of the embedding, of the layer in between)"""
    model = Model(tied)
    for weight in model.parameters():
        weight.zero_()
    average, update = new(model)
    for weight in model.parameters():
        weight.fill_(1)
    for _ in range(UPDATES):
        update()
    weights = average.embedding.weight, average.middle.weight
    return [math.log(1 - weight.mean().item()) / math.log(DECAY) for weight in weights]


WAYS = {
    "AveragedModel": averaged_model,
    "ema-pytorch": ema_pytorch,
    "timm.ModelEma": of_timm(timm.ModelEma),
    "timm.ModelEmaV2": of_timm(timm.ModelEmaV2),
    "timm.ModelEmaV3": of_timm(timm.ModelEmaV3),
    "timm.ModelEmaV3, exclude_buffers": of_timm(timm.ModelEmaV3, exclude_buffers=True),
}
for tied in (False, True):
    print("tied" if tied else "not tied")
    for name, new in WAYS.items():
        embedding, middle = counts(new, tied)
        print(f"  {name}:".ljust(36), f"embedding {embedding:.1f}, other weights {middle:.1f}")
        twice = tied and name in ("timm.ModelEma", "timm.ModelEmaV2", "timm.ModelEmaV3")
        assert abs(middle - UPDATES) < 0.1
        assert abs(embedding - UPDATES * (2 if twice else 1)) < 0.1
PYTHON
