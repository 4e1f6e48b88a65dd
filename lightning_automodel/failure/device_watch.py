"""Devices that wait for a missing rank: a warning, then the verdict, before their backend ends the processes.

A collective of an accelerator neither blocks the host nor raises, so no rank fails by itself. At the
timeout, the backend's own watchdog would end each process without a word of which rank was at fault.
"""

import logging
from collections.abc import Sequence
from enum import Enum, auto

import torch.distributed as dist

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.board import Board
from lightning_automodel.distributed.failures import Device, RankFailure, Sighting
from lightning_automodel.failure.lease import holds_lease
from lightning_automodel.failure.verdict import SILENT_S, devices_standstill, known_records, stuck_device

log = logging.getLogger(__name__)

DEVICES = "devices"
WARNING_S = 60.0
TIME_BEFORE_TIMEOUT_S = 60.0
READS_TO_WARNING = 40


class Stage(Enum):
    """How far this rank has come with devices that wait. It only goes on, in :meth:`DeviceWatch.exchange`."""

    WATCHING = auto()  # no device has waited for long
    WARNED = auto()  # whom they wait for was logged
    JUDGED = auto()  # the verdict was posted


class DeviceWatch:
    """Warns of devices that wait, and later posts who is at fault.

    It warns after a minute, or half of the timeout if that is less. It posts the verdict a minute before the
    timeout, or at three quarters of the timeout if that is later.

    Only the rank that holds the lease :data:`DEVICES` reads all records, and only while its own device
    waits.
    """

    def __init__(self, timeout_s: float, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self.warning_s = min(WARNING_S, timeout_s / 2)
        self.verdict_s = max(0.75 * timeout_s, timeout_s - TIME_BEFORE_TIMEOUT_S)
        self._stage = Stage.WATCHING
        self._seen: dict[int, Sighting] = {}
        self._next_read_s = 0.0

    def exchange(self, board: Board, store: dist.Store, path: str, lease: bytes) -> None:
        """Read, warn, and post the verdict at ``path``. The board's thread calls it with each heartbeat."""
        own = board.own
        now = board.clock()
        waits = own.device == Device.BUSY and own.device_stood_s >= self.warning_s
        if not waits or self._stage is Stage.JUDGED or now < self._next_read_s:
            return
        if not holds_lease(board, store, DEVICES, lease, self.warning_s):
            return
        self._next_read_s = now + self.warning_s / READS_TO_WARNING
        board.read_records(store, self._ranks, self._seen)
        failure = self._judge(board, self.warning_s)
        if self._stage is Stage.WATCHING and self._warn(failure):
            self._stage = Stage.WARNED
        is_due = own.device_stood_s >= self.verdict_s
        if failure is not None and is_due and self._judge(board, self.verdict_s):
            board.post(store, path, failure)
            self._stage = Stage.JUDGED

    def _judge(self, board: Board, limit_s: float) -> RankFailure | None:
        failure = stuck_device(known_records(self._seen), limit_s)
        if failure is None:
            return None
        seen = self._seen[failure.rank]
        now = board.clock()
        if not seen.is_silent(now, SILENT_S):
            return failure
        return failures.missed_heartbeats(failure.rank, seen.known, board.rank, now - seen.changed_at)

    def _warn(self, failure: RankFailure | None) -> bool:
        """Log whom the devices wait for, and return whether that is known."""
        what = devices_standstill(known_records(self._seen), self.warning_s)
        if failure is not None:
            what = str(failure)
        if what is None:
            return False
        log.warning(
            f"Devices have been busy for {self.warning_s:g} s without progress: {what}\nA collective that a"
            f" rank does not come to ends the run after the strategy's timeout, here {self._timeout_s:g} s."
        )
        return True
