"""Random trees of nested FirstRankPerNode blocks, what ranks do in them, and what they may then observe.

A plan is known to all ranks. `follow` does what it says on one rank and records what happened; `expected` derives what
would happen if every rank learnt of a failure as late as possible, from which `contradictions` concludes what is wrong
with the records of all ranks: learning of a failure earlier may only cut things short.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_automodel.distributed.failures import RankFailedError
from lightning_automodel.distributed.first_rank import FirstRankPerNode, Scope

NUM_RANKS = 4
RANKS_PER_NODE = 2
LONGEST_DELAY_S = 0.003


class PlannedError(Exception):
    """What a plan says that a rank raises; its message is unlike that of any other."""


@dataclass
class Plan:
    """A block: who goes first, and for each rank how long it waits and whether it fails before or after inner blocks.

    Attributes:
        name: Path in the tree.
        catches: Whether the block around it catches what leaves it, on every rank.
    """

    name: str
    scope: Scope
    catches: bool
    delays_s: list[float]
    fails_early: set[int]
    fails_late: set[int]
    inner: list[Plan]

    def first_rank(self, rank: int) -> int:
        return 0 if self.scope == "global" else rank - rank % RANKS_PER_NODE

    def blocks(self) -> Iterator[Plan]:
        yield self
        for inner in self.inner:
            yield from inner.blocks()


@dataclass
class Record:
    """What one rank did: blocks that it ran with the times of start and end, errors that it raised, and the last."""

    started_at: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    went_first: set[str] = field(default_factory=set)
    raised: list[str] = field(default_factory=list)
    left_with: tuple[int, str] | None = None


def draw(seed: int) -> Plan:
    """A plan of one to three levels; about every third has no failure."""
    source = random.Random(seed)
    failure_rate = source.choice([0.0, 0.03, 0.1])
    return _draw_block(source, str(seed), source.randint(1, 3), failure_rate)


def _draw_block(source: random.Random, name: str, depth: int, failure_rate: float) -> Plan:
    num_inner = source.randint(1, 2) if depth > 1 else 0
    return Plan(
        name=name,
        scope=source.choice(["node", "global"]),
        catches=source.random() < 0.4,
        delays_s=[source.random() * LONGEST_DELAY_S if source.random() < 0.5 else 0.0 for _ in range(NUM_RANKS)],
        fails_early={rank for rank in range(NUM_RANKS) if source.random() < failure_rate},
        fails_late={rank for rank in range(NUM_RANKS) if source.random() < failure_rate},
        inner=[_draw_block(source, f"{name}/{index}", depth - 1, failure_rate) for index in range(num_inner)],
    )


def follow(plan: Plan, rank: int) -> Record:
    """Do what the plan says on this rank."""
    record = Record()
    try:
        _follow_block(plan, rank, record)
    except PlannedError as error:
        record.left_with = (rank, str(error))
    except RankFailedError as error:
        record.left_with = (error.failure.rank, error.failure.message)
    return record


def _follow_block(plan: Plan, rank: int, record: Record) -> None:
    time.sleep(plan.delays_s[rank])
    with FirstRankPerNode(scope=plan.scope) as is_first:
        record.started_at[plan.name] = time.monotonic()
        if is_first:
            record.went_first.add(plan.name)
        time.sleep(plan.delays_s[-1 - rank])
        _fail_if(rank in plan.fails_early, f"rank {rank} early in {plan.name}", record)
        for inner in plan.inner:
            try:
                _follow_block(inner, rank, record)
            except (PlannedError, RankFailedError):
                if not inner.catches:
                    raise
        _fail_if(rank in plan.fails_late, f"rank {rank} late in {plan.name}", record)
        record.ended_at[plan.name] = time.monotonic()


def _fail_if(fails: bool, message: str, record: Record) -> None:
    if fails:
        record.raised.append(message)
        raise PlannedError(message)


def expected(plan: Plan) -> tuple[list[set[str]], bool]:
    """The blocks that each rank runs, if it learns of failures as late as possible, and whether all leave with one."""
    failed: dict[str, set[int]] = {}
    runs: list[set[str]] = [set() for _ in range(NUM_RANKS)]
    # Ranks wait for lower ranks only, so by the time of a rank's turn all that it can learn has happened.
    fails = [_run_on_paper(plan, rank, failed, runs[rank]) for rank in range(NUM_RANKS)]
    return runs, any(fails)


def _run_on_paper(plan: Plan, rank: int, failed: dict[str, set[int]], runs: set[str]) -> bool:
    """Whether the rank leaves the block with an error; that it skips a block because of one counts as failing there."""
    fails = plan.first_rank(rank) != rank and plan.first_rank(rank) in failed.get(plan.name, set())
    if not fails:
        runs.add(plan.name)
        fails = rank in plan.fails_early
        for inner in plan.inner:
            if fails:
                _skip_on_paper(inner, rank, failed)
            elif _run_on_paper(inner, rank, failed, runs):
                fails = not inner.catches
        fails = fails or rank in plan.fails_late
    else:
        for inner in plan.inner:
            _skip_on_paper(inner, rank, failed)
    if fails:
        failed.setdefault(plan.name, set()).add(rank)
    return fails


def _skip_on_paper(plan: Plan, rank: int, failed: dict[str, set[int]]) -> None:
    for block in plan.blocks():
        failed.setdefault(block.name, set()).add(rank)


def contradictions(plan: Plan, records: list[Record]) -> list[str]:
    """What is wrong with the records of all ranks; empty if nothing is."""
    runs, fails = expected(plan)
    raised = {(rank, message) for rank, record in enumerate(records) for message in record.raised}
    wrong = []
    for rank, record in enumerate(records):
        if (record.left_with is not None) != fails:
            wrong.append(f"rank {rank} left with {record.left_with}, but the plan {'fails' if fails else 'succeeds'}")
        if record.left_with is not None and record.left_with not in raised:
            wrong.append(f"rank {rank} left with {record.left_with}, which nobody raised")
        started = set(record.started_at)
        if not started <= runs[rank] or (not fails and started != runs[rank]):
            wrong.append(f"rank {rank} ran {sorted(started)}, and should {sorted(runs[rank])}")
        for block in plan.blocks():
            wrong += _wrong_in_block(block, rank, records)
    return wrong


def _wrong_in_block(block: Plan, rank: int, records: list[Record]) -> Iterator[str]:
    first, started_at = block.first_rank(rank), records[rank].started_at.get(block.name)
    if started_at is None:
        return
    if (block.name in records[rank].went_first) != (rank == first):
        yield f"rank {rank} took itself for {'the' if rank != first else 'not the'} first in {block.name}"
    if rank != first and started_at < records[first].ended_at.get(block.name, float("inf")):
        yield f"rank {rank} ran {block.name} before rank {first} had ended it"
