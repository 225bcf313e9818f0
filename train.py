"""Train one model on one task:   python train.py --task depo --canon abcd

A run leaves three files in out/<run>/:

    config.json     its settings, and where it ran
    metrics.jsonl   the log, a line of JSON every 20 steps and at each evaluation; the last one has
                    the final scores, and "final": true
    ckpt.pt         the last checkpoint

    python train.py --resume out/depo1_nano_rope_abcd_s0      continues a run that was stopped
    torchrun --nproc_per_node=4 train.py --task depo          trains on four GPUs
"""

# The program is in sections 1 to 5: 1 the settings, 2 data, optimizer and learning rate, 3 one
# step, 4 the loop, 5 from the command line to the loop. Their helpers follow: 6 the run's folder
# and its checkpoint, 7 checks before training, 8 what makes it faster, 9 presets, 10 the command
# line.

import argparse
import atexit
import contextlib
import copy
import ctypes
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import typing
from pathlib import Path

try:
    import fcntl  # locks files
except ImportError:  # Windows has none
    fcntl = None

# Idle threads of PyTorch keep their cores busy for a while before they sleep. If another program
# needs a core, that makes steps several times slower, so let them sleep sooner. This has to be set
# before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from canon_gpt import CanonGPT, Config, Refused, State, require, summed_loss
from kernels import gpu_has_bfloat16, relative_error
from tasks import ALIASES, TASKS, Task, device_of, make_parser, make_task, score_text, wrapped

RANK, WORLD = 0, 1  # the number of this process, from 0, and how many there are
if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # torchrun starts several, and sets both
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# ---- 1. Settings -----------------------------------------------------------
#
# An option of the command line is a field of Training, of Run or of Config (canon_gpt.py), or an
# argument of the task (tasks.py). To add one, add a field and use it: its flag, its default and its
# help, which is the comment beside it, follow. Presets (section 9) and the device override some
# defaults.


@dataclasses.dataclass
class Training:
    """What changes a run's result, besides its task and its model."""

    preset: str = "nano"  # sizes of task, model and training: nano, small (default on CUDA), paper
    steps: int = 2000  # batches to train on (Capo computes its own from --exposures)
    batch_size: int = 32  # windows in a step, over all processes and micro-batches
    lr: float = 1e-3  # peak learning rate
    warmup: int = 1000  # steps until the learning rate peaks
    schedule: str = "cosine"  # how the learning rate falls after warm-up: cosine, linear
    optimizer: str = "adamw"  # adamw, or your own entry of OPTIMIZERS
    weight_decay: float = 0.03  # of matrices only
    betas: tuple = (0.9, 0.98)  # AdamW's
    eps: float = 1e-6  # AdamW's
    clip: float = 1.0  # the largest gradient norm; 0: no clipping
    seed: int = 0  # of data and initial weights
    dtype: str = "float32"  # or bfloat16, float16: mixed precision, the default on CUDA
    eval_size: int = 512  # instances scored in an evaluation

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_size"):
            value = getattr(self, name)
            require(value >= 1, name, value, "allowed: 1 or more")
        for name in ("warmup", "weight_decay", "eps", "clip"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "allowed: 0 or more, and finite")
        require(0 < self.lr < math.inf, "lr", self.lr, "allowed: more than 0, and finite")
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(in_range, "betas", self.betas, "allowed: from 0 to below 1")
        require(0 <= self.seed < 2**32, "seed", self.seed, "allowed: 0 to 2^32 - 1")
        choices = {"schedule": SCHEDULES, "optimizer": OPTIMIZERS, "dtype": DTYPES}
        for name, allowed in choices.items():
            value = getattr(self, name)
            require(value in allowed, name, value, f"allowed: {', '.join(allowed)}")


@dataclasses.dataclass
class Run:
    """How and where it runs. Results differ by rounding only (unless a layer is random)."""

    device: str = "cpu"  # cuda, mps or cpu; by default the first that PyTorch sees
    out: str | None = None  # the run's folder; by default out/ and a name made from the settings
    resume: str | None = None  # go on with the run in this folder
    workers: int = 0  # processes that draw data; by default 4 on CUDA, else 0
    compile: bool | None = None  # torch.compile; by default where it works and pays
    grad_accum: int = 1  # micro-batches in a step of each process: less memory, same training
    eval_every: int = 0  # steps between evaluations; 0: a 20th of the run, but at least 20

    def __post_init__(self):
        seen = ", ".join(devices())
        require(self.device in devices(), "device", self.device, f"PyTorch sees only: {seen}")
        require(self.workers >= 0, "workers", self.workers, "allowed: 0 or more")
        require(self.grad_accum >= 1, "grad_accum", self.grad_accum, "allowed: 1 or more")
        require(self.eval_every >= 0, "eval_every", self.eval_every, "allowed: 0 or more")
        if self.out is not None:
            self.out = str(Path(self.out).expanduser())  # --out=~/run: no shell does it there


