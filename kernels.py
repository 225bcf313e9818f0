"""The causal convolution behind every Canon layer: its definition, and a fast form for each device.

A Canon layer adds to each hidden state h_t a weighted sum of itself and the three before it (Eq.
4.1 of "Physics of Language Models: Part 4.1", arXiv 2512.17351). Each channel has four weights of
its own, and h is 0 before the start:

    z_t = w_0 * h_t + w_1 * h_{t-1} + w_2 * h_{t-2} + w_3 * h_{t-3}        (elementwise)
    y_t = h_t + z_t                                                        (the residual)

Channels do not mix: this is a *depthwise* convolution. It does four multiply-adds for each number
that it reads, which cost a GPU almost nothing. The time goes into memory traffic, so the best form
reads x once and writes y once, like a plain copy.

(Two meanings: `kernel` and KERNEL are a convolution's size, 4. A Triton kernel is a function that
runs on the GPU.)

Read in this order: 1 the definition; 2 its PyTorch form, for the CPU; 3 its Triton kernels, for the
GPU; 4 `causal_conv`, which picks one of them; 5 the check, which is `python kernels.py`.

For a project of your own, copy this file as canon_conv.py, say (Hugging Face has a package called
`kernels`). It needs PyTorch 2.6 or later. First check that `python canon_conv.py` passes on your
machine. Then the forward of a Canon layer whose weight has shape (kernel, width) is

    return canon_conv.causal_conv(x, self.weight)

After `canon_conv.triton = None` it does without the Triton kernels. On a CPU it never uses them.
Comments such as `# exercise 1` belong to the assignment; delete them.

From canon-gpt; MIT licence (keep its text, LICENSE, beside your copy), copyright (c) 2026 the
canon-gpt authors.
"""

import argparse
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

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
    weight    (kernel, D) float; weight[i] multiplies the input i steps back
    residual  whether to add x itself
    tail      (B, kernel-1, D), the inputs just before x; None means zeros
    returns   (B, T, D) in x's dtype, computed in float32 (float64 if x is)
    """
    kernel, T = weight.shape[0], x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(dtype), weight.to(dtype)
    # exercise 1: z
    longer = h if tail is None else torch.cat([tail.to(dtype), h], dim=1)
    before = longer.shape[1] - T  # rows of the tail
    z = 0
    for i in range(kernel):
        shifted = F.pad(longer, (0, 0, i, 0))  # i rows of zeros on top move the rest i steps down
        z = z + w[i] * shifted[:, before : before + T]  # w_i * h_{t-i}, (B, T, D)
    # end of exercise
    y = h + z if residual else z
    return y.to(x.dtype)


# ---- 2. In PyTorch: what runs on the CPU -----------------------------------
#
# PyTorch runs one operation at a time, and each operation writes a whole new tensor. For each shift
# the definition writes three: a shifted copy, a product and a sum. So does its backward pass. The
# form below adds each shift to the result in place, and its derivative is written by hand.
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
# So compiled code uses the definition, and looks ahead by looking back in reversed time.


def look_back(x, weight):
    """sum_i weight[i] * x_{t-i}, for x (B, T, D) and weight (kernel, D) with kernel <= T."""
    if torch.compiler.is_compiling():  # torch.compile makes one loop of the definition
        y = causal_conv_reference(x, weight, residual=False)
        # A bug in PyTorch 2.11: when compiled, a Function has no gradients if its result went
        # through a `.to` that changes nothing. The definition ends in one. A clone after it avoids
        # the bug, and is free: the compiled loop makes no copy.
        return y.clone()
    # exercise 2: in place, without shifted copies
    T = x.shape[1]
    y = x * weight[0]
    for i in range(1, len(weight)):
        y[:, i:].addcmul_(x[:, : T - i], weight[i])  # y_t += weight[i] * x_{t-i}, for t >= i
    return y


def look_ahead(x, weight):
    """sum_i weight[i] * x_{t+i}, for x (B, T, D) and weight (kernel, D) with kernel <= T."""
    if torch.compiler.is_compiling():  # in reversed time, ahead is back
        return causal_conv_reference(x.flip(1), weight, residual=False).flip(1)
    # exercise 2: in place, without shifted copies
    T = x.shape[1]
    y = x * weight[0]
    for i in range(1, len(weight)):
        y[:, : T - i].addcmul_(x[:, i:], weight[i])  # y_t += weight[i] * x_{t+i}, for t < T - i
    return y


class PyTorchConvolution(torch.autograd.Function):
    """y (B, T, D) of x (B, T, D) and weight (kernel, D), by the functions above; kernel <= T."""

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
        dx = dw = None  # None stands for a gradient that nobody needs
        # exercise 2: the derivative
        if ctx.needs_input_grad[0]:
            dx = look_ahead(dy, weight)
        if ctx.needs_input_grad[1]:
            T = x.shape[1]
            rows = []
            for i in range(len(weight)):
                # sum_s dy_{s+i} * x_s
                per_sequence = (dy[:, i:] * x[:, : T - i]).sum(dim=1)  # (B, D)
                rows.append(per_sequence.sum(dim=0))  # (D,)
            dw = torch.stack(rows)
        # end of exercise
        return dx, dw


def with_residual(weight):
    """The weight (kernel, D) with the residual in it: w_0 + 1, w_1, w_2, and so on."""
    return torch.cat([weight[:1] + 1, weight[1:]])


def causal_conv_pytorch(x, weight, residual=True):
    """`causal_conv_reference` without a tail, for any device and kernel size. T must be at least 1;
    `causal_conv` sees to that.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    T = x.shape[1]
    w = weight[:T].to(dtype)  # weight[T] and later ones would multiply inputs before the start
    if residual:
        w = with_residual(w)
    return PyTorchConvolution.apply(x.to(dtype), w).to(x.dtype)


