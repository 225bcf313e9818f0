"""The tests:   python -m pytest

By file, from the inside out. Fast code is compared with slow code that is obviously right, written
here from the definitions; properties are tried on random shapes.
"""

# ruff: noqa: E402, E731

import contextlib
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
import threading
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
PYTORCH, TRITON = "causal_conv_pytorch", "causal_conv_triton"
FORMS = ["causal_conv_reference", "causal_conv", PYTORCH, pytest.param(TRITON, marks=needs_triton)]
SMALL = [(1, 1, 1), (2, 2, 40), (1, 33, 7)]  # two have fewer tokens than the kernel
LARGE = (2, 150, 130)  # in Triton's kernels five segments forward, two backward, and two strips
# The largest error of a rounding: half a unit in the last place on hardware, and a whole one in
# Triton's interpreter. Sums are in float32.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def conv_inputs(B, T, D, kernel=4, dtype=torch.float32):
    """x (B, T, D), weight (kernel, D) and dy (B, T, D).

    x and dy are parts of wider tensors, as they are after a projection, and x of a longer one.
    """
    x = torch.randn(B, T + 2, 2 * D + 1, dtype=dtype, device=DEVICE)[:, 1:-1, D : 2 * D]
    weight = (torch.rand(kernel, D, device=DEVICE) * 2 - 1) * kernel**-0.5
    dy = torch.randn(B, T, D + 3, dtype=dtype, device=DEVICE)[..., :D]
    return x, weight, dy


def conv_exact(x, weight, dy, residual=True):
    """(y, dx, dw) of the definition in float64."""
    return value_and_gradients(
        causal_conv_reference, x.double(), weight.double(), dy.double(), residual
    )


@exercise(1, 1)
def test_convolution_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[2.0], [3.0]])  # z_t = 2 h_t + 3 h_{t-1}
    z = torch.tensor([[[2.0], [23.0], [230.0]]])
    assert_same("without residual", causal_conv_reference(x, weight, residual=False), z)
    assert_same("with residual", causal_conv_reference(x, weight), x + z)
    tail = torch.tensor([[[5.0]]])
    first = causal_conv_reference(x, weight, False, tail)[:, :1]
    assert_same("the first output behind a tail", first, torch.full((1, 1, 1), 2.0 * 1 + 3 * 5))


def cases(name, dtype):
    """Yield (x, weight, dy), residual and what is tried, for a form of the convolution."""
    tried = [(LARGE, 4, True)]
    if dtype == torch.float32:
        kernel_sizes = (1, 2, 3, 4) if name == TRITON else (1, 2, 3, 4, 7)
        tried += product(SMALL, kernel_sizes, (True, False))
    for shape, kernel, residual in tried:
        what = f"shape {shape}, kernel {kernel}, residual {residual}"
        yield conv_inputs(*shape, kernel, dtype), residual, what


def assert_rounded(what, got, exact, dtype):
    assert_same(what, got, exact, atol=float(ROUNDING[dtype] * (exact.abs().max() + 1)), rtol=0)


@parametrize("dtype", ROUNDING, ids=str)
@parametrize("name", [
    pytest.param(PYTORCH, marks=exercise(2, 2)),
    pytest.param(TRITON, marks=[needs_triton, exercise(12, 4)]),
])  # fmt: skip
def test_convolution_equals_the_definition_in_float64(name, dtype):
    for (x, weight, dy), residual, what in cases(name, dtype):
        y = getattr(kernels, name)(x, weight, residual)
        assert y.dtype == dtype
        exact, _, _ = conv_exact(x, weight, dy, residual)
        assert_rounded(f"y, {what}", y.double(), exact, dtype)


@parametrize("dtype", ROUNDING, ids=str)
@parametrize("name", [
    pytest.param(PYTORCH, marks=exercise(2, 3)),
    pytest.param(TRITON, marks=[needs_triton, exercise(13, 3)]),
])  # fmt: skip
def test_gradients_equal_those_of_the_definition_in_float64(name, dtype):
    for inputs, residual, what in cases(name, dtype):
        _, dx, dw = value_and_gradients(getattr(kernels, name), *inputs, residual)
        _, exact_dx, exact_dw = conv_exact(*inputs, residual)
        assert_rounded(f"dx, {what}", dx, exact_dx, dtype)
        assert_rounded(f"dw, {what}", dw, exact_dw, dtype)


@parametrize("name", FORMS)
def test_convolution_takes_any_strides_and_keeps_the_dtype(name):
    conv = getattr(kernels, name)
    x, weight, dy = conv_inputs(2, 6, 16)
    want = value_and_gradients(conv, x, weight, dy)
    other_way = [u.mT.contiguous().mT for u in (x, weight, dy)]  # the first axis side by side
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_close(value_and_gradients(conv, *other_way), want, atol=1e-5, rtol=1e-5)
        assert conv(x, weight).dtype == torch.float32
    assert conv(x.bfloat16(), weight).dtype == torch.bfloat16
    same = dy[:1, :1, :1].expand(dy.shape)  # all strides are 0, as in the gradient of a sum
    want = value_and_gradients(conv, x, weight, same.contiguous())
    assert_close(value_and_gradients(conv, x, weight, same), want, atol=1e-5, rtol=1e-5)


@parametrize("with_tail", (True, False))
@parametrize("name", [
    pytest.param("causal_conv_reference", marks=exercise(1, 1)),
    pytest.param("causal_conv", marks=exercise(2, 1)),
])  # fmt: skip
def test_convolution_gradcheck(name, with_tail):
    """Against differences of values."""
    shapes = [(2, 5, 4), (4, 4)]  # x, weight
    if with_tail:
        shapes.append((2, 3, 4))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def conv(x, weight, tail=None):
        return getattr(kernels, name)(x, weight, tail=tail)

    assert gradcheck(conv, inputs)


@parametrize("name", [
    pytest.param("causal_conv_reference", marks=exercise(1, 1)),
    "causal_conv",
])  # fmt: skip
def test_convolution_streams(name):
    """A sequence in pieces, each with the inputs before it as its tail."""
    conv = getattr(kernels, name)
    for kernel, residual in product((2, 3, 4, 7), (True, False)):
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
def test_operators_are_registered_properly():
    """PyTorch's own check: among others, that "fake" results have the real dtypes and strides."""
    x, weight, dy = conv_inputs(2, 5, 8, dtype=torch.bfloat16)
    other_way = x.mT.contiguous().mT, weight.bfloat16().mT.contiguous().mT
    for x_in, w_in in ((x, weight), other_way):
        torch.library.opcheck(torch.ops.canon.causal_conv, (x_in, w_in, True))
        torch.library.opcheck(torch.ops.canon.causal_conv_backward, (dy, x_in, w_in, False))


@parametrize("name", FORMS)
@parametrize("shape, residual", (((2, 9, 8), True), ((3, 2, 5), False)))  # T > kernel, T < kernel
def test_convolution_compiles_in_one_graph(name, shape, residual):
    torch._dynamo.reset()
    compiled = torch.compile(getattr(kernels, name), fullgraph=True, backend="aot_eager")
    x, weight, dy = conv_inputs(*shape)
    want = conv_exact(x, weight, dy, residual)
    assert_close(value_and_gradients(compiled, x, weight, dy, residual), want, atol=1e-5, rtol=1e-5)
    x.requires_grad_()  # and not the weight: it may be frozen
    (dx,) = torch.autograd.grad(compiled(x, weight, residual), x, dy)
    assert_close(dx.double(), want[1], atol=1e-5, rtol=1e-5)


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


