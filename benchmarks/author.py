"""Does this repository agree with the author's released code?   python benchmarks/author.py PATH

PATH is a clone of github.com/facebookresearch/PhysicsLM4 (or github.com/zhuzeyuan/PhysicsLM4). None
of his code is here: this file imports it from PATH. It gives his models our weights, in float64,
and compares logits and gradients; it compares documents of his generators with ours, by their
statistics; and it lets both verifiers judge the same answers. Where we differ on purpose, or by
reading the paper otherwise, it switches the difference off, or measures it. About three minutes on
a CPU, no other package needed; the exit status is 1 if something differs that should not.

Read in this order: 1 the table, 2 his code and what stands in for packages, 3 models, 4 documents,
5 verifiers and grammars, 6 known differences, 7 his generators for generators.py, 8 the command.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import math
import random
import sys
import types
from collections import Counter, defaultdict, deque
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
import tasks
from canon_gpt import MLPS, CanonGPT, Config
from kernels import relative_error

# ---- 1. The table ----------------------------------------------------------


class Table:
    """Prints a row as soon as it is known, and keeps all of them."""

    def __init__(self):
        self.text = ""
        self.failed = 0

    def print(self, line=""):
        print(line, flush=True)
        self.text += line + "\n"

    def check(self, what, found, equal):
        """A row of things that should be equal."""
        self.failed += not equal
        self.print(f"{what:<46} {found:<58} {'equal' if equal else 'NOT EQUAL'}")

    def note(self, what, found):
        """A row of a known difference."""
        self.print(f"{what:<46} {found:<58} differs")


# ---- 2. His code, and what stands in for packages --------------------------
#
# His models need packages of pinned versions, some for CUDA only. Here his classes do all of the
# work that makes them what they are: projections, convolutions, norms, rotary, attention, gates,
# residuals. Stand-ins, all below, are the base classes of models and configurations, activations,
# rotary's frequencies, einops' reshapes; and for the CUDA kernels, the recurrences' formulas.

STAND_INS = """\
His: projections, Canon and short convolutions, norms, rotary, attention, gates, MLPs, residuals,
initial weights; the generators, the verifiers, the grammars and their parsers.
Stand-ins, written here: transformers' base classes, activations and rotary frequencies; einops;
in place of CUDA kernels, the loops of fla's GLA and gated delta rule and of mamba_ssm's scan, and
a convolution for causal_conv1d (Mamba2's own only; all others run his nn.Conv1d).
Changed in his files: asserts are skipped (one forbids Canon-B in GLA, one names a variable that
does not exist), and his float32 is float64."""

PACKAGES = "transformers", "einops", "fla", "mamba_ssm", "causal_conv1d", "xlsxwriter"
VERSIONS = {"transformers": "4.47.1", "flash-linear-attention": "0.3.0"}  # what his files ask for


class HisConfig:
    """In place of transformers' PretrainedConfig: it keeps what it is told."""

    use_return_dict = output_attentions = output_hidden_states = False
    _attn_implementation = "sdpa"

    def __init__(self, **settings):
        vars(self).update(settings)


class HisModel(nn.Module):
    """In place of transformers' PreTrainedModel: modules get his initial weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def post_init(self):
        self.apply(self._init_weights)


def rotary_frequencies(config, device):
    """Rotary's usual frequencies, and the factor 1 for attention."""
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


def recurrence(q, k, v, log_decay, beta=None):
    """fla's loops: o_t = S^T q_t K^-0.5, where S fades, then k_t v_t^T is added or the delta rule's
    step made. q, k, v (B, T, H, K or V); log_decay (B, T, H, K or 1); beta (B, T, H) or None."""
    S = 0
    outputs = []
    for t in range(q.shape[1]):
        S = S * log_decay[:, t].exp()[..., None]
        write = v[:, t]
        if beta is not None:
            known = torch.einsum("bhk,bhkv->bhv", k[:, t], S + torch.zeros_like(S))
            write = beta[:, t, :, None] * (write - known)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


def gla(q, k, v, g=None, gk=None, **unused):
    return recurrence(q, k, v, g if gk is None else gk), None


class UnitLength:
    """fla's gated delta rule normalises q and k: x / sqrt(x . x + epsilon)."""

    epsilon = 1e-24  # ours, 1e-12 for the length; fla's is 1e-6 under the root

    @classmethod
    def apply(cls, x):
        return x / (x.square().sum(-1, keepdim=True) + cls.epsilon).sqrt()


def gated_delta_rule(q, k, v, g, beta, **unused):
    return recurrence(UnitLength.apply(q), UnitLength.apply(k), v, g[..., None], beta), None


def mamba_scan(x, dt, A, B, C, D, dt_bias, **unused):
    """mamba_ssm's mamba_chunk_scan_combined: h_t = exp(A dt) h_{t-1} + dt B x, y = C h + D x."""
    dt = F.softplus(dt + dt_bias)
    h = 0
    outputs = []
    for t in range(x.shape[1]):
        fade = (A * dt[:, t]).exp()[..., None, None]
        h = fade * h + torch.einsum("bh,bn,bhp->bhpn", dt[:, t], B[:, t, 0], x[:, t])
        outputs.append(torch.einsum("bn,bhpn->bhp", C[:, t, 0], h) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1), None


def causal_conv1d_fn(x, weight, bias=None, activation=None, **unused):
    """x (B, D, T), weight (D, kernel)."""
    x = F.pad(x, (weight.shape[1] - 1, 0))
    y = F.conv1d(x, weight[:, None], bias, groups=len(weight))
    return F.silu(y) if activation is not None else y


def yes(*arguments, **named):
    return True


def silent(*arguments, **named):
    pass


FORMULAS = {  # what is in the stand-ins' modules
    "transformers.activations": {
        "ACT2FN": {"silu": F.silu, "swish": F.silu, "relu2": MLPS["relu2"]},
    },
    "transformers.configuration_utils": {"PretrainedConfig": HisConfig},
    "transformers.modeling_attn_mask_utils": {
        "AttentionMaskConverter": types.SimpleNamespace(_ignore_causal_mask_sdpa=yes),
    },
    "transformers.modeling_rope_utils": {
        "ROPE_INIT_FUNCTIONS": {"default": rotary_frequencies},
        "rope_config_validation": silent,
    },
    "transformers.modeling_utils": {"PreTrainedModel": HisModel},
    "transformers.processing_utils": {"Unpack": dict},
    "transformers.pytorch_utils": {"ALL_LAYERNORM_LAYERS": []},
    "transformers.utils": {"logging": MagicMock()},
    "transformers.utils.import_utils": {
        "is_causal_conv1d_available": yes,
        "is_mamba_2_ssm_available": yes,
    },
    "einops": {"rearrange": rearrange},
    "fla": {"__version__": VERSIONS["flash-linear-attention"]},
    "fla.modules.activations": {"swiglu": lambda gate, up: F.silu(gate) * up},
    "fla.ops.gla": {"chunk_gla": gla, "fused_recurrent_gla": gla},
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": gated_delta_rule,
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
    },
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_scan},
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
}


