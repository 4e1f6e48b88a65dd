"""Copies of a parameter that ranks write differently: every rank raises, at the latest when training ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch
from tests.trainer.runs import CASE, LabelledModule, loader, make_trainer

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel": "ddp"}),
    "fsdp2": (2, {}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "local sgd": (
        2,
        {"data_parallel": "ddp", "ddp_comm_hook": debugging_hooks.noop_hook, "count_window_ahead": True},
    ),
}


class DrawsByRank(LabelledModule):
    """Resets its head in mid-training, from random numbers that are each rank's own, or the same."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.manual_seed(0 if self.alike else dist.get_rank())
            with torch.no_grad():
                self.model.head.weight.normal_()


def _fit(alike: bool, options: dict[str, Any], validates: bool) -> tuple[str, int]:
    """What is raised, and after how many batches."""
    module = DrawsByRank(alike)
    trainer = make_trainer(
        AutomodelStrategy(**options),
        val_check_interval=4,
        limit_val_batches=1 if validates else 0,
    )
    data = loader(replace(CASE, num_ranks=dist.get_world_size()))
    try:
        trainer.fit(module, data, data if validates else None)
    except RuntimeError as error:
        return str(error), trainer.fit_loop.total_batch_idx + 1
    return "", trainer.fit_loop.total_batch_idx + 1


@pytest.mark.every_case
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("engine", ["ddp", pytest.param("hsdp", marks=pytest.mark.sweep)])
def test_drifting_copies_raise(pool2: RankPool, pool4: RankPool, engine: str, validates: bool) -> None:
    """At the next validation, or at the end."""
    num_ranks, options = ENGINES[engine]
    pool = pool2 if num_ranks == 2 else pool4
    for message, num_batches in pool.run(_fit, False, options, validates):
        assert message.startswith("Ranks hold different values of model.head.weight: 1 of ")
        assert num_batches == (4 if validates else 8)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp2", "local sgd", pytest.param("hsdp", marks=pytest.mark.sweep)]
)
def test_equal_copies_do_not(pool2: RankPool, pool4: RankPool, engine: str) -> None:
    """Drawn alike, or held in parts; nor do those that a communication hook lets drift."""
    num_ranks, options = ENGINES[engine]
    pool = pool2 if num_ranks == 2 else pool4
    assert [message for message, _ in pool.run(_fit, True, options, True)] == [""] * num_ranks
