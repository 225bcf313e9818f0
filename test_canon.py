"""The tests:   python -m pytest

By file, from the inside out. Fast code is compared with slow code that is obviously right, written
here from the definitions; properties are tried on random shapes.
"""

# ruff: noqa: E402, E731

import contextlib
import copy
import dataclasses
import json
import math
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
import xml.etree.ElementTree
import zipfile
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import chain, combinations, permutations, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "results"), str(HERE / "assignment")]

import canon_gpt
import check_runs
import claims
import grade
import kernels
import make
import pack
import plot
import reproduce
import runs as run_folders
import sample
import tasks
import train
from canon_gpt import (
    GLA,
    MIXERS,
    MLPS,
    POSITIONS,
    ALiBi,
    Attention,
    Block,
    Canon,
    CanonGPT,
    Config,
    HALiBi,
    Mamba2,
    canon_by_hand,
    chunked_linear_attention,
    heads,
    linear_recurrence,
    rotary_angles,
    rotate,
)
from claims import (
    CLAIMS,
    Seeds,
    above,
    above_chance_but_below,
    all_hold,
    at_chance,
    at_least_times,
    close_to,
    covers,
    reaches,
    takes_fewer_steps,
)
from comparisons import COMPARISONS
from kernels import causal_conv, causal_conv_reference, relative_error, value_and_gradients
from tasks import Document, make_task

parametrize = pytest.mark.parametrize
warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)  # exercise1 to exercise13


def exercise(number, points):
    """Above a test: it belongs to this exercise of the assignment, and is worth so many points.
    `pytest -m exercise4` runs the tests of exercise 4."""
    return getattr(pytest.mark, f"exercise{number}")(points=points)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def drawn_as(outcomes, chances):
    """Whether outcomes look drawn with these chances, {outcome: chance}, or uniformly from these:
    Pearson's test, five standard deviations wide."""
    found, free = Counter(outcomes), len(chances) - 1
    if not isinstance(chances, dict):
        chances = dict.fromkeys(chances, 1 / len(chances))
    expected = {each: chance * sum(found.values()) for each, chance in chances.items()}
    assert min(expected.values()) >= 5 and sum(chances.values()) == pytest.approx(1)
    statistic = sum((found[each] - mean) ** 2 / mean for each, mean in expected.items())
    return set(found) <= set(chances) and statistic <= free + 5 * (2 * free) ** 0.5


def assert_same(what, got, want, **tolerances):
    """assert_close, with a line that names what was compared and the place that is most wrong."""
    assert type(got) is torch.Tensor, f"{what}: got a {type(got).__name__}, expected a tensor"
    for field in ("shape", "dtype"):
        mine, right = getattr(got, field), getattr(want, field)
        assert mine == right, f"{what}: {field} {mine}, expected {right}"
    try:
        assert_close(got, want, **tolerances)
    except AssertionError:
        error = (got.detach().double() - want.double()).abs().nan_to_num(nan=math.inf)
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        numbers = f"got {got[place]:.12g}, expected {want[place]:.12g}"
        raise AssertionError(f"{what}: at {place} {numbers}") from None


# ---- 1. kernels.py ---------------------------------------------------------


needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")

FAST = ["causal_conv_pytorch", pytest.param("causal_conv_triton", marks=needs_triton)]
ALL = ["causal_conv_reference", "causal_conv", *FAST]
SHAPES = [(1, 1, 1), (2, 1, 5), (1, 2, 64), (2, 9, 7), (2, 13, 130), (1, 70, 9), (2, 4, 300)]
SHAPES += [(3, 25, 77), (2, 20, 113), (3, 11, 17), (3, 4, 27)]


def conv_inputs(B, T, D, kernel=4, dtype=torch.float32):
    """x (B, T, D), weight (kernel, D) and dy (B, T, D).

    x and dy are parts of wider tensors, as they are after a projection.
    """
    x = torch.randn(B, T, 2 * D + 1, dtype=dtype, device=DEVICE)[..., D : 2 * D]
    weight = (torch.rand(kernel, D, device=DEVICE) * 2 - 1) * kernel**-0.5
    dy = torch.randn(B, T, D + 3, dtype=dtype, device=DEVICE)[..., :D]
    return x, weight, dy


def conv_exact(x, weight, dy, residual=True):
    """(y, dx, dw) of the definition in float64."""
    return value_and_gradients(
        causal_conv_reference, x.double(), weight.double(), dy.double(), residual
    )


def test_convolution_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[2.0], [3.0]])  # z_t = 2 h_t + 3 h_{t-1}
    z = torch.tensor([[[2.0], [23.0], [230.0]]])
    assert_same("without residual", causal_conv_reference(x, weight, residual=False), z)
    assert_same("with residual", causal_conv_reference(x, weight), x + z)
    tail = torch.tensor([[[5.0]]])
    first = causal_conv_reference(x, weight, False, tail)[:, :1]
    assert_same("the first output behind a tail", first, torch.full((1, 1, 1), 2.0 * 1 + 3 * 5))


@parametrize("name", FAST)
@parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@parametrize("shape", SHAPES, ids=str)
def test_convolution_equals_the_definition_in_float64(name, dtype, shape):
    """Values and both gradients. Sums are in float32, so only the rounding to dtype is left. It is
    half a unit in the last place on hardware, and a whole one in Triton's interpreter."""
    conv = getattr(kernels, name)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    kernel_sizes = [4]
    if dtype == torch.float32 and math.prod(shape) < 1000:
        kernel_sizes = [1, 2, 3, 4, 5, 8]
    for kernel, residual in product(kernel_sizes, (True, False)):
        x, weight, dy = conv_inputs(*shape, kernel, dtype)
        got = value_and_gradients(conv, x, weight, dy, residual)
        exact = conv_exact(x, weight, dy, residual)
        for which, g, e in zip(("y", "dx", "dw"), got, exact):
            allowed = float(tolerance * (e.abs().max() + 1))
            what = f"{which}, kernel {kernel}, residual {residual}"
            assert_same(what, g, e, atol=allowed, rtol=0)


@parametrize("name", FAST)
def test_convolution_forward_alone(name):
    conv = getattr(kernels, name)
    for kernel, shape in product((2, 3, 4), ((1, 1, 2), (2, 9, 40))):
        x, weight, _ = conv_inputs(*shape, kernel)
        assert_same("y", conv(x, weight), causal_conv_reference(x, weight))


@needs_triton
def test_triton_segments_meet_forward():
    """150 tokens are five segments; 300 channels are two strips."""
    x, weight, _ = conv_inputs(2, 150, 300)
    launch = kernels.launch_for(x, weight, **kernels.FORWARD_TILES)
    assert (launch.segments, launch.programs) == (10, (20,))
    assert_same("y", kernels.causal_conv_triton(x, weight), causal_conv_reference(x, weight))


@needs_triton
def test_triton_segments_meet_within_a_sequence():
    """150 tokens are three segments backward; 300 channels are two strips."""
    x, weight, dy = conv_inputs(1, 150, 300)
    backward = kernels.launch_for(x, weight, **kernels.BACKWARD_TILES)
    assert (backward.segments, backward.programs) == (3, (6,))

    first = value_and_gradients(kernels.causal_conv_triton, x, weight, dy)
    second = value_and_gradients(kernels.causal_conv_triton, x, weight, dy)
    for which, f, s, exact in zip(("y", "dx", "dw"), first, second, conv_exact(x, weight, dy)):
        assert_same(which, f, exact, atol=1e-4, rtol=1e-5)
        assert torch.equal(f, s), f"{which} has other bits in a second run"


class Operations(TorchDispatchMode):
    """Notes how many numbers each operation's result has, and whether it is a new tensor."""

    def __init__(self):
        super().__init__()
        self.sizes = []  # of all results
        self.new_sizes = []  # without views and what is written in place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.append(result.numel())
            given = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
            if result.untyped_storage().data_ptr() not in given:
                self.new_sizes.append(result.numel())
        return result

    def large(self, size):
        """How many new tensors have so many numbers or more."""
        return sum(numbers >= size for numbers in self.new_sizes)


def test_eager_convolution_makes_no_shifted_copies():
    """Forward writes y and backward writes dx, and nothing else of their size."""
    x, weight, dy = conv_inputs(2, 90, 7)
    x.requires_grad_()
    with Operations() as forward:
        y = kernels.causal_conv_pytorch(x, weight)
    with Operations() as backward:
        torch.autograd.grad(y, x, dy)
    for name, seen in (("forward", forward), ("backward", backward)):
        count = seen.large(x.numel() // 2)
        assert count == 1, f"{name} writes {count} tensors of x's size"


def test_no_gradient_is_computed_that_nobody_needs():
    x, weight, dy = conv_inputs(2, 9, 7)
    for needed in ((True, False), (False, True)):
        context = SimpleNamespace(saved_tensors=(x, weight), needs_input_grad=needed)
        gradients = kernels.PyTorchConvolution.backward(context, dy)
        for name, gradient, wanted in zip(("x", "weight"), gradients, needed):
            found = gradient is not None
            assert found == wanted, f"gradient of {name}: computed {found}, needed {wanted}"


@parametrize("name", ALL)
def test_convolution_keeps_dtype_and_takes_any_stride(name):
    conv = getattr(kernels, name)
    x, weight, _ = conv_inputs(3, 11, 16, dtype=torch.bfloat16)
    assert conv(x, weight).dtype == torch.bfloat16
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)  # tokens side by side
    assert_close(conv(transposed, weight), conv(x.contiguous(), weight))
    weight_transposed = weight.t().contiguous().t()  # as nn.Conv1d keeps it
    assert_close(conv(x, weight_transposed), conv(x, weight))

    x = x.float().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert conv(x, weight).dtype == torch.float32
    (dx,) = torch.autograd.grad(conv(x, weight).sum(), x)  # the gradient of a sum has strides of 0
    (expected,) = torch.autograd.grad(causal_conv_reference(x, weight).sum(), x)
    assert_close(dx, expected)

    low = weight.bfloat16().requires_grad_()
    (dw,) = torch.autograd.grad(conv(x, low).sum(), low)
    assert dw.dtype == torch.bfloat16


@parametrize("name", ("causal_conv_reference", "causal_conv"))
@parametrize("residual", (True, False))
@parametrize("with_tail", (True, False))
def test_convolution_gradcheck(name, residual, with_tail):
    """First and second derivatives, against differences of values."""
    shapes = [(2, 5, 4), (4, 4)]  # x, weight
    if with_tail:
        shapes.append((2, 3, 4))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def conv(x, weight, tail=None):
        return getattr(kernels, name)(x, weight, residual, tail)

    assert gradcheck(conv, inputs)
    assert gradgradcheck(conv, inputs)


@parametrize("name", ("causal_conv_reference", "causal_conv"))
def test_convolution_streams(name):
    """A sequence in pieces, each with the inputs before it as its tail."""
    conv = getattr(kernels, name)
    for kernel, residual in product((2, 3, 4, 8), (True, False)):
        x, weight, _ = conv_inputs(2, 17, 6, kernel)
        tail = torch.zeros(2, kernel - 1, 6, device=DEVICE)
        pieces = []
        for piece in x.split((1, 2, 5, 1, 8), dim=1):
            pieces.append(conv(piece, weight, residual, tail))
            seen = torch.cat([tail, piece], dim=1)
            tail = seen[:, -(kernel - 1) :]
        want = causal_conv_reference(x, weight, residual)
        assert_same(f"y in pieces, kernel {kernel}", torch.cat(pieces, dim=1), want)


@needs_triton
@parametrize("residual", (True, False))
@parametrize("weight_dtype", (torch.float32, torch.bfloat16), ids=str)
def test_operators_are_registered_properly(weight_dtype, residual):
    """PyTorch's own check: among others, that "fake" results have the real dtypes and strides."""
    x, weight, dy = conv_inputs(2, 5, 8, kernel=3, dtype=torch.bfloat16)
    weight = weight.to(weight_dtype)
    inputs = [(x, weight)]
    inputs.append((x, weight.t().contiguous().t()))  # strides as in nn.Conv1d
    inputs.append((x.transpose(1, 2).contiguous().transpose(1, 2), weight))
    for x_in, weight_in in inputs:
        torch.library.opcheck(torch.ops.canon.causal_conv, (x_in, weight_in, residual))
        torch.library.opcheck(torch.ops.canon.causal_conv_backward, (dy, x_in, weight_in, residual))


@parametrize("name", ALL)
@parametrize("shape, residual", (((2, 9, 8), True), ((3, 2, 5), False)))  # T > kernel, T < kernel
def test_convolution_compiles_in_one_graph(name, shape, residual):
    """Also where only x or only the weight wants a gradient, and eagerly as well."""
    conv = getattr(kernels, name)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    x, weight, dy = conv_inputs(*shape)
    y, dx, dw = conv_exact(x, weight, dy, residual)
    for function, x_wants, weight_wants in product((conv, compiled), (True, False), (True, False)):
        if not (x_wants or weight_wants):
            continue
        x_in = x.detach().requires_grad_(x_wants)
        weight_in = weight.detach().requires_grad_(weight_wants)
        got = function(x_in, weight_in, residual)
        got.backward(dy)
        assert_close(got.double(), y, atol=1e-5, rtol=1e-5)
        if x_wants:
            assert_close(x_in.grad.double(), dx, atol=1e-5, rtol=1e-5)
        if weight_wants:
            assert_close(weight_in.grad.double(), dw, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_convolution_beyond_2_to_the_31():
    x, weight, _ = conv_inputs(1, 2**20 + 5, 1024, dtype=torch.bfloat16)
    x = x.requires_grad_()
    y = causal_conv(x, weight)
    last = causal_conv(x[:, -8:], weight, tail=x[:, -11:-8])
    assert_close(y[:, -8:], last)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    # The last token enters one output, the one before it two, and so on.
    expected = 1 + torch.stack([weight[:n].sum(0) for n in (4, 3, 2, 1)])
    assert_close(dx[0, -4:], expected.bfloat16())


@parametrize("shape", ((0, 4, 3), (2, 0, 3)), ids=str)
def test_convolution_of_nothing(shape):
    x = torch.zeros(shape, requires_grad=True)
    weight = torch.ones(4, 3, requires_grad=True)
    y = causal_conv(x, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(4, 3))


def test_convolution_refuses_what_does_not_fit():
    """The error names what was given and what is allowed."""
    x, weight = torch.zeros(2, 5, 3), torch.zeros(4, 3)
    for bad in (x.int(), x.bool()):
        with pytest.raises(ValueError, match=rf"x is {bad.dtype}.*must be floating-point"):
            causal_conv(bad, weight)
    with pytest.raises(ValueError, match=r"weight is torch.int64.*must be floating-point"):
        causal_conv(x, weight.long())
    with pytest.raises(ValueError, match=r"x has shape \(5, 3\).*must be \(B, T, D\)"):
        causal_conv(x[0], weight)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 2\).*must be.*\(kernel, D\)"):
        causal_conv(x, weight[:, :2])
    with pytest.raises(ValueError, match=r"weight has shape \(0, 3\).*kernel >= 1"):
        causal_conv(x, weight[:0])
    with pytest.raises(ValueError, match=r"weight has shape \(4, 3, 1\).*\(kernel, D\)"):
        causal_conv(x, weight[..., None])
    with pytest.raises(ValueError, match=r"tail has shape \(2, 5, 3\).*\(2, 3, 3\)"):
        causal_conv(x, weight, tail=x)


def test_kernels_py_checks_every_form(capsys):
    kernels.main([])
    table = capsys.readouterr().out
    for name in ("definition", "PyTorch", "compiled", "float32", "e-0"):
        assert name in table
    assert ("Triton" in table) == (kernels.triton is not None)


def wrong_value(x, weight, residual):
    return causal_conv(x, 1.001 * weight, residual)


def no_number(x, weight, residual):
    return causal_conv(x, math.nan * weight, residual)


def wrong_gradient(x, weight, residual):
    return causal_conv(x, weight.detach(), residual) + 0 * weight.sum()


@parametrize("wrong", (wrong_value, no_number, wrong_gradient))
def test_kernels_py_finds_a_wrong_form(wrong):

    with pytest.raises(SystemExit, match="wrong, float32: relative error .*, allowed 1e-05"):
        kernels.check({"wrong": wrong}, DEVICE, ["float32"])


# ---- 2. canon_gpt.py: Part I -----------------------------------------------

ATTENTION = [dict(canon="abcd", canon_kernel=8, canon_silu=True), dict(canon="ab", mlp="none")]
ATTENTION += [dict(mlp=mlp, canon="abcd") for mlp in ("swiglu-relu2", "silu", "relu2")]
for pos in POSITIONS:
    ATTENTION += [dict(pos=pos, canon=""), dict(pos=pos, canon="abcd")]


def small_model(**options):
    """Its weights are large enough for every path to matter."""
    settings = dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | options
    model = CanonGPT(Config(**settings))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.mul_(10)
    return model


def some_tokens(B=2, T=24):
    return torch.randint(0, 19, (B, T))


def streamed(module, x, lengths):
    """What a module makes of x in pieces of these lengths."""
    state = {}
    outputs = [module(piece, state=state) for piece in x.split(lengths, dim=1)]
    if isinstance(module, CanonGPT):
        outputs = [logits for logits, _ in outputs]
    return torch.cat(outputs, dim=1)


def check_order(options, T, lengths):
    """A token changes its own logits and later ones; in pieces, a model gives the same."""
    model, tokens = small_model(block_size=T, **options).double(), some_tokens(2, T)
    logits = model(tokens)[0]
    for t in (0, T // 2, T - 1):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 1) % 19
        after = model(changed)[0]
        assert_same(f"logits before token {t}", after[:, :t], logits[:, :t], atol=1e-12, rtol=0)
        assert_same("the other sequence's logits", after[1], logits[1], atol=1e-12, rtol=0)
        assert (after[0, t] - logits[0, t]).abs().max() > 1e-3, f"token {t} changes nothing at {t}"
    what = f"logits in pieces of {lengths}"
    assert_same(what, streamed(model, tokens, lengths), logits, atol=1e-10, rtol=0)


@exercise(6, 1)
@parametrize("options", ATTENTION, ids=str)
def test_attention_models_look_back_only_also_in_pieces(options):
    check_order(options, 24, (5, 1, 1, 1, 9, 7))


@exercise(1, 1)
@parametrize("kernel", (2, 4))
def test_canon_by_hand_equals_the_convolution(kernel):
    x, weight = torch.randn(2, 7, 3).double(), torch.randn(kernel, 3).double()
    assert_same("canon_by_hand", canon_by_hand(x, weight), causal_conv_reference(x, weight))


@exercise(3, 3)
@parametrize("kernel", (2, 4, 8))
@parametrize("residual", (True, False))
@parametrize("silu", (True, False))
def test_a_canon_layer_streams(kernel, residual, silu):
    config = Config(1, 1, canon="a", canon_kernel=kernel, canon_residual=residual, canon_silu=silu)
    layer, x = Canon(6, config), torch.randn(2, 12, 6)
    want = canon_by_hand(x, layer.weight) - x
    want = F.silu(want) if silu else want
    want = x + want if residual else want
    assert_same("at once", layer(x), want)
    for lengths in ((1, 1, 5, 2, 3), (1,) * 12):
        assert_same(f"in pieces of {lengths}", streamed(layer, x, lengths), want)


@exercise(4, 3)
@parametrize("dims", (8, 2))
def test_rotary_depends_on_the_distance_only(dims):
    angles, half = rotary_angles(64, dims, 1e4).double(), dims // 2
    speeds = 10000.0 ** (-torch.arange(half).double() / half)
    assert_close(angles, torch.arange(64)[:, None] * speeds, atol=1e-6, rtol=1e-6)
    q, k = torch.randn(2, 8).double()

    def rows(u):
        return rotate(u.expand(1, 64, 1, -1), angles.cos(), angles.sin())[0, :, 0]

    scores = rows(q) @ rows(k).T
    assert_same("q.k one step later", scores[1:, 1:], scores[:-1, :-1], atol=1e-4, rtol=0)
    # dims j and j + half are a pair, dims beyond 2 half pass
    pairs = torch.complex(q[:half], q[half:dims]) * torch.polar(torch.ones_like(angles), angles)
    want = torch.cat([pairs.real, pairs.imag, q[dims:].expand(64, -1)], dim=-1)
    assert_same("turned q, (position, dim)", rows(q), want)
    assert_same("turned q in bfloat16", rows(q.bfloat16()), want.bfloat16(), atol=0.05, rtol=0)


def test_angles_are_right_in_every_dtype_and_after_to_empty():
    """They are in no checkpoint."""
    config = Config(1, 999, n_head=2, d_model=16)
    right = canon_gpt.Rotary(config)
    with torch.device("meta"):
        empty = canon_gpt.Rotary(config)
    torch.set_default_dtype(torch.bfloat16)
    made_in_bfloat16 = canon_gpt.Rotary(config)
    torch.set_default_dtype(torch.float32)
    moved = canon_gpt.Rotary(config).bfloat16()
    for rotary in (empty.to_empty(device="cpu"), made_in_bfloat16, moved):
        assert torch.equal(rotary.cos, right.cos) and torch.equal(rotary.sin, right.sin)


@exercise(5, 6)
@parametrize("pos", POSITIONS)
def test_attention_is_a_mean_of_values(pos):
    """Also in pieces. It has four heads of 8 dims, and Canon-B before the positions."""
    layer = Attention(Config(1, 9, n_head=4, d_model=32, canon="b", pos=pos))
    x = torch.randn(3, 9, 32)
    q, k, v = (heads(u, 4) for u in layer.canon_b(layer.qkv(x)).chunk(3, dim=-1))
    if pos in ("rope", "rope4"):
        angles = rotary_angles(9, 8 if pos == "rope" else 2, 1e4)
        q, k = (rotate(u, angles.cos(), angles.sin()) for u in (q, k))
    scores = torch.einsum("bthk, bshk -> bhts", q, k) / 8**0.5
    distance = torch.arange(9)[:, None] - torch.arange(9)
    nearest = torch.tensor([9, 9, 9, 9])  # how many tokens each head sees
    if pos == "alibi":
        scores = scores - torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * distance
    if pos == "halibi":
        nearest = torch.tensor([1, 2, 9, 9])
    hidden = (distance < 0) | (distance >= nearest[:, None, None])
    shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
    want = layer.out(torch.einsum("bhts, bshv -> bthv", shares, v).flatten(2))
    assert_same("attention at once", layer(x), want)
    for lengths in ((1, 4, 1, 3), (6, 3)):
        assert_same(f"attention in pieces of {lengths}", streamed(layer, x, lengths), want)


MLP_CASES = [("", "silu"), ("abcd", "relu2"), ("d", "swiglu-relu2")]
MLP_CASES += [(points, "swiglu") for points in ("a", "b", "c", "abcd")]


@exercise(6, 4)
@parametrize("points, mlp", MLP_CASES)
def test_canon_points_are_where_the_paper_puts_them(points, mlp):
    """A model of one block recomputed from its parts, but for attention (Canon-B is in there)."""
    model, tokens = small_model(n_layer=1, canon=points.upper(), mlp=mlp).double(), some_tokens()
    (block,) = model.blocks
    for norm in (block.norm1, block.norm2, model.norm):
        torch.nn.init.uniform_(norm.weight)

    def normed(x, module):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def canon(h, point, module):
        assert isinstance(module, Canon) == (point in points)
        return canon_by_hand(h, module.weight) if point in points else h

    assert isinstance(block.mixer.canon_b, Canon) == ("b" in points)
    canons = [module.weight.numel() for module in block.modules() if isinstance(module, Canon)]
    assert model.parameter_counts()["canon"] == sum(canons)
    x = model.embed(tokens)
    x = x + block.mixer(canon(normed(x, block.norm1), "a", block.canon_a))
    h = canon(normed(x, block.norm2), "c", block.canon_c)
    inner = canon(h @ block.mlp.up.weight.T, "d", block.mlp.canon_d)
    act = (lambda u: u.clamp(min=0) ** 2) if "relu2" in mlp else F.silu
    if "swiglu" in mlp:
        gate, up = inner.split(88, dim=-1)  # 8 * 32 / 3 = 85.3; 88 is the nearest multiple of 8
        inner = act(gate) * up
    else:
        inner = act(inner)
    inner = inner @ block.mlp.down.weight.T
    assert_same("MLP with Canon-D", block.mlp(h), inner)
    assert_same("the block", block(model.embed(tokens)), x + inner)
    logits = normed(x + inner, model.norm) @ model.head.weight.T
    assert_same("logits", model(tokens)[0], logits)


def test_loss_counts_the_targets_in_nats():
    """Those in the mask that are not negative."""
    model, tokens = small_model(), some_tokens()
    targets, mask = some_tokens(), torch.rand(2, 24) < 0.5
    logits, loss = model(tokens, targets, mask)
    nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert_close(loss, nats[mask].mean())
    assert_close(model(tokens, targets)[1], nats.mean())
    assert model(tokens, targets, torch.zeros_like(mask))[1] == 0
    known = torch.rand(2, 24) < 0.5
    targets = targets.masked_fill(~known, -100)
    assert_close(model(tokens, targets)[1], nats[known].mean())
    assert_close(model(tokens, targets, mask)[1], nats[known & mask].mean())


class DoesNotStream(Canon):
    streams = False

    def forward(self, x, state=None):
        return super().forward(x)


@patch.dict(canon_gpt.CANONS, own=DoesNotStream)
@parametrize("canon_type", ("conv", "own"))
def test_generate(canon_type):
    model, tokens = small_model(canon="abcd", canon_type=canon_type), some_tokens(3, 5)
    want = tokens
    for _ in range(10):
        want = torch.cat([want, model(want)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(tokens, 10, temperature=0), want)

    stop = int(want[0, 7])
    ends = [row.index(stop, 5) if stop in row[5:] else 15 for row in want.tolist()]
    stopped = model.generate(tokens, 10, 0, stop)
    assert stopped.shape[1] == min(15, max(ends) + 1)
    for row, right, end in zip(stopped, want, ends):
        assert torch.equal(row[:end], right[:end]) and (row[end:] == stop).all()

    generator = torch.Generator().manual_seed(0)
    many = model.generate(tokens[:1].expand(9000, 5), 1, temperature=2.0, generator=generator)
    chances = (model(tokens[:1])[0][0, -1] / 2.0).softmax(-1)
    assert drawn_as(many[:, 5].tolist(), dict(enumerate(chances.tolist())))


def test_nothing_is_longer_than_block_size():
    model, tokens = small_model(), some_tokens(3, 5)
    state = {}
    model(some_tokens(1, 24), state=state)
    assert model.generate(tokens, 20).shape == (3, 25)  # the last token is never fed
    with pytest.raises(ValueError, match="block_size"):
        model(some_tokens(1, 1), state=state)
    with pytest.raises(ValueError, match="block_size"):
        model.generate(tokens, 21)


@torch.no_grad()
@patch.dict(canon_gpt.CANONS, own=DoesNotStream)
def test_a_stream_may_be_forked_and_belongs_to_one_model():
    model, tokens = small_model(mixer="gdn,attention", canon="acd").double(), some_tokens()
    state = {}
    model(tokens[:, :9], state=state)
    fork = dict(state)
    model(tokens[:, 9:].flip(0), state=state)
    logits, _ = model(tokens[:, 9:], state=fork)
    assert_same("logits of the fork", logits, model(tokens)[0][:, 9:])
    for other, kept in ((model, copy.deepcopy(fork)), (small_model(), fork)):
        with pytest.raises(ValueError, match="another model's"):
            other(tokens[:, :1], state=kept)
    with pytest.raises(ValueError, match="cannot read a text in pieces"):
        small_model(canon="a", canon_type="own")(tokens, state={})


def test_initial_weights():
    options = dict(vocab_size=500, block_size=8, n_layer=2, n_head=8, d_model=512)
    for module in CanonGPT(Config(**options, canon="abcd")).modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            n = module.weight.numel()
            assert abs(module.weight.mean()) < 5 * 0.02 / n**0.5
            assert abs(module.weight.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5
            assert module.weight.abs().max() > 0.06  # tails: not a uniform
    for kernel in (2, 4):
        config = Config(vocab_size=5, block_size=8, canon="a", canon_kernel=kernel)
        weight, bound = Canon(20_000, config).weight, kernel**-0.5
        assert 0.999 * bound < weight.abs().max() <= bound
        assert abs(weight.var() / (bound**2 / 3) - 1) < 5 * (0.8 / weight.numel()) ** 0.5


@parametrize("options", [{"canon_frozen": True}, {"tie_embeddings": True}, {"mixer": "gdn,mamba2"}])
def test_matrices_decay_and_frozen_canons_stay(options):
    model = small_model(canon="acd", **options)
    settings, _, _ = train.settings_of("--task copy --preset nano --weight-decay 0.5".split())
    decayed, rest = train.adamw(model, settings).param_groups
    assert decayed["weight_decay"] == 0.5 and rest["weight_decay"] == 0
    names = {p: name for name, p in model.named_parameters()}
    spared = {p for p in names if re.search("norm|canon|conv|A_log|dt_bias|skip", names[p])}
    frozen = {p for p in spared if "canon_frozen" in options and "canon" in names[p]}
    assert {*decayed["params"]} == {*names} - spared and {*rest["params"]} == spared - frozen


needs_compiler = pytest.mark.skipif(not CUDA and not shutil.which("g++"), reason="no compiler")
ALL_MIXERS = dict(mixer="gla,mamba2,gdn,attention", n_layer=4, pos="halibi")
COMPILED = [
    (ALL_MIXERS | dict(canon="acd", short_conv=True), "aot_eager_decomp_partition"),
    pytest.param(dict(canon="abcd", canon_frozen=True), "inductor", marks=needs_compiler),
]


@parametrize("options, backend", COMPILED, ids=str)
def test_model_compiles_in_one_graph(options, backend):
    device = DEVICE if backend == "inductor" else "cpu"
    model = small_model(**options).to(device)
    batch = some_tokens().to(device), some_tokens().to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss, want = compiled(*batch)[1], model(*batch)[1]
    assert_close(loss, want)
    trained = [p for p in model.parameters() if p.requires_grad]
    got, wanted = torch.autograd.grad(loss, trained), torch.autograd.grad(want, trained)
    assert_close(got, wanted, atol=1e-4, rtol=1e-3)


@parametrize("mixer", MIXERS)
def test_bfloat16_throughout_and_by_autocast(mixer):
    model = small_model(canon="abcd", mixer=mixer).to(DEVICE)
    batch = some_tokens().to(DEVICE), some_tokens().to(DEVICE)
    exact, seen = model(*batch)[1], []
    for module in model.modules():
        if isinstance(module, Canon):
            module.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype)))
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(*batch)[1]
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 8 and loss.dtype == torch.float32
    assert_close(loss, exact, atol=0.1, rtol=0.05)
    loss = model.bfloat16()(*batch)[1]
    loss.backward()
    assert_close(loss, exact, atol=0.1, rtol=0.05)


