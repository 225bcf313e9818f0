"""The tests:   python -m pytest

By file, from the inside out. Fast code is compared with slow code that is obviously right, written
here from the definitions; properties are tried on random shapes.
"""

# ruff: noqa: E402, E731

import contextlib
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import chain, combinations, permutations, product, takewhile
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from torch.testing import assert_close

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "results"), str(HERE / "assignment")]

import canon_gpt
import grade
import kernels
import make
import plot
import reproduce
import tasks
import train
from canon_gpt import (
    CANONS, GLA, MIXERS, MLPS, POSITIONS, Attention, Block, Canon, CanonGPT, Config, Mamba2,
    chunked_linear_attention, distance_bias, heads, linear_recurrence, rotary_angles, rotate,
)  # fmt: skip
from kernels import causal_conv_reference, relative_error, value_and_gradients
from tasks import make_task

parametrize = pytest.mark.parametrize
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
needs_compiler = pytest.mark.skipif(not (CUDA or train.can_compile_on_cpu()), reason="no compiler")


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


# ---- 1. kernels.py ---------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 1, 5), (1, 2, 64), (2, 9, 7), (2, 13, 130), (1, 70, 9), (2, 4, 300)]
SHAPES += [tuple(map(int, default_rng(i).integers(1, (4, 40, 150)))) for i in range(4)]
BOTH = ["causal_conv_pytorch", pytest.param("causal_conv_triton", marks=needs_triton)]
ALL = ["causal_conv_reference", "causal_conv", *BOTH]


def conv_inputs(B, T, D, kernel=4, dtype=torch.float32):
    """x and dy (B, T, D), slices of wider tensors as after a projection, and a weight."""
    x = torch.randn(B, T, 2 * D + 1, dtype=dtype, device=DEVICE)[..., D : 2 * D]
    weight = (torch.rand(kernel, D, device=DEVICE) * 2 - 1) * kernel**-0.5
    return x, weight, torch.randn(B, T, D + 3, dtype=dtype, device=DEVICE)[..., :D]


def conv_exact(x, weight, dy, residual=True):
    inputs = (u.double() for u in (x, weight, dy))
    return value_and_gradients(causal_conv_reference, *inputs, residual)


def test_convolution_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[2.0], [3.0]])  # 2 h_t + 3 h_{t-1}
    z = torch.tensor([[[2.0], [23.0], [230.0]]])
    assert torch.equal(causal_conv_reference(x, weight, residual=False), z)
    assert torch.equal(causal_conv_reference(x, weight), x + z)
    tail = torch.tensor([[[5.0]]])
    assert causal_conv_reference(x, weight, False, tail)[0, 0, 0] == 2 + 3 * 5


