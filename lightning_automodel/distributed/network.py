"""The network interface that gloo listens at, and ranks that others could not reach there.

Gloo, of which there always is a group, listens at the interface of GLOO_SOCKET_IFNAME, else at the address
that this machine's host name resolves to. On some machines that is the loopback address, which others cannot
reach: gloo would hang, or fail on some ranks.
"""

import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from lightning_automodel.distributed.failures import RankFailure

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127."  # how such addresses begin
CONNECT_TIMEOUT = timedelta(minutes=1)
"""With what to make a group of gloo's: it tries five times, so that a firewall is told in minutes."""
ADVICE = (
    "If it could not connect: all nodes must let connections through at ports that the system chooses, and on each"
    f" node {GLOO_INTERFACE} must name the interface by which the others reach it, if it is not that to rank 0."
)
"""What to do if gloo's groups do not connect; its own error names no address."""
DISCARD = 9  # a port; nothing is sent there
_READ_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR


def interfaces() -> dict[str, str]:
    """The IPv4 addresses of this machine's network interfaces, by name; empty if not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _READ_IPV4_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose_interface(host: str) -> None:
    """Let gloo listen at the interface by which packets to ``host`` leave this machine, unless its variable is set.

    Not a collective; nothing is sent. Where packets do not leave the machine, or over IPv6, nothing is
    chosen. The variable stays set, since gloo reads it for each group.
    """
    if not host or os.environ.get(GLOO_INTERFACE):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, DISCARD))
        own = asking.getsockname()[0]
        names = [name for name, address in interfaces().items() if address == own]
        if names and not own.startswith(LOOPBACK):
            os.environ[GLOO_INTERFACE] = names[0]


def own_place() -> tuple[str, str]:
    """This host, and the address at which gloo will listen there, as far as it is neither set nor chosen."""
    host = socket.gethostname()
    address = ""
    if not os.environ.get(GLOO_INTERFACE):
        with suppress(OSError):
            address = socket.gethostbyname(host)
    return host, address


def unreachable(places: Sequence[tuple[str, str]]) -> RankFailure | None:
    """The failure of the first rank that other hosts cannot reach, by the :func:`own_place` of each; None without one.

    Not a collective: all ranks have the same places, and find the same.
    """
    hosts = {host for host, _ in places}
    for rank, (host, address) in enumerate(places):
        if len(hosts) > 1 and address.startswith(LOOPBACK):
            message = (
                f"gloo would listen at {address}, which other machines cannot reach: set {GLOO_INTERFACE} on each"
                " node to the interface by which the others reach it, and NCCL_SOCKET_IFNAME for NCCL"
            )
            return RankFailure(rank, host, "joining", "ValueError", message)
    return None
