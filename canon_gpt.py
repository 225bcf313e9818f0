"""A Transformer with Canon layers (Zeyuan Allen-Zhu, https://arxiv.org/abs/2512.17351).

Canon layers sit at up to four points of a block, A to D; `canon="abcd"` means all four. In a model
of width D with attention and a gated MLP, Canon-A and Canon-C are D wide, Canon-B is 3D wide (q, k
and v), and Canon-D is about 16D/3 wide (gate and up):

    x -> norm -> [A] -> q,k,v -> [B] -> rotary -> attend -> out   (+x)       canon_a, canon_b
    x -> norm -> [C] -> gate,up -> [D] -> act(gate)*up -> down    (+x)       canon_c, canon_d

Part I is the whole Transformer: 1 the Canon layer, 2 positions, 3 attention, 4 MLP, 5 norm and
block, 6 configuration, 7 model. Part II replaces attention by linear recurrences: 8 the recurrence,
9 the same by matrix products, 10 GLA, Mamba2 and Gated DeltaNet. Part I runs without Part II.

To try your own part, write it and enter it in its table: CANONS, POSITIONS, MIXERS or MLPS.
examples/README.md shows how.

Shapes in comments: B sequences, T tokens of each, D the model's width, H heads, K the width of a
head's queries and keys, V that of its values.

Most layers' `forward` takes a `state`, for generation, where a text comes in pieces. In training it
is None, so on a first reading skip the lines that mention it.
"""

import dataclasses
import math
import operator
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import can_fuse_gate, causal_conv, causal_conv_gated_triton, is_exporting

# ---- 1. The Canon layer ----------------------------------------------------
#
# Attention can look anywhere, but it needs a whole layer just to tell each token which one comes
# before it. Suppose a text says "Ada Lovelace", and later "Ada" again. To predict "Lovelace", layer
# 1 tells each token its left neighbour, so that layer 2 can search for the token that follows an
# "Ada". This second layer is called an induction head (Olsson et al. 2022,
# https://arxiv.org/abs/2209.11895). A Canon layer does the first step with four weights per
# channel.


class Canon(nn.Module):
    """Adds to each hidden state a weighted sum of itself and the three before it, with one weight
    per distance and channel:

        h'_t = h_t + w_0*h_t + w_1*h_{t-1} + w_2*h_{t-2} + w_3*h_{t-3}             (paper Eq. 4.1)

    As a loop over tokens, with h = 0 before the first one:

        y = x.clone()  # (B, T, width)
        for t in range(x.shape[1]):
            for i in range(min(4, t + 1)):
                y[:, t] += weight[i] * x[:, t - i]

    `causal_conv` computes the same fast, and kernels.py shows how. The paper's variants leave out
    the residual h_t, or apply SiLU to the sum.
    """

    def __init__(self, width, config):
        super().__init__()
        kernel = config.canon_kernel
        # The weights are drawn as Conv1d draws its own: for kernel 4 from uniform(-1/2, 1/2), of
        # variance 1/12. So if tokens are independent, what the layer adds at first is
        # sqrt(4/12) = 0.58 times as large as its input. With normal(0, 0.02), which Linear layers
        # have here, it would be 0.04 times. CanonGPT redraws only Linear and Embedding layers, so a
        # bare nn.Parameter keeps this draw. (train.py's weight decay leaves it out, too.)
        bound = kernel**-0.5
        self.weight = nn.Parameter(torch.empty(kernel, width).uniform_(-bound, bound))
        self.residual = config.canon_residual
        self.silu = config.canon_silu

    def forward(self, x, state=None):
        """(B, T, width) -> same. With a state (see `State`), x is the next piece of a text."""
        # If you edit this, let MLP.fuses_gate return False: on a GPU, a kernel replaces Canon-D's.
        n_earlier = len(self.weight) - 1
        tail = exchange_tail(self, x, n_earlier, state)  # the inputs before x; None means zeros
        if not self.silu:
            return causal_conv(x, self.weight, self.residual, tail)
        y = F.silu(causal_conv(x, self.weight, residual=False, tail=tail))
        return x + y if self.residual else y  # the residual bypasses SiLU


class NoCanon(nn.Module):
    """Stands in where there is no Canon layer. (nn.Identity takes no state.)"""

    def forward(self, x, state=None):
        return x


# Your own Canon layer is a class with the same constructor and forward, and one more entry here.
# examples/relatives.py has some to copy.
CANONS = {"conv": Canon}


def canon_at(point, width, config):
    """The Canon layer at this point ("a" .. "d"), or NoCanon where the config has none."""
    if point not in config.canon:
        return NoCanon()
    layer = CANONS[config.canon_type](width, config)
    if config.canon_frozen:
        layer.requires_grad_(False)
    return layer


# The rest of this section is for generation only; on a first reading, go on with section 2.
#
# To generate text, a model reads it in pieces: first the prompt, then each new token. We call this
# a stream. What the layers must remember between pieces is kept in one `State`, which is empty at
# first. Each layer has its own entry there:
#
#     state[a Canon layer]     its last three inputs (kernel - 1), (B, 3, width)
#     state[an Attention]      all keys (after rotary) and values so far: the KV cache
#     state[a linear mixer]    the matrix S of its recurrence, (B, H, K, V) (Part II)
#     state[a ShortConv]       its last three inputs, as for Canon (Part II)
#     state[the model]         how many tokens it has read


class State:
    """What the layers of one model remember between the pieces of a text: state[layer].

    Don't pass one under activation checkpointing, which runs a block twice: the second time, the
    block would find its own inputs.

    It isn't a dict, because wrappers such as PyTorch's FSDP2 and Hugging Face's accelerate pass
    copies of dicts to the modules inside, and what a layer writes into a copy is lost.
    """

    def __init__(self, entries=()):
        self.entries = dict(entries)

    def __contains__(self, layer):
        return layer in self.entries

    def __getitem__(self, layer):
        return self.entries[layer]

    def __setitem__(self, layer, entry):
        self.entries[layer] = entry

    def copy(self):
        """Forks the stream. A shallow copy is enough, because layers replace their entries and
        never modify them."""
        return State(self.entries)


def exchange_tail(layer, x, n, state):
    """Returns the n inputs before x, which state[layer] kept, and has it keep the last n inputs, x
    included, for the next piece.

    x        (B, T, width)
    n        at least 1
    returns  (B, n, width), zeros at the start of the stream; None, which `causal_conv` takes for
             zeros, if there is no stream
    """
    if state is None:
        return None
    B, T, width = x.shape
    tail = state[layer] if layer in state else x.new_zeros(B, n, width)
    # `cat` copies, even if T >= n, when nothing of the tail is left. A view would hold all of x in
    # memory, and break AOTInductor, which assumes contiguous inputs (findings/aoti_strides.sh).
    state[layer] = torch.cat([tail[:, T:], x[:, -n:]], dim=1)
    return tail


