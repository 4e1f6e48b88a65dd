"""CONTRIBUTING.md names files that exist, every room, and rows for ten changes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = [ROOT / name for name in ("lightning_automodel", "tests", "docs", "examples", "benchmarks")]


def test_files_exist() -> None:
    """Whatever ends in .py, with its folder where one is named."""
    paths = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in folder.rglob("*.py")]
    named = re.findall(r"[\w/]+\.py\b", TEXT)
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []


def test_rooms_are_named() -> None:
    """Each package and each module beside them."""
    package = ROOT / "lightning_automodel"
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert [name for name in sorted(rooms | {path.name for path in package.glob("*.py")}) if name not in TEXT] == []


def test_ten_changes() -> None:
    """Each says where, and what else."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 10
