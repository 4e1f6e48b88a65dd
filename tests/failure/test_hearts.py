"""Hearts, meetings and the way out on ranks whose beats come in any order: all learn one cause, and nobody waits on.

`benchmarks/store_scale.py` plays the ranks, on a store in this process and a clock that is played, with many more
ranks than a machine has. What real processes do is asked in `test_races.py` and `test_faults.py`.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_automodel.distributed import meeting, processes
from lightning_automodel.distributed.failures import (
    MISSED_HEARTBEATS,
    PROCESS_ENDED,
    WAITED,
    RankFailedError,
    RankFailure,
    Record,
)
from lightning_automodel.distributed.heart import Heart
from lightning_automodel.distributed.meeting import NONE, outcome_of
from lightning_automodel.failure import report
from lightning_automodel.failure.coordinated_stop import REQUEUE, STEPS, STOP, StopAgreement
from lightning_automodel.failure.position import main_thread_position
from lightning_automodel.failure.watch import Watch
from tests.failure.faults import killed_at_the_end
from tests.processes import forked

SEED = 3
EACH_SEED = pytest.mark.parametrize(
    "seed", [SEED, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(20))]
)
MINUTE = timedelta(minutes=1)
OWN = RankFailure(0, "host", "training_step", "RuntimeError", "[gloo] Timed out")


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import store_scale

    yield store_scale
    del sys.modules["store_scale"]


@pytest.fixture
def server() -> Any:
    """A store for each world, in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers = iter(range(1000))
    return SimpleNamespace(
        new_store=lambda: dist.PrefixStore(str(next(numbers)), store), seconds=lambda: 0.0
    )


# --- What the store is asked ------------------------------------------------------------------------------------------


def test_work_grows_with_the_ranks(scale: Any, server: Any) -> None:
    """Two operations a heartbeat, however many ranks; a failure costs each a few more."""
    rows = [scale.measure(size, server, random.Random(SEED)) for size in (16, 32)]
    assert [row["a beat"] for row in rows] == [2.0, 2.0]
    assert all(row["a rank"] < 5 for row in rows)
    assert rows[1]["operations"] < 2.2 * rows[0]["operations"]
    assert scale.World(1024, server.new_store(), random.Random(SEED)).interval_s * 1000 >= 1024


# --- What all learn ---------------------------------------------------------------------------------------------------


@EACH_SEED
def test_all_learn_one_cause(scale: Any, server: Any, seed: int) -> None:
    """The right one, in faults of every kind, in whatever order the heartbeats come."""
    number = 2 * len(scale.FAULTS)
    assert scale.random_faults(16, number, server, random.Random(seed)) == number


def test_an_exception_of_its_thread_is_named_as_such() -> None:
    """Once it was taken for the end of rank 0, which holds the store."""

    class Raises(Heart):
        def describe(self) -> None:
            if self.record.beat == 2:
                raise KeyError("device")
            self.record.where = "training_step"

    store = dist.HashStore()
    heart = Raises(1, range(2), store, 8.0)
    heart.start()
    assert heart.is_over.wait(20)
    heart.close()
    assert str(heart.failure) == (
        f"rank 1 on {heart.record.host} failed in training_step: KeyError: 'device'"
    )
    assert meeting.parse_failure(store.get(meeting.FAILURE)) == heart.failure


@pytest.mark.parametrize(("expects_all", "error"), [(True, MISSED_HEARTBEATS), (False, None)])
def test_a_rank_that_never_came(expects_all: bool, error: str | None) -> None:
    """Where all have just joined it is missed like one that has fallen silent; else it may come later."""
    now = 0.0
    heart = Heart(0, range(2), dist.HashStore(), 8.0, expects_all)
    heart.clock = lambda: now
    heart._heard_at = now
    for _ in range(20):
        now += 1.0
        heart.beat()
    assert (heart.failure and heart.failure.error) == error


# --- A heart whose store does not answer ------------------------------------------------------------------------------


class _Stuck:
    """A store of which no call returns, as where its host is stopped."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.release.wait(30)


def test_the_switch_ends_a_wait_for_a_stopped_host() -> None:
    """In turns of its own; the heart's thread hangs in the store."""
    told: list[RankFailure] = []
    told_once = threading.Event()

    class Tells(Heart):
        def make_leave(self, failure: RankFailure) -> None:
            told.append(failure)
            told_once.set()

    store = _Stuck()
    heart = Tells(1, range(2), store, 0.5)  # type: ignore[arg-type]
    for thread in heart._threads:
        thread.start()
    assert told_once.wait(20)
    store.release.set()
    heart.close()
    assert heart.is_stuck
    assert [failure.error for failure in told] == [MISSED_HEARTBEATS]
    assert "which holds the store of the process group, has not answered for 0.5 s" in told[0].message


# --- Meetings ---------------------------------------------------------------------------------------------------------


def test_the_last_one_dies_before_it_has_collected() -> None:
    """Somebody else does it."""
    store = dist.HashStore()
    store.set("here/1", "7")
    store.add("here/came", 2)  # this rank has been counted, and no rank will be the last
    assert meeting.meet(store, "here", 0, range(2), 7, 0.1) == [7, 7]


