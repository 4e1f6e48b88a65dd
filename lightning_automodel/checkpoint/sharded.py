"""A directory of shards: written and read by torch.distributed.checkpoint, checked before it loads, loaded as data.

A directory holds what ``torch.distributed.checkpoint`` writes (``.metadata`` and one ``.distcp`` file a rank), the rest
of the checkpoint (``meta.pt``) and a manifest, written last. Torch and Lightning can read it too: ``README.txt`` beside
them says how. Each entry of a ``.distcp`` file is what ``torch.save`` writes, with torch's own checksums.
"""

import io
import itertools
import json
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_automodel import torch_internals
from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, translated
from lightning_automodel.checkpoint.safe_load import load_plain_data
from lightning_automodel.checkpoint.single_file import check_content
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL, Saved
from lightning_automodel.checkpoint.tables import METADATA, outline, parse_metadata, sizes_needed

REST = "meta.pt"
"""File of everything besides shards (loops, callbacks, hyperparameters), in Lightning's strategies too."""

MANIFEST = "manifest.json"
"""File that says which folder within the directory holds the others, and the checksum of ``.metadata``."""

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

_FORMAT = "lightning_automodel checkpoint, version 2"


class ShardWriter(torch_internals.FsspecWriter):
    """Writes one directory, which appears when it is complete; for ``dcp.save``.

    Every rank makes one for each save. A local directory is written beside its target and then renamed. Elsewhere
    nothing can be renamed in one step: there the manifest, one object, says which folder within the directory is valid.

    Args:
        target: Path of the directory.
        folder: Where the files are written; rank 0 has chosen it for all (:func:`.paths.new_folder`).
        rest: Content of ``meta.pt``, which the coordinator writes.
    """

    def __init__(self, target: str, folder: str, rest: bytes) -> None:
        super().__init__(folder, sync_files=False)  # torch (2.13) would do so before it flushes
        self._target, self._folder, self._rest = target, folder, rest

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with serialization_config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
            written = super().write_data(plan, planner)
        if paths.is_local(self._folder):
            for name in {each.storage_data.relative_path for each in written.wait()}:
                atomic.sync(f"{self._folder}/{name}")
        return written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: complete the directory, and move it to its target."""
        super().finish(metadata, results)
        is_local = paths.is_local(self._folder)
        top, within = (self._folder, "") if is_local else (self._target, self._folder.rpartition("/")[2])
        manifest = {"format": _FORMAT, "folder": within, "crc32": _checksum(paths.read_file(self._file(METADATA)))}
        paths.write_file(self._file(REST), self._rest)
        paths.write_file(f"{top}/{README}", README_TEXT.encode())
        # Last: elsewhere than on a local disk, this makes the new files the checkpoint.
        paths.write_file(f"{top}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
        if is_local:
            atomic.sync(self._file(METADATA))
            atomic.replace(Path(self._folder), Path(self._target))
            return
        filesystem, place = url_to_fs(self._target)
        for path in filesystem.ls(place, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if name != within and name.startswith(atomic.TEMPORARY):
                filesystem.rm(path, recursive=True)

    def _file(self, name: str) -> str:
        return f"{self._folder}/{name}"


class ShardDirectory(Saved):
    """A directory of shards, open for loading.

    Opening is a collective over the default group, if there is one, unless ``alone``. All files are read once, each
    rank a share, unless only sizes are compared (``reads_content`` is False). If any is missing, damaged, or holds code
    (unless ``weights_only`` is False), every rank raises :class:`CheckpointError` before anything was loaded.
    """

    def __init__(self, path: str, weights_only: bool | None, alone: bool = False, reads_content: bool = True) -> None:
        self.path, self._weights_only = path, weights_only is not False
        self._is_alone = alone or not (dist.is_available() and dist.is_initialized())
        share, shares = (0, 1) if self._is_alone else (dist.get_rank(), dist.get_world_size())
        with on_every_rank(f"Cannot load {path}", alone=self._is_alone):
            self._manifest = _manifest(path)
            with self._unreplaced():
                self._folder, self._metadata = _open_table(path, self._manifest)
                self._check_sizes()
                try:
                    content = paths.read_file(f"{self._folder}/{REST}")
                except FileNotFoundError:
                    raise CheckpointError(
                        f"there is no {REST}: torch.distributed.checkpoint has written this directory without"
                        " Lightning, or the file was lost"
                    ) from None
                if reads_content:
                    check_content(io.BytesIO(content), REST)
                    self._check_content(share, shares)
            rest: dict[str, Any] = load_plain_data(io.BytesIO(content), f"{REST} of {path}", self._weights_only)
            if not isinstance(rest, dict):
                raise CheckpointError(f"{REST} holds a {type(rest).__name__}, which is not a checkpoint's rest")
            self._extra_state: dict[str, Any] = rest.pop(EXTRA_STATE, {})
            self.rest = rest
            self.entries: Mapping[str, Tensor | None] = {
                **outline(self._metadata),
                **{f"{MODEL}.{name}": None for name in self._extra_state},
            }
            self.places: dict[str, tuple[Any, ...]] = self._metadata.planner_data
            # torch calls the files __<rank>_<number>.distcp.
            self.world_size = len({name.lstrip("_").partition("_")[0] for name in sizes_needed(self._metadata)})

    @override
    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets`` in place, and replace its other values. A collective like opening.

        ``targets`` is nested as it was saved, or flat. Each rank reads what its own shards need.
        """
        if of_model := targets.get(MODEL):
            tensors = {name: value for name, value in of_model.items() if name not in self._extra_state}
            of_model.update({name: self._extra_state[name] for name in of_model.keys() - tensors.keys()})
            targets = {**targets, MODEL: tensors}
        reader = _Reader(self._folder, self._metadata)
        with translated(f"Cannot load {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, storage_reader=reader, planner=_Planner(self._weights_only), no_dist=self._is_alone)
        with on_every_rank(f"Cannot load {self.path}", alone=self._is_alone), self._unreplaced():
            pass

    def _check_sizes(self) -> None:
        """Raise CheckpointError if a file that the table names is missing, cut off, or no regular file."""
        for name, num_bytes in sizes_needed(self._metadata).items():
            try:
                size = paths.size_of_file(paths.member(self._folder, name))
            except FileNotFoundError:
                raise CheckpointError(f"{name} is missing") from None
            if size < num_bytes:
                raise CheckpointError(f"{name} is cut off: it has {size} bytes, and {num_bytes} were written")

    def _check_content(self, share: int, shares: int) -> None:
        """Read one entry of the files in ``shares``, and compare it with its checksums."""
        places = {(each.relative_path, each.offset, each.length) for each in self._metadata.storage_data.values()}
        # In the order of their sizes: about the same number of bytes for each rank.
        mine = sorted(sorted(places, key=lambda place: place[::-1])[share::shares])
        filesystem, folder = url_to_fs(self._folder)
        for name, entries in itertools.groupby(mine, key=lambda place: place[0]):
            with filesystem.open(f"{folder}/{name}", "rb") as file:
                for _, offset, length in entries:
                    file.seek(offset)
                    check_content(io.BytesIO(file.read(length)), name)

    @contextmanager
    def _unreplaced(self) -> Generator[None, None, None]:
        """Raise CheckpointError if another checkpoint has replaced this one, as happens to a run's ``last.ckpt``.

        Entries have the same names and sizes from save to save: a newer save would go unnoticed, or look damaged.
        """
        try:
            yield
        finally:
            if _manifest(self.path) != self._manifest:
                raise CheckpointError("another checkpoint took its place while it was read: load it again")


class _Reader(torch_internals.FsspecReader):
    """Reads a directory whose metadata was read before."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
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


def _manifest(path: str) -> bytes | None:
    """Content of a directory's manifest, which differs from save to save; None if another program wrote it."""
    try:
        return paths.read_file(f"{path}/{MANIFEST}")
    except FileNotFoundError:
        return None


def _open_table(path: str, manifest: bytes | None) -> tuple[str, Metadata]:
    """Folder of the files, and the parsed table of the shards; raises CheckpointError if it is missing or damaged."""
    folder, crc32 = path, None
    if manifest is not None:
        try:
            content = json.loads(manifest)
            is_known, within, crc32 = content["format"] == _FORMAT, content["folder"], content["crc32"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({len(manifest)} bytes)") from error
        if not is_known:
            raise CheckpointError(f"{MANIFEST} does not say {_FORMAT!r}: load it with the release that wrote it")
        folder = paths.member(path, within) if within else path
        if within and Path(folder).is_symlink():
            raise CheckpointError(f"{MANIFEST} refers to {within!r}, which is a link")
    try:
        table = paths.read_file(f"{folder}/{METADATA}")
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {METADATA}: this is not a directory of shards, or its save did not end"
        ) from None
    if crc32 not in (None, _checksum(table)):
        raise CheckpointError(
            f"{METADATA} has changed since it was written: its CRC-32 is {_checksum(table)}, in {MANIFEST} {crc32}"
        )
    return folder, parse_metadata(table)


def _checksum(content: bytes) -> str:
    """CRC-32, eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"
