"""Tensors in nested containers."""

import zlib
from io import BytesIO
from typing import Any

import torch
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


def checksum(value: Any) -> int:
    """A number of all tensors in ``value``, which are copied to the host; 0 if there are none."""
    # Cloned, or what a view does not show would be counted.
    tensors = [tensor.detach().cpu().clone() for tensor in tensors_in(value)]
    if not tensors:
        return 0
    content = BytesIO()
    torch.save(tensors, content)
    return zlib.crc32(content.getvalue())
