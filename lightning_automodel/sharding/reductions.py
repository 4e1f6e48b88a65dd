"""Sums and norms of all elements of sharded tensors: of each rank's part, added up over the ranks."""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals.dtensor import parts_of
from lightning_automodel.sharding.elementwise import elementwise
from lightning_automodel.sharding.whole_copies import (
    Arguments,
    Function,
    Keywords,
    View,
    add_up,
    is_recorded,
    on_wholes,
)


def sum_of(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.sum()``, of all elements."""
    if kwargs or len(args) != 1 or _needs_wholes(args):
        return on_wholes(function, args, kwargs)
    (part,) = parts_of(args)
    total = part.sum(dtype=torch.promote_types(part.dtype, torch.float32))
    return add_up(total.reshape(1), args, function)[0].to(part.dtype)


def norm(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.norm()`` or ``torch.linalg.vector_norm(p, 1)``, of all elements."""
    # torch passes on what its caller has left out.
    given = {name: value for name, value in kwargs.items() if value is not None and value is not False}
    order = given.pop("p", given.pop("ord", 2))
    if len(args) > 1:
        order = args[1]
    if order == "fro":
        order = 2
    is_positive = isinstance(order, int | float) and 0 < order < math.inf
    if given or len(args) > 2 or not is_positive or _needs_wholes(args[:1]):
        return on_wholes(function, args, kwargs)
    return _norms(args[:1], order, function)[0]


def foreach_norm(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """The norms of a list, as ``torch.nn.utils.clip_grad_norm_`` asks for them."""
    if kwargs or len(args) != 2 or not 0 < args[1] < math.inf or _needs_wholes(args[0]):
        return on_wholes(function, args, kwargs)
    return list(_norms(args[0], args[1], function))


def _needs_wholes(tensors: Any) -> bool:
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return True
    return any(is_recorded(tensor) or isinstance(tensor, View) for tensor in tensors)


def _norms(tensors: Any, order: float, function: Function) -> Any:
    dtype = wide_dtype(tensors[0].device)
    powers = torch.stack(torch._foreach_norm(parts_of(tensors), order, dtype=dtype)).pow(order)
    norms = add_up(powers, tensors, function).pow(1 / order)
    return norms.to(tensors[0].dtype).unbind()


def equal(function: Function, args: Arguments, kwargs: Keywords) -> bool:
    """``torch.equal``, which Lightning's finetuning callbacks call for each pair of parameters."""
    if args[0].shape != args[1].shape:
        return False
    differing = elementwise(torch.ne, args, kwargs)
    return not sum_of(function, (elementwise(Tensor.float, (differing,), {}),), {})
