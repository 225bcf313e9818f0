"""Train one model on one task:   python train.py --task depo --canon abcd

Reading order: 1 the command line; 2 the run folder; 3 data, optimizer, learning rate; 4 one step;
5 the run, in the order of events. It leaves in out/<run>/

    config.json     what it takes to repeat the run
    metrics.jsonl   the log: a line every 20 steps, with scores at evaluations; what the run cost
    ckpt.pt         model, optimizer and log, for --resume

On four GPUs:   torchrun --nproc_per_node=4 train.py --task depo --canon abcd
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # OpenMP's idle threads soon leave their core
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if it comes during imports

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from canon_gpt import CANONS, MIXERS, MLPS, POSITIONS, Attention, CanonGPT, Config
from kernels import gpu_has_bfloat16
from tasks import ALIASES, TASKS, make_task, score_text

STOP = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows: no HUP
RANK = int(os.environ.get("RANK", 0))  # by torchrun: which process of how many
WORLD = int(os.environ.get("WORLD_SIZE", 1))

# ---- 1. The command line ---------------------------------------------------


def end(message, status=2):
    """End the program with one line. Status 2 means bad input."""
    if RANK == 0:
        print("train.py:", *str(message)[:500].split(), file=sys.stderr)
    raise SystemExit(status)


def between(low, high, kind=int):
    """{"type": ..} for argparse: the numbers from low to high."""

    def read(text):
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text}: allowed: {low:,} to {high:,}")

    return {"type": read}


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description="Train one model on one task.", allow_abbrev=False)
    parser.error = end

    def add(options, **flags):
        for name, text in flags.items():
            group.add_argument("--" + name.replace("_", "-"), help=text, **options)

    integer, count, switch = {"type": int}, between(1, 10**7), {"action": "store_true"}
    yes_no = {"action": argparse.BooleanOptionalAction}
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    devices = ["cuda"] * has_cuda + ["mps"] * has_mps + ["cpu"]

    group = parser.add_argument_group("task")
    add({"required": True}, task=", ".join([*TASKS, *ALIASES]))
    add({}, preset="nano (two CPU cores, minutes), small (one GPU; the default there), or paper",
        cfg="lano: the grammar, such as cfg3f")
    add(integer, N="numbers to copy, nodes of a graph, people",
        K="depo: most hops of a question", V="depo, brevo2: letters to spell with",
        L="mano: most operators", root="lano: where sentences grow from",
        exposures="capo: times each person is met; sets --steps",
        block_size="context, in tokens")
    add({**integer, "nargs": 2}, word_len="depo, brevo2: least and most letters of a word")

    group = parser.add_argument_group("model (the first choice is the default)")
    add({}, mixer=f"{', '.join(MIXERS)}, or a list for the layers: gdn,gla",
        pos=", ".join(POSITIONS), canon="where Canon layers sit: any of the letters abcd")
    add({"default": Config.mlp}, mlp=", ".join(MLPS))
    add({"default": Config.canon_type}, canon_type=", ".join(CANONS))
    add({"default": Config.canon_kernel, **integer}, canon_kernel="2 to 8 tokens (default: 4)")
    add(switch, canon_no_residual="Canon without its residual", canon_silu="SiLU behind Canon",
        canon_frozen="Canon keeps its random initial weights")
    add(yes_no, short_conv="linear mixers' own (default: on with mamba2 or gdn, without Canon-B)",
        tie_embeddings="one matrix for embedding and head")
    add(integer, n_layer="blocks", n_head="attention heads", d_model="width")

    group = parser.add_argument_group("training")
    add(count, steps="batches to train on", batch_size="windows a step")
    add(between(1e-12, 1e12, float), lr="peak learning rate")
    add(between(0, 10**7), warmup="steps until the learning rate peaks")
    add({"choices": ("cosine", "linear")}, schedule="then: cosine to a tenth, linear to 0")
    add(between(0, 1e12, float), weight_decay="of matrices")
    add({"default": 0, **between(0, 2**32 - 1)}, seed="default: 0")
    add({"choices": ("float32", "bfloat16")}, dtype="default: bfloat16 on GPUs that have it")

    group = parser.add_argument_group("run")
    add({"choices": devices, "default": devices[0]}, device="default: the first choice")
    add({}, out="the run's folder (default: out/ and the choices above)")
    add(yes_no, compile="torch.compile (default: where it works)")
    add(between(0, 64), workers="processes that draw data (default: 4 on CUDA, else 0)")
    add(count, eval_every="steps between evaluations (default: a 20th of all)")
    add({"default": 512, **count}, eval_size="instances scored (default: 512)")
    add({"default": 1, **count}, grad_accum="parts of a batch: the same training in less memory")
    add(switch, resume="go on from ckpt.pt")

    args = parser.parse_args(argv)
    args.chosen = {k: v for k, v in vars(args).items() if v != parser.get_default(k)}
    return args


def prepare(argv):
    """The command line, checked: args, task, model configuration, training settings."""
    args = parse_arguments(argv)
    cuda = args.device == "cuda"
    args.preset = args.preset or ("small" if cuda else "nano")
    native = cuda and gpu_has_bfloat16()
    if args.dtype == "bfloat16" and cuda and not native:
        end("dtype = bfloat16: this GPU has only float32")
    args.dtype = args.dtype or ("bfloat16" if native else "float32")
    compiles = cuda or (args.device == "cpu" and can_compile_on_cpu())
    if args.compile and not compiles:
        end("--compile needs CUDA, or PyTorch 2.7, a C++ compiler and Python's headers")
    args.compile = compiles if args.compile is None else args.compile

    def chosen(*fields):
        return {field: args.chosen[field] for field in fields if field in args.chosen}

    try:
        own = chosen("N", "K", "V", "word_len", "L", "cfg", "root", "exposures", "block_size")
        task = make_task(args.task, args.preset, **own)
        training = task.training
        training.update(chosen(*training))
        if training["steps"] is None:  # Capo's follow from its exposures
            training["steps"] = task.steps(training["batch_size"])
        model = {**task.model, **chosen(*Config.__dataclass_fields__)}
        model.update(vocab_size=task.vocab_size, block_size=task.block_size)
        config = Config(**model, canon_residual=not args.canon_no_residual)
    except ValueError as error:
        end(error)
    if args.steps and args.exposures:
        end(f"steps = {args.steps}: exposures sets them; leave one out")
    if args.n_head and not config.has_attention:
        end(f"n_head = {args.n_head}: {config.mixer} has its own")
    if training["batch_size"] % (parts := WORLD * args.grad_accum):
        end(f"batch_size = {training['batch_size']}: must be a multiple of {parts}")
    if args.out == "":
        end("out = '': name a folder")
    args.out = Path(args.out or Path("out", run_name(args, task, config)))
    return args, task, config, training


def can_compile_on_cpu():
    """PyTorch 2.6 does not count: gcc 12 miscompiles the C++ that it writes."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    return torch.__version__ >= (2, 7) and header.exists() and bool(compiler)


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device}, {torch.get_num_threads()} threads"


