"""What bfloat16 costs the linear mixers in precision:   python results/rounding.py

Under autocast, as when train.py trains on CUDA, the products of chunked_linear_attention are in bfloat16. Here a CPU rounds as a GPU would
(operands and results of a product to bfloat16, its sums in float32), with heads of the paper's sizes at 768 dims. Printed are relative
errors |a - b| / |b| against float64 of the output and the gradients: in chunks and, of the output alone, token by token ("stream", 1,000
tokens). Beside them stand float32, attention in bfloat16, and Gated DeltaNet with the roundings of flash-linear-attention's kernels, as we read
them: matrices in bfloat16, the state in float32 from chunk to chunk.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from canon_gpt import chunked_linear_attention, spans  # noqa: E402
from kernels import device_name, relative_error  # noqa: E402
from peers import train_once  # noqa: E402

HEADS = {"GLA": (4, 96, 192), "Mamba2": (16, 64, 96), "GDN": (6, 96, 192)}  # H, K, V
CASES = ("typical", "slow decay", "keys again")


def inputs(mixer, case, T):
    """q, k, v, log_decay (and beta), as they come from projections in bfloat16; decays and steps as at the start of training."""
    H, K, V = HEADS[mixer]
    q, k = torch.randn(2, 1, T, 1 if mixer == "Mamba2" else H, K)
    v = torch.randn(1, T, H, V).bfloat16().float()
    if case == "keys again":  # 32 different ones, nearly
        which = torch.randint(32, (T,))
        q, k = q[:, which] + 0.1 * torch.randn_like(q), k[:, which] + 0.1 * torch.randn_like(k)
    q, k = q.bfloat16().float(), k.bfloat16().float()
    dt = 0.001 * 100 ** torch.rand(1, T, H)  # 0.001 .. 0.1
    slow = 0.01 if case == "slow decay" else 1.0
    if mixer == "GLA":
        return q * K**-0.5, k, v, slow * F.logsigmoid(torch.randn(1, T, H, K)) / 16
    if mixer == "Mamba2":
        return q, k, dt[..., None] * v, -slow * torch.arange(1.0, H + 1) * dt
    q, k = F.normalize(q, dim=-1) * K**-0.5, F.normalize(k, dim=-1)
    return q, k, v, -slow * 16 * torch.rand(H) * dt, torch.rand(1, T, H)


def value_and_gradients(f, arguments):
    """As float64; the gradients are of the output's sum with random weights, the same for every f."""
    arguments = [u.detach().requires_grad_() for u in arguments]
    torch.manual_seed(1)
    o, gradients = train_once(f, arguments, torch.randn(arguments[2].shape).to(arguments[2].dtype))  # o is of v's shape and dtype
    return [u.detach().double() for u in (o, *gradients)]


def errors(f, arguments, want):
    return [relative_error(a, b) for a, b in zip(value_and_gradients(f, arguments), want)]


def in_chunks(*arguments):
    return chunked_linear_attention(*arguments)[0]


def under_autocast(*arguments):
    with torch.autocast("cpu", torch.bfloat16):
        return in_chunks(*arguments)


def stream(*arguments):
    pieces, state = [], None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for t in range(arguments[0].shape[1]):
            o, state = chunked_linear_attention(*(u[:, t : t + 1] for u in arguments), state=state)
            pieces.append(o)
    return torch.cat(pieces, dim=1)


def their_roundings(q, k, v, g, beta, C=64):
    """The delta rule as flash-linear-attention rounds it; forward only."""
    rounded = lambda x: x.bfloat16().float()  # noqa: E731
    chunks = lambda x: x.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)  # noqa: E731
    q, k, v, g, beta = rounded(chunks(q)), rounded(chunks(k)), chunks(v), chunks(g[..., None]), chunks(beta[..., None])
    faded, fading = g.cumsum(-2), spans(g[..., 0]).exp()
    L = (beta * k @ k.mT * fading).tril(-1)
    R = rounded(torch.linalg.solve_triangular(L, torch.eye(C).expand_as(L), upper=False, unitriangular=True))
    U, W, A = rounded(R @ rounded(beta * v)), rounded(R @ rounded(beta * k * faded.exp())), rounded(q @ k.mT * fading)
    S, o = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for n in range(k.shape[2]):
        u = U[:, :, n] - W[:, :, n] @ rounded(S)
        o.append(q[:, :, n] @ rounded(S) * faded[:, :, n].exp() + A[:, :, n] @ rounded(u))
        last = faded[:, :, n, -1:]
        S = last.exp() * S + k[:, :, n].mT @ rounded((last - faded[:, :, n]).exp() * u)
    return torch.stack(o, dim=2).permute(0, 2, 3, 1, 4).flatten(1, 2)


def row(name, found):
    print(f"{name:48}" + "".join(f"{100 * error:9.3f}" for error in found), flush=True)


def main():
    print(f"{device_name('cpu')}; torch {torch.__version__}; {time.strftime('%Y-%m-%d')}; relative errors in %\n")
    print(f"{'':48}" + "".join(f"{name:>9}" for name in ("o", "dq", "dk", "dv", "dg", "dbeta")))
    for T in (2048, 16384):
        for mixer in HEADS:
            for case in CASES:
                torch.manual_seed(0)
                arguments = inputs(mixer, case, T)
                exact = value_and_gradients(in_chunks, [u.double() for u in arguments])
                name = f"{mixer}, {T:,} tokens, {case}, "
                row(name + "float32", errors(in_chunks, arguments, exact))
                row(name + "bfloat16", errors(under_autocast, arguments, exact))
                if mixer == "GDN":
                    row(f"{'':>{len(name)}}as theirs", [relative_error(their_roundings(*arguments).double(), exact[0])])
                if T == 2048:
                    row(f"{'':>{len(name)}}stream", [relative_error(stream(*(u[:, :1000] for u in arguments)).double(), exact[0][:, :1000])])
        q, k, v = torch.randn(3, 1, 12, T, 64).bfloat16()
        attention = lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)  # noqa: E731
        exact = value_and_gradients(attention, [u.double() for u in (q, k, v)])
        row(f"attention, {T:,} tokens, bfloat16", errors(attention, (q, k, v), exact))


if __name__ == "__main__":
    main()
