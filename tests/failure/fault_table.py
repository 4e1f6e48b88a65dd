"""What became of faults, as the tables of `docs/faults.md`."""

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

COMMAND = (
    'python -m pytest tests/failure/test_faults.py -m "sweep or not sweep" --fault-table docs/faults.md'
)
COLLECTIVES = {"cpu": "gloo", "nccl": "the collectives of the second device that behave as NCCL's"}
RAISED = ("exception", "out of memory", "error in a kernel", "sys.exit", "data ends")
"""Faults that are an exception of the rank itself."""


def cause(cell: Cell, output: str) -> str:
    """The line that names the failed rank; empty if there is none."""
    marks = (f"rank {cell.rank} on ", f"Rank {cell.rank} received SIGTERM", f"rank {cell.rank} goes on ")
    lines = [line for line in output.splitlines() if any(mark in line for mark in marks)]
    return lines[-1].replace(socket.gethostname(), "host") if lines else ""


def write(path: Path, outcomes: dict[Cell, Outcome]) -> None:
    """Replace the tables of the page for which something was run."""
    page = path.read_text()
    for device in COLLECTIVES:
        found = {cell: outcome for cell, outcome in outcomes.items() if cell.device == device}
        if found:
            written = f"<!-- {device} -->\n{table(found, device)}<!-- /{device} -->"
            page = re.sub(
                f"<!-- {device} -->.*<!-- /{device} -->", lambda _, text=written: text, page, flags=re.DOTALL
            )
    path.write_text(page)


def table(outcomes: dict[Cell, Outcome], device: str) -> str:
    """What the other ranks printed, as Markdown."""
    lines = [
        f"{datetime.date.today()}: {len(outcomes)} faults in real runs of {WORLD_SIZE} ranks with"
        f" {COLLECTIVES[device]}, on one machine (2 cores), `timeout` {TIMEOUT_S:g} s (hang, skip:"
        f" {LONG_TIMEOUT_S:g} s), `heartbeat_timeout` {HEARTBEAT_TIMEOUT_S:g} s, Linux, Python"
        f" {platform.python_version()}, torch {torch.__version__}, Lightning {lightning.__version__}, load"
        f" {os.getloadavg()[2]:.0f} meanwhile. Written by `{COMMAND}`. Where a rank raised, the others"
        f" raised after {_median_raised(outcomes)} s (median).",
        "",
        "| fault | hook | rank | engine | raised | left | statuses | message |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell, outcome in outcomes.items():
        others = [rank for rank in range(WORLD_SIZE) if rank != cell.rank]
        statuses = ", ".join(str(outcome.statuses[rank]) for rank in others)
        message = re.sub(
            r"/\S*/(tests|lightning_automodel)/", r"\1/", cause(cell, outcome.outputs[others[-1]])
        )
        message = (
            message.rpartition("RankFailedError: ")[2].replace("|", "\\|").replace(str(Path.home()), "~")
        )
        raised = "" if outcome.raised_s is None else f"{outcome.raised_s:.1f}"
        lines.append(
            f"| {cell.fault} | `{cell.hook}` | {cell.rank} | {cell.engine} | {raised} |"
            f" {outcome.seconds:.1f} | {statuses} | {message} |"
        )
    return "\n".join(lines) + "\n"


def _median_raised(outcomes: dict[Cell, Outcome]) -> str:
    seconds = [
        each.raised_s
        for cell, each in outcomes.items()
        if cell.fault in RAISED and each.raised_s is not None
    ]
    return f"{statistics.median(seconds):.1f}" if seconds else "no"
