"""Faults of a node or of the network between two, each with two ranks: who is named on which side, and how soon.

The nodes are network namespaces (`tests/launch/two_nodes.py`); their ranks do not see each other's processes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_automodel.distributed import processes
from tests.failure.faults import Model, become_rank, data, exit_statuses, killed_at_the_end, make_trainer
from tests.launch.two_nodes import ADDRESSES, TwoNodes, connect_two_nodes, enter
from tests.processes import forked, free_port

TIMEOUT_S = 15.0
HEARTBEAT_TIMEOUT_S = 3.0
LEAVE_S = 12.0
STEP = 4
LAST_STEP = 12
NOBODY = "02:00:00:00:00:01"


class Slow(Model):
    """Takes small steps, and says when it is in one of them."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == STEP:
            Path(f"trains{self.global_rank}").touch()
        time.sleep(0.3)
        return super().training_step(batch, batch_idx)


def _be_rank(rank: int, namespace: str, port: int, folder: Path) -> None:
    become_rank(rank, 4, port, folder)
    enter(namespace)
    node = rank // 2
    os.environ.pop("GLOO_SOCKET_IFNAME")
    os.environ.update(MASTER_ADDR=ADDRESSES[0], NODE_RANK=str(node), LOCAL_RANK=str(rank % 2))
    here = processes._here()
    processes._here = lambda: f"{here}-{node}"  # type: ignore[assignment]  # as on machines of their own
    trainer = make_trainer(
        2, TIMEOUT_S, HEARTBEAT_TIMEOUT_S, num_nodes=2, max_steps=LAST_STEP, limit_val_batches=0
    )
    trainer.fit(Slow(), data())
    print("ended well")


class Cluster:
    """Two nodes with two ranks each, and what may happen to them."""

    def __init__(self, nodes: TwoNodes, folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder
        self.port = free_port()
        self.ranks: list[Any] = []

    def start(self, node: int) -> None:
        for rank in (2 * node, 2 * node + 1):
            arguments = (rank, self.nodes.namespaces[node], self.port, self.folder)
            self.ranks.append(forked().Process(target=_be_rank, args=arguments))
            self.ranks[-1].start()

    def wait_until_all_train(self) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / f"trains{rank}").exists() for rank in range(4)):
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.05)

    def outputs(self) -> list[str]:
        return [path.read_text(errors="replace") for path in sorted(self.folder.glob("rank?.log"))]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank].pid, number)

    def set_link(self, state: str) -> None:
        command = ["ip", "-netns", self.nodes.namespaces[1], "link", "set", self.nodes.devices[1], state]
        subprocess.run(command, check=True)

    def drop_packets(self) -> None:
        """As a firewall that begins to: both sides send to an address that nobody has."""
        for node, device in enumerate(self.nodes.devices):
            command = ["ip", "-netns", self.nodes.namespaces[node], "neighbour", "replace"]
            other = [ADDRESSES[1 - node], "lladdr", NOBODY, "dev", device, "nud", "permanent"]
            subprocess.run([*command, *other], check=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with connect_two_nodes() as nodes:
        made = Cluster(nodes, tmp_path)
        with killed_at_the_end(made.ranks):
            yield made


def cut_link(cluster: Cluster) -> None:
    cluster.set_link("down")


def lose_power(cluster: Cluster) -> None:
    """Of the second node: nothing closes its connections."""
    cluster.set_link("down")
    cluster.signal(signal.SIGKILL, 2, 3)


def stop_store_host(cluster: Cluster) -> None:
    cluster.signal(signal.SIGSTOP, 0)


@dataclass(frozen=True)
class Row:
    """A fault, the ranks that leave after it, and what they say on the first and on the second node."""

    fault: Callable[[Cluster], None]
    leave: tuple[int, ...]
    says: tuple[str, str]


SILENT_NODE = "rank [23] on .* missed heartbeats"
NO_STORE = "rank 0 on .* missed heartbeats.*: its process, which holds the store of the process group"
ROWS = [
    Row(cut_link, (0, 1, 2, 3), (SILENT_NODE, NO_STORE)),
    Row(Cluster.drop_packets, (0, 1, 2, 3), (SILENT_NODE, NO_STORE)),
    Row(lose_power, (0, 1), (SILENT_NODE, "")),
    Row(stop_store_host, (1, 2, 3), ("rank 0 on .*: its process", NO_STORE)),
]


@pytest.mark.sweep  # each waits for heartbeats
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault.__name__)
def test_fault_of_a_node(row: Row, cluster: Cluster) -> None:
    cluster.start(0)
    cluster.start(1)
    cluster.wait_until_all_train()
    row.fault(cluster)
    began_at = time.monotonic()
    statuses = exit_statuses([cluster.ranks[rank] for rank in row.leave], 60)
    seconds = time.monotonic() - began_at
    outputs = cluster.outputs()
    for status, rank in zip(statuses, row.leave, strict=True):
        assert status not in (0, None), outputs[rank]
        assert re.search(row.says[rank // 2], outputs[rank], re.M), outputs[rank]
    print(f"{row.fault.__name__}: {seconds:.1f} s")
    assert seconds < LEAVE_S, outputs
