"""A mixture of experts in the blocks of the search's module: by torch alone where experts are whole, else on ranks.

Shapes: n tokens, k experts chosen for each, e experts, d width, h hidden width.
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
