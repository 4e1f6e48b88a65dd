"""Learns from the board that another rank failed, is silent or is stuck, and makes this rank leave."""

import contextlib
import json
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import device_groups, failures, first_rank
from lightning_automodel.distributed.board import BEAT_S, LINGER_S, NONE, Board, connect_again
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, Sighting
from lightning_automodel.distributed.last_resort import end_process
from lightning_automodel.failure.coordinated_stop import STEPS, STOP, StopAgreement
from lightning_automodel.failure.device_watch import DEVICES, DeviceWatch
from lightning_automodel.failure.lease import holds_lease
from lightning_automodel.failure.position import main_thread_position
from lightning_automodel.failure.verdict import decide, left_behind, standstill

log = logging.getLogger(__name__)

TIME_TO_LEAVE_S = 5.0
STANDSTILL_S = 60.0
POLL_S = 0.05
LONGEST_SEARCH_BEATS = 120
TIME_TO_RAISE_S = 2.0
TIME_TO_RAISE_AFTER_SILENCE_S = 0.5
TIME_TO_RAISE_AND_SAVE_S = 30.0
TIME_TO_FREE_DEVICE_S = 5.0
TIME_TO_FAIL_S = 2.0
NEITHER_ENDS = "a collective neither ends nor fails after {:.0f} s"

RUN, END, LEASE = "run", "end", "lease"
AFTER_FAILURE = "after_failure"
TOGETHER, ALONE = "together", "alone"

