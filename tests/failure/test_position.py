"""Where the main thread is: the user's line, and whether it waits in a collective there."""

from __future__ import annotations

import gc
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_automodel.failure.position import main_thread_position
from tests.failure.faults import killed_at_the_end
from tests.processes import forked
from tests.rank_pool import RankPool


def _wait_and_look() -> tuple[bool, str]:
    """Rank 0 waits in a collective, and a thread of it looks."""
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0, tag=1)
        dist.send(torch.zeros(1), 0)
        return False, ""
    seen: list[tuple[bool, str]] = []

    def look() -> None:
        while not seen or not seen[-1][0]:
            seen.append(main_thread_position())
        dist.send(torch.zeros(1), 1, tag=1)

    looking = threading.Thread(target=look)
    looking.start()
    dist.recv(torch.zeros(1), 1)
    looking.join()
    return seen[-1]


def test_a_rank_that_waits(pool2: RankPool) -> None:
    """Its line, which is below no frame of torch's."""
    (waits, at), _ = pool2.run(_wait_and_look)
    assert waits
    assert re.search(rf"{re.escape(__file__)}:\d+ in _wait_and_look$", at)


def test_position_of_what_was_raised() -> None:
    """The user's line, though the main thread is elsewhere by then."""
    with pytest.raises(AttributeError) as raised:
        dist.get_world_size("no group")
    line = raised.traceback[0].lineno + 1
    name = "test_position_of_what_was_raised"
    assert main_thread_position(raised.value) == (True, f"{__file__}:{line} in {name}")


class Garbage:
    """In a cycle. Like a tensor, it gives Python's lock away where it is freed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.001)


def _collect_while_a_thread_looks() -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            Garbage()
            main_thread_position()

    gc.collect()
    gc.freeze()
    gc.set_threshold(1)
    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(50):
        thread = threading.Thread(target=Garbage)
        thread.start()
        thread.join()
    is_over.set()
    looking.join()
    assert gc.isenabled()


def test_garbage_is_not_collected_while_threads_are_listed() -> None:
    """With Python 3.11, a thread that starts meanwhile would never run, nor the one that starts it."""
    process = forked().Process(target=_collect_while_a_thread_looks)
    process.start()
    with killed_at_the_end([process]):
        process.join(60)
        assert process.exitcode == 0
