"""All-gathers ahead of the forward or backward that needs them, and on a rank without data that others need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.gradients.rank_agreement import DIFFERENT_UNITS
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.units import fsdp_roots

_STEP_ENDS = -1
"""Told in place of the number of a unit."""


def set_prefetch(model: nn.Module, num_ahead: int, in_background: bool) -> None:
    """Let each FSDP unit start the all-gathers of the next ``num_ahead`` units, in forward and backward.

    0 is FSDP2's own behaviour: one unit ahead in the backward. Not a collective, but ranks must agree on the
    arguments. If units run in another order than they are registered in, memory is wasted, but no rank
    hangs.
    """
    for root in fsdp_roots(model):
        below = [unit for unit in fsdp2.fsdp_units(cast(nn.Module, root)) if unit is not root]
        forward = [root, *below]
        backward = [root, *reversed(below)]
        for index, unit in enumerate(forward):
            unit.set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + num_ahead])
        for index, unit in enumerate(backward):
            # FSDP2 itself gathers one unit ahead, in the order in which the units have really run.
            num_following = num_ahead if num_ahead > 1 else 0
            unit.set_modules_to_backward_prefetch(backward[index + 1 : index + 1 + num_following])
    fsdp2.set_background_gathers(model, in_background)


class JoinedGathers:
    """Lets a rank without data take part in what others gather in an evaluation step, and tells what was gathered.

    In such a step the first rank with data, its leader, tells all ranks over the host ``group`` which unit it gathers
    next. No user code runs on the rank without data: nothing is logged, counted or drawn at random there.

    Attributes:
        number: Of all units that were gathered in evaluation, in their order: equal where ranks have gathered alike.
    """

    def __init__(self, units: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        self._units = units
        self._group = group
        self.number = 0

    @contextmanager
    def step(self, leader: int | None) -> Iterator[None]:
        """Context of a step of this rank, which begins with everything sharded. A collective if there is a ``leader``.

        Raises RuntimeError if the leader gathers other units.
        """

        def agree(index: int) -> None:
            if leader is not None and self._told(leader, index) != index:
                raise RuntimeError(DIFFERENT_UNITS)

        def gather_next(index: int) -> None:
            agree(index)
            self._note(index)

        with PatchStack() as patches:  # not for longer, since training gathers the same units
            for index, unit in enumerate(self._units):
                fsdp2.note_all_gathers(unit, partial(gather_next, index), patches)
            yield
        agree(_STEP_ENDS)

    def join(self, leader: int) -> None:
        """Take part in a step of other ranks, by gathering what its ``leader`` gathers. A collective."""
        while (index := self._told(leader, _STEP_ENDS)) != _STEP_ENDS:
            self._note(index)
            self._units[index].unshard()
            self._units[index].reshard()

    def _note(self, index: int) -> None:
        self.number = hash((self.number, index))

    def _told(self, leader: int, own: int) -> int:
        """What the leader tells, which this rank tells if it is the leader. A collective over the group."""
        told = torch.tensor(own, device="cpu")
        dist.broadcast(told, leader, self._group)
        return int(told)
