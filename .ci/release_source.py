"""Copy what git tracks into a folder, as a release is built from it: README and metadata name the repository.

    python .ci/release_source.py FOLDER https://github.com/owner/lightning_automodel

On a package index, README's links into the repository lead nowhere: here they become those of the release's
tag.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "<URL of this repository>"
IMAGE = re.compile(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)")
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def filled_readme(text: str, repository: str, version: str) -> str:
    """README with absolute links, and with the address to clone."""
    text = IMAGE.sub(rf"\1({repository}/raw/v{version}/\2)", text)
    return LINK.sub(rf"]({repository}/blob/v{version}/\1)", text).replace(PLACEHOLDER, repository)


def urls(repository: str, version: str) -> str:
    """What pyproject.toml lacks."""
    changes = f"{repository}/blob/v{version}/CHANGELOG.md"
    return f'\n[project.urls]\nRepository = "{repository}"\nChangelog = "{changes}"\nIssues = "{repository}/issues"\n'


def main() -> None:
    """Copy, then fill in."""
    folder = Path(sys.argv[1])
    repository = sys.argv[2].removesuffix(".git")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in tracked.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    project = folder / "pyproject.toml"
    version = tomllib.loads(project.read_text())["project"]["version"]
    project.write_text(project.read_text() + urls(repository, version))
    readme = folder / "README.md"
    readme.write_text(filled_readme(readme.read_text(), repository, version))


if __name__ == "__main__":
    main()
