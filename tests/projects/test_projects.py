"""Real packages that ship LightningModules, each as it is, beside Lightning's ddp.

`bash tests/projects/make_environment` makes what they run in; without it, these tests are skipped. `pytest
-m sweep tests/projects --support-table benchmarks/results/support_cpu2.md` enters what came of them into its
table.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import write_section
from tests.processes import fresh_environment
from tests.projects.projects import AS_DDP, RAGGED

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("PROJECTS_ENVIRONMENT", ROOT / ".venvs" / "projects"))
VERSIONS = dict(
    re.findall(r"^([\w-]+)==(.+)$", (Path(__file__).parent / "requirements.txt").read_text(), re.MULTILINE)
)
TOLERANCE = 1e-4
"""Of the way that weights went, in float32; a wrong divisor is off by a half."""

HEADER = ["project", "release", "passed to `strategy`", "Lightning's ddp", "replicated", "sharded", "date"]

PASSED_TO_STRATEGY = {
    "anomalib": '`count="samples"`',
    "darts": "`per_token_loss=False`; `import lightning_automodel.alias_pytorch_lightning`",
    "gluonts": "`per_token_loss=False, save_distributed_checkpoint=False`",
    "nequip": "`per_token_loss=False`",
    "torch_geometric": "`count_label_tokens=lambda batch: batch.num_graphs`",
    "webdataset": "`count_label_tokens=lambda batch: len(batch[1])`",
}
NOT_CHECKED = {("nequip", way): "losses differ in the replay" for way in HEADER[3:6]}
"""Of which project, trained in which way, `ExactnessCheck` says nothing on several ranks, with the reason."""


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, str]]]:
    """A row for each project; with --support-table, the document's rows are replaced at the end."""
    rows: dict[str, dict[str, str]] = {}
    yield rows
    if path := request.config.getoption("--support-table"):
        section = Path(path).read_text().partition("<!-- projects -->")[2].partition("<!-- /projects -->")[0]
        for line in section.splitlines()[3:]:
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            rows.setdefault(cells[0], dict(zip(HEADER, cells, strict=True)))
        lines = [HEADER, ["---"] * len(HEADER), *(list(rows[name].values()) for name in sorted(rows))]
        write_section(Path(path), "projects", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def run_on_two_ranks(name: str, directory: Path) -> dict[str, dict[str, Any]]:
    """What the harness found under each strategy."""
    command = [ENVIRONMENT / "bin" / "python", "-m", "tests.projects.harness", name, directory]
    ranks = []
    for rank in "01":
        with (directory / f"log{rank}").open("w") as log:
            environment = {**fresh_environment(), "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
            ranks.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for rank in ranks:
            rank.wait(timeout=900)
    finally:
        for rank in ranks:
            rank.kill()
    results = directory / "results.json"
    assert results.exists(), (directory / "log0").read_text()[-3000:]
    return json.loads(results.read_text())


@pytest.mark.sweep
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", PASSED_TO_STRATEGY)
def test_project(name: str, tmp_path: Path, table: dict[str, dict[str, str]]) -> None:
    """It trains, validates, saves, resumes and loads; weights are those of one process, and `ExactnessCheck` agrees."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no environment in {ENVIRONMENT}: bash tests/projects/make_environment")
    results = run_on_two_ranks(name, tmp_path)
    release = VERSIONS[name.replace("_", "-")]
    row = [name, release, PASSED_TO_STRATEGY[name], *(shown(results[way]) for way in HEADER[3:6])]
    table[name] = dict(zip(HEADER, [*row, str(datetime.date.today())], strict=True))
    for way in HEADER[3:6]:
        assert "failure" not in results[way], results[way]["failure"]
        assert_verdict_agrees(name, way, results[way])


def assert_verdict_agrees(name: str, way: str, result: dict[str, Any]) -> None:
    """What `ExactnessCheck` says of gradients is what the weights are beside one process'."""
    is_weighed_alike = way == HEADER[3] and name in RAGGED
    if (name, way) in NOT_CHECKED:
        assert result["verdict"] == "not checked"
        assert NOT_CHECKED[name, way] in result["report"]
    else:
        assert result["verdict"] == ("wrong" if is_weighed_alike else "exact"), result["report"]
    if way != HEADER[3] or name not in AS_DDP:
        assert (result["error"] > TOLERANCE) == is_weighed_alike


def shown(result: dict[str, Any]) -> str:
    """A cell: by how much weights differ, the verdict, and what was left out; or the first line of what was raised."""
    if "failure" in result:
        messages = re.findall(r"^[\w.]*(?:Error|Exception): (.*)", result["failure"], re.MULTILINE)
        return f"fails: {messages[-1].replace('|', '/')[:200]}"
    lacks = "" if "resumes" in result["does"] else "; not resumed"
    return f"{result['error']:.0e}, {result['verdict']}{lacks}"
