"""The tests:   python -m pytest

By file, from the inside out. Fast code is compared with slow code that is obviously right, written
here from the definitions; properties are tried on random shapes.
"""

# ruff: noqa: E402, E731

import contextlib
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import chain, combinations, permutations, product, takewhile
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from torch.testing import assert_close

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "results"), str(HERE / "assignment")]

parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def drawn_as(outcomes, chances):
    """Whether outcomes look drawn with these chances, {outcome: chance}, or uniformly from these:
    Pearson's test, five standard deviations wide."""
    found, free = Counter(outcomes), len(chances) - 1
    if not isinstance(chances, dict):
        chances = dict.fromkeys(chances, 1 / len(chances))
    expected = {each: chance * sum(found.values()) for each, chance in chances.items()}
    assert min(expected.values()) >= 5 and sum(chances.values()) == pytest.approx(1)
    statistic = sum((found[each] - mean) ** 2 / mean for each, mean in expected.items())
    return set(found) <= set(chances) and statistic <= free + 5 * (2 * free) ** 0.5


# ---- 4. runs.py, train.py, sample.py ---------------------------------------

import runs
import sample
import tasks
import train
from canon_gpt import MIXERS, CanonGPT, Config
from tasks import make_task

TINY = """--task copy --preset nano --N 8 --block-size 20 --device cpu --batch-size 8
    --eval-size 16 --warmup 5 --workers 0 --no-compile""".split()


def tiny(flags, out="run"):
    return [*TINY, *flags.split(), "--out", out]


