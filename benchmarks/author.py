"""Does this repository agree with the author's released code?   python benchmarks/author.py PATH

PATH is a clone of github.com/facebookresearch/PhysicsLM4. None of his code is here: this file
imports it from PATH. His models get our weights, in float64, and should give the same logits and
gradients. His generators' documents should have the statistics of ours. Both verifiers judge the
same answers, and both parsers the same sentences. What is known to differ is left out, or switched
to his way: results/README.md lists it. All of it takes some four minutes on a CPU and needs no
other package. The exit status is 1 if a row is not equal.

1 his code and what stands in for packages, 2 models, 3 documents, 4 verifiers, grammars and
people, 5 the command.
"""

import argparse
import builtins
import functools
import random
import sys
import types
from collections import Counter, defaultdict, deque
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
import tasks
from canon_gpt import CanonGPT, Config, NoCanon, relu2
from kernels import relative_error

# ---- 1. His code, and what stands in for packages --------------------------
#
# His models need other packages in old versions, and some that run on CUDA only. A stand-in takes
# their place, whether they are installed or not. All that makes his models what they are is his:
# projections, Canon layers and short convolutions, norms, rotary, attention, gates, MLPs,
# residuals, initial weights.
#
# Stand-ins, written here: transformers' base classes, activations and rotary frequencies; einops'
# reshapes; in place of CUDA kernels, a loop for the recurrences of flash-linear-attention and
# mamba_ssm, and a convolution for causal_conv1d (in Mamba2's own; elsewhere his nn.Conv1d runs).
# Changed: what his code calls float32 is float64 here, and its asserts are skipped. One of them
# forbids Canon-B in GLA, another names a variable that does not exist.

PACKAGES = "transformers", "einops", "fla", "mamba_ssm", "causal_conv1d", "xlsxwriter", "importlib"
# His files ask importlib for these versions, and end if they find others.
VERSIONS = {"transformers": "4.47.1", "flash-linear-attention": "0.3.0"}


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


def gated_delta_rule(q, k, v, g, beta, **unused):
    """q and k have unit length, with our epsilon of 1e-12. (fla's is 1e-6, of the square.)"""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
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


