"""The environment of a benchmark, and Markdown tables of its results."""

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def describe_environment(*packages: str) -> dict[str, str]:
    """Date, machine and versions, those of further packages, too. The load average shows what else the machine did."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores, 1 thread per rank",
        "load average at the end (1, 5, 15 minutes)": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(
            f"{name} {version(name)}" for name in dict.fromkeys(("torch", "lightning", *packages))
        ),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def publish(report: str, output: Path | None) -> None:
    """Print a report, and write it to ``output`` where one is given."""
    print(report, flush=True)
    if output is not None:
        output.write_text(report + "\n")