# The first field named is the one that is refused.
BAD_CONFIGS = [dict(n_layer=0), dict(block_size=10**10), dict(canon_kernel=9, canon="a")]
BAD_CONFIGS += [dict(canon_kernel=3), dict(canon_type="mine", canon="a"), dict(canon="abe")]
BAD_CONFIGS += [dict(canon="aa"), dict(canon="abc", mlp="none"), dict(mlp="gelu")]
BAD_CONFIGS += [dict(pos="rotary"), dict(pos="alibi", mixer="gla"), dict(short_conv=True)]
BAD_CONFIGS += [dict(mixer=""), dict(mixer="gdn,gdn,attention"), dict(d_model=36, mixer="gdn")]
BAD_CONFIGS += [dict(d_model=20), dict(d_model=16, pos="rope4")]


@parametrize("bad", BAD_CONFIGS, ids=str)
def test_config_names_field_and_value(bad):
    field, value = next(iter(bad.items()))
    with pytest.raises(canon_gpt.Refused, match=f"^{field} = {value!r}: "):
        small_model(**bad)


def test_part_one_runs_without_part_two(tmp_path):
    text, line, _ = (HERE / "canon_gpt.py").read_text().partition("# Part II: linear mixers")
    assert line
    (tmp_path / "part_one.py").write_text(text)
    part_one = runpy.run_path(tmp_path / "part_one.py")
    config = part_one["Config"](vocab_size=9, block_size=8, n_head=2, d_model=16, canon="abcd")
    loss = part_one["CanonGPT"](config)(torch.arange(8)[None], torch.arange(8)[None])[1]
    loss.backward()
    assert list(part_one["MIXERS"]) == ["attention"]


# ---- 2. canon_gpt.py: Part II ----------------------------------------------

LINEAR = ("gla", "mamba2", "gdn")
KINDS = (*LINEAR, "gdn per channel")  # the last is no mixer's, but allowed


def kinds(points_9, points_10):
    """The kinds of recurrences: those with the bracket are exercise 10, the others 9."""
    brackets = exercise(10, points_10)
    parameters = [pytest.param(kind, marks=exercise(9, points_9)) for kind in KINDS[:2]]
    return parameters + [pytest.param(kind, marks=brackets) for kind in KINDS[2:]]


def recurrence_inputs(kind, sizes, strongest=1.0, dtype=torch.float64):
    """[q, k, v, log_decay, beta], log decays down to -strongest per step, half of them near 0."""
    B, T, H, K, V = sizes
    shared = 1 if kind in ("mamba2", "gdn per channel") else H
    q, k = torch.randn(2, B, T, shared, K, dtype=dtype)
    v = torch.randn(B, T, H, V, dtype=dtype)
    channels = (K,) if kind in ("gla", "gdn per channel") else ()
    g = -strongest * torch.rand(B, T, H, *channels, dtype=dtype)
    g = torch.where(torch.rand_like(g) < 0.5, g, 1e-4 * g)
    if not kind.startswith("gdn"):
        return [q, k, v, g, None]
    return [q, F.normalize(k, dim=-1), v, g, torch.rand(B, T, H, dtype=dtype)]


def each(f, inputs):
    return [None if u is None else f(u) for u in inputs]


def with_gradients(form, inputs, *weights):
    """{name: tensor} of the outputs, and of the inputs' gradients of the outputs times weights."""
    names = ("q", "k", "v", "log_decay", "beta", "state")
    inputs = each(lambda u: u.detach().requires_grad_(), inputs)
    given = {f"gradient of {name}": u for name, u in zip(names, inputs) if u is not None}
    o, state = form(*inputs)
    weighted = [(u * weight).sum() for u, weight in zip((o, state), weights)]
    gradients = torch.autograd.grad(sum(weighted), list(given.values()))
    return {"o": o, "the last state": state} | dict(zip(given, gradients))


@exercise(8, 3)
@parametrize("kind", KINDS)
def test_recurrence_is_the_formula(kind):
    """S_t = (I - b k k^T) D S_{t-1} + w k v^T and o_t = S_t^T q_t, with matrices."""
    sizes = (2, 5, 3, 4, 2)
    B, T, H, K, V = sizes
    q, k, v, g, beta = recurrence_inputs(kind, sizes)
    S = start = torch.randn(B, H, K, V).double()
    o, final = linear_recurrence(q, k, v, g, beta, start)
    decay = g.reshape(B, T, H, -1).expand(B, T, H, K).exp()
    erase, w = (0, 1) if beta is None else (beta[..., None, None], beta[..., None, None])
    bracket = torch.eye(K) - erase * k[..., :, None] * k[..., None, :]  # (B, T, H or 1, K, K)
    written = w * k[..., :, None] * v[..., None, :]  # (B, T, H, K, V)
    for t in range(T):
        S = bracket[:, t] @ torch.diag_embed(decay[:, t]) @ S + written[:, t]
        assert_same(f"o at step {t}", o[:, t], (S.mT @ q[:, t, :, :, None])[..., 0])
    assert_same("the last state", final, S)


@exercise(8, 1)
def test_recurrence_in_bfloat16_keeps_its_state_in_float32():
    inputs = recurrence_inputs("gdn", (2, 5, 3, 4, 2), dtype=torch.bfloat16)
    o, state = linear_recurrence(*inputs)
    want, want_state = linear_recurrence(*each(torch.Tensor.float, inputs))
    assert_same("o", o, want.bfloat16())
    assert_same("the state", state, want_state)


@parametrize("kind", kinds(4, 3))
@parametrize("case", range(8))
def test_chunks_equal_the_loop(kind, case):
    """Values and gradients, for random sizes."""
    rng = default_rng([case, KINDS.index(kind)])
    sizes = [int(rng.integers(1, most)) for most in (4, 80, 4, 10, 10)]
    B, T, H, K, V = sizes
    chunk = 1 if case == 0 else int(rng.integers(1, 70))
    inputs = recurrence_inputs(kind, sizes, strongest=float(rng.choice([0.01, 1, 30])))
    inputs.append(torch.randn(B, H, K, V).double() if case % 2 else None)
    weights = torch.randn(B, T, H, V).double(), torch.randn(B, H, K, V).double()
    want = with_gradients(linear_recurrence, inputs, *weights)
    got = with_gradients(partial(chunked_linear_attention, chunk=chunk), inputs, *weights)
    for name in want:
        what = f"{name}, chunks of {chunk} of {T}"
        assert_same(what, got[name], want[name], atol=1e-10, rtol=1e-10)


@parametrize("kind", kinds(3, 2))
@parametrize("strongest", (1e-6, 1, 30, 1000, 1e20, math.inf))
@parametrize("dtype", (torch.float32, torch.bfloat16))
def test_chunks_are_right_for_any_decay(kind, strongest, dtype):
    """From hardly any to forgetting at once; in bfloat16 within ten of its roundings."""
    sizes = (2, 150, 2, 16, 8)
    q, k, v, g, beta = recurrence_inputs(kind, sizes, min(strongest, 1000))
    g = torch.where(g < -500, -strongest, g)
    q, k, v, g, beta = each(lambda u: u.float().to(DEVICE), [q, k, v, g, beta])
    low = [q.to(dtype), k.to(dtype), v.to(dtype), g, beta]
    dy = torch.randn(v.shape, device=DEVICE).double()
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16)
    got = with_gradients(autocast(chunked_linear_attention), low, dy)
    want = with_gradients(linear_recurrence, each(torch.Tensor.double, low), dy)
    assert got["o"].dtype == dtype and got["the last state"].dtype == torch.float32
    allowed = 1e-5 if dtype == torch.float32 else 10 * 2**-9
    for name in want:
        error = relative_error(got[name].double(), want[name])
        assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.1e}"


@parametrize("kind", KINDS)
def test_a_stream_under_autocast_keeps_its_state_in_float32(kind):
    """300 tokens, hardly any decay: a state rounded to bfloat16 at each would be off by over 1%."""
    inputs = recurrence_inputs(kind, (2, 300, 2, 16, 8), strongest=1e-3)
    _, want = linear_recurrence(*inputs)
    state = None
    with torch.autocast(DEVICE, torch.bfloat16):
        for t in range(300):
            token = each(lambda u: u[:, t : t + 1].float().to(DEVICE), inputs)
            _, state = chunked_linear_attention(*token, state=state)
    assert relative_error(state.cpu(), want) < 1e-2


