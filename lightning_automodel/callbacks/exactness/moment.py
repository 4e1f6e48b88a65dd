"""What a training step depends on besides its batch and the weights: taken before it, and set again on any rank.

Attributes of modules are of four kinds:

| value | on all ranks, before a micro-batch | on this rank, after the replay |
|---|---|---|
| state: numbers, texts, tensors, generators, containers and plain objects of these | set | put back |
| a collection of other values | left as it is | its own entries put back |
| an iterator, which cannot be put back | taken away | given back |
| anything else, such as a module, a function, or an object with a lock | left as it is | left as it is |
"""

import copy
import io
import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.resume import rng

_OF_EVERY_MODULE = vars(pl.LightningModule()).keys()
_NO_STATE = (
    "lightning",
    "lightning_automodel",
    "torch",
)  # objects of these, such as a Trainer or a data set
_GENERATORS = (torch.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_COLLECTIONS = (dict, list, set, deque)
_MUTABLE = (*_COLLECTIONS, Tensor, np.ndarray, *_GENERATORS)


@dataclass
class Moment:
    """Random states, and attributes and buffers of modules that are state: all by value, in host memory."""

    random: dict[str, Any]
    state: bytes  # in one piece: attributes may share a value

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> "Moment":
        """Copies of all of it."""
        names = _names_of(module)
        return cls(rng.global_states(device), _pickled(_state_of(module, names), names))

    @torch.no_grad()
    def restore(self, module: nn.Module, device: torch.device) -> None:
        """Set all of it; state that was made since, such as a cache, is deleted."""
        rng.set_global_states(self.random, device)
        names = _names_of(module)
        now = _state_of(module, names)
        if _pickled(now, names) == self.state:
            return
        owners = dict(module.named_modules())
        wanted = _Unpickler(io.BytesIO(self.state), module).load()
        for owner, name in now.keys() - wanted.keys():
            _delete(owners[owner], name)
        for (owner, name), value in wanted.items():
            _write(owners[owner], name, value)


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Context at whose end attributes, what they hold, buffers and random states are what they were.

    In it iterators are missing, whose names are yielded: what is drawn from them cannot be put back.
    """
    random_states = rng.global_states(device)
    owners = dict(module.named_modules())
    attributes = {owner: _attributes(submodule) for owner, submodule in owners.items()}
    state = _state_of(module, _names_of(module))
    values = [value for held in attributes.values() for value in held.values()]
    collections = [value for value in values if type(value) in _COLLECTIONS]  # of state or not
    contents = [(each, _content(each)) for each in [*_mutable(state.values()), *collections]]
    missing = []
    for owner, held in attributes.items():
        for name, value in held.items():
            if isinstance(value, Iterator):
                setattr(owners[owner], name, None)
                missing.append(f"self.{name}")
    try:
        yield missing
    finally:
        for owner, held in attributes.items():
            for name in _attributes(owners[owner]).keys() - held.keys():
                _delete(owners[owner], name)
            for name, value in held.items():
                setattr(owners[owner], name, value)
        for value, content in contents:
            _fill(value, content)
        rng.set_global_states(random_states, device)


# --- Attributes of modules --------------------------------------------------------------------------------


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes and buffers of one module that are its own class's."""
    values = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return {name: value for name, value in values.items() if name not in _OF_EVERY_MODULE}


def _state_of(module: nn.Module, names: Mapping[int, str]) -> dict[tuple[str, str], Any]:
    """Attributes and buffers of all modules that are state, by the module and their name."""
    state = {}
    for owner, submodule in module.named_modules():
        for name, value in _attributes(submodule).items():
            with suppress(Exception):
                _pickled(value, names)
                state[owner, name] = value
    return state


def _write(owner: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, in place where others may refer to it."""
    before = getattr(owner, name, None)
    is_alike = type(before) is type(value) and getattr(before, "shape", None) == getattr(
        value, "shape", None
    )
    if is_alike and isinstance(value, (Tensor, *_GENERATORS)):
        _fill(before, _content(value))
    else:
        setattr(owner, name, value)


def _delete(owner: nn.Module, name: str) -> None:
    """Delete an attribute; a buffer becomes None, which it was."""
    if name in vars(owner):
        delattr(owner, name)
    else:
        setattr(owner, name, None)


# --- By value, for any rank -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles state: tensors as they are in this moment, what has ``names`` by these. Raises for other values."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
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
        if isinstance(value, Iterator) or _is_foreign(value):
            raise pickle.PicklingError  # it is no state
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads it on this rank, with the parts of its ``module``."""

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._named = _named(module)

    def persistent_load(self, name: str) -> Any:
        return self._named[name]


def _named(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_modules())}


def _names_of(module: nn.Module) -> dict[int, str]:
    return {id(value): name for name, value in _named(module).items()}


def _pickled(value: Any, names: Mapping[int, str]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, names).dump(value)
    return file.getvalue()


def _tensor(numbers: Any, dtype: torch.dtype, shape: torch.Size, device: str) -> Tensor:
    return torch.from_numpy(numbers).view(dtype).reshape(shape).to(device)


def _is_foreign(value: Any) -> bool:
    """Whether this is an object with attributes, of a class of these packages or of a subclass."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    return has_attributes and not packages.isdisjoint(_NO_STATE)


# --- In place, on this rank -------------------------------------------------------------------------------


def _mutable(values: Iterable[Any]) -> list[Any]:
    """What can be written to among ``values`` and in what they hold, once each; of objects, their attributes."""
    found: dict[int, Any] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in found or isinstance(value, (nn.Module, nn.Parameter)):
            continue
        found[id(value)] = value
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            pending += value
        elif isinstance(value, np.random.Generator):
            pending.append(value.bit_generator)
        elif _is_its_attributes(value):
            pending.append(vars(value))
    return [value for value in found.values() if isinstance(value, _MUTABLE)]


def _is_its_attributes(value: Any) -> bool:
    """Whether there is no more to an object than its attributes, of which pickle makes its copy."""
    kind: Any = type(value)
    has_own_way = kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__
    return isinstance(getattr(value, "__dict__", None), dict) and not has_own_way


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.random.BitGenerator):
        return copy.deepcopy(value.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.get_state()
    return copy.copy(value)


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if not torch.equal(value, content.to(value.device)):
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, np.random.BitGenerator):
        value.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, (torch.Generator, np.random.RandomState)):
        value.set_state(content)
    else:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(content)
        else:
            value.update(content)
