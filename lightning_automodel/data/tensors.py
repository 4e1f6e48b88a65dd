"""Tensors in nested containers, visited without building the containers anew."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Each tensor in nested mappings, sequences and dataclasses, in their order.

    ``apply_to_collection`` would build new containers of what a function returns for each tensor, which a
    dataclass that checks its fields refuses.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