class StandIn(types.ModuleType):
    """A module in place of a package. What his files import but never use here is an empty class,
    or a decorator that changes nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {})
        return lambda *arguments, **named: lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        vars(module).update(FORMULAS.get(module.__name__, {}))


@contextlib.contextmanager
def stand_ins():
    """Within, importing one of PACKAGES finds its stand-in, installed or not."""
    modules, finders = dict(sys.modules), list(sys.meta_path)
    version = importlib.metadata.version
    for name in modules:
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]
    sys.meta_path.insert(0, Finder())
    importlib.metadata.version = VERSIONS.__getitem__
    try:
        yield
    finally:
        importlib.metadata.version = version
        sys.meta_path[:] = finders
        for name in list(sys.modules):
            if name.partition(".")[0] in PACKAGES:
                del sys.modules[name]
        for name, module in modules.items():
            sys.modules.setdefault(name, module)


def load(file, name, **given):
    """Run his file as the module `name`, without its asserts. given: what is defined beforehand."""
    module = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    vars(module).update(given, print=silent)
    sys.modules[name] = module
    exec(compile(file.read_text(), str(file), "exec", optimize=1), vars(module))
    return module


@contextlib.contextmanager
def double_precision():
    """Within, new tensors are float64, and so is what his code calls float32."""
    single, to_single = torch.float32, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, to_single
        torch.set_default_dtype(torch.float32)


# ---- 3. Models: our weights in his -----------------------------------------
#
# A family is a function that builds his model for our Config, and one that renames a dict of our
# tensors, weights or gradients, to his names.

CANON_SETS = "", "a", "b", "c", "d", "ac", "acd", "abcd"
SHAPE = dict(vocab_size=50, block_size=70, n_layer=2, n_head=4, d_model=64)
EPSILON = 1e-6  # ours, in every RMSNorm


class Models:
    """His four models, as functions of our Config."""

    def __init__(self, path):
        with stand_ins():
            folder = path / "huggingface"
            for file in ("configuration_llama_canon", "canon_helper"):
                load(folder / f"{file}.py", file)  # his Llama imports them by these names
            llama = load(folder / "modeling_llama_canon.py", "modeling_llama_canon")
            folder = path / "lingua_modified" / "huggingface"
            sys.modules["his"] = types.ModuleType("his")
            load(folder / "canon_helper.py", "his.canon_helper")
            linear = {}
            for family in ("gla", "mamba2", "gated_deltanet"):
                for kind in ("configuration", "modeling"):
                    file = f"{kind}_{family}_canon"
                    linear[family] = load(folder / f"{file}.py", f"his.{file}")
        self.llama_files = llama
        self.gla_files = linear["gla"]
        self.mamba2_files = linear["mamba2"]
        self.gdn_files = linear["gated_deltanet"]

    def build(self, ours, epsilon=EPSILON):
        """His model for ours, with his initial weights, in evaluation mode."""
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
        his = getattr(self, config.mixer)(config, settings, epsilon).eval()
        for module in his.modules():
            if hasattr(module, "use_fast_conv1d"):
                module.use_fast_conv1d = False  # his nn.Conv1d, not a CUDA kernel
        return his

    def attention(self, config, settings, epsilon):
        head_dim = config.d_model // config.n_head
        settings |= dict(rms_norm_eps=epsilon, num_attention_heads=config.n_head, head_dim=head_dim)
        if config.mlp == "swiglu-relu2":
            settings["hidden_act"] = "relu2"
        if config.pos == "rope4":
            settings["rope_dim"] = head_dim // 4
        his = self.llama_files.LlamaCanonForCausalLM(self.llama_files.LlamaCanonConfig(**settings))
        if config.pos == "nope":  # rotary that turns nothing
            his.model.rotary_emb.inv_freq.zero_()
        return his

    def gla(self, config, settings, epsilon):
        settings |= dict(norm_eps=epsilon, num_heads=4, expand_k=0.5, expand_v=1)
        settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
        return self.gla_files.GLACanonForCausalLM(self.gla_files.GLACanonConfig(**settings))

    def mamba2(self, config, settings, epsilon):
        D = config.d_model
        settings |= dict(layer_norm_epsilon=epsilon, state_size=64, num_heads=16, head_dim=D // 8)
        settings |= dict(n_groups=1, residual_in_fp32=False, use_conv_bias=config.short_conv)
        if config.mlp != "none":
            settings["mlp_type"] = "mlp10"
        his_config = self.mamba2_files.Mamba2CanonConfig(**settings)
        his_config.noconv1d = not config.short_conv
        his = self.mamba2_files.Mamba2CanonForCausalLM(his_config)
        for layer in his.backbone.layers:
            layer.mixer.forward = layer.mixer.cuda_kernels_forward  # the one that he uses
        return his

    def gdn(self, config, settings, epsilon):
        heads = max(2, config.d_model // 128)
        settings |= dict(norm_eps=epsilon, num_heads=heads, head_dim=3 * config.d_model // 4 // heads)
        settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True, expand_v=2)
        settings |= dict(fuse_swiglu=False)
        files = self.gdn_files
        return files.GatedDeltaNetCanonForCausalLM(files.GatedDeltaNetCanonConfig(**settings))


def taps(weight):
    """A convolution's weights as in nn.Conv1d: (kernel, width) -> (width, 1, kernel), oldest first."""
    return weight.flip(0).T[:, None]


