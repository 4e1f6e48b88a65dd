"""Every private name of torch that the package uses, each with its reason."""

import functools
import gc
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, _redistribute
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from lightning_automodel.internals import release_probe
from lightning_automodel.internals.patching import PatchStack

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader as FsspecReader
    from torch.distributed.checkpoint import FileSystemWriter as FsspecWriter
else:
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
    except ModuleNotFoundError:  # private before torch 2.15
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: F401

BACKWARD = "_engine_run_backward"
"""Innermost Python function of every backward."""
RESET_PARAMETERS = "_reset_parameters"
"""How torch's attention and transformer modules initialise themselves."""

EXTRA_STATE = "_extra_state"
"""How the name of what ``get_extra_state`` returns ends in a state dict."""

F = TypeVar("F", bound=Callable[..., Any])
FSDPParamGroup: TypeAlias = Any  # what FSDP2 communicates together; its classes are not public
FSDPParam: TypeAlias = Any  # one parameter of such a group

ACCUMULATES_IN_LEAF = hasattr(FSDPModule, "set_keep_unsharded_storage")
"""Whether FSDP2 accumulates all unreduced gradients in ``.grad`` of the unsharded parameters (torch 2.15)."""


def not_compiled(function: F) -> F:
    """``torch.compiler.disable``, which is public but not annotated: decorated functions would lose their types."""
    return cast(F, torch.compiler.disable(function))


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding decisions, which keep every mesh alive that was ever used.

    A mesh holds its groups, and a group that is held keeps its threads and connections, destroyed or not. A
    later mesh over a new default group may equal an old one, and would get the old groups from the caches.
    """
    of_modules = _caches(_module_and_class_attributes("torch.distributed"))
    # Before the first computation with a DTensor, these are empty: there is no mesh to search the whole
    # process for.
    if any(cache.cache_info().currsize for cache in of_modules):
        # The garbage collector lists caches that instances hold, but none from before a gc.freeze().
        for cache in (*of_modules, *_caches(gc.get_objects())):
            cache.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()


def _caches(objects: Iterable[Any]) -> list[Any]:
    cache_type = type(functools.lru_cache(_caches))
    # Not isinstance: it reads __class__ of proxies, some of which then warn that they are deprecated.
    return [
        o for o in objects if type(o) is cache_type and str(o.__module__).startswith("torch.distributed")
    ]


def _module_and_class_attributes(package: str) -> Iterator[Any]:
    for name, module in sys.modules.copy().items():
        for value in list(vars(module).values()) if name.startswith(package) else []:
            yield value
            if issubclass(type(value), type):
                yield from (
                    getattr(attribute, "__func__", attribute) for attribute in list(vars(value).values())
                )


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


def has_forward_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of ``modules`` has a hook that sees what its forward returns."""
    return any(module._forward_hooks for module in modules)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has hooks that see, and may change, gradients that pass through it."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


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


def clear_unreduced_gradients(group: FSDPParamGroup, params: list[FSDPParam]) -> None:
    """Drop what ``zero_grad`` leaves: the group's partial sums, and unsharded gradients of these of its parameters."""
    group._partial_reduce_output = None
    for param in params:
        if (leaf := getattr(param, "unsharded_param", None)) is not None:
            leaf.grad = None
        if not ACCUMULATES_IN_LEAF:
            param.unsharded_accumulated_grad = None


def holds_partial_reduction(group: FSDPParamGroup) -> bool:
    """Whether HSDP has reduce-scattered gradients of the group that it has not all-reduced yet."""
    return group._partial_reduce_output is not None


def _unreduced_gradient(param: FSDPParam) -> Tensor | None:
    leaf = getattr(param, "unsharded_param", None)
    if ACCUMULATES_IN_LEAF or param.unsharded_accumulated_grad is None:
        if leaf is None:
            return None
        return leaf.grad
    return param.unsharded_accumulated_grad


