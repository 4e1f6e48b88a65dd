"""Prefetching: all-gathers of FSDP units that start before the forward or backward that needs them."""

from collections.abc import Iterable
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel import torch_internals
from lightning_automodel.sharding.units import fsdp_roots


def set_prefetch(model: nn.Module, num_ahead: int, in_background: bool) -> None:
    """Let each FSDP unit start the all-gathers of the next ``num_ahead`` units, in forward and backward.

    Units are expected to run in the order of their registration. If they do not, memory is wasted, but no rank hangs:
    which gathers start depends only on the unit that runs. Not a collective, but ranks must agree on the arguments.
    0 is FSDP2's own behaviour: one unit ahead in the backward. ``in_background``: as always on devices with streams.
    """
    for root in fsdp_roots(model):
        below = [unit for unit in torch_internals.fsdp_units(cast(nn.Module, root)) if unit is not root]
        forward, backward = [root, *below], [root, *reversed(below)]
        for index, unit in enumerate(forward):
            unit.set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + num_ahead])
        for index, unit in enumerate(backward):
            # FSDP2 itself gathers one unit ahead, in the order in which the units have really run.
            following = backward[index + 1 : index + 1 + num_ahead] if num_ahead > 1 else []
            unit.set_modules_to_backward_prefetch(following)
        torch_internals.set_background_gathers(root, in_background)


def reshard(unit: FSDPModule) -> None:
    """Free what ``unit`` has gathered, also by a prefetch whose forward did not come.

    FSDP2 would use prefetched parameters at the unit's next forward, when the weights may have changed.
    """
    if torch_internals.is_gathering(unit):
        unit.unshard()
    unit.reshard()


def drop_unused(units: Iterable[FSDPModule]) -> None:
    """After a forward of a root, free those of its ``units`` that were prefetched but not used."""
    for unit in units:
        if torch_internals.is_gathering(unit):
            reshard(unit)
