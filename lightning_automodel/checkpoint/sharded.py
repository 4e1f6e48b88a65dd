"""A directory of shards: written and read by torch.distributed.checkpoint, checked before it loads, loaded as data.

A directory holds what ``torch.distributed.checkpoint`` writes (``.metadata`` and one ``.distcp`` file a rank), the rest
of the checkpoint (``meta.pt``) and a manifest, written last. Torch and Lightning can read it too. Each entry of a
``.distcp`` file is what ``torch.save`` writes, with torch's own checksums.
"""

import dataclasses
import io
import itertools
import json
import socket
import warnings
import zlib
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_automodel.checkpoint import entries, paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.optimizers import NOTES, OPTIMIZER_STATES, is_optimizer_key, optimizer_key
from lightning_automodel.checkpoint.safe_load import MetadataUnpickler, load_plain_data
from lightning_automodel.checkpoint.single_file import check_content
from lightning_automodel.checkpoint.state_dict import (
    EXTRA_STATES,
    MODEL,
    MODULE_VERSIONS,
    Saved,
    copied,
    is_extra_state,
    shards_that_cannot_be_loaded,
    split_shards,
)
from lightning_automodel.checkpoint.trees import PLACE, hides_shards, joined, nested, take_apart
from lightning_automodel.checkpoint.trees import Path as TreePath
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals import torch as torch_internals

REST = "meta.pt"
"""File of everything besides shards (loops, callbacks, hyperparameters), in Lightning's strategies too."""

MANIFEST = "manifest.json"
"""File that says which folder within the directory holds the others, and the checksum of ``.metadata``."""

METADATA = ".metadata"
_FORMAT = "lightning_automodel checkpoint, version 2"


