"""Your own task: here multi-query associative recall, on which recurrences are often compared.

python examples/mqar.py --task mqar --preset nano --n-layer 2 --mixer gla --canon abcd

    <bos> k7 v3 k2 v9 k5 v1   v4 k6   k2 [v9]   k1 k2   k7 [v3]   k5 [v1]   v8 v8

Some pairs of a key and its value come first. Later each key comes once more, and its value must
follow; all else is random. It is the task of Arora et al. 2023 (https://arxiv.org/abs/2312.04927;
`multiquery_ar` in their package zoology), but for one thing: here the answers are part of the text.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where tasks.py is
import train
from canon_gpt import require
from tasks import TASKS, Document, Task


class MQAR(Task):
    """
    N  how many pairs there are
    V  how many keys there are to choose from, and how many values
    """

    def __init__(self, N=8, V=16, block_size=40):  # flags such as --N 4 replace these
        super().__init__(block_size)
        require(1 <= N <= V, "N", N, f"allowed: 1 to {V}")
        self.check_fits(1 + 4 * N)  # <bos>, the pairs, and each once more
        self.N, self.V = N, V
        words = [f"k{i}" for i in range(V)] + [f"v{i}" for i in range(V)]
        self.vocabulary = ["", *words, "<bos>"]  # the key k0 is token 1
        # After the pairs there are places for two tokens each. An early place is likelier to have a
        # question than a later one, by a power law.
        n_places = (self.block_size - 2 * N) // 2
        chances = np.arange(1, n_places + 1) ** (0.01 - 1)
        self.chances = chances / chances.sum()

    def documents(self, rng, count):
        for _ in range(count):
            keys = 1 + rng.permutation(self.V)[: self.N]
            values = 1 + self.V + rng.permutation(self.V)[: self.N]
            pairs = np.column_stack([keys, values]).tolist()
            document = Document([len(self.vocabulary) - 1, *sum(pairs, [])])
            places = rng.choice(len(self.chances), self.N, replace=False, p=self.chances)
            questions = dict(zip(places.tolist(), pairs))
            for place in range(len(self.chances)):
                if place in questions:
                    key, value = questions[place]
                    document.give([key])
                    document.ask([value])  # what `ask` appends counts in the loss
                else:
                    document.give(rng.integers(1, 2 * self.V + 1, 2).tolist())
            yield document


TASKS["mqar"] = MQAR
if __name__ == "__main__":
    train.main()
