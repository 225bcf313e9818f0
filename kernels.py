"""The causal convolution behind every Canon layer: its definition, and a fast form for each device.

A Canon layer adds to each hidden state h_t a weighted sum of itself and the three before it (Eq.
4.1 of "Physics of Language Models: Part 4.1", arXiv 2512.17351). Each channel has four weights of
its own, and h is 0 before the start:

    z_t = w_0 * h_t + w_1 * h_{t-1} + w_2 * h_{t-2} + w_3 * h_{t-3}        (elementwise)
    y_t = h_t + z_t                                                        (the residual)

Channels do not mix: this is a *depthwise* convolution. It does four multiply-adds for each number
that it reads, which cost a GPU almost nothing. The time goes into memory traffic, so the best form
reads x once and writes y once, like a plain copy.

(The size of the convolution, 4, is called `taps` here, because a *kernel* is a program for a GPU.)

Read in this order: 1 the definition; 2 its PyTorch form, for the CPU; 3 its Triton kernels, for the
GPU; 4 `causal_conv`, which picks one of them; 5 the check, which is `python kernels.py`.

You are welcome to copy this file, which needs nothing else of the repository (examples/README.md
says how).

From canon-gpt; MIT licence, copyright (c) 2026 the canon-gpt authors.
"""

import functools
import os
import sys

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

if __name__ == "__main__" and not torch.cuda.is_available():
    # Without a GPU the check runs the Triton kernels in Triton's interpreter, on the CPU. Triton
    # reads this variable when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch's CUDA builds bring Triton along; other builds do not need it
    triton = None


# ---- 1. The definition -----------------------------------------------------


def causal_conv_reference(x, weight, residual=True, tail=None):
    """Depthwise causal convolution over time (paper Eq. 4.1), as a sum of shifted copies of x.

    x         (B, T, D) float
    weight    (taps, D) float; weight[i] multiplies the input i steps back
    residual  whether to add x itself
    tail      (B, taps-1, D), the inputs just before x; None means zeros
    returns   (B, T, D) in x's dtype, computed in float32 (float64 if x is)
    """
    taps, T = weight.shape[0], x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(dtype), weight.to(dtype)
    n = taps - 1  # how many inputs before x it needs
    # F.pad counts from the last dim: nothing on the channels, then n zeros before the first token.
    longer = F.pad(h, (0, 0, n, 0)) if tail is None else torch.cat([tail.to(dtype), h], dim=1)
    z = 0
    for i in range(taps):
        z = z + w[i] * longer[:, n - i : n - i + T]  # w_i * h_{t-i}, (B, T, D)
    y = h + z if residual else z
    return y.to(x.dtype)


# ---- 2. In PyTorch: what runs on the CPU -----------------------------------
#
# PyTorch runs one operation at a time, and most operations write a whole new tensor. For each shift
# the definition writes two, a product and a sum, and its backward pass more. The form below adds
# each shift to the result in place, and its derivative is written by hand.
#
# The derivative of a convolution is a convolution. Token s is an input of y_s, y_{s+1}, y_{s+2} and
# y_{s+3}, with the weights w_0, w_1, w_2 and w_3. Let dy be the gradient of the loss with respect
# to y. The chain rule sums over all outputs in which an input or a weight takes part:
#
#     dh_s = sum_i w_i * dy_{s+i}          the same convolution, looking ahead instead of back
#     dw_i = sum_s dy_{s+i} * h_s          for each channel, over all sequences
#
# The residual needs no pass of its own: h_t + w_0 * h_t is (1 + w_0) * h_t.
#
# torch.compile makes one loop out of many operations, and this loop writes nothing but its result.
# So in compiled code a shifted copy costs nothing, because it is never written.


def shift(x, i):
    """x (B, T, D) moved i tokens down, or up if i is negative, with zeros in the free rows."""
    return F.pad(x, (0, 0, i, -i))  # adds i rows before the first, and takes i from the end