# ---- 2. The run folder -----------------------------------------------------


def run_name(args, task, config):
    """Task, preset, mixer, positions, Canon points, what else was chosen, seed."""
    mixer = "" if config.mixer == "attention" else config.mixer
    pos = config.pos if config.has_attention else ""
    parts = [task.name, args.preset, mixer, pos, config.canon or "bare"]
    named = {*task.settings, *task.training, *vars(config), "canon_no_residual", "dtype"}
    for field, value in args.chosen.items():
        if field in named - {"mixer", "pos", "canon"}:
            name, value = field.replace("_", "-"), str(value).strip("[]").replace(", ", "-")
            parts.append({"True": name, "False": f"no-{name}"}.get(value, f"{name}={value}"))
    return "_".join(filter(None, parts)).replace(",", "-") + f"_s{args.seed}"


def recipe_of(args, task, config, training):
    """What makes a run what it is, and what --resume must find again."""
    recipe = {"task": task.settings, "model": vars(config), "training": training,
              "dtype": args.dtype, "seed": args.seed, "eval_size": args.eval_size}
    return json.loads(json.dumps(recipe))  # as it comes back from a file: tuples are lists


def steps_done(out):
    """How many steps a run has logged, and whether it is finished."""
    try:
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        return last["step"], "final" in last
    except Exception:  # no log yet, or a damaged one
        return 0, False


