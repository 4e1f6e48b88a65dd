"""What deferral and gathered parameters are estimated to cost, and how much memory is said to be free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_automodel.distributed.mesh import Placement
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
    """Gradients first, then parameters beside them."""
    needed = {name: size * MIB for name, size in NEEDED.items()}
    choice = memory.choose(defer, keep, needed, (budget - NEEDED["sharded_state"]) * MIB)
    assert (choice.defer, choice.keep) == expected
    assert choice.defer_reason.startswith("auto: ") == (defer == "auto")
    assert choice.keep_reason.startswith("auto: ") == (keep == "auto")
    if defer == "auto":
        figure = "fits into" if choice.defer else "exceeds"
        beside = NEEDED["sharded_state"] + (NEEDED["unsharded_parameters"] if keep is True else 0)
        assert f"an estimated 40 MiB {figure}" in choice.defer_reason
        assert f"({budget - beside} MiB)" in choice.defer_reason


FREE = (700, 801, 600, 900)  # bytes
STATE = (30, 9, 50, 210)


def _spare(scale: int = 1) -> int:
    rank = dist.get_rank()
    world = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda *_: FREE[rank] * scale)
        # The mesh is not asked.
        return memory.spare_bytes(
            {"sharded_state": STATE[rank]}, Placement(None, torch.device("cpu"), 1, world)
        )


def test_ranks_agree(pool4: RankPool) -> None:
    """The least of the world, by rank, with its own state."""
    assert pool4.run(_spare) == [450 - 210] * 4


def test_ranks_agree_to_the_byte(pool2: RankPool) -> None:
    """Of more than float32 or int32 could hold."""
    assert pool2.run(_spare, 2**40) == [350 * 2**40 - 30] * 2
