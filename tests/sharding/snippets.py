"""What users' hooks do to parameters and gradients between steps: small pieces of code, the same on shards and not.

`READS` return something and leave all tensors as they are; `WRITES` change weights, gradients or the optimizer's
states. Each is given a `Trained`. Code that draws random numbers seeds them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)


@dataclass
class Trained:
    """What a snippet works on.

    Attributes:
        weight: At least [5, 5].
        other: A weight of the same shape, in another unit.
        short: One row, so fewer than ranks.
        bias: One element.
        conv: Three dimensions; None where the module has no convolution.
        module: Holds all of them.
        optimizer: An Adam that has stepped.
    """

    weight: nn.Parameter
    other: nn.Parameter
    short: nn.Parameter
    bias: nn.Parameter
    conv: nn.Parameter | None
    module: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that have a gradient."""
        return [p for p in self.module.parameters() if p.grad is not None]


Snippet = Callable[[Trained], Any]
READS: dict[str, Snippet] = {}
WRITES: dict[str, Snippet] = {}


def _reads(snippet: Snippet) -> Snippet:
    READS[snippet.__name__.strip("_").replace("_", " ")] = snippet
    return snippet


def _writes(snippet: Snippet) -> Snippet:
    WRITES[snippet.__name__.strip("_").replace("_", " ")] = snippet
    return snippet


def ramp(like: Tensor) -> Tensor:
    """A plain tensor of a shape, from -1 to 1."""
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view(like.shape)


def rows(like: Tensor) -> Tensor:
    """[2] indices of rows that lie on different ranks."""
    return torch.tensor([0, like.shape[0] - 1])


def even_rows(like: Tensor) -> Tensor:
    """[rows] a mask."""
    return torch.arange(like.shape[0]) % 2 == 0


def checkered(like: Tensor) -> Tensor:
    """A mask of each element."""
    return (torch.arange(like.numel()) % 3 == 0).view(like.shape)


def _with_nan(tensor: Tensor) -> Tensor:
    """A copy whose last row holds a NaN."""
    copied = tensor.clone()
    copied[-1, 1] = math.nan
    return copied


# --- Numbers ----------------------------------------------------------------------------------------------------------

READS |= {
    "norm": lambda net: net.weight.grad.norm(),
    "norm as a number": lambda net: float(net.weight.norm()),
    "largest of a short layer": lambda net: net.short.grad.abs().max(),
    "where a short layer is largest": lambda net: (net.short.argmax(), net.short.max(dim=0).values),
    "norms of columns": lambda net: net.weight.norm(dim=0).sum(),
    "functional norm": lambda net: torch.norm(net.weight.grad, p=1, dim=0),
    "vector norm": lambda net: torch.linalg.vector_norm(net.weight.grad, 1),
    "singular values": lambda net: torch.linalg.svdvals(net.weight),
    "sum of columns": lambda net: net.conv.sum(0),
    "deviation": lambda net: (net.weight.std(), net.weight.var(dim=0), torch.var_mean(net.weight.grad)),
    "NaN": lambda net: _with_nan(net.weight.grad).isnan().sum(),
    "finite": lambda net: all(torch.isfinite(p.grad).all() for p in net.parameters),
    "quantile": lambda net: torch.quantile(net.weight.grad.abs(), 0.9),
    "kth value": lambda net: net.weight.flatten().kthvalue(3),
    "all": lambda net: ((net.weight.abs() < 5).all(), (net.weight > 0).all(dim=1)),
    "counts": lambda net: ((net.weight > 0).sum(), net.weight.count_nonzero(), (net.weight > 0).nonzero()),
    "softmax": lambda net: (
        net.weight.softmax(0),
        torch.log_softmax(net.weight, dim=1),
        net.bias.softmax(0),
    ),
    "half precision": lambda net: net.weight.bfloat16().float().norm(),
    "complex": lambda net: (
        torch.fft.fft(net.weight, dim=0).abs(),
        torch.complex(net.weight, net.other).abs(),
    ),
    "compared with a number": lambda net: bool(net.weight.grad.norm() > 1e-3),
    "compared by Python": lambda net: max(p.grad.norm() for p in net.parameters),
    "sum by Python": lambda net: sum(p.square().sum() for p in net.parameters),
}

# --- Several tensors --------------------------------------------------------------------------------------------------

