"""Transformers with Canon layers (Allen-Zhu, "Physics of Language Models: Part 4.1", arXiv 2512.17351).

Attention lets a token look at any earlier one, yet even the simplest move, from a token to its right neighbour, costs a whole
attention layer. To recall what followed an earlier occurrence of a word, a Transformer needs two (or a much wider one): the first
tells every token who stands left of it, the next looks the word up there. A Canon layer does the first with four weights a channel:

    h'_t = h_t + w_0*h_t + w_1*h_{t-1} + w_2*h_{t-2} + w_3*h_{t-3}          (paper Eq. 4.1)

It can sit at four points of a block (paper Section 4; d is the model's width):

    x -> norm -> [A] -> project to q,k,v -> [B] -> attention -> (+ x) -> norm -> [C] -> up -> [D] -> act, down -> (+)
                  d                          3d                                    d           4d or 16d/3

"Canon-ABCD" is all four; the letters of `Config.canon` say which. All four have 4(d + 3d + d + 16d/3), about 41d
parameters a layer, beside the 12d^2 of attention and MLP: 0.45% at d = 768, and less in wider models. Each of these takes one
multiply-add a token; what the layers cost is memory traffic (kernels.py).

Attention can make way for one of three linear mixers (GLA, Mamba2, Gated DeltaNet), which remember the past in a state
of fixed size. They are one recurrence with three choices of its coefficients: sections 5 to 7. The rest is a
plain pre-norm block: RMSNorm, no biases, a gated or a standard MLP.

Reading order: 1 configuration; 2 Canon; 3 positions; 4 attention; 5 the linear recurrence; 6 the same by matrix products;
7 GLA, Mamba2, Gated DeltaNet; 8 MLP; 9 the block; 10 the model, its loss, and generation. Shapes are in comments: B batch, T
time, D width, H heads, K dims of a head's queries and keys, V of its values (in Canon, K is the kernel size). On a first reading
skip 5 to 7: the Canon Transformer is in the others. Marks such as `# exercise N` are for those who make an assignment of it (README.md).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import causal_conv

# ------------------------------------------------------------------------------------------------------------
# 1. Configuration
# ------------------------------------------------------------------------------------------------------------

POSITIONS = ("rope", "rope4", "nope", "alibi", "halibi")
MLPS = ("swiglu", "silu", "relu2", "swiglu-relu2", "none")


@dataclass
class Config:
    """Everything that defines a model. Raises ValueError, naming the field, its value and what is allowed."""

    vocab_size: int
    block_size: int  # the longest sequence, in tokens
    n_layer: int = 12
    n_head: int = 12  # of attention; the linear mixers have the paper's own (section 7)
    d_model: int = 768
    mixer: str = "attention"  # or gla, mamba2, gdn, or a pattern to repeat over the layers: "gdn,gdn,attention"
    mlp: str = "swiglu"
    pos: str = "rope"
    canon: str = ""  # the points that have a Canon layer, e.g. "abcd"
    canon_kernel: int = 4
    canon_residual: bool = True
    canon_silu: bool = False
    canon_frozen: bool = False  # keep the random initial weights ("cst-Canon")
    short_conv: bool | None = None  # all linear mixers' own; None: on if one is mamba2 or gdn, unless Canon-B takes its place
    tie_embeddings: bool = False
    init_std: float = 0.02  # of the blocks' matrices; embedding and head have 0.02

    def __post_init__(self):
        def require(ok, field, allowed):
            if not ok:
                raise ValueError(f"{field} = {getattr(self, field)!r}: {allowed}")

        for field in ("vocab_size", "block_size", "n_layer", "n_head", "d_model"):
            require(getattr(self, field) >= 1, field, "must be at least 1")
        pattern = self.mixer.split(",")
        require(set(pattern) <= set(MIXERS), "mixer", f"allowed: {', '.join(MIXERS)}, or several of them, joined by commas")
        linear = sorted(name for name in set(pattern) if issubclass(MIXERS[name], LinearMixer))
        require(len(pattern) <= self.n_layer, "mixer", f"a pattern for more than n_layer = {self.n_layer} layers")
        require(self.mlp in MLPS, "mlp", f"allowed: {', '.join(MLPS)}")
        require(self.pos in POSITIONS, "pos", f"allowed: {', '.join(POSITIONS)}")
        letters = self.canon.lower()
        distinct = len(set(letters)) == len(letters)
        require(distinct and set(letters) <= set("abcd"), "canon", "allowed: the letters a, b, c, d, each at most once")
        self.canon = "".join(sorted(letters))
        there = self.mlp != "none" or not set(letters) & set("cd")
        require(there, "canon", "points c and d belong to the MLP, so with mlp none allowed: a, b")
        require(0 < self.init_std < math.inf, "init_std", "must be over 0")
        require(self.canon_kernel in (2, 3, 4), "canon_kernel", "allowed: 2, 3, 4")
        for field in ("canon_kernel", "canon_residual", "canon_silu", "canon_frozen"):
            require(letters or getattr(self, field) == getattr(Config, field), field, "means nothing without a Canon layer; leave it out")
        require(linear or not self.short_conv, "short_conv", f"mixer {self.mixer} has none to switch on")
        if self.short_conv is None:
            self.short_conv = bool({"mamba2", "gdn"} & set(pattern)) and "b" not in self.canon
        for name in linear:
            multiple = MIXERS[name].multiple(self.d_model)
            require(self.d_model % multiple == 0, "d_model", f"mixer {name} needs a multiple of {multiple} at this width")
        if self.attends:
            require(self.d_model % self.n_head == 0, "d_model", f"must be a multiple of n_head = {self.n_head}")
            multiple = {"rope": 2, "rope4": 8}.get(self.pos, 1)  # rotary turns pairs of dims
            fits = (self.d_model // self.n_head) % multiple == 0
            require(fits, "d_model", f"pos {self.pos} needs d_model / n_head to be a multiple of {multiple}")
        else:
            meant = self.pos in ("rope", "nope")  # rope is the default
            require(meant, "pos", f"positions mean nothing to mixer {self.mixer}, whose recurrence knows the order; leave it out")
            self.pos = "nope"

    @property
    def attends(self):
        """Whether a layer has attention, to which positions and n_head mean something."""
        return any(not issubclass(MIXERS[name], LinearMixer) for name in self.mixer.split(","))


# ------------------------------------------------------------------------------------------------------------
# 2. Canon, and the norm before it
# ------------------------------------------------------------------------------------------------------------


class CausalConv(nn.Module):
    """`kernels.causal_conv` with its weight and, for streaming, its memory: (B, T, width) -> (B, T, width), or width / 2 with
    activation "swiglu".

    weight (kernel, width); no bias. It starts at Conv1d's default, uniform(-1/sqrt K, 1/sqrt K).
    """

    def __init__(self, width, kernel, residual, activation):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel, width).uniform_(-(kernel**-0.5), kernel**-0.5))
        self.residual, self.activation = residual, activation

    def forward(self, x, state=None):
        """state: None, or a dict that lives through a stream of pieces x. state[self], there from the first piece on, is (B, K-1, width):
        the last inputs so far."""
        # exercise 3
        tail = None
        if state is not None:  # the last K-1 inputs of the previous piece are still in view
            n = self.weight.shape[0] - 1
            tail = state[self] if self in state else x.new_zeros(x.shape[0], n, x.shape[2])
            state[self] = torch.cat([tail, x], dim=1)[:, -n:].clone()  # not a view, which would keep all of x alive
        return causal_conv(x, self.weight, self.residual, self.activation, tail)


class Canon(CausalConv):
    """The Canon layer: with a residual and no activation, unless the configuration wants a variant.

    The model-wide initialisation must not touch its weights: with weights so small, the layer is hardly more than its residual.
    """

    def __init__(self, width, config):
        super().__init__(width, config.canon_kernel, config.canon_residual, "silu" if config.canon_silu else None)
        self.weight.requires_grad_(not config.canon_frozen)


class NoCanon(nn.Module):
    """Where the configuration has no Canon layer."""

    def forward(self, x, state=None):
        return x


def canon_at(point, width, config):
    """The layer at this point ("a" .. "d")."""
    return Canon(width, config) if point in config.canon else NoCanon()


def wide(x):
    """x in float32 at least, for arithmetic that must not round to bfloat16: means of squares, and decays over many steps."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def working_dtype(x):
    """The dtype of matrix products of x: autocast's, where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def wide_product(a, b):
    """a @ b for matrices that must not round to bfloat16, also under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return wide(a) @ wide(b)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim. Under autocast the result goes on in autocast's dtype: what reads it next
    is Canon, which would otherwise move twice the bytes, and a matrix product, which would cast it anyway."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(wide(x), x.shape[-1:], wide(self.weight), eps=1e-6).to(working_dtype(x))


