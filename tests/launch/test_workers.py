"""Ends of workers and of the launching process: faults are named, every wait ends, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel.distributed.failures import MISSED_HEARTBEATS, RankFailedError, RankFailure
from lightning_automodel.launch import workers
from lightning_automodel.launch.results import RESULTS
from lightning_automodel.launch.workers import describe_exit, wait_for_workers, write_failure
from tests.launch.launched import (
    FAILING_RANK,
    assert_gone,
    fail,
    is_running,
    make_trainer,
    program,
    ranks,
    run,
    tune,
    wait_until,
)

# What happens to rank 1; the status of the launching process; what its error says.
FAULTS = {
    "exception": (1, "RankFailedError: rank 1 on ", " failed in training_step: ValueError: no labels here"),
    "exit": (1, "RankFailedError: rank 1 on ", " failed in training_step: SystemExit: exit status 3"),
    "leave": (1, "RankFailedError: rank 1 on ", " missed heartbeats, last seen in "),
    "SIGKILL": (1, "RankFailedError: rank 1 on ", "its process was ended by SIGKILL"),
    "SIGTERM": (128 + signal.SIGTERM, "SIGTERMException: ", ""),
}
KILLED = (
    'ended by SIGKILL, usually by the kernel as memory ran out: look for "out of memory" in dmesg, and for limits'
    " of the job"
)
FAILED = [("fork", "exception"), ("fork", "SIGTERM")]
FAILED_IN_THE_SWEEP = [
    ("fork", "SIGKILL"),
    ("fork", "exit"),
    ("fork", "leave"),
    ("forkserver", "exception"),
    ("spawn", "SIGKILL"),
]


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
        "test_rank_fails": lambda folder, method, fault: run(fail, folder, start_method=method, fault=fault),
        "test_launching_process_is_ended": end_launching_process,
        "test_second_sigterm": send_sigterm_twice,
    }

    def start(name: str, *args: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("program")
        return what[name](folder, *args), folder

    with ThreadPoolExecutor(max_workers=3) as executor:
        yield {case: executor.submit(start, *case) for case in cases}


@pytest.mark.parametrize(
    ("method", "fault"),
    [*FAILED, *(pytest.param(*case, marks=pytest.mark.sweep) for case in FAILED_IN_THE_SWEEP)],
)
def test_rank_fails(runs: dict[Any, Future], method: str, fault: str) -> None:
    """All leave, and the launching process raises what names the rank and tells why."""
    status, folder = runs["test_rank_fails", method, fault].result()
    expected, beginning, ending = FAULTS[fault]
    error = (folder / "error").read_text()
    assert status == expected, (folder / "log").read_text()
    assert error.startswith(beginning)
    assert ending in error.splitlines()[0]
    if fault == "exception":
        assert f"rank {FAILING_RANK} left with:\nTraceback" in error
    assert_gone(folder)


def end_launching_process(folder: Path, method: str, name: str) -> int | None:
    """Send it a signal while both ranks train; returns its status."""
    with program(fail, folder, start_method=method) as launching:
        wait_until(lambda: all((folder / f"rank{rank}.on").exists() for rank in range(2)))
        os.kill(launching.pid, signal.Signals[name])
        launching.join(60)
        wait_until(lambda: not any(is_running(pid) for pid in ranks(folder)))
        return launching.exitcode


@pytest.mark.parametrize(
    ("method", "name"),
    [("fork", "SIGTERM"), ("fork", "SIGKILL")],
)
def test_launching_process_is_ended(runs: dict[Any, Future], method: str, name: str) -> None:
    """It is no rank, but no rank outlives it; SIGTERM stops them all after the same step."""
    status, folder = runs["test_launching_process_is_ended", method, name].result()
    log = (folder / "log").read_text()
    if name == "SIGTERM":
        assert status == 128 + signal.SIGTERM, log
        assert "received SIGTERM: all ranks stop after this step." in log
    else:
        # To a rank, torch has Linux send SIGINT as soon as its parent is gone; the other may hear of it
        # first.
        assert any(text in log for text in ("KeyboardInterrupt", "was interrupted in"))
        assert status == -signal.SIGKILL


def send_sigterm_twice(folder: Path, method: str) -> tuple[bool, int | None]:
    """While a rank hangs: whether the launching process waits after the first, and its status after the second."""
    with program(fail, folder, start_method=method, fault="hang") as launching:
        wait_until((folder / "hanging").exists)
        os.kill(launching.pid, signal.SIGTERM)
        launching.join(1)
        waits = launching.is_alive()
        os.kill(launching.pid, signal.SIGTERM)
        launching.join(60)
        return waits, launching.exitcode


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["fork"])
def test_second_sigterm(runs: dict[Any, Future], method: str) -> None:
    """After the first, the ranks wait for one that takes no further step."""
    outcome, folder = runs["test_second_sigterm", method].result()
    assert outcome == (True, 128 + signal.SIGTERM), (folder / "log").read_text()
    assert_gone(folder)


def test_tuner_is_refused(tmp_path: Path) -> None:
    """What it finds would be lost, and `lr_find` return None."""
    assert run(tune, tmp_path) == 0
    assert "_TunerExitException" in (tmp_path / "error").read_text()


# --- Waiting, with workers that do nothing else -----------------------------------------------------------------------


def wait_for(folder: Path, *functions: Callable[[Path, int], None]) -> None:
    """Wait for workers that do one of the functions each."""
    started = torch.multiprocessing.start_processes(
        _do, (folder, functions), len(functions), join=False, start_method="fork"
    )
    try:
        wait_for_workers(started, folder, first_rank=4, backend="gloo")
    finally:
        assert not any(process.is_alive() for process in started.processes)


def _do(local_rank: int, folder: Path, functions: Sequence[Callable[[Path, int], None]]) -> None:
    functions[local_rank](folder, local_rank)


def ends(folder: Path, local_rank: int) -> None:
    """Write the results of a run that is over."""
    (folder / RESULTS).touch()


def ends_late(folder: Path, local_rank: int) -> None:
    """Write results, and then hang where the process ends."""
    ends(folder, local_rank)
    time.sleep(1e6)


def leaves(folder: Path, local_rank: int) -> None:
    """End as if nothing had happened."""


def hangs(folder: Path, local_rank: int) -> None:
    """Never write any."""
    time.sleep(1e6)


def test_waiting_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A process that does not end after its run costs nothing but the time; without results it is an error."""
    monkeypatch.setattr(workers, "TIME_TO_END_S", 0.3)
    wait_for(tmp_path, ends, ends_late)
    assert "Some of the workers have finished, and the others do not end: they are killed." in caplog.text
    (tmp_path / RESULTS).unlink()
    with pytest.raises(RankFailedError, match=r"^rank 4 on .*: its process ended with exit status 0$"):
        wait_for(tmp_path, leaves, hangs)


