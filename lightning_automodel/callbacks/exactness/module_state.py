"""A snapshot of what a training step depends on besides its batch and the weights, which any rank can compute from.

It holds random states, and the attributes and buffers of modules that are state:

==================================================  ===============  =========================================
attribute or buffer                                 in the snapshot  while a step starts from it
==================================================  ===============  =========================================
numbers, texts, tensors, generators, containers     yes              a copy; missing if made since then
and objects of these: what is pickled by value
an iterator, which cannot be put back               no               missing
another dict, list, set or deque                    no               a shallow copy, to which the step may add
the rest, such as functions, weights and a Trainer  no               as it is
==================================================  ===============  =========================================
"""

import copy
import io
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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


def snapshot_of(module: nn.Module, device: torch.device) -> bytes:
    """Random states and the state of modules, pickled in one piece: they may share a value."""
    file = io.BytesIO()
    _Pickler(file, module).dump((rng.global_states(device), _state(module)))
    return file.getvalue()


@contextmanager
def starting_from(snapshot: bytes, module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context with the random states and the state of modules of a snapshot. At its end all is as it was before.

    Modules then hold their own values again, which nothing has written to.
    """
    unpickler = pickle.Unpickler(io.BytesIO(snapshot))
    unpickler.persistent_load = _parts(module).__getitem__  # type: ignore[method-assign]
    random_states, state = unpickler.load()
    attributes = _attributes(module)
    own_state = _state(module)
    with ExitStack() as restored:
        restored.callback(rng.set_global_states, rng.global_states(device), device)
        for owner, values in attributes.items():
            own = dict(values)
            restored.callback(values.update, own)
            restored.callback(values.clear)
            for name in own.keys() - _OF_EVERY_MODULE:
                if (owner, name) in own_state or isinstance(own[name], Iterator):
                    del values[name]
                elif type(own[name]) in _COLLECTIONS:
                    values[name] = copy.copy(own[name])
        for (owner, name), value in state.items():
            attributes[owner][name] = value
        rng.set_global_states(random_states, device)
        yield


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Those and the buffers of each module: written to directly, since to set a module as attribute registers it."""
    attributes: dict[str, dict[str, Any]] = {}
    for owner, submodule in module.named_modules():
        attributes[owner] = vars(submodule)
        attributes[f"{owner}.buffers"] = torch_internals.buffers_of(submodule)
    return attributes


def _state(module: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes and buffers that are state, by owner and name."""
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
    """Pickles tensors by value, and parts of the module by number. Raises for what is no state."""

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._numbers = {id(part): number for number, part in enumerate(_parts(module))}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, (DTensor, nn.Parameter)) or (value.requires_grad and value.is_leaf):
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
