"""Figures from run folders:   python plot.py out/*

Draws a figure for each task and preset, and prints every seed's last scores as a Markdown table.

    python plot.py out/* --out figures       writes figures/<task>_<preset>.png
    python plot.py out/* --save runs.json    also packs the runs into one file
    python plot.py --inside out/RUN          draws where the sharpest heads look

Reading order: 1 reading runs; 2 names and numbers; 3 figures; 4 inside a model; 5 the command line.
"""

import argparse
import json
import math
import sys
import textwrap
from pathlib import Path
from unittest.mock import patch

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from canon_gpt import Canon, CanonGPT, Config
from tasks import is_share, make_task, score_text

# ---- 1. Reading runs -------------------------------------------------------
#
# A run is its config.json and two more: `evals`, [{"step": .., "eval": {score: value}}, ..], and
# `seconds`, None while it trains.


def read_run(folder):
    """The run in this folder; FileNotFoundError if it has no log yet."""
    run = json.loads((folder / "config.json").read_text())
    text = (folder / "metrics.jsonl").read_text()
    log = [json.loads(line) for line in text.split("\n")[:-1]]  # whole lines
    evals = {line["step"]: line["eval"] for line in log if "eval" in line}
    run["evals"] = [{"step": step, "eval": scores} for step, scores in evals.items()]
    run["seconds"] = next((line["seconds"] for line in log if "final" in line), None)
    return run


def read_all(paths):
    """The runs with scores in folders and packed files; damaged ones are named on stderr."""
    runs, damaged = [], False
    for path in map(Path, paths):
        if not path.exists():
            fail(f"{path} does not exist")
        if path.suffix in (".png", ".md"):
            continue  # figures, claims
        try:
            found = [read_run(path)] if path.is_dir() else json.loads(path.read_text())["runs"]
            found = [run for run in found if run["evals"] and run not in runs]
            table(models(found))  # these fail if anything is missing or no number
            [(guess(r["task"]), curve([r], s)) for r in found for s in score_names({0: [r]})]
            runs += found
        except FileNotFoundError:
            continue  # not begun
        except Exception:  # any damage
            damaged = True
            print(f"plot.py: {path} is no run, or damaged", file=sys.stderr)
    if damaged and not runs:
        sys.exit(2)
    return runs


def fail(message):
    print(f"plot.py: {message}", file=sys.stderr)
    sys.exit(2)


# ---- 2. Names and numbers --------------------------------------------------

MIXERS = {"attention": "", "gla": "GLA", "mamba2": "Mamba2", "gdn": "GDN"}
POSITIONS = {"rope": "RoPE", "rope4": "RoPE(1/4)", "nope": "NoPE", "alibi": "ALiBi",
             "halibi": "H-ALiBi"}  # fmt: skip


def model_label(model):
    """As in the paper: RoPE + Canon-ABCD (no-res); GDN + Canon-AbCD, where b is the mixer's own
    convolution; without Canon it is GDN (conv)."""
    canon, conv, kernel = model["canon"], model["short_conv"], model["canon_kernel"]
    positions = POSITIONS.get(model["pos"], model["pos"])
    own = "" if model["pos"] == "nope" else f"-{positions}"
    label = "/".join(positions if mixer == "attention" else MIXERS.get(mixer, mixer + own)
                     for mixer in model["mixer"].split(","))  # fmt: skip
    if canon:
        letters = canon.upper() + "b" * (conv and "b" not in canon)
        kind = {"conv": "Canon"}.get(model["canon_type"], model["canon_type"])
        label += f" + {kind}-{''.join(sorted(letters, key=str.lower))}"
    variants = {"no-res": not model["canon_residual"], "act": model["canon_silu"],
                "cst": model["canon_frozen"], f"kernel {kernel}": kernel != 4,
                "conv": conv and (not canon or "b" in canon)}  # fmt: skip
    variants = ", ".join(variant for variant, on in variants.items() if on)
    return f"{label} ({variants})" if variants else label


