"""The paper's claims, one command each:   python results/reproduce.py nope

Trains the runs of a comparison that neither results/ nor out/ has, one after another, draws its
figure and judges its claims. A run in out/ replaces the one in results/ of the same model, rate and
seed. After Ctrl-C, run the same command again.

    python results/reproduce.py --list                  the comparisons, their claims and hours
    python results/reproduce.py nope --seeds 6          six seeds of each model
    python results/reproduce.py nope --dry-run          prints the commands of the missing runs
    python results/reproduce.py nope --draw             trains nothing
    python results/reproduce.py nope --lr 2e-3,4e-3     tries rates; each model shows its best one
    python results/reproduce.py claims                  judges all claims, writes claims.md

Two runs side by side:

    python results/reproduce.py nope --dry-run | OMP_NUM_THREADS=1 xargs -P 2 -I{} sh -c '{}'

Further flags go to train.py. Reading order: 1 the runs that a comparison wants; 2 those that are
here, and each model's best learning rate; 3 training; 4 figure, tables, verdicts; 5 all claims;
6 the command line. comparisons.py says what is compared, claims.py what is claimed.
"""

import argparse
import functools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import plot
import train
from canon_gpt import Refused
from claims import (
    CLAIMS,
    LESS_IS_BETTER,
    MAIN_SCORES,
    NOT_RUN,
    RESULTS,
    SEEDS,
    add_scores,
    judge,
    seeds_in_print,
)
from comparisons import COMPARISONS, TWICE

TRAIN = os.path.relpath(train.__file__)


# ---- 1. The runs that a comparison wants -----------------------------------


def arguments_for(comparison, task, model, preset, flags):
    """train.py's arguments for a model on a task. flags: further ones, for all models alike."""
    arguments = ["--task", task, "--preset", preset]
    arguments += comparison.own_recipe(task, preset).split() + flags
    own = comparison.models[model].split()
    if TWICE in own:
        usual, _, _ = train.settings_of(arguments)
        own[own.index(TWICE)] = str(2 * usual.steps)
    return arguments + own


def wanted_runs(comparison, preset, flags, seeds, rates):
    """train.py's arguments for each run of a comparison, seed by seed. rates: for every model;
    none: its usual rate."""
    at_rates = [["--lr", rate] for rate in rates] or [[]]
    found = []
    for seed in range(seeds):
        for task in comparison.tasks:
            for model in comparison.models:
                arguments = arguments_for(comparison, task, model, preset, flags)
                found += [[*arguments, "--seed", str(seed)] + at_rate for at_rate in at_rates]
    return found


def model_key(recipe):
    """What the runs of one model share, as text: all but seed, learning rate and how many instances
    are scored. A text counts by its name, not by what Python's library was that day.

    recipe: of train.recipe_of, or a run
    """
    task = {name: value for name, value in recipe["task"].items() if name not in ("sha256", "size")}
    training = {name: value for name, value in recipe["training"].items() if name != "lr"}
    return json.dumps([task, recipe["model"], training, recipe["dtype"]], sort_keys=True)


def run_key(recipe):
    """What tells two runs apart."""
    return model_key(recipe), recipe["training"]["lr"], recipe["seed"]


@functools.cache
def recipe_of(*arguments):
    """The recipe that train.py's arguments make."""
    return train.recipe_of(*train.settings_of(list(arguments)))


def missing_runs(wanted, runs):
    """Of the wanted arguments those of the runs that are not here, with --resume where a run has
    begun."""
    there = {run_key(run) for run in runs}
    missing = {}
    for arguments in wanted:
        key = run_key(recipe_of(*arguments))
        if key not in there:
            settings, _, _ = train.settings_of(arguments)
            has_begun = (settings.out / "ckpt.pt").exists()
            missing[key] = arguments + (["--resume"] if has_begun else [])
    return list(missing.values())


# ---- 2. The runs that are here ---------------------------------------------


def finished_runs():
    """The finished runs in results/ and out/, seeds in order, with the scores that claims.py makes.
    A run in out/ replaces one in results/ with the same key."""
    packed = sorted(HERE.glob("*/runs.json"))
    own = sorted(path.parent for path in Path("out").glob("*/config.json"))
    found = {}
    for run in plot.read_runs(packed + own):
        if run["seconds"] is not None and run["task"]["name"] in MAIN_SCORES:
            add_scores(run)
            found[run_key(run)] = run
    return sorted(found.values(), key=lambda run: run["seed"])


