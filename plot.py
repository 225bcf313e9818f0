"""Figures and tables from runs:   python plot.py out/*

Draws a figure for each task and preset, and prints every seed's last scores as a Markdown table.

    python plot.py out/* --out figures       writes figures/<task>_<preset>.png
    python plot.py out/* --save runs.json    also packs the runs into one file
    python plot.py --inside out/RUN          draws where a model's sharpest heads look

Reading order: 1 what a run is called; 2 its scores; 3 how it looks; 4 three figures, `curves`,
`bars` and `dots`; 5 inside a model; 6 the command line. A run is the dict that runs.py reads, and
`groups` always means {label: [run, ..]}, a group per model and a run per seed, in drawing order.
"""

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # draws into files, without a screen
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.ticker import PercentFormatter
from torch.overrides import TorchFunctionMode

import runs as run_folders  # `runs` is a list of runs here
from tasks import SAMPLES, device_of, score_text

# ---- 1. What a run is called -----------------------------------------------

MIXER_NAMES = {"gla": "GLA", "mamba2": "Mamba2", "gdn": "GDN"}
POSITION_NAMES = {
    "rope": "RoPE",
    "rope4": "RoPE(1/4)",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "halibi": "H-ALiBi",
}


def model_name(model):
    """The paper's name of a model, given as the dict of its Config.

    "RoPE + Canon-ABCD (no-res)", or "GDN + Canon-AbCD": the small b is the mixer's own convolution,
    in the place of Canon-B. Without Canon, such a model is "GDN (conv)".
    """
    mixers = model["mixer"].split(",")  # a hybrid has several
    name = "/".join(layer_name(mixer, model["pos"]) for mixer in mixers)
    points = model["canon"].upper()
    conv_is_b = model["short_conv"] and points != "" and "B" not in points
    if points:
        if conv_is_b:
            points += "b"
        points = "".join(sorted(points, key=str.upper))  # "AbCD": b between A and C
        kind = "Canon" if model["canon_type"] == "conv" else model["canon_type"]
        name += f" + {kind}-{points}"

    variants = []
    if not model["canon_residual"]:
        variants.append("no-res")
    if model["canon_silu"]:
        variants.append("act")
    if model["canon_frozen"]:
        variants.append("cst")  # constant: the weights stay as they were drawn
    if model["canon_kernel"] != 4:
        variants.append(f"kernel {model['canon_kernel']}")
    if model["short_conv"] and not conv_is_b:
        variants.append("conv")
    if variants:
        name += f" ({', '.join(variants)})"
    return name


def layer_name(mixer, pos):
    """What a layer of this mixer is called. Attention goes by its positions."""
    position = POSITION_NAMES.get(pos, pos)
    if mixer == "attention":
        return position
    if mixer in MIXER_NAMES or pos == "nope":
        return MIXER_NAMES.get(mixer, mixer)
    return f"{mixer}-{position}"  # a mixer of your own that attends


def group(runs):
    """The runs as groups, in drawing order. Of runs that share recipe and seed, the last counts."""
    by_recipe = {}  # {recipe: {seed: run}}
    for run in sorted(runs, key=order):
        seeds = by_recipe.setdefault(without_seed(run), {})
        seeds[run["seed"]] = run
    all_members = [list(seeds.values()) for seeds in by_recipe.values()]  # the runs of each recipe
    names = labels([members[0] for members in all_members])

    groups = {}
    for name, members in zip(names, all_members):
        if any(run["seconds"] is None for run in members):
            name += " (still training)"
        groups[name] = members
    return groups


# Labels leave these out, as they are hard to read. Where they differ, another field nearly always
# does, too: N or block_size beside vocab_size, size beside sha256.
LEFT_OUT_OF_LABELS = ("vocab_size", "sha256")


def labels(runs):
    """A name for each run: its model's, and the settings in which runs of that name differ, such as
    ["RoPE, n_layer 1", "RoPE, n_layer 2", "NoPE"]. No two runs may share a recipe.
    """
    found = []
    for run in runs:
        name = model_name(run["model"])
        namesakes = [other for other in runs if model_name(other["model"]) == name]
        for field, value in settings_of(run).items():
            if field in LEFT_OUT_OF_LABELS:
                continue
            others = runs if field in run["task"] else namesakes  # all labels name another N
            if any(settings_of(other).get(field) != value for other in others):
                name += f", {field} {value}"
        found.append(name)
    return found


