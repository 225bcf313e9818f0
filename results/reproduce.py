"""Draw a comparison's figure and print its table:   python results/reproduce.py hops_nano

    python results/reproduce.py hops_nano                      from the runs that are here
    python results/reproduce.py hops_nano --seeds 5            names the runs that are missing
    python results/reproduce.py hops_nano --seeds 5 --train    trains them first

A run is missing if neither results/*/runs.json nor out/ has finished it, at whatever learning rate.
Each model is shown at the rate with the best mean. comparisons.py says what is compared.
"""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # where train.py is

import plot
import train
from canon_gpt import Refused
from comparisons import COMPARISONS
from tasks import make_parser

SEEDS = 3
MAIN_SCORES = ("sequences", "all", "l=2", "sentences", "bits/param", "bits per byte")


# ---- 1. The runs that are here ---------------------------------------------


def runs_here(own=Path("out")):
    """{name: run} of the finished ones in results/ and `own`, by seed. Own ones replace others."""
    paths = sorted(HERE.glob("*/runs.json"))
    paths += sorted(config.parent for config in own.glob("*/config.json"))
    found = {}
    for run in sorted(plot.read_runs(paths), key=lambda run: run["training"]["seed"]):
        if run["seconds"] is not None:
            add_main_score(run)
            found[run["run"]] = run
    return found


def add_main_score(run):
    """A score that has the task's name; for Depo, the mean over all hops that are asked for."""
    task = run["task"]["name"]
    for evaluation in run["evals"]:
        scores = evaluation["eval"]
        main = [name for name in scores if name.startswith("k=") or name in MAIN_SCORES]
        main = main or list(scores)
        scores[task] = mean(scores[name] for name in main)
        run["units"][task] = run["units"][main[0]]


def runs_of(arguments, runs):
    """The runs of the model that train.py's arguments make, at the best learning rate: that with
    the best mean, out of the rates with three seeds, if there are any."""
    by_rate = {}
    for run in same_model(arguments, runs):
        by_rate.setdefault(run["training"]["lr"], []).append(run)

    def merit(same_rate):
        task = same_rate[0]["task"]["name"]
        score = mean(plot.last_scores(same_rate, task))
        return min(len(same_rate), SEEDS), -score if task == "text" else score  # bits: few are good

    return max(by_rate.values(), key=merit, default=[])


def same_model(arguments, runs):
    """With any seed; at any rate, too, unless the arguments have one."""
    _, _, training, run = train.settings_of(arguments)
    name = without_rate_and_seed(Path(run.out).name)
    found = [run for run in runs.values() if without_rate_and_seed(run["run"]) == name]
    if "--lr" in arguments:
        found = [run for run in found if run["training"]["lr"] == training.lr]
    return found


def without_rate_and_seed(name):
    return re.sub(r"_lr=[^_]+|_s\d+$", "", name)


# ---- 2. A comparison -------------------------------------------------------


def arguments_of(task, preset, flags):
    """train.py's arguments for a model."""
    usual = ["--task", task, "--preset", preset]
    own = flags.split()
    for place, word in enumerate(own):
        if word.endswith("x"):  # as in --steps 4x
            _, _, training, _ = train.settings_of(usual)
            own[place] = str(int(word.removesuffix("x")) * training.steps)
    return usual + own


def models_of(name):
    """(label, train.py's arguments) for each model and task."""
    comparison = COMPARISONS[name]
    preset = name.rpartition("_")[2]
    for label, flags in comparison.models.items():
        for task in comparison.tasks:
            yield label, arguments_of(task, preset, f"{comparison.sizes.get(task, '')} {flags}")


def groups_of(name, runs):
    """{label: its runs on all tasks}"""
    groups = {}
    for label, arguments in models_of(name):
        groups.setdefault(label, []).extend(runs_of(arguments, runs))
    return groups


def missing_runs(name, runs, seeds):
    """train.py's arguments for them; where a run has begun, those that resume it."""
    found = []
    for seed in range(seeds):
        for _, arguments in models_of(name):
            if seed in [run["training"]["seed"] for run in same_model(arguments, runs)]:
                continue
            arguments = [*arguments, "--seed", str(seed)]
            _, _, _, run = train.settings_of(arguments)
            found.append(["--resume", run.out] if Path(run.out).exists() else arguments)
    return found


# ---- 3. The command line ---------------------------------------------------


def train_all(program, missing):
    for arguments in missing:
        run = subprocess.Popen([sys.executable, HERE.parent / program, *arguments])
        with contextlib.suppress(KeyboardInterrupt):  # it gets Ctrl-C, too, and says how to go on
            run.wait()
        if run.wait() != 0:
            sys.exit(run.returncode)


def main(argv=None):
    parser = make_parser(__file__, __doc__)
    add = parser.add_argument
    add("name", choices=COMPARISONS, help=", ".join(COMPARISONS))
    add("--seeds", type=int, default=SEEDS, help=f"of each model (default: {SEEDS})")
    add("--train", action="store_true", help="train the runs that are missing")
    options = parser.parse_args(argv)
    comparison = COMPARISONS[options.name]
    try:
        missing = missing_runs(options.name, runs_here(), options.seeds)
        for arguments in missing:
            print(f"missing: python {comparison.program} {shlex.join(arguments)}")
        if options.train:
            train_all(comparison.program, missing)
        groups = groups_of(options.name, runs_here())
    except Refused as error:
        parser.error(str(error))
    drawn = {label: runs for label, runs in groups.items() if runs}
    if not drawn:
        parser.error("there are no runs of it yet; add --train")
    figure = comparison.figure(drawn, comparison.title, comparison.scores)
    plot.save(figure, options.name)
    print(f"\n{plot.table(groups, comparison.scores)}")


if __name__ == "__main__":
    main()