def reduce_deferred_gradients(root: FSDPModule, groups: Iterable[FSDPParamGroup]) -> None:
    """Reduce the deferred gradients of ``groups``, if any, by their current flags, outside of any backward.

    These are the groups at or below ``root``. A collective if there are any such gradients: the last
    backward, in which FSDP2 reduces, did not pass through ``root``.
    """
    module: Any = root
    pending = []
    for group in groups:
        is_unreduced = any(_unreduced_gradient(param) is not None for param in group.fsdp_params)
        if is_unreduced or group._partial_reduce_output is not None:
            pending.append(group)
    if not pending:
        return
    if not hasattr(module, "finalize_backward"):  # before torch 2.15
        module._get_fsdp_state()._root_post_backward_final_callback()
        return
    for group in pending:
        # What finalize_backward refuses, and what it leaves out: gradients that came after the group's own
        # reduction.
        group.post_backward()
    module.set_manual_backward_finalization(True)
    try:
        module.finalize_backward()
    finally:
        module.set_manual_backward_finalization(False)


def has_replicas(group: FSDPParamGroup) -> bool:
    """Whether there are several copies of the group's shards (HSDP)."""
    return getattr(group.mesh_info, "replicate_mesh_size", 1) > 1


def was_unsharded(group: FSDPParamGroup) -> bool:
    """Whether the group was ever unsharded: its buffers and leaves are made once, and keep the dtype of that time."""
    return any(len(param.all_gather_outputs) > 0 for param in group.fsdp_params)


def differentiate_by_both(other_of: Callable[[Any], Tensor | None], patches: PatchStack) -> None:
    """Let backwards that name their inputs also differentiate by ``other_of(input)``, where that is not None.

    ``torch.autograd.grad`` returns the gradient of the one that the graph has. User code may have imported
    it before, so that what it calls is replaced.
    """
    run_backward = torch.autograd._engine_run_backward

    @functools.wraps(run_backward)
    def run_with_others(
        tensors: Any,
        grad_tensors: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: tuple[Any, ...],
        allow_unreachable: bool,
        accumulate_grad: bool,
    ) -> Any:
        run = partial(
            run_backward, tensors, grad_tensors, retain_graph, create_graph, accumulate_grad=accumulate_grad
        )
        others = {
            index: other for index, tensor in enumerate(inputs) if (other := other_of(tensor)) is not None
        }
        if not others:
            return run(inputs, allow_unreachable)
        gradients = run((*inputs, *others.values()), True)
        if accumulate_grad:
            return gradients
        chosen = list(gradients[: len(inputs)])
        for index, gradient in zip(others, gradients[len(inputs) :], strict=True):
            if chosen[index] is None:
                chosen[index] = gradient
        if not allow_unreachable and any(gradient is None for gradient in chosen):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph."
            )
        return tuple(chosen)

    patches.set(torch.autograd, BACKWARD, run_with_others)


def mixed_precision_policies(model: nn.Module) -> list[MixedPrecisionPolicy]:
    """The policies that parameters of FSDP2 units at or below ``model`` follow."""
    return [param.mp_policy for group in fsdp_param_groups(model) for param in group.fsdp_params]


def unsharded_gradient_dtype(param: FSDPParam) -> torch.dtype:
    """The dtype in which the gradient of one parameter is accumulated and reduced."""
    if ACCUMULATES_IN_LEAF:
        dtype = param.unsharded_grad_dtype
    else:
        dtype = param.reduce_dtype
    return dtype or param.param_dtype or param.orig_dtype


