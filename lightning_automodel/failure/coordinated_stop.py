"""All ranks stop after the same step when one of them gets SIGTERM, or SLURM's signal to requeue.

What a rank has done about it:

    nothing --- a request is known ---> promised --- all have promised ---> decided
       └────────── a request came after the last step: at the end of the run ──┘

Once it has promised, it takes no step after the current one until it is decided.
"""

import json
import threading
from collections.abc import Sequence

import torch.distributed as dist

from lightning_automodel.distributed.meeting import first, outcome_of, say

STOP = "stop"
STEPS = f"{STOP}/outcome"
REQUEUE = "requeue"


class StopAgreement:
    """Decides, by a meeting at which nobody waits, after which step all ranks stop.

    Ranks are not synchronised within a window, so they learn of a request in different steps. Each promises
    not to pass its current step, and waits at the start of the next one. Once all have promised, all stop
    one step after the farthest promised one, which none can have passed. Without a request, no rank
    communicates or waits.

    In the store, :data:`STOP` holds the request, the rank and its reason. Each rank says there the step that it
    promises; once all have, :data:`STEPS` holds them.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self._rank = rank
        self._ranks = ranks
        self._lock = threading.Lock()
        self._reason: str | None = None  # why this rank asks
        self.is_asked_here = False  # whether this rank asked to stop, also beside a request to requeue
        self._has_promised = False
        self._may_go_on = threading.Event()  # nothing is left to wait for: it is decided, or will never be
        self.step = 0  # that this rank is in, from 1
        self.last_step: int | None = None  # after which all ranks stop, once that is decided
        self.requeues = False  # whether they stop to save and requeue
        self.asked_by: int | None = None  # the first rank to ask

    def ask(self, reason: str = "") -> None:
        """Ask all ranks to stop, with :data:`REQUEUE` to save and requeue. Safe in a signal handler.

        If two requests come before a step ends, the one to requeue counts: SLURM may send SIGTERM beside its signal.
        """
        self._reason = self._reason or reason
        self.is_asked_here = self.is_asked_here or not reason

    def decide(self, last_step: int) -> None:
        """Note that all ranks stop after ``last_step``."""
        self.last_step = last_step
        self._may_go_on.set()

    def begin_step(self, step: int, longest_wait_s: float) -> bool:
        """Begin ``step``, which all ranks take, and return whether it is the last.

        If this rank has promised not to pass the one before, it waits for the decision, ``longest_wait_s``
        at most.
        """
        with self._lock:
            self.step = step
            waits = self._has_promised
        if waits:
            self._may_go_on.wait(longest_wait_s)
        return self.last_step is not None and self.step >= self.last_step

    def release(self) -> None:
        """Let a waiting step go on: there will be no decision."""
        self._may_go_on.set()

    def exchange(self, store: dist.Store, request: bytes, steps: bytes) -> None:
        """Take part; the heart of every rank calls this with each beat, with the newest values of the two keys."""
        asked = json.loads(request)
        if asked is None:
            if self._reason is not None:
                first(store, STOP, [self._rank, self._reason])
            return
        self.asked_by, reason = asked
        promised_by_all = outcome_of(steps)
        if promised_by_all is not None:
            self.requeues = reason == REQUEUE
            self.decide(1 + max(promised_by_all))
        elif not self._has_promised:
            # The lock keeps the main thread from beginning a step before its number, once read, is promised.
            with self._lock:
                self._has_promised = True
                promised = self.step
            say(store, STOP, self._rank, self._ranks, promised)
