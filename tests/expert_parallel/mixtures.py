"""A small mixture of experts, dropless, whose experts may be spread over ranks; and fits of it.

Shapes: n tokens, k experts chosen for each, e experts, d width, h hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy, context_parallel_attention, spread_experts
from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, full_weights, local
from tests.trainer.plain import ModelModule, differ_by_rank, fill
from tests.trainer.runs import loader, make_trainer

WIDTH = 6
HIDDEN = 5
CHOSEN = 2
NUM_EXPERTS = 8
ACCUMULATE = 2
CASE = Case(seed=31, telling="labels", num_batches=5, num_ranks=4, gap="micro_batches")


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(number, HIDDEN, width))
        self.down = nn.Parameter(torch.empty(number, width, HIDDEN))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's layers do."""
        nn.init.normal_(self.up, std=0.5)
        nn.init.normal_(self.down, std=0.5)

    def weights(self) -> tuple[Tensor, Tensor]:
        """What the experts of this rank multiply by."""
        return local(self.up), local(self.down)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Compute ``rows``, sorted by expert; ``counts`` has how many each of this rank's experts gets."""
        by_expert = zip(rows.split(counts), *self.weights(), strict=True)
        return torch.cat([torch.tanh(part @ up.T) @ down.T for part, up, down in by_expert])


class Mixture(nn.Module):
    """A residual layer in which a gate chooses the experts of each token."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number, bias=False)
        self.experts = Experts(number, width)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [n, d]
        weights, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN)  # [n, k]
        return hidden + self.mix(tokens, chosen, weights).view_as(hidden)

    def mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what the chosen experts make of each token: by torch alone where they are whole."""
        held = self.experts.up
        if isinstance(held, DTensor):
            mesh = held.device_mesh["expert_parallel"]  # in a unit of its own it is sharded here
            return dispatch_tokens(tokens, chosen, weights, held.shape[0], self.experts, mesh)
        up, down = self.experts.weights()
        hidden = torch.einsum("nkhd,nd->nkh", up[chosen], tokens).tanh()
        return torch.einsum("nkdh,nkh,nk->nd", down[chosen], hidden, weights)


class MixtureDecoder(nn.Module):
    """Embedding, two mixtures, each behind an attention without weights, and a head; not ``has_values``: as drawn."""

    def __init__(self, number: int = NUM_EXPERTS, has_values: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mixture(number) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if has_values:
            fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            heads = hidden.unsqueeze(1)  # [b, 1, s, d]
            attended = context_parallel_attention(heads, heads, heads, is_causal=True)
            hidden = block(hidden + attended.squeeze(1))
        return self.head(hidden)


class SpreadModule(ModelModule):
    """Spreads the experts where the mesh has a dimension for them."""

    def configure_model(self) -> None:
        if "expert_parallel" in self.device_mesh.mesh_dim_names:
            for block in self.model.blocks:
                spread_experts(block.experts, self.device_mesh["expert_parallel"])


class UnequalStart(SpreadModule):
    """Ranks start with other weights than the first."""

    def configure_model(self) -> None:
        differ_by_rank(self.model)
        super().configure_model()


@dataclass(frozen=True)
class Fit:
    """What a fit left behind."""

    weights: dict[str, Tensor]
    grad_norm: float | None
    described: dict[str, Any]


def fit(
    options: dict[str, Any],
    make: type[ModelModule] = SpreadModule,
    number: int = NUM_EXPERTS,
    case: Case = CASE,
    callbacks: list[Callback] | None = None,
    accumulate: int = ACCUMULATE,
    **kwargs: Any,
) -> Fit:
    """Runs on every rank: train a mixture, with experts on two ranks unless ``options`` say otherwise."""
    module = make(MixtureDecoder(number))
    strategy = AutomodelStrategy(**{"expert_parallel_size": 2, **options})
    data = loader(case, dist.get_world_size() // case.num_ranks)
    trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, callbacks=callbacks, **kwargs)
    trainer.fit(module, data)
    norm = strategy.last_step.grad_norm
    return Fit(full_weights(module.model), None if norm is None else float(norm), strategy.describe())
