"""What is compared: the models of each comparison, the tasks they train on, and their figure.

    python results/reproduce.py --list     names the comparisons
    python results/reproduce.py nope       trains, draws and judges one of them

A model is a name and a line of train.py's flags; what the line leaves out is as the task's preset
sets it. claims.py says what is claimed about these models, and asks for them by their names.

Reading order: first the table in 3; 1 and 2 are what it is made of.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import plot
from claims import MAIN_SCORES
from tasks import score_text


@dataclass(frozen=True)
class Comparison:
    """Every model is trained on every task."""

    minutes: int  # that a run takes at nano on one core
    tasks: tuple
    models: dict  # {name: train.py's flags}, in the order of drawing
    figure: Callable  # (groups, scores, title) -> figure; groups: {name: its runs}
    scores: list  # of the tables, and handed to `figure`; "k=" stands for k=1, k=2 and so on
    title: Callable  # groups -> what was found
    twice_the_steps: tuple = ()  # the models that train for twice the preset's steps
    # The tasks whose models have half of the preset's width: at full width all know nearly all of
    # Capo.
    half_the_width: tuple = ()
    at_nano: dict = field(default_factory=dict)  # {task: flags}, where it is not nano's recipe

    def own_flags(self, task, preset):
        """The flags that make its recipe another than the preset's, in one text."""
        return self.at_nano.get(task, "") if preset == "nano" else ""


# ---- 1. What several comparisons share -------------------------------------

PAIRS = {
    "RoPE": "",
    "RoPE + Canon": "--canon abcd",
    "NoPE": "--pos nope",
    "NoPE + Canon": "--pos nope --canon abcd",
}

QUARTER = {"RoPE(1/4) + Canon": "--pos rope4 --canon abcd"}

# Canon-AbCD is Canon at A, C and D beside the mixer's own convolution, which takes B's place.
FULL_LINEAR = {
    "GLA + AbCD": "--mixer gla --short-conv --canon acd",
    "Mamba2 + AbCD": "--mixer mamba2 --short-conv --canon acd",
    "GDN + AbCD": "--mixer gdn --short-conv --canon acd",
}

# The linear mixers without Canon: without any convolution, and with their own.
NO_CONVOLUTION = {
    "GLA, no conv": "--mixer gla --no-short-conv",
    "Mamba2, no conv": "--mixer mamba2 --no-short-conv",
    "GDN, no conv": "--mixer gdn --no-short-conv",
}
OWN_CONVOLUTION = {
    "GLA, conv": "--mixer gla --short-conv",
    "Mamba2, conv": "--mixer mamba2 --short-conv",
    "GDN, conv": "--mixer gdn --short-conv",
}

# What Depo0's preset was at first. Its batches are half as large as today's, so that the moment at
# which a hop is learnt depends more on luck.
FIRST_RECIPE = {"depo0": "--steps 24000 --batch-size 16 --lr 5e-3"}

SYNTHETIC_TASKS = ("depo0", "depo1", "depo2", "brevo1", "brevo2", "mano", "capo", "lano")
TASKS_SCORES = [f"{task}: {MAIN_SCORES[task]}" for task in SYNTHETIC_TASKS]


# ---- 2. Titles -------------------------------------------------------------
#
# A title says what was found, in the numbers of the runs that are shown.


def typical(groups, model, score):
    """The median over the model's seeds, in print; "?" if there are none."""
    runs = [run for run in groups.get(model, []) if score in run["units"]]
    if not runs:
        return "?"
    return score_text(median(plot.last_scores(runs, score)), runs[0]["units"][score])


def hops_asked(groups):
    """The numbers of hops that any run is scored for, such as [1, 2, 4]."""
    asked = set()
    for runs in groups.values():
        for run in runs:
            for score in run["units"]:
                if score.startswith("k="):
                    asked.add(int(score.removeprefix("k=")))
    return sorted(asked)


def copy_title(groups):
    with_canon = typical(groups, "one layer + Canon", "sequences")
    without = typical(groups, "one layer", "sequences")
    return f"One layer of 16 dims copies {with_canon} of the lists with Canon, {without} without"


def hops_title(groups):
    hops, hops_without = mastered_with_and_without(groups)
    most = max(hops, default=0)
    most_without = max(hops_without, default=0)
    asked = f"Asked about 1 to {hops_asked(groups)[-1]} arrows, these models follow"
    if most_without == 0:
        return f"{asked} none without Canon, and up to {most} with it"
    return f"{asked} up to {most_without} without Canon, and up to {most} with it"


