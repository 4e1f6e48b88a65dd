"""The second device computes what the CPU computes, and behaves as an accelerator does; its collectives as NCCL's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankPool

NAMES = [
    "streams_wait_for_each_other",
    "waits_are_told",
    "devices_are_told_apart",
    "activations_leave_and_come_back",
    "negative_counts_do_not_get_lost",
    "kernels_do_not_grow_with_the_parameters",
]
NCCL_NAMES = ["collectives_are_queued", "reads_must_wait"]


def _call(name: str) -> None:
    from tests.second_device import behaviour  # registers the device, in a rank's process alone

    torch.accelerator.set_device_index(dist.get_rank() if name in NCCL_NAMES else 0)
    getattr(behaviour, name)()


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_behaviour(pool2: RankPool, name: str) -> None:
    """Late copies, streams, waits told by their line, devices told apart, random numbers."""
    pool2.run(_call, name)


@pytest.mark.sweep  # of the device itself; the faults of tests/failure hang on it by default
@pytest.mark.parametrize("name", NCCL_NAMES)
def test_collectives(nccl_pool2: RankPool, name: str) -> None:
    """Queued work, blocked reads, order of streams, connecting, abort and shutdown."""
    nccl_pool2.run(_call, name, timeout_s=30)