def to_his_names(config, ours):
    """{our name: tensor} as {his name: tensor}, for weights as well as gradients."""
    if config.mixer == "mamba2":
        his = {"lm_head.weight": ours["head.weight"]}
        his["backbone.embeddings.weight"] = ours["embed.weight"]
        his["backbone.norm_f.weight"] = ours["norm.weight"]
        prefix = "backbone.layers"
    else:
        his = {"lm_head.weight": ours["head.weight"], "model.norm.weight": ours["norm.weight"]}
        embedding = "embed_tokens" if config.mixer == "attention" else "embeddings"
        his[f"model.{embedding}.weight"] = ours["embed.weight"]
        prefix = "model.layers"
    rename = {"attention": llama_block, "gla": gla_block, "mamba2": mamba2_block, "gdn": gdn_block}
    for layer in range(config.n_layer):
        start = f"blocks.{layer}."
        block = {}
        for name, tensor in ours.items():
            if name.startswith(start):
                block[name.removeprefix(start)] = tensor
        for name, tensor in rename[config.mixer](config, block).items():
            his[f"{prefix}.{layer}.{name}"] = tensor
    return his


def shared_names(block, mixer):
    """What the four have in common: Canon layers, and down."""
    names = {
        "canon_a.weight": "canonA.weight",
        "mixer.canon.weight": f"{mixer}.canonB.weight",
        "canon_c.weight": "canonC.weight",
        "mlp.canon.weight": "mlp.canonD.weight",
    }
    his = {}
    for name in names:
        if name in block:
            his[names[name]] = taps(block[name])
    if "mlp.down.weight" in block:
        his["mlp.down_proj.weight"] = block["mlp.down.weight"]
    return his


def llama_block(config, block):
    his = shared_names(block, "self_attn")
    for part, weight in zip("qkv", block["mixer.qkv.weight"].chunk(3)):
        his[f"self_attn.{part}_proj.weight"] = weight
    his["self_attn.o_proj.weight"] = block["mixer.out.weight"]
    his["input_layernorm.weight"] = block["norm1.weight"]
    his["post_attention_layernorm.weight"] = block["norm2.weight"]
    gate, up = block["mlp.up.weight"].chunk(2)
    return his | {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


def q_k_v(config, block):
    """His names for the three projections, and the three short convolutions, of GLA and GDN."""
    his = {}
    for part, weight in zip("qkv", split_q_k_v(block["mixer.qkv.weight"], 0)):
        his[f"attn.{part}_proj.weight"] = weight
    if config.short_conv:
        for part, weight in zip("qkv", split_q_k_v(block["mixer.conv.weight"], 1)):
            his[f"attn.{part}_conv1d.weight"] = taps(weight)
    his["attn.o_proj.weight"] = block["mixer.out.weight"]
    his["attn.g_proj.weight"] = block["mixer.gate.weight"]
    his["attn_norm.weight"] = block["norm1.weight"]
    his["mlp_norm.weight"] = block["norm2.weight"]
    return his


def split_q_k_v(tensor, dim):
    """In GLA and in GDN, values are twice as wide as queries and keys."""
    width = tensor.shape[dim] // 4
    return tensor.split([width, width, 2 * width], dim)


def gla_block(config, block):
    his = shared_names(block, "attn") | q_k_v(config, block)
    his["attn.gk_proj.0.weight"] = block["mixer.decay.0.weight"]
    his["attn.gk_proj.1.weight"] = block["mixer.decay.1.weight"]
    his["attn.gk_proj.1.bias"] = block["mixer.decay.1.bias"]
    his["attn.g_norm.weight"] = block["mixer.norm.weight"]
    his["mlp.gate_proj.weight"] = block["mlp.up.weight"]  # gate and up in one
    return his


def gdn_block(config, block):
    his = shared_names(block, "attn") | q_k_v(config, block)
    his["attn.a_proj.weight"] = block["mixer.decay.weight"]
    his["attn.b_proj.weight"] = block["mixer.strength.weight"]
    his["attn.A_log"] = block["mixer.A_log"]
    his["attn.dt_bias"] = block["mixer.dt_bias"]
    his["attn.o_norm.weight"] = block["mixer.norm.weight"]
    if "d" in config.canon:
        his["mlp.both_proj.weight"] = block["mlp.up.weight"]
    else:
        gate, up = block["mlp.up.weight"].chunk(2)
        his |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    return his


def mamba2_block(config, block):
    his = shared_names(block, "mixer")
    his["mixer.in_proj.weight"] = block["mixer.into.weight"]
    his["mixer.out_proj.weight"] = block["mixer.out.weight"]
    his["mixer.A_log"] = block["mixer.A_log"]
    his["mixer.dt_bias"] = block["mixer.dt_bias"]
    his["mixer.D"] = block["mixer.skip"]
    his["mixer.norm.weight"] = block["mixer.norm.weight"]
    if config.short_conv:
        his["mixer.conv1d.weight"] = taps(block["mixer.conv.weight"])
        his["mixer.conv1d.bias"] = block["mixer.conv.bias"]
    his["norm.weight"] = block["norm1.weight"]
    if config.mlp != "none":
        his["pre_mlp_layernorm.weight"] = block["norm2.weight"]
        his["mlp.both_proj.weight"] = block["mlp.up.weight"]
    return his


class InOrder(nn.Module):
    """Steps (x, state) -> x, one after another."""

    def __init__(self, *steps):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x, state=None):
        for step in self.steps:
            x = step(x, state)
        return x


class Silu(nn.Module):
    def forward(self, x, state=None):
        return F.silu(x)


def take_his_order(mixer):
    """Our GLA or GDN with his order: q, k and v first go through the short convolution or, without
    one, SiLU; then through Canon-B. (Ours: Canon-B first; and in GLA, no SiLU.)"""
    first = mixer.conv if mixer.conv is not None else Silu()
    mixer.canon = InOrder(first, mixer.canon)
    mixer.conv = InOrder()  # where it stood, nothing is left