# ---- 2. Positions ----------------------------------------------------------
#
# Without positions, an attention layer sees which tokens came earlier, but not in which order.
# (Deeper layers can infer some of it, because a later token has seen more than an earlier one.)
# Rotary positions (RoPE) turn each pair of channels of q and k by an angle that grows with the
# position, so that positions enter q_i . k_j only as i - j. ALiBi and H-ALiBi (section 3) add a
# bias to these products, the attention scores.


class Positions(nn.Module):
    """For "nope": no positions. It is the base class of the others, and of your own.

    Each attention layer has its own instance, and calls both methods in each forward pass.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head  # `bias` may differ from head to head

    def turn(self, x, start):
        """Mark the positions start .. start + T - 1 in queries and keys.

        x        (B, T, any number of heads, K)
        returns  the same shape
        """
        return x

    def bias(self, T, T_all, device):
        """What to add to the attention scores, (H, T, T_all), or None for nothing. The T queries
        are the last of T_all tokens. -inf forbids a pair; attention itself hides the future."""
        return None


def rotary_angles(positions, n_turned, base):
    """(T, n_turned / 2), for T positions: position t turns pair j by t * base^(-2j / n_turned)."""
    channels = torch.arange(0, n_turned, 2, dtype=torch.float32, device=positions.device)
    frequencies = base ** (-channels / n_turned)  # radians per position
    return positions[:, None] * frequencies


def rotate(x, cos, sin):
    """Turn R pairs of channels, (x_j, x_{j+R}) for j < R. Channels from 2R on stay as they are.

    x         (B, T, H, K)
    cos, sin  (T, R), of the angle of each pair at each position
    returns   (B, T, H, K)
    """
    R = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (T, 1, R): the same for all heads
    x1, x2, rest = x.split([R, R, x.shape[-1] - 2 * R], dim=-1)
    turned = torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest], dim=-1)
    return turned.to(x.dtype)  # under autocast x has 16 bits, cos and sin 32


class Rotary(Positions):
    """For "rope": turns all channels of a head (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    For longer texts, people often raise `base`, which makes most pairs turn more slowly.
    """

    base = 10000.0
    divisor = 1  # the first 1/divisor of a head's channels are turned

    def __init__(self, config):
        super().__init__(config)
        # A head's turned channels come in pairs.
        config.check_width(multiple_of=config.n_head * 2 * self.divisor)
        self.block_size = config.block_size
        self.n_turned = config.d_model // config.n_head // self.divisor  # channels of a head
        self.make_tables(device=None)

    def turn(self, x, start):
        if self.cos.device != x.device:  # load_state_dict(.., assign=True) moves no buffer
            self.make_tables(x.device)
        rows = slice(start, start + x.shape[1])
        return rotate(x, self.cos[rows], self.sin[rows])

    @torch.inference_mode(False)  # tables made in inference mode could not be used in training
    def make_tables(self, device):
        # As buffers they move with the model. (If `turn` computed them, compiled code would do so
        # again for every element of q and k.) Not persistent: checkpoints leave them out.
        positions = torch.arange(self.block_size, device=device)
        angles = rotary_angles(positions, self.n_turned, self.base)
        self.register_buffer("cos", angles.cos(), persistent=False)  # (block_size, n_turned / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _apply(self, fn, recurse=True):
        """What model.to(..), bfloat16() and to_empty(..) call. It makes the tables again, because
        bfloat16 is too coarse for them, and `to_empty` leaves them uninitialized."""
        if self.cos.is_meta:  # fn can't read a meta tensor
            self.make_tables("cpu")
        super()._apply(fn, recurse)
        self.make_tables(self.cos.device)
        return self


class QuarterRotary(Rotary):
    """For "rope4", the paper's RoPE(1/4): turns the first quarter of each head's channels."""

    divisor = 4


# ---- 3. Attention ----------------------------------------------------------
#
# A mixer is the part of a block that lets each token see the tokens before it. In Part I this is
# attention; Part II has others.


class Mixer(nn.Module):
    """The base class of all mixers. Your own is a subclass, and one more entry of MIXERS.

    Its constructor takes (config). Its forward(x, state), (B, T, D) -> same, looks back only, and
    sends its projections through self.canon_b, which is canon_at("b", their width, config).
    """

    # How many parameters it has, in units of D^2: attention's q, k, v and out have one each. The
    # MLP gets the rest of a block's 12. (Count yours, because nothing checks this number.)
    budget = 4
    streams = True  # False: it needs the whole text again for each new piece


class Attention(Mixer):
    """y_i = sum_{j<=i} softmax_j(q_i . k_j / sqrt(K)) v_j, with Canon-B on q, k, v together.

    Canon-B comes before rotary, because rotary turns the two channels of a pair together, so that
    q_i . k_j depends on i - j only. A Canon layer weighs each channel on its own. After rotary it
    would scale a pair's two channels differently, and i and j themselves would matter.
    """

    def __init__(self, config):
        super().__init__()
        config.check_width(multiple_of=config.n_head)  # D = n_head * K
        D = config.d_model
        self.n_head = config.n_head
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.canon_b = canon_at("b", 3 * D, config)
        self.out = nn.Linear(D, D, bias=False)
        self.positions = POSITIONS[config.pos](config)

    def forward(self, x, state=None):
        """(B, T, D) -> same. Of the T_all tokens of the stream so far, x has the last T.

        state[self] is all keys, turned, and all values: (B, T_all, H, K) each.
        """
        B, T, D = x.shape
        H = self.n_head
        qkv = self.canon_b(self.qkv(x), state)  # (B, T, 3D)
        qk, v = qkv.split([2 * D, D], dim=-1)
        qk = qk.unflatten(-1, (2 * H, -1))  # (B, T, 2H, K)
        v = v.unflatten(-1, (H, -1))  # (B, T, H, K)

        start = 0  # how many tokens came before x
        if state is not None and self in state:
            past_k, past_v = state[self]  # the KV cache
            start = past_k.shape[1]
        # One call for q and k is faster than two.
        q, k = self.positions.turn(qk, start).chunk(2, dim=2)  # (B, T, H, K) each
        if start > 0:
            k = torch.cat([past_k, k], dim=1)  # (B, T_all, H, K)
            v = torch.cat([past_v, v], dim=1)
        if state is not None:
            state[self] = k.contiguous(), v.contiguous()  # a view would keep q in memory, too

        scores_mask = self.mask(T, start + T, like=q)  # (T, T_all), (H, T, T_all) or None
        q, k, v = (u.transpose(1, 2) for u in (q, k, v))  # (B, H, T or T_all, K)
        # y = softmax(q k^T / sqrt(K) + mask) v, (B, H, T, K). Without a mask, `is_causal` hides the
        # future.
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=scores_mask, is_causal=(scores_mask is None)
        )
        return self.out(y.transpose(1, 2).reshape(B, T, D))

    def mask(self, T, T_all, like):
        """The causal mask, (T, T_all) or (H, T, T_all), in the dtype and on the device of `like`.
        It is added to the attention scores; -inf hides a token.

        Returns None if there is no bias and no tokens came before: then PyTorch's own causal mask
        does the same, faster.
        """
        bias = self.positions.bias(T, T_all, like.device)  # (H, T, T_all) or None
        if bias is None and T == T_all:
            return None
        if bias is None:
            bias = torch.zeros(T, T_all, device=like.device)
        later = distances(T, T_all, like.device) < 0
        return bias.masked_fill(later, -math.inf).to(like.dtype)


def distances(T, T_all, device):
    """(T, T_all): i - j, for i among the last T positions and j among all; negative if j is later
    than i."""
    i = torch.arange(T_all - T, T_all, device=device)[:, None]
    return i - torch.arange(T_all, device=device)


# Rotary positions turn q and k. These two add a bias to the attention scores instead.


class ALiBi(Positions):
    """For "alibi": head h of H adds -(i - j) * 2^(-8h/H) to the attention scores, h = 1..H (Press
    et al. 2021, https://arxiv.org/abs/2108.12409).

    Under autocast the mask is in 16 bits, where large distances share a value.
    """

    def bias(self, T, T_all, device):
        h = head_numbers(self.n_head, device)
        slope = 2.0 ** (-8 * h / self.n_head)
        return -slope * distances(T, T_all, device)


class HALiBi(Positions):
    """For "halibi": of H heads, head 1 sees one token, itself; head 2 sees the nearest two; and so
    on up to head H/2. The other half see everything. (This is our reading of the paper.)"""

    def bias(self, T, T_all, device):
        h = head_numbers(self.n_head, device)
        in_first_half = h <= self.n_head // 2
        too_far = (distances(T, T_all, device) >= h) & in_first_half  # (H, T, T_all)
        return torch.zeros(too_far.shape, device=device).masked_fill(too_far, -math.inf)


def head_numbers(n_head, device):
    """1 .. H, as (H, 1, 1), to broadcast against distances (T, T_all)."""
    h = torch.arange(1, n_head + 1, dtype=torch.float32, device=device)
    return h[:, None, None]


POSITIONS = {
    "rope": Rotary,
    "rope4": QuarterRotary,
    "nope": Positions,
    "alibi": ALiBi,
    "halibi": HALiBi,
}

MIXERS = {"attention": Attention}  # Part II adds three


def make_mixer(name, config):
    mixer = MIXERS[name](config)
    if "b" in config.canon:  # your own mixer may lack it
        has_b = hasattr(mixer, "canon_b")
        require(has_b, "canon", config.canon, f"mixer {name} has no Canon-B, self.canon_b")
    return mixer


# ---- 4. MLP ----------------------------------------------------------------

BLOCK_BUDGET = 12  # parameters of mixer and MLP together, in D^2: attention takes 4, its MLP 8


def relu2(x):
    """Squared ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668)."""
    return F.relu(x).square()


MLPS = {  # the activation, and whether there is a gate; your own is one more entry
    "swiglu": (F.silu, True),  # Shazeer 2020, https://arxiv.org/abs/2002.05202
    "swiglu-relu2": (relu2, True),  # SwiGLU with relu2 in SiLU's place
    "silu": (F.silu, False),
    "relu2": (relu2, False),
    "none": (None, False),  # blocks have no MLP
}


class MLP(nn.Module):
    """The feed-forward part of a block: gated, down(act(gate) * up), or standard, down(act(up)),
    with Canon-D before the activation.

    budget  its parameters, in D^2. With attention it is 8, so the hidden width is 8D/3 if gated,
            and 4D if not
    """

    def __init__(self, config, budget):
        super().__init__()
        D = config.d_model
        self.act, self.gated = MLPS[config.mlp]
        matrices = 3 if self.gated else 2  # gate, up and down, or up and down: D x hidden each
        exact_hidden = budget * D / matrices  # because matrices * D * hidden = budget * D^2
        hidden = max(8, 8 * round(exact_hidden / 8))  # the nearest multiple of 8, fast on GPUs
        up_width = 2 * hidden if self.gated else hidden
        self.up = nn.Linear(D, up_width, bias=False)  # if gated, it makes gate and up side by side
        self.canon_d = canon_at("d", up_width, config)
        self.down = nn.Linear(hidden, D, bias=False)

    def forward(self, x, state=None):
        """(B, T, D) -> same."""
        h = self.up(x)  # (B, T, up_width)
        h = self.apply_gate(h, state) if self.gated else self.act(self.canon_d(h, state))
        return self.down(h)

    def apply_gate(self, h, state):
        """(B, T, 2 hidden), gate and up side by side -> (B, T, hidden)."""
        if state is None and self.fuses_gate(h):  # on a GPU, in one kernel
            return causal_conv_gated_triton(h, self.canon_d.weight, self.canon_d.residual)
        gate, up = self.canon_d(h, state).chunk(2, dim=-1)
        return self.act(gate) * up

    def fuses_gate(self, h):
        """Whether one GPU kernel does Canon-D and the gate: if Canon-D is the usual layer, and SiLU
        follows it. (Then Canon-D's own forward doesn't run, and neither do hooks on it.)"""
        plain = type(self.canon_d) is Canon and not self.canon_d.silu
        return plain and self.act is F.silu and can_fuse_gate(h, self.canon_d.weight)


# ---- 5. The norm and the block ---------------------------------------------


def at_least_float32(x):
    """x in float32 (float64 stays), because bfloat16 is too coarse for means and long decays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def matmul_dtype(x):
    """The dtype in which matrices multiply: autocast's where it is on, otherwise x's. Tensors on
    PyTorch's "meta" device, which have no numbers, follow the CPU's autocast."""
    device = "cpu" if x.is_meta else x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (https://arxiv.org/abs/1910.07467)."""

    eps = 1e-6

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        weight = at_least_float32(self.weight)
        y = F.rms_norm(at_least_float32(x), x.shape[-1:], weight, self.eps)
        return y.to(matmul_dtype(x))  # under autocast 16 bits, which the next matrices take


class Block(nn.Module):
    """Mixer and MLP. Each reads the normed x, and its output is added to x. Canon-A and Canon-C
    follow the norms.

    There is no dropout, because the paper has none. To add some, apply it in `forward` to what is
    added to x.
    """

    def __init__(self, config, mixer_name):
        super().__init__()
        self.norm1 = RMSNorm(config.d_model)
        self.canon_a = canon_at("a", config.d_model, config)
        self.mixer = make_mixer(mixer_name, config)  # with Canon-B inside
        self.mlp = None
        if config.mlp != "none":
            self.norm2 = RMSNorm(config.d_model)
            self.canon_c = canon_at("c", config.d_model, config)
            self.mlp = MLP(config, BLOCK_BUDGET - self.mixer.budget)  # with Canon-D inside

    def forward(self, x, state=None):
        """(B, T, D) -> same."""
        x = x + self.mixer(self.canon_a(self.norm1(x), state), state)
        if self.mlp is not None:
            x = x + self.mlp(self.canon_c(self.norm2(x), state), state)
        return x


# ---- 6. Configuration ------------------------------------------------------


@dataclasses.dataclass
class Config:
    """Everything that defines a model. Raises Refused for a value that is not allowed.

    The default size is GPT-2's; a run takes its size from its preset (train.py, PRESETS).
    """

    vocab_size: int  # how many different tokens there are
    block_size: int  # context: the longest sequence, in tokens
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads (linear mixers have their own number)
    d_model: int = 768  # the width D
    mixer: str = "attention"  # attention, gla, mamba2, gdn, or a pattern: gdn,attention
    mlp: str = "swiglu"  # swiglu, swiglu-relu2, silu, relu2, none
    pos: str = "rope"  # attention's positions: rope, rope4, nope, alibi, halibi
    canon: str = ""  # the points that have a Canon layer, such as abcd; by default none
    canon_type: str = "conv"  # which Canon layer: conv, or your own entry of CANONS
    canon_kernel: int = 4  # how many tokens a Canon layer mixes, 2 to 8
    canon_residual: bool = True  # add a Canon layer's input to its output
    canon_silu: bool = False  # apply SiLU to a Canon layer's convolution
    canon_frozen: bool = False  # never train Canon's random initial weights
    short_conv: bool | None = None  # linear mixers' own convolution (None: each mixer's default)
    tie_embeddings: bool = False  # one matrix for embedding and output head

    # The rest of this class checks the values.

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                whole = hasattr(value, "__index__") and value >= 1
                require(whole, field.name, value, "allowed: whole numbers from 1")
                setattr(self, field.name, operator.index(value))  # NumPy's become Python's
            elif field.type is str:
                require(isinstance(value, str), field.name, value, "must be a string")
            elif field.type in (bool, bool | None):
                require(isinstance(value, field.type), field.name, value, "allowed: True, False")
        for name, table in {"mlp": MLPS, "pos": POSITIONS, "canon_type": CANONS}.items():
            value = getattr(self, name)
            require(value in table, name, value, f"allowed: {', '.join(table)}")
        self.check_canon()
        self.check_mixer()

    def check_canon(self):
        self.canon = "".join(sorted(self.canon.lower()))  # "DA" becomes "ad"
        each_once = re.fullmatch("a?b?c?d?", self.canon)
        allowed = "allowed: the letters a, b, c, d, each at most once"
        require(each_once, "canon", self.canon, allowed)
        missing = self.mlp == "none" and re.search("[cd]", self.canon)
        require(not missing, "canon", self.canon, "c and d are at the MLP, and mlp is none")
        kernel = self.canon_kernel
        require(2 <= kernel <= 8, "canon_kernel", kernel, "allowed: 2 to 8")

    def check_mixer(self):
        for name in self.mixer_names:
            allowed = f"allowed: {', '.join(MIXERS)}, or several joined by commas"
            require(name in MIXERS, "mixer", self.mixer, allowed)
        fits = len(self.mixer_names) <= self.n_layer
        require(fits, "mixer", self.mixer, f"a pattern longer than n_layer = {self.n_layer}")

    @property
    def mixer_names(self):
        return self.mixer.split(",")

    def check_width(self, multiple_of):
        """Refuse a width that a layer cannot cut into `multiple_of` equal parts."""
        is_multiple = self.d_model % multiple_of == 0
        settings = f"n_head {self.n_head}, mixer {self.mixer}, pos {self.pos}"
        allowed = f"must be a multiple of {multiple_of} with {settings}"
        require(is_multiple, "d_model", self.d_model, allowed)


class Refused(ValueError):
    """A value that is not allowed. The text is one line for the user."""


def require(ok, name, value, allowed):
    """Raise Refused unless the value is ok; `allowed` says what would be."""
    if not ok:
        raise Refused(f"{name} = {value!r}: {allowed}")


# ---- 7. The model ----------------------------------------------------------


class CanonGPT(nn.Module):
    """Embedding, blocks, norm, head: a language model with Canon layers.

        model = CanonGPT(Config(vocab_size=50, block_size=128, n_layer=2, n_head=4, d_model=64,
                                canon="abcd"))
        logits, loss = model(tokens, targets)

    To feed a sequence in pieces, pass the same State to each call (section 1 says what it holds):

        state = State()
        logits = [model(piece, state=state)[0] for piece in tokens.split(10, dim=1)]

    The logits are those of the whole sequence at once.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            mixer_name = config.mixer_names[layer % len(config.mixer_names)]  # they take turns
            self.blocks.append(Block(config, mixer_name))
        self.norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)  # the output head
        self.init_weights()
        self.tie_head()
        # False if any layer says `streams = False`. Generation then reads the whole text again for
        # each token.
        self.streams = all(getattr(module, "streams", True) for module in self.modules())

    def init_weights(self):
        """Draw the weights of all Linear and Embedding layers from normal(0, 0.02), and set biases
        to zero.

        Other Parameters keep the initial values that their class gave them: those of Canon and
        RMSNorm, and some of the linear mixers'. (GPT-2 also divides the last matrices of mixer and
        MLP by sqrt(2 n_layer). The paper does not.)
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:  # an Embedding has none
                    nn.init.zeros_(module.bias)

    def forward(self, tokens, targets=None, state=None):
        """Next-token logits, and the loss if there are targets.

        tokens   (B, T) int64, T >= 1
        targets  (B, T) int64, what should follow each token, and a negative number, such as -1 or
                 PyTorch's -100, where nothing is asked; or None
        state    None, or the State of a stream, of which `tokens` is the next piece. An error
                 leaves it unchanged
        returns  logits (B, T, vocab_size); the mean loss of the targets, in nats, or None
        """
        limit = self.config.block_size
        length = self.tokens_read(state) + tokens.shape[1]
        require(length <= limit, "length", length, f"block_size allows {limit} tokens")
        new_state = None if state is None else state.copy()  # what the layers write into
        self.tie_head()  # to_empty() and load_state_dict(.., assign=True) untie it
        x = self.embed(tokens)  # (B, T, D)
        for block in self.blocks:
            x = block(x, new_state)
        logits = self.head(self.norm(x))  # (B, T, vocab_size)
        loss = None
        if targets is not None:
            n_targets = (targets >= 0).sum().clamp(min=1)  # without any, the loss is 0 / 1
            loss = summed_loss(logits, targets) / n_targets
        if state is not None:
            new_state[self] = length
            state.entries = new_state.entries  # only now, so that an error changes nothing
        return logits, loss

    def tie_head(self):
        """With tie_embeddings, head and embedding have one weight. (But not if the head has been
        wrapped, or a weight parametrized or quantized.)"""
        types = type(self.head), type(self.head.weight), type(self.embed.weight)
        if self.config.tie_embeddings and types == (nn.Linear, nn.Parameter, nn.Parameter):
            self.head.weight = self.embed.weight

    def tokens_read(self, state):
        """How many tokens the model has read in this stream."""
        if state is None:
            return 0
        if not self.streams:
            raise ValueError("a layer of this model cannot read a text in pieces")
        if state.entries and self not in state:  # copy.deepcopy copies the layers, too
            raise ValueError("this state is another model's; to fork a stream, use state.copy()")
        return state[self] if self in state else 0

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, stop=None, generator=None):
        """Continue tokens (B, T), which have no padding. Returns (B, up to T + max_new_tokens).

        temperature  0 takes the likeliest token; above 0, tokens are drawn from
                     softmax(logits / temperature), without top-k
        stop         a token that ends a row, which is then filled up with it; when all rows have
                     ended, generation stops
        generator    a torch.Generator on the tokens' device

        Dropout and the like stay on unless you call model.eval() first.
        """
        is_batch = tokens.dim() == 2 and tokens.shape[1] > 0
        require(is_batch, "tokens", tuple(tokens.shape), "must be (B, T), T >= 1")
        require(temperature >= 0, "temperature", temperature, "allowed: 0 or more")
        room = self.config.block_size + 1 - tokens.shape[1]  # the last token is never read
        allowed = f"block_size leaves room for {room}"
        require(max_new_tokens <= room, "max_new_tokens", max_new_tokens, allowed)
        state = State() if self.streams else None  # None: each step reads all tokens again
        unread = tokens
        # Which rows have produced `stop`: (B, 1).
        done = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            logits, _ = self(unread, state=state)
            logits = logits[:, -1].float()  # (B, vocab_size), after the last token
            if temperature == 0:
                next_token = logits.argmax(-1, keepdim=True)
            else:
                probabilities = (logits / temperature).softmax(-1)
                next_token = torch.multinomial(probabilities, 1, generator=generator)
            if stop is not None:
                next_token = next_token.masked_fill(done, stop)
                done |= next_token == stop
            tokens = torch.cat([tokens, next_token], dim=1)
            unread = next_token if self.streams else tokens
            if stop is not None and done.all():  # reading it makes the CPU wait for the GPU
                break
        return tokens

    def parameter_counts(self):
        """The number of parameters in all, in the embeddings (the head included), and in Canon."""
        embeddings = {self.embed.weight, self.head.weight}  # a set: if tied, they are one
        canon = [p for name, p in self.named_parameters() if "canon_" in name]
        return {
            "total": count_numbers(self.parameters()),
            "embeddings": count_numbers(embeddings),
            "canon": count_numbers(canon),
        }