def reduction_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in which gradients of FSDP2 units at or below ``model`` are reduced."""
    params = [param for group in fsdp_param_groups(model) for param in group.fsdp_params]
    return {unsharded_gradient_dtype(param) for param in params if param.sharded_param.requires_grad}


def has_two_gradient_dtypes(group: FSDPParamGroup) -> bool:
    """Whether gradients of the group are computed in another dtype than they are accumulated in."""
    dtypes = [
        (param.param_dtype or param.orig_dtype, unsharded_gradient_dtype(param))
        for param in group.fsdp_params
    ]
    return any(computed is not accumulated for computed, accumulated in dtypes)


def accumulate_in_one_dtype(group: FSDPParamGroup) -> None:
    """Give zero gradients to parameters that no micro-batch has used so far, beside others with accumulated ones.

    Before torch 2.15, FSDP2 reduces only gradients of one dtype. That of a parameter that is first used in
    the last micro-batch would be in the compute dtype, while the others' are in the reduction dtype.
    """
    trainable = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    if not ACCUMULATES_IN_LEAF and any(param.unsharded_accumulated_grad is not None for param in trainable):
        for param in trainable:
            if param.unsharded_accumulated_grad is None:
                _set_zero_gradient(param)


def zero_missing_gradients(group: FSDPParamGroup, parameters: Container[nn.Parameter]) -> None:
    """Give zero gradients to those of these sharded parameters that are frozen by now, and other ranks may use."""
    for param in group.fsdp_params:
        shard = param.sharded_param
        if shard in parameters and not shard.requires_grad and _unreduced_gradient(param) is None:
            _set_zero_gradient(param)


def _set_zero_gradient(param: FSDPParam) -> None:
    zeros = torch.zeros_like(param.unsharded_param, dtype=unsharded_gradient_dtype(param))
    if ACCUMULATES_IN_LEAF:
        param.unsharded_param.grad = zeros
    else:
        param.unsharded_accumulated_grad = zeros


def has_post_accumulate_hook(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` has a hook that runs after its gradient is accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` has a hook that may change its gradient before it is accumulated."""
    return bool(parameter._backward_hooks)


ASSIGNS = "assign_to_params_buffers"
"""Key under which ``load_state_dict`` tells a module that ``assign`` is true."""


def load_state_dict_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The functions that ``module`` calls before it loads its part of a state dict."""
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]


_LOAD = "_load_from_state_dict"


def loads_by_itself(module: nn.Module) -> bool:
    """Whether a class or hook that is not torch's decides what ``module`` loads: it may resize buffers, rename keys."""
    loader = next(cls for cls in type(module).__mro__ if _LOAD in vars(cls))
    hooks = load_state_dict_hooks(module)
    known = ("torch", __name__.partition(".")[0])
    return loader.__module__.partition(".")[0] != "torch" or not all(
        defined_in(hook, *known) for hook in hooks
    )


def defined_in(hook: Any, *packages: str) -> bool:
    """Whether a hook or method is of one of these packages, though it may carry the name of what it wraps."""
    hook = getattr(hook, "hook", hook)  # as modules keep some
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)
    homes = [str(getattr(hook, "__module__", "")), str(getattr(hook, "__globals__", {}).get("__name__", ""))]
    return any(home == package or home.startswith(f"{package}.") for home in homes for package in packages)


def is_set_by_fsdp(attribute: str) -> bool:
    """Whether FSDP2 sets this attribute on its units, or on the modules that these manage."""
    return attribute.startswith("__composable_api") or (attribute.startswith("_") and "fsdp" in attribute)


_COMPILED = "_orig_mod"


def without_wrappers(name: str) -> str:
    """A parameter's name without the prefixes of ``torch.compile`` and activation checkpointing."""
    return name.replace(f"{_COMPILED}.", "").replace("_checkpoint_wrapped_module.", "")


