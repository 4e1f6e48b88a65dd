"""What is left in a process that trains, leaves its process group, and trains again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from tests.failure.faults import become_rank, exit_statuses, killed_at_the_end, started_ranks
from tests.processes import forked
from tests.trainer.exactness import micro_batches
from tests.trainer.runs import CASE, SILENT, LabelledModule

ROUNDS = 3
LEFT = [3, 0]  # sockets by rank: rank 0 keeps a store and its connections
STRATEGIES: list[dict[str, Any]] = [{}, {"data_parallel": "ddp"}]


def _count() -> dict[str, int]:
    threads = len(os.listdir("/proc/self/task"))
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    sockets = sum(target.startswith("socket:") for target in targets)
    return {"threads": threads, "descriptors": len(targets), "sockets": sockets}


def _train_again_and_again(queue: Any, rank: int, port: int, folder: Path) -> None:
    become_rank(rank, 2, port, folder)

    def train(strategy: AutomodelStrategy) -> None:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            max_steps=1,
            limit_val_batches=1,
            **SILENT,
        )
        trainer.fit(LabelledModule(), DataLoader(micro_batches(CASE)[rank], batch_size=None))

    counts = []
    for index in range(ROUNDS):
        train(AutomodelStrategy(**STRATEGIES[index % len(STRATEGIES)]))
        assert dist.is_initialized()
        destroy_global_state()
        assert not dist.is_initialized()
        counts.append(_count())
    # The store's thread closes connections somewhat later than their other ends are closed.
    deadline = time.monotonic() + 5
    while counts[-1]["sockets"] > LEFT[rank] and time.monotonic() < deadline:
        time.sleep(0.1)
        counts[-1] = _count()
    queue.put(counts)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_trainings_again_and_again_in_one_process(tmp_path: Path) -> None:
    """Many trainings, each with a process group of its own: rank 0 keeps the store, and nothing else is left."""
    queue = forked().Queue()
    processes = started_ranks(_train_again_and_again, queue, tmp_path, 2)
    with killed_at_the_end(processes):
        statuses = exit_statuses(processes, 240)
    logs = "\n".join((tmp_path / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
    assert statuses == (0, 0), logs
    found = sorted((queue.get(timeout=5) for _ in processes), key=lambda counts: counts[-1]["sockets"])
    for counts in found:
        assert len(counts) == ROUNDS
        assert all(counts[-1][each] <= counts[0][each] for each in counts[0]), counts
    assert [counts[-1]["sockets"] for counts in found] == sorted(LEFT)
    assert torch.get_num_threads() == 1
