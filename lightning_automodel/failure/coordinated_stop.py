"""All ranks stop after the same step when one of them gets SIGTERM, or SLURM's signal to requeue."""

import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_automodel.distributed.board import NONE, Record

STOP = "stop"
REQUEUE = "requeue"


class StopAgreement:
    """Decides, through the board, after which step all ranks stop.

    Ranks are not synchronised inside of a window, so they learn of a request in different steps. Each promises not to
    pass its current step, and waits at the start of the next. The last to promise decides: all stop one step after the
    farthest promised one, which none can have passed. Without a request no rank communicates or waits.

    The key :data:`STOP` holds the request, ``rank|reason``, and then the decision, ``rank|reason|step``.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        write: Writes this rank's record, with its promise.
        read: Reads all records.

    Attributes:
        promise: The step that this rank has promised not to pass; None before it has.
        step: The step that this rank is in, from 1; 0 before the first.
        last_step: The step after which all ranks stop; None before the decision.
        asked_by: The rank that asked first; None before a request.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        write: Callable[[dist.Store], None],
        read: Callable[[dist.Store], Sequence[Record]],
    ) -> None:
        self._rank, self._world_size, self._write, self._read = rank, world_size, write, read
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._is_decided = threading.Event()
        self.promise: int | None = None
        self.step = 0
        self.last_step: int | None = None
        self.asked_by: int | None = None
        self._requeues = False

    @property
    def requeues(self) -> bool:
        """Whether all ranks stop after the same step to save and requeue."""
        return self.last_step is not None and self._requeues

    @property
    def is_asked_here(self) -> bool:
        """Whether this rank asked to stop, and not to requeue."""
        return self._reason == ""

    def ask(self, reason: str = "") -> None:
        """Ask all ranks to stop; to save and requeue if ``reason`` is :data:`REQUEUE`. Safe in a signal handler."""
        self._reason = reason

    def begin_step(self, step: int, longest_wait_s: float) -> bool:
        """Begin ``step``, and return whether it is the last; wait if this rank has promised not to pass the one before.

        Every rank must call it at every step that all ranks take. Not a collective. Another rank may never promise, so
        it waits ``longest_wait_s`` seconds at most.
        """
        with self._lock:
            self.step = step
            has_promised = self.promise is not None
        if has_promised:
            self._is_decided.wait(longest_wait_s)
        return self.last_step is not None and self.step >= self.last_step

    def leave(self, store: dist.Store) -> None:
        """Promise to take no further step, so that a later request need not wait for this rank."""
        if self.promise is None:
            self._make_promise(store, 0)

    def release(self) -> None:
        """Let a waiting step go on: there will be no decision."""
        self._is_decided.set()

    def exchange(self, store: dist.Store, value: bytes) -> None:
        """Take part in the agreement; called repeatedly by a thread of every rank, with the newest value of the key."""
        if value == NONE and self._reason is not None:
            store.compare_set(STOP, NONE.decode(), f"{self._rank}|{self._reason}")
        elif value != NONE and self.last_step is None:
            asked_by, reason, *step = value.decode().split("|")
            self.asked_by, self._requeues = int(asked_by), reason == REQUEUE
            if step:
                self.last_step = int(step[0])
                self._is_decided.set()
            elif self.promise is None:
                self._make_promise(store)

    def _make_promise(self, store: dist.Store, step: int | None = None) -> None:
        # The lock keeps the main thread from beginning a step between reading its number and promising it.
        with self._lock:
            self.promise = self.step if step is None else step
        self._write(store)
        if store.add(f"{STOP}/arrived", 1) == self._world_size:
            request, last_step = store.get(STOP), 1 + max(record.promise or 0 for record in self._read(store))
            if request != NONE:
                store.set(STOP, f"{request.decode()}|{last_step}")
