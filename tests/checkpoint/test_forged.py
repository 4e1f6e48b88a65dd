"""Forged and badly written checkpoints: each reader refuses them, in one line and within a second."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.reading import read_directory
from lightning_automodel.checkpoint.sharded import MANIFEST
from lightning_automodel.checkpoint.tables import _cover_once
from tests.checkpoint.test_cli import MODEL, inspected, save_shards

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "state_dict.model.weight"
NOT_COVERED = "chunks of state_dict.model.weight do not cover its shape"


def chunk(*box: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[:2]), torch.Size(box[2:]))


def of_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the table of the shards."""

    def forge(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return forge


def with_chunks(*boxes: ChunkStorageMetadata, size: tuple[int, ...] | None = None) -> Callable[[Path], None]:
    """Let the table say that a tensor has these chunks, all in the bytes of its only one."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[NAME]
        place = metadata.storage_data[MetadataIndex(NAME, torch.Size([0, 0]))]
        entry.chunks = list(boxes)
        entry.size = torch.Size(size or entry.size)
        metadata.storage_data.update({MetadataIndex(NAME, each.offsets): place for each in boxes})

    return of_metadata(change)


def without_place(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex(NAME, torch.Size([0, 0]))]


def negative_place(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(NAME, torch.Size([0, 0]))].offset = -9


def put(name: str, content: Any) -> Callable[[Path], None]:
    """Write another content to a file of a directory."""

    def forge(path: Path) -> None:
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            torch.save(content, path / name)

    return forge


WHOLE = chunk(0, 0, 3, 4)
DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no chunk": (with_chunks(), NOT_COVERED),
    "half": (with_chunks(chunk(0, 0, 3, 2)), NOT_COVERED),
    "hole": (with_chunks(chunk(0, 0, 1, 4), chunk(2, 0, 1, 4)), NOT_COVERED),
    "out of bounds": (with_chunks(chunk(0, 0, 3, 4), chunk(3, 0, 1, 4)), NOT_COVERED),
    "too large": (with_chunks(chunk(0, 0, 4, 4)), NOT_COVERED),
    "negative": (with_chunks(chunk(-1, 0, 4, 4)), NOT_COVERED),
    "twice": (with_chunks(WHOLE, WHOLE), NOT_COVERED),
    "overlap and hole": (with_chunks(chunk(0, 0, 2, 3), chunk(1, 1, 2, 3)), NOT_COVERED),
    "other rank": (with_chunks(ChunkStorageMetadata(torch.Size([0]), torch.Size([12]))), NOT_COVERED),
    "no bytes": (of_metadata(without_place), ".metadata is damaged (KeyError"),
    "bytes before the file": (of_metadata(negative_place), ".metadata is damaged (ValueError"),
    "2**50": (with_chunks(chunk(0, 0, 2**25, 2**25), size=(2**25, 2**25)), "has shape [33554432, 33554432], and"),
    "planner_data": (of_metadata(lambda metadata: setattr(metadata, "planner_data", [])), ".metadata is damaged ("),
    "list": (put("meta.pt", [1]), "meta.pt holds a list"),
    "string": (put("meta.pt", "text"), "meta.pt holds a str"),
    "extra state": (put("meta.pt", {"lightning_automodel_extra_state": 3}), "TypeError"),
}
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "list": (lambda path: torch.save([1], path), "it has no 'state_dict'"),
    "string": (lambda path: torch.save("text", path), "it has no 'state_dict'"),
    "before torch 1.6": (lambda path: path.write_bytes(pickle.dumps(1) * 4), "not what torch.save has written since"),
    "no pickle": (lambda path: path.write_bytes(b"hello"), "not what torch.save has written"),
}


def write_manifest(path: Path) -> None:
    """The manifest that belongs to the table, as whoever forges that would write it."""
    content = json.loads((path / MANIFEST).read_bytes())
    content["crc32"] = f"{zlib.crc32((path / '.metadata').read_bytes()):08x}"
    (path / MANIFEST).write_text(json.dumps(content))


def check_commands(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """Each ends with status 1, one line that holds ``message``, and no file left."""
    out, started = str(path.parent / "out"), time.process_time()
    for verify in ([], ["--verify"]):
        (report,) = inspected(capsys, str(path), *verify, status=1)["checkpoints"]
        assert message in report["damage"]
    commands = [["export", str(path), out, "--key", "model"], ["consolidate", str(path), out]]
    for command in commands if path.is_dir() else commands[:1]:
        assert main(command) == 1
        printed = capsys.readouterr()
        assert message in printed.err
        assert (printed.err.count("\n"), printed.out) == (1, "")
    assert time.process_time() - started < len(commands) + 2, "a second each"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("case", DIRECTORIES)
def test_forged_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """By the command line and by ``load_from_checkpoint``; checksums match whatever was forged."""
    forge, message = DIRECTORIES[case]
    path = save_shards(tmp_path / "a.ckpt")
    forge(path)
    write_manifest(path)
    check_commands(path, capsys, message)
    with pytest.raises(CheckpointError, match="Cannot load") as raised:
        read_directory(path, None, None)
    assert message in str(raised.value)


@pytest.mark.parametrize("case", FILES)
def test_forged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    forge, message = FILES[case]
    forge(tmp_path / "a.ckpt")
    check_commands(tmp_path / "a.ckpt", capsys, message)


def test_huge_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One element that stands for 2**50 of them."""
    torch.save({"state_dict": {"model.a": torch.zeros(1).expand(2**50)}}, tmp_path / "a.ckpt")
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--key", "model"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "a.ckpt: RuntimeError: " in error


def test_terminal_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are not obeyed."""
    torch.save({"state_dict": MODEL, "\x1b[2J\x9b1m\nform: x": 1}, tmp_path / "a.ckpt")
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert 'rest:         ["\\u001b[2J\\u009b1m\\nform: x"]' in capsys.readouterr().out.splitlines()
    torch.save({"state_dict": {"\x1b]0;x\x07a.b": torch.ones(2)}}, tmp_path / "b.ckpt")
    assert main(["export", str(tmp_path / "b.ckpt"), str(tmp_path / "out")]) == 1
    assert "\\x1b]0;x\\x07a." in capsys.readouterr().err


def test_cover_once() -> None:
    """Compared with counting each element, on random boxes of up to three dimensions."""
    generator, seen = torch.Generator().manual_seed(0), set()

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    for _ in range(400):
        size = tuple(1 + draw(3) for _ in range(draw(4)))
        boxes = _tiled(size, draw)
        if boxes and draw(2):
            offsets, sizes = boxes[draw(len(boxes))]
            boxes[draw(len(boxes))] = (offsets, tuple(draw(each + 1) for each in sizes))
        count = torch.zeros(size, dtype=torch.int)
        for offsets, sizes in boxes:
            count[tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))] += 1
        expected = bool((count == 1).all())
        seen.add(expected)
        assert _cover_once(size, boxes) == expected
    assert seen == {True, False}


def _tiled(size: tuple[int, ...], draw: Callable[[int], int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that cover ``size``, cut at random."""
    boxes = [((0,) * len(size), size)]
    for _ in range(draw(4) if size else 0):
        offsets, sizes = boxes.pop(0)
        dim = draw(len(size))
        at = draw(sizes[dim] + 1)
        first = (*sizes[:dim], at, *sizes[dim + 1 :])
        second = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
        boxes += [(offsets, first), ((*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), second)]
    return boxes
