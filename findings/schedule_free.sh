#!/usr/bin/env bash
# Optax 0.2.8: one bfloat16 weight makes schedule_free forget old steps, for all weights.
#
# Schedule-free optimizers train at one point and evaluate at another, x, which is the average over
# all steps (if the learning rate is constant after a warm-up). Optax keeps the sum of the steps'
# weights in the state, as a scalar of the "lowest" dtype among the parameters, so that it promotes
# none of them. A single bfloat16 leaf, say an embedding, makes it bfloat16, which has 8 significant
# bits. So after 256 to 512 steps of the same weight the sum stops growing. From then on x is an
# average over about so many last steps, also for float32 weights. Training changes, too, because
# the point where it takes the gradient depends on x. There is no warning.
#
# One would expect that a float32 weight doesn't depend on the dtype of another one. With
# optax.adamw it doesn't, nor in PyTorch, with the package schedulefree 1.4.1. Until it is mended,
# make the three scalars in the new state float32, as in the last case below.
#
# Here the gradient is always 1, so that each step moves z, the weights without averaging, by the
# learning rate. What share of z's way has x gone, which is the average over all z? It should be
# half of it.
#
# Seen on 2026-11-28 (JAX 0.10.2, a CPU):
#
#   steps                             200   500  2000 10000
#   float32 alone                    0.50  0.50  0.50  0.50
#   beside a float32 weight          0.50  0.50  0.50  0.50
#   beside a bfloat16 weight         0.51  0.48  0.76  0.95
#   the same, with float32 scalars   0.50  0.50  0.50  0.50
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optax==0.2.8 jax==0.10.2 numpy==2.4.6
cd "$folder"
export JAX_PLATFORMS=cpu
venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp
from optax import apply_updates
from optax.contrib import schedule_free_adamw, schedule_free_eval_params

STEPS = 200, 500, 2000, 10000
optimizer = schedule_free_adamw(learning_rate=1e-3)


def share(steps, other, float32_scalars):
    """How far x of a float32 weight has gone, as a share of z's way"""
    params = {"weight": jnp.zeros(4)}
    if other is not None:
        params["other"] = jnp.zeros(4, other)
    gradient = {name: jnp.full_like(p, name == "weight") for name, p in params.items()}
    state = optimizer.init(params)
    if float32_scalars:
        scalars = "weight_sum", "max_lr", "b1"
        state = state._replace(**{k: getattr(state, k).astype(jnp.float32) for k in scalars})

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, state), length=steps)
    assert params["weight"].dtype == state.z["weight"].dtype == jnp.float32
    x, z = schedule_free_eval_params(state, params)["weight"], state.z["weight"]
    return (x / z).mean().item()


print("steps".ljust(31), "".join(f"{steps:6}" for steps in STEPS))
for title, other, float32_scalars in (
    ("float32 alone", None, False),
    ("beside a float32 weight", jnp.float32, False),
    ("beside a bfloat16 weight", jnp.bfloat16, False),
    ("the same, with float32 scalars", jnp.bfloat16, True),
):
    shares = [share(steps, other, float32_scalars) for steps in STEPS]
    print(title.ljust(31), "".join(f"{s:6.2f}" for s in shares))
    if title == "beside a bfloat16 weight":
        assert shares[2] > 0.6 and shares[3] > 0.8
    else:
        assert all(abs(s - 0.5) < 0.02 for s in shares)
PYTHON
