"""Figures from run logs:   python plot.py out/*

One figure for each task and preset, as PNG and SVG. Above, each score against training steps: a line is a model, the mean over its
seeds, and a band from the lowest to the highest seed. Below, the last scores as bars, with a dot for each seed. Runs
that are still going show as far as they are. The last scores are printed, too, as a table in Markdown.

    python plot.py out/* --out figures       writes figures/<task>_<preset>.png and .svg (default: into out/)
    python plot.py out/* --save runs.json    also packs the runs' configurations and scores into one small file,
    python plot.py runs.json                 from which the same figures can be drawn
    python plot.py --sweep nope              draws the sweep's runs in out/ as <sweep>_<task>_<preset>, or, if runs are given,
                                             those among them: --sweep nope --preset nano results/*/runs.json draws ours
    python plot.py --claims                  the paper's claims, what was measured, and whether that is the same

Reading order: 1 reading runs; 2 telling models apart, and their scores; 3 the figure; 4 the claims.
"""

import argparse
import json
import operator
import sys
import textwrap
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

NEEDED = {"run", "task", "model", "training", "seed", "preset", "device", "dtype", "evals", "seconds"}


def read_run(folder):
    """The run in this folder. Raises FileNotFoundError, ValueError, KeyError or TypeError if there is none."""
    run = json.loads((folder / "config.json").read_text())
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # the last may be half written
    run["evals"] = [{"step": line["step"], "eval": line["eval"]} for line in lines if "eval" in line and "final" not in line]
    run["tokens_per_s"] = int(np.median([line["tokens_per_s"] for line in lines if "tokens_per_s" in line] or 0))
    run["seconds"] = next((line["seconds"] for line in lines if "final" in line), None)
    return run


