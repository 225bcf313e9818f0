"""The paper's claims, one command each:   python results/reproduce.py nope --preset nano

Trains what a comparison lacks in out/; draws and judges it, results/ included. After Ctrl-C
the same command goes on.

    python results/reproduce.py --list              the comparisons, with hours
    python results/reproduce.py nope --dry-run      prints the commands
    python results/reproduce.py nope --draw         draws what out/ and results/ have
    python results/reproduce.py nope --lr 2e-3,4e-3     each model at its best rate
    python results/reproduce.py claims              all claims

Other flags go to train.py, or to your own script: `--program own.py --mixer mine`.
"""

import argparse
import json
import math
import os
import re
import runpy
import subprocess
import sys
import time
from collections import defaultdict, namedtuple
from itertools import product, takewhile
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryFile

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import plot  # noqa: E402
import train  # noqa: E402

# ---- 1. The comparisons ----------------------------------------------------
#
# A group is every model on every task, both with flags for train.py ({twice} the task's steps,
# {half} its width). Its figure is a function of plot.py, the scores it shows and a title, where
# {model} becomes the median last score, {model#} how many seeds reach 90%. A claim has its place in
# the paper (* if some of its runs were known before), the paper's numbers, a score and a rule.

Group = namedtuple("Group", "minutes tasks models figure claims")  # minutes: a run's
GROUPS = {}


def group(name, minutes, tasks, models, figure, *claims):
    GROUPS[name] = Group(minutes, tasks, models, figure, claims)


# fmt: off
MAIN = dict(copy="sequences", depo0="answers", depo1="answers", depo2="answers", brevo1="all",
            brevo2="all", mano="longest", capo="bits/param", lano="sentences")
SUITE = {task: f"{task}: {score}" for task, score in MAIN.items() if task != "copy"}


def with_canon(models):
    both = (("", ""), (" + Canon", " --canon abcd"))
    return {name + more: flags + canon for name, flags in models.items() for more, canon in both}


PAIRS = with_canon({"RoPE": "", "NoPE": "--pos nope"})
QUARTER = {"RoPE(1/4) + Canon": "--pos rope4 --canon abcd"}
LINEAR = {
    name + which: f"--mixer {name.lower()} {flags}" for name in ("GLA", "Mamba2", "GDN")
    for which, flags in ((", no conv", "--no-short-conv"), (", conv", "--short-conv"),
                         (" + ACD", "--no-short-conv --canon acd"),
                         (" + AbCD", "--short-conv --canon acd"))}
FULL = {name: flags for name, flags in LINEAR.items() if "AbCD" in name}

