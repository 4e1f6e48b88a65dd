"""A directory of shards, read by torch.distributed.checkpoint, with checksums compared where an entry is read.

A directory holds the files of ``torch.distributed.checkpoint`` (``.metadata`` and one ``.distcp`` file per
rank), the checkpoint with a tensor without values for each that lies in those (``meta.pt``), and a
manifest, which is written last and makes it complete. Each entry of a ``.distcp`` file is written by
``torch.save``, with torch's checksums.
"""

import dataclasses
import enum
import io
import json
import pickle
import warnings
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_this_rank
from lightning_automodel.checkpoint.single_file import check_content, check_model
from lightning_automodel.checkpoint.state_dict import MODEL, STATES
from lightning_automodel.checkpoint.tree import Entry, leaves, mapped, mapped_tensors
from lightning_automodel.checkpoint.tree import Path as TreePath
from lightning_automodel.internals.dtensor import plain_dtensor

REST = "meta.pt"
"""File of the checkpoint without the values that lie in shards, under Lightning's name for it."""

MANIFEST = "manifest.json"
"""File that names the folder of the other files within the directory, and the checksum of ``.metadata``."""

METADATA = ".metadata"
FORMAT = "lightning_automodel checkpoint, version 3"


def read_manifest(path: str) -> bytes | None:
    """Content of a directory's manifest, different in each save; None if another program wrote it."""
    filesystem, place = url_to_fs(f"{path}/{MANIFEST}")
    if not filesystem.exists(place):
        return None
    return paths.read_file(f"{path}/{MANIFEST}")


def open_table(path: str, manifest: bytes | None) -> tuple[str, Metadata]:
    """The folder of the files, and ``.metadata``; CheckpointError if it has changed, or has another version."""
    folder = path
    crc32 = None
    if manifest is not None:
        content = json.loads(manifest)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} says {str(content['format'])[:80]!r}, and this version of lightning_automodel"
                f" reads {FORMAT!r}: let the version that wrote it make one file, which this one"
                " reads (python -m lightning_automodel.checkpoint consolidate)"
            )
        crc32 = content["crc32"]
        if content["folder"]:
            folder = paths.member(path, content["folder"])
    table = paths.read_file(f"{folder}/{METADATA}")
    if crc32 not in (None, checksum(table)):
        raise CheckpointError(
            f"{METADATA} has changed since it was written: its CRC-32 is {checksum(table)}, in {MANIFEST}"
            f" {crc32}"
        )
    return folder, _MetadataUnpickler(io.BytesIO(table)).load()


def checksum(content: bytes) -> str:
    """CRC-32 of the content of a file, as manifests hold it."""
    return f"{zlib.crc32(content):08x}"


def check_sizes(folder: str, metadata: Metadata) -> None:
    """Raise CheckpointError if a file of shards is missing, cut off, or not a regular file."""
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    for name, num_bytes in needed.items():
        size = paths.size_of_file(paths.member(folder, name))
        if size < num_bytes:
            raise CheckpointError(f"{name} is cut off: it has {size} bytes, and {num_bytes} were written")


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
            layouts = [value for value in vars(torch).values() if isinstance(value, torch.layout)]
            return {str(layout): layout for layout in layouts}.__getitem__
        raise CheckpointError(f".metadata names {module}.{name}, which is not a class that describes shards")


