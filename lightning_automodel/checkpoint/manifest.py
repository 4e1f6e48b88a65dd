"""What makes a directory of shards complete: the names, sizes and checksums of its files, written last."""

import dataclasses
import json
import zlib
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.streams import crc32_of

MANIFEST = "manifest.json"
_FORMAT = "lightning_automodel checkpoint"
_VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """One file.

    Attributes:
        size: Bytes.
        crc32: Checksum of its content, eight hexadecimal digits.
    """

    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but the manifest itself.

    Attributes:
        save_id: Different for each save.
        world_size: Ranks that wrote it.
        folder: Where the files are within the directory; empty for the directory itself.
        files: By name, relative to ``folder``.
    """

    save_id: str
    world_size: int
    folder: str
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        """As it is written, with a checksum of its own."""
        content = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        return json.dumps({**content, "crc32": _checksum_of_json(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """The inverse of :meth:`to_bytes`.

        Raises:
            CheckpointError: If it is damaged, or of a newer version.
        """
        try:
            content = json.loads(data)
            told = content.pop("crc32")
            matches = told == _checksum_of_json(content) and content.pop("format") == _FORMAT
            version = content.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError):
            matches = False
        if not matches:
            raise CheckpointError(f"{MANIFEST} is damaged ({len(data)} bytes)")
        if version != _VERSION:
            raise CheckpointError(
                f"{MANIFEST} has version {version}, this release of lightning_automodel reads version {_VERSION}:"
                " install the release that wrote it, or a newer one"
            )
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        return cls(files=files, **content)

    def check(self, filesystem: AbstractFileSystem, folder: str, share: int, shares: int) -> None:
        """Compare the files with what was written: all sizes, and the content of one in ``shares`` of them.

        Args:
            filesystem: Where ``folder`` is.
            folder: The checkpoint.
            share: Which of the shares, from 0.
            shares: In how many the work of reading is split; 0 to compare sizes alone.

        Raises:
            CheckpointError: Names the files that are missing, cut off or changed.
        """
        sizes = {name: record.size for name, record in self.files.items()}
        mine = set(split_evenly(sizes, shares)[share]) if shares else set()
        defects = [
            f"{name} {defect}"
            for name, record in self.files.items()
            if (defect := _defect(filesystem, f"{folder}/{name}", record, read=name in mine))
        ]
        if defects:
            raise CheckpointError(_listed(defects))


def split_evenly(sizes: dict[str, int], shares: int) -> list[list[str]]:
    """Names in ``shares`` lists of about equal total size, the largest first; the same on every rank."""
    lists: list[list[str]] = [[] for _ in range(shares)]
    totals = [0] * shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        lists[smallest].append(name)
        totals[smallest] += sizes[name]
    return lists


def checksum(filesystem: AbstractFileSystem, path: str) -> str:
    """CRC-32 of a file's content, eight hexadecimal digits."""
    # Local files are read in blocks as large as asked for; elsewhere the file system knows best.
    unbuffered = {"buffering": 0} if isinstance(filesystem, LocalFileSystem) else {}
    with filesystem.open(path, "rb", **unbuffered) as stream:
        return f"{crc32_of(stream):08x}"


def _defect(filesystem: AbstractFileSystem, path: str, record: FileRecord, read: bool) -> str | None:
    try:
        size = filesystem.size(path)
        if size != record.size:
            return f"has {size} bytes instead of {record.size}"
        if read and (found := checksum(filesystem, path)) != record.crc32:
            return f"has changed since it was written (CRC-32 {found} instead of {record.crc32})"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    return None


def _listed(defects: list[str]) -> str:
    more = f", and {len(defects) - 5} more files" if len(defects) > 5 else ""
    return ", ".join(defects[:5]) + more


def _checksum_of_json(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