# ---- 3. The Triton kernels: what runs on CUDA ------------------------------
#
# Triton runs many copies of a kernel at once. Each copy, a *program*, computes a part of y.
#
# Step 1, a naive kernel (not kept). A program computes a tile of y: ROWS tokens by COLS channels.
# It needs the tile of x at the same place, and the same tile shifted 1, 2 and 3 tokens back:
#
#              <- COLS ->                 lag 0     lag 1     lag 2     lag 3
#     t-3      . . . . . .                                             +-----+
#     t-2      . . . . . .                                   +-----+   |     |
#     t-1      . . . . . .                         +-----+   |     |   |     |
#     t       +-----------+              +-----+   |     |   |     |   +-----+
#     t+1     | this tile |              |     |   |     |   +-----+
#     t+2     |           |              |     |   +-----+
#     t+3     +-----------+              +-----+
#
# One load of shape (LAGS, ROWS, COLS) fetches all four. Channel c of token t lies at the address
# x_ptr + t * row_stride + c. Lags, rows and columns are index vectors along three axes, and they
# broadcast into the block of all addresses. A mask leaves out what does not exist, before the start
# or beyond the end: it reads as 0. Then y is the sum over lags of weight times block. The four
# copies overlap, so three of them come from the multiprocessor's cache and not from memory.
#
# Step 2, what the naive kernel wastes. Every program fetches the weights, for one small tile. The
# three rows above each tile come from memory twice. And where a program has several warps (groups
# of 32 threads), they wait for each other in every sum that crosses from one warp to another.
#
# Step 3, the kernel below. A program is one warp, so no warp waits for another. With 256 columns in
# bfloat16, each thread loads 16 bytes of a row at once. It has all lags and rows of its columns, so
# that sums stay within a thread. A program walks down a *segment*: STEPS tiles, one below the
# other. The weights stay in registers, and the rows above a tile are still in the cache. Only the
# rows above a segment's first tile are fetched twice.
#
# Backward. By section 2, both gradients need dy at lags ahead, dy_{t+i}: again one block. dx is the
# sum over lags of weight times block. dw is the sum over tokens of block times x; it stays in
# registers while the program walks. At the end, each program writes what its segment adds to dw,
# in float32, and PyTorch sums over the segments. Unlike atomic additions, this gives the same bits
# in every run.

