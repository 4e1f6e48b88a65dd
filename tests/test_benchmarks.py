"""What benchmarks compute, and that the script for a GPU runs from end to end where there is none."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.processes import ROOT, fresh_environment
from tests.second_device import build

BENCHMARKS = ROOT / "benchmarks"
SHARE = 0.9  # of a card's memory that tensors may take: contexts, kernels and the allocator have the rest


@cache
def _planned(case: Any, recompute: bool) -> float:
    """The most that a rank holds, in GB, by the plan."""
    from llama import LlamaModule

    from lightning_automodel.options import StrategyOptions
    from lightning_automodel.plan.layouts import Plan
    from lightning_automodel.plan.recording import run

    case = replace(case, device="meta", precision="bf16-true", recompute=recompute)
    options = StrategyOptions(activation_checkpointing=recompute)
    tokens = torch.zeros(case.rows, case.length, dtype=torch.long)
    micro = run(lambda: (LlamaModule(case), {"input_ids": tokens, "labels": tokens}), "bf16-true", options)
    return Plan(micro, options, case.ranks, case.accumulate, ranks_per_node=8).high_water / 1e9


@pytest.mark.parametrize(
    ("gigabytes", "stages"),
    [
        (80, ["two-ranks"]),
        pytest.param(80, ["one-device", "waits", "trace", "long"], marks=pytest.mark.sweep),
        pytest.param(141, ["one-device", "waits", "trace", "long", "two-ranks"], marks=pytest.mark.sweep),
    ],
)
def test_stages_fit(monkeypatch: pytest.MonkeyPatch, gigabytes: int, stages: list[str]) -> None:
    """Every case of these stages on one card, by the plan. What keeps some activations counts as what keeps all."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu
    import single_gpu

    shapes = {name: gpu.stage_case(name, "cuda", gigabytes) for name in gpu.STAGE_SHAPES}
    # As the script is called.
    one_device = replace(shapes["one-device"], rows=1, is_chunked=False, recompute=False)
    cases = [("one-device", case) for case in single_gpu.ways(one_device).values()]
    cases += [("one-device", case) for case in single_gpu.switched(one_device).values()]
    cases += [("waits", replace(shapes["waits"], **feature)) for feature in gpu.FEATURES.values()]
    cases += [("trace", shapes["trace"])]
    cases += [("long", case) for case in gpu.long_cases(shapes["long"])[-2:]]  # the longest
    cases += [("two-ranks", replace(shapes["two-ranks"], ranks=2))]
    assert {stage for stage, _ in cases} == set(gpu.STAGES) - {"tests", "first-hour"}
    most: dict[str, float] = {}
    for stage, case in cases:
        if stage not in stages:
            continue
        recomputes = case.recompute in (True, "offload")
        same = replace(case, way="automodel", recompute=recomputes, compile=False, options=())
        on_card = 2 if stage == "two-ranks" else 1
        most[stage] = max(most.get(stage, 0.0), on_card * _planned(same, recomputes))
    assert {stage: size for stage, size in most.items() if size > SHARE * gigabytes} == {}, most


needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.mark.sweep
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("device", ["cpu", pytest.param("hostdev", marks=needs_compiler)])
def test_all_that_a_gpu_is_for(tmp_path: Path, device: str) -> None:
    """Every stage at toy size; one that fails is in the report, and ends the script with 1."""
    command = [
        sys.executable,
        BENCHMARKS / "gpu.py",
        "--device",
        device,
        "--output",
        tmp_path,
        "--ranks",
        "2",
    ]
    done = subprocess.run(command, env=fresh_environment(), capture_output=True, text=True, check=False)
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    stages = ["tests", "one-device", "waits", "trace", "long", "two-ranks", "first-hour"]
    assert done.stdout.split("\n") == [f"{stage}: done" for stage in stages] + [""]
    assert f"Run on {device}, {report.partition('date: ')[2][:10]}" in report

    done = subprocess.run(
        [*command, "--stages", "trace", "--timeout", "0.1"], env=fresh_environment(), check=False
    )
    assert done.returncode == 1
    assert "**failed**" in (tmp_path / "report.md").read_text()


