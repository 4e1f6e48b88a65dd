"""What a module and its Trainer's callbacks hold besides the module's state dict, at one moment on one rank.

Nothing here synchronises or communicates. Values that change in place are copied.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.resume import loops
from lightning_automodel.sharding import weight_averaging


def buffers(module: "pl.LightningModule") -> dict[str, Tensor]:
    """Copies of all plain buffers on their device: tensor versions do not show changes by batch norm."""
    return {name: buffer.clone() for name, buffer in _plain_buffers(module).items()}


def _plain_buffers(module: "pl.LightningModule") -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    for prefix, root in _roots(module):
        held.update(root.named_buffers(prefix))
    return {
        name: buffer.detach()
        for name, buffer in held.items()
        if not isinstance(buffer, DTensor) and not buffer.is_meta
    }


def _roots(module: "pl.LightningModule") -> Iterator[tuple[str, nn.Module]]:
    """The module, and the averages that callbacks keep of it, with the prefixes of their names."""
    yield "", module
    for index, average in enumerate(weight_averaging.averaged_models(module)):
        yield f"average{index}", average


def _modules(module: "pl.LightningModule") -> dict[str, nn.Module]:
    return {
        name: child for prefix, root in _roots(module) for name, child in root.named_modules(prefix=prefix)
    }


def unsaved_buffers(
    module: "pl.LightningModule", copies: dict[str, Tensor], first: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """The ``copies`` that a state dict may lack for this rank: they differ from the ``first`` ones, or now.

    None for those that have no value any more.
    """
    now = _plain_buffers(module)
    modules = _modules(module)
    changed: dict[str, Tensor | None] = {}
    for name in first.keys() - copies.keys():
        path, _, attribute = name.rpartition(".")
        if path in modules and getattr(modules[path], attribute, now) is None:
            changed[name] = None
    for name, value in copies.items():
        # Within a validation, an average and the module have each other's values.
        swapped = [now[other] for other in _swapped_names(name) if other in now]
        held = [first.get(name), now.get(name), *swapped]
        if not all(_are_equal(value, buffer) for buffer in held):
            changed[name] = value
    return changed


def _swapped_names(name: str) -> list[str]:
    """Names under which the first average holds a buffer of the module, or the module one of an average."""
    average, _, own = name.partition(".module.")
    if own and average.removeprefix("average").isdigit():
        return [own]
    return [f"average0.module.{name}"]


def metrics(module: "pl.LightningModule") -> dict[str, dict[str, Any]]:
    """Copies of the states of all TorchMetrics objects, and how often they were updated."""
    return {
        name: lightning_internals.metric_state(metric)
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
    }


def flags(module: "pl.LightningModule") -> dict[str, Any]:
    """What hooks may switch: modes of modules, which parameters train, the length of windows."""
    return {
        **{f"{name}.training": child.training for name, child in module.named_modules()},
        **{
            f"{name}.requires_grad": parameter.requires_grad for name, parameter in module.named_parameters()
        },
        "accumulate_grad_batches": module.trainer.accumulate_grad_batches,
    }


def restore_flags(module: "pl.LightningModule", switched: dict[str, Any]) -> None:
    """Set some of what :func:`flags` returned."""
    for name, child in module.named_modules():
        child.training = switched.get(f"{name}.training", child.training)
    for name, parameter in module.named_parameters():
        parameter.requires_grad = switched.get(f"{name}.requires_grad", parameter.requires_grad)
    length = switched.get("accumulate_grad_batches", module.trainer.accumulate_grad_batches)
    module.trainer.accumulate_grad_batches = length


def callbacks(trainer: "pl.Trainer") -> dict[str, Any]:
    """Copies of the states of all callbacks that have one, by key."""
    held: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    states = {callback.state_key: callback.state_dict() for callback in held}
    return {key: _copied(state) for key, state in states.items() if state}


@dataclass(frozen=True)
class BesideCallbacks:
    """Further states of a checkpoint that user code may change within a window: as of one moment."""

    schedulers: list[Any]
    options: list[list[dict[str, Any]]]  # of each optimizer's parameter groups: learning rates, momentum
    data_module: Any  # None without a state

    def put_into(self, checkpoint: dict[str, Any], trainer: "pl.Trainer") -> None:
        """Set them in a checkpoint that was written later, except what ``on_save_checkpoint`` has removed."""
        if "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = self.schedulers
        for state, options in zip(checkpoint["optimizer_states"], self.options, strict=False):
            # Empty on ranks that do not write.
            for group, present in zip(state.get("param_groups", []), options, strict=False):
                group.update((name, value) for name, value in present.items() if name in group)
        name = type(_data_module(trainer)).__qualname__
        if self.data_module and name in checkpoint:
            checkpoint[name] = self.data_module


@dataclass(frozen=True)
class Snapshot:
    """State of a fit at one moment on this rank."""

    at: loops.Position
    logged: int  # batches that stepped, as loggers count them
    state: dict[str, Any]  # as a checkpoint holds it
    callbacks: dict[str, Any]
    beside: BesideCallbacks
    versions: list[int]  # of all parameters: a write changes them


def beside_callbacks(trainer: "pl.Trainer") -> BesideCallbacks:
    """Copies of the states of schedulers and the data module, and of the options of parameter groups."""
    data_module = _data_module(trainer)
    has_state = data_module is not None and is_overridden("state_dict", data_module, pl.LightningDataModule)
    return BesideCallbacks(
        [_copied(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        _copied(data_module.state_dict()) if has_state else None,
    )


def _data_module(trainer: "pl.Trainer") -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Options that schedulers change; tensors, as rates of captured steps are, change in place."""
    kept: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, (int, float, tuple)):
            kept[name] = value
        elif isinstance(value, Tensor) and value.dim() == 0:
            kept[name] = value.clone()
    return kept


