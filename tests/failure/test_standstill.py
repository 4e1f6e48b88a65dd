"""Rank 0 says where ranks wait for each other, as long as they do, and says nothing of other waits."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_automodel.distributed.store_channel import StoreChannel
from lightning_automodel.failure import standstill
from lightning_automodel.failure.standstill import Standstill, main_thread_position
from tests.rank_pool import RankPool

TIMEOUT_S, WAIT_S = 0.6, 1.0


def _release(other: int) -> None:
    time.sleep(WAIT_S)
    dist.send(torch.zeros(1), other)


def wait(kind: str) -> list[str]:
    """Runs on both ranks: each waits for the other, until a thread of that one ends the wait."""
    rank, texts = dist.get_rank(), list[str]()
    seen, other = Standstill(rank, 2, TIMEOUT_S), 1 - rank
    channel = StoreChannel(kind, 30.0, lambda: "some_hook", lambda store: seen.exchange(store, channel.where))
    channel.start()
    releasing = threading.Thread(target=_release, args=(other,))
    releasing.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standstill.log, "warning", texts.append)
        if kind == "at work" and rank == 1:
            time.sleep(WAIT_S)
        if kind == "apart" and rank == 1:
            dist.recv(torch.zeros(1), other)  # the same, on another line
        else:
            dist.recv(torch.zeros(1), other)
        releasing.join()
        channel.close()
    dist.barrier()
    return texts


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["apart", "together", "at work"])
def test_ranks_that_wait_for_each_other(pool2: RankPool, kind: str) -> None:
    first, second = pool2.run(wait, kind)
    assert second == []
    if kind != "apart":
        assert first == []
        return
    [message] = first
    lines = re.findall(rf"  rank (\d): some_hook, at .+, {re.escape(__file__)}:(\d+) in wait\n", message)
    assert [rank for rank, _ in lines] == ["0", "1"]
    assert int(lines[0][1]) - int(lines[1][1]) == 2


def test_position_of_what_was_raised() -> None:
    """The user's line, though the main thread is elsewhere by then."""
    with pytest.raises(AttributeError) as raised:
        dist.get_world_size("no group")
    line = raised.traceback[0].lineno + 1
    name = "test_position_of_what_was_raised"
    assert main_thread_position(raised.value) == (True, f"{__file__}:{line} in {name}")