IN_LABEL = """mixer pos short_conv canon canon_type canon_kernel canon_residual canon_silu
canon_frozen vocab_size block_size""".split()  # the last two follow from the task


def models(runs):
    """{label: its runs, by seed}. A label names the model, and all else that differs among the runs
    but the seed. Of two runs with one recipe and seed the later counts."""
    recipes = [flat_recipe(run) for run in runs]
    fields = dict.fromkeys(field for recipe in recipes for field in recipe)
    differ = [f for f in fields if len({str(recipe.get(f)) for recipe in recipes}) > 1
              and f.removeprefix("model.") not in IN_LABEL]  # fmt: skip
    groups = {}
    for run, recipe in sorted(zip(runs, recipes), key=lambda pair: rank(*pair, differ)):
        extra = [phrase(field, recipe.get(field)) for field in differ]
        label = ", ".join([model_label(run["model"]), *extra])
        groups.setdefault(label, {})[run["seed"]] = run
    return {label + " (still training)" * any(run["seconds"] is None for run in group.values()):
            list(group.values()) for label, group in groups.items()}  # fmt: skip


def flat_recipe(run):
    """{'preset': 'nano', 'dtype': 'float32', 'task.N': 5, 'model.canon': 'abcd', ..}"""
    parts = ("task", "model", "training")
    settings = {f"{part}.{field}": run[part][field] for part in parts for field in run[part]}
    return {"preset": run["preset"], "dtype": run["dtype"], **settings}


def rank(run, recipe, fields):
    """Attention first, RoPE before NoPE, without Canon before with, 2 layers before 12."""
    model, mixer, pos = run["model"], run["model"]["mixer"], run["model"]["pos"]
    known = [*MIXERS, mixer].index(mixer), [*POSITIONS, pos].index(pos)
    sizes = [recipe[f] for f in fields if type(recipe.get(f)) in (int, float)]
    return known[0], mixer, known[1], points(model), model_label(model), sizes, run["seed"]


def points(model):
    """How many points have convolutions."""
    return len(set(model["canon"]) | set("b" * model["short_conv"]))


def phrase(field, value):
    """layers 2, rate 0.003, dtype bfloat16"""
    words = {"name": "task", "n_layer": "layers", "d_model": "dims", "lr": "rate"}
    field = field.split(".")[-1]
    return f"{words.get(field, field)} {value}"


def last_scores(runs, score):
    ends = [run["evals"][-1]["eval"] for run in runs]
    return [end[score] for end in ends if score in end]


def score_names(groups):
    """All but Capo's bits, which bits/param shows."""
    ends = [run["evals"][-1]["eval"] for runs in groups.values() for run in runs]
    return list(dict.fromkeys(score for end in ends for score in end if score != "bits"))


def seeds_text(runs):
    return ", ".join(map(str, sorted({run["seed"] for run in runs})))


def each_seed(runs, score):
    return ", ".join(score_text(score, value) for value in last_scores(runs, score))


def table(groups, scores=None):
    """Every seed's last scores, as Markdown."""
    scores = scores or score_names(groups)
    rows = [[label, seeds_text(runs), *(each_seed(runs, score) for score in scores)]
            for label, runs in groups.items()]  # fmt: skip
    return markdown([["", "seeds", *scores], *rows])


def markdown(rows):
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- 3. Figures ------------------------------------------------------------
#
# Each takes {label: runs}, the scores to show, and a title that says what was found. A thick line
# or a bar is the median over seeds, a thin line or a dot one seed. Grey is attention without
# Canon; each mixer has a hue, paler the fewer convolutions a block has. Solid is RoPE, dashed NoPE.

GREY, FAINT = "#808080", "#555555"
HUES = {"attention": "#d9480f", "gla": "#2b8a3e", "mamba2": "#1864ab", "gdn": "#862e9c"}
DASHES = {"rope4": "-.", "nope": "--", "alibi": (0, (2.5, 1, 1, 1)), "halibi": ":"}


