"""Where user code takes a sharded model for a whole one: it loads whole tensors into it, or pickles it."""

import pickle
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.sharding.apply import shard_like
from lightning_automodel.sharding.units import class_name


def accept_whole_states(model: nn.Module) -> None:
    """Let ``load_state_dict`` of a sharded ``model`` take whole tensors, of which each rank keeps its part.

    Without it, torch refuses plain tensors for DTensors ("got mixed torch.Tensor and DTensor"). Missing and
    unexpected keys, other shapes, ``strict`` and ``assign`` are torch's as ever; only an ``assign`` of
    another dtype is an error, since FSDP2 could not gather it. Loading so is not a collective: each rank
    that calls it changes its own shards, so all should call it, with the same tensors. The hooks stay as
    long as the model is sharded, which it still is after a fit.
    """
    for module in model.modules():
        if _sharded_tensors(module) and _take_own_parts not in torch_internals.load_state_dict_hooks(module):
            module.register_load_state_dict_pre_hook(_take_own_parts)


def refuse_pickling(model: nn.Module) -> None:
    """Let pickling a sharded ``model``, or a unit of it, say what to do instead: each rank holds a part of it.

    FSDP2 makes these classes, which pickle cannot find: "Can't pickle <class ...FSDPLinear>: attribute
    lookup failed".
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            type(unit).__reduce_ex__ = _refuse  # type: ignore[assignment, method-assign]


def _refuse(unit: nn.Module, protocol: object) -> Any:
    raise pickle.PicklingError(
        f"{class_name(unit)} is sharded, so that this rank holds a part of it and cannot pickle it. Save a"
        " checkpoint on every rank (trainer.save_checkpoint), and make a whole module of that"
        " (load_from_checkpoint); or pass AutomodelStrategy(data_parallel='ddp'), under which each rank"
        " holds a whole module."
    )


def _sharded_tensors(module: nn.Module) -> dict[str, DTensor]:
    """The parameters and buffers of ``module`` itself that are sharded."""
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def _take_own_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """The hook, of which torch collects the ``errors``."""
    assigns = metadata.get(torch_internals.ASSIGNS, False)
    for name, own in _sharded_tensors(module).items():
        key = f"{prefix}{name}"
        value = state_dict.get(key)
        # torch describes what is no tensor, and shapes that differ.
        if not isinstance(value, Tensor) or value.is_meta or value.shape != own.shape:
            continue
        if assigns and value.dtype != own.dtype:
            errors.append(
                f"{key} has dtype {value.dtype}, and assign=True would change that of a sharded parameter,"
                f" which is {own.dtype}: leave out assign=True, so that values are converted"
            )
            state_dict[key] = own  # torch goes on, and would replace it
        elif not isinstance(value, DTensor):
            state_dict[key] = shard_like(own, value)
