"""Which hop's end each head looks at:   python results/depo0/hops.py out/RUN

Asks a trained Depo0 model for K hops on 60 cycles of N nodes. The end of a hop is the second name
of its edge and the two tokens behind it, into which Canon mixes the name. Prints the mean share of
attention, and draws it (hops.png in the folder).
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import plot  # noqa: E402


def attention_to_hops(task, model):
    """{asker: (heads, K)}: from the question's node, and from <ans>, to the ends of K hops."""
    if task.name != "depo0":
        raise ValueError(f"its task is {task.name}")
    hops = np.full(60 * task.N, task.K)
    found = {"the question's node": [], "<ans>": []}
    for tokens, _, answers in task.instances(np.random.default_rng(0), [task.N] * 60, hops):
        look = plot.watch(model, tokens[:-1])
        starts = range(1, 1 + 3 * task.N, 3)  # <bos>, then "x y ," for each edge
        edges = {tokens[start]: start + 1 for start in starts}  # the place of y
        for _, answer, _ in answers:
            node, ends = tokens[answer - 2], []
            for _ in range(task.K):
                ends.append(edges[node])
                node = tokens[ends[-1]]
            for asker, place in zip(found, (answer - 2, answer - 1)):
                shares = [look[:, place, end : end + 3].sum(-1).numpy() for end in ends]
                found[asker].append(np.stack(shares, axis=-1))
    return {asker: np.mean(shares, axis=0) for asker, shares in found.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path, help="of a Depo0 run")
    folder = parser.parse_args().folder
    try:
        task, model = plot.load(folder)
        shares = attention_to_hops(task, model)
    except Exception as error:  # whatever damage there is
        print(f"hops.py: {folder} has no model of Depo0: {error!r:.200}", file=sys.stderr)
        sys.exit(2)
    layers = [n for n, block in enumerate(model.blocks, 1) if block.mixer.attends]
    heads = [f"{layer}.{n + 1}" for layer in layers for n in range(model.config.n_head)]
    hops = [f"hop {hop}" for hop in range(1, task.K + 1)]
    title = f"Asked for {task.K} hops, how much of its attention a head gives to each hop's end"
    figure, axes = plot.make_grid(len(shares), 1, 1.6, title)
    for axis, (asker, share) in zip(axes, shares.items()):
        rows = [[hop, *(f"{x:.2f}" for x in column)] for hop, column in zip(hops, share.T)]
        print(f"From {asker}:\n\n{plot.markdown([['', *heads], *rows])}\n")
        axis.imshow(share.T, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"from {asker}, by layer.head; dark: all of its attention", fontsize=10)
        axis.set_xticks(range(len(heads)), heads, fontsize=8)
        axis.set_yticks(range(len(hops)), hops)
    plot.save(figure, folder / "hops")


if __name__ == "__main__":
    main()
