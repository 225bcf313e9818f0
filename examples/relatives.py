"""Canon's relatives: other cheap ways to mix a token with the few before it, each as a Canon layer.

python examples/relatives.py --task copy --preset nano --canon abcd --canon-type gated

To write your own Canon layer, copy the imports, one class, and the last three lines. Each docstring
says where the relative is found, and at which points. All tensors are (B, T, width).
"""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
import canon_gpt
import train
from canon_gpt import CANONS, Canon, ShortConv, causal_conv, exchange_tail, require


class GatedCanon(Canon):
    """Canon, where each channel's input gates what is added to it. (Ours.)"""

    def __init__(self, width, config):
        super().__init__(width, config)
        self.gate = nn.Parameter(torch.zeros(width))

    def forward(self, x, state=None):
        mixed = super().forward(x, state)
        kept = x if self.residual else 0
        return kept + 2 * torch.sigmoid(self.gate * x) * (mixed - kept)


class DynamicCanon(Canon):
    """Canon, where each token scales the four weights, by factors between 0 and 2. (The paper
    leaves open whether that pays.)"""

    def __init__(self, width, config):
        super().__init__(width, config)
        refuse_settings(config)
        self.factors = nn.Linear(width, 4)

    def forward(self, x, state=None):
        factors = 1 + torch.tanh(self.factors(x))  # (B, T, 4)
        T, seen = x.shape[1], with_earlier(self, x, 3, state)
        y = x
        for i, weight in enumerate(self.weight):
            y = y + factors[..., i, None] * weight * seen[:, 3 - i : 3 - i + T]
        return y


class Inkling(Canon):
    """Canon at other points: on k, on v, and on what attention and MLP add to the stream. (In the
    model Inkling, `InklingShortConvolution` in transformers. Use it with `--canon abc`, since
    `InklingBlock` moves A and C.)"""

    def __init__(self, width, config):
        D = config.d_model
        self.n_skipped = D if width == 3 * D else 0  # at B these are q's channels
        super().__init__(width - self.n_skipped, config)

    def forward(self, x, state=None):
        skipped, rest = x.tensor_split([self.n_skipped], dim=-1)
        return torch.cat([skipped, super().forward(rest, state)], dim=-1)


class InklingBlock(canon_gpt.Block):
    def forward(self, x, state=None):
        if not isinstance(self.canon_a, Inkling):
            return super().forward(x, state)
        x = x + self.canon_a(self.mixer(self.norm1(x), state), state)
        return x + self.canon_c(self.mlp(self.norm2(x), state), state)


class PrimerConvolution(Canon):
    """A convolution of three tokens, without residual. (Primer, https://arxiv.org/abs/2109.08668,
    "multi-DConv-head attention"; at B.)"""

    def __init__(self, width, config):
        refuse_settings(config)
        config = dataclasses.replace(config, canon_kernel=3, canon_residual=False)
        super().__init__(width, config)


class MambaConvolution(ShortConv):
    """A convolution of four tokens with a bias and SiLU, without residual. (Mamba's `conv1d`,
    `ShortConvolution` in fla; at B.)"""

    def __init__(self, width, config):
        refuse_settings(config)
        super().__init__(width, bias=True)


class TokenShift(nn.Module):
    """Per channel a mixture of x_t and x_{t-1}. (RWKV-4's `time_mix`, with one mixture for each
    projection after A and C, https://arxiv.org/abs/2305.13048; `shift_tokens` in x-transformers is
    a fixed one.)"""

    def __init__(self, width, config):
        super().__init__()
        refuse_settings(config)
        self.share = nn.Parameter(torch.linspace(0, 1, width))  # of x_t

    def forward(self, x, state=None):
        weight = torch.stack([self.share, 1 - self.share])  # (2, width)
        tail = exchange_tail(self, x, 1, state)
        return causal_conv(x, weight, residual=False, tail=tail)


class Smear(nn.Module):
    """x_t and a learnt scalar times a gate times x_{t-1}; the first 24 channels of x_t give the
    gate. (nanochat's `smear_gate`, once, after the embedding; modded-nanogpt takes 12.)"""

    def __init__(self, width, config):
        super().__init__()
        refuse_settings(config)
        self.gate = nn.Linear(min(width, 24), 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x, state=None):
        gate = self.scale * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))
        return x + gate * with_earlier(self, x, 1, state)[:, :-1]


class Window(nn.Module):
    """Attention over the last four tokens: one head, keys of 16 channels, a bias per distance, and
    x itself as values. (Sliding-window attention, which has layers to itself, for example in
    Longformer, https://arxiv.org/abs/2004.05150.)"""

    def __init__(self, width, config):
        super().__init__()
        refuse_settings(config)
        self.query = nn.Linear(width, 16, bias=False)
        self.key = nn.Linear(width, 16, bias=False)
        self.bias = nn.Parameter(torch.zeros(4))  # the last one is the token's own

    def forward(self, x, state=None):
        seen = with_earlier(self, x, 3, state)
        keys, values = self.key(seen).unfold(1, 4, 1), seen.unfold(1, 4, 1)  # (B, T, .., 4)
        scores = (self.query(x)[..., None] * keys).sum(dim=-2) / 4 + self.bias  # 4 is sqrt(16)
        return x + (scores.softmax(-1)[..., None, :] * values).sum(dim=-1)


def with_earlier(layer, x, n, state):
    """(B, n + T, width): x after the n inputs before it, which are zeros at the start of a text."""
    tail = exchange_tail(layer, x, n, state)
    return F.pad(x, (0, 0, n, 0)) if tail is None else torch.cat([tail, x], dim=1)


def refuse_settings(config):
    """For a relative that does not follow Canon's own settings."""
    for name in ("canon_kernel", "canon_residual", "canon_silu"):
        value, default = getattr(config, name), getattr(canon_gpt.Config, name)
        require(value == default, name, value, f"{config.canon_type} takes only {default}")


canon_gpt.Block = InklingBlock
CANONS.update(
    gated=GatedCanon,
    dynamic=DynamicCanon,
    inkling=Inkling,
    primer=PrimerConvolution,
    mamba=MambaConvolution,
    shift=TokenShift,
    smear=Smear,
    window=Window,
)
if __name__ == "__main__":
    train.main()
