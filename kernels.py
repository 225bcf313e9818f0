"""The causal convolution behind every Canon layer: its definition, two fast forms, their checks.

A Canon layer (paper Section 4, Eq. 4.1) adds to each hidden state a weighted sum of itself and of the K-1
states before it, with one weight a channel and a distance:

    z_t = w_0 * h_t + w_1 * h_{t-1} + .. + w_{K-1} * h_{t-K+1}        (elementwise; h is zero before the start)
    y_t = h_t + z_t                                                   (the residual)

No sum runs over channels, so this is a *depthwise* convolution: K = 4 multiply-adds for every number read. For each number that
its memory delivers, a GPU has time for a dozen instructions, so if the rest is kept short (section 3), the cost is memory
traffic. The ideal forward pass reads x once and writes y once, just as a plain copy does; the ideal backward
pass reads x and dy once and writes dx. That is cheap beside a block's matrix products: they do D multiply-adds for every
number they read, hundreds of times as many, and that arithmetic takes longer than one more pass over x.

Reading order:
  1. the definition, shift-and-add in plain PyTorch (`causal_conv_reference`); everything is tested against it
  2. the same in PyTorch without temporaries, for the CPU and any device without Triton
  3. the Triton kernels: the walk, the pointers, the backward pass; and the same with a gated MLP's activation
  4. the kernels as a PyTorch operator, so that autograd and torch.compile know it
  5. `causal_conv`, the function that the models call: it picks
  6. `python kernels.py` checks every form against float64 and times it beside a plain copy
Marks such as `# exercise N` are for those who make an assignment of it (README.md).

From canon-gpt; MIT licence, copyright (c) 2026 the canon-gpt authors.
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
    activation  None; "silu" for SiLU of z, before the residual; "swiglu", after the residual, for SiLU of the first half of
                the channels times the second half: the gated MLP's (D must be even)
    tail        (B, K-1, D), the inputs just before x; None means zeros
    returns     (B, T, D), with "swiglu" (B, T, D/2), in x's dtype, computed in float32 (in float64 if x is)
    """
    K, T = weight.shape[0], x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(dtype), weight.to(dtype)
    # exercise 1: z
    # past[:, K-1+t] is h_t, so the copy shifted by i starts at K-1-i
    past = F.pad(h, (0, 0, K - 1, 0)) if tail is None else torch.cat([tail.to(dtype), h], dim=1)
    z = sum(w[i] * past[:, K - 1 - i : K - 1 - i + T] for i in range(K))  # (B, T, D)
    # end of exercise
    return finish(h, z, residual, activation).to(x.dtype)


def finish(h, z, residual, activation):
    """From the convolution z of h to the result."""
    y = F.silu(z) if activation == "silu" else z
    if residual:
        y = h + y
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y


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
    # exercise 2: in place, without shifted copies
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
        # exercise 2
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
    if residual and activation != "silu":
        w, residual = torch.cat([w[:1] + 1, w[1:]]), False
    return finish(h, ShiftAndAdd.apply(h, w), residual, activation).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------
