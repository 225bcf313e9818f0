"""The tests:   python -m pytest

By file, from the inside out: 1 kernels.py, 2 canon_gpt.py, 3 tasks.py, 4 train.py, 5 plot.py,
6 results/reproduce.py, 7 assignment/, 8 benchmarks/, 9 README.md and results/README.md. Fast code is
compared with slow code that is obviously right, written here again from the definitions; properties
are tried on random shapes.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "results"), str(HERE / "assignment")]

import canon_gpt  # noqa: E402
import grade  # noqa: E402
import kernels  # noqa: E402
import make  # noqa: E402
import plot  # noqa: E402
import reproduce  # noqa: E402
import tasks  # noqa: E402
import train  # noqa: E402
from canon_gpt import (  # noqa: E402
    CANONS, GLA, MIXERS, MLPS, POSITIONS, Attention, Block, Canon, CanonGPT, Config, GatedDeltaNet,
    Mamba2, chunked_linear_attention, linear_recurrence,
)  # fmt: skip
from tasks import make_task  # noqa: E402

needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
needs_compiler = pytest.mark.skipif(not (CUDA or train.can_compile_on_cpu()), reason="no compiler")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- 1. kernels.py ---------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 1, 5), (1, 2, 64), (2, 9, 7), (2, 13, 130), (1, 70, 9), (2, 4, 300)]
SHAPES += [tuple(map(int, np.random.default_rng(i).integers(1, (4, 40, 150)))) for i in range(4)]
BOTH = ["causal_conv_pytorch", pytest.param("causal_conv_triton", marks=needs_triton)]
ALL = ["causal_conv_reference", "causal_conv", *BOTH]


def conv_inputs(B, T, D, kernel=4, dtype=torch.float32):
    """x and dy (B, T, D), slices of wider tensors as after a projection, and a weight."""
    x = torch.randn(B, T, 2 * D + 1, dtype=dtype, device=DEVICE)[..., D : 2 * D]
    weight = (torch.rand(kernel, D, device=DEVICE) * 2 - 1) * kernel**-0.5
    return x, weight, torch.randn(B, T, D + 3, dtype=dtype, device=DEVICE)[..., :D]


def conv_exact(x, weight, dy, residual=True):
    inputs = (u.double() for u in (x, weight, dy))
    return kernels.value_and_gradients(kernels.causal_conv_reference, *inputs, residual)


def test_convolution_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[2.0], [3.0]])  # 2 h_t + 3 h_{t-1}
    z = torch.tensor([[[2.0], [23.0], [230.0]]])
    assert torch.equal(kernels.causal_conv_reference(x, weight, residual=False), z)
    assert torch.equal(kernels.causal_conv_reference(x, weight), x + z)
    tail = torch.tensor([[[5.0]]])
    assert kernels.causal_conv_reference(x, weight, False, tail)[0, 0, 0] == 2 + 3 * 5


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution_equals_the_definition_in_float64(name, dtype, shape):
    """Values and both gradients. Sums are float32, so what is left is one rounding to dtype: half a
    unit in the last place on hardware, a whole one in Triton's interpreter, which truncates."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    small = math.prod(shape) < 1000 and dtype == torch.float32
    for kernel in (1, 2, 3, 4, 5, 8) if small else (4,):
        for residual in (True, False):
            x, weight, dy = conv_inputs(*shape, kernel, dtype)
            got = kernels.value_and_gradients(getattr(kernels, name), x, weight, dy, residual)
            for which, g, want in zip(("y", "dx", "dw"), got, conv_exact(x, weight, dy, residual)):
                off = (g - want).abs().max().item()
                assert off <= tolerance * (want.abs().max().item() + 1), (which, kernel, residual)


@pytest.mark.parametrize("name", BOTH)
def test_convolution_forward_alone(name):
    for kernel, shape in itertools.product((2, 3, 4), ((1, 1, 2), (2, 9, 40))):
        x, weight, _ = conv_inputs(*shape, kernel)
        want = kernels.causal_conv_reference(x, weight)
        torch.testing.assert_close(getattr(kernels, name)(x, weight), want)


@needs_triton
def test_triton_segments_meet_within_a_sequence():
    """150 tokens are five segments forward and three backward, 300 channels two strips."""
    x, weight, dy = conv_inputs(1, 150, 300)
    got = kernels.value_and_gradients(kernels.causal_conv_triton, x, weight, dy)
    assert max(map(kernels.relative_error, got, conv_exact(x, weight, dy))) < 1e-5
    again = kernels.value_and_gradients(kernels.causal_conv_triton, x, weight, dy)
    assert all(map(torch.equal, got, again))  # the same bits


def test_eager_convolution_makes_no_shifted_copies(monkeypatch):
    monkeypatch.setattr(kernels, "shift", None)
    monkeypatch.setattr(F, "pad", None)
    x, weight, dy = conv_inputs(2, 9, 7)
    got = kernels.value_and_gradients(kernels.causal_conv_pytorch, x, weight, dy)
    assert all(u.isfinite().all() for u in got)


@pytest.mark.parametrize("name", ALL)
def test_convolution_keeps_dtype_and_takes_any_stride(name):
    """Also under autocast, which leaves it alone, and with weights of another dtype."""
    conv = getattr(kernels, name)
    x, weight, _ = conv_inputs(3, 11, 16, dtype=torch.bfloat16)
    assert conv(x, weight).dtype == torch.bfloat16
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)  # last dim not contiguous
    torch.testing.assert_close(conv(transposed, weight), conv(x.contiguous(), weight))
    x = x.float().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert conv(x, weight).dtype == torch.float32
    dx = torch.autograd.grad(conv(x, weight).sum(), x)[0]  # sum's gradient has strides of 0
    want = torch.autograd.grad(kernels.causal_conv_reference(x, weight).sum(), x)[0]
    torch.testing.assert_close(dx, want)
    low = weight.bfloat16().requires_grad_()
    assert torch.autograd.grad(conv(x, low).sum(), low)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ("causal_conv_reference", "causal_conv"))
@pytest.mark.parametrize("residual", (True, False))
@pytest.mark.parametrize("with_tail", (True, False))
def test_convolution_gradcheck(name, residual, with_tail):
    shapes = ((2, 5, 4), (4, 4)) + ((2, 3, 4),) * with_tail
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    conv = lambda x, w, *tail: getattr(kernels, name)(x, w, residual, *tail)  # noqa: E731
    assert torch.autograd.gradcheck(conv, inputs)


@pytest.mark.parametrize("name", ("causal_conv_reference", "causal_conv"))
def test_convolution_streams(name):
    """In pieces, each with the inputs before it as tail, as in one pass."""
    for kernel in (2, 3, 4, 8):
        x, weight, _ = conv_inputs(2, 17, 6, kernel)
        past, pieces = torch.zeros(2, kernel - 1, 6, device=DEVICE), []
        for piece in x.split((1, 2, 5, 1, 8), dim=1):
            pieces.append(getattr(kernels, name)(piece, weight, tail=past))
            past = torch.cat([past, piece], dim=1)[:, 1 - kernel :]
        torch.testing.assert_close(torch.cat(pieces, dim=1), kernels.causal_conv(x, weight))


@needs_triton
def test_operators_are_registered_properly():
    """PyTorch's own check of a custom operator: schema, fake version, AOTAutograd."""
    for kernel, residual in ((4, True), (3, False)):
        x, weight, dy = conv_inputs(2, 5, 8, kernel)
        torch.library.opcheck(kernels.forward_op, (x, weight, residual))
        torch.library.opcheck(kernels.backward_op, (dy, x, weight, residual))


@pytest.mark.parametrize("name", ALL)
def test_convolution_compiles_in_one_graph(name):
    """Also for fewer tokens than weights, and where only x or only the weight wants a gradient."""
    conv = getattr(kernels, name)
    for shape, residual in (((2, 9, 8), True), ((3, 2, 5), False)):
        torch._dynamo.reset()
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        x, weight, dy = conv_inputs(*shape)
        _, dx, dw = want = conv_exact(x, weight, dy, residual)
        got = kernels.value_and_gradients(compiled, x, weight, dy, residual)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        for f in (conv, compiled):
            a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
            alone = torch.autograd.grad(f(a, weight, residual), a, dy)[0]
            torch.testing.assert_close(alone.double(), dx, atol=1e-5, rtol=1e-5)
            alone = torch.autograd.grad(f(x, b, residual), b, dy)[0]
            torch.testing.assert_close(alone.double(), dw, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_forward_mode_is_right_or_refused(name):
    x, weight, _ = conv_inputs(2, 5, 4)
    conv = lambda x: getattr(kernels, name)(x, weight)  # noqa: E731
    if name == "causal_conv_reference":
        tangent = torch.func.jvp(conv, (x,), (torch.ones_like(x),))[1]
        return torch.testing.assert_close(tangent, conv(torch.ones_like(x)))
    with pytest.raises(RuntimeError):
        torch.func.jvp(conv, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        conv(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_convolution_beyond_2_to_the_31():
    """Of a tensor with more numbers than 32 bits count, the last rows."""
    x, weight, _ = conv_inputs(1, 2**20 + 5, 1024, dtype=torch.bfloat16)
    x = x.requires_grad_()
    y = kernels.causal_conv(x, weight)
    last = kernels.causal_conv(x[:, -8:], weight, tail=x[:, -11:-8])
    torch.testing.assert_close(y[:, -8:], last)
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    want = 1 + torch.stack([weight[: i + 1].sum(0) for i in (3, 2, 1, 0)])
    torch.testing.assert_close(dx[0, -4:], want.bfloat16())


def test_convolution_of_nothing():
    for shape in ((0, 4, 3), (2, 0, 3)):
        x = torch.zeros(shape, requires_grad=True)
        y = kernels.causal_conv(x, torch.ones(4, 3, requires_grad=True))
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


def test_convolution_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 5, 3), torch.zeros(4, 3)
    for x, weight, tail in ((x[0], weight, None), (x, weight[:, :2], None), (x, weight, x)):
        with pytest.raises(ValueError):
            kernels.causal_conv(x, weight, tail=tail)


def test_kernels_py_checks(monkeypatch, capsys):
    kernels.main()
    table = capsys.readouterr().out
    assert "definition" in table and "PyTorch" in table and "e-0" in table
    wrong = lambda x, w, residual: kernels.causal_conv(x, w * 1.001, residual)  # noqa: E731
    with pytest.raises(SystemExit, match="wrong, torch.float32: relative error"):
        kernels.check({"wrong": wrong}, DEVICE, [torch.float32])


# ---- 2. canon_gpt.py: Part I -----------------------------------------------

LINEAR = ("gla", "mamba2", "gdn")
VARIANTS = [dict(pos=pos, canon=canon) for pos in POSITIONS for canon in ("", "abcd")]
VARIANTS += [dict(canon=point) for point in "abcd"]
VARIANTS += [dict(canon="abcd", canon_kernel=2), dict(canon="abcd", canon_kernel=8)]
VARIANTS += [dict(canon="abcd", canon_residual=False), dict(canon="abcd", canon_silu=True)]
VARIANTS += [dict(canon="abcd", canon_residual=False, canon_silu=True)]
VARIANTS += [dict(mlp=mlp, canon="ab" if mlp == "none" else "abcd") for mlp in MLPS]
VARIANTS += [dict(mixer=mixer, canon=canon, short_conv=conv) for mixer in LINEAR
             for canon, conv in (("", False), ("acd", True), ("abcd", None))]  # fmt: skip
VARIANTS += [dict(mixer="gdn,attention", canon="acd"), dict(mixer="mamba2", mlp="none")]


def small_model(**options):
    """Two layers, 32 dims, 4 heads, 24 positions; weights large enough for every path to matter."""
    settings = dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | options
    model = CanonGPT(Config(**settings))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.mul_(10)
    return model


def some_tokens(*shape):
    return torch.randint(0, 19, shape or (2, 24), device="cpu")


def name_of(options):
    return ",".join(f"{key}={value}" for key, value in options.items()) or "plain"


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_causality(options):
    """Changing token t leaves the logits before t as they are, and changes those at t."""
    model, tokens = small_model(**options).double(), some_tokens(1, 24)
    before = model(tokens)[0]
    for t in (0, 1, 11, 23):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 1) % 19
        after = model(changed)[0]
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-12, rtol=0)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_streaming_equals_one_pass(options):
    model, tokens = small_model(**options).double(), some_tokens()
    for lengths in ((1,) * 24, (5, 1, 1, 9, 8), (23, 1)):
        state = {}
        pieces = [model(piece, state=state)[0] for piece in tokens.split(lengths, dim=1)]
        whole = model(tokens)[0]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("points", ("a", "b", "c", "d", "abcd"))
