#!/usr/bin/env bash
# Equinox 0.13.8: RotaryPositionalEmbedding turns by the theta of whichever layer was called first.
#
# theta is an argument of each layer. But the table of angles is kept for the whole process, under
# the width and the dtype alone. So if a program has layers of the same width with two thetas, such
# as two models, or local and global layers as in Gemma 3, all turn by the theta of the first call.
# A longer text makes a new table, with the theta of the layer that reads it, and from then on all
# turn by that one, even layers that were right before. There is no warning.
#
# One would expect each layer to use its own.
#
# Below is how far a layer is from the same formula without a table. The calls come in this order.
#
# Seen on 2026-11-28 (JAX 0.10.2, a CPU):
#
#   theta    10000, 64 tokens: off by 0.00
#   theta  1000000, 64 tokens: off by 6.33
#   theta  1000000, 65 tokens: off by 0.00
#   theta    10000, 64 tokens: off by 6.33
#   after clear_caches()
#   theta  1000000, 64 tokens: off by 0.00
#   theta    10000, 64 tokens: off by 6.33
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 equinox==0.13.8 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import equinox
import jax
import jax.numpy as jnp

WIDTH = 16


def turned(x, theta):
    frequencies = theta ** (-jnp.arange(0, WIDTH, 2) / WIDTH)
    angles = jnp.tile(jnp.arange(len(x))[:, None] * frequencies, 2)
    first, second = x[:, : WIDTH // 2], x[:, WIDTH // 2 :]
    crossed = jnp.concatenate([-second, first], axis=1)
    return x * jnp.cos(angles) + crossed * jnp.sin(angles)


def check(theta, length, is_right):
    x = jax.random.normal(jax.random.key(0), (length, WIDTH))
    layer = equinox.nn.RotaryPositionalEmbedding(WIDTH, theta=theta)
    off = jnp.abs(layer(x) - turned(x, theta)).max().item()
    print(f"theta {theta:8}, {length} tokens: off by {off:.2f}")
    assert off < 1e-3 if is_right else off > 1


check(10_000, 64, is_right=True)
check(1_000_000, 64, is_right=False)
check(1_000_000, 65, is_right=True)
check(10_000, 64, is_right=False)
print("after clear_caches()")
equinox.clear_caches()
check(1_000_000, 64, is_right=True)
check(10_000, 64, is_right=False)
PYTHON
