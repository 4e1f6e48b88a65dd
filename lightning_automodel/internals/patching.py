"""Patches of attributes of torch's, Lightning's and users' objects, on one stack that restores all of them."""

from contextlib import ExitStack
from typing import Any


class PatchStack(ExitStack):
    """Replaces attributes of instances, modules or classes, and restores them, last first; also other undoing.

    Lightning and torch lack hooks for some of what the strategy must do. It then patches the instance in use, or a
    class of torch where it must see what user code does to any tensor, and restores everything when the run is closed.
    """

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
        if name in own:
            self.callback(setattr, target, name, own[name])
        else:
            self.callback(_uncover, target, name)
        setattr(target, name, value)

    def restore(self) -> None:
        """Undo everything since the last restore. Calling it again changes nothing."""
        self.close()


def _uncover(target: Any, name: str) -> None:
    """Remove an attribute of the target itself, which hides its class's. Other code may have removed it already."""
    if name in vars(target):
        delattr(target, name)