def test_canon_points_widths_and_zero_weights(points):
    """Each point is where its width says; with zero weights, Canon is no Canon."""
    with torch.device("meta"):
        model = CanonGPT(Config(vocab_size=10, block_size=8, n_layer=1, canon=points.upper()))
    widths = {"a": ("canon_a", 768), "b": ("mixer.canon", 2304), "c": ("canon_c", 768)}
    widths["d"] = ("mlp.canon", 4096)
    block = model.blocks[0].named_modules()
    found = {name: m.weight.shape for name, m in block if isinstance(m, Canon)}
    assert found == {widths[p][0]: (4, widths[p][1]) for p in points}

    model, bare, tokens = small_model(canon=points), small_model(), some_tokens()
    own = {name: w for name, w in model.state_dict().items() if "canon" not in name}
    bare.load_state_dict(own)
    assert not torch.allclose(model(tokens)[0], bare(tokens)[0])
    for module in model.modules():
        if isinstance(module, Canon):
            torch.nn.init.zeros_(module.weight)
    assert torch.equal(model(tokens)[0], bare(tokens)[0])


WHERE = [(pos, turned, True, False) for pos, turned in zip(POSITIONS, (16, 4, 0, 0, 0))]
WHERE += [("rope", 16, True, True), ("rope", 16, False, True), ("rope", 16, False, False)]


@pytest.mark.parametrize("pos, turned, residual, silu", WHERE)
def test_canon_points_are_where_the_paper_puts_them(pos, turned, residual, silu):
    """A block recomputed from its parts: convolutions written out, rotary by complex numbers."""

    def canon(module, h):
        z = sum(module.weight[i] * F.pad(h, (0, 0, i, 0))[:, : h.shape[1]] for i in range(4))
        z = z * torch.sigmoid(z) if silu else z
        return h + z if residual else z

    def norm(module, h):
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def rotary(h):  # dim j and dim j + turned / 2 of (B, H, T, 16) make a complex number
        half = turned // 2
        speeds = 10000 ** (-torch.arange(half).double() / max(half, 1))
        angle = torch.arange(24).double()[:, None] * speeds
        turn = torch.polar(torch.ones_like(angle), angle)
        z = torch.complex(h[..., :half], h[..., half:turned]) * turn
        return torch.cat([z.real, z.imag, h[..., turned:]], dim=-1)

    options = dict(canon="abcd", canon_residual=residual, canon_silu=silu)
    model = small_model(pos=pos, n_layer=1, n_head=2, **options).double()
    tokens = some_tokens()
    block, x = model.blocks[0], model.embed(tokens)
    h = canon(block.canon_a, norm(block.norm1, x))
    qkv = canon(block.mixer.canon, h @ block.mixer.qkv.weight.T)
    q, k, v = qkv.view(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)
    logits = rotary(q) @ rotary(k).transpose(-1, -2) / 16**0.5
    if pos in ("alibi", "halibi"):
        logits = logits + canon_gpt.distance_bias(pos, 2, 24, 24)
    logits = logits + torch.full((24, 24), -torch.inf).triu(1)
    x = x + (logits.softmax(-1) @ v).transpose(1, 2).flatten(2) @ block.mixer.out.weight.T
    h = canon(block.canon_c, norm(block.norm2, x))
    gate, up = canon(block.mlp.canon, h @ block.mlp.up.weight.T).chunk(2, dim=-1)
    x = x + (gate * torch.sigmoid(gate) * up) @ block.mlp.down.weight.T
    want = norm(model.norm, x) @ model.head.weight.T
    torch.testing.assert_close(model(tokens)[0], want, atol=1e-4, rtol=1e-4)  # float32 angles


@pytest.mark.parametrize("kernel", (2, 3, 4))
def test_a_canon_layer_streams(kernel):
    """By Eq. 4.1, one token after another; in pieces of any length; and memory does not grow."""
    config = Config(vocab_size=1, block_size=1, canon="a", canon_kernel=kernel)
    layer, x, state = Canon(6, config), torch.randn(2, 12, 6), {}
    w = layer.weight
    want = [x[:, t] + sum(w[i] * x[:, t - i] for i in range(min(kernel, t + 1))) for t in range(12)]
    torch.testing.assert_close(layer(x), torch.stack(want, dim=1))
    pieces = [layer(piece, state) for piece in x.split((1, 1, 5, 2, 3), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), torch.stack(want, dim=1))
    kept = sum(u.untyped_storage().nbytes() for u in state.values())
    assert kept == 4 * 2 * (kernel - 1) * 6, "a view keeps all of the tensor that it was cut from"


@pytest.mark.parametrize("canon", ("", "b"))
@pytest.mark.parametrize("pos", POSITIONS)
def test_attention_is_a_mean_of_values(canon, pos):
    """One head and one query at a time; then the same in a stream."""
    layer = Attention(Config(1, 9, n_head=2, d_model=16, canon=canon, pos=pos))
    x = torch.randn(3, 9, 16)
    q, k, v = layer.canon(layer.qkv(x)).view(3, 9, 3, 2, 8).unbind(2)
    if pos in ("rope", "rope4"):
        angles = canon_gpt.rotary_angles(9, 8 if pos == "rope" else 2)
        q, k = (canon_gpt.rotate(u, angles.cos(), angles.sin()) for u in (q, k))
    bias = torch.zeros(2, 9, 9)
    if pos in ("alibi", "halibi"):
        bias = canon_gpt.distance_bias(pos, 2, 9, 9)
    want = torch.empty(3, 9, 2, 8)
    for b, t, h in itertools.product(range(3), range(9), range(2)):
        logits = k[b, : t + 1, h] @ q[b, t, h] / 8**0.5 + bias[h, t, : t + 1]
        want[b, t, h] = logits.softmax(0) @ v[b, : t + 1, h]
    want, state = layer.out(want.flatten(2)), {}
    torch.testing.assert_close(layer(x), want)
    pieces = [layer(piece, state) for piece in x.split((1, 4, 1, 3), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), want)


def test_mlp_variants():
    h = torch.randn(2, 3, 32)
    for mlp in ("swiglu", "swiglu-relu2", "silu", "relu2"):
        module = small_model(mlp=mlp).blocks[0].mlp
        act = (lambda x: x.clamp(min=0) ** 2) if mlp.endswith("relu2") else F.silu
        up = h @ module.up.weight.T
        if mlp.startswith("swiglu"):
            assert up.shape[-1] == 2 * 88  # 8 * 32 / 3 = 85.3; 88 is the nearest multiple of 8
            inner = act(up[..., :88]) * up[..., 88:]
        else:
            assert up.shape[-1] == 4 * 32
            inner = act(up)
        torch.testing.assert_close(module(h), inner @ module.down.weight.T)


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
        assert abs(weight.mean()) < 5 * bound / (3 * weight.numel()) ** 0.5
        assert abs(weight.var() / (bound**2 / 3) - 1) < 5 * (0.8 / weight.numel()) ** 0.5


@pytest.mark.parametrize("mlp", ("swiglu", "silu"))
@pytest.mark.parametrize("D", (512, 768))
def test_parameter_counts(mlp, D):
    with torch.device("meta"):
        options = dict(vocab_size=100, block_size=8, n_head=8, d_model=D, mlp=mlp)
        bare = CanonGPT(Config(**options)).parameter_counts()
        full = CanonGPT(Config(**options, canon="abcd")).parameter_counts()
        tied = CanonGPT(Config(**options, tie_embeddings=True)).parameter_counts()
    assert bare["embeddings"] == 2 * 100 * D == 2 * tied["embeddings"] and bare["canon"] == 0
    body = bare["total"] - bare["embeddings"]
    assert body == tied["total"] - tied["embeddings"]
    assert abs(body / (12 * 12 * D**2) - 1) < 0.005  # norms and rounding are small
    assert full["total"] - bare["total"] == full["canon"]
    width_d = 2 * 8 * round(D / 3) if mlp == "swiglu" else 4 * D
    assert full["canon"] == 12 * 4 * (5 * D + width_d)


def test_frozen_canon_and_weight_decay_groups():
    training = dict(lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.5)
    model = small_model(canon="abcd", canon_frozen=True)
    canons = [module.weight for module in model.modules() if isinstance(module, Canon)]
    start = [weight.clone() for weight in canons]
    optimizer = train.make_optimizer(model, training, "cpu")
    model(some_tokens(), some_tokens())[1].backward()
    optimizer.step()
    assert len(canons) == 8 and all(map(torch.equal, start, canons))

    for options in (dict(tie_embeddings=True), dict(mixer="mamba2,gdn", short_conv=True)):
        model = small_model(canon="acd", **options)
        decayed, plain = train.make_optimizer(model, training, "cpu").param_groups
        names = {id(p): name for name, p in model.named_parameters()}
        assert decayed["weight_decay"] == 0.5 and plain["weight_decay"] == 0
        spared = re.compile(r"norm|canon|conv|A_log|dt_bias|skip")
        for group, wanted in ((plain, True), (decayed, False)):
            assert all(bool(spared.search(names[id(p)])) == wanted for p in group["params"])
        assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_rotary_depends_on_the_distance_only():
    angles = canon_gpt.rotary_angles(64, 8).double()
    q, k = torch.randn(8).double(), torch.randn(8).double()

    def rows(u, angles=angles):
        return canon_gpt.rotate(u.expand(1, 64, 1, 8), angles.cos(), angles.sin())[0, :, 0]

    scores = rows(q) @ rows(k).T
    for distance in range(-63, 64):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert scores[0].std() > 0.1  # and it does depend on it
    speeds = torch.tensor([1.0, 0.1, 0.01, 0.001]).double()
    torch.testing.assert_close(angles[1], speeds, atol=1e-6, rtol=0)
    turn = torch.polar(torch.ones(64, 4).double(), angles)
    pairs = torch.complex(q[:4], q[4:]) * turn  # dims j and j + 4 are a pair
    torch.testing.assert_close(rows(q), torch.cat([pairs.real, pairs.imag], dim=-1))
    quarter = rows(q, canon_gpt.rotary_angles(64, 2).double())
    assert torch.equal(quarter[:, 2:], q[2:].expand(64, 6))
    assert not torch.allclose(quarter[1:, :2], q[:2].expand(63, 2))


def test_alibi_masks_by_hand():
    x = -torch.inf
    alibi = canon_gpt.distance_bias("alibi", 2, 3, 3)  # slopes 2^-4 and 2^-8
    for head, slope in enumerate((1 / 16, 1 / 256)):
        want = torch.tensor([[0, x, x], [-slope, 0, x], [-2 * slope, -slope, 0]])
        assert torch.equal(alibi[head], want)
    assert torch.equal(canon_gpt.distance_bias("alibi", 2, 2, 3), alibi[:, 1:])
    halibi = canon_gpt.distance_bias("halibi", 4, 4, 4)
    itself = [[0, x, x, x], [x, 0, x, x], [x, x, 0, x], [x, x, x, 0]]
    nearest_two = [[0, x, x, x], [0, 0, x, x], [x, 0, 0, x], [x, x, 0, 0]]
    every = [[0, x, x, x], [0, 0, x, x], [0, 0, 0, x], [0, 0, 0, 0]]
    assert torch.equal(halibi, torch.tensor([itself, nearest_two, every, every]))


