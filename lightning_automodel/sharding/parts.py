"""What is computed on this rank's parts of sharded tensors.

Element by element nothing is communicated; sums and norms are added up over the ranks. Each function
raises :class:`NeedsWholes` if it cannot.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals.dtensor import alike, layout_of, with_part
from lightning_automodel.internals.torch import local_tensor
from lightning_automodel.sharding.whole_copies import (
    Call,
    View,
    add_up,
    count_writes,
    gather,
    is_recorded,
    note_write,
    own_part,
)


class NeedsWholes(Exception):  # noqa: N818 (no error: the whole tensors are gathered)
    """What is asked for cannot be computed on parts."""


# --- Element by element ---------------------------------------------------------------------------------------------


def elementwise(call: Call) -> Any:
    """Compute on this rank's parts, where all tensors fit to one layout."""
    tensors = [value for value in call.values if isinstance(value, Tensor)]
    targets = call.written()
    like = next((tensor for tensor in targets or tensors if isinstance(tensor, DTensor)), None)
    if like is None:
        raise NeedsWholes
    is_followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    own = part_like(like, like, is_followed)
    if targets and is_followed:
        own = own.clone()
    result = call.run_with(lambda value: own if value is like else part_like(value, like, is_followed))
    if result is own:  # written in place, or nothing to do, as for contiguous()
        if not targets:
            return like
        note_write([like], call.name, call.values)
        if is_followed:
            return Tensor.copy_(like, _as_shard(own, like))
        count_writes([like])
        return like
    if isinstance(result, str) or result is NotImplemented:
        return result
    if not isinstance(result, Tensor) or result.shape != own.shape or result.device != own.device:
        raise NeedsWholes
    if result.requires_grad and result.is_leaf:  # torch.zeros_like(p, requires_grad=True)
        raise NeedsWholes
    return _as_shard(result, like)


def cast(call: Call) -> Any:
    """``p.to(other)`` or ``p.type_as(other)``, which keep its shape: ``x.to(p)`` has that of ``x``."""
    if not isinstance(call.args[0], DTensor):
        raise NeedsWholes
    return elementwise(call)


def foreach(call: Call) -> Any:
    """Multi-tensor kernels (``torch._foreach_*``, ``torch._fused_*``): as the first list is sharded, so the others."""
    models = call.values[0]
    if not isinstance(models, (list, tuple)):
        raise NeedsWholes
    result = call.run_with(lambda value: _parts_like(value, models))
    if call.written():
        shards = [model for model in models if isinstance(model, DTensor)]
        count_writes(shards)
        # Not of optimizers' states, which are most of what is written.
        if shards and getattr(shards[0], "engine_ref", None) is not None:
            others: list[Any] = []
            # A fused kernel's are the numbers of steps, one for each parameter: a kernel for each would take longer.
            if "fused" not in call.name:
                lists = [value for value in call.values if isinstance(value, list)]
                others = [value for value in lists if not alike(value, models)]
            note_write(shards, call.name, [*call.values, *chain(*others)])
        return None if result is None else models
    return [
        _as_shard(part, like) if isinstance(like, DTensor) else part
        for part, like in zip(result, models, strict=True)
    ]


def part_like(value: Any, like: Any, is_followed: bool) -> Any:
    """This rank's part of what a tensor is when it broadcasts to ``like``, which is sharded.

    Values that are not tensors are returned unchanged, and so are plain tensors if ``like`` is one too. ``is_followed``
    says whether autograd follows the computation. Gradients of other layouts need whole tensors.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(like, DTensor):
        if isinstance(value, DTensor | View):
            raise NeedsWholes
        return value
    needs_gradient = is_followed and value.requires_grad
    if value is like or (isinstance(value, DTensor) and layout_of(value) == layout_of(like)):
        return value.to_local() if needs_gradient else local_tensor(value)
    if needs_gradient:
        raise NeedsWholes
    if isinstance(value, View):
        value.source.refresh("broadcast_to")
    if isinstance(value, DTensor):
        value = gather(value, "broadcast_to")
    if value.ndim == 0:  # does not promote dtypes, and may lie on another device
        return value
    try:
        return own_part(value.expand(like.shape), like)
    except RuntimeError as error:  # it does not broadcast
        raise NeedsWholes from error


def _parts_like(value: Any, models: Sequence[Any]) -> Any:
    """What this rank needs of an argument: of a list each entry laid out like its model."""
    if value.__class__ not in (list, tuple) or len(value) != len(models):
        return part_like(value, None, False)
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in value):
        raise NeedsWholes
    if alike(value, models):
        return list(map(local_tensor, value))
    return [part_like(tensor, like, False) for tensor, like in zip(value, models, strict=True)]


def _as_shard(part: Tensor, like: DTensor) -> DTensor:
    if not part.requires_grad:
        return with_part(type(like), part, like)
    shard = DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    shard.__class__ = type(like)
    return shard


# --- Sums and norms of all elements -----------------------------------------------------------------------------------


def reduced(call: Call) -> Any:
    """``p.sum()``, and the root of the sum of all squares: ``p.norm()`` or ``torch.linalg.vector_norm(p)``.

    Or ``torch._foreach_norm(tensors)``, as ``torch.nn.utils.clip_grad_norm_`` asks for them.
    """
    # torch also passes defaults.
    given = {name: value for name, value in call.kwargs.items() if value is not None and value is not False}
    order = [*call.args[1:], *given.values()]
    is_sum = call.name == "sum"
    if order and (is_sum or not given.keys() <= {"p", "ord"} or order not in ([2], ["fro"])):
        raise NeedsWholes
    is_list = not isinstance(call.args[0], Tensor)
    tensors = call.args[0] if is_list else [call.args[0]]
    is_alike = len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
    if not is_alike or not tensors[0].is_floating_point():
        raise NeedsWholes
    if any(is_recorded(tensor) or isinstance(tensor, View) for tensor in tensors):
        raise NeedsWholes
    parts = list(map(local_tensor, tensors))
    dtype = wide_dtype(tensors[0].device)
    if is_sum:
        sums = add_up(parts[0].sum(dtype=dtype).reshape(1), tensors, call.name)
    else:
        squares = torch.stack(torch._foreach_norm(parts, dtype=dtype)).square()
        sums = add_up(squares, tensors, call.name).sqrt()
    numbers = sums.to(tensors[0].dtype).unbind()  # one kernel for all
    return list(numbers) if is_list else numbers[0]
