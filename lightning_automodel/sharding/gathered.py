"""The copies of a unit's parameters that FSDP2 has gathered, and the shards, which follow what is done to them.

What was written to copies goes into the shards where the strategy itself frees them: each rank holds its
own slice of every copy, so nothing is communicated. Where FSDP2 has freed them before, or where they have
another dtype, a write would be lost, and raises. Ranks must write alike, as under DDP.
"""

from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_automodel.gradients.engine import Engine
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.torch import local_tensor, use_and_writes, version, versions
from lightning_automodel.sharding.gathered_tensors import (
    IN_HOOKS,
    WRITTEN_TWICE,
    make_gathered,
    make_plain,
    set_memory,
    text_of_refusal,
)

_IS_UNSHARDED = attrgetter("is_unsharded")
_SUBSTITUTED = (
    "torch.func.functional_call puts other tensors in the place of parameters of an FSDP unit, which would"
    " put its own ones back. Call it on modules inside of a unit: pass auto_wrap_policy=set(), which makes one"
    " unit of the model, or data_parallel='ddp'."
)


class GatheredUnit(fsdp2.Unit):
    """Lets the shards of a unit follow what is done to its gathered parameters.

    Attributes:
        number: Of the unit, from 1.
        engine: Knows whether a backward of the strategy runs.
        assigned: Copies that have other memory (``p.data = values``), until FSDP2 gathers or frees them: a backward
            may need what it has gathered.
        hook: Of its forwards.
    """

    def __init__(self, module: FSDPModule, number: int, engine: Engine) -> None:
        super().__init__(module)
        self.number = number
        self.engine = engine
        self.assigned: list[Any] = []
        self._assignments: list[int] = []  # `shard.data = values`, before the newest forward
        # From now on the copies stay the same objects. FSDP2 accumulates into those of units that a window
        # uses for the first time in its last micro-batch, too.
        for group in self.groups:
            fsdp2.make_unsharded(group)
        self._copies: list[Any] = []
        for param in self.params:
            make_gathered(param.unsharded_param, param.sharded_param, self)
            self._copies.append(param.unsharded_param)
        self._note()
        self.free()  # other code may have gathered them before
        self.note_shards()
        self.hook = cast(nn.Module, module).register_forward_pre_hook(self._before_forward, prepend=True)

    @property
    def is_gathered(self) -> bool:
        """Whether its modules show gathered parameters."""
        return any(map(_IS_UNSHARDED, self.groups))

    # --- A forward ----------------------------------------------------------------------------------------------------

    def note_shards(self) -> None:
        """Note the versions of the shards, before a gather that FSDP2 may start ahead."""
        self._gathered_versions = self._versions()

    @torch_internals.not_compiled
    def _before_forward(self, *_: Any) -> None:
        """Before FSDP2's own hook, which gathers the parameters unless they are."""
        if self.is_substituted():
            raise RuntimeError(_SUBSTITUTED)
        if self.is_gathered:
            self.check_current()
        else:
            self.settle()
            self._undo_assignments()
            if self.is_pending and not self.is_current:
                self.free()  # a shard was written after the gather had started
            self.note_shards()
        self._assignments = [param.sharded_param.num_assignments for param in self.params]

    @override
    def gather(self) -> None:
        """See the base class."""
        if not self.is_gathered:
            self._undo_assignments()
        super().gather()

    @override
    def free(self) -> None:
        """See the base class."""
        super().free()
        self._undo_assignments()

    def _undo_assignments(self) -> None:
        """Let copies have the memory that FSDP2 gathers to and frees."""
        for gathered in self.assigned:
            set_memory(gathered, gathered.memory)
        self.assigned.clear()

    @property
    def is_current(self) -> bool:
        """Whether no shard was written since it was gathered; the same on all ranks."""
        return self._gathered_versions == self._versions()

    def _versions(self) -> list[int]:
        with plain_access():
            return versions(param.sharded_param for param in self.params)

    def check_current(self) -> None:
        """Raise RuntimeError if a step has written shards while it computes with what was gathered of them."""
        if not self.is_gathered:
            return
        for param, now, then in zip(self.params, self._versions(), self._gathered_versions, strict=True):
            if now != then:
                raise RuntimeError(f"{param.sharded_param.parameter_name} {WRITTEN_TWICE}")

    def check_unwritten(self) -> None:
        """Raise RuntimeError if shards were written between a forward and the backward that gathers them again.

        One process would go on with the values of the forward, or raise.
        """
        if not self._assignments:
            return  # no forward has run
        for number, (param, now) in enumerate(zip(self.params, self._versions(), strict=True)):
            shard = param.sharded_param
            is_written = now != self._gathered_versions[number]
            if shard.requires_grad and (is_written or shard.num_assignments != self._assignments[number]):
                raise RuntimeError(
                    f"{shard.parameter_name} was written between a forward and its backward, which would compute"
                    f" with the new values. Write it {IN_HOOKS}, or pass reshard_during_accumulation=False."
                )

    # --- Before copies are freed --------------------------------------------------------------------------------------

    def _note(self) -> None:
        self._noted = list(map(use_and_writes, self._copies))

    @torch.no_grad()
    def settle(self) -> None:
        """Let shards follow what was done to their copies. Not a collective.

        Raises RuntimeError if FSDP2 has freed a copy that was written.
        """
        noted = list(map(use_and_writes, self._copies))
        if noted == self._noted:
            return
        versions_now = self._versions()
        for number, (before, now) in enumerate(zip(self._noted, noted, strict=True)):
            param = self.params[number]
            shard = param.sharded_param
            (trained, *writes_before), (trains, *writes_now) = before, now
            if trains != trained and shard.requires_grad == trained:
                shard.requires_grad_(trains)
            if writes_now != writes_before:
                _write_back(param, self._gathered_versions[number] == versions_now[number])
                with plain_access():
                    self._gathered_versions[number] = version(shard)
        self._note()

    def check_uncounted_writes(self) -> None:
        """Raise RuntimeError if a copy was written in a way that torch does not count. Reads the device.

        Not a collective.
        """
        if not (self.is_gathered and self.is_current):
            return
        for param in self.params:
            shard = local_tensor(param.sharded_param)
            own = fsdp2.own_slice(param)
            if own.dtype == shard.dtype and not _are_equal(own.to(shard.device), shard):
                raise RuntimeError(
                    f"{param.sharded_param.parameter_name} was written within a step or a forward in a way that"
                    " nothing counts: by .data of a slice (p[:2].data), by an array of .numpy(), or its shard"
                    " was by its local tensor, while it was gathered. The write would be lost. Write"
                    f" p[:2].clamp_() under torch.no_grad(), or p.data[:2].clamp_(), or write {IN_HOOKS}."
                )

    def forget_writes(self) -> None:
        """After an exception, give up what was written to copies, some of which may have been freed."""
        self._undo_assignments()
        self._note()

    def close(self) -> None:
        """Stop following: FSDP2 alone has them again."""
        self.hook.remove()
        for gathered in self._copies:
            make_plain(gathered)
        self._copies.clear()


def _write_back(param: fsdp2.FSDPParam, shard_is_current: bool) -> None:
    """Copy this rank's slice of a written copy into the shard. Not a collective.

    Raises RuntimeError if the copy was freed, if it has another dtype, in which small changes are rounded away, or
    if the shard was written too.
    """
    gathered = param.unsharded_param
    if gathered.numel() > 0 and gathered.memory.untyped_storage().size() == 0:
        raise RuntimeError(
            f"{param.sharded_param.parameter_name} was written within a step or a forward, and FSDP2 has freed"
            f" what it had gathered there, so that the write is lost. Write it {IN_HOOKS}. In training, keep"
            " parameters gathered for the window: reshard_during_accumulation=False. Or pass"
            " data_parallel='ddp'."
        )
    shard = local_tensor(param.sharded_param)
    own = fsdp2.own_slice(param)
    if own.dtype != shard.dtype or not shard_is_current:
        raise RuntimeError(text_of_refusal(param.sharded_param, gathered))
    shard.copy_(own)
    torch.autograd.graph.increment_version([param.sharded_param])


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
