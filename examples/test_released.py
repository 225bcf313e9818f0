"""Tests of released.py against a Llama that is written here as the author's code computes it. They
need neither his code nor his weights."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from canon_gpt import MIXERS, POSITIONS, State

with patch.dict(MIXERS), patch.dict(POSITIONS):  # other tests try all that these tables have
    import released

TOKENS = torch.arange(60).reshape(2, 30) * 7 % 50
LLAMA = dict(vocab_size=50, dim=64, n_layers=2, n_heads=4, norm_eps=1e-5, rope_theta=100.0)
MODELS = {  # as in his recipes, but small
    "1B": LLAMA | dict(canon_set="ABCD", qk_norm=True, rope_dim=4),
    "3B": LLAMA | dict(canon_set="ABCD", qk_norm=True, rope_dim=8, n_heads=2),
    "8B": LLAMA | dict(canon_set="ABCD", n_kv_heads=2, rope_dim=8, hidden_dim=40),
    "grouped, with QK-norm": LLAMA | dict(canon_set="BD", qk_norm=True, n_kv_heads=2),
    "without Canon": LLAMA | dict(canon_set="", n_kv_heads=None, rope_dim=None),
}


@pytest.fixture(autouse=True)
def llama_in_the_tables(monkeypatch):
    monkeypatch.setitem(MIXERS, "llama", released.LlamaAttention)
    monkeypatch.setitem(POSITIONS, "llama", released.LlamaRotary)


# ---- The reference ---------------------------------------------------------


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def canon(x, weight):
    """weight (width, 1, 4), for the third token before first."""
    return x + F.conv1d(F.pad(x.mT, (3, 0)), weight, groups=len(weight)).mT


def rotary(x, dims, theta):
    """Turns dims 0 and 1 of each head, 2 and 3, .. (B, T, H, K) -> same."""
    frequencies = theta ** (-torch.arange(0, dims, 2) / dims)
    angles = torch.arange(x.shape[1])[:, None, None] * frequencies  # (T, 1, dims / 2)
    pairs = torch.view_as_complex(x[..., :dims].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(angles.cos(), angles.sin())).flatten(-2)
    return torch.cat([turned, x[..., dims:]], dim=-1)


def reference(settings, weights, tokens):
    """The logits of his Llama."""
    K = settings["dim"] // settings["n_heads"]
    dims = settings.get("rope_dim") or K
    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(settings["n_layers"]):
        start = f"layers.{layer}."
        w = {name.removeprefix(start).removesuffix(".weight"): w for name, w in weights.items()}
        h = norm(x, w["attention_norm"])
        h = canon(h, w["canonA"]) if "canonA" in w else h
        q, k, v = (h @ w[f"attention.w{name}"].T for name in "qkv")
        if settings.get("qk_norm"):
            q, k = norm(q, w["attention.q_norm"]), norm(k, w["attention.k_norm"])
        if "attention.canonB" in w:
            qkv = canon(torch.cat([q, k, v], -1), w["attention.canonB"])
            q, k, v = qkv.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
        q, k, v = (u.unflatten(-1, (-1, K)) for u in (q, k, v))
        q, k = rotary(q, dims, settings["rope_theta"]), rotary(k, dims, settings["rope_theta"])
        q, k, v = (u.transpose(1, 2) for u in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2) @ w["attention.wo"].T
        h = norm(x, w["ffn_norm"])
        h = canon(h, w["canonC"]) if "canonC" in w else h
        up = torch.cat([h @ w["feed_forward.w1"].T, h @ w["feed_forward.w3"].T], -1)
        up = canon(up, w["feed_forward.canonD"]) if "feed_forward.canonD" in w else up
        gate, up = up.chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["feed_forward.w2"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


def make_release(folder, settings):
    """Write a model of random weights as his are. Returns its weights."""
    D, K = settings["dim"], settings["dim"] // settings["n_heads"]
    kv = (settings.get("n_kv_heads") or settings["n_heads"]) * K
    hidden = settings.get("hidden_dim") or 256
    shapes = {
        "attention_norm": [D],
        "attention.wq": [D, D],
        "attention.wk": [kv, D],
        "attention.wv": [kv, D],
        "attention.wo": [D, D],
        "ffn_norm": [D],
        "feed_forward.w1": [hidden, D],
        "feed_forward.w2": [D, hidden],
        "feed_forward.w3": [hidden, D],
    }
    if settings.get("qk_norm"):
        shapes |= {"attention.q_norm": [D], "attention.k_norm": [kv]}
    widths = {"canonA": D, "attention.canonB": D + 2 * kv, "canonC": D}
    widths["feed_forward.canonD"] = 2 * hidden
    for name, width in widths.items():
        if name[-1] in settings["canon_set"]:
            shapes[name] = [width, 1, 4]
    all_shapes = {"tok_embeddings.weight": [50, D], "norm.weight": [D], "output.weight": [50, D]}
    for layer in range(settings["n_layers"]):
        for name, shape in shapes.items():
            all_shapes[f"layers.{layer}.{name}.weight"] = shape
    torch.manual_seed(0)
    weights = {}
    for name, shape in all_shapes.items():
        mean, std = (1, 0.3) if len(shape) == 1 else (0, shape[-1] ** -0.5)  # norms are around 1
        weights[name] = mean + std * torch.randn(shape, dtype=torch.float64)
    (folder / "default").mkdir()
    params = {"model": settings, "data": {"seq_len": 100}}
    (folder / "default" / "params.json").write_text(json.dumps(params))
    torch.save({"model": weights}, folder / "default" / "consolidated.pth")
    return weights


def error(model, expected):
    logits, _ = model(TOKENS)
    return ((logits - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_released_model_computes_what_it_should(name, tmp_path):
    expected = reference(MODELS[name], make_release(tmp_path, MODELS[name]), TOKENS)
    model = released.load(tmp_path, dtype=torch.float64)
    assert error(model, expected) < 1e-12
    state = State()
    pieces = [model(piece, state=state)[0] for piece in TOKENS.split([7, 1, 22], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-12)
    assert all(weight.is_contiguous() for weight in model.parameters())
    small = released.load(tmp_path)
    assert {weight.dtype for weight in small.parameters()} == {torch.bfloat16}
    assert error(small, expected) < 0.05


# ---- What is refused -------------------------------------------------------

REFUSED = [  # settings, weights that are added, and a part of the line
    ({"norm_eps": 1e-6}, [], "norm_eps = 1e-06: allowed: 1e-05"),
    ({"model_name": "GLA5"}, [], "model_name = 'GLA5'"),
    ({"sliding_window": 64}, [], "sliding_window = 64: his sixteen models don't have it"),
    ({"head_dim": 32}, [], "head_dim = 32: with 4 heads allowed: 16"),
    ({"n_layers": None}, [], "n_layers = None: allowed: a number"),
    ({"hidden_dim": 40, "dim": 64, "seed": 7, "canon_bias": False}, ["x"], "['x']: not in such"),
    ({"qk_norm": True}, [], "weights = 'layers.0.attention.q_norm.weight': not in the file"),
    ({}, ["layers.0.attention.wq.bias"], "attention.wq.bias']: not in such a Llama"),
    ({}, ["layers.1.canonA.weight"], "blocks.1.canon_a.weight = (1,): the settings say (4, 64)"),
]


def line_of_error(folder, capsys, *flags):
    """What the command says where it refuses."""
    with pytest.raises(SystemExit) as end:
        released.main([str(folder), *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("settings, added, line", REFUSED)
def test_other_models_are_refused(settings, added, line, tmp_path, capsys):
    weights = make_release(tmp_path, MODELS["8B"])
    file = tmp_path / "default" / "consolidated.pth"
    torch.save({"model": weights | dict.fromkeys(added, torch.zeros(1))}, file)
    params = {"model": MODELS["8B"] | settings, "data": {"seq_len": 100}}
    (tmp_path / "default" / "params.json").write_text(json.dumps(params))
    assert line in line_of_error(tmp_path, capsys)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2734567\n"


@pytest.mark.parametrize("name", ["params.json", "consolidated.pth"])
@pytest.mark.parametrize("fault", ["pointer", "half", "empty", "missing"])
def test_broken_downloads(name, fault, tmp_path, capsys):
    make_release(tmp_path, MODELS["8B"])
    break_file(tmp_path / "default" / name, fault)
    assert f"{name} is missing, damaged, or a git-lfs pointer" in line_of_error(tmp_path, capsys)


def break_file(file, fault):
    whole = file.read_bytes()
    file.write_bytes({"pointer": POINTER, "half": whole[: len(whole) // 2]}.get(fault, b""))
    if fault == "missing":
        file.unlink()


# ---- Hugging Face's names, and the command ---------------------------------


@pytest.fixture
def hugging_face(tmp_path, monkeypatch):
    """(model, folder): a model, and the same in two files with Hugging Face's names. torch.load
    reads them here, so that the package safetensors need not be installed."""
    weights = make_release(tmp_path, MODELS["8B"])
    model = released.load(tmp_path, dtype=torch.float64)
    theirs = {lingua: hugging_face for _, lingua, hugging_face in released.ROWS}
    renamed = {"lm_head.weight": weights.pop("output.weight")}
    for name, weight in weights.items():
        layer, own = re.fullmatch(r"(layers\.\d+\.)?(.*)\.weight", name).groups(default="")
        renamed[f"model.{layer}{theirs[own]}.weight"] = weight
    folder = tmp_path / "hugging_face"
    folder.mkdir()
    places = {}
    for number, names in enumerate((list(renamed)[:9], list(renamed)[9:])):
        torch.save({name: renamed[name] for name in names}, folder / f"{number}.safetensors")
        places |= dict.fromkeys(names, f"{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    config = {"model_type": "LlamaCanon", "rope_version": "lingua"} | MODELS["8B"]
    config |= {"max_position_embeddings": 100, "eos_token_id": 2, "rope_scaling": None}
    for hugging_face, lingua in released.SETTINGS.items():
        if lingua in config:
            config[hugging_face] = config.pop(lingua)
    (folder / "config.json").write_text(json.dumps(config))
    package = SimpleNamespace(load_file=lambda file: torch.load(file.open("rb")))
    monkeypatch.setitem(sys.modules, "safetensors.torch", package)
    return model, folder


@torch.no_grad()
def test_hugging_faces_names(hugging_face, capsys):
    model, folder = hugging_face
    stale = {"model.norm.weight": torch.zeros(64)}
    torch.save(stale, folder / "model.safetensors")  # left from before: the index doesn't name it
    same = released.load(folder, dtype=torch.float64)
    assert same.config == dataclasses.replace(model.config, eos_token_id=2)
    assert torch.equal(same(TOKENS)[0], model(TOKENS)[0])
    file = folder / "1.safetensors"
    torch.save(stale | torch.load(file.open("rb")), file)
    assert "weights = ['model.norm.weight']: in two files" in line_of_error(folder, capsys)


CONFIG_FAULTS = [
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling = {'rope_type'"),
    ({"attention_bias": True}, "attention_bias = True: his sixteen models don't have it"),
    ({"rope_version": "huggingface"}, "rope_version = 'huggingface': allowed: lingua"),
    ({"rope_version": None}, "rope_version = None"),
]


@pytest.mark.parametrize("changed, line", CONFIG_FAULTS)
def test_settings_that_change_what_a_model_computes(changed, line, hugging_face, capsys):
    _, folder = hugging_face
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    assert line in line_of_error(folder, capsys)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "1.safetensors"])
def test_broken_files_of_hugging_face(name, hugging_face, capsys):
    _, folder = hugging_face
    break_file(folder / name, "half")
    assert f"{name} is missing, damaged" in line_of_error(folder, capsys)


def test_the_command(tmp_path, capsys):
    make_release(tmp_path, MODELS["1B"])
    released.main([str(tmp_path), "--prompt", "1 7 3", "--length", "4"])
    counted, _, written = capsys.readouterr().out.splitlines()
    canon = 4 * 2 * (64 + 3 * 64 + 64 + 2 * 256)  # kernel x layers x widths
    assert f" {canon:,} of them in Canon layers" in counted
    assert re.fullmatch(r"1 7 3( \d+){4}", written)
    for prompt, length, line in BAD_PROMPTS:
        flags = ["--prompt", prompt, f"--length={length}"]
        assert line in line_of_error(tmp_path, capsys, *flags)


BAD_PROMPTS = [
    ("Galileo", 4, "tokenizer.json"),
    ("1 50", 4, "prompt = [1, 50]: allowed: one token or more, below 50"),
    (" ", 4, "prompt = []: allowed: one token"),
    ("1 7 3", -3, "length = -3: allowed: 1 or more"),
    ("1 7 3", 99, "max_new_tokens = 99: block_size leaves room for 98"),
]


def test_writing_ends_where_the_config_says(tmp_path):
    make_release(tmp_path, MODELS["1B"])
    model = released.load(tmp_path, dtype=torch.float64)

    def written(end):
        model.config.eos_token_id = end
        return released.continuation(model, tmp_path / "none", "1 7 3", 8).split()[3:]

    whole = written(None)
    end = int(whole[4])
    before = whole[: whole.index(whole[4])]
    assert len(whole) == 8 and written(end) == written([49, end]) == before != whole