def settings_of(run):
    """{field: value} of task, model and training, and the dtype."""
    return {**run["task"], **run["model"], **run["training"], "dtype": run["dtype"]}


def without_seed(run):
    """All that makes a run but its seed, as text, so that it can be a key."""
    return json.dumps(settings_of(run), sort_keys=True)


def order(run):
    """What to sort by: attention before linear mixers, RoPE before NoPE, no Canon before Canon."""
    model = run["model"]
    # The model's own mixer and positions are appended, so that index() always finds them: hybrids,
    # and mixers and positions of your own, come last.
    mixers = ["attention", *MIXER_NAMES, model["mixer"]]
    positions = [*POSITION_NAMES, model["pos"]]
    return (
        mixers.index(model["mixer"]),
        model["mixer"],  # the alphabet decides among those that come last
        positions.index(model["pos"]),
        model["pos"],
        len(model["canon"]) + model["short_conv"],  # how many convolutions
        model_name(model),
        model["n_layer"],
        model["d_model"],
        without_seed(run),
        run["seed"],
    )


# ---- 2. Its scores ---------------------------------------------------------
#
# run["units"] says the unit of each score. A score without a unit prints as a plain number.


def all_runs(groups):
    found = []
    for runs in groups.values():
        found += runs
    return found


def score_names(groups):
    """All scores of these runs, in the order in which the tasks report them."""
    names = {}  # a dict, as a set would lose the order
    for run in all_runs(groups):
        for evaluation in run["evals"]:
            names.update(evaluation["eval"])
    return list(names)


def unit_of(groups, score):
    for run in all_runs(groups):
        if score in run["units"]:
            return run["units"][score]
    return ""


def values_by_step(run, score):
    """{step: value}, empty if the run does not have this score."""
    found = {}
    for evaluation in run["evals"]:
        if score in evaluation["eval"]:
            found[evaluation["step"]] = evaluation["eval"][score]
    return found


def last_scores(runs, score):
    """Each run's last value; runs without this score are left out."""
    found = []
    for run in runs:
        values = list(values_by_step(run, score).values())
        if values:
            found.append(values[-1])
    return found


def table(groups, scores=None):
    """Every seed's last scores, as Markdown."""
    scores = scores or score_names(groups)
    rows = [["", "seeds", *scores]]
    for name, runs in groups.items():
        seeds = sorted({run["seed"] for run in runs})  # once, if there are runs of several tasks
        row = [name, ", ".join(map(str, seeds))]
        for score in scores:
            row.append(each_seed(runs, score, unit_of(groups, score)))
        rows.append(row)
    return markdown(rows)


def each_seed(runs, score, unit):
    """The last value of each run, "97%, 98%"; for more than five runs alike, "100% each"."""
    values = [score_text(value, unit) for value in last_scores(runs, score)]
    if len(values) > 5 and len(set(values)) == 1:
        return f"{values[0]} each"
    return ", ".join(values)


def markdown(rows):
    """A table whose first row is its head; cells are texts."""
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


# ---- 3. How it looks -------------------------------------------------------
#
# All figures share colours and dashes. Attention is grey without Canon and orange with it; each
# linear mixer has a hue, pale without Canon. Lines are solid for RoPE and for linear mixers, dashed
# for NoPE, dash-dotted for other positions. Models that would still look alike get markers.

GREY, ORANGE = "#808080", "#e8590c"
DARK_GREY = "#666666"  # small print, and the line of chance
HUES = {"gla": "#2b8a3e", "mamba2": "#1864ab", "gdn": "#862e9c"}
OTHER_HUE = "#0b7285"  # hybrids, and mixers of your own
DASHES = {"rope": "-", "nope": "--"}
# matplotlib's markers, and how they look in a label
MARKERS = {"": "", "o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}

plt.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,  # a $ in a folder's name is a $
    }
)


class Look(NamedTuple):
    colour: tuple  # red, green, blue
    dash: str
    marker: str


