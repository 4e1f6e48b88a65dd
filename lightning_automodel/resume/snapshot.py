"""What a module and its Trainer's callbacks hold besides the module's state dict, at one moment on one rank.

Nothing here synchronises or communicates, and what changes in place is copied.
"""

import copy
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.sharding import weight_averaging

Buffers = dict[str, Tensor | None]
"""Buffers by name; those that are registered without a value are None."""


def buffers(module: "pl.LightningModule") -> Buffers:
    """Copies of all plain buffers on their device: tensor versions do not show changes by batch norm."""
    held = _plain_buffers(module)
    return {name: None if buffer is None else buffer.clone() for name, buffer in held.items()}


def _places(module: "pl.LightningModule") -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    """Name, owner, attribute and value of the buffers of a module, and of the averages that callbacks keep of it."""
    yield from torch_internals.buffer_places(module)
    for index, average in enumerate(weight_averaging.averaged_models(module)):
        for name, owner, attribute, buffer in torch_internals.buffer_places(average):
            yield f"average{index}.{name}", owner, attribute, buffer


def _plain_buffers(module: "pl.LightningModule") -> Buffers:
    held: Buffers = {}
    for name, _, _, buffer in _places(module):
        if buffer is None:
            held[name] = None
        elif not isinstance(buffer, DTensor) and not buffer.is_meta:
            held[name] = buffer.detach()
    return held


def unsaved_buffers(module: "pl.LightningModule", copies: Buffers, first: Buffers) -> Buffers:
    """The ``copies`` that a state dict may lack for this rank: they differ from the ``first`` ones, or from now."""
    now = _plain_buffers(module)
    changed: Buffers = {}
    for name, value in copies.items():
        is_as_at_first = name in first and _are_equal(value, first[name])
        is_as_now = name in now and _are_equal(value, now[name])
        if not (is_as_at_first and is_as_now):
            changed[name] = value
    return changed


def metrics(module: "pl.LightningModule") -> dict[str, dict[str, Any]]:
    """Copies of the states of all TorchMetrics objects, and how often they were updated."""
    found = {name: each for name, each in module.named_modules() if isinstance(each, Metric)}
    return {name: lightning_internals.metric_state(metric) for name, metric in found.items()}


def flags(module: "pl.LightningModule") -> dict[str, Any]:
    """What hooks may switch: modes of modules, which parameters are trained, the length of windows."""
    return {
        **{f"{name}.training": each.training for name, each in module.named_modules()},
        **{f"{name}.requires_grad": each.requires_grad for name, each in module.named_parameters()},
        "accumulate_grad_batches": module.trainer.accumulate_grad_batches,
    }


def restore_flags(module: "pl.LightningModule", switched: dict[str, Any]) -> None:
    """Set some of what :func:`flags` returned."""
    for name, each in module.named_modules():
        each.training = switched.get(f"{name}.training", each.training)
    for name, parameter in module.named_parameters():
        parameter.requires_grad = switched.get(f"{name}.requires_grad", parameter.requires_grad)
    length = switched.get("accumulate_grad_batches", module.trainer.accumulate_grad_batches)
    module.trainer.accumulate_grad_batches = length


def callbacks(trainer: "pl.Trainer") -> dict[str, Any]:
    """Copies of the states of all callbacks that have one, by key."""
    states = {each.state_key: each.state_dict() for each in trainer.callbacks}  # type: ignore[attr-defined]
    return {key: _copied(state) for key, state in states.items() if state}


def restore(module: "pl.LightningModule", loaded: dict[str, Any], device: torch.device) -> list[str]:
    """Restore all of it from ``loaded``, except callbacks, which Lightning loads.

    Returns:
        Names of saved buffers whose module this run does not have.
    """
    for name, each in module.named_modules():
        if name in loaded["metrics"] and isinstance(each, Metric):
            lightning_internals.set_metric_state(each, loaded["metrics"][name])
    unknown = _restore_buffers(module, loaded["buffers"], device)
    restore_flags(module, loaded["flags"])
    module.trainer.callback_metrics.update(move_data_to_device(loaded["seen"], device))
    return unknown


def _restore_buffers(module: "pl.LightningModule", saved: Buffers, device: torch.device) -> list[str]:
    places = list(_places(module))
    for name, owner, attribute, buffer in places:
        if name not in saved:
            continue
        value = saved[name]
        if buffer is not None and value is not None and _fits(buffer, value):
            buffer.copy_(value)
            continue
        if value is not None:
            value = value.to(device if buffer is None else buffer.device)
        setattr(owner, attribute, value)
        # Modules may share a buffer.
        for _, other, alias, held in places:
            if held is buffer and buffer is not None:
                setattr(other, alias, value)
    return _register_missing(
        module, {name: saved[name] for name in saved.keys() - {place[0] for place in places}}, device
    )


def _register_missing(module: "pl.LightningModule", missing: Buffers, device: torch.device) -> list[str]:
    """Register buffers that training had registered; the names of those that have no module here."""
    modules = dict(module.named_modules())
    for index, average in enumerate(weight_averaging.averaged_models(module)):
        modules.update(average.named_modules(prefix=f"average{index}"))
    unknown: list[str] = []
    for name, value in sorted(missing.items()):
        path, _, attribute = name.rpartition(".")
        owner = modules.get(path)
        if owner is None:
            unknown.append(name)
            continue
        owner.__dict__.pop(attribute, None)  # which a class may set to None until it has a value
        # A persistent one would have come with the state dict.
        owner.register_buffer(attribute, None if value is None else value.to(device), persistent=False)
    return unknown


def _fits(buffer: Tensor, value: Tensor) -> bool:
    """Whether ``value`` may be copied into ``buffer``: another floating-point dtype is that of another precision."""
    if buffer.shape != value.shape or buffer.layout != value.layout:
        return False
    return buffer.dtype == value.dtype or (buffer.is_floating_point() and value.is_floating_point())


def _copied(state: Any) -> Any:
    try:
        return copy.deepcopy(state)
    except Exception:  # of a sharded module, say: a save names what cannot be saved, and a run need not save
        return state


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.layout != torch.strided or other.layout != torch.strided:
        return False  # torch.equal does not compare sparse tensors
    return torch.equal(one, other.to(one.device))
