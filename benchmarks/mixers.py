"""The linear mixers' recurrences beside softmax attention:   python benchmarks/mixers.py

One layer's operator alone, forward and with backward, at the head shapes of a 768-wide model (on a
CPU: 64-wide). Each recurrence runs in chunks, in chunks and compiled (on a GPU), and as the plain
loop, which gets 256 tokens. A GPU gets 32,768 tokens in all, in bfloat16.
"""

import torch
import torch.nn.functional as F
from common import Benchmark, times_in_turn

from canon_gpt import LinearMixer, linear_recurrence

SHAPES = {  # {name: (H, K, V) in a model of 768 dims, and of 64}
    "attention": ((12, 64, 64), (2, 32, 32)),
    "GLA": ((4, 96, 192), (4, 8, 16)),
    "Mamba2": ((16, 64, 96), (16, 64, 8)),
    "GDN": ((6, 96, 192), (2, 24, 48)),
}
LOOP = 256  # tokens


def make_inputs(name, B, T, device):
    """q, k, v, log_decay and beta, as many as the operator takes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    H, K, V = SHAPES[name][device != "cuda"]
    q, k = torch.randn(2, B, T, 1 if name == "Mamba2" else H, K, device=device, dtype=dtype)
    k = F.normalize(k.float(), dim=-1).to(dtype)
    inputs = [q * K**-0.5, k, torch.randn(B, T, H, V, device=device, dtype=dtype)]
    if name != "attention":
        per_channel = [K] if name == "GLA" else []
        inputs.append(-0.1 * torch.rand(B, T, H, *per_channel, device=device))
    if name == "GDN":
        inputs.append(torch.rand(B, T, H, device=device))
    return inputs


def attention(q, k, v):
    q, k, v = (u.transpose(1, 2) for u in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def loop(*inputs):
    return linear_recurrence(*inputs)[0]


def measure(bench, what, f, inputs, rounds):
    """Add a row for the operator f."""
    inputs = [u.detach().requires_grad_() for u in inputs]

    def forward():
        # As in training.
        with torch.autocast(bench.device, torch.bfloat16, enabled=bench.device == "cuda"):
            return f(*inputs)

    def both():
        torch.autograd.grad(forward().float().sum(), inputs)

    ms = times_in_turn({"forward": forward, "both": both}, bench.device, rounds)
    B, T = inputs[2].shape[:2]
    rate = B * T / ms["both"][1] * 1e3
    bench.add(
        what=what, B=B, T=T, forward_ms=ms["forward"], both_ms=ms["both"], tokens_per_s=rate
    )


def compare(bench, name, B, T, rounds=10):
    """Rows for an operator in all its forms."""
    torch._dynamo.reset()
    inputs = make_inputs(name, B, T, bench.device)
    if name == "attention":
        measure(bench, "attention, PyTorch", attention, inputs, rounds)
        return
    start = [u[:, :LOOP] for u in inputs]
    measure(bench, f"{name}, loop", loop, start, rounds=3)
    chunked = LinearMixer().recur  # as the models call it
    measure(bench, f"{name}, chunks", chunked, inputs, rounds)
    if bench.device == "cuda":
        compiled = torch.compile(chunked, dynamic=False)
        measure(bench, f"{name}, chunks, compiled", compiled, inputs, rounds)


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    tokens, lengths = (2**15, [2048, 8192]) if bench.device == "cuda" else (2048, [512, 2048])
    for T in lengths:
        for name in SHAPES:
            compare(bench, name, tokens // T, T)


if __name__ == "__main__":
    main()
