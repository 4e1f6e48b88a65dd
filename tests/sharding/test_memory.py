"""What deferral and gathered parameters are estimated to cost, and how much memory is said to be free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import memory
from lightning_automodel.sharding.apply import initialise_fsdp2
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


def _estimate(**dtypes: torch.dtype) -> dict[str, int]:
    """A trainable linear of 3 x 4 + 3 numbers, uneven over two ranks, and a frozen one of 5 x 3 + 5."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5).requires_grad_(False))
    for unit in (*model, model):
        fully_shard(
            unit,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            mp_policy=MixedPrecisionPolicy(**dtypes),
        )
    initialise_fsdp2(model, dist.get_world_size())
    return memory.estimate(model, torch.device("cpu"))


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("dtypes", "bytes_gathered", "bytes_unreduced"), [({}, 4, 4), (MIXED, 2, 4), (HALF, 2, 2)], ids=str
)
def test_sharded_model(
    pool2: RankPool, dtypes: dict[str, torch.dtype], bytes_gathered: int, bytes_unreduced: int
) -> None:
    """Frozen parameters are gathered too, but have neither gradients nor state; state counts the rank's own rows."""
    for rows, estimated in zip((2, 1), pool2.run(_estimate, **dtypes), strict=True):
        assert estimated == {
            "unsharded_parameters": (15 + 20) * bytes_gathered,
            "deferred_gradients": 15 * bytes_unreduced,
            "sharded_state": rows * (4 + 1) * (4 + 8),
        }


NEEDED = {"unsharded_parameters": 30, "deferred_gradients": 40, "sharded_state": 20}  # MiB


@pytest.mark.parametrize(
    ("defer", "reshard", "budget", "expected"),
    [
        ("auto", "auto", 90, (True, False)),
        ("auto", "auto", 89, (True, True)),
        ("auto", "auto", 60, (True, True)),
        ("auto", "auto", 59, (False, False)),  # without the gradients, the parameters fit
        ("auto", "auto", 50, (False, False)),
        ("auto", "auto", 49, (False, True)),
        ("auto", "auto", 0, (False, True)),
        # What an option has decided counts, whether it fits or not.
        ("auto", False, 90, (True, False)),
        ("auto", False, 89, (False, False)),
        ("auto", True, 60, (True, True)),
        (True, "auto", 90, (True, False)),
        (True, "auto", 89, (True, True)),
        (False, "auto", 50, (False, False)),
        ("all_reduce", "auto", 50, ("all_reduce", False)),
        (True, False, 0, (True, False)),
        (False, True, 1000, (False, True)),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, defer: Any, reshard: Any, budget: int, expected: tuple[Any, bool]
) -> None:
    """Gradients first, then parameters beside them."""
    needed = {name: size * MIB for name, size in NEEDED.items()}
    monkeypatch.setattr(memory, "estimate", lambda *_: needed)
    monkeypatch.setattr(memory, "spare_bytes", lambda *_: (budget - NEEDED["sharded_state"]) * MIB)
    placement: Any = SimpleNamespace(
        device=torch.device("cpu"), mesh=SimpleNamespace(sizes=SimpleNamespace(divisor=2))
    )
    options = StrategyOptions(defer_fsdp_grad_sync=defer, reshard_during_accumulation=reshard)
    choice = memory.choose(pl.LightningModule(), placement, options)
    assert (choice["defer_fsdp_grad_sync"], choice["reshard_during_accumulation"]) == expected
    reason = choice.get("defer_fsdp_grad_sync_reason", "")
    assert reason.startswith("auto: ") == (defer == "auto")
    assert ("reshard_during_accumulation_reason" in choice) == (reshard == "auto")
    if defer == "auto":
        figure = "fits into" if choice["defer_fsdp_grad_sync"] else "exceeds"
        beside = NEEDED["sharded_state"] + (NEEDED["unsharded_parameters"] if reshard is False else 0)
        assert f"an estimated 40 MiB {figure}" in reason
        assert f"({budget - beside} MiB)" in reason


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
