"""A run's folder, written and read in one place.

    out/copy_nano_rope_abcd_s0/
        config.json     what it takes to repeat the run, and where it ran; written at the start
        metrics.jsonl   the log, in JSON: a line every 20 steps and at each evaluation; the last
                        line of a finished run has "final": true
        ckpt.pt         the checkpoint: weights, optimizer, step and log, to go on from

Reading order: 1 the recipe, which makes a run what it is; 2 a checkpoint, and what is checked
before it is used; 3 Run, the folder while a run trains; 4 reading runs for figures and tables;
5 `load_model`, for notebooks and sample.py, and `register`, for --program.
"""

import contextlib
import dataclasses
import json
import math
import os
import runpy
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from canon_gpt import CanonGPT, Config
from tasks import make_task, require_range

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None


class RunError(ValueError):
    """Something is wrong with a run's folder. The text is one line for the user."""


# ---- 1. A recipe -----------------------------------------------------------


@dataclass
class Training:
    """How long a run trains, on how much at a time, and by which optimizer."""

    steps: int | None  # None: the task sets them, which only Capo does
    batch_size: int  # windows per step; the model reads block_size tokens of each
    lr: float  # the peak of the learning rate
    warmup: int = 1000  # steps until the peak is reached; the nano presets set 100 to 300
    schedule: str = "cosine"  # how lr falls after warm-up: an entry of train.SCHEDULES
    optimizer: str = "adamw"  # an entry of train.OPTIMIZERS
    weight_decay: float = 0.03  # of the matrices of Linear and Embedding only
    betas: tuple = (0.9, 0.98)  # of AdamW, and so is eps
    eps: float = 1e-6
    clip: float = 1.0  # the maximum gradient norm; 0: no clipping

    def __post_init__(self):
        self.betas = tuple(self.betas)  # JSON makes it a list
        if self.steps is not None:
            require_range("steps", self.steps, 1, 10**8)
        require_range("batch_size", self.batch_size, 1, 10**5)
        require_range("lr", self.lr, 1e-12, 1e6)
        require_range("warmup", self.warmup, 0, 10**8)
        require_range("weight_decay", self.weight_decay, 0, 10**6)
        for beta in self.betas:
            require_range("betas", beta, 0, 0.999999)
        require_range("eps", self.eps, 0, 1)
        require_range("clip", self.clip, 0, 10**6)


@dataclass
class Recipe:
    """All settings that change a run's result, and the preset's name. config.json holds it;
    --config takes it back."""

    preset: str
    task: dict  # its name, and all its parameters
    model: Config
    training: Training
    dtype: str  # float32 or bfloat16
    seed: int
    eval_size: int  # instances scored in an evaluation

    def __post_init__(self):
        require_range("seed", self.seed, 0, 2**32 - 1)
        require_range("eval_size", self.eval_size, 1, 10**5)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype = {self.dtype!r}: allowed: float32, bfloat16")

    def as_dict(self):
        """The recipe without the preset's name, in JSON's types, as a file gives it back."""
        whole = json.loads(json.dumps(dataclasses.asdict(self)))
        del whole["preset"]
        return whole


# The parts of a recipe that change the result, which the preset's name does not. --resume must find
# them unchanged.
RECIPE_PARTS = [field.name for field in dataclasses.fields(Recipe) if field.name != "preset"]


# ---- 2. Reading and checking a checkpoint (`Run.save` writes it) -----------


def read_checkpoint(folder):
    """The dict in ckpt.pt. RunError if the file is missing, or not what was saved."""
    path = Path(folder, "ckpt.pt")
    if not path.exists():
        raise RunError(f"{folder} has no ckpt.pt")
    try:
        # It is a zip archive, with a checksum for each file in it. torch.load ignores these.
        with zipfile.ZipFile(path) as archive:
            damaged_file = archive.testzip()
        if damaged_file is not None:
            raise ValueError(f"the checksum of {damaged_file} is wrong")
        # weights_only: a pickle could run code. cpu: it may come from a GPU.
        saved = torch.load(path, map_location="cpu", weights_only=True)
        check_contents(saved)
    except OSError:  # a file that cannot be read need not be damaged
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise RunError(one_line(f"{path} is damaged: {error}")) from None
    return saved