def devices():
    """The devices that PyTorch sees, the fastest first."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def device_defaults(device):
    """{option: its default} on this device, where that depends on it."""
    if device != "cuda":
        return {"device": device}
    dtype = "bfloat16" if gpu_has_bfloat16() else "float16"
    return {"device": device, "preset": "small", "workers": 4, "dtype": dtype}


# ---- 2. Data, optimizer, learning rate -------------------------------------
#
# A task draws documents and packs them into windows (tasks.py: `documents`, `Task.batch`).
# `draw_batch` asks it for the windows of a step, and PyTorch's loader calls that for each step.


def draw_batch(steps_done, task, training):
    """The batch of the next step. Under torchrun, each process takes its share of the rows.

    inputs, targets  (rows, block_size) int64; a target is -1 where nothing is asked
    n_targets        how many targets the whole batch has, over all processes; 1 if none

    No tensors: workers would hand them over in shared memory, which a container may lack.
    """
    inputs, targets = task.batch(training.seed, steps_done, training.batch_size)
    n_targets = max(1, (targets >= 0).sum())  # without any, the loss is 0 / 1, not 0 / 0
    return inputs[RANK::WORLD], targets[RANK::WORLD], n_targets


def load_batches(task, training, run, steps_done):
    """Yields the batches after `steps_done` steps, on the device. Workers, if any, draw ahead."""
    # A batch follows from the settings and the number of steps done. So the loader's data set is
    # just these numbers, and its collate_fn draws a batch from one of them.
    loader = DataLoader(
        range(steps_done, training.steps),
        batch_size=None,  # one number makes a whole batch
        collate_fn=functools.partial(draw_batch, task=task, training=training),
        num_workers=run.workers,
    )
    for batch in loader:
        tensors = [torch.as_tensor(array) for array in batch]
        if run.device == "cuda":  # from pinned memory the CPU need not wait for the copy
            tensors = [tensor.pin_memory() for tensor in tensors]
        yield [tensor.to(run.device, non_blocking=True) for tensor in tensors]


def weight_groups(model, training):
    """AdamW's parameter groups. The matrices of Linear and Embedding layers have weight decay;
    norms, biases and Canon layers do not."""
    # A set finds a tensor by its identity; a list would compare values.
    matrices = {m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p in matrices], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p not in matrices], "weight_decay": 0.0},
    ]


def adamw(model, training):
    # Fused: one kernel updates many weights. (Not on MPS, where it is untested.) On a CPU it
    # assumes that all are contiguous. If one is not, it can update the wrong elements (PyTorch
    # 2.13.0; findings/fused_strides.sh).
    contiguous = all(weight.is_contiguous() for weight in model.parameters())
    return torch.optim.AdamW(
        weight_groups(model, training),
        lr=training.lr,
        betas=training.betas,
        eps=training.eps,
        fused=contiguous and device_of(model).type != "mps",
    )


# Your own optimizer is a function with these arguments, and one more entry.
OPTIMIZERS = {"adamw": adamw}


def make_optimizer(model, training):
    """The optimizer. Each group's initial "lr" is its peak; the loop sets "lr" before each step.

    One that leaves weights out is refused: nothing would zero their gradients, which would grow,
    and be clipped together with the others.
    """
    optimizer = OPTIMIZERS[training.optimizer](model, training)
    held = set()
    for group in optimizer.param_groups:
        group["peak"] = float(group["lr"])
        held.update(group["params"])
    left = [name for name, p in model.named_parameters() if p.requires_grad and p not in held]
    allowed = f"leaves out {', '.join(left[:3])}; requires_grad = False freezes weights"
    require(not left, "optimizer", training.optimizer, allowed)
    return optimizer


# How the learning rate falls after warm-up. A schedule returns a factor of the peak. `done` is 0
# when warm-up ends, and rises to just below 1. Your own is one more function and entry.


def cosine(done):
    """From 1 to a tenth."""
    half_a_wave = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
    return 0.1 + 0.9 * half_a_wave


def linear(done):
    """From 1 to 0."""
    return 1 - done


SCHEDULES = {"cosine": cosine, "linear": linear}


def learning_rate(step, peak, training):
    """The learning rate of a step. Steps are counted from 1."""
    # 1. Warm-up: it rises linearly to the peak.
    if step <= training.warmup:
        return peak * step / training.warmup
    # 2. Decay. It counts step - 1, so that the first step after warm-up still has the peak, and the
    #    last one of `linear` is above 0.
    done = (step - 1 - training.warmup) / (training.steps - training.warmup)
    factor = SCHEDULES[training.schedule](done)
    # Your schedule may return a NumPy float, which torch.load would refuse in a checkpoint.
    return float(peak * factor)


# ---- 3. One step -----------------------------------------------------------

# With mixed precision, mixers, MLPs and head compute in 16 bits. Weights and residual stream stay
# in float32, and so does what canon_gpt.py passes through `at_least_float32`.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def mixed_precision(training, run):
    """The context in which a model computes."""
    mixed = training.dtype != "float32"
    return torch.autocast(run.device, DTYPES[training.dtype], enabled=mixed)


def make_scaler(training, run):
    """A GradScaler. In float16, small gradients round to 0, so it multiplies the loss, divides the
    gradients by the same factor, and skips a step whose gradients overflow. With other dtypes it is
    off."""
    return torch.amp.GradScaler(run.device, enabled=training.dtype == "float16")


def train_step(model, optimizer, scaler, batch, autocast, clip, grad_accum=1):
    """Update the weights from a batch: forward, backward, clip, step. To save memory, the batch can
    be cut into `grad_accum` micro-batches (gradient accumulation).

    scaler   see `make_scaler`
    returns  this process's part of the loss, and the norm of the gradient before it is clipped
    """
    inputs, targets, n_targets = batch  # as `load_batches` yields it
    batch_loss = 0.0
    for some_inputs, some_targets in zip(inputs.chunk(grad_accum), targets.chunk(grad_accum)):
        with autocast:
            logits, _ = model(some_inputs)
        # Not the model's own loss, which is the mean of this part only. Divided by the number of
        # targets in the whole batch, the losses of its parts add up to its mean.
        loss = summed_loss(logits, some_targets) / n_targets
        # DDP averages the gradients of all processes, so the factor makes their mean a sum. (It
        # exchanges them after each micro-batch, which is right, but slower than once.)
        scaler.scale(WORLD * loss).backward()
        batch_loss = batch_loss + loss.detach()  # no .item(): the CPU would wait for the GPU
    scaler.unscale_(optimizer)
    max_norm = clip if clip > 0 else math.inf  # inf: only measure it
    gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return batch_loss, gradient_norm


# ---- 4. The training loop --------------------------------------------------

LOG_EVERY = 20  # steps between two lines of the log


def train(task, training, run, model, fast_model, optimizer, scaler, progress):
    """The training loop, from the step after progress["step"] to the last score.

    fast_model  see `make_fast_model`
    scaler      see `make_scaler`
    progress    the part of a checkpoint that says how far the run has got, a dict: the last step
                that is saved, the seconds until then, and the log so far
    """
    autocast = mixed_precision(training, run)
    steps_done = progress["step"]
    write_log(run.out, progress["log"], mode="w")  # drops lines that came after the checkpoint
    began = time.perf_counter() - progress["seconds"]  # so that seconds add up over pauses
    batches = load_batches(task, training, run, steps_done)
    eval_every = run.eval_every or max(20, training.steps // 20)
    first_eval = eval_every // 2  # early, so that a broken evaluation shows early
    bar_text = {}  # the last scores and loss
    no_bar = RANK > 0 or sys.stderr is None
    with tqdm(total=training.steps, initial=steps_done, mininterval=1, disable=no_bar) as bar:
        for step, batch in enumerate(batches, steps_done + 1):
            # 1. Set the learning rate.
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, group["peak"], training)

            # 2. Learn from one batch. The seed is for layers that are random, such as dropout.
            torch.manual_seed(10**9 * training.seed + step * WORLD + RANK)
            loss, gradient_norm = train_step(
                fast_model, optimizer, scaler, batch, autocast, training.clip, run.grad_accum
            )
            bar.update()

            # 3. Most steps stop here: reading the loss would stall the CPU. Put anything that must
            #    run every step above this line.
            score_now = step % eval_every == 0 or step in (first_eval, training.steps)
            if not score_now and step % LOG_EVERY != 0:
                continue

            # 4. End the run if it has diverged, before this state is saved.
            mean_loss = sum_over_processes(loss)
            gradient_norm = gradient_norm.item()
            # In float16 the scaler skips a step that overflows, and lowers its scale. In other
            # dtypes the scale is 1.
            can_recover = scaler.get_scale() > 1
            overflow = not math.isfinite(gradient_norm)
            if not math.isfinite(mean_loss) or (overflow and not can_recover):
                bar.close()
                found = f"loss = {mean_loss}, gradient = {gradient_norm}"
                end(f"step {step}: {found}. Start again with a smaller --lr", status=1)

            # 5. Log this batch's loss, and now and then the scores.
            line = {
                "step": step,
                "loss": round(mean_loss, 5),
                "tokens": step * training.batch_size * task.block_size,
                "lr": optimizer.param_groups[0]["lr"],
                "gradient_norm": round(gradient_norm, 5),  # before it is clipped
            }
            if score_now:
                line["eval"] = evaluate(task, model, training, autocast)
                bar_text |= format_scores(task, line["eval"])
            progress["log"].append(line)
            write_log(run.out, [line], mode="a")
            bar_text["loss"] = f"{mean_loss:.3f}"
            bar.set_postfix(bar_text, refresh=False)

            # 6. Save a checkpoint after each evaluation.
            if score_now:
                progress["seconds"] = time.perf_counter() - began
                now = progress | {"step": step}
                save_checkpoint(run.out, now, model=model, optimizer=optimizer, scaler=scaler)
                progress["step"] = step  # after the save, because Ctrl-C names the saved step

    finish(task, training, run, model, autocast, progress)


@torch.no_grad()
def evaluate(task, model, training, autocast):
    """The task's scores, {name: float}, on instances or text drawn for scoring. These scores take
    the place of a validation loss. Each process of torchrun computes all of them."""
    model.eval()  # ours has no dropout; your own layer may have some
    with autocast:
        scores = task.evaluate(model, training.seed, training.eval_size)
    model.train()
    return {name: float(value) for name, value in scores.items()}


def format_scores(task, scores):
    """{score: text}, such as {"k=1": "97%"}."""
    return {name: score_text(value, task.units.get(name)) for name, value in scores.items()}


def finish(task, training, run, model, autocast, progress):
    """Log and print the final scores, what the run cost, and one instance with answers."""
    last = progress["log"][-1]
    seconds = progress["seconds"]  # including compiling and evaluations
    final = {
        "step": training.steps,
        "eval": last["eval"],
        "seconds": round(seconds, 1),
        "tokens_per_s": round(last["tokens"] / seconds),
        "final": True,
    }
    write_log(run.out, [final], mode="a")
    if RANK == 0:
        for name, text in format_scores(task, final["eval"]).items():
            print(f"{name:16}{text:>9}")
        print(f"\n{final['seconds']:,} seconds, {final['tokens_per_s']:,} tokens/s")
        model.eval()
        with autocast, torch.no_grad():
            print("\n" + wrapped(task.show(model, training.seed)))


# What you may want to add to the loop in `train`:
# - To log another number, add it to `line`, as a Python number, not a tensor. (Under torchrun the
#   log is the first process's; only the loss is summed over all.) For a number from inside the
#   model, let `forward` return it in place of the loss, which `train_step` doesn't use. Detach it
#   in `forward`: compiled code differentiates unused outputs, too, which can make NaN (PyTorch 2.13
#   and 2.15; findings/compile_unused.sh).
# - An average of the weights (EMA) starts as `average = copy.deepcopy(model)` in `main`, before the
#   checkpoint is loaded, and is passed to `train` with the model. Update it right after
#   `train_step`,
#
#       with torch.no_grad():
#           for averaged, weight in zip(average.parameters(), model.parameters()):
#               averaged.lerp_(weight, 0.01)  # over about the last hundred steps
#
#   and pass it to `evaluate` and `finish` in the model's place. Save it as model=average, which is
#   what sample.py reads, and the trained weights as raw=model; load both likewise.
# - Noise on gradients is added in `train_step`, after `unscale_` and before clipping. It must be
#   the same in all processes. Because their seeds differ, draw it with its own generator, seeded
#   from the seed and the step.


# ---- 5. From the command line to the loop ----------------------------------


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        task, config, training, run = settings_of(argv)
        check_batch(task, training, run)
        join_processes(run)
        torch.manual_seed(training.seed)  # for the initial weights
        model = CanonGPT(config).to(run.device)
        check_model(model, mixed_precision(training, run))
        tune_machine()  # after the check, which needs exact products
        optimizer = make_optimizer(model, training)
        scaler = make_scaler(training, run)
        compiled = decide_compile(config, training, run)
        if RANK == 0:
            if run.resume is None:
                about = about_run(task, config, training, run, model, compiled, command_of(argv))
                make_folder(run.out, about)
            lock = lock_folder(run.out)  # until the program ends
        progress = {"step": 0, "seconds": 0.0, "log": []}
        # A run that was stopped before its first checkpoint starts again.
        if Path(run.out, "ckpt.pt").exists():
            progress = load_checkpoint(run.out, model=model, optimizer=optimizer, scaler=scaler)
        if RANK == 0:
            announce(model, training, run, compiled, progress["step"])
    except Refused as error:
        end(error)
    except KeyboardInterrupt:
        end("stopped before training began", status=130)
    try:
        fast_model = make_fast_model(model, run, compiled)
        train(task, training, run, model, fast_model, optimizer, scaler, progress)
    except KeyboardInterrupt:
        resume = command_of(["--resume", run.out])
        end(f"stopped; {resume} continues from step {progress['step']}", status=130)


def end(message, status=2):
    """End the program with one line. Status 2 means bad input."""
    process = f", process {RANK}" if WORLD > 1 else ""
    print(f"train.py{process}: {message}", file=sys.stderr)
    raise SystemExit(status)


def announce(model, training, run, compiled, steps_done):
    """Print what is about to happen. All settings are in config.json."""
    counts, config = model.parameter_counts(), model.config
    size = f"n_layer {config.n_layer}, d_model {config.d_model}"
    how = "compiled: the first step takes up to a minute" if compiled else "not compiled"
    place = processor_name(run.device) if run.device == "cuda" else run.device
    print(run.out)
    print(f"  {size}: {counts['total']:,} parameters, {counts['canon']:,} of them in Canon layers")
    windows = f"{training.batch_size} windows of {config.block_size} tokens"
    print(f"  {training.steps:,} steps of {windows}")
    if steps_done > 0:
        print(f"  continues after step {steps_done:,}")
    if training.warmup > training.steps:
        print(f"  the learning rate never peaks, because warm-up takes {training.warmup:,} steps")
    print(f"  {place}, {training.dtype}, {how}", flush=True)


def command_of(argv):
    """What to type to run this program with these arguments."""
    begun_as = ["python"] if WORLD == 1 else ["torchrun", f"--nproc_per_node={WORLD}"]
    program = [sys.argv[0]]
    if program == ["-c"]:  # python -c "import mine, train; train.main()"
        program.append(sys.orig_argv[sys.orig_argv.index("-c") + 1])
    join_words = subprocess.list2cmdline if os.name == "nt" else shlex.join
    return join_words(begun_as + program + argv)


# ---- 6. The run's folder: settings, log, checkpoint ------------------------


def about_run(task, config, training, run, model, compiled, command):
    """What config.json holds: the settings, and where the run came from."""
    settings, execution = dataclasses.asdict(training), dataclasses.asdict(run)
    del execution["out"], execution["resume"]  # the folder may be moved
    return {
        "run": Path(run.out).name,
        "preset": settings.pop("preset"),
        "task": task.settings,
        "model": dataclasses.asdict(config),
        "training": settings,
        "execution": execution,
        "units": task.units,
        "chance": task.chance,
        "vocabulary": hash_of(task.vocabulary),
        "parameters": model.parameter_counts(),
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": processor_name(run.device),
        "processes": WORLD,
        "compiled": compiled,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def hash_of(vocabulary):
    words = [str(word) for word in vocabulary]  # your own may be numbers
    return hashlib.sha256(repr(words).encode()).hexdigest()


def processor_name(device):
    """The GPU's name, or the CPU's and its number of threads. (Rounding differs between them.)"""
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has this file
        names = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        name = names[0] if names else name
    threads = torch.get_num_threads()
    return f"{device}, {name}, {threads} thread{'s' if threads > 1 else ''}"


def make_folder(out, about):
    """Make the run's folder, with its config.json. A folder that has a run is refused."""
    has_run = f"holds a run already; continue it with --resume {out}, or remove it"
    try:
        for name in ("config.json", "ckpt.pt"):
            require(not Path(out, name).exists(), "out", out, has_run)
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(Path(out, "config.json"), "x") as file:  # "x": fails if one has just been made
            file.write(json.dumps(about, indent=1) + "\n")
    except OSError as error:
        raise Refused(f"out = {out!r}: {error.strerror}") from None


