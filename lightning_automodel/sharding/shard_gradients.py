"""Hooks on shards, and gradients with respect to them, for which a forward uses gathered copies."""

import inspect
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.sharding.whole_copies import Arguments, Function, Keywords, gather


def hook(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Hooks on parameters: FSDP2 writes gradients itself, and calls none of them when a gradient is final."""
    shard = args[0]
    if shard.is_leaf and shard.requires_grad and not shard.accepts_hooks:
        raise RuntimeError(
            f"{function.__name__} on {shard.parameter_name}, which is sharded: FSDP2 would not call the"
            " hook, or would call it before the gradient is divided by the label tokens of its window."
            " Change or read gradients in on_before_optimizer_step, where they are final. For hooks that"
            " step inside of the backward use count_window_ahead=True, or else data_parallel='ddp'."
        )
    return function(*args, **kwargs)


def _in_graph(tensor: Any) -> Any:
    """What FSDP2's forward uses in place of a shard; any other tensor is returned as it is."""
    copy = getattr(getattr(tensor, "fsdp_param", None), "unsharded_param", None)
    if copy is None or not copy.requires_grad:
        return tensor
    return copy


def _listed(inputs: Any) -> list[Any]:
    return [inputs] if isinstance(inputs, Tensor) else list(inputs)


def grad(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``torch.autograd.grad`` by shards, and by the gathered copies that the graph has in their place.

    What a rank's loss computes of both is added up: a collective, as penalties on shards are.
    """
    keywords = inspect.signature(function).bind(*args, **kwargs).arguments
    inputs = _listed(keywords.pop("inputs"))
    copies = list(map(_in_graph, inputs))
    may_be_unused = keywords.pop("allow_unused", None) or keywords.get("materialize_grads")
    found = function(inputs=[*inputs, *copies], allow_unused=True, **keywords)
    gradients: list[Any] = []
    for tensor, copy, of_tensor, of_copy in zip(inputs, copies, found, found[len(inputs) :], strict=False):
        if of_tensor is None:
            gradients.append(of_copy)
        elif of_copy is None or copy is tensor:
            if isinstance(of_tensor, DTensor):
                of_tensor.__class__ = type(tensor)
            gradients.append(of_tensor)
        else:
            gradients.append(gather(of_tensor, function) + of_copy)
    if not may_be_unused and any(gradient is None for gradient in gradients):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set"
            " allow_unused=True if this is the desired behavior."
        )
    return tuple(gradients)


def backward(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``backward(inputs=shards)``, also by the gathered copies that the graph has in their place."""
    if kwargs.get("inputs") is not None:
        inputs = _listed(kwargs["inputs"])
        kwargs = {**kwargs, "inputs": list({*inputs, *map(_in_graph, inputs)})}
    return function(*args, **kwargs)