def is_killed(folder: Path, local_rank: int) -> None:
    """End without a report."""
    (folder / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def waits_for_it(folder: Path, local_rank: int) -> None:
    """Wait where nobody tells it that another one has ended, as a rank does before it has joined."""
    time.sleep(1e6)


def raises_and_cannot_leave(folder: Path, local_rank: int) -> None:
    """Report what was raised, and end as a rank does whose groups cannot be destroyed."""
    failure = RankFailure(4, "here", "training_step", "ValueError", "no labels here")
    torch.save((failure, 4, "Traceback of rank 4"), folder / "4.failure")
    os._exit(1)


def loses_the_store(folder: Path, local_rank: int) -> None:
    """Report what a rank knows of one that hosted the store and is silent, once the launching process knows its end."""
    wait_until((folder / "pid").exists)
    wait_until(lambda: not Path("/proc", (folder / "pid").read_text()).exists())
    failure = RankFailure(4, "here", "backward", MISSED_HEARTBEATS, "which holds the store, does not answer")
    torch.save((failure, 5, "Traceback of rank 5"), folder / "5.failure")
    sys.exit(1)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (
            (raises_and_cannot_leave, is_killed),
            r"rank 4 on here failed in training_step: ValueError: no labels here$",
        ),
        (
            (is_killed, loses_the_store),
            rf"rank 4 on here was last seen in backward: its process was {KILLED}$",
        ),
        (
            (is_killed, waits_for_it),
            rf"rank 4 on {socket.gethostname()}: its process was {KILLED}$",
        ),
    ],
)
def test_who_knows_the_cause_says_it(
    workers: tuple[Callable[[Path, int], None], ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A rank knows what it raised, the others where it was, and the launching process how it ended."""
    time_to_end_s = 0.5 if waits_for_it in workers else 4.0
    monkeypatch.setattr("lightning_automodel.launch.workers.TIME_TO_END_S", time_to_end_s)
    with pytest.raises(RankFailedError, match=message):
        wait_for(tmp_path, *workers)


def test_the_first_report_counts(tmp_path: Path) -> None:
    """What `on_exception` hooks raise after it is not the cause."""
    trainer = make_trainer(tmp_path)
    for message in ("no labels here", "the hook's own"):
        write_failure(tmp_path, ValueError(message), trainer)
    (report,) = tmp_path.iterdir()
    assert torch.load(report, weights_only=False)[0].message == "no labels here"


@pytest.mark.parametrize(
    ("status", "backend", "text"),
    [
        (3, "gloo", "ended with exit status 3"),
        (-9, "gloo", f"was {KILLED}"),
        (
            -11,
            "gloo",
            "was ended by SIGSEGV, a fault in compiled code, often of an extension: look for"
            ' "Fatal Python error" above, where its line is',
        ),
        (
            -signal.SIGBUS,
            "gloo",
            "was ended by SIGBUS, often as /dev/shm is full: give the container more of it (docker run"
            " --shm-size), or take fewer num_workers",
        ),
        (-2, "gloo", "was ended by SIGINT"),
        (-6, "gloo", "was ended by SIGABRT, as gloo does"),
        (-6, "nccl", "was ended by SIGABRT, as the watchdog of NCCL does after an error in a kernel"),
        (
            -6,
            "cpu:gloo,cuda:nccl",
            "was ended by SIGABRT, as the watchdog of NCCL does after an error in a kernel",
        ),
    ],
)
def test_exit_statuses(status: int, backend: str, text: str) -> None:
    """As a person would say them. What aborts a process depends on what its groups communicate with."""
    assert describe_exit(status, backend).startswith(text)
