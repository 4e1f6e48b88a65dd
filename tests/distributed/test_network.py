"""Networks: the interface that gloo takes, on this machine and on two machines' networks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import destroy_global_state, initialize_distributed
from lightning_automodel.distributed import network
from tests.distributed.launched import Launched
from tests.launch.two_nodes import ADDRESSES, TwoNodes, connect_two_nodes, enter


@pytest.mark.parametrize("host", ["", "127.0.0.1", "no.such.host.invalid"])
def test_nothing_is_chosen_without_a_way_out(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Gloo then goes by the host name, as without this package."""
    monkeypatch.delenv(network.GLOO_INTERFACE, raising=False)
    network.choose_interface(host)
    assert network.GLOO_INTERFACE not in os.environ


# --- Two machines' networks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with connect_two_nodes() as nodes:
        yield nodes


def _join_and_sum(namespace: str, method: str, rank: int) -> str:
    """Join from a network namespace, and add up over both ranks; the error with its notes, if there is one."""
    enter(namespace)
    network.CONNECT_TIMEOUT = timedelta(seconds=1)
    try:
        initialize_distributed("gloo", timedelta(minutes=1), init_method=method, rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        return f"{total.item():g} {os.environ.get(network.GLOO_INTERFACE)}"
    except RuntimeError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    finally:
        destroy_global_state()


def _join(nodes: TwoNodes, methods: list[str], interfaces: list[str]) -> list[str]:
    ranks = [
        Launched(
            _join_and_sum, nodes.namespaces[rank], methods[rank], rank, GLOO_SOCKET_IFNAME=interfaces[rank]
        )
        for rank in range(2)
    ]
    return [rank.outcome().value for rank in ranks]


@pytest.mark.parametrize("own_name", [ADDRESSES[0], "localhost"])
def test_the_way_to_the_others_is_taken(two_nodes: TwoNodes, own_name: str) -> None:
    """Each node's own interface, without any variable, whatever its host name resolves to on rank 0."""
    first, second = two_nodes.devices
    methods = [f"tcp://{name}:29517" for name in (own_name, ADDRESSES[0])]
    assert _join(two_nodes, methods, ["", ""]) == [f"2 {first}", f"2 {second}"]


def _is_set_to_loopback(nodes: TwoNodes, folder: Path) -> list[str]:
    """What is set stays, also where the way leads through another interface."""
    return _join(nodes, [f"tcp://{ADDRESSES[0]}:29518"] * 2, ["lo", "lo"])


def _swallows_packets(nodes: TwoNodes, folder: Path) -> list[str]:
    """As a firewall does."""
    nobody = ["lladdr", "02:00:00:00:00:01", "dev", nodes.devices[0], "nud", "permanent"]
    command = ["ip", "-netns", nodes.namespaces[0], "neighbour", "replace", ADDRESSES[1], *nobody]
    subprocess.run(command, check=True)
    return _join(nodes, [f"file://{folder / 'store'}"] * 2, list(nodes.devices))


IN_VAIN = [_is_set_to_loopback, _swallows_packets]


@pytest.fixture(scope="module")
def said_in_vain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Future]]:
    """What ranks say that cannot connect: between nodes of their own at the same time, as they mostly wait."""

    def run(act: Callable[[TwoNodes, Path], list[str]], folder: Path) -> list[str]:
        with connect_two_nodes() as nodes:
            return act(nodes, folder)

    with ThreadPoolExecutor() as executor:
        yield {act: executor.submit(run, act, tmp_path_factory.mktemp("store")) for act in IN_VAIN}


@pytest.mark.parametrize("act", IN_VAIN)
def test_gloo_cannot_connect(act: Any, said_in_vain: dict[Any, Future]) -> None:
    """Gloo's own error, long before the timeout, with what to look at."""
    for said in said_in_vain[act].result():
        assert said.startswith("RuntimeError: Gloo connectFullMesh failed")
        assert said.endswith(network.ADVICE)