class ShardDirectory:
    """A directory of shards, open for loading. Opening is not a collective.

    Raises CheckpointError if a file is missing or cut off, if ``meta.pt`` is damaged, or if that holds code
    and ``weights_only`` is not False. Shards are compared with their checksums where they are read.

    Attributes:
        path: Its path.
        tree: The checkpoint, with an :class:`.Entry` for each tensor that lies in shards. Of a directory
            that another program has written, the model's state and what its ``meta.pt`` holds.
    """

    def __init__(self, path: str, weights_only: bool | None) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self._folder, self._metadata = open_table(path, self._manifest)
        self._reader = _CheckingReader(self._folder, self._metadata, self._check_unreplaced)
        check_sizes(self._folder, self._metadata)
        content = io.BytesIO(paths.read_file(f"{self._folder}/{REST}"))
        check_content(content, REST)
        content.seek(0)
        tree = torch.load(content, map_location="cpu", weights_only=weights_only is not False)
        if self._manifest is None and isinstance(tree, dict):
            tree[MODEL] = self._foreign_model()
        check_model(tree, REST)
        self.tree: dict[str, Any] = mapped_tensors(tree, self._with_entry)
        self._check_unreplaced()

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

    def _with_entry(self, key: str, path: TreePath, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        saved = self._metadata.state_dict_metadata.get(key)
        if saved is None and path[0] not in STATES:
            return tensor  # without values, of somebody's own
        if getattr(saved, "size", None) != tensor.shape:  # the dtype is compared when it is read
            raise CheckpointError(f"{METADATA} and {REST} do not agree on {key}")
        return Entry.of(tensor, key, self.read_all)

    def read(self, targets: dict[str, Tensor], is_alone: bool = False) -> None:
        """Overwrite the ``targets``, by key, each rank its part of them. A collective, unless ``is_alone``.

        Raises CheckpointError, then on every rank, if what is read does not have its checksum.
        """
        with on_this_rank(f"Cannot load {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                {key: plain_dtensor(target) for key, target in targets.items()},
                storage_reader=self._reader,
                no_dist=is_alone,
            )

    def read_all(self, tree: Any, make: Callable[..., Tensor] = torch.empty) -> Any:
        """``tree``, a part of this directory's, with whole tensors of this process's alone. Not a collective.

        ``make(size, dtype=)`` makes the tensors that are filled.
        """
        found = [leaf for _, leaf in leaves(tree) if isinstance(leaf, Entry)]
        targets = {entry.key: make(entry.shape, dtype=entry.dtype) for entry in found}
        self.read(targets, is_alone=True)
        return mapped(tree, lambda _, leaf: targets[leaf.key] if isinstance(leaf, Entry) else leaf)

    def check(self) -> None:
        """Read all entries, and raise CheckpointError if one does not have its checksum. Not a collective."""
        for place in self._metadata.storage_data.values():
            self._reader.content(place)

    def _check_unreplaced(self) -> None:
        """Raise CheckpointError if a newer save, with the same names and sizes, has replaced this one."""
        if read_manifest(self.path) != self._manifest:
            raise CheckpointError("another checkpoint took its place while it was read: load it again")


class _CheckingReader(FileSystemReader):
    """Reads with the given ``metadata``; compares entries with their checksums first, and calls ``check`` at last."""

    def __init__(self, folder: str, metadata: Metadata, check: Callable[[], None]) -> None:
        super().__init__(folder)
        self._metadata = metadata
        self._check = check
        self._filesystem, self._folder = url_to_fs(folder)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def content(self, place: Any) -> io.BytesIO:
        """What lies at a place of the table, from ``torch.save``."""
        file = f"{self._folder}/{place.relative_path}"
        end = place.offset + place.length
        content = io.BytesIO(self._filesystem.cat_file(file, start=place.offset, end=end))
        check_content(content, place.relative_path)
        content.seek(0)
        return content

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self._metadata.storage_data[item.storage_index]
            name = f"{item.storage_index.fqn} in {place.relative_path}"
            stored = torch.load(self.content(place), map_location="cpu", weights_only=True)
            target = planner.resolve_tensor(item).detach()
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            stored = stored[tuple(slice(start, start + length) for start, length in ranges)]
            if stored.shape != target.shape or stored.dtype != target.dtype:
                raise CheckpointError(
                    f"{name} is {stored.dtype} of shape {list(stored.shape)}, and {METADATA} has"
                    f" {target.dtype} of shape {list(target.shape)}"
                )
            target.copy_(stored)
            planner.commit_tensor(item, target)
        self._check()  # torch raises on all ranks what one of them raises here
        done: Future[None] = Future()
        done.set_result(None)
        return done
