"""Your own Canon layer: here each channel's input gates what Canon adds to it.

python examples/gated.py --task copy --preset nano --canon abcd --canon-type gated
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
import train
from canon_gpt import CANONS, Canon


class GatedCanon(Canon):
    def __init__(self, width, config):
        super().__init__(width, config)
        self.gate = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x, state=None):  # (B, T, width) -> same
        mixed = super().forward(x, state)
        kept = x if self.residual else 0
        return kept + 2 * torch.sigmoid(self.gate * x) * (mixed - kept)


CANONS["gated"] = GatedCanon
if __name__ == "__main__":
    train.main()
