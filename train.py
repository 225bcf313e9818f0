"""Train one model on one task:   python train.py --task depo --canon abcd

First the parts: 1 the command line; 2 the run's folder; 3 data, optimiser, learning rate, and what a step costs. Then 4, `train`: the
order of its lines is the order of events, down to the closing table. Last, 5, sweeps: many such runs. A run leaves in out/<run>/

    config.json     everything needed to repeat it, with versions and device
    metrics.jsonl   one object a line: step, tokens, loss, lr, tokens_per_s, at evaluations also eval; the last line has
                    "final": true, seconds, and what a step cost
    ckpt.pt         model, optimiser and step, written at first, at evaluations, on Ctrl-C and at the end: `--resume` goes on from it

plot.py reads the first two. On several GPUs of one machine, for example four:

    torchrun --nproc_per_node=4 train.py --task depo --canon abcd

Each process makes every batch and trains on its share of the rows, so the batch size must be a multiple of their number; PyTorch's
DistributedDataParallel averages their gradients. Up to rounding, the result does not depend on how many there are. The first also
evaluates and writes.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

# On a CPU, threads wait for each other thousands of times a second. GNU OpenMP (PyTorch's, on Linux) waits by spinning, which takes the
# core from the very thread that is waited for as soon as another program needs one, too. So it spins for some microseconds, then sleeps.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from tqdm import tqdm  # noqa: E402

from canon_gpt import MIXERS, MLPS, POSITIONS, Attention, CanonGPT, Config  # noqa: E402
from kernels import can_compile_on_cpu, device_name, gpu_has_bfloat16  # noqa: E402
from tasks import ALIASES, GRAMMARS, PRESETS, make_task, written  # noqa: E402

LOG_EVERY = 20  # steps
# which process of how many this is, from torchrun
RANK, WORLD = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if "TORCHELASTIC_RUN_ID" in os.environ else (0, 1)

# ------------------------------------------------------------------------------------------------------------
# 1. The command line
# ------------------------------------------------------------------------------------------------------------


def tell(message):
    """A line on stderr; of several processes, from the first."""
    if RANK == 0:
        print(message, file=sys.stderr)


def fail(message):
    """Bad input: one line, exit status 2."""
    tell(f"train.py: {message}")
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message} (see --help)")


def parse_arguments(argv):
    parser = Parser(
        description="Train a Transformer, with or without Canon layers, on a synthetic task and score it exactly.",
        epilog="examples:  python train.py --task copy --canon abcd      one layer learns to copy\n"
        "           python train.py --task depo --canon abcd      k hops in a row; compare without --canon\n"
        "           python train.py --task depo --pos nope --canon abcd --seed 1\n"
        "           python train.py --sweep nope                 a whole comparison, three seeds",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    add = parser.add_argument_group("task").add_argument
    add("--task", help=f"one of {', '.join([*PRESETS, *ALIASES])} (depo is depo1, brevo brevo1)")
    add("--preset", help="nano: two CPU cores, minutes (default without CUDA); small: one GPU (default with CUDA; only copy is measured yet); "
        "paper: the paper's numbers. Sets the task, the model's size and the training, but for what is given")  # fmt: skip
    add("--N", type=int, help="size: numbers to copy, nodes of the largest cycle or graph, people")
    add("--K", type=int, help="depo: the most hops a question asks for")
    add("--V", type=int, help="depo, brevo2: words are spelled with tokens 1..V, and end with one of V+1..2V")
    add("--word-len", type=int, nargs=2, metavar=("MIN", "MAX"), help="depo, brevo2: tokens a word")
    add("--L", type=int, help="mano: the most operators of an expression")
    add("--cfg", help=f"lano: the grammar, one of {', '.join(GRAMMARS)} (the last two want --block-size 1536)")
    add("--root", type=int, help="lano: the symbol that sentences grow from (nano: 17; the whole grammar's is 22 for cfg3f, else 25)")
    add("--exposures", type=int, help="capo: how often each person is met; --steps, if not given, follows from it")
    add("--block-size", type=int, help="context, in tokens")

    add = parser.add_argument_group("model").add_argument
    add("--mixer", default="attention", help=f"one of {', '.join(MIXERS)} (default %(default)s), or a pattern to repeat over the "
        "layers: gdn,gdn,attention")  # fmt: skip
    add("--canon", default="", metavar="POINTS", help="where Canon layers sit: any of the letters a, b, c, d (default none)")
    add("--pos", default="rope", help=f"attention's positions: one of {', '.join(POSITIONS)} (default %(default)s)")
    add("--short-conv", action=argparse.BooleanOptionalAction,
        help="the linear mixers' own convolution (default: on with mamba2 or gdn, unless Canon-B takes its place)")  # fmt: skip
    add("--mlp", default="swiglu", help=f"one of {', '.join(MLPS)} (default %(default)s)")
    add("--canon-kernel", type=int, default=4, metavar="K", help="tokens that a Canon layer sees: 2, 3 or 4 (default)")
    add("--canon-no-residual", action="store_true", help="Canon without its residual")
    add("--canon-silu", action="store_true", help="SiLU after Canon's convolution")
    add("--canon-frozen", action="store_true", help="keep Canon's random initial weights")
    add("--tie-embeddings", action=argparse.BooleanOptionalAction, help="one matrix for embedding and head (default: for capo only)")
    add("--init-std", type=float, help="standard deviation of the blocks' initial matrices (default 0.02, which embedding and head always have)")
    add("--n-layer", type=int, help="blocks")
    add("--n-head", type=int, help="heads of attention; the linear mixers have the paper's own")
    add("--d-model", type=int, help="width")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, help="batches to train on")
    add("--batch-size", type=int, help="windows a step")
    add("--lr", type=float, help="highest learning rate, reached after --warmup steps")
    add("--warmup", type=int, help="steps on which the learning rate grows")
    add("--schedule", help="after the warm-up: cosine (to a tenth of lr) or linear (to zero)")
    add("--weight-decay", type=float, help="AdamW's, of the matrices")
    add("--seed", type=int, default=0, help="of the initial weights and the data (default 0); every model sees the same data")

    add = parser.add_argument_group("run").add_argument
    add("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    add("--dtype", help="bfloat16: autocast (default on GPUs that have it: NVIDIA's since Ampere); float32 (default elsewhere)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: yes on CUDA, and on a CPU with PyTorch 2.7 and a C++ compiler)")
    add("--workers", type=int, help="processes that generate data (default: 4 on CUDA, else 0, which is in this process)")
    add("--eval-every", type=int, metavar="STEPS", help="score, and save, every so many steps (default: 20 times a run)")
    add("--eval-size", type=int, default=512, metavar="N", help="instances an evaluation draws (default %(default)s)")
    add("--out", type=Path, help="the run's folder (default: out/ and a name made of the choices above)")
    add("--resume", action="store_true", help="go on from the folder's ckpt.pt")
    add_sweep_flags(parser)
    args = parser.parse_args(argv)
    for field in ("seeds", "jobs", "dry_run"):
        if getattr(args, field) != parser.get_default(field) and args.sweep is None:
            fail(f"--{field.replace('_', '-')} goes with --sweep")
    if args.task is None:
        fail(f"--task is missing: one of {', '.join([*PRESETS, *ALIASES])}; or --sweep")
    args.device = choose_device(args.device)
    args.preset = args.preset or ("small" if args.device == "cuda" else "nano")
    return args


def add_sweep_flags(parser):
    """The flags of section 5. All others of a sweep's command line go to every run."""
    add = parser.add_argument_group("sweep: many runs; all other flags go to each of them").add_argument
    add("--sweep", choices=SWEEPS, metavar="NAME", help=f"one of {', '.join(SWEEPS)}")
    add("--seeds", type=int, default=3, help="seeds 0 .. SEEDS-1 of each model (default %(default)s)")
    add("--jobs", type=int, help="trainings side by side (default: one for each CPU core on a CPU, else 1; all on the same GPU)")
    add("--dry-run", action="store_true", help="print the sweep's commands only")


