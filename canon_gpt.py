"""Transformers with Canon layers (Allen-Zhu, "Physics of Language Models: Part 4.1", arXiv 2512.17351).

Attention lets a token look at any other, yet even the simplest move, from a token to its right neighbour, costs a whole
attention layer. To recall what followed an earlier occurrence of a word, a Transformer needs two: one tells every token
who stands left of it, the next looks the word up there. A Canon layer does the first with four weights a channel:

    h'_t = h_t + w_0*h_t + w_1*h_{t-1} + w_2*h_{t-2} + w_3*h_{t-3}          (paper Eq. 4.1)

It can sit at four points of a block (paper Section 4; d is the model's width):

    x -> norm -> [A] -> project to q,k,v -> [B] -> attention -> (+ x) -> norm -> [C] -> up -> [D] -> act, down -> (+)
                  d                          3d                                    d           4d or 16d/3

"Canon-ABCD" is all four; the letters of `Config.canon` say which. All four have 4(d + 3d + d + 16d/3), about 41d
parameters a layer, beside the 12d^2 of attention and MLP: 0.45% at d = 768, and less in wider models. They do as few
multiply-adds a token; what they cost is memory traffic (kernels.py). Everything else here is a plain pre-norm
Transformer: RMSNorm, no biases, rotary or no positions, a gated or a standard MLP.

Reading order: 1 configuration; 2 Canon; 3 positions; 4 attention; 5 MLP; 6 the block; 7 the model, its loss, and
generation. Shapes are in comments: B batch, T time, D width, H heads, K dims a head (in Canon, K is the kernel size).
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import causal_conv

# ------------------------------------------------------------------------------------------------------------
# 1. Configuration
# ------------------------------------------------------------------------------------------------------------

MIXERS = ("attention",)
POSITIONS = ("rope", "rope4", "nope", "alibi", "halibi")
MLPS = ("swiglu", "silu", "relu2", "swiglu-relu2")


@dataclass
class Config:
    """Everything that defines a model. Raises ValueError, naming the field, its value and what is allowed."""

    vocab_size: int
    block_size: int  # the longest sequence, in tokens
    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    mixer: str = "attention"
    mlp: str = "swiglu"
    pos: str = "rope"
    canon: str = ""  # the points that have a Canon layer, e.g. "abcd"
    canon_kernel: int = 4
    canon_residual: bool = True
    canon_silu: bool = False
    canon_frozen: bool = False  # keep the random initial weights ("cst-Canon")
    tie_embeddings: bool = False

    def __post_init__(self):
        def require(ok, field, allowed):
            if not ok:
                raise ValueError(f"{field} = {getattr(self, field)!r}: {allowed}")

        for field in ("vocab_size", "block_size", "n_layer", "n_head", "d_model"):
            require(getattr(self, field) >= 1, field, "must be at least 1")
        require(self.mixer in MIXERS, "mixer", f"allowed: {', '.join(MIXERS)}")
        require(self.mlp in MLPS, "mlp", f"allowed: {', '.join(MLPS)}")
        require(self.pos in POSITIONS, "pos", f"allowed: {', '.join(POSITIONS)}")
        letters = self.canon.lower()
        distinct = len(set(letters)) == len(letters)
        require(distinct and set(letters) <= set("abcd"), "canon", "allowed: the letters a, b, c, d, each at most once")
        self.canon = "".join(sorted(letters))
        require(self.canon_kernel in (2, 3, 4), "canon_kernel", "allowed: 2, 3, 4")
        require(self.d_model % self.n_head == 0, "d_model", f"must be a multiple of n_head = {self.n_head}")
        multiple = {"rope": 2, "rope4": 8}.get(self.pos, 1)  # rotary turns pairs of dims
        fits = (self.d_model // self.n_head) % multiple == 0
        require(fits, "d_model", f"pos {self.pos} needs d_model / n_head to be a multiple of {multiple}")


# ------------------------------------------------------------------------------------------------------------
# 2. Canon
# ------------------------------------------------------------------------------------------------------------


class Canon(nn.Module):
    """A residual depthwise causal convolution over the last few tokens: (B, T, width) -> (B, T, width).

    weight (canon_kernel, width); no bias. It starts at Conv1d's default, uniform(-1/sqrt K, 1/sqrt K). The model-wide
    normal(0, 0.02) must not touch it: with weights that small the layer would start out as hardly more than its residual.
    """

    def __init__(self, width, config):
        super().__init__()
        K = config.canon_kernel
        weight = torch.empty(K, width).uniform_(-(K**-0.5), K**-0.5)
        self.weight = nn.Parameter(weight, requires_grad=not config.canon_frozen)
        self.residual = config.canon_residual
        self.activation = "silu" if config.canon_silu else None

    def forward(self, x, state=None):
        tail = None
        if state is not None:  # streaming: the last K-1 inputs of the previous piece are still in view
            n = self.weight.shape[0] - 1
            tail = state[self] if self in state else x.new_zeros(x.shape[0], n, x.shape[2])
            state[self] = torch.cat([tail, x], dim=1)[:, -n:].clone()  # not a view, which would keep all of x alive
        return causal_conv(x, self.weight, self.residual, self.activation, tail)


def canon_at(point, width, config):
    """The Canon layer of this point ("a" .. "d"), or None where the configuration has none."""
    return Canon(width, config) if point in config.canon else None


# ------------------------------------------------------------------------------------------------------------
# 3. Positions
#
# Without positions ("nope") attention sees a set of earlier tokens, not a sequence. Rotary (RoPE) turns each pair of dims
# of q and k by an angle that grows with the position, so that q_i . k_j depends on i - j; "rope4" turns only the
# first quarter of each head's dims. ALiBi and H-ALiBi instead change the logits by a function of the distance.
# ------------------------------------------------------------------------------------------------------------


def rotary_angles(positions, dims, base=10000.0):
    """Angles (positions, dims / 2): pair j turns by base^(-2j / dims) radians a step."""
    frequencies = base ** (-torch.arange(0, dims, 2) / dims)
    return torch.arange(positions)[:, None] * frequencies


def rotate(x, cos, sin):
    """Turn the pairs (x_j, x_{j+R}), j < R, of x (B, H, T, K) by the angles of cos, sin (T, R); the other dims pass."""
    R = cos.shape[-1]
    x1, x2, rest = x[..., :R], x[..., R : 2 * R], x[..., 2 * R :]
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest], dim=-1).to(x.dtype)


def distance_bias(pos, n_head, positions):
    """What is added to the logits of query i and key j, (H, positions, positions); -inf forbids. Heads count from 1.

    alibi   head h of H adds -(i - j) * 2^(-8h/H)
    halibi  head h of the first half sees only the h nearest tokens, itself among them (our reading of "nearest");
            the other half sees all
    """
    distance = torch.arange(positions)[:, None] - torch.arange(positions)  # i - j
    h = torch.arange(1, n_head + 1)[:, None, None]
    if pos == "alibi":
        bias = -distance * 2.0 ** (-8 * h / n_head)
    else:
        too_far = (distance >= h) & (h <= n_head // 2)
        bias = torch.zeros(n_head, positions, positions).masked_fill(too_far, float("-inf"))
    return bias.masked_fill(distance < 0, float("-inf"))


# ------------------------------------------------------------------------------------------------------------
# 4. Attention
# ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal softmax attention with Canon-B on q, k, v together; 4 D^2 parameters."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.canon = canon_at("b", 3 * config.d_model, config)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x, rope=None, bias=None, state=None):
        B, T, D = x.shape
        qkv = self.qkv(x)  # (B, T, 3D)
        if self.canon is not None:
            qkv = self.canon(qkv, state)  # point B: before rotary, so that it mixes contents, not turned contents
        q, k, v = (u.view(B, T, self.n_head, -1).transpose(1, 2) for u in qkv.chunk(3, dim=-1))  # (B, H, T, K)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)

        mask = bias
        if state is not None:  # streaming: keep the keys and values
            if self in state:
                k, v = (torch.cat([old, new], dim=2) for old, new in zip(state[self], (k, v)))
                if mask is None:  # T new queries at the end of S keys
                    S = k.shape[2]
                    mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
            state[self] = k, v
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


# ------------------------------------------------------------------------------------------------------------
# 5. MLP
# ------------------------------------------------------------------------------------------------------------


def relu2(x):
    return F.relu(x).square()


class MLP(nn.Module):
    """8 D^2 parameters, gated (width 8D/3, to the nearest multiple of 8) or standard (width 4D).

    swiglu  down(silu(gate) * up)        silu   down(silu(up))
    swiglu-relu2  with relu(gate)^2      relu2  down(relu(up)^2)

    Canon-D sits before the activation, on gate and up together.
    """

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.gated = config.mlp.startswith("swiglu")
        self.act = relu2 if config.mlp.endswith("relu2") else F.silu
        width = max(8, 8 * round(D / 3)) if self.gated else 4 * D
        up_width = 2 * width if self.gated else width
        self.up = nn.Linear(D, up_width, bias=False)
        self.canon = canon_at("d", up_width, config)
        self.down = nn.Linear(width, D, bias=False)

    def forward(self, x, state=None):
        h = self.up(x)
        if self.canon is not None:
            h = self.canon(h, state)
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            return self.down(self.act(gate) * up)
        return self.down(self.act(h))


# ------------------------------------------------------------------------------------------------------------
# 6. The block
# ------------------------------------------------------------------------------------------------------------


def working_dtype(x):
    """The dtype of matrix products of x: autocast's, where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim. Under autocast the result goes on in autocast's dtype: what reads it next
    is Canon, which would otherwise move twice the bytes, and a matrix product, which would cast it anyway."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, eps=1e-6).to(working_dtype(x))


