"""Opens the entries of a ``.distcp`` file, each a tensor from ``torch.save``, and reads them in blocks."""

import dataclasses
import errno
import io
import os
import sys
import zipfile
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.safe_load import load_plain_data
from lightning_automodel.internals import torch as torch_internals

BLOCK = 1 << 22
"""Bytes that are read or written at a time."""


class _Part(io.RawIOBase):
    """See :func:`part`."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = start + offset
        return self._position

    @override
    def read(self, size: int = -1) -> bytes:
        num_left = max(0, self._length - self._position)
        if size < 0 or size > num_left:
            size = num_left
        self._file.seek(self._offset + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data

    @override
    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def part(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """The ``length`` bytes of an open ``file`` from ``offset`` on, as a file that reads nothing ahead."""
    return cast(IO[bytes], _Part(file, offset, length))


def read_in_blocks(entry: IO[bytes], target: Tensor) -> bool:
    """Copy the tensor in ``entry`` into ``target``; False if only ``torch.load`` can read it, in one piece.

    Raises ``zipfile.BadZipFile`` if the checksum is wrong.
    """
    stored = torch.load(entry, map_location="meta", weights_only=True)
    is_plain = type(stored) is Tensor and stored.layout == torch.strided and not stored.is_quantized
    if not is_plain or stored.size() != target.size() or stored.dim() == 0:
        return False
    if not stored.is_contiguous() or stored.storage_offset() != 0 or stored.is_conj() or stored.is_neg():
        return False
    with zipfile.ZipFile(entry) as archive:
        records = {name.partition("/")[2]: name for name in archive.namelist()}
        if "byteorder" not in records or archive.read(records["byteorder"]) != sys.byteorder.encode():
            return False
        if "data/0" not in records or archive.getinfo(records["data/0"]).file_size != stored.nbytes:
            return False
        with archive.open(records["data/0"]) as content:
            if target.is_contiguous():
                target = target.view(-1)
            _fill(target, content, stored.dtype)
    return True


def _fill(target: Tensor, content: IO[bytes], dtype: torch.dtype) -> None:
    """Fill ``target``, of one or more dimensions, with ``content`` of ``dtype``, a block of rows at a time."""
    row_bytes = target[:1].numel() * dtype.itemsize
    num_rows = max(1, BLOCK // max(1, row_bytes))
    buffer = bytearray(min(num_rows, len(target)) * row_bytes)
    with torch.no_grad():
        for rows in target.split(num_rows):
            view = memoryview(buffer)[: rows.numel() * dtype.itemsize]
            # The last read of the record compares its checksum.
            if content.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise zipfile.BadZipFile("an entry is cut off")
            rows.copy_(torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(rows.size()))


class DirectoryReader(torch_internals.FsspecReader):
    """Reads a directory with the given ``metadata``, large local entries block by block.

    torch would hold each entry twice: the content of the file, and the tensor that it is copied into.
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
        """Read an item if it can be read in blocks."""
        place = self._metadata.storage_data[item.storage_index]
        is_small = place.length <= 2 * BLOCK
        if not self._is_local or is_small or item.type != LoadItemType.TENSOR or place.transform_descriptors:
            return False
        if any(item.storage_offsets):
            return False
        target = planner.resolve_tensor(item).detach()
        with open(paths.member(self._folder, place.relative_path), "rb") as file:
            is_read = read_in_blocks(part(file, place.offset, place.length), target)
        if is_read:
            planner.commit_tensor(item, target)
        return is_read


class PlainDataPlanner(DefaultLoadPlanner):
    """Refuses objects that are not plain data; torch's own planner would load them."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self._weights_only:
            load_plain_data(value, f"entry {read_item.dest_index.fqn!r}", weights_only=True)
            value.seek(0)
        super().load_bytes(read_item, value)