if triton is not None:

    @triton.jit
    def place(
        segments_per_sequence,
        D: tl.constexpr,  # for each value of a constexpr, Triton compiles a kernel of its own
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        STEPS: tl.constexpr,
        LAGS: tl.constexpr,
    ):
        """Which part of x a program works on, as index vectors along (lags, rows, columns).

        A sequence has segments of STEPS tiles each, and a row has strips of COLS channels.
        Neighbouring programs take neighbouring strips of the same rows, so that together they read
        whole rows.
        """
        program = tl.program_id(0)  # 0, 1, .., a different one in each program
        strips = tl.cdiv(D, COLS)
        strip = program % strips
        segment = program // strips  # 0, 1, .. through all sequences
        sequence = segment // segments_per_sequence
        sequence = sequence.to(tl.int64)  # 64 bits, for x of more than 2^31 numbers
        first = (segment % segments_per_sequence) * (STEPS * ROWS)  # the segment's first token
        lag = tl.arange(0, LAGS)[:, None, None]  # (LAGS, 1, 1)
        t = first + tl.arange(0, ROWS)[None, :, None]  # (1, ROWS, 1)
        column = strip * COLS + tl.arange(0, COLS)[None, None, :]  # (1, 1, COLS)
        return segment, sequence, lag, t, column

    @triton.jit
    def load_weight(
        w_ptr, lag, column, D: tl.constexpr, KERNEL: tl.constexpr, RESIDUAL: tl.constexpr
    ):
        """w (LAGS, 1, COLS) in float32, with the residual in w_0 if RESIDUAL, and zeros from lag
        KERNEL on."""
        w = tl.load(w_ptr + lag * D + column, mask=(lag < KERNEL) & (column < D), other=0.0)
        w = w.to(tl.float32)
        if RESIDUAL:
            w += tl.where(lag == 0, 1.0, 0.0)
        return w

    @triton.jit
    def forward_kernel(
        x_ptr,  # (B, T, D), with channels side by side
        w_ptr,  # (KERNEL, D), contiguous
        y_ptr,  # (B, T, D), contiguous
        T,
        segments_per_sequence,
        batch_stride,  # from a sequence of x to the next
        row_stride,  # from a token of x to the next
        D: tl.constexpr,
        KERNEL: tl.constexpr,
        RESIDUAL: tl.constexpr,
        ROWS: tl.constexpr,  # tokens in a tile
        COLS: tl.constexpr,  # channels in a tile
        STEPS: tl.constexpr,  # tiles in a segment
        LAGS: tl.constexpr,  # KERNEL, rounded up to a power of two
    ):
        """Write y."""
        # exercise 12
        # lag (LAGS, 1, 1), t (1, ROWS, 1), column (1, 1, COLS): index vectors, see `place`.
        segment, sequence, lag, t, column = place(segments_per_sequence, D, ROWS, COLS, STEPS, LAGS)
        w = load_weight(w_ptr, lag, column, D, KERNEL, RESIDUAL)  # (LAGS, 1, COLS)
        x_ptr += sequence * batch_stride + column  # from here on, an address per column
        y_ptr += sequence * T * D + column
        for _ in range(STEPS):  # the tiles of the segment, one below the other
            past = t - lag  # (LAGS, ROWS, 1)
            exists = (past >= 0) & (t < T) & (lag < KERNEL) & (column < D)  # (LAGS, ROWS, COLS)
            x = tl.load(x_ptr + past.to(tl.int64) * row_stride, mask=exists, other=0.0)
            y = tl.sum(w * x.to(tl.float32), axis=0)[None]  # the sum over lags, (1, ROWS, COLS)
            y = y.to(y_ptr.dtype.element_ty)  # from float32 to the dtype that y_ptr points to
            tl.store(y_ptr + t.to(tl.int64) * D, y, mask=(t < T) & (column < D))
            t += ROWS

    @triton.jit
    def backward_kernel(
        dy_ptr,  # (B, T, D), contiguous
        x_ptr,  # (B, T, D), with channels side by side
        w_ptr,  # (KERNEL, D), contiguous
        dx_ptr,  # (B, T, D), contiguous
        dw_ptr,  # (segments of all sequences, KERNEL, D), contiguous: what each segment adds to dw
        T,
        segments_per_sequence,
        batch_stride,
        row_stride,
        D: tl.constexpr,
        KERNEL: tl.constexpr,
        RESIDUAL: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        STEPS: tl.constexpr,
        LAGS: tl.constexpr,
    ):
        """Write dx, and what each segment adds to dw."""
        # exercise 13
        # lag (LAGS, 1, 1), t (1, ROWS, 1), column (1, 1, COLS): index vectors, see `place`.
        segment, sequence, lag, t, column = place(segments_per_sequence, D, ROWS, COLS, STEPS, LAGS)
        w = load_weight(w_ptr, lag, column, D, KERNEL, RESIDUAL)  # (LAGS, 1, COLS)
        dw = tl.zeros((LAGS, ROWS, COLS), tl.float32)  # its rows are added up at the end
        x_ptr += sequence * batch_stride + column
        dy_ptr += sequence * T * D + column
        dx_ptr += sequence * T * D + column
        for _ in range(STEPS):  # the tiles of the segment, one below the other
            here = (t < T) & (column < D)  # (1, ROWS, COLS)
            x = tl.load(x_ptr + t.to(tl.int64) * row_stride, mask=here, other=0.0).to(tl.float32)
            ahead = t + lag  # (LAGS, ROWS, 1)
            exists = (ahead < T) & (lag < KERNEL) & (column < D)  # (LAGS, ROWS, COLS)
            dy = tl.load(dy_ptr + ahead.to(tl.int64) * D, mask=exists, other=0.0).to(tl.float32)
            dw += dy * x
            dx = tl.sum(w * dy, axis=0)[None]  # (1, ROWS, COLS)
            tl.store(dx_ptr + t.to(tl.int64) * D, dx.to(dx_ptr.dtype.element_ty), mask=here)
            t += ROWS
        dw = tl.sum(dw, axis=1)[:, None, :]  # (LAGS, 1, COLS)
        dw_ptr += (segment.to(tl.int64) * KERNEL + lag) * D + column
        tl.store(dw_ptr, dw, mask=(lag < KERNEL) & (column < D))


