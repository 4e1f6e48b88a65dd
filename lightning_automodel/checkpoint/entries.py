"""Opens the entries of a ``.distcp`` file, each a tensor from ``torch.save``, and reads them in blocks."""

import errno
import io
import os
import sys
import zipfile
from typing import IO, Any, cast

import torch
from torch import Tensor
from typing_extensions import override

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
