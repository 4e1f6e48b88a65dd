"""The connections of this process's process groups, so that a rank that fails can hang up on those that wait for it.

Destroying or aborting a gloo group closes nothing while anything refers to it, and torch's caches refer to many meshes.
Shutting its TCP connections down ends every collective that waits in it at once, on both sides of each connection.
"""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_automodel import torch_internals

DESCRIPTORS = "/dev/fd"


@dataclass(frozen=True)
class Connection:
    """A connected stream socket. A descriptor is used anew once it is closed, so the rest tells whether it was.

    Attributes:
        descriptor: File descriptor in this process.
        inode: Inode of the socket.
        local: Its own address.
        peer: The address at the other end.
    """

    descriptor: int
    inode: int
    local: Any
    peer: Any

    def shut_down(self) -> None:
        """Shut both directions down, unless the descriptor has become something else."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as duplicate:
            if _describe(self.descriptor, duplicate) == self:
                duplicate.shutdown(socket.SHUT_RDWR)


_recorded: set[Connection] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def recording(store: dist.Store | None = None) -> Iterator[None]:
    """Note the connections that appear inside, for :func:`hang_up`, also if the block raises. Not a collective.

    To be put around ``init_process_group``, ``new_group`` and ``init_device_mesh``. Sockets that another thread opens
    meanwhile are noted too, listening ones never. Does nothing on systems without ``/dev/fd``.

    Args:
        store: Its connections are left alone. None: the store of the default group, as it is at the end.
    """
    before = open_connections()
    try:
        yield
    finally:
        after = open_connections()
        port = store_port(torch_internals.default_store() if store is None and dist.is_initialized() else store)
        appeared = {each for each in after - before if port not in (each.local[1], each.peer[1])}
        with _lock:
            _recorded.intersection_update(after)
            _recorded.update(appeared)


def hang_up() -> None:
    """Shut down every connection that was noted and is still open: collectives that wait on one raise, here and there.

    Callable from any thread and more than once; not a collective. The groups are of no use afterwards, the store is.
    Does nothing on systems without ``/dev/fd``.
    """
    with _lock:
        noted = list(_recorded)
        _recorded.clear()
    for connection in noted:
        connection.shut_down()


def open_connections() -> set[Connection]:
    """Every connected TCP socket of this process; none on systems without ``/dev/fd``."""
    try:
        descriptors = [int(name) for name in os.listdir(DESCRIPTORS)]
    except OSError:
        return set()
    found = set()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    found.add(_describe(descriptor, duplicate))
    return found - {None}  # type: ignore[return-value]


def store_address(store: dist.Store | None) -> tuple[str, int] | None:
    """Host and port of the ``TCPStore`` below ``store``; None where there is none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def store_port(store: dist.Store | None) -> int | None:
    """Port of the ``TCPStore`` below ``store``; None where there is none."""
    address = store_address(store)
    return None if address is None else address[1]


def _describe(descriptor: int, duplicate: socket.socket) -> Connection | None:
    """What ``duplicate`` of ``descriptor`` is; None unless it is TCP. ``OSError`` if it is not connected."""
    if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
        return None
    inode = os.fstat(duplicate.fileno()).st_ino
    return Connection(descriptor, inode, duplicate.getsockname(), duplicate.getpeername())
