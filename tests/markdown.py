"""Tables that test runs write into docs/, and records that they leave beside the benchmarks' reports."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.processes import ROOT


def merged_table(titles: Sequence[str], rows: Mapping[str, Sequence[str]], every: str = "") -> list[str]:
    """A Markdown table in which rows of equal cells are one row, whose first cell lists their names.

    Args:
        titles: Heads of all columns, that of the names first.
        rows: Cells behind each name.
        every: The first cell where all rows are equal; empty for their names.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        names.setdefault(tuple(cells), []).append(name)
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for cells, equal in names.items():
        first = every if every and len(names) == 1 else "; ".join(equal)
        lines.append(f"| {first} | {' | '.join(cells)} |")
    return lines


def write_record(name: str, text: str) -> Path:
    """Write a dated record beside the benchmarks' reports; returns its path below the repository."""
    path = Path("benchmarks", "results", f"{name}_cpu_{datetime.date.today()}.md")
    (ROOT / path).write_text(text)
    return path
