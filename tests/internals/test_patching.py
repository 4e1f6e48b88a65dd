"""The undo stack for what is replaced on foreign objects."""

import warnings

import pytest

from lightning_automodel.internals.patching import PatchStack, overwrite


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
