"""Draws README's picture of a Canon layer and its four places:   python results/block.py

Grey and orange on a transparent ground read well on light and dark pages.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREY, ORANGE = "#848d97", "#e8590c"  # a little lighter than plot.py's, for dark pages


def line(axis, *corners, colour=GREY, head=True):
    """Through corners (x, y), with an arrow head at the last one."""
    axis.plot(*zip(*corners), color=colour, lw=1.5, solid_joinstyle="miter")
    if head:
        style = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", corners[-1], corners[-2], arrowprops=style)


def box(axis, x, y, text):
    """A box with its left edge at x; A to D are orange. Returns its right edge."""
    width = 1.2 if text.startswith("$") else 0.5 + 0.125 * len(text)  # formulas look shorter
    edge, fill, ink = (ORANGE, ORANGE, "white") if text in "ABCD" else (GREY, "none", GREY)
    axis.add_patch(plt.Rectangle((x, y - 0.3), width, 0.6, lw=1.5, ec=edge, fc=fill))
    axis.text(x + width / 2, y, text, color=ink, ha="center", va="center", fontsize=11)
    return x + width


def plus(axis, x, y):
    axis.add_patch(plt.Circle((x, y), 0.2, ec=GREY, fc="none", lw=1.5))
    axis.text(x, y - 0.02, "+", color=GREY, fontsize=13, ha="center", va="center")


def canon_layer(axis, y):
    """Four tokens flow into one, each with its weight; h_t flows there unchanged, too."""
    middle = 8.75
    for i, token in enumerate(("$h_{t-3}$", "$h_{t-2}$", "$h_{t-1}$", "$h_t$")):
        x = middle - 1.9 * (3 - i)
        box(axis, x - 0.6, y, token)
        line(axis, (x, y + 0.3), (x, y + 1.1), (middle, y + 1.1), colour=ORANGE, head=False)
        axis.text(x + 0.12, y + 0.68, f"$w_{3 - i}$", color=ORANGE, fontsize=12, va="center")
    line(axis, (middle, y + 1.1), (middle, y + 1.7), colour=ORANGE)
    plus(axis, middle, y + 1.9)
    line(axis, (middle + 0.6, y), (10.2, y), (10.2, y + 1.9), (middle + 0.2, y + 1.9))
    axis.text(10.35, y + 0.95, "unchanged", color=GREY, fontsize=11, va="center")
    line(axis, (middle, y + 2.1), (middle, y + 2.5))
    box(axis, middle - 0.6, y + 2.8, "$h'_t$")


def sublayer(axis, y, name, *steps):
    """x, plus what the steps make of it."""
    axis.text(0.5, y + 0.72, name, color=GREY, fontsize=11, style="italic")
    axis.text(0, y, "$x$", color=GREY, fontsize=13, ha="center", va="center")
    x = 0.2
    for step in steps:
        line(axis, (x, y), (x + 0.5, y))
        x = box(axis, x + 0.5, y, step)
    line(axis, (x, y), (12, y))
    line(axis, (0.4, y), (0.4, y + 0.6), (12.2, y + 0.6), (12.2, y + 0.2))
    plus(axis, 12.2, y)
    line(axis, (12.4, y), (12.9, y))


def main():
    figure, axis = plt.subplots(figsize=(9, 4.7))
    axis.set(xlim=(-0.2, 13), ylim=(-0.4, 6.6), aspect="equal")
    axis.axis("off")
    axis.text(0.5, 6.1, "a Canon layer", color=ORANGE, fontsize=13, weight="bold", va="center")
    canon_layer(axis, 3.4)
    sublayer(axis, 1.6, "attention", "norm", "A", "q, k, v", "B", "(rotary)", "attend", "out")
    sublayer(axis, 0, "MLP", "norm", "C", "gate, up", "D", "act(gate) · up", "down")
    path = Path(__file__).with_name("block.png")
    figure.savefig(path, dpi=200, transparent=True, bbox_inches="tight", pad_inches=0.05)
    print(path.name)


if __name__ == "__main__":
    main()
