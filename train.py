"""Train one model on one task:   python train.py --task depo --canon abcd

Read sections 1 to 3 in order; they are the training: 1 data, optimizer and learning rate; 2 one
step, and one evaluation; 3 the loop. The rest serves it: 4 checks before training; 5 progress;
6 ending a run; 7 recipes and presets; 8 the command line; 9 a run's name, its config.json, and what
it prints; 10 `main`, where everything begins. A run leaves config.json, metrics.jsonl and ckpt.pt
in out/<run>/ (runs.py).

On four GPUs:   torchrun --nproc_per_node=4 train.py --task depo --canon abcd
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

# An idle thread of gcc's OpenMP keeps its core busy for 300,000 rounds before it sleeps. Beside
# another busy program that makes steps several times slower (results/threads.txt), so let it sleep
# after 3,000. OpenMP reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from canon_gpt import CANONS, MIXERS, MLPS, POSITIONS, CanonGPT, Config, Refused
from kernels import gpu_has_bfloat16, relative_error
from runs import RECIPE_PARTS, Recipe, Run, RunError, Training, one_line
from sample import answered
from tasks import ALIASES, TASKS, WHICH_TEXT, make_task, require_range, score_text, wrapped

# torchrun starts several processes, and sets both variables. Without it, there is one process.
RANK = int(os.environ.get("RANK", 0))  # the number of this process, from 0
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are


@dataclass
class Options:
    """Where and how to run. None of it is part of the recipe, which says what is trained."""

    device: str
    out: Path  # the run's folder
    compile: bool
    must_compile: bool  # the user asked for it, so a compiler that fails ends the run
    workers: int  # processes that draw data; with 0 the training process draws it
    eval_every: int  # steps between evaluations
    grad_accum: int  # how many micro-batches a batch is cut into
    resume: bool


# ---- 1. Data, optimizer, learning rate -------------------------------------
#
# A task draws documents and packs them into windows (tasks.py: `documents`, `Task.batch`).
# `Batches` asks it for the windows of each step, and PyTorch's loader fetches them. (What other
# code calls get_batch is `Task.batch`.)


@dataclass
class Batches:
    """The task's batches by step, for PyTorch's loader. Each process of torchrun takes its rows."""

    task: object
    seed: int
    batch_size: int

    def __getitem__(self, number):
        """Batch number 0 is for step 1, and so on.

        tokens and loss_mask  (rows, block_size + 1)
        target_count          how many targets there are, those of other processes included
        """
        tokens, loss_mask = self.task.batch(self.seed, number, self.batch_size)  # NumPy's arrays
        tokens, loss_mask = torch.from_numpy(tokens), torch.from_numpy(loss_mask)
        target_count = loss_mask[:, 1:].sum()  # nothing predicts the first token
        if target_count == 0:
            raise ValueError(f"step {number + 1}: the task's documents have no targets")
        # Of every WORLD rows, each process takes one.
        return tokens[RANK::WORLD], loss_mask[RANK::WORLD], target_count


def load_batches(task, recipe, options, steps_done):
    """Yields the batches after `steps_done` steps, on the device. Workers, if any, draw ahead."""
    loader = DataLoader(
        Batches(task, recipe.seed, recipe.training.batch_size),
        batch_size=None,  # each item is a whole batch
        sampler=range(steps_done, recipe.training.steps),  # the batches' numbers, in this order
        num_workers=options.workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=options.device == "cuda",
    )
    for batch in loader:
        # The CPU does not wait for the copy to the GPU; this needs pinned memory.
        yield [tensor.to(options.device, non_blocking=True) for tensor in batch]


def weight_groups(model, training):
    """AdamW's parameter groups. The matrices of Linear and Embedding layers have weight decay;
    norms, biases and Canon layers do not."""
    # A set, since it finds a tensor by identity; a list would compare the numbers in it.
    matrices = {m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p in matrices], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p not in matrices], "weight_decay": 0.0},
    ]


def adamw(model, training, device):
    """AdamW with the settings in `training`; runs.py, `Training`, has their defaults."""
    return torch.optim.AdamW(
        weight_groups(model, training),
        lr=training.lr,
        betas=training.betas,
        eps=training.eps,
        fused=device != "mps",  # one kernel for all weights is faster (not tried on MPS)
    )


# An optimizer of your own is a function with these arguments, and one more entry. It needs step,
# zero_grad, state_dict, load_state_dict and param_groups, as PyTorch's optimizers have. Each group
# must have its "lr", which may differ: `train` takes it for the peak, and sets it at each step. If
# it does not use training.betas or eps, let it raise Refused for others than the defaults, or
# config.json names settings without effect. (Nothing checks this.)
# (For Muon: the decaying group of `weight_groups` also has embedding and head, which Muon leaves to
# AdamW.)
OPTIMIZERS = {"adamw": adamw}


def cosine(done):
    """From 1 down towards a tenth. `done` rises from 0, when warm-up ends, towards 1."""
    half_a_wave = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
    return 0.1 + 0.9 * half_a_wave


def linear(done):
    """From 1 down towards 0."""
    return 1 - done


# How the learning rate falls after warm-up. A schedule of your own is one more entry: a function
# from `done`, the share of the steps after warm-up that are over, to a factor from 0 to 1. (To use
# the step itself, change `learning_rate`. For several forms of one, enter each: "wsd20", "wsd40".)
SCHEDULES = {"cosine": cosine, "linear": linear}


def learning_rate(step, peak, training):
    """The learning rate of a step. Steps are counted from 1."""
    # 1. Warm-up: it rises linearly to the peak.
    if step <= training.warmup:
        return peak * step / training.warmup
    # 2. Decay. `done` is 0 at the first step after warm-up, so that this step, too, has the peak.
    done = (step - 1 - training.warmup) / (training.steps - training.warmup)
    return peak * SCHEDULES[training.schedule](done)


# ---- 2. One step, and one evaluation ---------------------------------------


def train_step(model, optimizer, batch, training, grad_accum, autocast):
    """Update the weights from a batch: forward, backward, clip, step. For less memory, the batch is
    cut into `grad_accum` micro-batches (gradient accumulation). Usually that is one.

    Returns its loss, and the norm of the gradient before it is clipped. (Under torchrun, the loss
    is the mean of those that the processes return.)
    """
    tokens, loss_mask, target_count = batch  # as `Batches` makes it
    # Equal parts, and exactly grad_accum of them: read_options refuses other batch sizes.
    micro_batches = zip(tokens.chunk(grad_accum), loss_mask.chunk(grad_accum))
    batch_loss = 0.0
    for number, (rows, mask) in enumerate(micro_batches, 1):
        inputs, targets = rows[:, :-1], rows[:, 1:]  # each token predicts the next one
        target_mask = mask[:, 1:]
        if WORLD > 1:  # DDP exchanges gradients in the backward pass of the last micro-batch only
            model.require_backward_grad_sync = number == grad_accum
        with autocast:
            _, loss = model(inputs, targets, loss_mask=target_mask)  # the mean over its targets
        # Weigh it by its share of the batch's targets, so that the micro-batches add up to the mean
        # over the batch. DDP then averages over the processes; WORLD makes a sum of that.
        share = WORLD * target_mask.sum() / target_count  # with equal shares, 1 / grad_accum
        loss = loss * share
        loss.backward()
        batch_loss = batch_loss + loss.detach()  # no .item(): the CPU would wait for the GPU
    max_norm = training.clip if training.clip > 0 else math.inf  # inf: only measure it
    gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return batch_loss, gradient_norm


@torch.no_grad()
def evaluate(task, model, recipe, autocast, step):
    """The task's scores, {name: float}, on instances or text drawn for scoring (tasks.py,
    `evaluate` of each task). They take the place of a validation loss. Each process of torchrun
    computes all of them.

    step: for the error if a score is not finite
    """
    model.eval()  # ours has no dropout; a layer of your own may have some
    with autocast:
        scores = task.evaluate(model, recipe.seed, recipe.eval_size)
    model.train()
    require_finite(step, scores)
    return scores


# ---- 3. The training loop --------------------------------------------------


def compiled_and_distributed(model, options):
    """The same model, compiled if the options say so, and under torchrun in DDP, PyTorch's
    DistributedDataParallel, which averages the gradients of all processes."""
    if options.compile:
        # Where nobody asked for --compile, a compiler that fails is ignored.
        torch._dynamo.config.suppress_errors = not options.must_compile
        model = torch.compile(model)
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return model


def open_run(options, recipe, command, task, stateful):
    """(run, steps_done, seconds_done): the run's folder (runs.py), the steps that are done, and the
    time that they took. --resume sets `stateful` back to the checkpoint. A new run saves one at
    once, as step 0, so that there always is one. Prints what is about to happen."""
    about = describe(options, recipe, task, stateful["model"], command)  # for config.json
    run = Run(options.out, about, options.resume, writes=RANK == 0)
    steps_done, seconds_done = 0, 0.0
    if options.resume:
        steps_done, seconds_done = run.restore(stateful)
        if run.finished:
            raise Ended(f"{options.out} is finished: nothing left to do", status=0)
    else:
        run.save(stateful, steps_done, seconds_done)
    announce(options, recipe, about)
    return run, steps_done, seconds_done


def reseed(run_seed, step):
    """Set PyTorch's seed for this step, so that dropout, if you add it, draws the same numbers
    after --resume. Processes of torchrun draw different ones."""
    # NumPy mixes the three numbers into one.
    (mixed,) = np.random.SeedSequence([run_seed, step, RANK]).generate_state(1)
    torch.manual_seed(int(mixed))


def mean_over_processes(value):
    """The mean of a tensor that each process of torchrun has."""
    if WORLD > 1:
        value = value.clone()  # all_reduce works in place
        torch.distributed.all_reduce(value)
    return value / WORLD


LOG_EVERY = 20  # steps between two lines of the log, and two losses in print


def train(options, recipe, command, stop):
    """One run, from its random seed to its last score.

    At a first reading follow the numbered steps, and open `learning_rate`, `train_step` and
    `evaluate`, which stand above. (What is not above: `check_before_training` is in section 4,
    `Progress` in 5, `require_finite` in 6, `scores_in_words`, `costs_of`, `print_results` in 9.)

    options  where and how to run
    recipe   what is trained: runs.Recipe, with the task, the model, the training and the seed
    command  how the run was started, for config.json
    stop     whether the user asked to stop: StopSignals, in section 6
    """
    # ---- Before the loop: task, model, optimizer, and the run's folder
    device, training = options.device, recipe.training
    torch.manual_seed(recipe.seed)
    torch.set_flush_denormal(True)  # takes numbers below 1e-38 for 0: they slow CPUs down

    task = make_task(**recipe.task, run_seed=recipe.seed)  # Capo draws its people from the seed
    model = CanonGPT(recipe.model).to(device)
    optimizer = OPTIMIZERS[training.optimizer](model, training, device)
    # The peak learning rate of each parameter group. Read it now: with --resume, an optimizer of
    # your own may load decayed rates.
    peaks = [group["lr"] for group in optimizer.param_groups]

    # Mixed precision: mixers, MLPs and head compute in bfloat16. Weights and residual stream stay
    # in float32, and so does what canon_gpt.py passes through `at_least_float32`.
    autocast = torch.autocast(device, torch.bfloat16, enabled=recipe.dtype == "bfloat16")

    check_before_training(task, model, optimizer, recipe, autocast)
    torch.set_float32_matmul_precision("high")  # from here on TF32 on a GPU: coarser, but faster

    # `fast_model` shares the weights of `model`. (Not compiled and in one process, it is `model`.)
    # Evaluation uses `model`, as its batches have many shapes, and each would have to be compiled.
    fast_model = compiled_and_distributed(model, options)

    # `stateful` is what a checkpoint saves and restores, by state_dict.
    stateful = {"model": model, "optimizer": optimizer}
    run, steps_done, seconds_done = open_run(options, recipe, command, task, stateful)

    # ---- The loop
    batches = load_batches(task, recipe, options, steps_done)
    with Progress(training, task.block_size, steps_done, seconds_done) as progress:
        for step, batch in enumerate(batches, steps_done + 1):  # the first step is 1
            # 1. Set the learning rate.
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = learning_rate(step, peak, training)

            # 2. Learn from one batch.
            reseed(recipe.seed, step)  # for layers that draw numbers, such as dropout
            loss, gradient_norm = train_step(
                fast_model, optimizer, batch, training, options.grad_accum, autocast
            )
            progress.bar.update()

            # 3. Most steps end here, as reading the loss would make the CPU wait for the GPU. What
            #    every step must do goes above this.
            score_now = step % options.eval_every == 0 or step == training.steps
            log_now = score_now or step % LOG_EVERY == 0
            # After the last step the run ends anyway. Several processes agree when they log.
            stop_now = step < training.steps and stop.agreed(log_now, device)
            if not (log_now or stop_now):
                continue

            # 4. End the run if it has diverged, before anything is saved. The loss is from before
            #    the update, so check the weights as well.
            mean_loss = mean_over_processes(loss).item()
            weights = list(model.parameters())
            require_finite(step, {"loss": mean_loss, "gradient": gradient_norm, "weights": weights})

            # 5. Log this batch's loss, and now and then the scores.
            if log_now:
                line = {
                    "step": step,
                    "loss": round(mean_loss, 5),
                    **progress.lap(step),  # tokens, and their speed: .item() waited for the GPU
                    "lr": optimizer.param_groups[0]["lr"],
                    "gradient_norm": round(gradient_norm.item(), 5),  # before it is clipped
                }
                progress.show({"loss": f"{mean_loss:.3f}"})  # printed behind the bar
                if score_now:
                    line["eval"] = evaluate(task, model, recipe, autocast, step)
                    progress.show(scores_in_words(task, line["eval"]))
                run.log(line)

            # 6. Save a checkpoint, the log included: after each evaluation, and before stopping.
            if score_now or stop_now:
                run.save(stateful, step, progress.seconds())

            # 7. Stop if asked to.
            if stop_now:
                # Not in the checkpoint's copy of the log, so --resume drops this line.
                run.log({"step": step, "stopped": stop.name})
                raise stop.ended_after(step)
            progress.start_lap(step)  # so that scoring and saving do not count

    # ---- After the loop: what the run cost, and one instance with the model's answers
    # The scores come from the log: if the run was killed right here and is resumed, the loop above
    # does not run again.
    scores = run.lines[-1]["eval"]
    costs = costs_of(run, model, options, progress)
    run.log({"step": training.steps, "eval": scores, **costs, "final": True})
    run.save(stateful, training.steps, progress.seconds())  # --resume then finds it finished
    print_results(task, model, autocast, scores, costs, recipe.seed)


# What you may want to add to this loop (examples/README.md has more):
# - A metric is one more entry of `line`: a Python number, not a tensor.
# - An average of the weights (EMA) starts as `copy.deepcopy(model)`, and is one more entry of
#   `stateful`. Update it after `train_step`,
#
#       with torch.no_grad():  # otherwise the graphs of all steps stay in memory
#           for mean, weight in zip(average.parameters(), model.parameters()):
#               mean.lerp_(weight, 1 - keep)
#
#   and pass it to `evaluate` and `print_results`. `keep` is a field of `Training` in runs.py, with
#   a line of `make_parser`, and `load_model` there reads saved["average"] if there is one.


# ---- 4. Checks before training ---------------------------------------------


def check_before_training(task, model, optimizer, recipe, autocast):
    """End the run before it trains if a layer, a task or an optimizer of your own has a fault."""
    torch.set_float32_matmul_precision("highest")  # these look for small differences
    require_sound_layers(model)
    require_sound_task(task, model, recipe.seed, autocast)
    require_all_weights(optimizer, model)
    mention_unused_weights(model, autocast)


@torch.no_grad()
def require_sound_layers(model):
    """End the run if a layer does what makes training or scores worthless.

    The logits must not change if the model runs once more, if a sequence is alone, if later tokens
    are missing (a model that sees them finds every task easy), or if a text comes in two pieces.
    The test takes a copy with noise on its weights: a layer whose weights are zero at the start
    would pass unseen.
    """
    model = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight += 0.02 * noise.to(weight)  # as large as initial weights
    config = model.config
    tokens = two_sequences(model)
    whole, _ = model(tokens)
    if not whole.isfinite().all():
        raise Ended(f"{layers_in_words(config)}: the logits are not finite", status=2)

    again, _ = model(tokens)
    require_same(again, whole, config, "a layer is random, though in eval mode")
    alone = torch.cat([model(sequence)[0] for sequence in tokens.split(1)])  # batches of one
    require_same(alone, whole, config, "a layer mixes the sequences of a batch")
    cut = math.ceil(2 * tokens.shape[1] / 3)  # 86 of 128: inside a chunk of the linear mixers
    first, _ = model(tokens[:, :cut])
    require_same(first, whole[:, :cut], config, "a layer looks ahead")
    if model.streams:
        state = {}
        pieces = [model(piece, state=state)[0] for piece in tokens.split(cut, dim=1)]
        reason = "a layer does not keep in state[self] what it needs, nor says `streams = False`"
        require_same(torch.cat(pieces, dim=1), whole, config, reason)


def two_sequences(model):
    """Tokens to try a model with, (2, T). If block_size allows it, T is more than one chunk of the
    linear mixers (32 or 64)."""
    length = min(model.config.block_size, 128)
    rising = torch.arange(length, device=model.embed.weight.device) % model.config.vocab_size
    return torch.stack([rising, rising.flip(0)])


def require_same(logits, expected, config, reason):
    # float32 rounds by 1e-6 or less here. (`not .. <` also catches NaN.)
    if not relative_error(logits, expected) < 1e-4:
        raise Ended(f"{layers_in_words(config)}: {reason}", status=2)


def layers_in_words(config):
    return f"mixer {config.mixer}, pos {config.pos}, canon_type {config.canon_type}"


@torch.no_grad()
def require_sound_task(task, model, seed, autocast):
    """End the run if the same seed gives other documents, if a token is not in the vocabulary, or
    if a score has no unit. It scores one document, so that an error in an `evaluate` of your own
    shows here, too."""
    documents = list(task.documents(np.random.default_rng(seed), 2))
    again = list(task.documents(np.random.default_rng(seed), 2))
    if [document.tokens for document in documents] != [document.tokens for document in again]:
        reason = "its documents differ from call to call; draw them from rng alone"
        raise Ended(f"{task.name}: {reason}", status=2)
    largest = max(max(document.tokens) for document in documents)
    if largest >= task.vocab_size:
        reason = f"token {largest} is not in its vocabulary of {task.vocab_size} (0 is padding)"
        raise Ended(f"{task.name}: {reason}", status=2)
    model.eval()
    with autocast:
        scores = task.evaluate(model, seed, 1)
    model.train()
    unknown = scores.keys() - task.units.keys()
    if unknown:
        raise Ended(f"{task.name}: its units lack the score {unknown.pop()!r}", status=2)
    for name, value in scores.items():
        if not isinstance(value, (int, float)):  # the log is JSON
            reason = f"its score {name!r} is a {type(value).__name__}, not a Python number"
            raise Ended(f"{task.name}: {reason}", status=2)


def require_all_weights(optimizer, model):
    """End the run if the optimizer leaves out a weight that learns."""
    updated = set()
    for group in optimizer.param_groups:
        updated.update(group["params"])
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight not in updated:
            raise Ended(f"the optimizer does not update {name}", status=2)


def mention_unused_weights(model, autocast):
    """Print a line if a weight gets no gradient from two sequences. It may be meant so: a mixture
    of experts does not use all of them each time."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with autocast:
        logits, _ = model(two_sequences(model))
    gradients = torch.autograd.grad(logits.sum(), list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained.keys(), gradients):
        if gradient is None and RANK == 0:
            print(f"train.py: in a first try no layer used {name}", file=sys.stderr)