def test_without_positions_attention_sees_a_set():
    """Without Canon, shuffling the past leaves one layer's last logits alone. With it, not."""
    tokens = some_tokens(1, 24)
    shuffled = torch.cat([tokens[:, torch.randperm(23)], tokens[:, 23:]], dim=1)
    for canon, same in (("", True), ("abcd", False)):
        model = small_model(pos="nope", n_layer=1, canon=canon)
        a, b = model(tokens)[0][:, -1], model(shuffled)[0][:, -1]
        assert torch.allclose(a, b, atol=1e-4) == same


def test_loss_counts_the_masked_targets_in_nats():
    model, tokens, targets = small_model(), some_tokens(), some_tokens()
    mask = torch.rand(2, 24) < 0.3
    logits, loss = model(tokens, targets, mask)
    nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(loss, nats[mask].mean())
    torch.testing.assert_close(model(tokens, targets)[1], nats.mean())
    assert model(tokens, targets, torch.zeros_like(mask))[1] == 0
    assert model(tokens)[1] is None


def test_generate():
    model, tokens = small_model(canon="abcd"), some_tokens(3, 5)
    greedy, slow = model.generate(tokens, 10, temperature=0), tokens
    for _ in range(10):
        slow = torch.cat([slow, model(slow)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy, slow)

    stop = int(greedy[0, 7])
    stopped = model.generate(tokens, 10, temperature=0, stop=stop)
    ends = [row.index(stop, 5) if stop in row[5:] else 15 for row in greedy.tolist()]
    assert stopped.shape[1] == min(15, max(ends) + 1)
    for row, full, end in zip(stopped.tolist(), greedy.tolist(), ends):
        assert row[:end] == full[:end] and all(token == stop for token in row[end:])

    seeds = (torch.Generator().manual_seed(seed) for seed in (0, 0, 1))
    first, again, other = (model.generate(tokens, 10, generator=g) for g in seeds)
    assert torch.equal(first, again) and not torch.equal(first, other)
    for temperature in (1.0, 2.0):
        generator = torch.Generator().manual_seed(0)
        many = model.generate(tokens[:1].expand(4000, 5), 1, temperature, generator=generator)[:, 5]
        expected = 4000 * (model(tokens[:1])[0][0, -1] / temperature).softmax(-1)
        counts, likely = torch.bincount(many, minlength=19), expected > 5
        chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
        assert chi2 < likely.sum() + 5 * (2 * likely.sum()) ** 0.5


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


@pytest.mark.parametrize("options", [*COMPILED, "inductor"], ids=str)
def test_model_compiles_in_one_graph(options):
    """Most without the code generator, but with its decompositions; one with all of it."""
    backend, device = "aot_eager_decomp_partition", "cpu"
    if options == "inductor":
        if not (CUDA or train.can_compile_on_cpu()):
            pytest.skip("no compiler")
        options, backend, device = dict(canon="abcd"), "inductor", DEVICE
    model = small_model(**options).to(device)
    tokens, targets = some_tokens().to(device), some_tokens().to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss, want = compiled(tokens, targets)[1], model(tokens, targets)[1]
    torch.testing.assert_close(loss, want)
    trained = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(want, trained)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("mixer", ("attention", *LINEAR))
def test_bfloat16_throughout_and_by_autocast(mixer):
    """Under autocast, Canon gets and gives bfloat16, and the loss stays float32."""
    model = small_model(canon="abcd", mixer=mixer).to(DEVICE)
    tokens, targets = some_tokens().to(DEVICE), some_tokens().to(DEVICE)
    exact, seen = model(tokens, targets)[1], []
    for module in model.modules():
        if isinstance(module, Canon):
            module.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype)))
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(tokens, targets)[1]
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 8 and loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0.1, rtol=0.05)
    loss = model.bfloat16()(tokens, targets)[1]
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0.1, rtol=0.05)


BAD_CONFIGS = (
    dict(mixer="conv"), dict(pos="rotary"), dict(mlp="gelu"), dict(canon="abe"), dict(canon="aa"),
    dict(canon_frozen=True), dict(canon_kernel=3), dict(canon_kernel=1), dict(canon_kernel=9),
    dict(canon_type="mine", canon="a"), dict(d_model=30), dict(d_model=20), dict(d_model=2**20 + 4),
    dict(d_model=16, pos="rope4"), dict(n_layer=0), dict(n_head=-4), dict(vocab_size=0),
    dict(block_size=0), dict(block_size=10**10), dict(mixer="gdn,mamba"), dict(mixer=""),
    dict(mixer="gdn,gdn,attention"), dict(short_conv=True), dict(pos="alibi", mixer="gla"),
    dict(pos="rope4", mixer="gdn"), dict(d_model=36, mixer="gla"), dict(d_model=36, mixer="mamba2"),
    dict(d_model=36, mixer="gdn"), dict(canon="abc", mlp="none"),
)  # fmt: skip


@pytest.mark.parametrize("options", BAD_CONFIGS, ids=name_of)
def test_config_names_field_and_value(options):
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


@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_is_the_formula(kind):
    """S_t = (I - b k k^T) D S_{t-1} + w k v^T and o_t = S_t^T q_t, with NumPy matrices per head."""
    B, T, H, K, V = 2, 5, 3, 4, 2
    q, k, v, g, beta = recurrence_inputs(kind, B, T, H, K, V)
    start = torch.randn(B, H, K, V).double()
    o, final = linear_recurrence(q, k, v, g, beta, start)
    for b, h in itertools.product(range(B), range(H)):
        S = start[b, h].numpy()
        for t in range(T):
            key, query = (u[b, t, h if u.shape[2] > 1 else 0].numpy() for u in (k, q))
            strength = 0 if beta is None else beta[b, t, h].item()
            D = np.diag(np.exp(np.broadcast_to(g[b, t, h].numpy(), K)))
            w = 1 if beta is None else strength
            S = (np.eye(K) - strength * np.outer(key, key)) @ D @ S + w * np.outer(key, v[b, t, h])
            np.testing.assert_allclose(o[b, t, h], S.T @ query, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(final[b, h], S, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(12))
def test_chunked_equals_the_recurrence(kind, case):
    """Values, final state, every gradient, in float64; random shapes, chunks and decays."""
    rng = np.random.default_rng([case, KINDS.index(kind)])
    B, T, H, K, V = (int(rng.integers(1, most)) for most in (4, 80, 4, 10, 10))
    T, chunk = (69, 1) if case == 1 else (T, int(rng.integers(1, 70)))
    inputs = recurrence_inputs(kind, B, T, H, K, V, strongest=float(rng.choice([0.01, 1, 30])))
    inputs.append(torch.randn(B, H, K, V).double() if case % 2 else None)
    inputs = each(torch.Tensor.requires_grad_, inputs)
    results = []
    for form in (linear_recurrence, functools.partial(chunked_linear_attention, chunk=chunk)):
        o, final = form(*inputs)
        assert o.shape == (B, T, H, V) and final.shape == (B, H, K, V)
        torch.manual_seed(case)
        weight_o, weight_S = torch.randn(o.shape).double(), torch.randn(final.shape).double()
        loss = (o * weight_o).sum() + (final * weight_S).sum()
        trained = [u for u in inputs if u is not None]
        results.append([o, final, *torch.autograd.grad(loss, trained)])
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strongest", (1e-6, 1, 30, 1000))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_chunked_is_stable_for_any_decay(kind, strongest, dtype):
    """From hardly any decay to forgetting at once; in bfloat16 within ten of its roundings."""
    inputs = recurrence_inputs(kind, 2, 150, 2, 16, 8, strongest)
    q, k, v, *rest = each(lambda u: u.float().to(DEVICE), inputs)
    low = each(torch.Tensor.requires_grad_, [q.to(dtype), k.to(dtype), v.to(dtype), *rest])
    exact = each(lambda u: u.detach().double().requires_grad_(), low)
    want = linear_recurrence(*exact)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        got = chunked_linear_attention(*low)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    dy = torch.randn_like(want[0])
    want += torch.autograd.grad((want[0] * dy).sum(), [u for u in exact if u is not None])
    got += torch.autograd.grad((got[0] * dy).sum(), [u for u in low if u is not None])
    for a, b in zip(got, want):
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 10 * 2**-9) * b.norm()


def test_chunked_saves_memory_linear_in_time():
    """What is kept for the backward pass, in bytes."""

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_under_autocast_keeps_its_state_in_float32(kind):
    """300 tokens, hardly any decay: a state rounded to bfloat16 at each would be off by over 1%."""
    inputs = each(torch.Tensor.float, recurrence_inputs(kind, 2, 300, 2, 16, 8, 1e-3))
    inputs = each(lambda u: u.to(DEVICE), inputs)
    want, want_state = linear_recurrence(*each(torch.Tensor.double, inputs))
    state, pieces = None, []
    with torch.autocast(DEVICE, torch.bfloat16):
        for t in range(300):
            token = each(lambda u: u[:, t : t + 1], inputs)
            o, state = chunked_linear_attention(*token, state=state)
            pieces.append(o)
    assert kernels.relative_error(torch.cat(pieces, dim=1), want) < 1e-2
    assert kernels.relative_error(state, want_state) < 1e-2


