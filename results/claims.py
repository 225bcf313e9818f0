"""The paper's claims, and how the runs that are here judge them.

    python results/reproduce.py claims     judges all of them

A claim is a row of data: a score, and what must hold of it in certain models. Each part of it names
a relation and what it relates: (above, "RoPE + Canon", "RoPE"). Reading order: 1 scores made of
other scores; 2 relations; 3 verdicts; 4 the claims.
"""

import math
import statistics
from dataclasses import dataclass

import plot
from tasks import score_text

# ---- 1. Scores made of other scores ----------------------------------------

MAIN_SCORES = {  # what picks a learning rate, and stands for the task beside others
    "copy": "sequences",
    "depo0": "answers",  # the mean over the scored numbers of hops
    "depo1": "answers",
    "depo2": "answers",
    "brevo1": "all",
    "brevo2": "all",
    "mano": "longest",  # the share right of the longest expressions
    "capo": "bits/param",
    "lano": "sentences",
    "text": "bits per byte",
}
LESS_IS_BETTER = ("bits per byte", "steps")  # units
MASTERED = 0.9  # a hop counts as mastered from this share of right answers on


def add_scores(run):
    """Add to the run scores that are made of others:

    main             the task's main score
    depo0: answers   the same, under a name that no other task has

    and for Depo, at the last evaluation:

    hops mastered    the largest k up to which each scored k is mastered
    steps to k=1     the first evaluated step at which k=1 is mastered, inf if there is none
    """
    task, units = run["task"]["name"], run["units"]
    long_name = f"{task}: {MAIN_SCORES[task]}"
    units["main"] = units[long_name] = units.get(MAIN_SCORES[task], "share")
    for evaluation in run["evals"]:
        scores = evaluation["eval"]
        scores["main"] = scores[long_name] = main_score(task, scores)
    if task.startswith("depo"):
        units |= {"hops mastered": "hops", "steps to k=1": "steps"}
        last = run["evals"][-1]["eval"]
        last["hops mastered"] = hops_mastered(last)
        steps = [each["step"] for each in run["evals"] if each["eval"]["k=1"] >= MASTERED]
        last["steps to k=1"] = min(steps, default=math.inf)


def main_score(task, scores):
    if task.startswith("depo"):
        return statistics.mean(scores[name] for name in scores if name.startswith("k="))
    if task == "mano":
        lengths = [name for name in scores if name.startswith("l=")]
        return scores[lengths[-1]]
    return scores[MAIN_SCORES[task]]


def hops_mastered(scores):
    mastered = 0
    for name, share in scores.items():  # k=1 comes first
        if name.startswith("k="):
            if share < MASTERED:
                break
            mastered = int(name.removeprefix("k="))
    return mastered


# ---- 2. Relations ----------------------------------------------------------
#
# A relation says of models' scores, one a seed, whether it holds: True, False, or None if seeds
# disagree. Its docstring is what claims.md prints, with the models in place of {0}, {1} ..

MARGIN = 0.05  # so much above a guess is still chance, and so much worse is still close
CEILING = 0.98  # from this share on, models cannot be told apart


@dataclass
class Seeds:
    """The last scores of a model's runs, one a seed, with a sign such that more is better."""

    values: list
    chance: float = -math.inf  # a model that has learnt nothing scores at most this
    ceiling: float = math.inf

    def __post_init__(self):
        self.lowest = min(self.values)
        self.highest = max(self.values)
        self.mean = statistics.mean(self.values)


def above(a, b):
    """every seed of {0} is better than every seed of {1}"""
    if a.lowest > b.highest:
        return True
    return False if a.highest < b.lowest else None


def reaches(a, goal):
    """every seed of {0} reaches {1:.0%}"""
    if a.lowest >= goal:
        return True
    return False if a.highest < goal else None


def close(a, b):
    """no seed of {0} is worse than the mean of {1} by more than 0.05"""
    return reaches(a, b.mean - MARGIN)


def half_way(a, start, end):
    """every seed of {0} is at least half way from the mean of {1} to the mean of {2}"""
    if end.lowest <= start.highest:
        return None  # there is no way to go
    return reaches(a, (start.mean + end.mean) / 2)


