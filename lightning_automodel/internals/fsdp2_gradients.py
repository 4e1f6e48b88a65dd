"""Private names of FSDP2's gradients: those that wait to be reduced, and their dtypes."""

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.internals.fsdp2 import (
    ACCUMULATES_IN_LEAF,
    FSDPParam,
    FSDPParamGroup,
    fsdp_param_groups,
)


def clear_unreduced_gradients(group: FSDPParamGroup, params: list[FSDPParam]) -> None:
    """Drop what ``zero_grad`` leaves: the group's partial sums, and unsharded gradients of these of its parameters."""
    group._partial_reduce_output = None
    for param in params:
        if (leaf := getattr(param, "unsharded_param", None)) is not None:
            leaf.grad = None
        if not ACCUMULATES_IN_LEAF:
            param.unsharded_accumulated_grad = None


def holds_partial_reduction(group: FSDPParamGroup) -> bool:
    """Whether HSDP has reduce-scattered gradients of the group that it has not all-reduced yet."""
    return group._partial_reduce_output is not None


def _unreduced_gradient(param: FSDPParam) -> Tensor | None:
    leaf = getattr(param, "unsharded_param", None)
    if ACCUMULATES_IN_LEAF or param.unsharded_accumulated_grad is None:
        if leaf is None:
            return None
        return leaf.grad
    return param.unsharded_accumulated_grad


def reduce_deferred_gradients(root: FSDPModule, groups: Iterable[FSDPParamGroup]) -> None:
    """Reduce the deferred gradients of ``groups``, if any, by their current flags, outside of any backward.

    These are the groups at or below ``root``. A collective if there are any such gradients: the last
    backward, in which FSDP2 reduces, did not pass through ``root``.
    """
    module: Any = root
    pending = []
    for group in groups:
        is_unreduced = any(_unreduced_gradient(param) is not None for param in group.fsdp_params)
        if is_unreduced or group._partial_reduce_output is not None:
            pending.append(group)
    if not pending:
        return
    if not hasattr(module, "finalize_backward"):  # before torch 2.15
        module._get_fsdp_state()._root_post_backward_final_callback()
        return
    for group in pending:
        # What finalize_backward refuses, and what it leaves out: gradients that came after the group's own
        # reduction.
        group.post_backward()
    module.set_manual_backward_finalization(True)
    try:
        module.finalize_backward()
    finally:
        module.set_manual_backward_finalization(False)


def has_replicas(group: FSDPParamGroup) -> bool:
    """Whether there are several copies of the group's shards (HSDP)."""
    return getattr(group.mesh_info, "replicate_mesh_size", 1) > 1


def unsharded_gradient_dtype(param: FSDPParam) -> torch.dtype:
    """The dtype in which the gradient of one parameter is accumulated and reduced."""
    if ACCUMULATES_IN_LEAF:
        dtype = param.unsharded_grad_dtype
    else:
        dtype = param.reduce_dtype
    return dtype or param.param_dtype or param.orig_dtype


def reduction_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in which gradients of FSDP2 units at or below ``model`` are reduced."""
    params = [param for group in fsdp_param_groups(model) for param in group.fsdp_params]
    return {unsharded_gradient_dtype(param) for param in params if param.sharded_param.requires_grad}


def has_two_gradient_dtypes(group: FSDPParamGroup) -> bool:
    """Whether gradients of the group are computed in another dtype than they are accumulated in."""
    dtypes = [
        (param.param_dtype or param.orig_dtype, unsharded_gradient_dtype(param))
        for param in group.fsdp_params
    ]
    return any(computed is not accumulated for computed, accumulated in dtypes)


def accumulate_in_one_dtype(group: FSDPParamGroup) -> None:
    """Give zero gradients to parameters that no micro-batch has used so far, beside others with accumulated ones.

    Before torch 2.15, FSDP2 reduces only gradients of one dtype. That of a parameter that is first used in
    the last micro-batch would be in the compute dtype, while the others' are in the reduction dtype.
    """
    trainable = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    if not ACCUMULATES_IN_LEAF and any(param.unsharded_accumulated_grad is not None for param in trainable):
        for param in trainable:
            if param.unsharded_accumulated_grad is None:
                _set_zero_gradient(param)


def zero_missing_gradients(group: FSDPParamGroup, parameters: Container[nn.Parameter]) -> None:
    """Give zero gradients to those of these sharded parameters that are frozen by now, and other ranks may use."""
    for param in group.fsdp_params:
        shard = param.sharded_param
        if shard in parameters and not shard.requires_grad and _unreduced_gradient(param) is None:
            _set_zero_gradient(param)


def _set_zero_gradient(param: FSDPParam) -> None:
    zeros = torch.zeros_like(param.unsharded_param, dtype=unsharded_gradient_dtype(param))
    if ACCUMULATES_IN_LEAF:
        param.unsharded_param.grad = zeros
    else:
        param.unsharded_accumulated_grad = zeros