def summed_loss(logits, targets):
    """The cross-entropy of the targets that are not negative, in nats: its sum."""
    logits = at_least_float32(logits).flatten(0, 1)  # (B T, vocab_size)
    targets = targets.flatten().clamp(min=-1)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


def count_numbers(parameters):
    return sum(parameter.numel() for parameter in parameters)


# ============================================================================
# Part II: linear mixers
# ============================================================================

# ---- 8. The linear recurrence ----------------------------------------------
#
# Attention keeps every key and value, so each token costs more than the last. A linear mixer keeps
# one matrix S (K x V) per head instead. It is a sum of products k v^T, so that S^T k gives back
# what was written under keys like k. Each step fades S, writes one pair into it, and reads it once.
# With the vectors k_t, v_t, q_t of token t, and S zero at first:
#
#     S_t = (I - b_t k_t k_t^T) diag(d_t) S_{t-1} + w_t k_t v_t^T            o_t = S_t^T q_t
#
#                       d_t, the decay          w_t    bracket    q, k, v
#     GLA               one per key channel     1      none       projections
#     Mamba2            one number              dt_t   none       projections; heads share q and k
#     Gated DeltaNet    one number              b_t    yes        projections; q, k of unit length
#
# (Mamba2 computes its strength dt_t from the token. GLA and Gated DeltaNet divide q by sqrt(K), as
# attention does.) The bracket is the factor I - b_t k_t k_t^T. Without it, two values that are
# written under one key pile up. With it, and a k_t of unit length, the share b_t of what the faded
# S holds under k_t is removed before v_t is written. This is the "delta rule", because it is one
# step, of size b_t, of gradient descent on |S^T k_t - v_t|^2 / 2.
#
# The loop below is the definition. Section 9 computes the same, fast.


