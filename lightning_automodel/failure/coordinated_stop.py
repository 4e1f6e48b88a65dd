"""All ranks stop after the same step when one of them gets SIGTERM, or SLURM's signal to requeue."""

import json
import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_automodel.distributed.board import NONE

STOP = "stop"
STEPS = f"{STOP}/result"
REQUEUE = "requeue"


class StopAgreement:
    """Decides, through the board, after which step all ranks stop.

    Ranks are not synchronised inside of a window, so they learn of a request in different steps. Each promises not to
    pass its current step, and waits at the start of the next. Once all have promised, all stop one step after the
    farthest promised one, which none can have passed. Without a request no rank communicates or waits.

    :data:`STOP` holds the request, ``rank|reason``, and :data:`STEPS` all steps that ranks promised by ``arrive``.
    """

    def __init__(self, rank: int, arrive: Callable[[dist.Store, str], None]) -> None:
        self._rank, self._arrive = rank, arrive
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._is_decided = threading.Event()
        self._has_promised = False
        self.step = 0  # that this rank is in, from 1
        self.last_step: int | None = None  # after which all ranks stop
        self.requeues = False  # whether they stop to save and requeue
        self.asked_by: int | None = None  # the first rank to ask

    @property
    def is_asked_here(self) -> bool:
        """Whether this rank asked to stop, and not to requeue."""
        return self._reason == ""

    def ask(self, reason: str = "") -> None:
        """Ask all ranks to stop; to save and requeue if ``reason`` is :data:`REQUEUE`. Safe in a signal handler."""
        self._reason = reason

    def begin_step(self, step: int, longest_wait_s: float) -> bool:
        """Begin ``step``, which all ranks take, and return whether it is the last.

        If this rank has promised not to pass the one before, it waits for the decision, ``longest_wait_s`` at most.
        """
        with self._lock:
            self.step, has_promised = step, self._has_promised
        if has_promised:
            self._is_decided.wait(longest_wait_s)
        return self.last_step is not None and self.step >= self.last_step

    def leave(self, store: dist.Store) -> None:
        """Promise to take no further step, so that a later request need not wait for this rank."""
        if not self._has_promised:
            self._has_promised = True
            self._arrive(store, "0")

    def release(self) -> None:
        """Let a waiting step go on: there will be no decision."""
        self._is_decided.set()

    def exchange(self, store: dist.Store, request: bytes, steps: bytes) -> None:
        """Take part; called repeatedly by a thread of every rank, with the newest values of the two keys."""
        if request == NONE:
            if self._reason is not None:
                store.compare_set(STOP, NONE.decode(), f"{self._rank}|{self._reason}")
            return
        asked_by, reason = request.decode().split("|")
        self.asked_by = int(asked_by)
        if steps != NONE:
            self.requeues = reason == REQUEUE
            self.last_step = 1 + max(map(int, json.loads(steps)))
            self._is_decided.set()
        elif not self._has_promised:
            # The lock keeps the main thread from beginning a step between reading its number and promising it.
            with self._lock:
                self._has_promised, promised = True, self.step
            self._arrive(store, str(promised))
