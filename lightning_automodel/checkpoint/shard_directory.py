"""A directory of shards, read by torch.distributed.checkpoint and checked before it loads.

A directory holds the files of ``torch.distributed.checkpoint`` (``.metadata`` and one ``.distcp`` file per
rank), the rest of the checkpoint (``meta.pt``) and a manifest, which is written last and makes it complete.
Torch and Lightning can read it too. Each entry of a ``.distcp`` file is written by ``torch.save``, with
torch's checksums.
"""

import io
import itertools
import json
import warnings
import zlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.entries import DirectoryReader, PlainDataPlanner, part
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.optimizers import (
    OPTIMIZER_STATES,
    is_optimizer_key,
    optimizer_key,
)
from lightning_automodel.checkpoint.safe_load import MetadataUnpickler, load_plain_data
from lightning_automodel.checkpoint.single_file import check_content
from lightning_automodel.checkpoint.state_dict import (
    EXTRA_STATES,
    MODEL,
    MODULE_VERSIONS,
    Saved,
    empty_on_host,
)
from lightning_automodel.checkpoint.trees import PLACE, joined, nested

REST = "meta.pt"
"""File of everything but the shards (loops, callbacks, hyperparameters), under Lightning's name for it."""

MANIFEST = "manifest.json"
"""File that names the folder of the other files within the directory, and the checksum of ``.metadata``."""

METADATA = ".metadata"
FORMAT = "lightning_automodel checkpoint, version 2"


def is_shard_directory(path: str) -> bool:
    """Whether the directory at ``path`` holds shards, from this package or another."""
    filesystem, place = url_to_fs(path)
    return any(filesystem.exists(f"{place}/{name}") for name in (MANIFEST, METADATA))


def read_manifest(path: str) -> bytes | None:
    """Content of a directory's manifest, different in each save; None if another program wrote it."""
    filesystem, place = url_to_fs(f"{path}/{MANIFEST}")
    if not filesystem.exists(place):
        return None
    return paths.read_file(f"{path}/{MANIFEST}")


