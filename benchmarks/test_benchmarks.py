"""Each benchmark runs, at tiny shapes, and saves its rows."""

import json
from functools import partial

import common
import convolution
import mixers
import peers
import step

NANOGPT = """
import canon_gpt

GPT = canon_gpt.CanonGPT

def GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, bias):
    return canon_gpt.Config(vocab_size, block_size, n_layer, n_head, n_embd)
"""


def test_benchmarks_save_their_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "set_up_torch", lambda: None)  # whose options would stay
    monkeypatch.delitem(convolution.IMPLEMENTATIONS, "torch.compile")  # slow
    out = tmp_path / "rows.jsonl"
    bench = common.Benchmark("test.py", "", ["--out", str(out)])
    convolution.measure(bench, B=2, T=9, D=32, rounds=2)
    for name in mixers.SHAPES:
        mixers.compare(bench, name, B=1, T=40, rounds=2)
    flags = "--preset nano --task copy --batch-size 2 --no-compile"
    step.compare(bench, ["Canon-ABCD", "inkling", *step.LINEAR], flags, rounds=2)
    (tmp_path / "nanogpt.py").write_text(NANOGPT)
    nanogpt = partial(peers.make_nanogpt, peers.import_from(tmp_path / "nanogpt.py"))
    peers.compare_steps(bench, {"nanoGPT": nanogpt}, flags, rounds=2)
    peers.compare_writing(bench, {"nanoGPT": nanogpt}, n_layer=1, d_model=16, tokens=4, rounds=2)

    printed = capsys.readouterr().out
    about, *rows = map(json.loads, out.read_text().splitlines())
    assert {"device", "date", "torch"} <= set(about)
    for row in rows:
        assert row["what"] in printed
    expected = {"causal_conv", "nn.Conv1d", "GDN, chunks", "attention, PyTorch", "Mamba2"}
    expected |= {"nanoGPT", "without Canon"}
    assert expected <= {row["what"] for row in rows}