def style(groups, shade=1):
    """{label: (colour, dashes)}; models that would look alike get a shade darker each."""
    found, seen = {}, []
    for label, runs in groups.items():
        model = runs[0]["model"]
        mixer, n = model["mixer"], points(model)
        hue, strength = HUES.get(mixer, "#0b7285"), 0.4 + 0.15 * n
        if mixer == "attention" and n == 0:
            hue, strength = GREY, 1
        colour = 1 - strength * (1 - np.array(matplotlib.colors.to_rgb(hue)))  # the rest is white
        look = tuple(colour), DASHES.get(model["pos"], "-") if "attention" in mixer else "-"
        found[label] = tuple(colour * shade ** seen.count(look)), look[1]
        seen.append(look)
    return found


def name_ends(axis, ends):
    """Name lines at the right: ends = [(y, x, name, colour)]. A name that would lie on the one
    above is pushed down, and a thin line leads to each."""
    (low, high), place = axis.get_ylim(), 2
    for below, (y, x, name, colour) in [*enumerate(sorted(ends))][::-1]:
        place = max(min((y - low) / (high - low), place - 0.075), 0.075 * below)
        axis.annotate(
            name, (x, y), (1.04, place), textcoords="axes fraction", color=colour, va="center",
            zorder=9, annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=colour, lw=0.7, relpos=(0, 0.5)),
        )  # fmt: skip


plt.rc("axes", titlesize=11, titlelocation="left", titlepad=13)
plt.rc("axes.spines", top=False, right=False)
plt.rc("text", parse_math=False)


def curves(groups, scores=None, title=None):
    """Scores against training steps, a panel a score."""
    figure, panels = make_panels(groups, scores, 3, 3, title)
    styles = style(groups, shade=0.72)
    last = max(run["evals"][-1]["step"] for runs in groups.values() for run in runs)
    for axis, score, factor, chance in panels:
        ends = []
        for label, runs in groups.items():
            (colour, dashes), front = styles[label], 2 + points(runs[0]["model"])
            for run in runs:
                steps, values = curve([run], score)
                axis.plot(steps, factor * values, color=colour, ls=dashes, lw=0.8, alpha=0.45)
            steps, values = curve(runs, score)
            if steps:
                axis.plot(steps, factor * values, color=colour, ls=dashes, lw=2.4, zorder=front,
                          marker="o" * (len(steps) == 1))  # fmt: skip
                ends.append((factor * values[-1], steps[-1], label, colour))
        if chance:
            axis.axhline(factor * chance, color=FAINT, ls=":", lw=1)
            ends.append((factor * chance, last, "chance", FAINT))
        axis.set(xlim=(0, last), ylim=(-2, 102) if factor == 100 else (0, None))
        axis.set_xlabel("training steps")
        if axis.get_subplotspec().is_last_col() or axis is panels[-1][0]:
            name_ends(axis, ends)
    return figure


def bars(groups, scores=None, title=None):
    """The last scores, a panel a score."""
    figure, panels = make_panels(groups, scores, 4, 0.8 + 0.29 * len(groups), title)
    styles = style(groups)
    for axis, score, factor, chance in panels:
        beside, above = axis.get_yaxis_transform(), axis.get_xaxis_transform()
        for place, (label, runs) in enumerate(groups.items()):
            values = last_scores(runs, score)
            if values:
                middle, dots = np.median(values), factor * np.array(values)
                axis.barh(place, factor * middle, color=styles[label][0], height=0.72)
                axis.plot(dots, [place] * len(dots), "wo", mec="#333333", ms=3.5, clip_on=False)
                axis.text(1.06, place, score_text(score, middle), transform=beside, va="center")
        if chance:
            axis.axvline(factor * chance, color=FAINT, ls=":", lw=1)
            axis.text(factor * chance, 1.01, "chance", transform=above, fontsize=8, color=FAINT)
        axis.set(xlim=(0, 100 if factor == 100 else None), ylim=(len(groups) - 0.4, -0.6))
        axis.set_yticks(range(len(groups)), groups)
        axis.tick_params(axis="y", length=0, labelleft=axis.get_subplotspec().is_first_col())
    return figure


