"""All ranks stop after the same step when one of them gets SIGTERM, or SLURM's signal to requeue.

The states of a rank (:class:`StopState`), which only `StopAgreement._become` changes:

    RUNNING --- a request is known, or the run is over ---> PROMISED --- all have promised ---> DECIDED
"""

import json
import threading
from collections.abc import Callable
from enum import Enum, auto

import torch.distributed as dist

from lightning_automodel.distributed.board import NONE

STOP = "stop"
STEPS = f"{STOP}/result"
REQUEUE = "requeue"


class StopState(Enum):
    """How far this rank has come in agreeing on a last step."""

    RUNNING = auto()  # it takes steps, and knows of no request
    PROMISED = auto()  # it takes no step after the current one until all ranks have promised that
    DECIDED = auto()  # the last step is known


class StopAgreement:
    """Decides, through the board, after which step all ranks stop.

    Ranks are not synchronised within a window, so they learn of a request in different steps. Each promises
    not to pass its current step, and waits at the start of the next one. Once all have promised, all stop
    one step after the farthest promised one, which none can have passed. Without a request, no rank
    communicates or waits.

    :data:`STOP` holds the request, ``rank|reason``. ``arrive`` posts the step that this rank promises; once
    all ranks have posted theirs, :data:`STEPS` holds them.
    """

    def __init__(self, rank: int, arrive: Callable[[dist.Store, str], None]) -> None:
        self._rank = rank
        self._arrive = arrive
        self._lock = threading.Lock()
        self._reason: str | None = None  # why this rank asks
        self._state = StopState.RUNNING
        self._may_go_on = threading.Event()  # nothing is left to wait for: it is decided, or will never be
        self.step = 0  # that this rank is in, from 1
        self.last_step: int | None = None  # after which all ranks stop; from StopState.DECIDED on
        self.requeues = False  # whether they stop to save and requeue
        self.asked_by: int | None = None  # the first rank to ask

    def _become(self, state: StopState) -> None:
        """Change the state, here alone."""
        self._state = state
        if state is StopState.DECIDED:
            self._may_go_on.set()

    @property
    def is_decided(self) -> bool:
        """Whether all ranks stop, or have stopped, after the same step."""
        return self._state is StopState.DECIDED

    @property
    def is_asked_here(self) -> bool:
        """Whether this rank asked to stop, and not to requeue."""
        return self._reason == ""

    def ask(self, reason: str = "") -> None:
        """Ask all ranks to stop, with :data:`REQUEUE` to save and requeue. Safe in a signal handler."""
        self._reason = reason

    def begin_step(self, step: int, longest_wait_s: float) -> bool:
        """Begin ``step``, which all ranks take, and return whether it is the last.

        If this rank has promised not to pass the one before, it waits for the decision, ``longest_wait_s``
        at most.
        """
        with self._lock:
            self.step = step
            waits = self._state is not StopState.RUNNING
        if waits:
            self._may_go_on.wait(longest_wait_s)
        return self.last_step is not None and self.step >= self.last_step

    def leave(self, store: dist.Store) -> None:
        """Promise to take no further step, so that a later request need not wait for this rank."""
        if self._state is StopState.RUNNING:
            self._become(StopState.PROMISED)
            self._arrive(store, "0")

    def release(self) -> None:
        """Let a waiting step go on: there will be no decision."""
        self._may_go_on.set()

    def exchange(self, store: dist.Store, request: bytes, steps: bytes) -> None:
        """Take part; a thread of every rank calls this repeatedly, with the newest values of the two keys."""
        if request == NONE:
            if self._reason is not None:
                store.compare_set(STOP, NONE.decode(), f"{self._rank}|{self._reason}")
            return
        asked_by, reason = request.decode().split("|")
        self.asked_by = int(asked_by)
        if steps != NONE:
            self.requeues = reason == REQUEUE
            self.last_step = 1 + max(map(int, json.loads(steps)))
            self._become(StopState.DECIDED)
        elif self._state is StopState.RUNNING:
            # The lock keeps the main thread from beginning a step between reading its number and promising
            # it.
            with self._lock:
                self._become(StopState.PROMISED)
                promised = self.step
            self._arrive(store, str(promised))
