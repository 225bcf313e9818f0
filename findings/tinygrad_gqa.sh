#!/usr/bin/env bash
# tinygrad 0.14.0 runs ONNX's Attention with grouped queries, but gives the heads wrong keys.
#
# With grouped queries, several query heads share one head of keys and values. Of four query heads
# and two key heads, the first two share the first, as in PyTorch, Llama and ONNX's specification.
# tinygrad's OnnxRunner repeats the keys as a whole (K.repeat, which is a tile), so that query heads
# 0 and 2 share the first. The shapes are the same, and nothing is reported. tinygrad's own
# scaled_dot_product_attention(enable_gqa=True) is right. (ONNX's reference had the same order until
# its pull request 7274.)
#
# From opset 23 on, torch.onnx.export writes this operator for scaled_dot_product_attention. So a
# model with enable_gqa=True computes something else in tinygrad. With one key head, or as many as
# query heads, it is right.
#
# Here is causal attention with four query heads, exported by torch.onnx.export. `off by` is the
# distance from PyTorch's output, as a share of its length, and in brackets that from attention
# where query head h has key head h modulo their number.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   4 query heads, 4 of keys: ONNX Runtime off by 0.00, tinygrad by 0.00 (0.00)
#   4 query heads, 2 of keys: ONNX Runtime off by 0.00, tinygrad by 1.31 (0.00)
#   4 query heads, 1 of keys: ONNX Runtime off by 0.00, tinygrad by 0.00 (0.00)
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0 tinygrad==0.14.0
cd "$folder"
export DEV=PYTHON # tinygrad without a compiler
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import onnx
import onnxruntime
import torch
from tinygrad.nn.onnx import OnnxRunner
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

D, HEADS, K = 16, 4, 4


class Attention(nn.Module):
    def __init__(self, key_heads, modulo=False):
        super().__init__()
        self.key_heads, self.modulo = key_heads, modulo
        self.q = nn.Linear(D, HEADS * K)
        self.k, self.v = nn.Linear(D, key_heads * K), nn.Linear(D, key_heads * K)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (
            projection(x).view(B, T, -1, K).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if self.modulo:
            k, v = (t.repeat(1, HEADS // self.key_heads, 1, 1) for t in (k, v))
        grouped = k.shape[1] < HEADS  # the exporter refuses enable_gqa=True without groups
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return y.transpose(1, 2).reshape(B, T, D)


def off(found, right):
    return (torch.from_numpy(found) - right).norm().item() / right.norm().item()


for key_heads in (4, 2, 1):
    torch.manual_seed(0)
    model, modulo = Attention(key_heads).eval(), Attention(key_heads, modulo=True).eval()
    modulo.load_state_dict(model.state_dict())
    x = torch.randn(2, 6, D)
    torch.onnx.export(model, (x,), "model.onnx", opset_version=23, dynamo=True, verbose=False)
    graph = onnx.load("model.onnx").graph
    assert "Attention" in {node.op_type for node in graph.node}
    inputs = {graph.input[0].name: x.numpy()}

    by_ort = onnxruntime.InferenceSession("model.onnx").run(None, inputs)[0]
    (by_tinygrad,) = OnnxRunner("model.onnx")(inputs).values()
    by_tinygrad = by_tinygrad.numpy()
    with torch.no_grad():
        right, by_modulo = model(x), modulo(x)
    ort, tinygrad, same = off(by_ort, right), off(by_tinygrad, right), off(by_tinygrad, by_modulo)
    print(f"{HEADS} query heads, {key_heads} of keys: ONNX Runtime off by {ort:.2f},", end=" ")
    print(f"tinygrad by {tinygrad:.2f} ({same:.2f})")
    assert ort < 1e-5 and same < 1e-5
    assert tinygrad > 0.1 if key_heads == 2 else tinygrad < 1e-5
PYTHON
