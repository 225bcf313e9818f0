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

Comments such as `# exercise 1` are for the assignment. You are welcome to copy this file, which
needs nothing else of the repository (examples/README.md says how).

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
    weight    (kernel, D) float; weight[i] multiplies the input i steps back
    residual  whether to add x itself
    tail      (B, kernel-1, D), the inputs just before x; None means zeros
    returns   (B, T, D) in x's dtype, computed in float32 (float64 if x is)
    """
    kernel, T = weight.shape[0], x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    h, w = x.to(dtype), weight.to(dtype)
    # exercise 1: z
    n = kernel - 1  # how many inputs before x it needs
    # F.pad counts from the last dim: nothing on the channels, then n rows of zeros before time.
    longer = F.pad(h, (0, 0, n, 0)) if tail is None else torch.cat([tail.to(dtype), h], dim=1)
    z = 0
    for i in range(kernel):
        z = z + w[i] * longer[:, n - i : n - i + T]  # w_i * h_{t-i}, (B, T, D)
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
    if torch.compiler.is_compiling():
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
    # end of exercise
    return y


def look_ahead(x, weight):
    """sum_i weight[i] * x_{t+i}, for x (B, T, D) and weight (kernel, D) with kernel <= T."""
    if torch.compiler.is_compiling():
        return causal_conv_reference(x.flip(1), weight, residual=False).flip(1)
    # exercise 2: in place, without shifted copies
    T = x.shape[1]
    y = x * weight[0]
    for i in range(1, len(weight)):
        y[:, : T - i].addcmul_(x[:, i:], weight[i])  # y_t += weight[i] * x_{t+i}, for t < T - i
    # end of exercise
    return y


class PyTorchConvolution(torch.autograd.Function):
    """y (B, T, D) of x (B, T, D) and weight (kernel, D), by the functions above; kernel <= T."""

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
        # exercise 2: the derivative
        T = x.shape[1]
        dx = look_ahead(dy, weight)
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
    """`causal_conv_reference` without a tail, for any device and kernel size."""
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
# In a naive kernel, a program would compute a tile of y: some tokens by some channels. It would
# load the tile of x at the same place, and the same tile shifted 1, 2 and 3 tokens back, and add up
# weight times tile. So it would load each number of x four times. Three of these loads find it in a
# cache, but each is one more instruction, and one more thing to wait for.
#
# The kernel below loads each row once. A thread keeps its channels of ROWS tokens in registers,
# and those of the three tokens above. It computes each y from four of these rows:
#
#     in registers   x_{t-3}   x_{t-2}   x_{t-1}   x_t       x_{t+1}   x_{t+2}   ..
#
#     y_t            w_3       w_2       w_1       w_0
#     y_{t+1}                  w_3       w_2       w_1       w_0
#     y_{t+2}                            w_3       w_2       w_1       w_0
#
# It asks for all rows before it uses the first, so that it waits for memory once. On an H100 this
# takes as long as a copy of x.
#
# A program has WARPS warps, groups of 32 threads. Each warp takes ROWS tokens, right below those of
# the warp before, and COLS channels, four a thread. The tokens of a program are a *segment* of the
# sequence, its channels a *strip*. Only the three rows above a warp's own are loaded by two warps.
#
# A variable of a Triton kernel holds a whole block of numbers. Here a block is (WARPS, COLS): one
# row of each warp. All of a warp's rows are a tuple of blocks. A loop over tl.static_range is
# written out when the kernel is compiled, so each row has its own registers. Sums over blocks of a
# tuple stay within a thread.
#
# Backward. By section 2, dx looks ahead: the same picture, with dy in place of x, and the three
# rows below. dw_i is the sum over tokens of dy_{t+i} times x_t. A thread adds it up in registers
# while its warp takes STEPS groups of ROWS tokens, one below the other. At the end, each program
# writes what its segment adds to dw, in float32, and PyTorch sums over the segments. Unlike atomic
# additions, this gives the same bits in every run.

MAX_KERNEL = 4  # the paper's largest; PyTorch's form takes any

if triton is not None:
    # A Triton kernel sees only those globals that are constexpr. Another GPU may be faster with
    # other numbers. WARPS and COLS are powers of two.
    WARPS = tl.constexpr(4)  # of a program
    ROWS = tl.constexpr(8)  # tokens that a warp computes from registers at a time
    COLS = tl.constexpr(128)  # channels of a warp
    STEPS = tl.constexpr(4)  # times ROWS tokens, what a warp takes in the backward kernel

    @triton.jit
    def place(
        segments,  # of a sequence
        D: tl.constexpr,  # for each value of a constexpr, Triton compiles a kernel of its own
        TOKENS: tl.constexpr,  # of a warp
    ):
        """Which part of x a program works on. Neighbouring programs take neighbouring strips of the
        same segment, so that together they read whole rows.

        segment   its number among those of all sequences
        sequence  the one that has this segment
        t         (WARPS, 1), the first token of each warp
        column    (1, COLS), the channels of the strip
        """
        program = tl.program_id(0)  # 0, 1, .., a different one in each program
        strips = tl.cdiv(D, COLS)
        segment = program // strips
        sequence = (segment // segments).to(tl.int64)  # 64 bits, for x of more than 2^31 numbers
        warp = tl.arange(0, WARPS)[:, None]
        t = ((segment % segments) * WARPS + warp) * TOKENS
        column = (program % strips) * COLS + tl.arange(0, COLS)[None, :]
        return segment, sequence, t, column

    @triton.jit
    def load_weight(w_ptr, column, D: tl.constexpr, KERNEL: tl.constexpr, RESIDUAL: tl.constexpr):
        """w_0, w_1, .. as a tuple of blocks (WARPS, COLS) in float32, with the residual in w_0."""
        column = tl.broadcast_to(column, (WARPS, COLS))  # the same weights in each warp
        w = ()
        for i in tl.static_range(KERNEL):
            w_i = tl.load(w_ptr + i * D + column, mask=column < D, other=0.0).to(tl.float32)
            if RESIDUAL and i == 0:
                w_i += 1
            w += (w_i,)
        return w

    @triton.jit
    def load_rows(ptr, first, row_stride, T, column_exists, COUNT: tl.constexpr):
        """The rows of COUNT tokens, a tuple of blocks (WARPS, COLS) in float32. What lies before
        the start, beyond the end or beyond the last channel reads as 0.

        ptr            (1, COLS), the addresses of the sequence's token 0
        first          (WARPS, 1), the first of the tokens, for each warp
        row_stride     from a token to the next
        column_exists  (1, COLS)
        """
        # exercise 12
        rows = ()
        for r in tl.static_range(COUNT):
            t = first + r
            exists = (t >= 0) & (t < T) & column_exists
            row = tl.load(ptr + t.to(tl.int64) * row_stride, mask=exists, other=0.0)
            rows += (row.to(tl.float32),)
        # end of exercise
        return rows

    @triton.jit
    def forward_kernel(
        x_ptr,  # (B, T, D), with channels side by side
        w_ptr,  # (KERNEL, D), contiguous
        y_ptr,  # (B, T, D), contiguous
        T,
        segments,  # of a sequence
        batch_stride,  # from a sequence of x to the next
        row_stride,  # from a token of x to the next
        D: tl.constexpr,
        KERNEL: tl.constexpr,
        RESIDUAL: tl.constexpr,
    ):
        """Write y."""
        segment, sequence, t, column = place(segments, D, TOKENS=ROWS)
        w = load_weight(w_ptr, column, D, KERNEL, RESIDUAL)
        x_ptr += sequence * batch_stride + column  # from here on, an address per column
        y_ptr += sequence * T * D + column
        # exercise 12
        above: tl.constexpr = KERNEL - 1  # how many rows above the warp's own
        x = load_rows(x_ptr, t - above, row_stride, T, column < D, COUNT=above + ROWS)
        for r in tl.static_range(ROWS):
            y = tl.zeros((WARPS, COLS), tl.float32)
            for i in tl.static_range(KERNEL):
                y += w[i] * x[above + r - i]
            y = y.to(y_ptr.dtype.element_ty)  # from float32 to the dtype that y_ptr points to
            tl.store(y_ptr + t.to(tl.int64) * D, y, mask=(t < T) & (column < D))
            t += 1
        # end of exercise

    @triton.jit
    def backward_kernel(
        x_ptr,  # (B, T, D), with channels side by side
        w_ptr,  # (KERNEL, D), contiguous
        dy_ptr,  # (B, T, D), contiguous
        dx_ptr,  # (B, T, D), contiguous
        dw_ptr,  # (B, segments, KERNEL, D), contiguous: what each segment adds to dw
        T,
        segments,
        batch_stride,
        row_stride,
        D: tl.constexpr,
        KERNEL: tl.constexpr,
        RESIDUAL: tl.constexpr,
    ):
        """Write dx, and what each segment adds to dw."""
        segment, sequence, t, column = place(segments, D, TOKENS=STEPS * ROWS)
        w = load_weight(w_ptr, column, D, KERNEL, RESIDUAL)
        x_ptr += sequence * batch_stride + column
        dy_ptr += sequence * T * D + column
        dx_ptr += sequence * T * D + column
        dw_ptr += segment.to(tl.int64) * KERNEL * D + column
        # exercise 13
        below: tl.constexpr = KERNEL - 1  # how many rows below the warp's own
        dw = ()
        for i in tl.static_range(KERNEL):
            dw += (tl.zeros((WARPS, COLS), tl.float32),)
        for _ in range(STEPS):
            dy = load_rows(dy_ptr, t, D, T, column < D, COUNT=ROWS + below)
            x = load_rows(x_ptr, t, row_stride, T, column < D, COUNT=ROWS)
            more = ()  # a tuple cannot be changed, so each step makes a new one
            for i in tl.static_range(KERNEL):
                dw_i = dw[i]
                for r in tl.static_range(ROWS):
                    dw_i += dy[r + i] * x[r]
                more += (dw_i,)
            dw = more
            for r in tl.static_range(ROWS):
                dx = tl.zeros((WARPS, COLS), tl.float32)
                for i in tl.static_range(KERNEL):
                    dx += w[i] * dy[r + i]
                dx = dx.to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + t.to(tl.int64) * D, dx, mask=(t < T) & (column < D))
                t += 1
        for i in tl.static_range(KERNEL):
            dw_i = tl.sum(dw[i], axis=0, keep_dims=True)  # over the warps: (1, COLS)
            tl.store(dw_ptr + i * D, dw_i, mask=column < D)
        # end of exercise


def launch(triton_kernel, segments, residual, x, weight, *others):
    """Run a Triton kernel on x (B, T, D) and weight (kernel, D), with any strides, and on others,
    which are contiguous. Each sequence is cut into `segments`.
    """
    B, T, D = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()  # now its channels lie side by side; its other strides may be any
    strips = triton.cdiv(D, COLS.value)
    programs = B * segments * strips
    with torch.cuda.device_of(x):  # Triton uses the current device, which may be another
        triton_kernel[(programs,)](  # Triton's notation: run this many programs
            x,
            weight.contiguous(),
            *others,
            T=T,
            segments=segments,
            batch_stride=x.stride(0),
            row_stride=x.stride(1),
            D=D,
            KERNEL=len(weight),
            RESIDUAL=residual,
            num_warps=WARPS.value,  # this and the next are Triton's own
            enable_fp_fusion=True,  # a product and a sum in one instruction
        )


# torch.compile does not look into a custom operator. It asks the operator's "fake" version for the
# shapes, strides and dtypes of what comes out. `mutates_args` says into which arguments an operator
# writes: none.


@torch.library.custom_op("canon::causal_conv", mutates_args=())
def forward_op(x: torch.Tensor, weight: torch.Tensor, residual: bool) -> torch.Tensor:
    """y"""
    y = x.new_empty(x.shape)  # contiguous, whatever x's strides
    segments = triton.cdiv(x.shape[1], WARPS.value * ROWS.value)
    launch(forward_kernel, segments, residual, x, weight, y)
    return y


@forward_op.register_fake
def forward_op_fake(x, weight, residual):
    return x.new_empty(x.shape)


@torch.library.custom_op("canon::causal_conv_backward", mutates_args=())
def backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, and dw_parts (B, segments, kernel, D), what each segment adds to dw"""
    dx, dw_parts = backward_op_fake(dy, x, weight, residual)
    segments = dw_parts.shape[1]
    launch(backward_kernel, segments, residual, x, weight, dy.contiguous(), dx, dw_parts)
    return dx, dw_parts


