"""The paper's claims, and the rules that judge them by the runs that are here.

A claim is a function that says, in the words of section 3, what must hold of the last scores of
models. Its decorator names the paper's result, the comparison whose models it is about, the tasks
that it is judged on and the paper's own numbers. Reading order: 1 scores made of other scores;
2 verdicts; 3 what can be said of models; 4 the claims.

    python results/reproduce.py claims     judges all of them
"""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks import score_text

# ---- 1. Scores made of other scores ----------------------------------------

MAIN_SCORES = {  # what picks a learning rate, and stands for the task beside others
    "copy": "sequences",
    "depo0": "answers",
    "depo1": "answers",
    "depo2": "answers",
    "brevo1": "all",
    "brevo2": "all",
    "mano": "longest",
    "capo": "bits/param",
    "lano": "sentences",
    "text": "bits per byte",
}
LESS_IS_BETTER = ("bits per byte", "nats", "steps")  # units
MASTERED = 0.9  # a hop counts as mastered from this share of right answers on


def with_made_scores(run):
    """A copy of the run with more scores in every evaluation:

    answers          Depo: the mean over the scored k, which are numbers of hops
    hops mastered    Depo: the largest k up to which each scored k is mastered
    steps to k=1     Depo: the first evaluated step at which k=1 is mastered, inf before
    longest          Mano: the share right of the longest expressions
    depo0: answers   any task: its main score, under a name that no other task has

    and with "main", the name of its task's main score: for a task of one's own its first score.
    """
    task, units = run["task"]["name"], dict(run["units"])
    main = MAIN_SCORES.get(task, list(run["evals"][-1]["eval"])[0])
    evals, steps_to_first = [], math.inf
    for evaluation in run["evals"]:
        step, scores = evaluation["step"], dict(evaluation["eval"])
        if task.startswith("depo"):
            hops = [score for score in scores if score.startswith("k=")]
            scores["answers"] = statistics.mean(scores[score] for score in hops)
            scores["hops mastered"] = hops_mastered(scores, hops)
            if scores["k=1"] >= MASTERED:
                steps_to_first = min(steps_to_first, step)
            scores["steps to k=1"] = steps_to_first
            units.update({"answers": "share", "hops mastered": "hops", "steps to k=1": "steps"})
        if task == "mano":
            lengths = [score for score in scores if score.startswith("l=")]
            scores["longest"] = scores[lengths[-1]]
            units["longest"] = "share"
        if main in scores:  # a task of one's own may not score it each time
            scores[f"{task}: {main}"] = scores[main]
        evals.append({"step": step, "eval": scores})
    units.setdefault(main, "")  # a run begun before train.py asked for it may lack it
    units[f"{task}: {main}"] = units[main]
    return {**run, "evals": evals, "units": units, "main": main}


def hops_mastered(scores, hops):
    """hops: the scored k as scores' names, from few hops to many."""
    mastered = 0
    for score in hops:
        if scores[score] < MASTERED:
            break
        mastered = int(score.removeprefix("k="))
    return mastered


def last_score(run, score):
    """The run's score at the end, None if it has no such score."""
    return run["evals"][-1]["eval"].get(score)


# ---- 2. Verdicts -----------------------------------------------------------
#
# A rule compares all seeds of models. It holds, does not hold, or is undecided.

SEEDS = 3  # fewer decide nothing
MARGIN = 0.05  # so much above a guess is still chance, and so much below is still close: five
# points of a share, 0.05 bits per parameter
MARGIN_BITS = 0.05  # bits per byte: so much worse is still close
CEILING = 0.98  # from this share on, models cannot be told apart

NOT_RUN = "not run"
TOO_FEW = "undecided: too few seeds"
AT_CHANCE = "undecided: at chance"
AT_CEILING = "undecided: at the ceiling"
UNDECIDED = "undecided"  # seeds overlap, or a ratio to a model that has learnt nothing
FAILS = "does not hold"
HOLDS = "holds"


