"""Train one model on one task:   python train.py --task depo --canon abcd

Sections 1 to 3 are the training: 1 data, optimizer and learning rate; 2 one step; 3 the loop. The
others serve it: 4 the run's folder; 5 checks before training; 6 stopping; 7 presets; 8 settings and
the command line; 9 `main`, where everything begins. A run leaves three files in out/<run>/:

    config.json     its settings, and where it ran
    metrics.jsonl   the log, a line of JSON every 20 steps and at each evaluation; the last one has
                    the final scores, and "final": true
    ckpt.pt         the last checkpoint

On four GPUs:   torchrun --nproc_per_node=4 train.py --task depo --canon abcd
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from pathlib import Path

# PyTorch's threads keep their cores busy for a while before they sleep. When another program is
# busy, too, that makes steps several times slower (results/threads.txt), so let them sleep sooner.
# It has to be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from canon_gpt import CANONS, MIXERS, MLPS, POSITIONS, CanonGPT, Config, Refused
from kernels import gpu_has_bfloat16, relative_error
from sample import answered, parser_of, reading, show
from tasks import ALIASES, TASKS, make_task, require, score_text, wrapped

# torchrun starts several processes, and sets both variables. Without it, there is one process.
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0  # the number of this process, from 0


# ---- 1. Data, optimizer, learning rate -------------------------------------
#
# A task draws documents and packs them into windows (tasks.py: `documents`, `Task.batch`).
# `Batches` asks it for the windows of each step, and PyTorch's loader fetches them.


@dataclasses.dataclass
class Batches:
    """The task's batches by step, for PyTorch's loader. Each process of torchrun takes its rows."""

    task: object
    seed: int
    batch_size: int

    def __getitem__(self, number):
        """Batch number 0 is for step 1, and so on. NumPy's arrays:

        tokens and loss_mask  (rows, block_size + 1)
        target_count          how many targets the whole batch has, over all processes
        """
        tokens, loss_mask = self.task.batch(self.seed, number, self.batch_size)
        target_count = loss_mask[:, 1:].sum()  # nothing predicts the first token
        # Of every WORLD rows, each process takes one.
        return tokens[RANK::WORLD], loss_mask[RANK::WORLD], target_count


def load_batches(task, settings, steps_done):
    """Yields the batches after `steps_done` steps, on the device. Workers, if any, draw ahead."""
    loader = DataLoader(
        Batches(task, settings.seed, settings.batch_size),
        batch_size=None,  # each item is a whole batch
        sampler=range(steps_done, settings.steps),  # the batches' numbers, in this order
        # Keep NumPy's arrays. By default the loader makes tensors, and workers pass tensors on in
        # shared memory, of which a container may have too little.
        collate_fn=tuple,
        num_workers=settings.workers,
        worker_init_fn=own_session,
    )
    for batch in loader:
        yield [on_device(torch.as_tensor(array), settings.device) for array in batch]


def on_device(tensor, device):
    if device == "cuda":  # from pinned memory, so that the CPU need not wait for the copy
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def weight_groups(model, settings):
    """AdamW's parameter groups. The matrices of Linear and Embedding layers have weight decay;
    norms, biases and Canon layers do not."""
    # A set, since it finds a tensor by identity; a list would compare the numbers in it.
    matrices = {m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p in matrices], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p not in matrices], "weight_decay": 0.0},
    ]


def adamw(model, settings):
    return torch.optim.AdamW(
        weight_groups(model, settings),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=settings.device != "mps",  # one kernel for all weights is faster; MPS has had none
    )


# An optimizer of your own is a function with these arguments, and one more entry. The "lr" that it
# gives to a group is the peak; the loop sets it anew at each step.
OPTIMIZERS = {"adamw": adamw}


def cosine(done):
    """From 1 down towards a tenth. `done` rises from 0, when warm-up ends, towards 1."""
    half_a_wave = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
    return 0.1 + 0.9 * half_a_wave


def linear(done):
    """From 1 down towards 0."""
    return 1 - done


# How the learning rate falls after warm-up. A schedule of your own is one more entry: a function of
# `done`, from 0 to just below 1, that returns a factor of the peak.
SCHEDULES = {"cosine": cosine, "linear": linear}


def learning_rate(step, peak, settings):
    """The learning rate of a step. Steps are counted from 1."""
    # 1. Warm-up: it rises linearly to the peak.
    if step <= settings.warmup:
        return peak * step / settings.warmup
    # 2. Decay. `done` is 0 at the first step after warm-up, so that this step, too, has the peak.
    done = (step - 1 - settings.warmup) / (settings.steps - settings.warmup)
    return peak * SCHEDULES[settings.schedule](done)


# ---- 2. One step -----------------------------------------------------------


def train_step(model, optimizer, batch, settings, autocast):
    """Update the weights from a batch: forward, backward, clip, step. For less memory, the batch is
    cut into `grad_accum` micro-batches (gradient accumulation). Usually that is one.

    Returns its loss, and the norm of the gradient before it is clipped. (Under torchrun, the whole
    batch's loss is the mean over the processes of what this returns.)
    """
    tokens, loss_mask, target_count = batch  # as `load_batches` yields it
    # Equal parts, and exactly grad_accum of them: settings_of refuses other batch sizes.
    n = settings.grad_accum
    batch_loss = 0.0
    for rows, mask in zip(tokens.chunk(n), loss_mask.chunk(n)):
        inputs, targets = rows[:, :-1], rows[:, 1:]  # each token predicts the next one
        target_mask = mask[:, 1:]
        with autocast:
            _, loss = model(inputs, targets, loss_mask=target_mask)  # the mean over its targets
        # Weigh this mean by its share of the batch's targets, so that all micro-batches add up to
        # the mean over the batch. DDP divides gradients by WORLD; the factor WORLD undoes that.
        share = WORLD * target_mask.sum() / target_count  # with equal shares, 1 / grad_accum
        loss = loss * share
        loss.backward()
        batch_loss = batch_loss + loss.detach()  # no .item(): the CPU would wait for the GPU
    max_norm = settings.clip if settings.clip > 0 else math.inf  # inf: only measure it
    gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return batch_loss, gradient_norm


# ---- 3. The training loop --------------------------------------------------

LOG_EVERY = 20  # steps between two lines of the log


def compiled_and_distributed(model, settings):
    """The same model, compiled if the settings say so, and under torchrun in DDP, PyTorch's
    DistributedDataParallel, which averages the gradients of all processes."""
    if settings.compile:
        # Our models are so small that a GPU waits for the CPU to start its kernels. A CUDA graph
        # starts all kernels of a forward or backward pass at once. Each pass overwrites the results
        # of the last, so that is for steps of a single pass.
        one_pass = settings.device == "cuda" and WORLD == 1 and settings.grad_accum == 1
        model = torch.compile(model, mode="reduce-overhead" if one_pass else "default")
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return model


def mean_loss_and_stop(loss, stop_signals):
    """(the mean loss, whether any process was asked to stop), after one exchange."""
    numbers = torch.stack([loss, torch.full_like(loss, len(stop_signals))])
    if WORLD > 1:
        torch.distributed.all_reduce(numbers)  # adds them up
    loss_sum, signals = numbers.tolist()  # here the CPU waits for the GPU
    return loss_sum / WORLD, signals > 0


@torch.no_grad()
def evaluate(task, model, settings, autocast):
    """The task's scores, {name: float}, on instances or text drawn for scoring. These scores take
    the place of a validation loss. Each process of torchrun computes all of them."""
    model.eval()  # ours has no dropout; a layer of your own may have some
    with autocast:
        scores = task.evaluate(model, settings.seed, settings.eval_size)
    model.train()
    return scores


def train(settings, task, config, command, stop_signals):
    """One run, from its random seed to its last score.

    settings      a value for each option: `settings_of`, in section 8
    command       how the run was started, for config.json
    stop_signals  the signals that have asked to stop: `noted_signals`, in section 6
    """
    # ---- Before the loop: model, optimizer, and the run's folder
    torch.manual_seed(settings.seed)
    torch.set_flush_denormal(True)  # numbers below 1e-38 count as 0: they slow CPUs down
    model = CanonGPT(config).to(settings.device)
    optimizer = OPTIMIZERS[settings.optimizer](model, settings)
    # The peak learning rate of each group, before a checkpoint restores rates that have decayed.
    peaks = [group["lr"] for group in optimizer.param_groups]

    # Mixed precision: mixers, MLPs and head compute in bfloat16. Weights and residual stream stay
    # in float32, and so does what canon_gpt.py passes through `at_least_float32`.
    mixed = settings.dtype == "bfloat16"
    autocast = torch.autocast(settings.device, torch.bfloat16, enabled=mixed)
    torch.set_float32_matmul_precision("highest")  # the check looks for small differences
    check_causal(model, autocast)
    torch.set_float32_matmul_precision("high")  # from here on TF32 on a GPU: coarser, but faster
    settings.compile = decide_compile(settings, config)  # until here it may be None
    # `fast_model` shares the weights of `model`. Evaluation uses `model`, as its batches have many
    # shapes, and each would have to be compiled.
    fast_model = compiled_and_distributed(model, settings)

    recipe = recipe_of(settings, task, config)
    # With --resume, this loads the checkpoint into model and optimizer.
    so_far = open_folder(settings, recipe, task, model, optimizer, command)
    first = so_far["step"] + 1
    began = time.perf_counter() - so_far["seconds"]  # so that seconds add up over pauses
    batches = load_batches(task, settings, steps_done=so_far["step"])

    # ---- The loop
    shown = {}  # printed behind the bar
    with tqdm(total=settings.steps, initial=first - 1, mininterval=1, disable=RANK > 0) as bar:
        for step, batch in enumerate(batches, first):
            # 1. Set the learning rate.
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = learning_rate(step, peak, settings)

            # 2. Learn from one batch. The seed is for layers that draw numbers, such as dropout.
            torch.manual_seed(10**9 * settings.seed + step * WORLD + RANK)
            loss, gradient_norm = train_step(fast_model, optimizer, batch, settings, autocast)
            if stop_signals:
                bar.disable = True  # the terminal may be closed
            bar.update()

            # 3. Most steps end here, as reading the loss would make the CPU wait for the GPU. What
            #    every step must do goes above this.
            score_now = step % settings.eval_every == 0 or step == settings.steps
            log_now = score_now or step % LOG_EVERY == 0
            # One process can stop at once. Several agree on it where they log.
            stop_at_once = WORLD == 1 and len(stop_signals) > 0
            if not (log_now or stop_at_once):
                continue

            # 4. End the run if it has diverged, before this state is saved.
            mean_loss, stop_now = mean_loss_and_stop(loss, stop_signals)
            gradient_norm = gradient_norm.item()
            for name, value in {"loss": mean_loss, "gradient": gradient_norm}.items():
                if not math.isfinite(value):
                    bar.close()
                    end(f"step {step}: {name} = {value}. Start again with a smaller --lr", status=1)

            # 5. Log this batch's loss, and now and then the scores.
            shown["loss"] = f"{mean_loss:.3f}"
            if log_now:
                line = {
                    "step": step,
                    "loss": round(mean_loss, 5),
                    "tokens": step * settings.batch_size * task.block_size,
                    "lr": optimizer.param_groups[0]["lr"],
                    "gradient_norm": round(gradient_norm, 5),  # before it is clipped
                }
                if score_now:
                    scoring_began = time.perf_counter()
                    line["eval"] = evaluate(task, model, settings, autocast)
                    so_far["scoring_seconds"] += time.perf_counter() - scoring_began
                    shown |= scores_in_words(task, line["eval"])
                so_far["log"].append(line)
                write_log(settings.out, [line], mode="a")
            bar.set_postfix(shown, refresh=False)

            # 6. Save a checkpoint after each evaluation, and before stopping.
            if score_now or stop_now:
                so_far["step"] = step
                so_far["seconds"] = time.perf_counter() - began
                save(settings.out, recipe, model, optimizer, so_far)
            if stop_now and step < settings.steps:
                bar.close()
                # If there is none, another process got the signal.
                number = stop_signals[0] if stop_signals else signal.SIGTERM
                how = "repeat the command with --resume to continue"
                end(f"stopped after step {step}; {how}", status=128 + number)

    # ---- After the loop: what the run cost, and one instance with the model's answers
    seconds, scoring_seconds = so_far["seconds"], so_far["scoring_seconds"]
    last = so_far["log"][-1]
    final = {
        "step": settings.steps,
        "eval": last["eval"],
        "seconds": round(seconds, 1),
        "scoring_seconds": round(scoring_seconds, 1),
        "tokens_per_s": round(last["tokens"] / (seconds - scoring_seconds)),
        "final": True,
    }
    write_log(settings.out, [final], mode="a")
    if RANK == 0:
        print_results(task, model, final, settings, autocast)


# What you may want to add to this loop:
# - A number in the log is one more entry of `line`: a Python number, not a tensor. (Under torchrun
#   the log is the first process's; only the loss is averaged.)
# - An average of the weights (EMA) starts as `average = copy.deepcopy(model)`, before
#   `open_folder`. Update it right after `train_step`,
#
#       with torch.no_grad():
#           for mean, weight in zip(average.parameters(), model.parameters()):
#               mean.lerp_(weight, 1 - keep)
#
#   and pass it to `evaluate` and `print_results` in the model's place. `save` and `restore` (called
#   by `open_folder`) must keep it, too. To sample from it, save it as "model", and the model under
#   another name.
# - Noise on gradients must be the same in all processes. As their seeds differ, draw it by a
#   generator of its own, seeded from the seed and the step.


def scores_in_words(task, scores):
    """{score: text}, such as {"k=1": "97%"}."""
    return {name: score_text(value, task.units.get(name)) for name, value in scores.items()}


def print_results(task, model, final, settings, autocast):
    """The scores, what they took, and one instance with the model's answers."""
    for name, text in scores_in_words(task, final["eval"]).items():
        print(f"{name:16}{text:>9}")
    seconds, scoring = final["seconds"], final["scoring_seconds"]
    print(f"\n{seconds:,} seconds, {scoring:,} of them scoring; {final['tokens_per_s']:,} tokens/s")
    model.eval()
    with autocast, torch.no_grad():
        show("\n" + wrapped(answered(task, model, settings.seed)))


# ---- 4. The run's folder: settings, log, checkpoint ------------------------


def recipe_of(settings, task, config):
    """All settings that change a run's result, as config.json holds them."""
    recipe = {
        "task": task.settings,
        "model": config.filled_in(),
        "training": {name: getattr(settings, name) for name in TRAINING},
        "seed": settings.seed,
        "dtype": settings.dtype,
        "eval_size": settings.eval_size,
    }
    return json.loads(json.dumps(recipe))  # equal to what is read from a file: tuples are lists


def open_folder(settings, recipe, task, model, optimizer, command):
    """Make the run's folder, or with --resume restore the checkpoint in it. Returns how far the run
    is: its step, log, seconds and seconds of scoring."""
    out = settings.out
    if settings.resume:
        so_far = restore(out / "ckpt.pt", recipe, model, optimizer)
    else:
        so_far = {"step": 0, "log": [], "seconds": 0.0, "scoring_seconds": 0.0}
        if RANK == 0:
            about = about_run(settings, task, model, command) | recipe
            try:
                out.mkdir(parents=True, exist_ok=True)
                (out / "config.json").write_text(json.dumps(about, indent=1) + "\n")
            except OSError as error:
                raise Refused(f"out = {str(out)!r}: {error.strerror}") from None
    write_log(out, so_far["log"], mode="w")  # drops lines that came after the checkpoint
    if RANK == 0:
        announce(settings, model)
    return so_far


def about_run(settings, task, model, command):
    """What config.json holds beside the recipe: where this run came from."""
    return {
        "run": settings.out.name,
        "preset": settings.preset,
        "units": task.units,
        "chance": task.chance,
        "parameters": model.parameter_counts(),
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(settings.device),
        "processes": WORLD,
        "compiled": settings.compile,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def device_name(device):
    """Rounding differs between processors, so a run names its own."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    threads = torch.get_num_threads()
    return f"{device}, {name}, {threads} thread{'s' if threads > 1 else ''}"


def announce(settings, model):
    """Print what is about to happen. All settings are in config.json."""
    counts = model.parameter_counts()
    size = f"n_layer {model.config.n_layer}, d_model {model.config.d_model}"
    device = device_name(settings.device)
    slow_start = "compiled: the first step takes a minute or two"
    compiled = slow_start if settings.compile else "not compiled"
    windows = f"{settings.batch_size} windows of {model.config.block_size} tokens"
    print(settings.out)
    print(f"  {size}: {counts['total']:,} parameters, {counts['canon']:,} of them in Canon layers")
    print(f"  {settings.steps:,} steps of {windows}")
    print(f"  {device}, {settings.dtype}, {compiled}", flush=True)


def write_log(out, lines, mode):
    """Append lines to metrics.jsonl (mode "a"), or replace it (mode "w")."""
    if RANK == 0:
        with open(out / "metrics.jsonl", mode) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


# A run that is stopped, or killed at any moment, goes on with --resume from its last checkpoint. On
# a CPU, with the same options, it ends with the same bits. Three things make it so. A checkpoint
# holds all that a step changes: weights, optimizer, and the log so far. It is written to another
# file first, which then takes the old one's place in one move, so that ckpt.pt is whole at any
# time. And no random state has to be saved: a batch follows from the seed and the step alone, and
# so does PyTorch's seed.


def save(out, recipe, model, optimizer, so_far):
    if RANK > 0:
        return
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "recipe": recipe,
        **so_far,
        "log": json.dumps(so_far["log"]),  # as text: weights_only refuses NumPy's floats
    }
    fresh = out / "ckpt.pt.new"
    torch.save(checkpoint, fresh)
    os.replace(fresh, out / "ckpt.pt")


def restore(path, recipe, model, optimizer):
    """Set model and optimizer back to a checkpoint. Returns how far the run was then. Raises
    Refused if the checkpoint is damaged, or was begun with other settings."""
    with reading(path):
        saved = torch.load(path, map_location="cpu", weights_only=True)  # a pickle could run code
        # A setting of model or training that is newer than the checkpoint had its default there.
        begun = default_settings() | flat_settings(saved["recipe"])
        now = flat_settings(recipe)
        changed = [f"{name} = {begun.get(name)!r}" for name in now if begun.get(name) != now[name]]
        require(not changed, "--resume", str(path), f"was begun with {', '.join(changed)}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        so_far = {name: saved[name] for name in ("step", "seconds", "scoring_seconds")}
        return so_far | {"log": json.loads(saved["log"])}


def flat_settings(recipe):
    """A recipe as one dict of settings."""
    others = {name: recipe[name] for name in ("seed", "dtype", "eval_size")}
    return recipe["task"] | recipe["model"] | recipe["training"] | others


# ---- 5. Checks before training ---------------------------------------------


@torch.no_grad()
def check_causal(model, autocast):
    """Refuse two faults. A model that looks ahead would find every task easy. One that says that it
    streams, but gives other logits when a text comes in pieces, would generate wrong answers.

    It takes a copy with noise on its weights, as a layer that starts at zero would hide its fault.
    """
    config = model.config
    model = copy.deepcopy(model).eval()  # without dropout
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight += 0.02 * noise.to(weight)  # as large as initial weights
    length = min(config.block_size, 128)  # more than a chunk of the linear mixers
    cut = max(1, 2 * length // 3)
    tokens = torch.arange(length, device=model.embed.weight.device)[None] % config.vocab_size
    changed = tokens.clone()
    changed[:, cut:] = 0
    layers = f"mixer {config.mixer}, pos {config.pos}, canon_type {config.canon_type}"

    with autocast:
        logits, _ = model(tokens)
        other_future, _ = model(changed)
    # `not .. <=` refuses NaN, too. Usually the two have the same bits.
    if not relative_error(other_future[:, :cut], logits[:, :cut]) <= 1e-6:
        raise Refused(f"{layers}: a layer looks ahead (or gives NaN)")
    if model.streams:
        state = {}
        pieces = [model(piece, state=state)[0] for piece in tokens.split(cut, dim=1)]
        whole, _ = model(tokens)  # in float32, as the pieces
        if not relative_error(torch.cat(pieces, dim=1), whole) <= 1e-4:
            reason = "a layer must keep what it needs in state[self], or say streams = False"
            raise Refused(f"{layers}: {reason}")


# On one CPU core, compiling takes 26 to 55 seconds, and saves some 1e-7 seconds a token, layer and
# channel (benchmarks/step.py). It pays where their product is above this.
WORTH_COMPILING = 4e8


def decide_compile(settings, config):
    """Whether to compile. Where settings leave it open: on CUDA; on a CPU if the run is long."""
    wanted = settings.compile
    if wanted is None:
        tokens = settings.steps * settings.batch_size * config.block_size
        pays = tokens * config.n_layer * config.d_model > WORTH_COMPILING
        wanted = settings.device == "cuda" or (settings.device == "cpu" and pays)
    if not wanted:
        return False
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=settings.device))
        return True
    except Exception as error:  # there is no C++ compiler, say
        if RANK == 0:
            reason = str(error).strip().partition("\n")[0]
            print(f"train.py: not compiled, as torch.compile fails: {reason}", file=sys.stderr)
        return False


# ---- 6. Stopping -----------------------------------------------------------


def end(message, status=2):
    """End the program with one line. Status 2 means bad input."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        if RANK == 0:
            print(f"train.py: {message}", file=sys.stderr)
    raise SystemExit(status)


# Ctrl-C, a batch system, a closed terminal. (Windows has no SIGHUP.)
STOP = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def noted_signals():
    """A list, to which each signal that asks to stop appends its number. A second Ctrl-C kills.
    (Other signals never kill, as shells and `timeout` may send one twice. Nor does Ctrl-C under
    torchrun, which repeats it.)"""
    noted = []

    def note(number, frame):
        noted.append(number)
        if number == signal.SIGINT and WORLD == 1:
            signal.signal(number, signal.SIG_DFL)

    handlers = {number: signal.getsignal(number) for number in STOP}
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def own_session(worker):
    """For the loader's workers: a signal to the whole group, such as Ctrl-C, does not reach them.
    The training process needs them until it has stopped, and then ends them itself."""
    if hasattr(os, "setsid"):
        os.setsid()


# ---- 7. Presets ------------------------------------------------------------
#
# A preset scales task, model and training together: `nano` for a CPU core and at most an hour,
# `small` for one GPU, `paper` for the paper's own numbers (Depo0 is ours; it follows Depo1). What
# an entry leaves out has its default: in `make_parser`, in Config, or in the task (tasks.py).

L1D16 = dict(n_layer=1, n_head=2, d_model=16)  # 1 layer, 16 dims
L3D64 = dict(n_layer=3, n_head=2, d_model=64)
L5D64 = dict(n_layer=5, n_head=4, d_model=64)
L4D128 = dict(n_layer=4, n_head=4, d_model=128)
L6D384 = dict(n_layer=6, n_head=6, d_model=384)
L8D512 = dict(n_layer=8, n_head=8, d_model=512)
L12D768 = dict(n_layer=12, n_head=12, d_model=768)
L2D32_TIED = dict(n_layer=2, n_head=2, d_model=32, tie_embeddings=True)
L4D256_TIED = dict(n_layer=4, n_head=4, d_model=256, tie_embeddings=True)

# N is how many numbers, nodes or people there are, K the most hops that are asked for, V how many
# letters words are made of, and L the most operators in an expression; root=None is a grammar's own
# root. Where steps is None, Capo computes them from how often each person is met (--exposures).
# "other" is for a task of your own, and for Text in the size paper. How models fared at which
# learning rates: results/rates.md.
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


# ---- 8. Settings -----------------------------------------------------------
#
# A setting's value is the default, or what the preset (or a --config) says, or what a flag says:
# the last of these counts. Each option of a run stands in one line of `make_parser`, with its
# default and its limits; those of model and task have them in `Config` and in tasks.py. Each
# setting goes to the part that these lists name. All others go to the task.

# Config's fields, without vocab_size and block_size, which follow from the task.
MODEL = [field.name for field in dataclasses.fields(Config)][2:]
TRAINING = ["steps", "batch_size", "lr", "warmup", "schedule", "optimizer", "weight_decay", "betas"]
TRAINING += ["eps", "clip"]
RUN = ["task", "preset", "config", "seed", "dtype", "eval_size"]  # the rest of what makes a run
# Up to rounding, these change nothing in a run's result.
EXECUTION = ["device", "workers", "compile", "grad_accum", "eval_every", "out", "resume"]


def settings_of(argv):
    """(settings, task, config): a value for each setting, the Task, and the model's Config. Writes
    nothing. Raises Refused, whose text names a value and what is allowed."""
    flags = read_flags(argv)
    defaults = default_settings() | defaults_on(flags.get("device", devices()[0]))
    if "config" in flags:
        base = settings_in_file(flags)
    else:
        base = settings_in_preset(flags.get("preset", defaults["preset"]), flags.get("task"))
    given = base | flags
    settings = argparse.Namespace(**(defaults | given))

    parts = WORLD * settings.grad_accum  # of all processes; each gets equally many windows
    reason = f"must be a multiple of {parts}"
    require(settings.batch_size % parts == 0, "batch_size", settings.batch_size, reason)

    of_others = MODEL + TRAINING + RUN + EXECUTION
    of_task = {name: value for name, value in given.items() if name not in of_others}
    task = make_task(settings.task, run_seed=settings.seed, **of_task)
    of_model = {name: getattr(settings, name) for name in MODEL}
    config = Config(vocab_size=task.vocab_size, block_size=task.block_size, **of_model)
    if not config.has_attention and flags.get("pos", "nope") != "nope":
        raise Refused(f"pos = {flags['pos']!r}: {config.mixer} takes no positions")

    # What follows from the task and the model.
    settings.task = task.name
    if settings.steps is None:
        settings.steps = task.steps(settings.batch_size)
    if settings.eval_every is None:
        settings.eval_every = max(20, settings.steps // 20)
    if settings.out is None:
        settings.out = Path("out", run_name(settings, config, flags))
    return settings, task, config


def read_flags(argv):
    """{setting: value} of the flags that were typed, in the order of `make_parser`."""
    parser = make_parser()
    parser.set_defaults(**dict.fromkeys(default_settings()))  # what is not typed is None
    values = vars(parser.parse_args(argv))
    return {name: value for name, value in values.items() if value is not None}


def default_settings():
    """{setting: its default}; None where that depends on something."""
    of_model = {name: getattr(Config, name) for name in MODEL}
    return vars(make_parser().parse_args([])) | of_model


def defaults_on(device):
    """The defaults that depend on the device."""
    cuda = device == "cuda"
    return {
        "device": device,
        "preset": "small" if cuda else "nano",
        "dtype": "bfloat16" if cuda and gpu_has_bfloat16() else "float32",
        "workers": 4 if cuda else 0,
    }


def devices():
    """The devices of this machine, the default first."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found + ["cpu"]


def settings_in_preset(preset, task):
    tasks = PRESETS[preset]
    return tasks.get(ALIASES.get(task, task), tasks["other"])


def settings_in_file(flags):
    """The settings in a run's config.json. Flags may not change those of model and task, as some
    follow from others: the block size from the task's N, say."""
    for name, value in flags.items():
        reason = "a --config brings its own task and model"
        of_run = name in TRAINING + RUN + EXECUTION
        require(of_run and name not in ("task", "preset"), name, value, reason)
    path = flags["config"]
    require("out" in flags, "config", str(path), "needs --out")
    with reading(path):
        run = json.loads(path.read_text())
        settings = flat_settings(run) | {"task": run["task"]["name"], "preset": run["preset"]}
        del settings["name"], settings["vocab_size"]  # the first is "task"; the task has the second
        return settings


def run_name(settings, config, flags):
    """Task, preset, mixer, positions and Canon points; the typed flags that change the result; the
    seed. So the same command finds its folder again, also with --resume or other --workers."""
    words = [settings.task, settings.preset]
    if config.mixer != "attention":
        words.append(config.mixer.replace(",", "-"))
    if config.has_attention:
        words.append(config.pos)
    words.append(config.canon or "bare")
    named_anyway = ("task", "preset", "mixer", "pos", "canon", "seed")
    for name, value in flags.items():
        if name in named_anyway or name in EXECUTION:
            continue
        option = name.replace("_", "-")
        if value is True or value is False:
            words.append(option if value else f"no-{option}")
        elif isinstance(value, list):
            words.append(f"{option}={'-'.join(map(str, value))}")
        else:
            words.append(f"{option}={Path(value).stem if name == 'text' else value}")
    return "_".join([*words, f"s{settings.seed}"])


def between(least, most, kind=int):
    """For argparse: what reads an option's text as a number, and refuses those beyond limits."""

    def number(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: allowed: {least:,} to {most:,}")
        return value

    return number


def make_parser():
    """All options. A new one of the training is a line here, and its name in TRAINING if it changes
    the result, else in EXECUTION. One of the model also needs a field of Config; one of a task, an
    argument of its class."""
    parser = parser_of("train.py", __doc__)
    parser.usage = "python train.py --task TASK [--canon abcd] [other options]"
    on_off = argparse.BooleanOptionalAction
    count, size = between(1, 10**8), between(1, 10**5)
    amount = between(0, 10**6, float)

    add = parser.add_argument_group("task").add_argument
    add("--task", help=", ".join(TASKS | ALIASES))
    add("--preset", choices=PRESETS, help="the size of task and model (small on CUDA, else nano)")
    add("--config", type=Path, help="repeat the run of this config.json")
    add("--N", type=int, help="numbers to copy; nodes of a graph; people")
    add("--K", type=int, help="depo: the most hops that are asked for")
    add("--V", type=int, help="depo, brevo2: letters that words are made of")
    add("--word-len", type=int, nargs=2, help="depo, brevo2: least and most letters in a word")
    add("--L", type=int, help="mano: the most operators in an expression")
    add("--cfg", help="lano: the grammar, such as cfg3f")
    add("--root", type=int, help="lano: the symbol that sentences grow from")
    add("--exposures", type=int, help="capo: how often each person is met, if no --steps")
    add("--text", help="text: python, its standard library (the default), or the path of a file")
    add("--block-size", type=int, help="context, in tokens")

    add = parser.add_argument_group("model").add_argument
    add("--mixer", help=f"{', '.join(MIXERS)}, or a pattern: gdn,attention")
    add("--pos", help=f"positions: {', '.join(POSITIONS)}")
    add("--canon", help="the points that get a Canon layer: any of the letters abcd")
    add("--mlp", help=", ".join(MLPS))
    add("--n-layer", type=int, help="blocks")
    add("--n-head", type=int, help="heads of attention")
    add("--d-model", type=int, help="width")
    add("--canon-type", help=", ".join(CANONS))
    add("--canon-kernel", type=int, help="tokens that a Canon layer mixes (4)")
    add("--canon-residual", action=on_off, help="add a Canon layer's input to its output (on)")
    add("--canon-silu", action=on_off, help="SiLU on a Canon layer's convolution (off)")
    add("--canon-frozen", action=on_off, help="Canon keeps its random initial weights (off)")
    add("--short-conv", action=on_off, help="a linear mixer's own convolution")
    add("--tie-embeddings", action=on_off, help="one matrix for embedding and head")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=count, default=2000, help="batches to train on")
    add("--batch-size", type=size, default=32, help="windows per step")
    add("--lr", type=between(1e-12, 1e6, float), default=1e-3, help="peak learning rate")
    add("--warmup", type=between(0, 10**8), default=1000, help="steps until the rate peaks")
    add("--schedule", choices=SCHEDULES, default="cosine", help="how it falls from there")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--weight-decay", type=amount, default=0.03, help="of matrices only")
    beta = between(0, 0.999999, float)
    add("--betas", type=beta, nargs=2, default=[0.9, 0.98], help="of adamw (0.9 0.98)")
    add("--eps", type=between(0, 1, float), default=1e-6, help="of adamw (1e-6)")
    add("--clip", type=amount, default=1.0, help="maximum gradient norm (1); 0: no clipping")
    seed = between(0, 2**32 - 1)
    add("--seed", type=seed, default=0, help="of data and initial weights (0)")
    add("--dtype", choices=["float32", "bfloat16"], help="(bfloat16 on GPUs that have it)")
    add("--eval-size", type=size, default=512, help="instances scored in an evaluation (512)")

    add = parser.add_argument_group("run").add_argument
    add("--device", choices=devices(), help="(the first of these)")
    add("--out", type=Path, help="the run's folder (out/ and a name made of the choices above)")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--compile", action=on_off, help="torch.compile (where it works and pays)")
    add("--workers", type=between(0, 64), help="processes that draw data (4 on CUDA, else 0)")
    add("--eval-every", type=count, help="steps between evaluations (a 20th of the run)")
    add("--grad-accum", type=size, default=1, help="parts of a batch: less memory, same training")
    return parser


# ---- 9. Where everything begins --------------------------------------------


def main(argv=None, program=__file__):
    """program: the script that config.json names, if one of your own calls this."""
    argv = sys.argv[1:] if argv is None else list(argv)
    path = Path(program).resolve()
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name
    command = shlex.join(["python", str(path), *argv])
    try:
        settings, task, config = settings_of(argv)
        out, has_checkpoint = str(settings.out), (settings.out / "ckpt.pt").exists()
        if has_checkpoint and not settings.resume:
            raise Refused(f"out = {out!r}: has a checkpoint: --resume it, or choose another --out")
        if settings.resume and not has_checkpoint:
            raise Refused(f"out = {out!r}: has no checkpoint: start without --resume")
        if WORLD > 1:
            if settings.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # its number on this machine
            torch.distributed.init_process_group()
        with noted_signals() as stop_signals:
            train(settings, task, config, command, stop_signals)
    except Refused as error:
        end(error)
    finally:
        if WORLD > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