READS |= {
    "product of matrices": lambda net: net.weight @ net.other.T,
    "product with a plain matrix": lambda net: (
        ramp(net.weight) @ net.other.T,
        net.weight.T.mm(ramp(net.other)),
    ),
    "linear layer": lambda net: F.linear(ramp(net.weight), net.other, net.weight[:, 0]),
    "equal": lambda net: (torch.equal(net.weight, net.weight.clone()), torch.equal(net.weight, net.other)),
    "close": lambda net: (
        torch.allclose(net.weight, net.weight + 1e-12),
        torch.allclose(net.weight, ramp(net.weight)),
    ),
    "stacked": lambda net: torch.stack([net.weight.grad, net.other.grad]).mean(0),
    "concatenated": lambda net: torch.cat([p.grad.flatten() for p in net.parameters]).norm(),
    "norms of a list": lambda net: torch._foreach_norm([p.grad for p in net.parameters]),
    "sums of powers": lambda net: torch._foreach_powsum([p.grad for p in net.parameters], 2),
    "cast like a shard": lambda net: (
        torch.ones(len(net.weight[0])).type_as(net.weight).sum(),
        torch.ones(1, 1).to(net.weight).sum(),
        net.weight.to(net.bias.float()).sum(),
    ),
    "total norm": lambda net: get_total_norm([p.grad for p in net.parameters]),
    "as a vector": lambda net: parameters_to_vector(net.module.parameters()).norm(),
    "chosen": lambda net: torch.where(net.weight > 0, net.weight, ramp(net.weight)).sum(),
    "broadcast": lambda net: (net.weight * ramp(net.weight[0]) - ramp(net.weight[:, :1])).sum(1),
    "outer product": lambda net: (torch.outer(net.weight[0], net.bias), net.weight * net.bias),
}

# --- Parts, copies and what loggers take -----------------------------------------------------------------------------

READS |= {
    "rows": lambda net: net.weight.grad[rows(net.weight)],
    "a row and an element": lambda net: (net.weight[4], net.weight[4, 1].item(), net.weight[-1][0]),
    "masked": lambda net: net.weight[net.weight > 0],
    "selected": lambda net: (
        net.weight.index_select(0, rows(net.weight)),
        net.weight.take(rows(net.weight)),
    ),
    "iterated": lambda net: [row.sum() for row in net.weight],
    "reshaped": lambda net: (net.weight.view(-1)[7], net.conv.reshape(2, -1).sum(1), net.weight.t()[0]),
    "contains": lambda net: (0.5 in torch.ones_like(net.weight), 1 in torch.ones_like(net.bias)),
    "list": lambda net: (net.weight.tolist(), net.bias.grad.tolist()),
    "number": lambda net: (net.bias.item(), float(net.bias.grad), bool(net.bias > 0)),
    "array": lambda net: (net.weight.detach().cpu().numpy(), net.weight.grad.numpy(), net.bias.data.numpy()),
    "array by numpy": lambda net: np.linalg.norm(np.asarray(net.weight.detach().cpu())),
    "tensor of numbers": lambda net: torch.tensor([p.grad.norm() for p in net.parameters]),
    "text": lambda net: f"{net.weight.grad.norm():.6f} {net.bias.item():.6f}",
    "printed": lambda net: all(
        len(text) > 0 for text in (repr(net.weight), str(net.weight.grad), f"{net.bias}")
    ),
    "what it is": lambda net: (
        *(isinstance(net.weight, nn.Parameter), isinstance(net.weight.grad, Tensor)),
        *(net.weight.is_leaf, net.weight.requires_grad, net.weight.is_floating_point()),
        *(net.weight.numel(), net.weight.ndim, len(net.weight), list(net.weight.stride())),
        *(
            str(net.weight.dtype),
            net.weight.device.type,
            net.weight.is_contiguous(),
            net.weight.element_size(),
        ),
    ),
    "keys": lambda net: {p: i for i, p in enumerate(net.parameters)}[net.weight] in range(100),
    "members": lambda net: (net.weight in set(net.parameters), any(p is net.weight for p in net.parameters)),
    "state dict": lambda net: sorted(
        (name, value.double().abs().sum().item()) for name, value in net.module.state_dict().items()
    ),
}


@_reads
def _copied(net: Trained) -> Any:
    copied = copy.deepcopy(net.weight)
    cloned = net.weight.detach().clone()
    copied.data.add_(1)
    cloned.zero_()
    return copied.sum(), cloned.sum(), net.weight.sum()


