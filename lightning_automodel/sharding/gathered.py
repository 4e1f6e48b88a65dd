"""The copies of a unit's parameters that FSDP2 has gathered, and the shards, which follow what is done to them.

What was written to copies goes into the shards where the strategy itself frees them: each rank holds its
own slice of every copy, so nothing is communicated. Where FSDP2 has freed them before, or where they have
another dtype, a write would be lost, and raises. Ranks must write alike, as under DDP.

In-place writes are counted by torch, on views of a copy too. What is written through ``.data`` is counted by
an alias of the copy, of which ``.data`` gives views. Functions take copies as plain tensors, without
``__torch_function__``: a forward is as fast as ever. Views are plain tensors, since compiled functions refuse
other classes.
"""

import weakref
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.torch import local_tensor, writes
from lightning_automodel.sharding.containers import CHANGES_A_COPY, Contents, containers_in
from lightning_automodel.sharding.gathered_tensor import (
    IN_HOOKS,
    WRITTEN_TWICE,
    check_is_gathered,
    make_gathered,
    make_plain,
    text_of_refusal,
)
from lightning_automodel.sharding.units import class_name
from lightning_automodel.sharding.whole_copies import note_write, versions

if TYPE_CHECKING:
    from lightning_automodel.sharding.fsdp2_engine import FSDP2Engine

_NUM_COMPARISONS = 4
"""How often, from the first micro-batch on, copies are compared with shards. Code that writes them does so in each."""

_SUBSTITUTED = (
    "torch.func.functional_call puts other tensors in the place of parameters of an FSDP unit, which would"
    " put its own ones back. Call it on modules inside of a unit: pass auto_wrap_policy=set(), which makes one"
    " unit of the model, or data_parallel='ddp'."
)

WRITTEN_BEFORE_BACKWARD = (
    "was written between a forward and its backward, for which FSDP2 has the values of one time alone. One process"
    " would go on with those of the forward, with the new ones, or raise, as they were written. Write it"
    f" {IN_HOOKS}, or pass data_parallel='ddp'."
)
"""Why a trained shard must not be written before a backward that reaches it."""


class Phase(Enum):
    """What runs, which decides what FSDP2 frees."""

    HOOKS = auto()  # what a forward gathers is freed after it: the module shows shards
    BEFORE_BACKWARD = auto()  # as HOOKS, and the backward needs the weights of the step's forward
    STEP = auto()  # of training or evaluation: gathered parameters stay for it, or for the window
    REPLAY = auto()  # as STEP, with a backward that is not the strategy's


