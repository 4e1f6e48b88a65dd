"""The memory estimate of sharded models, against sizes counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_automodel.sharding.apply import initialise_fsdp2
from lightning_automodel.sharding.memory import estimate
from tests.rank_pool import RankPool


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
    return estimate(model, torch.device("cpu"))


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