def linear_recurrence(q, k, v, log_decay, beta=None, S=None):
    """The recurrence, step by step.

    q, k       (B, T, H, K), T >= 1; H may be 1, for queries and keys that all heads share
    v          (B, T, H, V)
    log_decay  (B, T, H) or (B, T, H, K): ln of d_t, at most 0
    beta       (B, T, H): b_t, which is also w_t; or None: no bracket, and w_t = 1 (for another
               w_t, pass w_t v_t as v)
    S          (B, H, K, V), before the first step; None: zeros
    returns    o (B, T, H, V) in v's dtype, and S after the last step; both are computed in float32
               (float64 if v is)
    """
    B, T, H, V = v.shape
    out_dtype = v.dtype
    q, k, v, log_decay = map(at_least_float32, (q, k, v, log_decay))
    decay = log_decay.exp().reshape(B, T, H, -1, 1)  # (B, T, H, K or 1, 1)
    S = v.new_zeros(B, H, k.shape[3], V) if S is None else at_least_float32(S)
    o = []
    for t in range(T):
        key, query = k[:, t, :, :, None], q[:, t, :, :, None]  # (B, H or 1, K, 1)
        S = decay[:, t] * S
        write = v[:, t]  # (B, H, V)
        if beta is not None:
            held = (key * S).sum(-2)  # S^T k_t
            write = beta[:, t, :, None] * (write - held)  # b_t times what S does not hold yet
        S = S + key * write[:, :, None]  # S + k_t write^T
        o.append((query * S).sum(-2))  # S^T q_t
    return torch.stack(o, dim=1).to(out_dtype), S


