"""What benchmarks compute, and that the script for a GPU runs from end to end where there is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import ROOT, fresh_environment
from tests.second_device import build

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import each other by name, as they do where they are called."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


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
        "network of NCCL": "not judged",
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
def test_a_slow_link_is_named(slow: float, gbits: float | None, is_right: bool) -> None:
    """Beside the other pairs of nodes, and beside what the network should do."""
    import first_hour as script
    from first_hour_checks import _rounds

    pairs = [
        (one, other, 256 << 20, 20.0) for rounds in _rounds([0, 8, 16, 24, 32]) for one, other in rounds
    ]
    assert len({frozenset(pair[:2]) for pair in pairs}) == 10
    pairs[7] = (*pairs[7][:3], slow)
    driver: Any = SimpleNamespace(is_judged=True, args=SimpleNamespace(gbits=gbits))
    hosts = [f"node{rank // 8}" for rank in range(40)]
    name = script.PAIRS["pairs_of_nodes"]
    row = script._pairs_row(driver, f"{name}, 256 MiB", hosts, pairs, 256 << 20)
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
        "losses of model-parallel beside the loop",
    } <= {*rows}
    for what in ("losses", "gradients"):
        assert rows[f"{what} of automodel beside the loop"][-1] == "yes"
    kept = "parameters kept for the window"  # so little fits
    assert kept in rows["memory beside the plan"][1]
    assert rows["a save"][-1] == "yes"
    assert not (tmp_path / "checkpoint.ckpt").exists()


@pytest.mark.parametrize(
    ("text", "networks"),
    [
        ("", []),
        ("a NCCL INFO NET/IB : No device found.\na NCCL INFO Using network Socket\n", ["Socket"]),
        ("a NCCL INFO Initialized NET plugin IB\na NCCL INFO Assigned NET plugin IB to comm\n", ["IB"]),
        (
            "a NCCL INFO Using network AWS Libfabric\n"
            "a NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA\n",
            ["AWS Libfabric"],
        ),
    ],
)
def test_the_network_is_read(text: str, networks: list[str]) -> None:
    import first_hour as script

    assert script.networks_of(text) == networks


@pytest.mark.parametrize(
    ("network", "nodes", "gbits", "is_right"),
    [
        ("Socket", 2, 400.0, False),
        ("Socket", 2, None, None),
        ("Socket", 1, 400.0, None),
        ("IB", 2, 400.0, True),
        (None, 2, 400.0, None),
    ],
)
def test_tcp_between_nodes_is_no_fast_network(
    network: str | None, nodes: int, gbits: float | None, is_right: bool
) -> None:
    import first_hour as script
    from first_hour_checks import Place

    place = Place(0, 8 * nodes, 8)
    driver: Any = SimpleNamespace(place=place, args=SimpleNamespace(device="cuda", gbits=gbits))
    networks = [network] if network else []
    ended: Any = [SimpleNamespace(networks=networks) for _ in range(place.world_size)]
    row = script.network_row(driver, ended)
    assert row.is_right is is_right
    assert row.seen == (network or "unknown")


def test_all_rails_of_two_nodes_meet() -> None:
    from first_hour_checks import pairs_of_nodes

    rounds = pairs_of_nodes([[0, 1], [2, 3], [4, 5]])
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len({*ranks})
    found = {tuple(sorted(pair)) for pairs in rounds for pair in pairs}
    assert found == {(0, 2), (1, 3), (0, 4), (1, 5), (2, 4), (3, 5)}


def test_a_log_that_was_torn_is_read() -> None:
    """A killed process may leave half a line; a rank is named far above the last lines."""
    import first_hour as script

    text = "rank 7 on node3 was killed\n" + "a stack\n" * 1000 + '{"step": 3}\n{"losses": [1.0, '
    assert script.said_in(text) == {"step": 3}
    assert script.names_in(text) == ["rank 7 on node3"]


def test_losses_that_are_no_numbers_are_far_off() -> None:
    import first_hour as script

    nan = float("nan")
    right = {"losses": [2.0, 1.0], "norms": [3.0, 4.0]}
    assert script.how_far_off("losses", {"losses": [2.0, 1.1]}, right) == pytest.approx(0.1)
    assert script.how_far_off("norms", {"norms": [3.0, 4.5]}, right) == pytest.approx(0.1)
    for key in right:
        assert script.how_far_off(key, {key: [1.0, nan]}, right) == float("inf")


def test_the_plan_follows_the_run() -> None:
    """What the run has chosen for "auto" is planned, with a model of a device that this machine need not have."""
    import first_hour as script
    from first_hour_checks import CHOICES, Place

    args = SimpleNamespace(device="cuda", shape="narrow", timeout=600, precision=None)
    driver: Any = SimpleNamespace(place=Place(0, 8, 8), args=args)
    case = script.case_of(driver)
    kept, freed = (
        script.planned_memory(driver, case, dict(zip(CHOICES, (True, frees), strict=True)))
        for frees in (False, True)
    )
    assert kept > freed


def test_commands_of_the_first_hour() -> None:
    """Those of the page are ones that the script takes; its table has the script's checks."""
    import first_hour as script

    page = (ROOT / "docs" / "first_hour.md").read_text()
    commands = re.findall(r"benchmarks/first_hour\.py (.*?)'?$", page, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert script.parser().parse_args(command.split()).stages == list(script.STAGES)
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(script.STAGES)
