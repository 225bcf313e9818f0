"""What Canon layers cost in a training step:   python results/step_time.py

Trains several models turn by turn, one step each, without Canon layers and with some, so that whatever else the machine does slows
all of them. Prints the median step of each in milliseconds, with the quartiles, and its ratio to the model without.

On a CPU: Copy and Depo at the nano preset, run eagerly and through torch.compile. On CUDA: 12 layers of 768 dims, 2,048 tokens, bfloat16,
compiled, with the convolution as

    Triton               the operator; at D with SwiGLU in the same kernel
    Triton, D apart      the operator, and SwiGLU behind it
    PyTorch              expressions, which torch.compile fuses as it sees fit
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import canon_gpt  # noqa: E402
import kernels  # noqa: E402
from canon_gpt import CanonGPT, Config  # noqa: E402
from tasks import make_task  # noqa: E402
from train import flops_per_token, make_optimizer  # noqa: E402


def take_step(model, optimizer, loss, device):
    """Train the model by one step on what loss() returns, in bfloat16 on CUDA, and wait for its end."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        nats = loss()
    nats.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return nats


def make_step(task, canon, compiled, device, batch_size):
    """A function that trains a fresh model by one step, and the model."""
    torch.manual_seed(0)
    model = CanonGPT(Config(vocab_size=task.vocab_size, block_size=task.block_size, canon=canon, **task.model)).to(device)
    optimizer = make_optimizer(model, task.training, device)
    forward = torch.compile(model) if compiled else model
    batches = [[torch.from_numpy(a).to(device) for a in task.batch(0, number, batch_size)] for number in range(4)]

    def step(number):
        tokens, mask = batches[number % 4]
        take_step(model, optimizer, lambda: forward(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1], device)

    return step, model


def compare(name, task, points, compiled, device, batch_size, steps):
    """Times of the models with Canon at `points`, the first of which is "": a list of dicts, which it prints."""
    torch._dynamo.reset()
    models = [make_step(task, canon, compiled, device, batch_size) for canon in points]
    times = np.empty((len(points), steps))
    for number in range(-10, steps):  # ten to warm up
        for times_of, (step, _) in zip(times, models):
            began = time.perf_counter()
            step(number)
            times_of[max(number, 0)] = (time.perf_counter() - began) * 1e3
    found = []
    for canon, quartiles, (_, model) in zip(points, np.percentile(times, (25, 50, 75), axis=1).T, models):
        low, median, high = quartiles
        found.append({"what": name, "canon": canon, "compiled": compiled, "batch_size": batch_size, "T": task.block_size,
                      "ms": list(quartiles), "ratio": median / found[0]["ms"][1] if found else 1.0,
                      "tokens_per_s": batch_size * task.block_size / median * 1e3, "flops_per_token": flops_per_token(model)})  # fmt: skip
        print(f"{name:30}{'compiled' if compiled else 'eager':10}{canon or 'none':6}{median:8.2f} ({low:.2f}-{high:.2f})   "
              f"x {found[-1]['ratio']:.2f}", flush=True)  # fmt: skip
    return found


def triton_apart(x, weight, residual, activation):
    if activation == "swiglu":
        return kernels.finish(x, kernels.causal_conv_triton(x, weight, residual), False, activation)
    return kernels.causal_conv_triton(x, weight, residual, activation)


def use(form):
    """From here on, Canon layers compute by it."""
    canon_gpt.causal_conv = lambda x, weight, residual, activation, tail: form(x, weight, residual, activation)


FORMS = {"Triton": kernels.causal_conv_triton, "Triton, D apart": triton_apart, "PyTorch": kernels.causal_conv_pytorch}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="of each model (default: 400 on a CPU, 30 on CUDA)")
    parser.add_argument("--points", nargs="+", default=None, help="(default: abcd; on CUDA, as Triton's operator, also ac)")
    parser.add_argument("--json", type=kernels.json_file, metavar="FILE", help="save the numbers there, too")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = args.steps or (30 if device == "cuda" else 400)
    torch.set_flush_denormal(True)  # as train.py does
    torch.set_float32_matmul_precision("high")
    name = kernels.device_name(device)
    print(f"{name}; torch {torch.__version__}; ms a step: median (quartiles) of {steps}")
    found = []
    if device == "cuda":
        task = make_task("depo1", "paper")
        for name_of_form, form in FORMS.items():
            points = ("ac", "abcd") if name_of_form == "Triton" else ("abcd",)
            use(form)
            found += compare(f"12L768D, {name_of_form}", task, ["", *(args.points or points)], True, device, 16, steps)
    else:
        for compiled in (False, True) if kernels.can_compile_on_cpu() else (False,):
            for task in map(make_task, ("copy", "depo1")):
                points = ["", *(args.points or ("abcd",))]
                found += compare(task.name, task, points, compiled, device, task.training["batch_size"], steps)
    if args.json:
        about = {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "steps": steps}
        args.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
