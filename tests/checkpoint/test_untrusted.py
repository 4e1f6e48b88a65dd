"""Checkpoints that somebody else has written, or writes at this moment: never followed, run or waited for."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.reading import read_directory
from lightning_automodel.checkpoint.shard_directory import MANIFEST, ShardDirectory, open_checkpoint
from tests.checkpoint.test_cli import CLASS, MODEL, Custom, refused, save_shards

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_refused(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert message in refused(capsys, str(path))
    with pytest.raises(CheckpointError) as raised:
        read_directory(str(path), None, None)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a\\b"])
def test_names_that_lead_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """By the manifest; those of the table are below."""
    path = save_shards(tmp_path / "a.ckpt")
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "folder": name}))
    assert_refused(path, capsys, f"it refers to {name!r}, which is not the name of a file in the checkpoint")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", ".metadata", MANIFEST])
def test_what_is_no_regular_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    """Reading a fifo or a device would never end."""
    file = save_shards(tmp_path / "a.ckpt") / name
    file.rename(tmp_path / "secret")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    assert_refused(tmp_path / "a.ckpt", capsys, f"{name} is not a regular file")


@pytest.mark.parametrize("content", ["[]", "{}", '{"crc32": 1}', "[" * 200_000])
def test_other_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = save_shards(tmp_path / "a.ckpt")
    (path / MANIFEST).write_text(content)
    assert_refused(path, capsys, f"{path}: ")


def test_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_shards(tmp_path / "a.ckpt")
    content = (path / MANIFEST).read_text()
    assert "version 3" in content
    for other in ("version 2", "version 4"):
        (path / MANIFEST).write_text(content.replace("version 3", other))
        assert_refused(path, capsys, f"manifest.json says 'lightning_automodel checkpoint, {other}'")
        assert_refused(
            path, capsys, "let the version that wrote it make one file, which this one reads (python"
        )


def _replace_entry(path: Path, name: str, value: Any) -> None:
    """Let an entry of the shards be ``value``, with manifest and table as they should be."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    file = path / place.relative_path
    place.offset = file.stat().st_size
    with open(file, "ab") as stream:
        torch.save(value, stream)
        place.length = stream.tell() - place.offset
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / MANIFEST).unlink()


@pytest.mark.parametrize("value", [Custom(), "text"])
def test_a_shard_that_holds_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    """In place of a tensor: no checksum tells, and reading it ends in one line."""
    path = save_shards(tmp_path / "a.ckpt")
    _replace_entry(path, "state_dict.model.weight", value)
    assert main(["export", str(path), str(tmp_path / "out"), *CLASS]) == 1
    error = capsys.readouterr().err
    assert (error.startswith("error: "), error.count("\n")) == (True, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("value", [torch.zeros(1, 4), torch.zeros(3, 4, dtype=torch.float64)])
def test_a_shard_of_another_shape(tmp_path: Path, value: torch.Tensor) -> None:
    """Would be broadcast, or cast, into the whole."""
    path = save_shards(tmp_path / "a.ckpt")
    _replace_entry(path, "state_dict.model.weight", value)
    with pytest.raises(CheckpointError, match=r"state_dict\.model\.weight in __0_0\.distcp"):
        read_directory(path, None, None)


def test_replaced_while_it_is_checked(tmp_path: Path, mocker: Any) -> None:
    """A reader of last.ckpt hears of that, and of no damage."""
    path = save_shards(tmp_path / "last.ckpt", epoch=0)
    check = ShardDirectory._check_unreplaced

    def replace_then_check(shards: ShardDirectory) -> None:
        mocker.stopall()
        save_shards(path, epoch=1)
        check(shards)

    mocker.patch.object(ShardDirectory, "_check_unreplaced", replace_then_check)
    with pytest.raises(
        CheckpointError, match="another checkpoint took its place while it was read: load it again"
    ):
        ShardDirectory(str(path), None).check()
    assert open_checkpoint(str(path), None)[0]["epoch"] == 1


def test_replaced_after_it_was_opened(tmp_path: Path) -> None:
    """Old tensors are not mixed with new ones."""
    path = save_shards(tmp_path / "last.ckpt")
    shards = ShardDirectory(str(path), None)
    save_shards(path)
    with pytest.raises(
        CheckpointError, match="another checkpoint took its place while it was read: load it again"
    ):
        shards.read_all(shards.tree)


# --- Forged or badly written ------------------------------------------------------------------------------------------


DIRECTORIES: dict[str, tuple[Any, str]] = {
    "list": ([1], "it has no 'state_dict'"),
    "no model": ({"state_dict": 3}, "it has no 'state_dict'"),
    "other entries": (
        {"state_dict": {"model.weight": torch.empty(2, device="meta")}},
        ".metadata and meta.pt do not agree on state_dict.model.weight",
    ),
}
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "is not a regular file"),
    "list": (lambda path: torch.save([1], path), "it has no 'state_dict'"),
    "before torch 1.6": (
        lambda path: path.write_bytes(pickle.dumps(1) * 4),
        "not what torch.save has written since",
    ),
    "no pickle": (lambda path: path.write_bytes(b"hello"), "not what torch.save has written"),
}


def check_commands(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """Each ends with status 1, one line that holds ``message``, and no file left."""
    out = str(path.parent / "out")
    started = time.process_time()
    assert message in refused(capsys, str(path))
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
    """By the command line and by ``load_from_checkpoint``."""
    content, message = DIRECTORIES[case]
    path = save_shards(tmp_path / "a.ckpt")
    torch.save(content, path / "meta.pt")
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
    torch.save({"state_dict": MODEL, "\x1b[2J\x9b1m\nform: x": 1}, tmp_path / "a.ckpt")
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert '"\\u001b[2J\\u009b1m\\nform: x"' in capsys.readouterr().out
    forged = {"state_dict": {"\x1b]0;x\x07a.b": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    torch.save(forged, tmp_path / "b.ckpt")
    assert main(["export", str(tmp_path / "b.ckpt"), str(tmp_path / "out"), *CLASS]) == 1
    assert "\\x1b]0;x\\x07a." in capsys.readouterr().err
