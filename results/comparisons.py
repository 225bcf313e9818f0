"""What is compared: the models of each comparison, the tasks they train on, and their figure.

    python results/reproduce.py --list     names the comparisons
    python results/reproduce.py nope       trains, draws and judges one of them

A model is a name and a line of train.py's flags; what the line leaves out is as the task's preset
sets it. claims.py says what is claimed about these models, and asks for them by their names.

Reading order: first the table in 3; 1 and 2 are what it is made of.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Callable

import numpy as np
from matplotlib.figure import Figure

import plot

HOPS = {"k=1": "1 hop", "k=2": "2 hops", "k=3": "3 hops", "k=4": "4 hops", "k=8": "8 hops"}
HOPS_AND_DEPTH = HOPS | {"hops mastered": "hops mastered"}


@dataclass
class Comparison:
    """Every model is trained on every task."""

    tasks: tuple
    models: dict  # {name: train.py's flags}, in the order of drawing; --steps 2x: twice the usual
    title: str  # what the runs in results/ show at nano
    scores: dict  # {score: its heading in the figure}
    figure: Callable = plot.bars  # (groups, title, headings); groups: {name: its runs}
    at_nano: str = ""  # train.py's flags for every model, where nano's recipe is not used
    names: dict | None = None  # {model: its name in the figure}; None: as in models

    def own_flags(self, task, preset):
        """On other tasks its claims are judged by other comparisons' runs, which lack at_nano."""
        return self.at_nano if preset == "nano" and task in self.tasks else ""


# ---- 1. What several comparisons share -------------------------------------

PAIRS = {
    "RoPE": "",
    "RoPE + Canon": "--canon abcd",
    "NoPE": "--pos nope",
    "NoPE + Canon": "--pos nope --canon abcd",
}
IN_PLAIN_WORDS = {
    "RoPE": "rotary positions",
    "RoPE + Canon": "rotary + Canon",
    "NoPE": "no positions",
    "NoPE + Canon": "no positions + Canon",
}

QUARTER = {"RoPE(1/4) + Canon": "--pos rope4 --canon abcd"}

# The linear mixers: without any convolution, with their own, with Canon at A, C and D in its place,
# and with both, which the paper calls Canon-AbCD.
LINEAR = {}
for name, mixer in (("GLA", "gla"), ("Mamba2", "mamba2"), ("GDN", "gdn")):
    LINEAR |= {
        f"{name}, no conv": f"--mixer {mixer} --no-short-conv",
        f"{name}, conv": f"--mixer {mixer} --short-conv",
        f"{name} + ACD": f"--mixer {mixer} --no-short-conv --canon acd",
        f"{name} + AbCD": f"--mixer {mixer} --short-conv --canon acd",
    }
ABCD_LINEAR = {name: LINEAR[name] for name in LINEAR if name.endswith("+ AbCD")}

# Another recipe for Depo0. Its batches are half as large as the preset's, so that the moment at
# which a hop is learnt depends more on luck.
FIRST_RECIPE = "--steps 24000 --batch-size 16 --lr 5e-3"


# ---- 2. How many hops each run masters -------------------------------------

HOPS_TASK = """
The arrows of a cycle
 c→a   b→d   d→c   a→b

A question
 Who is 2 arrows after b?

The answer,
without writing the steps
 c"""


