"""Figures and tables from runs:   python plot.py out/*

Draws a figure for each task and preset, such as out/copy_nano.png, and prints the last scores as a
Markdown table.

    python plot.py out/* --save runs.json    also packs the runs into one file, which it can draw
    python plot.py --inside out/RUN          draws where a model's sharpest heads look

Runs that differ only in their seed are one group. Its label is their folders' name without task,
preset and seed: copy_nano_rope_abcd_s0 and copy_nano_rope_abcd_s1 are "rope_abcd", in the figure
copy_nano.

Reading order: 1 reading runs; 2 groups and their scores; 3 a table; 4 two figures, `curves` and
`bars`; 5 inside a model; 6 the command line.
"""

import argparse
import json
import math
import re
import textwrap
from collections import Counter
from glob import glob
from itertools import chain
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from canon_gpt import Attention, Refused, require
from sample import load_model
from tasks import SAMPLES, device_of, score_text

# ---- 1. Reading runs -------------------------------------------------------
#
# A run is the dict in its config.json with two more entries from its log:
#
#     evals     [{"step": .., "eval": {score: value}}, ..]
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
    for line in map(json.loads, log.read_text().splitlines()):
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
    groups = {}
    for run in sorted(by_name.values(), key=drawing_order):
        groups.setdefault(label_of(run), []).append(run)
    return groups


def drawing_order(run):
    """What to sort runs by: without Canon before with it, then by name, then by seed."""
    return run["model"]["canon"] != "", label_of(run), run["training"]["seed"]


def label_of(run):
    """The run's name without task, preset and seed: "rope_abcd" for copy_nano_rope_abcd_s0.

    A folder that --out called "mine" stays "mine".
    """
    without_seed = re.sub(r"_s\d+$", "", run["run"])
    return without_seed.removeprefix(f"{figure_of(run)}_")


def figure_of(run):
    """The name of the figure that shows this run, such as "copy_nano"."""
    return f"{run['task']['name']}_{run['preset']}"


def all_runs(groups):
    return list(chain.from_iterable(groups.values()))


def all_scores(groups):
    """{score: its heading} for all scores of these runs, in the order in which tasks report them."""
    found = {}
    for run in all_runs(groups):
        found |= {score: score for score in run["evals"][-1]["eval"]}
    return found


def unit_of(groups, score):
    for run in all_runs(groups):
        if score in run["units"]:
            return run["units"][score]
    return ""


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
    curves = [values_by_step(run, score) for run in runs]
    curves = [curve for curve in curves if curve]
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
        rows.append([with_progress(label, runs), *(cell(runs, score) for score in headings)])
    if len(headings) > len(groups):
        rows = [list(column) for column in zip(*rows)]
    return markdown(rows)


def cell(runs, score):
    """The mean, and each seed's score: "36% (53, 28, 26)"."""
    unit = unit_of({"": runs}, score)
    values = last_scores(runs, score)
    if not values:
        return "not run"
    each = [score_text(value, unit) for value in values]
    if len(each) == 1:
        return each[0]
    if len(each) > 5:
        each = [f"lowest of {len(each)} seeds {score_text(min(values), unit)}"]
    return f"{score_text(mean(values), unit)} ({', '.join(each).replace('%', '')})"


def with_progress(label, runs):
    """The label, and how far its unfinished runs are: "mine, seed 1 (step 800 of 16,000)"."""
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
# Other mixers are pale blue without Canon and blue with it. A good title says what was found.

GREY, ORANGE = "#808080", "#e8590c"
PALE_BLUE, BLUE = "#9ec5e8", "#1864ab"
MARKERS = ["", "o", "s", "^", "D", "v"]  # for models that share colour and dashes

matplotlib.rc("font", size=11)
matplotlib.rc("text", parse_math=False)  # a $ in a name is a $
matplotlib.rc("axes", titlesize=12, titlelocation="left")
matplotlib.rc("axes.spines", top=False, right=False)


def curves(groups, title="", headings=None):
    """Scores against training steps, a panel per score.

    headings  {score: the title of its panel} for the scores to draw; None: all, by their names
    """
    meaning = "Thick lines are means, thin lines single seeds."
    return draw_panels(draw_curves, groups, title, headings, meaning, per_row=3, height=2.9)


