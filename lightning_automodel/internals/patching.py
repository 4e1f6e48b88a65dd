"""What is replaced on objects of Lightning, torch and users: one stack that restores it."""

import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_automodel.internals.releases import TESTED_RELEASES


class _Replacement:
    """What is called in place of a function of an object. A pickle or copy of the object has that function itself."""

    def __init__(self, call: Callable[..., Any], replaced: Any) -> None:
        functools.update_wrapper(self, call)
        self.__wrapped__ = inspect.unwrap(call)  # Lightning's is_overridden looks at one
        self._call = call
        self._replaced = replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._replaced,)


def _itself(function: Any) -> Any:
    return function


class PatchStack(ExitStack):
    """Replaces attributes of instances, and restores them, last first; also other undoing.

    Lightning and torch lack hooks for some of what the strategy must do. It then patches the instance in
    use, never a class or a module, which other code uses too: only the planner, which trains nothing, does
    that while it records a step. docs/adopting.md lists what is patched, and what stays so.
    """

    def set(self, target: Any, name: str, value: Any, is_new: bool = False) -> None:
        """Set ``target.name``, and remember the value that the target itself had, if any.

        Raises:
            AttributeError: If there is no such attribute, so that nobody would call ``value``, unless it
                ``is_new``.
        """
        if not is_new:
            _check_exists(target, name)
        own = vars(target)
        if name in own:
            self.callback(setattr, target, name, own[name])
        else:
            self.callback(_uncover, target, name)
        replaced = getattr(target, name, None)
        is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
        if is_function and callable(replaced):  # a copy of what had none keeps the function
            value = _Replacement(value, replaced)
        setattr(target, name, value)

    def call_after(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        """Call ``function`` after each call of the method ``name`` of ``target``, with the same arguments.

        Raises:
            AttributeError: As :meth:`set`.
        """
        _check_exists(target, name)
        method = getattr(target, name)

        def method_then_function(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            function(*args, **kwargs)
            return result

        self.set(target, name, method_then_function)

    def ignore_warnings(self, text: str) -> None:
        """Show no warning that begins with ``text``. Filters of other code stay, and an equal one too."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", text)
        own = warnings.filters[0]

        def show_again() -> None:
            filters: Any = warnings.filters
            if own in filters and own not in before:
                filters.remove(own)

        self.callback(show_again)

    def restore(self) -> None:
        """Undo everything since the last restore. Calling it again changes nothing."""
        self.close()


def is_patched(target: Any, name: str) -> bool:
    """Whether a function of ``target`` is replaced at the moment, and not that of a copy of such a target."""
    return isinstance(vars(target).get(name), _Replacement)


def overwrite(target: Any, name: str, value: Any) -> None:
    """Set ``target.name`` for good, an attribute that code of torch or Lightning reads.

    Raises:
        AttributeError: If there is no such attribute, so that nobody would read ``value``.
    """
    _check_exists(target, name)
    setattr(target, name, value)


def _check_exists(target: Any, name: str) -> None:
    if not hasattr(target, name):
        tested = ", ".join(f"{library} {releases}" for library, releases in TESTED_RELEASES.items())
        raise AttributeError(
            f"{type(target).__name__} has no attribute {name!r} for lightning_automodel to replace: this"
            f" release of {type(target).__module__.partition('.')[0]} is not supported. Tested are {tested}."
        )


def _uncover(target: Any, name: str) -> None:
    """Remove an attribute of the target itself, which hides its class's. Other code may have removed it already."""
    if name in vars(target):
        delattr(target, name)