@parametrize("name", BOTH)
@parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@parametrize("shape", SHAPES, ids=str)
def test_convolution_equals_the_definition_in_float64(name, dtype, shape):
    """Values and both gradients. Sums are float32, so what is left is one rounding to dtype: half a
    unit in the last place on hardware, a whole one in Triton's interpreter, which truncates."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    small = math.prod(shape) < 1000 and dtype == torch.float32
    for kernel in (1, 2, 3, 4, 5, 8) if small else (4,):
        for residual in (True, False):
            x, weight, dy = conv_inputs(*shape, kernel, dtype)
            got = value_and_gradients(getattr(kernels, name), x, weight, dy, residual)
            for which, g, want in zip(("y", "dx", "dw"), got, conv_exact(x, weight, dy, residual)):
                off = (g - want).abs().max().item()
                assert off <= tolerance * (want.abs().max().item() + 1), (which, kernel, residual)


@parametrize("name", BOTH)
def test_convolution_forward_alone(name):
    conv = getattr(kernels, name)
    for kernel, shape in product((2, 3, 4), ((1, 1, 2), (2, 9, 40))):
        x, weight, _ = conv_inputs(*shape, kernel)
        want = causal_conv_reference(x, weight)
        assert_close(conv(x, weight), want)
        assert_close(torch.func.vmap(conv, (None, 0))(x, weight[None])[0], want)


@needs_triton
def test_triton_segments_meet_within_a_sequence():
    """150 tokens are five segments forward and three backward, 300 channels two strips."""
    x, weight, dy = conv_inputs(1, 150, 300)
    got = value_and_gradients(kernels.causal_conv_triton, x, weight, dy)
    assert max(map(relative_error, got, conv_exact(x, weight, dy))) < 1e-5
    again = value_and_gradients(kernels.causal_conv_triton, x, weight, dy)
    assert all(map(torch.equal, got, again))  # the same bits


def test_eager_convolution_makes_no_shifted_copies(monkeypatch):
    monkeypatch.setattr(kernels, "shift", None)
    monkeypatch.setattr(F, "pad", None)
    value_and_gradients(kernels.causal_conv_pytorch, *conv_inputs(2, 9, 7))


@parametrize("name", ALL)
def test_convolution_keeps_dtype_and_takes_any_stride(name):
    conv = getattr(kernels, name)
    x, weight, _ = conv_inputs(3, 11, 16, dtype=torch.bfloat16)
    assert conv(x, weight).dtype == torch.bfloat16
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)  # last dim not contiguous
    assert_close(conv(transposed, weight), conv(x.contiguous(), weight))
    x = x.float().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert conv(x, weight).dtype == torch.float32
    dx = torch.autograd.grad(conv(x, weight).sum(), x)[0]  # sum's gradient has strides of 0
    want = torch.autograd.grad(causal_conv_reference(x, weight).sum(), x)[0]
    assert_close(dx, want)
    low = weight.bfloat16().requires_grad_()
    assert torch.autograd.grad(conv(x, low).sum(), low)[0].dtype == torch.bfloat16


@parametrize("name", ("causal_conv_reference", "causal_conv"))
@parametrize("residual", (True, False))
@parametrize("with_tail", (True, False))
def test_convolution_gradcheck(name, residual, with_tail):
    shapes = ((2, 5, 4), (4, 4)) + ((2, 3, 4),) * with_tail
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    conv = lambda x, w, *tail: getattr(kernels, name)(x, w, residual, *tail)
    assert torch.autograd.gradcheck(conv, inputs) and torch.autograd.gradgradcheck(conv, inputs)


@parametrize("name", ("causal_conv_reference", "causal_conv"))
def test_convolution_streams(name):
    for kernel, residual in product((2, 3, 4, 8), (True, False)):
        x, weight, _ = conv_inputs(2, 17, 6, kernel)
        past, pieces = torch.zeros(2, kernel - 1, 6, device=DEVICE), []
        for piece in x.split((1, 2, 5, 1, 8), dim=1):
            pieces.append(getattr(kernels, name)(piece, weight, residual, past))
            past = torch.cat([past, piece], dim=1)[:, 1 - kernel :]
        assert_close(torch.cat(pieces, dim=1), causal_conv_reference(x, weight, residual))


@needs_triton
def test_operators_are_registered_properly():
    for kernel, residual in ((4, True), (3, False)):
        x, weight, dy = conv_inputs(2, 5, 8, kernel)
        for weight in (weight, weight.t().contiguous().t()):  # as a Conv1d's would come
            torch.library.opcheck(kernels.forward_op, (x, weight, residual))
            torch.library.opcheck(kernels.backward_op, (dy, x, weight, residual))


@parametrize("name", ALL)
def test_convolution_compiles_in_one_graph(name):
    """Also for T < kernel, and where only x or only the weight wants a gradient."""
    conv = getattr(kernels, name)
    close = partial(assert_close, atol=1e-5, rtol=1e-5)
    for shape, residual in (((2, 9, 8), True), ((3, 2, 5), False)):
        torch._dynamo.reset()
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        x, weight, dy = conv_inputs(*shape)
        y, *gradients = conv_exact(x, weight, dy, residual)
        for f, trained in product((conv, compiled), ((0, 1), (0,), (1,))):
            inputs = [u.detach().requires_grad_(i in trained) for i, u in enumerate((x, weight))]
            got = f(*inputs, residual)
            got.backward(dy)
            close(got.double(), y)
            for i in trained:
                close(inputs[i].grad.double(), gradients[i])


@parametrize("name", ("causal_conv", *BOTH))
def test_forward_mode_is_refused(name):
    x, weight, _ = conv_inputs(2, 5, 4)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        x = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        getattr(kernels, name)(x, weight)


@needs_triton
def test_triton_refuses_second_derivatives():
    x, weight, _ = (u.requires_grad_() for u in conv_inputs(2, 5, 4))
    y = kernels.causal_conv_triton(x, weight)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd formula"):
        torch.autograd.grad(dx.sum(), weight)


@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_convolution_beyond_2_to_the_31():
    x, weight, _ = conv_inputs(1, 2**20 + 5, 1024, dtype=torch.bfloat16)
    x = x.requires_grad_()
    y = kernels.causal_conv(x, weight)
    last = kernels.causal_conv(x[:, -8:], weight, tail=x[:, -11:-8])
    assert_close(y[:, -8:], last)
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    want = 1 + torch.stack([weight[: i + 1].sum(0) for i in (3, 2, 1, 0)])
    assert_close(dx[0, -4:], want.bfloat16())


def test_convolution_of_nothing():
    for shape in ((0, 4, 3), (2, 0, 3)):
        x = torch.zeros(shape, requires_grad=True)
        y = kernels.causal_conv(x, torch.ones(4, 3, requires_grad=True))
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


def test_convolution_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 5, 3), torch.zeros(4, 3)
    for x, weight, tail in ((x[0], weight, None), (x, weight[:, :2], None), (x, weight, x),
                            (x.int(), weight, None), (x, weight[:0], None)):  # fmt: skip
        with pytest.raises(ValueError):
            kernels.causal_conv(x, weight, tail=tail)


def test_kernels_py_checks(monkeypatch, capsys):
    kernels.main()
    table = capsys.readouterr().out
    assert "definition" in table and "PyTorch" in table and "e-0" in table
    wrong = lambda x, w, residual: kernels.causal_conv(x, w * 1.001, residual)
    with pytest.raises(SystemExit, match="wrong, float32: relative error"):
        kernels.check({"wrong": wrong}, DEVICE, ["float32"])


# ---- 2. canon_gpt.py: Part I -----------------------------------------------

LINEAR = ("gla", "mamba2", "gdn")
VARIANTS = [dict(pos=pos, canon=canon) for pos in POSITIONS for canon in ("", "abcd")]
VARIANTS += [dict(mlp=mlp, canon="ab" if mlp == "none" else "abcd") for mlp in MLPS]
VARIANTS += [dict(mixer=mixer, canon=canon, short_conv=conv) for mixer in LINEAR
             for canon, conv in (("", False), ("acd", True), ("abcd", None))]  # fmt: skip
VARIANTS += [dict(mixer="gdn,attention", canon="acd"), dict(mixer="mamba2", mlp="none")]


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
        assert_close(after[:, :t], before[:, :t], atol=1e-12, rtol=0)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@parametrize("options", VARIANTS, ids=str)
def test_streaming_equals_one_pass(options):
    model, tokens = small_model(**options).double(), some_tokens()
    for lengths in ((1,) * 24, (5, 1, 1, 9, 8), (23, 1)):
        logits, _ = streamed(model, tokens, lengths)
        assert_close(logits, model(tokens)[0], atol=1e-10, rtol=0)


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

    assert isinstance(block.mixer.canon, Canon) == ("b" in points)
    x = model.embed(tokens)
    x = x + block.mixer(canon(normed(x, block.norm1), "a", block.canon_a))
    h = canon(normed(x, block.norm2), "c", block.canon_c)
    gate, up = canon(h @ block.mlp.up.weight.T, "d", block.mlp.canon).chunk(2, dim=-1)
    x = x + (F.silu(gate) * up) @ block.mlp.down.weight.T
    assert_close(model(tokens)[0], normed(x, model.norm) @ model.head.weight.T)


@parametrize("kernel", (2, 3, 4, 8))
@parametrize("residual", (True, False))
@parametrize("silu", (True, False))
def test_a_canon_layer_streams(kernel, residual, silu):
    """By Eq. 4.1, one token after another; in pieces of any length; and memory does not grow."""
    config = Config(1, 1, canon="a", canon_kernel=kernel, canon_residual=residual, canon_silu=silu)
    layer, x = Canon(6, config), torch.randn(2, 12, 6)
    w = layer.weight
    want = [sum(w[i] * x[:, t - i] for i in range(min(kernel, t + 1))) for t in range(12)]
    want = torch.stack(want, dim=1)
    want = (F.silu(want) if silu else want) + (x if residual else 0)
    assert_close(layer(x), want)
    got, state = streamed(layer, x, (1, 1, 5, 2, 3))
    assert_close(got, want)
    kept = sum(u.untyped_storage().nbytes() for u in state.values())
    assert kept == 4 * 2 * (kernel - 1) * 6  # a view would keep all that it was cut from


@parametrize("canon", ("", "b"))
@parametrize("pos", POSITIONS)
def test_attention_is_a_mean_of_values(canon, pos):
    layer = Attention(Config(1, 9, n_head=2, d_model=16, canon=canon, pos=pos))
    x = torch.randn(3, 9, 16)
    q, k, v = layer.canon(layer.qkv(x)).view(3, 9, 3, 2, 8).unbind(2)
    if pos in ("rope", "rope4"):
        angles = rotary_angles(9, 8 if pos == "rope" else 2)
        q, k = (rotate(u, angles.cos(), angles.sin()) for u in (q, k))
    logits = torch.einsum("bthk, bshk -> bhts", q, k) / 8**0.5
    if pos in ("alibi", "halibi"):
        logits = logits + distance_bias(pos, 2, 9, 9)
    shares = (logits + torch.full((9, 9), -math.inf).triu(1)).softmax(-1)
    want = layer.out(torch.einsum("bhts, bshv -> bthv", shares, v).flatten(2))
    assert_close(layer(x), want)
    assert_close(streamed(layer, x, (1, 4, 1, 3))[0], want)


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
    assert_close(module(h), inner @ module.down.weight.T)


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


ADAMW = dict(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.5)


@parametrize("options", [{"canon_frozen": True}, {"tie_embeddings": True}, {"mixer": "gdn,mamba2"}])
def test_matrices_decay_and_frozen_canons_stay(options):
    model = small_model(canon="acd", **options)
    decayed, rest = train.make_optimizer(model, ADAMW, "cpu").param_groups
    assert decayed["weight_decay"] == 0.5 and rest["weight_decay"] == 0
    names = {p: name for name, p in model.named_parameters()}
    spared = {p for p in names if re.search("norm|canon|conv|A_log|dt_bias|skip", names[p])}
    frozen = {p for p in spared if "canon_frozen" in options and "canon" in names[p]}
    assert {*decayed["params"]} == {*names} - spared and {*rest["params"]} == spared - frozen


@parametrize("dims", (8, 2))
def test_rotary_depends_on_the_distance_only(dims):
    angles, half = rotary_angles(64, dims).double(), dims // 2
    speeds = 10000.0 ** (-torch.arange(half).double() / half)
    assert_close(angles, torch.arange(64)[:, None] * speeds, atol=1e-6, rtol=1e-6)
    q, k = torch.randn(2, 8).double()

    def rows(u):
        return rotate(u.expand(1, 64, 1, 8), angles.cos(), angles.sin())[0, :, 0]

    scores = rows(q) @ rows(k).T
    assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-4, rtol=0)
    # dims j and j + half are a pair, dims beyond 2 half pass
    pairs = torch.complex(q[:half], q[half:dims]) * torch.polar(torch.ones_like(angles), angles)
    want = torch.cat([pairs.real, pairs.imag, q[dims:].expand(64, -1)], dim=-1)
    assert_close(rows(q), want)


def test_alibi_masks_by_hand():
    x = -torch.inf
    alibi = distance_bias("alibi", 2, 3, 3)  # slopes 2^-4 and 2^-8
    for head, slope in enumerate((1 / 16, 1 / 256)):
        want = torch.tensor([[0, x, x], [-slope, 0, x], [-2 * slope, -slope, 0]])
        assert torch.equal(alibi[head], want)
    assert torch.equal(distance_bias("alibi", 2, 2, 3), alibi[:, 1:])
    halibi = distance_bias("halibi", 4, 4, 4)
    itself = [[0, x, x, x], [x, 0, x, x], [x, x, 0, x], [x, x, x, 0]]
    nearest_two = [[0, x, x, x], [0, 0, x, x], [x, 0, 0, x], [x, x, 0, 0]]
    every = [[0, x, x, x], [0, 0, x, x], [0, 0, 0, x], [0, 0, 0, 0]]
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


BAD_CONFIGS = """mixer='gdn,mamba'; mixer=''; mixer='gdn,gdn,attention'; pos='rotary'; mlp='gelu';
pos='alibi', mixer='gla'; canon='abe'; canon='aa'; canon='abc', mlp='none'; canon_frozen=True;
canon_type='mine', canon='a'; canon_kernel=3; canon_kernel=1, canon='a'; canon_kernel=9, canon='a';
short_conv=True; n_layer=0; n_head=-4; vocab_size=0; block_size=0; block_size=10**10;
d_model=2**20+4; d_model=20; d_model=16, pos='rope4'; d_model=36, mixer='gla';
d_model=36, mixer='mamba2'; d_model=36, mixer='gdn'"""


@parametrize("bad", re.split(r";\s", BAD_CONFIGS))
def test_config_names_field_and_value(bad):
    options = eval(f"dict({bad})")
    (field, value), *_ = options.items()
    settings = dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | options
    with pytest.raises(ValueError, match=f"^{field} = {value!r}: "):
        Config(**settings)


# ---- 2. canon_gpt.py: Part II ----------------------------------------------

KINDS = ("gla", "mamba2", "gdn", "gdn per channel")  # the last is no mixer's, but allowed


def recurrence_inputs(kind, B, T, H, K, V, strongest=1.0, dtype=torch.float64):
    """[q, k, v, log_decay, beta], log decays down to -strongest per step, half of them near 0."""
    shared = 1 if kind == "mamba2" else H
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
            assert_close(o[b, t, h], S.T @ query)
        assert_close(final[b, h], S)


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
    assert_close(got, want, atol=1e-10, rtol=1e-10)


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
    for a, b in zip(got, with_gradients(linear_recurrence, exact, dy)):
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 10 * 2**-9) * b.norm()


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
        qkv = own(module.canon(module.qkv(x)))
        q, k, v = (heads(u, 4) for u in qkv.split([D // 2, D // 2, D], dim=-1))
        decay = heads(torch.sigmoid(module.decay(x)) ** (1 / 16), 4)
        return gated(linear_recurrence(q * (D // 8) ** -0.5, k, v, decay.log())[0])
    if isinstance(module, Mamba2):
        z, xBC, dt = module.canon(module.into(x)).split([2 * D, 2 * D + 128, 16], dim=-1)
        u, B, C = own(xBC).split([2 * D, 64, 64], dim=-1)  # without it, no SiLU either
        dt, u = F.softplus(dt + module.dt_bias), heads(u, 16)
        written, log_decay = dt[..., None] * u, -module.A_log.exp() * dt
        o, _ = linear_recurrence(heads(C, 1), heads(B, 1), written, log_decay)
        y = (o + module.skip[:, None] * u).flatten(2)
        return module.out(module.norm(y * F.silu(z)))
    H, qkv = module.n_head, module.canon(module.qkv(x))
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
    x = torch.randn(2, 24, 32).double()
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
    assert abs((count(block.mlp) - count(block.mlp.canon)) / ((12 - d2) * D**2) - 1) < 0.005


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


def instances(task, rows=200):
    """The texts of a batch's whole instances, without <bos>, targets in [brackets]."""
    tokens, mask = task.batch(3, 5, rows)
    assert tokens.shape == mask.shape == (rows, task.block_size + 1)
    assert tokens.dtype == np.int64 and mask.dtype == bool
    for window in zip(tokens.tolist(), mask.tolist()):
        start, *found = tasks.printed(task, *window).split("<bos> ")
        assert start in ("", "[")
        yield from found[:-1] or found  # the last one may be cut off


class Fake(torch.nn.Module):
    """A model of the methods given; evaluations ask its parameters for the device."""

    def __init__(self, **methods):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.__dict__.update(methods)


@parametrize("name", tasks.TASKS)
def test_batches_are_pure(name):
    task, again = make_task(name), make_task(name)
    first, *others = [t.batch(1, 7, 16) for t in (task, again, task)]
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other))
    for arguments in ((1, 8, 16), (2, 7, 16), (7, 1, 16)):
        assert not np.array_equal(first[0], task.batch(*arguments)[0])
    rows = [row.tobytes() for step in range(20) for row in task.batch(0, step, 16)[0]]
    assert len(set(rows)) == 320


@parametrize("name", tasks.TASKS)
def test_presets_make_sense(name):
    for preset in ("nano", "small", "paper"):
        task = make_task(name, preset)
        Config(task.vocab_size, task.block_size, pos="rope4", **task.model)  # raises if it can't be
        assert task.batch(0, 0, 2)[1].any(axis=1).all() and task.settings["name"] == task.name
        assert not name.startswith("depo") or task.N > 2 * task.K
        for tokens, mask in task.documents(default_rng(0), 100):
            assert len(tokens) == len(mask) <= task.block_size + 1  # it fits
            assert 1 <= min(tokens) and max(tokens) < task.vocab_size


@parametrize("name", ("copy", "depo1", "brevo1", "mano"))
def test_evaluation_is_on_fresh_data(name, monkeypatch):
    task, seeds, draw = make_task(name), [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or draw(seed))
    forward = lambda tokens: (torch.zeros(*tokens.shape, task.vocab_size), None)
    task.evaluate(Fake(forward=forward, generate=lambda tokens, *_: tokens), 3, 30)
    task.batch(3, 7, 2)
    assert seeds == [[3, tasks.EVAL], [3, tasks.TRAIN, 7]] and tasks.EVAL != tasks.TRAIN