def logged(out):
    """The lines of a log. They are JSON, which has no NaN."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def checkpoint(out):
    return torch.load(Path(out, "ckpt.pt"), weights_only=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ends(here, capsys):
    """Checks that a program ends with one such line, and before training leaves all files alone."""

    def contents():
        return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}

    def check(command, *words, main=train.main, status=2, training=False):
        before = contents()
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(command)
        output = capsys.readouterr()
        line = output.err.splitlines(keepends=True)[-1]
        assert re.fullmatch(r"\w+\.py: .+\n", line) and stopped.value.code == status
        if not training:
            assert output.err == line and not output.out and contents() == before
        for word in words:
            assert word in line
        return line

    return check


@contextlib.contextmanager
def interruption(step, error=None):
    """SIGTERM arrives, or an error, while the batch of this step is made."""
    make = train.Batches.__getitem__

    def watched(batches, number):
        if number == step:
            if error:
                raise error
            signal.raise_signal(signal.SIGTERM)
        return make(batches, number)

    with patch.object(train.Batches, "__getitem__", watched):
        yield


def test_command_line_end_to_end(here):
    """With so low a rate that the weights stay as they were."""
    words = [*TINY, *"--canon DcbA --steps 50 --eval-every 30 --seed 5 --lr 1e-12".split()]
    command = [sys.executable, HERE / "train.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = Path("out").iterdir()
    config, log, saved = json.loads((run / "config.json").read_text()), logged(run), checkpoint(run)
    about = "dtype seed eval_size preset date device processes compiled python torch numpy"
    assert set(about.split()) <= set(config) and config["model"]["canon"] == "abcd"
    assert config["scores"] == {"sequences": "share", "tokens": "share"}
    assert shlex.split(config["command"]) == ["python", "train.py", *words]
    group = saved["optimizer"]["param_groups"][0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-6, 0.03)
    assert [line["step"] for line in log] == [20, 30, 40, 50, 50]
    assert [line["step"] for line in log if "eval" in line] == [30, 50, 50]
    training = train.Training(**config["training"])
    for line in log[:-1]:
        assert line["lr"] == train.learning_rate(line["step"] - 1, 1e-12, training)
        assert line["tokens"] == line["step"] * 8 * 20
    last = log[-1]
    assert last["final"] is True and 0 < last["data_share"] < 1
    assert last["tokens_per_s"] == pytest.approx(8 * 20 * 1e3 / last["step_ms"], rel=0.01)
    printed = {*last, *last["eval"], f"{config['parameters']['total']:,}"}
    assert printed - {"step", "eval", "final"} <= set(done.stdout.split())
    for words in ("copy: N 8", "1 layer of attention", "Canon-ABCD", "50 steps of 8", "✗"):
        assert words in done.stdout

    torch.manual_seed(5)
    task, model = make_task(**config["task"]), CanonGPT(Config(**config["model"]))
    for name, weight in model.named_parameters():
        assert torch.allclose(saved["model"][name], weight)
    tokens, mask = map(torch.from_numpy, task.batch(5, 19, 8))
    loss = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()
    assert log[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert last["eval"] == task.evaluate(model, 5, 16)


def test_help_says_what_presets_set(capsys):
    with pytest.raises(SystemExit, match="0"):
        train.main(["--help"])
    text = capsys.readouterr().out
    for words in ("nano sets:", "paper sets:", "depo0: N 10, K 4", "24,000 steps of 16 windows"):
        assert words in text


def test_a_config_repeats_its_run(here):
    train.main(tiny("--steps 25 --canon ac --seed 3", "first"))
    again = "--config first/config.json --out second --device cpu --no-compile".split()
    train.main(again)
    first, second = checkpoint("first"), checkpoint("second")
    assert first["recipe"] == second["recipe"]
    for name, weight in first["model"].items():
        assert torch.equal(weight, second["model"][name])
    _, recipe = train.read_command_line(["--config", "first/config.json", "--lr", "0.5"])
    assert recipe.training.lr == 0.5 and recipe.model["canon"] == "ac" and recipe.seed == 3


@parametrize("name", tasks.TASKS)
@parametrize("preset", train.PRESETS)
def test_every_preset_is_a_recipe(name, preset):
    recipe = train.make_recipe(train.preset_parts(preset, name), preset, "float32")
    assert recipe.training.steps > recipe.training.warmup
    assert make_task(**recipe.task).settings == recipe.task
    assert train.run_name(recipe, "float32") == f"{name}_{preset}_rope_bare_s0"


@parametrize("mixer, layers", [("attention", 2), ("gla", 0), ("gdn,attention", 1)])
def test_operations_are_counted_as_pytorch_counts_them(mixer, layers):
    from torch.utils.flop_counter import FlopCounterMode

    B, T, D = 2, 32, 64
    model = CanonGPT(Config(50, T, n_layer=2, n_head=2, d_model=D, mixer=mixer, canon="abcd"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(B, T, dtype=torch.int64))
    products, aten = counter.get_flop_counts()["Global"], torch.ops.aten
    linear = products[aten.mm] + products.get(aten.addmm, 0)
    attention = layers * 2 * (2 * B * T * T * D) // 2  # half of all pairs: the past
    assert train.flops_per_token(model) * B * T == 3 * (linear + attention)


@parametrize("error", (None, KeyError("power failure")))
def test_resume_goes_on_as_if_never_stopped(error, ends):
    """After a signal in step 48, or a crash there: same weights, same lines in the log."""

    def steady(out):
        return [[line.get(x) for x in ("step", "tokens", "loss", "eval")] for line in logged(out)]

    flags = "--steps 60 --eval-every 20"
    train.main(tiny(flags, "whole"))
    with interruption(47, error), pytest.raises(type(error) if error else SystemExit):
        train.main(tiny(flags))
    saved, last = checkpoint("run"), logged("run")[-1]
    assert saved["step"] == (40 if error else 48)
    assert last["step"] == 40 if error else last == {"step": 48, "stopped": "SIGTERM"}
    torch.save({**saved, "seconds": 1000.0}, "run/ckpt.pt")
    Path("run/metrics.jsonl").write_text('{"step": 41, "lo')
    train.main(tiny(flags + " --resume"))
    assert steady("run") == steady("whole") and logged("run")[-1]["seconds"] >= 1000
    a, b = checkpoint("run")["model"], checkpoint("whole")["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)
    Path("run/metrics.jsonl").write_text("x")
    ends(tiny(flags + " --resume"), "nothing left to do", status=0, training=True)
    assert steady("run") == steady("whole")


def test_workers_and_compile_change_nothing(here, monkeypatch):
    compiled, real = [], partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or real(model))
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: True)
    train.main(tiny("--steps 20 --canon abcd", "plain"))
    fancy = tiny("--steps 20 --canon abcd --workers 2", "fancy")
    fancy.remove("--no-compile")  # on a CPU compiling is the default, where it can work
    train.main(fancy)
    a, b = ([line["loss"] for line in logged(out)[:-1]] for out in ("plain", "fancy"))
    assert len(compiled) == 1 and a == pytest.approx(b, abs=1e-3)


@parametrize(
    "world, names, kills",
    [(1, ("INT", "INT"), True), (2, ("INT", "INT"), False), (1, ("TERM", "TERM", "INT"), False)],
)
def test_only_a_second_ctrl_c_kills(world, names, kills, monkeypatch, capfd):
    monkeypatch.setattr(train, "WORLD", world)
    numbers = [getattr(signal, f"SIG{name}") for name in names]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) if kills else nullcontext():
            with train.StopSignals() as stop:
                for number in numbers:
                    signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.requested == numbers[0]
    assert capfd.readouterr().err.count("train.py: stopping after this step") == 1


posix = pytest.mark.skipif(os.name == "nt", reason="no POSIX signals")
ENDLESS = "--steps 1000000 --eval-every 500000"


def start(*command, runs=1):
    """A process, when so many of its trainings have logged a line."""
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, *command], start_new_session=True, **pipes)
    while sum(path.stat().st_size > 0 for path in Path().rglob("metrics.jsonl")) < runs:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process


@posix
def test_sigterm_to_all_processes_saves_and_no_second_run_gets_in(ends, monkeypatch):
    """Batch systems signal the loader's workers, too. Until then the folder is locked."""
    monkeypatch.setattr(train, "train_step", pytest.fail)
    process = start(HERE / "train.py", *tiny(ENDLESS + " --workers 2"))
    ends(tiny(ENDLESS + " --resume"), "run is in use", training=True)
    os.killpg(process.pid, signal.SIGTERM)
    assert "--resume goes on" in process.communicate(timeout=120)[1].splitlines()[-1]
    assert process.returncode == 128 + signal.SIGTERM
    assert logged("run")[-1]["step"] == checkpoint("run")["step"] >= 20


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


