"""The causal convolution, every implementation:   python benchmarks/convolution.py

Forward and backward in milliseconds, and as a share of the rate that a plain copy reaches. Forward
must read x and write y; backward must read x and dy and write dx. (Whether they are right,
`python kernels.py` says.) The shapes are those of Canon-A and C, B and D in the
paper's 12-layer model, and on a CPU in Depo's nano model. For nn.Conv1d the residual is part of
the weights, which costs nothing.
"""

from functools import partial

import torch
import torch.nn.functional as F
from common import Benchmark, times_in_turn

from kernels import causal_conv, causal_conv_reference


def channels_first(weight):
    """(kernel, D) -> (D, kernel), the current token's weight last, with the residual in it."""
    weight = torch.cat([weight[:1] + 1, weight[1:]])
    return weight.T.flip(1).contiguous()


def conv1d(x, weight):
    past = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.conv1d(past, weight[:, None].to(x.dtype), groups=len(weight)).mT


IMPLEMENTATIONS = {  # {name: (function of x and weight, layout of the weight)}
    "causal_conv": (causal_conv, torch.clone),  # what models call: on a GPU, Triton's kernels
    "definition": (causal_conv_reference, torch.clone),
    "torch.compile": (torch.compile(causal_conv_reference, dynamic=False), torch.clone),
    "nn.Conv1d": (conv1d, channels_first),
}


def measure(bench, B, T, D, rounds=100):
    """A row for each implementation."""
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    x, dy = torch.randn(2, B, T, D, device=bench.device, dtype=dtype)
    w = torch.rand(4, D, device=bench.device) - 0.5
    forward = {"copy": partial(torch.empty_like(x).copy_, x)}
    backward = {}
    x = x.clone().requires_grad_()
    for name, (conv, layout) in IMPLEMENTATIONS.items():
        weight = layout(w).requires_grad_()
        y = conv(x, weight)
        forward[name] = partial(conv, x, weight)
        backward[name] = partial(torch.autograd.grad, y, (x, weight), dy, retain_graph=True)
    forward_ms = times_in_turn(forward, bench.device, rounds)
    backward_ms = times_in_turn(backward, bench.device, rounds)
    copy_ms = forward_ms["copy"][1]
    for name in IMPLEMENTATIONS:
        row = dict(what=name, B=B, T=T, D=D, dtype=str(dtype)[6:])
        row["fwd_ms"], row["bwd_ms"] = forward_ms[name], backward_ms[name]
        row["fwd_share"] = copy_ms / forward_ms[name][1]
        row["bwd_share"] = 1.5 * copy_ms / backward_ms[name][1]  # three tensors, a copy's two
        bench.add(**row)


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    for D in (768, 2304, 4096) if bench.device == "cuda" else (64, 192, 336):
        B, T = (16, 2048) if bench.device == "cuda" else (32, 52)
        measure(bench, B, T, D)


if __name__ == "__main__":
    main()