def choose_device(wanted):
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted is None:
        return next(name for name in there if there[name])
    if not there.get(wanted):
        fail(f"device = {wanted!r}: allowed on this machine: {', '.join(name for name in there if there[name])}")
    return wanted


def choose_dtype(wanted, device):
    """The one asked for, if it is no emulation; else bfloat16 on a GPU that has it, and float32 elsewhere."""
    allowed = ("float32",) if device == "cuda" and not gpu_has_bfloat16() else ("float32", "bfloat16")
    if wanted is None:
        return allowed[-1] if device == "cuda" else "float32"
    if wanted not in allowed:
        fail(f"dtype = {wanted!r}: allowed on this machine: {', '.join(allowed)}")
    return wanted


def at_least(values, **fields):
    """Refuse what is given and lower, or no finite number."""
    for field, least in fields.items():
        if values[field] is not None and not least <= values[field] < math.inf:
            fail(f"{field} = {values[field]}: must be at least {least}")


def check_numbers(training, args):
    """What a typing slip can break and no other check sees."""
    at_least(training, steps=1, batch_size=1, warmup=0, weight_decay=0)
    at_least(vars(args), seed=0, workers=0, eval_every=1, eval_size=1)
    if not (math.isfinite(training["lr"]) and training["lr"] > 0):
        fail(f"lr = {training['lr']}: must be over 0")
    if training["schedule"] not in ("cosine", "linear"):
        fail(f"schedule = {training['schedule']!r}: allowed: cosine, linear")
    if training["batch_size"] % WORLD:
        fail(f"batch_size = {training['batch_size']}: must be a multiple of the {WORLD} processes")
    if args.seed >= 2**63:
        fail(f"seed = {args.seed}: must be below 2^63")


