"""The TCP connections of this process's process groups, recorded so that a rank that leaves can abort them.

Destroying or aborting a gloo group closes nothing while anything refers to it, and torch's caches refer to many meshes.
Shutting a connection down ends its collectives at once, on both sides, and ``on_exception`` hooks can run.
"""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator

import torch.distributed as dist

DESCRIPTORS = "/dev/fd"

_recorded: set[tuple[int, int]] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record the sockets that the block opens, also if it raises, for :func:`abort_connections`. Not a collective.

    Put it around ``init_process_group``, ``new_group`` and ``init_device_mesh``. Sockets that another thread opens
    meanwhile are recorded too. Does nothing on systems without ``/dev/fd``.
    """
    before = _open_sockets()
    try:
        yield
    finally:
        after = _open_sockets()
        with _lock:
            _recorded.intersection_update(after)
            _recorded.update(after - before)


def abort_connections(store: dist.Store | None = None) -> None:
    """Shut down every recorded connection that is still open: collectives that wait on one raise on both ranks.

    Callable from any thread and more than once; not a collective. The groups are unusable afterwards. Connections to
    ``store`` stay open: through it the ranks still report what happened.
    """
    with _lock:
        recorded = _recorded & _open_sockets()
        _recorded.clear()
    address = None if store is None else store_address(store)
    for descriptor, _ in recorded:
        # `getpeername` raises for listening sockets, which nobody waits on.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                ports = (duplicate.getsockname()[1], duplicate.getpeername()[1])
                if address is None or address[1] not in ports:
                    duplicate.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of every socket of this process; the inode shows when a descriptor was reused."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in map(int, os.listdir(DESCRIPTORS)):
            with contextlib.suppress(OSError):
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    found.add((descriptor, status.st_ino))
    return found


def bottom_store(store: dist.Store) -> dist.Store:
    """``store`` without the prefixes around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of the ``TCPStore`` below ``store``; None where there is none."""
    bottom = bottom_store(store)
    return (bottom.host, bottom.port) if isinstance(bottom, dist.TCPStore) else None
