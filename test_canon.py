"""The tests:   python -m pytest

By file, from the inside out. Fast code is compared with slow code that is obviously right, written
here from the definitions; properties are tried on random shapes.
"""

# ruff: noqa: E402, E731

import dataclasses
import gc
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, combinations, islice, permutations, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HERE = Path(__file__).parent

import canon_gpt
import kernels
import plot
import sample
import tasks
import train
from canon_gpt import Attention, Block, Canon, CanonGPT, Config, heads, linear_recurrence
from kernels import causal_conv, causal_conv_reference, relative_error, value_and_gradients
from tasks import Document, make_task

parametrize = pytest.mark.parametrize


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
    """assert_close, with a message of one line that names what was compared."""

    def message(reason):
        return f"{what}: {' '.join(reason.split())}"

    assert_close(got, want, msg=message, **tolerances)


# ---- 1. kernels.py ---------------------------------------------------------


needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
PYTORCH, TRITON = "causal_conv_pytorch", "causal_conv_triton"
GATED = "causal_conv_gated_triton"
FORMS = ("causal_conv_reference", PYTORCH, pytest.param(TRITON, marks=needs_triton))
SMALL = [(1, 1, 2), (2, 2, 40), (2, 33, 6)]  # two have fewer tokens than the kernel
LARGE = (2, 260, 130)  # several segments and strips in each of Triton's kernels


def conv_inputs(B, T, D, kernel=4, dtype=torch.float32):
    """x (B, T, D), weight (kernel, D) and dy (B, T, D).

    All are parts of wider tensors, as x and dy are after a projection, and x of a longer one.
    """
    x = torch.randn(B, T + 2, 2 * D + 1, dtype=dtype, device=DEVICE)[:, 1:-1, D : 2 * D]
    weight = torch.empty(kernel, D + 1, device=DEVICE).uniform_(-0.5, 0.5)[:, :D]
    dy = torch.randn(B, T, D + 3, dtype=dtype, device=DEVICE)[..., :D]
    return x, weight, dy


def conv_exact(x, weight, dy, residual=True, definition=causal_conv_reference):
    """(y, dx, dw) of a definition in float64."""
    return value_and_gradients(definition, x.double(), weight.double(), dy.double(), residual)


def test_convolution_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[2.0], [3.0]])  # z_t = 2 h_t + 3 h_{t-1}
    z = torch.tensor([[[2.0], [23.0], [230.0]]])
    assert_same("without residual", causal_conv_reference(x, weight, residual=False), z)
    assert_same("with residual", causal_conv_reference(x, weight), x + z)


KERNEL_SIZES = {PYTORCH: (1, 2, 3, 4, 7), TRITON: (1, 2, 3, 4), GATED: (3, 4)}


def cases(name, dtype):
    """Yield (x, weight, dy), residual and what is tried, for a form of the convolution."""
    if dtype == torch.float32:
        tried = [(LARGE, 4, True), (SMALL[2], 4, False)]
        tried += product(SMALL, KERNEL_SIZES[name], (True,))
    else:
        tried = [((1, *LARGE[1:]), 4, True)]
    for shape, kernel, residual in tried:
        what = f"shape {shape}, kernel {kernel}, residual {residual}"
        yield conv_inputs(*shape, kernel, dtype), residual, what


def assert_rounded(what, got, exact, dtype):
    error = relative_error(got, exact)
    assert error <= kernels.LIMITS[dtype], f"{what}: relative error {error:.1e}"


@parametrize("dtype", kernels.LIMITS, ids=str)
@parametrize("name", FORMS[1:])
def test_convolution_equals_the_definition_in_float64(name, dtype):
    for (x, weight, dy), residual, what in cases(name, dtype):
        y = getattr(kernels, name)(x, weight, residual)
        assert y.dtype == dtype
        exact, _, _ = conv_exact(x, weight, dy, residual)
        assert_rounded(f"y, {what}", y.double(), exact, dtype)


@parametrize("dtype", kernels.LIMITS, ids=str)
@parametrize("name", [*FORMS[1:], pytest.param(GATED, marks=needs_triton)])
def test_gradients_equal_those_of_the_definition_in_float64(name, dtype):
    """With the gate, also the values."""
    definition = kernels.gated_reference if name == GATED else causal_conv_reference
    for (x, weight, dy), residual, what in cases(name, dtype):
        if name == GATED:
            dy = dy[..., : x.shape[2] // 2]
        got = value_and_gradients(getattr(kernels, name), x, weight, dy, residual)
        exact = conv_exact(x, weight, dy, residual, definition)
        for part, found, wanted in zip(("y", "dx", "dw"), got, exact):
            assert_rounded(f"{part}, {what}", found, wanted, dtype)


PLAIN_MLPS = [{}, dict(canon_residual=False)]
OTHER_MLPS = [dict(canon_silu=True), dict(canon_kernel=7)]
OTHER_MLPS += [dict(mlp="swiglu-relu2"), dict(mlp="silu")]


@needs_triton
@parametrize("options", PLAIN_MLPS + OTHER_MLPS, ids=str)
def test_one_kernel_does_a_plain_canon_d_and_the_gate(options, monkeypatch):
    layer = canon_gpt.MLP(Config(1, 1, d_model=8, canon="d", **options), budget=8).to(DEVICE)
    x = torch.randn(2, 5, 8, device=DEVICE)
    monkeypatch.setattr(kernels, "fits_triton", lambda x, weight: len(weight) <= 4)  # as on a GPU
    with patch.object(kernels, "forward_op", wraps=kernels.forward_op) as operator:
        y, in_a_stream = layer(x), streamed(layer, x, 5)
    assert_same("the MLP", y, in_a_stream)
    gated = [call.args[3] for call in operator.call_args_list]
    assert gated == ([] if "canon_kernel" in options else [options in PLAIN_MLPS, False])


@parametrize("name", FORMS)
def test_convolution_is_in_float32_under_autocast_and_for_half(name):
    conv = getattr(kernels, name)
    x, weight, dy = conv_inputs(2, 6, 16)
    want = value_and_gradients(conv, x, weight, dy)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_close(value_and_gradients(conv, x, weight, dy), want, atol=1e-5, rtol=1e-5)
        assert conv(x, weight).dtype == torch.float32
    low = x.half()
    assert torch.equal(conv(low, weight), conv(low.float(), weight).half())


@parametrize("name", ("causal_conv_reference", "causal_conv"))
def test_convolution_goes_on_after_a_tail(name):
    """With one token, which is fewer than the kernel's, and with nine. So do its gradients."""
    for kernel, residual, end in product((2, 3, 4, 7), (True, False), (9, 17)):
        x, weight, dy = conv_inputs(2, 17, 6, kernel)

        def at_once(x, weight, residual):
            return causal_conv_reference(x, weight, residual)[:, 8:end]

        def after_a_tail(x, weight, residual):
            return getattr(kernels, name)(x[:, 8:end], weight, residual, x[:, 9 - kernel : 8])

        want = conv_exact(x, weight, dy[:, 8:end], residual, at_once)
        got = conv_exact(x, weight, dy[:, 8:end], residual, after_a_tail)
        assert_same(f"y, dx or dw after a tail, kernel {kernel}", got, want)


@needs_triton
def test_operators_are_registered_properly():
    """PyTorch's own check: among others, that "fake" results have the real dtypes and strides."""
    x, weight, dy = conv_inputs(2, 5, 8, dtype=torch.bfloat16)
    other_way = x.mT.contiguous().mT, weight.bfloat16().mT.contiguous().mT
    for (x_in, w_in), dy_in, gated in (((x, weight), dy[..., :4], True), (other_way, dy, False)):
        torch.library.opcheck(torch.ops.canon.causal_conv, (x_in, w_in, True, gated))
        backward = torch.ops.canon.causal_conv_backward
        torch.library.opcheck(backward, (dy_in, x_in, w_in, False, gated))


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


def test_an_exported_convolution_is_right_at_any_length():
    layer, x = Canon(6, Config(1, 1, canon="a")), torch.randn(2, 20, 6)
    example = torch.randn(2, 9, 6)
    traced = torch.jit.trace(layer, example)
    traced.save_to_buffer()  # it could not be saved if it called Python
    lengths = ({1: torch.export.Dim("T", min=1, max=64)},)
    program = torch.export.export(layer, (example,), dynamic_shapes=lengths, strict=False)
    for file, T in product((traced, program.module()), (1, 2, 9, 20)):
        assert_same(f"{T} tokens", file(x[:, :T]), layer(x[:, :T]))


@needs_triton
def test_a_compiled_model_runs_the_operators(monkeypatch):
    """On a GPU, the definition takes five times as long as the kernels. Until torch 2.12, code that
    is compiled is told that it is being exported, and must not believe it."""
    torch.compile(kernels.is_exporting, backend="eager")()  # the compiler lists torch's functions
    told = torch.compiler.is_dynamo_compiling
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: told())
    monkeypatch.setattr(kernels, "fits_triton", lambda x, weight: True)  # as on a GPU
    found = []

    def count_operators(graph, example):
        names = [str(node.target) for node in graph.graph.nodes]
        found.append(sum(name.startswith("canon.causal_conv") for name in names))
        return graph.forward

    backend = aot_autograd(fw_compiler=count_operators, bw_compiler=count_operators)
    model = torch.compile(small_model(canon="abcd"), fullgraph=True, backend=backend)
    model(some_tokens(), some_tokens())[1].backward()
    assert found == [8, 8]  # forward and backward: four points in each of two layers


@parametrize("name", FORMS)
def test_torch_func_is_right_or_refused(name):
    """A gradient per sequence, with shared weights and with different ones. In forward mode, a
    derivative of 0 would be wrong in silence."""
    conv = getattr(kernels, name)
    x, weight, dy = conv_inputs(3, 5, 4)
    for w, axis in ((weight, None), (torch.randn(3, 4, 4, device=DEVICE), 0)):

        def loss(w, x, dy):
            return (conv(x[None], w) * dy).sum()

        got = torch.func.vmap(torch.func.grad(loss), (axis, 0, 0))(w, x, dy)
        each = w.expand(3, 4, 4) if axis is None else w
        want = [conv_exact(x[i : i + 1], each[i], dy[i : i + 1])[2] for i in range(3)]
        assert_same("dw", got.double(), torch.stack(want), atol=1e-5, rtol=1e-5)
    if name != "causal_conv_reference":
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(lambda x: conv(x, weight), (x,), (x,))


def test_a_tensor_of_another_class_takes_the_definition(monkeypatch):
    """A DTensor, say, loses what is written through a slice of a spread dimension."""
    x, weight, _ = conv_inputs(2, 6, 4)
    want = causal_conv(x, weight)
    monkeypatch.setattr(kernels, "causal_conv_pytorch", None)
    assert_close(causal_conv(torch.nn.Parameter(x), weight), want)


def test_convolution_refuses_shapes_that_do_not_fit():
    """A Triton kernel would read other memory than its arguments'."""
    x, weight = torch.zeros(2, 5, 3), torch.zeros(4, 3)
    for bad in (dict(weight=weight[:, :2]), dict(weight=weight, tail=x)):
        with pytest.raises(ValueError, match="have shapes"):
            causal_conv(x, **bad)


def test_kernels_py_is_imported_without_the_compiler():
    """It would take half of the time that our programs need to start."""
    check = "import sys, kernels; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=HERE).returncode == 0


def test_where_triton_fails_it_is_not_used():
    with patch.object(kernels, "forward_op", side_effect=RuntimeError("no C compiler")):
        assert not kernels.triton_works.__wrapped__(DEVICE)  # past the cache


@parametrize("factor, status", ((1, 0), (1.001, 1), (math.nan, 1)))
def test_kernels_py_finds_a_wrong_form(factor, status, monkeypatch):
    def form(x, weight, residual):
        """Wrong in dx only, between y and dw, which are right."""
        x.register_hook(lambda dx: factor * dx)
        return causal_conv_reference(x, weight, residual)

    monkeypatch.setattr(kernels, "causal_conv_pytorch", form)
    monkeypatch.setattr(kernels, "LIMITS", {torch.float32: 1e-5})
    monkeypatch.setattr(kernels, "triton", None)
    assert kernels.main() == status


# ---- 2. canon_gpt.py: Part I -----------------------------------------------


def small_model(**options):
    """Its weights are large enough for every path to matter."""
    settings = dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | options
    model = CanonGPT(Config(**settings))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.mul_(10)
    return model


def copies_by_meta(**options):
    """A small model, and two that began without numbers and got its weights."""
    model = small_model(**options)
    with torch.device("meta"):
        empty, assigned = small_model(**options), small_model(**options)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assigned.load_state_dict(model.state_dict(), assign=True)
    return model, empty, assigned


def some_tokens(B=2, T=24):
    return torch.randint(0, 19, (B, T))


