"""What is compared: the models and tasks of each figure.   python results/reproduce.py hops_nano

A comparison goes by its figure's name, whose last word is the preset. A model is a label and a line
of train.py's flags; what the line leaves out is as in the preset. Every model trains on every task.
The minutes are for one CPU core.
"""

from dataclasses import dataclass, field
from typing import Callable

import examples.longer  # adds the task "longer"
import examples.mqar  # adds the task "mqar"
import examples.relatives  # adds Canon layers
import examples.sets  # adds the task "sets"
import plot


@dataclass
class Comparison:
    title: str  # what the runs in results/ show
    tasks: tuple
    models: dict  # {label: train.py's flags}; --steps 4x is four times the preset's
    scores: dict  # {score: its heading}; a task's name stands for its main score
    figure: Callable = plot.bars  # (groups, title, headings)
    program: str = "train.py"  # what trains them: a task of its own is in a file of examples/
    sizes: dict = field(default_factory=dict)  # {task: more flags for all of its models}


# ---- 1. What several comparisons share -------------------------------------

PAIRS = {
    "RoPE": "",
    "RoPE + Canon": "--canon abcd",
    "NoPE": "--pos nope",
    "NoPE + Canon": "--pos nope --canon abcd",
}
QUARTER = {"RoPE(1/4) + Canon": "--pos rope4 --canon abcd"}

SIXTEEN = "--N 16 --block-size 33 --steps 800"  # README's four experiments
POINTS = {
    **PAIRS,
    "NoPE + A": "--pos nope --canon a",
    "NoPE + B": "--pos nope --canon b",
    "NoPE + C": "--pos nope --canon c",
    "NoPE + D": "--pos nope --canon d",
}

# Linear mixers without any convolution, with their own, with Canon at A, C and D in its place, and
# with both, which the paper calls Canon-AbCD. GLA comes without its own, the others with it.
LINEAR = {
    "GLA, no convolution": "--mixer gla",
    "GLA, own convolution": "--mixer gla --short-conv",
    "GLA + Canon-ACD": "--mixer gla --canon acd",
    "GLA + Canon-AbCD": "--mixer gla --short-conv --canon acd",
}
for name, mixer in (("Mamba2", "mamba2"), ("GDN", "gdn")):
    LINEAR |= {
        f"{name}, no convolution": f"--mixer {mixer} --no-short-conv",
        f"{name}, own convolution": f"--mixer {mixer}",
        f"{name} + Canon-ACD": f"--mixer {mixer} --no-short-conv --canon acd",
        f"{name} + Canon-AbCD": f"--mixer {mixer} --canon acd",
    }

LONGER = {}  # trained on lists of up to 16 numbers
for name, pos in (("RoPE", "rope"), ("RoPE(1/4)", "rope4"), ("ALiBi", "alibi"), ("NoPE", "nope")):
    LONGER[name] = f"--pos {pos} --n-layer 2 --steps 3000"
    LONGER[f"{name} + Canon"] = f"--pos {pos} --canon abcd --n-layer 2 --steps 3000"

RELATIVES = {"nothing": ""}
for label, canon, name in (
    ("Canon", "abcd", "conv"),
    ("Canon at A and C", "ac", "conv"),
    ("dynamic Canon", "abcd", "dynamic"),
    ("gated Canon", "abcd", "gated"),
    ("Inkling's places", "abc", "inkling"),
    ("Primer's convolution", "abcd", "primer"),
    ("Mamba's convolution", "abcd", "mamba"),
    ("token shift", "abcd", "shift"),
    ("smear", "abcd", "smear"),
    ("attention to four tokens", "abcd", "window"),
):
    RELATIVES[label] = f"--canon {canon} --canon-type {name}"

MQAR = {"attention": "", "attention + Canon": "--canon abcd"}
for name in ("GLA", "Mamba2", "GDN"):
    for part in ("no convolution", "own convolution"):
        MQAR[f"{name}, {part}"] = LINEAR[f"{name}, {part}"]
    MQAR[f"{name} + Canon"] = f"{LINEAR[f'{name}, no convolution']} --canon abcd"

