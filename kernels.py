"""The causal convolution behind every Canon layer: definition, a fast form per device, a check.

A Canon layer (paper Section 4, Eq. 4.1) adds to each hidden state a weighted sum of itself and the
three before it, with one weight per channel and distance; h is 0 before the start:

    z_t = w_0 * h_t + w_1 * h_{t-1} + w_2 * h_{t-2} + w_3 * h_{t-3}        (elementwise)
    y_t = h_t + z_t                                                        (the residual)

Channels do not mix, so this is a *depthwise* convolution: four multiply-adds for every number read.
Arithmetic that light is free on a GPU. The cost is memory traffic, and the best one can do is to
read x once and write y once, like a plain copy.

Read in this order: 1 the definition; 2 the same for the CPU; 3 the Triton kernels; 4 `causal_conv`,
which picks one; 5 the check, `python kernels.py`. To use the layer elsewhere, copy this file.

The Triton kernels have been interpreted and compiled, but never run on a GPU: section 3 is untimed.

From canon-gpt; MIT licence, copyright (c) 2026 the canon-gpt authors.
"""

import os

import torch
import torch.nn.functional as F

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the check then runs the kernels on the CPU

try:  # PyTorch's CUDA builds bring Triton along
    import triton
    import triton.language as tl
except ImportError:
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
    # past[:, kernel-1 + t] is h_t, so the copy shifted by i steps starts at kernel-1 - i
    before = h.new_zeros(x.shape[0], kernel - 1, x.shape[2]) if tail is None else tail.to(dtype)
    past = torch.cat([before, h], dim=1)
    z = sum(w[i] * past[:, kernel - 1 - i : kernel - 1 - i + T] for i in range(kernel))  # (B, T, D)
    # end of exercise
    return (h + z if residual else z).to(x.dtype)


# ---- 2. In PyTorch: what runs on the CPU -----------------------------------
#
# Run eagerly, the definition writes two new tensors per shift, and its backward pass as many.
# Adding each shift to the result in place, with a derivative written by hand, avoids them. Token s
# enters y_s .. y_{s+3}. So, with dy the gradient of the loss with respect to y,
#
#     dh_s = sum_i w_i * dy_{s+i}          the same convolution, looking ahead instead of back
#     dw_i = sum_s dy_{s+i} * h_s
#
# torch.compile makes one loop of the plain sum, without temporaries, so it gets that. The residual
# needs no pass of its own: it only adds 1 to w_0.


def shift(x, i):
    """x (B, T, D) moved i steps later, or earlier if i < 0; zeros move in."""
    if i < 0:
        return F.pad(x[:, -i:], (0, 0, 0, -i))
    return F.pad(x[:, : x.shape[1] - i], (0, 0, i, 0))


def shift_and_add(x, weight, direction):
    """sum_i weight_i * x_{t - direction * i}, with direction 1 (back) or -1 (ahead)."""
    if torch.compiler.is_compiling():
        return sum(w * shift(x, direction * i) for i, w in enumerate(weight))
    # exercise 2: in place, without shifted copies
    y, T = x * weight[0], x.shape[1]
    for i in range(1, len(weight)):
        if direction > 0:
            y[:, i:].addcmul_(x[:, : T - i], weight[i])
        else:
            y[:, : T - i].addcmul_(x[:, i:], weight[i])
    return y