def lock_folder(out):
    """Refused if another process trains in this folder. Returns the lock, an open file, which is
    released when the process and its workers end, even if they are killed."""
    lock = open(Path(out, "config.json"), "a")  # NFS locks only what may be written
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{out}: another process is training this run") from None
        except OSError:  # a file system without locks, as on many clusters
            pass
    return lock


def read_config(folder):
    """What config.json says of a run, a dict. Raises Refused if there is none, or if it is damaged
    or has a field that this version lacks."""
    path = Path(folder, "config.json")
    require(path.is_file(), "run", str(folder), "there is no config.json in this folder")
    try:
        about = json.loads(path.read_text())
        for part, owner in {"model": Config, "training": Training, "execution": Run}.items():
            inspect.signature(owner).bind(**about[part])  # TypeError if a field is unknown
        about["task"]["name"], about["preset"], about["command"]  # KeyError if one is missing
        return about
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} is damaged or another version's: {error!r}") from None


def task_and_config(about):
    """The Task and the model's Config, given what config.json says."""
    try:
        run_seed = about["training"].get("seed", Training.seed)
        task = make_task(**about["task"], run_seed=run_seed)
        now = hash_of(task.vocabulary)  # the order of a set, say, differs between processes
        begun_so = about.get("vocabulary", now) == now
        require(begun_so, "task", task.name, "its vocabulary isn't the one that the run began with")
        return task, Config(**about["model"])
    except Refused as error:  # your own part may not have been imported
        raise Refused(f"{error}. The run was begun by: {about['command']}") from None


