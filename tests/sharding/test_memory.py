"""What deferral and gathered parameters are estimated to cost, and how much memory is said to be free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_automodel.sharding import memory
from tests.rank_pool import RankPool

MIB = 2**20


def test_a_rank_has_its_share_of_the_machine() -> None:
    """On a CPU; what a device does not tell is not guessed."""
    free = memory.free_bytes(torch.device("cpu"), 1)
    assert free > 2**28
    assert memory.free_bytes(torch.device("cpu"), 4) == free // 4
    assert memory.free_bytes(torch.device("mps"), 1) == 0


@pytest.mark.parametrize(
    ("dtype", "moments"), [(torch.bfloat16, 8), (torch.float32, 8), (torch.float64, 16)]
)
def test_estimate_without_units(dtype: torch.dtype, moments: int) -> None:
    """Gradients and two moments, float32 at least, of every trainable parameter, and nothing to gather."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False).requires_grad_(False)).to(dtype)
    estimate = memory.estimate(model, torch.device("cpu"))
    state = 16 * (dtype.itemsize + moments)
    assert estimate == {"unsharded_parameters": 0, "deferred_gradients": 0, "sharded_state": state}
    # Offloaded shards take no memory of the device, nor does their state.
    assert set(memory.estimate(model, torch.device("meta")).values()) == {0}


NEEDED = {"unsharded_parameters": 30, "deferred_gradients": 40, "sharded_state": 20}  # MiB


@pytest.mark.parametrize(
    ("defer", "keep", "budget", "expected"),
    [
        ("auto", "auto", 90, (True, True)),
        ("auto", "auto", 89, (True, False)),
        ("auto", "auto", 60, (True, False)),
        ("auto", "auto", 59, (False, True)),  # without the gradients, the parameters fit
        ("auto", "auto", 50, (False, True)),
        ("auto", "auto", 49, (False, False)),
        ("auto", "auto", 0, (False, False)),
        # What an option has decided counts, whether it fits or not.
        ("auto", True, 90, (True, True)),
        ("auto", True, 89, (False, True)),
        ("auto", False, 60, (True, False)),
        (True, "auto", 90, (True, True)),
        (True, "auto", 89, (True, False)),
        (False, "auto", 50, (False, True)),
        ("all_reduce", "auto", 50, ("all_reduce", True)),
        (True, True, 0, (True, True)),
        (False, False, 1000, (False, False)),
    ],
)
def test_choice(defer: Any, keep: Any, budget: int, expected: tuple[Any, bool]) -> None:
    """Gradients first, then parameters beside them; half of the free memory is theirs."""
    needed = {name: size * MIB for name, size in NEEDED.items()}
    choice = memory.choose(defer, keep, needed, 2 * budget * MIB)
    assert (choice.defer, choice.keep) == expected
    assert choice.defer_reason.startswith("auto: ") == (defer == "auto")
    assert choice.keep_reason.startswith("auto: ") == (keep == "auto")
    if defer == "auto":
        with_parameters = NEEDED["unsharded_parameters"] if keep is True else 0
        figure = "fits into" if choice.defer else "exceeds"
        assert f"an estimated {40 + with_parameters} MiB {figure}" in choice.defer_reason
        assert f"({budget - NEEDED['sharded_state']} MiB)" in choice.defer_reason


def _agree_in_a_grid() -> tuple[dict[str, int], int]:
    """Over rows and columns of a mesh, as data-parallel and tensor-parallel ranks are."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    groups = [mesh["row"].get_group(), mesh["column"].get_group()]
    return memory.agree({"size": (3, 9, 5, 4)[rank]}, (7, 8, 6, 9)[rank], torch.device("cpu"), groups)


def test_ranks_of_two_groups_agree(pool4: RankPool) -> None:
    """The extremes of the world, which are in no group together."""
    assert pool4.run(_agree_in_a_grid) == [({"size": 9}, 6)] * 4


def _agree(free_by_rank: list[int]) -> tuple[dict[str, int], int]:
    rank = dist.get_rank()
    needed = {"first": 2**40 + rank, "second": 7 - rank}  # more than float32 or int32 could hold
    return memory.agree(needed, free_by_rank[rank], torch.device("cpu"), [dist.group.WORLD])


def test_ranks_agree_on_figures(pool2: RankPool) -> None:
    """The largest need and the smallest memory, to the byte."""
    needed = {"first": 2**40 + 1, "second": 7}
    assert pool2.run(_agree, [2**41 + 1, 2**41]) == [(needed, 2**41)] * 2
    assert pool2.run(_agree, [0, 5]) == [(needed, 0)] * 2
