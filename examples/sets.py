"""Order means nothing here: are two lists of 8 of 16 numbers the same set?

python examples/sets.py --task sets --preset nano --n-layer 2 --steps 12000 --lr 3e-3 --pos nope
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where tasks.py is
import train
from canon_gpt import require
from tasks import EVAL, TASKS, Document, Task, share


class Sets(Task):
    """
    N   how many different numbers there are
    """

    size = 8
    units = {"answers": "share"}
    chance = 0.5

    def __init__(self, N=16, block_size=40):
        super().__init__(block_size)
        require(N > self.size, "N", N, f"more than {self.size}")
        self.check_fits(2 * self.size + 4)
        self.N = N
        numbers = [str(number) for number in range(1, N + 1)]
        self.vocabulary = ["", *numbers, "<bos>", "<query>", "<ans>", "yes", "no"]
        self.bos, self.query, self.ans, self.yes, self.no = range(N + 1, N + 6)

    def documents(self, rng, count):
        """In half of them, one number of the second list is not in the first."""
        for _ in range(count):
            numbers = 1 + rng.permutation(self.N)
            first, other = numbers[: self.size], numbers[self.size]
            second = rng.permutation(first)
            answer = self.yes
            if rng.random() < 0.5:
                second[rng.integers(self.size)] = other
                answer = self.no
            lists = [self.bos] + first.tolist() + [self.query] + second.tolist()
            document = Document(lists + [self.ans])
            document.ask([answer])
            yield document

    def evaluate(self, model, seed, n):
        documents = self.documents(np.random.default_rng([seed, EVAL]), n)
        right = self.right_tokens(model, [document.tokens for document in documents])
        return {"answers": share(right[:, -1])}


TASKS["sets"] = Sets
if __name__ == "__main__":
    train.main()
