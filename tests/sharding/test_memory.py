"""What deferral and gathered parameters are estimated to cost, what the strategy chooses, and that it is exact."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.internals.fsdp2 import fsdp_units
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import memory
from lightning_automodel.sharding.apply import initialise_fsdp2
from lightning_automodel.sharding.shards import shard_parameters
from tests.rank_pool import RankPool
from tests.sharding.fits import check_exact
from tests.trainer.runs import CASE, by_default
from tests.trainer.test_layouts import Scalars

MIB = 2**20


def test_a_rank_has_its_share_of_the_machine() -> None:
    """On a CPU; what a device does not tell is not guessed."""
    free = memory.free_bytes(torch.device("cpu"), 1)
    assert free > 2**28
    assert memory.free_bytes(torch.device("cpu"), 4) == free // 4
    assert memory.free_bytes(torch.device("mps"), 1) == 0


def _estimate(**dtypes: torch.dtype) -> dict[str, int]:
    """A trainable linear of 3 x 4 + 3 numbers, padded to 4 rows over two ranks, and a frozen one of 5 x 3 + 5, to 6."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5).requires_grad_(False))
    for unit in (*model, model):
        fully_shard(
            unit,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            mp_policy=MixedPrecisionPolicy(**dtypes),
        )
    sharded = fsdp_units(model)
    parameters = dict(model.named_parameters())
    initialise_fsdp2(model, sharded, parameters, dist.get_world_size())
    shard_parameters(sharded, parameters, accept_hooks=False)
    return memory.estimate(parameters.values(), torch.device("cpu"))


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
            "unsharded_parameters": (20 + 24) * bytes_gathered,
            "deferred_gradients": 20 * bytes_unreduced,
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
    choice = memory.choose((), True, placement, options)
    assert (choice["defer_fsdp_grad_sync"], choice["reshard_during_accumulation"]) == expected
    reason = choice.get("defer_fsdp_grad_sync_reason", "")
    assert reason.startswith("auto: ") == (defer == "auto")
    assert ("reshard_during_accumulation_reason" in choice) == (reshard == "auto")
    if defer == "auto":
        figure = "fits into" if choice["defer_fsdp_grad_sync"] else "exceeds"
        beside = NEEDED["sharded_state"] + (NEEDED["unsharded_parameters"] if reshard is False else 0)
        assert f"an estimated 40 MiB {figure}" in reason
        assert f"({budget - beside} MiB)" in reason


FREE = (700, 800)  # bytes
STATE = (30, 100)


def _spare(scale: int) -> int:
    rank = dist.get_rank()
    placement = Placement(None, torch.device("cpu"), 1, dist.group.WORLD)  # the mesh is not asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda *_: FREE[rank] * scale)
        return memory.spare_bytes({"sharded_state": STATE[rank]}, placement)


def test_ranks_agree(pool2: RankPool) -> None:
    """The least of the world, by rank, with its own state; to the byte, which float32 and int32 could not hold."""
    assert pool2.run(_spare, 1) == [400 - 100] * 2
    assert pool2.run(_spare, 2**40) == [350 * 2**40 - 30] * 2


@pytest.mark.parametrize(
    "options",
    by_default(
        {
            "two": {"reshard_after_forward": 2},
            "kept": {"reshard_after_forward": 2, "reshard_during_accumulation": False},
        },
        "two",
    ),
)
def test_reshard_after_forward(pool4: RankPool, options: dict[str, Any]) -> None:
    """To a part of the ranks, to all of them, or not at all, as where parameters are kept for the window."""
    options = {"reshard_during_accumulation": True, **options}
    described = check_exact(pool4, Scalars, options, case=replace(CASE, num_ranks=4))
    is_kept = options["reshard_during_accumulation"] is False
    assert described["reshard_after_forward"] == (not is_kept and options["reshard_after_forward"])