def fail(message):
    """Bad input: one line, exit status 2."""
    print(f"plot.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_all(paths):
    """The runs in folders and packed .json files, each once, if they have scores; what is neither is passed over."""
    runs = []
    for path in map(Path, paths):
        if not path.exists():
            fail(f"{path} does not exist")
        if not (path.is_dir() or path.suffix == ".json"):
            continue
        try:
            found = [read_run(path)] if path.is_dir() else json.loads(path.read_text())["runs"]
            if not all(NEEDED <= run.keys() for run in found):
                raise KeyError
        except FileNotFoundError:  # an empty folder, or one whose run has not begun to log
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            fail(f"{path} is neither a folder that train.py wrote nor a file that --save wrote")
        runs += [run for run in found if run["evals"] and run not in runs]
    return runs


# ------------------------------------------------------------------------------------------------------------
# 2. Telling models apart, and their scores over seeds
# ------------------------------------------------------------------------------------------------------------

POSITIONS = {"rope": "RoPE", "rope4": "RoPE(1/4)", "nope": "NoPE", "alibi": "ALiBi", "halibi": "H-ALiBi"}
MIXERS = {"gla": "GLA", "mamba2": "Mamba2", "gdn": "GDN"}


def model_label(model):
    """As in the paper: RoPE + Canon-ABCD; GDN, GDN (no conv) and GDN + Canon-AbCD, where b is the mixer's own convolution;
    GDN/NoPE for a pattern; (no-res), (act), (cst) for Canon's variants. A mixer of your own goes by its name, and by its positions if
    it has any."""
    mixers, canon, conv = model["mixer"].split(","), model["canon"], model["short_conv"]
    positions = POSITIONS[model["pos"]]
    own = "" if model["pos"] == "nope" else f"-{positions}"
    name = "/".join(positions if mixer == "attention" else MIXERS.get(mixer, mixer + own) for mixer in mixers)
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


def models(runs, but=()):
    """{label: its runs}. The label names mixer, positions and Canon, and whatever else differs among the runs, but for the
    seed and these fields."""
    recipes = [flatten({key: run[key] for key in ("task", "model", "training", "dtype")}) for run in runs]
    canon = ("canon", "canon_kernel", "canon_residual", "canon_silu", "canon_frozen")
    named = {f"model.{key}" for key in ("mixer", "pos", "short_conv", *canon)}
    from_task = {"model.vocab_size", "model.block_size"}
    keys = set().union(*recipes) - named - from_task
    differing = sorted(key for key in keys - set(but) if len({json.dumps(recipe.get(key)) for recipe in recipes}) > 1)
    groups = {}
    for run, recipe in zip(runs, recipes):
        extra = [f"{key.split('.')[-1]}={recipe.get(key)}" for key in differing]
        groups.setdefault(", ".join([model_label(run["model"]), *extra]), []).append(run)
    return dict(sorted(groups.items(), key=lambda item: (family(item[0]), "(no conv)" not in item[0], len(item[0]), item[0])))


def count_seeds(runs):
    return len({run["seed"] for run in runs})


def family(label):
    """RoPE, GLA, GDN/NoPE .."""
    return label.replace(",", "").split()[0]


NUMBERS = {"KL": "nats", "bits/param": "bits a parameter"}  # the scores that are no shares, and their units


def score_names(runs):
    """Of a task: sequences, tokens; k=1, k=2, .. k=16; numbers last."""
    scores = list(dict.fromkeys(score for run in runs for score in run["evals"][0]["eval"] if score != "bits"))
    return sorted(scores, key=lambda score: (score in NUMBERS, *((len(score), score) if "=" in score else (0, ""))))


class Over:
    """One score of one model, over seeds."""

    def __init__(self, values):
        self.mean, self.low, self.high = float(np.mean(values)), min(values), max(values)
        self.spread, self.seeds = self.high - self.low, len(values)

    def written(self, score):
        mean, low, high = (f"{v:.3g}" if score == "depth" or score in NUMBERS else f"{100 * v:.0f}%" for v in (self.mean, self.low, self.high))
        return f"{mean} ({low} to {high})" if self.seeds > 1 else mean


def table(runs):
    """One task's last scores as Markdown: a row is a model; mean (lowest to highest seed)."""
    scores = score_names(runs)
    rows = ["| | seeds | " + " | ".join(scores) + " |", "|---" * (len(scores) + 2) + "|"]
    for label, members in models(runs).items():
        last = [run["evals"][-1]["eval"] for run in members]
        values = {score: [end[score] for end in last if score in end] for score in scores}
        cells = [Over(values[score]).written(score) if values[score] else "" for score in scores]
        going = " (still training)" if any(run["seconds"] is None for run in members) else ""
        rows.append(f"| {label}{going} | {count_seeds(members)} | {' | '.join(cells)} |")
    return "\n".join(rows)


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
    """(colour, dash) of each label's line: colours of their own if there are enough; else one a family, darker for each next member, or,
    of a single family, from dark to light."""
    families = list(dict.fromkeys(map(family, labels)))
    found, seen = [], {}
    for i, label in enumerate(labels):
        if len(labels) <= len(COLOURS):
            found.append((COLOURS[i], DASHES[i % len(DASHES)]))
            continue
        if len(families) == 1:
            found.append((plt.get_cmap("viridis")(0.9 * i / (len(labels) - 1)), DASHES[i % len(DASHES)]))
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


def draw(runs):
    """The figure of one task's runs."""
    groups = models(runs)
    scores = score_names(runs)
    styles = looks(list(groups))
    names = [textwrap.fill(label, 36, break_on_hyphens=False) for label in groups]
    bar_height = 0.5 + (0.28 + 0.16 * max(name.count("\n") for name in names)) * len(groups)
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
            top.fill_between(steps, low, high, color=colour, alpha=0.2 if len(groups) <= len(COLOURS) else 0.07, lw=0)
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
    going = [any(run["seconds"] is None for run in members) for members in groups.values()]
    axes[1, 0].set_yticks(range(len(groups)), [f"{name}\n(still training)" if on else name for name, on in zip(names, going)])
    for name, (colour, _) in zip(axes[1, 0].get_yticklabels(), styles):  # the names are the legend of both rows
        name.set(color=colour, weight="bold")
    figure.suptitle(title(runs), fontsize=12)
    return figure


def draw_capacity(runs):
    """Capo's second figure: the bits that models hold against their parameters, beside lines of 2, 1 and 0.5 bits a parameter."""
    figure, axis = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
    groups = models(runs, but=("model.n_layer", "model.n_head", "model.d_model"))
    sizes = []
    for (label, members), (colour, _) in zip(groups.items(), looks(list(groups))):
        last = [run["evals"][-1]["eval"] for run in members]
        points = [(scores["bits"] / scores["bits/param"], scores["bits"]) for scores in last if scores["bits"] > 0]
        if points:
            axis.plot(*zip(*points), "o", color=colour, label=label)
            sizes += [parameters for parameters, _ in points]
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="bits", title=title(runs))
    ends = np.array([min(sizes, default=1e5) / 4, max(sizes, default=1e5) * 4])
    for rate in (2, 1, 0.5):
        axis.plot(ends, rate * ends, color="grey", lw=0.8, zorder=0)
        axis.annotate(f"{rate:g} bit/param", (ends[1], rate * ends[1]), (4, 0), textcoords="offset points", va="center", fontsize=8, color="grey")
    axis.set_xlim(ends)
    axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def title(runs):
    """Task and preset, and what all runs have in common."""
    counts = sorted(set(map(count_seeds, models(runs).values())))
    seeds = f"{counts[0]} seed{'s' if counts[-1] > 1 else ''}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]} seeds"
    facts = shared(runs, "task", "N", "K", "L", "cfg") + shared(runs, "model", "n_layer", "d_model")
    return f"{runs[0]['task']['name'].capitalize()}, {runs[0]['preset']}: {', '.join([*facts, seeds])}"


