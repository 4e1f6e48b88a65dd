"""What user code sees of a parameter that FSDP2 has gathered for a step: a copy, whose writes are counted.

In-place writes are counted by torch, on views of a copy too. What is written through ``.data`` counts
where nobody looks: on the tensor that ``.data`` returns. So a copy notes that tensor. Functions take copies
as plain tensors, without ``__torch_function__``: a forward is as fast as ever. Views are plain tensors, since
compiled functions refuse other classes.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import DATA, GRAD, plain_access
from lightning_automodel.internals.torch import local_tensor
from lightning_automodel.sharding import parts
from lightning_automodel.sharding.whole_copies import own_part

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""


def set_memory(gathered: Tensor, memory: Tensor) -> None:
    """Let a copy have other memory. Not counted as a write."""
    if isinstance(gathered, DTensor):
        torch_internals.set_local_tensor(gathered, memory)
    else:
        DATA.__set__(gathered, memory)


# --- Writes through `.data` -------------------------------------------------------------------------------------------


def _get_data(gathered: Any) -> Tensor:
    alias: Tensor = DATA.__get__(gathered)  # whose version counter is its own
    gathered.aliases.append(alias)
    gathered.unit.is_touched = True
    return alias


def _set_data(gathered: Any, value: Tensor) -> None:
    if value.dtype != gathered.dtype:
        raise RuntimeError(text_of_refusal(gathered.shard, gathered))
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # In other memory, since a backward may need what FSDP2 has gathered.
    set_memory(gathered, own_part(value, gathered).detach().clone())
    gathered.unit.assigned.append(gathered)
    gathered.shard.num_assignments += 1
    torch.autograd.graph.increment_version([_get_data(gathered)])


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
        aliases: What ``.data`` was, each time that it was read or assigned since writes were last carried into the
            shard.
    """

    __slots__ = ()  # or a parameter could not be given the classes below
    shard: Any
    unit: Any
    memory: Tensor
    aliases: list[Tensor]
    data = property(_get_data, _set_data)
    grad = property(_get_grad, _set_grad, partial(_set_grad, value=None))

    def __deepcopy__(self: Any, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None).__reduce_ex__(protocol)


class _Part(DTensor):
    """Where tensor parallelism, or the exchange of experts, shards a parameter too."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let lists of parameters hold whole ones beside these, which torch refuses."""
        if not all(kind is Tensor or issubclass(kind, _Part | nn.Parameter) for kind in types):
            return NotImplemented
        with plain_access():
            if function.__name__.startswith("_foreach_"):
                result = parts.foreach(function, args, kwargs or {})
                if result is not parts.WHOLES:
                    return result
            return function(*args, **(kwargs or {}))


class _Gathered(GatheredTensor, nn.Parameter):
    """A whole parameter."""


class _GatheredPart(GatheredTensor, _Part):
    """This rank's part of a parameter."""


def make_gathered(gathered: Any, shard: nn.Parameter, unit: Any) -> None:
    """Give what FSDP2 gathers of ``shard``, which stays the same object, its class."""
    gathered.shard = shard
    gathered.unit = unit
    gathered.aliases = []
    gathered.memory = DATA.__get__(local_tensor(gathered))
    gathered.__class__ = _GatheredPart if isinstance(gathered, DTensor) else _Gathered


def make_plain(gathered: Any) -> None:
    """Undo :func:`make_gathered`."""
    gathered.__class__ = DTensor if isinstance(gathered, DTensor) else nn.Parameter
    for name in ("shard", "unit", "aliases", "memory"):
        delattr(gathered, name)


def text_of_refusal(shard: Any, gathered: Tensor) -> str:
    """Why what was written to a copy is not carried into the shard."""
    if gathered.dtype == shard.dtype:
        return (
            f"{shard.parameter_name} was written twice while it was gathered: as module.parameters() has it"
            " within a step, and as a list or an optimizer holds its shard. Take parameters from the"
            f" module, or write them {IN_HOOKS}."
        )
    return (
        f"{shard.parameter_name} was written within a step or a forward, where FSDP2 has gathered it in"
        f" {gathered.dtype}, which rounds what is written: its own dtype is {shard.dtype}. Write it"
        f" {IN_HOOKS}. Or pass data_parallel='ddp'."
    )
