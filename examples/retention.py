"""Your own mixer: here RetNet's retention, without its gate, norm and rotation
(https://arxiv.org/abs/2307.08621).

python examples/retention.py --task copy --preset nano --mixer retention --canon abcd \
    --N 12 --block-size 25
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
import train
from canon_gpt import MIXERS, LinearMixer, canon_at, heads


class Retention(LinearMixer):
    budget = 4  # its matrices hold 4 D^2 parameters, and the MLP gets the other 8
    n_head = 4

    def __init__(self, config):
        super().__init__()
        config.check_width(multiple_of=self.n_head)  # the heads divide the width
        D = config.d_model
        self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
        self.canon_b = canon_at("b", 3 * D, config)
        self.out = torch.nn.Linear(D, D, bias=False)

    def forward(self, x, state=None):  # (B, T, D) -> (B, T, D)
        q, k, v = self.canon_b(self.qkv(x), state).chunk(3, dim=-1)
        q, k, v = (heads(u, self.n_head) for u in (q, k, v))
        decay = 1 - 2.0 ** -torch.arange(5.0, 5 + self.n_head, device=x.device)
        log_decay = decay.log().expand(q.shape[:3])  # (B, T, H)
        o = self.recur(q * q.shape[-1] ** -0.5, k, v, log_decay, state=state)
        return self.out(o.flatten(2))


MIXERS["retention"] = Retention
if __name__ == "__main__":
    train.main()
