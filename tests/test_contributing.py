"""CONTRIBUTING.md, the hosted workflow, its scripts and the citation name what there is."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest
import yaml

from tests.processes import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = [ROOT / name for name in ("lightning_automodel", "tests", "docs", "examples", "benchmarks")]


def test_files_exist() -> None:
    """Whatever ends in .py here or in docs/how_it_works.md, with its folder where one is named."""
    paths = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in folder.rglob("*.py")]
    named = re.findall(r"[\w/]+\.py\b", TEXT + (ROOT / "docs" / "how_it_works.md").read_text())
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []


def test_names_exist() -> None:
    """Functions, classes and constants in the table of changes, by their last part."""
    table = [line for line in TEXT.splitlines() if line.startswith("| ")]
    paths = [*(path for folder in FOLDERS[:2] for path in folder.rglob("*.py")), ROOT / "mkdocs.yml"]
    code = {word for path in paths for word in re.findall(r"\w+", path.read_text())}
    named = {
        name for line in table for name in re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)?)(?:\(\))?`", line)
    }
    names = {name.rpartition(".")[2] for name in named if not name.endswith((".py", ".md", ".yml"))}
    assert len(names) > 20
    assert sorted(names - code) == []


def test_rooms_are_named() -> None:
    """Each package and each module beside them."""
    package = ROOT / "lightning_automodel"
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert [
        name for name in sorted(rooms | {path.name for path in package.glob("*.py")}) if name not in TEXT
    ] == []


def test_modules_have_tests() -> None:
    """In the file of their name, or in the one that the table says."""
    tests = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    rows = re.findall(
        r"^\| (.+) \| (`(?:\w+/)?test_\w+\.py`.*) \|$", TEXT.partition("## Running things")[2], re.MULTILINE
    )
    named = {name for modules, _ in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", modules)}
    assert [name for _, files in rows for name in re.findall(r"`(.+?)`", files) if name not in tests] == []
    package = ROOT / "lightning_automodel"
    for path in package.rglob("*.py"):
        module = path.relative_to(package).as_posix()
        has_own = any(name.endswith(f"test_{path.stem}.py") for name in tests)
        assert has_own or path.name == "__init__.py" or any(f"/{name}" in f"/{module}" for name in named), (
            module
        )


def test_workflow_runs_the_scripts() -> None:
    """Every script of .ci is a job, and the releases are those that docs/support.md and constraints.txt have."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = " ".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)
    scripts = sorted(path.name for path in (ROOT / ".ci").iterdir() if path.suffix == "")
    assert sorted(re.findall(r"bash \.ci/(\w+)", commands)) == scripts
    constraints = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert matrix["lightning"] == [constraints["lightning"]]
    assert constraints["torch"] in matrix["torch"]


def test_workflow_is_safe() -> None:
    """Actions are those of one commit, jobs may read the repository and nothing else, and each has a limit."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [
        step["uses"] for step in steps if not re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))
    ] == []
    assert workflow["permissions"] == {}
    assert all(job["permissions"] == {"contents": "read"} for job in workflow["jobs"].values())
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


@pytest.mark.parametrize("name", ["main command", "test command"])
def test_readme_commands(name: str) -> None:
    """What the scripts run is a block of README, whole."""
    printed = subprocess.run(
        ["bash", str(ROOT / ".ci" / "readme_command.sh"), name], check=True, capture_output=True, text=True
    ).stdout
    assert f"<!-- {name} -->\n" in (readme := (ROOT / "README.md").read_text())
    assert f"```bash\n{printed}```\n" in readme
    assert printed.startswith("python3 -m venv .venv && ")


def test_citation_has_the_version() -> None:
    """The one of pyproject.toml, which is the newest of CHANGELOG.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    newest = re.search(r"^## (\S+) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"]