# ---- 9. The same by matrix products ----------------------------------------
#
# Cut time into N chunks of C steps. Let S be the matrix before a chunk, and count its steps from 1.
# Below, d_1 .. d_t is a product of decays (with one decay per key channel, a product per channel).
# Three matrices have a row for each step t:
#
#     Q_in     d_1 .. d_t q_t          what reads S at step t             q * fade_in
#     K_in     d_1 .. d_t k_t          what reads S under k_t             k * fade_in
#     K_out    d_{t+1} .. d_C k_t      what is left of k_t at the end     k * fade_out
#
# 1. Without the bracket, a chunk is a small attention, o = A V, on top of what S gives. For C = 4:
#
#         q1.k1
#         d2 q2.k1          q2.k2                                        = A (`decayed_products`)
#         d2 d3 q3.k1       d3 q3.k2       q3.k3
#         d2 d3 d4 q4.k1    d3 d4 q4.k2    d4 q4.k3    q4.k4
#
# 2. With the bracket, step t doesn't write v_t, but u_t: b_t times the difference between v_t and
#    what is already held under k_t. This comes from S and from the chunk's earlier steps:
#
#         u_t = b_t (v_t - S^T (d_1 .. d_t k_t) - sum_{s<t} L_ts u_s)
#         L_ts = (d_{s+1} .. d_t k_t) . k_s          (A with k in place of q, zero on its diagonal)
#
#    So S_t = diag(d_t) S_{t-1} + k_t u_t^T, and point 1 holds with u for v. To find all u_t at
#    once, write them as the rows of U, and all b_t as the diagonal matrix b:
#
#         U = b (V - K_in S - L U),    so    U = R (V - K_in S)    with R = (I + b L)^-1 b
#
#    U0 = R V and W = R K_in do not need S, so all chunks compute them at once. Then U = U0 - W S.
#    This is the "WY form" of the delta rule (Yang et al. 2024, https://arxiv.org/abs/2406.06484).
#
# 3. The outputs of the chunk are o = Q_in S + A U.
#
# 4. The next chunk starts with the matrix d_1 .. d_C S + K_out^T U.
#
# Decays are kept as logarithms, g_t = ln d_t, so that d_2 d_3 follows from a difference of sums,
# (g_1 + g_2 + g_3) - g_1. As a ratio of products, d_1 d_2 d_3 / d_1, it would be 0 / 0 when decays
# are strong.


