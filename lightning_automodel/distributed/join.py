"""Joining: where the ranks meet, and what they learn if some do not come.

They meet on a board of their own, in the store that then serves the process group. A store serves several
rounds, one after the other. Below the round's number it holds, besides the keys of every board,
`join/terms`, the world size and backend of the first rank, and `left/<rank>` for each rank that no longer
needs the store.
"""

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import torch.distributed as dist

from lightning_automodel.distributed import network
from lightning_automodel.distributed.board import LINGER_S, Board
from lightning_automodel.distributed.failures import RankFailedError, RankFailure
from lightning_automodel.distributed.store import family_of, launcher_hosts_store, pause_s

POLL_S = 0.05
RESOLVING_S = 5.0
ENVIRONMENT = "env://"
JOIN = "join"
KEYS = "lightning_automodel/joining"


@dataclass(frozen=True)
class Rendezvous:
    """Rank and world size of this process, and where it meets the others."""

    rank: int
    world_size: int
    method: str = ""  # env://, tcp://address:port, file:///path or another registered scheme
    address: tuple[str, int] | None = None  # of the ``TCPStore``; None if none is made
    store: dist.Store | None = None  # what the caller passed in place of a method

    @property
    def place(self) -> str:
        """Where the ranks meet, for messages."""
        if self.store is not None:
            return f"the given {type(self.store).__name__}"
        if self.method == ENVIRONMENT and self.address:
            return "{}:{} (env://)".format(*self.address)
        return self.method

    @property
    def hosts_store(self) -> bool:
        """Whether the ``TCPStore`` that the others use lives in this process."""
        return self.rank == 0 and self.address is not None and not launcher_hosts_store()