class Convolution(torch.autograd.Function):
    """y of x (B, T, D) and weight (kernel, D): by the code above (kernel <= T), or by Triton.

    Forward-mode derivatives raise an error; in Triton, so do gradients of gradients and
    torch.func.grad.
    """

    generate_vmap_rule = True  # for torch.func.vmap

    @staticmethod
    def forward(x, weight, residual, by_triton):
        if by_triton:
            return forward_op(x, weight, residual)
        return shift_and_add(x, with_residual(weight) if residual else weight, 1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.residual, ctx.by_triton = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.by_triton:
            return *backward_op(dy, x, weight, ctx.residual), None, None
        dx = dw = None
        # exercise 2
        if ctx.needs_input_grad[0]:
            dx = shift_and_add(dy, with_residual(weight) if ctx.residual else weight, -1)
        if ctx.needs_input_grad[1]:
            products = (dy[:, i:] * x[:, : x.shape[1] - i] for i in range(len(weight)))
            dw = torch.stack([product.sum(1).sum(0) for product in products])
        # end of exercise
        return dx, dw, None, None


def with_residual(weight):
    return torch.cat([weight[:1] + 1, weight[1:]])


def causal_conv_pytorch(x, weight, residual=True):
    """`causal_conv_reference` without a tail, for any device and kernel size."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    w = weight[: x.shape[1]].to(dtype)  # no step of x looks further back than x is long
    return Convolution.apply(x.to(dtype), w, residual, False).to(x.dtype)


# ---- 3. The Triton kernels: what runs on CUDA ------------------------------
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
# One load of shape (LAGS, ROWS, COLS) fetches all four: token t, channel c of a sequence lies at
# x_ptr + t * row_stride + c, and lags, rows and columns are index vectors along three axes that
# broadcast into the block of addresses. What does not exist (before the start, beyond the end) is
# masked out and reads as 0. Then y is the sum over lags of weight times block. The copies overlap,
# so three of four come from the multiprocessor's cache, not from memory.
#
# Step 2, what it wastes. Each program fetches the weights for one small tile. The three rows above
# every tile come from memory twice. And several warps (groups of 32 threads) in one program would
# wait for each other wherever a sum crosses them.
#
# Step 3, the kernel below. A program is one warp, so no warp waits for another: a row of 256
# bfloat16 numbers is 16 bytes per thread, one load, and sums over lags and rows stay in a thread.
# And it walks down STEPS tiles, one below the other: the weights stay in registers, the rows above
# a tile are still in cache, and only the rows above the first tile are fetched twice.
#
# Backward. By section 2 both gradients need dy at lags ahead, dy_{t+i}, which again is one block.
# dx sums weight times block over lags. dw sums block times x over tokens, in registers while the
# program walks; at the end each program writes its share into a line of a float32 table, and
# PyTorch adds up the lines: the same bits in every run, unlike atomic adds.

if triton is not None:

    @triton.jit
    def place(segments, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
              STEPS: tl.constexpr, LAGS: tl.constexpr):  # fmt: skip
        """Which part of x a program works on, as index vectors along (lags, rows, columns).

        A sequence has `segments` segments of STEPS tiles each; a strip is COLS channels.
        Neighbouring programs take neighbouring strips of the same rows: together they read whole
        rows.
        """
        strips = tl.cdiv(D, COLS)
        segment = tl.program_id(0) // strips
        sequence = (segment // segments).to(tl.int64)  # 64 bits: x may have over 2^31 numbers
        t = (segment % segments) * (STEPS * ROWS) + tl.arange(0, ROWS)[None, :, None]
        column = tl.program_id(0) % strips * COLS + tl.arange(0, COLS)[None, None, :]
        lag = tl.arange(0, LAGS)[:, None, None]
        return segment, sequence, lag, t, column

    @triton.jit
    def load_weight(w_ptr, lag, column, D: tl.constexpr, KERNEL: tl.constexpr,
                    RESIDUAL: tl.constexpr):  # fmt: skip
        """(LAGS, 1, COLS) float32; LAGS is KERNEL rounded up to a power of two, with zeros."""
        w = tl.load(w_ptr + lag * D + column, mask=(lag < KERNEL) & (column < D), other=0.0)
        w = w.to(tl.float32)
        return w + tl.where(lag == 0, 1.0, 0.0) if RESIDUAL else w

    @triton.jit
    def forward_kernel(x_ptr, w_ptr, y_ptr, T, segments, batch_stride, row_stride,
                       D: tl.constexpr, KERNEL: tl.constexpr, RESIDUAL: tl.constexpr,
                       ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
                       LAGS: tl.constexpr):  # fmt: skip
        """y of x and w. y and w are contiguous, and so are x's channels."""
        # exercise 12
        segment, sequence, lag, t, column = place(segments, D, ROWS, COLS, STEPS, LAGS)
        w = load_weight(w_ptr, lag, column, D, KERNEL, RESIDUAL)
        x_ptr += sequence * batch_stride + column
        y_ptr += sequence * T * D + column
        for _ in range(STEPS):
            past = t - lag  # (LAGS, ROWS, 1)
            exists = (past >= 0) & (t < T) & (lag < KERNEL) & (column < D)
            x = tl.load(x_ptr + past.to(tl.int64) * row_stride, mask=exists, other=0.0)
            y = tl.sum(w * x.to(tl.float32), axis=0)[None].to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + t.to(tl.int64) * D, y, mask=(t < T) & (column < D))  # (1, ROWS, COLS)
            t += ROWS

    @triton.jit
    def backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, T, segments, batch_stride, row_stride,
                        D: tl.constexpr, KERNEL: tl.constexpr, RESIDUAL: tl.constexpr,
                        ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
                        LAGS: tl.constexpr):  # fmt: skip
        """dx, and for each segment a line (KERNEL, D) of dw. dy, w, dx, dw are contiguous."""
        # exercise 13
        segment, sequence, lag, t, column = place(segments, D, ROWS, COLS, STEPS, LAGS)
        w = load_weight(w_ptr, lag, column, D, KERNEL, RESIDUAL)
        dw = tl.zeros((LAGS, ROWS, COLS), tl.float32)
        x_ptr += sequence * batch_stride + column
        dy_ptr += sequence * T * D + column
        dx_ptr += sequence * T * D + column
        for _ in range(STEPS):
            here = (t < T) & (column < D)
            x = tl.load(x_ptr + t.to(tl.int64) * row_stride, mask=here, other=0.0).to(tl.float32)
            ahead = t + lag  # (LAGS, ROWS, 1)
            exists = (ahead < T) & (lag < KERNEL) & (column < D)
            dy = tl.load(dy_ptr + ahead.to(tl.int64) * D, mask=exists, other=0.0).to(tl.float32)
            dw += dy * x
            dx = tl.sum(w * dy, axis=0)[None].to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + t.to(tl.int64) * D, dx, mask=here)
            t += ROWS
        line = dw_ptr + (segment.to(tl.int64) * KERNEL + lag) * D + column
        tl.store(line, tl.sum(dw, axis=1)[:, None, :], mask=(lag < KERNEL) & (column < D))


