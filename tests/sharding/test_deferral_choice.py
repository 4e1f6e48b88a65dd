"""`defer_fsdp_grad_sync="auto"`: what it decides by the memory that is said to be free, and that both are exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from tests.free_memory import pretended
from tests.rank_pool import RankPool
from tests.trainer.exactness import Outcome, full_weights, weight_error
from tests.trainer.runs import (
    TOLERANCE,
    LabelledModule,
    by_default,
    loader,
    make_trainer,
    train_plainly,
)

PLENTY = 1e6
WINDOWS = [[0, 1, 2], [3, 4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7]]


class Changing(GradientAccumulationScheduler):
    """Windows of three micro-batches in the first epoch, the last of them short, and of two in the second."""

    def __init__(self) -> None:
        super().__init__({0: 3, 1: 2})


@dataclass
class Told:
    """What a rank did."""

    weights: dict[str, Tensor]
    described: dict[str, Any]


def fit(
    options: dict[str, Any],
    fractions: tuple[float, ...],
    **trainer_options: Any,
) -> Told:
    """Train where half of each rank's free memory is a part of what it needs for gradients and state."""
    module = LabelledModule()
    fraction = fractions[dist.get_rank()]

    def budget(needed: dict[str, int]) -> float:
        return fraction * (needed["deferred_gradients"] + needed["sharded_state"])

    with pretended(budget):
        strategy = AutomodelStrategy(**options)
        trainer = make_trainer(strategy, callbacks=[Changing()], **{"max_epochs": 2, **trainer_options})
        trainer.fit(module, loader())
    return Told(full_weights(module.model), strategy.describe())


CHOICES: dict[str, tuple[dict[str, Any], float, tuple[bool, bool]]] = {
    # Options; free memory; whether gradients are deferred, and parameters resharded.
    "neither fits": ({}, 0.99, (False, True)),
    "gradients fit": ({}, 1.2, (True, True)),
    "both fit": ({}, 2.0, (True, False)),
    "parameters are kept whatever fits": ({"reshard_during_accumulation": False}, 1.2, (False, False)),
    "offloaded": ({"cpu_offload": True}, 0.99, (False, True)),
    "manual choice": ({"defer_fsdp_grad_sync": True}, 0.99, (True, True)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("choice", by_default(CHOICES, "neither fits", "gradients fit"))
def test_exact_whatever_it_decides(pool2: RankPool, choice: Any) -> None:
    """In windows whose length changes in mid-run, on ragged rows."""
    options, fraction, (defers, reshards) = choice
    expected = Outcome(train_plainly(WINDOWS))
    for told in pool2.run(fit, options, (fraction, fraction)):
        assert weight_error(Outcome(told.weights), expected) <= TOLERANCE
        assert told.described["defer_fsdp_grad_sync"] is defers
        assert told.described["reshard_during_accumulation"] is reshards
        assert (told.described["estimated_extra_bytes"]["deferred_gradients"] > 0) is defers


@pytest.mark.every_case
@pytest.mark.parametrize("fractions", [(0.5, PLENTY), (PLENTY, 0.5)])
def test_one_rank_decides_for_all(pool2: RankPool, fractions: tuple[float, ...]) -> None:
    """A rank that is short of memory; all tell its figures."""
    first, second = pool2.run(fit, {}, fractions, max_epochs=1)
    for told in (first, second):
        assert told.described["defer_fsdp_grad_sync"] is False
        assert "exceeds" in told.described["defer_fsdp_grad_sync_reason"]
    name = "defer_fsdp_grad_sync_reason"
    assert first.described[name] == second.described[name]
