"""Figures from run folders:   python plot.py out/*

Draws a figure for each task and preset, and prints every seed's last scores as a Markdown table.

    python plot.py out/* --out figures       writes figures/<task>_<preset>.png
    python plot.py out/* --save runs.json    also packs configurations and scores into one file
    python plot.py runs.json                 draws the same from that file
    python plot.py --inside out/*            draws where each run's sharpest heads look

results/reproduce.py draws with the same functions.

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

matplotlib.use("Agg")  # files only, no windows
import matplotlib.pyplot as plt
import numpy as np

# ---- 1. Reading runs -------------------------------------------------------
#
# A run is its config.json and two more: `evals`, [{"step": .., "eval": {score: value}}, ..], and
# `seconds`, None while it trains.


def read_run(folder):
    """The run in this folder; FileNotFoundError if it has no log yet."""
    run = json.loads((folder / "config.json").read_text())
    text = (folder / "metrics.jsonl").read_text()
    log = [json.loads(line) for line in text.split("\n")[:-1]]  # a half-written line has no end
    evals = {line["step"]: line["eval"] for line in log if "eval" in line}
    run["evals"] = [{"step": step, "eval": scores} for step, scores in evals.items()]
    run["seconds"] = next((line["seconds"] for line in log if "final" in line), None)
    return run


def read_all(paths):
    """The runs with scores in folders and packed files. Damage is named on stderr, and ends the
    program if there is nothing else."""
    runs, damaged = [], False
    for path in map(Path, paths):
        if not path.exists():
            fail(f"{path} does not exist")
        if not (path.is_dir() or path.suffix == ".json"):
            continue  # figures
        try:
            found = [read_run(path)] if path.is_dir() else json.loads(path.read_text())["runs"]
            found = [run for run in found if run["evals"] and run not in runs]
            table(models(found))  # fails if anything is missing or no number
            runs += found
        except FileNotFoundError:
            continue  # a run that has not begun to log
        except Exception:  # whatever damage there is
            damaged = True
            tell(f"{path} is neither a folder that train.py wrote nor a file that --save wrote")
    if damaged and not runs:
        sys.exit(2)
    return runs


def tell(message):
    print(f"plot.py: {message}", file=sys.stderr)


def fail(message):
    tell(message)
    sys.exit(2)


# ---- 2. Names and numbers --------------------------------------------------

MIXERS = {"attention": "", "gla": "GLA", "mamba2": "Mamba2", "gdn": "GDN"}
POSITIONS = {"rope": "RoPE", "rope4": "RoPE(1/4)", "nope": "NoPE", "alibi": "ALiBi",
             "halibi": "H-ALiBi"}  # fmt: skip


def model_label(model):
    """As in the paper: RoPE + Canon-ABCD; GDN + Canon-AbCD, where b is the mixer's own convolution;
    (no-res), (act), (cst) for Canon's variants. Your own goes by its name in MIXERS or CANONS."""
    mixers, canon, conv = model["mixer"].split(","), model["canon"], model["short_conv"]
    positions = POSITIONS.get(model["pos"], model["pos"])
    own = "" if model["pos"] == "nope" else f"-{positions}"
    name = "/".join(positions if m == "attention" else MIXERS.get(m, m + own) for m in mixers)
    if not canon:
        usual = bool({"mamba2", "gdn"} & set(mixers))
        return name if conv == usual else f"{name} (conv)" if conv else f"{name} (no conv)"
    b, kind, kernel = conv and "b" not in canon, model.get("canon_type"), model["canon_kernel"]
    variants = {"no-res": not model["canon_residual"], "act": model["canon_silu"],
                "cst": model["canon_frozen"], f"K={kernel}": kernel != 4,
                "conv": conv and not b}  # fmt: skip
    variants = ", ".join(variant for variant, on in variants.items() if on)
    letters = "".join(sorted(canon.upper() + "b" * b, key=str.lower))
    label = f"{name} + {'Canon' if kind in ('conv', None) else kind}-{letters}"
    return f"{label} ({variants})" if variants else label


