"""The paper's claims, one command each:   python results/reproduce.py nope

Trains the runs of a comparison that neither results/ nor out/ has, one after another, draws its
figure and judges its claims. A run in out/ replaces the one in results/ of the same model, rate and
seed. After Ctrl-C, run the same command again.

    python results/reproduce.py --list                  the comparisons
    python results/reproduce.py nope --seeds 6          six seeds of each model
    python results/reproduce.py nope --lr 2e-3          another rate; each model shows its best one
    python results/reproduce.py nope --dry-run          prints the commands of the missing runs
    python results/reproduce.py nope --draw             trains nothing
    python results/reproduce.py claims                  judges all claims, writes claims.md

Four runs side by side, here on a GPU; then their figure and their verdicts:

    python results/reproduce.py hops --preset small --dry-run |
        OMP_NUM_THREADS=1 xargs -P 4 -I{} sh -c '{}'
    python results/reproduce.py hops --preset small

Further flags go to train.py. Reading order: 1 the runs that a comparison wants; 2 those that are
here, and each model's best learning rate; 3 training; 4 figure, tables, verdicts; 5 all claims;
6 the command line. comparisons.py says what is compared, claims.py what is claimed.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import claims
import plot
import train
from canon_gpt import Refused
from claims import CLAIMS, LESS_IS_BETTER, MAIN_SCORES, NOT_RUN, RESULTS, SEEDS
from comparisons import COMPARISONS
from sample import parser_of

# ---- 1. The runs that a comparison wants -----------------------------------


def arguments_for(comparison, task, model, preset, flags):
    """train.py's arguments for a model on a task. flags: further ones, for all models alike."""
    arguments = ["--task", task, "--preset", preset]
    arguments += comparison.own_flags(task, preset).split() + flags
    own = comparison.models[model].split()
    for place, word in enumerate(own):
        if word.endswith("x"):  # as in --steps 2x
            usual, _, _ = train.settings_of(arguments)
            own[place] = str(int(word.removesuffix("x")) * usual.steps)
    return arguments + own


def wanted_runs(comparison, preset, flags, seeds):
    """train.py's arguments for each run of a comparison, seed by seed."""
    found = []
    for seed in range(seeds):
        for task in comparison.tasks:
            for model in comparison.models:
                arguments = arguments_for(comparison, task, model, preset, flags)
                found.append([*arguments, "--seed", str(seed)])
    return found


def recipe_of(arguments):
    """The recipe that train.py's arguments make."""
    return train.recipe_of(*train.settings_of(arguments))


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


def missing_runs(wanted, runs):
    """Of the wanted arguments those of the runs that are not here, with --resume where a run has
    begun."""
    there = {run_key(run) for run in runs}
    missing = []
    for arguments in wanted:
        if run_key(recipe_of(arguments)) not in there:
            settings, _, _ = train.settings_of(arguments)
            has_begun = (settings.out / "ckpt.pt").exists()
            missing.append(arguments + (["--resume"] if has_begun else []))
    return missing


# ---- 2. The runs that are here ---------------------------------------------


def finished_runs():
    """The finished runs in results/ and out/, seeds in order, with the scores that claims.py makes.
    A run in out/ replaces one in results/ with the same key."""
    packed = sorted(HERE.glob("*/runs.json"))
    own = sorted(path.parent for path in Path("out").glob("*/config.json"))
    found = {}
    for run in plot.read_runs(packed + own):
        if run["seconds"] is not None and run["task"]["name"] in MAIN_SCORES:
            claims.add_scores(run)
            found[run_key(run)] = run
    return sorted(found.values(), key=lambda run: run["seed"])


def best_runs(comparison, task, preset, flags, runs):
    """{model: its runs at its best learning rate}"""
    found = {}
    for model in comparison.models:
        key = model_key(recipe_of(arguments_for(comparison, task, model, preset, flags)))
        found[model] = at_best_rate([run for run in runs if model_key(run) == key])
    return found


def at_best_rate(runs):
    """Of one model's runs those at the learning rate with the best mean of the last main scores; in
    a tie the one that learns sooner. A rate with fewer than three seeds comes after one with more.
    """
    by_rate = {}
    for run in runs:
        by_rate.setdefault(run["training"]["lr"], []).append(run)
    return max(by_rate.values(), key=how_good, default=[])


def how_good(runs):
    """What is larger for the better rate. runs: of one model at one rate"""
    sign = -1 if runs[0]["units"]["main"] in LESS_IS_BETTER else 1
    ends, course = [], []
    for run in runs:
        values = [sign * evaluation["eval"]["main"] for evaluation in run["evals"]]
        ends.append(values[-1])
        course += values
    return min(len(runs), SEEDS), mean(ends), mean(course), runs[0]["training"]["lr"]


# ---- 3. Training -----------------------------------------------------------


def train_all(missing):
    for arguments in missing:
        run = subprocess.Popen([sys.executable, train.__file__, *arguments])
        try:
            run.wait()
        except KeyboardInterrupt:  # it reaches train.py, too, which saves and ends
            sys.exit(run.wait())


