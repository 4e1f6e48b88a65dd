"""Which private names of torch and Lightning the package uses, and what is said of releases that were not tested."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from lightning_automodel.internals import releases
from lightning_automodel.internals.releases import TESTED_RELEASES, UnsupportedReleaseError
from tests.private_names import private_names_by_file


def test_private_names_are_in_one_room() -> None:
    outside = {
        file: sorted(names)
        for file, names in private_names_by_file().items()
        if Path(file).parent != Path("internals")
    }
    assert outside == {}
    assert len(private_names_by_file()["internals/fsdp2.py"]) > 10


@pytest.mark.parametrize(
    ("library", "release", "command"),
    [
        ("torch", "2.15.1", "bash .ci/versions 2.15.1"),
        ("torch", "2.16.0a0+git1", "bash .ci/versions 2.16.0a0+git1"),
        ("lightning", "2.7.0", "LIGHTNING=2.7.0 bash .ci/versions 2.15.0"),
    ],
)
def test_newer_releases_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, library: str, release: str, command: str
) -> None:
    """With what was tested, and how to test it."""
    installed = {"torch": "2.15.0", "lightning": "2.6.6"} | {library: release}
    monkeypatch.setattr(releases.importlib.metadata, "version", installed.get)
    message = f"tested with {library} {TESTED_RELEASES[library]}, and this is {library} {release}. "
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        releases.warn_untested()
    assert len(caught) == 1
    assert f"`{command}`" in str(caught[0].message)


@pytest.mark.parametrize("torch_release", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.15.0+cu130"])
def test_tested_releases_are_not_warned_of(monkeypatch: pytest.MonkeyPatch, torch_release: str) -> None:
    monkeypatch.setattr(
        releases.importlib.metadata, "version", {"torch": torch_release, "lightning": "2.6.4"}.get
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        releases.warn_untested()


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (
            "torch.nn",
            UnsupportedReleaseError,
            r"needs an import \(cannot import name '_gone' from 'torch\.nn'",
        ),
        ("torch._gone", UnsupportedReleaseError, r"needs an import \(No module named 'torch\._gone'"),
        ("nobody", ModuleNotFoundError, r"^No module named 'nobody'$"),
    ],
)
def test_imports_that_fail_are_named(module: str, error: type[ImportError], message: str) -> None:
    """Those of torch and Lightning, not those of others."""
    with pytest.raises(error, match=message), releases.importing_private_names():
        exec(f"from {module} import _gone")