def module_versions(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What torch notes of each module in a state dict, above all its ``_version``, by its name without wrappers.

    A module that was changed since an older version converts what it is given; without a version, each time.
    """
    noted = getattr(state, "_metadata", None) or {}
    # Of a wrapper and what it wraps, which comes later, the latter stays.
    return {
        without_wrappers(f"{path}.").removesuffix("."): dict(placements)
        for path, placements in noted.items()
    }


def with_module_versions(state: Mapping[str, Any], versions: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """``state`` in a dict that notes ``versions``, by names of modules, as :func:`module_versions` returns them."""
    found = OrderedDict(state)
    found._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return found


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wraps, else ``module``."""
    return getattr(module, _COMPILED, module)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps ``module``, or ``module.compile()`` was called."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def compile_in_place(module: nn.Module, patches: PatchStack, **kwargs: Any) -> None:
    """``module.compile(**kwargs)``, until ``patches`` are restored; torch itself cannot undo it."""
    patches.set(module, "_compiled_call_impl", None)
    module.compile(**kwargs)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor unchanged. Not recorded by autograd."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


@torch.no_grad()
def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor other memory for this rank's part, and count that as a write."""
    tensor._local_tensor = local
    if not tensor.is_inference():
        torch.autograd.graph.increment_version([tensor])


def tensor_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Hooks that ``tensor.register_hook`` has registered, which copies of the tensor lack."""
    return list((tensor._backward_hooks or {}).values())


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


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats ``tensor`` as a view, so that an in-place change replaces what computed it."""
    return tensor._is_view()


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Autograd's version counters: every in-place write but through ``.data`` counts."""
    tensors = list(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        # Those of inference mode have none, and asking each first takes longer than all the rest.
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def patch_unscaling(
    scaler: GradScaler,
    is_checked: dict[Optimizer, bool],
    agree: Callable[[dict[torch.device, Tensor]], dict[torch.device, Tensor]] | None,
    patches: PatchStack,
) -> None:
    """Make ``scaler.unscale_`` work on shards, and only look for overflow if gradients are already unscaled.

    DTensor's own check for overflow takes neither plain tensors beside DTensors nor a rank without
    gradients. ``is_checked``, updated here, has the optimizers whose gradients are unscaled, with whether
    overflow was looked for since. ``agree`` combines what ranks with sharded gradients have found, by
    device: a collective.
    """

    def unscale_gradients(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = optimizer
        if agree is not None:
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            gradients = SimpleNamespace(
                param_groups=[{"params": [_with_local_gradient(p) for p in parameters]}]
            )  # type: ignore[assignment]
        if optimizer in is_checked:
            divide_by = torch.ones_like(inv_scale)
        else:
            divide_by = inv_scale
        found = type(scaler)._unscale_grads_(scaler, gradients, divide_by, found_inf, allow_fp16)
        if agree is None:
            return found
        return agree(found)

    def unscale(optimizer: Optimizer) -> None:
        # The scaler drops its per-optimizer state whenever any optimizer steps.
        if is_checked.get(optimizer) and scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            return
        # The scaler refuses a second call before its next update(), which an abandoned step never reaches.
        scaler._per_optimizer_states.pop(id(optimizer), None)
        type(scaler).unscale_(scaler, optimizer)
        is_checked[optimizer] = True

    patches.set(scaler, "unscale_", unscale)
    patches.set(scaler, "_unscale_grads_", unscale_gradients)


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """A tensor with this rank's part of the parameter's gradient; the parameter itself if its gradient is whole."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    local = local_tensor(parameter.grad)
    stand_in = local.detach()
    stand_in.grad = local
    return stand_in


def saved(node: Any, name: str) -> Any:
    """What a node of the autograd graph has saved for its backward under ``name``; None if nothing."""
    return getattr(node, f"_saved_{name}", None)


def check_ddp_backward_is_complete(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError unless the last synchronised backward has reduced every bucket."""
    ddp._check_reducer_finalized()


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten ``mesh`` into one dimension called ``name``. A collective over the world if it makes a new group."""
    return mesh._flatten(name)


@contextmanager
def shared_groups(groups: dict[tuple[int, ...], Any]) -> Iterator[None]:
    """Context in which meshes use ``groups``, by their ranks, before they make others, which are added.

    Meshes make a group for each dimension, also where another dimension has the same ranks, which costs a
    communicator, and where a rank is alone. Every rank must hold entries for the same ranks, and build the
    same meshes.
    """

    def new_group(ranks: list[int], **kwargs: Any) -> Any:
        key = tuple(ranks)
        if key not in groups:
            groups[key] = (
                _group_of_one(key[0], **kwargs) if len(key) == 1 else dist.new_group(ranks, **kwargs)
            )
        return groups[key]

    def split_group(split_ranks: list[list[int]], **kwargs: Any) -> Any:
        own = next(tuple(ranks) for ranks in split_ranks if dist.get_rank() in ranks)
        kwargs.pop("parent_pg")
        if len(own) == 1:
            return new_group(list(own), **kwargs)
        if own not in groups:
            made = dist.split_group(split_ranks=split_ranks, **kwargs)
            groups.update({tuple(ranks): None for ranks in split_ranks})
            groups[own] = made
        return groups[own]

    with PatchStack() as patches:
        patches.set(device_mesh, "new_group", new_group)
        patches.set(device_mesh, "split_group", split_group)
        yield


def _group_of_one(rank: int, **kwargs: Any) -> Any:
    """A group of one rank that connects to nothing before it is used; on other ranks what torch returns there."""
    if rank != dist.get_rank():
        return dist.GroupMember.NON_GROUP_MEMBER
    with unbound():
        return dist.new_group([rank], **{**kwargs, "use_local_synchronization": True})


@contextmanager
def unbound() -> Iterator[None]:
    """Context in which new groups do not inherit the device that the default group is bound to, nor connect at once."""
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def accelerator_backends() -> dict[str, Any]:
    """Backends of accelerators in all groups of this process, by a name that each rank of the group has for it.

    Nothing public lists the groups, or returns the backend of a device. Those of gloo are left out: its
    collectives block and raise, whatever the device.
    """
    found = {}
    for group in list(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else []:
        for device in group._device_types:
            backend = group._get_backend(device)
            if device.type != "cpu" and backend.name().lower() != dist.Backend.GLOO:
                # Groups that share no rank may have one name.
                lowest_rank = min(dist.get_process_group_ranks(group))
                found[f"{group.group_name} of rank {lowest_rank}"] = backend
    return found


def group_names() -> tuple[str, ...]:
    """Names of all groups of this process, in the order in which they were made; cheap enough for each step."""
    return tuple(dist.distributed_c10d._world.pg_names.values())


def num_queued(backend: Any) -> int:
    """Collectives that this rank has queued; the group's own method raises for backends of others."""
    return int(backend._get_sequence_number_for_group())


def abort_backends(backends: Iterable[Any]) -> None:
    """Free this rank's device and host from collectives that others will not join. May wait for the group's timeout.

    As in torch's own function for all groups, which would also drop those of the host, NCCL's are aborted as
    one: each by itself, they could wait for each other.
    """
    backends = list(backends)
    first = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if first is not None:
        first._group_start()
    try:
        for backend in backends:
            with suppress(Exception):  # one that is gone already, or cannot be aborted
                backend.abort()
    finally:
        if first is not None:
            first._group_end()


def abort_process_groups() -> None:
    """Leave all groups as ``destroy_process_group`` does, without waiting for what they have queued."""
    dist.distributed_c10d._abort_process_group()


def flight_records() -> bytes:
    """The newest collectives of this rank, as ``torchfrtrace`` reads them. Waits for no device."""
    c10d: Any = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or c10d._dump_fr_trace
    return cast(bytes, dump())


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
    """Check at import the private names that the functions above use on public classes and modules."""
    check = partial(release_probe.check, "torch")
    check(FSDPModule, "_get_fsdp_state", "_set_unshard_async_op")
    if ACCUMULATES_IN_LEAF:
        check(FSDPModule, "set_manual_backward_finalization", "finalize_backward")
    check(_redistribute, "clear_redistribute_planner_cache")
    check(nn.Linear(1, 1).state_dict(), "_metadata", writable=True)
    check(torch.autograd, BACKWARD, writable=True)
    check(torch._C, "_clear_DTensor_sharding_propagator_cache")
    check(DeviceMesh, "_flatten")
    check(device_mesh, "new_group", "split_group")
    check(GradScaler, "_per_optimizer_states", "_unscale_grads_")
    check(DistributedDataParallel, "_check_reducer_finalized")
    check(nn.Module, "_compiled_call_impl")
    check(
        nn.Module(),
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_load_state_dict_pre_hooks",
        _LOAD,
    )
    check(nn.MultiheadAttention, RESET_PARAMETERS)
    check(torch.autograd.graph, BACKWARD)
    check(Tensor, "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_is_view")
    check(DTensor, "_local_tensor")
    check(dist.distributed_c10d, "_world", "_abort_process_group")
    check(dist.ProcessGroup, "_device_types", "_get_backend")
    check(torch._C._distributed_c10d.Backend, "_get_sequence_number_for_group")
    check(torch._C._distributed_c10d, "_dump_fr_trace")


_probe()
