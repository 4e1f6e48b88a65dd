"""Checksums of what is written to streams, and of what is read from them."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BLOCK = 1 << 22


def crc32_of(stream: Any, size: int | None = None) -> int:
    """CRC-32 of the next ``size`` bytes of a binary stream; None for all that is left of it."""
    value, left = 0, size
    while left != 0 and (block := stream.read(_BLOCK if left is None else min(left, _BLOCK))):
        value = zlib.crc32(block, value)
        left = None if left is None else left - len(block)
    return value


class RecordedStream:
    """A binary stream for writing from its start to its end.

    Attributes:
        size: Bytes written so far.
        crc32: Their checksum.
        error: The first error of writing. ``torch.save`` lets it be followed by one of its own, which explains nothing.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            self.error = self.error or error
            raise
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        return len(view)

    @contextmanager
    def telling_first_error(self) -> Iterator[None]:
        """Raise :attr:`error` in place of the RuntimeError that it led to in the block."""
        try:
            yield
        except RuntimeError:
            if self.error is not None:
                raise self.error from None
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
