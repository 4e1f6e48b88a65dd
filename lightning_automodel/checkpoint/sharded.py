"""A directory of shards: written and read by torch.distributed.checkpoint, checked against a manifest, loaded as data.

A directory holds what ``torch.distributed.checkpoint`` writes (``.metadata`` and one ``.distcp`` file a rank), the rest
of the checkpoint (``meta.pt``) and a :class:`~lightning_automodel.checkpoint.manifest.Manifest`. Torch and Lightning
can read it too.
"""

import dataclasses
import io
import warnings
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.checkpoint import atomic, lightning_formats, paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, translated
from lightning_automodel.checkpoint.manifest import MANIFEST, FileRecord, Manifest, checksum
from lightning_automodel.checkpoint.safe_load import MetadataUnpickler, load_plain_data
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL
from lightning_automodel.checkpoint.streams import RecordedStream

REST = lightning_internals.CHECKPOINT_METADATA_FILENAME
"""File of everything that is no shard: loops, callbacks, hyperparameters."""

_METADATA = ".metadata"
_SIGNATURE = "lightning_automodel-"


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """Reports a file that a rank has written, instead of an entry within one."""


@dataclass(frozen=True)
class SavePlace:
    """Where the files of one save are written, and what they become. Rank 0 chooses it for all.

    A local directory is written beside its place and then takes it. Elsewhere nothing can be renamed in one step: there
    the files go to a folder of their own within ``target``, and the manifest, one object, says which folder is valid.

    Attributes:
        target: The checkpoint.
        folder: Where the files are written.
    """

    target: str
    folder: str

    @classmethod
    def choose(cls, target: str) -> "SavePlace":
        """A new place for what is to become ``target``."""
        name = atomic.unfinished_name()
        return cls(target, f"{paths.parent(target) if paths.is_local(target) else target}/{name}")

    @property
    def save_id(self) -> str:
        """Different for each save."""
        return self.folder.rpartition("-")[2]


class ShardWriter(torch_internals.FsspecWriter):
    """Writes one directory, checks what was written, and publishes it: all by ``dcp.save`` or ``dcp.async_save``.

    Every rank makes one for each save, with the same arguments.

    Args:
        place: Where to write.
        rest: Content of ``meta.pt``; used on the coordinator.
        world_size: Ranks that write.
    """

    def __init__(self, place: SavePlace, rest: bytes, world_size: int) -> None:
        self._is_local = paths.is_local(place.target)
        super().__init__(place.folder, sync_files=False)
        self._records: dict[str, FileRecord] = {}
        self._storage, _ = url_to_fs(place.folder)
        self.fs = _RecordingFileSystem(self._storage, self._records)  # type: ignore[assignment]
        self._place, self._rest, self._world_size = place, rest, world_size

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._place.target, save_id=f"{_SIGNATURE}{self._place.save_id}")

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _without_a_second_checksum():
            written = super().write_data(plan, planner)
        self._check_written()
        files = [_FileResult(MetadataIndex(name), record.size, record) for name, record in self._records.items()]
        results: Future[list[WriteResult]] = Future()
        results.set_result([*written.wait(), *files])
        return results

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: complete the directory, and publish it."""
        everything = [result for of_rank in results for result in of_rank]
        files = {result.index.fqn: result.storage_data for result in everything if isinstance(result, _FileResult)}
        self._records.clear()
        super().finish(metadata, [[result for result in everything if not isinstance(result, _FileResult)]])
        self._records[_METADATA] = self._records.pop(f"{_METADATA}.tmp")
        self._write(f"{self.path}/{REST}", self._rest)
        self._check_written()
        self._publish({**files, **self._records})

    def _publish(self, files: dict[str, FileRecord]) -> None:
        target = self._place.target
        folder = "" if self._is_local else str(self.path).rpartition("/")[2]
        manifest = Manifest(self._place.save_id, self._world_size, folder, files).to_bytes()
        if self._is_local:
            self._write(f"{self.path}/{MANIFEST}", manifest)
            atomic.sync(f"{self.path}/{MANIFEST}")
            atomic.publish(Path(self.path), Path(target))
            return
        self._write(f"{target}/{MANIFEST}", manifest)
        for name in self.fs.ls(target):
            if folder not in name and atomic.UNFINISHED in name:
                self._storage.rm(name, recursive=True)

    def _write(self, path: str, content: bytes) -> None:
        with self.fs.create_stream(path, "wb") as stream:
            stream.write(content)

    def _check_written(self) -> None:
        """Read what this process has written once more, while the system puts it on disk, and wait for that."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            paths = [f"{self.path}/{name}" for name in self._records]
            synced = [thread.submit(atomic.sync, path) for path in paths if self._is_local]
            self._compare()
            for future in synced:
                future.result()

    def _compare(self) -> None:
        for name, record in self._records.items():
            path = f"{self.path}/{name}"
            if self._storage.size(path) != record.size or checksum(self._storage, path) != record.crc32:
                raise CheckpointError(f"{name} does not read back as it was written to {self.path}")


