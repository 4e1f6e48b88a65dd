"""Lists, dicts, sets and dataclasses among a module's arguments, and whether it changes them.

FSDP2 gives its units copies, in which it has wrapped or cast the tensors, and so does a cast around a module. What the
module writes to a copy (auxiliary losses, skip connections, a state) nobody else would read.
"""

import dataclasses
from collections.abc import Iterable
from operator import is_
from typing import Any

CHANGES_A_COPY = (
    "A module has changed a list, dict, set or dataclass that it was given. FSDP2 gives its units copies, and"
    " so does a cast of what enters the model, so that the change would be lost. Let the module return what is new"
    " (`x, loss = block(x)`), or pass auto_wrap_policy=set(), which makes one unit of the model, or"
    " data_parallel='ddp'."
)
"""Why a module must not write to what it was given."""


def containers_in(values: Iterable[Any]) -> list[Any]:
    """The containers among ``values`` and within each other, each once."""
    found: dict[int, Any] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending += value
        elif id(value) not in found and (content := _content(value)) is not None:
            found[id(value)] = value
            pending += content
    return list(found.values())


class Contents:
    """What containers hold now, to tell later whether they have changed."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self._before = [(container, _content(container) or []) for container in containers]

    def has_changed(self, but_by_appending: bool = False) -> bool:
        """Whether any container holds something else, or in another order; lists may have grown if that is left out."""
        for container, before in self._before:
            now = _content(container) or []
            if but_by_appending and isinstance(container, list):
                now = now[: len(before)]
            if len(now) != len(before) or not all(map(is_, now, before)):
                return True
        return False


def _content(value: Any) -> list[Any] | None:
    """The elements of a container; of a dict, or a dataclass, the keys and then the values. None of anything else."""
    if isinstance(value, (list, set)):
        return list(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if hasattr(type(value), "__dataclass_fields__"):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None
