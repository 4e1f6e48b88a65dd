"""Checkpoints appear, are replaced and disappear whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from lightning_automodel.checkpoint import CheckpointError, paths
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


KINDS: dict[str, Callable[[Path, str], None]] = {
    "file": make_file,
    "directory": make_directory,
    "link": make_link,
}


@pytest.mark.parametrize("old", [None, *KINDS])
@pytest.mark.parametrize("new", KINDS)
def test_replace(tmp_path: Path, new: str, old: str | None) -> None:
    """Whatever was there is replaced, and nothing else is left."""
    target = tmp_path / "last.ckpt"
    staging = tmp_path / paths.temporary_name()
    if old is not None:
        KINDS[old](target, "old")
    KINDS[new](staging, "new")
    paths.replace(staging, target)
    assert content(target) == "new"
    assert not os.path.lexists(staging)
    assert leftovers(tmp_path) == []
    if old == "link":
        assert content(tmp_path / "target of last.ckpt") == "old"


def test_a_crash_between_two_names_leaves_both(tmp_path: Path, mocker: MockerFixture) -> None:
    """The directory that stood there is whole, and has a name that `ckpt_path="last"` finds."""
    target = tmp_path / "last.ckpt"
    staging = tmp_path / paths.temporary_name()
    make_directory(target, "old")
    make_directory(staging, "new")
    mocker.patch.object(paths.os, "replace", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        paths.replace(staging, target)
    (old,) = tmp_path.glob("last*.ckpt")
    assert (content(old), content(staging)) == ("old", "new")


def test_other_directories_are_not_replaced(tmp_path: Path) -> None:
    """A directory of the user's that a checkpoint was to be called like stays; an empty one is taken."""
    path = tmp_path / "results"
    path.mkdir()
    paths.prepare_place(str(path))
    (path / "thesis.tex").write_text("years of work")
    message = r"not a checkpoint \(it has no \.metadata\), and saving would replace it: choose .*last\.ckpt"
    with pytest.raises(CheckpointError, match=message):
        paths.prepare_place(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_remove(tmp_path: Path, kind: str) -> None:
    """A checkpoint goes, and what a link led to stays."""
    target = tmp_path / "old.ckpt"
    KINDS[kind](target, "old")
    paths.remove(str(target))
    assert not os.path.lexists(target)
    assert leftovers(tmp_path) == []
    paths.remove(str(target))


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path: Path, mocker: MockerFixture) -> None:
    """Its name is gone before the first file is."""
    target = tmp_path / "old.ckpt"
    make_directory(target, "old")
    mocker.patch.object(paths.shutil, "rmtree", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        paths.remove(str(target))
    mocker.stopall()
    assert not target.exists()
    (leftover,) = leftovers(tmp_path)
    assert leftover.name.startswith(".unfinished-")


@pytest.mark.parametrize("old", [None, *KINDS])
def test_link(tmp_path: Path, old: str | None) -> None:
    """`last.ckpt` leads to the newest, whatever it was."""
    newest = tmp_path / "step=2.ckpt"
    last = tmp_path / "last.ckpt"
    make_directory(newest, "new")
    if old is not None:
        KINDS[old](last, "old")
    paths.link(newest, last)
    assert last.is_symlink()
    assert content(last) == "new"
    paths.link(newest, newest)
    assert not newest.is_symlink()