def restore(module: "pl.LightningModule", loaded: dict[str, Any], device: torch.device) -> list[str]:
    """Restore all of it from ``loaded``, except callbacks, which Lightning loads.

    Returns:
        Names of saved buffers whose module this run does not have.
    """
    for name, metric in module.named_modules():
        if name in loaded["metrics"] and isinstance(metric, Metric):
            lightning_internals.set_metric_state(metric, loaded["metrics"][name])
    unknown = _restore_buffers(module, loaded["buffers"], device)
    restore_flags(module, loaded["flags"])
    module.trainer.callback_metrics.update(move_data_to_device(loaded["seen"], device))
    return unknown


def _restore_buffers(
    module: "pl.LightningModule", saved: dict[str, Tensor | None], device: torch.device
) -> list[str]:
    own = _plain_buffers(module)
    modules = _modules(module)
    unknown: list[str] = []
    for name, value in sorted(saved.items()):
        buffer = own.get(name)
        path, _, attribute = name.rpartition(".")
        if buffer is not None and value is not None and _fits(buffer, value):
            buffer.copy_(value)
        elif path not in modules:
            unknown.append(name)
        elif buffer is None and isinstance(getattr(modules[path], attribute, None), Tensor):
            continue  # sharded, or on the meta device
        elif buffer is None:
            _give_buffer(modules[path], attribute, value, device)
        else:
            _replace_buffer(modules.values(), getattr(modules[path], attribute), value)
    return unknown


def _give_buffer(owner: nn.Module, attribute: str, value: Tensor | None, device: torch.device) -> None:
    """Set a buffer that is registered without a value, or not yet."""
    if value is not None:
        value = value.to(device)
    setattr(owner, attribute, value)
    if value is not None and attribute not in dict(owner.named_buffers(recurse=False)):
        delattr(owner, attribute)
        # A persistent one would have come with the state dict.
        owner.register_buffer(attribute, value, persistent=False)


def _replace_buffer(modules: Iterable[nn.Module], buffer: Tensor, value: Tensor | None) -> None:
    """Set ``value`` wherever modules hold ``buffer``, which they may share."""
    if value is not None:
        value = value.to(buffer.device)
    for module in modules:
        for name, held in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if held is buffer:
                setattr(module, name, value)


def _fits(buffer: Tensor, value: Tensor) -> bool:
    """Whether ``value`` may be copied into ``buffer``: floating-point dtypes may differ, as precisions do."""
    if buffer.shape != value.shape or buffer.layout != value.layout:
        return False
    return buffer.dtype == value.dtype or (buffer.is_floating_point() and value.is_floating_point())


def _copied(state: Any) -> Any:
    try:
        return copy.deepcopy(state)
    except Exception:  # of a sharded module, say: a save names what cannot be saved, and a run need not save
        return state


def _are_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return False  # torch.equal does not compare sparse tensors
    return torch.equal(one, other.to(one.device))
