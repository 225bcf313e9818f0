"""Figures from run logs:   python plot.py out/*

One figure for each task and preset, as PNG and SVG. Above, each score against training steps: a line is a model, the mean over its
seeds, and a band from the lowest to the highest seed. Below, the last scores as bars, with a dot for each seed. Runs
that are still going show as far as they are.

    python plot.py out/* --out figures       writes figures/<task>_<preset>.png and .svg (default: into out/)
    python plot.py out/* --save runs.json    also packs the runs' configurations and scores into one small file,
    python plot.py runs.json                 from which the same figures can be drawn

Reading order: 1 reading runs; 2 telling models apart; 3 the figure.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

# ------------------------------------------------------------------------------------------------------------
# 1. Reading runs
#
# A run is its config.json with three things more: "evals", a list of {"step", "eval": {score: value}}; "tokens_per_s", the
# median; and "seconds", which it took, or None while it is going.
# ------------------------------------------------------------------------------------------------------------


def read_run(folder):
    """The run in this folder, or None if it has no scores yet."""
    try:
        run = json.loads((folder / "config.json").read_text())
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return None
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # the last may be half written
    run["evals"] = [{"step": line["step"], "eval": line["eval"]} for line in lines if "eval" in line and "final" not in line]
    run["tokens_per_s"] = int(np.median([line["tokens_per_s"] for line in lines if "tokens_per_s" in line] or 0))
    run["seconds"] = next((line["seconds"] for line in lines if "final" in line), None)
    return run if run["evals"] else None


def fail(message):
    """Bad input: one line, exit status 2."""
    print(f"plot.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_all(paths):
    """The runs in folders and packed .json files, each once; what is neither is passed over."""
    runs = []
    for path in map(Path, paths):
        found = []
        if path.is_dir():
            found = [read_run(path)]
        elif path.suffix == ".json" and path.exists():
            try:
                found = json.loads(path.read_text())["runs"]
            except (ValueError, KeyError, TypeError):
                fail(f"{path} is not a file that --save wrote")
        elif not path.exists():
            fail(f"{path} does not exist")
        runs += [run for run in found if run and run not in runs]
    return runs


# ------------------------------------------------------------------------------------------------------------
# 2. Telling models apart
# ------------------------------------------------------------------------------------------------------------

POSITIONS = {"rope": "RoPE", "rope4": "RoPE(1/4)", "nope": "NoPE", "alibi": "ALiBi", "halibi": "H-ALiBi"}
MIXERS = {"gla": "GLA", "mamba2": "Mamba2", "gdn": "GDN"}


def model_label(model):
    """As in the paper: RoPE + Canon-ABCD; GDN, GDN (no conv) and GDN + Canon-AbCD, where b is the mixer's own convolution;
    GDN/NoPE for a pattern; (no-res), (act), (cst) for Canon's variants."""
    mixers, canon, conv = model["mixer"].split(","), model["canon"], bool(model["short_conv"])
    name = "/".join(MIXERS.get(mixer, POSITIONS[model["pos"]]) for mixer in mixers)
    usual = bool({"mamba2", "gdn"} & set(mixers))
    if not canon:
        return name if conv == usual else f"{name} (conv)" if conv else f"{name} (no conv)"
    variants = [label for label, on in (("no-res", not model["canon_residual"]), ("act", model["canon_silu"]), ("cst", model["canon_frozen"]),
                                        (f"K={model['canon_kernel']}", model["canon_kernel"] != 4), ("conv", conv and "b" in canon)) if on]  # fmt: skip
    points = sorted(canon.upper() + ("b" if conv and "b" not in canon else ""), key=str.lower)
    return f"{name} + Canon-{''.join(points)}" + (f" ({', '.join(variants)})" if variants else "")


def flatten(tree, path=""):
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value})
    return flat