@dataclass
class Seeds:
    """The last scores of a model's runs, one a seed."""

    model: str
    score: str
    values: list
    unit: str = "share"
    chance: float = MARGIN  # a model that has learnt nothing scores at most this
    ceiling: float = CEILING

    @property
    def lowest(self):
        return min(self.values, default=math.nan)

    @property
    def highest(self):
        return max(self.values, default=math.nan)

    @property
    def mean(self):
        return statistics.mean(self.values) if self.values else math.nan

    def __str__(self):
        """The model's name, as it stands in a rule."""
        return f"`{self.model}`"

    def in_print(self):
        """Each seed: "11%, 12%, 10%"."""
        if self.unit == "steps":
            texts = ["never" if math.isinf(value) else f"{value:,.0f}" for value in self.values]
        else:
            texts = [score_text(value, self.unit) for value in self.values]
        return ", ".join(texts)


def seeds_of(runs, model, score):
    """The Seeds of a model, from its runs on one task. "main" is the task's main score."""
    if score == "main" and runs:
        score = runs[0]["main"]
    runs = [run for run in runs if last_score(run, score) is not None]
    values = [last_score(run, score) for run in runs]
    if not runs:
        return Seeds(model, score, values)
    unit = runs[0]["units"].get(score)
    chance, ceiling = 0, math.nan  # nan: no value reaches it
    if unit == "share":
        chance, ceiling = (runs[0]["chance"] or 0) + MARGIN, CEILING
    if unit == "hops":
        ceiling = runs[0]["task"]["K"]
    return Seeds(model, score, values, unit, chance, ceiling)


@dataclass
class Verdict:
    rule: str  # in words
    outcome: str  # one of those above
    seeds: list  # of each model that it is about: Seeds


def decide(rule, seeds, holds, fails):
    """The verdict on a rule about models, from whether it holds and whether it fails.

    seeds: a list, of each model its Seeds. With fewer than three seeds the verdict is undecided,
    whatever holds. So it is where several models are compared, and all are at chance or all at the
    ceiling.
    """
    comparison = len(seeds) > 1
    chance = max(its.chance for its in seeds)
    ceiling = max(its.ceiling for its in seeds)
    if any(not its.values for its in seeds):
        outcome = NOT_RUN
    elif any(len(its.values) < SEEDS for its in seeds):
        outcome = TOO_FEW
    elif comparison and all(its.highest <= chance for its in seeds):
        outcome = AT_CHANCE
    elif comparison and all(its.lowest >= ceiling for its in seeds):
        outcome = AT_CEILING
    elif holds:
        outcome = HOLDS
    elif fails:
        outcome = FAILS
    else:
        outcome = UNDECIDED
    return Verdict(rule, outcome, seeds)


def all_hold(*verdicts):
    """Each of the rules holds. What fails decides first, then what has not been run."""
    order = [FAILS, NOT_RUN, TOO_FEW, UNDECIDED, AT_CHANCE, AT_CEILING, HOLDS]
    outcome = min((verdict.outcome for verdict in verdicts), key=order.index)
    found = {}
    for verdict in verdicts:
        for seeds in verdict.seeds:
            found[seeds.model, seeds.score] = seeds
    rule = "; ".join(verdict.rule for verdict in verdicts)
    return Verdict(rule, outcome, list(found.values()))


# ---- 3. What can be said of models -----------------------------------------
#
# Each takes Seeds and returns a Verdict. Its rule is what claims.md prints.


def above(a, b):
    rule = f"every seed of {a} is above every seed of {b}"
    return decide(rule, [a, b], holds=a.lowest > b.highest, fails=a.highest < b.lowest)


def at_least_times(a, factor, b):
    """Nothing is a multiple of a model that has learnt nothing: then it is undecided."""
    rule = f"every seed of {a} is at least {factor:g} times as high as every seed of {b}"
    learnt = b.highest > b.chance
    holds = learnt and a.lowest >= factor * b.highest
    fails = learnt and a.highest < factor * b.lowest
    return decide(rule, [a, b], holds, fails)