@contextmanager
def _without_a_second_checksum() -> Iterator[None]:
    """Let ``torch.save`` compute none of its own in this thread: the manifest has one of the whole file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _RecordingFileSystem(torch_internals.FsspecFileSystem):
    """Notes size and checksum of each file that is written."""

    def __init__(self, fs: AbstractFileSystem, records: dict[str, FileRecord]) -> None:
        super().__init__()
        self.fs, self._records = fs, records

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            recorded = RecordedStream(stream)
            with recorded.telling_first_error():
                yield recorded
        self._records[str(path).rpartition("/")[2]] = FileRecord(recorded.size, f"{recorded.crc32:08x}")


class ShardDirectory:
    """A directory of shards, open for loading.

    Opening is a collective over the default group where there is one: every rank must do it, with the same ``path``.
    It reads all files once, each rank a share, and raises on every rank before anything was loaded.

    Args:
        path: The directory, local or any URL that fsspec knows.
        weights_only: False lets ``pickle`` run what code the files hold: for files that you trust. Else plain data is
            loaded alone.
        alone: Neither opening nor reading is a collective: this process reads all files by itself.

    Raises:
        CheckpointError: If files are missing, damaged, or hold code.
    """

    def __init__(self, path: str, weights_only: bool | None, alone: bool = False) -> None:
        self.path, self._weights_only = path, weights_only is not False
        self._is_alone = alone or not (dist.is_available() and dist.is_initialized())
        share, shares = (0, 1) if self._is_alone else (dist.get_rank(), dist.get_world_size())
        with on_every_rank(f"Cannot load {path}", alone=self._is_alone):
            filesystem, folder = url_to_fs(path)
            manifest = read_manifest(filesystem, folder)
            if manifest is not None:
                folder = f"{folder}/{manifest.folder}".rstrip("/")
                manifest.check(filesystem, folder, share, shares)
            metadata = read_metadata(filesystem, folder)
            if manifest is None:
                check_foreign(filesystem, folder, metadata)
            self.manifest = manifest
            self._folder = f"{path}/{manifest.folder}".rstrip("/") if manifest is not None else path
            self.rest: dict[str, Any] = load_plain_data(
                io.BytesIO(_read_rest(filesystem, folder)), f"{REST} of {path}", self._weights_only
            )
            self._extra_state: dict[str, Any] = self.rest.pop(EXTRA_STATE, {})
            self.metadata = _without_extra_state(metadata, self._extra_state)

    @property
    def entries(self) -> Mapping[str, torch.Size | None]:
        """Sizes of the tensors by flattened name; None for other objects."""
        entries = {
            name: entry.size if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in self.metadata.state_dict_metadata.items()
        }
        return entries | {f"{MODEL}.{name}": None for name in self._extra_state}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor by its flattened name."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def objects(self) -> dict[str, Any]:
        """What in the model's state is no tensor, by name."""
        read = {
            name.removeprefix(f"{MODEL}."): None
            for name, size in self.entries.items()
            if name.startswith(f"{MODEL}.") and size is None
        }
        self.read_into({MODEL: read})
        return read

    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets`` (nested dicts) in place, and replace what else is in it.

        Every rank must call it, with the same names; each reads what its own shards need.

        Raises:
            CheckpointError: If an entry is missing or has another shape (nothing was read then), or cannot be read.
        """
        of_model = targets.get(MODEL, {})
        for name in of_model.keys() & self._extra_state.keys():
            of_model[name] = self._extra_state[name]
        tensors = {name: value for name, value in of_model.items() if name not in self._extra_state}
        targets = {**targets, MODEL: tensors}
        planner = _PlainDataPlanner(self._weights_only)
        with translated(f"Cannot load {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                targets, storage_reader=_Reader(self._folder, self.metadata), planner=planner, no_dist=self._is_alone
            )


class _Reader(torch_internals.FsspecReader):
    """Reads a directory whose metadata was read before."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _PlainDataPlanner(DefaultLoadPlanner):
    """Loads objects that are no tensors as plain data, too."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_plain_data(value, f"entry {name!r}", self._weights_only)
        torch_internals.set_element(self.original_state_dict, self.mappings[name], loaded)


def _without_extra_state(metadata: Metadata, extra_state: Mapping[str, Any]) -> Metadata:
    """``metadata`` without what torch.distributed.checkpoint makes of the model's extra state, by name."""
    kept = {
        name: path for name, path in metadata.planner_data.items() if not (path[0] == MODEL and path[1] in extra_state)
    }
    entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if name in kept}
    return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=kept)