def looks(groups):
    """{label: Look}. Of up to six models that share hue and dash, each has another marker."""
    found, uses = {}, Counter()
    for name, runs in groups.items():
        model = runs[0]["model"]
        hue, dash = hue_of(model), dash_of(model)
        colour = to_rgb(hue)
        if model["mixer"] != "attention" and not model["canon"]:
            colour = tuple((1 + part) / 2 for part in colour)  # without Canon, halfway to white
        marker = list(MARKERS)[uses[hue, dash] % len(MARKERS)]
        found[name] = Look(colour, dash, marker)
        uses[hue, dash] += 1
    return found


def hue_of(model):
    if model["mixer"] == "attention":
        return ORANGE if model["canon"] else GREY
    return HUES.get(model["mixer"], OTHER_HUE)


def dash_of(model):
    if "attention" not in model["mixer"].split(","):
        return "-"
    return DASHES.get(model["pos"], "-.")


# ---- 4. Figures ------------------------------------------------------------
#
# `title` says what was found. `below` stands small under the figure; by default it says what the
# runs have in common.


def curves(groups, scores=None, title=None, below=None, headings=None):
    """Scores against training steps, one panel per score: each run thin, their median thick.

    headings  {score: what stands above its panel}, where it is not the score's name
    """
    scores = scores or score_names(groups)
    legend = "Thick lines: medians; thin lines: single seeds."
    below = below or small_print(groups, legend) + about_chance(groups, scores)
    height = max(2.8, 0.26 * len(groups) + 0.8)  # inches; the lines' names stand in a column
    title = title or default_title(groups)
    figure, axes = make_grid(len(scores), height, title, below, most_per_row=3)
    ends_of_panels = []
    for axis, score in zip(axes, scores):
        ends_of_panels.append(draw_curves(axis, groups, score))
        axis.set_title(heading(score, headings))

    # In each row of panels a line is named once, beside the last panel that has it. So we go from
    # right to left.
    figure.draw_without_rendering()  # this places the axes, whose heights `name_ends` needs
    named = set()  # the lines that have their name in this row
    for axis, ends_here in reversed(list(zip(axes, ends_of_panels))):
        if axis.get_subplotspec().is_last_col():
            named = set()  # a row begins
        name_ends(axis, [end for end in ends_here if end.text not in named])
        named.update(end.text for end in ends_here)
    return figure


class End(NamedTuple):
    """Where a line ends, and what to write there."""

    x: float
    y: float
    text: str
    colour: tuple