def slow_mixer(module, x):
    """x (B, T, D) through a mixer by the papers, with the recurrence as a loop."""
    D = x.shape[-1]

    def own(u):
        if module.conv is None:
            return u
        z = causal_conv_reference(u, module.conv.weight, residual=False)
        return F.silu(z + (0 if module.conv.bias is None else module.conv.bias))

    def gated(o):
        gate = F.silu(heads(module.gate(x), o.shape[2]))
        return module.out((module.norm(o) * gate).flatten(2))

    if isinstance(module, GLA):
        qkv = own(module.canon_b(module.qkv(x)))
        q, k, v = (heads(u, 4) for u in qkv.split([D // 2, D // 2, D], dim=-1))
        decay = heads(torch.sigmoid(module.decay(x)) ** (1 / 16), 4)
        return gated(linear_recurrence(q * (D // 8) ** -0.5, k, v, decay.log())[0])
    if isinstance(module, Mamba2):
        z, xBC, dt = module.canon_b(module.into(x)).split([2 * D, 2 * D + 128, 16], dim=-1)
        u, B, C = own(xBC).split([2 * D, 64, 64], dim=-1)  # without it, no SiLU either
        dt, u = F.softplus(dt + module.dt_bias), heads(u, 16)
        written, log_decay = dt[..., None] * u, -module.A_log.exp() * dt
        o, _ = linear_recurrence(heads(C, 1), heads(B, 1), written, log_decay)
        y = (o + module.skip[:, None] * u).flatten(2)
        return module.out(module.norm(y * F.silu(z)))
    H, qkv = module.n_head, module.canon_b(module.qkv(x))
    qkv = F.silu(qkv) if module.conv is None else own(qkv)
    q, k, v = (heads(u, H) for u in qkv.split([3 * D // 4, 3 * D // 4, 3 * D // 2], dim=-1))
    q, k = (u / u.norm(dim=-1, keepdim=True) for u in (q, k))
    log_decay = -module.A_log.exp() * F.softplus(module.decay(x) + module.dt_bias)
    beta = torch.sigmoid(module.strength(x))
    return gated(linear_recurrence(q * q.shape[3] ** -0.5, k, v, log_decay, beta)[0])


@parametrize("mixer", LINEAR)
@parametrize("canon, short_conv", (("", True), ("", False), ("b", False), ("b", True)))
def test_mixers_are_the_papers(mixer, canon, short_conv):
    model = small_model(mixer=mixer, canon=canon, short_conv=short_conv).double()
    module = model.blocks[1].mixer
    for parameter in module.parameters():
        if parameter.dim() == 1:  # what starts as ones or zeros would hide a mistake
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    x = torch.randn(2, 100, 32).double()  # several chunks
    assert_close(module(x), slow_mixer(module, x), atol=1e-10, rtol=1e-8)


@parametrize("mixer", (*LINEAR, "gdn,attention"))
@parametrize("canon", ("", "acd", "abcd"))
def test_linear_mixers_look_back_only_also_in_pieces(mixer, canon):
    check_order(dict(mixer=mixer, canon=canon), 70, (1, 40, 1, 1, 27))


def mixer_at(mixer, **options):
    return Block(Config(vocab_size=9, block_size=9, mixer=mixer, **options), mixer).mixer


def test_linear_mixers_start_as_their_authors_have_them():
    for mixer, default in {"gla": False, "mamba2": True, "gdn": True}.items():
        assert (mixer_at(mixer, canon="acd").conv is not None) == default
        assert mixer_at(mixer, canon="b").conv is None
    for mixer in ("gla", "gdn"):
        own = mixer_at(mixer, canon="b", short_conv=True).conv
        assert own.bias is None and own.weight.std().item() == pytest.approx(0.02, rel=0.05)
    mamba = mixer_at("mamba2")
    for drawn in (mamba.conv.weight, mamba.conv.bias):  # as Conv1d's
        assert 0.49 < drawn.abs().max() <= 0.5
    assert_close(mamba.A_log.exp(), torch.arange(1.0, 17))
    assert (mamba.skip == 1).all() and mamba.dt_bias.shape == (16,)
    draws = F.softplus(canon_gpt.initial_dt_bias(20_000))
    assert 0.001 <= draws.min() < 0.00101 and 0.099 < draws.max() <= 0.1001
    assert abs(draws.log().mean() - math.log(0.01)) < 0.05  # log-uniform
    A = torch.cat([mixer_at("gdn").A_log.exp() for _ in range(20)])
    assert A.numel() == 120 and 14 < A.max() <= 16 and abs(A.mean() - 8) < 2


@parametrize("mixer, share", dict(attention=4, gla=4, mamba2=6, gdn=6).items())
def test_mixer_and_mlp_share_12_d2(mixer, share):
    """Beside matrices there are only gates, norms and convolutions."""
    with torch.device("meta"):
        block = Block(Config(vocab_size=9, block_size=9, mixer=mixer), mixer)
    for part, expected in ((block.mixer, share), (block.mlp, 12 - share)):
        count = sum(p.numel() for p in part.parameters())
        assert count == pytest.approx(expected * 768**2, rel=0.04)


def test_own_mixers_must_have_a_place_for_canon_b():
    with patch.dict(MIXERS, own=lambda config: torch.nn.Identity()):
        with pytest.raises(canon_gpt.Refused, match="no Canon-B"):
            Block(Config(9, 9, canon="b"), "own")


# ---- 3. tasks.py -----------------------------------------------------------


class Fake(torch.nn.Module):
    """A model with these methods; evaluations ask its parameters for the device."""

    def __init__(self, **methods):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        for name, method in methods.items():
            setattr(self, name, method)


def spans_of(marks):
    """The runs of True in a list of bool, [(start, end), ..]."""
    spans = []
    for place, marked in enumerate(marks):
        if marked and (place == 0 or not marks[place - 1]):
            spans.append((place, place))
        if marked:
            start, _ = spans[-1]
            spans[-1] = (start, place + 1)
    return spans


def instances(task, rows=200):
    """The whole documents of a batch in words, such as "<bos> 2 1 <query> [2 1]"."""
    tokens, mask = task.batch(3, 5, rows)
    assert tokens.shape == mask.shape == (rows, task.block_size + 1)
    assert tokens.dtype == np.int64 and mask.dtype == bool
    for row, marks in zip(tokens.tolist(), mask.tolist()):
        starts = [place for place, token in enumerate(row) if token == task.bos]
        assert starts[0] == 0
        ends = starts[1:] or [len(row)]  # the last one may be cut off, unless it is alone
        for start, end in zip(starts, ends):
            document = Document(row[start:end], spans_of(marks[start:end]))
            yield tasks.printed(task, document)


# -- All tasks


@parametrize("name", tasks.TASKS)
def test_batches_are_pure(name):
    task, again = make_task(name), make_task(name)
    tokens, mask = task.batch(1, 7, 16)
    for other in (again, task):
        same_tokens, same_mask = other.batch(1, 7, 16)
        assert np.array_equal(tokens, same_tokens) and np.array_equal(mask, same_mask)
    for arguments in ((1, 8, 16), (2, 7, 16), (7, 1, 16)):
        other_tokens, _ = task.batch(*arguments)
        assert not np.array_equal(tokens, other_tokens)
    windows = set()
    for step in range(20):
        tokens, _ = task.batch(0, step, 16)
        windows.update(row.tobytes() for row in tokens)
    assert len(windows) == 320


PRESETS_OF_TASKS = []
for preset in train.PRESETS:
    PRESETS_OF_TASKS += [(preset, name) for name in train.PRESETS[preset]]


PAPER = {  # windows, steps, context, and the task's sizes, as Section 3 of the paper has them
    "copy": (32, 50_000, 1024, {"N": 500}),
    "depo1": (128, 87_500, 2048, {"N": 225, "K": 8}),
    "depo2": (128, 100_000, 2048, {"N": 75, "K": 16}),
    "brevo1": (256, 100_000, 1024, {"N": 70}),
    "brevo2": (192, 200_000, 1536, {"N": 30}),
    "mano": (64, 80_000, 1024, {"L": 10}),
    "lano": (96, 100_000, 512, {"cfg": "cfg3f", "root": None}),
}


@parametrize("name", PAPER)
def test_the_preset_paper_has_the_papers_numbers(name):
    batch_size, steps, block_size, sizes = PAPER[name]
    recipe = train.make_recipe(**train.preset_parts("paper", name))
    training, model = recipe.training, recipe.model
    assert (training.batch_size, training.steps) == (batch_size, steps)
    assert recipe.task.items() >= {**sizes, "block_size": block_size}.items()
    if name != "copy":
        assert (model.n_layer, model.d_model, model.n_head) == (12, 768, 12)
    if name == "lano":
        assert (training.schedule, training.warmup) == ("linear", 0)
    else:
        assert (training.schedule, training.warmup) == ("cosine", 1000)


@parametrize("preset, name", PRESETS_OF_TASKS)
def test_every_preset_is_a_recipe_whose_documents_fit(preset, name):
    recipe = train.make_recipe(**train.preset_parts(preset, name))
    assert recipe.training.steps > recipe.training.warmup
    assert train.run_name(recipe, "float32") == f"{name}_{preset}_rope_bare_s0"
    task = make_task(**json.loads(json.dumps(recipe.task)))  # as a run's config.json has it
    assert json.dumps(task.settings) == json.dumps(recipe.task)
    assert task.vocab_size == recipe.model.vocab_size
    assert task.batch(0, 0, 2)[1].any(axis=1).all()
    if name.startswith("depo"):
        assert task.N > 2 * task.K
    for document in task.documents(default_rng(0), 100):
        assert len(document.tokens) <= task.block_size + 1
        assert 1 <= min(document.tokens) and max(document.tokens) < task.vocab_size
        shown = 0
        for start, end in document.targets:
            assert shown <= start < end <= len(document.tokens)
            shown = end


@parametrize("name", [name for name in tasks.TASKS if name not in ("capo", "text")])
def test_a_window_is_documents_in_a_row(name):
    task, drawn = make_task(name), []
    draw = task.documents

    def recorded(rng, count):
        documents = list(draw(rng, count))
        drawn.extend(documents)
        return documents

    task.documents = recorded
    tokens, mask = task.batch(3, 5, 8)
    documents = iter(drawn)
    for row, marks in zip(tokens.tolist(), mask.tolist()):
        expected_row, expected_marks = [], []
        while len(expected_row) < len(row):
            document = next(documents)
            marked = [False] * len(document.tokens)
            for start, end in document.targets:
                for place in range(start, end):
                    marked[place] = True
            expected_row += document.tokens
            expected_marks += marked
        assert row == expected_row[: len(row)]
        assert marks == expected_marks[: len(row)]


@parametrize("name", ("copy", "depo1", "brevo1", "mano"))
def test_evaluation_is_on_fresh_data(name, monkeypatch):
    task, seeds = make_task(name), []
    draw = np.random.default_rng

    def recorded(seed):
        seeds.append(seed)
        return draw(seed)

    def forward(tokens):
        return torch.zeros(*tokens.shape, task.vocab_size), None

    def generate(tokens, *settings, **named_settings):
        return tokens

    monkeypatch.setattr(np.random, "default_rng", recorded)
    task.evaluate(Fake(forward=forward, generate=generate), 3, 30)
    task.batch(3, 7, 2)
    assert seeds == [[3, tasks.EVAL], [3, tasks.TRAIN, 7]] and tasks.EVAL != tasks.TRAIN


@parametrize("name", tasks.TASKS)
def test_scores_are_those_announced(name):
    task = make_task(name)
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=1, d_model=8)
    scores = task.evaluate(CanonGPT(config), 0, 40)
    announced = [score for score in task.units if score in scores or not name.startswith("brevo")]
    assert list(scores) == announced  # a depth that Brevo did not draw has no score
    for value in scores.values():
        assert type(value) is float and math.isfinite(value)


class Count(tasks.Task):
    """After the number n, n times n."""

    vocabulary = ["", "1", "2", "3", "<bos>"]
    bos = 4

    def documents(self, rng, count):
        documents = []
        for n in rng.integers(1, 4, count).tolist():
            document = Document([self.bos, n])
            document.ask([n] * n)
            documents.append(document)
        return documents


def test_documents_are_enough_to_train_and_to_score():
    task = Count(block_size=11)
    assert set(instances(task)) == {"<bos> 1 [1]", "<bos> 2 [2 2]", "<bos> 3 [3 3 3]"}
    numbers = [document.tokens[1] for document in task.documents(default_rng([5, tasks.EVAL]), 60)]

    def forward(tokens):
        guess = tokens.clone()
        guess[:, 1] %= 3  # so the first 3 of three is wrong
        return F.one_hot(guess, 5), None

    wrong = numbers.count(3)
    scores = {"sequences": 1 - wrong / 60, "tokens": 1 - wrong / sum(numbers)}
    assert task.evaluate(Fake(forward=forward), 5, 60) == pytest.approx(scores)


class AllAsked(Count):
    """The same, but <bos> and the number are targets, too."""

    def documents(self, rng, count):
        documents = super().documents(rng, count)
        return [Document(whole.tokens, [(0, len(whole.tokens))]) for whole in documents]


def test_a_target_may_be_the_first_token():
    """Nothing predicts it, so it counts for nothing, and nobody is asked for it."""
    task = AllAsked(block_size=11)

    def forward(tokens):  # of 1 and 2 it knows all, of 3 nothing
        ended = torch.cat([tokens[:, 1:], tokens[:, 1:2]], dim=1)
        return F.one_hot(ended % 3 * (tokens[:, 1:2] < 3), 5), None

    documents = task.documents(default_rng([5, tasks.EVAL]), 60)
    numbers = [document.tokens[1] for document in documents]
    scores = task.evaluate(Fake(forward=forward), 5, 60)
    assert scores["sequences"] == pytest.approx(1 - numbers.count(3) / 60)

    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=1, d_model=8)
    assert sample.answered(task, CanonGPT(config), seed=0).startswith("<bos> [")


def test_parameters_and_aliases_replace_the_usual_ones():
    task = make_task("depo", N=9, block_size=90)
    usual = make_task("depo1").settings
    assert task.name == "depo1" and make_task("brevo").name == "brevo1"
    assert task.settings == {**usual, "N": 9, "block_size": 90} and task.N == 9
    depo0 = {"N": 10, "K": 4, "V": 20, "word_len": (1, 1), "separator": True, "block_size": 71}
    assert make_task("depo0").settings == {"name": "depo0", **depo0}


def test_chances():
    assert make_task("depo1", N=9, block_size=90).chance == 1 / 8
    for name in ("copy", "brevo1", "brevo2", "lano", "capo", "text"):
        assert make_task(name).chance is None
    task = make_task("mano")
    values = Counter()
    for document in task.documents(default_rng(0), 20_000):
        values[task.decode(document.tokens[-1:])] += 1
    ((value, times),) = values.most_common(1)
    assert value == "0" and times / 20_000 == pytest.approx(task.chance, abs=0.01)


# -- Words and answers


@parametrize("name", tasks.TASKS)
def test_texts_are_the_tokens_in_words(name):
    task = make_task(name)
    for document in task.documents(default_rng(1), 30):
        if name == "text" and max(document.tokens) > 128:
            continue  # a character of several bytes may be cut off
        text = task.decode(document.tokens)
        assert task.encode(text) == document.tokens
        assert text == tasks.printed(task, Document(document.tokens))


def test_words_of_several_tokens_are_joined_by_dots():
    task = make_task("depo2")
    text = "<bos> 2.1.3.1.1 3.3.3.3.3 <query_2> 2.1.3.1.1 <ans> 3."
    tokens = task.encode(text)
    assert [task.vocabulary[token] for token in tokens[:7]] == "<bos> 2. 1. 3. 1. 1 3.".split()
    assert task.decode(tokens) == text
    for text, unknown in (("<bos> 2.4.1", "4."), ("1 <eos>", "<eos>"), ("1.1 1.7", "7")):
        with pytest.raises(ValueError, match=f"^'{unknown}' is not a word of depo2$"):
            task.encode(text)


@parametrize("name", tasks.TASKS)
def test_right_answers_are_right_and_changed_ones_wrong(name):
    task = make_task(name)
    for document in task.documents(default_rng(1), 30):
        spans = task.answer_spans(document)
        assert spans
        for start, end in spans:
            answer = document.tokens[start:end]
            if task.stop is not None and answer[-1] != task.stop:
                answer.append(task.stop)  # a model says where its answer ends
            verdict = task.is_right(document, (start, end), answer)
            if name == "text":
                assert verdict is None  # there are many ways to go on
                continue
            assert verdict is True
            for place, token in enumerate(answer):
                changed = list(answer)
                changed[place] = 1 if token != 1 else 2
                if name != "lano":  # whose change may be another sentence
                    assert task.is_right(document, (start, end), changed) is False
            if len(answer) > 1:
                assert task.is_right(document, (start, end), answer[:-1]) is False


def test_what_a_model_is_asked():
    def asked(name):
        task = make_task(name)
        (document,) = task.documents(default_rng(0), 1)
        words = task.decode(document.tokens).split()
        answers = []
        for start, end in task.answer_spans(document):
            answers.append(task.decode(document.tokens[start:end]))
        return words, answers

    words, answers = asked("depo0")
    assert len(answers) == words.count("<ans>") > 1
    assert all(answer.startswith("<ans> ") for answer in answers)
    words, answers = asked("brevo2")
    assert answers == [" ".join(words[words.index("<ans>") + 1 :])]
    words, answers = asked("mano")
    assert answers == [words[-1]]
    words, answers = asked("lano")
    assert answers == [" ".join(words[1:])]
    words, answers = asked("capo")
    kinds = ["month", "day", "year", "pronoun", "birth-city", "university", "major", "employer"]
    for kind, answer in zip([*kinds, "birth-city"], answers, strict=True):  # work in such a city
        assert answer.startswith(f"{kind}-") and answer in words


def test_scores_in_print():
    for value, unit, text in (
        (0.974, "share", "97%"),
        (1, "share", "100%"),
        (0.12345, "nats", "0.123"),
        (1.5, "bits per byte", "1.500"),
        (2, "bits per parameter", "2.000"),
        (12345.6, "bits", "12,346"),
        (12345.6, "steps", "1.235e+04"),
        (0.5, None, "0.5"),
    ):
        assert tasks.score_text(value, unit) == text


# -- Copy


def test_copy():
    task = make_task("copy", N=7, block_size=40)
    first_numbers = []
    for text in instances(task, rows=300):
        numbers, copy = text.removeprefix("<bos> ").split(" <query> ")
        assert copy == f"[{numbers}]" and sorted(numbers.split()) == list("1234567")
        first_numbers.append(numbers[0])
    assert len(first_numbers) == 600 and drawn_as(first_numbers, "1234567")
    assert (task.batch(0, 0, 50)[0][:, 32] == task.bos).all()  # the third is cut off


# -- Depo

DEPOS = (
    ("depo0", {}),
    ("depo1", {}),
    ("depo2", {}),
    ("depo1", dict(N=24, K=5, block_size=300)),
    ("depo1", dict(V=2, word_len=(2, 3), N=12, block_size=260)),
    ("depo1", dict(word_len=(1, 1))),
    ("depo2", dict(N=12, K=4, block_size=400)),
    ("depo0", dict(V=3, word_len=(2, 2), N=9, block_size=200)),
)


def require_names(task, names):
    """Names are numbers 1..V joined by dots, as many as word_len allows."""
    for name in names:
        letters = [int(letter) for letter in name.split(".")]
        short, long = task.words.shortest, task.words.longest
        assert short <= len(letters) <= long, f"name {name}: {short} to {long} letters expected"
        assert 1 <= min(letters) and max(letters) <= task.words.V, f"name {name}: letters beyond V"


def read_depo(task, text):
    """The edges, [(source, target), ..], and the questions, [(k, q, answer), ..]."""
    edges_text, *question_texts = text.split("<query_")
    bos, *words = edges_text.split()
    assert bos == "<bos>", f"an instance starts with {bos}, expected <bos>"
    if task.name == "depo0":
        commas = words[2::3]
        assert commas == [","] * (len(words) // 3), f"a comma ends each edge, not in: {edges_text}"
        words = [word for word in words if word != ","]
    assert len(words) % 2 == 0, f"edges are pairs of names, not in: {edges_text}"
    edges = list(zip(words[0::2], words[1::2], strict=True))
    questions = []
    for question in question_texts:
        form = r"\d+> [\d.]+ \[<ans> [\d.]+\] ?"
        assert re.fullmatch(form, question), f"<query_{question}: expected <query_k> q [<ans> a]"
        hops, q, ans, answer = question.split()
        questions.append((int(hops[:-1]), q, answer[:-1]))
        words += [q, answer[:-1]]
    require_names(task, words)
    return edges, questions


@parametrize("name, options", DEPOS, ids=str)
def test_depo_by_an_independent_checker(name, options):
    task = make_task(name, **options)
    for text in instances(task):
        edges, questions = read_depo(task, text)
        successor, n = dict(edges), len(edges)
        cycle = [edges[0][0]]
        while successor[cycle[-1]] not in cycle:
            cycle.append(successor[cycle[-1]])
        assert 3 <= n <= task.N, f"{n} edges, expected 3 to {task.N}"
        assert len(successor) == len(cycle) == n, f"the edges are no cycle: {text}"
        asked = {q for _, q, _ in questions}
        counts = f"{len(questions)} questions about {len(asked)} nodes"
        assert len(asked) == len(questions) == min(10, n), f"{counts}, expected {min(10, n)}"
        for k, q, answer in questions:
            assert 1 <= k <= task.K, f"a question asks for {k} hops, expected 1 to {task.K}"
            want = cycle[(cycle.index(q) + k) % n]
            assert answer == want, f"{k} hops after {q}: got {answer}, expected {want}: {text}"


def test_depo_order_and_sizes_are_random():
    N = 9
    task = make_task("depo1", N=N, K=3, block_size=2000)  # so long that hardly any are cut off
    weights = {n: 1 / (n + N**0.5) for n in range(3, N + 1)}
    chances = {n: weight / sum(weights.values()) for n, weight in weights.items()}
    sizes, hops = [], []
    turns, places = [], []
    for text in instances(task, rows=150):
        edges, questions = read_depo(task, text)
        sizes.append(len(edges))
        hops += [k for k, _, _ in questions]
        if len(edges) == 3:
            starts = [start for start, _ in edges]
            asked = [q for _, q, _ in questions]
            turns.append(starts.index(edges[0][1]))  # which edge goes on where the first ends
            places.append(asked.index(starts[0]))
    assert drawn_as(sizes, chances), f"sizes: {Counter(sizes)}"
    assert drawn_as(hops, (1, 2, 3)), f"hops: {Counter(hops)}"
    assert drawn_as(turns, (1, 2)), f"the edges' order is not random: {Counter(turns)}"
    assert drawn_as(places, (0, 1, 2)), f"the questions' order is not random: {Counter(places)}"


def chances_of_words(V, low, high):
    """{word: chance}: uniform lengths, uniform letters, V more at the end if lengths differ."""
    chances = {}
    for length in range(low, high + 1):
        for letters in product(range(1, V + 1), repeat=length):
            if high > 1:
                letters = (*letters[:-1], letters[-1] + V)
            chances[letters] = 1 / (high + 1 - low) / V**length
    return chances


@parametrize("V, low, high", [(1, 1, 3), (2, 1, 2), (3, 1, 1)])
def test_words_come_as_if_drawn_one_by_one(V, low, high):
    """As the plain loop in the docstring draws two: the second is another, and their order even."""
    chances = chances_of_words(V, low, high)
    pairs = defaultdict(float)
    for first, second in permutations(chances, 2):
        chance = chances[first] * chances[second] / (1 - chances[first])
        pairs[first, second] += chance / 2
        pairs[second, first] += chance / 2
    found = []
    for first, second in tasks.Words(2, V, (low, high)).draw(default_rng(0), [2] * 40_000):
        found.append((tuple(first), tuple(second)))
    assert drawn_as(found, pairs)


def scores_if(task, is_right):
    """The scores of a model that finds answers, behind <ans>, and no other tokens. It finds an
    answer's last token only if is_right(the words before <ans>)."""

    def right_tokens(model, texts):
        longest = max(len(text) for text in texts)
        right = np.zeros((len(texts), longest), dtype=bool)
        for row, text in zip(right, texts):
            words = [task.vocabulary[token] for token in text]
            for ans, word in enumerate(words):
                if word == "<ans>":
                    end = ans + 1
                    while end < len(words) and not words[end].startswith("<"):
                        end += 1
                    row[ans + 1 : end] = True
                    row[end - 1] = is_right(words[:ans])
        return right

    task.right_tokens = right_tokens
    return task.evaluate(None, 0, 50)


@parametrize("name, hops", [("depo1", [1, 2]), ("depo0", [1, 2, 3, 4, 6])])
def test_depo_scores(name, hops):
    def is_right(words):
        queries = [word for word in words if word.startswith("<query_")]
        return queries[-1] != "<query_2>"

    scores = scores_if(make_task(name, K=max(hops)), is_right)
    want = {f"k={k}": float(k != 2) for k in hops}
    assert scores == want, f"scores of a model that fails at two hops: {scores}, expected {want}"


def test_depo_is_scored_at_its_largest_size():
    task, texts = make_task("depo0"), []

    def right_tokens(model, given):
        texts.extend(given)
        return np.ones((len(given), max(map(len, given))), dtype=bool)

    task.right_tokens = right_tokens
    task.evaluate(None, 0, 50)
    comma = task.vocabulary.index(",")
    assert [text.count(comma) for text in texts] == [task.N] * 50


def test_one_instance_asks_all_scored_hops():
    task = make_task("depo1", N=5, K=4, block_size=60)
    task.right_tokens = lambda model, texts: np.ones((1, 60), dtype=bool)
    assert task.evaluate(None, 0, 1) == {"k=1": 1.0, "k=2": 1.0, "k=3": 1.0, "k=4": 1.0}
    assert len(make_task("depo1", N=257, K=256, block_size=4000).scored) <= task.most_questions


# -- Brevo

BREVOS = (
    ("brevo1", {}),
    ("brevo1", dict(N=30, block_size=300)),
    ("brevo2", {}),
    ("brevo2", dict(N=14, V=3, word_len=(1, 3), block_size=400)),
)


def read_brevo(text):
    """The edges, [(parent, child), ..], the node that is asked about, the answer's nodes."""
    edges_text, question = text.split(" <query> ")
    bos, *names = edges_text.split()
    q, ans, *answer, eos = question.split()
    assert (bos, ans, eos) == ("<bos>", "[<ans>", "<eos>]")
    edges = list(zip(names[0::2], names[1::2], strict=True))
    return edges, q, answer


def neighbours(edges):
    """{node: the nodes that have an edge to it}."""
    found = defaultdict(set)
    for a, b in edges:
        found[b].add(a)
    return found


@parametrize("name, options", BREVOS, ids=str)
def test_brevo_by_an_independent_checker(name, options):
    task = make_task(name, **options)
    for text in instances(task):
        edges, q, answer = read_brevo(text)
        nodes = set(chain(*edges))
        require_names(task, nodes)
        assert len(nodes) <= task.N and len(answer) == len(set(answer))
        parents = neighbours(edges)
        children = neighbours((child, parent) for parent, child in edges)
        assert answer[-1] == q and parents[q]
        for i, node in enumerate(answer):
            assert parents[node] <= set(answer[:i])
            assert node == q or children[node] & set(answer[i + 1 :])  # something needs it


def test_brevo_graphs_follow_their_distribution():
    """Of the earlier nodes that are free, each number 1..min(4, free) and each set is as likely."""
    dice = tasks.random.Random(0)
    leaves, chosen = [], defaultdict(list)
    for _ in range(6000):
        graph = tasks.draw_graph(dice, 13)
        first = 0
        while not graph[first]:
            first += 1
        leaves.append(first)
        children = Counter()
        for node in range(first, 13):
            free = [other for other in range(node) if children[other] < 4]
            places = [free.index(parent) for parent in graph[node]]
            chosen[len(free)].append(tuple(sorted(places)))
            children.update(graph[node])
    assert drawn_as(leaves, (1, 2, 3, 4))
    for free in range(1, 9):
        chances = {}
        for size in range(1, min(4, free) + 1):
            for places in combinations(range(free), size):
                chances[places] = 1 / min(4, free) / math.comb(free, size)
        assert drawn_as(chosen[free], chances)


def test_brevo_orders_are_drawn_backward_step_by_step():
    """2 needs 0; 3 needs 0 and 1; 4 needs 2 and 3; 5 is not asked about."""
    parents, chances = [[], [], [0], [0, 1], [2, 3], [4, 1]], {}

    def extend(order, chance):
        left = set(range(5)) - set(order)
        needed = set()
        for child in left:
            needed.update(parents[child])
        ready = left - needed
        for node in ready:
            extend((node, *order), chance / len(ready))
        if not ready:
            chances[order] = chance

    extend((), 1.0)
    assert len(chances) == 5 and len(set(chances.values())) > 1
    dice = tasks.random.Random(0)
    assert drawn_as((tuple(tasks.draw_order(dice, parents, 4)) for _ in range(5000)), chances)


@parametrize("n", (3, 5, 10, 12))
def test_brevo_asks_for_the_last_quarter(n):
    task, asked = make_task("brevo1", N=12, block_size=200), []
    for _, parents, q in task.instances(default_rng(0), [n] * 2000):
        assert parents[q]
        asked.append(q)
    assert drawn_as(asked, range(n - math.ceil(n / 4), n))


def test_brevo_names_and_order_tell_nothing():
    nodes, orders = [], []
    possible = list(permutations((1, 2, 3)))
    for text in instances(make_task("brevo1", N=4), rows=2000):
        edges, q, answer = read_brevo(text)
        nodes.append(q)
        if len(edges) == 3 and set(chain(*edges)) == set(answer):
            order = tuple(answer.index(a) + answer.index(b) for a, b in edges)
            if order in possible:  # the graph of three nodes with all edges
                orders.append(order)
    assert drawn_as(nodes, "1234") and drawn_as(orders, possible)


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_accepts_exactly_the_valid_orders(name):
    task, checked = make_task(name), Counter()
    for document, graph, node in task.instances(default_rng(0), [4, 5] * 20):
        edges, q, words = read_brevo(tasks.printed(task, document))
        (span,) = task.answer_spans(document)
        parents = neighbours(edges)

        def depth_of(node):
            return 1 + min((depth_of(parent) for parent in parents[node]), default=-1)

        def right(words, *end):
            answer = task.encode(" ".join(words)) + [*end]
            return task.is_right(document, span, answer)

        assert depth_of(q) == tasks.depth_of(graph, node)
        for order in permutations(words):
            valid = True
            for parent, child in edges:
                if parent in order and child in order:
                    valid = valid and order.index(parent) < order.index(child)
            assert right(order, task.eos) == valid
            checked[valid] += 1
        assert right(words, task.eos) and right(words, task.eos, 1)  # what follows <eos> is no text
        for wrong in ([], words[1:], words[:-1], words[:1] + words):
            assert not right(wrong, task.eos)
        for other in set(chain(*edges)) - set(words):
            assert not right([other, *words], task.eos)
        assert not right(words) and not right(words, task.query, task.eos)
        assert not right(words, 1, task.eos)  # in Brevo2 half a word
    assert min(checked.values()) > 20


def test_brevo_draws_again_what_does_not_fit():
    make_task("brevo2", N=50, block_size=1536)  # the paper's, where the longest possible has 1,728
    lengths = {}
    for block_size in (81, 107):  # the smallest that is allowed; one that holds everything
        task = make_task("brevo2", block_size=block_size)
        documents = [document for document, _, _ in task.instances(default_rng(0), [5] * 3000)]
        lengths[block_size] = [len(document.tokens) for document in documents]
    assert len(lengths[81]) == 3000 and max(lengths[81]) <= 82
    too_long = [place for place, length in enumerate(lengths[107]) if length > 82]
    assert 0 < len(too_long) < 150
    first = too_long[0]
    assert lengths[81][:first] == lengths[107][:first]


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_scores(name):
    """Of a model that gives the right answers, but without their first token if q's last is odd."""
    task = make_task(name)
    given, right = {}, defaultdict(list)
    for document, parents, q in task.instances(default_rng([0, tasks.EVAL]), [task.N] * 99):
        ((start, end),) = task.answer_spans(document)
        ends_of_q = document.tokens[start - 2]
        answer = document.tokens[start:end]
        given[tuple(document.tokens[:start])] = answer[1:] if ends_of_q % 2 else answer
        for score in ("all", f"depth={tasks.depth_of(parents, q)}"):
            right[score].append(ends_of_q % 2 == 0)

    def generate(tokens, max_new_tokens, temperature, stop):
        assert temperature == 0 and stop == task.eos
        texts = [given[tuple(prompt)] for prompt in tokens.tolist()]
        assert max(len(text) for text in texts) <= max_new_tokens
        return torch.cat([tokens, tasks.padded(texts)], 1)

    scores = task.evaluate(Fake(generate=generate), 0, 99)
    assert scores == {score: np.mean(outcomes) for score, outcomes in right.items()}
    assert list(scores) == sorted(scores) and {"depth=1", "depth=2"} <= set(scores)


# -- Mano


def mano_value(words):
    """The value, and the number of operators, of the expression that an iterator starts with."""
    head = next(words)
    if head.isdigit():
        return int(head), 0
    a, in_left = mano_value(words)
    b, in_right = mano_value(words)
    results = {"+": a + b, "-": a - b, "*": a * b}
    return results[head] % 23, in_left + in_right + 1


def test_mano_by_an_independent_checker():
    task = make_task("mano", L=6, block_size=400)
    operators, numbers = [], []
    splits = []
    for text in instances(task, rows=100):
        assert text[0] == "[" and text.endswith("]")  # all tokens are targets
        bos, head, *expression, ans, result = text.strip("[]").split()
        rest = iter(expression)
        value, count = mano_value(rest)
        assert not list(rest)
        assert [bos, head, ans, result] == ["<bos>", f"<len_{count}>", "<ans>", str(value)]
        for word in expression:
            (numbers if word.isdigit() else operators).append(word)
        if count == 4:
            _, in_left = mano_value(iter(expression[1:]))
            splits.append(in_left)
    assert task.batch(0, 0, 9)[1].all() and drawn_as(splits, range(4))
    assert drawn_as(operators, "+-*") and drawn_as(numbers, [str(number) for number in range(23)])
    lengths = [len(document.tokens) for document in task.documents(default_rng(0), 6000)]
    assert drawn_as(lengths, range(7, 18, 2))


def test_mano_scores():
    scores = scores_if(make_task("mano", L=6), lambda words: "<len_2>" in words)
    assert scores == {"l=1": 0.0, "l=2": 1.0, "l=4": 0.0, "l=6": 0.0}


# -- Lano


def all_yields(grammar, symbol):
    """{yield: probability}, by enumeration."""
    if symbol <= 3:
        return {(symbol,): 1.0}
    rules, found = grammar.rules[symbol], defaultdict(float)
    for rule in rules:
        yields = [all_yields(grammar, part).items() for part in rule]
        for parts in product(*yields):
            text, chance = (), 1 / len(rules)
            for part, p in parts:
                text += part
                chance *= p
            found[text] += chance
    return found


def exact_table(language, text):
    """For each prefix of the text, the probabilities that it is all, or goes on with 1, 2, 3."""
    rows = np.zeros((len(text) + 1, 4))
    for other, p in language.items():
        for t in range(len(text) + 1):
            if other[:t] == text[:t] and len(other) >= t:
                rows[t, other[t] if len(other) > t else 0] += p
    return rows


@parametrize("cfg, root", [("cfg3f", 10), ("cfg3f", 11), ("cfg3j", 12), ("cfg3k", 12)])
def test_lano_chart_equals_enumeration(cfg, root):
    task = make_task("lano", cfg=cfg, root=root)
    grammar, language = task.grammar, all_yields(task.grammar, root)
    assert grammar.longest[root] == max(len(text) for text in language)
    mean = sum(len(text) * p for text, p in language.items())
    assert grammar.mean[root] == pytest.approx(mean)

    texts = sorted(language)[::5][:12]
    for text in texts[:4]:  # and all their corruptions by one token
        texts += [text[:-1], (*text, 1), ()]
        for i in range(len(text)):
            for other in (1, 2, 3):
                texts.append(text[:i] + (other,) + text[i + 1 :])
    assert 12 < sum(text in language for text in texts) < len(texts)
    rows = F.pad(tasks.padded(texts), (0, 200))  # so wide that they are taken a few at a time
    for text, found in zip(texts, task.charts(rows).numpy(), strict=True):
        t = np.arange(len(text) + 1)
        exact = exact_table(language, text) * 2.1 ** t[:, None]
        what = f"chart of {text}, columns end, 1, 2, 3"
        np.testing.assert_allclose(found[t], exact, rtol=1e-12, err_msg=what)
        assert not found[len(t) :].any(), f"chart of {text}: not zero behind its end"


def test_grammars_are_the_papers():
    """How many rules there are, and the mean and the longest sentence: one wrong symbol shows."""
    found = {}
    for cfg, texts in tasks.GRAMMARS.items():
        grammar = tasks.Grammar(texts)
        rules = sum(len(choices) for choices in grammar.rules.values())
        mean = round(float(grammar.mean[grammar.root]), 3)
        found[cfg] = rules, mean, grammar.longest[grammar.root]
    want = {"cfg3f": (54, 249.86, 729), "cfg3j": (57, 543.926, 2052), "cfg3k": (68, 516.305, 1458)}
    assert found == want


@parametrize("cfg, most", [("cfg3f", 350), ("cfg3j", 1000), ("cfg3k", 800)])
def test_lano_long_sentences_keep_their_probability(cfg, most):
    grammar = tasks.Grammar(tasks.GRAMMARS[cfg])
    for rules in grammar.rules.values():
        assert 3 <= len(set(rules)) == len(rules) <= 4
    sentences = grammar.sample(default_rng(1), 1000)
    assert set(chain(*sentences)) == {1, 2, 3}  # so each rule's parts are of the next level
    text = max((sentence for sentence in sentences if len(sentence) <= most), key=len)
    chart = grammar.chart(torch.tensor([text]))[0]
    assert len(text) > 0.8 * most
    assert 1e-100 < chart.max() < 1e100, f"the chart's largest number is {chart.max():.1e}"
    assert chart[-1, 0] > 0, "a whole sentence must be able to end"
    here = chart[torch.arange(len(text)), text]
    what = "a row's sum: the prefix, by the row before"
    assert_same(what, chart[1:].sum(1), 2.1 * here, rtol=1e-10, atol=0)
    assert chart[0].sum() == pytest.approx(1)


def test_lano_windows_and_samples():
    task = make_task("lano", root=12, block_size=40)
    language = all_yields(task.grammar, 12)
    for text in instances(task):
        bos, *words = text.strip("[]").split()
        assert bos == "<bos>" and tuple(int(word) for word in words) in language
    assert task.batch(0, 0, 9)[1].all()
    sentences = task.grammar.sample(default_rng(0), 5000)
    assert drawn_as((tuple(sentence) for sentence in sentences), language)


def test_lano_parses_whole_sentences():
    task = make_task("lano", root=10, block_size=20)
    language = all_yields(task.grammar, 10)
    texts = list(product((1, 2, 3), repeat=8))
    verdicts = [text in language for text in texts]
    tokens = torch.tensor(texts)
    assert task.parses(F.pad(tokens, (0, 2), value=4)).tolist() == verdicts and any(verdicts)
    assert not task.parses(tokens).any()  # they have no end
    document = Document([4, *max(language, key=len)])
    for text in list(language)[:20]:
        assert task.is_right(document, (1, len(document.tokens)), [*text, 4])
    assert not task.is_right(document, (1, len(document.tokens)), [1, 1, 4])


def test_lano_scores():
    """Of texts that are sentences, or none, or do not end; by half knowledge, half guessing."""
    task = make_task("lano", root=10, block_size=20)
    task.block_size = 9  # so sentences of nine tokens have no end
    language = all_yields(task.grammar, 10)
    short = [text for text in language if len(text) <= 8]
    long = [text for text in language if len(text) > 8]
    long = (long * 20)[:20]
    none = [(1, 1, 1, 1, 1, 1, 1, 1)] * 20
    texts = []
    for text in short[:40] + long + none:
        missing = 9 - len(text)
        texts.append([4, *text] + [4] * missing)

    def generate(tokens, max_new_tokens, temperature=1.0, stop=None, generator=None):
        assert (tokens.tolist(), max_new_tokens, temperature, stop) == ([[4]] * 80, 9, 1, 4)
        return torch.tensor(texts)

    def forward(tokens):
        chart = task.grammar.chart(tokens[:, 1:])
        exact = (chart / chart.sum(-1, keepdim=True)).nan_to_num()
        logits = torch.full((*tokens.shape, 5), -1e30)
        logits[..., [4, 1, 2, 3]] = (exact / 2 + 1 / 8).log().float()
        return logits, None

    sentences = task.grammar.sample(default_rng([0, tasks.EVAL]), 80)
    places = np.concatenate([exact_table(language, tuple(text))[:9] for text in sentences])
    p = places / places.sum(1, keepdims=True)
    guess = p / 2 + 1 / 8
    nats = (p * np.log(np.maximum(p, 1e-300) / guess)).sum(1).mean()
    scores = task.evaluate(Fake(generate=generate, forward=forward), 0, 80)
    assert scores == {"sentences": 0.5, "KL": pytest.approx(nats, rel=1e-5)} and nats > 0.1


# -- Capo


def test_capo_meets_everybody_once_an_epoch_in_new_words():
    task, people = make_task("capo", N=30, exposures=4, block_size=120), tasks.draw_people(0, 30)
    assert not np.array_equal(people, tasks.draw_people(1, 30))
    who = {tuple(person[:3]): person for person in people.tolist()}
    met, told = [], set()
    assert task.steps(batch_size=5) == 8  # 8 x 5 windows of 3 lives; 4 x 30 wanted
    for step in range(8):
        tokens, mask = task.batch(0, step, 5)
        assert tokens.shape == (5, 121) and np.array_equal(mask, tokens > 0)
        assert not mask[:, 105:].any()
        for life in tokens[:, :105].reshape(-1, 35).tolist():
            met.append(tuple(life[1:4]))
            told.add(tuple(life))
            pronoun, *facts = who[met[-1]][3:]
            assert life[0] == task.bos and life[7:10] + life[14::5] == facts
            assert life[10::5] == [pronoun] * 5
            for wordings, start in zip(task.wordings.tolist(), (4, 11, 16, 21, 26, 31)):
                assert life[start : start + 3] in wordings
    for start in range(0, 120, 30):
        assert len(set(met[start : start + 30])) == len(who) == 30
    assert met[:30] != met[30:60] and len(told) == 120


def test_capo_people_and_wordings():
    people, first = tasks.draw_people(5, 40_000), 1
    for column, size in enumerate(tasks.PERSON.values()):
        assert drawn_as(people[:, column].tolist(), range(first, first + size))
        first += size
    assert len(np.unique(people[:, :3], axis=0)) == 40_000  # chance would bring some five twice
    assert len(np.unique(people[:, -2:], axis=0)) == 263
    assert set(people[:, -1]) <= set(people[:, 7])
    wordings = make_task("capo").wordings
    assert wordings.shape == (6, 10, 3) and len(np.unique(wordings.reshape(-1, 3), axis=0)) == 60


COSTS = {1: 0.5, 2: 0.2, 3: 9, 7: 1, 8: 0.3, 9: 0.4, 10: 3, 14: 2, 19: 0.6, 24: 0.1, 29: 4, 34: 5}
COSTS |= {4: 5, 15: 5, 33: 5}  # words and a later pronoun


@parametrize("nats", ({}, COSTS, dict.fromkeys(range(35), 9)))
def test_capo_bits(nats):
    """Tokens cost {place: nats}; names and facts count where they come first."""
    task = make_task("capo", N=50)
    rng = default_rng([0, tasks.EVAL])
    lives = task.biographies(rng, 0, rng.permutation(50)[:20])[:, 1:]
    lives = {tuple(life[:3]): life for life in lives.tolist()}
    prices = [math.expm1(nats.get(place, 1e-9)) for place in range(1, 35)]
    heights = torch.tensor([[math.log((task.vocab_size - 1) / price)] for price in prices])

    def forward(tokens):
        truth = torch.tensor([lives[tuple(row[1:4])] for row in tokens.tolist()])
        return F.one_hot(truth, task.vocab_size) * heights, None

    def known(places, possible):
        return max(0, 1 - sum(nats.get(place, 0) for place in places) / math.log(possible))

    N0, S0 = 400 * 400 * 1000, 2 * (12 * 28 * 200) * 200 * 300 * 100 * 263
    names, facts = known((1, 2, 3), N0), known((7, 8, 9, 10, 14, 19, 24, 29, 34), S0)
    bits = 50 * (names * math.log2(N0) + facts * math.log2(S0))
    used = len(np.unique(tasks.draw_people(0, 50))) + 50 + 1  # and the words, and <bos>
    rate = bits / (10**6 - 16 * (task.vocab_size - used))
    counts = {"total": 10**6, "embeddings": 16 * task.vocab_size}
    scores = task.evaluate(Fake(forward=forward, parameter_counts=lambda: counts), 0, 20)
    wanted = {"names": names, "facts": facts, "bits": bits, "bits/param": rate}
    assert scores == pytest.approx(wanted, rel=1e-5)


# -- Text

BLOCK = 4096  # of these, 19, 39, .. are held out


@pytest.fixture
def text_file(tmp_path):
    """Random bytes below 255 in 45 blocks and a half, but 255 all over what is held out."""
    data = default_rng(0).integers(0, 255, 45 * BLOCK + BLOCK // 2, dtype=np.uint8)
    for block in (19, 39):
        data[block * BLOCK : (block + 1) * BLOCK] = 255
    file = tmp_path / "text.bin"
    file.write_bytes(data.tobytes())
    return file


def test_text_is_trained_on_what_is_not_held_out(text_file):
    task, data = make_task("text", text=str(text_file)), text_file.read_bytes()
    assert (task.size, task.vocab_size) == (len(data), 257)
    blocks = set()
    for step in range(20):
        tokens, mask = task.batch(0, step, 32)
        assert tokens.shape == (32, 257) and tokens.dtype == np.int64 and mask.all()
        for row in tokens:
            start = data.find(bytes(row - 1 for row in row.tolist()))
            assert start >= 0 and 256 not in row  # 255 is the token 256
            blocks.update((start // BLOCK, (start + 256) // BLOCK))
    assert blocks == set(range(46)) - {19, 39}
    for start, end, meets in (
        (0, 19 * BLOCK, False),
        (0, 19 * BLOCK + 1, True),
        (20 * BLOCK - 1, 21 * BLOCK, True),
        (20 * BLOCK, 39 * BLOCK, False),
    ):
        assert task.meets_held_out(start, end) == meets


def test_text_scores_all_of_a_held_out_block_behind_64_bytes(tmp_path):
    data = default_rng(0).bytes(45 * BLOCK)
    file = tmp_path / "text.bin"
    file.write_bytes(data)
    task = make_task("text", text=str(file))
    scored = []
    for row in task.held_out_windows(10**6):
        start = data.find(bytes(token - 1 for token in row.tolist()))
        assert start >= 0 and len(row) == 257
        scored += range(start + 64, start + 257)
    for first in (19 * BLOCK, 39 * BLOCK):
        inside = [place for place in scored if first <= place < first + BLOCK]
        assert inside == list(range(first + 64, inside[-1] + 1))  # each once, without a gap
        assert first + BLOCK - 257 < inside[-1] < first + BLOCK  # no further window would fit
        scored = [place for place in scored if place not in inside]
    assert not scored
    assert len(task.held_out_windows(5)) == 5


def test_bits_per_byte(text_file):
    """Held-out bytes are all alike here. The model spends one bit on each, or 20 where it stands
    behind `place` others. The 193 bytes of a window that stand behind 64 or more count."""
    task = make_task("text", text=str(text_file))

    def bits(place):
        def forward(tokens):
            B, T = tokens.shape
            cost = torch.ones(T)
            cost[place - 1] = 20
            logits = torch.zeros(B, T, 257)
            logits[..., 0] = -torch.inf
            logits[..., 256] = torch.log(255 / torch.expm1(cost * math.log(2)))
            return logits, None

        return task.evaluate(Fake(forward=forward), 0, 40)["bits per byte"]

    for place in (1, 63):
        assert bits(place) == pytest.approx(1, rel=1e-5)
    for place in (64, 65, 256):
        assert bits(place) == pytest.approx(1 + 19 / 193, rel=1e-5)


def test_text_of_another_run_is_refused(text_file, tmp_path):
    settings = make_task("text", text=str(text_file)).settings
    assert settings["size"] == text_file.stat().st_size
    copy, other = tmp_path / "copy.bin", tmp_path / "other.bin"
    data = text_file.read_bytes()
    copy.write_bytes(data)
    other.write_bytes(data[:-1] + b"?")
    assert make_task(**{**settings, "text": str(copy)}).sha256 == settings["sha256"]
    with pytest.raises(ValueError, match=f"^sha256 = '{settings['sha256']}': .*was another"):
        make_task(**{**settings, "text": str(other)})


def test_the_usual_text_is_pythons_library():
    task = make_task("text")
    data = bytes((task.tokens - 1).astype(np.uint8))
    assert task.size == len(data) > 5_000_000
    assert Path(os.__file__).read_bytes() in data and Path(json.__file__).read_bytes() in data
    library = Path(os.__file__).parent
    for pattern in ("site-packages/*/main*.py", "test/test_o*.py"):
        for file in library.glob(pattern):
            assert file.read_bytes() not in data
    assert task.encode("né") == [1 + byte for byte in "né".encode()]
    assert task.decode(task.encode("né\n")) == "né\n"


# -- Refusals and examples

BAD_TASKS = (
    ("sort", {}, "task = 'sort'"),
    ("copy", dict(K=3), "K = 3"),
    ("copy", dict(N=1), "N = 1"),
    ("copy", dict(N=10**8), "N = 100000000"),
    ("copy", dict(block_size=128), "block_size = 128"),
    ("depo", dict(N=2), "N = 2"),
    ("depo", dict(K=0), "K = 0"),
    ("depo", dict(K=5), "K = 5"),
    ("depo", dict(V=0), "V = 0"),
    ("depo", dict(V=2, word_len=(1, 1)), "N = 5"),
    ("depo", dict(word_len=(3, 2)), "word_len = (3, 2)"),
    ("depo", dict(word_len=(0, 2)), "word_len = (0, 2)"),
    ("depo", dict(word_len=(1, 10**9)), "word_len = (1, 1000000000)"),
    ("depo", dict(separator=True), "separator = True"),
    ("depo0", dict(block_size=69), "block_size = 69"),
    ("brevo", dict(N=2), "N = 2"),
    ("brevo2", dict(block_size=80), "block_size = 80"),
    ("mano", dict(L=0), "L = 0"),
    ("mano", dict(L=10**7), "L = 10000000"),
    ("mano", dict(block_size=7), "block_size = 7"),
    ("lano", dict(cfg="cfg4"), "cfg = 'cfg4'"),
    ("lano", dict(root=3), "root = 3"),
    ("lano", dict(root=23), "root = 23"),
    ("lano", dict(root=22), "block_size = 128"),
    ("lano", dict(block_size=1e10), "block_size = 10000000000.0"),
    ("capo", dict(N=0), "N = 0"),
    ("capo", dict(N=10**7), "N = 10000000"),
    ("capo", dict(exposures=0), "exposures = 0"),
    ("capo", dict(block_size=33), "block_size = 33"),
    ("text", dict(text="no such file"), "text = 'no such file'"),
    ("text", dict(text="/"), "text = '/'"),
    ("text", dict(text=pytest.__file__), f"text = {pytest.__file__!r}"),  # it is too short
    ("text", dict(block_size=127), "block_size = 127"),
    ("text", dict(block_size=4096), "block_size = 4096"),
    ("text", dict(sha256="0" * 64), f"sha256 = '{'0' * 64}'"),
)


@parametrize("name, parameters, message", BAD_TASKS)
def test_bad_and_absurd_tasks_are_refused(name, parameters, message):
    with pytest.raises(ValueError) as error:
        make_task(name, **parameters)
    refused, allowed = str(error.value).split(": ", maxsplit=1)
    assert refused == message and allowed


def test_an_example_is_printed(capsys):
    tasks.main(["depo"])
    title, text, legend = capsys.readouterr().out.split("\n\n")
    assert title.startswith("depo1: N = 5, K = 2") and "brackets" in legend
    assert text.startswith("<bos> ") and " [<ans> " in text
    with pytest.raises(SystemExit, match="2"):
        tasks.main(["sort"])
    assert capsys.readouterr().err.startswith("tasks.py: task = 'sort': allowed: copy, ")


# ---- 4. runs.py, train.py, sample.py ---------------------------------------


TINY = """--task copy --preset nano --N 8 --block-size 20 --device cpu --batch-size 8
    --eval-size 16 --warmup 5 --workers 0 --no-compile""".split()


def tiny(flags, out="run"):
    return [*TINY, *flags.split(), "--out", out]


def logged(out):
    """The lines of a log. They are JSON, which has no NaN."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def checkpoint(out):
    return torch.load(Path(out, "ckpt.pt"), weights_only=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plot.plt.close("all")


@pytest.fixture
def ends(here, capsys):
    """Checks that a program ends with one such line, and before training leaves all files alone."""

    def contents():
        return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}

    def check(command, *words, main=train.main, status=2, training=False):
        before = contents()
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(command)
        output = capsys.readouterr()
        line = output.err.splitlines(keepends=True)[-1]
        assert re.fullmatch(r"\w+\.py: .+\n", line) and stopped.value.code == status
        if not training:
            assert output.err == line and not output.out and contents() == before
        for word in words:
            assert word in line
        return line

    return check


@contextlib.contextmanager
def interruption(step, error=None):
    """SIGTERM arrives, or an error, while the batch of this step is made."""
    make = train.Batches.__getitem__

    def watched(batches, number):
        if number == step:
            if error:
                raise error
            signal.raise_signal(signal.SIGTERM)
        return make(batches, number)

    with patch.object(train.Batches, "__getitem__", watched):
        yield


def test_command_line_end_to_end(here):
    """With so low a rate that the weights stay as they were."""
    words = [*TINY, *"--canon DcbA --steps 50 --eval-every 30 --seed 5 --lr 1e-12".split()]
    command = [sys.executable, HERE / "train.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = Path("out").iterdir()
    config, log, saved = json.loads((run / "config.json").read_text()), logged(run), checkpoint(run)
    about = "dtype seed eval_size preset date device processes compiled python torch numpy"
    assert set(about.split()) <= set(config) and config["model"]["canon"] == "abcd"
    assert config["units"] == {"sequences": "share", "tokens": "share"}
    assert shlex.split(config["command"]) == ["python", "train.py", *words]
    group = saved["optimizer"]["param_groups"][0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-6, 0.03)
    assert [line["step"] for line in log] == [20, 30, 40, 50, 50]
    assert [line["step"] for line in log if "eval" in line] == [30, 50, 50]
    training = train.Training(**config["training"])
    for line in log[:-1]:
        assert line["lr"] == train.learning_rate(line["step"], 1e-12, training)
        assert line["tokens"] == line["step"] * 8 * 20
    last = log[-1]
    assert last["final"] is True and last["seconds"] > 0
    assert last["tokens_per_s"] == pytest.approx(8 * 20 * 1e3 / last["step_ms"], rel=0.01)
    printed = {*last, *last["eval"], f"{config['parameters']['total']:,}"}
    assert printed - {"step", "eval", "final"} <= set(done.stdout.split())
    for words in ("copy: N 8", "1 layer of attention", "Canon-ABCD", "50 steps of 8", "✗"):
        assert words in done.stdout

    torch.manual_seed(5)
    task, model = make_task(**config["task"]), CanonGPT(Config(**config["model"]))
    for name, weight in model.named_parameters():
        assert torch.allclose(saved["model"][name], weight)
    tokens, mask = map(torch.from_numpy, task.batch(5, 19, 8))
    loss = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()
    assert log[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert last["eval"] == task.evaluate(model, 5, 16)


def test_help_says_what_presets_set(capsys):
    with pytest.raises(SystemExit, match="0"):
        train.main(["--help"])
    text = capsys.readouterr().out
    for words in ("nano sets:", "paper sets:", "depo0: N 10, K 4", "16,000 steps of 32 windows"):
        assert words in text


def test_a_config_repeats_its_run(here):
    train.main(tiny("--steps 25 --canon ac --seed 3", "first"))
    again = "--config first/config.json --out second --device cpu --no-compile".split()
    train.main(again)
    first, second = checkpoint("first"), checkpoint("second")
    assert first["recipe"] == second["recipe"]
    for name, weight in first["model"].items():
        assert torch.equal(weight, second["model"][name])
    _, recipe = train.read_command_line(["--config", "first/config.json", "--lr", "0.5"])
    assert recipe.training.lr == 0.5 and recipe.model.canon == "ac" and recipe.seed == 3


def test_a_config_with_an_unknown_preset_is_refused(ends):
    """Also with --out. (Without it, the preset is needed for the folder's name.)"""
    train.main(tiny("--steps 2", "first"))
    config = json.loads(Path("first/config.json").read_text())
    Path("mine.json").write_text(json.dumps({**config, "preset": "mine"}))
    ends(["--config", "mine.json", "--out", "second"], "holds no recipe", "preset = 'mine'")
    assert not Path("second").exists()


@parametrize("error", (None, KeyError("power failure")))
def test_resume_goes_on_as_if_never_stopped(error, ends):
    """After a signal in step 48, or a crash there: same weights, same lines in the log."""

    def steady(out):
        return [[line.get(x) for x in ("step", "tokens", "loss", "eval")] for line in logged(out)]

    flags = "--steps 60 --eval-every 20"
    train.main(tiny(flags, "whole"))
    with interruption(47, error), pytest.raises(type(error) if error else SystemExit):
        train.main(tiny(flags))
    saved, last = checkpoint("run"), logged("run")[-1]
    assert saved["step"] == (40 if error else 48)
    assert last["step"] == 40 if error else last == {"step": 48, "stopped": "SIGTERM"}
    torch.save({**saved, "seconds": 1000.0}, "run/ckpt.pt")
    Path("run/metrics.jsonl").write_text('{"step": 41, "lo')
    train.main(tiny(flags + " --resume"))
    assert steady("run") == steady("whole") and logged("run")[-1]["seconds"] >= 1000
    a, b = checkpoint("run")["model"], checkpoint("whole")["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)
    Path("run/metrics.jsonl").write_text("x")
    ends(tiny(flags + " --resume"), "nothing left to do", status=0, training=True)
    assert steady("run") == steady("whole")


def test_workers_and_compile_change_nothing(here, monkeypatch):
    compiled, real = [], partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or real(model))
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: True)
    train.main(tiny("--steps 20 --canon abcd", "plain"))
    fancy = tiny("--steps 20 --canon abcd --workers 2", "fancy")
    fancy[fancy.index("--no-compile")] = "--compile"
    train.main(fancy)
    a, b = ([line["loss"] for line in logged(out)[:-1]] for out in ("plain", "fancy"))
    assert len(compiled) == 1 and a == pytest.approx(b, abs=1e-3)
    assert not torch._dynamo.config.suppress_errors  # who asks for --compile hears of its errors


@parametrize(
    "flags, compiled",
    [
        ("--task depo0", True),
        ("--task text", True),
        ("--task copy", False),  # a run of seconds
        ("--task copy --steps 200000", True),
        ("--task depo0 --no-compile", False),
        ("--task copy --compile", True),
    ],
)
def test_long_runs_are_compiled(flags, compiled, monkeypatch):
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: True)
    words = f"{flags} --preset nano --canon abcd --device cpu".split()
    options, recipe = train.read_command_line(words)
    resumed, _ = train.read_command_line([*words, "--resume"])
    assert options.compile == resumed.compile == compiled
    assert options.eval_every == recipe.training.steps // 20


@parametrize(
    "world, names, kills",
    [(1, ("INT", "INT"), True), (2, ("INT", "INT"), False), (1, ("TERM", "TERM", "INT"), False)],
)
def test_only_a_second_ctrl_c_kills(world, names, kills, monkeypatch, capfd):
    monkeypatch.setattr(train, "WORLD", world)
    numbers = [getattr(signal, f"SIG{name}") for name in names]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) if kills else nullcontext():
            with train.StopSignals() as stop:
                for number in numbers:
                    signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.requested == numbers[0]
    assert capfd.readouterr().err.count("train.py: saving, then stopping") == 1


posix = pytest.mark.skipif(os.name == "nt", reason="no POSIX signals")
ENDLESS = "--steps 1000000 --eval-every 500000"


def heed_ctrl_c():
    """A shell starts programs in the background so that they ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def in_the_background(*command, runs=1):
    """A process, once so many of its trainings have logged a line.

    Whatever happens in the block, neither it nor its children outlive it.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    try:
        while sum(path.stat().st_size > 0 for path in Path().rglob("metrics.jsonl")) < runs:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()  # torchrun ends its processes, which are not of this group
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):  # usually all have ended
            os.killpg(process.pid, signal.SIGKILL)


@posix
def test_sigterm_to_all_processes_saves_and_no_second_run_gets_in(ends, monkeypatch):
    """Batch systems signal the loader's workers, too. Until then the folder is locked."""
    monkeypatch.setattr(train, "train_step", pytest.fail)
    with in_the_background(HERE / "train.py", *tiny(ENDLESS + " --workers 2")) as process:
        ends(tiny(ENDLESS + " --resume"), "run is in use", training=True)
        os.killpg(process.pid, signal.SIGTERM)
        assert "--resume to continue" in process.communicate(timeout=120)[1].splitlines()[-1]
    assert process.returncode == 128 + signal.SIGTERM
    assert logged("run")[-1]["step"] == checkpoint("run")["step"] >= 20


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


@posix
def test_a_killed_run_leaves_no_lock_and_a_killed_worker_ends_its_run(here):
    flags = tiny(ENDLESS + " --workers 2")
    with in_the_background(HERE / "train.py", *flags) as first:
        first.kill()
        first.communicate(timeout=120)
        with in_the_background(HERE / "train.py", *flags, "--resume") as second:
            while len(children(second.pid)) < 2:  # PyTorch is still loading
                assert second.poll() is None
                time.sleep(0.1)
            os.kill(children(second.pid)[0], signal.SIGKILL)
            second.communicate(timeout=120)
            assert second.returncode == 1


BROKEN_TASK = """
import sys
import train
from tasks import TASKS, Copy

class Broken(Copy):
    def batch(self, seed, step, batch_size):
        if step == 30 and "worker" in sys.argv:
            raise KeyError("a bug in the generator")
        return super().batch(seed, step, batch_size)

    def evaluate(self, model, seed, n):
        if n > 1:
            raise KeyError("a bug in the scores")
        return super().evaluate(model, seed, n)

TASKS["broken"] = Broken
if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "worker"]
    train.main(words, program=__file__)
"""


@posix
@parametrize("where, words", [("worker", "a bug in the generator"), ("", "a bug in the scores")])
def test_bugs_of_ones_own_end_a_run_with_workers(where, words, here):
    """With a traceback, and without waiting for workers that ignore SIGTERM."""
    Path("broken.py").write_text(BROKEN_TASK)
    flags = tiny("--steps 60 --eval-every 40 --workers 2")
    flags[flags.index("copy")] = "broken"
    command = [sys.executable, "broken.py", *flags, *where.split()]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1 and "Traceback" in done.stderr and words in done.stderr


@parametrize("what", ("loss", "weights", "tokens"))
def test_what_is_not_finite_is_named_stops_and_is_not_saved(what, ends, monkeypatch):
    steps, real = iter(range(1, 100)), train.train_step
    last = 50 if what == "weights" else 60

    def spoilt(model, *rest):
        loss, norm = real(model, *rest)
        if next(steps) < last:
            return loss, norm
        if what == "weights":
            model.norm.weight.data[3] = math.inf
        if what == "tokens":
            monkeypatch.setattr(tasks.Copy, "evaluate", lambda *_: {"tokens": math.nan})
        return loss * (math.nan if what == "loss" else 1), norm

    monkeypatch.setattr(train, "train_step", spoilt)
    with interruption(last - 1):  # at 50 it would save, but not score
        flags = tiny("--steps 60 --eval-every 20")
        ends(flags, f"step {last}: {what} ", "smaller --lr", status=1, training=True)
    assert checkpoint("run")["step"] == logged("run")[-1]["step"] == 40


@parametrize("share", (1e-3, 1e3))
def test_a_step_clips_gradients(share, monkeypatch):
    config = Config(vocab_size=19, block_size=24, n_layer=1, n_head=2, d_model=16)
    model, kept = CanonGPT(config), []

    def step():
        squares = [p.grad.square().sum() for p in model.parameters()]
        kept.append(torch.stack(squares).sum().sqrt().item())

    optimizer = train.adamw(model, train.Training(steps=9, batch_size=6, lr=0.1), "cpu")
    monkeypatch.setattr(optimizer, "step", step)
    tokens, mask = torch.randint(0, 19, (6, 25)), torch.ones(6, 25, dtype=torch.bool)
    count = torch.tensor(2 * 24 / share)  # so that each of three parts has this share
    for clip, most in ((1.0, 1.0), (0.5, 0.5), (0, math.inf)):
        settings = train.Training(steps=9, batch_size=6, lr=0.1, clip=clip)
        batch = tokens, mask, count
        _, norm = train.train_step(model, optimizer, batch, settings, 3, nullcontext())
        assert (norm > 1) == (share > 1)
        assert kept.pop() == pytest.approx(min(most, norm.item()), rel=1e-3)


def test_learning_rate_schedule():
    cosine = train.Training(steps=110, warmup=10, lr=2.0, batch_size=1)
    rates = [train.learning_rate(step, 2.0, cosine) for step in (1, 5, 10, 11, 61, 111)]
    assert rates == pytest.approx([0.2, 1, 2, 2, 1.1, 0.2])
    linear = train.Training(steps=110, warmup=0, lr=2.0, batch_size=1, schedule="linear")
    assert [train.learning_rate(step, 2.0, linear) for step in (1, 56, 111)] == [2, 1, 0]


def test_a_group_keeps_its_own_learning_rate(here, monkeypatch):
    """Through the schedule, and through --resume."""
    make = train.adamw

    def two_rates(*arguments):
        optimizer = make(*arguments)
        optimizer.param_groups[1]["lr"] = 7.0
        return optimizer

    seen, real = [], train.train_step

    def watched(model, optimizer, *rest):
        seen.append([group["lr"] for group in optimizer.param_groups])
        return real(model, optimizer, *rest)

    monkeypatch.setitem(train.OPTIMIZERS, "adamw", two_rates)
    monkeypatch.setattr(train, "train_step", watched)
    with interruption(9), pytest.raises(SystemExit):
        train.main(tiny("--steps 20 --lr 0.01"))
    train.main(tiny("--steps 20 --lr 0.01 --resume"))
    assert len(seen) == 20
    for first, second in seen:
        assert second / first == pytest.approx(700)


class TwoOptimizers:
    """As Muon beside AdamW: one for the matrices of the blocks, one for the rest."""

    def __init__(self, model):
        blocks = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if not any(p is other for other in blocks)]
        self.both = [
            torch.optim.SGD(blocks, lr=0.1, momentum=0.9),
            torch.optim.AdamW(rest, lr=0.01),
        ]
        self.param_groups = self.both[0].param_groups + self.both[1].param_groups

    def step(self):
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.both:
            optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"both": [optimizer.state_dict() for optimizer in self.both]}

    def load_state_dict(self, saved):
        for optimizer, state in zip(self.both, saved["both"]):
            optimizer.load_state_dict(state)
        self.param_groups = self.both[0].param_groups + self.both[1].param_groups


def test_an_optimizer_of_ones_own_resumes(here, monkeypatch):
    monkeypatch.setitem(train.OPTIMIZERS, "adamw", lambda model, *rest: TwoOptimizers(model))
    train.main(tiny("--steps 20", "whole"))
    with interruption(9), pytest.raises(SystemExit):
        train.main(tiny("--steps 20", "run"))
    train.main(tiny("--steps 20 --resume", "run"))
    whole, resumed = checkpoint("whole"), checkpoint("run")
    assert all(line["gradient_norm"] > 0 for line in logged("whole") if "loss" in line)
    first_group = whole["optimizer"]["both"][0]["param_groups"][0]
    assert logged("whole")[-2]["lr"] == first_group["lr"]  # of the step before the final line
    for name, weight in whole["model"].items():
        assert torch.equal(weight, resumed["model"][name])


class Lion(torch.optim.AdamW):
    """Remembers a mean and no squares. (Without "step", PyTorch itself would not load it.)"""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("step", torch.tensor(0.0))
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 0.1)
                weight -= group["lr"] * mean.sign()


def test_a_child_of_adamw_resumes(here, monkeypatch):
    monkeypatch.setitem(train.OPTIMIZERS, "lion", lambda model, *rest: Lion(model.parameters()))
    train.main(tiny("--steps 20 --optimizer lion", "whole"))
    with interruption(9), pytest.raises(SystemExit):
        train.main(tiny("--steps 20 --optimizer lion"))
    train.main(tiny("--steps 20 --optimizer lion --resume"))
    for name, weight in checkpoint("whole")["model"].items():
        assert torch.equal(weight, checkpoint("run")["model"][name])


class Unreadable(torch.optim.SGD):
    def state_dict(self):
        return {"a number that PyTorch does not load": np.float64(1)} if self.stepped else {}

    stepped = False

    def step(self):
        super().step()
        self.stepped = True


def test_what_could_not_be_read_back_ends_the_run(ends, monkeypatch):
    def unreadable(model, training, device):
        return Unreadable(model.parameters(), lr=training.lr)

    monkeypatch.setitem(train.OPTIMIZERS, "unreadable", unreadable)
    words = tiny("--steps 40 --eval-every 20 --optimizer unreadable")
    ends(words, "--resume could not go on from here", training=True)
    assert logged("run")[-1]["step"] == 20


def test_an_optimizer_that_leaves_out_a_weight_is_refused(ends, monkeypatch):
    def forgetful(model, training, device):
        return torch.optim.AdamW([model.head.weight], lr=training.lr)

    monkeypatch.setitem(train.OPTIMIZERS, "forgetful", forgetful)
    ends(tiny("--optimizer forgetful"), "the optimizer does not update embed.weight")


@parametrize("factor", (1.5, -0.1, math.nan))
def test_a_schedule_out_of_range_is_refused(factor, ends, monkeypatch):
    monkeypatch.setitem(train.SCHEDULES, "own", lambda done: factor if done == 1 else 1.0)
    ends(tiny("--schedule own"), f"schedule = 'own': {factor} at 1.0; allowed: 0 to 1")


def test_a_score_without_a_unit_is_refused(ends, monkeypatch):
    class Renamed(tasks.Copy):
        units = {"lists": "share"}

    monkeypatch.setitem(tasks.TASKS, "renamed", Renamed)
    ends(tiny("--task renamed"), "its units lack the score")


def test_a_task_without_defaults_is_refused(ends, monkeypatch):
    class Bare(tasks.Copy):
        def __init__(self, N, block_size):
            super().__init__(N, block_size)

    monkeypatch.setitem(tasks.TASKS, "bare", Bare)
    ends(tiny("--task bare"), "task = 'bare': its argument N needs a default")


def test_a_score_that_the_log_cannot_hold_is_refused(ends, monkeypatch):
    class Tensors(tasks.Copy):
        def evaluate(self, model, seed, n):
            return {"tokens": torch.tensor(0.5)}

    monkeypatch.setitem(tasks.TASKS, "tensors", Tensors)
    ends(tiny("--task tensors"), "its score 'tokens' is a Tensor, not a Python number")


def test_a_checkpoint_holds_whatever_has_a_state(here):
    model = torch.nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    config = vars(Config(vocab_size=8, block_size=8))
    training = run_folders.Training(steps=1, batch_size=4, lr=0.1)
    recipe = run_folders.Recipe("nano", {}, config, training, "float32", seed=0, eval_size=1)
    about = recipe.as_dict()
    stateful = {"model": model, "optimizer": optimizer}
    run = run_folders.Run("without", about)
    run.save(stateful, step=0, seconds=0.0)
    run = run_folders.Run("with", about)
    stateful["average"] = average
    with torch.no_grad():
        average.module.weight.fill_(7)
    run.save(stateful, step=0, seconds=0.0)
    with torch.no_grad():
        average.module.weight.fill_(8)
    run.log_file.close()
    run_folders.Run("with", about, resume=True).restore(stateful)
    assert (average.module.weight == 7).all()
    with pytest.raises(run_folders.RunError, match="does not fit: it has no average"):
        run_folders.Run("without", about, resume=True).restore(stateful)
    stateful["average"] = torch.nn.Linear(2, 3)  # not of the shape that was saved
    with pytest.raises(run_folders.RunError, match="does not fit"):
        run_folders.Run("with", about, resume=True).restore(stateful)


def test_a_checkpoint_with_older_names_is_read():
    """Canon-B and Canon-D were once just `canon` in their layers."""
    sizes = dict(vocab_size=8, block_size=8, n_layer=2, n_head=2, d_model=16)
    model, fresh = (CanonGPT(Config(**sizes, canon="abcd")) for _ in range(2))
    older = {}
    for name, weight in model.state_dict().items():
        older[re.sub("canon_[bd]", "canon", name)] = weight
    assert "blocks.1.mixer.canon.weight" in older and "blocks.0.mlp.canon.weight" in older
    run_folders.load_weights(fresh, older)
    for name, weight in fresh.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_a_checkpoint_of_another_optimizer_is_refused(ends, monkeypatch):
    with interruption(9), pytest.raises(SystemExit):
        train.main(tiny("--steps 20"))
    monkeypatch.setitem(train.OPTIMIZERS, "adamw", lambda model, *rest: TwoOptimizers(model))
    ends(tiny("--steps 20 --resume"), "its optimizer was AdamW, not TwoOptimizers")


def test_a_trained_checkpoint_beside_an_empty_log_is_kept(ends):
    """So it is for a moment while a run resumes."""
    train.main(tiny("--steps 3"))
    Path("run/metrics.jsonl").write_text("")
    ends(tiny("--steps 3"), "run is not empty: --resume continues it")


class LooksAhead(Canon):
    def forward(self, x, state=None):
        return super().forward(x, state) + 0.1 * x.roll(-1, dims=1) * self.weight[1]


class ForgetsItsStream(Canon):
    def forward(self, x, state=None):
        return super().forward(x)


class MixesTheBatch(Canon):
    def forward(self, x, state=None):
        return super().forward(x, state) + 0.1 * x.cumsum(0)


class AlwaysDropsOut(Canon):
    def forward(self, x, state=None):
        return torch.nn.functional.dropout(super().forward(x, state), 0.1)


class DividesByZero(Canon):
    def forward(self, x, state=None):
        return super().forward(x, state) / (self.weight[0] * 0)


class NeverUsed(Canon):
    def __init__(self, width, config):
        super().__init__(width, config)
        self.spare = torch.nn.Parameter(torch.ones(width))


FAULTS = {
    LooksAhead: "a layer looks ahead",
    ForgetsItsStream: "does not keep in state[self]",
    MixesTheBatch: "a layer mixes the sequences of a batch",
    AlwaysDropsOut: "a layer is random",
    DividesByZero: "the logits are not finite",
}


@parametrize("point", "abcd")
@parametrize("layer", FAULTS)
def test_a_layer_with_a_fault_is_refused(layer, point, ends):
    with patch.dict(canon_gpt.CANONS, own=layer):
        ends(tiny(f"--canon {point} --canon-type own"), "canon_type own", FAULTS[layer])


@patch.dict(canon_gpt.CANONS, own=NeverUsed)
def test_a_weight_that_is_never_used_is_mentioned(here, capsys):
    train.main(tiny("--canon c --canon-type own --steps 2"))
    said = capsys.readouterr().err
    assert said.count("no layer used") == 1
    assert "no layer used blocks.0.canon_c.spare\n" in said


class LearnedPositions(canon_gpt.Positions):
    @staticmethod
    def vectors(config):
        return torch.nn.Embedding(config.block_size, config.d_model)


@patch.dict(POSITIONS, learned=LearnedPositions)
def test_positions_may_be_added_to_the_embeddings(here):
    """Also in a stream, which train.py checks before it trains."""
    train.main(tiny("--pos learned --steps 3"))
    _, model = run_folders.load_model("run")
    vectors = model.position_vectors.weight.detach()
    assert vectors.std().item() == pytest.approx(0.02, rel=0.2)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    model(torch.tensor([[3, 3]]), state={model: 5})
    first, second = seen[0][0].detach()
    assert_close(second - first, vectors[6] - vectors[5])


class FixedPositions(canon_gpt.Positions):
    @staticmethod
    def vectors(config):
        table = torch.arange(config.block_size * config.d_model).float().sin()
        return torch.nn.Embedding.from_pretrained(table.view(config.block_size, -1))


@patch.dict(POSITIONS, fixed=FixedPositions)
def test_fixed_positions_stay_as_they_are(here):
    train.main(tiny("--pos fixed --steps 3"))
    _, model = run_folders.load_model("run")
    expected = FixedPositions.vectors(model.config).weight
    assert torch.equal(model.position_vectors.weight, expected)


class FewExamples(tasks.Copy):
    """Trains on lists that begin with 1, and is scored on others."""

    def documents(self, rng, count):
        return self.some(rng, count, begin_with_one=False)

    def training_documents(self, rng, count):
        return self.some(rng, count, begin_with_one=True)

    def some(self, rng, count, begin_with_one):
        found = []
        while len(found) < count:
            (document,) = super().documents(rng, 1)
            if (document.tokens[1] == 1) == begin_with_one:
                found.append(document)
        return found


def test_a_task_may_train_on_other_documents_than_it_is_scored_on():
    task = FewExamples(N=4, block_size=9)
    tokens, _ = task.batch(seed=0, step=0, batch_size=50)
    assert (tokens[:, 1] == 1).all()
    assert all(document.tokens[1] != 1 for document in task.documents(np.random.default_rng(0), 9))


class DrawsItself(tasks.Copy):
    def documents(self, rng, count):
        return super().documents(np.random.default_rng(), count)


class UnknownToken(tasks.Copy):
    vocabulary = ["", "a", "b"]

    def __init__(self, N=8, block_size=17):
        self.N, self.bos, self.query = N, 1, 9
        tasks.Task.__init__(self, block_size)

    def documents(self, rng, count):
        return [Document([1, 2, 9], [(1, 2)]) for _ in range(count)]


BAD_TASKS = {DrawsItself: "its documents differ", UnknownToken: "token 9 is not in its vocabulary"}


@parametrize("kind", BAD_TASKS)
def test_a_task_with_a_fault_is_refused(kind, ends):
    with patch.dict(tasks.TASKS, own=kind):
        ends(tiny("--task own"), "own: ", BAD_TASKS[kind])


def test_a_program_may_import_what_stands_beside_it(here, monkeypatch):
    """sample.py, plot.py and reproduce.py run it for what it registers."""
    Path("own").mkdir()
    Path("own/beside_it.py").write_text("def act(x):\n    return x\n")
    words = "import beside_it\nimport canon_gpt\ncanon_gpt.MLPS['linear'] = (beside_it.act, True)\n"
    Path("own/program.py").write_text(words)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with patch.dict(MLPS), patch.dict(sys.modules):
        run_folders.register("own/program.py")
        assert MLPS["linear"][0](5) == 5


def test_documents_take_arrays():
    """Their numbers are appended, not added."""
    document = Document([1])
    document.give(np.array([2]))
    assert document.ask(np.array([3, 4])) == (2, 4) and document.tokens == [1, 2, 3, 4]


class DoesNotStream(ForgetsItsStream):
    streams = False


@patch.dict(canon_gpt.CANONS, own=DoesNotStream)
def test_a_layer_may_say_that_it_does_not_stream(here):
    """Then it may train, and a model writes as if it streamed, by reading all tokens each time."""
    train.main(tiny("--canon ab --canon-type own --steps 3"))
    task, model = run_folders.load_model("run")
    streaming = CanonGPT(Config(**{**vars(model.config), "canon_type": "conv"})).eval()
    streaming.load_state_dict(model.state_dict())
    tokens = torch.randint(0, task.vocab_size, (3, 4))
    assert torch.equal(model.generate(tokens, 9, 0), streaming.generate(tokens, 9, 0))
    limit = task.block_size
    assert model.generate(tokens, limit - 3, 0).shape == (3, limit + 1)
    with pytest.raises(ValueError, match="cannot read a text in pieces"):
        model(tokens, state={})


class LooksAheadLater(Canon):
    """As its weight is zero at the start, the first logits are those of a sound layer."""

    def __init__(self, width, config):
        super().__init__(width, config)
        self.ahead = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x, state=None):
        return super().forward(x, state) + self.ahead * x.roll(-1, dims=1)


@patch.dict(canon_gpt.CANONS, own=LooksAheadLater)
def test_a_layer_that_starts_to_look_ahead_later_is_refused(ends):
    ends(tiny("--canon a --canon-type own"), "a layer looks ahead")


class LooksFarAhead(Canon):
    """By 40 tokens, as a mixer might that mistakes the future of its chunk for the past."""

    def forward(self, x, state=None):
        return super().forward(x, state) + 0.1 * F.pad(x, (0, 0, 0, 40))[:, 40:]


@patch.dict(canon_gpt.CANONS, own=LooksFarAhead)
def test_a_layer_that_looks_far_ahead_is_refused(ends):
    ends(tiny("--block-size 128 --canon a --canon-type own"), "a layer looks ahead")


class Wide(Attention):
    @classmethod
    def check(cls, config):
        if config.d_model % 64 != 0:
            config.refuse("d_model", "must be a multiple of 64")


@patch.dict(MIXERS, wide=Wide)
def test_a_mixer_need_not_fit_the_width_of_the_preset(ends):
    ends(tiny("--mixer wide"), "d_model = 16")
    words = [*TINY, *"--mixer wide --d-model 64 --steps 2".split()]
    train.main(words)
    (run,) = Path("out").iterdir()
    assert "wide" in run.name and "d-model=64" in run.name


class Narrow(Attention):
    def __init__(self, config):
        super().__init__(config)
        config.refuse("d_model", "too wide")


class Costly(Attention):
    budget = 12


def test_what_a_mixer_refuses_when_it_is_made_is_one_line(ends):
    with patch.dict(MIXERS, narrow=Narrow, costly=Costly):
        ends(tiny("--mixer narrow"), "d_model = 16: too wide")
        ends(tiny("--mixer costly"), "its budget leaves the MLP nothing")
        train.main(tiny("--mixer costly --mlp none --steps 2"))


class Forgetful(Attention):
    def forward(self, x, state=None):
        return open("missing.txt")


@patch.dict(MIXERS, forgetful=Forgetful)
def test_a_bug_in_a_layer_of_ones_own_shows_where_it_is(here):
    """As the file is none of the run's."""
    with pytest.raises(FileNotFoundError, match="missing.txt"):
        train.main(tiny("--mixer forgetful"))


def test_answers_in_colour():
    text = "<bos> a [b\nc ✓] d [e ✗ f] g [h ✓]"
    green, red, normal = (f"\033[{code}m" for code in (32, 31, 0))
    want = f"<bos> a {green}[b\nc ✓]{normal} d {red}[e ✗ f]{normal} g {green}[h ✓]{normal}"
    assert sample.coloured(text) == want


def test_a_run_that_has_logged_nothing_may_start_again(ends):
    with interruption(3, KeyError("a bug")), pytest.raises(KeyError):
        train.main(tiny("--steps 40 --eval-every 40"))
    assert checkpoint("run")["step"] == 0 and not Path("run/metrics.jsonl").read_text()
    train.main(tiny("--steps 20 --lr 0.02"))
    assert logged("run")[-1]["final"]


def test_other_processes_outlive_a_run(here):
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    other.start()
    train.main(tiny("--steps 2 --workers 1"))
    assert other.is_alive()
    other.kill()
    other.join()


def test_a_pattern_may_need_more_layers_than_the_preset_has(here):
    train.main(tiny("--mixer gdn,attention --n-layer 2 --steps 2"))
    _, recipe = train.read_command_line([*TINY, "--mixer", "gdn,attention", "--n-layer", "2"])
    assert "n-layer=2" in train.unlike_preset(recipe)


class Unusual(Canon):
    """With dropout, and a weight that never gets a gradient."""

    modes = set()  # (whether it trains, whether there are gradients) at each call

    def __init__(self, width, config):
        super().__init__(width, config)
        self.unused = torch.nn.Parameter(torch.zeros(3))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, state=None):
        self.modes.add((self.training, torch.is_grad_enabled()))
        return self.dropout(super().forward(x, state))


def test_dropout_is_off_in_evaluations_and_resumes_as_do_unused_weights(here):
    with patch.dict(canon_gpt.CANONS, own=Unusual):
        train.main(tiny("--steps 20 --canon a --canon-type own", "whole"))
        with interruption(9), pytest.raises(SystemExit):
            train.main(tiny("--steps 20 --canon a --canon-type own"))
        train.main(tiny("--steps 20 --canon a --canon-type own --resume"))
        frozen = canon_gpt.canon_at("a", 8, Config(9, 9, canon="a", canon_type="own",
                                                   canon_frozen=True))  # fmt: skip
    assert not any(weight.requires_grad for weight in frozen.parameters())
    assert Unusual.modes == {(True, True), (False, False)}
    assert logged("run")[-1]["final"]
    for name, weight in checkpoint("whole")["model"].items():
        assert torch.equal(weight, checkpoint("run")["model"][name])


def test_a_run_older_than_a_field_has_its_default(here):
    """It is read, and it resumes."""
    with interruption(9), pytest.raises(SystemExit):
        train.main(tiny("--steps 20 --eval-every 5"))
    saved = checkpoint("run")
    del saved["recipe"]["model"]["canon_frozen"], saved["recipe"]["training"]["schedule"]
    torch.save(saved, "run/ckpt.pt")
    path = Path("run/config.json")
    config = json.loads(path.read_text())
    del config["model"]["canon_frozen"], config["training"]["schedule"]
    del config["units"]  # older runs do not say
    config["model"]["from_a_fork"] = [1, None]  # what figures do not ask for
    path.write_text(json.dumps(config))
    (run,), problems = run_folders.read_all(["run"])
    assert not problems and run["model"]["canon_frozen"] is False
    assert run["training"]["schedule"] == "cosine" and run["units"]["tokens"] == "share"
    train.main(tiny("--steps 20 --eval-every 5 --resume"))


@parametrize("name", ("depo", "mano"))
def test_parts_of_a_batch_add_up_to_its_loss(name, monkeypatch):
    task = make_task(name)
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=2, d_model=16)
    model = CanonGPT(config).double()

    no_optimizer = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)

    settings = train.Training(steps=9, batch_size=12, lr=0.1)
    batch = task.batch(5, 7, 12)
    tokens, mask = map(torch.from_numpy, batch)
    _, whole = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])
    for world, parts in product((1, 2, 3), (1, 2)):
        monkeypatch.setattr(train, "WORLD", world)
        mean, rows = 0, []  # of the processes
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            batch_of_rank = train.Batches(task, 5, 12)[7]
            part, _ = train.train_step(
                model, no_optimizer, batch_of_rank, settings, parts, nullcontext()
            )
            mean += part.item() / world
            rows += batch_of_rank[0].tolist()
        assert sorted(rows) == sorted(batch[0].tolist())
        assert mean == pytest.approx(whole.item(), rel=1e-6)
    with pytest.raises(SystemExit):  # not a multiple of the processes
        train.read_command_line([*TINY, "--batch-size", "5"])


