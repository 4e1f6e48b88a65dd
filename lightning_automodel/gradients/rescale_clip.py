"""Rescaling and clipping gradients that are sharded, replicated, or a mixture of both."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals.dtensor import GRAD

Parameters = nn.Module | Tensor | Iterable[nn.Parameter]


def rescale_gradients(
    model: Parameters,
    num_tokens_for_grad_scaling: Tensor | int,
    dp_group: dist.ProcessGroup | None = None,
) -> None:
    """Turn gradients that the engine averaged over ranks into the gradient of the mean over all label tokens.

    The objective is ``L = (1 / N) * sum of S[r, m]``: the sums S of token losses of the micro-batches m of a
    window and the data-parallel ranks r, divided by all its label tokens N. Each micro-batch is
    backpropagated as the sum ``S[r, m]`` (a mean loss times its count), and FSDP2 and DDP average over the D
    ranks, so gradients arrive as ``(1 / D) * sum of S``. Hence the one factor, applied once per window,
    before clipping: ``D / N``.

    Experts that are spread over ``e`` ranks (``spread_experts``) have one factor more. Those e ranks send
    each other their tokens, so an expert's gradient on one of them holds the sums of all e, and the engine
    averages it over the ``D / e`` ranks that hold this expert: it arrives as ``(e / D) * sum of S``. It is
    multiplied by ``1 / e``.

    A collective on ``dp_group``: every rank of it must call, once per window; it is one all-reduce of one
    number. If a rank does not call it, the others raise when the group's timeout ends. Nothing is read on
    the host.

    Args:
        model: Module or parameters whose ``.grad`` is scaled in place.
        num_tokens_for_grad_scaling: Label tokens of this rank in the window; summed over the group inside.
            If the sum is 0, the gradients become 0.
        dp_group: Ranks that hold different data. None: no communication, D = 1.
    """
    parameters = list_parameters(model)
    share_experts_gradients_(parameters)
    device = _reduction_device(parameters)
    total = torch.zeros((), dtype=wide_dtype(device), device=device)
    total[...] = num_tokens_for_grad_scaling
    divisor = 1
    if dp_group is not None:
        dist.all_reduce(total, group=dp_group)
        divisor = dp_group.size()
    scale_gradients_(parameters, gradient_factor(total, divisor))


def share_experts_gradients_(parameters: list[nn.Parameter]) -> None:
    """Multiply gradients of experts that are spread over e ranks by ``1 / e``, see :func:`rescale_gradients`.

    In place, once per window. Not a collective. The divide factor of FSDP2 cannot do it: torch divides by it
    twice where a group has one rank and reduces in float16, in float64 or by sums (torch 2.13 and 2.14).
    """
    for size in set(map(num_expert_ranks, parameters)) - {1}:
        experts = [parameter for parameter in parameters if num_expert_ranks(parameter) == size]
        scale_gradients_(experts, torch.tensor(1 / size, dtype=torch.float64))


def gradient_factor(denominator: Tensor, divisor: int) -> Tensor:
    """[] the D / N of :func:`rescale_gradients`, 0 where N is 0, and NaN where N is no sum of counts."""
    is_sum = (denominator >= 0) & (denominator < math.inf)  # both are false for NaN
    factor = divisor / denominator
    factor.masked_fill_(denominator == 0, 0.0)
    return factor.masked_fill_(~is_sum, math.nan)


def clip_gradients(model: Parameters, clip_norm: float, foreach: bool = True) -> Tensor:
    """Scale all gradients down together so that their global 2-norm is at most ``clip_norm``.

    A collective wherever a parameter is sharded, with a gradient or without: every rank of its mesh must
    call. It costs one all-reduce of one number for each way in which parameters are sharded, and for
    each group of ranks in it, whatever the mixture of meshes, replicas, plain tensors and empty shards.
    Nothing is read on the host.

    Args:
        model: Module or parameters whose ``.grad`` is scaled in place.
        clip_norm: Largest norm allowed; ``inf`` only measures. ValueError if it is not positive.
        foreach: Use multi-tensor kernels.

    Returns:
        [] the norm before clipping, the same on every rank, in float32, or float64 if some parameter is.
        Gradients of a norm beyond float32 are clipped as well.
    """
    check_clip_value(clip_norm)
    parameters = list_parameters(model)
    norm = total_norm(parameters, foreach)
    scale_to_norm_(parameters, norm, clip_norm, foreach)
    if any(parameter.dtype == torch.float64 for parameter in parameters):
        return norm
    return norm.to(torch.float32)


def scale_to_norm_(
    parameters: list[nn.Parameter], norm: Tensor, clip_norm: float, foreach: bool = True
) -> None:
    """Scale gradients of known norm to at most ``clip_norm``, with the constant that torch uses. Not a collective."""
    if not math.isinf(clip_norm):
        scale_gradients_(parameters, torch.clamp(clip_norm / (norm + 1e-6), max=1.0), foreach)


@torch.no_grad()
def clip_gradient_values(parameters: list[nn.Parameter], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value] in place. Not a collective."""
    check_clip_value(clip_value)
    for parameter in parameters:
        lay_out_gradient(parameter)
    for grads in _local_parts(parameters):
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)