# ---- 5. Progress -----------------------------------------------------------


class Progress:
    """The bar on the screen, and the time. A lap is what lies between two lines of the log."""

    def __init__(self, training, block_size, steps_done, seconds_done):
        """The run goes on after `steps_done` steps, which took `seconds_done`."""
        self.bar = tqdm(total=training.steps, initial=steps_done, mininterval=1, disable=RANK > 0)
        self.shown = {}
        self.began = time.perf_counter() - seconds_done  # as if the run had never paused
        self.tokens_per_step = training.batch_size * block_size
        self.start_lap(steps_done)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()

    def seconds(self):
        return time.perf_counter() - self.began

    def start_lap(self, step):
        self.lap_start = step
        self.lap_began = time.perf_counter()

    def lap(self, step):
        """Tokens since the start, and in this lap tokens per second."""
        took = time.perf_counter() - self.lap_began
        steps = step - self.lap_start
        return {
            "tokens": step * self.tokens_per_step,
            "tokens_per_s": round(steps * self.tokens_per_step / took),
        }

    def show(self, texts):
        """Print {name: text} behind the bar when it moves next. A later text replaces an earlier
        one of its name."""
        self.shown.update(texts)
        self.bar.set_postfix(self.shown, refresh=False)


# ---- 6. Ending a run -------------------------------------------------------