@posix
def test_two_processes_train_as_one_does(here):
    """In three parts each. A signal stops both at the same step; then one goes on."""
    flags = "--task depo --preset nano --canon ac --device cpu --no-compile --batch-size 6"
    flags = f"{flags} --eval-size 16 {ENDLESS} --out".split()
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    words = [*torchrun, HERE / "train.py", *flags, "run", "--grad-accum", "3"]
    with in_the_background(*words) as process:
        process.terminate()
        assert process.communicate(timeout=120)[1].count("--resume to continue") == 1
    steps = checkpoint("run")["step"]
    assert json.loads(Path("run/config.json").read_text())["processes"] == 2
    for words in (["run", "--resume"], ["one"]):
        with interruption(steps + 19), pytest.raises(SystemExit):
            train.main([*flags, *words])
    losses = []
    for out in ("run", "one"):
        losses.append({line["step"]: line["loss"] for line in logged(out) if "loss" in line})
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert list(losses[0]) == list(range(20, steps + 21, 20))


BAD_FLAGS = [  # the flags, and what the line names
    ("--task sort", "task = 'sort'"),
    ("--preset huge", "preset = 'huge'"),
    ("--preset=", "preset = ''"),
    ("--mixer conv", "mixer = 'conv'"),
    ("--steps 0", "steps = 0"),
    ("--steps many", "--steps"),
    ("--lr 0", "lr = 0.0"),
    ("--lr nan", "lr = nan"),
    ("--batch-size 0", "batch_size = 0"),
    ("--batch-size 10000000", "batch_size = 10000000"),
    ("--warmup -1", "warmup = -1"),
    ("--weight-decay -0.1", "weight_decay = -0.1"),
    ("--betas 0.9 1", "betas = 1.0"),
    ("--eps -1", "eps = -1.0"),
    ("--seed -1", "seed = -1"),
    ("--seed 4294967296", "seed = 4294967296"),
    ("--workers -1", "workers = -1"),
    ("--workers 1000", "workers = 1000"),
    ("--eval-every 0", "eval_every = 0"),
    ("--eval-size 0", "eval_size = 0"),
    ("--eval-size 10000000", "eval_size = 10000000"),
    ("--grad-accum 0", "grad_accum = 0"),
    ("--grad-accum 3", "a multiple of 3"),
    ("--schedule step", "schedule = 'step'"),
    ("--device abacus", "device = 'abacus'"),
    ("--cannon abcd", "--cannon"),
    ("--dtype float16", "dtype = 'float16'"),
    ("--mixer gla --pos alibi", "pos = 'alibi'"),
    ("--mixer gla --n-head 4", "n_head = 4"),
    ("--mixer gla --pos rope", "pos = rope"),
    ("--n-head 3", "d_model = 16"),
    ("--block-size 9", "block_size = 9"),
    ("--K 5", "K = 5"),
    ("--out=", "out = ''"),
    ("--compile", "C++ compiler"),
    ("--resume", "run has no ckpt.pt"),
    ("--out mine", "mine is not empty"),
    ("--config mine/notes.txt", "config = mine/notes.txt"),
    ("--config mine/notes.txt --mixer gla", "leave --mixer out"),
    ("--task text --preset paper", "text has none of this size"),
]


