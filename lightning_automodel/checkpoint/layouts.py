"""Which new tensors a checkpoint is read into: laid out like those of the run, or whole."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel.checkpoint.tree import Entry, Path

Target = Callable[[Path, Tensor], Tensor | None]
"""A new tensor that a tensor of the checkpoint is read into, by its path; None if it stays as it is."""


def first_alike(tensor: Tensor, own: Mapping[Any, Any], names: Iterable[Any]) -> Tensor | None:
    """The first of the tensors in ``own`` with one of these ``names`` and the shape of ``tensor``."""
    for name in names:
        owner = own.get(name)
        if isinstance(owner, Tensor) and owner.shape == tensor.shape:
            return owner
    return None


class Layouts:
    """The layouts of a run's model.

    Args:
        own: The model's state by name.
    """

    def __init__(self, own: Mapping[Any, Any]) -> None:
        self.own = own
        self._sharded = [value for value in own.values() if isinstance(value, DTensor)]

    def target(self, leaf: Tensor, owner: Tensor | None, was_sharded: bool = False) -> Tensor | None:
        """The target of ``leaf``: laid out like its ``owner``, a tensor of the run of that shape.

        If it has none, and the leaf ``was_sharded``, like a sharded one of its shape, or whole on all ranks
        of the mesh; else whole.
        """
        if owner is None and was_sharded and self._sharded:
            alike = [shard for shard in self._sharded if shard.shape == leaf.shape]
            owner = alike[0] if alike else _replicated(leaf, self._sharded[0])
        if isinstance(owner, DTensor):
            return torch.empty_like(owner.detach(), dtype=leaf.dtype)
        if isinstance(leaf, Entry):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        return None


def _replicated(leaf: Tensor, shard: DTensor) -> DTensor:
    """A tensor like ``leaf``, whole on all ranks of the mesh of ``shard``."""
    empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=shard.device)
    mesh = shard.device_mesh
    return DTensor.from_local(empty, mesh, [Replicate()] * mesh.ndim, run_check=False)
