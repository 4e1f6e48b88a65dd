"""What FSDP2 gathers of a shard: a parameter that counts its writes, and shows the shard's gradient."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel.gradients.engine import Engine
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import DATA, GRAD, REQUIRES_GRAD, plain_access
from lightning_automodel.internals.torch import local_tensor
from lightning_automodel.sharding.whole_copies import own_part

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""

WRITTEN_TWICE = (
    "was written while it was gathered, as a list or an optimizer holds its shard. Within a step, take"
    f" parameters from the module (self.parameters()), or write them {IN_HOOKS}."
)
"""Why a shard must not be written while a step computes with its copy."""

SECOND_DERIVATIVE = (
    "A backward with create_graph=True in a hook, or after a fit, where FSDP2 frees the parameters that a second"
    " derivative would read. Leave create_graph out if there is none. Or compute it in training_step, in a step of"
    " evaluation, or under data_parallel='ddp'."
)
"""Why only first derivatives are computed there."""


def _get_data(gathered: Any) -> Tensor:
    view: Tensor = gathered.alias.detach()
    return view


def _set_data(gathered: Any, value: Tensor) -> None:
    shard = gathered.shard
    if value.dtype != gathered.dtype:
        raise RuntimeError(text_of_refusal(shard, gathered))
    if value.shape != gathered.shape or hasattr(local_tensor(shard), "fsdp_post_all_gather"):
        raise RuntimeError(
            f"{shard.parameter_name} is sharded, and its copy of shape {tuple(gathered.shape)}, which FSDP2 has"
            f" gathered, cannot become a tensor of shape {tuple(value.shape)}: write it {IN_HOOKS}. Change"
            " shapes before the model is sharded, in __init__ or configure_model."
        )
    check_is_gathered(gathered)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # In other memory, since a backward may need what FSDP2 has gathered.
    memory = fsdp2.gather_elsewhere(shard.fsdp_param)
    memory.copy_(own_part(value, gathered).detach())
    for tensor in (gathered, gathered.alias):
        if isinstance(tensor, DTensor):
            torch_internals.set_local_tensor(tensor, memory)
        else:
            DATA.__set__(tensor, memory)
    torch.autograd.graph.increment_version([gathered.alias])


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
    return gathered.engine.backward is not None or torch_internals.is_read_by_torch()


def _set_requires_grad(gathered: Any, value: bool) -> None:
    gathered.shard.requires_grad = value  # which sets both


class GatheredTensor:
    """A parameter that FSDP2 has gathered. It shows the gradient of the shard, and is trainable as the shard is.

    Attributes:
        shard: The sharded parameter.
        engine: Knows whether a backward of the strategy runs.
        alias: Shares the memory, and has a version counter of its own: that of writes through ``.data``.
    """

    __slots__ = ()  # or a parameter could not be given the classes below
    shard: Any
    engine: Engine
    alias: Tensor
    data = property(_get_data, _set_data)
    grad = property(_get_grad, _set_grad)
    requires_grad = property(REQUIRES_GRAD.__get__, _set_requires_grad)

    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        """Set ``requires_grad``."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self: Any, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)


class _Gathered(GatheredTensor, nn.Parameter):
    """A whole parameter."""


class _Part(DTensor):
    """This rank's part of a whole tensor within a step, of which numbers such as ``p.norm()`` are those of the whole.

    ``item()`` of a bare ``DTensor`` gives what this rank has of a sum.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(other, "fsdp_param") for other in types):
            return NotImplemented  # the rules of a shard that it is used with hold
        with plain_access():
            result = function(*args, **(kwargs or {}))
            if result.__class__ is DTensor and result.ndim == 0:
                return result.redistribute(placements=[Replicate()] * result.device_mesh.ndim)
            if result.__class__ is DTensor:
                result.__class__ = _Part
        return result


class _GatheredPart(GatheredTensor, _Part):
    """The part of a parameter that tensor parallelism, or the exchange of experts, shards too."""


def make_gathered(param: fsdp2.FSDPParam, engine: Engine) -> Any:
    """Give what FSDP2 gathers of a shard, which stays the same object, its class, and what users have set on it.

    Raises RuntimeError if another run has done that, and has not ended.
    """
    gathered = param.unsharded_param
    shard = param.sharded_param
    if isinstance(gathered, GatheredTensor):
        raise RuntimeError(
            f"{shard.parameter_name} is trained by another Trainer, whose run has not ended. Let that one evaluate"
            " (validation_step and val_dataloaders), call Trainer(devices=1) in the hook, or evaluate after"
            " trainer.fit."
        )
    own = vars(type(shard))
    vars(gathered).update({name: value for name, value in vars(shard).items() if name not in own})
    gathered.shard = shard
    gathered.engine = engine
    gathered.alias = DATA.__get__(gathered)
    gathered.__class__ = _GatheredPart if isinstance(gathered, DTensor) else _Gathered
    return gathered


def make_plain(gathered: Any) -> None:
    """Undo :func:`make_gathered`."""
    gathered.__class__ = DTensor if isinstance(gathered, DTensor) else nn.Parameter
    for name in ("shard", "engine", "alias"):
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


def check_is_gathered(gathered: Any) -> None:
    """Raise RuntimeError if a copy is written that FSDP2 has freed."""
    memory = local_tensor(gathered.alias).untyped_storage()
    if gathered.numel() > 0 and memory.size() == 0:
        raise RuntimeError(
            f"{gathered.shard.parameter_name} was written within a step or a forward, and FSDP2 has freed"
            f" what it had gathered there, so that the write is lost. Write it {IN_HOOKS}. In training, keep"
            " parameters gathered for the window: reshard_during_accumulation=False. Or pass"
            " data_parallel='ddp'."
        )
