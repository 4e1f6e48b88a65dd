"""Faults of one rank in a real run, in many hooks: all ranks leave, with the cause.

A default run takes every fault and both engines; the sweep takes the other cells. `fault_table.COMMAND` runs
all and writes the tables of docs/failures.md; with `-k nccl` the second one alone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.failure import fault_table
from tests.failure.fault_cells import BY_DEFAULT, CELLS, NCCL_BY_DEFAULT, NCCL_CELLS
from tests.failure.fault_table import RAISED, cause
from tests.failure.faults import (
    CTRL_C,
    DATA_ENDS,
    HANG,
    KERNEL,
    MESSAGE,
    NO_MEMORY,
    SKIP,
    WORLD_SIZE,
    Cell,
    Outcome,
    run,
)
from tests.second_device import build
from tests.trainer.runs import by_default


def _run(cell: Cell, folder: Path) -> Outcome:
    if cell.device == "nccl" and build.compiler() is not None:
        build.built()
    return run(cell, folder)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Cell, Future]]:
    """Outcome of each selected cell, four at a time; with --fault-table, two, and they are written as tables."""
    cells = [
        item.callspec.params["cell"]
        for item in request.session.items
        if item.name.startswith("test_others_leave")
    ]
    path = request.config.getoption("--fault-table")
    with ThreadPoolExecutor(max_workers=2 if path else 4) as executor:
        # Gloo while the second device may still be compiled; the longest first, which only wait.
        in_order = sorted(cells, key=lambda cell: (cell.device, -cell.timeout_s))
        found = {cell: executor.submit(_run, cell, tmp_path_factory.mktemp("cell")) for cell in in_order}
        yield found
    if path:
        fault_table.write(Path(path), {cell: found[cell].result() for cell in cells})


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cell", by_default({str(cell): cell for cell in CELLS}, *map(str, BY_DEFAULT)))
def test_others_leave(cell: Cell, outcomes: dict[Cell, Future]) -> None:
    """With a non-zero status, and a message that names the failed rank, its hook and its error."""
    _check(cell, outcomes[cell].result())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cell", by_default({str(cell): cell for cell in NCCL_CELLS}, *map(str, NCCL_BY_DEFAULT))
)
def test_others_leave_nccl(cell: Cell, extension: None, outcomes: dict[Cell, Future]) -> None:
    """Likewise where collectives behave as NCCL's, and the failed rank prints its own traceback.

    Nobody is aborted, unless no rank fails: rank 0 then has said where all are, long before NCCL ends them.
    """
    outcome: Outcome = outcomes[cell].result()
    if cell.fault in (HANG, SKIP):
        _, has_warned, table = outcome.outputs[0].partition("No rank has got on for 6 s:\n")
        assert has_warned, outcome.outputs[0]
        places = re.findall(r"^  rank ([\d, ]+) (?:goes on|waits) in \w+, step \d+, at ", table, re.M)
        assert sorted("".join(places).replace(", ", "")) == ["0", "1", "2"], outcome.outputs[0]
        if cell.fault == HANG:
            assert table.startswith("  rank 1 goes on in training_step"), outcome.outputs[0]
        return
    _check(cell, outcome)
    assert -signal.SIGABRT not in outcome.statuses.values(), outcome
    if cell.leaves:
        assert outcome.statuses[cell.rank] not in (0, None), outcome
    own = outcome.outputs[cell.rank]
    if cell.fault == "exception":
        assert "in happen" in own, own
    if cell.fault in ("exception", KERNEL) and cell.hook == "training_step":
        # First of all, and again at the end: nothing that clean-up raised takes its place.
        assert own.index(f"rank {cell.rank} raised, and leaves:") < own.index("Traceback"), own
        assert own.rstrip().splitlines()[-1].startswith(("ValueError: ", "RuntimeError: ")), own
    if cell.meets_on_the_host:
        assert all("met [0, 1, 2] on the host" in each for each in outcome.outputs.values()), outcome.outputs


def _check(cell: Cell, outcome: Outcome) -> None:
    for rank in range(WORLD_SIZE):
        if rank == cell.rank:
            continue
        assert outcome.statuses[rank] not in (0, None), outcome
        if cell.fault == CTRL_C:  # the user's wish, which needs no explanation
            continue
        found = cause(cell, outcome.outputs[rank])
        assert found, outcome.outputs[rank]
        for text in _texts(cell):
            assert text in found, outcome.outputs[rank]


def _texts(cell: Cell) -> list[str]:
    """What the others say of the rank."""
    texts = {
        "exception": [f"ValueError: {MESSAGE}"],
        "out of memory": [f"OutOfMemoryError: {NO_MEMORY}"],
        KERNEL: ["device-side assert triggered"],
        HANG: [f"rank {cell.rank} goes on in training_step"],
        DATA_ENDS: [f"The train data of rank {cell.rank} ends with batch 3"],
    }
    own = texts.get(cell.fault, [])
    if cell.fault in RAISED and cell.hook != "__getitem__" and cell.fault not in ("sys.exit", DATA_ENDS):
        own = [*own, f"failed in {cell.failing_hook}:"]
    return own


def test_a_default_run_meets_every_fault() -> None:
    """On the first rank and on another, under each engine, and never a cell that the table lacks."""
    assert set(CELLS) > BY_DEFAULT
    assert set(NCCL_CELLS) > NCCL_BY_DEFAULT
    chosen = BY_DEFAULT | NCCL_BY_DEFAULT
    for what in ("rank", "data_parallel", "context", "fault"):
        assert {getattr(cell, what) for cell in chosen} == {getattr(cell, what) for cell in NCCL_CELLS}