group(
    "copy", 1, ["copy"],
    {"one layer": "", "one layer + Canon": "--canon abcd", "two layers": "--n-layer 2",
     "128 dims": "--d-model 128", "one layer, twice the steps": "--steps {twice}"},
    (plot.curves, ["tokens", "sequences"],
     "One 16-dim layer copies {one layer + Canon} with Canon, {one layer} without"),
    ("R1*", "One layer copies with Canon, and not without", "100%; 0%", "sequences",
     "one layer + Canon >= 90%; one layer at chance"),
    ("R1*", "Twice the steps do not make up for Canon", "", "sequences",
     "one layer + Canon > one layer, twice the steps"),
    ("R1*", "Two layers or 128 dims copy without Canon", "", "sequences",
     "two layers >= 90%; 128 dims >= 90%"),
)
group(
    "depth", 27, ["depo0"],
    {**PAIRS, "RoPE, twice the steps": "--steps {twice}",
     "NoPE, twice the steps": "--pos nope --steps {twice}"},
    (plot.curves, ["k="],
     "{score} at 90%: NoPE + Canon {NoPE + Canon#} seeds, RoPE + Canon {RoPE + Canon#}, "
     "RoPE {RoPE#}"),
    ("R2", "Canon reasons deeper", "2-4 times", "hops mastered", "RoPE + Canon > RoPE"),
    ("R2", "Canon reasons twice as deep", "2-4 times", "hops mastered", "RoPE + Canon >= 2 x RoPE"),
    *(("R2", f"Twice the steps do not make up for Canon ({pos})", "", "answers",
       f"{pos} + Canon > {pos}, twice the steps") for pos in ("RoPE", "NoPE")),
)
group(
    "fewer", 20, ["depo0"],
    {**PAIRS, "RoPE, K=2": "--K 2", "RoPE + Canon, K=2": "--K 2 --canon abcd",
     "RoPE, K=2, twice the steps": "--K 2 --steps {twice}", "NoPE, K=2": "--K 2 --pos nope",
     "RoPE, K=1": "--K 1", "NoPE, K=1": "--K 1 --pos nope"},
    (plot.bars, ["k=", "hops mastered"],
     "{score}: RoPE {RoPE, K=1} (K=1), RoPE + Canon {RoPE + Canon}, "
     "NoPE + Canon {NoPE + Canon} (K=4)"),
    *(("R2*", f"{model} masters twice as many hops as RoPE at K=1 or 2", "2-4 times",
       "hops mastered", f"{model} >= 2 x RoPE, K=1; {model} >= 2 x RoPE, K=2, twice the steps")
      for model in ("NoPE + Canon", "RoPE + Canon")),
    ("R2*", "Canon masters more of two hops", "", "hops mastered", "RoPE + Canon, K=2 > RoPE, K=2"),
    ("R2*", "At K=4 Canon masters one hop sooner than RoPE at K=1", "", "steps to k=1",
     "RoPE + Canon sooner than RoPE, K=1; NoPE + Canon sooner than RoPE, K=1"),
)
group(
    "nope", 20, ["depo0"],
    {**PAIRS, **QUARTER, "ALiBi": "--pos alibi", "H-ALiBi": "--pos halibi"},
    (plot.bars, ["k="], "{score} without positions: {NoPE}, with Canon {NoPE + Canon}"),
    ("R3*", "NoPE alone learns next to nothing", "0% (k=8)", "answers",
     "NoPE at chance; NoPE + Canon > NoPE"),
    ("R3*", "NoPE + Canon is as good as RoPE + Canon", "100%; 94% (k=8)", "answers",
     "NoPE + Canon >~ RoPE + Canon"),
    ("R3", "NoPE + Canon beats ALiBi and H-ALiBi", "", "answers",
     "NoPE + Canon > ALiBi; NoPE + Canon > H-ALiBi"),
    ("R3", "With Canon, RoPE(1/4) is as good as RoPE", "100% (k=8)", "answers",
     "RoPE(1/4) + Canon >~ RoPE + Canon"),
)
group(
    "ablation", 20, ["depo0"],
    {"none": "", **{p: f"--canon {p.lower()}" for p in "A B C D AC ACD ABCD".split()},
     "no residual": "--canon abcd --canon-no-residual", "SiLU": "--canon abcd --canon-silu",
     "frozen": "--canon abcd --canon-frozen"},
    (plot.bars, ["k="], "{score}: A {A}, B {B}, C {C}, D {D}, all {ABCD}, none {none}"),
    ("R4", "A, B, C and D each help alone", "", "answers",
     "A > none; B > none; C > none; D > none"),
    ("R4", "A, B, C and D add up", "", "answers", "ABCD > A; ABCD > B; ABCD > C; ABCD > D"),
    ("R4", "A and C do half of the work", "strong", "answers", "AC > 50% from none to ABCD"),
    ("R4", "Frozen weights do half of the work", "a lot", "answers",
     "frozen > 50% from none to ABCD"),
    ("R4", "Canon needs its residual", "", "answers", "ABCD > no residual"),
    ("R4", "A SiLU does harm", "no help", "answers", "ABCD > SiLU"),
)
group(
    "mlp", 6, ["mano", "capo"],
    with_canon({"gated": "", "gated ReLU^2": "--mlp swiglu-relu2", "standard": "--mlp silu",
                "ReLU^2": "--mlp relu2"}),
    (plot.bars, [SUITE["capo"], SUITE["mano"]],
     "Mano with a gated MLP: {gated}, with Canon {gated + Canon}"),
    ("R5*", "Gated MLPs calculate better", "slightly", SUITE["mano"], "gated > standard"),
    ("R5*", "ReLU^2 helps the standard MLP", "slightly", SUITE["mano"], "ReLU^2 > standard"),
    ("R5*", "Gated MLPs store less", "", SUITE["capo"], "standard > gated"),
)
group(
    "linear", 45, ["depo0"], LINEAR,
    (plot.bars, ["k="],
     "{score}: GLA {GLA + AbCD}, Mamba2 {Mamba2 + AbCD}, GDN {GDN + AbCD} with AbCD"),
    ("R6", "GLA is weaker than Mamba2, and matches it with Canon", "19% to 50%; 43% (k=4)",
     "answers", "Mamba2, conv > GLA, no conv; GLA + AbCD >~ Mamba2, conv"),
    ("R7", "Mamba2 without its convolution falls to GLA's level", "43% to 6%; 19% (k=4)", "answers",
     "Mamba2, conv > Mamba2, no conv; GLA, no conv >~ Mamba2, no conv"),
    ("R8", "Of all without convolutions, GDN is best", "22%; 6%, 19% (k=4)", "answers",
     "GDN, no conv > Mamba2, no conv; GDN, no conv > GLA, no conv"),
    ("R9", "Canon-ACD matches the built-in convolution", "", "answers",
     "Mamba2 + ACD >~ Mamba2, conv; GDN + ACD >~ GDN, conv"),
    ("R9", "Canon does the built-in convolution no harm", "+44, +59 points (k=4)", "answers",
     "Mamba2 + AbCD >~ Mamba2, conv; GDN + AbCD >~ GDN, conv"),
)
group(
    "families", 20, ["depo0", "capo --d-model {half}"],
    {**PAIRS, **QUARTER, **FULL,
     "GDN/RoPE + AbCD": "--mixer gdn,attention --short-conv --canon acd"},
    (plot.bars, ["k=", "hops mastered"],
     "{score} with Canon: NoPE {NoPE + Canon}, RoPE {RoPE + Canon}, GLA {GLA + AbCD}, "
     "GDN {GDN + AbCD}"),
    ("R10", "With Canon, NoPE is about as good as RoPE(1/4)", "", "answers",
     "NoPE + Canon >~ RoPE(1/4) + Canon; RoPE(1/4) + Canon >~ NoPE + Canon"),
    *(("R10", f"Attention reasons twice as deep as {name}", "2-4 times", "hops mastered",
       f"RoPE(1/4) + Canon >= 2 x {name}; NoPE + Canon >= 2 x {name}") for name in FULL),
    *(("R10", f"{name} stores 1.2 times as much as attention", "1.4 times", SUITE["capo"],
       f"{name} >= 1.2 x RoPE(1/4) + Canon") for name in FULL),
    *(("R11*", f"{name} stays under 99% at one hop", "", "k=1", f"{name} < 99%")
      for name in FULL),
    ("R11", "A hybrid reasons deeper than a recurrence", "", "hops mastered",
     "GDN/RoPE + AbCD > GDN + AbCD"),
)
group(
    "tasks", 7, list(SUITE), PAIRS,
    (plot.bars, [*SUITE.values()],
     "{score}: {RoPE} without Canon (grey), {RoPE + Canon} with (orange)"),
    *(("R2*", f"Canon helps on {task}", paper, SUITE[task], "RoPE + Canon > RoPE")
      for task, paper in dict(
          depo1="0% to 94% (k=8)", depo2="30% to 99% (k=16)", brevo1="27.5% to 58.8%",
          brevo2="81.4% to 87.8%", lano="79.1% to 86.7%", capo="10-15%",
          mano="41.6% to 83.0%").items()),
    *(("R3*", f"Canon lifts NoPE on {task}", "", score, "NoPE + Canon > NoPE")
      for task, score in SUITE.items() if task != "depo0"),
)
# fmt: on

