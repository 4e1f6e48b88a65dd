"""Aborting connections frees a rank that waits in a collective, at both ends, and touches nothing else."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.distributed import connections
from tests.rank_pool import LOOPBACK, RankPool

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="connections are found in /dev/fd")

GROUP_TIMEOUT = timedelta(seconds=40)
Freed = tuple[str, float]


def _blocked_barrier(culprit: int | None) -> tuple[Freed | None, str, float]:
    """Rank 0 waits in a barrier of a mesh's group that rank 1 never enters, until ``culprit`` aborts its connections.

    Returns:
        How rank 0 was freed and after how long; what the store and the default group still do.
    """
    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()
    with connections.recording():
        group = dist.new_group([0, 1], timeout=GROUP_TIMEOUT)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("both",))
    freed = None
    if rank == 0:
        if culprit == 0:
            threading.Timer(0.3, connections.abort_connections, (store,)).start()
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
            connections.abort_connections(store)
        store.wait(["freed"], GROUP_TIMEOUT)
    store.set(f"after{rank}", "words")
    words = store.get(f"after{1 - rank}").decode()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group(group)
    for key in ("waiting", "freed"):
        store.delete_key(key)
    return freed, words, total.item()


@pytest.mark.parametrize("culprit", [0, 1], ids=["own thread", "peer"])
def test_a_blocked_rank_is_freed(pool2: RankPool, culprit: int) -> None:
    (freed, *left), (_, *left1) = pool2.run(_blocked_barrier, culprit)
    message, seconds = freed
    assert "Connection closed" in message or "reset by peer" in message or "Broken pipe" in message
    assert seconds < GROUP_TIMEOUT.total_seconds() / 4
    assert left == left1 == ["words", 2.0]


# --- Which connections ------------------------------------------------------------------------------------------------


class Pair:
    """Two connected sockets of this process."""

    def __init__(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            self.near = socket.create_connection(listener.getsockname())
            self.far, _ = listener.accept()

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


def test_only_what_appeared_meanwhile_is_shut_down() -> None:
    before = Pair()
    with connections.recording():
        inside = Pair()
    after = Pair()
    assert [before.works(), inside.works(), after.works()] == [True, True, True]
    connections.abort_connections()
    connections.abort_connections()
    assert [before.works(), inside.works(), after.works()] == [True, False, True]
    for pair in (before, inside, after):
        pair.close()


def test_connections_count_also_if_the_block_raises() -> None:
    pairs = []

    def fail() -> None:
        with connections.recording():
            pairs.append(Pair())
            raise KeyError("late")

    with pytest.raises(KeyError, match="late"):
        fail()
    connections.abort_connections()
    assert not pairs[0].works()
    pairs[0].close()


def test_listening_and_local_sockets_are_left_alone() -> None:
    with connections.recording():
        listener = socket.create_server((LOOPBACK, 0))
        near, far = socket.socketpair()
    connections.abort_connections()
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        client.sendall(b"x")
        assert server.recv(1) == b"x"
    near.sendall(b"y")
    assert far.recv(1) == b"y"
    for each in (listener, near, far):
        each.close()


def test_a_descriptor_that_is_used_anew_is_left_alone() -> None:
    with connections.recording():
        old = Pair()
    descriptors = {old.near.fileno(), old.far.fileno()}
    old.close()
    new = Pair()
    assert {new.near.fileno(), new.far.fileno()} & descriptors
    connections.abort_connections()
    assert new.works()
    new.close()


def test_the_stores_connections_are_left_alone() -> None:
    listener = socket.create_server((LOOPBACK, 0))
    host = dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=10),
    )
    with connections.recording():
        client = dist.TCPStore(LOOPBACK, host.port, is_master=False, timeout=timedelta(seconds=10))
        client.set("key", "before")
        pair = Pair()
    connections.abort_connections(dist.PrefixStore("any", host))
    client.set("key", "after")
    assert (host.get("key"), pair.works()) == (b"after", False)
    pair.close()


def test_nothing_happens_where_descriptors_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DESCRIPTORS", "/no/such/folder")
    with connections.recording():
        pair = Pair()
    connections.abort_connections()
    assert pair.works()
    pair.close()