def write_log(out, lines, mode):
    """Append lines to metrics.jsonl (mode "a"), or replace it (mode "w")."""
    if RANK == 0:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        text = re.sub(": (NaN|-?Infinity)", ": null", text)  # JSON has no such numbers
        with open(Path(out, "metrics.jsonl"), mode) as file:
            file.write(text)


# A run that is killed at any moment continues with --resume from its last checkpoint. ckpt.pt is
# always whole, because a new one is written to another file, which then takes its place in one
# move. On a CPU, with the same options and number of threads, a resumed run ends with the same
# bits: a checkpoint holds all that a step changes (weights, optimizer, scaler, and the log so far),
# and no random state has to be saved, because a batch follows from the seed and the step alone, and
# so does PyTorch's seed.


def save_checkpoint(out, progress, **parts):
    """Save the `progress` of `train`, and the state of each part, such as model=model."""
    if RANK > 0:
        return
    fresh = Path(out, "ckpt.pt.new")
    torch.save({name: part.state_dict() for name, part in parts.items()} | progress, fresh)
    # Fail now if `load_checkpoint` could not read what your optimizer keeps, such as NumPy's
    # numbers.
    torch.load(fresh, map_location="meta", weights_only=True)  # without the tensors' numbers
    replace_file(fresh, Path(out, "ckpt.pt"))


