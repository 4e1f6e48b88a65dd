"""Writes a directory of shards as one file, like Lightning's other strategies, without holding it in memory.

torch's ``dcp_to_torch_save`` is not used: it holds the checkpoint in memory, runs code that it may hold, and leaves out
the part that Lightning needs besides the shards.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.sharded import ShardDirectory
from lightning_automodel.checkpoint.single_file import save_file
from lightning_automodel.checkpoint.state_dict import MODEL, dicts_in, is_optimizer_key, optimizer_key


def consolidate(path: str, out: str, weights_only: bool | None) -> None:
    """Write a checkpoint as one file: ``state_dict``, ``optimizer_states`` and the rest. Not a collective.

    Optimizer states keep parameter names as ids, which torch's optimizers match by order. Tensors are collected in
    temporary files beside ``out``, of the tensors' size; in memory is one rank's shard of one tensor.

    Runs code that the checkpoint may hold if ``weights_only`` is False.
    """
    if not paths.is_directory(path):
        raise CheckpointError(f"{path} is not a directory of shards: there is nothing to consolidate")
    target = paths.new_local_target(out)
    shards = ShardDirectory(path, weights_only, alone=True)
    values: dict[str, Any] = {
        name: None if entry is None else _mapped(entry, target.parent)
        for name, entry in shards.entries.items()
        if entry is not None or is_optimizer_key(name.partition(".")[0])
    }
    shards.read_into(values)
    objects = shards.read_model(name for name, entry in shards.model.items() if entry is None)
    # As Lightning makes it; with weights only it has no `optimizer_states`, and no schedules.
    tree: dict[str, Any] = {**shards.rest, MODEL: objects}
    dicts = dict(dicts_in(tree))
    optimizers: dict[tuple[Any, ...], Any] = {}
    for name, value in values.items():
        place = shards.places[name]
        if is_optimizer_key(place[0]):
            optimizers[place] = value
        else:
            dicts[place[0]][place[1]] = value
    built = _nested(optimizers)
    states = [{"state": {}, "param_groups": [], **built[optimizer_key(index)]} for index in range(len(built))]
    if states or "lr_schedulers" in tree:
        tree["optimizer_states"] = states
    save_file(tree, str(target))


def _mapped(entry: Tensor, folder: Path) -> Tensor:
    """A tensor like ``entry`` mapped to a temporary file, so that the system can evict it from memory."""
    if not entry.numel():
        return torch.empty_like(entry, device="cpu")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=atomic.TEMPORARY) as file:
        # The mapping keeps the deleted file alive.
        storage = torch.UntypedStorage.from_file(file.name, True, entry.numel() * entry.element_size())
    return torch.empty(0, dtype=entry.dtype).set_(storage).view(entry.size())  # type: ignore[arg-type]


def _nested(values: dict[tuple[Any, ...], Any]) -> Any:
    """The dicts and lists that torch.distributed.checkpoint has flattened; numbers in a path are places in a list."""
    if () in values:
        return values[()]
    below: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (first, *rest), value in values.items():
        below.setdefault(first, {})[tuple(rest)] = value
    built = {key: _nested(each) for key, each in below.items()}
    return [built[key] for key in sorted(built)] if all(isinstance(key, int) for key in built) else built
