"""FSDP2Window in a plain loop, against gradients of one process: windows that are abandoned, interrupted or retained.

`get_sync_ctx`, the function for loops without a strategy, is tested in tests/gradients/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_automodel.gradients.window_records import BackwardPass, Window
from lightning_automodel.sharding.apply import initialise_fsdp2
from lightning_automodel.sharding.fsdp2_window import FSDP2Window
from lightning_automodel.sharding.shards import shard_parameters
from lightning_automodel.sharding.sync_context import Deferral
from tests.gradients.ragged import TOLERANCE, Holder, Net, error, micro_batch
from tests.rank_pool import RankError, RankPool

COUNT = 4  # rows of a micro-batch


class Training:
    """A sharded net, and what a strategy does for each of its micro-batches."""

    def __init__(self, layout: str, defer: Deferral, retain: bool) -> None:
        self.model = Holder(layout)
        initialise_fsdp2(self.model, dist.get_world_size())
        shard_parameters(self.model, accept_hooks=False)
        self.shards = set(self.model.parameters())
        self.sync = FSDP2Window(self.model, defer, retain)

    def micro_batch(
        self,
        step: int,
        is_last: bool,
        forward: Callable[[Net, Tensor], Tensor] | None = None,
        fail: bool = False,
    ) -> None:
        features, _ = micro_batch(0, dist.get_rank(), step, COUNT)
        with self.sync.micro_batch(ends_window=is_last):
            self.sync.reuse_retained()
            self.sync.resume_step()
            loss = _loss(self.model.inner["net"], features, forward)
            if fail:
                loss.register_hook(_raise)
            window = Window(None, [], None, torch.zeros(3), trained=self.shards)
            backward = BackwardPass(window, is_last, False, [], set(), [])
            self.sync.enter_backward(backward)
            try:
                self.sync.begin(backward, loss)
                loss.backward()
                self.sync.reduce(backward)
                self.sync.keep(backward)
            finally:
                self.sync.leave_backward()
                self.sync.user_backward_returned(is_last)

    def window(
        self, *steps: int, forward: Callable[[Net, Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Whole gradients of a window of these steps."""
        for step in steps:
            self.micro_batch(step, step == steps[-1], forward)
        return self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        named = self.model.inner["net"].named_parameters()
        return {name: p.grad.full_tensor() for name, p in named if isinstance(p.grad, DTensor)}

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.sync.discard()


def _loss(net: nn.Module, features: Tensor, forward: Callable[[Any, Tensor], Tensor] | None) -> Tensor:
    return (net(features) if forward is None else forward(net, features)).square().sum()


def _raise(gradient: Tensor) -> None:
    raise KeyError("in the backward")


def _expected(
    world_size: int,
    *steps: int,
    forward: Callable[[Net, Tensor], Tensor] | None = None,
    net: Net | None = None,
) -> dict[str, Tensor]:
    """Gradients of one process with everybody's data, averaged over ranks."""
    net = net or Net()
    for rank in range(world_size):
        for step in steps:
            _loss(net, micro_batch(0, rank, step, COUNT)[0], forward).backward()
    return {name: p.grad / world_size for name, p in net.named_parameters() if p.grad is not None}


def _abandon(defer: Deferral) -> dict[str, Tensor]:
    """A window after one that an exception has left in its middle."""
    training = Training("hybrid", defer, True)
    training.micro_batch(0, is_last=False)
    with pytest.raises(KeyError):
        training.micro_batch(1, is_last=True, fail=True)
    training.sync.recover()
    training.model.zero_grad()
    return training.window(2, 3)


@pytest.mark.parametrize("defer", ["all_reduce", True])
def test_abandoned_windows_leave_nothing(pool4: RankPool, defer: Deferral) -> None:
    """Neither unreduced gradients nor sums that wait for the other replicas reach the next window."""
    for found in pool4.run(_abandon, defer):
        assert error(found, _expected(4, 2, 3)) <= TOLERANCE