@_reads
def _into_plain_tensors(net: Trained) -> Any:
    mean = torch.zeros(net.weight.shape, dtype=torch.float64)
    mean.copy_(net.weight.detach())
    mean.mul_(0.9).add_(net.weight.grad, alpha=0.1)
    mean.lerp_(net.other.detach(), 0.25)
    mean += net.weight.detach()
    mean[rows(mean)] = net.weight.detach()[rows(mean)]
    torch._foreach_add_([mean], [net.weight.grad], alpha=2)
    return mean


@_reads
def _out(net: Trained) -> Any:
    result = torch.empty(net.weight.shape, dtype=torch.float64)
    norms = torch.empty(net.weight.shape[1], dtype=torch.float64)
    torch.add(net.weight.grad, net.other.grad, out=result)
    torch.linalg.vector_norm(net.weight.grad, dim=0, out=norms)
    return result, norms


@_reads
def _drawn(net: Trained) -> Any:
    torch.manual_seed(3)
    weight = net.weight.detach()
    probabilities = weight.sigmoid()
    return (
        *(torch.rand_like(weight), torch.randn_like(input=net.weight.grad), weight.bernoulli(0.5)),
        *(torch.bernoulli(probabilities), torch.normal(weight, 0.1), F.dropout(weight, 0.5)),
        *(
            torch.multinomial(probabilities[0], 3),
            torch.randint_like(weight, 9),
            torch.rand(2, dtype=weight.dtype),
        ),
    )


@_reads
def _gradient_of_a_gradient(net: Trained) -> Any:
    first = torch.autograd.grad((net.weight**3).mean(), net.weight, create_graph=True)[0]
    return torch.autograd.grad(first.square().sum(), net.weight)[0]


# --- Penalties --------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "binary cross entropy": lambda p, anchor: F.binary_cross_entropy(p.sigmoid(), anchor.sigmoid()),
    "norms of columns": lambda p, anchor: (p - anchor).norm(dim=0).sum(),
    "squares": lambda p, anchor: (p - anchor).square().sum(),
    "orthogonality": lambda p, anchor: (p.T @ p - torch.eye(p.shape[1], dtype=p.dtype)).square().sum(),
    "rows": lambda p, anchor: (p[rows(p)] - anchor[rows(p)]).square().sum() + p[2:].abs().mean(),
    "reshaped": lambda p, anchor: p.view(-1).dot(anchor.flatten()) ** 2 + p.unsqueeze(0).mean(dim=1).norm(),
}


def _penalise(loss: Callable[[Tensor, Tensor], Tensor]) -> Snippet:
    def by_grad(net: Trained) -> Any:
        penalty = loss(net.weight, ramp(net.weight))
        net.weight.grad += torch.autograd.grad(penalty, net.weight)[0]
        return penalty

    return by_grad


WRITES |= {f"penalty by {name}": _penalise(loss) for name, loss in LOSSES.items()}


@_writes
def _penalty_by_backward(net: Trained) -> Any:
    penalty = (
        F.mse_loss(net.weight, ramp(net.weight)) + net.other.norm(dim=0).sum() + net.bias.square().sum()
    )
    penalty.backward()
    return penalty


@_writes
def _penalty_by_backward_to_inputs(net: Trained) -> None:
    F.smooth_l1_loss(net.weight, net.other).backward(inputs=[net.weight])


@_writes
def _penalty_between_parameters(net: Trained) -> None:
    gradients = torch.autograd.grad(
        F.mse_loss(net.weight, net.other) + net.short.norm(), [net.weight, net.other]
    )
    for parameter, gradient in zip((net.weight, net.other), gradients, strict=True):
        parameter.grad.add_(gradient, alpha=0.1)


# --- Rows, slices and masks of gradients -----------------------------------------------------------------------------


def _halved_slice(net: Trained) -> None:
    net.weight.grad[2:4] *= 0.5


def _halved_rows(net: Trained) -> None:
    net.weight.grad[rows(net.weight)] *= 0.5


def _row_copied(net: Trained) -> None:
    net.weight.grad[0] = net.weight.grad[4]