def draw_curves(axis, groups, score):
    """Draw one panel. Returns the lines' ends."""
    unit, look_of = unit_of(groups, score), looks(groups)
    zoomed = unit == "bits per byte"  # they start at 8: show only the range where they end
    last_step = max(run["evals"][-1]["step"] for run in all_runs(groups))
    ends = []
    for name, runs in groups.items():
        look = look_of[name]
        style = {"color": look.colour, "ls": look.dash}
        for run in runs:
            curve = values_by_step(run, score)
            axis.plot(list(curve), list(curve.values()), lw=0.9, alpha=0.5, **style)
        medians = median_curve(runs, score)
        if not medians:
            continue
        steps, values = list(medians), list(medians.values())
        style["marker"] = look.marker
        if len(steps) == 1 and not look.marker:
            style["marker"] = "o"  # a line of one point would not be seen
        style["zorder"] = 3 if runs[0]["model"]["canon"] else 2  # Canon lies above
        # Clip only in a zoomed panel, which lines leave. In others, clipping would cut the markers
        # at the right edge.
        style["markevery"] = 0.12  # from marker to marker, as a share of the panel's diagonal
        axis.plot(steps, values, lw=2.6, ms=6, clip_on=zoomed, **style)
        text = f"{MARKERS[look.marker]} {name}".strip()
        ends.append(End(steps[-1], values[-1], text, look.colour))
    chance = chance_of(groups, score)
    if chance is not None:
        axis.axhline(chance, color=DARK_GREY, ls=":", lw=1)
        ends.append(End(last_step, chance, "chance", DARK_GREY))
    axis.set_xlim(0, last_step)
    axis.set_xlabel("training steps")
    # A narrow panel has few ticks, as their numbers would overlap.
    is_alone_in_row = axis.get_subplotspec().get_gridspec().ncols == 1
    axis.locator_params(axis="x", nbins=4 if is_alone_in_row else 2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    set_scale(axis.yaxis, unit, axis.dataLim.intervaly, margin=0.015)
    if zoomed and ends:
        last = [end.y for end in ends]  # each line's last score
        axis.set_ylim(0.9 * min(last), 1.2 * max(last))
        axis.set_ylabel("")  # the heading says it
    return ends


def median_curve(runs, score):
    """{step: median over the runs}, at the steps at which every run with this score was scored."""
    lines = [values_by_step(run, score) for run in runs]
    lines = [line for line in lines if line]
    if not lines:
        return {}
    steps = set(lines[0])
    for line in lines:
        steps &= line.keys()
    medians = {}
    for step in sorted(steps):
        medians[step] = statistics.median(line[step] for line in lines)
    return medians


def name_ends(axis, ends):
    """Write the lines' names to the right of the axes, each as near to its line as others allow."""
    ends = sorted(ends, key=lambda end: -end.y)
    low, high = axis.get_ylim()
    height = axis.get_window_extent().height / axis.figure.dpi  # inches
    gap = 0.22 / height  # a line of text is 0.22 inches high
    places = spread([(end.y - low) / (high - low) for end in ends], gap)
    # A thin line leads from the middle of the name's left edge, (0, 0.5), to the end.
    thin_line = {"arrowstyle": "-", "color": "#cccccc", "lw": 0.8, "relpos": (0, 0.5)}
    for end, place in zip(ends, places):
        axis.annotate(
            end.text,
            xy=(end.x, end.y),
            xytext=(1.06, place),
            textcoords="axes fraction",
            color=end.colour,
            va="center",
            arrowprops=thin_line,
        )


def spread(heights, gap):
    """The heights, given from the top down, moved until neighbours are a gap apart.

    They are pushed down first; what would then lie below 0 is pushed up again.
    """
    places = []
    highest = math.inf
    for height in heights:
        places.append(min(height, highest))
        highest = places[-1] - gap
    lowest = 0
    for i in reversed(range(len(places))):
        places[i] = max(places[i], lowest)
        lowest = places[i] + gap
    return places


def bars(groups, scores=None, title=None, below=None, headings=None):
    """The last scores, one panel per score and one row per model: bars are medians, dots runs.

    headings  {score: what stands above its panel}, where it is not the score's name
    """
    scores = scores or score_names(groups)
    legend = "Bars and numbers: medians; dots: single seeds."
    below = below or small_print(groups, legend) + about_chance(groups, scores)
    height = 0.8 + 0.32 * len(groups)
    title = title or default_title(groups)
    figure, axes = make_grid(len(scores), height, title, below, most_per_row=4)
    for axis, score in zip(axes, scores):
        draw_bars(axis, groups, score)
        axis.set_title(heading(score, headings), pad=16)  # above the word "chance"
    return figure


def draw_bars(axis, groups, score):
    """Draw one panel: a bar for each model, its runs' median, and a dot for each run."""
    unit, look_of = unit_of(groups, score), looks(groups)
    for row, (name, runs) in enumerate(groups.items()):
        values = last_scores(runs, score)
        if not values:
            continue
        median = statistics.median(values)
        axis.barh(row, median, color=look_of[name].colour, height=0.7)
        rows = [row] * len(values)
        # Not clipped: half of a dot at 0 or 100% lies outside the axes.
        axis.plot(values, rows, "o", color="white", mec="#333333", ms=4.5, clip_on=False)
        beside = axis.get_yaxis_transform()  # x as a share of the axes, y in rows
        axis.text(1.08, row, score_text(median, unit), transform=beside, va="center_baseline")
    chance = chance_of(groups, score)
    if chance is not None:
        axis.axvline(chance, color=DARK_GREY, ls=":", lw=1)
        above = axis.get_xaxis_transform()  # x as a score, y as a share of the axes
        axis.text(chance, 1.01, "chance", transform=above, fontsize=9, color=DARK_GREY)
    axis.set_ylim(len(groups) - 1 + 0.6, -0.6)  # upside down: row 0 is at the top
    axis.set_yticks(range(len(groups)), list(groups))  # the models' names
    axis.tick_params(axis="y", length=0, pad=8, labelleft=axis.get_subplotspec().is_first_col())
    axis.locator_params(axis="x", nbins=2)  # few ticks
    set_scale(axis.xaxis, unit, axis.dataLim.intervalx)


def dots(groups, score, columns, title=None, below=None, beside=None):
    """How far each run gets: one row per model, one dot per run, in the column of its last score.

    columns  {value: heading}, from left to right: {0: "none", 1: "1 hop", 2: "2 hops"}
    beside   {heading: text}, shown at the left: what the task looks like, in a few lines
    Raises ValueError for a value that has no column.
    """
    below = below or small_print(groups, "Each dot is one training run.")
    height = 0.6 + 0.5 * len(groups)
    title = title or default_title(groups)
    if beside:
        figure, axes = make_grid(2, height, title, below, most_per_row=2, width_ratios=[1.2, 2])
        write_beside(axes[0], beside)
    else:
        figure, axes = make_grid(1, height, title, below, most_per_row=1)
    axis = axes[-1]
    draw_empty_table(axis, list(groups), columns)
    figure.draw_without_rendering()  # this places the axes, so that their width is known
    column_width = axis.get_window_extent().width / figure.dpi / len(columns)  # inches

    # From dot to dot, as a share of a column: 0.2 inches, but at most 0.19, so that five fit.
    step = min(0.2 / column_width, 0.19)
    look_of, values = looks(groups), list(columns)
    for row, (name, runs) in enumerate(groups.items()):
        for value, count in Counter(last_scores(runs, score)).items():
            if value not in columns:
                raise ValueError(f"{name}: {score} = {value}: the columns are {values}")
            across, down = centred_lines(count, most=5)
            x = values.index(value) + step * across
            y = row + 0.36 * down  # a row is 1 high
            axis.plot(x, y, "o", color=look_of[name].colour, mec="white", ms=11.5, clip_on=False)
    return figure


def centred_lines(count, most):
    """x and y of `count` dots, in lines of at most `most`, all centred at 0, with steps of 1."""
    lines = math.ceil(count / most)
    x, y = [], []
    for line in range(lines):
        length = count // lines
        if line < count % lines:  # the first lines take what is left over
            length += 1
        for dot in range(length):
            x.append(dot - (length - 1) / 2)
            y.append(line - (lines - 1) / 2)
    return np.array(x), np.array(y)


def draw_empty_table(axis, rows, columns):
    """Turn axes into an empty table: rows 0, 1 .. from the top, columns 0, 1 .. from the left.

    rows: their names. columns: {value: heading}
    """
    bottom, top = len(rows) - 0.5, -0.5
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(bottom, top)
    axis.set_xticks(range(len(columns)), columns.values())
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=12)
    axis.spines[:].set_visible(False)
    for row in range(len(rows)):
        axis.axhline(row, color="#eeeeee", lw=1, zorder=0)
    for edge in range(1, len(columns)):
        axis.axvline(edge - 0.5, color="#dddddd", lw=1, zorder=0)


