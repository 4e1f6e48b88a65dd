"""The table of what works with what: each cell passed, refused with a message, or not run here for a reason.

A default run takes a sample. `pytest tests/trainer/test_support.py -m "sweep or not sweep" --support-table
PATH` runs all cells and writes the table.
"""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch

from tests.markdown import merged_table
from tests.rank_pool import RankPool
from tests.trainer.exactness import weight_error
from tests.trainer.runs import sampled
from tests.trainer.support import (
    CELLS,
    FEATURES,
    LAYOUTS,
    PRECISIONS,
    Cell,
    expected_weights,
    reason_not_to_run,
    train,
)

BY_DEFAULT = {
    Cell("one process", "64-true", "clip by norm"),
    Cell("FSDP2", "16-true", "CPU offload"),
    Cell("own mesh (dp, tp)", "bf16-mixed", "non-finite check, norm tracked"),
    Cell("TP x FSDP2", "64-true", "compiled blocks"),
    Cell("DDP", "bf16-true", "activation checkpointing"),
    Cell("CP x HSDP", "64-true", "all-reduce once"),
    Cell("CP x FSDP2", "64-true", "manual optimization"),
}
"""Of layouts and precisions those that `test_layouts.py` and `test_precision.py` lack; the whole table is a sweep."""

REFUSED = {
    ("TP|tp", "compiled blocks"): r"model\.blocks\.0 is compiled and holds tensor-parallel parameters",
    ("^CP", "window counted ahead"): "context_parallel_size=2 does not work with count_window_ahead=True",
}
"""A part of the layouts and the feature that are refused, with the message: regular expressions."""

Status = tuple[str, str]


def expected_refusal(cell: Cell) -> str | None:
    """The message, as a regular expression, with which the cell is to be refused."""
    for (layout, feature), message in REFUSED.items():
        if feature == cell.feature and re.search(layout, cell.layout):
            return message
    return None


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[Cell, Status]]:
    """What came of each cell; with --support-table, it is written at the end."""
    found: dict[Cell, Status] = {}
    yield found
    if path := request.config.getoption("--support-table"):
        # Other tests write what stands below.
        _, heading, others = (
            Path(path).read_text().partition("\n## The second device\n") if Path(path).exists() else [""] * 3
        )
        Path(path).write_text(as_markdown(found) + heading + others)


@pytest.fixture
def pool(request: pytest.FixtureRequest, cell: Cell) -> RankPool:
    """As many ranks as the cell needs."""
    return request.getfixturevalue(f"pool{LAYOUTS[cell.layout].world_size}")


@pytest.mark.parametrize("cell", sampled(CELLS, BY_DEFAULT), ids=str)
def test_cell(cell: Cell, pool: RankPool, table: dict[Cell, Status]) -> None:
    """Weights are those of the plain loop within the precision's rounding, or the same refusal on every rank."""
    if reason := reason_not_to_run(cell, torch.cuda.device_count()):
        table[cell] = ("not run here", reason)
        pytest.skip(reason)
    table[cell] = ("failed", "")
    table[cell] = check(cell, pool)


def check(cell: Cell, pool: RankPool) -> Status:
    """Train a cell on all ranks, and hold what came of it against what is claimed."""
    refusal = expected_refusal(cell)
    for outcome in pool.run(train, cell):
        if isinstance(outcome, str):
            assert refusal is not None, outcome
            assert re.search(refusal, outcome), outcome
            status = ("refused", outcome)
        else:
            assert refusal is None, "expected to be refused, but trained"
            error = weight_error(outcome, expected_weights(cell))
            assert error <= PRECISIONS[cell.precision], f"off by {error:.1e}"
            status = ("passed", "")
    return status


def as_markdown(found: dict[Cell, Status]) -> str:
    """Precisions with the same outcomes share a table, features a row; messages and reasons are notes below."""
    notes: list[str] = []
    lines = [
        f"# What works with what, {datetime.date.today()}",
        "",
        f"Written by `{COMMAND}` with torch {torch.__version__}, Lightning {lightning.__version__}, Python"
        f" {platform.python_version()} and {torch.cuda.device_count()} CUDA devices. Of"
        f" {len(CELLS):,} combinations each that can trains on ragged data with a short last window. *passed*: the"
        " weights are those of a plain single-process float64 loop. The number behind a precision is the"
        " tolerance, relative to the largest weight of each tensor. *refused* and *not run* point to the"
        " message or the reason below.",
        "",
        f"Features: {'; '.join(FEATURES)}.",
        "",
    ]
    tables: dict[str, list[str]] = {}
    for precision, tolerance in PRECISIONS.items():
        rows = {
            feature: [_shown(found.get(Cell(layout, precision, feature)), notes) for layout in LAYOUTS]
            for feature in FEATURES
        }
        table = "\n".join(merged_table(["feature", *LAYOUTS], rows, "features"))
        tables.setdefault(table, []).append(f"{precision} ({tolerance:g})")
    for table, precisions in tables.items():
        lines += [f"## {', '.join(precisions)}", "", table, ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


COMMAND = (
    'python -m pytest tests/trainer/test_support.py -m "sweep or not sweep"'
    " --support-table benchmarks/results/support_cpu2.md"
)


def _shown(status: Status | None, notes: list[str]) -> str:
    if status is None:
        return "not selected"
    word, note = status
    if not note:
        return word
    if note not in notes:
        notes.append(note)
    return f"{word} ({notes.index(note) + 1})"