MAX_KERNEL = 8  # with more lags, a block of the Triton kernels would not fit in registers
# Another GPU may be faster with other numbers than these.
FORWARD_TILES = {"rows": 4, "steps": 8}
BACKWARD_TILES = {"rows": 2, "steps": 32}  # longer segments, so fewer to sum dw over


class Launch(NamedTuple):
    """How the programs of a Triton kernel share the work on x (B, T, D)."""

    programs: tuple[int]  # how many run, each on its part of x; a tuple, as Triton wants
    segments: int  # how many all sequences have together
    sizes: dict  # the kernel's arguments that may change from call to call
    settings: dict  # the arguments that the kernel is compiled for


def launch_for(x, weight, rows, steps):
    """The Launch for x (B, T, D) and weight (kernel, D).

    rows   tokens in a tile, for up to four lags; with more lags a tile has fewer
    steps  the most tiles in a segment
    """
    B, T, D = x.shape
    lags = triton.next_power_of_2(len(weight))  # as tl.arange demands
    if lags > 4:  # that is, 8
        rows //= 2  # a block of all lags must fit in registers
    cols = min(256, max(32, triton.next_power_of_2(D)))  # 1 to 8 for each of a warp's 32 threads
    # Fewer for a short sequence. Powers of two only: each new number compiles the kernel again.
    steps = min(steps, triton.next_power_of_2(triton.cdiv(T, rows)))
    segments_per_sequence = triton.cdiv(T, rows * steps)
    strips = triton.cdiv(D, cols)  # side by side they cover a row
    return Launch(
        programs=(B * segments_per_sequence * strips,),
        segments=B * segments_per_sequence,
        sizes=dict(
            T=T,
            segments_per_sequence=segments_per_sequence,
            batch_stride=x.stride(0),
            row_stride=x.stride(1),
        ),
        settings=dict(
            D=D,
            KERNEL=len(weight),
            ROWS=rows,
            COLS=cols,
            STEPS=steps,
            LAGS=lags,
            num_warps=1,  # an argument of Triton's own: a program is one warp
        ),
    )


