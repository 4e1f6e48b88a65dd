"""The list of a checkpoint's files tells damage to itself and to them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.manifest import FileRecord, Manifest, checksum

FILES = LocalFileSystem()


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    generator = random.Random(1)
    records = {}
    for name in "abc":
        (tmp_path / name).write_bytes(generator.randbytes(1000))
        records[name] = FileRecord(1000, checksum(FILES, str(tmp_path / name)))
    return Manifest("id", 2, "", records)


def test_comes_back(manifest: Manifest) -> None:
    """Through its bytes."""
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_any_changed_bit_is_found(manifest: Manifest) -> None:
    """In the manifest itself: all of its bits, one after the other, but for those that change a space into another."""
    data = manifest.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                read = Manifest.from_bytes(bytes(changed))
            except CheckpointError:
                continue
            assert read == manifest


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_cut_off(manifest: Manifest, cut: int) -> None:
    """A short one is damaged."""
    with pytest.raises(CheckpointError, match=f"damaged \\({cut} bytes"):
        Manifest.from_bytes(manifest.to_bytes()[:cut])


def test_newer_version(manifest: Manifest) -> None:
    """Says what to install."""
    import json

    from lightning_automodel.checkpoint.manifest import checksum_of_json

    content = json.loads(manifest.to_bytes())
    content.pop("crc32")
    content["version"] = 2
    content["crc32"] = checksum_of_json(content)
    with pytest.raises(CheckpointError, match="has version 2, this release"):
        Manifest.from_bytes(json.dumps(content).encode())


def test_shares_together_read_everything(manifest: Manifest, tmp_path: Path) -> None:
    """Each file is read by one of the ranks, and its defect found by that one alone; a size by all."""
    content = bytearray((tmp_path / "b").read_bytes())
    content[500] ^= 4
    (tmp_path / "b").write_bytes(content)
    failures = []
    for share in range(3):
        try:
            manifest.check(FILES, str(tmp_path), (), share, 3)
        except CheckpointError as error:
            failures.append(str(error))
    (message,) = failures
    assert "b has changed since it was written (CRC-32" in message
    (tmp_path / "b").write_bytes(content[:-1])
    for share in range(3):
        with pytest.raises(CheckpointError, match="b has 999 bytes instead of 1000"):
            manifest.check(FILES, str(tmp_path), (), share, 3)


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"text"', b"{}", b'{"crc32": 1}'])
def test_other_json(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Manifest.from_bytes(content)
