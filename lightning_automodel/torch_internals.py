"""Every private name of torch that the package touches, each with its reason."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.utils import _apply_to_tensors
from torch.distributed.utils import _sync_params_and_buffers as broadcast_tensors
from torch.distributed.utils import _verify_param_shape_across_processes as verify_shapes_across_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_automodel.patching import PatchStack

__all__ = [
    "CHECKPOINT_METADATA_CLASSES",
    "FSDPParamGroup",
    "FakeTensorMode",
    "FsspecFileSystem",
    "FsspecReader",
    "FsspecWriter",
    "OptimizedModule",
    "averaging_size",
    "broadcast_tensors",
    "cast_floating",
    "check_ddp_backward_is_complete",
    "clear_accumulated_gradients",
    "default_store",
    "discard_partial_reduction",
    "finish_backward",
    "flatten_mesh",
    "flush_static_graph",
    "forget_meshes",
    "forget_process_groups",
    "free_parked",
    "fsdp_param_groups",
    "gathered_bytes",
    "gathered_storage_is_alive",
    "has_deferred_gradients",
    "has_gradient_hook",
    "has_post_accumulate_hook",
    "initialise_fsdp_root",
    "is_compiled",
    "is_file_store",
    "is_fsdp_root",
    "is_replicated",
    "lacks_accumulator",
    "local_tensor",
    "move_what_has_values",
    "name_of",
    "offset_in_file",
    "own_shard_changed",
    "park_gathered",
    "patch_unscaling",
    "process_groups",
    "reduction_dtype",
    "set_element",
    "set_group_timeout",
    "sharded_and_gathered",
    "sharded_versions",
    "start_accumulator",
    "storage_records",
    "take_over_forward_hooks",
    "unpark_gathered",
    "unsharded_gradient_bytes",
    "verify_shapes_across_ranks",
    "was_gathered",
    "widen_gradient",
]


CHECKPOINT_METADATA_CLASSES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)
"""What torch.distributed.checkpoint (torch 2.13) pickles into ``.metadata``; anything else there could run code."""


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def offset_in_file(tensor: Tensor) -> int:
    """Where in a file the storage of a tensor is that ``torch.load`` loaded in :class:`FakeTensorMode`, in bytes."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def storage_records(reader: torch.PyTorchFileReader) -> dict[str, int]:
    """Where in a file that ``torch.save`` has written each storage is, in bytes, in the order in which it met them."""
    names = [name for name in reader.get_all_records() if name.startswith("data/")]
    names.sort(key=lambda name: int(name.removeprefix("data/")))
    return {name: reader.get_record_offset(name) for name in names}  # type: ignore[attr-defined]


def process_groups() -> list[dist.ProcessGroup]:
    """Every group that this process is in, in the order in which they were made: the default one first."""
    return list(dist.distributed_c10d._world.pg_map)


def forget_process_groups() -> list[Any]:
    """Let torch believe that no group was ever made, and return what would otherwise be destroyed.

    ``destroy_process_group`` shuts groups down, which in a forked process waits for threads of its parent.
    """
    world = dist.distributed_c10d._world
    kept = [*world.pg_map.items()]
    dist.distributed_c10d._update_default_pg(None)
    registries: list[dict[Any, Any]] = [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config]
    for registry in (*registries, world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state):
        registry.clear()
    torch._C._distributed_c10d._unregister_all_process_groups()
    world.group_count = 0
    return kept