def check_contents(saved):
    """Raise an error unless a checkpoint has its parts, each of its kind."""
    kinds = {"model": dict, "optimizer": dict, "recipe": dict, "step": int, "log": list}
    for name, kind in kinds.items():
        if not isinstance(saved[name], kind):
            raise ValueError(f"{name} is not a {kind.__name__}")
    for part in ("task", "model", "training"):
        if not isinstance(saved["recipe"].get(part), dict):
            raise ValueError(f"its recipe has no {part}")
    if saved["step"] < 0:
        raise ValueError(f"step = {saved['step']}")
    seconds = saved["seconds"]
    if not (isinstance(seconds, (int, float)) and 0 <= seconds < math.inf):
        raise ValueError(f"seconds = {seconds}")
    for line in saved["log"]:
        json.loads(line)  # raises an error unless it is JSON


# What parts of a weight's name were in older checkpoints, and what they are today.
OLDER_NAMES = {"mixer.canon.": "mixer.canon_b.", "mlp.canon.": "mlp.canon_d."}


def todays_name(name):
    for older, today in OLDER_NAMES.items():
        name = name.replace(older, today)
    return name


def load_weights(model, weights):
    """Set a model's weights. ValueError if a name, shape or dtype differs, or one is not finite."""
    weights = {todays_name(name): weight for name, weight in weights.items()}
    expected = model.state_dict()
    different = weights.keys() ^ expected.keys()  # those in only one of the two
    if different:
        raise ValueError(f"the model's weights have other names, such as {different.pop()}")
    for name, weight in weights.items():
        check_tensor(name, weight, expected[name])
    model.load_state_dict(weights)


def load_optimizer(optimizer, saved):
    """Set what the optimizer remembers of past gradients, from a checkpoint's dict.

    An optimizer of your own needs no more than state_dict and load_state_dict. What AdamW remembers
    is checked: ValueError if it does not fit the weights.
    """
    kind = type(optimizer).__name__
    if saved.get("optimizer_kind", kind) != kind:  # older checkpoints do not name it
        raise ValueError(f"its optimizer was {saved['optimizer_kind']}, not {kind}")
    if type(optimizer) is not torch.optim.AdamW:  # a subclass may remember something else
        optimizer.load_state_dict(saved["optimizer"])
        return
    settings = optimizer.state_dict()["param_groups"]  # from the recipe, not from the file
    try:
        state = saved["optimizer"]["state"]
        optimizer.load_state_dict({"state": state, "param_groups": settings})
    except Exception as error:  # it fails in many ways
        raise ValueError(f"the optimizer's state: {error!r}") from None
    if saved["step"] > 0 and not optimizer.state:
        raise ValueError("the optimizer's state is empty")
    for weight, memory in optimizer.state.items():  # without weights that got no gradient
        if not torch.is_tensor(memory.get("step")):
            raise ValueError("the optimizer's state lacks its step for a weight")
        for name in ("exp_avg", "exp_avg_sq"):  # means of the gradient and of its square
            check_tensor(f"the optimizer's {name}", memory.get(name), weight)


def check_tensor(name, value, like):
    if not torch.is_tensor(value):
        raise ValueError(f"{name} is not a tensor")
    if value.shape != like.shape or value.dtype != like.dtype:
        found = f"{tuple(value.shape)} {value.dtype}"
        raise ValueError(f"{name} is {found}, not {tuple(like.shape)} {like.dtype}")
    if not value.isfinite().all():
        raise ValueError(f"{name} is not finite")


# ---- 3. Run: log, save and restore while it trains -------------------------


