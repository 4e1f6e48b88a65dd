"""Tensors in nested containers."""

from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested mappings, sequences and dataclasses, in their order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor  # a dataclass that checks its fields refuses anything else

    apply_to_collection(value, Tensor, keep, allow_frozen=True)
    return found
