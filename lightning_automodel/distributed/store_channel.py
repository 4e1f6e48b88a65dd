"""The one channel between ranks besides collectives: heartbeats, failures and waits, through the process group's store.

Below the channel's prefix the store holds

    heartbeat/<rank>    a counter, the rank's host and the hook or block that it is in; at the end "finished"
    <path>/failure      the first failure of the whole run, or of one first-rank block
    <path>/known        how many ranks know of that failure

Coordinated stops, the end of a run and first-rank blocks add keys, each below its own path.
"""

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_automodel.distributed import connections, rendezvous
from lightning_automodel.distributed.failures import LAUNCHER, MISSED_HEARTBEATS, STUCK, RankFailedError, RankFailure

log = logging.getLogger(__name__)
T = TypeVar("T")

BEAT_S = 0.25
RANKS_PER_SECOND = 1000
BEATS_IN_A_FILE = 40
SHORTEST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.5
JOIN_S = 1.0
LINGER_S = 5.0
LONGEST_GAP_S = 2.0

RUN = "run"
NONE = b"-"
FINISHED = b"finished"


class AwakeClock:
    """Seconds that this process has been running; must be read at least every second or so.

    A longer gap means that the process was suspended (SIGSTOP, a laptop's lid): ranks that were suspended together must
    go on together.
    """

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._awake_s = 0.0

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        now = time.monotonic()
        self._awake_s += min(now - self._asked_at, LONGEST_GAP_S)
        self._asked_at = now
        return self._awake_s


@dataclass(frozen=True)
class Heartbeat:
    """A rank's newest heartbeat: ``value`` as read from the store, and when this process first saw it."""

    value: bytes
    changed_at: float

    @property
    def finished(self) -> bool:
        """Whether the rank has finished."""
        return self.value == FINISHED

    @property
    def host(self) -> str:
        """Host name of the rank."""
        return self._parts()[1] or "an unknown host"

    @property
    def where(self) -> str:
        """The hook or block that the rank was in."""
        return self._parts()[2] or "set-up"

    def _parts(self) -> list[str]:
        parts = self.value.decode().split("|", 2)
        return parts if len(parts) == 3 else ["", "", ""]


def post_failure(store: dist.Store, path: str, failure: RankFailure) -> RankFailure:
    """Post ``failure`` at ``path`` unless there is one already; returns the first one."""
    return RankFailure.from_bytes(store.compare_set(f"{path}/failure", "", failure.to_bytes().decode()))


