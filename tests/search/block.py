"""The block that the search's module repeats. Shapes: b rows, s positions, d width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel import spread_experts
from tests.expert_parallel.mixtures import Mixture
from tests.search.data import WIDTH

NUM_EXPERTS = 4


def spread(module: Any, mesh: Any) -> None:
    """What `configure_model` does."""
    for part in module.modules():
        if isinstance(part, Mixture):
            spread_experts(part.experts, mesh["expert_parallel"])


class Block(nn.Module):
    """A residual block that mixes each position with the mean of those before it; counts its forwards."""

    def __init__(self, output: str, counter: str | None, clamps: bool = False, mixes: bool = False) -> None:
        super().__init__()
        self.output = output
        self.counts = counter is not None
        self.clamps = clamps
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(NUM_EXPERTS, WIDTH) if mixes else nn.Identity()
        if counter is not None:
            self.register_buffer("num_forwards", torch.zeros(()), persistent=counter == "persistent")

    def forward(self, hidden: Any) -> Any:
        hidden = plain(hidden)
        if self.clamps and self.training:
            self.linear.weight.data.clamp_(-0.4, 0.4)
        positions = torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)
        new = hidden + torch.tanh(self.linear(hidden + hidden.cumsum(dim=1) / positions))  # [b, s, d]
        new = self.mixture(new)
        if self.counts:
            # Bounded: a growing factor would make training chaotic, and rounding large.
            new = new * (1 + 0.05 * (self.num_forwards % 7))
            if self.training:
                self.num_forwards += 1
        return {"tensor": new, "tuple": (new, None), "dict": {"hidden": new, "name": "block"}}[self.output]


def plain(hidden: Any) -> Tensor:
    """The tensor that a block has returned."""
    if isinstance(hidden, Tensor):
        return hidden
    return hidden["hidden"] if isinstance(hidden, dict) else hidden[0]


def first_block(module: nn.Module) -> Block:
    """The block whose weight is penalised, hooked, or followed by a teacher."""
    return next(each for each in module.modules() if isinstance(each, Block))