def write_beside(axis, texts):
    """Write {heading: text} into empty axes, from the top down, on light grey."""
    axis.axis("off")  # this removes their background, too
    axis.add_patch(plt.Rectangle((0, 0), 1, 1, transform=axis.transAxes, color="#f4f4f4"))
    y = -8  # points from the top of the axes
    for head, text in texts.items():
        head = textwrap.fill(head, 26)  # so many characters fit into these axes
        y = write_lines(axis, head, y, size=11, colour=DARK_GREY)
        y = write_lines(axis, text, y, size=12, colour="black")
        y -= 14  # room before the next heading


def write_lines(axis, text, y, size, colour):
    """Write text below y, in points from the top of the axes (so y < 0). Returns the next y."""
    axis.annotate(
        text,
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(8, y),
        textcoords="offset points",
        va="top",
        fontsize=size,
        color=colour,
    )
    line_height = 1.4 * size  # points
    return y - line_height * len(text.splitlines())


def make_grid(count, height, title, below, most_per_row, width_ratios=None):
    """A figure and the list of its `count` axes, each about `height` inches high."""
    n_rows = math.ceil(count / most_per_row)
    n_columns = math.ceil(count / n_rows)  # five panels, at most four in a row: 3 and 2
    figure, axes = plt.subplots(
        n_rows,
        n_columns,
        squeeze=False,  # axes is a 2-D array, even of one panel
        layout="constrained",  # makes room for titles and for names beside the axes
        figsize=(9, 1.1 + height * n_rows),  # inches; 1.1 for title and small print
        width_ratios=width_ratios,
    )
    title = textwrap.fill(title, 68)  # so many characters fit into 9 inches
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    below = textwrap.fill(below, 138)  # smaller ones
    # This stands below all axes.
    figure.supxlabel(below, x=0.01, ha="left", fontsize=9, color=DARK_GREY)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def set_scale(x_or_y, unit, interval, margin=0.0):
    """Scale an x or y axis: shares from 0 to 100%, others from zero on unless a value is below.

    x_or_y    axis.xaxis or axis.yaxis
    interval  the least and the greatest value drawn
    margin    free space beyond 0 and 100%, as a share of the scale

    (Without `ignore=True`, matplotlib would only ever widen the view.)
    """
    if unit == "share":
        x_or_y.set_view_interval(-margin, 1 + margin, ignore=True)
        x_or_y.set_major_formatter(PercentFormatter(xmax=1))
        return
    x_or_y.set_label_text(unit)
    x_or_y.set_major_formatter("{x:,g}")
    if interval[0] >= 0 and interval[1] > 0:
        x_or_y.set_view_interval(-margin * interval[1], 1.05 * interval[1], ignore=True)


