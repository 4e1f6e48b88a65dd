"""The undo stack for what is replaced on objects of others, and docs, which list all of it."""

import ast
import re
import warnings
from collections.abc import Iterator

import pytest

from lightning_automodel.internals.patching import PatchStack, overwrite
from tests.processes import ROOT

NO_INSTANCES = {
    # In the process of `python -m lightning_automodel.plan`.
    "nn.functional",
    "attention",
    "masking_utils",
    # Of this package.
    "self.run.windows",
    "run.windows",
    "gathers",
}
"""Not patched instances of others: modules (`test_nothing_replaced.py` looks at those of a fit), and our own."""


class Target:
    def step(self) -> str:
        return "class"


def test_restores_what_was_there_last_first() -> None:
    """Also what others have removed meanwhile; the stack can be used again."""
    patches = PatchStack()
    for removes in (True, False):
        target = Target()
        target.own = "mine"  # type: ignore[attr-defined]
        patches.set(target, "step", lambda: "first")
        patches.set(target, "step", lambda: "second")
        patches.set(target, "own", "replaced")
        assert (target.step(), target.own) == ("second", "replaced")  # type: ignore[attr-defined]
        if removes:
            del target.step
        patches.restore()
        patches.restore()
        assert target.step() == "class"
        assert vars(target) == {"own": "mine"}


def test_filters_that_others_add_meanwhile_stay() -> None:
    patches = PatchStack()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patches.ignore_warnings("known")
        warnings.filterwarnings("ignore", "of the user")
        for expected in (0, 1):
            for text in ("known", "of the user"):
                warnings.warn(text, stacklevel=1)
            assert len(caught) == expected
            patches.restore()
    assert str(caught[0].message) == "known"


def test_an_equal_filter_of_others_stays() -> None:
    patches = PatchStack()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "known")
        patches.ignore_warnings("known")
        patches.restore()
        warnings.warn("known", stacklevel=1)
    assert caught == []


def test_what_nobody_would_call_or_read_is_refused() -> None:
    """The message has the releases that were tested."""
    target = Target()
    patches = PatchStack()
    message = r"Target has no attribute '_gone' for lightning_automodel to replace.* torch 2\.13\.0 to"
    with pytest.raises(AttributeError, match=message):
        patches.set(target, "_gone", lambda: "ours")
    with pytest.raises(AttributeError, match=message):
        overwrite(target, "_gone", 1)
    patches.set(target, "_gone", lambda: "ours", is_new=True)
    patches.restore()
    overwrite(target, "step", 1)
    assert vars(target) == {"step": 1}


def _called(function: str) -> Iterator[tuple[str, str]]:
    """What the package passes to functions of this name: the object, as it is written there, and a constant name."""
    for path in sorted((ROOT / "lightning_automodel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_called = isinstance(node, ast.Call) and re.search(rf"\b{function}$", ast.unparse(node.func))
            if is_called and len(node.args) > 2 and isinstance(node.args[1], ast.Constant):
                yield ast.unparse(node.args[0]), str(node.args[1].value)


def test_docs_list_what_is_set_for_good() -> None:
    """Private values of Lightning and torch, by name."""
    page = (ROOT / "docs/adopting.md").read_text()
    names = {name for _, name in _called("overwrite")}
    assert len(names) > 5
    assert {name for name in names if not re.search(rf"`(?:[\w.]+\.)?{name}`", page)} == set()


def test_docs_list_what_is_patched() -> None:
    """At most 15 kinds, in one table."""
    table = (ROOT / "docs/adopting.md").read_text().partition("| object | attributes |")[2]
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) <= 15
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    patched = {name for target, name in _called("set") if target not in NO_INSTANCES}
    assert len(patched) > 30
    assert patched - listed == set()
