"""What a worker that is no fork receives: pickled by value."""

import io
import pickle
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