def test_all_meet_or_all_are_told_who_is_missing() -> None:
    """Whoever comes when the first one has given up is told that too."""
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RankFailedError, match=r"rank 0 waited 0\.1 s at here for ranks 1: "):
            meeting.meet(store, "here", rank, range(2), None, 0.1)


# --- What records tell ------------------------------------------------------------------------------------------------


def _records(**changes: Any) -> dict[int, Record]:
    waiting = Record(
        5, "host", where="training_step", step=3, position="train.py:39 in training_step", waits=True
    )
    return {0: waiting, 1: replace(waiting, **changes), 2: waiting}


def _beaten(records: dict[int, Record], *silent: int) -> dict[int, Record]:
    return {
        rank: record if rank in silent else replace(record, beat=record.beat + 9)
        for rank, record in records.items()
    }


@pytest.fixture
def gone() -> str:
    """A process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return f"{processes._here()} {ended.pid} 1"


def test_who_is_named(gone: str) -> None:
    """Gone is named before silent; alive is a row of the table, however long a call keeps Python's lock."""
    own = processes.own_process()
    alive = "\n  rank 1 is alive, but a call keeps Python's lock, in training_step, step 3, at "
    for process, silent, expected, says in (
        ("", (1, 2), (1, MISSED_HEARTBEATS), "rank 0 has heard nothing of it: stopped, killed or cut off"),
        (gone, (0, 1), (1, PROCESS_ENDED), "its process has ended without a word"),
        (own, (1,), (0, WAITED), alive),
    ):
        records = _records(process=process, waits=False)
        failure = report.explain(records, _beaten(records, *silent), OWN)
        assert (failure.rank, failure.error) == expected
        assert says in failure.message


def test_states_of_processes(gone: str) -> None:
    """A number that was given again is another process."""
    here, pid, started = processes.own_process().rsplit(" ", 2)
    states = {
        gone: processes.GONE,
        f"{here} {pid} {int(started) + 1}": processes.GONE,
        processes.own_process(): processes.ALIVE,
        "another machine 1 1": processes.UNSEEN,
    }
    assert {process: processes.state_of(process) for process in states} == states


def test_a_rank_without_files_names_no_process() -> None:
    """It cannot read the kernel's table: that is no sign of a process that has ended."""
    own = processes.own_process()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        seen = processes.state_of(own)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen == processes.UNSEEN


def test_the_table() -> None:
    """Those that do not wait come first; equal places are one line."""
    text = report.table(_records(waits=False, position="train.py:12 in read", stood_s=7.0))
    assert text.splitlines()[:2] == [
        "  rank 1 goes on in training_step, step 3, at train.py:12 in read, for 7 s",
        "  rank 0, 2 waits in training_step, step 3, at train.py:39 in training_step, for 0 s",
    ]
    ended = report.table(_records(has_ended=True))
    assert ended.startswith(
        "  rank 1 has ended its training or run, and waits for the others in training_step"
    )


