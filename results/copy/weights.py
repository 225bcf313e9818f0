"""Which weights of Canon-B does copying need?   python results/copy/weights.py out/RUN ..

Takes models of one attention layer, trained on Copy. Sets Canon-B's weights to zero, of one part at
a time (queries, keys or values) and for one distance at a time, and scores each such model on 200
other lists. Prints the shares of numbers that are right.
"""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import plot
import sample

LISTS = 200


@torch.no_grad()
def right_without(task, model, part, distance):
    """The share of numbers right if nothing of the token so far back enters q, k or v."""
    weight = model.blocks[0].mixer.canon_b.weight  # (kernel, 3 D)
    saved = weight.clone()
    of_part = weight.chunk(3, dim=1)["qkv".index(part)]  # a view
    of_part[distance] = 0
    right = task.evaluate(model, seed=0, n=LISTS)["tokens"]
    weight.copy_(saved)
    return right


def main():
    places = list(product("qkv", (1, 2, 3)))  # (part, distance)
    rows = [["", *(f"{part}, w_{distance}" for part, distance in places)]]
    for folder in sys.argv[1:]:
        task, model = sample.load_model(folder)
        shares = [right_without(task, model, *place) for place in places]
        rows.append([Path(folder).name, *(f"{share:.0%}" for share in shares)])
    print(plot.markdown(rows))


if __name__ == "__main__":
    main()
