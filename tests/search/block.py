"""The block that the search's module repeats, and the mixture of experts in it: by torch alone where experts are whole.

Shapes: b rows, s positions, d width; n tokens, k experts chosen for each, e experts, h hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import spread_experts
from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from tests.search.data import WIDTH

NUM_EXPERTS = 4
HIDDEN = 3
CHOSEN = 2


class Mixture(nn.Module):
    """Adds what the experts make of each token that a gate has chosen for them; drops none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [n, d]
        probabilities = self.gate(tokens).softmax(-1)  # [n, e]
        weights, chosen = probabilities.topk(CHOSEN)  # [n, k]
        if isinstance(self.up, DTensor):
            mesh = self.up.device_mesh["expert_parallel"]
            mixed = dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, self._compute, mesh)
        else:
            of_expert = torch.zeros_like(probabilities).scatter(1, chosen, weights)
            computed = torch.tanh(torch.einsum("nd,edh->neh", tokens, self.up))
            mixed = torch.einsum("neh,ehd,ne->nd", computed, self.down, of_expert)
        return hidden + mixed.view_as(hidden)

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = zip(rows.split(counts), self.up.to_local(), self.down.to_local(), strict=True)
        return torch.cat([torch.tanh(part @ up) @ down for part, up, down in parts])


def spread(module: Any, mesh: Any) -> None:
    """What `configure_model` does."""
    for part in module.modules():
        if isinstance(part, Mixture):
            spread_experts(part, mesh["expert_parallel"], names=["up", "down"])


class Block(nn.Module):
    """A residual block that mixes each position with the mean of those before it; counts its forwards."""

    def __init__(self, output: str, counter: str | None, clamps: bool = False, mixes: bool = False) -> None:
        super().__init__()
        self.output = output
        self.counts = counter is not None
        self.clamps = clamps
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture() if mixes else nn.Identity()
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
