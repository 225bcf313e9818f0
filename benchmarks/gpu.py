"""An NVIDIA GPU for ten minutes:   python benchmarks/gpu.py [--minutes 10]

Is the code right there, how fast is it, and what do models learn? The stages run in this order, the
cheapest first:

    1 right   `python kernels.py`; losses of the same steps, taken in different ways; a run that is
              stopped and resumed
    2 fast    the convolution beside a copy (convolution.py), and a training step (step.py)
    3 learns  the paper's puzzle, four models side by side, for the minutes that are left

Each stage has a time limit. One that fails or takes longer costs a row that says so, and the next
one begins. At the end comes a table of what was expected, and what came out. The trainings stay in
out/, for plot.py and sample.py.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from common import HERE, Benchmark, cell, set_up_torch

ROOT = HERE.parent

# ---- A stage, and its limit ------------------------------------------------


def elsewhere(bench, name, limit, stage, *arguments):
    """Call stage(bench, *arguments) in a process of its own, which ends after `limit` seconds."""
    context = multiprocessing.get_context("spawn")  # CUDA does not work in a fork
    child = context.Process(target=begin, args=(bench, name, stage, arguments))
    child.start()
    try:
        child.join(limit)
        if child.exitcode is None:
            bench.add(what=name, failed=f"stopped after {limit:.0f} seconds")
        elif child.exitcode != 0:
            bench.add(what=name, failed=f"ended with status {child.exitcode}")
    finally:
        with contextlib.suppress(ProcessLookupError):  # usually all have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()


def begin(bench, name, stage, arguments):
    os.setsid()  # the processes that it starts belong to its group, and end with it
    set_up_torch()
    try:
        stage(bench, *arguments)
    except Exception as error:
        bench.add(what=name, failed=f"{error!r:.200}")


def python(words, **options):
    """Start a script of this repository."""
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, **options)


# ---- 1. Is it right? -------------------------------------------------------


def check_kernels(bench):
    check = python(["kernels.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    table, message = check.communicate()
    for line in table.splitlines()[1:]:  # below the heading
        *form, dtype, error, verdict, _, _ = line.replace(",", "").split()
        row = dict(what=f"kernels.py: {' '.join(form)}", dtype=dtype.removeprefix("torch."))
        bench.add(**row, relative_error=float(error), verdict=verdict)
    bench.add(what="kernels.py", status=check.returncode, message=message[-150:] or None)


def compare_losses(bench):
    """Eight steps from the same weights, on the same batches."""
    from step import make_step

    flags = "--task depo1 --preset small --batch-size 32"
    if bench.toy:
        flags = "--task depo1 --preset nano --batch-size 4"
    compiled = "--compile" if bench.device == "cuda" else "--no-compile"
    ways = {  # flags
        "eager": "--no-compile",
        "accumulated": f"{compiled} --grad-accum 2",  # which is without CUDA graphs
        "CUDA graphs": "--compile",
    }
    eager = None
    for way, more_flags in ways.items():
        if bench.device != "cuda" and "--compile" in more_flags:
            bench.add(what=f"losses, {way}", failed="needs CUDA")
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        step, _ = make_step("Canon-ABCD", f"{flags} {more_flags}")
        values = []
        for _ in range(8):
            loss, norm = step()
            values.append([loss.item(), norm.item()])
        values = torch.tensor(values)
        if way == "eager":
            eager = values
        difference = ((values - eager).abs() / eager).amax(dim=0)  # of losses, and of norms
        loss, norm = (f"{number:.2%}" for number in difference.tolist())
        losses = " ".join(f"{number:.4f}" for number in values[:, 0].tolist())
        bench.add(what=f"losses, {way}", loss_off_by=loss, norm_off_by=norm, losses=losses)


def stop_and_resume(bench):
    """A run with two workers gets SIGTERM, and is resumed. Beside it runs the same, not stopped."""
    flags = "--task copy --preset nano --canon abcd --workers 2 --no-compile --eval-size 64"
    flags += " --N 8 --block-size 17 --steps 100" if bench.toy else " --steps 600"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    folder = Path(tempfile.mkdtemp())
    words = f"train.py {flags} --out".split()
    whole = python([*words, folder / "whole"], **silent)
    stopped = python([*words, folder / "stopped"], **silent)
    while stopped.poll() is None and not lines_of(folder / "stopped"):
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    stopped.wait()
    resumed = python([*words, folder / "stopped", "--resume"], **silent)
    statuses = {"whole": f"{whole.wait()}", "stopped": f"{stopped.wait()}, then {resumed.wait()}"}
    for name, status in statuses.items():
        *_, last, final = lines_of(folder / name)
        scores = in_words(final["eval"])
        row = dict(what=f"a run, {name}", status=status)
        bench.add(**row, step=final["step"], loss=last["loss"], scores=scores)


def lines_of(run):
    """Of its log, so far."""
    log = run / "metrics.jsonl"
    if not log.exists():
        return []
    whole_lines = log.read_text().split("\n")[:-1]  # the last line may still be growing
    return [json.loads(line) for line in whole_lines]


def in_words(scores):
    return " ".join(f"{name} {value:.1%}" for name, value in scores.items())


# ---- 2. Is it fast? --------------------------------------------------------

SMALL = "--task depo1 --preset small --batch-size 256 --compile"
LARGE = "--task depo1 --preset paper --batch-size 16 --compile"  # 12 layers, 768 dims


def time_convolution(bench):
    import convolution

    convolution.measure(bench)


def time_steps(bench, size, flags):
    """First the rows with the time on the wall, then those with the GPU's work: a profiler may slow
    down what comes after it."""
    from step import make_step

    if bench.toy:
        flags = "--task depo1 --preset nano --batch-size 2 --no-compile"
    steps = {}
    for model in ("Canon-ABCD", "without Canon"):
        steps[model], _ = make_step(model, flags)
        wall_ms = wall_milliseconds(steps[model], rounds=2 if bench.toy else 20)
        bench.add(what=f"step, {size}", model=model, wall_ms=wall_ms)
    for model, step in steps.items():
        bench.add(what=f"GPU in a step, {size}", model=model, **work_of_gpu(step))


def wall_milliseconds(step, rounds):
    for _ in range(5):  # compiling, and recording CUDA graphs
        loss, _ = step()
    loss.item()  # waits for the GPU
    began = time.perf_counter()
    for _ in range(rounds):
        loss, _ = step()
    loss.item()
    return (time.perf_counter() - began) / rounds * 1e3


def work_of_gpu(step):
    """How long the GPU works in a step, how many kernels it runs, and in how many launches the CPU
    starts them. A CUDA graph is one launch."""
    if not torch.cuda.is_available():
        return {"failed": "needs CUDA"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    times, launches = [], 0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.append(event.device_time)  # microseconds
        elif "Launch" in event.name:
            launches += 1
    return {"gpu_ms": sum(times) / 1e3, "kernels": len(times), "launches": launches}


# ---- 3. What do models learn? ----------------------------------------------

TRAININGS = {
    "rope": "--pos rope",
    "rope_canon": "--pos rope --canon abcd",
    "nope": "--pos nope",
    "nope_canon": "--pos nope --canon abcd",
}


def steps_that_fit(bench, seconds):
    """A whole schedule for each of the trainings, which share the GPU."""
    seconds -= 60  # they start, and compile
    alone = 22_000  # windows that one of them takes in a second on an H100
    for row in rows_of(bench):
        if "gpu_ms" in row and row["what"].endswith("small") and row["model"] == "Canon-ABCD":
            alone = 256 / row["gpu_ms"] * 1e3
    steps = int(0.8 * seconds * alone / len(TRAININGS) / 192)
    return min(9000, max(200, steps))  # the preset has 9,000


def train_side_by_side(bench, seconds):
    """A row for each evaluation. What is not done in time is stopped, and can be resumed."""
    deadline = time.monotonic() + seconds
    if bench.toy:
        folder = Path(tempfile.mkdtemp())
        trainings = {"nope_canon": TRAININGS["nope_canon"]}
        size = "--preset nano --steps 3 --batch-size 2 --eval-size 4 --workers 0 --no-compile"
    else:
        folder = ROOT / time.strftime("out/gpu_%Y-%m-%d_%H-%M-%S")
        trainings = TRAININGS
        size = f"--preset small --steps {steps_that_fit(bench, seconds)} --workers 1"
    bench.add(what="trainings", folder=str(folder), size=size)
    folder.mkdir(parents=True, exist_ok=True)
    runs = {}
    for name, flags in trainings.items():
        words = f"train.py --task depo1 {flags} {size} --out".split()
        with open(folder / f"{name}.txt", "w") as printed:
            runs[name] = python([*words, folder / name], stdout=printed, stderr=printed)
    seen = Counter()  # how many evaluations of each run have a row
    while time.monotonic() < deadline and any(run.poll() is None for run in runs.values()):
        time.sleep(1)
        for name in runs:
            add_scores(bench, folder / name, seen)
    for run in runs.values():
        run.send_signal(signal.SIGTERM)
    for name, run in runs.items():
        if run.wait() not in (0, 128 + signal.SIGTERM):
            printed = (folder / f"{name}.txt").read_text()
            bench.add(what=name, failed=printed.strip()[-150:])
        add_scores(bench, folder / name, seen)


def add_scores(bench, run, seen):
    """Rows for those evaluations of a run that are new. The last line of its log has its speed."""
    evaluations = [line for line in lines_of(run) if "eval" in line]
    for line in evaluations[seen[run] :]:
        row = dict(what=run.name, step=line["step"], tokens_per_s=line.get("tokens_per_s"))
        bench.add(**row, scores=in_words(line["eval"]))
    seen[run] = len(evaluations)


# ---- What was expected, and what came out ----------------------------------

EXPECTED = {  # from an H100; the trainings had 9,000 steps there
    "kernels.py": "status 0",
    "losses, accumulated": "off by 0.3% and 7%",
    "losses, CUDA graphs": "off by 0.3% and 7%",
    "a run, whole": "status 0",
    "a run, stopped": "status 143, then 0, else the same",
    "causal_conv": "shares 0.99 and 0.70 to 0.88",
    "step, small": "11.8 and 8.9",
    "GPU in a step, small": "11.5 and 8.7",
    "step, large": "65 and 54",
    "GPU in a step, large": "not known",
    "rope": "97, 95, 71, 30%",
    "rope_canon": "98, 96, 92, 85%",
    "nope": "94, 69, 41, 15%",
    "nope_canon": "100, 100, 98, 96%",
}


def rows_of(bench):
    return [json.loads(line) for line in bench.out.read_text().splitlines()[1:]]


def print_table(bench):
    rows = rows_of(bench)
    last = {row["what"]: row for row in rows}
    print(f"\n{'':24} {'expected':36}came out")
    for row in rows:
        what = row.pop("what")
        if what in TRAININGS and row is not last[what]:
            continue
        if what in EXPECTED or "failed" in row:
            values = ", ".join(f"{name} {cell(name, value).strip()}" for name, value in row.items())
            print(f"{what:24} {EXPECTED.get(what, 'a result'):36}{values}")


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv, minutes=10.0)
    if bench.device != "cuda" and not bench.toy:
        bench.out.unlink()  # it would have no rows
        sys.exit("gpu.py: needs an NVIDIA GPU; --toy tries it without one")
    if bench.out is None:
        bench.out = Path(tempfile.mkdtemp(), "rows.jsonl")
        bench.out.write_text("{}\n")
    # `timeout` stops this as Ctrl-C does: the stage ends, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that start now
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    minutes = 60 if bench.toy else bench.minutes  # a toy soon ends by itself
    deadline = time.monotonic() + 60 * minutes
    share = minutes / 10  # the limits below are in seconds, for ten minutes in all
    elsewhere(bench, "kernels.py", 40 * share, check_kernels)
    elsewhere(bench, "losses", 100 * share, compare_losses)
    elsewhere(bench, "a run", 50 * share, stop_and_resume)
    elsewhere(bench, "causal_conv", 60 * share, time_convolution)
    elsewhere(bench, "step, small", 90 * share, time_steps, "small", SMALL)
    if not bench.toy:  # there it would be a second small one
        elsewhere(bench, "step, large", 90 * share, time_steps, "large", LARGE)
    left = deadline - time.monotonic()
    elsewhere(bench, "trainings", left, train_side_by_side, left - 20)
    print_table(bench)


if __name__ == "__main__":
    main()
