#!/usr/bin/env bash
# mlx-lm 0.32.2: in a batch of prompts of different lengths, some recurrent models write other text.
#
# batch_generate() pads shorter prompts on the right, and so does the server if requests come at the
# same time. The class BatchGenerator hands the lengths to the caches. Attention can't see padding
# that comes later. But the state that a convolution or a recurrence leaves for the next token must
# be that of the last real token. LFM2, Mamba2, Qwen3-Next, Kimi-Linear and others read the lengths
# from the cache, and are right. These are not:
#
# - OLMo-Hybrid masks its recurrence, the gated delta rule, but each of its convolutions keeps its
#   last three inputs, which come from the padding.
# - Baichuan-M1 keeps the padding's key and value for its convolutions of kernel 2.
# - Mamba, RecurrentGemma, Jamba, RWKV-7 and bailing_moe_linear mask no recurrence, so that padding
#   changes their whole state.
#
# There is no error, and the server takes all of them for models that it can batch. One would expect
# the text that each prompt gets alone. (Issues 1906 and 1908 report two other models, MiniCPM3 and
# GraniteMoeHybrid.)
#
# Here are models with random weights, and prompts of 20, 9 and 13 tokens. Each writes ten more,
# always the likeliest. `off by` is how far the log probabilities of the first of these are from
# those without a batch, at most. With three prompts of 13 tokens there is no difference.
#
# Seen on 2026-11-28 (MLX 0.32.4, a CPU):
#
#   lfm2:            0 of 3 texts differ, off by 0.00; of equal lengths 0, off by 0.00
#   mamba2:          0 of 3 texts differ, off by 0.00; of equal lengths 0, off by 0.00
#   olmo_hybrid:     2 of 3 texts differ, off by 5.26; of equal lengths 0, off by 0.00
#   baichuan_m1:     2 of 3 texts differ, off by 5.36; of equal lengths 0, off by 0.00
#   mamba:           2 of 3 texts differ, off by 4.92; of equal lengths 0, off by 0.00
#   recurrent_gemma: 2 of 3 texts differ, off by 8.50; of equal lengths 0, off by 0.00
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" mlx-lm==0.32.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator

SIZES = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    norm_eps=1e-5,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
MODELS = {
    "lfm2": dict(
        conv_L_cache=4,
        conv_bias=False,
        block_dim=32,
        block_ff_dim=64,
        block_multiple_of=1,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        full_attn_idxs=[2],
    ),
    "mamba2": dict(
        num_heads=8,
        state_size=8,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        residual_in_fp32=False,
        time_step_limit=(0.0, 100.0),
        time_step_rank=2,
        layer_norm_epsilon=1e-5,
        chunk_size=8,
    ),
    "olmo_hybrid": dict(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=True,
        attention_bias=False,
    ),
    "baichuan_m1": dict(sliding_window=64, sliding_window_layers=[1, 3], conv_window=2),
    "mamba": dict(
        state_size=8,
        conv_kernel=4,
        time_step_rank=2,
        use_bias=False,
        use_conv_bias=True,
    ),
    "recurrent_gemma": dict(
        num_key_value_heads=1,
        attention_bias=False,
        attention_window_size=64,
        conv1d_width=4,
        logits_soft_cap=30.0,
        block_types=["recurrent", "recurrent", "attention"],
    ),
}


def new_model(name):
    mx.random.seed(0)
    module = import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(SIZES | MODELS[name] | {"model_type": name}))

    def larger(weight):  # so that a token depends on those before it
        return weight + 0.2 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight

    model.update(tree_map(larger, model.parameters()))
    return model.eval()


def written(model, prompts):
    """(ten tokens after each prompt, the log probabilities of the first of them)"""
    generator = BatchGenerator(model, max_tokens=10)
    numbers = generator.insert(prompts)
    tokens, first = {n: [] for n in numbers}, {}
    while any(len(text) < 10 for text in tokens.values()):
        _, responses = generator.next()
        for response in responses:
            first.setdefault(response.uid, response.logprobs)
            tokens[response.uid].append(response.token)
    return [tokens[n] for n in numbers], [first[n] for n in numbers]


def compare(model, lengths):
    """(how many prompts get another text in a batch than alone, how far off)"""
    prompts = [mx.random.randint(1, 40, (length,)).tolist() for length in lengths]
    texts, first = written(model, prompts)
    differ, off = 0, 0.0
    for prompt, text, log_probabilities in zip(prompts, texts, first):
        (alone,), (right,) = written(model, [prompt])
        differ += text != alone
        off = max(off, mx.abs(log_probabilities - right).max().item())
    return differ, off


for name in MODELS:
    model = new_model(name)
    differ, off = compare(model, (20, 9, 13))
    differ_equal, off_equal = compare(model, (13, 13, 13))
    print(f"{name + ':':16} {differ} of 3 texts differ, off by {off:.2f};", end=" ")
    print(f"of equal lengths {differ_equal}, off by {off_equal:.2f}")
    assert differ_equal == 0 and off_equal < 0.001
    if name in ("lfm2", "mamba2"):
        assert differ == 0 and off < 0.001
    else:
        assert differ > 0 and off > 0.1
PYTHON
