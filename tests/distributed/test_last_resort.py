"""What a process that has to end says before it does."""

from __future__ import annotations

import threading

import pytest

from lightning_automodel.distributed import last_resort
from lightning_automodel.distributed.last_resort import limited


def test_a_block_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end cancels the end of the process."""
    ended = threading.Event()
    monkeypatch.setattr(last_resort, "end_process", lambda rank, why: ended.set())
    with limited(60.0, 1, "late"):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    timer.join(20)
    assert not timer.is_alive()
    assert not ended.is_set()
    with limited(0.01, 1, "late"):
        assert ended.wait(20)