# ------------------------------------------------------------------------------------------------------------
# 4. The claims
#
# What the paper claims, what it measured, and a rule, a line of Python, by which the runs here show the same or do not. The rules
# follow from the claims and the paper's numbers; results/README.md says which were written before their runs. Models have their names from
# train.py's sweeps. A rule sees each model's scores over the seeds, as m[model].mean, .low, .high and .spread.
# ------------------------------------------------------------------------------------------------------------


LEGEND = """The paper's claims and what was measured here, by `python plot.py --claims`; plot.py has the rules behind the verdicts. R1 copying, R2 Canon with
RoPE, R3 positions, R4 parts and variants of Canon, R5 MLPs, R6 to R9 linear mixers, R10 families, R11 hybrids. ABCD stands for Canon-ABCD; a
linear mixer's "none", "own", "ACD" and "AbCD" for no convolution, its own (GLA, which has none, gets Mamba2's kind), Canon-ACD in its place, and
both. Scores: "depth" is the largest k up to which every tested k is at least 50% right, "answers" the mean over all tested k, "above guessing"
the same counted from a guess among the other nodes of the largest cycle (a guess is 0, all right is 1, worse than a guess is below 0), "longest"
that of the longest expressions, "main" each task's own: one of these, all, sentences, or bits a parameter.
"""


def measured(run, what):
    """The last value of this score, or of one made of several, as the legend says."""
    last = run["evals"][-1]["eval"]
    tested = sorted((int(name[2:]), value) for name, value in last.items() if name[:2] in ("k=", "l="))
    if what == "main":
        what = next((name for name in ("all", "sentences", "bits/param") if name in last), "answers" if "k=1" in last else "longest")
    if what == "longest":
        return tested[-1][1]
    if what == "depth":
        return max([k for i, (k, _) in enumerate(tested) if all(value >= 0.5 for _, value in tested[: i + 1])], default=0)
    if what in ("answers", "above guessing"):
        mean, guess = float(np.mean([value for _, value in tested])), 1 / (run["task"]["N"] - 1)
        return mean if what == "answers" else (mean - guess) / (1 - guess)
    return last[what]


NEAR = 0.05  # "matches", "never hurts": five points of a hundred
SEEDS = 3  # fewer give no verdict
LINEAR_OWN = ("Mamba2", "GDN")  # those with a convolution of their own
ALL_TASKS = ("depo1", "depo2", "brevo1", "brevo2", "mano", "lano", "capo")


def higher_with_canon(task):
    return (f"{task} RoPE", f"{task} RoPE + ABCD"), lambda m: m[f"{task} RoPE + ABCD"].low > m[f"{task} RoPE"].high


