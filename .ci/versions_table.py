"""Enter what `.ci/versions` has found into the table between the markers of docs/support.md: other rows stay."""

import datetime
import sys
from pathlib import Path

BEGIN = "<!-- versions -->"
END = "<!-- /versions -->"
RUNS = ("suite", "search")
HEADER = ["torch", "Lightning", *RUNS, "commit", "date"]


def cells(line: str) -> list[str]:
    """The cells of one row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def release(key: tuple[str, str]) -> list[int]:
    """Numbers to sort by."""
    return [int(number) for version in key for number in version.split(".")]


results, document, commit = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
before, rest = document.read_text().split(BEGIN)
section, after = rest.split(END)
table = [cells(line) for line in section.splitlines() if line.startswith("| 2")]
rows = {(row[0], row[1]): dict(zip(HEADER, row, strict=True)) for row in table}
for line in Path(results).read_text().splitlines():
    torch, lightning, run, summary = line.split("\t")
    empty = {"torch": torch, "Lightning": lightning, **dict.fromkeys(RUNS, "not run")}
    row = rows.setdefault((torch, lightning), empty)
    row |= {run: summary, "commit": commit, "date": datetime.date.today().isoformat()}
lines = [
    HEADER,
    ["---"] * len(HEADER),
    *([rows[key][name] for name in HEADER] for key in sorted(rows, key=release)),
]
written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
document.write_text(f"{before}{BEGIN}\n{written}\n{END}{after}")
