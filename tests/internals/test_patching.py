"""The undo stack for what is replaced on foreign objects."""

import pytest

from lightning_automodel.internals.patching import PatchStack


class Target:
    def step(self) -> str:
        return "class"


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
    target = Target()
    patches = PatchStack()
    patches.set(target, "step", lambda: "ours")
    del target.step
    patches.restore()
    patches.restore()
    assert target.step() == "class"


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


def test_stack_can_be_used_again() -> None:
    target = Target()
    patches = PatchStack()
    patches.restore()
    patches.set(target, "step", lambda: "again")
    assert target.step() == "again"
    patches.restore()
    assert vars(target) == {}