CLAIMS = (  # number, claim, what the paper found, sweep, score, models, rule
    ("R1", "One layer of 16 dims copies with Canon layers, and fails without", "yes", "copy", "sequences",
     ("RoPE", "RoPE + ABCD"), lambda m: m["RoPE + ABCD"].low > 0.9 and m["RoPE"].high < 0.5),
    ("R1", "Without Canon layers, two layers copy", "yes", "copy", "sequences", ("RoPE, 2 layers",), lambda m: m["RoPE, 2 layers"].low > 0.9),
    ("R1", "Without Canon layers, one layer of 128 dims copies", "yes", "copy", "sequences",
     ("RoPE, 128 dims",), lambda m: m["RoPE, 128 dims"].low > 0.9),
    ("R2", "Canon at least doubles the depth of reasoning (Depo1)", "2-4 times", "depth", "depth",
     ("RoPE", "RoPE + ABCD"), lambda m: m["RoPE + ABCD"].low >= 2 * max(1, m["RoPE"].high)),
    ("R2", "Canon helps to reason about long words (Depo2)", "30% to 99% (k=16)", "tasks", "answers", *higher_with_canon("depo2")),
    ("R2", "Canon helps breadth (Brevo1)", "27.5% to 58.8%", "tasks", "all", *higher_with_canon("brevo1")),
    ("R2", "Canon helps breadth with longer words (Brevo2)", "81.4% to 87.8%", "tasks", "all", *higher_with_canon("brevo2")),
    ("R2", "Canon helps to calculate (Mano)", "41.6% to 83.0%", "tasks", "longest", *higher_with_canon("mano")),
    ("R2", "Canon helps with structure (Lano)", "79.1% to 86.7%", "tasks", "sentences", *higher_with_canon("lano")),
    ("R2", "Canon adds to the capacity for knowledge (Capo)", "10-15%", "tasks", "bits/param", *higher_with_canon("capo")),
    ("R3", "NoPE without Canon learns next to nothing (Depo1)", "0% (k=8)", "nope", "above guessing", ("NoPE",), lambda m: m["NoPE"].high < NEAR),
    ("R3", "NoPE + Canon matches RoPE + Canon (Depo1)", "100%; 94% (k=8)", "nope", "answers",
     ("NoPE + ABCD", "RoPE + ABCD"), lambda m: m["NoPE + ABCD"].mean >= m["RoPE + ABCD"].mean - NEAR),
    ("R3", "NoPE + Canon beats ALiBi and H-ALiBi (Depo1)", "yes", "nope", "answers",
     ("NoPE + ABCD", "ALiBi", "H-ALiBi"), lambda m: m["NoPE + ABCD"].low > max(m["ALiBi"].high, m["H-ALiBi"].high)),
    ("R3", "With Canon, RoPE(1/4) is as good as RoPE and NoPE, or better (Depo1)", "100% (k=8)", "nope", "answers",
     ("RoPE(1/4) + ABCD", "RoPE + ABCD", "NoPE + ABCD"),
     lambda m: m["RoPE(1/4) + ABCD"].mean >= max(m["RoPE + ABCD"].mean, m["NoPE + ABCD"].mean) - NEAR),
    ("R3", "Canon lifts NoPE on every task", "yes", "tasks", "main", tuple(f"{task} NoPE{more}" for task in ALL_TASKS for more in ("", " + ABCD")),
     lambda m: all(m[f"{task} NoPE + ABCD"].low > m[f"{task} NoPE"].high for task in ALL_TASKS)),
    ("R4", "A, B, C and D help, each alone", "yes", "ablation", "answers",
     ("none", "A", "B", "C", "D"), lambda m: min(m[point].low for point in "ABCD") > m["none"].high),
    ("R4", "No part of ABCD is better than all of it", "yes", "ablation", "answers",
     ("A", "B", "C", "D", "AC", "ACD", "ABCD"), lambda m: m["ABCD"].mean >= max(part.mean for part in m.values()) - NEAR),
    ("R4", "AC, which leaves attention and MLP untouched, does half of ABCD's work or more", "strong", "ablation", "answers",
     ("none", "AC", "ABCD"), lambda m: m["ABCD"].low > m["none"].high and m["AC"].mean >= (m["none"].mean + m["ABCD"].mean) / 2),
    ("R4", "Without its residual, Canon is less steady over seeds", "yes", "ablation", "answers",
     ("ABCD", "ABCD, no residual"), lambda m: m["ABCD, no residual"].spread > m["ABCD"].spread + NEAR),
    ("R4", "A SiLU does not help", "yes", "ablation", "answers", ("ABCD", "ABCD, SiLU"), lambda m: m["ABCD, SiLU"].mean <= m["ABCD"].mean + NEAR),
    ("R4", "Frozen random Canon layers do half of the work or more", "a lot", "ablation", "answers", ("none", "ABCD, frozen", "ABCD"),
     lambda m: m["ABCD"].low > m["none"].high and m["ABCD, frozen"].mean >= (m["none"].mean + m["ABCD"].mean) / 2),
    ("R5", "A gated MLP calculates better than a standard one (Mano)", "slightly", "mlp", "longest",
     ("mano swiglu", "mano silu"), lambda m: m["mano swiglu"].low > m["mano silu"].high),
    ("R5", "A gated MLP stores less than a standard one (Capo)", "yes", "mlp", "bits/param",
     ("capo swiglu", "capo silu"), lambda m: m["capo swiglu"].high < m["capo silu"].low),
    ("R5", "Canon wins back a quarter or more of what a gated MLP loses (Capo)", "about half", "mlp", "bits/param", ("capo swiglu", "capo swiglu + ABCD", "capo silu"),
     lambda m: 0 < m["capo silu"].mean - m["capo swiglu"].mean <= 4 * (m["capo swiglu + ABCD"].mean - m["capo swiglu"].mean)),
    ("R5", "ReLU^2 helps the standard MLP (Mano)", "slightly", "mlp", "longest",
     ("mano relu2", "mano silu"), lambda m: m["mano relu2"].low > m["mano silu"].high),
    ("R6", "GLA is weaker than Mamba2, and comes up to it with Canon", "GLA 19% to 50%; 43% (k=4)", "linear", "answers",
     ("GLA none", "GLA AbCD", "Mamba2 own"),
     lambda m: m["GLA AbCD"].mean >= m["Mamba2 own"].mean - NEAR and m["GLA none"].high < m["Mamba2 own"].low),
    ("R7", "Mamba2 without its convolution falls to GLA's level", "43% to 6%; 19% (k=4)", "linear", "answers",
     ("Mamba2 own", "Mamba2 none", "GLA none"),
     lambda m: m["Mamba2 own"].low > m["Mamba2 none"].high and m["Mamba2 none"].mean <= m["GLA none"].mean + NEAR),
    ("R8", "Gated DeltaNet without its convolution is better than Mamba2 without, and loses less", "22%, 6%; -10, -37 points (k=4)", "linear", "answers",
     ("GDN own", "GDN none", "Mamba2 own", "Mamba2 none"),
     lambda m: m["GDN none"].low > m["Mamba2 none"].high and m["GDN own"].mean - m["GDN none"].mean < m["Mamba2 own"].mean - m["Mamba2 none"].mean),
    ("R9", "Canon-ACD alone matches the built-in convolution", "yes", "linear", "answers", ("Mamba2 ACD", "Mamba2 own", "GDN ACD", "GDN own"),
     lambda m: all(m[f"{mixer} ACD"].mean >= m[f"{mixer} own"].mean - NEAR for mixer in LINEAR_OWN)),
    ("R9", "Canon beside the built-in convolution never hurts", "+44, +59 points (k=4)", "linear", "answers",
     ("Mamba2 AbCD", "Mamba2 own", "GDN AbCD", "GDN own"),
     lambda m: all(m[f"{mixer} AbCD"].mean >= m[f"{mixer} own"].mean - NEAR for mixer in LINEAR_OWN)),
    ("R10", "With Canon everywhere, NoPE is about as good as RoPE(1/4)", "yes", "families", "answers",
     ("depo RoPE(1/4)", "depo NoPE"), lambda m: abs(m["depo RoPE(1/4)"].mean - m["depo NoPE"].mean) <= NEAR),
    ("R10", "With Canon everywhere, attention reasons at least twice as deep as linear models", "2-4 times", "families", "depth",
     ("depo RoPE(1/4)", "depo NoPE", "depo GLA", "depo Mamba2", "depo GDN"), lambda m: min(m["depo RoPE(1/4)"].low, m["depo NoPE"].low)
     >= 2 * max(1, m["depo GLA"].high, m["depo Mamba2"].high, m["depo GDN"].high)),
    ("R10", "With Canon everywhere, linear models store 1.2 times as much or more", "1.4 times", "families", "bits/param",
     ("capo RoPE(1/4)", "capo GLA", "capo Mamba2", "capo GDN"),
     lambda m: min(m["capo GLA"].mean, m["capo Mamba2"].mean, m["capo GDN"].mean) >= 1.2 * m["capo RoPE(1/4)"].mean),
    ("R11", "A hybrid with attention reasons deeper than a linear model", "yes", "hybrid", "depth",
     ("GDN", "GDN/RoPE"), lambda m: m["GDN/RoPE"].low > m["GDN"].high),
)  # fmt: skip


