"""A directory of shards, written and read by torch.distributed.checkpoint, which appears when it is complete.

A directory holds the files of ``torch.distributed.checkpoint`` (``.metadata`` and one ``.distcp`` file per
rank), the checkpoint with a tensor without values for each that lies in those (``meta.pt``), and a
manifest, which is written last and makes it complete. Each entry of a ``.distcp`` file is written by
``torch.save``, with torch's checksums, which are compared where it is read.
"""

import contextlib
import dataclasses
import enum
import io
import json
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.single_file import (
    Write,
    check_model,
    load_checked,
    load_file,
    with_checksums,
)
from lightning_automodel.checkpoint.tree import (
    MODEL,
    OPTIMIZERS,
    Entry,
    TreePath,
    copied,
    mapped_by_key,
    placed,
)
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_dtensor

REST = "meta.pt"
"""File of the checkpoint without the values that lie in shards, under Lightning's name for it."""

MANIFEST = "manifest.json"
"""File that names the folder of the other files within the directory, and the checksum of ``.metadata``."""

METADATA = ".metadata"
FORMAT = "lightning_automodel checkpoint, version 3"


# --- Writing ----------------------------------------------------------------------------------------------


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
            raise CheckpointError(f"no rank has the values of {list_first(unwritten)}")
        super().finish(metadata, results)
        try:
            _check_files(self._folder, metadata)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"rank 0 does not see all that the ranks have written ({error}): save to a file system that all"
                " ranks share (ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)), or pass"
                " save_distributed_checkpoint=False, with which rank 0 writes one file"
            ) from error
        table = paths.read_file(f"{self._folder}/{METADATA}")
        manifest = {"format": FORMAT, "folder": "", "crc32": _checksum(table)}
        paths.write_file(f"{self._folder}/{REST}", self._rest)
        place = self._folder
        if not paths.is_local(place):
            place, _, manifest["folder"] = place.rpartition("/")
        # Last, since at a URL this makes the new files the checkpoint.
        paths.write_file(f"{place}/{MANIFEST}", json.dumps(manifest).encode())
        if place == self._folder:
            paths.replace(Path(place), Path(self._target))
        else:
            paths.remove_others(place, manifest["folder"])


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _check_files(folder: str, metadata: Metadata) -> None:
    """Raise unless all files of shards are there, and are regular files."""
    for name in {place.relative_path for place in metadata.storage_data.values()}:
        paths.check_file(paths.member(folder, name))


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

    def placed(key: str, path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_quantized:
            return leaf
        is_shared = is_of_all_ranks(path, leaf)
        # Extra states may have another size on each rank.
        if not is_shared and (path[0] != MODEL or str(path[1]).endswith(torch_internals.EXTRA_STATE)):
            return leaf
        is_own = not leaf.is_meta and (is_shared or group_rank() == 0)
        own[key] = leaf if is_own else None
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    return mapped_by_key(checkpoint, placed), own


def prepare_shards(checkpoint: dict[str, Any], path: str, copy: bool = False) -> Write:
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
    with on_every_rank(what):
        tree, shards = taken_apart(checkpoint)
        if group_rank() == 0:
            torch.save(tree, content)
            folder = paths.prepare_place(path)
    folder = collectives.broadcast_object(folder, 0)  # its name is random
    writer = ShardWriter(path, folder, content.getvalue(), shards.keys())
    own = {key: plain_dtensor(leaf) for key, leaf in shards.items() if leaf is not None}
    if copy:
        own = copied(own)

    def write(group: dist.ProcessGroup | None) -> None:
        try:
            with on_this_rank(what):
                dcp.save(own, storage_writer=writer, process_group=group)
        except BaseException:
            # On all ranks, which may have written to file systems of their own.
            with contextlib.suppress(Exception):  # it would hide why the save failed
                paths.remove(folder)
            raise

    return write


# --- Reading ----------------------------------------------------------------------------------------------


class ShardDirectory(FileSystemReader):
    """A directory of shards, open for loading. Opening is not a collective.

    Raises an error if a file is missing, if ``.metadata`` or ``meta.pt`` is damaged, or if they hold code
    and ``weights_only`` is not False. Shards are compared with their checksums where they are read.

    Attributes:
        tree: The checkpoint, with an :class:`.Entry` for each tensor that lies in shards. If another program
            has written the directory, the model's state and what its ``meta.pt`` holds.
    """

    def __init__(self, path: str, weights_only: bool | None) -> None:
        self._directory = path
        self._manifest = self._read_manifest()
        folder = path
        if self._manifest and (name := self._manifest["folder"]):
            folder = paths.member(path, name)
        super().__init__(folder)
        self._filesystem, self._folder = url_to_fs(folder)
        table = paths.read_file(f"{folder}/{METADATA}")
        if self._manifest and self._manifest["crc32"] != _checksum(table):
            raise CheckpointError(
                f"{METADATA} has changed since it was written (wrong checksum in {MANIFEST})"
            )
        self._metadata: Metadata = _MetadataUnpickler(io.BytesIO(table)).load()
        _check_files(folder, self._metadata)
        tree = load_file(f"{folder}/{REST}", weights_only)
        if not self._manifest:
            if MODEL in tree:
                raise CheckpointError(
                    f"its {MANIFEST} is missing, without which nobody knows whether the rest is as it was written. Use"
                    " another copy of the directory"
                )
            tree[MODEL] = self._foreign_model()
        check_model(tree)
        self.tree: dict[str, Any] = mapped_by_key(tree, self._with_entry)

    def _read_manifest(self) -> dict[str, str]:
        """The manifest, different in each save; empty if another program wrote the directory."""
        try:
            content = paths.read_file(f"{self._directory}/{MANIFEST}")
        except FileNotFoundError:
            return {}
        manifest: dict[str, str] = json.loads(content)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} says {manifest['format'][:80]!r}, and this version of lightning_automodel"
                f" reads {FORMAT!r}: let the version that wrote it make one file, which this one"
                " reads (python -m lightning_automodel.checkpoint consolidate)"
            )
        return manifest

    def _check_unreplaced(self) -> None:
        """Raise CheckpointError if a newer save, with the same names and sizes, has replaced this one."""
        if self._read_manifest() != self._manifest:
            raise CheckpointError("another checkpoint took its place while it was read: load it again")

    def _foreign_model(self) -> dict[str, Tensor]:
        """The model's state in a directory of another program, without values."""
        prefix = f"{MODEL}."
        saved = self._metadata.state_dict_metadata.items()
        state = {
            key.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for key, entry in saved
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        if not state:
            raise CheckpointError(
                f"no entry of its shards begins with {prefix!r}: if Lightning's FSDPStrategy has written it, make"
                " one file of it (python -m lightning.pytorch.utilities.consolidate_checkpoint)"
            )
        return state

    def _with_entry(self, key: str, path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        if key not in self._metadata.state_dict_metadata and path[0] not in (MODEL, OPTIMIZERS):
            return leaf  # without values, of somebody's own
        entry = leaf.as_subclass(Entry)
        entry.key = key
        entry.reader = self.read_all
        return entry

    def read(self, targets: dict[str, Tensor], is_alone: bool = False) -> None:
        """Overwrite the ``targets``, by key, each rank its part of them. A collective, unless ``is_alone``.

        Raises CheckpointError, then on every rank, if what is read does not have its checksum.
        """
        with on_this_rank(f"Cannot load {self._directory}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                {key: plain_dtensor(target) for key, target in targets.items()},
                storage_reader=self,
                no_dist=is_alone,
            )

    def read_all(self, tree: Any, make: Callable[..., Tensor] = torch.empty) -> Any:
        """``tree``, a part of this directory's, with whole tensors of this process's alone. Not a collective.

        ``make(size, dtype=)`` makes the tensors that are filled.
        """

        def target(_: TreePath, leaf: Any) -> Tensor | None:
            return make(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Entry) else None

        filled, targets = placed(tree, target)
        self.read(targets, is_alone=True)
        return filled

    def check(self) -> None:
        """Read all entries, and raise CheckpointError if one does not have its checksum. Not a collective."""
        for place in self._metadata.storage_data.values():
            self._load(place)
        self._check_unreplaced()

    def _load(self, place: Any) -> Tensor:
        """What lies at a place of the table, compared with its checksums."""
        end = place.offset + place.length
        content = self._filesystem.cat_file(f"{self._folder}/{place.relative_path}", place.offset, end)
        stored: Tensor = load_checked(io.BytesIO(content), place.relative_path, weights_only=True)
        return stored

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self._metadata.storage_data[item.storage_index]
            stored = self._load(place)
            target = planner.resolve_tensor(item).detach()
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            stored = stored[tuple(slice(start, start + length) for start, length in ranges)]
            if stored.shape != target.shape or stored.dtype != target.dtype:
                raise CheckpointError(
                    f"{item.storage_index.fqn} in {place.relative_path} is {stored.dtype} of shape"
                    f" {list(stored.shape)}, and {METADATA} has {target.dtype} of shape {list(target.shape)}"
                )
            target.copy_(stored)
            planner.commit_tensor(item, target)
        self._check_unreplaced()  # torch raises on all ranks what one of them raises here
        done: Future[None] = Future()
        done.set_result(None)
        return done


def open_checkpoint(path: str, weights_only: bool | None) -> tuple[dict[str, Any], ShardDirectory | None]:
    """A checkpoint of either form, and its directory, from which entries are read. Not a collective.

    A file is compared with its checksums. Raises an error if the checkpoint is damaged or missing, or if it
    holds code and ``weights_only`` is not False.
    """
    if paths.is_directory(path):
        shards = ShardDirectory(path, weights_only)
        return shards.tree, shards
    tree: dict[str, Any] = load_file(path, weights_only)
    check_model(tree)
    return tree, None


class _MetadataUnpickler(pickle.Unpickler):
    """Loads ``.metadata`` with torch's data classes and enumerations for shards, and refuses all others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            named = super().find_class(module, name)
            is_data = isinstance(named, type) and (
                dataclasses.is_dataclass(named) or issubclass(named, enum.Enum)
            )
            # A name with dots could reach an object that the module only imports.
            if is_data and named.__module__ == module:
                return named
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):  # of any operating system
            return PurePosixPath
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module == "torch.serialization" and name.lstrip("_") == "get_layout":
            return {str(torch.strided): torch.strided}.__getitem__  # the only one that shards have
        raise CheckpointError(f".metadata names {module}.{name}, which is not a class that describes shards")