def given(args, *fields):
    """Those of the fields that the command line sets."""
    return {f: getattr(args, f) for f in fields if getattr(args, f) is not None}


# ------------------------------------------------------------------------------------------------------------
# 2. The run's folder
# ------------------------------------------------------------------------------------------------------------


def run_name(args, task, config):
    """Task, preset, the model's choices, whatever else the command line sets, and the seed."""
    mixer = config.mixer if config.mixer != "attention" else ""
    pos = config.pos if config.attends else ""
    parts = [task.name, args.preset, mixer, pos, config.canon or "bare"]
    default = parse_arguments(["--task", args.task])
    named = ("task", "preset", "mixer", "pos", "canon", "seed")
    technical = ("device", "compile", "workers", "eval_every", "eval_size", "out", "resume")
    for field, value in vars(args).items():
        if field not in named + technical and value != getattr(default, field):
            value = "-".join(map(str, value)) if isinstance(value, list) else value
            name = field.replace("_", "-")
            parts.append(name if value is True else f"no-{name}" if value is False else f"{name}={value}")
    return "_".join(filter(None, parts)).replace(",", "-") + f"_s{args.seed}"


def difference(old, new, path=""):
    """The first field of the nested dict `new` that is not the same in `old`, as 'field: .. there, .. now', or None."""
    for key in sorted(new.keys() | (old.keys() if path else set())):  # config.json, an `old`, has more beside the recipe
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if found := difference(a, b, f"{path}{key}."):
                return found
        elif a != b:
            return f"{path}{key}: {a!r} there, {b!r} now"
    return None


def whole_lines(path):
    """The JSON objects of a .jsonl file; a crash may have cut off the last line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_done(out):
    """How many steps the run in this folder has logged, and whether it is finished."""
    log = whole_lines(out / "metrics.jsonl")
    return (log[-1]["step"], "final" in log[-1]) if log else (0, False)


def write_atomically(path, write):
    """A file that a crash leaves whole: the old one or the new one. Of several processes, the first writes."""
    if RANK > 0:
        return
    fresh = path.with_suffix(path.suffix + ".new")
    write(fresh)
    os.replace(fresh, path)


# ------------------------------------------------------------------------------------------------------------
# 3. Data, optimiser, learning rate, and what a step costs
# ------------------------------------------------------------------------------------------------------------


class Stream(Dataset):
    """The task's batches as a data set of steps, so that PyTorch's loader brings them in order from any worker.

    Process r gets the rows r, r + WORLD, .., and its share = WORLD * own targets / all targets. DistributedDataParallel averages the
    processes' gradients as equals, though their rows may have different numbers of targets; so each loss is multiplied by the share,
    which makes the average the mean over all of the batch's targets.
    """

    def __init__(self, task, seed, batch_size):
        self.task, self.seed, self.batch_size = task, seed, batch_size

    def __getitem__(self, step):
        tokens, mask = (torch.from_numpy(a) for a in self.task.batch(self.seed, step, self.batch_size))
        own = mask[RANK::WORLD]
        return tokens[RANK::WORLD], own, own[:, 1:].sum() * WORLD / mask[:, 1:].sum()


def ignore_interrupts(worker):
    """Ctrl-C reaches the workers too; only this process decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def make_optimizer(model, training, device):
    """AdamW; weight decay on the matrices of Linear and Embedding only, so not on norms and Canon weights."""
    matrices = {m.weight for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Embedding))}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p in matrices], "weight_decay": training["weight_decay"]},
        {"params": [p for p in trained if p not in matrices], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=training["betas"], eps=training["eps"], fused=device != "mps")


