"""A rank without data: in training with `uneven_inputs="pad"` its steps have no weight, in evaluation it raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.expert_parallel.mixtures import ACCUMULATE, CASE, MixtureDecoder, SpreadModule, error
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import Batch, full_weights, micro_batches
from tests.trainer.plain import sgd
from tests.trainer.runs import TOLERANCE, make_trainer, mean_loss

NUM_BATCHES = (5, 2, 4, 1)


def own_batches(counts: tuple[int, ...] = NUM_BATCHES) -> list[Batch]:
    """What the loader of this rank yields."""
    return micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]


class Evaluates(SpreadModule):
    """Trains on what it counts; counts its validation steps."""

    def __init__(self) -> None:
        super().__init__(MixtureDecoder())
        self.num_steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return self(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"])


def evaluate(function: str) -> None:
    """Runs on every rank: `trainer.validate` or another, on unequal data."""
    trainer = make_trainer(AutomodelStrategy(expert_parallel_size=2))
    getattr(trainer, function)(Evaluates(), DataLoader(own_batches(), batch_size=None))


@pytest.mark.parametrize("function", ["validate", "predict"])
def test_unequal_evaluation_is_refused(pool4: RankPool, function: str) -> None:
    """Other ranks' tokens would wait for the experts of a rank that runs no forwards."""
    with pytest.raises(RankError, match=r"evaluated all its data.*limit_val_batches"):
        pool4.run(evaluate, function)


def fit_with_unequal_data() -> tuple[dict[str, Tensor], int]:
    """Runs on every rank: train on padded, unequal data, and validate on equal data in between."""
    module = Evaluates()
    strategy = AutomodelStrategy(expert_parallel_size=2, uneven_inputs="pad")
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, max_epochs=2, val_check_interval=2)
    loader = DataLoader(own_batches(), batch_size=None)
    trainer.fit(module, loader, DataLoader(own_batches((2, 2, 2, 2)), batch_size=None))
    return full_weights(module.model), module.num_steps


def train_plainly_on_unequal_data() -> dict[str, Tensor]:
    """One process with the batches that are there."""
    model = MixtureDecoder()
    optimizer = sgd(model)
    for _ in range(2):
        for start in range(0, max(NUM_BATCHES), ACCUMULATE):
            window = range(start, start + ACCUMULATE)
            batches = [
                by_rank[index]
                for by_rank, number in zip(micro_batches(CASE), NUM_BATCHES, strict=True)
                for index in window
                if index < number
            ]
            num_label_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            optimizer.zero_grad()
            losses = [mean_loss(model, batch, "sum") for batch in batches]
            (torch.stack(losses).sum() / max(num_label_tokens, 1)).backward()
            optimizer.step()
    return full_weights(model)


def test_padded_training_with_validation(pool4: RankPool) -> None:
    """Validations in between leave training as it is."""
    expected = train_plainly_on_unequal_data()
    num_validations = 2 * (max(NUM_BATCHES) // 2)
    for weights, num_steps in pool4.run(fit_with_unequal_data):
        assert error(weights, expected) <= TOLERANCE
        assert num_steps == num_validations * 2
