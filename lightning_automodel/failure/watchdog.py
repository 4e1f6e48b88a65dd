"""Threads beside the training that tell when another rank failed, and make this one leave."""

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel import torch_internals
from lightning_automodel.distributed import connections, rendezvous
from lightning_automodel.distributed.failures import (
    LAUNCHER,
    NO_SIGN_OF_LIFE,
    RankFailedError,
    RankFailure,
    is_communication_error,
)
from lightning_automodel.failure.coordinated_stop import DECISION, NONE, REQUEST, StopAgreement
from lightning_automodel.failure.heartbeat import FINISHED, Sign

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.001
POLL_S = 0.25
RANKS_PER_SECOND = 1000
POLLS_OF_A_FILE = 40
TIME_TO_LEAVE_S = 5.0
SEARCH_S = 3.0
LINGER_S = 5.0
INTERRUPT_AFTER_S = 2.0
KILL_AFTER_S = 4.0

FAILURE = "failure"
ENDED = "ended"
ALL_THROUGH = "all_through"
ALL_SEEN = "all_seen"

_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Watchdog:
    """Posts this rank's failure for the others, and leaves with the cause when another rank fails.

    While it runs, a thread exchanges a few bytes with the store of the default process group some times a second:
    this rank's sign of life, the sign of the next rank, and whether anybody posted a failure. The training itself
    neither communicates nor waits for any of it.

    When another rank failed, or has given no sign of life for too long, a second thread hangs up this rank's gloo
    connections, so that a collective which waits raises; then it interrupts the main thread; and where both do not
    help, it prints the cause and where the main thread stands, and ends the process with status 1.

    Args:
        timeout: Within which this rank leaves when another gives no sign of life any more: it may be silent for some
            seconds less, at least for half of it.
        where: Tells the hook that this rank is in; called by a thread.
        interrupt: Makes the main thread raise; None where nothing can.

    Attributes:
        stop: Settles after which step all ranks stop.
        training_step: Number of the newest training step that this rank began; all ranks take the same ones.
    """

    def __init__(
        self, timeout: timedelta, where: Callable[[], str], interrupt: Callable[[], None] | None = None
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._host = socket.gethostname()
        timeout_s = timeout.total_seconds()
        self._silence_s = max(timeout_s / 2, timeout_s - TIME_TO_LEAVE_S)
        self._where, self._interrupt = where, interrupt
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._interval_s = min(self._choose_interval(), self._silence_s / 4)
        _runs[world] = _runs.get(world, 0) + 1
        self._prefix = f"lightning_automodel/run/{_runs[world]}"
        self._default_store = torch_internals.default_store()
        self._store: dist.Store
        self._is_open = threading.Event()
        self._signs: dict[int, Sign] = {}
        self._beats = 0
        self._failure: RankFailure | None = None
        self._has_posted_own = False
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self.stop = StopAgreement(self._rank, self._world_size)
        self.training_step = 0
        self._last_answer = time.monotonic()
        self._polling_ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"lightning_automodel {name}", daemon=True)
            for name, target in (("poll", self._poll_until_closed), ("watchdog", self._watch))
        ]

    def start(self) -> None:
        """Start the threads, and wait for a first answer. Every rank of the default group must do so, equally often.

        Raises:
            RankFailedError: If the store does not answer, or another rank failed already.
        """
        for thread in self._threads:
            thread.start()
        while not self._is_open.wait(POLL_S) and self._failure is None:
            pass
        if self._failure is not None:
            raise RankFailedError(self._failure)

    def close(self) -> None:
        """Say that this rank is done, and end the threads. Not a collective; may be called twice."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=2 * self._interval_s + 1)

    @property
    def failure(self) -> RankFailure | None:
        """Another rank's failure, once this rank knows of it."""
        return self._failure

    def report_end(self, rank: int, how: str) -> None:
        """Post that the process of ``rank`` ended, unless it has posted why or was done.

        Args:
            rank: A rank whose process this one can see.
            how: What is known, such as ``"ended with exit status 3"``.
        """
        if not self._is_open.wait(self._silence_s):
            return
        with contextlib.suppress(dist.DistError):
            if self._store.check([f"sign/{rank}"]):
                self._see(rank, self._store.get(f"sign/{rank}"))
            sign = self._signs.setdefault(rank, Sign(NONE, time.monotonic()))
            if not sign.finished:
                self._post(RankFailure(rank, sign.host, sign.where, NO_SIGN_OF_LIFE, f"its process {how}"))

    def report_launcher(self, how: str) -> None:
        """Post that what started the ranks is gone or gives up.

        Args:
            how: What is known, such as ``"which started the ranks, ended"``.
        """
        if not self._is_open.wait(self._silence_s):
            return
        with contextlib.suppress(dist.DistError):
            self._post(RankFailure(LAUNCHER, self._host, "", NO_SIGN_OF_LIFE, how))

    def wait_for_all(self) -> int | None:
        """Wait until every rank is through its last hook, or one has failed. A collective, through the store alone.

        Returns:
            A rank that received SIGTERM, whether or not they had agreed on a last step; None where none did, or one
            failed. The same on all ranks.
        """
        try:
            if self.stop.is_asked_here:
                self._store.compare_set(REQUEST, NONE.decode(), str(self._rank))
            self._store.compare_set(ENDED, NONE.decode(), f"{self._rank}|{self._host}|{self.training_step}")
            if self._store.add("through", 1) == self._world_size:
                self._store.set(ALL_THROUGH, self._store.get(REQUEST).decode())
            self._wait_for(ALL_THROUGH)
            asked_by = NONE if self._failure is not None else self._store.get(ALL_THROUGH)
        except dist.DistError:
            self._failure = self._failure or self._lost_store()
        if self._failure is not None:
            return None
        self._part()
        return None if asked_by == NONE else int(asked_by)

    def _part(self) -> None:
        """End the watch; rank 0, which may host the store, stays some seconds for the others to know that they may."""
        self._closed.set()
        with contextlib.suppress(dist.DistError):
            if self._store.add("seen", 1) == self._world_size:
                self._store.set(ALL_SEEN, "")
            if self._rank == 0:
                self._wait_for(ALL_SEEN, LINGER_S)

    def _wait_for(self, key: str, longest_s: float = float("inf")) -> None:
        """Wait until ``key`` exists, a rank has failed, or for ``longest_s`` seconds."""
        pause_s, end = FIRST_PAUSE_S, time.monotonic() + longest_s
        while self._failure is None and not self._store.check([key]) and time.monotonic() < end:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._interval_s)

    def acknowledge(self) -> None:
        """Say that the main thread leaves already, so that nothing need make it."""
        self._noticed.set()

    # --- Leaving because of an exception ------------------------------------------------------------------------------

    def explain(self, exception: BaseException, where: str) -> RankFailure | None:
        """Find the other rank's failure that ``exception`` follows from, else post it as this rank's own.

        Args:
            exception: What the main thread is about to leave with.
            where: The hook that raised it.

        Returns:
            The failure of another rank if it is the cause; None if the exception is this rank's own.
        """
        try:
            if not self._is_open.is_set() or self._closed.is_set():
                return self._failure
            return self._find_cause(exception, where)
        finally:
            self._noticed.set()

    def _find_cause(self, exception: BaseException, where: str) -> RankFailure | None:
        if isinstance(exception, RankFailedError):
            return exception.failure
        own = RankFailure.from_exception(exception, self._rank, where)
        self._has_posted_own = True
        try:
            if not is_communication_error(exception):
                self._post(own)
                return None
            culprit = self._failure or self._post(self._search() or self._with_positions(own, exception))
        except dist.DistError:
            culprit = self._failure or self._lost_store()
        return None if culprit.rank == self._rank else culprit

    def _search(self) -> RankFailure | None:
        """Wait a moment for another rank's failure, or for a rank that gives no sign of life any more."""
        search_s = max(SEARCH_S, 6 * self._interval_s)
        end = time.monotonic() + search_s
        keys = [f"sign/{rank}" for rank in range(self._world_size)]
        while time.monotonic() < end:
            posted, *signs = self._store.multi_get([FAILURE, *keys])
            if posted != NONE:
                return RankFailure.from_bytes(posted)
            for rank, value in enumerate(signs):
                self._see(rank, value)
            time.sleep(self._interval_s / 2)
        others = {rank: sign for rank, sign in self._signs.items() if rank != self._rank and not sign.finished}
        longest_silent = min(others, key=lambda rank: others[rank].changed_at, default=self._rank)
        if longest_silent == self._rank:
            return None
        sign = others[longest_silent]
        is_silent = time.monotonic() - sign.changed_at > search_s - 2 * self._interval_s
        return self._silent(longest_silent, sign) if is_silent else None

    def _with_positions(self, own: RankFailure, exception: BaseException) -> RankFailure:
        """Add to both where the other ranks are, for all of them are alive and yet one waited in vain."""
        others = (f"rank {rank} in {sign.where}" for rank, sign in sorted(self._signs.items()) if rank != self._rank)
        note = f"All ranks gave signs of life. When this was raised on rank {self._rank}: {', '.join(others)}."
        exception.add_note(note)
        return replace(own, message=f"{own.message}\n{note}")

    # --- The threads --------------------------------------------------------------------------------------------------

    def _choose_interval(self) -> float:
        """Seconds between two polls; longer for a file, which keeps all that was ever written to it."""
        in_a_file = torch_internals.is_file_store(torch_internals.default_store())
        return max(POLL_S, self._world_size / RANKS_PER_SECOND, self._silence_s / POLLS_OF_A_FILE if in_a_file else 0)

    def _connect(self) -> dist.Store:
        """A connection of one's own: a client of the store is blocked for all threads while one of them waits."""
        if (address := connections.store_address(self._default_store)) is not None:
            # A client would go on trying to reach a host that is gone, for the whole timeout and more.
            socket.create_connection(address, timeout=self._silence_s).close()
        store = self._default_store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self._silence_s))
        return dist.PrefixStore(self._prefix, store)

    def _write_first_values(self) -> None:
        """Let every key exist that is read: to read a missing one is to wait for it."""
        signs = range(self._world_size) if self._rank == 0 else {0, self._rank, self._next_rank()}
        for key in (FAILURE, ENDED, REQUEST, DECISION, *(f"sign/{rank}" for rank in signs)):
            self._store.compare_set(key, "", NONE.decode())

    def _poll_until_closed(self) -> None:
        """The first thread: exchange signs of life. It blocks if the host of the store is stopped."""
        try:
            self._store = self._connect()
            self._write_first_values()
            self._is_open.set()
            while (failure := self._poll()) is None and not self._closed.wait(self._interval_s):
                self._last_answer = time.monotonic()
            self._failure = failure
            if failure is None:
                self.stop.leave(self._store)
                self._store.set(f"sign/{self._rank}", FINISHED.decode())
        except Exception as error:
            if not self._closed.is_set() and not self._host_finished():
                if not isinstance(error, (dist.DistError, OSError)):
                    log.exception("The watchdog cannot go on.")
                self._failure = self._lost_store()
        finally:
            self.stop.release()
            self._polling_ended.set()

    def _watch(self) -> None:
        """The second thread: make this rank leave once there is a failure, or no answer from the store."""
        while not self._polling_ended.wait(self._interval_s) and not self._closed.is_set():
            if time.monotonic() - self._last_answer > self._silence_s:
                self._failure = self._lost_store()
                break
        failure = self._failure
        if failure is not None and not (failure.rank == self._rank and self._has_posted_own):
            self._leave(failure)

    def _poll(self) -> RankFailure | None:
        self._beats += 1
        try:
            where = self._where()
        except Exception:
            where = "an unknown hook"
        self._store.set(f"sign/{self._rank}", f"{self._beats}|{self._host}|{where}")
        watched = sorted({0, self._next_rank()} - {self._rank})
        keys = [FAILURE, ENDED, REQUEST, DECISION, *(f"sign/{rank}" for rank in watched)]
        posted, ended, request, decision, *signs = self._store.multi_get(keys)
        for rank, value in zip(watched, signs, strict=True):
            self._see(rank, value)
        if posted != NONE:
            return RankFailure.from_bytes(posted)
        self.stop.exchange(self._store, request, decision)
        if ended != NONE and (failure := self._left_alone(ended)) is not None:
            return self._post(failure)
        for rank in watched:
            sign = self._signs[rank]
            if not sign.finished and time.monotonic() - sign.changed_at > self._silence_s:
                return self._post(self._silent(rank, sign))
        return None

    def _next_rank(self) -> int:
        """The first rank after this one that is not known to be done."""
        for offset in range(1, self._world_size):
            rank = (self._rank + offset) % self._world_size
            if not (rank in self._signs and self._signs[rank].finished):
                return rank
        return self._rank

    def _see(self, rank: int, value: bytes) -> None:
        known = self._signs.get(rank)
        if known is None or known.value != value:
            self._signs[rank] = Sign(value, time.monotonic())

    def _post(self, failure: RankFailure) -> RankFailure:
        posted = self._store.compare_set(FAILURE, NONE.decode(), failure.to_bytes().decode())
        return RankFailure.from_bytes(posted)

    def _silent(self, rank: int, sign: Sign) -> RankFailure:
        seconds = time.monotonic() - sign.changed_at
        message = f"rank {self._rank} has heard nothing of it for {seconds:.1f} s: stopped, killed or cut off"
        return RankFailure(rank, sign.host, sign.where, NO_SIGN_OF_LIFE, message)

    def _left_alone(self, ended: bytes) -> RankFailure | None:
        """The fault of the rank that came first to its end, if this rank takes steps that it did not take."""
        rank, host, last_step = ended.decode().split("|")
        if self.training_step <= int(last_step):
            return None
        message = (
            f"it ended its run after training step {last_step}, but rank {self._rank} is in step {self.training_step}: "
            "give all ranks equally many batches, and set trainer.should_stop on all of them or on none"
        )
        return RankFailure(int(rank), host, "fit", "RuntimeError", message)

    def _host_finished(self) -> bool:
        return 0 in self._signs and self._signs[0].finished

    def _lost_store(self) -> RankFailure:
        if rendezvous.launcher_hosts_store():
            message = "which holds the store of the process group, ended or does not answer"
            return RankFailure(LAUNCHER, self._host, "", NO_SIGN_OF_LIFE, message)
        sign = self._signs.get(0, Sign(NONE, 0.0))
        message = "its process, which holds the store of the process group, ended or does not answer"
        return RankFailure(0, sign.host, sign.where, NO_SIGN_OF_LIFE, message)

    def _leave(self, failure: RankFailure) -> None:
        """Make the main thread leave: gently, then by a signal, then by ending the process."""
        self.stop.release()
        if self._is_noticed_within(0):
            return
        connections.hang_up()
        if self._is_noticed_within(INTERRUPT_AFTER_S):
            return
        if self._interrupt is not None:
            self._interrupt()
        if self._is_noticed_within(KILL_AFTER_S - INTERRUPT_AFTER_S):
            return
        try:
            print(f"rank {self._rank} on {self._host} leaves, since {failure}. It stood at:", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(1)

    def _is_noticed_within(self, seconds: float) -> bool:
        return self._noticed.wait(seconds) or self._closed.is_set()
