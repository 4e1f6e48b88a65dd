"""Fits of small language models on ranks, beside one process: what the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Outcome, assert_exact, full_weights, micro_batches
from tests.trainer.plain import ModelModule, plain_weights, prefixed
from tests.trainer.runs import CASE, make_trainer

ACCUMULATE = 3


class Fitted(NamedTuple):
    """Full weights by the module's names, and what the strategy says of itself."""

    weights: Outcome
    described: dict[str, Any]


class Logits(nn.Module):
    """A model of Hugging Face's: [b, s] ids to [b, s, v] logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).logits


def fit_module(module: ModelModule, options: dict[str, Any], case: Case = CASE, **settings: Any) -> Fitted:
    """Train `module`, whatever it has gone through before; `settings` are the Trainer's."""
    strategy = AutomodelStrategy(**options)
    trainer = make_trainer(strategy, **{"accumulate_grad_batches": ACCUMULATE, **settings})
    own_batches = micro_batches(case)[dist.get_rank() // options.get("tensor_parallel_size", 1)]
    trainer.fit(module, DataLoader(own_batches, batch_size=None))
    return Fitted(Outcome(full_weights(module)), strategy.describe())


def fit(
    make_model: Callable[[], nn.Module],
    options: dict[str, Any],
    make_module: Callable[[nn.Module], ModelModule] = ModelModule,
    case: Case = CASE,
    **settings: Any,
) -> Fitted:
    """Train a new module."""
    return fit_module(make_module(make_model()), options, case, **settings)


def check_exact(
    pool: RankPool,
    make_model: Callable[[], nn.Module],
    options: dict[str, Any],
    make_module: Callable[[nn.Module], ModelModule] = ModelModule,
    case: Case = CASE,
) -> dict[str, Any]:
    """Every rank ends with the weights of one process; what the first one says of itself."""
    found = pool.run(fit, make_model, options, make_module, case)
    assert_exact([each.weights for each in found], prefixed(plain_weights(make_model(), ACCUMULATE, case)))
    return found[0].described