def close_to(a, b):
    margin = f"{100 * MARGIN:g} points" if a.unit == "share" else f"{MARGIN:g}"
    rule = f"no seed of {a} is more than {margin} below the mean of {b}"
    goal = b.mean - MARGIN
    return decide(rule, [a, b], holds=a.lowest >= goal, fails=a.highest < goal)


def less(a, b, what):
    """what: in words, such as "needs fewer bits"."""
    rule = f"every seed of {a} {what} than every seed of {b}"
    return decide(rule, [a, b], holds=a.highest < b.lowest, fails=a.lowest > b.highest)


def needs_fewer_bits(a, b):
    return less(a, b, "needs fewer bits")


def takes_fewer_steps(a, b):
    return less(a, b, "takes fewer steps")


def needs_hardly_more_bits(a, b):
    rule = f"every seed of {a} needs less than {MARGIN_BITS} bits more than the mean of {b}"
    goal = b.mean + MARGIN_BITS
    return decide(rule, [a, b], holds=a.highest < goal, fails=a.lowest >= goal)


def covers(a, share, start, end):
    """Unless every seed of end is above every seed of start, there is no gap to cover, and the rule
    is undecided."""
    gap = f"the gap from the mean of {start} to the mean of {end}"
    rule = f"every seed of {a} covers at least {share:.0%} of {gap}"
    goal = start.mean + share * (end.mean - start.mean)
    apart = end.lowest > start.highest
    holds = apart and a.lowest >= goal
    fails = apart and a.highest < goal
    return decide(rule, [a, start, end], holds, fails)


def reaches(a, share):
    rule = f"every seed of {a} reaches {share:.0%}"
    return decide(rule, [a], holds=a.lowest >= share, fails=a.highest < share)


def above_chance_but_below(a, share):
    rule = f"every seed of {a} is above chance and below {share:.0%}"
    holds = a.lowest > a.chance and a.highest < share
    return decide(rule, [a], holds, fails=a.lowest >= share)


def at_chance(a):
    rule = f"every seed of {a} is at chance"
    return decide(rule, [a], holds=a.highest <= a.chance, fails=a.lowest > a.chance)


# ---- 4. The claims ---------------------------------------------------------
#
# `seeds(model, score)` gives the Seeds of a model of the comparison, on the task that is judged.

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
DEPO = ("depo0", "depo1")  # (depo2 is judged by its main score, as other tasks are)
ALL_BUT_DEPO = ("depo2", "brevo1", "brevo2", "mano", "capo", "lano")
ALL_BUT_DEPO0 = ("depo1", *ALL_BUT_DEPO)
RECURRENCES = ("GLA + AbCD", "Mamba2 + AbCD", "GDN + AbCD")
CLAIMS = []


@dataclass
class Claim:
    result: str  # of the paper: "R1" to "R12"
    title: str
    comparison: str  # in comparisons.py
    tasks: tuple  # the claim is judged on each of them that has runs
    paper: str | dict  # the paper's numbers, or {task: numbers}
    before_the_runs: tuple  # the tasks on which no run was known when the rule was written
    function: Callable  # it returns the Verdict
    about: str | None  # what stands for {} in the title; None: there is no {}

    def judge(self, groups):
        """The Verdict, from {model: its runs on one task}."""

        def seeds(model, score):
            return seeds_of(groups.get(model, []), model, score)

        if self.about is None:
            return self.function(seeds)
        return self.function(seeds, self.about)

    def paper_on(self, task):
        """The paper's numbers."""
        return self.paper if isinstance(self.paper, str) else self.paper.get(task, "")

    def star(self, task):
        """An asterisk if runs on this task were known when the rule was written."""
        return "" if task in self.before_the_runs else "*"


