"""Networks: the interface that gloo takes, and neighbours that cannot reach each other, on two machines' networks."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import destroy_global_state, initialize_distributed
from lightning_automodel.distributed import network
from lightning_automodel.distributed.failures import RankFailedError
from tests.launch.two_nodes import ADDRESSES, TwoNodes, connect_two_nodes
from tests.processes import forked

NAMES = ["lo", "eth0", "eth1", "eth10", "ib0", "docker0"]
CLONE_NEWNET = 0x40000000
LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("ib", ["ib0"]),
        ("ib0", ["ib0"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,ib0", ["eth1", "ib0"]),
        ("eth0,eth1", ["eth0", "eth1", "eth10"]),
        ("=eth", []),
        ("^docker,lo,ib", ["eth0", "eth1", "eth10"]),
        ("^=eth1,lo", ["eth0", "eth10", "ib0", "docker0"]),
        ("^lo,eth,docker", ["ib0"]),
        ("=ib0:5000", ["ib0"]),
        ("mlx", []),
        ("", []),
    ],
)
def test_nccl_syntax(chosen: str, expected: list[str]) -> None:
    """Prefixes, whole names, exclusions, ports."""
    assert network.matching_interfaces(chosen, NAMES) == expected


@pytest.mark.parametrize(
    ("nccl", "gloo", "expected"),
    [
        ("ib", None, "ib0"),
        ("=eth1", "", "eth1"),
        ("eth1", None, None),  # two interfaces
        ("^docker,lo", None, None),
        ("ib", "eth0", "eth0"),  # what is set stays
        ("mlx", None, None),
        (None, None, None),
    ],
)
def test_gloo_takes_the_only_interface(
    monkeypatch: pytest.MonkeyPatch, nccl: str | None, gloo: str | None, expected: str | None
) -> None:
    """Of NCCL's variable, where gloo has none of its own."""
    monkeypatch.setattr(network, "interfaces", lambda: dict.fromkeys(NAMES, "10.0.0.1"))
    for name, value in ((network.NCCL_INTERFACE, nccl), (network.GLOO_INTERFACE, gloo)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    network.adopt_nccl_interface()
    assert os.environ.get(network.GLOO_INTERFACE) == expected


def test_interfaces_of_this_machine() -> None:
    """Those with an address, the loopback interface among them; any value of theirs can be listened at."""
    found = network.interfaces()
    assert found["lo"] == network.LOOPBACK
    for address in found.values():
        if not address.startswith("fe80"):
            socket.create_server(
                (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            ).close()


def _check_on_threads(announced: dict[int, network.Announcement], patch: pytest.MonkeyPatch) -> list[str]:
    """What three ranks say, of which some announce something else than they should."""
    store = dist.HashStore()
    own = threading.local()
    plain = network.Announcement("host", network.LOOPBACK, "because", "host has no networks")
    patch.setattr(network, "announce", lambda: announced.get(own.rank, plain))
    said = [""] * 3

    def check(rank: int) -> None:
        own.rank = rank
        try:
            network.check_connections(rank, 3, store, timedelta(seconds=LIMIT_S))
        except RankFailedError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return said


def test_neighbours_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check_on_threads({}, monkeypatch) == ["", "", ""]
    for address in ("", "fe80::1"):  # not Linux, or an address of one link: gloo will tell
        unknown = network.Announcement("host", address, "", "")
        assert _check_on_threads({1: unknown}, monkeypatch) == ["", "", ""]


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for until the limit, and not without one."""
    monkeypatch.setattr(network, "LONGEST_CHECK_S", 0.2)
    monkeypatch.setattr(network, "CONNECT_S", 0.2)
    with pytest.raises(
        RankFailedError, match=r"rank 1 on an unknown host failed in joining: .* did not come to connect"
    ):
        network.check_connections(0, 2, dist.HashStore(), timedelta(minutes=30))


def test_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told on all ranks, with those that exist."""
    monkeypatch.setenv(network.GLOO_INTERFACE, "eth77")
    announced = network.announce()
    monkeypatch.delenv(network.GLOO_INTERFACE)
    said = _check_on_threads({2: announced}, monkeypatch)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith(
        f"rank 2 on {socket.gethostname()} failed in joining: ValueError: GLOO_SOCKET_IFNAME=eth77"
    )
    assert "lo (127.0.0.1)" in said[0]


def test_another_process_at_the_address() -> None:
    """As on two machines whose ranks both announce the loopback address, and happen to have the same port."""
    with socket.create_server((network.LOOPBACK, 0)) as foreign:

        def answer() -> None:
            connection, _ = foreign.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request")

        threading.Thread(target=answer, daemon=True).start()
        port = foreign.getsockname()[1]
        failure = network._try(
            1,
            network.Announcement("other", network.LOOPBACK, "because", "", port=port, password="x"),
            0,
            network.Announcement("own", network.LOOPBACK, "because", ""),
        )
    assert failure is not None
    assert "another process listens there" in failure.message


# --- Two machines' networks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with connect_two_nodes() as nodes:
        yield nodes


def _rank(rank: int, namespace: str, variables: dict[str, str], path: str, answers: Any) -> None:
    """Join from a network namespace, and add up over both ranks."""
    with Path("/var/run/netns", namespace).open() as entry:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(entry.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    for name in network.VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    network.CONNECT_S = 1.0
    try:
        initialize_distributed(
            "gloo", timedelta(seconds=LIMIT_S), init_method=f"file://{path}", rank=rank, world_size=2
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        answers.put((rank, f"{total.item():g} {os.environ.get(network.GLOO_INTERFACE)}"))
    except RuntimeError as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
    destroy_global_state()


def _join_over(nodes: TwoNodes, path: Path, variables: list[dict[str, str]]) -> list[str]:
    context = forked()
    answers: Any = context.Queue()
    ranks = [
        context.Process(
            target=_rank, args=(rank, nodes.namespaces[rank], variables[rank], str(path), answers)
        )
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


def test_host_name_that_resolves_to_the_loopback_address(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Both ranks say who cannot be reached, where, and both variables, long before the timeout."""
    resolves = socket.gethostbyname(socket.gethostname())
    if not resolves.startswith("127."):
        pytest.skip(f"this machine's host name resolves to {resolves}")
    first, second = _join_over(
        two_nodes, tmp_path / "store", [{}, {network.NCCL_INTERFACE: "^lo,docker,am"}]
    )
    assert first == second
    assert first.startswith("RankFailedError: rank ")
    assert (
        f"cannot connect to it at {resolves}, which its host name {socket.gethostname()} resolves to"
        in first
    )
    assert "Set GLOO_SOCKET_IFNAME on each node to the network interface" in first
    assert "and NCCL_SOCKET_IFNAME for NCCL" in first
    assert any(
        f"{device} ({address})" in first
        for device, address in zip(two_nodes.devices, ADDRESSES, strict=True)
    )


def test_only_the_interface_of_nccl_is_set(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Each node's own, as a prefix or a whole name."""
    first, second = two_nodes.devices
    variables = [{network.NCCL_INTERFACE: f"={first}"}, {network.NCCL_INTERFACE: "^lo"}]
    assert _join_over(two_nodes, tmp_path / "store", variables) == [f"2 {first}", f"2 {second}"]


def test_network_that_swallows_packets(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """As a firewall does: told once a connection has taken too long, and not at the timeout."""
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
        first, second = _join_over(two_nodes, tmp_path / "store", variables)
    finally:
        subprocess.run([*command, "delete", ADDRESSES[1], "dev", two_nodes.devices[0]], check=True)
    assert first == second
    assert "TimeoutError: timed out" in first
    assert f"that of GLOO_SOCKET_IFNAME={two_nodes.devices[1]}" in first or two_nodes.devices[0] in first
