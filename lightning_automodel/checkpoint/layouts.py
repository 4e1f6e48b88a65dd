"""Which new tensors a checkpoint is read into: laid out like those of the run, or whole."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel.checkpoint.tree import Entry, Path

Target = Callable[[Path, Tensor], Tensor | None]
"""A new tensor that a tensor of the checkpoint is read into, by its path; None if it stays as it is."""


def whole(leaf: Tensor) -> Tensor | None:
    """The target of a tensor that each rank has whole."""
    if isinstance(leaf, Entry):
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    return None


def laid_out_like(owner: Tensor, leaf: Tensor) -> Tensor | None:
    """The target of a tensor that is laid out like ``owner``."""
    if isinstance(owner, DTensor) or isinstance(leaf, Entry):
        return torch.empty_like(owner, dtype=leaf.dtype)
    return None


class Layouts:
    """The layouts of a run's model.

    Args:
        own: The model's state by name.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = own
        self._sharded = [value for value in own.values() if isinstance(value, DTensor)]

    def of_model(self, path: Path, leaf: Tensor) -> Tensor | None:
        """The target of a tensor of the model. Only a module that renames entries reads unknown ones."""
        name, *within = path
        if name not in self._own:
            return None
        owner = self._own[name]
        if isinstance(owner, Tensor) and owner.shape == leaf.shape:
            return laid_out_like(owner, leaf)
        if within and isinstance(leaf, Entry):  # what an extra state keeps in shards was sharded
            return self.any_like(leaf)
        return whole(leaf)

    def like(self, name: str, leaf: Tensor) -> Tensor | None:
        """The target of a tensor that was sharded, under the name of an entry of the model, perhaps."""
        owner = self._own.get(name)
        if isinstance(owner, Tensor) and owner.shape == leaf.shape:
            return laid_out_like(owner, leaf)
        return self.any_like(leaf)

    def any_like(self, leaf: Tensor) -> Tensor | None:
        """The target of any tensor that was sharded: like one of its shape, or whole on all ranks."""
        for owner in self._sharded:
            if owner.shape == leaf.shape:
                return laid_out_like(owner, leaf)
        if not self._sharded:
            return whole(leaf)
        first = self._sharded[0]
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=first.device)
        mesh = first.device_mesh
        return DTensor.from_local(empty, mesh, [Replicate()] * mesh.ndim, run_check=False)