IN_LABEL = """mixer pos short_conv canon canon_type canon_kernel canon_residual canon_silu
canon_frozen vocab_size block_size""".split()  # the last two follow from the task


def models(runs):
    """{label: its runs}, in the order of `rank`. A label names the model and all else that differs
    among the runs but the seed, so that no two recipes are averaged. Of two runs with one recipe
    and seed the later counts."""
    recipes = [recipe_of(run) for run in runs]
    fields = dict.fromkeys(field for recipe in recipes for field in recipe)
    differ = [f for f in fields if len({str(recipe.get(f)) for recipe in recipes}) > 1
              and f.removeprefix("model.") not in IN_LABEL]  # fmt: skip
    groups, ranks = {}, {}
    for run, recipe in zip(runs, recipes):
        extra = [recipe.get(field) for field in differ]
        label = ", ".join([model_label(run["model"]), *map(phrase, differ, extra)])
        groups.setdefault(label, {})[run["seed"]] = run
        ranks[label] = rank(run["model"]), [x for x in extra if type(x) in (int, float)]
    found = {}
    for label in sorted(groups, key=ranks.get):
        runs = [groups[label][seed] for seed in sorted(groups[label])]
        found[label + " (still training)" * any(run["seconds"] is None for run in runs)] = runs
    return found


def recipe_of(run):
    """{'preset': 'nano', 'dtype': 'float32', 'task.N': 5, 'model.canon': 'abcd', ..}"""
    parts = ("task", "model", "training")
    settings = {f"{part}.{field}": run[part][field] for part in parts for field in run[part]}
    return {"preset": run["preset"], "dtype": run["dtype"], **settings}


def rank(model):
    """Sorts attention before mixers, RoPE before NoPE, and without Canon before with."""
    mixer, pos = model["mixer"], model["pos"]
    known = [*MIXERS, mixer].index(mixer), [*POSITIONS, pos].index(pos)
    return known[0], mixer, known[1], points(model), model_label(model)


def points(model):
    """How many convolutions a block has."""
    return min(4, len(set(model["canon"]) | set("b" * bool(model["short_conv"]))))


def phrase(field, value):
    """A setting in words: layers 2, rate 0.003, dtype bfloat16, N 5."""
    words = {"name": "task", "n_layer": "layers", "d_model": "dims", "lr": "rate"}
    field = field.split(".")[-1]
    return f"{words.get(field, field)} {value}"


# tasks.NO_SHARES (importing it would import PyTorch), and a score of reproduce.py's. A score may
# have its task before it: "capo: bits/param".
NUMBERS = ("KL", "bits", "bits/param", "hops mastered")


def is_share(score, value):
    """Whether a score counts in percent."""
    return score.split(": ")[-1] not in NUMBERS and 0 <= value <= 1


def score_text(score, value):
    if is_share(score, value):
        return percent(value)
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def percent(share):
    """Whole percent, half up: 0.125 -> 13%."""
    return f"{math.floor(round(100 * share, 6) + 0.5)}%"


def last_scores(runs, score):
    """Of the runs that have this score."""
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
    rows = [["", "seeds", *scores]]
    for label, runs in groups.items():
        cells = [each_seed(runs, score) for score in scores]
        rows.append([label, seeds_text(runs), *cells])
    return markdown(rows)


def markdown(rows):
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- 3. Figures ------------------------------------------------------------
#
# Each takes {label: runs}, the scores to show, and a title that says what was found. A thick line
# or a bar is the median over seeds, a thin line or a dot one seed. Grey is attention without Canon;
# each mixer has a hue, paler the fewer convolutions a block has. Solid is RoPE, dashed NoPE.

GREY, FAINT = "#808080", "#555555"
HUES = {"attention": "#d9480f", "gla": "#2b8a3e", "mamba2": "#1864ab", "gdn": "#862e9c"}
OTHER = "#0b7285"  # hybrids, and mixers of your own
DASHES = {"rope4": "-.", "nope": "--", "alibi": (0, (2.5, 1, 1, 1)), "halibi": ":"}