@posix
def test_a_killed_run_leaves_no_lock_and_a_killed_worker_ends_its_run(here):
    process = start(HERE / "train.py", *tiny(ENDLESS + " --workers 2"))
    process.kill()
    process.communicate(timeout=120)
    process = start(HERE / "train.py", *tiny(ENDLESS + " --workers 2 --resume"))
    while len(children(process.pid)) < 2:  # PyTorch is still loading
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 1


BROKEN_TASK = """
import sys
import train
from tasks import TASKS, Copy

class Broken(Copy):
    def batch(self, seed, step, batch_size):
        if step == 30 and "worker" in sys.argv:
            raise KeyError("a bug in the generator")
        return super().batch(seed, step, batch_size)

    def evaluate(self, model, seed, n):
        raise KeyError("a bug in the scores")

TASKS["broken"] = Broken
if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "worker"]
    train.main(words, program=__file__)
"""


@posix
@parametrize("where, words", [("worker", "a bug in the generator"), ("", "a bug in the scores")])
def test_bugs_of_ones_own_end_a_run_with_workers(where, words, here):
    """With a traceback, and without waiting for workers that ignore SIGTERM."""
    Path("broken.py").write_text(BROKEN_TASK)
    flags = tiny("--steps 60 --eval-every 40 --workers 2")
    flags[flags.index("copy")] = "broken"
    command = [sys.executable, "broken.py", *flags, *where.split()]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1 and "Traceback" in done.stderr and words in done.stderr


@parametrize("what", ("loss", "weights", "logits", "tokens"))
def test_what_is_not_finite_is_named_stops_and_is_not_saved(what, ends, monkeypatch):
    steps, real = iter(range(1, 100)), train.train_step
    last = 50 if what == "weights" else 60

    def spoilt(model, *rest):
        loss, norm = real(model, *rest)
        if next(steps) < last:
            return loss, norm
        if what == "weights":
            model.norm.weight.data[3] = math.inf
        if what == "logits":
            model.register_forward_hook(lambda *_: (torch.tensor(math.nan), None))
        if what == "tokens":
            monkeypatch.setattr(tasks.Copy, "evaluate", lambda *_: {"tokens": math.nan})
        return loss * (math.nan if what == "loss" else 1), norm

    monkeypatch.setattr(train, "train_step", spoilt)
    with interruption(last - 1):  # at 50 it would save, but not score
        flags = tiny("--steps 60 --eval-every 20")
        ends(flags, f"step {last}: {what} ", "smaller --lr", status=1, training=True)
    assert checkpoint("run")["step"] == logged("run")[-1]["step"] == 40