def bars(groups, title="", headings=None):
    """The last scores, a panel per score and a row per group."""
    meaning = "Bars are means, dots single seeds."
    lines = [shown_label(label, runs).count("\n") + 1 for label, runs in groups.items()]
    height = 0.9 + 0.16 * max(2, *lines) * len(groups)
    return draw_panels(draw_bars, groups, title, headings, meaning, per_row=4, height=height)


def draw_panels(draw, groups, title, headings, meaning, per_row, height):
    """A figure. `draw` draws a panel and returns what goes into the legend.

    meaning   what lines or bars mean, for the small print
    """
    headings = headings or all_scores(groups)
    figure, axes = make_grid(len(headings), title, per_row, height)
    legend = {}  # {text: the line that it is about}
    for axis, (score, heading) in zip(axes, headings.items()):
        legend.update(draw(axis, groups, score))
        axis.set_title(heading)
    lines = sum(text.count("\n") + 1 for text in legend)
    figure.set_figheight(figure.get_figheight() + 0.1 * lines)  # inches, for two columns
    figure.legend(
        legend.values(),
        legend.keys(),
        title=f"{meaning} {seeds_and_steps(groups)}",
        title_fontsize=9,
        alignment="left",
        loc="outside lower left",
        ncols=2,
        frameon=False,
    )
    return figure


def seeds_and_steps(groups):
    """For the small print: "Seeds per model: 1 to 3. Training steps: 16,000." """
    seeds = Counter()  # of each model on each task
    for label, runs in groups.items():
        seeds.update((label, run["task"]["name"]) for run in runs)
    steps = [run["training"]["steps"] for run in all_runs(groups)]
    return f"Seeds per model: {span(seeds.values())}. Training steps: {span(steps)}."


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


def styles(groups):
    """{label: (colour, line style, marker)}"""
    found, uses = {}, Counter()
    for label, runs in groups.items():
        model = runs[0]["model"]
        attends = model["mixer"] == "attention"
        without, with_canon = (GREY, ORANGE) if attends else (PALE_BLUE, BLUE)
        colour = with_canon if model["canon"] else without
        line = "--" if attends and model["pos"] == "nope" else "-"
        marker = MARKERS[uses[colour, line] % len(MARKERS)]
        uses[colour, line] += 1
        found[label] = colour, line, marker
    return found


def shown_label(label, runs):
    """The same in lines that fit a legend."""
    words = with_progress(label, runs).replace("_", " ")
    return textwrap.fill(words, width=40, break_on_hyphens=False)