HOW_TO_GO_ON = "repeat the command with --resume to continue"


class Ended(Exception):
    """Ends the program: `main` prints the message as a line, and exits with the status.

    status  0 if the run is finished already, 1 if it has diverged, 2 for bad input, and 128 + n
            after signal n, as in shells
    """

    def __init__(self, message, status):
        super().__init__(message)
        self.status = status


def exit_with_line(message, status=2):
    """End the program with one line. Status 2 means bad input."""
    if RANK == 0:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
            print("train.py:", one_line(str(message)), file=sys.stderr)
    raise SystemExit(status)


def require_finite(step, values):
    """End the run if a number, a tensor or a list of tensors in {name: value} is not finite."""
    for name, value in values.items():
        tensors = value if isinstance(value, list) else [value]
        if not all(torch.as_tensor(tensor).isfinite().all() for tensor in tensors):
            advice = "Start again with a smaller --lr"
            raise Ended(f"step {step}: {name} is not finite. {advice}", status=1)


# The signals that ask to stop.
STOP = {signal.SIGINT, signal.SIGTERM}
if hasattr(signal, "SIGHUP"):  # Windows has no such signal
    STOP.add(signal.SIGHUP)


class StopSignals:
    """Notes the signals that ask to stop: Ctrl-C, a batch system's, a closed terminal's.

    A second Ctrl-C kills, except under torchrun, which repeats the first one.
    """

    def __enter__(self):
        self.requested = None  # the first signal's number
        self.old_handlers = {}
        for number in STOP:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self.old_handlers[number] = signal.signal(number, self.note)
        return self

    def note(self, number, frame):
        if self.requested is None:
            self.requested = number
            if RANK == 0:
                # print() may fail if the signal interrupts another print().
                with contextlib.suppress(OSError):  # the terminal may be closed
                    os.write(2, b"\ntrain.py: saving, then stopping\n")
        if number == signal.SIGINT and WORLD == 1:
            signal.signal(number, self.old_handlers[number])  # so that the next one kills

    @property
    def number(self):
        return self.requested or signal.SIGTERM  # SIGTERM if only another process was asked

    @property
    def name(self):
        return signal.Signals(self.number).name

    def ended_after(self, step):
        """What to raise, with the exit status that shells give."""
        return Ended(f"stopped after step {step}; {HOW_TO_GO_ON}", status=128 + self.number)

    def agreed(self, log_now, device):
        """Whether to stop after this step.

        A single process that was asked to stop does so at once. Several have to agree, which takes
        time, so they wait until a step that logs. Then all stop if any was asked.
        """
        asked = self.requested is not None
        if WORLD == 1:
            return asked
        if not log_now:
            return False
        return mean_over_processes(torch.tensor(float(asked), device=device)).item() > 0

    def __exit__(self, *error):
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)