class StoreChannel:
    """A connection to the store of the default group, and the one thread that uses it; :meth:`close` ends both.

    Only the thread uses the connection: a call to a store whose host is stopped may block forever, and a ``TCPStore``
    client is blocked for all threads while one of them waits in it. The thread also reads failures ahead, since the
    store may be gone by the time that the rank asks for them.

    Args:
        prefix: Prefix of all keys; the same on all ranks of the channel.
        timeout_s: How long the store, or a rank that is waited for, may be silent.
        where: Returns the hook or block that this rank is in; called by the thread.
        exchange: Called by the thread after each heartbeat.

    Attributes:
        interval_s: Seconds between two heartbeats.
        beats: Number of heartbeats written.
        where: The hook or block that this rank was in at the newest of them.
        is_open: Set once the store has answered.
        has_ended: Set once the thread has ended.
        watched: For each path whose failures this rank reads, the failure that was found there, or None.
        heartbeats: Newest heartbeats of other ranks, as far as they were read.
        lost: Why the store cannot be used any more, or None.
    """

    def __init__(
        self,
        prefix: str,
        timeout_s: float,
        where: Callable[[], str],
        exchange: Callable[[dist.Store], None] = lambda store: None,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.rank, self.world_size, self.host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
        self.timeout_s, self._where, self._exchange = timeout_s, where, exchange
        self._prefix, self._group_store = prefix, world.get_group_store()
        # A file keeps all that was ever written to it, so heartbeats in one are rare.
        in_a_file = isinstance(connections.bottom_store(self._group_store), dist.FileStore)
        seldom_s = max(self.world_size / RANKS_PER_SECOND, timeout_s / BEATS_IN_A_FILE if in_a_file else 0.0)
        self.interval_s = min(max(BEAT_S, seldom_s), timeout_s / 4)
        self.beats, self.where = 0, ""
        self.is_open, self.has_ended = threading.Event(), threading.Event()
        self.heartbeats: dict[int, Heartbeat] = {}
        self.lost: RankFailure | None = None
        self.watched: dict[str, RankFailure | None] = {}
        self._clock = AwakeClock()
        self._calls: queue.SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="lightning_automodel channel", daemon=True)

    def start(self) -> None:
        """Start the thread. Not a collective."""
        self._thread.start()

    # --- Failures -----------------------------------------------------------------------------------------------------

    def raise_failure(self, path: str) -> None:
        """Raise ``RankFailedError`` if a failure was posted at ``path`` or ended the run, or the store is lost."""
        self.call(self.read_failures)
        for each in (path, RUN):
            if (failure := self.watched.get(each)) is not None:
                raise RankFailedError(failure)

    def wait_until_known(self, path: str, num_ranks: int, limit_s: float = LINGER_S) -> None:
        """Wait at most ``limit_s`` until ``num_ranks`` know how ``path`` ended: the store may end with this process."""
        clock, limit_s = AwakeClock(), min(limit_s, self.timeout_s)
        while clock() < limit_s and self.call(lambda store: store.add(f"{path}/known", 0), limit_s) < num_ranks:
            time.sleep(self._pause(clock()))

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def call(self, function: Callable[[dist.Store], T], patience_s: float = float("inf")) -> T:
        """Run ``function`` on the thread and return its result. The function must not wait for a key.

        Raises:
            RankFailedError: If the store is lost, or silent for the timeout or for ``patience_s`` seconds.
        """
        answer: Future[T] = Future()
        self._calls.put((function, answer))
        clock, patience_s = AwakeClock(), min(patience_s, self.timeout_s)
        while self.lost is None and not self.has_ended.is_set() and clock() <= patience_s:
            # In short waits, so that the clock can tell a silent store from a process that was suspended.
            with contextlib.suppress(TimeoutError, CancelledError):
                return answer.result(min(patience_s, LONGEST_PAUSE_S))
        if self.lost is None:
            self.lost = self.lost_store(f"has not answered for {patience_s:g} s")
        # The store often ends because of a failure that this rank knows already.
        raise RankFailedError(next((failure for failure in self.watched.values() if failure), self.lost))

    def wait_for(
        self,
        look: Callable[[dist.Store], T | None],
        pending: Callable[[dist.Store], Sequence[int]],
        path: str,
        limit_s: float,
    ) -> T:
        """Call ``look`` until it finds something, as long as ``pending`` ranks send heartbeats, or for ``limit_s``.

        Raises:
            RankFailedError: If a failure was posted at ``path`` or for the run, the store is lost, or ranks are silent
                or late.
        """
        clock, next_check_s = AwakeClock(), self.timeout_s / 10
        while True:
            self.raise_failure(path)
            if (found := self.call(look)) is not None:
                return found
            if clock() > next_check_s:
                # Not often, as every rank reads every other rank's heartbeats.
                next_check_s = clock() + self.timeout_s / 10
                ranks = self.call(pending)
                silent = self.call(lambda store, ranks=ranks: self.silent(store, ranks))  # type: ignore[misc]
                if silent or clock() > limit_s:
                    raise RankFailedError(self._missing(silent or list(ranks), clock()))
            time.sleep(self._pause(clock()))

    def gather(self, at: str, ranks: Sequence[int], value: str, path: str, limit_s: float) -> list[str]:
        """Wait like :meth:`wait_for` until all of ``ranks`` have posted a value below the key ``at``.

        Returns the values in the order of ``ranks``, the same on all of them.
        """
        keys = {rank: f"{at}/{rank}" for rank in ranks}

        def arrive(store: dist.Store) -> None:
            store.set(keys[self.rank], value)
            if store.add(f"{at}/arrived", 1) == len(keys):
                # The last rank collects the values, so that each rank reads one key.
                store.set(f"{at}/all", json.dumps([each.decode() for each in store.multi_get(list(keys.values()))]))

        def look(store: dist.Store) -> bytes | None:
            return store.get(f"{at}/all") if store.check([f"{at}/all"]) else None

        def absent(store: dist.Store) -> list[int]:
            return [rank for rank, key in keys.items() if not store.check([key])]

        self.call(arrive)
        values: list[str] = json.loads(self.wait_for(look, absent, path, limit_s))
        return values

    def close(self) -> None:
        """Post that this rank has finished, unless the run failed, and end the thread, unless it is stuck."""
        self._calls.put(None)
        self._thread.join(JOIN_S + 2 * self.interval_s)

    # --- For functions that the thread runs ---------------------------------------------------------------------------

    def read_failures(self, store: dist.Store) -> None:
        """Read new failures of the watched paths, and post that this rank knows of them."""
        for path, known in list(self.watched.items()):
            if known is None and store.check([f"{path}/failure"]):
                self.watched[path] = RankFailure.from_bytes(store.get(f"{path}/failure"))
                store.add(f"{path}/known", 1)

    def read_heartbeats(self, store: dist.Store, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """The newest heartbeat of each of ``ranks``."""
        keys = [f"heartbeat/{rank}" for rank in ranks]
        for rank, key in zip(ranks, keys, strict=True):
            if rank not in self.heartbeats:
                # Reading a missing key would wait for it.
                store.compare_set(key, "", NONE.decode())
        now = self._clock()
        for rank, value in zip(ranks, store.multi_get(keys) if keys else [], strict=True):
            if rank not in self.heartbeats or self.heartbeats[rank].value != value:
                self.heartbeats[rank] = Heartbeat(value, now)
        return {rank: self.heartbeats[rank] for rank in ranks}

    def silent(self, store: dist.Store, ranks: Sequence[int], limit_s: float | None = None) -> list[int]:
        """Unfinished ``ranks`` that have sent no heartbeat for ``limit_s`` seconds; None is the timeout."""
        beats, limit_s = self.read_heartbeats(store, ranks), self.timeout_s if limit_s is None else limit_s
        return [r for r, beat in beats.items() if not beat.finished and self._clock() - beat.changed_at > limit_s]

    def missed_heartbeats(self, rank: int) -> RankFailure:
        """The failure to report for a silent rank."""
        beat = self.heartbeats[rank]
        message = (
            f"rank {self.rank} has heard nothing of it for {self._clock() - beat.changed_at:.1f} s: stopped, killed or"
            " cut off"
        )
        return RankFailure(rank, beat.host, beat.where, MISSED_HEARTBEATS, message)

    # --- Wording ------------------------------------------------------------------------------------------------------

    def lost_store(self, what: str) -> RankFailure:
        """The failure to report if the store does not answer: of the process that holds it."""
        message = f"which holds the store of the process group, {what}"
        if rendezvous.launcher_hosts_store():
            return RankFailure(LAUNCHER, self.host, "", MISSED_HEARTBEATS, message)
        beat = self.heartbeats.get(0, Heartbeat(NONE, 0.0))
        return RankFailure(0, beat.host, beat.where, MISSED_HEARTBEATS, f"its process, {message}")

    def _missing(self, ranks: list[int], waited_s: float) -> RankFailure:
        beats = {rank: self.heartbeats[rank] for rank in ranks}
        listed = ", ".join(f"{rank} ({beat.host}, in {beat.where})" for rank, beat in beats.items())
        rank, beat = next(iter(beats.items()))
        is_alive = beat.value != NONE and self._clock() - beat.changed_at <= self.timeout_s
        why = "alive, but did not arrive" if is_alive else "stopped, dead, cut off, or not arrived yet"
        message = f"rank {self.rank} waited {waited_s:.1f} s for ranks {listed}: {why}"
        where = f"code before {self._where()}" if beat.value == NONE else beat.where
        return RankFailure(rank, beat.host, where, STUCK if is_alive else MISSED_HEARTBEATS, message)

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            store = self._connect()
            next_beat_at = time.monotonic()
            while True:
                self._clock()
                if time.monotonic() >= next_beat_at:
                    self._beat(store)
                    next_beat_at = time.monotonic() + self.interval_s
                pause_s = min(LONGEST_PAUSE_S, next_beat_at - time.monotonic())
                with contextlib.suppress(queue.Empty):
                    call = self._calls.get(timeout=max(0.0, pause_s))
                    if call is None:
                        break
                    function, answer = call
                    answer.set_result(function(store))
            if self.watched.get(RUN) is None:
                store.set(f"heartbeat/{self.rank}", FINISHED.decode())
        except Exception as error:
            if not isinstance(error, (dist.DistError, OSError)):
                log.exception("The channel between ranks has failed.")
            first_line = next(iter(str(error).splitlines()), "")
            self.lost = self.lost or self.lost_store(f"ended or is out of reach ({type(error).__name__}: {first_line})")
        finally:
            self.has_ended.set()
            while not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call[1].cancel()

    def _connect(self) -> dist.Store:
        if (address := connections.store_address(self._group_store)) is not None:
            # Raises at once if the host is gone; a client would retry for the whole timeout and more.
            socket.create_connection(address, timeout=self.timeout_s).close()
        store = self._group_store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return dist.PrefixStore(self._prefix, store)

    def _beat(self, store: dist.Store) -> None:
        try:
            self.where = self._where()
        except Exception:
            # The function reads the Trainer while the main thread changes it.
            self.where = "an unknown hook"
        store.set(f"heartbeat/{self.rank}", f"{self.beats}|{self.host}|{self.where}")
        self.read_failures(store)
        self._exchange(store)
        self.beats += 1
        self.is_open.set()

    def _pause(self, waited_s: float) -> float:
        """Seconds until the store is asked again: the longer a wait takes, the less often."""
        return min(self.interval_s, LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s / 10))