def mastered_with_and_without(groups):
    """How many hops each run masters: with Canon, and without."""
    with_canon, without = [], []
    for run in plot.all_runs(groups):
        if run["model"]["canon"]:
            with_canon += plot.last_scores([run], "hops mastered")
        else:
            without += plot.last_scores([run], "hops mastered")
    return with_canon, without


def depth_title(groups):
    most = hops_asked(groups)[-1]
    nope = plot.last_scores(groups.get("NoPE + Canon", []), "hops mastered")
    rope = plot.last_scores(groups.get("RoPE + Canon", []), "hops mastered")
    _, without = mastered_with_and_without(groups)
    return (
        f"{most} hops are mastered in {how_many(nope, most)} runs with NoPE + Canon, "
        f"in {how_many(rope, most)} with RoPE + Canon, in {how_many(without, most)} without Canon"
    )


def how_many(values, least):
    """How many of the values reach `least`, such as "2 of 5"."""
    high = [value for value in values if value >= least]
    return f"{len(high)} of {len(values)}"


def fewer_title(groups):
    alone = typical(groups, "RoPE, K=1", "hops mastered")
    rope = typical(groups, "RoPE + Canon", "hops mastered")
    nope = typical(groups, "NoPE + Canon", "hops mastered")
    return (
        f"Asked for one hop only, RoPE masters {alone}; "
        f"asked for all, RoPE + Canon masters {rope} and NoPE + Canon {nope}"
    )


def nope_title(groups):
    most = hops_asked(groups)[-1]
    without = typical(groups, "NoPE", f"k={most}")
    with_canon = typical(groups, "NoPE + Canon", f"k={most}")
    return f"{most} hops without positions: {without} right, with Canon {with_canon}"


def ablation_title(groups):
    most = hops_asked(groups)[-1]
    score = f"k={most}"
    found = [f"{point} {typical(groups, point, score)}" for point in "ABCD"]
    none, everywhere = typical(groups, "none", score), typical(groups, "ABCD", score)
    return f"{most} hops: {', '.join(found)}, all four {everywhere}, none {none}"


def mlp_title(groups):
    without = typical(groups, "gated", "mano: longest")
    with_canon = typical(groups, "gated + Canon", "mano: longest")
    return f"Mano with a gated MLP: {without} right, with Canon {with_canon}"


def linear_title(groups):
    most = hops_asked(groups)[-1]
    without = typical(groups, "Mamba2, no conv", f"k={most}")
    with_conv = typical(groups, "Mamba2, conv", f"k={most}")
    return f"{most} hops: Mamba2 gets {with_conv} right, {without} without its own convolution"


def families_title(groups):
    found = []
    for model in ("NoPE + Canon", "RoPE + Canon", *FULL_LINEAR):
        if model in groups:
            found.append(f"{model} {typical(groups, model, 'hops mastered')}")
    return f"Hops mastered: {', '.join(found)}"


def tasks_title(groups):
    rope, rope_tasks = lifted(groups, "RoPE")
    nope, nope_tasks = lifted(groups, "NoPE")
    if rope == nope == rope_tasks == nope_tasks:
        return f"Canon raises the score on each of these {rope} tasks"
    with_positions = f"{rope} of {rope_tasks} tasks with positions"
    return f"Canon raises the score on {with_positions}, on {nope} of {nope_tasks} without"


def text_title(groups):
    canon_bits = plot.last_scores(groups.get("RoPE + Canon", []), "bits per byte")
    longer_bits = plot.last_scores(groups.get("RoPE, twice the steps", []), "bits per byte")
    if canon_bits and longer_bits and min(longer_bits) > max(canon_bits):
        return "On Python source code, twice the training does not make up for Canon"
    rope = typical(groups, "RoPE", "bits per byte")
    with_canon = typical(groups, "RoPE + Canon", "bits per byte")
    return f"A byte of text costs a rotary model {rope} bits, with Canon {with_canon}"


def lifted(groups, model):
    """On how many tasks the model's median is higher with Canon, and on how many it was tried."""
    lifts = []
    for score in TASKS_SCORES:
        without = plot.last_scores(groups.get(model, []), score)
        with_canon = plot.last_scores(groups.get(f"{model} + Canon", []), score)
        if without and with_canon:
            lifts.append(median(with_canon) - median(without))
    return sum(lift > 0 for lift in lifts), len(lifts)


