"""Copies in host memory of what is about to be saved, which training does not change any more."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from typing_extensions import override


class Stager(DefaultStager):
    """Copies states, each time into the same memory.

    torch's own (2.13) copies storages: it loses that a tensor is a conjugate or negative view of its storage, and knows
    no tensors without one (sparse, on the meta device) and no quantised ones.

    Args:
        device: Where the states are.
    """

    def __init__(self, device: torch.device) -> None:
        from_device = device.type != "cpu"
        super().__init__(
            StagingOptions(
                use_pinned_memory=from_device,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=from_device,
            )
        )

    @override
    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().stage(_by_storages(state_dict), **kwargs)


def copied(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` as it will be when it was saved and loaded: for anything of moderate size."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=False)


def _by_storages(tree: Any) -> Any:
    """``tree`` such that copying the storages of its tensors copies them."""
    if isinstance(tree, dict):
        return {key: _by_storages(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_by_storages(value) for value in tree)
    if not isinstance(tree, Tensor) or isinstance(tree, DTensor):
        return tree
    if tree.layout != torch.strided or tree.is_quantized or tree.is_meta:
        return _Whole(tree)
    return tree.resolve_conj().resolve_neg() if tree.is_conj() or tree.is_neg() else tree


class _Whole:
    """A tensor whose deep copy is its clone."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._tensor.detach().clone().cpu() if not self._tensor.is_meta else self._tensor