def decay_until_end(g):
    """The log decay from each step to the end: for g (.., C, K or 1), of the same shape.

    Row s is g_{s+1} + .. + g_C.
    """
    last = torch.zeros_like(g[..., :1, :])
    later = torch.cat([g[..., 1:, :], last], dim=-2)  # moved up a row: row s is g_{s+1}
    return later.flip(-2).cumsum(-2).flip(-2)  # cumsum runs from the start: flip, sum, flip back


def decay_between(g):
    """The log decay from step s to step t: g (.., C) gives (.., C, C). [t, s] is g_{s+1} + .. + g_t
    for s <= t, and -inf for s > t.

    It is a difference of two sums from the start, which can be large and close to each other. So
    it is computed in float64, or float32 on Apple's GPUs (MPS), which have no float64.

    No log decay counts as less than -1000, because exp(-1000) is 0 even in float64. With -1e20 in
    both sums, other terms would be lost in rounding; with -inf, their difference would be NaN.
    """
    precise = torch.float32 if g.device.type == "mps" else torch.float64
    sums = g.to(precise).clamp(min=-1000).cumsum(-1)
    # [t, s] is (g_1 + .. + g_t) - (g_1 + .. + g_s)
    between = sums[..., :, None] - sums[..., None, :]
    future = torch.ones_like(between, dtype=torch.bool).triu(1)  # s > t, where exp(-inf) = 0
    return between.to(g.dtype).masked_fill(future, -math.inf)


def decayed_products(q, k, g):
    """A (.., C, C) with A[t, s] = sum_c q[t, c] k[s, c] exp(g[s+1, c] + .. + g[t, c]) for s <= t,
    and 0 for s > t.

    q, k (.., C, K); g (.., C, K), and then C is a power of two, or (.., C, 1).
    """
    C = q.shape[-2]
    if g.shape[-1] == 1:  # one decay for all channels can be taken out of the sum
        return q @ k.mT * decay_between(g[..., 0]).exp()
    # With a decay per channel, exp(..) stays in the sum. Split it at a step between s and t: k
    # fades from s to there, and q from there to t, so that neither overflows. No one step suits all
    # pairs (t, s). So start with blocks of one step, and join neighbours. A pair across two blocks
    # splits where these meet:
    #
    #     A_early   0
    #     across    A_late
    q, k, g = torch.broadcast_tensors(q, k, g)  # heads may share q and k
    A = (q * k).sum(-1)[..., None, None]  # (.., C, 1, 1): C blocks of one step
    size = 1
    while size < C:
        # s is in the early block of a pair of blocks, and t in the late one.
        in_pairs = (-1, 2, size)  # the pairs, early or late, steps of a block
        g_early, g_late = g.unflatten(-2, in_pairs).unbind(-3)  # (.., pairs, size, K)
        k_early, _ = k.unflatten(-2, in_pairs).unbind(-3)
        _, q_late = q.unflatten(-2, in_pairs).unbind(-3)
        k_faded = k_early * decay_until_end(g_early).exp()  # from s to where the blocks meet
        q_faded = q_late * g_late.cumsum(-2).exp()  # from there to t
        across = q_faded @ k_faded.mT  # (.., pairs, size, size)
        A_early, A_late = A.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([A_early, torch.zeros_like(A_early)], -1)
        lower = torch.cat([across, A_late], -1)
        A = torch.cat([upper, lower], -2)
        size *= 2
    return A.squeeze(-3)  # one block of C steps is left


def into_chunks(x, N, C):
    """(B, T, H, X) -> (N, B, H, C, X), with X = K, V or 1, padded at the end with zeros. Zeros
    leave S as it is: nothing is written, and a log decay of 0 fades nothing."""
    B, T, H, X = x.shape
    padding = x.new_zeros(B, N * C - T, H, X)
    x = torch.cat([at_least_float32(x), padding], dim=1).unflatten(1, (N, C))  # (B, N, C, H, X)
    return x.transpose(0, 1).transpose(2, 3)


def from_chunks(o, T, dtype):
    """(N, B, H, C, V) -> (B, T, H, V)."""
    o = o.transpose(0, 1).transpose(2, 3)  # (B, N, C, H, V)
    return o.flatten(1, 2)[:, :T].to(dtype)  # without the padding


def wy_form(k, v, g, fade_in, b):
    """U0 = R V (.., C, V) and W = R K_in (.., C, K) of point 2, for all chunks at once.

    k (.., C, K); v (.., C, V); g and fade_in (.., C, K or 1); b (.., C, 1).
    """
    L = decayed_products(k, k, g).tril(-1)  # only s < t
    I = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    # (I + b L)^-1 b; here b is a column, so b * L is the matrix product b L.
    R = torch.linalg.solve_triangular(I + b * L, b * I, upper=False)
    return R @ v, R @ (k * fade_in)


def run_chunk(Q_in, K_out, whole_decay, A, U, S):
    """Points 3 and 4: the outputs of a chunk (B, H, C, V), and the matrix S after it.

    Q_in, K_out  (B, H or 1, C, K)
    whole_decay  (B, H, K or 1, 1): d_1 .. d_C
    A            (B, H, C, C)
    U            (B, H, C, V)
    S            (B, H, K, V), before the chunk
    """
    o = Q_in @ S + A @ U
    return o, whole_decay * S + K_out.mT @ U


