"""Learns from the board that another rank failed, is silent or is stuck, and makes this rank leave.

What the main thread does meanwhile are the phases of `failure.main_thread`.
"""

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import device_groups, failures, first_rank
from lightning_automodel.distributed.board import BEAT_S, LINGER_S, NONE, Board
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, Sighting
from lightning_automodel.distributed.store import connect_again
from lightning_automodel.failure.coordinated_stop import STEPS, STOP, StopAgreement
from lightning_automodel.failure.device_progress import DeviceProgress
from lightning_automodel.failure.device_watch import DEVICES, DeviceWatch
from lightning_automodel.failure.lease import holds_lease
from lightning_automodel.failure.main_thread import MainThread, Phase
from lightning_automodel.failure.position import main_thread_position
from lightning_automodel.failure.verdict import decide, known_records, left_behind, standstill

log = logging.getLogger(__name__)

TIME_TO_LEAVE_S = 5.0
STANDSTILL_S = 60.0
POLL_S = 0.05
LONGEST_SEARCH_BEATS = 120
TIME_TO_FAIL_S = 2.0
NEITHER_ENDS = "a collective neither ends nor fails after {:.0f} s"

RUN = "run"
END = "end"
TRAINED = "trained"
LEASE = "lease"
AFTER_FAILURE = "after_failure"
TOGETHER = "together"
ALONE = "alone"

