"""Replicas of shards, worlds of one, parts of a model that not every micro-batch uses: the weights stay exact.

Four ranks are two replicas of two shards. Every run has a short last window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import PLAN, Block, TinyDecoder, assert_exact, full_weights, micro_batches
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import by_default, first_by_default, loader, make_trainer

CASE4 = Case(seed=31, telling="labels", num_batches=5, num_ranks=4, gap="micro_batches")
CASE2 = replace(CASE4, num_ranks=2)
CASE1 = replace(CASE4, num_ranks=1)
ACCUMULATE = 3
CLIP = 0.05

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


def decoder() -> nn.Module:
    return TinyDecoder(CASE4.seed).double()


def clip(parameters: list[nn.Parameter]) -> Any:
    return nn.utils.clip_grad_norm_(parameters, CLIP)


class PartlyUsedBlock(Block):
    """Leaves its linear layer out where it is told so."""

    def forward(self, hidden: Tensor, with_linear: bool = True) -> Tensor:
        return super().forward(hidden) if with_linear else hidden + torch.tanh(self.norm(hidden))


class PartlyUsed(TinyDecoder):
    """Uses a whole unit, a layer of another unit and a parameter of the root in these micro-batches only."""

    def __init__(self, unit: set[int], layer: set[int], parameter: set[int]) -> None:
        super().__init__(seed=2)
        self.blocks.append(PartlyUsedBlock())
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, self.head.in_features))
        self.used_in = unit, layer, parameter
        self.step = 0
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.blocks[-1].parameters():
                weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        with_unit, with_layer, with_parameter = (self.step in used for used in self.used_in)
        first, conditional, partly_used = self.blocks
        hidden = first(self.embedding(input_ids))
        if with_unit:
            hidden = conditional(hidden)
        hidden = partly_used(hidden, with_layer)
        if with_parameter:
            hidden = hidden + self.shift
        return self.head(self.norm(hidden))


UNUSED_IN_THE_SECOND_WINDOW = ({0, 2}, {1}, {0})


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
ENGINES = {
    "kept": MODES["True-kept"],
    "resharded": MODES["True-resharded"],
    "undeferred": MODES["False-resharded"],
    "offloaded": {"cpu_offload": True},
    "ddp": DDP,
}


def _fit_by_schedule(
    options: dict[str, Any],
    case: Case,
    make: type[PartlyUsed],
    schedule: tuple[set[int], ...],
    **settings: Any,
) -> dict[str, Tensor]:
    module = ModelModule(make(*schedule))
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, **settings)
    trainer.fit(module, loader(case))
    return full_weights(module.model)


@pytest.mark.parametrize("schedule", BY_RANK.values(), ids=BY_RANK)
@pytest.mark.parametrize("options", by_default(ENGINES, "kept", "ddp"))
@pytest.mark.each_value
def test_use_that_differs_between_ranks(
    pool2: RankPool, options: dict[str, Any], schedule: tuple[set[int], ...]
) -> None:
    """Parts of a unit that one rank uses and another does not: exact; without a gradient where no rank does."""
    expected = plain_weights(UsedByOneRank(*schedule), ACCUMULATE, CASE2)
    assert_exact(pool2.run(_fit_by_schedule, options, CASE2, UsedByOneRank, schedule), expected)


@pytest.mark.parametrize("options", first_by_default([MODES["True-kept"], DDP]))
def test_world_of_one(pool1: RankPool, options: dict[str, Any]) -> None:
    """`devices=1` is exact as well, clipped and with parts left out."""
    schedule = UNUSED_IN_THE_SECOND_WINDOW
    expected = plain_weights(PartlyUsed(*schedule), ACCUMULATE, CASE1, clip=clip)
    weights = pool1.run(_fit_by_schedule, options, CASE1, PartlyUsed, schedule, gradient_clip_val=CLIP)
    assert_exact(weights, expected)


def _describe() -> tuple[Any, dict[str, Any]]:
    strategy = AutomodelStrategy(**REPLICAS, defer_fsdp_grad_sync="all_reduce")
    assert set(strategy.describe()) == {"options"}
    make_trainer(strategy, limit_train_batches=1).fit(ModelModule(decoder()), loader(CASE4))
    return strategy.device_mesh.mesh_dim_names, strategy.describe()


def test_describe_replicas(pool4: RankPool) -> None:
    """Mesh, divisor, units and modes as they really are."""
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    for found, described in pool4.run(_describe):
        assert found == names
        assert described["gradient_divisor"] == 4
        assert described["mesh"] == {**dict(zip(names, (2, 2, 1), strict=True)), "data_parallel": 4}
        assert described["defer_fsdp_grad_sync"] == "all_reduce"
        assert described["precision"]["parameters"] == "torch.float64"
        assert described["units"] == [f"model.blocks.{i} (Block)" for i in range(3)]
        assert described["roots"] == ["(ModelModule)"]


# --- Meshes that the caller builds


class OwnNames(ModelModule):
    """Applies its plan over the dimension as the caller called it."""

    def configure_model(self) -> None:
        if "tp" in (self.device_mesh.mesh_dim_names or ()):
            parallelize_module(self.model, self.device_mesh["tp"], PLAN)


CALLERS: dict[str, tuple[tuple[int, ...], Any, dict[str, Any], dict[str, int]]] = {
    "hsdp": ((2, 2), ("dp_replicate", "dp_shard"), {"defer_fsdp_grad_sync": "all_reduce"}, {"dp_shard": 2}),
    "tensor_parallel": ((2, 2), ("dp", "tp"), {}, {"dp": 2, "tp": 2, "data_parallel": 2}),
    "ddp": ((2, 2), ("replicate", "shard"), {"data_parallel": "ddp"}, {"data_parallel": 4}),
}


def _fit_over(shape: tuple[int, ...], names: Any, options: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Train over a mesh of this shape; twice, as meshes of the caller's outlive a fit."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    has_peers = names == ("dp", "tp")
    batches = micro_batches(CASE2 if has_peers else CASE4)[dist.get_rank() // (2 if has_peers else 1)]
    for _ in range(2):
        module = OwnNames(decoder())
        strategy = AutomodelStrategy(device_mesh=mesh, **options)
        trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        assert strategy.device_mesh is mesh
    return full_weights(module.model), strategy.describe()["mesh"]


@pytest.mark.every_case
@pytest.mark.parametrize("mesh", by_default(CALLERS, "hsdp", "tensor_parallel"))
def test_meshes_of_the_caller(pool4: RankPool, mesh: tuple[Any, ...]) -> None:
    """The module sees the caller's own."""
    *arguments, sizes = mesh
    expected = plain_weights(decoder(), ACCUMULATE, CASE2 if arguments[1] == ("dp", "tp") else CASE4)
    for weights, described in pool4.run(_fit_over, *arguments):
        assert_exact([weights], expected)
        assert sizes.items() <= described.items()
