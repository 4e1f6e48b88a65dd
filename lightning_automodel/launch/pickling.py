"""What a worker that is no fork receives: pickled by value, with an error that names what cannot be pickled."""

import io
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from types import MethodType
from typing import Any


class ByValue:
    """Pickled with the values of its tensors.

    Multiprocessing would put tensors on the CPU in memory that all workers share: they would train one another's
    weights and add to one another's metrics.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        # What multiprocessing itself can send, such as its locks, stays shared as the user made it.
        pickler.dispatch_table = {
            kind: reduce
            for kind, reduce in pickler.dispatch_table.items()
            if not str(getattr(reduce, "__module__", "")).startswith("torch.")
        }
        pickler.dump(self.value)
        return _load, (buffer.getvalue(),)


def _load(data: bytes) -> ByValue:
    return ByValue(pickle.loads(data))


def find_unpicklable(parts: Mapping[str, Any], seen: set[int]) -> tuple[str, Any, Exception] | None:
    """The innermost part that cannot be pickled: where it is, what, and what pickling says of it; None if all can.

    Args:
        parts: Values, by how to write where they are.
        seen: Ids of values that were looked into already; parts refer to each other in cycles.
    """
    for where, value in parts.items():
        error = _error(value)
        if error is None or id(value) in seen:
            continue
        seen.add(id(value))
        inner = {name: part for name, part in _parts_of(where, value).items() if _error(part) is not None}
        found = find_unpicklable(inner, seen) if inner else (where, value, error)
        if found is not None:
            return found
    return None


def _error(value: Any) -> Exception | None:
    try:
        ByValue(value).__reduce__()
    except Exception as error:
        return error
    return None


def _parts_of(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, MethodType):
        return {where: value.__self__}
    if isinstance(value, Mapping):
        return {f"{where}[{key!r}]": part for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"{where}[{index}]": part for index, part in enumerate(value)}
    try:
        # Not `vars`: a class may leave out what could not be pickled, and asking may fail as pickling did.
        attributes = {} if isinstance(value, type) else value.__getstate__()
    except Exception:
        return {}
    return {f"{where}.{name}": part for name, part in attributes.items()} if isinstance(attributes, dict) else {}