def learning_rate(step, training):
    """Linear warm-up, then cosine to a tenth or linear to zero."""
    steps, warmup = training["steps"], training["warmup"]
    if step < warmup:
        return training["lr"] * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if training["schedule"] == "linear":
        return training["lr"] * (1 - done)
    return training["lr"] * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def flops_per_token(model):
    """The floating-point operations that training on one token needs: 6 for each weight of a matrix (a multiplication and an
    addition forward, twice that backward), and for attention 6 for each channel of q.k and of the sum of values, with the T/2
    tokens that one sees on average:

        6 (weights of Linear layers) + (attention layers) * 2 * 6 D T/2

    Left out is what is small beside that: Canon, norms, activations, and the linear mixers' recurrence.
    """
    config = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = sum(isinstance(m, Attention) for m in model.modules())
    return 6 * weights + 6 * attention * config.d_model * config.block_size


# dense bfloat16 matrix products, FLOP/s, from NVIDIA's data sheets
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "RTX 4090": 165e12}


# ------------------------------------------------------------------------------------------------------------
# 4. A run
# ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stop_requests():
    """A list that Ctrl-C, a batch system's SIGTERM, or the end of the terminal adds to: the loop then saves and ends after the
    step at hand, or, of several processes, when they next log. A second one ends the program at once."""
    requests = []

    def note(number, frame):
        requests.append(number)
        if WORLD == 1:  # torchrun passes on what a process may have got already
            signal.signal(number, before[number])

    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
    if hang_up and signal.getsignal(hang_up) is not signal.SIG_IGN:  # nohup ignores it, and so do we then
        numbers.append(hang_up)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(argv):
    """The command line made into args, task, model configuration and training settings; ends the program if it is wrong."""
    args = parse_arguments(argv)
    try:
        task = make_task(args.task, args.preset, **given(args, "N", "K", "V", "word_len", "L", "cfg", "root", "exposures", "block_size"))
        training = task.training
        training.update(given(args, "steps", "batch_size", "lr", "warmup", "schedule", "weight_decay"))
        if training["steps"] is None:  # Capo: they follow from its exposures
            training["steps"] = task.steps(max(1, training["batch_size"]))
        check_numbers(training, args)
        config = Config(
            vocab_size=task.vocab_size, block_size=task.block_size, mixer=args.mixer, mlp=args.mlp, pos=args.pos,
            canon=args.canon, canon_kernel=args.canon_kernel, canon_residual=not args.canon_no_residual,
            canon_silu=args.canon_silu, canon_frozen=args.canon_frozen, short_conv=args.short_conv,
            **{**task.model, **given(args, "n_layer", "n_head", "d_model", "tie_embeddings", "init_std")},
        )  # fmt: skip
    except ValueError as error:
        fail(error)
    if args.steps is not None and args.exposures is not None:
        fail(f"steps = {args.steps}: follows from exposures = {args.exposures}; give one of them")
    if args.n_head is not None and not config.attends:
        fail(f"n_head = {args.n_head}: mixer {config.mixer} has heads of its own; leave it out")
    args.out = args.out or Path("out") / run_name(args, task, config)
    args.dtype = choose_dtype(args.dtype, args.device)  # only now: a name has it if the command line does
    if not_a_folder := next((path for path in (args.out, *args.out.parents) if path.exists() and not path.is_dir()), None):
        fail(f"--out {args.out}: {not_a_folder} is not a folder")
    return args, task, config, training


def recipe_of(args, task, config, training):
    """What makes a run what it is, and what --resume must find again."""
    recipe = {"task": task.settings, "model": dataclasses.asdict(config), "training": training, "dtype": args.dtype,
              "seed": args.seed, "eval_size": args.eval_size}  # fmt: skip
    return json.loads(json.dumps(recipe))  # as it comes back from a file: tuples are lists


