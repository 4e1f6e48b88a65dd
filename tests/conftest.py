"""Fixtures of all tests: the rank pools, which are started once, and a process that is as it was.

How to run: `pytest` for the suite, `pytest -m sweep` for what takes long, `pytest tests/gradients` for one
room. A test on ranks with several sets of parameters runs the first by default, `every_case` all of them,
and `each_value` those that have a value which none before has; the sweep has the rest.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rank_pool import RankPool

SLOW = (
    "callbacks/test_exactness_check.py",
    "failure/test_faults.py",
    "sharding/test_user_code.py",
    "checkpoint/test_saving.py",
    "search/test_search.py",
    "checkpoint/test_other_code.py",
    "tests/test_examples.py",
    "resume/test_dataloaders.py",
    "gradients/test_whole_tensors.py",
    "failure/test_races.py",
    "gradients/test_final_gradients.py",
    "checkpoint/test_remote.py",
    "sharding/test_activation_checkpointing.py",
    "failure/test_debugging_aids.py",
    "internals/test_nothing_replaced.py",
)
"""Run first, so that no worker is left with one of them at the end. Every second one mostly waits, beside one that
computes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tables be written by the runs that measure them."""
    parser.addoption(
        "--fault-table", metavar="PATH", help="write what each fault led to as a Markdown table"
    )
    parser.addoption("--support-table", metavar="PATH", help="write what works with what as Markdown tables")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all sets of parameters but the first to the sweep, unless a mark of the test asks for more."""
    rank = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(SLOW)))
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        on_ranks = {"pool1", "pool2", "pool4"} & set(getattr(item, "fixturenames", ()))
        if on_ranks and not item.get_closest_marker("sweep") and not item.get_closest_marker("every_case"):
            by_test[item.nodeid.split("[")[0]].append(item)
    for cases in by_test.values():
        met: set[tuple[str, str]] = set()
        for number, item in enumerate(cases):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            values = {(name, repr(value)) for name, value in parameters.items()}
            is_new = not values <= met if item.get_closest_marker("each_value") else number == 0
            met |= values
            if not is_new:
                item.add_marker(pytest.mark.sweep)


def pytest_configure(config: pytest.Config) -> None:
    """One thread for the references: with more, waiting for each other costs far more than these tiny tensors do.

    The process that only hands tests to xdist's workers imports nothing: they would wait for it. And nothing that is
    imported or collected is garbage, which the collector would look for many times.
    """
    config.option.loadscopereorder = False  # xdist's, by which files with most tests run first
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    gc.disable()
    import torch

    import tests.entry_points  # noqa: F401  # for the Trainers of this process
    from tests.processes import start_importing

    torch.set_num_threads(1)
    if not config.option.collectonly:
        start_importing()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector pass over what is imported by now: a full collection takes a third of a second otherwise.

    The second device is compiled beside the tests that come before it is needed.
    """
    if not session.config.option.collectonly and any(
        "extension" in item.fixturenames for item in session.items
    ):
        from tests.second_device import build

        build.compile_ahead()
    gc.collect()
    gc.freeze()
    gc.enable()


def _pool_of(num_ranks: int) -> Iterator[RankPool]:
    """Gloo ranks, started at the first call and shared by the whole run."""
    from tests.rank_pool import RankPool

    pool = RankPool(num_ranks)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool1() -> Iterator[RankPool]:
    yield from _pool_of(1)


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    yield from _pool_of(2)


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    yield from _pool_of(4)


@pytest.fixture(scope="session")
def extension() -> None:
    """The second device, compiled before any rank waits for it."""
    from tests.second_device import build

    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    build.built()


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """Undo what a test did to this process: environment, dtype, threads, seed; a process group left is an error."""
    import torch
    import torch.distributed as dist

    environment = os.environ.copy()
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    # A fit in this process takes all cores, and half precision would round otherwise.
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind in the pytest process")