def models(runs):
    """{label: its runs}. The label names mixer, positions and Canon, and whatever else differs among the runs, but for the
    seed."""
    recipes = [flatten({key: run[key] for key in ("task", "model", "training")}) for run in runs]
    named = {f"model.{key}" for key in ("mixer", "pos", "short_conv")} | {key for key in recipes[0] if key.startswith("model.canon")}
    keys = set().union(*recipes) - named
    differing = sorted(key for key in keys if len({json.dumps(recipe.get(key)) for recipe in recipes}) > 1)
    groups = {}
    for run, recipe in zip(runs, recipes):
        extra = [f"{key.split('.')[-1]}={recipe.get(key)}" for key in differing]
        groups.setdefault(", ".join([model_label(run["model"]), *extra]), []).append(run)
    return dict(sorted(groups.items(), key=lambda item: (family(item[0]), "(no conv)" not in item[0], len(item[0]), item[0])))


def family(label):
    """RoPE, GLA, GDN/NoPE .."""
    return label.replace(",", "").split()[0]


def curve(runs, score):
    """steps, mean, lowest, highest over the runs that have got so far."""
    values = {}
    for run in runs:
        for point in run["evals"]:
            if score in point["eval"]:
                values.setdefault(point["step"], []).append(point["eval"][score])
    steps = sorted(values)
    return steps, *(np.array([f(values[s]) for s in steps]) for f in (np.mean, np.min, np.max))


# ------------------------------------------------------------------------------------------------------------
# 3. The figure
# ------------------------------------------------------------------------------------------------------------

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's, for all eyes
DASHES = ("-", "--", "-.", ":")


def looks(labels):
    """(colour, dash) of each label's line: colours of their own if there are enough, else one a family, darker for each next member."""
    families = list(dict.fromkeys(map(family, labels)))
    found, seen = [], {}
    for i, label in enumerate(labels):
        if len(labels) <= len(COLOURS):
            found.append((COLOURS[i], DASHES[i % len(DASHES)]))
            continue
        size, nth = sum(family(other) == family(label) for other in labels), seen.get(family(label), 0)
        seen[family(label)] = nth + 1
        strength = 1 if size == 1 else 0.4 + 0.6 * nth / (size - 1)  # the rest is white
        base = np.array(matplotlib.colors.to_rgb(COLOURS[families.index(family(label)) % len(COLOURS)]))
        found.append((tuple(1 - strength * (1 - base)), DASHES[-1 - nth % len(DASHES)] if size > 1 else "-"))
    return found


def shared(runs, part, *fields):
    """'field=value' of the fields in which all runs agree."""
    first = runs[0][part]
    return [f"{f}={first[f]}" for f in fields if f in first and all(run[part].get(f) == first[f] for run in runs)]


NUMBERS = {"KL": "nats", "bits": "bits", "bits/param": "bits a parameter"}  # the scores that are no shares, and their units