# ---- 2. Rules and verdicts -------------------------------------------------
#
# A rule compares all seeds of models. It holds, does not hold, or is undecided: with fewer
# than three seeds, where neither is clear, and where all are at chance (the floor) or the ceiling.
# All parts between "; " must hold.

SEEDS, MARGIN, CEILING = 3, 0.05, 0.98


def covers(floor, a, x, b, c):
    goal = mean(b) + x / 100 * (mean(c) - mean(b))
    return c[0] > b[-1] and a[0] >= goal, c[0] > b[-1] and a[-1] < goal


RULES = {  # from sorted seeds: (holds, does not hold)
    # every seed of a against x times every seed of b, whose best is above chance
    r"(.+) >= ([\d.]+) x (.+)": lambda floor, a, x, b: (
        a[0] >= x * b[-1] > x * floor, a[-1] < x * b[0] and b[-1] > floor),
    # every seed of a covers that share of the way from b's mean to c's
    r"(.+) > ([\d.]+)% from (.+) to (.+)": covers,
    # every seed is so high; lower, and above chance; at chance
    r"(.+) >= ([\d.]+)%": lambda floor, a, x: (a[0] >= x / 100, a[-1] < x / 100),
    r"(.+) < ([\d.]+)%": lambda floor, a, x: (floor < a[0] and a[-1] < x / 100, a[0] >= x / 100),
    r"(.+) at chance": lambda floor, a: (a[-1] <= floor, a[0] > floor),
    # every seed of a is at most 5 points below b's mean
    r"(.+) >~ (.+)": lambda floor, a, b: (a[0] >= mean(b) - MARGIN, a[-1] < mean(b) - MARGIN),
    # every seed of a is above every seed of b; below
    r"(.+) > (.+)": lambda floor, a, b: (a[0] > b[-1], a[-1] < b[0]),
    r"(.+) sooner than (.+)": lambda floor, a, b: (a[-1] < b[0], a[0] > b[-1]),
}  # fmt: skip


