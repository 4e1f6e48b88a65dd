"""Imports run one way through the package, so that each room can be read, and tested, without those above it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_automodel

PACKAGE = Path(lightning_automodel.__file__).parent
NAME = PACKAGE.name
# From the top: a room imports from itself and from those below it.
ORDER = [
    "plan",
    "strategy",
    "training_run",
    "distributed_module",
    "micro_batch",
    "advice",
    "launch",
    "failure",
    "checkpoint",
    "resume",
    "context_parallel",
    "expert_parallel",
    "sharding",
    "gradients",
    "distributed",
    "internals",
]
# Ending together is nothing that checkpoints or the mathematics know of, nor it of them: only `launch` and
# above do.
APART = [
    ("failure", room)
    for room in ("checkpoint", "resume", "context_parallel", "expert_parallel", "sharding", "gradients")
]
# Held by the absence of cycles alone: engines read the options, which check themselves by engines' functions.
ANYWHERE = {"__init__", "alias_pytorch_lightning", "options", "callbacks", "data"}


def module_names() -> dict[str, Path]:
    """Every module of the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = module_names()


def imports_of(path: Path) -> Iterator[str]:
    """Modules of the package that a module imports, also within functions; not what is for type checkers alone."""
    skipped = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(ast.walk(node))
        elif node in skipped:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == NAME:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)


def room(module: str) -> str:
    """The package or the top-level module that a module is in."""
    return module.split(".")[1] if "." in module else "__init__"


EDGES = [(module, imported) for module, path in MODULES.items() for imported in imports_of(path)]


def test_every_room_has_its_place() -> None:
    """A new one is added to the order; and the edges are found at all."""
    assert {room(module) for module in MODULES} <= {*ORDER, *ANYWHERE}
    assert (f"{NAME}.strategy", f"{NAME}.launch.launchers") in EDGES


@pytest.mark.parametrize("name", ORDER)
def test_imports_run_downwards(name: str) -> None:
    """Name what a room imports from above."""
    above = {*ORDER[: ORDER.index(name)], *(other for one, other in APART if one == name)}
    upwards = [pair for pair in EDGES if room(pair[0]) == name and room(pair[1]) in above]
    assert upwards == []


def test_no_cycles() -> None:
    """`graphlib` raises with the modules of a cycle; a package and its own modules are no cycle."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, imported in EDGES:
        if not module.startswith(f"{imported}."):
            graph[module].add(imported)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


# --- How the package is installed -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
IMPORT = """
import site, sys
sys.path.insert(0, sys.argv[1])
site.addsitedir(sys.argv[2])
import lightning_automodel
print(lightning_automodel.__file__)
"""


def test_an_editable_install_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """A script beside a clone gets the package, not the clone's folder as a namespace."""
    package = tmp_path / "clone" / "lightning_automodel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, package.parent)
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=package.parent, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "beside" / "lightning_automodel").mkdir(parents=True)
    # Without the site-packages of this environment, where the package may be installed too.
    command = [sys.executable, "-I", "-S", "-c", IMPORT, str(tmp_path / "beside"), str(tmp_path / "site")]
    ended = subprocess.run(command, text=True, capture_output=True, check=False)
    assert ended.stdout.strip() == str(package / "__init__.py"), ended.stderr


def test_a_release_names_its_repository(tmp_path: Path) -> None:
    """Its README clones it and leads into it, to files that exist; metadata has its addresses."""
    repository = "https://example.invalid/owner/lightning_automodel"
    script = ROOT / ".ci" / "release_source.py"
    subprocess.run([sys.executable, str(script), str(tmp_path), f"{repository}.git"], check=True)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    readme = (tmp_path / "README.md").read_text()
    assert project["urls"]["Repository"] == repository
    assert f"git clone {repository} " in readme
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    inside = re.compile(rf"{repository}/(?:blob|raw)/v{project['version']}/([^#]+)(#\S+)?")
    assert [
        each for each in targets if not inside.fullmatch(each) and "https://img.shields.io/" not in each
    ] == []
    assert [
        each for each in targets if (found := inside.fullmatch(each)) and not (ROOT / found[1]).exists()
    ] == []
    assert len(targets) > 30
