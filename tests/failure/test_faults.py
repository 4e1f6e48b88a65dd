"""Faults of one rank in a real run, in many hooks: all ranks leave, with the cause.

A default run takes every fault and both engines; the sweep takes the other cells. `fault_table.COMMAND` runs
all and writes the tables of docs/failures.md; with `-k nccl` the second one alone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.failure import fault_table
from tests.failure.fault_table import RAISED, cause
from tests.failure.faults import (
    CALLED_LAST,
    CALLED_ONCE,
    CTRL_C,
    DATA_ENDS,
    HANG,
    KERNEL,
    MESSAGE,
    NO_MEMORY,
    OUT_OF_MEMORY,
    SKIP,
    WORLD_SIZE,
    Cell,
    Outcome,
    run,
)
from tests.second_device import build
from tests.trainer.runs import by_default

STEP_HOOKS = (
    "on_train_batch_start",
    "__getitem__",
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
)
CELLS = [
    Cell("prepare_data", "exception", rank=0),
    *(Cell(hook, "exception") for hook in (*CALLED_ONCE[1:], *STEP_HOOKS, *CALLED_LAST)),
    *(Cell(hook, "exception", rank=0) for hook in ("setup", "training_step", "validation_step")),
    *(
        Cell(hook, "exception", data_parallel="ddp")
        for hook in ("training_step", "on_before_optimizer_step")
    ),
    *(Cell(hook, "sys.exit") for hook in ("setup", "training_step", "on_validation_start")),
    *(Cell(hook, "os._exit") for hook in ("setup", "training_step")),
    Cell("training_step", "os._exit", rank=0),
    *(Cell(hook, "SIGTERM") for hook in ("setup", "training_step", "on_train_batch_end", "validation_step")),
    Cell("training_step", "SIGTERM", rank=0),
    Cell("training_step", "SIGTERM", data_parallel="ddp"),
    Cell("prepare_data", "SIGKILL", rank=0),
    *(Cell(hook, "SIGKILL") for hook in ("setup", "configure_model", "on_train_start", "__getitem__")),
    *(Cell(hook, "SIGKILL") for hook in ("training_step", "on_before_optimizer_step", "validation_step")),
    Cell("on_fit_end", "SIGKILL"),
    Cell("training_step", "SIGKILL", rank=0),
    Cell("training_step", "SIGKILL", data_parallel="ddp"),
    *(
        Cell(hook, "SIGSTOP")
        for hook in ("setup", "training_step", "on_before_optimizer_step", "validation_step")
    ),
    Cell("training_step", "SIGSTOP", rank=0),
    Cell("training_step", "SIGSTOP", data_parallel="ddp"),
    Cell("training_step", DATA_ENDS),
    Cell("training_step", DATA_ENDS, rank=0),
    Cell("training_step", DATA_ENDS, data_parallel="ddp"),
    *(Cell("test_step", fault) for fault in ("exception", "SIGTERM", "SIGKILL")),
    Cell("test_step", "SIGTERM", rank=0),
    Cell("test_step", "SIGTERM", data_parallel="ddp"),
    *(Cell("attend", fault, context=WORLD_SIZE) for fault in ("exception", "SIGKILL", "SIGSTOP")),
    Cell("attend", "SIGKILL", data_parallel="ddp", context=WORLD_SIZE),
    *(Cell("training_step", CTRL_C, data_parallel=engine) for engine in ("fsdp2", "ddp")),
    Cell("training_step", OUT_OF_MEMORY),
    *(Cell("training_step", HANG, data_parallel=engine) for engine in ("fsdp2", "ddp")),
]
"""On gloo. A skipped collective is not among them: gloo itself aborts a process where ranks do not match."""

NCCL_CELLS = [
    *(replace(cell, device="nccl") for cell in CELLS),
    *(Cell("training_step", KERNEL, data_parallel=engine, device="nccl") for engine in ("fsdp2", "ddp")),
    *(Cell("training_step", SKIP, data_parallel=engine, device="nccl") for engine in ("fsdp2", "ddp")),
]

BY_DEFAULT = {
    Cell("prepare_data", "exception", rank=0),
    Cell("teardown", "exception"),
    Cell("training_step", "sys.exit"),
    Cell("training_step", "os._exit", rank=0),
    Cell("training_step", "SIGTERM"),
    Cell("training_step", DATA_ENDS),
    Cell("training_step", "SIGSTOP"),
    Cell("attend", "exception", context=WORLD_SIZE),
    Cell("training_step", OUT_OF_MEMORY),
}
NCCL_BY_DEFAULT = {
    Cell("training_step", "exception", data_parallel="ddp", device="nccl"),
    Cell("training_step", HANG, data_parallel="ddp", device="nccl"),
    Cell("training_step", "SIGKILL", device="nccl"),
    Cell("training_step", SKIP, device="nccl"),
    Cell("training_step", KERNEL, device="nccl"),
    Cell("training_step", CTRL_C, device="nccl"),
}


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