def make_grid(count, most, height, title):
    """A figure and its axes, at most so many in a row."""
    rows = math.ceil(count / most)
    figure, axes = plt.subplots(rows, math.ceil(count / rows), squeeze=False, layout="constrained",
                                figsize=(9, 0.9 + height * rows))  # fmt: skip
    figure.suptitle(textwrap.fill(title, 80), x=0.01, ha="left", fontsize=13, weight="bold")
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, axes.flat[:count]


def make_panels(groups, scores, most, height, title):
    """A figure and [(axis, score, factor, chance)]."""
    scores, runs = scores or score_names(groups), [run for g in groups.values() for run in g]
    figure, axes = make_grid(len(scores), most, height, title or runs[0]["task"]["name"])
    figure.supxlabel(settings(runs), x=0.01, ha="left", fontsize=8, color=FAINT)
    panels = [(axis, score, *scale(groups, score)) for axis, score in zip(axes, scores)]
    for axis, score, factor, _ in panels:
        axis.set_title(heading(score) + ", %" * (factor == 100))
    return figure, panels


def settings(runs):
    """What all have in common: 'task depo1, N 5, seeds 0, 1 at most; medians'"""
    same, recipes = [], [flat_recipe(run) for run in runs]
    for fact in "task.name preset task.N task.K model.n_layer model.d_model".split():
        values = {recipe.get(fact) for recipe in recipes}
        if len(values) == 1 and values != {None}:
            same.append(phrase(fact, *values))
    return ", ".join([*same, f"seeds {seeds_text(runs)} at most; medians"])


def heading(score):
    """'k=4' -> '4 hops'"""
    kind, _, number = score.partition("=")
    unit = {"k": "hop", "l": "operation", "depth": "level"}.get(kind)
    return f"{number} {unit}{'s' * (number != '1')}" if unit and number else score


def scale(groups, score):
    """(factor, chance): shares are in percent; chance is 0 unless all runs agree."""
    runs = [run for g in groups.values() for run in g if last_scores([run], score)]
    if not all(is_share(score, value) for value in last_scores(runs, score)):
        return 1, 0
    guesses = {guess(run["task"]) for run in runs}
    return 100, guesses.pop() if len(guesses) == 1 else 0


def guess(task):
    """What guessing scores, where that is worth a line."""
    if task["name"] in ("depo0", "depo1", "depo2"):
        return 1 / (task["N"] - 1)  # another node of the cycle
    return 0.06 if task["name"] == "mano" else 0  # 0 is the likeliest


def curve(runs, score):
    """steps, values: the median of the runs, as far as all have come."""
    lines = [{e["step"]: e["eval"][score] for e in run["evals"] if score in e["eval"]}
             for run in runs if last_scores([run], score)]  # fmt: skip
    steps = sorted(set.intersection(*map(set, lines))) if lines else []
    return steps, np.array([np.median([line[step] for line in lines]) for step in steps])


# ---- 4. Inside a model -----------------------------------------------------


def load(folder):
    """The task and the model of this run."""
    run = json.loads((folder / "config.json").read_text())
    model = CanonGPT(Config(**run["model"]))
    model.load_state_dict(torch.load(folder / "ckpt.pt", "cpu")["model"])
    return make_task(preset=run["preset"], **run["task"]), model