_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Watchdog:
    """Posts this rank's failure for the others, and leaves with the cause when another rank fails.

    A rank whose collective fails says so in its record, and waits for the verdict. The first of these ranks
    takes the lease, reads all records with each heartbeat, and posts the verdict as soon as it can be told.
    If it falls silent, another one takes the lease.

    After another rank's failure, a second thread gives the main thread time to raise, since the collective
    in which it waits may fail. Then it interrupts the main thread, and at last it ends the process.

    ``where`` returns the hook that this rank is in, and ``find_ended`` the ranks whose processes have ended
    since the last call, and how. ``raises_on_sigterm``: whether the main thread has a handler that raises.
    ``timeout`` is how long a collective may wait, ``heartbeat_timeout`` how long a rank may be silent, if
    that is less; also before its first heartbeat if all ranks ``have_just_joined``.
    """

    def __init__(
        self,
        timeout: timedelta,
        where: Callable[[], str],
        raises_on_sigterm: bool,
        find_ended: Callable[[], list[tuple[int, str]]] = list,
        heartbeat_timeout: timedelta | None = None,
        have_just_joined: bool = False,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.timeout_s = timeout.total_seconds()
        self._where = where
        self._find_ended = find_ended
        self._have_just_joined = have_just_joined
        self._rank = dist.get_rank()
        self._ranks = range(dist.get_world_size())
        self._main_thread = MainThread(self._rank, raises_on_sigterm)
        self._failure: RankFailure | None = None
        self._has_warned = False
        # What this rank's record says of it.
        self._training_step = 0
        self._raised_at: tuple[bool, str] | None = None
        self._position: tuple[bool, str] = (False, "")
        self._standing_since_s = 0.0
        self._has_ended = False
        self._num_trainings = 0
        # What this rank would report of itself once its collective has failed, and what it has seen since.
        self._own: RankFailure | None = None
        self._seen: dict[int, Sighting] = {}
        self._reading_since_s = 0.0
        self.stop = StopAgreement(self._rank, self._promise)
        self._progress = DeviceProgress(self.timeout_s)
        self._devices = DeviceWatch(self.timeout_s, self._ranks)
        _runs[world] = _runs.get(world, 0) + 1
        longest_s = max(self.timeout_s / 2, self.timeout_s - TIME_TO_LEAVE_S)
        silence_s = min(longest_s, (heartbeat_timeout or timeout).total_seconds())
        connect = connect_again(f"lightning_automodel/run/{_runs[world]}", silence_s)
        self.board = Board(self._rank, connect, RUN, self._ranks, silence_s, self._describe)
        self.board.exchange_with((STOP, STEPS, LEASE, DEVICES), self._exchange)
        self._thread = threading.Thread(target=self._watch, name="lightning_automodel watchdog", daemon=True)

    # --- From the start of the run to its end --------------------------------------------------------

    def start(self) -> None:
        """Start the threads, and wait for the store's first answer.

        RankFailedError if there is none, or another rank has failed.
        """
        self.board.start(expects_all=self._have_just_joined)
        self._thread.start()
        # The second thread's time limit also ends this wait.
        while not self.board.wait_for_answer(self.board.interval_s) and self.failure is None:
            pass
        self.raise_failure()

    def begin_step(self, step: int, is_training: bool) -> bool:
        """Begin a step that every rank takes, numbered from 1; return whether all ranks stop after it.

        RankFailedError if a rank has failed.
        """
        if is_training:
            self._training_step = step
        self._progress.begin_step(step)
        is_last = self.stop.begin_step(step, self.timeout_s)
        self.raise_failure()
        return is_last

    def _promise(self, store: dist.Store, step: str) -> None:
        self.board.arrive(store, STOP, self._ranks, step)

    def save_on_exception(self) -> None:
        """Give this rank time to raise when another one fails: it then saves a checkpoint alone."""
        self._main_thread.save_on_exception()

    def close(self) -> None:
        """Mark this rank as finished, and end the threads. Not a collective; may be called twice."""
        if not self._main_thread.is_closed and self.failure is None:
            with contextlib.suppress(RankFailedError):
                self.board.call(self.stop.leave, LINGER_S)
        self._main_thread.become(Phase.CLOSED)
        self.board.close()
        self._thread.join(1 + 2 * self.board.interval_s)

    @property
    def _longest_search_s(self) -> float:
        return LONGEST_SEARCH_BEATS * max(self.board.interval_s, BEAT_S)

    @property
    def failure(self) -> RankFailure | None:
        """Another rank's failure, once this rank knows of it."""
        return self._failure or self.board.verdicts[RUN]

    def raise_failure(self) -> None:
        """Raise RankFailedError if this rank knows of another one's failure."""
        failure = self.failure
        if failure is not None:
            raise RankFailedError(failure)

    def await_end_of_training(self) -> None:
        """Wait until no rank trains any more. A collective, only through the store.

        RankFailedError if a rank has failed, or takes further training steps.
        """
        self._num_trainings += 1
        self._meet(f"{TRAINED}/{self._num_trainings}", "")
        self._has_ended = False

    def wait_for_all(self) -> int | None:
        """Wait until every rank has left its last hook. A collective, only through the store.

        Returns a rank that received SIGTERM, the same on all ranks, if any. RankFailedError if a rank has
        failed.
        """
        asked_by = ""
        if self.stop.is_asked_here:
            asked_by = str(self._rank)
        answers = self._meet(END, asked_by)
        self._main_thread.become(Phase.CLOSED)
        self.board.conclude(END, len(self._ranks))
        return next((int(rank) for rank in answers if rank), None)

    def _meet(self, at: str, value: str) -> list[str]:
        """Wait, with no training step to come, until every rank posts a value; returns the values."""
        board = self.board
        self._has_ended = True

        def explain(waited_s: float) -> None:
            message = f"the others have not ended their run for {waited_s:.1f} s"
            own = RankFailure(self._rank, board.host, "its last hook", "TimeoutError", message)
            raise RankFailedError(self.await_verdict(own))

        try:
            board.call(lambda store: board.arrive(store, at, self._ranks, value))
            answers: list[str] = json.loads(board.wait_for(f"{at}/result", RUN, self.timeout_s, explain))
        except RankFailedError as error:
            self._failure = self.failure or self.post(error.failure)
            raise RankFailedError(self._failure) from None
        return answers

    # --- After an exception on this rank ----------------------------------------------------------

    def stand_at(self, position: tuple[bool, str]) -> None:
        """From now on, give ``position`` as the user's line.

        After an exception, the main thread is in this package.
        """
        self._raised_at = position

    def can_post(self) -> bool:
        """Whether the other ranks can still be told, and asked: the store answers, and the watch is not over."""
        return self.board.wait_for_answer(0.0) and not self._main_thread.is_closed

    def raise_own(self, exception: BaseException, hook: str | None) -> RankFailure:
        """Note that this rank has raised ``exception`` in ``hook``, and return it as this rank's own failure."""
        own = RankFailure.from_exception(exception, self._rank, hook or self._where())
        self._main_thread.become(Phase.RAISED)
        return own

    def let_leave(self) -> None:
        """Let the main thread leave without an interruption: the cause is known, or all ranks stop together."""
        has_raised = self._main_thread.phase is Phase.RAISED
        self._main_thread.become(Phase.EXPLAINED if has_raised else Phase.LEAVING)

    def come_together(self, patience_s: float) -> bool:
        """Wait after a failure until every rank calls this, and return whether all do, the same on each caller.

        Only through the store: in a collective, a rank would wait for those that stand in another one.
        """
        board = self.board
        key = f"{AFTER_FAILURE}/decision"

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

    def conclude(self, limit_s: float) -> None:
        """Note that this rank knows of the failure. Rank 0 waits until all ranks do, for ``limit_s`` at most."""
        self.board.conclude(RUN, len(self._ranks), limit_s)

    def post(self, failure: RankFailure) -> RankFailure:
        """Post a failure for all ranks. Returns the first that was posted, which is the verdict."""
        try:
            return self.board.call(lambda store: self.board.post(store, RUN, failure))
        except RankFailedError as error:
            return self.failure or error.failure

    def await_verdict(self, own: RankFailure) -> RankFailure:
        """The verdict, which another rank may have to find; ``own`` if there is none in time."""
        self._own = own
        give_up_at = time.monotonic() + 3 * self._longest_search_s
        with contextlib.suppress(RankFailedError):
            self.board.call(self.board.beat)
        while time.monotonic() < give_up_at and self.failure is None and self.board.lost is None:
            time.sleep(POLL_S)
        return self.failure or self.board.lost or self.post(own)

    # --- The board's thread -----------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        position = self._raised_at or main_thread_position()
        now = self.board.clock()
        if position != self._position:
            self._position = position
            self._standing_since_s = now
        waits, line = position
        return {
            "where": self._describe_where(),
            "step": self._training_step,
            "position": line,
            "waits": waits,
            "stood_s": now - self._standing_since_s,
            "has_failed": self._own is not None,
            "has_ended": self._has_ended,
            **self._progress.describe(),
        }

    def _describe_where(self) -> str:
        if self._own is not None:
            return self._own.where
        try:
            return self._where()
        except Exception:
            # The function reads the Trainer while the main thread changes it.
            return "an unknown hook"

    def _exchange(self, store: dist.Store, values: Sequence[bytes]) -> None:
        *stop, lease, devices_lease = values
        self.stop.exchange(store, *stop)
        if self._main_thread.is_closed or self.failure is not None:
            return
        self._post_ended_ranks(store)
        own = self.board.own
        if self._own is None and self._is_past_timeout():
            message = NEITHER_ENDS.format(own.stood_s)
            self._own = RankFailure(self._rank, own.host, own.where, "TimeoutError", message)
        if self._own is not None and holds_lease(
            self.board, store, LEASE, lease, self._longest_search_s / 6
        ):
            self._seek(store, self._own)
        self._devices.exchange(self.board, store, RUN, devices_lease)
        self._warn_of_standstill(store)

    def _post_ended_ranks(self, store: dist.Store) -> None:
        """Post ranks whose processes have ended, and one that ended its run before the others."""
        board = self.board
        for rank, how in self._find_ended():
            board.read_records(store, [rank], board.seen)
            record = board.known(rank)
            if not record.has_left:
                message = f"its process {how}"
                ended = RankFailure(rank, record.host, record.where, failures.PROCESS_ENDED, message)
                board.post(store, RUN, ended)
        failure = left_behind({self._rank: board.own} | known_records(board.seen))
        if failure is not None:
            board.post(store, RUN, failure)

    def _is_past_timeout(self) -> bool:
        """Whether the main thread is in a collective that should have failed: NCCL waits for ever to connect."""
        own = self.board.own
        is_late = own.waits and own.stood_s > self.timeout_s + TIME_TO_FAIL_S
        may_wait = self._has_ended or self._main_thread.is_leaving or first_rank.is_active()
        return is_late and not may_wait and device_groups.exist()

    def _seek(self, store: dist.Store, own: RankFailure) -> None:
        """Read all records, and post the verdict if it can be told."""
        if not self._seen:
            self._reading_since_s = self.board.clock()
        self.board.read_records(store, self._ranks, self._seen)
        now = self.board.clock()
        verdict = decide(self._seen, own, now - self._reading_since_s, now, self._longest_search_s)
        if verdict is not None:
            self.board.post(store, RUN, verdict)
            self.board.read(store)

    def _warn_of_standstill(self, store: dist.Store) -> None:
        """On rank 0, warn once if all ranks wait in different places."""
        own = self.board.own
        limit_s = min(STANDSTILL_S, self.timeout_s / 2)
        if self._rank != 0 or self._has_warned or not own.waits or own.stood_s < limit_s:
            return
        seen: dict[int, Sighting] = {}
        self.board.read_records(store, self._ranks, seen)
        positions = standstill(known_records(seen), limit_s)
        if positions is not None:
            self._has_warned = True
            log.warning(
                f"All ranks have waited for {limit_s:g} s, in different places:\n{positions} The wait ends"
                f" after the strategy's timeout, here {self.timeout_s:g} s."
            )

    # --- The second thread ------------------------------------------------------------------------

    def _watch(self) -> None:
        """Make this rank leave once there is a failure, or no answer from the store."""
        board = self.board
        beats = 0
        answered_at = time.monotonic()
        while (
            not self._main_thread.comes_to(min(board.interval_s, 1.0), Phase.CLOSED) and self.failure is None
        ):
            if board.beats != beats:
                beats = board.beats
                answered_at = time.monotonic()
            limit_s = board.timeout_s
            if beats == 0:  # connecting is slow
                limit_s = self.timeout_s
            if board.lost is not None and not board.known(0).has_left:
                self._failure = board.lost
            elif time.monotonic() - answered_at > limit_s:
                self._failure = board.lost_store("does not answer")
        self.stop.release()
        failure = self.failure
        if failure is None or self._main_thread.is_closed:
            return
        if failure.rank != self._rank or not self._main_thread.has_posted_failure:
            self._main_thread.make_leave(failure)
