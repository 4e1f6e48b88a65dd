"""Private names of FSDP2's all-gathers: when parameters are gathered, and where they stay."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_automodel.internals.fsdp2 import FSDPParam, FSDPParamGroup, param_groups
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import local_tensor, set_local_tensor


def forget_background_gather(unit: FSDPModule) -> None:
    """Never wait for a running CPU all-gather of ``unit``: a rank that has failed may not join it."""
    for group in param_groups(unit):
        if group.device.type == "cpu":
            group._all_gather_result = None


def set_background_gathers(root: FSDPModule, is_on: bool) -> None:
    """Set whether all-gathers at or below ``root`` are asynchronous: on a CPU, synchronous ones block the thread."""
    root._set_unshard_async_op(is_on)


def unshard(units: Iterable[FSDPModule]) -> None:
    """Gather ``units``, outside of inference mode.

    The first gather makes tensors that later ones write to, which training could not if they were inference tensors.
    """
    with torch.inference_mode(False), torch.no_grad():
        for unit in units:
            unit.unshard()


def note_all_gathers(unit: FSDPModule, note: Callable[[], None], patches: PatchStack) -> None:
    """Call ``note`` before each all-gather of ``unit``, for which FSDP2 has no hook."""

    def noting(group: FSDPParamGroup, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            note()
        unshard(*args, **kwargs)

    for group in param_groups(unit):
        patches.set(group, "unshard", partial(noting, group, group.unshard))


class Place(NamedTuple):
    """A module that holds a parameter, and its name there."""

    module: nn.Module
    name: str
    param: FSDPParam


def places_of(unit: FSDPModule, params: Iterable[FSDPParam]) -> list[Place]:
    """Where the modules of ``unit`` hold these parameters; several places where they share one."""
    param_of = {param.sharded_param: param for param in params}
    return [
        Place(module, name, param_of[shard])
        for module in cast(nn.Module, unit).modules()
        for name, shard in module.named_parameters(recurse=False)
        if shard in param_of
    ]


def substitutes_in(places: list[Place]) -> list[tuple[Place, Tensor]]:
    """The tensors that stand where modules would have parameters, for one forward (``torch.func.functional_call``)."""
    substitutes: list[tuple[Place, Tensor]] = []
    for place in places:
        tensor = place.module._parameters[place.name]
        param = place.param
        if (
            tensor is None
            or tensor is param.sharded_param
            or tensor is getattr(param, "unsharded_param", None)
        ):
            continue
        if tensor is not getattr(param, "_sharded_post_forward_param", None):
            substitutes.append((place, tensor))
    return substitutes


def show(places: list[Place], substitutes: list[tuple[Place, Tensor]]) -> None:
    """Let the modules of a gathered unit have its gathered parameters, or what stands in their place.

    After a forward that has gathered them, ``functional_call`` puts back the shards.
    """
    for place in places:
        if place.module._parameters[place.name] is place.param.sharded_param:
            place.module._parameters[place.name] = place.param.unsharded_param
    for place, tensor in substitutes:
        place.module._parameters[place.name] = cast(nn.Parameter, tensor)  # or any tensor


def gather_again(unit: FSDPModule) -> None:
    """Free what a unit has gathered, and gather its shards again. ``unit.reshard()`` does not, within its forward."""
    for group in param_groups(unit):
        group._to_sharded()
    unit.unshard()


def after_state_dicts(unit: FSDPModule, hook: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``hook`` after a state dict of modules of ``unit`` was made or loaded, for which FSDP2 shows shards."""
    handles: list[RemovableHandle] = []
    params = [param for group in param_groups(unit) for param in group.fsdp_params]
    for module in {place.module for place in places_of(unit, params)}:
        handles.append(module.register_state_dict_post_hook(hook))
        handles.append(module.register_load_state_dict_post_hook(hook))
    return handles


def move_shard(shard: DTensor, param: FSDPParam, local: Tensor) -> bool:
    """Give a shard other memory, from which FSDP2 gathers it. False if it cannot: while it is gathered."""
    if param.sharded_state.name != "SHARDED":
        return False
    set_local_tensor(shard, local)
    param.reset_sharded_param()
    return True


def own_slice(param: FSDPParam) -> Tensor:
    """The part of an unsharded parameter, sharing its memory, that this rank holds as its shard."""
    whole = local_tensor(param.unsharded_param)
    shard = local_tensor(param.sharded_param)
    dim = param.fsdp_placement.dim
    # All ranks but the last have full chunks; the last ones may have none.
    start = getattr(param.mesh_info, "shard_mesh_rank", 0) * param.padded_sharded_param_size[dim]
    if shard.numel() > 0:
        length = shard.size(dim)
    else:
        length = 0
    return whole.narrow(dim, min(start, whole.size(dim)), length)


@contextmanager
def keeping_storage(unit: FSDPModule) -> Iterator[None]:
    """Context in which resharding ``unit`` does not free the memory of its unsharded parameters."""
    if hasattr(unit, "set_keep_unsharded_storage"):
        unit.set_keep_unsharded_storage(True, recurse=False)
        try:
            yield
        finally:
            unit.set_keep_unsharded_storage(False, recurse=False)
        return
    params = [param for group in param_groups(unit) for param in group.fsdp_params]  # before torch 2.15
    for param in params:
        param.free_unsharded_param = lambda: None
    try:
        yield
    finally:
        for param in params:
            del param.free_unsharded_param


def show_kept_storage(unit: FSDPModule) -> bool:
    """Unshard without an all-gather; False if a forward has freed what was kept."""
    groups = param_groups(unit)
    gathered = [t for group in groups for param in group.fsdp_params for t in param.all_gather_outputs]
    is_kept = all(t.untyped_storage().size() > 0 or t.numel() == 0 for t in gathered)
    if not is_kept or not all(group.is_sharded for group in groups):
        return False
    for group in groups:
        group._to_unsharded()
    return True