def ignore_stop_signals(worker):
    """For the loader's workers: Ctrl-C reaches them, too, but they must live until the checkpoint
    is saved. Then `main` kills them."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


# ---- 7. Recipes and presets ------------------------------------------------
#
# A recipe is everything that makes a run what it is, most of all task, model and training (Recipe
# and Training are in runs.py). A preset scales these three together: `nano` for two CPU cores and
# minutes, `small` for one GPU, `paper` for the paper's own numbers (Depo0, our addition, has
# Depo1's). Of `small`, only Copy has been run; its other numbers are guesses between the other two.

# L1D16: 1 layer, 16 dims. "tied": one matrix for embedding and head.
L1D16 = dict(n_layer=1, n_head=2, d_model=16)
L3D64 = dict(n_layer=3, n_head=2, d_model=64)
L5D64 = dict(n_layer=5, n_head=4, d_model=64)
L4D128 = dict(n_layer=4, n_head=4, d_model=128)
L6D384 = dict(n_layer=6, n_head=6, d_model=384)
L8D512 = dict(n_layer=8, n_head=8, d_model=512)
L12D768 = dict(n_layer=12, n_head=12, d_model=768)
L2D32_TIED = dict(n_layer=2, n_head=2, d_model=32, tie_embeddings=True)
L4D256_TIED = dict(n_layer=4, n_head=4, d_model=256, tie_embeddings=True)


def preset(model, task=None, **training):
    """One entry of PRESETS: fields of Config, parameters of the task, fields of Training.

    What is left out has the default of Config (canon_gpt.py), of Training (runs.py: 1,000 steps of
    warm-up, weight decay 0.03, cosine) or of the task's constructor (tasks.py). `--help` prints
    every preset.
    """
    return {"task": task or {}, "model": model, "training": training}


# N is how many numbers, nodes or people there are, K the most hops that are asked for, V how many
# letters words are made of, and L the most operators in an expression; root=None is a grammar's own
# root. Where steps is None, Capo computes them from how often each person is met (--exposures).
# How models fared at which learning rates: results/rates.md.
# fmt: off
PRESETS = {
    "nano": {  # the tasks' own defaults have this size
        "copy": preset(L1D16, steps=2000, batch_size=32, lr=1e-2, warmup=200),
        "depo0": preset(L5D64, steps=16_000, batch_size=32, lr=5e-3, warmup=300),
        "depo1": preset(L3D64, steps=10_000, batch_size=32, lr=7e-3, warmup=300),
        "depo2": preset(L3D64, steps=5000, batch_size=16, lr=5e-3, warmup=100),
        "brevo1": preset(L3D64, steps=2000, batch_size=32, lr=5e-3, warmup=300),
        "brevo2": preset(L3D64, steps=5000, batch_size=32, lr=5e-3, warmup=300),
        "mano": preset(L3D64, steps=5000, batch_size=32, lr=3e-3, warmup=300, weight_decay=0.1),
        "lano": preset(L3D64, steps=2000, batch_size=32, lr=5e-3, warmup=300, weight_decay=0.1),
        "capo": preset(L2D32_TIED, steps=None, batch_size=16, lr=5e-3, warmup=300,
                       weight_decay=0.01),
        "text": preset(L4D128, steps=1200, batch_size=16, lr=4e-3, warmup=100),
    },
    "small": {
        "copy": preset(L1D16, task=dict(N=200, block_size=401), steps=3000, batch_size=32, lr=1e-2),
        "depo0": preset(L6D384, task=dict(N=40, K=4, V=80, block_size=320),
                        steps=20_000, batch_size=128, lr=1e-3),
        "depo1": preset(L6D384, task=dict(N=10, K=4, block_size=112),
                        steps=40_000, batch_size=256, lr=1e-3),
        "depo2": preset(L6D384, task=dict(N=25, K=4, block_size=512),
                        steps=20_000, batch_size=128, lr=1e-3),
        "brevo1": preset(L6D384, task=dict(N=40, block_size=384),
                         steps=20_000, batch_size=128, lr=1e-3),
        "brevo2": preset(L6D384, task=dict(N=20, block_size=647),
                         steps=20_000, batch_size=128, lr=1e-3),
        "mano": preset(L6D384, task=dict(L=8, block_size=256),
                       steps=20_000, batch_size=128, lr=5e-4, weight_decay=0.1),
        "lano": preset(L6D384, task=dict(root=None, block_size=512),
                       steps=20_000, batch_size=96, lr=1e-3, weight_decay=0.1),
        "capo": preset(L4D256_TIED, task=dict(N=50_000, block_size=512),
                       steps=None, batch_size=48, lr=2e-3, weight_decay=0.01),
        "text": preset(L8D512, task=dict(block_size=1024), steps=10_000, batch_size=32, lr=2e-3),
    },
    "paper": {
        "copy": preset(L1D16, task=dict(N=500, block_size=1024),
                       steps=50_000, batch_size=32, lr=5e-3),
        "depo0": preset(L12D768, task=dict(N=225, K=8, V=450, block_size=2048),
                        steps=87_500, batch_size=128, lr=1e-3),
        "depo1": preset(L12D768, task=dict(N=225, K=8, block_size=2048),
                        steps=87_500, batch_size=128, lr=1e-3),
        "depo2": preset(L12D768, task=dict(N=75, K=16, block_size=2048),
                        steps=100_000, batch_size=128, lr=1e-3),
        "brevo1": preset(L12D768, task=dict(N=70, block_size=1024),
                         steps=100_000, batch_size=256, lr=1e-3),
        "brevo2": preset(L12D768, task=dict(N=30, block_size=1536),
                         steps=200_000, batch_size=192, lr=1e-3),
        "mano": preset(L12D768, task=dict(L=10, block_size=1024),
                       steps=80_000, batch_size=64, lr=3e-4, weight_decay=0.1),
        # The paper trains Lano without warm-up, and its learning rate falls linearly.
        "lano": preset(L12D768, task=dict(root=None, block_size=512), steps=100_000,
                       batch_size=96, lr=5e-4, warmup=0, weight_decay=0.1, schedule="linear"),
        "capo": preset(L4D256_TIED, task=dict(N=50_000, block_size=512),
                       steps=None, batch_size=12, lr=1e-3, weight_decay=0.01),
    },
}
OWN_TASK = {  # for a task of your own, until PRESETS has an entry for it
    "nano": preset(L3D64, steps=2000, batch_size=32, lr=5e-3, warmup=300),
    "small": preset(L6D384, steps=20_000, batch_size=128, lr=1e-3),
    "paper": preset(L12D768, steps=100_000, batch_size=128, lr=1e-3),
}
# fmt: on
NO_PAPER_SIZE = ("text",)  # the paper has no such task


def preset_parts(preset_name, task_name):
    """The arguments of make_recipe that a preset sets: preset_name, task, model and training.

    Raises ValueError if there is no such preset.
    """
    if preset_name not in PRESETS:
        raise ValueError(f"preset = {preset_name!r}: allowed: {', '.join(PRESETS)}")
    if preset_name == "paper" and task_name in NO_PAPER_SIZE:
        raise ValueError(f"preset = {preset_name!r}: {task_name} has none of this size")
    parts = PRESETS[preset_name].get(task_name, OWN_TASK[preset_name])
    task = {"name": task_name} | parts["task"]
    return parts | {"preset_name": preset_name, "task": task}


EVAL_SIZE = 512  # instances


def make_recipe(preset_name, task, model, training, dtype="float32", seed=0, eval_size=EVAL_SIZE):
    """A recipe in which every parameter has its value.

    task, model, training: dicts, such as an entry of PRESETS has; what is left out has its default
    Raises ValueError for what does not fit.
    """
    made_task = make_task(**task)
    made_training = Training(**training)
    for field, table in {"schedule": SCHEDULES, "optimizer": OPTIMIZERS}.items():
        value = getattr(made_training, field)
        if value not in table:
            raise ValueError(f"{field} = {value!r}: allowed: {', '.join(table)}")
    for hundredths in range(101):  # a schedule of your own fails now, not in mid-run
        done = hundredths / 100
        factor = SCHEDULES[made_training.schedule](done)
        if not 0 <= factor <= 1:
            name = made_training.schedule
            raise ValueError(f"schedule = {name!r}: {factor} at {done}; allowed: 0 to 1")
    if made_training.steps is None:
        made_training.steps = made_task.steps(made_training.batch_size)
    sizes = {"vocab_size": made_task.vocab_size, "block_size": made_task.block_size}
    model = model | sizes  # a model from --config has them already
    config = Config(**model)
    return Recipe(
        preset=preset_name,
        task=made_task.settings,
        model=config,
        training=made_training,
        dtype=dtype,
        seed=seed,
        eval_size=eval_size,
    )


# ---- 8. The command line ---------------------------------------------------
#
# A value comes from its flag; if there is none, from the preset or from --config's file; and if
# that leaves it out, from its default in Config (canon_gpt.py), Training (runs.py), the task's
# constructor (tasks.py) or make_recipe. `read_options` completes what is not part of the recipe.


def make_parser():
    """All options. A new one is one more line here. If it has the name of a field of Config or
    Training, or of a parameter of the task, it sets that; then it has no default, so that None says
    that it was not given. Any other also goes into OTHER_FLAGS, and into Options or Recipe.
    """
    parser = argparse.ArgumentParser(
        usage="python train.py --task TASK [--canon abcd] [other options]",
        description="Train one model on one task. Options left out keep the preset's values.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = exit_with_line  # one line; argparse would also print its usage
    on_off = argparse.BooleanOptionalAction

    add = parser.add_argument_group("task").add_argument
    add("--task", help=", ".join(TASKS | ALIASES))
    add("--preset", help="nano (the default without CUDA), small (with CUDA) or paper")
    add("--config", type=Path, help="repeat the recipe in a run's config.json")
    add("--N", type=int, help="numbers to copy; nodes of a graph; people")
    add("--K", type=int, help="depo: the most hops that are asked for")
    add("--V", type=int, help="depo, brevo2: letters that words are made of")
    add("--word-len", type=int, nargs=2, help="depo, brevo2: least and most letters in a word")
    add("--L", type=int, help="mano: the most operators in an expression")
    add("--cfg", help="lano: the grammar, such as cfg3f")
    add("--root", type=int, help="lano: the symbol that sentences grow from")
    add("--exposures", type=int, help="capo: how often each person is met; sets --steps")
    add("--text", help="text: python, its standard library (the default), or the path of a file")
    add("--block-size", type=int, help="context, in tokens")

    add = parser.add_argument_group("model").add_argument
    pattern = "or a pattern: gdn,attention"
    add("--mixer", help=f"{', '.join(MIXERS)} (default: {Config.mixer}); {pattern}")
    add("--pos", help=f"positions: {', '.join(POSITIONS)} (default: {Config.pos})")
    add("--canon", help="the points that get a Canon layer: any of the letters abcd")
    add("--mlp", help=f"{', '.join(MLPS)} (default: {Config.mlp})")
    add("--n-layer", type=int, help="blocks")
    add("--n-head", type=int, help="heads of attention")
    add("--d-model", type=int, help="width")
    add("--canon-type", help=f"{', '.join(CANONS)} (default: {Config.canon_type})")
    add("--canon-kernel", type=int, help="tokens that a Canon layer mixes, 2 to 8 (default: 4)")
    add("--canon-residual", action=on_off, help="Canon adds h to the convolution (default: on)")
    add("--canon-silu", action=on_off, help="apply SiLU to what a Canon layer adds (default: off)")
    add("--canon-frozen", action=on_off, help="Canon layers keep their random initial weights")
    add("--short-conv", action=on_off, help="a linear mixer's own convolution (default: on with "
        "mamba2 and gdn, where there is no Canon-B)")  # fmt: skip
    add("--tie-embeddings", action=on_off, help="one matrix for embedding and head")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, help="batches to train on")
    add("--batch-size", type=int, help="windows per step")
    add("--lr", type=float, help="peak learning rate")
    add("--warmup", type=int, help="steps until the learning rate peaks")
    add("--schedule", help=f"of the learning rate after warm-up: {', '.join(SCHEDULES)}")
    add("--optimizer", help=f"{', '.join(OPTIMIZERS)} (default: {Training.optimizer})")
    add("--weight-decay", type=float, help="of matrices only (usually 0.03)")
    add("--betas", type=float, nargs=2, help="of adamw (default: 0.9 0.98)")
    add("--eps", type=float, help="of adamw (default: 1e-6)")
    add("--clip", type=float, help="maximum gradient norm (0: no clipping; default: 1)")
    add("--seed", type=int, help="default: 0")
    add("--dtype", help="float32, or bfloat16 (the default on GPUs that have it)")
    add("--eval-size", type=int, help=f"instances scored in an evaluation (default: {EVAL_SIZE})")

    add = parser.add_argument_group("run").add_argument
    add("--device", help=f"default here: {devices()[0]}")
    add("--out", help="the run's folder (default: out/ and a name made of the choices above)")
    add("--resume", action="store_true", help="resume from ckpt.pt")
    add("--compile", action=on_off, help="torch.compile (default: where it works and pays)")
    add("--workers", type=int, help="processes that draw data (default: 4 on CUDA, else 0)")
    add("--eval-every", type=int, help="steps between evaluations (default: a 20th of the run)")
    add("--grad-accum", type=int, default=1, help="parts of a batch: less memory, same training")
    return parser


# A flag sets the field of the same name: of Config, or of Training. Those in OTHER_FLAGS set what
# is said there. All others are the task's, and make_task refuses what its task does not have.
FROM_TASK = ("vocab_size", "block_size")  # fields of a model that follow from its task
MODEL_FLAGS = [f.name for f in dataclasses.fields(Config) if f.name not in FROM_TASK]
TRAINING_FLAGS = [f.name for f in dataclasses.fields(Training)]
OTHER_FLAGS = ["task", "preset", "config", "seed", "dtype", "eval_size"]  # parts of the recipe
OTHER_FLAGS += ["device", "out", "resume", "compile", "workers", "eval_every", "grad_accum"]


def read_command_line(argv):
    """(options, recipe), checked. Writes nothing; bad input ends the program with one line."""
    parser = make_parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = presets_in_words()  # only now, as it makes every task and reads the text
    args = parser.parse_args(argv)
    try:
        device = choose_device(args)
        recipe = read_recipe(args, device)
        options = read_options(args, device, recipe)
    except ValueError as error:
        exit_with_line(error)
    return options, recipe


def choose_device(args):
    """--device, or the first of cuda, mps and cpu that this machine has."""
    device = args.device or devices()[0]
    if device not in devices():
        raise ValueError(f"device = {device!r}: allowed: {', '.join(devices())}")
    return device


def read_options(args, device, recipe):
    """The Options, where nothing is left open."""
    can_compile = device == "cuda" or (device == "cpu" and can_compile_on_cpu())
    compiles = args.compile
    if compiles and not can_compile:
        needs = "CUDA, or on a CPU PyTorch 2.7, a C++ compiler and Python's headers"
        raise ValueError(f"--compile needs {needs}")
    if compiles is None:
        compiles = can_compile and (device == "cuda" or compiling_pays(recipe))

    if args.out == "":
        raise ValueError("out = '': name a folder")  # Path("") is the current folder
    if args.out is None:
        # The name has the dtype only if it is not the usual one of this device.
        out = Path("out", run_name(recipe, usual_dtype=default_dtype(device)))
    else:
        out = Path(args.out)

    workers = args.workers
    if workers is None:
        workers = 4 if device == "cuda" else 0
    require_range("workers", workers, 0, 64)

    eval_every = args.eval_every
    if eval_every is None:
        eval_every = max(1, recipe.training.steps // 20)
    require_range("eval_every", eval_every, 1, 10**8)

    require_range("grad_accum", args.grad_accum, 1, 10**5)
    micro_batches = WORLD * args.grad_accum  # of all processes; each gets equally many windows
    batch_size = recipe.training.batch_size
    if batch_size % micro_batches != 0:
        raise ValueError(f"batch_size = {batch_size}: must be a multiple of {micro_batches}")
    return Options(
        device=device,
        out=out,
        compile=compiles,
        must_compile=args.compile is True,
        workers=workers,
        eval_every=eval_every,
        grad_accum=args.grad_accum,
        resume=args.resume,
    )


def default_dtype(device):
    """bfloat16 on a GPU that has it, otherwise float32."""
    return "bfloat16" if device == "cuda" and gpu_has_bfloat16() else "float32"


def read_recipe(args, device):
    """The recipe of the preset or of --config, with the flags in place."""
    if args.config is not None:
        parts = parts_in_file(args)
    elif args.task is not None:
        preset_name = args.preset
        if preset_name is None:
            preset_name = "small" if device == "cuda" else "nano"
        parts = preset_parts(preset_name, ALIASES.get(args.task, args.task))
        parts["dtype"] = default_dtype(device)
    else:
        raise ValueError(f"--task is required: {', '.join(TASKS | ALIASES)}")
    # A flag that was given goes before the preset's value.
    parts["task"] = parts["task"] | given(args, task_flags(args))
    parts["model"] = parts["model"] | given(args, MODEL_FLAGS)
    parts["training"] = parts["training"] | given(args, TRAINING_FLAGS)
    parts.update(given(args, ("dtype", "seed", "eval_size")))
    if args.exposures is not None:
        if args.steps is not None:
            raise ValueError(f"steps = {args.steps}: exposures sets them; leave one out")
        parts["training"]["steps"] = None  # make_recipe asks the task for them

    recipe = make_recipe(**parts)
    # Config cannot tell a flag that was given from a default. So these are refused here.
    if not recipe.model.has_attention:
        mixer = recipe.model.mixer
        if args.n_head is not None:
            raise ValueError(f"n_head = {args.n_head}: {mixer} does not use attention's heads")
        if args.pos not in (None, "nope"):
            raise ValueError(f"pos = {args.pos}: {mixer} takes no positions")
    if device == "cuda" and recipe.dtype == "bfloat16" and not gpu_has_bfloat16():
        raise ValueError("dtype = bfloat16: this GPU has only float32")
    return recipe


def parts_in_file(args):
    """What --config's file holds. Flags may not change its task and model.

    The file also holds values that follow from others, such as vocab_size. A change of task or
    model would leave those as they are.
    """
    flags = list(given(args, ["task", "preset"] + task_flags(args) + MODEL_FLAGS))
    if flags:
        name = flags[0].replace("_", "-")
        raise ValueError(f"config = {args.config}: sets task and model; leave --{name} out")
    try:
        config = json.loads(args.config.read_text())
        parts = {part: config[part] for part in RECIPE_PARTS}
        parts["preset_name"] = config["preset"]
        make_recipe(**parts)  # raises an error if a value does not fit
        preset_parts(parts["preset_name"], parts["task"]["name"])  # or if the preset is unknown
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "(If a part of it is your own, run the file that registers it.)"
        raise ValueError(f"config = {args.config}: holds no recipe: {error!r} {advice}") from None
    return parts


def task_flags(args):
    """The flags of the task's parameters: all that belong to nothing else."""
    others = MODEL_FLAGS + TRAINING_FLAGS + OTHER_FLAGS
    return [field for field in vars(args) if field not in others]