def compare(models, config, his_order=False, stir=True, epsilon=EPSILON):
    """The relative differences of logits and, the worst tensor's, of gradients.

    stir  whether to move all weights away from their start, so that none is 0 or 1 by chance
    """
    torch.manual_seed(0)
    with double_precision():
        ours = CanonGPT(config)
        parameters = dict(ours.named_parameters())
        if stir:
            for parameter in parameters.values():
                parameter.data += 0.1 * torch.randn_like(parameter)
        his = models.build(ours, epsilon)
        weights = {name: parameter.data for name, parameter in parameters.items()}
        left = his.load_state_dict(to_his_names(config, weights), strict=False)
        for name in left.missing_keys + left.unexpected_keys:
            if not name.endswith("conv1d.weight") or config.short_conv:
                raise ValueError(f"the weight {name} is in one of the models only")
        if his_order:
            for block in ours.blocks:
                take_his_order(block.mixer)

        tokens = torch.randint(config.vocab_size, (2, config.block_size))
        targets = torch.randint(config.vocab_size, (2, config.block_size))
        our_logits = ours(tokens)[0]
        his_logits = his(tokens, use_cache=False)[0]
        for logits in (our_logits, his_logits):
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        our_gradients = {name: parameter.grad for name, parameter in parameters.items()}
        his_gradients = {name: parameter.grad for name, parameter in his.named_parameters()}
        gradients = 0
        for name, gradient in to_his_names(config, our_gradients).items():
            gradients = max(gradients, relative_error(gradient, his_gradients[name]))
        return relative_error(our_logits, his_logits), gradients


VARIANTS = {  # {row: (what differs from RoPE's Config, sets of Canon points)}
    "Llama, RoPE": ({}, CANON_SETS),
    "Llama, RoPE(1/4)": ({"pos": "rope4"}, CANON_SETS),
    "Llama, NoPE (his rotary, frequencies 0)": ({"pos": "nope"}, CANON_SETS),
    "Llama, Canon without residual": ({"canon_residual": False}, CANON_SETS[1:]),
    "Llama, Canon with SiLU": ({"canon_silu": True}, CANON_SETS[1:]),
    "Llama, Canon with SiLU, without residual": (
        {"canon_silu": True, "canon_residual": False},
        CANON_SETS[1:],
    ),
    "Llama, Canon of kernel 2": ({"canon_kernel": 2}, CANON_SETS[1:]),
    "Llama, Canon of kernel 3": ({"canon_kernel": 3}, CANON_SETS[1:]),
    "Llama, ReLU^2 in the gated MLP": ({"mlp": "swiglu-relu2"}, CANON_SETS),
    "GLA": ({"mixer": "gla", "short_conv": False}, CANON_SETS),
    "GLA with short convolution": ({"mixer": "gla", "short_conv": True}, CANON_SETS),
    "Mamba2 without short convolution": ({"mixer": "mamba2", "short_conv": False}, CANON_SETS),
    "Mamba2": ({"mixer": "mamba2", "short_conv": True}, CANON_SETS),
    "Mamba2 without MLP": (
        {"mixer": "mamba2", "short_conv": True, "mlp": "none"},
        ("", "a", "b", "ab"),
    ),
    "GDN without short convolution": ({"mixer": "gdn", "short_conv": False}, CANON_SETS),
    "GDN": ({"mixer": "gdn", "short_conv": True}, CANON_SETS),
}


def compare_models(table, models):
    table.print("\nModels: our weights in his, float64. Relative differences, the worst over Canon -,")
    table.print("A, B, C, D, AC, ACD, ABCD (A, B, AB where there is no MLP). GLA and GDN in his order")
    table.print("of SiLU and Canon-B; how far ours is from it stands at the end.\n")
    for name, (changed, canon_sets) in VARIANTS.items():
        logits, gradients = 0, 0
        for canon in canon_sets:
            config = Config(**SHAPE, canon=canon, **changed)
            his_order = config.mixer in ("gla", "gdn")
            found = compare(models, config, his_order)
            logits, gradients = max(logits, found[0]), max(gradients, found[1])
        text = f"logits {logits:.0e}, gradients {gradients:.0e}"
        table.check(name, text, max(logits, gradients) < 1e-11)


# ---- 4. Documents: his generators beside ours ------------------------------
#
# His documents are rewritten in our tokens. Then each is summed up, his and ours by the same
# function, in some numbers: sizes, degrees, which token is first .. One number a document, so that
# the numbers are independent, and chi-squared tells whether two sets of them are alike.

BOS, QUERY, ANS = 9999, 9997, 9998  # his tokens; his <eos> is 9998, too
DOCUMENTS = {  # {task: (its parameters, how many documents)}
    "depo1": (dict(N=225, K=8, block_size=2047), 3000),
    "depo2": (dict(N=75, K=16, block_size=2047), 3000),
    "brevo1": (dict(N=70, block_size=1023), 3000),
    "brevo2": (dict(N=30, block_size=1535), 3000),
    "mano": (dict(L=10, block_size=1023), 10000),
    "cfg3f": (dict(cfg="cfg3f", root=22, block_size=511), 2000),
    "cfg3j": (dict(cfg="cfg3j", root=25, block_size=1535), 1000),
    "cfg3k": (dict(cfg="cfg3k", root=25, block_size=1535), 1000),
}


class Generators:
    """His generators. draw(task) is a document of his, for a task of ours: tokens and labels."""

    def __init__(self, path):
        folder = path / "data-synthetic-pretrain"
        given = dict(random=random, defaultdict=defaultdict, bos_token_id=BOS)
        self.depo = load(folder / "Depo" / "depo.py", "his_depo", **given)
        given["deque"] = deque
        self.brevo = load(folder / "Brevo" / "brevo.py", "his_brevo", **given)
        self.mano = load(folder / "Mano" / "mano.py", "his_mano", random=random)
        self.grammars = {}
        with stand_ins():
            cfg = load(folder / "Lano-cfg" / "data_cfg.py", "his_data_cfg")
        for name in tasks.GRAMMARS:
            file = folder / "Lano-cfg" / "configs" / f"{name}.json"
            self.grammars[name] = cfg.CFG_Config.from_graph(str(file))
        self.dice = random.Random(1)
        self.depo.rng = self.brevo.rng = self.dice

    def choose_question_as_the_text(self):
        """Brevo's question among the last quarter of all nodes: his code says
        max(len(nodes) * 3 // 4, len(nodes) - 1), the very last; now `max` takes the first."""
        self.brevo.max = lambda quarter, last: quarter

    def draw(self, task):
        if task.name.startswith("depo"):
            words = task.words
            found = self.depo.depo_data(
                task.N,
                task.K,
                mini_vocab=words.V,
                min_tlen=words.shortest,
                max_tlen=words.longest,
            )
            return found[0], found["label"]
        if task.name.startswith("brevo"):
            found = self.brevo.topsort_data(task.N, multi=task.name == "brevo2")
            return found[0], found["label"]
        if task.name == "mano":
            lengths = range(1, task.L + 1)
            text = self.mano.encode_pure_arithmetic(self.dice, lengths, lengths, ["+", "-", "*"])
            return text, [1] * len(text)
        if task.name == "lano":
            text = [BOS] + self.grammars[task.settings["cfg"]].generate_onedata_pure(self.dice)
            return text, [1] * len(text)
        raise ValueError(f"he has no generator of {task.name} whose tokens compare with ours")


