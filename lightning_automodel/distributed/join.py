"""Joining: where the ranks meet, and what they learn if some do not come.

They meet in the store that then serves the process group. A store serves several rounds, one after the other.
Below the round's number it holds, besides the keys of every meeting, `pid/<rank>`, the process that has come as
this rank, and `terms`, the world size and backend of the first one.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from lightning_automodel.distributed import meeting, network
from lightning_automodel.distributed.failures import (
    RankFailedError,
    RankFailure,
    Record,
    how_lost,
    lost_store,
)
from lightning_automodel.distributed.last_resort import limited
from lightning_automodel.distributed.store import STORE_ERRORS, another_connection, launcher_hosts_store

POLL_S = 0.05
RESOLVING_S = 5.0
ENVIRONMENT = "env://"
JOIN = "joining"
MARGIN_S = 5.0  # for what follows the timeout
KEYS = "lightning_automodel/joining"

Stores = tuple[dist.Store, dist.Store]


@dataclass(frozen=True)
class Rendezvous:
    """Rank and world size of this process, and where it meets the others."""

    rank: int
    world_size: int
    method: str  # env://, tcp://address:port, file:///path or another registered scheme
    address: tuple[str, int] | None = None  # of the ``TCPStore``; None if none is made

    @property
    def place(self) -> str:
        """Where the ranks meet, for messages."""
        if self.address is None:
            return self.method
        return "{}:{}".format(*self.address)

    @property
    def hosts_store(self) -> bool:
        """Whether the ``TCPStore`` that the others use lives in this process."""
        return self.rank == 0 and self.address is not None and not launcher_hosts_store()


def locate(
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Rendezvous:
    """Find rank, world size and meeting place: from the arguments, else the environment, else a single process.

    ValueError names a value that is missing, out of range or not a number.
    """
    if rank is None:
        rank = number_in_environment("RANK")
    if world_size is None:
        world_size = number_in_environment("WORLD_SIZE")
    if rank is None and world_size is None and init_method is None:
        return Rendezvous(0, 1, ENVIRONMENT)
    if rank is None or world_size is None:
        raise ValueError(
            f"RANK is {rank} and WORLD_SIZE is {world_size}: start this process with torchrun, or set both"
            " (or pass rank= and world_size=); to run as a single process, unset both, and pass no init_method."
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"Rank {rank} does not exist in a world of {world_size}: RANK (or rank=) must be from 0 to"
            " WORLD_SIZE - 1, and the same WORLD_SIZE (or world_size=), at least 1, must be given to every"
            " process."
        )
    method = init_method or ENVIRONMENT
    address = None
    if world_size > 1:
        address = _address(method)
    return Rendezvous(rank, world_size, method, address)


def _address(method: str) -> tuple[str, int] | None:
    url = urlsplit(method)
    if url.scheme not in ("env", "tcp"):
        return None
    host = url.hostname
    port = url.port
    if url.scheme == "env":
        host = os.environ.get("MASTER_ADDR")
        port = number_in_environment("MASTER_PORT")
    if not host or not port or port > 65535:
        raise ValueError(
            f"init_method={method!r} needs the address of rank 0's machine and a free port there, the same"
            f" for every process, and has {host or 'no address'} and {port or 'no port'}: set MASTER_ADDR"
            " and MASTER_PORT, from 1 to 65535, or pass init_method='tcp://address:port'."
        )
    return host, port


def number_in_environment(name: str, at_least: int = 0) -> int | None:
    """The environment variable ``name`` as a number, None if it is empty; ValueError if below ``at_least``."""
    value = os.environ.get(name, "")
    if value and (not value.strip().isdecimal() or int(value) < at_least):
        raise ValueError(
            f"The environment variable {name} is {value!r}: it must be a whole number, {at_least} or more."
        )
    if not value:
        return None
    return int(value)


def open_store(found: Rendezvous, timeout: timedelta, deadline: float) -> dist.Store:
    """The store in which the ranks meet, in rank 0, in the launcher or in a file.

    Waits until the deadline, on the monotonic clock, and for ever if what listens there is not a store.
    """
    if found.address is None:
        opened: dist.Store = next(
            dist.rendezvous(found.method, found.rank, found.world_size, timeout=timeout)
        )[0]
        return opened
    host, port = found.address
    if found.hosts_store:
        # A pod's own name may be new; a ``TCPStore`` would try for its whole timeout.
        _try_until(time.monotonic() + RESOLVING_S, lambda: socket.getaddrinfo(host, port))
    else:
        # A ``TCPStore`` would try for more than twice the timeout, and flood the log.
        _try_until(deadline, lambda: socket.create_connection((host, port), timeout=RESOLVING_S).close())
    store = dist.TCPStore(
        host,
        port,
        is_master=found.hosts_store,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=found.hosts_store,
    )
    if found.hosts_store:
        _hosted.setdefault(port, store)
    return store


_hosted: dict[int, dist.Store] = {}
"""Stores that this process hosts, by port, until it ends: the others may come back to one before it does."""


def _try_until(deadline: float, function: Callable[[], object]) -> None:
    while True:
        try:
            function()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def meet(found: Rendezvous, backend: str, timeout: timedelta, check: Callable[[], None]) -> Stores:
    """Wait until every rank has joined. A collective, through the store alone.

    Returns the store of this round, for torch, and another connection to it, for this package's hearts and meetings.

    RankFailedError, the same on every rank that has arrived, if ranks do not arrive within ``timeout``, two
    processes have the same rank, ranks disagree about world size or backend, or the store cannot be used. A
    store that accepts connections and never answers ends this process, with the cause.
    """
    if found.world_size == 1:
        store = dist.HashStore()
        return store, store
    timeout_s = timeout.total_seconds()
    hint = (
        f"all ranks must join at {found.place} within {timeout_s:g} s: check that each process runs, with this"
        " address, the same WORLD_SIZE and a RANK of its own"
    )
    silent = lost_store(Record(), f"has not answered for {timeout_s + MARGIN_S:g} s")
    with limited(timeout_s + MARGIN_S, found.rank, f"{silent}; {hint}"):
        try:
            return _join(found, backend, timeout, check)
        except RankFailedError as error:
            failure = error.failure
        except STORE_ERRORS as error:
            host = Record()
            if found.hosts_store:
                host = Record(host=socket.gethostname(), where=JOIN)
            failure = lost_store(host, how_lost(error))
    raise RankFailedError(replace(failure, message=f"{failure.message}; {hint}"))


def _join(found: Rendezvous, backend: str, timeout: timedelta, check: Callable[[], None]) -> Stores:
    """Enter this rank, and meet all others. What it raises is told to those who have come."""
    deadline = time.monotonic() + timeout.total_seconds()
    opened = open_store(found, timeout, deadline)
    rounds = dist.PrefixStore(KEYS, another_connection(opened, timeout))
    number = meeting.first(rounds, "round", 0)
    store = dist.PrefixStore(str(number), rounds)
    rank = found.rank
    ranks = range(found.world_size)
    try:
        _enter(store, found, backend)
        own_address = network.choose_interface(found.address[0] if found.address else "")
        addresses = meeting.meet(store, JOIN, rank, ranks, own_address, deadline - time.monotonic(), check)
        for address in addresses:  # rank 0 may know itself by a loopback address
            network.choose_interface(address)
    except BaseException as error:
        with contextlib.suppress(*STORE_ERRORS):
            meeting.post(store, RankFailure.from_exception(error, rank, JOIN))
        meeting.linger(store, JOIN, rank, ranks, meeting.LINGER_AFTER_FAILURE_S)
        raise
    finally:
        # Whoever comes later is in the next round. Every rank says so before it may come again.
        with contextlib.suppress(*STORE_ERRORS):
            rounds.compare_set("round", str(number), str(number + 1))
    return dist.PrefixStore(str(number), dist.PrefixStore(KEYS, opened)), store


def _enter(store: dist.Store, found: Rendezvous, backend: str) -> None:
    """Enter this rank; RankFailedError if another process has its number, or expects something else.

    Before the meeting, which would not end right: it counts those who come.
    """
    host = socket.gethostname()
    me = f"{host} pid {os.getpid()}"
    came = meeting.first(store, f"pid/{found.rank}", me)
    problem = ""
    if came != me:
        problem = (
            f"two processes joined as this rank, {came} and {me}: give each process a RANK of its own, and each"
            " job a port or file. Where one was killed and started again, start all ranks again"
        )
    own_terms = f"world size {found.world_size} and backend {backend}"
    terms = meeting.first(store, "terms", own_terms)
    if terms != own_terms:
        problem = (
            f"it has {own_terms}, and others have {terms}: give every rank the same WORLD_SIZE and backend"
        )
    if problem:
        raise RankFailedError(RankFailure(found.rank, host, JOIN, "ValueError", problem))


def leave(found: Rendezvous, store: dist.Store, aborts: bool = False) -> None:
    """Post that this rank no longer needs the store. Its host waits some seconds for all posts, if not ``aborts``."""
    limit_s = 0.0 if aborts else meeting.LINGER_S
    meeting.linger(store, "the group", found.rank, range(found.world_size), limit_s)