def given(args, fields):
    """{field: value} of the flags that were given on the command line."""
    values = {field: getattr(args, field, None) for field in fields}  # not all have a flag
    return {field: value for field, value in values.items() if value is not None}


def presets_in_words():
    """For --help."""
    lines = []
    for preset_name, tasks in PRESETS.items():
        lines.append(f"{preset_name} sets:")
        for task_name in tasks:
            recipe = make_recipe(**preset_parts(preset_name, task_name))
            lines += [f"  {line}" for line in recipe_in_words(recipe)]
    return "\n".join(lines)


def devices():
    """The devices of this machine, the default first."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found + ["cpu"]


def can_compile_on_cpu():
    """Compiling needs PyTorch 2.7 (gcc 12 miscompiles the C++ that 2.6 generates), a C++ compiler
    and Python's headers."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    is_new_enough = torch.__version__ >= (2, 7)  # torch's version compares with tuples
    return is_new_enough and header.exists() and compiler is not None


# From so many tokens times layers times channels on, compiling saves more time than it takes. On
# one core it takes 26 to 55 seconds, and saves some 1e-7 seconds for each of these
# (benchmarks/step.py): 40 / 1e-7 = 4e8.
WORTH_COMPILING = 4e8


def compiling_pays(recipe):
    """Whether a run on a CPU is long enough to win back the time that compiling takes.

    Only the recipe decides, so that a run computes in one way, however often it is resumed.
    """
    model, training = recipe.model, recipe.training
    tokens = training.steps * training.batch_size * model.block_size
    return tokens * model.n_layer * model.d_model > WORTH_COMPILING