def runs_of(sweep, model, preset, runs):
    """The finished runs of this model, one a seed: those with the same task, model and training as the sweep's command line has,
    whatever their dtype."""
    import train  # which needs PyTorch; the figures of folders and files do without

    recipe = operator.itemgetter("task", "model", "training")
    prepared = train.prepare([*train.sweeps(preset)[sweep][model].split(), "--preset", preset])
    wanted = recipe(train.recipe_of(*prepared))
    return list({run["seed"]: run for run in runs if run["seconds"] is not None and recipe(run) == wanted}.values())


def check(claim, runs):
    """[(what was measured, where, the verdict)] of a claim, for each preset that has runs of all its models."""
    *_, sweep, what, names, rule = claim
    found = []
    for preset in sorted({run["preset"] for run in runs}):
        members = {name: runs_of(sweep, name, preset, runs) for name in names}
        if all(members.values()):
            m = {name: Over([measured(run, what) for run in group]) for name, group in members.items()}
            cells = [f"{name} {over.written(what)}" for name, over in m.items()]
            seeds = min(len(group) for group in members.values())
            devices = sorted({run["device"].split(",")[0] for group in members.values() for run in group})
            verdict = "too few seeds" if seeds < SEEDS else "**reproduced**" if rule(m) else "**not reproduced**"
            found.append((f"{what}: {'; '.join(cells)}", f"{preset}, {seeds} seeds, {', '.join(devices)}", verdict))
    return found


