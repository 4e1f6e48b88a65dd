"""What a fit needs to resume besides weights, optimizers and loaders, at one moment on one rank.

A snapshot neither synchronises nor communicates, and copies what changes in place.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_automodel import lightning_internals
from lightning_automodel.resume import loops, rng
from lightning_automodel.sharding import weight_averaging


@dataclass(frozen=True)
class Snapshot:
    """State of a fit at one moment on this rank.

    Attributes:
        at: Position of the fit.
        logged: Batches that stepped, as loggers count them.
        state: Random states, positions of the training loaders, :meth:`ModuleState.state`, and what the strategy keeps.
        callbacks: States of callbacks by key.
    """

    at: loops.Position
    logged: int
    state: dict[str, Any]
    callbacks: dict[str, Any]


class ModuleState:
    """What a module and its Trainer's callbacks hold besides the module's state dict.

    Args:
        trainer: The Trainer that runs the fit, set up.

    Attributes:
        generators: The module's own generators.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._metrics: dict[str, Metric] = {}
        self.generators: list[rng.Generator] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._flag_owners: list[tuple[str, Any, str]] = []
        self._buffer_owners: list[tuple[str, nn.Module, str]] = []
        self._first_buffers: dict[str, Tensor] = {}
        self.look_again()
        self._first_flags = self.flags()

    def start(self) -> None:
        """Called when the run starts and everything is loaded: buffers that change from now on are to be saved."""
        self.look_again()
        self._first_buffers = self.buffers()

    def look_again(self) -> None:
        """Find the module's present parts. Not done for each snapshot: finding them takes longer than copying."""
        modules = list(self._module.named_modules())
        self._metrics = {name: module for name, module in modules if isinstance(module, Metric)}
        self.generators = rng.generators_of(module for _, module in modules)
        averages = enumerate(weight_averaging.averaged_models(self._module))
        averaged = [owned for index, each in averages for owned in _buffer_owners(each, f"average{index}")]
        self._buffer_owners = [*_buffer_owners(self._module), *averaged]
        switched = ("training", "track_running_stats")
        self._flag_owners = [
            (f"{name}.{flag}", module, flag) for name, module in modules for flag in switched if flag in vars(module)
        ]
        self._parameters = list(self._module.named_parameters())
        self._flag_owners += [(f"{name}.requires_grad", each, "requires_grad") for name, each in self._parameters]
        self._flag_owners.append(("accumulate_grad_batches", self._trainer, "accumulate_grad_batches"))

    def state(self) -> dict[str, Any]:
        """Copies of buffers and metrics, flags, and the names of parameters that have a gradient."""
        with_gradient = [name for name, parameter in self._parameters if parameter.grad is not None]
        return {"buffers": self.buffers(), "metrics": self.metrics(), "flags": self.flags(), "zeroed": with_gradient}

    # --- Buffers ------------------------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all plain buffers on their device: tensor versions do not show changes by batch norm."""
        return {name: buffer.clone() for name, buffer in self._plain_buffers().items()}

    def _plain_buffers(self) -> dict[str, Tensor]:
        buffers: dict[str, Any] = {name: getattr(owner, key, None) for name, owner, key in self._buffer_owners}
        return {name: buffer.detach() for name, buffer in buffers.items() if _has_plain_values(buffer)}

    def unsaved_buffers(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """The ``copies`` that a state dict may lack for this rank: buffers that changed in this fit, or since then."""
        now = self._plain_buffers()
        return {
            name: value
            for name, value in copies.items()
            if not _are_equal(value, self._first_buffers.get(name)) or not _are_equal(value, now.get(name))
        }

    # --- Metrics, flags, callbacks ------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Copies of the states of all TorchMetrics objects, and how often they were updated."""
        return {name: lightning_internals.metric_state(metric) for name, metric in self._metrics.items()}

    def flags(self) -> dict[str, Any]:
        """All flags by name."""
        return {name: getattr(owner, flag) for name, owner, flag in self._flag_owners}

    def switched_flags(self, flags: dict[str, Any]) -> dict[str, Any]:
        """The flags that differ from the first ones; a resumed run may set the others differently."""
        first = self._first_flags
        return {name: value for name, value in flags.items() if name in first and value != first[name]}

    def callbacks(self) -> dict[str, Any]:
        """Copies of the states of all callbacks that have one, by key."""
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        stateful = [callback for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
        states = {callback.state_key: callback.state_dict() for callback in stateful}
        return {key: _copied(state) for key, state in states.items() if state}

    def restore(self, loaded: dict[str, Any], device: torch.device) -> None:
        """Restore all of it from ``loaded``, except callbacks, which Lightning loads."""
        self.look_again()
        for name, state in loaded["metrics"].items():
            if name in self._metrics:
                lightning_internals.set_metric_state(self._metrics[name], state)
        for name, buffer in self._plain_buffers().items():
            value = loaded["buffers"].get(name)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)
        self.restore_flags(loaded["flags"])
        for name, parameter in self._parameters:
            # Gradients are not saved. Where they are zeroed and kept, an unused parameter's is zero and not None.
            if name in loaded["zeroed"] and self._module.automatic_optimization:
                parameter.grad = torch.zeros_like(parameter)
        rng.set_generators(self.generators, loaded["generators"])
        self._trainer.callback_metrics.update(move_data_to_device(loaded["seen"], device))

    def restore_flags(self, flags: dict[str, Any]) -> None:
        """Set flags by name."""
        for name, owner, flag in self._flag_owners:
            if name in flags:
                setattr(owner, flag, flags[name])


def _buffer_owners(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str]]:
    """Full name, owner and own name of each buffer but those of metrics, which are saved by themselves."""
    for path, module in model.named_modules(prefix=prefix, remove_duplicate=False):
        if not isinstance(module, Metric):
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                yield f"{path}.{name}" if path else name, module, name


def _copied(state: Any) -> Any:
    try:
        return copy.deepcopy(state)
    except Exception:  # of a sharded module, say: a save names what cannot be saved, and a run need not save
        return state


def _has_plain_values(buffer: Any) -> bool:
    is_plain = isinstance(buffer, Tensor) and not isinstance(buffer, DTensor)
    return is_plain and not buffer.is_meta and buffer.layout == torch.strided and not buffer.is_quantized


def _are_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other.to(one.device)) or bool((one.isnan() & other.isnan() | (one == other)).all())
