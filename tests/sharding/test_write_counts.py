"""Writes count, also those that torch's version counters leave out; and torch is put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import set_local_tensor
from lightning_automodel.sharding.write_counts import WriteCounts
from tests.rank_pool import RankPool


def _counted() -> dict[str, bool]:
    """Whether each way to write, or only to look, has changed the count of a gathered tensor and of a shard."""
    mesh = init_device_mesh("cpu", (2,))
    shard = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
    whole = nn.Parameter(torch.ones(3, 2))
    changed: dict[str, bool] = {}
    with PatchStack() as patches, torch.no_grad():
        counts = WriteCounts(set_local_tensor, patches)
        counts.of([whole])  # from now on it is counted

        def note(name: str, tensor: Tensor, before: list[int]) -> None:
            now = counts.of([tensor]) if tensor is whole else [tensor._version]
            changed[name] = now != before

        before = [shard._version]
        float(shard.data.to_local().sum())
        note("look at a shard", shard, before)
        torch._foreach_mul_([shard, whole], 2.0)
        note("foreach on both kinds", shard, before)
        before = [shard._version]
        shard.data.mul_(2.0)
        note("data of a shard", shard, before)
        before = [shard._version]
        shard.data = torch.full((3, 2), 5.0)
        note("new data of a shard", shard, before)
        before = counts.of([whole])
        whole.data.mul_(2.0)
        note("data of a gathered tensor", whole, before)
        with pytest.raises(RuntimeError, match=r"A tensor of shape \(3, 2\) got sharded values"):
            whole.data = shard.data
        changed["shard has the values"] = bool((shard.full_tensor() == 5.0).all())
        changed["gathered tensor has the values"] = bool((whole == 4.0).all())
    return changed


def test_writes_count(pool2: RankPool) -> None:
    for changed in pool2.run(_counted):
        assert changed.pop("look at a shard") is False
        assert all(changed.values()), changed


def test_torch_is_put_back() -> None:
    before = (torch._foreach_mul_, nn.Parameter.data, DTensor.data)
    with PatchStack() as patches:
        WriteCounts(set_local_tensor, patches)
        assert torch._foreach_mul_ is not before[0]
    assert (torch._foreach_mul_, nn.Parameter.data, DTensor.data) == before
    assert "data" not in vars(nn.Parameter)
