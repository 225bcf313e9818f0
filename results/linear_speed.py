"""Forward and backward of the linear recurrence, as a loop and in chunks, beside softmax attention:   python results/linear_speed.py

One sequence, float32 on the CPU and bfloat16 inputs on CUDA, at the head shapes of a 512-wide model. Tokens/s are of one
layer's operator alone, from the median of several runs; `--compile` puts the chunked form through torch.compile.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from canon_gpt import chunked_linear_attention, linear_recurrence  # noqa: E402
from kernels import quartiles_ms  # noqa: E402

SHAPES = {"GLA": (4, 64, 128), "Mamba2": (16, 64, 64), "GDN": (4, 96, 192)}  # H, K, V


def inputs(kind, T, device, dtype):
    H, K, V = SHAPES[kind]
    q, k = torch.randn(2, 1, T, 1 if kind == "Mamba2" else H, K, device=device, dtype=dtype)
    v = torch.randn(1, T, H, V, device=device, dtype=dtype)
    log_decay = -0.1 * torch.rand(1, T, H, *([K] if kind == "GLA" else []), device=device)
    beta = torch.rand(1, T, H, device=device) if kind == "GDN" else None
    k = F.normalize(k.float(), dim=-1).to(dtype)
    return [u if u is None else u.requires_grad_() for u in (q, k, v, log_decay, beta)]


def rate(f, arguments, T, device):
    """Tokens/s of f forward and backward."""
    wanted = [u for u in arguments if u is not None]

    def step():
        y = f(*arguments)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad(y.float().sum(), wanted)

    began = time.perf_counter()
    step()
    if time.perf_counter() - began > 5:  # slow enough to be measured once
        began = time.perf_counter()
        step()
        return T / (time.perf_counter() - began)
    return T / quartiles_ms(step, device)[1] * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="the chunked form through torch.compile")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192], metavar="T")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; thousand tokens/s, forward and backward, one sequence of T tokens, {str(dtype)[6:]}")
    print(f"{'T':>6}{'attention':>12}" + "".join(f"{kind + ' loop':>14}{'chunked':>10}" for kind in SHAPES))
    chunked = torch.compile(chunked_linear_attention, dynamic=False) if args.compile else chunked_linear_attention
    for T in args.lengths:
        heads = [torch.randn(1, 8, T, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        rates = [rate(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads, T, device)]
        for kind in SHAPES:
            arguments = inputs(kind, T, device, dtype)
            loop = rate(linear_recurrence, arguments, T, device) if T <= 2048 else float("nan")  # it keeps every state
            rates += [loop, rate(chunked, arguments, T, device)]
        widths = [12] + [14, 10] * len(SHAPES)
        cells = ["-" if r != r else f"{r / 1e3:.1f}" for r in rates]
        print(f"{T:6}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)), flush=True)


if __name__ == "__main__":
    main()
