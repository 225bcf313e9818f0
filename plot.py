"""Figures and tables from runs:   python plot.py out/*

Draws a figure for each task and preset, such as out/copy_nano.png, and prints the last scores as a
Markdown table. If sizes of a task differ, each has its own figure: out/copy_nano_N=16.png.

    python plot.py out/* --save runs.json    also packs the runs into one file
    python plot.py runs.json                 draws packed runs: out/packed_copy_nano.png
    python plot.py --inside out/RUN          draws where a model's sharpest heads look

Runs that differ only in their seed are one group. Its label is their folders' name without task,
preset, seed and the flags that all runs of the figure share: copy_nano_rope_abcd_s0 and
copy_nano_rope_abcd_s1 are "rope_abcd", in the figure copy_nano.

Reading order: 1 reading runs; 2 groups and their scores; 3 a table; 4 two figures, `curves` and
`bars`; 5 inside a model; 6 the command line.
"""

import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from glob import glob
from itertools import chain
from pathlib import Path
from statistics import mean
from unittest.mock import patch

if "IPython" not in sys.modules:  # a program that a notebook starts inherits this,
    os.environ.pop("MPLBACKEND", None)  # but may not have the notebook's backend

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from canon_gpt import Refused, require
from sample import load_model
from tasks import SAMPLES, device_of, make_parser, score_text

# ---- 1. Reading runs -------------------------------------------------------
#
# A run is the dict in its config.json with two more entries from its log:
#
#     evals     [{"step": .., "eval": {score: value}}, ..], NaN where the log has null
#     seconds   how long it trained; None if it was stopped, or still trains


