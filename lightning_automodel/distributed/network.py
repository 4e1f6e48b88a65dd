"""The network over which ranks connect: gloo's interface, and whether neighbours reach each other there.

Gloo, of which there always is a group, listens at the interface of GLOO_SOCKET_IFNAME, else at the address
that this machine's host name resolves to. On some machines that is the loopback address, which others cannot
reach: gloo would hang, or fail on some ranks.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_automodel.distributed.failures import RankFailedError, RankFailure
from lightning_automodel.distributed.store import family_of, pause_s

log = logging.getLogger(__name__)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
VARIABLES = (GLOO_INTERFACE, NCCL_INTERFACE)
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
LONGEST_CHECK_S = 60.0
_READ_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR
_REACHED = "reached"


def adopt_nccl_interface() -> None:
    """Let gloo connect over the interface that NCCL_SOCKET_IFNAME names, unless gloo's variable is set.

    Not a collective. Nothing is set if NCCL's variable matches several interfaces. The variable stays set,
    since gloo reads it for each group.
    """
    chosen = os.environ.get(NCCL_INTERFACE, "")
    if os.environ.get(GLOO_INTERFACE) or not chosen:
        return
    found = matching_interfaces(chosen, interfaces())
    if len(found) == 1:
        os.environ[GLOO_INTERFACE] = found[0]
        log.info("%s=%s, as %s=%s says.", GLOO_INTERFACE, found[0], NCCL_INTERFACE, chosen)


def matching_interfaces(chosen: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that NCCL takes for a value of NCCL_SOCKET_IFNAME.

    It is a list of prefixes (``eth,ib``), each of which a port may follow (``eth0:5000``). A leading ``=``
    makes them whole names (``=eth0,eth1``), and ``^`` excludes them (``^docker,lo``, ``^=docker0``).
    """
    excludes = chosen.startswith("^")
    listed = chosen.removeprefix("^")
    is_whole = listed.startswith("=")
    patterns = [entry.partition(":")[0].strip() for entry in listed.removeprefix("=").split(",")]
    patterns = [pattern for pattern in patterns if pattern]

    def matches(name: str) -> bool:
        if is_whole:
            return name in patterns
        return name.startswith(tuple(patterns))

    return [name for name in names if matches(name) != excludes]


def interfaces() -> dict[str, str]:
    """The addresses that gloo takes for the network interfaces of this machine, by name; empty if not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking, _READ_IPV4_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


@dataclass(frozen=True)
class Announcement:
    """Where a rank listens, as gloo will, or the ``problem`` if it cannot."""

    host: str
    address: str
    because: str
    network: str  # what this machine has, for messages
    problem: str = ""
    port: int = 0
    password: str = ""


def announce() -> Announcement:
    """The address that gloo will listen at on this machine."""
    host = socket.gethostname()
    chosen = os.environ.get(GLOO_INTERFACE, "")
    known = interfaces()
    shown = ", ".join(f"{name} ({address})" for name, address in known.items()) or "unknown interfaces"
    variables = (f"{name}={os.environ[name]}" if name in os.environ else f"no {name}" for name in VARIABLES)
    network = f"{host} has {' and '.join(variables)}, and the interfaces {shown}"
    if not chosen:
        address = _usable_address(host)
        because = f"which its host name {host} resolves to"
        if address is None:
            because = f"since its host name {host} resolves to no address of that machine"
        return Announcement(host, address or LOOPBACK, because, network)
    name = chosen.split(",")[0]
    if name in known:
        return Announcement(host, known[name], f"that of {GLOO_INTERFACE}={chosen}", network)
    with contextlib.suppress(OSError):
        if known or name not in {name for _, name in socket.if_nameindex()}:
            problem = f"{GLOO_INTERFACE}={chosen} is no interface with an address"
            return Announcement(host, "", "", network, problem)
    return Announcement(host, "", "", network)  # gloo knows


def _usable_address(host: str) -> str | None:
    """The first address of a host name that is one of this machine, as torch chooses it for gloo."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(address)
                return str(address[0])
    return None


