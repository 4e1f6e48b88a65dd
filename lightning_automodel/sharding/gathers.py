"""All-gathers ahead of the forward or backward that needs them, and on a rank without data that others need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.units import fsdp_roots


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
    """Records which units an evaluation step gathers, so that a rank without data can take part in these gathers.

    No user code runs on that rank: nothing is logged, counted or drawn at random there.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units
        self._steps: list[list[FSDPModule]] = []  # what the last two have gathered

    def start_loop(self) -> None:
        """Begin an evaluation loop: earlier gathers do not apply to it."""
        self._steps = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step of this rank, which begins with everything sharded."""
        gathered: list[FSDPModule] = []
        self._steps = [*self._steps[-1:], gathered]
        with PatchStack() as patches:  # not for longer, since training gathers the same units
            for unit in self._units:
                fsdp2.note_all_gathers(unit, partial(gathered.append, unit), patches)
            yield

    def join(self) -> None:
        """Take part in a step of other ranks by repeating the gathers of this rank's last step. A collective.

        Raises RuntimeError if this rank's last two steps gathered different parameters: which would be next?
        """
        if self._steps[:1] != self._steps[-1:]:
            raise RuntimeError(
                "This rank has evaluated all its data, and other ranks have not. It cannot take part in what"
                " they gather, since its own last two steps gathered different parameters: give all ranks"
                " equally many batches, for example by a sampler that repeats samples."
            )
        for unit in chain(*self._steps[-1:]):
            unit.unshard()
            unit.reshard()
