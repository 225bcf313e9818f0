"""The examples run, and the layer in README.md is that of llama.py."""

import contextlib
import importlib
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import canon_gpt
import kernels
import numpy
import plot
import pytest
import sample
import tasks
import torch
import train
from torch.testing import assert_close

HERE = Path(__file__).parent

COPY_8 = "--task copy --N 8 --block-size 17"
EXAMPLES = [  # the file and its flags
    ("retention", f"{COPY_8} --mixer retention"),
    ("relatives", f"{COPY_8} --canon-type gated"),
    ("mqar", "--task mqar"),
    ("longer", "--task longer"),
    ("sets", "--task sets"),
]


@contextlib.contextmanager
def fresh_tables():
    """What a program adds to the tables is gone after it, as if it had been another process."""
    with patch.dict(canon_gpt.CANONS), patch.dict(canon_gpt.MIXERS), patch.dict(tasks.TASKS):
        with patch.object(canon_gpt, "Block", canon_gpt.Block):
            yield


@pytest.mark.parametrize("name, flags", EXAMPLES)
def test_own_things_are_trained_drawn_and_shown(name, flags, here, monkeypatch, capsys):
    usual = "--canon abcd --preset nano --steps 2 --device cpu --no-compile --eval-size 4"
    words = f"{flags} {usual} --out out/own".split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with fresh_tables():
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    with fresh_tables():
        importlib.import_module(f"examples.{name}")
        sample.main(["out/own", "--count", "1"])
        assert "\n<bos>" in capsys.readouterr().out
        plot.main(["out/own"])
        if name != "retention":  # it has no attention
            plot.main(["--inside", "out/own"])
            assert Path("out/own_inside.png").exists()


def relative_of_a_token(name, layer, earlier):
    """What a relative makes of a token. earlier (4, width): its input, the one before, ..."""
    x, previous = earlier[:2]
    if name == "dynamic":
        return x + ((1 + layer.factors(x).tanh())[:, None] * layer.weight * earlier).sum(0)
    if name == "primer":
        return (layer.weight * earlier[:3]).sum(0)
    if name == "mamba":
        return torch.nn.functional.silu((layer.weight * earlier).sum(0) + layer.bias)
    if name == "shift":
        return layer.share * x + (1 - layer.share) * previous
    if name == "smear":
        return x + layer.scale * layer.gate(x[:24]).sigmoid() * previous
    if name == "window":
        scores = layer.key(earlier) @ layer.query(x) / 4 + layer.bias.flip(0)
        return x + scores.softmax(0) @ earlier
    mixed = (layer.weight * earlier).sum(0)
    return x + 2 * (layer.gate * x).sigmoid() * mixed if name == "gated" else x + mixed


@torch.no_grad()
def test_relatives():
    """Each token's output is what its definition says, in one piece and in several; and the model
    passes train.py's checks."""
    with fresh_tables():
        names = set(runpy.run_path(str(HERE / "relatives.py"))["CANONS"]) - {"conv"}
        for name in sorted(names):
            config = canon_gpt.Config(
                9, 40, n_layer=2, n_head=2, d_model=32, canon="abcd", canon_type=name
            )
            model = canon_gpt.CanonGPT(config)
            train.check_model(model, contextlib.nullcontext())
            layer = model.blocks[1].canon_a
            for weight in layer.parameters():
                weight += 0.3 * torch.randn_like(weight)
            x, state = torch.randn(2, 9, 32), canon_gpt.State()
            padded = torch.cat([torch.zeros(2, 3, 32), x], dim=1)
            pieces = [layer(piece, state) for piece in x.split((1, 5, 3), dim=1)]
            assert_close(torch.cat(pieces, dim=1), layer(x), msg=name)
            for t in range(9):
                earlier = padded[1, t : t + 4].flip(0)
                assert_close(layer(x)[1, t], relative_of_a_token(name, layer, earlier), msg=name)
    assert len(names) == 8


