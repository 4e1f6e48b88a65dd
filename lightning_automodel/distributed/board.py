"""The board between ranks: one record per rank in a store, written and read by one thread on each rank.

Below the board's prefix, the store holds

    record/<rank>       the newest `Record` of a rank, which is also its heartbeat
    <path>/verdict      the first failure of the run, of joining, or of one first-rank block
    <path>/known        how many ranks know how that ended
    <at>/<rank>, <at>/arrived, <at>/result    ranks that wait for each other
    <at>/lease          which of them looks for those that are missing

and, for a run, `lease` (`failure.watchdog`), `stop` and the keys below it (`failure.coordinated_stop`). With
each heartbeat, a rank writes its record and reads a few keys. Only one rank ever reads all records.

The states of a board, which only `Board._become` changes. LOST is for good:

    OPENING ---- first heartbeat ----> OPEN ---- close() ----> CLOSED
       |                                |
       +--- connecting fails, the store ends or does not answer, or the thread raises ---> LOST
"""

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.failures import (
    MISSED_HEARTBEATS,
    UNSEEN,
    RankFailedError,
    RankFailure,
    Record,
    Sighting,
    message_of,
)
from lightning_automodel.distributed.store import (
    LONGEST_PAUSE_S,
    RANKS_PER_SECOND,
    launcher_hosts_store,
    pause_s,
    without_prefixes,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

BEAT_S = 0.25
BEATS_IN_A_FILE = 40
JOIN_S = 1.0
LINGER_S = 5.0
NONE = b"-"

StoreFunction = Callable[[dist.Store], Any]
Exchange = Callable[[dist.Store, Sequence[bytes]], None]


class BoardState(Enum):
    """How far this rank's connection to the store has come; see the module's docstring."""

    OPENING = auto()  # the store has not answered yet
    OPEN = auto()  # heartbeats are written, and calls are answered
    LOST = auto()  # the store cannot be used any more: `Board.lost` says why
    CLOSED = auto()  # the thread has ended because this rank closed its board


class Board:
    """A connection to a store, and the one thread that uses it, from :meth:`start` to :meth:`close`.

    Only the thread uses the connection: a call to a store whose host is stopped may block forever, and a
    ``TCPStore`` client is blocked for all threads while one of them waits in it. The thread also reads
    verdicts ahead, since the store may be gone by the time the rank asks for them.

    Each of ``members`` watches the one before it that has not ended. A rank that is silent for ``timeout_s``
    is posted at ``path``. The thread calls ``connect``, which opens the connection, with the same prefix of
    keys on all ranks, and with each heartbeat ``describe``, which returns what this rank's record says.
    """

    def __init__(
        self,
        rank: int,
        connect: Callable[[], dist.Store],
        path: str,
        members: Sequence[int],
        timeout_s: float,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.rank = rank
        self.host = socket.gethostname()
        self.path = path
        self.members = list(members)
        self.timeout_s = timeout_s
        self._connect = connect
        self._describe = describe
        self._keys: list[str] = []
        self._exchange: Exchange = lambda store, values: None
        self._check: Callable[[], None] = lambda: None
        share_s = len(members) / RANKS_PER_SECOND
        self.interval_s = min(max(BEAT_S, share_s), timeout_s / failures.MISSED_BEATS)
        self.clock: Callable[[], float] = time.monotonic
        self.beats = 0  # the number of records that this rank has written
        self.own = Record(host=self.host)  # the newest of them
        self.seen: dict[int, Sighting] = {}  # other ranks, as far as their records were read
        self.expects_all = False  # whether a member that has written nothing counts as silent
        self.verdicts: dict[str, RankFailure | None] = {path: None}  # by path, for those that are followed
        self.state = BoardState.OPENING
        self.lost: RankFailure | None = None  # why, in BoardState.LOST
        self._has_answered = threading.Event()
        self._watched: set[int] = set()
        self._existing: set[str] = set()
        self._calls: queue.SimpleQueue[tuple[StoreFunction, Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="lightning_automodel board", daemon=True)

    # --- What this rank says and reads ------------------------------------------------------------

    def exchange_with(self, keys: Sequence[str], exchange: Exchange) -> None:
        """With each heartbeat, read ``keys`` and call ``exchange`` on the thread. To be set before the start."""
        self._keys = list(keys)
        self._exchange = exchange

    def check_while_waiting(self, check: Callable[[], None]) -> None:
        """Call ``check`` now and then while this rank waits for an answer; it may raise."""
        self._check = check

    def watch(self, rank: int) -> None:
        """From now on, read the record of ``rank`` with each heartbeat, as those of the neighbour and rank 0."""
        self._watched.add(rank)

    def follow(self, path: str) -> None:
        """From now on, read the verdict at ``path`` too."""
        self.verdicts[path] = None

    def unfollow(self, path: str) -> None:
        """Stop reading the verdict at ``path``."""
        del self.verdicts[path]

    # --- The connection ---------------------------------------------------------------------------

    def start(self, expects_all: bool = False) -> None:
        """Start the thread. ``expects_all``: whether a member that has written nothing counts as silent."""
        self.expects_all = expects_all
        self.thread.start()

    def wait_for_answer(self, seconds: float) -> bool:
        """Wait for the store's first answer, and return whether it has come."""
        return self._has_answered.wait(seconds)

    @property
    def is_served(self) -> bool:
        """Whether the thread runs in this process; a forked child inherits the board without its thread."""
        return self.thread.is_alive()

    def close(self) -> None:
        """Write that this rank has left, unless the run failed, and end the thread, unless it is stuck."""
        self._calls.put(None)
        self.thread.join(JOIN_S + 2 * self.interval_s)

    def _become(self, state: BoardState) -> None:
        """Change the state, here alone. The main thread does so too, if it has waited in vain for an answer."""
        if state is BoardState.OPEN:
            self._has_answered.set()
        if self.state is not BoardState.LOST:
            self.state = state

    def _lose(self, failure: RankFailure) -> RankFailure:
        """Stop using the store because of ``failure``; returns the first reason."""
        self.lost = self.lost or failure
        self._become(BoardState.LOST)
        return self.lost

    def call(self, function: Callable[[dist.Store], T], patience_s: float = float("inf")) -> T:
        """Run ``function``, which must not wait for a key, on the thread, and return its result.

        RankFailedError if the store is lost, or silent for the timeout or for ``patience_s`` seconds.
        """
        answer: Future[T] = Future()
        self._calls.put((function, answer))
        patience_s = min(patience_s, self.timeout_s)
        give_up_at = time.monotonic() + patience_s
        while self.lost is None and self.is_served and time.monotonic() <= give_up_at:
            self._check()
            with contextlib.suppress(TimeoutError):
                return answer.result(min(patience_s, LONGEST_PAUSE_S))
        lost = self._lose(self.lost_store(f"has not answered for {patience_s:g} s"))
        # The store often ends because of a failure that this rank knows already.
        raise RankFailedError(next((failure for failure in self.verdicts.values() if failure), lost))

    def wait_for(self, key: str, path: str, limit_s: float, explain: Callable[[float], None]) -> bytes:
        """Wait for the value of ``key``; after ``limit_s`` seconds, call ``explain`` now and then to raise why.

        RankFailedError if a failure was posted at ``path`` or for the whole board, or the store is lost.
        """
        began_at = time.monotonic()
        late_s = limit_s
        while True:
            (value,) = self.call(lambda store: self.read(store, [key]))
            for failure in (self.verdicts.get(path), self.verdicts[self.path]):
                if failure is not None:
                    raise RankFailedError(failure)
            if value != NONE:
                return value
            waited_s = time.monotonic() - began_at
            if waited_s > late_s:
                late_s += LINGER_S
                explain(waited_s)
            time.sleep(pause_s(waited_s, len(self.members)))

    def gather(self, at: str, ranks: Sequence[int], value: str, path: str, limit_s: float) -> list[str]:
        """Wait like :meth:`wait_for` until all of ``ranks`` have posted below ``at``; returns their values."""
        self.call(lambda store: self.arrive(store, at, ranks, value))
        explain = partial(self.explain_missing, at, ranks)
        return list(json.loads(self.wait_for(f"{at}/result", path, limit_s, explain)))

    def explain_missing(self, at: str, ranks: Sequence[int], waited_s: float) -> None:
        """Raise RankFailedError for those of ``ranks`` that have posted nothing below ``at``; one rank looks."""
        failure = self.call(lambda store: self._missing(store, at, ranks, waited_s))
        if failure is not None:
            raise RankFailedError(failure)

    def conclude(self, path: str, num_ranks: int, limit_s: float = LINGER_S) -> None:
        """Note that this rank knows how ``path`` ended. Rank 0, the store's host, waits for ``num_ranks`` notes."""
        limit_s = min(limit_s, self.timeout_s)
        began_at = time.monotonic()

        def acknowledge(store: dist.Store) -> None:
            self.read(store)
            if self.verdicts.get(path) is None:
                store.add(f"{path}/known", 1)

        with contextlib.suppress(RankFailedError):
            self.call(acknowledge, limit_s)
            while self.rank == 0:
                waited_s = time.monotonic() - began_at
                if waited_s >= limit_s:
                    return
                if self.call(lambda store: store.add(f"{path}/known", 0), limit_s) >= num_ranks:
                    return
                time.sleep(pause_s(waited_s, num_ranks))

    # --- For functions that the thread runs -------------------------------------------------------

    def read(self, store: dist.Store, keys: Sequence[str] = ()) -> Sequence[bytes]:
        """Values of ``keys``, ``NONE`` where there is none, and new verdicts, in one operation."""
        # Another thread may add a path meanwhile.
        paths = [path for path, verdict in list(self.verdicts.items()) if verdict is None]
        wanted = [*(f"{path}/verdict" for path in paths), *keys]
        values: Sequence[bytes] = []
        if wanted:
            values = self._values(store, wanted)
        for path, value in zip(paths, values, strict=False):
            if value != NONE:
                self.verdicts[path] = RankFailure(**json.loads(value))
                store.add(f"{path}/known", 1)
        return values[len(paths) :]

    def arrive(self, store: dist.Store, at: str, ranks: Sequence[int], value: str) -> None:
        """Post ``value`` below ``at``. The last of ``ranks`` collects all, so that each rank reads one key."""
        store.set(f"{at}/{self.rank}", value)
        if store.add(f"{at}/arrived", 1) == len(ranks):
            values = store.multi_get([f"{at}/{rank}" for rank in ranks])
            store.set(f"{at}/result", json.dumps([posted.decode() for posted in values]))

    def post(self, store: dist.Store, path: str, failure: RankFailure) -> RankFailure:
        """Post ``failure`` at ``path`` unless there is one already; returns the first one."""
        self._values(store, [f"{path}/verdict"])
        posted = store.compare_set(f"{path}/verdict", NONE.decode(), json.dumps(asdict(failure)))
        return RankFailure(**json.loads(posted))

    def beat(self, store: dist.Store) -> None:
        """Write this rank's record, and read what concerns it."""
        self._write(store)
        neighbour = self._neighbour()
        # All read rank 0's record: rank 0 may hold the store, and has to be named if that is lost.
        ranks = sorted({neighbour, 0, *self._watched} & set(self.members) - {self.rank})
        values = self.read(store, [*self._keys, *(f"record/{rank}" for rank in ranks)])
        self._see(self.seen, ranks, values[len(self._keys) :])
        self._exchange(store, values[: len(self._keys)])
        # A rank that has written nothing may come later: ranks that wait for it name it.
        if neighbour != self.rank and (self.seen[neighbour].record or self.expects_all):
            seen = self.seen[neighbour]
            now = self.clock()
            if seen.is_silent(now, self.timeout_s):
                silent = failures.missed_heartbeats(neighbour, seen.known, self.rank, now - seen.changed_at)
                self.post(store, self.path, silent)
        self._become(BoardState.OPEN)

    def read_records(self, store: dist.Store, ranks: Sequence[int], seen: dict[int, Sighting]) -> None:
        """Add the records of ``ranks`` to what the caller has ``seen``."""
        self._see(seen, ranks, self._values(store, [f"record/{rank}" for rank in ranks]))

    def lost_store(self, what: str) -> RankFailure:
        """The failure to report if the store does not answer: of the process that holds it."""
        message = f"which holds the store of the process group, {what}"
        if launcher_hosts_store():
            return RankFailure(failures.LAUNCHER, self.host, "", MISSED_HEARTBEATS, message)
        known = self.known(0)
        return RankFailure(0, known.host, known.where, MISSED_HEARTBEATS, f"its process, {message}")

    def known(self, rank: int) -> Record:
        """The newest record of ``rank`` that this one has read, or one that says that nothing is known."""
        return self.seen.get(rank, UNSEEN).known

    def _write(self, store: dist.Store, **changes: Any) -> None:
        self.own = Record(self.beats, self.host, **{**self._describe(), **changes})
        store.set(f"record/{self.rank}", json.dumps(asdict(self.own)))
        self.beats += 1

    def _values(self, store: dist.Store, keys: Sequence[str]) -> Sequence[bytes]:
        """The values of ``keys``, which are made first: reading a missing one would wait for it."""
        new = [key for key in keys if key not in self._existing]
        if new:
            if not store.check(new):
                for key in new:
                    store.compare_set(key, "", NONE.decode())
            self._existing.update(new)
        values: Sequence[bytes] = store.multi_get(list(keys))
        return values

    def _see(self, seen: dict[int, Sighting], ranks: Sequence[int], values: Sequence[bytes]) -> None:
        now = self.clock()
        for rank, value in zip(ranks, values, strict=True):
            record = None
            if value != NONE:
                record = Record(**json.loads(value))
            if rank in seen:
                seen[rank] = seen[rank].then(record, now)
            else:
                seen[rank] = Sighting(record, now)

    def _neighbour(self) -> int:
        """The nearest member before this one that has not ended, as far as this rank knows."""
        at = self.members.index(self.rank)
        before = [*self.members[:at][::-1], *self.members[at + 1 :][::-1]]
        return next((rank for rank in before if not self.known(rank).has_ended), self.rank)

    def _missing(
        self, store: dist.Store, at: str, ranks: Sequence[int], waited_s: float
    ) -> RankFailure | None:
        """Who has not come to ``at``; None if another rank looks for them, or they have just come."""
        own = str(self.rank)
        if store.compare_set(f"{at}/lease", "", own).decode() != own:
            # If that rank has died, the others look for themselves the next time.
            store.set(f"{at}/lease", own)
            return None
        keys = {rank: f"{at}/{rank}" for rank in ranks}
        missing = [rank for rank, key in keys.items() if not store.check([key]) or store.get(key) == NONE]
        if not missing:
            return None
        self.read_records(store, missing[: failures.LONGEST_LIST], self.seen)
        first = self.seen[missing[0]]
        is_alive = first.record is not None and not first.is_silent(self.clock(), self.timeout_s)
        reader = f"rank {self.rank} waited {waited_s:.1f} s"
        return failures.did_not_arrive(missing, self.seen, is_alive, reader, f"code before {self.own.where}")

    def _serve(self) -> None:
        try:
            store = self._connect()
            if isinstance(without_prefixes(store), dist.FileStore):
                # A file keeps all that was ever written to it.
                self.interval_s = max(self.interval_s, self.timeout_s / BEATS_IN_A_FILE)
            next_beat_at = time.monotonic()
            while True:
                if time.monotonic() >= next_beat_at:
                    self.beat(store)
                    next_beat_at = time.monotonic() + self.interval_s
                until_beat_s = min(LONGEST_PAUSE_S, next_beat_at - time.monotonic())
                with contextlib.suppress(queue.Empty):
                    call = self._calls.get(timeout=max(0.0, until_beat_s))
                    if call is None:
                        break
                    function, answer = call
                    answer.set_result(function(store))
            if self.verdicts.get(self.path) is None:
                self._write(store, has_ended=True, has_left=True)
            self._become(BoardState.CLOSED)
        except (dist.DistError, OSError) as error:
            first_line = next(iter(str(error).splitlines()), "")
            self._lose(self.lost_store(f"ended or is out of reach ({type(error).__name__}: {first_line})"))
        except Exception as error:
            log.exception("The board between ranks has failed.")
            message = f"{message_of(error)}, raised in the thread that sends this rank's heartbeats"
            failure = RankFailure(self.rank, self.host, self.own.where, type(error).__name__, message)
            with contextlib.suppress(Exception):
                # The store may still work. Otherwise the others would only miss this rank's heartbeats.
                self.post(store, self.path, failure)
            self._lose(failure)
