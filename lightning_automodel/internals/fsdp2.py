"""Private names of FSDP2: its units, the flags of their communication, gradients that wait, and gathered parameters."""

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_automodel.internals.dtensor import GRAD, plain_access
from lightning_automodel.internals.patching import PatchStack, overwrite
from lightning_automodel.internals.torch import graph_nodes, local_tensor, parameters_of, set_local_tensor

FSDPParamGroup: TypeAlias = Any  # what FSDP2 communicates together; its classes are not public


FSDPParam: TypeAlias = Any  # one parameter of such a group


_IS_UNSHARDED = attrgetter("is_unsharded")
_GATHER_RESULT = attrgetter("_all_gather_result")


ACCUMULATES_IN_LEAF = hasattr(FSDPModule, "set_keep_unsharded_storage")
"""Whether FSDP2 accumulates all unreduced gradients in ``.grad`` of the unsharded parameters (torch 2.15)."""


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """FSDP2 units at or below ``model``, each once; a unit of several modules is given by its first one."""
    units: dict[int, FSDPModule] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(module._get_fsdp_state()), module)
    return list(units.values())


def groups_of(units: Iterable[FSDPModule]) -> list[FSDPParamGroup]:
    """The parameter groups of units: a single one of each, unless its parameters are sharded over several meshes."""
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


def sharded_over(mesh: DeviceMesh) -> Any:
    """What ``shard_placement_fn`` of ``fully_shard`` returns for parameters sharded over ``mesh``.

    ``mesh`` is 1-D, or 2-D (replicate, shard). All these parameters of a unit must get the same object:
    FSDP2 groups them by it.
    """
    # The documentation of `fully_shard` names the class, but torch exports neither it nor what its constructor
    # takes: FSDP2 makes that for a module that nobody uses.
    unused = fully_shard(nn.Linear(1, 1, bias=False, device="meta"), mesh=mesh)
    mesh_info = groups_of([unused])[0].mesh_info
    module = sys.modules[type(mesh_info).__module__]
    return module.ShardPlacementResult(None, mesh_info)