@parametrize("flags, words", BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_written(flags, words, ends, monkeypatch):
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: False)
    monkeypatch.setattr(train, "train_step", pytest.fail)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    usual = [] if "--config" in flags else tiny("--steps 5")  # Copy's sizes
    if "--task" in flags:
        usual = ["--preset", "nano"]
    ends([*usual, *flags.split()], words)


def test_capo_takes_steps_or_exposures(ends):
    ends("--task capo --preset nano --exposures 3 --steps 5".split(), "steps = 5")
    _, recipe = train.read_command_line("--task capo --preset nano --exposures 3".split())
    task = make_task("capo", exposures=3)
    assert recipe.training.steps == task.steps(recipe.training.batch_size)


@parametrize("native", (True, False))
def test_the_gpu_decides_about_bfloat16(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "gpu_has_bfloat16", lambda: native)
    options, recipe = train.read_command_line(["--task", "copy"])
    assert (options.device, recipe.preset, options.compile) == ("cuda", "small", True)
    assert recipe.dtype == ("bfloat16" if native else "float32")
    with nullcontext() if native else pytest.raises(SystemExit, match="2"):
        train.read_command_line("--task copy --dtype bfloat16".split())


@parametrize("dtype", ("float32", "bfloat16"))
def test_training_and_scoring_use_the_chosen_dtype(dtype, here, monkeypatch):
    seen, attend = set(), F.scaled_dot_product_attention

    def spy(q, *rest, **options):
        seen.add((torch.is_grad_enabled(), q.dtype))
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(train, "require_sound_layers", lambda model: None)  # always in float32
    train.main(tiny(f"--steps 2 --dtype {dtype}"))
    assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}
    assert {w.dtype for w in checkpoint("run")["model"].values()} == {torch.float32}


def test_a_folder_with_another_run_is_refused(ends):
    train.main(tiny("--steps 5"))
    ends(tiny("--steps 5"), "run is not empty: --resume continues it")
    flags = "--steps 6 --canon a --seed 4 --dtype bfloat16 --resume"
    words = ("canon = '', not 'a'", "steps = 5, not 6", "seed = 0, not 4")
    ends(tiny(flags), *words, "dtype = 'float32', not 'bfloat16'")


def test_a_run_without_a_checkpoint_has_not_begun(here):
    Path("run").mkdir()
    Path("run/config.json").write_text("x" * 10_000)
    Path("run/ckpt.pt.new").write_text("half")
    train.main(tiny("--steps 2"), program="/x/own.py")
    config = json.loads(Path("run/config.json").read_text())
    assert config["command"].startswith("python own.py --task copy ")
    assert logged("run")[-1]["final"] and not Path("run/ckpt.pt.new").exists()
    Path("run/config.json").unlink()
    with pytest.raises(SystemExit, match="0"):  # finished
        train.main(tiny("--steps 2 --resume"))
    assert json.loads(Path("run/config.json").read_text())["task"] == config["task"]


def damaged_checkpoints(good, data):
    """{what is wrong: bytes of a file, or the contents of a checkpoint}"""
    name, first = next(iter(good["model"].items()))
    raw, wrong = first.numpy().tobytes(), {}
    wrong["cut off"] = data[:-100]
    wrong["a flipped weight"] = data.replace(raw, raw[::-1])
    wrong["another object"] = [1]
    wrong["parts missing"] = {"recipe": good["recipe"]}
    weights = good["model"]
    wrong["a shape"] = {**good, "model": {**weights, name: torch.zeros(3, 3)}}
    wrong["half precision"] = {**good, "model": {k: w.half() for k, w in weights.items()}}
    wrong["a weight is NaN"] = {**good, "model": {**weights, name: first * math.nan}}
    wrong["a weight is missing"] = {**good, "model": dict(list(weights.items())[1:])}
    wrong["no optimizer"] = {**good, "optimizer": {}}
    state, groups = good["optimizer"]["state"], good["optimizer"]["param_groups"]
    wrong["no memory"] = {**good, "optimizer": {"state": {}, "param_groups": groups}}
    halved = {**state[0], "exp_avg": state[0]["exp_avg"][:1]}
    wrong["memory's shape"] = {
        **good, "optimizer": {"state": {**state, 0: halved}, "param_groups": groups}
    }  # fmt: skip
    without_step = {**state[0]}
    del without_step["step"]
    wrong["memory's step"] = {
        **good, "optimizer": {"state": {**state, 0: without_step}, "param_groups": groups}
    }  # fmt: skip
    wrong["a recipe without a model"] = {**good, "recipe": {**good["recipe"], "model": None}}
    wrong["a step too far"] = {**good, "step": 4}
    wrong["a step before the start"] = {**good, "step": -1}
    wrong["a step that is no number"] = {**good, "step": "2"}
    wrong["seconds"] = {**good, "seconds": math.nan}
    wrong["a log that is none"] = {**good, "log": [1, 2]}
    return wrong


def test_damaged_checkpoints_are_refused(ends):
    """By --resume, and those whose weights are wrong by whoever wants to see the model."""
    with interruption(1), pytest.raises(SystemExit):
        train.main(tiny("--steps 3"))
    good, path = checkpoint("run"), Path("run/ckpt.pt")
    for what, damage in damaged_checkpoints(good, path.read_bytes()).items():
        path.write_bytes(damage) if isinstance(damage, bytes) else torch.save(damage, path)
        line = ends(tiny("--steps 3 --resume"), "ckpt.pt")
        reason = "is damaged|does not fit"
        assert re.search(reason, line)
        if "weight" in what or what in ("cut off", "a shape"):
            with pytest.raises(run_folders.RunError, match=reason):
                run_folders.load_model("run")
    torch.save(good, path)
    train.main(tiny("--steps 3 --resume"))
    assert logged("run")[-1]["final"]


