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

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.reading import read_directory
from lightning_automodel.checkpoint.shard_directory import MANIFEST
from tests.checkpoint.test_cli import CLASS, MODEL, inspected, save_shards

pytestmark = pytest.mark.filterwarnings("ignore")


def of_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the table of the shards."""

    def forge(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return forge


def put(name: str, content: Any) -> Callable[[Path], None]:
    """Write another content to a file of a directory."""

    def forge(path: Path) -> None:
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            torch.save(content, path / name)

    return forge


DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "list": (put("meta.pt", [1]), "meta.pt has no 'state_dict'"),
    "string": (put("meta.pt", "text"), "meta.pt has no 'state_dict'"),
    "no model": (put("meta.pt", {"state_dict": 3}), "meta.pt has no 'state_dict'"),
    "other entries": (
        put("meta.pt", {"state_dict": {"model.weight": torch.empty(2, device="meta")}}),
        ".metadata and meta.pt do not agree on state_dict.model.weight",
    ),
}
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "list": (lambda path: torch.save([1], path), "it has no 'state_dict'"),
    "string": (lambda path: torch.save("text", path), "it has no 'state_dict'"),
    "before torch 1.6": (
        lambda path: path.write_bytes(pickle.dumps(1) * 4),
        "not what torch.save has written since",
    ),
    "no pickle": (lambda path: path.write_bytes(b"hello"), "not what torch.save has written"),
}


def write_manifest(path: Path) -> None:
    """The manifest that belongs to the table, as whoever forges that would write it."""
    content = json.loads((path / MANIFEST).read_bytes())
    content["crc32"] = f"{zlib.crc32((path / '.metadata').read_bytes()):08x}"
    (path / MANIFEST).write_text(json.dumps(content))


def check_commands(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """Each ends with status 1, one line that holds ``message``, and no file left."""
    out = str(path.parent / "out")
    started = time.process_time()
    assert message in inspected(capsys, str(path), status=1)["problem"]
    commands = [["export", str(path), out, *CLASS], ["consolidate", str(path), out]]
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


def test_terminal_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are not obeyed."""
    torch.save({"state_dict": MODEL, "\x1b[2J\x9b1m\nform: x": 1}, tmp_path / "a.ckpt")
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert '"\\u001b[2J\\u009b1m\\nform: x"' in capsys.readouterr().out
    forged = {"state_dict": {"\x1b]0;x\x07a.b": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    torch.save(forged, tmp_path / "b.ckpt")
    assert main(["export", str(tmp_path / "b.ckpt"), str(tmp_path / "out"), *CLASS]) == 1
    assert "\\x1b]0;x\\x07a." in capsys.readouterr().err
