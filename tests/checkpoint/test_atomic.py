"""Checkpoints appear, are replaced and disappear in one step each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from lightning_automodel.checkpoint import atomic
from tests.checkpoint.checkpoints import leftovers


def make_file(path: Path, content: str) -> None:
    path.write_text(content)


def make_directory(path: Path, content: str) -> None:
    path.mkdir()
    (path / "file").write_text(content)


def make_link(path: Path, content: str) -> None:
    target = path.with_name(f"target of {path.name}")
    make_directory(target, content)
    path.symlink_to(target.name)


def content(path: Path) -> str:
    return (path / "file" if path.is_dir() else path).read_text()


KINDS: dict[str, Callable[[Path, str], None]] = {"file": make_file, "directory": make_directory, "link": make_link}


@pytest.mark.parametrize("old", [None, *KINDS])
@pytest.mark.parametrize("new", KINDS)
def test_replace(tmp_path: Path, new: str, old: str | None) -> None:
    """Whatever was there is replaced, and nothing else is left."""
    target, staging = tmp_path / "last.ckpt", tmp_path / atomic.temporary_name()
    if old is not None:
        KINDS[old](target, "old")
    KINDS[new](staging, "new")
    atomic.replace(staging, target)
    assert content(target) == "new"
    assert not os.path.lexists(staging)
    assert leftovers(tmp_path) == []
    if old == "link":
        assert content(tmp_path / "target of last.ckpt") == "old"


@pytest.mark.parametrize("old", KINDS)
def test_replace_where_names_cannot_be_exchanged(tmp_path: Path, mocker: MockerFixture, old: str) -> None:
    """Other systems and file systems get there in two steps."""
    exchange = mocker.patch.object(atomic, "_exchange", return_value=None)
    target, staging = tmp_path / "last.ckpt", tmp_path / atomic.temporary_name()
    KINDS[old](target, "old")
    make_directory(staging, "new")
    atomic.replace(staging, target)
    exchange.assert_called_once()
    assert content(target) == "new"
    assert leftovers(tmp_path) == []


def test_exchange_is_used_here(tmp_path: Path, mocker: MockerFixture) -> None:
    """On Linux there is no moment without a checkpoint."""
    swap = mocker.spy(atomic, "_swap_names")
    target, staging = tmp_path / "last.ckpt", tmp_path / atomic.temporary_name()
    make_directory(target, "old")
    make_directory(staging, "new")
    atomic.replace(staging, target)
    swap.assert_not_called()


@pytest.mark.parametrize("kind", KINDS)
def test_remove(tmp_path: Path, kind: str) -> None:
    """A checkpoint goes, and what a link led to stays."""
    target = tmp_path / "old.ckpt"
    KINDS[kind](target, "old")
    atomic.remove(target)
    assert not os.path.lexists(target)
    assert leftovers(tmp_path) == []
    atomic.remove(target)


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path: Path, mocker: MockerFixture) -> None:
    """Its name is gone before the first file is."""
    target = tmp_path / "old.ckpt"
    make_directory(target, "old")
    mocker.patch.object(atomic.shutil, "rmtree", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic.remove(target)
    mocker.stopall()
    assert not target.exists()
    (leftover,) = leftovers(tmp_path)
    assert leftover.name.startswith(f".unfinished-{socket.gethostname()}-{os.getpid()}-")
    atomic.clear_leftovers(tmp_path)
    assert leftover.exists()


@pytest.mark.parametrize("old", [None, *KINDS])
def test_link(tmp_path: Path, old: str | None) -> None:
    """`last.ckpt` leads to the newest, whatever it was."""
    newest, last = tmp_path / "step=2.ckpt", tmp_path / "last.ckpt"
    make_directory(newest, "new")
    if old is not None:
        KINDS[old](last, "old")
    atomic.link(newest, last)
    assert last.is_symlink()
    assert content(last) == "new"
    atomic.link(newest, newest)
    assert not newest.is_symlink()


def test_leftovers_of_the_dead_are_reported_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a process that runs, or of another host, stay."""
    process = subprocess.Popen(["true"])
    process.wait()
    own = atomic.temporary_name()
    ended = own.replace(f"-{os.getpid()}-", f"-{process.pid}-")
    foreign = f"{atomic.TEMPORARY}other-host-1-abc"
    for name in (ended, own, foreign):
        make_directory(tmp_path / name, "half")
    make_directory(tmp_path / "epoch=1.ckpt", "whole")
    with caplog.at_level("WARNING"):
        atomic.clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {own, foreign, "epoch=1.ckpt"}
    (record,) = caplog.records
    assert ended in record.getMessage()
    atomic.clear_leftovers(tmp_path / "missing")
