"""Does a model that copies lists of up to 16 numbers also copy longer ones?

python examples/longer.py --task longer --preset nano --n-layer 2 --steps 3000 --pos nope --canon abcd
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where tasks.py is
import train
from canon_gpt import require
from tasks import EVAL, TASKS, Document, Task, share


class Longer(Task):
    """
    N   how many different numbers there are
    """

    trained = (4, 16)  # the shortest and the longest list in training
    asked = (16, 24, 32)  # the lengths of the lists that are scored
    units = {f"{length} numbers": "share" for length in asked}

    def __init__(self, N=40, block_size=66):
        super().__init__(block_size)
        require(N >= max(self.asked), "N", N, f"at least {max(self.asked)}")
        self.check_fits(2 * max(self.asked) + 2)
        self.N = N
        numbers = [str(number) for number in range(1, N + 1)]
        self.vocabulary = ["", *numbers, "<bos>", "<query>"]
        self.bos, self.query = N + 1, N + 2

    def a_list(self, rng, length):
        numbers = (1 + rng.permutation(self.N)[:length]).tolist()
        document = Document([self.bos, *numbers, self.query])
        document.ask(numbers)
        return document

    def documents(self, rng, count):
        shortest, longest = self.trained
        for length in rng.integers(shortest, longest + 1, count).tolist():
            yield self.a_list(rng, length)

    def evaluate(self, model, seed, n):
        """For each length, the share of n lists that are copied whole."""
        scores = {}
        for length in self.asked:
            rng = np.random.default_rng([seed, EVAL, length])
            lists = [self.a_list(rng, length).tokens for _ in range(n)]
            right = self.right_tokens(model, lists)
            scores[f"{length} numbers"] = share(right[:, -length:].all(axis=1))
        return scores


TASKS["longer"] = Longer
if __name__ == "__main__":
    train.main()
