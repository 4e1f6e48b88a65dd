"""Weights that user code writes while FSDP2 has gathered them.

A module's parameters are then copies, which FSDP2 frees. What was written to them is copied back into the
shards before that: each rank holds its own slice of every copy, so nothing is communicated. Ranks must write
alike, as under DDP.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import fsdp2, fsdp2_gathers
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.fsdp2 import FSDPParam, FSDPParamGroup
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import without_wrappers
from lightning_automodel.sharding.write_counts import DATA, WriteCounts

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""


class WrittenWeights:
    """Watches the FSDP2 units of a model for writes to their parameters, gathered or sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._patches = PatchStack()
        self.counts = WriteCounts(self._move, self._patches)
        self.is_recovering = self.is_saving = False
        self._names = {id(shard): without_wrappers(name) for name, shard in model.named_parameters()}
        self._groups: dict[int, list[_WatchedGroup]] = {}
        self._group_of: dict[int, _WatchedGroup] = {}  # by the id of the shard
        for unit in fsdp2.fsdp_units(model):
            groups = fsdp2.param_groups(unit)
            self._groups[id(unit)] = [
                _WatchedGroup(unit, group, self, self.counts, self._patches) for group in groups
            ]
            for watched, group in zip(self._groups[id(unit)], groups, strict=True):
                self._group_of.update({id(param.sharded_param): watched for param in group.fsdp_params})

    def name(self, shard: Tensor) -> str:
        """The name of a parameter in the model."""
        return self._names.get(id(shard), "A parameter")

    def _move(self, shard: DTensor, local: Tensor) -> None:
        group = self._group_of.get(id(shard))
        if group is None or not group.moves(shard, local):
            torch_internals.set_local_tensor(shard, local)

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

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which state dicts have shards, also within a step, which then cannot go on."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False

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
        self._group = group
        self._weights = weights
        self._counts = counts
        self._shard_counts = self._of_shards()
        self._copy_counts: list[int] = []
        self._awaits_backward = False  # which gathers again
        self._trains: list[bool] = []  # the copies, when they were gathered
        self._memory: list[Tensor] = []  # that FSDP2 gathers into, of each copy
        fsdp2_gathers.watch_gathers(unit, group, self, patches)

    @property
    def _params(self) -> list[FSDPParam]:
        return self._group.fsdp_params

    def _of_shards(self) -> list[int]:
        return torch_internals.versions([param.sharded_param for param in self._params])

    def _of_copies(self) -> list[int]:
        return self._counts.of([param.unsharded_param for param in self._params])

    def moves(self, shard: DTensor, local: Tensor) -> bool:
        """Give ``shard`` other memory, with its values; False if it is none of the group."""
        param = next((param for param in self._params if param.sharded_param is shard), None)
        if param is None:
            return False
        if self._awaits_backward and shard.requires_grad:
            raise RuntimeError(
                f"{self._weights.name(shard)} got other values (p.data = values) between a forward and its"
                f" backward, which would compute with the new ones. Write them {IN_HOOKS}."
            )
        if self._group.is_unsharded:
            torch_internals.local_tensor(shard).copy_(local)
            torch.autograd.graph.increment_version([shard])
        else:
            torch_internals.set_local_tensor(shard, local)
            param.reset_sharded_param()  # FSDP2 gathers from it
        return True

    def is_current(self) -> bool:
        """Whether no shard was written since it was gathered."""
        return self._shard_counts == self._of_shards()

    def starting(self) -> None:
        """Before an all-gather starts, maybe ahead of the forward that needs it."""
        self._awaits_backward = False
        self._shard_counts = self._of_shards()

    def finished(self) -> bool:
        """After an all-gather; False if it must be repeated, since a shard was written after it had started."""
        self._copy_counts = self._of_copies()
        self._trains = [param.unsharded_param.requires_grad for param in self._params]
        if not self._memory:
            self._memory = [_memory(param.unsharded_param) for param in self._params]
        return self.is_current()

    def freeing(self, is_in_forward: bool) -> None:
        """Before the copies are freed or hidden."""
        self._awaits_backward = is_in_forward and torch.is_grad_enabled()
        trains = [param.unsharded_param.requires_grad for param in self._params]
        if trains != self._trains:
            self._freeze_alike(trains)
        counts = self._of_copies()
        if counts == self._copy_counts:
            return
        shards_before = self._shard_counts
        shards_now = self._of_shards()
        for index, param in enumerate(self._params):
            if counts[index] == self._copy_counts[index]:
                continue
            if self._weights.is_recovering:
                _set_memory(param.unsharded_param, self._memory[index])
                continue
            _return_to_memory(param.unsharded_param, self._memory[index])
            name = self._weights.name(param.sharded_param)
            _write_back(param, name, shard_is_written=shards_before[index] != shards_now[index])
        self._copy_counts = self._of_copies()
        self._shard_counts = self._of_shards()

    def shows_shards(self) -> bool:
        """Whether state dicts have shards within a step, which then cannot go on."""
        return self._weights.is_saving

    def _freeze_alike(self, trains: list[bool]) -> None:
        """Freeze or unfreeze shards like their copies, unless somebody has set the shards' own flags since."""
        for param, before, now in zip(self._params, self._trains, trains, strict=True):
            if now != before and param.sharded_param.requires_grad == before:
                param.sharded_param.requires_grad_(now)
        self._trains = trains


def _memory(copied: Tensor) -> Tensor:
    """The memory of a gathered copy on this rank, with a version counter of its own."""
    return DATA.__get__(torch_internals.local_tensor(copied))


def _return_to_memory(copied: Tensor, memory: Tensor) -> None:
    """Move a copy, which ``.data = values`` has given other memory, back to where FSDP2 gathers it."""
    now = _memory(copied)
    if now.data_ptr() != memory.data_ptr():
        memory.copy_(now)
        _set_memory(copied, memory)


def _set_memory(copied: Tensor, memory: Tensor) -> None:
    if isinstance(copied, DTensor):
        torch_internals.set_local_tensor(copied, memory)
    else:
        DATA.__set__(copied, memory)


@torch.no_grad()
def _write_back(param: FSDPParam, name: str, shard_is_written: bool) -> None:
    """Copy this rank's slice of a gathered copy into the shard, both written since the last look. Not a collective.

    Raises RuntimeError if the copy has another dtype, in which small changes are rounded away, or if both
    differ.
    """
    shard = torch_internals.local_tensor(param.sharded_param)
    copied = fsdp2_gathers.own_slice(param)
    if copied.dtype == shard.dtype and not shard_is_written:
        shard.copy_(copied)
        torch.autograd.graph.increment_version([param.sharded_param])
    # If `.data` was only read, they are equal.
    elif not torch.equal(copied.to(shard.device), shard.to(copied.dtype)):
        raise RuntimeError(_refusal(name, shard, copied))


def _refusal(name: str, shard: Tensor, copied: Tensor) -> str:
    if copied.dtype == shard.dtype:
        return (
            f"{name} was written twice while it was gathered: as module.parameters() has it within a step,"
            " and as a list or an optimizer holds its shard. Take parameters from the module, or write them"
            f" {IN_HOOKS}."
        )
    return (
        f"{name} was written within a step or a forward, where FSDP2 has gathered it in {copied.dtype},"
        f" which rounds what is written: its own dtype is {shard.dtype}. Write it {IN_HOOKS}. Or pass"
        " data_parallel='ddp'."
    )
