"""Figures and tables from runs:   python plot.py out/*

Draws a figure for each task, preset and size, and prints every seed's last scores as a Markdown
table.

    python plot.py out/* --out figures       writes figures/copy_nano_N=64.png, and so on
    python plot.py out/* --save runs.json    also packs the runs into one file, which it can draw
    python plot.py --inside out/RUN          draws where a model's sharpest heads look

Reading order: 1 reading runs; 2 what a run is called; 3 its scores, and a table; 4 two figures,
`curves` and `bars`; 5 inside a model; 6 the command line. `groups` always means
{label: [run, ..]}, a group per model and a run per seed, in drawing order.
"""

import json
import math
import os
import statistics
import sys
import textwrap
from collections import Counter
from glob import glob
from itertools import chain
from pathlib import Path
from unittest.mock import patch

if "ipykernel" not in sys.modules:
    # Jupyter's terminal hands its backend to every program. Where that is not installed, matplotlib
    # would not even be imported; and figures that are only saved need no backend.
    os.environ.pop("MPLBACKEND", None)

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from canon_gpt import Refused
from sample import load_model, parser_of, reading, register
from tasks import SAMPLES, device_of, score_text

# ---- 1. Reading runs -------------------------------------------------------
#
# A run is the dict in its config.json and, from its log,
#
#     evals     [{"step": .., "eval": {score: value}}, ..]
#     seconds   how long it trained; None while it trains


def read_runs(paths):
    """The runs in these folders and packed files. Those without scores are left out.

    Figures and the like are passed over, as the shell's out/* names them, too. Raises Refused for a
    path that is no run, or damaged.
    """
    found = []
    for path in map(Path, paths):
        with reading(path):
            if path.is_dir():
                found += read_folder(path)
            elif path.suffix == ".json" or not path.exists():
                found += json.loads(path.read_text())["runs"]
    return [run for run in found if run["evals"]]


def read_folder(folder):
    """A list with the folder's run; empty if there is none, or it has not begun."""
    config, log = folder / "config.json", folder / "metrics.jsonl"
    if not config.exists() or not log.exists():
        return []
    run = json.loads(config.read_text())
    run |= {"evals": [], "seconds": None}
    for line in map(json.loads, log.read_text().splitlines()):
        if "final" in line:  # it repeats the last scores
            run["seconds"] = line["seconds"]
        elif "eval" in line:
            run["evals"].append({"step": line["step"], "eval": line["eval"]})
    return [run]


def pack(runs, path):
    """Write runs into one file, one run per line, that `read_runs` reads."""
    rows = ",\n".join(json.dumps(run) for run in runs)
    Path(path).write_text(f'{{"runs": [\n{rows}\n]}}\n')


