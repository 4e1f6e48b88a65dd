"""A directory of shards: written and read by torch.distributed.checkpoint, checked against a manifest, loaded as data.

A directory holds what ``torch.distributed.checkpoint`` writes (``.metadata`` and one ``.distcp`` file a rank), the rest
of the checkpoint (``meta.pt``) and a :class:`~lightning_automodel.checkpoint.manifest.Manifest`. Torch and Lightning
can read it too: ``README.txt`` beside them says how.
"""

import io
import os
import warnings
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, translated
from lightning_automodel.checkpoint.lightning_formats import METADATA, outline, parse_metadata, sizes_needed
from lightning_automodel.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from lightning_automodel.checkpoint.safe_load import NotPlainDataError, classes_and_functions, load_plain_data
from lightning_automodel.checkpoint.single_file import check_content
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL

REST = "meta.pt"
"""File of everything besides shards (loops, callbacks, hyperparameters), in Lightning's strategies too."""

README = "README.txt"
README_TEXT = """\
This directory is one checkpoint, saved by lightning_automodel. torch.load reads files, not directories.

To continue training:

    trainer.fit(module, ckpt_path="THIS_DIRECTORY")

To load it into a module, where lightning_automodel is imported: MyModule.load_from_checkpoint("THIS_DIRECTORY")

To make one file for MyModule.load_from_checkpoint or torch.load, or a model for from_pretrained:

    python -m lightning_automodel.checkpoint consolidate THIS_DIRECTORY one.ckpt
    python -m lightning_automodel.checkpoint export THIS_DIRECTORY model/

To load the weights in one process with torch alone, without lightning_automodel:

    import torch.distributed.checkpoint as dcp

    state = {"state_dict": module.state_dict()}
    dcp.load(state, checkpoint_id="THIS_DIRECTORY", no_dist=True)
    module.load_state_dict(state["state_dict"])

torch checks no checksums and runs code that .metadata may hold: load only what you trust. On object stores, pass the
folder that manifest.json names. Everything but model and optimizers is in meta.pt, which torch.load reads.
"""

_SIGNATURE = "lightning_automodel-"


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """Reports a file that a rank has written, instead of an entry within one."""


class ShardWriter(FileSystemWriter):
    """Writes one directory, which appears when it is complete; for ``dcp.save`` and ``dcp.async_save``.

    Every rank makes one for each save. A local directory is written beside its target and then renamed. Elsewhere
    nothing can be renamed in one step: there the manifest, one object, says which folder within the directory is valid.

    Args:
        target: Path of the directory.
        folder: Where the files are written; rank 0 has chosen it for all (:func:`.paths.new_folder`).
        rest: Content of ``meta.pt``, which the coordinator writes.
        world_size: Ranks that write.
    """

    def __init__(self, target: str, folder: str, rest: bytes, world_size: int) -> None:
        self._is_local = paths.is_local(target)
        super().__init__(folder, sync_files=self._is_local)
        self._files = _Files(url_to_fs(folder)[0])
        self.fs, self.path = self._files, folder
        self._target, self._rest, self._world_size = target, rest, world_size
        self._save_id = folder.rpartition("-")[2]

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._target, save_id=f"{_SIGNATURE}{self._save_id}")

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The manifest has a checksum of the whole file.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            written = super().write_data(plan, planner)
        files = [_FileResult(MetadataIndex(name), each.size, each) for name, each in self._files.records.items()]
        results: Future[list[WriteResult]] = Future()
        results.set_result([*written.wait(), *files])
        return results

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: complete the directory, and move it to its target."""
        everything = [result for of_rank in results for result in of_rank]
        files = {result.index.fqn: result.storage_data for result in everything if isinstance(result, _FileResult)}
        super().finish(metadata, [[result for result in everything if not isinstance(result, _FileResult)]])
        self._write(f"{self.path}/{REST}", self._rest)
        files = {**files, **self._files.records}
        # Not listed in the manifest: a checkpoint whose README was lost or edited is still valid.
        self._write(f"{self.path if self._is_local else self._target}/{README}", README_TEXT.encode())
        # The manifest comes last: a directory without it, or without a file that it lists, is not a checkpoint.
        if self._is_local:
            self._write(f"{self.path}/{MANIFEST}", self._manifest("", files))
            atomic.replace(Path(self.path), Path(self._target))
            return
        folder = str(self.path).rpartition("/")[2]
        self._write(f"{self._target}/{MANIFEST}", self._manifest(folder, files))
        filesystem, place = url_to_fs(self._target)
        for path in filesystem.ls(place, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if name != folder and name.startswith(atomic.TEMPORARY):
                filesystem.rm(path, recursive=True)

    def _manifest(self, folder: str, files: dict[str, FileRecord]) -> bytes:
        return Manifest(self._save_id, self._world_size, folder, files).to_bytes()

    def _write(self, path: str, content: bytes) -> None:
        with self._files.create_stream(path, "wb") as stream:
            stream.write(content)
            if self._is_local:
                os.fsync(stream.fileno())


class _Files(FileSystem):
    """Any file system of fsspec, for torch.distributed.checkpoint; records size and checksum of what is written."""

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._filesystem = filesystem
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with self._filesystem.open(str(path), mode) as stream:
            if "w" not in mode:
                yield stream
                return
            recorded = _RecordedStream(stream)
            yield recorded
        self.records[os.path.basename(path)] = FileRecord(recorded.size, f"{recorded.crc32:08x}")

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        self._filesystem.mv(str(path), str(new_path))
        self.records[os.path.basename(new_path)] = self.records.pop(os.path.basename(path))

    @override
    def mkdir(self, path: Any) -> None:
        self._filesystem.makedirs(str(path), exist_ok=True)

    @override
    def exists(self, path: Any) -> bool:
        return self._filesystem.exists(str(path))


class _RecordedStream:
    """A binary stream for sequential writing, with size and checksum of what was written so far."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        return len(view)

    def fileno(self) -> int:
        """For ``os.fsync``, before which torch (2.13) does not flush."""
        self._stream.flush()
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


