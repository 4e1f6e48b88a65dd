"""Loading whole tensors into a sharded model: ``load_state_dict`` of what ``torch.load`` has read, say."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import torch_internals
from lightning_automodel.sharding.apply import shard_like


def accept_whole_states(model: nn.Module) -> None:
    """Let ``load_state_dict`` of a sharded ``model`` take whole tensors, of which each rank keeps its part.

    Without it, torch refuses plain tensors for DTensors ("got mixed torch.Tensor and DTensor"). Missing and unexpected
    keys, other shapes, ``strict`` and ``assign`` are torch's as ever. Loading so is not a collective: each rank that
    calls it changes its own shards, so all should call it, with the same tensors. The hooks stay as long as the model
    is sharded, which it still is after a fit.
    """
    for module in model.modules():
        if _sharded_tensors(module) and _take_own_parts not in torch_internals.load_state_dict_hooks(module):
            module.register_load_state_dict_pre_hook(_take_own_parts)


def _sharded_tensors(module: nn.Module) -> dict[str, DTensor]:
    """The parameters and buffers of ``module`` itself that are sharded."""
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def _take_own_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, own in _sharded_tensors(module).items():
        value = state_dict.get(f"{prefix}{name}")
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
        # torch describes shapes that differ.
        if is_whole and value.shape == own.shape:
            state_dict[f"{prefix}{name}"] = shard_like(own, value)
