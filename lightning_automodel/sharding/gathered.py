"""Parameters that FSDP2 has gathered for a step, and what user code does to them there.

A module's parameters are then copies, which are freed. What was written to them goes into the shards where the
strategy itself frees them: each rank holds its own slice of every copy, so nothing is communicated. Where FSDP2 has
freed them before, or where they have another dtype, a write would be lost, and raises. Ranks must write alike, as
under DDP.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_automodel.gradients.grad_sync import GradSync
from lightning_automodel.internals import fsdp2, fsdp2_gathers
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import DATA, GRAD, plain_access
from lightning_automodel.internals.fsdp2 import FSDPParam
from lightning_automodel.internals.torch import local_tensor, version, versions
from lightning_automodel.sharding.whole_copies import own_part

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""


def _get_data(gathered: Any) -> Tensor:
    alias = DATA.__get__(gathered)  # whose version counter is its own
    gathered.aliases.append(alias)
    gathered.touched.add(gathered)
    return alias


def _set_data(gathered: Any, value: Tensor) -> None:
    if value.dtype != gathered.dtype:
        raise RuntimeError(_refused(gathered.shard, gathered))
    gathered.num_assignments += 1
    gathered.touched.add(gathered)
    if isinstance(gathered, DTensor) and isinstance(value, DTensor):
        value = local_tensor(value)
    elif isinstance(gathered, DTensor):
        value = own_part(value, gathered)
    elif isinstance(value, DTensor):
        value = value.full_tensor()
    _set_memory(gathered, value.detach().clone())  # FSDP2 frees the memory of what it has gathered


def _get_grad(gathered: Any) -> Tensor | None:
    if _is_asked_by_torch(gathered):
        return GRAD.__get__(gathered)
    return gathered.shard.grad


def _set_grad(gathered: Any, value: Tensor | None) -> None:
    if _is_asked_by_torch(gathered):
        GRAD.__set__(gathered, value)
    else:
        gathered.shard.grad = value


def _del_grad(gathered: Any) -> None:
    _set_grad(gathered, None)


def _is_asked_by_torch(gathered: Any) -> bool:
    """Whether ``.grad`` is that of the gathered parameter, as torch needs it in a backward; else it is the shard's."""
    return gathered.sync.window is not None or torch_internals.is_read_by_torch()


def _deepcopy(gathered: Any, memo: dict[int, Any]) -> Any:
    copied = nn.Parameter(gathered.detach().clone(), gathered.requires_grad)
    memo[id(gathered)] = copied
    return copied


def _reduce_ex(gathered: Any, protocol: Any) -> Any:
    return nn.Parameter(gathered.detach(), gathered.requires_grad).__reduce_ex__(protocol)


class Gathered(nn.Parameter):
    """A parameter that FSDP2 has gathered. It shows the gradient of the shard, and counts writes through ``.data``.

    Attributes:
        shard: The sharded parameter.
        sync: Knows whether a backward of the strategy runs.
        memory: Where FSDP2 gathers it.
        aliases: What ``.data`` was read as since writes were last carried into the shard.
        num_assignments: How often ``.data`` was assigned.
        touched: Those of all that were reached through ``.data``.
    """

    data = property(_get_data, _set_data)
    grad = property(_get_grad, _set_grad, _del_grad)
    __deepcopy__ = _deepcopy
    __reduce_ex__ = _reduce_ex


class GatheredPart(DTensor):
    """As :class:`Gathered`, of a parameter that tensor parallelism shards too."""

    data = property(_get_data, _set_data)
    grad = property(_get_grad, _set_grad, _del_grad)
    __deepcopy__ = _deepcopy
    __reduce_ex__ = _reduce_ex


