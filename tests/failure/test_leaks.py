"""What is left in a process that trains, leaves its process group, and trains again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from tests.failure.faults import become_rank
from tests.processes import forked, free_port
from tests.trainer.exactness import micro_batches
from tests.trainer.runs import CASE, SILENT, LabelledModule

# The main example takes seconds a round: by default a tiny model is trained.
ROUNDS = [(3, False), pytest.param(20, True, marks=pytest.mark.sweep)]
EXAMPLES = Path(__file__).parents[2] / "examples"
STRATEGIES: list[dict[str, Any]] = [{}, {"data_parallel": "ddp"}]


def _count() -> dict[str, int]:
    threads = len(os.listdir("/proc/self/task"))
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    sockets = sum(target.startswith("socket:") for target in targets)
    return {"threads": threads, "descriptors": len(targets), "sockets": sockets}


def _train_again_and_again(
    rank: int, port: int, folder: Path, rounds: int, is_example: bool, queue: Any
) -> None:
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
        if is_example:
            sys.path.insert(0, str(EXAMPLES))
            from docstring_writer import DocstringWriter
            from docstrings import DocstringData

            trainer.fit(DocstringWriter(), DocstringData(cache_dir=str(folder)))
        else:
            trainer.fit(LabelledModule(), DataLoader(micro_batches(CASE)[rank], batch_size=None))

    counts = []
    for index in range(rounds):
        train(AutomodelStrategy(**STRATEGIES[index % len(STRATEGIES)]))
        assert dist.is_initialized()
        destroy_global_state()
        assert not dist.is_initialized()
        counts.append(_count())
    queue.put(counts)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize(("rounds", "is_example"), ROUNDS)
def test_trainings_again_and_again_in_one_process(tmp_path: Path, rounds: int, is_example: bool) -> None:
    """Many trainings, each with a process group of its own: no thread, socket or descriptor is left."""
    context = forked()
    port = free_port()
    queue = context.Queue()
    arguments = (port, tmp_path, rounds, is_example, queue)
    processes = [
        context.Process(target=_train_again_and_again, args=(rank, *arguments)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    logs = "\n".join((tmp_path / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
    assert [process.exitcode for process in processes] == [0, 0], logs
    for counts in (queue.get(timeout=5) for _ in processes):
        assert len(counts) == rounds
        assert all(count == counts[0] for count in counts), counts
        assert counts[0]["sockets"] == 0
    assert torch.get_num_threads() == 1