class Run:
    """The folder of a run while it trains.

        run = Run(folder, about)                      creates the folder and locks it
        run.log({"step": 20, "loss": 1.5})            appends a line to metrics.jsonl
        run.save(stateful, step, seconds)             writes ckpt.pt

        run = Run(folder, about, resume=True)
        step, seconds = run.restore(stateful)

    stateful  {"model": model, "optimizer": optimizer}, and what else has a state_dict
    about     the dict that config.json will hold, with RECIPE_PARTS among its keys
    writes    False in all but the first process of torchrun: these only restore
    Raises RunError if the folder holds something else, or another process trains in it.
    """

    def __init__(self, folder, about, resume=False, writes=True):
        self.folder, self.writes = Path(folder), writes
        self.about = about
        self.recipe = {part: about[part] for part in RECIPE_PARTS}
        self.lines = []  # the log: a dict for each line
        self.log_file = None
        self.was_read_back = False  # whether a saved checkpoint was read again, see `read_back`
        if resume and not (self.folder / "ckpt.pt").exists():
            raise RunError(f"--resume: {folder} has no ckpt.pt")
        if not writes:
            return
        if not resume:
            self.require_unused()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_file = self.open_and_lock()
        if not resume:
            self.write_config()

    def log(self, line):
        """Append a line, a dict, to metrics.jsonl."""
        self.lines.append(line)
        if self.writes:
            self.append(json.dumps(line) + "\n")

    def save(self, stateful, step, seconds):
        """Write ckpt.pt, with the log so far: a resumed run goes on from both. What `state_dict`
        returns must be a dict of tensors and plain Python values, as torch.load reads no others.

        A checkpoint needs no random state: a batch follows from seed and step alone (tasks.py,
        Task.batch), and so does what a layer may draw, since train.py sets the seed at each step.
        """
        if not self.writes:
            return
        checkpoint = {
            "optimizer_kind": type(stateful["optimizer"]).__name__,
            "recipe": self.recipe,
            "step": step,
            "log": [json.dumps(line) for line in self.lines],
            "seconds": seconds,
        }
        for name, part in stateful.items():
            if name in checkpoint:
                raise ValueError(f"{name!r} is a reserved name in a checkpoint")
            checkpoint[name] = part.state_dict()
        with whole_file(self.folder / "ckpt.pt") as file:
            torch.save(checkpoint, file)
        if step > 0 and not self.was_read_back:  # at step 0 there is no optimizer state to try
            self.read_back()

    def restore(self, stateful):
        """For --resume: set these objects and the log back to the checkpoint. Returns its step and
        seconds."""
        saved = read_checkpoint(self.folder)
        self.require_same_recipe(saved["recipe"])
        if self.writes and not config_is_sound(self.folder):  # deleted or damaged since
            self.write_config()
        try:
            if saved["step"] > self.recipe["training"]["steps"]:
                raise ValueError(f"its step {saved['step']} is after the run's last")
            for name, part in stateful.items():
                if name not in saved:
                    raise ValueError(f"it has no {name}")
                if isinstance(part, torch.nn.Module):  # the model, or an average of its weights
                    load_weights(part, saved[name])
                elif name == "optimizer":
                    load_optimizer(part, saved)
                else:
                    part.load_state_dict(saved[name])
        except ValueError as error:
            raise RunError(one_line(f"{self.folder}/ckpt.pt does not fit: {error}")) from None
        self.lines = [json.loads(line) for line in saved["log"]]
        if self.writes:
            self.log_file.truncate(0)  # lines after the checkpoint go: training writes them again
            self.append("".join(line + "\n" for line in saved["log"]))
        return saved["step"], saved["seconds"]

    @property
    def finished(self):
        return bool(self.lines) and "final" in self.lines[-1]

    # Helpers of the methods above:

    def append(self, text):
        """Write text at the end of metrics.jsonl."""
        with errors_that_name(self.folder / "metrics.jsonl"):
            self.log_file.write(text)
            self.log_file.flush()  # into the file now, as a kill would lose what waits in memory

    def require_same_recipe(self, saved):
        """saved: the recipe in the checkpoint; an older one may lack fields that came later."""
        complete = dict(saved)
        complete["model"] = with_defaults(Config, saved["model"])
        complete["training"] = with_defaults(Training, saved["training"])
        differences = recipe_differences(complete, self.recipe)
        if differences:
            raise RunError(f"--resume: {self.folder} was begun with {', '.join(differences)}")

    def read_back(self):
        """Read the first checkpoint after step 0: if --resume could not, the run ends now."""
        self.was_read_back = True
        try:
            read_checkpoint(self.folder)
        except RunError as error:
            raise RunError(f"--resume could not go on from here: {error}") from None

    def write_config(self):
        text = json.dumps(self.about, indent=1) + "\n"
        with whole_file(self.folder / "config.json") as file:
            file.write(text.encode())  # the file takes bytes, as torch.save needs it

    def require_unused(self):
        """RunError if the folder holds something. But a run that has not logged anything may start
        again: a bug in a layer of your own may have ended it before its first line."""
        if not self.folder.exists():
            return
        log = self.folder / "metrics.jsonl"
        has_checkpoint = (self.folder / "ckpt.pt").exists()
        has_begun = log.exists() and log.stat().st_size > 0
        # While a run resumes, its log is empty for a moment. The checkpoint knows better.
        if has_checkpoint and not has_begun:
            has_begun = read_checkpoint(self.folder)["step"] > 0
        if has_checkpoint and has_begun:
            advice = "--resume continues it, or choose another --out"
            raise RunError(f"{self.folder} is not empty: {advice}")
        # A kill while `whole_file` writes leaves a file whose name ends in ".new".
        own_files = ("config.json", "config.json.new", "metrics.jsonl", "ckpt.pt", "ckpt.pt.new")
        strangers = [path for path in self.folder.iterdir() if path.name not in own_files]
        if has_begun or strangers:
            raise RunError(f"{self.folder} is not empty: choose another --out")

    def open_and_lock(self):
        """metrics.jsonl, locked for this process as long as it lives.

        The lock ends with this process, and the loader's workers do not inherit it. It also ends if
        the process opens and closes the file once more, so a process must not `read` the run that
        it trains.
        """
        file = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error at once if it is taken
        except (BlockingIOError, PermissionError):  # which of them depends on the system
            raise RunError(f"{self.folder} is in use by another process") from None
        except OSError:  # some network file systems have no locks
            pass
        return file