WRITES |= {
    "rows zeroed": lambda net: net.weight.grad.__setitem__(rows(net.weight), 0),
    "element set": lambda net: net.weight.grad.__setitem__((4, 1), 0.5),
    "rows masked": lambda net: net.weight.grad.__setitem__(even_rows(net.weight), 0),
    "elements masked": lambda net: net.weight.grad.__setitem__(net.weight.grad > 0, 0),
    "row copied": _row_copied,
    "slice in place": _halved_slice,
    "rows in place": _halved_rows,
    "slice by method": lambda net: net.weight.grad[2:4].mul_(0.5),
    "slice of a slice": lambda net: net.weight.grad[1:][2:].zero_(),
    "column": lambda net: net.weight.grad[:, 1].zero_(),
    "chunk": lambda net: net.weight.grad.chunk(2)[1].zero_(),
    "unbind": lambda net: net.weight.grad.unbind()[2].zero_(),
    "view": lambda net: net.weight.grad.view(-1)[::3].zero_(),
    "whole view": lambda net: net.weight.data.view(-1).mul_(0.5),
    "reshape": lambda net: net.weight.grad.reshape(-1)[3:].mul_(2),
    "transposed wholly": lambda net: net.weight.grad.T.mul_(2),
    "kernel": lambda net: net.conv.grad[:, 0, 1].zero_(),
    "short row": lambda net: net.short.grad[0, 1:].mul_(3),
    "short element": lambda net: net.bias.grad[0].fill_(0.25),
    "mask filled": lambda net: net.weight.grad.masked_fill_(even_rows(net.weight)[:, None], 0),
    "index added": lambda net: net.weight.grad.index_add_(0, rows(net.weight), ramp(net.weight[:2])),
    "multiplied by a mask": lambda net: net.weight.grad.mul_(checkered(net.weight)),
    "multiplied by a number that was read": lambda net: net.weight.grad.mul_(
        min(1.0, 0.1 / float(net.weight.grad.norm()))
    ),
    "multiplied by a norm": lambda net: net.weight.grad.div_(net.weight.grad.norm() + 1),
    "by data": lambda net: net.weight.grad.data.__setitem__(4, ramp(net.weight[0])),
}


@_writes
def _each_row(net: Trained) -> None:
    for row in net.weight.grad:
        row.div_(row.norm() + 1e-6)


@_writes
def _slice_kept(net: Trained) -> Any:
    """It shows what was written to the whole since, and writes to it afterwards."""
    part = net.weight.grad[2:4]
    net.weight.grad.mul_(2)
    seen = part.clone()
    part.add_(1)
    net.weight.grad.mul_(2)
    return seen, part.sum()


@_writes
def _slices_in_a_list(net: Trained) -> None:
    torch._foreach_mul_([net.weight.grad[:2], net.weight.grad[3:], net.other.grad[1]], 0.5)


# --- Weights ----------------------------------------------------------------------------------------------------------


@_writes
@torch.no_grad()
def _weight_decay(net: Trained) -> None:
    for p in net.parameters:
        p.mul_(0.99)
        p.add_(p.grad, alpha=-0.1)
        p.sub_(0.01 * p.grad.sign())


@_writes
@torch.no_grad()
def _rows_of_weights(net: Trained) -> None:
    net.weight[2:] = 0
    net.weight[0].fill_(0.5)
    net.other[:, 1:3] *= 2
    net.short[0, 0] = 1
    net.conv[rows(net.conv)] = 0.1


@_writes
def _data(net: Trained) -> None:
    net.weight.data.mul_(0.9)
    net.weight.data[rows(net.weight)] = 0
    net.weight.data[3:].zero_()
    net.other.data = net.other.data * 0.5
    net.short.data = F.normalize(net.short.data, dim=1)
    net.bias.data -= 0.1


@_writes
def _data_from_plain(net: Trained) -> None:
    for p in (net.weight, net.short, net.bias, net.conv):
        p.data = ramp(p)
    net.other.data.copy_(ramp(net.other))


@_writes
def _data_swapped(net: Trained) -> None:
    kept = net.weight.data
    net.weight.data = net.other.data
    net.other.data = kept
    net.weight.data[1:].mul_(2)


@_writes
@torch.no_grad()
def _normalised(net: Trained) -> None:
    net.weight.div_(net.weight.norm(dim=1, keepdim=True))
    net.other.copy_(F.normalize(net.other, dim=0))
    net.short.renorm_(2, 0, 0.5)