def looks(groups, shade=1):
    """{label: (colour, dashes)}; models that would look alike get a shade darker each."""
    found, seen = {}, []
    for label, runs in groups.items():
        model = runs[0]["model"]
        mixer, n = model["mixer"], points(model)
        hue, strength = HUES.get(mixer, OTHER), 0.4 + 0.15 * n
        if mixer == "attention" and n == 0:
            hue, strength = GREY, 1
        colour = 1 - strength * (1 - np.array(matplotlib.colors.to_rgb(hue)))  # the rest is white
        look = tuple(colour), DASHES.get(model["pos"], "-") if "attention" in mixer else "-"
        found[label] = tuple(colour * shade ** seen.count(look)), look[1]
        seen.append(look)
    return found


def spread(heights, gap):
    """The nearest heights that are a gap apart."""
    order, places = np.argsort(heights, kind="stable"), np.sort(heights)
    for _ in range(300):
        for i in range(len(places) - 1):
            lack = max(0, gap - (places[i + 1] - places[i]))
            places[i : i + 2] += -lack / 2, lack / 2
    return places[np.argsort(order)]


def name_ends(axis, ends):
    """Name lines at the right: ends = [(x, y, name, colour)]. Names that would overlap are pushed
    apart, and a thin line leads to each."""
    low, high = axis.get_ylim()
    places = spread([(y - low) / (high - low) for _, y, *_ in ends], gap=0.075)
    for (x, y, name, colour), place in zip(ends, places):
        axis.annotate(
            name, (x, y), (1.04, place), textcoords="axes fraction", color=colour, va="center",
            zorder=9, annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=colour, lw=0.7, relpos=(0, 0.5)),
        )  # fmt: skip


WIDTH = 9  # inches: shown 900 pixels wide, a font of size 10 is 14 pixels high
plt.rc("axes", titlesize=11, titlelocation="left", titlepad=13)
plt.rc("axes.spines", top=False, right=False)
plt.rc("text", parse_math=False)  # a "$" in a name is a dollar


def curves(groups, scores=None, title=None):
    """Scores against training steps, a panel a score."""
    figure, panels = make_panels(groups, scores, 3, 3, title)
    styles = looks(groups, shade=0.72)
    for axis, score, factor, chance in panels:
        ends = []
        for label, runs in groups.items():
            (colour, dashes), front = styles[label], 2 + points(runs[0]["model"])
            for run in runs:
                steps, values = curve([run], score)
                axis.plot(steps, factor * values, color=colour, lw=0.8, alpha=0.45)
            steps, values = curve(runs, score)
            if steps:
                axis.plot(steps, factor * values, color=colour, ls=dashes, lw=2.4, zorder=front,
                          marker="o" * (len(steps) == 1))  # fmt: skip
                ends.append((steps[-1], factor * values[-1], label, colour))
        last = max((x for x, *_ in ends), default=1)
        if chance:
            axis.axhline(factor * chance, color=FAINT, ls=":", lw=1)
            ends.append((last, factor * chance, "chance", FAINT))
        axis.set(xlim=(0, last), ylim=(-2, 102) if factor == 100 else (0, None))
        axis.set_xlabel("training steps")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))  # 10k
        if axis.get_subplotspec().is_last_col() or axis is panels[-1][0]:  # serves the whole row
            name_ends(axis, ends)
    return figure


def bars(groups, scores=None, title=None):
    """The last scores, a panel a score."""
    figure, panels = make_panels(groups, scores, 4, 0.8 + 0.29 * len(groups), title)
    styles = looks(groups)
    for axis, score, factor, chance in panels:
        beside, above = axis.get_yaxis_transform(), axis.get_xaxis_transform()
        for place, (label, runs) in enumerate(groups.items()):
            values = last_scores(runs, score)
            if values:
                middle, dots = np.median(values), factor * np.array(values)
                axis.barh(place, factor * middle, color=styles[label][0], height=0.72)
                axis.plot(dots, [place] * len(dots), "wo", mec="#333333", ms=3.5, clip_on=False)
                axis.text(1.03, place, score_text(score, middle), transform=beside, va="center")
        if chance:
            axis.axvline(factor * chance, color=FAINT, ls=":", lw=1)
            axis.text(factor * chance, 1.01, "chance", transform=above, fontsize=8, color=FAINT)
        axis.set(xlim=(0, 100 if factor == 100 else None), ylim=(len(groups) - 0.4, -0.6))
        axis.set_yticks(range(len(groups)), groups)
        axis.tick_params(axis="y", length=0, labelleft=axis.get_subplotspec().is_first_col())
    return figure


