"""What Depo's answers are worth without reading an edge:   python results/depo0/guess.py

Nodes are asked about once each. So an answer is never the node asked about, nor an earlier answer
to as many hops: guessing among the others is right more often than 1 in N - 1. Prints the mean.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks import make_task  # noqa: E402

for N, K in (10, 1), (10, 2), (10, 4), (5, 2):
    task, rng, right = make_task("depo0", "nano", N=N, K=K), np.random.default_rng(0), []
    hops = rng.permutation(np.resize(task.hops, 5000 * N))  # as task.evaluate asks
    for tokens, _, answers in task.instances(rng, [N] * 5000, hops):
        seen = {k: set() for k in task.hops}
        for k, place, _ in answers:
            right.append(1 / (N - len(seen[k] | {tokens[place - 2]})))
            seen[k].add(tokens[place])
    print(f"N={N}, K={K}: {100 * sum(right) / len(right):.1f}%")
