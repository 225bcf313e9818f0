"""Does this repository agree with the author's released code?   python benchmarks/author.py PATH

PATH is a clone of github.com/facebookresearch/PhysicsLM4. None of his code is here: this file
imports it from PATH. His models get our weights, in float64, and should give the same logits and
gradients. His generators' documents should have the statistics of ours. Both verifiers judge the
same answers. A known difference is switched off or measured. All of it takes two or three minutes
on a CPU and needs no other package. The exit status is 1 if something differs that should not.

1 the table, 2 his code and what stands in for packages, 3 models, 4 documents, 5 verifiers and
grammars, 6 known differences, 7 his generators for generators.py, 8 the command.
"""

import argparse
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import random
import sys
import types
from collections import Counter, defaultdict, deque
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
import tasks
from canon_gpt import CanonGPT, Config, relu2
from kernels import relative_error

# ---- 1. The table ----------------------------------------------------------


class Table:
    """Prints each row as soon as it is known, and keeps the text."""

    def __init__(self):
        self.text = ""
        self.failed = 0

    def print(self, line):
        print(line, flush=True)
        self.text += line + "\n"

    def row(self, verdict, what, found):
        self.print(f"{verdict:<10} {what:<44} {found}")

    def check(self, what, found, ok):
        """Two things that should be equal."""
        self.failed += not ok
        self.row("equal" if ok else "NOT EQUAL", what, found)

    def note(self, what, found, ok=True):
        """A known difference. ok: whether it is the one that we know."""
        self.failed += not ok
        self.row("differs" if ok else "UNKNOWN", what, found)


# ---- 2. His code, and what stands in for packages --------------------------
#
# His models need other packages in old versions, and some that run on CUDA only. A stand-in takes
# their place, whether they are installed or not. All that makes his models what they are is his.

STAND_INS = """\
His: projections, Canon layers and short convolutions, norms, rotary, attention, gates, MLPs,
residuals, initial weights; generators, verifiers, grammars and parsers.
Stand-ins, written here: transformers' base classes, activations and rotary frequencies; einops'
reshapes; in place of CUDA kernels, a loop for the recurrences of flash-linear-attention and
mamba_ssm, and a convolution for causal_conv1d (in Mamba2's own; elsewhere his nn.Conv1d runs).
Changed: what his code calls float32 is float64 here, and its asserts are skipped. One of them
forbids Canon-B in GLA, another names a variable that does not exist."""

PACKAGES = "transformers", "einops", "fla", "mamba_ssm", "causal_conv1d", "xlsxwriter"
VERSIONS = {"transformers": "4.47.1", "flash-linear-attention": "0.3.0"}  # what his files ask for


class PretrainedConfig:
    """It keeps what it is told."""

    use_return_dict = output_attentions = output_hidden_states = False
    _attn_implementation = "sdpa"

    def __init__(self, **settings):
        vars(self).update(settings)


class PreTrainedModel(nn.Module):
    """It gives all modules his initial weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def post_init(self):
        self.apply(self._init_weights)


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


def recurrence(q, k, v, log_decay, beta=None):
    """S fades, then k_t v_t^T is added, or by the delta rule what k_t lacks of v_t; o_t = S^T q_t.

    q, k, v (B, T, H, K or V); log_decay (B, T, H, K or 1); beta (B, T, H) or None
    """
    B, T, H, K = k.shape
    S = k.new_zeros(B, H, K, v.shape[3])
    outputs = []
    for t in range(T):
        S = S * log_decay[:, t].exp()[..., None]
        write = v[:, t]
        if beta is not None:
            known = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            write = beta[:, t, :, None] * (write - known)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1)


def gla(q, k, v, g=None, gk=None, **unused):
    """fla's chunk_gla calls the log decays g, its fused_recurrent_gla gk."""
    log_decay = gk if g is None else g
    return recurrence(q * q.shape[-1] ** -0.5, k, v, log_decay), None


class UnitLength:
    """x / sqrt(x . x + epsilon). The delta rule's q and k are such."""

    epsilon = 1e-24  # as ours, 1e-12 for the length; fla's is 1e-6

    @classmethod
    def apply(cls, x):
        return x / (x.square().sum(-1, keepdim=True) + cls.epsilon).sqrt()


def gated_delta_rule(q, k, v, g, beta, **unused):
    q, k = UnitLength.apply(q), UnitLength.apply(k)
    return recurrence(q * q.shape[-1] ** -0.5, k, v, g[..., None], beta), None


def mamba_scan(x, dt, A, B, C, D, dt_bias, **unused):
    """h_t = exp(A dt) h_{t-1} + dt B x, y = C h + D x. All heads share B and C."""
    dt = F.softplus(dt + dt_bias)
    shape = (-1, -1, x.shape[2], -1)
    y = recurrence(C.expand(shape), B.expand(shape), dt[..., None] * x, (A * dt)[..., None])
    return y + D[:, None] * x, None


def causal_conv1d_fn(x, weight, bias=None, activation=None, **unused):
    """x (B, D, T), weight (D, kernel)."""
    x = F.pad(x, (weight.shape[1] - 1, 0))
    y = F.conv1d(x, weight[:, None], bias, groups=len(weight))
    return y if activation is None else F.silu(y)


def yes(*arguments, **named):
    return True


def silent(*arguments, **named):
    pass


def decorator_that_changes_nothing(*arguments, **named):
    return lambda function: function