def test_documents_are_enough_to_train_and_to_score():
    class Count(tasks.Task):
        vocabulary = ["", *"123", "<bos>"]

        def documents(self, rng, count):
            numbers = rng.integers(1, 4, count).tolist()
            return [([4, n] + [n] * n, [False] * 2 + [True] * n) for n in numbers]

    task = Count(block_size=11, model={}, training=dict(batch_size=7))
    assert set(instances(task)) == {"1 [1] ", "2 [2 2] ", "3 [3 3 3] "}
    n = [tokens[1] for tokens, _ in task.documents(default_rng([5, tasks.EVAL]), 60)]

    def forward(tokens):
        guess = tokens.clone()
        guess[:, 1] %= 3  # so the first 3 of three is wrong
        return F.one_hot(guess, 5), None

    scores = {"sequences": 1 - n.count(3) / 60, "tokens": 1 - n.count(3) / sum(n)}
    assert task.evaluate(Fake(forward=forward), 5, 60) == pytest.approx(scores)


def test_copy():
    task = make_task("copy", N=7, block_size=40)
    texts = [*instances(task, rows=300)]
    for numbers, copy in (text.split(" <query> ") for text in texts):
        assert copy == f"[{numbers}] " and sorted(numbers.split()) == [*"1234567"]
    assert len(texts) == 600 and drawn_as((text[0] for text in texts), "1234567")
    assert (task.batch(0, 0, 50)[0][:, 32] == task.bos).all()  # the third is cut off


# -- Depo

WORD = r"(?:\d+\.)*\d+"
DEPOS = (
    ("depo0", {}), ("depo1", {}), ("depo2", {}), ("depo1", dict(N=24, K=5, block_size=300)),
    ("depo1", dict(V=2, word_len=(2, 3), N=12, block_size=260)), ("depo1", dict(word_len=(1, 1))),
    ("depo2", dict(N=12, K=4, block_size=400)),
    ("depo0", dict(V=3, word_len=(2, 2), N=9, block_size=200)),
)  # fmt: skip


def parse_depo(task, text):
    edge, question = f"({WORD}) ({WORD}) ", rf"<query_(\d+)> ({WORD}) \[<ans> ({WORD})\] "
    edge += ", " * (task.name == "depo0")
    assert re.fullmatch(f"({edge})+({question})+", text)
    edges, questions = re.findall(edge, text.split("<")[0]), re.findall(question, text)
    return edges, [(int(k), q, answer) for k, q, answer in questions]


@parametrize("name, options", DEPOS, ids=str)
def test_depo_by_an_independent_checker(name, options):
    task = make_task(name, **options)
    for text in instances(task):
        edges, questions = parse_depo(task, text)
        successor, n, cycle = dict(edges), len(edges), [edges[0][0]]
        while successor[cycle[-1]] not in cycle:
            cycle.append(successor[cycle[-1]])
        assert 3 <= n <= task.N and len(successor) == len(cycle) == n
        assert len({q for _, q, _ in questions}) == len(questions) == min(10, n)
        for k, q, answer in questions:
            assert 1 <= k <= task.K and answer == cycle[(cycle.index(q) + k) % n]


def test_depo_order_and_sizes_are_random():
    N = 9
    task = make_task("depo1", N=N, K=3, block_size=2000)  # so long that hardly any are cut off
    parsed = [parse_depo(task, text) for text in instances(task, rows=150)]
    weights = {n: 1 / (n + N**0.5) for n in range(3, N + 1)}
    chances = {n: weight / sum(weights.values()) for n, weight in weights.items()}
    assert drawn_as((len(edges) for edges, _ in parsed), chances)
    assert drawn_as((k for _, questions in parsed for k, _, _ in questions), (1, 2, 3))
    three = [(*zip(*edges), [q for _, q, _ in asked]) for edges, asked in parsed if len(edges) == 3]
    assert drawn_as((starts.index(ends[0]) for starts, ends, _ in three), (1, 2))
    assert drawn_as((asked.index(starts[0]) for starts, _, asked in three), (0, 1, 2))


def test_words_come_as_if_drawn_one_by_one():
    """As the plain loop in the docstring draws them: the chances of pairs, and of every place."""

    def draw(n, V, word_len):
        return tasks.Words(n, V, word_len).draw(default_rng(0), [n] * 9000)

    for V, (low, high) in ((1, (1, 3)), (2, (1, 2)), (3, (1, 1))):
        p = {}
        for length in range(low, high + 1):
            for *start, last in product(range(1, V + 1), repeat=length):
                p[*start, last + V * (high > 1)] = 1 / (high + 1 - low) / V**length
        either = {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in permutations(p, 2)}
        chances = {(a, b): (either[a, b] + either[b, a]) / 2 for a, b in either}
        assert drawn_as((tuple(map(tuple, words)) for words in draw(2, V, (low, high))), chances)
    short = np.mean([[len(word) == 1 for word in words] for words in draw(5, 2, (1, 2))], axis=0)
    assert np.ptp(short) < 0.03 < 0.3 < short.mean()


def scores_if(task, is_right):
    """The scores if only answers are right, what stands behind <ans>, and their last token only if
    is_right(the words before)."""

    def right_tokens(model, texts):
        right = np.zeros((len(texts), max(map(len, texts))), bool)
        for row, text in zip(right, texts):
            words = [task.vocabulary[token] for token in text]
            for ans in (i for i, word in enumerate(words) if word == "<ans>"):
                end = ans + len([*takewhile(lambda word: word[0] != "<", words[ans + 1 :])])
                row[ans + 1 : end], row[end] = True, is_right(words[:ans])
        return right

    task.right_tokens = right_tokens
    return task.evaluate(None, 0, 50)


@parametrize("name, hops", (("depo1", [1, 2]), ("depo0", [1, 2, 4, 6])))
def test_depo_scores(name, hops):
    task = make_task(name, K=max(hops))
    right = lambda words: re.findall("<q[^>]*>", "".join(words))[-1] != "<query_2>"
    assert scores_if(task, right) == {f"k={k}": float(k != 2) for k in hops}


# -- Brevo

BREVOS = (
    ("brevo1", {}), ("brevo1", dict(N=30, block_size=300)),
    ("brevo2", {}), ("brevo2", dict(N=14, V=3, word_len=(1, 3), block_size=400)),
)  # fmt: skip


def parse_brevo(text):
    form = rf"((?:{WORD} {WORD} )*)<query> ({WORD}) \[?<ans> (?:((?:{WORD} )*)<eos>\] )?"
    edges, q, answer = re.fullmatch(form, text).groups()
    named = edges.split()
    return [*zip(named[::2], named[1::2])], q, (answer or "").split()


def text_of(task, tokens):
    return tasks.printed(task, tokens, [False] * len(tokens))


def tokens_of(task, words):
    pieces = (piece for word in words for piece in re.findall(r"\d+\.?", word))
    return [task.vocabulary.index(piece) for piece in pieces]


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
        edges, q, answer = parse_brevo(text)
        parents, children = neighbours(edges), neighbours((b, a) for a, b in edges)
        assert len({*parents, *children}) <= task.N > len(parents)
        assert answer[-1] == q in parents and len(answer) == len(set(answer))
        for i, node in enumerate(answer):  # all parents stand before, some child behind
            assert parents[node] <= {*answer[:i]} and (node == q or children[node] & {*answer[i:]})


def test_brevo_graphs_follow_their_distribution():
    """Of the earlier nodes that are free, each number 1..min(4, free) and each set is as likely."""
    dice, leaves, found = tasks.random.Random(0), [], defaultdict(list)
    for graph in (tasks.draw_graph(dice, 13) for _ in range(6000)):
        children = Counter()
        leaves.append(graph.index(next(filter(None, graph))))
        for node in range(leaves[-1], 13):
            free = [other for other in range(node) if children[other] < 4]
            found[len(free)].append(tuple(sorted(map(free.index, graph[node]))))
            children.update(graph[node])
    assert drawn_as(leaves, (1, 2, 3, 4))
    for free in range(1, 9):
        sets = [c for k in (1, 2, 3, 4) for c in combinations(range(free), k)]
        chances = {c: 1 / min(4, free) / math.comb(free, len(c)) for c in sets}
        assert drawn_as(found[free], chances)


def test_brevo_orders_are_drawn_backward_step_by_step():
    """2 needs 0; 3 needs 0 and 1; 4 needs 2 and 3; 5 is not asked about."""
    parents, chances = [[], [], [0], [0, 1], [2, 3], [4, 1]], {}

    def extend(order, chance):
        left = {*range(5)} - {*order}
        ready = left - {parent for child in left for parent in parents[child]}
        for node in ready:
            extend((node, *order), chance / len(ready))
        if not ready:
            chances[order] = chance

    extend((), 1.0)
    assert len(chances) == 5 and len(set(chances.values())) > 1
    dice = tasks.random.Random(0)
    assert drawn_as((tuple(tasks.draw_order(dice, parents, 4)) for _ in range(5000)), chances)


@parametrize("n", (3, 5, 10, 12))
def test_brevo_asks_for_the_last_quarter(n, monkeypatch):
    asked = []
    monkeypatch.setattr(tasks, "draw_order", lambda *drawn: asked.append(drawn) or [0])
    list(make_task("brevo1", N=12, block_size=200).instances(default_rng(0), [n] * 2000))
    assert drawn_as((q for _, _, q in asked), range(n - math.ceil(n / 4), n))
    assert all(parents[q] for _, parents, q in asked)


def test_brevo_names_and_order_tell_nothing():
    parsed = [parse_brevo(text) for text in instances(make_task("brevo1", N=4), rows=2000)]
    assert drawn_as((q for _, q, _ in parsed), "1234")
    orders, possible = [], [*permutations((1, 2, 3))]
    for edges, _, answer in parsed:
        if len(edges) == 3 and {*chain(*edges)} == {*answer}:
            orders.append(tuple(answer.index(a) + answer.index(b) for a, b in edges))
    assert drawn_as((order for order in orders if order in possible), possible)


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_accepts_exactly_the_valid_orders(name):
    task, checked = make_task(name), Counter()
    for prompt, answer, depth in task.instances(default_rng(0), [4, 5] * 20):
        edges, q, _ = parse_brevo(text_of(task, prompt[1:]))
        parents = neighbours(edges)
        depth_of = lambda node: 1 + min(map(depth_of, parents[node]), default=-1)
        assert depth_of(q) == depth
        words = text_of(task, answer[:-1]).split()
        right = lambda words: task.verify(prompt, [*tokens_of(task, words), task.eos])
        for order in permutations(words):
            valid = all(order.index(a) < order.index(b) for a, b in edges if {a, b} <= {*order})
            assert right(order) == valid
            checked[valid] += 1
        others = {*chain(*edges)} - {*words}
        wrong = [], words[1:], words[:-1], words[:1] + words, *([each, *words] for each in others)
        assert right(words) and not any(map(right, wrong))
        assert task.verify(prompt, answer + [task.eos, 1])
        for end in ([], [task.query, task.eos], [1, task.eos]):  # 1: in brevo2 half a word
            assert not task.verify(prompt, answer[:-1] + end)
    assert min(checked.values()) > 20


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_scores(name):
    """Of a model that gives the right answers, but without their first token if q's last is odd."""
    task, right = make_task(name), defaultdict(list)
    drawn = [*task.instances(default_rng([0, tasks.EVAL]), [task.N] * 99)]
    given = {tuple(prompt): answer[prompt[-2] % 2 :] for prompt, answer, _ in drawn}
    for prompt, _, depth in drawn:
        for score in ("all", f"depth={depth}"):
            right[score].append(prompt[-2] % 2 == 0)

    def generate(tokens, max_new_tokens, temperature, stop):
        assert temperature == 0 and stop == task.eos
        texts = [given[tuple(prompt)] for prompt in tokens.tolist()]
        assert max(map(len, texts)) <= max_new_tokens
        return torch.cat([tokens, tasks.padded(texts)], 1)

    scores = task.evaluate(Fake(generate=generate), 0, 99)
    assert scores == {each: np.mean(right[each]) for each in sorted(right)}
    assert {"depth=1", "depth=2"} <= {*right}


