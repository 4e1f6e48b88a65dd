"""Fixtures of all tiers: `unit` (no process group), `distributed` (the rank pools), `trainer` (`Trainer.fit` on them).

How to run: `pytest` for everything but the long sweeps, `pytest -m sweep` for those, `pytest tests/unit` for seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tables be written by the runs that measure them."""
    parser.addoption("--fault-table", metavar="PATH", help="write what each fault led to as a Markdown table")
    parser.addoption("--support-table", metavar="PATH", help="write what works with what as Markdown tables")


def pytest_configure() -> None:
    """One thread for the references: with more, waiting for each other costs far more than these tiny tensors do."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool1() -> Iterator[RankPool]:
    """One gloo rank, started at the first call and shared by the whole run."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    """Two gloo ranks, started at the first call and shared by the whole run."""
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    """Four gloo ranks, started at the first call and shared by the whole run."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """Undo what a test did to this process: environment, dtype, seed; a process group left behind is an error."""
    environment, dtype = os.environ.copy(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind in the pytest process")