def open_table(path: str, manifest: bytes | None) -> tuple[str, Metadata]:
    """The folder of the files, and ``.metadata``; raises CheckpointError if that is missing or damaged."""
    folder = path
    crc32 = None
    if manifest is not None:
        try:
            content = json.loads(manifest)
            is_known = content["format"] == FORMAT
            within = content["folder"]
            crc32 = content["crc32"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({len(manifest)} bytes)") from error
        if not is_known:
            raise CheckpointError(
                f"{MANIFEST} does not say {FORMAT!r}: load it with the release that wrote it"
            )
        if within:
            folder = paths.member(path, within)
    table = paths.read_file(f"{folder}/{METADATA}")
    if crc32 not in (None, checksum(table)):
        raise CheckpointError(
            f"{METADATA} has changed since it was written: its CRC-32 is {checksum(table)}, in {MANIFEST}"
            f" {crc32}"
        )
    return folder, _parsed(table)


def _parsed(table: bytes) -> Metadata:
    """The content of ``.metadata``; raises CheckpointError if it is damaged or has Lightning's layout."""
    try:
        metadata = MetadataUnpickler(io.BytesIO(table)).load()
        saved = {place[0] for place in metadata.planner_data.values()}
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{METADATA} is damaged ({type(error).__name__}: {error}; {len(table)} bytes)"
        ) from error
    if "model" in saved and MODEL not in saved:
        raise CheckpointError(
            "Lightning's FSDPStrategy has written these shards: make one file of them, which this strategy"
            " reads, with python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    return metadata


def checksum(content: bytes) -> str:
    """CRC-32 of the content of a file, as manifests hold it."""
    return f"{zlib.crc32(content):08x}"


class ShardDirectory(Saved):
    """A directory of shards, open for loading.

    Opening is a collective over the default group, if there is one, unless ``alone``. The ranks share the
    work of reading all files once, unless ``reads_content`` is False: then only sizes are compared. If a
    file is missing or damaged, or holds code while ``weights_only`` is not False, every rank raises
    :class:`CheckpointError` before anything was loaded.
    """

    def __init__(
        self,
        path: str,
        weights_only: bool | None,
        alone: bool = False,
        reads_content: bool = True,
    ) -> None:
        self.path = path
        self._weights_only = weights_only is not False
        self._is_alone = alone or not (dist.is_available() and dist.is_initialized())
        with self._raising():
            self._manifest = read_manifest(path)
            self._folder, self._metadata = open_table(path, self._manifest)
            files = self._check_sizes()
            content = paths.read_file(f"{self._folder}/{REST}")
            if reads_content:
                check_content(io.BytesIO(content), REST)
                self._check_content()
            rest = load_plain_data(io.BytesIO(content), f"{REST} of {path}", self._weights_only)
            if not isinstance(rest, dict):
                raise CheckpointError(
                    f"{REST} holds a {type(rest).__name__}, which is not a checkpoint's rest"
                )
            self._extra_state: dict[str, Any] = rest.pop(EXTRA_STATES, {})
            self._optimizers: dict[str, Any] | None = rest.pop(OPTIMIZER_STATES, None)
            self.module_versions: dict[str, dict[str, Any]] = rest.pop(MODULE_VERSIONS, {})
            self.rest = rest
            saved = self._metadata.state_dict_metadata
            self.entries: dict[str, Tensor | None] = dict.fromkeys(saved)
            for name, entry in saved.items():
                if isinstance(entry, TensorStorageMetadata):
                    self.entries[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            self.entries.update({f"{MODEL}.{name}": None for name in self._extra_state})
            self.places: dict[str, tuple[Any, ...]] = self._metadata.planner_data
            # torch calls the files __<rank>_<number>.distcp.
            self.world_size = len({name.lstrip("_").partition("_")[0] for name in files})
            self._check_unreplaced()

    @override
    def optimizer_states(self) -> list[dict[str, Any]]:
        """See :class:`.Saved`. Not a collective. Reads objects from other programs' directories."""
        states = self._optimizers
        if states is None:
            states = self._read_optimizers()
        return [{"state": {}, **states[optimizer_key(index)]} for index in range(len(states))]

    def _read_optimizers(self) -> dict[str, Any]:
        """States from other programs or earlier releases of this package, which torch has taken apart."""
        places = {path: joined(path) for path in self.places.values() if is_optimizer_key(path[0])}
        objects: dict[str, Any] = {key: None for key in places.values() if self.entries[key] is None}
        self._read(objects, is_alone=True)
        return nested({path: objects.get(key, {PLACE: key}) for path, key in places.items()})

    @override
    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets``, and replace its other values. A collective, like opening.

        ``targets`` is nested like the saved state, or flat. Each rank reads only what its own shards need.
        """
        of_model = targets.get(MODEL, {})
        tensors = {name: value for name, value in of_model.items() if name not in self._extra_state}
        if of_model:
            targets = {**targets, MODEL: tensors}
        self._read(targets, self._is_alone)
        of_model.update(tensors)
        of_model.update({name: self._extra_state[name] for name in of_model.keys() - tensors.keys()})
        with self._raising():
            self._check_unreplaced()

    def read_model_alone(self, name: str) -> Any:
        """One entry of the model's state; a tensor is whole and in host memory. Not a collective."""
        if name in self._extra_state:
            return self._extra_state[name]
        return self.read_alone(f"{MODEL}.{name}")

    def read_alone(self, key: str) -> Any:
        """The entry with this key; a tensor is whole and in host memory. Not a collective."""
        targets = {key: empty_on_host(self.entries[key])}
        self._read(targets, is_alone=True)
        with on_this_rank(f"Cannot load {self.path}"):
            self._check_unreplaced()
        return targets[key]

    def _read(self, targets: dict[str, Any], is_alone: bool) -> None:
        reader = DirectoryReader(self._folder, self._metadata)
        with on_this_rank(f"Cannot load {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                targets,
                storage_reader=reader,
                planner=PlainDataPlanner(self._weights_only),
                no_dist=is_alone,
            )

    def _raising(self) -> AbstractContextManager[None]:
        what = f"Cannot load {self.path}"
        if self._is_alone:
            return on_this_rank(what)
        return on_every_rank(what)

    def _check_sizes(self) -> dict[str, int]:
        """Least size of each file; CheckpointError if one is missing, cut off, or not a regular file."""
        needed: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
        for name, num_bytes in needed.items():
            size = paths.size_of_file(paths.member(self._folder, name))
            if size < num_bytes:
                raise CheckpointError(
                    f"{name} is cut off: it has {size} bytes, and {num_bytes} were written"
                )
        return needed

    def _check_content(self) -> None:
        """Read this rank's share of the files' entries, and compare them with their checksums."""
        rank = 0
        num_ranks = 1
        if not self._is_alone:
            rank = dist.get_rank()
            num_ranks = dist.get_world_size()
        stored = self._metadata.storage_data.values()
        places = {(place.relative_path, place.offset, place.length) for place in stored}
        # Every n-th entry in the order of their sizes: about the same number of bytes for each rank.
        mine = sorted(sorted(places, key=lambda place: place[::-1])[rank::num_ranks])
        filesystem, folder = url_to_fs(self._folder)
        is_local = paths.is_local(self._folder)
        for name, of_file in itertools.groupby(mine, key=lambda place: place[0]):
            with filesystem.open(f"{folder}/{name}", "rb") as file:
                for _, offset, length in of_file:
                    if is_local:
                        check_content(part(file, offset, length), name)
                    else:  # in one request
                        file.seek(offset)
                        check_content(io.BytesIO(file.read(length)), name)

    def _check_unreplaced(self) -> None:
        """Raise CheckpointError if a newer save, with the same names and sizes, has replaced this one."""
        if read_manifest(self.path) != self._manifest:
            raise CheckpointError("another checkpoint took its place while it was read: load it again")