FORMULAS = {  # {module: what is in it}
    "transformers.activations": {"ACT2FN": {"silu": F.silu, "relu2": relu2}},
    "transformers.configuration_utils": {"PretrainedConfig": PretrainedConfig},
    "transformers.modeling_attn_mask_utils": {
        "AttentionMaskConverter": types.SimpleNamespace(_ignore_causal_mask_sdpa=yes),
    },
    "transformers.modeling_rope_utils": {
        "ROPE_INIT_FUNCTIONS": {"default": rotary_frequencies},
        "rope_config_validation": silent,
    },
    "transformers.modeling_utils": {"PreTrainedModel": PreTrainedModel},
    "transformers.processing_utils": {"Unpack": dict},
    "transformers.pytorch_utils": {"ALL_LAYERNORM_LAYERS": []},
    "transformers.utils": {"logging": MagicMock()},
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
    """What his files import, but do not call here, is an empty class or such a decorator."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {})
        return decorator_that_changes_nothing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if is_stood_in_for(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        vars(module).update(FORMULAS.get(module.__name__, {}))


def is_stood_in_for(module):
    return module.partition(".")[0] in PACKAGES


def take_out_packages():
    taken = {name: module for name, module in sys.modules.items() if is_stood_in_for(name)}
    for name in taken:
        del sys.modules[name]
    return taken


@contextlib.contextmanager
def stand_ins():
    """Within, importing one of PACKAGES gives its stand-in."""
    installed = take_out_packages()
    version = importlib.metadata.version
    importlib.metadata.version = VERSIONS.__getitem__
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.version = version
        take_out_packages()
        sys.modules.update(installed)


def load(file, name, **given):
    """His file as the module `name`, without asserts. given: names that it finds defined."""
    module = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    vars(module).update(given, print=silent)
    sys.modules[name] = module
    exec(compile(file.read_text(), str(file), "exec", optimize=1), vars(module))
    return module


@contextlib.contextmanager
def double_precision():
    """Within, new tensors are float64, and so is what his code calls float32."""
    float32, to_float32 = torch.float32, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = float32, to_float32
        torch.set_default_dtype(torch.float32)


# ---- 3. Models: our weights in his -----------------------------------------

EPSILON = 1e-6  # in all RMSNorms of ours


class Models:
    """build(ours) is his model of the same kind as ours, with his initial weights."""

    def __init__(self, path):
        with stand_ins():
            folder = path / "huggingface"
            load(folder / "configuration_llama_canon.py", "configuration_llama_canon")
            load(folder / "canon_helper.py", "canon_helper")
            self.llama = load(folder / "modeling_llama_canon.py", "modeling_llama_canon")

            folder = path / "lingua_modified" / "huggingface"
            sys.modules["his"] = types.ModuleType("his")
            load(folder / "canon_helper.py", "his.canon_helper")
            linear = {}
            for family in ("gla", "mamba2", "gated_deltanet"):
                for part in ("configuration", "modeling"):
                    file = f"{part}_{family}_canon"
                    linear[family] = load(folder / f"{file}.py", f"his.{file}")
        self.linear = linear

    def build(self, ours, epsilon=EPSILON):
        config = ours.config
        builders = {
            "attention": self.build_llama,
            "gla": self.build_gla,
            "mamba2": self.build_mamba2,
            "gdn": self.build_gdn,
        }
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
        his = builders[config.mixer](config, settings, epsilon)
        for module in his.modules():
            if hasattr(module, "use_fast_conv1d"):
                module.use_fast_conv1d = False  # his nn.Conv1d in place of a CUDA kernel
        return his.eval()  # his Mamba2 fuses more in training

    def build_llama(self, config, settings, epsilon):
        head_dim = config.d_model // config.n_head
        settings |= dict(rms_norm_eps=epsilon, num_attention_heads=config.n_head, head_dim=head_dim)
        if config.mlp == "swiglu-relu2":
            settings["hidden_act"] = "relu2"
        if config.pos == "rope4":
            settings["rope_dim"] = head_dim // 4
        his = self.llama.LlamaCanonForCausalLM(self.llama.LlamaCanonConfig(**settings))
        if config.pos == "nope":
            his.model.rotary_emb.inv_freq.zero_()  # rotary that turns nothing
        return his

    def build_gla(self, config, settings, epsilon):
        settings |= dict(norm_eps=epsilon, num_heads=4, expand_k=0.5, expand_v=1)
        settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
        files = self.linear["gla"]
        return files.GLACanonForCausalLM(files.GLACanonConfig(**settings))

    def build_gdn(self, config, settings, epsilon):
        heads = max(2, config.d_model // 128)
        head_dim = 3 * config.d_model // 4 // heads
        settings |= dict(norm_eps=epsilon, num_heads=heads, head_dim=head_dim, fuse_swiglu=False)
        settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
        files = self.linear["gated_deltanet"]
        return files.GatedDeltaNetCanonForCausalLM(files.GatedDeltaNetCanonConfig(**settings))

    def build_mamba2(self, config, settings, epsilon):
        head_dim = config.d_model * 2 // 16
        settings |= dict(layer_norm_epsilon=epsilon, num_heads=16, head_dim=head_dim, state_size=64)
        settings |= dict(n_groups=1, residual_in_fp32=False, use_conv_bias=config.short_conv)
        if config.mlp != "none":
            settings["mlp_type"] = "mlp10"
        files = self.linear["mamba2"]
        his_config = files.Mamba2CanonConfig(**settings)
        his_config.noconv1d = not config.short_conv
        his = files.Mamba2CanonForCausalLM(his_config)
        for layer in his.backbone.layers:
            layer.mixer.forward = layer.mixer.cuda_kernels_forward
        return his


# fmt: off
NAMES = [  # "*" stands for q, k and v; what is in a block, and what is not
    # ours            his Llama                   GLA                  GDN                  Mamba2
    ("embed",         "model.embed_tokens",       "model.embeddings",  "model.embeddings",  "backbone.embeddings"),
    ("blocks",        "model.layers",             "model.layers",      "model.layers",      "backbone.layers"),
    ("norm",          "model.norm",               "model.norm",        "model.norm",        "backbone.norm_f"),
    ("head",          "lm_head",                  "lm_head",           "lm_head",           "lm_head"),

    ("norm1",         "input_layernorm",          "attn_norm",         "attn_norm",         "norm"),
    ("canon_a",       "canonA",                   "canonA",            "canonA",            "canonA"),
    ("mixer.qkv",     "self_attn.*_proj",         "attn.*_proj",       "attn.*_proj",       None),
    ("mixer.into",    None,                       None,                None,                "mixer.in_proj"),
    ("mixer.canon_b", "self_attn.canonB",         "attn.canonB",       "attn.canonB",       "mixer.canonB"),
    ("mixer.conv",    None,                       "attn.*_conv1d",     "attn.*_conv1d",     "mixer.conv1d"),
    ("mixer.decay",   None,                       None,                "attn.a_proj",       None),
    ("mixer.decay.0", None,                       "attn.gk_proj.0",    None,                None),
    ("mixer.decay.1", None,                       "attn.gk_proj.1",    None,                None),
    ("mixer.A_log",   None,                       None,                "attn.A_log",        "mixer.A_log"),
    ("mixer.dt_bias", None,                       None,                "attn.dt_bias",      "mixer.dt_bias"),
    ("mixer.strength", None,                      None,                "attn.b_proj",       None),
    ("mixer.skip",    None,                       None,                None,                "mixer.D"),
    ("mixer.gate",    None,                       "attn.g_proj",       "attn.g_proj",       None),
    ("mixer.norm",    None,                       "attn.g_norm",       "attn.o_norm",       "mixer.norm"),
    ("mixer.out",     "self_attn.o_proj",         "attn.o_proj",       "attn.o_proj",       "mixer.out_proj"),
    ("norm2",         "post_attention_layernorm", "mlp_norm",          "mlp_norm",          "pre_mlp_layernorm"),
    ("canon_c",       "canonC",                   "canonC",            "canonC",            "canonC"),
    ("mlp.up",        "mlp.gate_proj",            "mlp.gate_proj",     "mlp.gate_proj",     "mlp.both_proj"),
    ("mlp.canon_d",   "mlp.canonD",               "mlp.canonD",        "mlp.canonD",        "mlp.canonD"),
    ("mlp.down",      "mlp.down_proj",            "mlp.down_proj",     "mlp.down_proj",     "mlp.down_proj"),
]
# fmt: on
FAMILIES = ["attention", "gla", "gdn", "mamba2"]
CONVOLUTIONS = "canon_a", "mixer.canon_b", "canon_c", "mlp.canon_d", "mixer.conv"


def to_his_names(config, ours):
    """{our name: tensor} as {his name: tensor}; for weights and for gradients."""
    names = {row[0]: row[1 + FAMILIES.index(config.mixer)] for row in NAMES}
    his = {}
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
        for his_name, part in split(config, names[name], tensor):
            his[start + his_name + end] = part
    return his


def split(config, his_name, tensor):
    """His names and their parts of the tensor, where he has several matrices for one of ours."""
    if "*" in his_name:
        parts = tensor.chunk(3)
        if config.mixer != "attention":  # values are twice as wide as queries and keys
            quarter = len(tensor) // 4
            parts = tensor.split([quarter, quarter, 2 * quarter])
        return [(his_name.replace("*", letter), part) for letter, part in zip("qkv", parts)]
    if his_name == "mlp.gate_proj" and config.mixer != "gla":  # GLA has both in one
        if config.mixer == "gdn" and "d" in config.canon:
            return [("mlp.both_proj", tensor)]
        return list(zip(["mlp.gate_proj", "mlp.up_proj"], tensor.chunk(2)))
    return [(his_name, tensor)]


class InOrder(nn.Module):
    """Steps from (x, state) to x, one after another."""

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
    """In his GLA and GDN q, k, v go through the short convolution (without one, through SiLU), and
    then through Canon-B. In ours Canon-B is first, and GLA without the convolution has no SiLU."""
    first = Silu() if mixer.conv is None else mixer.conv
    mixer.canon_b = InOrder(first, mixer.canon_b)
    mixer.conv = InOrder()  # does nothing


def compare(models, config, his_order=False, stir=True, epsilon=EPSILON):
    """The relative differences of logits and, of the tensor with the largest, gradients.

    stir  whether to move all weights away from their start, where norms are 1 and biases 0
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
        left_over = his.load_state_dict(to_his_names(config, weights), strict=False)
        for name in left_over.missing_keys + left_over.unexpected_keys:
            if not name.endswith("conv1d.weight") or config.short_conv:
                raise ValueError(f"only one of the two models has {name}")
        if his_order:
            for block in ours.blocks:
                take_his_order(block.mixer)

        tokens = torch.randint(config.vocab_size, (2, config.block_size))
        targets = torch.randint(config.vocab_size, tokens.shape)
        our_logits, _ = ours(tokens)
        his_logits = his(tokens, use_cache=False)[0]
        for logits in (our_logits, his_logits):
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        our_gradients = {name: parameter.grad for name, parameter in parameters.items()}
        his_gradients = {name: parameter.grad for name, parameter in his.named_parameters()}
        worst = 0
        for name, gradient in to_his_names(config, our_gradients).items():
            worst = max(worst, relative_error(gradient, his_gradients[name]))
        return relative_error(our_logits, his_logits), worst


SHAPE = dict(vocab_size=50, block_size=70, n_layer=2, n_head=4, d_model=64)
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


def compare_models(table, models):
    table.print("\nModels with the same weights, float64: relative differences, the worst over")
    table.print("Canon-none, A, B, C, D, AC, ACD, ABCD. GLA and GDN in his order (see below).\n")
    for name, changed in VARIANTS.items():
        canon_sets = ["", "a", "b", "c", "d", "ac", "acd", "abcd"]
        if any(field.startswith("canon_") for field in changed):
            canon_sets.remove("")
        if changed.get("mlp") == "none":
            canon_sets = ["", "a", "b", "ab"]
        logits, gradients = 0, 0
        for canon in canon_sets:
            config = Config(**SHAPE, canon=canon, **changed)
            found = compare(models, config, his_order=config.mixer in ("gla", "gdn"))
            logits = max(logits, found[0])
            gradients = max(gradients, found[1])
        text = f"logits {logits:.0e}, gradients {gradients:.0e}"
        table.check(name, text, max(logits, gradients) < 1e-11)


# ---- 4. Documents: his generators beside ours ------------------------------
#
# His documents are rewritten in our tokens. Then one function sums up each document, his or ours,
# in some numbers, such as its size. Documents are independent, so chi-squared tells whether these
# numbers are distributed alike. "valid" says that a document is right, and its labels are.

# His tokens. <eos> is the same as <ans>.
BOS = 9999
ANS = 9998
QUERY = 9997
SEPARATOR = 9700
DEPO_ANS = 9500
DEPO_QUERY = 9000  # and k

DOCUMENTS = {  # {row: (how many, task, its parameters)}
    "depo0": (4000, "depo0", dict(N=10, K=4)),
    "depo1": (4000, "depo1", dict(N=225, K=8, block_size=2047)),
    "depo2": (4000, "depo2", dict(N=75, K=16, block_size=2047)),
    "brevo1": (4000, "brevo1", dict(N=70, block_size=1023)),
    "brevo2": (4000, "brevo2", dict(N=30, block_size=1535)),
    "mano": (10000, "mano", dict(L=10, block_size=1023)),
    "cfg3f": (2000, "lano", dict(cfg="cfg3f", root=22, block_size=511)),
    "cfg3j": (1000, "lano", dict(cfg="cfg3j", root=25, block_size=1535)),
    "cfg3k": (1000, "lano", dict(cfg="cfg3k", root=25, block_size=1535)),
}


class Generators:
    """draw(task) is a document of his for a task of ours: tokens, and labels (1: in the loss)."""

    def __init__(self, path):
        folder = path / "data-synthetic-pretrain"
        missing = dict(random=random, defaultdict=defaultdict, deque=deque, bos_token_id=BOS)
        self.depo = load(folder / "Depo" / "depo.py", "his_depo", **missing)
        self.brevo = load(folder / "Brevo" / "brevo.py", "his_brevo", **missing)
        self.mano = load(folder / "Mano" / "mano.py", "his_mano", **missing)
        with stand_ins():
            lano = load(folder / "Lano-cfg" / "data_cfg.py", "his_data_cfg")
        self.grammars = {}
        for name in tasks.GRAMMARS:
            file = folder / "Lano-cfg" / "configs" / f"{name}.json"
            self.grammars[name] = lano.CFG_Config.from_graph(str(file))
        self.dice = random.Random(1)
        self.depo.rng = self.dice
        self.brevo.rng = self.dice

    def ask_last_quarter(self):
        """Brevo's question as in the paper's text, anywhere in the last quarter of the nodes. His
        code has max(len(nodes) * 3 // 4, len(nodes) - 1), the last one; this takes the first."""
        self.brevo.max = lambda quarter, last: quarter

    def ask_last_node(self):
        """Brevo's question as released."""
        self.brevo.max = max

    def draw(self, task):
        if isinstance(task, tasks.Depo):
            words = task.words
            settings = dict(mini_vocab=words.V, min_tlen=words.shortest, max_tlen=words.longest)
            settings["separator"] = bool(task.separator)
            found = self.depo.depo_data(task.N, task.K, **settings)
            return found[0], found["label"]
        if isinstance(task, tasks.Brevo):
            found = self.brevo.topsort_data(task.N, multi=task.words.longest > 1)
            return found[0], found["label"]
        if isinstance(task, tasks.Mano):
            lengths = range(1, task.L + 1)
            text = self.mano.encode_pure_arithmetic(self.dice, lengths, lengths, ["+", "-", "*"])
        if isinstance(task, tasks.Lano):
            text = [BOS] + self.draw_sentence(
                self.grammars[task.settings["cfg"]], task.grammar.root
            )
        return text, [1] * len(text)

    def draw_sentence(self, grammar, root):
        """As his generate_onedata_pure, but from any symbol."""
        level = [root in symbols for symbols in grammar.idx].index(True)
        node = grammar.all[level][grammar.idx[level].index(root)]
        type(node).rng = self.dice
        type(node).nt_counter = Counter()
        return [token for token, *tree in node.generate()]


def in_our_tokens(task, text):
    if isinstance(task, tasks.Depo):
        names = {BOS: task.bos, DEPO_ANS: task.ans}
        for k in range(1, task.K + 1):
            names[DEPO_QUERY + k] = task.ans + k
        if task.words.longest == 1:  # ours need no second form for the ends of words
            for letter in range(1, task.words.V + 1):
                names[task.words.V + letter] = letter
        return [names.get(token, token) for token in text if token != SEPARATOR]
    if isinstance(task, tasks.Brevo):
        names = {BOS: task.bos, QUERY: task.query, ANS: task.ans}
        return [names.get(token, token) for token in text[:-1]] + [task.eos]
    if isinstance(task, tasks.Lano):
        return [task.bos] + text[1:]
    # Mano: all but the numbers have two forms, drawn at random, and <ans> repeats the length.
    names = {}
    for i in range(3):
        names[1 + i] = task.plus + i
        names[5 + i] = task.plus + i
    for number in range(task.modulus):
        names[5000 + number] = 1 + number
    expression = [names[token] for token in text[2:-2]]
    return [task.bos, task.ans + text[1] // 10, *expression, task.ans, names[text[-1]]]


def sum_up_depo(task, tokens, labels):
    words = task.words.split(tokens[1:])
    place = 0
    while words[place][0] <= task.ans:
        place += 1
    sources, targets = words[0:place:2], words[1:place:2]
    hops, asked = words[place::4], words[place + 1 :: 4]
    answers = words[place + 3 :: 4]
    n = len(sources)
    following = dict(zip(sources, targets))
    valid = tokens[0] == task.bos and len(following) == n and len(set(asked)) == min(n, 10)
    counted = 0
    for (query,), node, answer in zip(hops, asked, answers):
        for _ in range(query - task.ans):
            node = following[node]
        valid = valid and node == answer
        counted += 1 + len(answer)
    node, distance = asked[0], 0
    while node != asked[1]:
        node = following[node]
        distance += 1
    return {
        "valid": valid and sum(labels) == counted,
        "nodes": n,
        "tokens": len(tokens),
        "tokens that count": counted,
        "length of the first word": len(words[0]),
        "first token": tokens[1],
        "last token of the first word": words[0][-1],
        "hops": hops[0][0],
        "place of the edge behind the first": 20 * sources.index(targets[0]) // n,
        "place of the first question's edge": 20 * sources.index(asked[0]) // n,
        "way from the first question to the second": distance,
    }


def sum_up_brevo(task, tokens, labels):
    words = task.words.split(tokens[1:])
    query = words.index((task.query,))
    edges, asked = words[:query], words[query + 1]
    answer = words[query + 3 : -1]
    prompt = tokens.index(task.ans) + 1
    parents = defaultdict(list)
    for parent, child in zip(edges[::2], edges[1::2]):
        parents[child].append(parent)
    children = Counter(edges[::2])
    right_labels = [0] * (prompt - 1) + [1] * (len(tokens) - prompt + 1)
    return {
        "valid": task.verify(tokens[:prompt], tokens[prompt:]) and labels == right_labels,
        "nodes with edges": len(set(edges)),
        "edges": len(edges) // 2,
        "nodes with parents": len(parents),
        "nodes with one child": list(children.values()).count(1),
        "nodes with four children": list(children.values()).count(4),
        "children of the first edge's parent": children[edges[0]],
        "parents of the question": len(parents[asked]),
        "children of the question": children[asked],
        "depth of the question": tasks.depth_of(parents, asked),
        "nodes in the answer": len(answer),
        "children of the answer's first node": children[answer[0]],
        "place of the answer's first node": 20 * edges.index(answer[0]) // len(edges),
        "first token": tokens[1],
        "tokens": len(tokens),
    }


def sum_up_mano(task, tokens, labels):
    expression = tokens[2:-2]
    operators = [token for token in expression if token >= task.plus]
    numbers = [token for token in expression if token < task.plus]
    found = []  # of operands, read from the right: (value, how many operators)
    for token in reversed(expression):
        if token < task.plus:
            found.append((token - 1, 0))
        else:
            (a, left), (b, right) = found.pop(), found.pop()
            value = (a + b, a - b, a * b)[token - task.plus] % task.modulus
            found.append((value, left + right + 1))
    right_value = found == [(tokens[-1] - 1, tokens[1] - task.ans)]
    return {
        "valid": right_value and all(labels),
        "operators": len(operators),
        "first operator": operators[0],
        "last operator": operators[-1],
        "multiplications": operators.count(task.plus + 2),
        "operators on the left": left,
        "first number": numbers[0],
        "last number": numbers[-1],
        "value": tokens[-1],
    }


def sum_up_lano(task, tokens, labels):
    sentence = tokens[1:]
    pairs = Counter(zip(sentence, sentence[1:]))
    found = {
        "valid": tokens[0] == task.bos and all(labels),
        "tokens": len(sentence),
        "first token": sentence[0],
        "last token": sentence[-1],
        "token in the middle": sentence[len(sentence) // 2],
    }
    for a in (1, 2, 3):
        for b in (1, 2, 3):
            found[f"share of {a} {b}"] = pairs[a, b] / len(sentence)
    return found


SUM_UP = {"depo": sum_up_depo, "brevo": sum_up_brevo, "mano": sum_up_mano, "lano": sum_up_lano}


def statistics(task, documents):
    """{statistic: its values} of documents, each a pair of tokens and labels."""
    sum_up = SUM_UP[task.name.rstrip("012")]
    found = defaultdict(list)
    for tokens, labels in documents:
        for name, value in sum_up(task, tokens, labels).items():
            found[name].append(value)
    return found


def our_documents(task, count):
    found = []
    for document in task.documents(np.random.default_rng(1), count):
        labels = [0] * len(document.tokens)
        for start, end in document.targets:
            for place in range(start, end):
                labels[place] = 1
        separators = getattr(task, "separator", [])
        tokens = [token for token in document.tokens if token not in separators]
        found.append((tokens, labels))
    return found


def his_documents(generators, task, count):
    found = []
    for _ in range(count):
        text, labels = generators.draw(task)
        found.append((in_our_tokens(task, text), labels))
    return found


def standard_deviations(ours, his):
    """How far apart two equally large samples of numbers are: chi-squared of their counts in some
    twenty bins, as standard deviations of a normal distribution (by Wilson and Hilferty)."""
    borders = np.unique(np.quantile(np.concatenate([ours, his]), np.arange(1, 20) / 20))
    bins = len(borders) + 1
    here = np.bincount(np.searchsorted(borders, ours), minlength=bins)
    there = np.bincount(np.searchsorted(borders, his), minlength=bins)
    used = here + there > 0
    here, there = here[used], there[used]
    freedom = len(here) - 1
    if freedom == 0:
        return 0.0
    chi2 = ((here - there) ** 2 / (here + there)).sum()
    variance = 2 / (9 * freedom)
    return float(((chi2 / freedom) ** (1 / 3) - 1 + variance) / variance**0.5)


LIMIT = 4.5  # standard deviations: by chance, one row in a thousand runs


def compare_generators(table, generators):
    table.print(
        "\nHis documents beside ours: the statistic that differs most, in standard deviations"
    )
    table.print(
        "(by chance, 2 or 3). Depo0 without its separators. Brevo's question as in the text.\n"
    )
    generators.ask_last_quarter()
    for row, (count, name, parameters) in DOCUMENTS.items():
        task = tasks.make_task(name, **parameters)
        ours = statistics(task, our_documents(task, count))
        his = statistics(task, his_documents(generators, task, count))
        valid = all(ours.pop("valid")) and all(his.pop("valid"))
        apart = {name: standard_deviations(ours[name], his[name]) for name in his}
        worst = max(apart, key=apart.get)
        parameters = {field: value for field, value in parameters.items() if len(field) == 1}
        what = " ".join([row, *(f"{field}={value}" for field, value in parameters.items())])
        found = f"{apart[worst]:.1f} ({worst}), of {len(apart)}; {count:,} documents each"
        found += ", all valid" if valid else ", NOT VALID"
        table.check(what, found, valid and apart[worst] < LIMIT)
    compare_orders(table, generators)


def compare_orders(table, generators):
    """How often each order of one graph is drawn."""
    parents = [[], [], [0, 1], [0], [2, 3], [2], [4, 5]]
    graph = defaultdict(list, enumerate(parents))
    author = generators.brevo.TopoSortDepthStats(len(parents))
    graph = author.subtree_from_query(graph, 6)
    dice = random.Random(2)
    ours, his = [], []
    for _ in range(20000):
        ours.append(tuple(tasks.draw_order(dice, parents, 6)))
        his.append(tuple(author.topological_sort(graph, dice)))
    orders = sorted(set(ours + his))
    apart = standard_deviations(list(map(orders.index, ours)), list(map(orders.index, his)))
    found = f"{apart:.1f}; {len(set(ours))} orders, and {len(set(his))}; 20,000 draws each"
    table.check("brevo, orders of one graph of 7 nodes", found, apart < LIMIT)


# ---- 5. Verifiers and grammars ---------------------------------------------


def spoil(kind, words, edges, dice):
    """Changes words, an answer's, in one of the ways of SPOILT. False where that is impossible."""
    i = dice.randrange(len(words) - 1)
    if kind == "two neighbours swapped":
        words.insert(i, words.pop(i + 1))
    if kind == "a node left out":
        del words[i]
    if kind == "a node too many":
        others = sorted(set(edges) - set(words))
        if not others:
            return False
        words.insert(i, dice.choice(others))
    if kind == "a node said twice":
        words.insert(i + 1, words[i])
    if kind == "half a word at the end":
        words.append((1,))
    return True


SPOILT = {  # {kind: whether both verifiers judge it alike}
    "as generated": True,
    "two neighbours swapped": True,
    "a node left out": True,
    "a node too many": True,
    "a node said twice": False,
    "half a word at the end": False,
}


def compare_verifiers(table, generators):
    table.print("\nAnswers, half his and half ours, judged by both verifiers.\n")
    dice = random.Random(3)
    author = generators.brevo.TopoSortDepthStats
    verifiers = {"brevo1": author.parse_tokens, "brevo2": author.parse_tokens_multi}
    for name, verify in verifiers.items():
        _, _, parameters = DOCUMENTS[name]
        task = tasks.make_task(name, **parameters)
        # His verifier wants 9999 at the end of an answer, his generator puts 9998 there.
        names = {task.bos: BOS, task.query: QUERY, task.ans: ANS, task.eos: BOS}
        documents = our_documents(task, 1000) + his_documents(generators, task, 1000)
        for kind, alike in SPOILT.items():
            if kind == "half a word at the end" and name == "brevo1":
                continue  # its words are single tokens
            verdicts = Counter()
            for tokens, _ in documents:
                start = tokens.index(task.ans) + 1
                edges = task.words.split(tokens[1 : tokens.index(task.query)])
                words = task.words.split(tokens[start:-1])
                if spoil(kind, words, edges, dice):
                    answer = [*chain.from_iterable(words), task.eos]
                    in_his = [names.get(token, token) for token in tokens[:start] + answer]
                    verdicts[task.verify(tokens[:start], answer), verify(in_his)[0]] += 1
            ours = verdicts[True, True] + verdicts[True, False]
            his = verdicts[True, True] + verdicts[False, True]
            other = verdicts[True, False] + verdicts[False, True]
            found = f"right: {ours} by ours, {his} by his, of {verdicts.total()}"
            if alike:
                found += f"; {other} judged otherwise"
                table.check(f"{name}, {kind}", found, other == 0)
            else:
                table.note(f"{name}, {kind}", found, ours == 0)


def compare_grammars(table, generators):
    table.print("\nLano's grammars: their rules; all next tokens' chances in the shortest of 300")
    table.print("sentences; and whether it parses, as it is and with one token changed.\n")
    dice = random.Random(4)
    for name, texts in tasks.GRAMMARS.items():
        grammar, his = tasks.Grammar(texts), generators.grammars[name]
        same_rules = rules_of(his) == grammar.rules
        sentence = min((his.generate_onedata_pure(dice) for _ in range(300)), key=len)
        chart = grammar.chart(torch.tensor([sentence]))[0]
        chances, _ = his.solve_dp_prob_highprecision(sentence, debug=False)
        chances = torch.tensor(chances, dtype=chart.dtype)
        apart = (chart / chart.sum(-1, keepdim=True) - chances).abs().max().item()
        sentences = [sentence]
        for place in dice.sample(range(len(sentence)), 5):
            other = list(sentence)
            other[place] = other[place] % 3 + 1
            sentences.append(other)
        ours = (grammar.chart(torch.tensor(sentences))[:, -1, 0] > 0).tolist()
        theirs = [his.solve_dp_noneq_fast(other, no_debug=True)[0] == 0 for other in sentences]
        found = f"{'same' if same_rules else 'OTHER'} rules; chances {apart:.0e} apart;"
        found += f" parse: {sum(ours)} by ours, {sum(theirs)} by his, of {len(sentences)}"
        table.check(
            f"{name}, {len(sentence)} tokens",
            found,
            same_rules and apart < 1e-12 and ours == theirs,
        )


def rules_of(his):
    """His grammar as {symbol: list of tuples of symbols}."""
    rules = {}
    for level, symbols_below in zip(his.all, his.idx[1:]):
        for node in level:
            rules[node.id] = []
            for child in node.children:
                rules[node.id].append(tuple(symbols_below[i] for i in child))
    return rules


# ---- 6. Known differences --------------------------------------------------


def measure_orders(table, models):
    """SiLU and Canon-B in GLA and GDN."""
    for mixer, canon, short_conv in (
        ("gla", "", False),
        ("gla", "acd", False),
        ("gla", "abcd", False),
        ("gla", "abcd", True),
        ("gdn", "abcd", False),
        ("gdn", "abcd", True),
    ):
        step = "short convolution" if short_conv else "SiLU"
        ours, his = f"B, {step}", f"{step}, B"
        if mixer == "gla" and not short_conv:
            ours = "B"
        if "b" not in canon:
            ours, his = "nothing", step
        config = Config(**START, mixer=mixer, canon=canon, short_conv=short_conv)
        start, _ = compare(models, config, stir=False)
        moved, _ = compare(models, config)
        switched, _ = compare(models, config, his_order=True)
        found = f"ours {ours}; his {his}: {start:.1%} at the start, {moved:.0%} moved"
        found += f"; switched {switched:.0e}"
        table.note(f"{mixer}, Canon-{canon or 'none'}, q k v", found, switched < 1e-11)


def measure_epsilons(table, models):
    for mixer in ("attention", "gla", "mamba2", "gdn"):
        config = Config(**START, mixer=mixer, canon="acd")
        start, _ = compare(models, config, mixer in ("gla", "gdn"), stir=False, epsilon=1e-5)
        moved, _ = compare(models, config, mixer in ("gla", "gdn"), epsilon=1e-5)
        found = f"ours 1e-6; his recipes' 1e-5: {start:.1%} at the start, {moved:.1%} moved"
        table.note(f"{mixer}, RMSNorm's epsilon", found)
    usual, UnitLength.epsilon = UnitLength.epsilon, 1e-6
    start, _ = compare(models, config, his_order=True, stir=False)
    moved, _ = compare(models, config, his_order=True)
    UnitLength.epsilon = usual
    found = f"ours 1e-12, of the length; fla's 1e-6, of its square: {start:.1%} at the start"
    table.note("gdn, epsilon of q's and k's length", f"{found}, {moved:.1%} moved")


def measure_starts(table, models):
    """Initial weights: which kinds are distributed otherwise?"""
    for mixer in FAMILIES:
        short_conv = None if mixer == "attention" else True
        shape = START | dict(n_layer=24)
        config = Config(**shape, mixer=mixer, canon="abcd", short_conv=short_conv)
        torch.manual_seed(0)
        ours = CanonGPT(config)
        with double_precision():
            his = dict(models.build(ours).named_parameters())
        kinds = defaultdict(list)  # {name without its layer: [our values, his values], ..}
        for name, tensor in to_his_names(config, dict(ours.named_parameters())).items():
            parts = [part for part in name.split(".")[1:] if not part.isdecimal()]
            kinds[".".join(parts)].append((tensor.flatten(), his[name].flatten()))
        unlike = []
        for kind, pairs in kinds.items():
            here = torch.cat([pair[0] for pair in pairs]).detach().numpy()
            there = torch.cat([pair[1] for pair in pairs]).detach().numpy()
            if standard_deviations(here, there) > LIMIT:
                kind = kind.removesuffix(".weight").rpartition(".")[2]
                unlike.append(f"{kind} {here.std():.2f} (his {there.std():.2f})")
        if unlike:
            table.note(f"{mixer}, start, standard deviations", ", ".join(unlike))
        else:
            table.check(f"{mixer}, start", f"all {len(kinds)} kinds of weights", True)


def measure_documents(table, generators):
    generators.ask_last_node()
    count = 10_000  # puts the known difference 7 to 10 standard deviations apart
    for name in ("brevo1", "brevo2"):
        _, _, parameters = DOCUMENTS[name]
        task = tasks.make_task(name, **parameters)
        ours = statistics(task, our_documents(task, count))["nodes in the answer"]
        his = statistics(task, his_documents(generators, task, count))["nodes in the answer"]
        apart = standard_deviations(ours, his)
        found = f"ours in the last quarter, his the last node: {np.mean(ours):.1f} and"
        found += f" {np.mean(his):.1f} nodes in an answer ({apart:.0f} standard deviations,"
        found += f" {count:,} documents each)"
        table.note(f"{name}, question", found, apart > LIMIT)

    texts = []
    for separator in (False, True):
        generators.depo.rng = random.Random(5)
        texts.append(generators.depo.depo_data(75, 16, separator=separator)[0])
    plain, separated = texts
    same = [token for token in separated if token != SEPARATOR] == plain
    found = "his: an option, before each edge; ours: after each edge, in Depo0 only"
    table.note("depo, separator", found, same and separated[1] == SEPARATOR)
    found = "his: two forms of <bos>, <len>, + - * and <ans>, and <ans> repeats the length"
    table.note("mano, tokens", found, generators.mano.knowledge_augment)
    found = f"his: one token for both, {ANS}; his verifier wants {BOS} for <eos>"
    table.note("brevo, <ans> and <eos>", found, generators.brevo.eos_token_id == ANS)


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
    values = {kind: (folder / "fields" / f"{file}.txt").read_text() for kind, file in files.items()}
    counts = {kind: len(text.strip().split("\n")) for kind, text in values.items()}
    ours = {kind: tasks.PERSON[kind] for kind in files}
    found = ", ".join(f"{count} {kind}s" for kind, count in counts.items())
    table.check("capo, how many values", found, counts == ours)

    fields = ["first_name", "middle_name", "last_name", "birthmonth", "birthday", "birthyear"]
    fields += ["birthcity", "university", "field", "company1name", "company1city"]  # in our order
    person = {"id": 1} | {field: f"<{field}>" for field in fields}
    in_order = {}
    for order in (0, 1):
        text = his.get_text_simple3(person, order=order)
        in_order[order] = sorted(fields, key=lambda field: text.index(f"<{field}>"))
    ours_swapped = fields[:-2] + [fields[-1], fields[-2]]
    found = "ours: employer, work city; his default: work city, employer; switched (order=1) equal"
    equal = in_order[1] == fields and in_order[0] == ours_swapped
    table.note("capo, order of facts", found, equal)


START = SHAPE | dict(n_layer=5)  # as in Depo0's smallest models


def measure_differences(table, models, generators, path):
    table.print(
        "\nKnown differences. Shares of the logits' size: in models of 5 layers and 64 dims with"
    )
    table.print('equal weights, our initial ones ("at the start") and others ("moved").\n')
    measure_orders(table, models)
    measure_epsilons(table, models)
    measure_starts(table, models)
    measure_documents(table, generators)
    measure_biographies(table, path)


# ---- 7. His generators, for generators.py ----------------------------------


def peer_batches(path, batches):
    """{name: make} for {name: (a task of ours, tokens in a batch)}, where he has that task.

    make() draws his documents until they have so many tokens, and returns how many they have. They
    are not packed into windows, for which he has no code. His Capo writes English text, so its
    tokens do not compare.
    """
    generators = Generators(Path(path))
    he_has = (tasks.Depo, tasks.Brevo, tasks.Mano, tasks.Lano)
    found = {}
    for name, (task, tokens) in batches.items():
        if isinstance(task, he_has):
            found[name] = functools.partial(draw_batch, generators, task, tokens)
    return found


def draw_batch(generators, task, tokens):
    made = 0
    while made < tokens:
        text, _ = generators.draw(task)
        made += len(text)
    return made


# ---- 8. The command --------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="PATH", help="a clone of PhysicsLM4")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table there")
    options = parser.parse_args(argv)
    if not (options.path / "data-synthetic-pretrain").is_dir():
        parser.error(f"{options.path} is no clone of github.com/facebookresearch/PhysicsLM4")
    torch.set_num_threads(1)

    table = Table()
    table.print(STAND_INS)
    models, generators = Models(options.path), Generators(options.path)
    compare_models(table, models)
    compare_generators(table, generators)
    compare_verifiers(table, generators)
    compare_grammars(table, generators)
    measure_differences(table, models, generators, options.path)
    table.print(f"\n{table.failed} rows are not as they should be.")
    if options.out:
        options.out.write_text(table.text)
    return 1 if table.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
