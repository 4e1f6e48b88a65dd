"""The heart of a rank: a thread that says where the rank is, hears the others, and learns of the first failure.

With each beat, a rank writes its record and reads a few keys (`distributed.meeting`): the first failure, the
record of the rank before it, which it watches, and that of rank 0, which may hold the store. A second thread,
the dead man's switch, watches the heart itself: a call to a store whose host is stopped never returns. It counts
its own turns, not seconds, so that a machine that was suspended has not died.

Every message that names a rank comes from one of these lines. Once hearts beat, all end in `Heart.learn`:

    what it says                         who decides it
    failed in <hook>: <error>            the rank itself: `Supervisor._post_cause`; in a block of `FirstRankPerNode`,
                                         `FirstRankPerNode._meetings`; in its heart, `Heart._beat_on`; while it joins,
                                         `join._join`, and `join._enter` for two processes of one rank
    its process has ended,               `failures.silence`, asked by the rank that watches it (`Heart._judge`), or by
      or missed heartbeats               the first rank whose collective has failed (`report.explain`, of `Watch.why`)
    its process <how it ended>           the rank that has started it: `Watch.exchange`; before all have joined,
                                         `Supervisor.check_processes`
    it ended its run, or began a         the rank that watches it: `Heart._hear`
      validation, after step
    holds the store, does not answer     each rank for itself: `Heart.lose_store`; while it joins, `join.meet`
    is missing                           a meeting that it did not come to: `meeting._look_for_missing`
    waited in vain, with the table       `report.explain`, too; or the rank whose collective never ends:
                                         `Watch._end_what_never_ends`

Whoever learns of a failure, or closes its heart, says so, and rank 0, if it hosts the store, stays until all have, for
some seconds.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import failures, meeting, processes
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, Record
from lightning_automodel.distributed.last_resort import end_process
from lightning_automodel.distributed.store import RANKS_PER_SECOND, STORE_ERRORS, without_prefixes

log = logging.getLogger(__name__)

BEAT_S = 0.25
MISSED_BEATS = 8
BEATS_IN_A_FILE = 40
JOIN_S = 1.0
END = "the end"  # of a heart, which a rank knows once it learns of a failure, or closes its own


class Heart:
    """This rank among the ``ranks`` that watch each other, from :meth:`start` to :meth:`close`.

    Each watches the one before it that has not left, whose silence for ``silence_s`` is posted as a failure.

    Args:
        rank: This rank.
        ranks: All that have such a heart, in the same order on each.
        store: With a prefix that these hearts have in common. Both threads and the main one use it: no call
            waits for a key.
        silence_s: How long a rank may be silent, and the store.
        expects_all: Whether a rank that has never written a record counts as silent: all have just joined.

    Attributes:
        record: What is true of this rank, for the others.
        failure: The first failure that this rank has learnt of; `learn` alone sets it.
        is_over: There is a failure, or this rank has closed its heart: both threads end.
        store_answers: False once the store is lost.
        is_stuck: Whether a call to the store does not return, so that the main thread may be stuck too.
        is_in_block: Whether this rank is in a first-rank block, where it may wait for longer than a collective.
    """

    keys: tuple[str, ...] = ()
    """What a beat reads besides, for :meth:`exchange`."""

    def __init__(
        self, rank: int, ranks: Sequence[int], store: dist.Store, silence_s: float, expects_all: bool = False
    ) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        self.store = store
        self.silence_s = silence_s
        self.interval_s = min(max(BEAT_S, len(self.ranks) / RANKS_PER_SECOND), silence_s / MISSED_BEATS)
        if isinstance(without_prefixes(store), dist.FileStore):
            # A file keeps all that was ever written to it.
            self.interval_s = max(self.interval_s, silence_s / BEATS_IN_A_FILE)
        self.record = Record(host=socket.gethostname(), process=processes.own_process())
        self.failure: RankFailure | None = None
        self.is_over = threading.Event()
        self.store_answers = True
        self.is_stuck = False
        self.is_in_block = False
        self.clock: Callable[[], float] = time.monotonic
        self._expects_all = expects_all
        self._read: list[str] = []  # the keys that the newest beat read
        self._learning = threading.Lock()
        self._host = Record()  # rank 0's newest record
        self._watch_before(rank)
        self._threads = [
            threading.Thread(target=target, name="lightning_automodel heart", daemon=True)
            for target in (self._beat_on, self._switch)
        ]

    # --- What a run does besides --------------------------------------------------------------------

    def describe(self) -> None:
        """Bring the record up to date; called with each beat."""

    def exchange(self, values: Sequence[bytes]) -> None:
        """Called with each beat, with the values of the :attr:`keys`."""

    def make_leave(self, failure: RankFailure) -> None:
        """Called once, on the switch's thread, when this rank knows of a failure: make the main thread leave.

        It asks for failures while it waits, unless it is stuck as well.
        """
        if self.is_stuck:
            end_process(self.rank, str(failure))

    # --- The main thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        running.append(self)
        for thread in self._threads:
            thread.start()

    def raise_failure(self) -> None:
        """Raise RankFailedError if this rank knows of a failure."""
        if self.failure is not None:
            raise RankFailedError(self.failure)

    def meet(self, at: str, ranks: Sequence[int], value: Any, limit_s: float) -> list[Any]:
        """`meeting.meet` in :attr:`store`, which RankFailedError also ends if this rank learns of a failure."""
        self.raise_failure()  # before it says that it has come
        try:
            return meeting.meet(self.store, at, self.rank, ranks, value, limit_s, self.raise_failure)
        except STORE_ERRORS as error:
            raise RankFailedError(self.lose_store(failures.how_lost(error))) from error

    def post(self, failure: RankFailure) -> RankFailure:
        """Post ``failure`` for all ranks; returns the first that was posted, or why the store does not answer."""
        if not self.store_answers:  # a call might not return
            return self.learn(failure)
        try:
            failure = meeting.post(self.store, failure)
        except STORE_ERRORS as error:
            return self.lose_store(failures.how_lost(error))
        return self.learn(failure)

    def learn(self, failure: RankFailure) -> RankFailure:
        """Note ``failure``, unless this rank knows of one already; returns the first. Safe in every thread."""
        with self._learning:
            self.failure = self.failure or failure
        self.is_over.set()
        if self.store_answers:
            meeting.linger(self.store, END, self.rank, self.ranks, limit_s=0.0)
        return self.failure

    def lose_store(self, what: str) -> RankFailure:
        """Learn that the store does not answer, of its host."""
        self.store_answers = False
        return self.learn(failures.lost_store(self._host, what))

    def retire(self) -> None:
        """From now on barriers and first-rank blocks of this process do without this heart: its rank leaves."""
        if self in running:
            running.remove(self)

    def close(self) -> None:
        """Say that this rank has left, unless there is a failure, and end the threads, unless one is stuck.

        Rank 0 stays until the others close their hearts too, 5 s at most; after a failure until they know of it,
        2.5 s at most.
        """
        limit_s = meeting.LINGER_S if self.failure is None else meeting.LINGER_AFTER_FAILURE_S
        if self.store_answers:
            meeting.linger(self.store, END, self.rank, self.ranks, limit_s)
        self.record.has_left = True
        self.is_over.set()
        self.retire()
        for thread in self._threads:
            thread.join(JOIN_S + 2 * self.interval_s)

    # --- The heart ----------------------------------------------------------------------------------

    def _beat_on(self) -> None:
        try:
            self.beat()
            while not self.is_over.wait(self.interval_s):
                self.beat()
            if self.failure is None:
                self._say()  # that this rank has left
        except STORE_ERRORS as error:
            if not self.is_over.is_set():  # else there is no failure to tell of
                self.lose_store(failures.how_lost(error))
            self.is_over.set()
        except Exception as error:
            log.exception("The thread that sends this rank's heartbeats has failed.")
            self.post(RankFailure.from_exception(error, self.rank, self.record.where))

    def beat(self) -> None:
        """Write this rank's record, read what concerns it, and judge the rank before it."""
        self._say()
        keys = [meeting.FAILURE, *self.keys, f"record/{self._watched}", "record/0"]
        if keys != self._read:
            meeting.make(self.store, keys)
            self._read = keys
        posted, *values, watched, host = self.store.multi_get(keys)
        failure = meeting.parse_failure(posted)
        if failure is not None:
            self.learn(failure)
        self._host = meeting.parse_record(host)
        self.exchange(values)
        if self._watched != self.rank:
            self._hear(meeting.parse_record(watched))

    def _say(self) -> None:
        self.describe()
        self.record.beat += 1
        self.store.set(f"record/{self.rank}", json.dumps(asdict(self.record)))

    def _watch_before(self, rank: int) -> None:
        """Watch the rank before ``rank``."""
        self._watched = self.ranks[self.ranks.index(rank) - 1]
        self._note(Record())

    def _note(self, record: Record) -> None:
        """Note the newest record of the watched rank."""
        self._heard = record
        self._heard_at = self.clock()
        self._missed = 0

    def _hear(self, record: Record) -> None:
        """Judge the watched rank by its record: whether it has ended before the others, or its record stands still."""
        own = self.record
        if record.has_left or (record.has_ended and processes.state_of(record.process) == processes.GONE):
            self._watch_before(self._watched)
            return
        has_stopped = record.has_ended or record.pauses
        if has_stopped and own.step > record.step and own.training == record.training and not own.has_ended:
            self.post(failures.left_behind(self._watched, record, self.rank, own.step))
        elif record != self._heard:
            self._note(record)
        elif not record.has_ended:
            self._missed += 1
            self._judge(record)

    def _judge(self, record: Record) -> None:
        """Name the watched rank, whose record stands still, unless its process lives."""
        failure = failures.silence(self._watched, record, self.rank)
        if failure is None or not (record.beat or self._expects_all):  # it lives, or may not have begun
            return
        # In the machine's seconds and in beats of this rank: where it hardly gets its turn, seconds say little.
        is_silent = self.clock() - self._heard_at > self.silence_s and self._missed >= MISSED_BEATS
        # With a beat more the process that started it tells how it ended.
        has_ended = failure.error == failures.PROCESS_ENDED and self._missed > 1
        if is_silent or has_ended:
            self.post(failure)

    # --- The dead man's switch ----------------------------------------------------------------------

    def _switch(self) -> None:
        beat = 0
        turns = 0
        while not self.is_over.wait(self.interval_s):
            turns += 1
            if self.record.beat != beat:
                beat = self.record.beat
                turns = 0
            if turns * self.interval_s > self.silence_s:
                self.is_stuck = True
                self.lose_store(f"has not answered for {self.silence_s:g} s")
        if self.failure is not None:
            self.make_leave(self.failure)


running: list[Heart] = []
"""The hearts of this process, the innermost run's last: a run, or a first-rank block, may be inside another one."""


def current() -> Heart | None:
    """The heart of the run that this process is in, if any: a forked child inherits hearts without their threads."""
    return next((heart for heart in reversed(running) if heart._threads[0].is_alive()), None)
