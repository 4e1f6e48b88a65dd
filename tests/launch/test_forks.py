"""Ends of workers and of the launching process: faults are named, every wait ends, and nobody is left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launched import (
    assert_gone,
    fail,
    is_running,
    program,
    ranks,
    run,
    tune,
    wait_until,
)

# What happens to rank 1; the status of the launching process; what its error says.
# The rank that has failed ends first, or the one that knows of it.
FAULTS = {
    "exception": (1, "ProcessRaisedException: ", "ValueError: no labels here"),
    "finish": (
        1,
        "ProcessRaisedException: ",
        r"sys\.exit\(0\) has ended the run|SystemExit: exit status 0",
    ),
    "exit": (1, "", r"process 1 terminated with exit code 3|SystemExit: exit status 3"),
    "leave": (
        1,
        "ProcessRaisedException: ",
        "RankFailedError: rank 1 on .* last seen in ",
    ),
    "SIGKILL": (1, "ProcessExitedException: ", "process 1 terminated with signal SIGKILL"),
    "SIGTERM": (128 + signal.SIGTERM, "SIGTERMException: ", ""),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, Future]]:
    """What happens in each selected case, three at a time; it is looked at in the case's folder."""
    items = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    cases = [
        (item.originalname, *item.callspec.params.values()) for item in items if "runs" in item.fixturenames
    ]
    what: dict[str, Callable[..., Any]] = {
        "test_rank_fails": lambda folder, fault: run(fail, folder, start_method="fork", fault=fault),
        "test_launching_process_is_ended": end_launching_process,
    }

    def start(name: str, *args: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("program")
        return what[name](folder, *args), folder

    with ThreadPoolExecutor(max_workers=3) as executor:
        yield {case: executor.submit(start, *case) for case in cases}


@pytest.mark.parametrize(
    "fault",
    [name if name == "exception" else pytest.param(name, marks=pytest.mark.sweep) for name in FAULTS],
)
def test_rank_fails(runs: dict[Any, Future], fault: str) -> None:
    """All leave, and the launching process raises what names the rank and tells why."""
    status, folder = runs["test_rank_fails", fault].result()
    expected, beginning, cause = FAULTS[fault]
    error = (folder / "error").read_text()
    assert status == expected, (folder / "log").read_text()
    assert error.startswith(beginning)
    assert re.search(cause, error)
    # OnExceptionCheckpoint is called in the launching process too, and hides no error there.
    if fault == "exception":
        assert "this process is no rank, since it has launched them" in (folder / "log").read_text()
    assert_gone(folder)


def end_launching_process(folder: Path, name: str) -> int | None:
    """Send it a signal while both ranks train; returns its status."""
    with program(fail, folder, start_method="fork") as launching:
        wait_until(lambda: all((folder / f"rank{rank}.on").exists() for rank in range(2)))
        os.kill(launching.pid, signal.Signals[name])
        launching.join(60)
        wait_until(lambda: not any(is_running(pid) for pid in ranks(folder)))
        return launching.exitcode


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_launching_process_is_ended(runs: dict[Any, Future], name: str) -> None:
    """It is no rank, but no rank outlives it; SIGTERM stops them all after the same step."""
    status, folder = runs["test_launching_process_is_ended", name].result()
    log = (folder / "log").read_text()
    if name == "SIGTERM":
        assert status == 128 + signal.SIGTERM, log
        assert "received SIGTERM: all ranks stop after this step." in log
    else:
        # To a rank, torch has Linux send SIGINT as soon as its parent is gone; the other may hear of it
        # first.
        assert any(text in log for text in ("KeyboardInterrupt", "was interrupted in"))
        assert status == -signal.SIGKILL


def test_tuner_is_refused(tmp_path: Path) -> None:
    """What it finds would be lost, and `lr_find` return None."""
    assert run(tune, tmp_path) == 0
    assert "use the callback LearningRateFinder" in (tmp_path / "error").read_text()
