"""Paths of checkpoints: local ones, which are replaced in one step, and URLs that fsspec knows."""

import os
import stat
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_automodel.checkpoint import atomic
from lightning_automodel.checkpoint.errors import CheckpointError

_OF_CHECKPOINTS = (".metadata", "meta.pt")
"""Files that show that a directory holds shards, this package's or another's, even if some are missing."""


def normalize(path: str | Path) -> str:
    """An absolute local path without protocol, or a URL without a slash at its end."""
    try:
        filesystem, place = url_to_fs(str(path))
    except (ValueError, ImportError) as error:
        raise CheckpointError(f"{path} is an unsupported path: {error}") from error
    if not isinstance(filesystem, LocalFileSystem):
        return str(path).rstrip("/")
    if "::" in str(path):
        raise CheckpointError(f"{path} has '::' in it, with which fsspec chains file systems: choose another name")
    return place


def is_local(path: str) -> bool:
    """Whether ``path`` lies in this machine's file system."""
    return isinstance(url_to_fs(path)[0], LocalFileSystem)


def is_directory(path: str) -> bool:
    """Whether there is a directory at ``path``."""
    filesystem, place = url_to_fs(path)
    return filesystem.isdir(place)


def is_file_name(name: str) -> bool:
    """Whether ``name`` names something directly in a folder, on any operating system."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def size_of_file(filesystem: AbstractFileSystem, folder: str, name: str) -> int:
    """Bytes of the regular file ``name`` below ``folder``.

    Names come from files that anybody may have written. A name could lead out of the checkpoint, and reading a fifo or
    a device would never end: both raise :class:`CheckpointError`.
    """
    if not is_file_name(name):
        raise CheckpointError(f"it refers to {name!r}, which is not the name of a file in the checkpoint")
    place = f"{folder}/{name}"
    if isinstance(filesystem, LocalFileSystem):
        found = os.lstat(place)
        is_regular, size = stat.S_ISREG(found.st_mode), found.st_size
    else:
        info = filesystem.info(place)
        is_regular, size = info["type"] == "file", info["size"]
    if not is_regular:
        raise CheckpointError(f"{name} is not a regular file")
    return size


def read_file(filesystem: AbstractFileSystem, folder: str, name: str) -> bytes:
    """Content of the regular file ``name`` below ``folder``; raises as :func:`size_of_file` does."""
    size_of_file(filesystem, folder, name)
    return filesystem.cat_file(f"{folder}/{name}")


def refuse_to_replace(path: str) -> None:
    """Raise CheckpointError if ``path`` is a local directory that holds something other than a checkpoint."""
    folder = Path(path)
    if not is_local(path) or folder.is_symlink() or not folder.is_dir():
        return
    names = sorted(each.name for each in folder.iterdir())
    if names and not any(name in _OF_CHECKPOINTS or name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"it is a directory, but not a checkpoint (it holds {names[0]}), and saving would replace it: choose"
            f" another path, such as {path}/last.ckpt"
        )


def parent(path: str) -> str:
    """The directory that ``path`` lies in."""
    above = path.rpartition("/")[0]
    return f"{above}/" if above == "" or above.endswith(":/") else above


def new_folder(path: str) -> str:
    """A new folder to write the files of ``path`` to: beside a local path, within a URL, where nothing is renamed."""
    return f"{parent(path) if is_local(path) else path}/{atomic.temporary_name()}"


def new_local_target(path: str | Path) -> Path:
    """The local ``path``, whose parent folder is made; CheckpointError if it is not local or exists."""
    if not is_local(str(path)):
        raise CheckpointError(f"{path} is not local: write to a local path, and upload that")
    target = Path(normalize(path))
    if target.exists():
        raise CheckpointError(f"{target} exists: remove it, or choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def remove(path: str) -> None:
    """Remove a checkpoint, a directory or a file. Called by one rank."""
    if is_local(path):
        atomic.remove(Path(path))
        return
    filesystem, place = url_to_fs(path)
    if filesystem.exists(place):
        filesystem.rm(place, recursive=True)


def discard(path: str) -> None:
    """Remove the files of a save that failed. Called by one rank."""
    if is_local(path):
        atomic.discard(Path(path))
    else:
        remove(path)
