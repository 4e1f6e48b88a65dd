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


def moment_of(module: nn.Module, device: torch.device) -> bytes:
    """Random states, and attributes and buffers of modules that are state, in one piece: they may share a value."""
    file = io.BytesIO()
    _Pickler(file, module).dump((rng.global_states(device), _state(module)))
    return file.getvalue()


def restore(moment: bytes, module: nn.Module, device: torch.device) -> None:
    """Set copies of all of it; state that was made since, such as a cache, is deleted."""
    unpickler = pickle.Unpickler(io.BytesIO(moment))
    unpickler.persistent_load = _parts(module).__getitem__  # type: ignore[method-assign]
    random_states, wanted = unpickler.load()
    rng.set_global_states(random_states, device)
    attributes = _attributes(module)
    for owner, name in _state(module):
        del attributes[owner][name]
    for (owner, name), value in wanted.items():
        attributes[owner][name] = value


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context at whose end modules hold their own attributes and buffers, and random states are what they were."""
    random_states = rng.global_states(device)
    held = [(values, dict(values)) for values in _attributes(module).values()]
    for values, own in held:
        for name, value in own.items():
            if name in _OF_EVERY_MODULE:
                continue
            if type(value) in _COLLECTIONS:  # the step may add to one that is no state
                values[name] = copy.copy(value)
            elif isinstance(value, Iterator):
                del values[name]
    try:
        yield
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
    pickler = _Pickler(io.BytesIO(), module)
    state = {}
    for owner, attributes in _attributes(module).items():
        for name in attributes.keys() - _OF_EVERY_MODULE:
            with suppress(Exception):  # it cannot be pickled
                pickler.clear_memo()
                pickler.dump(attributes[name])
                state[owner, name] = attributes[name]
    return state


def _parts(module: nn.Module) -> list[Any]:
    """Its modules and parameters: a value refers to this module's own, by their number."""
    return [*module.modules(), *module.parameters()]


class _Pickler(pickle.Pickler):
    """Pickles tensors as they are in this moment, parts of the module by number. Raises for what is no state."""

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._numbers = {id(part): number for number, part in enumerate(_parts(module))}

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            return self._numbers[id(value)]
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


def _tensor(saved: bytes, device: str) -> Any:
    return torch.load(io.BytesIO(saved), map_location=device, weights_only=False)
