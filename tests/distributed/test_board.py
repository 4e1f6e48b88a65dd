"""What the board asks of the store, and that all ranks learn one verdict, on ranks whose heartbeats are sent in turn.

`benchmarks/store_scale.py` plays them, with many more ranks.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_automodel.distributed.board import Board
from lightning_automodel.distributed.failures import MISSED_HEARTBEATS

SEED = 3


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
    numbers = iter(range(100))
    return SimpleNamespace(
        new_store=lambda: dist.PrefixStore(str(next(numbers)), store), seconds=lambda: 0.0
    )


def test_work_grows_with_the_ranks(scale: Any, server: Any) -> None:
    """Two operations a heartbeat; a killed rank costs every other a few more, and one rank the board."""
    rows = [scale.measure(size, server, random.Random(SEED)) for size in (16, 32)]
    assert [row["a beat"] for row in rows] == [2.0, 2.0]
    assert all(row["a rank"] < 4 for row in rows)
    assert rows[1]["operations"] < 2.2 * rows[0]["operations"]


def test_keys_are_few(scale: Any, server: Any) -> None:
    """Each kind of key once, whatever the rank."""
    names = set[str]()
    world = scale.World(3, server.new_store(), random.Random(SEED))

    class Noting:
        """Passes calls on to the store, and notes the keys."""

        def __getattr__(self, name: str) -> Callable[..., Any]:
            method = getattr(world.store, name)

            def call(*args: Any) -> Any:
                names.update([args[0]] if isinstance(args[0], str) else args[0])
                return method(*args)

            return call

    for rank in world.ranks:
        rank._store._store = Noting()
    scale.inflict(world, "killed", 1, [0, 2])
    world.verdicts()
    assert {name.rstrip("012") for name in names} == {
        "record/",
        "run/verdict",
        "run/known",
        "lease",
        "devices",
        "stop",
        "stop/result",
    }


def test_the_right_rank_is_named(scale: Any, server: Any) -> None:
    """On all ranks, in faults of every kind."""
    number = 2 * len(scale.FAULTS)
    assert scale.random_faults(24, number, server, random.Random(SEED)) == number


def test_the_lease_passes_on(scale: Any, server: Any) -> None:
    """The rank that looks for the culprit dies before it has found it, and another one goes on."""
    world = scale.World(6, server.new_store(), random.Random(SEED))
    scale.inflict(world, "killed", 5, [1])
    world.beat()
    world.ranks[1].is_dead = True
    for rank in (0, 2, 3, 4):
        world.ranks[rank].fail(RuntimeError("[gloo] Connection closed by peer"))
    (verdict,) = world.verdicts()
    assert (verdict.rank, verdict.error) == (1, MISSED_HEARTBEATS)
    assert "nor of rank 5," in verdict.message


def test_an_exception_of_its_thread_is_named_as_such() -> None:
    """Once it was taken for the end of rank 0, which holds the store."""

    def describe() -> dict[str, Any]:
        if len(written) == 2:
            raise KeyError("device")
        written.append(1)
        return {"where": "training_step"}

    written: list[int] = []
    store = dist.HashStore()
    board = Board(1, lambda: store, "run", range(2), 8.0, describe)
    board.thread.start()
    board.thread.join(20)
    assert board.lost is not None
    assert str(board.lost) == (
        f"rank 1 on {board.host} failed in training_step: KeyError: 'device', raised in the thread that"
        " sends this rank's heartbeats"
    )
    posted = Board(0, lambda: store, "run", range(2), 8.0, dict)
    posted.read(store)
    assert posted.verdicts["run"] == board.lost


@pytest.mark.parametrize(("expects_all", "error"), [(True, MISSED_HEARTBEATS), (False, None)])
def test_a_member_that_never_came(expects_all: bool, error: str | None) -> None:
    """Where all have just joined it is missed like one that has fallen silent; else it may come later."""
    store = dist.HashStore()
    now = 0.0
    board = Board(0, lambda: store, "run", range(2), 8.0, dict)
    board.clock = lambda: now
    board.expects_all = expects_all
    for _ in range(20):
        now += 1.0
        board.beat(store)
    board.read(store)
    verdict = board.verdicts["run"]
    assert (verdict and verdict.error) == error