def claim(result, title, comparison, tasks, paper="", before_the_runs=(), each=(None,)):
    """Enter the function below into CLAIMS. With `each`, enter it once for each of these names. The
    name takes the place of {} in the title, and is the function's second argument."""

    if result not in RESULTS:
        raise ValueError(f"result = {result!r}: allowed: {', '.join(RESULTS)}")

    def enter(rule):
        for about in each:
            full_title = title.format(about)
            CLAIMS.append(
                Claim(result, full_title, comparison, tasks, paper, before_the_runs, rule, about)
            )
        return rule

    return enter


# R1: copying


@claim("R1", "One layer copies with Canon, and not without", "copy", ("copy",), paper="100%; 0%")
def one_layer_copies_with_canon_only(seeds):
    return all_hold(
        reaches(seeds("one layer + Canon", "sequences"), 0.9),
        at_chance(seeds("one layer", "sequences")),
    )


@claim("R1", "Twice the steps do not make up for Canon", "copy", ("copy",))
def copying_takes_more_than_twice_the_steps(seeds):
    return above(
        seeds("one layer + Canon", "sequences"), seeds("one layer, twice the steps", "sequences")
    )


@claim("R1", "Two layers copy without Canon, and so do 128 dims", "copy", ("copy",))
def larger_models_copy_without_canon(seeds):
    return all_hold(
        reaches(seeds("two layers", "sequences"), 0.9), reaches(seeds("128 dims", "sequences"), 0.9)
    )


# R2: Canon with rotary positions


@claim("R2", "Canon reasons deeper", "hops", DEPO, paper="2-4 times", before_the_runs=DEPO0)
def canon_reasons_deeper(seeds):
    return above(seeds("RoPE + Canon", "hops mastered"), seeds("RoPE", "hops mastered"))


@claim("R2", "Canon reasons twice as deep", "hops", DEPO, paper="2-4 times", before_the_runs=DEPO0)
def canon_reasons_twice_as_deep(seeds):
    return at_least_times(seeds("RoPE + Canon", "hops mastered"), 2, seeds("RoPE", "hops mastered"))


@claim(
    "R2",
    "Twice the steps do not make up for Canon ({})",
    "depth",
    DEPO,
    before_the_runs=DEPO0,
    each=("RoPE", "NoPE"),
)
def hops_take_more_than_twice_the_steps(seeds, positions):
    return above(
        seeds(f"{positions} + Canon", "answers"), seeds(f"{positions}, twice the steps", "answers")
    )


@claim(
    "R2",
    "RoPE + Canon masters twice as many hops as RoPE at K=1, and at K=2 in twice the steps",
    "fewer",
    DEPO0,
    paper="2-4 times",
)
def canon_masters_twice_as_many_hops_as_the_best_rope(seeds):
    hops = seeds("RoPE + Canon", "hops mastered")
    return all_hold(
        at_least_times(hops, 2, seeds("RoPE, K=1", "hops mastered")),
        at_least_times(hops, 2, seeds("RoPE, K=2, twice the steps", "hops mastered")),
    )


@claim("R2", "Canon masters more of two hops", "fewer", DEPO0)
def canon_masters_more_of_two_hops(seeds):
    return above(seeds("RoPE + Canon, K=2", "hops mastered"), seeds("RoPE, K=2", "hops mastered"))


@claim("R2", "At K=4 Canon masters one hop sooner than RoPE at K=1", "fewer", DEPO0)
def canon_masters_one_hop_sooner(seeds):
    rope = seeds("RoPE, K=1", "steps to k=1")
    return all_hold(
        takes_fewer_steps(seeds("RoPE + Canon", "steps to k=1"), rope),
        takes_fewer_steps(seeds("NoPE + Canon", "steps to k=1"), rope),
    )


@claim(
    "R2",
    "Canon helps RoPE",
    "tasks",
    ALL_BUT_DEPO0,
    paper={
        "depo1": "0% to 94% (k=8)",
        "depo2": "30% to 99% (k=16)",
        "brevo1": "27.5% to 58.8%",
        "brevo2": "81.4% to 87.8%",
        "mano": "41.6% to 83.0%",
        "capo": "10-15%",
        "lano": "79.1% to 86.7%",
    },
)
def canon_helps_rope(seeds):
    return above(seeds("RoPE + Canon", "main"), seeds("RoPE", "main"))


