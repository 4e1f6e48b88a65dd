"""Workers: ranks started by a launching process that is no rank; their messages to each other, and waiting for them."""

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import lightning.pytorch as pl
from torch.multiprocessing import ProcessRaisedException

from lightning_automodel import lightning_internals
from lightning_automodel.distributed.failures import (
    LAUNCHER,
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


@dataclass(frozen=True)
class WorkerReport:
    """What a worker sends to the launching process, at once when it fails and before it ends.

    Attributes:
        results: Results of the run, from the first rank of the node.
        traceback: Of the exception that ended the worker; empty if the run succeeded.
        failure: Why the worker left; None if the run succeeded, or all ranks stopped together after SIGTERM.
        leaves: Whether the worker has nothing more to do; False before ``on_exception`` hooks.
    """

    results: bytes | None = None
    traceback: str = ""
    failure: RankFailure | None = None
    leaves: bool = True

    @classmethod
    def from_exception(cls, exception: BaseException, trainer: "pl.Trainer", leaves: bool) -> "WorkerReport":
        """Report the exception that ends this worker."""
        text = "".join(traceback.format_exception(exception))
        if isinstance(exception, lightning_internals.SIGTERMException):
            return cls(traceback=text, leaves=leaves)
        stage = trainer.state.stage or trainer.state.fn
        where = lightning_internals.failing_hook(exception) or (stage.value if stage is not None else "set-up")
        return cls(None, text, failure_of(exception, trainer.global_rank, where), leaves)


def describe_exit(status: int) -> str:
    """The exit status of a process in words; a negative one is the number of a signal."""
    names = {known.value: known.name for known in signal.Signals}
    if status == -signal.SIGABRT:
        return f"was ended by SIGABRT, as gloo does where ranks call different collectives. {RUN_ON_ALL_RANKS}"
    if status < 0:
        return f"was ended by {names.get(-status, f'signal {-status}')}"
    return f"ended with exit status {status}"


def tell_supervisor(rank: int, how: str) -> bool:
    """Tell the supervisor that another rank or the ``LAUNCHER`` has ended; False if this rank has not joined."""
    if supervisor.report_end(rank, how):
        return True
    who = "the launching process," if rank == LAUNCHER else f"rank {rank}"
    with contextlib.suppress(OSError):
        print(f"{who} {how} before this rank had joined the others.", file=sys.stderr)
    return False


def follow_launching_process(connection: Connection) -> None:
    """In a thread of a worker: leave when the launching process ends, or reports that another worker has failed."""
    parent, rank = multiprocessing.parent_process(), None
    assert parent is not None
    while rank != LAUNCHER:
        # Forked siblings keep the pipe's other end open: only the sentinel shows that the launching process ended.
        ready = wait([connection, parent.sentinel])
        rank, how = LAUNCHER, "which started the ranks, ended"
        with contextlib.suppress(EOFError, OSError):
            if connection in ready:
                rank, how = connection.recv()
        if not tell_supervisor(rank, how):
            os.kill(os.getpid(), signal.SIGTERM)


class Workers:
    """The ranks of this node, from global rank ``first_rank`` on, seen from the launching process."""

    def __init__(self, processes: Sequence[BaseProcess], connections: Sequence[Connection], first_rank: int) -> None:
        self._process_ids = [process.pid or 0 for process in processes]
        self._running = dict(enumerate(processes))
        self._connections = dict(enumerate(connections))
        self._first_rank = first_rank
        self._reports: dict[int, WorkerReport] = {}
        self._unexplained_ends: dict[int, str] = {}
        self._kill_at = math.inf
        self._is_asked_to_stop = False

    def wait(self) -> bytes | None:
        """Wait until all workers have ended. When one fails, the others are told at once.

        There is no time limit for training. Once one worker has left, the others have a minute. SIGTERM is passed on to
        all of them. If this process leaves earlier, so do the workers. Returns the results of the first worker.

        Raises:
            RankFailedError: If a rank failed, chained to the traceback that it reported.
            SIGTERMException: If all ranks stopped together after one of them received SIGTERM.
        """
        try:
            with patched_signal(signal.SIGTERM, self._pass_sigterm_on):
                self._wait_for_all()
        except BaseException as exception:
            is_interrupt = isinstance(exception, KeyboardInterrupt)
            self._tell(LAUNCHER, f"which started the ranks, left with {type(exception).__name__}")
            self._limit(TIME_TO_END_AFTER_INTERRUPT_S if is_interrupt else TIME_TO_END_S)
            self._wait_for_all()
            raise
        finally:
            # Some still run only if that wait was interrupted too: by a second Ctrl-C or SIGTERM.
            for process in self._running.values():
                process.kill()
                process.join()
        self._raise_failure()
        return self._reports[0].results

    def _wait_for_all(self) -> None:
        while self._running:
            left_s = None if self._kill_at == math.inf else max(0.0, self._kill_at - time.monotonic())
            ready = wait([*(p.sentinel for p in self._running.values()), *self._connections.values()], left_s)
            self._receive_reports()
            for index, process in list(self._running.items()):
                if not ready:
                    has_finished = index in self._reports and not self._reports[index].traceback
                    what = "has finished its run, but does not end" if has_finished else "does not end"
                    log.warning("Rank %s %s: its process is killed.", self._first_rank + index, what)
                    process.kill()
                if not ready or process.sentinel in ready:
                    process.join()
                    self._note_end(index, process.exitcode or 0, was_killed=not ready)

    def _receive_reports(self) -> None:
        for index, connection in list(self._connections.items()):
            try:
                while connection.poll():
                    report = connection.recv()
                    # The first one tells the cause; `on_exception` hooks may raise something else after it.
                    self._reports.setdefault(index, report)
                    if report.leaves:
                        # A run ends on all ranks together, so the others will report soon.
                        self._limit(TIME_TO_END_S)
            except (EOFError, OSError):
                del self._connections[index]

    def _note_end(self, index: int, status: int, was_killed: bool) -> None:
        del self._running[index]
        # A process that ends without a report (`os._exit(0)`) has failed, whatever its status.
        report = self._reports.get(index)
        if report is None or (status != 0 and not was_killed):
            how = "did not end in time" if was_killed else describe_exit(status)
            if report is None or not report.traceback:
                self._unexplained_ends[index] = how
            self._limit(TIME_TO_END_S)
            self._tell(self._first_rank + index, how)

    def _limit(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _tell(self, rank: int, how: str) -> None:
        for index in self._running:
            with contextlib.suppress(OSError, KeyError):
                self._connections[index].send((rank, how))

    def _pass_sigterm_on(self, signum: int, frame: Any) -> None:
        """Pass on the first SIGTERM, so that the ranks agree on a last step. At the second one, leave at once."""
        if self._is_asked_to_stop:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        self._is_asked_to_stop = True
        for process in self._running.values():
            process.terminate()

    def _raise_failure(self) -> None:
        failures = {index: report.failure for index, report in self._reports.items() if report.failure is not None}
        cause: ProcessRaisedException | None = None
        if failures:
            # Prefer the report of the rank that failed to those of the ranks that left because of it.
            index = min(failures, key=lambda index: failures[index].rank != self._first_rank + index)
            text = f"\n\nrank {self._first_rank + index} left with:\n{self._reports[index].traceback}"
            failure, cause = failures[index], ProcessRaisedException(text, index, self._process_ids[index])
        elif any(report.traceback for report in self._reports.values()):
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        elif self._unexplained_ends:
            rank = self._first_rank + next(iter(self._unexplained_ends))
            failure = RankFailure(rank, socket.gethostname(), "", PROCESS_ENDED, "")
        else:
            return
        how = self._unexplained_ends.get(failure.rank - self._first_rank)
        if how is not None and failure.error in (PROCESS_ENDED, MISSED_HEARTBEATS):
            # The other ranks may know no more than that it is silent.
            failure = replace(failure, error=PROCESS_ENDED, message=f"its process {how}")
        raise RankFailedError(failure) from cause
