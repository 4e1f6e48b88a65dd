"""Reading checkpoints in one process: for the commands, and for ``load_from_checkpoint``."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_this_rank
from lightning_automodel.checkpoint.mapped_files import new_tensor
from lightning_automodel.checkpoint.shard_directory import ShardDirectory, open_checkpoint
from lightning_automodel.checkpoint.single_file import save_file
from lightning_automodel.checkpoint.state_dict import OPTIMIZERS
from lightning_automodel.checkpoint.tree import moved
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import overwrite


def consolidate(path: str, out: str, weights_only: bool | None) -> None:
    """Write a directory of shards as one file, like Lightning's other strategies. Not a collective.

    Tensors are mapped to temporary files beside the new one, so that the system can evict what was read or
    written. torch's ``dcp_to_torch_save`` holds the whole checkpoint, runs code that it may contain, and
    drops everything but the shards. Optimizer states keep parameter names as ids; torch's optimizers match
    ids by order.
    """
    target = paths.new_local_target(out)
    _, shards = open_checkpoint(path, weights_only)
    if shards is None:
        raise CheckpointError(f"{path} is not a directory of shards: there is nothing to consolidate")
    save_file(shards.read_all(shards.tree, partial(new_tensor, target.parent)), str(target))


_load = lightning_internals.saving.pl_load


def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Replaces what Lightning's ``load_from_checkpoint`` calls, which has no setting for directories of shards.

    These are read in the form of one file, without optimizer states.
    """
    is_path = isinstance(path_or_url, str | Path)
    if not is_path or str(path_or_url).startswith(("http://", "https://")):
        return _load(path_or_url, map_location, weights_only)
    path = paths.normalize(path_or_url)
    if not paths.is_directory(path):
        return _load(path_or_url, map_location, weights_only)
    with on_this_rank(f"Cannot load {path}"):
        shards = ShardDirectory(path, weights_only)
    checkpoint = shards.read_all({key: value for key, value in shards.tree.items() if key != OPTIMIZERS})
    # The other kinds of map_location, functions and dicts, need not move tensors that are in host memory.
    if isinstance(map_location, str | torch.device):
        # Lightning's own walk would lose the versions of modules that a state dict has.
        return moved(checkpoint, map_location)
    return checkpoint


overwrite(lightning_internals.saving, "pl_load", load_any)