# ---- 4. Figure, tables, verdicts -------------------------------------------


def show(name, preset, flags, runs, path):
    """Draw a comparison's figure, and print its scores and its verdicts."""
    comparison = COMPARISONS[name]
    groups = {}  # {model: its runs at its best rate, on all tasks}
    verdicts = []
    for task in comparison.tasks:
        best = best_runs(comparison, task, preset, flags, runs)
        for model, its_runs in best.items():
            groups.setdefault(model, []).extend(its_runs)
        for claim in CLAIMS:
            if claim.comparison == name and task in claim.tasks:
                title = f"{claim.result}{claim.star(task)} | {claim.title}"
                verdicts.append(f"{title} | {task} | {claims.judge(claim, best)}")
    groups = {model: its_runs for model, its_runs in groups.items() if its_runs}
    if not groups:
        raise Refused(f"out/ and results/ have no runs of {name}")

    here = plot.score_names(groups)
    headings = {score: heading for score, heading in comparison.scores.items() if score in here}
    names = comparison.names or {model: model for model in groups}
    shown = {names[model]: groups[model] for model in groups if model in names}
    title = comparison.title if preset == "nano" else f"{name}, {preset}"
    plot.save(comparison.figure(shown, title, headings), path)
    print(f"\n{plot.table(groups, list(headings))}\n")
    print("\n".join(verdicts))


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
    """claims.md: for each result of the paper its claims."""
    parts = [CLAIMS_HEAD]
    for result, about in RESULTS.items():
        rows = [["claim", "the paper", "rule", "here, each seed", "runs", "verdict"]]
        for claim in CLAIMS:
            if claim.result == result:
                rows += rows_of(claim, runs)
        parts += [f"## {result}: {about}", plot.markdown(rows)]
    return "\n\n".join(parts) + "\n"


def rows_of(claim, runs):
    """A row for each task, preset and dtype that has runs, and for those of the comparison's tasks
    that have none."""
    comparison = COMPARISONS[claim.comparison]
    rows = []
    for task in claim.tasks:
        judged = []
        on_task = [run for run in runs if run["task"]["name"] == task]
        for preset, dtype in sorted({(run["preset"], run["dtype"]) for run in on_task}):
            flags = ["--dtype", dtype]
            groups = best_runs(comparison, task, preset, flags, on_task)
            verdict = claims.judge(claim, groups)
            if verdict != NOT_RUN:
                where = f"{task}, {preset}, {dtype}"
                own_flags = comparison.own_flags(task, preset)
                if own_flags:
                    where += f", `{own_flags}`"
                judged.append([claims.seeds_in_print(claim, task, groups), where, verdict])
        if not judged and task in comparison.tasks:
            judged = [["", f"{task}: `reproduce.py {claim.comparison}`", NOT_RUN]]
        title = f"{claim.title}{claim.star(task)}"
        rows += [[title, claim.paper_on(task), claim.rule(), *cells] for cells in judged]
    return rows


# ---- 6. The command line ---------------------------------------------------


def make_parser():
    parser = parser_of("reproduce.py", __doc__)
    add = parser.add_argument
    add("name", nargs="?", choices=[*COMPARISONS, "claims"], help="a comparison, or claims")
    add("--list", action="store_true", help="name the comparisons")
    add("--preset", default="nano", help="nano (the default), small or paper")
    add("--seeds", type=int, default=SEEDS, help=f"of each model (default: {SEEDS})")
    add("--dry-run", action="store_true", help="print the commands of the missing runs")
    add("--draw", action="store_true", help="train nothing")
    add("--out", type=Path, default="out", help="folder of figure or claims.md (default: out)")
    return parser


def main(argv=None):
    parser = make_parser()
    options, flags = parser.parse_known_args(argv)
    try:
        if options.list or options.name is None:
            list_comparisons()
        elif options.name == "claims":
            judge_all(options.out)
        else:
            compare(options, flags)
    except Refused as error:
        parser.error(error)


def list_comparisons():
    for name, comparison in COMPARISONS.items():
        runs = SEEDS * len(comparison.models) * len(comparison.tasks)
        print(f"{name:10}{runs:3} runs   {comparison.title}")


def judge_all(out):
    out.mkdir(parents=True, exist_ok=True)
    path = out / "claims.md"
    path.write_text(claims_page(finished_runs()))
    print(path)


def compare(options, flags):
    """Train what is missing, draw and judge."""
    wanted = wanted_runs(COMPARISONS[options.name], options.preset, flags, options.seeds)
    missing = missing_runs(wanted, finished_runs())
    print(f"{len(wanted)} runs, {len(missing)} of them missing", file=sys.stderr)
    if options.dry_run:
        for arguments in missing:
            print(shlex.join(["python", os.path.relpath(train.__file__), *arguments]))
        return
    if not options.draw:
        train_all(missing)
    path = options.out / f"{options.name}_{options.preset}.png"
    show(options.name, options.preset, flags, finished_runs(), path)


if __name__ == "__main__":
    main()