def times(a, b, factor):
    """every seed of {0} is at least {2} times as high as every seed of {1}"""
    if b.highest <= b.chance:
        return None  # nothing is a multiple of a model that has learnt nothing
    if a.lowest >= factor * b.highest:
        return True
    return False if a.highest < factor * b.lowest else None


def at_chance(a):
    """every seed of {0} is at chance"""
    if a.highest <= a.chance:
        return True
    return False if a.lowest > a.chance else None


def errs(a, share):
    """every seed of {0} is above chance and below {1:.0%}"""
    if a.lowest > a.chance and a.highest < share:
        return True
    return False if a.lowest >= share else None


# ---- 3. Verdicts -----------------------------------------------------------

SEEDS = 3  # fewer decide nothing

FAILS = "does not hold"
NOT_RUN = "not run"
TOO_FEW = "undecided: too few seeds"
UNDECIDED = "undecided"
AT_CHANCE = "undecided: at chance"
AT_CEILING = "undecided: at the ceiling"
HOLDS = "holds"
# Of a claim's parts, the one that comes first here decides.
VERDICTS = (FAILS, NOT_RUN, TOO_FEW, UNDECIDED, AT_CHANCE, AT_CEILING, HOLDS)


@dataclass
class Claim:
    result: str  # of the paper: "R1" to "R12"
    title: str
    comparison: str  # in comparisons.py
    score: str  # "main" is the task's main score
    parts: list  # [(relation, model, ..), ..]: all of them must hold
    tasks: tuple = ("depo0", "depo1")  # the claim is judged on each of them that has runs
    paper: str | dict = ""  # the paper's numbers, or {task: numbers}
    blind: tuple = ()  # the tasks on which no run was known when the rule was written

    def star(self, task):
        """An asterisk if runs on this task were known when the rule was written."""
        return "" if task in self.blind else "*"

    def paper_on(self, task):
        return self.paper if isinstance(self.paper, str) else self.paper.get(task, "")

    def models(self):
        found = []
        for _, *arguments in self.parts:
            found += [each for each in arguments if isinstance(each, str) and each not in found]
        return found

    def rule(self):
        """The rule in words."""
        texts = []
        for relation, *arguments in self.parts:
            shown = [f"`{each}`" if isinstance(each, str) else each for each in arguments]
            texts.append(relation.__doc__.format(*shown))
        return "; ".join(texts)


def judge(claim, groups):
    """One of VERDICTS. groups: {model: its runs on one task}"""
    verdicts = [judge_part(part, claim.score, groups) for part in claim.parts]
    return min(verdicts, key=VERDICTS.index)


def judge_part(part, score, groups):
    """The verdict on one part of a claim: (relation, model, ..)."""
    relation, *arguments = part
    models = [each for each in arguments if isinstance(each, str)]
    fewest = min(len(groups.get(model, [])) for model in models)
    if fewest < SEEDS:
        return TOO_FEW if fewest else NOT_RUN
    seeds = {model: seeds_of(groups[model], score) for model in models}
    if len(models) > 1:
        if all(each.highest <= each.chance for each in seeds.values()):
            return AT_CHANCE
        ceiling = max(each.ceiling for each in seeds.values())
        if all(each.lowest >= ceiling for each in seeds.values()):
            return AT_CEILING
    holds = relation(*[seeds.get(each, each) for each in arguments])
    return {True: HOLDS, False: FAILS, None: UNDECIDED}[holds]


def seeds_of(runs, score):
    """The Seeds of a model, from its runs on one task."""
    values, unit = plot.last_scores(runs, score), runs[0]["units"][score]
    if unit in LESS_IS_BETTER:
        return Seeds([-value for value in values])
    if unit == "share":
        return Seeds(values, chance=(runs[0]["chance"] or 0) + MARGIN, ceiling=CEILING)
    if unit == "hops":
        return Seeds(values, chance=0, ceiling=runs[0]["task"]["K"])
    return Seeds(values)