def replace_file(fresh, path):
    """Move a file to where another one may be. On Windows this fails while a program, such as a
    virus scanner, has that one open, so keep trying for five seconds."""
    for _ in range(50):
        try:
            return os.replace(fresh, path)
        except PermissionError:
            time.sleep(0.1)
    os.replace(fresh, path)


def load_checkpoint(out, **parts):
    """Give each part, such as model=model, the state that it had at the last checkpoint.

    Returns how far the run was then, the `progress` of `train`. Raises Refused if the checkpoint is
    missing, damaged or another model's.
    """
    path = Path(out, "ckpt.pt")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)  # a pickle could run code
        saved["step"]  # fails if it is not a checkpoint
    except Exception as error:  # a damaged file fails in many ways
        raise Refused(f"{path} is missing or damaged ({type(error).__name__})") from None
    try:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        # An optimizer knows weights only by their order.
        if "optimizer" in parts and list(saved["model"]) != list(parts["model"].state_dict()):
            raise ValueError("its weights are in another order")
        return {name: saved[name] for name in ("step", "seconds", "log")}
    except (KeyError, RuntimeError, ValueError) as error:  # what PyTorch raises for another model
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"{path} is another model's: {reason}") from None


# ---- 7. Checks before training ---------------------------------------------


@torch.no_grad()
def check_model(model, autocast):
    """Refuse a model that is random in eval mode, or that a checkpoint does not restore; one that
    looks ahead, or at other rows of its batch, because it would find tasks too easy; and one that
    gives other logits when a text comes in pieces, because it would generate wrong answers.

    It adds noise to the weights of a copy, because a layer that starts at zero would hide a fault.
    """
    torch.set_float32_matmul_precision("highest")  # the differences that it looks for are small
    config = model.config
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight += 0.02 * noise.to(weight)  # as large as initial weights
    length = min(config.block_size, 128)  # more than a chunk of the linear mixers
    row = torch.arange(length, device=model.embed.weight.device) % config.vocab_size
    tokens = row.repeat(2, 1)  # two rows
    cut = max(1, 2 * length // 3)
    fault = None
    if is_random(model, tokens, autocast):
        fault = "a layer is random in eval mode, or differs when it is loaded again (or NaN)"
    elif looks_ahead(model, tokens, cut, autocast):
        fault = "a layer looks ahead, or at other rows of the batch"
    elif model.streams and differs_in_pieces(model, tokens, cut):
        fault = "a layer must keep what it needs in state[self], or say streams = False"
    if fault is not None:
        layers = f"mixer {config.mixer}, pos {config.pos}, canon_type {config.canon_type}"
        raise Refused(f"{layers}: {fault}")


def differ(a, b, tolerance):
    """Whether two outputs differ by more than rounding. With `not .. <=`, NaN differs, too."""
    return not relative_error(a, b) <= tolerance


def is_random(model, tokens, autocast):
    """Whether the model gives other logits when it is made and loaded again. Usually both have the
    same bits."""
    other = type(model)(model.config).to(tokens.device)
    other.load_state_dict(model.state_dict())
    model.eval()  # without dropout
    other.eval()
    with autocast:
        logits, _ = model(tokens)
        again, _ = other(tokens)
    return differ(again, logits, tolerance=1e-6)


def looks_ahead(model, tokens, cut, autocast):
    """Whether the first row's logits before a cut change with the tokens after it, or with the
    other row. There are two cuts, because a chunk's boundary can't be at both."""

    def logits_of(inputs):
        torch.manual_seed(0)  # the same dropout
        with autocast:
            return model(inputs)[0]

    for is_training in (False, True):  # BatchNorm, for example, looks ahead only in training
        model.train(is_training)
        logits = logits_of(tokens)
        for seen in (cut, cut + 1):
            changed = (tokens + 1) % model.config.vocab_size
            changed[0, :seen] = tokens[0, :seen]
            if differ(logits_of(changed)[0, :seen], logits[0, :seen], tolerance=1e-6):
                return True
    return False


def differs_in_pieces(model, tokens, cut):
    """Whether a text in pieces gives other logits than the whole text: a prompt and two single
    tokens, as in generation, then a longer piece. Without autocast, which rounds more."""
    model.eval()
    state = State()
    pieces = tokens.tensor_split((cut, cut + 1, cut + 2), dim=1)
    streamed = [model(piece, state=state)[0] for piece in pieces if piece.numel() > 0]
    whole, _ = model(tokens)
    return differ(torch.cat(streamed, dim=1), whole, tolerance=1e-4)


def check_batch(task, training, run):
    """Refuse a batch that cannot be shared out, that has unknown tokens or no targets, or that
    comes out different when the task is made again and draws in another order, so that a resumed
    run would not repeat."""
    parts = WORLD * run.grad_accum  # micro-batches of a step, over all processes
    allowed = f"must be a multiple of {parts}"
    require(training.batch_size % parts == 0, "batch_size", training.batch_size, allowed)
    inputs, targets = task.batch(training.seed, 0, training.batch_size)
    resumed = make_task(task.name, task.run_seed, **task.parameters)
    resumed.batch(training.seed, 1, batch_size=1)  # a generator of its own would move on
    again = resumed.batch(training.seed, 0, training.batch_size)
    if not np.array_equal((inputs, targets), again):
        raise Refused(f"{task.name} draws other batches each time: all chance must come from rng")
    allowed = f"{task.name} has a vocabulary of {task.vocab_size}"
    for token in (inputs.min(), inputs.max(), targets.max(initial=0)):  # -1 is no token
        require(0 <= token < task.vocab_size, "token", int(token), allowed)
    require((targets >= 0).any(), "targets", 0, f"{task.name} asks for nothing in its first batch")


# ---- 8. Faster: compiling, several processes, the machine's settings -------

# On one CPU core, compiling a Transformer takes 16 to 31 seconds, and saves 2e-8 to 5e-8 seconds
# per token, layer and channel (benchmarks/step.py). So it pays if a run has 7e8 tokens x layers x
# channels or more.
WORTH_COMPILING = 7e8


def decide_compile(config, training, run):
    """Whether to compile. Where settings leave it open: on CUDA; on a CPU if the run is long."""
    wanted = run.compile
    if wanted is None:
        tokens = training.steps * training.batch_size * config.block_size
        pays = tokens * config.n_layer * config.d_model > WORTH_COMPILING
        wanted = run.device == "cuda" or (run.device == "cpu" and pays)
    if not wanted:
        return False
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=run.device))
        return True
    except Exception as error:  # for example, there is no C++ compiler
        if RANK == 0:
            reason = str(error).strip().partition("\n")[0]
            print(f"train.py: not compiled, because torch.compile fails: {reason}", file=sys.stderr)
        return False


