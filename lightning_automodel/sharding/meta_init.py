"""Initialises a model that was created on the meta device: allocates the shards, then runs each module's initialiser.

Initialisers see shards that compute like whole tensors (:mod:`lightning_automodel.sharding.shards`), and
draw from rank 0's random state: so one seed gives one model, whatever the layout.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed import collectives
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.torch import local_tensor, named_tensors
from lightning_automodel.sharding import tensor_parallel
from lightning_automodel.sharding.shards import make_shard
from lightning_automodel.sharding.units import class_name

# Fills memory that is not initialised. A checkpoint or the user may still write values, so the tensors
# without any are found only when the run starts: they hold nothing but this byte.
_FILL_BYTE = 0xA5

_NUM_NAMED = 5

_OF_SUBMODULES = "_init_weights"
"""A model's method that initialises the module it is given."""

_UNINITIALIZED = "lightning_automodel_uninitialized"
"""Attribute of the model: names of tensors without values. Kept there so that a second attempt raises again."""


def names_without_values(named: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are on the meta device."""
    return [name for name, tensor in named.items() if tensor.is_meta]


def materialize(model: nn.Module, device: torch.device, offload: bool) -> None:
    """Allocate the tensors that are on the meta device (with ``offload`` shards on the host), and initialise them.

    A collective over the default group: every rank must call it, with the same model. Random states do not
    change. :func:`check_initialized` finds the tensors that no initialiser has filled.
    """
    allocated: dict[Tensor, Tensor] = {}
    # The first of the modules that share a tensor: of their own initialisers, only the first one's counts.
    owners: dict[Tensor, nn.Module] = {}
    # `Module.to_empty` would also drop existing values, and untie shared tensors.
    for module in _children_first(model):
        held = {**torch_internals.parameters_of(module), **torch_internals.buffers_of(module)}
        for name, tensor in held.items():
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in allocated:
                on_host = offload and isinstance(tensor, DTensor)
                allocated[tensor] = _allocate(tensor, torch.device("cpu") if on_host else device)
                owners[allocated[tensor]] = module
            setattr(module, name, allocated[tensor])
    named = named_tensors(model)
    vars(model)[_UNINITIALIZED] = [name for name, tensor in named.items() if tensor in owners]
    for tensor in named.values():
        make_shard(tensor)
    accelerators = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(accelerators, device_type=device.type), torch.no_grad():
        tensor_parallel.share_random_state(dist.group.WORLD, device)
        for module, initialize in _initializers(model):
            _run(module, initialize, owners)


def _initializers(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Every initialiser in the order of construction, with its module.

    Models of Hugging Face, timm and many others have ``_init_weights(module)``, which is called for each
    submodule.
    """
    for module in _children_first(model):
        for name in ("reset_parameters", torch_internals.RESET_PARAMETERS):
            if _has(module, name):
                yield module, getattr(module, name)
                break
        if _has(module, _OF_SUBMODULES):
            initialize: Any = getattr(module, _OF_SUBMODULES)
            has_its_own = [m for m in module.modules() if m is not module and _has(m, _OF_SUBMODULES)]
            elsewhere = {below for m in has_its_own for below in m.modules()}
            for submodule in _children_first(module):
                if submodule not in elsewhere:
                    yield submodule, partial(initialize, submodule)
        elif _has(module, "init_weights"):
            yield module, module.init_weights  # type: ignore[misc]


def _has(module: nn.Module, method: str) -> bool:
    return callable(getattr(type(module), method, None))


def _run(module: nn.Module, initialize: Callable[[], Any], owners: dict[Tensor, nn.Module]) -> None:
    """Run an initialiser of ``module``, if it has tensors to fill.

    Others keep their values: those that had some before, and those that the module shares with an earlier
    one, which has filled them. A parent may change what its children have filled.
    """
    within = set(module.modules())
    held = set(named_tensors(module).values())
    kept = {tensor: local_tensor(tensor).clone() for tensor in held if owners.get(tensor) not in within}
    if len(kept) == len(held):
        return
    initialize()
    for tensor, part in kept.items():
        local_tensor(tensor).copy_(part)


def move_what_has_values(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to ``device``; ``Module.to`` raises where some are on the meta device."""
    for tensor in named_tensors(module).values():
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def check_initialized(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError on every rank, with the names of tensors that still have no values once checkpoints are loaded.

    A collective over the default group where :func:`materialize` left any; ``device`` is where that can
    reduce. It then reads tensors on the host.
    """
    names = vars(model).get(_UNINITIALIZED, [])
    if not names:
        return
    tensors = named_tensors(model)
    flags = torch.tensor([_has_no_values(tensors[name]) for name in names], dtype=torch.int32)
    if dist.group.WORLD is not None:
        # A rank whose shard is empty cannot tell; others can.
        flags = collectives.reduce_tensor(flags, dist.group.WORLD, "max", device)
    missing = vars(model)[_UNINITIALIZED] = [name for name, flag in zip(names, flags, strict=True) if flag]
    if not missing:
        return
    raise ValueError(
        f"{len(missing)} parameters or buffers of {class_name(model)} were created on the meta device and"
        f" never initialized: {', '.join(missing[:_NUM_NAMED])}. Give the classes of their modules a"
        " reset_parameters() that fills them, as torch's layers have, load a checkpoint that holds them, or"
        " create them on a real device."
    )


def _children_first(model: nn.Module) -> list[nn.Module]:
    """Modules, each once, in the order in which constructors finish."""
    below = [module for child in model.children() for module in _children_first(child)]
    return list(dict.fromkeys([*below, model]))


def _allocate(original: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor on the meta device, marked as without values; a parameter keeps its attributes."""
    memory = torch.empty_like(original, device=device, memory_format=torch.contiguous_format)
    _bytes(memory).fill_(_FILL_BYTE)
    if not isinstance(original, nn.Parameter):
        return memory
    parameter = nn.Parameter(memory, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    return parameter


def _bytes(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach().contiguous().view(-1).view(torch.uint8)


def _has_no_values(tensor: Tensor) -> bool:
    """Whether this rank's part was never written; False where it has no part."""
    content = _bytes(tensor)
    return content.numel() > 0 and bool((content == _FILL_BYTE).all())
