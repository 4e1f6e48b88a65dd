"""Ranks meet, and learn which of them are on one node, by what each rank's environment says."""

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from lightning_automodel.distributed.failures import RankFailedError, RankFailure
from lightning_automodel.distributed.rendezvous import number_in_environment
from lightning_automodel.distributed.store_channel import GRACE_S, LONGEST_POLL_S, StoreLink, failure_of, post_failure

Scope = Literal["node", "global"]


@dataclass(frozen=True)
class Place:
    """Where a rank is, as it tells the others.

    Attributes:
        host: Name of its machine.
        node: Tells its node from others with the same host name.
        problem: Why it cannot tell, if it cannot.
        nonce: Tells what it says now from what it said before.
    """

    host: str
    node: str
    problem: str = ""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Session:
    """Ranks that met to do something together once.

    Attributes:
        name: Prefix for its keys in the store; no other session has it.
        places: Where each rank is.
    """

    name: str
    places: dict[int, Place]


def first_rank(members: Sequence[int], rank: int, places: dict[int, Place], scope: Scope) -> int:
    """The lowest of ``members`` that is on the node of ``rank``, or of all for scope ``"global"``."""
    if scope == "global":
        return min(members)
    here = (places[rank].host, places[rank].node)
    return min(member for member in members if (places[member].host, places[member].node) == here)


def node_of(rank: int) -> str:
    """Which node this process is on, among those with its host name; only ranks of one node say the same.

    ``LOCAL_RANK`` counts first, since a node's first rank means local rank 0; where it is set, the ranks of a node are
    taken to be consecutive. Then ``GROUP_RANK``, ``NODE_RANK`` and ``SLURM_NODEID``, then ``LOCAL_WORLD_SIZE``.

    Raises:
        ValueError: If the one that counts is no number.
    """
    if (local_rank := number_in_environment("LOCAL_RANK")) is not None:
        return str(rank - local_rank)
    for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"):
        if (node := number_in_environment(name)) is not None:
            return str(node)
    num_local = number_in_environment("LOCAL_WORLD_SIZE", at_least=1)
    return "" if num_local is None else str(rank // num_local)


def meet(link: StoreLink, members: Sequence[int]) -> Session:
    """Wait for each other and tell who is where; from then on ``link`` watches the session for failures.

    The lowest rank opens a session, all answer it, and it publishes the answers. The store may hold older sessions,
    even of an earlier process group: so each has a random name, and a rank believes only what repeats its own answer.

    Args:
        link: Connection under a prefix that only these ranks use.
        members: Ranks of the default group. Every one of them must call this.

    Raises:
        RankFailedError: If a rank does not come or fails meanwhile, or its environment is wrong; on all other ranks.
        ValueError: If the environment of this rank is wrong.
    """
    mine = _place(link.rank)
    try:
        session = _gather(link, members, mine) if link.rank == min(members) else _answer(link, min(members), mine)
    except RankFailedError:
        if mine.problem:
            raise ValueError(mine.problem) from None
        raise
    link.watch(session.name)
    link.hosts = {rank: place.host for rank, place in session.places.items()}
    return session


def _place(rank: int) -> Place:
    try:
        return Place(socket.gethostname(), node_of(rank))
    except ValueError as error:
        return Place(socket.gethostname(), "", problem=str(error))


def _gather(link: StoreLink, members: Sequence[int], mine: Place) -> Session:
    name = uuid.uuid4().hex
    keys = {rank: _key(name, rank) for rank in members}
    link.watch(name)
    try:
        link.call(lambda store: store.set(keys[link.rank], json.dumps(asdict(mine))))
        link.call(lambda store: store.set("session", name))
        link.wait_for(
            lambda store: store.check(list(keys.values())) or None,
            lambda store: [rank for rank, key in keys.items() if not store.check([key])],
        )
        _raise_problem(link, keys)
        published = link.call(lambda store: _publish(store, name, keys, None))
    except BaseException as error:
        failure = failure_of(error, link.rank, link.where)
        with contextlib.suppress(RankFailedError):
            link.call(lambda store: _publish(store, name, keys, failure), GRACE_S)
            time.sleep(2 * LONGEST_POLL_S)  # for the others to read it: the store may end with this process
        raise
    return _session(name, published)


def _raise_problem(link: StoreLink, keys: dict[int, str]) -> None:
    places = link.call(lambda store: _read_places(store, keys))
    for rank, place in places.items():
        if place["problem"]:
            raise RankFailedError(RankFailure(int(rank), place["host"], link.where, "ValueError", place["problem"]))


def _read_places(store: dist.Store, keys: dict[int, str]) -> dict[str, dict[str, str]]:
    return {str(rank): json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def _publish(store: dist.Store, session: str, keys: dict[int, str], failure: RankFailure | None) -> dict[str, Any]:
    published = {"places": _read_places(store, keys), "failure": failure and asdict(failure)}
    store.set(f"{session}/places", json.dumps(published))
    return published


def _answer(link: StoreLink, first: int, mine: Place) -> Session:
    answered = ""

    def look(store: dist.Store) -> dict[str, Any] | None:
        nonlocal answered
        name = store.get("session").decode() if store.check(["session"]) else ""
        if name != answered:
            store.set(_key(name, link.rank), json.dumps(asdict(mine)))
            answered = name
        if not name or not store.check([f"{name}/places"]):
            return None
        published: dict[str, Any] = json.loads(store.get(f"{name}/places"))
        return published if published["places"].get(str(link.rank)) == asdict(mine) else None

    try:
        published = link.wait_for(look, lambda store: [first])
    except BaseException as error:
        failure = failure_of(error, link.rank, link.where)
        with contextlib.suppress(RankFailedError):
            link.call(lambda store: post_failure(store, answered, failure), GRACE_S)
        raise
    return _session(answered, published)


def _key(session: str, rank: int) -> str:
    return f"{session}/identity/{rank}"


def _session(name: str, published: dict[str, Any]) -> Session:
    if published["failure"] is not None:
        raise RankFailedError(RankFailure(**published["failure"]))
    return Session(name, {int(rank): Place(**place) for rank, place in published["places"].items()})
