#!/usr/bin/env bash
# OpenVINO 2026.4.1 ignores the window of ONNX's Attention, so that tokens see the whole text.
#
# Since opset 25, ONNX's operator Attention has a sliding window: left_window_size and
# right_window_size. OpenVINO accepts the operator, but ignores the two attributes, without an
# error or a warning. (Their names don't occur in the library of its front end.) A model with a
# window then attends to all tokens before, and without is_causal to all after as well. It runs, and
# its output looks plausible.
#
# One would expect the output of ONNX Runtime 1.32.0 and of ONNX's own reference. Or an error, which
# is what an operator ends in that OpenVINO doesn't know. A mask in place of the window is right.
# (Another operator, com.microsoft.GroupQueryAttention, had this fault until pull request 37207.)
#
# Here the values are the rows of the identity matrix, so that the output is the attention itself:
# row t has the weights of the eight tokens for token t. Below is the last row, for two tokens back
# and, in the last case, one ahead. `off by` is the largest difference from attention as the
# specification defines it.
#
# Seen on 2026-11-28:
#
#   is_causal=1
#     ONNX's reference: 0.12 0.09 0.10 0.05 0.09 0.26 0.25 0.05, off by 0.00
#     ONNX Runtime:     0.12 0.09 0.10 0.05 0.09 0.26 0.25 0.05, off by 0.00
#     OpenVINO:         0.12 0.09 0.10 0.05 0.09 0.26 0.25 0.05, off by 0.00
#   a mask, two tokens back
#     ONNX's reference: 0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#     ONNX Runtime:     0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#     OpenVINO:         0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#   is_causal=1, left_window_size=2
#     ONNX's reference: 0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#     ONNX Runtime:     0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#     OpenVINO:         0.12 0.09 0.10 0.05 0.09 0.26 0.25 0.05, off by 0.30
#   left_window_size=2, right_window_size=1
#     ONNX's reference: 0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#     ONNX Runtime:     0.00 0.00 0.00 0.00 0.00 0.46 0.44 0.10, off by 0.00
#     OpenVINO:         0.12 0.09 0.10 0.05 0.09 0.26 0.25 0.05, off by 0.43
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1 onnxruntime==1.32.0 onnx==1.23.2 \
    numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx.reference import ReferenceEvaluator

T, K = 8, 4
rng = np.random.default_rng(0)
inputs = {name: rng.standard_normal((1, 1, T, K)).astype(np.float32) for name in "qk"}
inputs["v"] = np.eye(T, dtype=np.float32)[None, None]
back = np.arange(T)[:, None] - np.arange(T)  # how far the key is behind the query


def attention(seen):
    scores = inputs["q"] @ inputs["k"].swapaxes(-1, -2) / K**0.5
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(-1, keepdims=True)


def new_model(feeds, **attributes):
    node = onnx.helper.make_node("Attention", list(feeds), ["y"], **attributes)
    information = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in feeds.items()
    ]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, 1, T, T))
    graph = onnx.helper.make_graph([node], "attention", information, [output])
    opset = onnx.helper.make_opsetid("", 25)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_openvino(model, feeds):
    onnx.save(model, "model.onnx")
    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model("model.onnx"), "CPU", exact)
    return compiled(feeds)[0]


def run_onnxruntime(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds)[0]


def run_reference(model, feeds):
    return ReferenceEvaluator(model).run(None, feeds)[0]


PROGRAMS = {
    "ONNX's reference": run_reference,
    "ONNX Runtime": run_onnxruntime,
    "OpenVINO": run_openvino,
}
causal, window = back >= 0, (back >= 0) & (back <= 2)
both_sides = (back >= -1) & (back <= 2)
CASES = {
    "is_causal=1": (causal, inputs, dict(is_causal=1)),
    "a mask, two tokens back": (window, inputs | {"mask": window}, {}),
    "is_causal=1, left_window_size=2": (window, inputs, dict(is_causal=1, left_window_size=2)),
    "left_window_size=2, right_window_size=1": (
        both_sides,
        inputs,
        dict(left_window_size=2, right_window_size=1),
    ),
}
for case, (seen, feeds, attributes) in CASES.items():
    print(case)
    for program, run in PROGRAMS.items():
        weights = run(new_model(feeds, **attributes), feeds)
        off = np.abs(weights - attention(seen)).max()
        row = " ".join(f"{weight:.2f}" for weight in weights[0, 0, -1])
        print(f"  {program + ':':17} {row}, off by {off:.2f}")
        if program == "OpenVINO" and "window" in case:
            assert off > 0.1
        else:
            assert off < 1e-5
PYTHON