def check_connections(rank: int, world_size: int, store: dist.Store, timeout: timedelta) -> None:
    """Let each rank connect to the next one, where gloo will. A collective, through the store.

    RankFailedError, the same on every rank, if one cannot be reached; it names both variables. A rank whose
    address is not known counts as reachable. Each rank needs a constant number of operations.
    """
    if world_size == 1:
        return
    store = dist.PrefixStore("network", store)
    deadline = time.monotonic() + min(timeout.total_seconds(), LONGEST_CHECK_S)
    with _listening(announce(), deadline) as own:
        store.set(f"announced/{rank}", json.dumps(asdict(own)))
        following = (rank + 1) % world_size
        failure = None
        if own.problem:
            failure = RankFailure(rank, own.host, "joining", "ValueError", f"{own.problem}. {own.network}")
        elif text := _wait_for(store, f"announced/{following}", deadline, world_size):
            failure = _try(following, Announcement(**json.loads(text)), rank, own)
        else:
            late = "it had joined, but did not come to connect: its process ended, stopped or was cut off"
            failure = RankFailure(following, "an unknown host", "joining", "TimeoutError", late)
        if failure is not None:
            store.compare_set("failure", "", json.dumps(asdict(failure)))
        if store.add("checked", 1) == world_size:
            store.set("result", _posted_failure(store) or _REACHED)
        result = _wait_for(store, "result", deadline + CONNECT_S, world_size) or _posted_failure(store)
        if not result:
            late = "some ranks had joined, but did not come to connect"
            raise RankFailedError(RankFailure(rank, own.host, "joining", "TimeoutError", late))
        if result != _REACHED:
            raise RankFailedError(RankFailure(**json.loads(result)))


def _posted_failure(store: dist.Store) -> str:
    if not store.check(["failure"]):
        return ""
    return store.get("failure").decode()


def _wait_for(store: dist.Store, key: str, deadline: float, world_size: int) -> str:
    """The value of ``key``, empty if it does not come until the deadline."""
    # ``wait`` is not used: with a limit it floods the log, and without one it blocks signals.
    began_at = time.monotonic()
    while not store.check([key]):
        if time.monotonic() > deadline:
            return ""
        time.sleep(pause_s(time.monotonic() - began_at, world_size))
    return store.get(key).decode()


@contextlib.contextmanager
def _listening(own: Announcement, deadline: float) -> Iterator[Announcement]:
    """Context in which the previous rank can connect; gives the announcement, with port and password."""
    listener = None
    if own.address:
        with contextlib.suppress(OSError):  # an address of one link, say: gloo knows
            listener = socket.create_server((own.address, 0), family=family_of(own.address))
    if listener is None:
        yield replace(own, address="")
        return
    with listener:
        listener.settimeout(max(deadline - time.monotonic(), 1.0))
        password = secrets.token_hex(16)
        answering = threading.Thread(
            target=_answer, args=(listener, password), name="network check", daemon=True
        )
        answering.start()
        yield replace(own, port=listener.getsockname()[1], password=password)


def _answer(listener: socket.socket, password: str) -> None:
    """Greet whoever knows the password, once: another machine's process may listen at this loopback address."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                connection.settimeout(CONNECT_S)
                if connection.recv(len(password), socket.MSG_WAITALL) == password.encode():
                    connection.sendall(_REACHED.encode())
                    return


def _try(rank: int, other: Announcement, own_rank: int, own: Announcement) -> RankFailure | None:
    """Connect to another rank; returns what is wrong if that does not work."""
    if not other.address:
        return None
    try:
        with socket.create_connection((other.address, other.port), timeout=CONNECT_S) as connection:
            connection.sendall(other.password.encode())
            if connection.recv(len(_REACHED), socket.MSG_WAITALL) == _REACHED.encode():
                return None
        error = "another process listens there"
    except OSError as caught:
        error = f"{type(caught).__name__}: {caught}"
    message = (
        f"rank {own_rank} on {own.host} cannot connect to it at {other.address}, {other.because} ({error})."
        f" Set {GLOO_INTERFACE} on each node to the network interface that the other nodes can reach, and"
        f" {NCCL_INTERFACE} for NCCL. {other.network}"
    )
    return RankFailure(rank, other.host, "joining", "ConnectionError", message)