@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_gradients_have_the_same_bits_in_each_run():
    inputs = conv_inputs(16, 999, 768)
    first, second = (value_and_gradients(causal_conv, *inputs) for _ in range(2))
    assert_close(first, second, atol=0, rtol=0)


def test_convolution_refuses_shapes_that_do_not_fit():
    """A Triton kernel would read other memory than its arguments'."""
    x, weight = torch.zeros(2, 5, 3), torch.zeros(4, 3)
    for bad in (dict(weight=weight[:, :2]), dict(weight=weight, tail=x)):
        with pytest.raises(ValueError, match="have shapes"):
            causal_conv(x, **bad)


def test_where_triton_fails_one_line_says_so(capsys):
    broken = patch.object(kernels, "forward_op", side_effect=RuntimeError("no C compiler"))
    with broken:
        assert not kernels.first_launch_works.__wrapped__(DEVICE)  # past the cache
    assert re.fullmatch("kernels.py: .*no C compiler.*\n", capsys.readouterr().err)


def test_kernels_py_finds_a_wrong_form(monkeypatch, capsys):
    def wrong(x, weight, residual):
        return causal_conv_reference(x, 1.001 * weight, residual)

    for form, status in ((kernels.causal_conv_pytorch, 0), (wrong, 1)):
        monkeypatch.setattr(kernels, "causal_conv_pytorch", form)
        assert kernels.main() == status
        assert ("WRONG" in capsys.readouterr().out) == bool(status)
        monkeypatch.setattr(kernels, "triton", None)  # once is enough


# ---- 2. canon_gpt.py: Part I -----------------------------------------------


needs_compiler = pytest.mark.skipif(not (CUDA or train.can_compile_on_cpu()), reason="no compiler")

LINEAR = ("gla", "mamba2", "gdn")
VARIANTS = [dict(mixer="gdn,attention", canon="acd"), dict(mixer="mamba2", mlp="none")]
for pos in POSITIONS:
    VARIANTS.append(dict(pos=pos, canon=""))
    VARIANTS.append(dict(pos=pos, canon="abcd"))
for mlp in MLPS:
    VARIANTS.append(dict(mlp=mlp, canon="ab" if mlp == "none" else "abcd"))
for mixer in LINEAR:
    VARIANTS.append(dict(mixer=mixer, canon="", short_conv=False))
    VARIANTS.append(dict(mixer=mixer, canon="acd", short_conv=True))
    VARIANTS.append(dict(mixer=mixer, canon="abcd", short_conv=None))


def test_part_one_runs_without_part_two(tmp_path):
    """As a file of its own, with Part II cut off, it trains."""
    whole = (HERE / "canon_gpt.py").read_text()
    part_one, line, _ = whole.partition("# Part II: linear mixers")
    assert line
    (tmp_path / "part_one.py").write_text(part_one)
    script = """
import torch, part_one
config = part_one.Config(vocab_size=9, block_size=8, n_layer=1, n_head=2, d_model=16, canon="abcd")
model = part_one.CanonGPT(config)
tokens = torch.arange(9)[None]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(50):
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses[0] > 2, losses[-1] < 0.1, list(part_one.MIXERS))
"""
    path = os.pathsep.join([str(tmp_path), str(HERE)])
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "True True ['attention']", done.stderr


def small_model(**options):
    """Its weights are large enough for every path to matter."""
    settings = dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | options
    model = CanonGPT(Config(**settings))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.mul_(10)
    return model


def streamed(module, x, lengths):
    """What a module makes of x in pieces of these lengths, and its state at the end."""
    state = {}
    outputs = [module(piece, state=state) for piece in x.split(lengths, dim=1)]
    if isinstance(module, CanonGPT):
        outputs = [logits for logits, _ in outputs]
    return torch.cat(outputs, dim=1), state


def some_tokens(*shape):
    return torch.randint(0, 19, shape or (2, 24), device="cpu")


@parametrize("options", VARIANTS, ids=str)
def test_causality(options):
    model, tokens = small_model(**options).double(), some_tokens(1, 24)
    before = model(tokens)[0]
    for t in (0, 1, 11, 23):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 1) % 19
        after = model(changed)[0]
        what = f"logits before the changed token {t}"
        assert_same(what, after[:, :t], before[:, :t], atol=1e-12, rtol=0)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-3, f"token {t} changes nothing at {t}"


@parametrize("options", VARIANTS, ids=str)
def test_streaming_equals_one_pass(options):
    model, tokens = small_model(**options).double(), some_tokens()
    for lengths in ((1,) * 24, (5, 1, 1, 9, 8), (23, 1)):
        logits, _ = streamed(model, tokens, lengths)
        what = f"logits in pieces of {lengths}"
        assert_same(what, logits, model(tokens)[0], atol=1e-10, rtol=0)