# ------------------------------------------------------------------------------------------------------------
# 3. Positions
#
# Without positions ("nope") a layer of attention sees a set of earlier tokens, not a sequence. Rotary (RoPE) turns each pair of dims
# of q and k by an angle that grows with the position, so that q_i . k_j depends on i - j; "rope4" turns only the
# first quarter of each head's dims. ALiBi and H-ALiBi instead change the logits by a function of the distance.
# ------------------------------------------------------------------------------------------------------------


def rotary_angles(positions, dims, base=10000.0):
    """Angles (positions, dims / 2): pair j turns by base^(-2j / dims) radians a step."""
    frequencies = base ** (-torch.arange(0, dims, 2) / dims)
    return torch.arange(positions)[:, None] * frequencies


def rotate(x, cos, sin):
    """Turn the pairs (x_j, x_{j+R}), j < R, of x (B, T, H, K) by the angles of cos, sin (T, R); the other dims pass."""
    # exercise 4
    R = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (T, 1, R)
    x1, x2, rest = x.split([R, R, x.shape[-1] - 2 * R], dim=-1)
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

    size = 4  # of its matrices, in D^2

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.canon = canon_at("b", 3 * config.d_model, config)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x, rope=None, bias=None, state=None):
        """x (B, T, D) -> (B, T, D). qkv holds the heads of q side by side, then those of k, then of v.

        rope   None, or (cos, sin) for `rotate`
        bias   None, or (H, T, S), what is added to the logits of T queries and S keys, -inf where a query must not look; without, it is
               causal all the same. In a stream S counts what came before, too
        state  None, or a stream's dict; state[self] is all keys and values so far, (B, S, H, K) each, the keys turned
        """
        # exercise 5
        B, T, D = x.shape
        qkv = self.canon(self.qkv(x), state)  # (B, T, 3D); Canon-B before rotary, so that it mixes contents, not turned contents
        q, k, v = qkv.view(B, T, 3, self.n_head, -1).unbind(2)  # (B, T, H, K)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)

        mask = bias
        if state is not None:  # streaming: keep the keys and values
            if self in state:
                k, v = (torch.cat([old, new], dim=1) for old, new in zip(state[self], (k, v)))
                if mask is None and T > 1:  # T new queries at the end of S keys
                    S = k.shape[1]
                    mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
            state[self] = k.contiguous(), v.contiguous()  # not views, which would keep all of qkv alive
        q, k, v = (u.transpose(1, 2) for u in (q, k, v))  # (B, H, T, K), as a view: y comes in the same layout, and needs no copy below
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)  # one query sees all
        return self.out(y.transpose(1, 2).reshape(B, T, D))