def check_clip_value(value: float) -> None:
    """Raise ValueError unless ``value`` is a positive number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"The value to clip gradients to must be a positive number, got {value!r}.")


def check_finite(norm: Tensor, groups: list[dist.ProcessGroup]) -> None:
    """Raise RuntimeError unless the norm [] is finite on all ranks of ``groups``: all-reduces, and a host read."""
    for group in groups:
        norm = norm.clone()
        dist.all_reduce(norm, group=group)
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"The gradient norm of this window is {float(norm)}; no parameter has been changed by it. Look"
            " at the losses of the window or lower the learning rate; with error_if_nonfinite=False training"
            " goes on."
        )


@torch.no_grad()
def total_norm(parameters: list[nn.Parameter], foreach: bool = True) -> Tensor:
    """Global 2-norm of the gradients, wide enough not to overflow. A collective like :func:`clip_gradients`.

    Parameters that are sharded over the same groups share a sum, which is all-reduced over each of them.
    """
    sharded_alike: dict[tuple[dist.ProcessGroup, ...], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        lay_out_gradient(parameter)
        sharded_alike[sharding_groups(parameter)].append(parameter)
    device = _reduction_device(parameters)
    total = torch.zeros((), dtype=wide_dtype(device), device=device)
    for groups, same in sharded_alike.items():
        squares = _sum_of_squares(same, device, foreach)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


@torch.no_grad()
def scale_gradients_(parameters: list[nn.Parameter], factor: Tensor, foreach: bool = True) -> None:
    """Multiply every gradient by ``factor`` [] in place, shard by shard. Not a collective, no host read.

    The factor is rounded to the dtype of the gradients, or to float32 for half precision, and then each
    product to the dtype of the gradients.
    """
    for grads in _local_parts(parameters, foreach):
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        local_factor = factor.to(grads[0].device, dtype)
        if dtype == grads[0].dtype and not grads[0].is_sparse:
            torch._foreach_mul_(grads, local_factor)
            continue
        for grad in grads:
            grad.copy_(grad.to(dtype) * local_factor)


@torch.no_grad()
def average_gradients_(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of replicated parameters over ``group`` in place.

    A collective: every rank must call with the same parameters; one all-reduce, at least in float32. A
    parameter without a gradient counts as zero, and has one afterwards, even if no rank has used it.
    """
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])  # in the widest dtype
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    averages = flat.split([gradient.numel() for gradient in gradients])
    for gradient, average in zip(gradients, averages, strict=True):
        gradient.copy_(average.view_as(gradient))


def list_parameters(model: Parameters) -> list[nn.Parameter]:
    """The parameters of a module, resharded since gradients are on the shards, or the given parameters."""
    if isinstance(model, Tensor):
        return [cast(nn.Parameter, model)]
    if not isinstance(model, nn.Module):
        return list(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.parameters())


def lay_out_gradient(parameter: nn.Parameter) -> None:
    """Lay a gradient out as its parameter. A collective on its mesh if it is a partial sum (tensor parallelism)."""
    placed: Any = parameter
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != placed.placements:
        parameter.grad = grad.redistribute(placements=placed.placements)


def sharding_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Groups that a tensor is sharded over; none for replicated and plain ones."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # All that is not replicated: torch 2.13 has another class for shards of what tensor parallelism has sharded.
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _reduction_device(parameters: list[nn.Parameter]) -> torch.device:
    """A device on which the parameters' groups can reduce, even if shards are offloaded to the CPU."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    return parameters[0].device if parameters else torch.device("cpu")


def _sum_of_squares(parameters: list[nn.Parameter], device: torch.device, foreach: bool) -> Tensor:
    """[] sum of the squares of all gradient elements, on ``device``."""
    total = torch.zeros((), dtype=wide_dtype(device), device=device)
    for grads in _local_parts(parameters, foreach):
        if grads[0].is_sparse:
            grads = [grad.coalesce().values() for grad in grads]
        if grads[0].is_complex():
            grads = [torch.view_as_real(grad) for grad in grads]
        # The square of a float32 above 1.8e19 overflows: an infinite norm would clip all gradients to zero.
        dtype = wide_dtype(grads[0].device)
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=dtype)).to(total.dtype)
        if norms.is_cpu and device.type != "cpu":  # of offloaded shards
            norms = norms.pin_memory().to(device, non_blocking=True)  # the host need not wait
        total += norms.to(device).square().sum()
    return total


def _local_parts(parameters: list[nn.Parameter], foreach: bool = True) -> Iterable[list[Tensor]]:
    """This rank's parts of the gradients, each alone, or with ``foreach`` those of one device, dtype and layout.

    Under ``torch.no_grad()``.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = GRAD.__get__(parameter)
        if isinstance(grad, DTensor):
            grad = grad.to_local()
        if grad is not None:
            kind = (grad.device, grad.dtype, grad.layout) if foreach else len(groups)
            groups[kind].append(grad)
    return groups.values()
