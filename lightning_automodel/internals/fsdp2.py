"""Private names of FSDP2: its units, the flags of their communication, and when parameters are gathered."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_automodel.internals import release_probe
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import local_tensor

FSDPParamGroup: TypeAlias = Any  # what FSDP2 communicates together; its classes are not public


FSDPParam: TypeAlias = Any  # one parameter of such a group


ACCUMULATES_IN_LEAF = hasattr(FSDPModule, "set_keep_unsharded_storage")
"""Whether FSDP2 accumulates all unreduced gradients in ``.grad`` of the unsharded parameters (torch 2.15)."""


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """FSDP2 units at or below ``model``, each once; a unit of several modules is given by its first one."""
    units: dict[int, FSDPModule] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(module._get_fsdp_state()), module)
    return list(units.values())


def param_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of one unit: a single one, unless parameters are sharded over several meshes."""
    state = unit._get_fsdp_state()
    if not _probed_states:
        _probe_fsdp2(state)
    return state._fsdp_param_groups


def fsdp_param_groups(model: nn.Module) -> Iterator[FSDPParamGroup]:
    """Yield the FSDP2 parameter groups at or below ``model``, each once."""
    for unit in fsdp_units(model):
        yield from param_groups(unit)


def sharded_over(mesh: DeviceMesh) -> Any:
    """What ``shard_placement_fn`` of ``fully_shard`` returns for parameters sharded over ``mesh``.

    ``mesh`` is 1-D, or 2-D (replicate, shard). All these parameters of a unit must get the same object:
    FSDP2 groups them by it. Raises UnsupportedReleaseError where FSDP2 has one mesh for all parameters of a
    unit.
    """
    # The class is named in the documentation of `fully_shard`, but not exported. Nor is what it takes: FSDP2
    # itself makes that of a module that nobody uses.
    unused = fully_shard(nn.Linear(1, 1, bias=False, device="meta"), mesh=mesh)
    mesh_info = param_groups(unused)[0].mesh_info
    module = sys.modules[type(mesh_info).__module__]
    release_probe.check("torch", module, "ShardPlacementResult")
    return module.ShardPlacementResult(None, mesh_info)


def gathered_parameters(model: nn.Module) -> list[Tensor]:
    """The unsharded parameters of FSDP2 units at or below ``model``, whether modules show them or not."""
    params = [param for group in fsdp_param_groups(model) for param in group.fsdp_params]
    gathered = [getattr(param, "unsharded_param", None) for param in params]  # None before the first gather
    return [parameter for parameter in gathered if parameter is not None]