def claims_table(runs):
    """The claims as Markdown."""
    rows, verdicts = [], []
    for claim in CLAIMS:
        number, words, paper, sweep = claim[:4]
        for measured_here, where, verdict in check(claim, runs) or [("", f"`--sweep {sweep}`", "not run")]:
            rows.append(f"| {number} | {words} | {paper} | {measured_here} | {where} | {verdict} |")
            verdicts.append(verdict)
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    head = ["| | claim | the paper | here: mean (lowest to highest seed) | of | verdict |", "|---|---|---|---|---|---|"]
    return "\n".join([LEGEND, f"Verdicts: {counts}.\n", *head, *rows]) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draw scores against steps, and the last scores, from run folders.", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("runs", nargs="*", help="run folders, or files that --save wrote")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="pack configurations and scores into one .json file")
    parser.add_argument("--sweep", metavar="NAME", help="draw what `train.py --sweep NAME` left in out/, or its runs among those given")
    parser.add_argument("--preset", help="with --sweep: its preset (default as in train.py)")
    parser.add_argument("--claims", action="store_true", help="print the table of claims, and write it to claims.md in --out; without runs: "
                        "of all in out/ and results/")  # fmt: skip
    args = parser.parse_args(argv)
    if not (args.sweep or args.claims or args.runs) or args.sweep and args.claims:
        fail("give run folders, or --sweep NAME, or --claims (see --help)")
    if args.out.exists() and not args.out.is_dir():
        fail(f"out = {args.out}: not a folder")
    if args.save and args.save.is_dir():
        fail(f"save = {args.save}: a folder, not a file")
    if args.preset and not args.sweep:
        fail(f"preset = {args.preset}: goes with --sweep")
    paths, wanted = args.runs, lambda name: True
    if args.sweep:
        import train

        if args.sweep not in train.SWEEPS:
            fail(f"sweep = {args.sweep!r}: allowed: {', '.join(train.SWEEPS)}")
        sweep = train.sweep_runs(args.sweep, 1, ["--preset", args.preset] if args.preset else [])
        stems = [prepared[0].out.name.removesuffix("0") for _, prepared in sweep]
        wanted = lambda name: name.rstrip("0123456789") in stems  # noqa: E731 - the name but for the seed
        paths = paths or [path for path in sorted(Path("out").glob("*/")) if wanted(path.name)]
    elif args.claims and not paths:
        # of two runs of one model and seed the later counts: the user's own
        paths = [*sorted(Path(__file__).parent.glob("results/*/runs.json")), *sorted(Path("out").glob("*/"))]
    runs = [run for run in read_all(paths) if wanted(run["run"])]
    if not runs:
        fail("no scores yet in any of these")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(run) for run in runs)  # a line a run
        args.save.write_text(f'{{"runs": [\n{rows}\n]}}\n')
    if args.claims:
        text = claims_table(runs)
        (args.out / "claims.md").write_text(text)
        print(text)
        return
    kinds = {}
    for run in runs:
        kinds.setdefault(f"{run['task']['name']}_{run['preset']}", []).append(run)
    for kind, members in sorted(kinds.items()):
        figures = {kind: draw(members)}
        if members[0]["task"]["name"] == "capo":
            figures[f"{kind}_capacity"] = draw_capacity(members)
        for name, figure in figures.items():
            name = f"{args.sweep}_{name}" if args.sweep else name
            for ending in ("png", "svg"):
                figure.savefig(args.out / f"{name}.{ending}", dpi=160)
            plt.close(figure)
            print(args.out / f"{name}.png")
        print(f"\n{table(members)}\n")


if __name__ == "__main__":
    main()
