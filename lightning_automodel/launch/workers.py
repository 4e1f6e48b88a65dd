"""Ranks that are children of the launching process: what each tells the other, and waiting for all of them to end."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.multiprocessing import ProcessRaisedException

from lightning_automodel import lightning_internals
from lightning_automodel.distributed.failures import LAUNCHER, NO_SIGN_OF_LIFE, RankFailedError, RankFailure
from lightning_automodel.failure.supervisor import SIGTERM_STATUS, RunGuard

LONGEST_LEAVING_S = 60.0


@dataclass(frozen=True)
class Finished:
    """A rank is through.

    Attributes:
        results: What the launching process is to get of it.
    """

    results: Any


@dataclass(frozen=True)
class Left:
    """A rank left with an exception.

    Attributes:
        failure: Why; None where all ranks stopped together after SIGTERM.
        traceback: Of the exception.
    """

    failure: RankFailure | None
    traceback: str


def ended_with(status: int) -> str:
    """What an exit status of a process says; negative is the number of a signal."""
    if status < 0:
        known = -status in {*signal.Signals}
        return f"was ended by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return f"ended with exit status {status}"


# --- In a rank --------------------------------------------------------------------------------------------------------


def listen_to_parent(line: Connection) -> None:
    """Start a thread that makes this rank leave when another ends badly or the launching process does.

    Args:
        line: This rank's end of its pipe to the launching process.
    """
    threading.Thread(target=_listen, args=(line,), name="lightning_automodel parent", daemon=True).start()


def _listen(line: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while True:
        ready = wait([line, parent.sentinel])
        try:
            rank, how = line.recv() if line in ready else (LAUNCHER, "which started the ranks, ended")
        except (EOFError, OSError):
            rank, how = LAUNCHER, "which started the ranks, ended"
        _leave_since(rank, how)
        if rank == LAUNCHER:
            return


def _leave_since(rank: int, how: str) -> None:
    if RunGuard.report_launcher(how) if rank == LAUNCHER else RunGuard.report_end(rank, how):
        return
    who = "the launcher," if rank == LAUNCHER else f"rank {rank}"
    with contextlib.suppress(OSError):
        print(f"{who} {how} before this rank had joined the others.", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


# --- In the launching process -----------------------------------------------------------------------------------------


class Children:
    """The ranks of this node, seen from the process that started them and is no rank itself.

    Args:
        processes: One for each local rank.
        lines: This process's ends of the pipes to them, in the same order.
        first_rank: Global rank of the first.
    """

    def __init__(self, processes: Sequence[BaseProcess], lines: Sequence[Connection], first_rank: int) -> None:
        self._running = dict(enumerate(processes))
        self._process_ids = [process.pid or 0 for process in processes]
        self._lines = dict(enumerate(lines))
        self._first_rank = first_rank
        self._said: dict[int, Finished | Left] = {}
        self._first_bad_end: tuple[int, str] | None = None
        self._kill_at: float | None = None

    def wait(self) -> Any:
        """Wait until all have ended; if one ends badly, tell the others at once. SIGTERM is passed on to all of them.

        Whatever makes this process leave earlier, such as an interrupt, makes the ranks leave as well.

        Returns:
            The results that the first rank sent.

        Raises:
            RankFailedError: If a rank failed, from the traceback that it sent.
            SIGTERMException: If all ranks stopped together since one of them received SIGTERM.
        """
        try:
            with self._sigterm_passed_on():
                self._wait_for_all()
        except BaseException as exception:
            self._tell(LAUNCHER, f"which started the ranks, left with {type(exception).__name__}")
            self._kill_at = time.monotonic() + LONGEST_LEAVING_S
            self._wait_for_all()
            raise
        finally:
            self._kill()
        self._raise_bad_end()
        first = self._said.get(0)
        return first.results if isinstance(first, Finished) else None

    def _wait_for_all(self) -> None:
        while self._running:
            left_s = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            sentinels = [process.sentinel for process in self._running.values()]
            ready = wait([*sentinels, *self._lines.values()], left_s)
            if not ready:
                self._kill()
            self._receive()
            for index, process in list(self._running.items()):
                if process.sentinel in ready:
                    self._note_end(index, process)
        self._receive()

    def _receive(self) -> None:
        for index, line in list(self._lines.items()):
            try:
                while line.poll():
                    self._said[index] = line.recv()
            except (EOFError, OSError):
                del self._lines[index]

    def _note_end(self, index: int, process: BaseProcess) -> None:
        """Whatever its status, a process that ends without a word (``os._exit(0)``) ends badly."""
        process.join()
        del self._running[index]
        if self._first_bad_end is None and (process.exitcode or index not in self._said):
            how = ended_with(process.exitcode or 0)
            self._first_bad_end = index, how
            self._kill_at = time.monotonic() + LONGEST_LEAVING_S
            self._tell(self._first_rank + index, how)

    def _tell(self, rank: int, how: str) -> None:
        for index in self._running:
            with contextlib.suppress(OSError, KeyError):
                self._lines[index].send((rank, how))

    def _kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.join()

    @contextlib.contextmanager
    def _sigterm_passed_on(self) -> Iterator[None]:
        """Let the ranks agree on their last step instead of leaving them behind; asked twice, leave with them now."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        here, is_asked = os.getpid(), threading.Event()

        def pass_on(signum: int, frame: Any) -> None:
            if is_asked.is_set():
                raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
            is_asked.set()
            for process in self._running.values() if os.getpid() == here else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signum)

        previous = signal.signal(signal.SIGTERM, pass_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)

    def _raise_bad_end(self) -> None:
        if self._first_bad_end is None:
            return
        index, how = self._first_bad_end
        left = {index: said for index, said in self._said.items() if isinstance(said, Left)}
        failed = {index: said for index, said in left.items() if said.failure is not None}
        if left and not failed:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        own = (i for i, said in failed.items() if said.failure and said.failure.rank == self._first_rank + i)
        chosen = next(own, next(iter(failed), None))
        if chosen is None:
            rank, host = self._first_rank + index, socket.gethostname()
            raise RankFailedError(RankFailure(rank, host, "set-up", NO_SIGN_OF_LIFE, f"its process {how}"))
        failure = failed[chosen].failure
        assert failure is not None
        traceback = f"\n\nrank {self._first_rank + chosen} left with:\n{failed[chosen].traceback}"
        raise RankFailedError(failure) from ProcessRaisedException(traceback, chosen, self._process_ids[chosen])