def watch(model, tokens):
    """What all heads of a model look at: (heads, T, T), from row to column."""
    maps, attend = [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):  # its weights are what it makes of one-hot values
        one_hot = torch.eye(k.shape[2]).expand(*k.shape[:3], -1)
        weights = attend(q, k, one_hot, **options)
        maps.append(weights[0])  # (H, T, T)
        return weights @ v

    with torch.no_grad(), patch.object(F, "scaled_dot_product_attention", watched):
        model(torch.tensor([tokens]))
    return torch.cat(maps)


def inside(folder):
    """Where the five heads with the largest weights look from the tokens before a document's last
    targets; and Canon's weights, the mean of |w_i| over channels."""
    task, model = load(folder)
    layers = [n for n, block in enumerate(model.blocks, 1) if block.mixer.attends]
    documents = task.documents(np.random.default_rng(0), 100)
    tokens, mask = min(documents, key=lambda document: abs(len(document[0]) - 28))
    words = [task.vocabulary[token] for token in tokens]
    before_targets = [t for t in range(2, len(words) - 1) if mask[t + 1]][-12:]
    names = [f"{' '.join(words[t - 2 : t + 1])} \u2192 {words[t + 1]}" for t in before_targets]
    heads, n_head = watch(model, tokens[:-1])[:, before_targets], model.config.n_head
    sharpest = sorted(heads.amax(2).mean(1).argsort(descending=True)[:5].tolist())
    panels = [(f"layer {layers[n // n_head]}, head {n % n_head + 1}", heads[n], names, words[:-1])
              for n in sharpest]  # fmt: skip
    canons = [m.weight.detach().abs().mean(1) for m in model.modules() if isinstance(m, Canon)]
    if canons:
        sizes, letters = torch.stack(canons, dim=1), model.config.canon.upper()
        places = [f"{n}{letter}" for n, _ in enumerate(model.blocks, 1) for letter in letters]
        down = [f"w_{i}" for i in range(len(sizes))]
        panels.append(("Canon: mean |w_i|; dark: 1", sizes, down, places))
    title = f"{folder.name}: where its heads look (dark: all attention)"
    figure, axes = make_grid(len(panels), 2, 0.7 + 0.13 * len(names), title)
    for axis, (title, values, down, across) in zip(axes, panels):
        axis.imshow(values.numpy(), cmap="Oranges", vmin=0, vmax=1, aspect="auto")
        axis.set_title(title, fontsize=8, pad=3)
        axis.set_yticks(range(len(down)), down, fontsize=7)
        across = across if len(across) < 40 else []  # more would overlap
        axis.set_xticks(range(len(across)), across, fontsize=7, rotation=90)
    return figure


# ---- 5. The command line ---------------------------------------------------


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{path}.png", dpi=160)
    plt.close(figure)
    print(f"{path}.png")


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.error = fail
    add = parser.add_argument
    add("runs", nargs="+", help="run folders, or files that --save wrote")
    add("--out", type=Path, default="out", help="figures' folder (default: out)")
    add("--inside", action="store_true", help="draw attention and Canon weights")
    add("--save", type=Path, help="pack runs into a file")
    args = parser.parse_args(argv)
    try:
        if args.inside:
            for path in map(Path, args.runs):
                try:
                    figure = inside(path)
                except Exception as error:
                    fail(f"{path} has no sound checkpoint or attention: {error!r:.200}")
                save(figure, args.out / f"{path.name}_inside")
            return
        runs = read_all(args.runs)
        if not runs:
            fail("no scores yet (or is out/* meant?)")
        if args.save:
            rows = ",\n".join(map(json.dumps, runs))
            args.save.write_text(f'{{"runs": [\n{rows}\n]}}\n')
        kinds = {}
        for run in runs:
            kinds.setdefault(f"{run['task']['name']}_{run['preset']}", []).append(run)
        for kind in kinds:
            groups = models(kinds[kind])
            draw = curves if len(groups) <= 12 else bars
            save(draw(groups), args.out / Path(kind).name)
            print(f"\n{table(groups)}\n")
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main()
