"""Every rank waits in the store for all others, and all of them get one error that names the culprit."""

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel.distributed import connections
from lightning_automodel.distributed.rendezvous import Rendezvous, no_store, open_store, run_secret

LINGER_S = 5.0
SHORTEST_POLL_S = 0.002
LONGEST_POLL_S = 0.25
LONGEST_LIST = 16
KEYS = "lightning_automodel/joining"
NEXT_ROUND = "next round"


@dataclass(frozen=True)
class JoinRound:
    """One round in which the ranks of a world join: a store serves one round after the other.

    Attributes:
        found: Who this process is.
        backend: Backend that all ranks must have asked for.
        store: Where the ranks meet, below the run's secret.
        number: Number of the round.
        keys: The store with the prefix of the round.
    """

    found: Rendezvous
    backend: str
    store: dist.Store
    number: int
    keys: dist.Store = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", dist.PrefixStore(f"{KEYS}/{self.number}", self.store))

    @property
    def group_store(self) -> dist.Store:
        """Store for the process group of this round."""
        return dist.PrefixStore("group", self.keys)

    def leave(self, linger_s: float = LINGER_S) -> None:
        """Tell that this rank needs the store no longer; its host waits up to ``linger_s`` until all have told."""
        if self.found.world_size == 1:
            return
        with contextlib.suppress(RuntimeError):
            self.keys.set(f"left/{self.found.rank}", "1")
            if self.found.hosts_store and linger_s > 0:
                came = [rank for rank in range(self.found.world_size) if self.keys.check([f"rank/{rank}"])]
                _wait(self.keys, [f"left/{rank}" for rank in came], time.monotonic() + linger_s)


class _StoreLostError(RuntimeError):
    """The store went away while this rank waited in it."""