# 3. The Triton kernels: what runs on CUDA
#
# The walk. A program is one warp: 32 threads in lockstep. It walks down a strip of COLS channels, of which each thread takes COLS / 32, four
# rows (tokens) a step, and keeps the three rows above in registers. So it fetches a number once:
#
#              <-- COLS channels -->
#       x3    . . . . . . . . . . .
#       x2    . . . . . . . . . . .          kept from the step before
#       x1    . . . . . . . . . . .
#       a    +---------------------+         y_a = w_0 a + w_1 x1 + w_2 x2 + w_3 x3
#       b    |  fetched together:  |         y_b = w_0 b + w_1 a  + w_2 x1 + w_3 x2
#       c    |  memory is far away |         y_c = w_0 c + w_1 b  + w_2 a  + w_3 x1
#       d    +---------------------+         y_d = w_0 d + w_1 c  + w_2 b  + w_3 a        then x3, x2, x1 = b, c, d
#
# Four such rows are a group. A sequence of T tokens has n = ceil((T + 3) / 4) groups, so that three to six rows behind its end are not there,
# and count as zeros. So when a walk comes to the next sequence, the three rows that it keeps are zeros, as they have to be before
# its first token; only the pointer and the time t jump. The batch has N = B n groups. A walk is `length` of them (8, or backward 32;
# fewer if that makes too few walks, and in the last walk), and there is a program for every walk and strip. Only the three rows above a
# walk's start are fetched twice (six backward, if there is an activation).
#
# The pointers. In a sequence, row t lies t * stride behind row 0; sequences lie `jump` apart (x.stride(1) and x.stride(0)); channels
# lie side by side. So with cols a vector of channels, ptr + i * stride + cols is a vector of addresses, those of row i as seen from
# ptr, and a slice of a wider projection works without a copy. Loads and stores are masked: what is not there reads as zero and is
# not written.
#
# The backward pass walks over x and dy together. By section 2, dx_{t-3} = w_3 dy_t + w_2 dy_{t-1} + w_1 dy_{t-2} + w_0 dy_{t-3}: once dy_t .. dy_{t+3}
# are there, dx_{t-3} .. dx_t are complete, the same convolution with the weights in reverse order. So a step stores dx three rows above what
# it loads: a walk's first step finishes the rows above its start, for which it fetches their dy, and the zeros behind a sequence let its last
# rows out. And dw_i is the sum of dy_t x_{t-i}, of which a step has both; each dy_t counts in one walk only. So one pass over x and dy
# gives everything. Each walk has a line, K by D, in a float32 table for its sums, and the lines are added afterwards: unlike atomic adds,
# that gives the same bits in every run.
#
# With an activation, the backward pass convolves x once more, as arithmetic is cheaper than memory, and goes on with the gradient of what
# the convolution gave where dy stood. (For the rows above a walk's start it needs x three rows further up.) SwiGLU, silu(gate) * up,
# which follows Canon-D, is an activation of two strips: its kernels read gate and up and write one result, as the activation would
# without Canon-D.
#
# What is fast. An H200 has time for some 12 instructions of a thread for each bfloat16 number that its memory brings or takes, and masks,
# addresses and conversions are instructions, too (results/machine_code.py counts them). So rows, weights and sums stay in each thread's
# registers, and no warp waits for another. Triton cannot pick a row out of a tensor in registers: hence four names for everything, and K
# of at most 4.
# ------------------------------------------------------------------------------------------------------------

