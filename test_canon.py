"""The tests:   python -m pytest

By file, from the inside out: 1 kernels.py, 2 canon_gpt.py, 3 tasks.py, 4 train.py and plot.py. Fast code is compared
with slow code that is obviously right, written here again from the definitions; properties are tried on random shapes.
Section 5 makes an assignment of the files: `python test_canon.py --help`.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: for work this small, a second thread mostly waits

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: the kernel runs on the CPU, slowly, as it is

import kernels  # noqa: E402
import plot  # noqa: E402
import tasks  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import train  # noqa: E402
from canon_gpt import (  # noqa: E402
    GLA, MIXERS, MLPS, POSITIONS, Attention, Block, Canon, CanonGPT, Config, GatedDeltaNet, Mamba2, chunked_linear_attention,
    decayed_products, diagonal_scan, distance_bias, initial_dt_bias, linear_recurrence, rotary_angles, rotate, scan,
)  # fmt: skip
from tasks import make_task  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
needs_compiler = pytest.mark.skipif(not kernels.can_compile_on_cpu() and not CUDA, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------------------
# 1. kernels.py
# ------------------------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 1, 5), (1, 2, 64), (2, 9, 7), (2, 13, 130), (2, 16, 40), (1, 40, 9), (2, 4, 300)]  # T < K; D off every block size, and over one
SHAPES += [tuple(map(int, np.random.default_rng(i).integers(1, (4, 40, 150)))) for i in range(4)]
OPTIONS = [(residual, activation) for residual in (True, False) for activation in (None, "silu", "swiglu")]
FAST = ["causal_conv_pytorch", pytest.param("causal_conv_triton", marks=needs_triton)]
IMPLEMENTATIONS = ["causal_conv", *FAST]


def conv_inputs(B, T, D, K, dtype=torch.float32, activation=None):
    """x, a slice of a wider tensor as after a projection; weight; dy (B, T, D), another slice. On the GPU if there is one."""
    wide = 2 * D if activation == "swiglu" else D  # of gate and up
    x = torch.randn(B, T, 2 * wide + 1, dtype=dtype, device=DEVICE)[..., wide : 2 * wide]
    weight = (torch.rand(K, wide, device=DEVICE) * 2 - 1) * K**-0.5
    return x, weight, torch.randn(B, T, D + 3, dtype=dtype, device=DEVICE)[..., :D]


def test_convolution_by_hand():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[2.0], [3.0]])  # 2 h_t + 3 h_{t-1}
    z = torch.tensor([[[2.0], [23.0], [230.0]]])
    assert torch.equal(kernels.causal_conv_reference(x, weight, residual=False), z)
    assert torch.equal(kernels.causal_conv_reference(x, weight), x + z)
    silu = z / (1 + torch.exp(-z))
    torch.testing.assert_close(kernels.causal_conv_reference(x, weight, activation="silu"), x + silu)
    gate_and_up = torch.cat([x, 10 * x], dim=2), torch.cat([weight, weight], dim=1)
    gate = x + z
    torch.testing.assert_close(kernels.causal_conv_reference(*gate_and_up, activation="swiglu"), gate / (1 + torch.exp(-gate)) * (10 * gate))
    tail = torch.tensor([[[5.0]]])
    assert kernels.causal_conv_reference(x, weight, residual=False, tail=tail)[0, 0, 0] == 2 + 3 * 5


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype, shape", [(torch.float32, shape) for shape in SHAPES]
                         + [(dtype, shape) for dtype in (torch.bfloat16, torch.float16) for shape in SHAPES[2:5]], ids=str)  # fmt: skip
@pytest.mark.parametrize("activation", (None, "silu", "swiglu"))
def test_convolution_equals_the_definition_in_float64(name, dtype, shape, activation):
    """Values and both gradients. Inputs are exact in either type and sums are float32, so what is left is rounding the
    result to dtype: by half a unit in the last place on hardware, 2^-8 relative in bfloat16 and 2^-11 in float16, but by
    up to a whole unit in Triton's interpreter, which truncates."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    every = (1, 2, 3, 4) if name == "causal_conv_triton" else (1, 2, 3, 4, 5)
    for K in every if math.prod(shape) < 200 and dtype == torch.float32 else (4,):
        for residual in (True, False) if K == 4 else (activation != "silu",):
            x, weight, dy = conv_inputs(*shape, K, dtype, activation)
            got = kernels.value_and_grads(getattr(kernels, name), x, weight, dy, residual, activation)
            want = kernels.value_and_grads(
                kernels.causal_conv_reference, x.double(), weight.double(), dy.double(), residual, activation
            )
            for which, g, w in zip(("y", "dx", "dw"), got, want):
                scale = w.abs().max().item() + 1
                assert (g - w).abs().max().item() <= tolerance * scale, (which, K, residual)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("residual, activation", OPTIONS)
def test_convolution_forward_alone(name, residual, activation):
    for K, shape in itertools.product((2, 3, 4), ((1, 1, 2), (2, 9, 40))):
        x, weight, _ = conv_inputs(*shape, K, activation=activation)
        want = kernels.causal_conv_reference(x, weight, residual, activation)
        torch.testing.assert_close(getattr(kernels, name)(x, weight, residual, activation), want)


def test_eager_convolution_makes_no_shifted_copies(monkeypatch):
    monkeypatch.setattr(kernels, "shifted", None)
    monkeypatch.setattr(F, "pad", None)
    x, weight, dy = conv_inputs(2, 9, 7, 4)
    assert all(u.isfinite().all() for u in kernels.value_and_grads(kernels.causal_conv_pytorch, x, weight, dy))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_convolution_keeps_the_dtype_and_takes_any_stride(name):
    conv = getattr(kernels, name)
    x, weight, _ = conv_inputs(3, 11, 16, 4, torch.bfloat16)
    assert conv(x, weight).dtype == torch.bfloat16
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)  # last dim not contiguous
    torch.testing.assert_close(conv(transposed, weight), conv(x.contiguous(), weight))
    x = x.float().requires_grad_()
    dx = torch.autograd.grad(conv(x, weight).sum(), x)[0]  # sum's gradient is an expanded scalar: strides of 0
    want = torch.autograd.grad(kernels.causal_conv_reference(x, weight).sum(), x)[0]
    torch.testing.assert_close(dx, want)


@pytest.mark.parametrize("conv", (kernels.causal_conv_reference, kernels.causal_conv), ids=("definition", "causal_conv"))
@pytest.mark.parametrize("residual, activation", OPTIONS)
@pytest.mark.parametrize("with_tail", (False, True))
def test_convolution_gradcheck(conv, residual, activation, with_tail):
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    tail = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) if with_tail else None
    assert torch.autograd.gradcheck(lambda *t: conv(t[0], t[1], residual, activation, *t[2:]), (x, weight, tail)[: 2 + with_tail])


@pytest.mark.parametrize("conv", (kernels.causal_conv_reference, kernels.causal_conv), ids=("definition", "causal_conv"))
def test_convolution_streams(conv):
    """In pieces, each with the inputs before it as tail, as in one pass; gradients flow into the tail."""
    for K, activation in itertools.product((2, 3, 4), ("silu", "swiglu")):
        x, weight, _ = conv_inputs(2, 17, 6, K)
        whole = conv(x, weight, True, activation)
        past, pieces = torch.zeros(2, K - 1, 6, device=DEVICE), []
        for piece in x.split((1, 2, 5, 1, 8), dim=1):
            pieces.append(conv(piece, weight, True, activation, past))
            past = torch.cat([past, piece], dim=1)[:, -(K - 1) :]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    tail = torch.zeros(2, 3, 6, device=DEVICE, requires_grad=True)
    conv(x, weight, tail=tail).sum().backward()
    torch.testing.assert_close(tail.grad[0], torch.stack([weight[3], weight[2:].sum(0), weight[1:].sum(0)]))


@needs_triton
def test_operator_is_registered_properly():
    """PyTorch's own check of a custom operator: schema, fake version, autograd, and both under AOTAutograd."""
    for K, residual, activation in ((4, True, ""), (3, False, "silu"), (4, True, "swiglu")):
        x, weight, dy = conv_inputs(2, 5, 8, K, activation=activation)
        torch.library.opcheck(kernels.conv_backward_op, (dy, x, weight, residual, activation))
        torch.library.opcheck(kernels.conv_op, (x.requires_grad_(), weight.requires_grad_(), residual, activation))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_convolution_with_a_frozen_weight_or_input(name):
    conv = getattr(kernels, name)
    x, weight, dy = conv_inputs(3, 20, 8, 4)
    _, dx, dw = kernels.value_and_grads(kernels.causal_conv_reference, x, weight, dy)
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(conv(a, weight), a, dy)[0], dx.float())
    torch.testing.assert_close(torch.autograd.grad(conv(x, b), b, dy)[0], dw.float(), atol=1e-4, rtol=1e-4)
    low = weight.bfloat16().requires_grad_()  # a weight of another dtype than x gets a gradient of its own dtype
    assert torch.autograd.grad(conv(x, low), low, dy)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("residual, activation", ((True, None), (False, "silu"), (True, "swiglu")))
def test_convolution_compiles_in_one_graph(name, residual, activation):
    """Also for fewer tokens than weights, and where the weights are frozen."""
    torch._dynamo.reset()
    compiled = torch.compile(getattr(kernels, name), fullgraph=True, backend="aot_eager")
    for B, T, D in ((2, 9, 8), (3, 2, 5)):
        x, weight, dy = conv_inputs(B, T, D, 4, activation=activation)
        got = kernels.value_and_grads(compiled, x, weight, dy, residual, activation)
        want = kernels.value_and_grads(kernels.causal_conv_reference, x.double(), weight.double(), dy.double(), residual, activation)
        for a, b in zip(got, want):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
        a = x.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(compiled(a, weight, residual, activation), a, dy)[0].double(), want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_autocast_leaves_the_convolution_alone(name):
    x, weight, _ = conv_inputs(2, 9, 8, 4)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = getattr(kernels, name)(x, weight)
    torch.testing.assert_close(y, kernels.causal_conv_reference(x, weight))  # float32 in, float32 out, float32 exact


@pytest.mark.parametrize("name, shape", (("causal_conv_pytorch", (5, 300, 260)),
                                         pytest.param("causal_conv_triton", (3, 70, 130), marks=needs_triton)))  # fmt: skip
@pytest.mark.parametrize("activation", (None, "silu", "swiglu"))
def test_convolution_over_many_blocks(name, shape, activation):
    """Where the derivative is summed over several parts of the batch (in PyTorch), or several programs (in Triton, which meet within a sequence)."""
    x, weight, dy = conv_inputs(*shape, 4, activation=activation)
    got = kernels.value_and_grads(getattr(kernels, name), x, weight, dy, True, activation)
    want = kernels.value_and_grads(kernels.causal_conv_reference, x.double(), weight.double(), dy.double(), True, activation)
    assert max(map(kernels.relative_error, got, want)) < 1e-5


@pytest.mark.skipif(not hasattr(kernels.triton, "__version__") or tuple(map(int, kernels.triton.__version__.split(".")[:2])) < (3, 3),
                    reason="needs Triton 3.3 or later")  # fmt: skip
def test_the_kernels_machine_code():
    """As a GPU would get it: nothing spilled, nobody waits, and no more instructions than its memory leaves time for."""
    *_, cols = kernels.walks(torch.empty(16, 2048, 4096, device="meta"), 2048, 8)
    script = f"import json, machine_code as m; print(json.dumps({{name: m.count(name, {cols}) for name in m.KERNELS}}))"
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE / "results", env=compiled, capture_output=True, text=True, check=True)
    for name, (_, spilled, barriers, instructions, allowed) in json.loads(done.stdout).items():
        assert spilled == barriers == 0, name
        assert instructions < allowed or name == "backward, SiLU", name  # which is a little over it (results/README.md)


@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_convolution_beyond_2_to_the_31():
    """Of a tensor with more numbers than 32 bits count, the last rows."""
    x, weight, _ = conv_inputs(1, 2**20 + 5, 1024, 4, torch.bfloat16)
    x = x.requires_grad_()
    y = kernels.causal_conv(x, weight)
    torch.testing.assert_close(y[:, -8:], kernels.causal_conv(x[:, -8:], weight, tail=x[:, -11:-8]))
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    torch.testing.assert_close(dx[0, -4:], (1 + torch.stack([weight[: i + 1].sum(0) for i in (3, 2, 1, 0)])).bfloat16())


def test_convolution_of_nothing():
    for shape in ((0, 4, 3), (2, 0, 3)):
        x = torch.zeros(shape, requires_grad=True)
        y = kernels.causal_conv(x, torch.ones(4, 3, requires_grad=True))
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


def test_convolution_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 5, 3), torch.zeros(4, 3)
    for bad in (
        lambda: kernels.causal_conv(x[0], weight),
        lambda: kernels.causal_conv(x, torch.zeros(4, 2)),
        lambda: kernels.causal_conv(x, weight, activation="gelu"),
        lambda: kernels.causal_conv(x, weight, tail=x),
        lambda: kernels.causal_conv_triton(x, torch.zeros(5, 3)),
    ):
        with pytest.raises(ValueError):
            bad()


def test_kernels_py_checks_times_and_saves(tmp_path, monkeypatch, capsys):
    """By a clock that always shows the same."""
    monkeypatch.setattr(kernels, "can_compile_on_cpu", lambda: False)
    monkeypatch.setattr(kernels, "quartiles_ms", lambda f, device: (f(), (1.0, 2.0, 4.0))[1])
    kernels.main(["--device", "cpu", "--json", str(tmp_path / "kernels.json")])
    saved = json.loads((tmp_path / "kernels.json").read_text())
    assert {"definition", "PyTorch", "nn.Conv1d"} <= set(saved["errors"]) and saved["errors"]["PyTorch"]["float32"] < 1e-6
    assert len(saved["times"]) == 12
    for row in saved["times"]:
        assert row["copy_gb_per_s"] == pytest.approx(2 * 4 * row["B"] * row["T"] * row["D"] / 1e9 / 2e-3)
        shares = (0.75, 1.25) if row["activation"] == "swiglu" else (1, 1.5)  # of a copy's reads and writes, in the same time
        assert (row["forward_of_copy"], row["backward_of_copy"]) == pytest.approx(shares) and row["backward_ms"] == [1, 2, 4]
    assert capsys.readouterr().out.count("2.000 (1.000-4.000)") == 24
    monkeypatch.setattr(kernels, "implementations", lambda device: {"wrong": lambda x, w, *options: kernels.causal_conv(x, w * 1.001, *options)})
    with pytest.raises(SystemExit, match="wrong, torch.float32: relative error"):
        kernels.main(["--device", "cpu"])
    capsys.readouterr()
    for bad in (["--json", str(tmp_path / "nowhere" / "kernels.json")], ["--json", str(tmp_path)], ["--device", "tpu"]):
        with pytest.raises(SystemExit) as refused:
            kernels.main(bad)
        assert refused.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------
# 2. canon_gpt.py
# ------------------------------------------------------------------------------------------------------------

CANONS = (
    dict(canon="a"), dict(canon="b"), dict(canon="c"), dict(canon="d"),
    dict(canon="abcd", canon_kernel=2), dict(canon="abcd", canon_kernel=3), dict(canon="abcd", canon_residual=False),
    dict(canon="abcd", canon_silu=True), dict(canon="abcd", canon_frozen=True),
)  # fmt: skip
VARIANTS = [dict(pos=pos, canon=canon) for pos in POSITIONS for canon in ("", "abcd")]
VARIANTS += [dict(canon) for canon in CANONS] + [dict(mlp=mlp, canon="ab" if mlp == "none" else "abcd") for mlp in MLPS if mlp != "swiglu"]
LINEAR = ("gla", "mamba2", "gdn")
VARIANTS += [
    dict(mixer=mixer, canon=canon, short_conv=conv) for mixer in LINEAR for canon, conv in (("", False), ("acd", True), ("abcd", None))
]
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


def label(options):
    return ",".join(f"{value}" if key in ("mixer", "pos", "canon", "mlp") else f"{key}={value}" for key, value in options.items()) or "plain"


