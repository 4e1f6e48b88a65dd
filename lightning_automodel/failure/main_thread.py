"""The main thread of a rank as its watchdog knows it: what it does, and how it is made to leave.

Its phases, which only `MainThread.become` changes:

    RUNNING --- it has raised ---> RAISED --- the cause is known ---> EXPLAINED ---+
       |                                                                           |
       +--- another rank failed, or all stop after the same step ---> LEAVING -----+--> CLOSED
       |                                                                           |
       +--- all ranks have come to the end of the run -----------------------------+

If another rank fails, it is interrupted after some seconds in RUNNING and RAISED, and the process is ended
if that does not help. It is not interrupted for a failure of its own that it has posted (RAISED, EXPLAINED).
"""

import signal
import threading
from enum import Enum, auto

from lightning_automodel.distributed import device_groups, failures
from lightning_automodel.distributed.failures import RankFailure
from lightning_automodel.distributed.last_resort import end_process

TIME_TO_RAISE_S = 2.0
TIME_TO_RAISE_AFTER_SILENCE_S = 0.5
TIME_TO_RAISE_AND_SAVE_S = 30.0
TIME_TO_FREE_DEVICE_S = 5.0


class Phase(Enum):
    """What the main thread does; see the module's docstring."""

    RUNNING = auto()  # the Trainer's function runs
    RAISED = auto()  # it posts what it has raised, or waits for the verdict
    EXPLAINED = auto()  # it leaves with the cause of what it has raised
    LEAVING = auto()  # it leaves, though not after a failure of its own
    CLOSED = auto()  # the watch is over


class MainThread:
    """The phase of this rank's main thread, and the way to make it leave.

    Another thread calls :meth:`make_leave`. ``raises_on_sigterm``: whether the main thread has a handler
    that raises.
    """

    def __init__(self, rank: int, raises_on_sigterm: bool) -> None:
        self.phase = Phase.RUNNING
        self._rank = rank
        self._raises_on_sigterm = raises_on_sigterm
        self._saves_on_exception = False
        self._changed = threading.Condition()

    def become(self, phase: Phase) -> None:
        """Change the phase, here alone, and wake the threads that wait for it. CLOSED is final."""
        with self._changed:
            if self.phase is not Phase.CLOSED:
                self.phase = phase
                self._changed.notify_all()

    def comes_to(self, seconds: float, *phases: Phase) -> bool:
        """Wait for one of the ``phases``, and return whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.phase in phases, seconds)

    @property
    def is_closed(self) -> bool:
        """Whether the watch is over."""
        return self.phase is Phase.CLOSED

    @property
    def has_posted_failure(self) -> bool:
        """Whether it has raised, so that a failure which names this rank is its own."""
        return self.phase in (Phase.RAISED, Phase.EXPLAINED)

    @property
    def is_leaving(self) -> bool:
        """Whether it leaves by itself."""
        return self.phase in (Phase.EXPLAINED, Phase.LEAVING)

    def save_on_exception(self) -> None:
        """Give it time to raise when another rank fails: it then saves a checkpoint alone."""
        self._saves_on_exception = True

    def make_leave(self, failure: RankFailure) -> None:
        """Make it leave because of ``failure``: gently, then by a signal, then by ending the process."""
        if device_groups.exist():
            self._free_from_device()
        else:
            # A rank that raised closes its connections as its process ends, which frees this one; a silent
            # rank does not.
            patience_s = TIME_TO_RAISE_S
            if self._saves_on_exception:
                patience_s = TIME_TO_RAISE_AND_SAVE_S
            elif failure.error == failures.MISSED_HEARTBEATS:
                patience_s = TIME_TO_RAISE_AFTER_SILENCE_S
            if self._leaves_within(patience_s):
                return
            self._interrupt()
            if self._leaves_within(patience_s):
                return
        if not self._leaves_within(0.0):
            end_process(self._rank, str(failure))

    def _free_from_device(self) -> None:
        """Interrupt it where it waits for its own device, from which no end of another rank frees it."""
        # The signal first: it is handled as soon as the call that the abort ends has returned.
        self._interrupt()
        threading.Thread(target=device_groups.abort, name="lightning_automodel abort", daemon=True).start()
        self._leaves_within(TIME_TO_FREE_DEVICE_S)

    def _interrupt(self) -> None:
        if self._raises_on_sigterm and hasattr(signal, "pthread_kill"):
            # Sent to the main thread itself, the signal also interrupts a system call in which it sleeps.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _leaves_within(self, seconds: float) -> bool:
        return self.comes_to(seconds, Phase.EXPLAINED, Phase.LEAVING, Phase.CLOSED)
