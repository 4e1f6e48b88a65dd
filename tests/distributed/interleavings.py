"""Random FirstRankPerNode blocks, what ranks do in them, and what they may then observe.

A plan is known to all ranks. `follow` does what it says on one rank and records what happened;
`contradictions` is what is wrong with the records of all ranks.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from lightning_automodel.distributed.failures import RankFailedError
from lightning_automodel.distributed.first_rank import FirstRankPerNode, Scope

NUM_RANKS = 4
RANKS_PER_NODE = 2
LONGEST_DELAY_S = 0.003


class PlannedError(Exception):
    """What a plan says that a rank raises."""


@dataclass
class Plan:
    """A block: who goes first, and for each rank how long it waits before and inside, and whether it fails."""

    name: str
    scope: Scope
    delays_s: list[float]
    fails: set[int]

    def first_rank(self, rank: int) -> int:
        return 0 if self.scope == "global" else rank - rank % RANKS_PER_NODE


@dataclass
class Record:
    """What one rank did: when it ran the block, whether as the first, and the error that it left with."""

    started_at: float | None = None
    ended_at: float | None = None
    went_first: bool = False
    left_with: tuple[int, str] | None = None


def draw(seed: int) -> Plan:
    """A plan; some have no failure."""
    source = random.Random(seed)
    failure_rate = source.choice([0.0, 0.1, 0.3])
    return Plan(
        name=str(seed),
        scope=source.choice(["node", "global"]),
        delays_s=[
            source.random() * LONGEST_DELAY_S if source.random() < 0.5 else 0.0 for _ in range(NUM_RANKS)
        ],
        fails={rank for rank in range(NUM_RANKS) if source.random() < failure_rate},
    )


def follow(plan: Plan, rank: int) -> Record:
    """Do what the plan says on this rank."""
    record = Record()
    try:
        time.sleep(plan.delays_s[rank])
        with FirstRankPerNode(scope=plan.scope) as record.went_first:
            record.started_at = time.monotonic()
            time.sleep(plan.delays_s[-1 - rank])
            if rank in plan.fails:
                raise PlannedError(f"rank {rank}")
            record.ended_at = time.monotonic()
    except PlannedError as error:
        record.left_with = (rank, str(error))
    except RankFailedError as error:
        record.left_with = (error.failure.rank, error.failure.message)
    return record


def contradictions(plan: Plan, records: list[Record]) -> list[str]:
    """What is wrong with the records of all ranks; empty if nothing is."""
    planned = {(rank, f"rank {rank}") for rank in plan.fails}
    wrong = []
    for rank, record in enumerate(records):
        first = plan.first_rank(rank)
        if (record.left_with is not None) != bool(plan.fails):
            wrong.append(f"rank {rank} left with {record.left_with}, but {sorted(plan.fails)} fail")
        if record.left_with is not None and record.left_with not in planned:
            wrong.append(f"rank {rank} left with {record.left_with}, which nobody raised")
        if record.started_at is None:
            if not plan.fails:
                wrong.append(f"rank {rank} did not run, and should")
            continue
        if rank in plan.fails and record.left_with != (rank, f"rank {rank}"):
            wrong.append(f"rank {rank} left with {record.left_with}, and not with its own error")
        if first != rank and first in plan.fails:
            wrong.append(f"rank {rank} ran, though rank {first} failed before")
        if record.went_first != (rank == first):
            wrong.append(f"rank {rank} took itself for {'the' if rank != first else 'not the'} first")
        first_ended_at = records[first].ended_at
        if rank != first and (first_ended_at is None or record.started_at < first_ended_at):
            wrong.append(f"rank {rank} ran before rank {first} had ended")
    return wrong
