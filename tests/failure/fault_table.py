"""What became of faults: a record of each, and the summaries of `docs/failures.md`."""

from __future__ import annotations

import datetime
import os
import platform
import re
import socket
import statistics
from pathlib import Path

import lightning
import torch

from tests.failure.faults import HEARTBEAT_TIMEOUT_S, LONG_TIMEOUT_S, TIMEOUT_S, WORLD_SIZE, Cell, Outcome
from tests.markdown import table, write_record, write_section

COMMAND = (
    'python -m pytest tests/failure/test_faults.py -m "sweep or not sweep" --fault-table docs/failures.md'
)
COLLECTIVES = {"cpu": "gloo", "nccl": "the collectives of the second device that behave as NCCL's"}
NAMES = {"cpu": "gloo", "nccl": "nccl_like"}
TITLE = "What happens when one rank fails"
RECORD_TITLES = ["fault", "hook", "rank", "engine", "raised", "left", "statuses", "message"]
SUMMARY_TITLES = ["fault", "runs", "raised, s", "ended, s", "statuses"]
RAISED = ("exception", "out of memory", "error in a kernel", "sys.exit", "data ends")
"""Faults that are an exception of the rank itself."""


def cause(cell: Cell, output: str) -> str:
    """The line that names the failed rank; empty if there is none."""
    marks = (f"rank {cell.rank} on ", f"Rank {cell.rank} received SIGTERM", f"rank {cell.rank} goes on ")
    lines = [line for line in output.splitlines() if any(mark in line for mark in marks)]
    return lines[-1].replace(socket.gethostname(), "host") if lines else ""


def write(page: Path, outcomes: dict[Cell, Outcome]) -> None:
    """Write a record with a row for each fault that was run, and its summary between the markers of the page."""
    for device in COLLECTIVES:
        found = {cell: outcome for cell, outcome in outcomes.items() if cell.device == device}
        if found:
            rows = [_row(cell, outcome) for cell, outcome in found.items()]
            text = "\n".join(
                [f"# {TITLE}", "", _setting(found, device), "", *table(RECORD_TITLES, rows), ""]
            )
            record = write_record(f"faults_{NAMES[device]}", text)
            intro = f"{len(rows)} faults with {COLLECTIVES[device]} ([each of them, with its message](../{record})):"
            write_section(page, device, "\n".join([intro, "", *summary(rows), ""]))


def summary(rows: list[list[str]]) -> list[str]:
    """Faults of one kind that ended alike are one row: how many, and the longest times."""
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for row in rows:
        groups.setdefault((row[0], row[6]), []).append(row)
    lines = []
    for (fault, statuses), group in groups.items():
        raised = [float(row[4]) for row in group if row[4]]
        longest_raised = f"{max(raised):.1f}" if len(raised) == len(group) else "-"
        longest_left = f"{max(float(row[5]) for row in group):.1f}"
        lines.append([fault, str(len(group)), longest_raised, longest_left, statuses])
    return table(SUMMARY_TITLES, lines)


def _setting(outcomes: dict[Cell, Outcome], device: str) -> str:
    return (
        f"{datetime.date.today()}: {len(outcomes)} faults in real runs of {WORLD_SIZE} ranks with"
        f" {COLLECTIVES[device]}, on one machine (2 cores), `timeout` {TIMEOUT_S:g} s (hang, skip:"
        f" {LONG_TIMEOUT_S:g} s), `heartbeat_timeout` {HEARTBEAT_TIMEOUT_S:g} s, Linux, Python"
        f" {platform.python_version()}, torch {torch.__version__}, Lightning {lightning.__version__}, load"
        f" {os.getloadavg()[2]:.0f} meanwhile. Written by `{COMMAND}`. Where a rank raised, the others"
        f" raised after {_median_raised(outcomes)} s (median)."
    )


def _row(cell: Cell, outcome: Outcome) -> list[str]:
    """What the other ranks did and printed."""
    others = [rank for rank in range(WORLD_SIZE) if rank != cell.rank]
    message = re.sub(r"/\S*/(tests|lightning_automodel)/", r"\1/", cause(cell, outcome.outputs[others[-1]]))
    message = message.rpartition("RankFailedError: ")[2].replace("|", "\\|").replace(str(Path.home()), "~")
    raised = "" if outcome.raised_s is None else f"{outcome.raised_s:.1f}"
    statuses = ", ".join(str(outcome.statuses[rank]) for rank in others)
    hook = f"`{cell.hook}`"
    return [
        cell.fault,
        hook,
        str(cell.rank),
        cell.engine,
        raised,
        f"{outcome.seconds:.1f}",
        statuses,
        message,
    ]


def _median_raised(outcomes: dict[Cell, Outcome]) -> str:
    seconds = [
        each.raised_s
        for cell, each in outcomes.items()
        if cell.fault in RAISED and each.raised_s is not None
    ]
    return f"{statistics.median(seconds):.1f}" if seconds else "no"