def _read_rest(filesystem: AbstractFileSystem, folder: str) -> bytes:
    try:
        return filesystem.cat_file(f"{folder}/{REST}")
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {REST}: torch.distributed.checkpoint has written this directory without Lightning"
        ) from None


def read_manifest(filesystem: AbstractFileSystem, folder: str) -> Manifest | None:
    """The manifest of a directory, None where there is none.

    Raises:
        CheckpointError: If it is damaged.
    """
    try:
        return Manifest.from_bytes(filesystem.cat_file(f"{folder}/{MANIFEST}"))
    except FileNotFoundError:
        return None


def read_metadata(filesystem: AbstractFileSystem, folder: str) -> Metadata:
    """What the shards in a folder are; names are this package's own, whichever strategy has saved them.

    Raises:
        CheckpointError: If there are none, or the file describes something else.
    """
    try:
        content = filesystem.cat_file(f"{folder}/{_METADATA}")
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {_METADATA}: this is no directory of shards, or its save never ended"
        ) from None
    try:
        metadata = MetadataUnpickler(io.BytesIO(content)).load()
        lightning_formats.check_form(metadata)
        return lightning_formats.under_own_names(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{_METADATA} is damaged ({type(error).__name__}: {error}; {len(content)} bytes)"
        ) from error


def check_foreign(filesystem: AbstractFileSystem, folder: str, metadata: Metadata) -> None:
    """Check a directory without a manifest, which another program wrote: its files are there and long enough.

    Raises:
        CheckpointError: If they are not, or the manifest was lost.
    """
    if str(getattr(metadata.storage_meta, "save_id", "")).startswith(_SIGNATURE):
        raise CheckpointError(f"{MANIFEST} is missing, so that nobody can tell whether the rest is whole")
    for name, needed in lightning_formats.sizes_needed(metadata).items():
        path = f"{folder}/{name}"
        if not filesystem.exists(path):
            raise CheckpointError(f"{name} is missing")
        if (size := filesystem.size(path)) < needed:
            raise CheckpointError(f"{name} is cut off: it has {size} bytes, and {needed} were written")
