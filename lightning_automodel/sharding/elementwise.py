"""What treats each element of sharded tensors by itself: computed on this rank's part, without communication."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.internals.dtensor import alike, has_layout, part_of, parts_of, tree_map, with_part
from lightning_automodel.sharding.whole_copies import (
    Arguments,
    Function,
    Keywords,
    View,
    count_writes,
    gather,
    on_wholes,
    own_part,
    written,
)


def elementwise(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Compute on this rank's parts, where all tensors fit to one layout; else on whole tensors."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    targets = written(function, args, kwargs)
    like: Any = None
    for tensor in targets or tensors:
        if isinstance(tensor, DTensor):
            like = tensor
            break
    if like is None:
        return on_wholes(function, args, kwargs)
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    parts: dict[int, Any] = {}
    for tensor in tensors:
        part = part_like(tensor, like, is_recorded)
        if part is None:
            return on_wholes(function, args, kwargs)
        parts[id(tensor)] = part
    own = parts[id(like)]
    if targets and is_recorded:
        own = own.clone()
        parts[id(like)] = own
    result = function(
        *[parts.get(id(value), value) for value in args],
        **{key: parts.get(id(value), value) for key, value in kwargs.items()},
    )
    if result is own:  # written in place, or nothing to do, as for contiguous()
        if targets and is_recorded:
            return Tensor.copy_(like, _as_shard(own, like))
        if targets:
            count_writes([like])
        return like
    if isinstance(result, str) or result is NotImplemented:
        return result
    if not isinstance(result, Tensor) or result.shape != own.shape or result.device != own.device:
        return on_wholes(function, args, kwargs)
    if result.requires_grad and result.is_leaf:  # torch.zeros_like(p, requires_grad=True)
        return on_wholes(function, args, kwargs)
    return _as_shard(result, like)


def cast(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.to(other)`` or ``x.type_as(p)``: of the other tensor the dtype and the device count, not the shape."""
    others = tree_map(_without_shape, args[1:])
    return elementwise(function, (args[0], *others), tree_map(_without_shape, kwargs))


def _without_shape(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = part_of(value)
    if isinstance(value, Tensor):
        return value.new_empty(())
    return value


def part_like(tensor: Tensor, like: DTensor, is_recorded: bool) -> Tensor | None:
    """This rank's part of what ``tensor`` is when it broadcasts to ``like``; None if that needs whole tensors.

    ``is_recorded`` says whether autograd follows the computation. Gradients of other layouts need whole
    tensors.
    """
    is_followed = is_recorded and tensor.requires_grad
    if isinstance(tensor, DTensor) and has_layout(tensor, like):
        return tensor.to_local() if is_followed else part_of(tensor)
    if is_followed:
        return None
    if isinstance(tensor, View):
        tensor.source.refresh(torch.broadcast_to)
    if isinstance(tensor, DTensor):
        tensor = gather(tensor, torch.broadcast_to)
    if tensor.ndim == 0:  # does not promote dtypes, and may lie on another device
        return tensor
    try:
        return own_part(tensor.expand(like.shape), like)
    except RuntimeError:  # it does not broadcast
        return None


def _as_shard(part: Tensor, like: DTensor) -> DTensor:
    if not part.requires_grad:
        return with_part(type(like), part, like)
    shard = DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    shard.__class__ = type(like)
    return shard


def foreach(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Multi-tensor kernels (``torch._foreach_*``, ``torch._fused_*``): as the first list is sharded, so the others."""
    values = [*args, *kwargs.values()]
    models = values[0]
    converted = []
    for value in values:
        part = value
        if value.__class__ in (list, tuple) and len(value) == len(models):
            part = _parts_alike(value, models)
        if isinstance(part, DTensor | View) or (part is None and value is not None):
            return on_wholes(function, args, kwargs)
        converted.append(part)
    result = function(*converted[: len(args)], **dict(zip(kwargs, converted[len(args) :], strict=True)))
    if written(function, args, kwargs):
        count_writes([model for model in models if isinstance(model, DTensor)])
        return None if result is None else models
    return [
        _as_shard(part, like) if isinstance(like, DTensor) else part
        for part, like in zip(result, models, strict=True)
    ]


def _parts_alike(values: Sequence[Any], models: Sequence[Any]) -> list[Any] | None:
    """What this rank needs of a list, each entry laid out like its model; None if that needs whole tensors."""
    if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in values):
        return None
    if alike(values, models):
        return parts_of(values)
    parts: list[Any] = []
    for value, like in zip(values, models, strict=True):
        part = value
        if isinstance(like, DTensor) and isinstance(value, Tensor):
            part = part_like(value, like, False)
        if part is None or isinstance(part, DTensor | View):
            return None
        parts.append(part)
    return parts