SETS = {label: f"{flags} --n-layer 2 --steps 12000" for label, flags in PAIRS.items()}

HOPS = {"k=1": "one hop", "k=2": "two hops", "k=3": "three hops", "k=4": "four hops"}


def curves_to_goal(groups, title, headings):
    """With a thin line at 90%, from where on we call a hop mastered."""
    figure = plot.curves(groups, title, headings)
    for axis in figure.axes:
        axis.axhline(0.9, color=plot.GREY, lw=0.8)
        axis.text(0, 0.91, " 90%", color=plot.GREY, fontsize=8)
    return figure


def curves_of_bits(groups, title, headings):
    """Cut off above two bits, where all models begin."""
    figure = plot.curves(groups, title, headings)
    (axis,) = figure.axes
    axis.set_ylim(1.2, 2)
    return figure


# ---- 2. The comparisons ----------------------------------------------------

COMPARISONS = {
    "hops_nano": Comparison(  # 20 to 60 minutes a run
        title="Depo0: no run without Canon learns a hop; NoPE + Canon learns four",
        tasks=("depo0",),
        models=PAIRS | QUARTER,
        scores=HOPS,
    ),
    "climb_nano": Comparison(  # the same runs
        title="Depo0: hops are learnt one after another, and only with Canon",
        tasks=("depo0",),
        models=PAIRS,
        scores=HOPS,
        figure=curves_to_goal,
    ),
    "depo1_small": Comparison(  # seven minutes a run on an H100
        title="Depo1 on a GPU: NoPE + Canon learns four hops; with RoPE seeds differ",
        tasks=("depo1",),
        models={
            "RoPE at 5e-4": "--lr 5e-4",
            "RoPE at 1e-3": "--lr 1e-3",
            "RoPE + Canon": "--canon abcd",
            "NoPE": "--pos nope",
            "NoPE + Canon": "--pos nope --canon abcd",
        },
        scores=HOPS,
        figure=curves_to_goal,
    ),
    "tasks_nano": Comparison(  # 2 to 60 minutes a run
        title="Canon improves the mean on each of these nine tasks",
        tasks=("depo0", "depo1", "depo2", "brevo1", "brevo2", "mano", "lano", "capo", "text"),
        models=PAIRS,
        scores={
            "depo0": "Depo0: 10 names, 1 to 4 hops",
            "depo1": "Depo1: 5 names, 1 or 2 hops",
            "depo2": "Depo2: 5 names, 1 or 2 hops",
            "brevo1": "Brevo1: 10 nodes",
            "brevo2": "Brevo2: 5 nodes",
            "mano": "Mano: 2 operations",
            "lano": "Lano: cfg3f from symbol 17",
            "capo": "Capo: 2,000 people",
            "text": "Text: 12 MB; fewer are better",
        },
    ),
    "fourfold_nano": Comparison(  # 3 to 18 minutes a run, and 10 to 40 in four times the steps
        title="In four times the steps, RoPE does as well as RoPE + Canon did on Depo2 and Brevo1",
        tasks=("depo1", "depo2", "brevo1", "mano", "lano"),
        models={
            "RoPE": "",
            "RoPE, 4 x the steps": "--steps 4x",
            "RoPE + Canon": "--canon abcd",
            "RoPE + Canon, 4 x the steps": "--steps 4x --canon abcd",
        },
        scores=dict(depo1="Depo1", depo2="Depo2", brevo1="Brevo1", mano="Mano", lano="Lano"),
    ),
    "text_nano": Comparison(  # 7 to 23 minutes a run
        title="On Python source code, Canon helps more than training twice as long",
        tasks=("text",),
        models={
            "RoPE": "",
            "RoPE, 2 x the steps": "--steps 2x",
            "RoPE + Canon": "--canon abcd",
            "NoPE + Canon": "--pos nope --canon abcd",
        },
        scores={"text": "Bits per byte of held-out text; fewer are better. NoPE alone: 2.60"},
        figure=curves_of_bits,
    ),
    "copy_nano": Comparison(  # a minute a run
        title="One layer of 16 dims copies lists of 64 numbers with Canon, and not one without",
        tasks=("copy",),
        models={
            "one layer": "",
            "one layer + Canon": "--canon abcd",
            "one layer + Canon, never trained": "--canon abcd --canon-frozen",
            "two layers": "--n-layer 2",
            "one layer of 128 dims": "--d-model 128",
        },
        scores={"sequences": "lists copied whole"},
        figure=plot.curves,
    ),
    "longer_nano": Comparison(  # two to seven minutes a run
        title="Trained on lists of 4 to 16 numbers, NoPE + Canon copies 32; RoPE does not",
        tasks=("longer",),
        models=LONGER,
        scores={f"{length} numbers": f"{length} numbers" for length in (16, 24, 32)},
        program="examples/longer.py",
    ),
    "sets_nano": Comparison(  # four minutes a run
        title="Are two lists the same set? Here Canon does not help",
        tasks=("sets",),
        models=SETS,
        scores={"answers": "right answers"},
        figure=plot.curves,
        program="examples/sets.py",
    ),
    "relatives_nano": Comparison(  # 15 seconds to 5 minutes a run
        title="Convolutions of 3 or 4 copy, and help on Text; on Depo1 Canon and two more lead",
        tasks=("copy", "depo1", "text"),
        models=RELATIVES,
        scores={"sequences": "Copy", "depo1": "Depo1", "text": "Text; fewer are better"},
        program="examples/relatives.py",
        sizes={
            "copy": "--N 32 --steps 500",
            "depo1": "--steps 3000",
            "text": "--steps 300",
        },
    ),
    "mqar_nano": Comparison(  # one to three minutes a run
        title="MQAR: attention + Canon recalls all; recurrences need a convolution",
        tasks=("mqar",),
        models=MQAR,
        scores={"tokens": "right answers"},
        program="examples/mqar.py",
        sizes={"mqar": "--n-layer 2"},
    ),
    "points_nano": Comparison(  # 15 seconds a run
        title="With NoPE, B alone is enough to copy 16 numbers",
        tasks=("copy",),
        models={label: f"{SIXTEEN} {flags}" for label, flags in POINTS.items()},
        scores={"tokens": "numbers right"},
    ),
    "linear_nano": Comparison(  # 9 to 36 minutes a run
        title="Beside their own convolution, Canon helps all three on text, and GLA on Depo1",
        tasks=("depo1", "text"),
        models=LINEAR,
        scores={"depo1": "Depo1: right answers", "text": "Text: bits per byte"},
    ),
    "depo1_nano": Comparison(  # 5 minutes a run
        title="Depo1: each point of Canon helps alone; B, or A and C, do nearly as well as all",
        tasks=("depo1",),
        models={
            **PAIRS,
            **QUARTER,
            "ALiBi": "--pos alibi",
            "ALiBi + Canon": "--pos alibi --canon abcd",
            "H-ALiBi": "--pos halibi",
            "H-ALiBi + Canon": "--pos halibi --canon abcd",
            "RoPE + A": "--canon a",
            "RoPE + B": "--canon b",
            "RoPE + C": "--canon c",
            "RoPE + D": "--canon d",
            "RoPE + AC": "--canon ac",
            "RoPE + ACD": "--canon acd",
            "ABCD without residual": "--canon abcd --no-canon-residual",
            "ABCD with SiLU": "--canon abcd --canon-silu",
            "ABCD, never trained": "--canon abcd --canon-frozen",
            "ABCD, kernel of 2": "--canon abcd --canon-kernel 2",
            "ABCD, kernel of 3": "--canon abcd --canon-kernel 3",
        },
        scores={"k=1": "one hop", "k=2": "two hops"},
    ),
}
