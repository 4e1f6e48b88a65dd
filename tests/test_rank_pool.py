"""The pool that runs every distributed test: what it promises in `tests/rank_pool.py` of ranks that hang or die."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankError, RankPool


def sum_of_ranks(offset: int) -> float:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return total.item()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(3)


def assert_gone(process_ids: list[int]) -> None:
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_hang_and_death_stop_the_pool_and_the_next_call_restarts_it() -> None:
    """A hanging rank is named and shown, a dead one reported with its exit code, and no process outlives either."""
    pool = RankPool(2)
    pool.run(sum_of_ranks, 0)
    process_ids = pool.process_ids
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 hang after 1 s(.|\n)*in hang_on_rank_1"):
        pool.run(hang_on_rank_1, timeout_s=1)
    assert_gone(process_ids)

    assert pool.run(sum_of_ranks, 0) == [1.0, 1.0]
    process_ids = pool.process_ids
    with pytest.raises(RankError, match="died with exit code 3") as caught:
        pool.run(die_on_rank_0)
    assert list(caught.value.failures) == [0]
    assert_gone(process_ids)
    assert pool.process_ids == []
