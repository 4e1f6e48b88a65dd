"""Writes a directory of shards by torch.distributed.checkpoint, which appears when it is complete."""

import io
import json
import socket
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
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
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    OPTIMIZER_STATES,
    optimizer_key,
)
from lightning_automodel.checkpoint.shard_directory import FORMAT, MANIFEST, METADATA, REST, checksum
from lightning_automodel.checkpoint.state_dict import (
    EXTRA_STATES,
    MODEL,
    MODULE_VERSIONS,
    copied,
    is_extra_state,
    plain_dtensors,
    shards_that_cannot_be_loaded,
    split_shards,
)
from lightning_automodel.checkpoint.trees import Path as TreePath
from lightning_automodel.checkpoint.trees import hides_shards, joined, nested, take_apart
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals import torch as torch_internals


class ShardWriter(torch_internals.FsspecWriter):
    """Writes the directory ``target``, which appears when it is complete; for ``dcp.save``.

    Every rank makes one for each save, with the same ``folder`` for the files
    (:func:`.paths.prepare_place`). A local folder is renamed at the end. Other file systems cannot rename in
    one step: there the manifest, one object, says which folder within the directory is valid.
    """

    def __init__(self, target: str, folder: str, rest: bytes) -> None:
        super().__init__(folder, sync_files=False)  # torch (2.13) would sync before it flushes
        self._target = target
        self._folder = folder
        self._rest = rest

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with serialization_config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
            written = super().write_data(plan, planner)
        if paths.is_local(self._folder):
            for name in {result.storage_data.relative_path for result in written.wait()}:
                paths.sync(f"{self._folder}/{name}")
        return written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the directory and move it to its target. Called on one rank, once all have written."""
        super().finish(metadata, results)
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


def prepare_shards(
    checkpoint: dict[str, Any], path: str, parameters: Set[str] = frozenset(), copy: bool = False
) -> Callable[[dist.ProcessGroup | None], None]:
    """Prepare a directory: every rank writes shards of model and optimizers, rank 0 the rest. A collective.

    Returns a function that writes the directory, at once or in the background. It is a collective over the
    group that it is given (None for the default group). If any rank fails, all ranks raise
    :class:`CheckpointError`, and the older checkpoint is unchanged.

    Args:
        checkpoint: Lightning's checkpoint, with shards instead of whole tensors; states are popped from it.
        path: Path of the checkpoint, the same on every rank.
        parameters: Names of the model's parameters.
        copy: Whether to copy the state to host memory, so that it may change before it is written.
    """
    what = f"Cannot save {path}"
    shards, rest = _take_shards(checkpoint, parameters)
    folder = ""
    content = io.BytesIO()
    try:
        with on_every_rank(what):
            if group_rank() == 0:
                torch.save(rest, content)
                folder = paths.prepare_place(path)
                paths.mark(folder, REST)
        # All ranks write into the folder, whose name is random.
        folder, node = collectives.broadcast_object((folder, socket.gethostname()), 0)
        with on_every_rank(what):
            _check_shared(folder, path, node)
    except BaseException:
        if folder and group_rank() == 0:
            paths.remove_unfinished(folder)
        raise
    writer = ShardWriter(path, folder, content.getvalue())
    staged = copied(shards) if copy else shards

    def write(group: dist.ProcessGroup | None) -> None:
        try:
            with on_this_rank(what):
                dcp.save(staged, storage_writer=writer, process_group=group)
        except BaseException:
            if group_rank() == 0:
                paths.remove_unfinished(folder)
            raise

    return write


def _check_shared(folder: str, path: str, node: str) -> None:
    """Raise CheckpointError unless this rank sees rank 0's ``folder``, made on ``node``. Not a collective.

    Called before anything large is written: shards on the disk of another node, or in the memory of another
    process (``memory://``), would be lost.
    """
    if not paths.is_seen(folder, REST):
        raise CheckpointError(
            f"{socket.gethostname()} does not see what rank 0 has written at {path} on {node}, so that"
            " shards written there would be lost: save to a file system that all ranks share"
            " (ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)), or pass"
            " save_distributed_checkpoint=False, with which rank 0 writes one file"
        )


def _take_shards(checkpoint: dict[str, Any], parameters: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shards by place, and the rest of ``checkpoint``. Pops the states of model and optimizers from it.

    Tensors that may differ between ranks, such as buffers of a replicated model, are saved from rank 0, as
    in one file. Torch distributes the writing of parameters and their states over the ranks.
    """
    if not isinstance(checkpoint.get(MODEL), dict):
        raise CheckpointError("on_save_checkpoint has left no dict in checkpoint['state_dict']")
    of_model: dict[str, Any] = checkpoint.pop(MODEL)
    objects = _pop_objects(of_model)
    checkpoint[MODULE_VERSIONS] = torch_internals.module_versions(of_model)
    shards = {MODEL: of_model}
    trees: dict[str, Any] = {}
    for index, state in enumerate(filter(None, checkpoint.pop("optimizer_states", []))):
        key = optimizer_key(index)
        trees[key], leaves = take_apart(state, (key,))
        notes = state.get(NOTES, {})
        offered = {path: leaf for path, leaf in leaves.items() if _is_written(path, leaf, parameters, notes)}
        shards.update(nested(offered))
    checkpoint[OPTIMIZER_STATES] = trees
    rest, others = split_shards(checkpoint, of_model.keys())
    for place, tensors in [(MODEL, of_model), *others.items()]:
        shards[place] = {
            name: tensor
            for name, tensor in tensors.items()
            if _is_written((place, name), tensor, parameters)
        }
    if objects:
        rest = {**rest, EXTRA_STATES: objects}
    return plain_dtensors(shards), rest


def _pop_objects(of_model: dict[str, Any]) -> dict[str, Any]:
    """Pop the entries of a model's state that are not written as tensors."""
    # Extra states that are tensors too: other ranks' may have other sizes. The resume state holds those.
    objects = {
        name: of_model.pop(name)
        for name, value in list(of_model.items())
        if not isinstance(value, Tensor) or (is_extra_state(name) and not isinstance(value, DTensor))
    }
    for name, value in objects.items():
        if not isinstance(value, Tensor) and hides_shards(value):
            raise shards_that_cannot_be_loaded(name)
    return objects


def _is_written(
    path: TreePath, leaf: Any, parameters: Set[str], notes: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Whether this rank passes a leaf to torch for writing; ``notes`` are those of the leaf's optimizer."""
    if path[1] == NOTES:
        return False
    if notes.get(joined(path[1:])) == "owned":
        return not leaf.is_meta
    if isinstance(leaf, DTensor) or group_rank() == 0:
        return True
    if path[0] == MODEL:
        name = path[1:2]
    else:
        name = path[2:3]
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and not parameters.isdisjoint(map(str, name))