# -- Mano


def mano_value(words):
    """The value, and the number of operators, of the expression that an iterator starts with."""
    head = next(words)
    if head.isdigit():
        return int(head), 0
    (a, left), (b, right) = mano_value(words), mano_value(words)
    return {"+": a + b, "-": a - b, "*": a * b}[head] % 23, left + right + 1


def test_mano_by_an_independent_checker():
    task, words, splits = make_task("mano", L=6, block_size=400), [], []
    for text in instances(task, rows=100):
        head, *expression, ans, result = text.split()
        rest = iter(expression)
        value, count = mano_value(rest)
        assert not [*rest] and [head, ans, result] == [f"<len_{count}>", "<ans>", str(value)]
        words += expression
        splits += [mano_value(iter(expression[1:]))[1]] * (count == 4)
    assert task.batch(0, 0, 9)[1].all() and drawn_as(splits, range(4))
    assert drawn_as((word for word in words if word in "+-*"), "+-*")
    assert drawn_as((word for word in words if word not in "+-*"), [str(x) for x in range(23)])
    documents = task.documents(default_rng(0), 6000)
    assert drawn_as((len(tokens) for tokens, _ in documents), range(7, 18, 2))


def test_mano_scores():
    scores = scores_if(make_task("mano", L=6), lambda words: "<len_2>" in words)
    assert scores == {"l=1": 0.0, "l=2": 1.0, "l=4": 0.0, "l=6": 0.0}


# -- Lano


def all_yields(grammar, symbol):
    """{yield: probability}, by enumeration."""
    if symbol <= 3:
        return {(symbol,): 1.0}
    found = defaultdict(float)
    for rule in grammar.rules[symbol]:
        for parts in product(*(all_yields(grammar, part).items() for part in rule)):
            text = tuple(chain(*(part for part, _ in parts)))
            found[text] += math.prod(p for _, p in parts) / len(grammar.rules[symbol])
    return found


def exact_table(language, text):
    """For each prefix of the text, the probabilities that it is all, or goes on with 1, 2, 3."""
    rows = np.zeros((len(text) + 1, 4))
    for other, p in language.items():
        for t in range(len(text) + 1):
            if other[:t] == text[:t] and len(other) >= t:
                rows[t, other[t] if len(other) > t else 0] += p
    return rows


@parametrize("cfg, root", (("cfg3f", 10), ("cfg3f", 11), ("cfg3j", 12), ("cfg3k", 12)))
def test_lano_chart_equals_enumeration(cfg, root):
    task = make_task("lano", cfg=cfg, root=root)
    grammar, language = task.grammar, all_yields(task.grammar, root)
    assert grammar.longest[root] == max(map(len, language))
    assert grammar.mean[root] == pytest.approx(sum(len(text) * p for text, p in language.items()))
    texts = sorted(language)[::5][:12]
    for text in texts[:4]:  # and all their corruptions by one token
        texts += [(*text[:i], v, *text[i + 1 :]) for i in range(len(text)) for v in (1, 2, 3)]
        texts += [text[:-1], text + (1,), ()]
    assert 12 < sum(text in language for text in texts) < len(texts)
    rows = F.pad(tasks.padded(texts), (0, 200))  # so wide that they are taken a few at a time
    for text, found in zip(texts, task.charts(rows).numpy(), strict=True):
        t = np.arange(len(text) + 1)
        exact = exact_table(language, text) * 2.1 ** t[:, None]
        np.testing.assert_allclose(found[t], exact, rtol=1e-12)
        assert not found[len(t) :].any()


@parametrize("cfg, most", (("cfg3f", 350), ("cfg3j", 1000), ("cfg3k", 800)))
def test_lano_long_sentences_keep_their_probability(cfg, most):
    grammar = tasks.Grammar(tasks.GRAMMARS[cfg])
    assert all(3 <= len({*rules}) == len(rules) <= 4 for rules in grammar.rules.values())
    sentences = grammar.sample(default_rng(1), 1000)
    assert {*chain(*sentences)} == {1, 2, 3}  # so each rule's parts are of the next level
    text = max((sentence for sentence in sentences if len(sentence) <= most), key=len)
    chart = grammar.chart(torch.tensor([text]))[0]
    assert len(text) > 0.8 * most and 1e-100 < chart.max() < 1e100 and chart[-1, 0] > 0
    here = chart[torch.arange(len(text)), text]
    assert_close(chart[1:].sum(1), 2.1 * here, rtol=1e-10, atol=0)
    assert chart[0].sum() == pytest.approx(1)


def test_lano_windows_and_samples():
    task = make_task("lano", root=12, block_size=40)
    language = all_yields(task.grammar, 12)
    assert {tuple(map(int, text.split())) for text in instances(task)} <= set(language)
    assert task.batch(0, 0, 9)[1].all()
    assert drawn_as(map(tuple, task.grammar.sample(default_rng(0), 5000)), language)


def test_lano_scores():
    """Of texts that are sentences, or none, or do not end; by half knowledge, half guessing."""
    task = make_task("lano", root=10, block_size=20)
    task.block_size = 9  # so sentences of nine tokens have no end
    language = all_yields(task.grammar, 10)
    short, long = ([text for text in language if (len(text) > 8) == long] for long in (False, True))
    texts = [*short[:40], *(long * 20)[:20], *[(1,) * 8] * 20]
    texts = [(4, *text, *[4] * (9 - len(text))) for text in texts]

    def generate(tokens, max_new_tokens, temperature, stop, generator):
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
    nats = (p * np.log(np.maximum(p, 1e-300) / (p / 2 + 1 / 8))).sum(1).mean()
    scores = task.evaluate(Fake(generate=generate, forward=forward), 0, 80)
    assert scores == {"sentences": 0.5, "KL": pytest.approx(nats, rel=1e-5)} and nats > 0.1


# -- Capo


def test_capo_meets_everybody_once_an_epoch_in_new_words():
    task, people = make_task("capo", N=30, exposures=4, block_size=120), tasks.draw_people(0, 30)
    assert not np.array_equal(people, tasks.draw_people(1, 30))
    who, met, told = {tuple(person[:3]): person for person in people.tolist()}, [], set()
    assert task.steps(batch_size=5) == 8  # 8 x 5 windows of 3 lives; 4 x 30 wanted
    for tokens, mask in (task.batch(0, step, 5) for step in range(8)):
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
    assert all(len(set(met[i : i + 30])) == len(who) == 30 for i in range(0, 120, 30))
    assert met[:30] != met[30:60] and len(told) == 120


def test_capo_people_and_wordings():
    people, first = tasks.draw_people(5, 40_000), 1
    for column, size in enumerate(tasks.PERSON.values()):
        assert drawn_as(people[:, column].tolist(), range(first, first + size))
        first += size
    assert len(np.unique(people[:, :3], axis=0)) == 40_000  # chance would bring some five twice
    assert len(np.unique(people[:, -2:], axis=0)) == 263 and {*people[:, -1]} <= {*people[:, 7]}
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
    prices = (math.expm1(nats.get(place, 1e-9)) for place in range(1, 35))
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


# -- Refusals and examples

BAD_TASKS = """
    sort | task = 'sort'    copy K=3 | K = 3    copy N=1 | N = 1
    depo N=2 | N = 2    depo K=0 | K = 0    depo V=0 | V = 0    depo V=2 word_len=(1,1) | N = 5
    depo word_len=(3,2) | word_len    depo word_len=(0,2) | word_len    brevo N=2 | N = 2
    mano L=0 | L = 0    lano cfg='cfg4' | cfg = 'cfg4'    lano root=3 | root    lano root=23 | root
    capo N=0 | N = 0    capo exposures=0 | exposures = 0    copy block_size=128 | block_size
    depo0 block_size=69 | block_size    brevo2 block_size=106 | block_size    lano root=22 | block
    mano block_size=7 | block_size    capo block_size=33 | block_size    mano L=10**7 | L
    capo N=10**7 | N = 10000000    copy N=10**8 | N = 100000000    lano block_size=1e10 | block_size
    depo word_len=(1,10**9) | word_len
"""


@parametrize("bad", re.split(r"\s{2,}", BAD_TASKS.strip()))
def test_bad_and_absurd_tasks_are_refused(bad):
    command, message = bad.split(" | ")
    name, *options = command.split()
    options = eval(f"dict({', '.join(options)})")
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(?!\d).*: .+$"):
        make_task(name, **options)


def test_one_instance_asks_all_scored_hops():
    task = make_task("depo1", N=5, K=4, block_size=60)
    task.right_tokens = lambda model, texts: np.ones((1, 60), bool)
    assert task.evaluate(None, 0, 1) == {"k=1": 1.0, "k=2": 1.0, "k=4": 1.0}
    assert len(make_task("depo1", N=513, K=512, block_size=4000).hops) <= task.questions


@parametrize("name", [*tasks.TASKS, *tasks.ALIASES])
def test_examples_are_printed(name, capsys):
    tasks.main([name])
    title, text, legend = capsys.readouterr().out.split("\n\n")
    task = make_task(name)
    assert title.startswith(f"{task.name}: ") and task.meaning in legend
    assert re.match(r"\[?<bos> ", text) and re.fullmatch(r"([^][]*\[[^][]+\])+\s*", text)


# -- Learning, through train.py

