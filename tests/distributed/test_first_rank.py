"""FirstRankPerNode: who goes first, also in a fit, and that no failure is lost and nobody waits for ever.

The pool's four ranks play two nodes by LOCAL_RANK. What needs ranks that make their own group runs in
processes of its own.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from lightning_automodel.distributed.failures import RankFailedError
from lightning_automodel.distributed.first_rank import FirstRankPerNode, Scope
from tests.distributed.launched import Launched, place
from tests.failure.faults import Model
from tests.processes import NOT_FROM_OUTSIDE, free_port
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import micro_batches
from tests.trainer.runs import CASE, SILENT, LabelledModule, make_trainer

SILENCE = timedelta(seconds=1)


def play_two_nodes() -> int:
    """Let four ranks be two nodes of two; returns the rank."""
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return rank


def join_over_files(folder: str) -> None:
    """Use a group whose store is a file: connecting to a TCPStore may wait seconds for a name server."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size
    )


def describe(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def outcome_of(
    *args: Any, fails: BaseException | None = None, **kwargs: Any
) -> tuple[bool, tuple[str, str] | None]:
    """Whether this rank ran a block, in which it raises `fails`, and with which error it left."""
    ran = False
    try:
        with FirstRankPerNode(*args, **kwargs):
            ran = True
            if fails is not None:
                raise fails
    except BaseException as error:
        return ran, describe(error)
    return ran, None


# --- Who goes first ---------------------------------------------------------------------------------------------------


def nested() -> list[bool]:
    play_two_nodes()
    first_rank = FirstRankPerNode()
    firsts = []
    for _ in range(2):
        with first_rank as is_first:
            with pytest.raises(RuntimeError, match="With first_rank_setup=True"), first_rank:
                pass
            firsts.append(is_first)
    return firsts


def test_nested_blocks_are_refused(pool4: RankPool) -> None:
    """On every rank; the outer block goes on, and its object serves another one."""
    assert pool4.run(nested) == [[True, True], [False, False]] * 2


def firsts_in_subgroups() -> dict[str, Any]:
    rank = play_two_nodes()
    last_three = dist.new_group([1, 2, 3])
    result: dict[str, Any] = {}
    try:
        with FirstRankPerNode(last_three) as first_on_node:
            pass
        with FirstRankPerNode(last_three, scope="global") as first:
            result["last three"] = first_on_node, first
    except ValueError as error:
        result["error"] = str(error)
    if rank != 0:
        dist.destroy_process_group(last_three)
        result["destroyed"] = outcome_of(last_three)
    return result


def test_subgroups(pool4: RankPool) -> None:
    """The first rank of a node is the first of the group's ranks there; strangers are told that they are strangers."""
    zero, *members = pool4.run(firsts_in_subgroups)
    assert "group must be None or a ProcessGroup that this rank is in" in zero["error"]
    assert [result["last three"] for result in members] == [(True, True), (True, False), (False, False)]
    for result in members:
        assert "not registered" in result["destroyed"][1][1]


# --- Failures ---------------------------------------------------------------------------------------------------------


def leave_the_program_on_rank_0() -> tuple[bool, tuple[str, str] | None]:
    return outcome_of(scope="global", fails=KeyboardInterrupt() if dist.get_rank() == 0 else None)


def test_leaving_the_program_is_a_failure(pool2: RankPool) -> None:
    own, (_, told) = pool2.run(leave_the_program_on_rank_0)
    assert own == (True, describe(KeyboardInterrupt()))
    assert told is not None
    assert told[1].endswith("was interrupted in FirstRankPerNode(scope='global')")


def enter_with_a_wrong_environment() -> tuple[bool, tuple[str, str] | None]:
    if dist.get_rank() == 1:
        os.environ["LOCAL_RANK"] = "first"
    return outcome_of()


def test_wrong_environment_of_one_rank_reaches_every_rank(pool4: RankPool) -> None:
    results = pool4.run(enter_with_a_wrong_environment)
    sentence = "The environment variable LOCAL_RANK is 'first': it must be a whole number, 0 or more."
    assert results.pop(1) == (False, ("ValueError", sentence))
    assert all(
        not ran and error[0] == "RankFailedError" and error[1].endswith(sentence) for ran, error in results
    )


# --- Random plans, which all ranks know: what ranks do in blocks, and what they may then observe ----------------------

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


def follow_plans(seeds: range, folder: str) -> list[Record]:
    join_over_files(folder)
    rank = play_two_nodes()
    return [follow(draw(seed), rank) for seed in seeds]


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 500), marks=pytest.mark.sweep)])
def test_random_interleavings(pool4: RankPool, seeds: range, tmp_path: Path) -> None:
    """Many plans of delays and exceptions: no deadlock, no lost error, no wrong order, and the right one first."""
    by_rank = pool4.run(follow_plans, seeds, str(tmp_path), timeout_s=300)
    plans = [draw(seed) for seed in seeds]
    wrong = {}
    for plan, *records in zip(plans, *by_rank, strict=True):
        if found := contradictions(plan, records):
            wrong[plan.name] = found
    assert wrong == {}
    assert 0.2 < sum(bool(plan.fails) for plan in plans) / len(plans) < 0.8