def recipe_differences(old, new, name=""):
    """What is different, in words: ['lr = 0.01, not 0.02', ..].

    old, new: two recipes in JSON's types, or, where it calls itself, their values of field `name`
    """
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{name} = {old!r}, not {new!r}"]
    found = []
    for field in {**old, **new}:  # the fields of both
        found += recipe_differences(old.get(field), new.get(field), field)
    return found


def with_defaults(kind, values):
    """The dict `values`, completed by the defaults of the fields of the dataclass `kind`.

    A run that is older than a field had the field's default.
    """
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:  # it has a default
            defaults[field.name] = field.default
    return {**json.loads(json.dumps(defaults)), **values}  # as in JSON, tuples are lists


def config_is_sound(folder):
    try:
        json.loads((folder / "config.json").read_text())
        return True
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def whole_file(path):
    """An open file that takes the place of `path` once it is written, so that `path` is whole at
    any time, old or new, also if the power fails."""
    fresh = path.with_name(path.name + ".new")
    try:
        with errors_that_name(fresh), open(fresh, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # it is on the disk before it takes the old one's place
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)  # after an error; otherwise it has moved already


@contextlib.contextmanager
def errors_that_name(path):
    """Add the file's name to an OSError: writing to an open file fails without saying which."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def one_line(text):
    """The text without line breaks, cut off after 500 characters."""
    return " ".join(text.split())[:500]


# ---- 4. Reading runs -------------------------------------------------------
#
# A run, as figures and tables use it, is the dict in its config.json and
#
#     evals     [{"step": .., "eval": {score: value}}, ..], from the log
#     seconds   how long it trained; None while it trains
#
# `checked` adds what older runs lack: units, {score: unit}, and chance, the share that guessing
# gets right (None: not said).


def read(folder):
    """The run in this folder. RunError if it is damaged, FileNotFoundError if there is no
    config.json or no log."""
    folder = Path(folder)
    try:
        run = json.loads((folder / "config.json").read_text())
        run["evals"] = []
        run["seconds"] = None  # until the log has its final line
        text = (folder / "metrics.jsonl").read_text()
        whole_lines = text.split("\n")[:-1]  # the last one may still be growing
        evaluations = {}  # by step: the final line repeats the last scores
        for line in map(json.loads, whole_lines):
            if "eval" in line:
                evaluations[line["step"]] = line["eval"]
            if "final" in line:
                run["seconds"] = line["seconds"]
        for step, scores in evaluations.items():
            run["evals"].append({"step": step, "eval": scores})
        return checked(run)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise RunError(one_line(f"{folder} is not a run, or damaged: {error!r}")) from None


# What figures and tables ask of a run: {field: its kind}. (A new field of Config need not be here.)
FIELDS = {"run": str, "preset": str, "dtype": str, "seed": int, "seconds": (int, float, type(None))}
MODEL_FIELDS = {
    "n_layer": int,
    "n_head": int,
    "d_model": int,
    "mixer": str,
    "mlp": str,
    "pos": str,
    "canon": str,
    "canon_type": str,
    "canon_kernel": int,
    "canon_residual": bool,
    "canon_silu": bool,
    "canon_frozen": bool,
    "short_conv": bool,
}


def checked(run):
    """The run, with units and chance. ValueError or KeyError if something is not as it must be."""
    require_kinds(run, {**FIELDS, "task": dict, "model": dict, "training": dict})
    require_kinds(run["task"], {"name": str})
    require_kinds(run["training"], {"steps": int, "batch_size": int})
    run["model"] = with_defaults(Config, run["model"])
    run["training"] = with_defaults(Training, run["training"])
    require_kinds(run["model"], MODEL_FIELDS)
    if "units" not in run:  # older runs do not name them
        task = make_task(**run["task"])
        scored = set()  # an older run may lack scores that its task has today
        for evaluation in run["evals"]:
            scored.update(evaluation["eval"])
        run["units"] = {score: unit for score, unit in task.units.items() if score in scored}
        run["chance"] = task.chance
    require_kinds(run, {"units": dict, "chance": (int, float, type(None))})
    for evaluation in run["evals"]:
        require_kinds(evaluation, {"step": int, "eval": dict})
        for score, value in evaluation["eval"].items():
            if not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise ValueError(f"{score} = {value!r}")
    return run


def require_kinds(values, kinds):
    for field, kind in kinds.items():
        if not isinstance(values[field], kind):
            raise ValueError(f"{field} = {values[field]!r}")


# Figures and the like are no runs, but the shell's out/* names them, too.
NO_RUN_SUFFIXES = (".png", ".md", ".txt", ".jsonl")


def read_all(paths):
    """(runs, problems): the runs with scores in these folders and packed files, and one line for
    each path that is damaged. Folders whose run has not begun are left out."""
    found, problems = [], []
    for path in map(Path, paths):
        if path.suffix in NO_RUN_SUFFIXES:
            continue
        try:
            if path.is_dir():
                found.append(read(path))
            else:
                packed = json.loads(path.read_text())["runs"]
                found += [checked(run) for run in packed]
        except FileNotFoundError:
            if not path.exists():  # if it does, its run has not begun
                problems.append(f"{path} does not exist")
        except RunError as error:
            problems.append(str(error))
        except Exception as error:
            problems.append(one_line(f"{path} is not a run, or damaged: {error!r}"))
    # A run may be there twice: in its folder, and packed.
    runs = []
    for run in found:
        if any(evaluation["eval"] for evaluation in run["evals"]) and run not in runs:
            runs.append(run)
    return runs, problems


def pack(runs, path):
    """Write runs into one file, one run per line, that `read_all` reads."""
    rows = ",\n".join(json.dumps(run) for run in runs)
    Path(path).write_text(f'{{"runs": [\n{rows}\n]}}\n')


# ---- 5. Loading a trained model --------------------------------------------


def register(program):
    """Run a file of your own for the mixers, tasks and other things that it registers. What stands
    under `if __name__ == "__main__"` does not run, so it does not train."""
    program = Path(program)
    sys.path.insert(0, str(program.resolve().parent))  # it may import others that stand beside it
    runpy.run_path(str(program), run_name="program")


def load_model(folder):
    """(task, model) of a run, the model on the CPU. Its weights are "model" in the last checkpoint.

    Raises RunError with one line if there is none, it is damaged, or its task or mixer is unknown.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        parts = {part: config[part] for part in ("task", "model", "seed")}
    except FileNotFoundError:
        raise RunError(f"{folder} has no config.json") from None
    except Exception as error:
        raise RunError(one_line(f"{folder}/config.json is damaged: {error!r}")) from None
    try:
        task = make_task(**parts["task"], run_seed=parts["seed"])
        model = CanonGPT(Config(**parts["model"]))
    except Exception as error:
        own = "(Is a task or layer your own? Import its file first, or pass it as --program.)"
        raise RunError(one_line(f"{folder}/config.json: {error} {own}")) from None
    saved = read_checkpoint(folder)
    try:
        load_weights(model, saved["model"])
    except ValueError as error:
        raise RunError(one_line(f"{folder}/ckpt.pt does not fit: {error}")) from None
    return task, model.eval()
