"""The network interface that gloo listens at.

Gloo, of which there always is a group, listens at the interface of GLOO_SOCKET_IFNAME, else at the address
that this machine's host name resolves to. On some machines that is the loopback address, which others cannot
reach: gloo would hang, or fail on some ranks.
"""

import os
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta

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


def choose_interface(host: str) -> str:
    """Let gloo listen at the interface by which packets to ``host`` leave this machine, unless its variable is set.

    Not a collective; nothing is sent. Returns this machine's address there, empty if there is no way. Where packets
    do not leave the machine, over IPv6, or beside Linux, nothing is chosen. The variable stays set, since gloo reads
    it for each group.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, DISCARD))
        own: str = asking.getsockname()[0]
        is_chosen = os.environ.get(GLOO_INTERFACE) or own.startswith(LOOPBACK)
        if sys.platform == "linux" and not is_chosen:
            import fcntl

            for _, name in socket.if_nameindex():
                with suppress(OSError):  # without an IPv4 address
                    request = struct.pack("256s", name.encode()[:15])
                    found = fcntl.ioctl(asking, _READ_IPV4_ADDRESS, request)[20:24]
                    if found == socket.inet_aton(own):
                        os.environ[GLOO_INTERFACE] = name
        return own
    return ""