def streamed(module, x, lengths):
    """What a module makes of x in pieces of these lengths."""
    state = canon_gpt.State()
    outputs = [module(piece, state=state) for piece in x.split(lengths, dim=1)]
    if isinstance(module, CanonGPT):
        outputs = [logits for logits, _ in outputs]
    return torch.cat(outputs, dim=1)


STREAMED = [dict(canon="abcd", canon_kernel=8, canon_silu=True), dict(canon="ab", mlp="none")]
STREAMED += [dict(pos=pos, canon="abcd", mlp="relu2") for pos in canon_gpt.POSITIONS]
STREAMED = [("attention", options) for options in STREAMED]
for mixer in ("gla", "mamba2", "gdn", "gdn,attention"):
    STREAMED += [(mixer, dict(canon=points)) for points in ("", "acd", "abcd")]


@torch.no_grad()
@parametrize("mixer, options", STREAMED, ids=str)
def test_models_give_the_same_in_pieces(mixer, options):
    """In pieces of one token, they have not seen any later one."""
    model = small_model(block_size=70, mixer=mixer, **options).double()
    tokens = some_tokens(2, 70)
    logits, _ = model(tokens)
    for lengths in (1, (5, 1, 40, 24)):
        what = f"logits in pieces of {lengths}"
        assert_same(what, streamed(model, tokens, lengths), logits, atol=1e-10, rtol=0)


def test_the_loop_in_canons_docstring_is_the_layer():
    loop = re.search(r"( +y = x.clone.*?)\n\n", Canon.__doc__, re.DOTALL)[1]
    layer, x = Canon(6, Config(1, 1)), torch.randn(2, 9, 6)
    found = {"x": x, "weight": layer.weight.data}
    exec(textwrap.dedent(loop), found)
    assert_same("y", found["y"], layer(x))


@parametrize("kernel", (2, 4, 8))
@parametrize("residual", (True, False))
@parametrize("silu", (True, False))
def test_a_canon_layer_streams(kernel, residual, silu):
    config = Config(1, 1, canon="a", canon_kernel=kernel, canon_residual=residual, canon_silu=silu)
    layer, x = Canon(6, config), torch.randn(2, 12, 6)
    want = causal_conv_reference(x, layer.weight, residual=False)
    want = F.silu(want) if silu else want
    want = x + want if residual else want
    assert_same("at once", layer(x), want)
    assert_same("in pieces", streamed(layer, x, (1, 1, 5, 2, 3)), want)


@parametrize("dims", (8, 2))
def test_rotary_multiplies_complex_numbers(dims):
    """Dims j and j + half are one, which turns at its own speed. Dims beyond 2 half pass."""
    angles, half = canon_gpt.rotary_angles(torch.arange(64), dims, 1e4), dims // 2
    speeds = 10000.0 ** (-torch.arange(half) / half)
    assert_close(angles, torch.arange(64)[:, None] * speeds)
    q = torch.randn(2, 64, 3, 8)
    numbers = torch.complex(q[..., :half], q[..., half:dims])
    turned = numbers * torch.polar(torch.tensor(1.0), angles)[:, None]
    want = torch.cat([turned.real, turned.imag, q[..., dims:]], dim=-1)
    assert_same("turned q", canon_gpt.rotate(q, angles.cos(), angles.sin()), want)
    low = canon_gpt.rotate(q.bfloat16(), angles.cos(), angles.sin())
    assert_same("turned q in bfloat16", low, want.bfloat16(), atol=0.05, rtol=0)


def test_rotary_tables_are_right_on_any_device_and_in_any_dtype():
    (model, empty, assigned), tokens = copies_by_meta(), some_tokens()
    want, _ = model(tokens)
    original, _, moved = copies_by_meta()
    assert_same("logits", moved.to("cpu")(tokens)[0], original(tokens)[0])
    with torch.inference_mode():
        assigned(tokens)
    assigned(tokens, tokens)[1].backward()  # of a model that was only read before
    for other in (empty, assigned, assigned.to("cpu"), model.double().float()):
        assert_same("logits", other(tokens)[0], want)
    for other in (assigned.to("meta"), assigned.to("meta").bfloat16(), assigned.half()):
        assert other(tokens.to("meta"))[0].is_meta
    positions = model.bfloat16().blocks[1].mixer.positions
    assert_same("cos", positions.cos, canon_gpt.rotary_angles(torch.arange(24), 8, 1e4).cos())
    positions.learnt = torch.nn.Parameter(torch.ones(1))
    assert model.double().blocks[1].mixer.positions.learnt.dtype == torch.float64


@parametrize("pos", canon_gpt.POSITIONS)
def test_attention_is_a_mean_of_values(pos):
    """Also in pieces, and with Canon-B before the positions."""
    layer = Attention(Config(1, 9, n_head=4, d_model=32, canon="b", pos=pos))
    x = torch.randn(3, 9, 32)
    q, k, v = (heads(u, 4) for u in layer.canon_b(layer.qkv(x)).chunk(3, dim=-1))
    if pos in ("rope", "rope4"):
        angles = canon_gpt.rotary_angles(torch.arange(9), 8 if pos == "rope" else 2, 1e4)
        q, k = (canon_gpt.rotate(u, angles.cos(), angles.sin()) for u in (q, k))
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
    assert_same("attention in pieces", streamed(layer, x, (2, 1, 4, 2)), want)


MLP_CASES = [("", "silu"), ("abcd", "relu2"), ("d", "swiglu-relu2")]
MLP_CASES += [(points, "swiglu") for points in ("a", "b", "c", "abcd")]


@parametrize("points, mlp", MLP_CASES)
def test_canon_points_are_where_the_paper_puts_them(points, mlp):
    """A model of one block recomputed from its parts, but for attention (Canon-B is in there)."""
    size = dict(n_layer=1, n_head=2, d_model=28)
    model, tokens = small_model(canon=points.upper(), mlp=mlp, **size).double(), some_tokens()
    (block,) = model.blocks
    for norm in (block.norm1, block.norm2, model.norm):
        torch.nn.init.uniform_(norm.weight)

    def normed(x, module):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def canon(h, point, module):
        return causal_conv_reference(h, module.weight) if point in points else h

    assert isinstance(block.mixer.canon_b, Canon) == ("b" in points)
    canons = [module.weight.numel() for module in block.modules() if isinstance(module, Canon)]
    assert model.parameter_counts()["canon"] == sum(canons)
    x = model.embed(tokens)
    x = x + block.mixer(canon(normed(x, block.norm1), "a", block.canon_a))
    h = canon(normed(x, block.norm2), "c", block.canon_c)
    inner = canon(h @ block.mlp.up.weight.T, "d", block.mlp.canon_d)
    act = (lambda u: u.clamp(min=0) ** 2) if "relu2" in mlp else F.silu
    if "swiglu" in mlp:
        gate, up = inner.split(72, dim=-1)  # 8 * 28 / 3 = 74.7; 72 is the nearest multiple of 8
        inner = act(gate) * up
    else:
        inner = act(inner)
    inner = inner @ block.mlp.down.weight.T
    assert_same("MLP with Canon-D", block.mlp(h), inner)
    assert_same("the block", block(model.embed(tokens)), x + inner)
    logits = normed(x + inner, model.norm) @ model.head.weight.T
    assert_same("logits", model(tokens)[0], logits)


def test_loss_counts_the_targets_in_nats():
    """Those that are not negative."""
    model, tokens = small_model(), some_tokens()
    targets = some_tokens()
    logits, loss = model(tokens, targets)
    nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert_close(loss, nats.mean())
    asked, known = torch.rand(2, 2, 24) < 0.7
    targets = targets.masked_fill(~asked, -1).masked_fill(~known, -100)
    assert_close(model(tokens, targets)[1], nats[asked & known].mean())
    assert model(tokens, torch.full_like(targets, -1))[1] == 0


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
    assert model.generate(tokens[:1], 10, 0, stop).shape[1] == ends[0] + 1
    for row, right, end in zip(stopped, want, ends):
        assert torch.equal(row[:end], right[:end]) and (row[end:] == stop).all()

    def drawn():
        generator = torch.Generator().manual_seed(0)
        return model.generate(tokens[:1].expand(9000, 5), 1, temperature=2.0, generator=generator)

    many = drawn()
    chances = (model(tokens[:1])[0][0, -1] / 2.0).softmax(-1)
    assert drawn_as(many[:, 5].tolist(), dict(enumerate(chances.tolist())))
    assert torch.equal(drawn(), many)


def test_tied_weights_stay_tied():
    """Wherever they come from. Each model takes a step first, so that one that is not shows. A
    layer whose weight somebody parametrizes keeps working."""
    model, *others = copies_by_meta(tie_embeddings=True)
    for each in others:
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        each(some_tokens(), some_tokens())[1].backward()
        optimizer.step()
        assert torch.equal(each.embed.weight, each.head.weight)
    tokens = some_tokens()
    want, _ = model(tokens)
    unchanged = torch.nn.Identity(), torch.nn.LeakyReLU(1.0)  # the same tensor, and a copy
    for layer, module in product((model.head, model.embed), unchanged):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", module)
        assert torch.equal(model(tokens)[0], want)


@parametrize("mixer", canon_gpt.MIXERS)
def test_generate_does_not_wait_for_the_gpu(mixer):
    """On the meta device tensors have shapes, but no number that could be read."""
    with torch.device("meta"):
        model = small_model(canon="abcd", mixer=mixer, block_size=99)
        assert model.generate(some_tokens(2, 90), 3).shape == (2, 93)


BAD_GENERATIONS = [("temperature", -1), ("temperature", math.nan), ("max_new_tokens", 21)]


@parametrize("name, value", BAD_GENERATIONS)
def test_what_generate_refuses(name, value):
    """Of a block_size of 24: the last token is never read."""
    options = {"max_new_tokens": 20}
    assert small_model().generate(some_tokens(1, 5), **options).shape == (1, 25)
    with pytest.raises(canon_gpt.Refused, match=f"^{name} = {value}: "):
        small_model().generate(some_tokens(1, 5), **options | {name: value})
    for tokens in (some_tokens(1, 5)[0], some_tokens(1, 0)):
        shape = re.escape(str(tuple(tokens.shape)))
        with pytest.raises(canon_gpt.Refused, match=f"^tokens = {shape}: must be"):
            small_model().generate(tokens, 3)


@torch.no_grad()
@patch.dict(canon_gpt.CANONS, own=DoesNotStream)
def test_a_state_may_be_copied_survives_an_error_and_is_of_one_model():
    model, tokens = small_model(mixer="gdn,attention", canon="acd").double(), some_tokens()
    state = canon_gpt.State()
    assert not isinstance(state, Mapping)  # wrappers such as FSDP2 pass copies of mappings
    model(tokens[:, :9], state=state)
    fork = state.copy()
    model(tokens[:, 9:].flip(0), state=state)
    with patch.object(model.head, "forward", side_effect=MemoryError), pytest.raises(MemoryError):
        model(tokens[:, 9:].flip(0), state=fork)
    logits, _ = model(tokens[:, 9:], state=fork)
    assert_same("logits of the fork", logits, model(tokens)[0][:, 9:])
    with pytest.raises(canon_gpt.Refused, match="^length = 25: block_size"):
        model(tokens[:, :1], state=state)
    with pytest.raises(ValueError, match="another model's"):
        small_model()(tokens[:, :1], state=state)
    with pytest.raises(ValueError, match="cannot read a text in pieces"):
        small_model(canon="a", canon_type="own")(tokens, state=canon_gpt.State())


def test_initial_weights():
    options = dict(vocab_size=500, block_size=8, n_layer=2, n_head=8, d_model=512)
    for module in CanonGPT(Config(**options, mixer="gla,attention")).modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert module.weight.abs().max() > 0.05  # tails: not a uniform
            assert getattr(module, "bias", None) is None or not module.bias.any()
    for kernel in (2, 4):
        config = Config(vocab_size=5, block_size=8, canon="a", canon_kernel=kernel)
        weight, bound = Canon(20_000, config).weight, kernel**-0.5
        assert 0.999 * bound < weight.abs().max() <= bound
        assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.05)


@parametrize("options", [{"canon_frozen": True}, {"tie_embeddings": True}, {"mixer": "gdn,mamba2"}])
def test_matrices_decay_and_frozen_canons_stay(options):
    model, tied = small_model(canon="acd", **options), "tie_embeddings" in options
    assert (model.head.weight is model.embed.weight) == tied
    assert model.parameter_counts()["embeddings"] == 19 * 32 * (1 if tied else 2)
    settings = SimpleNamespace(weight_decay=0.5, lr=1, betas=(0.9, 0.98), eps=1e-6, device="cpu")
    decayed, rest = train.adamw(model, settings).param_groups
    assert decayed["weight_decay"] == 0.5 and rest["weight_decay"] == 0
    assert (decayed["betas"], decayed["eps"]) == ((0.9, 0.98), 1e-6)
    names = {p: name for name, p in model.named_parameters()}
    spared = {p for p in names if re.search("norm|canon|conv|A_log|dt_bias|skip", names[p])}
    frozen = {p for p in spared if "canon_frozen" in options and "canon" in names[p]}
    assert {*decayed["params"]} == {*names} - spared and {*rest["params"]} == spared - frozen