@parametrize("options", VARIANTS, ids=str)
def test_gradients_are_slopes(options):
    """The gradient along a random direction, against the difference of two values."""
    model, tokens = small_model(**options).double(), some_tokens()
    weights = list(model.parameters())
    mix = torch.randn(2, 24, 19).double()

    def value():
        return (model(tokens)[0] * mix).sum()

    gradients = torch.autograd.grad(value(), weights)
    direction = [torch.randn_like(weight) for weight in weights]
    slope = sum((g * d).sum() for g, d in zip(gradients, direction))
    values = []
    with torch.no_grad():
        for step in (-1e-6, 2e-6):  # one step back, then two forward
            for weight, d in zip(weights, direction):
                weight += step * d
            values.append(value())
    assert_close((values[1] - values[0]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


@parametrize("points", ("", "a", "b", "c", "d", "abcd"))
def test_canon_points_are_where_the_paper_puts_them(points):
    """A model of one block recomputed from its parts, but for attention (Canon-B is in there)."""
    model, tokens = small_model(n_layer=1, canon=points.upper()).double(), some_tokens()
    (block,) = model.blocks
    for norm in (block.norm1, block.norm2, model.norm):
        torch.nn.init.uniform_(norm.weight)

    def normed(x, module):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def canon(h, point, module):
        assert isinstance(module, Canon) == (point in points)
        if point not in points:
            return h
        return h + sum(w * F.pad(h, (0, 0, i, 0))[:, :24] for i, w in enumerate(module.weight))

    assert isinstance(block.mixer.canon_b, Canon) == ("b" in points)
    x = model.embed(tokens)
    x = x + block.mixer(canon(normed(x, block.norm1), "a", block.canon_a))
    h = canon(normed(x, block.norm2), "c", block.canon_c)
    gate, up = canon(h @ block.mlp.up.weight.T, "d", block.mlp.canon_d).chunk(2, dim=-1)
    inner = (F.silu(gate) * up) @ block.mlp.down.weight.T
    assert_same("MLP with Canon-D", block.mlp(h), inner)
    points = f"points {points!r}" if points else "no Canon"
    assert_same(f"block with {points}", block(model.embed(tokens)), x + inner)
    logits = normed(x + inner, model.norm) @ model.head.weight.T
    assert_same("logits", model(tokens)[0], logits)


@parametrize("kernel", (2, 4))
def test_eq_4_1_number_by_number(kernel):
    x, weight = torch.randn(2, 7, 3).double(), torch.randn(kernel, 3).double()
    want = x.clone()
    for b, t, channel, i in product(range(2), range(7), range(3), range(kernel)):
        if t - i >= 0:
            want[b, t, channel] += weight[i, channel] * x[b, t - i, channel]
    assert_same("canon_by_hand", canon_by_hand(x, weight), want)


@parametrize("kernel", (2, 3, 4, 8))
@parametrize("residual", (True, False))
@parametrize("silu", (True, False))
def test_a_canon_layer_streams(kernel, residual, silu):
    """By Eq. 4.1, one token after another; and in pieces of any length."""
    config = Config(1, 1, canon="a", canon_kernel=kernel, canon_residual=residual, canon_silu=silu)
    layer, x = Canon(6, config), torch.randn(2, 12, 6)
    w = layer.weight.detach()
    want = torch.zeros_like(x)
    for t in range(12):
        for i in range(min(kernel, t + 1)):
            want[:, t] += w[i] * x[:, t - i]
    if silu:
        want = F.silu(want)
    if residual:
        want = x + want
    assert_same("at once", layer(x), want)
    for lengths in ((1, 1, 5, 2, 3), (1,) * 12):
        assert_same(f"in pieces of {lengths}", streamed(layer, x, lengths)[0], want)


@parametrize("kernel", (2, 4))
def test_a_canon_layer_keeps_its_tail_only(kernel):
    layer = Canon(6, Config(1, 1, canon="a", canon_kernel=kernel))
    _, state = streamed(layer, torch.randn(2, 12, 6), (1, 11))
    bytes_kept = sum(u.untyped_storage().nbytes() for u in state.values())
    expected = 4 * 2 * (kernel - 1) * 6
    assert bytes_kept == expected, f"{bytes_kept} bytes are kept, expected {expected}: a view?"


def attention_number_by_number(canon, pos):
    """A layer, its input, and the means of values that it should return."""
    layer = Attention(Config(1, 9, n_head=2, d_model=16, canon=canon, pos=pos))
    x = torch.randn(3, 9, 16)
    q, k, v = layer.canon_b(layer.qkv(x)).view(3, 9, 3, 2, 8).unbind(2)
    if pos in ("rope", "rope4"):
        angles = rotary_angles(9, 8 if pos == "rope" else 2, 1e4)
        q, k = (rotate(u, angles.cos(), angles.sin()) for u in (q, k))
    logits = torch.einsum("bthk, bshk -> bhts", q, k) / 8**0.5
    if pos in ("alibi", "halibi"):
        logits = logits + layer.positions.bias(9, 9, "cpu")
    shares = (logits + torch.full((9, 9), -math.inf).triu(1)).softmax(-1)
    return layer, x, layer.out(torch.einsum("bhts, bshv -> bthv", shares, v).flatten(2))


@parametrize("canon", ("", "b"))
@parametrize("pos", POSITIONS)
def test_attention_is_a_mean_of_values(canon, pos):
    layer, x, want = attention_number_by_number(canon, pos)
    assert_same("attention at once", layer(x), want)


@parametrize("canon", ("", "b"))
@parametrize("pos", POSITIONS)
def test_attention_streams(canon, pos):
    layer, x, want = attention_number_by_number(canon, pos)
    for lengths in ((1, 4, 1, 3), (6, 3)):
        assert_same(f"attention in pieces of {lengths}", streamed(layer, x, lengths)[0], want)


@parametrize("pos", ("rope", "nope"))
def test_attention_keeps_keys_and_values_only(pos):
    """Views would keep queries alive, or all of the input."""
    layer = Attention(Config(1, 40, n_head=2, d_model=16, pos=pos))
    _, state = streamed(layer, torch.randn(3, 33, 16), (32, 1))
    for name, tensor in zip(("keys", "values"), state[layer], strict=True):
        assert tensor.shape == (3, 33, 2, 8), f"{name} have shape {tuple(tensor.shape)}"
    for T in (9, 1):  # one piece, which nothing was joined to
        _, state = streamed(layer, torch.randn(3, T, 16), (T,))
        for name, tensor in zip(("keys", "values"), state[layer], strict=True):
            kept, expected = tensor.untyped_storage().nbytes(), 4 * 3 * T * 16
            assert kept == expected, f"{name} keep {kept} bytes, expected {expected}: a view?"


class Window(Attention):
    window = 3


@parametrize("pos", ("nope", "alibi"))
def test_attention_with_a_window(pos):
    """Each head sees the three nearest tokens, itself included."""
    config = Config(1, 40, n_head=2, d_model=16, pos=pos)
    layer = Window(config)
    without_positions = Window(dataclasses.replace(config, pos="nope"))
    without_positions.load_state_dict(layer.state_dict())
    x = torch.randn(1, 9, 16)
    y = layer(x)
    assert torch.equal(y, without_positions(x)) == (pos == "nope")
    assert_same("a window in pieces", streamed(layer, x, (4, 1, 4))[0], y)
    changed = x.clone()
    changed[0, 2] += 1
    moved = (layer(changed) - y).abs().amax(-1)[0] > 0
    assert moved.tolist() == [False, False, True, True, True, False, False, False, False]


@parametrize("mlp", ("swiglu", "swiglu-relu2", "silu", "relu2"))
def test_mlp_variants(mlp):
    module, h = small_model(mlp=mlp).blocks[0].mlp, torch.randn(2, 3, 32)
    act = (lambda x: x.clamp(min=0) ** 2) if "relu2" in mlp else F.silu
    inner = h @ module.up.weight.T
    if "swiglu" in mlp:
        gate, up = inner.split(88, dim=-1)  # 8 * 32 / 3 = 85.3; 88 is the nearest multiple of 8
        inner = act(gate) * up
    else:
        assert inner.shape[-1] == 4 * 32
        inner = act(inner)
    assert_same(f"MLP, {mlp}", module(h), inner @ module.down.weight.T)


def test_initialisation():
    options = dict(vocab_size=500, block_size=8, n_layer=2, n_head=8, d_model=512)
    for module in CanonGPT(Config(**options, canon="abcd")).modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            n = module.weight.numel()
            assert abs(module.weight.mean()) < 5 * 0.02 / n**0.5
            assert abs(module.weight.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5
            assert module.weight.abs().max() > 0.06  # tails: not a uniform
    for kernel in (2, 3, 4):
        config = Config(vocab_size=5, block_size=8, canon="a", canon_kernel=kernel)
        weight, bound = Canon(20_000, config).weight, kernel**-0.5
        assert 0.999 * bound < weight.abs().max() <= bound
        assert abs(weight.var() / (bound**2 / 3) - 1) < 5 * (0.8 / weight.numel()) ** 0.5


def test_parameter_counts():
    def counts(**options):
        with torch.device("meta"):
            return CanonGPT(Config(vocab_size=100, block_size=8, **options)).parameter_counts()

    bare, tied, full = counts(), counts(tie_embeddings=True), counts(canon="abcd")
    assert bare["embeddings"] == 2 * 100 * 768 == 2 * tied["embeddings"] and bare["canon"] == 0
    assert bare["total"] - tied["total"] == 100 * 768
    assert full["total"] - bare["total"] == full["canon"] == 12 * 4 * (5 * 768 + 4096)


@parametrize("options", [{"canon_frozen": True}, {"tie_embeddings": True}, {"mixer": "gdn,mamba2"}])
def test_matrices_decay_and_frozen_canons_stay(options):
    model = small_model(canon="acd", **options)
    settings = train.Training(steps=1, batch_size=1, lr=0.1, weight_decay=0.5)
    decayed, rest = train.adamw(model, settings, "cpu").param_groups
    assert decayed["weight_decay"] == 0.5 and rest["weight_decay"] == 0
    names = {p: name for name, p in model.named_parameters()}
    spared = {p for p in names if re.search("norm|canon|conv|A_log|dt_bias|skip", names[p])}
    frozen = {p for p in spared if "canon_frozen" in options and "canon" in names[p]}
    assert {*decayed["params"]} == {*names} - spared and {*rest["params"]} == spared - frozen


@parametrize("dims", (8, 2))
def test_rotary_depends_on_the_distance_only(dims):
    angles, half = rotary_angles(64, dims, 1e4).double(), dims // 2
    speeds = 10000.0 ** (-torch.arange(half).double() / half)
    assert_close(angles, torch.arange(64)[:, None] * speeds, atol=1e-6, rtol=1e-6)
    q, k = torch.randn(2, 8).double()

    def rows(u):
        return rotate(u.expand(1, 64, 1, 8), angles.cos(), angles.sin())[0, :, 0]

    scores = rows(q) @ rows(k).T
    assert_same("q.k one step later", scores[1:, 1:], scores[:-1, :-1], atol=1e-4, rtol=0)
    # dims j and j + half are a pair, dims beyond 2 half pass
    pairs = torch.complex(q[:half], q[half:dims]) * torch.polar(torch.ones_like(angles), angles)
    want = torch.cat([pairs.real, pairs.imag, q[dims:].expand(64, -1)], dim=-1)
    assert_same("turned q, (position, dim)", rows(q), want)


@parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
def test_rotary_keeps_the_dtype(dtype):
    """The angles' cosines are float32; what is turned keeps its own dtype, rounded once."""
    angles = rotary_angles(9, 8, 1e4)
    x = torch.randn(2, 9, 3, 8).to(dtype)
    got = rotate(x, angles.cos(), angles.sin())
    want = rotate(x.float(), angles.cos(), angles.sin())
    assert_same("turned x", got, want.to(dtype), atol=1e-6, rtol=2**-7)


def test_alibi_by_hand():
    """Above the diagonal is the future, which attention hides."""
    x = -torch.inf
    alibi = ALiBi(Config(1, 9, n_head=2, d_model=8)).bias(3, 3, "cpu")  # slopes 2^-4 and 2^-8
    for head, slope in enumerate((1 / 16, 1 / 256)):
        want = torch.tensor([[0, 0, 0], [-slope, 0, 0], [-2 * slope, -slope, 0]])
        assert torch.equal(alibi[head].tril(), want)
    last_two = ALiBi(Config(1, 9, n_head=2, d_model=8)).bias(2, 3, "cpu")
    assert torch.equal(last_two, alibi[:, 1:])
    halibi = HALiBi(Config(1, 9, n_head=4, d_model=8)).bias(4, 4, "cpu")
    itself = [[0, 0, 0, 0], [x, 0, 0, 0], [x, x, 0, 0], [x, x, x, 0]]
    nearest_two = [[0, 0, 0, 0], [0, 0, 0, 0], [x, 0, 0, 0], [x, x, 0, 0]]
    every = [[0, 0, 0, 0]] * 4
    assert torch.equal(halibi, torch.tensor([itself, nearest_two, every, every]))


def test_loss_counts_the_masked_targets_in_nats():
    model, tokens, targets = small_model(), some_tokens(), some_tokens()
    mask = torch.rand(2, 24) < 0.3
    logits, loss = model(tokens, targets, mask)
    nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert_close(loss, nats[mask].mean())
    assert_close(model(tokens, targets)[1], nats.mean())
    assert model(tokens, targets, torch.zeros_like(mask))[1] == 0
    assert model(tokens)[1] is None


def test_generate():
    model, tokens = small_model(canon="abcd"), some_tokens(3, 5)
    greedy, slow = model.generate(tokens, 10, temperature=0), tokens
    for _ in range(10):
        slow = torch.cat([slow, model(slow)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy, slow)

    stop = int(greedy[0, 7])
    for rows in (greedy.tolist(), greedy[:1].tolist()):  # the last one alone ends early
        ends = [row.index(stop, 5) if stop in row[5:] else 15 for row in rows]
        want = [(row[:end] + [stop] * 10)[: max(ends) + 1][:15] for row, end in zip(rows, ends)]
        assert model.generate(tokens[: len(rows)], 10, 0, stop).tolist() == want

    seeds = (torch.Generator().manual_seed(seed) for seed in (0, 0, 1))
    first, again, other = (model.generate(tokens, 10, generator=g) for g in seeds)
    assert torch.equal(first, again) and not torch.equal(first, other)
    for temperature in (1.0, 2.0):
        generator = torch.Generator().manual_seed(0)
        many = model.generate(tokens[:1].expand(9000, 5), 1, temperature, generator=generator)[:, 5]
        chances = (model(tokens[:1])[0][0, -1] / temperature).softmax(-1)
        assert drawn_as(many.tolist(), dict(enumerate(chances.tolist())))


def test_nothing_is_longer_than_block_size():
    model, tokens, state = small_model(), some_tokens(3, 5), {}
    model(some_tokens(1, 24), state=state)
    assert model.generate(tokens, 20).shape == (3, 25)  # the last token is never fed
    for call in (lambda: model(some_tokens(1, 1), state=state), lambda: model(some_tokens(1, 25)),
                 lambda: model.generate(tokens, 21)):  # fmt: skip
        with pytest.raises(ValueError, match="block_size"):
            call()


COMPILED = [dict(pos="rope4"), dict(pos="halibi", canon="abcd"), dict(canon="ab", mlp="none")]
COMPILED += [dict(pos="nope", canon="abcd", mlp="relu2", canon_silu=True, canon_frozen=True)]
COMPILED += [dict(mixer="gla,mamba2,gdn,attention", n_layer=4, canon=canon, short_conv=bool(canon))
             for canon in ("", "acd")]  # fmt: skip
# code that PyTorch 2.6 derives for the last two runs only through its code generator
DERIVED = "aot_eager_decomp_partition" if torch.__version__ >= (2, 7) else "eager"
COMPILED = [(options, DERIVED) for options in COMPILED]
COMPILED += [pytest.param(dict(canon="abcd"), "inductor", marks=needs_compiler)]


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


@parametrize("mixer", ("attention", *LINEAR))
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
BAD_CONFIGS = [
    dict(mixer="gdn,mamba"),
    dict(mixer=""),
    dict(mixer="gdn,gdn,attention"),
    dict(pos="rotary"),
    dict(pos="alibi", mixer="gla"),
    dict(mlp="gelu"),
    dict(canon="abe"),
    dict(canon="aa"),
    dict(canon="abc", mlp="none"),
    dict(canon_frozen=True),
    dict(canon_kernel=3),
    dict(canon_type="mine", canon="a"),
    dict(canon_kernel=1, canon="a"),
    dict(canon_kernel=9, canon="a"),
    dict(short_conv=True),
    dict(n_layer=0),
    dict(n_head=-4),
    dict(vocab_size=0),
    dict(block_size=0),
    dict(block_size=10**10),
    dict(d_model=2**20 + 4),
    dict(d_model=20),
    dict(d_model=16, pos="rope4"),
    dict(d_model=36, mixer="gla"),
    dict(d_model=36, mixer="mamba2"),
    dict(d_model=36, mixer="gdn"),
]


@parametrize("bad", BAD_CONFIGS, ids=str)
def test_config_names_field_and_value(bad):
    field, value = next(iter(bad.items()))
    settings = dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | bad
    with pytest.raises(ValueError, match=f"^{field} = {value!r}: "):
        Config(**settings)


# ---- 2. canon_gpt.py: Part II ----------------------------------------------


KINDS = ("gla", "mamba2", "gdn", "gdn per channel")  # the last is no mixer's, but allowed


def recurrence_inputs(kind, B, T, H, K, V, strongest=1.0, dtype=torch.float64):
    """[q, k, v, log_decay, beta], log decays down to -strongest per step, half of them near 0."""
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
    """The outputs, and the inputs' gradients of the outputs times these weights."""
    outputs, inputs = form(*inputs), [u for u in inputs if u is not None]
    weighted = [(o * weight).sum() for o, weight in zip(outputs, weights)]
    return *outputs, *torch.autograd.grad(sum(weighted), inputs)


def named_results(inputs):
    """What with_gradients returns."""
    names = ("q", "k", "v", "log_decay", "beta", "state")
    given = [name for name, u in zip(names, inputs) if u is not None]
    return ["o", "the last state"] + [f"gradient of {name}" for name in given]


@parametrize("kind", KINDS)
def test_recurrence_is_the_formula(kind):
    """S_t = (I - b k k^T) D S_{t-1} + w k v^T and o_t = S_t^T q_t, with matrices per head."""
    B, T, H, K, V = 2, 5, 3, 4, 2
    q, k, v, g, beta = recurrence_inputs(kind, B, T, H, K, V)
    start = torch.randn(B, H, K, V).double()
    o, final = linear_recurrence(q, k, v, g, beta, start)
    decay = g.reshape(B, T, H, -1).expand(B, T, H, K).exp()
    for b, h in product(range(B), range(H)):
        S = start[b, h]
        for t in range(T):
            key, query = (u[b, t, h % u.shape[2]] for u in (k, q))
            erase, w = (0, 1) if beta is None else (beta[b, t, h], beta[b, t, h])
            kept = (torch.eye(K) - erase * key.outer(key)) @ decay[b, t, h].diag() @ S
            S = kept + w * key.outer(v[b, t, h])
            assert_same(f"o at batch {b}, step {t}, head {h}", o[b, t, h], S.T @ query)
        assert_same(f"the last state of batch {b}, head {h}", final[b, h], S)


def test_recurrence_in_bfloat16_keeps_its_state_in_float32():
    inputs = recurrence_inputs("gdn", 2, 5, 3, 4, 2, dtype=torch.bfloat16)
    o, state = linear_recurrence(*inputs)
    assert o.dtype == torch.bfloat16, f"o is {o.dtype}, expected v's torch.bfloat16"
    assert state.dtype == torch.float32, f"the state is {state.dtype}, expected torch.float32"
    want, _ = linear_recurrence(*each(torch.Tensor.float, inputs))
    assert_close(o, want.bfloat16())


@parametrize("kind", KINDS)
@parametrize("case", range(12))
def test_chunked_equals_the_recurrence(kind, case):
    rng = default_rng([case, KINDS.index(kind)])
    B, T, H, K, V = (int(rng.integers(1, most)) for most in (4, 80, 4, 10, 10))
    T, chunk = (69, 1) if case == 1 else (T, int(rng.integers(1, 70)))
    inputs = recurrence_inputs(kind, B, T, H, K, V, strongest=float(rng.choice([0.01, 1, 30])))
    inputs.append(torch.randn(B, H, K, V).double() if case % 2 else None)
    inputs = each(torch.Tensor.requires_grad_, inputs)
    weights = torch.randn(B, T, H, V).double(), torch.randn(B, H, K, V).double()
    want = with_gradients(linear_recurrence, inputs, *weights)
    chunked = partial(chunked_linear_attention, chunk=chunk)
    got = with_gradients(chunked, inputs, *weights)
    for name, a, b in zip(named_results(inputs), got, want):
        assert_same(f"{name}, chunks of {chunk} of {T}", a, b, atol=1e-10, rtol=1e-10)


@parametrize("kind", KINDS)
@parametrize("strongest", (1e-6, 1, 30, 1000))
@parametrize("dtype", (torch.float32, torch.bfloat16))
def test_chunked_is_stable_for_any_decay(kind, strongest, dtype):
    """From hardly any decay to forgetting at once; in bfloat16 within ten of its roundings."""
    inputs = recurrence_inputs(kind, 2, 150, 2, 16, 8, strongest)
    q, k, v, *rest = each(lambda u: u.float().to(DEVICE), inputs)
    low = each(torch.Tensor.requires_grad_, [q.to(dtype), k.to(dtype), v.to(dtype), *rest])
    exact = each(lambda u: u.detach().double().requires_grad_(), low)
    dy = torch.randn(2, 150, 2, 8, device=DEVICE).double()
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16)
    got = with_gradients(autocast(chunked_linear_attention), low, dy)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    allowed = 1e-5 if dtype == torch.float32 else 10 * 2**-9
    want = with_gradients(linear_recurrence, exact, dy)
    for name, a, b in zip(named_results(low), got, want):
        error = relative_error(a.double(), b.double())
        assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.1e}"


def test_chunked_saves_memory_linear_in_time():
    def kept(kind, T):
        inputs = each(torch.Tensor.requires_grad_, recurrence_inputs(kind, 1, T, 2, 8, 8))
        seen = {}

        def note(u):
            seen[u.untyped_storage().data_ptr()] = u.untyped_storage().nbytes()
            return u

        with torch.autograd.graph.saved_tensors_hooks(note, lambda u: u):
            alive = chunked_linear_attention(*inputs, chunk=16)
        assert alive[0].requires_grad
        return sum(seen.values())

    for kind in KINDS:
        assert kept(kind, 2048) < 1.2 * 4 * kept(kind, 512)


@parametrize("kind", KINDS)
def test_chunked_takes_few_operations_and_no_cube(kind):
    """The loop takes several operations a token. A table of C x C x K products would be large."""
    T, K, chunk = 512, 64, 64
    inputs = recurrence_inputs(kind, 1, T, 1, K, 8)
    with Operations() as chunked:
        chunked_linear_attention(*inputs, chunk=chunk)
    count, largest = len(chunked.sizes), max(chunked.sizes)
    assert count < 2 * T, f"{count} operations for {T} tokens"
    allowed = 2 * T * max(K, chunk)  # a cube: T * chunk * K
    assert largest <= allowed, f"a tensor of {largest} numbers, allowed {allowed}"


@parametrize("kind", KINDS)
def test_a_stream_under_autocast_keeps_its_state_in_float32(kind):
    """300 tokens, hardly any decay: a state rounded to bfloat16 at each would be off by over 1%."""
    inputs = recurrence_inputs(kind, 2, 300, 2, 16, 8, 1e-3)
    inputs = each(lambda u: u.float().to(DEVICE), inputs)
    want, want_state = linear_recurrence(*each(torch.Tensor.double, inputs))
    state, pieces = None, []
    with torch.autocast(DEVICE, torch.bfloat16):
        for t in range(300):
            token = each(lambda u: u[:, t : t + 1], inputs)
            o, state = chunked_linear_attention(*token, state=state)
            pieces.append(o)
    assert relative_error(torch.cat(pieces, dim=1), want) < 1e-2
    assert relative_error(state, want_state) < 1e-2


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


def test_own_mixers_must_have_a_place_for_canon_b():
    with patch.dict(MIXERS, own=lambda config: torch.nn.Identity()):
        with pytest.raises(ValueError, match="no Canon-B"):
            Block(Config(9, 9, canon="b"), "own")


def mixer_at(mixer, **options):
    return Block(Config(vocab_size=9, block_size=9, mixer=mixer, **options), mixer).mixer


def test_short_convolutions_as_their_authors_have_them():
    for mixer in LINEAR:
        default = mixer != "gla"
        for canon in ("", "acd"):
            assert (mixer_at(mixer, canon=canon).conv is not None) == default
        for options in (dict(canon="b"), dict(short_conv=False)):
            assert mixer_at(mixer, **options).conv is None
        own = mixer_at(mixer, canon="b", short_conv=True).conv
        assert len(own.weight) == 4 and not isinstance(own, Canon)
        if mixer == "mamba2":  # Conv1d's default, and a bias
            assert 0.499 < own.weight.abs().max() <= 0.5
            assert 0.49 < own.bias.abs().max() <= 0.5
        else:
            assert own.bias is None and own.weight.abs().max() > 0.06
            assert abs(own.weight.std() / 0.02 - 1) < 0.05


@parametrize(
    "mixer, d2, point_b", (("attention", 4, 3), ("gla", 4, 2), ("mamba2", 6, 4), ("gdn", 6, 3))
)
@parametrize("D", (512, 768))
@parametrize("mlp", ("swiglu", "silu"))
def test_parameter_counts_of_a_block(mixer, d2, point_b, D, mlp):
    """Mixer and MLP share 12 d^2; beside matrices there are only gates, norms and convolutions."""
    with torch.device("meta"):
        options = dict(n_head=8, d_model=D, mixer=mixer, mlp=mlp, canon="abcd")
        block = Block(Config(vocab_size=9, block_size=9, **options), mixer)
    count = lambda module: sum(p.numel() for p in module.parameters())
    H = D // 128
    extra = {"attention": 0, "gla": 16 * D * 1.5 + D // 2 + D // 4,
             "mamba2": (2 * 64 + 16) * D + 2 * D + 3 * 16,
             "gdn": 2 * H * D + 2 * H + 3 * D // (2 * H)}  # fmt: skip
    width_b = point_b * D + (144 if mixer == "mamba2" else 0)
    assert count(block.mixer) == d2 * D**2 + extra[mixer] + 4 * width_b
    assert abs((count(block.mlp) - count(block.mlp.canon_d)) / ((12 - d2) * D**2) - 1) < 0.005


def test_gates_start_as_their_authors_have_them():
    mamba = mixer_at("mamba2")
    assert_close(mamba.A_log.exp(), torch.arange(1.0, 17))
    assert (mamba.skip == 1).all() and mamba.dt_bias.shape == (16,)
    draws = F.softplus(canon_gpt.initial_dt_bias(20_000))
    assert 0.001 <= draws.min() < 0.00101 and 0.099 < draws.max() <= 0.1001
    assert abs(draws.log().mean() - math.log(0.01)) < 0.05  # log-uniform
    A = torch.cat([mixer_at("gdn").A_log.exp() for _ in range(20)])
    assert A.numel() == 120 and 0 <= A.min() and 14 < A.max() <= 16 and abs(A.mean() - 8) < 2
    low, high = CanonGPT(Config(9, 9, n_layer=1, mixer="gla")).blocks[0].mixer.decay
    assert low.bias is None and (high.bias == 0).all() and high.weight.shape == (384, 16)


def test_linear_mixers_stream_in_constant_memory():
    def kept(state):
        tensors = [u for v in state.values() for u in (v if isinstance(v, tuple) else (v,))]
        return sum(u.untyped_storage().nbytes() for u in tensors if torch.is_tensor(u))

    for mixer in (*LINEAR, "gdn,attention"):
        model, state, sizes = small_model(mixer=mixer, canon="acd", block_size=400), {}, []
        for T in (300, 1, 1, 5):
            model(some_tokens(1, T), state=state)
            sizes.append(kept(state))
        grows = 4 * 2 * 32 if "attention" in mixer else 0  # a key and a value of 32 floats
        assert [b - a for a, b in zip(sizes, sizes[1:])] == [grows, grows, 5 * grows]


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


# ---- 4. train.py, sample.py ------------------------------------------------

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


def same_weights(one, other):
    a, b = checkpoint(one)["model"], checkpoint(other)["model"]
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plot.plt.close("all")


@pytest.fixture
def refused(here, capsys):
    """Checks that a program ends with one line and status 2, and leaves all files alone."""

    def contents():
        return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}

    def check(command, *words, main=train.main):
        before = contents()
        capsys.readouterr()
        with pytest.raises(SystemExit, match="^2$"):
            main(command)
        output = capsys.readouterr()
        assert re.fullmatch(r"\w+\.py: .+\n", output.err)
        assert not output.out and contents() == before
        for word in words:
            assert word in output.err

    return check


@contextlib.contextmanager
def interruption(step, error=None):
    """SIGTERM arrives, or an error, while the batch of this step is made."""
    make = train.Batches.__getitem__

    def watched(batches, number):
        if number == step - 1:
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
    about = "run preset date device processes compiled python torch numpy chance units parameters"
    assert set(about.split()) <= set(config) and config["model"]["canon"] == "abcd"
    assert shlex.split(config["command"])[2:] == words
    assert [line["step"] for line in log] == [20, 30, 40, 50, 50]
    assert [line["step"] for line in log if "eval" in line] == [30, 50, 50]
    settings, task, _ = train.settings_of(words)
    for line in log[:-1]:
        assert line["lr"] == train.learning_rate(line["step"], 1e-12, settings)
        assert line["tokens"] == line["step"] * 8 * 20
    last = log[-1]
    assert last["final"] is True and last["seconds"] > last["scoring_seconds"] >= 0
    for words in ("copy: N 8", "1 layer of attention", "Canon-ABCD", "50 steps of 8", "✗"):
        assert words in done.stdout

    torch.manual_seed(5)
    model = CanonGPT(Config(**config["model"]))
    for name, weight in model.named_parameters():
        assert torch.allclose(saved["model"][name], weight)
    tokens, mask = map(torch.from_numpy, task.batch(5, 19, 8))
    loss = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()
    assert log[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert last["eval"] == task.evaluate(model, 5, 16)


# -- Settings


def test_a_flag_counts_before_the_preset_and_the_preset_before_the_default():
    settings, task, config = train.settings_of("--task depo --preset small --N 9 --d-model 48".split())
    assert (task.name, task.N, task.K, task.block_size) == ("depo1", 9, 4, 112)
    assert (config.d_model, config.n_layer, config.mlp) == (48, 6, "swiglu")
    assert (settings.lr, settings.weight_decay, settings.eval_every) == (1e-3, 0.03, 2000)
    assert train.settings_of("--task copy --preset nano --steps 60".split())[0].eval_every == 20
    settings, task, _ = train.settings_of("--task capo --preset nano --exposures 3".split())
    assert settings.steps == task.steps(settings.batch_size)


def test_a_config_repeats_its_run(here):
    train.main(tiny("--steps 25 --canon ac --seed 3", "first"))
    again = "--config first/config.json --out second --device cpu --no-compile".split()
    train.main(again)
    assert checkpoint("first")["recipe"] == checkpoint("second")["recipe"]
    assert same_weights("first", "second")
    settings, _, config = train.settings_of([*again, "--lr", "0.5"])
    assert (settings.lr, settings.seed, config.canon) == (0.5, 3, "ac")


BAD_FLAGS = [  # the flags, and what the line names
    ("--task sort", "task = 'sort'"),
    ("--preset huge", "preset = 'huge'"),
    ("--mixer conv", "mixer = 'conv'"),
    ("--steps 0", "steps = 0"),
    ("--steps many", "--steps"),
    ("--lr nan", "lr = nan"),
    ("--betas 0.9 1", "betas"),
    ("--seed -1", "seed = -1"),
    ("--grad-accum 3", "a multiple of 3"),
    ("--schedule step", "schedule = 'step'"),
    ("--device abacus", "device = 'abacus'"),
    ("--cannon abcd", "is it --canon?"),
    ("--dtype float16", "dtype = 'float16'"),
    ("--mixer gla --pos rope", "pos = 'rope'"),
    ("--n-head 3", "d_model = 16"),
    ("--block-size 9", "block_size = 9"),
    ("--K 5", "K = 5"),
    ("--task capo --exposures 3", "steps = 5"),
    ("--resume", "no checkpoint"),
    ("--config notes.txt", "config = 'notes.txt'"),
    ("--config notes.txt --mixer gla", "mixer = 'gla'"),
]


@parametrize("flags, words", BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_written(flags, words, refused):
    Path("notes.txt").write_text("mine")
    usual = tiny("--steps 5")
    if "--config" in flags or "--task" in flags:
        usual = ["--out", "run", "--preset", "nano", "--steps", "5"]
    if "--config" in flags:
        usual = ["--out", "run"]
    refused([*usual, *flags.split()], words)


def test_run_names_tell_runs_apart():
    def name(flags):
        settings, _, _ = train.settings_of(flags.split())
        return str(settings.out)

    usual = "--task depo --preset nano --canon acd"
    assert name(usual) == name(f"{usual} --resume --workers 2") == "out/depo1_nano_rope_acd_s0"
    flags = "--lr 3e-3 --word-len 1 2 --canon-frozen --no-canon-residual --seed 4"
    long = "word-len=1-2_no-canon-residual_canon-frozen_lr=0.003_s4"
    assert name(f"{usual} {flags}") == f"out/depo1_nano_rope_acd_{long}"
    assert name("--task copy --preset nano --mixer gdn") == "out/copy_nano_gdn_bare_s0"
    hybrid = name("--task mano --preset nano --mixer gdn,attention")
    assert hybrid == "out/mano_nano_gdn-attention_rope_bare_s0"


# -- A step


@parametrize("share", (1e-3, 1e3))
def test_a_step_clips_gradients(share, monkeypatch):
    config = Config(vocab_size=19, block_size=24, n_layer=1, n_head=2, d_model=16)
    model, kept = CanonGPT(config), []

    def step():
        squares = [p.grad.square().sum() for p in model.parameters()]
        kept.append(torch.stack(squares).sum().sqrt().item())

    settings = SimpleNamespace(**train.DEFAULTS | {"device": "cpu", "grad_accum": 3})
    optimizer = train.adamw(model, settings)
    monkeypatch.setattr(optimizer, "step", step)
    tokens, mask = torch.randint(0, 19, (6, 25)), torch.ones(6, 25, dtype=torch.bool)
    batch = tokens, mask, torch.tensor(2 * 24 / share)  # so that each of three parts has this share
    for settings.clip, most in ((1.0, 1.0), (0.5, 0.5), (0, math.inf)):
        _, norm = train.train_step(model, optimizer, batch, settings, nullcontext())
        assert (norm > 1) == (share > 1)
        assert kept.pop() == pytest.approx(min(most, norm.item()), rel=1e-3)


@parametrize("name", ("depo", "mano"))
def test_parts_of_a_batch_add_up_to_its_loss(name, monkeypatch):
    """Micro-batches, and the rows of several processes."""
    task = make_task(name)
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=2, d_model=16)
    model = CanonGPT(config).double()
    no_optimizer = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    batch = task.batch(5, 7, 12)
    tokens, mask = map(torch.from_numpy, batch)
    _, whole = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])
    for world, parts in product((1, 2, 3), (1, 2)):
        monkeypatch.setattr(train, "WORLD", world)
        settings = SimpleNamespace(clip=0, grad_accum=parts)
        mean, rows = 0, []  # of the processes
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            batch_of_rank = train.Batches(task, 5, 12)[7]
            part, _ = train.train_step(model, no_optimizer, batch_of_rank, settings, nullcontext())
            mean += part.item() / world
            rows += batch_of_rank[0].tolist()
        assert sorted(rows) == sorted(batch[0].tolist())
        assert mean == pytest.approx(whole.item(), rel=1e-6)


def test_learning_rate_schedule():
    settings = SimpleNamespace(steps=110, warmup=10, schedule="cosine")
    rates = [train.learning_rate(step, 2.0, settings) for step in (1, 5, 10, 11, 61, 111)]
    assert rates == pytest.approx([0.2, 1, 2, 2, 1.1, 0.2])
    settings = SimpleNamespace(steps=110, warmup=0, schedule="linear")
    assert [train.learning_rate(step, 2.0, settings) for step in (1, 56, 111)] == [2, 1, 0]


def test_what_decays():
    """The matrices of Linear and Embedding layers, each once; no norm, no bias, no Canon layer."""
    config = Config(vocab_size=9, block_size=8, n_layer=1, d_model=16, mixer="gla", canon="abcd")
    model = CanonGPT(config)
    decayed, others = train.weight_groups(model, SimpleNamespace(weight_decay=0.1))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = [names[id(weight)] for weight in decayed["params"]]
    assert all(name.endswith("weight") and "canon" not in name for name in found)
    assert "embed.weight" in found and not any("norm" in name for name in found)
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert {p.dim() for p in decayed["params"]} == {2}


@parametrize("dtype", ("float32", "bfloat16"))
def test_training_and_scoring_use_the_chosen_dtype(dtype, here, monkeypatch):
    seen, attend = set(), F.scaled_dot_product_attention

    def watched(query, *rest, **named):
        seen.add((torch.is_grad_enabled(), query.dtype))
        return attend(query, *rest, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    train.main(tiny(f"--steps 2 --dtype {dtype} --pos nope"))
    chosen = getattr(torch, dtype)
    assert (True, chosen) in seen and (False, chosen) in seen
    assert all(weight.dtype == torch.float32 for weight in checkpoint("run")["model"].values())


def test_workers_and_compile_change_nothing(here, monkeypatch):
    compiled, real = [], torch.compile

    def watched(model, mode="default"):
        compiled.append(mode)
        return real(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", watched)
    train.main(tiny("--steps 20 --canon abcd", "plain"))
    train.main(tiny("--steps 20 --canon abcd --workers 2 --compile", "fancy"))
    a, b = ([line["loss"] for line in logged(out)[:-1]] for out in ("plain", "fancy"))
    assert len(compiled) == 2 and a == pytest.approx(b, abs=1e-3)  # a first try, and the model


def test_a_compiler_that_fails_is_known_before_training(refused, monkeypatch):
    def no_compiler(model, mode="default"):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)
    refused(tiny("--steps 2 --compile"), "no C++ compiler")
    monkeypatch.setattr(train, "WORTH_COMPILING", 1)
    flags = tiny("--steps 2")
    flags.remove("--no-compile")
    train.main(flags)
    assert json.loads(Path("run/config.json").read_text())["compiled"] is False


# -- What a run promises


@parametrize("error", (None, KeyError("power failure")))
def test_resume_goes_on_as_if_never_stopped(error, here):
    """After a signal in step 48, or a crash there: same weights, same lines in the log."""

    def steady(out):
        return [[line.get(x) for x in ("step", "tokens", "loss", "eval")] for line in logged(out)]

    flags = "--steps 60 --eval-every 20"
    train.main(tiny(flags, "whole"))
    with interruption(48, error), pytest.raises(type(error) if error else SystemExit):
        train.main(tiny(flags))
    saved = checkpoint("run")
    assert saved["step"] == (40 if error else 48)
    torch.save({**saved, "seconds": 1000.0}, "run/ckpt.pt")
    Path("run/metrics.jsonl").write_text('{"step": 41, "lo')
    for _ in range(2):  # the second time there is nothing left to do
        train.main(tiny(flags + " --resume"))
        assert steady("run") == steady("whole") and logged("run")[-1]["seconds"] >= 1000
    assert same_weights("run", "whole")


class DropsOut(Canon):
    def forward(self, x, state=None):
        return F.dropout(super().forward(x, state), 0.1, self.training)


@patch.dict(canon_gpt.CANONS, own=DropsOut)
def test_random_layers_resume_too(here):
    flags = "--steps 30 --eval-every 10 --canon ac --canon-type own"
    train.main(tiny(flags, "whole"))
    with interruption(25), pytest.raises(SystemExit, match="143"):
        train.main(tiny(flags))
    train.main(tiny(flags + " --resume"))
    assert same_weights("run", "whole")


def test_a_run_that_is_there_is_kept(refused):
    with interruption(15, KeyError()), pytest.raises(KeyError):
        train.main(tiny("--steps 20 --eval-every 20"))
    train.main(tiny("--steps 20 --eval-every 20"))  # it had no checkpoint yet
    refused(tiny("--steps 20"), "--resume")
    refused(tiny("--steps 20 --lr 0.5 --resume"), "was begun with lr = 0.01")
    saved = checkpoint("run")
    del saved["recipe"]["training"]["clip"]  # an option that came later
    torch.save(saved, "run/ckpt.pt")
    train.main(tiny("--steps 20 --eval-every 20 --resume"))
    refused(tiny("--steps 20 --clip 2 --resume"), "clip = 1.0")
    Path("run/ckpt.pt").write_bytes(Path("run/ckpt.pt").read_bytes()[:999])
    with pytest.raises(SystemExit, match="2"):
        train.main(tiny("--steps 20 --resume"))


@parametrize("what", ("loss", "gradient"))
def test_what_is_not_finite_ends_the_run(what, here, monkeypatch, capsys):
    real = train.train_step

    def broken(*arguments):
        loss, norm = real(*arguments)
        return (loss * math.nan, norm) if what == "loss" else (loss, norm * math.inf)

    train.main(tiny("--steps 20 --eval-every 20", "whole"))
    with interruption(40, KeyError()), pytest.raises(KeyError):
        train.main(tiny("--steps 60 --eval-every 20"))
    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(SystemExit, match="^1$"):
        train.main(tiny("--steps 60 --eval-every 20 --resume"))
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"step 40: {what} = " in line and checkpoint("run")["step"] == 20


class LooksAhead(Canon):
    def forward(self, x, state=None):
        return x + x.roll(-1, dims=1)


class LooksAheadOnceTrained(Canon):
    def __init__(self, width, config):
        super().__init__(width, config)
        self.ahead = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x, state=None):
        return x + self.ahead * x.roll(-1, dims=1)


class ForgetsItsStream(Canon):
    def forward(self, x, state=None):
        return super().forward(x)


class DoesNotStream(ForgetsItsStream):
    streams = False


@parametrize("point", "abcd")
@parametrize("layer, words", [
    (LooksAhead, "looks ahead"),
    (LooksAheadOnceTrained, "looks ahead"),
    (ForgetsItsStream, "streams = False"),
])  # fmt: skip
def test_a_layer_with_a_fault_is_refused(layer, words, point, refused):
    with patch.dict(canon_gpt.CANONS, own=layer):
        refused(tiny(f"--steps 2 --canon {point} --canon-type own"), "canon_type own", words)


@patch.dict(canon_gpt.CANONS, own=DoesNotStream)
def test_a_layer_may_say_that_it_does_not_stream(here):
    train.main(tiny("--steps 2 --canon ab --canon-type own"))


# -- Processes

posix = pytest.mark.skipif(os.name == "nt", reason="no POSIX signals")
ENDLESS = "--steps 1000000 --eval-every 20"


def heed_ctrl_c():
    """A shell starts programs in the background so that they ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def in_the_background(*command):
    """A process, once its training has saved a checkpoint. Neither it nor its children outlive the
    block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    try:
        while not list(Path().rglob("ckpt.pt")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()  # torchrun ends its processes, which are not of this group
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):  # usually all have ended
            os.killpg(process.pid, signal.SIGKILL)


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def are_gone(processes):
    for _ in range(200):
        if not any(Path(f"/proc/{pid}").exists() for pid in processes):
            return True
        time.sleep(0.1)
    return False


@posix
@parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
def test_a_signal_to_all_processes_saves_and_leaves_none(number, here):
    with in_the_background(HERE / "train.py", *tiny(ENDLESS + " --workers 2")) as process:
        workers = children(process.pid)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=120)[1]
    assert len(workers) == 2 and are_gone(workers)
    if number == signal.SIGKILL:
        assert process.returncode == -number and checkpoint("run")["step"] % 20 == 0
    else:
        assert process.returncode == 128 + number
        assert f"step {checkpoint('run')['step']}; repeat" in said.splitlines()[-1]