def make_fast_model(model, run, compiled):
    """The model for training steps, with the same weights: compiled, if `compiled`. Under torchrun,
    PyTorch's DistributedDataParallel (DDP) averages the gradients of all processes.

    Evaluation uses `model` itself, because its batches have many shapes, and each would be compiled
    separately.
    """
    if compiled:
        # Our models are so small that a GPU waits for the CPU to start its kernels. A CUDA graph
        # starts all kernels of a forward or backward pass at once. Graphs reuse their memory, so
        # they allow one forward pass a step. (Under DDP they are untested.)
        graphs = run.device == "cuda" and WORLD == 1 and run.grad_accum == 1
        model = torch.compile(model, mode="reduce-overhead" if graphs else "default")
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return model


def join_processes(run):
    """Under torchrun, meet the other processes."""
    if WORLD > 1 and not torch.distributed.is_initialized():
        if run.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # its GPU here
        torch.distributed.init_process_group()
        atexit.register(torch.distributed.destroy_process_group)


def sum_over_processes(loss):
    if WORLD > 1:
        torch.distributed.all_reduce(loss)
    return loss.item()  # here the CPU waits for the GPU


def tune_machine():
    """Settings that make a step faster. The last two help small models on a CPU."""
    torch.set_float32_matmul_precision("high")  # on a GPU, TF32: coarser, but faster
    torch.set_flush_denormal(True)  # numbers below 1e-38 count as 0: CPUs are slow with them
    # By default, glibc gives freed memory back to Linux after each step, and the next step has to
    # fetch it again page by page. Keeping it makes a step 5 to 17% faster.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # only glibc has it
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
        if libc.mallopt(M_MMAP_THRESHOLD, 2**30) == 1:  # 1: it was accepted
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # either one alone makes steps slower


# ---- 9. Presets ------------------------------------------------------------
#
# A preset scales task, model and training together: `nano` for a CPU core and at most an hour,
# `small` for one GPU, `paper` for the paper's own numbers (Depo0 is ours; it follows Depo1). An
# option that an entry leaves out has the default of Training, Config or the task (tasks.py).

L1D16 = dict(n_layer=1, n_head=2, d_model=16)  # 1 layer, 16 dims
L3D64 = dict(n_layer=3, n_head=2, d_model=64)
L5D64 = dict(n_layer=5, n_head=4, d_model=64)
L4D128 = dict(n_layer=4, n_head=4, d_model=128)
L6D384 = dict(n_layer=6, n_head=6, d_model=384)
L8D512 = dict(n_layer=8, n_head=8, d_model=512)
L12D768 = dict(n_layer=12, n_head=12, d_model=768)
L2D32_TIED = dict(n_layer=2, n_head=2, d_model=32, tie_embeddings=True)
L4D256_TIED = dict(n_layer=4, n_head=4, d_model=256, tie_embeddings=True)