def seeds_in_print(claim, task, groups):
    """Each seed of each model: "sequences: `one layer` 0%, 0%; `two layers` 100%, 100%"."""
    texts = []
    for model in claim.models():
        runs, shown = groups.get(model, []), []
        for value in plot.last_scores(runs, claim.score):
            unit = runs[0]["units"][claim.score]
            shown.append(f"{value:,.0f}" if unit == "steps" else score_text(value, unit))
        texts.append(f"`{model}` {', '.join(shown)}")
    score = MAIN_SCORES[task] if claim.score == "main" else claim.score
    return f"{score}: {'; '.join(texts)}"


# ---- 4. The claims ---------------------------------------------------------

RESULTS = {
    "R1": "copying in one layer",
    "R2": "depth, and the other tasks",
    "R3": "without positions",
    "R4": "the points and the variants",
    "R5": "gated and standard MLPs",
    "R6": "GLA with Canon",
    "R7": "Mamba2 without its convolution",
    "R8": "Gated DeltaNet without its convolution",
    "R9": "Canon in place of the built-in convolution, and beside it",
    "R10": "attention and recurrences, all with Canon",
    "R11": "what limits recurrences",
    "R12": "real text",
}
DEPO0 = ("depo0",)
DEPO = ("depo0", "depo1")
OTHERS = ("depo2", "brevo1", "brevo2", "mano", "capo", "lano")
TEXT = ("text",)
HOPS = "hops mastered"

