"""The second device computes what the CPU computes, and behaves as an accelerator does."""

from __future__ import annotations

import pytest
import torch

from tests.rank_pool import RankPool

NAMES = [
    "streams_wait_for_each_other",
    "waits_are_told",
    "activations_leave_and_come_back",
    "kernels_do_not_grow_with_the_parameters",
]


def _call(name: str) -> None:
    from tests.second_device import behaviour  # registers the device, in a rank's process alone

    torch.accelerator.set_device_index(0)
    getattr(behaviour, name)()


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_behaviour(pool2: RankPool, name: str) -> None:
    """Late copies, streams, and waits that are told by their line."""
    pool2.run(_call, name)