class ShardWriter(torch_internals.FsspecWriter):
    """Writes the directory ``target``, which appears when it is complete; for ``dcp.save``.

    Every rank makes one for each save, with the same ``folder`` for the files (:func:`.paths.prepare_place`). A local
    one is then renamed. Elsewhere nothing can be renamed in one step: there the manifest, one object, says which folder
    within the directory is valid.
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
                paths.sync(f"{self._folder}/{name}")
        return written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: complete the directory, and move it to its target."""
        super().finish(metadata, results)
        is_local = paths.is_local(self._folder)
        top, within = (self._folder, "") if is_local else (self._target, self._folder.rpartition("/")[2])
        table = f"{self._folder}/{METADATA}"
        manifest = {"format": _FORMAT, "folder": within, "crc32": _checksum(paths.read_file(table))}
        paths.write_file(f"{self._folder}/{REST}", self._rest)
        # Last: elsewhere than on a local disk, this makes the new files the checkpoint.
        paths.write_file(f"{top}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
        if is_local:
            paths.sync(table)
            paths.replace(Path(self._folder), Path(self._target))
            return
        filesystem, place = url_to_fs(self._target)
        for path in filesystem.ls(place, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if name != within and name.startswith(paths.TEMPORARY):
                filesystem.rm(path, recursive=True)


def prepare_shards(
    checkpoint: dict[str, Any], path: str, parameters: Set[str] = frozenset(), copy: bool = False
) -> Callable[[dist.ProcessGroup | None], None]:
    """Prepare a directory: shards of model and optimizers by every rank, the rest by rank 0. A collective.

    Returns a function that writes it, at once or in the background: a collective over its group (None: the default
    one). If any rank fails, all raise :class:`CheckpointError`, and the older checkpoint is unchanged.

    Args:
        checkpoint: Lightning's checkpoint, with shards instead of whole tensors; states are popped from it.
        path: Path of the checkpoint, the same on every rank.
        parameters: Names of the model's parameters.
        copy: Whether the state is copied to host memory, so that it may change before it is written.
    """
    what = f"Cannot save {path}"
    shards, rest = _take_shards(checkpoint, parameters)
    folder, content = "", io.BytesIO()
    try:
        with on_every_rank(what):
            if group_rank() == 0:
                torch.save(rest, content)
                folder = paths.prepare_place(path)
                paths.mark(folder, REST)
        # The folder's name is random, and all ranks write into it.
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
    """Raise CheckpointError unless this rank sees the ``folder`` that rank 0 has made on ``node``. Not a collective.

    Before anything large is written: shards on the disk of another node, or in the memory of another process
    (``memory://``), would be lost.
    """
    if not paths.is_seen(folder, REST):
        raise CheckpointError(
            f"{socket.gethostname()} does not see what rank 0 has written at {path} on {node}, so that shards written"
            " there would be lost: save to a file system that all ranks share (ModelCheckpoint(dirpath=...) or"
            " Trainer(default_root_dir=...)), or pass save_distributed_checkpoint=False, with which rank 0 writes one"
            " file"
        )


def _take_shards(checkpoint: dict[str, Any], parameters: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shards by place, and the rest of ``checkpoint``, from which the states of model and optimizers are popped.

    Of what may differ between the ranks, such as buffers of a replicated model, rank 0's is saved, as in one file. Of
    parameters and their states torch shares out the writing.
    """
    if not isinstance(checkpoint.get(MODEL), dict):
        raise CheckpointError("on_save_checkpoint has left no dict in checkpoint['state_dict']")
    of_model: dict[str, Any] = checkpoint.pop(MODEL)
    # Of extra states also tensors: ranks may have others, of other sizes, and the resume state has those.
    objects = {
        name: of_model.pop(name)
        for name, value in list(of_model.items())
        if not isinstance(value, Tensor) or (is_extra_state(name) and not isinstance(value, DTensor))
    }
    for name, value in objects.items():
        if not isinstance(value, Tensor) and hides_shards(value):
            raise shards_that_cannot_be_loaded(name)
    checkpoint[MODULE_VERSIONS] = torch_internals.module_versions(of_model)
    shards = {MODEL: of_model}
    trees: dict[str, Any] = {}
    for index, state in enumerate(filter(None, checkpoint.pop("optimizer_states", []))):
        key = optimizer_key(index)
        trees[key], leaves = take_apart(state, (key,))
        notes = state.get(NOTES, {})
        shards.update(
            nested({path: leaf for path, leaf in leaves.items() if _is_written(path, leaf, parameters, notes)})
        )
    checkpoint[OPTIMIZER_STATES] = trees
    rest, others = split_shards(checkpoint, of_model.keys())
    for place, each in [(MODEL, of_model), *others.items()]:
        written = {name: value for name, value in each.items() if _is_written((place, name), value, parameters)}
        shards[place] = written
    return shards, {**rest, EXTRA_STATES: objects} if objects else rest


def _is_written(
    path: TreePath, leaf: Any, parameters: Set[str], notes: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Whether this rank offers a leaf to torch; ``notes`` are those of its optimizer."""
    if path[1] == NOTES:
        return False
    if notes.get(joined(path[1:])) == "owned":
        return not leaf.is_meta
    if isinstance(leaf, DTensor) or group_rank() == 0:
        return True
    of_parameter = path[1:2] if path[0] == MODEL else path[2:3]
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and not parameters.isdisjoint(map(str, of_parameter))


class ShardDirectory(Saved):
    """A directory of shards, open for loading.

    Opening is a collective over the default group, if there is one, unless ``alone``. All files are read once, each
    rank a share, unless only sizes are compared (``reads_content`` is False). If any is missing, damaged, or holds code
    (unless ``weights_only`` is False), every rank raises :class:`CheckpointError` before anything was loaded.
    """

    def __init__(self, path: str, weights_only: bool | None, alone: bool = False, reads_content: bool = True) -> None:
        self.path, self._weights_only = path, weights_only is not False
        self._is_alone = alone or not (dist.is_available() and dist.is_initialized())
        with self._raising():
            self._manifest = _manifest(path)
            self._folder, self._metadata = _open_table(path, self._manifest)
            files = self._check_sizes()
            content = paths.read_file(f"{self._folder}/{REST}")
            if reads_content:
                check_content(io.BytesIO(content), REST)
                self._check_content()
            rest = load_plain_data(io.BytesIO(content), f"{REST} of {path}", self._weights_only)
            if not isinstance(rest, dict):
                raise CheckpointError(f"{REST} holds a {type(rest).__name__}, which is not a checkpoint's rest")
            self._extra_state: dict[str, Any] = rest.pop(EXTRA_STATES, {})
            self._optimizers: dict[str, Any] | None = rest.pop(OPTIMIZER_STATES, None)
            self.module_versions: dict[str, dict[str, Any]] = rest.pop(MODULE_VERSIONS, {})
            self.rest = rest
            self.entries = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                if isinstance(entry, TensorStorageMetadata)
                else None
                for name, entry in self._metadata.state_dict_metadata.items()
            }
            self.entries.update({f"{MODEL}.{name}": None for name in self._extra_state})
            self.places: dict[str, tuple[Any, ...]] = self._metadata.planner_data
            # torch calls the files __<rank>_<number>.distcp.
            self.world_size = len({name.lstrip("_").partition("_")[0] for name in files})
            self._check_unreplaced()

    @override
    def optimizer_states(self) -> list[dict[str, Any]]:
        """See :class:`.Saved`. Reads what is no tensor, of other programs' directories; not a collective."""
        states = self._read_optimizers() if self._optimizers is None else self._optimizers
        return [{"state": {}, **states[optimizer_key(index)]} for index in range(len(states))]

    def _read_optimizers(self) -> dict[str, Any]:
        """The states that other programs, or earlier releases of this one, have left to torch to take apart."""
        places = {path: joined(path) for path in self.places.values() if is_optimizer_key(path[0])}
        found: dict[str, Any] = {key: None for key in places.values() if self.entries[key] is None}
        self._read(found, is_alone=True)
        return nested({path: found.get(key, {PLACE: key}) for path, key in places.items()})

    @override
    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets`` in place, and replace its other values. A collective like opening.

        ``targets`` is nested as it was saved, or flat. Each rank reads what its own shards need.
        """
        of_model = targets.get(MODEL)
        if of_model:
            tensors = {name: value for name, value in of_model.items() if name not in self._extra_state}
            of_model.update({name: self._extra_state[name] for name in of_model.keys() - tensors.keys()})
            targets = {**targets, MODEL: tensors}
            self._read(targets, self._is_alone)
            of_model.update(tensors)
        else:
            self._read(targets, self._is_alone)
        with self._raising():
            self._check_unreplaced()

    def read_model_alone(self, name: str) -> Any:
        """One entry of the model's state, a tensor whole and in host memory. Not a collective."""
        return self._extra_state[name] if name in self._extra_state else self.read_alone(f"{MODEL}.{name}")

    def read_alone(self, key: str) -> Any:
        """The entry of this key, a tensor whole and in host memory. Not a collective."""
        entry = self.entries[key]
        found = {key: None if entry is None else torch.empty_like(entry, device="cpu")}
        self._read(found, is_alone=True)
        with on_this_rank(f"Cannot load {self.path}"):
            self._check_unreplaced()
        return found[key]

    def _read(self, targets: dict[str, Any], is_alone: bool) -> None:
        reader = _Reader(self._folder, self._metadata)
        with on_this_rank(f"Cannot load {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, storage_reader=reader, planner=_Planner(self._weights_only), no_dist=is_alone)

    def _raising(self) -> AbstractContextManager[None]:
        what = f"Cannot load {self.path}"
        return on_this_rank(what) if self._is_alone else on_every_rank(what)

    def _check_sizes(self) -> dict[str, int]:
        """Bytes that each file must have at least; CheckpointError if one is missing, cut off, or no regular file."""
        needed: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        for name, num_bytes in needed.items():
            size = paths.size_of_file(paths.member(self._folder, name))
            if size < num_bytes:
                raise CheckpointError(f"{name} is cut off: it has {size} bytes, and {num_bytes} were written")
        return needed

    def _check_content(self) -> None:
        """Read this rank's share of the files' entries, and compare them with their checksums."""
        rank, num_ranks = (0, 1) if self._is_alone else (dist.get_rank(), dist.get_world_size())
        places = {(each.relative_path, each.offset, each.length) for each in self._metadata.storage_data.values()}
        # In the order of their sizes: about the same number of bytes for each rank.
        mine = sorted(sorted(places, key=lambda place: place[::-1])[rank::num_ranks])
        filesystem, folder = url_to_fs(self._folder)
        is_local = paths.is_local(self._folder)
        for name, of_file in itertools.groupby(mine, key=lambda place: place[0]):
            with filesystem.open(f"{folder}/{name}", "rb") as file:
                for _, offset, length in of_file:
                    if is_local:
                        check_content(entries.part(file, offset, length), name)
                    else:  # in one request
                        file.seek(offset)
                        check_content(io.BytesIO(file.read(length)), name)

    def _check_unreplaced(self) -> None:
        """Raise CheckpointError if a newer save has replaced this one: its entries have the same names and sizes."""
        if _manifest(self.path) != self._manifest:
            raise CheckpointError("another checkpoint took its place while it was read: load it again")


class _Reader(torch_internals.FsspecReader):
    """Reads a directory whose metadata was read before, large local entries block by block.

    torch holds an entry twice: what it has read, and the tensor that it is copied into.
    """

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata
        self._is_local = paths.is_local(folder)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        others = [item for item in plan.items if not self._is_read_in_blocks(item, planner)]
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _is_read_in_blocks(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read an item, if that can be done in blocks."""
        place = self._metadata.storage_data[item.storage_index]
        is_small = place.length <= 2 * entries.BLOCK
        if not self._is_local or is_small or item.type != LoadItemType.TENSOR or place.transform_descriptors:
            return False
        if any(item.storage_offsets):
            return False
        target = planner.resolve_tensor(item).detach()
        with open(paths.member(self._folder, place.relative_path), "rb") as file:
            is_read = entries.read_in_blocks(entries.part(file, place.offset, place.length), target)
        if is_read:
            planner.commit_tensor(item, target)
        return is_read


class _Planner(DefaultLoadPlanner):
    """Refuses objects that are not plain data, which torch's own planner would load."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self._weights_only:
            load_plain_data(value, f"entry {read_item.dest_index.fqn!r}", weights_only=True)
            value.seek(0)
        super().load_bytes(read_item, value)


def is_shard_directory(path: str) -> bool:
    """Whether the directory at ``path`` is one of shards, this package's or another's."""
    filesystem, place = url_to_fs(path)
    return any(filesystem.exists(f"{place}/{name}") for name in (MANIFEST, METADATA))


def _manifest(path: str) -> bytes | None:
    """Content of a directory's manifest, which differs from save to save; None if another program wrote it."""
    filesystem, place = url_to_fs(f"{path}/{MANIFEST}")
    return paths.read_file(f"{path}/{MANIFEST}") if filesystem.exists(place) else None


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
    table = paths.read_file(f"{folder}/{METADATA}")
    if crc32 not in (None, _checksum(table)):
        raise CheckpointError(
            f"{METADATA} has changed since it was written: its CRC-32 is {_checksum(table)}, in {MANIFEST} {crc32}"
        )
    try:
        metadata = MetadataUnpickler(io.BytesIO(table)).load()
        saved = {place[0] for place in metadata.planner_data.values()}
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{METADATA} is damaged ({type(error).__name__}: {error}; {len(table)} bytes)") from error
    if "model" in saved and MODEL not in saved:
        raise CheckpointError(
            "Lightning's FSDPStrategy has written these shards: make one file of them, which this strategy reads, with"
            " python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    return folder, metadata


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
