"""The causal convolution, every implementation:   python benchmarks/convolution.py

Milliseconds forward and backward, GB/s, and the share of what a plain copy reaches. Forward must
read x and write y; backward must read x and dy and write dx. `error` is that of y and dx together,
against the definition in float32. The shapes are those of Canon-A and C, B and D in the paper's
12-layer model (on a CPU: in Depo's nano model). The residual is folded into the weights, which is
free, for packages that lack one.
"""

from functools import partial

import torch
import torch.nn.functional as F
from common import Benchmark, times_in_turn

from kernels import (
    causal_conv_pytorch, causal_conv_reference, causal_conv_triton, gpu_has_bfloat16,
    relative_error, value_and_gradients, with_residual,
)  # fmt: skip


def channels_first(weight):
    """(kernel, D) -> (D, kernel), the current token's weight last, as others want it."""
    return with_residual(weight).t().flip(1).contiguous()


def conv1d(x, weight):
    past = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.conv1d(past, weight[:, None].to(x.dtype), groups=len(weight)).mT


def causal_conv1d_package(x, weight):
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(x.mT, weight).mT


def fla_package(x, weight):
    from fla.modules.convolution import causal_conv1d

    y = causal_conv1d(x, weight)
    return y[0] if isinstance(y, tuple) else y


def implementations(device, toy):
    """{name: (function of x and weight, layout of the weight)}"""
    found = {"Triton": (causal_conv_triton, torch.clone)} if device == "cuda" else {}
    found["PyTorch"] = causal_conv_pytorch, torch.clone
    found["definition"] = causal_conv_reference, torch.clone
    found["nn.Conv1d"] = conv1d, channels_first
    if not toy:
        found["torch.compile"] = torch.compile(causal_conv_pytorch, dynamic=False), torch.clone
    found["causal-conv1d"] = causal_conv1d_package, channels_first
    found["flash-linear-attention"] = fla_package, channels_first
    return found


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    device, dtype = bench.device, torch.float32
    rounds = 3 if bench.toy else 100
    shapes = [(2, 9, 32)] if bench.toy else [(32, 52, D) for D in (64, 192, 336)]
    if device == "cuda" and not bench.toy:
        dtype = torch.bfloat16 if gpu_has_bfloat16() else torch.float16
        shapes = [(16, 2048, D) for D in (768, 2304, 4096)]
    for B, T, D in shapes:
        x, dy = torch.randn(2, B, T, D, device=device, dtype=dtype)
        w = torch.rand(4, D, device=device) - 0.5
        exact_y, exact_dx, _ = value_and_gradients(causal_conv_reference, x.float(), w, dy)
        forward = {"copy": partial(torch.empty_like(x).copy_, x)}
        backward, errors = {}, {}
        x = x.clone().requires_grad_()
        for name, (conv, layout) in implementations(device, bench.toy).items():
            with bench.optional(name):
                weight = layout(w).requires_grad_()
                y = conv(x, weight)
                gradients = partial(torch.autograd.grad, y, (x, weight), dy, retain_graph=True)
                dx, _ = gradients()
                forward[name], backward[name] = partial(conv, x, weight), gradients
                both = torch.stack([y.detach(), dx]), torch.stack([exact_y, exact_dx])
                errors[name] = relative_error(*both)
        forward_ms = times_in_turn(forward, device, rounds)
        backward_ms = times_in_turn(backward, device, rounds)
        tensor = x.numel() * x.element_size() / 1e6  # megabytes; MB/ms is GB/s
        copy_rate = 2 * tensor / forward_ms["copy"][1]
        for name, error in errors.items():
            rates = 2 * tensor / forward_ms[name][1], 3 * tensor / backward_ms[name][1]
            bench.add(
                what=name, B=B, T=T, D=D, dtype=str(dtype)[6:], error=error,
                fwd_ms=forward_ms[name], fwd_gb_per_s=rates[0],
                fwd_share=rates[0] / copy_rate,
                bwd_ms=backward_ms[name], bwd_gb_per_s=rates[1],
                bwd_share=rates[1] / copy_rate,
            )  # fmt: skip


if __name__ == "__main__":
    main()
