"""Atomic writes: a checkpoint is written beside its place under a temporary name, then renamed into it in one step.

A temporary name is taken for no checkpoint, and says which process writes it. So a crash leaves either the old
checkpoint or the new one in place, and beside it leftovers that are known as such.
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
"""What the names of directories and files begin with that are being written or removed."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def temporary_name() -> str:
    """A new name for what this process is about to write or remove."""
    return f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def replace(temporary: Path, target: Path) -> None:
    """Let ``temporary`` take the place of ``target``, in the same directory, in one step; then remove what was there.

    Called by one rank, with the content of ``temporary`` on disk.
    """
    if temporary.is_dir():
        sync(temporary)
    if (temporary.is_dir() and os.path.lexists(target)) or target.is_dir():
        # rename(2) replaces files, but no directory that holds anything.
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
    """Remove what is no checkpoint (any more), if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Report and remove what saves of processes of this host that have ended left in ``folder``. Called by one rank."""
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
    """Swap two names in one step (``renameat2``, Linux): where the old content is; None where that is impossible."""
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
    """The same in two steps: a crash between them leaves no ``target``, and two temporary names that are whole."""
    aside = target.with_name(temporary_name())
    os.rename(target, aside)
    os.rename(temporary, target)
    return aside