@backward_op.register_fake
def backward_op_fake(dy, x, weight, residual):
    B, T, D = x.shape
    segments = triton.cdiv(T, WARPS.value * ROWS.value * STEPS.value)
    return x.new_empty(B, T, D), x.new_empty(B, segments, *weight.shape, dtype=torch.float32)


class TritonConvolution(torch.autograd.Function):
    """The operators, one the derivative of the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, residual):
        return forward_op(x, weight, residual)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.residual = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dw_parts = backward_op(dy, x, weight, ctx.residual)
        return dx, dw_parts.sum((0, 1)).to(weight.dtype), None


def causal_conv_triton(x, weight, residual=True):
    """`causal_conv_reference` without a tail, for x on a GPU, or on a CPU if TRITON_INTERPRET=1 was
    set before the import. x must not be float64, and the kernel size is at most MAX_KERNEL;
    `causal_conv` sees to that.
    """
    return TritonConvolution.apply(x, weight, residual)


# ---- 4. What the models call -----------------------------------------------


@functools.cache
def triton_works(device):
    """Whether Triton can run a kernel there. Among other things it needs a C compiler."""
    one = torch.ones(1, 1, 1, device=device)
    try:
        forward_op(one, one[0], True)
    except Exception as error:
        print(f"causal_conv: PyTorch's form runs, as Triton fails: {error!r}", file=sys.stderr)
        return False
    return True


def causal_conv(x, weight, residual=True, tail=None):
    """`causal_conv_reference` in the form that is fastest on x's device.

    x         (B, T, D) float, with any strides; T is at least 1, and may be less than the kernel
    weight    (kernel, D) float; weight[i] multiplies the input i steps back
    residual  whether to add x itself
    tail      (B, kernel-1, D), the inputs just before x; None means zeros
    returns   (B, T, D) in x's dtype, under autocast, too; computed in float32 (float64 if x is)

    Forward-mode derivatives raise an error. With Triton, gradients of gradients do, too.
    """
    B, T, D = x.shape
    before = len(weight) - 1
    if weight.shape[1:] != (D,) or tail is not None and tail.shape != (B, before, D):
        given = [tuple(u.shape) for u in (x, weight, tail) if u is not None]
        raise ValueError(
            f"causal_conv: x, weight and tail have shapes {given}, "
            "but they must be (B, T, D), (kernel, D) and (B, kernel-1, D)"
        )
    # Some exporters, and tensors that are spread over several devices (DTensor), silently lose what
    # is written in place. They take plain operations.
    exporting = torch.jit.is_tracing() or torch.compiler.is_exporting()
    if exporting or type(x) is not torch.Tensor:
        return causal_conv_reference(x, weight, residual, tail)
    if tail is not None:
        # Longer input costs little here: whoever has a tail feeds a stream, in short pieces.
        longer = torch.cat([tail.to(x.dtype), x], dim=1)
        return causal_conv(longer, weight, residual)[:, before:]
    # The Triton kernels compute in float32, too coarse for float64.
    fits_triton = x.dtype != torch.float64 and len(weight) <= MAX_KERNEL
    if triton is not None and x.is_cuda and fits_triton:
        # Compiled code for a GPU needs Triton anyway.
        if torch.compiler.is_compiling() or triton_works(x.device):
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


# Several times the error of one rounding to the dtype. (Triton's interpreter truncates bfloat16.)
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def largest_error(conv, x, weight, dy):
    """The largest relative error of y, dx and dw, against the definition in float64."""
    got = value_and_gradients(conv, x, weight, dy)
    exact = value_and_gradients(causal_conv_reference, x.double(), weight.double(), dy.double())
    errors = [relative_error(g, e) for g, e in zip(got, exact)]
    return torch.tensor(errors).max().item()  # Python's max could leave out a NaN


def main():
    """Print the table. The result is the exit status: 1 if an error is beyond its limit."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forms = {"definition": causal_conv_reference, "PyTorch": causal_conv_pytorch}
    if triton is not None:
        forms["Triton" if device == "cuda" else "Triton (interpreted)"] = causal_conv_triton
    # This backend needs no C++ compiler.
    forms["compiled"] = torch.compile(causal_conv, backend="aot_eager")
    print(f"the largest relative error of y, dx and dw against float64, on {device}")
    shape = (2, 150, 130)  # several segments and strips
    status = 0
    for name, conv in forms.items():
        for dtype, limit in LIMITS.items():
            if dtype == torch.bfloat16 and device == "cuda" and not gpu_has_bfloat16():
                continue
            x, dy = torch.randn(2, *shape, device=device, dtype=dtype)
            weight = torch.rand(4, shape[-1], device=device) - 0.5  # as a Canon layer's
            error = largest_error(conv, x, weight, dy)
            verdict = "right" if error <= limit else "WRONG"  # wrong for NaN as well
            print(f"{name:24}{str(dtype):16}{error:8.1e}  {verdict}, allowed {limit:.0e}")
            if verdict == "WRONG":
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
