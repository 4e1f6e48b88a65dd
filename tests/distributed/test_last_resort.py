"""What a process that has to end says, and writes, before it does."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from lightning_automodel.distributed import device_groups, last_resort
from lightning_automodel.distributed.last_resort import end_process, limited
from lightning_automodel.internals import process_groups


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit statuses, in place of ends."""
    statuses: list[int] = []
    monkeypatch.setattr(last_resort.os, "_exit", statuses.append)
    monkeypatch.setattr(last_resort.faulthandler, "dump_traceback", lambda all_threads: None)
    return statuses


@pytest.mark.parametrize(
    "variable", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME"]
)
def test_the_flight_recorder_is_written_first(
    ends: list[int],
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the file that torch would use at the timeout, which this end comes before; and the file is named."""
    monkeypatch.setattr(device_groups, "exist", lambda: True)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    is_cache = variable == "XDG_CACHE_HOME"
    monkeypatch.setenv(variable, str(tmp_path) if is_cache else str(tmp_path / "records_"))
    path = tmp_path / "torch" / "comm_lib_trace_rank_3" if is_cache else tmp_path / "records_3"
    end_process(3, "rank 1 is stuck")
    assert ends == [1]
    assert "version" in pickle.loads(path.read_bytes())
    printed = capsys.readouterr().err
    assert (
        f" stops: rank 1 is stuck. Its newest collectives are in {path}, which torchfrtrace reads. It was"
        in printed
    )


def test_a_recorder_that_is_stuck_does_not_keep_the_process(
    ends: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does one that fails."""
    is_over = threading.Event()
    monkeypatch.setattr(device_groups, "exist", lambda: True)
    monkeypatch.setattr(last_resort, "LONGEST_DUMP_S", 0.05)
    monkeypatch.setattr(process_groups, "flight_records", is_over.wait)
    end_process(3, "rank 1 is stuck")
    is_over.set()
    assert ends == [1]
    assert " stops: rank 1 is stuck. It was at:" in capsys.readouterr().err


def test_without_an_accelerator_nothing_is_written(
    ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tool reads what gloo records."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "records_"))
    end_process(3, "rank 1 is stuck")
    assert ends == [1]
    assert list(tmp_path.iterdir()) == []


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