@posix
def test_a_worker_that_is_killed_ends_its_run(here):
    with in_the_background(HERE / "train.py", *tiny(ENDLESS + " --workers 2")) as process:
        one, other = children(process.pid)
        os.kill(one, signal.SIGKILL)
        assert "Traceback" in process.communicate(timeout=120)[1]
    assert process.returncode == 1 and are_gone([other])


BUGGY = """
import train
from tasks import TASKS, Copy

class Buggy(Copy):
    def batch(self, seed, step, batch_size):
        if step == 30:
            raise KeyError("a bug in the generator")
        return super().batch(seed, step, batch_size)

TASKS["copy"] = Buggy
train.main()
"""


def test_a_bug_in_a_worker_ends_the_run_with_its_traceback(here):
    Path("buggy.py").write_text(BUGGY)
    command = [sys.executable, "buggy.py", *tiny("--steps 60 --workers 2")]
    path = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, env=path, timeout=120)
    assert done.returncode == 1 and "KeyError: 'a bug in the generator'" in done.stderr


@posix
def test_only_a_second_signal_kills():
    def second(world):
        with patch.object(train, "WORLD", world), train.noted_signals() as noted:
            signal.raise_signal(signal.SIGTERM)
            assert noted == [signal.SIGTERM]
            return signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    assert second(world=1) == signal.SIG_DFL and callable(second(world=2))
    assert signal.getsignal(signal.SIGINT) == before