# fmt: off
CLAIMS = [
    Claim("R1", "One layer copies with Canon, and not without", "copy", "main",
          [(reaches, "one layer + Canon", 0.9), (at_chance, "one layer")],
          tasks=("copy",), paper="100%; 0%"),
    Claim("R1", "Twice the steps do not make up for Canon", "copy", "main",
          [(above, "one layer + Canon", "one layer, twice the steps")],
          tasks=("copy",)),
    Claim("R1", "Two layers copy without Canon, and so do 128 dims", "copy", "main",
          [(reaches, "two layers", 0.9), (reaches, "128 dims", 0.9)],
          tasks=("copy",)),

    # R2: Canon with rotary positions
    Claim("R2", "Canon reasons deeper", "hops", HOPS,
          [(above, "RoPE + Canon", "RoPE")],
          paper="2-4 times", blind=DEPO0),
    Claim("R2", "Canon reasons twice as deep", "hops", HOPS,
          [(times, "RoPE + Canon", "RoPE", 2)],
          paper="2-4 times", blind=DEPO0),
    Claim("R2", "Twice the steps do not make up for Canon (RoPE)", "fewer", "main",
          [(above, "RoPE + Canon", "RoPE, twice the steps")],
          blind=DEPO0),
    Claim("R2", "Twice the steps do not make up for Canon (NoPE)", "fewer", "main",
          [(above, "NoPE + Canon", "NoPE, twice the steps")],
          blind=DEPO0),
    Claim("R2", "RoPE + Canon masters twice as many hops as RoPE at K=1, and at K=2 in twice the "
          "steps", "fewer", HOPS,
          [(times, "RoPE + Canon", "RoPE, K=1", 2),
           (times, "RoPE + Canon", "RoPE, K=2, twice the steps", 2)],
          tasks=DEPO0, paper="2-4 times"),
    Claim("R2", "Canon masters more of two hops", "fewer", HOPS,
          [(above, "RoPE + Canon, K=2", "RoPE, K=2")],
          tasks=DEPO0),
    Claim("R2", "At K=4 Canon masters one hop sooner than RoPE at K=1", "fewer", "steps to k=1",
          [(above, "RoPE + Canon", "RoPE, K=1"), (above, "NoPE + Canon", "RoPE, K=1")],
          tasks=DEPO0),
    Claim("R2", "Canon helps RoPE", "tasks", "main",
          [(above, "RoPE + Canon", "RoPE")],
          tasks=("depo1", *OTHERS),
          paper={"depo1": "0% to 94% (k=8)", "depo2": "30% to 99% (k=16)",
                 "brevo1": "27.5% to 58.8%", "brevo2": "81.4% to 87.8%",
                 "mano": "41.6% to 83.0%", "capo": "10-15%", "lano": "79.1% to 86.7%"}),

    Claim("R2", "Four times the steps do not make up for Canon", "longer", "main",
          [(above, "RoPE + Canon", "RoPE, four times the steps")],
          tasks=("depo1", "depo2", "brevo1", "mano", "lano"),
          blind=("depo1", "depo2", "mano", "lano")),
    Claim("R2", "RoPE + Canon masters twice as many hops as RoPE in four times the steps", "longer",
          HOPS,
          [(times, "RoPE + Canon", "RoPE, four times the steps", 2)],
          tasks=("depo1",), paper="2-4 times"),
    Claim("R2", "In four times the steps Canon helps, too", "longer", "main",
          [(above, "RoPE + Canon, four times the steps", "RoPE, four times the steps")],
          tasks=("brevo1", "lano"), blind=("lano",)),

    # R3: positions
    Claim("R3", "NoPE learns next to nothing, and more with Canon", "nope", "main",
          [(at_chance, "NoPE"), (above, "NoPE + Canon", "NoPE")],
          paper="0% (k=8)"),
    Claim("R3", "NoPE + Canon is as good as RoPE + Canon", "nope", "main",
          [(close, "NoPE + Canon", "RoPE + Canon")],
          paper="100%; 94% (k=8)"),
    Claim("R3", "NoPE + Canon beats ALiBi and H-ALiBi", "nope", "main",
          [(above, "NoPE + Canon", "ALiBi"), (above, "NoPE + Canon", "H-ALiBi")],
          blind=DEPO),
    Claim("R3", "With Canon, RoPE(1/4) is as good as RoPE", "nope", "main",
          [(close, "RoPE(1/4) + Canon", "RoPE + Canon")],
          paper="100% (k=8)", blind=DEPO0),
    Claim("R3", "NoPE + Canon is as good as RoPE + Canon", "tasks", "main",
          [(close, "NoPE + Canon", "RoPE + Canon")],
          tasks=OTHERS,
          paper={"depo2": "99%; 99% (k=16)", "brevo1": "84.9%; 58.8%", "brevo2": "79.9%; 87.8%",
                 "mano": "94.3%; 83.0%", "lano": "53.1%; 86.7%"}),
    Claim("R3", "Canon lifts NoPE", "tasks", "main",
          [(above, "NoPE + Canon", "NoPE")],
          tasks=("depo1", *OTHERS)),

    # R4: points and variants
    Claim("R4", "A, B, C and D each help alone", "ablation", "main",
          [(above, point, "none") for point in "ABCD"],
          paper="yes", blind=DEPO0),
    Claim("R4", "All four points beat any one", "ablation", "main",
          [(above, "ABCD", point) for point in "ABCD"],
          blind=DEPO0),
    Claim("R4", "A and C do half of the work", "ablation", "main",
          [(half_way, "AC", "none", "ABCD")],
          paper="strong", blind=DEPO0),
    Claim("R4", "Frozen weights do half of the work", "ablation", "main",
          [(half_way, "frozen", "none", "ABCD")],
          paper="a lot", blind=DEPO0),
    Claim("R4", "Canon is better with its residual", "ablation", "main",
          [(above, "ABCD", "no residual")],
          blind=DEPO0),
    Claim("R4", "Canon is better without a SiLU", "ablation", "main",
          [(above, "ABCD", "SiLU")],
          paper="no help", blind=DEPO0),

    # R5: MLPs
    Claim("R5", "Gated MLPs calculate better", "mlp", "main",
          [(above, "gated", "standard")],
          tasks=("mano",), paper="slightly"),
    Claim("R5", "ReLU^2 helps the standard MLP", "mlp", "main",
          [(above, "ReLU^2", "standard")],
          tasks=("mano",), paper="slightly"),
    Claim("R5", "Gated MLPs store less", "mlp", "main",
          [(above, "standard", "gated")],
          tasks=("capo",)),

    # R6 to R9: recurrences and their own convolutions
    Claim("R6", "GLA is weaker than Mamba2, and matches it with AbCD", "linear", "main",
          [(above, "Mamba2, conv", "GLA, no conv"), (close, "GLA + AbCD", "Mamba2, conv")],
          paper="19% to 50%; 43% (k=4)", blind=DEPO0),
    Claim("R7", "Mamba2 without its convolution falls to GLA's level", "linear", "main",
          [(above, "Mamba2, conv", "Mamba2, no conv"), (close, "GLA, no conv", "Mamba2, no conv")],
          paper="43% to 6%; 19% (k=4)", blind=DEPO0),
    Claim("R8", "Of the recurrences without convolutions, GDN is best", "linear", "main",
          [(above, "GDN, no conv", "Mamba2, no conv"), (above, "GDN, no conv", "GLA, no conv")],
          paper="22%; 6%, 19% (k=4)", blind=DEPO0),
    Claim("R9", "Canon-ACD matches the built-in convolution", "linear", "main",
          [(close, "Mamba2 + ACD", "Mamba2, conv"), (close, "GDN + ACD", "GDN, conv")],
          blind=DEPO0),
    Claim("R9", "Canon does the built-in convolution no harm", "linear", "main",
          [(close, "Mamba2 + AbCD", "Mamba2, conv"), (close, "GDN + AbCD", "GDN, conv")],
          paper="+44, +59 points (k=4)", blind=DEPO0),

    # R10 and R11: attention and recurrences, all with Canon
    Claim("R10", "With Canon, NoPE is about as good as RoPE(1/4)", "families", "main",
          [(close, "NoPE + Canon", "RoPE(1/4) + Canon"),
           (close, "RoPE(1/4) + Canon", "NoPE + Canon")],
          blind=DEPO0),
    Claim("R11", "A hybrid reasons deeper than a recurrence", "families", HOPS,
          [(above, "GDN/RoPE + AbCD", "GDN + AbCD")],
          blind=DEPO0),

    # R12: real text. The paper trains on web text; here it is Python's standard library.
    Claim("R12", "Canon helps RoPE on real text", "text", "main",
          [(above, "RoPE + Canon", "RoPE")],
          tasks=TEXT),
    Claim("R12", "Canon helps NoPE on real text", "text", "main",
          [(above, "NoPE + Canon", "NoPE")],
          tasks=TEXT),
    Claim("R12", "With Canon, NoPE is as good as RoPE on real text", "text", "main",
          [(close, "NoPE + Canon", "RoPE + Canon")],
          tasks=TEXT),
    Claim("R12", "Neither one more layer nor twice the steps makes up for Canon on real text",
          "text", "main",
          [(above, "RoPE + Canon", "RoPE, one more layer"),
           (above, "RoPE + Canon", "RoPE, twice the steps")],
          tasks=TEXT, blind=TEXT),
]
# Claims about each of the three recurrences
for mixer in ("GLA", "Mamba2", "GDN"):
    full = f"{mixer} + AbCD"
    CLAIMS += [
        Claim("R10", f"Attention reasons twice as deep as {full}", "families", HOPS,
              [(times, "RoPE(1/4) + Canon", full, 2), (times, "NoPE + Canon", full, 2)],
              paper="2-4 times", blind=DEPO0),
        Claim("R10", f"{full} stores 1.2 times as much per parameter as attention", "capacity",
              "main",
              [(times, full, "RoPE(1/4) + Canon", 1.2)],
              tasks=("capo",), paper="1.4 times"),
        Claim("R11", f"{full} errs at one hop, and more than attention", "families", "k=1",
              [(errs, full, 0.99), (above, "RoPE(1/4) + Canon", full)]),
        Claim("R12", f"{full} is as good as attention with Canon on real text", "text", "main",
              [(close, full, "RoPE + Canon")],
              tasks=TEXT, blind=TEXT),
        Claim("R12", f"Canon-ACD beside its own convolution helps {mixer} on real text", "text",
              "main",
              [(above, full, f"{mixer}, conv")],
              tasks=TEXT, blind=TEXT),
        Claim("R12", f"Its own convolution helps {mixer} on real text", "text", "main",
              [(above, f"{mixer}, conv", f"{mixer}, no conv")],
              tasks=TEXT, blind=TEXT),
    ]
# fmt: on