class GatheredParameters:
    """Follows the gathered parameters of ``units`` from their first gather to :meth:`close`."""

    def __init__(self, units: Iterable[FSDPModule], sync: GradSync) -> None:
        self._sync = sync
        self._params = {
            unit: [param for group in fsdp2.param_groups(unit) for param in group.fsdp_params]
            for unit in units
        }
        self._copies: dict[FSDPModule, list[Any]] = {}  # once they are adopted
        self._looks: dict[FSDPModule, tuple[list[int], list[bool]]] = {}
        self._touched: set[Tensor] = set()
        self._states: dict[FSDPParam, tuple[int, bool]] = {}  # writes to the copy, and whether it trains
        # Of the shards of each unit when they were last gathered, or might have been.
        self._shard_versions: dict[FSDPModule, list[int]] = {}
        self._assignments: dict[FSDPParam, int] = {}  # `shard.data = values`, before the newest forward
        self.hooks: list[RemovableHandle] = []
        for unit, params in self._params.items():
            places = fsdp2_gathers.places_of(unit, params)
            substitutes: list[Any] = []
            module = cast(nn.Module, unit)
            before = partial(self._before_gather, unit, places, substitutes)
            self.hooks.append(module.register_forward_pre_hook(before, prepend=True))
            after = partial(self._after_gather, unit, places, substitutes)
            self.hooks.append(module.register_forward_pre_hook(after))
        self.begin_step()

    # --- A forward ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note the versions of the shards before the gathers of a step, also those that FSDP2 starts ahead."""
        for unit in self._params:
            self._shard_versions[unit] = self._versions(unit)

    @torch_internals.not_compiled
    def _before_gather(self, unit: FSDPModule, places: Any, substitutes: list[Any], *_: Any) -> None:
        """Before FSDP2's own hook, which would replace what ``torch.func.functional_call`` has put in place."""
        substitutes[:] = fsdp2_gathers.substitutes_in(places)
        if unit in self._copies:
            if not fsdp2.unsharded([unit]):
                self.settle([unit])
        elif torch.is_inference_mode_enabled():
            fsdp2_gathers.unshard([unit])

    @torch_internals.not_compiled
    def _after_gather(self, unit: FSDPModule, places: Any, substitutes: list[Any], *_: Any) -> None:
        if not fsdp2.unsharded([unit]):
            unit.unshard()  # a root's own hooks run later, within its forward
        self.adopt(unit)
        if not self.is_current(unit):
            # A shard was written after the gather had started, or within a step.
            self.gather_again(unit)
        self._assignments.update((p, p.sharded_param.num_assignments) for p in self._params[unit])
        fsdp2_gathers.show(places, substitutes)

    def gather_again(self, unit: FSDPModule) -> None:
        """Gather the shards of a unit that were written since. A collective.

        Autograd is told which copies have changed: a backward may need them as they were.
        """
        versions_now = self._versions(unit)
        changes = zip(self._params[unit], versions_now, self._shard_versions[unit], strict=True)
        changed = [param.unsharded_param for param, now, then in changes if now != then]
        fsdp2_gathers.gather_again(unit)
        torch.autograd.graph.increment_version(changed)
        self._shard_versions[unit] = versions_now
        self._note(unit)

    def check_unassigned(self, units: Iterable[FSDPModule]) -> None:
        """Raise RuntimeError if ``p.data = values`` came between a forward and the backward that gathers it again.

        One process would go on with the values of the forward. ``units`` have run, and are not gathered.
        """
        for unit in units:
            for param in self._params[unit]:
                shard = param.sharded_param
                before = self._assignments.get(param, shard.num_assignments)
                if shard.requires_grad and shard.num_assignments != before:
                    raise RuntimeError(
                        f"{shard.parameter_name} got other values (p.data = values) between a forward and its"
                        f" backward, which would compute with the new ones. Write them {IN_HOOKS}."
                    )

    def adopt(self, unit: FSDPModule) -> None:
        """Give the copies of a gathered unit their class, which they keep."""
        if unit in self._copies:
            return
        self._copies[unit] = [param.unsharded_param for param in self._params[unit]]
        for param in self._params[unit]:
            gathered = param.unsharded_param
            gathered.shard = param.sharded_param
            gathered.sync = self._sync
            gathered.aliases = []
            gathered.num_assignments = 0
            gathered.touched = self._touched
            gathered.memory = _memory(gathered)
            if isinstance(gathered, DTensor):
                gathered.__class__ = GatheredPart
            else:
                gathered.__class__ = Gathered
        self._note(unit)

    def is_current(self, unit: FSDPModule) -> bool:
        """Whether no shard of ``unit`` was written since it was gathered; the same on all ranks."""
        return self._shard_versions[unit] == self._versions(unit)

    def _versions(self, unit: FSDPModule) -> list[int]:
        with plain_access():
            return versions(param.sharded_param for param in self._params[unit])

    def _note(self, unit: FSDPModule) -> None:
        for param in self._params[unit]:
            param.unsharded_param.aliases.clear()
            self._states[param] = _state(param)
        self._looks[unit] = self._look(unit)
        self._touched.difference_update(self._copies[unit])

    def _look(self, unit: FSDPModule) -> tuple[list[int], list[bool]]:
        """What changes if copies are written or frozen, but through ``.data``: quicker than their states."""
        copies = self._copies[unit]
        return versions(copies), [gathered.requires_grad for gathered in copies]

    # --- Before copies are freed --------------------------------------------------------------------------------------

    def settle(self, units: Iterable[FSDPModule]) -> None:
        """Let shards follow what was done to their copies, of which the strategy frees those that are gathered.

        Not a collective. Raises RuntimeError if FSDP2 has freed a copy that was written.
        """
        for unit in units:
            if unit not in self._copies:
                continue
            if self._look(unit) != self._looks[unit] or not self._touched.isdisjoint(self._copies[unit]):
                changed = [param for param in self._params[unit] if _state(param) != self._states[param]]
                if changed:
                    self._follow(unit, changed)

    def _follow(self, unit: FSDPModule, changed: list[FSDPParam]) -> None:
        is_gathered = bool(fsdp2.unsharded([unit]))
        at_gather = dict(zip(self._params[unit], self._shard_versions[unit], strict=True))
        before = dict(zip(self._params[unit], self._versions(unit), strict=True))
        was_current = self.is_current(unit)
        for param in changed:
            gathered = param.unsharded_param
            shard = param.sharded_param
            num_writes, trained = self._states[param]
            if gathered.requires_grad != trained and shard.requires_grad == trained:
                shard.requires_grad_(gathered.requires_grad)
            if _state(param)[0] != num_writes:
                if not is_gathered and gathered.memory.untyped_storage().size() == 0:
                    raise RuntimeError(_freed(shard, gathered))
                _write_back(param, before[param] == at_gather[param])
        self._note(unit)
        if was_current:
            self._shard_versions[unit] = self._versions(unit)

    def forget_writes(self) -> None:
        """After an exception, give up what was written to copies, some of which may have been freed."""
        for unit in self._copies:
            for param in self._params[unit]:
                _set_memory(param.unsharded_param, param.unsharded_param.memory)
            self._note(unit)

    def close(self) -> None:
        """Stop following: FSDP2 alone has them again."""
        for unit in self._copies:
            for param in self._params[unit]:
                gathered = param.unsharded_param
                gathered.__class__ = DTensor if isinstance(gathered, DTensor) else nn.Parameter
                for name in ("shard", "sync", "aliases", "num_assignments", "touched", "memory"):
                    delattr(gathered, name)
        self._copies.clear()


