"""How the package is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

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