COPY = "copy --N 16 --block-size 33 --steps 300 --warmup 50"
COPY_6 = "copy --N 6 --block-size 13 --steps 100 --warmup 30 --d-model 32 --canon acd --mixer"
SMALL = "--canon abcd --n-layer 2 --d-model 32 --batch-size 32 --lr 1e-2 --warmup 30"
LEARNS = (  # command, score, at least, at most
    (f"{COPY} --canon abcd", "sequences", 0.5, 1),  # the paper's Fig. 5 in miniature
    (COPY, "sequences", 0, 0.05),
    *((f"{COPY_6} {mixer}", "sequences", 0.5, 1) for mixer in ("gla", "mamba2", "gdn")),
    (f"depo0 --N 3 --K 1 --V 2 --word-len 1 2 --block-size 40 --steps 120 {SMALL}", "k=1", 0.7, 1),
    (f"brevo1 --N 4 --block-size 32 --steps 180 {SMALL}", "all", 0.5, 1),
    (f"mano --L 1 --block-size 35 --steps 260 {SMALL}", "l=1", 0.7, 1),
    (f"lano --root 10 --block-size 32 --steps 100 {SMALL}", "sentences", 0.5, 1),
    (f"capo --N 50 --exposures 100 --block-size 34 {SMALL}", "facts", 0.3, 1),
)


@parametrize("command, score, least, most", LEARNS)
def test_every_task_resumes_and_is_learnt_a_little(command, score, least, most, here, monkeypatch):
    """Chance is 1/2 for Depo, some 1/4 for Brevo, 1/3 for Mano, next to nothing for the rest."""
    monkeypatch.setattr(tasks.Mano, "modulus", 3)  # the tables of 23 take long to learn
    options = f"--preset nano --device {DEVICE} --no-compile --eval-every 1000 --eval-size 128"
    words = ["--task", *command.split(), *options.split(), "--out", "run"]
    with interruption(0), pytest.raises(SystemExit, match="143"):
        train.main(words)
    train.main([*words, "--resume"])
    assert least <= logged("run")[-1]["eval"][score] <= most


# ---- 4. train.py -----------------------------------------------------------

TINY = ("--task copy --preset nano --N 8 --block-size 20 --device cpu --batch-size 8 --eval-size 16"
        " --warmup 5 --workers 0 --no-compile").split()  # fmt: skip


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
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ends(here, capsys):
    """Checks that a program ends with such a line, and before training leaves all files alone."""

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
        assert training or (output.err == line and not output.out and contents() == before)
        assert all(word in line for word in words), line
        return line

    return check


@contextlib.contextmanager
def interruption(step, error=None):
    """SIGTERM arrives, or an error, while the batch of this step is made."""
    requests, make = [], train.Stream.__getitem__

    def watched(stream, number):
        if number == step:
            requests.append(signal.SIGTERM)
            if error:
                raise error
        return make(stream, number)

    with patch.object(train, "stop_requests", lambda: nullcontext(requests)):
        with patch.object(train.Stream, "__getitem__", watched):
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
    assert shlex.split(config["command"]) == ["python", "train.py", *words]
    group = saved["optimizer"]["param_groups"][0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-6, 0.03)
    assert [line["step"] for line in log] == [20, 30, 40, 50, 50]
    assert [line["step"] for line in log if "eval" in line] == [30, 50, 50]
    for line in log[:-1]:
        assert line["lr"] == train.learning_rate(line["step"] - 1, config["training"])
        assert line["tokens"] == line["step"] * 8 * 20
    last = log[-1]
    assert last["final"] is True and 0 < last["data_share"] < 1
    assert last["tokens_per_s"] == pytest.approx(8 * 20 * 1e3 / last["step_ms"], rel=0.01)
    printed = {*last, *last["eval"], f"{config['parameters']['total']:,}"}
    assert printed - {"step", "eval", "final"} <= set(done.stdout.split())

    torch.manual_seed(5)
    task, model = make_task(**config["task"]), CanonGPT(Config(**config["model"]))
    assert all(torch.allclose(saved["model"][name], p) for name, p in model.named_parameters())
    tokens, mask = map(torch.from_numpy, task.batch(5, 19, 8))
    loss = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()
    assert log[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert last["eval"] == task.evaluate(model, 5, 16)


@parametrize("mixer, layers", [("attention", 2), ("gla", 0), ("gdn,attention", 1)])
def test_operations_are_counted_as_pytorch_counts_them(mixer, layers):
    from torch.utils.flop_counter import FlopCounterMode

    B, T, D = 2, 32, 64
    model = CanonGPT(Config(50, T, n_layer=2, n_head=2, d_model=D, mixer=mixer, canon="abcd"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(B, T, dtype=torch.int64))
    products, aten = counter.get_flop_counts()["Global"], torch.ops.aten
    linear = products[aten.mm] + products.get(aten.addmm, 0)
    attention = layers * 2 * (2 * B * T * T * D) // 2  # half of all pairs: the past
    assert train.flops_per_token(model) * B * T == 3 * (linear + attention)


@parametrize("error", (None, KeyError("power failure")))
def test_resume_goes_on_as_if_never_stopped(error, ends):
    """After a signal in step 48, or a crash there: same weights, same lines in the log."""

    def steady(out):
        return [[line.get(x) for x in ("step", "tokens", "loss", "eval")] for line in logged(out)]

    flags = "--steps 60 --eval-every 20"
    train.main(tiny(flags, "whole"))
    with interruption(47, error), pytest.raises(type(error) if error else SystemExit):
        train.main(tiny(flags))
    saved = checkpoint("run")
    assert saved["step"] == (40 if error else 48) and train.steps_done(Path("run")) == (40, False)
    torch.save({**saved, "seconds": 1000.0}, "run/ckpt.pt")
    Path("run/metrics.jsonl").write_text('{"step": 41, "lo')
    assert train.steps_done(Path("run")) == (0, False)
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
    fancy.remove("--no-compile")  # on a CPU compiling is the default, where it can work
    train.main(fancy)
    a, b = ([line["loss"] for line in logged(out)[:-1]] for out in ("plain", "fancy"))
    assert len(compiled) == 1 and a == pytest.approx(b, abs=1e-3)


@parametrize("world, names, kills", [
    (1, "INT INT", True), (2, "INT INT", False), (1, "TERM TERM INT", False)])  # fmt: skip
def test_only_a_second_ctrl_c_kills(world, names, kills, monkeypatch):
    monkeypatch.setattr(train, "WORLD", world)
    numbers = [getattr(signal, f"SIG{name}") for name in names.split()]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) if kills else nullcontext():
            with train.stop_requests() as stop:
                for number in numbers:
                    signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop == numbers[: len(numbers) - kills]


posix = pytest.mark.skipif(os.name == "nt", reason="no POSIX signals")
ENDLESS = "--steps 1000000 --eval-every 500000"


def start(*command, runs=1):
    """A process, when so many of its trainings have logged a line."""
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, *command], start_new_session=True, **pipes)
    while len([*Path().rglob("metrics.jsonl")]) < runs:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process


@posix
def test_sigterm_to_all_processes_saves_and_no_second_run_gets_in(ends, monkeypatch):
    """Batch systems signal the loader's workers, too. Until then the folder is locked."""
    monkeypatch.setattr(train, "train_step", pytest.fail)
    process = start(HERE / "train.py", *tiny(ENDLESS + " --workers 2"))
    ends(tiny(ENDLESS + " --resume"), "run is in use", training=True)
    os.killpg(process.pid, signal.SIGTERM)
    assert "--resume goes on" in process.communicate(timeout=120)[1].splitlines()[-1]
    assert process.returncode == 128 + signal.SIGTERM
    assert logged("run")[-1]["step"] == checkpoint("run")["step"] // 20 * 20 >= 20


@parametrize("what", ("loss", "weight", "output", "score"))
def test_what_is_not_finite_stops_and_is_not_saved(what, ends, monkeypatch):
    steps, real = iter(range(1, 100)), train.train_step
    last = 50 if what == "weight" else 60

    def spoilt(model, *rest):
        loss, norm = real(model, *rest)
        if next(steps) < last:
            return loss, norm
        if what == "weight":
            model.norm.weight.data[3] = math.inf
        if what == "output":
            model.register_forward_hook(lambda *_: (torch.tensor(math.nan), None))
        if what == "score":
            monkeypatch.setattr(tasks.Copy, "evaluate", lambda *_: {"tokens": math.nan})
        return loss * (math.nan if what == "loss" else 1), norm

    monkeypatch.setattr(train, "train_step", spoilt)
    words = f"step {last}: loss ", "smaller --lr"
    with interruption(last - 1):  # at 50 it would save, but not score
        ends(tiny("--steps 60 --eval-every 20"), *words, status=1, training=True)
    assert checkpoint("run")["step"] == logged("run")[-1]["step"] == 40


@parametrize("share", (1e-3, 1e3))
def test_gradients_are_clipped(share, monkeypatch):
    model, kept = small_model(), []

    def step():
        kept.append(math.hypot(*(p.grad.norm() for p in model.parameters())))

    optimizer = train.make_optimizer(model, ADAMW, "cpu")
    monkeypatch.setattr(optimizer, "step", step)
    part = some_tokens(), torch.ones(2, 24, dtype=torch.bool), share
    _, norm = train.train_step(model, optimizer, [part], 0.1, nullcontext())
    assert (norm > 1) == (share > 1)
    assert kept == [pytest.approx(min(1, norm.item()), rel=1e-4)]


def test_learning_rate_schedule():
    cosine = dict(steps=110, warmup=10, lr=2.0, schedule="cosine")
    rates = [train.learning_rate(step, cosine) for step in (0, 4, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.2, 1, 2, 2, 1.1, 0.2])
    linear = dict(cosine, schedule="linear", warmup=0)
    assert [train.learning_rate(step, linear) for step in (0, 55, 110)] == [2, 1, 0]


@parametrize("name", ("depo", "mano"))
def test_parts_of_a_batch_add_up_to_its_loss(name, monkeypatch):
    task = make_task(name, "nano")
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=2, d_model=16)
    model = CanonGPT(config).double()

    def loss(tokens, mask):
        return model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()

    batch = task.batch(5, 7, 12)
    for world, parts in product((1, 2, 3), (1, 2)):
        monkeypatch.setattr(train, "WORLD", world)
        mean, rows = 0, []  # of the processes
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            for tokens, mask, share in zip(*train.Stream(task, 5, 12, parts)[7]):
                mean += loss(tokens, mask) * share.item() / world
                rows += tokens.tolist()
        assert sorted(rows) == sorted(batch[0].tolist())
        assert mean == pytest.approx(loss(*map(torch.from_numpy, batch)), rel=1e-6)
    with pytest.raises(SystemExit):  # not a multiple of the processes
        train.prepare([*TINY, "--batch-size", "5"])


@posix
def test_two_processes_train_as_one_does(here):
    """In three parts each. A signal stops both at the same step; then one goes on."""
    flags = "--task depo --preset nano --canon ac --device cpu --no-compile --batch-size 6"
    flags = f"{flags} --eval-size 16 {ENDLESS} --out".split()
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    process = start(*torchrun, HERE / "train.py", *flags, "run", "--grad-accum", "3")
    process.terminate()
    assert process.communicate(timeout=120)[1].count("--resume goes on") == 1
    steps = checkpoint("run")["step"]
    assert json.loads(Path("run/config.json").read_text())["processes"] == 2
    for words in (["run", "--resume"], ["one"]):
        with interruption(steps + 19), pytest.raises(SystemExit):
            train.main([*flags, *words])
    run, one = ({line["step"]: line["loss"] for line in logged(out)} for out in ("run", "one"))
    assert run == pytest.approx(one, rel=1e-4) and [*run] == [*range(20, steps + 21, 20)]