def initialise_fsdp_root(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialisation now: its errors come, and it settles ``post_forward_mesh_info`` of the root."""
    state = root._get_fsdp_state()
    state._lazy_init()
    for group in state._fsdp_param_groups[:1]:
        # What the lazy initialisation makes.
        release_probe.check("torch", group.comm_ctx, "post_forward_order")


def detach_forward_hooks(root: FSDPModule) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Remove and return FSDP2's hooks ``(module, args, kwargs)`` and ``(module, args, output)`` of a forward."""
    state = root._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return state._pre_forward, state._post_forward


REDUCTIONS = ("reduce_grads", "all_reduce_grads", "reduce_scatter_unused_params")
"""What a group does with the gradients of a backward."""


RESHARDING = ("reshard_after_backward", "post_forward_mesh_info")
"""Whether a group frees its gathered parameters after a backward, and after a forward."""


@contextmanager
def flags_restored(units: Iterable[FSDPModule], names: tuple[str, ...]) -> Iterator[None]:
    """Context that restores flags of ``units``, ``REDUCTIONS`` or ``RESHARDING``; FSDP2 has no getters."""
    groups = [group for unit in units for group in param_groups(unit)]
    before = [(group, name, getattr(group, name)) for group in groups for name in names]
    try:
        yield
    finally:
        for group, name, value in before:
            setattr(group, name, value)


@contextmanager
def keeping_nothing(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Context in which ``units`` free their gathered parameters after each forward and each backward."""
    kept = []
    for unit in units:
        if any(
            group.post_forward_mesh_info is None or not group.reshard_after_backward
            for group in param_groups(unit)
        ):
            kept.append(unit)
    with flags_restored(kept, RESHARDING):
        for unit in kept:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
        yield


def unsharded(units: Iterable[FSDPModule]) -> list[FSDPModule]:
    """Those of ``units`` whose modules hold unsharded parameters at the moment."""
    return [unit for unit in units if any(group.is_unsharded for group in param_groups(unit))]


def show_trainable(unit: FSDPModule) -> None:
    """Give the unsharded parameters of ``unit`` the ``requires_grad`` of the shards, as the next all-gather would."""
    for param in (param for group in param_groups(unit) for param in group.fsdp_params):
        param.unsharded_param.requires_grad_(param.sharded_param.requires_grad)


def gathering(units: Iterable[FSDPModule]) -> list[FSDPModule]:
    """Those of ``units`` of which an all-gather was started, and not waited for yet."""
    return [
        unit for unit in units if any(group._all_gather_result is not None for group in param_groups(unit))
    ]


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


def watch_gathers(
    unit: FSDPModule,
    group: FSDPParamGroup,
    starting: Callable[[], None],
    finished: Callable[[], bool],
    freeing: Callable[[bool], None],
    is_saving: Callable[[], bool],
    patches: PatchStack,
) -> None:
    """Call back around each all-gather of a ``group`` of ``unit``, for which FSDP2 has no hooks.

    ``starting`` before it starts. ``finished`` once parameters are unsharded: False repeats it, which is a
    collective. ``freeing`` before unsharded parameters are freed, or hidden behind the sharded ones, with
    whether the unit's root runs at the moment.

    While the unit's root runs, state dicts have what modules show, unless ``is_saving``: FSDP2 would reshard
    what the step still needs.
    """
    state = unit._get_fsdp_state()
    unshard, wait, reshard = group.unshard, group.wait_for_unshard, group.reshard
    to_sharded, to_smaller_mesh = group._to_sharded, group.fsdp_params[0].to_sharded_post_forward
    is_resharding = False

    def watched_unshard(*args: Any, **kwargs: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            starting()
        unshard(*args, **kwargs)

    def watched_wait() -> None:
        is_pending = group._all_gather_result is not None
        wait()
        if is_pending and not finished():
            to_sharded()
            starting()
            unshard()
            wait()
            finished()

    def watched_reshard() -> None:
        nonlocal is_resharding
        is_resharding = True
        try:
            reshard()
        finally:
            is_resharding = False

    def watched_to_sharded() -> None:
        is_in_forward = state._state_ctx.iter_forward_root is not None
        if is_resharding or not is_in_forward or is_saving():
            if group.is_unsharded:
                freeing(is_in_forward)
            to_sharded()

    def watched_to_smaller_mesh() -> None:
        freeing(True)
        to_smaller_mesh()

    patches.set(group, "unshard", watched_unshard)
    patches.set(group, "wait_for_unshard", watched_wait)
    patches.set(group, "reshard", watched_reshard)
    patches.set(group, "_to_sharded", watched_to_sharded)
    patches.set(group.fsdp_params[0], "to_sharded_post_forward", watched_to_smaller_mesh)
    for param in group.fsdp_params:
        patches.set(
            param, "reset_sharded_param", partial(_reset_if_sharded, group, param.reset_sharded_param)
        )


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


def forward_order(groups: Iterable[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """Those of ``groups`` whose forwards have run since the last backward, each once, in their order."""
    shared_by_a_root = dict.fromkeys(group.comm_ctx for group in groups)
    return list(dict.fromkeys(group for context in shared_by_a_root for group in context.post_forward_order))


def unsharded_numel(param: FSDPParam) -> int:
    """Number of elements of the unsharded parameter on this rank: under tensor parallelism, of its part."""
    # FSDP2's dimensions come first.
    sharded = param.sharded_param
    others = param.mesh_info.mesh.ndim
    sizes = zip(sharded.device_mesh.shape[others:], sharded.placements[others:], strict=True)
    return sharded.numel() // math.prod(size for size, placement in sizes if placement.is_shard())


def was_unsharded(group: FSDPParamGroup) -> bool:
    """Whether the group was ever unsharded: its buffers and leaves are made once, and keep the dtype of that time."""
    return any(len(param.all_gather_outputs) > 0 for param in group.fsdp_params)


def mixed_precision_policies(model: nn.Module) -> list[MixedPrecisionPolicy]:
    """The policies that parameters of FSDP2 units at or below ``model`` follow."""
    return [param.mp_policy for group in fsdp_param_groups(model) for param in group.fsdp_params]


def is_set_by_fsdp(attribute: str) -> bool:
    """Whether FSDP2 sets this attribute on its units, or on the modules that these manage."""
    return attribute.startswith("__composable_api") or (attribute.startswith("_") and "fsdp" in attribute)


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


_probed_states: set[type] = set()


def _probe_fsdp2(state: Any) -> None:
    """Check, on the first FSDP2 unit of this process, the attributes that the functions above read and write."""
    check = partial(release_probe.check, "torch")
    check(state, "_fsdp_param_groups", "_lazy_init", "_state_ctx")
    check(state._state_ctx, "iter_forward_root", writable=True)
    check(state, "_pre_forward", "_post_forward", "_pre_forward_hook_handle", "_post_forward_hook_handle")
    for group in state._fsdp_param_groups[:1]:
        check(
            group,
            "fsdp_params",
            "modules",
            "mesh_info",
            "gradient_divide_factor",
            "device",
            "post_backward",
            "comm_ctx",
        )
        if group.mesh_info.mesh.ndim > 1:
            check(group.mesh_info, "replicate_mesh_size")
        check(group, "is_sharded", "is_unsharded", "_to_unsharded")
        check(group, "unshard", "wait_for_unshard", "reshard", writable=True)
        check(group, "_to_sharded", writable=True)
        check(group, "_partial_reduce_output", "_all_gather_result", *REDUCTIONS, *RESHARDING, writable=True)
        for param in group.fsdp_params[:1]:
            check(param, "sharded_param", "unsharded_param", "all_gather_outputs", "mesh_info")
            check(param, "mp_policy", "free_unsharded_param")
            check(param, "fsdp_placement", "padded_sharded_param_size")
            check(param, "reset_sharded_param", "to_sharded_post_forward", writable=True)
            # Assigned by the lazy initialisation.
            check(type(param), "orig_dtype", "param_dtype", "reduce_dtype")
            if ACCUMULATES_IN_LEAF:
                check(param, "unsharded_grad_dtype")
            else:
                check(param, "unsharded_accumulated_grad", writable=True)
        _probed_states.add(type(state))


def _probe() -> None:
    """Check at import the private names that the functions above use on public classes."""
    check = partial(release_probe.check, "torch")
    check(FSDPModule, "_get_fsdp_state", "_set_unshard_async_op")
    if ACCUMULATES_IN_LEAF:
        check(FSDPModule, "set_manual_backward_finalization", "finalize_backward")


_probe()