# ---- 3. The comparisons ----------------------------------------------------

HOPS_TASK = {
    "The arrows of a cycle": "c\u2192a   b\u2192d   d\u2192c   a\u2192b",
    "A question": "Who is 2 arrows after b?",
    "The answer, without writing the steps": "c",
}
PLAIN_NAMES = {
    "RoPE": "rotary positions",
    "RoPE + Canon": "rotary + Canon",
    "NoPE": "no positions",
    "NoPE + Canon": "no positions + Canon",
    "RoPE, one more layer": "rotary, one more layer",
    "RoPE, twice the steps": "rotary, twice the steps",
}
COPY_NAMES = {
    "one layer": "one layer of 16 dims",
    "one layer + Canon": "one layer of 16 dims + Canon",
    "two layers": "two layers of 16 dims",
    "128 dims": "one layer of 128 dims",
}

TASKS_HEADINGS = {
    "depo0: answers": "Depo0: answers",
    "depo1: answers": "Depo1: answers",
    "depo2: answers": "Depo2: answers",
    "brevo1: all": "Brevo1: answers",
    "brevo2: all": "Brevo2: answers",
    "mano: longest": "Mano: the longest",
    "capo: bits/param": "Capo: facts stored",
    "lano: sentences": "Lano: sentences",
}


def in_plain_names(groups):
    return {PLAIN_NAMES.get(model, model): runs for model, runs in groups.items()}


def draw_hops(groups, scores, title):
    """How many hops each run masters, beside an instance of the task.

    Older runs are not scored at three. Then one that masters two, but not four, may master three.
    """
    columns = {0: "none"}
    scored = hops_asked(groups)
    for hops in scored:
        columns[hops] = "1 arrow" if hops == 1 else f"{hops} arrows"
    if 2 in scored and 4 in scored and 3 not in scored:
        columns[2] = "2 or 3 arrows"
    below = plot.small_print(groups, legend="Each dot is one training run.")
    below += " The recipe was chosen for the bottom row."
    named = in_plain_names(groups)
    return plot.dots(named, "hops mastered", columns, title, below, beside=HOPS_TASK)


def draw_copy(groups, scores, title):
    """The lists copied, without the model that trains longer than the others."""
    shown = {name: groups[model] for model, name in COPY_NAMES.items() if model in groups}
    return plot.curves(shown, ["sequences"], title, headings={"sequences": "lists copied whole"})


def draw_tasks(groups, scores, title):
    below = plot.small_print(groups, legend="Bars and numbers: medians; dots: single seeds.")
    below += " The recipes were found with Canon." + plot.about_chance(groups, scores)
    return plot.bars(in_plain_names(groups), scores, title, below, headings=TASKS_HEADINGS)


def draw_text(groups, scores, title):
    """Attention, except the deeper model, whose curve lies on that of "RoPE"."""
    linear_mixers = NO_CONVOLUTION | OWN_CONVOLUTION | FULL_LINEAR
    left_out = ("RoPE, one more layer", *linear_mixers)
    shown = {model: runs for model, runs in groups.items() if model not in left_out}
    return plot.curves(in_plain_names(shown), scores, title)


