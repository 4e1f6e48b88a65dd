"""Joining: every rank waits in the store for all others, and if that fails, all raise the same error.

A store serves several rounds, one after the other, below the run's secret. Below the round's number it holds

    rank/<rank>    the process of each rank that came
    terms          world size and backend of the first one
    arrived        how many came
    left/<rank>    those of them that no longer need the store
    lease          the process that ends the round; result: what was wrong, or nothing
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel.distributed.board import LINGER_S, LONGEST_PAUSE_S, list_ranks, pause_s
from lightning_automodel.distributed.rendezvous import Rendezvous, no_store, open_store, run_secret

KEYS = "lightning_automodel/joining"


@dataclass(frozen=True)
class JoinRound:
    """One attempt of all ranks to join; ``keys`` is the store with the prefix of the round."""

    found: Rendezvous
    keys: dist.Store

    @property
    def group_store(self) -> dist.Store:
        """Store for the process group of this round."""
        return dist.PrefixStore("group", self.keys)

    def leave(self, linger_s: float = LINGER_S) -> None:
        """Post that this rank no longer needs the store; its host waits up to ``linger_s`` for all ranks to post."""
        if self.found.world_size == 1:
            return
        with contextlib.suppress(RuntimeError):
            # Unlike other operations, this one does not wait for an answer: the store's host may be stopped.
            self.keys.set(f"left/{self.found.rank}", "1")
            if self.found.hosts_store and linger_s > 0:
                came = [rank for rank in range(self.found.world_size) if self.keys.check([f"rank/{rank}"])]
                _wait(self.keys, [f"left/{rank}" for rank in came], time.monotonic() + linger_s, len(came))


def meet(found: Rendezvous, backend: str, timeout: timedelta, check: Callable[[], None]) -> JoinRound:
    """Wait until every rank has joined. A collective over the world, through the store alone.

    ``check`` is called now and then, and may raise. The rest runs in a thread: a call to a store whose host is stopped,
    or to something else than a store, never returns.

    Raises:
        RuntimeError: On every rank that has arrived, with the same message: if ranks did not arrive within
            ``timeout``, two processes have the same rank, or ranks disagree about world size or backend. Also if the
            store cannot be used.
    """
    if found.world_size == 1:
        return JoinRound(found, found.store if found.store is not None else dist.HashStore())
    outcome: Future[JoinRound] = Future()
    has_store = threading.Event()

    def run() -> None:
        try:
            outcome.set_result(_meet(found, backend, timeout, has_store))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="lightning_automodel join", daemon=True).start()
    give_up_at, is_late = time.monotonic() + timeout.total_seconds(), False
    while time.monotonic() < give_up_at:
        check()
        with contextlib.suppress(TimeoutError):
            return outcome.result(min(LONGEST_PAUSE_S, timeout.total_seconds()))
        if time.monotonic() > give_up_at and (has_store.is_set() or outcome.done()) and not is_late:
            # The ranks that arrived are about to agree on the missing ones.
            give_up_at, is_late = give_up_at + 2 * LINGER_S, True
    raise RuntimeError(no_store(found, timeout, "what listens there does not answer as a store"))


def _meet(found: Rendezvous, backend: str, timeout: timedelta, has_store: threading.Event) -> JoinRound:
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store = open_store(found, timeout, deadline)
        if secret := run_secret():
            store = dist.PrefixStore(secret, store)
        has_store.set()
        try:
            return _take_part(found, backend, store, timeout, deadline)
        except (dist.DistError, TimeoutError) as error:
            # It may have been the store of an earlier group, just before it closed: connect again.
            is_renewed = found.address is not None and not found.hosts_store
            if not is_renewed or time.monotonic() > deadline:
                raise RuntimeError(no_store(found, timeout, str(error).splitlines()[0])) from error


def _take_part(found: Rendezvous, backend: str, store: dist.Store, timeout: timedelta, deadline: float) -> JoinRound:
    """Enter this rank into the store's newest round, and wait until all have arrived or something is wrong."""
    counter = dist.PrefixStore(KEYS, store)
    keys = dist.PrefixStore(str(counter.add("round", 0)), counter)
    me, terms = f"{socket.gethostname()} pid {os.getpid()}", f"world size {found.world_size} and backend {backend}"
    came = keys.compare_set(f"rank/{found.rank}", "", me).decode()
    first = keys.compare_set("terms", "", f"Rank {found.rank} joined with {terms}").decode()
    problem = None
    if came != me:
        problem = (
            f"Two processes joined at {found.place} as rank {found.rank} of {found.world_size} (backend {backend}):"
            f" {came}, and {me}; give each process a RANK of its own, and each job a port or file. Where one of them"
            " was killed and started again: start all ranks again."
        )
    elif not first.endswith(terms):
        problem = (
            f"{first}, but rank {found.rank} joined with {terms}, at {found.place}: give every rank the same WORLD_SIZE"
            " and backend."
        )
    elif keys.add("arrived", 1) == found.world_size:
        problem = ""
    is_settled = problem is None and _wait(keys, ["result"], deadline, found.world_size)
    if not is_settled and keys.compare_set("lease", "", me).decode() == me:
        problem = _missing(keys, found, backend, timeout) if problem is None else problem
        counter.add("round", 1)  # ranks that arrive later are in the next one
        keys.set("result", f"={problem}")
    if not _wait(keys, ["result"], time.monotonic() + LINGER_S, found.world_size):
        raise TimeoutError("the result of joining is missing")
    join_round = JoinRound(found, keys)
    if problem := keys.get("result").decode().removeprefix("="):
        if came == me:
            # Not for a duplicate: the store's host must wait for the first process, which may still have to read it.
            join_round.leave()
        raise RuntimeError(problem)
    return join_round


def _missing(keys: dist.Store, found: Rendezvous, backend: str, timeout: timedelta) -> str:
    ranks = [rank for rank in range(found.world_size) if not keys.check([f"rank/{rank}"])]
    return (
        f"{'Ranks' if len(ranks) > 1 else 'Rank'} {list_ranks(ranks)} of {found.world_size} did not join at"
        f" {found.place} (backend {backend}) within {timeout.total_seconds():g} s, for which rank {found.rank}"
        " waited: check that each process runs and has the same address, or raise the timeout."
    )


def _wait(store: dist.Store, keys: list[str], deadline: float, num_ranks: int) -> bool:
    """Whether all ``keys`` were there by the deadline.

    It polls: ``Store.wait`` cannot be interrupted, and floods the log when it times out.
    """
    began_at = time.monotonic()
    while not store.check(keys):
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(min(deadline - now, pause_s(now - began_at, num_ranks)))
    return True
