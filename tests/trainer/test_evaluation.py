"""Validation, test and prediction before, in and after training: right losses, and nothing left gathered or broken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.shards import Shard
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    Batch,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, plain_weights, train_model_plainly
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
        self.losses["test"].append(float(mean_loss(self.model, batch, "sum")))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"])

    def is_whole(self) -> bool:
        """Whether nothing is left gathered: every parameter is sharded, or none is, in module and optimizer."""
        kinds = {isinstance(parameter, DTensor) for parameter in self.parameters()}
        return len(kinds) == 1


def plain_losses(steps: int | None) -> list[list[float]]:
    """By rank: the summed token loss of each batch after so many optimizer steps."""
    model = decoder()
    train_model_plainly(model, ACCUMULATE, max_steps=steps)
    return [[float(mean_loss(model, batch, "sum")) for batch in batches] for batches in micro_batches(CASE)]


def assert_losses(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    assert max(map(relative_error, actual, expected)) <= TOLERANCE


def _around_a_fit(options: dict[str, Any], fresh: bool) -> tuple[Any, ...]:
    module = Evaluates(decoder())
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)

    def renewed() -> Any:
        return (
            make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
            if fresh
            else trainer
        )

    before = renewed().predict(module, loader())
    renewed().validate(module, loader(), verbose=False)
    renewed().test(module, loader(), verbose=False)
    whole = [module.is_whole()]
    renewed().fit(module, loader())
    whole.append(module.is_whole())
    renewed().validate(module, loader(), verbose=False)
    renewed().test(module, loader(), verbose=False)
    after = renewed().predict(module, loader())
    whole.append(module.is_whole())
    return module.losses, before, after, whole, full_weights(module.model)


@pytest.mark.parametrize("fresh", first_by_default([False, True]), ids=["one-trainer", "new-trainers"])
@pytest.mark.parametrize("options", by_default(ENGINES, "kept", "ddp"))
def test_around_a_fit(pool2: RankPool, options: dict[str, Any], fresh: bool) -> None:
    """Losses and predictions are those of the weights before and after, and training is what it is without them."""
    at_start = plain_losses(0)
    at_end = plain_losses(None)
    model = decoder()
    expected = Outcome(plain_weights(model, ACCUMULATE), None)
    for rank, (losses, before, after, whole, weights) in enumerate(pool2.run(_around_a_fit, options, fresh)):
        for kind in ("validate", "test"):
            assert_losses(losses[kind], at_start[rank] + at_end[rank])
        assert all(whole)
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
        for logits, batch in zip(before, micro_batches(CASE)[rank], strict=True):
            assert relative_error(logits, decoder()(batch["input_ids"])) <= TOLERANCE
        for logits, batch in zip(after, micro_batches(CASE)[rank], strict=True):
            assert relative_error(logits, model(batch["input_ids"])) <= TOLERANCE


def _fit_twice(options: dict[str, Any], fresh: bool) -> tuple[dict[str, Tensor], list[float]]:
    module = Evaluates(decoder())
    trainer = make_trainer(
        AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, num_sanity_val_steps=2
    )
    trainer.fit(module, loader(), loader())
    if fresh:
        trainer = make_trainer(
            AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, num_sanity_val_steps=2
        )
    else:
        trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    return full_weights(module.model), module.losses["validate"]


def _train_twice() -> dict[str, Tensor]:
    """A new fit begins with a new optimizer, whose momentum is zero."""
    model = decoder()
    train_model_plainly(model, ACCUMULATE)
    return plain_weights(model, ACCUMULATE)


@pytest.mark.parametrize("fresh", first_by_default([True, False]), ids=["new-trainers", "one-trainer"])
@pytest.mark.parametrize("options", by_default(ENGINES, "resharded"))
def test_fit_twice(pool2: RankPool, options: dict[str, Any], fresh: bool) -> None:
    """A second fit goes on from the first one's weights, sanity check and validation in between."""
    expected = Outcome(_train_twice(), None)
    at_start = plain_losses(0)
    at_end = plain_losses(None)
    for rank, (weights, losses) in enumerate(pool2.run(_fit_twice, options, fresh)):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
        assert_losses(losses[:2], at_start[rank][:2])
        assert_losses(losses[2:10], at_end[rank])
        assert_losses(losses[10:12], at_end[rank][:2])


class EvaluatesWithGradients(Evaluates):
    """Asks for gradients in validation, as saliency maps and attacks do."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        with torch.enable_grad():
            super().validation_step(batch, batch_idx)


def _validate_with_gradients(
    options: dict[str, Any], inference_mode: bool
) -> tuple[dict[str, Tensor], list[float]]:
    module = EvaluatesWithGradients(decoder())
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=2,
        inference_mode=inference_mode,
    )
    trainer.fit(module, loader(), loader())
    return full_weights(module.model), module.losses["validate"][-8:]


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
def test_validation_that_enables_gradients(
    pool2: RankPool, options: dict[str, Any], inference_mode: bool
) -> None:
    """A forward for which no backward comes leaves nothing gathered that training would use."""
    expected = Outcome(plain_weights(decoder(), ACCUMULATE), None)
    losses_at_end = plain_losses(None)
    found = pool2.run(_validate_with_gradients, options, inference_mode)
    for rank, (weights, losses) in enumerate(found):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
        assert_losses(losses, losses_at_end[rank])


class SamplesInHook(Evaluates):
    """Calls its model from a hook, outside of every step, as one that prints a sample does."""

    def on_validation_epoch_end(self) -> None:
        self.sampled = self.model(micro_batches(CASE)[0][0]["input_ids"])


def _sample_in_hook() -> tuple[Tensor, set[str]]:
    module = SamplesInHook(TinyDecoder(CASE.seed).double())
    make_trainer(AutomodelStrategy()).validate(module, loader(), verbose=False)
    return module.sampled, {type(parameter).__name__ for parameter in module.parameters()}


def test_child_called_outside_of_a_step(pool2: RankPool) -> None:
    """It meets whole parameters, also those that belong to the root, and leaves sharded ones behind."""
    with torch.no_grad():
        expected = TinyDecoder(CASE.seed).double()(micro_batches(CASE)[0][0]["input_ids"])
    for sampled, kinds in pool2.run(_sample_in_hook):
        assert relative_error(sampled, expected) <= TOLERANCE
        assert kinds == {Shard.__name__}


def _threads_after_more_fits() -> tuple[int, int]:
    counts = []
    for fits in (2, 3):
        for _ in range(fits):
            make_trainer(AutomodelStrategy()).fit(Evaluates(TinyDecoder(CASE.seed).double()), loader())
        counts.append(_fewest_threads())
    return counts[0], counts[1]


def _fewest_threads() -> int:
    """A thread that has been joined is still listed for a moment."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_fits_do_not_pile_up_process_groups(pool2: RankPool) -> None:
    """A new strategy in the same process takes the mesh that is there, instead of making threads for its own."""
    for before, after in pool2.run(_threads_after_more_fits):
        assert after == before
