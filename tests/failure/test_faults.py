"""Faults of one rank in a real run, in many hooks: all ranks leave, with the cause.

A default run takes every fault and both engines; the sweep takes the other cells. This command
runs all of them and writes the table: `pytest tests/failure/test_faults.py -m "sweep or not sweep" --fault-table PATH`.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import lightning
import pytest
import torch

from tests.failure.faults import CALLED_LAST, DATA_ENDS, MESSAGE, TIMEOUT_S, WORLD_SIZE, Cell, Outcome, run

STEP_HOOKS = (
    "on_train_epoch_start",
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
SET_UP_HOOKS = (
    "configure_callbacks",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
)
CELLS = [
    Cell("prepare_data", "exception", rank=0),
    *(Cell(hook, "exception") for hook in (*SET_UP_HOOKS, *STEP_HOOKS)),
    *(Cell(hook, "exception") for hook in CALLED_LAST),
    *(Cell(hook, "exception", rank=0) for hook in ("setup", "training_step", "validation_step")),
    *(Cell(hook, "exception", data_parallel="ddp") for hook in ("training_step", "on_before_optimizer_step")),
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
    *(Cell(hook, "SIGSTOP") for hook in ("setup", "training_step", "on_before_optimizer_step", "validation_step")),
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
]

BY_DEFAULT = {
    Cell("prepare_data", "exception", rank=0),
    *(Cell(hook, "exception") for hook in ("configure_callbacks", "__getitem__", "teardown")),
    Cell("on_before_optimizer_step", "exception", data_parallel="ddp"),
    Cell("training_step", "sys.exit"),
    Cell("training_step", "os._exit", rank=0),
    Cell("training_step", "SIGTERM"),
    Cell("training_step", DATA_ENDS),
    Cell("on_before_optimizer_step", "SIGKILL"),
    Cell("training_step", "SIGSTOP"),
    Cell("attend", "exception", context=WORLD_SIZE),
}
COMMAND = 'python -m pytest tests/failure/test_faults.py -m "sweep or not sweep" --fault-table docs/faults.md'


def cause(cell: Cell, output: str) -> str:
    """The line that names the failed rank; empty if there is none."""
    marks = (f"rank {cell.rank} on ", f"Rank {cell.rank} received SIGTERM")
    lines = [line for line in output.splitlines() if any(mark in line for mark in marks)]
    return lines[-1].replace(socket.gethostname(), "host") if lines else ""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Cell, Future]]:
    """Outcome of each selected cell, three at a time; with --fault-table, two, and they are written as a table."""
    cells = [
        item.callspec.params["cell"] for item in request.session.items if item.name.startswith("test_others_leave")
    ]
    path = request.config.getoption("--fault-table")
    with ThreadPoolExecutor(max_workers=2 if path else 3) as executor:
        found = {cell: executor.submit(run, cell, tmp_path_factory.mktemp("cell")) for cell in cells}
        yield found
    if path:
        Path(path).write_text(table({cell: future.result() for cell, future in found.items()}))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in BY_DEFAULT else [pytest.mark.sweep]) for cell in CELLS],
    ids=str,
)
def test_others_leave(cell: Cell, outcomes: dict[Cell, Future]) -> None:
    """With a non-zero status, and a message that names the failed rank, its hook and its error."""
    outcome: Outcome = outcomes[cell].result()
    for rank in range(WORLD_SIZE):
        if rank != cell.rank:
            assert outcome.statuses[rank] not in (0, None), outcome
            found = cause(cell, outcome.outputs[rank])
            assert found, outcome.outputs[rank]
            if cell.fault == "exception":
                assert f"ValueError: {MESSAGE}" in found
                assert cell.hook == "__getitem__" or f"failed in {cell.failing_hook}:" in found
            if cell.fault == DATA_ENDS:
                assert f"The train data of rank {cell.rank} ends with batch 3" in found


def test_a_default_run_meets_every_fault() -> None:
    """Under each engine something, on the first rank and on another, and never a cell that the table lacks."""
    assert set(CELLS) > BY_DEFAULT
    for what in ("fault", "rank", "data_parallel", "context"):
        assert {getattr(cell, what) for cell in BY_DEFAULT} == {getattr(cell, what) for cell in CELLS}


def table(outcomes: dict[Cell, Outcome]) -> str:
    """What the other ranks printed, as Markdown."""
    lines = [
        f"# What happens when one rank fails, {datetime.date.today()}",
        "",
        f"Real runs of {WORLD_SIZE} ranks with gloo on one machine (2 cores), `timeout` {TIMEOUT_S:g} s, Linux,"
        f" Python {platform.python_version()}, torch {torch.__version__}, Lightning {lightning.__version__}, load"
        f" {os.getloadavg()[2]:.0f} meanwhile. Written by"
        f" `{COMMAND}`.",
        "",
        "*Seconds*: from the fault until the last of the other ranks had left. *Statuses*: exit statuses of the other"
        " ranks; negative is a signal. *Message*: the line in which another rank named the cause; they all did.",
        "",
        "| fault | hook | rank | engine | seconds | statuses | message |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell, outcome in outcomes.items():
        others = [rank for rank in range(WORLD_SIZE) if rank != cell.rank]
        statuses = ", ".join(str(outcome.statuses[rank]) for rank in others)
        message = cause(cell, outcome.outputs[others[-1]]).rpartition("RankFailedError: ")[2]
        lines.append(
            f"| {cell.fault} | `{cell.hook}` | {cell.rank} | {cell.engine} | {outcome.seconds:.1f}"
            f" | {statuses} | {message} |"
        )
    return "\n".join(lines) + "\n"
