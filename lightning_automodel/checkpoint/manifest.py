"""The manifest, written last, makes a directory of shards complete: names, sizes and checksums of its files."""

import dataclasses
import json
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = "lightning_automodel checkpoint"
_VERSION = 1
_BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """One file: its size in bytes, and the checksum of its content, eight hexadecimal digits."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but the manifest itself.

    Attributes:
        save_id: Different for each save.
        world_size: Ranks that wrote it.
        folder: Where the files are within the directory; empty for the directory itself.
        files: Records by file name, relative to ``folder``.
    """

    save_id: str
    world_size: int
    folder: str
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        """Encode the manifest, with a checksum of its own."""
        content = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        return json.dumps({**content, "crc32": checksum_of_json(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """The inverse of :meth:`to_bytes`; raises CheckpointError if it is damaged, or of a newer version."""
        try:
            content = json.loads(data)
            crc32 = content.pop("crc32")
            if crc32 != checksum_of_json(content) or content.pop("format") != _FORMAT:
                raise ValueError("another checksum or format")
            if (version := content.pop("version")) != _VERSION:
                raise CheckpointError(
                    f"{MANIFEST} has version {version}, this release of lightning_automodel reads version {_VERSION}:"
                    " install the release that wrote it, or a newer one"
                )
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            return cls(files=files, **content)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({len(data)} bytes)") from error

    def check(
        self, filesystem: AbstractFileSystem, folder: str, needed: Collection[str], share: int, shares: int
    ) -> None:
        """Compare the files in ``folder`` with what was written: all sizes, and the content of one file in ``shares``.

        This process reads share number ``share``; with 0 shares, only sizes are compared. Raises
        :class:`CheckpointError`, which names files that are missing, cut off, changed, or ``needed`` and not listed.
        """
        # One file in `shares`, in the order of their sizes: about the same number of bytes for each rank.
        by_size = sorted(self.files, key=lambda name: (self.files[name].size, name))
        mine = set(by_size[share::shares]) if shares else set()
        defects = [
            f"{name} {defect}"
            for name, record in self.files.items()
            if (defect := _defect(filesystem, folder, name, record, read=name in mine))
        ]
        defects += [f"{name} is not listed in {MANIFEST}" for name in sorted(set(needed) - set(self.files))]
        if defects:
            more = f", and {len(defects) - 5} more files" if len(defects) > 5 else ""
            raise CheckpointError(", ".join(defects[:5]) + more)


def checksum(filesystem: AbstractFileSystem, path: str) -> str:
    """CRC-32 of a file's content, eight hexadecimal digits."""
    # Without a buffer, local files are read in blocks of this size; other file systems choose their own.
    unbuffered = {"buffering": 0} if isinstance(filesystem, LocalFileSystem) else {}
    value = 0
    with filesystem.open(path, "rb", **unbuffered) as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def checksum_of_json(content: dict[str, Any]) -> str:
    """CRC-32 of the content of a JSON file, whatever its layout."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _defect(filesystem: AbstractFileSystem, folder: str, name: str, record: FileRecord, read: bool) -> str | None:
    try:
        size = paths.size_of_file(filesystem, folder, name)
        if size != record.size:
            return f"has {size} bytes instead of {record.size}"
        if read and (found := checksum(filesystem, f"{folder}/{name}")) != record.crc32:
            return f"has changed since it was written (CRC-32 {found} instead of {record.crc32})"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    return None