def test_adamw_updates_a_weight_that_is_a_slice():
    wide, model = torch.zeros(4, 6), torch.nn.Module()
    model.weight = torch.nn.Parameter(wide[:, :3])
    optimizer = train.adamw(model, train.Training())
    model.weight.grad = torch.ones(4, 3)
    optimizer.step()
    assert wide[:, :3].all() and not wide[:, 3:].any()


needs_compiler = pytest.mark.skipif(not CUDA and not shutil.which("g++"), reason="no compiler")
ALL_MIXERS = dict(mixer="gla,mamba2,gdn,attention", n_layer=4, pos="halibi", mlp="none")
COMPILED = [
    (ALL_MIXERS | dict(canon="b", short_conv=True), "aot_eager_decomp_partition"),
    pytest.param(dict(canon="bd", canon_frozen=True, n_layer=1), "inductor", marks=needs_compiler),
]


@parametrize("options, backend", COMPILED, ids=str)
def test_model_compiles_in_one_graph(options, backend):
    device = DEVICE if backend == "inductor" else "cpu"
    model = small_model(**options).to(device)
    batch = some_tokens(2, 5).to(device), some_tokens(2, 5).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss, want = compiled(*batch)[1], model(*batch)[1]
    assert_close(loss, want)
    trained = [p for p in model.parameters() if p.requires_grad]
    got, wanted = torch.autograd.grad(loss, trained), torch.autograd.grad(want, trained)
    assert_close(got, wanted, atol=1e-4, rtol=1e-3)


@parametrize("mixer", canon_gpt.MIXERS)
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


@parametrize("mixer", ("gla", "mamba2", "gdn"))
def test_bfloat16_leaves_decays_in_float32(mixer):
    """Otherwise they would be rounded to eight bits, and add up over the whole text."""
    recurrence = canon_gpt.chunked_linear_attention
    with patch.object(canon_gpt, "chunked_linear_attention", wraps=recurrence) as called:
        small_model(mixer=mixer).bfloat16()(some_tokens())
    assert [call.args[3].dtype for call in called.call_args_list] == [torch.float32] * 2


# The first field named is the one that is refused.
BAD_CONFIGS = [dict(n_layer=0), dict(n_layer=2.0), dict(canon_kernel=9), dict(canon_type="mine")]
BAD_CONFIGS += [dict(canon="abe"), dict(canon="aa"), dict(canon=["a", "c"]), dict(canon=None)]
BAD_CONFIGS += [dict(canon="abc", mlp="none"), dict(canon_residual="False"), dict(short_conv="no")]
BAD_CONFIGS += [dict(mlp="gelu"), dict(pos="rotary"), dict(mixer=""), dict(mixer="gdn,gdn,gla")]
BAD_CONFIGS += [dict(d_model=20), dict(d_model=16, pos="rope4"), dict(d_model=36, mixer="gdn")]


@parametrize("bad", BAD_CONFIGS, ids=str)
def test_config_names_field_and_value(bad):
    field, value = next(iter(bad.items()))
    with pytest.raises(canon_gpt.Refused, match=f"^{re.escape(f'{field} = {value!r}')}: "):
        small_model(**bad)


def test_numbers_may_be_numpys():
    config = Config(vocab_size=np.int64(9), block_size=np.int32(8))
    assert json.dumps(dataclasses.asdict(config)) == json.dumps(dataclasses.asdict(Config(9, 8)))


def test_part_one_runs_without_part_two(tmp_path):
    text, line, _ = (HERE / "canon_gpt.py").read_text().partition("# Part II: linear mixers")
    assert line
    (tmp_path / "part_one.py").write_text(text)
    part_one = runpy.run_path(tmp_path / "part_one.py")
    config = part_one["Config"](vocab_size=9, block_size=8, n_head=2, d_model=16, canon="abcd")
    logits, _ = part_one["CanonGPT"](config)(torch.arange(8)[None])
    assert logits.shape == (1, 8, 9) and list(part_one["MIXERS"]) == ["attention"]


# ---- 2. canon_gpt.py: Part II ----------------------------------------------

LINEAR = ("gla", "mamba2", "gdn")
KINDS = (*LINEAR, "gdn per channel")  # the last is no mixer's, but allowed


def recurrence_inputs(kind, sizes, strongest=1.0):
    """[q, k, v, log_decay, beta] in float64, log decays down to -strongest per step, half of them
    near 0."""
    B, T, H, K, V = sizes
    shared = 1 if kind in ("mamba2", "gdn per channel") else H
    q, k = torch.randn(2, B, T, shared, K).double()
    v = torch.randn(B, T, H, V).double()
    channels = (K,) if kind in ("gla", "gdn per channel") else ()
    g = -strongest * torch.rand(B, T, H, *channels).double()
    g = torch.where(torch.rand_like(g) < 0.5, g, 1e-4 * g)
    if not kind.startswith("gdn"):
        return [q, k, v, g, None]
    return [q, F.normalize(k, dim=-1), v, g, torch.rand(B, T, H).double()]


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


@parametrize("kind", KINDS)
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
    in_chunks = partial(canon_gpt.chunked_linear_attention, chunk=chunk)
    got = with_gradients(in_chunks, inputs, *weights)
    for name in want:
        what = f"{name}, chunks of {chunk} of {T}"
        assert_same(what, got[name], want[name], atol=1e-10, rtol=1e-10)


def test_linear_mixers_are_exported_for_one_length():
    model, tokens = small_model(**ALL_MIXERS, block_size=99).eval(), some_tokens(2, 80)
    exported = torch.export.export(model, (tokens,), strict=False).module()
    assert_close(exported(tokens)[0], model(tokens)[0])
    # torch.onnx.export makes Log(Sigmoid(x)) of this one, which is -inf below -17.
    assert "log_sigmoid" not in exported.code
    any_length = {1: torch.export.Dim.DYNAMIC}
    with pytest.raises(ValueError, match="for one length"):
        torch.export.export(model, (tokens,), dynamic_shapes=(any_length,), strict=False)


@parametrize("kind", KINDS)
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
    chunked = autocast(canon_gpt.chunked_linear_attention)
    got = with_gradients(chunked, low, dy)
    want = with_gradients(linear_recurrence, each(torch.Tensor.double, low), dy)
    assert got["o"].dtype == dtype and got["the last state"].dtype == torch.float32
    allowed = 1e-5 if dtype == torch.float32 else 10 * 2**-9
    for name in want:
        error = relative_error(got[name].double(), want[name])
        assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.1e}"
    start, _ = chunked(*each(lambda u: u[:, :60], low), return_S=False)  # one chunk, and no state
    assert relative_error(start.double(), want["o"][:, :60]) <= allowed


