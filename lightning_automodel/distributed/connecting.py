"""The watch while groups of an accelerator connect: the main thread is in a backend that may wait for ever."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.board import LINGER_S, Board
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, Sighting
from lightning_automodel.distributed.join import JOIN, Joined
from lightning_automodel.distributed.last_resort import end_process

log = logging.getLogger(__name__)

CONNECTING = "connecting the groups of its accelerator"
LONGEST_SILENCE_S = 60.0
POLL_S = 0.1
ADVICE = (
    "check that NCCL_SOCKET_IFNAME names the interface by which the ranks' machines reach each other, and"
    " set NCCL_DEBUG=INFO, which prints what NCCL tries"
)


@contextlib.contextmanager
def connecting(joined: Joined, timeout: timedelta, is_eager: bool) -> Iterator[dist.Store]:
    """Context in which the default group is made. It gives the group's store, and closes the board of joining.

    If the group connects at once (``is_eager``), ranks go on sending heartbeats meanwhile, and a thread of
    each ends its process, with the cause, when another one fails or falls silent, or after ``timeout``.
    After a minute, or half of the timeout, it warns of the ranks that have not connected. An exception on
    this rank is posted for the others.
    """
    board = joined.board
    if board is None or not is_eager:
        if board is not None:
            board.close()
        yield joined.store
        return
    watch = _ConnectWatch(board, timeout.total_seconds())
    try:
        yield _connection(joined.store, timeout)
    except BaseException as error:
        watch.tell(error)
        raise
    finally:
        watch.close()
        board.close()


def _connection(store: dist.Store, timeout: timedelta) -> dist.Store:
    """Another connection to the store: a connection in which a backend waits serves no other thread."""
    try:
        connection: dist.Store = store.clone()  # type: ignore[attr-defined]
        connection.set_timeout(timeout)
    except (RuntimeError, AttributeError):  # a store that cannot be cloned, or a class of the caller's
        return store
    return connection


class _ConnectWatch:
    """The thread that watches while the main thread connects."""

    def __init__(self, board: Board, timeout_s: float) -> None:
        self._board = board
        self._timeout_s = timeout_s
        self._warn_after_s = min(LONGEST_SILENCE_S, timeout_s / 2)
        board.describe_as({"where": CONNECTING}, self._warn_after_s)
        self._is_over = threading.Event()
        name = "lightning_automodel connecting"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def tell(self, error: BaseException) -> None:
        """Post for the other ranks that this one has failed: they would wait for it."""
        failure = RankFailure.from_exception(error, self._board.rank, CONNECTING)
        with contextlib.suppress(RankFailedError):
            self._board.call(lambda store: self._board.post(store, JOIN, failure), LINGER_S)
            self._board.conclude(JOIN, len(self._board.members))

    def _watch(self) -> None:
        began_at = time.monotonic()
        board = self._board
        while not self._is_over.wait(POLL_S):
            waited_s = time.monotonic() - began_at
            failure = board.verdicts[JOIN] or board.lost
            if failure is not None and failure.rank != board.rank:
                self._end(f"{failure}, while the groups of the accelerator connect: {ADVICE}")
            elif waited_s > self._timeout_s:
                self._end(self._explain(waited_s))
            elif waited_s > self._warn_after_s:
                self._warn_after_s = float("inf")
                log.warning(self._explain(waited_s))

    def _end(self, why: str) -> None:
        # Rank 0 may host the store, from which the others are to learn the cause.
        self._board.conclude(JOIN, len(self._board.members))
        if not self._is_over.is_set():
            end_process(self._board.rank, why)

    def _explain(self, waited_s: float) -> str:
        """Who has not connected, as far as their heartbeats tell."""
        board = self._board
        seen: dict[int, Sighting] = {}
        with contextlib.suppress(RankFailedError):
            board.call(lambda store: board.read_records(store, board.members, seen), LINGER_S)
        waiting = [rank for rank, sighting in seen.items() if not sighting.known.has_ended]
        return (
            f"rank {board.rank} has waited {waited_s:.0f} s for the groups of its accelerator to connect."
            f" Not connected: rank {failures.list_seen(waiting, seen)}: {ADVICE}"
        )