# ------------------------------------------------------------------------------------------------------------
# 5. The linear recurrence
#
# Attention keeps every key and value, and so works harder with every token. A linear mixer keeps one matrix S (K x V) a
# head, a sum of products k v^T: S^T k gives back what was written under keys like k. Every step fades S, writes one pair
# into it and reads it once, with k_t, v_t, q_t vectors of the token and S zero at first:
#
#     S_t = (I - b_t k_t k_t^T) D_t S_{t-1} + w_t k_t v_t^T            o_t = S_t^T q_t
#
#                       D_t, the decay               w_t, the write    bracket     q, k, v
#     GLA               diagonal: one a channel      1                 none        projections, q divided by sqrt K
#     Mamba2            a number: exp(-a dt_t)       dt_t              none        C, B, x: q and k shared by all heads
#     Gated DeltaNet    a number                     b_t               yes         projections of unit length, q divided by sqrt K
#
# Without the bracket, two values written under one key pile up. The bracket first removes what S holds under k_t, in
# the measure b_t if k_t is of unit length: the "delta rule", S += b k (v - S^T k)^T with S faded already, a step of gradient
# descent on |S^T k - v|^2 / 2.
#
# The loop below is the definition. Section 6 computes the same, fast. Neither has an argument for w_t: with the bracket it is b_t,
# and without it the caller passes w_t v_t as v_t.
# ------------------------------------------------------------------------------------------------------------


def linear_recurrence(q, k, v, log_decay, beta=None, state=None):
    """The recurrence, one step after another.

    q, k       (B, T, H, K); H may be 1, for queries and keys that all heads share
    v          (B, T, H, V); a write strength w without the bracket is the caller's: pass w * v
    log_decay  (B, T, H) or (B, T, H, K): ln of D_t, not above 0
    beta       (B, T, H), or None: b_t, then also the write strength; None is no bracket and strength 1
    state      (B, H, K, V) before the first step, or None for zeros
    returns    o (B, T, H, V) in v's dtype, the state after the last step; computed in float32 (in float64 if v is)

    T is at least 1.
    """
    B, T, H, V = v.shape
    given, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    q, k, v, decay = (u.to(dtype) for u in (q, k, v, log_decay))
    decay = decay.exp().reshape(B, T, H, -1, 1)  # (B, T, H, K or 1, 1)
    # exercise 8
    S = v.new_zeros(B, H, k.shape[3], V) if state is None else state.to(dtype)
    o = []
    for t in range(T):
        key, query = k[:, t, :, :, None], q[:, t, :, :, None]  # (B, H, K, 1)
        S = decay[:, t] * S
        write = v[:, t]  # (B, H, V)
        if beta is not None:
            write = beta[:, t, :, None] * (write - (key * S).sum(-2))
        S = S + key * write[:, :, None]
        o.append((query * S).sum(-2))
    return torch.stack(o, dim=1).to(given), S