def chance_of(groups, score):
    """The share that guessing gets right, if all runs with this score say the same; else None."""
    if unit_of(groups, score) != "share":
        return None
    runs = [run for run in all_runs(groups) if values_by_step(run, score)]
    chances = {run["chance"] for run in runs}
    return chances.pop() if len(chances) == 1 else None


def heading(score, headings):
    """What stands above a panel: "4 hops" for the score "k=4"; most scores are words already.

    headings  {score: heading} where the caller wants another; or None
    """
    if headings and score in headings:
        return headings[score]
    if score == "bits per byte":
        return "bits per byte of text it has not seen (fewer are better)"
    kind, _, number = score.partition("=")
    words = {"k": "hop", "l": "operation", "depth": "level"}  # in Depo, Mano, Brevo
    if kind not in words or not number:
        return score
    plural = "" if number == "1" else "s"
    return f"{number} {words[kind]}{plural}"


def default_title(groups):
    run = all_runs(groups)[0]
    return f"{run['task']['name']}, {run['preset']}"


def small_print(groups, legend):
    """What all runs have in common, how many there are, and how to read the figure.

    "Task copy, N=64, 1 layer, 16 dims, 2,000 steps of 32 windows. 3 seeds each."
    """
    runs = all_runs(groups)
    common = setting_texts(runs[0])
    for run in runs:
        others = setting_texts(run)
        common = [fact for fact in common if fact in others]
    counts = set()  # of seeds: each model's, per task
    for members in groups.values():
        seeds_per_task = Counter(run["task"]["name"] for run in members)
        counts.update(seeds_per_task.values())

    sentences = []
    if common:
        text = ", ".join(common)
        sentences.append(text[0].upper() + text[1:] + ".")  # capitalize() would write "n=64"
    fewest, most = min(counts), max(counts)
    if most == 1:
        sentences.append("One seed each.")
    else:
        number = most if fewest == most else f"{fewest} to {most}"
        sentences += [f"{number} seeds each.", legend]
    return " ".join(sentences)


def about_chance(groups, scores):
    """What the line named "chance" is, if there is one."""
    if all(chance_of(groups, score) is None for score in scores):
        return ""
    return " Chance: the best guess that ignores earlier answers."


def setting_texts(run):
    """What the small print may say of a run: ["task copy", "N=64", "1 layer", ..]."""
    task, model = run["task"], run["model"]
    training = run["training"]
    found = [f"task {task['name']}"]
    for field in ("N", "K", "L"):
        if field in task:
            found.append(f"{field}={task[field]}")
    layers = "layer" if model["n_layer"] == 1 else "layers"
    found += [f"{model['n_layer']} {layers}", f"{model['d_model']} dims"]
    return [*found, f"{training['steps']:,} steps of {training['batch_size']} windows"]


# ---- 5. Inside a model -----------------------------------------------------