@_writes
@torch.no_grad()
def _spectrally_normalised(net: Trained) -> Any:
    vector = F.normalize(ramp(net.weight[0]), dim=0)
    for _ in range(3):
        left = F.normalize(net.weight @ vector, dim=0)
        vector = F.normalize(net.weight.T @ left, dim=0)
    sigma = torch.dot(left, net.weight @ vector)
    net.weight.div_(sigma)
    return sigma


@_writes
@torch.no_grad()
def _pruned(net: Trained) -> None:
    threshold = net.weight.abs().flatten().kthvalue(6).values
    net.weight.mul_(net.weight.abs() > threshold)
    net.other[net.other.abs() < net.other.abs().quantile(0.3)] = 0


@_writes
@torch.no_grad()
def _vectors(net: Trained) -> None:
    vector = parameters_to_vector(net.module.parameters())
    vector_to_parameters(0.9 * vector + 0.01 * ramp(vector), net.module.parameters())


@_writes
@torch.no_grad()
def _averaged(net: Trained) -> None:
    """Averages in shards and in plain tensors, which come back into the weights."""
    shards = [p.detach().clone().mul_(0.5) for p in net.parameters]
    torch._foreach_lerp_(shards, [p.detach() for p in net.parameters], 0.25)
    shards[0].lerp_(net.parameters[0], 0.1)
    plain = torch.zeros(net.weight.shape, dtype=torch.float64)
    plain.lerp_(net.weight, 0.5)
    for p, average in zip(net.parameters, shards, strict=True):
        p.copy_(average)
    net.weight.lerp_(plain, 0.5)
    net.other.data.mul_(0.9).add_(plain, alpha=0.1)


@_writes
@torch.no_grad()
def _fused(net: Trained) -> None:
    net.weight.addcmul_(net.other, ramp(net.other), value=0.1)
    net.other.addcdiv_(ramp(net.weight), net.weight.grad.abs() + 1, value=-0.1)
    net.short.addmm_(net.short[:, :1], ramp(net.short), alpha=0.1)
    torch._foreach_addcmul_(
        [net.weight, net.bias], [net.other, net.bias], [ramp(net.other), ramp(net.bias)], 0.1
    )


@_writes
@torch.no_grad()
def _lists(net: Trained) -> None:
    gradients = [p.grad for p in net.parameters]
    torch._foreach_mul_(gradients, 0.5)
    torch._foreach_add_(gradients, [ramp(p) for p in net.parameters], alpha=0.01)
    torch._foreach_add_([p.detach() for p in net.parameters], gradients, alpha=-0.1)
    torch._foreach_mul_(gradients, [float(i) for i in range(len(gradients))])
    torch._foreach_div_(gradients, torch.tensor(3.0, dtype=torch.float64))
    torch._foreach_clamp_max_(gradients, 0.1)


@_writes
@torch.no_grad()
def _results_given(net: Trained) -> None:
    torch.mul(net.weight.grad, 2, out=net.weight.grad)
    torch.cumsum(net.other.grad, 0, out=net.other.grad)


# --- Initialisers and noise -------------------------------------------------------------------------------------------

INITIALISERS: dict[str, Snippet] = {
    "orthogonal": lambda net: nn.init.orthogonal_(net.weight),
    "constant": lambda net: nn.init.constant_(tensor=net.weight, val=0.3),
    "kaiming": lambda net: nn.init.kaiming_uniform_(net.weight, a=math.sqrt(5)),
    "zeros": lambda net: (nn.init.zeros_(net.bias), nn.init.ones_(net.short)),
    "normal": lambda net: (nn.init.normal_(net.weight, std=0.1), nn.init.normal_(net.short)),
    "uniform": lambda net: nn.init.uniform_(net.weight.grad, -0.01, 0.01),
}


def _seeded(snippet: Snippet) -> Snippet:
    def run(net: Trained) -> Any:
        torch.manual_seed(3)
        snippet(net)
        return torch.rand(2, dtype=torch.float64)  # all ranks have drawn as often

    return run


WRITES |= {f"initialised {name}": _seeded(snippet) for name, snippet in INITIALISERS.items()}


@_writes
@_seeded
def _layers_reset(net: Trained) -> None:
    for layer in net.module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


@_writes
@_seeded
@torch.no_grad()
def _noise(net: Trained) -> None:
    for p in net.parameters:
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        p.grad.add_(torch.normal(0.0, 0.1, p.shape, dtype=p.dtype))
    net.weight.grad.mul_(torch.rand_like(input=net.weight) < 0.8)
    net.weight.add_(torch.full_like(net.weight, 0.1).bernoulli())
    net.other.grad.normal_(std=0.1)
    net.short.data.uniform_(-1, 1)
    net.other.grad.copy_(F.dropout(net.other.grad, 0.5))
    net.bias.grad.add_(torch.empty_like(net.bias).exponential_())


