"""FirstRankPerNode where there is nobody to wait for, its arguments, and the decision who is first."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_automodel.distributed.first_rank import FirstRankPerNode, node_of
from tests.processes import NOT_FROM_OUTSIDE


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


def test_without_a_process_group_the_block_just_runs() -> None:
    """Also nested and repeatedly; nothing is started for it."""
    num_threads = threading.active_count()
    with FirstRankPerNode():
        assert threading.active_count() == num_threads
    assert run_nested_blocks() == [True] * 6
    assert not dist.is_initialized()


def test_in_a_world_of_one_the_block_just_runs() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_nested_blocks() == [True] * 6
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_exception_leaves_the_block_unchanged() -> None:
    error = OSError("disk full")
    with pytest.raises(OSError, match="disk full") as caught, FirstRankPerNode(), FirstRankPerNode():
        raise error
    assert caught.value is error
    assert run_nested_blocks() == [True] * 6


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
        ({"timeout": "30"}, "timeout must be a positive .*, got '30'"),
        ({"group": "world"}, "group must be None or a ProcessGroup .*, got 'world'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FirstRankPerNode(**arguments)


@pytest.mark.parametrize(
    ("local_ranks", "nodes"),
    [
        ([0, 1, 0, 1], [0, 0, 1, 1]),
        ([0, 0, 1, 0], [0, 1, 1, 2]),
        ([None] * 4, [0, 0, 0, 0]),  # nothing is known but the host
    ],
)
def test_nodes(local_ranks: list[int | None], nodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for rank, local_rank in enumerate(local_ranks):
        with monkeypatch.context() as patch:
            if local_rank is not None:
                patch.setenv("LOCAL_RANK", str(local_rank))
            names.append(node_of(rank))
    assert [list(dict.fromkeys(names)).index(name) for name in names] == nodes