def make_panels(groups, scores, most, height, title):
    """A figure and [(axis, score, factor, chance)], at most so many panels in a row."""
    scores, runs = scores or score_names(groups), [run for g in groups.values() for run in g]
    rows = math.ceil(len(scores) / most)
    columns = math.ceil(len(scores) / rows)
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained",
                                figsize=(WIDTH, 0.9 + height * rows))  # fmt: skip
    title = textwrap.fill(title or runs[0]["task"]["name"].capitalize(), 80)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
    figure.supxlabel(settings(runs), x=0.01, ha="left", fontsize=8, color=FAINT)
    for axis in axes.flat[len(scores) :]:
        axis.remove()
    panels = [(axis, score, *scale(groups, score)) for axis, score in zip(axes.flat, scores)]
    for axis, score, factor, _ in panels:
        axis.set_title(heading(score) + ", %" * (factor == 100))
    return figure, panels


def settings(runs):
    """What all have in common: 'task depo1, preset nano, N 5, K 2, seed 0'"""
    facts = ("task.name", "preset", "task.N", "task.K", "task.L", "model.n_layer", "model.d_model")
    first, *others = map(recipe_of, runs)
    seeds = len({run["seed"] for run in runs})
    shown = f"medians of up to {seeds} seeds" if seeds > 1 else f"seed {runs[0]['seed']}"
    same = [f for f in facts if f in first and all(other.get(f) == first[f] for other in others)]
    return ", ".join([*(phrase(f, first[f]) for f in same), shown])


def heading(score):
    """'k=4' -> '4 hops'"""
    kind, _, number = score.partition("=")
    unit = {"k": "hop", "l": "operation", "depth": "level"}.get(kind)
    return f"{number} {unit}{'s' * (number != '1')}" if number and unit else score


def scale(groups, score):
    """(factor, chance): shares are in percent; chance is 0 unless all runs agree."""
    runs = [run for g in groups.values() for run in g if last_scores([run], score)]
    if not all(is_share(score, value) for value in last_scores(runs, score)):
        return 1, 0
    guesses = {guess(run["task"]) for run in runs}
    return 100, guesses.pop() if len(guesses) == 1 else 0


def guess(task):
    """What guessing scores, where that is worth a line."""
    if task["name"].startswith("depo"):
        return 1 / max(1, task.get("N", 0) - 1)  # another node of the cycle
    return 1 / 23 if task["name"] == "mano" else 0


def curve(runs, score):
    """steps, values: the median of the runs, as far as all have come."""
    lines = [{e["step"]: e["eval"][score] for e in run["evals"] if score in e["eval"]}
             for run in runs if last_scores([run], score)]  # fmt: skip
    steps = sorted(set.intersection(*map(set, lines))) if lines else []
    return steps, np.array([np.median([line[step] for line in lines]) for step in steps])


# ---- 4. Inside a model -----------------------------------------------------