BAD_FLAGS = """task sort; preset huge; mixer conv; steps 0; steps many; lr 0; lr nan; batch-size 0;
warmup -1; weight-decay -0.1; seed -1; seed 4294967296; workers -1; workers 1000; eval-every 0;
eval-size 0; grad-accum 0; schedule step; device abacus; cannon abcd; dtype float16;
mixer gla --pos alibi; mixer gla --n-head 4; task capo --exposures 3 --steps 5;
task depo --K 5; n-head 3 => d_model = 16; block-size 9 => block_size = 9;
out= => out = ''; compile => C++ compiler; grad-accum 3 => a multiple of 3;
resume => run has no ckpt.pt; out mine => mine is not empty"""


@parametrize("bad", re.split(r";\s", BAD_FLAGS))
def test_bad_flags_are_refused_before_anything_is_written(bad, ends, monkeypatch):
    """The line has the words behind =>, else the last flag, or its field, and its value."""
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: False)
    monkeypatch.setattr(train, "train_step", pytest.fail)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    flags, _, words = f"--{bad}".partition(" => ")
    usual = ["--preset", "nano"] if "task" in bad else tiny("--steps 5")  # Copy's sizes
    flag, value = flags.split()[-2:] if not words else ("--", words)
    line = ends([*usual, *flags.split()], value)
    assert flag[2:].replace("-", "_") in line.replace("-", "_")


@parametrize("native", (True, False))
def test_the_gpu_decides_about_bfloat16(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "gpu_has_bfloat16", lambda: native)
    args = train.prepare(["--task", "copy"])[0]
    assert (args.device, args.preset, args.compile) == ("cuda", "small", True)
    assert args.dtype == ("bfloat16" if native else "float32")
    with nullcontext() if native else pytest.raises(SystemExit, match="2"):
        train.prepare("--task copy --dtype bfloat16".split())


@parametrize("dtype", ("float32", "bfloat16"))
def test_training_and_scoring_use_the_chosen_dtype(dtype, here, monkeypatch):
    seen, attend = set(), F.scaled_dot_product_attention

    def spy(q, *rest, **options):
        seen.add((torch.is_grad_enabled(), q.dtype))
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    train.main(tiny(f"--steps 2 --dtype {dtype}"))
    assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}
    assert {w.dtype for w in checkpoint("run")["model"].values()} == {torch.float32}


def test_a_folder_with_another_run_is_refused(ends):
    train.main(tiny("--steps 5"))
    ends(tiny("--steps 5"), "run is not empty: --resume goes on")
    words = 'configuration, not "canon": "a", "steps": 6, "dtype": "bfloat16", "seed": 4'
    ends(tiny("--steps 6 --canon a --seed 4 --dtype bfloat16 --resume"), words)


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


def test_damaged_checkpoints_are_refused(ends):
    train.main(tiny("--steps 2"))
    good, path = checkpoint("run"), Path("run/ckpt.pt")
    data, first = path.read_bytes(), next(iter(good["model"].values())).numpy().tobytes()
    weights = {**good["model"], next(iter(good["model"])): torch.zeros(3, 3)}
    for damage in (data[:-100], data.replace(first, first[::-1]), [1], {"recipe": good["recipe"]},
                   {**good, "model": weights}, {**good, "optimizer": {}}):  # fmt: skip
        path.write_bytes(damage) if type(damage) is bytes else torch.save(damage, path)
        ends(tiny("--steps 2 --resume"), "ckpt.pt is damaged")


@parametrize("error, words", [
    (PermissionError(13, "Permission denied", "x"), ["Permission denied: 'x'"]),
    (MemoryError(), ["MemoryError", "--batch-size"]), (RuntimeError("a bug of one's own"), []),
    (torch.OutOfMemoryError("CUDA out of memory. Tried .."), ["out of memory", "--grad-accum"]),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: .."), ["allocate", "--grad-accum"]),
])  # fmt: skip
def test_errors_of_the_system_are_one_line_and_bugs_are_not(error, words, ends):
    with interruption(3, error), nullcontext() if words else pytest.raises(RuntimeError):
        ends(tiny("--steps 9"), *words, status=1, training=True)


def test_a_full_disk_leaves_the_last_checkpoint(ends, monkeypatch):
    saves, write = iter(range(1, 100)), Path.write_bytes

    def full(path, data):
        if path.name == "ckpt.pt.new" and next(saves) == 3:
            write(path, data[:99])
            raise OSError(28, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    words = "No space left on device: 'run/ckpt.pt.new'"
    ends(tiny("--steps 40 --eval-every 10"), words, status=1, training=True)
    assert checkpoint("run")["step"] == 10 and not Path("run/ckpt.pt.new").exists()


def test_run_names_tell_runs_apart():
    def name(flags, task="copy"):
        return train.prepare(f"--task {task} --preset nano --device cpu {flags}".split())[0].out

    apart = """--seed 1; --canon abcd; --canon abcd --canon-silu; --canon abcd --canon-no-residual;
        --lr 0.1; --n-layer 2; --mlp silu; --dtype bfloat16; --tie-embeddings;""".split(";")
    assert len({name(flags) for flags in apart}) == len(apart)
    for same in ("", "--mlp swiglu --canon-kernel 4", "--workers 3 --grad-accum 2 --resume"):
        assert name(same) == Path("out/copy_nano_rope_bare_s0")
    flags = "--mixer gdn,attention --canon ca --word-len 5 6 --seed 3"
    assert name(flags, "depo2") == Path("out/depo2_nano_gdn-attention_rope_ac_word-len=5-6_s3")


# ---- 5. plot.py ------------------------------------------------------------


def made_run(*evals, seed=0, final=True, dtype="float32", lr=0.01, **model):
    """evals: an evaluation's k=1, k=2 .. each, after 10, 20 .. steps."""
    points = [{"step": 10 * i, "eval": {f"k={k}": s for k, s in enumerate(scores, 1)}}
              for i, scores in enumerate(evals, 1)]  # fmt: skip
    return {"task": {"name": "depo1", "N": 6}, "training": {"lr": lr}, "dtype": dtype,
            "model": vars(Config(vocab_size=9, block_size=9, **model)), "preset": "nano",
            "seed": seed, "evals": points, "seconds": 3.0 if final else None}  # fmt: skip


def write_run(folder, run):
    Path(folder).mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps(run))
    log = run["evals"] + [{"final": True, "seconds": 3.0}] * (run["seconds"] is not None)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def test_runs_are_read_drawn_and_packed(here, capsys):
    train.main([*TINY, "--steps", "2", "--out", "out/copied"])
    write_run("out/a0", made_run((0.2, 0.1), (0.4, 0.2)))
    write_run("out/a1", made_run((0.4, 0.2), (0.625, 0.4), seed=1))
    write_run("out/b0", made_run((0.9, 0.45), final=False, canon="abcd", canon_silu=True))
    write_run("out/b1", made_run((0.8, 0.4), seed=1, canon="abcd", canon_silu=True))
    write_run("out/unborn", made_run(final=False))
    with open("out/a0/metrics.jsonl", "a") as file:
        file.write('{"step": 30, "ev')  # half written
    Path("out/empty").mkdir()
    Path("out/figure.png").touch()
    paths = [str(path) for path in Path("out").iterdir()]
    assert len(plot.read_all(paths * 2)) == 5
    capsys.readouterr()
    plot.main([*paths, "--out", "one", "--save", "packed.json"])
    printed = capsys.readouterr().out
    assert "| RoPE | 0, 1 | 40%, 62% | 20%, 40% |" in printed and "| RoPE | 0 | 0% | " in printed
    assert "| RoPE + Canon-ABCD (act) (still training) | 0, 1 | 90%, 80% | 45%, 40% |" in printed
    plot.main(["packed.json", "--out", "two"])
    assert capsys.readouterr().out == printed.replace("one/", "two/")
    assert {"copy_nano.png", "depo1_nano.png"} <= {path.name for path in Path("two").iterdir()}


DAMAGE = [("config.json", d) for d in ("[]", "\0", "[" * 20_000, {"model": {}}, {"training": [1]})]
DAMAGE += [("config.json", {"task": {"name": "depo1"}})]
DAMAGE += [("metrics.jsonl", '{"step":1,"eval":{"a":null}}\n{"step":2,"eval":{"a":1}}\n')]
DAMAGE += [("metrics.jsonl", d) for d in ("oops\n", '{"step": 1, "eval": [1]}\n')]
DAMAGE += [("", d) for d in ("", '{"runs": 5}', '{"runs": [{"task": 1}]}')]


@parametrize("file, damage", DAMAGE, ids=lambda value: str(value)[:20])
def test_damaged_files_are_named_and_left_out(file, damage, ends, capsys):
    for folder in ("good", "bad"):
        write_run(folder, made_run((0.2,), (0.4,)))
    path = Path("bad" if file else "packed.json")
    if isinstance(damage, dict):
        damage = json.dumps(json.loads((path / file).read_text()) | damage)
    (path / file).write_text(damage)
    alone = ends([str(path), "--out", "figures"], f"plot.py: {path} ", main=plot.main)
    assert len(plot.read_all([path, "good"])) == 1 and capsys.readouterr().err == alone


MODEL_NAMES = {
    "RoPE": "", "NoPE + Canon-AC": "pos=nope canon=ac", "GLA": "mixer=gla",
    "GDN": "mixer=gdn no-short-conv", "GLA (conv)": "mixer=gla short-conv",
    "RoPE + Canon-ABCD (no-res, kernel 2)": "canon=abcd canon-no-residual canon-kernel=2",
    "GDN + Canon-AbCD": "mixer=gdn canon=acd",
    "Mamba2 (conv)": "mixer=mamba2",
    "Mamba2/RoPE(1/4)": "n-layer=2 mixer=mamba2,attention pos=rope4 no-short-conv",
    "GDN + Canon-ABCD (conv)": "mixer=gdn canon=abcd short-conv",
}  # fmt: skip


def test_models_are_named_as_in_the_paper():
    for name, flags in MODEL_NAMES.items():
        model = vars(train.prepare([*TINY, *(f"--{flag}" for flag in flags.split())])[2])
        assert plot.model_label(model) == name
        assert plot.model_label(model | {"canon_type": "mine"}) == name.replace("Canon", "mine")