def train(argv, program):
    args, task, config, training = prepare(argv)
    device = args.device
    if WORLD > 1 and device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    compilable = device == "cuda" or (device == "cpu" and can_compile_on_cpu())
    compiled = compilable if args.compile is None else args.compile
    if compiled and device == "cpu" and not compilable:
        fail("--compile on the CPU needs PyTorch 2.7, a C++ compiler and Python's headers, not all found here: leave it out or install them")
    if compiled and args.compile is None:  # nobody asked for it: a compiler that fails may cost speed, not the run
        torch._dynamo.config.suppress_errors = True
    workers = (min(4, os.cpu_count()) if device == "cuda" else 0) if args.workers is None else args.workers
    eval_every = args.eval_every or max(1, training["steps"] // 20)

    recipe = recipe_of(args, task, config, training)
    out, checkpoint, metrics = args.out, args.out / "ckpt.pt", args.out / "metrics.jsonl"
    if args.resume:
        if not checkpoint.exists():
            fail(f"--resume: {checkpoint} does not exist")
        try:
            saved = torch.load(checkpoint, map_location=device, weights_only=True)
        except Exception:  # whatever torch finds wrong with it
            fail(f"--resume: {checkpoint} cannot be read")
        if differs := difference(saved["recipe"], recipe):
            fail(f"--resume: {checkpoint} is of another configuration: {differs}")
        if steps_done(out)[1]:
            tell(f"{out} is finished: nothing left to do")
            return
    elif out.exists() and any(out.iterdir()):
        resume = "--resume goes on with it, or " if checkpoint.exists() else ""
        fail(f"{out} is not empty: {resume}choose another --out, or remove it")

    if WORLD > 1:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(hours=2))  # the first alone evaluates
        torch.distributed.barrier()  # all have looked at the folder before the first writes into it
        if RANK > 0:
            sys.stdout = open(os.devnull, "w")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)  # sharp attention has weights below 1e-38, with which CPUs are slow
    model = CanonGPT(config).to(device)
    optimizer = make_optimizer(model, training, device)
    start, seconds, last_eval = 0, 0.0, {}
    out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, seconds, last_eval = saved["step"], saved["seconds"], saved["eval"]
        log = [line for line in whole_lines(metrics) if line["step"] <= start]
        write_atomically(metrics, lambda path: path.write_text("".join(json.dumps(line) + "\n" for line in log)))
    else:
        about = {
            "run": out.name, **recipe, "preset": args.preset, "parameters": model.parameter_counts(),
            "command": " ".join(["python", Path(program).name, *argv]), "date": time.strftime("%Y-%m-%d"),
            "device": device_name(device),
            "processes": WORLD, "compiled": compiled, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        }  # fmt: skip
        write_atomically(out / "config.json", lambda path: path.write_text(json.dumps(about, indent=1) + "\n"))

    counts = model.parameter_counts()
    pos = f", {config.pos}" if config.attends else ""
    print(f"{task.name} ({args.preset}), {config.mixer}{pos}, canon {config.canon or 'none'}: {config.n_layer} layers, "
          f"{config.d_model} dims, {counts['total']:,} parameters (embeddings {counts['embeddings']:,}, Canon {counts['canon']:,})")  # fmt: skip
    print(f"{training['steps']:,} steps of {training['batch_size']} x {task.block_size} tokens on {device} in {args.dtype}"
          f"{', compiled' if compiled else ''}; results in {out}")

    def save(step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "recipe": recipe,
                 "seconds": seconds + time.perf_counter() - began, "eval": last_eval}  # fmt: skip
        write_atomically(checkpoint, lambda path: torch.save(state, path))

    steps = range(start, training["steps"])
    loader = DataLoader(Stream(task, args.seed, training["batch_size"]), batch_size=None, sampler=steps,
                        num_workers=workers, pin_memory=device == "cuda", worker_init_fn=ignore_interrupts)  # fmt: skip
    autocast = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")
    forward = model
    if WORLD > 1:
        forward = DistributedDataParallel(model)
        forward.broadcast_buffers = False  # the tables of positions: the same everywhere
    forward = torch.compile(forward) if compiled else forward
    bar = tqdm(total=training["steps"], initial=start, unit="step", dynamic_ncols=True, mininterval=1, disable=RANK > 0)
    began = last_time = time.perf_counter()
    last_step, finished, waited, windows, batch_tokens = start, start, 0.0, [], training["batch_size"] * task.block_size
    if not args.resume:
        save(0)  # so that --resume can always go on
    with open(metrics if RANK == 0 else os.devnull, "a", buffering=1) as log, bar, stop_requests() as stop:
        batches = iter(loader)
        for step in steps:
            asked = time.perf_counter()
            tokens, mask, share = next(batches)
            waited += time.perf_counter() - asked
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, training)
            tokens, mask, share = (a.to(device, non_blocking=True) for a in (tokens, mask, share))
            with autocast:
                loss = forward(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1] * share
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            finished = step + 1

            bar.update()
            evaluate = finished % eval_every == 0 or finished == training["steps"]
            if not (evaluate or finished % LOG_EVERY == 0 or (stop and WORLD == 1)):
                continue
            loss, stopping = loss.detach(), bool(stop)
            if WORLD > 1:  # all stop after the same step
                means = torch.stack([loss, torch.full_like(loss, stopping)])
                torch.distributed.all_reduce(means)
                loss, stopping = means[0] / WORLD, bool(means[1])
            # reading a number waits for the GPU, so do it only now and then
            if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
                bar.close()
                tell(f"train.py: step {finished}: loss {loss.item()}, gradient norm {norm.item()}. Stopped; {checkpoint} is the last good one. "
                     "A smaller --lr or a longer --warmup may help.")  # fmt: skip
                raise SystemExit(1)
            took = time.perf_counter() - last_time
            windows.append((took / (finished - last_step), waited / took))
            rate = batch_tokens / windows[-1][0]
            line = {"step": finished, "tokens": finished * batch_tokens, "loss": round(loss.item(), 5),
                    "lr": optimizer.param_groups[0]["lr"], "tokens_per_s": round(rate)}  # fmt: skip
            if evaluate and RANK == 0:
                with autocast:
                    last_eval = task.evaluate(model, args.seed, args.eval_size)
                line["eval"] = last_eval
            log.write(json.dumps(line) + "\n")
            if evaluate or stopping:
                save(finished)
            scores = "  ".join(f"{name} {written(name, score)}" for name, score in last_eval.items())
            bar.set_postfix_str(f"loss {line['loss']:.3f}  {rate / 1e3:.0f}k tokens/s  {scores}", refresh=False)
            if stopping and finished < training["steps"]:
                bar.close()
                tell(f"stopped after step {finished}; the same command with --resume goes on")
                raise SystemExit(128 + (stop or [signal.SIGTERM])[0])  # as shells report a death by this signal
            last_step, last_time, waited = finished, time.perf_counter(), 0.0
        seconds += time.perf_counter() - began
        costs = {}
        if windows:  # nothing to tell if the run was cut off just before this line
            step_s, waiting = np.median(windows[1:] or windows, axis=0)  # between evaluations; the first steps compile
            rate = batch_tokens / step_s
            costs = {"step_ms": round(1e3 * step_s, 3), "tokens_per_s": round(rate), "data_share": round(waiting, 4)}
        if windows and device == "cuda":
            costs["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            peak = next((peak for gpu, peak in PEAKS.items() if re.search(rf"\b{gpu}\b", device_name(device))), None)
            if peak and args.dtype == "bfloat16":
                costs["mfu"] = round(rate * flops_per_token(model) / (WORLD * peak), 4)  # model FLOPs utilisation
        log.write(json.dumps({"step": finished, "eval": last_eval, "seconds": round(seconds, 1), **costs, "final": True}) + "\n")

    print(f"\n{'score':16}{out.name}, after {finished:,} steps, {seconds:.0f} s")
    for name, score in last_eval.items():
        print(f"{name:16}{written(name, score):>9}")
    forms = {"step_ms": "{:.2f}", "tokens_per_s": "{:,}", "data_share": "{:.1%}", "peak_memory_gb": "{:.2f}", "mfu": "{:.1%}"}
    for name, cost in costs.items():
        print(f"{name:16}{forms[name].format(cost):>9}")
    if WORLD > 1:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------
# 5. Sweeps
#
# A sweep is one of the paper's comparisons: models with names, each a command line of this program, with several seeds. They
# run as processes of their own; what is finished is skipped and what was cut off is resumed. So after Ctrl-C the same command
# goes on, and sweeps that share runs (RoPE with and without Canon on Depo) train them once; but do not run two such sweeps at the
# same time. plot.py holds the paper's claims against the models by these names.
# ------------------------------------------------------------------------------------------------------------


def sweeps(preset):
    """{sweep: {model: its command line}}, without seeds."""
    depo, abcd = "--task depo", " --canon abcd"
    # On a CPU the linear mixers are slow: at nano they, and what is compared with them, train for less time. Rates as in results/README.md.
    rates = {"attention": 7e-3, "gla": 3.5e-3, "mamba2": 3.5e-3, "gdn": 7e-3}
    short = {mixer: f" --steps 3000 --lr {rate}" if preset == "nano" else "" for mixer, rate in rates.items()}
    linear = {"GLA": "gla", "Mamba2": "mamba2", "GDN": "gdn"}
    convolutions = {"none": "--no-short-conv", "own": "--short-conv", "ACD": "--no-short-conv --canon acd", "AbCD": "--short-conv --canon acd",
                    "ABCD": "--canon abcd"}  # fmt: skip
    widths = (16, 32, 64) if preset == "nano" else (128, 256, 512)
    families = {"RoPE(1/4)": ("--pos rope4", "attention"), "NoPE": ("--pos nope", "attention"),
                **{label: (f"--mixer {mixer}", mixer) for label, mixer in linear.items()}}  # fmt: skip
    return {
        "copy": {"RoPE": "--task copy", "RoPE + ABCD": "--task copy" + abcd,
                 # the next two, from the usual initial weights, take too long at small; and 128 dims want a lower rate than 16
                 "RoPE, 2 layers": "--task copy --n-layer 2 --init-std 0.113",
                 "RoPE, 128 dims": "--task copy --d-model 128 --init-std 0.113 --lr 3e-3"},
        "depth": {"RoPE": depo, "RoPE + ABCD": depo + abcd},
        "nope": {"RoPE": depo, "RoPE + ABCD": depo + abcd, "RoPE(1/4) + ABCD": depo + " --pos rope4" + abcd, "NoPE": depo + " --pos nope",
                 "NoPE + ABCD": depo + " --pos nope" + abcd, "ALiBi": depo + " --pos alibi", "H-ALiBi": depo + " --pos halibi"},
        "ablation": {"none": depo, **{points.upper(): f"{depo} --canon {points}" for points in ("a", "b", "c", "d", "ac", "acd", "abcd")},
                     **{f"ABCD, {label}": depo + abcd + flag for label, flag in (
                         ("no residual", " --canon-no-residual"), ("SiLU", " --canon-silu"), ("frozen", " --canon-frozen"),
                         ("kernel 2", " --canon-kernel 2"), ("kernel 3", " --canon-kernel 3"))}},
        "mlp": {f"{task} {mlp}{more}": f"--task {task} --mlp {mlp}{canon}" for task in ("mano", "capo") for mlp in MLPS if mlp != "none"
                for more, canon in (("", ""), (" + ABCD", abcd))},
        "linear": {f"{label} {conv}": f"{depo} --mixer {mixer} {flags}{short[mixer]}" for label, mixer in linear.items()
                   for conv, flags in convolutions.items()},
        "families": {**{f"depo {label}": f"{depo} {flags}{abcd}{short[mixer]}" for label, (flags, mixer) in families.items()},
                     **{f"capo {label}": f"--task capo {flags}{abcd}" for label, (flags, _) in families.items()}},
        "hybrid": {"GDN": f"{depo} --mixer gdn{abcd}{short['gdn']}", "GDN/RoPE": f"{depo} --mixer gdn,attention{abcd}{short['gdn']}",
                   "NoPE": f"{depo} --pos nope{abcd}{short['attention']}"},
        "tasks": {f"{task} {label}{more}": f"--task {task} --pos {pos}{canon}" for task in PRESETS if task != "copy"
                  for label, pos in (("RoPE", "rope"), ("NoPE", "nope")) for more, canon in (("", ""), (" + ABCD", abcd))},
        # bits against parameters; the middle width is the preset's own, so the sweep of tasks trains the same
        "capacity": {f"{width} dims{more}": f"--task capo{'' if width == widths[1] else f' --d-model {width}'}{canon}" for width in widths
                     for more, canon in (("", ""), (" + ABCD", abcd))},
    }  # fmt: skip


SWEEPS = tuple(sweeps("nano"))


def sweep_runs(name, seeds, rest):
    """[(command line, what `prepare` makes of it)] of a sweep; ends the program if one of them is wrong."""
    preset = parse_arguments(["--task", "copy", *rest]).preset
    commands = [[*line.split(), "--seed", str(seed), *rest] for seed in range(seeds) for line in sweeps(preset)[name].values()]
    runs = [(command, prepare(command)) for command in commands]
    # of two models that differ only in how they start or are trained, a flag has undone what the sweep compares
    compared = {(str(task.settings), str(dataclasses.replace(config, init_std=1)), args.seed) for _, (args, task, config, _) in runs}
    if len(compared) < len(runs):
        fail(f"{' '.join(rest)}: sweep {name} varies this itself")
    return runs


def run_sweep(argv, program):
    """Train what is missing of a sweep, some runs at a time. Ends the program with status 1 if one of them fails."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_sweep_flags(parser)
    sweep, rest = parser.parse_known_args(argv)
    for flag in ("--task", "--seed", "--out", "--resume"):
        if flag in (word.split("=")[0] for word in rest):
            fail(f"{flag}: each run of a sweep has its own")
    at_least(vars(sweep), seeds=1, jobs=1)
    if WORLD > 1:
        fail("--sweep starts its processes itself: python, not torchrun")
    runs = sweep_runs(sweep.sweep, sweep.seeds, rest)
    if sweep.dry_run:
        print("\n".join(f"python {Path(program).name} {shlex.join(command)}" for command, _ in runs))
        return
    first = runs[0][1][0]
    jobs = sweep.jobs or (os.cpu_count() if first.device == "cpu" else 1)
    environment = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // jobs)), **os.environ} if first.device == "cpu" else None
    waiting, going, failed, told, steps = [], [], 0, False, {}
    for command, prepared in runs:
        out = prepared[0].out
        if (out / "config.json").exists() and (differs := difference(json.loads((out / "config.json").read_text()), recipe_of(*prepared))):
            fail(f"{out} is of another configuration: {differs}. Remove it first")
        steps[out], finished = steps_done(out)
        if not finished:
            waiting.append((command, out))
    bar = tqdm(total=sum(prepared[3]["steps"] for _, prepared in runs), initial=sum(steps.values()), unit="step", dynamic_ncols=True, smoothing=0)
    with bar, stop_requests() as stop:
        try:
            while going or (waiting and not stop):
                while waiting and len(going) < jobs and not stop:
                    command, out = waiting.pop(0)
                    resume = ["--resume"] * (out / "ckpt.pt").exists()
                    errors = tempfile.TemporaryFile("w+")
                    process = subprocess.Popen([sys.executable, program, *command, *resume], stdout=subprocess.DEVNULL, stderr=errors,
                                               env=environment, start_new_session=True)  # Ctrl-C goes through us  # fmt: skip
                    going.append((process, out, errors))
                time.sleep(1)
                if stop and not told:
                    told = True
                    for process, *_ in going:
                        process.send_signal(stop[0])  # it saves, and ends
                still_going = []
                for process, out, errors in going:
                    code = process.poll()
                    if code is None:
                        still_going.append((process, out, errors))
                    elif code != 0 and not stop:
                        failed += 1
                        errors.seek(0)
                        last = errors.read().rstrip().splitlines()[-1:]
                        bar.write(f"train.py: {out.name} failed with status {code}: {''.join(last)}", file=sys.stderr)
                    steps[out] = max(steps[out], steps_done(out)[0])
                going = still_going
                bar.n = sum(steps.values())
                bar.set_postfix_str(f"{len(runs) - len(waiting) - len(going)} of {len(runs)} runs are over", refresh=False)
                bar.refresh()
        finally:
            for process, *_ in going:
                process.kill()
    if stop:
        tell("stopped; the same command goes on")
        raise SystemExit(128 + stop[0])
    if failed:
        raise SystemExit(1)
    print(f"python plot.py --sweep {sweep.sweep} --preset {first.preset} draws it (python plot.py out/* with flags of your own)")


def main(argv=None, program=__file__):
    """program: the script that the command line is for, if one of your own adds to this one."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word.split("=")[0] == "--sweep" for word in argv):
        run_sweep(argv, program)
    else:
        train(argv, program)


if __name__ == "__main__":
    main()