def parse(rule):
    """Each part's function and its arguments, names of models and numbers."""
    for part in rule.split("; "):
        matches = ((f, re.fullmatch(p, part)) for p, f in RULES.items())
        yield next((f, match.groups()) for f, match in matches if match)


def names_in(rule):
    args = dict.fromkeys(arg for _, args in parse(rule) for arg in args)
    return [arg for arg in args if not re.fullmatch(r"[\d.]+", arg)]


def decide(rule, scores, floor, ceiling):
    """The verdict, from {model: its seeds' scores}."""
    if min(len(scores[model]) for model in names_in(rule)) < SEEDS:
        return "undecided: too few seeds"
    verdicts = []
    for function, args in parse(rule):
        args = [sorted(scores[arg]) if arg in scores else float(arg) for arg in args]
        models = [arg for arg in args if isinstance(arg, list)]
        holds, fails = function(floor, *args)
        verdict = "holds" if holds else "does not hold" if fails else "undecided"
        if len(models) > 1 and all(seeds[-1] <= floor for seeds in models):
            verdict = "undecided: at chance"
        elif len(models) > 1 and all(seeds[0] >= ceiling for seeds in models):
            verdict = "undecided: at the ceiling"
        verdicts.append(verdict)
    return min(verdicts, key=lambda verdict: ("does", "unde", "hold").index(verdict[:4]))


def all_runs():
    """The finished runs in results/ and out/, with scores made of others."""
    paths = [*sorted(HERE.rglob("runs.json")), *sorted(Path("out").glob("*/"))]
    runs = [run for run in plot.read_all(paths) if run["seconds"] is not None]
    for run in runs:
        for point in run["evals"]:
            add_scores(run["task"]["name"], point["eval"])
        steps = [point["step"] for point in run["evals"] if point["eval"].get("k=1", 0) >= 0.9]
        run["evals"][-1]["eval"]["steps to k=1"] = min(steps, default=math.inf)
    return runs


def add_scores(task, scores):
    """hops mastered: the largest scored k up to which all are 90% right. answers: their mean.
    longest: Mano's last score; last: your own tasks'."""
    last = [0, *scores.values()][-1]
    hops = [score for score in scores if re.fullmatch(r"k=\d+", score)]
    if hops:
        mastered = [int(k[2:]) for k in takewhile(lambda k: scores[k] >= 0.9, hops)]
        scores["hops mastered"] = mastered[-1] if mastered else 0
        scores["answers"] = mean(scores[k] for k in hops)
    main = MAIN.get(task, "last")
    scores["main"] = scores[f"{task}: {main}"] = scores.get(main, last)


def check(claim, best, where):
    """The claim's row."""
    *front, score, rule = claim
    runs = {m: [r for r in best.get(m, []) if plot.last_scores([r], score)] for m in names_in(rule)}
    scores = {m: plot.last_scores(mine, score) for m, mine in runs.items()}
    here = [f"{m} {plot.each_seed(mine, score)}" for m, mine in runs.items() if mine]
    verdict, bounds = "undecided: not run", (0, math.nan)
    if all(runs.values()):
        known = [run["task"] for mine in runs.values() for run in mine]
        if score == "hops mastered":
            bounds = 0, max(task.get("K", 0) for task in known)
        elif plot.is_share(score, max(map(max, scores.values()))):
            bounds = plot.guess(known[0]) + MARGIN, CEILING
        verdict = decide(rule, scores, *bounds)
    return *front, rule, f"{score}: {'; '.join(here)}", where, verdict