def draw_curves(axis, groups, score):
    unit, style_of = unit_of(groups, score), styles(groups)
    legend = {}
    for label, runs in groups.items():
        colour, line, marker = style_of[label]
        for run in runs if len(runs) > 1 else []:  # a single run is its own mean
            curve = values_by_step(run, score)
            thin = {"color": colour, "ls": line, "lw": 0.9, "marker": ".", "ms": 3, "alpha": 0.5}
            axis.plot(list(curve), list(curve.values()), **thin)
        curve = mean_by_step(runs, score)
        thick = {"color": colour, "ls": line, "lw": 2.6, "marker": marker}
        thick["markevery"] = max(1, len(curve) // 8)
        if len(curve) == 1:
            thick["marker"] = "o"  # a line of one point would be invisible
        (mean_line,) = axis.plot(list(curve), list(curve.values()), **thick)
        legend[shown_label(label, runs)] = mean_line
    for chance in chances_of(groups, score):
        legend["chance"] = axis.axhline(chance, color=GREY, ls=":", lw=1)
    axis.set_xlabel("training steps")
    axis.set_xlim(left=0)
    axis.locator_params(axis="x", nbins=4)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    if unit == "share":
        axis.set_ylim(-0.02, 1.02)  # a thick line at 0 or 100% is seen whole
        axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    else:
        axis.set_ylabel(unit)
    return legend


def draw_bars(axis, groups, score):
    unit, style_of = unit_of(groups, score), styles(groups)
    legend = {}
    for row, (label, runs) in enumerate(groups.items()):
        values = last_scores(runs, score)
        if not values:
            continue
        colour, _, _ = style_of[label]
        axis.barh(row, mean(values), color=colour, height=0.7)
        rows = [row] * len(values)
        # Not clipped, because half of a dot at 0 or 100% lies outside the axes.
        axis.plot(values, rows, "o", color="white", mec="#333333", ms=4.5, clip_on=False)
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
    """{(layer, head): (T, T)}, both counted from 1. Row t is how token t spreads its attention."""
    maps = {}
    x = model.embed(torch.tensor([tokens], device=device_of(model)))
    for layer, block in enumerate(model.blocks, 1):
        if isinstance(block.mixer, Attention):
            weights = attention_weights(block.mixer, block.canon_a(block.norm1(x)))
            for head, head_weights in enumerate(weights, 1):
                maps[layer, head] = head_weights
        x = block(x)
    return maps


def attention_weights(attention, x):
    """softmax(q k^T / sqrt(K) + mask), (H, T, T), where x (1, T, D) is what this layer reads.

    This repeats the first half of Attention.forward. The second half hands q, k and v to PyTorch's
    fused function, which never forms these weights as a matrix.
    """
    T = x.shape[1]
    qkv = attention.canon_b(attention.qkv(x))  # (1, T, 3D)
    q, k, _ = qkv.unflatten(-1, (3, attention.n_head, -1)).unbind(2)  # (1, T, H, K)
    q = attention.positions.turn(q, 0)[0].transpose(0, 1)  # (H, T, K)
    k = attention.positions.turn(k, 0)[0].transpose(0, 1)
    mask = attention.mask(T, T, like=q)
    if mask is None:  # only the future is hidden
        mask = torch.full((T, T), -math.inf, device=x.device).triu(1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores + mask).softmax(-1)


MOST_ROWS, MOST_COLUMNS = 12, 40  # of a panel


def inside(folder, title=""):
    """A figure: where a trained model looks when it answers one instance of its task.

    It shows the four sharpest heads, which on average give the largest share of their attention to
    a single token. Raises Refused if the model has no attention.
    """
    task, model = load_model(folder)
    rng = np.random.default_rng([0, SAMPLES])  # other numbers than training's and evaluation's
    (document,) = task.documents(rng, 1)
    tokens = document.tokens[:-1]  # nothing follows the last one
    rows = []  # the tokens that a target follows
    for start, end in document.targets:
        rows += range(max(start, 1) - 1, end - 1)  # nothing predicts the first token
    rows = rows[-MOST_ROWS:]
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
        on_one_token = f"{sharpness[layer, head]:.0%} on one token"
        axis.set_title(f"layer {layer}, head {head}: {on_one_token}")
        axis.set_yticks(range(len(rows)), answers, fontsize=9)
        axis.set_ylabel("answers")
        axis.set_xticks([])
    axes[-1].set_xticks(range(len(columns)), [words[t] for t in columns], rotation=90)
    axes[-1].set_xlabel(f"looks at ({len(columns)} of {len(tokens)} tokens)")
    figure.colorbar(image, ax=axes, label="attention", format=PercentFormatter(xmax=1), aspect=40)
    return figure


# ---- 6. The command line ---------------------------------------------------


def save(figure, name):
    """Write a figure into out/, and print its path."""
    path = Path(f"out/{name}.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=160)
    print(path)


def draw_runs(runs):
    """A figure and a table for each task and preset."""
    by_figure = {}
    for run in runs:
        by_figure.setdefault(figure_of(run), []).append(run)
    for name, its_runs in by_figure.items():
        groups = group(its_runs)
        draw = curves if len(groups) <= 10 else bars  # more lines would hide one another
        save(draw(groups, title=name), name)
        print(f"\n{table(groups)}\n")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="plot.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="+", help="run folders, or files that --save wrote")
    add("--save", type=Path, help="also pack the runs into this file")
    add("--inside", action="store_true", help="draw where a model's sharpest heads look")
    args = parser.parse_args(argv)
    paths = []
    for name in args.runs:
        if Path(name).exists():
            paths.append(name)
        else:  # Windows' shell leaves it to programs to expand out/*
            paths += sorted(glob(name)) or [name]
    try:
        if args.inside:
            for path in paths:
                name = Path(path).resolve().name
                figure = inside(path, title=f"{name}: where its heads look")
                save(figure, f"{name}_inside")
            return
        runs = read_runs(paths)
        if not runs:
            raise Refused(f"no run in {', '.join(paths)}")
        if args.save:
            pack(runs, args.save)
        draw_runs(runs)
    except (Refused, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