# ---- 2. What a run is called -----------------------------------------------

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

    "RoPE + Canon-ABCD (no-res)", or "GDN + Canon-AbCD": the small b is the mixer's own convolution.
    Without Canon, such a model is "GDN (conv)".
    """
    position = POSITION_NAMES.get(model["pos"], model["pos"])
    names = {**MIXER_NAMES, "attention": position}  # attention goes by its positions
    mixers = model["mixer"].split(",")  # a hybrid has several
    name = "/".join(names.get(mixer, mixer) for mixer in mixers)
    points = model["canon"].upper()
    if points:
        if model["short_conv"]:
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
    if model["short_conv"] and not points:
        variants.append("conv")
    if variants:
        name += f" ({', '.join(variants)})"
    return name


def group(runs):
    """The runs as groups, in drawing order. Of runs that share recipe and seed, the last counts."""
    by_recipe = {}  # {recipe: {seed: run}}
    for run in sorted(runs, key=order):
        recipe = json.dumps(settings_of(run), sort_keys=True)  # as text it can be a key
        by_recipe.setdefault(recipe, {})[run["seed"]] = run
    groups = {}
    for seeds in by_recipe.values():
        members = list(seeds.values())
        groups[label(members[0], runs)] = members
    return groups


def settings_of(run):
    """{field: value} of all that makes a run, but its seed."""
    return {**run["task"], **run["model"], **run["training"], "dtype": run["dtype"]}


def label(run, runs):
    """The name of the run's model, and the settings in which runs of that name differ, such as
    "RoPE, n_layer 2".
    """
    name = model_name(run["model"])
    namesakes = [other for other in runs if model_name(other["model"]) == name]
    for field, value in settings_of(run).items():
        if any(settings_of(other).get(field) != value for other in namesakes):
            name += f", {field} {value}"
    return name


def order(run):
    """What to sort by: attention before linear mixers, RoPE before NoPE, no Canon before Canon."""
    model = run["model"]
    convolutions = len(model["canon"]) + model["short_conv"]
    is_linear, is_nope = model["mixer"] != "attention", model["pos"] == "nope"
    return is_linear, model["mixer"], is_nope, model["pos"], convolutions, run["seed"]


def kind_of(run):
    """("copy", "nano", "N=64"): the runs that belong in one figure have the same."""
    task = run["task"]
    sizes = [f"{field}={task[field]}" for field in ("N", "K", "L") if field in task]
    return (task["name"], run["preset"], *sizes)


# ---- 3. Its scores, and a table --------------------------------------------
#
# run["units"] says the unit of each score. A score without a unit prints as a plain number.


def all_runs(groups):
    return list(chain.from_iterable(groups.values()))


def score_names(groups):
    """All scores of these runs, in the order in which the tasks report them."""
    names = {}  # a dict, as a set would lose the order
    for run in all_runs(groups):
        names.update(run["evals"][-1]["eval"])
    return list(names)


def unit_of(groups, score):
    for run in all_runs(groups):
        if score in run["units"]:
            return run["units"][score]
    return ""


def chance_of(groups, score):
    """The share that guessing gets right; None if that is not known, or the score is no share."""
    for run in all_runs(groups):
        if run["units"].get(score) == "share":
            return run["chance"]
    return None


def values_by_step(run, score):
    """{step: value}, empty if the run does not have this score."""
    evals = [line for line in run["evals"] if score in line["eval"]]
    return {line["step"]: line["eval"][score] for line in evals}


def last_scores(runs, score):
    """Each run's last value; runs without this score are left out."""
    last = [run["evals"][-1]["eval"] for run in runs]
    return [scores[score] for scores in last if score in scores]


def table(groups, scores=None):
    """Every seed's last scores, as Markdown."""
    scores = scores or score_names(groups)
    rows = [["model", "seeds", *scores]]
    for name, runs in groups.items():
        seeds = sorted({run["seed"] for run in runs})  # once, if there are runs of several tasks
        row = [name, ", ".join(map(str, seeds))]
        for score in scores:
            unit = unit_of(groups, score)
            row.append(", ".join(score_text(value, unit) for value in last_scores(runs, score)))
        rows.append(row)
    return markdown(rows)


def markdown(rows):
    """A table whose first row is its head; cells are texts."""
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


# ---- 4. Figures ------------------------------------------------------------
#
# Attention is grey without Canon and orange with it; another mixer has a colour of matplotlib's,
# pale without Canon. Lines are dashed for attention without positions. `title` says what was found.

GREY, ORANGE = "#808080", "#e8590c"
MIXER_COLOURS = {"mamba2": "tab:blue", "gla": "tab:green", "gdn": "tab:purple"}
OTHER_COLOUR = "tab:brown"  # hybrids, and mixers of your own
MARKERS = ["", "o", "s", "^", "D", "v"]  # models that share colour and dashes differ in these

matplotlib.rc("font", size=11)
matplotlib.rc("axes", titlesize=12, titlelocation="left")
matplotlib.rc("axes.spines", top=False, right=False)


def curves(groups, title="", headings=None):
    """Scores against training steps, a panel per score: each run thin, their median thick.

    headings  {score: what stands above its panel}, of the scores to draw; None for all, by name
    """
    return draw_panels(draw_curves, groups, title, headings, per_row=3, height=2.9)


def bars(groups, title="", headings=None):
    """The last scores, a panel per score and a row per model: bars are medians, dots runs."""
    height = 0.9 + 0.32 * len(groups)
    return draw_panels(draw_bars, groups, title, headings, per_row=4, height=height)


def draw_panels(draw, groups, title, headings, per_row, height):
    """A figure. `draw` draws a panel, and returns what goes into the legend."""
    headings = headings or {score: score for score in score_names(groups)}
    figure, axes = make_grid(len(headings), title, per_row, height)
    legend = {}  # {text: the line or bar that it is about}
    for axis, (score, heading) in zip(axes, headings.items()):
        legend.update(draw(axis, groups, score))
        axis.set_title(heading)
    figure.legend(legend.values(), legend.keys(), loc="outside lower left", ncols=3, frameon=False)
    return figure