# ---- 9. A run's name, its config.json, and what it prints ------------------


def run_name(recipe, usual_dtype):
    """Task, preset, mixer, positions, Canon points, what differs from the preset, seed."""
    model = recipe.model
    words = [recipe.task["name"], recipe.preset]
    if model.mixer != "attention":
        words.append(model.mixer.replace(",", "-"))
    if model.has_attention:
        words.append(model.pos)
    words.append(model.canon or "bare")
    words += unlike_preset(recipe)
    words += differences({"dtype": recipe.dtype}, {"dtype": usual_dtype})
    words.append(f"s{recipe.seed}")
    return "_".join(words)


def unlike_preset(recipe):
    """["lr=0.003", "canon-frozen"]: what differs from the preset. Mixer, pos and canon are left
    out, as `run_name` always names them."""
    parts = preset_parts(recipe.preset, recipe.task["name"])
    usual_task = make_task(**parts["task"]).settings
    # The preset's model and training for this run's task, on which Capo's steps depend.
    usual = make_recipe(**(parts | {"task": recipe.task}))
    named_anyway = {field: getattr(recipe.model, field) for field in ("mixer", "pos", "canon")}
    usual_model = vars(usual.model) | named_anyway
    # short_conv is usual if it is what Config chooses for this run's mixer and canon.
    usual_model["short_conv"] = replace(recipe.model, short_conv=None).short_conv

    found = differences(short_settings(recipe.task), short_settings(usual_task))
    found += differences(vars(recipe.model), usual_model)
    return found + differences(vars(recipe.training), vars(usual.training))


