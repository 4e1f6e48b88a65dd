"""Validation, test and prediction before, in and after training: right losses, and nothing left gathered or broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    Batch,
    TinyDecoder,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import (
    CASE,
    STRATEGIES,
    TOLERANCE,
    by_default,
    first_by_default,
    loader,
    make_trainer,
    mean_loss,
)

ACCUMULATE = 3
ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}


def decoder() -> nn.Module:
    return TinyDecoder(CASE.seed).double()


class Evaluates(ModelModule):
    """Keeps the summed token loss of every batch that it evaluates, and predicts logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses: dict[str, list[float]] = {"validate": [], "test": []}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.losses["validate"].append(float(mean_loss(self.model, batch, "sum")))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """With gradients: no backward comes that would free a unit."""
        with torch.enable_grad():
            self.losses["test"].append(float(mean_loss(self.model, batch, "sum")))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"])

    def on_validation_epoch_end(self) -> None:
        """Call the model outside of every step, as one that prints a sample does."""
        self.sampled = self.model(micro_batches(CASE)[0][0]["input_ids"])


def plain_losses(model: nn.Module) -> list[list[float]]:
    """By rank: the summed token loss of each batch."""
    return [[mean_loss(model, batch, "sum").item() for batch in batches] for batches in micro_batches(CASE)]


def assert_losses(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    assert max(map(relative_error, actual, expected)) <= TOLERANCE


def _around_fits(options: dict[str, Any], fresh: bool) -> tuple[Any, ...]:
    """Losses, predictions and weights by moment; in between, everything is sharded, or nothing is."""
    module = Evaluates(decoder())
    settings = {"accumulate_grad_batches": ACCUMULATE, "num_sanity_val_steps": 2}
    trainers = [make_trainer(AutomodelStrategy(**options), **settings) for _ in range(9 if fresh else 1)]

    def trainer() -> Any:
        return trainers.pop() if fresh else trainers[0]

    predicted = []
    weights = []
    for _ in range(2):
        predicted.append(trainer().predict(module, loader()))
        trainer().validate(module, loader(), verbose=False)
        trainer().test(module, loader(), verbose=False)
        assert len({isinstance(parameter, DTensor) for parameter in module.parameters()}) == 1
        trainer().fit(module, loader())
        assert len({isinstance(parameter, DTensor) for parameter in module.parameters()}) == 1
        weights.append(full_weights(module.model))
        if not fresh:
            trainers[0].fit_loop.max_epochs += 1
    return module.losses, predicted, module.sampled, weights


@pytest.mark.parametrize("fresh", first_by_default([False, True]), ids=["one-trainer", "new-trainers"])
@pytest.mark.parametrize("options", by_default(ENGINES, "kept", "ddp"))
def test_around_fits(pool2: RankPool, options: dict[str, Any], fresh: bool) -> None:
    """Losses and predictions are those of the weights before and after; a second fit goes on from the first one's."""
    model = decoder()
    losses = []
    logits = []
    expected = []
    for _ in range(2):  # a new fit begins with a new optimizer, whose momentum is zero
        losses.append(plain_losses(model))
        logits.append([[model(b["input_ids"]).detach() for b in batches] for batches in micro_batches(CASE)])
        expected.append(plain_weights(model, ACCUMULATE))
    results = pool2.run(_around_fits, options, fresh)
    for rank, (found_losses, predicted, sampled, weights) in enumerate(results):
        for kind in ("validate", "test"):
            assert_losses(found_losses[kind], losses[0][rank] + losses[1][rank])
        for found, of_model in zip(predicted, logits, strict=True):
            assert max(map(relative_error, found, of_model[rank])) <= TOLERANCE
        assert relative_error(sampled, logits[1][0][0]) <= TOLERANCE
        for found, right in zip(weights, expected, strict=True):
            assert weight_error(found, right) <= TOLERANCE
