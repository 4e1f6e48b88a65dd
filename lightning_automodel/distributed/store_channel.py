"""A connection to the store of the default process group on which ranks wait for each other, with signs of life."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_automodel import torch_internals
from lightning_automodel.distributed.failures import NO_SIGN_OF_LIFE, RankFailedError, RankFailure

T = TypeVar("T")

GRACE_S = 5.0
LONGEST_BEAT_S = 1.0
SHORTEST_POLL_S = 0.002
LONGEST_POLL_S = 0.25
RANKS_PER_SECOND = 1000
JOIN_S = 1.0


def failure_of(error: BaseException, rank: int, where: str) -> RankFailure:
    """What to tell the others: the failure that ``error`` brought to this rank, else ``error`` itself."""
    return error.failure if isinstance(error, RankFailedError) else RankFailure.from_exception(error, rank, where)


def post_failure(store: dist.Store, path: str, failure: RankFailure) -> None:
    """Post ``failure`` for those who watch ``path``, unless there is one already."""
    store.compare_set(f"{path}/failure", "", failure.to_bytes().decode())


class StoreLink:
    """A connection to the store, and the thread that owns it; :meth:`close` ends both.

    Only the thread touches the connection, because a call to a store whose host is stopped may block for ever. Between
    calls it beats: every second, or five times within a shorter ``timeout``, it raises this rank's number below
    ``beat/``. It also reads the failure of what this rank watches, as the store may be gone when the rank asks for it.

    Args:
        keys: Prefix of all keys.
        where: How failures call what this rank is in.
        timeout: How long the store, or a rank that is waited for, may be silent.

    Attributes:
        rank: This rank in the default group.
        where: As given.
        hosts: Machine of each rank, as far as known; for messages.
    """

    def __init__(self, keys: str, where: str, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.where = where
        self.hosts: dict[int, str] = {}
        self._timeout_s = timeout.total_seconds()
        self._beat_s = min(LONGEST_BEAT_S, self._timeout_s / 5)
        self._longest_poll_s = max(LONGEST_POLL_S, dist.get_world_size() / RANKS_PER_SECOND)
        self._watched = ""
        self._failure: RankFailure | None = None
        self._lost: RankFailure | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve,
            args=(torch_internals.default_store(), keys),
            name="lightning_automodel store link",
            daemon=True,
        )
        self._thread.start()

    def watch(self, path: str) -> None:
        """From now on, notice and acknowledge a failure that is posted at ``path``."""
        self._watched = path

    def call(self, function: Callable[[dist.Store], T], patience_s: float = float("inf")) -> T:
        """Run ``function`` on the thread and return its result. It must not wait for a key.

        Raises:
            RankFailedError: If the store is lost, or silent for ``timeout`` or for ``patience_s`` seconds.
        """
        answer: Future[T] = Future()
        patience_s = min(patience_s, self._timeout_s)
        if self._lost is None:
            self._calls.put((function, answer))
            try:
                result = answer.result(patience_s)
            except TimeoutError:
                self._lost = self._store_failure(f"has not answered for {patience_s:g} s")
        if self._lost is not None:
            raise RankFailedError(self._failure or self._lost)
        return result

    def raise_posted_failure(self) -> None:
        """Raise the failure that was posted, if any.

        Raises:
            RankFailedError: With the failure, or if the store is lost.
        """
        self.call(self._read_failure)
        if self._failure is not None:
            raise RankFailedError(self._failure)

    def wait_for(self, look: Callable[[dist.Store], T | None], pending: Callable[[dist.Store], Sequence[int]]) -> T:
        """Look until there is something, as long as those who are waited for give signs of life.

        Args:
            look: Returns what it found, else None.
            pending: Returns the ranks that are still waited for.

        Raises:
            RankFailedError: If a failure was posted, a rank is silent for ``timeout``, or the store is lost.
        """
        silence = _Silence(self._timeout_s)
        for _ in self.poll():
            found = self.call(look)
            self.raise_posted_failure()
            if found is not None:
                return found
            if silence.is_due():
                silence.note(self.call(lambda store: {rank: store.add(f"beat/{rank}", 0) for rank in pending(store)}))
                self._raise_if_silent(silence)
        raise AssertionError("unreachable: it polls for ever")

    def wait_for_acknowledgements(self, ranks: Sequence[int]) -> None:
        """Stay some seconds for all ``ranks`` to acknowledge the outcome of what is watched."""
        keys = [f"{self._watched}/ack/{rank}" for rank in ranks]
        for _ in self.poll(GRACE_S):
            if self.call(lambda store: store.check(keys), GRACE_S):
                return

    def acknowledge(self, store: dist.Store) -> None:
        """Tell that this rank knows the outcome of what it watches. To be called on the thread."""
        store.set(f"{self._watched}/ack/{self.rank}", "")

    def poll(self, duration_s: float = float("inf")) -> Iterator[None]:
        """Yield at once, and then again and again for some seconds, the more seldom the longer it takes."""
        started_at = time.monotonic()
        while (waited_s := time.monotonic() - started_at) < duration_s:
            yield
            time.sleep(min(self._longest_poll_s, max(SHORTEST_POLL_S, waited_s / 10)))

    def close(self) -> None:
        """End the thread and the connection. A thread that is stuck in the store is left behind."""
        self._calls.put(None)
        self._thread.join(JOIN_S)

    def _raise_if_silent(self, silence: "_Silence") -> None:
        if not silence.ranks:
            return
        ranks = ", ".join(f"{rank} ({self._host(rank)})" for rank in silence.ranks)
        message = (
            f"rank {self.rank} has heard nothing for {silence.longest_s:.1f} s (timeout {self._timeout_s:g} s) from "
            f"ranks {ranks}: stopped, dead, cut off, or not come yet"
        )
        rank = silence.ranks[0]
        where = self.where if rank in self.hosts else f"code before {self.where}"
        raise RankFailedError(RankFailure(rank, self._host(rank), where, NO_SIGN_OF_LIFE, message))

    def _store_failure(self, what: str) -> RankFailure:
        message = (
            f"the store of the default process group {what}; it lives in the process of rank 0 or of the launcher, "
            "which ended, is stopped or out of reach"
        )
        return RankFailure(0, self._host(0), self.where, NO_SIGN_OF_LIFE, message)

    def _host(self, rank: int) -> str:
        return self.hosts.get(rank, "unknown host")

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _serve(self, default_store: dist.Store, keys: str) -> None:
        # A client of a TCPStore is blocked for all threads while one of them waits in it: hence one of our own.
        store = self._attempt(lambda store: dist.PrefixStore(keys, store.clone()), default_store)
        next_beat_at = time.monotonic()
        while True:
            if time.monotonic() >= next_beat_at:
                self._attempt(self._beat, store)
                next_beat_at = time.monotonic() + self._beat_s
            with contextlib.suppress(queue.Empty):
                call = self._calls.get(timeout=max(0.0, next_beat_at - time.monotonic()))
                if call is None:
                    return
                function, answer = call
                answer.set_result(self._attempt(function, store))

    def _attempt(self, function: Callable[[Any], T], store: Any) -> T | None:
        """Do something with the store, unless it is lost; note it if that loses it."""
        if self._lost is None:
            try:
                return function(store)
            except Exception as error:
                self._lost = self._store_failure(f"is lost ({type(error).__name__}: {str(error).splitlines()[0]})")
        return None

    def _beat(self, store: dist.Store) -> None:
        store.add(f"beat/{self.rank}", 1)
        self._read_failure(store)

    def _read_failure(self, store: dist.Store) -> None:
        key = f"{self._watched}/failure"
        if self._failure is None and self._watched and store.check([key]):
            self._failure = RankFailure.from_bytes(store.get(key))
            self.acknowledge(store)


class _Silence:
    """For how long each rank that is waited for has not beaten, counted from now on.

    Attributes:
        ranks: Those that are silent for longer than the timeout.
        longest_s: How long the longest of them is.
    """

    def __init__(self, timeout_s: float) -> None:
        self.ranks: list[int] = []
        self.longest_s = 0.0
        self._timeout_s = timeout_s
        self._started_at = time.monotonic()
        self._next_at = self._started_at + timeout_s / 10
        self._heard: dict[int, tuple[int, float]] = {}

    def is_due(self) -> bool:
        """Whether it is time to look at the beats again: not often, as everybody looks at everybody's."""
        return time.monotonic() >= self._next_at

    def note(self, beats: dict[int, int]) -> None:
        """Take in the current beats of the ranks that are waited for."""
        now = time.monotonic()
        self._next_at = now + self._timeout_s / 10
        for rank, beat in beats.items():
            if rank not in self._heard:
                self._heard[rank] = (beat, self._started_at)
            elif self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
        silent_s = {rank: now - self._heard[rank][1] for rank in beats}
        self.ranks = [rank for rank in beats if silent_s[rank] > self._timeout_s]
        self.longest_s = max(silent_s.values(), default=0.0)
