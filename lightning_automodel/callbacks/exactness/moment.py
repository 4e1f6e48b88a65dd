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

Place = tuple[str, str]
"""A module's name, and which of its dictionaries: "attributes" or "buffers"."""
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
        places = _places(module)
        for place, name in _state(module).keys() - wanted.keys():
            del places[place][name]
        for (place, name), value in wanted.items():
            places[place][name] = value


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Context at whose end modules hold their own attributes and buffers, and random states are what they were.

    Yields the names of iterators, which are missing in it.
    """
    random_states = rng.global_states(device)
    held = [(values, dict(values)) for values in _places(module).values()]
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
            for name in values.keys() - own.keys():
                del values[name]
            values.update(own)


def _places(module: nn.Module) -> dict[Place, dict[str, Any]]:
    """The dictionaries of all modules: written to directly, since to set a module as attribute registers it."""
    places: dict[Place, dict[str, Any]] = {}
    for owner, submodule in module.named_modules():
        places[owner, "attributes"] = vars(submodule)
        places[owner, "buffers"] = torch_internals.buffers_of(submodule)
    return places


def _state(module: nn.Module) -> dict[tuple[Place, str], Any]:
    """The attributes and buffers that are state."""
    names = _names(module)
    state = {}
    for place, values in _places(module).items():
        for name, value in values.items():
            if name in _OF_EVERY_MODULE:
                continue
            with suppress(Exception):  # it cannot be pickled
                _Pickler(io.BytesIO(), names).dump(value)
                state[place, name] = value
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
            on_host = value.detach().to("cpu", copy=True).contiguous()
            numbers = on_host.reshape(-1).view(torch.uint8).numpy()
            return _tensor, (numbers, value.dtype, value.shape, value.device.type)
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


def _tensor(numbers: Any, dtype: torch.dtype, shape: torch.Size, device: str) -> Tensor:
    return torch.from_numpy(numbers).view(dtype).reshape(shape).to(device)