_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Watchdog:
    """Posts this rank's failure for the others, and leaves with the cause when another rank fails.

    A rank whose collective fails says so in its record, and waits for the verdict. The first of these ranks takes the
    lease, reads all records with each heartbeat, and posts the verdict as soon as it can be told. If it falls silent,
    another one takes the lease.

    After another rank's failure a second thread gives the main thread time to raise, as the collective in which it
    waits may fail. Then it interrupts the main thread, and at last it ends the process.

    ``where`` returns the hook that this rank is in, and ``find_ended`` the ranks whose processes have ended since the
    last call, and how. ``raises_on_sigterm``: whether the main thread has a handler that raises. ``timeout`` is how
    long a collective may wait, ``heartbeat_timeout`` how long a rank may be silent, if that is less.
    """

    def __init__(
        self,
        timeout: timedelta,
        where: Callable[[], str],
        raises_on_sigterm: bool,
        find_ended: Callable[[], list[tuple[int, str]]] = list,
        heartbeat_timeout: timedelta | None = None,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.timeout_s = timeout.total_seconds()
        self._where, self._raises_on_sigterm, self._find_ended = where, raises_on_sigterm, find_ended
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        self.is_noticed = threading.Event()  # the main thread is leaving: nothing interrupts it
        self._is_closed = threading.Event()
        self.saves_on_exception = False  # this rank saves alone after another one's failure: it is given time to raise
        self._failure: RankFailure | None = None
        self._has_posted_own = self._has_ended = self._has_warned = False
        self.stop = StopAgreement(self._rank, lambda store, step: self.board.arrive(store, STOP, self._ranks, step))
        self.raised_at: tuple[bool, str] | None = None  # from an exception on, the main thread is in this package
        self.training_step = 0  # the newest that this rank began; all ranks take the same ones
        # What this rank would report of itself, once its collective has failed; and what it has seen of all since.
        self._own: RankFailure | None = None
        self._seen: dict[int, Sighting] = {}
        self._reading_since_s = self._standing_since_s = 0.0
        self._position: tuple[bool, str] = (False, "")
        _runs[world] = _runs.get(world, 0) + 1
        prefix, keys = f"lightning_automodel/run/{_runs[world]}", (STOP, STEPS, LEASE, DEVICES)
        longest_s = max(self.timeout_s / 2, self.timeout_s - TIME_TO_LEAVE_S)
        silence_s = min(longest_s, (heartbeat_timeout or timeout).total_seconds())
        self.devices = DeviceWatch(self.timeout_s, self._ranks)
        connect = connect_again(prefix, silence_s)
        self.board = Board(self._rank, connect, RUN, self._ranks, silence_s, self._describe, keys, self._exchange)
        self._thread = threading.Thread(target=self._watch, name="lightning_automodel watchdog", daemon=True)

    def start(self) -> None:
        """Start the threads, and wait for the store's first answer; RankFailedError if there is none, or a failure."""
        self.board.thread.start()
        self._thread.start()
        # The second thread's time limit also ends this wait.
        while not self.board.is_open.wait(self.board.interval_s) and self.failure is None:
            pass
        if self.failure is not None:
            raise RankFailedError(self.failure)

    def close(self) -> None:
        """Mark this rank as finished, and end the threads. Not a collective; may be called twice."""
        if not self._is_closed.is_set() and self.failure is None:
            with contextlib.suppress(RankFailedError):
                self.board.call(self.stop.leave, LINGER_S)
        self._is_closed.set()
        self.board.close()
        self._thread.join(1 + 2 * self.board.interval_s)

    @property
    def _longest_search_s(self) -> float:
        return LONGEST_SEARCH_BEATS * max(self.board.interval_s, BEAT_S)

    @property
    def failure(self) -> RankFailure | None:
        """Another rank's failure, once this rank knows of it."""
        return self._failure or self.board.verdicts[RUN]

    def wait_for_all(self) -> int | None:
        """Wait until every rank has left its last hook, or one has failed. A collective, only through the store.

        Returns a rank that received SIGTERM, the same on all ranks, if any.
        """
        board, self._has_ended = self.board, True

        def explain(waited_s: float) -> None:
            message = f"the others have not ended their run for {waited_s:.1f} s"
            own = RankFailure(self._rank, board.host, "its last hook", "TimeoutError", message)
            raise RankFailedError(self._await_verdict(own))

        try:
            asked_by = str(self._rank) if self.stop.is_asked_here else ""
            board.call(lambda store: board.arrive(store, END, self._ranks, asked_by))
            told = json.loads(board.wait_for(f"{END}/result", RUN, self.timeout_s, explain))
        except RankFailedError as error:
            self._failure = self.failure or self._post(error.failure)
            return None
        self._is_closed.set()
        board.conclude(END, len(self._ranks))
        return next((int(rank) for rank in told if rank), None)

    def come_together(self, patience_s: float) -> bool:
        """Wait after a failure until every rank calls this, and return whether all do, the same on those that do.

        Only through the store: in a collective, a rank would wait for those that stand in another one.
        """
        board, key = self.board, f"{AFTER_FAILURE}/decision"

        def decide(store: dist.Store, word: str) -> str:
            board.read(store, [key])
            return store.compare_set(key, NONE.decode(), word).decode()

        def arrive(store: dist.Store) -> None:
            if store.add(f"{AFTER_FAILURE}/arrived", 1) == len(self._ranks):
                decide(store, TOGETHER)

        give_up_at = time.monotonic() + patience_s
        try:
            board.call(arrive)
            while time.monotonic() < give_up_at:
                (decision,) = board.call(lambda store: board.read(store, [key]))
                if decision != NONE:
                    return decision.decode() == TOGETHER
                time.sleep(POLL_S)
            return board.call(lambda store: decide(store, ALONE)) == TOGETHER
        except RankFailedError:
            return False

    def explain(self, exception: BaseException, hook: str | None) -> RankFailure | None:
        """The other rank's failure that caused ``exception``; else post it as this rank's own, raised in ``hook``."""
        try:
            if isinstance(exception, RankFailedError):
                return exception.failure
            if not self.board.is_open.is_set() or self._is_closed.is_set():
                return self.failure
            own = RankFailure.from_exception(exception, self._rank, hook or self._where())
            self._has_posted_own = True
            if not failures.is_communication_error(exception):
                self._post(own)
                return None
            culprit = self.failure or self._await_verdict(own)
            if culprit.rank != self._rank:
                return culprit
            if note := culprit.message.removeprefix(own.message).strip():
                exception.add_note(note)
            return None
        finally:
            self.is_noticed.set()

    def _post(self, failure: RankFailure) -> RankFailure:
        try:
            return self.board.call(lambda store: self.board.post(store, RUN, failure))
        except RankFailedError as error:
            return self.failure or error.failure

    def _await_verdict(self, own: RankFailure) -> RankFailure:
        """The verdict, which another rank may have to find; ``own`` if there is none in time."""
        self._own, give_up_at = own, time.monotonic() + 3 * self._longest_search_s
        with contextlib.suppress(RankFailedError):
            self.board.call(self.board.beat)
        while time.monotonic() < give_up_at and self.failure is None and self.board.lost is None:
            time.sleep(POLL_S)
        return self.failure or self.board.lost or self._post(own)

    # --- The board's thread -------------------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        position, now = self.raised_at or main_thread_position(), self.board.clock()
        if position != self._position:
            self._position, self._standing_since_s = position, now
        try:
            where = self._where()
        except Exception:
            # The function reads the Trainer while the main thread changes it.
            where = "an unknown hook"
        return {
            "where": self._own.where if self._own is not None else where,
            "step": self.training_step,
            "position": position[1],
            "waits": position[0],
            "stood_s": now - self._standing_since_s,
            "has_failed": self._own is not None,
            "has_ended": self._has_ended,
            **self.devices.describe(),
        }

    def _exchange(self, store: dist.Store, values: Sequence[bytes]) -> None:
        *stop, lease, devices_lease = values
        self.stop.exchange(store, *stop)
        if self._is_closed.is_set() or self.failure is not None:
            return
        for rank, how in self._find_ended():
            self.board.read_records(store, [rank], self.board.seen)
            record = self.board.seen[rank].known
            if not record.has_left:
                ended = RankFailure(rank, record.host, record.where, failures.PROCESS_ENDED, f"its process {how}")
                self.board.post(store, RUN, ended)
        own = self.board.own
        if failure := left_behind({self._rank: own} | {r: each.known for r, each in self.board.seen.items()}):
            self.board.post(store, RUN, failure)
        if self._own is None and self._is_past_timeout():
            self._own = RankFailure(self._rank, own.host, own.where, "TimeoutError", NEITHER_ENDS.format(own.stood_s))
        if self._own is not None and holds_lease(self.board, store, LEASE, lease, self._longest_search_s / 6):
            self._seek(store, self._own)
        self.devices.exchange(self.board, store, RUN, devices_lease)
        limit_s = min(STANDSTILL_S, self.timeout_s / 2)
        if self._rank == 0 and not self._has_warned and own.waits and own.stood_s >= limit_s:
            seen: dict[int, Sighting] = {}
            self.board.read_records(store, self._ranks, seen)
            if positions := standstill({rank: each.known for rank, each in seen.items()}, limit_s):
                self._has_warned = True
                log.warning(
                    f"All ranks have waited for {limit_s:g} s, in different places:\n{positions} The wait ends after"
                    f" the strategy's timeout, here {self.timeout_s:g} s."
                )

    def _is_past_timeout(self) -> bool:
        """Whether the main thread is in a collective that should have failed: to connect, NCCL waits for ever."""
        own = self.board.own
        is_late = own.waits and own.stood_s > self.timeout_s + TIME_TO_FAIL_S
        may_wait = self._has_ended or self.is_noticed.is_set() or first_rank.is_active()
        return is_late and not may_wait and device_groups.exist()

    def _seek(self, store: dist.Store, own: RankFailure) -> None:
        """Read all records, and post the verdict if it can be told."""
        if not self._seen:
            self._reading_since_s = self.board.clock()
        self.board.read_records(store, self._ranks, self._seen)
        now = self.board.clock()
        if verdict := decide(self._seen, own, now - self._reading_since_s, now, self._longest_search_s):
            self.board.post(store, RUN, verdict)
            self.board.read(store)

    def _watch(self) -> None:
        """Make this rank leave once there is a failure, or no answer from the store."""
        board, beats, answered_at = self.board, 0, time.monotonic()
        while not self._is_closed.wait(min(board.interval_s, 1.0)) and self.failure is None:
            if board.beats != beats:
                beats, answered_at = board.beats, time.monotonic()
            host_is_done = 0 in board.seen and board.seen[0].known.has_left
            if board.lost is not None and not host_is_done:
                self._failure = board.lost
            elif time.monotonic() - answered_at > (board.timeout_s if beats else self.timeout_s):  # connecting is slow
                self._failure = board.lost_store("does not answer")
        self.stop.release()
        failure = self.failure
        if failure is None or self._is_closed.is_set() or (failure.rank == self._rank and self._has_posted_own):
            return
        self._leave(failure)

    def _leave(self, failure: RankFailure) -> None:
        """Make the main thread leave: gently, then by a signal, then by ending the process."""
        if device_groups.exist():
            self._free_from_device()
        else:
            # A rank that raised closes its connections as its process ends, which frees this one; a silent rank
            # does not.
            is_silent = failure.error == failures.MISSED_HEARTBEATS
            patience_s = TIME_TO_RAISE_AFTER_SILENCE_S if is_silent else TIME_TO_RAISE_S
            if self.saves_on_exception:
                patience_s = TIME_TO_RAISE_AND_SAVE_S
            if self._is_leaving_within(patience_s):
                return
            self._interrupt()
            if self._is_leaving_within(patience_s):
                return
        if not self._is_leaving_within(0.0):
            end_process(self._rank, str(failure))

    def _free_from_device(self) -> None:
        """Interrupt the main thread, which no end of another rank frees where it waits for its own device."""
        # The signal first: it is handled as soon as the call that the abort ends has returned.
        self._interrupt()
        threading.Thread(target=device_groups.abort, name="lightning_automodel abort", daemon=True).start()
        self._is_leaving_within(TIME_TO_FREE_DEVICE_S)

    def _interrupt(self) -> None:
        if self._raises_on_sigterm and hasattr(signal, "pthread_kill"):
            # Sent to the main thread itself, the signal also interrupts a system call in which it sleeps.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _is_leaving_within(self, seconds: float) -> bool:
        return self.is_noticed.wait(seconds) or self._is_closed.is_set()
