"""Barriers that say what they are for and who is missing, and timeouts that reach every group."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_automodel.distributed.collectives import named_barrier, reduce_tensor
from lightning_automodel.distributed.mesh import MeshSizes, build_mesh
from tests.rank_pool import RankError, RankPool

SHORT = timedelta(seconds=0.5)


def _rank_1_comes_too_late() -> None:
    if dist.get_rank() == 1:
        time.sleep(1)
        return
    named_barrier("pre_setup", SHORT)


def test_barrier_names_the_hook_and_who_is_missing(pool2: RankPool) -> None:
    """With how long was waited."""
    with pytest.raises(RankError) as caught:
        pool2.run(_rank_1_comes_too_late)
    message = caught.value.failures[0].splitlines()[-1]
    waited = r"rank 1 on an unknown host is missing, last seen in set-up: rank 0 waited \d\.\d s at"
    assert re.search(waited, message)
    assert " ('pre_setup') for ranks 1: stopped, dead, cut off, or" in message


def test_barrier_without_a_group() -> None:
    """There is nobody to wait for."""
    named_barrier("pre_setup", SHORT)


def _shard_group_waits(seconds: float) -> None:
    mesh = build_mesh("cpu", MeshSizes(replicate=2, shard=2), timedelta(seconds=seconds))
    if dist.get_rank() % 2 == 1:
        time.sleep(1)
        return
    with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
        dist.all_reduce(torch.ones(1), group=mesh.mesh["data_parallel_shard"].get_group())


def test_timeout_reaches_the_groups_of_the_mesh(pool4: RankPool) -> None:
    """Not only the default group, which has the timeout of whoever made it."""
    pool4.run(_shard_group_waits, 0.3)
    # The groups' short timeout and their broken connections must not reach the tests that come after.
    pool4.stop()


def _means_of_integers() -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    groups = (dist.group.WORLD, alone)
    of_both, of_one = (
        reduce_tensor(torch.tensor(rank), group, "mean", torch.device("cpu")) for group in groups
    )
    return of_both, of_one


def test_mean_of_integers(pool2: RankPool) -> None:
    """Exact; of one rank it stays an integer, and Lightning's metrics float32."""
    for rank, (of_both, of_one) in enumerate(pool2.run(_means_of_integers)):
        assert of_both == 0.5
        assert (of_one, of_one.dtype) == (rank, torch.int64)
