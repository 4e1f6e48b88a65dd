"""Paths of checkpoints: local ones, which are replaced in one step, and URLs that fsspec knows."""

from pathlib import Path

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


def member(folder: str, name: str) -> str:
    """Path of the file or folder ``name`` directly in ``folder``.

    Names come from files that anybody may have written: :class:`CheckpointError` if it would lead elsewhere, on any
    operating system.
    """
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"it refers to {name!r}, which is not the name of a file in the checkpoint")
    return f"{folder}/{name}"


def size_of_file(path: str) -> int:
    """Bytes of a regular file; anything else raises CheckpointError, as reading a fifo or a device would never end."""
    filesystem, place = url_to_fs(path)
    found = filesystem.info(place)
    if found["type"] != "file" or found.get("islink"):
        raise CheckpointError(f"{path.rpartition('/')[2]} is not a regular file")
    return found["size"]


def read_file(path: str) -> bytes:
    """Content of a regular file; raises as :func:`size_of_file` does."""
    size_of_file(path)
    filesystem, place = url_to_fs(path)
    return filesystem.cat_file(place)


def write_file(path: str, content: bytes) -> None:
    """Write a file, a local one to disk."""
    filesystem, place = url_to_fs(path)
    filesystem.pipe_file(place, content)
    if is_local(path):
        atomic.sync(place)


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
    """Remove a checkpoint, a directory or a file, so that no part of it is ever taken for one. Called by one rank."""
    if is_local(path):
        atomic.remove(Path(path))
        return
    filesystem, place = url_to_fs(path)
    if filesystem.exists(place):
        filesystem.rm(place, recursive=True)