class Exchange(torch.nn.Module):
    """Counts how often DistributedDataParallel would not exchange gradients."""

    def __init__(self, model):
        super().__init__()
        self.model, self.silent = model, 0

    def forward(self, *batch):
        return self.model(*batch)

    @contextlib.contextmanager
    def no_sync(self):
        self.silent += 1
        yield


@parametrize("world", (1, 2))
@parametrize("share", (1e-3, 1e3))
def test_a_step_clips_gradients_and_exchanges_them_once(share, world, monkeypatch):
    monkeypatch.setattr(train, "WORLD", world)
    config = Config(vocab_size=19, block_size=24, n_layer=1, n_head=2, d_model=16)
    model, kept = Exchange(CanonGPT(config)), []

    def step():
        squares = [p.grad.square().sum() for p in model.parameters()]
        kept.append(torch.stack(squares).sum().sqrt().item())

    settings = train.Training(steps=9, batch_size=6, lr=0.1)
    optimizer = train.make_optimizer(model, settings, "cpu")
    monkeypatch.setattr(optimizer, "step", step)
    tokens, mask = torch.randint(0, 19, (2, 25)), torch.ones(2, 25, dtype=torch.bool)
    parts = [(tokens, mask, share)] * 3
    _, norm = train.train_step(model, optimizer, parts, nullcontext())
    assert (norm > 1) == (share > 1)
    assert kept == [pytest.approx(min(1, norm.item()), rel=1e-3)]
    assert model.silent == (2 if world == 2 else 0)


def test_learning_rate_schedule():
    cosine = train.Training(steps=110, warmup=10, lr=2.0, batch_size=1)
    rates = [train.learning_rate(step, 2.0, cosine) for step in (0, 4, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.2, 1, 2, 2, 1.1, 0.2])
    linear = train.Training(steps=110, warmup=0, lr=2.0, batch_size=1, schedule="linear")
    assert [train.learning_rate(step, 2.0, linear) for step in (0, 55, 110)] == [2, 1, 0]


def test_a_group_keeps_its_own_learning_rate(here, monkeypatch):
    """Through the schedule, and through --resume."""
    make = train.make_optimizer

    def two_rates(*arguments):
        optimizer = make(*arguments)
        optimizer.param_groups[1]["lr"] = 7.0
        return optimizer

    seen, real = [], train.train_step

    def watched(model, optimizer, *rest):
        seen.append([group["lr"] for group in optimizer.param_groups])
        return real(model, optimizer, *rest)

    monkeypatch.setattr(train, "make_optimizer", two_rates)
    monkeypatch.setattr(train, "train_step", watched)
    with interruption(9), pytest.raises(SystemExit):
        train.main(tiny("--steps 20 --lr 0.01"))
    train.main(tiny("--steps 20 --lr 0.01 --resume"))
    assert len(seen) == 20
    for first, second in seen:
        assert second / first == pytest.approx(700)


@parametrize("name", ("depo", "mano"))
def test_parts_of_a_batch_add_up_to_its_loss(name, monkeypatch):
    task = make_task(name)
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=2, d_model=16)
    model = CanonGPT(config).double()

    def loss(tokens, mask):
        return model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()

    batch = task.batch(5, 7, 12)
    for world, parts in product((1, 2, 3), (1, 2)):
        monkeypatch.setattr(train, "WORLD", world)
        mean, rows = 0, []  # of the processes
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            for tokens, mask, share in zip(*train.Batches(task, 5, 12, parts)[7]):
                mean += loss(tokens, mask) * share.item() / world
                rows += tokens.tolist()
        assert sorted(rows) == sorted(batch[0].tolist())
        assert mean == pytest.approx(loss(*map(torch.from_numpy, batch)), rel=1e-6)
    with pytest.raises(SystemExit):  # not a multiple of the processes
        train.read_command_line([*TINY, "--batch-size", "5"])


@posix
def test_two_processes_train_as_one_does(here):
    """In three parts each. A signal stops both at the same step; then one goes on."""
    flags = "--task depo --preset nano --canon ac --device cpu --no-compile --batch-size 6"
    flags = f"{flags} --eval-size 16 {ENDLESS} --out".split()
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    process = start(*torchrun, HERE / "train.py", *flags, "run", "--grad-accum", "3")
    process.terminate()
    assert process.communicate(timeout=120)[1].count("--resume goes on") == 1
    steps = checkpoint("run")["step"]
    assert json.loads(Path("run/config.json").read_text())["processes"] == 2
    for words in (["run", "--resume"], ["one"]):
        with interruption(steps + 19), pytest.raises(SystemExit):
            train.main([*flags, *words])
    losses = []
    for out in ("run", "one"):
        losses.append({line["step"]: line["loss"] for line in logged(out) if "loss" in line})
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert list(losses[0]) == list(range(20, steps + 21, 20))


