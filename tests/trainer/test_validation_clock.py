"""``val_check_interval=timedelta(...)``: rank 0's clock decides, and all ranks validate together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from tests.rank_pool import RankPool
from tests.resume.resuming import Counts, Setting, run

DDP = {"data_parallel": "ddp"}


class ClockIsAhead(Callback):
    """On one rank, the last validation was long ago."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            trainer._last_val_time -= 7200.0


def validations(rank: int) -> int:
    """Runs on every rank: how often a fit validates that has an hour between validations."""
    options = {"val_check_interval": timedelta(hours=1), "max_epochs": 1, "limit_train_batches": 3}
    counts = Counts()
    run(Setting(DDP, {"precision": "64-true", **options}), ClockIsAhead(rank), counts)
    assert dist.get_world_size() == 2
    return counts.counts["validations"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.every_case
def test_rank_0_decides(pool2: RankPool, rank: int) -> None:
    assert pool2.run(validations, rank) == [int(rank == 0)] * 2