def by_model(runs):
    """{model_key: {learning rate: its runs}}"""
    found = {}
    for run in runs:
        rates = found.setdefault(model_key(run), {})
        rates.setdefault(run["training"]["lr"], []).append(run)
    return found


def rates_tried(comparison, task, preset, flags, found):
    """{model: {learning rate: its runs}} of the models that have runs. found: see by_model."""
    tried = {}
    for model in comparison.models:
        key = model_key(recipe_of(*arguments_for(comparison, task, model, preset, flags)))
        if key in found:
            tried[model] = found[key]
    return tried


def best_rate(rates):
    """The learning rate with the best mean of the last main scores; in a tie the one that learns
    sooner. Of two rates, one with fewer than three seeds comes after one with more.

    rates: {learning rate: runs}
    """

    def how_good(rate):
        runs = rates[rate]
        sign = -1 if runs[0]["units"]["main"] in LESS_IS_BETTER else 1
        ends, course = [], []
        for run in runs:
            values = [sign * evaluation["eval"]["main"] for evaluation in run["evals"]]
            ends.append(values[-1])
            course += values
        return min(len(runs), SEEDS), statistics.mean(ends), statistics.mean(course), rate

    return max(rates, key=how_good)


def at_best_rates(tried):
    """{model: its runs at its best rate}"""
    return {model: rates[best_rate(rates)] for model, rates in tried.items()}


# ---- 3. Training -----------------------------------------------------------


def train_all(missing):
    """Train these runs. Returns whether all have ended well."""
    # Ctrl-C reaches train.py, too. It saves and ends; this program waits for it.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    failed = 0
    for arguments in missing:
        status = subprocess.run([sys.executable, train.__file__, *arguments]).returncode
        if status < 0 or status > 128:  # it was told to stop
            sys.exit(130)
        failed += status != 0
    signal.signal(signal.SIGINT, before)
    return failed == 0


# ---- 4. Figure, tables, verdicts -------------------------------------------


def show(name, preset, flags, found, path):
    """Draw a comparison's figure, and print its scores and verdicts. found: see by_model."""
    comparison = COMPARISONS[name]
    groups = {}  # {model: its runs at its best rate, on all tasks}
    by_rate = {}
    verdicts = []
    for task in comparison.tasks:
        tried = rates_tried(comparison, task, preset, flags, found)
        best = at_best_rates(tried)
        for model, rates in tried.items():
            groups.setdefault(model, []).extend(best[model])
            for rate in sorted(rates):
                by_rate[f"{model}, {task} at {rate}"] = rates[rate]
        for claim in CLAIMS:
            if claim.comparison == name and task in claim.tasks:
                title = f"{claim.result}{claim.star(task)} | {claim.title}"
                verdicts.append(f"{title} | {task} | {judge(claim, best)}")
    if not groups:
        raise Refused(f"out/ and results/ have no runs of {name}")

    here = set()
    for runs in groups.values():
        for run in runs:
            here.update(run["units"])
    scores = {score: comparison.scores[score] for score in comparison.scores if score in here}
    draw(comparison, groups, scores, path)
    print(f"\n{plot.table(groups, list(scores))}")
    main_scores = [f"{task}: {MAIN_SCORES[task]}" for task in comparison.tasks]
    print(f"\n{plot.table(by_rate, main_scores)}\n")
    print("\n".join(verdicts))


def draw(comparison, groups, scores, path):
    """scores: {score: its heading; None: it is not drawn}"""
    names = comparison.names or {model: model for model in groups}
    shown = {names[model]: groups[model] for model in groups if model in names}
    headings = {score: heading for score, heading in scores.items() if heading is not None}
    figure = comparison.figure(
        shown, scores=list(headings), title=comparison.title, headings=headings
    )
    plot.save(figure, path)


# ---- 5. All claims ---------------------------------------------------------

CLAIMS_HEAD = """# The paper's claims, judged by the runs that are here

`python results/reproduce.py claims --out results` writes this page; the rules are in
[claims.py](claims.py). An asterisk marks a rule that was written when some of its runs were known.
AbCD is Canon-ACD beside the mixer's own convolution. Each model is shown at the best learning rate
that it had; an `--lr` beside the runs is only the usual one. Fewer steps are better, and so are
fewer bits per byte; of all other scores, more is. 0.05 of a share are five points.

A verdict is *undecided* if neither the rule nor its opposite holds for every seed, if there are
fewer than three seeds, if all models are at chance or all at the ceiling, if a ratio is to a model
that has learnt nothing, or if start and end of a way overlap. For a share, chance ends five points
above a guess, and the ceiling begins at 98%. For hops, chance is none, and the ceiling is all that
are asked. A rule of several parts does not hold as soon as one part fails, even if another is
undecided or has not run."""


