"""Where the ranks of a world meet: rank, world size and address, checked, and the store at that address."""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from lightning_automodel.distributed import connections

POLL_S = 0.05
RESOLVING_S = 5.0
ENVIRONMENT = "env://"
SECRET = "LIGHTNING_AUTOMODEL_RUN_SECRET"


@dataclass(frozen=True)
class Rendezvous:
    """Rank and world size of this process, and where it meets the others.

    ``method`` is ``env://``, ``tcp://address:port``, ``file:///path`` or another registered scheme; "" if the caller
    passed a ``store``.
    """

    rank: int
    world_size: int
    method: str = ""
    store: dist.Store | None = None

    @property
    def place(self) -> str:
        """Where the ranks meet, for messages."""
        if self.world_size == 1:
            return "nowhere (a single process)"
        if self.store is not None:
            known = connections.store_address(self.store)
            return f"the given {type(self.store).__name__}" + (f" on port {known[1]}" if known is not None else "")
        address = self.address
        where = f"{address[0]}:{address[1]}" if address is not None else self.method
        return f"{where} ({ENVIRONMENT})" if self.method == ENVIRONMENT else self.method

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the ``TCPStore``; None if no ``TCPStore`` is made."""
        url = urlsplit(self.method)
        if self.store is not None or self.world_size == 1 or url.scheme not in ("env", "tcp"):
            return None
        if url.scheme == "env":
            return _address_in_environment()
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if host is None or port is None:
            raise ValueError(
                f"init_method={self.method!r} must be tcp://address:port with a port from 1 to 65535, "
                "e.g. tcp://10.0.0.1:29500."
            )
        return host, port

    @property
    def hosts_store(self) -> bool:
        """Whether the ``TCPStore`` that the others use lives in this process."""
        return self.rank == 0 and self.address is not None and not launcher_hosts_store()


def launcher_hosts_store() -> bool:
    """Whether ``torchrun`` keeps the store at MASTER_ADDR and MASTER_PORT, so that no rank has to."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def run_secret() -> str:
    """Prefix of this run's keys, so that an outsider who reaches the store cannot write what the ranks read.

    The environment variable ``LIGHTNING_AUTOMODEL_RUN_SECRET``, which :func:`shared_secret` gives, else torchrun's run
    id; "" without either.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get(SECRET) or ("" if run_id == "none" else run_id)


def shared_secret() -> dict[str, str]:
    """The variable with the secret for processes that this one starts, all ranks of a run; a new one unless set."""
    return {SECRET: os.environ.get(SECRET) or secrets.token_hex(16)}


# --- Rank, world size and address -------------------------------------------------------------------------------------


def locate(
    init_method: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Rendezvous:
    """Find rank, world size and meeting place: from the arguments, else from the environment, else a world of one.

    Raises:
        ValueError: If a value is missing, out of range or not a number; the message names it.
    """
    if init_method is not None and store is not None:
        raise ValueError(f"Pass either init_method={init_method!r} or store={store!r}, not both.")
    rank = number_in_environment("RANK") if rank is None else rank
    world_size = number_in_environment("WORLD_SIZE") if world_size is None else world_size
    if rank is None and world_size is None and init_method is None and store is None:
        rank, world_size = 0, 1
    if rank is None or world_size is None:
        told = {"RANK": rank, "WORLD_SIZE": world_size}
        known = ", ".join(f"{name} is {'not set' if value is None else value}" for name, value in told.items())
        raise ValueError(
            f"{known}: start this process with torchrun, or set both (or pass rank= and world_size=); to run as a "
            "single process, unset both, and pass neither init_method nor store."
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"Rank {rank} does not exist in a world of {world_size}: RANK (or rank=) must be from 0 to WORLD_SIZE - 1, "
            "and the same WORLD_SIZE (or world_size=), at least 1, must be given to every process."
        )
    found = Rendezvous(rank, world_size, "" if store is not None else init_method or ENVIRONMENT, store)
    _ = found.address  # raises if the address is not valid
    url = urlsplit(found.method)
    if url.scheme == "file" and world_size > 1 and not Path(url.path).parent.is_dir():
        # A `FileStore` would wait minutes for the folder.
        raise ValueError(
            f"init_method={found.method!r}: the folder {Path(url.path).parent} does not exist; name a file, which need "
            "not exist, in a folder that every rank can write to."
        )
    return found


def number_in_environment(name: str, at_least: int = 0) -> int | None:
    """The environment variable ``name`` as a number; None where it is unset or empty.

    Raises:
        ValueError: If it is not a whole number of at least ``at_least``.
    """
    value = os.environ.get(name, "")
    if value and (not value.strip().isdecimal() or int(value) < at_least):
        raise ValueError(
            f"The environment variable {name} is {value!r}: it must be a whole number, {at_least} or more."
        )
    return int(value) if value else None


def _address_in_environment() -> tuple[str, int]:
    address, port = os.environ.get("MASTER_ADDR", ""), number_in_environment("MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} must be set for init_method='env://': the address of rank 0's machine and a free "
            "port there, the same for every process; or pass init_method='tcp://address:port'."
        )
    assert port is not None
    if port > 65535:
        raise ValueError(f"MASTER_PORT is {port}: it must be from 1 to 65535.")
    return address, port


# --- The store --------------------------------------------------------------------------------------------------------


def open_store(found: Rendezvous, timeout: timedelta, deadline: float) -> dist.Store:
    """The store in which the ranks meet: the caller's, or a new one, which lives in rank 0 or in the launcher.

    May hang past the deadline (on the monotonic clock) if something else listens at the address.

    Raises:
        RuntimeError: If rank 0 cannot be reached, or cannot host the store, e.g. on a port in use.
    """
    if found.store is not None:
        return found.store
    # -1 is an unknown world size: with a known one, rank 0 would wait here for all ranks, and not name missing ones.
    world_size = found.world_size if found.address is None else -1
    try:
        if found.address is not None and found.hosts_store:
            return _host_store(*found.address, timeout)
        if found.address is not None:
            _await_host(found.address, deadline)
        separator = "&" if "?" in found.method else "?"
        url = f"{found.method}{separator}rank={found.rank}&world_size={world_size}"
        store, _, _ = next(dist.rendezvous(url, timeout=timeout))
    except (RuntimeError, OSError) as error:
        raise RuntimeError(no_store(found, timeout, str(error).splitlines()[0])) from error
    return store


def _host_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Host the store, only on the interface of ``address`` if that is an IP address of this machine.

    A name may mean another interface on other machines (Debian maps a machine's own name to 127.0.1.1), and an address
    that is not this machine's belongs to a proxy: then it listens on all interfaces, as torch always does.
    """
    give_up_at = time.monotonic() + RESOLVING_S
    while True:
        try:
            socket.getaddrinfo(address, port)
            break
        except OSError as error:
            # A pod's own name may be new; a ``TCPStore`` would try for its whole timeout.
            if time.monotonic() > give_up_at:
                raise ValueError(
                    f"Rank 0 cannot resolve its own address {address!r} ({error}): set MASTER_ADDR (or init_method) to"
                    " the name or IP address of its machine, the same for every rank."
                ) from error
            time.sleep(POLL_S)
    listener = None
    # `ip_address` raises ValueError for a name.
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
        try:
            listener = socket.create_server(
                (address, port), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET
            )
        except OSError as error:
            # In use: if by a store of this process, that one serves the next group as well, else torch raises below.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _await_host(address: tuple[str, int], deadline: float) -> None:
    """Wait until something listens: a ``TCPStore`` would try for more than twice the timeout, and flood the log."""
    while True:
        remaining = deadline - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(POLL_S, remaining)).close()
            return
        except OSError:
            if remaining <= POLL_S:
                raise
        time.sleep(POLL_S)


def no_store(found: Rendezvous, timeout: timedelta, cause: str) -> str:
    """Message for a store that cannot be used: which process is the cause, and what to do."""
    if "EADDRINUSE" in cause and found.address is not None:
        return (
            f"Rank 0 of {found.world_size} cannot host the store at {found.place}: port {found.address[1]} is in use "
            "by another process; choose a free one with MASTER_PORT (or in init_method), the same for every rank."
        )
    what = f"at {found.place} within {timeout.total_seconds():g} s: {cause}; check that"
    if found.address is None or found.rank == 0 or launcher_hosts_store():
        return (
            f"Rank {found.rank} of {found.world_size} could not use the store {what} the process that hosts it runs, "
            "and that MASTER_ADDR (or init_method) names its machine."
        )
    return (
        f"Rank 0 of {found.world_size} did not join: rank {found.rank} could not use the store that rank 0 hosts"
        f" {what} rank 0 runs, and that every rank has its address and port."
    )