class AttentionWatcher(TorchFunctionMode):
    """While it is active, `maps` gets the weights of each attention that is computed:
    {(layer, head): (T, T)}.

    The fused function keeps its weights to itself. But its output is the weights times the values:
    called once more with the identity matrix as values, it returns the weights. (PyTorch passes
    each call of its functions inside the `with` to __torch_function__.)
    """

    def __init__(self):
        super().__init__()
        self.layer = 0
        self.maps = {}

    def enter_block(self, *_):  # a hook gets the block and its inputs
        self.layer += 1

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # While this method runs, the watcher is off: it does not see its own calls.
        if function is F.scaled_dot_product_attention:
            first_sequence = attention_weights(*args, **kwargs)[0]
            for head, weights in enumerate(first_sequence, 1):
                self.maps[self.layer, head] = weights
        return function(*args, **kwargs)


def attention_weights(query, key, value, *args, **kwargs):
    """(B, H, T, T), for the arguments of PyTorch's function."""
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
    identity = identity.expand(*key.shape[:3], -1)  # (B, H, T, T)
    return F.scaled_dot_product_attention(query, key, identity, *args, **kwargs)


@torch.no_grad()
def attention_maps(model, tokens):
    """{(layer, head): (T, T)}, both counted from 1: how much row t attends to each token."""
    watcher = AttentionWatcher()
    hooks = [block.register_forward_pre_hook(watcher.enter_block) for block in model.blocks]
    with watcher:
        model(torch.tensor([tokens], device=device_of(model)))
    for hook in hooks:
        hook.remove()
    return watcher.maps


def canon_weights(model):
    """{"1A": mean |w_i| over the channels, (kernel,), ..} for each Canon layer."""
    found = {}
    for layer, block in enumerate(model.blocks, 1):
        points = {"A": block.canon_a, "B": getattr(block.mixer, "canon_b", None)}
        if block.mlp is not None:
            points.update({"C": block.canon_c, "D": block.mlp.canon_d})
        for point, canon in points.items():
            weight = getattr(canon, "weight", None)  # NoCanon has none; your own may have none
            if torch.is_tensor(weight) and weight.dim() == 2:
                found[f"{layer}{point}"] = weight.detach().abs().mean(dim=1)
    return found


READABLE_LENGTH = 28  # tokens; the names of many more columns would overlap


def inside(folder, title=None):
    """Where a trained model's sharp heads look when it answers, and its Canon weights.

    A head is sharp if it gives, on average, over half of its attention to one token. Up to five
    sharp heads are drawn; if there is none, the sharpest of all. Raises ValueError if the model has
    no attention.
    """
    task, model = run_folders.load_model(folder)
    rng = np.random.default_rng([0, SAMPLES])  # other numbers than training's and evaluation's

    def distance(document):
        return abs(len(document.tokens) - READABLE_LENGTH)

    document = min(task.documents(rng, 100), key=distance)
    words = [task.vocabulary[token] for token in document.tokens]
    rows = rows_before_targets(document)
    maps = {}
    # The last token is left out: nothing follows it.
    for place, weights in attention_maps(model, document.tokens[:-1]).items():
        maps[place] = weights[rows]
    if not maps:
        raise ValueError(f"{folder}: its mixer, {model.config.mixer}, has no attention to draw")

    def sharpness(place):
        return maps[place].amax(dim=1).mean()

    ranked = sorted(maps, key=sharpness, reverse=True)
    sharpest = [place for place in ranked[:5] if sharpness(place) > 0.5] or ranked[:1]
    canons = canon_weights(model)
    panels = len(sharpest) + (1 if canons else 0)
    name = Path(folder).resolve().name
    title = title or f"{name}: where its sharpest heads look, to write each next token"
    below = (
        "A row: the last three tokens, and the one to write. A column: a token that the head may "
        "look at. The darker, the more of its attention goes there. Canon: darkest is 1."
    )
    height = 1 + 0.16 * len(rows)
    figure, axes = make_grid(panels, height, title, below, most_per_row=2)
    for axis, (layer, head) in zip(axes, sorted(sharpest)):  # one more is left for Canon
        row_names = []
        if axis.get_subplotspec().is_first_col():
            row_names = [three_words_and_the_next(words, t) for t in rows]
        heat_map(axis, maps[layer, head], row_names, words[:-1], f"layer {layer}, head {head}")
    if canons:
        sizes = torch.stack(list(canons.values()), dim=1)  # (kernel, Canon layers)
        distances = ["this token"]
        for i in range(1, len(sizes)):
            distances.append(f"{i} back" if model.config.canon_type == "conv" else f"weight {i}")
        heat_map(axes[-1], sizes, distances, list(canons), "Canon: mean size of the weights")
    return figure