@pytest.mark.parametrize(("stood_s", "has_table"), [(59.0, False), (61.0, True)])
def test_a_standstill(stood_s: float, has_table: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 logs the table once, and only if nobody has got on."""
    store = dist.HashStore()
    store.set("record/1", json.dumps(asdict(replace(_records()[1], stood_s=stood_s))))
    watch = Watch(0, 2, store, 10 * MINUTE, MINUTE, lambda: "training_step")
    now = 0.0
    watch.clock = lambda: now
    watch.beat()
    now = 61.0
    watch.beat()
    watch.beat()
    logged = [record.message for record in caplog.records]
    assert len(logged) == has_table
    if has_table:
        assert logged[0].startswith("No rank has got on for 60 s:\n  rank ")


# --- The way out ------------------------------------------------------------------------------------------------------


def test_whoever_leaves_by_itself_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that does not is, and its process ends, with the cause and with what it has raised itself."""
    from lightning_automodel.failure import watch as module

    done: list[Any] = []
    monkeypatch.setattr(module, "TIME_TO_RAISE_S", 0.05)
    monkeypatch.setattr(module, "TIME_TO_LEAVE_S", 0.05)
    monkeypatch.setattr(module, "end_process", lambda rank, why: done.append(why))
    monkeypatch.setattr(module.signal, "pthread_kill", lambda thread, signum: done.append(signum))
    failure = replace(OWN, rank=1)
    leaving = Watch(0, 2, dist.HashStore(), MINUTE, MINUTE, str)
    leaving.interrupts = True
    leaving.leave()
    leaving.make_leave(failure)
    assert done == []
    staying = Watch(0, 2, dist.HashStore(), MINUTE, MINUTE, str)
    staying.interrupts = True
    staying.own = replace(OWN, error="ValueError", message="bad batch")
    staying.make_leave(failure)
    assert done == [module.signal.SIGTERM, f"{failure}; this rank itself: {staying.own}"]


@pytest.mark.parametrize(
    ("waited_s", "has_devices", "ends"), [(63, True, True), (61, True, False), (63, False, False)]
)
def test_a_collective_that_never_ends(
    waited_s: float, has_devices: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects without a limit: past the timeout all leave with the table. Gloo's collectives fail themselves."""
    from lightning_automodel.failure import watch as module

    monkeypatch.setattr(module.process_groups, "accelerator_backends", lambda: [1] * has_devices)
    now = 0.0
    watch = Watch(1, 2, dist.HashStore(), MINUTE, MINUTE, lambda: "on_train_start")
    watch.clock = lambda: now
    watch._heard_at = now
    monkeypatch.setattr(module, "main_thread_position", lambda: (True, "train.py:39 in training_step"))
    watch.beat()
    now += waited_s
    watch.beat()
    assert (watch.failure is not None) == ends
    if watch.failure is not None:
        assert watch.failure.error == WAITED
        assert "a collective neither ends nor fails after 63 s\nThey are at:\n" in watch.failure.message
        assert (
            "  rank 1 waits in on_train_start, step 0, at train.py:39 in training_step"
            in watch.failure.message
        )


# --- All stop after the same step -------------------------------------------------------------------------------------


WAIT_S = 10.0


def make_agreements(world_size: int) -> tuple[dist.Store, list[StopAgreement]]:
    """The agreements of all ranks, and a store with the keys that they read."""
    store = dist.HashStore()
    store.set(STOP, NONE)
    store.set(STEPS, NONE)
    return store, [StopAgreement(rank, range(world_size)) for rank in range(world_size)]


def exchange(agreements: list[StopAgreement], store: dist.Store) -> None:
    for agreement in agreements:
        agreement.exchange(store, store.get(STOP), store.get(STEPS))


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 20))]
)
def test_last_step_is_the_same_and_nobody_has_passed_it(seed: int) -> None:
    """However far apart the ranks are when they hear of the request, with steps going on meanwhile."""
    draw = random.Random(seed)
    world_size = draw.randint(2, 5)
    store, agreements = make_agreements(world_size)
    for agreement in agreements:
        for step in range(1, draw.randint(1, 8)):
            assert not agreement.begin_step(step, WAIT_S)
    asking = draw.randrange(world_size)
    agreements[asking].ask(draw.choice(["", REQUEUE]))
    last_steps: dict[int, int] = {}

    def take_steps(rank: int, agreement: StopAgreement) -> None:
        while not agreement.begin_step(agreement.step + 1, WAIT_S):
            pass
        last_steps[rank] = agreement.step

    threads = [threading.Thread(target=take_steps, args=entry) for entry in enumerate(agreements)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        exchange(draw.sample(agreements, world_size), store)
    assert len(last_steps) == world_size
    promised = outcome_of(store.get(STEPS))
    assert promised is not None
    assert set(last_steps.values()) == {1 + max(promised)}
    assert {agreement.asked_by for agreement in agreements} == {asking}
    assert {agreement.requeues for agreement in agreements} == {not agreements[asking].is_asked_here}


@pytest.mark.parametrize("reasons", [(REQUEUE, ""), ("", REQUEUE)])
def test_requeue_beside_sigterm(reasons: tuple[str, str]) -> None:
    """SIGTERM right before or after SLURM's signal does not cancel the requeue."""
    store, (agreement, _) = make_agreements(2)
    for reason in reasons:
        agreement.ask(reason)
    assert agreement.is_asked_here
    exchange([agreement], store)
    assert json.loads(store.get(STOP)) == [0, REQUEUE]


def test_waiting_step_goes_on_when_released() -> None:
    """As there is no decision to wait for once a rank has failed."""
    store, (agreement, _) = make_agreements(2)
    agreement.begin_step(1, WAIT_S)
    agreement.ask()
    exchange([agreement, agreement], store)
    exchange([agreement], store)
    released = threading.Timer(0.05, agreement.release)
    released.start()
    assert not agreement.begin_step(2, WAIT_S)
    released.join()
    assert agreement.last_step is None


# --- Where the main thread is -----------------------------------------------------------------------------------------


def test_position_of_what_was_raised() -> None:
    """The user's line, though the main thread is elsewhere by then."""
    with pytest.raises(AttributeError) as raised:
        dist.get_world_size("no group")
    line = raised.traceback[0].lineno + 1
    name = "test_position_of_what_was_raised"
    assert main_thread_position(raised.value) == (True, f"{__file__}:{line} in {name}")


class Garbage:
    """In a cycle. Like a tensor, it gives Python's lock away where it is freed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.001)


def _collect_while_a_thread_looks() -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            Garbage()
            main_thread_position()

    gc.collect()
    gc.freeze()
    gc.set_threshold(1)
    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(50):
        thread = threading.Thread(target=Garbage)
        thread.start()
        thread.join()
    is_over.set()
    looking.join()
    assert gc.isenabled()


def test_garbage_is_not_collected_while_threads_are_listed() -> None:
    """With Python 3.11, a thread that starts meanwhile would never run, nor the one that starts it."""
    process = forked().Process(target=_collect_while_a_thread_looks)
    process.start()
    with killed_at_the_end([process]):
        process.join(60)
        assert process.exitcode == 0
