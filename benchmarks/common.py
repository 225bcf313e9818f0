"""What the benchmarks share: the command line, a clock, and rows that are saved as they come."""

import argparse
import contextlib
import importlib.metadata
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for canon_gpt and its neighbours

PACKAGES = ("torch", "triton", "numpy", "causal-conv1d", "flash-linear-attention")


class Benchmark:
    """Prints each row and appends it to a .jsonl file at once: a run cut short keeps what it has.

    The file's first line says where the numbers come from. `device` is "cuda" or "cpu", `toy` is
    whether to run at tiny shapes.
    """

    def __init__(self, script, doc, argv, device=None):
        parser = argparse.ArgumentParser(description=doc.splitlines()[0])
        parser.add_argument("--toy", action="store_true", help="tiny shapes, to try the script")
        parser.add_argument("--out", type=Path, metavar="FILE", help="for the rows")
        options = parser.parse_args(argv)
        self.toy, self.out = options.toy, options.out
        self.header = None
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # as train.py does
        torch.set_float32_matmul_precision("high")

        machine = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        about = {"device": machine, "date": time.strftime("%Y-%m-%d"), "toy": self.toy}
        for package in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                about[package] = importlib.metadata.version(package)
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        if self.out is None and not self.toy:
            name = re.sub(r"\W+", "_", machine).lower()
            self.out = HERE / f"{Path(script).stem}_{name}.jsonl"
        if self.out:
            self.out.write_text(json.dumps(about) + "\n")

    def add(self, **row):
        if self.out:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if self.header != list(row):
            self.header = list(row)
            print("\n" + "".join(map(cell, row, row)))
        print("".join(map(cell, row, row.values())), flush=True)


@contextlib.contextmanager
def optional(name):
    """What fails inside, such as importing a package that is not installed, costs one line."""
    try:
        yield
    except Exception as error:
        print(f"{name}: left out, {error!r:.100}", flush=True)


def cell(name, value):
    """A value of the column `name`, as wide as the column; of quartiles, the median."""
    if isinstance(value, list):
        value = value[1]
    if value is None:
        value = "-"
    if isinstance(value, float):
        value = f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return f"{value:<24}" if name == "what" else f" {value:>{max(9, len(name))}}"


def times_in_turn(functions, device, rounds):
    """{name: quartiles in ms} of {name: function}.

    One call each, in turn, so that all meet the same disturbances.
    """
    times = {name: [] for name in functions}
    for number in range(-2, rounds):  # two to warm up
        for name, f in functions.items():
            times[name].append(milliseconds(f, device))
    for name, ms in times.items():
        quartiles = statistics.quantiles(ms[2:], n=4, method="inclusive")
        times[name] = [round(quartile, 4) for quartile in quartiles]
    return times


def milliseconds(f, device):
    """CPU: processor time, on one thread, which other programs change little. CUDA: GPU time, with
    cold caches; the GPU first sleeps a millisecond, in which Python launches the kernels."""
    if device == "cpu":
        begin = time.process_time()
        f()
        return (time.process_time() - begin) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    large = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # more than the caches hold
    torch.cuda._sleep(2_000_000)  # cycles
    large.max()  # reading evicts the rest; what was written would go to memory while f runs
    begin.record()
    f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