@pytest.mark.parametrize("options", VARIANTS, ids=label)
def test_causality(options):
    """Changing token t leaves the logits before t as they are, and changes those at t."""
    model = small_model(**options).double()
    tokens = torch.randint(0, 19, (1, 24))
    before = model(tokens)[0]
    for t in (0, 1, 11, 23):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 1) % 19
        after = model(changed)[0]
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-12, rtol=0)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("options", VARIANTS, ids=label)
def test_streaming_equals_one_pass(options):
    model = small_model(**options).double()
    tokens = torch.randint(0, 19, (2, 24))
    whole = model(tokens)[0]
    for lengths in ((1,) * 24, (5, 1, 1, 9, 8), (23, 1)):
        state = {}
        pieces = [model(piece, state=state)[0] for piece in tokens.split(lengths, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("points", ("a", "b", "c", "d", "abcd"))
def test_canon_with_zero_weights_is_no_canon(points):
    model, bare = small_model(canon=points), small_model()
    own = {name: w for name, w in model.state_dict().items() if "canon" not in name}
    bare.load_state_dict(own)
    assert len(own) < len(model.state_dict())
    tokens = torch.randint(0, 19, (2, 24))
    assert not torch.allclose(model(tokens)[0], bare(tokens)[0])
    for module in model.modules():
        if isinstance(module, Canon):
            torch.nn.init.zeros_(module.weight)
    assert torch.equal(model(tokens)[0], bare(tokens)[0])


@pytest.mark.parametrize("points", ("a", "b", "c", "d", "abcd"))
def test_canon_points_and_widths(points):
    with torch.device("meta"):
        model = CanonGPT(Config(vocab_size=10, block_size=8, n_layer=1, canon=points))
    places = {"a": ("canon_a", 768), "b": ("mixer.canon", 2304), "c": ("canon_c", 768), "d": ("mlp.canon", 4096)}
    found = {name: module.weight.shape for name, module in model.blocks[0].named_modules() if isinstance(module, Canon)}
    assert found == {name: (4, width) for point, (name, width) in places.items() if point in points}


WHERE = [("nope", 0, True, False), ("rope4", 4, True, False), ("alibi", 0, True, False), ("halibi", 0, True, False)]
WHERE += [("rope", 16, residual, silu) for residual in (True, False) for silu in (True, False)]


@pytest.mark.parametrize("pos, turned, residual, silu", WHERE)
def test_canon_points_are_where_the_paper_puts_them(pos, turned, residual, silu):
    """One block recomputed from its parts: the convolution written out, rotary as products of complex numbers."""

    def canon(module, h):
        z = sum(module.weight[i] * F.pad(h, (0, 0, i, 0))[:, : h.shape[1]] for i in range(4))
        z = z * torch.sigmoid(z) if silu else z
        return h + z if residual else z

    def norm(module, h):
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def rotary(h):  # (B, H, T, 16), the first `turned` dims: dim j and dim j + turned / 2 make a complex number
        half = turned // 2
        angle = torch.arange(24).double()[:, None] * 10000 ** (-torch.arange(half).double() / max(half, 1))
        z = torch.complex(h[..., :half], h[..., half:turned]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag, h[..., turned:]], dim=-1)

    model = small_model(canon="abcd", pos=pos, n_layer=1, n_head=2, canon_residual=residual, canon_silu=silu).double()
    tokens = torch.randint(0, 19, (2, 24))
    block, x = model.blocks[0], model.embed(tokens)
    h = canon(block.canon_a, norm(block.norm1, x))
    q, k, v = canon(block.mixer.canon, h @ block.mixer.qkv.weight.T).view(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)
    logits = rotary(q) @ rotary(k).transpose(-1, -2) / 16**0.5
    logits = logits + (torch.full((24, 24), -torch.inf).triu(1) if model.bias is None else model.bias)
    mixed = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + mixed @ block.mixer.out.weight.T
    h = canon(block.canon_c, norm(block.norm2, x))
    gate, up = canon(block.mlp.canon, h @ block.mlp.up.weight.T).chunk(2, dim=-1)
    x = x + (gate * torch.sigmoid(gate) * up) @ block.mlp.down.weight.T
    want = norm(model.norm, x) @ model.head.weight.T
    torch.testing.assert_close(model(tokens)[0], want, atol=1e-4, rtol=1e-4)  # the model's angles are float32


@pytest.mark.parametrize("kernel", (2, 3, 4))
def test_a_canon_layer_streams(kernel):
    """By Eq. 4.1, one token after another; in pieces of any length; and memory does not grow."""
    layer, x, state = Canon(6, Config(vocab_size=1, block_size=1, canon="a", canon_kernel=kernel)), torch.randn(2, 12, 6), {}
    want = [x[:, t] + sum(layer.weight[i] * x[:, t - i] for i in range(min(kernel, t + 1))) for t in range(12)]
    torch.testing.assert_close(layer(x), torch.stack(want, dim=1))
    pieces = [layer(piece, state) for piece in x.split((1, 1, 5, 2, 3), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), torch.stack(want, dim=1))
    kept = sum(u.untyped_storage().nbytes() for u in state.values())
    assert kept == 4 * 2 * (kernel - 1) * 6, "a slice keeps all of the tensor that it was cut from"


@pytest.mark.parametrize("canon, pos", (("", "nope"), ("", "rope"), ("", "alibi"), ("b", "rope"), ("b", "halibi")))
def test_attention_is_a_mean_of_values(canon, pos):
    """One head and one query at a time; then the same in a stream."""
    layer = Attention(Config(vocab_size=1, block_size=9, n_head=2, d_model=8, canon=canon))
    x, angles = torch.randn(3, 9, 8), rotary_angles(9, 4)
    rope = (angles.cos(), angles.sin()) if pos == "rope" else None
    bias = None if pos in ("rope", "nope") else distance_bias(pos, 2, 9)
    q, k, v = layer.canon(layer.qkv(x)).view(3, 9, 3, 2, 4).unbind(2)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    want = torch.empty(3, 9, 2, 4)
    for b, t, h in itertools.product(range(3), range(9), range(2)):
        logits = k[b, : t + 1, h] @ q[b, t, h] / 4**0.5 + (0 if bias is None else bias[h, t, : t + 1])
        want[b, t, h] = logits.softmax(0) @ v[b, : t + 1, h]
    want, state, at, pieces = layer.out(want.flatten(2)), {}, 0, []
    torch.testing.assert_close(layer(x, rope, bias), want)
    for piece in x.split((1, 4, 1, 3), dim=1):
        end = at + piece.shape[1]
        pieces.append(layer(piece, None if rope is None else [u[at:end] for u in rope], None if bias is None else bias[:, at:end, :end], state))
        at = end
    torch.testing.assert_close(torch.cat(pieces, dim=1), want)


def test_mlp_variants():
    h = torch.randn(2, 3, 32)
    relu2 = lambda x: x.clamp(min=0) ** 2  # noqa: E731
    for mlp, act in (("swiglu", F.silu), ("swiglu-relu2", relu2), ("silu", F.silu), ("relu2", relu2)):
        module = small_model(mlp=mlp).blocks[0].mlp
        up = h @ module.up.weight.T
        if mlp.startswith("swiglu"):
            assert up.shape[-1] == 2 * 88  # 8 * 32 / 3 = 85.3, and 88 is the nearest multiple of 8
            inner = act(up[..., :88]) * up[..., 88:]
        else:
            assert up.shape[-1] == 4 * 32
            inner = act(up)
        torch.testing.assert_close(module(h), inner @ module.down.weight.T)


def test_initialisation():
    torch.manual_seed(1)
    for options, std in (({}, 0.02), ({"init_std": 0.1}, 0.1)):
        model = CanonGPT(Config(vocab_size=500, block_size=8, n_layer=2, n_head=8, d_model=512, canon="abcd", **options))
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                n, s = module.weight.numel(), 0.02 if name in ("embed", "head") else std
                assert abs(module.weight.mean()) < 5 * s / n**0.5
                assert abs(module.weight.std() / s - 1) < 5 / (2 * n) ** 0.5  # the spread of a standard deviation
                assert module.weight.abs().max() > 3 * s  # tails: not a uniform
    for K in (2, 3, 4):
        weight = Canon(20_000, Config(vocab_size=5, block_size=8, canon="a", canon_kernel=K)).weight
        bound = K**-0.5
        assert weight.abs().max() <= bound and weight.abs().max() > 0.999 * bound
        assert abs(weight.mean()) < 5 * bound / (3 * weight.numel()) ** 0.5
        assert abs(weight.var() / (bound**2 / 3) - 1) < 5 * (0.8 / weight.numel()) ** 0.5


@pytest.mark.parametrize("mlp", ("swiglu", "silu"))
@pytest.mark.parametrize("d_model", (512, 768))
def test_parameter_counts(mlp, d_model):
    with torch.device("meta"):
        bare = CanonGPT(Config(vocab_size=100, block_size=8, n_head=8, d_model=d_model, mlp=mlp)).parameter_counts()
        full = CanonGPT(Config(vocab_size=100, block_size=8, n_head=8, d_model=d_model, mlp=mlp, canon="abcd")).parameter_counts()
    body = bare["total"] - bare["embeddings"]
    assert bare["embeddings"] == 2 * 100 * d_model and bare["canon"] == 0
    assert abs(body / (12 * 12 * d_model**2) - 1) < 0.005  # 4 d^2 attention, 8 d^2 MLP; norms and rounding are small
    assert full["total"] - bare["total"] == full["canon"]
    width_d = 2 * 8 * round(d_model / 3) if mlp.startswith("swiglu") else 4 * d_model
    assert full["canon"] == 12 * 4 * (5 * d_model + width_d)
    assert full["canon"] / body < (0.005 if d_model == 768 else 0.007)


def test_frozen_canon_and_weight_decay_groups():
    model = small_model(canon="abcd", canon_frozen=True)
    training = dict(lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.5)
    canons = [module.weight for module in model.modules() if isinstance(module, Canon)]
    start = [weight.clone() for weight in canons]
    optimizer = train.make_optimizer(model, training, "cpu")
    model(torch.randint(0, 19, (2, 24)), torch.randint(0, 19, (2, 24)))[1].backward()
    optimizer.step()
    assert len(canons) == 8 and all(torch.equal(a, b) for a, b in zip(start, canons))

    model = small_model(canon="abcd", tie_embeddings=True)
    decayed, plain = train.make_optimizer(model, training, "cpu").param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.5 and plain["weight_decay"] == 0
    assert all("norm" in names[id(p)] or "canon" in names[id(p)] for p in plain["params"])
    assert not any("norm" in names[id(p)] or "canon" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_rotary_depends_on_the_distance_only():
    angles = rotary_angles(64, 8).double()
    q, k = torch.randn(8).double(), torch.randn(8).double()
    rows = lambda u: rotate(u.expand(1, 64, 1, 8), angles.cos(), angles.sin())[0, :, 0]  # noqa: E731
    scores = rows(q) @ rows(k).T
    for distance in range(-63, 64):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)  # float32 angles
    assert scores[0].std() > 0.1  # and it does depend on it
    torch.testing.assert_close(angles[1], torch.tensor([1.0, 0.1, 0.01, 0.001]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows(q).norm(dim=-1), q.norm().expand(64))
    quarter = rotary_angles(64, 2).double()
    turned = rotate(q.expand(1, 64, 1, 8), quarter.cos(), quarter.sin())[0, :, 0]
    pairs = torch.complex(q[:4], q[4:]) * torch.polar(torch.ones(64, 4).double(), angles)  # dims j and j + 4 are a pair
    torch.testing.assert_close(rows(q), torch.cat([pairs.real, pairs.imag], dim=-1))
    assert torch.equal(turned[:, 2:], q[2:].expand(64, 6)) and not torch.allclose(turned[1:, :2], q[:2].expand(63, 2))


def test_alibi_masks_by_hand():
    x = -torch.inf
    alibi = distance_bias("alibi", 2, 3)  # slopes 2^-4 and 2^-8
    for head, slope in enumerate((1 / 16, 1 / 256)):
        want = torch.tensor([[0, x, x], [-slope, 0, x], [-2 * slope, -slope, 0]])
        assert torch.equal(alibi[head], want)
    halibi = distance_bias("halibi", 4, 4)
    assert torch.equal(halibi[0], torch.tensor([[0, x, x, x], [x, 0, x, x], [x, x, 0, x], [x, x, x, 0]]))  # itself
    assert torch.equal(halibi[1], torch.tensor([[0, x, x, x], [0, 0, x, x], [x, 0, 0, x], [x, x, 0, 0]]))  # two nearest
    for head in (2, 3):
        assert torch.equal(halibi[head], torch.tensor([[0, x, x, x], [0, 0, x, x], [0, 0, 0, x], [0, 0, 0, 0]]))


def test_without_positions_attention_sees_a_set():
    """NoPE without Canon: shuffling what came before leaves a single layer's last logits alone. Canon ends that."""
    tokens = torch.randint(0, 19, (1, 24))
    shuffled = torch.cat([tokens[:, torch.randperm(23)], tokens[:, 23:]], dim=1)
    for canon, same in (("", True), ("abcd", False)):
        model = small_model(pos="nope", n_layer=1, canon=canon)
        assert torch.allclose(model(tokens)[0][:, -1], model(shuffled)[0][:, -1], atol=1e-4) == same


def test_loss_counts_the_masked_targets_in_nats():
    model = small_model()
    tokens, targets = torch.randint(0, 19, (2, 2, 24))
    mask = torch.rand(2, 24) < 0.3
    logits, loss = model(tokens, targets, mask)
    nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(loss, nats[mask].mean())
    torch.testing.assert_close(model(tokens, targets)[1], nats.mean())
    assert model(tokens, targets, torch.zeros_like(mask))[1] == 0
    assert model(tokens)[1] is None


def test_generate():
    model = small_model(canon="abcd")
    tokens = torch.randint(0, 19, (3, 5))
    greedy = model.generate(tokens, 10, temperature=0)
    slow = tokens
    for _ in range(10):
        slow = torch.cat([slow, model(slow)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy, slow)

    stop = int(greedy[0, 7])
    stopped = model.generate(tokens, 10, temperature=0, stop=stop)
    for row, full in zip(stopped.tolist(), greedy.tolist()):
        end = full.index(stop, 5) if stop in full[5:] else len(row)
        assert row[:end] == full[:end][: len(row)] and all(token == stop for token in row[end:])

    draw = lambda seed: model.generate(tokens, 10, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    many = model.generate(tokens[:1].expand(4000, 5), 1, generator=torch.Generator().manual_seed(0))[:, 5]
    expected = 4000 * model(tokens[:1])[0][0, -1].softmax(-1)
    counts = torch.bincount(many, minlength=19)
    likely = expected > 5
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
    assert chi2 < likely.sum() + 5 * (2 * likely.sum()) ** 0.5

    state = {}
    model(torch.zeros(1, 24, dtype=torch.int64), state=state)
    with pytest.raises(ValueError, match="block_size"):
        model(torch.zeros(1, 1, dtype=torch.int64), state=state)
    assert model.generate(tokens, 20).shape == (3, 25)  # the last token is never fed
    for call in (lambda: model.generate(tokens, 21), lambda: model(torch.zeros(1, 25, dtype=torch.int64))):
        with pytest.raises(ValueError, match="block_size"):
            call()


def test_generate_from_texts_of_different_lengths():
    """Each row as if it were alone, with `stop` or without."""
    for options in (dict(canon="abcd"), dict(mixer="gdn,attention", canon="a")):
        model = small_model(**options).eval()
        given = torch.randint(1, 11, (5, 7))
        lengths = torch.tensor([3, 7, 5, 3, 1])
        for stop in (None, 4):
            together = model.generate(given, 6, 0.0, stop, lengths=lengths)
            for row, text, length in zip(together, given, lengths):
                alone = model.generate(text[None, :length], 13 - int(length), 0.0, stop)[0]
                known = min(len(alone), len(row))
                assert torch.equal(row[:known], alone[:known])
                assert all(token == stop for token in [*row[known:], *alone[known:]])


# what takes another path through the code; the convolution's own are compiled above
COMPILED = [dict(pos=pos, canon="abcd") for pos in POSITIONS]
COMPILED += [dict(canon=""), dict(canon="abcd", canon_frozen=True), dict(canon="ab", mlp="none"), dict(canon="abcd", mlp="relu2")]
COMPILED += [dict(mixer="gla,mamba2,gdn,attention", n_layer=4, canon=canon, short_conv=bool(canon)) for canon in ("", "acd")]


@pytest.mark.parametrize("options", COMPILED, ids=label)
def test_model_compiles_in_one_graph(options):
    """Without the code generator, but with its decompositions: PyTorch 2.13 gets a stride of softplus's own backward wrong."""
    model = small_model(**options)
    tokens, targets = torch.randint(0, 19, (2, 2, 24))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_same_gradients(model, compiled(tokens, targets)[1], model(tokens, targets)[1])


def assert_same_gradients(model, loss, want):
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(loss, want)
    for a, b in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(want, trained)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@needs_compiler
def test_model_compiles_for_real():
    model = small_model(canon="abcd").to(DEVICE)
    tokens, targets = torch.randint(0, 19, (2, 2, 24), device=DEVICE)
    torch._dynamo.reset()
    assert_same_gradients(model, torch.compile(model, fullgraph=True)(tokens, targets)[1], model(tokens, targets)[1])


@pytest.mark.parametrize("mixer", ("attention", *LINEAR))
def test_a_model_may_be_in_bf16_throughout(mixer):
    model = small_model(canon="abcd", mixer=mixer).to(DEVICE)
    tokens, targets = torch.randint(0, 19, (2, 2, 24), device=DEVICE)
    exact = model(tokens, targets)[1]
    loss = model.bfloat16()(tokens, targets)[1]
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("mixer", ("attention", *LINEAR))
def test_autocast_runs_the_blocks_in_bf16(mixer):
    model = small_model(canon="abcd", mixer=mixer).to(DEVICE)
    tokens, targets = torch.randint(0, 19, (2, 2, 24), device=DEVICE)
    seen = []
    for module in model.modules():
        if isinstance(module, Canon):
            module.register_forward_hook(lambda m, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    exact = model(tokens, targets)[1]
    seen.clear()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(tokens, targets)[1]
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 8
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0.1, rtol=0.05)


# The linear mixers: the recurrence, its chunked form, and GLA, Mamba2 and Gated DeltaNet around it.

KINDS = ("gla", "mamba2", "gdn", "gdn per channel")  # the last is no mixer's, but the functions take it


def recurrence_inputs(kind, B, T, H, K, V, strongest=1.0, dtype=torch.float64, device="cpu"):
    """(q, k, v, log_decay, beta) with log decays down to -strongest a step, half of them near 0."""
    if device != "cpu":
        return [u if u is None else u.to(device) for u in recurrence_inputs(kind, B, T, H, K, V, strongest, dtype)]
    shared = 1 if kind == "mamba2" else H
    q, k, v = torch.randn(B, T, shared, K, dtype=dtype), torch.randn(B, T, shared, K, dtype=dtype), torch.randn(B, T, H, V, dtype=dtype)
    channels = (K,) if kind in ("gla", "gdn per channel") else ()
    g = -strongest * torch.rand(B, T, H, *channels, dtype=dtype)
    g = torch.where(torch.rand_like(g) < 0.5, g, 1e-4 * g)
    if kind.startswith("gdn"):
        return q, F.normalize(k, dim=-1), v, g, torch.rand(B, T, H, dtype=dtype)
    return q, k, v, g, None


@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_is_the_formula(kind):
    """S_t = (I - b k k^T) D S_{t-1} + w k v^T and o_t = S_t^T q_t, with NumPy matrices, one head at a time."""
    B, T, H, K, V = 2, 5, 3, 4, 2
    q, k, v, g, beta = recurrence_inputs(kind, B, T, H, K, V)
    start = torch.randn(B, H, K, V).double()
    o, final = linear_recurrence(q, k, v, g, beta, start)
    for b, h in itertools.product(range(B), range(H)):
        S = start[b, h].numpy()
        for t in range(T):
            key, query = (u[b, t, h if u.shape[2] > 1 else 0].numpy() for u in (k, q))
            D = np.diag(np.exp(np.broadcast_to(g[b, t, h].numpy(), K)))
            bracket = np.eye(K) if beta is None else np.eye(K) - beta[b, t, h].item() * np.outer(key, key)
            S = bracket @ D @ S + (1 if beta is None else beta[b, t, h].item()) * np.outer(key, v[b, t, h].numpy())
            np.testing.assert_allclose(o[b, t, h].numpy(), S.T @ query, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(final[b, h].numpy(), S, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("channels", (1, 5))
@pytest.mark.parametrize("C", (1, 2, 16))
def test_decayed_products_are_their_sum(C, channels):
    q, k, g = torch.randn(2, 3, C, 5).double(), torch.randn(2, 3, C, 5).double(), -3 * torch.rand(2, 3, C, channels).double()
    want = torch.zeros(2, 3, C, C).double()
    for t, s in itertools.product(range(C), range(C)):
        if s <= t:
            want[..., t, s] = (q[..., t, :] * k[..., s, :] * g[..., s + 1 : t + 1, :].sum(-2).exp()).sum(-1)
    torch.testing.assert_close(decayed_products(q, k, g), want)


@pytest.mark.parametrize("N", (1, 2, 7, 70))
@pytest.mark.parametrize("channels", (1, 4, None))
def test_scans_are_loops(N, channels):
    """The states between chunks: by decays for one or all of K = 4 channels, or by matrices."""
    X, S = torch.randn(2, 3, N, 4, 5).double(), torch.randn(2, 3, 4, 5).double()
    if channels is None:
        M = torch.randn(2, 3, N, 4, 4).double() / 3
        before, last = scan(M, X, S)
    else:
        g = -torch.rand(2, 3, N, channels).double()
        M = torch.diag_embed(g.exp().expand(2, 3, N, 4))
        before, last = diagonal_scan(g, X, S)
    for n in range(N):
        torch.testing.assert_close(before[:, :, n], S)
        S = M[:, :, n] @ S + X[:, :, n]
    torch.testing.assert_close(last, S)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(12))
def test_chunked_equals_the_recurrence(kind, case):
    """Values, final state and the gradient of every input, in float64, for random shapes, chunks and decays; once for very many chunks."""
    rng = np.random.default_rng([case, KINDS.index(kind)])
    B, T, H, K, V = (int(rng.integers(1, most)) for most in (4, 80, 4, 10, 10))
    T, chunk = (69, 1) if case == 1 else (T, int(rng.integers(1, 70)))
    inputs = recurrence_inputs(kind, B, T, H, K, V, strongest=float(rng.choice([0.01, 1, 30])))
    state = torch.randn(B, H, K, V).double() if case % 2 else None
    named = {name: u.requires_grad_() for name, u in zip(("q", "k", "v", "log_decay", "beta", "state"), (*inputs, state)) if u is not None}
    results = []
    for form in (linear_recurrence, functools.partial(chunked_linear_attention, chunk=chunk)):
        o, final = form(*inputs, state)
        assert o.shape == (B, T, H, V) and final.shape == (B, H, K, V)
        torch.manual_seed(case)
        loss = (o * torch.randn(o.shape).double()).sum() + (final * torch.randn(final.shape).double()).sum()
        results.append([o, final, *torch.autograd.grad(loss, list(named.values()))])
    for name, want, got in zip(("o", "final state", *named), *results):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strongest", (1e-6, 1, 30, 1000))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_chunked_is_stable_for_any_decay(kind, strongest, dtype):
    """From hardly any decay to forgetting at once, in float32, and under autocast within ten of bfloat16's roundings (2^-9 each)."""
    inputs = recurrence_inputs(kind, 2, 150, 2, 16, 8, strongest, device=DEVICE)
    low = [None if u is None else u.to(dtype if i < 3 else torch.float32) for i, u in enumerate(inputs)]
    exact = [None if u is None else u.double().requires_grad_() for u in low]
    low = [None if u is None else u.requires_grad_() for u in low]
    want = linear_recurrence(*exact)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        got = chunked_linear_attention(*low)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    dy = torch.randn(want[0].shape, device=DEVICE).double()
    want += torch.autograd.grad((want[0] * dy).sum(), [u for u in exact if u is not None])
    got += torch.autograd.grad((got[0] * dy).sum(), [u for u in low if u is not None])
    for name, a, b in zip(("o", "final state", "dq", "dk", "dv", "dlog_decay", "dbeta"), got, want):
        assert a.isfinite().all(), name
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 10 * 2**-9) * b.norm(), name


def test_the_three_meet_where_they_should():
    B, T, H, K, V = 2, 40, 2, 6, 5
    q, k, v, g, beta = recurrence_inputs("gdn", B, T, H, K, V)
    for form in (linear_recurrence, chunked_linear_attention):
        # no decay, no bracket: (q k^T, masked) v
        weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
        torch.testing.assert_close(form(q, k, v, 0 * g)[0], torch.einsum("bhts,bshv->bthv", weights, v))
        # the same decay on every channel is a scalar decay
        for b in (None, beta):
            for channelwise, scalar in zip(form(q, k, v, g[..., None].expand(B, T, H, K), b), form(q, k, v, g, b)):
                torch.testing.assert_close(channelwise, scalar)
        # a strength of zero writes nothing, whatever the bracket; orthonormal keys give the bracket nothing to remove
        assert form(q, k, v, g, 0 * beta)[1].abs().max() == 0
        basis = torch.eye(K).double().expand(B, H, K, K).transpose(1, 2)
        first = [u[:, :K] for u in (q, v, g, beta)]
        delta = form(first[0], basis, first[1], first[2], first[3])
        plain = form(first[0], basis, first[3][..., None] * first[1], first[2])
        for a, b in zip(delta, plain):
            torch.testing.assert_close(a, b)
        # the delta rule at full strength: what is read under the last key is the last value
        torch.testing.assert_close(form(k, k, v, g, torch.ones_like(beta))[0], v)


def test_chunked_saves_memory_linear_in_time():
    """What is kept for the backward pass, in bytes."""

    def kept(kind, T):
        inputs = [u.requires_grad_() if u is not None else None for u in recurrence_inputs(kind, 1, T, 2, 8, 8)]
        seen = {}

        def pack(u):
            seen[u.untyped_storage().data_ptr()] = u.untyped_storage().nbytes()
            return u

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda u: u):
            alive = chunked_linear_attention(*inputs, chunk=16)
        assert alive[0].requires_grad
        return sum(seen.values())

    for kind in KINDS:
        assert kept(kind, 4096) < 1.2 * 4 * kept(kind, 1024)


@pytest.mark.parametrize("kind, backend", [(kind, "aot_eager") for kind in KINDS] + [
    pytest.param(kind, "inductor", marks=needs_compiler) for kind in ("gla", "gdn")])  # fmt: skip
def test_chunked_compiles_in_one_graph(kind, backend):
    inputs = [u.requires_grad_() for u in recurrence_inputs(kind, 2, 11, 2, 4, 3, dtype=torch.float32, device=DEVICE) if u is not None]
    torch._dynamo.reset()
    compiled = torch.compile(chunked_linear_attention, fullgraph=True, backend=backend)
    dy = torch.randn(2, 11, 2, 3, device=DEVICE)
    (got, got_state), (want, want_state) = compiled(*inputs, chunk=4), linear_recurrence(*inputs)
    torch.testing.assert_close(got_state, want_state, atol=1e-4, rtol=1e-4)
    for a, b in zip(torch.autograd.grad((got * dy).sum(), inputs), torch.autograd.grad((want * dy).sum(), inputs)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_under_autocast_keeps_its_state_in_float32(kind):
    """Token by token for 300 tokens with hardly any decay: a state rounded to bfloat16 at each would be off by more than 1%."""
    inputs = recurrence_inputs(kind, 2, 300, 2, 16, 8, 1e-3, torch.float32, DEVICE)
    want, want_state = linear_recurrence(*(None if u is None else u.double() for u in inputs))
    state, pieces = None, []
    with torch.autocast(DEVICE, torch.bfloat16):
        for t in range(300):
            o, state = chunked_linear_attention(*(None if u is None else u[:, t : t + 1] for u in inputs), state=state)
            pieces.append(o)
    assert kernels.relative_error(torch.cat(pieces, dim=1), want) < 1e-2 and kernels.relative_error(state, want_state) < 1e-2


def slow_mixer(module, x):
    """One sequence x (T, D) through a mixer, in NumPy, one head and one step at a time, from the papers' equations."""
    T, D = x.shape
    sigmoid = lambda u: 1 / (1 + np.exp(-u))  # noqa: E731
    silu = lambda u: u * sigmoid(u)  # noqa: E731
    softplus = lambda u: np.log1p(np.exp(u))  # noqa: E731
    rms = lambda u, norm: u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-6) * array(norm.weight)  # noqa: E731
    array = lambda u: u.detach().numpy()  # noqa: E731
    linear = lambda u, m: u @ array(m.weight).T  # noqa: E731

    def conv(u, m):
        w = array(m.weight)
        return sum(w[i] * np.concatenate([np.zeros((i, u.shape[1])), u])[:T] for i in range(4))

    canon = lambda u: u + conv(u, module.canon) if isinstance(module.canon, Canon) else u  # noqa: E731
    own = lambda u: silu(u if module.conv is None else conv(u, module.conv))  # noqa: E731
    o = []
    if isinstance(module, GLA):
        q, k, v = np.split(canon(linear(x, module.qkv)), [D // 2, D], axis=1)
        if module.conv is not None:
            q, k, v = np.split(own(np.concatenate([q, k, v], 1)), [D // 2, D], axis=1)
        low, high = module.decay
        a = sigmoid(linear(linear(x, low), high) + array(high.bias)) ** (1 / 16)
        gate, dk, dv = silu(linear(x, module.gate)), D // 8, D // 4
        for h in range(4):
            keys, values = slice(h * dk, (h + 1) * dk), slice(h * dv, (h + 1) * dv)
            S = np.zeros((dk, dv))
            for t in range(T):
                S = np.diag(a[t, keys]) @ S + np.outer(k[t, keys], v[t, values])
                o.append(rms(S.T @ q[t, keys] * dk**-0.5, module.norm) * gate[t, values])
        return linear(np.concatenate(np.array(o).reshape(4, T, dv), axis=1), module.out)
    if isinstance(module, Mamba2):
        z, xBC, dt = np.split(canon(linear(x, module.into)), [2 * D, 4 * D + 128], axis=1)
        u, B, C = np.split(own(xBC), [2 * D, 2 * D + 64], axis=1)
        dt = softplus(dt + array(module.dt_bias))
        for h in range(16):
            values = slice(h * D // 8, (h + 1) * D // 8)
            S = np.zeros((64, D // 8))
            for t in range(T):
                S = np.exp(-np.exp(array(module.A_log)[h]) * dt[t, h]) * S + dt[t, h] * np.outer(B[t], u[t, values])
                o.append(S.T @ C[t] + array(module.skip)[h] * u[t, values])
        y = np.concatenate(np.array(o).reshape(16, T, D // 8), axis=1)
        return linear(rms(y * silu(z), module.norm), module.out)
    H = module.n_head
    q, k, v = np.split(own(canon(linear(x, module.qkv))), [3 * D // 4, 3 * D // 2], axis=1)
    a = np.exp(-np.exp(array(module.A_log)) * softplus(linear(x, module.decay) + array(module.dt_bias)))
    b, gate = sigmoid(linear(x, module.strength)), silu(linear(x, module.gate))
    dk, dv = 3 * D // (4 * H), 3 * D // (2 * H)
    for h in range(H):
        keys, values = slice(h * dk, (h + 1) * dk), slice(h * dv, (h + 1) * dv)
        S = np.zeros((dk, dv))
        for t in range(T):
            query, key = (u[t, keys] / np.linalg.norm(u[t, keys]) for u in (q, k))
            S = a[t, h] * (np.eye(dk) - b[t, h] * np.outer(key, key)) @ S + b[t, h] * np.outer(key, v[t, values])
            o.append(rms(S.T @ query * dk**-0.5, module.norm) * gate[t, values])
    return linear(np.concatenate(np.array(o).reshape(H, T, dv), axis=1), module.out)


@pytest.mark.parametrize("mixer", LINEAR)
@pytest.mark.parametrize("canon, short_conv", (("", True), ("", False), ("b", False), ("b", True)))
def test_mixers_are_the_papers(mixer, canon, short_conv):
    model = small_model(mixer=mixer, canon=canon, short_conv=short_conv).double()
    module = model.blocks[1].mixer
    with torch.no_grad():
        for parameter in module.parameters():  # what starts as ones or zeros would hide a mistake
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    assert (isinstance(module.canon, Canon), module.conv is not None) == (bool(canon), short_conv)
    x = torch.randn(2, 24, 32).double()
    for row, got in zip(x, module(x)):
        torch.testing.assert_close(got.detach().numpy(), slow_mixer(module, row.numpy()), atol=1e-10, rtol=1e-8)


def test_short_convolutions_as_their_authors_have_them():
    widths = {"gla": 2 * 768, "mamba2": 2 * 768 + 128, "gdn": 3 * 768}
    for mixer, width in widths.items():
        conv = lambda **more: Block(Config(vocab_size=9, block_size=9, mixer=mixer, **more), mixer).mixer.conv  # noqa: E731
        assert (conv() is not None) == (mixer != "gla")  # the defaults
        assert conv(canon="abcd") is None and (conv(canon="acd") is not None) == (mixer != "gla")
        assert conv(short_conv=False) is None and conv(canon="abcd", short_conv=True) is not None
        own = conv(short_conv=True)
        assert own.weight.shape == (4, width) and own.weight.requires_grad and not isinstance(own, Canon)
        if mixer == "mamba2":  # Conv1d's default
            assert 0.499 < own.weight.abs().max() <= 0.5
        else:
            assert abs(own.weight.std() / 0.02 - 1) < 0.05 and own.weight.abs().max() > 0.06
        x = torch.randn(2, 7, width)
        torch.testing.assert_close(own(x), kernels.causal_conv_reference(x, own.weight, residual=False, activation="silu"))


@pytest.mark.parametrize("mixer, mixer_size, point_b", (("gla", 4, 2), ("mamba2", 6, 4), ("gdn", 6, 3)))
@pytest.mark.parametrize("d_model", (512, 768))
@pytest.mark.parametrize("mlp", ("swiglu", "silu"))
def test_linear_parameter_counts(mixer, mixer_size, point_b, d_model, mlp):
    """Mixer and MLP share 12 d^2; beside their matrices there are only gates, norms and convolutions."""
    with torch.device("meta"):
        canon = "ab" if mlp == "none" else "abcd"
        block = Block(Config(vocab_size=9, block_size=9, d_model=d_model, mixer=mixer, mlp=mlp, canon=canon), mixer)
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    extra = {"gla": 16 * d_model * 1.5 + d_model // 2 + d_model // 4, "mamba2": (2 * 64 + 16) * d_model + 2 * d_model + 3 * 16}
    H = d_model // 128
    extra["gdn"] = 2 * H * d_model + 2 * H + 3 * d_model // (2 * H)
    width_b = point_b * d_model + (144 if mixer == "mamba2" else 0)
    assert count(block.mixer) == mixer_size * d_model**2 + extra[mixer] + 4 * width_b
    assert block.mixer.canon.weight.shape == (4, width_b)
    if mlp != "none":
        matrices = count(block.mlp) - count(block.mlp.canon)
        assert abs(matrices / ((12 - mixer_size) * d_model**2) - 1) < 0.01
        if mixer_size == 6 and mlp.startswith("swiglu"):
            assert block.mlp.up.weight.shape[0] == 4 * d_model  # gate and up, 2 d each


def test_gates_start_as_their_authors_have_them():
    mamba = Block(Config(vocab_size=9, block_size=9, mixer="mamba2"), "mamba2").mixer
    torch.testing.assert_close(mamba.A_log.exp(), torch.arange(1.0, 17))
    assert (mamba.skip == 1).all() and mamba.dt_bias.shape == (16,)
    draws = F.softplus(initial_dt_bias(20_000))
    assert 0.001 <= draws.min() < 0.00101 and 0.099 < draws.max() <= 0.1001
    assert abs(draws.log().mean() - math.log(0.01)) < 0.05  # log-uniform
    gdn = [Block(Config(vocab_size=9, block_size=9, mixer="gdn"), "gdn").mixer for _ in range(20)]
    A = torch.cat([mixer.A_log.exp() for mixer in gdn])
    assert A.numel() == 120 and 0 <= A.min() and 14 < A.max() <= 16 and abs(A.mean() - 8) < 2
    gla = CanonGPT(Config(vocab_size=9, block_size=9, n_layer=1, mixer="gla")).blocks[0].mixer
    low, high = gla.decay
    assert low.bias is None and (high.bias == 0).all() and high.weight.shape == (384, 16)
    model = CanonGPT(Config(vocab_size=9, block_size=9, n_layer=2, mixer="mamba2,gdn", d_model=128, n_head=2))
    training = dict(lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.5)
    decayed = {id(p) for p in train.make_optimizer(model, training, "cpu").param_groups[0]["params"]}
    for mixer in (block.mixer for block in model.blocks):
        gates = [mixer.A_log, mixer.dt_bias, mixer.conv.weight] + ([mixer.skip] if isinstance(mixer, Mamba2) else [])
        assert not decayed & {id(p) for p in gates}


def test_patterns_repeat_over_the_layers():
    kinds = [type(block.mixer) for block in small_model(mixer="gdn,gdn,attention", n_layer=5).blocks]
    assert kinds == [GatedDeltaNet, GatedDeltaNet, Attention, GatedDeltaNet, GatedDeltaNet]


def test_linear_mixers_stream_in_constant_memory():
    """A generated token is one token of work: what a stream keeps in memory does not grow, but for attention's keys and values."""

    def kept(state):
        tensors = [u for value in state.values() for u in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(u)]
        return sum(u.untyped_storage().nbytes() for u in tensors)

    for mixer in (*LINEAR, "gdn,attention"):
        model, state, sizes = small_model(mixer=mixer, canon="acd", block_size=400), {}, []
        for T in (300, 1, 1, 5):
            model(torch.randint(0, 19, (1, T)), state=state)
            sizes.append(kept(state))
        grows = 4 * 2 * 32 if "attention" in mixer else 0  # a key and a value of 32 floats
        changes = [b - a for a, b in zip(sizes, sizes[1:])]
        assert changes[1:] == [grows, 5 * grows]
        assert changes[0] == 0 or "attention" in mixer  # attention lets go of the first piece's queries here


BAD_CONFIGS = (
    (dict(mixer="conv"), "mixer"), (dict(pos="rotary"), "pos"), (dict(mlp="gelu"), "mlp"), (dict(canon="abe"), "canon"),
    (dict(canon="aa"), "canon"), (dict(canon_frozen=True), "canon_frozen"), (dict(canon_kernel=2), "canon_kernel"),
    (dict(canon_kernel=1), "canon_kernel"), (dict(canon_kernel=5), "canon_kernel"),
    (dict(d_model=30), "d_model"), (dict(d_model=20), "d_model"), (dict(d_model=16, pos="rope4"), "d_model"),
    (dict(n_layer=0), "n_layer"), (dict(n_head=-4), "n_head"), (dict(vocab_size=0), "vocab_size"), (dict(block_size=0), "block_size"),
    (dict(mixer="gdn,mamba"), "mixer"), (dict(mixer=""), "mixer"), (dict(mixer="gdn,gdn,attention"), "mixer"),
    (dict(short_conv=True), "short_conv"), (dict(pos="alibi", mixer="gla"), "pos"), (dict(pos="rope4", mixer="gdn"), "pos"),
    (dict(d_model=36, mixer="gla"), "d_model"), (dict(d_model=36, mixer="mamba2"), "d_model"), (dict(d_model=36, mixer="gdn"), "d_model"),
    (dict(canon="abc", mlp="none"), "canon"),
    (dict(init_std=0.0), "init_std"), (dict(init_std=-0.1), "init_std"), (dict(init_std=math.nan), "init_std"), (dict(init_std=math.inf), "init_std"),
)  # fmt: skip


@pytest.mark.parametrize("options, field", BAD_CONFIGS, ids=str)
def test_config_names_field_and_value(options, field):
    with pytest.raises(ValueError, match=f"^{field} = {next(iter(options.values()))!r}: "):
        Config(**dict(vocab_size=19, block_size=24, n_layer=2, n_head=4, d_model=32) | options)


# ------------------------------------------------------------------------------------------------------------
# 3. tasks.py
# ------------------------------------------------------------------------------------------------------------

DEPOS = (
    ("depo1", {}), ("depo2", {}), ("depo1", dict(N=24, K=5, block_size=300)), ("depo1", dict(V=2, word_len=(2, 3), N=12, block_size=260)),
    ("depo2", dict(N=12, K=4, block_size=400)),
)  # fmt: skip


def chi_square_fits(counts, probabilities):
    """Whether counts look drawn from the probabilities: Pearson's statistic within 5 of its standard deviations."""
    expected = np.asarray(probabilities) * np.sum(counts)
    assert expected.min() >= 5
    statistic = ((np.asarray(counts) - expected) ** 2 / expected).sum()
    free = len(expected) - 1
    return statistic < free + 5 * (2 * free) ** 0.5


def windows(task):
    """A batch of 200, of the promised form."""
    tokens, mask = task.batch(seed=3, step=5, batch_size=200)
    assert tokens.shape == mask.shape == (200, task.block_size + 1)
    assert tokens.dtype == np.int64 and mask.dtype == bool
    assert tokens.min() >= 1 and tokens.max() < task.vocab_size
    return tokens, mask


def parse_depo(task, tokens, mask):
    """Read a window token by token. Returns its instances as (edges, queries, complete), each query being
    (k, q, answer); checks the form of words and the mask on the way. Words are tuples of tokens."""
    V, bos, ans = task.V, 2 * task.V + 1, 2 * task.V + 2
    position = 0

    class End(Exception):
        pass

    def take(target):
        nonlocal position
        if position == len(tokens):
            raise End
        assert bool(mask[position]) == target, f"mask at {position}"
        position += 1
        return int(tokens[position - 1])

    def word(target):
        out = []
        while not out or out[-1] <= V:
            out.append(take(target))
            assert 1 <= out[-1] <= 2 * V
        assert task.word_len[0] <= len(out) <= task.word_len[1]
        return tuple(out)

    instances = []
    try:
        assert tokens[0] == bos  # left-aligned
        while True:
            assert take(False) == bos
            edges, queries = [], []
            instances.append([edges, queries, False])
            if position == len(tokens):
                raise End
            while tokens[position] <= 2 * V:
                edges.append((word(False), word(False)))
                if position == len(tokens):
                    raise End
            while tokens[position] > ans:
                k = take(False) - ans
                q = word(False)
                assert take(True) == ans
                queries.append((k, q, word(True)))
                instances[-1][2] = len(queries) == min(10, len(edges))
                if position == len(tokens):
                    raise End
            assert instances[-1][2]
    except End:
        return instances


def check_depo_instance(task, edges, queries):
    n = len(edges)
    successor = dict(edges)
    assert 3 <= n <= task.N
    assert len(successor) == n and set(successor) == set(successor.values())  # distinct words, one in and one out
    node, seen = edges[0][0], set()
    while node not in seen:
        seen.add(node)
        node = successor[node]
    assert len(seen) == n  # one cycle
    assert len({q for _, q, _ in queries}) == len(queries) <= min(10, n)
    for k, q, answer in queries:
        assert 1 <= k <= task.K
        for _ in range(k):
            q = successor[q]
        assert answer == q


@pytest.mark.parametrize("name, options", DEPOS, ids=str)
def test_depo_by_an_independent_checker(name, options):
    task = make_task(name, "nano", **options)
    tokens, mask = windows(task)
    complete = 0
    for window in zip(tokens, mask):
        instances = parse_depo(task, *window)
        assert instances[0][2]  # the longest instance fits, and the first is never cut off
        for edges, queries, whole in instances:
            if whole or queries:
                check_depo_instance(task, edges, queries)
                complete += whole
    assert complete >= 200


def test_depo_sizes_follow_their_formula():
    N = 9
    task = make_task("depo1", "nano", N=N, K=3, block_size=2000)  # long windows: hardly any instance is cut off
    sizes, hops = Counter(), Counter()
    for step in range(3):
        for window in zip(*task.batch(0, step, 40)):
            # the windows hold some 40 instances; without the last few, which the end is likelier to cut if they are long
            for edges, queries, whole in parse_depo(task, *window)[:-5]:
                sizes[len(edges)] += 1
                hops.update(k for k, _, _ in queries)
    weights = np.array([1 / (n + N**0.5) for n in range(3, N + 1)])
    assert chi_square_fits([sizes[n] for n in range(3, N + 1)], weights / weights.sum())
    assert chi_square_fits([hops[k] for k in (1, 2, 3)], [1 / 3] * 3)


def test_depo_order_is_random():
    """Edges and questions in uniform order: the first edge's end starts the second or the third edge equally often, and
    its start is asked about first, second or third."""
    task = make_task("depo1", "nano", N=3, K=1, block_size=60)
    next_edge, asked, forms = Counter(), Counter(), Counter()
    for window in zip(*task.batch(0, 0, 3000)):
        edges, queries, _ = parse_depo(task, *window)[0]
        starts = [a for a, _ in edges]
        next_edge[starts.index(edges[0][1])] += 1
        asked[[q for _, q, _ in queries].index(edges[0][0])] += 1
        forms[tuple(len(a) for a in starts)] += 1
    assert chi_square_fits([next_edge[i] for i in (1, 2)], [1 / 2] * 2)
    assert chi_square_fits([asked[i] for i in (0, 1, 2)], [1 / 3] * 3)
    # one- and two-token words are equally likely at every place (V = 50: that a word repeats is rare, but counts)
    assert abs(sum(f.count(1) * c for f, c in forms.items()) / 9000 - 0.5) < 0.03


def test_words_come_as_if_drawn_one_by_one():
    """Two words over V = 1, lengths 1-3, where there is one word of each length: every ordered pair is equally likely.
    Two words over V = 2, lengths 1-2, where there are 2 + 4 words: by hand."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6000), 2)
    words = tasks.draw_words(rng, owner, 1, (1, 3)).reshape(6000, 2, 3)
    lengths = (words > 0).sum(2)
    pairs = Counter(map(tuple, lengths.tolist()))
    assert chi_square_fits([pairs[p] for p in ((1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2))], [1 / 6] * 6)

    words = tasks.draw_words(rng, owner, 2, (1, 2)).reshape(6000, 2, 2)
    ones = Counter(((words > 0).sum(2) == 1).sum(1).tolist())
    # each one-token word has probability 1/4, each two-token word 1/8, and the second word differs from the first
    both = 1 / 2 * (1 / 4) / (3 / 4)
    none = 1 / 2 * (3 / 8) / (7 / 8)
    assert chi_square_fits([ones[2], ones[1], ones[0]], [both, 1 - both - none, none])
    assert len({tuple(w) for w in words.reshape(-1, 2).tolist()}) == 6


def test_copy_instances():
    task = make_task("copy", "nano", N=7, block_size=40)
    tokens, mask = task.batch(0, 0, 300)
    assert tokens.shape == (300, 41) and tokens.max() < task.vocab_size
    for row, targets in zip(tokens.tolist(), mask.tolist()):
        for start in (0, 16):
            assert row[start] == task.bos and row[start + 8] == task.query
            assert sorted(row[start + 1 : start + 8]) == list(range(1, 8))
            assert row[start + 9 : start + 16] == row[start + 1 : start + 8]
            assert targets[start : start + 16] == [False] * 9 + [True] * 7
        assert row[32] == task.bos  # the third is cut off at the window's end
    firsts = Counter(tokens[:, 1].tolist())
    assert chi_square_fits([firsts[i] for i in range(1, 8)], [1 / 7] * 7)


@pytest.mark.parametrize("name", tasks.PRESETS)
def test_batches_are_pure(name):
    task, again = make_task(name), make_task(name)
    same = [t.batch(1, 7, 16) for t in (task, again, task)]
    for other in same[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(same[0], other))
    for arguments in ((1, 8, 16), (2, 7, 16), (7, 1, 16)):
        assert not np.array_equal(same[0][0], task.batch(*arguments)[0])
    windows = {row.tobytes() for step in range(20) for row in task.batch(0, step, 16)[0]}
    assert len(windows) == 320


@pytest.mark.parametrize("name", tasks.PRESETS)
def test_presets_make_sense(name):
    for preset in ("nano", "small", "paper"):
        task = make_task(name, preset)
        Config(vocab_size=task.vocab_size, block_size=task.block_size, pos="rope4", **task.model)  # raises if it can't be
        assert task.batch(0, 0, 2)[1].any(axis=1).all()
        if name.startswith("depo"):
            assert task.N > 2 * task.K


class Fake(torch.nn.Module):
    """A model of the methods given, as evaluations use it: they look at its parameters for the device."""

    def __init__(self, **methods):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.__dict__.update(methods)


@pytest.mark.parametrize("name", ("copy", "depo1", "brevo1", "mano"))
def test_evaluation_is_repeatable_and_on_fresh_data(name):
    task = make_task(name)
    seen = {"first": [], "again": [], "other": []}

    def forward(tokens):
        asked.extend(row.tobytes() for row in tokens[:, :20].numpy())
        return torch.zeros(*tokens.shape, task.vocab_size), None

    def generate(tokens, max_new_tokens, temperature, stop, lengths):
        forward(tokens)
        return F.pad(tokens, (0, max_new_tokens), value=stop)

    for (_, asked), seed in zip(seen.items(), (0, 0, 1)):
        task.evaluate(Fake(forward=forward, generate=generate), seed, 30)
    assert seen["first"] == seen["again"] != seen["other"]
    # Mano's short expressions are few: its longest are what can be fresh
    asked = set(seen["first"][-30:] if name == "mano" else seen["first"])
    assert len(asked) >= 30 and not asked & {row[:20].tobytes() for step in range(20) for row in task.batch(0, step, 32)[0]}


def depo_oracle(task, wrong):
    """Answers Depo by parsing its input, or is wrong wherever `wrong(k)` says so."""

    def forward(tokens):
        logits = torch.zeros(*tokens.shape, task.vocab_size)
        for b, row in enumerate(tokens.tolist()):
            words, spans, k = [], [], None
            current = []
            for i, token in enumerate(row):
                if 1 <= token <= 2 * task.V:
                    current.append(token)
                    if token > task.V:
                        words.append(tuple(current))
                        current = []
                elif token > task.ans:
                    if k is None:
                        successor = dict(zip(words[::2], words[1::2]))
                    k = token - task.ans
                elif token == task.ans:
                    answer = words[-1]
                    for _ in range(k):
                        answer = successor[answer]
                    spans.append((i, answer, k))
            for i, answer, k in spans:
                for j, token in enumerate(answer):
                    if i + j < tokens.shape[1]:
                        last = j == len(answer) - 1
                        logits[b, i + j, 0 if wrong(k) and last else token] = 1
        return logits, None

    return Fake(forward=forward)


@pytest.mark.parametrize("name, options", (("depo1", dict(N=13, K=6, block_size=200)), ("depo2", {})), ids=str)
def test_depo_scores_an_oracle(name, options):
    task = make_task(name, "nano", **options)
    assert task.evaluate(depo_oracle(task, lambda k: False), 0, 50) == {f"k={k}": 1.0 for k in task.hops}
    only = task.evaluate(depo_oracle(task, lambda k: k == 2), 0, 50)  # one wrong token, the last, spoils an answer
    assert only == {f"k={k}": float(k != 2) for k in task.hops}
    if name == "depo1":
        assert task.hops == [1, 2, 4, 6]


def test_copy_scores():
    task = make_task("copy", "nano", N=10, block_size=30)

    def forward(tokens):
        ten_back = F.pad(tokens, (10, 0))[:, : tokens.shape[1]]  # <query> is followed by what followed <bos>
        logits = F.one_hot(ten_back, task.vocab_size).float()
        logits[1::2, -1] = F.one_hot(torch.tensor(task.bos), task.vocab_size).float()  # every other row's last
        return logits, None

    assert task.evaluate(Fake(forward=forward), 0, 40) == {"sequences": 0.5, "tokens": pytest.approx(0.95)}


# ---- Brevo


def read_brevo(task, row):
    """A window, read token by token: the edges and answer of its first instance, as words, and which of its tokens should be targets."""
    several = task.word_len[1] > 1

    def word(at):
        end = at + 1
        while several and row[end - 1] <= task.V:
            end += 1
        assert task.word_len[0] <= end - at <= task.word_len[1]
        assert all(1 <= token <= task.V for token in row[at : end - several])
        assert not several or task.V < row[end - 1] <= 2 * task.V
        return tuple(row[at:end]), end

    assert row[0] == task.bos
    at, named, answer = 1, [], []
    while row[at] != task.query:
        found, at = word(at)
        named.append(found)
    q, at = word(at + 1)
    assert row[at] == task.ans
    targets = at
    at += 1
    while row[at] != task.eos:
        found, at = word(at)
        answer.append(found)
    return list(zip(named[::2], named[1::2])), q, answer, [False] * targets + [True] * (at + 1 - targets)


BREVOS = (("brevo1", {}), ("brevo2", {}), ("brevo1", dict(N=30, block_size=300)), ("brevo2", dict(N=14, V=3, word_len=(1, 3), block_size=300)))  # fmt: skip


@pytest.mark.parametrize("name, options", BREVOS, ids=str)
def test_brevo_by_an_independent_checker(name, options):
    task = make_task(name, "nano", **options)
    tokens, mask = windows(task)
    for row, targets in zip(tokens.tolist(), mask.tolist()):
        edges, q, answer, expected = read_brevo(task, row)
        assert targets[: len(expected)] == expected
        assert len(set(edges)) == len(edges)
        parents, children = defaultdict(set), defaultdict(set)
        for a, b in edges:
            parents[b].add(a)
            children[a].add(b)
        assert max(map(len, parents.values())) <= 4 and max(map(len, children.values())) <= 4
        assert len(parents) <= task.N - 1 and len(set(parents) | set(children)) <= task.N
        below = lambda node: set().union(*({a} | below(a) for a in parents[node]))  # noqa: E731 - also ends only if there is no cycle
        assert set(answer) == below(q) | {q} and len(answer) == len(set(answer)) and parents[q]
        for i, node in enumerate(answer):
            assert parents[node] <= set(answer[:i])


def test_brevo_graphs_follow_their_distribution():
    rng, n, many = np.random.default_rng(0), 13, 6000
    of, parent, child, edge, leaves = tasks.draw_graphs(rng, np.full(many, n))
    assert np.array_equal(np.argwhere(edge), np.unique(np.stack([of, parent, child], 1), axis=0)) and edge.sum() == len(of)
    assert chi_square_fits(np.bincount(leaves)[1:], [1 / 4] * 4)  # 1 .. (13 - 1) // 4 + 1
    degree = edge.sum(1)
    assert np.array_equal(degree > 0, np.arange(n) >= leaves[:, None])
    assert edge.sum(2).max() == 4 and not edge[(slice(None), *np.tril_indices(n))].any()
    four = leaves == 4  # node 4 can choose among four leaves, freely: 1 .. 4 of them, any as likely as the others
    assert chi_square_fits(np.bincount(degree[four, 4])[1:], [1 / 4] * 4)
    sets = Counter(map(bytes, edge[four][:, :4, 4]))
    chances = {bytes(s): 1 / 4 / math.comb(4, sum(s)) for s in itertools.product((0, 1), repeat=4) if any(s)}
    assert chi_square_fits([sets[s] for s in chances], list(chances.values()))
    first = np.flatnonzero(np.diff(of, prepend=-1))  # edges come in random order: the second before the first half of the time
    before = child[first] * n + parent[first] < child[first + 1] * n + parent[first + 1]
    assert chi_square_fits(np.bincount(before), [1 / 2] * 2)


def test_brevo_orders_are_drawn_step_by_step():
    """2 needs 0; 3 needs 0 and 1; 4 needs all. Of the nodes that are ready, each is as likely as the others."""
    edge = np.zeros((5000, 6, 6), dtype=bool)
    edge[:, [0, 0, 1, 2, 3, 4], [2, 3, 3, 4, 4, 5]] = True
    need = tasks.dependencies(edge, np.full(5000, 4))
    assert need.all(0).tolist() == [True] * 5 + [False]
    orders = Counter(map(tuple, tasks.random_order(np.random.default_rng(0), edge, need).tolist()))
    chances = {(0, 1, 2, 3, 4): 1 / 8, (0, 1, 3, 2, 4): 1 / 8, (0, 2, 1, 3, 4): 1 / 4, (1, 0, 2, 3, 4): 1 / 4, (1, 0, 3, 2, 4): 1 / 4}
    assert set(orders) == set(chances) and chi_square_fits([orders[o] for o in chances], list(chances.values()))
    assert tasks.distance_to_leaf(edge)[0].tolist() == [0, 0, 1, 1, 2, 3]


def test_brevo_asks_for_the_last_quarter():
    task = make_task("brevo1", "nano")
    *_, edge, q = task.instances(np.random.default_rng(0), np.full(4000, 10))
    parented = edge.any(1).sum(1)  # those with parents, which come last: 7, 8 or 9
    for count in (7, 8, 9):
        last = -(-count // 4)
        asked = Counter((9 - q[parented == count]).tolist())
        assert set(asked) == set(range(last)) and chi_square_fits(list(asked.values()), [1 / last] * last)


@pytest.mark.parametrize("name", ("brevo1", "brevo2"))
def test_brevo_names_tell_nothing(name):
    """The asked node's name is as likely as any, and so is its parents'."""
    task = make_task(name, "nano", **(dict(V=2, word_len=(2, 2), N=4) if name == "brevo2" else dict(N=6)))
    asked, parents = Counter(), Counter()
    for row in task.batch(0, 0, 4000)[0].tolist():
        edges, q, _, _ = read_brevo(task, row)
        asked[q] += 1
        parents.update({a for a, b in edges[:1]})
    kinds = 6 if name == "brevo1" else 4
    assert len(asked) == len(parents) == kinds
    assert chi_square_fits(list(asked.values()), [1 / kinds] * kinds) and chi_square_fits(list(parents.values()), [1 / kinds] * kinds)


def brevo_oracle(task, asked, errs=False):
    """Answers by a rule of its own: parents first, larger names first; with errs, a node less where q is odd. Notes in `asked` whether it is."""

    def generate(tokens, max_new_tokens, temperature, stop, lengths):
        assert temperature == 0 and stop == task.eos
        rows = torch.full((len(tokens), tokens.shape[1] + max_new_tokens), stop)
        for row, given, length in zip(rows, tokens.tolist(), lengths.tolist()):
            row[:length] = torch.tensor(given[:length])
            edges, q, _, _ = read_brevo(task, given[:length] + [task.eos])
            parents = defaultdict(list)
            for a, b in edges:
                parents[b].append(a)
            answer = []

            def tell(node):
                for parent in sorted(parents[node], reverse=True):
                    tell(parent)
                if node not in answer:
                    answer.append(node)

            tell(q)
            asked.append(q[-1] % 2)
            text = [*itertools.chain(*answer[errs and q[-1] % 2 :]), stop]
            row[length : length + len(text)] = torch.tensor(text)
        return rows

    return Fake(generate=generate)


def test_brevo_leaves_out_what_does_not_fit():
    task = make_task("brevo2", "nano", N=3, V=2, word_len=(1, 12), block_size=68)
    _, _, lengths, *_ = task.instances(np.random.default_rng([0, tasks.EVAL]), np.full(60, 3))
    asked = []
    assert task.evaluate(brevo_oracle(task, asked), 0, 60)["all"] == 1.0
    assert len(asked) == (lengths <= 69).sum() < 60


@pytest.mark.parametrize("name", ("brevo1", "brevo2"))
def test_brevo_accepts_exactly_the_valid_orders(name):
    task = make_task(name, "nano")
    checked = Counter()
    for row in task.batch(0, 0, 40)[0].tolist():
        edges, q, answer, mask = read_brevo(task, row)
        prompt = row[: mask.index(True) + 1]
        spell = lambda words: [*itertools.chain(*words), task.eos]  # noqa: E731
        assert task.verify(prompt, spell(answer)) and task.verify(prompt, spell(answer) + [task.eos, 1])
        if len(answer) > 5:
            continue
        for order in itertools.permutations(answer):
            valid = all(order.index(a) < order.index(b) for a, b in edges if a in order and b in order)
            assert task.verify(prompt, spell(order)) == valid
            checked[valid] += 1
        others = {word for edge in edges for word in edge} - set(answer)
        for wrong in ([], answer[1:], answer[:-1], [answer[0], *answer], *([other, *answer] for other in others)):
            assert not task.verify(prompt, spell(wrong))
        assert not task.verify(prompt, spell(answer)[:-1])  # no end
        assert not task.verify(prompt, [*spell(answer)[:-1], task.query, task.eos])
        assert not task.verify(prompt, [*spell(answer)[:-1], 1, task.eos])  # for brevo2: a word that does not end
    assert min(checked.values()) > 20


@pytest.mark.parametrize("name", ("brevo1", "brevo2"))
def test_brevo_scores_an_oracle(name):
    task, asked = make_task(name, "nano"), []
    scores = task.evaluate(brevo_oracle(task, asked), 0, 100)
    assert set(scores.values()) == {1.0} and list(scores)[:3] == ["all", "depth=1", "depth=2"]
    asked.clear()
    assert task.evaluate(brevo_oracle(task, asked, errs=True), 0, 100)["all"] == pytest.approx(1 - np.mean(asked))


# ---- Mano


def test_mano_by_an_independent_checker():
    task = make_task("mano", "nano", L=6, block_size=400)
    tokens, mask = task.batch(3, 5, 100)
    assert mask.all() and tokens.min() >= 1 and tokens.max() < task.vocab_size
    lengths, operators, numbers, splits = Counter(), Counter(), Counter(), Counter()

    def value(text):  # eats an expression from the front
        head = next(text)
        if head.isdigit():
            numbers[int(head)] += 1
            return int(head), 0
        operators[head] += 1
        a, left = value(text)
        b, right = value(text)
        if left + right == 3:
            splits[left] += 1
        return {"+": a + b, "-": a - b, "*": a * b}[head] % 23, left + right + 1

    for row in tokens:
        text = " ".join(task.vocabulary[token] for token in row)
        assert text.startswith("<bos>")
        for instance in text.split("<bos>")[1:-1]:
            head, *expression, ans, result = instance.split()
            rest = iter(expression)
            found, count = value(rest)
            assert next(rest, None) is None and ans == "<ans>" and int(result) == found and head == f"<len_{count}>"
            lengths[count] += 1
    # the windows hold some 30 instances; that their ends cut long ones off more often hardly shows
    assert chi_square_fits([operators[o] for o in "+-*"], [1 / 3] * 3)
    assert chi_square_fits([numbers[x] for x in range(23)], [1 / 23] * 23)
    assert chi_square_fits([splits[i] for i in range(4)], [1 / 4] * 4)
    assert set(lengths) == set(range(1, 7))
    l = np.random.default_rng(0)
    _, sizes, documents = task.documents(l, 6000)
    assert chi_square_fits(np.bincount((documents - 5) // 2)[1:], [1 / 6] * 6)


def test_mano_scores():
    task = make_task("mano", "nano", L=3)

    def forward(tokens):
        """Knows the values of two-operator expressions, and that a value is no <ans>."""
        logits = torch.zeros(*tokens.shape, task.vocab_size)
        for b, row in enumerate(tokens.tolist()):
            if task.vocabulary[row[1]] == "<len_2>":
                stack = []
                for token in reversed(row[2:7]):
                    word = task.vocabulary[token]
                    stack.append(int(word) if word.isdigit() else eval(f"{stack.pop()} {word} {stack.pop()}") % 23)
                logits[b, 7, 1 + stack[0]] = 1
            else:
                logits[b, :, task.ans] = 1
        return logits, None

    assert task.evaluate(Fake(forward=forward), 0, 100) == {"l=1": 0.0, "l=2": 1.0, "l=3": 0.0}


# ---- Lano


def test_grammars_are_levelled():
    for text in tasks.GRAMMARS.values():
        grammar = tasks.Grammar(text)
        assert {len(rule) for rules in grammar.rules.values() for rule in rules} == {2, 3}
        for symbol, rules in grammar.rules.items():
            level = (symbol - 7) // 3  # 7, 8, 9 are parents of the tokens 1, 2, 3
            below = {1, 2, 3} if level == 0 else set(range(4 + 3 * level, 7 + 3 * level))
            assert len(rules) in (3, 4) and len(set(rules)) == len(rules) and all(set(rule) <= below for rule in rules)
        assert set(grammar.rules) == set(range(7, grammar.root + 1))  # nothing is idle


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


@pytest.mark.parametrize("cfg, root", (("cfg3f", 10), ("cfg3f", 11), ("cfg3j", 12), ("cfg3k", 12)))
def test_lano_chart_equals_enumeration(cfg, root):
    grammar, rng = tasks.Grammar(tasks.GRAMMARS[cfg], root), np.random.default_rng(0)
    language = all_yields(grammar, root)
    assert sum(language.values()) == pytest.approx(1) and max(map(len, language)) == grammar.longest[root]
    assert sum(len(text) * p for text, p in language.items()) == pytest.approx(grammar.mean[root])
    prefixes = defaultdict(float)
    for text, p in language.items():
        for t in range(len(text) + 1):
            prefixes[text[:t]] += p
    sentences = sorted(language)
    texts = [sentences[i] for i in rng.integers(0, len(sentences), 12)]
    for text in texts[:4]:  # and all their corruptions by one token
        texts += [text[:i] + (new,) + text[i + 1 :] for i in range(len(text)) for new in (1, 2, 3) if new != text[i]]
        texts += [text[:-1], text + (1,), ()]
    T = max(map(len, texts)) + 1
    rows = torch.tensor([[*text] + [0] * (T - len(text)) for text in texts])
    chart = grammar.chart(rows, c=1.7)
    right = 0
    for text, table in zip(texts, chart):
        right += text in language
        for t in range(len(text) + 1):
            expected = [language.get(text[:t], 0), *(prefixes.get(text[:t] + (v,), 0) for v in (1, 2, 3))]
            assert table[t].tolist() == pytest.approx([1.7**t * p for p in expected], rel=1e-12, abs=1e-300)
    assert 12 <= right < len(texts)


@pytest.mark.parametrize("cfg, most", (("cfg3f", 350), ("cfg3j", 1000), ("cfg3k", 800)))
def test_lano_long_sentences_neither_underflow_nor_lose_probability(cfg, most):
    """What may follow a prefix adds up to the prefix's own probability."""
    grammar = tasks.Grammar(tasks.GRAMMARS[cfg])
    text, lengths = grammar.sample(np.random.default_rng(1), 4000)
    starts = np.cumsum(lengths) - lengths
    longest = max((i for i in range(4000) if lengths[i] <= most), key=lambda i: lengths[i])
    row = torch.from_numpy(text[starts[longest] :][: lengths[longest]])[None]
    chart = grammar.chart(row)[0]
    assert len(row[0]) > 0.9 * most and 1e-100 < chart.max() < 1e100 and chart[-1, 0] > 0
    here = chart[torch.arange(len(row[0])), row[0]]
    torch.testing.assert_close(chart[1:].sum(1), 2.1 * here, rtol=1e-10, atol=0)
    assert chart[0].sum() == pytest.approx(1)


def test_band_products():
    generator = torch.Generator().manual_seed(0)
    for T, first, second, rows in ((9, 2, 3, 4), (20, 0, 5, 3), (17, 30, 4, 64), (33, 8, 40, 8)):
        make = lambda width: torch.randn(2, T, T, generator=generator).triu().tril(width)  # noqa: E731
        a, b = make(first), make(second)
        torch.testing.assert_close(tasks.band_product(a, b, first, second, rows), a @ b)


def test_lano_windows_and_samples():
    task = make_task("lano", "nano", root=12, block_size=40)
    language = all_yields(task.grammar, 12)
    tokens, mask = task.batch(0, 0, 200)
    assert mask.all() and (tokens[:, 0] == task.bos).all()
    for row in tokens.tolist():
        text = "".join(map(str, row)).split(str(task.bos))[1:-1]
        assert len(text) > 0 and all(tuple(map(int, sentence)) in language for sentence in text)
    # sentences come with their probabilities
    text, lengths = task.grammar.sample(np.random.default_rng(0), 5000)
    counts = Counter(map(tuple, np.split(text, np.cumsum(lengths)[:-1])))
    assert set(counts) == set(language) and chi_square_fits([counts[u] for u in language], list(language.values()))


def test_lano_scores():
    """A model that samples from the grammar itself has KL 0 and only right sentences; one that guesses has the KL of its guess."""
    task = make_task("lano", "nano", root=10, block_size=20)

    def forward(tokens, state=None, guess=False):
        if state is not None:
            state["seen"] = tokens = torch.cat([state["seen"], tokens], 1) if "seen" in state else tokens
        chart = task.grammar.chart(tokens[:, 1:])
        exact = torch.full_like(chart, 1 / 4) if guess else chart / chart.sum(-1, keepdim=True)
        logits = torch.full((*tokens.shape, 5), -torch.inf)
        logits[..., [task.bos, 1, 2, 3]] = exact.log().nan_to_num(nan=0.0, neginf=-1e30).float()
        return logits, None

    exact, guess = (Fake(forward=functools.partial(forward, guess=guess), config=Config(vocab_size=5, block_size=20)) for guess in (False, True))
    for model in (exact, guess):
        model.generate = functools.partial(CanonGPT.generate, model)
    assert task.evaluate(exact, 0, 60) == {"sentences": 1.0, "KL": pytest.approx(0, abs=1e-6)}
    language, text, lengths = all_yields(task.grammar, 10), *task.grammar.sample(np.random.default_rng([0, tasks.EVAL]), 60)
    for task.block_size in (20, 4):  # 4: sentences are cut off, and none of the model's own comes to an end
        scores = task.evaluate(guess, 0, 60)
        assert scores["sentences"] == 0 if task.block_size == 4 else scores["sentences"] < 0.2
        nats, at = [], 0
        for length in lengths:
            sentence = tuple(text[at : at + length].tolist())
            at += length
            for t in range(min(length + 1, task.block_size)):
                follow = Counter()
                for other, p in language.items():
                    if other[:t] == sentence[:t]:
                        follow[other[t] if len(other) > t else 4] += p
                total = sum(follow.values())
                nats.append(math.log(4) + sum(p / total * math.log(p / total) for p in follow.values()))
        assert scores["KL"] == pytest.approx(np.mean(nats), rel=1e-5)


def test_lano_charts_of_many_rows():
    task = make_task("lano", "nano", root=10, block_size=20)
    tokens = torch.from_numpy(tasks.padded(*task.grammar.sample(np.random.default_rng(0), 20)))
    width = 600  # so wide that 20 rows are taken a few at a time
    tokens = F.pad(tokens, (0, width - tokens.shape[1]))
    assert 1 < 2**21 // width**2 < 20 and torch.equal(task.charts(tokens)[:, :20], task.grammar.chart(tokens[:, :19]))


# ---- Capo


def test_capo_meets_everybody_once_an_epoch_in_new_words():
    task = make_task("capo", "nano", N=30, exposures=4, block_size=120)
    people = tasks.draw_people(0, 30)
    assert people.shape == (30, 12) and len(np.unique(people[:, :3], axis=0)) == 30
    assert not np.array_equal(people, tasks.draw_people(1, 30))
    name_of = {tuple(person[:3]): i for i, person in enumerate(people.tolist())}
    steps, met, told = task.steps(batch_size=5), [], defaultdict(set)
    assert steps == 8  # 5 windows of 3 biographies of 35 tokens, 4 x 30 wanted
    for step in range(steps):
        tokens, mask = task.batch(0, step, 5)
        assert tokens.shape == (5, 121) and np.array_equal(mask, tokens > 0) and not tokens[:, 105:].any() and tokens[:, :105].all()
        for life in tokens[:, :105].reshape(-1, 35).tolist():
            words = [task.vocabulary[token] for token in life]
            who = name_of[tuple(life[1:4])]
            met.append(who)
            said = [token for token, word in zip(life, words) if not word.startswith("word-")]
            pronoun, facts = people[who, 3], people[who, 4:].tolist()
            expected = [task.bos, *life[1:4], *facts[:3], *itertools.chain(*([pronoun, fact] for fact in facts[3:]))]
            assert said == expected
            assert all(life[at : at + 3] in task.wordings[i].tolist() for i, at in enumerate((4, 11, 16, 21, 26, 31)))
            told[who].add(tuple(life))
    for epoch in range(4):
        assert sorted(met[30 * epoch : 30 * epoch + 30]) == list(range(30))
    assert met[:30] != met[30:60] and all(len(lives) == 4 for lives in told.values())


def test_capo_people_are_drawn_uniformly():
    people, sizes = tasks.draw_people(5, 40_000), [*tasks.PERSON.values()]
    first = 1 + np.cumsum(sizes) - sizes
    for column, size in enumerate(sizes):
        assert chi_square_fits(np.bincount(people[:, column] - first[column], minlength=size), [1 / size] * size)
    assert len(np.unique(people[:, :3], axis=0)) == 40_000  # with replacement, some five names would come twice
    employer, work = people[:, -2], people[:, -1]
    assert len(set(zip(employer, work))) == 263 and set(work) <= set(people[:, 7])
    assert tasks.POSSIBLE_NAMES == 400 * 400 * 1000 and tasks.POSSIBLE_FACTS == 2 * (12 * 28 * 200) * 200 * 300 * 100 * 263


def test_capo_wordings_tell_what_is_asked():
    wordings = make_task("capo").wordings
    assert wordings.shape == (6, 10, 3) and len({tuple(w) for w in wordings.reshape(-1, 3).tolist()}) == 60


@pytest.mark.parametrize("tied", (False, True))
def test_capo_bits(tied):
    """A uniform model knows nothing, one that gives probability 1 to the truth all there is; half the nats of the possible, half of it."""
    task = make_task("capo", "nano", N=50)
    model = CanonGPT(Config(vocab_size=task.vocab_size, block_size=task.block_size, tie_embeddings=tied, n_layer=1, n_head=1, d_model=8))
    used = len(np.unique(tasks.draw_people(0, 50))) + tasks.WORDS + 1
    counted = sum(p.numel() for p in model.blocks.parameters()) + 8 + used * 8 * (2 - tied)
    names, facts = math.log2(tasks.POSSIBLE_NAMES), math.log2(tasks.POSSIBLE_FACTS)

    def scores(nats_of):
        def forward(tokens):
            lives = {tuple(life[1:4]): life for life in expected.tolist()}
            logits = torch.zeros(*tokens.shape, task.vocab_size, dtype=torch.float64)
            for b, row in enumerate(tokens.tolist()):
                life = lives[tuple(row[1:4])]
                for t in range(len(row)):
                    p = math.exp(-nats_of(t + 1))
                    logits[b, t] = math.log((1 - p) / (task.vocab_size - 1) + 1e-300)
                    logits[b, t, life[t + 1]] = math.log(p)
            return logits, None

        rng = np.random.default_rng([0, tasks.EVAL])
        expected = task.biographies(rng, 0, rng.permutation(50)[:20])
        return task.evaluate(Fake(forward=forward, parameter_counts=model.parameter_counts), 0, 20)

    nothing = dict.fromkeys(("names", "facts", "bits", "bits/param"), 0.0)
    assert scores(lambda at: math.log(task.vocab_size)) == nothing
    everything = 50 * (names + facts)
    assert scores(lambda at: 0.0) == pytest.approx({"names": 1, "facts": 1, "bits": everything, "bits/param": everything / counted}, rel=1e-5)
    # ten nats for the last name, one for the month, three for the pronoun, of which only the first is asked
    priced = {3: 10.0, 7: 1.0, 10: 3.0, 15: 5.0}
    columns = [*range(1, 4), *range(7, 10), 10, 14, 19, 24, 29, 34]
    assert sorted(task.told.tolist()) == columns
    expected = 50 * (names - 10 / math.log(2) + facts - 4 / math.log(2))
    assert scores(lambda at: priced.get(at, 0.0))["bits"] == pytest.approx(expected, rel=1e-5)


BAD_TASKS = (
    ("sort", "nano", {}, "task = 'sort'"), ("copy", "huge", {}, "preset = 'huge'"), ("copy", "nano", dict(K=3), "K = 3"),
    ("copy", "nano", dict(N=1), "N = 1"), ("copy", "nano", dict(N=65), "block_size = 129"), ("depo", "nano", dict(N=2), "N = 2"),
    ("depo", "nano", dict(K=0), "K = 0"), ("depo", "nano", dict(V=0), "V = 0"), ("depo", "nano", dict(V=2, word_len=(1, 1)), "N = 5"),
    ("depo", "nano", dict(word_len=(3, 2)), "word_len"), ("depo", "nano", dict(word_len=(0, 2)), "word_len"),
    ("depo", "nano", dict(word_len=(8, 8)), "word_len"), ("depo", "nano", dict(N=60), "block_size = 52"),
    ("depo", "nano", dict(block_size=30), "block_size = 30"), ("brevo", "nano", dict(N=2), "N = 2"), ("brevo", "nano", dict(V=5), "V = 5"),
    ("brevo", "nano", dict(N=30), "block_size = 96"), ("brevo2", "nano", dict(V=1, N=4), "N = 4"), ("brevo2", "nano", dict(V=0), "V = 0"),
    ("mano", "nano", dict(L=0), "L = 0"), ("mano", "nano", dict(L=80), "block_size = 128"), ("mano", "nano", dict(N=4), "N = 4"),
    ("lano", "nano", dict(cfg="cfg4"), "cfg = 'cfg4'"), ("lano", "nano", dict(root=3), "root = 3"), ("lano", "nano", dict(root=23), "root = 23"),
    ("lano", "nano", dict(root=22), "block_size = 128"), ("capo", "nano", dict(N=10**7), "N = 10000000"), ("capo", "nano", dict(N=0), "N = 0"),
    ("capo", "nano", dict(exposures=0), "exposures = 0"), ("capo", "nano", dict(block_size=33), "block_size = 33"),
)  # fmt: skip


@pytest.mark.parametrize("name", [*tasks.PRESETS, *tasks.ALIASES])
def test_examples_are_printed(name, capsys):
    tasks.main([name])
    title, text, legend = capsys.readouterr().out.split("\n\n")
    task = make_task(name)
    assert title.startswith(task.name) and task.meaning in legend
    words = text.replace("[", " ").replace("]", " ").replace(".", ". ").split()
    assert set(words) <= set(task.vocabulary) and words[0] == "<bos>"
    targets = re.findall(r"\[(.*?)\]", text, re.DOTALL)
    assert targets and text.count("[") == text.count("]") == len(targets)


def test_example_of_nothing_known():
    failed = subprocess.run([sys.executable, HERE / "tasks.py", "sort"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "'sort'" in failed.stderr and not failed.stdout
    shown = subprocess.run([sys.executable, HERE / "tasks.py", "copy"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("copy: N = 64")


@pytest.mark.parametrize("name, preset, options, message", BAD_TASKS, ids=str)
def test_bad_tasks_are_refused(name, preset, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_task(name, preset, **options)


# ------------------------------------------------------------------------------------------------------------
# 4. train.py and plot.py
# ------------------------------------------------------------------------------------------------------------

TINY = ["--task", "copy", "--preset", "nano", "--N", "8", "--block-size", "20", "--device", "cpu", "--batch-size", "8",
        "--eval-size", "16", "--warmup", "5", "--workers", "0", "--no-compile"]  # fmt: skip


def run_train(*arguments):
    train.main([*TINY, *map(str, arguments)])


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def wait_for_logs(folder, count=1):
    """The logs below this folder, as soon as so many runs in other processes have begun to log."""
    logs, deadline = [], time.time() + 120
    while len(logs) < count and time.time() < deadline:
        time.sleep(0.1)
        logs = [path for path in folder.rglob("metrics.jsonl") if path.stat().st_size > 0]
    return logs


def test_command_line_end_to_end(tmp_path):
    """As a user types it, in another process: train twice, look at what is left behind, plot."""
    for seed in ("0", "1"):
        command = [sys.executable, str(HERE / "train.py"), *TINY, "--canon", "abcd", "--steps", "60", "--eval-every", "30", "--seed", seed]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "sequences" in done.stdout and "parameters" in done.stdout
    runs = sorted((tmp_path / "out").iterdir())
    assert len(runs) == 2 and runs[0].name.startswith("copy_nano_rope_abcd") and runs[1].name.endswith("s1")
    config = json.loads((runs[0] / "config.json").read_text())
    assert config["model"]["canon"] == "abcd" and config["training"]["steps"] == 60 and config["task"]["N"] == 8
    assert {"torch", "numpy", "python", "device", "command", "date", "parameters", "seed"} <= set(config)
    log = lines(runs[0])
    assert [line["step"] for line in log] == [20, 30, 40, 60, 60]
    assert all({"step", "tokens", "loss", "lr", "tokens_per_s"} <= set(line) for line in log[:-1])
    assert [line["step"] for line in log if "eval" in line] == [30, 60, 60]
    training = config["training"]
    assert all(line["lr"] == train.learning_rate(line["step"] - 1, training) for line in log[:-1])
    assert log[-1]["final"] is True and log[-1]["seconds"] > 0 and log[1]["tokens"] == 30 * 8 * 20
    assert log[-1]["tokens_per_s"] == pytest.approx(8 * 20 * 1e3 / log[-1]["step_ms"], rel=0.01) and 0 < log[-1]["data_share"] < 1
    assert all(cost in done.stdout for cost in ("step_ms", "tokens_per_s", "data_share"))
    for paths in (runs, [tmp_path / "packed.json"]):
        figures = tmp_path / paths[0].stem
        command = [sys.executable, str(HERE / "plot.py"), *map(str, paths), "--out", str(figures), "--save", str(tmp_path / "packed.json")]
        assert subprocess.run(command, timeout=300).returncode == 0
        assert (figures / "copy_nano.png").stat().st_size > 10_000 and (figures / "copy_nano.svg").exists()


def test_the_python_in_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_train("--out", "out/copy_nano_rope_abcd_s0", "--steps", 2, "--canon", "abcd")
    layer, mixer, ask = re.findall(r"^```python\n(.*?)^```$", (HERE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(layer, names)
    x, canon = torch.randn(2, 9, 6), names["Canon"](6)
    assert canon.weight.shape == (4, 6) and canon.weight.abs().max() <= 0.5
    assert torch.equal(canon(x), kernels.causal_conv(x, canon.weight))
    monkeypatch.setitem(MIXERS, "retention", None)
    monkeypatch.setattr(sys, "argv", ["retention.py", *TINY, "--mixer", "retention", "--canon", "abcd", "--steps", "2"])
    exec(mixer, {"__name__": "__main__", "__file__": "retention.py"})
    (run,) = Path("out").glob("*retention*")
    assert plot.table(plot.read_all([run])).count("| retention + Canon-ABCD |") == 1
    capsys.readouterr()
    exec(ask, names)
    assert names["answer"].shape == (1, 8) and re.fullmatch(r"tensor\(.*\)\n", capsys.readouterr().out)


def test_a_mixer_of_ones_own_may_attend(tmp_path, monkeypatch, capsys):
    """An attention keeps positions and n_head; a script of one's own is what a sweep starts, and what config.json names."""
    for name, mixer in (("mine", type("Mine", (Attention,), {})), ("fading", type("Fading", (GLA,), {}))):
        monkeypatch.setitem(MIXERS, name, mixer)
    monkeypatch.chdir(tmp_path)
    train.main([*TINY, "--mixer", "mine", "--pos", "alibi", "--n-head", "4", "--steps", "2"], "own.py")
    (run,) = Path("out").iterdir()
    assert run.name.startswith("copy_nano_mine_alibi_bare_")
    assert json.loads((run / "config.json").read_text())["command"].startswith("python own.py --task copy ")
    assert list(plot.models(plot.read_all([run]))) == ["mine-ALiBi"]
    plain = CanonGPT(Config(vocab_size=9, block_size=9, n_layer=1, d_model=16, n_head=4))
    assert torch.load(run / "ckpt.pt", weights_only=True)["model"].keys() == plain.state_dict().keys()
    with pytest.raises(ValueError, match="whose recurrence knows the order"):
        Config(vocab_size=9, block_size=9, d_model=16, mixer="fading", pos="alibi")
    capsys.readouterr()
    train.main(["--sweep", "depth", "--preset", "nano", "--mixer", "fading", "--dry-run"], "own.py")
    assert all(line.startswith("python own.py --task depo ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("name", tasks.PRESETS)
def test_every_task_trains_scores_resumes_and_is_drawn(name, tmp_path):
    small = {"capo": ["--N", "40", "--exposures", "1"], "mano": ["--L", "2"], "lano": ["--cfg", "cfg3k", "--root", "12"]}.get(name, [])
    command = ["--task", name, "--preset", "nano", *small, "--device", "cpu", "--batch-size", "4", "--eval-size", "8", "--n-layer", "1",
               "--workers", "0", "--no-compile", "--warmup", "0", "--out", str(tmp_path / "run")]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "stop_requests", lambda: contextlib.nullcontext([15]))  # a SIGTERM is already there
        with pytest.raises(SystemExit):
            train.main(command + ["--steps", "3"] * (name != "capo"))
    train.main(command + ["--steps", "3"] * (name != "capo") + ["--resume"])
    last = lines(tmp_path / "run")[-1]
    assert last["final"] and last["step"] == 3 and all(type(score) is float for score in last["eval"].values())
    assert all(0 <= score <= 1 for field, score in last["eval"].items() if field not in tasks.NO_SHARES)
    assert set(tasks.NO_SHARES) & set(last["eval"]) == {"lano": {"KL"}, "capo": {"bits", "bits/param"}}.get(name, set())
    runs = plot.read_all([tmp_path / "run"])
    figure = plot.draw(runs)
    assert [axis.get_title() for axis in figure.axes[: len(figure.axes) // 2]] == [field for field in last["eval"] if field != "bits"]
    if name == "capo":
        last["eval"].update({"bits": 2e4, "bits/param": 0.5})
        runs[0]["evals"][-1]["eval"] = last["eval"]
        axis = plot.draw_capacity(runs).axes[0]
        assert axis.lines[0].get_xydata().tolist() == [[4e4, 2e4]] and len(axis.lines) == 4
        for line, rate in zip(axis.lines[1:], (2, 1, 0.5)):
            assert np.allclose(line.get_ydata(), rate * line.get_xdata())


@pytest.mark.parametrize("mixer", ("attention", "gla", "gdn,attention"))
def test_operations_are_counted_as_pytorch_counts_them(mixer):
    B, T, D = 2, 32, 64
    model = CanonGPT(Config(vocab_size=50, block_size=T, n_layer=2, n_head=2, d_model=D, mixer=mixer, canon="abcd"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(B, T, dtype=torch.int64))
    products = counter.get_flop_counts()["Global"]
    forward = products[torch.ops.aten.mm] + products.get(torch.ops.aten.addmm, 0)  # Linear without and with a bias
    attention = {"attention": 2, "gla": 0, "gdn,attention": 1}[mixer] * 2 * (2 * B * T * T * D)
    if mixer == "attention":
        assert products[torch.ops.aten.bmm] == attention  # for all pairs of tokens
    assert train.flops_per_token(model) * B * T == 3 * (forward + attention // 2)


def test_resume_goes_on_as_if_never_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = ("--steps", 60, "--eval-every", 20, "--canon", "abcd")
    run_train("--out", whole, *steps)

    class Power(Exception):
        pass

    def batch_until(self, seed, step, size, batch=tasks.Task.batch):
        if step == 47:
            raise Power
        return batch(self, seed, step, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.Task, "batch", batch_until)
        with pytest.raises(Power):
            run_train("--out", parts, *steps)
    with open(parts / "metrics.jsonl", "a") as log:
        log.write('{"step": 46, "eval": {"sequences": 0}')  # cut off in the middle of a line
    run_train("--out", parts, *steps, "--resume")
    volatile = ("tokens_per_s", "seconds", "step_ms", "data_share")
    strip = lambda log: [{k: v for k, v in line.items() if k not in volatile} for line in log]  # noqa: E731
    assert strip(lines(parts)) == strip(lines(whole))
    a, b = (torch.load(out / "ckpt.pt", weights_only=True)["model"] for out in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)
    left = (parts / "metrics.jsonl").read_text()
    run_train("--out", parts, *steps, "--resume")  # nothing left to do
    assert (parts / "metrics.jsonl").read_text() == left


def test_workers_and_compile_change_nothing(tmp_path, monkeypatch):
    """Data from other processes, and a model through torch.compile (here without its code generator)."""
    compiled, real = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or real(model, backend="aot_eager"))
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: True)
    for name, more in (("plain", ["--no-compile"]), ("fancy", ["--workers", 2, "--compile"])):
        run_train("--out", tmp_path / name, "--steps", 40, "--canon", "abcd", *more)
    assert len(compiled) == 1
    by_default = [argument for argument in TINY if argument != "--no-compile"]
    for there in (True, False):  # on the CPU it is the default where it can work
        monkeypatch.setattr(train, "can_compile_on_cpu", lambda there=there: there)
        train.main([*by_default, "--steps", "2", "--out", str(tmp_path / str(there))])
    assert len(compiled) == 2
    a, b = (lines(tmp_path / name) for name in ("plain", "fancy"))
    assert [line["loss"] for line in a[:-1]] == pytest.approx([line["loss"] for line in b[:-1]], abs=1e-3)


@pytest.mark.parametrize("processes", (1, 2))
def test_a_second_signal_ends_at_once_but_under_torchrun(processes, monkeypatch):
    """There a process may get the same signal twice: from a batch system, and from torchrun, which passes on its own."""
    monkeypatch.setattr(train, "WORLD", processes)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
    try:
        with train.stop_requests() as stop:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt) if processes == 1 else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop == [signal.SIGINT] * processes


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_saves(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, str(HERE / "train.py"), *TINY, "--steps", "1000000", "--eval-every", "500000", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    wait_for_logs(out)
    process.send_signal(signal.SIGINT)
    assert "--resume" in process.communicate(timeout=120)[1].splitlines()[-1]
    assert process.returncode == 130
    saved = torch.load(out / "ckpt.pt", weights_only=True)
    assert saved["step"] == lines(out)[-1]["step"] >= 20


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    """And keeps the checkpoint from before."""
    out = tmp_path / "run"
    loss = CanonGPT.forward

    def diverge(self, tokens, targets=None, *rest, **more):
        logits, nats = loss(self, tokens, targets, *rest, **more)
        if nats is not None:
            diverge.steps += 1
            nats = nats * math.nan if diverge.steps >= 50 else nats
        return logits, nats

    diverge.steps = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CanonGPT, "forward", diverge)
        with pytest.raises(SystemExit, match="1"):
            run_train("--out", out, "--steps", 100, "--eval-every", 20)
    assert re.search("step 60: loss nan.*ckpt.pt is the last good one", capsys.readouterr().err)
    saved = torch.load(out / "ckpt.pt", weights_only=True)
    assert saved["step"] == 40 and all(w.isfinite().all() for w in saved["model"].values())
    assert lines(out)[-1]["step"] == 40


def test_gradients_are_clipped(tmp_path, monkeypatch):
    """Together to a norm of 1, and only if it is larger."""
    make, before, after = train.make_optimizer, [], []
    norm = lambda model: math.hypot(*(p.grad.norm().item() for p in model.parameters()))  # noqa: E731

    def watched(model, *rest):
        clip, optimizer = torch.nn.utils.clip_grad_norm_, make(model, *rest)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: before.append(norm(model)) or clip(*a, **k))
        optimizer.register_step_pre_hook(lambda *_: after.append(norm(model)))
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", watched)
    run_train("--out", tmp_path / "run", "--steps", 20, "--n-layer", 3, "--d-model", 64)
    assert min(before) < 1 < max(before)
    assert after == pytest.approx([min(1, n) for n in before], rel=1e-4)


def test_learning_rate_schedule():
    cosine = dict(steps=110, warmup=10, lr=2.0, schedule="cosine")
    assert [train.learning_rate(s, cosine) for s in (0, 4, 9, 10)] == [0.2, 1.0, 2.0, 2.0]
    assert train.learning_rate(60, cosine) == pytest.approx(1.1) and train.learning_rate(110, cosine) == pytest.approx(0.2)
    linear = dict(cosine, schedule="linear", warmup=0)
    assert [train.learning_rate(s, linear) for s in (0, 55, 110)] == [2.0, 1.0, 0.0]


def test_data_loader_brings_the_same_batches_from_workers():
    task = make_task("depo")
    stream = train.Stream(task, 5, 4)
    loader = torch.utils.data.DataLoader(stream, batch_size=None, sampler=range(3, 9), num_workers=2)
    for step, (tokens, mask, share) in zip(range(3, 9), loader, strict=True):
        want = task.batch(5, step, 4)
        assert np.array_equal(tokens.numpy(), want[0]) and np.array_equal(mask.numpy(), want[1]) and share == 1


@pytest.mark.skipif(os.name == "nt" or not torch.distributed.is_available(), reason="POSIX signals, torch.distributed")
def test_two_processes_train_as_one_does(tmp_path):
    """By torchrun, on Depo, whose rows have different numbers of targets; and a signal stops both after the same step."""
    command = [str(HERE / "train.py"), "--task", "depo", "--preset", "nano", "--canon", "ac", "--device", "cpu", "--no-compile", "--eval-size", "16",
               "--batch-size", "6"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command]
    for name, program in (("one", [sys.executable, *command]), ("two", torchrun)):
        done = subprocess.run([*program, "--steps", "60", "--out", name], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("results in") == 1
    one, two = (lines(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two] and one[0]["tokens"] == two[0]["tokens"]
    assert [line["loss"] for line in one[:-1]] == pytest.approx([line["loss"] for line in two[:-1]], rel=1e-4)
    assert json.loads((tmp_path / "two" / "config.json").read_text())["processes"] == 2
    process = subprocess.Popen([*torchrun, "--steps", "1000000", "--out", "long"], cwd=tmp_path, stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, text=True)  # fmt: skip
    wait_for_logs(tmp_path / "long")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[1].count("with --resume goes on") == 1
    assert torch.load(tmp_path / "long" / "ckpt.pt", weights_only=True)["step"] == lines(tmp_path / "long")[-1]["step"] >= 20
    done = subprocess.run([*torchrun, "--batch-size", "5", "--out", "odd"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr.count("train.py: batch_size = 5: must be a multiple of the 2 processes") == 1 and not (tmp_path / "odd").exists()


BAD_COMMANDS = (
    ["--task", "sort"], ["--preset", "huge"], ["--mixer", "conv"], ["--pos", "rotary"], ["--mlp", "gelu"], ["--canon", "abx"],
    ["--canon", "aab"], ["--canon-kernel", "5"], ["--canon-kernel", "1"], ["--d-model", "17"], ["--n-head", "3"], ["--n-layer", "0"],
    ["--N", "1"], ["--N", "50"], ["--K", "2"], ["--block-size", "9"], ["--task", "depo", "--N", "2"], ["--steps", "-5"], ["--steps", "0"],
    ["--lr", "-1"], ["--lr", "0"], ["--lr", "nan"], ["--batch-size", "0"], ["--warmup", "-1"], ["--weight-decay", "-0.1"], ["--seed", "-1"],
    ["--workers", "-1"], ["--eval-every", "0"], ["--eval-size", "0"], ["--schedule", "step"], ["--device", "abacus"], ["--resume"],
    ["--dtype", "float16"], ["--init-std", "0"],
    ["--steps", "many"], ["--cannon", "abcd"], ["--mixer", "gdn,conv"], ["--mixer", "gdn,attention"], ["--mixer", "gla", "--pos", "alibi"],
    ["--task", "mano", "--L", "0"], ["--L", "4"], ["--task", "lano", "--cfg", "cfg4"], ["--task", "lano", "--root", "30"], ["--cfg", "cfg3f"],
    ["--task", "capo", "--exposures", "0"], ["--task", "capo", "--exposures", "3"], ["--task", "brevo", "--V", "8"], ["--seed", str(2**63)],
    ["--mixer", "gdn", "--d-model", "20"], ["--short-conv"], ["--mixer", "gla", "--d-model", "16", "--n-head", "4"],
)  # fmt: skip


def assert_refused(call, capsys, *words):
    """Exit status 2 and one line that says what is wrong."""
    with pytest.raises(SystemExit) as stopped:
        call()
    output = capsys.readouterr()
    assert stopped.value.code == 2 and output.out == ""
    assert output.err.count("\n") == 1 and output.err.startswith("train.py: ")
    for word in words:
        assert word in output.err


@pytest.mark.parametrize("bad", BAD_COMMANDS, ids=" ".join)
def test_bad_commands_are_refused_before_anything_is_written(bad, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    field = bad[-2].lstrip("-").replace("-", "_") if len(bad) > 1 else "ckpt.pt does not exist"
    words = ["block_size = 20"] if bad[-1] == "50" else ["block_size = 9"] if bad[-1] == "9" else [field, bad[-1]]
    if bad == ["--steps", "many"] or len(bad) == 1:
        words = [bad[-1]]
    if bad[0] == "--n-head":
        words = ["d_model = 16", "n_head = 3"]
    if bad[0] == "--cannon":
        words = ["--cannon abcd"]
    if bad == ["--short-conv"]:
        words = ["short_conv = True", "attention"]
    if "--task" in bad and len(bad) == 4:  # TINY's own N and block size are Copy's
        call = lambda: train.main(["--preset", "nano", "--steps", "5", *bad])  # noqa: E731
    else:
        call = lambda: run_train("--steps", 5, *bad)  # noqa: E731
    assert_refused(call, capsys, *words)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_refused(lambda: run_train("--device", "cuda"), capsys, "cuda", "cpu")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("native", (True, False))
def test_the_gpu_decides_about_bfloat16(native, monkeypatch, capsys):
    """Older ones than Ampere have no instructions for it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert train.choose_dtype(None, "cuda") == ("bfloat16" if native else "float32") and train.choose_dtype(None, "cpu") == "float32"
    assert all(train.choose_dtype("bfloat16", device) == "bfloat16" for device in ("cpu", *["cuda"] * native))
    assert train.choose_dtype("float32", "cuda") == "float32"
    if not native:
        assert_refused(lambda: train.choose_dtype("bfloat16", "cuda"), capsys, "bfloat16", "float32")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_training_and_scoring_compute_in_the_chosen_dtype(dtype, tmp_path, monkeypatch, capsys):
    seen, attend = set(), F.scaled_dot_product_attention

    def spy(q, *rest, **options):
        seen.add((torch.is_grad_enabled(), q.dtype))
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    run_train("--dtype", dtype, "--steps", 2, "--out", tmp_path)
    capsys.readouterr()
    assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    assert_refused(lambda: run_train("--dtype", other, "--steps", 2, "--out", tmp_path, "--resume"), capsys, f"dtype: {dtype!r} there, {other!r} now")
    assert all(weight.dtype == torch.float32 for weight in torch.load(tmp_path / "ckpt.pt", weights_only=True)["model"].values())


def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "can_compile_on_cpu", lambda: False)
    assert_refused(lambda: run_train("--compile"), capsys, "--compile", "C++ compiler")
    assert not any(tmp_path.iterdir())


def test_a_folder_with_another_run_is_refused(tmp_path, capsys):
    out = tmp_path / "run"
    run_train("--out", out, "--steps", 5)
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert_refused(lambda: run_train("--out", out, "--steps", 5), capsys, "--resume")
    assert_refused(lambda: run_train("--out", out, "--steps", 5, "--canon", "a", "--resume"), capsys, "model.canon", "'a'")
    assert_refused(lambda: run_train("--out", out, "--steps", 6, "--resume"), capsys, "training.steps: 5 there, 6 now")
    assert_refused(lambda: run_train("--out", out, "--steps", 5, "--seed", 4, "--resume"), capsys, "seed")
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


TINY_SWEEP = [word for word in TINY if word not in ("--task", "copy")] + ["--steps", "4"]


def test_a_sweep_runs_skips_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "sweeps", lambda preset: {"copy": {"one": "--task copy", "other": "--task copy --canon abcd"}})
    sweep = ["--sweep", "copy", "--seeds", "2", *TINY_SWEEP]
    train.main([*sweep, "--dry-run"])
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 4 and not any(tmp_path.iterdir())
    # one run is finished and one was cut off, by the very commands that were printed
    train.main(shlex.split(commands[0])[2:])
    with monkeypatch.context() as patch:
        patch.setattr(train, "stop_requests", lambda: contextlib.nullcontext([15]))
        with pytest.raises(SystemExit):
            train.main(shlex.split(commands[3])[2:])
    first, cut_off = (tmp_path / "out" / f"copy_nano_rope_{name}" for name in (
        "bare_N=8_block-size=20_steps=4_batch-size=8_warmup=5_s0", "abcd_N=8_block-size=20_steps=4_batch-size=8_warmup=5_s1"))  # fmt: skip
    before, saved = (first / "metrics.jsonl").stat().st_mtime_ns, lines(cut_off)
    assert not any("final" in line for line in saved)
    train.main([*sweep, "--jobs", "2"])
    folders = sorted((tmp_path / "out").iterdir())
    assert len(folders) == 4 and all(lines(folder)[-1]["final"] for folder in folders)
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before and lines(cut_off)[: len(saved)] == saved
    train.main(sweep)  # nothing left to do

    capsys.readouterr()
    assert_refused(lambda: train.main([*sweep, "--eval-size", "17"]), capsys, "eval_size: 16 there, 17 now")
    folders[1].rename(tmp_path / "elsewhere")
    folders[1].mkdir()
    (folders[1] / "notes.txt").write_text("mine")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        train.main(sweep)
    assert stopped.value.code == 1 and "is not empty" in capsys.readouterr().err and [*folders[1].iterdir()] == [folders[1] / "notes.txt"]


@pytest.mark.skipif(os.name == "nt", reason="no signals there")
def test_a_stopped_sweep_stops_its_runs(tmp_path):
    command = [sys.executable, str(HERE / "train.py"), "--sweep", "copy", "--seeds", "1", "--jobs", "2", *TINY_SWEEP[:-1], "1000000"]
    sweep = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    logs = wait_for_logs(tmp_path / "out", 2)
    sweep.send_signal(signal.SIGINT)
    assert "the same command goes on" in sweep.communicate(timeout=60)[1] and sweep.returncode == 130
    assert len(logs) == 2
    steps = [torch.load(path.parent / "ckpt.pt", weights_only=True)["step"] for path in logs]
    assert min(steps) > 0 and steps == [lines(path.parent)[-1]["step"] for path in logs]


@pytest.mark.parametrize("name", train.SWEEPS)
@pytest.mark.parametrize("preset", ("nano", "small"))
def test_every_sweep_is_of_different_valid_runs(name, preset):
    runs = train.sweep_runs(name, 2, ["--preset", preset, "--device", "cpu"])
    assert len({json.dumps(train.recipe_of(*prepared)) for _, prepared in runs}) == len(runs)
    assert len({prepared[0].out for _, prepared in runs}) == len(runs) == 2 * len(train.sweeps(preset)[name])


@pytest.mark.parametrize("bad, words", [(["--sweep", "no"], ["'no'", "copy"]), (["--sweep", "copy", "--seeds", "0"], ["seeds = 0"]),
    (["--sweep", "copy", "--jobs", "0"], ["jobs = 0"]), (["--sweep=copy", "--seed=1"], ["--seed", "its own"]),
    (["--sweep", "copy", "--out", "x"], ["--out", "its own"]), (["--sweep", "copy", "--lr", "-1"], ["lr = -1"]),
    (["--sweep", "depth", "--N", "100"], ["block_size = 52"]), (["--canon", "abcd"], ["--task", "--sweep"]),
    (["--sweep", "copy", "--n-layer", "2"], ["--n-layer 2", "varies"]), (["--task", "copy", "--dry-run"], ["--dry-run", "--sweep"]),
    (["--sweep", "copy", "--d-model", "64"], ["--d-model 64", "varies"]), (["--sweep", "depth", "--canon", "abcd"], ["--canon abcd", "varies"]),
    (["--task", "copy", "--jobs", "2"], ["--jobs", "--sweep"])])  # fmt: skip
def test_bad_sweeps_are_refused(bad, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_refused(lambda: train.main([*bad, "--preset", "nano"]), capsys, *words)
    assert not any(tmp_path.iterdir())


def test_run_names_tell_runs_apart():
    task = make_task("copy")
    names = set()
    for more in ([], ["--seed", "1"], ["--canon", "abcd"], ["--canon", "abcd", "--canon-silu"], ["--lr", "0.1"], ["--pos", "nope"],
                 ["--n-layer", "2"], ["--canon-kernel", "3"], ["--mlp", "silu"], ["--dtype", "bfloat16"]):  # fmt: skip
        args = train.parse_arguments(["--task", "copy", "--preset", "nano", *more])
        config = Config(vocab_size=9, block_size=9, n_layer=1, pos=args.pos, canon=args.canon)
        names.add(train.run_name(args, task, config))
    assert train.run_name(args, task, Config(vocab_size=9, block_size=9, canon="DcBa")).startswith("copy_nano_rope_abcd_")
    assert len(names) == 10 and "copy_nano_rope_bare_s0" in names and all("/" not in name for name in names)


def fake_run(folder, seed, scores, final=True, K=2, **model):
    folder.mkdir(parents=True)
    model = vars(Config(vocab_size=9, block_size=9)) | model
    config = {"run": folder.name, "task": {"name": "depo1", "N": 6, "K": K}, "model": model, "training": {"lr": 1}, "dtype": "float32",
              "seed": seed, "preset": "nano", "device": "cpu, 1 threads"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    log = [{"step": 10 * (i + 1), "tokens_per_s": 7, "eval": {f"k={k}": s / k for k in range(1, K + 1)}} for i, s in enumerate(scores)]
    if final:
        log.append({"step": 10 * len(scores), "eval": log[-1]["eval"], "final": True, "seconds": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def test_plot_reads_groups_and_draws(tmp_path):
    fake_run(tmp_path / "a0", 0, [0.2, 0.4])
    fake_run(tmp_path / "a1", 1, [0.4, 0.8])
    fake_run(tmp_path / "b0", 0, [0.9], final=False, canon="abcd", canon_silu=True)
    fake_run(tmp_path / "c0", 0, [], final=False, pos="nope")  # has no scores yet
    (tmp_path / "empty").mkdir()
    (tmp_path / "figure.png").write_bytes(b"")
    runs = plot.read_all(sorted(tmp_path.iterdir()))
    assert [run["seconds"] for run in runs] == [3.0, 3.0, None] and runs[0]["tokens_per_s"] == 7
    groups = plot.models(runs)
    assert {name: len(members) for name, members in groups.items()} == {"RoPE": 2, "RoPE + Canon-ABCD (act)": 1}
    assert list(plot.models([runs[0], runs[1] | {"dtype": "bfloat16"}])) == ["RoPE, dtype=float32", "RoPE, dtype=bfloat16"]
    gated = [run | {"model": run["model"] | {"canon_gated": on}} for run, on in zip(runs[:2], (False, True))]  # a field of one's own
    assert {*plot.models(gated)} == {"RoPE, canon_gated=False", "RoPE, canon_gated=True"}
    assert "| RoPE | 1 |" in plot.table([runs[0], runs[0] | {"date": "later"}])  # the same seed again
    steps, mean, low, high = plot.curve(groups["RoPE"], "k=1")
    assert steps == [10, 20] and np.allclose(mean, [0.3, 0.6]) and np.allclose(low, [0.2, 0.4]) and np.allclose(high, [0.4, 0.8])
    assert len(plot.read_all([tmp_path / "a0", tmp_path / "a0"])) == 1
    assert plot.table(runs).splitlines() == [
        "| | seeds | k=1 | k=2 |", "|---|---|---|---|", "| RoPE | 2 | 60% (40% to 80%) | 30% (20% to 40%) |",
        "| RoPE + Canon-ABCD (act) (still training) | 1 | 90% | 45% |"]  # fmt: skip
    figure = plot.draw(runs)
    assert "N=6, K=2, n_layer=12, d_model=768, 1-2 seeds" in figure.get_suptitle()
    assert [axis.get_title() for axis in figure.axes[:2]] == ["k=1", "k=2"]
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [pytest.approx([30, 60]), pytest.approx([90])]
    assert [bar.get_width() for bar in figure.axes[2].patches] == pytest.approx([60, 90])
    assert "still training" in figure.axes[2].get_yticklabels()[1].get_text()
    for i in range(30):
        fake_run(tmp_path / f"d{i}", i, [0.5], n_layer=i + 1)
    many = plot.models(plot.read_all(sorted(tmp_path.iterdir())))
    assert "RoPE, n_layer=3" in many and len(many["RoPE, n_layer=12"]) == 3 and len(many) == 31
    plot.draw(plot.read_all(sorted(tmp_path.iterdir()))).savefig(tmp_path / "many.png")


def test_plot_tells_many_models_apart():
    labels = [f"{mixer}{more}" for mixer in ("GDN", "GLA", "Mamba2") for more in (" (no conv)", "", " + Canon-AbCD", " + Canon-ABCD")]
    assert len(set(plot.looks(labels))) == 12
    assert [colour for colour, _ in plot.looks(labels[:5])] == list(plot.COLOURS[:5])
    assert plot.looks([*labels, "RoPE"])[-1] == (matplotlib.colors.to_rgb(plot.COLOURS[3]), "-")
    assert len({colour for colour, _ in plot.looks([f"RoPE + Canon-ABCD (K={K})" for K in range(13)])}) == 13


MODEL_NAMES = (
    (dict(), "RoPE"), (dict(pos="nope", canon="ac"), "NoPE + Canon-AC"), (dict(canon="abcd", canon_residual=False), "RoPE + Canon-ABCD (no-res)"),
    (dict(mixer="gdn"), "GDN"), (dict(mixer="gdn", short_conv=False), "GDN (no conv)"), (dict(mixer="gdn", canon="acd"), "GDN + Canon-AbCD"),
    (dict(mixer="gdn", canon="abcd"), "GDN + Canon-ABCD"), (dict(mixer="gdn", canon="abcd", short_conv=True), "GDN + Canon-ABCD (conv)"),
    (dict(mixer="gdn", canon="acd", short_conv=False), "GDN + Canon-ACD"), (dict(mixer="gla"), "GLA"),
    (dict(mixer="gla", short_conv=True), "GLA (conv)"), (dict(mixer="gla", canon="acd"), "GLA + Canon-ACD"),
    (dict(mixer="gla", canon="acd", short_conv=True), "GLA + Canon-AbCD"), (dict(mixer="mamba2,attention", pos="rope4"), "Mamba2/RoPE(1/4)"),
)  # fmt: skip


@pytest.mark.parametrize("options, name", MODEL_NAMES, ids=str)
def test_plot_names_models_as_the_paper_does(options, name):
    assert plot.model_label(vars(Config(vocab_size=9, block_size=9, **options))) == name


@pytest.mark.parametrize("packed", sorted(HERE.glob("results/*/runs.json")), ids=lambda path: path.parent.name)
def test_the_shipped_results_can_be_drawn(packed):
    runs = plot.read_all([packed])
    for task in {run["task"]["name"] for run in runs}:
        members = [run for run in runs if run["task"]["name"] == task]
        groups = plot.models(members)
        assert all(run["seconds"] is not None for run in members)  # finished
        assert all(len({run["seed"] for run in group}) == len(group) for group in groups.values())  # nothing mixed up
        plot.draw(members)
        plot.plt.close("all")


def test_plot_takes_runs_with_different_scores(tmp_path):
    fake_run(tmp_path / "short", 0, [0.2, 0.4])
    fake_run(tmp_path / "long", 0, [0.5], K=3)
    for names in (("short", "long"), ("long", "short")):
        figure = plot.draw(plot.read_all([tmp_path / name for name in names]))
        assert [axis.get_title() for axis in figure.axes[:3]] == ["k=1", "k=2", "k=3"]
        assert " | 50% | 25% | 17% |" in plot.table(plot.read_all([tmp_path / "short", tmp_path / "long"]))
        assert "K=" not in figure.get_suptitle() and "N=6" in figure.get_suptitle()
        figure.savefig(tmp_path / "figure.svg")


@pytest.mark.parametrize("text", (None, "[]", "{}", "not json", '{"runs": 5}', '{"runs": [{"task": 1}]}'))
def test_plot_refuses_what_it_cannot_read(text, tmp_path, monkeypatch, capsys):
    path = tmp_path / "runs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(path), "--out", str(tmp_path / "figures")])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "figures").exists()


def test_a_sweep_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("depo1_nano_rope_bare_s0", "depo1_nano_rope_bare_s12", "depo1_nano_rope_abcd_s0", "depo1_nano_nope_bare_s0", "copy_nano_rope_bare_s0"):
        fake_run(tmp_path / "out" / name, 0, [0.2, 0.4])
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda runs: drawn.extend(run["run"] for run in runs) or plot.plt.figure())
    plot.main(["--sweep", "depth", "--preset", "nano"])
    assert drawn == ["depo1_nano_rope_abcd_s0", "depo1_nano_rope_bare_s0", "depo1_nano_rope_bare_s12"]
    assert (tmp_path / "out" / "depth_depo1_nano.png").exists() and "depth_depo1_nano.png\n\n| | seeds |" in capsys.readouterr().out
    drawn.clear()
    plot.main(["--sweep", "copy", "--preset", "nano", str(HERE / "results" / "nano" / "runs.json"), "--out", "packed"])
    assert sorted(drawn) == [f"copy_nano_rope_{canon}_s{seed}" for canon in ("abcd", "bare") for seed in range(3)]


@pytest.mark.parametrize("bad, words", [([], "--sweep"), (["--sweep", "no"], "'no': allowed: copy"), (["--preset", "nano", "--claims"], "preset = nano"),
    (["--sweep", "copy", "--claims"], "--sweep"), (["--sweep", "copy", "nowhere"], "nowhere does not exist"),
    (["--sweep", "copy", "--preset", "huge"], "'huge'"), (["nowhere"], "nowhere does not exist")])  # fmt: skip
def test_bad_figures_are_refused(bad, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        plot.main(bad)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and words in error and not any(tmp_path.iterdir())


def test_scores_of_claims():
    run = lambda **scores: {"task": {"N": 5}, "evals": [{"eval": {}}, {"eval": scores}]}  # noqa: E731
    depths = [plot.measured(run(**{"k=1": a, "k=2": b, "k=8": c, "k=4": d}), "depth") for a, b, c, d in (
        (1, 1, 1, 1), (1, 0.5, 1, 0.4), (0.4, 1, 1, 1), (1, 1, 0.2, 0.5))]  # fmt: skip
    assert depths == [8, 2, 0, 4]
    assert plot.measured(run(**{"l=2": 0.2, "l=10": 0.6, "l=1": 0.7}), "longest") == 0.6
    half, guess, right = run(**{"k=1": 0.75, "k=2": 0.25}), run(**{"k=1": 0.25}), run(**{"k=1": 1})
    assert plot.measured(half, "answers") == plot.measured(half, "main") == 0.5
    assert [plot.measured(u, "above guessing") for u in (half, guess, right)] == [pytest.approx(1 / 3), 0, 1]
    assert plot.measured(run(KL=0.1), "KL") == 0.1
    for scores, main in (({"l=1": 1, "l=2": 0.3}, 0.3), ({"names": 1, "bits": 9, "bits/param": 0.3}, 0.3), ({"sentences": 0.3, "KL": 2}, 0.3),
                         ({"all": 0.3, "depth=1": 1}, 0.3)):  # fmt: skip
        assert plot.measured(run(**scores), "main") == main


def made_up(sweep, name, preset, quality, seed):
    """A run of this model with all scores at this quality; the worst is the least steady."""
    args, task, config, training = train.prepare([*train.sweeps(preset)[sweep][name].split(), "--preset", preset])
    value = quality + 0.001 * seed * (1 + 99 * (quality == 0.2))
    names = {"copy": ["sequences"], "lano": ["sentences"], "capo": ["bits/param"], "brevo1": ["all"], "brevo2": ["all"], "mano": ["l=1", "l=2"]}
    scores = {name: value for name in names.get(task.name, ["k=1", "k=2", "k=4"])}
    return {**train.recipe_of(args, task, config, training), "run": args.out.name, "preset": preset, "seed": seed, "device": "cpu, 1 threads",
            "seconds": 1.0, "evals": [{"step": 1, "eval": scores}]}  # fmt: skip


@pytest.mark.parametrize("preset", ("nano", "small"))
@pytest.mark.parametrize("number", range(len(plot.CLAIMS)), ids=lambda i: f"{plot.CLAIMS[i][0]}-{i}")
def test_claims_find_their_runs_and_can_fail(number, preset):
    """With runs made up, a claim must come out both ways; and never when a model is missing or has too few seeds."""
    *_, sweep, _, names, _ = claim = plot.CLAIMS[number]
    qualities = [0.05, 0.2, 0.45, 0.6, 0.99] if len(names) < 5 else [0.2, 0.6]
    pool = {(name, quality): [made_up(sweep, name, preset, quality, seed) for seed in range(3)] for name in names for quality in qualities}
    rng, verdicts = np.random.default_rng(0), set()
    # all alike; better with Canon than without, and the other way round; then at random
    orders = [[0.2] * len(names), [0.6 if "+ ABCD" in name else 0.2 for name in names], [0.2 if "+ ABCD" in name else 0.6 for name in names]]
    for chosen in itertools.chain(orders, (rng.choice(qualities, len(names)) for _ in range(200))):
        runs = [run for pair in zip(names, chosen) for run in pool[pair]]
        [(text, where, verdict)] = plot.check(claim, runs)
        assert where == f"{preset}, 3 seeds, cpu" and all(name in text for name in names)
        verdicts.add(verdict)
        if len(verdicts) == 2:
            break
    assert verdicts == {"**reproduced**", "**not reproduced**"}
    assert plot.check(claim, runs[3:]) == [] and plot.check(claim, runs[2:])[0][2] == "too few seeds"
    assert plot.check(claim, runs[2:] + runs[2:])[0][2] == "too few seeds", "the same seed twice"


def test_own_runs_count_before_the_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in plot.read_all([HERE / "results" / "nano" / "runs.json"]):
        if run["task"]["name"] == "copy" and run["model"]["canon"]:
            folder = tmp_path / "out" / run["run"]
            folder.mkdir(parents=True)
            log = [{"step": 1, "eval": {"sequences": 0.125, "tokens": 0.5}}, {"final": True, "seconds": 1.0}]
            (folder / "config.json").write_text(json.dumps(run))
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    plot.main(["--claims"])
    assert "RoPE + ABCD 12% (12% to 12%) | nano, 3 seeds, cpu | **not reproduced** |" in (tmp_path / "out" / "claims.md").read_text()


def test_table_of_claims(tmp_path, monkeypatch, capsys):
    """Of the shipped results: a row a claim at least, as it is printed and written."""
    plot.main([*map(str, HERE.glob("results/nano/runs.json")), "--claims", "--out", str(tmp_path)])
    text = (tmp_path / "claims.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert capsys.readouterr().out.rstrip() == text.rstrip() and len(rows) == 2 + len(plot.CLAIMS)
    assert all(row.count("|") == 7 for row in rows)
    assert rows[2].endswith("| **reproduced** |") and "RoPE + ABCD 100% (100% to 100%)" in rows[2] and "nano, 3 seeds, cpu" in rows[2]
    assert f"{sum(row.endswith('| not run |') for row in rows)} not run" in text
    assert sum(row.endswith("| not run |") and "`--sweep linear`" in row for row in rows) == 5


def test_the_shipped_claims_are_of_the_shipped_runs():
    text = (HERE / "results" / "claims.md").read_text()
    assert text == plot.claims_table(plot.read_all(sorted(HERE.glob("results/*/runs.json"))))
    at_nano = [line for line in text.splitlines() if "| nano, " in line]
    holds, fails = (sum(f"**{verdict}**" in line for line in at_nano) for verdict in ("reproduced", "not reproduced"))
    readme = " ".join((HERE / "README.md").read_text().split())
    assert f"Of our {len(plot.CLAIMS)} rules {holds} hold at nano, {fails} do not" in readme


def test_canon_learns_to_copy_and_attention_alone_does_not(tmp_path):
    """The paper's Fig. 5 in miniature, through train.py: one layer, 16 dims, 30 tokens."""
    scores = {}
    for canon in ("abcd", ""):
        out = tmp_path / f"canon-{canon}"
        train.main(["--task", "copy", "--preset", "nano", "--N", "30", "--block-size", "61", "--steps", "600", "--warmup", "100",
                    "--canon", canon, "--device", DEVICE, "--no-compile", "--eval-every", "600", "--out", str(out)])  # fmt: skip
        scores[canon] = lines(out)[-1]["eval"]
    assert scores["abcd"]["sequences"] > 0.5
    assert scores[""]["sequences"] < 0.05


LEARNS = (  # task, score, more than chance or an untrained model gives
    ("depo2 --N 3 --K 1 --block-size 96 --steps 200", "k=1", 0.6), ("brevo1 --N 4 --block-size 32 --steps 300", "all", 0.5),
    ("brevo2 --N 3 --block-size 64 --steps 300", "all", 0.4), ("lano --root 10 --block-size 32 --steps 150", "sentences", 0.5),
    ("capo --N 50 --exposures 130 --block-size 34", "facts", 0.5), ("mano --L 1 --block-size 35 --steps 600", "l=1", 0.6),
)  # fmt: skip


@pytest.mark.parametrize("task, score, enough", LEARNS, ids=lambda value: str(value).split()[0])
def test_tasks_are_learnt_a_little(task, score, enough, tmp_path, monkeypatch):
    """Depo2's chance is 1/2, the two other nodes; Brevo's below 1/4; a random text is one of Lano's sentences once in thousands of times.
    Mano's tables take long to learn, so here it counts modulo 5: chance is some 1/4."""
    monkeypatch.setattr(tasks.Mano, "modulus", 5)
    train.main(["--preset", "nano", "--canon", "abcd", "--n-layer", "2", "--d-model", "64", "--batch-size", "32", "--lr", "5e-3", "--warmup", "30",
                "--device", DEVICE, "--no-compile", "--eval-every", "1000", "--eval-size", "128", "--out", str(tmp_path / "run"),
                "--task", *task.split()])  # fmt: skip
    assert lines(tmp_path / "run")[-1]["eval"][score] > enough


@pytest.mark.parametrize("mixer", LINEAR)
def test_linear_mixers_with_canon_learn_to_copy(mixer, tmp_path):
    """One layer, 32 dims, 8 tokens: by luck a sequence is right once in 40,320 times."""
    train.main(["--task", "copy", "--preset", "nano", "--N", "8", "--block-size", "17", "--d-model", "32", "--steps", "250", "--warmup", "50",
                "--mixer", mixer, "--canon", "acd", "--device", DEVICE, "--no-compile", "--eval-every", "250", "--out", str(tmp_path / "run")])  # fmt: skip
    assert lines(tmp_path / "run")[-1]["eval"]["sequences"] > 0.5


# ------------------------------------------------------------------------------------------------------------
# 5. The exercises
#
# In kernels.py, canon_gpt.py and tasks.py a line "# exercise N" stands over a solution, which goes to the end of the block, or to a line
# "# end of exercise". An assignment is the repository without them. Every exercise builds on those before it only.
# ------------------------------------------------------------------------------------------------------------

EXERCISES = (  # what passes when it is solved, as `pytest -k` selects it; README.md says what is asked
    "convolution_by_hand or definition and (gradcheck or streams)",
    "causal_conv and gradcheck or causal_conv_pytorch and (forward_alone or equals or many_blocks) or no_shifted",
    "canon_layer_streams",
    "rotary_depends",
    "attention_is_a_mean",
    "canon_points_are or zero_weights or mlp_variants or (causality or streaming_equals) and (rope or nope)",
    "depo_by or depo_order or depo_scores",
    "recurrence_is",
    "decayed_products or scans and not None or (chunked_equals or chunked_is_stable or keeps_its_state) and (gla or mamba2)",
    "scans and None or (chunked_equals or chunked_is_stable or keeps_its_state) and gdn or meet_where or constant_memory",
    "lano_chart_equals or lano_long",
    "forward_alone and triton",
    "equals and causal_conv_triton or registered_properly",
)
WITH_EXERCISES = ("kernels.py", "canon_gpt.py", "tasks.py")
TELLING = ("generators.py", "rounding.py")  # of results/: they hold parts of solutions
SOLUTION = re.compile(r"^( *)# (exercise (\d+).*)\n(?:\n*(?!\1# end of exercise)\1.*\S.*\n)+(?:\1# end of exercise\n)?", re.MULTILINE)
LAST = f"# exercise {len(EXERCISES)}\n"  # every assignment asks for it
needs_solutions = pytest.mark.skipif(not any(LAST in (HERE / name).read_text() for name in WITH_EXERCISES), reason="this is an assignment")


def without_solutions(text, solved=0):
    """The text of a file without the solutions of exercises beyond `solved`."""
    return SOLUTION.sub(lambda block: block[0] if int(block[3]) <= solved else f'{block[1]}raise NotImplementedError("{block[2]}")\n', text)


def write_assignment(folder, solved=0):
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(".[!g]*", ".git", "out", "__pycache__", *TELLING))
    for name in WITH_EXERCISES:
        (folder / name).write_text(without_solutions((HERE / name).read_text(), solved))


@needs_solutions
def test_exercises_pass_when_they_and_those_before_are_solved(tmp_path):
    """After the seventh; by then a model trains on Depo."""
    write_assignment(tmp_path / "assignment", 7)
    for exercises, ends in ((EXERCISES[:7], "passed"), (EXERCISES[7:], "failed")):
        selected = " or ".join(f"({tests})" for tests in exercises)
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--tb=line", "-k", selected], cwd=tmp_path / "assignment",
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        summary = re.match(rf"(\d+) {ends}, (\d+ skipped, )?\d+ deselected(, \d+ warnings?)? in ", done.stdout.splitlines()[-1])  # and nothing else
        assert summary and int(summary[1]) >= len(exercises), done.stdout


@needs_solutions
def test_assignments_are_written_once_and_without_solutions(tmp_path, capsys):
    folder = tmp_path / "new" / "assignment"
    assert main(["--assignment", str(folder)]) == 0 and (folder / ".gitignore").exists() and not (folder / ".git").exists()
    asked = []
    for name in WITH_EXERCISES:
        text, solved = (folder / name).read_text(), (HERE / name).read_text()
        blanks = re.findall(r'^ +raise NotImplementedError\("exercise (\d+)\b.*"\)$', text, re.MULTILINE)
        assert len(blanks) == len(re.findall(r"^ +# exercise \d+\b", solved, re.MULTILINE))
        assert not re.search("^ *# (end of )?exercise", text, re.MULTILINE) and without_solutions(solved, len(EXERCISES)) == solved
        compile(text, name, "exec")
        asked += map(int, blanks)
    assert {*asked} == {*range(1, len(EXERCISES) + 1)}
    assert main(["--assignment", str(tmp_path / "rest"), "--solved", "7"]) == 0
    assert (tmp_path / "rest" / "tasks.py").read_text() == without_solutions((HERE / "tasks.py").read_text(), 7)
    assert not any(LAST in (tmp_path / "rest" / name).read_text() for name in WITH_EXERCISES)
    other = ["--assignment", str(tmp_path / "other")]
    for bad in (["--assignment", str(folder)], [], ["0"], [str(len(EXERCISES) + 1)], ["1", *other], [*other, "--solved", "-1"], ["1", "--solved", "2"]):
        with pytest.raises(SystemExit) as stop:
            main(bad)
        assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "other").exists()


def main(argv):
    parser = argparse.ArgumentParser(description="Makes an assignment of this repository, and tells whether it is solved; see README.md.")
    parser.error = lambda message: parser.exit(2, f"test_canon.py: {message}\n")  # one line
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("exercise", nargs="?", type=int, choices=range(1, len(EXERCISES) + 1), metavar="EXERCISE",
                      help=f"run the tests of this exercise, 1 to {len(EXERCISES)}")
    task.add_argument("--assignment", type=Path, metavar="FOLDER", help="write the repository without the solutions to this new folder")
    parser.add_argument("--solved", type=int, choices=range(len(EXERCISES)), default=0, metavar="N", help="with those of exercises 1 to N")
    args = parser.parse_args(argv)
    if args.assignment is not None:
        try:
            write_assignment(args.assignment, args.solved)
        except OSError as error:
            parser.error(f"assignment = {str(args.assignment)!r}: must be a new folder ({error})")
        return 0
    if args.solved:
        parser.error("--solved goes with --assignment")
    selected = EXERCISES[args.exercise - 1]
    if "triton" in selected and kernels.triton is None:
        parser.error(f"exercise = {args.exercise}: its tests need Triton, which is not installed here")
    return pytest.main([__file__, "-x", "-v", "--no-header", "--tb=short", "-k", selected])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
