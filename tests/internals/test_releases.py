"""Which private names of torch and Lightning the package uses, and what is said of releases that were not tested."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

import lightning_automodel
from lightning_automodel.internals import releases
from lightning_automodel.internals.releases import TESTED_RELEASES, UnsupportedReleaseError

MAX_PRIVATE_NAMES = 73
MAX_OUTSIDE = 0
PACKAGE = Path(lightning_automodel.__file__).parent
INTERNALS = tuple(
    f"internals/{name}.py"
    for name in ("torch", "dtensor", "fsdp2", "fsdp2_gathers", "process_groups", "lightning")
)
# Documented in spite of their names (namedtuple, os, sys, torch's foreach functions and modes), or
# transformers'.
NOT_PRIVATE = re.compile(
    r"_fields|_replace|_exit|_current_frames|_python_dispatch|_foreach_.*|_fused_.*|_no_split_modules|_init_weights|_gradient_checkpointing_func|_attn_implementation"
)


def _is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name.isidentifier()
        and not NOT_PRIVATE.fullmatch(name)
    )


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package itself defines: functions, classes, variables, and attributes of ``self``."""
    own = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return own


def _foreign_names(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of others: imported ones, attributes, and strings that ``getattr`` and the like could take."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_automodel"):
            found |= {name for alias in node.names for name in (*(node.module or "").split("."), alias.name)}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
            found.add(node.value)
    return {name for name in found if _is_private(name)}


def _by_file() -> dict[str, set[str]]:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    }
    own = _own_names(list(trees.values()))
    return {file: names for file, tree in trees.items() if (names := _foreign_names(tree, own))}


def test_private_names_are_few_and_in_one_room() -> None:
    found = _by_file()
    inside = set().union(*(found[file] for file in INTERNALS))
    outside = {file: sorted(names) for file, names in found.items() if file not in INTERNALS}
    assert sum(map(len, outside.values())) <= MAX_OUTSIDE, outside
    assert len(inside) <= MAX_PRIVATE_NAMES, sorted(inside)


def test_names_are_found() -> None:
    """Each way of reaching for one, in a module of a package that defines ``_mine``."""
    source = """
from torch._dynamo import OptimizedModule
from torch.nn import _reduction as reduction
import torch._C
module._mine = module._theirs
vars(module).pop("_by_string")
"""
    names = _foreign_names(ast.parse(source), {"_mine"})
    assert names == {"_dynamo", "_reduction", "_C", "_theirs", "_by_string"}


@pytest.mark.parametrize(
    ("library", "release"),
    [("torch", "2.15.1"), ("torch", "2.16.0a0+git1"), ("torch", "3.0"), ("lightning", "2.7.0")],
)
def test_newer_releases_are_warned_of(monkeypatch: pytest.MonkeyPatch, library: str, release: str) -> None:
    """With what was tested, and how to test it."""
    installed = {"torch": "2.15.0", "lightning": "2.6.6"} | {library: release}
    monkeypatch.setattr(releases.importlib.metadata, "version", installed.get)
    message = f"tested with {library} {TESTED_RELEASES[library]}, and this is {library} {release}. "
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        releases.warn_untested()
    assert len(caught) == 1
    assert "`bash .ci/versions`" in str(caught[0].message)


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
