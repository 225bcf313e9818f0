"""Do our models compute what the author's code computes?   python benchmarks/author.py PATH

PATH is a clone of github.com/zhuzeyuan/PhysicsLM4. This file has none of his code; it imports it
from there. It puts our weights into his models, in float64, and compares logits and gradients.
results/README.md lists the known differences; those are left out here, or our model does it his
way. A last table shows how far two of these differences move the logits. All of it takes a quarter
of a minute on a CPU and needs no other package. The exit status is 1 if a row is not equal.

1 his code and what stands in for packages, 2 models, 3 known differences, 4 the command.
"""

import builtins
import functools
import itertools
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
from canon_gpt import CanonGPT, Config, NoCanon, RMSNorm, linear_recurrence, relu2
from kernels import relative_error
from tasks import make_parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import released

# ---- 1. His code, and what stands in for packages --------------------------
#
# His models need old versions of other packages, and some that run on CUDA only. Stand-ins take
# their place, whether they are installed or not: transformers' base classes, activations and rotary
# frequencies; einops' reshapes; and, instead of CUDA kernels, our loop for the recurrences
# of flash-linear-attention and mamba_ssm, and a convolution for causal_conv1d (in Mamba2 only;
# elsewhere his nn.Conv1d runs).
#
# Everything that makes his models what they are is his own code: projections, Canon layers and
# short convolutions, norms, rotary, attention, gates, MLPs, residuals, initial weights. Two things
# are changed. What it calls float32 is float64 here, and its asserts are skipped, because one of
# them forbids Canon-B in GLA and another names a variable that does not exist.

PACKAGES = "transformers", "einops", "fla", "mamba_ssm", "causal_conv1d", "importlib"
# His files ask importlib for these versions and stop if they find others.
VERSIONS = {"transformers": "4.47.1", "flash-linear-attention": "0.3.0"}


class PretrainedConfig:
    """Keeps what it is told."""

    use_return_dict = output_attentions = output_hidden_states = False
    _attn_implementation = "sdpa"

    def __init__(self, **settings):
        vars(self).update(settings)


class PreTrainedModel(nn.Module):
    """Gives all modules his initial weights. His nn.Conv1d runs in place of a CUDA kernel."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def post_init(self):
        self.apply(self._init_weights)
        for module in self.modules():
            if hasattr(module, "use_fast_conv1d"):
                module.use_fast_conv1d = False


def rotary_frequencies(config, device):
    """Rotary's usual frequencies, and a factor for attention."""
    dims = int(config.head_dim * getattr(config, "partial_rotary_factor", 1))
    return config.rope_theta ** (-torch.arange(0, dims, 2) / dims), 1.0


def rearrange(x, pattern, d=None):
    """The reshapes for which his code calls einops."""
    if pattern in ("b t d -> b d t", "b d t -> b t d"):
        return x.transpose(1, 2)
    if pattern == "b t (h d) -> b t h d":
        return x.unflatten(-1, (-1, d))
    if pattern == "b t h d -> b t (h d)":
        return x.flatten(-2)
    raise ValueError(f"no stand-in for einops' {pattern!r}")


def gla(q, k, v, g=None, gk=None, **unused):
    """fla's chunk_gla calls the log decays g, its fused_recurrent_gla gk."""
    log_decay = gk if g is None else g
    return linear_recurrence(q * q.shape[-1] ** -0.5, k, v, log_decay)


def gated_delta_rule(q, k, v, g, beta, **unused):
    """q and k have unit length, with our epsilon of 1e-12. (fla's is 1e-6, of the square.)"""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return linear_recurrence(q * q.shape[-1] ** -0.5, k, v, g, beta)


def mamba_scan(x, dt, A, B, C, D, dt_bias, **unused):
    """h_t = exp(A dt) h_{t-1} + dt B x, y = C h + D x. All heads share B and C."""
    dt = F.softplus(dt + dt_bias)
    y, _ = linear_recurrence(C, B, dt[..., None] * x, A * dt)
    return y + D[:, None] * x, None


def causal_conv1d_fn(x, weight, bias=None, activation=None, **unused):
    """x (B, D, T), weight (D, kernel)."""
    x = F.pad(x, (weight.shape[1] - 1, 0))
    y = F.conv1d(x, weight[:, None], bias, groups=len(weight))
    return y if activation is None else F.silu(y)