def three_words_and_the_next(words, t):
    before = " ".join(words[max(0, t - 2) : t + 1])
    return f"{before} → {words[t + 1]}"


def rows_before_targets(document):
    """The positions that predict the last targets, at most twelve."""
    found = []
    for start, end in document.targets:
        found += range(max(start, 1) - 1, end - 1)  # t - 1 predicts t; nothing predicts 0
    return found[-12:]


WHITE_TO_DARK = LinearSegmentedColormap.from_list("", ["white", ORANGE, "#5c1a00"])


def heat_map(axis, values, row_names, column_names, title):
    """values (rows, columns), from 0, white, to 1, dark. Without names: []."""
    axis.imshow(values.numpy(), cmap=WHITE_TO_DARK, vmin=0, vmax=1, aspect="auto")
    axis.set_title(title, fontsize=11, pad=4)
    axis.set_yticks(range(len(row_names)), row_names, fontsize=9)
    if len(column_names) > 40:
        column_names = []  # they would overlap
    axis.set_xticks(range(len(column_names)), column_names, fontsize=8, rotation=90)


# ---- 6. The command line ---------------------------------------------------


def save(figure, path):
    """Write a figure as PNG, close it and print its path."""
    path = Path(path)
    note = " (replaced)" if path.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    print(f"{path}{note}")


def complain(message):
    print(f"plot.py: {message}", file=sys.stderr)


def fail(message):
    complain(message)
    sys.exit(2)


def read_command_line(argv):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail  # one line, without argparse's usage
    parser.add_argument("runs", nargs="+", help="run folders, or files that --save wrote")
    parser.add_argument("--out", type=Path, default="out", help="figures' folder (default: out)")
    parser.add_argument("--title", help="what was found (default: the task and the preset)")
    parser.add_argument("--save", type=Path, help="also pack the runs into this file")
    parser.add_argument("--inside", action="store_true", help="draw attention and Canon weights")
    parser.add_argument(
        "--program",
        type=Path,
        help="a file that registers a mixer, Canon layer, positions or task of your own",
    )
    return parser.parse_args(argv)


def draw_runs(args):
    """A figure and a table for each task and preset. Returns whether there was anything to draw."""
    runs, problems = run_folders.read_all(args.runs)
    for problem in problems:
        complain(problem)
    if not runs and not problems:
        complain("no scores yet; did you mean out/*?")
    if runs and args.save:
        run_folders.pack(runs, args.save)
    kinds = {}  # {"copy_nano": its runs, ..}
    for run in runs:
        kinds.setdefault(f"{run['task']['name']}_{run['preset']}", []).append(run)
    for kind, its_runs in kinds.items():
        groups = group(its_runs)
        draw = curves if len(groups) <= 10 else bars  # more lines would hide one another
        save(draw(groups, title=args.title), args.out / f"{kind}.png")
        print(f"\n{table(groups)}\n")
    return len(runs) > 0


def draw_insides(args):
    """A figure for each run that has attention. Returns whether there was any."""
    drawn = False
    for path in map(Path, args.runs):
        if path.suffix in (*run_folders.NO_RUN_SUFFIXES, ".json"):
            continue  # a packed run has no weights
        try:
            figure = inside(path, args.title)
        except ValueError as error:  # a RunError is one
            complain(error)
            continue
        name = path.resolve().name  # Path(".") has no name of its own
        save(figure, args.out / f"{name}_inside.png")
        drawn = True
    return drawn


def main(argv=None):
    args = read_command_line(argv)
    if args.inside and args.save:
        fail("--save: packs runs for figures of scores; leave out --inside")
    try:
        if args.program is not None:
            run_folders.register(args.program)
        drawn = draw_insides(args) if args.inside else draw_runs(args)
    except OSError as error:
        fail(error)
    if not drawn:
        sys.exit(2)


if __name__ == "__main__":
    main()