def short_settings(task):
    """A task's settings as a folder's name can hold them: of a text, its file's name only."""
    short = {field: value for field, value in task.items() if field not in WHICH_TEXT}
    if "text" in short:
        short["text"] = Path(short["text"]).stem
    return short


def differences(mine, usual):
    """The fields with unusual values, such as ["lr=0.003", "canon-frozen", "no-canon-residual"]."""
    found = []
    for field, value in mine.items():
        name = field.replace("_", "-")
        if value == usual[field]:
            continue
        if value is True:
            found.append(name)
        elif value is False:
            found.append(f"no-{name}")
        elif isinstance(value, (list, tuple)):
            found.append(f"{name}={'-'.join(map(str, value))}")
        else:
            found.append(f"{name}={str(value).replace('/', '-')}")  # as it names a folder
    return found


def describe(options, recipe, task, model, command):
    """What config.json holds: the recipe, and where this run came from."""
    return {
        "run": options.out.name,
        **recipe.as_dict(),
        "preset": recipe.preset,
        "units": task.units,
        "chance": task.chance,
        "parameters": model.parameter_counts(),
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(options.device),
        "processes": WORLD,
        "compiled": options.compile,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{device}, {processor()}, {threads} thread{'s' if threads > 1 else ''}"


def processor():
    """The processor's name. Rounding differs between processors."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # no Linux
        pass
    return platform.processor() or platform.machine()


def recipe_in_words(recipe):
    """Three lines: what the task, the model and the training are."""
    unprinted = ("name", "sha256")
    task = [f"{field} {value}" for field, value in recipe.task.items() if field not in unprinted]
    model, training = recipe.model, recipe.training
    layers = f"{model.n_layer} layer{'s' if model.n_layer > 1 else ''}"
    width = f"{model.d_model} dims"
    positions = "no positions"
    if model.has_attention:
        width += f", {model.n_head} heads"
        positions = model.pos
    canon = f"Canon-{model.canon.upper()}" if model.canon else "no Canon"
    mlp = "no MLP" if model.mlp == "none" else f"{model.mlp} MLP"
    tied = ", tied embeddings" if model.tie_embeddings else ""
    rate = f"learning rate {training.lr:g} after {training.warmup:,} steps of warm-up"
    rate += f", then {training.schedule}"
    if training.warmup > training.steps:
        rate = f"learning rate {training.lr:g} not reached: --warmup is {training.warmup:,} steps"
    return [
        f"{recipe.task['name']}: {', '.join(task)}",
        f"{layers} of {model.mixer}, {mlp}, {width}, {positions}, {canon}{tied}",
        f"{training.steps:,} steps of {training.batch_size} windows, {rate}, "
        f"{training.optimizer} with weight decay {training.weight_decay:g}",
    ]


def announce(options, recipe, about):
    """Print what is about to happen."""
    if RANK > 0:
        return
    counts = about["parameters"]
    compiled = "not compiled"
    if options.compile:
        compiled = "compiled: the first step takes a minute or two"
    print(options.out)
    for line in recipe_in_words(recipe):
        print(f"  {line}")
    unusual = unlike_preset(recipe)
    if unusual:
        print(f"  unlike the preset: {', '.join(unusual)}")
    print(f"  {counts['total']:,} parameters, {counts['canon']:,} of them in Canon layers")
    print(f"  {about['device']}, {recipe.dtype}, {compiled}", flush=True)


def scores_in_words(task, scores):
    """{score: text}, such as {"k=1": "97%"}."""
    texts = {}
    for name, value in scores.items():
        texts[name] = score_text(value, task.units.get(name))
    return texts


def costs_of(run, model, options, progress):
    """What the run took: seconds in all, the median speed in its log, and on a GPU the memory."""
    lines = run.lines[1:] or run.lines  # the first lap includes compiling
    speed = statistics.median(line["tokens_per_s"] for line in lines)
    costs = {
        "seconds": round(progress.seconds(), 1),
        "tokens_per_s": round(speed),
        "step_ms": round(1e3 * progress.tokens_per_step / speed, 3),
    }
    if options.device == "cuda":
        costs["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return costs


def print_results(task, model, autocast, scores, costs, seed):
    """Scores and costs, and one instance with the model's answers."""
    if RANK > 0:  # of the processes of torchrun, the first one prints
        return
    results = scores_in_words(task, scores) | costs
    for name, value in results.items():
        print(f"{name:16}{value:>9}")
    model.eval()
    with autocast, torch.no_grad():
        example = answered(task, model, seed)
    print(f"\n{wrapped(example)}")


# ---- 10. Where everything begins -------------------------------------------


def main(argv=None, program=__file__):
    """program: the script that config.json names, if one of your own calls this."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = shlex.join(["python", relative(program), *argv])
    options, recipe = read_command_line(argv)
    others = multiprocessing.active_children()  # those that were there before this run
    try:
        if WORLD > 1:
            if options.device == "cuda":
                local_rank = int(os.environ["LOCAL_RANK"])  # this process's number on its machine
                torch.cuda.set_device(local_rank)
            torch.distributed.init_process_group()
        with StopSignals() as stop:
            train(options, recipe, command, stop)
        if WORLD > 1:
            torch.distributed.destroy_process_group()
    except Ended as ended:
        exit_with_line(ended, ended.status)
    except (RunError, Refused) as error:
        exit_with_line(error)
    except OSError as error:
        if RANK > 0 or not is_about(error, options.out):  # only the first process prints the line
            raise  # a bug in a layer or task of your own shows where it is
        advice = ""
        if (options.out / "ckpt.pt").exists():
            advice = f"; {HOW_TO_GO_ON}"
        exit_with_line(f"{type(error).__name__}: {error}{advice}", status=1)
    except (MemoryError, RuntimeError) as error:
        if RANK > 0 or not out_of_memory(error):
            raise
        advice = "A smaller --batch-size or a larger --grad-accum needs less"
        exit_with_line(f"{type(error).__name__}: {error}. {advice}", status=1)
    finally:
        kill_workers(others)


def is_about(error, folder):
    """Whether a file that could not be written or read is the folder, in it, or above it."""
    if error.filename is None:
        return False
    file, folder = Path(error.filename).absolute(), folder.absolute()
    return file.is_relative_to(folder) or folder.is_relative_to(file)


def relative(path):
    """The path from the current folder if it is below it, otherwise the file's name."""
    path = Path(path).resolve()
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


def kill_workers(others):
    """Kill the loader's workers: they ignore the signal that would end them with this process.

    others: child processes that are not the loader's
    """
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise an error
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()


def out_of_memory(error):
    """PyTorch says "CUDA out of memory" or, on a CPU, "can't allocate memory"."""
    return isinstance(error, MemoryError) or re.search("(out of|allocate) mem", str(error))


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # Ctrl-C is not ignored
        # StopSignals notes the first Ctrl-C and then puts this back: a second one kills at once,
        # without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
