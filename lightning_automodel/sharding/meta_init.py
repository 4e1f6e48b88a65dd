"""Values for a model that was created on the meta device: allocate the shards, then run each module's initialiser.

As in torchtitan, the model is sharded while it has no values, and memory is allocated for the shards alone. Unlike
there, an initialiser runs on whole tensors in host memory, in the dtype that they were created in and from rank 0's
random state, and each rank keeps its shards of the result. Random numbers drawn shard by shard would differ with the
number of ranks, and on CPU meshes torch draws the same ones for every shard.

So one seed gives one model, whatever the layout, and the same as without the meta device where constructors do nothing
but build children and call these initialisers. The cost: what is below a module is whole, in the host memory of every
rank, while its initialiser runs. Large models should initialise layer by layer.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel import torch_internals
from lightning_automodel.distributed import collectives
from lightning_automodel.sharding.apply import shard_like
from lightning_automodel.sharding.units import class_name

# Memory that nobody has initialised is filled with this byte. A tensor of nothing else has no values yet: a checkpoint
# or the user may still write some, so what is left is decided by looking, when the run starts.
_FILL_BYTE = 0xA5

_UNINITIALIZED = "_lightning_automodel_uninitialized"
"""Attribute of the model: names of tensors without values. Kept there so that a second attempt raises again."""


@dataclass
class _Materialized:
    """A tensor that came from the meta device."""

    name: str
    dtype: torch.dtype  # in which it was created, before precision plugins converted the model
    owner: nn.Module  # of the modules that share it, the one whose own initialiser counts


def meta_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of the parameters and buffers that are on the meta device, by all of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in named if tensor.device.type == "meta"}


def materialize(model: nn.Module, created_as: dict[str, torch.dtype], device: torch.device, offload: bool) -> None:
    """Allocate what is on the meta device, and initialise it.

    A collective over the default group: every rank must call it, with the same model. Random states are left as they
    were. What no initialiser fills is found by :func:`check_initialized`.

    Args:
        model: The model, sharded as it is to be.
        created_as: From :func:`meta_dtypes`, before anybody converted the model.
        device: Where tensors are to be.
        offload: Where shards are to be in host memory instead.
    """
    materialized = _allocate(model, created_as, device, offload)
    pending = {id(tensor): entry.name for tensor, entry in materialized.items() if tensor.numel() > 0}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(collectives.broadcast_object(torch.get_rng_state(), src=0))
            for module, below, initialize in _initializers(model):
                _run(module, below, initialize, materialized, pending)
    finally:
        vars(model)[_UNINITIALIZED] = list(pending.values())


def _allocate(
    model: nn.Module, created_as: dict[str, torch.dtype], device: torch.device, offload: bool
) -> dict[Tensor, _Materialized]:
    """Memory for everything on the meta device. ``Module.to_empty`` would also drop values that exist, and untie."""
    allocated: dict[Tensor, Tensor] = {}
    materialized: dict[Tensor, _Materialized] = {}
    for prefix, module in _children_first(model):
        for name, tensor in _own_tensors(module):
            if tensor.device.type != "meta":
                continue
            if tensor not in allocated:
                where = torch.device("cpu") if offload and isinstance(tensor, DTensor) else device
                empty = torch.empty_like(tensor, device=where, memory_format=torch.contiguous_format)
                _bytes(empty).fill_(_FILL_BYTE)
                allocated[tensor] = _as_parameter(tensor, empty)
                full_name = f"{prefix}{name}"
                materialized[allocated[tensor]] = _Materialized(full_name, created_as[full_name], module)
            setattr(module, name, allocated[tensor])
    return materialized


def _initializers(model: nn.Module) -> Iterator[tuple[nn.Module, Iterable[nn.Module], Callable[[], Any]]]:
    """Every initialiser in the order of construction, with its module and the modules whose tensors it may write.

    ``reset_parameters()`` is torch's convention, ``_reset_parameters()`` that of its attention and transformers;
    ``_init_weights(module)``, called for each module below, that of Hugging Face, timm and many others.
    """
    for _, module in _children_first(model):
        for name in ("reset_parameters", "_reset_parameters"):
            if _takes(module, name, 0):
                yield module, module.modules(), getattr(module, name)
                break
        if _takes(module, "_init_weights", 1):
            initialize: Any = module._init_weights
            has_its_own = [m for m in module.modules() if m is not module and _takes(m, "_init_weights", 1)]
            elsewhere = {id(below) for m in has_its_own for below in m.modules()}
            for _, submodule in _children_first(module):
                if id(submodule) not in elsewhere:
                    # It is called for each module, so what lies in FSDP units below this one has had its turn, and
                    # gathering it again for every module around would hold the whole model at once.
                    yield submodule, _up_to_units(submodule), partial(initialize, submodule)
        elif _takes(module, "init_weights", 0):
            yield module, module.modules(), module.init_weights  # type: ignore[misc]


def _run(
    module: nn.Module,
    below: Iterable[nn.Module],
    initialize: Callable[[], Any],
    materialized: dict[Tensor, _Materialized],
    pending: dict[int, str],
) -> None:
    """Run an initialiser while modules hold whole copies of their tensors, and keep this rank's part of the result."""
    held = [(holder, name, tensor) for holder in below for name, tensor in _own_tensors(holder)]
    if not any(tensor in materialized for _, _, tensor in held):
        return
    whole: dict[Tensor, Tensor] = {}
    for _, _, tensor in held:
        if tensor not in whole:
            entry = materialized.get(tensor)
            dtype = tensor.dtype if entry is None else entry.dtype
            whole[tensor] = _as_parameter(tensor, _whole_copy(tensor, dtype, id(tensor) in pending))
    default_dtype = torch.get_default_dtype()
    try:
        # What an initialiser computes beside its tensors has their dtype, as it had in the constructor.
        floating = (copy.dtype for copy in whole.values() if copy.is_floating_point())
        torch.set_default_dtype(next(floating, default_dtype))
        for holder, name, tensor in held:
            setattr(holder, name, whole[tensor])
        initialize()
    finally:
        torch.set_default_dtype(default_dtype)
        results = [getattr(holder, name) for holder, name, _ in held]
        for holder, name, tensor in held:
            setattr(holder, name, tensor)
    for (holder, _, tensor), result in zip(held, results, strict=True):
        entry = materialized.get(tensor)
        # A layer must not overwrite what it shares with another one that has initialised it; a parent may.
        may_write = entry is not None and (entry.owner is module or holder is not module)
        if may_write and not (id(tensor) in pending and _has_no_values(result)):
            torch_internals.local_tensor(tensor).copy_(torch_internals.local_tensor(shard_like(tensor, result)))
            pending.pop(id(tensor), None)


