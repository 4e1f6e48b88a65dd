"""Atomic writes: a checkpoint is written beside its place under a temporary name, then renamed into it in one step.

A temporary name is taken for no checkpoint, and says which process writes it. So a crash leaves either the old
checkpoint or the new one in place, and beside it leftovers that are known as such.
"""

import ctypes
import errno
import logging
import os
import shutil
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

TEMPORARY = ".unfinished-"
"""What the names of directories and files begin with that are being written or removed."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class Leftover:
    """What a save or a removal that never ended has left behind, and the process that wrote it."""

    path: Path
    host: str
    pid: int

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, as far as this host can tell."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


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


def leftovers(folder: Path) -> list[Leftover]:
    """What saves and removals that have not ended, or never will, have left in ``folder``."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        parts = path.name.removeprefix(TEMPORARY).rsplit("-", 2)
        if path.name.startswith(TEMPORARY) and len(parts) == 3 and parts[1].isdecimal():
            found.append(Leftover(path, parts[0], int(parts[1])))
    return found


def clear_leftovers(folder: Path) -> None:
    """Report and remove what saves of processes that have ended have left in ``folder``. Called by one rank."""
    for leftover in leftovers(folder):
        if leftover.is_dead:
            log.warning(
                "%s is what process %d left of a checkpoint when it ended while writing or removing it; removing it.",
                leftover.path,
                leftover.pid,
            )
            discard(leftover.path)


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
