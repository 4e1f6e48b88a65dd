"""All-gathers ahead of what needs them, and on a rank without data that others need; and the order of collectives."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.distributed.collectives import Gathers
from lightning_automodel.gradients.rank_agreement import DIFFERENT_UNITS
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.phases import Phase, PhasedEngine
from lightning_automodel.sharding.units import fsdp_roots

_STEP_ENDS = -1
"""Told in place of the number of a unit."""

_BACKWARD_ALONE = (
    "A backward in a step of evaluation in which other ranks have no data left: FSDP2 would reduce gradients of"
    " parameters with these ranks. For gradients of inputs or activations, call torch.autograd.grad(loss, inputs), or"
    " give all ranks equally many batches."
)
"""Why a backward is refused whose reductions others do not join."""


def set_prefetch(model: nn.Module, num_ahead: int, in_background: bool) -> None:
    """Let each FSDP unit start the all-gathers of the next ``num_ahead`` units, in forward and backward.

    0 is FSDP2's own behaviour: one unit ahead in the backward. Not a collective, but ranks must agree on the
    arguments. If units run in another order than they are registered in, memory is wasted, but no rank
    hangs.
    """
    for root in fsdp_roots(model):
        units = fsdp2.fsdp_units(cast(nn.Module, root))
        fsdp2.set_background_gathers(units, in_background)
        below = [unit for unit in units if unit is not root]
        forward = [root, *below]
        backward = [root, *reversed(below)]
        for index in range(len(units)):
            following = slice(index + 1, index + 1 + num_ahead)
            forward[index].set_modules_to_forward_prefetch(forward[following])
            # FSDP2 itself gathers one unit ahead, in the order in which the units have really run.
            behind = backward[following] if num_ahead > 1 else []
            backward[index].set_modules_to_backward_prefetch(behind)


class UnitCollectives:
    """Notes in which order FSDP2 gathers and reduces ``units``, and lets a rank without data gather what others do.

    FSDP2 matches the collectives of ranks by their order alone: where ranks use different units, each gets parameters
    or gradients of another layer than it asks for, without an error if layers have one shape.

    In an evaluation step that a rank joins without data, the first rank with some, its leader, tells all ranks over the
    host ``group`` which unit it gathers next. No user code runs on the rank without data: nothing is logged, counted or
    drawn at random there. The ``engine`` of the units keeps the number of what was noted, and what second derivatives
    need.
    """

    def __init__(self, engine: PhasedEngine, units: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        self._engine = engine
        self._units = units
        self._group = group
        self._leader: int | None = None  # while it tells what it gathers
        self._patches = PatchStack()
        for index, unit in enumerate(units):
            fsdp2.watch_unit(unit, partial(self._note, index), engine.keep_gathered, self._patches)

    @contextmanager
    def step(self, leader: int | None) -> Iterator[None]:
        """Context of a step of this rank, which begins with everything sharded. A collective if there is a ``leader``.

        Raises RuntimeError if the leader gathers other units.
        """
        self._leader = leader
        try:
            yield
            self._note(_STEP_ENDS)
        finally:
            self._leader = None

    def join(self, leader: int) -> None:
        """Take part in a step of other ranks, by gathering what its ``leader`` gathers. A collective."""
        while (index := self._told(leader, _STEP_ENDS)) != _STEP_ENDS:
            self._units[index].unshard()
            self._units[index].reshard()
        self._note(_STEP_ENDS)

    def close(self) -> None:
        """Note nothing any more."""
        self._patches.restore()

    def _note(self, index: int, *reduced: int) -> None:
        """Note what begins: a unit's all-gather, or the reduction of some of its parameters; or that a step ends."""
        if self._engine.phase is Phase.HOOKS:
            Gathers.check()
        elif self._leader is not None:
            if reduced:
                raise RuntimeError(_BACKWARD_ALONE)
            if self._told(self._leader, index) != index:
                raise RuntimeError(DIFFERENT_UNITS)
        self._engine.collectives = hash((self._engine.collectives, index, *reduced))

    def _told(self, leader: int, own: int) -> int:
        """What the leader tells, which this rank tells if it is the leader. A collective over the group."""
        told = torch.tensor(own, device="cpu")
        dist.broadcast(told, leader, self._group)
        return int(told)
