"""The Trainer's function runs inside of this, so that all ranks leave together."""

import logging
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning_automodel import _compat, process_group
from lightning_automodel.failures import RankFailedError
from lightning_automodel.watchdog import Watchdog

log = logging.getLogger(__name__)

SIGTERM_STATUS = 128 + signal.SIGTERM
LINGER_AFTER_FAILURE_S = 2.0


class RunGuard:
    """Makes one ``fit``, ``validate``, ``test`` or ``predict`` of all ranks end together.

    An exception on this rank is posted for the others. If it only follows from the failure of another rank, that one
    is raised in its place. SIGTERM on any rank ends the run of all ranks after the same step.
    """

    def __init__(self) -> None:
        self._watchdog: Watchdog | None = None
        self._where: Callable[[], str] = lambda: "set-up"
        self._silence_s = 0.0
        self._previous_handler: Any = None
        self._handles_sigterm = False
        self._has_failed = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, which may call :meth:`watch` as soon as the process group exists.

        Raises:
            RankFailedError: If another rank failed; from the exception that this led to here.
        """
        self._has_failed = False
        try:
            return function(*args, **kwargs)
        except _compat.TunerExitException:
            raise
        except BaseException as exception:
            self._has_failed = True
            self._raise_cause(exception)
            raise
        finally:
            self._give_back_sigterm()

    def watch(self, silence: timedelta, where: Callable[[], str]) -> None:
        """Start to watch the other ranks; nothing in a world of one. Every rank must call it, after joining.

        Args:
            silence: How long another rank may give no sign of life.
            where: Tells the hook that this rank is in; called by another thread.
        """
        self.close()
        if process_group.get_world_size_safe() == 1:
            return
        self._where, self._silence_s = where, silence.total_seconds()
        self._watchdog = Watchdog(silence, where)
        self._take_sigterm()
        self._watchdog.start()

    def report_end(self, rank: int, how: str) -> bool:
        """Post that the process of ``rank`` ended, unless it has posted why; False before the ranks have joined."""
        if self._watchdog is None:
            return False
        self._watchdog.report_end(rank, how)
        return True

    def begin_step(self) -> bool:
        """Count a step that every rank takes.

        Returns:
            Whether all ranks stop after this step, since one of them received SIGTERM.

        Raises:
            RankFailedError: If another rank failed before they had agreed on it.
        """
        if self._watchdog is None:
            return False
        is_last = self._watchdog.stop.begin_step(self._silence_s)
        if self._watchdog.failure is not None:
            raise RankFailedError(self._watchdog.failure)
        if is_last:
            log.warning("Rank %s received SIGTERM: all ranks stop after this step.", self._watchdog.stop.asked_by)
        return is_last

    def close(self) -> None:
        """End the thread; after a failure, leave the process group as well if this package made it."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._has_failed:
            process_group.destroy_global_state(linger_s=LINGER_AFTER_FAILURE_S)

    def _raise_cause(self, exception: BaseException) -> None:
        watchdog = self._watchdog
        if watchdog is None:
            return
        if isinstance(exception, _compat.SIGTERMException):
            exception.code = exception.code or SIGTERM_STATUS
            if watchdog.stop.is_decided:
                return
        failure = watchdog.explain(exception, _compat.failing_hook(exception) or self._where())
        if failure is not None:
            raise RankFailedError(failure) from exception

    # --- SIGTERM ------------------------------------------------------------------------------------------------------

    def _take_sigterm(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._handles_sigterm:
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._handles_sigterm = True

    def _give_back_sigterm(self) -> None:
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
            self._handles_sigterm = False

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        """Leave at once before the first step, and with all ranks after the same step later on."""
        watchdog = self._watchdog
        if watchdog is not None and watchdog.failure is not None:
            raise RankFailedError(watchdog.failure)
        if callable(self._previous_handler):
            self._previous_handler(signum, frame)
        if watchdog is None or not watchdog.stop.steps_have_begun:
            raise _compat.SIGTERMException(SIGTERM_STATUS)
        watchdog.stop.ask()