BAD_FLAGS = [  # the flags, and what the line names
    ("--task sort", "task = 'sort'"),
    ("--preset huge", "preset = 'huge'"),
    ("--preset=", "preset = ''"),
    ("--mixer conv", "mixer = 'conv'"),
    ("--steps 0", "steps = 0"),
    ("--steps many", "--steps"),
    ("--lr 0", "lr = 0.0"),
    ("--lr nan", "lr = nan"),
    ("--batch-size 0", "batch_size = 0"),
    ("--batch-size 10000000", "batch_size = 10000000"),
    ("--warmup -1", "warmup = -1"),
    ("--weight-decay -0.1", "weight_decay = -0.1"),
    ("--seed -1", "seed = -1"),
    ("--seed 4294967296", "seed = 4294967296"),
    ("--workers -1", "workers = -1"),
    ("--workers 1000", "workers = 1000"),
    ("--eval-every 0", "eval_every = 0"),
    ("--eval-size 0", "eval_size = 0"),
    ("--eval-size 10000000", "eval_size = 10000000"),
    ("--grad-accum 0", "grad_accum = 0"),
    ("--grad-accum 3", "a multiple of 3"),
    ("--schedule step", "schedule = 'step'"),
    ("--device abacus", "device = 'abacus'"),
    ("--cannon abcd", "--cannon"),
    ("--dtype float16", "dtype = 'float16'"),
    ("--mixer gla --pos alibi", "pos = 'alibi'"),
    ("--mixer gla --n-head 4", "n_head = 4"),
    ("--n-head 3", "d_model = 16"),
    ("--block-size 9", "block_size = 9"),
    ("--K 5", "K = 5"),
    ("--out=", "out = ''"),
    ("--compile", "C++ compiler"),
    ("--resume", "run has no ckpt.pt"),
    ("--out mine", "mine is not empty"),
    ("--config mine/notes.txt", "config = mine/notes.txt"),
]


@parametrize("flags, words", BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_written(flags, words, ends, monkeypatch):
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: False)
    monkeypatch.setattr(train, "train_step", pytest.fail)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    usual = [] if "--config" in flags else tiny("--steps 5")  # Copy's sizes
    if "--task" in flags:
        usual = ["--preset", "nano"]
    ends([*usual, *flags.split()], words)


def test_capo_takes_steps_or_exposures(ends):
    ends("--task capo --preset nano --exposures 3 --steps 5".split(), "steps = 5")
    _, recipe = train.read_command_line("--task capo --preset nano --exposures 3".split())
    task = make_task("capo", exposures=3)
    assert recipe.training.steps == task.steps(recipe.training.batch_size)


@parametrize("native", (True, False))
def test_the_gpu_decides_about_bfloat16(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "gpu_has_bfloat16", lambda: native)
    options, recipe = train.read_command_line(["--task", "copy"])
    assert (options.device, recipe.preset, options.compile) == ("cuda", "small", True)
    assert recipe.dtype == ("bfloat16" if native else "float32")
    with nullcontext() if native else pytest.raises(SystemExit, match="2"):
        train.read_command_line("--task copy --dtype bfloat16".split())


@parametrize("dtype", ("float32", "bfloat16"))
def test_training_and_scoring_use_the_chosen_dtype(dtype, here, monkeypatch):
    seen, attend = set(), F.scaled_dot_product_attention

    def spy(q, *rest, **options):
        seen.add((torch.is_grad_enabled(), q.dtype))
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    train.main(tiny(f"--steps 2 --dtype {dtype}"))
    assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}
    assert {w.dtype for w in checkpoint("run")["model"].values()} == {torch.float32}


def test_a_folder_with_another_run_is_refused(ends):
    train.main(tiny("--steps 5"))
    ends(tiny("--steps 5"), "run is not empty: --resume goes on")
    flags = "--steps 6 --canon a --seed 4 --dtype bfloat16 --resume"
    words = ("canon = '', not 'a'", "steps = 5, not 6", "seed = 0, not 4")
    ends(tiny(flags), *words, "dtype = 'float32', not 'bfloat16'")


