"""Copies a LightningModule so that one process can train the copy, whole and apart from the run."""

import copy
from pathlib import Path
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import lightning as lightning_internals

_OF_TORCH = str(Path(torch.__file__).parent)
_OF_EVERY_MODULE = vars(pl.LightningModule()).keys()  # parameters, buffers, hooks and the like


class ReplayError(RuntimeError):
    """The reason why one process cannot repeat what a run has computed."""


def copy_module(module: pl.LightningModule, trainer: pl.Trainer) -> pl.LightningModule:
    """A deep copy of ``module``, before it is sharded, that shares the Trainer. Draws no random numbers.

    An attribute that cannot be copied (a lock, a generator, a connection) is not shared, since using it
    would change the run. A :class:`_NotCopied` takes its place.
    """
    shared = _shared(module, trainer)
    copies = dict(shared)
    try:
        copied = copy.deepcopy(module, copies)
    except Exception:
        copies = {**shared, **_placeholders(module, shared)}
        copied = copy.deepcopy(module, copies)
    for name in ("training_step", "forward"):
        method = vars(copied).get(name)
        if isinstance(method, FunctionType) and method.__code__.co_filename.startswith(_OF_TORCH):
            del vars(copied)[name]  # compiled, with the original module
    for submodule in copied.modules():
        attributes = vars(submodule)
        holders: list[Any] = [
            attributes,
            *(value for value in attributes.values() if isinstance(value, dict)),
        ]
        for holder in holders:
            for key in list(holder):
                holder[key] = _rebound(holder[key], copies)
    return copied


def whole_copy(
    module: pl.LightningModule,
    trainer: pl.Trainer,
    early: pl.LightningModule | None,
) -> pl.LightningModule:
    """A copy with whole parameters: of the module as it is, or ``early``, made before ``configure_model``.

    Raises:
        ReplayError: If neither has all parameters, and has them whole.
    """
    copied = early
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        copied = copy_module(module, trainer)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if copied is None or {name: parameter.shape for name, parameter in copied.named_parameters()} != shapes:
        raise ReplayError(
            "configure_model creates parameters and shards them at once; create them in __init__"
        )
    return copied


def reason_against(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Why this training cannot be replayed; None if there is no known reason."""
    strategy = type(trainer.strategy).__name__
    optimizers = trainer.strategy.optimizers
    if not module.automatic_optimization:
        return "manual optimization steps within training_step, which the replay does not repeat"
    if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)) or "XLA" in strategy:
        return f"{strategy} keeps parameters in a form of its own"
    if lightning_internals.draws_its_batches(module.training_step):
        return "training_step(dataloader_iter) draws its batches itself"
    if any(isinstance(submodule, nn.SyncBatchNorm) for submodule in module.modules()):
        return (
            "SyncBatchNorm takes statistics over the batches of all ranks, which the replay takes one by one"
        )
    if any(isinstance(getattr(wrapped, "optimizer", wrapped), torch.optim.LBFGS) for wrapped in optimizers):
        return "LBFGS computes gradients several times in a step"
    return None


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """Random generators that modules keep as attributes, in the order of the modules."""
    return [value for _, value in _attributes(module, torch.Generator)]


def numbers_of(module: nn.Module) -> dict[tuple[str, str], int | float]:
    """Numbers that modules keep as attributes, such as counters, by module and name."""
    return dict(_attributes(module, (int, float)))


def tensors_of(module: nn.Module) -> dict[tuple[str, str], torch.Tensor | None]:
    """Buffers, and tensors without a gradient that modules keep as attributes, by module and name.

    A value of None is an attribute that may become such a tensor.
    """
    tensors: dict[tuple[str, str], torch.Tensor | None] = {
        (owner, name): buffer
        for owner, submodule in module.named_modules()
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False)
    }
    attributes = _attributes(module, (torch.Tensor, NoneType))
    tensors.update((key, value) for key, value in attributes if value is None or not value.requires_grad)
    return tensors


def set_tensors(module: nn.Module, values: dict[tuple[str, str], torch.Tensor | None]) -> None:
    """Set the tensors of :func:`tensors_of`. Deletes those that were made since, such as caches.

    An attribute that is None here and not a tensor in the run, such as a process group that
    ``configure_model`` has set, stays None.
    """
    owners = dict(module.named_modules())
    for (owner, name), value in tensors_of(module).items():
        if value is not None and (owner, name) not in values:
            delattr(owners[owner], name)
    set_attributes(module, values)


def set_attributes(module: nn.Module, values: dict[tuple[str, str], Any]) -> None:
    """Set attributes, or buffers, by module and name; skips those that the module lacks."""
    owners = dict(module.named_modules())
    for (owner, name), value in values.items():
        if owner in owners and hasattr(owners[owner], name):
            setattr(owners[owner], name, value)


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """The copy of ``value``, which may be a function or method that ``deepcopy`` has not copied.

    The copy of a function closes over the copies of its variables.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebound(value.__self__, copies))
    if not isinstance(value, FunctionType):
        return value
    try:
        closed_over = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # a variable without a value yet
        return value
    copies[id(value)] = value  # it may hold itself
    inner = [_rebound(content, copies) for content in closed_over]
    if any(new is not old for new, old in zip(inner, closed_over, strict=True)):
        cells = tuple(map(CellType, inner))
        rebound = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        rebound.__kwdefaults__ = value.__kwdefaults__
        vars(rebound).update(vars(value))
        copies[id(value)] = rebound
    return copies[id(value)]


def _attributes(module: nn.Module, kind: Any) -> list[tuple[tuple[str, str], Any]]:
    return [
        ((owner, name), value)
        for owner, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if isinstance(value, kind) and name not in _OF_EVERY_MODULE
    ]


def _shared(module: nn.Module, trainer: pl.Trainer) -> dict[int, Any]:
    """Objects that the copy shares with the module, as the memo of ``copy.deepcopy``."""
    values = [value for submodule in module.modules() for value in vars(submodule).values()]
    groups = [value for value in values if isinstance(value, (DeviceMesh, dist.ProcessGroup))]
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return {id(value): value for value in (trainer, datamodule, *groups) if value is not None}


def _placeholders(module: nn.Module, shared: dict[int, Any]) -> dict[int, Any]:
    placeholders: dict[int, Any] = {}
    for owner, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if name in _OF_EVERY_MODULE:
                continue
            try:
                copy.deepcopy(value, dict(shared))
            except Exception:
                placeholders[id(value)] = _NotCopied(f"{owner}.{name}".lstrip("."))
    return placeholders


class _NotCopied:
    """Takes the place of an attribute that cannot be copied; using it ends the replay."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ReplayError(f"training_step uses self.{self._name}, which cannot be copied")

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    __call__ = __iter__ = __next__ = __enter__ = __exit__ = __getitem__ = __len__ = _refuse
