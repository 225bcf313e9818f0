#!/usr/bin/env bash
# PyTorch 2.13.0: on a CPU, torch.manual_seed uses only the lowest 32 bits of a seed.
#
# By its documentation a seed may have 64 bits, and initial_seed() gives all of them back. But the
# generator of a CPU, a Mersenne Twister, starts from 32 bits, and the others are dropped. So seeds
# that are equal in their lower half give the same numbers, without a warning. torch.Generator does
# the same. The page of Generator.manual_seed says "any 32-bit integer is a valid seed", but gives
# the same range of 64 bits, and neither page says that such seeds coincide. (By its source, a GPU's
# generator uses all 64.)
#
# A program that puts two numbers into a seed, such as (run << 32) + step, draws the same initial
# weights, dropout and orders of data in all its runs. And of seeds that are hashes of 64 bits, two
# may coincide: among 77,000 of them as likely as not.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU; 2.14.1 does the same):
#
#   seed 0:           0.4963, 0.7682, 0.0885; initial_seed() 0
#   seed 4294967296:  0.4963, 0.7682, 0.0885; initial_seed() 4294967296
#   seed 21474836480: 0.4963, 0.7682, 0.0885; initial_seed() 21474836480
#   run 0, step 7: weights 0.0403, -0.3478, 0.1838; order [7, 0, 3, 4, 1, 5, 2, 6]
#   run 1, step 7: weights 0.0403, -0.3478, 0.1838; order [7, 0, 3, 4, 1, 5, 2, 6]
#   run 2, step 7: weights 0.0403, -0.3478, 0.1838; order [7, 0, 3, 4, 1, 5, 2, 6]
#   300,000 different seeds: 299,994 different streams of numbers
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import random

import torch

# 1. Seeds that differ by multiples of 2^32
drawn = []
for seed in (0, 2**32, 5 * 2**32):
    torch.manual_seed(seed)
    drawn.append(torch.rand(3).tolist())
    numbers = ", ".join(f"{number:.4f}" for number in drawn[-1])
    print(f"{'seed ' + str(seed) + ':':17} {numbers}; initial_seed() {torch.initial_seed()}")
    assert torch.initial_seed() == seed
assert drawn[0] == drawn[1] == drawn[2]

# 2. A run and a step in one seed
step = 7
for run in range(3):
    torch.manual_seed((run << 32) + step)
    layer = torch.nn.Linear(3, 1)
    weights = ", ".join(f"{weight:.4f}" for weight in layer.weight.flatten().tolist())
    generator = torch.Generator().manual_seed((run << 32) + step)
    order = torch.randperm(8, generator=generator).tolist()
    print(f"run {run}, step {step}: weights {weights}; order {order}")
    if run == 0:
        first = weights, order
    assert (weights, order) == first

# 3. Seeds of 64 random bits. Two streams count as equal if their first two numbers are, which have
#    63 bits each.
rng = random.Random(0)
seeds = {rng.getrandbits(64) for _ in range(300_000)}
generator = torch.Generator()
streams = set()
for seed in seeds:
    generator.manual_seed(seed)
    streams.add(tuple(torch.empty(2, dtype=torch.int64).random_(generator=generator).tolist()))
print(f"{len(seeds):,} different seeds: {len(streams):,} different streams of numbers")
assert len(seeds) == 300_000 > len(streams)
PYTHON
