"""What a module and its Trainer's callbacks hold besides the module's state dict, at one moment on one rank.

Nothing here synchronises or communicates, and what changes in place is copied.
"""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_automodel import lightning_internals
from lightning_automodel.sharding import weight_averaging


def buffers(module: "pl.LightningModule") -> dict[str, Tensor]:
    """Copies of all plain buffers on their device: tensor versions do not show changes by batch norm."""
    return {name: buffer.clone() for name, buffer in _plain_buffers(module).items()}


def _plain_buffers(module: "pl.LightningModule") -> dict[str, Tensor]:
    held = dict(module.named_buffers())
    for index, average in enumerate(weight_averaging.averaged_models(module)):
        held |= dict(average.named_buffers(f"average{index}"))
    plain = {name: buffer for name, buffer in held.items() if not isinstance(buffer, DTensor) and not buffer.is_meta}
    return {name: buffer.detach() for name, buffer in plain.items() if buffer.layout == torch.strided}


def unsaved_buffers(
    module: "pl.LightningModule", copies: dict[str, Tensor], first: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The ``copies`` that a state dict may lack for this rank: they differ from the ``first`` ones, or from now."""
    now = _plain_buffers(module)
    return {
        name: value
        for name, value in copies.items()
        if not (_are_equal(value, first.get(name)) and _are_equal(value, now.get(name)))
    }


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


def restore(module: "pl.LightningModule", loaded: dict[str, Any], device: torch.device) -> None:
    """Restore all of it from ``loaded``, except callbacks, which Lightning loads."""
    for name, each in module.named_modules():
        if name in loaded["metrics"] and isinstance(each, Metric):
            lightning_internals.set_metric_state(each, loaded["metrics"][name])
    for name, buffer in _plain_buffers(module).items():
        value = loaded["buffers"].get(name)
        if value is not None and value.shape == buffer.shape:
            buffer.copy_(value)
    restore_flags(module, loaded["flags"])
    module.trainer.callback_metrics.update(move_data_to_device(loaded["seen"], device))


def _copied(state: Any) -> Any:
    try:
        return copy.deepcopy(state)
    except Exception:  # of a sharded module, say: a save names what cannot be saved, and a run need not save
        return state


def _are_equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other.to(one.device))
