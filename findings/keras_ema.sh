#!/usr/bin/env bash
# Keras 3.15.1: with gradient accumulation, an optimizer's EMA of the weights moves with each
# micro-batch.
#
# With gradient_accumulation_steps=N an optimizer changes the weights once in N batches. An EMA of
# them (use_ema=True) takes their place at the end of fit(). The code averages after each batch,
# also if the weights have not changed. So in each update the average moves towards them N times,
# and forgets by ema_momentum to the N-th power: for N = 8, the default of 0.99 becomes 0.92. With
# ema_overwrite_frequency=K the weights should become their average after each K-th update. They
# become it after each of the N batches of this update, so for the first time before the update
# itself. There is no warning.
#
# One would expect what one batch of N times the size gives. The documentation says that model and
# optimizer variables are updated every N steps, and that the EMA's frequency counts updates.
# (It also says that schedules of the learning rate count batches, not updates. This is so.) Without
# overwriting, ema_momentum=0.9 ** (1 / N) comes close.
#
# Here is a model of one weight, whose gradient is always -1. It begins at 0, the learning rate is
# 1, and there are 20 updates, each of N batches. So the weight itself is 20 in the end. Below is
# the average that fit() leaves, for a momentum of 0.9: without overwriting, with 0.9 ** (1 / N),
# and with overwriting after each tenth update.
#
# Seen on 2026-11-29 (JAX 0.10.2, PyTorch 2.13.0, a CPU):
#
#   jax, N = 1: 12.2, with the root 12.2, with overwriting 8.6
#   jax, N = 2: 15.3, with the root 11.8, with overwriting 11.1
#   jax, N = 4: 17.4, with the root 11.6, with overwriting 13.6
#   jax, N = 8: 18.4, with the root 11.5, with overwriting 15.4
#   torch: the same
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 torch==2.13.0 numpy==2.4.6
cd "$folder"
cat >ema.py <<'PYTHON'
import keras
import numpy as np

UPDATES = 20


def trained(steps, momentum=0.9, overwrite=None):
    """the weight after fit()"""
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = keras.optimizers.SGD(
        learning_rate=1.0,
        use_ema=True,
        ema_momentum=momentum,
        ema_overwrite_frequency=overwrite,
        gradient_accumulation_steps=None if steps == 1 else steps,
    )
    model.compile(optimizer, loss=lambda target, output: -output)
    ones = np.ones((UPDATES * steps, 1), "float32")
    model.fit(ones, ones, batch_size=1, verbose=0)
    return model.get_weights()[0].item()


def average(momentum, overwrite=None):
    weight = average = 0.0
    for update in range(1, UPDATES + 1):
        weight += 1
        average = weight if update == 1 else momentum * average + (1 - momentum) * weight
        if overwrite and update % overwrite == 0:
            weight = average
    return average


for steps in (1, 2, 4, 8):
    plain, root = trained(steps), trained(steps, momentum=0.9 ** (1 / steps))
    overwritten = trained(steps, overwrite=10)
    print(f"{keras.backend.backend()}, N = {steps}:", end=" ")
    print(f"{plain:.1f}, with the root {root:.1f}, with overwriting {overwritten:.1f}")
    off = abs(plain - average(0.9)), abs(overwritten - average(0.9, overwrite=10))
    assert max(off) < 0.01 if steps == 1 else min(off) > 1
    assert abs(root - average(0.9)) < 1
PYTHON
for backend in jax torch; do
    KERAS_BACKEND=$backend venv/bin/python ema.py 2>warnings.txt || { cat warnings.txt; exit 1; }
done