def in_our_tokens(task, text):
    if task.name.startswith("depo"):
        names = {BOS: task.bos, 9500: task.ans}
        for k in range(1, task.K + 1):
            names[9000 + k] = task.ans + k
    if task.name.startswith("brevo"):
        names = {BOS: task.bos, QUERY: task.query, ANS: task.ans}
        return [names.get(token, token) for token in text[:-1]] + [task.eos]
    if task.name == "mano":  # everything but numbers has two names, and <ans> says the length, too
        names = {}
        for i in range(3):
            names[1 + i] = names[5 + i] = task.plus + i
        for number in range(task.modulus):
            names[5000 + number] = 1 + number
        expression = [names[token] for token in text[2:-2]]
        return [task.bos, task.ans + text[1] // 10, *expression, task.ans, names[text[-1]]]
    if task.name == "lano":
        names = {BOS: task.bos}
    return [names.get(token, token) for token in text]


def sum_up_depo(task, tokens, labels):
    words = task.words.split(tokens[1:])
    specials = [place for place, word in enumerate(words) if word[0] > task.ans]
    edges, questions = words[: specials[0]], words[specials[0] :]
    sources, targets = edges[::2], edges[1::2]
    n, following = len(sources), dict(zip(sources, targets))
    hops, asked, answers = questions[::4], questions[1::4], questions[3::4]
    valid = len(following) == n and len(set(asked)) == min(n, 10) and tokens[0] == task.bos
    counted = 0
    for (query,), node, answer in zip(hops, asked, answers):
        for _ in range(query - task.ans):
            node = following[node]
        valid = valid and node == answer
        counted += 1 + len(answer)
    return {
        "valid": valid and sum(labels) == counted,
        "nodes": n,
        "tokens": len(tokens),
        "labelled tokens": sum(labels),
        "length of the first word": len(words[0]),
        "first token": tokens[1],
        "last token of the first word": words[0][-1],
        "hops": hops[0][0],
        "where the first edge's target goes on": 20 * sources.index(targets[0]) // n,
        "where the edge of the first question is": 20 * sources.index(asked[0]) // n,
        "how far the second question is from the first": distance(following, *asked[:2]),
    }


def distance(following, start, end):
    steps = 0
    while start != end:
        start, steps = following[start], steps + 1
    return steps


def sum_up_brevo(task, tokens, labels):
    words = task.words.split(tokens[1:])
    query = words.index((task.query,))
    edges, asked, answer = words[:query], words[query + 1], words[query + 3 : -1]
    parents, children = defaultdict(list), Counter(edges[::2])
    for parent, child in zip(edges[::2], edges[1::2]):
        parents[child].append(parent)
    prompt = tokens.index(task.ans) + 1
    nodes = set(edges)
    return {
        "valid": task.verify(tokens[:prompt], tokens[prompt:]) and tokens[0] == task.bos
        and list(labels) == [0] * (prompt - 1) + [1] * (len(tokens) - prompt + 1),
        "nodes in edges": len(nodes),
        "edges": len(edges) // 2,
        "nodes without parents": sum(node not in parents for node in nodes),
        "nodes with one child": sum(count == 1 for count in children.values()),
        "nodes with four children": sum(count == 4 for count in children.values()),
        "children of the first edge's parent": children[edges[0]],
        "parents of the question": len(parents[asked]),
        "children of the question": children[asked],
        "depth of the question": tasks.depth_of(parents, asked),
        "nodes in the answer": len(answer),
        "children of the answer's first node": children[answer[0]],
        "where the answer's first node comes first": 20 * edges.index(answer[0]) // len(edges),
        "first token": tokens[1],
        "tokens": len(tokens),
    }


def sum_up_mano(task, tokens, labels):
    expression = tokens[2:-2]
    operators = [token for token in expression if token >= task.plus]
    missing, in_left = 1, 0  # the left operand ends where none is missing
    for token in expression[1:]:
        missing += 1 if token >= task.plus else -1
        in_left += token >= task.plus
        if missing == 0:
            break
    return {
        "valid": task.value(iter(expression)) + 1 == tokens[-1] and all(labels)
        and tokens[1] - task.ans == len(operators) and tokens[-2] == task.ans,
        "operators": len(operators),
        "first operator": operators[0],
        "last operator": operators[-1],
        "multiplications": operators.count(task.plus + 2),
        "operators on the left": in_left,
        "first number": next(token for token in expression if token < task.plus),
        "last number": expression[-1],
        "value": tokens[-1],
    }


def sum_up_lano(task, tokens, labels):
    sentence = tokens[1:]
    pairs = Counter(zip(sentence, sentence[1:]))
    found = {
        "valid": tokens[0] == task.bos and all(labels),
        "tokens": len(sentence),
        "first three tokens": 9 * sentence[0] + 3 * sentence[1] + sentence[2],
        "last three tokens": 9 * sentence[-3] + 3 * sentence[-2] + sentence[-1],
        "share of 1": sentence.count(1) / len(sentence),
        "share of 2": sentence.count(2) / len(sentence),
    }
    for pair in ((1, 1), (1, 2), (2, 3), (3, 3)):
        found[f"how often {pair}"] = pairs[pair]
    return found


SUM_UP = {"depo": sum_up_depo, "brevo": sum_up_brevo, "mano": sum_up_mano, "lano": sum_up_lano}


def standard_deviations(ours, his):
    """How far apart two equally large samples of numbers are: chi-squared of their counts in some
    twenty bins, as standard deviations of a normal distribution (Wilson and Hilferty)."""
    pooled = np.concatenate([ours, his])
    borders = np.unique(np.quantile(pooled, np.arange(1, 20) / 20))
    bins = len(borders) + 1
    our_counts = np.bincount(np.searchsorted(borders, ours), minlength=bins)
    his_counts = np.bincount(np.searchsorted(borders, his), minlength=bins)
    total = our_counts + his_counts
    used = total > 0
    freedom = used.sum() - 1
    if freedom == 0:
        return 0.0
    chi2 = ((our_counts - his_counts)[used] ** 2 / total[used]).sum()
    expected, variance = 1 - 2 / (9 * freedom), 2 / (9 * freedom)
    return float(((chi2 / freedom) ** (1 / 3) - expected) / variance**0.5)


def summaries(task, documents):
    """{statistic: its values} of documents, pairs of tokens and labels."""
    sum_up = SUM_UP[task.name.rstrip("012")]
    found = defaultdict(list)
    for tokens, labels in documents:
        for statistic, value in sum_up(task, tokens, labels).items():
            found[statistic].append(value)
    return found


def our_documents(task, count):
    found = []
    for document in task.documents(np.random.default_rng(1), count):
        labels = [0] * len(document.tokens)
        for start, end in document.targets:
            labels[start:end] = [1] * (end - start)
        found.append((document.tokens, labels))
    return found


def his_documents(generators, task, count):
    found = []
    for _ in range(count):
        text, labels = generators.draw(task)
        found.append((in_our_tokens(task, text), labels))
    return found


def task_for(name):
    parameters, count = DOCUMENTS[name]
    return tasks.make_task("lano" if name in tasks.GRAMMARS else name, **parameters), count


def compare_generators(table, generators):
    table.print("\nDocuments of his generators beside ours: how far apart, in standard deviations, the")
    table.print("statistic is that is farthest apart (by chance, up to 3 or 4). Brevo's question is")
    table.print("chosen as in the paper's text.\n")
    generators.choose_question_as_the_text()
    for name in DOCUMENTS:
        task, count = task_for(name)
        ours = summaries(task, our_documents(task, count))
        his = summaries(task, his_documents(generators, task, count))
        valid = all(ours.pop("valid")) and all(his.pop("valid"))
        apart = {statistic: standard_deviations(ours[statistic], his[statistic]) for statistic in his}
        worst = max(apart, key=apart.get)
        settings = " ".join(f"{key}={value}" for key, value in DOCUMENTS[name][0].items())
        settings = settings.partition(" block_size")[0]
        what = f"{name}: {len(apart)} statistics of {count:,} documents"
        found = f"{apart[worst]:.1f} ({worst}); all valid, {settings}"
        table.check(what, found, valid and apart[worst] < 4.5)


def compare_orders(table, generators):
    """Both draw orders of one Brevo graph: how often comes each?"""
    parents = [[], [], [0, 1], [0], [2, 3], [2], [4, 5]]
    dag = defaultdict(list, {node: list(above) for node, above in enumerate(parents)})
    author = generators.brevo.TopoSortDepthStats(len(parents))
    sub_graph = author.subtree_from_query(dag, 6)
    dice, count = random.Random(2), 20000
    ours = Counter(tuple(tasks.draw_order(dice, parents, 6)) for _ in range(count))
    his = Counter(tuple(author.topological_sort(sub_graph, dice)) for _ in range(count))
    number = {order: i for i, order in enumerate(sorted(ours | his))}
    apart = standard_deviations(
        [number[order] for order in ours.elements()], [number[order] for order in his.elements()]
    )
    found = f"{apart:.1f}; {len(ours)} orders here, {len(his)} there, {count:,} draws"
    table.check("brevo: orders of one graph of 7 nodes", found, apart < 4.5 and set(ours) == set(his))


# ---- 5. Verifiers and grammars ---------------------------------------------


def spoilt(task, answer, dice, kind):
    """An answer (tokens up to <eos>) that is spoilt in one of SPOILT's ways."""
    words = [list(word) for word in task.words.split(answer[:-1])]
    i = dice.randrange(len(words) - 1)
    if kind == "two neighbours swapped":
        words[i], words[i + 1] = words[i + 1], words[i]
    if kind == "a node left out":
        del words[i]
    if kind == "a node said twice":
        words.insert(i + 1, words[i])
    if kind == "a node of another graph added":
        words.insert(i, [task.words.V] if task.name == "brevo1" else [1, 1, 1, 2 * task.words.V])
    if kind == "a word without its end":
        words.append([1])
    tokens = []
    for word in words:
        tokens += word
    return tokens + [task.eos]


SPOILT = (
    "as generated",
    "two neighbours swapped",
    "a node left out",
    "a node of another graph added",
    "a node said twice",
    "a word without its end",
)


def compare_verifiers(table, generators, count=1000):
    table.print("\nBrevo's verifiers on his and our answers: how many are right by ours, and by his.\n")
    dice = random.Random(3)
    verifier = generators.brevo.TopoSortDepthStats
    for name in ("brevo1", "brevo2"):
        task, _ = task_for(name)
        his_verify = verifier.parse_tokens if name == "brevo1" else verifier.parse_tokens_multi
        documents = our_documents(task, count) + his_documents(generators, task, count)
        for kind in SPOILT:
            if kind == "a word without its end" and name == "brevo1":
                continue  # its words have one token
            by_ours, by_his, same = 0, 0, 0
            for tokens, _ in documents:
                start = tokens.index(task.ans) + 1
                answer = spoilt(task, tokens[start:], dice, kind)
                here = task.verify(tokens[:start], answer)
                there = his_verify(in_his_tokens(task, tokens[:start] + answer))[0]
                by_ours, by_his, same = by_ours + here, by_his + there, same + (here == there)
            found = f"{by_ours} by ours, {by_his} by his, of {len(documents)}; {same} judged alike"
            if kind in ("a node said twice", "a word without its end"):
                table.note(f"{name}, {kind}", found)
            else:
                table.check(f"{name}, {kind}", found, same == len(documents))


def in_his_tokens(task, tokens):
    """As his verifier reads them: it wants 9999 at the end, where his generator puts 9998."""
    names = {task.bos: BOS, task.query: QUERY, task.ans: ANS, task.eos: BOS}
    return [names.get(token, token) for token in tokens]


def compare_grammars(table, generators):
    table.print("\nLano's grammars: the rules; on the shortest of 300 sentences, chances of all next")
    table.print("tokens; and whether it still parses with one token changed, for 20 places.\n")
    dice = random.Random(4)
    for name, texts in tasks.GRAMMARS.items():
        grammar, his = tasks.Grammar(texts), generators.grammars[name]
        same_rules = rules_of(his) == grammar.rules
        sentences = [his.generate_onedata_pure(dice) for _ in range(300)]
        sentence = min(sentences, key=len)
        chart = grammar.chart(torch.tensor([sentence]))[0]
        ours = chart / chart.sum(-1, keepdim=True)
        chances, _ = his.solve_dp_prob_highprecision(sentence, debug=False)
        apart = float((ours - torch.tensor(chances, dtype=ours.dtype)).abs().max())
        changed = []
        for place in dice.sample(range(len(sentence)), 20):
            other = list(sentence)
            other[place] = other[place] % 3 + 1
            changed.append(other)
        ours = grammar.chart(torch.tensor(changed))[:, -1, 0] > 0
        his_parses = [his.solve_dp_noneq_fast(other, no_debug=True)[0] == 0 for other in changed]
        same = int((ours == torch.tensor(his_parses)).sum())
        found = f"rules {'same' if same_rules else 'DIFFER'}, chances {apart:.0e}, {same} of 20 judged alike"
        equal = same_rules and apart < 1e-12 and same == 20
        table.check(f"{name}, {len(sentence)} tokens, {sum(his_parses)} of 20 parse", found, equal)


def rules_of(his):
    """His grammar as {symbol: list of tuples of symbols}."""
    rules = {}
    for level, symbols in zip(his.all, his.idx[1:]):
        for node in level:
            if node.children is not None:
                rules[node.id] = [tuple(symbols[i] for i in child) for child in node.children]
    return dict(sorted(rules.items()))


# ---- 6. Known differences --------------------------------------------------


def difference_at_start(models, **changed):
    """How far the logits are apart with equal initial weights (ours): a share of their length."""
    options = {}
    for option in ("his_order", "epsilon"):
        if option in changed:
            options[option] = changed.pop(option)
    logits, _ = compare(models, Config(**SHAPE, **changed), stir=False, **options)
    return logits


def measure_orders(table, models):
    table.print("\nKnown differences. Logits: with our initial weights in both, how far apart they are.\n")
    cases = {
        "GDN, Canon-ABCD, no short convolution": dict(mixer="gdn", canon="abcd", short_conv=False),
        "GDN, Canon-ABCD and short convolution": dict(mixer="gdn", canon="abcd", short_conv=True),
        "GLA, no Canon, no short convolution": dict(mixer="gla", canon="", short_conv=False),
        "GLA, Canon-ACD, no short convolution": dict(mixer="gla", canon="acd", short_conv=False),
        "GLA, Canon-ABCD, no short convolution": dict(mixer="gla", canon="abcd", short_conv=False),
        "GLA, Canon-ABCD and short convolution": dict(mixer="gla", canon="abcd", short_conv=True),
    }
    for what, changed in cases.items():
        apart = difference_at_start(models, **changed)
        switched = difference_at_start(models, his_order=True, **changed)
        ours = "B, then SiLU" if changed["mixer"] == "gdn" else "B, no SiLU"
        if changed["short_conv"]:
            ours = "B, then convolution"
        his = "SiLU, then B" if not changed["short_conv"] else "convolution, then B"
        found = f"ours {ours}; his {his}: logits {apart:.0%}, switched {switched:.0e}"
        table.note(what, found)


def measure_epsilons(table, models):
    eps = 1e-5  # in the linear models' recipes
    for mixer in ("attention", "gla", "mamba2", "gdn"):
        changed = dict(mixer=mixer, canon="acd", his_order=mixer in ("gla", "gdn"))
        apart = difference_at_start(models, epsilon=eps, **changed)
        table.note(f"RMSNorm's epsilon, {mixer}", f"ours 1e-6, his recipes' 1e-5: logits {apart:.1%}")
    UnitLength.epsilon, usual = 1e-6, UnitLength.epsilon
    apart = difference_at_start(models, mixer="gdn", canon="acd", short_conv=True, his_order=True)
    UnitLength.epsilon = usual
    table.note("unit length of q and k, GDN", f"ours 1e-12, fla's 1e-6 in the root: logits {apart:.1%}")


def measure_starts(table, models):
    """Initial weights, by their standard deviations: those that differ by more than a fifth."""
    shape = SHAPE | dict(n_layer=24)
    for mixer in ("attention", "gla", "mamba2", "gdn"):
        torch.manual_seed(0)
        short_conv = None if mixer == "attention" else True
        config = Config(**shape, mixer=mixer, canon="abcd", short_conv=short_conv)
        with double_precision():
            ours = CanonGPT(config)
            his = dict(models.build(ours).named_parameters())
            ours = to_his_names(config, dict(ours.named_parameters()))
        by_kind = defaultdict(lambda: ([], []))  # all layers in one
        for name in his:
            kind = ".".join(part for part in name.split(".")[1:] if not part.isdecimal())
            if "gk_proj" not in name:
                kind = kind.removesuffix(".weight").rpartition(".")[2]
            by_kind[kind][0].append(ours[name].detach().flatten())
            by_kind[kind][1].append(his[name].detach().flatten())
        unlike = {}
        for kind, (here, there) in by_kind.items():
            here, there = torch.cat(here), torch.cat(there)
            if not 0.8 < (here.std() + 1e-9) / (there.std() + 1e-9) < 1.25:
                unlike[kind] = f"{kind} {here.std():.2f} (his {there.std():.2f})"
        if unlike:
            for kind, text in unlike.items():
                table.note(f"start of {mixer}, std", text)
        else:
            table.check(f"start of {mixer}, std", f"{len(by_kind)} kinds of weights", True)


def measure_documents(table, generators):
    generators.brevo.__dict__.pop("max", None)  # the released code's question: the last node
    for name in ("brevo1", "brevo2"):
        task, count = task_for(name)
        ours = summaries(task, our_documents(task, count))
        his = summaries(task, his_documents(generators, task, count))
        apart = standard_deviations(ours["nodes in the answer"], his["nodes in the answer"])
        here, there = np.mean(ours["nodes in the answer"]), np.mean(his["nodes in the answer"])
        found = f"ours the last quarter, his code the last: answers of {here:.1f}, {there:.1f} nodes"
        table.note(f"{name}'s question ({apart:.0f} standard deviations)", found)

    task, _ = task_for("depo2")
    generators.depo.rng = random.Random(5)
    plain = generators.depo.depo_data(task.N, task.K)[0]
    generators.depo.rng = random.Random(5)
    marked = generators.depo.depo_data(task.N, task.K, separator=True)[0]
    same = [token for token in marked if token != 9700] == plain
    edges = marked.count(9700)
    found = f"option, off: before each of {edges} edges; ours, after each; rest {same}"
    table.note("depo's separator (Depo0)", found)
    table.note("mano's tokens", "his: two for each of <bos>, + - *, <len>, <ans>; <ans> says l, too")
    table.note("brevo's <eos>", f"his: the token of <ans>, {generators.brevo.eos_token_id}")


def measure_biographies(table, path):
    folder = path / "data-synthetic-pretrain" / "Capo-bioS-bioR"
    his = load(folder / "Capo-bioS-bioR.py", "his_capo", random=random.Random(6), np=np)
    files = {
        "first name": "first_name",
        "middle name": "middle_name",
        "last name": "last_name",
        "birth city": "city",
        "university": "university",
        "major": "field",
        "employer": "company",
    }
    values = {}
    for kind, file in files.items():
        values[kind] = (folder / "fields" / f"{file}.txt").read_text().split("\n")
    here = [tasks.PERSON[kind] for kind in files]
    there = [sum(value != "" for value in values[kind]) for kind in files]
    table.check("capo: numbers of names and facts", ", ".join(map(str, there)), here == there)

    person = {"id": 1}
    order = "birthmonth birthday birthyear birthcity university field company1name company1city"
    for i, field in enumerate(["first_name", "middle_name", "last_name"] + order.split()):
        person[field] = f"<{i}>"
    ours = [fact for fact in tasks.BIOGRAPHY if fact in tasks.COLUMNS and fact != "pronoun"]
    found = []
    for option in (0, 1):
        text = his.get_text_simple3(person, order=option)
        found.append(sorted(range(len(ours)), key=lambda i: text.index(f"<{i}>")))
    as_ours = list(range(len(ours)))
    equal = found[1] == as_ours and found[0] == as_ours[:-2] + [as_ours[-1], as_ours[-2]]
    table.check("capo: order of facts, with his order=1", "names, date .. employer, work city", equal)
    table.note("capo: order of facts, his default order=0", "work city before employer")
    wordings = [set() for _ in range(6)]
    for _ in range(4000):
        sentences = his.get_text_simple3(person).strip().removesuffix(".").split(". ")
        for seen, sentence in zip(wordings, sentences):
            seen.add(sentence)
    counts = ", ".join(str(len(seen)) for seen in wordings)
    table.note("capo: wordings of a sentence", f"ours 10; his {counts}, in English")
    cities = {company.partition("; ")[2] for company in values["employer"] if company}
    among = len(cities & set(values["birth city"]))
    found = f"ours: all among the birth cities; his: {among} of {len(cities)}"
    table.note("capo: work cities", found)


def measure_alibi(table):
    """Hugging Face's slopes (the author's code has no ALiBi): those of the next smaller power of
    two, then every other one of twice that power."""

    def his(n_head):
        power = 2 ** int(math.log2(n_head))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (n_head - power), 2)]

    for n_head in (8, 12):
        ours = [2 ** (-8 * h / n_head) for h in range(1, n_head + 1)]
        ratio = max(max(a / b, b / a) for a, b in zip(sorted(ours), sorted(his(n_head))))
        if ratio == 1:
            table.check(f"ALiBi's slopes, {n_head} heads", "as Hugging Face's", True)
        else:
            found = f"up to {ratio:.2f} times Hugging Face's (sorted); the same range"
            table.note(f"ALiBi's slopes, {n_head} heads", found)