def initialise_fsdp_root(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialisation now: its errors come, and it settles ``post_forward_mesh_info`` of the root."""
    root._get_fsdp_state()._lazy_init()


def detach_forward_hooks(root: FSDPModule) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Remove and return FSDP2's hooks ``(module, args, kwargs)`` and ``(module, args, output)`` of a forward."""
    state = root._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return state._pre_forward, state._post_forward


class Reductions(NamedTuple):
    """Flags of a group: what a backward does with its gradients."""

    reduce_grads: bool
    all_reduce_grads: bool
    """Whether reduced gradients are added up across replicas (HSDP)."""
    reduce_scatter_unused_params: bool
    """Whether zeros stand for parameters that this rank has not used, so that ranks send the same shapes."""


class Resharding(NamedTuple):
    """Flags of a group: whether its gathered parameters are freed."""

    reshard_after_backward: bool
    post_forward_mesh_info: Any
    """The mesh to reshard to after a forward; None: stay gathered."""


Flags = TypeVar("Flags", Reductions, Resharding)


def flags_of(groups: Iterable[FSDPParamGroup], kind: type[Flags]) -> dict[FSDPParamGroup, Flags]:
    """The flags of each group. AttributeError if this release of torch lacks one, which nobody may then set."""
    read = attrgetter(*kind._fields)
    return {group: kind(*read(group)) for group in groups}


def set_flags(flags: Mapping[FSDPParamGroup, Reductions | Resharding]) -> None:
    """Set flags that :func:`flags_of` returns."""
    for group, values in flags.items():
        for name, value in zip(values._fields, values, strict=True):
            setattr(group, name, value)


def unsharded_numel(param: FSDPParam) -> int:
    """Number of elements of the padded, unsharded parameter on this rank: under tensor parallelism, of its part."""
    numel: int = param.padded_sharded_param_size.numel()
    return numel * getattr(param.mesh_info, "shard_mesh_size", 1)


def was_unsharded(group: FSDPParamGroup) -> bool:
    """Whether the group was ever unsharded: its buffers and leaves are made once, and keep the dtype of that time."""
    return any(len(param.all_gather_outputs) > 0 for param in group.fsdp_params)


def clear_unreduced_gradients(group: FSDPParamGroup, params: list[FSDPParam]) -> None:
    """Drop what ``zero_grad`` leaves: the group's partial sums, and unsharded gradients of these of its parameters."""
    group._partial_reduce_output = None
    for param in params:
        if (leaf := getattr(param, "unsharded_param", None)) is not None:
            GRAD.__set__(leaf, None)
        if not ACCUMULATES_IN_LEAF:
            param.unsharded_accumulated_grad = None


def holds_partial_reduction(group: FSDPParamGroup) -> bool:
    """Whether HSDP has reduce-scattered gradients of the group that it has not all-reduced yet."""
    return group._partial_reduce_output is not None


def _is_unreduced(param: FSDPParam) -> bool:
    if not ACCUMULATES_IN_LEAF and param.unsharded_accumulated_grad is not None:
        return True
    leaf = getattr(param, "unsharded_param", None)
    return leaf is not None and GRAD.__get__(leaf) is not None


def reduce_deferred_gradients(root: FSDPModule, groups: Iterable[FSDPParamGroup]) -> None:
    """Reduce the deferred gradients of ``groups``, if any, by their current flags.

    These are the groups at or below ``root``. A collective if there are any such gradients: the last
    backward, in which FSDP2 reduces, did not pass through ``root``.
    """
    pending = []
    for group in groups:
        if any(map(_is_unreduced, group.fsdp_params)) or group._partial_reduce_output is not None:
            pending.append(group)
    if not pending:
        return
    state = root._get_fsdp_state()
    if not hasattr(state, "wait_for_gradient_reduction"):  # before torch 2.15
        state._root_post_backward_final_callback()
        return
    # FSDPModule.finalize_backward would do this, but not within a backward, whose last callback calls here.
    for group in pending:
        group.post_backward()
    state.wait_for_gradient_reduction()


def has_replicas(group: FSDPParamGroup) -> bool:
    """Whether there are several copies of the group's shards (HSDP)."""
    num_replicas: int = getattr(group.mesh_info, "replicate_mesh_size", 1)
    return num_replicas > 1


def unsharded_gradient_dtype(param: FSDPParam) -> torch.dtype:
    """The dtype in which the gradient of one parameter is accumulated and reduced."""
    if ACCUMULATES_IN_LEAF:
        dtype = param.unsharded_grad_dtype
    else:
        dtype = param.reduce_dtype
    return dtype or param.param_dtype or param.orig_dtype


def zero_missing_gradients(group: FSDPParamGroup, frozen: Container[nn.Parameter] = ()) -> None:
    """Before a backward that reduces, give zero gradients to parameters that have none, where FSDP2 needs them.

    - To those of ``frozen``, shards that are not trainable any more, and that other ranks may use.
    - Before torch 2.15 to those that no micro-batch has used so far, beside others that have accumulated one:
      FSDP2 then reduces only gradients of one dtype. That of a parameter that is first used in the last
      micro-batch would be in the compute dtype, while the others' are in the reduction dtype.
    """
    in_one_dtype = not ACCUMULATES_IN_LEAF and any(
        param.unsharded_accumulated_grad is not None for param in group.fsdp_params
    )
    if not (in_one_dtype or frozen):
        return
    for param in group.fsdp_params:
        shard = param.sharded_param
        is_needed = in_one_dtype if shard.requires_grad else shard in frozen
        if is_needed and not _is_unreduced(param):
            zeros = torch.zeros_like(param.unsharded_param, dtype=unsharded_gradient_dtype(param))
            if ACCUMULATES_IN_LEAF:
                GRAD.__set__(param.unsharded_param, zeros)
            else:
                param.unsharded_accumulated_grad = zeros


# --- Gathered parameters ----------------------------------------------------------------------------------------------


def set_background_gathers(units: Iterable[FSDPModule], is_on: bool) -> None:
    """Set whether all-gathers of ``units`` are asynchronous: on a CPU, synchronous ones block the thread."""
    for group in groups_of(units):
        overwrite(group, "unshard_async_op", is_on)


def watch_unit(
    unit: FSDPModule,
    note: Callable[..., None],
    keep_gathered: Callable[[FSDPParamGroup], None],
    forwards_left: Counter[FSDPParamGroup],
    access: Callable[[], AbstractContextManager[Any]],
    patches: PatchStack,
) -> None:
    """Call ``note`` before each all-gather and reduction of ``unit``, for which FSDP2 has no hooks.

    Before a reduction, ``note`` gets the numbers of the parameters whose gradients FSDP2 is about to send.
    ``keep_gathered`` is called before FSDP2 frees what a backward with ``create_graph=True`` has gathered.
    ``forwards_left`` has, for groups that a step has called repeatedly, the number of forwards that the backward is
    still to leave. FSDP2 would reduce at each of these, but ranks may have called a unit more or less often. So it
    reduces at the last one alone, in the context ``access``.
    """

    def gather(group: FSDPParamGroup, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            note()
        unshard(*args, **kwargs)

    def reduce(group: FSDPParamGroup, post_backward: Callable[..., None], *args: Any) -> None:
        reduce_grads = group.reduce_grads
        if group in forwards_left:
            forwards_left[group] -= 1
            if forwards_left[group] > 0:
                group.reduce_grads = False
        sent = []
        if group.reduce_grads:
            for number, param in enumerate(group.fsdp_params):
                gets_zeros = group.reduce_scatter_unused_params and param.unsharded_param.requires_grad
                if gets_zeros or _is_unreduced(param):
                    sent.append(number)
        if sent:
            note(*sent)
        if torch.is_grad_enabled():  # within a backward: autograd records what it computes
            keep_gathered(group)
        try:
            with access():
                post_backward(*args)
        finally:
            group.reduce_grads = reduce_grads

    for group in groups_of([unit]):
        patches.set(group, "unshard", partial(gather, group, group.unshard))
        patches.set(group, "post_backward", partial(reduce, group, group.post_backward))


def forwards_reached(loss: Tensor) -> Counter[FSDPParamGroup]:
    """How many forwards of each group a backward of ``loss`` [] leaves, as its graph tells."""
    # FSDP2 puts these nodes into the graph, to see when the backward leaves a forward.
    groups = [getattr(node, "param_group", None) for node in graph_nodes(loss)]
    return Counter(group for group in groups if group is not None)


class Unit:
    """One FSDP2 unit, whose parameters are gathered together.

    Attributes:
        module: The unit; of several modules that share one, the first.
        groups: What FSDP2 communicates at once: one group, unless parameters are sharded over several meshes.
        params: What FSDP2 knows of each of its parameters.
        is_retained: Whether its modules show shards, while the memory of what was gathered is retained.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module: Any = module
        self.groups = groups_of([module])
        self.params = [param for group in self.groups for param in group.fsdp_params]
        self._places = [(param, *place) for param in self.params for place in _places_of(param)]
        self.is_retained = False

    @property
    def is_gathered(self) -> bool:
        """Whether its modules show gathered parameters."""
        return any(map(_IS_UNSHARDED, self.groups))

    @property
    def is_pending(self) -> bool:
        """Whether an all-gather was started, and not waited for yet."""
        return any(map(_GATHER_RESULT, self.groups))

    def retain(self) -> None:
        """Let modules show shards, and retain the memory of what was gathered."""
        for group in self.groups:
            group._sharded_state = type(group._sharded_state).SHARDED
        for param in self.params:
            param._setattr_on_modules(param.sharded_param)
            param.sharded_state = type(param.sharded_state).SHARDED
        self.is_retained = True

    def show_shards(self) -> None:
        """Let modules show shards, where a forward has left parameters sharded over fewer ranks."""
        for param in self.params:
            if param.sharded_state.name == "SHARDED_POST_FORWARD":
                param._setattr_on_modules(param.sharded_param)

    def show_gathered(self) -> None:
        """Let modules show gathered parameters, which are trainable as the shards are."""
        for group in self.groups:
            group._sharded_state = type(group._sharded_state).UNSHARDED
        with plain_access():
            for param in self.params:
                param.to_unsharded()

    def show_retained(self) -> bool:
        """Undo :meth:`retain`. False if it was not called, or if a forward has freed what was retained."""
        is_available = (
            self.is_retained
            and not self.is_pending
            and not self.is_gathered
            and all(map(_has_memory, self.groups))
        )
        self.is_retained = False
        if is_available:
            self.show_gathered()
        return is_available

    def free(self) -> None:
        """Free what was gathered, also what is retained, and by a prefetch whose forward did not come.

        FSDP2 would use prefetched parameters at the unit's next forward, when the weights may have changed.
        """
        if self.is_retained:
            self.show_retained()
        if self.is_pending:
            gather(self.module)
        self.module.reshard()

    def forget_background_gather(self) -> None:
        """Never wait for a running all-gather on a CPU: a rank that has failed may not join it."""
        for group in self.groups:
            if group.device.type == "cpu":
                group._all_gather_result = None

    def is_substituted(self) -> bool:
        """Whether a module has another tensor in place of a parameter: for one call, by ``functional_call``."""
        for param, shown_by_name, name in self._places:
            shown = shown_by_name.get(name)
            if shown is not param.unsharded_param and shown is not param.sharded_param:
                return True
        return False


def _places_of(param: FSDPParam) -> Iterator[tuple[dict[str, nn.Parameter | None], str]]:
    """The parameters of modules that hold this one, several if it is shared, each with its name there."""
    place = param._module_info
    names = [place.param_name, *place.shared_param_names]
    for module, name in zip([place.module, *place.shared_modules], names, strict=True):
        yield parameters_of(module), name


def _has_memory(group: FSDPParamGroup) -> bool:
    """Whether what a group has gathered is kept. FSDP2 frees all of a group at once."""
    gathered = (tensor for param in group.fsdp_params for tensor in param.all_gather_outputs)
    return any(tensor.untyped_storage().size() > 0 for tensor in gathered)


def gather(unit: FSDPModule) -> None:
    """Gather the parameters of ``unit``, unless they are. A collective if not."""
    if all(map(_IS_UNSHARDED, groups_of([unit]))):
        return  # FSDP2 would prepare each parameter anew
    with torch.inference_mode(False), torch.no_grad():
        unit.unshard()


@torch.inference_mode(False)
@torch.no_grad()
def make_unsharded(group: FSDPParamGroup) -> None:
    """Make the tensors that all gathers write to, which the first gather would make, and free their memory.

    Training could not use them if they were inference tensors. Not a collective.
    """
    if was_unsharded(group):
        return
    for param in group.fsdp_params:
        inputs = param.all_gather_inputs
        param.init_all_gather_outputs(
            [part.numel() for part in inputs],
            [part.dtype for part in inputs],
            getattr(param.mesh_info, "shard_mesh_size", 1),
            group.device,
        )
        param.init_unsharded_param()
        param.free_unsharded_param()


@torch.inference_mode(False)
@torch.no_grad()
def gather_elsewhere(param: FSDPParam) -> Tensor:
    """Let FSDP2 gather a parameter to other memory from now on, which it also frees. Returns it, in the copy's shape.

    A backward that has saved the earlier memory keeps it.
    """
    whole = local_tensor(param.unsharded_param)
    param.all_gather_outputs[0] = memory = torch.empty_like(param.all_gather_outputs[0])
    return memory.as_strided(whole.size(), whole.stride())


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
    dim = param.fsdp_placement.dim
    # All ranks but the last have full chunks; the last ones may have none.
    start = getattr(param.mesh_info, "shard_mesh_rank", 0) * param.padded_sharded_param_size[dim]
    return whole.narrow(dim, min(start, whole.size(dim)), param.sharded_size[dim])