class GatheredUnit(fsdp2.Unit):
    """Lets the shards of a unit follow what is done to its gathered parameters.

    =============  ==========================  ===============  ================================================
    a unit is      its modules show            what is gathered  it leaves by
    =============  ==========================  ===============  ================================================
    sharded        shards                      freed            a forward, or ``gather``
    pending        shards                      on its way       the forward that waits for it, or ``free``
    gathered       copies                      in memory        ``retain`` or ``free``, or FSDP2, which frees it
    retained       shards                      in memory        ``show_retained`` or ``free``
    =============  ==========================  ===============  ================================================

    Versions of the shards are noted before a gather, to know whether what is gathered is current, and before a
    forward, to know what was written before its backward. Versions of the copies are noted whenever the
    shards have followed them.

    Attributes:
        engine: Knows which phase it is in, and whether a backward of the strategy runs.
        hooks: Handles of the hooks of its forwards.
        forwards: Those that run (one may call the unit again): the arguments, and what FSDP2 has copied of them.
    """

    def __init__(self, module: FSDPModule, engine: "FSDP2Engine") -> None:
        super().__init__(module)
        self.engine = engine
        self._forward_versions: list[int] = []  # of the shards, before the newest forward
        # From now on the copies stay the same objects. FSDP2 accumulates into those of units that a window
        # uses for the first time in its last micro-batch, too.
        for group in self.groups:
            fsdp2.make_unsharded(group)
        self._shards = [param.sharded_param for param in self.params]
        self._copies = [make_gathered(param, engine) for param in self.params]  # that all gathers write to
        for shard in self._shards:
            if num_expert_ranks(shard) == 1:  # other ranks have other experts
                shard.engine_ref = weakref.ref(engine)
        self.note_writes()
        self.free()  # other code may have gathered them before
        self.note_shards()
        self._given: list[Any] = []  # containers among the arguments of the forward that runs
        self.forwards: list[tuple[Any, Contents]] = []
        hooked = cast(nn.Module, module)
        self.hooks = [
            hooked.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            hooked.register_forward_pre_hook(self._note_copies, with_kwargs=True),
            hooked.register_forward_hook(self._after_forward),
        ]

    # --- A forward ----------------------------------------------------------------------------------------------------

    def note_shards(self) -> None:
        """Note the versions of the shards, before a gather that FSDP2 may start ahead."""
        self._gathered_versions = versions(self._shards)

    @torch_internals.not_compiled
    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before FSDP2's own hook, which gathers the parameters unless they are."""
        self._given = containers_in((args, *kwargs.values()))
        if self.is_substituted():
            raise RuntimeError(_SUBSTITUTED)
        if self.is_gathered:
            self.check_current()
        else:
            self.settle()
            if self.is_pending and self.written:
                self.free()  # a shard was written after the gather had started
            self.note_shards()
        if self.engine.phase is not Phase.BEFORE_BACKWARD:
            self._forward_versions = versions(self._shards)
        if torch.is_grad_enabled() and self.engine.backward is None:  # else a block is recomputed
            for group in self.groups:
                self.engine.calls[group] += 1

    @torch_internals.not_compiled
    def _note_copies(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After FSDP2's own hook."""
        copies = []
        if self._given:
            own = set(map(id, self._given))
            copies = [each for each in containers_in((args, *kwargs.values())) if id(each) not in own]
        self.forwards.append((args, Contents(copies)))

    @torch_internals.not_compiled
    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        """After FSDP2's own hook, too."""
        if not self.is_gathered:
            self.show_shards()
        while self.forwards:
            own, contents = self.forwards.pop()
            if own is args:  # else that one has raised
                if contents.has_changed():
                    raise RuntimeError(f"{class_name(module)}: {CHANGES_A_COPY}")
                return

    @property
    def written(self) -> list[Any]:
        """The shards that were written since the unit was gathered; the same on all ranks."""
        return self._written_since(self._gathered_versions)

    def _written_since(self, before: list[int]) -> list[Any]:
        """The shards whose versions are no longer those of ``before``; none if that is empty."""
        now_and_before = zip(self._shards, versions(self._shards), before, strict=False)
        return [shard for shard, now, then in now_and_before if now != then]

    def check_current(self) -> None:
        """Raise RuntimeError if a step has written shards while it computes with what is gathered of them."""
        if written := self.written:
            raise RuntimeError(f"{written[0].parameter_name} {WRITTEN_TWICE}")

    def written_since_forward(self) -> list[Any]:
        """The shards that were written after the newest forward, whose backward comes next.

        What a step writes to its copies, while these stay gathered, the backward sees as in one process.
        """
        return self.written if self.is_gathered else self._written_since(self._forward_versions)

    # --- Before copies are freed --------------------------------------------------------------------------------------

    def note_writes(self) -> None:
        """Take what was written to copies so far as done: it is in the shards, or given up after an exception."""
        self._noted = list(map(writes, self._copies))

    def settle(self) -> None:
        """Write into the shards what was written to their copies. Not a collective.

        Raises RuntimeError if FSDP2 has freed a copy that was written.
        """
        noted = list(map(writes, self._copies))
        if noted == self._noted:
            return
        written = self.written
        for number, param in enumerate(self.params):
            if noted[number] == self._noted[number]:
                continue
            shard = param.sharded_param
            _write_back(param, not any(shard is one for one in written))
            note_write([shard], "write", [local_tensor(param.unsharded_param)])
            self._gathered_versions[number] += 1
            if self._forward_versions:
                self._forward_versions[number] += 1
        self.note_writes()

    def check_uncounted_writes(self) -> None:
        """Raise RuntimeError if a copy was written in a way that torch does not count. Reads the device.

        Not a collective.
        """
        if not self.is_gathered or self.written:
            return
        for param in self.params:
            shard = local_tensor(param.sharded_param)
            own = fsdp2.own_slice(param)
            if own.dtype != shard.dtype:
                continue
            own = own.to(shard.device)
            # The first is one kernel, and the second, for NaN, six.
            if not torch.equal(own, shard) and not torch.allclose(
                own, shard, rtol=0.0, atol=0.0, equal_nan=True
            ):
                raise RuntimeError(
                    f"{param.sharded_param.parameter_name} was written within a step or a forward in a way that"
                    " nothing counts: by .data of a slice (p[:2].data), by an array of .numpy(), or its shard"
                    " was by its local tensor, while it was gathered. The write would be lost. Write"
                    f" p[:2].clamp_() under torch.no_grad(), or p.data[:2].clamp_(), or write {IN_HOOKS}."
                )

    def close(self) -> None:
        """Stop following: FSDP2 alone has them again."""
        for hook in self.hooks:
            hook.remove()
        for gathered in self._copies:
            make_plain(gathered)
        self._copies.clear()


class GatheredUnits:
    """The units of a module, and what they have gathered from the first forward of a step, or of a window, on.

    Attributes:
        units: Each with its gathered parameters.
        shards: The parameters of all units.
        written_before_backward: The shards that were written between a forward and the backward that runs.

    Args:
        modules: The FSDP units, each once.
        stays: Whether the parameters of a unit stay gathered for the whole step.
        engine: The engine that they belong to.
    """

    def __init__(
        self, modules: Iterable[FSDPModule], stays: Callable[[nn.Module], bool], engine: "FSDP2Engine"
    ) -> None:
        self.units = [GatheredUnit(module, engine) for module in modules]
        self.shards = [param.sharded_param for unit in self.units for param in unit.params]
        self.whole_step = [unit for unit in self.units if stays(unit.module)]
        self.written_before_backward: list[Any] = []
        self._num_comparisons_left = _NUM_COMPARISONS
        self._versions_at_start: list[int] = []  # of the shards, before the step's forwards

    def note_start(self) -> None:
        """The forwards of a step begin."""
        self._versions_at_start = versions(self.shards)

    def settle(self) -> None:
        """Write into the shards what was written to their copies. Not a collective."""
        for unit in self.units:
            unit.settle()

    def check_current(self) -> None:
        """Raise RuntimeError if a step has written shards of units that stay gathered for all of it."""
        for unit in self.whole_step:  # others are looked at when they are called
            if unit.is_gathered:
                unit.check_current()

    def show_shards(self, retained: bool) -> None:
        """Hooks follow, which find shards: retain behind them what was gathered, or free it."""
        self.settle()
        if self._num_comparisons_left > 0:
            self._num_comparisons_left -= 1
            for unit in self.units:
                unit.check_uncounted_writes()
        for unit in self.units:
            if unit.is_gathered and retained:
                unit.retain()
            elif unit.is_gathered:
                unit.free()

    def release(self, reuses_retained: bool) -> None:
        """Free what is gathered, so that nothing stale is used once weights are written.

        Or show retained parameters again, unless the sharded ones were written since.
        """
        self.settle()
        for unit in self.units:
            can_reuse = reuses_retained and unit.is_retained and not unit.written
            if can_reuse and unit.show_retained():
                continue
            unit.free()
            unit.note_shards()

    def show_for_backward(self) -> None:
        """Show retained parameters again. What hooks have freed or written is gathered anew: a collective if so.

        The backward computes with the weights of now, as if FSDP2 gathered them for it; it must not reach
        :attr:`written_before_backward`.
        """
        self.settle()
        is_written = versions(self.shards) != self._versions_at_start
        if is_written:
            self.check_current()  # the step itself may have written them
        freed: set[GatheredUnit] = set()  # by a hook's forward
        for unit in self.units:
            if unit.is_retained and not unit.show_retained():
                freed.add(unit)
        self.written_before_backward = []
        if not (freed or is_written):
            return
        for unit in self.units:
            written = unit.written_since_forward()
            self.written_before_backward += written
            if unit in freed or (written and unit.is_gathered):
                unit.free()
                unit.note_shards()
                fsdp2.gather(unit.module)

    def recover(self) -> None:
        """After an exception, give up what was written to copies, and gathers that other ranks may not join."""
        for unit in self.units:
            unit.note_writes()
            unit.forget_background_gather()
            unit.forwards.clear()


@torch.no_grad()
def _write_back(param: fsdp2.FSDPParam, shard_is_current: bool) -> None:
    """Copy this rank's slice of a written copy into the shard. Not a collective.

    Raises RuntimeError if the copy was freed, if it has another dtype, in which small changes are rounded away, or
    if the shard was written too.
    """
    gathered = param.unsharded_param
    check_is_gathered(gathered)
    shard = local_tensor(param.sharded_param)
    own = fsdp2.own_slice(param)
    if own.dtype != shard.dtype or not shard_is_current:
        raise RuntimeError(text_of_refusal(param.sharded_param, gathered))
    shard.copy_(own)
    torch.autograd.graph.increment_version([param.sharded_param])
