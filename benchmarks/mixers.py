"""The linear mixers' recurrences beside softmax attention:   python benchmarks/mixers.py

One layer's operator alone, forward and with backward, at the head shapes of a 768-wide model (on a
CPU: 64-wide). Each recurrence runs in chunks, by flash-linear-attention's kernels, in chunks and
compiled (on a GPU), and as the plain loop, which gets 256 tokens. `error` is against that loop. A
GPU gets 32,768 tokens in all, in bfloat16.
"""

import torch
import torch.nn.functional as F
from common import Benchmark, optional, times_in_turn

from canon_gpt import LinearMixer, linear_recurrence
from kernels import relative_error

SHAPES = {  # H, K, V in a model of 768 dims, and of 64
    "attention": ((12, 64, 64), (2, 32, 32)),
    "GLA": ((4, 96, 192), (4, 8, 16)),
    "Mamba2": ((16, 64, 96), (16, 64, 8)),
    "GDN": ((6, 96, 192), (2, 24, 48)),
}
LOOP = 256  # tokens


def inputs(name, B, T, device):
    """q, k, v, log_decay and beta, as many as the operator takes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    H, K, V = SHAPES[name][device != "cuda"]
    q, k = torch.randn(2, B, T, 1 if name == "Mamba2" else H, K, device=device, dtype=dtype)
    k = F.normalize(k.float(), dim=-1).to(dtype)
    found = [q * K**-0.5, k, torch.randn(B, T, H, V, device=device, dtype=dtype)]
    if name != "attention":
        per_channel = [K] if name == "GLA" else []
        found.append(-0.1 * torch.rand(B, T, H, *per_channel, device=device))
    if name == "GDN":
        found.append(torch.rand(B, T, H, device=device))
    return found


def attention(q, k, v):
    q, k, v = (u.transpose(1, 2) for u in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def loop(*arguments):
    return linear_recurrence(*arguments)[0]


def fla_package(name):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    def mamba2(q, k, v, log_decay, scale):  # it wants queries and keys for every head
        q, k = (u.expand(-1, -1, v.shape[2], -1).contiguous() for u in (q, k))
        return chunk_simple_gla(q, k, v, log_decay, scale=scale)

    f = {"GLA": chunk_gla, "Mamba2": mamba2, "GDN": chunk_gated_delta_rule}[name]
    return lambda *arguments: f(*arguments, scale=1.0)[0]


def measure(bench, name, how, f, arguments, exact=None):
    """Add a row: the operator f, whose first outputs should be `exact`."""
    device = bench.device
    arguments = [u.detach().requires_grad_() for u in arguments]

    def forward():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # as in training
            return f(*arguments)

    def both():
        torch.autograd.grad(forward().float().sum(), arguments)

    error = None
    if exact is not None:
        start = forward().detach()[:, : exact.shape[1]]
        error = relative_error(start.float(), exact)
    rounds = 3 if bench.toy or f is loop else 10
    ms = times_in_turn({"forward": forward, "both": both}, device, rounds)
    B, T = arguments[2].shape[:2]
    row = dict(what=f"{name}, {how}", B=B, T=T, forward_ms=ms["forward"], both_ms=ms["both"])
    bench.add(**row, tokens_per_s=B * T / ms["both"][1] * 1e3, error=error)


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    lengths, tokens = ([2048, 8192], 2**15) if bench.device == "cuda" else ([512, 2048], 2048)
    if bench.toy:
        lengths, tokens = [40], 80
    chunked = LinearMixer().recur  # as the models call it
    for T in lengths:
        for name in SHAPES:
            torch._dynamo.reset()
            arguments = inputs(name, tokens // T, T, bench.device)
            if name == "attention":
                measure(bench, name, "PyTorch", attention, arguments)
                continue
            start = [u[:, :LOOP] for u in arguments]
            exact = loop(*(u.float() for u in start))
            measure(bench, name, "chunks", chunked, arguments, exact)
            with optional("flash-linear-attention"):
                measure(bench, name, "fla", fla_package(name), arguments, exact)
            if bench.device == "cuda" and not bench.toy:
                with optional(f"{name}, chunks, compiled"):
                    compiled = torch.compile(chunked, dynamic=False)
                    measure(bench, name, "chunks, compiled", compiled, arguments, exact)
            if T == min(lengths):
                measure(bench, name, "loop", loop, start)


if __name__ == "__main__":
    main()
