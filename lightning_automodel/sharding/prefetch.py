"""All-gathers of FSDP units that start ahead of the forward or backward that needs them."""

from collections.abc import Iterable
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel import torch_internals
from lightning_automodel.sharding.units import fsdp_roots


def set_prefetch(model: nn.Module, num_ahead: int, in_background: bool) -> None:
    """Let each FSDP unit start the all-gathers of the ``num_ahead`` units behind it, in forward and backward.

    Units are taken to run in the order of their registration. Where they do not, memory is wasted, and no rank waits
    for another: what is started depends on the unit that runs alone. Not a collective, but ranks must agree.

    Args:
        model: Sharded by FSDP2.
        num_ahead: 0 for what FSDP2 does by itself: one unit ahead in the backward.
        in_background: Whether gathers leave this thread to go on; on a device with streams they do so anyway.
    """
    for root in fsdp_roots(model):
        below = [unit for unit in torch_internals.fsdp_units(cast(nn.Module, root)) if unit is not root]
        forward, backward = [root, *below], [root, *reversed(below)]
        for index, unit in enumerate(forward):
            unit.set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + num_ahead])
        for index, unit in enumerate(backward):
            # One ahead FSDP2 does by itself, in the order in which the units have really run.
            following = backward[index + 1 : index + 1 + num_ahead] if num_ahead > 1 else []
            unit.set_modules_to_backward_prefetch(following)
        torch_internals.set_background_gathers(root, in_background)


def reshard(unit: FSDPModule) -> None:
    """Free what ``unit`` has gathered, also where the forward for which that was started did not come.

    FSDP2 would hand it out at the unit's next use, when the weights may have changed.
    """
    if torch_internals.is_gathering(unit):
        unit.unshard()
    unit.reshard()


def drop_unused(units: Iterable[FSDPModule]) -> None:
    """Free what was gathered for ``units`` of a root that its forward, which is over, did not use."""
    for unit in units:
        if torch_internals.is_gathering(unit):
            reshard(unit)
