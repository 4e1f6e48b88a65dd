"""Where checkpoints are: local paths, which are published in one step, and whatever else fsspec knows."""

from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_automodel.checkpoint import atomic
from lightning_automodel.checkpoint.errors import CheckpointError

_OF_CHECKPOINTS = (".metadata", "meta.pt")
"""Files that tell a directory of shards, this package's or another's, also where some are missing."""


def normal(path: str | Path) -> str:
    """An absolute local path without protocol, or a URL without a slash at its end.

    Raises:
        CheckpointError: If fsspec does not know what the path means.
    """
    try:
        filesystem, place = url_to_fs(str(path))
    except (ValueError, ImportError) as error:
        raise CheckpointError(f"{path} leads nowhere: {error}") from error
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


def refuse_to_replace(path: str) -> None:
    """Raise CheckpointError if there is a local directory at ``path`` that holds other things than a checkpoint."""
    folder = Path(path)
    if not is_local(path) or folder.is_symlink() or not folder.is_dir():
        return
    names = sorted(each.name for each in folder.iterdir())
    if names and not any(name in _OF_CHECKPOINTS or name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"it is a directory that is no checkpoint (it holds {names[0]}) and would be replaced: choose another path,"
            f" such as {path}/last.ckpt"
        )


def parent(path: str) -> str:
    """The directory that ``path`` lies in."""
    above = path.rpartition("/")[0]
    return f"{above}/" if above == "" or above.endswith(":/") else above


def remove(path: str) -> None:
    """Remove a checkpoint, a directory or a file. Called by one rank."""
    if is_local(path):
        atomic.remove(Path(path))
        return
    filesystem, place = url_to_fs(path)
    if filesystem.exists(place):
        filesystem.rm(place, recursive=True)


def discard(path: str) -> None:
    """Remove what was written of a checkpoint that is not to be. Called by one rank."""
    if is_local(path):
        atomic.discard(Path(path))
    else:
        remove(path)