# --- Gradients as recipes change them ---------------------------------------------------------------------------------

CLIPS: dict[str, Snippet] = {
    "norm": lambda net: clip_grad_norm_(net.module.parameters(), 0.1),
    "norm of one": lambda net: clip_grad_norm_(net.weight, 0.01),
    "norm without foreach": lambda net: clip_grad_norm_(net.parameters, 0.1, norm_type=1, foreach=False),
    "value": lambda net: clip_grad_value_(net.module.parameters(), 0.005),
}
WRITES |= {f"clipped by {name}": clip for name, clip in CLIPS.items()}


@_writes
@torch.no_grad()
def _clipped_adaptively(net: Trained) -> None:
    """As timm.utils.agc.adaptive_clip_grad."""
    for p in net.parameters:
        over = tuple(range(1, p.ndim)) if p.ndim > 1 else None
        norm = p.norm(dim=over, keepdim=True) if over else p.norm()
        grad_norm = p.grad.norm(dim=over, keepdim=True) if over else p.grad.norm()
        largest = norm.clamp_(min=1e-3).mul_(0.01)
        clipped = p.grad * (largest / grad_norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(grad_norm < largest, p.grad, clipped))


@_writes
def _gradient_replaced(net: Trained) -> None:
    net.weight.grad = ramp(net.weight)
    net.other.grad = net.other.grad * 2
    net.short.grad = torch.zeros_like(net.short)
    net.bias.grad = None


@_writes
def _zeroed(net: Trained) -> Any:
    net.module.zero_grad(set_to_none=False)
    seen = sum(p.grad.abs().sum() for p in net.parameters)
    net.module.zero_grad()
    return seen, [p.grad is None for p in net.module.parameters()]


@_writes
def _zeroed_by_the_optimizer(net: Trained) -> None:
    net.optimizer.zero_grad()
    net.weight.grad = 0.1 * net.weight.detach()


@_writes
def _frozen_for_a_while(net: Trained) -> Any:
    net.weight.requires_grad_(False)
    net.weight.mul_(0.5)
    seen = net.weight.requires_grad
    net.weight.requires_grad_(True)
    return seen, net.weight.requires_grad


@_writes
def _states(net: Trained) -> Any:
    state = net.optimizer.state
    state[net.weight]["exp_avg"][rows(net.weight)] = 0
    state[net.weight]["exp_avg_sq"][2:4].mul_(4)
    state[net.other]["exp_avg"].zero_()
    state[net.short]["exp_avg"].copy_(ramp(net.short))
    return state[net.weight]["exp_avg"].norm(), state[net.other]["exp_avg_sq"].amax(dim=0)


# --- Where views, copies and autograd meet ---------------------------------------------------------------------------


@_writes
def _two_views(net: Trained) -> Any:
    first = net.weight.grad[:2]
    second = net.weight.grad[1:4]
    first.mul_(2)
    second.add_(1)
    seen = first.sum()
    second[0] = first[0] * 3
    second[2] -= first[1]
    return seen, first.norm(), second.clone()


@_writes
def _view_and_whole(net: Trained) -> Any:
    flat = net.weight.grad.view(-1)
    net.weight.grad.zero_()
    flat[2:7] = 1
    torch.add(net.weight.grad, 1, out=net.weight.grad)
    flat.clamp_(max=1.5)
    net.weight.grad.copy_(net.weight.grad.flip(0))
    return flat.sum()


@_writes
def _data_kept(net: Trained) -> Any:
    """It stays as it is when the parameter gets other values."""
    kept = net.weight.data
    net.weight.data = net.weight.data * 2
    return kept.sum(), kept[1:].norm(dim=0), (kept * 1).sum(), net.weight.sum()


@_writes
def _view_that_autograd_follows(net: Trained) -> Any:
    with torch.enable_grad():
        part = net.weight[2:]
    with torch.no_grad():
        net.weight.mul_(2)
    return part.sum()


@_writes
def _written_with_gradient(net: Trained) -> Any:
    with torch.enable_grad():
        scaled = net.weight * 2
        scaled += ramp(net.weight)
        scaled.mul_(net.other)
        penalty = scaled.square().sum()
        net.short.grad.add_(net.short, alpha=0.1)
    penalty.backward()
    net.short.grad = net.short.grad.detach()
    return penalty


