"""The causal convolution behind every Canon layer: its definition, two fast forms, their checks.

A Canon layer (paper Section 4, Eq. 4.1) adds to each hidden state a weighted sum of itself and of the K-1
states before it, with one weight a channel and a distance:

    z_t = w_0 * h_t + w_1 * h_{t-1} + .. + w_{K-1} * h_{t-K+1}        (elementwise; h is zero before the start)
    y_t = h_t + z_t                                                   (the residual)

No sum runs over channels, so this is a *depthwise* convolution: K = 4 multiply-adds for every number read. A GPU does
a dozen or more in the time it takes to fetch that number from memory, so the arithmetic is all but free and the cost
is memory traffic. The ideal forward pass reads x once and writes y once, just as a plain copy does; the ideal backward
pass reads x and dy once and writes dx. That is cheap beside a block's matrix products: they do D multiply-adds for every
number they read, hundreds of times as many, and that arithmetic takes longer than one more pass over x.

Reading order:
  1. the definition, shift-and-add in plain PyTorch (`causal_conv_reference`); everything is tested against it
  2. the same in PyTorch without temporaries, for the CPU and any device without Triton
  3. a Triton kernel: the tile, the pointers, the backward pass
  4. the kernel as a PyTorch operator, so that autograd and torch.compile know it
  5. `causal_conv`, the function that the models call: it picks
  6. `python kernels.py` checks every form against float64 and times it beside a plain copy
"""

import argparse
import json
import os
import shutil
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Tuple

import torch
import torch.nn.functional as F

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: section 6 still checks the kernel, in the interpreter

try:  # Triton comes with PyTorch's CUDA builds. Nothing here is compiled when you install.
    import triton
    import triton.language as tl
except ImportError:
    triton = None


# ------------------------------------------------------------------------------------------------------------
# 1. The definition
# ------------------------------------------------------------------------------------------------------------


def causal_conv_reference(x, weight, residual=True, activation=None, tail=None):
    """Depthwise causal convolution over time (paper Eq. 4.1), as a sum of shifted copies of x.

    x           (B, T, D) float tensor
    weight      (K, D) float tensor; weight[i] multiplies the input i steps back
    residual    add x itself to the result
    activation  None, or "silu" for SiLU after the convolution (and before the residual)
    tail        (B, K-1, D), the inputs just before x; None means zeros
    returns     (B, T, D) in x's dtype, computed in float32 (in float64 if x is)
    """
    K, T = weight.shape[0], x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(dtype), weight.to(dtype)
    # past[:, K-1+t] is h_t, so the copy shifted by i starts at K-1-i
    past = F.pad(h, (0, 0, K - 1, 0)) if tail is None else torch.cat([tail.to(dtype), h], dim=1)
    z = sum(w[i] * past[:, K - 1 - i : K - 1 - i + T] for i in range(K))  # (B, T, D)
    if activation == "silu":
        z = F.silu(z)
    return (h + z if residual else z).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------
# 2. In PyTorch, without temporaries: what runs on the CPU
#
# Run eagerly, the definition makes two new tensors for every shift, and autograd makes as many again. Adding every shift
# to the result in place, and writing the derivative by hand, avoids them. With dy the gradient of the result:
#
#     y_t  = sum_i w_i h_{t-i}      h_s is used by y_s, y_{s+1} .. y_{s+K-1}, hence
#     dh_s = sum_i w_i dy_{s+i}     the convolution in the other direction, ahead instead of back
#     dw_i = sum_s dy_{s+i} h_s
#
# torch.compile makes loops without temporaries from plain expressions, so there nothing is done in place. The derivative by hand
# helps there too: left to autograd, padded copies of h are made and kept for the backward pass.
#
# The residual is one more in w_0, unless a SiLU comes between.
# ------------------------------------------------------------------------------------------------------------


def shifted(x, i):
    """x (B, T, D), i tokens later, or earlier if i < 0; zeros move in."""
    return F.pad(x[:, : x.shape[1] - i], (0, 0, i, 0)) if i >= 0 else F.pad(x[:, -i:], (0, 0, 0, -i))