def make_grid(count, title, per_row, height):
    """A figure and the list of its `count` axes, each about `height` inches high."""
    rows = math.ceil(count / per_row)
    columns = math.ceil(count / rows)  # five panels, at most four a row: 3 and 2
    figure = Figure(figsize=(9, 1.2 + height * rows), layout="constrained")  # inches
    title = textwrap.fill(title, 68)  # so many characters fit into 9 inches
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    axes = [figure.add_subplot(rows, columns, number) for number in range(1, count + 1)]
    return figure, axes


def looks(groups):
    """{label: how matplotlib draws it}"""
    found, uses = {}, Counter()
    for name, runs in groups.items():
        model = runs[0]["model"]
        if model["mixer"] == "attention":
            colour = ORANGE if model["canon"] else GREY
        else:
            opacity = 1 if model["canon"] else 0.5
            colour = (MIXER_COLOURS.get(model["mixer"], OTHER_COLOUR), opacity)
        dashed = model["mixer"] == "attention" and model["pos"] == "nope"
        marker = MARKERS[uses[colour, dashed] % len(MARKERS)]
        uses[colour, dashed] += 1
        found[name] = {"color": colour, "ls": "--" if dashed else "-", "marker": marker}
    return found


def draw_curves(axis, groups, score):
    unit, look_of = unit_of(groups, score), looks(groups)
    legend = {}
    for name, runs in groups.items():
        for run in runs:
            curve = values_by_step(run, score)
            thin = {**look_of[name], "lw": 0.9, "alpha": 0.5, "marker": ""}
            (single,) = axis.plot(list(curve), list(curve.values()), **thin)
        curve = median_curve(runs, score)
        above = 3 if runs[0]["model"]["canon"] else 2  # Canon lies above
        thick = {**look_of[name], "lw": 2.6, "markevery": 0.12, "zorder": above}
        if len(curve) == 1:
            thick["marker"] = "o"  # a line of one point would not be seen
        (legend[name],) = axis.plot(list(curve), list(curve.values()), **thick)
    if len(all_runs(groups)) > len(groups):
        legend["single seed"] = single
    chance = chance_of(groups, score)
    if chance is not None:
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


def median_curve(runs, score):
    """{step: median over the runs that have the score}, at the steps at which all these have it."""
    curves = [values_by_step(run, score) for run in runs]
    curves = [curve for curve in curves if curve]
    values = {}  # of all curves, by step
    for curve in curves:
        for step, value in curve.items():
            values.setdefault(step, []).append(value)
    complete = [step for step in values if len(values[step]) == len(curves)]
    return {step: statistics.median(values[step]) for step in complete}


def draw_bars(axis, groups, score):
    unit, look_of = unit_of(groups, score), looks(groups)
    legend = {}
    for row, (name, runs) in enumerate(groups.items()):
        values = last_scores(runs, score)
        if not values:
            continue
        median = statistics.median(values)
        legend["median"] = axis.barh(row, median, color=look_of[name]["color"], height=0.7)
        rows = [row] * len(values)
        # Not clipped: half of a dot at 0 or 100% lies outside the axes.
        dot = {"color": "white", "mec": "#333333", "ms": 4.5, "clip_on": False}
        (legend["single seed"],) = axis.plot(values, rows, "o", **dot)
        beside = axis.get_yaxis_transform()  # x as a share of the axes, y in rows
        axis.text(1.08, row, score_text(median, unit), transform=beside, va="center_baseline")
    chance = chance_of(groups, score)
    if chance is not None:
        legend["chance"] = axis.axvline(chance, color=GREY, ls=":", lw=1)
    axis.set_yticks(range(len(groups)), list(groups))  # the models' names
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
    """{(layer, head): (T, T)}, both counted from 1: how much row t attends to each token.

    PyTorch's fused function keeps its weights to itself. But its output is the weights times the
    values: called once more with the identity matrix as values, it returns the weights.
    """
    attend = F.scaled_dot_product_attention
    weights = []  # of each attention in the block that runs: (H, T, T)

    def watched(query, key, value, **options):
        T = key.shape[2]
        identity = torch.eye(T).to(key).expand(*key.shape[:3], T)  # (1, H, T, T)
        weights.append(attend(query, key, identity, **options)[0])
        return attend(query, key, value, **options)

    maps = {}
    x = model.embed(torch.tensor([tokens], device=device_of(model)))
    with patch.object(F, "scaled_dot_product_attention", watched):
        for layer, block in enumerate(model.blocks, 1):
            x = block(x)
            while weights:  # a block may have none
                for head, its_weights in enumerate(weights.pop(), 1):
                    maps[layer, head] = its_weights
    return maps