@parametrize("kind", KINDS)
def test_a_stream_under_autocast_keeps_its_state_in_float32(kind):
    """300 tokens, hardly any decay: a state rounded to bfloat16 at each would be off by over 1%."""
    inputs = recurrence_inputs(kind, (2, 300, 2, 16, 8), strongest=1e-3)
    _, want = linear_recurrence(*inputs)
    state = None
    with torch.autocast(DEVICE, torch.bfloat16):
        for t in range(300):
            token = each(lambda u: u[:, t : t + 1].float().to(DEVICE), inputs)
            _, state = canon_gpt.chunked_linear_attention(*token, S=state)
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

    if isinstance(module, canon_gpt.GLA):
        qkv = own(module.canon_b(module.qkv(x)))
        q, k, v = (heads(u, 4) for u in qkv.split([D // 2, D // 2, D], dim=-1))
        decay = heads(torch.sigmoid(module.decay(x)) ** (1 / 16), 4)
        return gated(linear_recurrence(q * (D // 8) ** -0.5, k, v, decay.log())[0])
    if isinstance(module, canon_gpt.Mamba2):
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
    got, want = module(x), slow_mixer(module, x)
    assert_close(got, want, atol=1e-10, rtol=1e-8)
    weights = list(module.parameters())
    gradients, wanted = (torch.autograd.grad(y.square().sum(), weights) for y in (got, want))
    assert_close(gradients, wanted, atol=1e-8, rtol=1e-8)


def mixer_at(mixer, **options):
    return Block(Config(vocab_size=9, block_size=9, mixer=mixer, **options), mixer).mixer


def test_linear_mixers_start_as_their_authors_have_them():
    for mixer, default in {"gla": False, "mamba2": True, "gdn": True}.items():
        for flag, wanted in {None: default, True: True, False: False}.items():
            assert (mixer_at(mixer, canon="b", short_conv=flag).conv is not None) == wanted
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
    assert [mixer_at("gdn", d_model=D).n_head for D in (64, 512, 768)] == [2, 4, 6]
    A = torch.cat([mixer_at("gdn", d_model=64).A_log.exp() for _ in range(60)])
    assert 14 < A.max() <= 16 and abs(A.mean() - 8) < 2


@parametrize("mixer, share", dict(attention=4, gla=4, mamba2=6, gdn=6).items())
@parametrize("mlp", ("swiglu", "silu"))
def test_mixer_and_mlp_share_12_d2(mixer, share, mlp):
    """Beside matrices there are only gates, norms and convolutions."""
    with torch.device("meta"):
        block = Block(Config(vocab_size=9, block_size=9, mixer=mixer, mlp=mlp), mixer)
    for part, expected in ((block.mixer, share), (block.mlp, 12 - share)):
        count = sum(p.numel() for p in part.parameters())
        assert count == pytest.approx(expected * 768**2, rel=0.04)


def test_own_mixers_must_have_a_place_for_canon_b():
    with patch.dict(canon_gpt.MIXERS, own=lambda config: torch.nn.Identity()):
        with pytest.raises(canon_gpt.Refused, match="no Canon-B"):
            Block(Config(9, 9, canon="b"), "own")


# ---- 3. tasks.py -----------------------------------------------------------


class Fake(torch.nn.Linear):
    """A model with these methods. Evaluations ask its parameters for the device."""

    def __init__(self, **methods):
        super().__init__(1, 1)
        vars(self).update(methods)


def instances(task, count=1000):
    """Documents in words, such as "<bos> 2 1 <query> [2 1]"."""
    for document in task.documents(default_rng(0), count):
        yield tasks.printed(task, document)


# -- All tasks


@parametrize("name", tasks.TASKS)
def test_batches_are_pure(name):
    task, windows = make_task(name), set()
    for seed, step in product((1, 7), range(10)):
        inputs, targets = task.batch(seed, step, 16)
        windows.update(row.tobytes() for row in inputs)
    assert len(windows) == 320
    for array in (inputs, targets):
        assert (array.shape, array.dtype) == ((16, task.block_size), np.int64)
    assert_close(make_task(name).batch(7, 9, 16), (inputs, targets))


def test_no_two_uses_of_a_seed_share_random_numbers():
    uses = (tasks.TRAIN, tasks.EVAL, tasks.PEOPLE, tasks.EXPOSURES, tasks.SAMPLES)
    assert len({default_rng([0, use]).random() for use in uses}) == 5


@parametrize("name", [name for name in tasks.TASKS if name not in ("capo", "text")])
def test_a_window_is_documents_in_a_row(name):
    task = make_task(name)
    drawn = list(task.documents(default_rng(0), 300))
    supply, documents = iter(drawn), iter(drawn)
    task.training_documents = lambda rng, count: islice(supply, count)
    inputs, targets = task.batch(3, 5, 8)
    for row, asked in zip(inputs.tolist(), targets.tolist()):
        tokens, counted = [], []
        while len(tokens) <= len(row):
            document = next(documents)
            for place, token in enumerate(document.tokens):
                is_target = any(start <= place < end for start, end in document.targets)
                tokens.append(token)
                counted.append(token if is_target else -1)
        assert row == tokens[: len(row)] and asked == counted[1 : len(row) + 1]


L12D768 = dict(n_layer=12, d_model=768, n_head=12, schedule="cosine", warmup=1000)
NO_WARMUP = dict(schedule="linear", warmup=0)
PAPER = {  # as Section 3 of the paper has them
    "copy": dict(batch_size=32, steps=50_000, block_size=1024, N=500),
    "depo1": dict(L12D768, batch_size=128, steps=87_500, block_size=2048, N=225, K=8),
    "depo2": dict(L12D768, batch_size=128, steps=100_000, block_size=2048, N=75, K=16),
    "brevo1": dict(L12D768, batch_size=256, steps=100_000, block_size=1024, N=70),
    "brevo2": dict(L12D768, batch_size=192, steps=200_000, block_size=1536, N=30),
    "mano": dict(L12D768, batch_size=64, steps=80_000, block_size=1024, L=10),
    "lano": dict(L12D768 | NO_WARMUP, batch_size=96, steps=100_000, block_size=512, root=None),
}


@parametrize("name", PAPER)
def test_the_preset_paper_has_the_papers_numbers(name):
    task, config, training, _ = train.settings_of(["--task", name, "--preset", "paper"])
    found = vars(config) | vars(training) | task.settings
    assert found.items() >= PAPER[name].items()


@parametrize("preset", train.PRESETS)
@parametrize("name", tasks.TASKS)
def test_every_preset_names_options_that_fit(preset, name):
    task, config, training, _ = train.settings_of(["--task", name, "--preset", preset])
    found = vars(config) | vars(training) | task.settings
    for option, value in train.PRESETS[preset].get(name, {}).items():
        assert value in (None, found[option])  # None: follows from the rest
    recorded = json.dumps(task.settings)  # as in a run's config.json
    assert json.dumps(make_task(**json.loads(recorded)).settings) == recorded
    for document in task.documents(default_rng(0), 100):
        assert len(document.tokens) <= task.block_size + 1
        assert 1 <= min(document.tokens) and max(document.tokens) < task.vocab_size


def test_documents_are_enough_to_be_scored():
    """Nothing predicts a document's first token, so it counts for nothing, also where it is a
    target, as in Lano."""
    task = tasks.Task(block_size=20)
    task.documents = make_task("lano", root=10, block_size=20).documents
    documents = list(task.documents(default_rng([5, tasks.EVAL]), 60))
    predictions = tasks.padded([document.tokens for document in documents])[:, 1:]
    predictions[:, 0] %= 3  # right, but for a 3 after <bos>
    batches = iter(F.one_hot(predictions, 5).split(tasks.SCORE_BATCH))
    model = Fake(forward=lambda tokens: (next(batches), None))
    wrong = sum(document.tokens[1] == 3 for document in documents)
    predicted = sum(len(document.tokens) - 1 for document in documents)
    scores = task.evaluate(model, 5, 60)
    assert scores == pytest.approx({"sequences": 1 - wrong / 60, "tokens": 1 - wrong / predicted})


@parametrize("name", tasks.TASKS)
def test_a_window_may_be_as_long_as_the_longest_instance(name):
    block_size = make_task(name, block_size=None).settings["block_size"]
    make_task(name, block_size=block_size)
    with pytest.raises(canon_gpt.Refused, match=f"block_size = .*: at least {block_size} "):
        make_task(name, block_size=block_size - 1)


# -- Words and answers


@parametrize("name", [name for name in tasks.TASKS if name != "text"])
def test_texts_are_the_tokens_in_words(name):
    task = make_task(name)
    for document in task.documents(default_rng(1), 30):
        text = task.decode(document.tokens)
        assert task.encode(text) == document.tokens
    with pytest.raises(canon_gpt.Refused, match=f"^'king' is not a word of {name}$"):
        task.encode("<bos> king")


# -- Copy


def test_copy():
    first_numbers = []
    for text in instances(make_task("copy", N=7, block_size=40)):
        numbers, copy = text.removeprefix("<bos> ").split(" <query> ")
        assert copy == f"[{numbers}]" and sorted(numbers.split()) == list("1234567")
        first_numbers.append(numbers[0])
    assert drawn_as(first_numbers, "1234567")


# -- Depo

DEPOS = [("depo0", {}), ("depo2", {}), ("depo1", dict(N=24, K=5, block_size=300))]
DEPOS += [("depo0", dict(V=3, word_len=(2, 2), N=9, block_size=200))]


def read_depo(task, text):
    """The edges, [(source, target), ..], and the questions, [(k, q, answer), ..]."""
    edge = r"([\w.]+) ([\w.]+)" + (" ," if task.name == "depo0" else "")
    question = r"<query_(\d+)> ([\w.]+) \[<ans> ([\w.]+)\]"
    form = f"<bos>( {edge})+( {question})+"
    assert re.fullmatch(form, text), f"expected {form}: {text}"
    edges_text, _, _ = text.partition("<query_")
    questions = [(int(k), q, answer) for k, q, answer in re.findall(question, text)]
    return re.findall(edge, edges_text), questions


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
    """The orders are those on cycles of three, as steps from the first edge's source."""
    N = 9
    task = make_task("depo1", N=N, K=3, block_size=90)
    weights = {n: 1 / (n + N**0.5) for n in range(3, N + 1)}
    chances = {n: weight / sum(weights.values()) for n, weight in weights.items()}
    sizes, hops = [], []
    orders = []
    for text in instances(task, count=3000):
        edges, questions = read_depo(task, text)
        sizes.append(len(edges))
        hops += [k for k, _, _ in questions]
        if len(edges) == 3:
            first, second = edges[0]
            cycle = [first, second, dict(edges)[second]]
            sources = tuple(cycle.index(source) for source, _ in edges)
            orders.append((sources, tuple(cycle.index(q) for _, q, _ in questions)))
    assert drawn_as(sizes, chances), f"sizes: {Counter(sizes)}"
    assert drawn_as(hops, (1, 2, 3)), f"hops: {Counter(hops)}"
    all_orders = list(product([(0, 1, 2), (0, 2, 1)], permutations((0, 1, 2))))
    assert drawn_as(orders, all_orders), f"orders of edges and questions: {Counter(orders)}"


def chances_of_words(V, low, high):
    """{word: chance}: uniform lengths, uniform letters, V more at the end if lengths differ."""
    chances = {}
    for length in range(low, high + 1):
        for letters in product(range(1, V + 1), repeat=length):
            if high > 1:
                letters = (*letters[:-1], letters[-1] + V)
            chances[letters] = 1 / (high + 1 - low) / V**length
    return chances


WORDS = [("depo1", 1, 1, 3), ("brevo2", 2, 1, 2), ("depo1", 3, 1, 1)]


@parametrize("name, V, low, high", WORDS)
def test_names_come_as_if_drawn_one_by_one(name, V, low, high):
    """As the plain loop in the docstring draws two: the second is another, and their order even."""
    chances = chances_of_words(V, low, high)
    pairs = defaultdict(float)
    for first, second in permutations(chances, 2):
        chance = chances[first] * chances[second] / (1 - chances[first])
        pairs[first, second] += chance / 2
        pairs[second, first] += chance / 2
    found = []
    words = make_task(name, N=3, V=V, word_len=(low, high), block_size=None).words
    for first, second in words.draw(default_rng(0), [2] * 40_000):
        found.append((tuple(first), tuple(second)))
    assert drawn_as(found, pairs)


def scores_if(task, is_right):
    """The scores of a model that finds answers, behind <ans>, and no other tokens. It finds an
    answer's last token only if is_right(the words before <ans>)."""

    def right_tokens(model, texts):
        right = np.zeros((len(texts), max(map(len, texts))), dtype=bool)
        for row, text in zip(right, texts):
            words = [task.vocabulary[token] for token in text]
            for place, word in enumerate(words):
                if word.startswith("<"):
                    in_answer, before = word == "<ans>", words[:place]
                elif in_answer:
                    row[place] = word.endswith(".") or is_right(before)
        return right

    task.right_tokens = right_tokens
    return task.evaluate(None, 0, 50)


@parametrize("name, hops", [("depo1", [1, 2]), ("depo0", [1, 2, 3, 4, 6])])
def test_depo_scores(name, hops):
    """At the largest size, for each k."""
    task = make_task(name, K=max(hops))

    def is_right(words):
        assert name == "depo1" or words.count(",") == task.N
        queries = [word for word in words if word.startswith("<query_")]
        return queries[-1] != "<query_2>"

    scores = scores_if(task, is_right)
    want = {f"k={k}": float(k != 2) for k in hops}
    assert scores == want, f"scores of a model that fails at two hops: {scores}, expected {want}"


# -- Brevo


def read_brevo(text):
    """The edges, [(parent, child), ..], the node that is asked about, the answer's nodes."""
    edges_text, question = text.split(" <query> ")
    bos, *names = edges_text.split()
    q, ans, *answer, eos = question.split()
    assert (bos, ans, eos) == ("<bos>", "[<ans>", "<eos>]")
    edges = list(zip(names[0::2], names[1::2], strict=True))
    return edges, q, answer


def is_valid(edges, q, answer):
    """Whether it has q and all that q depends on, each once, parents before their children."""
    needed = {q}
    for _ in edges:  # more often than the longest path is long
        needed |= {parent for parent, child in edges if child in needed}
    if sorted(answer) != sorted(needed):
        return False
    of_answer = [(parent, child) for parent, child in edges if child in needed]
    return all(answer.index(parent) < answer.index(child) for parent, child in of_answer)


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
    parents = [[], [], [0], [0, 1], [2, 3], [4, 1]]
    chances = {
        (1, 0, 3, 2, 4): 1 / 4,  # after 4, one of 2 and 3; after 2, only 3; then one of 0 and 1
        (0, 1, 3, 2, 4): 1 / 4,
        (0, 2, 1, 3, 4): 1 / 4,  # after 3, one of 1 and 2; after 1, only 2
        (0, 1, 2, 3, 4): 1 / 8,  # after 2, one of 0 and 1
        (1, 0, 2, 3, 4): 1 / 8,
    }
    dice = tasks.random.Random(0)
    assert drawn_as((tuple(tasks.draw_order(dice, parents, 4)) for _ in range(5000)), chances)


@parametrize("n", (3, 5, 10, 12))
def test_brevo_asks_for_the_last_quarter(n):
    task, asked = make_task("brevo1", N=12, block_size=200), []
    names = [(1 + node,) for node in range(n)]
    dice = tasks.random.Random(0)
    for _ in range(2000):
        document = task.instance(dice, names)
        asked.append(document.tokens[document.tokens.index(task.query) + 1] - 1)
    assert drawn_as(asked, range(n - math.ceil(n / 4), n))


def test_brevo_edges_come_in_any_order():
    orders = []
    for text in instances(make_task("brevo1", N=3), count=3000):
        edges, _, answer = read_brevo(text)
        if len(edges) == 3:  # the graph of three nodes with all edges: 0 -> 1, 0 -> 2, 1 -> 2
            orders.append(tuple(answer.index(a) + answer.index(b) for a, b in edges))
    assert drawn_as(orders, list(permutations((1, 2, 3))))


@parametrize("name, options", [("brevo1", dict(N=30, block_size=300)), ("brevo2", {})], ids=str)
def test_brevo_by_an_independent_checker(name, options):
    """It accepts the answers. Of other answers, the task accepts exactly those that it accepts."""
    task, verdicts = make_task(name, **options), Counter()
    for document in task.documents(default_rng(0), 300):
        edges, q, words = read_brevo(tasks.printed(task, document))
        nodes = set(chain(*edges))
        assert len(nodes) <= task.N and len(words) > 1 and is_valid(edges, q, words)
        (span,) = task.answer_spans(document)

        def accepts(words, *end):
            answer = task.encode(" ".join(words)) + [*end]
            return task.is_right(document, span, answer)

        others = [words, [], words[1:], words[:-1], words[:1] + words]
        others += [[other, *words] for other in nodes - set(words)]
        for i in range(1, len(words)):
            others.append(words[: i - 1] + [words[i], words[i - 1]] + words[i + 1 :])
        for answer in others:
            valid = is_valid(edges, q, answer)
            assert accepts(answer, task.eos) == valid
            verdicts[valid] += 1
        assert accepts(words, task.eos, 1)  # what follows <eos> is no text
        assert not accepts(words) and not accepts(words, task.query, task.eos)
        assert not accepts(words, 1, task.eos)  # in Brevo2 half a word
    assert verdicts[True] > 300


def test_brevo_draws_again_what_does_not_fit():
    task = make_task("brevo2", block_size=81)  # the smallest that is allowed
    lengths = [len(document.tokens) for document in task.instances(default_rng(0), [5] * 3000)]
    assert len(lengths) == 3000 and max(lengths) <= 82


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_scores(name):
    """Of a model that gives the right answers, but without their first token if q's last is odd."""
    task = make_task(name)
    given, right = {}, []
    for document in task.instances(default_rng([0, tasks.EVAL]), [task.N] * 99):
        ((start, end),) = task.answer_spans(document)
        answer, q_is_odd = document.tokens[start:end], document.tokens[start - 2] % 2
        given[tuple(document.tokens[:start])] = answer[1:] if q_is_odd else answer
        right.append(not q_is_odd)

    def generate(tokens, max_new_tokens, temperature, stop):
        assert temperature == 0 and stop == task.eos
        texts = [given[tuple(prompt)] for prompt in tokens.tolist()]
        assert max(len(text) for text in texts) <= max_new_tokens
        return torch.cat([tokens, tasks.padded(texts)], 1)

    assert task.evaluate(Fake(generate=generate), 0, 99) == {"all": np.mean(right)}


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
    lengths, splits = [], []
    for text in instances(task, count=3000):
        assert text[0] == "[" and text.endswith("]")  # all tokens are targets
        bos, head, *expression, ans, result = text.strip("[]").split()
        rest = iter(expression)
        value, count = mano_value(rest)
        assert not list(rest)
        assert [bos, head, ans, result] == ["<bos>", f"<len_{count}>", "<ans>", str(value)]
        lengths.append(count)
        for word in expression:
            (numbers if word.isdigit() else operators).append(word)
        if count == 4:
            _, in_left = mano_value(iter(expression[1:]))
            splits.append(in_left)
    assert drawn_as(lengths, range(1, 7)) and drawn_as(splits, range(4))
    assert drawn_as(operators, "+-*") and drawn_as(numbers, [str(number) for number in range(23)])


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


@parametrize("cfg, root", [("cfg3f", 10), ("cfg3f", 11), ("cfg3k", 12)])
def test_lano_chart_equals_enumeration(cfg, root):
    task = make_task("lano", cfg=cfg, root=root)
    language = all_yields(task.grammar, root)
    texts = sorted(language)[::5][:12]
    for text in texts[:4]:  # and all their corruptions by one token
        texts += [text[:-1], (*text, 1), ()]
        for i in range(len(text)):
            for other in (1, 2, 3):
                texts.append(text[:i] + (other,) + text[i + 1 :])
    assert 12 < sum(text in language for text in texts) < len(texts)
    rows = F.pad(tasks.padded(texts), (0, 200))  # so wide that they are taken a few at a time
    for text, found in zip(texts, task.charts(rows), strict=True):
        t = np.arange(len(text) + 1)
        exact = exact_table(language, text) * 2.1 ** t[:, None]
        what = f"chart of {text}, columns end, 1, 2, 3"
        assert_same(what, found[t], torch.from_numpy(exact), rtol=1e-12, atol=0)
        assert not found[len(t) :].any(), f"chart of {text}: not zero behind its end"


def test_grammars_are_the_papers():
    """By a checksum, in which any symbol shows."""
    found = {}
    for cfg, texts in tasks.GRAMMARS.items():
        found[cfg] = zlib.crc32(repr(tasks.Grammar(texts).rules).encode())
    assert found == {"cfg3f": 1800741889, "cfg3k": 3923363776}


@parametrize("cfg, most", [("cfg3f", 350), ("cfg3k", 800)])
def test_lano_long_sentences_keep_their_probability(cfg, most):
    grammar = tasks.Grammar(tasks.GRAMMARS[cfg])
    sentences = grammar.sample(default_rng(1), 1000)
    text = max((sentence for sentence in sentences if len(sentence) <= most), key=len)
    chart = grammar.chart(torch.tensor([text]))[0]
    assert len(text) > 0.8 * most
    assert 1e-100 < chart.max() < 1e100, f"the chart's largest number is {chart.max():.1e}"
    assert chart[-1, 0] > 0, "a whole sentence must be able to end"
    here = chart[torch.arange(len(text)), text]
    what = "a row's sum: the prefix, by the row before"
    assert_same(what, chart[1:].sum(1), 2.1 * here, rtol=1e-10, atol=0)
    assert chart[0].sum() == pytest.approx(1)


def test_lano_samples_follow_the_grammar():
    task = make_task("lano", root=12, block_size=40)
    for text in instances(task):
        assert text.startswith("[<bos> ") and text.endswith("]")  # all tokens are targets
    sentences = task.grammar.sample(default_rng(0), 5000)
    assert drawn_as((tuple(sentence) for sentence in sentences), all_yields(task.grammar, 12))


def test_lano_scores():
    """Of texts of which a third are sentences, a third none, and a third do not end."""
    task = make_task("lano", root=10, block_size=20)
    task.block_size = 9  # so sentences of nine tokens have no end
    language = all_yields(task.grammar, 10)
    short = min(language, key=len)
    long = next(text for text in language if len(text) == 9)
    texts = [[4, *text, 4, 4, 4, 4][:10] for text in (short, long, (1, 1, 1, 1, 1, 1, 1, 1))]

    def generate(tokens, max_new_tokens, temperature=1.0, stop=None, generator=None):
        assert (tokens.tolist(), max_new_tokens, temperature, stop) == ([[4]] * 60, 9, 1, 4)
        return torch.tensor(texts * 20)

    guesses = torch.randn(5, 5).log_softmax(-1)  # this model knows only the token before

    def forward(tokens):
        return guesses[tokens], None

    nats = []
    for text in task.grammar.sample(default_rng([0, tasks.EVAL]), 60):
        table = torch.from_numpy(exact_table(language, tuple(text)))[:9]
        exact = table / table.sum(1, keepdim=True)
        guess = guesses[[4, *text[:8]]][:, [4, 1, 2, 3]]
        nats += (torch.xlogy(exact, exact) - exact * guess).sum(1).tolist()
    scores = task.evaluate(Fake(generate=generate, forward=forward), 0, 60)
    assert scores == {"sentences": 1 / 3, "KL": pytest.approx(np.mean(nats), rel=1e-5)}
    assert [task.is_right(None, None, text[1:]) for text in texts] == [True, False, False]


# -- Capo


def test_capo_meets_everybody_once_an_epoch_in_new_words():
    task = make_task("capo", run_seed=1, N=30, exposures=4, block_size=120)
    people = tasks.draw_people(1, 30)
    assert not np.array_equal(people, tasks.draw_people(0, 30))
    who = {tuple(person[:3]): person for person in people.tolist()}
    met, told = [], set()
    assert task.steps(batch_size=7) == 6  # 6 x 7 windows of 3 lives; 4 x 30 wanted
    for step in range(8):
        inputs, targets = task.batch(2, step, 5)  # the people are those of the run's seed, 1
        tokens = np.hstack([inputs, targets[:, -1:]])
        assert np.array_equal(targets, np.where(tokens > 0, tokens, -1)[:, 1:])
        assert not inputs[:, 105:].any()
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
    (shown,) = task.documents(default_rng(0), 1)
    assert tuple(shown.tokens[1:4]) in who


def test_capo_people_and_wordings():
    people, first = tasks.draw_people(5, 40_000), 1
    for column, size in enumerate(tasks.PERSON.values()):
        assert drawn_as(people[:, column].tolist(), range(first, first + size))
        first += size
    assert len(np.unique(people[:, :3], axis=0)) == 40_000  # chance would bring some five twice
    assert set(people[:, -1]) <= set(people[:, 7])
    others = tasks.draw_people(6, 40_000)  # an employer is in one city, whatever the seed
    assert dict(people[:, -2:].tolist()) == dict(others[:, -2:].tolist())
    wordings = make_task("capo").wordings
    assert wordings.shape == (6, 10, 3) and len(np.unique(wordings.reshape(-1, 3), axis=0)) == 60


COSTS = {1: 0.5, 2: 0.2, 3: 9, 7: 1, 8: 0.3, 9: 0.4, 10: 3, 14: 2, 19: 0.6, 24: 0.1, 29: 4, 34: 5}
COSTS |= {4: 5, 15: 5, 33: 5}  # words and a later pronoun


@parametrize("nats", ({}, COSTS, dict.fromkeys(range(35), 9)))
def test_capo_bits(nats):
    """Tokens cost {place: nats}; names and facts count where they come first."""
    task = make_task("capo", N=50)
    rng = default_rng([7, tasks.EVAL])
    lives = torch.from_numpy(task.biographies(rng, rng.permutation(50)[:20]))
    prices = [math.expm1(nats.get(place, 1e-9)) for place in range(1, 35)]
    heights = torch.tensor([[math.log((task.vocab_size - 1) / price)] for price in prices])

    def forward(tokens):  # of all lives at once
        return F.one_hot(lives[:, 1:], task.vocab_size) * heights, None

    def known(places, possible):
        return max(0, 1 - sum(nats.get(place, 0) for place in places) / math.log(possible))

    N0, S0 = 400 * 400 * 1000, 2 * (12 * 28 * 200) * 200 * 300 * 100 * 263
    names, facts = known((1, 2, 3), N0), known((7, 8, 9, 10, 14, 19, 24, 29, 34), S0)
    bits = 50 * (names * math.log2(N0) + facts * math.log2(S0))
    used = len(np.unique(tasks.draw_people(0, 50))) + 50 + 1  # and the words, and <bos>
    rate = bits / (10**6 - 16 * (task.vocab_size - used))
    counts = {"total": 10**6, "embeddings": 16 * task.vocab_size}
    scores = task.evaluate(Fake(forward=forward, parameter_counts=lambda: counts), 7, 20)
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
    blocks = set()
    for step in range(20):
        tokens, mask = task.batch(0, step, 32)
        assert mask.all()
        for row in tokens:
            start = data.find(bytes(row - 1 for row in row.tolist()))
            assert start >= 0 and 256 not in row  # 255 is the token 256
            blocks.update((start // BLOCK, (start + 256) // BLOCK))
    assert blocks == set(range(46)) - {19, 39}


def test_text_scores_all_of_a_held_out_block_behind_64_bytes(text_file):
    """Each once, without a gap, but for what is left behind the last whole window."""
    scored, expected = [], []
    for start in make_task("text", text=str(text_file)).held_out_starts():
        scored += range(start + 64, start + 257)
    whole = (BLOCK - 64) // 193 * 193  # a window scores 193 bytes
    for first in (19 * BLOCK + 64, 39 * BLOCK + 64):
        expected += range(first, first + whole)
    assert scored == expected


COSTLY = 1 + 19 / 193  # a window scores 193 bytes


@parametrize("place, expected", [(63, 1), (64, COSTLY), (256, COSTLY)])
def test_bits_per_byte(place, expected, text_file):
    """Held-out bytes are all alike here. The model spends one bit on each, or 20 where it comes
    after `place` others."""

    def forward(tokens):
        B, T = tokens.shape
        cost = torch.ones(T)
        cost[place - 1] = 20
        logits = torch.zeros(B, T, 257)
        logits[..., 0] = -torch.inf
        logits[..., 256] = torch.log(255 / torch.expm1(cost * math.log(2)))
        return logits, None

    scores = make_task("text", text=str(text_file)).evaluate(Fake(forward=forward), 0, 40)
    assert scores == {"bits per byte": pytest.approx(expected, rel=1e-5)}


def test_a_prompt_needs_no_text(text_file):
    settings = make_task("text", text=str(text_file)).settings
    text_file.unlink()
    task = make_task(**settings)
    assert task.encode("né") == [1 + byte for byte in "né".encode()]
    assert task.decode(task.encode("né\n")) == "né\n"
    assert task.decode(task.encode("\ta\x1b[2J\r\x9b")) == "\ta\\x1b[2J\\r\\x9b"
    typed = b"caf\xff".decode(errors="surrogateescape")  # what sys.argv makes of other bytes
    assert task.encode(typed) == [1 + byte for byte in b"caf\xff"]


def test_the_usual_text_is_pythons_library():
    data = make_task("text").data
    assert Path(os.__file__).read_bytes() in data and Path(json.__file__).read_bytes() in data
    library = Path(os.__file__).parent
    for pattern in ("site-packages/*/main*.py", "test/test_o*.py"):
        for file in library.glob(pattern):
            assert file.read_bytes() not in data


# ---- 4. train.py, sample.py ------------------------------------------------

TINY = """--task copy --preset nano --N 8 --block-size 20 --device cpu --batch-size 8
    --eval-size 16 --warmup 5 --workers 0 --no-compile""".split()


def tiny(flags, out="run"):
    return [*TINY, *flags.split(), "--out", out]


def logged(out):
    """The lines of a log. They are JSON, which has no NaN."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def losses(out):
    return [line["loss"] for line in logged(out)[:-1]]


def checkpoint(out):
    return torch.load(Path(out, "ckpt.pt"), weights_only=True)


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


def test_command_line_end_to_end(here):
    """With so low a rate that the weights stay as they were."""
    words = TINY + "--canon DcbA --steps 50 --eval-every 30 --seed 5 --lr 1e-12".split()
    train.main(words)
    (run,) = Path("out").iterdir()
    config, log = train.read_config(run), logged(run)
    assert run.name == config["run"] and config["model"]["canon"] == "abcd"
    assert shlex.split(config["command"])[2:] == words
    assert [line["step"] for line in log] == [15, 20, 30, 40, 50, 50]
    assert [line["step"] for line in log if "eval" in line] == [15, 30, 50, 50]
    task, _, training, _ = train.settings_of(words)
    for line in log[:-1]:
        assert line["lr"] == train.learning_rate(line["step"], 1e-12, training)
        assert line["tokens"] == line["step"] * 8 * 20
    last = log[-1]
    assert last["final"] is True and last["seconds"] > 0

    torch.manual_seed(5)
    model = CanonGPT(Config(**config["model"]))
    for name, weight in checkpoint(run)["model"].items():
        assert torch.allclose(weight, model.get_parameter(name))
    loss = model(*map(torch.from_numpy, task.batch(5, 19, 8)))[1].item()
    assert log[1]["loss"] == pytest.approx(loss, abs=1e-4)
    assert last["eval"] == task.evaluate(model, 5, 16)


# -- Settings


def test_what_is_left_out_follows_from_the_rest():
    task, _, training, run = train.settings_of("--task capo --preset nano --exposures 3".split())
    assert training.steps == task.steps(training.batch_size)
    assert (run.device, run.workers) == (DEVICE, 4 if CUDA else 0)
    task, config, _, _ = train.settings_of("--task copy --preset nano --N 100".split())
    assert config.block_size == task.block_size == 201  # an instance has 202 tokens


@parametrize("name", tasks.TASKS)
def test_every_option_has_a_line_of_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        train.main(["--task", name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for owner in (tasks.TASKS[name], train.Training, train.Run, Config):
        assert set(train.options(owner)) <= set(train.help_texts(owner)), owner
    for option in train.options(tasks.TASKS[name]):
        assert train.help_texts(tasks.TASKS[name])[option] in shown


BAD_FLAGS = [  # the flags, and what the line names
    ("--task sort --N 4", "task = 'sort': allowed: copy, "),
    ("--task copy --preset huge", "preset = 'huge'"),
    ("--task copy --N 1", "N = 1: at least 2"),
    ("--task capo --batch-size 0", "batch_size = 0"),  # its steps follow from the batch
    ("--task depo --K 5", "K = 5: "),
    ("--task depo --word-len 3 2", "word_len = [3, 2]: "),
    ("--task text --text none", "text = 'none': "),
    ("--task text --text notes.txt", "text = 'notes.txt': at least 163,840 bytes"),
    ("--task copy --lr nan", "lr = nan"),
    ("--task copy --grad-accum 3", "a multiple of 3"),
    ("--task copy --weight-decay inf", "weight_decay = inf"),
    ("--task copy --K 5", "--K 5: not a flag of copy, model, training, run"),
    ("--task copy --canon-residual false", "false: not a flag"),
    ("--task copy --canon-kernel 3", "canon_kernel = 3: has no effect without --canon"),
    ("--task copy --device tpu", "PyTorch sees only: "),
    ("--task copy --out notes.txt", "out = 'notes.txt': File exists"),
    (f"--task copy --out {'x' * 300}", "too long"),
]


@parametrize("flags, words", BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_written(flags, words, refused):
    Path("notes.txt").write_text("mine")
    refused(["--preset", "nano", *flags.split()], words)


@patch.dict(train.PRESETS["nano"], copy={"learning_rate": 1e-3})
def test_a_preset_has_only_options(refused):
    refused("--task copy --preset nano".split(), "learning_rate = 0.001: preset nano has it")


class HasSeed(tasks.Copy):
    def __init__(self, N=4, seed=None, block_size=None):
        super().__init__(N, block_size)


class HasTask(tasks.Copy):
    def __init__(self, N=4, task=None, block_size=None):
        super().__init__(N, block_size)


@parametrize("task, name", [(HasSeed, "seed"), (HasTask, "task")])
def test_an_argument_with_the_name_of_an_option_is_refused(task, name, refused):
    with patch.dict(tasks.TASKS, own=task):
        refused("--task own --preset nano".split(), f"{name}: two options have this name")


class HasSizes(tasks.Copy):
    def __init__(self, N=4, sizes=[4, 8], block_size=None):
        super().__init__(N, block_size)


@patch.dict(tasks.TASKS, own=HasSizes)
def test_a_list_takes_as_many_values_as_it_has():
    task, _, _, _ = train.settings_of("--task own --preset nano --sizes 16 32".split())
    assert task.parameters["sizes"] == [16, 32]


def test_a_command_names_the_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", "--steps", "2"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "import train", "--steps", "2"])
    assert train.command_of(["--resume", "a b"]) == "python -c 'import train' --resume 'a b'"


def test_run_names_tell_runs_apart():
    def name(flags):
        _, _, _, run = train.settings_of(flags.split())
        return run.out

    usual = "--task depo --preset nano --canon acd"
    assert name(usual) == name(f"{usual} --workers 2") == "out/depo1_nano_rope_acd_s0"
    flags = "--lr 3e-3 --word-len 1 2 --canon-frozen --no-canon-residual --betas 0.8 0.9 --seed 4"
    long = "word-len=1-2_no-canon-residual_canon-frozen_lr=0.003_betas=0.8-0.9_s4"
    assert name(f"{usual} {flags}") == f"out/depo1_nano_rope_acd_{long}"
    hybrid = name("--task mano --preset nano --mixer gdn,attention --pos nope")
    assert hybrid == "out/mano_nano_gdn-attention_bare_pos=nope_s0"


# -- A step


def test_a_step_clips_gradients_and_may_be_in_parts():
    """The parts have unequal numbers of targets."""
    model, tokens, targets = small_model(), some_tokens(6, 24), some_tokens(6, 24)
    targets[torch.rand(6, 24) < torch.linspace(0.1, 0.9, 6)[:, None]] = -1

    def gradients():
        return [p.grad.clone() for p in model.parameters()]

    _, whole_loss = model(tokens, targets)
    whole_loss.backward()
    expected, updated = gradients(), []
    total = torch.nn.utils.get_total_norm(expected)
    model.zero_grad()
    step = lambda: updated.append(gradients())
    optimizer = SimpleNamespace(step=step, zero_grad=model.zero_grad)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batch = tokens, targets, (targets >= 0).sum()
    for clip, parts in product((0, 0.5, 1e3), (1, 3)):
        found = train.train_step(model, optimizer, scaler, batch, nullcontext(), clip, parts)
        assert_close(found, (whole_loss.detach(), total))
        factor = min(1, clip / total) if clip else 1
        assert_close(updated.pop(), [factor * gradient for gradient in expected])


def test_learning_rate_schedule():
    training = SimpleNamespace(steps=110, warmup=10, schedule="cosine")
    rates = [train.learning_rate(step, 2.0, training) for step in (1, 5, 10, 11, 61, 111)]
    assert rates == pytest.approx([0.2, 1, 2, 2, 1.1, 0.2])
    training = SimpleNamespace(steps=110, warmup=0, schedule="linear")
    assert [train.learning_rate(step, 2.0, training) for step in (1, 56, 111)] == [2, 1, 0]


def test_training_and_scoring_are_in_bfloat16_if_asked(here, monkeypatch):
    monkeypatch.setattr(train, "check_model", lambda model, autocast: None)  # partly in float32
    attend = F.scaled_dot_product_attention
    with patch.object(F, "scaled_dot_product_attention", wraps=attend) as attention:
        train.main(tiny("--steps 2 --dtype bfloat16 --pos nope"))
    assert {call.args[0].dtype for call in attention.call_args_list} == {torch.bfloat16}
    assert all(weight.dtype == torch.float32 for weight in checkpoint("run")["model"].values())


def test_workers_draw_the_batches_of_the_steps_without_shared_memory():
    """Tensors would take some. A container may have too little of it, and then training waits."""
    flags = "--task mano --preset nano --steps 3 --workers 2 --device cpu"
    task, _, training, run = train.settings_of(flags.split())
    batches = list(train.load_batches(task, training, run, steps_done=1))
    assert not any(u.is_shared() for u in chain(*batches))
    for number, (inputs, targets, n_targets) in enumerate(batches, 1):
        expected = task.batch(training.seed, number, training.batch_size)
        assert_close((inputs, targets), tuple(map(torch.from_numpy, expected)))
        assert n_targets == (targets >= 0).sum()


def test_compiling_changes_nothing(here):
    without_inductor = partial(torch.compile, backend="eager")
    train.main(tiny("--steps 3 --canon abcd", "plain"))
    with patch.object(torch, "compile", side_effect=without_inductor) as compiler:
        train.main(tiny("--steps 3 --canon abcd --compile", "compiled"))
    assert compiler.call_count == 2  # a first try, the model
    assert losses("plain") == pytest.approx(losses("compiled"), abs=1e-3)


def test_where_the_compiler_fails_a_run_goes_on_without(here, monkeypatch, capsys):
    monkeypatch.setattr(train, "WORTH_COMPILING", 1)
    flags = tiny("--steps 2")
    flags.remove("--no-compile")
    with patch.object(torch, "compile", side_effect=RuntimeError("no C++ compiler")):
        train.main(flags)
    assert "no C++ compiler" in capsys.readouterr().err
    config = train.read_config("run")
    assert not config["compiled"] and config["execution"]["compile"] is None  # to be decided again


# -- What a run promises


class DropsOut(Canon):
    def forward(self, x, state=None):
        return F.dropout(super().forward(x, state), 0.1, self.training)


class ScoresInNumPy(tasks.Copy):
    def evaluate(self, model, seed, n):
        assert not model.training
        scores = super().evaluate(model, seed, n)
        return {name: np.float64(score) for name, score in scores.items()} | {"own": np.nan}


@patch.dict(canon_gpt.CANONS, own=DropsOut)
@patch.dict(tasks.TASKS, copy=ScoresInNumPy)
@patch.dict(train.SCHEDULES, own=lambda done: np.cos(done))
@patch.object(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**50))
@parametrize("dtype", ("float32", "float16"))
def test_resume_goes_on_as_if_never_stopped(dtype, here, capsys):
    """After a crash while it wrote a checkpoint: same weights, same lines in the log. Also where a
    layer draws random numbers, where scores and learning rates are NumPy's, and where a scaler
    begins with a factor that overflows."""

    def steady(out):
        return [[line.get(x) for x in ("step", "tokens", "loss", "eval")] for line in logged(out)]

    def save_half(saved, path):
        write(saved, path)
        if saved["step"] == 60:
            os.truncate(path, 999)
            raise OSError("power failure")

    flags = "--steps 60 --eval-every 20 --canon ac --canon-type own --schedule own --dtype " + dtype
    train.main(tiny(flags, "whole"))
    overflows = [line["gradient_norm"] is None for line in logged("whole")[:-1]]
    assert overflows == [dtype == "float16", dtype == "float16", False, False]
    write = torch.save
    with patch.object(torch, "save", save_half), pytest.raises(OSError, match="power failure"):
        train.main(tiny(flags))
    saved = checkpoint("run")
    assert saved["step"] == 40
    torch.save({**saved, "seconds": 1000.0}, "run/ckpt.pt")
    Path("run/metrics.jsonl").write_text('{"step": 41, "lo')
    capsys.readouterr()
    for step in (40, 60):  # the second time there is nothing left to do
        train.main(["--resume", "run"])
        assert f"continues after step {step}" in capsys.readouterr().out
        assert steady("run") == steady("whole") and logged("run")[-1]["seconds"] >= 1000
    assert_close(checkpoint("run")["model"], checkpoint("whole")["model"], atol=0, rtol=0)


def test_a_folder_has_one_run(refused):
    """Also before its first checkpoint. Resumed, it begins again."""
    train.main(tiny("--steps 20", "whole"))
    with patch.object(train, "train", side_effect=KeyError), pytest.raises(KeyError):
        train.main(tiny("--steps 20"))
    refused(tiny("--steps 20"), "out = 'run': holds a run already")
    train.main(["--resume", "run"])
    assert_close(checkpoint("run")["model"], checkpoint("whole")["model"], atol=0, rtol=0)
    with train.lock_folder("run") as lock:
        refused(["--resume", "run"], "run: another process is training this run")
        assert lock.writable()  # or NFS would not lock it
    with patch.object(train.fcntl, "flock", side_effect=OSError("Function not implemented")):
        train.main(["--resume", "run"])  # as on Lustre
    Path("run/config.json").unlink()
    refused(tiny("--steps 20"), "out = 'run': holds a run already")


def test_a_home_folder_is_found_and_a_long_warm_up_told(here, monkeypatch, capsys):
    monkeypatch.setenv("HOME", os.getcwd())
    train.main(tiny("--steps 2", "~/run"))
    assert checkpoint("run")["step"] == 2
    assert "the learning rate never peaks, because warm-up takes 5 steps" in capsys.readouterr().out


def test_a_file_that_is_being_read_is_replaced_later(here):
    """Windows refuses to replace a file that a virus scanner reads."""
    replace, errors = os.replace, iter([PermissionError, PermissionError])

    def refuse_twice(source, target):
        for error in errors:
            raise error
        replace(source, target)

    with patch.object(os, "replace", refuse_twice), patch.object(time, "sleep"):
        train.main(tiny("--steps 2"))
    assert checkpoint("run")["step"] == 2


def test_a_resumed_run_keeps_its_settings(refused):
    train.main(tiny("--steps 20"))
    refused(["--resume", "run", "--lr", "0.5"], "--lr 0.5: not a flag of a resumed run")
    refused(["--resume", "run", "--out", "other"], "stays in run")
    refused(["--resume", "run", "--task", "depo"], "--task depo: not a flag of a resumed run")
    _, _, training, run = train.settings_of("--resume run --workers 3".split())
    assert (training.steps, run.workers, run.out) == (20, 3, "run")


class Shuffled(tasks.Copy):
    """Its words come in another order, as those of a set would."""

    def __init__(self, N=8, block_size=None):
        super().__init__(N, block_size)
        self.vocabulary.reverse()


@patch.dict(tasks.TASKS)
def test_a_run_does_not_go_on_with_another_vocabulary(refused):
    train.main(tiny("--steps 2"))
    tasks.TASKS["copy"] = Shuffled
    for command, main in ((["--resume", "run"], train.main), (["run"], sample.main)):
        refused(command, "task = 'copy': its vocabulary isn't the one", main=main)


class ManyWeights(Canon):
    names = ["first", "second"]

    def __init__(self, width, config):
        super().__init__(width, config)
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(width)))


@patch.dict(canon_gpt.CANONS, own=ManyWeights)
def test_a_run_does_not_go_on_with_weights_in_another_order(refused):
    """The optimizer would exchange what it knows of them. A model to look at may have it."""
    train.main(tiny("--steps 20 --canon a --canon-type own"))
    with patch.object(ManyWeights, "names", ["second", "first"]):
        refused(["--resume", "run"], "run/ckpt.pt is another model's: its weights are in another")
        sample.load_model("run")


def test_a_run_does_not_go_on_with_another_text(refused, text_file):
    flags = "--task text --text text.bin --preset nano --n-layer 1 --d-model 16 --steps 1"
    flags += " --device cpu --no-compile --workers 0 --batch-size 1 --eval-size 1 --out run"
    train.main(flags.split())
    text_file.write_bytes(text_file.read_bytes()[:-1] + b"?")
    refused(["--resume", "run"], "sha256 = ", "the run began with ")
    text_file.unlink()
    refused(["--resume", "run"], "text = 'text.bin': No such file")


class RunsCode:
    def __reduce__(self):
        return Path.touch, (Path("written.txt"),)


def test_damaged_files_are_refused(refused):
    """And nothing that a checkpoint may hold is run."""
    train.main(tiny("--steps 20"))
    saved = checkpoint("run")
    del saved["optimizer"]  # sample.py would not miss it
    torch.save(saved, "run/ckpt.pt")
    refused(["--resume", "run"], "run/ckpt.pt is another model's: 'optimizer'")
    os.truncate("run/ckpt.pt", 999)
    refused(["run"], "run/ckpt.pt is missing or damaged", main=sample.main)
    for content in ([1], {"model": RunsCode()}):
        torch.save(content, "run/ckpt.pt")
        refused(["run"], "run/ckpt.pt is missing or damaged", main=sample.main)
    Path("run/config.json").write_text("{")
    refused(["--resume", "run"], "run/config.json is damaged")


def test_a_config_of_another_version_is_refused(refused):
    """Each part may lack fields, but for what has no default."""
    train.main(tiny("--steps 2"))
    about = train.read_config("run")
    for part in ("model", "task", "training", "execution"):
        changed = about | {part: about[part] | {"of_a_branch": 1}}
        Path("run/config.json").write_text(json.dumps(changed))
        refused(["run"], "of_a_branch", main=sample.main)
    for part, missing in (("model", "vocab_size"), ("task", "name")):
        Path("run/config.json").write_text(json.dumps(about | {part: {}}))
        refused(["run"], "run/config.json is damaged", missing, main=sample.main)
    Path("run/config.json").write_text(json.dumps(about | {"training": {}, "execution": {}}))
    sample.main(["run", "--count", "1"])
    assert train.settings_of("--resume run".split())[2] == train.Training()


@patch.object(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=1.0))
@parametrize("dtype", ("float32", "float16"))
@parametrize("bad", [(math.nan, 1), (1, math.inf)])
def test_nan_or_inf_stops_training(bad, dtype, here, capsys):
    """Before it is saved. No smaller scale would help."""
    steps = [torch.ones(2)] * 20 + [torch.tensor(bad)] * 20
    ends = pytest.raises(SystemExit, match="^1$")
    with patch.object(train, "train_step", side_effect=steps), ends:
        train.main(tiny(f"--steps 60 --eval-every 20 --dtype {dtype}"))
    loss, gradient = map(float, bad)
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"step 40: loss = {loss}, gradient = {gradient}." in said
    assert checkpoint("run")["step"] == 20


class LooksAhead(Canon):
    """Not at first, but as soon as its weights are not zero."""

    def __init__(self, width, config):
        super().__init__(width, config)
        self.ahead = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x, state=None):
        return x + self.ahead * x.roll(-1, dims=1)


class AveragesChunks(Canon):
    """In eval mode only. Thirteen is where `check_model` first cuts a text of twenty tokens."""

    def forward(self, x, state=None):
        if self.training:
            return x
        chunks = [c.mean(dim=1, keepdim=True).expand_as(c) for c in x.split(13, dim=1)]
        return torch.cat(chunks, dim=1)


class MixesRows(Canon):
    """In training only."""

    def forward(self, x, state=None):
        return x + x.roll(1, dims=0) if self.training else x


class ForgetsItsTail(Canon):
    """If a piece is shorter than the tail."""

    def forward(self, x, state=None):
        tail = None
        if state is not None:
            tail = state[self] if self in state else x.new_zeros(len(x), 3, x.shape[2])
            state[self] = F.pad(x, (0, 0, 3, 0))[:, -3:]
        return kernels.causal_conv(x, self.weight, tail=tail)


class DropsOutAlways(Canon):
    def forward(self, x, state=None):
        return F.dropout(super().forward(x, state), 0.1)


class DrawsAnOrder(Canon):
    """Draws an order of channels that no checkpoint holds."""

    def __init__(self, width, config):
        super().__init__(width, config)
        self.register_buffer("order", torch.randperm(width), persistent=False)

    def forward(self, x, state=None):
        return super().forward(x, state)[..., self.order]


@parametrize("layer, words", [
    (LooksAhead, "looks ahead"),
    (AveragesChunks, "looks ahead"),
    (MixesRows, "looks ahead, or at other rows"),
    (DropsOutAlways, "a layer is random in eval mode"),
    (DrawsAnOrder, "or differs when it is loaded again"),
    (ForgetsItsTail, "streams = False"),
])  # fmt: skip
def test_a_layer_with_a_fault_is_refused(layer, words, refused):
    with patch.dict(canon_gpt.CANONS, own=layer):
        refused(tiny("--steps 2 --canon b --canon-type own"), "canon_type own", words)


@patch.dict(canon_gpt.CANONS, own=DoesNotStream)
def test_a_layer_may_say_that_it_does_not_stream(here):
    train.main(tiny("--steps 2 --canon ab --canon-type own"))


class Buggy(tasks.Copy):
    def batch(self, seed, step, batch_size):
        if step == 30:
            raise canon_gpt.Refused("a bug in the generator")
        return super().batch(seed, step, batch_size)


class Killed(tasks.Copy):
    def batch(self, seed, step, batch_size):
        if step == 10 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)  # as Linux does when memory runs out
        return super().batch(seed, step, batch_size)


@parametrize("task, error", [(Buggy, "a bug in the generator"), (Killed, "DataLoader worker")])
def test_errors_in_user_code_keep_their_traceback(task, error, here):
    """And no worker stays."""
    with patch.dict(tasks.TASKS, copy=task), pytest.raises(Exception, match=error):
        train.main(tiny("--steps 60 --workers 2"))
    gc.collect()  # frames of the error hold the loader
    for worker in multiprocessing.active_children():
        worker.join(timeout=10)  # in PyTorch 2.11 it ends a moment later
    assert not multiprocessing.active_children()


def sgd(model, training):
    return torch.optim.SGD(model.parameters(), training.lr, weight_decay=np.sqrt(0.01))


@patch.dict(train.OPTIMIZERS, own=sgd)
def test_a_checkpoint_that_nobody_could_read_is_not_saved(here):
    """NumPy's numbers would be refused. The run ends at its first checkpoint, not its last."""
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        train.main(tiny("--steps 60 --optimizer own"))
    assert not Path("run/ckpt.pt").exists()


@patch.dict(train.OPTIMIZERS, own=lambda model, _: torch.optim.SGD(model.blocks.parameters()))
def test_an_optimizer_that_leaves_weights_out_is_refused(refused):
    refused(tiny("--steps 20 --optimizer own"), "'own': leaves out embed.weight, norm.weight, head")


@parametrize("document, words", [
    (Document([1, 2, 3]), "targets = 0: copy asks for nothing"),
    (Document([1, 99], [(1, 2)]), "token = 99: copy has a vocabulary of 11"),
    (Document([1, -1], [(1, 2)]), "token = -1: copy has a vocabulary of 11"),
    (Document([]), "tokens in 16 documents = 0: must be at least 1"),
])  # fmt: skip
def test_a_task_with_a_fault_is_refused(document, words, refused, monkeypatch):
    monkeypatch.setattr(tasks.Copy, "training_documents", lambda *_: [document] * 999)
    refused(tiny("--steps 20"), words)


class HasItsOwnGenerator(tasks.Copy):
    """Draws which targets count from its own generator."""

    def __init__(self, N=8, block_size=None):
        super().__init__(N, block_size)
        self.rng = np.random.default_rng(0)

    def batch(self, seed, step, batch_size):
        inputs, targets = super().batch(seed, step, batch_size)
        return inputs, np.where(self.rng.random(targets.shape) < 0.5, targets, -1)


class DrawsWhenMade(tasks.Copy):
    """Draws once, when it is made."""

    def __init__(self, N=8, block_size=None):
        super().__init__(N, block_size)
        self.drawn = int(np.random.default_rng().integers(2**31))

    def batch(self, seed, step, batch_size):
        return super().batch(seed + self.drawn, step, batch_size)


@parametrize("task", [HasItsOwnGenerator, DrawsWhenMade])
def test_a_task_whose_batches_do_not_repeat_is_refused(task, refused):
    with patch.dict(tasks.TASKS, copy=task):
        refused(tiny("--steps 20"), "copy draws other batches each time")


def test_a_closed_stderr_is_no_fault(here, monkeypatch):
    """As after `2>&-` in a shell."""
    monkeypatch.setattr(sys, "stderr", None)
    train.main(tiny("--steps 2"))


# -- Processes


@parametrize("name", ("RANK", "WORLD_SIZE"))
def test_one_variable_of_torchruns_is_not_enough(name, monkeypatch):
    monkeypatch.setenv(name, "3")
    names = runpy.run_path(HERE / "train.py")
    assert (names["RANK"], names["WORLD"]) == (0, 1)


def test_ctrl_c_leaves_a_checkpoint_and_no_process(here):
    process = subprocess.Popen(
        [sys.executable, HERE / "train.py", *tiny("--steps 1000000 --eval-every 1000 --workers 2")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A program in the background may ignore Ctrl-C: so do shells start them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        while not Path("run/ckpt.pt").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=120)[1]
        with pytest.raises(ProcessLookupError):  # its workers are gone, too
            for _ in range(200):
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "Traceback" not in said
    resume = shlex.join(["python", str(HERE / "train.py"), "--resume", "run"])
    last = f"train.py: stopped; {resume} continues from step {checkpoint('run')['step']}"
    assert said.splitlines()[-1] == last


def test_two_processes_train_as_one_does(here):
    """With unequal numbers of targets."""
    flags = "--task depo0 --preset nano --N 3 --K 1 --block-size 40 --n-layer 1 --d-model 16"
    flags += " --canon a --device cpu --no-compile --batch-size 6 --eval-size 16 --steps 40"
    train.main([*flags.split(), "--out", "one"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*command, HERE / "train.py", *flags.split(), "--out", "two"], check=True)
    assert train.read_config("two")["processes"] == 2
    assert losses("one") == pytest.approx(losses("two"), rel=1e-4)


# -- Every task is trained, and Copy is learnt


@parametrize("canon, least, most", [("--canon abcd", 0.5, 1), ("", 0, 0.05)])
def test_copy_is_learnt_with_canon(canon, least, most, here):
    """The paper's Fig. 5 in miniature. The bounds are of the share of lists that is right."""
    train.main(tiny(f"--N 16 --block-size 33 --batch-size 32 --steps 300 --warmup 50 {canon}"))
    assert least <= logged("run")[-1]["eval"]["sequences"] <= most


@parametrize("name", tasks.TASKS)
def test_every_task_is_trained(name, here):
    usual = "--preset nano --steps 2 --no-compile --workers 0 --batch-size 4 --eval-size 4"
    train.main(["--task", name, *usual.split(), "--out", "run"])
    assert set(logged("run")[-1]["eval"]) == set(make_task(name).units)


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
    assert len(set(shown)) == 4
    for text in shown:
        given, _, _ = text.partition("[")
        prompt = task.encode(given)
        greedy = model.generate(torch.tensor([prompt]), 8, temperature=0)[0, 10:]
        said, right = task.decode(greedy), task.decode(prompt[1:9])
        verdict = "✓" if said == right else f"✗ {right}"
        assert text == f"{given}[{said} {verdict}]"

    sample.main(["run", "--prompt", "<bos> 3 1 2"])
    text = capsys.readouterr().out
    assert text.startswith("<bos> 3 1 2 [") and len(text.split()) == 21
    refused(["run", "--prompt", "1 " * 21], "1 to 20", main=sample.main)
    refused(["nowhere"], "run = 'nowhere': there is no config.json", main=sample.main)


@patch.dict(canon_gpt.CANONS, own=DropsOut)
def test_a_missing_part_is_named_with_the_command_that_has_it(refused):
    train.main(tiny("--steps 2 --canon a --canon-type own"))
    del canon_gpt.CANONS["own"]
    refused(["run"], "canon_type = 'own'", "The run was begun by: python", main=sample.main)


# ---- 5. plot.py ------------------------------------------------------------


def toy_run(label, *values, seed=0, seconds=3.0, **model):
    """A run as plot.py reads it. values: of its score after 10, 20 .. steps."""
    evals = []
    for number, value in enumerate(values, 1):
        evals.append({"step": 10 * number, "eval": {"k=1": value}})
    return {
        "run": f"depo1_nano_{label}_s{seed}",
        "task": {"name": "depo1"},
        "preset": "nano",
        "model": {"mixer": "attention", "pos": "rope", "canon": ""} | model,
        "training": {"steps": 1000, "seed": seed},
        "evals": evals,
        "seconds": seconds,
        "units": {"k=1": "share"},
        "chance": 0.25,
    }


def test_runs_are_read(here):
    """Figures, and runs that have no scores yet, are left out."""
    train.main(tiny("--steps 40 --eval-every 20", "out/finished"))
    for name, count in (("begun", 0), ("stopped", 1)):  # lines that the log has so far
        shutil.copytree("out/finished", f"out/{name}")
        log = Path("out", name, "metrics.jsonl")
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:count]))
    Path("out/figure.png").touch()
    shutil.copytree("out/stopped", "out/undefined")
    log = Path("out/undefined/metrics.jsonl")
    log.write_text(re.sub(r'"tokens": [\d.]+}', '"tokens": null}', log.read_text()))
    runs = plot.read_runs(sorted(Path("out").iterdir()))
    finished, stopped, undefined = runs
    assert math.isnan(plot.last_scores([undefined], "tokens")[0])
    plot.main([str(path) for path in Path("out").iterdir()])
    assert Path("out/copy_nano.png").exists()
    last = logged("out/finished")[-1]
    assert [line["step"] for line in finished["evals"]] == [10, 20, 40]
    assert finished["evals"][-1]["eval"] == last["eval"] and finished["seconds"] == last["seconds"]
    assert [line["step"] for line in stopped["evals"]] == [10] and stopped["seconds"] is None


STOPPED = toy_run("without", 0.4, 0.8, seed=1, seconds=None)
TWO_GROUPS = {
    "without": [toy_run("without", 0.2, 0.4, 0.5), STOPPED, toy_run("without", 0.9, 0.9, seed=2)],
    "with": [toy_run("with", 0.9, 0.95, canon="abcd", pos="nope")],
}


def test_curves_are_runs_and_their_mean():
    """The mean goes as far as all seeds have come. Runs without the score do not count."""
    figure = plot.curves(TWO_GROUPS)
    (axis,) = figure.axes
    drawn = [list(line.get_ydata()) for line in axis.lines]
    without, mean, chance = [[0.2, 0.4, 0.5], [0.4, 0.8], [0.9, 0.9]], [0.5, 0.7], [0.25, 0.25]
    assert_close(drawn, [*without, mean, [0.9, 0.95], chance])
    assert [line.get_linestyle() for line in axis.lines] == ["-", "-", "-", "-", "--", ":"]
    of_other_task = {"evals": [{"step": 1, "eval": {"tokens": 0.1}}]}
    curve = plot.mean_by_step([*TWO_GROUPS["without"], of_other_task], "k=1")
    assert_close(list(curve.values()), mean)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["without, seed 1 (step 20 of 1,000)", "with", "chance"]
    assert "Seeds per model: 1 to 3. Training steps: 1,000." in legend.get_title().get_text()


def test_a_single_evaluation_is_seen():
    """A line of one point would be invisible."""
    figure = plot.curves({"with": [toy_run("with", 0.5, canon="abcd")]})
    assert figure.axes[0].lines[0].get_marker() == "o"
    assert figure.legends[0].get_title().get_text() == "Seeds per model: 1. Training steps: 1,000."


def test_bars_are_means_and_dots_are_runs():
    (axis,) = plot.bars(TWO_GROUPS).axes
    assert_close([bar.get_width() for bar in axis.patches], [2.2 / 3, 0.95])
    dots = [list(line.get_xdata()) for line in axis.lines]
    assert dots == [[0.5, 0.8, 0.9], [0.95], [0.25, 0.25]]  # the last is chance


class SharpMixer(canon_gpt.Mixer):
    """Attention with two heads, its own scale, and a mask. It keeps its weights."""

    def __init__(self, config):
        super().__init__()
        self.qkv = torch.nn.Linear(config.d_model, 3 * config.d_model)

    def forward(self, x, state=None):
        q, k, v = heads(self.qkv(x), 6).transpose(1, 2).chunk(3, dim=1)  # (1, 2, T, D / 2)
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        (self.weights,) = (9 * q @ k.mT + mask).softmax(-1)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=9).transpose(1, 2).flatten(2)


@patch.dict(canon_gpt.MIXERS, sharp=SharpMixer)
@patch.object(Block, "forward", lambda self, x, state: self.norm1(x + self.mixer(x)))
def test_attention_maps_are_the_weights_of_attention():
    """Also of a changed model: with learned positions, a norm after the mixer, and an own mixer. No
    hook is left in it."""
    config = Config(vocab_size=9, block_size=8, n_layer=2, n_head=1, d_model=32, mixer="gla,sharp")
    model, learned = CanonGPT(config), torch.randn(6, 32)
    model.embed.register_forward_hook(lambda layer, tokens, x: x + learned)
    maps = plot.attention_maps(model, [1, 2, 3, 4, 3, 2])
    assert list(maps) == [(2, 1), (2, 2)]
    assert_close(torch.stack(list(maps.values())), model.blocks[1].mixer.weights)
    assert not model.blocks[1]._forward_pre_hooks


def test_plot_draws_and_packs_what_it_finds(here, capsys):
    """A folder's name may look like a pattern, or like mathematics; scores may be NaN. Figures of
    packed runs do not replace those of own runs."""
    runs = [toy_run("rope_abcd", 0.8), *TWO_GROUPS["without"]]
    plot.pack(runs, "run[1].json")
    plot.pack([toy_run("$\\oops$", math.nan, math.nan)], "run1.json")
    plot.main(["run[1].json", "--save", "packed.json"])
    assert plot.read_runs(["packed.json"]) == runs
    assert "| without, seed 1 (step 20 of 1,000) | 73% (50, 80, 90) |" in capsys.readouterr().out
    many = [toy_run(f"n-layer={layers}", 0.1) for layers in range(11)]  # too many for curves
    plot.pack([{**run, "preset": "small"} for run in many], "run2.json")
    plot.main(["run?.json"])
    assert "| $\\oops$ | nan% |" in capsys.readouterr().out
    for name in ("packed_depo1_nano.png", "packed_depo1_small.png"):
        assert Path("out", name).stat().st_size > 10_000
    assert not Path("out/depo1_nano.png").exists()


def test_figures_and_groups_follow_from_names():
    """Each size of a task has a figure. A group is a name without its seed and without flags that
    all runs share; what a folder is called by --out has no flags. Groups without Canon come first.
    Of runs with one name, the last counts."""

    def run(name, value, n=16, **model):
        seed = int(name[-1]) if name[-1].isdigit() else 0
        task = {"name": "copy", "N": n, "letters": [1, "/"]}
        return toy_run("", value, seed=seed, **model) | {"run": name, "task": task}

    flags = "N=16_steps=800"
    runs = [
        run(f"copy_nano_rope_abcd_{flags}_lr=0.1_s1", 0.1, canon="abcd"),
        run(f"copy_nano_rope_abcd_{flags}_lr=0.2_s0", 0.2, canon="abcd"),
        run(f"copy_nano_rope_bare_{flags}_s1", 0.3),
        run(f"copy_nano_rope_bare_{flags}_s0", 0.4),
        run(f"copy_nano_rope_bare_{flags}_s0", 0.5),
        run("mine", 0.6),
        run("copy_nano_rope_abcd_s0", 0.7, n=64, canon="abcd"),
    ]
    figures = plot.by_figure(runs)
    assert list(figures) == ["copy_nano_N=16", "copy_nano_N=64"]
    sixteen, (other,) = figures.values()
    assert list(plot.by_figure([other])) == ["copy_nano"]
    assert plot.shared_flags(sixteen) == {"N=16", "steps=800"}
    groups = plot.group(sixteen)
    last = {label: plot.last_scores(members, "k=1") for label, members in groups.items()}
    expected = {"mine": [0.6], "rope_bare": [0.5, 0.3]}
    expected |= {"rope_abcd_lr=0.1": [0.1], "rope_abcd_lr=0.2": [0.2]}
    assert list(last.items()) == list(expected.items())
    shown = [plot.in_words(label, runs) for label, runs in groups.items()]
    assert shown == ["mine", "rope without Canon", "rope abcd lr=0.1", "rope abcd lr=0.2"]


def test_unlike_runs_are_no_seeds_of_one_model():
    """As where a preset was edited between them. None is a default."""
    runs = [toy_run("rope", 0.1, seed=seed, short_conv=None) for seed in range(3)]
    runs[1]["model"]["short_conv"] = False
    assert list(plot.group(runs)) == ["rope"]
    runs[0]["training"]["lr"] = 0.01
    for run in runs[1:]:
        run["training"]["lr"] = 0.1
    groups = plot.group(runs)
    assert [len(groups[label]) for label in ("rope", "rope_lr=0.1")] == [1, 2]


def test_many_lines_of_one_kind_differ_in_colour():
    """Three differ in their markers. With Canon they are orange while that tells them apart."""
    for count, n_colours in ((3, 1), (4, 4)):
        groups = {str(n): [toy_run(str(n), 0.5, canon="abcd")] for n in range(count)}
        groups["without"] = [toy_run("without", 0.5)]
        *canon, (without, _, _) = plot.line_styles(groups).values()
        colours = {colour for colour, _, _ in canon}
        assert len(colours) == n_colours and without == plot.GREY
        assert (plot.ORANGE in colours) == (count == 3) and len(set(canon)) == count


def test_a_program_that_a_notebook_starts_needs_no_backend():
    own = os.environ | {"MPLBACKEND": "not_here", "PYTHONPATH": str(HERE)}
    subprocess.run([sys.executable, "-c", "import plot"], env=own, check=True)


def test_inside_shows_the_tokens_that_get_attention(refused):
    """At most 40 of them. A linear mixer has no attention; elsewhere there is no run."""
    train.main(tiny("--N 24 --block-size 49 --steps 1", "out/long"))
    first, second, _ = plot.inside("out/long").axes
    assert second.get_xlabel() == "looks at (40 of 49 tokens)"
    task, model = sample.load_model("out/long")
    (document,) = task.documents(default_rng([0, tasks.SAMPLES]), 1)
    maps = plot.attention_maps(model, document.tokens[:-1])
    shown = {float(axis.images[0].get_array().max()) for axis in (first, second)}
    assert shown == {weights[-12:].max().item() for weights in maps.values()}
    train.main(tiny("--mixer gla --steps 1", "out/linear"))
    refused(["--inside", "out/linear"], "gla", "no attention", main=plot.main)
    refused(["out/lon"], "no run in out/lon", main=plot.main)
    for text in ("{", "{}"):
        Path("out/damaged.json").write_text(text)
        refused(["out/damaged.json"], "out/damaged.json", "damaged", main=plot.main)


# ---- 6. The pages ----------------------------------------------------------


def test_the_commands_shown_are_allowed():
    """Each `python train.py --task ..` of these pages."""
    shown = 0
    for page in chain(HERE.glob("*.md"), HERE.glob("*/*.md")):
        text = page.read_text().replace("\\\n", " ")
        for command in re.findall(r"python train\.py (--task [^#\n|`]*)", text):
            if "--text" not in command:
                train.settings_of(shlex.split(command))
                shown += 1
    assert shown >= 8