def shift_and_add(x, weight, sign):
    """sum_i w_i x_{t - sign i}; weight (K, D) with K <= T."""
    if torch.compiler.is_compiling():
        return sum(w * shifted(x, sign * i) for i, w in enumerate(weight))
    y, T = x * weight[0], x.shape[1]
    for i in range(1, len(weight)):
        now, then = (y[:, i:], x[:, : T - i]) if sign > 0 else (y[:, : T - i], x[:, i:])
        now.addcmul_(then, weight[i])
    return y


class ShiftAndAdd(torch.autograd.Function):
    """The convolution without residual; x (B, T, D), weight (K, D) of the same dtype, K <= T."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return shift_and_add(x, weight, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        B, T, D = x.shape
        dx = shift_and_add(dy, weight, -1)
        if not ctx.needs_input_grad[1]:
            return dx, None
        # Over time first, then over the batch: a sequence is summed by the thread that has just multiplied it, in its cache.
        if torch.compiler.is_compiling():
            return dx, torch.stack([(shifted(dy, -i) * x).sum(1).sum(0) for i in range(len(weight))])
        dw = weight.new_zeros(len(weight), B, D)
        n = max(1, 2**18 // (T * D))  # the products are temporaries of about 1 MB
        for h, g, out in zip(x.split(n), dy.split(n), dw.split(n, dim=1)):
            for i in range(len(weight)):
                torch.sum(g[:, i:] * h[:, : T - i], dim=1, out=out[i])
        return dx, dw.sum(1)


def causal_conv_pytorch(x, weight, residual=True, activation=None):
    """`causal_conv_reference` without a tail, by ShiftAndAdd."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(dtype), weight[: x.shape[1]].to(dtype)  # at the first token only w_0 matters, and so on
    if activation == "silu":
        z = F.silu(ShiftAndAdd.apply(h, w))
        return (h + z if residual else z).to(x.dtype)
    if residual:
        w = torch.cat([w[:1] + 1, w[1:]])
    return ShiftAndAdd.apply(h, w).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------