if triton is not None:
    # part of a kernel; Triton's interpreter runs plain functions just as well, and twice as fast
    inlined = (lambda function: function) if os.environ.get("TRITON_INTERPRET") == "1" else triton.jit

    @inlined
    def load_row(ptr, i, stride, t, T, cols, end):
        """Row i of the group at ptr, which starts at time t: (COLS,) float32. Zeros outside of the sequence, and from channel `end` on.
        A row that is not there has no channels."""
        there = cols < tl.where((t + i >= 0) & (t + i < T), end, 0)
        return tl.load(ptr + i * stride + cols, mask=there, other=0.0).to(tl.float32)

    @inlined
    def load_three(ptr, i, stride, t, T, cols, end):
        return (
            load_row(ptr, i, stride, t, T, cols, end),
            load_row(ptr, i + 1, stride, t, T, cols, end),
            load_row(ptr, i + 2, stride, t, T, cols, end),
        )

    @inlined
    def load_four(ptr, stride, t, T, cols, end):
        a, b, c = load_three(ptr, 0, stride, t, T, cols, end)
        return a, b, c, load_row(ptr, 3, stride, t, T, cols, end)

    @inlined
    def store_row(ptr, i, stride, t, T, cols, end, y):
        there = cols < tl.where((t + i >= 0) & (t + i < T), end, 0)
        tl.store(ptr + i * stride + cols, y.to(ptr.dtype.element_ty), mask=there)

    @inlined
    def store_four(ptr, i, stride, t, T, cols, end, a, b, c, d):
        store_row(ptr, i, stride, t, T, cols, end, a)
        store_row(ptr, i + 1, stride, t, T, cols, end, b)
        store_row(ptr, i + 2, stride, t, T, cols, end, c)
        store_row(ptr, i + 3, stride, t, T, cols, end, d)

    @inlined
    def load_weights(w_ptr, D, cols, K: tl.constexpr, RESIDUAL: tl.constexpr):
        """w_0 .. w_3, each (COLS,): the rows of a sequence of K. The residual is one more in w_0."""
        w0, w1, w2, w3 = load_four(w_ptr, D, 0, K, cols, D)
        if RESIDUAL:
            w0 += 1
        return w0, w1, w2, w3

    @inlined
    def convolve(x3, x2, x1, a, b, c, d, w0, w1, w2, w3):
        """y_a, y_b, y_c, y_d."""
        # exercise 12
        return (
            w0 * a + w1 * x1 + w2 * x2 + w3 * x3,
            w0 * b + w1 * a + w2 * x1 + w3 * x2,
            w0 * c + w1 * b + w2 * a + w3 * x1,
            w0 * d + w1 * c + w2 * b + w3 * a,
        )

    @inlined
    def add_products(dw0, dw1, dw2, dw3, x3, x2, x1, a, b, c, d, p, q, r, s):
        """dw_0 .. dw_3, each with what comes of the gradients p, q, r, s at rows a, b, c, d added."""
        # exercise 13
        return (
            dw0 + p * a + q * b + r * c + s * d,
            dw1 + p * x1 + q * a + r * b + s * c,
            dw2 + p * x2 + q * x1 + r * a + s * b,
            dw3 + p * x3 + q * x2 + r * x1 + s * a,
        )

    @inlined
    def silu(z):
        return z * tl.sigmoid(z)

    @inlined
    def silu_backward(z, dy):
        """dy times the derivative of silu at z."""
        s = tl.sigmoid(z)
        return dy * (s + z * s * (1 - s))

    @inlined
    def swiglu_backward(gate, up, dy):
        """The gradients of gate and up if silu(gate) * up has the gradient dy."""
        return silu_backward(gate, dy * up), dy * silu(gate)

    @inlined
    def start(n, length, D, COLS: tl.constexpr):
        """A program's walk, its first group, that group's first time, and the channels of its strip. Neighbouring programs take
        neighbouring strips of the same rows: together they read whole rows."""
        strips = tl.cdiv(D, COLS)
        walk = tl.program_id(0) // strips
        cols = tl.program_id(0) % strips * COLS + tl.arange(0, COLS)
        return walk, walk * length, walk * length % n * 4, cols

    @inlined
    def at(ptr, group, n, jump, stride):
        """Where the first row of a group is; in 64 bits, as a large tensor has more than 2^31 numbers."""
        return ptr + (group // n).to(tl.int64) * jump + (group % n * 4).to(tl.int64) * stride

    @inlined
    def after(ptr, t, n, jump, stride):
        """Where the group after the one at ptr is: four rows on, or at the start of the next sequence."""
        back = jump - tl.cast(n * 4, tl.int64) * stride
        return ptr + 4 * stride + tl.where(t + 4 == n * 4, back, 0)

    @triton.jit
    def forward_kernel(x_ptr, w_ptr, y_ptr, N, n, length, T, x_jump, x_stride,
                       D: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
        walk, first, t, cols = start(n, length, D, COLS)
        w0, w1, w2, w3 = load_weights(w_ptr, D, cols, K, RESIDUAL and not SILU)
        y_jump = tl.cast(T, tl.int64) * D
        x, y = at(x_ptr, first, n, x_jump, x_stride), at(y_ptr, first, n, y_jump, D)
        # exercise 12
        x3, x2, x1 = load_three(x, -3, x_stride, t, T, cols, D)
        for _ in range(tl.minimum(length, N - first)):
            a, b, c, d = load_four(x, x_stride, t, T, cols, D)
            p, q, r, s = convolve(x3, x2, x1, a, b, c, d, w0, w1, w2, w3)
            if SILU:
                p, q, r, s = silu(p), silu(q), silu(r), silu(s)
                if RESIDUAL:
                    p, q, r, s = p + a, q + b, r + c, s + d
            store_four(y, 0, D, t, T, cols, D, p, q, r, s)
            x3, x2, x1 = b, c, d
            x, y = after(x, t, n, x_jump, x_stride), after(y, t, n, y_jump, D)
            t = tl.where(t + 4 == n * 4, 0, t + 4)

    @triton.jit
    def backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, N, n, length, T, x_jump, x_stride,
                        D: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
        """p, q, r, s are the gradients at rows a, b, c, d, and g3, g2, g1 those at x3, x2, x1. With SILU the residual's dy is the caller's to add."""
        walk, first, t, cols = start(n, length, D, COLS)
        w0, w1, w2, w3 = load_weights(w_ptr, D, cols, K, RESIDUAL and not SILU)
        y_jump = tl.cast(T, tl.int64) * D  # dy and dx are contiguous
        x, dy, dx = at(x_ptr, first, n, x_jump, x_stride), at(dy_ptr, first, n, y_jump, D), at(dx_ptr, first, n, y_jump, D)
        # exercise 13
        x3, x2, x1 = load_three(x, -3, x_stride, t, T, cols, D)
        g3, g2, g1 = load_three(dy, -3, D, t, T, cols, D)
        if SILU:
            x6, x5, x4 = load_three(x, -6, x_stride, t, T, cols, D)
            e, f, g, _ = convolve(x6, x5, x4, x3, x2, x1, x1, w0, w1, w2, w3)  # no fourth row is needed
            g3, g2, g1 = silu_backward(e, g3), silu_backward(f, g2), silu_backward(g, g1)
        dw0 = tl.zeros((COLS,), tl.float32)
        dw1, dw2, dw3 = dw0, dw0, dw0
        for _ in range(tl.minimum(length, N - first)):
            a, b, c, d = load_four(x, x_stride, t, T, cols, D)
            p, q, r, s = load_four(dy, D, t, T, cols, D)
            if SILU:
                e, f, g, h = convolve(x3, x2, x1, a, b, c, d, w0, w1, w2, w3)
                p, q, r, s = silu_backward(e, p), silu_backward(f, q), silu_backward(g, r), silu_backward(h, s)
            dw0, dw1, dw2, dw3 = add_products(dw0, dw1, dw2, dw3, x3, x2, x1, a, b, c, d, p, q, r, s)
            dx0, dx1, dx2, dx3 = convolve(g3, g2, g1, p, q, r, s, w3, w2, w1, w0)
            store_four(dx, -3, D, t, T, cols, D, dx0, dx1, dx2, dx3)
            x3, x2, x1 = b, c, d
            g3, g2, g1 = q, r, s
            x, dy, dx = after(x, t, n, x_jump, x_stride), after(dy, t, n, y_jump, D), after(dx, t, n, y_jump, D)
            t = tl.where(t + 4 == n * 4, 0, t + 4)
        # end of exercise
        store_four(dw_ptr + walk.to(tl.int64) * K * D, 0, D, 0, K, cols, D, dw0, dw1, dw2, dw3)  # as the rows of a sequence of K

    # SwiGLU. x holds gate and up side by side, W channels each. Of gate the rows are x3, x2, x1, a, b, c, d, the weights w0 .. w3, what the
    # convolution gives and then its gradients p, q, r, s, of which g3, g2, g1 are kept. Of up these are u3, u2, u1, e, f, g, h; v0 .. v3; i,
    # j, k, l; h3, h2, h1.

    @triton.jit
    def swiglu_forward_kernel(x_ptr, w_ptr, y_ptr, N, n, length, T, x_jump, x_stride,
                              W: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
        D: tl.constexpr = 2 * W
        walk, first, t, cols = start(n, length, W, COLS)
        w0, w1, w2, w3 = load_weights(w_ptr, D, cols, K, RESIDUAL)
        v0, v1, v2, v3 = load_weights(w_ptr, D, W + cols, K, RESIDUAL)
        y_jump = tl.cast(T, tl.int64) * W
        x, y = at(x_ptr, first, n, x_jump, x_stride), at(y_ptr, first, n, y_jump, W)
        # exercise 12
        x3, x2, x1 = load_three(x, -3, x_stride, t, T, cols, W)
        u3, u2, u1 = load_three(x, -3, x_stride, t, T, W + cols, D)
        for _ in range(tl.minimum(length, N - first)):
            a, b, c, d = load_four(x, x_stride, t, T, cols, W)
            e, f, g, h = load_four(x, x_stride, t, T, W + cols, D)
            p, q, r, s = convolve(x3, x2, x1, a, b, c, d, w0, w1, w2, w3)
            i, j, k, l = convolve(u3, u2, u1, e, f, g, h, v0, v1, v2, v3)
            store_four(y, 0, W, t, T, cols, W, silu(p) * i, silu(q) * j, silu(r) * k, silu(s) * l)
            x3, x2, x1 = b, c, d
            u3, u2, u1 = f, g, h
            x, y = after(x, t, n, x_jump, x_stride), after(y, t, n, y_jump, W)
            t = tl.where(t + 4 == n * 4, 0, t + 4)

    @triton.jit
    def swiglu_backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, N, n, length, T, x_jump, x_stride,
                               W: tl.constexpr, K: tl.constexpr, RESIDUAL: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
        D: tl.constexpr = 2 * W
        walk, first, t, cols = start(n, length, W, COLS)
        w0, w1, w2, w3 = load_weights(w_ptr, D, cols, K, RESIDUAL)
        v0, v1, v2, v3 = load_weights(w_ptr, D, W + cols, K, RESIDUAL)
        y_jump = tl.cast(T, tl.int64) * W
        x, dy, dx = at(x_ptr, first, n, x_jump, x_stride), at(dy_ptr, first, n, y_jump, W), at(dx_ptr, first, n, 2 * y_jump, D)
        # exercise 13
        x6, x5, x4 = load_three(x, -6, x_stride, t, T, cols, W)
        x3, x2, x1 = load_three(x, -3, x_stride, t, T, cols, W)
        u6, u5, u4 = load_three(x, -6, x_stride, t, T, W + cols, D)
        u3, u2, u1 = load_three(x, -3, x_stride, t, T, W + cols, D)
        dy0, dy1, dy2 = load_three(dy, -3, W, t, T, cols, W)
        p, q, r, _ = convolve(x6, x5, x4, x3, x2, x1, x1, w0, w1, w2, w3)
        i, j, k, _ = convolve(u6, u5, u4, u3, u2, u1, u1, v0, v1, v2, v3)
        g3, h3 = swiglu_backward(p, i, dy0)
        g2, h2 = swiglu_backward(q, j, dy1)
        g1, h1 = swiglu_backward(r, k, dy2)
        dw0 = tl.zeros((COLS,), tl.float32)
        dw1, dw2, dw3, dv0, dv1, dv2, dv3 = dw0, dw0, dw0, dw0, dw0, dw0, dw0
        for _ in range(tl.minimum(length, N - first)):
            a, b, c, d = load_four(x, x_stride, t, T, cols, W)
            e, f, g, h = load_four(x, x_stride, t, T, W + cols, D)
            dy0, dy1, dy2, dy3 = load_four(dy, W, t, T, cols, W)
            p, q, r, s = convolve(x3, x2, x1, a, b, c, d, w0, w1, w2, w3)
            i, j, k, l = convolve(u3, u2, u1, e, f, g, h, v0, v1, v2, v3)
            p, i = swiglu_backward(p, i, dy0)  # from here on p .. s and i .. l are the gradients
            q, j = swiglu_backward(q, j, dy1)
            r, k = swiglu_backward(r, k, dy2)
            s, l = swiglu_backward(s, l, dy3)
            dw0, dw1, dw2, dw3 = add_products(dw0, dw1, dw2, dw3, x3, x2, x1, a, b, c, d, p, q, r, s)
            dv0, dv1, dv2, dv3 = add_products(dv0, dv1, dv2, dv3, u3, u2, u1, e, f, g, h, i, j, k, l)
            dx0, dx1, dx2, dx3 = convolve(g3, g2, g1, p, q, r, s, w3, w2, w1, w0)
            store_four(dx, -3, D, t, T, cols, W, dx0, dx1, dx2, dx3)
            dx0, dx1, dx2, dx3 = convolve(h3, h2, h1, i, j, k, l, v3, v2, v1, v0)
            store_four(dx, -3, D, t, T, W + cols, D, dx0, dx1, dx2, dx3)
            x3, x2, x1 = b, c, d
            u3, u2, u1 = f, g, h
            g3, g2, g1 = q, r, s
            h3, h2, h1 = j, k, l
            x, dy, dx = after(x, t, n, x_jump, x_stride), after(dy, t, n, y_jump, W), after(dx, t, n, 2 * y_jump, D)
            t = tl.where(t + 4 == n * 4, 0, t + 4)
        # end of exercise
        line = dw_ptr + walk.to(tl.int64) * K * D
        store_four(line, 0, D, 0, K, cols, W, dw0, dw1, dw2, dw3)
        store_four(line, 0, D, 0, K, W + cols, D, dv0, dv1, dv2, dv3)


# ------------------------------------------------------------------------------------------------------------
# 4. The kernels as an operator of PyTorch
#
# A custom operator is a black box with a signature. torch.compile needs to know only what comes out (the "fake"
# version: shapes and dtypes, no data); autograd needs to know which operator runs backward.
# ------------------------------------------------------------------------------------------------------------


def output_shape(x, activation):
    return (*x.shape[:2], x.shape[2] // 2) if activation == "swiglu" else x.shape


def channels_together(x):
    """x (B, T, D), copied if its channels do not lie side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def walks(x, width, longest):
    """How to go over x (B, T, D) in strips that cover `width` channels: the number of walks and of programs, (N, n, length), and COLS."""
    n = triton.cdiv(x.shape[1] + 3, 4)
    N, cols = x.shape[0] * n, max(32, min(128, triton.next_power_of_2(width)))  # a thread has one channel at least
    strips, length = triton.cdiv(width, cols), longest
    while length > 4 and triton.cdiv(N, length) * strips < 4096:  # a large GPU runs some 4,000 programs side by side
        length //= 2
    count = triton.cdiv(N, length)
    return count, count * strips, (N, n, length), cols


@torch.library.custom_op("canon::causal_conv", mutates_args=())
def conv_op(x: torch.Tensor, weight: torch.Tensor, residual: bool, activation: str) -> torch.Tensor:
    y = torch.empty(output_shape(x, activation), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, D = channels_together(x), y.shape[2]
    _, programs, groups, cols = walks(x, D, 8)
    sizes = (*groups, x.shape[1], x.stride(0), x.stride(1), D, len(weight), residual)
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
        if activation == "swiglu":
            swiglu_forward_kernel[(programs,)](x, weight, y, *sizes, cols, num_warps=1)
        else:
            forward_kernel[(programs,)](x, weight, y, *sizes, activation == "silu", cols, num_warps=1)
    return y


@conv_op.register_fake
def _(x, weight, residual, activation):
    return torch.empty(output_shape(x, activation), dtype=x.dtype, device=x.device)


@torch.library.custom_op("canon::causal_conv_backward", mutates_args=())
def conv_backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: bool, activation: str
) -> Tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight)
    x, dy, D = channels_together(x), dy.contiguous(), dy.shape[2]
    count, programs, groups, cols = walks(x, D, 32)  # longer walks than forward: fewer lines in the table
    dw = torch.empty(count, *weight.shape, dtype=torch.float32, device=x.device)
    sizes = (*groups, x.shape[1], x.stride(0), x.stride(1), D, len(weight), residual)
    with torch.cuda.device_of(x):
        if activation == "swiglu":
            swiglu_backward_kernel[(programs,)](dy, x, weight, dx, dw, *sizes, cols, num_warps=1)
        else:
            backward_kernel[(programs,)](dy, x, weight, dx, dw, *sizes, activation == "silu", cols, num_warps=1)
    if residual and activation == "silu":
        dx += dy
    return dx, dw.sum(0).to(weight.dtype)


@conv_backward_op.register_fake
def _(dy, x, weight, residual, activation):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _backward(ctx, dy):
    return *conv_backward_op(dy, *ctx.saved_tensors, *ctx.options), None, None


conv_op.register_autograd(_backward, setup_context=_save)


def causal_conv_triton(x, weight, residual=True, activation=None):
    """`causal_conv_reference` without a tail, by the Triton kernels; K <= 4, x float32, bfloat16 or float16."""
    if len(weight) > 4:
        raise ValueError(f"the kernels take up to 4 weights a channel, not {len(weight)}")
    return conv_op(x, weight.contiguous(), residual, activation or "")


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
    if activation not in (None, "silu", "swiglu"):
        raise ValueError(f"activation = {activation!r}: allowed are None, 'silu' and 'swiglu'")
    if activation == "swiglu" and x.shape[2] % 2:
        raise ValueError(f"swiglu takes gate and up of the same width, not {x.shape[2]} channels in all")
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
    return finish(x, z, residual, activation)


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


def gpu_has_bfloat16():
    """Whether the GPU has instructions for it, as NVIDIA's have since Ampere. Without (T4, V100) PyTorch emulates it slowly, and does not compile."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


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
        large = (2, 150, 300) if device == "cuda" else (2, 9, 150)  # on a CPU small, as the interpreter takes milliseconds a row
        shapes = (large,) if name == "torch.compile" else ((2, 1, 6), (1, 2, 64), large)  # it compiles for each
        for dtype in dtypes:
            errors = []
            torch._dynamo.reset()
            for B, T, D in shapes:
                for K, residual, activation in ((4, True, None), (3, False, "silu"), (2, True, "silu"), (4, True, "swiglu")):
                    x = torch.randn(B, T, 2 * D, device=device, dtype=dtype)[..., D:]  # a slice: strided
                    w = (torch.rand(K, D, device=device) * 2 - 1) * K**-0.5
                    dy = torch.randn(output_shape(x, activation), device=device, dtype=dtype)
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
    """Milliseconds of f(), after a warm-up: the lower quartile, the median, the upper quartile. On CUDA, what the GPU takes: it sleeps while
    the first calls are launched, as launching can take longer than a small kernel."""
    for _ in range(3):
        f()
    times, start = [], time.perf_counter()
    while len(times) < 10 or time.perf_counter() - start < 0.5:
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(10_000_000)  # cycles: some 5 ms
            begin.record()
            for _ in range(10):
                f()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 10)
        else:
            begin = time.perf_counter()
            f()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.quantiles(times, n=4)


def benchmark(device, shapes, dtype):
    """Times of every implementation, forward and backward, in ms, GB/s and as a share of a copy's bandwidth: a list of dicts."""
    print(f"\nmedian times (quartiles), {str(dtype)[6:]}, K = 4, residual; GB/s counts x and y once (forward), x, dy and dx once (backward)")
    found = []
    for B, T, D, activation in shapes:
        x = torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True)
        w = ((torch.rand(4, D, device=device) * 2 - 1) / 2).requires_grad_()
        dy, out = torch.randn(output_shape(x, activation), device=device, dtype=dtype), torch.empty_like(x)
        forward_gb, backward_gb = ((x.numel() * n + dy.numel()) * x.element_size() / 1e9 for n in (1, 2))
        copy_rate = 2 * x.numel() * x.element_size() / 1e9 / quartiles_ms(lambda: out.copy_(x.detach()), device)[1] * 1e3
        print(f"(B, T, D) = ({B}, {T}, {D}){', then SwiGLU' if activation else ''}; a copy moves {copy_rate:.0f} GB/s")
        print(f"{'':16}{'forward ms':>24}{'GB/s':>8}{'of copy':>9}{'backward ms':>24}{'GB/s':>8}{'of copy':>9}")
        torch._dynamo.reset()
        for name, conv in implementations(device).items():
            if name == "Triton" and device == "cpu":
                continue  # the interpreter is for checking
            y = conv(x, w, True, activation)
            line, row = f"{name:16}", {"B": B, "T": T, "D": D, "activation": activation, "dtype": str(dtype)[6:], "implementation": name,
                                       "copy_gb_per_s": copy_rate}  # fmt: skip
            for part, f, gigabytes in (("forward", lambda: conv(x, w, True, activation), forward_gb),
                                       ("backward", lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True), backward_gb)):  # fmt: skip
                low, median, high = quartiles_ms(f, device)
                rate = gigabytes / median * 1e3
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
        shapes = [(16, 2048, 768, None), (16, 2048, 2304, None), (16, 2048, 4096, None), (16, 2048, 4096, "swiglu")]
        shapes += [(2**15 // T, T, 2304, None) for T in (1, 16, 256, 2**14)]
        times = benchmark(device, shapes, torch.bfloat16 if gpu_has_bfloat16() else torch.float16)
    else:
        shapes = ((64, 64, 64, None), (64, 64, 192, None), (64, 64, 336, None), (64, 64, 336, "swiglu"))
        times = benchmark(device, shapes, torch.float32)
    if args.json:
        about["date"] = time.strftime("%Y-%m-%d")
        args.json.write_text(json.dumps({**about, "errors": errors, "times": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