# R3: positions


@claim("R3", "NoPE learns next to nothing, and more with Canon", "nope", DEPO, paper="0% (k=8)")
def nope_alone_learns_next_to_nothing(seeds):
    nope = seeds("NoPE", "answers")
    return all_hold(at_chance(nope), above(seeds("NoPE + Canon", "answers"), nope))


@claim("R3", "NoPE + Canon is as good as RoPE + Canon", "nope", DEPO, paper="100%; 94% (k=8)")
def nope_is_as_good_as_rope(seeds):
    return close_to(seeds("NoPE + Canon", "answers"), seeds("RoPE + Canon", "answers"))


@claim("R3", "NoPE + Canon beats ALiBi and H-ALiBi", "nope", DEPO, before_the_runs=DEPO)
def nope_beats_alibi(seeds):
    nope = seeds("NoPE + Canon", "answers")
    return all_hold(
        above(nope, seeds("ALiBi", "answers")), above(nope, seeds("H-ALiBi", "answers"))
    )


@claim(
    "R3",
    "With Canon, RoPE(1/4) is as good as RoPE",
    "nope",
    DEPO,
    paper="100% (k=8)",
    before_the_runs=DEPO0,
)
def a_quarter_of_rope_is_as_good(seeds):
    return close_to(seeds("RoPE(1/4) + Canon", "answers"), seeds("RoPE + Canon", "answers"))


@claim(
    "R3",
    "NoPE + Canon is as good as RoPE + Canon",
    "tasks",
    ALL_BUT_DEPO,
    paper={
        "depo2": "99%; 99% (k=16)",
        "brevo1": "84.9%; 58.8%",
        "brevo2": "79.9%; 87.8%",
        "mano": "94.3%; 83.0%",
        "lano": "53.1%; 86.7%",
    },
)
def nope_is_as_good_as_rope_elsewhere(seeds):
    return close_to(seeds("NoPE + Canon", "main"), seeds("RoPE + Canon", "main"))


@claim("R3", "Canon lifts NoPE", "tasks", ALL_BUT_DEPO0)
def canon_lifts_nope(seeds):
    return above(seeds("NoPE + Canon", "main"), seeds("NoPE", "main"))


# R4: points and variants


@claim("R4", "A, B, C and D each help alone", "ablation", DEPO, before_the_runs=DEPO0)
def each_point_helps_alone(seeds):
    none = seeds("none", "answers")
    return all_hold(
        above(seeds("A", "answers"), none),
        above(seeds("B", "answers"), none),
        above(seeds("C", "answers"), none),
        above(seeds("D", "answers"), none),
    )


@claim("R4", "All four points beat any one", "ablation", DEPO, before_the_runs=DEPO0)
def all_four_points_beat_any_one(seeds):
    everywhere = seeds("ABCD", "answers")
    return all_hold(
        above(everywhere, seeds("A", "answers")),
        above(everywhere, seeds("B", "answers")),
        above(everywhere, seeds("C", "answers")),
        above(everywhere, seeds("D", "answers")),
    )


@claim("R4", "A and C do half of the work", "ablation", DEPO, paper="strong", before_the_runs=DEPO0)
def a_and_c_do_half_of_the_work(seeds):
    return covers(
        seeds("AC", "answers"), 0.5, start=seeds("none", "answers"), end=seeds("ABCD", "answers")
    )


@claim(
    "R4",
    "Frozen weights do half of the work",
    "ablation",
    DEPO,
    paper="a lot",
    before_the_runs=DEPO0,
)
def frozen_weights_do_half_of_the_work(seeds):
    return covers(
        seeds("frozen", "answers"),
        0.5,
        start=seeds("none", "answers"),
        end=seeds("ABCD", "answers"),
    )


@claim("R4", "Canon is better with its residual", "ablation", DEPO, before_the_runs=DEPO0)
def canon_is_better_with_its_residual(seeds):
    return above(seeds("ABCD", "answers"), seeds("no residual", "answers"))


