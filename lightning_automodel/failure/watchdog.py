"""Learns through the store channel that another rank failed, is silent or is stuck, and makes this rank leave."""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel.distributed import connections
from lightning_automodel.distributed.failures import (
    LAUNCHER,
    MISSED_HEARTBEATS,
    PROCESS_ENDED,
    STUCK,
    RankFailedError,
    RankFailure,
    is_communication_error,
)
from lightning_automodel.distributed.store_channel import LINGER_S, NONE, RUN, AwakeClock, StoreChannel, post_failure
from lightning_automodel.failure.coordinated_stop import DECISION, REQUEST, StopAgreement
from lightning_automodel.failure.standstill import Standstill, list_positions, main_thread_position

TIME_TO_LEAVE_S = 5.0
SEARCH_S = 3.0
INTERRUPT_AFTER_S = 2.0
KILL_AFTER_S = 4.0

ENDED, QUESTION = "ended", "question"
END = "end"

_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Watchdog:
    """Posts this rank's failure for the others, and leaves with the cause when another rank fails.

    The channel's thread exchanges a few bytes with the store several times a second: this rank's heartbeat, those of
    two others, and whether any rank posted a failure. The training itself neither communicates nor waits for this.

    After another rank's failure a second thread aborts this rank's gloo connections, so that a waiting collective
    raises. If that does not help, it interrupts the main thread, and at last it ends the process.

    Args:
        timeout: Time within which this rank leaves when another misses its heartbeats, for at least half of it.
        where: Returns the hook that this rank is in; called by a thread.
        raises_on_sigterm: Whether the main thread has a SIGTERM handler that raises after a failure.

    Attributes:
        channel: The run's channel between ranks.
        stop: Decides after which step all ranks stop.
        training_step: Number of the newest training step that this rank began; all ranks take the same ones.
        failed_alike: Whether another rank had raised the same error before, in the same line.
        raised_at: Where this rank raised an exception: from then on, its main thread is in this package.
    """

    def __init__(self, timeout: timedelta, where: Callable[[], str], raises_on_sigterm: bool) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._timeout_s = timeout.total_seconds()
        self._where, self._raises_on_sigterm = where, raises_on_sigterm
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._failure: RankFailure | None = None
        self.raised_at: tuple[bool, str] | None = None
        self._has_posted_own = self._has_answered = self._has_keys = False
        self._is_noticed, self._is_closed = threading.Event(), threading.Event()
        self.stop = StopAgreement(self._rank, self._world_size)
        self.training_step = 0
        self.failed_alike = False
        _runs[world] = _runs.get(world, 0) + 1
        silence_s = max(self._timeout_s / 2, self._timeout_s - TIME_TO_LEAVE_S)
        self.channel = StoreChannel(f"lightning_automodel/run/{_runs[world]}", silence_s, where, self._exchange)
        self.channel.watched[RUN] = None
        self._standstill = Standstill(self._rank, self._world_size, self._timeout_s)
        self._thread = threading.Thread(target=self._watch, name="lightning_automodel watchdog", daemon=True)

    def start(self) -> None:
        """Start the threads, and wait for the store's first answer. Every rank must call it, equally often.

        Raises:
            RankFailedError: If the store does not answer, or another rank failed already.
        """
        self.channel.start()
        self._thread.start()
        # The second thread's time limit also ends this wait.
        while not self.channel.is_open.wait(self.channel.interval_s) and self.failure is None:
            pass
        if self.failure is not None:
            raise RankFailedError(self.failure)

    def close(self) -> None:
        """Mark this rank as finished, and end the threads. Not a collective; may be called twice."""
        if not self._is_closed.is_set() and self.failure is None:
            with contextlib.suppress(RankFailedError):
                self.channel.call(self.stop.leave, LINGER_S)
        self._is_closed.set()
        self.channel.close()
        self._thread.join(1 + 2 * self.channel.interval_s)

    @property
    def failure(self) -> RankFailure | None:
        """Another rank's failure, once this rank knows of it."""
        return self._failure or self.channel.watched[RUN]

    def report_end(self, rank: int, how: str) -> None:
        """Post that the process of ``rank``, or of ``LAUNCHER``, ended, unless it had finished or posted why."""

        def post(store: dist.Store) -> None:
            failure = RankFailure(LAUNCHER, self.channel.host, "", MISSED_HEARTBEATS, how)
            if rank != LAUNCHER:
                beat = self.channel.read_heartbeats(store, [rank])[rank]
                if beat.finished:
                    return
                failure = RankFailure(rank, beat.host, beat.where, PROCESS_ENDED, f"its process {how}")
            post_failure(store, RUN, failure)

        with contextlib.suppress(RankFailedError):
            self.channel.call(post)

    def wait_for_all(self) -> int | None:
        """Wait until every rank has left its last hook, or one has failed. A collective, only through the store.

        Returns a rank that received SIGTERM, the same on all ranks; None if no rank did, or one failed.
        """
        channel, last_step = self.channel, f"{self._rank}|{self.channel.host}|{self.training_step}"
        asked_by = str(self._rank) if self.stop.is_asked_here else ""
        try:
            channel.call(lambda store: store.compare_set(ENDED, NONE.decode(), last_step))
            told = channel.gather(END, range(self._world_size), asked_by, RUN, self._timeout_s)
        except RankFailedError as error:
            self._failure = self.failure or self._post(error.failure)
            return None
        # Rank 0 may host the store, so it stays some seconds until the others know that they may leave.
        self._is_closed.set()
        with contextlib.suppress(RankFailedError):
            channel.call(lambda store: store.add(f"{END}/known", 1), LINGER_S)
            if self._rank == 0:
                channel.wait_until_known(END, self._world_size)
        return next((int(rank) for rank in told if rank), None)

    def wait_until_failure_is_known(self, limit_s: float) -> None:
        """Acknowledge the failure in the store. Rank 0, which may host it, stays until all ranks have done so."""
        with contextlib.suppress(RankFailedError):
            self.channel.call(self.channel.read_failures, limit_s)
            if self._rank == 0:
                self.channel.wait_until_known(RUN, self._world_size, limit_s)

    def acknowledge(self) -> None:
        """Note that the main thread is leaving, so that nothing interrupts it."""
        self._is_noticed.set()

    # --- Leaving because of an exception ------------------------------------------------------------------------------

    def explain(self, exception: BaseException, hook: str | None) -> RankFailure | None:
        """Find the other rank's failure that caused ``exception``; without one, post it as this rank's own.

        Returns:
            The failure of another rank if it is the cause; None if the exception, raised in ``hook``, is this rank's.
        """
        try:
            if isinstance(exception, RankFailedError):
                return exception.failure
            if not self.channel.is_open.is_set() or self._is_closed.is_set():
                return self.failure
            own = RankFailure.from_exception(exception, self._rank, hook or self._where())
            self._has_posted_own = True
            if not is_communication_error(exception):
                first = self._post(own)
                self.failed_alike = first.rank != self._rank and first.is_like(own)
                return None
            culprit = self.failure or self._post(self._search(own, exception))
            return None if culprit.rank == self._rank else culprit
        finally:
            self._is_noticed.set()

    def _post(self, failure: RankFailure) -> RankFailure:
        try:
            return self.channel.call(lambda store: post_failure(store, RUN, failure))
        except RankFailedError as error:
            return self.failure or error.failure

    def _search(self, own: RankFailure, exception: BaseException) -> RankFailure:
        """Wait a moment for another rank's failure, or for a rank that misses its heartbeats or is stuck.

        A collective failed, so the other ranks are asked where they are. If one answers that it is in no collective, it
        is the one that was waited for; a dead rank does not answer. If all are alive and wait, but not in the same
        collective, the failure is this rank's own, with a note of where the others are.
        """
        channel, clock = self.channel, AwakeClock()
        search_s = max(SEARCH_S, 6 * channel.interval_s)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        positions: dict[int, tuple[bool, str]] = {}

        def ask(store: dist.Store) -> list[int]:
            store.set(QUESTION, "?")
            for rank in others:
                if rank not in positions and store.check([f"position/{rank}"]):
                    positions[rank] = json.loads(store.get(f"position/{rank}"))
            return channel.silent(store, others, search_s - 2 * channel.interval_s)

        try:
            while clock() < search_s and len(positions) < len(others):
                silent = channel.call(ask)
                channel.raise_failure(RUN)
                time.sleep(channel.interval_s / 2)
        except RankFailedError as error:
            return error.failure
        beats = channel.heartbeats
        for rank, (waits, at) in sorted(positions.items()):
            if not waits:
                cause = own.message.partition("\n")[0]
                message = f"it is at {at}; rank {self._rank} waited for it in {own.where}: {cause}"
                return RankFailure(rank, beats[rank].host, beats[rank].where, STUCK, message)
        if unheard := [rank for rank in silent if rank not in positions]:
            return channel.missed_heartbeats(unheard[0])
        places = {rank: f"{beats[rank].where}, at {at}" for rank, (_, at) in positions.items()}
        places[self._rank] = f"{own.where}, at {main_thread_position(exception)[1]}"
        listed = list_positions([places.get(rank, "") for rank in range(self._world_size)])
        note = f"All ranks are alive and wait for each other. When this was raised on rank {self._rank}:\n{listed}"
        exception.add_note(note)
        return replace(own, message=f"{own.message}\n{note}")

    # --- The channel's thread -----------------------------------------------------------------------------------------

    def _exchange(self, store: dist.Store) -> None:
        keys = (ENDED, REQUEST, DECISION, QUESTION)
        if not self._has_keys:
            # Reading a missing key would block.
            for key in keys:
                store.compare_set(key, "", NONE.decode())
            self._has_keys = True
        ended, request, decision, question = store.multi_get(list(keys))
        self.stop.exchange(store, request, decision)
        if question != NONE and not self._has_answered:
            store.set(f"position/{self._rank}", json.dumps(self.raised_at or main_thread_position()))
            self._has_answered = True
        if self._is_closed.is_set() or self.channel.watched[RUN] is not None:
            return
        self._standstill.exchange(store, self.channel.where)
        if ended != NONE:
            self._post_if_left_alone(store, *ended.decode().split("|"))
        # Each rank is watched by the nearest unfinished rank before it, so that no rank reads all heartbeats. All watch
        # rank 0: it may host the store, and then its death cannot be posted.
        beats = self.channel.heartbeats
        following = ((self._rank + offset) % self._world_size for offset in range(1, self._world_size))
        watched = next((rank for rank in following if rank not in beats or not beats[rank].finished), self._rank)
        for rank in self.channel.silent(store, sorted({0, watched} - {self._rank})):
            post_failure(store, RUN, self.channel.missed_heartbeats(rank))

    def _post_if_left_alone(self, store: dist.Store, rank: str, host: str, last_step: str) -> None:
        """Post a failure of the rank that ended first, if this rank takes training steps that it did not take."""
        if self.training_step > int(last_step):
            message = (
                f"it ended its run after training step {last_step}, but rank {self._rank} is in step "
                f"{self.training_step}: give all ranks equally many batches, and set trainer.should_stop on all of "
                "them or on none"
            )
            post_failure(store, RUN, RankFailure(int(rank), host, "fit", "RuntimeError", message))

    # --- The second thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Make this rank leave once there is a failure, or no answer from the store."""
        channel, clock = self.channel, AwakeClock()
        beats, answered_s = 0, 0.0
        while not self._is_closed.wait(min(channel.interval_s, 1.0)) and self.failure is None:
            if channel.beats != beats:
                beats, answered_s = channel.beats, clock()
            host_is_done = 0 in channel.heartbeats and channel.heartbeats[0].finished
            if channel.lost is not None and not host_is_done:
                self._failure = channel.lost
            elif clock() - answered_s > channel.timeout_s:
                self._failure = channel.lost_store("does not answer")
        self.stop.release()
        failure = self.failure
        if failure is None or self._is_closed.is_set() or (failure.rank == self._rank and self._has_posted_own):
            return
        self._leave(failure)

    def _leave(self, failure: RankFailure) -> None:
        """Make the main thread leave: gently, then by a signal, then by ending the process."""
        if self._is_noticed.is_set():
            return
        world = dist.group.WORLD
        connections.abort_connections(None if world is None else world.get_group_store())
        if self._is_noticed.wait(INTERRUPT_AFTER_S) or self._is_closed.is_set():
            return
        if self._raises_on_sigterm and hasattr(signal, "pthread_kill"):
            # Sent to the main thread itself, the signal also interrupts a system call in which it sleeps.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if self._is_noticed.wait(KILL_AFTER_S - INTERRUPT_AFTER_S) or self._is_closed.is_set():
            return
        end_process(self._rank, str(failure))


def end_process(rank: int, why: str) -> None:
    """Print why, and where all threads are, and end this process with status 1, whatever its threads are doing."""
    try:
        print(f"rank {rank} on {socket.gethostname()} stops: {why}. It was at:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
    finally:
        os._exit(1)
