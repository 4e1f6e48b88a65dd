"""Opening a checkpoint of either form in one process."""

from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import on_this_rank
from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from lightning_automodel.checkpoint.single_file import WholeCheckpoint, load_file
from lightning_automodel.checkpoint.state_dict import MODEL
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import overwrite
from lightning_automodel.internals.torch import with_module_versions


def open_checkpoint(
    path: str, weights_only: bool | None, reads_content: bool = True
) -> ShardDirectory | WholeCheckpoint:
    """Check a checkpoint of either form, and open it. Not a collective.

    A file's optimizer states are left out unless it names their parameters. Raises CheckpointError if the
    checkpoint is damaged or missing, or if it holds code and ``weights_only`` is not False.
    """
    if paths.is_directory(path):
        return ShardDirectory(path, weights_only, alone=True, reads_content=reads_content)
    with on_this_rank(f"Cannot load {path}"):
        return WholeCheckpoint(path, load_file(path, weights_only, reads_content))


@cache
def load_directories() -> None:
    """Patch Lightning's ``load_from_checkpoint``, which has no setting for it, to read directories of shards."""
    load = lightning_internals.saving.pl_load

    @wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        checkpoint = read_directory(path_or_url, map_location, weights_only)
        if checkpoint is None:
            checkpoint = load(path_or_url, map_location, weights_only)
        return checkpoint

    overwrite(lightning_internals.saving, "pl_load", load_any)


def read_directory(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """Read a directory in the form of one file, without optimizer states; None if it is not a directory."""
    if not isinstance(path, str | Path) or str(path).startswith(("http://", "https://")):
        return None
    place = paths.normalize(path)
    if not paths.is_directory(place):
        return None
    saved = open_checkpoint(place, weights_only)
    state = saved.read_model(saved.model)
    # The other kinds of map_location, functions and dicts, need not move tensors that are in host memory.
    if isinstance(map_location, str | torch.device):
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(map_location)
    return {**saved.rest, MODEL: with_module_versions(state, saved.module_versions)}