# ------------------------------------------------------------------------------------------------------------
# 6. The same by matrix products
#
# Cut time into chunks of C steps; let S be the state before a chunk, S' the one after it, and count its steps from 1. P_t = D_1 .. D_t is what
# step t still sees of S, and D_{s+1} .. D_t what it sees of step s. Without the bracket,
#
#     o_t = S^T P_t q_t + sum_{s<=t} A_ts v_s          A_ts = q_t^T (D_{s+1} .. D_t) k_s
#     S'  = P_C S + sum_s (D_{s+1} .. D_C k_s) v_s^T
#
# are matrix products: a small masked attention inside the chunk, and one (K x V) update of the state for C tokens.
#
# The bracket needs one step more. Call what a step really writes u_t, and S_t = D_t S_{t-1} + k_t u_t^T has no bracket:
#
#     u_t = b_t (v_t - S_{t-1}^T D_t k_t) = b_t (v_t - S^T P_t k_t - sum_{s<t} L_ts u_s)      L_ts = k_t^T (D_{s+1} .. D_t) k_s
#
# With the steps as rows of matrices U, V, K_in (rows P_t k_t) and K_out (rows D_{t+1} .. D_C k_t), and b the diagonal
# matrix of the b_t, this is (I + b L) U = b (V - K_in S), where L is strictly lower triangular. R = (I + b L)^-1 b comes from
# a triangular system (`torch.linalg.solve_triangular`), for all chunks at once and before any S is known. It leaves (the "WY form")
#
#     U = U0 - W S         U0 = R V,  W = R K_in
#     S' = P_C S + K_out^T U = (P_C - K_out^T W) S + K_out^T U0
#
# which is again linear in S, and o_t is as above with u for v. So in every case the states between chunks obey S' = M S + X: without the
# bracket M = P_C is diagonal and X = K_out^T V (`diagonal_scan`), with it M = P_C - K_out^T W and X = K_out^T U0 (`scan`).
#
# Decays are kept as logarithms and only ever *added*: a product like D_{s+1} .. D_t taken as P_t / P_s would divide by zero
# when decays are strong, and ln P_t - ln P_s would round.
# ------------------------------------------------------------------------------------------------------------


def fade_in(g):
    """(.., C, K) -> same: row t is g_1 + .. + g_t, the log decay from before the chunk to step t."""
    return g.cumsum(-2)


def fade_out(g):
    """(.., C, K) -> same: row s is g_{s+1} + .. + g_C, the log decay from step s to the end of the chunk."""
    later = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return later.flip(-2).cumsum(-2).flip(-2)


def spans(g):
    """(.., n) -> (.., n, n): [t, s] is g_{s+1} + .. + g_t for s <= t, and -inf for s > t."""
    n = g.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=g.device).tril(-1)  # t > s
    sums = g[..., None].expand(*g.shape, n).masked_fill(~later, 0).cumsum(-2)
    return sums.masked_fill(later.mT, float("-inf"))


def decayed_products(q, k, g):
    """A (.., C, C) with A[t, s] = sum_c q[t, c] k[s, c] exp(g[s+1, c] + .. + g[t, c]) for s <= t, and 0 for s > t.

    q, k (.., C, K); g (.., C, K) or (.., C, 1); C is a power of two.
    """
    # One decay for all channels (.., C, 1) stands outside the product.
    # A decay for each channel must be split between q and k, at a point between s and t: then both parts are decays, and
    # neither overflows. No point serves all pairs; so start with blocks of one step, and join neighbours to blocks of 2, 4 .. C,
    # splitting the pairs from one to the other where the two meet:      A0    0
    #                                                                  across  A1
    # exercise 9
    C = q.shape[-2]
    if g.shape[-1] == 1:
        return wide_product(q, k.mT) * spans(g[..., 0]).exp()
    A = (q * k).sum(-1).expand(g.shape[:-1])[..., None, None]  # (.., C, 1, 1): a step and itself
    size = 1
    while size < C:
        g0, g1 = g.unflatten(-2, (-1, 2, size)).unbind(-3)  # (.., C / (2 size), size, K): all left and all right blocks
        k0 = k.unflatten(-2, (-1, 2, size))[..., 0, :, :]
        q1 = q.unflatten(-2, (-1, 2, size))[..., 1, :, :]
        across = wide_product(q1 * fade_in(g1).exp(), (k0 * fade_out(g0).exp()).mT)  # (.., C / (2 size), size, size)
        A0, A1 = A.unflatten(-3, (-1, 2)).unbind(-3)
        A = torch.cat([torch.cat([A0, torch.zeros_like(A0)], -1), torch.cat([across, A1], -1)], -2)
        size *= 2
    return A.squeeze(-3)


