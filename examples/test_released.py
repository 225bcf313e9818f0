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


# ---- Both kinds of folders, and what is refused ----------------------------


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The 8B model as Lingua saves it, and in hugging_face/ the same in two files with Hugging
    Face's names. torch.load reads them here, so that safetensors need not be installed."""
    weights = make_release(tmp_path, MODELS["8B"])
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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {"model_type": "LlamaCanon", "rope_version": "lingua", "rope_scaling": None}
    config |= MODELS["8B"] | {"max_position_embeddings": 100, "eos_token_id": 2}
    for hugging_face, lingua in released.SETTINGS.items():
        if lingua in config:
            config[hugging_face] = config.pop(lingua)
    (folder / "config.json").write_text(json.dumps(config))
    package = SimpleNamespace(load_file=lambda file: torch.load(file.open("rb")))
    monkeypatch.setitem(sys.modules, "safetensors.torch", package)
    return tmp_path


def line_of_error(folder, capsys, *flags):
    """What the command says where it refuses."""
    with pytest.raises(SystemExit) as end:
        released.main([str(folder), *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1, error
    return error


@torch.no_grad()
def test_hugging_faces_names(folders, capsys):
    model, folder = released.load(folders, dtype=torch.float64), folders / "hugging_face"
    stale = {"model.norm.weight": torch.zeros(64)}
    torch.save(stale, folder / "model.safetensors")  # left from before: the index doesn't name it
    same = released.load(folder, dtype=torch.float64)
    assert same.config == dataclasses.replace(model.config, eos_token_id=2)
    assert torch.equal(same(TOKENS)[0], model(TOKENS)[0])
    file = folder / "1.safetensors"
    torch.save(stale | torch.load(file.open("rb")), file)
    assert "weights = ['model.norm.weight']: in two files" in line_of_error(folder, capsys)


PARAMS, CONFIG = "default/params.json", "hugging_face/config.json"
REFUSED = [  # a file, what is changed in it, and a part of the line
    (PARAMS, {"norm_eps": 1e-6}, "norm_eps = 1e-06: allowed: 1e-05"),
    (PARAMS, {"model_name": "GLA5"}, "model_name = 'GLA5'"),
    (PARAMS, {"sliding_window": 64}, "sliding_window = 64: his sixteen models don't have it"),
    (PARAMS, {"head_dim": 32}, "head_dim = 32: with 4 heads allowed: 16"),
    (PARAMS, {"n_layers": None}, "n_layers = None: allowed: a number"),
    (PARAMS, {"qk_norm": True}, "weights = 'layers.0.attention.q_norm.weight': not in the file"),
    (PARAMS, {"canon_set": "ABC"}, "weights = ['layers.0.feed_forward.canonD.weight']: not in"),
    (CONFIG, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling = {'rope_type'"),
    (CONFIG, {"attention_bias": True}, "attention_bias = True: his sixteen models don't have it"),
    (CONFIG, {"rope_version": "huggingface"}, "rope_version = 'huggingface': allowed: lingua"),
]


@pytest.mark.parametrize("name, changed, line", REFUSED)
def test_other_models_are_refused(name, changed, line, folders, capsys):
    about = json.loads((folders / name).read_text())
    about.get("model", about).update(changed)
    (folders / name).write_text(json.dumps(about))
    assert line in line_of_error(folders if name == PARAMS else folders / "hugging_face", capsys)


def test_a_weight_of_another_shape_is_refused(folders, capsys):
    file = folders / "default/consolidated.pth"
    weights = torch.load(file)["model"] | {"layers.1.canonA.weight": torch.zeros(1)}
    torch.save({"model": weights}, file)
    line = "blocks.1.canon_a.weight = (1,): the settings say (4, 64)"
    assert line in line_of_error(folders, capsys)


INDEX = "hugging_face/model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2734567\n"


@pytest.mark.parametrize("name", [PARAMS, "default/consolidated.pth", CONFIG, INDEX])
@pytest.mark.parametrize("fault", ["pointer", "half", "empty", "missing"])
def test_broken_downloads(name, fault, folders, capsys):
    file = folders / name
    whole = file.read_bytes()
    file.unlink()
    if fault != "missing":
        file.write_bytes({"pointer": POINTER, "half": whole[: len(whole) // 2]}.get(fault, b""))
    folder = folders if name.startswith("default") else folders / "hugging_face"
    line = line_of_error(folder, capsys)
    expected = "model.safetensors" if name == INDEX and fault == "missing" else file.name
    assert f"{expected} is missing, damaged, or a git-lfs pointer" in line


# ---- The command -----------------------------------------------------------


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
]


def test_writing_ends_where_the_config_says(tmp_path):
    make_release(tmp_path, MODELS["1B"])

    def written(end):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end}))
        model = released.load(tmp_path, dtype=torch.float64)
        return released.continuation(model, tmp_path / "none", "1 7 3", 8).split()[3:]

    whole = written(None)
    end = int(whole[4])
    before = whole[: whole.index(whole[4])]
    assert len(whole) == 8 and written(end) == written([49, end]) == before != whole
