"""Runs the Trainer's function so that all ranks leave together; `failure.watch` makes a rank leave.

What a supervisor knows of its rank:

    has_failed          its run has raised: it leaves after a failure of its own or of another rank, or a stop of all
    watch               the watch over the others; None before they have joined, after the run, and on a single rank
    _handler            of SIGTERM, while it is set
"""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_automodel.distributed import process_group
from lightning_automodel.distributed.failures import (
    PROCESS_ENDED,
    RankFailedError,
    RankFailure,
    is_communication_error,
    message_of,
)
from lightning_automodel.distributed.last_resort import limited
from lightning_automodel.failure.watch import Watch
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import process_groups

log = logging.getLogger(__name__)

SIGTERM_STATUS = 128 + signal.SIGTERM
LONGEST_LEAVING_S = 30.0


class Supervisor:
    """Makes one ``fit``, ``validate``, ``test`` or ``predict`` of all ranks end together.

    An exception on this rank is posted for the others. If it only follows from another rank's failure, that
    is raised instead. SIGTERM on any rank ends the run of all ranks after the same step.

    ``join`` joins the other ranks, and calls :meth:`start_watch`. ``before_posting`` is called after an exception
    on this rank, before the others learn of it and leave. ``weights_only`` is what the user gave to ``fit``
    under this name. A launcher may set ``find_ended``, which returns the ranks of processes that it has started
    and that have ended since the last call, and how they ended.
    """

    def __init__(self, join: Callable[[], None], before_posting: Callable[[], None]) -> None:
        self._join = join
        self._before_posting = before_posting
        self.watch: Watch | None = None
        self._handler = contextlib.ExitStack()  # of SIGTERM, while it is set
        self.has_failed = False
        self.weights_only: bool | None = None
        self.find_ended: Callable[[], dict[int, str]] = dict  # {}: none has ended

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Join the other ranks, and call ``function``; RankFailedError if another rank failed."""
        self.has_failed = False
        self.weights_only = lightning_internals.told_weights_only(function, args, kwargs)
        try:
            self._join()
            result = function(*args, **kwargs)
            self._end_together()
            return result
        except lightning_internals.TunerExitException:
            self._end()
            raise
        except BaseException as exception:
            self.has_failed = True
            self._leave(exception)
            raise

    # --- The way out of a rank whose run has raised -----------------------------------------------

    def _leave(self, exception: BaseException) -> None:
        """Say why, tell the others, and free this rank; raises the other rank's failure that was the cause.

        Nothing here may hide ``exception``, or wait without a limit. Afterwards Lightning calls
        ``on_exception`` hooks and tears down: with groups of an accelerator, both would wait for collectives
        that nobody joins any more.
        """
        if isinstance(exception, lightning_internals.SIGTERMException):
            exception.code = exception.code or SIGTERM_STATUS
        watch = self.watch
        if watch is None:  # a single rank
            return
        process_group.note_failure()
        if self._stops_together and isinstance(exception, lightning_internals.SIGTERMException):
            # They may still save together, watched until `close`, and nobody is stuck.
            watch.leave()
            return

        # What must be said before anything that may not return, as groups of an accelerator.
        has_devices = bool(process_groups.accelerator_backends())
        if watch.failure is None:
            watch.note_raised(exception)
            if has_devices:
                log.error("rank %d raised, and leaves:", watch.rank, exc_info=exception)
            self._before_posting()

        # Who failed: this rank, another one that is known, or one that the records tell.
        try:
            culprit = self._post_cause(watch, exception)
        finally:
            watch.leave()

        # The way out.
        if culprit is not None:
            log.error("This rank stops: %s.", str(culprit).rstrip("."))
        if has_devices:
            # Groups of the hosts stay, to save a checkpoint.
            with _limited("aborting its process groups"), contextlib.suppress(Exception):
                process_groups.abort_accelerators()
                # What `on_exception` hooks read has no limit: end here if the device is not free.
                torch.accelerator.synchronize()
        if culprit is not None:
            if culprit.error == KeyboardInterrupt.__name__:
                # Ctrl-C reaches all ranks of a terminal, but one that waits in a collective may first learn
                # of another rank's interrupt. On both it is the user's wish, not a failure with a traceback.
                raise KeyboardInterrupt from exception
            raise RankFailedError(culprit) from exception

    def _post_cause(self, watch: Watch, exception: BaseException) -> RankFailure | None:
        """Tell the others why this rank leaves; returns another rank's failure if that is the cause.

        Whoever has raised keeps its own exception, though another one may have been posted first.
        """
        if isinstance(exception, RankFailedError):
            return watch.post(exception.failure)
        own = watch.own or RankFailure.from_exception(exception, watch.rank, watch.where())
        if not is_communication_error(exception):
            watch.post(own)
            return None
        culprit = watch.failure or watch.why(own)
        if culprit.rank != own.rank:
            return culprit
        note = culprit.message.removeprefix(own.message).strip()  # what the records tell besides
        if note:
            exception.add_note(note)
        return None

    @contextlib.contextmanager
    def tearing_down(self) -> Iterator[None]:
        """Context for Lightning's teardown. After a failure, it takes half a minute at most, and raises nothing.

        An error of the clean-up, often because the device has failed, would hide the cause.
        """
        if not self.has_failed:
            yield
            return
        with _limited("tearing down"):
            try:
                yield
            except Exception as error:
                log.warning("Tearing down after a failure has raised too: %r", error)

    def check_processes(self) -> None:
        """While joining: raise RankFailedError if a process that this one has started has ended."""
        for rank, how in self.find_ended().items():
            message = f"before all ranks had joined, its process {how}"
            raise RankFailedError(RankFailure(rank, socket.gethostname(), "set-up", PROCESS_ENDED, message))

    def start_watch(
        self,
        rank: int,
        num_ranks: int,
        connection: dist.Store,
        timeout: timedelta,
        heartbeat_timeout: timedelta,
        where: Callable[[], str],
    ) -> None:
        """Start to watch the other ranks; every rank must call it. A thread asks ``where`` this rank is: its hook.

        Called as soon as the ranks have met in the store, to which the ``connection`` is, and before they connect
        to each other. A collective may wait for ``timeout``. A rank may be silent for ``heartbeat_timeout``, and
        before its first heartbeat for any time, unless all have just joined.
        """
        self._end()
        if num_ranks == 1:
            return
        if not faulthandler.is_enabled():
            # Gloo aborts where collectives do not match: only this shows the line. Notebooks may refuse.
            with contextlib.suppress(Exception):
                faulthandler.enable()
        have_just_joined = not dist.is_initialized()
        number = 0 if have_just_joined else process_group.next_number("runs")
        store = dist.PrefixStore(f"run/{number}", connection)
        self.watch = Watch(rank, num_ranks, store, timeout, heartbeat_timeout, where, have_just_joined)
        self.watch.find_ended = self.find_ended
        self.watch.interrupts = self._patch_sigterm()
        self.watch.start()

    @property
    def _stops_together(self) -> bool:
        """Whether all ranks stop, or have stopped, after the same step, and none has failed since."""
        watch = self.watch
        return watch is not None and watch.stop.last_step is not None and watch.failure is None

    @property
    def is_alone(self) -> bool:
        """Whether this rank must save and decide without the others: after a failure, but not at a stop of all."""
        return self.watch is not None and self.has_failed and not self._stops_together

    def close(self) -> None:
        """After a failure, end the watch and destroy this package's process groups, in half a minute at most."""
        if not self.has_failed:
            return
        stops_together = self._stops_together
        self._end()
        if process_group.group_size() > 1:
            with _limited("destroying its process groups"):
                process_group.leave_after_failure(aborts=not stops_together)

    def _end(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        self._handler.close()

    def _end_together(self) -> None:
        """End the watch with the other ranks: a failure or a SIGTERM after the last step shows in no step."""
        if self.watch is None:
            return
        asked = self.watch.end()
        if any(asked):
            # No failure of this rank: another one may not have read yet that all have come.
            self.watch.stop.decide(self.watch.stop.step)
            log.warning(
                "Rank %s received SIGTERM: all ranks stop at the end of this run.", asked.index(True)
            )
        if any(asked) or self.watch.stop.is_asked_here:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        self._end()

    def _patch_sigterm(self) -> bool:
        """Set the handler, where this is the main thread; returns whether it is set."""
        handler = partial(self._on_sigterm, os.getpid(), signal.getsignal(signal.SIGTERM))
        self._handler.enter_context(process_group.patched_signal(signal.SIGTERM, handler))
        return signal.getsignal(signal.SIGTERM) is handler

    def _on_sigterm(self, process: int, previous: Any, signum: int, frame: Any) -> None:
        """Before the first step, leave at once; later, leave with all ranks after the same step.

        The handler is for the ``process`` that has set it, and calls the ``previous`` one.
        """
        if os.getpid() != process:
            # A child that was forked from this process has nothing to do with its run.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if self.has_failed:  # a launcher sends SIGTERM to the remaining ranks: let this one report the cause
            return
        watch = self.watch
        if watch is not None and watch.failure is not None:
            if frame is not None and frame.f_code is Supervisor.run.__code__:
                return  # the function has returned or raised: what comes next asks for the failure
            watch.raise_failure()
        if callable(previous):
            previous(signum, frame)
        if watch is None or watch.stop.step == 0:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        watch.stop.ask()


def _limited(what: str) -> contextlib.AbstractContextManager[None]:
    """Context of ``what`` a rank does as it leaves: after half a minute its process ends, with what it has raised."""
    why = f"{what} took over {LONGEST_LEAVING_S:g} s"
    exception = sys.exception()
    if exception is not None:
        why = f"{type(exception).__name__}: {message_of(exception)}; {why}"
    return limited(LONGEST_LEAVING_S, process_group.group_rank(), why)