def scan(M, X, S):
    """The states of S_{n+1} = M_n S_n + X_n: S_0 .. S_{N-1} (B, H, N, K, V), and S_N; M (B, H, N, K, K), X (B, H, N, K, V), S = S_0 (B, H, K, V).

    Two steps are one: S_2 = M_1 (M_0 S_0 + X_0) + X_1 = (M_1 M_0) S_0 + (M_1 X_0 + X_1). So pair the steps, find every other
    state with half as many of them (recursively), then the states between; a last step without a partner comes after all. A loop over
    the chunks would be as right, but has N turns, which torch.compile writes out one by one; this has log2 N, each for many chunks
    at once.
    """
    # exercise 10
    N = X.shape[2]
    if N == 0:
        return X, S
    M0, M1, X0, X1 = M[:, :, 0 : N - 1 : 2], M[:, :, 1::2], X[:, :, 0 : N - 1 : 2], X[:, :, 1::2]
    even, S = scan(M1 @ M0, M1 @ X0 + X1, S)  # S_0, S_2, .., and what comes after the pairs
    states = torch.stack([even, M0 @ even + X0], dim=3).flatten(2, 3)
    if N % 2:
        states = torch.cat([states, S[:, :, None].to(states.dtype)], dim=2)
        S = wide_product(M[:, :, -1], S) + X[:, :, -1]  # in a stream this is done at every token, and roundings would pile up
    return states, S


def diagonal_scan(g, X, S):
    """`scan` for M_n = exp(g_n) on the diagonal: S_0 .. S_{N-1} (B, H, N, K, V), and S_N; g (B, H, N, K or 1), X (B, H, N, K, V).

    S_n is the sum over m < n of X_m, faded by g_{m+1} + .. + g_{n-1}, one product by a matrix of decays; and of S, faded by all. As
    such a matrix is quadratic in the number of chunks, they are taken 32 at a time. S (B, H, K, V), or None for zeros.
    """
    # exercise 9
    before = []
    for g_part, X_part in zip(g.split(32, dim=2), X.split(32, dim=2)):
        decays = spans(g_part.mT).exp()  # (B, H, K or 1, n, n)
        fading = F.pad(decays, (0, 0, 1, 0))[..., :-1, :]  # a row down: X_{n-1} is in S_n as it is, and nothing of these X is in S_0
        rows = X_part.unflatten(3, (fading.shape[2], -1)).flatten(4).transpose(2, 3)  # (B, H, K, n, V), or (B, H, 1, n, K V)
        states = (fading @ rows).transpose(2, 3).reshape(X_part.shape)
        if S is not None:
            states = states + F.pad(fade_in(g_part).exp(), (0, 0, 1, 0), value=1)[:, :, :-1, :, None] * S[:, :, None]
        before.append(states)
        S = g_part[:, :, -1, :, None].exp() * states[:, :, -1] + X_part[:, :, -1]
    return torch.cat(before, dim=2), S