# --- Silence ----------------------------------------------------------------------------------------------------------


def work_longer_than_the_timeout(folder: str) -> tuple[bool, tuple[str, str] | None]:
    """First the others wait for rank 0 at the entry, then rank 0 for rank 3 at the exit."""
    join_over_files(folder)
    try:
        with FirstRankPerNode(scope="global", timeout=SILENCE):
            if dist.get_rank() in (0, 3):
                time.sleep(1.5 * SILENCE.total_seconds())
    except RankFailedError as error:
        return False, describe(error)
    return True, None


@pytest.mark.sweep  # waits longer than a time limit
def test_timeout_does_not_bound_work(pool4: RankPool, tmp_path: Path) -> None:
    assert pool4.run(work_longer_than_the_timeout, str(tmp_path)) == [(True, None)] * 4


# --- A group for the block --------------------------------------------------------------------------------------------


def repeat() -> tuple[list[tuple[bool, bool, bool]], int]:
    """Enter three blocks in a row; rank 0 is slow to destroy the groups, so the other may come back too early."""
    num_threads = threading.active_count()
    if os.environ["RANK"] == "0":
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda group=None: (time.sleep(0.2), destroy(group))
    seen = []
    for _ in range(3):
        with FirstRankPerNode() as is_first:
            is_inside = dist.is_initialized()
        seen.append((is_first, is_inside, dist.is_initialized()))
    return seen, threading.active_count() - num_threads


def fail_late(failing_rank: int) -> tuple[tuple[str, str], bool]:
    """Fail on one rank when the other has waited so long that it looks seldom."""
    try:
        with FirstRankPerNode():
            if dist.get_rank() == failing_rank:
                time.sleep(1.5)
                raise OSError("disk full")
    except Exception as error:
        return describe(error), dist.is_initialized()
    raise AssertionError("nothing was raised")


