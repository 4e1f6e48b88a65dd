"""Private names of ``DTensor``: this rank's part and its layout, for arithmetic that communicates nothing."""

import dataclasses
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
import torch._dynamo.trace_rules
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_any_only as tree_any_only
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

DATA: Any = Tensor.data
GRAD: Any = Tensor.grad
REQUIRES_GRAD: Any = Tensor.requires_grad
"""The descriptors of attributes that our classes replace."""

plain_access: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which ``__torch_function__`` of subclasses is not called: what runs in it sees ordinary DTensors."""


# How torch's anomaly detection asks a gradient for NaN, for which `DTensor` has no rule.
register_sharding(torch.ops.aten._is_any_true.default)(lambda _: [([Replicate()], [Replicate()])])


layout_of = attrgetter("shape", "_spec.placements", "_spec.mesh")
"""How a tensor is laid out over ranks. The attributes of ``DTensor`` that have it are several times as slow."""


def alike(tensors: Iterable[Any], models: Iterable[Any]) -> bool:
    """Whether all are sharded, and each tensor has the layout of its model, and its dtype."""
    try:
        return [tensor._spec for tensor in tensors] == [model._spec for model in models]
    except AttributeError:  # plain tensors, and numbers
        return False


def with_part(cls: type[DTensor], part: Tensor, like: DTensor) -> Any:
    """A tensor of the layout of ``like``, of which this rank holds ``part``. Not recorded by autograd."""
    spec: Any = like._spec
    if part.dtype != like.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    return cls.__new__(cls, part, spec, requires_grad=False)


def plain_dtensor(tensor: Tensor) -> Tensor:
    """A sharded tensor without a class of ours, sharing memory; any other tensor as it is."""
    if isinstance(tensor, DTensor):
        return with_part(DTensor, tensor._local_tensor, tensor)
    return tensor


def break_graphs_at(cls: type[Tensor], *modules: str) -> None:
    """Let ``torch.compile`` leave tensors of a class to Python: it cannot trace their ``__torch_function__``.

    It must not trace what that calls in other ``modules`` either.
    """
    torch._dynamo.config.nontraceable_tensor_subclasses.add(cls)
    for module in (cls.__module__, *modules):
        torch._dynamo.trace_rules.add(module)


def support_foreach(cls: type[Tensor]) -> None:
    """Let torch choose multi-tensor kernels for a class, as it does for ``DTensor``: it compares exact classes."""
    for supported in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in supported:
            supported.append(cls)
