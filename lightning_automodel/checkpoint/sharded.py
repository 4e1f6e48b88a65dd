"""A directory of shards, written and read by torch.distributed.checkpoint and checked before it loads.

A directory holds the files of ``torch.distributed.checkpoint`` (``.metadata`` and one ``.distcp`` file per
rank), the rest of the checkpoint (``meta.pt``) and a manifest, which is written last. Torch and Lightning
can read it too. Each entry of a ``.distcp`` file is written by ``torch.save``, with torch's checksums.
"""

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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.entries import DirectoryReader, PlainDataPlanner, part
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
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
    copied,
    empty_on_host,
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
"""File of everything but the shards (loops, callbacks, hyperparameters), under Lightning's name for it."""

MANIFEST = "manifest.json"
"""File that names the folder of the other files within the directory, and the checksum of ``.metadata``."""

METADATA = ".metadata"
_FORMAT = "lightning_automodel checkpoint, version 2"


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
        manifest = {"format": _FORMAT, "folder": valid, "crc32": _checksum(paths.read_file(table))}
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
    return shards, rest


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
            self._manifest = _manifest(path)
            self._folder, self._metadata = _open_table(path, self._manifest)
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
        if _manifest(self.path) != self._manifest:
            raise CheckpointError("another checkpoint took its place while it was read: load it again")


def is_shard_directory(path: str) -> bool:
    """Whether the directory at ``path`` holds shards, from this package or another."""
    filesystem, place = url_to_fs(path)
    return any(filesystem.exists(f"{place}/{name}") for name in (MANIFEST, METADATA))


def _manifest(path: str) -> bytes | None:
    """Content of a directory's manifest, different in each save; None if another program wrote it."""
    filesystem, place = url_to_fs(f"{path}/{MANIFEST}")
    if not filesystem.exists(place):
        return None
    return paths.read_file(f"{path}/{MANIFEST}")


def _open_table(path: str, manifest: bytes | None) -> tuple[str, Metadata]:
    """The folder of the files, and ``.metadata``; raises CheckpointError if that is missing or damaged."""
    folder = path
    crc32 = None
    if manifest is not None:
        try:
            content = json.loads(manifest)
            is_known = content["format"] == _FORMAT
            within = content["folder"]
            crc32 = content["crc32"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({len(manifest)} bytes)") from error
        if not is_known:
            raise CheckpointError(
                f"{MANIFEST} does not say {_FORMAT!r}: load it with the release that wrote it"
            )
        if within:
            folder = paths.member(path, within)
    table = paths.read_file(f"{folder}/{METADATA}")
    if crc32 not in (None, _checksum(table)):
        raise CheckpointError(
            f"{METADATA} has changed since it was written: its CRC-32 is {_checksum(table)}, in {MANIFEST}"
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


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
