#!/usr/bin/env bash
# mambapy 1.2.0: the language models LM and JambaLM start with steps that are much too long, and
# ignore dt_min and dt_max.
#
# Mamba's state decays by exp(dt * A) at each token, where A is -1, -2, .. -d_state. At the start,
# biases are drawn so that dt lies between dt_min and dt_max, 0.001 and 0.1 by default. So the
# slowest states halve in 7 to 700 tokens. MambaBlock draws them like this. But then LM and JambaLM
# set the bias of every nn.Linear to 0, also of this one, as is usual in Transformers. So dt is 0.69
# for an input of 0, in every channel, the slowest states halve with each token, and the model
# begins almost without a memory. dt_min and dt_max have no effect (by the code, dt_init, dt_scale
# and dt_init_floor have none either). There is no warning.
#
# One would expect the block's own biases, as in a bare Mamba, in LM with mup=True, which leaves
# them, and in MambaForCausalLM of transformers 5.24.0. (The README says that the initialization is
# that of the paper. Mamba's authors mark this bias with _no_reinit, so that it is left alone; in
# mambapy that line is commented out. JambaForCausalLM of transformers begins with 0.69, too, but
# has no such settings.)
#
# Below are the shortest, median and longest dt for an input of 0, and in how many tokens the
# slowest states halve at the median.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   dt_min=0.001, dt_max=0.1
#     Mamba             0.001  0.013  0.100   52.1 tokens
#     LM, mup=True      0.001  0.011  0.100   64.5 tokens
#     LM                0.693  0.693  0.693    1.0 tokens
#     JambaLM           0.693  0.693  0.693    1.0 tokens
#     MambaForCausalLM  0.001  0.012  0.100   58.4 tokens
#   dt_min=0.001, dt_max=0.01
#     Mamba             0.001  0.003  0.010  221.4 tokens
#     LM, mup=True      0.001  0.003  0.010  209.8 tokens
#     LM                0.693  0.693  0.693    1.0 tokens
#     JambaLM           0.693  0.693  0.693    1.0 tokens
#     MambaForCausalLM  0.001  0.003  0.010  217.8 tokens
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 mambapy==1.2.0 \
    einops==0.8.2 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import math
import sys
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
import transformers

# lm.py also imports Mamba-2, which needs this package and a GPU, and isn't used here.
sys.modules["mamba_ssm.ops.triton.ssd_combined"] = MagicMock()

from mambapy.jamba import JambaLM, JambaLMConfig
from mambapy.lm import LM
from mambapy.mamba import Mamba, MambaConfig

SIZES = dict(d_model=128, n_layers=2)
JAMBA = dict(
    SIZES, mlp_size=64, num_attention_heads=4, num_key_value_heads=2, num_experts=1, vocab_size=50
)


def new_models(limits):
    config, mup_config = MambaConfig(**SIZES, **limits), MambaConfig(**SIZES, **limits, mup=True)
    yield "Mamba", Mamba(config)
    yield "LM, mup=True", LM(mup_config, 50)
    yield "LM", LM(config, 50)
    yield "JambaLM", JambaLM(JambaLMConfig(**JAMBA, **limits))
    sizes = dict(vocab_size=50, hidden_size=128, num_hidden_layers=2)
    times = {key.replace("dt", "time_step"): value for key, value in limits.items()}
    config = transformers.MambaConfig(**sizes, **times)
    yield "MambaForCausalLM", transformers.MambaForCausalLM(config)


def steps(model):
    """dt of an input of 0"""
    biases = [p for name, p in model.named_parameters() if name.endswith("dt_proj.bias")]
    return F.softplus(torch.cat(biases).detach())


torch.manual_seed(0)
for limits in (dict(dt_min=0.001, dt_max=0.1), dict(dt_min=0.001, dt_max=0.01)):
    print(f"dt_min={limits['dt_min']}, dt_max={limits['dt_max']}")
    for name, model in new_models(limits):
        dt = steps(model)
        low, median, high = dt.min().item(), dt.median().item(), dt.max().item()
        halved = math.log(2) / median
        print(f"  {name:18}{low:.3f}  {median:.3f}  {high:.3f}  {halved:5.1f} tokens")
        ignored = name in ("LM", "JambaLM")
        if ignored:
            assert torch.all(dt == math.log(2))
        else:
            assert 0.9 * limits["dt_min"] < low < median < high < 1.1 * limits["dt_max"]
PYTHON
