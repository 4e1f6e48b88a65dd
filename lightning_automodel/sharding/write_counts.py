"""Counting writes to tensors, also those that torch's version counters leave out.

``tensor.data.mul_()`` is hidden from them on purpose. ``torch._foreach_mul_`` on DTensors is by mistake, and
``tensor.data = other`` on a DTensor changes nothing at all.
"""

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_automodel.patching import PatchStack
from lightning_automodel.torch_internals import versions

_DATA: Any = torch.Tensor.data  # the descriptor


class WriteCounts:
    """Counts how often tensors may have been written, from the first time that it is asked for each of them.

    Reading ``.data`` counts as a write, since what is written through it cannot be seen. Code runs alike on all ranks,
    so that counts change alike on all of them, where values may not. Patches attributes of torch as long as
    ``patches`` last.
    """

    def __init__(self, patches: PatchStack) -> None:
        self._handed_out: dict[int, int] = {}  # how often, by the id of the tensor
        data = property(self._get_data, self._set_data)
        patches.set(nn.Parameter, "data", data)
        patches.set(DTensor, "data", data)
        for name in dir(torch):
            if name.startswith("_foreach_") and name.endswith("_"):
                patches.set(torch, name, _counting(getattr(torch, name)))

    def of(self, tensors: Iterable[Tensor]) -> list[int]:
        """A number for each tensor, which differs from an earlier one if the tensor may have been written since."""
        known, tensors = self._handed_out, list(tensors)
        handed_out = [known.setdefault(id(tensor), 0) for tensor in tensors]
        return [version + count for version, count in zip(versions(tensors), handed_out, strict=True)]

    def _get_data(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key in self._handed_out:
            self._handed_out[key] += 1
        return _DATA.__get__(tensor)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Write into a counted tensor, whose memory FSDP2 gathers from or into; another one gets new memory."""
        key = id(tensor)
        is_alike = (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)
        if key not in self._handed_out or not is_alike:
            _DATA.__set__(tensor, value)
            return
        self._handed_out[key] += 1
        if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        with torch.no_grad():
            _DATA.__get__(tensor).copy_(value)


def _counting(foreach: Callable[..., None]) -> Callable[..., None]:
    """A ``torch._foreach_*_`` whose writes to DTensors raise their version counters, as those to tensors do.

    Torch refuses lists of DTensors and tensors, which a module has while only its root is gathered: they are split.
    """

    @functools.wraps(foreach)
    def count(*args: Any, **kwargs: Any) -> None:
        tensors = args[0] if args else kwargs["self"]
        sharded = [isinstance(tensor, DTensor) for tensor in tensors]
        if torch.compiler.is_compiling() or not any(sharded):
            foreach(*args, **kwargs)
        elif all(sharded):
            foreach(*args, **kwargs)
            written = [tensor for tensor in tensors if not tensor.is_inference()]
            torch.autograd.graph.increment_version(written)
        else:
            for kind in (True, False):
                chosen = [is_sharded == kind for is_sharded in sharded]
                part = partial(_part, chosen)
                count(*map(part, args), **{name: part(value) for name, value in kwargs.items()})

    return count


def _part(chosen: list[bool], argument: Any) -> Any:
    """The chosen entries of an argument with one for each tensor; anything else, which is for all of them, as it is."""
    if not isinstance(argument, (list, tuple)):
        return argument
    return [entry for entry, is_chosen in zip(argument, chosen, strict=True) if is_chosen]
