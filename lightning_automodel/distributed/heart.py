"""The heart of a rank: a thread that says where the rank is, hears the others, and learns of the first failure.

With each beat, a rank writes its record and reads a few keys (`distributed.meeting`): the first failure, the
record of the rank before it, which it watches, and that of rank 0, which may hold the store. A second thread,
the dead man's switch, watches the heart itself: a call to a store whose host is stopped never returns. It counts
its own turns, not seconds, so that a machine that was suspended has not died.

Whoever learns of a failure acknowledges it, and rank 0 stays until all have (`Heart.linger`).
"""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import failures, processes
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, Record, message_of
from lightning_automodel.distributed.meeting import (
    FAILURE,
    linger,
    make,
    parse_failure,
    parse_record,
    post,
)
from lightning_automodel.distributed.store import RANKS_PER_SECOND, without_prefixes

log = logging.getLogger(__name__)

BEAT_S = 0.25
MISSED_BEATS = 8
BEATS_TO_NAME_HOW_IT_ENDED = 2
BEATS_IN_A_FILE = 40
JOIN_S = 1.0

Exchange = Callable[[Sequence[bytes]], None]


class Heart:
    """This rank among the ``ranks`` that watch each other, from :meth:`start` to :meth:`close`.

    Each watches the one before it that has not left. One that is silent for ``silence_s`` is posted as the
    failure of all.

    Args:
        rank: This rank.
        ranks: All that have such a heart, in the same order on each.
        store: With a prefix that these hearts have in common. Both threads and the main one use it: no call
            waits for a key.
        silence_s: How long a rank may be silent, and the store.
        describe: Called with each beat: what the record says besides, by the names of :class:`Record`.
        on_failure: Called once, on the switch's thread, when this rank knows of a failure.
        expects_all: Whether a rank that has never written a record counts as silent: all have just joined.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        store: dist.Store,
        silence_s: float,
        describe: Callable[[], Mapping[str, Any]],
        on_failure: Callable[[RankFailure], None],
        expects_all: bool = False,
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
        self.failure: RankFailure | None = (
            None  # the first that this rank has learnt of; only `learn` writes it
        )
        self.has_news = threading.Event()  # there is a failure, or this rank has closed its heart
        self.clock: Callable[[], float] = time.monotonic
        self.beats = 0  # how often the store has answered
        self.store_answers = True  # False once it is lost
        self.is_stuck = (
            False  # whether a call to the store does not return, so that the main thread may be stuck too
        )
        self._describe = describe
        self._on_failure = on_failure
        self._expects_all = expects_all
        self._keys: Sequence[str] = ()
        self._exchange: Exchange = lambda values: None
        self._made: set[str] = set()
        self._has_left = False
        self._has_acknowledged = False
        self._lock = threading.Lock()
        self._saying = threading.Lock()
        self._turned_at = time.monotonic()  # the newest turn of the switch
        # For how long this process did not run, the last time, and until when.
        self._away = 0.0, self._turned_at
        self._host = Record()  # rank 0's newest record
        self._watched = rank
        self._watch_next()
        self._threads = [
            threading.Thread(target=target, name="lightning_automodel heart", daemon=True)
            for target in (self._beat_on, self._switch)
        ]

    # --- The main thread ----------------------------------------------------------------------------

    def exchange_with(self, keys: Sequence[str], exchange: Exchange) -> None:
        """With each beat, read ``keys`` too, and call ``exchange`` with their values. To be set before the start."""
        self._keys = keys
        self._exchange = exchange

    def start(self) -> None:
        """Start the threads, and write the first record; RankFailedError if the store is lost."""
        running.append(self)
        self._turned_at = time.monotonic()
        for thread in self._threads:
            thread.start()
        try:
            self._say()
        except (dist.DistError, OSError) as error:
            raise RankFailedError(self.lose_store(ended(error))) from error

    @property
    def is_beating(self) -> bool:
        """Whether the threads run in this process: a forked child inherits the object without them."""
        return self._threads[0].is_alive()

    def raise_failure(self) -> None:
        """Raise RankFailedError if this rank knows of a failure."""
        if self.failure is not None:
            raise RankFailedError(self.failure)

    def tell(self, failure: RankFailure) -> RankFailure:
        """Post ``failure`` for all ranks; returns the first that was posted, or why the store does not answer."""
        if not self.store_answers:  # a call might not return
            return self.learn(failure)
        try:
            failure = post(self.store, failure)
        except (dist.DistError, OSError) as error:
            return self.lose_store(ended(error))
        return self.learn(failure)

    def learn(self, failure: RankFailure) -> RankFailure:
        """Note ``failure``, unless this rank knows of one already; returns the first. Safe in every thread."""
        with self._lock:
            self.failure = self.failure or failure
            acknowledges = self.store_answers and not self._has_acknowledged
            self._has_acknowledged = True
        self.has_news.set()
        if acknowledges:
            with contextlib.suppress(dist.DistError, OSError):
                self.store.add(f"known/{FAILURE}", 1)
        return self.failure

    def lose_store(self, what: str) -> RankFailure:
        """Learn that the store does not answer: of its host, or of this rank if it was away."""
        self.store_answers = False
        return self.learn(self._was_away() or failures.lost_store(self._host, what))

    def linger(self, limit_s: float) -> None:
        """After a failure: rank 0 stays until the others know of it, for ``limit_s`` seconds at most."""
        if self.store_answers and self.failure is not None:
            is_one_dead = self.failure.error in (failures.PROCESS_ENDED, failures.MISSED_HEARTBEATS)
            linger(self.store, FAILURE, self.rank, len(self.ranks) - is_one_dead, limit_s, says=0)

    def retire(self) -> None:
        """From now on barriers and first-rank blocks of this process do without this heart: its rank leaves."""
        if self in running:
            running.remove(self)

    def close(self) -> None:
        """Say that this rank has left, unless there is a failure, and end the threads, unless one is stuck."""
        if self.failure is None and self.is_beating:
            self._has_left = True
            with contextlib.suppress(dist.DistError, OSError):
                self._say()
        self.has_news.set()
        self.retire()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S + 2 * self.interval_s)

    # --- The heart ----------------------------------------------------------------------------------

    def _beat_on(self) -> None:
        try:
            self.beat()
            while not self.has_news.wait(self.interval_s):
                self.beat()
        except (dist.DistError, OSError) as error:
            if self._host.has_left:  # at the end of the run, with no failure to tell of
                self.has_news.set()
            else:
                self.lose_store(ended(error))
        except Exception as error:
            log.exception("The thread that sends this rank's heartbeats has failed.")
            message = f"{message_of(error)}, raised in the thread that sends this rank's heartbeats"
            record = self.record
            self.tell(RankFailure(self.rank, record.host, record.where, type(error).__name__, message))

    def beat(self) -> None:
        """Write this rank's record, read what concerns it, and judge the rank before it."""
        self._say()
        keys = [FAILURE, *self._keys, f"record/{self._watched}", "record/0"]
        new = [key for key in keys if key not in self._made]
        if new:
            make(self.store, new)
            self._made.update(new)
        posted, *values, watched, host = self.store.multi_get(keys)
        failure = parse_failure(posted)
        if failure is not None:
            self.learn(failure)
        self._host = parse_record(host)
        self._exchange(values)
        if self._watched != self.rank:
            self._hear(parse_record(watched))
        self.beats += 1

    def _say(self) -> None:
        with self._saying:
            own = self.record
            self.record = Record(
                **{
                    "beat": own.beat + 1,
                    "host": own.host,
                    "process": own.process,
                    "has_left": self._has_left,
                    **self._describe(),
                }
            )
            self.store.set(f"record/{self.rank}", json.dumps(asdict(self.record)))

    def _watch_next(self) -> None:
        """Watch the rank before the one that was watched so far."""
        self._watched = self.ranks[self.ranks.index(self._watched) - 1]
        self._heard = Record()
        self._heard_at = self.clock()
        self._missed = 0

    def _hear(self, record: Record) -> None:
        """Post what is wrong with the watched rank: it has died, is silent, or has ended before the others."""
        is_gone = processes.state_of(record.process) == processes.GONE
        if record.has_left or (record.has_ended and is_gone):
            self._watch_next()
        elif record.has_ended:
            own = self.record
            if own.step > record.step and own.training == record.training and not own.has_ended:
                self.tell(failures.left_behind(self._watched, record, self.rank, self.record.step))
        elif record != self._heard:
            self._heard = record
            self._heard_at = self.clock()
            self._missed = 0
        else:
            self._missed += 1
            self._judge_silence(record)

    def _judge_silence(self, record: Record) -> None:
        """Name the watched rank, whose record stands still, unless its process is seen to live."""
        state = processes.state_of(record.process)
        silent_s = self.clock() - self._heard_at
        # In the machine's seconds and in beats of this rank: where it hardly gets its turn, seconds say little.
        is_silent = silent_s > self.silence_s and self._missed >= MISSED_BEATS
        if state == processes.GONE and self._missed >= BEATS_TO_NAME_HOW_IT_ENDED:
            # A launcher that has started it says more, and has had the time.
            self.tell(failures.ended(self._watched, record, self.rank))
        elif is_silent and state != processes.ALIVE and (record.beat or self._expects_all):
            silent = failures.missed_heartbeats(self._watched, record, self.rank, state, silent_s=silent_s)
            self.tell(self._was_away() or silent)

    def _was_away(self) -> RankFailure | None:
        """This rank's own failure, if it did not run for so long that the others may have given it up."""
        now = time.monotonic()
        away_s, until = self._away
        if now - self._turned_at > self.silence_s:  # the switch has not turned since
            away_s = now - self._turned_at
        elif now - until > self.silence_s:
            return None
        if away_s < self.silence_s:
            return None
        message = (
            f"this process did not run for {away_s:.0f} s (stopped, or a call kept Python's lock), and"
            " the others have left"
        )
        return RankFailure(
            self.rank, self.record.host, self.record.where, failures.MISSED_HEARTBEATS, message
        )

    # --- The dead man's switch ----------------------------------------------------------------------

    def _switch(self) -> None:
        beats = 0
        turns = 0
        while not self.has_news.wait(self.interval_s):
            now = time.monotonic()
            if now - self._turned_at > self.silence_s:
                self._away = now - self._turned_at, now
            self._turned_at = now
            turns += 1
            if self.beats != beats:
                beats = self.beats
                turns = 0
            if turns * self.interval_s > self.silence_s:
                self.is_stuck = True
                self.lose_store(f"has not answered for {self.silence_s:g} s")
        if self.failure is not None:
            self._on_failure(self.failure)


running: list[Heart] = []
"""The hearts of this process, the innermost run's last: a run, or a first-rank block, may be inside another one."""


def current() -> Heart | None:
    """The heart of the run that this process is in, if any."""
    return next((heart for heart in reversed(running) if heart.is_beating), None)


def ended(error: Exception) -> str:
    """What is known of a store of which a call raised ``error``."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"ended or is out of reach ({type(error).__name__}: {first_line})"