def test_no_two_recipes_are_averaged():
    """What differs is in the label; order is by meaning and size; of one seed the later counts."""
    runs = [made_run((1.0,)), made_run((0.5,)), made_run((0.2,), dtype="bfloat16"),
            made_run((0.3,), lr=0.1)]  # fmt: skip
    assert {label: plot.last_scores(runs, "k=1") for label, runs in plot.models(runs).items()} == {
        "RoPE, dtype float32, rate 0.01": [0.5], "RoPE, dtype float32, rate 0.1": [0.3],
        "RoPE, dtype bfloat16, rate 0.01": [0.2]}  # fmt: skip
    runs[1]["model"] = runs[1]["model"] | {"canon_gated": True}
    assert list(plot.models(runs[:2])) == ["RoPE, canon_gated None", "RoPE, canon_gated True"]
    kinds = (dict(mixer="gla"), dict(canon="a"), {}, dict(pos="nope"))
    runs = [made_run((1.0,), n_head=1, d_model=d, **kind) for kind in kinds for d in (64, 8)]
    names = ("RoPE", "RoPE + Canon-A", "NoPE", "GLA")
    assert list(plot.models(runs)) == [f"{name}, dims {d}" for name in names for d in (8, 64)]


def test_figures_show_the_numbers():
    """Medians as far as all seeds have come, each seed, chance, names at ends."""
    runs = [made_run((0.2, 0.1), (0.4, 0.2), (0.5, 0.3)), made_run((0.4, 0.2), (0.8, 0.4), seed=1)]
    groups = plot.models([*runs, made_run((0.9, 0.8, 0.5), canon="abcd", pos="nope")])
    figure = plot.curves(groups, title="Found " * 30)
    titles = [axis.get_title("left") for axis in figure.axes]
    assert titles == ["1 hop, %", "2 hops, %", "3 hops, %"]
    assert "\n" in figure.get_suptitle() and "N 6" in figure.get_supxlabel()
    lines = [line.get_ydata() for line in figure.axes[0].lines]
    expected = [[20, 40, 50], [40, 80], [30, 60], [90], [90], [20, 20]]  # at last chance, 1 of 5
    assert all(np.allclose(line, y) for line, y in zip(lines, expected, strict=True))
    assert [text.get_text() for text in figure.axes[2].texts] == ["NoPE + Canon-ABCD", "chance"]
    assert [line.get_linestyle() for line in figure.axes[0].lines[2:5]] == ["-", "--", "--"]
    axis = plot.bars(groups).axes[0]
    assert np.allclose([bar.get_width() for bar in axis.patches], [65, 90])
    assert [text.get_text() for text in axis.texts] == ["65%", "90%", "chance"]
    grey, colour = (np.ptp(colour) for colour, _ in plot.style(groups).values())
    assert grey == 0 < colour
    axis = figure.axes[0]
    plot.name_ends(axis, [(y, 1, "", "red") for y in (50, 0, 50, 0)])  # would overlap
    places = [text.get_position()[1] for text in axis.texts[-4:]]
    assert np.allclose(places, [0.5, 0.425, 0.075, 0])
    plot.plt.close("all")