def test_a_thread_trains(here):
    thread = threading.Thread(target=train.main, args=[tiny("--steps 2")])
    thread.start()
    thread.join()
    assert logged("run")[-1]["final"]


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
        with interruption(steps + 20), pytest.raises(SystemExit):
            train.main([*flags, *words])
    losses = []
    for out in ("run", "one"):
        losses.append({line["step"]: line["loss"] for line in logged(out)})
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert list(losses[0]) == list(range(20, steps + 21, 20))


# -- Every task is learnt a little, after a stop in its first step

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
    with interruption(1), pytest.raises(SystemExit, match="143"):
        train.main(words)
    train.main([*words, "--resume"])
    assert least <= logged("run")[-1]["eval"][score] <= most


# -- sample.py


def test_a_trained_model_is_loaded_and_answers(refused, capsys):
    """Sixty steps of one layer on eight numbers: hardly right, but the answers are its own."""
    train.main(tiny("--steps 60 --canon abcd --lr 0.02"))
    task, model = sample.load_model("run")
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

    sample.main(["run", "--prompt", "<bos> 3 1 2"])
    text = capsys.readouterr().out
    assert text.startswith("<bos> 3 1 2 [") and len(text.split()) == 21
    refused(["run", "--prompt", "<bos> nine"], "nine", main=sample.main)
    refused(["run", "--prompt", "1 " * 21], "1 to 20", main=sample.main)
    refused(["nowhere"], "nowhere", main=sample.main)


def test_the_instance_shown_has_full_size():
    task = make_task("depo0")
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=2, d_model=16)
    text = sample.answered(task, CanonGPT(config).eval(), seed=0)
    assert text.count(",") == task.N


def test_a_terminal_without_check_marks_shows_the_rest(here):
    train.main(tiny("--steps 2"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, HERE / "sample.py", "run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "<query> [" in done.stdout, done.stderr


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
