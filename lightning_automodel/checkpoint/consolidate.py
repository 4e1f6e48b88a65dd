"""Makes one file of a directory of shards without holding the checkpoint in memory."""

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.optimizers import is_optimizer_key
from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from lightning_automodel.checkpoint.single_file import save_file
from lightning_automodel.checkpoint.state_dict import MODEL, dicts_in
from lightning_automodel.checkpoint.trees import put_together
from lightning_automodel.internals.torch import with_module_versions

_ALIGNMENT = 64  # bytes, like torch.save's


def consolidate(path: str, out: str, weights_only: bool | None) -> None:
    """Write a directory of shards as one file, like Lightning's other strategies. Not a collective.

    Tensors are read one by one into a temporary file beside the new one. Pages are evicted as soon as they
    were read or written, so memory holds one tensor at a time. torch's ``dcp_to_torch_save`` holds the whole
    checkpoint, runs code that it may contain, and drops everything but the shards. Optimizer states keep
    parameter names as ids; torch's optimizers match ids by order.
    """
    if not paths.is_directory(path):
        raise CheckpointError(f"{path} is not a directory of shards: there is nothing to consolidate")
    target = paths.new_local_target(out)
    shards = ShardDirectory(path, weights_only, alone=True)
    entries = {name: entry for name, entry in shards.entries.items() if entry is not None}
    mapped = _MappedTensors(entries, target.parent)
    for name, value in mapped.tensors.items():
        shards.read_into({name: value})
        mapped.evict()
    objects = shards.read_model(name for name, entry in shards.model.items() if entry is None)
    # Like Lightning's: a checkpoint with weights only has neither `optimizer_states` nor schedules.
    tree: dict[str, Any] = {**shards.rest, MODEL: objects}
    dicts = dict(dicts_in(tree))
    for name, value in mapped.tensors.items():
        place = shards.places[name]
        if not is_optimizer_key(place[0]):
            dicts[place[0]][place[1]] = value
    states = [put_together(state, mapped.tensors.__getitem__) for state in shards.optimizer_states()]
    if states or "lr_schedulers" in tree:
        tree["optimizer_states"] = states
    tree[MODEL] = with_module_versions(tree[MODEL], shards.module_versions)
    save_file(tree, str(target), pause=mapped.evict)


class _MappedTensors:
    """New tensors like ``entries``, under the same names, mapped to a temporary file in ``folder``."""

    def __init__(self, entries: Mapping[str, Tensor], folder: Path) -> None:
        offsets: dict[str, int] = {}
        end = 0
        for name, entry in entries.items():
            offsets[name] = end
            end += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
        end = max(1, end)  # neither an empty file nor an empty mapping is allowed
        self.tensors: dict[str, Tensor] = {}
        with tempfile.TemporaryFile(dir=folder, prefix=paths.TEMPORARY) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk raises here, not as SIGBUS later
                os.posix_fallocate(file.fileno(), 0, end)
            else:
                file.truncate(end)
            # The mapping keeps the deleted file alive.
            self._mapping = mmap.mmap(file.fileno(), end)
        for name, entry in entries.items():
            if entry.nbytes:
                # Each call makes a separate storage; torch.save would write a shared one whole.
                content = torch.frombuffer(
                    self._mapping, dtype=torch.uint8, count=entry.nbytes, offset=offsets[name]
                )
                self.tensors[name] = content.view(entry.dtype).view(entry.size())
            else:
                self.tensors[name] = torch.empty_like(entry, device="cpu")

    def evict(self) -> None:
        """Drop the mapped pages from this process's memory; their content stays in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)