# N is how many numbers, nodes or people there are, K the largest number of hops asked, V how many
# letters words are made of, and L the most operators in an expression. root=None: sentences start
# from the grammar's start symbol. Where steps is None, Capo computes them from how often each
# person is met (--exposures). "other" is for your own tasks, and for Text at `paper`.
# fmt: off
PRESETS = {
    "nano": {  # the tasks' own defaults have this size
        "copy": dict(L1D16, steps=2000, batch_size=32, lr=1e-2, warmup=200),
        "depo0": dict(L5D64, steps=16_000, batch_size=32, lr=5e-3, warmup=300),
        "depo1": dict(L3D64, steps=10_000, batch_size=32, lr=7e-3, warmup=300),
        "depo2": dict(L3D64, steps=5000, batch_size=16, lr=5e-3, warmup=100),
        "brevo1": dict(L3D64, steps=2000, batch_size=32, lr=5e-3, warmup=300),
        "brevo2": dict(L3D64, steps=5000, batch_size=32, lr=5e-3, warmup=300),
        "mano": dict(L3D64, steps=5000, batch_size=32, lr=3e-3, warmup=300, weight_decay=0.1),
        "lano": dict(L3D64, steps=2000, batch_size=32, lr=5e-3, warmup=300, weight_decay=0.1),
        "capo": dict(L2D32_TIED, steps=None, batch_size=16, lr=5e-3, warmup=300,
                     weight_decay=0.01),
        "text": dict(L4D128, steps=1200, batch_size=16, lr=4e-3, warmup=100),
        "other": dict(L3D64, steps=2000, batch_size=32, lr=5e-3, warmup=300),
    },
    "small": {
        "copy": dict(L1D16, N=200, block_size=401, steps=3000, batch_size=32, lr=1e-2),
        "depo0": dict(L6D384, N=20, K=8, V=40, block_size=104,
                      steps=20_000, batch_size=192, lr=1e-3),
        "depo1": dict(L6D384, N=10, K=4, block_size=112, steps=9000, batch_size=192, lr=1e-3),
        "depo2": dict(L6D384, N=25, K=4, block_size=512, steps=20_000, batch_size=128, lr=1e-3),
        "brevo1": dict(L6D384, N=40, block_size=384, steps=20_000, batch_size=128, lr=1e-3),
        "brevo2": dict(L6D384, N=20, block_size=647, steps=20_000, batch_size=128, lr=1e-3),
        "mano": dict(L6D384, L=8, block_size=256,
                     steps=20_000, batch_size=128, lr=5e-4, weight_decay=0.1),
        "lano": dict(L6D384, root=None, block_size=512,
                     steps=20_000, batch_size=96, lr=1e-3, weight_decay=0.1),
        "capo": dict(L4D256_TIED, N=50_000, block_size=512,
                     steps=None, batch_size=48, lr=2e-3, weight_decay=0.01),
        "text": dict(L8D512, block_size=1024, steps=10_000, batch_size=32, lr=2e-3),
        "other": dict(L6D384, steps=20_000, batch_size=128, lr=1e-3),
    },
    "paper": {
        "copy": dict(L1D16, N=500, block_size=1024, steps=50_000, batch_size=32, lr=5e-3),
        "depo0": dict(L12D768, N=225, K=8, V=450, block_size=2048,
                      steps=87_500, batch_size=128, lr=1e-3),
        "depo1": dict(L12D768, N=225, K=8, block_size=2048,
                      steps=87_500, batch_size=128, lr=1e-3),
        "depo2": dict(L12D768, N=75, K=16, block_size=2048,
                      steps=100_000, batch_size=128, lr=1e-3),
        "brevo1": dict(L12D768, N=70, block_size=1024, steps=100_000, batch_size=256, lr=1e-3),
        "brevo2": dict(L12D768, N=30, block_size=1536, steps=200_000, batch_size=192, lr=1e-3),
        "mano": dict(L12D768, L=10, block_size=1024,
                     steps=80_000, batch_size=64, lr=3e-4, weight_decay=0.1),
        # The paper trains Lano without warm-up, and its learning rate falls linearly.
        "lano": dict(L12D768, root=None, block_size=512, steps=100_000, batch_size=96, lr=5e-4,
                     warmup=0, weight_decay=0.1, schedule="linear"),
        "capo": dict(L4D256_TIED, N=50_000, block_size=512,
                     steps=None, batch_size=12, lr=1e-3, weight_decay=0.01),
        "other": dict(L12D768, steps=100_000, batch_size=128, lr=1e-3),
    },
}
# fmt: on


# ---- 10. The command line --------------------------------------------------
#
# Options belong to owners: the task's class, Config, Training and Run. `options` reads an owner's
# options from its constructor, and `help_texts` what --help says of them from its source. All
# values are in one flat dict, {option: value}, from which `values_for` takes an owner's part.


def settings_of(argv):
    """(task, config, training, run) from the command line: the Task, the model's Config, a Training
    and a Run. Writes nothing. Raises Refused, whose text names a value and what is allowed."""
    # 1. Four flags are read first: they decide which others there are, and their defaults.
    first = make_parser(__file__, __doc__, add_help=False)
    for flag in ("--task", "--preset", "--device", "--resume"):
        first.add_argument(flag)
    first.add_argument("-h", "--help", action="store_true")
    chosen, _ = first.parse_known_args(argv)
    if chosen.resume is not None:
        return settings_of_run(chosen.resume, argv)
    task_name = ALIASES.get(chosen.task, chosen.task)
    names = ", ".join(TASKS | ALIASES)
    require(task_name in TASKS or chosen.help, "task", chosen.task, f"allowed: {names}")
    task_class = TASKS.get(task_name, Task)  # without a task, --help shows the other options
    owners = {task_name: task_class, "model": Config, "training": Training, "run": Run}

    # 2. Precedence: flag, then preset, then default.
    defaults = default_values(owners) | device_defaults(chosen.device or devices()[0])
    preset = chosen.preset or defaults["preset"]
    require(preset in PRESETS, "preset", preset, f"allowed: {', '.join(PRESETS)}")
    of_tasks = PRESETS[preset]
    of_task = of_tasks.get(task_name, of_tasks["other"])
    for name, value in of_task.items():
        require(name in defaults, name, value, f"preset {preset} has it, but it is no option")
    defaults |= of_task
    defaults["preset"] = preset
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--task", metavar="STR", help=names)
    typed = read_flags(parser, argv, owners, defaults)
    values = defaults | typed

    # 3. The task comes first, because the model's sizes follow from it.
    task = make_fitted_task(task_name, values, typed)
    if values["steps"] is None:  # Capo derives them from --exposures
        values["steps"] = task.steps(max(1, values["batch_size"]))  # Training refuses less than 1
    config = Config(task.vocab_size, task.block_size, **values_for(Config, values))
    for name, value in typed.items():
        has_effect = config.canon or not name.startswith("canon_")
        require(has_effect, name, value, "has no effect without --canon, such as --canon abcd")
    training, run = Training(**values_for(Training, values)), Run(**values_for(Run, values))
    run.out = run.out or str(Path("out", run_name(task, config, training, typed)))
    return task, config, training, run


