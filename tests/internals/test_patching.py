"""The undo stack for what is replaced on foreign objects."""

import warnings

import pytest

from lightning_automodel.internals.patching import PatchStack, overwrite


class Target:
    def step(self) -> str:
        return "class"

    @property
    def read_only(self) -> int:
        return 0


def test_restores_what_was_there_last_first() -> None:
    target = Target()
    patches = PatchStack()
    target.own = "mine"  # type: ignore[attr-defined]
    patches.set(target, "step", lambda: "first")
    patches.set(target, "step", lambda: "second")
    patches.set(target, "own", "replaced")
    assert (target.step(), target.own) == ("second", "replaced")  # type: ignore[attr-defined]
    patches.restore()
    assert target.step() == "class"
    assert vars(target) == {"own": "mine"}


def test_restore_twice_and_after_a_foreign_removal() -> None:
    """The stack can be used again."""
    target = Target()
    patches = PatchStack()
    for removes in (True, False):
        patches.set(target, "step", lambda: "ours")
        if removes:
            del target.step
        patches.restore()
        patches.restore()
        assert target.step() == "class"
        assert vars(target) == {}


def test_filters_that_others_add_meanwhile_stay() -> None:
    patches = PatchStack()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patches.ignore_warnings("known")
        warnings.filterwarnings("ignore", "of the user")
        for text in ("known", "of the user"):
            warnings.warn(text, stacklevel=1)
        assert not caught
        patches.restore()
        for text in ("known", "of the user"):
            warnings.warn(text, stacklevel=1)
    assert [str(each.message) for each in caught] == ["known"]


def test_what_nobody_would_call_is_refused() -> None:
    target = Target()
    patches = PatchStack()
    with pytest.raises(
        AttributeError, match="Target has no attribute 'renamed' for lightning_automodel to replace"
    ):
        patches.set(target, "renamed", lambda: "ours")
    patches.set(target, "renamed", lambda: "ours", is_new=True)
    assert target.renamed() == "ours"  # type: ignore[attr-defined]
    patches.restore()
    assert vars(target) == {}


def test_what_nobody_would_read_is_not_written() -> None:
    """The message has the releases that were tested. A property that cannot be set raises by itself."""
    target = Target()
    overwrite(target, "step", 1)
    assert vars(target) == {"step": 1}
    with pytest.raises(
        AttributeError, match=r"no attribute '_gone' for lightning_automodel to replace.* torch 2\.13\.0 to"
    ):
        overwrite(target, "_gone", 1)
    with pytest.raises(AttributeError, match="no setter"):
        overwrite(target, "read_only", 1)
    assert vars(target) == {"step": 1}