@torch.no_grad()
def test_inklings_places():
    """Canon is on k, v, and on what attention and MLP add; q stays as it is."""
    with fresh_tables():
        runpy.run_path(str(HERE / "relatives.py"))
        config = canon_gpt.Config(
            9, 40, n_layer=1, n_head=2, d_model=32, canon="abc", canon_type="inkling"
        )
        block = canon_gpt.CanonGPT(config).blocks[0]
        x, qkv = torch.randn(2, 9, 32), torch.randn(2, 9, 96)
        kv = kernels.causal_conv(qkv[..., 32:], block.mixer.canon_b.weight)
        assert_close(block.mixer.canon_b(qkv), torch.cat([qkv[..., :32], kv], dim=-1))
        h = x + kernels.causal_conv(block.mixer(block.norm1(x)), block.canon_a.weight)
        y = h + kernels.causal_conv(block.mlp(block.norm2(h)), block.canon_c.weight)
        assert_close(block(x), y)


def test_mqar():
    """Each key is asked once, its value follows, and early places are asked more often."""
    with fresh_tables():
        task = runpy.run_path(str(HERE / "mqar.py"))["MQAR"](N=4, V=9, block_size=40)
    first, last = 0, 0
    for document in task.documents(numpy.random.default_rng(0), 400):
        words = task.decode(document.tokens).split()
        assert words[0] == "<bos>" and len(words) == 41
        pairs = list(zip(words[1:9:2], words[2:9:2]))
        asked = [(words[start - 1], words[start]) for start, end in document.targets]
        assert sorted(asked) == sorted(pairs) and len(dict(pairs)) == len({*words[2:9:2]}) == 4
        places = [start for start, end in document.targets]
        first += places[0] == 10
        last += places[-1] == 40
    assert first > 3 * last > 0


def test_graft(here, capsys):
    """A model with grafted Canon layers gives the same logits until it trains on."""
    train.main(f"{COPY_8} --preset nano --steps 4 --eval-size 4 --out out/own".split())
    with fresh_tables():
        from examples import graft

        task, model = sample.load_model("out/own")
        grafted = graft.with_canon(model, "abcd")
        tokens = torch.tensor(task.batch(seed=0, step=0, batch_size=2)[0][:, :-1])
        assert_close(grafted(tokens)[0], model(tokens)[0], rtol=0, atol=0)
        capsys.readouterr()
        graft.main(["out/own"])
    begun, *rows = capsys.readouterr().out.splitlines()
    assert begun == "out/own, 1 more steps:" and len(rows) == 4


def file_on_the_page(first_line):
    """The Python file in examples/README.md that begins so, but for its last lines, which train."""
    page = (HERE / "README.md").read_text()
    (code,) = re.findall(rf"^```python\n({first_line}\n.*?)^if", page, re.MULTILINE | re.DOTALL)
    return code


def test_a_text_of_tokens(here, monkeypatch):
    """The class on the page reads uint16, trains, and continues a prompt."""
    encoding = SimpleNamespace(
        n_vocab=600, encode=lambda text: [599], decode=lambda numbers: f"{numbers}"
    )
    package = SimpleNamespace(get_encoding=lambda name: encoding)
    monkeypatch.setitem(sys.modules, "tiktoken", package)
    numbers = numpy.random.default_rng(0).integers(0, 600, 200_000).astype(numpy.uint16)
    numbers.tofile("train.bin")
    with fresh_tables():
        exec(file_on_the_page("import functools"), {})
        inputs, targets = tasks.make_task("tokens").batch(seed=0, step=0, batch_size=2)
        windows = numpy.lib.stride_tricks.sliding_window_view(numbers, 257)
        read = numpy.append(inputs[0], targets[0, -1]) - 1
        assert (windows == read).all(axis=1).any() and (inputs[0, 1:] == targets[0, :-1]).all()
        train.main("--task tokens --preset nano --steps 1 --eval-size 2 --out out/own".split())
        task, model = sample.load_model("out/own")
        assert list(task.evaluate(model, seed=0, n=2)) == ["bits per token"]
        assert sample.complete_prompt(task, model, "x", 0.0, seed=0).startswith("[599]")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 brought it")
