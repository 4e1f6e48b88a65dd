"""Quantised weights: which of them FSDP2 can shard, and DDP replicate."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


def stays_whole(name: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    """Whether this is a frozen parameter that FSDP2 cannot shard, or whose codes ``policy`` would cast.

    FSDP2 shards plain tensors, and classes with ``fsdp_pre_all_gather``, such as torchao's for training.
    Raises ValueError for a trainable parameter of another class, and for one whose sharded model could not
    be saved.
    """
    kind = type(parameter).__name__
    if isinstance(parameter, DTensor) or hasattr(parameter, "fsdp_pre_all_gather"):
        return False
    # A subclass without inner tensors may be only a tag.
    if type(parameter) is nn.Parameter or (parameter.is_floating_point() and not has_parts(parameter)):
        is_float8 = parameter.is_floating_point() and parameter.dtype.itemsize == 1
        return is_float8 and policy.param_dtype not in (None, parameter.dtype)
    if parameter.requires_grad:
        raise ValueError(
            f"{name} is to be trained and is a {kind}, which FSDP2 cannot shard: its class has no"
            " fsdp_pre_all_gather. Freeze it and train an adapter beside it (LoRA), quantise after"
            " training, or choose a class that has one, such as those of torchao for float8 training."
        )
    if hasattr(parameter, "SCB"):
        raise ValueError(
            f"{name} is a {kind}: its layer adds to the state dict what belongs to no parameter or"
            " buffer, so a sharded model could not be saved. Load the model in 4 bit (Linear4bit), or"
            " pass data_parallel='ddp'."
        )
    return True


def has_parts(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds inner tensors, as quantised ones do, by torch's protocol for tensor subclasses."""
    return hasattr(tensor, "__tensor_flatten__")


def check_replicable(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether some parameters hold inner tensors. Raises ValueError if DDP would have to put one into a bucket."""
    for name, parameter in parameters.items():
        if has_parts(parameter) and parameter.requires_grad:
            raise ValueError(
                f"{name} is to be trained and is a {type(parameter).__name__}, which DDP cannot hold: pass"
                " data_parallel='fsdp2' (for float8 also enable_fsdp_float8_all_gather=False), or freeze it."
            )
    return any(map(has_parts, parameters.values()))
