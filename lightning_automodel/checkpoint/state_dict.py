"""The state of a model under the names of parameters, and whole or copied tensors of a checkpoint."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.tree import TreePath, mapped
from lightning_automodel.internals.torch import module_versions, with_module_versions, without_wrappers

MODEL = "state_dict"
"""Key of the model's state in a checkpoint."""

OPTIMIZERS = "optimizer_states"
"""Key of the optimizers' states in a checkpoint."""

STATES = (MODEL, OPTIMIZERS)


def model_state(model: nn.Module) -> dict[str, Any]:
    """State dict of the model's own tensors, not copies, under names without wrappers.

    CheckpointError if two different entries have the same one.
    """
    state = model.state_dict()
    named = {without_wrappers(name): value for name, value in state.items()}
    if len(named) < len(state):
        raise CheckpointError(
            "two entries of the state have one name without the prefixes of torch.compile and activation"
            " checkpointing: rename one of the modules"
        )
    return with_module_versions(named, module_versions(state))


def under_own_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` for ``model.load_state_dict``: names and modules' versions under the model's names with wrappers."""
    own_names = {without_wrappers(name): name for name in model.state_dict()}
    renamed = {own_names.get(without_wrappers(name), name): value for name, value in state.items()}
    paths = {path: without_wrappers(f"{path}.").removesuffix(".") for path, _ in model.named_modules()}
    versions = module_versions(state)
    own_versions = {path: versions[name] for path, name in paths.items() if name in versions}
    return with_module_versions(renamed, own_versions)


def whole(state: Any, keep: bool) -> Any:
    """``state``, nested collections, with whole tensors on the CPU. A collective if any tensor is sharded.

    It gathers one tensor at a time: besides the shards, a rank holds one whole tensor on its device. A rank
    with ``keep`` also holds the whole state in host memory; the others get no values.
    """

    def gathered(_: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        if not keep:
            return None
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return leaf.cpu()
        return leaf

    return mapped(state, gathered)


def copied(state: Any) -> Any:
    """A copy of ``state`` in host memory that training does not change, pinned for accelerators' tensors.

    torch's ``DefaultStager`` (2.13 to 2.15), which ``async_save`` uses, forgets that a tensor is a conjugate
    or negative view of its storage, cannot copy quantised tensors or tensors without a storage, copies the
    whole storage of a view, and pins memory for CUDA only.
    """

    def copy_of(_: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            # From an accelerator into pinned memory: through pageable memory the host would wait for each tensor.
            return leaf.detach().to("cpu", non_blocking=True, copy=True)
        return copy.deepcopy(leaf)

    copies = mapped(state, copy_of)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return copies
