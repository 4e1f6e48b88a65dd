"""Workers: ranks started by a launching process that is no rank; what they report, and waiting for all of them."""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.multiprocessing import ProcessRaisedException

from lightning_automodel import lightning_internals
from lightning_automodel.distributed.failures import (
    MISSED_HEARTBEATS,
    PROCESS_ENDED,
    RUN_ON_ALL_RANKS,
    RankFailedError,
    RankFailure,
    failure_of,
)
from lightning_automodel.distributed.process_group import patched_signal
from lightning_automodel.failure import supervisor
from lightning_automodel.failure.supervisor import SIGTERM_STATUS

log = logging.getLogger(__name__)

# An `on_exception` hook may write a checkpoint; after Ctrl-C the user wants the prompt back.
TIME_TO_END_S = 60.0
TIME_TO_END_AFTER_INTERRUPT_S = 10.0


def describe_exit(status: int | None) -> str:
    """The exit status of a process in words; a negative one is the number of a signal, None of our own SIGKILL."""
    if status is None:
        return "did not end in time"
    names = {known.value: known.name for known in signal.Signals}
    if status == -signal.SIGABRT:
        return f"was ended by SIGABRT, as gloo does where ranks call different collectives. {RUN_ON_ALL_RANKS}"
    if status < 0:
        return f"was ended by {names.get(-status, f'signal {-status}')}"
    return f"ended with exit status {status}"


def tell_supervisor(rank: int, how: str) -> bool:
    """Tell the supervisor that another rank's process has ended; False if this rank has not joined."""
    if supervisor.report_end(rank, how):
        return True
    with contextlib.suppress(OSError):
        print(f"rank {rank} {how} before this rank had joined the others.", file=sys.stderr)
    return False


def write_report(folder: Path, local_rank: int, **report: Any) -> None:
    """Write what this worker reports. A file, since it appears whole or not at all, whatever ends the process."""
    path = folder / f"{local_rank}.pt"
    torch.save(report, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def write_failure(folder: Path, local_rank: int, exception: BaseException, trainer: "pl.Trainer") -> None:
    """Report the exception that ends this worker; no failure if all ranks stop together after SIGTERM."""
    failure = None
    if not isinstance(exception, lightning_internals.SIGTERMException):
        stage = trainer.state.stage or trainer.state.fn
        where = lightning_internals.failing_hook(exception) or (stage.value if stage is not None else "set-up")
        failure = failure_of(exception, trainer.global_rank, where)
    text = "".join(traceback.format_exception(exception))
    write_report(folder, local_rank, failure=failure, traceback=text)


class Workers:
    """The ranks of this node, from global rank ``first_rank`` on, seen from the launching process.

    Args:
        processes: The processes, by local rank.
        folder: Where they write their reports.
        first_rank: Global rank of the first one.
    """

    def __init__(self, processes: Sequence[BaseProcess], folder: Path, first_rank: int) -> None:
        self._processes, self._folder, self._first_rank = processes, folder, first_rank
        self._statuses: dict[int, int | None] = {}  # in the order in which they ended; None if killed here
        self._is_asked_to_stop = False

    def wait(self) -> Any:
        """Wait until all workers have ended; return the results of the first one.

        There is no time limit for training. Once one worker has ended, the others have a minute. SIGTERM is passed on
        to all of them, and sent if this process leaves earlier.

        Raises:
            RankFailedError: If a rank failed, chained to the traceback that it reported.
            SIGTERMException: If all ranks stopped together after one of them received SIGTERM.
        """
        try:
            with patched_signal(signal.SIGTERM, self._pass_sigterm_on):
                self._join(math.inf, until_first=True)
                if any(self._statuses.values()) and not self._join(TIME_TO_END_AFTER_INTERRUPT_S):
                    # It may wait for the one that failed in a place where nobody tells it, as before it has joined.
                    self._terminate()
                self._join(TIME_TO_END_S)
        except BaseException:
            self._terminate()
            self._join(TIME_TO_END_AFTER_INTERRUPT_S)
            raise
        finally:
            self._kill()
        paths = {index: self._folder / f"{index}.pt" for index in self._statuses}
        reports = {i: torch.load(p, "cpu", weights_only=False) for i, p in paths.items() if p.exists()}
        self._raise_failure(reports)
        return reports[0]["results"]

    def _join(self, seconds: float, until_first: bool = False) -> bool:
        """Whether all workers, or the first one, have ended after at most that many seconds."""
        end = time.monotonic() + seconds
        while running := self._running():
            left_s = None if end == math.inf else max(0.0, end - time.monotonic())
            ready = wait([process.sentinel for process in running.values()], left_s)
            if not ready:
                return False
            for index, process in running.items():
                if process.sentinel in ready:
                    process.join()
                    self._statuses[index] = process.exitcode
            if until_first:
                break
        return True

    def _running(self) -> dict[int, BaseProcess]:
        return {index: each for index, each in enumerate(self._processes) if index not in self._statuses}

    def _terminate(self) -> None:
        for process in self._running().values():
            process.terminate()

    def _kill(self) -> None:
        for index, process in self._running().items():
            log.warning("Rank %s does not end: its process is killed.", self._first_rank + index)
            process.kill()
            process.join()
            self._statuses[index] = None

    def _pass_sigterm_on(self, signum: int, frame: Any) -> None:
        """Pass on the first SIGTERM, so that the ranks agree on a last step. At the second one, leave."""
        if self._is_asked_to_stop:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        self._is_asked_to_stop = True
        self._terminate()

    def _raise_failure(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        failures = {index: report["failure"] for index, report in reports.items() if report.get("failure") is not None}
        # A process that ends without a report (`os._exit(0)`) has failed, whatever its status.
        unexplained = {
            self._first_rank + index: describe_exit(status)
            for index, status in self._statuses.items()
            if index not in reports or (status and "results" in reports[index])
        }
        cause: ProcessRaisedException | None = None
        if failures:
            # Prefer the report of the rank that failed to those of the ranks that left because of it.
            index = min(failures, key=lambda index: failures[index].rank != self._first_rank + index)
            text = f"\n\nrank {self._first_rank + index} left with:\n{reports[index]['traceback']}"
            failure, cause = failures[index], ProcessRaisedException(text, index, self._processes[index].pid or 0)
        elif any("traceback" in report for report in reports.values()):
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        elif unexplained:
            failure = RankFailure(next(iter(unexplained)), socket.gethostname(), "", PROCESS_ENDED, "")
        else:
            return
        if failure.rank in unexplained and failure.error in (PROCESS_ENDED, MISSED_HEARTBEATS):
            # The other ranks may know no more than that it is silent.
            failure = replace(failure, error=PROCESS_ENDED, message=f"its process {unexplained[failure.rank]}")
        raise RankFailedError(failure) from cause
