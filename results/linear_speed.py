"""Forward and backward of the linear recurrence, as a loop and in chunks, beside softmax attention:   python results/linear_speed.py

One layer's operator alone, at the head shapes of a 512-wide model: tokens/s from the median of several runs and, on CUDA, the most
memory that it took. float32 and one sequence on a CPU; bfloat16 (inputs, and autocast, as in training), 32,768 tokens in all and the
chunked form through torch.compile on CUDA.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from canon_gpt import chunked_linear_attention, linear_recurrence  # noqa: E402
from kernels import device_name, json_file, quartiles_ms  # noqa: E402

SHAPES = {"GLA": (4, 64, 128), "Mamba2": (16, 64, 64), "GDN": (4, 96, 192)}  # H, K, V


def inputs(kind, B, T, device, dtype):
    H, K, V = SHAPES[kind]
    q, k = torch.randn(2, B, T, 1 if kind == "Mamba2" else H, K, device=device, dtype=dtype)
    v = torch.randn(B, T, H, V, device=device, dtype=dtype)
    log_decay = -0.1 * torch.rand(B, T, H, *([K] if kind == "GLA" else []), device=device)
    beta = torch.rand(B, T, H, device=device) if kind == "GDN" else None
    k = F.normalize(k.float(), dim=-1).to(dtype)
    return [u if u is None else u.requires_grad_() for u in (q, k, v, log_decay, beta)]


def measure(f, arguments, device):
    """Quartiles of f forward and backward in ms, and the most gigabytes it took (None on a CPU)."""
    wanted = [u for u in arguments if u is not None]

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # as in training
            y = f(*arguments)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad(y.float().sum(), wanted)

    step()
    gigabytes = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        gigabytes = (torch.cuda.max_memory_allocated() - before) / 1e9
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    if device == "cpu" and seconds > 3:  # slow enough to be measured once
        return [seconds * 1e3] * 3, gigabytes
    return list(quartiles_ms(step, device)), gigabytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="the chunked form through torch.compile")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T",
                        default=[512, 2048, 8192, 16384] if cuda else [256, 512, 1024, 2048, 4096, 8192])  # fmt: skip
    parser.add_argument("--json", type=json_file, metavar="FILE", help="save the numbers there, too")
    args = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.set_float32_matmul_precision("high")
    name = device_name(device)
    how = "compiled" if args.compile else "eager"
    print(f"{name}; torch {torch.__version__}; thousand tokens/s, forward and backward, {str(dtype)[6:]}; the chunked form is {how}")
    print(f"{'B':>4}{'T':>7}{'attention':>12}" + "".join(f"{kind + ' loop':>14}{'chunked':>10}" for kind in SHAPES))
    chunked = torch.compile(chunked_linear_attention, dynamic=False) if args.compile else chunked_linear_attention
    found = []
    for T in args.lengths:
        torch._dynamo.reset()
        B = max(1, 2**15 // T) if cuda else 1
        heads = [torch.randn(B, 8, T, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        runs = {"attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads)}
        for kind in SHAPES:
            arguments = inputs(kind, B, T, device, dtype)
            runs |= {f"{kind} loop": (linear_recurrence, arguments), f"{kind} chunked": (chunked, arguments)}
        line = f"{B:4}{T:7}"
        for operator, (f, arguments) in runs.items():
            width = 12 if operator == "attention" else 14 if "loop" in operator else 10
            if "loop" in operator and T > 2048:  # it keeps every state
                line += f"{'-':>{width}}"
                continue
            quartiles, gigabytes = measure(f, arguments, device)
            found.append({"operator": operator, "B": B, "T": T, "ms": quartiles, "gb": gigabytes})
            line += f"{B * T / quartiles[1]:{width}.1f}"
        print(line, flush=True)
    if cuda:
        print("\ngigabytes, in the same order")
        for T in args.lengths:
            cells = ", ".join(f"{row['operator']} {row['gb']:.2f}" for row in found if row["T"] == T)
            print(f"T = {T}: {cells}")
    if args.json:
        about = {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "dtype": str(dtype)[6:], "chunked": how}
        args.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
