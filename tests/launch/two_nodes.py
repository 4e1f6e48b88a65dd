"""Two nodes on one machine: network namespaces that are joined by a pair of virtual Ethernet devices.

Ranks on them talk over TCP between two addresses, as on two machines; they share the file system and the
host name. `connect_two_nodes` makes them and always takes them down again. It needs Linux, `ip` of iproute2
and the permission to make namespaces, and skips the test where one is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.231.77.1", "10.231.77.2")  # in namespaces of their own, so they meet no other network


@dataclass(frozen=True)
class TwoNodes:
    """The two nodes, by the names of their network namespaces and devices; the first hosts the rendezvous."""

    namespaces: tuple[str, str]
    devices: tuple[str, str]


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into a network namespace."""
    with Path("/var/run/netns", namespace).open() as entry:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(entry.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def connect_two_nodes() -> Iterator[TwoNodes]:
    """Make two nodes for a `with` block; skips the running test, with the reason, where that is impossible."""
    if shutil.which("ip") is None:
        pytest.skip("two nodes need `ip`: install iproute2")
    token = uuid.uuid4().hex[:8]
    nodes = TwoNodes((f"automodel-{token}-0", f"automodel-{token}-1"), (f"am{token}a", f"am{token}b"))
    try:
        try:
            _set_up(nodes)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two nodes need the permission to make network namespaces: {error.stderr.strip()}")
        yield nodes
    finally:
        for namespace in nodes.namespaces:
            # With a namespace goes its device, and with that the device at the other end.
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _set_up(nodes: TwoNodes) -> None:
    for namespace in nodes.namespaces:
        _ip("netns", "add", namespace)
    first, second = (
        [device, "netns", name] for device, name in zip(nodes.devices, nodes.namespaces, strict=True)
    )
    _ip("link", "add", *first, "type", "veth", "peer", "name", *second)
    for device, namespace, address in zip(nodes.devices, nodes.namespaces, ADDRESSES, strict=True):
        _ip("-netns", namespace, "address", "add", f"{address}/24", "dev", device)
        _ip("-netns", namespace, "link", "set", device, "up")
        _ip("-netns", namespace, "link", "set", "lo", "up")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True).stdout
