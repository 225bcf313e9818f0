"""The paper's claims, one command each:   python results/reproduce.py nope --preset nano

Trains the runs of a comparison that out/ lacks, draws its figure and judges its claims. The runs in
results/ are shown, too; a run in out/ replaces the one of the same model, rate and seed. After
Ctrl-C, run the same command again.

    python results/reproduce.py --list                  the comparisons, their claims and hours
    python results/reproduce.py nope --dry-run          prints the command of each run
    python results/reproduce.py nope --draw             trains nothing
    python results/reproduce.py nope --lr 2e-3,4e-3     tries rates; each model shows its best one
    python results/reproduce.py claims                  judges all claims, writes claims.md

Further flags go to train.py, or to a program of your own: `--program own.py --mixer mine`.

Reading order: 1 the runs that a comparison wants; 2 those that are here, and each model's best
learning rate; 3 training; 4 figure, tables, verdicts; 5 the command line. comparisons.py says what
is compared, claims.py what is claimed.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import plot
import runs as run_folders
import train
from claims import (
    CLAIMS,
    LESS_IS_BETTER,
    NOT_RUN,
    RESULTS,
    SEEDS,
    Claim,
    Verdict,
    with_made_scores,
)
from comparisons import COMPARISONS
from tasks import WHICH_TEXT, make_task


def fail(message):
    """End the program with one line, and status 2."""
    print(f"reproduce.py: {message}", file=sys.stderr)
    sys.exit(2)


# ---- 1. The runs that a comparison wants -----------------------------------


class Wanted:
    """A run that may not exist yet: its model's name, and train.py's arguments that produce it."""

    def __init__(self, model, arguments):
        self.model, self.arguments = model, arguments
        self.options, recipe = train.read_command_line(arguments)
        self.recipe = recipe.as_dict()
        self.preset = recipe.preset


def arguments_for(comparison, task, model, flags):
    """train.py's arguments for a model on a task. flags: further ones, for all models alike."""
    preset = usual_recipe(task, flags).preset
    own_flags = comparison.own_flags(task, preset).split()
    flags = own_flags + flags  # of two alike the later one counts
    arguments = ["--task", task] + comparison.models[model].split() + flags
    if model in comparison.twice_the_steps:
        steps = usual_recipe(task, flags).training.steps
        arguments += ["--steps", str(2 * steps)]
    if task in comparison.half_the_width:
        d_model = usual_recipe(task, flags).model.d_model
        arguments += ["--d-model", str(d_model // 2)]
    return arguments


def usual_recipe(task, flags):
    """What the preset says, with these flags."""
    _, recipe = train.read_command_line(["--task", task, *flags])
    return recipe


def wanted_runs(comparison, flags, seeds, rates):
    """All runs of a comparison, seed by seed. rates: for every model; none: its usual rate."""
    wanted = []
    for seed in range(seeds):
        for task in comparison.tasks:
            for model in comparison.models:
                arguments = arguments_for(comparison, task, model, flags)
                arguments += ["--seed", str(seed)]
                wanted += at_rates(Wanted(model, arguments), rates)
    seen = {}
    for run in wanted:
        key = json.dumps(run.recipe, sort_keys=True)
        if key in seen:
            fail(f"with {' '.join(flags)}, {run.model} is the same as {seen[key]}")
        seen[key] = run.model
    return wanted


def at_rates(run, rates):
    """The same run at each of these learning rates."""
    if not rates:
        return [run]
    return [Wanted(run.model, [*run.arguments, "--lr", f"{rate}"]) for rate in rates]


# ---- 2. The runs that are here ---------------------------------------------


def finished_runs(shipped=True):
    """(runs, problems): the finished runs in out/ and, with `shipped`, those that come with the
    repository, in results/*/runs.json; and what is damaged. Runs have the scores that claims.py
    makes.
    """
    paths = sorted(Path("out").glob("*/"))
    if shipped:
        paths = sorted(HERE.rglob("runs.json")) + paths
    found, problems = run_folders.read_all(paths)
    finished = [with_made_scores(run) for run in found if run["seconds"] is not None]
    return on_one_library(finished), problems


def on_one_library(runs):
    """The runs without those on another Python's standard library: what one text costs says nothing
    about another.

    Where there are several libraries, this Python's counts, or else the last run's.
    """
    libraries = [run["task"]["sha256"] for run in runs if is_on_a_library(run)]
    if len(set(libraries)) < 2:
        return runs
    here = make_task("text").sha256
    library = here if here in libraries else libraries[-1]
    return [run for run in runs if not is_on_a_library(run) or run["task"]["sha256"] == library]


def is_on_a_library(run):
    return run["task"].get("text") == "python"


def all_but_rate_and_seed(recipe):
    """What two runs of one model share: all but seed, learning rate and how many are scored.

    recipe: a run, or a recipe's dict. Returns text, so that it can be a key. It leaves out which
    Python's library it was, as `on_one_library` sees to that.
    """
    task = dict(recipe["task"])
    if is_on_a_library(recipe):
        for field in WHICH_TEXT:
            del task[field]
    training = dict(recipe["training"])
    del training["lr"]
    parts = {"task": task, "model": recipe["model"], "dtype": recipe["dtype"]}
    return json.dumps({**parts, "training": training}, sort_keys=True)


def by_model(runs):
    """{all_but_rate_and_seed: {learning rate: {seed: run}}}, seeds in order. Of two runs with one
    seed the later counts: a run in out/ replaces one in results/."""
    found = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        rates = found.setdefault(all_but_rate_and_seed(run), {})
        seeds = rates.setdefault(run["training"]["lr"], {})
        seeds[run["seed"]] = run
    return found


def best_rate(rates):
    """The learning rate at which a model is best: by the mean of the last main scores, in a tie by
    the mean of those before. Of two rates, one with fewer than three seeds comes after one with
    more seeds.

    rates: {learning rate: runs}
    """

    def how_good(rate):
        runs = rates[rate]
        ends, before = [], [0]  # a run that was scored once has no score before its last
        for run in runs:
            main = run["main"]
            sign = -1 if run["units"][main] in LESS_IS_BETTER else 1
            values = plot.values_by_step(run, main).values()
            scores = [sign * value for value in values]
            ends.append(scores[-1])
            before += scores[:-1]
        return min(len(runs), SEEDS), statistics.mean(ends), statistics.mean(before), rate

    return max(rates, key=how_good)


def tried_rates(comparison, tasks, flags, found, only=()):
    """{(task, model): {learning rate: runs}} of the models that have runs.

    found: by_model of all runs. only: the learning rates that count; none: all.
    """
    tried = {}
    for task in tasks:
        for model in comparison.models:
            recipe = Wanted(model, arguments_for(comparison, task, model, flags)).recipe
            rates = {}
            for rate, seeds in sorted(found.get(all_but_rate_and_seed(recipe), {}).items()):
                if not only or rate in only:
                    rates[rate] = list(seeds.values())
            if rates:
                tried[task, model] = rates
    return tried


def at_best_rates(comparison, tried, task=None):
    """{model: its runs at its best rate}, in the comparison's order. task: only runs on this task;
    None: on every task."""
    groups = {}
    for model in comparison.models:
        for (its_task, its_model), rates in tried.items():
            if its_model == model and task in (None, its_task):
                groups.setdefault(model, []).extend(rates[best_rate(rates)])
    return groups


# ---- 3. Training -----------------------------------------------------------


def check_folders(wanted):
    """End if the folder of a wanted run is damaged or holds another run."""
    for run in wanted:
        folder = run.options.out
        if not folder.exists():
            continue
        found, problems = run_folders.read_all([folder])
        if problems:
            fail(f"{problems[0]}. Repair or delete the folder")
        for there in found:
            recipe = {part: there[part] for part in run.recipe}
            recipe["eval_size"] = run.recipe["eval_size"]  # how many are scored may differ
            different = run_folders.recipe_differences(recipe, run.recipe)
            if different:
                fail(f"{folder} holds another run: {', '.join(different)}")


def missing_runs(wanted, runs):
    """The wanted runs that are not among these."""
    there = {key_of(run) for run in runs}
    return [run for run in wanted if key_of(run.recipe) not in there]


def key_of(recipe):
    """What tells two runs apart."""
    return all_but_rate_and_seed(recipe), recipe["training"]["lr"], recipe["seed"]


def steps_done(folder):
    """How far a run's log has come."""
    try:
        whole_lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
        return json.loads(whole_lines[-1])["step"]
    except (OSError, IndexError, ValueError):  # there is no log yet
        return 0


class Sweep:
    """Trains runs, `jobs` side by side, each in a process of its own."""

    def __init__(self, missing, jobs, program):
        self.jobs, self.program = jobs, program
        self.waiting = list(missing)
        self.running = {}  # {process: (its run, a file with what it writes to stderr)}
        self.steps = {run.options.out: steps_done(run.options.out) for run in missing}
        threads = max(1, os.cpu_count() // jobs)
        self.environment = {"OMP_NUM_THREADS": str(threads), **os.environ}

    def start(self):
        """Start runs while there is room."""
        while self.waiting and len(self.running) < self.jobs:
            run = self.waiting.pop(0)
            command = [sys.executable, self.program, *run.arguments]
            if (run.options.out / "ckpt.pt").exists():
                command.append("--resume")
            stderr_file = TemporaryFile("w+", encoding="utf-8", errors="replace")
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr_file,
                start_new_session=True,  # Ctrl-C reaches this program only, which tells its runs
            )
            self.running[process] = run, stderr_file

    def poll(self):
        """Note how far the runs have come. Returns a line for each that has failed meanwhile."""
        failures = []
        for process, (run, stderr_file) in list(self.running.items()):
            ended = process.poll() is not None
            self.steps[run.options.out] = steps_done(run.options.out)
            if ended:
                del self.running[process]
            if ended and process.returncode != 0:
                stderr_file.seek(0)
                why = reason(process.returncode, stderr_file.read())
                failures.append(f"{run.options.out}: {why}")
        return failures

    def stop(self):
        """Ask the runs to stop, and wait until they have saved."""
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait()


# What train.py advises those who start a run by hand. Here the same command goes on.
ADVICE = (f"; {train.HOW_TO_GO_ON}", ": choose another --out")


def reason(status, said):
    """Why a run failed, in one line: the last that it said."""
    if status < 0:
        return f"killed by signal {-status}"
    lines = said.replace("\r", "\n").split("\n")  # a progress bar redraws its line after \r
    lines = [line for line in lines if line.strip()]
    if not lines:
        return f"status {status}"
    last = lines[-1].strip()
    for advice in ADVICE:
        last = last.replace(advice, "")
    return last


@contextlib.contextmanager
def stop_requests():
    """Yields a list that collects the signals that ask to stop: Ctrl-C, a batch system's."""
    requests, before = [], {}

    def note(number, frame):
        requests.append(number)

    for number in train.STOP:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
            before[number] = signal.signal(number, note)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_all(missing, jobs, program):
    """Train these runs. Returns how many failed. Ctrl-C saves them and ends the program."""
    sweep = Sweep(missing, jobs, program)
    total = sum(run.recipe["training"]["steps"] for run in missing)
    failed = 0
    with stop_requests() as requests:
        bar = tqdm(total=total, initial=sum(sweep.steps.values()), unit="step", smoothing=0)
        try:
            while (sweep.waiting or sweep.running) and not requests:
                sweep.start()
                time.sleep(1)
                for failure in sweep.poll():
                    failed += 1
                    bar.write(f"reproduce.py: {failure}", sys.stderr)
                bar.update(sum(sweep.steps.values()) - bar.n)
        finally:
            bar.close()
            if sweep.running:
                print(f"reproduce.py: {len(sweep.running)} runs are being saved", file=sys.stderr)
            sweep.stop()
        if requests:
            print("reproduce.py: stopped; the same command goes on", file=sys.stderr)
            sys.exit(128 + requests[0])
    return failed


# ---- 4. Figure, tables, verdicts -------------------------------------------


def show(name, tried, path):
    """Draw a comparison's figure, and print its scores and verdicts. tried: see tried_rates."""
    comparison = COMPARISONS[name]
    groups = at_best_rates(comparison, tried)
    scores = scores_shown(comparison.scores, groups)
    if not scores:
        fail(f"no run has the scores that {name} shows: {', '.join(comparison.scores)}")
    groups = with_scores(groups, scores)
    plot.save(comparison.figure(groups, scores, comparison.title(groups)), path)
    print(f"\n{plot.table(groups, scores)}\n")

    by_rate, main_scores = {}, []
    for (task, model), rates in tried.items():
        for rate, runs in rates.items():
            by_rate[f"{model}, {task} at {rate}"] = runs
            score = f"{task}: {runs[0]['main']}"
            if score not in main_scores:
                main_scores.append(score)
    print(f"{plot.table(by_rate, main_scores)}\n")

    for claim in CLAIMS:
        if claim.comparison != name:
            continue
        for task in comparison.tasks:
            if task in claim.tasks:
                verdict = claim.judge(at_best_rates(comparison, tried, task))
                print(
                    f"{claim.result}{claim.star(task)}",
                    claim.title,
                    task,
                    verdict.outcome,
                    sep=" | ",
                )


def scores_shown(wanted, groups):
    """The wanted scores that any run has; "k=" stands for k=1, k=2 and so on."""
    there = {}
    for runs in groups.values():
        for run in runs:
            there.update(run["units"])
    shown = []
    for score in wanted:
        if score == "k=":
            shown += [name for name in there if name.startswith("k=")]
        elif score in there:
            shown.append(score)
    return shown


def with_scores(groups, scores):
    """The runs that have any of these scores, and the models that have such runs."""
    shown = {}
    for model, runs in groups.items():
        scored = [run for run in runs if not run["units"].keys().isdisjoint(scores)]
        if scored:
            shown[model] = scored
    return shown


CLAIMS_HEAD = """# The paper's claims, judged by the runs that are here

`python results/reproduce.py claims --out results` writes this page; the rules are in
[claims.py](claims.py). An asterisk marks a rule that was written when some of its runs were known.
AbCD is Canon-ACD beside the mixer's own convolution. Each model is shown at the best learning rate
that it had; an `--lr` beside the runs is only the usual one. A verdict is *undecided* if neither
the rule nor its opposite holds for every seed, if there are fewer than three seeds, if all models
are at chance or all at the ceiling, if a ratio is to a model that has learnt nothing, or if a gap
to be covered is not there on every seed. For a share, chance ends five points above a guess, and
the ceiling begins at 98%. For hops, chance is none, and the ceiling is all that are asked. A rule
of several parts does not hold as soon as one part fails, even if another is undecided or has not
run."""


def claims_page(runs):
    """claims.md: for each result of the paper its claims, those with runs first."""
    verdicts = judge_all(runs)
    parts = [CLAIMS_HEAD]
    for result, about in RESULTS.items():
        rows = [["claim", "the paper", "rule", "here, each seed", "runs", "verdict"]]
        mine = [judged for judged in verdicts if judged.claim.result == result]
        mine.sort(key=lambda judged: judged.verdict.outcome == NOT_RUN)
        for claim, task, where, verdict in mine:
            here = ""
            if verdict.outcome != NOT_RUN:
                here = scores_in_print(verdict.seeds)
            title = f"{claim.title}{claim.star(task)}"
            rows.append([title, claim.paper_on(task), verdict.rule, here, where, verdict.outcome])
        parts.append(f"## {result}: {about}")
        parts.append(plot.markdown(rows) if mine else "Not tried here.")
    return "\n\n".join(parts) + "\n"


def scores_in_print(each_models_seeds):
    """Each seed of each model: "tokens: `one layer` 82%, 38%; `two layers` 100%, 100%"."""
    texts, score = [], None
    for seeds in each_models_seeds:
        text = f"{seeds} {seeds.in_print()}"
        if seeds.score != score:
            score = seeds.score
            text = f"{score}: {text}"
        texts.append(text)
    return "; ".join(texts)


class Judged(NamedTuple):
    claim: Claim
    task: str
    where: str  # in words: which runs
    verdict: Verdict


def judge_all(runs):
    """[Judged, ..] for every task, preset and dtype that has runs, and for the tasks of the claim's
    comparison that have none."""
    found = by_model(runs)
    kinds = defaultdict(set)  # {task: {(preset, dtype)}}
    for run in runs:
        kinds[run["task"]["name"]].add((run["preset"], run["dtype"]))

    verdicts = []
    for claim in CLAIMS:
        comparison = COMPARISONS[claim.comparison]
        for task in claim.tasks:
            judged = []
            for preset, dtype in sorted(kinds[task]):
                flags = ["--preset", preset, "--dtype", dtype, "--device", "cpu"]
                tried = tried_rates(comparison, [task], flags, found)
                verdict = claim.judge(at_best_rates(comparison, tried, task))
                if verdict.outcome != NOT_RUN:
                    where = f"{task}, {preset}, {dtype}"
                    own_flags = comparison.own_flags(task, preset)
                    if own_flags:
                        where += f", `{own_flags}`"
                    judged.append(Judged(claim, task, where, verdict))
            if not judged and task in comparison.tasks:
                where = f"{task}: `reproduce.py {claim.comparison}`"
                judged.append(Judged(claim, task, where, claim.judge({})))
            verdicts += judged
    return verdicts


# ---- 5. The command line ---------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def read_command_line(argv):
    """(options, the flags that are for train.py)"""
    parser = Parser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    register_own_things(argv)
    parser.add_argument("--list", action="store_true", help="name the comparisons")
    names = parser.add_subparsers(dest="name", metavar="NAME", help="a comparison, or: claims")
    add = names.add_parser("claims", allow_abbrev=False).add_argument
    add("--out", type=Path, default="out", help="the folder for claims.md (default: out)")
    add("--program", help="a program of your own, whose things are judged, too")
    for name in COMPARISONS:
        add = names.add_parser(name, allow_abbrev=False).add_argument
        add("--dry-run", action="store_true", help="print the command of each run")
        add("--draw", action="store_true", help="train nothing")
        add("--seeds", type=count, default=SEEDS, help=f"of each model (default: {SEEDS})")
        add("--jobs", type=count, help="runs side by side (default: one per core; one on a GPU)")
        add("--lr", type=list_of_rates, default=[], help="learning rates to try, as in 2e-3,4e-3")
        add("--out", type=Path, default="out", help="the folder for the figure (default: out)")
        add("--program", help="a program of your own, in place of train.py")
    options, flags = parser.parse_known_args(argv)
    if options.name in (None, "claims") and flags:
        fail(f"{' '.join(flags)}: not for {options.name or '--list'}")
    if options.list and options.name is not None:
        fail(f"--list stands alone, without {options.name}")
    for word in flags:
        flag = word.split("=")[0]
        if flag in ("--task", "--seed", "--resume"):
            fail(f"{flag}: each run of a comparison has its own")
    return options, flags


def register_own_things(argv):
    """Run --program for what it registers, which may be a comparison that argv names."""
    finder = Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--program")
    program = finder.parse_known_args(argv)[0].program
    if program is None:
        return
    if not Path(program).is_file():
        fail(f"--program {program}: no such file")
    run_folders.register(program)


def count(text):
    if not (text.isdecimal() and 1 <= int(text) <= 999):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: 1 to 999")
    return int(text)


def list_of_rates(text):
    try:
        rates = sorted({float(rate) for rate in text.split(",")})
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError
    except ValueError:
        allowed = "positive numbers, as in 2e-3,4e-3"
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: {allowed}") from None
    return rates


def main(argv=None):
    options, flags = read_command_line(argv)
    if options.name is None:
        list_comparisons()
    elif options.name == "claims":
        write_claims(options.out)
    else:
        compare(options, flags)


def list_comparisons():
    for name, comparison in COMPARISONS.items():
        results = []
        for claim in CLAIMS:
            if claim.comparison == name and claim.result not in results:
                results.append(claim.result)
        runs = SEEDS * len(comparison.models) * len(comparison.tasks)
        hours = runs * comparison.minutes / 60 / 2
        about = f"{', '.join(results):16}{runs:3} runs"
        print(f"{name:10}{about}, {hours:4.1f} hours at nano on two cores")


def write_claims(folder):
    runs, problems = finished_runs()
    page = claims_page(runs)
    print(page)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "claims.md").write_text(page)
    report(problems)
    if problems:
        sys.exit(1)


def compare(options, flags):
    """Train what is missing, draw and judge."""
    program = train.__file__ if options.program is None else options.program
    comparison = COMPARISONS[options.name]
    wanted = wanted_runs(comparison, flags, options.seeds, options.lr)
    if options.dry_run:
        for run in wanted:
            print(shlex.join(["python", options.program or "train.py", *run.arguments]))
        return

    check_folders(wanted)
    first, failed = wanted[0], 0
    if not options.draw:
        own_runs, _ = finished_runs(shipped=False)
        missing = missing_runs(wanted, own_runs)
        done = len(wanted) - len(missing)
        print(f"{len(wanted)} runs, {done} of them done", file=sys.stderr)
        usual_jobs = os.cpu_count() if first.options.device == "cpu" else 1
        if missing:
            failed = train_all(missing, options.jobs or usual_jobs, program)

    runs, problems = finished_runs()
    report(problems)
    tried = tried_rates(comparison, comparison.tasks, flags, by_model(runs), only=options.lr)
    if not tried:
        fail(f"out/ and results/ have no runs of {options.name}")
    show(options.name, tried, options.out / f"{options.name}_{first.preset}.png")
    sys.exit(1 if failed or problems else 0)


def report(problems):
    for problem in problems:
        print(f"reproduce.py: {problem}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(error)
    except KeyboardInterrupt:  # while nothing trains
        sys.exit(130)
