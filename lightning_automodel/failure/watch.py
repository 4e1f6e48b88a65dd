"""The watch over one run: this rank's heart, what it says of the run, and the one way out when a rank fails.

When a rank learns of a failure, its main thread is interrupted, the groups of its accelerator are aborted, and
its process ends if the main thread has not left some seconds later. With gloo alone it first has time to raise.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import device_groups, failures, first_rank
from lightning_automodel.distributed.failures import RankFailedError, RankFailure
from lightning_automodel.distributed.heart import MISSED_BEATS, Heart
from lightning_automodel.distributed.last_resort import end_process
from lightning_automodel.distributed.meeting import first, linger, meet, records_of
from lightning_automodel.failure import report
from lightning_automodel.failure.coordinated_stop import STEPS, STOP, StopAgreement
from lightning_automodel.failure.position import main_thread_position

log = logging.getLogger(__name__)

SILENT_S = 3.0
STANDSTILL_S = 60.0
TIME_TO_RAISE_S = 2.0
TIME_TO_RAISE_AFTER_SILENCE_S = 0.5
TIME_TO_RAISE_AND_SAVE_S = 30.0
TIME_TO_LEAVE_S = 5.0
TIME_TO_FAIL_S = 2.0
LINGER_S = 5.0
END = "the end of the run"
TOGETHER = "together"
ALONE = "alone"


class Watch:
    """Watches the other ranks from their joining to the end of the run.

    Args:
        rank: This rank.
        num_ranks: Ranks in the run.
        store: With a prefix that this run has alone.
        timeout: How long a collective may wait, and this rank for the others at the end.
        heartbeat_timeout: How long a rank may be silent, if that is less.
        where: Returns the hook that this rank is in.
        find_ended: Returns the ranks whose processes have ended since the last call, and how.
        interrupts: Whether the main thread has a handler of SIGTERM that raises a failure that is known.
        have_just_joined: Whether a rank of which nothing was ever heard counts as silent.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: dist.Store,
        timeout: timedelta,
        heartbeat_timeout: timedelta,
        where: Callable[[], str],
        find_ended: Callable[[], list[tuple[int, str]]] = list,
        interrupts: bool = False,
        have_just_joined: bool = False,
    ) -> None:
        self.rank = rank
        self.ranks = range(num_ranks)
        self.stop = StopAgreement(rank, self.ranks)
        self.own: RankFailure | None = None  # what this rank has raised
        # After an exception the main thread is in this package.
        self.raised_at: tuple[bool, str] | None = None
        self._timeout_s = timeout.total_seconds()
        self._where = where
        self._find_ended = find_ended
        self._interrupts = interrupts
        self._saves_on_exception = False
        self._step = 0
        self._num_steps = 0
        self._training = 1
        self._has_ended = False
        self._stands_at: tuple[str, int] = ("", 0)
        self._stands_since_s = 0.0
        self._at_line: tuple[bool, str] = (False, "")
        self._at_line_since_s = 0.0
        self._has_warned = rank != 0
        self._leaving = threading.Lock()
        self._has_left = threading.Event()
        longest_s = max(self._timeout_s / 2, self._timeout_s - TIME_TO_LEAVE_S)
        silence_s = min(longest_s, heartbeat_timeout.total_seconds())
        self.heart = Heart(
            rank, self.ranks, store, silence_s, self._describe, self._make_leave, have_just_joined
        )
        self.heart.exchange_with((STOP, STEPS), self._exchange)

    # --- The main thread ----------------------------------------------------------------------------

    @property
    def failure(self) -> RankFailure | None:
        """The first failure of the run that this rank knows of."""
        return self.heart.failure

    def begin_step(self, step: int, is_training: bool) -> bool:
        """Begin a step that every rank takes, numbered from 1; return whether all ranks stop after it.

        RankFailedError if a rank has failed.
        """
        if is_training:
            self._step = step
        self.note_progress()
        is_last = self.stop.begin_step(step, self._timeout_s)
        self.heart.raise_failure()
        return is_last

    def note_progress(self) -> None:
        """Note that this rank gets on, for the warning of a standstill."""
        self._num_steps += 1

    def save_on_exception(self) -> None:
        """Give this rank time to leave when another one fails: it then saves a checkpoint alone."""
        self._saves_on_exception = True

    def await_end_of_training(self) -> None:
        """Wait until no rank trains any more. A meeting of all ranks.

        RankFailedError if a rank has failed, does not come, or takes further training steps.
        """
        self._meet_at(f"the end of training {self._training}", None)
        self._has_ended = (
            False  # first: between the two lines a record must not say that the next one has ended
        )
        self._training += 1

    def end(self) -> list[bool]:
        """Wait until every rank has left its last hook, and return which were asked to stop. A meeting of all ranks.

        RankFailedError if a rank has failed, or does not come.
        """
        asked = self._meet_at(END, self.stop.is_asked_here)
        self.leave()
        linger(self.heart.store, "end", self.rank, len(self.ranks), LINGER_S)
        return asked

    def _meet_at(self, at: str, value: Any) -> list[Any]:
        self._has_ended = True
        heart = self.heart
        return meet(heart.store, at, self.rank, self.ranks, value, self._timeout_s, heart.raise_failure)

    def why(self, own: RankFailure) -> RankFailure:
        """Why a collective of this rank has failed: what another rank has posted, or what the records tell.

        The first rank that asks reads all records, twice. If it dies meanwhile, each reads them for itself.
        """
        heart = self.heart
        patience_s = SILENT_S + MISSED_BEATS * heart.interval_s
        try:
            is_reader = first(heart.store, "reader", str(self.rank)) == str(self.rank)
            if not is_reader and heart.has_news.wait(3 * patience_s):
                return heart.failure or own
            before = records_of(heart.store, self.ranks)
            if heart.has_news.wait(patience_s):
                return heart.failure or own
            return heart.tell(report.explain(before, records_of(heart.store, self.ranks), own))
        except (dist.DistError, OSError):
            heart.has_news.wait(patience_s)
            return heart.failure or own

    def come_together(self, limit_s: float) -> bool:
        """Whether every rank calls this after a failure, within the limit; the same on each that does.

        Only through the store: in a collective, a rank would wait for those that stand in another one.
        """
        if not self.heart.store_answers:
            return False
        store = dist.PrefixStore("after the failure", self.heart.store)
        word = TOGETHER
        try:
            try:
                meet(store, "saving", self.rank, self.ranks, None, limit_s)
            except RankFailedError:
                word = ALONE
            # Who comes just as another one gives up may have met all: the first word counts.
            return first(store, "decision", word) == TOGETHER
        except (dist.DistError, OSError):
            return False

    def leave(self) -> None:
        """From now on the main thread leaves by itself, and is not interrupted."""
        with self._leaving:
            self._has_left.set()
        self.heart.retire()

    def close(self) -> None:
        """End the watch. Not a collective; may be called twice."""
        self.leave()
        self.stop.release()
        self.heart.close()

    # --- The heart's thread -------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        waits, position = self.raised_at or main_thread_position()
        where = self.heart.record.where
        with contextlib.suppress(Exception):  # the main thread changes the Trainer meanwhile
            where = self._where()
        if self.own is not None:
            where = self.own.where
        now = self.heart.clock()
        if (where, self._num_steps) != self._stands_at:
            self._stands_at = where, self._num_steps
            self._stands_since_s = now
        if (waits, position) != self._at_line:
            self._at_line = waits, position
            self._at_line_since_s = now
        return {
            "where": where,
            "training": self._training,
            "step": self._step,
            "position": position,
            "waits": waits,
            "stood_s": now - self._stands_since_s,
            "has_ended": self._has_ended,
        }

    def _exchange(self, values: Sequence[bytes]) -> None:
        heart = self.heart
        self.stop.exchange(heart.store, *values)
        for rank, how in self._find_ended():
            record = records_of(heart.store, [rank])[rank]
            if not record.has_left:
                ended = f"its process {how}"
                heart.tell(RankFailure(rank, record.host, record.where, failures.PROCESS_ENDED, ended))
        self._warn_of_standstill()
        self._end_what_never_ends()

    def _warn_of_standstill(self) -> None:
        """On rank 0, log once where all ranks are, if none has got on for a minute, or half of the timeout."""
        limit_s = min(STANDSTILL_S, self._timeout_s / 2)
        if self._has_warned or self.heart.record.stood_s < limit_s or first_rank.is_active():
            return
        table = report.standstill(records_of(self.heart.store, self.ranks), limit_s)
        if table is not None:
            self._has_warned = True
            log.warning(
                f"No rank has got on for {limit_s:g} s:\n{table} A collective ends after the strategy's timeout,"
                f" here {self._timeout_s:g} s."
            )

    def _end_what_never_ends(self) -> None:
        """Post the table if the main thread is in a collective that should have failed: NCCL may connect for ever."""
        own = self.heart.record
        waited_s = self.heart.clock() - self._at_line_since_s
        may_wait = self._has_ended or self._has_left.is_set() or first_rank.is_active()
        if not own.waits or may_wait or waited_s < self._timeout_s + TIME_TO_FAIL_S:
            return
        if device_groups.exist():
            table = report.table(records_of(self.heart.store, self.ranks))
            message = f"a collective neither ends nor fails after {waited_s:.0f} s\nThey are at:\n{table}"
            self.heart.tell(RankFailure(self.rank, own.host, own.where, failures.WAITED, message))

    # --- The way out, on the thread of the heart's switch -------------------------------------------

    def _make_leave(self, failure: RankFailure) -> None:
        """Make the main thread leave because of ``failure``: interrupt it, free it from its device, end the process."""
        self.stop.release()
        patience_s = TIME_TO_LEAVE_S
        if not device_groups.exist():
            # A rank that has raised closes its connections, which frees this one; it may also raise alike.
            # One that is stopped does not.
            time_to_raise_s = TIME_TO_RAISE_S
            if self._saves_on_exception:
                time_to_raise_s = TIME_TO_RAISE_AND_SAVE_S
                patience_s = TIME_TO_RAISE_AND_SAVE_S
            elif failure.error == failures.MISSED_HEARTBEATS:
                time_to_raise_s = TIME_TO_RAISE_AFTER_SILENCE_S
                patience_s = TIME_TO_RAISE_AFTER_SILENCE_S
            self._has_left.wait(time_to_raise_s)
        with self._leaving:  # no signal once it leaves by itself: its handler may be gone
            if self._has_left.is_set():
                return
            if self._interrupts:
                # Sent to the main thread itself, the signal also interrupts a system call in which it sleeps.
                # The abort comes after it: the signal is handled as soon as the call that it ends has returned.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if device_groups.exist():
            threading.Thread(
                target=device_groups.abort, name="lightning_automodel abort", daemon=True
            ).start()
        if not self._has_left.wait(patience_s):
            why = str(failure)
            if self.own is not None and self.own != failure:
                why += f"; this rank itself: {self.own}"
            end_process(self.rank, why)