def decorator_that_changes_nothing(*arguments, **named):
    return lambda function: function


FORMULAS = {  # what his files import from PACKAGES, and call here
    "PretrainedConfig": PretrainedConfig,
    "PreTrainedModel": PreTrainedModel,
    "ACT2FN": {"silu": F.silu, "relu2": relu2},
    "AttentionMaskConverter": types.SimpleNamespace(_ignore_causal_mask_sdpa=MagicMock()),
    "ROPE_INIT_FUNCTIONS": {"default": rotary_frequencies},
    "Unpack": dict,
    "ALL_LAYERNORM_LAYERS": [],
    "logging": MagicMock(),
    "metadata": types.SimpleNamespace(version=VERSIONS.__getitem__),
    "__version__": VERSIONS["flash-linear-attention"],
    "rearrange": rearrange,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "chunk_gla": gla,
    "fused_recurrent_gla": gla,
    "chunk_gated_delta_rule": gated_delta_rule,
    "fused_recurrent_gated_delta_rule": gated_delta_rule,
    "mamba_chunk_scan_combined": mamba_scan,
    "causal_conv1d_fn": causal_conv1d_fn,
}


class StandIn:
    """Any of the PACKAGES, or a module in one. Names that his files import, but do not call here,
    are empty classes or decorators."""

    def __getattr__(self, name):
        if name in FORMULAS:
            return FORMULAS[name]
        return type(name, (), {}) if name[0].isupper() else decorator_that_changes_nothing


@functools.cache
def load(file):
    """His file as a module."""
    module = types.ModuleType(f"reference_{file.stem}")
    importing = functools.partial(import_for, file.parent)
    vars(module)["__builtins__"] = vars(builtins) | {"__import__": importing, "print": MagicMock()}
    text = file.read_text(encoding="utf-8")
    exec(compile(text, str(file), "exec", optimize=1), vars(module))  # 1: without asserts
    return module


def import_for(folder, name, *others):
    """What `import name` does in his files: a file of his, a stand-in, or the usual."""
    if "canon" in name:
        return load(folder / f"{name}.py")
    if name.partition(".")[0] in PACKAGES:
        return StandIn()
    return __import__(name, *others)


# ---- 2. Models: our weights in his -----------------------------------------

EPSILON = 1e-6  # in all RMSNorms of ours


def build(path, ours):
    """His model of the same kind as ours, with his initial weights."""
    config = ours.config
    settings = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layer,
        canon_set=config.canon.upper(),
        canon_kernel=config.canon_kernel,
        canon_residual=config.canon_residual,
        canon_activation=config.canon_silu,
    )
    if config.mlp != "none":
        settings["intermediate_size"] = ours.blocks[0].mlp.down.in_features
    file, builder = REFERENCE_MODELS[config.mixer]
    reference = builder(load(path / file), config, settings)
    return reference.eval()  # his Mamba2 fuses more in training


def build_llama(code, config, settings):
    head_dim = config.d_model // config.n_head
    settings |= dict(rms_norm_eps=EPSILON, num_attention_heads=config.n_head, head_dim=head_dim)
    if config.mlp == "swiglu-relu2":
        settings["hidden_act"] = "relu2"
    if config.pos == "rope4":
        settings["rope_dim"] = head_dim // 4
    reference = code.LlamaCanonForCausalLM(code.LlamaCanonConfig(**settings))
    if config.pos == "nope":
        reference.model.rotary_emb.inv_freq.zero_()  # rotary that turns nothing
    return reference


def build_gla(code, config, settings):
    settings |= dict(norm_eps=EPSILON, num_heads=4, expand_k=0.5, expand_v=1)
    settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
    return code.GLACanonForCausalLM(code.GLACanonConfig(**settings))