def look_back(x, weight):
    """sum_i weight[i] * x_{t-i}, for x (B, T, D) and weight (taps, D) with taps <= T."""
    if torch.compiler.is_compiling():
        return sum(weight[i] * shift(x, i) for i in range(len(weight)))
    T = x.shape[1]
    y = x * weight[0]
    for i in range(1, len(weight)):
        y[:, i:].addcmul_(x[:, : T - i], weight[i])  # y_t += weight[i] * x_{t-i}, for t >= i
    return y


def look_ahead(x, weight):
    """sum_i weight[i] * x_{t+i}, for x (B, T, D) and weight (taps, D) with taps <= T."""
    if torch.compiler.is_compiling():
        return sum(weight[i] * shift(x, -i) for i in range(len(weight)))
    T = x.shape[1]
    y = x * weight[0]
    for i in range(1, len(weight)):
        y[:, : T - i].addcmul_(x[:, i:], weight[i])  # y_t += weight[i] * x_{t+i}, for t < T - i
    return y


def weight_gradient(dy, x, taps):
    """(taps, D): sum_s dy_{s+i} * x_s over all tokens of all sequences, for dy and x (B, T, D)
    and taps <= T."""
    T = x.shape[1]
    rows = []
    for i in range(taps):
        if torch.compiler.is_compiling():
            products = shift(dy, -i) * x  # of one shape for all i, so one loop does all
        else:
            products = dy[:, i:] * x[:, : T - i]
        rows.append(products.sum(dim=1).sum(dim=0))  # (B, D), then (D,)
    return torch.stack(rows)