@claim(
    "R4", "Canon is better without a SiLU", "ablation", DEPO, paper="no help", before_the_runs=DEPO0
)
def a_silu_does_harm(seeds):
    return above(seeds("ABCD", "answers"), seeds("SiLU", "answers"))


# R5: MLPs


@claim("R5", "Gated MLPs calculate better", "mlp", ("mano",), paper="slightly")
def gated_mlps_calculate_better(seeds):
    return above(seeds("gated", "longest"), seeds("standard", "longest"))


@claim("R5", "ReLU^2 helps the standard MLP", "mlp", ("mano",), paper="slightly")
def relu2_helps_the_standard_mlp(seeds):
    return above(seeds("ReLU^2", "longest"), seeds("standard", "longest"))


@claim("R5", "Gated MLPs store less", "mlp", ("capo",))
def gated_mlps_store_less(seeds):
    return above(seeds("standard", "bits/param"), seeds("gated", "bits/param"))


# R6 to R9: recurrences and their own convolutions


@claim(
    "R6",
    "GLA is weaker than Mamba2, and matches it with AbCD",
    "linear",
    DEPO,
    paper="19% to 50%; 43% (k=4)",
    before_the_runs=DEPO0,
)
def canon_brings_gla_up_to_mamba2(seeds):
    mamba2 = seeds("Mamba2, conv", "answers")
    return all_hold(
        above(mamba2, seeds("GLA, no conv", "answers")),
        close_to(seeds("GLA + AbCD", "answers"), mamba2),
    )


@claim(
    "R7",
    "Mamba2 without its convolution falls to GLA's level",
    "linear",
    DEPO,
    paper="43% to 6%; 19% (k=4)",
    before_the_runs=DEPO0,
)
def mamba2_falls_without_its_convolution(seeds):
    without = seeds("Mamba2, no conv", "answers")
    return all_hold(
        above(seeds("Mamba2, conv", "answers"), without),
        close_to(seeds("GLA, no conv", "answers"), without),
    )


@claim(
    "R8",
    "Of the recurrences without convolutions, GDN is best",
    "linear",
    DEPO,
    paper="22%; 6%, 19% (k=4)",
    before_the_runs=DEPO0,
)
def gdn_is_best_without_convolutions(seeds):
    gdn = seeds("GDN, no conv", "answers")
    return all_hold(
        above(gdn, seeds("Mamba2, no conv", "answers")),
        above(gdn, seeds("GLA, no conv", "answers")),
    )


@claim("R9", "Canon-ACD matches the built-in convolution", "linear", DEPO, before_the_runs=DEPO0)
def canon_matches_the_built_in_convolution(seeds):
    return all_hold(
        close_to(seeds("Mamba2 + ACD", "answers"), seeds("Mamba2, conv", "answers")),
        close_to(seeds("GDN + ACD", "answers"), seeds("GDN, conv", "answers")),
    )


@claim(
    "R9",
    "Canon does the built-in convolution no harm",
    "linear",
    DEPO,
    paper="+44, +59 points (k=4)",
    before_the_runs=DEPO0,
)
def canon_does_no_harm(seeds):
    return all_hold(
        close_to(seeds("Mamba2 + AbCD", "answers"), seeds("Mamba2, conv", "answers")),
        close_to(seeds("GDN + AbCD", "answers"), seeds("GDN, conv", "answers")),
    )


# R10 and R11: attention and recurrences, all with Canon


@claim(
    "R10", "With Canon, NoPE is about as good as RoPE(1/4)", "families", DEPO, before_the_runs=DEPO0
)
def nope_is_about_as_good_as_a_quarter_of_rope(seeds):
    nope, quarter = seeds("NoPE + Canon", "answers"), seeds("RoPE(1/4) + Canon", "answers")
    return all_hold(close_to(nope, quarter), close_to(quarter, nope))