def test_inside_shows_what_attention_computes(here, ends):
    flags = "--pos nope --canon ad --n-layer 4 --n-head 4 --mixer gla,attention"
    train.main(tiny(f"{flags} --steps 1", "a"))
    _, task, config, _ = train.prepare(tiny(flags))
    model = CanonGPT(config)
    model.load_state_dict(checkpoint("a")["model"])
    tokens, mask = task.documents(default_rng(0), 100)[0]
    asked = [t for t in range(len(tokens) - 1) if mask[t + 1]][-12:]
    x, expected = model.embed(torch.tensor([tokens[:-1]])), {}
    for number, block in enumerate(model.blocks, 1):
        if number % 2:
            x = block(x)
            continue
        qkv = block.mixer.qkv(block.canon_a(block.norm1(x)))
        q, k, _ = qkv.unflatten(-1, (3, config.n_head, -1)).unbind(2)  # (1, T, H, K)
        logits = torch.einsum("ithk,ishk->hts", q, k) * q.shape[-1] ** -0.5
        later = torch.ones_like(logits[0], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(later, -math.inf).softmax(-1)[:, asked]
        expected |= {f"layer {number}, head {n}": w for n, w in enumerate(weights, 1)}
        x = block(x)
    for head in sorted(expected, key=lambda head: expected[head].max(dim=1).values.sum())[:3]:
        del expected[head]
    canons = [canon.weight for block in model.blocks for canon in (block.canon_a, block.mlp.canon)]
    means = torch.stack([weight.abs().mean(1) for weight in canons], dim=1)
    axes = plot.inside(Path("a")).axes
    assert [axis.get_title("left") for axis in axes[:-1]] == [*expected]
    for axis, values in zip(axes, [*expected.values(), means], strict=True):
        assert np.allclose(axis.images[0].get_array(), values.detach(), atol=1e-6)
    labels = [label.get_text() for label in axes[-1].get_xticklabels()]
    assert labels == ["1A", "1D", "2A", "2D", "3A", "3D", "4A", "4D"]
    plot.plt.close("all")
    plot.main(["--inside", "a", "--out", "figures"])
    assert Path("figures/a_inside.png").stat().st_size > 0
    train.main(tiny("--mixer gla --steps 1", "b"))
    Path("c").mkdir()
    for folder in "bcd":
        ends(["--inside", folder, "--out", "figures"], f"{folder} ", main=plot.main)


def test_the_last_hop_ends_at_the_answer(monkeypatch):
    task = make_task("depo0", "nano", N=5, K=2)

    def watch(model, tokens):
        text, ends = torch.tensor([*tokens, 0, 0]), torch.zeros(len(tokens))
        ends[2:16:3] = 1
        return torch.stack([(text[i : i + len(ends), None] == text[:-2]) * ends for i in (2, 1)])

    monkeypatch.setattr(plot, "watch", watch)
    hops = runpy.run_path(str(HERE / "results/depo0/hops.py"))["attention_to_hops"](task, None)
    assert all(np.allclose(s[i], [0, 0.8]) for i, s in enumerate(hops.values()))


# ---- 6. results/reproduce.py -----------------------------------------------

CLAIMS = [claim for group in reproduce.GROUPS.values() for claim in group.claims]


@parametrize("preset", ("nano", "small"))
@parametrize("name", reproduce.GROUPS)
def test_a_comparison_is_of_different_valid_runs(name, preset):
    """`plan` refuses others. The claims and the title are about its models."""
    group = reproduce.GROUPS[name]
    planned = reproduce.plan(group, ["--preset", preset, "--device", "cpu"], 1, [2e-3, 4e-3])
    steps = {run[0].out: run[3]["steps"] for run in map(train.prepare, planned)}
    assert len(steps) == len(planned) == 2 * len(group.models) * len(group.tasks)
    named = {model for *_, rule in group.claims for model in reproduce.names_in(rule)}
    assert named | set(re.findall("{(.+?)#?}", group.figure[-1])) <= {*group.models, "score"}
    once = min(steps.values())
    assert name != "depth" or sorted(steps.values()) == [once] * 8 + [2 * once] * 4


def scored(task, score, values):
    task = {"name": task, "N": 10, "K": 4}
    return [{"task": task, "evals": [{"eval": {score: value}}]} for value in values]


def verdict(claim, seeds):
    score = claim[-2]
    task = score.split(": ")[0] if ": " in score else {"sequences": "copy"}.get(score, "depo0")
    best = {model: scored(task, score, values) for model, values in seeds.items()}
    return reproduce.check(claim, best, "")[-1].split(":")[0]


@parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[0]} {claim[1]}")
def test_every_claim_can_come_out_each_way(claim):
    rng, seen, names = default_rng(0), {}, reproduce.names_in(claim[-1])
    levels = {"hops": (0, 1, 2, 4), "step": (100, 900, math.inf)}
    levels = levels.get(claim[-2][:4], (0.01, 0.1, 0.4, 0.6, 0.97, 1))
    for _ in range(9_000):
        values = rng.choice(levels, (len(names), 3 if rng.random() < 0.3 else 1))
        seeds = {model: [*row] * (3 // len(row)) for model, row in zip(names, values)}
        seen[verdict(claim, seeds)] = seeds
        if len(seen) == 3:
            break
    assert set(seen) == {"holds", "does not hold", "undecided"}
    for seeds in seen.values():
        for few in [{name: seeds[name][:n]} for name in names for n in (0, 2)]:
            assert verdict(claim, seeds | few) == "undecided"


RULES = """a > b: 8 9 9, 1 2 7.9: holds
a > b: 1 2 2, 3 4 5: does not hold
a > b: 3 4 5, 1 2 3: undecided
a > b: 8 9, 1 2 7: undecided: too few seeds
a > b: 8 8 9, 9 9 9: undecided: at the ceiling
a > b: 1 1 1, 0 0 0: undecided: at chance
a > b; a > c: 3 3 3, 1 1 1, 3 3 3: undecided
a > b; a > c: 3 3 3, 3 3 3, 4 4 4: does not hold
a >= 2 x b: 4 4 4, 2 2 2: holds
a >= 2 x b: 4 4 4, 3 3 3: does not hold
a >= 2 x b: 4 4 4, 1 1 1: undecided
a >= 3 x b: 2 2 2, 1 1 1: undecided
a > 50% from b to c: 4 4 4, 1 2 3, 6 6 6: holds
a > 50% from b to c: 5 5 5, 1 2 6, 6 6 6: undecided
a >= 300%: 3 4 5: holds
a >~ b: 3.95 4 4, 3 4 5: holds
a >~ b: 3.9 3.9 3.9, 3 4 5: does not hold
a sooner than b: 1 2 3, 4 5 inf: holds
a at chance: 0 1 1: holds
a at chance: 0 1 2: undecided
a < 99%: .1 .1 .1: undecided"""


@parametrize("example", RULES.splitlines())
def test_rules_by_example(example):
    """Rule: seeds of a, b, c: verdict. Chance is 1, the ceiling 8."""
    rule, seeds, expected = example.split(": ", maxsplit=2)
    scores = {name: [*map(float, part.split())] for name, part in zip("abc", seeds.split(","))}
    assert reproduce.decide(rule, scores, 1, 8) == expected


def test_chance_is_that_of_the_task_with_the_score():
    assert verdict(("answers", "a at chance"), {"a": [0.1, 0.15, 0.16]}) == "holds"  # 1/9 + 0.05
    best = {model: [*scored("depo1", "k=1", [1]), *scored("lano", "s", [value] * 3)]
            for model, value in (("a", 0.15), ("b", 0.1))}  # fmt: skip
    assert reproduce.check(("s", "a > b"), best, "")[-1] == "holds"


def test_runs_find_their_models_at_the_best_rate(here, monkeypatch):
    """Finished ones, by recipe: other steps or dtypes do not count. Your own replace ours."""
    monkeypatch.setattr(reproduce, "HERE", Path("results"))
    group, rest = reproduce.GROUPS["depth"], ["--preset", "nano", "--device", "cpu"]

    def run(model, score, seed, flags="", packed=None, final=True, early=0):
        words = reproduce.command("depo0", group.models[model], rest)
        prepared = train.prepare([*words, "--seed", str(seed), *flags.split()])
        scores = (0.3, early, 1.0), (min(score + 0.5, 0.9), score, 1.0)
        made = made_run(*scores, final=final) | train.recipe_of(*prepared)
        if not packed:
            return write_run(prepared[0].out, made)
        Path("results", packed).mkdir(parents=True)
        Path("results", packed, "runs.json").write_text(json.dumps({"runs": [made]}))

    for seed in range(3):
        run("RoPE", 0.5, seed), run("RoPE", 0.9, seed, "--lr 1e-4"), run("NoPE", 0.1, seed)
        for lr in (0.1, 0.3, 0.2):  # a tie: the one that learns sooner is best
            run("RoPE + Canon", 0.4, seed, f"--lr {lr}", early=lr)
    run("RoPE", 1.0, 0, "--lr 1e-5")  # best, but of one seed
    run("RoPE", 0.0, 0, packed="ours"), run("RoPE", 1.0, 5, "--dtype bfloat16")
    run("NoPE", 1.0, 7, "--steps 9"), run("NoPE", 0.2, 3, packed="ours/too")
    run("NoPE", 1.0, 8, final=False)
    best, tried = reproduce.represent(group, rest, reproduce.all_runs(), [])
    assert {model: plot.last_scores(runs, "k=2") for model, runs in best.items()} == {
        "RoPE": [0.9] * 3, "NoPE": [0.1, 0.1, 0.1, 0.2], "RoPE + Canon": [0.4] * 3}  # fmt: skip
    assert best["RoPE + Canon"][0]["training"]["lr"] == 0.3
    ends = sorted(plot.last_scores(runs, "k=2")[0] for runs in tried.values())
    assert ends == [0.1, 0.4, 0.4, 0.4, 0.5, 0.9, 1]
    good, bad = (best[model][0]["evals"][-1]["eval"] for model in ("RoPE", "NoPE"))
    assert good["answers"] == good["main"] == good["depo0: answers"] == pytest.approx(2.8 / 3)
    assert [run["steps to k=1"] for run in (good, bad)] == [20, math.inf]
    assert [run["hops mastered"] for run in (good, bad)] == [3, 0]


SWEEP = f"copy --seeds 1 --jobs 2 {' '.join(TINY[2:])}".split()


@posix
def test_ctrl_c_ends_a_sweep_and_saves_its_runs(here):
    sweep = start(HERE / "results/reproduce.py", *SWEEP, *ENDLESS.split(), runs=2)
    os.killpg(sweep.pid, signal.SIGINT)
    assert "the same command goes on" in sweep.communicate(timeout=120)[1]
    assert sweep.returncode == 130
    for run in Path("out").iterdir():
        assert checkpoint(run)["step"] // 20 * 20 == train.steps_done(run)[0] >= 20


def test_a_sweep_goes_on_where_it_stopped(here, monkeypatch, capsys):
    group = reproduce.GROUPS["copy"]._replace(models={"a": "", "b": "--canon abcd"})
    monkeypatch.setitem(reproduce.GROUPS, "copy", group)
    sweep, started = [*SWEEP, "--steps", "40"], []
    reproduce.main([*sweep, "--dry-run", "--lr", "1e-2"])
    finished, cut_off = (line.split()[2:] for line in capsys.readouterr().out.splitlines())
    assert "--lr" not in finished
    train.main(finished)
    with interruption(25), pytest.raises(SystemExit, match="143"):
        train.main(cut_off)
    for _ in range(2):  # the second time nothing is left
        with patch.object(subprocess, "Popen", wraps=subprocess.Popen) as popen:
            with pytest.raises(SystemExit, match="False"):
                reproduce.main(sweep)
        started.append([call.args[0][2:] for call in popen.call_args_list])
        assert "| b | 0 |" in capsys.readouterr().out and Path("out/copy_nano.png").exists()
    assert started == [[[*cut_off, "--resume"]], []]
    (config,) = Path("out").glob("*abcd*/config.json")
    config.write_text(config.read_text().replace('"N": 8', '"N": 7'))  # another run of this name
    assert reproduce.progress(config.parent, cut_off) == (40, False)


BAD = """tasks sort; tasks; plot; plot nowhere; plot .; plot good --save no/where;
plot good --out file; reproduce nothing; reproduce copy --seeds 0; reproduce copy --jobs -1;
reproduce copy --lr fast; reproduce copy --lr -1; reproduce copy --seed 1;
reproduce copy --n-layer 2; reproduce copy --program none.py; reproduce copy --draw;
reproduce depth --canon abcd; reproduce depth --N 100"""


@parametrize("words", BAD.split(";"))
def test_bad_words_are_refused(words, ends, monkeypatch):
    write_run("good", made_run((0.2,)))
    Path("file").touch()
    monkeypatch.setattr(reproduce, "HERE", Path("nowhere"))
    program, *words = words.split()
    small = ["--preset", "nano", "--device", "cpu"] * (program == "reproduce")
    ends([*words, *small], main=globals()[program].main)


# ---- 7. assignment/ --------------------------------------------------------

LAST = f"# exercise {len(grade.EXERCISES)}\n"
solutions = any(LAST in (HERE / name).read_text() for name in grade.FILES)
needs_solutions = pytest.mark.skipif(not solutions, reason="this is an assignment")


@needs_solutions
@parametrize("n", (1, 7))
def test_exercises_pass_once_solved_in_order(n, tmp_path):
    """The first n pass, and all tests of the others fail."""
    make.write_assignment(tmp_path / "copy", n)
    for exercises, ends in ((grade.EXERCISES[:n], "passed"), (grade.EXERCISES[n:], "failed")):
        selected = " or ".join(f"({tests})" for _, tests in exercises)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-k", selected]
        done = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True)
        only = rf"(\d+) {ends}, (\d+ skipped, )?\d+ deselected(, \d+ warnings?)? in "
        summary = re.match(only, done.stdout.splitlines()[-1])
        assert summary and int(summary[1]) >= len(exercises), done.stdout


@needs_solutions
def test_assignments_are_written_once_without_solutions(ends):
    folder, asked = Path("new/assignment"), []
    make.main([str(folder)])
    assert (folder / ".gitignore").exists() and not (folder / ".git").exists()
    for name in grade.FILES:
        text, solved = (folder / name).read_text(), (HERE / name).read_text()
        blank = r'^ +raise NotImplementedError\("exercise (\d+)\b.*"\)$'
        blanks = re.findall(blank, text, re.MULTILINE)
        assert len(blanks) == len(re.findall(r"^ +# exercise \d+\b", solved, re.MULTILINE))
        assert not re.search("^ *# (end of )?exercise", text, re.MULTILINE)
        assert make.without_solutions(solved, len(grade.EXERCISES)) == solved
        compile(text, name, "exec")
        asked += map(int, blanks)
    assert {*asked} == {*range(1, len(grade.EXERCISES) + 1)}
    for bad in ([str(folder)], [], [str(HERE / "new")], ["x", "--solved", "13"]):
        ends(bad, main=make.main)


@needs_solutions
def test_a_submission_is_graded_by_our_tests(ends, monkeypatch, capsys):
    """Rotary is wrong in the submission; its own tests are not asked."""
    make.write_assignment(Path("theirs"), 13)
    text = Path("theirs/canon_gpt.py").read_text()
    wrong = text.replace("x1 * cos - x2 * sin", "x1 * cos + x2 * sin")
    Path("theirs/canon_gpt.py").write_text(wrong)
    Path("theirs/test_canon.py").write_text("def test_rotary_depends(): pass")
    monkeypatch.setattr(grade, "EXERCISES", grade.EXERCISES[2:4])
    assert wrong != text and grade.main(["--of", "theirs"]) == 1
    streams, rotary = capsys.readouterr().out.splitlines()
    assert "solved" in streams and "open" in rotary
    for bad in (["0"], ["3"], ["--of", "."], ["x"]):
        ends(bad, main=grade.main)


# ---- 8. benchmarks/ --------------------------------------------------------

BENCHMARKS = {"generators": len(tasks.TASKS), "convolution": 3, "step": 3, "mixers": 7}  # rows
if kernels.triton and [*map(int, kernels.triton.__version__.split(".")[:2])] >= [3, 3]:
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
    for package in ("fla", "causal_conv1d", "transformers"):
        assert done.stdout.count(f"No module named '{package}'") <= 2


def test_benchmark_cut_short_keeps_its_rows(tmp_path):
    done = run_benchmarks(tmp_path, ["generators"], "generators.TASKS['no such task'] = None")
    assert done.returncode != 0 and "TypeError" in done.stderr
    rows = saved_rows(tmp_path / "generators.jsonl")
    assert [row["what"] for row in rows] == [*tasks.TASKS]


# ---- 9. What README and results/README.md show -----------------------------


def python_blocks(file):
    return re.findall(r"^```python\n(.*?)^```$", (HERE / file).read_text(), re.M | re.S)


def test_the_layer_in_readme():
    (code,) = python_blocks("README.md")
    exec(code, names := {})
    x, canon = torch.randn(2, 9, 6), names["Canon"](6)
    assert canon.weight.shape == (4, 6) and canon.weight.abs().max() <= 0.5
    assert torch.equal(canon(x), kernels.causal_conv(x, canon.weight))


OWN = (("--mixer retention", "retention + Canon-ABCD"), ("--canon-type gated", "RoPE + gated-ABCD"),
       ("--task reverse", "RoPE + Canon-ABCD"))  # fmt: skip


@parametrize("number", range(3), ids=("mixer", "canon", "task"))
@patch.dict(MIXERS)
@patch.dict(CANONS)
@patch.dict(tasks.TASKS)
def test_own_things_are_trained_and_drawn(number, here, monkeypatch):
    code, (flags, label) = python_blocks("results/README.md")[number], OWN[number]
    assert code.count("\n") <= 25
    if "--task" not in flags:
        flags += " --task copy --N 8 --block-size 17"
    flags += " --canon abcd --preset nano --steps 2 --device cpu --no-compile --eval-size 4"
    monkeypatch.setattr(sys, "argv", ["own.py", *flags.split()])
    exec(code, {"__name__": "__main__", "__file__": "own.py"})
    (run,) = plot.read_all(Path("out").iterdir())
    assert plot.model_label(run["model"]) == label
    assert run["command"].startswith("python own.py ") and run["seconds"] is not None
    model, tokens = CanonGPT(Config(**run["model"])).double(), some_tokens(1, 16) % 9
    assert_close(streamed(model, tokens, (5, 1, 10))[0], model(tokens)[0])


def test_the_tables_shown_are_of_the_shipped_runs(here, capsys):
    text = "".join(path.read_text() for path in HERE.glob("results/*.md"))
    shown = [(name, "nano") for name in "copy depth fewer tasks mlp families".split()]
    for name, preset in (*shown, ("copy", "small")):
        with pytest.raises(SystemExit, match="0|False"):
            reproduce.main([name, "--draw", "--preset", preset, "--device", "cpu", "--out", "x"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 40 and [row for row in rows if row not in text] == []
    reproduce.main(["claims", "--out", "x"])
    assert Path("x/claims.md").read_text() == (HERE / "results/claims.md").read_text()
