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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.resume import rng

Place = tuple[str, str]
"""A module's name, and which of its dictionaries: "attributes" or "buffers"."""
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
        return cls(rng.global_states(device), _pickled(module)[0])

    @torch.no_grad()
    def restore(self, module: nn.Module, device: torch.device) -> None:
        """Set all of it; state that was made since, such as a cache, is deleted."""
        rng.set_global_states(self.random, device)
        pickled, now = _pickled(module)
        if pickled == self.state:
            return
        places = _places(module)
        wanted = _unpickled(self.state, module)
        for place, name in now.keys() - wanted.keys():
            del places[place][name]
        for (place, name), value in wanted.items():
            before = now.get((place, name))
            is_alike = type(before) is type(value) and getattr(before, "shape", 0) == getattr(
                value, "shape", 0
            )
            if is_alike and isinstance(value, (Tensor, *_GENERATORS)):
                _setter(before, value)()  # others may refer to it
            else:
                places[place][name] = value


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Context at whose end attributes, what they hold, buffers and random states are what they were.

    In it iterators are missing, whose names are yielded: what is drawn from them cannot be put back.
    """
    random_states = rng.global_states(device)
    places = [(values, _own(values)) for values in _places(module).values()]
    attributes = [value for _, held in places for value in held.values()]
    collections = [value for value in attributes if type(value) in _COLLECTIONS]  # of state or not
    _, state = _pickled(module)
    setters = [_setter(value, value) for value in [*_mutable(state.values()), *collections]]
    missing = []
    for values, held in places:
        for name, value in held.items():
            if isinstance(value, Iterator):
                values[name] = None
                missing.append(f"self.{name}")
    try:
        yield missing
    finally:
        rng.set_global_states(random_states, device)
        for values, held in places:
            for name in _own(values).keys() - held.keys():
                del values[name]
            for name, value in held.items():
                values[name] = value
        for put_back in setters:
            put_back()


def _places(module: nn.Module) -> dict[Place, dict[str, Any]]:
    """The dictionaries of all modules: written to directly, since to set a module as attribute registers it."""
    places: dict[Place, dict[str, Any]] = {}
    for owner, submodule in module.named_modules():
        places[owner, "attributes"] = vars(submodule)
        places[owner, "buffers"] = torch_internals.buffers_of(submodule)
    return places


def _own(values: dict[str, Any]) -> dict[str, Any]:
    """A copy, of what is the module's own class's."""
    return {name: value for name, value in values.items() if name not in _OF_EVERY_MODULE}


# --- By value, for any rank -------------------------------------------------------------------------------


def _pickled(module: nn.Module) -> tuple[bytes, dict[tuple[Place, str], Any]]:
    """All state, and the attributes and buffers that it is. One pickler, since they may share values."""
    file = io.BytesIO()
    pickler = _Pickler(file, module)
    state = {}
    last: Any = None  # what was pickled last, and so has the largest number in the memo
    for place, values in _places(module).items():
        for name, value in _own(values).items():
            size = file.tell()
            entry = (place, name, value)
            try:
                pickler.dump(entry)
            except Exception:  # it is no state: the pickler must not refer to what it has written of it
                file.truncate(file.seek(size))
                memo = pickler.memo.copy()
                number, _ = memo.get(id(last), (-1, None))
                pickler.memo = {key: known for key, known in memo.items() if known[0] <= number}
            else:
                last = entry
                state[place, name] = value
    return file.getvalue(), state


def _unpickled(state: bytes, module: nn.Module) -> dict[tuple[Place, str], Any]:
    """The same on this rank, with the parts of its ``module``."""
    file = io.BytesIO(state)
    unpickler = _Unpickler(file, module)
    found = {}
    while file.tell() < len(state):
        place, name, value = unpickler.load()
        found[place, name] = value
    return found


class _Pickler(pickle.Pickler):
    """Pickles state: tensors as they are in this moment, parts of ``module`` by name. Raises for other values."""

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._names = {id(value): name for name, value in _named(module).items()}

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
    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._named = _named(module)

    def persistent_load(self, name: str) -> Any:
        return self._named[name]


def _named(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_modules())}


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


def _setter(value: Any, source: Any) -> Callable[[], Any]:
    """A function that makes ``value`` what ``source``, which is alike, is now."""
    if isinstance(value, Tensor):
        return partial(_fill, value, source.detach().to("cpu", copy=True))
    if isinstance(value, np.random.BitGenerator):
        return partial(setattr, value, "state", source.state)
    if isinstance(value, random.Random):
        return partial(value.setstate, source.getstate())
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(value.set_state, source.get_state())
    return partial(_fill, value, copy.copy(source))


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if not torch.equal(value, content.to(value.device)):
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = content
    else:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(content)
        else:
            value.update(content)