Check = Literal["sizes", "content", "entries"]
"""What is compared before anything is loaded: sizes of files, checksums too, each entry with the table too."""


class ShardDirectory:
    """A directory of shards, open for loading.

    Opening is a collective over the default group, if there is one, unless ``alone``. All files are read once, each
    rank a share; if any is missing, damaged, or holds code (unless ``weights_only`` is False), every rank raises
    :class:`CheckpointError` before anything was loaded.
    """

    def __init__(self, path: str, weights_only: bool | None, alone: bool = False, check: Check = "content") -> None:
        self.path, self._weights_only = path, weights_only is not False
        self._is_alone = alone or not (dist.is_available() and dist.is_initialized())
        share, shares = (0, 1) if self._is_alone else (dist.get_rank(), dist.get_world_size())
        with on_every_rank(f"Cannot load {path}", alone=self._is_alone):
            self._filesystem, self._folder, manifest, metadata = _open_tables(path)
            self._metadata, self._save_id = metadata, "" if manifest is None else manifest.save_id
            with self._unreplaced():
                check_files(
                    self._filesystem, self._folder, manifest, metadata, share, 0 if check == "sizes" else shares
                )
                try:
                    content = paths.read_file(self._filesystem, self._folder, REST)
                except FileNotFoundError:
                    raise CheckpointError(
                        f"there is no {REST}: torch.distributed.checkpoint has written this directory without Lightning"
                    ) from None
            if check == "entries":
                self._check_entries(has_checksums=manifest is None)
            self.rest: dict[str, Any] = load_plain_data(io.BytesIO(content), f"{REST} of {path}", self._weights_only)
            if not isinstance(self.rest, dict):
                raise CheckpointError(f"{REST} holds a {type(self.rest).__name__}, which is not a checkpoint's rest")
            self._extra_state: dict[str, Any] = self.rest.pop(EXTRA_STATE, {})
            # torch.distributed.checkpoint has the model's extra state too, but takes dicts apart and loses empty ones.
            self.places: dict[str, tuple[Any, ...]] = {
                name: place
                for name, place in metadata.planner_data.items()
                if not (place[0] == MODEL and place[1] in self._extra_state)
            }
            self.entries: Mapping[str, Tensor | None] = {
                **{name: entry for name, entry in outline(metadata).items() if name in self.places},
                **{f"{MODEL}.{name}": None for name in self._extra_state},
            }
            # torch calls the files __<rank>_<number>.distcp.
            writers = {name.lstrip("_").partition("_")[0] for name in sizes_needed(metadata)}
            self.world_size = len(writers) if manifest is None else manifest.world_size

    @property
    def model(self) -> dict[str, Tensor | None]:
        """Entries of the model's state by name."""
        return {n.removeprefix(f"{MODEL}."): entry for n, entry in self.entries.items() if n.startswith(f"{MODEL}.")}

    def read_model(self, names: Iterable[str]) -> dict[str, Any]:
        """The entries of the model's state with these ``names``, tensors whole and in host memory."""
        entries = self.model
        found = {name: None if (e := entries[name]) is None else torch.empty_like(e, device="cpu") for name in names}
        self.read_into({MODEL: found})
        return found

    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets`` in place, and replace its other values. A collective like opening.

        ``targets`` is nested as it was saved, or flat. Each rank reads what its own shards need.
        """
        if of_model := targets.get(MODEL):
            tensors = {name: value for name, value in of_model.items() if name not in self._extra_state}
            of_model.update({name: self._extra_state[name] for name in of_model.keys() - tensors.keys()})
            targets = {**targets, MODEL: tensors}
        reader = _Reader(self._filesystem, self._folder, self._metadata)
        with translated(f"Cannot load {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, storage_reader=reader, planner=_Planner(self._weights_only), no_dist=self._is_alone)
        with on_every_rank(f"Cannot load {self.path}", alone=self._is_alone), self._unreplaced():
            pass

    def _check_entries(self, has_checksums: bool) -> None:
        """Load each entry of the shards, and compare it with the table: a file's checksum matches whatever it holds.

        An entry ``has_checksums`` of its own where another program has written it.
        """
        names: set[str] = set()
        tables = self._metadata.state_dict_metadata.items()
        chunks: list[tuple[str, Any, Any]] = [
            (name, entry, each) for name, entry in tables for each in getattr(entry, "chunks", [None])
        ]
        for name, entry, chunk in chunks:
            place = self._metadata.storage_data[MetadataIndex(name, None if chunk is None else chunk.offsets)]
            what = f"{name} in {place.relative_path}"
            try:
                with self._filesystem.open(f"{self._folder}/{place.relative_path}", "rb") as file:
                    file.seek(place.offset)
                    content = io.BytesIO(file.read(place.length))
                if has_checksums:
                    check_content(content)
                if chunk is None:
                    names.update(classes_and_functions(content))
                    continue
                found = load_plain_data(content, what, weights_only=True)
                if (found.dtype, found.size()) != (entry.properties.dtype, chunk.sizes):
                    raise CheckpointError(
                        f"it is {found.dtype} {list(found.size())}, and the table says {entry.properties.dtype}"
                        f" {list(chunk.sizes)}"
                    )
            except Exception as error:  # damaged content can raise anything
                raise CheckpointError(f"{what} cannot be loaded: {error}") from error
        if names and self._weights_only:
            raise NotPlainDataError(self.path, sorted(names), "")

    @contextmanager
    def _unreplaced(self) -> Generator[None, None, None]:
        """Raise CheckpointError if another checkpoint has replaced this one, as happens to a run's ``last.ckpt``.

        Entries have the same names and sizes from save to save: a newer save would go unnoticed, or look damaged.
        """
        try:
            yield
        finally:
            if save_id(self.path) != self._save_id:
                raise CheckpointError("another checkpoint took its place while it was read: load it again")


class _Reader(FileSystemReader):
    """Reads a directory whose metadata was read before."""

    def __init__(self, filesystem: AbstractFileSystem, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self.fs, self.path = _Files(filesystem), folder
        self._metadata = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Refuses objects that are not plain data, which torch's own planner would load with ``weights_only=False``."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self._weights_only:
            load_plain_data(value, f"entry {read_item.dest_index.fqn!r}", weights_only=True)
            value.seek(0)
        super().load_bytes(read_item, value)


def _open_tables(path: str) -> tuple[AbstractFileSystem, str, Manifest | None, Metadata]:
    """File system, folder of the files, manifest (None if another program wrote them), and metadata of the shards.

    Raises :class:`CheckpointError` if ``path`` is not a directory of shards, or manifest or metadata are damaged.
    """
    filesystem, folder = url_to_fs(path)
    manifest = read_manifest(filesystem, folder)
    if manifest is not None and manifest.folder:
        if not paths.is_file_name(manifest.folder) or os.path.islink(f"{folder}/{manifest.folder}"):
            raise CheckpointError(f"{MANIFEST} refers to {manifest.folder!r}, which is not a folder of the checkpoint")
        folder = f"{folder}/{manifest.folder}"
    try:
        content = paths.read_file(filesystem, folder, METADATA)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {METADATA}: this is not a directory of shards, or its save did not end"
        ) from None
    return filesystem, folder, manifest, parse_metadata(content)


def read_manifest(filesystem: AbstractFileSystem, folder: str) -> Manifest | None:
    """The manifest of a directory, None if there is none; raises CheckpointError if it is damaged."""
    try:
        return Manifest.from_bytes(paths.read_file(filesystem, folder, MANIFEST))
    except FileNotFoundError:
        return None


def save_id(path: str) -> str:
    """Id of the save at ``path``, which differs from save to save; empty if there is none."""
    try:
        manifest = read_manifest(*url_to_fs(path))
    except (CheckpointError, OSError):
        return ""
    return "" if manifest is None else manifest.save_id


def check_files(
    filesystem: AbstractFileSystem,
    folder: str,
    manifest: Manifest | None,
    metadata: Metadata,
    share: int,
    shares: int,
) -> None:
    """Compare the files with the manifest, or, if another program wrote them, with what the shards need.

    Raises :class:`CheckpointError` if any is missing, damaged, or not a regular file of the checkpoint. For ``share``
    and ``shares`` see :meth:`.Manifest.check`.
    """
    needed = sizes_needed(metadata)
    if manifest is not None:
        manifest.check(filesystem, folder, {METADATA, REST, *needed}, share, shares)
        return
    if str(getattr(metadata.storage_meta, "save_id", "")).startswith(_SIGNATURE):
        raise CheckpointError(
            f"{MANIFEST} is missing, so the other files cannot be checked: copy the checkpoint again, with all its"
            " files"
        )
    for name, num_bytes in needed.items():
        try:
            size = paths.size_of_file(filesystem, folder, name)
        except FileNotFoundError:
            raise CheckpointError(f"{name} is missing") from None
        if size < num_bytes:
            raise CheckpointError(f"{name} is cut off: it has {size} bytes, and {num_bytes} were written")
