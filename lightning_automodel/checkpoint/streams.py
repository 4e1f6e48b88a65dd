"""Streams that sum up what is written to them."""

import zlib
from typing import Any


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