def chunked_with_shared_keys(q, k, v, log_decay, S, return_S):
    """`chunked_linear_attention` on a CPU for heads that share queries and keys, as Mamba2's do.

    With G_t = g_1 + .. + g_t, a head's A is q k^T with the entry (t, s) times e^(G_t - G_s). So
    A V is e^G (q k^T) (e^-G V): instead of a table of decays per head, this fades the values, and
    then one product does all heads. In float32 e^-G would overflow. Float64 reaches e^709, which is
    enough for 72 steps, counted from their middle, if no decay counts as less than e^-19 (6e-9).
    (Most GPUs are slow in float64, so they use the tables.)
    """
    B, T, H, V = v.shape
    N = math.ceil(T / 72)
    C = math.ceil(T / N)
    q = into_chunks(q, N, C).squeeze(2)  # (N, B, C, K)
    k = into_chunks(k, N, C).squeeze(2)
    values = into_chunks(v, N, C).transpose(2, 3)  # (N, B, C, H, V)
    g = into_chunks(log_decay[..., None], N, C)  # (N, B, H, C, 1)
    G = g.double().clamp(min=-19).cumsum(-2).transpose(2, 3)  # (N, B, C, H, 1)
    G = G - (G[:, :, :1] + G[:, :, -1:]) / 2  # 0 in the middle
    A = (q @ k.mT).tril().double()  # (N, B, C, C), without the decays
    faded = (values * (-G).exp()).flatten(-2)  # (N, B, C, H V)
    from_chunk = (A @ faded).unflatten(-1, (H, V)) * G.exp()
    if N == 1 and S is None and not return_S:
        return from_chunks(from_chunk.transpose(2, 3), T, v.dtype), None

    fade_in = g.cumsum(-2).exp().transpose(2, 3)  # (N, B, C, H, 1)
    fade_out = decay_until_end(g).exp().transpose(2, 3)
    written = (k.mT @ (values * fade_out).flatten(-2)).unflatten(-1, (H, V))  # (N, B, K, H, V)
    if S is None:
        S = v.new_zeros(B, H, k.shape[3], V)
    S = at_least_float32(S).transpose(1, 2)  # (B, K, H, V)
    before = []  # S before each chunk
    for n in range(N):
        before.append(S)
        S = fade_in[n, :, -1:] * S + written[n]
    from_before = (q @ torch.stack(before).flatten(-2)).unflatten(-1, (H, V)) * fade_in
    o = (from_chunk + from_before).transpose(2, 3)  # (N, B, H, C, V)
    return from_chunks(o, T, v.dtype), S.transpose(1, 2)


def chunked_linear_attention(q, k, v, log_decay, beta=None, S=None, chunk=64, return_S=True):
    """`linear_recurrence` in chunks, for T >= 1: same arguments, and the same result up to
    rounding. Time and memory are linear in T.

    chunk     the most tokens per chunk. With a decay per channel, the length of the chunks is then
              rounded up to a power of two. `chunked_with_shared_keys` ignores it
    return_S  whether the last S is wanted; otherwise None may be returned for it

    Under autocast products run in its dtype; sums, decays and S stay in float32.
    """
    shared_keys = q.shape[2] == k.shape[2] == 1 and log_decay.dim() == 3 and beta is None
    if shared_keys and v.device.type == "cpu" and v.dtype != torch.float64:  # Mamba2
        return chunked_with_shared_keys(q, k, v, log_decay, S, return_S)
    B, T, H, V = v.shape
    out_dtype = v.dtype
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]  # (B, T, H, 1)
    N = math.ceil(T / chunk)
    C = math.ceil(T / N)  # equal chunks: for T = 65 and chunk = 64, two of 33, not two of 64
    if log_decay.shape[3] > 1:  # a decay per channel
        C = 2 ** (C - 1).bit_length()  # the next power of two, for `decayed_products`
        N = math.ceil(T / C)
    q = into_chunks(q, N, C)  # (N, B, H or 1, C, K)
    k = into_chunks(k, N, C)
    v = into_chunks(v, N, C)  # (N, B, H, C, V)
    g = into_chunks(log_decay, N, C)  # (N, B, H, C, K or 1)
    fade_in = g.cumsum(-2).exp()  # d_1 .. d_t in row t
    # Point 1 of section 9.
    A = decayed_products(q, k, g)  # (N, B, H, C, C)
    # Point 2, as far as it goes without S. Without the bracket, u_t is v_t.
    U0, W = v, None
    if beta is not None:
        U0, W = wy_form(k, v, g, fade_in, b=into_chunks(beta[..., None], N, C))
    if N == 1 and S is None and not return_S:
        return from_chunks(A @ U0, T, out_dtype), None  # S before the chunk is zero, so o = A U
    # The rest of point 2, and points 3 and 4, chunk by chunk.
    fade_out = decay_until_end(g).exp()  # d_{t+1} .. d_C in row t
    whole_decay = fade_in[..., -1, :, None]  # d_1 .. d_C, (N, B, H, K or 1, 1)
    if S is None:
        S = v.new_zeros(B, H, k.shape[4], V)
    S = at_least_float32(S)
    o = []
    for n in range(N):
        U = U0[n]
        if W is not None:
            U = U - W[n] @ S
        Q_in, K_out = q[n] * fade_in[n], k[n] * fade_out[n]
        o_n, S = run_chunk(Q_in, K_out, whole_decay[n], A[n], U, S)
        o.append(o_n)
    return from_chunks(torch.stack(o), T, out_dtype), S


# ---- 10. GLA, Mamba2, Gated DeltaNet ---------------------------------------
#
# Each projects, mixes neighbours (by Canon-B, then by its own short convolution; each can be off,
# and their order is our choice), turns some projections into decays and strengths, runs the
# recurrence, gates what it has read, and projects back. The paper's Canon-AbCD, with a lower-case
# b, has the short convolution in place of Canon-B: canon="acd" and short_conv=True. Mixer and MLP
# share about 12 D^2 parameters per layer; Mamba2's key, query and decays add 144 D, which is almost
# a fifth at D = 64.


class ShortConv(nn.Module):
    """The mixers' own convolution: kernel 4, SiLU, no residual; in Mamba2 it has a bias.

    std  that of the initial weights, where the author's code sets one; None: they are uniform, as
         in a Canon layer
    """

    kernel = 4

    def __init__(self, width, std=None, bias=False):
        super().__init__()
        bound = self.kernel**-0.5
        self.weight = nn.Parameter(torch.empty(self.kernel, width).uniform_(-bound, bound))
        if std is not None:
            nn.init.normal_(self.weight, std=std)  # in place of the uniform draw
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if bias else None

    def forward(self, x, state=None):
        """(B, T, width) -> same."""
        tail = exchange_tail(self, x, self.kernel - 1, state)
        y = causal_conv(x, self.weight, residual=False, tail=tail)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return F.silu(y)


class LinearMixer(Mixer):
    """The base class of GLA, Mamba2 and Gated DeltaNet."""

    short_conv = False  # whether it has its own convolution where config.short_conv is None

    def own_conv(self, width, config, **initial):
        """The mixer's ShortConv, or None if it is off."""
        is_on = self.short_conv if config.short_conv is None else config.short_conv
        return ShortConv(width, **initial) if is_on else None

    def recur(self, q, k, v, log_decay, beta=None, state=None):
        """o (B, T, H, V) of the recurrence. In a stream, state[self] is the matrix S."""
        T, K = k.shape[1], k.shape[3]
        V = v.shape[3]
        # An exported model has as many chunks as its example.
        if is_exporting() and isinstance(T, torch.SymInt):
            raise ValueError("a linear mixer is exported for one length, not for a dynamic one")
        # Chunks of 32 are faster if K V is small, chunks of 64 if it is large. With the bracket,
        # one chunk of up to 96 steps is as fast as several, and compiles in a third of the time.
        chunk = 32 if K * V < 4096 else 64
        if beta is not None and T <= 96:
            chunk = T
        in_stream = state is not None
        S = state[self] if in_stream and self in state else None
        o, S = chunked_linear_attention(q, k, v, log_decay, beta, S, chunk, return_S=in_stream)
        if in_stream:
            state[self] = S
        return o


