"""Shards that user code takes for whole tensors: ``p.grad[rows] = 0`` in ``on_before_optimizer_step``.

Torch gives a copy for a slice across shards, so that what ``p.grad[2:4].zero_()`` writes is lost. For the
number of a norm, ``float(p.grad.norm())``, it gives each rank its own part.
"""

import functools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import versions
from lightning_automodel.sharding.write_counts import DATA

_SLICING = ("__getitem__", "select", "narrow", "chunk", "split", "diagonal")
_NUM_KEPT = 100  # slices of an optimizer step
_READING = ("item", "tolist", "__float__", "__int__", "__bool__", "__len__")


class ShardsAsWhole:
    """Makes ``shard[index]`` right, and refuses what would be wrong, as long as ``patches`` last.

    Code that indexes runs on all ranks: if a tensor must be gathered for it, that is a collective on its
    mesh.
    """

    def __init__(self, module: nn.Module, patches: PatchStack) -> None:
        self._shapes = {parameter.shape for parameter in module.parameters()}
        self._copies: deque[tuple[Tensor, int]] = deque(maxlen=_NUM_KEPT)
        for name in _SLICING:
            patches.set(DTensor, name, self._watched(name, getattr(DTensor, name)))
        for name in _READING:
            patches.set(DTensor, name, _refusing_parts(getattr(DTensor, name)))
        patches.set(DTensor, "__setitem__", self._assigning(DTensor.__setitem__))
        patches.callback(register_optimizer_step_post_hook(self._check).remove)

    def _watched(self, name: str, slicing: Callable[..., Any]) -> Callable[..., Any]:
        def cut(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and tensor.requires_grad:
                return slicing(tensor, *args, **kwargs)
            if name == "__getitem__" and _chooses(args[0]):  # then plain tensors give a copy too
                is_sharded = _is_sharded(tensor)
                if is_sharded:
                    return tensor.full_tensor()[_whole(args[0])]
                return slicing(tensor, *args)
            found = slicing(tensor, *args, **kwargs)
            watch = partial(self._watch, tensor)
            if isinstance(found, (tuple, list)):
                return tuple(map(watch, found))
            return watch(found)

        return cut

    def _watch(self, tensor: DTensor, part: Any) -> Any:
        """A slice whose writes are counted by itself, if it should share the memory of ``tensor`` and does not."""
        # Activations of tensor-parallel layers are sliced too.
        if not isinstance(part, DTensor) or tensor.shape not in self._shapes:
            return part
        memory = torch_internals.local_tensor(tensor).untyped_storage().data_ptr()
        if torch_internals.local_tensor(part).untyped_storage().data_ptr() == memory:
            return part
        part = DATA.__get__(part)  # with a version counter of its own
        self._copies.append((part, *versions([part])))
        return part

    def _assigning(self, assign: Callable[..., None]) -> Callable[..., None]:
        def set_item(tensor: DTensor, index: Any, value: Any) -> None:
            if (torch.is_grad_enabled() and tensor.requires_grad) or not _is_sharded(tensor):
                assign(tensor, index, value)
                return
            # `g[2:4] *= 2` changes a slice, and assigns it.
            kept = [entry for entry in self._copies if entry[0] is not value]
            self._copies = deque(kept, maxlen=_NUM_KEPT)
            with torch.no_grad():
                whole = tensor.full_tensor()
                whole[_whole(index)] = _whole(value)
                replicated = DTensor.from_local(
                    whole, tensor.device_mesh, [Replicate()] * len(tensor.placements)
                )
                tensor.copy_(replicated.redistribute(placements=tensor.placements))

        return set_item

    def _check(self, *_: Any) -> None:
        copies = self._copies
        self._copies = deque(maxlen=_NUM_KEPT)
        if any(
            version != before
            for version, (_, before) in zip(versions(p for p, _ in copies), copies, strict=True)
        ):
            raise RuntimeError(
                "A slice of a sharded parameter or gradient was written in place, and the write was lost,"
                " since the slice is a copy. Assign it, as p.grad[rows] = 0 or p.grad[rows] *= 0.5, which"
                " writes into the shards and gathers the tensor for it. Or pass data_parallel='ddp'."
            )


def _is_sharded(tensor: DTensor) -> bool:
    """Whether some rank holds less than the whole."""
    return not any(placement.is_partial() for placement in tensor.placements) and any(
        not placement.is_replicate() for placement in tensor.placements
    )


def _chooses(index: Any) -> bool:
    """Whether an index chooses rows by a tensor or a list."""
    if isinstance(index, tuple):
        return any(map(_chooses, index))
    return isinstance(index, (Tensor, list))


def _refusing_parts(read: Callable[..., Any]) -> Callable[..., Any]:
    """A way to read a number that refuses each rank's part of it."""

    @functools.wraps(read)
    def read_whole(tensor: DTensor) -> Any:
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        is_part = any(size > 1 and placement.is_partial() for size, placement in sizes)
        # torch.tensor([norm]) asks a number for its length, as Lightning's grad_norm() does.
        if is_part and (tensor.ndim == 0 or read.__name__ != "__len__"):
            raise RuntimeError(
                "The number of a sharded parameter or gradient was read, such as float(p.grad.norm()), and"
                " each rank would get that of its own part. Gather it first, on all ranks:"
                " p.grad.norm().full_tensor()."
            )
        return read(tensor)

    return read_whole


def _whole(value: Any) -> Any:
    """An index or a value, with DTensors gathered. A collective if there are any."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return value