def with_channels_side_by_side(x):
    """x (B, T, D) with stride 1 along D. The kernels take any other strides as they come."""
    return x if x.stride(2) == 1 else x.contiguous()


def run_kernel(kernel, launch, residual, *tensors):
    """Run a Triton kernel on tensors of one device, in the order of its arguments."""
    with torch.cuda.device_of(tensors[0]):  # Triton uses the current device, which may be another
        run = kernel[launch.programs]  # Triton's notation: run this many programs
        run(*tensors, **launch.sizes, RESIDUAL=residual, **launch.settings)


# torch.compile cannot look into a Triton kernel. It takes a custom operator as it is, and asks the
# operator's "fake" version for the shapes, strides and dtypes of what comes out. `mutates_args`
# says into which arguments an operator writes: none.


@torch.library.custom_op("canon::causal_conv", mutates_args=())
def forward_op(x: torch.Tensor, weight: torch.Tensor, residual: bool) -> torch.Tensor:
    x = with_channels_side_by_side(x)
    weight = weight.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, whatever x's strides
    launch = launch_for(x, weight, **FORWARD_TILES)
    run_kernel(forward_kernel, launch, residual, x, weight, y)
    return y


@forward_op.register_fake  # what torch.compile sees of it: the shape and dtype of y
def forward_op_fake(x, weight, residual):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("canon::causal_conv_backward", mutates_args=())
def backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy = with_channels_side_by_side(x), dy.contiguous()
    weight = weight.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = launch_for(x, weight, **BACKWARD_TILES)
    dw_parts = torch.empty(launch.segments, *weight.shape, dtype=torch.float32, device=x.device)
    run_kernel(backward_kernel, launch, residual, dy, x, weight, dx, dw_parts)
    return dx, dw_parts.sum(0).to(weight.dtype)


@backward_op.register_fake  # what torch.compile sees of it: the shapes and dtypes of dx and dw
def backward_op_fake(dy, x, weight, residual):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return dx, dw


class TritonConvolution(torch.autograd.Function):
    """y (B, T, D) of x (B, T, D) and weight (kernel, D), by the operators above."""

    @staticmethod
    def forward(x, weight, residual):
        return forward_op(x, weight, residual)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, residual = inputs
        ctx.save_for_backward(x, weight)
        ctx.residual = residual

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dw = backward_op(dy, x, weight, ctx.residual)
        return dx, dw, None


def causal_conv_triton(x, weight, residual=True):
    """`causal_conv_reference` without a tail, for x on a GPU, or on a CPU if TRITON_INTERPRET=1 was
    set before the import. x must not be empty nor float64, and the kernel size is at most
    MAX_KERNEL; `causal_conv` sees to that.
    """
    if triton is None:
        raise RuntimeError("causal_conv_triton needs Triton; causal_conv does without")
    return TritonConvolution.apply(x, weight, residual)


# ---- 4. What the models call -----------------------------------------------


def causal_conv(x, weight, residual=True, tail=None):
    """`causal_conv_reference` in the form that is fastest on x's device.

    x         (B, T, D) float, with any strides; T may be less than the kernel, and sizes may be 0
    weight    (kernel, D) float; weight[i] multiplies the input i steps back
    residual  whether to add x itself
    tail      (B, kernel-1, D), the inputs just before x; None means zeros
    returns   (B, T, D) in x's dtype, under autocast, too; computed in float32 (float64 if x is)

    Raises ValueError where dtypes or shapes do not fit. torch.func.vmap and forward-mode
    derivatives raise an error; with Triton, gradients of gradients and torch.func.grad do, too.
    """
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"causal_conv: x is {x.dtype} and weight is {weight.dtype}, "
            "but both must be floating-point"
        )
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] != x.shape[2] or len(weight) == 0:
        raise ValueError(
            f"causal_conv: x has shape {tuple(x.shape)} and weight has shape "
            f"{tuple(weight.shape)}, but they must be (B, T, D) and (kernel, D), with kernel >= 1"
        )
    if tail is not None:
        before = len(weight) - 1
        expected = (x.shape[0], before, x.shape[2])
        if tail.shape != expected:
            raise ValueError(
                f"causal_conv: tail has shape {tuple(tail.shape)}, "
                f"but it must be (B, kernel-1, D), which is {expected} here"
            )
        # Longer input costs little here: whoever has a tail feeds a stream, in short pieces.
        longer = torch.cat([tail.to(x.dtype), x], dim=1)
        return causal_conv(longer, weight, residual)[:, before:]
    if x.numel() == 0:  # the fast forms take no empty x
        return causal_conv_reference(x, weight, residual)
    # The Triton kernels compute in float32, too coarse for float64.
    fits_triton = x.dtype != torch.float64 and len(weight) <= MAX_KERNEL
    if triton is not None and x.is_cuda and fits_triton:
        return causal_conv_triton(x, weight, residual)
    return causal_conv_pytorch(x, weight, residual)


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