def initial_dt_bias(n_head):
    """The bias of dt, the step size by which Mamba2 and Gated DeltaNet decay.

    Its softplus is log-uniform in 0.001 .. 0.1. Heads with a small dt start with a long memory,
    heads with a large one with a short memory.
    """
    dt = torch.exp(torch.empty(n_head).uniform_(math.log(0.001), math.log(0.1)))
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # ln(e^dt - 1), softplus's inverse


def heads(x, n_head):
    """(B, T, n_head * K) -> (B, T, n_head, K)."""
    return x.unflatten(-1, (n_head, -1))


class GLA(LinearMixer):
    """Gated linear attention (Yang et al. 2023, https://arxiv.org/abs/2312.06635): 4 heads, a decay
    per key channel. The keys of all heads together have D/2 channels, the values D."""

    budget = 4
    n_head = 4

    def __init__(self, config):
        super().__init__()
        config.check_width(multiple_of=2 * self.n_head)  # the heads divide the keys' D/2
        D = config.d_model
        self.qkv = nn.Linear(D, 2 * D, bias=False)  # q and k D/2 wide each, v D
        self.canon_b = canon_at("b", 2 * D, config)
        self.conv = self.own_conv(2 * D, config, std=0.02)
        # Low rank: through 16 channels.
        self.decay = nn.Sequential(nn.Linear(D, 16, bias=False), nn.Linear(16, D // 2))
        self.gate = nn.Linear(D, D, bias=False)
        self.norm = RMSNorm(D // self.n_head)  # of each head's output
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x, state=None):
        D = x.shape[-1]
        qkv = self.canon_b(self.qkv(x), state)
        if self.conv is not None:
            qkv = self.conv(qkv, state)
        q, k, v = (heads(u, self.n_head) for u in qkv.split([D // 2, D // 2, D], -1))
        # The decay is sigmoid(..)^(1/16): near 1, so that memories are long. (F.logsigmoid is the
        # same, but -inf below -17 in ONNX; findings/onnx_logarithms.sh.)
        log_decay = -F.softplus(-at_least_float32(self.decay(x))) / 16
        log_decay = heads(log_decay, self.n_head)
        q = q * q.shape[-1] ** -0.5  # as in attention (self.norm cancels it, but for its eps)
        o = self.recur(q, k, v, log_decay, state=state)  # (B, T, H, V)
        gate = heads(self.gate(x), self.n_head)
        return self.out((self.norm(o) * F.silu(gate)).flatten(-2))


class Mamba2(LinearMixer):
    """A state-space model (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): 16 heads, 2D value
    channels, and one key and one query of 64 channels for all heads."""

    budget = 6
    n_head = 16
    n_state = 64  # channels of the key and of the query
    short_conv = True

    def __init__(self, config):
        super().__init__()
        config.check_width(multiple_of=self.n_head // 2)  # the heads divide the values' 2D
        D = config.d_model
        H, K = self.n_head, self.n_state
        # Gate 2D, value 2D, key K, query K, dt H. Its authors call them z, x, B, C and dt.
        width = 4 * D + 2 * K + H
        self.into = nn.Linear(D, width, bias=False)
        self.canon_b = canon_at("b", width, config)
        self.conv = self.own_conv(2 * D + 2 * K, config, bias=True)
        # The decay is exp(-rate dt), with rate = exp(A_log): at first 1 in head 1 to 16 in head 16.
        self.A_log = nn.Parameter(torch.arange(1.0, H + 1).log())
        self.dt_bias = initial_dt_bias(H)
        self.skip = nn.Parameter(torch.ones(H))  # its authors' "D": values also bypass the memory
        self.norm = RMSNorm(2 * D)
        self.out = nn.Linear(2 * D, D, bias=False)

    def forward(self, x, state=None):
        D = x.shape[-1]
        H, K = self.n_head, self.n_state
        projected = self.canon_b(self.into(x), state)
        gate, vkq, dt = projected.split([2 * D, 2 * D + 2 * K, H], -1)
        if self.conv is not None:
            vkq = self.conv(vkq, state)
        value, key, query = vkq.split([2 * D, K, K], -1)
        value = at_least_float32(heads(value, H))
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)  # (B, T, H)
        log_decay = -self.A_log.exp() * dt
        weighted_value = dt[..., None] * value  # w_t v_t
        query, key = query[:, :, None], key[:, :, None]  # (B, T, 1, K): all heads share them
        o = self.recur(query, key, weighted_value, log_decay, state=state)
        y = (o + self.skip[:, None] * value).flatten(-2)
        return self.out(self.norm(y * F.silu(gate)).to(gate.dtype))  # back from float32


class GatedDeltaNet(LinearMixer):
    """The delta rule with scalar decays (Yang et al. 2024, https://arxiv.org/abs/2412.06464): 3D/4
    key channels, 3D/2 value channels, one head per 128 of D, and at least two."""

    budget = 6
    short_conv = True

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        # As in the paper, 4 heads at D = 512 and 6 at 768. The minimum of two is our choice.
        self.n_head = H = max(2, D // 128)
        config.check_width(multiple_of=4 * H)  # the heads divide the keys' 3D/4
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.canon_b = canon_at("b", 3 * D, config)
        self.conv = self.own_conv(3 * D, config, std=0.02)
        self.decay = nn.Linear(D, H, bias=False)  # gives dt, and dt the decay
        self.strength = nn.Linear(D, H, bias=False)  # gives beta
        # The decay is exp(-rate dt), with rate = exp(A_log): at first random, up to 16.
        self.A_log = nn.Parameter(torch.empty(H).uniform_(1e-6, 16).log())  # log 0 would be -inf
        self.dt_bias = initial_dt_bias(H)
        self.gate = nn.Linear(D, 3 * D // 2, bias=False)
        self.norm = RMSNorm(3 * D // 2 // H)  # of each head's output
        self.out = nn.Linear(3 * D // 2, D, bias=False)

    def forward(self, x, state=None):
        D, H = x.shape[-1], self.n_head
        qkv = self.canon_b(self.qkv(x), state)
        # Its authors apply SiLU to q, k and v: the convolution's own, or this one.
        qkv = F.silu(qkv) if self.conv is None else self.conv(qkv, state)
        q, k, v = (heads(u, H) for u in qkv.split([3 * D // 4, 3 * D // 4, 3 * D // 2], -1))
        q = F.normalize(q, dim=-1)
        k = F.normalize(at_least_float32(k), dim=-1)  # unit length: beta is the share removed
        dt = F.softplus(at_least_float32(self.decay(x)) + self.dt_bias)  # (B, T, H)
        beta = self.strength(x).sigmoid()
        log_decay = -self.A_log.exp() * dt
        q = q * q.shape[-1] ** -0.5  # as in attention (self.norm cancels it, but for its eps)
        o = self.recur(q, k, v, log_decay, beta, state)
        gate = heads(self.gate(x), H)
        return self.out((self.norm(o) * F.silu(gate)).flatten(-2))


MIXERS.update(gla=GLA, mamba2=Mamba2, gdn=GatedDeltaNet)
