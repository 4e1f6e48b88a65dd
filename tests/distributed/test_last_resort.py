"""What a process that has to end says before it does."""

from __future__ import annotations

import threading

import pytest

from lightning_automodel.distributed import last_resort
from lightning_automodel.distributed.last_resort import end_process, limited


def test_it_says_why_and_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its end, with the stacks of all threads."""
    said: list[str] = []
    monkeypatch.setattr(last_resort.os, "_exit", lambda status: said.append(f"exit {status}"))
    monkeypatch.setattr(
        last_resort.faulthandler, "dump_traceback", lambda all_threads: said.append(f"stacks {all_threads}")
    )
    end_process(3, "rank 1 is stuck")
    assert said == ["stacks True", "exit 1"]
    assert " stops: rank 1 is stuck. It was at:" in capsys.readouterr().err


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
