"""FirstRankPerNode on two nodes with two ranks each, joined by a network of their own and started by torchrun."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.two_nodes import ADDRESSES, NodeResult, TwoNodes, connect_two_nodes

SCRIPT = Path(__file__).with_name("two_nodes_script.py")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with connect_two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def run(two_nodes: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[NodeResult], Path]:
    """How both launchers ended, and the folder that the ranks wrote to."""
    folder = tmp_path_factory.mktemp("two_nodes")
    return two_nodes.torchrun(SCRIPT, str(folder)), folder


def test_work_is_done_once_on_each_node_or_once(run: tuple[list[NodeResult], Path]) -> None:
    """Exactly twice with scope="node", by the local rank 0 of each node, and once with scope="global"."""
    results, folder = run
    assert sorted(path.name for path in folder.glob("node_done_by_*")) == ["node_done_by_0", "node_done_by_2"], results
    assert sorted(path.name for path in folder.glob("global_done_by_*")) == ["global_done_by_0"]
    assert len(list(folder.glob("*_seen_by_*"))) == 2 * 4


def test_failure_on_one_node_reaches_the_other(run: tuple[list[NodeResult], Path]) -> None:
    """The first rank of the first node fails; all others say which rank, where and why, and both launchers fail."""
    results, folder = run
    assert all(result.status != 0 for result in results), results
    errors = [folder.joinpath(f"error_of_{rank}").read_text() for rank in range(4)]
    assert errors[0] == "OSError: no space on node 0"
    for error in errors[1:]:
        assert error.startswith("RankFailedError: rank 0 on ")
        assert error.endswith("failed in FirstRankPerNode(scope='node'): OSError: no space on node 0")
    assert not folder.joinpath("ran_on_1").exists()


def test_nodes_have_networks_of_their_own(two_nodes: TwoNodes) -> None:
    """Each reaches the other, and neither has this machine's network."""
    for namespace, device in zip(two_nodes.namespaces, two_nodes.devices, strict=True):
        shown = subprocess.run(
            ["ip", "-netns", namespace, "-brief", "link"], capture_output=True, text=True, check=True
        )
        assert sorted(line.split()[0].split("@")[0] for line in shown.stdout.splitlines()) == sorted([device, "lo"])
    routes = subprocess.run(
        ["ip", "-netns", two_nodes.namespaces[1], "route", "get", ADDRESSES[0]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"dev {two_nodes.devices[1]}" in routes.stdout


def test_nothing_is_left_of_them() -> None:
    with connect_two_nodes() as nodes:
        assert all(namespace in list_namespaces() for namespace in nodes.namespaces)
    assert not any(namespace in list_namespaces() for namespace in nodes.namespaces)


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
