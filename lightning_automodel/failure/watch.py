"""The watch over one run: this rank's heart, what it says of the run, and the one way out when a rank fails.

When a rank learns of a failure, its main thread is interrupted, the groups of its accelerator are aborted, and
its process ends if the main thread has not left some seconds later. With gloo alone it first has time to raise.

What a watch holds of its rank, besides its heart:

    record                what the others read; the main thread writes how far it is
    own                   what this rank has raised: its main thread is in this package then
    stop                  the agreement on a last step
    made_progress         set by the main thread, so that no standstill is logged; each beat unsets it
    interrupts            the main thread has a handler of SIGTERM, which raises a failure that is known
    find_ended            ranks whose processes this one has started, and which have ended since the last call, and how
    leaves_by_itself      the main thread is not to be interrupted any more
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.failures import RankFailure
from lightning_automodel.distributed.heart import MISSED_BEATS, Heart
from lightning_automodel.distributed.last_resort import end_process
from lightning_automodel.distributed.meeting import first, records_of
from lightning_automodel.distributed.store import STORE_ERRORS
from lightning_automodel.failure import report
from lightning_automodel.failure.coordinated_stop import STEPS, STOP, StopAgreement
from lightning_automodel.failure.position import main_thread_position
from lightning_automodel.internals import process_groups

log = logging.getLogger(__name__)

SILENT_S = 3.0
STANDSTILL_S = 60.0
TIME_TO_RAISE_S = 2.0
TIME_TO_LEAVE_AFTER_SILENCE_S = 0.5
TIME_TO_LEAVE_S = 5.0
TIME_TO_FAIL_S = 2.0


class Watch(Heart):
    """Watches the other ranks from their joining to the end of the run.

    Args:
        rank: This rank.
        num_ranks: Ranks in the run.
        store: With a prefix that this run has alone.
        timeout: How long a collective may wait, and this rank for the others at the end.
        heartbeat_timeout: How long a rank may be silent, if that is less.
        where: Returns the hook that this rank is in.
        have_just_joined: Whether a rank of which nothing was ever heard counts as silent.
    """

    keys = STOP, STEPS

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: dist.Store,
        timeout: timedelta,
        heartbeat_timeout: timedelta,
        where: Callable[[], str],
        have_just_joined: bool = False,
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        longest_s = max(self._timeout_s / 2, self._timeout_s - TIME_TO_LEAVE_S)
        silence_s = min(longest_s, heartbeat_timeout.total_seconds())
        super().__init__(rank, range(num_ranks), store, silence_s, have_just_joined)
        self.stop = StopAgreement(rank, self.ranks)
        self.own: RankFailure | None = None
        self.leaves_by_itself = threading.Event()
        self._leaving = threading.Lock()
        self.where = where
        self.interrupts = False
        self.find_ended: Callable[[], dict[int, str]] = dict  # {}: none has ended
        self.made_progress = True
        self._stands_since_s = 0.0
        self._at_line_since_s = 0.0
        self._has_warned = rank != 0

    # --- The main thread ----------------------------------------------------------------------------

    def begin_step(self, training_step: int | None) -> bool:
        """Begin a step that every rank takes; return whether all ranks stop after it.

        In training it has a number, from 1. Steps of evaluation are counted here.

        RankFailedError if a rank has failed.
        """
        if training_step is not None:
            self.record.step = training_step
        step = training_step or self.stop.step + 1
        self.made_progress = True
        is_last = self.stop.begin_step(step, self._timeout_s)
        self.raise_failure()
        if step == self.stop.last_step:  # in training, the window's other micro-batches follow
            what = "was told to save and requeue" if self.stop.requeues else "received SIGTERM"
            log.warning("Rank %s %s: all ranks stop after this step.", self.stop.asked_by, what)
        return is_last

    def await_end_of_training(self, validates: bool) -> None:
        """Wait until no rank trains any more: for good, or until all have run a validation. A meeting of all ranks.

        RankFailedError if a rank has failed, does not come, or takes further training steps.
        """
        at = "on_validation_start" if validates else "the end of training"
        self.record.has_ended = not validates
        self.record.pauses = validates
        self.meet(f"{at} {self.record.training}", self.ranks, False, self._timeout_s)
        # The number comes last: a record must never say that the next training has ended.
        self.record.has_ended = False
        self.record.pauses = False
        self.record.training += 1

    def end(self) -> list[bool]:
        """Wait until every rank has left its last hook, and return which were asked to stop. A meeting of all ranks.

        RankFailedError if a rank has failed, or does not come.
        """
        self.record.has_ended = True
        asked = self.meet("the end of the run", self.ranks, self.stop.is_asked_here, self._timeout_s)
        self.leave()
        return asked

    def note_raised(self, exception: BaseException) -> None:
        """Let the record tell from now on what the main thread has raised, and where."""
        self.own = RankFailure.from_exception(exception, self.rank, self.where())
        self.record.where = self.own.where
        self.record.waits, self.record.position = main_thread_position(exception)

    def why(self, own: RankFailure) -> RankFailure:
        """Why a collective of this rank has failed: what another rank has posted, or what the records tell.

        The first rank that asks reads all records, twice, and posts what they tell.
        """
        patience_s = SILENT_S + MISSED_BEATS * self.interval_s
        try:
            if first(self.store, "reader", self.rank) != self.rank:
                self.is_over.wait(3 * patience_s)
            else:
                before = records_of(self.store, self.ranks)
                if not self.is_over.wait(patience_s):
                    self.post(report.explain(before, records_of(self.store, self.ranks), own))
        except STORE_ERRORS:
            self.is_over.wait(patience_s)
        return self.failure or own

    def leave(self) -> None:
        """From now on the main thread leaves by itself, and is not interrupted."""
        with self._leaving:
            self.leaves_by_itself.set()
        self.retire()

    def close(self) -> None:
        """End the watch. Not a collective; may be called twice."""
        self.leave()
        self.stop.release()
        super().close()

    # --- The heart's thread -------------------------------------------------------------------------

    def describe(self) -> None:
        """Say where the main thread is, and since when."""
        own = self.record
        waits, position = main_thread_position()
        where = own.where
        with contextlib.suppress(Exception):  # the main thread changes the Trainer meanwhile
            where = self.where()
        if self.own is not None:
            return
        now = self.clock()
        if self.made_progress or where != own.where:
            self.made_progress = False
            self._stands_since_s = now
        if (waits, position) != (own.waits, own.position):
            self._at_line_since_s = now
        own.where = where
        own.position = position
        own.waits = waits
        own.stood_s = now - self._stands_since_s

    def exchange(self, values: Sequence[bytes]) -> None:
        """Agree on a last step, tell how processes ended, warn of a standstill, and end what never ends."""
        self.stop.exchange(self.store, *values)
        for rank, how in self.find_ended().items():
            record = records_of(self.store, [rank])[rank]
            if not record.has_left:
                ended = f"its process {how}"
                self.post(RankFailure(rank, record.host, record.where, failures.PROCESS_ENDED, ended))
        self._warn_of_standstill()
        self._end_what_never_ends()

    def _warn_of_standstill(self) -> None:
        """On rank 0, log once where all ranks are, if none has made progress for a minute, or half of the timeout."""
        limit_s = min(STANDSTILL_S, self._timeout_s / 2)
        if self._has_warned or self.record.stood_s < limit_s or self.is_in_block:
            return
        records = records_of(self.store, self.ranks)
        if all(record.stood_s >= limit_s for record in records.values()):
            self._has_warned = True
            log.warning(
                f"No rank has got on for {limit_s:g} s:\n{report.table(records)} A collective ends after the"
                f" strategy's timeout, here {self._timeout_s:g} s."
            )

    def _end_what_never_ends(self) -> None:
        """Post the table if the main thread is in a collective that should have failed: NCCL may connect for ever."""
        own = self.record
        waited_s = self.clock() - self._at_line_since_s
        may_wait = own.has_ended or self.leaves_by_itself.is_set() or self.is_in_block
        if not own.waits or may_wait or waited_s < self._timeout_s + TIME_TO_FAIL_S:
            return
        if process_groups.accelerator_backends():
            table = report.table(records_of(self.store, self.ranks))
            message = f"a collective neither ends nor fails after {waited_s:.0f} s\nThey are at:\n{table}"
            self.post(RankFailure(self.rank, own.host, own.where, failures.WAITED, message))

    # --- The way out, on the thread of the heart's switch -------------------------------------------

    def make_leave(self, failure: RankFailure) -> None:
        """Make the main thread leave because of ``failure``: interrupt it, free it from its device, end the process."""
        self.stop.release()
        has_devices = bool(process_groups.accelerator_backends())
        patience_s = TIME_TO_LEAVE_S
        if failure.error == failures.MISSED_HEARTBEATS and not has_devices:
            patience_s = TIME_TO_LEAVE_AFTER_SILENCE_S
        if not has_devices:
            # A rank that has raised closes its connections, which frees this one; it may also raise alike.
            # One that is stopped does not.
            self.leaves_by_itself.wait(min(TIME_TO_RAISE_S, patience_s))
        with self._leaving:  # no signal once it leaves by itself: its handler may be gone
            if self.leaves_by_itself.is_set():
                return
            if self.interrupts:
                # Sent to the main thread itself, the signal also interrupts a system call in which it sleeps.
                # The abort comes after it: the signal is handled as soon as the call that it ends has returned.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if has_devices:
            threading.Thread(
                target=process_groups.abort_accelerators, name="lightning_automodel abort", daemon=True
            ).start()
        if not self.leaves_by_itself.wait(patience_s):
            why = str(failure)
            if self.own is not None and self.own != failure:
                why += f"; this rank itself: {self.own}"
            end_process(self.rank, why)
