"""An object that iterates in place of a user's, which it otherwise is to user code."""

from typing import Any


class Wrapper:
    """Wraps a user's object, whose attributes user code reads and sets through it, but for the wrapper's own.

    The wrapper has those with which it was made; ``inner`` is the user's object.
    """

    _inner: Any

    def __init__(self, inner: Any, **attributes: Any) -> None:
        # Past __setattr__, which sets attributes of the user's object.
        vars(self).update(attributes, _inner=inner)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance: users may look for a class of torch, or their own
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._inner, name, value)
