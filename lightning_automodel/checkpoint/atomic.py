"""Atomic writes: a checkpoint is written beside its target under a temporary name, then renamed to it.

What has a temporary name is never taken for a checkpoint. So a crash leaves the old checkpoint or the new one.
"""

import os
import shutil
import uuid
from pathlib import Path

TEMPORARY = ".unfinished-"
"""Prefix of the names of directories and files that are being written or removed."""


def temporary_name() -> str:
    """A new name for what is about to be written or removed."""
    return f"{TEMPORARY}{uuid.uuid4().hex}"


def replace(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, in the same directory; then remove what was there.

    Called by one rank, when the content of ``temporary`` is on disk. Files and links are replaced in one step. A
    directory is renamed first: a crash before the second renaming leaves it whole, under a name that begins and ends
    like the old one, so that ``ckpt_path="last"`` finds it.
    """
    aside = None
    if _is_folder(temporary):
        sync(temporary)
    if (_is_folder(temporary) and os.path.lexists(target)) or _is_folder(target):  # os.replace would refuse
        aside = target.with_name(f"{target.stem}.replaced-{uuid.uuid4().hex}{target.suffix}")
        os.rename(target, aside)
    os.replace(temporary, target)
    sync(target.parent)
    if aside is not None:
        remove(aside)


def link(target: Path, name: Path) -> None:
    """Make ``name`` a link to ``target``, whatever it was before. Called by one rank."""
    if target.absolute() != name.absolute():
        temporary = name.with_name(temporary_name())
        os.symlink(os.path.relpath(target, name.parent), temporary)
        replace(temporary, name)


def remove(target: Path) -> None:
    """Remove a checkpoint, a directory or a file, so that no part of it is ever taken for a whole one."""
    if os.path.lexists(target):
        aside = target.with_name(temporary_name())
        os.rename(target, aside)
        discard(aside)


def discard(path: Path) -> None:
    """Remove a file or directory that is not a checkpoint, or no longer one, if it exists."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def sync(path: str | Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