CASES = (
    dict(B=2, T=1, D=6, kernel=4, residual=True),  # fewer tokens than the kernel
    dict(B=1, T=9, D=64, kernel=7, residual=False),  # more than four lags
    dict(B=2, T=150, D=300, kernel=4, residual=True),  # several segments and strips
)
# Several times the error of one rounding to the dtype. (Triton's interpreter truncates bfloat16.)
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def errors_in_case(conv, device, dtype, B, T, D, kernel, residual):
    """The relative errors of y, dx and dw, against the definition in float64."""
    x = torch.randn(B, T, 2 * D, device=device, dtype=dtype)[..., D:]  # not contiguous
    bound = kernel**-0.5  # as a Canon layer's
    weight = torch.empty(kernel, D, device=device).uniform_(-bound, bound)
    dy = torch.randn(B, T, D, device=device, dtype=dtype)
    got = value_and_gradients(conv, x, weight, dy, residual)
    exact = value_and_gradients(
        causal_conv_reference, x.double(), weight.double(), dy.double(), residual
    )
    return [relative_error(g, e) for g, e in zip(got, exact)]


def check(implementations, device, dtypes):
    """{name: {dtype: the worst relative error of y, dx and dw}} over all cases.

    implementations is {name: function}, and dtypes are names, such as "float32". Raises SystemExit
    for an error beyond the limit.
    """
    table = {}
    for name, conv in implementations.items():
        table[name] = {}
        for dtype in dtypes:
            errors = []
            for case in CASES:
                errors += errors_in_case(conv, device, getattr(torch, dtype), **case)
            for error in errors:
                if not error <= LIMITS[dtype]:  # true for NaN as well
                    raise SystemExit(
                        f"{name}, {dtype}: relative error {error:.1e}, allowed {LIMITS[dtype]:.0e}"
                    )
            table[name][dtype] = max(errors)
    return table


def causal_conv_compiled(x, weight, residual):
    """`causal_conv` as torch.compile sees it. This backend needs no C++ compiler."""
    torch._dynamo.reset()  # after eight cases, PyTorch would run the next ones uncompiled
    return torch.compile(causal_conv, backend="aot_eager")(x, weight, residual)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Compare every form of the causal convolution with its definition in float64.",
    )
    parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = ["float32", "float16"]
    if device == "cpu" or gpu_has_bfloat16():
        dtypes.append("bfloat16")
    implementations = {"definition": causal_conv_reference, "PyTorch": causal_conv_pytorch}
    if triton is not None:
        name = "Triton" if device == "cuda" else "Triton (interpreted)"
        implementations[name] = causal_conv_triton
    implementations["compiled"] = causal_conv_compiled

    torch.manual_seed(0)
    print(f"relative error against float64 on {device}, worst of y, dx, dw")
    print(f"{'':24}" + "".join(f"{dtype:>12}" for dtype in dtypes))
    for name, errors in check(implementations, device, dtypes).items():
        print(f"{name:24}" + "".join(f"{errors[dtype]:12.1e}" for dtype in dtypes))
    print("all within their limits")


if __name__ == "__main__":
    main()