def draw(runs):
    """The figure of one task's runs."""
    groups = models(runs)
    scores = list(dict.fromkeys(score for run in runs for score in run["evals"][0]["eval"] if score != "bits"))
    # k=1, k=2, .. k=16; numbers last
    scores.sort(key=lambda score: (score in NUMBERS, *((len(score), score) if "=" in score else (0, ""))))
    styles = looks(list(groups))
    bar_height = 0.5 + 0.28 * len(groups)
    figure, axes = plt.subplots(
        2, len(scores), squeeze=False, layout="constrained",
        figsize=(2.2 + 2.7 * len(scores), 3.1 + bar_height), height_ratios=(2.6, bar_height),
    )  # fmt: skip
    for column, score in enumerate(scores):
        top, bottom = axes[:, column]
        share = score not in NUMBERS
        factor, form = (100, "{:.0f}%") if share else (1, "{:.3f}")
        for i, (label, members) in enumerate(groups.items()):
            colour, dash = styles[i]
            steps, *values = curve(members, score)
            mean, low, high = (factor * value for value in values)
            top.plot(steps, mean, dash, color=colour, lw=1.8, marker="o" if len(steps) == 1 else None)
            top.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
            last = [factor * run["evals"][-1]["eval"][score] for run in members if score in run["evals"][-1]["eval"]]
            if not last:
                continue
            bottom.barh(i, np.mean(last), color=colour, alpha=0.8, height=0.7)
            bottom.plot(last, [i] * len(last), "o", color="black", ms=3, clip_on=False)
            right_edge = dict(xy=(1, i), xycoords=bottom.get_yaxis_transform(), xytext=(7, 0), textcoords="offset points")
            bottom.annotate(form.format(np.mean(last)), va="center", fontsize=9, **right_edge)
        top.set(title=score, xlabel="training step", ylim=(-2, 102) if share else (0, None))
        top.tick_params(labelleft=column == 0 or not share)
        bottom.set(xlabel=f"last score, {NUMBERS.get(score, '%')}", xlim=(0, 100 if share else None), ylim=(len(groups) - 0.4, -0.6))
        bottom.set_yticks(range(len(groups)), [])
        for axis in (top, bottom):
            axis.grid(axis="both" if axis is top else "x", alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("score, %" if scores[0] not in NUMBERS else NUMBERS[scores[0]])
    going = {label: any(run["seconds"] is None for run in members) for label, members in groups.items()}
    axes[1, 0].set_yticks(range(len(groups)), [f"{label}\n(still training)" if going[label] else label for label in groups])
    for name, (colour, _) in zip(axes[1, 0].get_yticklabels(), styles):  # the names are the legend of both rows
        name.set(color=colour, weight="bold")
    figure.suptitle(title(runs), fontsize=12)
    return figure


def draw_capacity(runs):
    """Capo's second figure: the bits that models hold against their parameters, beside lines of 2, 1 and 0.5 bits a parameter."""
    groups = {}
    for run in runs:
        last = run["evals"][-1]["eval"]
        if last["bits"] > 0:
            groups.setdefault(model_label(run["model"]), []).append((last["bits"] / last["bits/param"], last["bits"]))
    figure, axis = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
    for (label, points), (colour, _) in zip(groups.items(), looks(list(groups))):
        axis.plot(*zip(*points), "o", color=colour, label=label)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="bits", title=title(runs))
    ends = np.array(axis.get_xlim())
    for rate in (2, 1, 0.5):
        axis.plot(ends, rate * ends, color="grey", lw=0.8, zorder=0)
        axis.annotate(f"{rate:g} bit/param", (ends[1], rate * ends[1]), (4, 0), textcoords="offset points", va="center", fontsize=8, color="grey")
    axis.set_xlim(ends)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def title(runs):
    """Task and preset, and what all runs have in common."""
    counts = sorted({len(members) for members in models(runs).values()})
    seeds = f"{counts[0]} seed{'s' if counts[-1] > 1 else ''}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]} seeds"
    facts = shared(runs, "task", "N", "K", "L", "cfg") + shared(runs, "model", "n_layer", "d_model")
    return f"{runs[0]['task']['name'].capitalize()}, {runs[0]['preset']}: {', '.join([*facts, seeds])}"


def main():
    parser = argparse.ArgumentParser(description="Draw scores against steps, and the last scores, from run folders.")
    parser.add_argument("runs", nargs="+", help="run folders, or files that --save wrote")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="pack configurations and scores into one .json file")
    args = parser.parse_args()
    runs = read_all(args.runs)
    if not runs:
        fail("no scores yet in any of these")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(run) for run in runs)  # a line a run
        args.save.write_text(f'{{"runs": [\n{rows}\n]}}\n')
    kinds = {}
    for run in runs:
        kinds.setdefault(f"{run['task']['name']}_{run['preset']}", []).append(run)
    for kind, members in sorted(kinds.items()):
        figures = {kind: draw(members)}
        if members[0]["task"]["name"] == "capo":
            figures[f"{kind}_capacity"] = draw_capacity(members)
        for name, figure in figures.items():
            for ending in ("png", "svg"):
                figure.savefig(args.out / f"{name}.{ending}", dpi=160)
            plt.close(figure)
            print(args.out / f"{name}.png")


if __name__ == "__main__":
    main()