def write_atomically(path, data):
    """After a crash the file is whole, old or new. Only the first process writes."""
    if RANK > 0:
        return
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def run_folder(out, resume, about):
    """Write config.json, and hold a lock on it that keeps other processes out of the folder.

    A run without a checkpoint has not begun, so it may start again.
    """
    begun = (out / "ckpt.pt").exists()
    if resume and not begun:
        end(f"--resume: {out} has no ckpt.pt")
    if not resume and out.exists() and set(os.listdir(out)) - {"config.json", "ckpt.pt.new"}:
        end(f"{out} is not empty: {'--resume goes on with it, or ' * begun}choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "config.json", "a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it with the process
        except BlockingIOError:
            end(f"{out} is in use by another process")
        except (ImportError, OSError):  # Windows, or a file system without locks
            pass
        if not (resume and file.tell()):
            file.truncate(0)
            print(json.dumps(about, indent=1), file=file, flush=True)
        yield


def load(path, recipe, model, optimizer):
    """Set model and optimizer back to the checkpoint. Returns its step, log and seconds."""
    try:
        if wrong := zipfile.ZipFile(path).testzip():  # what torch.save writes has checksums
            raise ValueError(f"{wrong} has another checksum")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        old, new = (json.dumps(r, indent=1).splitlines() for r in (saved["recipe"], recipe))
        if old != new:
            other = " ".join(line for line in new if line not in old)
            end(f"--resume: {path} has another configuration, not {other}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"], saved["log"], saved["seconds"]
    except Exception as error:  # whatever a damaged file leads to
        end(f"--resume: {path} is damaged: {error}")


# ---- 3. Data, optimizer, learning rate -------------------------------------


@dataclasses.dataclass
class Stream:
    """The task's batches, by step, for PyTorch's loader.

    Each process computes its rows of a batch in grad_accum parts. A part's loss is the mean over
    its own targets, the batch's over all: so a part counts by its share of the targets, times
    WORLD, as the processes' gradients are averaged.
    """

    task: object
    seed: int
    batch_size: int
    grad_accum: int

    def __getitem__(self, step):
        """tokens and mask (grad_accum, rows, block_size + 1), share (grad_accum,)."""
        batch = [torch.from_numpy(a) for a in self.task.batch(self.seed, step, self.batch_size)]
        tokens, mask = (a[RANK::WORLD].unflatten(0, (self.grad_accum, -1)) for a in batch)
        return tokens, mask, mask[:, :, 1:].sum((1, 2)) * WORLD / batch[1][:, 1:].sum()


def ignore_signals(worker):
    """They reach the loader's workers, too, but only the process that trains decides."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


def make_optimizer(model, training, device):
    """AdamW. The matrices of Linear and Embedding decay; norms and convolutions do not."""
    matrices = {m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in trained if p in matrices]
    rest = [p for p in trained if p not in matrices]
    groups = [{"params": decay, "weight_decay": training["weight_decay"]}, {"params": rest}]
    return torch.optim.AdamW(groups, betas=training["betas"], eps=training["eps"],
                             weight_decay=0.0, fused=device != "mps")


def learning_rate(step, training):
    """Linear warm-up, then cosine to a tenth or linear to zero."""
    steps, warmup, lr = training["steps"], training["warmup"], training["lr"]
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if training["schedule"] == "linear":
        return lr * (1 - done)
    return lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


# ---- 4. One step -----------------------------------------------------------


def train_step(model, optimizer, parts, lr, autocast):
    """Update the weights. Returns the batch's loss, and the gradient's norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = 0.0
    for tokens, mask, share in parts:
        with autocast:
            part = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1] * share
        part.backward()
        loss = loss + part.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm


# ---- 5. The run ------------------------------------------------------------


@contextlib.contextmanager
def stop_requests():
    """A list of the signals that asked us to stop: Ctrl-C, a batch system's, a closed terminal's.

    A second Ctrl-C kills, except under torchrun, which repeats the first one.
    """
    requests = []

    def note(number, frame):
        requests.append(number)
        if number == signal.SIGINT and WORLD == 1:
            signal.signal(number, before[number])

    heeded = [n for n in STOP if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(args, task, config, training, command, stack):
    """All that happens, in this order, down to the closing table."""
    device, out, recipe = args.device, args.out, recipe_of(args, task, config, training)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)  # numbers below 1e-38 slow CPUs down
    model = CanonGPT(config).to(device)
    optimizer = make_optimizer(model, training, device)
    autocast = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")
    forward = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
    if args.compile:  # a compiler that nobody asked for may fail without ending the run
        torch._dynamo.config.suppress_errors = "compile" not in args.chosen
        forward = torch.compile(forward)

    about = {
        "run": out.name, **recipe, "preset": args.preset, "parameters": model.parameter_counts(),
        "command": command, "date": time.strftime("%Y-%m-%d"), "device": device_name(device),
        "processes": WORLD, "compiled": args.compile, "python": sys.version.split()[0],
        "torch": torch.__version__, "numpy": np.__version__,
    }
    if RANK == 0:
        stack.enter_context(run_folder(out, args.resume, about))
    done, lines, seconds, shown = 0, [], 0.0, {}

    def log(*new):
        lines.extend(json.dumps(line) + "\n" for line in new)
        write_atomically(out / "metrics.jsonl", "".join(lines).encode())

    if args.resume:
        done, lines, seconds = load(out / "ckpt.pt", recipe, model, optimizer)
        log()  # the file as it was then
        if lines and '"final"' in lines[-1]:
            end(f"{out} is finished: nothing left to do", status=0)

    if RANK == 0:
        print(f"{out}: {about['parameters']['total']:,} parameters", flush=True)

    def save():
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "recipe": recipe, "step": done, "log": lines,
                    "seconds": time.perf_counter() - began}, buffer)
        write_atomically(out / "ckpt.pt", buffer.getbuffer())

    def require_finite(*values):
        if not all(torch.as_tensor(value).isfinite().all() for value in values):
            bar.close()
            end(f"step {done}: loss {loss}, gradient norm {norm}: not all is finite. "
                "Start anew, with a smaller --lr", 1)

    steps = range(done, training["steps"])
    batch_tokens = training["batch_size"] * task.block_size
    eval_every = args.eval_every or max(1, training["steps"] // 20)
    workers = 4 * (device == "cuda") if args.workers is None else args.workers
    stream = Stream(task, args.seed, training["batch_size"], args.grad_accum)
    requests = stack.enter_context(stop_requests())
    batches = iter(DataLoader(stream, batch_size=None, sampler=steps, num_workers=workers,
                              worker_init_fn=ignore_signals, pin_memory=device == "cuda"))
    bar = tqdm(desc="compiling" * args.compile, total=steps.stop, initial=done, mininterval=1,
               disable=RANK > 0)  # fmt: skip
    stack.enter_context(bar)
    logged, waited, last_time = done, 0.0, time.perf_counter()
    began = last_time - seconds
    if not args.resume:
        save()  # now the run has begun
    for step in steps:
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        parts = zip(*(tensor.to(device, non_blocking=True) for tensor in batch))
        lr = learning_rate(step, training)
        loss, norm = train_step(forward, optimizer, parts, lr, autocast)
        done = step + 1
        bar.update()
        if step == steps.start:  # it took longer: it compiled
            bar.desc = ""
            bar.unpause()

        # Log, score, save now and then: to read a number is to wait for the GPU
        evaluate = done % eval_every == 0 or done == steps.stop
        due = evaluate or done % 20 == 0
        if not due and not (requests and WORLD == 1):
            continue
        sums = torch.stack([loss, torch.full_like(loss, bool(requests))])
        if WORLD > 1:  # so all stop after the same step
            torch.distributed.all_reduce(sums)
        loss, stopping = sums[0].item() / WORLD, bool(sums[1])
        require_finite(loss, norm, *model.parameters())
        if due:
            took = time.perf_counter() - last_time
            line = {"step": done, "tokens": done * batch_tokens, "loss": round(loss, 5), "lr": lr,
                    "tokens_per_s": round((done - logged) * batch_tokens / took),
                    "data_share": round(waited / took, 4)}
            if evaluate:
                with autocast, torch.no_grad():
                    require_finite(model(batch[0][0, :, :-1].to(device))[0])  # the new weights
                    scores = line["eval"] = task.evaluate(model, args.seed, args.eval_size)
                require_finite(*scores.values())
                shown = {name: score_text(name, score) for name, score in scores.items()}
            log(line)
            bar.set_postfix({"loss": f"{loss:.3f}", **shown}, refresh=False)
        if done == steps.stop:
            break
        if evaluate or stopping:
            save()
        if stopping:
            bar.close()
            end(f"stopped after step {done}; the same command with --resume goes on",
                128 + (requests or [signal.SIGTERM])[0])
        logged, last_time, waited = done, time.perf_counter(), 0.0
    bar.close()

    later = [json.loads(line) for line in lines[1:] or lines]  # the first may compile
    rate = np.median([line["tokens_per_s"] for line in later])
    waiting = np.median([line["data_share"] for line in later])
    costs = {"seconds": round(time.perf_counter() - began, 1), "tokens_per_s": round(rate),
             "step_ms": round(1e3 * batch_tokens / rate, 3), "data_share": round(waiting, 4)}
    if device == "cuda":
        costs["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        if gpu := re.search(rf"\b({'|'.join(PEAKS)})\b", device_name(device)):
            costs["mfu"] = round(flops_per_token(model) * rate / PEAKS[gpu[0]] / WORLD, 4)
    log({"step": done, "eval": scores, **costs, "final": True})
    save()
    if RANK == 0:
        for name, value in {**shown, **costs}.items():
            print(f"{name:16}{value:>9}")


# FLOP/s of dense bfloat16 products, from NVIDIA's data sheets
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}


def flops_per_token(model):
    """Of training: 6 for each weight of a matrix (a product and a sum, once forward, twice back),
    and in attention 12 for each channel and token that it looks at, T/2 on average."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = sum(isinstance(m, Attention) for m in model.modules())
    return 6 * weights + 12 * attention * model.config.d_model * model.config.block_size // 2


def main(argv=None, program=__file__):
    """program: the script that config.json names, if one of your own calls this."""
    argv = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", Path(program).name, *argv])
    try:
        args, *rest = prepare(argv)
        if WORLD > 1:
            if args.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.distributed.init_process_group()
        with contextlib.ExitStack() as stack:  # closes what `train` opens
            train(args, *rest, command, stack)
        if WORLD > 1:
            torch.distributed.destroy_process_group()
    except (OSError, MemoryError, RuntimeError) as error:  # the system refuses something
        memory = isinstance(error, MemoryError) or re.search("(out of|allocate) mem", str(error))
        if isinstance(error, RuntimeError) and not memory:
            raise
        hint = ". A smaller --batch-size or a larger --grad-accum needs less" if memory else ""
        end(f"{type(error).__name__}: {error}{hint}", 1)


if __name__ == "__main__":
    main()