def command(task, flags, rest):
    """The words for train.py."""
    name, *flags = f"{task} {flags}".split()
    if "{" in f"{flags}":
        _, _, config, training = train.prepare(["--task", name, *rest])
        sizes = {"half": config.d_model // 2, "twice": 2 * training["steps"]}
        return ["--task", name, *rest, *(flag.format(**sizes) for flag in flags)]
    return ["--task", name, *flags, *rest]


def recipe(run):
    """All that makes a run but its seed and learning rate."""
    parts = {part: run[part] for part in ("task", "model", "training", "dtype")}
    return json.dumps({**parts, "training": {**run["training"], "lr": None}}, sort_keys=True)


def represent(group, rest, runs, rates):
    """{model: its runs at its best rate}, and the runs at all rates. The best has the highest
    mean of the last main scores; in a tie, of those before. Fewer than three seeds come last."""
    best, tried = defaultdict(list), {}
    for task, (model, flags) in product(group.tasks, group.models.items()):
        wanted, ranked = recipe(train.recipe_of(*train.prepare(command(task, flags, rest)))), {}
        for mine in plot.models([run for run in runs if recipe(run) == wanted]).values():
            rate = mine[0]["training"]["lr"]
            if not rates or rate in rates:
                tried[f"{model}, {mine[0]['task']['name']} at {rate}"] = mine
                ends = mean(plot.last_scores(mine, "main"))
                before = [e["eval"]["main"] for r in mine for e in r["evals"][:-1]]
                ranked[min(SEEDS, len(mine)), ends, mean([0, *before])] = mine
        if ranked:
            best[model] += ranked[max(ranked)]
    return best, tried


def show(name, best, tried, preset, out):
    """Draw the figure; print scores and verdicts."""
    draw, wanted, title = GROUPS[name].figure
    scores = [s for want in wanted for s in plot.score_names(best) if s.startswith(want)]
    if not scores:
        fail(f"no run scores {' or '.join(wanted)}")
    medians = defaultdict(lambda: "?", score=plot.heading(scores[-1]).capitalize())
    for model, runs in best.items():
        if values := plot.last_scores(runs, scores[-1]):
            medians[model] = plot.score_text(scores[-1], median(values))
            medians[model + "#"] = f"{sum(v >= 0.9 for v in values)} of {len(values)}"
    plot.save(draw(best, scores, title.format_map(medians)), out / f"{name}_{preset}")
    print(f"\n{plot.table(best, scores)}\n")
    print(f"{plot.table(tried, [s for s in plot.score_names(tried) if ': ' in s])}\n")
    for claim in GROUPS[name].claims:
        print(*claim[:2], check(claim, best, preset)[-1], sep=" | ")


def claims():
    """All claims, for each preset and dtype with runs."""
    runs, rows = all_runs(), []
    kinds = sorted({(run["preset"], run["dtype"]) for run in runs})
    for name, group in GROUPS.items():
        shown = {}
        for preset, dtype in kinds:
            rest = ["--preset", preset, "--dtype", dtype, "--device", "cpu"]
            shown[f"{preset}, {dtype}"] = represent(group, rest, runs, [])[0]
        for claim in group.claims:
            found = [check(claim, best, where) for where, best in shown.items()]
            rows += [row for row in found if "not run" not in row[-1]] or [check(claim, {}, name)]
    rows.sort(key=lambda row: "not run" in row[-1])
    head = ("", "claim", "the paper", "rule", "here, each seed", "runs", "verdict")
    return plot.markdown([head, *rows])


# ---- 3. Training, the command line -----------------------------------------


def plan(group, rest, seeds, rates):
    """The words of all runs, checked."""
    planned = {}
    for seed, task, model in product(range(seeds), group.tasks, group.models):
        words = [*command(task, group.models[model], rest), "--seed", str(seed)]
        usual = train.prepare(words)[3]["lr"]
        for rate in rates or [usual]:
            full = words + ["--lr", f"{rate}"] * (rate != usual)
            same = json.dumps(train.recipe_of(*train.prepare(full)))
            if same in planned:
                fail(f"{' '.join(rest)}: {model} would equal another model")
            planned[same] = full
    return list(planned.values())


def progress(out, words):
    """(steps, whether finished); train.py says what is wrong."""
    try:
        same = recipe(json.loads((out / "config.json").read_text())) == recipe(
            train.recipe_of(*train.prepare(words)))  # fmt: skip
        steps, finished = train.steps_done(out)
        return steps, finished and same
    except Exception:
        return 0, False


def train_all(planned, jobs, program):
    """Train what is missing; True if all is well."""
    waiting, going, steps, total, well = [], {}, {}, 0, True
    for words in planned:
        args, _, _, training = train.prepare(words)
        steps[args.out], finished = progress(args.out, words)
        total += training["steps"]
        if not finished:
            waiting.append((args.out, words))
    threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // jobs))}
    bar = tqdm(total=total, initial=sum(steps.values()), unit="step", smoothing=0)
    with bar, train.stop_requests() as stop:
        try:
            while (going or waiting) and not stop:
                while waiting and len(going) < jobs:
                    out, words = waiting.pop(0)
                    resume, log = ["--resume"] * (out / "ckpt.pt").exists(), TemporaryFile("w+")
                    process = subprocess.Popen(
                        [sys.executable, program, *words, *resume], env={**threads, **os.environ},
                        start_new_session=True, stdout=subprocess.DEVNULL, stderr=log)  # fmt: skip
                    going[process] = out, log
                time.sleep(1)
                for process, (out, log) in list(going.items()):
                    steps[out], _ = train.steps_done(out)
                    if process.poll() is not None:
                        del going[process]
                    if process.returncode:
                        well = False
                        log.seek(0)
                        bar.write(f"{out}: {''.join(log.readlines()[-1:])}", sys.stderr, end="")
                bar.update(sum(steps.values()) - bar.n)
        finally:  # Ctrl-C has not reached the runs, which have sessions of their own; they save
            for process in going:
                process.terminate()
            for process in going:
                process.wait()
    if stop:
        print("reproduce.py: stopped; the same command goes on", file=sys.stderr)
        sys.exit(128 + stop[0])
    return well


def fail(message):
    print(f"reproduce.py: {message}", file=sys.stderr)
    sys.exit(2)


def rates(text):
    return sorted({*map(float, text.split(","))})


def main(argv=None):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=plain)
    parser.error = fail
    add = parser.add_argument
    add("name", nargs="?", choices=["claims", *GROUPS])
    add("--list", action="store_true")
    add("--dry-run", action="store_true")
    add("--draw", action="store_true")
    add("--seeds", default=3, **train.between(1, 999), help="of a model (default: 3)")
    add("--jobs", **train.between(1, 999), help="side by side (default: one a core; on a GPU, one)")
    add("--lr", type=rates, default=[])
    add("--out", type=Path, default="out", help="for figures and claims.md (default: out)")
    add("--program", default=train.__file__, help="your own (results/README.md)")
    args, rest = parser.parse_known_args(argv)
    if args.list or args.name in (None, "claims"):
        parser.parse_args(argv)
    if args.name == "claims":
        print(text := claims())
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "claims.md").write_text(text + "\n")
        return
    if args.list or not args.name:
        for name, group in GROUPS.items():
            hours = len(group.models) * len(group.tasks) * args.seeds * group.minutes / 120
            print(f"{name:10} {hours:.1f} hours at nano on two cores")
        return
    if {"--seed", "--resume"} & {word.split("=")[0] for word in rest}:
        fail("--seed, --resume: each run has its own")
    if not Path(args.program).is_file():
        fail(f"--program {args.program}: no such file")
    runpy.run_path(args.program, run_name="program")
    group = GROUPS[args.name]
    planned = plan(group, rest, args.seeds, args.lr)
    if args.dry_run:
        for words in planned:
            print("python", Path(args.program).name, *words)
        return
    first = train.prepare(planned[0])[0]
    jobs = args.jobs or (os.cpu_count() if first.device == "cpu" else 1)
    well = args.draw or train_all(planned, jobs, args.program)
    best, tried = represent(group, rest, all_runs(), args.lr)
    if not best:
        fail(f"out/ and results/ have no runs of {args.name}")
    show(args.name, best, tried, first.preset, args.out)
    sys.exit(not well)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(error)