FORMULAS = {  # what his files import from PACKAGES, and call here
    "PretrainedConfig": PretrainedConfig,
    "PreTrainedModel": PreTrainedModel,
    "ACT2FN": {"silu": F.silu, "relu2": relu2},
    "AttentionMaskConverter": types.SimpleNamespace(_ignore_causal_mask_sdpa=yes),
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
    """Any of the PACKAGES, or a module in one. What his files import, but do not call here, is an
    empty class or a decorator."""

    def __getattr__(self, name):
        if name in FORMULAS:
            return FORMULAS[name]
        return type(name, (), {}) if name[0].isupper() else decorator_that_changes_nothing


@functools.cache
def load(file):
    """His file as a module. It finds some names defined that it does not define itself."""
    module = types.ModuleType(f"his_{file.stem}")
    given = dict(random=random, np=np, defaultdict=defaultdict, deque=deque, bos_token_id=BOS)
    vars(module).update(given, print=silent)
    importing = functools.partial(import_for, file.parent)
    vars(module)["__builtins__"] = vars(builtins) | {"__import__": importing}
    code = compile(file.read_text(), str(file), "exec", optimize=1)  # 1: without asserts
    exec(code, vars(module))
    return module


def import_for(folder, name, *others):
    """What `import name` does in his files: a file beside them, a stand-in, or the usual."""
    beside = folder / f"{name}.py"
    if beside.exists():
        return load(beside)
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
    his = BUILDERS[config.mixer](path, config, settings)
    for module in his.modules():
        if hasattr(module, "use_fast_conv1d"):
            module.use_fast_conv1d = False  # his nn.Conv1d in place of a CUDA kernel
    return his.eval()  # his Mamba2 fuses more in training


def build_llama(path, config, settings):
    head_dim = config.d_model // config.n_head
    settings |= dict(rms_norm_eps=EPSILON, num_attention_heads=config.n_head, head_dim=head_dim)
    if config.mlp == "swiglu-relu2":
        settings["hidden_act"] = "relu2"
    if config.pos == "rope4":
        settings["rope_dim"] = head_dim // 4
    code = load(path / "huggingface" / "modeling_llama_canon.py")
    his = code.LlamaCanonForCausalLM(code.LlamaCanonConfig(**settings))
    if config.pos == "nope":
        his.model.rotary_emb.inv_freq.zero_()  # rotary that turns nothing
    return his


def load_linear(path, name):
    return load(path / "lingua_modified" / "huggingface" / f"modeling_{name}_canon.py")


def build_gla(path, config, settings):
    settings |= dict(norm_eps=EPSILON, num_heads=4, expand_k=0.5, expand_v=1)
    settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
    code = load_linear(path, "gla")
    return code.GLACanonForCausalLM(code.GLACanonConfig(**settings))


def build_gdn(path, config, settings):
    heads = max(2, config.d_model // 128)
    head_dim = 3 * config.d_model // 4 // heads
    settings |= dict(norm_eps=EPSILON, num_heads=heads, head_dim=head_dim, fuse_swiglu=False)
    settings |= dict(use_short_conv=config.short_conv, zeyuan_layernorm=True)
    code = load_linear(path, "gated_deltanet")
    return code.GatedDeltaNetCanonForCausalLM(code.GatedDeltaNetCanonConfig(**settings))


def build_mamba2(path, config, settings):
    head_dim = config.d_model * 2 // 16
    settings |= dict(layer_norm_epsilon=EPSILON, num_heads=16, head_dim=head_dim, state_size=64)
    settings |= dict(n_groups=1, residual_in_fp32=False, use_conv_bias=config.short_conv)
    if config.mlp != "none":
        settings["mlp_type"] = "mlp10"
    code = load_linear(path, "mamba2")
    his_config = code.Mamba2CanonConfig(**settings)
    his_config.noconv1d = not config.short_conv
    his = code.Mamba2CanonForCausalLM(his_config)
    for layer in his.backbone.layers:
        layer.mixer.forward = layer.mixer.cuda_kernels_forward
    return his


BUILDERS = {
    "attention": build_llama,
    "gla": build_gla,
    "gdn": build_gdn,
    "mamba2": build_mamba2,
}

# Names of ours, and of his Llama, GLA, GDN and Mamba2. "*" stands for q, k and v. First what is not
# in a block, then what is.
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


def to_his_names(config, ours):
    """{our name: tensor} as {his name: tensor}; for weights and for gradients."""
    column = 1 + list(BUILDERS).index(config.mixer)
    rows = [line.split() for line in NAMES.splitlines() if line]
    names = {row[0]: row[column] for row in rows}
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


class HisOrder(nn.Module):
    """In his GLA and GDN q, k, v go through the short convolution (without one, through SiLU), and
    then through Canon-B. In ours Canon-B is first, and GLA without the convolution has no SiLU."""

    def __init__(self, mixer):
        super().__init__()
        self.conv, self.canon_b = mixer.conv, mixer.canon_b

    def forward(self, x, state=None):
        x = F.silu(x) if self.conv is None else self.conv(x, state)
        return self.canon_b(x, state)


# Within, what either model calls float32 is float64.
@patch.object(torch, "float32", torch.float64)
@patch.object(torch.Tensor, "float", torch.Tensor.double)
def differences(path, config):
    """The relative differences of logits and, of the tensor with the largest, gradients."""
    torch.manual_seed(0)
    ours = CanonGPT(config)
    parameters = dict(ours.named_parameters())
    for parameter in parameters.values():  # at their start, norms are 1 and biases 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    his = build(path, ours)
    weights = {name: parameter.data for name, parameter in parameters.items()}
    left_over = his.load_state_dict(to_his_names(config, weights), strict=False)
    for name in left_over.missing_keys + left_over.unexpected_keys:
        if not name.endswith("conv1d.weight") or config.short_conv:
            raise ValueError(f"only one of the two models has {name}")
    if config.mixer in ("gla", "gdn"):
        for block in ours.blocks:
            block.mixer.canon_b = HisOrder(block.mixer)
            block.mixer.conv = NoCanon()  # changes nothing

    tokens = torch.randint(config.vocab_size, (2, config.block_size))
    targets = torch.randint(config.vocab_size, tokens.shape)
    our_logits, _ = ours(tokens)
    his_logits = his(tokens, use_cache=False)[0]
    for logits in (our_logits, his_logits):
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    our_gradients = {name: parameter.grad for name, parameter in parameters.items()}
    his_gradients = {name: parameter.grad for name, parameter in his.named_parameters()}
    errors = []
    for name, gradient in to_his_names(config, our_gradients).items():
        errors.append(relative_error(gradient, his_gradients[name]))
    # NumPy's max keeps a NaN; Python's could leave it out.
    return relative_error(our_logits, his_logits), np.max(errors)


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

# Each function below that compares yields rows: what is compared, what was found, and whether that
# is equal.


def compare_models(path):
    """Over all sets of Canon points. GLA and GDN in his order: `HisOrder`."""
    for name, changed in VARIANTS.items():
        canon_sets = ["", "a", "b", "c", "d", "ac", "acd", "abcd"]
        if any(field.startswith("canon_") for field in changed):
            canon_sets.remove("")
        if changed.get("mlp") == "none":
            canon_sets = ["", "a", "b", "ab"]
        found = []
        for canon in canon_sets:
            config = Config(**SHAPE, n_layer=2, canon=canon, **changed)
            found.append(differences(path, config))
        logits, gradients = np.max(found, axis=0)
        text = f"logits {logits:.0e}, gradients {gradients:.0e}"
        yield name, text, logits < 1e-11 and gradients < 1e-11


def compare_starts(path):
    """Not GLA, whose gate starts otherwise here, and not Mamba2: results/README.md says how."""
    for mixer, short_conv in {"attention": None, "gdn": True}.items():
        config = Config(**SHAPE, n_layer=24, mixer=mixer, canon="abcd", short_conv=short_conv)
        torch.manual_seed(0)
        ours = CanonGPT(config)
        his = dict(build(path, ours).named_parameters())
        kinds = defaultdict(list)  # {name without its layer: [our values, his values], ..}
        for name, tensor in to_his_names(config, dict(ours.named_parameters())).items():
            parts = [part for part in name.split(".")[1:] if not part.isdecimal()]
            kinds[".".join(parts)].append((tensor.detach().flatten(), his[name].detach().flatten()))
        unlike = []
        for kind, pairs in kinds.items():
            here = torch.cat([pair[0] for pair in pairs]).numpy()
            there = torch.cat([pair[1] for pair in pairs]).numpy()
            if standard_deviations(here, there) > LIMIT:
                unlike.append(kind)
        found = f"{len(kinds)} kinds of weights, differently distributed: {unlike or 'none'}"
        yield f"{mixer}, initial weights", found, not unlike


# ---- 3. Documents: his generators beside ours ------------------------------
#
# His documents are rewritten in our tokens. Then one function sums up each document, his or ours,
# in some numbers, such as its size. Documents are independent, so chi-squared tells whether these
# numbers are distributed alike. "valid" says that a document is right, and its labels are.

# His tokens. <eos> is the same as <ans>.
BOS = 9999
ANS = 9998
QUERY = 9997
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
        self.depo = load(folder / "Depo" / "depo.py")
        self.brevo = load(folder / "Brevo" / "brevo.py")
        self.mano = load(folder / "Mano" / "mano.py")
        lano = load(folder / "Lano-cfg" / "data_cfg.py")
        self.grammars = {}
        for name in tasks.GRAMMARS:
            file = folder / "Lano-cfg" / "configs" / f"{name}.json"
            self.grammars[name] = lano.CFG_Config.from_graph(str(file))
        self.dice = random.Random(1)
        self.depo.rng = self.dice
        self.brevo.rng = self.dice
        # Brevo's question as in the paper's text, anywhere in the last quarter of the nodes. His
        # code has max(len(nodes) * 3 // 4, len(nodes) - 1), the last one; this takes the first.
        self.brevo.max = lambda quarter, last: quarter

    def draw(self, task):
        if isinstance(task, tasks.Depo):
            words = task.words
            settings = dict(mini_vocab=words.V, min_tlen=words.shortest, max_tlen=words.longest)
            found = self.depo.depo_data(task.N, task.K, **settings)
            return found[0], found["label"]
        if isinstance(task, tasks.Brevo):
            found = self.brevo.topsort_data(task.N, multi=task.words.longest > 1)
            return found[0], found["label"]
        if isinstance(task, tasks.Mano):
            lengths = range(1, task.L + 1)
            text = self.mano.encode_pure_arithmetic(self.dice, lengths, lengths, ["+", "-", "*"])
        if isinstance(task, tasks.Lano):
            grammar = self.grammars[task.settings["cfg"]]
            text = [BOS] + grammar.generate_onedata_pure(self.dice)
        return text, [1] * len(text)


def in_our_tokens(task, text):
    if isinstance(task, tasks.Depo):
        names = {BOS: task.bos, DEPO_ANS: task.ans}
        for k in range(1, task.K + 1):
            names[DEPO_QUERY + k] = task.ans + k
        if task.words.longest == 1:  # ours need no second form for the ends of words
            for letter in range(1, task.words.V + 1):
                names[task.words.V + letter] = letter
        return [names.get(token, token) for token in text]
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


def compare_documents(generators):
    """Depo0 without its separators, and Brevo's question as in the paper's text."""
    for row, (count, name, parameters) in DOCUMENTS.items():
        task = tasks.make_task(name, **parameters)
        ours = statistics(task, our_documents(task, count))
        his = statistics(task, his_documents(generators, task, count))
        valid = all(ours.pop("valid")) and all(his.pop("valid"))
        apart = {name: standard_deviations(ours[name], his[name]) for name in his}
        worst = max(apart, key=apart.get)
        sizes = [f"{field}={value}" for field, value in parameters.items() if len(field) == 1]
        found = f"{apart[worst]:.1f} ({worst}), of {len(apart)}; {count:,} documents each"
        found += ", all valid" if valid else ", NOT VALID"
        yield " ".join([row, *sizes]), found, valid and apart[worst] < LIMIT


def compare_orders(generators):
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
    yield "brevo, orders of one graph of 7 nodes", found, apart < LIMIT


# ---- 4. Verifiers, grammars and people -------------------------------------

# What is not compared: a node said twice, and half a word at the end. His verifier allows both.
SPOILT = "as generated", "two neighbours swapped", "a node left out", "a node too many"


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
    return True


def compare_verifiers(generators):
    dice = random.Random(3)
    author = generators.brevo.TopoSortDepthStats
    verifiers = {"brevo1": author.parse_tokens, "brevo2": author.parse_tokens_multi}
    for name, verify in verifiers.items():
        _, _, parameters = DOCUMENTS[name]
        task = tasks.make_task(name, **parameters)
        # His verifier wants 9999 at the end of an answer, his generator puts 9998 there.
        names = {task.bos: BOS, task.query: QUERY, task.ans: ANS, task.eos: BOS}
        documents = our_documents(task, 1000) + his_documents(generators, task, 1000)
        for kind in SPOILT:
            verdicts = Counter()
            for tokens, _ in documents:
                start = tokens.index(task.ans) + 1
                edges = task.words.split(tokens[1 : tokens.index(task.query)])
                words = task.words.split(tokens[start:-1])
                if spoil(kind, words, edges, dice):
                    answer = [*chain.from_iterable(words), task.eos]
                    in_his = [names.get(token, token) for token in tokens[:start] + answer]
                    verdicts[task.verify(tokens[:start], answer), verify(in_his)[0]] += 1
            other = verdicts[True, False] + verdicts[False, True]
            found = f"{verdicts[True, True]} of {verdicts.total()} right; {other} judged otherwise"
            yield f"{name}, {kind}", found, other == 0


def compare_grammars(generators):
    """In the shortest of 300 sentences, the chances of all next tokens. Whether it parses, as it is
    and with one token changed."""
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
        equal = same_rules and apart < 1e-12 and ours == theirs
        yield f"{name}, {len(sentence)} tokens", found, equal


def rules_of(his):
    """His grammar as {symbol: list of tuples of symbols}."""
    rules = {}
    for level, symbols_below in zip(his.all, his.idx[1:]):
        for node in level:
            rules[node.id] = []
            for child in node.children:
                rules[node.id].append(tuple(symbols_below[i] for i in child))
    return rules


def compare_people(path):
    files = {
        "first name": "first_name",
        "middle name": "middle_name",
        "last name": "last_name",
        "birth city": "city",
        "university": "university",
        "major": "field",
        "employer": "company",
    }
    folder = path / "data-synthetic-pretrain" / "Capo-bioS-bioR" / "fields"
    ours, his = {}, {}
    for kind, name in files.items():
        ours[kind] = tasks.PERSON[kind]
        his[kind] = len((folder / f"{name}.txt").read_text().strip().split("\n"))
    found = ", ".join(f"{kind} {count}" for kind, count in his.items())
    yield "capo, how many values", found, ours == his


# ---- 5. The command --------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="PATH", help="a clone of PhysicsLM4")
    path = parser.parse_args(argv).path
    if not (path / "data-synthetic-pretrain").is_dir():
        parser.error(f"{path} is no clone of github.com/facebookresearch/PhysicsLM4")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    generators = Generators(path)
    comparisons = {
        "Models with the same weights: the largest relative differences": compare_models(path),
        "Initial weights": compare_starts(path),
        "Documents: the statistic that differs most, in standard deviations (by chance, 2 or 3)":
            chain(compare_documents(generators), compare_orders(generators)),
        "Answers, half his and half ours, judged by both verifiers": compare_verifiers(generators),
        "Grammars: rules, chances of all next tokens, and whether sentences parse":
            compare_grammars(generators),
        "People": compare_people(path),
    }  # fmt: skip
    failed = 0
    for title, rows in comparisons.items():
        print(f"{title}\n")
        for what, found, equal in rows:
            failed += not equal
            print(f"{'equal' if equal else 'NOT EQUAL':<10} {what:<44} {found}", flush=True)
        print()
    print(f"{failed} rows are not equal.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
