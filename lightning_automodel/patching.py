"""Patches of attributes of torch's, Lightning's and users' objects, on one stack that restores all of them."""

from typing import Any


class PatchStack:
    """Replaces attributes of instances, modules or classes, and restores them, last first.

    Lightning and torch lack hooks for some of what the strategy must do. It then patches the instance in use, never a
    class that other runs share, and restores everything when the run is closed.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def set(self, target: Any, name: str, value: Any, is_new: bool = False) -> None:
        """Set ``target.name``, and remember the value that the target itself had, if any.

        Raises:
            AttributeError: If there is no such attribute, so that nobody would call ``value``, unless it ``is_new``.
        """
        if not is_new and not hasattr(target, name):
            raise AttributeError(
                f"{type(target).__name__} has no attribute {name!r} for lightning_automodel to replace: this release of"
                f" {type(target).__module__.partition('.')[0]} is not supported."
            )
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
                # Uncovers the class's attribute. Other code may have removed ours already.
                target.__dict__.pop(name, None)
