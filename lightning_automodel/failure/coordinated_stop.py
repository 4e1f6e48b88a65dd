"""All ranks stop after the same step when one of them gets SIGTERM, or SLURM's signal to requeue."""

import threading

import torch.distributed as dist

from lightning_automodel.distributed.store_channel import NONE

REQUEST, DECISION = "stop/request", "stop/step"
REQUEUE = "requeue"


class StopAgreement:
    """Decides, through a store, after which step all ranks stop.

    Ranks are not synchronised inside of a window, so they learn of a request in different steps. Each promises not to
    pass its current step, and waits at the start of the next. The last to promise decides: all stop one step after the
    farthest promised one, which none can have passed. Without a request no rank communicates or waits.

    Attributes:
        step: The step that this rank is in, from 1; 0 before the first.
        last_step: The step after which all ranks stop; None before the decision.
        asked_by: The rank that asked first; None before a request.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._promise: int | None = None
        self._is_decided = threading.Event()
        self._requeues = False
        self.step = 0
        self.last_step: int | None = None
        self.asked_by: int | None = None

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
            has_promised = self._promise is not None
        if has_promised:
            self._is_decided.wait(longest_wait_s)
        return self.last_step is not None and self.step >= self.last_step

    def leave(self, store: dist.Store) -> None:
        """Promise to take no further step, so that a later request need not wait for this rank."""
        if self._promise is None:
            self._make_promise(store, 0)

    def release(self) -> None:
        """Let a waiting step go on: there will be no decision."""
        self._is_decided.set()

    def exchange(self, store: dist.Store, request: bytes, decision: bytes) -> None:
        """Take part in the agreement; called repeatedly by a thread of every rank.

        ``request`` and ``decision`` are the newest values of :data:`REQUEST` and :data:`DECISION`, at first ``NONE``.
        """
        if decision != NONE:
            self.last_step = int(decision)
            self._is_decided.set()
        elif request == NONE and self._reason is not None:
            store.compare_set(REQUEST, NONE.decode(), f"{self._rank} {self._reason}")
        elif request != NONE and self._promise is None:
            asked_by, _, reason = request.decode().partition(" ")
            self.asked_by, self._requeues = int(asked_by), reason == REQUEUE
            self._make_promise(store)

    def _make_promise(self, store: dist.Store, step: int | None = None) -> None:
        # The lock keeps the main thread from beginning a step between reading its number and promising it.
        with self._lock:
            self._promise = self.step if step is None else step
        store.set(f"stop/promise/{self._rank}", str(self._promise))
        if store.add("stop/promises", 1) == self._world_size:
            promises = store.multi_get([f"stop/promise/{rank}" for rank in range(self._world_size)])
            store.set(DECISION, str(max(map(int, promises)) + 1))
