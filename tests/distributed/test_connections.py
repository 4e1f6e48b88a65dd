"""Aborting connections frees a rank that waits in a collective, at both ends, and touches nothing else."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.distributed import connections
from tests.rank_pool import LOOPBACK, RankPool

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="connections are found in /dev/fd")

GROUP_TIMEOUT = timedelta(seconds=40)
Freed = tuple[str, float]


def _blocked_barrier(culprit: int | None) -> tuple[Freed | None, str]:
    """Rank 0 waits in a barrier of a mesh's group that rank 1 never enters, until ``culprit`` aborts its connections.

    Returns:
        How rank 0 was freed and after how long, and what the store still does.
    """
    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()
    group = dist.new_group([0, 1], timeout=GROUP_TIMEOUT)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("both",))
    freed = None
    if rank == 0:
        if culprit == 0:
            threading.Timer(0.3, connections.abort_connections).start()
        started_at = time.monotonic()
        store.set("waiting", "1")
        with pytest.raises(RuntimeError) as caught:
            dist.barrier(mesh.get_group())
        freed = str(caught.value), time.monotonic() - started_at
        store.set("freed", "1")
    else:
        store.wait(["waiting"])
        if culprit == 1:
            time.sleep(0.3)
            connections.abort_connections()
        store.wait(["freed"], GROUP_TIMEOUT)
    for key in ("waiting", "freed"):
        store.delete_key(key)
    store.set(f"after{rank}", "words")
    words = store.get(f"after{1 - rank}").decode()
    dist.destroy_process_group()  # the default group's connections are gone as well
    return freed, words


@pytest.mark.parametrize("culprit", [0, 1], ids=["own thread", "peer"])
def test_a_blocked_rank_is_freed(pool2: RankPool, culprit: int) -> None:
    (freed, *left), (_, *left1) = pool2.run(_blocked_barrier, culprit)
    message, seconds = freed
    assert "Connection closed" in message or "reset by peer" in message or "Broken pipe" in message
    assert seconds < GROUP_TIMEOUT.total_seconds() / 4
    assert left == left1 == ["words"]


# --- Which connections ------------------------------------------------------------------------------------------------

GLOO = [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
LIMITS = [(socket.SOL_SOCKET, name, struct.pack("ll", 41, 0)) for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)]


class Pair:
    """Two connected sockets of this process, the near one with these options."""

    def __init__(self, *options: tuple[int, int, Any]) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            self.near = socket.create_connection(listener.getsockname())
            self.far, _ = listener.accept()
        for option in options:
            self.near.setsockopt(*option)

    def works(self) -> bool:
        """Whether what goes in comes out."""
        try:
            self.near.sendall(b"x")
            return self.far.recv(1) == b"x"
        except OSError:
            return False

    def close(self) -> None:
        self.near.close()
        self.far.close()


def test_what_has_other_options_than_gloos_is_left_alone() -> None:
    """Also what another thread opened while groups were made: Python's own timeouts, limits of one direction."""
    pairs = {
        "as gloo": Pair(*GLOO, *LIMITS),
        "plain": Pair(),
        "with a timeout of Python": Pair(*GLOO),
        "one direction": Pair(*GLOO, LIMITS[0]),
        "a client with limits": Pair(*LIMITS),
    }
    pairs["with a timeout of Python"].near.settimeout(41)
    assert all(pair.works() for pair in pairs.values())
    connections.abort_connections()
    connections.abort_connections()
    assert [name for name, pair in pairs.items() if not pair.works()] == ["as gloo"]
    for pair in pairs.values():
        pair.close()


def test_listening_and_local_sockets_are_left_alone() -> None:
    listener = socket.create_server((LOOPBACK, 0))
    near, far = socket.socketpair()
    for option in (*GLOO, *LIMITS):
        listener.setsockopt(*option)
    for option in LIMITS:
        near.setsockopt(*option)
    connections.abort_connections()
    near.sendall(b"y")
    assert far.recv(1) == b"y"
    for each in (listener, near, far):
        each.close()


def test_the_stores_connections_are_left_alone() -> None:
    host = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    client = dist.TCPStore(LOOPBACK, host.port, is_master=False, timeout=timedelta(seconds=10))
    client.set("key", "before")
    connections.abort_connections()
    client.set("key", "after")
    assert host.get("key") == b"after"


def test_no_descriptor_is_left() -> None:
    pair = Pair(*GLOO, *LIMITS)
    before = sorted(os.listdir("/dev/fd"))
    connections.abort_connections()
    assert sorted(os.listdir("/dev/fd")) == before
    pair.close()


def test_nothing_happens_where_descriptors_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DESCRIPTORS", "/no/such/folder")
    pair = Pair(*GLOO, *LIMITS)
    connections.abort_connections()
    assert pair.works()
    pair.close()