@claim(
    "R10",
    "Attention reasons twice as deep as {}",
    "families",
    DEPO,
    paper="2-4 times",
    before_the_runs=DEPO0,
    each=RECURRENCES,
)
def attention_reasons_twice_as_deep(seeds, recurrence):
    hops = seeds(recurrence, "hops mastered")
    return all_hold(
        at_least_times(seeds("RoPE(1/4) + Canon", "hops mastered"), 2, hops),
        at_least_times(seeds("NoPE + Canon", "hops mastered"), 2, hops),
    )


@claim(
    "R10",
    "{} stores 1.2 times as much per parameter as attention",
    "families",
    ("capo",),
    paper="1.4 times",
    each=RECURRENCES,
)
def recurrences_store_more(seeds, recurrence):
    return at_least_times(
        seeds(recurrence, "bits/param"), 1.2, seeds("RoPE(1/4) + Canon", "bits/param")
    )


@claim("R11", "{} errs at one hop, and more than attention", "families", DEPO, each=RECURRENCES)
def recurrences_err_at_the_first_hop(seeds, recurrence):
    one_hop = seeds(recurrence, "k=1")
    return all_hold(
        above_chance_but_below(one_hop, 0.99),
        above(seeds("RoPE(1/4) + Canon", "k=1"), one_hop),
    )


@claim("R11", "A hybrid reasons deeper than a recurrence", "families", DEPO, before_the_runs=DEPO0)
def a_hybrid_reasons_deeper(seeds):
    return above(seeds("GDN/RoPE + AbCD", "hops mastered"), seeds("GDN + AbCD", "hops mastered"))


# R12: real text. The paper trains on web text; here it is Python's standard library, byte by byte.


@claim("R12", "Canon helps {} on real text", "text", ("text",), each=("RoPE", "NoPE"))
def canon_helps_on_real_text(seeds, positions):
    return needs_fewer_bits(
        seeds(f"{positions} + Canon", "bits per byte"), seeds(positions, "bits per byte")
    )


@claim("R12", "With Canon, NoPE is as good as RoPE on real text", "text", ("text",))
def nope_is_as_good_as_rope_on_real_text(seeds):
    return needs_hardly_more_bits(
        seeds("NoPE + Canon", "bits per byte"), seeds("RoPE + Canon", "bits per byte")
    )


@claim(
    "R12",
    "Neither one more layer nor twice the steps makes up for Canon on real text",
    "text",
    ("text",),
    before_the_runs=("text",),
)
def more_compute_does_not_make_up_for_canon(seeds):
    canon = seeds("RoPE + Canon", "bits per byte")
    return all_hold(
        needs_fewer_bits(canon, seeds("RoPE, one more layer", "bits per byte")),
        needs_fewer_bits(canon, seeds("RoPE, twice the steps", "bits per byte")),
    )


@claim(
    "R12",
    "{} is as good as attention with Canon on real text",
    "text",
    ("text",),
    before_the_runs=("text",),
    each=RECURRENCES,
)
def recurrences_are_as_good_on_real_text(seeds, recurrence):
    return needs_hardly_more_bits(
        seeds(recurrence, "bits per byte"), seeds("RoPE + Canon", "bits per byte")
    )


@claim(
    "R12",
    "Canon-ACD beside its own convolution helps {} on real text",
    "text",
    ("text",),
    before_the_runs=("text",),
    each=("GLA", "Mamba2", "GDN"),
)
def canon_helps_recurrences_on_real_text(seeds, mixer):
    return needs_fewer_bits(
        seeds(f"{mixer} + AbCD", "bits per byte"), seeds(f"{mixer}, conv", "bits per byte")
    )


@claim(
    "R12",
    "Its own convolution helps {} on real text",
    "text",
    ("text",),
    before_the_runs=("text",),
    each=("GLA", "Mamba2", "GDN"),
)
def own_convolution_helps_on_real_text(seeds, mixer):
    return needs_fewer_bits(
        seeds(f"{mixer}, conv", "bits per byte"), seeds(f"{mixer}, no conv", "bits per byte")
    )