def first_hour(
    folder: Path, ranks: int, *stages: str, **environment: str
) -> tuple[int, dict[str, list[str]]]:
    """The exit status of the checks on a CPU, and the rows of their report by name."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(BENCHMARKS / "first_hour.py"), "--output", str(folder), "--device", "cpu"]
    command += ["--stages", *stages]
    done = subprocess.run(
        command, env={**fresh_environment(), **environment}, capture_output=True, text=True, check=False
    )
    report = folder / "report.md"
    assert report.exists(), done.stderr[-3000:]
    lines = [
        line.strip("| ").split(" | ") for line in report.read_text().splitlines() if line.startswith("|")
    ]
    return done.returncode, {name: cells for name, *cells in lines[2:]}


@pytest.mark.sweep
def test_a_rank_of_another_version_is_told(tmp_path: Path) -> None:
    """A check that is not right says no, and the script ends with 1, without the stages that need what `links` saw."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m, os\n"
        "of = m.version\n"
        "if os.environ.get('RANK') == '1':\n"
        "    m.version = lambda name: '0.1' if name == 'lightning' else of(name)\n"
    )
    status, rows = first_hour(
        tmp_path / "out", 2, "links", "exact", "speed", PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert status == 1
    assert {name: cells[-1] for name, cells in rows.items()} == {
        "versions": "**no**",
        "devices": "yes",
        "all-reduce within a node": "not judged",  # on a CPU
        "all-reduce over all ranks": "not judged",
        "first two ranks of a node, 1 MiB": "not judged",
        "first two ranks of a node, 4 MiB": "not judged",
        "exact": "not judged",
        "speed": "not judged",
    }
    assert rows["exact"][1].startswith("not run")


@pytest.mark.parametrize(
    ("slow", "gbits", "is_right"), [(20.0, None, True), (9.0, None, False), (20.0, 400.0, False)]
)
def test_a_slow_link_is_named(
    monkeypatch: pytest.MonkeyPatch, slow: float, gbits: float | None, is_right: bool
) -> None:
    """Beside the other pairs of nodes, and beside what the network should do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import first_hour as script
    from first_hour_checks import _rounds

    pairs = [
        (one, other, 256 << 20, 20.0) for rounds in _rounds([0, 8, 16, 24, 32]) for one, other in rounds
    ]
    assert len({frozenset(pair[:2]) for pair in pairs}) == 10
    pairs[7] = (*pairs[7][:3], slow)
    driver: Any = SimpleNamespace(is_judged=True, args=SimpleNamespace(gbits=gbits))
    hosts = [f"node{rank // 8}" for rank in range(40)]
    row = script._pairs_row(driver, "first ranks of two nodes, 256 MiB", hosts, pairs, 256 << 20)
    assert row.is_right == is_right
    if slow < 20:
        one, other = pairs[7][:2]
        assert (
            f"slowest 9.00 between rank {one} on node{one // 8} and rank {other} on node{other // 8}"
            in row.seen
        )


@pytest.mark.sweep
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("ranks", [1, 8])
def test_all_checks_of_a_cluster(tmp_path: Path, ranks: int) -> None:
    status, rows = first_hour(tmp_path, ranks, "links", "exact", "speed", "killed", "terminated", "resumed")
    assert status == 0, rows
    assert ("the last rank is killed" in rows) == (ranks > 1)
    assert {
        *("weights of fsdp2, float64", "weights of ddp, float64"),
        "memory beside the plan",
        "a save",
        "SIGTERM to the last rank",
        f"resumed on {max(ranks // 2, 1)} ranks",
    } <= {*rows}
    kept = "parameters kept for the window"  # so little fits
    assert kept in rows["memory beside the plan"][1]
    assert rows["a save"][-1] == "yes"
    assert not (tmp_path / "checkpoint.ckpt").exists()


def test_the_plan_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run has chosen for "auto" is planned, with a model of a device that this machine need not have."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import first_hour as script
    from first_hour_checks import CHOICES, Place

    args = SimpleNamespace(device="cuda", shape="narrow", timeout=600)
    driver: Any = SimpleNamespace(place=Place(0, 8, 8), args=args)
    case = script.case_of(driver)
    kept, freed = (
        script.planned_memory(driver, case, dict(zip(CHOICES, (True, frees), strict=True)))
        for frees in (False, True)
    )
    assert kept > freed


def test_commands_of_the_first_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the page are ones that the script takes; its table has the script's checks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import first_hour as script

    page = (ROOT / "docs" / "first_hour.md").read_text()
    commands = re.findall(r"benchmarks/first_hour\.py (.*?)'?$", page, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert script.parser().parse_args(command.split()).stages == list(script.STAGES)
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(script.STAGES)
