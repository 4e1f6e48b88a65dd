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

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import versions

DATA: Any = torch.Tensor.data
"""The descriptor of an attribute that is patched here."""

_SHARDED_VALUES = (
    "A tensor of shape {} got sharded values (`p.data = values`, a DTensor), which were taken where"
    " module.parameters() are shards, and are put back where FSDP2 has gathered the parameter. Take and put"
    " back in the same place: both in hooks of a training step, or both outside of it. Or pass"
    " data_parallel='ddp'."
)


class WriteCounts:
    """Counts writes to tensors, as long as ``patches`` of torch's attributes last.

    Writes to shards count by their version counters, also through ``.data``, alike on all ranks. Of whole
    tensors that a backward may need, which ``.data`` is used to hide from autograd, reading ``.data`` counts
    as a write. ``move`` gives a DTensor other memory, with its values.
    """

    def __init__(self, move: Callable[[DTensor, Tensor], None], patches: PatchStack) -> None:
        self._move = move
        self._handed_out: dict[int, int] = {}  # how often, by the id of the tensor
        data = property(self._get_data, self._set_data)
        patches.set(nn.Parameter, "data", data)
        patches.set(DTensor, "data", data)
        for name in dir(torch):
            if name.startswith("_foreach_") and name.endswith("_"):
                patches.set(torch, name, _counting(getattr(torch, name)))

    def of(self, tensors: Iterable[Tensor]) -> list[int]:
        """A number for each whole tensor, which differs from an earlier one if it may have been written since."""
        known = self._handed_out
        tensors = list(tensors)
        handed_out = [known.setdefault(id(tensor), 0) for tensor in tensors]
        return [version + count for version, count in zip(versions(tensors), handed_out, strict=True)]

    def _get_data(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key in self._handed_out:
            self._handed_out[key] += 1
        elif isinstance(tensor, DTensor):
            # Unlike `.data` it shares the version counter. No backward needs a shard, so that none will
            # complain.
            return tensor.detach()
        return DATA.__get__(tensor)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Give ``tensor`` the values, and leave its old memory to whoever swaps weights (``a.data, b.data = ...``)."""
        if id(tensor) in self._handed_out:
            self._handed_out[id(tensor)] += 1
            value = value.detach().clone()  # FSDP2 frees the memory of what it has gathered
        if isinstance(value, DTensor) and not isinstance(tensor, DTensor):
            raise RuntimeError(_SHARDED_VALUES.format(tuple(tensor.shape)))  # torch would crash later
        is_alike = (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)
        if not isinstance(tensor, DTensor) or not is_alike:
            DATA.__set__(tensor, value)
            return
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        elif value.placements != tensor.placements:
            value = value.redistribute(placements=tensor.placements)
        self._move(tensor, torch_internals.local_tensor(value).clone())


def _counting(foreach: Callable[..., None]) -> Callable[..., None]:
    """A ``torch._foreach_*_`` whose writes to DTensors raise their version counters, as those to tensors do.

    Torch refuses lists of DTensors and tensors, which a module has while only its root is gathered: they are
    split.
    """

    @functools.wraps(foreach)
    def count(*args: Any, **kwargs: Any) -> None:
        if args:
            tensors = args[0]
        else:
            tensors = kwargs["self"]
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