# 3. The Triton kernel: what runs on CUDA
#
# The tile. x is a sheet of N = B*T rows, sequence behind sequence, by D columns (channels), contiguous along a row. Program
# (p, c) of a grid of programs makes `tiles` tiles of y, ROWS by COLS, one below the other, from row p * tiles * ROWS and column
# c * COLS on. For each it needs the same tile of x and the K-1 rows above it:
#
#                  <-- COLS channels -->
#      top-3 . . .+---------------------+
#      top-2      |  rows of the tile   |     what lies above a sequence's start counts as zeros
#      top-1      |  above, read again  |
#      top        +=====================+
#      top+1      |                     |     y's row t is w_0 * x's row t + .. + w_3 * x's row t-3: so load the
#       ..        |  the tile of y      |     whole tile K times, i rows higher each time. Only the first load
#      top+ROWS-1 +=====================+     travels from memory; the shifted ones hit the same cache lines.
#
# A tile may hold the end of one sequence and the start of the next (no more: ROWS <= T). So `time_of` gives each row its time t
# within its sequence, and the tile i rows higher counts only where t >= i.
#
# The pointers. Element (row, c) of x lies at x_ptr + row * stride + c. So `rows` (a column of indices) times stride plus
# `cols` (a row of indices) is a whole tile of addresses, and moving up i rows is `rows - i`. stride need not be D: a slice of
# a wider projection works without a copy.
#
# The backward pass. As derived in section 2, dx is the convolution of dy in the other direction: tiles of dy shifted
# *down* by 0..K-1. The same shifted tiles, multiplied with the one tile of x and summed over its rows, are this
# tile's share of dw_0 .. dw_{K-1}: one pass over x and dy gives everything. A program adds up the shares of its tiles and
# writes the sums, its columns of a line of K by D, to a float32 table that is summed afterwards: unlike atomic adds, that
# gives the same bits in every run. With a SiLU, y = silu(z): the forward kernel first makes dz = dy * silu'(z), computing z again.
#
# What is fast. In the time that memory takes to bring one bfloat16 number, a multiprocessor issues some 25 instructions, and masks, addresses
# and conversions are instructions, too (results/machine_code.py counts them). So one warp, 32 threads in lockstep, makes a tile: of
# 256 columns, each thread has 8 (16 bytes in bfloat16, the widest load) from top to bottom. Then weights stay in its registers,
# sums over rows stay within it, and no warp waits for another. A thread cannot index its registers in a loop, so weights and
# sums are w0 .. w3 and dw0 .. dw3, and K is at most 4.
# ------------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def tap(w_ptr, i: tl.constexpr, cols, D, K: tl.constexpr):
        """w_i of these channels, (1, COLS) float32; zeros if there is none."""
        here = D if i < K else 0
        return tl.load(w_ptr + i * D + cols, mask=cols < here, other=0.0).to(tl.float32)

    @triton.jit
    def load_tile(ptr, rows, stride, cols, mask):
        return tl.load(ptr + rows * stride + cols, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def time_of(rows, top, T):
        """The time within its sequence of each row top + rows, by one division for the tile: at most one sequence ends in it."""
        t = top % T + rows
        return tl.where(t < T, t, t - T)

    @triton.jit
    def forward_kernel(x_ptr, w_ptr, dy_ptr, y_ptr, N, T, D, stride, stride_dy, tiles,
                       K: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, GRADIENT: tl.constexpr,
                       ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
        """y, or with GRADIENT dy * silu'(z)."""
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]  # (1, COLS)
        rows = tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
        w0, w1, w2, w3 = tap(w_ptr, 0, cols, D, K), tap(w_ptr, 1, cols, D, K), tap(w_ptr, 2, cols, D, K), tap(w_ptr, 3, cols, D, K)
        if RESIDUAL and not SILU:
            w0 += 1
        for tile in range(tiles):
            top = (tl.program_id(0) * tiles + tile) * ROWS
            start = top.to(tl.int64)  # 64 bits: times a stride it can pass 2^31
            x = x_ptr + start * stride
            t = time_of(rows, top, T)
            inside = (rows < N - top) & (cols < D)
            h = load_tile(x, rows, stride, cols, inside)
            y = w0 * h
            if K > 1:
                y += w1 * load_tile(x, rows - 1, stride, cols, inside & (t >= 1))
            if K > 2:
                y += w2 * load_tile(x, rows - 2, stride, cols, inside & (t >= 2))
            if K > 3:
                y += w3 * load_tile(x, rows - 3, stride, cols, inside & (t >= 3))
            if SILU:
                s = tl.sigmoid(y)
                if GRADIENT:
                    dy = load_tile(dy_ptr + start * stride_dy, rows, stride_dy, cols, inside)
                    y = dy * s * (1 + y * (1 - s))
                else:
                    y = y * s
                    if RESIDUAL:
                        y += h
            tl.store(y_ptr + start * D + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, N, T, D, stride_dy, stride_x, tiles,
                        K: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
        rows = tl.arange(0, ROWS)[:, None]
        w0, w1, w2, w3 = tap(w_ptr, 0, cols, D, K), tap(w_ptr, 1, cols, D, K), tap(w_ptr, 2, cols, D, K), tap(w_ptr, 3, cols, D, K)
        if RESIDUAL:
            w0 += 1
        dw0 = tl.zeros((1, COLS), tl.float32)
        dw1, dw2, dw3 = dw0, dw0, dw0
        for tile in range(tiles):
            top = (tl.program_id(0) * tiles + tile) * ROWS
            start = top.to(tl.int64)
            dy = dy_ptr + start * stride_dy
            left = T - time_of(rows, top, T)  # rows of this sequence from here on
            inside = (rows < N - top) & (cols < D)
            x = load_tile(x_ptr + start * stride_x, rows, stride_x, cols, inside)
            g = load_tile(dy, rows, stride_dy, cols, inside)
            dx = w0 * g
            dw0 += tl.sum(g * x, axis=0, keep_dims=True)
            if K > 1:
                g = load_tile(dy, rows + 1, stride_dy, cols, inside & (left > 1))
                dx += w1 * g
                dw1 += tl.sum(g * x, axis=0, keep_dims=True)
            if K > 2:
                g = load_tile(dy, rows + 2, stride_dy, cols, inside & (left > 2))
                dx += w2 * g
                dw2 += tl.sum(g * x, axis=0, keep_dims=True)
            if K > 3:
                g = load_tile(dy, rows + 3, stride_dy, cols, inside & (left > 3))
                dx += w3 * g
                dw3 += tl.sum(g * x, axis=0, keep_dims=True)
            tl.store(dx_ptr + start * D + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        line = dw_ptr + tl.program_id(0).to(tl.int64) * K * D + cols  # of the dw table
        tl.store(line, dw0, mask=cols < D)
        if K > 1:
            tl.store(line + D, dw1, mask=cols < D)
        if K > 2:
            tl.store(line + 2 * D, dw2, mask=cols < D)
        if K > 3:
            tl.store(line + 3 * D, dw3, mask=cols < D)


# ------------------------------------------------------------------------------------------------------------
# 4. The kernel as an operator of PyTorch
#
# A custom operator is a black box with a signature. torch.compile needs to know only what comes out (the "fake"
# version: shapes and dtypes, no data); autograd needs to know which operator runs backward.
# ------------------------------------------------------------------------------------------------------------


WARPS = 1  # a program's


def sheet(x):
    """x (B, T, D) as (B*T, D), contiguous along a row; copied only if it has to be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def tiling(x):
    """(ROWS, COLS) of a tile: 4 x 256, or as many numbers in narrower ones. Both are powers of two, and ROWS is at most T."""
    cols = min(256, triton.next_power_of_2(x.shape[2]))
    return min(1024 // cols, 2 ** (x.shape[1].bit_length() - 1)), cols


def run_forward(x, weight, dy, y, residual, silu):
    """Fill y (B, T, D); with dy it becomes dy * silu'(z)."""
    (B, T, D), (rows, cols) = x.shape, tiling(x)
    tiles = min(8, triton.cdiv(B * T, rows))  # a program's: few, so that there are many programs
    x, gradient = sheet(x), dy is not None
    dy = sheet(dy) if gradient else x  # not read
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
        forward_kernel[triton.cdiv(B * T, rows * tiles), triton.cdiv(D, cols)](
            x, weight, dy, y, B * T, T, D, x.stride(0), dy.stride(0), tiles,
            len(weight), residual, silu, gradient, rows, cols, num_warps=WARPS,
        )


@torch.library.custom_op("canon::causal_conv", mutates_args=())
def conv_op(x: torch.Tensor, weight: torch.Tensor, residual: bool, silu: bool) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        run_forward(x, weight, None, y, residual, silu)
    return y


@conv_op.register_fake
def _(x, weight, residual, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("canon::causal_conv_backward", mutates_args=())
def conv_backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: bool, silu: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight)
    (B, T, D), (rows, cols) = x.shape, tiling(x)
    tiles = min(32, triton.cdiv(B * T, rows))  # more tiles: a smaller table of dw, but fewer programs
    dz = dy
    if silu:
        dz = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        run_forward(x, weight, dy, dz, residual, silu)
    dz, xs, programs = sheet(dz), sheet(x), triton.cdiv(B * T, rows * tiles)
    dw = torch.empty(programs, *weight.shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        backward_kernel[programs, triton.cdiv(D, cols)](
            dz, xs, weight, dx, dw, B * T, T, D, dz.stride(0), xs.stride(0), tiles,
            len(weight), residual and not silu, rows, cols, num_warps=WARPS,
        )
    return dx + dy if residual and silu else dx, dw.sum(0).to(weight.dtype)


@conv_backward_op.register_fake
def _(dy, x, weight, residual, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.flags = inputs[2:]


def _backward(ctx, dy):
    return *conv_backward_op(dy, *ctx.saved_tensors, *ctx.flags), None, None


conv_op.register_autograd(_backward, setup_context=_save)


def causal_conv_triton(x, weight, residual=True, activation=None):
    """`causal_conv_reference` without a tail, by the Triton kernel; K <= 4, x float32, bfloat16 or float16."""
    if len(weight) > 4:
        raise ValueError(f"the kernel takes up to 4 weights a channel, not {len(weight)}")
    return conv_op(x, weight.contiguous(), residual, activation == "silu")


# ------------------------------------------------------------------------------------------------------------
# 5. What the models call
# ------------------------------------------------------------------------------------------------------------


def causal_conv(x, weight, residual=True, activation=None, tail=None):
    """`causal_conv_reference`, by the fastest form for the device: same arguments, same result.

    Autocast leaves it alone: y has x's dtype, whatever the dtype of weight. Raises ValueError for shapes that do
    not fit or an unknown activation.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] != x.shape[2]:
        raise ValueError(f"causal_conv takes x (B, T, D) and weight (K, D), not {tuple(x.shape)} and {tuple(weight.shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation = {activation!r}: allowed are None and 'silu'")
    if tail is not None:
        # The inputs before x are just more rows on top. Streaming passes a few tokens at a time, so this is cheap.
        if tail.shape != (x.shape[0], weight.shape[0] - 1, x.shape[2]):
            raise ValueError(f"tail must be (B, K-1, D) for x {tuple(x.shape)} and K = {weight.shape[0]}, not {tuple(tail.shape)}")
        y = causal_conv(torch.cat([tail.to(x.dtype), x], dim=1), weight, residual, activation)
        return y[:, tail.shape[1] :]
    if triton is not None and x.is_cuda and x.dtype != torch.float64 and len(weight) <= 4:
        return causal_conv_triton(x, weight, residual, activation)
    if x.numel() == 0:
        return causal_conv_reference(x, weight, residual, activation)
    return causal_conv_pytorch(x, weight, residual, activation)


# ------------------------------------------------------------------------------------------------------------
# 6. Checks and benchmark (who copies the layer can leave them out)
# ------------------------------------------------------------------------------------------------------------


def conv1d(x, weight, residual=True, activation=None):
    """The same by torch.nn.functional.conv1d(groups=D), which wants (B, D, T) and convolves with a flipped kernel."""
    K, D = weight.shape
    kernel = weight.flip(0).t().reshape(D, 1, K).to(x.dtype)
    z = F.conv1d(F.pad(x.transpose(1, 2), (K - 1, 0)), kernel, groups=D).transpose(1, 2)
    z = F.silu(z) if activation == "silu" else z
    return x + z if residual else z


def implementations(device):
    """name -> function(x, weight, residual, activation) for what runs on this device."""
    found = {"definition": causal_conv_reference, "PyTorch": causal_conv_pytorch, "nn.Conv1d": conv1d}
    if device == "cuda" or can_compile_on_cpu():
        found["torch.compile"] = torch.compile(causal_conv_pytorch)
    if triton is not None and (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        found["Triton"] = causal_conv_triton
    return found


def can_compile_on_cpu():
    """Whether torch.compile works on the CPU: it writes C++, which includes Python.h, and calls a compiler. PyTorch 2.6 does not count,
    as gcc 12 compiles what it writes for an embedding's gradient wrongly."""
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    compilers = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl"))
    return torch.__version__ >= (2, 7) and os.path.exists(header) and any(map(shutil.which, compilers))


def value_and_grads(conv, x, weight, dy, *options):
    """(y, dx, dw) of one implementation, as float64."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = conv(x, weight, *options)
    y.backward(dy.to(y.dtype))
    return [u.detach().double() for u in (y, x.grad, weight.grad)]


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


def check(device):
    """Largest relative error of y, dx and dw of every implementation against the definition in float64: {name: {dtype: error}}."""
    interpreted = "; * in the interpreter" if device == "cpu" else ""
    print(f"relative error |a - b| / |b| against float64 ({device}{interpreted}), worst of y, dx, dw")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    print(f"{'':16}" + "".join(f"{str(d)[6:]:>12}" for d in dtypes))
    found = {}
    for name, conv in implementations(device).items():
        worst = []
        shapes = ((3, 37, 300),) if name == "torch.compile" else ((2, 1, 5), (1, 2, 64), (3, 37, 300))  # it compiles for each
        for dtype in dtypes:
            errors = []
            torch._dynamo.reset()
            for B, T, D in shapes:
                for K, residual, activation in ((4, True, None), (3, False, "silu"), (2, True, "silu")):
                    x = torch.randn(B, T, 2 * D, device=device, dtype=dtype)[..., D:]  # a slice: strided
                    w = (torch.rand(K, D, device=device) * 2 - 1) * K**-0.5
                    dy = torch.randn(B, T, D, device=device, dtype=dtype)
                    got = value_and_grads(conv, x, w, dy, residual, activation)
                    want = value_and_grads(causal_conv_reference, x.double(), w.double(), dy.double(), residual, activation)
                    errors += [relative_error(g, r) for g, r in zip(got, want)]
            worst.append(max(errors))
            # float32 sums and one rounding to dtype; Conv1d, not ours, also rounds the weights and between its steps
            limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
            if not all(error < limit for error in errors) and name != "nn.Conv1d":  # NaN is under no limit
                raise SystemExit(f"{name}, {dtype}: relative error {max(errors):.1e} is over {limit:.0e}")
        star = "*" if name == "Triton" and device == "cpu" else " "
        print(f"{name + star:16}" + "".join(f"{e:12.1e}" for e in worst))
        found[name] = {str(dtype)[6:]: error for dtype, error in zip(dtypes, worst)}
    return found


def quartiles_ms(f, device):
    """Milliseconds of f(), after a warm-up: the lower quartile, the median, the upper quartile."""
    if device == "cuda" and triton is not None:  # its timer empties the cache between runs and keeps the queue full
        return triton.testing.do_bench(f, quantiles=(0.25, 0.5, 0.75))
    for _ in range(3):
        f()
    times, start = [], time.perf_counter()
    while len(times) < 10 or time.perf_counter() - start < 0.5:
        begin = time.perf_counter()
        f()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.quantiles(times, n=4)


def benchmark(device, shapes, dtype):
    """Times of every implementation, forward and backward, in ms, GB/s and as a share of a copy's bandwidth: a list of dicts."""
    print(f"\nmedian times (quartiles), {str(dtype)[6:]}, K = 4, residual; GB/s counts x and y once (forward), x, dy and dx once (backward)")
    found = []
    for B, T, D in shapes:
        x = torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True)
        w = ((torch.rand(4, D, device=device) * 2 - 1) / 2).requires_grad_()
        dy, out = torch.randn_like(x), torch.empty_like(x)
        gigabytes = x.numel() * x.element_size() / 1e9
        copy_rate = 2 * gigabytes / quartiles_ms(lambda: out.copy_(x.detach()), device)[1] * 1e3
        print(f"(B, T, D) = ({B}, {T}, {D}); a copy moves {copy_rate:.0f} GB/s")
        print(f"{'':16}{'forward ms':>24}{'GB/s':>8}{'of copy':>9}{'backward ms':>24}{'GB/s':>8}{'of copy':>9}")
        torch._dynamo.reset()
        for name, conv in implementations(device).items():
            if name == "Triton" and device == "cpu":
                continue  # the interpreter is for checking
            y = conv(x, w)
            line, row = f"{name:16}", {"B": B, "T": T, "D": D, "dtype": str(dtype)[6:], "implementation": name, "copy_gb_per_s": copy_rate}
            for part, f, passes in (("forward", lambda: conv(x, w), 2),
                                    ("backward", lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True), 3)):  # fmt: skip
                low, median, high = quartiles_ms(f, device)
                rate = passes * gigabytes / median * 1e3
                line += f"{f'{median:.3f} ({low:.3f}-{high:.3f})':>24}{rate:8.0f}{rate / copy_rate:9.0%}"
                row |= {f"{part}_ms": [low, median, high], f"{part}_gb_per_s": rate, f"{part}_of_copy": rate / copy_rate}
            print(line, flush=True)
            found.append(row)
    return found


def device_name(device):
    """As it stands over a table of times, and in a run's configuration."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{device}, {torch.get_num_threads()} threads"


def json_file(text):
    """A --json argument: a path whose folder is there, so that nothing is measured in vain."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that exists")
    return Path(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Check every form of the convolution against float64 and time it.", usage=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="save errors and times there, too")
    args = parser.parse_args(argv)
    device = args.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device that PyTorch can use")
    torch.manual_seed(0)
    about = {"device": device_name(device), "torch": torch.__version__, "triton": triton.__version__ if triton else "not installed"}
    print("; ".join([about["device"], f"torch {about['torch']}", f"triton {about['triton']}"]) + "\n")
    errors = check(device)
    if device == "cuda":  # the widths of Canon A/C, B and D in a 768-wide model; then as many tokens in shorter and longer sequences
        shapes = [(16, 2048, 768), (16, 2048, 2304), (16, 2048, 4096)] + [(2**15 // T, T, 2304) for T in (1, 16, 256, 2**14)]
        times = benchmark(device, shapes, torch.bfloat16)
    else:
        times = benchmark(device, ((64, 64, 64), (64, 64, 192), (64, 64, 336)), torch.float32)
    if args.json:
        about["date"] = time.strftime("%Y-%m-%d")
        args.json.write_text(json.dumps({**about, "errors": errors, "times": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
