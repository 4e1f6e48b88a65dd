"""Tables that test runs write into docs/, and records that they leave beside the benchmarks' reports."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.processes import ROOT

FEW_NAMES = 3
"""A cell lists as many names; above that, it says how many the others are."""


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def merged_table(titles: Sequence[str], rows: Mapping[str, Sequence[str]], noun: str) -> list[str]:
    """A Markdown table in which rows with equal cells, given by name, are one row.

    Its first cell has their names, separated by semicolons. The largest group comes last, as "the other 16
    features" (the ``noun``), if it has more than ``FEW_NAMES`` names, so the caller must list all names somewhere.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        names.setdefault(tuple(cells), []).append(name)
    groups = [("; ".join(equal), cells) for cells, equal in names.items()]
    largest = max(names, key=lambda cells: len(names[cells]))
    if len(names[largest]) > FEW_NAMES:
        count = len(names[largest])
        label = f"all {count} {noun}" if len(names) == 1 else f"the other {count} {noun}"
        groups = [group for group in groups if group[1] != largest] + [(label, largest)]
    return table(titles, [[label, *cells] for label, cells in groups])


def write_record(name: str, text: str) -> Path:
    """Write a dated record beside the benchmarks' reports; returns its path below the repository."""
    path = Path("benchmarks", "results", f"{name}_cpu_{datetime.date.today()}.md")
    (ROOT / path).write_text(text)
    return path


def write_section(page: Path, name: str, text: str) -> None:
    """Replace what stands on a page between the comments ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = f"<!-- {name} -->.*<!-- /{name} -->"
    written = f"<!-- {name} -->\n{text}<!-- /{name} -->"
    page.write_text(re.sub(pattern, lambda _: written, page.read_text(), flags=re.DOTALL))