class PyTorchConvolution(torch.autograd.Function):
    """y (B, T, D) of x (B, T, D) and weight (taps, D), by the functions above; taps <= T."""

    generate_vmap_rule = True  # what torch.func needs, for gradients per sequence, say

    @staticmethod
    def forward(x, weight):
        return look_back(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return look_ahead(dy, weight), weight_gradient(dy, x, len(weight))


def with_residual(weight):
    """The weight (taps, D) with the residual in it: w_0 + 1, w_1, w_2, and so on."""
    return torch.cat([weight[:1] + 1, weight[1:]])


def causal_conv_pytorch(x, weight, residual=True):
    """`causal_conv_reference` without a tail, for any device and number of taps."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    T = x.shape[1]
    w = weight[:T].to(dtype)  # weight[T] and later ones would multiply inputs before the start
    if residual:
        w = with_residual(w)
    return PyTorchConvolution.apply(x.to(dtype), w).to(x.dtype)


def causal_conv_step(x, weight, residual, tail):
    """`causal_conv_reference` for one token, x (B, 1, D), and the tail before it. It has few
    operations, because to start them takes longer than to run them on so few numbers."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    inputs = torch.cat([tail, x], dim=1).to(dtype)  # (B, taps, D), the oldest first
    z = (inputs * weight.flip(0).to(dtype)).sum(dim=1, keepdim=True)
    y = x + z if residual else z
    return y.to(x.dtype)


# ---- 3. The Triton kernels: what runs on CUDA ------------------------------
#
# Triton runs many copies of a kernel at once. Each copy, a *program*, computes a part of y.
#
# In a naive kernel, a program would compute a tile of y: some tokens by some channels. It would
# load the tile of x at the same place, and the same tile shifted 1, 2 and 3 tokens back, and add up
# weight times tile. So it would load each number of x four times. Three of these loads find it in a
# cache, but each is one more instruction, and one more thing to wait for.
#
# In the kernels of this section, a thread keeps, for a few channels, ROWS (8) consecutive tokens in
# registers, and the three before them. It computes each y from four of these rows, which are drawn
# here as columns:
#
#     in registers   x_{t-3}   x_{t-2}   x_{t-1}   x_t       x_{t+1}   x_{t+2}   ..
#
#     y_t            w_3       w_2       w_1       w_0
#     y_{t+1}                  w_3       w_2       w_1       w_0
#     y_{t+2}                            w_3       w_2       w_1       w_0
#
# For 8 tokens that is 11 loads, where the naive kernel has 32. A warp can ask for all its rows
# before it uses the first, and then it waits for memory once. On an H100, the forward kernel took
# as long as a copy of x.
#
# A program has WARPS warps, groups of 32 threads. They share COLS channels, two or four a thread,
# and each warp takes the next ROWS tokens. The tokens of a program are a *segment* of the sequence,
# its channels a *strip*.
#
# A variable of a Triton kernel holds a whole block of numbers, and a block cannot be indexed: from
# one block of 11 tokens, no x_{t-1} could be picked. So each token has a block of its own, and a
# tuple holds the blocks, because a tuple can be indexed while the kernel is compiled. A block is
# (WARPS, COLS): number r of the tuple has token r of every warp. (Triton decides which thread holds
# what. No result depends on it.) A loop over tl.static_range is written out when the kernel is
# compiled, so each block has its own registers, and adding two blocks moves nothing between
# threads.
#
# Backward. By section 2, dx looks ahead: the same picture, with dy in place of x, and the three
# rows after a warp's own. dw_i is the sum over tokens of dy_{t+i} times x_t. A thread adds it up in
# registers while its warp takes STEPS groups of ROWS tokens in a row. At the end, each program
# writes what its segment adds to dw, in float32, and PyTorch sums over the segments. Unlike atomic
# additions, this gives the same bits in every run.

MAX_TAPS = 4  # the most that these kernels are tested with; PyTorch's form takes any

if triton is not None:
    # A Triton kernel sees only those globals that are constexpr.
    ROWS = tl.constexpr(8)  # tokens that a warp computes from registers at a time
    STEPS = tl.constexpr(4)  # times ROWS tokens, what a warp takes in the backward kernel

    @triton.jit
    def locate_program(
        T,
        width: tl.constexpr,  # for each value of a constexpr, Triton compiles another kernel
        WARPS: tl.constexpr,
        COLS: tl.constexpr,
        TOKENS: tl.constexpr,  # per warp
    ):
        """Which part of y (B, T, width) a program works on. Neighbouring programs take neighbouring
        strips of the same segment, so that together they read whole rows.

        segment   its number, counted through all sequences
        sequence  the number of the sequence that it lies in
        t         (WARPS, 1), the first token of each warp
        column    (1, COLS), the channels of the strip
        """
        program = tl.program_id(0)  # 0, 1, .., a different one in each program
        strips = tl.cdiv(width, COLS)
        per_sequence = tl.cdiv(T, WARPS * TOKENS)  # segments
        segment = program // strips
        sequence = (segment // per_sequence).to(tl.int64)  # 64 bits: x may have over 2^31 numbers
        warp = tl.arange(0, WARPS)[:, None]
        t = ((segment % per_sequence) * WARPS + warp) * TOKENS
        column = (program % strips) * COLS + tl.arange(0, COLS)[None, :]
        return segment, sequence, t, column

    # In the helpers below, `ptr` (1, COLS) has the address of each column's first number, `exists`
    # (1, COLS) tells which columns exist, and the next row is `stride` numbers further on.

    @triton.jit
    def load_weight(
        ptr,
        stride: tl.constexpr,
        exists,
        WARPS: tl.constexpr,
        TAPS: tl.constexpr,
        RESIDUAL: tl.constexpr,
    ):
        """w_0, w_1, .. as a tuple of blocks (WARPS, COLS) in float32, with the residual in w_0."""
        ptr = tl.broadcast_to(ptr, (WARPS, ptr.shape[1]))  # the same weights in each warp
        w = ()
        for i in tl.static_range(TAPS):
            w_i = tl.load(ptr + i * stride, mask=exists, other=0.0).to(tl.float32)
            if RESIDUAL and i == 0:
                w_i += 1
            w += (w_i,)
        return w

    @triton.jit
    def load_rows(ptr, stride: tl.constexpr, exists, first, T, COUNT: tl.constexpr):
        """The rows of COUNT tokens, a tuple of blocks (WARPS, COLS) in float32. `first` (WARPS, 1)
        is each warp's first token. What lies before the start, beyond the end or beyond the last
        column reads as 0."""
        rows = ()
        for r in tl.static_range(COUNT):
            t = first + r
            mask = (t >= 0) & (t < T) & exists
            row = tl.load(ptr + t.to(tl.int64) * stride, mask=mask, other=0.0)
            rows += (row.to(tl.float32),)
        return rows

    @triton.jit
    def weighted_sums(w, rows, AHEAD: tl.constexpr):
        """The picture above: one weighted sum for every len(w) consecutive rows, a tuple of blocks.
        w_0 multiplies the last of these rows or, with AHEAD, the first."""
        sums = ()
        for r in tl.static_range(len(rows) - len(w) + 1):
            total = tl.zeros_like(w[0])
            for i in tl.static_range(len(w)):
                row = rows[r + i] if AHEAD else rows[r + len(w) - 1 - i]
                total += w[i] * row
            sums += (total,)
        return sums

    @triton.jit
    def store_rows(ptr, stride: tl.constexpr, exists, first, T, rows):
        """The reverse of `load_rows`."""
        for r in tl.static_range(len(rows)):
            t = first + r
            row = rows[r].to(ptr.dtype.element_ty)  # from float32 to the dtype that ptr points to
            tl.store(ptr + t.to(tl.int64) * stride, row, mask=(t < T) & exists)

    @triton.jit
    def forward_kernel(
        x_ptr,  # (B, T, D)
        w_ptr,  # (TAPS, D)
        y_ptr,  # (B, T, D)
        T,
        D: tl.constexpr,
        TAPS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        WARPS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """Write y."""
        segment, sequence, t, column = locate_program(T, D, WARPS, COLS, TOKENS=ROWS)
        exists = column < D
        x_ptr += sequence * T * D + column  # from here on, an address per column
        y_ptr += sequence * T * D + column
        w = load_weight(w_ptr + column, D, exists, WARPS, TAPS, RESIDUAL)
        before: tl.constexpr = TAPS - 1  # how many rows before the warp's own
        x = load_rows(x_ptr, D, exists, t - before, T, COUNT=before + ROWS)
        y = weighted_sums(w, x, AHEAD=False)
        store_rows(y_ptr, D, exists, t, T, y)

    @triton.jit
    def add_products(dw, dy, x):
        """dw_i + sum_t dy_{t+i} * x_t over the tokens t of x. dy has len(dw) - 1 further tokens at
        its end."""
        new_dw = ()  # a tuple cannot be changed, so each step makes a new one
        for i in tl.static_range(len(dw)):
            dw_i = dw[i]
            for r in tl.static_range(len(x)):
                dw_i += dy[r + i] * x[r]
            new_dw += (dw_i,)
        return new_dw

    @triton.jit
    def store_dw(ptr, stride: tl.constexpr, exists, dw):
        for i in tl.static_range(len(dw)):
            dw_i = tl.sum(dw[i], axis=0, keep_dims=True)  # over the warps: (1, COLS)
            tl.store(ptr + i * stride, dw_i, mask=exists)

    @triton.jit
    def backward_kernel(
        x_ptr,  # as above
        w_ptr,
        dy_ptr,  # (B, T, D)
        dx_ptr,  # (B, T, D)
        dw_ptr,  # (B, segments, TAPS, D): what each segment adds to dw
        T,
        D: tl.constexpr,
        TAPS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        WARPS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """Write dx, and what each segment adds to dw."""
        segment, sequence, t, column = locate_program(T, D, WARPS, COLS, TOKENS=STEPS * ROWS)
        exists = column < D
        x_ptr += sequence * T * D + column
        dy_ptr += sequence * T * D + column
        dx_ptr += sequence * T * D + column
        dw_ptr += segment.to(tl.int64) * TAPS * D + column
        w = load_weight(w_ptr + column, D, exists, WARPS, TAPS, RESIDUAL)
        after: tl.constexpr = TAPS - 1  # how many rows after the warp's own
        dw = (tl.zeros_like(w[0]),) * TAPS
        for _ in range(STEPS):
            dy = load_rows(dy_ptr, D, exists, t, T, COUNT=ROWS + after)
            x = load_rows(x_ptr, D, exists, t, T, COUNT=ROWS)
            dw = add_products(dw, dy, x)
            dx = weighted_sums(w, dy, AHEAD=True)
            store_rows(dx_ptr, D, exists, t, T, dx)
            t += ROWS
        store_dw(dw_ptr, D, exists, dw)

    # Canon-D with the gate. A gated MLP takes silu(gate) * up, where gate and up are the two halves
    # of what Canon-D returns. The kernels below do both at once. Forward keeps gate and up in
    # registers and writes only their product, so the convolution adds nothing to the memory traffic
    # of the gate. Backward computes gate and up again from x, so they are never stored. With
    # s = sigmoid(gate) and silu(gate) = gate * s,
    #
    #     d_up   = dy * silu(gate)
    #     d_gate = dy * up * (s + silu(gate) * (1 - s))
    #
    # From there on, each half goes like `backward_kernel`, with d_gate or d_up in dy's place. These
    # are needed in the three rows after the warp's own, too, so gate and up are computed there as
    # well, and x is loaded from three rows before the warp's own to three rows after. (Beyond the
    # end dy is 0, and so are d_gate and d_up.)

    @triton.jit
    def gated_forward_kernel(
        x_ptr,  # (B, T, D), gate's D/2 channels and then those of up
        w_ptr,  # (TAPS, D)
        y_ptr,  # (B, T, D/2)
        T,
        D: tl.constexpr,
        TAPS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        WARPS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """Write silu(gate) * up."""
        H: tl.constexpr = D // 2
        segment, sequence, t, column = locate_program(T, H, WARPS, COLS, TOKENS=ROWS)
        exists = column < H
        x_ptr += sequence * T * D + column
        y_ptr += sequence * T * H + column
        w_gate = load_weight(w_ptr + column, D, exists, WARPS, TAPS, RESIDUAL)
        w_up = load_weight(w_ptr + H + column, D, exists, WARPS, TAPS, RESIDUAL)
        before: tl.constexpr = TAPS - 1
        x_gate = load_rows(x_ptr, D, exists, t - before, T, COUNT=before + ROWS)
        x_up = load_rows(x_ptr + H, D, exists, t - before, T, COUNT=before + ROWS)
        gate = weighted_sums(w_gate, x_gate, AHEAD=False)
        up = weighted_sums(w_up, x_up, AHEAD=False)
        y = ()
        for r in tl.static_range(ROWS):
            y += (gate[r] * tl.sigmoid(gate[r]) * up[r],)
        store_rows(y_ptr, H, exists, t, T, y)

    @triton.jit
    def gated_backward_kernel(
        x_ptr,  # as above
        w_ptr,
        dy_ptr,  # (B, T, D/2)
        dx_ptr,  # (B, T, D)
        dw_ptr,  # (B, segments, TAPS, D): what each segment adds to dw
        T,
        D: tl.constexpr,
        TAPS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        WARPS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """Write dx, and what each segment adds to dw."""
        H: tl.constexpr = D // 2
        segment, sequence, t, column = locate_program(T, H, WARPS, COLS, TOKENS=STEPS * ROWS)
        exists = column < H
        x_ptr += sequence * T * D + column
        dy_ptr += sequence * T * H + column
        dx_ptr += sequence * T * D + column
        dw_ptr += segment.to(tl.int64) * TAPS * D + column
        w_gate = load_weight(w_ptr + column, D, exists, WARPS, TAPS, RESIDUAL)
        w_up = load_weight(w_ptr + H + column, D, exists, WARPS, TAPS, RESIDUAL)
        before: tl.constexpr = TAPS - 1
        after: tl.constexpr = TAPS - 1
        all_rows: tl.constexpr = before + ROWS + after
        dw_gate = (tl.zeros_like(w_gate[0]),) * TAPS
        dw_up = dw_gate
        for _ in range(STEPS):
            x_gate = load_rows(x_ptr, D, exists, t - before, T, COUNT=all_rows)
            x_up = load_rows(x_ptr + H, D, exists, t - before, T, COUNT=all_rows)
            dy = load_rows(dy_ptr, H, exists, t, T, COUNT=ROWS + after)
            gate = weighted_sums(w_gate, x_gate, AHEAD=False)
            up = weighted_sums(w_up, x_up, AHEAD=False)
            d_gate = ()
            d_up = ()
            for r in tl.static_range(ROWS + after):
                s = tl.sigmoid(gate[r])
                silu = gate[r] * s
                d_gate += (dy[r] * up[r] * (s + silu * (1 - s)),)
                d_up += (dy[r] * silu,)
            dw_gate = add_products(dw_gate, d_gate, x_gate[before : before + ROWS])
            dw_up = add_products(dw_up, d_up, x_up[before : before + ROWS])
            dx_gate = weighted_sums(w_gate, d_gate, AHEAD=True)
            dx_up = weighted_sums(w_up, d_up, AHEAD=True)
            store_rows(dx_ptr, D, exists, t, T, dx_gate)
            store_rows(dx_ptr + H, D, exists, t, T, dx_up)
            t += ROWS
        store_dw(dw_ptr, D, exists, dw_gate)
        store_dw(dw_ptr + H, D, exists, dw_up)

    # WARPS and COLS, powers of two. On an H200, these were the fastest of those tried; another GPU
    # may prefer others.
    TILES = {
        forward_kernel: (4, 128),
        backward_kernel: (8, 64),
        gated_forward_kernel: (4, 64),
        gated_backward_kernel: (4, 64),
    }


def launch(triton_kernel, tokens, x, weight, y, *others, residual):
    """Run a Triton kernel.

    tokens  how many a warp takes
    x       (B, T, D)
    weight  (taps, D)
    y       the output, or in a backward kernel its gradient
    others  what else the kernel takes
    """
    B, T, D = x.shape
    WARPS, COLS = TILES[triton_kernel]
    programs = B * triton.cdiv(T, WARPS * tokens) * triton.cdiv(y.shape[2], COLS)
    with torch.cuda.device_of(x):  # Triton uses the current device, which may be another
        triton_kernel[(programs,)](  # Triton's notation: run this many programs
            x.contiguous(),
            weight.contiguous(),
            y.contiguous(),
            *others,
            T=T,
            D=D,
            TAPS=len(weight),
            RESIDUAL=residual,
            WARPS=WARPS,
            COLS=COLS,
            num_warps=WARPS,  # this and the next are Triton's own
            enable_fp_fusion=True,  # a product and a sum in one instruction
        )


# torch.compile does not look into a custom operator. It asks the operator's "fake" version for the
# shapes, strides and dtypes of what comes out. `mutates_args` says into which arguments an operator
# writes: none. `gated` chooses the kernels with the gate, after which y has half the channels.


@torch.library.custom_op("canon::causal_conv", mutates_args=())
def forward_op(
    x: torch.Tensor, weight: torch.Tensor, residual: bool, gated: bool
) -> torch.Tensor:
    """Computes y."""
    y = forward_op_fake(x, weight, residual, gated)  # here it allocates y
    triton_kernel = gated_forward_kernel if gated else forward_kernel
    launch(triton_kernel, ROWS.value, x, weight, y, residual=residual)
    return y


@forward_op.register_fake
def forward_op_fake(x, weight, residual, gated):
    B, T, D = x.shape
    return x.new_empty(B, T, D // 2 if gated else D)  # contiguous, whatever x is


@torch.library.custom_op("canon::causal_conv_backward", mutates_args=())
def backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: bool, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes dx, and what each segment adds to dw (B, segments, taps, D)."""
    dx, dw_parts = backward_op_fake(dy, x, weight, residual, gated)
    triton_kernel = gated_backward_kernel if gated else backward_kernel
    tokens = STEPS.value * ROWS.value
    launch(triton_kernel, tokens, x, weight, dy, dx, dw_parts, residual=residual)
    return dx, dw_parts


@backward_op.register_fake
def backward_op_fake(dy, x, weight, residual, gated):
    B, T, D = x.shape
    WARPS, _ = TILES[gated_backward_kernel if gated else backward_kernel]
    segments = triton.cdiv(T, WARPS * STEPS.value * ROWS.value)
    return x.new_empty(B, T, D), x.new_empty(B, segments, *weight.shape, dtype=torch.float32)


class TritonConvolution(torch.autograd.Function):
    """The two operators, of which one is the other's derivative. (The operators' own
    `register_autograd` would make forward-mode derivatives 0, without an error.)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, residual, gated):
        return forward_op(x, weight, residual, gated)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.residual, ctx.gated = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dw_parts = backward_op(dy, x, weight, ctx.residual, ctx.gated)
        return dx, dw_parts.sum((0, 1)).to(weight.dtype), None, None


def causal_conv_triton(x, weight, residual=True):
    """`causal_conv_reference` without a tail, for x on a GPU, or on a CPU if TRITON_INTERPRET=1 was
    set before the import. `fits_triton` says what else must hold.
    """
    return TritonConvolution.apply(x, weight, residual, False)


def causal_conv_gated_triton(x, weight, residual=True):
    """The same with the gate: (B, T, D) -> (B, T, D/2)."""
    return TritonConvolution.apply(x, weight, residual, True)


# ---- 4. What the models call -----------------------------------------------


@functools.cache
def triton_works(device):
    """Whether Triton can run a kernel there. Among other things it needs a C compiler."""
    one = torch.ones(1, 1, 1, device=device)
    try:
        forward_op(one, one[0], residual=True, gated=False)
    except Exception as error:
        print(f"causal_conv: PyTorch's form runs, because Triton fails: {error!r}", file=sys.stderr)
        return False
    return True


def fits_triton(x, weight):
    """Whether the Triton kernels can do this convolution."""
    if triton is None or not x.is_cuda or len(weight) > MAX_TAPS:
        return False
    if x.dtype == torch.float64:
        return False  # they compute in float32, which is too coarse
    # While code is being compiled nothing can be tried. On a GPU, the compiler needs Triton, too.
    return torch.compiler.is_compiling() or triton_works(x.device)


def is_exporting():
    """Whether torch.export is at work, with strict=False, its default. (With strict=True it first
    traces like torch.compile.) Up to torch 2.12, PyTorch's own `is_exporting` is true under
    torch.compile, too (torch/_dynamo/variables/torch.py), hence the second test."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def needs_reference(x):
    """Whether x must take the plain definition: some exporters, and tensors that are spread over
    devices (DTensor), silently lose what a function writes in place."""
    return torch.jit.is_tracing() or is_exporting() or type(x) is not torch.Tensor


def check_shapes(x, weight, tail):
    """Raise ValueError. With wrong shapes, a Triton kernel would read beyond its arguments."""
    B, T, D = x.shape
    taps = len(weight)
    wrong_tail = tail is not None and tail.shape != (B, taps - 1, D)
    if weight.shape != (taps, D) or wrong_tail:
        given = [tuple(u.shape) for u in (x, weight, tail) if u is not None]
        raise ValueError(
            f"causal_conv: x, weight and tail have shapes {given}, "
            "but they must be (B, T, D), (taps, D) and (B, taps-1, D)"
        )


def causal_conv(x, weight, residual=True, tail=None):
    """`causal_conv_reference` in the form that is fastest on x's device.

    x         (B, T, D) float, with any strides; T is at least 1, and may be less than taps
    weight    (taps, D) float; weight[i] multiplies the input i steps back
    residual  whether to add x itself
    tail      (B, taps-1, D), the inputs just before x; None means zeros
    returns   (B, T, D) in x's dtype, under autocast, too; computed in float32 (float64 if x is)

    Forward-mode derivatives raise an error. With Triton, gradients of gradients do, too.
    """
    check_shapes(x, weight, tail)
    if needs_reference(x):
        return causal_conv_reference(x, weight, residual, tail)
    if tail is not None and x.shape[1] == 1:
        return causal_conv_step(x, weight, residual, tail)
    if tail is not None:
        # This copies x once more. Only a stream has a tail: a long prompt pays for the copy once,
        # and later pieces are short.
        longer = torch.cat([tail.to(x.dtype), x], dim=1)
        return causal_conv(longer, weight, residual)[:, len(weight) - 1 :]
    if fits_triton(x, weight):
        return causal_conv_triton(x, weight, residual)
    return causal_conv_pytorch(x, weight, residual)


def can_fuse_gate(x, weight):
    """Whether Triton can do this convolution and the gate after it, as `gated_reference` does."""
    check_shapes(x, weight, tail=None)
    return x.shape[2] % 2 == 0 and fits_triton(x, weight) and not needs_reference(x)


# ---- 5. The check:   python kernels.py -------------------------------------


def gpu_has_bfloat16():
    """Whether the GPU computes in bfloat16 (NVIDIA's since Ampere do); others emulate it slowly."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def value_and_gradients(conv, x, weight, dy, residual=True):
    """[y, dx, dw] of one implementation, converted to float64."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = conv(x, weight, residual)
    y.backward(dy.to(y.dtype))
    return [u.detach().double() for u in (y, x.grad, weight.grad)]


def relative_error(a, b):
    """The length of a - b over the length of b."""
    return ((a - b).norm() / b.norm()).item()


# In float16 and bfloat16, a few times one rounding; in float32 more, because dw is a long sum.
# (Triton's interpreter truncates bfloat16.)
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def largest_error(conv, definition, x, weight):
    """The largest relative error of y, dx and dw, against the definition in float64."""
    x64, weight64 = x.double(), weight.double()
    dy = torch.randn_like(definition(x64, weight64)).to(x.dtype)
    got = value_and_gradients(conv, x, weight, dy)
    exact = value_and_gradients(definition, x64, weight64, dy.double())
    errors = [relative_error(g, e) for g, e in zip(got, exact)]
    return torch.tensor(errors).max().item()  # Python's max could leave out a NaN


def gated_reference(x, weight, residual=True):
    """silu(gate) * up, where gate and up are the halves of the convolution's channels."""
    gate, up = causal_conv_reference(x, weight, residual).chunk(2, dim=-1)
    return F.silu(gate) * up


def main():
    """Print the table. The result is the exit status: 1 if an error is beyond its limit."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forms = {
        "definition": causal_conv_reference,
        "PyTorch": causal_conv_pytorch,
        # This backend needs no C++ compiler.
        "compiled": torch.compile(causal_conv, backend="aot_eager"),
    }
    if triton is not None:
        name = "Triton" if device == "cuda" else "Triton (interpreted)"
        forms[name] = causal_conv_triton
        forms[f"{name}, gated"] = causal_conv_gated_triton
    print(f"the largest relative error of y, dx and dw against float64, on {device}")
    shape = (2, 270, 130)  # several segments and strips
    all_right = True
    for name, conv in forms.items():
        definition = gated_reference if name.endswith("gated") else causal_conv_reference
        for dtype, limit in LIMITS.items():
            if dtype == torch.bfloat16 and device == "cuda" and not gpu_has_bfloat16():
                continue
            x = torch.randn(shape, device=device, dtype=dtype)
            weight = torch.rand(4, shape[-1], device=device) - 0.5  # as a Canon layer's
            error = largest_error(conv, definition, x, weight)
            right = error <= limit  # not for NaN
            all_right = all_right and right
            verdict = "right" if right else "WRONG"
            print(f"{name:28}{str(dtype):16}{error:8.1e}  {verdict}, allowed {limit:.0e}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