MAX_KERNEL = 8  # of the Triton kernels: more lags do not fit in registers
FORWARD_TILES = {"rows": 4, "steps": 8}
BACKWARD_TILES = {"rows": 2, "steps": 32}  # more steps: fewer lines for dw


def grid(x, weight, rows, steps):
    """How to cover x (B, T, D): (lines of dw, programs, the kernels' sizes, their settings)."""
    B, T, D = x.shape
    lags = triton.next_power_of_2(len(weight))
    rows = max(1, rows * 4 // max(4, lags))  # the block must fit in registers
    cols = min(256, max(32, triton.next_power_of_2(D)))
    steps = min(steps, triton.next_power_of_2(triton.cdiv(T, rows)))
    segments = triton.cdiv(T, rows * steps)
    settings = dict(D=D, KERNEL=len(weight), ROWS=rows, COLS=cols, STEPS=steps, LAGS=lags,
                    num_warps=1)  # fmt: skip
    programs = (B * segments * triton.cdiv(D, cols),)
    return B * segments, programs, (T, segments, *x.stride()[:2]), settings


# torch.compile cannot look into a launch. A custom operator is a black box to it, whose "fake"
# version tells the shapes, strides and dtypes that come out.


@torch.library.custom_op("canon::causal_conv", mutates_args=())
def forward_op(x: torch.Tensor, weight: torch.Tensor, residual: bool) -> torch.Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()  # channels side by side; any other stride will do
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _, programs, sizes, settings = grid(x, weight, **FORWARD_TILES)
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
        weight = weight.contiguous()
        forward_kernel[programs](x, weight, y, *sizes, RESIDUAL=residual, **settings)
    return y


@forward_op.register_fake
def _(x, weight, residual):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("canon::causal_conv_backward", mutates_args=())
def backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy = x if x.stride(2) == 1 else x.contiguous(), dy.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lines, programs, sizes, settings = grid(x, weight, **BACKWARD_TILES)
    dw = torch.empty(lines, *weight.shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        weight = weight.contiguous()
        backward_kernel[programs](dy, x, weight, dx, dw, *sizes, RESIDUAL=residual, **settings)
    return dx, dw.sum(0).to(weight.dtype)


@backward_op.register_fake
def _(dy, x, weight, residual):
    return tuple(torch.empty(u.shape, dtype=u.dtype, device=u.device) for u in (x, weight))


def causal_conv_triton(x, weight, residual=True):
    """`causal_conv_reference` without a tail. `causal_conv` checks what this takes for granted: x
    not empty and not float64, kernel up to MAX_KERNEL."""
    return Convolution.apply(x, weight, residual, True)


# ---- 4. What the models call -----------------------------------------------


def causal_conv(x, weight, residual=True, tail=None):
    """`causal_conv_reference` by the fastest form for the device: same arguments, same result.

    y has x's dtype, under autocast too. Raises ValueError for what does not fit.
    """
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"causal_conv takes floating-point numbers, not {x.dtype}, {weight.dtype}")
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] != x.shape[2] or len(weight) == 0:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"causal_conv takes x (B, T, D) and weight (kernel, D), not {shapes}")
    if tail is not None:  # more rows on top; in a stream x is short, so this is cheap
        if tail.shape != (x.shape[0], len(weight) - 1, x.shape[2]):
            raise ValueError(f"tail must be (B, kernel-1, D), not {tuple(tail.shape)}")
        seen = torch.cat([tail.to(x.dtype), x], dim=1)
        return causal_conv(seen, weight, residual)[:, len(weight) - 1 :]
    if x.numel() == 0:
        return causal_conv_reference(x, weight, residual)
    fits = x.dtype != torch.float64 and len(weight) <= MAX_KERNEL
    if triton is not None and x.is_cuda and fits:
        return causal_conv_triton(x, weight, residual)
    return causal_conv_pytorch(x, weight, residual)