def read_runs(paths):
    """The runs in these folders and packed files, without those that have no scores yet.

    Skips figures and the like, because out/* names them, too. Raises Refused if a path does not
    exist, or if what it holds is damaged.
    """
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise Refused(f"no run in {path}")
        try:
            if path.is_dir():
                found += read_folder(path)
            elif path.suffix == ".json":
                found += json.loads(path.read_text())["runs"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise Refused(f"{path} is no run, or it is damaged: {error!r}") from None
    return [run for run in found if run["evals"]]


def read_folder(folder):
    """The folder's run in a list, which is empty if there is none."""
    config, log = folder / "config.json", folder / "metrics.jsonl"
    if not config.exists() or not log.exists():
        return []
    run = json.loads(config.read_text()) | {"evals": [], "seconds": None}
    text = log.read_text().replace(": null", ": NaN")  # scores that JSON can't hold
    for line in map(json.loads, text.splitlines()):
        if "final" in line:  # it repeats the last scores
            run["seconds"] = line["seconds"]
        elif "eval" in line:
            run["evals"].append({"step": line["step"], "eval": line["eval"]})
    return [run]


def pack(runs, path):
    """Write runs into one file, a line each, that `read_runs` reads."""
    rows = ",\n".join(json.dumps(run) for run in runs)
    Path(path).write_text(f'{{"runs": [\n{rows}\n]}}\n')


# ---- 2. Groups and their scores --------------------------------------------
#
# `groups` is always {label: [run, ..]}, in drawing order: a group per model, a run per seed.
# run["units"] has the units of scores; a score without a unit is printed as a plain number.


def group(runs):
    """The runs of one figure as groups. Of runs with the same name the last one counts."""
    by_name = {run["run"]: run for run in runs}
    shared = shared_flags(runs)
    groups = {}
    for run in sorted(by_name.values(), key=drawing_order):
        label = "_".join(word for word in words_of(run) if word not in shared)
        first = groups.get(label, [run])[0]
        label = "_".join([label, *differences(run, first)])  # a preset was edited between them
        groups.setdefault(label, []).append(run)
    return groups


def differences(run, other):
    """What a run's model and training have otherwise than another run's, but for the seed:
    ["lr=0.1"]."""
    found = []
    for part in ("model", "training"):
        for name in sorted(run[part].keys() & other[part].keys() - {"seed"}):
            value, other_value = run[part][name], other[part][name]
            if value != other_value and None not in (value, other_value):  # None: a default
                found.append(f"{name}={value}")
    return found


def drawing_order(run):
    """What to sort runs by: without Canon before with it, then by name, then by seed."""
    return run["model"]["canon"] != "", words_of(run), run["training"]["seed"]


def words_of(run):
    """The run's name without task, preset and seed: ["rope", "abcd", "N=16"]. A folder that --out
    called "my_run" is ["my_run"]."""
    name = re.sub(r"_s\d+$", "", run["run"])
    start = f"{task_and_preset(run)}_"
    return name.removeprefix(start).split("_") if name.startswith(start) else [name]


def shared_flags(runs):
    """The flags that all runs with such a name have in it: {"N=16", "steps=800"}."""
    flags = [set(words[2:]) for words in map(words_of, runs) if len(words) > 1]
    return set.intersection(*flags) if flags else set()


def task_and_preset(run):
    """Such as "copy_nano"."""
    return f"{run['task']['name']}_{run['preset']}"


def by_figure(runs):
    """{name: its runs} of all figures. The name is "copy_nano", or "copy_nano_N=16" where N differs
    between the tasks."""
    figures = {}
    for run in runs:
        words = [task_and_preset(run)]
        tasks = [other["task"] for other in runs if task_and_preset(other) == words[0]]
        for name, value in run["task"].items():
            if any(task.get(name) != value for task in tasks):
                file_safe = re.sub(r"[^\w.-]+", "-", str(value))[:16]
                words.append(f"{name.replace('_', '-')}={file_safe}")
        figures.setdefault("_".join(words), []).append(run)
    return figures


def all_runs(groups):
    return list(chain.from_iterable(groups.values()))


def all_scores(groups):
    """{score: its heading} for all scores of these runs, in the order in which tasks give them."""
    last = [run["evals"][-1]["eval"] for run in all_runs(groups)]
    return {score: score for score in chain.from_iterable(last)}


def unit_of(groups, score):
    units = [run["units"][score] for run in all_runs(groups) if score in run["units"]]
    return units[0] if units else ""


def chances_of(groups, score):
    """The shares that a guess gets right: more than one if the runs' tasks differ in size, and none
    if the score is not a share."""
    of_shares = [run for run in all_runs(groups) if run["units"].get(score) == "share"]
    return {run["chance"] for run in of_shares if run["chance"] is not None}


def values_by_step(run, score):
    """{step: value}, empty if the run doesn't have this score."""
    evals = [line for line in run["evals"] if score in line["eval"]]
    return {line["step"]: line["eval"][score] for line in evals}


def mean_by_step(runs, score):
    """{step: mean over the runs that have this score}, up to where all of them have come."""
    curves = [curve for run in runs if (curve := values_by_step(run, score))]
    means = {}
    for step in curves[0] if curves else ():
        values = [curve[step] for curve in curves if step in curve]
        if len(values) == len(curves):
            means[step] = mean(values)
    return means


def last_scores(runs, score):
    """The last value of each run that has this score."""
    last = [run["evals"][-1]["eval"] for run in runs]
    return [scores[score] for scores in last if score in scores]


# ---- 3. A table ------------------------------------------------------------


def table(groups, headings=None):
    """The last scores as Markdown: a row per group, or per score if there are more scores."""
    headings = headings or all_scores(groups)
    rows = [["", *headings.values()]]
    for label, runs in groups.items():
        rows.append([in_words(label, runs), *(cell(runs, score) for score in headings)])
    if len(headings) > len(groups):
        rows = [list(column) for column in zip(*rows)]
    return markdown(rows)


def cell(runs, score):
    """The mean, and each seed's score: "36% (53, 28, 26)"."""
    unit = unit_of({"": runs}, score)
    values = last_scores(runs, score)
    each = [score_text(value, unit) for value in values]
    if len(each) <= 1:
        return each[0] if each else "not run"
    if len(each) > 5:
        each = [f"lowest of {len(each)} seeds {score_text(min(values), unit)}"]
    return f"{score_text(mean(values), unit)} ({', '.join(each).replace('%', '')})"


def in_words(label, runs):
    """The label as readers see it, such as "rope without Canon" for "rope_bare", and how far its
    unfinished runs are: "mine, seed 1 (step 800 of 16,000)"."""
    label = label.replace("_bare", " without Canon").replace("_", " ")
    for run in runs:
        if run["seconds"] is None:
            step, training = run["evals"][-1]["step"], run["training"]
            label += f", seed {training['seed']} (step {step:,} of {training['steps']:,})"
    return label


def markdown(rows):
    """Rows of text as a table; the first row is its head."""
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


# ---- 4. Figures ------------------------------------------------------------
#
# Attention is grey without Canon and orange with it, and its lines are dashed without positions.
# Other mixers are pale blue without Canon and blue with it. Up to three lines that this makes equal
# differ in their markers; more have other colours, because they differ in something else than
# Canon. A good title says what was found.

GREY, ORANGE = "#808080", "#e8590c"
PALE_BLUE, BLUE = "#9ec5e8", "#1864ab"
MARKERS = ["", "o", "s", "^", "D", "v"]
OTHERS = ["#2ca02c", "#9467bd", "#d62728", "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#1f77b4"]

matplotlib.rc("font", size=11)
matplotlib.rc("text", parse_math=False)  # a $ in a name is a $
matplotlib.rc("axes", titlesize=12, titlelocation="left")
matplotlib.rc("axes.spines", top=False, right=False)
matplotlib.rc("legend", title_fontsize=9, frameon=False)


def curves(groups, title="", headings=None):
    """Scores against training steps, a panel per score.

    headings  {score: the title of its panel} for the scores to draw; None: all, by their names
    """
    meaning = "Thick lines are means, thin lines single seeds."
    height = 2.9 + 0.1 * len(groups)  # inches, with two columns of labels below
    return draw_panels(draw_curves, groups, title, headings, meaning, per_row=3, height=height)


def bars(groups, title="", headings=None):
    """The last scores, a panel per score and a row per group."""
    meaning = "Bars are means, dots single seeds."
    lines = max(shown_label(*each).count("\n") for each in groups.items())
    height = 0.9 + 0.16 * max(2, lines + 1) * len(groups)
    return draw_panels(draw_bars, groups, title, headings, meaning, per_row=4, height=height)


def draw_panels(draw, groups, title, headings, meaning, per_row, height):
    """A figure. `draw` draws a panel and returns what goes into the legend.

    meaning   what lines or bars mean if models have several seeds, for the small print
    """
    headings = headings or all_scores(groups)
    figure, axes = make_grid(len(headings), title, per_row, height)
    legend = {}  # {text: the line that it is about}
    for axis, (score, heading) in zip(axes, headings.items()):
        legend.update(draw(axis, groups, score))
        axis.set_title(heading)
    place = {"loc": "outside lower left", "alignment": "left", "ncols": 2}
    figure.legend(legend.values(), legend.keys(), title=small_print(groups, meaning), **place)
    return figure


def small_print(groups, meaning):
    """Such as "Seeds per model: 1. Training steps: 16,000." """
    seeds = Counter()  # of each model on each task
    for label, runs in groups.items():
        seeds.update((label, run["task"]["name"]) for run in runs)
    steps = [run["training"]["steps"] for run in all_runs(groups)]
    meaning = f"{meaning} " if max(seeds.values()) > 1 else ""
    return f"{meaning}Seeds per model: {span(seeds.values())}. Training steps: {span(steps)}."


def span(numbers):
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def make_grid(count, title, per_row, height):
    """A figure and the list of its `count` axes, each about `height` inches high."""
    rows = math.ceil(count / per_row)
    columns = math.ceil(count / rows)  # five panels, at most four a row: 3 and 2
    figure = Figure(figsize=(9, 1.0 + height * rows), layout="constrained")  # inches
    figure.suptitle(textwrap.fill(title, 68), x=0.01, ha="left", fontsize=15, weight="bold")
    axes = [figure.add_subplot(rows, columns, number) for number in range(1, count + 1)]
    return figure, axes


def usual_style(runs):
    """(colour, line style) of a group."""
    model = runs[0]["model"]
    attends = model["mixer"] == "attention"
    without, with_canon = (GREY, ORANGE) if attends else (PALE_BLUE, BLUE)
    line = "--" if attends and model["pos"] == "nope" else "-"
    return with_canon if model["canon"] else without, line


def line_styles(groups):
    """{label: (colour, line style, marker)}"""
    alike = {}  # {(colour, line style): the labels that have it}
    for label, runs in groups.items():
        alike.setdefault(usual_style(runs), []).append(label)
    found = {}
    for (colour, line), labels in alike.items():
        for number, label in enumerate(labels):
            own = OTHERS[number % len(OTHERS)] if len(labels) > 3 else colour
            found[label] = own, line, MARKERS[number % len(MARKERS)]
    return found


def shown_label(label, runs):
    """The same in lines that fit a legend."""
    return textwrap.fill(in_words(label, runs), width=40, break_on_hyphens=False)


def draw_curves(axis, groups, score):
    unit, style_of = unit_of(groups, score), line_styles(groups)
    legend = {}
    for label, runs in groups.items():
        colour, line, marker = style_of[label]
        thin = {"color": colour, "ls": line, "lw": 0.9, "marker": ".", "ms": 3, "alpha": 0.5}
        for run in runs if len(runs) > 1 else []:  # a single run is its own mean
            curve = values_by_step(run, score)
            axis.plot(list(curve), list(curve.values()), **thin)
        curve = mean_by_step(runs, score)
        thick = {"color": colour, "ls": line, "lw": 2.6, "markevery": max(1, len(curve) // 8)}
        thick["marker"] = marker if len(curve) > 1 else "o"  # one point without it is invisible
        (mean_line,) = axis.plot(list(curve), list(curve.values()), **thick)
        legend[shown_label(label, runs)] = mean_line
    for chance in chances_of(groups, score):
        legend["chance"] = axis.axhline(chance, color=GREY, ls=":", lw=1)
    axis.set(xlabel="training steps", xlim=(0, None))
    axis.locator_params(axis="x", nbins=4)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    if unit == "share":
        axis.set_ylim(-0.02, 1.02)  # a thick line at 0 or 100% is seen whole
        axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    else:
        axis.set_ylabel(unit)
    return legend


def draw_bars(axis, groups, score):
    unit = unit_of(groups, score)
    legend = {}
    for row, (label, runs) in enumerate(groups.items()):
        values = last_scores(runs, score)
        if not values:
            continue
        colour, _ = usual_style(runs)
        axis.barh(row, mean(values), color=colour, height=0.7)
        # Not clipped, because half of a dot at 0 or 100% lies outside the axes.
        dots = {"color": "white", "mec": "#333333", "ms": 4.5, "clip_on": False}
        axis.plot(values, [row] * len(values), "o", **dots)
        beside = axis.get_yaxis_transform()  # x as a share of the axes, y in rows
        text = score_text(mean(values), unit)
        axis.text(1.08, row, text, transform=beside, va="center_baseline")
    for chance in chances_of(groups, score):
        legend["chance"] = axis.axvline(chance, color=GREY, ls=":", lw=1)
    names = [shown_label(label, runs) for label, runs in groups.items()]
    axis.set_yticks(range(len(groups)), names, fontsize=9)
    axis.tick_params(axis="y", length=0, pad=8, labelleft=axis.get_subplotspec().is_first_col())
    axis.set_ylim(len(groups) - 0.4, -0.6)  # upside down: row 0 is at the top
    axis.locator_params(axis="x", nbins=2)
    if unit == "share":
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    else:
        axis.set_xlabel(unit)
    return legend


# ---- 5. Inside a model -----------------------------------------------------


@torch.no_grad()
def attention_maps(model, tokens):
    """{(layer, head): (T, T)}, both counted from 1. Row t is how token t spreads its attention.

    They are the weights of all attention that PyTorch computes in a forward pass, from the very
    queries, keys, mask and scale that the layers pass.
    """
    layers = []  # each a list of weights, one per head
    attend = F.scaled_dot_product_attention

    def attend_and_record(query, key, value, *others, **options):
        # This function returns weights @ value and never shows the weights. But if the value is the
        # identity matrix, it returns the weights.
        identity = torch.eye(value.shape[-2]).to(value).expand(*value.shape[:-1], -1)
        weights = attend(query, key, identity, *others, **options)
        if weights.shape[-2:] == (len(tokens), len(tokens)):  # not so for a window
            layers[-1] += weights.flatten(0, -3)
        return attend(query, key, value, *others, **options)

    def add_layer(block, inputs):
        layers.append([])

    hooks = [block.register_forward_pre_hook(add_layer) for block in model.blocks]
    with patch.object(F, "scaled_dot_product_attention", attend_and_record):
        model(torch.tensor([tokens], device=device_of(model)))
    for hook in hooks:
        hook.remove()
    maps = {}
    for layer, heads in enumerate(layers, 1):
        maps |= {(layer, head): weights for head, weights in enumerate(heads, 1)}
    return maps


MOST_ROWS, MOST_COLUMNS = 12, 40  # of a panel

HOW_TO_READ = """a → b: the model has read a, and should say b. To find b, a head may look for an
earlier a. After Canon-A or B a token also tells of the three before it, so that the head
can look one, two or three places after a instead."""


def inside(folder, title=""):
    """A figure: where a trained model looks when it answers one instance of its task.

    It shows the four sharpest heads, which on average give the largest share of their attention to
    a single token. Raises Refused if the model has no attention.
    """
    task, model = load_model(folder)
    rng = np.random.default_rng([0, SAMPLES])  # other numbers than training's and evaluation's
    (document,) = task.documents(rng, 1)
    tokens = document.tokens[:-1]  # nothing follows the last one
    is_target = np.array(document.target_tokens()[1:]) >= 0  # nothing predicts the first one
    rows = np.flatnonzero(is_target)[-MOST_ROWS:]  # the tokens that a target follows
    words = [task.vocabulary[token] for token in document.tokens]
    answers = [f"{words[t]} → {words[t + 1]}" for t in rows]

    maps = {place: weights[rows] for place, weights in attention_maps(model, tokens).items()}
    require(maps, "--inside", str(folder), f"its mixer, {model.config.mixer}, has no attention")
    sharpness = {place: weights.amax(dim=1).mean() for place, weights in maps.items()}
    sharpest = sorted(maps, key=sharpness.get, reverse=True)[:4]
    most = torch.stack([maps[place] for place in sharpest]).amax(dim=(0, 1))  # (T,)
    # If there are too many tokens, keep those that get the most attention.
    columns = most.topk(min(MOST_COLUMNS, len(tokens))).indices.sort().values

    figure, axes = make_grid(len(sharpest), title, per_row=1, height=0.5 + 0.17 * len(rows))
    for axis, (layer, head) in zip(axes, sharpest):
        weights = maps[layer, head][:, columns].numpy()
        image = axis.imshow(weights, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
        axis.set_title(f"layer {layer}, head {head}: {sharpness[layer, head]:.0%} on one token")
        axis.set_yticks(range(len(rows)), answers, fontsize=9)
        axis.set_ylabel("answers")
        axis.set_xticks([])
    axes[-1].set_xticks(range(len(columns)), [words[t] for t in columns], rotation=90)
    axes[-1].set_xlabel(f"looks at ({len(columns)} of {len(tokens)} tokens)")
    figure.supxlabel(HOW_TO_READ, fontsize=9, x=0.01, ha="left")
    figure.colorbar(image, ax=axes, label="attention", format=PercentFormatter(xmax=1), aspect=40)
    return figure


# ---- 6. The command line ---------------------------------------------------


def save(figure, name):
    """Write a figure into out/, and print its path."""
    path = Path(f"out/{name}.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=160)
    print(path)


def draw_runs(runs, start):
    """A figure, whose name begins with `start`, and a table for each task, its size, and preset."""
    for name, its_runs in by_figure(runs).items():
        groups = group(its_runs)
        words = name.split("_")
        words += sorted(shared_flags(its_runs) - set(words))
        draw = curves if len(groups) <= 10 else bars  # more lines would hide one another
        save(draw(groups, title=" ".join(words)), start + name)
        print(f"\n{table(groups)}\n")


def main(argv=None):
    parser = make_parser(__file__, __doc__)
    parser.add_argument("runs", nargs="+", help="run folders, or files that --save wrote")
    parser.add_argument("--save", type=Path, help="also pack the runs into this file")
    parser.add_argument("--inside", action="store_true", help="draw where sharp heads look")
    args = parser.parse_args(argv)
    paths = []
    for name in args.runs:  # Windows' shell leaves it to programs to expand out/*
        paths += [name] if Path(name).exists() else sorted(glob(name)) or [name]
    try:
        if args.inside:
            for path in paths:
                name = Path(path).resolve().name
                save(inside(path, title=f"{name}: where its heads look"), f"{name}_inside")
            return
        runs = read_runs(paths)
        if not runs:
            raise Refused(f"no run in {', '.join(paths)}")
        if args.save:
            pack(runs, args.save)
        packed = any(Path(path).suffix == ".json" for path in paths)
        draw_runs(runs, start="packed_" if packed else "")  # own figures stay as they are
    except (Refused, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
