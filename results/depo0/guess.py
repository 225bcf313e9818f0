"""What Depo's answers are worth without reading an edge:   python results/depo0/guess.py

Each node is asked about once. So an answer is never the node asked about, nor an earlier answer to
as many hops: who guesses among the others is right more often than 1 in N - 1. Prints how often.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks import make_task

CYCLES = 5000


def chance_of_a_good_guess(N, K):
    """The mean over all answers of cycles with N nodes, asked as task.evaluate asks."""
    task, rng = make_task("depo0", N=N, K=K), np.random.default_rng(0)
    hops = rng.permutation(np.resize(task.scored, CYCLES * N)).tolist()
    sizes = [N for _ in range(CYCLES)]
    chances = []
    for document, answers in task.instances(rng, sizes, hops):
        answered = {k: set() for k in task.scored}
        for k, answer, _ in answers:
            asked_about = document.tokens[answer - 2]
            ruled_out = answered[k] | {asked_about}
            chances.append(1 / (N - len(ruled_out)))
            answered[k].add(document.tokens[answer])
    return sum(chances) / len(chances)


for N, K in ((10, 1), (10, 2), (10, 4), (5, 2)):
    print(f"N={N}, K={K}: {chance_of_a_good_guess(N, K):.1%}")
