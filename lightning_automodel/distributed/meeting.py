"""Ranks meet at a key of the store: each says something, and all learn what all have said, or who did not come.

Every agreement between ranks on the host is such a meeting: joining, barriers, first-rank blocks, the end of
training and of a run, and the last step before a stop. Below its prefix, the store holds

    failure             the first failure that concerns those who meet, if any
    record/<rank>       the newest `Record` of a rank, written by its heart
    <at>/<rank>         what a rank has said at a meeting; <at>/came counts them
    <at>/outcome        what all have said there
    <at>/looks/<n>      whether a rank has looked, in the n-th interval of waiting, for those that are missing
    known/<what>/<rank> whether a rank knows how something has ended

All values are JSON. No call here waits in the store, so that threads may share one connection.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, Record
from lightning_automodel.distributed.store import STORE_ERRORS, launcher_hosts_store, pause_s

FAILURE = "failure"
NONE = "null"
SEARCH_S = 2.0
LINGER_S = 5.0
LINGER_AFTER_FAILURE_S = 2.5


def make(store: dist.Store, keys: Sequence[str]) -> None:
    """Let those of ``keys`` that have no value say None: reading a missing one would wait for it."""
    if not store.check(list(keys)):
        for key in keys:
            store.compare_set(key, "", NONE)


def first(store: dist.Store, key: str, value: Any) -> Any:
    """The first value that any rank has given to ``key`` in this way: ``value`` if there was none."""
    make(store, [key])
    return json.loads(store.compare_set(key, NONE, json.dumps(value)))


def post(store: dist.Store, failure: RankFailure) -> RankFailure:
    """Post ``failure`` for all ranks; returns the first one that was posted."""
    return RankFailure(**first(store, FAILURE, asdict(failure)))


def parse_failure(value: bytes) -> RankFailure | None:
    """The failure that a value of :data:`FAILURE` tells of, if any."""
    said = json.loads(value)
    return said and RankFailure(**said)


def parse_record(value: bytes) -> Record:
    """The record that the value of a key tells of; one that says nothing if there is none."""
    return Record(**json.loads(value) or {})


def records_of(store: dist.Store, ranks: Sequence[int]) -> dict[int, Record]:
    """The newest record of each rank."""
    keys = [f"record/{rank}" for rank in ranks]
    make(store, keys)
    values = store.multi_get(keys)
    return {rank: parse_record(value) for rank, value in zip(ranks, values, strict=True)}


def say(store: dist.Store, at: str, rank: int, ranks: Sequence[int], value: Any) -> None:
    """Say ``value`` at a meeting, without waiting. The last of ``ranks`` collects all, so that each reads one key."""
    store.set(f"{at}/{rank}", json.dumps(value))
    if store.add(f"{at}/came", 1) == len(ranks):
        _collect(store, at, ranks)


def _collect(store: dist.Store, at: str, ranks: Sequence[int]) -> None:
    values = store.multi_get([f"{at}/{rank}" for rank in ranks])
    first(store, f"{at}/outcome", [json.loads(value) for value in values])


def outcome_of(value: bytes) -> list[Any] | None:
    """What all ranks have said, in their order, from the value of ``<at>/outcome``; None if there is none yet.

    RankFailedError if the meeting has ended with a failure.
    """
    said: list[Any] | dict[str, Any] | None = json.loads(value)
    if isinstance(said, dict):
        raise RankFailedError(RankFailure(**said))
    return said


def meet(
    store: dist.Store,
    at: str,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    limit_s: float,
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Say ``value``, and wait until all of ``ranks`` have said theirs; returns what they said, in their order.

    Every one of ``ranks`` must call it with the same ``at``, once. It goes through the store alone.

    Args:
        store: With a prefix that those who meet have in common; a failure that is posted there ends the wait, and
            records there say where missing ranks are.
        at: Name of the meeting, in words, unlike that of any other there: messages have it too.
        rank: This rank.
        ranks: All that take part.
        value: What this rank says; JSON must know its type.
        limit_s: How long it waits.
        check: Called now and then while it waits; it may raise.

    Raises:
        RankFailedError: If a failure was posted, as one is after the limit, for the first rank that has not come.
    """
    say(store, at, rank, ranks, value)
    began_at = time.monotonic()
    looks_at_s = limit_s
    keys = [FAILURE, f"{at}/outcome"]
    make(store, keys)
    while True:
        posted, outcome = store.multi_get(keys)
        said = outcome_of(outcome)
        if said is not None:
            return said
        failure = json.loads(posted)
        if failure is not None:
            # For all who meet: a failure that is posted once all have come leaves each with what they said.
            first(store, f"{at}/outcome", failure)
            continue
        check()
        waited_s = time.monotonic() - began_at
        if waited_s > looks_at_s:
            looks_at_s = waited_s + SEARCH_S  # if the rank that looks dies meanwhile, another one does
            _look_for_missing(store, at, rank, ranks, waited_s)
        else:
            time.sleep(pause_s(waited_s, len(ranks)))


def _look_for_missing(store: dist.Store, at: str, rank: int, ranks: Sequence[int], waited_s: float) -> None:
    """Post who has not come, unless another rank looks already, or all have just come."""
    if store.add(f"{at}/looks/{waited_s // SEARCH_S:.0f}", 1) > 1:
        return
    missing = [other for other in ranks if not store.check([f"{at}/{other}"])]
    if missing:
        record = records_of(store, missing[:1])[missing[0]]
        post(store, failures.missing_ranks(missing, record, rank, at, waited_s))
    else:
        _collect(store, at, ranks)  # the last one has died before it had collected


def linger(store: dist.Store, what: str, rank: int, ranks: Sequence[int], limit_s: float) -> None:
    """Note that this rank knows ``what``. Rank 0, if it hosts the store, stays until ``ranks`` do, or the limit.

    Without it the store would often end before the others have read it. A store that is gone is no error here.
    """
    with contextlib.suppress(*STORE_ERRORS):
        # Unlike other operations, this one does not wait for an answer: the store's host may be stopped.
        store.set(f"known/{what}/{rank}", "1")
        known = [f"known/{what}/{other}" for other in ranks]
        began_at = time.monotonic()
        waited_s = 0.0
        while rank == 0 and not launcher_hosts_store() and waited_s < limit_s and not store.check(known):
            time.sleep(pause_s(waited_s, len(ranks)))
            waited_s = time.monotonic() - began_at
