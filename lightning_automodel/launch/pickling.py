"""What a worker that is no fork receives: pickled by value, with an error that names what cannot be pickled."""

import io
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
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


def find_unpicklable(parts: Mapping[str, Any]) -> tuple[str, Any, Exception] | None:
    """The first part that cannot be pickled, or rather its attribute: where it is, what, and what pickling says of it.

    Args:
        parts: Values, by how to write where they are.
    """
    for where, value in parts.items():
        error = _error(value)
        if error is not None:
            try:
                # Not `vars`: a class may leave out what could not be pickled, and asking may fail as pickling did.
                attributes = value.__getstate__()
            except Exception:
                attributes = None
            inner = attributes if isinstance(attributes, dict) and not isinstance(value, type) else {}
            for name, part in inner.items():
                # A private attribute says nothing to the user, and may fail only because it refers back to its owner.
                if not name.startswith("_") and (inner_error := _error(part)) is not None:
                    return f"{where}.{name}", part, inner_error
            return where, value, error
    return None


def _error(value: Any) -> Exception | None:
    try:
        ByValue(value).__reduce__()
    except Exception as error:
        return error
    return None
