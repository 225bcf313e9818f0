"""What Depo's answers are worth without reading an edge:   python results/depo0/guess.py

Nodes are asked about once each. So an answer is never the node asked about, nor an earlier answer
to as many hops: guessing among the others is right more often than 1 in N - 1. Prints the mean.
"""

import random

for N, K, scored in (10, 1, [1]), (10, 2, [1, 2]), (10, 4, [1, 2, 4]), (5, 2, [1, 2]):
    rng, right = random.Random(0), []
    for _ in range(20_000):
        hops = rng.choices(scored, k=N)
        answers = {k: set() for k in scored}
        for q, k in zip(rng.sample(range(N), N), hops):
            right.append(1 / (N - len(answers[k] | {q})))
            answers[k].add((q + k) % N)
    print(f"N={N}, K={K}: {100 * sum(right) / len(right):.1f}%")
