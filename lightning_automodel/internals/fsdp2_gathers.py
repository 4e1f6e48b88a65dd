"""Private names of FSDP2's all-gathers: when parameters are gathered, and where they stay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.internals.fsdp2 import FSDPParam, FSDPParamGroup, fsdp_param_groups, param_groups
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import local_tensor


def gathered_parameters(model: nn.Module) -> list[Tensor]:
    """The unsharded parameters of FSDP2 units at or below ``model``, whether modules show them or not."""
    params = [param for group in fsdp_param_groups(model) for param in group.fsdp_params]
    gathered = [getattr(param, "unsharded_param", None) for param in params]  # None before the first gather
    return [parameter for parameter in gathered if parameter is not None]


def forget_background_gather(unit: FSDPModule) -> None:
    """Never wait for a running CPU all-gather of ``unit``: a rank that has failed may not join it."""
    for group in param_groups(unit):
        if group.device.type == "cpu":
            group._all_gather_result = None


def set_background_gathers(root: FSDPModule, is_on: bool) -> None:
    """Set whether all-gathers at or below ``root`` are asynchronous: on a CPU, synchronous ones block the thread."""
    root._set_unshard_async_op(is_on)


def note_all_gathers(unit: FSDPModule, note: Callable[[], None], patches: PatchStack) -> None:
    """Call ``note`` before each all-gather of ``unit``, for which FSDP2 has no hook."""

    def noting(group: FSDPParamGroup, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            note()
        unshard(*args, **kwargs)

    for group in param_groups(unit):
        patches.set(group, "unshard", partial(noting, group, group.unshard))


class _Place(NamedTuple):
    """A module that holds a parameter, and its name there."""

    module: nn.Module
    name: str
    param: FSDPParam


class GatherObserver(Protocol):
    """Is told of the all-gathers of one parameter group, for which FSDP2 has no hooks."""

    def starting(self) -> None:
        """Called before an all-gather starts."""

    def finished(self) -> bool:
        """Called once parameters are unsharded. False repeats the all-gather, which is a collective."""

    def freeing(self, is_in_forward: bool) -> None:
        """Called before unsharded parameters are freed, or hidden behind the sharded ones.

        ``is_in_forward``: whether the unit's root runs at the moment.
        """

    def shows_shards(self) -> bool:
        """Whether state dicts have shards while the unit's root runs.

        Else they have what modules show: FSDP2 would reshard what the step still needs.
        """


def watch_gathers(
    unit: FSDPModule, group: FSDPParamGroup, observer: GatherObserver, patches: PatchStack
) -> None:
    """Tell ``observer`` of each all-gather of a ``group`` of ``unit``, and of what frees its results.

    A tensor that user code has put in a parameter's place for one forward, as
    ``torch.func.functional_call`` does, stays there: FSDP2 would put the gathered parameter there instead.
    """
    unshard = group.unshard
    wait = group.wait_for_unshard
    places = _places(unit, group)

    def watched_unshard(*args: Any, **kwargs: Any) -> None:
        if group.is_unsharded:
            _show_gathered(places)
        elif group._all_gather_result is None:
            observer.starting()
        unshard(*args, **kwargs)

    def watched_wait() -> None:
        if group._all_gather_result is None:
            wait()
            return
        substitutes = _substitutes(places)
        # The first gather makes tensors that later ones write to, which training could not if they were
        # inference tensors.
        with torch.inference_mode(False):
            wait()
        if not observer.finished():
            to_sharded()
            observer.starting()
            unshard()
            wait()
            observer.finished()
        for place, tensor in substitutes:
            place.module._parameters[place.name] = cast(nn.Parameter, tensor)  # or any tensor

    to_sharded = _watch_frees(unit, group, observer, patches)
    patches.set(group, "unshard", watched_unshard)
    patches.set(group, "wait_for_unshard", watched_wait)
    for param in group.fsdp_params:
        patches.set(
            param, "reset_sharded_param", partial(_reset_if_sharded, group, param.reset_sharded_param)
        )


def _places(unit: FSDPModule, group: FSDPParamGroup) -> list[_Place]:
    """Where the modules of ``unit`` hold the parameters of ``group``; several places where they share one."""
    param_of = {param.sharded_param: param for param in group.fsdp_params}
    return [
        _Place(module, name, param_of[shard])
        for module in cast(nn.Module, unit).modules()
        for name, shard in module.named_parameters(recurse=False)
        if shard in param_of
    ]


def _substitutes(places: list[_Place]) -> list[tuple[_Place, Tensor]]:
    """The tensors that stand where modules would have the shards."""
    substitutes: list[tuple[_Place, Tensor]] = []
    for place in places:
        tensor = place.module._parameters.get(place.name)
        smaller_shard = getattr(place.param, "_sharded_post_forward_param", None)
        if tensor is not None and tensor is not place.param.sharded_param and tensor is not smaller_shard:
            substitutes.append((place, tensor))
    return substitutes


def _show_gathered(places: list[_Place]) -> None:
    """Show gathered parameters where ``functional_call``, after a forward that gathered them, put back the shards."""
    for place in places:
        if place.module._parameters.get(place.name) is place.param.sharded_param:
            place.module._parameters[place.name] = place.param.unsharded_param


def _watch_frees(
    unit: FSDPModule, group: FSDPParamGroup, observer: GatherObserver, patches: PatchStack
) -> Callable[[], None]:
    """Tell ``observer`` before unsharded parameters are freed. Returns how FSDP2 frees them, without telling."""
    state = unit._get_fsdp_state()
    reshard = group.reshard
    to_sharded = group._to_sharded
    to_smaller_mesh = group.fsdp_params[0].to_sharded_post_forward
    is_resharding = False

    def watched_reshard() -> None:
        nonlocal is_resharding
        is_resharding = True
        try:
            reshard()
        finally:
            is_resharding = False

    def watched_to_sharded() -> None:
        is_in_forward = state._state_ctx.iter_forward_root is not None
        if is_resharding or not is_in_forward or observer.shows_shards():
            if group.is_unsharded:
                observer.freeing(is_in_forward)
            to_sharded()

    def watched_to_smaller_mesh() -> None:
        observer.freeing(True)
        to_smaller_mesh()

    patches.set(group, "reshard", watched_reshard)
    patches.set(group, "_to_sharded", watched_to_sharded)
    patches.set(group.fsdp_params[0], "to_sharded_post_forward", watched_to_smaller_mesh)
    return cast(Callable[[], None], to_sharded)


def _reset_if_sharded(group: FSDPParamGroup, reset: Callable[[], None]) -> None:
    """FSDP2's hook after a module has loaded a state dict, which takes the module's parameter for the shard."""
    if not group.is_unsharded:
        reset()


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
