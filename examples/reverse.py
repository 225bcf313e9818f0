"""Your own task: here, to say the numbers backward.

python examples/reverse.py --task reverse --preset nano --canon abcd
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where tasks.py is
import train
from tasks import TASKS, Copy, Document


class Reverse(Copy):
    def __init__(self, N=16, block_size=33):  # the flags --N and --block-size replace these
        super().__init__(N, block_size)

    def documents(self, rng, count):
        for document in super().documents(rng, count):
            numbers = document.tokens[1 : self.N + 1]
            backward = Document([self.bos, *numbers, self.query])
            backward.ask(numbers[::-1])  # what `ask` appends counts in the loss
            yield backward


TASKS["reverse"] = Reverse
if __name__ == "__main__":
    train.main()
