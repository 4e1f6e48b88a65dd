"""Paths of checkpoints: URLs that fsspec knows, and local paths, at which a checkpoint appears whole.

A local checkpoint is written beside its target under a temporary name, then renamed to the target. Nothing
with a temporary name is ever taken for a checkpoint. So a crash leaves the old checkpoint or the new one.
"""

import os
import shutil
import uuid
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_automodel.checkpoint.errors import CheckpointError

TEMPORARY = ".unfinished-"
"""Prefix of the names of directories and files that are being written or removed."""


def normalize(path: str | Path) -> str:
    """An absolute local path without protocol, or a URL without a trailing slash."""
    path = str(path)
    if not is_local(path):
        return path.rstrip("/")
    if "::" in path:
        raise CheckpointError(
            f"{path} has '::' in it, with which fsspec chains file systems: choose another name"
        )
    return url_to_fs(path)[1]


def is_local(path: str) -> bool:
    """Whether ``path`` lies in this machine's file system."""
    return isinstance(url_to_fs(path)[0], LocalFileSystem)


def is_directory(path: str) -> bool:
    """Whether there is a directory at ``path``."""
    filesystem, place = url_to_fs(path)
    return filesystem.isdir(place)


def member(folder: str, name: str) -> str:
    """Path of ``name`` in ``folder``; CheckpointError if the name, from an untrusted file, leads elsewhere."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"it refers to {name!r}, which is not the name of a file in the checkpoint")
    return f"{folder}/{name}"


def check_file(path: str) -> None:
    """Raise FileNotFoundError if a file is missing, CheckpointError if it is a fifo or device, which has no end."""
    filesystem, place = url_to_fs(path)
    if filesystem.info(place)["type"] != "file":
        raise CheckpointError(f"{path.rpartition('/')[2]} is not a regular file")


def read_file(path: str) -> bytes:
    """Content of a file; raises as :func:`check_file` does."""
    check_file(path)
    filesystem, place = url_to_fs(path)
    return filesystem.cat_file(place)


def write_file(path: str, content: bytes) -> None:
    """Write a file."""
    filesystem, place = url_to_fs(path)
    filesystem.pipe_file(place, content)


def prepare_place(path: str) -> str:
    """Make the directory that ``path`` lies in. Called by one rank.

    Returns:
        A folder to make for the files of a directory at ``path``: beside it, or within it if it is a URL,
        where nothing can be renamed.

    Raises:
        CheckpointError: If ``path`` is a local directory that holds something other than a checkpoint.
    """
    filesystem, place = url_to_fs(path)
    if above := place.rpartition("/")[0]:
        filesystem.makedirs(above, exist_ok=True)
    if not is_local(path):
        return f"{path}/{temporary_name()}"
    target = Path(path)
    if _is_folder(target) and any(target.iterdir()) and not (target / ".metadata").exists():
        raise CheckpointError(
            "it is a directory, but not a checkpoint (it has no .metadata), and saving would replace it:"
            f" choose another path, such as {path}/last.ckpt"
        )
    return f"{above}/{temporary_name()}"


def new_local_target(path: str | Path) -> Path:
    """The local ``path``, after making its parent folder; CheckpointError if it is not local, or exists."""
    if not is_local(str(path)):
        raise CheckpointError(f"{path} is not local: write to a local path, and upload that")
    target = Path(normalize(path))
    if target.exists():
        raise CheckpointError(f"{target} exists: remove it, or choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def remove(path: str) -> None:
    """Remove a checkpoint so that no part of it is ever taken for a checkpoint. Called by one rank."""
    if is_local(path):
        target = Path(path)
        if _is_folder(target):
            aside = target.rename(target.with_name(temporary_name()))
            shutil.rmtree(aside, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)
        return
    filesystem, place = url_to_fs(path)
    if filesystem.exists(place):
        filesystem.rm(place, recursive=True)


def remove_others(url: str, folder: str) -> None:
    """Remove all other files of earlier saves beside the ``folder`` at ``url``. Called by one rank."""
    filesystem, place = url_to_fs(url)
    for path in filesystem.ls(place, detail=False):
        name = path.rstrip("/").rpartition("/")[2]
        if name != folder and name.startswith(TEMPORARY):
            filesystem.rm(path, recursive=True)


def temporary_name() -> str:
    """A new name for a file or directory that is about to be written or removed."""
    return f"{TEMPORARY}{uuid.uuid4().hex}"


def replace(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, in the same directory, once all of it is on disk; then remove what was there.

    Called by one rank. Files and links are replaced in one step. An old directory is first moved aside: a crash
    before the second renaming leaves it whole, under a name that begins and ends like ``target``, so that
    ``ckpt_path="last"`` finds it.
    """
    aside = None
    if not temporary.is_symlink():
        for written in (*temporary.rglob("*"), temporary):
            sync(written)
    if (_is_folder(temporary) and os.path.lexists(target)) or _is_folder(target):  # os.replace would refuse
        aside = target.with_name(f"{target.stem}.replaced-{uuid.uuid4().hex}{target.suffix}")
        os.rename(target, aside)
    try:
        os.replace(temporary, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    sync(target.parent)
    if aside is not None:
        remove(str(aside))


def link(target: Path, name: Path) -> None:
    """Make ``name`` a link to ``target``, whatever it was before. Called by one rank."""
    if target.absolute() != name.absolute():
        temporary = name.with_name(temporary_name())
        os.symlink(os.path.relpath(target, name.parent), temporary)
        replace(temporary, name)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def sync(path: str | Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