READABLE_LENGTH = 28  # tokens; the names of more than some 40 columns would overlap


def inside(folder, title=""):
    """Where a trained model's four sharpest heads look when it answers. The sharpest head gives, on
    average, most of its attention to one token. Raises Refused if the model has no attention.
    """
    task, model = load_model(folder)
    rng = np.random.default_rng([0, SAMPLES])  # other numbers than training's and evaluation's

    def distance(document):
        return abs(len(document.tokens) - READABLE_LENGTH)

    document = min(task.documents(rng, 100), key=distance)
    words = [task.vocabulary[token] for token in document.tokens]
    rows = []  # the tokens after which a target comes
    for start, end in document.targets:
        rows += range(max(start, 1) - 1, end - 1)  # nothing predicts the first token
    rows = rows[-12:]

    maps, sharpness = {}, {}  # of each (layer, head)
    tokens = document.tokens[:-1]  # nothing follows the last one
    for place, weights in attention_maps(model, tokens).items():
        maps[place] = weights[rows]
        sharpness[place] = maps[place].amax(dim=1).mean()
    if not maps:
        raise Refused(f"{folder}: its mixer, {model.config.mixer}, has no attention to draw")
    sharpest = sorted(maps, key=sharpness.get, reverse=True)[:4]

    figure, axes = make_grid(len(sharpest), title, per_row=2, height=0.8 + 0.2 * len(rows))
    for axis, (layer, head) in zip(axes, sharpest):
        axis.imshow(maps[layer, head].numpy(), cmap="Oranges", vmin=0, vmax=1, aspect="auto")
        on_one_token = f"{sharpness[layer, head]:.0%} on one token"
        axis.set_title(f"layer {layer}, head {head}: {on_one_token}")
        columns = words[:-1] if len(words) <= 40 else []
        axis.set_xticks(range(len(columns)), columns, fontsize=9, rotation=90)
        axis.set_yticks(range(len(rows)), [f"{words[t]} → {words[t + 1]}" for t in rows])
        axis.tick_params(axis="y", labelleft=axis.get_subplotspec().is_first_col())
    return figure


# ---- 6. The command line ---------------------------------------------------


def save(figure, path):
    """Write a figure as PNG, and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    print(path)


def draw_runs(runs, out):
    """A figure and a table for each task, preset and size."""
    by_kind = {}
    for run in runs:
        by_kind.setdefault(kind_of(run), []).append(run)
    for kind, its_runs in by_kind.items():
        groups = group(its_runs)
        draw = curves if len(groups) <= 10 else bars  # more lines would hide one another
        save(draw(groups, title=", ".join(kind)), out / f"{'_'.join(kind)}.png")
        print(f"\n{table(groups)}\n")


def make_parser():
    parser = parser_of("plot.py", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", help="run folders, or files that --save wrote")
    add("--out", type=Path, default="out", help="figures' folder (default: out)")
    add("--save", type=Path, help="also pack the runs into this file")
    add("--inside", action="store_true", help="draw where a model's sharpest heads look")
    add("--program", help="a file that registers a task, mixer and so on of your own")
    return parser


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    paths = []
    for pattern in args.runs:  # the shell of Windows leaves it to programs to expand out/*
        paths += sorted(glob(pattern)) or [pattern]
    try:
        if args.program:
            register(args.program)
        if args.inside:
            for path in paths:
                name = Path(path).resolve().name
                figure = inside(path, title=f"{name}: where its heads look")
                save(figure, args.out / f"{name}_inside.png")
            return
        runs = read_runs(paths)
        if not runs:
            raise Refused("no scores yet; did you mean out/*?")
        if args.save:
            pack(runs, args.save)
        draw_runs(runs, args.out)
    except (Refused, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    main()
