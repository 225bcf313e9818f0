"""Each benchmark runs, at tiny shapes, and saves its rows."""

import json

import common
import convolution
import generators
import mixers
import pytest
import step


def test_benchmarks_save_their_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "set_up_torch", lambda: None)  # whose options would stay
    monkeypatch.delitem(convolution.IMPLEMENTATIONS, "torch.compile")  # slow
    out = tmp_path / "rows.jsonl"
    bench = common.Benchmark("test.py", "", ["--out", str(out)])
    convolution.measure(bench, B=2, T=9, D=32, rounds=2)
    generators.measure(bench, "nano", "copy", rounds=2)
    for name in mixers.SHAPES:
        mixers.compare(bench, name, B=1, T=40, rounds=2)
    flags = "--preset nano --task copy --batch-size 2 --no-compile"
    step.compare(bench, ["Canon-ABCD", *step.LINEAR], flags, rounds=2)

    printed = capsys.readouterr().out
    about, *rows = map(json.loads, out.read_text().splitlines())
    assert {"device", "date", "torch"} <= set(about)
    for row in rows:
        assert row["what"] in printed
        assert (row.get("error") or 0) < (1e-5 if about["device"] == "cpu" else 2e-2)
    expected = {"causal_conv", "nn.Conv1d", "copy", "GDN, chunks", "attention, PyTorch", "Mamba2"}
    assert expected <= {row["what"] for row in rows}


def test_author_names_the_file_that_is_missing(tmp_path, capsys):
    import author

    with pytest.raises(SystemExit, match="2"):
        author.main([str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("author.py: error:") and "modeling_llama_canon.py" in line