def chunked_linear_attention(q, k, v, log_decay, beta=None, state=None, chunk=64):
    """`linear_recurrence` in chunks: same arguments, same result, in time and memory linear in T.

    chunk  tokens a chunk, rounded up to a power of two

    Under autocast the products are in its dtype, but for those inside the chunks (A and L, of which a triangular system is made): these,
    the decays and the sum that is the state stay in float32. (torch.compile makes a backward pass that has them, too, in autocast's dtype.)
    On CUDA, float32 products are as exact as torch.set_float32_matmul_precision lets them be.
    """
    B, T, H, V = v.shape
    given, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    C = 2 ** (min(chunk, T) - 1).bit_length()  # no longer than needed: a generated token is a chunk of one
    N = -(-T // C)

    def chunks(x):  # (B, T, H, X) -> (B, H, N, C, X); padded steps write nothing and keep the state
        x = x.to(dtype)
        if T < N * C:
            x = torch.cat([x, x.new_zeros(B, N * C - T, *x.shape[2:])], dim=1)
        return x.unflatten(1, (N, C)).permute(0, 3, 1, 2, 4)

    q, k, v = chunks(q), chunks(k), chunks(v)
    g = chunks(log_decay if log_decay.dim() == 4 else log_decay[..., None])
    P = fade_in(g).exp()  # (B, H, N, C, K or 1)
    k_out = k * fade_out(g).exp()
    S = None if state is None else state.to(dtype)
    if beta is None:
        # exercise 9: U; before (B, H, N, K, V), the states before the chunks; S, the last one
        U = v
        before, S = diagonal_scan(g.sum(-2), k_out.mT @ U, S)
    else:
        # exercise 10: U; before; S
        b = chunks(beta[..., None])
        bL = b * decayed_products(k, k, g)  # the solver reads only what is below the diagonal, and takes ones on it
        R = torch.linalg.solve_triangular(bL, torch.diag_embed(b[..., 0]), upper=False, unitriangular=True)
        k_in = k * P
        U0, W = R @ v, R @ k_in
        P_C = torch.eye(k.shape[-1], dtype=dtype, device=v.device) * P[..., -1:, :].mT
        S = v.new_zeros(B, H, k.shape[-1], V) if S is None else S
        before, S = scan(P_C - k_out.mT @ W, k_out.mT @ U0, S)
        U = U0 - W @ before
    # exercise 9: o (B, H, N, C, V)
    o = (q * P) @ before + decayed_products(q, k, g) @ U  # what was there before the chunk, and what came in it
    # end of exercise
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T].to(given), S


# ------------------------------------------------------------------------------------------------------------
# 7. GLA, Mamba2, Gated DeltaNet
#
# Each projects, mixes neighbours (Canon-B, or what its authors have: a short convolution with SiLU and without residual, the
# paper's "b"), turns some of the projections into decays and strengths, runs the recurrence, and gates and projects what
# was read. A layer has about 12 D^2 parameters whatever its mixer: the MLP gets what the mixer leaves (`size`). Heads are as in
# the paper, whatever attention's n_head. Without the short convolution Mamba2 and GDN keep its SiLU; GLA has none then.
# ------------------------------------------------------------------------------------------------------------


def short_conv(width, config, std=None):
    """The built-in convolution, or None where it is off; std: of a normal initialisation, in place of Conv1d's."""
    if not config.short_conv:
        return None
    conv = CausalConv(width, 4, residual=False, activation="silu")
    if std is not None:
        nn.init.normal_(conv.weight, std=std)
    return conv


class LinearMixer(nn.Module):
    """What the three share. A subclass gives `size`, of its matrices in D^2. `forward` takes attention's rope and bias too, and has no
    use for them."""

    @staticmethod
    def multiple(D):
        """D must be a multiple of this, so that the heads divide."""
        return 8

    def recur(self, q, k, v, log_decay, beta=None, state=None):
        """o (B, T, H, V); in a stream, the recurrence's state goes on from piece to piece."""
        K, V = k.shape[3], v.shape[3]
        chunk = 32 if K * V < 32 * (K + V) else 64  # a token's work is about K V between chunks and C (K + V) inside: balance them
        o, S = chunked_linear_attention(q, k, v, log_decay, beta, None if state is None else state.get(self), chunk)
        if state is not None:
            state[self] = S
        return o


def initial_dt_bias(n_head):
    """A bias such that softplus(bias) is drawn from 0.001 .. 0.1, uniformly in the logarithm: some heads start slow, some fast."""
    dt = torch.exp(torch.empty(n_head).uniform_(math.log(0.001), math.log(0.1)))
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