def claims_page(runs):
    """claims.md: for each result of the paper its claims, those with runs first."""
    found = by_model(runs)
    parts = [CLAIMS_HEAD]
    for result, about in RESULTS.items():
        rows = []
        for claim in CLAIMS:
            if claim.result == result:
                rows += rows_of(claim, runs, found)
        rows.sort(key=lambda row: row[-1] == NOT_RUN)
        head = ["claim", "the paper", "rule", "here, each seed", "runs", "verdict"]
        parts += [f"## {result}: {about}", plot.markdown([head, *rows])]
    return "\n\n".join(parts) + "\n"


def rows_of(claim, runs, found):
    """A row for each task, preset and dtype that has runs, and for those of the comparison's tasks
    that have none. found: see by_model."""
    comparison = COMPARISONS[claim.comparison]
    rows = []
    for task in claim.tasks:
        judged = []
        kinds = {(run["preset"], run["dtype"]) for run in runs if run["task"]["name"] == task}
        for preset, dtype in sorted(kinds):
            flags = ["--dtype", dtype, "--device", "cpu"]
            groups = at_best_rates(rates_tried(comparison, task, preset, flags, found))
            verdict = judge(claim, groups)
            if verdict != NOT_RUN:
                where = f"{task}, {preset}, {dtype}"
                own_recipe = comparison.own_recipe(task, preset)
                if own_recipe:
                    where += f", `{own_recipe}`"
                judged.append([seeds_in_print(claim, task, groups), where, verdict])
        if not judged and task in comparison.tasks:
            judged = [["", f"{task}: `reproduce.py {claim.comparison}`", NOT_RUN]]
        title = f"{claim.title}{claim.star(task)}"
        rows += [[title, claim.paper_on(task), claim.rule(), *cells] for cells in judged]
    return rows


# ---- 6. The command line ---------------------------------------------------


def list_comparisons():
    for name, comparison in COMPARISONS.items():
        results = {claim.result: None for claim in CLAIMS if claim.comparison == name}
        runs = SEEDS * len(comparison.models) * len(comparison.tasks)
        hours = runs * comparison.minutes / 60
        about = f"{', '.join(results):16}{runs:3} runs"
        print(f"{name:10}{about}, {hours:4.1f} hours at nano on one core")


def make_parser():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", choices=[*COMPARISONS, "claims"], help="a comparison, or claims")
    add("--list", action="store_true", help="name the comparisons")
    add("--preset", default="nano", help="nano (the default), small or paper")
    add("--seeds", type=int, default=SEEDS, help=f"of each model (default: {SEEDS})")
    add("--lr", help="learning rates to try, as in 2e-3,4e-3")
    add("--dry-run", action="store_true", help="print the commands of the missing runs")
    add("--draw", action="store_true", help="train nothing")
    add("--out", type=Path, default="out", help="folder of figure or claims.md (default: out)")
    return parser


def main(argv=None):
    parser = make_parser()
    options, flags = parser.parse_known_args(argv)
    for flag in ("--task", "--seed", "--resume"):
        if flag in flags:
            parser.error(f"{flag}: each run of a comparison has its own")
    if options.list or options.name is None:
        list_comparisons()
    elif options.name == "claims":
        page = claims_page(finished_runs())
        print(page)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "claims.md").write_text(page)
    else:
        compare(options, flags)


def compare(options, flags):
    """Train what is missing, draw and judge."""
    comparison = COMPARISONS[options.name]
    rates = options.lr.split(",") if options.lr else []
    wanted = wanted_runs(comparison, options.preset, flags, options.seeds, rates)
    missing = missing_runs(wanted, finished_runs())
    print(f"{len(wanted)} runs, {len(missing)} of them missing", file=sys.stderr)
    if options.dry_run:
        for arguments in missing:
            print(shlex.join(["python", TRAIN, *arguments]))
        return
    well = options.draw or train_all(missing)
    path = options.out / f"{options.name}_{options.preset}.png"
    show(options.name, options.preset, flags, by_model(finished_runs()), path)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        print(f"reproduce.py: {error}", file=sys.stderr)
        sys.exit(2)