COMPARISONS = {
    "copy": Comparison(
        minutes=1,
        tasks=("copy",),
        models={
            "one layer": "",
            "one layer + Canon": "--canon abcd",
            "two layers": "--n-layer 2",
            "128 dims": "--d-model 128",
            "one layer, twice the steps": "",
        },
        twice_the_steps=("one layer, twice the steps",),
        figure=draw_copy,
        scores=["tokens", "sequences"],
        title=copy_title,
    ),
    "hops": Comparison(
        minutes=40,
        tasks=("depo0",),
        models=PAIRS,
        figure=draw_hops,
        scores=["k=", "hops mastered"],
        title=hops_title,
    ),
    "depth": Comparison(
        minutes=27,
        tasks=("depo0",),
        models={
            **PAIRS,
            "RoPE, twice the steps": "",
            "NoPE, twice the steps": "--pos nope",
        },
        twice_the_steps=("RoPE, twice the steps", "NoPE, twice the steps"),
        at_nano=FIRST_RECIPE,
        figure=plot.curves,
        scores=["k="],
        title=depth_title,
    ),
    "fewer": Comparison(
        minutes=20,
        tasks=("depo0",),
        models={
            **PAIRS,
            "RoPE, K=2": "--K 2",
            "RoPE + Canon, K=2": "--K 2 --canon abcd",
            "RoPE, K=2, twice the steps": "--K 2",
            "NoPE, K=2": "--K 2 --pos nope",
            "RoPE, K=1": "--K 1",
            "NoPE, K=1": "--K 1 --pos nope",
        },
        twice_the_steps=("RoPE, K=2, twice the steps",),
        at_nano=FIRST_RECIPE,
        figure=plot.bars,
        scores=["k=", "hops mastered"],
        title=fewer_title,
    ),
    "nope": Comparison(
        minutes=5,
        tasks=("depo1",),
        models={
            **PAIRS,
            **QUARTER,
            "ALiBi": "--pos alibi",
            "H-ALiBi": "--pos halibi",
        },
        figure=plot.bars,
        scores=["k="],
        title=nope_title,
    ),
    "ablation": Comparison(
        minutes=5,
        tasks=("depo1",),
        models={
            "none": "",
            "A": "--canon a",
            "B": "--canon b",
            "C": "--canon c",
            "D": "--canon d",
            "AC": "--canon ac",
            "ACD": "--canon acd",
            "ABCD": "--canon abcd",
            "no residual": "--canon abcd --no-canon-residual",
            "SiLU": "--canon abcd --canon-silu",
            "frozen": "--canon abcd --canon-frozen",
        },
        figure=plot.bars,
        scores=["k="],
        title=ablation_title,
    ),
    "mlp": Comparison(
        minutes=6,
        tasks=("mano", "capo"),
        models={
            "gated": "",
            "gated + Canon": "--canon abcd",
            "gated ReLU^2": "--mlp swiglu-relu2",
            "gated ReLU^2 + Canon": "--mlp swiglu-relu2 --canon abcd",
            "standard": "--mlp silu",
            "standard + Canon": "--mlp silu --canon abcd",
            "ReLU^2": "--mlp relu2",
            "ReLU^2 + Canon": "--mlp relu2 --canon abcd",
        },
        figure=plot.bars,
        scores=["capo: bits/param", "mano: longest"],
        title=mlp_title,
    ),
    "linear": Comparison(
        minutes=18,
        tasks=("depo1",),
        models={
            "GLA, no conv": NO_CONVOLUTION["GLA, no conv"],
            "GLA, conv": OWN_CONVOLUTION["GLA, conv"],
            "GLA + ACD": "--mixer gla --no-short-conv --canon acd",
            "GLA + AbCD": FULL_LINEAR["GLA + AbCD"],
            "Mamba2, no conv": NO_CONVOLUTION["Mamba2, no conv"],
            "Mamba2, conv": OWN_CONVOLUTION["Mamba2, conv"],
            "Mamba2 + ACD": "--mixer mamba2 --no-short-conv --canon acd",
            "Mamba2 + AbCD": FULL_LINEAR["Mamba2 + AbCD"],
            "GDN, no conv": NO_CONVOLUTION["GDN, no conv"],
            "GDN, conv": OWN_CONVOLUTION["GDN, conv"],
            "GDN + ACD": "--mixer gdn --no-short-conv --canon acd",
            "GDN + AbCD": FULL_LINEAR["GDN + AbCD"],
        },
        figure=plot.bars,
        scores=["k="],
        title=linear_title,
    ),
    "families": Comparison(
        minutes=20,
        tasks=("depo0", "capo"),
        models={
            **PAIRS,
            **QUARTER,
            **FULL_LINEAR,
            "GDN/RoPE + AbCD": "--mixer gdn,attention --short-conv --canon acd",
        },
        half_the_width=("capo",),
        at_nano=FIRST_RECIPE,
        figure=plot.bars,
        scores=["k=", "hops mastered"],
        title=families_title,
    ),
    "tasks": Comparison(
        minutes=7,
        tasks=SYNTHETIC_TASKS,
        models=PAIRS,
        figure=draw_tasks,
        scores=TASKS_SCORES,
        title=tasks_title,
    ),
    "text": Comparison(
        minutes=14,
        tasks=("text",),
        models={
            **PAIRS,
            "RoPE, one more layer": "--n-layer 5",
            "RoPE, twice the steps": "",
            **NO_CONVOLUTION,
            **OWN_CONVOLUTION,
            **FULL_LINEAR,
        },
        twice_the_steps=("RoPE, twice the steps",),
        figure=draw_text,
        scores=["bits per byte"],
        title=text_title,
    ),
}
