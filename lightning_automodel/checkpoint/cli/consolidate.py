"""A directory of shards becomes one file, as Lightning's other strategies write it, without holding it in memory.

torch.save first writes an archive with holes for the tensors, which are then filled one by one.
"""

import io
import operator
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import reduce
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_automodel import torch_internals
from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.reading import TensorInfo
from lightning_automodel.checkpoint.sharded import ShardDirectory
from lightning_automodel.checkpoint.single_file import add_checksum, new_file
from lightning_automodel.checkpoint.splitting import in_portions
from lightning_automodel.checkpoint.state_dict import MODEL, is_optimizer_key, optimizer_key

_AT_ONCE = 1 << 22
_ENTRY_SIZE, _CRC_AT, _LENGTHS_AT = 46, 16, 28

Path = tuple[str | int, ...]
"""Keys, from the outermost."""


def consolidate(path: str, out: str, weights_only: bool | None, progress: Callable[[int, int], None]) -> None:
    """Write a checkpoint as one file: ``state_dict``, ``optimizer_states`` and the rest. Not a collective.

    Optimizer states keep the names of parameters as ids, which torch's optimizers take by their order. Beside the
    largest tensor and one rank's shard of it, the process holds some 4 MB.

    Args:
        path: A directory of shards.
        out: A local file that is not there yet; it appears when all of it is on disk.
        weights_only: False runs code that the checkpoint may hold.
        progress: Called with the bytes of tensors written so far, and of all.

    Raises:
        CheckpointError: If the checkpoint is damaged or no directory, or ``out`` cannot be written.
    """
    target = _free_file(path, out)
    shards = ShardDirectory(path, weights_only, alone=True)
    tensors = _tensors(shards)
    paths = {name: _final_path(shards.metadata.planner_data[name]) for name in tensors}
    tree = _without_tensors(shards)
    others = _storages(tree)
    with torch_internals.FakeTensorMode():
        for name, info in tensors.items():
            _put(tree, paths[name], torch.empty(info.size, dtype=info.dtype))
    with new_file(str(target)) as file:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(tree, file)
        file.flush()
        file.seek(0)
        holes = _Holes(file, weights_only is not False)
        _fill(holes, shards, paths, tensors, progress)
        holes.fill_others(others)
        holes.close()
        add_checksum(file)


