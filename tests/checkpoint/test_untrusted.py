"""Checkpoints that somebody else has written, or writes at this moment: never followed, run or waited for."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.manifest import MANIFEST, FileRecord, Manifest, checksum_of_json
from lightning_automodel.checkpoint.reading import open_model
from lightning_automodel.checkpoint.sharded import ShardDirectory
from tests.checkpoint.test_cli import MODEL, Custom, inspected, save_shards, save_whole

pytestmark = pytest.mark.filterwarnings("ignore")


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Change the manifest, with the checksum that belongs to it."""
    content = json.loads((path / MANIFEST).read_text())
    del content["crc32"]
    content.update(changes)
    (path / MANIFEST).write_text(json.dumps({**content, "crc32": checksum_of_json(content)}))


def files_of(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())["files"]


def assert_refused(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """By whatever opens checkpoints."""
    (report,) = inspected(capsys, str(path), "--verify", status=1)["checkpoints"]
    assert message in report["damage"]
    with pytest.raises(CheckpointError) as raised:
        ShardDirectory(str(path), None)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "", "a/b", "a\\b"])
def test_names_that_lead_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = save_shards(tmp_path / "a.ckpt")
    (tmp_path / "secret").write_text("secret")
    rewrite_manifest(path, files={**files_of(path), name: {"size": 6, "crc32": "0"}})
    assert_refused(path, capsys, f"it refers to {name!r}, which is not the name of a file in the checkpoint")
    if name:
        rewrite_manifest(path, folder=name)
        assert_refused(path, capsys, f"{MANIFEST} refers to {name!r}, which is not a folder of the checkpoint")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device", "link", "folder"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", ".metadata", MANIFEST])
def test_what_is_no_regular_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    """Reading a fifo or a device would never end."""
    file = save_shards(tmp_path / "a.ckpt") / name
    file.rename(tmp_path / "secret")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else tmp_path / "secret")
    assert_refused(tmp_path / "a.ckpt", capsys, f"{name} is not a regular file")


@pytest.mark.timeout(60)
def test_one_file_that_is_no_regular_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    for options in ([], ["--verify"]):
        (report,) = inspected(capsys, str(tmp_path / "a.ckpt"), *options, status=1)["checkpoints"]
        assert "it is not a regular file" in report["damage"]
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        open_model(str(tmp_path / "a.ckpt"), None)


def test_shards_of_other_programs_that_lead_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their table names the files."""
    path = tmp_path / "a.ckpt"
    dcp.save({"state_dict": dict(MODEL)}, checkpoint_id=path, no_dist=True)
    torch.save({}, path / "meta.pt")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(path, capsys, "it refers to '../__0_0.distcp', which is not the name of a file in the checkpoint")


@pytest.mark.parametrize("missing", [None, "__0_0.distcp", "meta.pt", ".metadata"])
def test_files_that_are_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str | None) -> None:
    """An empty list makes no checkpoint complete."""
    path = save_shards(tmp_path / "a.ckpt")
    listed = {name: record for name, record in files_of(path).items() if missing and name != missing}
    rewrite_manifest(path, files=listed)
    assert_refused(path, capsys, f"{missing or 'meta.pt'} is not listed in manifest.json")


def test_deep_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_shards(tmp_path / "a.ckpt")
    (path / MANIFEST).write_text("[" * 200_000)
    assert_refused(path, capsys, "manifest.json is damaged (200000 bytes)")


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
    manifest = Manifest.from_bytes((path / MANIFEST).read_bytes())
    contents = {each: (path / each).read_bytes() for each in manifest.files}
    files = {name: FileRecord(len(content), f"{zlib.crc32(content):08x}") for name, content in contents.items()}
    (path / MANIFEST).write_bytes(Manifest(manifest.save_id, 1, "", files).to_bytes())


@pytest.mark.parametrize("value", [Custom(), "text"])
def test_a_shard_that_holds_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    """In place of a tensor: no checksum tells, and it is not "complete, all content verified"."""
    path = save_shards(tmp_path / "a.ckpt")
    _replace_entry(path, "state_dict.model.weight", value)
    (report,) = inspected(capsys, str(path), "--verify", status=1)["checkpoints"]
    assert "a.ckpt: state_dict.model.weight in __0_0.distcp cannot be loaded: " in report["damage"]


def test_objects_that_need_trust_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They load with the user's consent alone."""
    path = save_shards(tmp_path / "a.ckpt")
    _replace_entry(path, "optimizer_0.param_groups.0.lr", Custom())
    for arguments, needed in (([], []), (["--verify"], ["tests.checkpoint.test_cli.Custom"])):
        (report,) = inspected(capsys, str(path), *arguments)["checkpoints"]
        assert (report["damage"], report["not_plain"]) == (None, needed)
    assert main(["inspect", "--verify", str(path)]) == 0
    assert 'not_plain:    ["tests.checkpoint.test_cli.Custom"]' in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="holds more than plain data"):
        ShardDirectory(str(path), None).read_into({"optimizer_0.param_groups.0.lr": None})


@pytest.mark.parametrize("content", [3, [3], [{}], [{"prefix": 3}], {"prefix": "model."}, "text", [{"config": {}}]])
@pytest.mark.parametrize("save", [save_shards, save_whole])
def test_malformed_descriptions(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any, content: Any) -> None:
    """Of Hugging Face models: one line, no traceback."""
    path = save(tmp_path / "a.ckpt", hugging_face=content)
    assert main(["export", str(path), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: Cannot export to ")
    assert error.endswith(
        "its 'hugging_face', which describes Hugging Face models, is not in the form that this release reads"
    )
    assert not (tmp_path / "out").exists()


def test_replaced_while_it_is_checked(tmp_path: Path, mocker: Any) -> None:
    """A reader of last.ckpt hears of that, and of no damage."""
    from lightning_automodel.checkpoint import sharded

    path = save_shards(tmp_path / "last.ckpt", epoch=0)
    check = sharded.check_files

    def replace_then_check(*args: Any) -> None:
        save_shards(path, epoch=1, more=list(range(1000)))
        check(*args)

    mocker.patch.object(sharded, "check_files", replace_then_check)
    with pytest.raises(CheckpointError, match="another checkpoint took its place while it was read: load it again"):
        open_model(str(path), None)
    mocker.stopall()
    assert open_model(str(path), None).rest["epoch"] == 1


def test_replaced_after_it_was_opened(tmp_path: Path) -> None:
    """Old tensors are not mixed with new ones."""
    path = save_shards(tmp_path / "last.ckpt")
    shards = ShardDirectory(str(path), None)
    save_shards(path)
    with pytest.raises(CheckpointError, match="another checkpoint took its place while it was read: load it again"):
        shards.read_model(["model.weight"])