def check_initialized(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError, on every rank, for tensors that still have no values, naming them.

    A collective over the default group where :func:`materialize` left any. It then reads tensors on the host.

    Args:
        model: The model, after checkpoints were loaded.
        device: Where the group can reduce.
    """
    names = vars(model).get(_UNINITIALIZED)
    if names is None:
        return
    attributes = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.device.type == "meta"
    ]
    names = [*names, *(name for name in attributes if name not in names)]
    holders = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    flags = torch.tensor([_has_no_values(getattr(holders[n], n.rpartition(".")[2])) for n in names], dtype=torch.int32)
    if names and dist.group.WORLD is not None:
        # A rank whose shard is empty cannot tell; others can.
        flags = collectives.reduce_tensor(flags, dist.group.WORLD, "max", device)
    missing = [name for name, flag in zip(names, flags, strict=True) if flag]
    if not missing:
        del vars(model)[_UNINITIALIZED]
        return
    vars(model)[_UNINITIALIZED] = missing
    listed = ", ".join(f"{name} ({class_name(holders[name])})" for name in missing[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    raise ValueError(
        f"{len(missing)} parameters, buffers or tensor attributes of {class_name(model)} were created on the meta"
        f" device and nobody gave them values: {listed}{more}. Give their classes a reset_parameters() that fills them,"
        " as torch's layers have, load a checkpoint that holds them, or create them on a real device."
    )


def _children_first(
    model: nn.Module, prefix: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Modules with the prefix of their tensors' names, each once, in the order in which constructors finish."""
    seen = set() if seen is None else seen
    if id(model) in seen:
        return
    seen.add(id(model))
    for name, child in model.named_children():
        yield from _children_first(child, f"{prefix}{name}.", seen)
    yield prefix, model


def _up_to_units(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _up_to_units(child)


def _takes(module: nn.Module, name: str, num_arguments: int) -> bool:
    """Whether the class of ``module`` has such a method, callable with so many arguments."""
    if not callable(getattr(type(module), name, None)):
        return False
    try:
        inspect.signature(getattr(module, name)).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that ``module`` itself holds, by attribute."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _as_parameter(original: Tensor, tensor: Tensor) -> Tensor:
    """``tensor``, as a parameter with the same attributes where the original is one."""
    if not isinstance(original, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    return parameter


def _whole_copy(tensor: Tensor, dtype: torch.dtype, is_pending: bool) -> Tensor:
    """The whole of ``tensor`` in host memory; where it is sharded and has values, a collective that gathers it."""
    if is_pending:
        copy = torch.empty(tensor.shape, dtype=dtype)
        _bytes(copy).fill_(_FILL_BYTE)
        return copy
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", dtype, copy=True)


def _bytes(tensor: Tensor) -> Tensor:
    return torch_internals.local_tensor(tensor).detach().contiguous().view(-1).view(torch.uint8)


def _has_no_values(tensor: Tensor) -> bool:
    """Whether this rank's part was never written; False where it has no part."""
    if tensor.device.type == "meta":
        return True
    content = _bytes(tensor)
    return content.numel() > 0 and bool((content == _FILL_BYTE).all())
