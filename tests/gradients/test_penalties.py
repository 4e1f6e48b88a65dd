"""A penalty on weights: right, or an error that names a way which is exact.

Code outside of a unit's forward sees shards under FSDP2. What DTensor computes of them, as
`p.full_tensor()`, sends its gradient to the shard itself: it is neither averaged over ranks nor weighed as
the loss is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    assert_exact,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.plain import ModelModule, filled_decoder, prefixed, windows
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default, loader, make_trainer, mean_loss

WITHOUT_GAPS = replace(CASE, gap="none")
BYPASSED = "2 parameters that FSDP2 shards got a gradient that it does not reduce"
PENALISED = ("blocks.0.linear.weight", "blocks.1.norm.bias")


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


PENALTIES = {
    "squares": lambda weight: 0.3 * whole(weight.square().sum()),
    "norm": lambda weight: 0.3 * whole(weight.norm()),
    "to an anchor": lambda weight: 0.3 * (whole(weight) - 0.1).square().sum(),
}


def penalised(model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in PENALISED]


class InTrainingStep(ModelModule):
    """Adds the penalty to the loss, computed before or after it."""

    def __init__(self, penalty: str, is_first: bool) -> None:
        super().__init__(filled_decoder())
        self.penalty = PENALTIES[penalty]
        self.is_first = is_first

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        penalty = sum(map(self.penalty, penalised(self.model))) if self.is_first else 0
        loss = self(batch)
        return loss + (penalty if self.is_first else sum(map(self.penalty, penalised(self.model))))


class InLastMicroBatch(ModelModule):
    """Penalises parameters that are gathered since the window's first micro-batch, before the unit's forward."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        penalty = sum(map(PENALTIES["norm"], penalised(self.model))) if batch_idx % 2 else 0
        return penalty + self(batch)


class UnfrozenLater(InTrainingStep):
    def on_train_start(self) -> None:
        for parameter in penalised(self.model):
            parameter.requires_grad_(True)


class BeforeTheStep(ModelModule):
    """What the error tells users to write."""

    penalty = PENALTIES["to an anchor"]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.enable_grad():
            for parameter in penalised(self.model):
                parameter.grad += torch.autograd.grad(PENALTIES["to an anchor"](parameter), parameter)[0]


def fit(module: LightningModule, options: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(WITHOUT_GAPS))
    return full_weights(module)


def plainly(penalty: str, accumulate: int, only_in_last: bool = False) -> dict[str, Tensor]:
    """Weights of one process; the penalty of a window that only its last micro-batch has weighs as that one does."""
    model = filled_decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    by_rank = micro_batches(WITHOUT_GAPS)
    for window in windows(WITHOUT_GAPS, accumulate):
        optimizer.zero_grad()
        losses = [mean_loss(model, batches[index], "sum") for batches in by_rank for index in window]
        counts = {i: sum(int((batches[i]["labels"] != -100).sum()) for batches in by_rank) for i in window}
        share = counts[window[-1]] / sum(counts.values()) if only_in_last else 1.0
        loss = torch.stack(losses).sum() / sum(counts.values())
        (loss + share * sum(map(PENALTIES[penalty], penalised(model)))).backward()
        optimizer.step()
    return prefixed(full_weights(model))


def _right_or_refused(
    penalty: str, is_first: bool, options: dict[str, Any], accumulate: int
) -> dict[str, Tensor] | str:
    try:
        return fit(InTrainingStep(penalty, is_first), options, accumulate)
    except RuntimeError as error:
        return str(error)


CASES = {
    f"{penalty}, {'before' if is_first else 'after'} the forward, {engine}, {accumulate}": (
        *(penalty, is_first, options, accumulate),
        "ddp" not in engine and (is_first or engine == "resharded"),
    )
    for penalty in PENALTIES
    for is_first in (True, False)
    for engine, options in STRATEGIES.items()
    for accumulate in (1, 2)
}


@pytest.mark.parametrize(
    "case",
    by_default(CASES, "norm, before the forward, kept, 2", "squares, after the forward, resharded, 1"),
)
def test_in_training_step(pool2: RankPool, case: tuple[str, bool, dict[str, Any], int, bool]) -> None:
    """Refused on every rank where units are sharded when it runs; exact where they are gathered or replicated."""
    *arguments, is_refused = case
    for found in pool2.run(_right_or_refused, *arguments):
        if is_refused:
            assert isinstance(found, str)
            assert BYPASSED in found
            assert all(name in found for name in PENALISED)
        else:
            assert weight_error(found, plainly(arguments[0], arguments[-1])) <= TOLERANCE


def _frozen_at_setup() -> str:
    module = UnfrozenLater("squares", is_first=True)
    for parameter in penalised(module.model):
        parameter.requires_grad_(False)
    with pytest.raises(RuntimeError) as raised:
        fit(module, {}, 1)
    return str(raised.value)


def test_of_parameters_that_are_unfrozen_later(pool2: RankPool) -> None:
    for message in pool2.run(_frozen_at_setup):
        assert BYPASSED in message


def _in_last() -> dict[str, Tensor]:
    return fit(InLastMicroBatch(filled_decoder()), {"reshard_during_accumulation": False}, 2)


def test_of_retained_parameters(pool2: RankPool) -> None:
    """Units once freed themselves within the backward that reads them last: a segmentation fault."""
    assert_exact(pool2.run(_in_last), plainly("norm", 2, only_in_last=True))


def _while_detecting_anomalies() -> dict[str, Tensor]:
    module = BeforeTheStep(filled_decoder())
    trainer = make_trainer(AutomodelStrategy(), accumulate_grad_batches=2, detect_anomaly=True)
    trainer.fit(module, loader(WITHOUT_GAPS))
    return full_weights(module)


def test_anomaly_detection_looks_at_sharded_gradients(pool2: RankPool) -> None:
    """``DTensor`` has no rule for how torch asks them for NaN."""
    assert_exact(pool2.run(_while_detecting_anomalies), plainly("to an anchor", 2), 1e-15)