def dots(groups, title, headings):
    """One row per model, one dot per run, in the column of the hops that it masters."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.2])
    left.axis("off")
    left.text(0, 1.1, HOPS_TASK.strip(), va="top", linespacing=1.5)
    left.text(0, -0.1, "Each dot is one training run.", fontsize=9, color="#666666")

    units = plot.all_runs(groups)[0]["units"]
    columns = [0] + [int(name.removeprefix("k=")) for name in units if name.startswith("k=")]
    names = ["none", "1 arrow"] + [f"{hops} arrows" for hops in columns[2:]]
    right.set_xlim(-0.5, len(columns) - 0.5)
    right.set_ylim(len(groups) - 0.5, -0.5)  # row 0 is at the top
    right.set_xticks(range(len(columns)), names)
    right.set_yticks(range(len(groups)), list(groups))
    right.tick_params(length=0, labeltop=True, labelbottom=False)
    right.spines[:].set_visible(False)
    right.grid(axis="y", color="#eeeeee")
    for row, runs in enumerate(groups.values()):
        colour = plot.ORANGE if runs[0]["model"]["canon"] else plot.GREY
        for hops, count in Counter(plot.last_scores(runs, "hops mastered")).items():
            x, y = centred_lines(count)
            right.plot(columns.index(hops) + x, row + y, "o", color=colour, mec="white", ms=10)
    return figure


def centred_lines(count, most=6):
    """x and y of so many dots, in lines of at most `most` of them."""
    dot = np.arange(count)
    line, place = dot // most, dot % most
    return 0.15 * (place - place.max() / 2), 0.3 * (line - line.max() / 2)


# ---- 3. The comparisons ----------------------------------------------------
#
# The minutes are for the preset nano on one CPU core.

COMPARISONS = {
    "copy": Comparison(  # a minute a run
        tasks=("copy",),
        models={
            "one layer": "",
            "one layer + Canon": "--canon abcd",
            "two layers": "--n-layer 2",
            "128 dims": "--d-model 128",
            "one layer, twice the steps": "--steps 2x",
        },
        title="One layer of 16 dims copies whole lists with Canon, and none without",
        figure=plot.curves,
        scores={"sequences": "lists copied whole"},
        names={
            "one layer": "one layer of 16 dims",
            "one layer + Canon": "one layer of 16 dims + Canon",
            "two layers": "two layers of 16 dims",
            "128 dims": "one layer of 128 dims",
        },
    ),
    "hops": Comparison(  # 40 minutes a run
        tasks=("depo0",),
        models=PAIRS,
        title="Without Canon no run follows an arrow; with it, up to four",
        figure=dots,
        scores=HOPS_AND_DEPTH,
        names=IN_PLAIN_WORDS,
    ),
    "fewer": Comparison(  # 27 minutes a run
        tasks=("depo0",),
        at_nano=FIRST_RECIPE,
        models={
            **PAIRS,
            "RoPE, twice the steps": "--steps 2x",
            "NoPE, twice the steps": "--pos nope --steps 2x",
            "RoPE, K=2": "--K 2",
            "RoPE + Canon, K=2": "--K 2 --canon abcd",
            "RoPE, K=2, twice the steps": "--K 2 --steps 2x",
            "NoPE, K=2": "--K 2 --pos nope",
            "RoPE, K=1": "--K 1",
            "NoPE, K=1": "--K 1 --pos nope",
        },
        title="Asked for one hop only, RoPE masters it; asked for four, only models with Canon do",
        scores=HOPS_AND_DEPTH,
    ),
    "nope": Comparison(  # 5 minutes a run
        tasks=("depo1",),
        models={
            **PAIRS,
            **QUARTER,
            "ALiBi": "--pos alibi",
            "H-ALiBi": "--pos halibi",
        },
        title="Without positions nothing is learnt; with Canon, nearly everything",
        scores=HOPS,
    ),
    "ablation": Comparison(  # 5 minutes a run
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
        title="Each of the four points helps alone; all four help most",
        scores=HOPS,
    ),
    "mlp": Comparison(  # 6 minutes a run
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
        title="Canon helps with every kind of MLP",
        scores={"capo: bits/param": "Capo: facts stored", "mano: longest": "Mano: the longest"},
    ),
    "linear": Comparison(  # 18 minutes a run
        tasks=("depo1",),
        models=LINEAR,
        title="Without any convolution, linear mixers learn little",
        scores=HOPS,
    ),
    "families": Comparison(  # 20 minutes a run
        tasks=("depo0",),
        at_nano=FIRST_RECIPE,
        models={
            **PAIRS,
            **QUARTER,
            **ABCD_LINEAR,
            "GDN/RoPE + AbCD": "--mixer gdn,attention --short-conv --canon acd",
        },
        title="NoPE + Canon masters four hops, recurrences with Canon one or two",
        scores=HOPS_AND_DEPTH,
    ),
    "capacity": Comparison(  # 7 minutes a run
        tasks=("capo",),
        at_nano="--d-model 16",  # at the preset's width all models know nearly all
        models=PAIRS | QUARTER | ABCD_LINEAR,
        title="With Canon, recurrences store about as much as attention",
        scores={"capo: bits/param": "facts stored"},
    ),
    "tasks": Comparison(  # some 7 minutes a run
        tasks=("depo0", "depo1", "depo2", "brevo1", "brevo2", "mano", "capo", "lano"),
        models=PAIRS,
        title="Canon raises the score on each of these eight tasks",
        scores={
            "depo0: answers": "Depo0: answers",
            "depo1: answers": "Depo1: answers",
            "depo2: answers": "Depo2: answers",
            "brevo1: all": "Brevo1: answers",
            "brevo2: all": "Brevo2: answers",
            "mano: longest": "Mano: the longest",
            "capo: bits/param": "Capo: facts stored",
            "lano: sentences": "Lano: sentences",
        },
        names=IN_PLAIN_WORDS,
    ),
    "longer": Comparison(  # some 5 minutes a run, and 10 to 40 in four times the steps
        tasks=("depo1", "depo2", "brevo1", "mano", "lano"),
        models={
            "RoPE": "",
            "RoPE + Canon": "--canon abcd",
            "RoPE, four times the steps": "--steps 4x",
            "RoPE + Canon, four times the steps": "--steps 4x --canon abcd",
        },
        title="Four times the steps do not make up for Canon on Depo1 and Lano",
        figure=plot.curves,
        scores={
            "depo1: answers": "Depo1: answers",
            "depo2: answers": "Depo2: answers",
            "brevo1: all": "Brevo1: answers",
            "mano: longest": "Mano: two operations",
            "lano: sentences": "Lano: sentences",
        },
    ),
    "text": Comparison(  # 14 minutes a run
        tasks=("text",),
        models={
            **PAIRS,
            "RoPE, one more layer": "--n-layer 5",
            "RoPE, twice the steps": "--steps 2x",
            **{name: LINEAR[name] for name in LINEAR if not name.endswith("+ ACD")},
        },
        title="On Python source code, Canon helps more than training twice as long",
        figure=plot.curves,
        scores={"bits per byte": "on held-out blocks; fewer bits are better"},
        names=IN_PLAIN_WORDS | {"RoPE, twice the steps": "rotary, twice the steps"},
    ),
}
