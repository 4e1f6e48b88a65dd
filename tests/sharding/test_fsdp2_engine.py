"""FSDP2Engine in a plain loop: optimizers of one unit, one of which is zeroed in the middle of a window.

Abandoned windows: tests/gradients/test_abandoned_windows.py. Parameters that a window keeps gathered:
tests/sharding/test_written_weights.py, and tests/trainer/test_communication.py, which counts the gathers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.distributed.mesh import MeshSizes, Placement, build_mesh
from lightning_automodel.gradients.window_records import BackwardPass, Window
from lightning_automodel.internals.fsdp2 import fsdp_units
from lightning_automodel.sharding.apply import initialise_fsdp2
from lightning_automodel.sharding.fsdp2_engine import FSDP2Engine
from lightning_automodel.sharding.fsdp2_setup import FSDP2Settings
from lightning_automodel.sharding.shards import shard_parameters
from lightning_automodel.sharding.sync_context import Deferral
from tests.gradients.ragged import TOLERANCE, Holder, Net, error, micro_batch
from tests.rank_pool import RankError, RankPool

COUNT = 4  # rows of a micro-batch


def _micro_batch(sync: FSDP2Engine, model: Holder, shards: set[Tensor], step: int, is_last: bool) -> None:
    """What a strategy does for one of them."""
    features, _ = micro_batch(0, dist.get_rank(), step, COUNT)
    with sync.micro_batch(ends_window=is_last):
        sync.start_forward()
        loss = model.inner["net"](features).square().sum()
        window = Window(None, [], None, torch.zeros(3), trained=shards)
        backward = BackwardPass(window, is_last, False, [], set(), set(), [])
        sync.track(shards)
        sync.backward = backward
        sync.begin(backward, loss)
        loss.backward()
        sync.reduce(backward)
        sync.keep(backward)
        sync.backward = None
        sync.reached.clear()


def _discard_a_part(layout: str, defer: Deferral) -> dict[str, Tensor]:
    """The head belongs to another optimizer than the gate, and to the same unit: the root."""
    model = Holder(layout)
    sharded = fsdp_units(model)
    parameters = dict(model.named_parameters())
    initialise_fsdp2(model, sharded, parameters, dist.get_world_size())
    shard_parameters(sharded, parameters, accept_hooks=False)
    num_replicas = 2 if layout == "hybrid" else 1
    sizes = MeshSizes(num_replicas, dist.get_world_size() // num_replicas)
    mesh = build_mesh("cpu", sizes, timedelta(minutes=1))
    placement = Placement(mesh, torch.device("cpu"), 1, dist.group.WORLD)
    settings = FSDP2Settings(defer, retains_unsharded=False, prefetch=0, report={})
    sync = FSDP2Engine(model, placement, settings)
    net: Any = model.inner["net"]
    shards: set[Tensor] = set(model.parameters())
    _micro_batch(sync, model, shards, 0, is_last=False)
    sync.discard(net.head.parameters())
    _micro_batch(sync, model, shards, 1, is_last=True)
    return {name: p.grad.full_tensor() for name, p in net.named_parameters()}


def _expected(*steps: int) -> dict[str, Tensor]:
    """Gradients of one process with everybody's data, averaged over ranks."""
    net = Net()
    for rank in range(2):
        for step in steps:
            net(micro_batch(0, rank, step, COUNT)[0]).square().sum().backward()
    return {name: p.grad / 2 for name, p in net.named_parameters()}


def test_a_part_is_discarded(pool2: RankPool) -> None:
    both = _expected(0, 1)
    last = _expected(1)
    expected = {name: last[name] if name.startswith("head") else both[name] for name in both}
    for found in pool2.run(_discard_a_part, "nested", True):
        assert error(found, expected) <= TOLERANCE


def test_a_part_of_one_buffer_is_refused(pool4: RankPool) -> None:
    with pytest.raises(RankError, match="belong to several optimizers"):
        pool4.run(_discard_a_part, "hybrid", "all_reduce")
