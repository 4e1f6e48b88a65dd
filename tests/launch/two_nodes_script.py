"""What each rank of two real nodes runs: a short training, work of first ranks, and a training that fails on rank 3.

A folder, which both nodes share, holds the traces.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lightning_automodel import AutomodelStrategy, FirstRankPerNode
from lightning_automodel.distributed.first_rank import Scope
from tests.failure.faults import Model, Ragged
from tests.trainer.runs import SILENT

FAILING_RANK = 3


class Counting(Model):
    """Prepares and sets up where a user would, and notes on which ranks that was."""

    def __init__(self, folder: Path, fails: bool) -> None:
        super().__init__()
        self._folder = folder
        self._fails = fails

    def prepare_data(self) -> None:
        (self._folder / f"prepared_by_{self.global_rank}").touch()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if self._fails and batch_idx == 3 and self.global_rank == FAILING_RANK:
            raise ValueError("no labels here")


def train(folder: Path, fails: bool) -> None:
    """Trains; rank 0 writes the mesh and the loss, every rank what it left with."""
    torch.manual_seed(0)
    strategy = AutomodelStrategy(data_parallel_replicate_size="auto", timeout=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=strategy,
        accumulate_grad_batches=2,
        max_steps=4,
        use_distributed_sampler=False,
        **SILENT,
    )
    data = Ragged(lambda: None)
    sampler = DistributedSampler(data, num_replicas=4, rank=trainer.global_rank, shuffle=False)
    try:
        trainer.fit(Counting(folder, fails), DataLoader(data, 2, sampler=sampler))
    except Exception as error:
        (folder / f"error_of_{trainer.global_rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    if trainer.is_global_zero:
        assert strategy.last_step is not None
        report = strategy.last_step
        sizes = strategy.describe()["mesh"]
        (folder / "result").write_text(
            f"{sizes['data_parallel_replicate']} {sizes['data_parallel_shard']}"
            f" {report.num_label_tokens.item():g} {report.num_micro_batches.item():g} {report.loss.item()}"
        )


def prepare(folder: Path, scope: Scope) -> None:
    """Fill a cache that a node, or all nodes, share."""
    rank = dist.get_rank()
    cache = folder / (f"disk_of_node_{os.environ['GROUP_RANK']}" if scope == "node" else "shared_disk")
    with FirstRankPerNode(scope=scope):
        if not cache.exists():
            time.sleep(0.2)
            folder.joinpath(f"{scope}_done_by_{rank}").touch()
            cache.touch()
        folder.joinpath(f"{scope}_seen_by_{rank}").touch()


def fail_to_prepare(folder: Path) -> None:
    """Fail on rank 0, and write down how each rank leaves the block."""
    rank = dist.get_rank()
    try:
        with FirstRankPerNode():
            folder.joinpath(f"ran_on_{rank}").touch()
            if rank == 0:
                raise OSError("no space on node 0")
    except Exception as error:
        folder.joinpath(f"block_error_of_{rank}").write_text(f"{type(error).__name__}: {error}")


def main(folder: Path) -> None:
    train(folder, fails=False)
    prepare(folder, "node")
    prepare(folder, "global")
    fail_to_prepare(folder)
    train(folder, fails=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
