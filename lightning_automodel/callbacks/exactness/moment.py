"""What a training step depends on besides its batch and the weights, on one rank: taken before it, and set again."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.internals.dtensor import tree_all, tree_map_only
from lightning_automodel.resume import rng

_OF_EVERY_MODULE = vars(pl.LightningModule()).keys()
_COLLECTIONS = (list, dict, set, deque)


@dataclass(frozen=True)
class _OnDevice:
    """A tensor of the device, in host memory."""

    tensor: Tensor


@dataclass
class Moment:
    """Random states, buffers, and the attributes of modules that are plain data: all by value, in host memory."""

    random: dict[str, Any]
    generators: dict[str, Tensor]
    held: dict[tuple[str, str], Any]

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> "Moment":
        """Copies of all of it."""
        held = {
            (owner, name): _copied(value)
            for owner, submodule in module.named_modules()
            for name, value in _attributes(submodule).items()
            if tree_all(_is_plain, value)
        }
        return cls(rng.global_states(device), rng.generators_of(module), held)

    @torch.no_grad()
    def restore(self, module: nn.Module, device: torch.device) -> None:
        """Set all of it; plain data that was made since, such as a cache, is deleted."""
        rng.set_global_states(self.random, device)
        rng.set_generators(module, self.generators)
        owners = dict(module.named_modules())
        for owner, submodule in owners.items():
            for name, value in _attributes(submodule).items():
                if (owner, name) not in self.held and tree_all(_is_plain, value):
                    delattr(submodule, name)
        for (owner, name), kept in self.held.items():
            _write(owners[owner], name, _on_device(_copied(kept), device))


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Context at whose end attributes, what they hold, buffers and random states are what they were.

    In it iterators are missing, whose names are yielded: what is drawn from them cannot be put back.
    """
    values = Moment.of(module, device)
    attributes = {submodule: _attributes(submodule) for submodule in module.modules()}
    contents = [
        (value, value.copy())
        for held in attributes.values()
        for value in held.values()
        if type(value) in _COLLECTIONS
    ]
    missing = []
    for submodule, held in attributes.items():
        for name, value in held.items():
            if isinstance(value, Iterator):
                vars(submodule)[name] = None
                missing.append(f"self.{name}")
    try:
        yield missing
    finally:
        for submodule, held in attributes.items():
            for name in _attributes(submodule).keys() - held.keys():
                delattr(submodule, name)
            for name, value in held.items():
                setattr(submodule, name, value)
        for collection, content in contents:
            _fill(collection, content)
        values.restore(module, device)


def _write(owner: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, in place where others may refer to it."""
    before = getattr(owner, name, None)
    if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
        if not torch.equal(before, value):
            before.copy_(value)
    else:
        setattr(owner, name, value)


def _fill(collection: Any, content: Any) -> None:
    collection.clear()
    if isinstance(collection, (list, deque)):
        collection.extend(content)
    else:
        collection.update(content)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes and buffers of one module that are its own class's."""
    values = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return {name: value for name, value in values.items() if name not in _OF_EVERY_MODULE}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_parameter = value.requires_grad and value.is_leaf
        return not is_parameter and not isinstance(value, DTensor)
    return isinstance(value, (int, float, NoneType))


def _copied(value: Any) -> Any:
    def copied(tensor: Tensor) -> Any:
        on_host = tensor.detach().to("cpu", copy=True)
        if tensor.device.type == "cpu":
            return on_host
        return _OnDevice(on_host)

    return tree_map_only(Tensor, copied, value)


def _on_device(value: Any, device: torch.device) -> Any:
    return tree_map_only(_OnDevice, lambda on_host: on_host.tensor.to(device, copy=True), value)