@parametrize(
    "error, words",
    [
        (PermissionError(13, "Permission denied", "run/x"), ["denied: 'run/x'", "--resume"]),
        (MemoryError(), ["MemoryError", "--batch-size"]),
        (torch.OutOfMemoryError("CUDA out of memory. Tried .."), ["out of memory", "--grad-accum"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: .."), ["--grad-accum"]),
        (RuntimeError("a bug of one's own"), []),
    ],
)
def test_errors_of_the_system_are_one_line_and_bugs_are_not(error, words, ends):
    with interruption(3, error), nullcontext() if words else pytest.raises(RuntimeError):
        ends(tiny("--steps 9"), *words, status=1, training=True)


def test_a_full_disk_leaves_the_last_checkpoint(ends, monkeypatch):
    saves, save = iter(range(1, 100)), torch.save

    def full(what, file):
        if next(saves) == 3:
            file.write(b"x" * 99)
            raise OSError(28, "No space left on device")
        return save(what, file)

    monkeypatch.setattr(torch, "save", full)
    words = "No space left on device: 'run/ckpt.pt.new'", "--resume to continue"
    ends(tiny("--steps 40 --eval-every 10"), *words, status=1, training=True)
    monkeypatch.setattr(torch, "save", save)
    assert checkpoint("run")["step"] == 10 and not Path("run/ckpt.pt.new").exists()


def test_run_names_tell_runs_apart():
    def name(flags, task="copy"):
        words = f"--task {task} --preset nano --device cpu {flags}".split()
        return train.read_command_line(words)[0].out.name

    apart = [
        "--seed 1", "--canon abcd", "--canon abcd --canon-silu", "--canon abcd --no-canon-residual",
        "--lr 0.1", "--n-layer 2", "--mlp silu", "--dtype bfloat16", "--tie-embeddings", "",
    ]  # fmt: skip
    assert len({name(flags) for flags in apart}) == len(apart)
    for same in ("", "--mlp swiglu --canon-kernel 4", "--workers 3 --grad-accum 2 --lr 0.01"):
        assert name(same) == "copy_nano_rope_bare_s0"
    flags = "--mixer gdn,attention --canon ca --word-len 5 6 --seed 3"
    assert name(flags, "depo2") == "depo2_nano_gdn-attention_rope_ac_word-len=5-6_s3"
    assert name("--mixer mamba2", "depo1") == "depo1_nano_mamba2_bare_s0"
    assert name("--exposures 10", "capo") == "capo_nano_rope_bare_exposures=10_s0"


def test_runs_are_read_while_they_train(here):
    with interruption(47), pytest.raises(SystemExit):
        train.main(tiny("--steps 60 --eval-every 20"))
    run = run_folders.read("run")
    assert [e["step"] for e in run["evals"]] == [20, 40] and run["seconds"] is None
    assert run["units"]["tokens"] == "share"
    train.main(tiny("--steps 60 --eval-every 20 --resume"))
    run = run_folders.read("run")
    assert [e["step"] for e in run["evals"]] == [20, 40, 60] and run["seconds"] > 0


DAMAGES = {  # {what is wrong: the file, its text}
    "no JSON": ("config.json", "{"),
    "a part is missing": ("config.json", '{"run": "run", "task": {"name": "copy"}}'),
    "a line is no JSON": ("metrics.jsonl", '{"step": 1, "eval": {"tok\n'),
    "not a number": ("metrics.jsonl", '{"step": 1, "eval": {"k=1": NaN}}\n'),
    "no number": ("metrics.jsonl", '{"step": 1, "eval": {"k=1": null}}\n'),
}


@parametrize("what", DAMAGES)
def test_damaged_runs_are_named_and_left_out(what, here):
    write_toy_run("sound", toy_run((0.5,)))
    write_toy_run("run", toy_run((0.5,)))
    file, text = DAMAGES[what]
    Path("run", file).write_text(text)
    found, problems = run_folders.read_all(["sound", "run", "nowhere"])
    assert len(found) == 1
    assert len(problems) == 2 and "run" in problems[0] and "nowhere" in problems[1]


def test_packed_runs_are_the_same_runs(here):
    train.main(tiny("--steps 20 --eval-every 10"))
    Path("begun").mkdir()
    Path("begun/config.json").write_text("{}")  # no log yet
    found, problems = run_folders.read_all(["run", "begun"])
    run_folders.pack(found, "runs.json")
    assert run_folders.read_all(["runs.json"]) == (found, []) and len(found) == 1 and not problems


def test_a_trained_model_is_loaded_and_answers(ends, capsys):
    """Sixty steps of one layer on eight numbers: hardly right, but the answers are its own."""
    train.main(tiny("--steps 60 --canon abcd --lr 0.02"))
    task, model = run_folders.load_model("run")
    assert task.settings == {"name": "copy", "N": 8, "block_size": 20} and not model.training
    saved = checkpoint("run")["model"]
    assert all(torch.equal(weight, saved[name]) for name, weight in model.state_dict().items())

    capsys.readouterr()
    sample.main(["run", "--count", "4"])
    shown = capsys.readouterr().out.strip().split("\n\n")
    assert len(shown) == 4
    for text in shown:
        given, _, answer = text.partition("<query> [")
        words = given.split()[1:]
        assert sorted(words) == list("12345678")
        said, mark, expected = re.split("([✓✗])", answer.rstrip("]"))
        prompt = task.encode(f"<bos> {given.partition('<bos>')[2]} <query>")
        greedy = model.generate(torch.tensor([prompt]), 8, temperature=0)[0, 10:]
        assert task.encode(said) == greedy.tolist()
        assert (mark == "✓") == (said.split() == words)
        assert expected.split() == ([] if mark == "✓" else words)

    def shown_at(*words):
        sample.main(["run", "--count", "1", *words])
        return capsys.readouterr().out

    assert shown_at("--seed", "1").strip() == shown[1]
    sampled = shown_at("--temperature", "9")
    assert sampled == shown_at("--temperature", "9") != shown_at()

    sample.main(["run", "--prompt", "<bos> 3 1 2", "--length", "5"])
    text = capsys.readouterr().out
    assert text.startswith("<bos> 3 1 2 [") and len(text.split()) == 9
    refused = partial(ends, main=sample.main)
    refused(["run", "--prompt", "<bos> nine"], "nine")
    refused(["run", "--prompt", "1 " * 21], "1 to 20")
    refused(["run", "--length", "5"], "--prompt")
    refused(["run", "--count", "5", "--prompt", "3"], "--count")
    for temperature in ("-1", "1e-40", "nan"):
        refused(["run", f"--temperature={temperature}"], "allowed: 0, and 0.01 to 100")
    with pytest.raises(ValueError, match="temperature = -1"):
        model.generate(torch.tensor([[1]]), 1, temperature=-1)
    refused(["nowhere"], "nowhere has no config.json")


def test_unregistered_things_are_asked_for(here):
    train.main(tiny("--steps 2"))
    path = Path("run/config.json")
    path.write_text(path.read_text().replace('"attention"', '"retention"'))
    with pytest.raises(run_folders.RunError, match="retention.*--program"):
        run_folders.load_model("run")


# -- Every task is learnt a little

TINY_COPY = "copy --N 16 --block-size 33 --steps 300 --warmup 50"
COPY_6 = "copy --N 6 --block-size 13 --steps 100 --warmup 30 --d-model 32 --canon acd"
TWO_LAYERS = "--canon abcd --n-layer 2 --d-model 32 --batch-size 32 --lr 1e-2 --warmup 30"
DEPO_3 = "depo0 --N 3 --K 1 --V 2 --word-len 1 2 --block-size 40 --steps 120"
LEARNS = (  # command, score, at least, at most
    (f"{TINY_COPY} --canon abcd", "sequences", 0.5, 1),  # the paper's Fig. 5 in miniature
    (TINY_COPY, "sequences", 0, 0.05),
    (f"{COPY_6} --mixer gla", "sequences", 0.5, 1),
    (f"{COPY_6} --mixer mamba2", "sequences", 0.5, 1),
    (f"{COPY_6} --mixer gdn", "sequences", 0.5, 1),
    (f"{DEPO_3} {TWO_LAYERS}", "k=1", 0.7, 1),  # chance: 1/2
    (f"brevo1 --N 4 --block-size 32 --steps 180 {TWO_LAYERS}", "all", 0.5, 1),  # some 1/4
    (f"mano --L 1 --block-size 35 --steps 260 {TWO_LAYERS}", "l=1", 0.7, 1),  # 1/3
    (f"lano --root 10 --block-size 32 --steps 100 {TWO_LAYERS}", "sentences", 0.5, 1),
    (f"capo --N 50 --exposures 100 --block-size 34 {TWO_LAYERS}", "facts", 0.3, 1),
    (f"text --block-size 128 --steps 100 {TWO_LAYERS}", "bits per byte", 1, 4),  # 8
)


@parametrize("command, score, least, most", LEARNS)
def test_every_task_resumes_and_is_learnt_a_little(command, score, least, most, here, monkeypatch):
    monkeypatch.setattr(tasks.Mano, "modulus", 3)  # the tables of 23 take long to learn
    options = f"--preset nano --device {DEVICE} --no-compile --workers 0"
    options += " --eval-every 1000 --eval-size 128"
    words = ["--task", *command.split(), *options.split(), "--out", "run"]
    with interruption(0), pytest.raises(SystemExit, match="143"):
        train.main(words)
    train.main([*words, "--resume"])
    assert least <= logged("run")[-1]["eval"][score] <= most


# ---- 5. plot.py ------------------------------------------------------------


def toy_run(*values, name="toy", seed=0, lr=0.01, unit="share", chance=None, **model):
    """A run as runs.py reads it. values: of its scores k=1, k=2 .. after 10, 20 .. steps."""
    evals = []
    for number, scores in enumerate(values, 1):
        by_name = {f"k={k}": value for k, value in enumerate(scores, 1)}
        evals.append({"step": 10 * number, "eval": by_name})
    config = Config(vocab_size=9, block_size=9, **model)
    return {
        "run": name,
        "task": {"name": "depo1", "N": 6},
        "model": vars(config),
        "training": {"lr": lr, "steps": 30, "batch_size": 4},
        "dtype": "float32",
        "seed": seed,
        "preset": "nano",
        "evals": evals,
        "seconds": 3.0,
        "units": dict.fromkeys(["k=1", "k=2", "k=3"], unit),
        "chance": chance,
    }


def write_toy_run(folder, run, final=True):
    """The run as train.py leaves it, without a checkpoint."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = {part: run[part] for part in run if part not in ("evals", "seconds")}
    (folder / "config.json").write_text(json.dumps(config))
    lines = list(run["evals"])
    if final:
        lines.append({"final": True, "seconds": 3.0})
    log = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(log)


def write_run(run):
    write_toy_run(Path("out", run["run"]), run, final=run["seconds"] is not None)


def write_untrained_model(folder, **model):
    """A run of Copy whose checkpoint holds a model as it starts. Returns task and model."""
    task = make_task("copy", N=4, block_size=9)
    sizes = {"vocab_size": task.vocab_size, "block_size": task.block_size}
    config = Config(**sizes, n_head=2, d_model=16, **model)
    about = {
        "run": Path(folder).name,
        "task": task.settings,
        "model": vars(config),
        "training": {"steps": 1, "batch_size": 4},
        "dtype": "float32",
        "seed": 0,
        "eval_size": 8,
        "preset": "nano",
    }
    untrained = CanonGPT(config)
    run = run_folders.Run(folder, about)
    optimizer = torch.optim.AdamW(untrained.parameters())
    run.save({"model": untrained, "optimizer": optimizer}, step=0, seconds=0.0)
    return task, untrained


# What a run is called


MODEL_NAMES = {
    "RoPE": {},
    "NoPE + Canon-AC": {"pos": "nope", "canon": "ac"},
    "RoPE + Canon-ABCD (no-res, kernel 2)": {
        "canon": "abcd",
        "canon_residual": False,
        "canon_kernel": 2,
    },
    "RoPE + Canon-A (act)": {"canon": "a", "canon_silu": True},
    "RoPE + Canon-A (cst)": {"canon": "a", "canon_frozen": True},
    "GLA": {"mixer": "gla", "short_conv": False},
    "GLA (conv)": {"mixer": "gla", "short_conv": True},
    "GDN + Canon-AbCD": {"mixer": "gdn", "canon": "acd", "short_conv": True},
    "GDN + Canon-ABCD (conv)": {"mixer": "gdn", "canon": "abcd", "short_conv": True},
    "Mamba2/RoPE(1/4)": {"mixer": "mamba2,attention", "pos": "rope4", "short_conv": False},
}


@parametrize("name", MODEL_NAMES)
def test_models_are_named_as_in_the_paper(name):
    model = vars(Config(vocab_size=9, block_size=9, d_model=192, **MODEL_NAMES[name]))
    assert plot.model_name(model) == name


def test_groups_are_ordered_by_meaning():
    nope, canon = {"pos": "nope"}, {"canon": "abcd"}
    models = [{"mixer": "gla"}, {**nope, **canon}, nope, canon, {}, {"canon": "d"}]
    runs = []
    for seed in (1, 0):
        for model in models:
            part = model.get("mixer", model.get("pos", "rope"))
            name = f"depo1_nano_{part}_{model.get('canon', 'bare')}_s{seed}"
            runs.append(toy_run((0.5,), name=name, seed=seed, **model))
    groups = plot.group(runs)
    rope = ["RoPE", "RoPE + Canon-D", "RoPE + Canon-ABCD"]  # by how many points have Canon
    assert list(groups) == [*rope, "NoPE", "NoPE + Canon-ABCD", "GLA"]
    assert [run["seed"] for run in groups["GLA"]] == [0, 1]


def test_no_two_recipes_share_a_label():
    """Of one recipe and seed the later run counts; where recipes differ, their labels say how."""
    older, newer = toy_run((0.1,)), toy_run((0.2,))
    assert plot.group([older, newer]) == {"RoPE": [newer]}
    deeper = toy_run((0.3,), n_layer=2)
    faster = toy_run((0.4,), lr=0.1)
    canon = toy_run((0.5,), canon="abcd")
    groups = plot.group([older, newer, faster, deeper, canon])
    values = {label: plot.last_scores(runs, "k=1") for label, runs in groups.items()}
    assert values == {
        "RoPE, n_layer 12, lr 0.01": [0.2],
        "RoPE, n_layer 12, lr 0.1": [0.4],
        "RoPE, n_layer 2, lr 0.01": [0.3],
        "RoPE + Canon-ABCD": [0.5],
    }


def test_a_label_names_the_size_of_the_task_where_any_two_runs_differ():
    """Also of models that no other run shares."""
    smaller, larger, other = toy_run((0.1,)), toy_run((0.2,)), toy_run((0.3,), pos="nope")
    larger["task"]["N"] = 9
    labels = set(plot.group([smaller, larger, other]))
    assert labels == {"RoPE, N 6", "RoPE, N 9", "NoPE, N 6"}


# Figures


def drawn_lines(axis):
    """The lines that show runs or medians, as lists of their values."""
    return [list(line.get_ydata()) for line in axis.lines]


def drawn_texts(axis):
    return [text.get_text() for text in axis.texts]


def test_curves_show_each_run_and_the_median():
    """The median goes as far as all seeds have come."""
    groups = {
        "without": [toy_run((0.2,), (0.4,), (0.5,)), toy_run((0.4,), (0.8,), seed=1)],
        "with": [toy_run((0.9, 0.7), (0.95, 0.8), canon="abcd", pos="nope")],
    }
    figure = plot.curves(groups, title="What was found " * 9)
    first, second = figure.axes
    assert [axis.get_title("left") for axis in figure.axes] == ["1 hop", "2 hops"]
    seeds, median = [[0.2, 0.4, 0.5], [0.4, 0.8]], [0.3, 0.6]
    expected = [*seeds, median, [0.9, 0.95], [0.9, 0.95]]
    for values, line in zip(expected, drawn_lines(first), strict=True):
        assert values == pytest.approx(line)
    assert drawn_lines(second)[-2:] == [[0.7, 0.8], [0.7, 0.8]]  # the others have no k=2
    # Each line is named once, at the right.
    assert drawn_texts(first) == ["without"] and drawn_texts(second) == ["with"]
    assert "\n" in figure.get_suptitle()
    assert "1 to 2 seeds each" in figure.get_supxlabel()


def test_the_grammar_of_figures():
    """Grey without Canon, orange with; dashed without positions; markers where both are equal."""
    models = {
        "RoPE": {},
        "NoPE": {"pos": "nope"},
        "RoPE + Canon": {"canon": "abcd"},
        "NoPE + Canon": {"pos": "nope", "canon": "a"},
        "two layers": {"n_layer": 2},
        "GLA": {"mixer": "gla"},
        "GLA + Canon": {"mixer": "gla", "canon": "abcd"},
        "GDN": {"mixer": "gdn"},
    }
    groups = {name: [toy_run((0.5,), **model)] for name, model in models.items()}
    looks = plot.looks(groups)
    assert len(set(looks.values())) == len(models)
    grey, orange = looks["RoPE"].colour, looks["RoPE + Canon"].colour
    assert len(set(grey)) == 1 and len(set(orange)) == 3
    assert looks["NoPE"].colour == grey and looks["NoPE + Canon"].colour == orange
    assert looks["RoPE"].dash == looks["RoPE + Canon"].dash == "-"
    assert looks["NoPE"].dash == looks["NoPE + Canon"].dash == "--"
    assert looks["two layers"] == (grey, "-", "o")
    assert looks["GLA"].marker != looks["GLA + Canon"].marker
    assert min(looks["GLA"].colour) > min(looks["GLA + Canon"].colour)  # paler
    hues = {looks[name].colour for name in ("RoPE", "RoPE + Canon", "GLA + Canon", "GDN")}
    assert len(hues) == 4


def test_names_at_the_ends_of_lines_do_not_overlap():
    """Nor do they lie on the axes, where the dots are."""
    groups = {}
    for number in range(10):
        groups[f"model {number}"] = [toy_run((0.1,), (number // 5,), chance=0.2)]
    figure = plot.curves(groups)
    (axis,) = figure.axes
    figure.draw_without_rendering()
    # An Annotation's own extent takes in the line that leads to it; a Text's is the text alone.
    boxes = [plot.matplotlib.text.Text.get_window_extent(text) for text in axis.texts]
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    assert min(box.x0 for box in boxes) > axis.get_window_extent().x1
    heights = [box.y0 for box in boxes]
    names = [text.get_text().split()[-1] for text in axis.texts]
    from_the_top = sorted(names, key=lambda name: -heights[names.index(name)])
    assert from_the_top == ["5", "6", "7", "8", "9", "chance", "0", "1", "2", "3", "4"]


def test_spread_keeps_a_gap_and_moves_little():
    assert plot.spread([0.9, 0.5, 0.1], gap=0.1) == [0.9, 0.5, 0.1]
    assert plot.spread([1, 1, 0.5], gap=0.2) == pytest.approx([1, 0.8, 0.5])
    assert plot.spread([0.5, 0, 0], gap=0.2) == pytest.approx([0.5, 0.2, 0])
    assert plot.spread([], gap=0.2) == []


def test_chance_is_drawn_where_all_runs_agree():
    def has_chance(*chances, unit="share"):
        runs = [toy_run((0.5,), chance=chance, unit=unit) for chance in chances]
        return [
            "chance" in drawn_texts(draw({"RoPE": runs}).axes[0])
            for draw in (plot.curves, plot.bars)
        ]

    assert has_chance(0.2, 0.2) == [True, True]
    assert has_chance(0.2, 0.25) == [False, False]
    assert has_chance(None) == [False, False]
    assert has_chance(0.2, unit="nats") == [False, False]


def test_curves_of_text_show_where_models_differ():
    """Not the fall from 8 bits per byte, which dwarfs the differences."""
    runs = []
    for values in ((7.5, 2.0), (6.0, 1.0)):
        run = toy_run(canon="a" if values[1] < 2 else "")
        run["evals"] = [{"step": i, "eval": {"bits per byte": v}} for i, v in enumerate(values, 1)]
        run["units"] = {"bits per byte": "bits per byte"}
        runs.append(run)
    (axis,) = plot.curves({"without": runs[:1], "with": runs[1:]}).axes
    assert axis.get_ylim() == pytest.approx((0.9, 2.4))
    assert all(line.get_clip_on() for line in axis.lines)
    assert "fewer are better" in axis.get_title("left")


def test_nothing_guesses_a_unit_from_a_value():
    in_nats = {"RoPE": [toy_run((0.98,), unit="nats")]}
    of_ones_own = {"RoPE": [toy_run((0.98,), unit="apples")]}
    shares = {"RoPE": [toy_run((0.98,))]}
    assert plot.table(in_nats).splitlines()[-1] == "| RoPE | 0 | 0.980 |"
    assert plot.table(of_ones_own).splitlines()[-1] == "| RoPE | 0 | 0.98 |"
    assert plot.table(shares).splitlines()[-1] == "| RoPE | 0 | 98% |"
    assert plot.curves(in_nats).axes[0].get_ylabel() == "nats"
    assert drawn_texts(plot.bars(in_nats).axes[0]) == ["0.980"]
    # Shares run from 0 to 100%, whatever the values.
    axis = plot.curves(shares).axes[0]
    assert axis.get_ylim() == pytest.approx((0, 1), abs=0.05)
    assert axis.yaxis.get_major_formatter()(0.5) == "50%"


def test_a_table_names_each_seed_once():
    """Also where a group has runs of several tasks."""
    depo = [toy_run((0.5,), seed=seed) for seed in (0, 1)]
    mano = {**toy_run(), "task": {"name": "mano"}, "evals": [{"step": 10, "eval": {"l=1": 0.25}}]}
    rows = plot.table({"RoPE": [*depo, mano]}).splitlines()
    assert rows[0] == "|  | seeds | k=1 | l=1 |"
    assert rows[2] == "| RoPE | 0, 1 | 50%, 50% | 0.25 |"  # l=1 has no unit here


def test_bars_are_medians_and_dots_are_runs():
    runs = [toy_run((value,), seed=seed) for seed, value in enumerate((0.2, 0.9, 0.3))]
    groups = {"without": runs, "with": [toy_run((1.0, 0.5), canon="abcd")]}
    first, second = plot.bars(groups).axes
    assert [bar.get_width() for bar in first.patches] == [0.3, 1.0]
    assert [list(line.get_xdata()) for line in first.lines] == [[0.2, 0.9, 0.3], [1.0]]
    assert [label.get_text() for label in first.get_yticklabels()] == ["without", "with"]
    assert drawn_texts(first) == ["30%", "100%"] and drawn_texts(second) == ["50%"]


def test_dots_show_how_far_each_run_gets():
    groups = {
        "without": [toy_run((0,), seed=seed) for seed in range(12)],
        "with": [toy_run((value,), seed=seed, canon="a") for seed, value in enumerate((4, 1, 4))],
    }
    columns = {0: "none", 1: "1 hop", 4: "4 hops"}
    text = {"edges": "a b , b a ,", "answer": "a"}
    figure = plot.dots(groups, "k=1", columns, "Found", beside=text)
    left, right = figure.axes
    assert drawn_texts(left) == ["edges", "a b , b a ,", "answer", "a"]
    assert [label.get_text() for label in right.get_xticklabels()] == list(columns.values())
    places = []
    for line in right.lines:
        if line.get_marker() == "o":
            dots = np.column_stack(line.get_data())
            assert len({tuple(dot) for dot in np.round(dots, 3)}) == len(dots)  # none on another
            places += [tuple(dot) for dot in np.round(dots).astype(int)]
    assert Counter(places) == {(0, 0): 12, (2, 1): 2, (1, 1): 1}  # (column, row)
    with pytest.raises(ValueError, match="with: k=1 = 4: the columns are"):
        plot.dots(groups, "k=1", {0: "none", 1: "1 hop"})


# Inside a model


def weights_by_hand(block, x):
    """softmax(q k^T / sqrt(K)) of an attention block without positions: (heads, T, T)."""
    mixer = block.mixer
    qkv = mixer.canon_b(mixer.qkv(block.canon_a(block.norm1(x))))  # (1, T, 3D)
    T = qkv.shape[1]
    q, k, _ = qkv[0].view(T, 3, mixer.n_head, -1).unbind(1)  # (T, heads, K)
    logits = torch.einsum("thk,shk->hts", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -math.inf).softmax(-1)


@torch.no_grad()
def test_attention_maps_are_the_weights_of_attention():
    config = Config(
        vocab_size=9, block_size=8, n_layer=4, n_head=2, d_model=16, pos="nope", canon="ab",
        mixer="gla,attention",
    )  # fmt: skip
    model = CanonGPT(config)
    tokens = [1, 2, 3, 4, 3, 2]
    maps = plot.attention_maps(model, tokens)
    assert list(maps) == [(2, 1), (2, 2), (4, 1), (4, 2)]
    x = model.embed(torch.tensor([tokens]))
    for layer, block in enumerate(model.blocks, 1):
        if layer in (2, 4):
            first, second = weights_by_hand(block, x)
            assert_close(maps[layer, 1], first)
            assert_close(maps[layer, 2], second)
        x = block(x)


def test_inside_draws_the_sharpest_heads_and_the_canon_weights(here, monkeypatch):
    task, model = write_untrained_model("run", n_layer=3, pos="nope", canon="ad")
    (document,) = task.documents(default_rng([0, tasks.SAMPLES]), 1)
    assert len(document.tokens) == 10  # <bos>, four numbers, <query>, four numbers
    maps = plot.attention_maps(model, document.tokens[:-1])
    sharpness = {place: weights[5:9].max(dim=1).values.mean() for place, weights in maps.items()}
    assert max(sharpness.values()) < 0.5  # then only the sharpest is drawn
    layer, head = max(sharpness, key=sharpness.get)
    axis, canon = plot.inside(Path("run")).axes
    assert axis.get_title("left") == f"layer {layer}, head {head}"
    assert np.allclose(axis.images[0].get_array(), maps[layer, head][5:9], atol=1e-6)
    places = [label.get_text() for label in canon.get_xticklabels()]
    assert places == ["1A", "1D", "2A", "2D", "3A", "3D"]
    sizes = model.blocks[1].mlp.canon_d.weight.detach().abs().mean(dim=1)
    assert np.allclose(canon.images[0].get_array()[:, 3], sizes)

    sharp = torch.eye(9)
    some_sharp = {(1, 1): sharp, (1, 2): maps[1, 2], (2, 1): sharp}
    monkeypatch.setattr(plot, "attention_maps", lambda model, tokens: some_sharp)
    *heads, _ = plot.inside(Path("run")).axes
    titles = [axis.get_title("left") for axis in heads]
    assert titles == ["layer 1, head 1", "layer 2, head 1"]
    monkeypatch.setattr(plot, "attention_maps", lambda *_: {(1, h): sharp for h in range(1, 8)})
    assert len(plot.inside(Path("run")).axes) == 5 + 1


def test_the_last_hop_ends_at_the_answer(monkeypatch):
    """Attention that knows the answer: from each token to where the same name stands as the second
    of an edge, two tokens later than the token that it is for."""
    task = make_task("depo0", N=5, K=2)

    def maps_that_know(model, tokens):
        T = len(tokens)
        found = {}
        for head, ahead in ((1, 2), (2, 1)):  # head 1 knows two tokens ahead, head 2 one
            weights = torch.zeros(T, T)
            for t in range(T - ahead):
                for place in range(2, 16, 3):  # <bos>, then "x y ," for five edges
                    weights[t, place] = float(tokens[place] == tokens[t + ahead])
            found[1, head] = weights
        return found

    monkeypatch.setattr(plot, "attention_maps", maps_that_know)
    hops = runpy.run_path(str(HERE / "results/depo0/hops.py"))
    model = SimpleNamespace(config=SimpleNamespace(has_attention=True))
    shares = hops["attention_to_hops"](task, model)
    # The last answer of each instance is cut off, so one of five questions is not seen.
    assert_close(shares["the question's node"]["1.1"], torch.tensor([0.0, 0.8]))
    assert_close(shares["<ans>"]["1.2"], torch.tensor([0.0, 0.8]))


def test_layers_are_switched_off_and_on_again(monkeypatch):
    """One hop needs the first of four layers, two hops need the second and one of the others."""
    task = make_task("depo0", N=5, K=2)
    model = CanonGPT(Config(task.vocab_size, task.block_size, n_layer=4, n_head=2, d_model=16))
    outs = [block.mixer.out.weight for block in model.blocks]

    def scores(model, seed, n):
        first, second, third, fourth = (bool(out.any()) for out in outs)
        return {"k=1": float(first), "k=2": float(second and (third or fourth))}

    monkeypatch.setattr(task, "evaluate", scores)
    hops = runpy.run_path(str(HERE / "results/depo0/hops.py"))
    right = hops["right_without_layers"](task, model)
    want = {
        "nothing": [1, 1],
        "layer 1": [0, 1],
        "layer 2": [1, 0],
        "layer 3": [1, 1],
        "layer 4": [1, 1],
        "layers 1, 3, 4": [0, 0],
    }
    assert {off: shares.tolist() for off, shares in right.items()} == want
    assert all(out.any() for out in outs) and task.scored == [1, 2]


# The command line


def test_runs_are_drawn_and_packed(here, ends, capsys):
    for seed in (0, 1):
        without = toy_run((0.2, 0.1), (0.4 + seed / 10, 0.2), seed=seed)
        write_toy_run(f"out/depo1_nano_rope_bare_s{seed}", without)
        with_canon = toy_run((0.8, 0.4), seed=seed, canon="abcd")
        write_toy_run(
            f"out/depo1_nano_rope_abcd_s{seed}",
            with_canon,
            final=seed == 0,
        )
    write_toy_run("out/not_begun", toy_run(), final=False)
    Path("out/empty").mkdir()
    Path("out/depo1_nano.png").touch()
    with open("out/depo1_nano_rope_bare_s0/metrics.jsonl", "a") as file:
        file.write('{"step": 30, "ev')  # half a line, as while it trains

    plot.main([*map(str, Path("out").iterdir()), "--save", "packed.json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    first, _, head, _, *rows = printed.out.splitlines()
    assert first == "out/depo1_nano.png (replaced)"
    assert head == "|  | seeds | k=1 | k=2 |"
    assert rows[0] == "| RoPE | 0, 1 | 40%, 50% | 20%, 20% |"
    assert rows[1] == "| RoPE + Canon-ABCD (still training) | 0, 1 | 80%, 80% | 40%, 40% |"
    assert Path("out/depo1_nano.png").stat().st_size > 10_000

    plot.main(["packed.json", "--out", "again"])
    again = capsys.readouterr().out.splitlines()
    assert again[0] == "again/depo1_nano.png" and again[1:] == printed.out.splitlines()[1:]


def test_what_cannot_be_drawn_ends_with_one_line(here, ends, capsys):
    write_toy_run("no_scores", {**toy_run(), "evals": [{"step": 10, "eval": {}}]})
    write_toy_run("preset", {**toy_run((0.5,)), "preset": 5})
    Path("no_runs.json").write_text('{"runs": 5}')
    ends(["no_scores"], "no scores yet", main=plot.main)
    ends(["preset"], "preset", main=plot.main)
    ends(["no_runs.json"], "no_runs.json", main=plot.main)
    ends(["missing"], "missing does not exist", main=plot.main)
    ends([], "the following arguments are required", main=plot.main)
    ends(["--inside", "preset", "--save", "x.json"], "--save: packs", main=plot.main)
    ends(["preset", "--program", "none.py"], main=plot.main)


OWN_MIXER = """
from canon_gpt import MIXERS, Attention

class Mine(Attention):
    pass

MIXERS["mine"] = Mine
"""


def test_inside_skips_what_it_cannot_draw(here, ends, capsys):
    write_untrained_model("out/attention", n_layer=1)
    write_untrained_model("out/gla", n_layer=1, mixer="gla")
    write_toy_run("out/no_checkpoint", toy_run((0.5,)))
    Path("out/figure.png").touch()
    plot.main(["--inside", *sorted(map(str, Path("out").iterdir()))])
    printed = capsys.readouterr()
    assert printed.out == "out/attention_inside.png\n"
    assert Path("out/attention_inside.png").stat().st_size > 10_000
    gla, no_checkpoint = printed.err.splitlines()
    assert gla == "plot.py: out/gla: its mixer, gla, has no attention to draw"
    assert no_checkpoint.startswith("plot.py: out/no_checkpoint")
    ends(["--inside", "out/gla"], "no attention", main=plot.main)


def test_program_registers_a_mixer_first(here, ends, capsys, monkeypatch):
    monkeypatch.setattr(canon_gpt, "MIXERS", dict(canon_gpt.MIXERS))  # restored at the end
    Path("mine.py").write_text(OWN_MIXER)
    runpy.run_path("mine.py")
    write_untrained_model("run", n_layer=1, mixer="mine")
    del canon_gpt.MIXERS["mine"]
    ends(["--inside", "run"], "run", main=plot.main)
    plot.main(["--inside", "run", "--program", "mine.py", "--out", "."])
    assert capsys.readouterr().out == "run_inside.png\n"


# ---- 6. results/: comparisons.py, claims.py, reproduce.py ------------------


NANO = ["--preset", "nano", "--device", "cpu"]
TINY_FLAGS = (
    "--N 8 --block-size 20 --batch-size 8 --eval-size 16 --warmup 5 --no-compile".split() + NANO
)
WITHOUT_END = ["--steps", "1000000", "--eval-every", "500000"]
ENDLESS_SWEEP = ["copy", "--seeds", "1", "--jobs", "2"] + TINY_FLAGS + WITHOUT_END


@pytest.fixture
def folder(here, monkeypatch):
    """An empty folder to work in, where results/ is empty, too."""
    monkeypatch.setattr(reproduce, "HERE", here / "results")
    return here


def ended(words):
    """The status with which reproduce.py ends."""
    with pytest.raises(SystemExit) as end:
        reproduce.main(words)
    return end.value.code


# Comparisons


@parametrize("preset", ("nano", "small"))
@parametrize("name", COMPARISONS)
def test_a_comparison_is_of_different_runs(name, preset):
    comparison = COMPARISONS[name]
    flags = ["--preset", preset, "--device", "cpu"]
    wanted = reproduce.wanted_runs(comparison, flags, seeds=1, rates=[2e-3, 4e-3])
    folders = {run.options.out for run in wanted}
    assert len(folders) == len(wanted) == 2 * len(comparison.models) * len(comparison.tasks)
    for run in wanted:
        task = run.recipe["task"]["name"]
        first = comparison.at_nano.get(task, "").split() if preset == "nano" else []
        usual = reproduce.usual_recipe(task, first + flags)
        longer = 2 if run.model in comparison.twice_the_steps else 1
        narrower = 2 if task in comparison.half_the_width else 1
        assert run.recipe["training"]["steps"] == longer * usual.training.steps
        if "dims" not in run.model:
            assert run.recipe["model"]["d_model"] == usual.model.d_model // narrower


@parametrize("claim", CLAIMS, ids=lambda claim: claim.title)
def test_a_claim_is_about_models_and_tasks_that_are_compared(claim):
    comparison = COMPARISONS[claim.comparison]
    models = [seeds.model for seeds in claim.judge({}).seeds]
    assert set(models) <= set(comparison.models)
    assert set(claim.tasks) & set(comparison.tasks)
    assert set(claim.before_the_runs) <= set(claim.tasks)
    assert claim.result in claims.RESULTS and "{" not in claim.title


# Verdicts


def seeds(*values):
    """Of a model of a task where chance is 1 and the ceiling 8."""
    return Seeds("model", "score", list(values), chance=1, ceiling=8)


def bits(*values):
    return Seeds("model", "bits per byte", list(values), "bits per byte", 0, math.nan)


low, high = seeds(1, 2, 3), seeds(6, 6, 6)
few, many = bits(1.1, 1.2, 1.3), bits(1.4, 1.5, 1.6)
fewer, hardly_more = claims.needs_fewer_bits, claims.needs_hardly_more_bits
VERDICTS = [
    (above(seeds(8, 9, 9), seeds(1, 2, 7.9)), "holds"),
    (above(seeds(1, 2, 2), seeds(3, 4, 5)), "does not hold"),
    (above(seeds(3, 4, 5), low), "undecided"),
    (above(seeds(8, 9), seeds(1, 2, 7)), "undecided: too few seeds"),
    (above(seeds(), seeds(1, 2, 7)), "not run"),
    (above(seeds(1, 1, 1), seeds(0, 0, 0)), "undecided: at chance"),
    (above(seeds(8, 8, 9), seeds(9, 9, 9)), "undecided: at the ceiling"),
    (at_least_times(seeds(4, 4, 4), 2, seeds(2, 2, 2)), "holds"),
    (at_least_times(seeds(4, 4, 5), 2, seeds(2, 2, 3)), "undecided"),
    (at_least_times(seeds(4, 4, 4), 2, seeds(3, 3, 3)), "does not hold"),
    (at_least_times(seeds(4, 4, 4), 2, seeds(1, 1, 1)), "undecided"),  # the other is at chance
    (close_to(seeds(3.95, 4, 4), seeds(3, 4, 5)), "holds"),
    (close_to(seeds(3.9, 4, 4), seeds(3, 4, 5)), "undecided"),
    (close_to(seeds(3.9, 3.9, 3.9), seeds(3, 4, 5)), "does not hold"),
    (covers(seeds(4, 4, 4), 0.5, low, high), "holds"),
    (covers(seeds(3, 4, 5), 0.5, low, high), "undecided"),
    (covers(seeds(3, 3, 3), 0.5, low, high), "does not hold"),
    (covers(seeds(5, 5, 5), 0.5, seeds(1, 2, 6), high), "undecided"),  # start and end overlap
    (takes_fewer_steps(seeds(2, 2, 3), seeds(4, 5, math.inf)), "holds"),
    (takes_fewer_steps(seeds(2, 2, 4), seeds(4, 5, 6)), "undecided"),
    (takes_fewer_steps(seeds(5, 6, math.inf), seeds(2, 3, 4)), "does not hold"),
    (reaches(seeds(3, 4, 5), 3), "holds"),
    (reaches(seeds(2, 4, 5), 3), "undecided"),
    (reaches(seeds(2, 2, 2), 3), "does not hold"),
    (above_chance_but_below(seeds(2, 3, 4), 5), "holds"),
    (above_chance_but_below(seeds(1, 3, 4), 5), "undecided"),  # one seed is at chance
    (above_chance_but_below(seeds(5, 6, 7), 5), "does not hold"),
    (at_chance(seeds(0, 1, 1)), "holds"),
    (at_chance(seeds(0, 1, 2)), "undecided"),
    (at_chance(seeds(2, 2, 2)), "does not hold"),
    (fewer(few, many), "holds"),
    (fewer(many, few), "does not hold"),
    (fewer(bits(1.1, 1.2, 1.5), many), "undecided"),
    (hardly_more(bits(1.2, 1.54, 1.0), many), "holds"),
    (hardly_more(bits(1.6, 1.6, 1.6), many), "does not hold"),
    (hardly_more(bits(1.2, 1.6, 1.0), many), "undecided"),
]


def test_verdicts():
    for verdict, outcome in VERDICTS:
        values = [seeds.values for seeds in verdict.seeds]
        assert verdict.outcome == outcome, f"{verdict.rule}: {values}"


def text_run(flags, seed, *values, sha256=None):
    """A run of the text task that needs so many bits per byte at its evaluations."""
    words = f"--task text {flags} --seed {seed}".split()
    run = make_run(words, *({"bits per byte": value} for value in values))
    run["units"] = {"bits per byte": "bits per byte"}
    if sha256 is not None:
        run["task"] = {**run["task"], "sha256": sha256}
    return run


def test_the_best_rate_needs_the_fewest_bits(folder):
    for seed in range(3):
        write_run(text_run("--lr 1e-3", seed, 2.0))
        write_run(text_run("--lr 2e-3", seed, 3.0, 1.5))
        write_run(text_run("--lr 4e-3", seed, 2.5, 1.5))  # as good at the end, and sooner
    runs, problems = reproduce.finished_runs()
    assert problems == []
    found = reproduce.by_model(runs)
    tried = reproduce.tried_rates(COMPARISONS["text"], ["text"], NANO, found)
    (runs,) = reproduce.at_best_rates(COMPARISONS["text"], tried).values()
    assert {run["training"]["lr"] for run in runs} == {4e-3}


def test_runs_on_different_texts_are_never_compared():
    here, copy = text_run("", 0, 1.5), make_run(["--task", "copy"], {"sequences": 1.0})
    other, another = text_run("", 1, 1.4, sha256="b"), text_run("", 2, 1.3, sha256="c")
    assert reproduce.on_one_library([other, here, another, copy]) == [here, copy]
    assert reproduce.on_one_library([copy, another, other]) == [copy, other]
    assert reproduce.on_one_library([copy, other]) == [copy, other]


def test_texts_of_ones_own_are_told_apart_and_kept():
    here, other = text_run("", 0, 1.5), text_run("", 1, 1.4, sha256="b")
    mine, later = text_run("", 2, 1.3, sha256="c"), text_run("", 2, 1.2, sha256="d")
    for run in (mine, later):
        run["task"]["text"] = "mine.txt"
    assert reproduce.on_one_library([mine, other, later, here]) == [mine, later, here]
    keys = [reproduce.all_but_rate_and_seed(run) for run in (here, other, mine, later)]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_all_hold():
    holds = above(seeds(3, 3, 3), seeds(2, 2, 2))
    fails = above(seeds(3, 3, 3), seeds(4, 4, 4))
    undecided = above(seeds(3, 3, 3), seeds(3, 3, 3))
    too_few = above(seeds(3), seeds(4, 4, 4))
    not_run = above(seeds(), seeds(4, 4, 4))
    assert all_hold(holds, holds).outcome == "holds"
    assert all_hold(holds, undecided).outcome == "undecided"
    assert all_hold(undecided, fails, holds).outcome == "does not hold"
    assert all_hold(too_few, not_run, fails).outcome == "does not hold"
    assert all_hold(holds, too_few).outcome == "undecided: too few seeds"
    assert all_hold(too_few, not_run, holds).outcome == "not run"
    assert all_hold(holds, fails).rule == f"{holds.rule}; {fails.rule}"


def finished(task, score, values):
    """Runs of one model, a seed each, that end with these values."""
    units = {"hops mastered": "hops", "steps to k=1": "steps", "bits/param": "bits per parameter"}
    run = {"task": {"name": task, "N": 10, "K": 4}, "chance": 0.1, "main": "main"}
    run["units"] = {score: units.get(score, "share")}
    return [{**run, "evals": [{"step": 10, "eval": {score: value}}]} for value in values]


def test_chance_and_ceiling_follow_from_the_score():
    share = claims.seeds_of(finished("depo0", "answers", [0.5]), "NoPE", "answers")
    assert (share.chance, share.ceiling) == (pytest.approx(0.15), 0.98)
    hops = claims.seeds_of(finished("depo0", "hops mastered", [2]), "NoPE", "hops mastered")
    assert (hops.chance, hops.ceiling) == (0, 4)
    bits = claims.seeds_of(finished("capo", "bits/param", [2]), "NoPE", "bits/param")
    assert bits.chance == 0 and not bits.highest >= bits.ceiling
    other_score = claims.seeds_of(finished("depo0", "answers", [0.5]), "NoPE", "k=1")
    assert other_score.values == []


SHARES = [(0.1, 0.1, 0.1), (0.4, 0.4, 0.4), (0.7, 0.7, 0.7), (1.0, 1.0, 1.0), (0.1, 0.7, 1.0)]
HOPS = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (4, 4, 4), (0, 2, 4)]
STEPS = [(100, 100, 100), (900, 900, 900), (100, 900, math.inf)]


@parametrize("claim", CLAIMS, ids=lambda claim: claim.title)
def test_a_claim_can_come_out_each_way(claim):
    """Each verdict is found by trying all combinations of seeds. With too few seeds of any model it
    becomes undecided, and without a model not run, unless another part of the rule fails."""
    asked = claim.judge({}).seeds
    score = asked[0].score
    possible = {"hops mastered": HOPS, "steps to k=1": STEPS}.get(score, SHARES)
    found = {}
    for values in product(possible, repeat=len(asked)):
        groups = {}
        for each, its_values in zip(asked, values):
            groups[each.model] = finished(claim.tasks[0], score, its_values)
        outcome = claim.judge(groups).outcome.split(":")[0]
        found[outcome] = groups
    assert set(found) == {"holds", "does not hold", "undecided"}

    for outcome, groups in found.items():
        parts = claim.judge(groups).rule.split("; ")
        others = {"does not hold"} if outcome == "does not hold" and len(parts) > 1 else set()
        for model in groups:
            fewer = {**groups, model: groups[model][:2]}
            assert claim.judge(fewer).outcome in others | {"undecided: too few seeds"}
            assert claim.judge({**groups, model: []}).outcome in others | {"not run"}


def test_scores_are_made_of_others():
    evals = [
        {"step": 10, "eval": {"k=1": 0.2, "k=2": 0.1, "k=4": 0.9}},
        {"step": 20, "eval": {"k=1": 0.9, "k=2": 0.8, "k=4": 1.0}},
        {"step": 30, "eval": {"k=1": 1.0, "k=2": 0.9, "k=4": 0.2}},
    ]
    units = {"k=1": "share", "k=2": "share", "k=4": "share"}
    run = {"task": {"name": "depo0"}, "units": units, "evals": evals}
    made = claims.with_made_scores(run)
    first, second, last = [evaluation["eval"] for evaluation in made["evals"]]
    assert [scores["hops mastered"] for scores in (first, second, last)] == [0, 1, 2]
    assert [scores["steps to k=1"] for scores in (first, second, last)] == [math.inf, 20, 20]
    assert last["answers"] == last["depo0: answers"] == pytest.approx(0.7)
    assert made["units"]["depo0: answers"] == made["units"]["k=1"] == "share"
    assert "answers" not in evals[0]["eval"] and "answers" not in units

    evals = [{"step": 10, "eval": {"l=1": 0.5, "l=2": 0.25}}]
    run = {"task": {"name": "mano"}, "units": {"l=1": "share", "l=2": "share"}, "evals": evals}
    assert claims.with_made_scores(run)["evals"][0]["eval"]["mano: longest"] == 0.25

    evals = [{"step": 10, "eval": {"first": 0.5, "second": 0.25}}]
    run = {"task": {"name": "mine"}, "units": {"first": "share", "second": "nats"}, "evals": evals}
    assert claims.with_made_scores(run)["main"] == "first"

    evals = [{"step": 10, "eval": {}}, {"step": 20, "eval": {"k=2": 3.5}}]  # not Depo's k
    made = claims.with_made_scores({"task": {"name": "mine"}, "units": {}, "evals": evals})
    assert made["evals"][1]["eval"] == {"k=2": 3.5, "mine: k=2": 3.5}


# The runs that are here


def make_run(words, *scores, final=True):
    """A run as train.py would leave it, as a dict. scores: an evaluation each, after 10, 20 ..
    steps."""
    options, recipe = train.read_command_line(NANO + words)
    evals = []
    for number, values in enumerate(scores, 1):
        evals.append({"step": 10 * number, "eval": values})
    return {
        "run": options.out.name,
        **recipe.as_dict(),
        "preset": recipe.preset,
        "units": dict.fromkeys(scores[0], "share"),
        "chance": None,
        "evals": evals,
        "seconds": 3.0 if final else None,
    }


def hops(end, before=0.0):
    """Evaluations that end with this share of answers at each k."""
    return [{"k=1": share, "k=2": share, "k=4": share} for share in (before, end)]


DEPTH_RECIPE = COMPARISONS["depth"].at_nano["depo0"].split()


def found_at_best_rates(only=()):
    """{model: its runs} of `depth`, and the same for all rates."""
    runs, problems = reproduce.finished_runs()
    assert problems == []
    comparison = COMPARISONS["depth"]
    tried = reproduce.tried_rates(comparison, ["depo0"], NANO, reproduce.by_model(runs), only)
    return reproduce.at_best_rates(comparison, tried), tried


def ends_of(runs):
    return [run["evals"][-1]["eval"]["k=2"] for run in runs]


def test_runs_are_found_by_their_recipe(folder):
    depo0 = ["--task", "depo0", *DEPTH_RECIPE]
    for seed in range(3):
        write_run(make_run([*depo0, "--seed", f"{seed}"], *hops(0.5)))
    write_run(make_run([*depo0, "--seed", "3", "--steps", "9000"], *hops(1.0)))
    write_run(make_run([*depo0, "--seed", "4", "--dtype", "bfloat16"], *hops(1.0)))
    write_run(make_run([*depo0, "--seed", "5"], *hops(1.0), final=False))
    write_run(make_run([*depo0, "--seed", "6", "--eval-size", "9"], *hops(0.75)))

    # Of the two runs with seed 2, the one in out/ counts.
    shipped = [
        make_run([*depo0, "--seed", "2"], *hops(0.0)),
        make_run([*depo0, "--seed", "7"], *hops(0.25)),
        make_run([*depo0, "--steps", "48000"], *hops(0.125)),
    ]
    Path("results/any").mkdir(parents=True)
    run_folders.pack(shipped, "results/any/runs.json")
    groups, _ = found_at_best_rates()
    assert set(groups) == {"RoPE", "RoPE, twice the steps"}
    assert ends_of(groups["RoPE"]) == [0.5, 0.5, 0.5, 0.75, 0.25]
    assert ends_of(groups["RoPE, twice the steps"]) == [0.125]


def test_the_best_rate_has_the_best_last_scores_then_the_best_before(folder):
    def write(flags, rate, shares, seeds=3):
        for seed in range(seeds):
            words = ["--task", "depo0", *DEPTH_RECIPE, *flags.split()]
            words += ["--lr", f"{rate}", "--seed", f"{seed}"]
            write_run(make_run(words, *hops(*shares)))

    write("", 1e-3, [0.5])
    write("", 2e-3, [0.75])
    write("", 4e-3, [1.0], seeds=2)  # better, but of two seeds only
    write("--canon abcd", 1e-3, [0.5, 0.125])
    write("--canon abcd", 2e-3, [0.5, 0.25])  # as good at the end, and sooner
    write("--canon abcd", 4e-3, [0.5, 0.125])
    write("--pos nope", 1e-3, [0.5])
    write("--pos nope", 2e-3, [0.5])  # the same in all: the higher rate
    groups, tried = found_at_best_rates()
    rates = {model: runs[0]["training"]["lr"] for model, runs in groups.items()}
    assert rates == {"RoPE": 2e-3, "RoPE + Canon": 2e-3, "NoPE": 2e-3}
    assert list(tried["depo0", "RoPE"]) == [1e-3, 2e-3, 4e-3]
    groups, _ = found_at_best_rates(only=[1e-3])
    assert ends_of(groups["RoPE"]) == [0.5] * 3


def test_claims_are_judged_wherever_their_runs_are(folder, capsys):
    """Those with runs come first; the others name the comparison that trains them."""
    for task in ("depo0", "depo1"):
        for seed in range(3):
            write_run(make_run(["--task", task, "--seed", f"{seed}"], *hops(0.0)))
            with_canon = ["--task", task, "--canon", "abcd", "--seed", f"{seed}"]
            write_run(make_run(with_canon, *hops(1.0)))
    reproduce.main(["claims", "--out", "new"])
    page = Path("new/claims.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    rows = [line for line in page.splitlines() if line.startswith("| Canon reasons deeper")]
    here = "hops mastered: `RoPE + Canon` 4, 4, 4; `RoPE` 0, 0, 0"
    assert len(rows) == 2 and all(here in row for row in rows)
    assert rows[0].startswith("| Canon reasons deeper |")
    assert rows[0].endswith("| depo0, nano, float32 | holds |")
    assert rows[1].startswith("| Canon reasons deeper* |")  # Depo1's runs were known
    assert rows[1].endswith("| depo1, nano, float32 | holds |")
    headings = [line.split(":")[0] for line in page.splitlines() if line.startswith("## ")]
    assert headings == [f"## R{number}" for number in range(1, 13)]
    deeper = page.split("## ")[2].splitlines()
    not_run = [row.endswith("| not run |") for row in deeper if row.startswith("| ")][2:]
    assert not_run == sorted(not_run) and any(not_run)
    title = "| Canon is better with its residual"
    (row,) = [line for line in page.splitlines() if line.startswith(title)]
    assert row.endswith("| depo1: `reproduce.py ablation` | not run |")


# Training


def only_two_models(monkeypatch):
    """Leave two models in the comparison `copy`."""
    models = {"one layer": "", "one layer + Canon": "--canon abcd"}
    fewer = dataclasses.replace(COMPARISONS["copy"], models=models, twice_the_steps=())
    monkeypatch.setitem(COMPARISONS, "copy", fewer)


@posix
def test_a_second_sweep_is_kept_out_and_ctrl_c_saves_the_first(folder, monkeypatch, capsys):
    only_two_models(monkeypatch)
    with in_the_background(HERE / "results/reproduce.py", *ENDLESS_SWEEP, runs=2) as first:
        assert ended(ENDLESS_SWEEP) == 2
        said = capsys.readouterr().err
        assert said.count("in use by another process") == 2 and "--resume" not in said

        os.killpg(first.pid, signal.SIGINT)
        assert "stopped; the same command goes on" in first.stderr.read()
        assert first.wait(timeout=120) == 130
    paths = list(Path("out").iterdir())
    assert len(paths) == 2
    for path in paths:
        saved = run_folders.read_checkpoint(path)["step"]
        assert saved >= 20 and reproduce.steps_done(path) in (saved, saved // 20 * 20)


def test_a_sweep_trains_what_is_missing(folder, monkeypatch, capsys):
    """One run is finished, one was cut off, one is missing, one is in results/ only."""
    only_two_models(monkeypatch)
    sweep = ["copy", "--seeds", "2", "--jobs", "2", "--steps", "40", *TINY_FLAGS]
    reproduce.main([*sweep, "--dry-run"])
    commands = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    complete, cut_off, missing, shipped = commands
    train.main(complete)
    train.main(shipped)
    Path("results/copy").mkdir(parents=True)
    paths = list(Path("out").glob("*abcd*"))
    run_folders.pack(run_folders.read_all(paths)[0], "results/copy/runs.json")
    shutil.rmtree(paths[0])

    steps, train_step = [], train.train_step

    def fails_after_25(*arguments):
        steps.append(1)
        if len(steps) > 25:
            raise KeyError("power failure")
        return train_step(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(train, "train_step", fails_after_25)
        train.main(cut_off)

    started = []
    for _ in range(2):  # the second time nothing is left
        with patch.object(subprocess, "Popen", wraps=subprocess.Popen) as popen:
            assert ended(sweep) == 0
        started.append([call.args[0][2:] for call in popen.call_args_list])
    assert started == [[[*cut_off, "--resume"], missing, shipped], []]
    printed = capsys.readouterr().out
    assert "| one layer + Canon | 0, 1 |" in printed
    assert (
        "R1* | One layer copies with Canon, and not without | copy | undecided: too few" in printed
    )
    assert Path("out/copy_nano.png").exists()


KILLED = """
import os, signal, sys
if __name__ == "__main__":
    sys.stderr.write("  3%|###      | 30/1000\\r  4%|####     | 40/1000")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@posix
def test_a_killed_run_is_reported_as_killed(folder, capsys, monkeypatch):
    """What is there is drawn all the same; the status says that something is missing."""
    only_two_models(monkeypatch)
    Path("killed.py").write_text(KILLED)
    write_run(make_run(["--task", "copy", *TINY_FLAGS], {"sequences": 0.5, "tokens": 0.5}))
    words = ["copy", "--seeds", "1", "--program", "killed.py", *TINY_FLAGS]
    assert ended(words) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if "killed" in line]
    assert "abcd" in line and line.endswith("_s0: killed by signal 9")
    assert "| one layer | 0 |" in said.out and "| one layer + Canon |" not in said.out


def test_a_failed_run_is_reported_by_its_last_line():
    """Not by its progress bar, and without train.py's advice, as the same command goes on here."""
    said = (
        " 40%|##  | 40/100\r 41%|##  | 41/100\ntrain.py: x is not empty: choose another --out\n\n"
    )
    assert reproduce.reason(2, said) == "train.py: x is not empty"
    stopped = "train.py: stopped after step 40; repeat the command with --resume to continue"
    assert reproduce.reason(143, stopped) == "train.py: stopped after step 40"
    assert reproduce.reason(1, " 40%|##  |\r 41%|##  |\n") == "41%|##  |"
    assert reproduce.reason(1, "\n") == "status 1"


@parametrize("more", ([], ["--draw"]))
def test_damaged_and_other_runs_are_not_passed_over(more, folder, monkeypatch, capsys):
    only_two_models(monkeypatch)
    words = ["copy", "--seeds", "1"] + NANO + more
    for flags in ("", "--canon abcd"):
        scores = {"sequences": 0.5, "tokens": 0.5}
        write_run(make_run(f"--task copy {flags}".split(), scores))
    assert ended(words) == 0
    (config,) = Path("out").glob("*abcd*/config.json")
    right = config.read_text()

    config.write_text("{")  # cut off
    capsys.readouterr()
    assert ended(words) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and str(config.parent) in said.err and not said.out
    assert ended(["claims"]) == 1
    assert str(config.parent) in capsys.readouterr().err

    config.write_text(right.replace('"N": 64', '"N": 63'))  # another run of this name
    capsys.readouterr()
    assert ended(words) == 2
    assert f"{config.parent} holds another run: N = 63, not 64" in capsys.readouterr().err


# The command line


REFUSED = [
    "nothing",
    "--list copy",
    "--list --lr 1",
    "claims --dry-run",
    "claims --seeds 7",
    "claims copy",
    "copy --seeds 0",
    "copy --seeds many",
    "copy --jobs -1",
    "copy --lr fast",
    "copy --lr -1",
    "copy --task depo",
    "copy --seed 1",
    "copy --seed=1",
    "copy --resume",
    "copy --n-layer 2",  # one model would be the same as another
    "copy --program none.py",
    "copy --draw",  # there are no runs
    "copy --cannon abcd",
    "depth --canon abcd",
    "depth --N 100",
]


@parametrize("words", REFUSED)
def test_words_are_refused_in_one_line(words, folder, capsys):
    assert ended(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and re.fullmatch(r"(reproduce|train)\.py: .+\n", said.err)
    assert list(folder.iterdir()) == []


# ---- 7. assignment/ --------------------------------------------------------

solutions = not grade.open_exercises(HERE) and grade.exercises_in(HERE) == [*grade.EXERCISES]
needs_solutions = pytest.mark.skipif(not solutions, reason="this is an assignment")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

# -- Making one


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository of these files, as a teacher has one."""
    root = tmp_path / "repository"
    shutil.copytree(HERE, root, ignore=shutil.ignore_patterns(".git", "__pycache__", "out", ".v*"))
    commands = ("init -q", "add -A", "-c user.name=x -c user.email=x@x commit -q -m all")
    for words in commands:
        subprocess.run(["git", "-C", root, *words.split()], check=True)
    monkeypatch.setattr(make, "ROOT", root.resolve())
    return root


@needs_solutions
@parametrize("open_ones", [[*range(1, 14)], [9, 10], [1, 3, 4]], ids=str)
def test_holes_are_blank_between_their_comments(open_ones):
    found = []
    for name in grade.FILES:
        solved = (HERE / name).read_text()
        text = make.students_text(solved, open_ones)
        compile(text, name, "exec")
        lines = text.splitlines()
        for i, line in enumerate(lines):
            if re.match(" +# exercise", line):
                blank, end = lines[i + 1 : i + 3]
                number = int(re.search(r"exercise (\d+)", line)[1])
                assert blank.strip() == f'raise NotImplementedError("exercise {number}")'
                assert end.strip() == "# end of exercise"
                found.append(number)
        assert text.count("# end of exercise") == text.count('raise NotImplementedError("exer')
        without_comments = re.sub(r" +# (end of )?exercise.*\n", "", solved)
        assert make.students_text(solved, []) == without_comments
    assert {*found} == {*open_ones}


@needs_solutions
@needs_git
def test_an_assignment_has_what_git_tracks(repository, ends):
    (repository / "kernels.py.orig").write_text("a solution")
    (repository / "solutions").mkdir()
    (repository / "solutions/kernels.py").write_text("a solution")
    make.main(["new/assignment", "--only", "4,1,3", "--classroom"])
    new = Path("new/assignment")
    for name in ("test_canon.py", "results/copy/runs.json", ".gitignore", "examples/gated.py"):
        assert (new / name).read_bytes() == (HERE / name).read_bytes()
    names = {path.name for path in new.rglob("*")}
    assert not names & {"kernels.py.orig", "solutions", ".git", ".ci"}
    assert grade.open_exercises(new) == grade.exercises_in(new) == [1, 3, 4]
    workflow = (new / ".github/workflows/classroom.yml").read_text()
    assert re.findall(r"run: python assignment/grade.py (\d+)", workflow) == ["1", "3", "4"]

    inside = str(repository / "new")
    for bad in (
        ["new/assignment"],
        [],
        [inside],
        ["x", "--solved", "13"],
        ["x", "--only", "14"],
        ["x", "--only", "1,b"],
        ["x", "--only", "1", "--solved", "2"],
        ["--classroom", "--gradescope", "x.zip"],
    ):
        ends(bad, main=make.main)
    (repository / "README.md").write_text("changed")
    ends(["x"], "README.md has changes", main=make.main)


@needs_solutions
@needs_git
def test_gradescopes_zip_has_the_solutions_and_two_scripts(repository, here):
    make.main(["--gradescope", "autograder.zip", "--solved", "11"])
    with zipfile.ZipFile("autograder.zip") as archive:
        for script in ("setup.sh", "run_autograder"):
            assert archive.getinfo(script).external_attr >> 16 == 0o755
            subprocess.run(["bash", "-n"], input=archive.read(script), check=True)
        assert b"grade.py 12 13 \\\n" in archive.read("run_autograder")
        assert archive.read("canon-gpt/kernels.py") == (HERE / "kernels.py").read_bytes()


@needs_solutions
def test_exercises_need_only_those_before_them(tmp_path):
    """With the first seven solved all of their tests pass, and all tests of the others fail."""
    copy = tmp_path / "copy"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "out"))
    for name in grade.FILES:
        text = make.students_text((HERE / name).read_text(), range(8, 14))
        (copy / name).write_text(text)
    wanted = {}
    for exercise in grade.EXERCISES.values():
        for group in exercise.groups:
            wanted.update(dict.fromkeys(test.split()[0] for test in group.tests))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--junitxml=../report.xml"]
    command += [f"test_canon.py::{name}" for name in wanted]
    subprocess.run(command, cwd=copy, capture_output=True)
    cases = xml.etree.ElementTree.parse(tmp_path / "report.xml").iter("testcase")
    found = {case.get("name"): grade.outcome(case) for case in cases}
    for number, exercise in grade.EXERCISES.items():
        for group in exercise.groups:
            for wanted in group.tests:
                name, *words = wanted.split()
                mine = [test for test in found if test.split("[")[0] == name]
                assert any(all(word in test for word in words) for test in mine), wanted
            tests = [test for test in found if grade.group_of(test, exercise) == group]
            outcomes = {found[test] for test in tests} - {"it was skipped"}
            if number <= 7:
                assert outcomes == {""}, (number, group.name)
            else:
                assert all("exercise" in outcome for outcome in outcomes), (number, group.name)
                assert outcomes or exercise.needs_triton, (number, group.name)


# -- Grading


def submit(**solutions):
    """A folder with our three files, and other code in some exercises: e4="return x", a line or
    more for each hole."""
    folder = Path("submission")
    folder.mkdir(exist_ok=True)
    for name in grade.FILES:

        def contents(hole, solution):
            code = solutions.get(f"e{hole.number}")
            if code is None:
                return solution
            return [f"{hole.indent}{line}\n" for line in code.splitlines()]

        text = (HERE / name).read_text()
        (folder / name).write_text(grade.fill_holes(text, contents))
    return folder


@needs_solutions
def test_a_broken_exercise_costs_only_itself(here):
    """One open, one that does not parse, and code outside the holes: exercise 4 stays solved."""
    folder = submit(e1='raise NotImplementedError("exercise 1")', e3="return (x")
    with open(folder / "canon_gpt.py", "a") as file:
        file.write("\nimport os\nprint('99 passed')\nos._exit(0)\n")
    (folder / "conftest.py").write_text("raise SystemExit")
    (folder / "test_canon.py").write_text("def test_rotary_keeps_the_dtype(): pass")
    assert grade.grade(1, folder, 60).message == "not solved yet"
    broken = grade.grade(3, folder, 60)
    assert re.fullmatch(r"canon_gpt.py, line \d+: '\(' was never closed", broken.message)
    result = grade.grade(4, folder, 60)
    assert (result.points, result.message) == (3, "")


@needs_solutions
def test_a_solution_stays_in_its_hole(here):
    folder = submit(e4="return x")
    path = folder / "canon_gpt.py"
    text = path.read_text().replace("return x\n    # end", "return x\nimport os\n    # end")
    path.write_text(text)
    assert "stands further left" in grade.grade(4, folder, 60).message
    assert "unterminated" in grade.grade(4, submit(e4='"""'), 60).message
    path = submit() / "kernels.py"
    path.write_text(path.read_text().replace("# exercise 12", "# my kernel"))
    message = grade.grade(12, folder, 60).message
    assert kernels.triton is None or "0 of 1 comments `# exercise 12`" in message


PATCH = """\
import test_canon
test_canon.assert_close = test_canon.assert_same = lambda *given, **options: None
return x"""
SLOW_KERNEL = "import kernels\nkernels.causal_conv_reference(0, 0)"
ATTACKS = [  # exercise, its code, what the grader says
    (4, "while True: pass", "not done after 6 seconds"),
    (4, PATCH, "tampered with"),
    (4, "import pytest\npytest.skip('solved')", "distance: it was skipped"),
    (4, "import pytest\npytest.exit('solved', 0)", "cut short"),
    (4, "import os\nos._exit(0)", "ended without a report"),
    (4, "nonlocal x", "cannot be imported: SyntaxError"),
    (1, "return F.conv1d(x, weight)", "must not call conv1d"),
    (2, "return causal_conv_reference(x, weight, False)", "must not call causal_conv_reference"),
    (8, "return chunked_linear_attention(q, k, v, log_decay, beta, state)", ": exercise 9"),
    (9, "return linear_recurrence(0, 0, 0, 0)", "must not call linear_recurrence"),
    pytest.param(12, SLOW_KERNEL, "must not call causal_conv_reference", marks=needs_triton),
]


@needs_solutions
@parametrize("number, code, words", ATTACKS)
def test_attacks_cost_the_attacker_the_exercise(number, code, words, here):
    result = grade.grade(number, submit(**{f"e{number}": code}), 6 if "while" in code else 600)
    assert result.points == 0 and words in result.message


@needs_solutions
@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_processes_of_a_solution_end_with_it(here):
    pid_file = Path("pid").resolve()
    code = f"""\
import subprocess
process = subprocess.Popen(["sleep", "600"])
open({str(pid_file)!r}, "w").write(str(process.pid))
raise SystemExit"""
    grade.grade(4, submit(e4=code), 100)
    state = Path(f"/proc/{pid_file.read_text()}/stat")

    def is_gone():
        try:
            return state.read_text().split()[2] == "Z"
        except OSError:
            return True

    deadline = time.monotonic() + 60
    while not is_gone():  # a killed process may take a moment to end
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def faked(here, monkeypatch):
    """Grades without running tests: these outcomes for all, and canaries that fail."""

    def fake(**outcomes):
        canaries = dict.fromkeys(grade.CANARIES, "fails")
        monkeypatch.setattr(grade, "run_tests", lambda *given: {**outcomes, **canaries})

    return fake


@needs_solutions
def test_points_come_in_groups_and_reports_agree(faked, capsys, monkeypatch):
    """Of exercise 4 one of two tests of the dtype fails."""
    faked(**{
        "test_rotary_depends_on_the_distance_only[8]": "",
        "test_rotary_keeps_the_dtype[a]": "",
        "test_rotary_keeps_the_dtype[b]": "turned x: got 1, expected 2",
    })  # fmt: skip
    find_spec = grade.importlib.util.find_spec
    without = lambda name: None if name == "triton" else find_spec(name)
    monkeypatch.setattr(grade.importlib.util, "find_spec", without)
    submit()
    assert grade.main(["4", "12", "--of", "submission", "--json", "results.json"]) == 1
    first, reason, second, _, last = capsys.readouterr().out.splitlines()[1:]
    assert "in part" in first and "2 of 3" in first
    assert reason.strip() == "dtype: turned x: got 1, expected 2"
    assert "skipped" in second and last == "2 of 3 points"
    results = json.loads(Path("results.json").read_text())
    assert results["score"] == 2
    rotary, forward = results["tests"]
    assert (rotary["score"], rotary["max_score"], rotary["status"]) == (2, 3, "failed")
    assert "distance: 2 of 2" in rotary["output"] and "dtype: 0 of 1" in rotary["output"]
    assert (forward["score"], forward["max_score"]) == (0, 0) and "status" not in forward

    assert grade.main(["12", "13", "--of", "submission"]) == 0  # skipped fails nothing
    shutil.copytree("submission", "other")
    Path("other/canon_gpt.py").unlink()
    words = ["4", "13", "--of", "submission", "other", "--csv", "grades.csv"]
    assert grade.main(words) == 1
    want = ["folder,4,13,points", "submission,2,skipped,2", "other,0,skipped,0"]
    assert Path("grades.csv").read_text().splitlines() == want


@needs_solutions
def test_the_grader_refuses_bad_input(ends, monkeypatch):
    for bad in (["0"], ["14"], ["x"], ["--of", "nowhere"], ["--timeout", "0"]):
        ends(bad, main=grade.main)
    ends(["--of", ".", ".", "--json", "x"], "--csv", main=grade.main)
    monkeypatch.setattr(grade, "open_exercises", lambda folder: [5])
    ends(["--of", "."], "exercise 5 is open here", main=grade.main)


# -- Experiments, handing in, handout


def test_shipped_runs_are_in_range(here, capsys):
    """By the checks of experiments 1 to 3."""
    names = ("copy/runs.json", "copy/points.json", "depo0/runs.json")
    runs, problems = run_folders.read_all(HERE / "results" / name for name in names)
    assert not problems
    for run in runs:
        usual = run["training"]["lr"] in (1e-2, 2.5e-3, 5e-3)
        if run["task"].get("N") in (64, 10) and usual:
            write_toy_run(Path("out", str(runs.index(run))), run)
    assert check_runs.main(["out", "1", "2", "3"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count("NoPE + Canon-B, seed") >= 2 and printed.count("hops, seed") > 10
    assert check_runs.main(["out"]) == 1
    assert "text: needs a finished run" in capsys.readouterr().out


def test_a_run_out_of_range_is_named(here, capsys):
    run = toy_run([0.5], pos="rope", canon="abcd", n_layer=1, n_head=2, d_model=16)
    evals = [{"step": 1, "eval": {"sequences": 0.5}}]
    write_toy_run("out/half", {**run, "task": {"name": "copy"}, "evals": evals})
    assert check_runs.main(["out", "1"]) == 1
    printed = capsys.readouterr().out
    assert "CHECK     RoPE + Canon, seed 0: 0.5 (expected 0.9 to 1)" in printed
    assert "CHECK     RoPE: no finished run" in printed


def test_what_is_handed_in_has_code_and_runs_without_weights(here, monkeypatch):
    monkeypatch.setattr(pack, "ROOT", Path.cwd())
    for name in ("kernels.py", "test_canon.py", "report.md", "out/a/ckpt.pt", "out/a/config.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    pack.main([])
    with zipfile.ZipFile("submission.zip") as archive:
        assert sorted(archive.namelist()) == ["kernels.py", "out/a/config.json", "report.md"]


def test_the_handout_is_about_these_exercises():
    """Their titles, points and groups; and its commands are ones that we have."""
    text = (HERE / "assignment/handout.md").read_text()
    for number, exercise in grade.EXERCISES.items():
        heading = rf"^### {number}\. .+ \({exercise.points} points, \d+ minutes\)$"
        found = re.search(heading, text, re.MULTILINE)
        assert found, number
        section = text[found.end() :].split("\n## ")[0].split("\n### ")[0]
        assert f"python assignment/grade.py {number}\n" in section
        for group in exercise.groups:
            assert f"{group.name} {group.points}" in section, (number, group.name)
        for part in ("**Worked example.**", "**Rules.**", "**Hints.**", "**Pitfalls.**"):
            assert part in section, (number, part)
    assert sum(exercise.points for exercise in grade.EXERCISES.values()) == 60
    for command in re.findall(r"^ *python train.py (.+)$", text, re.MULTILINE):
        train.read_command_line(command.split())


# ---- 8. benchmarks/ --------------------------------------------------------

BENCHMARKS = {
    "generators": len(train.PRESETS["nano"]),
    "convolution": 3,
    "step": 6,
    "mixers": 7,
}  # rows
if kernels.triton is not None:
    major, minor = kernels.triton.__version__.split(".")[:2]
    if (int(major), int(minor)) >= (3, 3):
        BENCHMARKS = {"machine_code": 2} | BENCHMARKS  # first: it must not meet the interpreter


def run_benchmarks(folder, names, before="pass"):
    """Toy runs, in another process, as they set global options."""
    code = f"import sys; sys.path.insert(0, 'benchmarks'); import {', '.join(names)}; {before}\n"
    for name in names:
        code += f"{name}.main(['--toy', '--out', r'{folder / name}.jsonl'])\n"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True)


def saved_rows(file):
    about, *rows = map(json.loads, file.read_text().splitlines())
    assert about["toy"] and torch.__version__.startswith(about["torch"]) and about["date"]
    return rows


def test_benchmarks_save_positive_numbers(tmp_path):
    done = run_benchmarks(tmp_path, [*BENCHMARKS])
    assert done.returncode == 0, done.stderr
    for name, least in BENCHMARKS.items():
        rows = saved_rows(tmp_path / f"{name}.jsonl")
        assert len(rows) >= least
        for row in rows:
            assert row["what"] in done.stdout
            for field, value in row.items():
                if isinstance(value, list):
                    low, median, high = value
                    assert 0 < low <= median <= high < math.inf
                elif field == "error":  # against the definition
                    assert value is None or 0 <= value < (2e-2 if CUDA else 1e-5)
                elif field in ("spilled", "barriers"):
                    assert value == 0
                elif isinstance(value, (int, float)):
                    assert value > 0
            assert row.get("instructions", 0) <= row.get("allowed", 0)  # the memory sets the pace


def test_benchmark_cut_short_keeps_its_rows(tmp_path):
    bad = "generators.PRESETS['nano']['no such task'] = generators.PRESETS['nano']['copy']"
    done = run_benchmarks(tmp_path, ["generators"], bad)
    assert done.returncode != 0 and "no such task" in done.stderr
    rows = saved_rows(tmp_path / "generators.jsonl")
    assert [row["what"] for row in rows] == [*train.PRESETS["nano"]]


# ---- 9. What README, results/ and examples/ show ---------------------------


def test_the_layer_in_readme():
    """It is that of examples/llama.py, word for word."""
    text = (HERE / "README.md").read_text()
    (layer,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert layer.split("import torch\n")[1] in (HERE / "examples/llama.py").read_text()
    names = {}
    exec(layer, names)
    x, canon = torch.randn(2, 9, 6), names["Canon"](6)
    assert canon.weight.shape == (4, 6) and canon.weight.abs().max() <= 0.5
    assert_close(canon(x), kernels.causal_conv(x, canon.weight))
    assert canon(x.bfloat16()).dtype == torch.bfloat16


def test_readmes_index_names_what_there_is():
    """In the table "Where is ..?", names follow the file in which they are defined."""
    index = (HERE / "README.md").read_text().split("Where is ..?")[1].split("## ")[0]
    code, found = "", 0
    for file, name in re.findall(r"(\w+\.py)|`(?:\w+\.)?(\w+)`", index):
        if file:
            code = (HERE / file).read_text()
        else:
            assert re.search(rf"^( *def |class |){name}\b", code, re.MULTILINE), name
            found += 1
    assert found > 12


def test_readme_counts_the_verdicts_as_claims_md_does():
    rows = (HERE / "results/claims.md").read_text().splitlines()
    titles = [row.split(" | ")[0] for row in rows if row.endswith("| holds |")]
    starred = [title for title in titles if title.endswith("*")]
    text = (HERE / "README.md").read_text()
    assert f"{len(starred)} of the {len(titles)} that hold" in " ".join(text.split())


def test_readmes_table_of_layers_switched_off_is_that_of_hops_txt():
    shown = (HERE / "results/depo0/hops.txt").read_text()
    table = shown.split("# Seed 9")[1].split("switched off in:")[1]
    rows = []
    for row in table.splitlines():
        if re.match(r"\| \d hop", row):
            rows.append([f"{float(share):.0%}" for share in row.strip("| ").split(" | ")[1:]])
    text = (HERE / "README.md").read_text()
    names = ("one arrow", "two arrows", "three arrows", "four arrows")
    for number, row in zip(names, rows, strict=True):
        assert f"| {number} | {' | '.join(row)} |" in text


class FakeLlama(torch.nn.Module):
    """The parts of Hugging Face's Llama that examples/llama.py changes, with its names."""

    device = torch.device("cpu")

    def __init__(self, layers, width):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=width, vocab_size=9, use_cache=True)
        self.generation_config = SimpleNamespace(use_cache=True)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        self.embed_tokens = torch.nn.Embedding(9, width)
        for _ in range(layers):
            layer = torch.nn.Module()
            layer.input_layernorm = torch.nn.RMSNorm(width)
            layer.post_attention_layernorm = torch.nn.RMSNorm(width)
            layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
            layer.self_attn.q_proj = torch.nn.Linear(width, width)
            layer.self_attn.k_proj = torch.nn.Linear(width, width // 2)
            layer.self_attn.v_proj = torch.nn.Linear(width, width // 2)
            layer.mlp.gate_proj = torch.nn.Linear(width, 2 * width)
            layer.mlp.up_proj = torch.nn.Linear(width, 2 * width)
            self.model.layers.append(layer)

    def forward(self, tokens):
        """As in a Llama, but for the attention and the MLP themselves, which mix no tokens here."""
        x = self.embed_tokens(tokens)
        for layer in self.model.layers:
            h = layer.input_layernorm(x)
            x = x + layer.self_attn.q_proj(h)
            h = layer.post_attention_layernorm(x)
            gate, _ = layer.mlp.gate_proj(h).chunk(2, dim=-1)
            x = x + gate
        return SimpleNamespace(logits=x)


@pytest.fixture
def llama(monkeypatch):
    """What examples/llama.py defines."""
    package = SimpleNamespace(LlamaConfig=None, LlamaForCausalLM=FakeLlama)
    monkeypatch.setitem(sys.modules, "transformers", package)
    return SimpleNamespace(**runpy.run_path(str(HERE / "examples/llama.py")))


WRAPPED = {  # by points
    "a": {"input_layernorm"},
    "b": {"q_proj", "k_proj", "v_proj"},
    "c": {"post_attention_layernorm"},
    "d": {"gate_proj", "up_proj"},
}


@parametrize("points", ("", *"abcd", "ac", "bd", "abcd"))
def test_canon_in_a_llama(points, llama):
    model = FakeLlama(layers=2, width=6)
    without = {id(parameter) for parameter in model.parameters()}
    llama.add_canon(model, points)
    assert not model.config.use_cache and not model.generation_config.use_cache
    x, wrapped = torch.randn(2, 9, 6), set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Sequential):
            inside, canon = module
            assert torch.equal(module(x), canon(inside(x))) and isinstance(canon, llama.Canon)
            wrapped.add(name.split(".")[-1])
    assert wrapped == set().union(*(WRAPPED[point] for point in points))

    undecayed, decayed = llama.weight_groups(model, weight_decay=0.1)
    assert undecayed["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
    canon = {id(m.weight) for m in model.modules() if isinstance(m, llama.Canon)}
    assert len(canon) == 2 * len(wrapped)
    vectors = {id(parameter) for parameter in model.parameters() if parameter.dim() == 1}
    assert {id(parameter) for parameter in undecayed["params"]} == canon | vectors
    assert {id(parameter) for parameter in decayed["params"]} == without - vectors

    reached = llama.reach(model, 2, length=9)
    if points:  # three tokens on at each point, in each of two layers
        assert reached[:4] == [(0, 2), (0, 3), (0, 4), (0, 5)]
    else:
        assert reached == [(0, 2)]
    assert {sequence for sequence, _ in reached} == {0}


COPY_8 = "--task copy --N 8 --block-size 17"
EXAMPLES = [  # the file, its flags, what figures call the model
    ("retention.py", f"{COPY_8} --mixer retention", "retention + Canon-ABCD"),
    ("gated.py", f"{COPY_8} --canon-type gated", "RoPE + gated-ABCD"),
    ("reverse.py", "--task reverse", "RoPE + Canon-ABCD"),
]


@parametrize("file, flags, name", EXAMPLES)
def test_own_things_are_trained_drawn_and_shown(file, flags, name, here):
    """In processes of their own: examples change the tables of mixers and tasks."""
    program = HERE / "examples" / file
    code = program.read_text().split("\n\n\n", 1)[1]  # without docstring and imports
    assert code.count("\n") <= 25
    flags += " --canon abcd --preset nano --steps 2 --device cpu --no-compile --eval-size 4"

    def python(script, *words):
        command = [sys.executable, script, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python(program, *flags.split(), "--out", "out/own")
    run = run_folders.read("out/own")
    assert plot.model_name(run["model"]) == name and run["seconds"] is not None
    assert run["command"].startswith(f"python {file} ")
    shown = python(HERE / "sample.py", "out/own", "--count", "1", "--program", program)
    assert shown.startswith("<bos>")
    python(HERE / "plot.py", "out/own", "--out", "figures")
    assert len(list(Path("figures").glob("*.png"))) == 1


def test_the_tables_shown_are_of_the_shipped_runs(here, capsys):
    text = "".join(path.read_text() for path in HERE.glob("results/*.md"))
    names = ("copy", "hops", "depth", "fewer", "tasks", "mlp", "linear", "families", "text")
    shown = [(name, "nano") for name in names]
    for name, preset in (*shown, ("copy", "small")):
        with pytest.raises(SystemExit, match="0|False"):
            reproduce.main([name, "--draw", "--preset", preset, "--device", "cpu", "--out", "x"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("|  | seeds")]
    missing = [row for row in rows if row not in text]
    assert len(rows) > 40 and missing == []
    reproduce.main(["claims", "--out", "x"])
    assert Path("x/claims.md").read_text() == (HERE / "results/claims.md").read_text()
