"""Attributes replaced on objects that are not ours, on one stack, so that all of them can be restored together."""

from typing import Any


class PatchStack:
    """Replaces attributes of instances, modules or classes, and restores them, last first.

    Lightning and torch have no hook for some of what the strategy must do. Each such place is patched on the instance
    in use, never on a class that other runs share, and everything is put back when the run is closed.

    Example:
        >>> class Counter:
        ...     def step(self):
        ...         return 1
        >>> counter, patches = Counter(), PatchStack()
        >>> patches.set(counter, "step", lambda: 2)
        >>> counter.step()
        2
        >>> patches.restore()
        >>> counter.step()
        1
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name``, remembering whether the target itself held the attribute, and its value."""
        own = vars(target)
        self._undo.append((target, name, name in own, own.get(name)))
        setattr(target, name, value)

    def restore(self) -> None:
        """Undo every :meth:`set` since the last restore. Calling it again changes nothing."""
        while self._undo:
            target, name, was_own, value = self._undo.pop()
            if was_own:
                setattr(target, name, value)
            else:
                # The class's attribute shows again. Somebody may have removed ours before us.
                target.__dict__.pop(name, None)
