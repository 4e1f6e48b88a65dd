"""Networks: the interface that gloo takes, and ranks that others cannot reach there, on two machines' networks."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import destroy_global_state, initialize_distributed
from lightning_automodel.distributed import network
from tests.launch.two_nodes import ADDRESSES, TwoNodes, connect_two_nodes, enter
from tests.processes import forked

LIMIT_S = 60.0


def test_interfaces_of_this_machine() -> None:
    """Those with an address, the loopback interface among them; any address of theirs can be listened at."""
    found = network.interfaces()
    assert found["lo"].startswith(network.LOOPBACK)
    for address in found.values():
        socket.create_server((address, 0)).close()


@pytest.mark.parametrize("host", ["", "127.0.0.1", "no.such.host.invalid"])
def test_nothing_is_chosen_without_a_way_out(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Gloo then goes by the host name, as without this package."""
    monkeypatch.delenv(network.GLOO_INTERFACE, raising=False)
    network.choose_interface(host)
    assert network.GLOO_INTERFACE not in os.environ


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the way leads through another interface."""
    others = [address for name, address in network.interfaces().items() if name != "lo"]
    if not others:
        pytest.skip("this machine has the loopback interface alone")
    monkeypatch.setenv(network.GLOO_INTERFACE, "lo")
    network.choose_interface(others[0])
    assert os.environ[network.GLOO_INTERFACE] == "lo"


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        ([("a", "127.0.0.1"), ("a", "127.0.0.1")], None),
        ([("a", "10.0.0.1"), ("b", "10.0.0.2")], None),
        ([("a", "10.0.0.1"), ("b", "")], None),  # over IPv6, or not Linux: gloo knows
        ([("a", "10.0.0.1"), ("b", "10.0.0.2"), ("b", "127.0.1.1")], 2),
        ([("a", "127.0.0.1"), ("b", "10.0.0.2")], 0),
    ],
)
def test_who_cannot_be_reached(places: list[tuple[str, str]], refused: int | None) -> None:
    """At a loopback address if there are several machines."""
    failure = network.unreachable(places)
    assert (failure and failure.rank) == refused
    if failure is not None:
        host, address = places[failure.rank]
        assert failure.host == host
        assert failure.message.startswith(
            f"gloo would listen at {address}, which other machines cannot reach"
        )


# --- Two machines' networks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with connect_two_nodes() as nodes:
        yield nodes


def _rank(rank: int, namespace: str, variables: dict[str, str], method: str, answers: Any) -> None:
    """Join from a network namespace, and add up over both ranks."""
    enter(namespace)
    os.environ.pop(network.GLOO_INTERFACE, None)
    os.environ.update(variables)
    network.CONNECT_TIMEOUT = timedelta(seconds=1)
    try:
        initialize_distributed(
            "gloo", timedelta(seconds=LIMIT_S), init_method=method, rank=rank, world_size=2
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        answers.put((rank, f"{total.item():g} {os.environ.get(network.GLOO_INTERFACE)}"))
    except RuntimeError as error:
        notes = getattr(error, "__notes__", [])
        answers.put((rank, "\n".join([f"{type(error).__name__}: {error}", *notes])))
    destroy_global_state()


def _join(nodes: TwoNodes, method: str, variables: list[dict[str, str]]) -> list[str]:
    context = forked()
    answers: Any = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, nodes.namespaces[rank], variables[rank], method, answers))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        said = dict(answers.get(timeout=LIMIT_S) for _ in ranks)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    return [said[rank] for rank in range(2)]


def test_the_way_to_rank_0_is_taken(two_nodes: TwoNodes) -> None:
    """Each node's own interface, without any variable, whatever its host name resolves to."""
    first, second = two_nodes.devices
    method = f"tcp://{ADDRESSES[0]}:29517"
    assert _join(two_nodes, method, [{}, {}]) == [f"2 {first}", f"2 {second}"]


def test_network_that_swallows_packets(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """As a firewall does: gloo's own error, long before the timeout, with what to look at."""
    variables = [{network.GLOO_INTERFACE: device} for device in two_nodes.devices]
    neighbour = [
        ADDRESSES[1],
        "lladdr",
        "02:00:00:00:00:01",
        "dev",
        two_nodes.devices[0],
        "nud",
        "permanent",
    ]
    command = ["ip", "-netns", two_nodes.namespaces[0], "neighbour"]
    subprocess.run([*command, "replace", *neighbour], check=True)
    try:
        first, second = _join(two_nodes, f"file://{tmp_path / 'store'}", variables)
    finally:
        subprocess.run([*command, "delete", ADDRESSES[1], "dev", two_nodes.devices[0]], check=True)
    for said in (first, second):
        assert said.startswith("RuntimeError: Gloo connectFullMesh failed")
        assert said.endswith(network.ADVICE)
