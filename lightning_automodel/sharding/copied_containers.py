"""Containers among a module's arguments, of which FSDP2 and casts give the module copies.

They wrap or cast the tensors in lists, dicts, sets and dataclasses, and build these anew. A module that appends to a
list (auxiliary losses, skip connections), or updates a dict (a state), would write to a copy that nobody else reads.
"""

from collections.abc import Iterable
from operator import is_
from typing import Any


def containers_in(values: Iterable[Any]) -> list[Any]:
    """The lists, dicts, sets and dataclasses among ``values`` and within each other, each before those in it."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple):
            found += containers_in(value)
        elif isinstance(value, (list, dict, set)) or _is_dataclass(value):
            found.append(value)
            found += containers_in(_content(value))
    return found


class CopiedContainers:
    """Containers that a caller has ``given``, and the ``copies`` that a module gets in their place, in one order."""

    def __init__(self, given: list[Any], copies: list[Any]) -> None:
        self._copied: list[tuple[Any, Any, list[Any]]] = []
        self._own: dict[int, Any] = {}  # what the caller has, by the id of what stands for it in a copy
        if len(given) != len(copies):
            return  # a hook of the user's has replaced the arguments
        for own, copied in zip(given, copies, strict=True):
            if own is not copied:
                before = _content(copied)
                self._copied.append((own, copied, before))
                self._own.update(zip(map(id, before), _content(own), strict=False))

    def write_back(self) -> None:
        """Write into the given containers what the module has written into its copies."""
        for own, copied, before in self._copied:
            now = _content(copied)
            if len(now) == len(before) and all(map(is_, now, before)):
                continue
            content = [self._own.get(id(each), each) for each in now]
            if isinstance(own, list):
                own[:] = content
            elif isinstance(own, set):
                own.clear()
                own.update(content)
            else:
                entries = _entries(own)
                entries.clear()
                half = len(content) // 2
                for key, value in zip(content[:half], content[half:], strict=True):
                    entries[key] = value


def _content(container: Any) -> list[Any]:
    """Its elements; of a dict, or of a dataclass, the keys and then the values."""
    if isinstance(container, (list, set)):
        return list(container)
    entries = _entries(container)
    return [*entries.keys(), *entries.values()]


def _entries(container: Any) -> dict[Any, Any]:
    """Of a dict that itself, of a dataclass its attributes."""
    return container if isinstance(container, dict) else vars(container)


def _is_dataclass(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__") and hasattr(value, "__dict__")
