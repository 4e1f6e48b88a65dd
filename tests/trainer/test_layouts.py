"""Parts of a model that not every micro-batch uses, or not every rank, or none: the weights stay exact.

Every run has a short last window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import LEARNING_RATE, Block, TinyDecoder, assert_exact
from tests.trainer.plain import ModelModule, fill, plain_weights
from tests.trainer.runs import STRATEGIES, by_default, fit_weights

CASE4 = Case(seed=31, telling="labels", num_batches=5, num_ranks=4, gap="micro_batches")
CASE2 = replace(CASE4, num_ranks=2)
ACCUMULATE = 3

MODES: dict[str, dict[str, Any]] = {
    f"{deferral}-{'resharded' if reshard else 'kept'}": {
        "defer_fsdp_grad_sync": deferral,
        "reshard_during_accumulation": reshard,
    }
    for deferral in (True, False, "all_reduce")
    for reshard in (True, False)
}
REPLICAS = {"data_parallel_replicate_size": 2}
DDP = {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}


class PartlyUsedBlock(Block):
    """Leaves its linear layer out where it is told so."""

    def forward(self, hidden: Tensor, with_linear: bool = True) -> Tensor:
        return super().forward(hidden) if with_linear else hidden + torch.tanh(self.norm(hidden))


class PartlyUsed(TinyDecoder):
    """Uses a unit, a layer of another one and two parameters of the root in these micro-batches only.

    FSDP2 shards the first of the two parameters, and not the scalar.
    """

    def __init__(self, unit: set[int], layer: set[int], parameter: set[int]) -> None:
        super().__init__(seed=2)
        self.blocks.append(PartlyUsedBlock())
        self.shift = nn.Parameter(torch.empty(self.head.in_features))
        self.gain = nn.Parameter(torch.empty(()))
        self.used_in = unit, layer, parameter
        self.step = 0
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        with_unit, with_layer, with_parameter = (self.step in used for used in self.used_in)
        first, conditional, partly_used = self.blocks
        hidden = first(self.embedding(input_ids))
        if with_unit:
            hidden = conditional(hidden)
        hidden = partly_used(hidden, with_layer)
        if with_parameter:
            hidden = hidden + self.gain * self.shift
        return self.head(self.norm(hidden))


class UsedByOneRank(PartlyUsed):
    """Uses the layer and the parameter on one rank only, in the micro-batches of its schedule.

    Attributes:
        rank: whose micro-batch it is, in the plain loop; elsewhere the process knows.
    """

    rank: int | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        rank = dist.get_rank() if self.rank is None else self.rank
        schedule = self.used_in
        if rank != 1:
            self.used_in = schedule[0], set(), set()
        try:
            return super().forward(input_ids)
        finally:
            self.used_in = schedule


ALWAYS = set(range(5))
BY_RANK = {
    "always": (ALWAYS, ALWAYS, ALWAYS),
    "first-and-last": (ALWAYS, {0}, {4}),
    "nobody-in-a-window": (ALWAYS, {3}, {0}),
}
ENGINES = {**STRATEGIES, "offloaded": {"cpu_offload": True}, "ddp": DDP}


def _fit_by_schedule(options: dict[str, Any], schedule: tuple[set[int], ...]) -> dict[str, Tensor]:
    settings = {"accumulate_grad_batches": ACCUMULATE}
    return fit_weights(lambda: ModelModule(UsedByOneRank(*schedule)), options, CASE2, **settings)


@pytest.mark.parametrize("schedule", BY_RANK.values(), ids=BY_RANK)
@pytest.mark.parametrize("options", by_default(ENGINES, "kept", "ddp"))
@pytest.mark.each_value
def test_use_that_differs_between_ranks(
    pool2: RankPool, options: dict[str, Any], schedule: tuple[set[int], ...]
) -> None:
    """Parts of a unit that one rank uses and another does not: exact; without a gradient where no rank does."""
    expected = plain_weights(UsedByOneRank(*schedule), ACCUMULATE, CASE2)
    assert_exact(pool2.run(_fit_by_schedule, options, schedule), expected)


# --- A parameter that nothing uses, in a model with parameters that FSDP2 does not shard ------------------------------


class Scalars(TinyDecoder):
    """0-dimensional parameters in the root and in a block, and single-element and empty ones beside them."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.temperature = nn.Parameter(torch.empty(()))
        self.blocks[1].gain = nn.Parameter(torch.empty(()))
        self.single = nn.Parameter(torch.empty(1))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden * (1 + self.blocks[1].gain) + self.single
        return self.head(self.norm(hidden)) * torch.exp(self.temperature)


class UnfreezesWhatIsUnused(ModelModule):
    """Has a parameter that no forward uses, frozen until the second epoch, and decays all that have a gradient."""

    def __init__(self) -> None:
        model = Scalars()
        model.unused = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        super().__init__(model)

    def on_train_epoch_start(self) -> None:
        self.model.unused.requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, weight_decay=0.5)


@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=str)
def test_unused_once_it_is_unfrozen(pool2: RankPool, options: dict[str, Any]) -> None:
    """It gets no gradient, as in one process: a zero one would let the optimizer decay it."""
    settings = {"accumulate_grad_batches": ACCUMULATE, "max_epochs": 2}
    for weights in pool2.run(fit_weights, UnfreezesWhatIsUnused, options, **settings):
        assert (weights["unused"] == 1).all()