def forget_meshes() -> None:
    """Empty this thread's caches of DTensor sharding decisions: they hold each mesh that was ever sharded over.

    A mesh holds its groups, and a group that is held keeps its threads and connections, destroyed or not (torch 2.13).
    """
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def fsdp_param_groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    """Yield the FSDP2 parameter groups at or below ``module``, each once (a group may span several modules)."""
    seen: set[int] = set()
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for group in submodule._get_fsdp_state()._fsdp_param_groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def initialise_fsdp_root(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialisation now, so that its errors (tied parameters, mixed dtypes) come at set-up.

    It also settles ``post_forward_mesh_info`` of the root group, which the first forward would otherwise change after
    this package has recorded it.
    """
    root._get_fsdp_state()._lazy_init()


def take_over_forward_hooks(root: FSDPModule) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Remove FSDP2's forward hooks from ``root`` and return them, for the caller to run around more than ``forward``.

    Returns:
        ``before(module, args, kwargs) -> (args, kwargs)`` and ``after(module, args, output) -> output``.
    """
    state = root._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return state._pre_forward, state._post_forward


def clear_accumulated_gradients(param: FSDPParam) -> None:
    """Drop the unsharded gradients that FSDP2 keeps through ``zero_grad`` and ``reset_iter_state`` (torch 2.13)."""
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def is_replicated(group: FSDPParamGroup) -> bool:
    """Whether the group is sharded within each of several replicas (HSDP)."""
    return group._is_hsdp


def sharded_and_gathered(group: FSDPParamGroup) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Sharded parameters, each with the one that stands for it while gathered.

    The latter are the same objects from the first gathering on, which must have happened.
    """
    return [(param.sharded_param, param._unsharded_param) for param in group.fsdp_params]


def has_deferred_gradients(root: FSDPModule) -> bool:
    """Whether any group at or below ``root`` holds gradients that are not fully reduced."""
    return any(
        group._partial_reduce_output is not None
        or any(
            param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
            for param in group.fsdp_params
        )
        for state in root._get_fsdp_state()._state_ctx.all_states
        for group in state._fsdp_param_groups
    )


def finish_backward(root: FSDPModule) -> None:
    """Run what autograd runs for ``root`` at the end of a backward: reduce gradients by the current flags, reshard."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def averaging_size(group: FSDPParamGroup) -> int:
    """Number of ranks that the group's gradients are averaged over: shards times replicas."""
    mesh_info = group.mesh_info
    return getattr(mesh_info, "shard_mesh_size", 1) * getattr(mesh_info, "replicate_mesh_size", 1)


def discard_partial_reduction(group: FSDPParamGroup) -> None:
    """Drop what HSDP has reduce-scattered and not yet all-reduced."""
    group._partial_reduce_output = None


def is_fsdp_root(module: FSDPModule) -> bool:
    """Whether lazy initialisation made ``module`` a root."""
    return bool(module._get_fsdp_state()._is_root)


def was_gathered(group: FSDPParamGroup) -> bool:
    """Whether the group was gathered before: buffers and parameters for that are made once, in the dtype of then."""
    return any(len(param.all_gather_outputs) > 0 for param in group.fsdp_params)


def name_of(group: FSDPParamGroup) -> str:
    """Name of the group's module below its root."""
    return group._module_fqn or "the root"


def gathered_bytes(group: FSDPParamGroup) -> int:
    """Bytes of the group's parameters when gathered."""
    return sum(p._orig_size.numel() * (p.param_dtype or p.orig_dtype).itemsize for p in group.fsdp_params)


def unsharded_gradient_bytes(group: FSDPParamGroup) -> int:
    """Bytes of the group's gradients before they are reduced."""
    return sum(
        p._orig_size.numel() * (p.reduce_dtype or p.param_dtype or p.orig_dtype).itemsize
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    )


def reduction_dtype(group: FSDPParamGroup) -> torch.dtype | None:
    """What the group's gradients are reduced in; None for a group without trainable parameters."""
    trainable = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    return next((p.reduce_dtype or p.param_dtype or p.orig_dtype for p in trainable), None)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in nested containers, as FSDP2 casts what enters and leaves its units."""
    return _apply_to_tensors(partial(_cast_fp_tensor, dtype), values)


def lacks_accumulator(group: FSDPParamGroup) -> list[FSDPParam]:
    """Trainable parameters without a wide gradient from earlier micro-batches, where others of the group have one.

    FSDP2 (torch 2.13) reduces the gradients of a group only if all have one dtype: what a parameter that is first used
    in the last micro-batch gets would be in the dtype of the computation, and the others' in that of the reduction.
    """
    trainable = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    lacking = [param for param in trainable if param.unsharded_accumulated_grad is None]
    return lacking if len(lacking) < len(trainable) else []


def start_accumulator(param: FSDPParam) -> None:
    """Let the gradients of ``param`` be added to a zero in the dtype of the reduction."""
    param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


def widen_gradient(param: FSDPParam) -> RemovableHandle:
    """Move the next gradient of ``param`` to the dtype of the reduction as soon as autograd has accumulated it."""

    def widen(_: nn.Parameter) -> None:
        if param.unsharded_accumulated_grad is None:
            param.to_accumulated_grad_if_needed()
        else:
            param.accumulate_unsharded_grad_if_needed()

    return param._unsharded_param.register_post_accumulate_grad_hook(widen)


def has_post_accumulate_hook(parameter: nn.Parameter) -> bool:
    """Whether anybody acts on the gradient of ``parameter`` as soon as it is accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Whether anybody looks at or replaces the gradient of ``parameter`` before it is accumulated."""
    return bool(parameter._backward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps ``module``, or ``module.compile()`` was called."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, else the tensor. ``to_local`` would make a view that autograd follows."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def move_what_has_values(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to ``device``; ``Module.to`` raises where some are on the meta device."""
    module._apply(lambda tensor: tensor if tensor.device.type == "meta" else tensor.to(device))


def park_gathered(group: FSDPParamGroup) -> None:
    """Register the sharded parameters on the modules without freeing the gathered copy.

    Whoever looks at the module between two micro-batches (a callback, a checkpoint, another forward) then meets an
    ordinary sharded module, and a forward of theirs gathers afresh.
    """
    for param in group.fsdp_params:
        param._setattr_on_modules(param.sharded_param)
        param.sharded_state = ShardedState.SHARDED
    group._sharded_state = ShardedState.SHARDED


def unpark_gathered(group: FSDPParamGroup) -> None:
    """Register a parked copy on the modules again. The caller has made sure that it is alive and not stale."""
    group._to_unsharded()


def free_parked(group: FSDPParamGroup) -> None:
    """Free a parked copy; the next forward gathers anew."""
    for param in group.fsdp_params:
        param.free_unsharded_param()


def gathered_storage_is_alive(group: FSDPParamGroup) -> bool:
    """Whether no other forward has freed the gathered copy since it was parked."""
    return all(t.untyped_storage().size() > 0 for p in group.fsdp_params for t in p.all_gather_outputs if t.numel() > 0)


def sharded_versions(group: FSDPParamGroup) -> list[int]:
    """Autograd version counters of the sharded parameters: they move with every in-place write but ``.data`` ones."""
    return [param.sharded_param._version for param in group.fsdp_params]


def own_shard_changed(group: FSDPParamGroup) -> bool:
    """Whether this rank's sharded parameters differ from what was gathered from them. Reads tensors on the host."""
    for param in group.fsdp_params:
        if len(param.all_gather_outputs) != 1 or param.fsdp_placement.dim != 0:
            continue
        shard_rank, shard_size = param.mesh_info.shard_mesh_rank, param.mesh_info.shard_mesh_size
        gathered = param.all_gather_outputs[0].view(shard_size, -1)[shard_rank]
        local = param._sharded_param_data.to(gathered.dtype)
        if not torch.equal(_as_integers(gathered), _as_integers(local)):
            return True
    return False


def _as_integers(tensor: Tensor) -> Tensor:
    """Bits of a contiguous tensor as the widest integers that fit, which compare fastest and know no NaN."""
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.view(next(dtype for dtype in _INTEGERS if num_bytes % dtype.itemsize == 0))


def patch_unscaling(
    scaler: GradScaler,
    is_checked: dict[Optimizer, bool],
    agree: Callable[[dict[torch.device, Tensor]], dict[torch.device, Tensor]] | None,
    patches: PatchStack,
) -> None:
    """Let ``scaler.unscale_`` only look for overflow where gradients are unscaled already, and shard by shard.

    DTensor's own way of looking for overflow takes neither plain tensors beside DTensors nor a rank without gradients,
    and asks the ranks of the first gradient's mesh only.

    Args:
        scaler: The scaler.
        is_checked: Optimizers whose gradients are unscaled, and whether overflow was looked for since they are. Updated
            here when it is.
        agree: Where gradients are sharded, what the ranks agree on from what each has found, by device.
        patches: Takes the replaced methods.
    """

    def unscale_gradients(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = optimizer
        if agree is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            gradients = SimpleNamespace(param_groups=[{"params": [_with_local_gradient(p) for p in parameters]}])  # type: ignore[assignment]
        divide_by = torch.ones_like(inv_scale) if optimizer in is_checked else inv_scale
        found = type(scaler)._unscale_grads_(scaler, gradients, divide_by, found_inf, allow_fp16)
        return found if agree is None else agree(found)

    def unscale(optimizer: Optimizer) -> None:
        # The scaler forgets what it has looked at whenever any optimizer steps.
        if is_checked.get(optimizer) and scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            return
        # It refuses a second call before its next update, although an abandoned step never comes to that.
        scaler._per_optimizer_states.pop(id(optimizer), None)
        type(scaler).unscale_(scaler, optimizer)
        is_checked[optimizer] = True

    patches.set(scaler, "unscale_", unscale)
    patches.set(scaler, "_unscale_grads_", unscale_gradients)


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is this rank's part of the parameter's; the parameter itself where that is the whole."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    local = parameter.grad._local_tensor
    stand_in = local.detach()
    stand_in.grad = local
    return stand_in


# --- DDP -------------------------------------------------------------------------------------------------------------


def check_ddp_backward_is_complete(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError unless the last synchronised backward has reduced every bucket."""
    ddp._check_reducer_finalized()


def flush_static_graph(ddp: DistributedDataParallel) -> None:
    """Launch the reductions that a static graph delays in its first iteration (Lightning's own DDP does the same)."""
    ddp.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten ``mesh`` into one dimension called ``name``. A collective over the world where it makes a new group."""
    return mesh._flatten(name)


def is_file_store(store: dist.Store) -> bool:
    """Whether a file is at the bottom of ``store``."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)
