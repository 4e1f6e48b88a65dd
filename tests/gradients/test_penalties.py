"""A penalty on weights: right, or an error that names a way which is exact.

Code outside of a unit's forward sees shards under FSDP2. What DTensor computes of them, as
`p.full_tensor()`, sends its gradient to the shard itself: it is neither averaged over ranks nor weighed as
the loss is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.gradients.ragged import full
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, assert_exact, full_weights, weight_error
from tests.trainer.plain import ModelModule, filled_decoder, plain_weights, prefixed, token_sums
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default, loader, make_trainer

ACCUMULATE = 2
WITHOUT_GAPS = replace(CASE, gap="none")
BYPASSED = "2 parameters that FSDP2 shards got a gradient that it does not reduce"
PENALISED = ("blocks.0.linear.weight", "blocks.1.norm.bias")


def norms(model: nn.Module) -> Tensor:
    return sum(0.3 * full(model.get_parameter(name).norm()) for name in PENALISED)


class Penalises(ModelModule):
    """Adds the penalty to the loss, computed before the forward or after it; or in the last micro-batch of a window."""

    def __init__(self, where: str) -> None:
        super().__init__(filled_decoder())
        self.where = where

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        penalty = 0
        if self.where == "before" or (self.where == "in the last" and batch_idx % ACCUMULATE):
            penalty = norms(self.model)
        loss = self(batch)
        if self.where == "after":
            penalty = norms(self.model)
        return loss + penalty


def fit(module: ModelModule, options: dict[str, Any], **settings: Any) -> dict[str, Tensor]:
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, **settings)
    trainer.fit(module, loader(WITHOUT_GAPS))
    return full_weights(module)


def penalised_sums(model: Any, batch: Batch, only_in_last: bool = False) -> tuple[Tensor, Any]:
    """The penalty weighs as the micro-batches do that have it."""
    total, count = token_sums(model, batch)
    if only_in_last and model.step % ACCUMULATE == 0:
        return total, count
    return total + count * norms(model), count


def _right_or_refused(where: str, options: dict[str, Any]) -> dict[str, Tensor] | str:
    try:
        return fit(Penalises(where), options)
    except RuntimeError as error:
        return str(error)


@pytest.mark.each_value
@pytest.mark.parametrize("options", by_default(STRATEGIES, "kept", "resharded"))
@pytest.mark.parametrize("where", ["after", "before"])
def test_in_training_step(pool2: RankPool, where: str, options: dict[str, Any]) -> None:
    """Refused on every rank where units are sharded when it runs; exact where they are gathered or replicated."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE, WITHOUT_GAPS, sums=penalised_sums))
    frees = where == "before" or options.get("reshard_during_accumulation", False)
    for found in pool2.run(_right_or_refused, where, options):
        if frees and "data_parallel" not in options:
            assert isinstance(found, str)
            assert BYPASSED in found
            assert all(name in found for name in PENALISED)
        else:
            assert not isinstance(found, str), found
            assert weight_error(found, expected) <= TOLERANCE


def test_of_retained_parameters(pool2: RankPool) -> None:
    """Units once freed themselves within the backward that reads them last: a segmentation fault."""
    sums = partial(penalised_sums, only_in_last=True)
    expected = plain_weights(filled_decoder(), ACCUMULATE, WITHOUT_GAPS, sums=sums)
    options = {"reshard_during_accumulation": False}
    assert_exact(pool2.run(_right_or_refused, "in the last", options), prefixed(expected))


def anchored(parameter: Tensor) -> Tensor:
    return 0.3 * (full(parameter) - 0.1).square().sum()


class BeforeTheStep(ModelModule):
    """What the error tells users to write."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.enable_grad():
            for parameter in map(self.model.get_parameter, PENALISED):
                parameter.grad += torch.autograd.grad(anchored(parameter), parameter)[0]


def _while_detecting_anomalies() -> dict[str, Tensor]:
    return fit(BeforeTheStep(filled_decoder()), {}, detect_anomaly=True)


def _anchored_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    total, count = token_sums(model, batch)
    return total + count * sum(map(anchored, map(model.get_parameter, PENALISED))), count


def test_anomaly_detection_looks_at_sharded_gradients(pool2: RankPool) -> None:
    """``DTensor`` has no rule for how torch asks them for NaN."""
    expected = plain_weights(filled_decoder(), ACCUMULATE, WITHOUT_GAPS, sums=_anchored_sums)
    assert_exact(pool2.run(_while_detecting_anomalies), prefixed(expected))