def locate(
    init_method: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Rendezvous:
    """Find rank, world size and meeting place: from the arguments, else the environment, else a single process.

    ValueError names a value that is missing, out of range or not a number.
    """
    if init_method is not None and store is not None:
        raise ValueError(f"Pass either init_method={init_method!r} or store={store!r}, not both.")
    if rank is None:
        rank = number_in_environment("RANK")
    if world_size is None:
        world_size = number_in_environment("WORLD_SIZE")
    if rank is None and world_size is None and init_method is None and store is None:
        return Rendezvous(0, 1, ENVIRONMENT)
    if rank is None or world_size is None:
        raise ValueError(
            f"RANK is {rank} and WORLD_SIZE is {world_size}: start this process with torchrun, or set both"
            " (or pass rank= and world_size=); to run as a single process, unset both, and pass neither"
            " init_method nor store."
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"Rank {rank} does not exist in a world of {world_size}: RANK (or rank=) must be from 0 to"
            " WORLD_SIZE - 1, and the same WORLD_SIZE (or world_size=), at least 1, must be given to every"
            " process."
        )
    method = ""
    if store is None:
        method = init_method or ENVIRONMENT
    address = None
    if world_size > 1:
        address = _address(method)
    return Rendezvous(rank, world_size, method, address, store)


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
    """The store in which the ranks meet: the caller's, or a new one in rank 0 or in the launcher.

    Waits until the deadline, on the monotonic clock, and for ever if what listens there is not a store.
    """
    if found.store is not None:
        return found.store
    if found.address is None:
        if "?" in found.method:
            separator = "&"
        else:
            separator = "?"
        url = f"{found.method}{separator}rank={found.rank}&world_size={found.world_size}"
        store: dist.Store = next(dist.rendezvous(url, timeout=timeout))[0]
        return store
    host, port = found.address
    if found.hosts_store:
        # A pod's own name may be new; a ``TCPStore`` would try for its whole timeout.
        _try_until(time.monotonic() + RESOLVING_S, lambda: socket.getaddrinfo(host, port))
    else:
        # A ``TCPStore`` would try for more than twice the timeout, and flood the log.
        _try_until(deadline, lambda: socket.create_connection((host, port), timeout=RESOLVING_S).close())
    return dist.TCPStore(
        host,
        port,
        is_master=found.hosts_store,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=found.hosts_store,
        master_listen_fd=_listen(host, port) if found.hosts_store else None,
    )


def _listen(host: str, port: int) -> int | None:
    """A listening socket on the interface of ``host`` alone; None if that is a name or not of this machine.

    A name may mean another interface elsewhere. On all interfaces, a store stalls if looking up names fails.
    """
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
        return socket.create_server((host, port), family=family_of(host)).detach()
    except (ValueError, OSError):  # of a port in use torch raises, unless a store of this process has it
        return None


def _try_until(deadline: float, function: Callable[[], object]) -> None:
    while True:
        try:
            function()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def meet(found: Rendezvous, backend: str, timeout: timedelta, check: Callable[[], None]) -> dist.Store:
    """Wait until every rank has joined; returns the store. A collective, through the store alone.

    RankFailedError, the same on every rank that has arrived, if ranks do not arrive within ``timeout``, two
    processes have the same rank, ranks disagree about world size or backend, or the store cannot be used.
    """
    if found.world_size == 1:
        store = found.store
        if store is None:
            store = dist.HashStore()
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        attempt = _Round(found, backend, timeout, deadline, check)
        try:
            return attempt.join()
        except RankFailedError:
            # It may have been the store of an earlier group, just before it closed: connect again.
            is_renewed = found.address is not None and not found.hosts_store
            if attempt.board.lost is None or not is_renewed or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


class _Round:
    """One attempt of all ranks to join."""

    def __init__(
        self, found: Rendezvous, backend: str, timeout: timedelta, deadline: float, check: Callable[[], None]
    ) -> None:
        self._found = found
        self._timeout = timeout
        self._deadline = deadline
        self._terms = f"world size {found.world_size} and backend {backend}"
        self._me = f"{socket.gethostname()} pid {os.getpid()}"
        # Longer than connecting may take, which tells more when it fails.
        patience_s = timeout.total_seconds() + 1.0
        own = {"where": "joining"}
        self._ranks = range(found.world_size)
        self.board = Board(found.rank, self._connect, JOIN, self._ranks, patience_s, lambda: own)
        self.board.check_while_waiting(check)

    def _connect(self) -> dist.Store:
        self._rounds = dist.PrefixStore(KEYS, open_store(self._found, self._timeout, self._deadline))
        self._store = dist.PrefixStore(str(self._rounds.add("round", 0)), self._rounds)
        return self._store

    def join(self) -> dist.Store:
        """Enter this rank, wait until all have come, and close the board; returns the store of this round."""
        board = self.board
        board.start()
        try:
            problem = board.call(self._enter)
            if problem:
                raise RankFailedError(RankFailure(board.rank, board.host, "joining", "ValueError", problem))
            remaining_s = self._deadline - time.monotonic()
            explain = partial(board.explain_missing, JOIN, self._ranks)
            board.wait_for(f"{JOIN}/result", JOIN, remaining_s, explain)
            self._check_network(remaining_s)
            return self._store
        except BaseException as error:
            if isinstance(error, RankFailedError):
                if board.verdicts[JOIN] is None:
                    error = self._post(error.failure)
                board.conclude(JOIN, len(self._ranks))
            raise error from None
        finally:
            board.close()

    def _check_network(self, limit_s: float) -> None:
        """Raise RankFailedError, the same on all ranks, if gloo would listen where another node cannot reach it."""
        if self._found.address is not None:
            network.choose_interface(self._found.address[0])
        place = json.dumps(network.own_place())
        places = self.board.gather("network", self._ranks, place, JOIN, limit_s)
        failure = network.unreachable([json.loads(each) for each in places])
        if failure is not None:
            raise RankFailedError(failure)

    def _enter(self, store: dist.Store) -> str:
        """Enter this rank into the round; returns what is wrong with it, if anything."""
        came = store.compare_set(f"{JOIN}/{self._found.rank}", "", self._me).decode()
        if came != self._me:
            return (
                f"two processes joined as this rank, {came} and {self._me}: give each process a RANK of its"
                " own, and each job a port or file. Where one was killed and started again, start all ranks"
                " again"
            )
        terms = store.compare_set(f"{JOIN}/terms", "", self._terms).decode()
        if terms != self._terms:
            return f"it has {self._terms}, and others have {terms}: give every rank the same WORLD_SIZE and backend"
        if store.add(f"{JOIN}/arrived", 1) == self._found.world_size:
            self._rounds.add("round", 1)  # whoever comes later is in the next round
            store.set(f"{JOIN}/result", "joined")
        return ""

    def _post(self, failure: RankFailure) -> RankFailedError:
        """Post the ``failure``, with what to do, and end the round; returns what to raise."""
        hint = (
            f"all ranks must join at {self._found.place} within {self._timeout.total_seconds():g} s: check"
            " that each process runs, with this address, the same WORLD_SIZE and a RANK of its own"
        )
        own = replace(failure, message=f"{failure.message}; {hint}")

        def post(store: dist.Store) -> RankFailure:
            posted = self.board.post(store, JOIN, own)
            if posted == own:
                self._rounds.add("round", 1)
            return posted

        try:
            return RankFailedError(self.board.call(post, LINGER_S))
        except RankFailedError:
            return RankFailedError(own)


def leave(found: Rendezvous, store: dist.Store, linger_s: float = LINGER_S) -> None:
    """Post that this rank no longer needs the store; its host waits up to ``linger_s`` seconds for all posts."""
    if found.world_size == 1:
        return
    with contextlib.suppress(RuntimeError):
        # Unlike other operations, this one does not wait for an answer: the store's host may be stopped.
        store.set(f"left/{found.rank}", "1")
        left = [f"left/{rank}" for rank in range(found.world_size)]
        began_at = time.monotonic()
        waited_s = 0.0
        while found.hosts_store and waited_s < linger_s and not store.check(left):
            time.sleep(pause_s(waited_s, found.world_size))
            waited_s = time.monotonic() - began_at
