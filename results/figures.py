"""The figures that take more than scores.

    python results/figures.py block             README's picture of a Canon layer and its places
    python results/figures.py hops out/RUN      which layers a Depo0 model needs for which hops
    python results/figures.py keys out/RUN ..   which weights of Canon-B copying needs, as a table
"""

import argparse
import copy
import sys
from itertools import product
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where plot.py is

import plot
from canon_gpt import Refused
from sample import load_model

# ---- 1. A Canon layer and its four places ----------------------------------

GREY = "#848d97"  # lighter than plot.py's: it reads well on light and on dark pages


def line(axis, *corners, colour=GREY, head=True):
    """Through corners (x, y), with an arrow head at the last one."""
    axis.plot(*zip(*corners), color=colour, lw=1.5, solid_joinstyle="miter")
    if head:
        style = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", corners[-1], corners[-2], arrowprops=style)


def text(axis, x, y, words, colour=GREY, **style):
    axis.text(x, y, words, color=colour, va="center", parse_math=True, fontsize=11, **style)


def box(axis, x, y, words):
    """A box with its left edge at x; A to D are orange. Returns its right edge."""
    width = 1.2 if words.startswith("$") else 0.5 + 0.125 * len(words)  # formulas look shorter
    canon = words in "ABCD"
    edge, fill = (plot.ORANGE, plot.ORANGE) if canon else (GREY, "none")
    axis.add_patch(Rectangle((x, y - 0.3), width, 0.6, lw=1.5, ec=edge, fc=fill))
    text(axis, x + width / 2, y, words, colour="white" if canon else GREY, ha="center")
    return x + width


def plus(axis, x, y):
    axis.add_patch(Circle((x, y), 0.2, ec=GREY, fc="none", lw=1.5))
    text(axis, x, y - 0.02, "+", ha="center")


def canon_layer(axis, y):
    """Four tokens flow into one, each with its weight; h_t also flows there unchanged."""
    middle = 8.75
    for i, token in enumerate(("$h_{t-3}$", "$h_{t-2}$", "$h_{t-1}$", "$h_t$")):
        x = middle - 1.9 * (3 - i)
        box(axis, x - 0.6, y, token)
        corners = (x, y + 0.3), (x, y + 1.1), (middle, y + 1.1)
        line(axis, *corners, colour=plot.ORANGE, head=False)
        text(axis, x + 0.12, y + 0.68, f"$w_{3 - i}$", colour=plot.ORANGE)
    line(axis, (middle, y + 1.1), (middle, y + 1.7), colour=plot.ORANGE)
    plus(axis, middle, y + 1.9)
    line(axis, (middle + 0.6, y), (10.2, y), (10.2, y + 1.9), (middle + 0.2, y + 1.9))
    text(axis, 10.35, y + 0.95, "unchanged")
    line(axis, (middle, y + 2.1), (middle, y + 2.5))
    box(axis, middle - 0.6, y + 2.8, "$h'_t$")


def sublayer(axis, y, name, *steps):
    """x plus what the steps make of it."""
    text(axis, 0.5, y + 0.85, name, style="italic")
    text(axis, 0, y, "$x$", ha="center")
    x = 0.2
    for step in steps:
        line(axis, (x, y), (x + 0.5, y))
        x = box(axis, x + 0.5, y, step)
    line(axis, (x, y), (12, y))
    line(axis, (0.4, y), (0.4, y + 0.6), (12.2, y + 0.6), (12.2, y + 0.2))
    plus(axis, 12.2, y)
    line(axis, (12.4, y), (12.9, y))


def draw_block(folders):
    figure = Figure(figsize=(9, 4.7))
    axis = figure.subplots()
    axis.set(xlim=(-0.2, 13), ylim=(-0.4, 6.6), aspect="equal")
    axis.axis("off")
    text(axis, 0.5, 6.1, "a Canon layer", colour=plot.ORANGE, weight="bold")
    canon_layer(axis, 3.4)
    sublayer(axis, 1.6, "attention", "norm", "A", "q, k, v", "B", "(rotary)", "attend", "out")
    sublayer(axis, 0, "MLP", "norm", "C", "gate, up", "D", "act(gate) · up", "down")
    path = Path("out/block.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=200, transparent=True, bbox_inches="tight")
    print(path)


# ---- 2. Which layers a Depo0 model needs -----------------------------------


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


# ---- 3. Which weights of Canon-B copying needs -----------------------------


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


FIGURES = {"block": draw_block, "hops": draw_hops, "keys": print_keys}


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