def inside(folder):
    """Where the six sharpest heads look from the tokens before a document's last targets; and
    Canon's weights, the mean of |w_i| over channels, for each layer, point and distance i."""
    import torch  # seconds that other figures need not wait for
    import torch.nn.functional as F

    from canon_gpt import Canon, CanonGPT, Config
    from tasks import make_task

    try:
        run = json.loads((folder / "config.json").read_text())
        task = make_task(preset=run["preset"], **run["task"])
        model = CanonGPT(Config(**run["model"]))
        model.load_state_dict(torch.load(folder / "ckpt.pt", "cpu")["model"])
    except Exception as error:  # whatever damage there is
        fail(f"--inside: {folder} has no sound checkpoint: {' '.join(f'{error}'.split())}")
    if not model.config.has_attention:
        fail(f"--inside: {folder} has no attention")
    documents = task.documents(np.random.default_rng(0), 100)
    tokens, mask = min(documents, key=lambda document: abs(len(document[0]) - 36))
    maps, attend = [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):  # its weights are what it makes of one-hot values
        one_hot = torch.eye(k.shape[2]).expand(*k.shape[:3], -1)
        weights = attend(q, k, one_hot, **options)
        maps.append(weights[0])  # (H, T, T)
        return weights @ v

    with torch.no_grad(), patch.object(F, "scaled_dot_product_attention", watched):
        model(torch.tensor([tokens[:-1]]))
    words = [task.vocabulary[token] for token in tokens]
    before_targets = [t for t in range(2, len(words) - 1) if mask[t + 1]][-12:]
    names = [f"{' '.join(words[t - 2 : t + 1])} \u2192 {words[t + 1]}" for t in before_targets]
    canons = [m.weight.detach().abs().mean(1) for m in model.modules() if isinstance(m, Canon)]

    heads, n_head = torch.cat(maps)[:, before_targets], model.config.n_head
    layers = [n for n, block in enumerate(model.blocks, 1) if block.mixer.attends]
    sharpness = heads.amax(2).mean(1)  # a head's largest weight, the mean over rows
    sharpest = sorted(sharpness.argsort(descending=True)[:6].tolist())
    rows = math.ceil(len(sharpest) / 2)
    heights = rows * (0.4 + 0.13 * len(names)), 1.6
    figure = plt.figure(figsize=(WIDTH, 1 + sum(heights)), layout="constrained")
    title = f"{folder.name}: where the sharpest {len(sharpest)} of {len(heads)} heads look"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
    top, bottom = figure.subfigures(2, 1, height_ratios=heights)
    axes = top.subplots(rows, min(2, len(sharpest)), sharex=True, sharey=True, squeeze=False)
    for axis, n in zip(axes.flat, sharpest):
        title = f"layer {layers[n // n_head]}, head {n % n_head + 1}"
        heat(axis, heads[n], title, names, words[:-1])
    if canons:
        weights, letters = torch.stack(canons, dim=1), model.config.canon.upper()
        places = [f"{n}{letter}" for n, _ in enumerate(model.blocks, 1) for letter in letters]
        distances = [f"w_{i}" for i in range(len(weights))]
        heat(bottom.subplots(), weights, "Canon: mean |w_i|, layer and point", distances, places)
    return figure


def heat(axis, values, title, down, across):
    axis.imshow(values.numpy(), cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    axis.set_title(title, fontsize=8, pad=3)
    axis.set_yticks(range(len(down)), down, fontsize=7)
    across = across if len(across) <= 80 else []  # more would overlap
    axis.set_xticks(range(len(across)), across, fontsize=7, rotation=90)


# ---- 5. The command line ---------------------------------------------------


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{path}.png", dpi=160)
    plt.close(figure)
    print(f"{path}.png")


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=plain)
    parser.error = fail
    add = parser.add_argument
    add("runs", nargs="+", help="run folders, or files that --save wrote")
    add("--out", type=Path, default="out", help="the figures' folder (default: out)")
    add("--inside", action="store_true", help="draw each folder's attention and Canon weights")
    add("--save", type=Path, help="pack all runs into this .json file")
    args = parser.parse_args(argv)
    try:
        if args.inside:
            for path in map(Path, args.runs):
                if path.is_dir() or not path.exists():  # the rest of out/* are figures
                    save(inside(path), args.out / f"{path.name}_inside")
            return
        runs = read_all(args.runs)
        if not runs:
            fail("no scores yet in any of these")
        if args.save:
            rows = ",\n".join(map(json.dumps, runs))  # a line a run
            args.save.write_text(f'{{"runs": [\n{rows}\n]}}\n')
        kinds = {}
        for run in runs:
            kinds.setdefault(f"{run['task']['name']}_{run['preset']}", []).append(run)
        for kind in kinds:
            groups = models(kinds[kind])
            draw = curves if len(groups) <= 12 else bars  # nobody tells more lines apart
            save(draw(groups), args.out / kind)
            print(f"\n{table(groups)}\n")
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main()