# ---- 5. The check:   python kernels.py -------------------------------------


def gpu_has_bfloat16():
    """Whether the GPU computes in bfloat16 (NVIDIA's since Ampere do); others emulate it slowly."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def value_and_gradients(conv, x, weight, dy, *options):
    """(y, dx, dw) of one implementation, in float64."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = conv(x, weight, *options)
    y.backward(dy.to(y.dtype))
    return [u.detach().double() for u in (y, x.grad, weight.grad)]


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


# B, T, D, kernel, residual
CASES = ((2, 1, 6, 4, True), (1, 9, 64, 7, False), (2, 150, 300, 4, True))


def check(implementations, device, dtypes):
    """The worst relative error of y, dx, dw against float64: {name: {dtype: error}}."""
    # a rounding to dtype, or two: Triton's interpreter truncates
    limits = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
    errors = {}
    for name, conv in implementations.items():
        for type_name in dtypes:
            worst, dtype = 0.0, getattr(torch, type_name)
            for B, T, D, kernel, residual in CASES:
                x = torch.randn(B, T, 2 * D, device=device, dtype=dtype)[..., D:]  # strided
                w = (torch.rand(kernel, D, device=device) * 2 - 1) * kernel**-0.5
                dy = torch.randn(B, T, D, device=device, dtype=dtype)
                got = value_and_gradients(conv, x, w, dy, residual)
                exact = x.double(), w.double(), dy.double()
                want = value_and_gradients(causal_conv_reference, *exact, residual)
                worst = max([worst, *map(relative_error, got, want)])
            if not worst < limits[type_name]:  # also NaN
                limit = f"{worst:.1e}, over {limits[type_name]:.0e}"
                raise SystemExit(f"{name}, {type_name}: relative error {limit}")
            errors.setdefault(name, {})[type_name] = worst
    return errors


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = ["float32", "float16"] + ["bfloat16"] * (device == "cpu" or gpu_has_bfloat16())
    implementations = {"definition": causal_conv_reference, "PyTorch": causal_conv_pytorch}
    if triton is not None:
        name = "Triton" if device == "cuda" else "Triton (interpreted)"
        implementations[name] = causal_conv_triton
    torch.manual_seed(0)
    print(f"relative error against float64 on {device}, worst of y, dx, dw")
    print(f"{'':24}" + "".join(f"{dtype:>12}" for dtype in dtypes))
    for name, row in check(implementations, device, dtypes).items():
        print(f"{name:24}" + "".join(f"{error:12.1e}" for error in row.values()))


if __name__ == "__main__":
    main()