def meet(found: Rendezvous, backend: str, timeout: timedelta) -> JoinRound:
    """Wait until every rank is there. A collective over the world, through the store alone.

    A thread does it, as a call to a store whose host is stopped, or is no store, would never return.

    Raises:
        RuntimeError: On every rank that is there, with one text: ranks that did not come within ``timeout``, two
            processes with one rank, ranks that disagree about world size or backend. Also where the store cannot be
            used.
    """
    if found.world_size == 1:
        return JoinRound(found, backend, found.store if found.store is not None else dist.HashStore(), 0)
    outcome: list[JoinRound | BaseException] = []
    reached = threading.Event()

    def run() -> None:
        try:
            outcome.append(_meet(found, backend, timeout, reached))
        except BaseException as error:
            outcome.append(error)

    before = connections.open_sockets()
    thread = threading.Thread(target=run, name="lightning_automodel join", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if reached.is_set():
        thread.join(2 * LINGER_S)
    if thread.is_alive():
        # It is stuck in a client of something that is no store: only the end of its connection ends it.
        if found.address is not None:
            connections.shut_down(connections.open_sockets() - before, only_port=found.address[1])
            thread.join(LONGEST_POLL_S)
        raise RuntimeError(no_store(found, backend, timeout, "what listens there does not answer as a store"))
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _meet(found: Rendezvous, backend: str, timeout: timedelta, reached: threading.Event) -> JoinRound:
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store = open_store(found, backend, timeout, deadline)
        if secret := run_secret():
            store = dist.PrefixStore(secret, store)
        reached.set()
        try:
            return _join(found, backend, store, timeout, deadline)
        except _StoreLostError as error:
            # This rank may have met the store of an earlier group in its last moment.
            is_renewed = found.address is not None and not found.hosts_store
            if not is_renewed or time.monotonic() > deadline:
                raise RuntimeError(no_store(found, backend, timeout, str(error))) from error


def _join(found: Rendezvous, backend: str, store: dist.Store, timeout: timedelta, deadline: float) -> JoinRound:
    counter = dist.PrefixStore(KEYS, store)
    try:
        while True:
            join_round = JoinRound(found, backend, store, counter.add("round", 0))
            result = _take_part(join_round, counter, deadline, timeout)
            if not result:
                return join_round
            if result != NEXT_ROUND:
                break
    except (dist.DistError, TimeoutError) as error:
        raise _StoreLostError(str(error).splitlines()[0]) from error
    join_round.leave()
    raise RuntimeError(result)


def _take_part(join_round: JoinRound, counter: dist.Store, deadline: float, timeout: timedelta) -> str:
    """Enter this rank into the round and return its result: "" if all are there, else what is wrong."""
    found, keys = join_round.found, join_round.keys
    me = f"{socket.gethostname()} pid {os.getpid()}"
    terms = f"world size {found.world_size} and backend {join_round.backend}"
    if keys.add(f"claims/{found.rank}", 1) > 1:
        other = _read(keys, f"rank/{found.rank}", deadline)
        if other == me or _is_dead(other):
            _settle(keys, counter, NEXT_ROUND)
        else:
            _settle(keys, counter, _same_rank_twice(join_round, me, other))
        return _read(keys, "result", time.monotonic() + LINGER_S)
    keys.set(f"rank/{found.rank}", me)
    arrived = keys.add("arrived", 1)
    if arrived == 1:
        keys.set("terms", f"Rank {found.rank} came with {terms}")
    first = _read(keys, "terms", deadline)
    if not first.endswith(f"came with {terms}"):
        _settle(
            keys,
            counter,
            f"{first}, but rank {found.rank} with {terms}, to {found.place}: give every rank the same WORLD_SIZE and "
            "backend.",
        )
    elif arrived == found.world_size:
        _settle(keys, counter, NEXT_ROUND if _has_dead(keys, found.world_size) else "")
    try:
        return _read(keys, "result", deadline)
    except TimeoutError:
        _settle(keys, counter, _missing(join_round, timeout))
    return _read(keys, "result", time.monotonic() + LINGER_S)


def _settle(keys: dist.Store, counter: dist.Store, result: str) -> None:
    """End the round with ``result``, unless somebody else has; who comes from now on is in the next round."""
    if keys.add("settled", 1) == 1:
        counter.add("round", 1)
        keys.set("result", f"={result}")


def _read(store: dist.Store, key: str, deadline: float) -> str:
    """Value of ``key``, as soon as there is one.

    It polls: a wait of the store cannot be interrupted, and floods the log when it times out.

    Raises:
        TimeoutError: If there is none at the deadline.
    """
    if not _wait(store, [key], deadline):
        raise TimeoutError(f"{key} is missing")
    return store.get(key).decode().removeprefix("=")


def _wait(store: dist.Store, keys: list[str], deadline: float) -> bool:
    """Whether all ``keys`` were there by the deadline."""
    started_at = time.monotonic()
    while not store.check(keys):
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(min(deadline - now, LONGEST_POLL_S, max(SHORTEST_POLL_S, (now - started_at) / 10)))
    return True


def _has_dead(keys: dist.Store, world_size: int) -> bool:
    """Whether a rank that entered this round was killed since, so that another in its place comes to the next."""
    return any(map(_is_dead, (entry.decode() for entry in keys.multi_get([f"rank/{r}" for r in range(world_size)]))))


def _is_dead(other: str) -> bool:
    """Whether a process, described as by :func:`_take_part`, was on this machine and has ended."""
    host, _, pid = other.rpartition(" pid ")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _same_rank_twice(join_round: JoinRound, me: str, other: str) -> str:
    found = join_round.found
    return (
        f"Two processes came to {found.place} as rank {found.rank} of {found.world_size} (backend "
        f"{join_round.backend}): {other}, and {me}; give each process a RANK of its own, and each job a port or file."
    )


def _missing(join_round: JoinRound, timeout: timedelta) -> str:
    found, keys = join_round.found, join_round.keys
    missing = [rank for rank in range(found.world_size) if not keys.check([f"rank/{rank}"])]
    listed = ", ".join(map(str, missing[:LONGEST_LIST]))
    listed += f" and {len(missing) - LONGEST_LIST} more" if len(missing) > LONGEST_LIST else ""
    return (
        f"{'Ranks' if len(missing) > 1 else 'Rank'} {listed} of {found.world_size} did not come to {found.place} "
        f"(backend {join_round.backend}) within {timeout.total_seconds():g} s, for which rank {found.rank} waited: "
        "check that each process runs and has the same address, or raise the timeout."
    )
