"""Loads the saved state of one optimizer, whose tensors are read as shards where its parameters are sharded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    Owners,
    by_number,
    check_groups,
    flat,
    has_groups,
    ids_of,
    new_names,
    optimizer_key,
    rename,
)
from lightning_automodel.checkpoint.trees import Path, places, put_together


class OptimizerLoading:
    """Loads one optimizer.

    Args:
        saved: The saved state, with places for tensors.
        entries: Saved tensors by key.
        optimizer: The optimizer.
        owners: The parameters of the model, and the names of those of the optimizer.
        index: Number of the optimizer.
        owned: The names of parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: If the state was saved for another optimizer.
    """

    def __init__(
        self,
        saved: dict[str, Any],
        entries: Mapping[str, Tensor | None],
        optimizer: Optimizer,
        owners: Owners,
        index: int,
        owned: Mapping[str, bool],
    ) -> None:
        self._optimizer = optimizer
        self._names = flat(owners.names)
        self._owned = owned
        self._notes: dict[str, str] = saved.get(NOTES, {})
        tree = {key: value for key, value in saved.items() if key != NOTES}
        if has_groups(tree):
            groups = tree["param_groups"]
            check_groups(optimizer, groups, index)
            saved_names = [list(group["params"]) for group in groups]
            renamed = new_names(saved_names, owners.names, owners.parameters, index)
            tree = rename(tree, lambda _: renamed, str)
            elsewhere = [name for name in tree["state"] if owned.get(name) is False]
            tree["state"] = {name: value for name, value in tree["state"].items() if name not in elsewhere}
        self._tree = tree
        self._owners = owners
        self._prefix = f"{optimizer_key(index)}."
        self._entries = entries
        self._targets: dict[str, Tensor] = {}

    def make_targets(self) -> dict[str, Tensor]:
        """Empty tensors by key, to be overwritten with the saved values before :meth:`finish`."""
        for path, key in places(self._tree):
            entry = self._entries[key]
            assert entry is not None
            self._targets[key] = self._target(entry, key, path)
        return self._targets

    def _target(self, entry: Tensor, key: str, path: Path) -> Tensor:
        """A shard if the tensor is sharded like a parameter, else a whole tensor."""
        note = self._notes.get(key.removeprefix(self._prefix))
        owner = self._owners.of(path)
        is_stepped_whole = path[0] == "state" and path[1] in self._owned
        like_owner = owner is not None and entry.dim() and entry.shape == owner.shape
        if owner is not None and like_owner and note in (None, "local", "owned") and not is_stepped_whole:
            return torch.empty_like(owner, dtype=entry.dtype)
        empty = torch.empty(entry.shape, dtype=entry.dtype)
        sharded = self._owners.sharded()
        if is_stepped_whole or note != "sharded" or not sharded:
            return empty
        for parameter in sharded:
            if parameter.shape == entry.shape:
                return torch.empty_like(parameter, dtype=entry.dtype)
        mesh = sharded[0].device_mesh
        placements = [Replicate()] * mesh.ndim
        return DTensor.from_local(empty.to(sharded[0].device), mesh, placements, run_check=False)

    def finish(self) -> None:
        """Load the optimizer's state from the targets, which are filled by now. Not a collective."""
        tree = put_together(self._tree, self._value)
        packed = self._optimizer.state_dict()
        if not has_groups(tree) or not has_groups(packed):
            numbers = {name: number for number, name in enumerate(self._names)}
            self._optimizer.load_state_dict(by_number(tree, numbers))
            return
        id_of = dict(zip(self._names, ids_of(packed), strict=True))
        groups = zip(packed["param_groups"], tree["param_groups"], strict=True)
        numbered = by_number(tree, id_of)
        # Options that were not saved stay this run's, such as flags that newer releases of torch have added.
        numbered["param_groups"] = [{**own, **saved, "params": own["params"]} for own, saved in groups]
        self._optimizer.load_state_dict({**packed, **numbered})

    def _value(self, key: str) -> Tensor:
        tensor = self._targets[key]
        is_local = self._notes.get(key.removeprefix(self._prefix)) == "local"
        if is_local and isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor
