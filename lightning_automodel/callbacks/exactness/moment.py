"""What a training step depends on besides its batch and the weights: taken before it, and set again on any rank.

Attributes and buffers of modules are state if they can be pickled by value: numbers, texts, tensors, generators,
containers and objects of these. While micro-batches are computed again, modules hold copies of it; at the end
they hold their own values again, which nothing has written to. Anything else, such as a function or an object
with a lock, is left as it is, and an iterator, which cannot be put back, is missing until then.
"""

import copy
import io
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.resume import rng

_OF_EVERY_MODULE = vars(pl.LightningModule()).keys()
_NO_STATE = {"lightning", "lightning_automodel", "torch"}  # such as a Trainer or a data set
_COLLECTIONS = (dict, list, set, deque)


@dataclass
class Moment:
    """Random states, and attributes and buffers of modules that are state: all by value, in host memory."""

    random: dict[str, Any]
    state: bytes  # in one piece: attributes may share a value

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> "Moment":
        """Copies of all of it."""
        file = io.BytesIO()
        _Pickler(file, _names(module)).dump(_state(module))
        return cls(rng.global_states(device), file.getvalue())

    def restore(self, module: nn.Module, device: torch.device) -> None:
        """Set copies of all of it; state that was made since, such as a cache, is deleted."""
        rng.set_global_states(self.random, device)
        wanted = _Unpickler(io.BytesIO(self.state), _parts(module)).load()
        attributes = _attributes(module)
        for owner, name in _state(module).keys() - wanted.keys():
            del attributes[owner][name]
        for (owner, name), value in wanted.items():
            attributes[owner][name] = value


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Context at whose end modules hold their own attributes and buffers, and random states are what they were.

    Yields the names of iterators, which are missing in it.
    """
    random_states = rng.global_states(device)
    held = [(values, dict(values)) for values in _attributes(module).values()]
    missing = []
    for values, own in held:
        for name, value in own.items():
            if name in _OF_EVERY_MODULE:
                continue
            if type(value) in _COLLECTIONS:  # the step may add to one that is no state
                values[name] = copy.copy(value)
            elif isinstance(value, Iterator):
                values[name] = None
                missing.append(f"self.{name}")
    try:
        yield missing
    finally:
        rng.set_global_states(random_states, device)
        for values, own in held:
            values.clear()
            values.update(own)


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Those and the buffers of each module: written to directly, since to set a module as attribute registers it."""
    attributes: dict[str, dict[str, Any]] = {}
    for owner, submodule in module.named_modules():
        attributes[owner] = vars(submodule)
        attributes[f"{owner}.buffers"] = torch_internals.buffers_of(submodule)
    return attributes


def _state(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Those that are state, by owner and name."""
    names = _names(module)
    state = {}
    for owner, attributes in _attributes(module).items():
        for name, value in attributes.items():
            if name in _OF_EVERY_MODULE:
                continue
            with suppress(Exception):  # it cannot be pickled
                _Pickler(io.BytesIO(), names).dump(value)
                state[owner, name] = value
    return state


def _parts(module: nn.Module) -> dict[str, Any]:
    """Parameters and modules by name: a value refers to this module's own."""
    return {**dict(module.named_parameters()), **dict(module.named_modules())}


def _names(module: nn.Module) -> dict[int, str]:
    """The same by their identity."""
    return {id(part): name for name, part in _parts(module).items()}


class _Pickler(pickle.Pickler):
    """Pickles tensors as they are in this moment, parts of the module by ``names``. Raises for what is no state."""

    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            return self._names[id(value)]
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, DTensor) or (value.requires_grad and value.is_leaf):
                raise pickle.PicklingError  # it is a weight
            file = io.BytesIO()
            torch.save(value.detach().clone(), file)  # not all that it is a part of
            return _tensor, (file.getvalue(), value.device.type)
        packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
        has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
        if isinstance(value, Iterator) or (has_attributes and packages & _NO_STATE):
            raise pickle.PicklingError
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: dict[str, Any]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, name: str) -> Any:
        return self._parts[name]


def _tensor(saved: bytes, device: str) -> Tensor:
    loaded: Tensor = torch.load(io.BytesIO(saved), map_location=device, weights_only=False)
    return loaded