# ---- 7. His generators, for generators.py ----------------------------------


def peer_batches(path, sizes):
    """His generators as benchmarks: {task: make}, for those tasks of `sizes` that he has.

    path   the clone
    sizes  {task: (a task of ours, tokens in a batch)}
    make() draws his documents until they have so many tokens, and returns how many they have. They
    stay lists of tokens: he has no code that cuts them into windows. His Capo writes English, and
    has no tokens to count.
    """
    generators = Generators(Path(path))

    def maker(task, tokens):
        def make():
            made = 0
            while made < tokens:
                made += len(generators.draw(task)[0])
            return made

        return make

    found = {}
    for name, (task, tokens) in sizes.items():
        if name in ("depo1", "depo2", "brevo1", "brevo2", "mano"):
            found[name] = maker(task, tokens)
        if name == "lano" and task.grammar.root == max(tasks.GRAMMARS[task.settings["cfg"]]):
            found[name] = maker(task, tokens)  # he always starts at the root
    return found


# ---- 8. The command --------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="PATH", help="a clone of PhysicsLM4")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args(argv)
    if not (options.path / "data-synthetic-pretrain").is_dir():
        parser.error(f"{options.path} is no clone of github.com/facebookresearch/PhysicsLM4")
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)

    table = Table()
    table.print(STAND_INS)
    models, generators = Models(options.path), Generators(options.path)
    compare_models(table, models)
    compare_generators(table, generators)
    compare_orders(table, generators)
    compare_verifiers(table, generators)
    compare_grammars(table, generators)
    measure_orders(table, models)
    measure_epsilons(table, models)
    measure_starts(table, models)
    measure_documents(table, generators)
    measure_biographies(table, options.path)
    measure_alibi(table)
    table.print(f"\n{table.failed} of the rows that should be equal are not.")
    if options.out:
        options.out.write_text(table.text)
    return 1 if table.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
