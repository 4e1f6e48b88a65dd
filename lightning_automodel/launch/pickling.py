"""Pickling what is sent to workers that are not forks."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any


class ByValue:
    """Wraps a value so that its tensors are pickled with their data.

    Multiprocessing would put CPU tensors in memory that all workers share: they would train one another's weights and
    add to one another's metrics.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        # Only torch's reducers are left out: multiprocessing's own objects, such as locks, stay shared.
        pickler.dispatch_table = {
            kind: reduce
            for kind, reduce in pickler.dispatch_table.items()
            if not str(getattr(reduce, "__module__", "")).startswith("torch.")
        }
        pickler.dump(self.value)
        return _load, (buffer.getvalue(),)


def _load(data: bytes) -> ByValue:
    return ByValue(pickle.loads(data))