def test_a_run_without_a_checkpoint_has_not_begun(here):
    Path("run").mkdir()
    Path("run/config.json").write_text("x" * 10_000)
    Path("run/ckpt.pt.new").write_text("half")
    train.main(tiny("--steps 2"), program="/x/own.py")
    config = json.loads(Path("run/config.json").read_text())
    assert config["command"].startswith("python own.py --task copy ")
    assert logged("run")[-1]["final"] and not Path("run/ckpt.pt.new").exists()
    Path("run/config.json").unlink()
    with pytest.raises(SystemExit, match="0"):  # finished
        train.main(tiny("--steps 2 --resume"))
    assert json.loads(Path("run/config.json").read_text())["task"] == config["task"]


def damaged_checkpoints(good, data):
    """{what is wrong: bytes of a file, or the contents of a checkpoint}"""
    name, first = next(iter(good["model"].items()))
    raw, wrong = first.numpy().tobytes(), {}
    wrong["cut off"] = data[:-100]
    wrong["a flipped weight"] = data.replace(raw, raw[::-1])
    wrong["another object"] = [1]
    wrong["parts missing"] = {"recipe": good["recipe"]}
    weights = good["model"]
    wrong["a shape"] = {**good, "model": {**weights, name: torch.zeros(3, 3)}}
    wrong["half precision"] = {**good, "model": {k: w.half() for k, w in weights.items()}}
    wrong["a weight is NaN"] = {**good, "model": {**weights, name: first * math.nan}}
    wrong["a weight is missing"] = {**good, "model": dict(list(weights.items())[1:])}
    wrong["no optimizer"] = {**good, "optimizer": {}}
    state, groups = good["optimizer"]["state"], good["optimizer"]["param_groups"]
    wrong["no memory"] = {**good, "optimizer": {"state": {}, "param_groups": groups}}
    halved = {**state[0], "exp_avg": state[0]["exp_avg"][:1]}
    wrong["memory's shape"] = {
        **good, "optimizer": {"state": {**state, 0: halved}, "param_groups": groups}
    }  # fmt: skip
    wrong["a step too far"] = {**good, "step": 4}
    wrong["a step before the start"] = {**good, "step": -1}
    wrong["a step that is no number"] = {**good, "step": "2"}
    wrong["seconds"] = {**good, "seconds": math.nan}
    wrong["a log that is none"] = {**good, "log": [1, 2]}
    return wrong


def test_damaged_checkpoints_are_refused(ends):
    """By --resume, and those whose weights are wrong by whoever wants to see the model."""
    with interruption(1), pytest.raises(SystemExit):
        train.main(tiny("--steps 3"))
    good, path = checkpoint("run"), Path("run/ckpt.pt")
    for what, damage in damaged_checkpoints(good, path.read_bytes()).items():
        path.write_bytes(damage) if isinstance(damage, bytes) else torch.save(damage, path)
        ends(tiny("--steps 3 --resume"), "ckpt.pt is damaged")
        if "weight" in what or what in ("cut off", "a shape"):
            with pytest.raises(runs.RunError, match="ckpt.pt is damaged"):
                runs.load_model("run")
    torch.save(good, path)
    train.main(tiny("--steps 3 --resume"))
    assert logged("run")[-1]["final"]


