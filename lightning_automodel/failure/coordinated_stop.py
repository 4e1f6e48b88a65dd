"""All ranks stop after the same step when one of them gets SIGTERM, or SLURM's signal to requeue.

The states of a rank (:class:`StopState`), which only `StopAgreement._become` changes:

    RUNNING --- a request is known ---> PROMISED --- all have promised ---> DECIDED
       └─────────── a request came after the last step: at the end of the run ──┘
"""

import threading
from collections.abc import Sequence
from enum import Enum, auto

import torch.distributed as dist

from lightning_automodel.distributed.meeting import NONE, outcome_of, say

STOP = "stop"
STEPS = f"{STOP}/outcome"
REQUEUE = "requeue"


class StopState(Enum):
    """How far this rank has come in agreeing on a last step."""

    RUNNING = auto()  # it takes steps, and knows of no request
    PROMISED = auto()  # it takes no step after the current one until all ranks have promised that
    DECIDED = auto()  # the last step is known


class StopAgreement:
    """Decides, by a meeting at which nobody waits, after which step all ranks stop.

    Ranks are not synchronised within a window, so they learn of a request in different steps. Each promises
    not to pass its current step, and waits at the start of the next one. Once all have promised, all stop
    one step after the farthest promised one, which none can have passed. Without a request, no rank
    communicates or waits.

    In the store, :data:`STOP` holds the request, ``rank|reason``. Each rank says there the step that it
    promises; once all have, :data:`STEPS` holds them.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self._rank = rank
        self._ranks = ranks
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

    def decide_at_end(self) -> None:
        """All ranks stop, since all have learned at the end of their run that one of them was asked to."""
        self._become(StopState.DECIDED)

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

    def release(self) -> None:
        """Let a waiting step go on: there will be no decision."""
        self._may_go_on.set()

    def exchange(self, store: dist.Store, request: bytes, steps: bytes) -> None:
        """Take part; the heart of every rank calls this with each beat, with the newest values of the two keys."""
        if request.decode() == NONE:
            if self._reason is not None:
                store.compare_set(STOP, NONE, f"{self._rank}|{self._reason}")
            return
        asked_by, reason = request.decode().split("|")
        self.asked_by = int(asked_by)
        promised_by_all = outcome_of(steps, len(self._ranks))
        if promised_by_all is not None:
            self.requeues = reason == REQUEUE
            self.last_step = 1 + max(promised_by_all)
            self._become(StopState.DECIDED)
        elif self._state is StopState.RUNNING:
            # The lock keeps the main thread from beginning a step between reading its number and promising
            # it.
            with self._lock:
                self._become(StopState.PROMISED)
                promised = self.step
            say(store, STOP, self._rank, self._ranks, promised)
