"""What Canon layers cost in a training step at nano scale:   python results/step_time.py

Trains two models of a task's nano preset turn by turn, one step each, without Canon layers and with Canon-ABCD, so that whatever else
the machine does slows both. Prints the median step of each in milliseconds, with the quartiles, and the ratio of the medians;
first run eagerly, then through torch.compile.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from canon_gpt import CanonGPT, Config  # noqa: E402
from kernels import has_cpp_compiler  # noqa: E402
from tasks import make_task  # noqa: E402
from train import make_optimizer  # noqa: E402


def make_step(task, canon, compiled):
    """A function that trains a fresh model by one step."""
    torch.manual_seed(0)
    model = CanonGPT(Config(vocab_size=task.vocab_size, block_size=task.block_size, canon=canon, **task.model))
    optimizer = make_optimizer(model, task.training, "cpu")
    forward = torch.compile(model) if compiled else model

    def step(number):
        tokens, mask = map(torch.from_numpy, task.batch(0, number, task.training["batch_size"]))
        forward(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of each model (default %(default)s)")
    steps = parser.parse_args().steps
    torch.set_flush_denormal(True)  # as train.py does
    print(f"CPU, {torch.get_num_threads()} threads; torch {torch.__version__}; ms a step: median (quartiles) of {steps}")
    for compiled in (False, True) if has_cpp_compiler() else (False,):
        for name in ("copy", "depo1"):
            torch._dynamo.reset()
            task = make_task(name)
            models = [make_step(task, canon, compiled) for canon in ("", "abcd")]
            times = np.empty((2, steps))
            for number in range(steps + 10):  # ten to warm up
                for times_of, step in zip(times, models):
                    began = time.perf_counter()
                    step(number)
                    if number >= 10:
                        times_of[number - 10] = (time.perf_counter() - began) * 1e3
            low, middle, high = np.percentile(times, (25, 50, 75), axis=1)
            columns = [f"{name} {m:6.2f} ({a:.2f}-{b:.2f})" for name, a, m, b in zip(("bare", "abcd"), low, middle, high)]
            print(f"{name:6} {'compiled' if compiled else 'eager':9} {'   '.join(columns)}   ratio {middle[1] / middle[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
