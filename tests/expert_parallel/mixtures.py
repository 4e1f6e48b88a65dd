"""A small mixture of experts, dropless, whose experts may be spread over ranks; and fits of it.

Shapes: n tokens, k experts chosen for each, e experts, d width, h hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, context_parallel_attention, spread_experts
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, Outcome, full_weights, micro_batches, weight_error
from tests.trainer.plain import ModelModule, differ_by_rank, fill
from tests.trainer.runs import make_trainer

WIDTH = 6
HIDDEN = 5
CHOSEN = 2
NUM_EXPERTS = 8
ACCUMULATE = 2
CASE = Case(seed=31, telling="labels", num_batches=5, num_ranks=4, gap="micro_batches")


def local(parameter: Tensor) -> Tensor:
    """This rank's experts."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(number, HIDDEN, width))
        self.down = nn.Parameter(torch.empty(number, width, HIDDEN))

    def weights(self) -> tuple[Tensor, Tensor]:
        """What the experts of this rank multiply by."""
        return local(self.up), local(self.down)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Compute ``rows``, sorted by expert; ``counts`` has how many each of this rank's experts gets."""
        up, down = self.weights()
        by_expert = zip(rows.split(counts), up, down, strict=True)
        return torch.cat([torch.tanh(part @ own_up.T) @ own_down.T for part, own_up, own_down in by_expert])


class Mixture(nn.Module):
    """A residual layer in which a gate chooses the experts of each token."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number, bias=False)
        self.experts = Experts(number, width)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [n, d]
        probabilities = self.gate(tokens).softmax(-1)  # [n, e]
        self.balance = probabilities.shape[1] * (probabilities.mean(0) ** 2).sum()
        weights, chosen = probabilities.topk(CHOSEN)  # [n, k]
        order = chosen.flatten().argsort(stable=True)  # of the pairs of a token and an expert, by expert
        counts = torch.bincount(chosen.flatten(), minlength=probabilities.shape[1])
        computed = self.compute(tokens[order // CHOSEN], counts)
        # [n, k, d]
        by_pair = torch.zeros_like(computed).index_copy(0, order, computed).view(*chosen.shape, -1)
        return hidden + (by_pair * weights[..., None]).sum(1).view_as(hidden)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows that are sorted by expert, on the ranks that hold these."""
        weights = self.experts.up
        if not isinstance(weights, DTensor):
            return self.experts(rows, counts.tolist())
        group = weights.device_mesh["expert_parallel"].get_group()  # in a unit of its own it is sharded here
        return compute_on_ranks(rows, counts, group, self.experts)


def compute_on_ranks(
    rows: Tensor, counts: Tensor, group: dist.ProcessGroup, compute: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Send rows, sorted by expert, to the ranks that hold these, and return what ``compute`` makes of them there.

    ``counts`` [e] has this rank's rows for each expert; each rank holds as many experts, in the order of the
    ranks. A collective over ``group``.
    """
    counts = counts.view(group.size(), -1)  # [rank, its experts]
    arriving = torch.empty_like(counts)  # [from rank, own experts]
    dist.all_to_all_single(arriving, counts, group=group)
    sent = counts.sum(1).tolist()
    received = arriving.sum(1).tolist()
    here = exchange(rows, sent, received, group)
    expert = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
    expert = expert.repeat_interleave(arriving.flatten())
    order = expert.argsort(stable=True)
    computed = compute(here[order], arriving.sum(0).tolist())
    return exchange(torch.zeros_like(computed).index_copy(0, order, computed), received, sent, group)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of ``group``, so many to each, and return those that arrive."""
    output = rows.new_empty(sum(received), rows.shape[1])
    return all_to_all_single(output, rows, received, sent, group=group)


class MixtureDecoder(nn.Module):
    """Embedding, two mixtures, each behind an attention without weights, and a head."""

    def __init__(self, number: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mixture(number) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
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


def data_of_rank(case: Case = CASE, ranks_per_batch: int = 1) -> DataLoader:
    """This rank's micro-batches; ``ranks_per_batch`` neighbours share each of them."""
    return DataLoader(micro_batches(case)[dist.get_rank() // ranks_per_batch], batch_size=None)


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
    data = data_of_rank(case, dist.get_world_size() // case.num_ranks)
    trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, callbacks=callbacks, **kwargs)
    trainer.fit(module, data)
    norm = strategy.last_step.grad_norm
    return Fit(full_weights(module.model), None if norm is None else float(norm), strategy.describe())


def error(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest deviation of a weight, relative to the largest weight of its tensor."""
    return weight_error(Outcome(weights), Outcome(expected))