def build_gdn(code, config, settings):
    heads = max(2, config.d_model // 128)
    head_dim = 3 * config.d_model // 4 // heads
    settings |= dict(norm_eps=EPSILON, num_heads=heads, head_dim=head_dim, fuse_swiglu=False)
    settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
    return code.GatedDeltaNetCanonForCausalLM(code.GatedDeltaNetCanonConfig(**settings))


def build_mamba2(code, config, settings):
    head_dim = config.d_model * 2 // 16
    settings |= dict(layer_norm_epsilon=EPSILON, num_heads=16, head_dim=head_dim, state_size=64)
    settings |= dict(n_groups=1, residual_in_fp32=False, use_conv_bias=config.short_conv)
    if config.mlp != "none":
        settings["mlp_type"] = "mlp10"
    reference_config = code.Mamba2CanonConfig(**settings)
    reference_config.noconv1d = not config.short_conv
    reference = code.Mamba2CanonForCausalLM(reference_config)
    for layer in reference.backbone.layers:
        layer.mixer.forward = layer.mixer.cuda_kernels_forward
    return reference


REFERENCE_MODELS = {  # {our mixer: (his file, how to build his model)}
    "attention": ("huggingface/modeling_llama_canon.py", build_llama),
    "gla": ("lingua_modified/huggingface/modeling_gla_canon.py", build_gla),
    "gdn": ("lingua_modified/huggingface/modeling_gated_deltanet_canon.py", build_gdn),
    "mamba2": ("lingua_modified/huggingface/modeling_mamba2_canon.py", build_mamba2),
}

# Our names, and those of his Llama, GLA, GDN and Mamba2; "*" stands for q, k and v. The first group
# is outside the blocks, the second inside.
NAMES = """
embed           model.embed_tokens        model.embeddings  model.embeddings  backbone.embeddings
blocks          model.layers              model.layers      model.layers      backbone.layers
norm            model.norm                model.norm        model.norm        backbone.norm_f
head            lm_head                   lm_head           lm_head           lm_head

norm1           input_layernorm           attn_norm         attn_norm         norm
canon_a         canonA                    canonA            canonA            canonA
mixer.qkv       self_attn.*_proj          attn.*_proj       attn.*_proj       -
mixer.into      -                         -                 -                 mixer.in_proj
mixer.canon_b   self_attn.canonB          attn.canonB       attn.canonB       mixer.canonB
mixer.conv      -                         attn.*_conv1d     attn.*_conv1d     mixer.conv1d
mixer.decay     -                         -                 attn.a_proj       -
mixer.decay.0   -                         attn.gk_proj.0    -                 -
mixer.decay.1   -                         attn.gk_proj.1    -                 -
mixer.A_log     -                         -                 attn.A_log        mixer.A_log
mixer.dt_bias   -                         -                 attn.dt_bias      mixer.dt_bias
mixer.strength  -                         -                 attn.b_proj       -
mixer.skip      -                         -                 -                 mixer.D
mixer.gate      -                         attn.g_proj       attn.g_proj       -
mixer.norm      -                         attn.g_norm       attn.o_norm       mixer.norm
mixer.out       self_attn.o_proj          attn.o_proj       attn.o_proj       mixer.out_proj
norm2           post_attention_layernorm  mlp_norm          mlp_norm          pre_mlp_layernorm
canon_c         canonC                    canonC            canonC            canonC
mlp.up          mlp.gate_proj             mlp.gate_proj     mlp.gate_proj     mlp.both_proj
mlp.canon_d     mlp.canonD                mlp.canonD        mlp.canonD        mlp.canonD
mlp.down        mlp.down_proj             mlp.down_proj     mlp.down_proj     mlp.down_proj
"""
CONVOLUTIONS = "canon_a", "mixer.canon_b", "canon_c", "mlp.canon_d", "mixer.conv"


def to_reference_names(config, ours):
    """{our name: tensor} as {his name: tensor}; for weights and for gradients."""
    column = 1 + list(REFERENCE_MODELS).index(config.mixer)
    rows = [line.split() for line in NAMES.splitlines() if line]
    names = {row[0]: row[column] for row in rows}
    reference = {}
    for name, tensor in ours.items():
        start, end = "", ""
        if name.startswith("blocks."):
            _, layer, name = name.split(".", 2)
            start = f"{names['blocks']}.{layer}."
        if name.endswith((".weight", ".bias")):
            name, _, end = name.rpartition(".")
            end = "." + end
        if name in CONVOLUTIONS and tensor.dim() == 2:
            tensor = tensor.flip(0).T[:, None]  # (width, 1, kernel), the oldest token first
        for reference_name, part in split(config, names[name], tensor):
            reference[start + reference_name + end] = part
    return reference


def split(config, reference_name, tensor):
    """[(his name, its part of the tensor), ..]: he has several matrices for some of ours."""
    if "*" in reference_name:
        parts = tensor.chunk(3)
        if config.mixer != "attention":  # values are twice as wide as queries and keys
            quarter = len(tensor) // 4
            parts = tensor.split([quarter, quarter, 2 * quarter])
        return [(reference_name.replace("*", letter), part) for letter, part in zip("qkv", parts)]
    if reference_name == "mlp.gate_proj" and config.mixer != "gla":  # GLA has both in one
        if config.mixer == "gdn" and "d" in config.canon:
            return [("mlp.both_proj", tensor)]
        return list(zip(["mlp.gate_proj", "mlp.up_proj"], tensor.chunk(2)))
    return [(reference_name, tensor)]


class ReferenceOrder(nn.Module):
    """In his GLA and GDN, q, k and v go through the short convolution first (or, without one,
    through SiLU) and then through Canon-B. In ours Canon-B comes first, and GLA without the
    convolution has no SiLU."""

    def __init__(self, mixer):
        super().__init__()
        self.conv, self.canon_b = mixer.conv, mixer.canon_b

    def forward(self, x, state=None):
        x = F.silu(x) if self.conv is None else self.conv(x, state)
        return self.canon_b(x, state)


def use_reference_order(model):
    if model.config.mixer in ("gla", "gdn"):
        for block in model.blocks:
            block.mixer.canon_b = ReferenceOrder(block.mixer)
            block.mixer.conv = NoCanon()  # changes nothing


# Inside, what either model calls float32 is float64.
@patch.object(torch, "float32", torch.float64)
@patch.object(torch.Tensor, "float", torch.Tensor.double)
def differences(path, config):
    """The relative differences of logits and, of the tensor with the largest, gradients."""
    torch.manual_seed(0)
    ours = CanonGPT(config)
    parameters = dict(ours.named_parameters())
    for parameter in parameters.values():  # initially, all norms are 1 and all biases 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    reference = build(path, ours)
    weights = {name: parameter.data for name, parameter in parameters.items()}
    left_over = reference.load_state_dict(to_reference_names(config, weights), strict=False)
    for name in left_over.missing_keys + left_over.unexpected_keys:
        if not name.endswith("conv1d.weight") or config.short_conv:
            raise ValueError(f"only one of the two models has {name}")
    use_reference_order(ours)

    tokens = torch.randint(config.vocab_size, (2, config.block_size))
    targets = torch.randint(config.vocab_size, tokens.shape)
    our_logits, _ = ours(tokens)
    reference_logits = reference(tokens, use_cache=False)[0]
    for logits in (our_logits, reference_logits):
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    our_gradients = {name: parameter.grad for name, parameter in parameters.items()}
    reference_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    errors = []
    for name, gradient in to_reference_names(config, our_gradients).items():
        errors.append(relative_error(gradient, reference_gradients[name]))
    # NumPy's max keeps a NaN; Python's could leave it out.
    return relative_error(our_logits, reference_logits), np.max(errors)


SHAPE = dict(vocab_size=50, block_size=70, n_head=4, d_model=64)
VARIANTS = {  # {row: what differs from Config's defaults}
    "Llama, RoPE": {},
    "Llama, RoPE(1/4)": {"pos": "rope4"},
    "Llama, NoPE (his rotary, frequencies 0)": {"pos": "nope"},
    "Llama, Canon without residual": {"canon_residual": False},
    "Llama, Canon with SiLU": {"canon_silu": True},
    "Llama, Canon with SiLU, no residual": {"canon_silu": True, "canon_residual": False},
    "Llama, Canon of kernel 2": {"canon_kernel": 2},
    "Llama, Canon of kernel 3": {"canon_kernel": 3},
    "Llama, ReLU^2 in the gated MLP": {"mlp": "swiglu-relu2"},
    "GLA": {"mixer": "gla", "short_conv": False},
    "GLA with short convolution": {"mixer": "gla", "short_conv": True},
    "Mamba2": {"mixer": "mamba2", "short_conv": True},
    "Mamba2 without short convolution": {"mixer": "mamba2", "short_conv": False},
    "Mamba2 without MLP": {"mixer": "mamba2", "short_conv": True, "mlp": "none"},
    "GDN": {"mixer": "gdn", "short_conv": True},
    "GDN without short convolution": {"mixer": "gdn", "short_conv": False},
}

RELEASES = {  # his recipes for Llamas of 1, 3 and 8 billion parameters, at small widths
    "LlamaCanon-1B": dict(num_attention_heads=4, rope_dim=4, qk_norm=True),
    "LlamaCanon-3B": dict(num_attention_heads=2, rope_dim=8, qk_norm=True),
    "LlamaCanon-8B": dict(num_attention_heads=4, num_key_value_heads=2, rope_dim=4),
}

# The two `compare_` functions below yield rows: what is compared, what was found, and whether it
# is equal.


def compare_models(path):
    """Each variant without Canon and with it. GLA and GDN run in `ReferenceOrder`."""
    for name, changed in VARIANTS.items():
        all_points = "ab" if changed.get("mlp") == "none" else "abcd"
        found = []
        for canon in ("", all_points):
            config = Config(**SHAPE, n_layer=2, canon=canon, **changed)
            found.append(differences(path, config))
        logits, gradients = np.max(found, axis=0)
        text = f"logits {logits:.0e}, gradients {gradients:.0e}"
        yield name, text, logits < 1e-11 and gradients < 1e-11


@patch.object(torch, "float32", torch.float64)
@patch.object(torch.Tensor, "float", torch.Tensor.double)
def release_difference(path, recipe):
    """Of logits, his weights in our model, as examples/released.py puts them there."""
    settings = dict(vocab_size=50, hidden_size=64, intermediate_size=256, num_hidden_layers=2)
    settings |= dict(rms_norm_eps=1e-5, rope_theta=100000.0, max_position_embeddings=70)
    settings |= dict(canon_set="ABCD", rope_version="lingua") | recipe
    # His loading adds these two.
    settings["head_dim"] = 64 // recipe["num_attention_heads"]
    settings["partial_rotary_factor"] = recipe["rope_dim"] / settings["head_dim"]
    torch.manual_seed(0)
    code = load(path / "huggingface" / "modeling_llama_canon.py")
    reference = code.LlamaCanonForCausalLM(code.LlamaCanonConfig(**settings))
    for parameter in reference.parameters():  # initially, all norms are 1
        parameter.data += 0.1 * torch.randn_like(parameter)
    weights = {name: parameter.data for name, parameter in reference.named_parameters()}
    converted = released.in_lingua(settings, weights)
    ours = released.make_model(*converted, torch.float64, "cpu")
    tokens = torch.randint(50, (2, 70))
    return relative_error(ours(tokens)[0], reference(tokens, use_cache=False)[0])


def compare_releases(path):
    for name, recipe in RELEASES.items():
        error = release_difference(path, recipe)
        yield name, f"logits {error:.0e}", error < 1e-11


# ---- 3. Known differences --------------------------------------------------


def use_reference_epsilon(model):
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-5


@torch.no_grad()
def change_of_logits(config, change):
    """Relative, of an untrained model of ours."""
    torch.manual_seed(0)
    model = CanonGPT(config)
    tokens = torch.randint(config.vocab_size, (2, config.block_size))
    before, _ = model(tokens)
    change(model)
    return relative_error(model(tokens)[0], before)


LINEAR = ["GLA", "GLA with short convolution", "Mamba2", "Mamba2 without short convolution"]
LINEAR += ["GDN", "GDN without short convolution"]


def print_known_differences():
    print("\nKnown differences: how far they move the logits of an untrained model\n")
    for name in ("Llama, RoPE", *LINEAR):
        configs = [Config(**SHAPE, n_layer=5, canon=c, **VARIANTS[name]) for c in ("", "abcd")]
        for change in (use_reference_epsilon, use_reference_order):
            without, with_canon = (change_of_logits(config, change) for config in configs)
            if with_canon > 1e-4:
                print(f"{name}, {change.__name__}: {without:.1%}, with Canon {with_canon:.1%}")


# ---- 4. The command --------------------------------------------------------


def main(argv=None):
    parser = make_parser(__file__, __doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="a clone of PhysicsLM4")
    path = parser.parse_args(argv).path
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    print("Largest relative differences: our weights in his models; last, his weights in ours\n")
    failed = 0
    for what, found, equal in itertools.chain(compare_models(path), compare_releases(path)):
        failed += not equal
        print(f"{'equal' if equal else 'NOT EQUAL':<10} {what:<44} {found}", flush=True)
    print_known_differences()
    print(f"\n{failed} rows are not equal.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