@parametrize(
    "error, words",
    [
        (PermissionError(13, "Permission denied", "x"), ["Permission denied: 'x'", "--resume"]),
        (MemoryError(), ["MemoryError", "--batch-size"]),
        (torch.OutOfMemoryError("CUDA out of memory. Tried .."), ["out of memory", "--grad-accum"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: .."), ["--grad-accum"]),
        (RuntimeError("a bug of one's own"), []),
    ],
)
def test_errors_of_the_system_are_one_line_and_bugs_are_not(error, words, ends):
    with interruption(3, error), nullcontext() if words else pytest.raises(RuntimeError):
        ends(tiny("--steps 9"), *words, status=1, training=True)


def test_a_full_disk_leaves_the_last_checkpoint(ends, monkeypatch):
    saves, save = iter(range(1, 100)), torch.save

    def full(what, file):
        if next(saves) == 3:
            file.write(b"x" * 99)
            raise OSError(28, "No space left on device")
        return save(what, file)

    monkeypatch.setattr(torch, "save", full)
    words = "No space left on device: 'run/ckpt.pt.new'", "--resume goes on"
    ends(tiny("--steps 40 --eval-every 10"), *words, status=1, training=True)
    monkeypatch.setattr(torch, "save", save)
    assert checkpoint("run")["step"] == 10 and not Path("run/ckpt.pt.new").exists()


def test_the_log_grows_by_a_line_at_a_time(here):
    """And a line that was written is not written again, until --resume."""
    recipe = dict.fromkeys(runs.RECIPE)
    run = runs.Run("run", recipe)
    path, sizes = Path("run/metrics.jsonl"), []
    for step in range(3):
        run.log({"step": step})
        sizes.append(path.stat().st_size)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n' and sizes == [12, 24, 36]


def test_run_names_tell_runs_apart():
    def name(flags, task="copy"):
        words = f"--task {task} --preset nano --device cpu {flags}".split()
        return train.read_command_line(words)[0].out.name

    apart = [
        "--seed 1", "--canon abcd", "--canon abcd --canon-silu", "--canon abcd --canon-no-residual",
        "--lr 0.1", "--n-layer 2", "--mlp silu", "--dtype bfloat16", "--tie-embeddings", "",
    ]  # fmt: skip
    assert len({name(flags) for flags in apart}) == len(apart)
    for same in ("", "--mlp swiglu --canon-kernel 4", "--workers 3 --grad-accum 2 --lr 0.01"):
        assert name(same) == "copy_nano_rope_bare_s0"
    flags = "--mixer gdn,attention --canon ca --word-len 5 6 --seed 3"
    assert name(flags, "depo2") == "depo2_nano_gdn-attention_rope_ac_word-len=5-6_s3"
    assert name("--mixer mamba2", "depo1") == "depo1_nano_mamba2_bare_s0"
    assert name("--exposures 10", "capo") == "capo_nano_rope_bare_exposures=10_s0"


def test_runs_are_read_while_they_train(here):
    with interruption(47), pytest.raises(SystemExit):
        train.main(tiny("--steps 60 --eval-every 20"))
    run = runs.read("run")
    assert [e["step"] for e in run["evals"]] == [20, 40] and run["seconds"] is None
    assert run["scores"]["tokens"] == "share"
    train.main(tiny("--steps 60 --eval-every 20 --resume"))
    run = runs.read("run")
    assert [e["step"] for e in run["evals"]] == [20, 40, 60] and run["seconds"] > 0


def damage_run(what):
    config, log = Path("run/config.json"), Path("run/metrics.jsonl")
    content = json.loads(config.read_text())
    if what == "config is no JSON":
        config.write_text("{")
    elif what == "config lacks a part":
        del content["training"]
        config.write_text(json.dumps(content))
    elif what == "a preset of another type":
        config.write_text(json.dumps({**content, "preset": ["nano"]}))
    elif what == "a line is no JSON":
        log.write_text('{"step": 1, "eval": {"tok\n' + log.read_text())
    else:
        log.write_text('{"step": 1, "eval": {"tokens": NaN}}\n')


DAMAGES = ("config is no JSON", "config lacks a part", "a preset of another type",
           "a line is no JSON", "NaN")  # fmt: skip


@parametrize("what", DAMAGES)
def test_damaged_runs_are_named_and_left_out(what, here):
    train.main(tiny("--steps 20", "sound"))
    train.main(tiny("--steps 20"))
    damage_run(what)
    found, problems = runs.read_all(["sound", "run", "nowhere"])
    assert [run["run"] for run in found] == ["sound"]
    assert len(problems) == 2 and "run" in problems[0] and "nowhere" in problems[1]


def test_packed_runs_are_the_same_runs(here):
    train.main(tiny("--steps 20 --eval-every 10"))
    Path("begun").mkdir()
    Path("begun/config.json").write_text("{}")  # no log yet
    found, problems = runs.read_all(["run", "begun"])
    runs.pack(found, "runs.json")
    assert runs.read_all(["runs.json"]) == (found, []) and len(found) == 1 and not problems


def test_a_score_less_run_is_no_problem(here, monkeypatch):
    monkeypatch.setattr(tasks.Copy, "evaluate", lambda *_: {})
    train.main(tiny("--steps 20"))
    assert runs.read_all(["run"]) == ([], [])


def test_a_trained_model_is_loaded_and_answers(ends, capsys):
    """Sixty steps of one layer on eight numbers: hardly right, but the answers are its own."""
    train.main(tiny("--steps 60 --canon abcd --lr 0.02"))
    task, model = runs.load_model("run")
    assert task.settings == {"name": "copy", "N": 8, "block_size": 20} and not model.training
    saved = checkpoint("run")["model"]
    assert all(torch.equal(weight, saved[name]) for name, weight in model.state_dict().items())

    capsys.readouterr()
    sample.main(["run", "--count", "4"])
    shown = capsys.readouterr().out.strip().split("\n\n")
    assert len(shown) == 4
    for text in shown:
        given, _, answer = text.partition("<query> [")
        words = given.split()[1:]
        assert sorted(words) == list("12345678")
        said, mark, expected = re.split("([✓✗])", answer.rstrip("]"))
        prompt = task.encode(f"<bos> {given.partition('<bos>')[2]} <query>")
        greedy = model.generate(torch.tensor([prompt]), 8, temperature=0)[0, 10:]
        assert task.encode(said) == greedy.tolist()
        assert (mark == "✓") == (said.split() == words)
        assert expected.split() == ([] if mark == "✓" else words)

    sample.main(["run", "--prompt", "<bos> 3 1 2", "--length", "5"])
    text = capsys.readouterr().out
    assert text.startswith("<bos> 3 1 2 [") and len(text.split()) == 9
    refused = partial(ends, main=sample.main)
    refused(["run", "--prompt", "<bos> nine"], "nine")
    refused(["run", "--prompt", "1 " * 21], "1 to 20")
    refused(["run", "--length", "5"], "--prompt")
    refused(["nowhere"], "nowhere has no config.json")


def test_unregistered_things_are_asked_for(here):
    train.main(tiny("--steps 2"))
    path = Path("run/config.json")
    path.write_text(path.read_text().replace('"attention"', '"retention"'))
    with pytest.raises(runs.RunError, match="retention.*--program"):
        runs.load_model("run")




# -- Every task is learnt a little

TINY_COPY = "copy --N 16 --block-size 33 --steps 300 --warmup 50"
COPY_6 = "copy --N 6 --block-size 13 --steps 100 --warmup 30 --d-model 32 --canon acd"
TWO_LAYERS = "--canon abcd --n-layer 2 --d-model 32 --batch-size 32 --lr 1e-2 --warmup 30"
DEPO_3 = "depo0 --N 3 --K 1 --V 2 --word-len 1 2 --block-size 40 --steps 120"
LEARNS = (  # command, score, at least, at most
    (f"{TINY_COPY} --canon abcd", "sequences", 0.5, 1),  # the paper's Fig. 5 in miniature
    (TINY_COPY, "sequences", 0, 0.05),
    (f"{COPY_6} --mixer gla", "sequences", 0.5, 1),
    (f"{COPY_6} --mixer mamba2", "sequences", 0.5, 1),
    (f"{COPY_6} --mixer gdn", "sequences", 0.5, 1),
    (f"{DEPO_3} {TWO_LAYERS}", "k=1", 0.7, 1),  # chance: 1/2
    (f"brevo1 --N 4 --block-size 32 --steps 180 {TWO_LAYERS}", "all", 0.5, 1),  # some 1/4
    (f"mano --L 1 --block-size 35 --steps 260 {TWO_LAYERS}", "l=1", 0.7, 1),  # 1/3
    (f"lano --root 10 --block-size 32 --steps 100 {TWO_LAYERS}", "sentences", 0.5, 1),
    (f"capo --N 50 --exposures 100 --block-size 34 {TWO_LAYERS}", "facts", 0.3, 1),
    (f"text --block-size 128 --steps 100 {TWO_LAYERS}", "bits per byte", 1, 4),  # 8
)


@parametrize("command, score, least, most", LEARNS)
def test_every_task_resumes_and_is_learnt_a_little(command, score, least, most, here, monkeypatch):
    monkeypatch.setattr(tasks.Mano, "modulus", 3)  # the tables of 23 take long to learn
    options = f"--preset nano --device {DEVICE} --no-compile --eval-every 1000 --eval-size 128"
    words = ["--task", *command.split(), *options.split(), "--out", "run"]
    with interruption(0), pytest.raises(SystemExit, match="143"):
        train.main(words)
    train.main([*words, "--resume"])
    assert least <= logged("run")[-1]["eval"][score] <= most