def slow_mixer(module, x):
    """One sequence x (T, D) through a mixer: NumPy, a head and a step at a time, by the papers."""
    T, D = x.shape
    array = lambda u: u.detach().numpy()  # noqa: E731
    sigmoid = lambda u: 1 / (1 + np.exp(-u))  # noqa: E731
    silu = lambda u: u * sigmoid(u)  # noqa: E731
    softplus = lambda u: np.log1p(np.exp(u))  # noqa: E731
    linear = lambda u, m: u @ array(m.weight).T  # noqa: E731

    def rms(u, m):
        return u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-6) * array(m.weight)

    def conv(u, m):
        past = [np.concatenate([np.zeros((i, u.shape[1])), u])[:T] for i in range(4)]
        return sum(w * p for w, p in zip(array(m.weight), past))

    def canon(u):
        return u + conv(u, module.canon) if isinstance(module.canon, Canon) else u

    def own(u):
        bias = 0 if module.conv.bias is None else array(module.conv.bias)
        return silu(conv(u, module.conv) + bias)

    def heads(u, H):
        return u.reshape(T, H, -1)

    def read(q, k, v, a, b=None):
        """The recurrence of each head; q, k, v, a (T, H, ..), b (T, H)."""
        o = np.empty_like(v)
        for h in range(v.shape[1]):
            S = np.zeros((k.shape[2], v.shape[2]))
            for t in range(T):
                key, w, erase = k[t, h], 1 if b is None else b[t, h], 0 if b is None else b[t, h]
                S = np.diag(np.broadcast_to(a[t, h], len(key))) @ S
                S = (np.eye(len(key)) - erase * np.outer(key, key)) @ S + w * np.outer(key, v[t, h])
                o[t, h] = S.T @ q[t, h]
        return o

    def gated(o):
        gate = heads(silu(linear(x, module.gate)), o.shape[1])
        return linear((rms(o, module.norm) * gate).reshape(T, -1), module.out)

    if isinstance(module, GLA):
        qkv = canon(linear(x, module.qkv))
        qkv = np.split(qkv if module.conv is None else own(qkv), [D // 2, D], axis=1)
        q, k, v = (heads(u, 4) for u in qkv)
        low, high = module.decay
        a = sigmoid(linear(linear(x, low), high) + array(high.bias)) ** (1 / 16)
        return gated(read(q * (D // 8) ** -0.5, k, v, heads(a, 4)))
    if isinstance(module, Mamba2):
        z, xBC, dt = np.split(canon(linear(x, module.into)), [2 * D, 4 * D + 128], axis=1)
        xBC = xBC if module.conv is None else own(xBC)  # without it, no SiLU either
        u, B, C = np.split(xBC, [2 * D, 2 * D + 64], axis=1)
        dt, u = softplus(dt + array(module.dt_bias)), heads(u, 16)
        q, k = (np.repeat(m[:, None], 16, axis=1) for m in (C, B))
        o = read(q, k, dt[..., None] * u, np.exp(-np.exp(array(module.A_log)) * dt)[..., None])
        y = (o + array(module.skip)[:, None] * u).reshape(T, -1)
        return linear(rms(y * silu(z), module.norm), module.out)
    H, qkv = module.n_head, canon(linear(x, module.qkv))
    qkv = silu(qkv) if module.conv is None else own(qkv)
    q, k, v = (heads(u, H) for u in np.split(qkv, [3 * D // 4, 3 * D // 2], axis=1))
    q, k = (u / np.linalg.norm(u, axis=-1, keepdims=True) for u in (q, k))
    dt = softplus(linear(x, module.decay) + array(module.dt_bias))
    a = np.exp(-np.exp(array(module.A_log)) * dt)[..., None]
    return gated(read(q * q.shape[2] ** -0.5, k, v, a, sigmoid(linear(x, module.strength))))


@pytest.mark.parametrize("mixer", LINEAR)
@pytest.mark.parametrize("canon, short_conv", (("", True), ("", False), ("b", False), ("b", True)))
def test_mixers_are_the_papers(mixer, canon, short_conv):
    model = small_model(mixer=mixer, canon=canon, short_conv=short_conv).double()
    module = model.blocks[1].mixer
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:  # what starts as ones or zeros would hide a mistake
                parameter.uniform_(0.5, 1.5)
    assert isinstance(module.canon, Canon) == bool(canon)
    assert (module.conv is not None) == short_conv
    x = torch.randn(2, 24, 32).double()
    for row, got in zip(x, module(x)):
        want = slow_mixer(module, row.numpy())
        np.testing.assert_allclose(got.detach().numpy(), want, atol=1e-10, rtol=1e-8)


def mixer_at(mixer, **options):
    return Block(Config(vocab_size=9, block_size=9, mixer=mixer, **options), mixer).mixer


def test_short_convolutions_as_their_authors_have_them():
    for mixer, width in {"gla": 2 * 768, "mamba2": 2 * 768 + 128, "gdn": 3 * 768}.items():
        default = mixer != "gla"
        cases = (({}, default), (dict(canon="acd"), default), (dict(canon="b"), False),
                 (dict(short_conv=False), False), (dict(canon="b", short_conv=True), True))
        for options, there in cases:
            assert (mixer_at(mixer, **options).conv is not None) == there
        own = mixer_at(mixer, short_conv=True).conv
        assert own.weight.shape == (4, width) and not isinstance(own, Canon)
        if mixer == "mamba2":  # Conv1d's default, and a bias
            assert 0.499 < own.weight.abs().max() <= 0.5
            assert own.bias.shape == (width,) and 0.49 < own.bias.abs().max() <= 0.5
        else:
            assert own.bias is None and own.weight.abs().max() > 0.06
            assert abs(own.weight.std() / 0.02 - 1) < 0.05


@pytest.mark.parametrize("mixer, d2, point_b", (("gla", 4, 2), ("mamba2", 6, 4), ("gdn", 6, 3)))
@pytest.mark.parametrize("D", (512, 768))
@pytest.mark.parametrize("mlp", ("swiglu", "silu"))
def test_linear_parameter_counts(mixer, d2, point_b, D, mlp):
    """Mixer and MLP share 12 d^2; beside matrices there are only gates, norms and convolutions."""
    with torch.device("meta"):
        options = dict(d_model=D, mixer=mixer, mlp=mlp, canon="abcd")
        block = Block(Config(vocab_size=9, block_size=9, **options), mixer)
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    H = D // 128
    extra = {"gla": 16 * D * 1.5 + D // 2 + D // 4, "mamba2": (2 * 64 + 16) * D + 2 * D + 3 * 16,
             "gdn": 2 * H * D + 2 * H + 3 * D // (2 * H)}  # fmt: skip
    width_b = point_b * D + (144 if mixer == "mamba2" else 0)
    assert count(block.mixer) == d2 * D**2 + extra[mixer] + 4 * width_b
    assert block.mixer.canon.weight.shape == (4, width_b)
    matrices = count(block.mlp) - count(block.mlp.canon)
    assert abs(matrices / ((12 - d2) * D**2) - 1) < 0.01
    if d2 == 6 and mlp == "swiglu":
        assert block.mlp.up.weight.shape[0] == 4 * D  # gate and up, 2 d each


def test_gates_start_as_their_authors_have_them():
    mamba = mixer_at("mamba2")
    torch.testing.assert_close(mamba.A_log.exp(), torch.arange(1.0, 17))
    assert (mamba.skip == 1).all() and mamba.dt_bias.shape == (16,)
    draws = F.softplus(canon_gpt.initial_dt_bias(20_000))
    assert 0.001 <= draws.min() < 0.00101 and 0.099 < draws.max() <= 0.1001
    assert abs(draws.log().mean() - math.log(0.01)) < 0.05  # log-uniform
    A = torch.cat([mixer_at("gdn").A_log.exp() for _ in range(20)])
    assert A.numel() == 120 and 0 <= A.min() and 14 < A.max() <= 16 and abs(A.mean() - 8) < 2
    low, high = CanonGPT(Config(9, 9, n_layer=1, mixer="gla")).blocks[0].mixer.decay
    assert low.bias is None and (high.bias == 0).all() and high.weight.shape == (384, 16)


def test_patterns_repeat_over_the_layers():
    blocks = small_model(mixer="gdn,gdn,attention", n_layer=5).blocks
    kinds = [GatedDeltaNet, GatedDeltaNet, Attention, GatedDeltaNet, GatedDeltaNet]
    assert [type(block.mixer) for block in blocks] == kinds


def test_linear_mixers_stream_in_constant_memory():
    """What a stream keeps does not grow, but for attention's keys and values."""

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
# Instances are read back from their text and checked by their definition;
# distributions are held against a formula or an enumeration.


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


@pytest.mark.parametrize("name", tasks.TASKS)
def test_batches_are_pure(name):
    task, again = make_task(name), make_task(name)
    first, *others = [t.batch(1, 7, 16) for t in (task, again, task)]
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other))
    for arguments in ((1, 8, 16), (2, 7, 16), (7, 1, 16)):
        assert not np.array_equal(first[0], task.batch(*arguments)[0])
    rows = [row.tobytes() for step in range(20) for row in task.batch(0, step, 16)[0]]
    assert len(set(rows)) == 320


@pytest.mark.parametrize("name", tasks.TASKS)
def test_presets_make_sense(name):
    for preset in ("nano", "small", "paper"):
        task = make_task(name, preset)
        Config(task.vocab_size, task.block_size, pos="rope4", **task.model)  # raises if it can't be
        assert task.batch(0, 0, 2)[1].any(axis=1).all() and task.settings["name"] == task.name
        assert not name.startswith("depo") or task.N > 2 * task.K
        for tokens, mask in task.documents(np.random.default_rng(0), 100):
            assert len(tokens) == len(mask) <= task.block_size + 1  # it fits
            assert 1 <= min(tokens) and max(tokens) < task.vocab_size


@pytest.mark.parametrize("name", ("copy", "depo1", "brevo1", "mano"))
def test_evaluation_is_repeatable_and_on_fresh_data(name, monkeypatch):
    task, seen, seeds, real = make_task(name), ([], [], []), [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda s: seeds.append(tuple(s)) or real(s))

    def forward(tokens):
        asked.append(tokens.tolist())
        return torch.zeros(*tokens.shape, task.vocab_size), None

    model = Fake(forward=forward, generate=lambda tokens, *_: forward(tokens) and tokens)
    for asked, seed in zip(seen, (0, 0, 1)):
        task.evaluate(model, seed, 30)
    assert seen[0] == seen[1] != seen[2] and {*seeds} == {(0, tasks.EVAL), (1, tasks.EVAL)}
    task.batch(0, 7, 2)
    assert seeds[3:] == [(0, tasks.TRAIN, 7)]


def test_a_task_of_ones_own(monkeypatch):
    """A dictionary entry makes a task, and `documents` is enough to train and to score it."""

    class Count(tasks.Task):
        vocabulary = ["", *"123", "<bos>"]

        def documents(self, rng, count):
            numbers = rng.integers(1, 4, count).tolist()
            return [([4, n] + [n] * n, [False] * 2 + [True] * n) for n in numbers]

    nano = dict(block_size=9, model={}, training=dict(batch_size=7))
    monkeypatch.setitem(tasks.TASKS, "count", (Count, {"nano": nano}))
    task = make_task("count", block_size=11)
    assert set(instances(task)) == {"1 [1] ", "2 [2 2] ", "3 [3 3 3] "}
    n = [tokens[1] for tokens, _ in task.documents(np.random.default_rng([5, tasks.EVAL]), 60)]
    wrong_about_3 = Fake(forward=lambda tokens: (F.one_hot(tokens % 3, 5), None))
    scores = {"sequences": 1 - n.count(3) / 60, "tokens": 1 - 3 * n.count(3) / sum(n)}
    assert task.evaluate(wrong_about_3, 5, 60) == pytest.approx(scores)


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


def words_fit(task, words):
    low, high = task.settings.get("word_len", (1, 1))
    return all(low <= len(word.split(".")) <= high for word in words)


def parse_depo(task, text):
    """An instance's edges (x, y) and questions (k, q, answer)."""
    edge, question = f"({WORD}) ({WORD}) ", rf"<query_(\d+)> ({WORD}) \[<ans> ({WORD})\] "
    edge += ", " * (task.name == "depo0")
    assert re.fullmatch(f"({edge})+({question})+", text)
    edges, questions = re.findall(edge, text.split("<")[0]), re.findall(question, text)
    assert words_fit(task, itertools.chain(*edges))
    return edges, [(int(k), q, answer) for k, q, answer in questions]


@pytest.mark.parametrize("name, options", DEPOS, ids=str)
def test_depo_by_an_independent_checker(name, options):
    task, count = make_task(name, **options), 0
    for count, text in enumerate(instances(task), 1):
        edges, questions = parse_depo(task, text)
        successor, n, cycle = dict(edges), len(edges), [edges[0][0]]
        while successor[cycle[-1]] not in cycle:
            cycle.append(successor[cycle[-1]])
        assert 3 <= n <= task.N and len(successor) == len(cycle) == n
        assert len({q for _, q, _ in questions}) == len(questions) == min(10, n)
        for k, q, answer in questions:
            assert 1 <= k <= task.K and answer == cycle[(cycle.index(q) + k) % n]
    assert count >= 200


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
        return tasks.Words(n, V, word_len).draw(np.random.default_rng(0), [n] * 9000)

    for V, (low, high) in ((1, (1, 3)), (2, (1, 2)), (3, (1, 1))):
        p = {}
        for length in range(low, high + 1):
            for *start, last in itertools.product(range(1, V + 1), repeat=length):
                p[*start, last + V * (high > 1)] = 1 / (high + 1 - low) / V**length
        either = {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in itertools.permutations(p, 2)}
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
            words = [task.vocabulary[token] for token in text] + ["<end>"]
            for ans in (i for i, word in enumerate(words) if word == "<ans>"):
                end = next(i for i in range(ans + 1, len(words)) if words[i][0] == "<")
                row[ans + 1 : end - 1], row[end - 1] = True, is_right(words[:ans])
        return right

    task.right_tokens = right_tokens
    return task.evaluate(None, 0, 50)


@pytest.mark.parametrize("name, hops", (("depo1", [1, 2]), ("depo0", [1, 2, 4, 6])))
def test_depo_scores(name, hops):
    task = make_task(name, K=max(hops))
    right = lambda words: re.findall("<q[^>]*>", "".join(words))[-1] != "<query_2>"  # noqa: E731
    assert scores_if(task, right) == {f"k={k}": float(k != 2) for k in hops}


# -- Brevo

BREVOS = (
    ("brevo1", {}), ("brevo1", dict(N=30, block_size=300)),
    ("brevo2", {}), ("brevo2", dict(N=14, V=3, word_len=(1, 3), block_size=400)),
)  # fmt: skip


def parse_brevo(text):
    """Edges, q, and the answer if there is one."""
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


@pytest.mark.parametrize("name, options", BREVOS, ids=str)
def test_brevo_by_an_independent_checker(name, options):
    task = make_task(name, **options)
    for text in instances(task):
        edges, q, answer = parse_brevo(text)
        parents, children = neighbours(edges), neighbours((b, a) for a, b in edges)
        nodes = {*parents, *children}
        assert words_fit(task, nodes) and len(nodes) <= task.N > len(parents)
        assert len(set(edges)) == len(edges)
        assert max(map(len, [*parents.values(), *children.values()])) <= 4
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
        sets = [c for k in (1, 2, 3, 4) for c in itertools.combinations(range(free), k)]
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
    assert [tasks.depth_of(parents, q) for q in range(6)] == [0, 0, 1, 1, 2, 1]


@pytest.mark.parametrize("n", (3, 5, 10, 12))
def test_brevo_asks_for_the_last_quarter(n, monkeypatch):
    asked = []
    monkeypatch.setattr(tasks, "draw_order", lambda *drawn: asked.append(drawn) or [0])
    list(make_task("brevo1", N=12, block_size=200).instances(np.random.default_rng(0), [n] * 2000))
    assert drawn_as((q for _, _, q in asked), range(n - math.ceil(n / 4), n))
    assert all(parents[q] for _, parents, q in asked)


@pytest.mark.parametrize("name, names", (("brevo1", {}), ("brevo2", dict(V=2, word_len=(2, 2)))))
def test_brevo_names_and_order_tell_nothing(name, names):
    """The asked node's name is as likely as any, a parent's too, and edges come in any order."""
    parsed = [parse_brevo(text) for text in instances(make_task(name, N=4, **names), rows=2000)]
    for found in ([q for _, q, _ in parsed], [edges[0][0] for edges, _, _ in parsed]):
        assert len(set(found)) == 4 and drawn_as(found, set(found))
    orders, permutations = [], [*itertools.permutations((1, 2, 3))]
    for edges, _, answer in parsed:
        if len(edges) == 3 and {*itertools.chain(*edges)} == {*answer}:
            orders.append(tuple(answer.index(a) + answer.index(b) for a, b in edges))
    assert drawn_as((order for order in orders if order in permutations), permutations)


@pytest.mark.parametrize("name", ("brevo1", "brevo2"))
def test_brevo_accepts_exactly_the_valid_orders(name):
    task, checked = make_task(name), Counter()
    for prompt, answer, _ in task.instances(np.random.default_rng(0), [4, 5] * 20):
        edges, _, _ = parse_brevo(text_of(task, prompt[1:]))
        words = text_of(task, answer[:-1]).split()
        right = lambda words: task.verify(prompt, [*tokens_of(task, words), task.eos])  # noqa: E731
        for order in itertools.permutations(words):
            valid = all(order.index(a) < order.index(b) for a, b in edges if {a, b} <= {*order})
            assert right(order) == valid
            checked[valid] += 1
        others = {*itertools.chain(*edges)} - {*words}
        wrong = [], words[1:], words[:-1], words[:1] + words, *([each, *words] for each in others)
        assert right(words) and not any(map(right, wrong))
        assert task.verify(prompt, answer + [task.eos, 1])
        for end in ([], [task.query, task.eos], [1, task.eos]):  # 1: in brevo2 half a word
            assert not task.verify(prompt, answer[:-1] + end)
    assert min(checked.values()) > 20


@pytest.mark.parametrize("name", ("brevo1", "brevo2"))
def test_brevo_scores(name):
    """Of a model that gives the right answers, but without their first token if q's last is odd."""
    task, right = make_task(name), defaultdict(list)
    drawn = task.instances(np.random.default_rng([0, tasks.EVAL]), [task.N] * 99)
    answers = {tuple(prompt): answer for prompt, answer, _ in drawn}

    def generate(tokens, max_new_tokens, temperature, stop):
        assert temperature == 0 and stop == task.eos
        texts = []
        for prompt in map(tuple, tokens.tolist()):
            edges, q, _ = parse_brevo(text_of(task, prompt[1:]))
            parents, odd = neighbours(edges), prompt[-2] % 2
            depth = lambda node: 1 + min(map(depth, parents[node]), default=-1)  # noqa: E731, B023
            for score in ("all", f"depth={depth(q)}"):
                right[score].append(not odd)
            texts.append(answers[prompt][odd:])
        assert max(map(len, texts)) <= max_new_tokens
        return torch.cat([tokens, tasks.padded(texts)], 1)

    scores = task.evaluate(Fake(generate=generate), 0, 99)
    assert scores == {each: np.mean(right[each]) for each in sorted(right)}
    assert len(right["all"]) == 99 and {"depth=1", "depth=2"} <= {*right}


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
    documents = task.documents(np.random.default_rng(0), 6000)
    assert drawn_as((len(tokens) for tokens, _ in documents), range(7, 18, 2))


def test_mano_scores():
    scores = scores_if(make_task("mano", L=6), lambda words: "<len_2>" in words)
    assert scores == {"l=1": 0.0, "l=2": 1.0, "l=4": 0.0, "l=6": 0.0}


# -- Lano


def test_grammars_are_levelled():
    for text in tasks.GRAMMARS.values():
        grammar = tasks.Grammar(text)
        for symbol, rules in grammar.rules.items():
            first = (symbol - 1) // 3 * 3 - 2  # 7, 8, 9 are parents of the tokens 1, 2, 3
            below = {1, 2, 3} if symbol < 10 else {first, first + 1, first + 2}
            assert len(set(rules)) == len(rules) in (3, 4)
            assert all(len(rule) in (2, 3) and set(rule) <= below for rule in rules)
        assert list(grammar.rules) == [*range(7, grammar.root + 1)]


def all_yields(grammar, symbol):
    """{yield: probability}, by enumeration."""
    if symbol <= 3:
        return {(symbol,): 1.0}
    found = defaultdict(float)
    for rule in grammar.rules[symbol]:
        for parts in itertools.product(*(all_yields(grammar, part).items() for part in rule)):
            text = tuple(itertools.chain(*(part for part, _ in parts)))
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


@pytest.mark.parametrize("cfg, root", (("cfg3f", 10), ("cfg3f", 11), ("cfg3j", 12), ("cfg3k", 12)))
def test_lano_chart_equals_enumeration(cfg, root):
    task = make_task("lano", cfg=cfg, root=root)
    grammar, language = task.grammar, all_yields(task.grammar, root)
    assert sum(language.values()) == pytest.approx(1)
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


@pytest.mark.parametrize("cfg, most", (("cfg3f", 350), ("cfg3j", 1000), ("cfg3k", 800)))
def test_lano_long_sentences_neither_underflow_nor_lose_probability(cfg, most):
    """What may follow a prefix adds up to the prefix's own probability."""
    grammar = tasks.Grammar(tasks.GRAMMARS[cfg])
    sentences = grammar.sample(np.random.default_rng(1), 1000)
    text = max((sentence for sentence in sentences if len(sentence) <= most), key=len)
    chart = grammar.chart(torch.tensor([text]))[0]
    assert len(text) > 0.8 * most and 1e-100 < chart.max() < 1e100 and chart[-1, 0] > 0
    here = chart[torch.arange(len(text)), text]
    torch.testing.assert_close(chart[1:].sum(1), 2.1 * here, rtol=1e-10, atol=0)
    assert chart[0].sum() == pytest.approx(1)


def test_lano_windows_and_samples():
    task = make_task("lano", root=12, block_size=40)
    language = all_yields(task.grammar, 12)
    assert {tuple(map(int, text.split())) for text in instances(task)} <= set(language)
    assert task.batch(0, 0, 9)[1].all()
    assert drawn_as(map(tuple, task.grammar.sample(np.random.default_rng(0), 5000)), language)


def test_lano_scores():
    """Of texts that are sentences, or none, or do not end; by the exact predictions, or a guess."""
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
        exact = torch.full_like(chart, 1 / 4) if guess else chart / chart.sum(-1, keepdim=True)
        logits = torch.full((*tokens.shape, 5), -1e30)
        logits[..., [4, 1, 2, 3]] = exact.log().nan_to_num(nan=0.0, neginf=-1e30).float()
        return logits, None

    sentences = task.grammar.sample(np.random.default_rng([0, tasks.EVAL]), 80)
    places = np.concatenate([exact_table(language, tuple(text))[:9] for text in sentences])
    p = places / places.sum(1, keepdims=True)
    guessed = math.log(4) + (p * np.log(np.maximum(p, 1e-300))).sum(1).mean()
    for guess, nats in ((False, 0), (True, guessed)):
        scores = task.evaluate(Fake(generate=generate, forward=forward), 0, 80)
        assert scores == {"sentences": 0.5, "KL": pytest.approx(nats, rel=1e-5, abs=1e-6)}


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
            text = [task.bos, *met[-1]]
            for i, fact in enumerate([facts[:3], *([fact] for fact in facts[3:])]):
                text += [pronoun] * (i > 0)
                words = life[len(text) : len(text) + 3]
                assert words in task.wordings[i].tolist()
                text += words + fact
            assert life == text
    assert all(len(set(met[i : i + 30])) == len(who) == 30 for i in range(0, 120, 30))
    assert met[:30] != met[30:60] and len(told) == 120


def test_capo_people_and_wordings():
    people, first = tasks.draw_people(5, 40_000), 1
    for column, size in enumerate(tasks.PERSON.values()):
        assert drawn_as(people[:, column].tolist(), range(first, first + size))
        first += size
    assert len(np.unique(people[:, :3], axis=0)) == 40_000  # chance would bring some five twice
    assert len(np.unique(people[:, -2:], axis=0)) == 263 and {*people[:, -1]} <= {*people[:, 7]}
    assert tasks.POSSIBLE_NAMES == 400 * 400 * 1000
    assert tasks.POSSIBLE_FACTS == 2 * (12 * 28 * 200) * 200 * 300 * 100 * 263
    wordings = make_task("capo").wordings
    assert wordings.shape == (6, 10, 3) and len(np.unique(wordings.reshape(-1, 3), axis=0)) == 60


def test_capo_bits():
    """A uniform model knows nothing, one that is sure of the truth everything; nats count less."""
    task = make_task("capo", N=50)
    rng = np.random.default_rng([0, tasks.EVAL])
    lives = task.biographies(rng, 0, rng.permutation(50)[:20])[:, 1:]
    lives = {tuple(life[:3]): life for life in lives.tolist()}
    used = len(np.unique(tasks.draw_people(0, 50))) + 50 + 1  # and the words, and <bos>
    counts = {"total": 10**6, "embeddings": 16 * task.vocab_size}
    parameters = 10**6 - 16 * (task.vocab_size - used)

    def scores(nats):  # {place: cost}, else 0
        prices = (math.expm1(nats.get(place, 1e-9)) for place in range(1, 35))
        heights = torch.tensor([[math.log((task.vocab_size - 1) / price)] for price in prices])

        def forward(tokens):
            truth = torch.tensor([lives[tuple(row[1:4])] for row in tokens.tolist()])
            return F.one_hot(truth, task.vocab_size) * heights, None

        return task.evaluate(Fake(forward=forward, parameter_counts=lambda: counts), 0, 20)

    nothing = scores(dict.fromkeys(range(35), math.log(task.vocab_size)))
    assert nothing == dict.fromkeys(("names", "facts", "bits", "bits/param"), 0.0)
    bits = 50 * (math.log2(tasks.POSSIBLE_NAMES) + math.log2(tasks.POSSIBLE_FACTS))
    everything = {"names": 1, "facts": 1, "bits": bits, "bits/param": bits / parameters}
    assert scores({}) == pytest.approx(everything, rel=1e-5)
    # a fact costs where it comes first; words and later pronouns cost nothing
    names = {1: 0.5, 2: 0.2, 3: 9}
    facts = {7: 1, 8: 0.3, 9: 0.4, 10: 3, 14: 2, 19: 0.6, 24: 0.1, 29: 4, 34: 5}
    left = bits - 50 * sum([*names.values(), *facts.values()]) / math.log(2)
    found = scores({4: 5, 15: 5, 33: 5, **names, **facts})
    assert found["bits"] == pytest.approx(left, rel=1e-5)
    assert found["names"] == pytest.approx(1 - 9.7 / math.log(tasks.POSSIBLE_NAMES), rel=1e-5)


# -- Refusals and examples

BAD_TASKS = """
    sort | task = 'sort'    copy huge | preset = 'huge'    copy K=3 | K = 3    copy N=1 | N = 1
    depo N=2 | N = 2    depo K=0 | K = 0    depo V=0 | V = 0    depo V=2 word_len=(1,1) | N = 5
    depo word_len=(3,2) | word_len    depo word_len=(0,2) | word_len    depo separator=1 | separator
    brevo N=2 | N = 2    brevo V=5 | V = 5    brevo2 V=1 N=4 | N = 4    brevo2 V=0 | V = 0
    mano L=0 | L = 0    lano cfg='cfg4' | cfg = 'cfg4'    lano root=3 | root    lano root=23 | root
    capo N=0 | N = 0    capo exposures=0 | exposures = 0    copy block_size=128 | block_size
    depo N=60 | block_size = 52    depo0 block_size=69 | block_size    brevo N=30 | block_size = 96
    brevo2 block_size=106 | block_size    mano block_size=7 | block_size    lano root=22 | block
    capo block_size=33 | block_size    capo N=10**7 | N = 10000000    copy N=10**8 | N = 100000000
    depo N=10**8 | N = 100000000    brevo N=10**8 | N = 100000000    depo V=10**9 | V = 1000000000
    depo K=10**9 | K = 1000000000    depo word_len=(1,10**9) | word_len    mano L=10**7 | L
    capo exposures=1e30 | exposures    lano block_size=1e10 | block_size
"""


@pytest.mark.parametrize("bad", re.split(r"\s{2,}", BAD_TASKS.strip()))
def test_bad_and_absurd_tasks_are_refused(bad):
    command, message = bad.split(" | ")
    name, *options = command.split()
    preset = options.pop() if options and "=" not in options[0] else "nano"
    options = {field: eval(value) for field, value in (option.split("=") for option in options)}
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(?!\d).*: .+$"):
        make_task(name, preset, **options)


def test_scores_of_nothing_are_refused():
    few = make_task("depo1", N=3, K=100, block_size=60)  # 8 scored k, 3 questions an instance
    for task, least in [*((make_task(name), 1) for name in tasks.TASKS), (few, 3)]:
        task.check_eval_size(least)
        for n in (least - 1, -1, 10**9):
            with pytest.raises(ValueError, match=f"^eval_size = {n}: "):
                task.check_eval_size(n)
    few.right_tokens = lambda model, texts: np.ones((3, 60), bool)
    assert list(few.evaluate(None, 0, 3).values()) == [1.0] * 8


def test_scores_in_print():
    scores = {"k=4": 0.9731, "KL": 0.12345, "bits": 12345.6, "bits/param": 1.2345}
    texts = [tasks.score_text(*score) for score in scores.items()]
    assert texts == ["97.3%", "0.123", "12,346", "1.234"] and [*scores][1:] == [*tasks.NO_SHARES]


@pytest.mark.parametrize("name", [*tasks.TASKS, *tasks.ALIASES])
def test_examples_are_printed(name, capsys):
    tasks.main([name])
    title, text, legend = capsys.readouterr().out.split("\n\n")
    task = make_task(name)
    assert title.startswith(f"{task.name}: ") and task.meaning in legend
    words = re.sub(r"[\[\]]", " ", text).replace(".", ". ").split()
    assert set(words) <= set(task.vocabulary) and words[0] == "<bos>"
    assert re.fullmatch(r"([^][]*\[[^][]+\])+\s*", text)


def test_a_task_that_is_not_there():
    command = [sys.executable, HERE / "tasks.py", "sort"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2 and not failed.stdout
    assert re.fullmatch("tasks.py: .*'sort'.*\n", failed.stderr)


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
    (f"brevo2 --N 3 --V 2 --word-len 1 2 --block-size 32 --steps 150 {SMALL}", "all", 0.5, 1),
    (f"mano --L 1 --block-size 35 --steps 260 {SMALL}", "l=1", 0.7, 1),
    (f"lano --root 10 --block-size 32 --steps 100 {SMALL}", "sentences", 0.5, 1),
    (f"capo --N 50 --exposures 100 --block-size 34 {SMALL}", "facts", 0.3, 1),
)


@pytest.mark.parametrize("command, score, least, most", LEARNS, ids=lambda value: str(value)[:50])
def test_tasks_are_learnt_a_little(command, score, least, most, tmp_path, monkeypatch):
    """Chance is 1/2 for Depo, some 1/4 for Brevo, 1/3 for Mano, next to nothing for the rest."""
    monkeypatch.setattr(tasks.Mano, "modulus", 3)  # the tables of 23 take long to learn
    options = f"--preset nano --device {DEVICE} --no-compile --eval-every 1000 --eval-size 128"
    train.main(["--task", *command.split(), *options.split(), "--out", str(tmp_path / "run")])
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert least <= last["eval"][score] <= most
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
    """Checks that a command ends with such a line, and before training leaves all files alone."""

    def contents():
        return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}

    def check(command, *words, status=2, training=False):
        before = contents()
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            train.main(command)
        output = capsys.readouterr()
        line = output.err.splitlines(keepends=True)[-1]
        assert re.fullmatch("train.py: .+\n", line) and stopped.value.code == status
        assert training or (output.err == line and not output.out and contents() == before)
        assert all(word in line for word in words), line
        return line

    return check


def interrupt(monkeypatch, step, error=None):
    """SIGTERM arrives, or an error, while the batch of this step is made."""
    requests, make = [], train.Stream.__getitem__

    def watched(stream, number):
        if number == step:
            requests.append(signal.SIGTERM)
            if error:
                raise error
        return make(stream, number)

    monkeypatch.setattr(train.Stream, "__getitem__", watched)
    monkeypatch.setattr(train, "stop_requests", lambda: contextlib.nullcontext(requests))


def test_command_line_end_to_end(here):
    """With so low a rate that the weights stay as they were."""
    words = [*TINY, *"--canon DcbA --steps 50 --eval-every 30 --seed 5 --lr 1e-12".split()]
    command = [sys.executable, HERE / "train.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = Path("out").iterdir()
    assert {path.name for path in run.iterdir()} == {"config.json", "metrics.jsonl", "ckpt.pt"}
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
    assert train.steps_done(run) == (50, True)
    printed = {*last, *last["eval"], f"{config['parameters']['total']:,}"}
    assert printed - {"step", "eval", "final"} <= set(done.stdout.split())

    torch.manual_seed(5)
    task, model = make_task(**config["task"]), CanonGPT(Config(**config["model"]))
    assert all(torch.allclose(saved["model"][name], p) for name, p in model.named_parameters())
    tokens, mask = map(torch.from_numpy, task.batch(5, 19, 8))
    loss = model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()
    assert log[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert last["eval"] == task.evaluate(model, 5, 16)


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        train.main(["--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert words > {*tasks.TASKS, *MIXERS, *MLPS, *POSITIONS, *CANONS}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_stops_resumes_and_scores(name, here, monkeypatch):
    steps = "--N 40 --exposures 1" if name == "capo" else "--steps 3"
    flags = f"--task {name} --preset nano --device cpu --batch-size 4 --eval-size 8 --n-layer 1"
    command = f"{flags} --no-compile --warmup 0 --out run {steps}".split()
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        interrupt(patch, 0)
        train.main(command)
    train.main([*command, "--resume"])
    last = logged("run")[-1]
    assert last["final"] and last["step"] == 3 and last["eval"]


@pytest.mark.parametrize("mixer, layers", [("attention", 2), ("gla", 0), ("gdn,attention", 1)])
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


@pytest.mark.parametrize("error", (None, KeyError("power failure")))
def test_resume_goes_on_as_if_never_stopped(error, ends, monkeypatch):
    """After a signal in step 48, or a crash there: same weights, same lines in the log."""

    def steady(out):
        return [[line.get(x) for x in ("step", "tokens", "loss", "eval")] for line in logged(out)]

    flags = "--steps 60 --eval-every 20"
    train.main(tiny(flags, "whole"))
    with monkeypatch.context() as patch, pytest.raises(type(error) if error else SystemExit):
        interrupt(patch, 47, error)
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
    compiled, real = [], functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or real(model))
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: True)
    train.main(tiny("--steps 20 --canon abcd", "plain"))
    fancy = tiny("--steps 20 --canon abcd --workers 2", "fancy")
    fancy.remove("--no-compile")  # on a CPU compiling is the default, where it can work
    train.main(fancy)
    a, b = ([line["loss"] for line in logged(out)[:-1]] for out in ("plain", "fancy"))
    assert len(compiled) == 1 and a == pytest.approx(b, abs=1e-3)


@pytest.mark.parametrize("world, names, kills", [
    (1, "INT INT", True), (2, "INT INT", False), (1, "TERM TERM INT", False)])  # fmt: skip
def test_only_a_second_ctrl_c_kills(world, names, kills, monkeypatch):
    """Under torchrun a process may get it twice."""
    monkeypatch.setattr(train, "WORLD", world)
    numbers = [getattr(signal, f"SIG{name}") for name in names.split()]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) if kills else contextlib.nullcontext():
            with train.stop_requests() as stop:
                for number in numbers:
                    signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop == numbers[: len(numbers) - kills]


posix = pytest.mark.skipif(os.name == "nt", reason="no POSIX signals")
ENDLESS = "--steps 1000000 --eval-every 500000"


def start(*command):
    """A training in other processes that has logged a line."""
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, *command], start_new_session=True, **pipes)
    while not Path("run/metrics.jsonl").exists():
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


@posix
def test_ctrl_c_while_importing_prints_nothing(here):
    Path("numpy.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    command, path = [sys.executable, HERE / "train.py", *TINY], {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(command, env=path, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stderr == b""


@pytest.mark.parametrize("what", ("loss", "weight", "output", "score"))
def test_what_is_not_finite_stops_the_run_and_is_not_saved(what, ends, monkeypatch):
    steps, real, last = itertools.count(1), train.train_step, 60
    if what == "weight":  # saved, but not scored
        last = 50
        interrupt(monkeypatch, 49)

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
    words = f"step {last}: loss ", "run/ckpt.pt is the last good"
    ends(tiny("--steps 60 --eval-every 20"), *words, status=1, training=True)
    assert checkpoint("run")["step"] == logged("run")[-1]["step"] == 40


def test_gradients_are_clipped(here, monkeypatch):
    clip, step, before, after = torch.nn.utils.clip_grad_norm_, torch.optim.AdamW.step, [], []

    def watched_clip(*arguments):
        before.append(clip(*arguments))
        return before[-1]

    def watched_step(optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        after.append(math.hypot(*(grad.norm() for grad in grads)))
        return step(optimizer)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched_clip)
    monkeypatch.setattr(torch.optim.AdamW, "step", watched_step)
    train.main(tiny("--steps 20 --n-layer 3 --d-model 64"))
    assert min(before) < 1 < max(before)
    assert after == pytest.approx([min(1, float(norm)) for norm in before], rel=1e-4)


def test_learning_rate_schedule():
    cosine = dict(steps=110, warmup=10, lr=2.0, schedule="cosine")
    rates = [train.learning_rate(step, cosine) for step in (0, 4, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.2, 1, 2, 2, 1.1, 0.2])
    linear = dict(cosine, schedule="linear", warmup=0)
    assert [train.learning_rate(step, linear) for step in (0, 55, 110)] == [2, 1, 0]


@pytest.mark.parametrize("name", ("depo", "mano"))
def test_parts_of_a_batch_add_up_to_its_loss(name, monkeypatch):
    """Depo's rows have different numbers of targets; in Mano the first token is one, too."""
    task = make_task(name, "nano")
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=2, d_model=16)
    model = CanonGPT(config).double()

    def loss(tokens, mask):
        return model(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])[1].item()

    batch = task.batch(5, 7, 12)
    for world, parts in itertools.product((1, 2, 3), (1, 2)):
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
def test_two_processes_train_as_one_does(here, monkeypatch):
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
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            interrupt(patch, steps + 19)
            train.main([*flags, *words])
    run, one = ({line["step"]: line["loss"] for line in logged(out)} for out in ("run", "one"))
    assert run == pytest.approx(one, rel=1e-4) and [*run] == [*range(20, steps + 21, 20)]


BAD_FLAGS = """task sort; preset huge; mixer conv; canon abx; steps -5; steps 0; steps many; lr -1;
lr 0; lr nan; batch-size 0; warmup -1; weight-decay -0.1; seed -1; seed 4294967296; workers -1;
workers 1000; eval-every 0; eval-size 0; grad-accum 0; schedule step; device abacus; cannon abcd;
dtype float16; mixer gla --pos alibi; mixer gla --n-head 4; task depo --N 2;
task capo --exposures 3 --steps 5; task depo --K 64 --eval-size 1; task copy --N 100000000;
task depo --V 1000000000; task depo --block-size 10000000000; task capo --exposures 1000000000000;
n-head 3 => d_model = 16; short-conv => short_conv = True; N 50 => block_size = 20;
block-size 9 => block_size = 9; out= => out = ''; compile => C++ compiler;
grad-accum 3 => a multiple of 3; resume => run has no ckpt.pt; out mine => mine is not empty"""


@pytest.mark.parametrize("bad", re.split(r";\s", BAD_FLAGS))
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


@pytest.mark.parametrize("native", (True, False))
def test_the_gpu_decides_about_bfloat16(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "gpu_has_bfloat16", lambda: native)
    args = train.prepare(["--task", "copy"])[0]
    assert (args.device, args.preset, args.compile) == ("cuda", "small", True)
    assert args.dtype == ("bfloat16" if native else "float32")
    with contextlib.nullcontext() if native else pytest.raises(SystemExit, match="2"):
        train.prepare("--task copy --dtype bfloat16".split())


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_training_and_scoring_compute_in_the_chosen_dtype(dtype, here, monkeypatch):
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


@pytest.mark.parametrize("out", ("file/run", 300 * "x"))
def test_a_folder_that_cannot_be_made(out, ends):
    Path("file").write_text("mine")
    ends(tiny("--steps 5", out), out, status=1)


def test_damaged_checkpoints_are_refused(ends):
    """A flipped bit is refused or, in a header that nobody reads, does no harm."""
    train.main(tiny("--steps 2"))
    good, path, refused = checkpoint("run"), Path("run/ckpt.pt"), 0
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    model = CanonGPT(Config(**good["recipe"]["model"]))
    optimizer = train.make_optimizer(model, good["recipe"]["training"], "cpu")
    for place in rng.integers(len(whole), size=60):
        flipped = bytes([whole[place] ^ 1 << rng.integers(8)])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        try:
            train.load(path, good["recipe"], model, optimizer)
            assert str(checkpoint("run")) == str(good)
        except SystemExit:
            refused += 1
    assert refused > 40

    weights, state = good["model"], good["optimizer"]
    first = next(iter(weights))
    moments = {**state["state"], 0: {**state["state"][0], "exp_avg": torch.zeros(3)}}
    for damage in (
        b"", whole[:-100], bytes(1000), [1], {"recipe": good["recipe"]}, {**good, "model": {}},
        {**good, "model": {**weights, first: torch.zeros(3, 3)}}, {**good, "optimizer": {}},
        {**good, "optimizer": {**state, "state": moments}},
    ):  # fmt: skip
        path.write_bytes(damage) if type(damage) is bytes else torch.save(damage, path)
        ends(tiny("--steps 2 --resume"), "ckpt.pt is damaged")


@pytest.mark.parametrize("error, words", [
    (PermissionError(13, "Permission denied", "x"), ["Permission denied: 'x'"]),
    (MemoryError(), ["MemoryError", "--batch-size"]), (RuntimeError("a bug of one's own"), []),
    (torch.OutOfMemoryError("CUDA out of memory. Tried .."), ["out of memory", "--grad-accum"]),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: .."), ["allocate", "--grad-accum"]),
])  # fmt: skip
def test_errors_of_the_system_are_one_line_and_bugs_are_not(error, words, ends, monkeypatch):
    interrupt(monkeypatch, 3, error)
    with contextlib.nullcontext() if words else pytest.raises(RuntimeError):
        ends(tiny("--steps 9"), *words, status=1, training=True)


def test_a_full_disk_leaves_the_last_checkpoint(ends, monkeypatch):
    saves, write = itertools.count(1), Path.write_bytes

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
    return {"run": "r", "task": {"name": "depo1", "N": 6}, "training": {"lr": lr}, "dtype": dtype,
            "model": vars(Config(vocab_size=9, block_size=9, **model)), "preset": "nano",
            "seed": seed, "device": "cpu", "evals": points, "seconds": 3.0 if final else None}  # fmt: skip


def write_run(folder, run):
    Path(folder).mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps({**run, "run": Path(folder).name}))
    log = run["evals"] + [{"final": True, "seconds": 3.0}] * (run["seconds"] is not None)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def refused(main, words, capsys):
    """The one line with which a program ends; it writes nothing."""
    before = {*Path().rglob("*")}
    with pytest.raises(SystemExit, match="2"):
        main(words)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and before == {*Path().rglob("*")}
    return line


def test_runs_are_read_drawn_and_packed(here, capsys):
    """One as train.py leaves it, and made-up ones."""
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
    assert "| RoPE | 0, 1 | 40%, 63% | 20%, 40% |" in printed and "| RoPE | 0 | 0% | " in printed
    assert "| RoPE + Canon-ABCD (act) (still training) | 0, 1 | 90%, 80% | 45%, 40% |" in printed
    plot.main(["packed.json", "--out", "two"])
    assert capsys.readouterr().out == printed.replace("one/", "two/")
    assert {"copy_nano.png", "depo1_nano.svg"} < {path.name for path in Path("two").iterdir()}


DAMAGE = {
    "config.json": ("[]", "\0", "[" * 20_000, {"seed": "0"}, {"task": {"name": "../../x"}},
                    {"preset": "/tmp"}, {"run": "../x"}, {"model": {}}, {"training": [1]},
                    {"task": {"name": "depo1", "N": "5"}}),
    "metrics.jsonl": ("oops\n", '{"step": 1, "eval": {"k=1": NaN}}\n', '{"step": 1, "eval": [1]}\n'),
    "": ("", '{"runs": 5}', '{"runs": [{"task": 1}]}'),
}  # fmt: skip


@pytest.mark.parametrize("file, damage", [(file, d) for file in DAMAGE for d in DAMAGE[file]],
                         ids=lambda value: str(value)[:20])  # fmt: skip
def test_damaged_files_are_named_and_left_out(file, damage, here, capsys):
    for folder in ("good", "bad"):
        write_run(folder, made_run((0.2,), (0.4,)))
    path = Path("bad" if file else "packed.json")
    if isinstance(damage, dict):
        damage = json.dumps(json.loads((path / file).read_text()) | damage)
    (path / file).write_text(damage)
    alone = refused(plot.main, [str(path), "--out", "figures"], capsys)
    assert f"plot.py: {path} " in alone
    assert len(plot.read_all([path, "good"])) == 1 and capsys.readouterr().err == alone


MODEL_NAMES = {
    "RoPE": "", "NoPE + Canon-AC": "pos=nope canon=ac", "GLA": "mixer=gla", "GDN": "mixer=gdn",
    "GDN (no conv)": "mixer=gdn no-short-conv", "GLA (conv)": "mixer=gla short-conv",
    "RoPE + Canon-ABCD (no-res, K=2)": "canon=abcd canon-no-residual canon-kernel=2",
    "GDN + Canon-AbCD": "mixer=gdn canon=acd",
    "Mamba2": "mixer=mamba2", "Mamba2 (no conv)": "mixer=mamba2 no-short-conv",
    "Mamba2/RoPE(1/4)": "n-layer=2 mixer=mamba2,attention pos=rope4",
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
    """Means as far as all seeds have come, each seed, chance, names at ends; other scores, too."""
    runs = [made_run((0.2, 0.1), (0.4, 0.2), (0.5, 0.3)), made_run((0.4, 0.2), (0.8, 0.4), seed=1)]
    groups = plot.models([*runs, made_run((0.9, 0.8, 0.5), canon="abcd")])
    figure = plot.curves(groups, title="Found " * 30)
    assert [axis.get_title("left") for axis in figure.axes] == ["1 hop, %", "2 hops, %", "3 hops, %"]
    assert "\n" in figure.get_suptitle() and "N 6" in figure.get_supxlabel()
    lines = [line.get_ydata() for line in figure.axes[0].lines]
    expected = [[20, 40, 50], [40, 80], [30, 60], [90], [90], [20, 20]]  # the last is chance, 1 of 5
    assert all(np.allclose(line, y) for line, y in zip(lines, expected, strict=True))
    assert [text.get_text() for text in figure.axes[2].texts] == ["RoPE + Canon-ABCD", "chance"]
    axis = plot.bars(groups).axes[0]
    assert np.allclose([bar.get_width() for bar in axis.patches], [65, 90])
    assert [text.get_text() for text in axis.texts] == ["65%", "90%", "chance"]
    runs[0]["evals"][-1]["eval"] = {"bits": 2e4, "bits/param": 0.5}
    axis = plot.capacity({"RoPE": runs[:1]}).axes[0]
    assert axis.lines[0].get_xydata().tolist() == [[4e4, 2e4]]
    grey, colour = (np.ptp(colour) for colour, _ in plot.looks(groups).values())
    places = plot.spread(np.array([0.5, 0.1, 0.5, 0.9]), 0.1)  # of names that would overlap
    assert grey == 0 < colour and np.allclose(sorted(places), [0.1, 0.45, 0.55, 0.9])
    plot.plt.close("all")


def test_numbers_in_print():
    shares = {0.125: "13%", 0.145: "15%", 0.0049: "0%", 0.995: "100%", 1: "100%", 2.5: "2.5"}
    assert {share: plot.score_text("k=1", share) for share in shares} == shares
    assert plot.score_text("KL", 0.1251) == plot.score_text("capo: bits/param", 0.125) == "0.125"
    shipped = plot.read_all(HERE.glob("results/*/*.json"))
    assert shipped and all(run["seconds"] is not None for run in shipped)
# ---- 6. results/reproduce.py -----------------------------------------------

CLAIMS = [claim for group in reproduce.GROUPS.values() for claim in group.claims]


@pytest.mark.parametrize("preset", ("nano", "small"))
@pytest.mark.parametrize("name", reproduce.GROUPS)
def test_a_comparison_is_of_different_valid_runs(name, preset):
    """`plan` refuses others. The claims and the title are about its models."""
    group = reproduce.GROUPS[name]
    planned = reproduce.plan(group, ["--preset", preset, "--device", "cpu"], 1, [2e-3, 4e-3])
    steps = {run[0].out: run[3]["steps"] for run in map(train.prepare, planned)}
    assert len(steps) == len(planned) == 2 * len(group.models) * len(group.tasks)
    named = {model for *_, rule in group.claims for model in reproduce.names_in(rule)}
    assert named | set(re.findall("{(.+?)}", group.figure[-1])) <= {*group.models, "score"}
    once = min(steps.values())
    assert name != "depth" or sorted(steps.values()) == [once] * 8 + [2 * once] * 4


def verdict(claim, seeds):
    """With these scores of each model's seeds."""
    score = claim[-2]
    name = score.split(": ")[0] if ": " in score else {"sequences": "copy"}.get(score, "depo0")
    best = {model: [{"task": {"name": name, "N": 10, "K": 4}, "evals": [{"eval": {score: value}}]}
                    for value in values] for model, values in seeds.items()}  # fmt: skip
    return reproduce.check(claim, best, "")[-1].split(":")[0]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[0]} {claim[1]}")
def test_every_claim_can_come_out_each_way(claim):
    """But never with a model missing or too few seeds."""
    rng, seen, names = np.random.default_rng(0), {}, reproduce.names_in(claim[-1])
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
a > 2 x b: 4 4 4, 2 2 2: holds
a > 2 x b: 4 4 4, 3 3 3: does not hold
a > 2 x b: 4 4 4, 1 1 1: undecided
a > 3 x b: 2 2 2, 1 1 1: undecided
a > 50% from b to c: 4 4 4, 1 2 3, 6 6 6: holds
a > 50% from b to c: 5 5 5, 1 2 6, 6 6 6: undecided
a > 300%: 3 4 5: holds
a >~ b: 3.95 4 4, 3 4 5: holds
a >~ b: 3.9 3.9 3.9, 3 4 5: does not hold
a sooner than b: 1 2 3, 4 5 inf: holds
a at chance: 0 1 1: holds
a at chance: 0 1 2: undecided
a < 99%: .1 .1 .1: undecided"""


@pytest.mark.parametrize("example", RULES.splitlines())
def test_rules_by_example(example):
    """Rule: the seeds of a, b, c: verdict. Chance is 1, the ceiling 8."""
    rule, seeds, expected = example.split(": ", maxsplit=2)
    scores = {name: [*map(float, part.split())] for name, part in zip("abc", seeds.split(","))}
    assert reproduce.decide(rule, scores, 1, 8) == expected


def test_chance_is_that_of_the_task_with_the_score():
    assert verdict(("answers", "a at chance"), {"a": [0.1, 0.15, 0.16]}) == "holds"  # 1/9 + 0.05
    runs = lambda *sentences: [  # noqa: E731
        {"task": {"name": name, "N": 5}, "evals": [{"eval": {score: value}}]}
        for name, score, value in (("depo1", "k=1", 1), *(("lano", "s", s) for s in sentences))]  # fmt: skip
    best = {"a": runs(0.2, 0.2, 0.2), "b": runs(0.1, 0.1, 0.1)}
    assert reproduce.check(("s", "a > b"), best, "")[-1] == "holds"


def test_runs_find_their_models_at_the_best_rate(here, monkeypatch):
    """Finished ones, by recipe: other steps or dtypes do not count. Your own replace ours."""
    monkeypatch.setattr(reproduce, "HERE", Path("results"))
    group, rest = reproduce.GROUPS["depth"], ["--preset", "nano", "--device", "cpu"]

    def run(model, score, seed, flags="", packed=None, final=True):
        words = reproduce.command("depo0", group.models[model], rest)
        prepared = train.prepare([*words, "--seed", str(seed), *flags.split()])
        made = made_run((0.9, 0, 1.0), (0.9, score, 1.0), final=final) | train.recipe_of(*prepared)
        if not packed:
            return write_run(prepared[0].out, made)
        Path("results", packed).mkdir(parents=True)
        Path("results", packed, "runs.json").write_text(json.dumps({"runs": [made]}))

    for seed in range(3):
        run("RoPE", 0.5, seed), run("RoPE", 0.9, seed, "--lr 1e-4"), run("NoPE", 0.1, seed)
    run("RoPE", 1.0, 0, "--lr 1e-5")  # best, but of one seed
    run("RoPE", 0.0, 0, packed="ours"), run("RoPE", 1.0, 5, "--dtype bfloat16")
    run("NoPE", 1.0, 7, "--steps 9"), run("NoPE", 0.2, 3, packed="ours/too")
    run("NoPE", 1.0, 8, final=False)
    best, tried = reproduce.represent(group, rest, reproduce.all_runs(), [])
    assert {model: plot.last_scores(runs, "k=2") for model, runs in best.items()} == {
        "RoPE": [0.9] * 3, "NoPE": [0.1, 0.1, 0.1, 0.2]}  # fmt: skip
    assert sorted(plot.last_scores(runs, "k=2")[0] for runs in tried.values()) == [0.1, 0.5, 0.9, 1]
    good, bad = (best[model][0]["evals"][-1]["eval"] for model in ("RoPE", "NoPE"))
    assert good["answers"] == good["main"] == good["depo0: answers"] == pytest.approx(2.8 / 3)
    assert [run["steps to k=2"] for run in (good, bad)] == [20, math.inf]
    assert [run["hops mastered"] for run in (good, bad)] == [3, 1]
    reproduce.main(["claims", "--out", "table"])
    rows = Path("table/claims.md").read_text().splitlines()
    assert len(rows) == 2 + len(CLAIMS) and all(row.count("|") == 8 for row in rows)


SWEEP = f"copy --seeds 1 --jobs 2 {' '.join(TINY[2:])}".split()


@posix
def test_ctrl_c_to_all_processes_ends_a_sweep_and_saves_its_runs(here):
    command = [sys.executable, HERE / "results/reproduce.py", *SWEEP, *ENDLESS.split()]
    sweep = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.time() + 120
    while len(logs := [*Path("out").glob("*/metrics.jsonl")]) < 2:
        assert time.time() < deadline and sweep.poll() is None
        time.sleep(0.05)
    os.killpg(sweep.pid, signal.SIGINT)
    assert "the same command goes on" in sweep.communicate(timeout=120)[1] and sweep.returncode == 130
    for log in logs:
        assert checkpoint(log.parent)["step"] // 20 * 20 == train.steps_done(log.parent)[0] >= 20


def test_a_sweep_goes_on_where_it_stopped(here, monkeypatch, capsys):
    group = reproduce.GROUPS["copy"]._replace(models={"a": "", "b": "--canon abcd"})
    monkeypatch.setitem(reproduce.GROUPS, "copy", group)
    sweep = [*SWEEP, "--steps", "40"]
    reproduce.main([*sweep, "--dry-run", "--lr", "1e-2"])  # as it is anyway
    finished, cut_off = (line.split()[2:] for line in capsys.readouterr().out.splitlines())
    assert "--lr" not in finished
    train.main(finished)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        interrupt(patch, 25)
        train.main(cut_off)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **kw: started.append(words) or popen(words, **kw))
    for _ in range(2):  # the second time nothing is left
        with pytest.raises(SystemExit, match="False"):
            reproduce.main(sweep)
        assert [words[2:] for words in started] == [[*cut_off, "--resume"]]
        assert "| b | 0 |" in capsys.readouterr().out and Path("out/copy_nano.png").exists()
    (config,) = Path("out").glob("*abcd*/config.json")
    config.write_text(config.read_text().replace('"N": 8', '"N": 7'))  # another run of this name
    assert reproduce.progress(config.parent, cut_off) == (40, False)


BAD = """plot; plot nowhere; plot .; plot good --save no/where; plot good --out file; reproduce nothing;
reproduce copy --seeds 0; reproduce copy --jobs -1; reproduce copy --lr fast; reproduce copy --lr -1;
reproduce copy --seed 1; reproduce copy --n-layer 2; reproduce copy --program none.py;
reproduce copy --draw; reproduce depth --canon abcd; reproduce depth --N 100"""


@pytest.mark.parametrize("words", BAD.split(";"))
def test_bad_figures_and_comparisons_are_refused(words, here, monkeypatch, capsys):
    write_run("good", made_run((0.2,)))
    Path("file").touch()
    monkeypatch.setattr(reproduce, "HERE", Path("nowhere"))
    program, *words = words.split()
    small = ["--preset", "nano", "--device", "cpu"]
    refused(*(plot.main, words) if program == "plot" else (reproduce.main, words + small), capsys)
# ---- 7. assignment/ --------------------------------------------------------

LAST = f"# exercise {len(grade.EXERCISES)}\n"
solutions = any(LAST in (HERE / name).read_text() for name in grade.FILES)
needs_solutions = pytest.mark.skipif(not solutions, reason="this is an assignment")


@needs_solutions
def test_exercises_pass_when_they_and_those_before_are_solved(tmp_path):
    """After the seventh: the first seven pass, and all tests of the others fail."""
    make.write_assignment(tmp_path / "copy", 7)
    for exercises, ends in ((grade.EXERCISES[:7], "passed"), (grade.EXERCISES[7:], "failed")):
        selected = " or ".join(f"({tests})" for _, tests in exercises)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-k", selected]
        done = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True)
        only = rf"(\d+) {ends}, (\d+ skipped, )?\d+ deselected(, \d+ warnings?)? in "
        summary = re.match(only, done.stdout.splitlines()[-1])
        assert summary and int(summary[1]) >= len(exercises), done.stdout


@needs_solutions
def test_assignments_are_written_once_and_without_solutions(tmp_path, capsys):
    folder = tmp_path / "new" / "assignment"
    make.main([str(folder)])
    assert (folder / ".gitignore").exists() and not (folder / ".git").exists()
    asked = []
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
    for bad in ([str(folder)], [], [str(HERE / "new")], [str(tmp_path / "x"), "--solved", "13"]):
        with pytest.raises(SystemExit) as stop:
            make.main(bad)
        assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "x").exists()


@needs_solutions
def test_a_submission_is_graded_by_our_tests(tmp_path, monkeypatch, capsys):
    """Rotary is wrong in the submission; its own tests are not asked."""
    make.write_assignment(tmp_path / "theirs", 13)
    text = (tmp_path / "theirs" / "canon_gpt.py").read_text()
    wrong = text.replace("x1 * cos - x2 * sin", "x1 * cos + x2 * sin")
    (tmp_path / "theirs" / "canon_gpt.py").write_text(wrong)
    (tmp_path / "theirs" / "test_canon.py").write_text("def test_rotary_depends(): pass")
    monkeypatch.setattr(grade, "EXERCISES", grade.EXERCISES[2:4])
    assert wrong != text and grade.main(["--of", str(tmp_path / "theirs")]) == 1
    streams, rotary = capsys.readouterr().out.splitlines()
    assert "solved" in streams and "open" in rotary
    for bad in (["0"], ["3"], ["--of", str(tmp_path)], ["x"]):
        with pytest.raises(SystemExit) as stop:
            grade.main(bad)
        assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
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
    assert about["toy"] and about["torch"] == torch.__version__ and about["date"]
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
                elif field in ("spilled", "barriers"):  # nothing spills, nobody waits
                    assert value == 0
                elif isinstance(value, (int, float)):
                    assert value > 0
            assert row.get("instructions", 0) <= row.get("allowed", 0)  # the memory sets the pace
    for package in ("fla", "causal_conv1d", "transformers"):  # a line a script
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


@pytest.mark.parametrize("number", range(3), ids=("mixer", "canon", "task"))
def test_own_things_are_trained_and_drawn(number, tmp_path, monkeypatch):
    """Word for word, by one dictionary entry each; and they stream."""
    code, (flags, label) = python_blocks("results/README.md")[number], OWN[number]
    assert code.count("\n") <= 25
    for registry in (MIXERS, CANONS, tasks.TASKS):
        for name in ("retention", "gated", "reverse"):
            monkeypatch.setitem(registry, name, None), monkeypatch.delitem(registry, name)
    monkeypatch.chdir(tmp_path)
    if "--task" not in flags:
        flags += " --task copy --N 8 --block-size 17"
    flags += " --canon abcd --preset nano --steps 2 --device cpu --no-compile --eval-size 4"
    monkeypatch.setattr(sys, "argv", ["own.py", *flags.split()])
    exec(code, {"__name__": "__main__", "__file__": "own.py"})
    (run,) = plot.read_all(Path("out").iterdir())
    assert plot.model_label(run["model"]) == label
    assert run["command"].startswith("python own.py ") and run["seconds"] is not None
    model, tokens, state = CanonGPT(Config(**run["model"])).double(), some_tokens(1, 16) % 9, {}
    pieces = [model(piece, state=state)[0] for piece in tokens.split((5, 1, 10), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens)[0])


SHOWN = (("copy", "nano"), ("copy", "small"), ("tasks", "nano"), ("mlp", "nano"),
         ("capacity", "nano"))  # fmt: skip


def test_the_tables_shown_are_of_the_shipped_runs(tmp_path, monkeypatch, capsys):
    """Row by row, as reproduce.py and plot.py print them; and the table of claims."""
    monkeypatch.chdir(tmp_path)  # an out/ of one's own would count, too
    text, rows = (HERE / "results/README.md").read_text(), []
    for name, preset in SHOWN:
        with pytest.raises(SystemExit, match="0|False"):
            reproduce.main([name, "--draw", "--preset", preset, "--device", "cpu", "--out", "x"])
    depo1 = plot.models(plot.read_all([HERE / "results/depo1/runs.json"]))
    printed = capsys.readouterr().out + plot.table(depo1)
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) > 40 and [row for row in rows if row not in text] == []
    assert (HERE / "results/claims.md").read_text() == reproduce.claims() + "\n"
