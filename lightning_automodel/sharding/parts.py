"""What is computed on this rank's parts of sharded tensors.

Element by element nothing is communicated; sums and norms are added up over the ranks. Each function
returns ``WHOLES`` if it cannot.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals.dtensor import (
    alike,
    part_of,
    parts_of,
    tree_map_only,
    with_part,
)
from lightning_automodel.sharding.whole_copies import (
    Arguments,
    Function,
    Keywords,
    View,
    add_up,
    count_writes,
    gather,
    is_recorded,
    own_part,
    written,
)

WHOLES: Any = object()
"""Returned where the whole tensors are needed."""


# --- Element by element ---------------------------------------------------------------------------------------------


def elementwise(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Compute on this rank's parts, where all tensors fit to one layout."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    targets = written(function, args, kwargs)
    like: Any = None
    for tensor in targets or tensors:
        if isinstance(tensor, DTensor):
            like = tensor
            break
    if like is None:
        return WHOLES
    is_followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    parts: dict[int, Any] = {}
    for tensor in tensors:
        part = part_like(tensor, like, is_followed)
        if part is None:
            return WHOLES
        parts[id(tensor)] = part
    own = parts[id(like)]
    if targets and is_followed:
        own = own.clone()
        parts[id(like)] = own
    result = function(
        *[parts.get(id(value), value) for value in args],
        **{key: parts.get(id(value), value) for key, value in kwargs.items()},
    )
    if result is own:  # written in place, or nothing to do, as for contiguous()
        if targets and is_followed:
            return Tensor.copy_(like, _as_shard(own, like))
        if targets:
            count_writes([like])
        return like
    if isinstance(result, str) or result is NotImplemented:
        return result
    if not isinstance(result, Tensor) or result.shape != own.shape or result.device != own.device:
        return WHOLES
    if result.requires_grad and result.is_leaf:  # torch.zeros_like(p, requires_grad=True)
        return WHOLES
    return _as_shard(result, like)


def cast(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.to(other)`` or ``x.type_as(p)``: of the other tensor the dtype and the device count, not the shape."""
    others = tree_map_only(Tensor, _without_shape, (args[1:], kwargs))
    return elementwise(function, (args[0], *others[0]), others[1])


def _without_shape(tensor: Tensor) -> Tensor:
    return parts_of([tensor])[0].new_empty(())


def part_like(tensor: Tensor, like: DTensor, is_followed: bool) -> Tensor | None:
    """This rank's part of what ``tensor`` is when it broadcasts to ``like``; None if that needs whole tensors.

    ``is_followed`` says whether autograd follows the computation. Gradients of other layouts need whole
    tensors.
    """
    needs_gradient = is_followed and tensor.requires_grad
    if isinstance(tensor, DTensor) and _have_one_layout(tensor, like):
        return tensor.to_local() if needs_gradient else part_of(tensor)
    if needs_gradient:
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


def _have_one_layout(one: DTensor, other: DTensor) -> bool:
    """Whether each rank holds the same elements of both."""
    if one.shape != other.shape or one.placements != other.placements:
        return False
    return one.device_mesh == other.device_mesh


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
    parts = [_parts_like(value, models) for value in values]
    if any(part is WHOLES for part in parts):
        return WHOLES
    result = function(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True)))
    if written(function, args, kwargs):
        count_writes([model for model in models if isinstance(model, DTensor)])
        return None if result is None else models
    return [
        _as_shard(part, like) if isinstance(like, DTensor) else part
        for part, like in zip(result, models, strict=True)
    ]


def _parts_like(value: Any, models: Sequence[Any]) -> Any:
    """What this rank needs of an argument: of a list each entry laid out like its model."""
    if value.__class__ not in (list, tuple) or len(value) != len(models):
        return WHOLES if isinstance(value, DTensor | View) else value
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in value):
        return WHOLES
    if alike(value, models):
        return parts_of(value)
    parts = [
        part_like(tensor, like, False)
        if isinstance(like, DTensor) and isinstance(tensor, Tensor)
        else tensor
        for tensor, like in zip(value, models, strict=True)
    ]
    if any(part is None or isinstance(part, DTensor | View) for part in parts):
        return WHOLES
    return parts


# --- Sums and norms of all elements -----------------------------------------------------------------------------------


def total(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.sum()``, of all elements."""
    if kwargs or len(args) != 1 or _needs_wholes(args):
        return WHOLES
    (part,) = parts_of(args)
    own = part.sum(dtype=wide_dtype(part.device))
    return add_up(own.reshape(1), args, function)[0].to(part.dtype)


def norm(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.norm()`` or ``torch.linalg.vector_norm(p)``: the root of the sum of all squares.

    Or ``torch._foreach_norm(tensors)``, as ``torch.nn.utils.clip_grad_norm_`` asks for them.
    """
    # torch passes on what its caller has left out.
    given = {name: value for name, value in kwargs.items() if value is not None and value is not False}
    order = [*args[1:], *given.values()]
    if not given.keys() <= {"p", "ord"} or order not in ([], [2], ["fro"]):
        return WHOLES
    is_list = not isinstance(args[0], Tensor)
    tensors = args[0] if is_list else [args[0]]
    if _needs_wholes(tensors):
        return WHOLES
    dtype = wide_dtype(tensors[0].device)
    squares = torch.stack(torch._foreach_norm(parts_of(tensors), dtype=dtype)).square()
    norms = add_up(squares, tensors, function).sqrt().to(tensors[0].dtype)
    return list(norms.unbind()) if is_list else norms[0]


def _needs_wholes(tensors: Any) -> bool:
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return True
    return any(is_recorded(tensor) or isinstance(tensor, View) for tensor in tensors)
