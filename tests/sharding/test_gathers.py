"""What ranks gather in evaluation: one without data follows those with some, and other units are never mixed up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankError, RankPool
from tests.trainer.runs import make_trainer


class Block(nn.Linear):
    """A unit; all have the same shape, so that their parameters could be mixed up."""


def inputs_of(row: int) -> Tensor:
    return torch.linspace(-1, 1, 4, dtype=torch.float64) * (row + 1)


class Routed(LightningModule):
    """Evaluates each row by the blocks that `route` tells by its batch, and notes what comes out."""

    def __init__(self, route: Callable[[int, int], list[int]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(4, 4, dtype=torch.float64) for _ in range(3))
        self.route = route
        self.results: dict[int, Tensor] = {}

    def forward(self, row: int, batch_idx: int) -> Tensor:
        return self.compute(inputs_of(row), self.route(row, batch_idx))

    def compute(self, value: Tensor, route: list[int]) -> Tensor:
        for index in route:
            value = torch.tanh(self.blocks[index](value))
        return value

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        row = int(batch)
        self.results[row] = self(row, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(int(batch), batch_idx)


class Forces(Routed):
    """Its results are derivatives by the inputs."""

    def forward(self, row: int, batch_idx: int) -> Tensor:
        with torch.enable_grad():
            inputs = inputs_of(row).requires_grad_()
            energy = self.compute(inputs, self.route(row, batch_idx)).sum()
            return torch.autograd.grad(energy, inputs)[0]


class Saliency(Routed):
    """As a script writes it that has no need of gradients of parameters."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            self(int(batch), batch_idx).sum().backward()


class Hooked(Routed):
    """Does in a hook what is another thing on each rank."""

    def __init__(self, hook: str, does: str) -> None:
        super().__init__(by_row)
        setattr(self, hook, getattr(self, does))

    def look(self, *_: Any) -> None:
        self(self.global_rank, 0)

    def freeze(self, *_: Any) -> None:
        for index, block in enumerate(self.blocks):
            block.requires_grad_(index == self.global_rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack([block(batch.double().expand(-1, 4)).sum() for block in self.blocks]).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Nothing of its own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def more_in_the_first(row: int, batch_idx: int) -> list[int]:
    """As a step that samples, or draws images, once in an epoch."""
    return [0, 1, 2, 1, 2, 0, 1] if batch_idx == 0 else [0, 1, 2]


def all_in_turn(row: int, batch_idx: int) -> list[int]:
    return [0, 1, 2]


def in_turn(row: int, batch_idx: int) -> list[int]:
    return [batch_idx % 3, 2]


def until_its_end(row: int, batch_idx: int) -> list[int]:
    """As text that is generated: ranks call the model more or less often."""
    return [0, 1, 2] * (row + 1)


def others_in_the_fourth(row: int, batch_idx: int) -> list[int]:
    return [1, 1, 0] if batch_idx == 3 else [0]


def by_row(row: int, batch_idx: int) -> list[int]:
    """As a head for each task: ranks need other units at a time."""
    return [row % 3]


def by_replica(row: int, batch_idx: int) -> list[int]:
    """Of four ranks, the two of a replica gather the same."""
    return [row % 4 // 2]


def evaluate(
    route: Callable[[int, int], list[int]],
    num_rows: int,
    prefetch: int,
    make_module: type[Routed] = Routed,
    **options: Any,
) -> dict[int, float]:
    """Runs on every rank: how far its rows are off what the whole module gives."""
    module = make_module(route)
    whole = copy.deepcopy(module)
    strategy = AutomodelStrategy(auto_wrap_policy={Block}, prefetch=prefetch, **options)
    trainer = make_trainer(strategy, use_distributed_sampler=True, inference_mode=False)
    trainer.validate(module, DataLoader(range(num_rows), batch_size=1))
    num_ranks = trainer.world_size
    expected = {row: whole(row, row // num_ranks) for row in module.results}
    return {row: float((module.results[row] - value).abs().max()) for row, value in expected.items()}


@pytest.mark.every_case
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("route", "num_rows"),
    [
        (more_in_the_first, 3),
        (more_in_the_first, 5),
        (in_turn, 3),
        (in_turn, 7),
        (others_in_the_fourth, 7),
        (until_its_end, 5),
    ],
)
def test_a_rank_without_data_gathers_what_others_do(
    pool2: RankPool, route: Any, num_rows: int, prefetch: int
) -> None:
    """However the steps before differ from it."""
    first, second = pool2.run(evaluate, route, num_rows, prefetch)
    assert sorted(first | second) == list(range(num_rows))
    assert max((first | second).values()) < 1e-14


@pytest.mark.parametrize("prefetch", [0, 1])
def test_derivatives_in_evaluation(pool2: RankPool, prefetch: int) -> None:
    """They reduce nothing, which a rank without data need not join."""
    first, second = pool2.run(evaluate, all_in_turn, 5, prefetch, Forces)
    assert max((first | second).values()) < 1e-14


def test_a_backward_in_evaluation_is_refused_beside_ranks_without_data(pool2: RankPool) -> None:
    pool2.run(evaluate, all_in_turn, 4, 1, Saliency)
    with pytest.raises(RankError, match="A backward in a step of evaluation in which other ranks"):
        pool2.run(evaluate, all_in_turn, 5, 1, Saliency)


def test_replicas_may_gather_other_units(pool4: RankPool) -> None:
    for found in pool4.run(evaluate, by_replica, 8, 0, data_parallel_replicate_size=2):
        assert len(found) == 2
        assert max(found.values()) < 1e-14


def run_hooked(hook: str, does: str, entry_point: str, policy: Any) -> None:
    strategy = AutomodelStrategy(auto_wrap_policy=policy, prefetch=0, count="samples")
    trainer = make_trainer(strategy, max_epochs=2)
    getattr(trainer, entry_point)(Hooked(hook, does), DataLoader(torch.ones(2, 1), batch_size=1))


def predict(num_rows: int) -> None:
    strategy = AutomodelStrategy(auto_wrap_policy={Block}, prefetch=0)
    trainer = make_trainer(strategy, use_distributed_sampler=True)
    trainer.predict(Routed(by_row), DataLoader(range(num_rows), batch_size=1))


@pytest.mark.parametrize(
    ("run", "args"),
    [
        (evaluate, (by_row, 8, 0)),
        (evaluate, (by_row, 7, 0)),
        (predict, (8,)),
        (run_hooked, ("on_train_start", "look", "fit", {Block})),
        (run_hooked, ("on_train_epoch_end", "look", "fit", {Block})),
        (run_hooked, ("on_train_end", "look", "fit", {Block})),
        (run_hooked, ("on_validation_epoch_end", "look", "validate", {Block})),
        (run_hooked, ("on_train_batch_start", "freeze", "fit", {Block})),
        (run_hooked, ("on_train_batch_start", "freeze", "fit", set())),
    ],
)
@pytest.mark.every_case
def test_other_units_on_each_rank_are_refused(pool2: RankPool, run: Any, args: Any) -> None:
    """Whose parameters an all-gather of equal sizes would mix up."""
    with pytest.raises(RankError) as raised:
        pool2.run(run, *args)
    assert len(raised.value.failures) == 2
    for failure in raised.value.failures.values():
        assert "Ranks have used different FSDP units" in failure