@_writes
def _view_with_gradient(net: Trained) -> Any:
    with torch.enable_grad():
        penalty = (net.weight[2:] ** 2).sum() + net.weight.unbind()[0].prod() + net.weight.T[1].exp().mean()
    penalty.backward()
    return penalty


@_writes
def _leaf_made_of_a_copy(net: Trained) -> None:
    leaf = net.weight.detach().clone().requires_grad_()
    other = torch.zeros_like(net.weight, requires_grad=True)
    ((leaf * 2 - other).square().mean() + leaf.norm(dim=0).sum()).backward()
    net.weight.grad.add_(leaf.grad).sub_(other.grad)


@_writes
def _by_functional_transforms(net: Trained) -> Any:
    hessian = torch.autograd.functional.hessian(lambda bias: (bias**3).sum(), net.bias)
    net.bias.grad.mul_(hessian.flatten())
    vector = ramp(net.weight)
    product = torch.autograd.functional.vjp(lambda p: p @ p.T @ p, net.weight, vector)[1]
    net.weight.grad.add_(product)
    return hessian


@_writes
@torch.no_grad()
def _written_by_functions(net: Trained) -> Any:
    F.relu(net.weight.grad, True)
    F.threshold_(net.other.grad, 0.0, 0.1)
    torch.clamp_(input=net.short.grad, min=-0.01, max=0.01)
    F.normalize(net.other.data, dim=1, out=net.other.data)
    net.bias.grad.data.fill_(net.bias.grad.norm())
    net.other.copy_(net.other.flip(0))
    torch._foreach_mul_([net.weight.grad, net.other.grad], net.bias[0])
    torch._foreach_copy_([net.short.data], [ramp(net.short)])


@_writes
@torch.no_grad()
def _plain_gets_shards(net: Trained) -> Any:
    plain = ramp(net.weight)
    plain[plain < net.weight] = 0
    plain[1:3] = net.other[1:3]
    plain[0].add_(net.weight[0]).mul_(net.weight.grad[0].norm())
    plain *= net.other
    torch._foreach_lerp_([plain, net.weight.grad], [net.weight, ramp(net.weight)], 0.5)
    net.weight.sub_(plain)
    return plain


@_writes
def _module_moved(net: Trained) -> Any:
    net.module.double().cpu().to("cpu")
    return net.weight.requires_grad, len(list(net.module.parameters()))


@_writes
def _states_loaded(net: Trained) -> Any:
    """Weights and states are kept, spoilt and loaded again; some weights are loaded from plain tensors."""
    weights = copy.deepcopy(net.module.state_dict())
    states = copy.deepcopy(net.optimizer.state_dict())
    with torch.no_grad():
        for p in net.parameters:
            p.mul_(2)
            net.optimizer.state[p]["exp_avg"].zero_()
    net.module.load_state_dict({name: value * 0.5 for name, value in weights.items()})
    net.optimizer.load_state_dict(states)
    name = next(name for name, p in net.module.named_parameters() if p is net.other)
    net.module.load_state_dict({name: ramp(net.other)}, strict=False)
    return net.optimizer.state[net.weight]["exp_avg"].sum()


@_writes
@torch.no_grad()
def _sparse_and_dense(net: Trained) -> Any:
    sparse = net.weight.grad.to_sparse()
    values, indices = net.weight.grad.abs().flatten().sort(descending=True)
    net.weight.grad.view(-1)[indices[5:]] = 0
    return sparse.to_dense().sum(), values[:5], torch.nonzero(net.weight.grad, as_tuple=True)[0]


@_reads
def _one_argument(net: Trained) -> Any:
    return (
        torch.where(net.weight > 0),
        2**net.weight,
        1 - net.weight,
        1 / (net.weight + 3),
        net.weight // 1,
        -net.bias,
    )


@_reads
def _made_alike(net: Trained) -> Any:
    weight = net.weight.detach()
    return (
        *(weight.new_zeros(3), weight.new_full((2,), 0.5), weight.new_tensor([1.0, 2.0])),
        *(torch.zeros_like(weight), torch.full_like(weight, 2.0), torch.ones_like(net.bias.grad)),
        *(weight.type(), str(weight.layout), weight.is_cuda),
    )
