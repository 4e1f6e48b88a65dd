"""What a rank tells of its device: asked only where the host stands, and never waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_automodel.distributed import device_groups
from lightning_automodel.distributed.failures import Device
from lightning_automodel.failure.device_progress import MOST_MARKS, DeviceProgress


class Played:
    """A device that is played: how many of its steps are done, whether its stream is, and who asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.queued = 5
        self.num_done = 0
        self.num_asked = 0
        self.is_idle = False
        self.has_failed = False
        self._events = 0
        stream = SimpleNamespace(record_event=self._record, query=self._query, device_index=0)
        monkeypatch.setattr(device_groups, "exist", lambda: True)
        monkeypatch.setattr(device_groups, "num_queued", lambda: {"0 of rank 0": self.queued})
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        self.progress = DeviceProgress(1800.0, lambda: self.now)

    def _record(self) -> Any:
        self._events += 1
        number = self._events
        return SimpleNamespace(query=lambda: number <= self.num_done)

    def _query(self) -> bool:
        self.num_asked += 1
        if self.has_failed:
            raise RuntimeError("device-side assert triggered")
        return self.is_idle

    def seen_after(self, seconds: float) -> tuple[Any, int, float]:
        """What the record says then."""
        self.now += seconds
        found = self.progress.describe()
        return found["device"], found["device_step"], found["device_stood_s"]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_nothing_is_asked_while_the_host_goes_on(played: Played) -> None:
    """Each step, and each collective, is a sign; a query could disturb the capture of a CUDA graph."""
    for step in range(1, 10):
        played.progress.begin_step(step)
        assert played.seen_after(4.0) == (Device.UNSEEN, 0, 0.0)
        played.queued += 1
        assert played.seen_after(4.0) == (Device.UNSEEN, 0, 0.0)
    assert played.num_asked == 0


def test_a_device_that_stands(played: Played) -> None:
    """From the first answer on, without progress of host or device."""
    for step in (1, 2, 3):
        played.progress.begin_step(step)
    played.num_done = 2
    assert played.seen_after(1.0) == (Device.UNSEEN, 0, 0.0)
    assert played.seen_after(6.0) == (Device.BUSY, 2, 0.0)
    assert played.seen_after(10.0) == (Device.BUSY, 2, 10.0)
    played.num_done = 3
    assert played.seen_after(1.0) == (Device.BUSY, 3, 0.0)
    assert played.seen_after(60.0) == (Device.BUSY, 3, 60.0)
    played.is_idle = True
    assert played.seen_after(1.0) == (Device.IDLE, 3, 0.0)
    played.is_idle = False
    assert played.seen_after(60.0) == (Device.BUSY, 3, 60.0)
    played.queued += 1
    assert played.seen_after(1.0) == (Device.UNSEEN, 3, 0.0)


def test_a_device_that_has_failed_is_not_told_in_its_place(played: Played) -> None:
    """The main thread meets the same error, and knows its line."""
    played.progress.begin_step(1)
    played.seen_after(1.0)
    played.has_failed = True
    assert played.seen_after(9.0) == (Device.FAILED, 0, 0.0)


def test_marks_are_few(played: Played) -> None:
    """Where nobody asks they would else add up."""
    for step in range(1000):
        played.progress.begin_step(step)
    assert len(played.progress._marks) == MOST_MARKS


def test_without_groups_of_an_accelerator_nothing_is_told() -> None:
    progress = DeviceProgress(1800.0)
    progress.begin_step(1)
    assert progress.describe() == {}