class Block(nn.Module):
    """Mixer and MLP, each behind a norm and inside a residual; Canon A and C follow the norms."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = RMSNorm(config.d_model)
        self.canon_a = canon_at("a", config.d_model, config)
        self.mixer = Attention(config)  # with Canon B inside
        self.norm2 = RMSNorm(config.d_model)
        self.canon_c = canon_at("c", config.d_model, config)
        self.mlp = MLP(config)  # with Canon D inside

    def forward(self, x, rope=None, bias=None, state=None):
        h = self.norm1(x)
        if self.canon_a is not None:
            h = self.canon_a(h, state)
        x = x + self.mixer(h, rope, bias, state)
        h = self.norm2(x)
        if self.canon_c is not None:
            h = self.canon_c(h, state)
        return x + self.mlp(h, state)


# ------------------------------------------------------------------------------------------------------------
# 7. The model
# ------------------------------------------------------------------------------------------------------------


class CanonGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for module in self.modules():  # Canon is neither: it keeps its own initialisation
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

        head_dim = config.d_model // config.n_head
        cos = sin = bias = None
        if config.pos in ("rope", "rope4"):
            angles = rotary_angles(config.block_size, head_dim if config.pos == "rope" else head_dim // 4)
            cos, sin = angles.cos(), angles.sin()
        elif config.pos in ("alibi", "halibi"):
            bias = distance_bias(config.pos, config.n_head, config.block_size)
        for name, table in (("cos", cos), ("sin", sin), ("bias", bias)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens, targets=None, loss_mask=None, state=None):
        """Next-token logits, and the loss if there are targets.

        tokens     (B, T) int64
        targets    (B, T) int64, or None: what should follow each token
        loss_mask  (B, T) bool, or None for all: which targets count
        state      None, or a dict that starts empty and lives through a stream: feeding a sequence in pieces of any
                   length with the same dict gives the same logits as feeding it at once. Each module that must
                   remember something (keys and values, a convolution's last inputs) keeps it there as state[itself]
        returns    logits (B, T, vocab_size); loss in nats, averaged over the targets that count, or None
        Raises ValueError for a sequence (with what its stream has seen) longer than block_size.
        """
        T = tokens.shape[1]
        start = 0 if state is None else state.get(self, 0)
        if start + T > self.config.block_size:
            raise ValueError(f"a sequence of {start + T} tokens is longer than block_size = {self.config.block_size}")
        if state is not None:
            state[self] = start + T
        rope = None if self.cos is None else (self.cos[start : start + T], self.sin[start : start + T])
        x = self.embed(tokens)  # (B, T, D)
        bias = None if self.bias is None else self.bias[:, start : start + T, : start + T].to(working_dtype(x))

        for block in self.blocks:
            x = block(x, rope, bias, state)
        logits = self.head(self.norm(x))  # (B, T, vocab_size)
        if targets is None:
            return logits, None
        if loss_mask is None:
            loss_mask = torch.ones_like(targets, dtype=torch.bool)
        nats = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return logits, (nats * loss_mask.flatten()).sum() / loss_mask.sum().clamp(min=1)

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, stop=None, generator=None):
        """Continue tokens (B, T) by up to max_new_tokens; returns (B, T + new) int64.

        temperature 0 takes the likeliest token, 1 samples from the model. A row that has produced the token `stop`
        is filled up with it, and when all rows have, generation ends. `generator` is a torch.Generator on the
        tokens' device. Raises ValueError if the result would be longer than block_size + 1.
        """
        if tokens.shape[1] + max_new_tokens > self.config.block_size + 1:  # the last token is never fed
            raise ValueError(
                f"{tokens.shape[1]} + {max_new_tokens} tokens do not fit in block_size = {self.config.block_size}"
            )
        state, piece = {}, tokens
        done = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            logits = self(piece, state=state)[0][:, -1].float()
            if temperature == 0:
                piece = logits.argmax(-1, keepdim=True)
            else:
                piece = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            if stop is not None:
                piece = piece.masked_fill(done, stop)
                done = done | (piece == stop)
            tokens = torch.cat([tokens, piece], dim=1)
            if stop is not None and done.all():
                break
        return tokens

    def parameter_counts(self):
        """dict: all parameters, of them in the embedding and head, and of them in Canon layers."""
        count = lambda ps: sum(p.numel() for p in ps)  # noqa: E731
        ends = {self.embed.weight, self.head.weight}  # one tensor if tied
        canon = [m.weight for m in self.modules() if isinstance(m, Canon)]
        return {"total": count(self.parameters()), "embeddings": count(ends), "canon": count(canon)}
