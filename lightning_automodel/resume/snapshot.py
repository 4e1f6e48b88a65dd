"""What a module holds besides its state dict, on one rank: its buffers, metrics and switches.

Nothing here synchronises or communicates.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import metrics as metrics_internals
from lightning_automodel.internals.torch import parameters_of
from lightning_automodel.sharding import weight_averaging

Buffers = dict[tuple[str, ...], Tensor | None]
"""Each buffer by its names, which are several if modules share it; None for what has no value any more."""


def buffers(module: "pl.LightningModule") -> Buffers:
    """Copies of all plain buffers on their device: tensor versions do not show changes by batch norm."""
    return {names: buffer.detach().clone() for names, buffer in _plain_buffers(module).items()}


def _plain_buffers(module: "pl.LightningModule") -> dict[tuple[str, ...], Tensor]:
    held: dict[Tensor, list[str]] = {}
    for prefix, root in _roots(module):
        for name, buffer in root.named_buffers(prefix, remove_duplicate=False):
            if not isinstance(buffer, DTensor) and not buffer.is_meta:
                held.setdefault(buffer, []).append(name)
    return {tuple(names): buffer for buffer, names in held.items()}


def _roots(module: "pl.LightningModule") -> Iterator[tuple[str, nn.Module]]:
    """The module, and the averages that callbacks keep of it, with the prefixes of their names."""
    yield "", module
    for index, average in enumerate(weight_averaging.averaged_models(module)):
        yield f"average{index}", average


def _modules(module: "pl.LightningModule") -> dict[str, nn.Module]:
    return {
        name: child for prefix, root in _roots(module) for name, child in root.named_modules(prefix=prefix)
    }


def unsaved_buffers(module: "pl.LightningModule", first: Buffers, holds_averages: bool) -> Buffers:
    """The buffers that a state dict may lack for this rank: those that differ from the ``first`` ones.

    They differ also if other modules share them. If the module ``holds_averages``, as within a validation, the
    first average has the module's own buffers.
    """
    now = _plain_buffers(module)
    if holds_averages:
        for names in list(now):
            of_average = tuple(f"average0.module.{name}" for name in names)
            if of_average in now:
                now[names], now[of_average] = now[of_average], now[names]
    modules = _modules(module)
    changed: Buffers = {}
    for name in itertools.chain(*first):
        path, _, attribute = name.rpartition(".")
        if path in modules and getattr(modules[path], attribute, now) is None:
            changed[(name,)] = None
    return changed | {
        names: value for names, value in now.items() if not _are_equal(value, first.get(names))
    }


def metrics(module: "pl.LightningModule", left_out: set[int]) -> dict[str, dict[str, Any]]:
    """Copies of the states of TorchMetrics objects, and how often they were updated, but for some ids."""
    return {
        name: metrics_internals.metric_state(metric)
        for name, metric in metrics_internals.metrics_in(module).items()
        if id(metric) not in left_out
    }


def flags(module: "pl.LightningModule") -> dict[str, Any]:
    """What hooks may switch: modes of modules, which parameters train, the length of windows."""
    return {name: getattr(owner, attribute) for name, owner, attribute in _switches(module)}


def _switches(module: "pl.LightningModule") -> Iterator[tuple[str, Any, str]]:
    """Names of switches, with the objects and attributes that hold them."""
    for name, child in module.named_modules():
        yield f"{name}.training", child, "training"
        for own, parameter in parameters_of(child).items():
            if parameter is not None:
                yield f"{name}.{own}.requires_grad".lstrip("."), parameter, "requires_grad"
    yield "accumulate_grad_batches", module.trainer, "accumulate_grad_batches"


def restore(module: "pl.LightningModule", loaded: dict[str, Any], device: torch.device) -> list[str]:
    """Restore all of it from ``loaded``.

    Returns:
        Names of saved buffers whose module this run does not have.
    """
    for name, metric in metrics_internals.metrics_in(module).items():
        if name in loaded["metrics"]:
            metrics_internals.set_metric_state(metric, loaded["metrics"][name])
    unknown = _restore_buffers(module, loaded["buffers"], device)
    for name, owner, attribute in _switches(module):
        if name in loaded["flags"]:
            setattr(owner, attribute, loaded["flags"][name])
    module.trainer.callback_metrics.update(move_data_to_device(loaded["seen"], device))
    return unknown


def _restore_buffers(module: "pl.LightningModule", saved: Buffers, device: torch.device) -> list[str]:
    modules = _modules(module)
    present = _plain_buffers(module)
    unknown: list[str] = []
    for names, value in saved.items():
        held = present.get(names)
        if value is not None:
            if held is not None and held.layout == value.layout:
                are_floats = held.is_floating_point() and value.is_floating_point()
                if held.shape == value.shape and (held.dtype == value.dtype or are_floats):
                    held.detach().copy_(value)  # in the precision of this run
                else:
                    held.data = value.to(held.device)  # not another tensor: attributes may share it
                continue
            value = value.to(device)
        for name in names:
            path, _, attribute = name.rpartition(".")
            if path not in modules:
                unknown.append(name)
            elif not isinstance(getattr(modules[path], attribute, None), DTensor):  # which is sharded
                _set_buffer(modules[path], attribute, value)
    return unknown


def _set_buffer(owner: nn.Module, name: str, value: Tensor | None) -> None:
    setattr(owner, name, value)
    if value is not None and name in vars(owner):  # a plain attribute until now
        delattr(owner, name)
        # A persistent one would have come with the state dict.
        owner.register_buffer(name, value, persistent=False)


def _are_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return False  # torch.equal does not compare sparse tensors
    return torch.equal(one, other.to(one.device))
