"""Weights that user code writes while FSDP2 has gathered them.

A module's parameters are then copies, which FSDP2 frees. What was written to them is copied back into the shards before
that: each rank holds its own slice of every copy, so nothing is communicated. Ranks must write alike, as under DDP.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_automodel import torch_internals
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding.write_counts import WriteCounts
from lightning_automodel.torch_internals import FSDPParam, FSDPParamGroup

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""


class WrittenWeights:
    """Watches the FSDP2 units of a model for writes to their parameters, gathered or sharded."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._patches = PatchStack()
        self.counts = WriteCounts(self._patches)
        self.is_recovering = False
        self._groups: dict[int, list[_WatchedGroup]] = {}
        for unit in units:
            groups = torch_internals.param_groups(unit)
            self._groups[id(unit)] = [_WatchedGroup(unit, group, self, self.counts, self._patches) for group in groups]

    def is_current(self, unit: FSDPModule) -> bool:
        """Whether no shard of ``unit`` was written since it was gathered; the same on all ranks."""
        return all(group.is_current() for group in self._groups[id(unit)])

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Context in which written copies are given up, since some may have been freed by an exception."""
        self.is_recovering = True
        try:
            yield
        finally:
            self.is_recovering = False

    def close(self) -> None:
        """Stop watching."""
        self._patches.restore()


class _WatchedGroup:
    """What FSDP2 communicates together, and how often its tensors had been written when they were last in step."""

    def __init__(
        self,
        unit: FSDPModule,
        group: FSDPParamGroup,
        weights: WrittenWeights,
        counts: WriteCounts,
        patches: PatchStack,
    ) -> None:
        self._group, self._weights, self._counts = group, weights, counts
        self._shard_counts = self._of_shards()
        self._copy_counts: list[int] = []
        torch_internals.watch_gathers(unit, group, self._start, self._finish, self._free, patches)

    @property
    def _params(self) -> list[FSDPParam]:
        return self._group.fsdp_params

    def _of_shards(self) -> list[int]:
        return torch_internals.versions([param.sharded_param for param in self._params])

    def _of_copies(self) -> list[int]:
        return self._counts.of([param.unsharded_param for param in self._params])

    def is_current(self) -> bool:
        return self._shard_counts == self._of_shards()

    def _start(self) -> None:
        """Before an all-gather starts, maybe ahead of the forward that needs it."""
        self._shard_counts = self._of_shards()

    def _finish(self) -> bool:
        """After an all-gather; False if it must be repeated, since a shard was written after it had started."""
        self._copy_counts = self._of_copies()
        return self.is_current()

    def _free(self) -> None:
        """Before the copies are freed or hidden."""
        counts = self._of_copies()
        if counts == self._copy_counts or self._weights.is_recovering:
            return
        before = zip(self._params, self._copy_counts, counts, self._shard_counts, self._of_shards(), strict=True)
        for param, copy_before, copy_now, shard_before, shard_now in before:
            if copy_now != copy_before:
                _write_back(param, shard_is_written=shard_now != shard_before)
        self._copy_counts = counts
        self._shard_counts = self._of_shards()


@torch.no_grad()
def _write_back(param: FSDPParam, shard_is_written: bool) -> None:
    """Copy this rank's slice of a gathered copy into the shard, both written since the last look. Not a collective.

    Raises RuntimeError if the copy has another dtype, in which small changes are rounded away, or if both differ.
    """
    shard, copied = torch_internals.local_tensor(param.sharded_param), torch_internals.own_slice(param)
    if copied.dtype == shard.dtype and not shard_is_written:
        shard.copy_(copied)
        torch.autograd.graph.increment_version([param.sharded_param])
    elif not torch.equal(copied.to(shard.device), shard.to(copied.dtype)):  # if `.data` was only read, they are equal
        raise RuntimeError(_refusal(param, shard, copied))


def _refusal(param: FSDPParam, shard: Tensor, copied: Tensor) -> str:
    name = torch_internals.parameter_name(param)
    if copied.dtype == shard.dtype:
        return (
            f"{name} was written twice while it was gathered: as module.parameters() has it within a step, and as a"
            " list or an optimizer holds its shard. Take parameters from the module, or write them"
            f" {IN_HOOKS}."
        )
    return (
        f"{name} was written within a step or a forward, where FSDP2 has gathered it in {copied.dtype}, which rounds"
        f" what is written: its own dtype is {shard.dtype}. Write it {IN_HOOKS}. Or pass data_parallel='ddp'."
    )
