"""Pools whose ranks train on the second device, under the names that the tests of other rooms ask for.

By default a test of another room runs its first set of parameters for two ranks here: it runs others on the
CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank_pool import RankPool

LONG = (
    "test_around_fits",
    "test_backwards_in_a_hook",
    "test_early_stopping",
    "test_equals_one_process",
    "test_failure_in_the_background",
    "test_from_everywhere",
    "test_misuse_raises",
    "test_plain_backward_is_averaged_by_fsdp2",
    "test_state_that_is_not_there_yet",
    "test_trained",
    "test_training_goes_on_while_a_checkpoint_is_written",
    "test_unused_once_it_is_unfrozen",
)
"""Tests of other rooms that take longer than the default run has."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave other sets of parameters than the first to the sweep."""
    seen: set[str] = set()
    for item in items:
        own = item.path.parent != Path(__file__).parent or item.function.__module__.startswith(
            "tests.second_device"
        )
        if own or item.get_closest_marker("sweep"):
            continue
        name = item.nodeid.split("[")[0]
        if name in seen or name.endswith(LONG) or not _is_chosen(item):
            item.add_marker(pytest.mark.sweep)
        else:
            seen.add(name)


def _is_chosen(item: pytest.Item) -> bool:
    """Whether it needs no more than two ranks."""
    return "pool4" not in item.fixturenames


def _pool(num_ranks: int, device: str = "second") -> Iterator[RankPool]:
    pool = RankPool(num_ranks, device)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool1(extension: None) -> Iterator[RankPool]:
    """One rank on the second device."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def pool2(extension: None) -> Iterator[RankPool]:
    """Two ranks on the second device."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool4(extension: None) -> Iterator[RankPool]:
    """Four ranks on the second device."""
    yield from _pool(4)


@pytest.fixture(scope="module")
def nccl_pool2(extension: None) -> Iterator[RankPool]:
    """Two ranks on the second device, with collectives that behave as NCCL's."""
    yield from _pool(2, "nccl")