def settings_of_run(folder, argv):
    """What `settings_of` returns, for --resume. The settings come from the folder's config.json,
    but flags of Run take precedence. (If a text has moved, write its new path into that file.)"""
    about = read_config(folder)
    parser = make_parser(__file__, __doc__)
    owners = {"a resumed run, which keeps its settings": Run}
    typed = read_flags(parser, argv, owners, vars(Run()) | about["execution"])
    require("out" not in typed, "out", typed.get("out"), f"the run stays in {folder}")
    task, config = task_and_config(about)
    now = json.loads(json.dumps(task.settings))  # as in the file, with lists in place of tuples
    for name, value in about["task"].items():  # the text's sha256, for example
        require(now[name] == value, name, now[name], f"the run began with {value!r}")
    training = Training(preset=about["preset"], **about["training"])
    return task, config, training, Run(**about["execution"] | typed | {"out": folder})


def make_fitted_task(task_name, values, typed):
    """The Task. Its block_size is the preset's, but larger if typed sizes make instances longer."""
    settings = values_for(TASKS[task_name], values)
    if "block_size" in settings and "block_size" not in typed:
        smallest = make_task(task_name, **settings | {"block_size": None}).block_size
        settings["block_size"] = max(settings["block_size"] or 1, smallest)
    return make_task(task_name, run_seed=values["seed"], **settings)


def options(owner):
    """{name: its inspect.Parameter} of a dataclass, or of a task's class. Config's vocab_size and
    block_size are no options: they have no default, because they follow from the task."""
    parameters = inspect.signature(owner).parameters
    return {name: p for name, p in parameters.items() if p.default is not p.empty}


def default_values(owners):
    values = {}
    for owner in owners.values():
        values |= {name: parameter.default for name, parameter in options(owner).items()}
    return values


def values_for(owner, values):
    """The values that this dataclass or task takes."""
    return {name: values[name] for name in options(owner)}


def read_flags(parser, argv, owners, defaults):
    """{option: value} of the typed flags.

    owners    {title: the dataclass or task's class whose options may be typed}
    defaults  {option: the value that --help shows}
    """
    for title, owner in owners.items():
        group, texts = parser.add_argument_group(title), help_texts(owner)
        for name, parameter in options(owner).items():
            add_flag(group, name, parameter, texts.get(name, ""), defaults[name])
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        raise Refused(f"{shlex.join(unknown)}: not a flag of {', '.join(owners)}")
    return {name: value for name, value in vars(parsed).items() if value is not None}


def add_flag(group, name, parameter, text, default):
    """Add the flag of one option. If it is not typed, its value is None, not the default, which is
    only shown."""
    if default not in (None, ""):  # nothing worth showing
        text += f" ({default})"
    flag, text = f"--{name.replace('_', '-')}", text.replace("%", "%%")
    try:
        group.add_argument(flag, help=text, **values_of_flag(parameter))
    except argparse.ArgumentError:
        raise Refused(f"{name}: two options have this name") from None


def values_of_flag(parameter):
    """What may follow an option's flag, as keywords of add_argument."""
    kind, default = parameter.annotation, parameter.default
    if kind is parameter.empty:  # a task's argument has the type of its default; None takes an int
        kind = int if default is None else type(default)
    if typing.get_args(kind):  # int | None
        kind = typing.get_args(kind)[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (tuple, list):
        kind = type(default[0])
        return {"type": kind, "metavar": kind.__name__.upper(), "nargs": len(default)}
    return {"type": kind, "metavar": kind.__name__.upper()}


def help_texts(owner):
    """{name: what --help says of it}: the comment beside a field of a dataclass, or the line in the
    docstring of a task's class."""
    if dataclasses.is_dataclass(owner):
        return dict(re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(owner), re.MULTILINE))
    found = {}
    for each in reversed(owner.__mro__):
        found |= dict(re.findall(r"^ *(\w+)  +(\S.*)$", each.__doc__ or "", re.MULTILINE))
    return found


def run_name(task, config, training, typed):
    """Task, preset, attention's positions or another mixer's name, Canon points; the typed flags
    that change the result; the seed."""
    attends = config.mixer == "attention"
    mixer = config.pos if attends else config.mixer.replace(",", "-")
    words = [task.name, training.preset, mixer, config.canon or "bare"]
    in_name = {"task", "preset", "mixer", "canon", "seed"} | ({"pos"} if attends else set())
    for name, value in typed.items():
        if name in in_name or name in options(Run):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"no-{flag}")
        elif isinstance(value, list):
            words.append(f"{flag}={'-'.join(map(str, value))}")
        else:
            words.append(f"{flag}={Path(value).stem if name == 'text' else value}")
    return "_".join([*words, f"s{training.seed}"])


if __name__ == "__main__":
    main()
