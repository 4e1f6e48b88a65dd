"""What can race as ranks fail: several at once, a call that keeps Python's lock, a rank that stops and goes on.

Each row is a real run of three ranks. The suite takes each once, a sweep each 20 times: a cause that is lost in one
of many runs is lost. Faults of a single rank are in `test_faults.py`.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.failure.faults import (
    Model,
    Ragged,
    become_rank,
    exit_statuses,
    killed_at_the_end,
    started_ranks,
)
from tests.trainer.runs import SILENT

STEP = 3
PATIENCE_S = 60.0
TIMES_IN_A_SWEEP = 20


def two_raise(rank: int) -> None:
    if rank:
        raise ValueError(f"no labels on rank {rank}")


def all_raise(rank: int) -> None:
    raise ValueError(f"no labels on rank {rank}")


def one_is_killed_while_another_keeps_the_lock(rank: int) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(6)
    if rank == 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)


def one_raises_while_another_keeps_the_lock(rank: int) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(4)
    if rank == 2:
        time.sleep(1)
        raise ValueError("no labels on rank 2")


def keeps_the_lock_for_long(rank: int) -> None:
    """For longer than its heartbeats may be missing."""
    if rank == 1:
        ctypes.PyDLL(None).sleep(5)


def stops_and_goes_on(rank: int) -> None:
    """For less than its heartbeats may be missing."""
    if rank == 1:
        subprocess.Popen(["sh", "-c", "sleep 1; kill -CONT $0", str(os.getpid())], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def one_is_interrupted(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)


def raises_while_groups_are_made(rank: int) -> None:
    """See `_be_rank`: all have joined, and nothing else is watched yet."""


@dataclass(frozen=True)
class Row:
    """A fault, and what each rank must say; the exit statuses."""

    fault: Callable[[int], None]
    says: tuple[str, str, str]
    statuses: tuple[int, int, int] = (1, 1, 1)
    heartbeat_timeout_s: float = 20.0


NO_LABELS = "ValueError: no labels on rank {}"
NAMED = "RankFailedError: rank {0} on HOST failed in training_step: ValueError: no labels on rank {0}"
KILLED = "rank 2 on HOST was last seen in training_step: its process has ended without a word"
ROWS = [
    Row(two_raise, (NAMED.format("[12]"), NO_LABELS.format(1), NO_LABELS.format(2))),
    Row(all_raise, (NO_LABELS.format(0), NO_LABELS.format(1), NO_LABELS.format(2))),
    Row(one_is_killed_while_another_keeps_the_lock, (KILLED, "", ""), (1, 1, -signal.SIGKILL)),
    Row(one_raises_while_another_keeps_the_lock, (NAMED.format(2), "", NO_LABELS.format(2))),
    Row(keeps_the_lock_for_long, ("ended well",) * 3, (0, 0, 0), 2.0),
    Row(stops_and_goes_on, ("ended well",) * 3, (0, 0, 0), 3.0),
    Row(one_is_interrupted, ("",) * 3),  # the user's wish, which needs no explanation
    Row(
        raises_while_groups_are_made,
        (
            "rank 1 on HOST failed in set-up: ValueError: no",
            "ValueError: no",
            "rank 1 on HOST failed in set-up",
        ),
    ),
]


class Fails(Model):
    """Meets the fault in one of its steps."""

    def __init__(self, fault: Callable[[int], None]) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == STEP:
            self.fault(self.global_rank)
        return super().training_step(batch, batch_idx)


def _be_rank(row: Row, rank: int, port: int, folder: Path) -> None:
    become_rank(rank, 3, port, folder)
    if row.fault is raises_while_groups_are_made and rank == 1:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ValueError("no device")

        dist.init_process_group = fail
    strategy = AutomodelStrategy(
        timeout=timedelta(seconds=30), heartbeat_timeout=timedelta(seconds=row.heartbeat_timeout_s)
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=3, strategy=strategy, max_steps=6, limit_val_batches=0, **SILENT
    )
    trainer.fit(Fails(row.fault), DataLoader(Ragged(lambda: None), 2))
    print("ended well")


def _run(row: Row, folder: Path) -> tuple[tuple[int | None, ...], list[str]]:
    ranks = started_ranks(_be_rank, row, folder)
    with killed_at_the_end(ranks):
        statuses = exit_statuses(ranks, PATIENCE_S)
    return statuses, [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(3)]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[Row, int], Future]]:
    """Of each selected row, four at a time: they mostly wait."""
    items = [
        item for item in request.session.items if item.name.startswith("test_every_rank_says_the_cause")
    ]
    selected = [(item.callspec.params["row"], item.callspec.params["time"]) for item in items]
    with ThreadPoolExecutor(max_workers=4) as executor:
        yield {each: executor.submit(_run, each[0], tmp_path_factory.mktemp("race")) for each in selected}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "time",
    [0, *(pytest.param(time, marks=pytest.mark.sweep) for time in range(1, TIMES_IN_A_SWEEP))],
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault.__name__)
def test_every_rank_says_the_cause(row: Row, time: int, outcomes: dict[tuple[Row, int], Future]) -> None:
    """Whoever raised its own exception, the others that of one who did; nobody hangs, or is named for a long call."""
    statuses, outputs = outcomes[row, time].result()
    assert statuses == row.statuses, outputs
    for says, output in zip(row.says, outputs, strict=True):
        assert re.search(says.replace("HOST", re.escape(socket.gethostname())), output), output
