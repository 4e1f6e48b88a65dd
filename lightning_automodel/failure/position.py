"""Where the main thread is in the user's code, and whether it waits in a collective there."""

import gc
import sys
import threading
import traceback
from types import FrameType

from lightning_automodel.distributed.collectives import gathers

WAITING = ("/threading.py", "/concurrent/futures/", "/torch/_ops.py")
COLLECTIVE = (
    "/torch/distributed/",
    "/torch/autograd/graph.py",  # runs a backward, within which DDP reduces
    "/lightning_automodel/distributed/",
    "/lightning_automodel/failure/",
)
RUN = "/lightning_automodel/failure/supervisor.py"
GATHERS = "/lightning_automodel/sharding/whole_copies.py"
FOREIGN = ("/torch/", "/lightning/", "/lightning_utilities/", "/lightning_automodel/")


def main_thread_position(exception: BaseException | None = None) -> tuple[bool, str]:
    """Whether the main thread waits in a collective, and its lines of user code, in a run below it.

    These are the line that Lightning called and the innermost one; without user code, the innermost of all.
    If an ``exception`` is given, these are the lines that it came through. Where that code computes with a
    sharded tensor, it says what is gathered, and what to do if other ranks do not come to it.
    """
    if exception:
        frames = [*traceback.walk_tb(exception.__traceback__)][::-1]
    else:
        frames = _main_thread_frames()
    stack = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]
    # Innermost frame first, without frames that wait for another thread, or in C++.
    stack = [entry for entry in stack if not any(part in entry[0] for part in WAITING)]
    if not stack:
        return False, "its end" if frames else "an unknown line"
    waits = any(part in stack[0][0] for part in COLLECTIVE)
    below = max((index for index, entry in enumerate(stack) if RUN in entry[0]), default=len(stack))
    own = [entry for entry in stack[:below] if not any(part in entry[0] for part in FOREIGN)] or stack[:1]
    at = dict.fromkeys([own[-1], own[0]])
    position = ", ".join(f"{file}:{line} in {name}" for file, line, name in at)
    gather = gathers.current
    if gather is not None and any(GATHERS in entry[0] for entry in stack):
        position += (
            f", which gathers {gather}: make all ranks call it, outside of `if trainer.is_global_zero`"
        )
    return waits, position


def _main_thread_frames() -> list[tuple[FrameType, int]]:
    """The main thread's frames and their lines, the innermost first."""
    interval = sys.getswitchinterval()
    # If it went on meanwhile, Python 3.11 could return other objects for frames that are gone.
    sys.setswitchinterval(1.0)
    # Python 3.11 holds its lock of threads while it lists them, and may collect garbage there. A tensor that is freed
    # gives Python's own lock away: with a main thread that starts another one, neither would ever go on.
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        return list(traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0)))
    except AttributeError:  # another object, on a machine that is so busy that it has gone on
        return []
    finally:
        if collects_garbage:
            gc.enable()
        sys.setswitchinterval(interval)
