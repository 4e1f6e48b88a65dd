"""Aborting the TCP connections of gloo, so that a rank that waits in a collective is freed; and a store's address.

Destroying or aborting a gloo group closes nothing while anything refers to it, and torch's caches refer to many meshes.
Shutting a connection down ends its collectives at once, on both sides, and ``on_exception`` hooks can run.
"""

import contextlib
import os
import socket
import stat

import torch.distributed as dist

DESCRIPTORS = "/dev/fd"


def abort_connections() -> None:
    """Shut down every connection of gloo's groups: collectives that wait on one raise on both ranks.

    Callable from any thread and more than once; not a collective. The groups are unusable afterwards. Does nothing on
    systems without ``/dev/fd``.
    """
    with contextlib.suppress(OSError):
        for descriptor in map(int, os.listdir(DESCRIPTORS)):
            # The list itself has a descriptor, which is closed by now.
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                        if _is_of_gloo(duplicate):
                            duplicate.shutdown(socket.SHUT_RDWR)


def _is_of_gloo(connection: socket.socket) -> bool:
    """Whether the options are those that gloo sets (torch 2.13 to 2.15), whichever thread opened the connection.

    Gloo lets the system limit both directions by the timeout of the group. Neither Python, whose timeouts are its own,
    nor stores, NCCL and gRPC do so, and a client's connection would not reuse its address.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    receiving, sending = (
        connection.getsockopt(socket.SOL_SOCKET, name, 16) for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
    )
    flags = ((socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.IPPROTO_TCP, socket.TCP_NODELAY))
    return any(receiving) and receiving == sending and all(connection.getsockopt(*flag) for flag in flags)


def bottom_store(store: dist.Store) -> dist.Store:
    """``store`` without the prefixes around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of the ``TCPStore`` below ``store``; None where there is none."""
    bottom = bottom_store(store)
    return (bottom.host, bottom.port) if isinstance(bottom, dist.TCPStore) else None
