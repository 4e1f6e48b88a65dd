"""What benchmarks compute, and that the script for a GPU runs from end to end where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import fresh_environment
from tests.second_device import build

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def test_idle_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that overlap or touch leave no gap; the longest gaps are named by what they wait for."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import idle_times

    events = [(0.0, 4.0, "first"), (1.0, 2.0, "inside"), (4.0, 5.0, "next"), (7.0, 8.0, "late"), (9.0, 10.0, "last")]
    assert idle_times(events) == {"span": 10.0, "idle": 3.0, "gaps": [(2.0, "late"), (1.0, "last")]}
    assert idle_times([]) == {"span": 0.0, "idle": 0, "gaps": []}


@pytest.mark.sweep
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("hostdev", marks=pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"))],
)
def test_all_that_a_gpu_is_for(tmp_path: Path, device: str) -> None:
    """Every stage at toy size; one that fails is in the report, and ends the script with 1."""
    command = [sys.executable, BENCHMARKS / "gpu.py", "--device", device, "--output", tmp_path]
    done = subprocess.run(command, env=fresh_environment(), capture_output=True, text=True, check=False)
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    stages = ["tests", "one-device", "waits", "trace", "long", "two-ranks"]
    assert done.stdout.split("\n") == [f"{stage}: done" for stage in stages] + [""]
    assert f"Run on {device}, {report.partition('date: ')[2][:10]}" in report

    done = subprocess.run([*command, "--stages", "trace", "--timeout", "0.1"], env=fresh_environment(), check=False)
    assert done.returncode == 1
    assert "**failed**" in (tmp_path / "report.md").read_text()
