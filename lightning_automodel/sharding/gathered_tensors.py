"""What user code sees of a parameter that FSDP2 has gathered for a step: a copy, whose writes are counted.

In-place writes are counted by torch, on views of a copy too. What is written through ``.data`` is counted by
an alias of the copy, of which ``.data`` gives views. Functions take copies as plain tensors, without
``__torch_function__``: a forward is as fast as ever. Views are plain tensors, since compiled functions refuse
other classes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import DATA, GRAD
from lightning_automodel.internals.torch import local_tensor
from lightning_automodel.sharding.whole_copies import own_part

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""

WRITTEN_TWICE = (
    "was written while it was gathered, as a list or an optimizer holds its shard. Within a step, take"
    f" parameters from the module (self.parameters()), or write them {IN_HOOKS}."
)
"""Why a shard must not be written while a step computes with its copy."""


def set_memory(gathered: Any, memory: Tensor) -> None:
    """Let a copy, and its alias, have other memory. Not counted as a write."""
    for tensor in (gathered, gathered.alias):
        if isinstance(tensor, DTensor):
            torch_internals.set_local_tensor(tensor, memory)
        else:
            DATA.__set__(tensor, memory)


# --- Writes through `.data` -------------------------------------------------------------------------------------------


def _get_data(gathered: Any) -> Tensor:
    view: Tensor = gathered.alias.detach()
    return view


def _set_data(gathered: Any, value: Tensor) -> None:
    if value.dtype != gathered.dtype:
        raise RuntimeError(text_of_refusal(gathered.shard, gathered))
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # In other memory, since a backward may need what FSDP2 has gathered.
    set_memory(gathered, own_part(value, gathered).detach().clone())
    gathered.unit.assigned.append(gathered)
    gathered.shard.num_assignments += 1
    torch.autograd.graph.increment_version([gathered.alias])


# --- Gradients --------------------------------------------------------------------------------------------------------


def _get_grad(gathered: Any) -> Tensor | None:
    if _is_asked_by_torch(gathered):
        return GRAD.__get__(gathered)
    return gathered.shard.grad


def _set_grad(gathered: Any, value: Tensor | None) -> None:
    if _is_asked_by_torch(gathered):
        GRAD.__set__(gathered, value)
    else:
        gathered.shard.grad = value


def _is_asked_by_torch(gathered: Any) -> bool:
    """Whether ``.grad`` is that of the gathered parameter, as torch needs it in a backward; else it is the shard's."""
    return gathered.unit.engine.backward is not None or torch_internals.is_read_by_torch()


# --- Classes ----------------------------------------------------------------------------------------------------------


class GatheredTensor:
    """A parameter that FSDP2 has gathered. It shows the gradient of the shard.

    Attributes:
        shard: The sharded parameter.
        unit: Whose parameter it is.
        memory: Where FSDP2 gathers it.
        alias: Shares the memory, and has a version counter of its own: that of writes through ``.data``.
    """

    __slots__ = ()  # or a parameter could not be given the classes below
    shard: Any
    unit: Any
    memory: Tensor
    alias: Tensor
    data = property(_get_data, _set_data)
    grad = property(_get_grad, _set_grad)

    def __deepcopy__(self: Any, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)


class _Gathered(GatheredTensor, nn.Parameter):
    """A whole parameter."""


class _GatheredPart(GatheredTensor, DTensor):
    """This rank's part of a parameter that tensor parallelism, or the exchange of experts, shards too."""


def make_gathered(gathered: Any, shard: nn.Parameter, unit: Any) -> None:
    """Give what FSDP2 gathers of ``shard``, which stays the same object, its class."""
    gathered.shard = shard
    gathered.unit = unit
    gathered.alias = DATA.__get__(gathered)
    gathered.memory = DATA.__get__(local_tensor(gathered))
    gathered.__class__ = _GatheredPart if isinstance(gathered, DTensor) else _Gathered


def make_plain(gathered: Any) -> None:
    """Undo :func:`make_gathered`."""
    gathered.__class__ = DTensor if isinstance(gathered, DTensor) else nn.Parameter
    for name in ("shard", "unit", "alias", "memory"):
        delattr(gathered, name)


def text_of_refusal(shard: Any, gathered: Tensor) -> str:
    """Why what was written to a copy is not carried into the shard."""
    if gathered.dtype == shard.dtype:
        return f"{shard.parameter_name} {WRITTEN_TWICE}"
    return (
        f"{shard.parameter_name} was written within a step or a forward, where FSDP2 has gathered it in"
        f" {gathered.dtype}, which rounds what is written: its own dtype is {shard.dtype}. Write it"
        f" {IN_HOOKS}. Or pass data_parallel='ddp'."
    )