def _state(param: FSDPParam) -> tuple[int, bool]:
    gathered = param.unsharded_param
    hidden = sum(map(version, gathered.aliases)) + gathered.num_assignments
    return version(gathered) + hidden, gathered.requires_grad


def _memory(gathered: Tensor) -> Tensor:
    """The memory of a copy on this rank, with a version counter of its own."""
    return DATA.__get__(local_tensor(gathered))


def _set_memory(gathered: Tensor, memory: Tensor) -> None:
    if isinstance(gathered, DTensor):
        torch_internals.set_local_tensor(gathered, memory)
    else:
        DATA.__set__(gathered, memory)


@torch.no_grad()
def _write_back(param: FSDPParam, shard_is_current: bool) -> None:
    """Copy this rank's slice of a written copy into the shard. Not a collective.

    Raises RuntimeError if the copy has another dtype, in which small changes are rounded away, or if the shard was
    written too.
    """
    gathered = param.unsharded_param
    now = _memory(gathered)
    if now.data_ptr() != gathered.memory.data_ptr():  # `.data = values`
        gathered.memory.copy_(now)
        _set_memory(gathered, gathered.memory)
    shard = local_tensor(param.sharded_param)
    own = fsdp2_gathers.own_slice(param)
    if own.dtype == shard.dtype and shard_is_current:
        shard.copy_(own)
        torch.autograd.graph.increment_version([param.sharded_param])
    # If `.data` was only read, they are equal.
    elif not torch.equal(own.to(shard.device), shard.to(own.dtype)):
        raise RuntimeError(_refused(param.sharded_param, gathered))


def _refused(shard: Any, gathered: Tensor) -> str:
    if gathered.dtype == shard.dtype:
        return (
            f"{shard.parameter_name} was written twice while it was gathered: as module.parameters() has it"
            " within a step, and as a list or an optimizer holds its shard. Take parameters from the"
            f" module, or write them {IN_HOOKS}."
        )
    return (
        f"{shard.parameter_name} was written within a step or a forward, where FSDP2 has gathered it in"
        f" {gathered.dtype}, which rounds what is written: its own dtype is {shard.dtype}. Write it"
        f" {IN_HOOKS}. Or pass data_parallel='ddp'."
    )


def _freed(shard: Any, gathered: Tensor) -> str:
    return (
        f"{shard.parameter_name} was written within a step or a forward, and FSDP2 has freed what it had"
        f" gathered there, so that the write is lost. Write it {IN_HOOKS}. In training, keep parameters"
        " gathered for the window: reshard_during_accumulation=False. Or pass data_parallel='ddp'."
    )