def _keep_what_stood_before() -> dict[str, Tensor]:
    training = Training("nested", True, False)
    training.window(0)
    with pytest.raises(KeyError):
        training.micro_batch(1, is_last=True, fail=True)
    training.sync.recover()
    return training.gradients()


def test_recovering_keeps_gradients_of_before(pool2: RankPool) -> None:
    """torch 2.15's reset_iter_state drops those of sharded parameters too."""
    for found in pool2.run(_keep_what_stood_before):
        assert error(found, _expected(2, 0)) <= TOLERANCE


def _discard_a_part(layout: str, defer: Deferral) -> dict[str, Tensor]:
    """The head belongs to another optimizer than the gate, and to the same unit: the root."""
    training = Training(layout, defer, False)
    net: Any = training.model.inner["net"]
    training.micro_batch(0, is_last=False)
    training.sync.discard(net.head.parameters())
    training.micro_batch(1, is_last=True)
    return training.gradients()


def test_a_part_is_discarded(pool2: RankPool) -> None:
    both = _expected(2, 0, 1)
    last = _expected(2, 1)
    expected = {name: last[name] if name.startswith("head") else both[name] for name in both}
    for found in pool2.run(_discard_a_part, "nested", True):
        assert error(found, expected) <= TOLERANCE


def test_a_part_of_one_buffer_is_refused(pool4: RankPool) -> None:
    with pytest.raises(RankError, match="belong to several optimizers"):
        pool4.run(_discard_a_part, "hybrid", "all_reduce")


def _retain(change: str) -> tuple[list[int], bool, bool, dict[str, Tensor]]:
    """All-gathers by micro-batch, whether the module looks sharded between them, and is in the end; gradients."""
    training = Training("nested", True, True)
    gathers = []
    looks_sharded = True
    for step in (0, 1, 2):
        with CommDebugMode() as counter:
            training.micro_batch(step, is_last=step == 2)
        gathers.append(counter.get_total_counts() - (3 if step == 2 else 0))
        looks_sharded &= all(isinstance(p, DTensor) for p in training.model.parameters())
        if step == 0:
            _change(training, change)
    training.sync.release()
    units = [module for module in training.model.modules() if isinstance(module, FSDPModule)]
    freed = all(t.untyped_storage().size() == 0 for t in _storages(units))
    return gathers, looks_sharded, freed, training.gradients()


def _storages(units: Iterable[Any]) -> list[Tensor]:
    params = [
        p for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params
    ]
    return [tensor for param in params for tensor in param.all_gather_outputs if tensor.numel() > 0]


def _change(training: Training, how: str) -> None:
    block: Any = training.model.inner["net"].blocks[0]
    if how == "forward":
        with torch.no_grad():
            training.model(torch.ones(1, block.in_features).double())
    elif how == "write":
        with torch.no_grad():
            block.weight.mul_(2.0)
    elif how == "release":
        training.sync.release()


@pytest.mark.parametrize(
    ("change", "gathers"),
    [("", [3, 0, 0]), ("write", [3, 1, 0]), ("forward", [3, 3, 0]), ("release", [3, 3, 0])],
)
def test_parameters_are_retained(pool2: RankPool, change: str, gathers: list[int]) -> None:
    """Gathered once a window, unless somebody has written or freed them; others see an ordinary sharded module."""
    net = Net()
    for step in (0, 1, 2):
        for rank in range(2):
            _loss(net, micro_batch(0, rank, step, COUNT)[0], None).backward()
        if step == 0 and change == "write":
            with torch.no_grad():
                net.blocks[0].weight.mul_(2.0)
    expected = {name: p.grad / 2 for name, p in net.named_parameters()}
    for found in pool2.run(_retain, change):
        assert found[:3] == (gathers, True, True)
        assert error(found[3], expected) <= TOLERANCE
