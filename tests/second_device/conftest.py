"""Pools whose ranks train on the second device, under the names that the tests of other rooms ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool
from tests.second_device import build


@pytest.fixture(scope="session")
def extension() -> None:
    """The device, compiled before any rank waits for it."""
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    build.built()


@pytest.fixture(scope="session")
def pool2(extension: None) -> Iterator[RankPool]:
    """Two ranks on the second device."""
    pool = RankPool(2, "second")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool1(extension: None) -> Iterator[RankPool]:
    """One rank on the second device."""
    pool = RankPool(1, "second")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool4(extension: None) -> Iterator[RankPool]:
    """Four ranks on the second device."""
    pool = RankPool(4, "second")
    yield pool
    pool.stop()
