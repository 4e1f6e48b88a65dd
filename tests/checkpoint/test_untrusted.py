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
from lightning_automodel.checkpoint.reading import load_any
from lightning_automodel.checkpoint.shard_directory import MANIFEST, ShardDirectory, open_checkpoint
from tests.checkpoint.test_cli import CLASS, MODEL, Custom, Runs, refused, save_shards

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_refused(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """By each command, with status 1, one line that holds ``message``, and no file left; and by a load."""
    out = str(path.parent / "out")
    started = time.process_time()
    assert message in refused(capsys, str(path))
    commands = [["export", str(path), out, *CLASS]]
    if path.is_dir():
        commands.append(["consolidate", str(path), out])
        with pytest.raises(CheckpointError) as raised:
            load_any(str(path), None, None)
        assert message in str(raised.value)
    for command in commands:
        assert main(command) == 1
        printed = capsys.readouterr()
        assert message in printed.err.encode().decode("unicode_escape")
        assert (printed.err.count("\n"), printed.out) == (1, "")
    assert time.process_time() - started < len(commands) + 2, "a second each"
    assert not (path.parent / "out").exists()


def _with_manifest(**changed: Any) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        content = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**content, **changed}))

    return forge


def _text(content: str) -> Callable[[Path], None]:
    return lambda path: (path / MANIFEST).write_text(content)


def _instead(make: Callable[[Path], Any], name: str) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        (path / name).rename(path.parent / "secret")
        make(path / name)

    return forge


def _code(name: str) -> Callable[[Path], None]:
    """In a directory without checksums."""

    def forge(path: Path) -> None:
        (path / MANIFEST).unlink()
        with open(path / name, "wb") as file:
            write = pickle.dump if name == ".metadata" else torch.save
            write(Runs(path.parent / "mark"), file)

    return forge


def _rest(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path / "meta.pt")


DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"leads to {name}": (
            _with_manifest(folder=name),
            f"it refers to {name!r}, which is not the name of a file in the checkpoint",
        )
        for name in ("../secret", "/etc/hostname", "..", "a\\b")
    },
    **{
        # Reading a fifo or a device would never end.
        f"{kind} as {name}": (_instead(make, name), f"{name} is not a regular file")
        for kind, make in (
            ("fifo", os.mkfifo),
            ("device", lambda path: path.symlink_to("/dev/zero")),
            ("folder", Path.mkdir),
        )
        for name in ("__0_0.distcp", "meta.pt", ".metadata", MANIFEST)
    },
    **{
        f"manifest {content[:20]}": (_text(content), "a.ckpt: ")
        for content in ("[]", "{}", '{"crc32": 1}', "[" * 200_000)
    },
    **{
        f"version {number}": (
            _with_manifest(format=f"lightning_automodel checkpoint, version {number}"),
            f"manifest.json says 'lightning_automodel checkpoint, version {number}', and this version of"
            " lightning_automodel reads 'lightning_automodel checkpoint, version 3': let the version that wrote it"
            " make one file, which this one reads (python",
        )
        for number in (2, 4)
    },
    "code in .metadata": (_code(".metadata"), "posix.mkdir"),
    "code in meta.pt": (_code("meta.pt"), "posix.mkdir"),
    "list": (_rest([1]), "it has no 'state_dict'"),
    "no model": (_rest({"state_dict": 3}), "it has no 'state_dict'"),
}
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (os.mkfifo, "is not a regular file"),
    "list": (lambda path: torch.save([1], path), "it has no 'state_dict'"),
    "before torch 1.6": (
        lambda path: path.write_bytes(pickle.dumps(1) * 4),
        "not what torch.save has written since",
    ),
    "no pickle": (lambda path: path.write_bytes(b"hello"), "not what torch.save has written"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", DIRECTORIES)
def test_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """Forged or badly written: by the command line and by ``load_from_checkpoint``."""
    forge, message = DIRECTORIES[case]
    path = save_shards(tmp_path / "a.ckpt")
    forge(path)
    assert_refused(path, capsys, message)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(("name", "message"), [("model.weight", "Size mismatch"), ("other", "Missing key")])
def test_entries_of_another_save(tmp_path: Path, name: str, message: str) -> None:
    """Of another shape, or that no shards have: nothing is loaded."""
    path = save_shards(tmp_path / "a.ckpt")
    _rest({"state_dict": {name: torch.empty(2, device="meta")}})(path)
    with pytest.raises(CheckpointError, match=message):
        load_any(str(path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", FILES)
def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    forge, message = FILES[case]
    forge(tmp_path / "a.ckpt")
    assert_refused(tmp_path / "a.ckpt", capsys, message)


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
        load_any(path, None, None)


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


def test_terminal_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": MODEL, "epoch": "\x1b[2J\x9b1m\nform: x"}, tmp_path / "a.ckpt")
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert '"\\u001b[2J\\u009b1m\\nform: x"' in capsys.readouterr().out
    forged = {"state_dict": {"\x1b]0;x\x07a.b": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    torch.save(forged, tmp_path / "b.ckpt")
    assert main(["export", str(tmp_path / "b.ckpt"), str(tmp_path / "out"), *CLASS]) == 1
    assert "\\x1b]0;x\\x07a." in capsys.readouterr().err
