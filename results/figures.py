"""The figures that take more than scores.

    python results/figures.py hops out/RUN      which layers a Depo0 model needs for which hops
    python results/figures.py keys out/RUN ..   which weights of Canon-B copying needs, as a table
"""

import argparse
import copy
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where plot.py is

import plot
from canon_gpt import Refused
from sample import load_model

# ---- 1. Which layers a Depo0 model needs -----------------------------------


@torch.no_grad()
def right_without(task, model, part):
    """{layer: (K,)}: the shares right of 1 to K hops if the weights whose names hold `part` are
    zero in one layer; in layer 0, which there is not, for comparison."""
    found = {}
    for layer in range(len(model.blocks) + 1):
        changed = copy.deepcopy(model)
        for name, weight in changed.named_parameters():
            if name.startswith(f"blocks.{layer - 1}.") and part in name:
                weight.zero_()
        scores = task.evaluate(changed, seed=0, n=200)
        found[f"layer {layer}" if layer else "no layer"] = torch.tensor(list(scores.values()))
    return found


def draw_hops(folders):
    task, model = load_model(folders[0])
    task.scored = list(range(1, task.K + 1))
    panels = {
        "attention": right_without(task, model, "mixer.out"),  # then it adds nothing
        "Canon": right_without(task, model, "canon_"),  # then vectors pass unchanged
    }
    title = "Right answers (dark) if one layer's attention or Canon is off"
    figure, axes = plot.make_grid(len(panels), title, per_row=2, height=0.6 + 0.3 * task.K)
    hops = [f"k={k}" for k in task.scored]
    for axis, (part, columns) in zip(axes, panels.items()):
        values = torch.stack(list(columns.values()), dim=1)  # (K, layers + 1)
        axis.imshow(values.numpy(), cmap="Oranges", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"{part} off in")
        axis.set_yticks(range(task.K), hops)
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        rows = [[f"{part} off in", *columns]]
        for hop, row in zip(hops, values):
            rows.append([hop, *(f"{share:.2f}" for share in row)])
        print(f"{plot.markdown(rows)}\n")
    plot.save(figure, Path("out/hops.png"))


# ---- 2. Which weights of Canon-B copying needs -----------------------------


@torch.no_grad()
def print_keys(folders):
    """The shares of numbers right on 200 lists if queries, keys or values of a model of one layer
    hold nothing of the token so far back."""
    places = product("qkv", (1, 2, 3))  # (part, how far back)
    rows = [["", *(f"{part}, w_{back}" for part, back in places)]]
    for folder in folders:
        task, model = load_model(folder)
        weight = model.blocks[0].mixer.canon_b.weight  # (kernel, 3D)
        saved = weight.clone()
        row = [Path(folder).name]
        for part in weight.chunk(3, dim=1):  # views of the queries', keys' and values' columns
            for back in (1, 2, 3):
                part[back] = 0
                row.append(f"{task.evaluate(model, seed=0, n=200)['tokens']:.0%}")
                weight.copy_(saved)
        rows.append(row)
    print(plot.markdown(rows))


FIGURES = {"hops": draw_hops, "keys": print_keys}


def main():
    parser = argparse.ArgumentParser(
        prog="figures.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
        allow_abbrev=False,
    )
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("folders", nargs="*", help="of trained models")
    options = parser.parse_args()
    try:
        FIGURES[options.figure](options.folders)
    except Refused as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
