"""Devices that wait: who reads for all, what is warned of, and when the verdict is posted. All ranks are played."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_automodel.distributed.board import Board
from lightning_automodel.distributed.failures import MISSED_HEARTBEATS, STUCK, Device
from lightning_automodel.failure.device_watch import DEVICES, DeviceWatch

TIMEOUT_S = 1800.0
GROUP = "0 of rank 0"


class World:
    """Three ranks: the devices of two wait for that of rank 1, which has queued less."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = dist.HashStore()
        self.is_silent = False
        self.beat_s = 0.5
        self.watches = [DeviceWatch(TIMEOUT_S, range(3)) for _ in range(3)]
        self.boards = [self._board(rank) for rank in range(3)]

    def _board(self, rank: int) -> Board:
        def exchange(store: dist.Store, values: Any) -> None:
            self.watches[rank].exchange(board, store, "run", values[0])

        board = Board(rank, lambda: self.store, "run", range(3), 1795.0, lambda: self.says(rank))
        board.exchange_with([DEVICES], exchange)
        board.clock = lambda: self.now
        return board

    def says(self, rank: int) -> dict[str, Any]:
        """What the rank's record says."""
        waits = {
            "device": Device.BUSY,
            "device_stood_s": self.now,
            "queued": {GROUP: 8},
            "position": "train.py:50",
        }
        works = {"device": Device.IDLE, "queued": {GROUP: 7}, "position": "train.py:12"}
        return {"where": "training_step", **(works if rank == 1 else waits)}

    def beat_until(self, now: float) -> None:
        """Let all send heartbeats."""
        while self.now < now:
            self.now += self.beat_s
            for rank, board in enumerate(self.boards):
                if rank != 1 or not self.is_silent:
                    board.beat(self.store)


def test_a_warning_then_the_verdict(caplog: pytest.LogCaptureFixture) -> None:
    """After a minute, by one rank; and a minute before the timeout, at which the backend would end all processes."""
    world = World()
    world.beat_until(59.0)
    assert caplog.records == []
    world.beat_until(90.0)
    (record,) = caplog.records
    assert "rank 1 on " in record.message
    assert "its device has nothing to do, while that of rank 0 has waited for 60 s" in record.message
    assert not any(world.watches[rank]._seen for rank in (1, 2))  # they read nothing
    world.now = 1735.0
    world.beat_until(1739.0)
    assert world.boards[2].verdicts["run"] is None
    world.beat_until(1745.0)
    verdicts = {board.verdicts["run"] for board in world.boards}
    assert {(each.rank, each.error) for each in verdicts if each is not None} == {(1, STUCK)}
    assert len(verdicts) == 1
    assert len(caplog.records) == 1


def test_a_rank_that_is_silent_is_not_called_stuck() -> None:
    """What its last record says of its device was true then."""
    world = World()
    world.beat_until(90.0)
    world.is_silent = True
    world.beat_s = 10.0
    world.beat_until(1760.0)
    verdict = world.boards[0].verdicts["run"]
    assert verdict is not None
    assert (verdict.rank, verdict.error) == (1, MISSED_HEARTBEATS)


def test_short_timeouts() -> None:
    """Half of it for the warning, three quarters for the verdict."""
    watch = DeviceWatch(20.0, range(3))
    assert (watch.warning_s, watch.verdict_s) == (10.0, 15.0)