def without_a_group(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function returns on two ranks that know of each other by the environment only."""
    port = free_port()
    ranks = [
        Launched(function, *arguments, **place(port, rank, 2), LOCAL_RANK=str(rank)) for rank in range(2)
    ]
    outcomes = [rank.outcome() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == ["", ""]
    return [outcome.value for outcome in outcomes]


def test_group_is_made_from_the_environment_and_destroyed() -> None:
    """Three times in a row; rank 0, which hosts the store, leaves when the others have read the outcome."""
    assert without_a_group(repeat) == [([(rank == 0, True, False)] * 3, 0) for rank in range(2)]


@pytest.mark.parametrize("failing_rank", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_failure_reaches_the_others_before_the_store_is_gone(failing_rank: int) -> None:
    """The failing rank ends at once after its block, and the group is destroyed on both."""
    outcomes = without_a_group(fail_late, failing_rank)
    own, other = outcomes[failing_rank], outcomes[1 - failing_rank]
    assert own == (("OSError", "disk full"), False)
    host = socket.gethostname()
    message = f"rank {failing_rank} on {host} failed in FirstRankPerNode(scope='node'): OSError: disk full"
    assert other == (("RankFailedError", message), False)


# --- Nobody to wait for, and wrong arguments --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NOT_FROM_OUTSIDE, "LOCAL_WORLD_SIZE", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)


def run_nested_blocks() -> list[bool]:
    first_rank = FirstRankPerNode()
    firsts = []
    for _ in range(2):
        with first_rank as outer, first_rank as inner, FirstRankPerNode(scope="global") as innermost:
            firsts += [outer, inner, innermost]
    return firsts


def test_alone_the_block_just_runs() -> None:
    """Without a process group and in one, also nested and repeatedly; nothing is started for it."""
    num_threads = threading.active_count()
    with FirstRankPerNode():
        assert threading.active_count() == num_threads
    assert run_nested_blocks() == [True] * 6
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_nested_blocks() == [True] * 6
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_as_a_decorator_every_call_is_a_block() -> None:
    @FirstRankPerNode(scope="global")
    def double(value: int, *, add: int = 0) -> int:
        """Says what it does."""
        return 2 * value + add

    assert [double(1), double(2, add=1)] == [2, 5]
    assert (double.__name__, double.__doc__) == ("double", "Says what it does.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scope": "rack"}, "scope must be 'node' or 'global', got 'rack'"),
        ({"timeout": timedelta(seconds=-1)}, "timeout must be a positive"),
        ({"group": "world"}, "group must be None or a ProcessGroup .*, got 'world'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FirstRankPerNode(**arguments)


# --- In a fit: who prepares and sets up first -------------------------------------------------------------------------


SLOW_S = 0.3


class Prepares(Model):
    """Notes its hooks in a file, one line each; fails where it is told to."""

    def __init__(self, notes: Path, fails_in: str = "") -> None:
        super().__init__()
        self._notes = notes
        self._fails_in = fails_in

    def _note(self, hook: str) -> None:
        with self._notes.open("a") as file:
            file.write(f"{hook} {dist.get_rank()}\n")
        if self._fails_in == hook and dist.get_rank() == 0:
            raise ValueError("the disk is full")

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note("setup")
        if dist.get_rank() == 0:
            time.sleep(SLOW_S)
        self._note("end of setup")

    def train_dataloader(self) -> list[Any]:
        return []


def _fit_preparing(notes: Path, fails_in: str, first_rank_setup: bool) -> None:
    make_trainer(AutomodelStrategy(first_rank_setup=first_rank_setup)).fit(Prepares(notes, fails_in))


@pytest.mark.parametrize("is_first", [True, False])
def test_first_rank_sets_up_first(pool2: RankPool, tmp_path: Path, is_first: bool) -> None:
    """The other rank starts when the first has ended; without the option the slow rank is overtaken."""
    pool2.run(_fit_preparing, tmp_path / "notes", "", first_rank_setup=is_first)
    order = (tmp_path / "notes").read_text().splitlines()
    in_turn = ["prepare_data 0", "setup 0", "end of setup 0", "setup 1", "end of setup 1"]
    assert order == in_turn if is_first else order[-1] == "end of setup 0"


@pytest.mark.parametrize(
    ("fails_in", "first_rank_setup", "left_out"),
    [("prepare_data", False, "setup"), ("prepare_data", True, "setup"), ("setup", True, "setup 1")],
)
def test_failure_of_the_first_rank(
    pool2: RankPool, tmp_path: Path, fails_in: str, first_rank_setup: bool, left_out: str
) -> None:
    """Every rank raises, with the cause, and no rank reaches what comes after."""
    with pytest.raises(RankError) as caught:
        pool2.run(_fit_preparing, tmp_path / "notes", fails_in, first_rank_setup=first_rank_setup)
    first, other = (caught.value.failures[rank].splitlines()[-1] for rank in range(2))
    assert first == "ValueError: the disk is full"
    assert re.fullmatch(r".*RankFailedError: rank 0 on .*ValueError: the disk is full", other)
    assert left_out not in (tmp_path / "notes").read_text()


def _blocks(notes: Path) -> tuple[bool, bool]:
    strategy = AutomodelStrategy()
    pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, logger=False)
    with strategy.first_rank_per_node() as is_first:
        if not notes.exists():
            with notes.open("a") as file:
                file.write("x")
    with strategy.first_rank_per_node(scope="global", timeout=1.0) as is_global_first:
        pass
    return is_first, is_global_first


def test_block_of_the_strategy(pool2: RankPool, tmp_path: Path) -> None:
    """The others find the work done."""
    assert pool2.run(_blocks, tmp_path / "notes") == [(True, True), (False, False)]
    assert (tmp_path / "notes").read_text() == "x"


class RenamesBarrier(AutomodelStrategy):
    """As if another version of Lightning had another name for a barrier."""

    renamed = ""

    def barrier(self, name: str | None = None) -> None:
        super().barrier("another name" if name == self.renamed else name)


@pytest.mark.parametrize(
    ("stage", "name"), [("fit", "pre_setup"), ("fit", "post_setup"), ("validate", "run-stage")]
)
def test_a_barrier_that_does_not_come(name: str, stage: str) -> None:
    """What is done at it is not left out in silence."""
    strategy = RenamesBarrier()
    strategy.renamed = name
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **SILENT)
    with pytest.raises(RuntimeError, match=rf"has not called strategy\.barrier\('{name}'\)"):
        getattr(trainer, stage)(LabelledModule(), DataLoader(micro_batches(CASE)[0], batch_size=None))
    destroy_global_state()
