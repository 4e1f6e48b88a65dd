"""Copies in host memory of what is about to be saved, which training does not change any more."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor


def make_stager(device: torch.device) -> DefaultStager:
    """Torch's stager, which copies each time into the same memory. Give it what :func:`stageable` returns.

    Args:
        device: Where the states are.
    """
    from_device = device.type != "cpu"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=from_device,
            use_shared_memory=False,  # the thread that writes is in this process
            use_async_staging=False,  # training goes on when the copy is complete
            use_non_blocking_copy=from_device,
        )
    )


def stageable(tree: Any) -> Any:
    """``tree`` in a form that torch's stager copies rightly.

    It (2.13 to 2.15) copies storages: it loses that a tensor is a conjugate or negative view of its storage, and knows
    no tensors without one (sparse, on the meta device) and no quantised ones.
    """
    if isinstance(tree, dict):
        return {key: stageable(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(stageable(value) for value in tree)
    if not isinstance(tree, Tensor) or isinstance(tree, DTensor):
        return tree
    if tree.layout != torch.strided or tree.is_quantized or tree.is_meta:
        return _CopiedWhole(tree)
    return tree.resolve_conj().resolve_neg()


class _CopiedWhole:
    """A tensor whose deep copy, which the stager makes of what is no tensor, is its clone."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._tensor if self._tensor.is_meta else self._tensor.detach().clone().cpu()


def copied(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` as it will be when it was saved and loaded: for anything of moderate size."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=False)