@patch.dict(train.OPTIMIZERS)
def test_muon(here):
    """The optimizer on the page resumes to the same bits. Canon's weights are left to AdamW."""
    exec(file_on_the_page("import torch\nimport train"), {})
    flags = f"{COPY_8} --canon abcd --optimizer muon --preset nano --steps 40 --eval-size 4 --out "
    train.main((flags + "whole").split())
    save = train.save_checkpoint

    def save_once(out, progress, **parts):
        save(out, progress, **parts)
        raise KeyboardInterrupt

    with patch.object(train, "save_checkpoint", save_once), pytest.raises(SystemExit):
        train.main((flags + "stopped").split())
    train.main(["--resume", "stopped"])
    paths = ["whole/ckpt.pt", "stopped/ckpt.pt"]
    whole, resumed = [torch.load(path, weights_only=True) for path in paths]
    assert_close(resumed["model"], whole["model"], rtol=0, atol=0)
    of_muon, of_adamw = whole["optimizer"]["parts"]
    assert of_muon["param_groups"][0]["weight_decay"] == train.Training().weight_decay
    kept = sum(len(group["params"]) for group in of_adamw["param_groups"])
    assert kept == 4 + 5  # Canon's, and those of norms, embedding and head


# ---- llama.py --------------------------------------------------------------


def test_the_layer_in_readme():
    """It is that of llama.py, word for word. examples/README.md adds a method, `step`."""
    text = (HERE.parent / "README.md").read_text()
    (layer,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert layer.split("import torch\n")[1] in (HERE / "llama.py").read_text()
    text = (HERE / "README.md").read_text()
    (step,) = re.findall(r"^    def step\(self, x.*?\n\n", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(layer + step, names)
    x, canon = torch.randn(2, 9, 6), names["Canon"](6)
    tail, outputs = torch.zeros(2, 3, 6), []
    for piece in x.split((1, 5, 3), dim=1):
        y, tail = canon.step(piece, tail)
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), canon(x))
    assert canon.weight.shape == (4, 6) and canon.weight.abs().max() <= 0.5
    assert_close(canon(x), kernels.causal_conv(x, canon.weight))
    assert canon(x.bfloat16()).dtype == torch.bfloat16


def fake_llama(width):
    """The parts of Hugging Face's Llama that llama.py changes, with its names."""
    linear, modules = torch.nn.Linear, torch.nn.ModuleDict
    layer = modules({
        "input_layernorm": torch.nn.RMSNorm(width),
        "self_attn": modules({
            "q_proj": linear(width, width),
            "k_proj": linear(width, width // 2),
            "v_proj": linear(width, width // 2),
        }),
        "post_attention_layernorm": torch.nn.RMSNorm(width),
        "mlp": modules({
            "gate_proj": linear(width, 2 * width),
            "up_proj": linear(width, 2 * width),
        }),
    })  # fmt: skip
    model = modules({"model": modules({"layers": torch.nn.ModuleList([layer])})})
    model.config = SimpleNamespace(hidden_size=width, use_cache=True)
    model.generation_config = SimpleNamespace(use_cache=True)
    return model


WRAPPED = [
    ("a", {"input_layernorm"}),
    ("b", {"q_proj", "k_proj", "v_proj"}),
    ("c", {"post_attention_layernorm"}),
    ("d", {"gate_proj", "up_proj"}),
]


@pytest.mark.parametrize("points, modules", WRAPPED)
def test_canon_in_a_llama(points, modules, monkeypatch):
    package = SimpleNamespace(LlamaConfig=None, LlamaForCausalLM=None)
    monkeypatch.setitem(sys.modules, "transformers", package)
    llama = SimpleNamespace(**runpy.run_path(str(HERE / "llama.py")))
    model = fake_llama(width=6)
    llama.add_canon(model, points)
    assert not model.config.use_cache and not model.generation_config.use_cache
    attention = model.model.layers[0].self_attn
    attention.forward = lambda **given: given
    attention(cache=None, past_key_values=None)
    for name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match="use_cache must be False"):
            attention(**{name: object()})
    wrapped = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Sequential):
            inside, canon = module
            assert canon.weight.shape == (4, inside.weight.shape[0])  # on its output
            wrapped.add(name.split(".")[-1])
    assert wrapped == modules

    undecayed, decayed = llama.weight_groups(model, weight_decay=0.1)
    assert undecayed["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
    matrices = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert {*decayed["params"]} == matrices
    assert {*undecayed["params"]} == {*model.parameters()} - matrices
