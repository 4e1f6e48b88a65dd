"""Atomic writes: a checkpoint is written beside its target under a temporary name, then renamed to it in one step.

What has a temporary name is never taken for a checkpoint, and the name says which process writes it. So a crash leaves
either the old checkpoint or the new one, and leftovers that can be recognised.
"""

import ctypes
import errno
import glob
import logging
import os
import shutil
import socket
import uuid
from pathlib import Path

log = logging.getLogger(__name__)

TEMPORARY = ".unfinished-"
"""Prefix of the names of directories and files that are being written or removed."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def temporary_name() -> str:
    """A new name for what this process is about to write or remove."""
    return f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def replace(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, in the same directory, in one step; then remove what was there.

    Called by one rank, when the content of ``temporary`` is on disk.
    """
    if temporary.is_dir():
        sync(temporary)
    if (temporary.is_dir() and os.path.lexists(target)) or target.is_dir():
        # rename(2) replaces files and empty directories only.
        replaced = _exchange(temporary, target) or _swap_names(temporary, target)
        sync(target.parent)
        discard(replaced)
    else:
        os.replace(temporary, target)
        sync(target.parent)


def link(target: Path, name: Path) -> None:
    """Make ``name`` a link to ``target``, in one step, whatever it was before. Called by one rank."""
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
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Remove unfinished saves in ``folder`` by ended processes of this host, with a warning. Called by one rank."""
    for path in folder.glob(f"{TEMPORARY}{glob.escape(socket.gethostname())}-*-*"):
        process = path.name.split("-")[-2]
        if process.isdecimal() and not _is_running(int(process)):
            log.warning(
                "%s is an incomplete checkpoint, left by process %s, which has ended; removing it.",
                path,
                process,
            )
            discard(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def sync(path: str | Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(temporary: Path, target: Path) -> Path | None:
    """Swap two names in one step (``renameat2``, Linux); returns the path of the old content, None if impossible."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return None
    if renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return temporary
    number = ctypes.get_errno()
    # Some file systems do not support the flag, and some containers do not allow the call.
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return None
    raise OSError(number, os.strerror(number), str(temporary), None, str(target))


def _swap_names(temporary: Path, target: Path) -> Path:
    """The same in two steps: a crash between them leaves no ``target``, but both contents under temporary names."""
    aside = target.with_name(temporary_name())
    os.rename(target, aside)
    os.rename(temporary, target)
    return aside