class GLA(LinearMixer):
    """Gated linear attention: 4 heads, keys of D/2, values of D, a decay for each key channel."""

    size, n_head = 4, 4

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.qkv = nn.Linear(D, 2 * D, bias=False)
        self.canon = canon_at("b", 2 * D, config)
        self.conv = short_conv(2 * D, config, std=0.02)
        self.decay = nn.Sequential(nn.Linear(D, 16, bias=False), nn.Linear(16, D // 2))  # low rank: few parameters
        self.gate = nn.Linear(D, D, bias=False)
        self.norm = RMSNorm(D // self.n_head)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x, rope=None, bias=None, state=None):
        D = x.shape[-1]
        qkv = self.canon(self.qkv(x), state)
        if self.conv is not None:  # after Canon-B, should both be on (our choice)
            qkv = self.conv(qkv, state)
        log_decay = F.logsigmoid(wide(self.decay(x))) / 16  # of sigmoid(..)^(1/16): near 1, so that memory is long
        q, k, v, log_decay, gate = (
            u.unflatten(-1, (self.n_head, -1)) for u in (*qkv.split([D // 2, D // 2, D], -1), log_decay, self.gate(x))
        )
        o = self.recur(q * q.shape[-1] ** -0.5, k, v, log_decay, state=state)  # (B, T, H, V)
        return self.out((self.norm(o) * F.silu(gate)).flatten(-2))


class Mamba2(LinearMixer):
    """State-space model with scalar decays: 16 heads, values of 2D in all, one key and one query of 64 for all heads."""

    size, n_head, n_state = 6, 16, 64

    def __init__(self, config):
        super().__init__()
        D, H, K = config.d_model, self.n_head, self.n_state
        self.into = nn.Linear(D, 4 * D + 2 * K + H, bias=False)  # z, x, B, C, dt: gate, value, key, query, step
        self.canon = canon_at("b", 4 * D + 2 * K + H, config)
        self.conv = short_conv(2 * D + 2 * K, config)
        self.A_log = nn.Parameter(torch.arange(1.0, H + 1).log())
        self.dt_bias = initial_dt_bias(H)
        self.skip = nn.Parameter(torch.ones(H))  # its authors' "D"
        self.norm = RMSNorm(2 * D)
        self.out = nn.Linear(2 * D, D, bias=False)

    def forward(self, x, rope=None, bias=None, state=None):
        D, H, K = x.shape[-1], self.n_head, self.n_state
        z, xBC, dt = self.canon(self.into(x), state).split([2 * D, 2 * D + 2 * K, H], -1)
        xBC = F.silu(xBC) if self.conv is None else self.conv(xBC, state)  # without: the SiLU alone, as in GDN (our choice)
        value, key, query = xBC.split([2 * D, K, K], -1)
        value = wide(value.unflatten(-1, (H, -1)))
        dt = F.softplus(wide(dt) + self.dt_bias)  # (B, T, H)
        o = self.recur(query[:, :, None], key[:, :, None], dt[..., None] * value, -self.A_log.exp() * dt, state=state)
        y = (o + self.skip[:, None] * value).flatten(-2)
        return self.out(self.norm(y * F.silu(z)).to(z.dtype))


class GatedDeltaNet(LinearMixer):
    """The delta rule with scalar decays: keys of 3D/4 and values of 3D/2 in all, one head for every 128 dims of D and at least two."""

    size = 6

    @staticmethod
    def heads(D):
        return max(2, D // 128)  # the paper's 4 and 6 at D = 512 and 768; at least two is our choice

    @staticmethod
    def multiple(D):
        return 4 * GatedDeltaNet.heads(D)

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.n_head = H = self.heads(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.canon = canon_at("b", 3 * D, config)
        self.conv = short_conv(3 * D, config, std=0.02)
        self.decay = nn.Linear(D, H, bias=False)
        self.strength = nn.Linear(D, H, bias=False)
        self.A_log = nn.Parameter(torch.empty(H).uniform_(1e-6, 16).log())
        self.dt_bias = initial_dt_bias(H)
        self.gate = nn.Linear(D, 3 * D // 2, bias=False)
        self.norm = RMSNorm(3 * D // 2 // H)
        self.out = nn.Linear(3 * D // 2, D, bias=False)

    def forward(self, x, rope=None, bias=None, state=None):
        D = x.shape[-1]
        qkv = self.canon(self.qkv(x), state)
        qkv = F.silu(qkv) if self.conv is None else self.conv(qkv, state)
        q, k, v, gate = (
            u.unflatten(-1, (self.n_head, -1)) for u in (*qkv.split([3 * D // 4, 3 * D // 4, 3 * D // 2], -1), self.gate(x))
        )
        q, k = F.normalize(wide(q), dim=-1), F.normalize(wide(k), dim=-1)  # of unit length: b_t removes the share b_t
        log_decay = -self.A_log.exp() * F.softplus(wide(self.decay(x)) + self.dt_bias)  # (B, T, H)
        beta = wide(self.strength(x)).sigmoid()
        o = self.recur(q * q.shape[-1] ** -0.5, k, v, log_decay, beta, state)
        return self.out((self.norm(o) * F.silu(gate)).flatten(-2))


MIXERS = {"attention": Attention, "gla": GLA, "mamba2": Mamba2, "gdn": GatedDeltaNet}


# ------------------------------------------------------------------------------------------------------------
# 8. MLP
# ------------------------------------------------------------------------------------------------------------


def relu2(x):
    return F.relu(x).square()


class MLP(nn.Module):
    """size D^2 parameters, gated (width size D/3, to the nearest multiple of 8) or standard (width size D/2).

    swiglu  down(silu(gate) * up)        silu   down(silu(up))
    swiglu-relu2  with relu(gate)^2      relu2  down(relu(up)^2)

    size is 8 beside attention or GLA: widths 8D/3 and 4D; 6 beside Mamba2 or GDN. Canon-D sits before the activation, on
    gate and up together.
    """

    def __init__(self, config, size):
        super().__init__()
        D = config.d_model
        self.gated = config.mlp.startswith("swiglu")
        self.act = relu2 if config.mlp.endswith("relu2") else F.silu
        width = max(8, 8 * round(size * D / 24)) if self.gated else size * D // 2
        up_width = 2 * width if self.gated else width
        self.up = nn.Linear(D, up_width, bias=False)
        self.canon = canon_at("d", up_width, config)
        self.down = nn.Linear(width, D, bias=False)
        # silu(gate) * up right behind Canon-D is done with it, in one pass over memory (kernels.py)
        self.fused = config.mlp == "swiglu" and "d" in config.canon and not config.canon_silu
        if self.fused:
            self.canon.activation = "swiglu"

    def forward(self, x, state=None):
        # exercise 6
        h = self.canon(self.up(x), state)
        if self.fused:
            return self.down(h)
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            return self.down(self.act(gate) * up)
        return self.down(self.act(h))


# ------------------------------------------------------------------------------------------------------------
# 9. The block
# ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Mixer and MLP, each behind a norm and inside a residual; Canon A and C follow the norms."""

    def __init__(self, config, mixer):
        super().__init__()
        self.norm1 = RMSNorm(config.d_model)
        self.canon_a = canon_at("a", config.d_model, config)
        self.mixer = MIXERS[mixer](config)  # with Canon B inside
        self.mlp = None
        if config.mlp != "none":
            self.norm2 = RMSNorm(config.d_model)
            self.canon_c = canon_at("c", config.d_model, config)
            self.mlp = MLP(config, 12 - self.mixer.size)  # with Canon D inside

    def forward(self, x, rope=None, bias=None, state=None):
        # exercise 6
        x = x + self.mixer(self.canon_a(self.norm1(x), state), rope, bias, state)
        if self.mlp is None:
            return x
        return x + self.mlp(self.canon_c(self.norm2(x), state), state)


# ------------------------------------------------------------------------------------------------------------
# 10. The model
# ------------------------------------------------------------------------------------------------------------


class CanonGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        pattern = config.mixer.split(",")
        self.blocks = nn.ModuleList(Block(config, pattern[i % len(pattern)]) for i in range(config.n_layer))
        self.norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for module in self.modules():  # Canon is neither: it keeps its own initialisation
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02 if module in (self.embed, self.head) else config.init_std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
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
    def generate(self, tokens, max_new_tokens, temperature=1.0, stop=None, generator=None, lengths=None):
        """Continue tokens (B, T) up to T + max_new_tokens; returns (B, T + new) int64.

        temperature 0 takes the likeliest token, 1 samples from the model. A row that has produced the token `stop`
        is filled up with it, and when all rows have, generation ends. `generator` is a torch.Generator on the
        tokens' device. lengths (B,) int64: how many of each row's tokens are given, at least one; the row goes on right behind
        them, and what stands there is ignored. Raises ValueError if the result would be longer than block_size + 1.
        """
        total = tokens.shape[1] + max_new_tokens
        if total > self.config.block_size + 1:  # the last token is never fed
            raise ValueError(
                f"{tokens.shape[1]} + {max_new_tokens} tokens do not fit in block_size = {self.config.block_size}"
            )
        if lengths is None:
            lengths = torch.full(tokens.shape[:1], tokens.shape[1], device=tokens.device)
        start = int(lengths.min())
        state, piece, text = {}, tokens[:, :start], tokens[:, :start]
        done = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        for at in range(start, total):
            logits = self(piece, state=state)[0][:, -1].float()
            if temperature == 0:
                piece = logits.argmax(-1, keepdim=True)
            else:
                piece = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            reading = (at < lengths)[:, None]  # rows that are still reading what they were given
            if at < tokens.shape[1]:
                piece = torch.where(reading, tokens[:, at : at + 1], piece)
            if stop is not None:
                piece = piece.masked_fill(done, stop)
                done = done | ((piece == stop) & ~reading)
            text = torch.cat([text, piece], dim=1)
            if stop is not None and done.all():
                break
        return text

    def parameter_counts(self):
        """dict: all parameters, of them in the embedding and head, and of them in Canon layers."""
        count = lambda ps: sum(p.numel() for p in ps)  # noqa: E731
        ends = {self.embed.weight, self.head.weight}  # one tensor if tied
        canon = [m.weight for m in self.modules() if isinstance(m, Canon)]
        return {"total": count(self.parameters()), "embeddings": count(ends), "canon": count(canon)}
