"""Writes a directory of shards by torch.distributed.checkpoint, which appears when it is complete."""

import contextlib
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank, some
from lightning_automodel.checkpoint.shard_directory import (
    FORMAT,
    MANIFEST,
    METADATA,
    REST,
    check_sizes,
    checksum,
)
from lightning_automodel.checkpoint.single_file import with_checksums
from lightning_automodel.checkpoint.state_dict import MODEL, OPTIMIZERS, copied, is_extra_state
from lightning_automodel.checkpoint.tree import Path as TreePath
from lightning_automodel.checkpoint.tree import mapped_tensors
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_dtensor


class ShardWriter(torch_internals.FsspecWriter):
    """Writes the directory ``target``, which appears when it is complete; for ``dcp.save``.

    Every rank makes one for each save, with the same ``folder`` for the files
    (:func:`.paths.prepare_place`). A local folder is renamed at the end. Other file systems cannot rename
    in one step: there the manifest, one object, says which folder within the directory is valid. The
    ``rest`` names the ``keys`` that some rank must have written.
    """

    def __init__(self, target: str, folder: str, rest: bytes, keys: Iterable[str]) -> None:
        super().__init__(folder, sync_files=False)  # torch (2.13) would sync before it flushes
        self._target = target
        self._folder = folder
        self._rest = rest
        self._keys = set(keys)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with with_checksums():
            written = super().write_data(plan, planner)
        if paths.is_local(self._folder):
            for name in {result.storage_data.relative_path for result in written.wait()}:
                paths.sync(f"{self._folder}/{name}")
        return written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the directory and move it to its target. Called on one rank, once all have written."""
        if unwritten := sorted(self._keys - metadata.state_dict_metadata.keys()):
            raise CheckpointError(f"no rank has the values of {some(unwritten)}")
        super().finish(metadata, results)
        try:
            check_sizes(self._folder, metadata)
        except CheckpointError as error:
            raise CheckpointError(
                f"rank 0 does not see all that the ranks have written ({error}): save to a file system that all"
                " ranks share (ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)), or pass"
                " save_distributed_checkpoint=False, with which rank 0 writes one file"
            ) from error
        is_local = paths.is_local(self._folder)
        top = self._target
        valid = self._folder.rpartition("/")[2]
        if is_local:  # the whole folder is renamed to the target
            top = self._folder
            valid = ""
        table = f"{self._folder}/{METADATA}"
        manifest = {"format": FORMAT, "folder": valid, "crc32": checksum(paths.read_file(table))}
        paths.write_file(f"{self._folder}/{REST}", self._rest)
        # Last, since this makes the new files the checkpoint where nothing can be renamed.
        paths.write_file(f"{top}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
        if is_local:
            paths.sync(table)
            paths.replace(Path(self._folder), Path(self._target))
            return
        filesystem, place = url_to_fs(self._target)
        for path in filesystem.ls(place, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if name != valid and name.startswith(paths.TEMPORARY):
                filesystem.rm(path, recursive=True)


def is_of_all_ranks(path: TreePath, leaf: Any) -> bool:
    """Whether each rank writes a part of the leaf at ``path`` of a checkpoint, or its owner does."""
    return isinstance(leaf, DTensor) or (
        path[0] == OPTIMIZERS and isinstance(leaf, Tensor) and leaf.dim() > 0
    )


def taken_apart(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """``checkpoint`` without the values that lie in shards, and what this rank writes of them.

    That is what is of all ranks, and on rank 0 the other tensors of the model's state: buffers may differ
    between ranks, and rank 0's are saved, as in one file. None for what other ranks write.
    """
    own: dict[str, Tensor | None] = {}

    def placed(key: str, path: TreePath, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor
        is_shared = is_of_all_ranks(path, tensor)
        # Extra states may have another size on each rank.
        if not is_shared and (path[0] != MODEL or is_extra_state(path[1])):
            return tensor
        is_own = not tensor.is_meta and (is_shared or group_rank() == 0)
        own[key] = tensor if is_own else None
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return mapped_tensors(checkpoint, placed), own


def prepare_shards(
    checkpoint: dict[str, Any], path: str, copy: bool = False
) -> Callable[[dist.ProcessGroup | None], None]:
    """Prepare a directory: every rank writes its shards, rank 0 the rest. A collective.

    Returns a function that writes the directory, at once or in the background. It is a collective over the
    group that it is given (None for the default group). If any rank fails, all ranks raise
    :class:`CheckpointError`, and the older checkpoint is unchanged.

    Args:
        checkpoint: Lightning's checkpoint, with shards instead of whole tensors.
        path: Path of the checkpoint, the same on every rank.
        copy: Whether to copy the state to host memory, so that it may change before it is written.
    """
    what = f"Cannot save {path}"
    folder = ""
    content = io.BytesIO()
    shards: dict[str, Tensor | None] = {}
    with on_every_rank(what):
        if not isinstance(checkpoint.get(MODEL), dict):
            raise CheckpointError("on_save_checkpoint has left no dict in checkpoint['state_dict']")
        tree, shards = taken_apart(checkpoint)
        if group_rank() == 0:
            torch.save(tree, content)
            folder = paths.prepare_place(path)
    folder = collectives.broadcast_object(folder, 0)  # its name is random
    writer = ShardWriter(path, folder, content.getvalue(), shards.keys())
    own = {key: plain_dtensor(leaf) for key, leaf in shards.items() if leaf is not None}
    staged = copied(own) if copy else own

    def write(group: dist.ProcessGroup | None) -> None:
        try:
            with on_this_rank(what):
                dcp.save(staged, storage_writer=writer, process_group=group)
        except BaseException:
            # On all ranks, which may have written to file systems of their own.
            with contextlib.suppress(Exception):  # it would hide why the save failed
                paths.remove(folder)
            raise

    return write
