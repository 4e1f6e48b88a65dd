"""Functions that begin the workers of loaders: the user's and Lightning's still run, and come back after the run."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import make_trainer


class Seeds(Dataset[Tensor]):
    """Of the worker that loads a row: its number, the seed that torch has given it, and the one that it has."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        return torch.tensor([worker.id, worker.seed, torch.initial_seed() % 2**63])


class Keeps(LightningModule):
    """Keeps its batches, and trains on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        self.rows += batch.tolist()
        return self.layer(batch[:, :1].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def seed_by_hand(worker: int) -> None:
    torch.manual_seed(worker + 7)


def seed_of_lightning(worker: int, seed: int, rank: int) -> int:
    """What Lightning's function makes of the seed that torch gives a worker."""
    with isolate_rng():
        torch.manual_seed(seed)
        pl_worker_init_function(worker, rank)
        return torch.initial_seed() % 2**63


def load(begin: Any) -> list[list[int]]:
    """Runs on every rank: the rows that it has trained on, where workers begin with this function."""
    with patch.dict(os.environ):
        seed_everything(3, workers=True)
        module = Keeps()
        loader = DataLoader(Seeds(), batch_size=2, num_workers=2, worker_init_fn=begin)
        make_trainer(AutomodelStrategy(per_token_loss=False), max_epochs=2).fit(module, loader)
    assert loader.worker_init_fn is begin
    return module.rows


@pytest.mark.each_value
@pytest.mark.parametrize("begin", [None, seed_by_hand])
def test_workers_begin_as_under_lightning(pool2: RankPool, begin: Any) -> None:
    for rank, rows in enumerate(pool2.run(load, begin)):
        assert len(rows) == 16
        for worker, given, seed in rows:
            assert seed == (seed_of_lightning(worker, given, rank) if begin is None else worker + 7)
