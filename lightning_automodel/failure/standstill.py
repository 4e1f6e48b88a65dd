"""Tells early that ranks wait for each other in different places; collectives end such waits much later."""

import logging
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Sequence
from types import FrameType

import torch.distributed as dist

from lightning_automodel.distributed.failures import RUN_ON_ALL_RANKS
from lightning_automodel.distributed.store_channel import AwakeClock

log = logging.getLogger(__name__)

STANDSTILL_S = 60.0
MOST_NAMED = 8

WAITING = ("/threading.py", "/concurrent/futures/", "/torch/_ops.py")
COLLECTIVE = ("/torch/distributed/", "/lightning_automodel/distributed/", "/lightning_automodel/failure/")
RUN = "/lightning_automodel/failure/supervisor.py"
FOREIGN = ("/torch/", "/lightning/", "/lightning_utilities/", "/lightning_automodel/")


class Standstill:
    """Notices that all ranks have waited in collectives for a minute, and not all at the same line.

    Then some ranks probably call a collective that the others never reach. It may be a slow one all the same, so this
    is only a warning, once a run. Collectives end such a wait after ``timeout_s`` seconds.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._limit_s = min(STANDSTILL_S, timeout_s / 2)
        self._keys = [f"standstill/{each}" for each in range(world_size)]
        self._clock = AwakeClock()
        self._position, self._since_s = "", 0.0
        self._posted, self._is_told = "", False

    def exchange(self, store: dist.Store, where: str) -> None:
        """Post where this rank stands, if it does, in the hook ``where``; rank 0 warns once all do."""
        now_s = self._clock()
        waits, at = main_thread_position()
        position = f"{where}, at {at}" if waits else ""
        if position != self._position:
            self._position, self._since_s = position, now_s
        standing = position if now_s - self._since_s >= self._limit_s else ""
        if standing != self._posted:
            store.set(self._keys[self._rank], standing)
            self._posted = standing
        if standing and self._rank == 0 and not self._is_told and store.check(self._keys):
            self._tell([each.decode() for each in store.multi_get(self._keys)])

    def _tell(self, positions: list[str]) -> None:
        if "" in positions or len(set(positions)) == 1:
            return
        self._is_told = True
        log.warning(
            f"All ranks have waited for {self._limit_s:g} s, in different places:\n{list_positions(positions)} The wait"
            f" ends after the strategy's timeout, here {self._timeout_s:g} s."
        )


def list_positions(positions: Sequence[str]) -> str:
    """The ranks at each of several positions, a line each, and what to do about it."""
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, position in enumerate(positions):
        ranks[position].append(str(rank))
    lines = []
    for position, those in list(ranks.items())[:MOST_NAMED]:
        more = ", ..." if len(those) > MOST_NAMED else ""
        lines.append(f"  rank {', '.join(those[:MOST_NAMED])}{more}: {position}\n")
    return (
        f"{''.join(lines)}One of these lines probably communicates, and the other ranks do not come to it."
        f" {RUN_ON_ALL_RANKS}"
    )


def main_thread_position(exception: BaseException | None = None) -> tuple[bool, str]:
    """Whether the main thread waits in a collective, and the lines of user code that it is at, in a run below it.

    These are the line that Lightning called and the innermost one; without user code, the innermost of all. If an
    ``exception`` is given, these are the lines that it came through.
    """
    frames = [*traceback.walk_tb(exception.__traceback__)][::-1] if exception else _main_thread_frames()
    stack = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in frames]
    # Innermost frame first, without frames that wait for another thread, or in C++.
    stack = [each for each in stack if not any(part in each[0] for part in WAITING)]
    if not stack:
        return False, "its end"
    file, _, name = stack[0]
    waits = any(part in file for part in COLLECTIVE) or name == "_engine_run_backward"
    below = max((index for index, each in enumerate(stack) if RUN in each[0]), default=len(stack))
    own = [each for each in stack[:below] if not any(part in each[0] for part in FOREIGN)] or stack[:1]
    at = dict.fromkeys([own[-1], own[0]])
    return waits, ", ".join(f"{file}:{line} in {name}" for file, line, name in at)


def _main_thread_frames() -> list[tuple[FrameType, int]]:
    """The main thread's frames and their lines, the innermost first."""
    interval = sys.getswitchinterval()
    # Were it to go on meanwhile, the walk could read frames that are gone: Python 3.11 then returns other objects.
    sys.setswitchinterval(1.0)
    try:
        return list(traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0)))
    finally:
        sys.setswitchinterval(interval)