def _free_file(path: str, out: str) -> pathlib.Path:
    if not paths.is_directory(path):
        raise CheckpointError(f"{path} is no directory of shards: there is nothing to consolidate")
    if not paths.is_local(out):
        raise CheckpointError(f"{out} is not local: consolidate to a local file, and upload that")
    target = pathlib.Path(paths.normal(out))
    if target.exists():
        raise CheckpointError(f"{target} exists: remove it, or choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _tensors(shards: ShardDirectory) -> dict[str, TensorInfo]:
    """All tensors by flattened name."""
    return {
        name: TensorInfo(entry.size, entry.properties.dtype)
        for name, entry in shards.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _final_path(path: Path) -> Path:
    """Where in the file an entry goes, by where it is in the directory."""
    first, *others = path
    if first == MODEL:
        return path
    if is_optimizer_key(str(first)):
        return "optimizer_states", int(str(first).rpartition("_")[2]), *others
    return (first, *others)


def _without_tensors(shards: ShardDirectory) -> dict[str, Any]:
    """The checkpoint as Lightning makes it; one of weights alone has no ``optimizer_states``, and no schedules."""
    tree = {**shards.rest, MODEL: shards.objects()}
    states = _optimizers_without_tensors(shards)
    return {**tree, "optimizer_states": states} if states or "lr_schedulers" in tree else tree


def _optimizers_without_tensors(shards: ShardDirectory) -> list[dict[str, Any]]:
    """Settings of parameter groups, and the rest of the optimizers' states that is no tensor."""
    objects: dict[str, Any] = {}
    for name, path in shards.metadata.planner_data.items():
        entry = shards.metadata.state_dict_metadata[name]
        if is_optimizer_key(str(path[0])):
            objects.setdefault(str(path[0]), {})
            if not isinstance(entry, TensorStorageMetadata):
                torch_internals.set_element(objects, path, None)
    shards.read_into(objects)
    states = [objects[optimizer_key(index)] for index in range(len(objects))]
    return [{"state": {}, "param_groups": [], **state} for state in states]


def _put(tree: dict[str, Any], path: Path, tensor: Tensor) -> None:
    if path[0] in (MODEL, "optimizer_states"):
        torch_internals.set_element(tree, path, tensor)
    else:
        _state_at(tree, str(path[0]))[path[1]] = tensor


def _at(tree: dict[str, Any], path: Path) -> Tensor:
    if path[0] in (MODEL, "optimizer_states"):
        return _below(tree, path)
    return _state_at(tree, str(path[0]))[path[1]]


def _below(tree: Any, path: Path) -> Any:
    return reduce(operator.getitem, path, tree)


def _state_at(tree: dict[str, Any], place: str) -> dict[Any, Any]:
    """The dict at a place as :func:`~lightning_automodel.checkpoint.state_dict.split_shards` names them (``"a/b"``)."""
    for key, value in tree.items():
        if key == place:
            return value
        if isinstance(value, dict) and place.startswith(f"{key}/"):
            return _state_at(value, place.removeprefix(f"{key}/"))
    raise CheckpointError(f"there are shards for {place}, which the rest of the checkpoint has no place for")


class _Holes:
    """An archive of ``torch.save`` without the content of its storages, to be filled.

    Args:
        file: Open for reading and writing.
        weights_only: As for ``torch.load``.
    """

    def __init__(self, file: IO[bytes], weights_only: bool) -> None:
        self._file = file
        with torch_internals.FakeTensorMode():
            self.tree = torch.load(file, weights_only=weights_only)
        file.seek(0)
        records = torch_internals.storage_records(torch.PyTorchFileReader(file))
        self._names = {offset: name for name, offset in records.items()}
        self._crcs: dict[str, int] = {}

    def fill(self, offset: int, content: memoryview | bytes) -> None:
        """Write what belongs at ``offset``."""
        self._file.seek(offset)
        self._file.write(content)
        self._crcs[self._names[offset]] = zlib.crc32(content)

    def fill_others(self, contents: list[bytes]) -> None:
        """Write what is left, in the order in which ``torch.save`` met it."""
        left = [offset for offset, name in self._names.items() if name not in self._crcs]
        for offset, content in zip(left, contents, strict=True):
            self.fill(offset, content)

    def close(self) -> None:
        """Write the checksums of what was filled into the archive's directory."""
        archive = zipfile.ZipFile(self._file)
        position = archive.start_dir
        for entry in archive.infolist():
            self._file.seek(position)
            header = self._file.read(_ENTRY_SIZE)
            name = entry.filename.partition("/")[2]
            if name in self._crcs:
                self._file.seek(position + _CRC_AT)
                self._file.write(struct.pack("<L", self._crcs[name]))
            position += _ENTRY_SIZE + sum(struct.unpack_from("<3H", header, _LENGTHS_AT))


def _fill(
    holes: _Holes,
    shards: ShardDirectory,
    paths: dict[str, Path],
    tensors: dict[str, TensorInfo],
    progress: Callable[[int, int], None],
) -> None:
    """Read the shards, and write each tensor in its place."""
    sizes = {name: info.num_bytes for name, info in tensors.items()}
    written, total = 0, sum(sizes.values())
    for names in in_portions(sizes, _AT_ONCE):
        read: dict[str, Any] = {}
        for name in names:
            place = shards.metadata.planner_data[name]
            torch_internals.set_element(read, place, torch.empty(tensors[name].size, dtype=tensors[name].dtype))
        shards.read_into(read)
        for name in names:
            tensor = _below(read, shards.metadata.planner_data[name])
            written += sizes[name]
            holes.fill(torch_internals.offset_in_file(_at(holes.tree, paths[name])), _content(tensor))
        progress(written, total)


def _content(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _storages(tree: dict[str, Any]) -> list[bytes]:
    """Content of the tensors in ``tree``, in the order in which ``torch.save`` meets them."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    stream.seek(0)
    reader = torch.PyTorchFileReader(stream)
    return [reader.get_record(name) for name in torch_internals.storage_records(reader)]
