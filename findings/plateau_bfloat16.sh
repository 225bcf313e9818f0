#!/usr/bin/env bash
# Optax 0.2.8: with bfloat16 weights, reduce_on_plateau can't average a loss.
#
# contrib.reduce_on_plateau lowers the learning rate if the loss has stopped falling. The loss of
# one batch is noisy, so accumulation_size=N lets it look at means of N losses. It keeps a running
# mean, (n * mean + loss) / (n + 1), in the dtype of the weights. Bfloat16 has 8 significant bits.
# So the sum n * mean + loss soon stops growing, and the mean falls like 1 / n, to nearly the same
# number in each window, whatever the losses are. A loss that falls all the time then looks like one
# that has stopped falling, and the learning rate is lowered again and again. There is no warning.
#
# One would expect a mean in float32, as optax.MultiSteps accumulates by default.
#
# The loss falls by 0.1 from window to window, each of 1,000 steps, from 4.0 to 2.1. Below are the
# true means of windows 1, 5, 9, 13 and 17, and what the state holds one step before their ends.
#
# Seen on 2026-11-28 (JAX 0.10.2, a CPU):
#
#   true     4.00 3.60 3.20 2.80 2.40
#   float32  4.00 3.60 3.20 2.80 2.40, learning rate x 1
#   bfloat16 2.05 1.02 1.02 1.02 1.02, learning rate x 1.00136e-05
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 optax==0.2.8 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from optax import contrib

N, WINDOWS = 1000, 20


def run(dtype, losses):
    """(the mean at the end of each window, the factor of the learning rate at the end)"""
    plateau = contrib.reduce_on_plateau(factor=0.1, patience=3, accumulation_size=N)
    weights = {"w": jnp.zeros(3, dtype)}
    state = plateau.init(weights)
    step = jax.jit(lambda state, loss: plateau.update(weights, state, value=loss)[1])
    means = []
    for i, loss in enumerate(losses, 1):
        state = step(state, loss)
        if i % N == N - 1:  # after N losses it begins again with 0
            means.append(float(state.avg_value))
    return means, float(state.scale)


noise = 0.05 * np.random.default_rng(0).standard_normal((WINDOWS, N))
losses = (4.0 - 0.1 * np.arange(WINDOWS)[:, None] + noise).astype(np.float32)
print("true    ", *(f"{mean:.2f}" for mean in losses.mean(axis=1)[::4]))
for dtype in (jnp.float32, jnp.bfloat16):
    means, factor = run(dtype, losses.ravel())
    shown = " ".join(f"{mean:.2f}" for mean in means[::4])
    print(f"{dtype.__name__:8} {shown}, learning rate x {factor:g}")
    if dtype == jnp.float32:
        assert np.abs(means - losses.mean(axis=1)).max() < 0.01 and factor == 1
    else:
        assert max(means[2:]) - min(means[2:]) < 0.01 and factor < 1e-4
PYTHON
