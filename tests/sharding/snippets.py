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
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters


@dataclass
class Trained:
    """What a snippet works on."""

    weight: nn.Parameter  # at least [5, 5]
    other: nn.Parameter  # of the same shape, in another unit
    short: nn.Parameter  # one row, so fewer than ranks
    bias: nn.Parameter  # one element
    conv: nn.Parameter | None  # three dimensions, where the module has a convolution
    module: nn.Module  # holds all of them
    optimizer: torch.optim.Optimizer  # an Adam that has stepped

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that have a gradient."""
        return [p for p in self.module.parameters() if p.grad is not None]


Snippet = Callable[[Trained], Any]


def _halve(tensor: Tensor) -> None:
    tensor.numpy()[:] /= 2


LIBRARY = torch.library.Library("lightning_automodel_tests", "FRAGMENT")
"""As that of bitsandbytes, whose kernels write what autograd does not count."""
LIBRARY.define("halve(Tensor(a!) tensor) -> ()")
LIBRARY.impl("halve", _halve, "CPU")


def ramp(like: Tensor) -> Tensor:
    """A plain tensor of a shape, from -1 to 1."""
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view(like.shape)


def rows(like: Tensor) -> Tensor:
    """[2] indices of rows that lie on different ranks."""
    return torch.tensor([0, like.shape[0] - 1])


def even_rows(like: Tensor) -> Tensor:
    """[rows] a mask."""
    return torch.arange(like.shape[0]) % 2 == 0


def _with_nan(tensor: Tensor) -> Tensor:
    """A copy whose last row holds a NaN."""
    copied = tensor.clone()
    copied[-1, 1] = math.nan
    return copied


READS: dict[str, Snippet] = {
    # Numbers.
    "norm": lambda net: net.weight.grad.norm(),
    "norm as a number": lambda net: float(net.weight.norm()),
    "where a short layer is largest": lambda net: (net.short.argmax(), net.short.max(dim=0).values),
    "norms of columns": lambda net: net.weight.norm(dim=0).sum(),
    "other norms": lambda net: (
        *(net.weight.norm(p=1), net.weight.norm(float("inf")), torch.linalg.norm(net.weight, 2)),
        *(torch.linalg.vector_norm(net.weight, 3), torch.linalg.vector_norm(x=net.weight)),
    ),
    "NaN": lambda net: _with_nan(net.weight.grad).isnan().sum(),
    "finite": lambda net: all(torch.isfinite(p.grad).all() for p in net.parameters),
    "counts": lambda net: ((net.weight > 0).sum(), net.weight.count_nonzero(), (net.weight > 0).nonzero()),
    "half precision": lambda net: net.weight.bfloat16().float().norm(),
    "compared by Python": lambda net: max(p.grad.norm() for p in net.parameters),
    # Several tensors.
    "made of another": lambda net: net.bias.new_tensor(net.weight),
    "powers of a number": lambda net: torch._foreach_pow(2.0, [net.weight, net.other]),
    "equal by name": lambda net: torch.equal(net.weight, other=net.other),
    "product of matrices": lambda net: net.weight @ net.other.T,
    "product with a plain matrix": lambda net: (
        ramp(net.weight) @ net.other.T,
        net.weight.T.mm(ramp(net.other)),
    ),
    "equal": lambda net: (torch.equal(net.weight, net.weight.clone()), torch.equal(net.weight, net.other)),
    "concatenated": lambda net: torch.cat([p.grad.flatten() for p in net.parameters]).norm(),
    "sums of powers": lambda net: torch._foreach_powsum([p.grad for p in net.parameters], 2),
    "cast like a shard": lambda net: (
        torch.ones(len(net.weight[0])).type_as(net.weight).sum(),
        torch.ones(1, 1).to(net.weight).sum(),
        net.weight.to(net.bias.float()).sum(),
    ),
    "chosen": lambda net: torch.where(net.weight > 0, net.weight, ramp(net.weight)).sum(),
    "broadcast": lambda net: (net.weight * ramp(net.weight[0]) - ramp(net.weight[:, :1])).sum(1),
    "outer product": lambda net: (torch.outer(net.weight[0], net.bias), net.weight * net.bias),
    # Parts, copies and what loggers take.
    "rows": lambda net: net.weight.grad[rows(net.weight)],
    "a row and an element": lambda net: (net.weight[4], net.weight[4, 1].item(), net.weight[-1][0]),
    "masked": lambda net: net.weight[net.weight > 0],
    "iterated": lambda net: [row.sum() for row in net.weight],
    "reshaped": lambda net: (net.weight.view(-1)[7], net.conv.reshape(2, -1).sum(1), net.weight.t()[0]),
    "list": lambda net: (net.weight.tolist(), net.bias.grad.tolist()),
    "number": lambda net: (net.bias.item(), float(net.bias.grad), bool(net.bias > 0)),
    "array": lambda net: (net.weight.detach().cpu().numpy(), net.weight.grad.numpy(), net.bias.data.numpy()),
    "array by numpy": lambda net: np.linalg.norm(np.asarray(net.weight.detach().cpu())),
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
    "members": lambda net: (net.weight in set(net.parameters), any(p is net.weight for p in net.parameters)),
    "state dict": lambda net: sorted(
        (name, value.double().abs().sum().item()) for name, value in net.module.state_dict().items()
    ),
}


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
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


INITIALISERS: dict[str, Snippet] = {
    "orthogonal": lambda net: nn.init.orthogonal_(net.weight),
    "constant": lambda net: nn.init.constant_(tensor=net.weight, val=0.3),
    "zeros": lambda net: (nn.init.zeros_(net.bias), nn.init.ones_(net.short)),
    "normal": lambda net: (nn.init.normal_(net.weight, std=0.1), nn.init.normal_(net.short)),
}


def _seeded(snippet: Snippet) -> Snippet:
    def run(net: Trained) -> Any:
        torch.manual_seed(3)
        snippet(net)
        return torch.rand(2, dtype=torch.float64)  # all ranks have drawn as often

    return run


CLIPS: dict[str, Snippet] = {
    "norm": lambda net: clip_grad_norm_(net.module.parameters(), 0.1),
    "norm without foreach": lambda net: clip_grad_norm_(net.parameters, 0.1, norm_type=1, foreach=False),
    "value": lambda net: clip_grad_value_(net.module.parameters(), 0.005),
}


WRITES: dict[str, Snippet] = {
    **{f"penalty by {name}": _penalise(loss) for name, loss in LOSSES.items()},
    **{f"initialised {name}": _seeded(snippet) for name, snippet in INITIALISERS.items()},
    **{f"clipped by {name}": clip for name, clip in CLIPS.items()},
    "by a function that counts nothing": lambda net: net.weight.grad.apply_(lambda value: value / 2),
    "by an operator that counts nothing": lambda net: torch.ops.lightning_automodel_tests.halve(
        net.weight.grad
    ),
    "rows zeroed": lambda net: net.weight.grad.__setitem__(rows(net.weight), 0),
    "elements masked": lambda net: net.weight.grad.__setitem__(net.weight.grad > 0, 0),
    "slice by method": lambda net: net.weight.grad[2:4].mul_(0.5),
    "view": lambda net: net.weight.grad.view(-1)[::3].zero_(),
    "whole view": lambda net: net.weight.data.view(-1).mul_(0.5),
    "transposed wholly": lambda net: net.weight.grad.T.mul_(2),
    "kernel": lambda net: net.conv.grad[:, 0, 1].zero_(),
    "short row": lambda net: net.short.grad[0, 1:].mul_(3),
    "mask filled": lambda net: net.weight.grad.masked_fill_(even_rows(net.weight)[:, None], 0),
    "multiplied by a number that was read": lambda net: net.weight.grad.mul_(
        min(1.0, 0.1 / float(net.weight.grad.norm()))
    ),
    "multiplied by a norm": lambda net: net.weight.grad.div_(net.weight.grad.norm() + 1),
    "by data": lambda net: net.weight.grad.data.__setitem__(4, ramp(net.weight[0])),
}


def _methods(table: type[Trained]) -> dict[str, Snippet]:
    """Those of one of the tables below, by their names in words."""
    own = vars(table).items()
    return {name.replace("_", " "): method for name, method in own if not name.startswith("__")}


class Reads(Trained):
    """Each returns something."""

    def copied(self) -> Any:
        copied = copy.deepcopy(self.weight)
        cloned = self.weight.detach().clone()
        copied.data.add_(1)
        cloned.zero_()
        return copied.sum(), cloned.sum(), self.weight.sum()

    def into_plain_tensors(self) -> Any:
        mean = torch.zeros(self.weight.shape, dtype=torch.float64)
        mean.copy_(self.weight.detach())
        mean.mul_(0.9).add_(self.weight.grad, alpha=0.1)
        mean.lerp_(self.other.detach(), 0.25)
        mean += self.weight.detach()
        mean[rows(mean)] = self.weight.detach()[rows(mean)]
        torch._foreach_add_([mean], [self.weight.grad], alpha=2)
        return mean

    def out(self) -> Any:
        result = torch.empty(self.weight.shape, dtype=torch.float64)
        norms = torch.empty(self.weight.shape[1], dtype=torch.float64)
        torch.add(self.weight.grad, self.other.grad, out=result)
        torch.linalg.vector_norm(self.weight.grad, dim=0, out=norms)
        return result, norms

    def drawn(self) -> Any:
        torch.manual_seed(3)
        weight = self.weight.detach()
        probabilities = weight.sigmoid()
        return (
            *(torch.rand_like(weight), torch.randn_like(input=self.weight.grad), weight.bernoulli(0.5)),
            *(torch.bernoulli(probabilities), torch.normal(weight, 0.1), F.dropout(weight, 0.5)),
            *(
                torch.multinomial(probabilities[0], 3),
                torch.randint_like(weight, 9),
                torch.rand(2, dtype=weight.dtype),
            ),
        )

    def gradient_of_a_gradient(self) -> Any:
        first = torch.autograd.grad((self.weight**3).mean(), self.weight, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), self.weight)[0]

    def one_argument(self) -> Any:
        return (
            torch.where(self.weight > 0),
            2**self.weight,
            1 - self.weight,
            1 / (self.weight + 3),
            self.weight // 1,
            -self.bias,
        )

    def made_alike(self) -> Any:
        weight = self.weight.detach()
        return (
            *(weight.new_zeros(3), weight.new_full((2,), 0.5), weight.new_tensor([1.0, 2.0])),
            *(torch.zeros_like(weight), torch.full_like(weight, 2.0), torch.ones_like(self.bias.grad)),
            *(weight.type(), str(weight.layout), weight.is_cuda),
        )


class Writes(Trained):
    """Each changes weights, gradients or states."""

    def penalty_by_backward(self) -> Any:
        penalty = (
            F.mse_loss(self.weight, ramp(self.weight))
            + self.other.norm(dim=0).sum()
            + self.bias.square().sum()
        )
        penalty.backward()
        return penalty

    def penalty_by_backward_to_inputs(self) -> None:
        F.smooth_l1_loss(self.weight, self.other).backward(inputs=[self.weight])

    def penalty_between_parameters(self) -> None:
        gradients = torch.autograd.grad(
            F.mse_loss(self.weight, self.other) + self.short.norm(), [self.weight, self.other]
        )
        for parameter, gradient in zip((self.weight, self.other), gradients, strict=True):
            parameter.grad.add_(gradient, alpha=0.1)

    def averaged_by_a_collective(self) -> None:
        if dist.is_initialized():
            dist.all_reduce(self.weight.grad)
            self.weight.grad[1:] /= dist.get_world_size()
            self.weight.grad[0] /= dist.get_world_size()

    def slice_in_place(self) -> None:
        self.weight.grad[2:4] *= 0.5

    def row_copied(self) -> None:
        self.weight.grad[0] = self.weight.grad[4]

    def each_row(self) -> None:
        for row in self.weight.grad:
            row.div_(row.norm() + 1e-6)

    def slice_kept(self) -> Any:
        """It shows what was written to the whole since, and writes to it afterwards."""
        part = self.weight.grad[2:4]
        self.weight.grad.mul_(2)
        seen = part.clone()
        part.add_(1)
        self.weight.grad.mul_(2)
        return seen, part.sum()

    def slices_in_a_list(self) -> None:
        torch._foreach_mul_([self.weight.grad[:2], self.weight.grad[3:], self.other.grad[1]], 0.5)

    @torch.no_grad()
    def weight_decay(self) -> None:
        for p in self.parameters:
            p.mul_(0.99)
            p.add_(p.grad, alpha=-0.1)
            p.sub_(0.01 * p.grad.sign())

    @torch.no_grad()
    def rows_of_weights(self) -> None:
        self.weight[2:] = 0
        self.weight[0].fill_(0.5)
        self.other[:, 1:3] *= 2
        self.short[0, 0] = 1
        self.conv[rows(self.conv)] = 0.1

    def data(self) -> None:
        self.weight.data.mul_(0.9)
        self.weight.data[rows(self.weight)] = 0
        self.weight.data[3:].zero_()
        self.other.data = self.other.data * 0.5
        self.short.data = F.normalize(self.short.data, dim=1)
        self.bias.data -= 0.1

    def data_from_plain(self) -> None:
        for p in (self.weight, self.short, self.bias, self.conv):
            p.data = ramp(p)
        self.other.data.copy_(ramp(self.other))

    @torch.no_grad()
    def normalised(self) -> None:
        self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        self.other.copy_(F.normalize(self.other, dim=0))
        self.short.renorm_(2, 0, 0.5)

    @torch.no_grad()
    def pruned(self) -> None:
        threshold = self.weight.abs().flatten().kthvalue(6).values
        self.weight.mul_(self.weight.abs() > threshold)
        self.other[self.other.abs() < self.other.abs().quantile(0.3)] = 0

    @torch.no_grad()
    def vectors(self) -> None:
        vector = parameters_to_vector(self.module.parameters())
        vector_to_parameters(0.9 * vector + 0.01 * ramp(vector), self.module.parameters())

    @torch.no_grad()
    def fused(self) -> None:
        self.weight.addcmul_(self.other, ramp(self.other), value=0.1)
        self.other.addcdiv_(ramp(self.weight), self.weight.grad.abs() + 1, value=-0.1)
        self.short.addmm_(self.short[:, :1], ramp(self.short), alpha=0.1)
        torch._foreach_addcmul_(
            [self.weight, self.bias], [self.other, self.bias], [ramp(self.other), ramp(self.bias)], 0.1
        )

    @torch.no_grad()
    def lists(self) -> None:
        gradients = [p.grad for p in self.parameters]
        torch._foreach_mul_(gradients, 0.5)
        torch._foreach_add_(gradients, [ramp(p) for p in self.parameters], alpha=0.01)
        torch._foreach_add_([p.detach() for p in self.parameters], gradients, alpha=-0.1)
        torch._foreach_mul_(gradients, [float(i) for i in range(len(gradients))])
        torch._foreach_div_(gradients, torch.tensor(3.0, dtype=torch.float64))
        torch._foreach_clamp_max_(gradients, 0.1)

    @_seeded
    def layers_reset(self) -> None:
        for layer in self.module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()

    @_seeded
    @torch.no_grad()
    def noise(self) -> None:
        for p in self.parameters:
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            p.grad.add_(torch.normal(0.0, 0.1, p.shape, dtype=p.dtype))
        self.weight.grad.mul_(torch.rand_like(input=self.weight) < 0.8)
        self.weight.add_(torch.full_like(self.weight, 0.1).bernoulli())
        self.other.grad.normal_(std=0.1)
        self.short.data.uniform_(-1, 1)
        self.other.grad.copy_(F.dropout(self.other.grad, 0.5))
        self.bias.grad.add_(torch.empty_like(self.bias).exponential_())

    def gradient_replaced(self) -> None:
        self.weight.grad = ramp(self.weight)
        self.other.grad = self.other.grad * 2
        self.short.grad = torch.zeros_like(self.short)
        self.bias.grad = None

    def zeroed(self) -> Any:
        self.module.zero_grad(set_to_none=False)
        seen = sum(p.grad.abs().sum() for p in self.parameters)
        self.module.zero_grad()
        return seen, [p.grad is None for p in self.module.parameters()]

    def frozen_for_a_while(self) -> Any:
        self.weight.requires_grad_(False)
        self.weight.mul_(0.5)
        seen = self.weight.requires_grad
        self.module.to(self.weight.device)
        self.weight.requires_grad_(True)
        return seen, self.weight.requires_grad

    def states(self) -> Any:
        state = self.optimizer.state
        state[self.weight]["exp_avg"][rows(self.weight)] = 0
        state[self.weight]["exp_avg_sq"][2:4].mul_(4)
        state[self.other]["exp_avg"].zero_()
        state[self.short]["exp_avg"].copy_(ramp(self.short))
        return state[self.weight]["exp_avg"].norm(), state[self.other]["exp_avg_sq"].amax(dim=0)

    def two_views(self) -> Any:
        first = self.weight.grad[:2]
        second = self.weight.grad[1:4]
        first.mul_(2)
        second.add_(1)
        seen = first.sum()
        second[0] = first[0] * 3
        second[2] -= first[1]
        return seen, first.norm(), second.clone()

    def view_and_whole(self) -> Any:
        flat = self.weight.grad.view(-1)
        self.weight.grad.zero_()
        flat[2:7] = 1
        torch.add(self.weight.grad, 1, out=self.weight.grad)
        flat.clamp_(max=1.5)
        self.weight.grad.copy_(self.weight.grad.flip(0))
        return flat.sum()

    def data_kept(self) -> Any:
        """It stays as it is when the parameter gets other values."""
        kept = self.weight.data
        self.weight.data = self.weight.data * 2
        return kept.sum(), kept[1:].norm(dim=0), (kept * 1).sum(), self.weight.sum()

    def view_that_autograd_follows(self) -> Any:
        with torch.enable_grad():
            part = self.weight[2:]
        with torch.no_grad():
            self.weight.mul_(2)
        return part.sum()

    def written_with_gradient(self) -> Any:
        with torch.enable_grad():
            scaled = self.weight * 2
            scaled += ramp(self.weight)
            scaled.mul_(self.other)
            penalty = scaled.square().sum()
            self.short.grad.add_(self.short, alpha=0.1)
        penalty.backward()
        self.short.grad = self.short.grad.detach()
        return penalty

    def view_with_gradient(self) -> Any:
        with torch.enable_grad():
            penalty = (
                (self.weight[2:] ** 2).sum() + self.weight.unbind()[0].prod() + self.weight.T[1].exp().mean()
            )
        penalty.backward()
        return penalty

    def leaf_made_of_a_copy(self) -> None:
        leaf = self.weight.detach().clone().requires_grad_()
        other = torch.zeros_like(self.weight, requires_grad=True)
        ((leaf * 2 - other).square().mean() + leaf.norm(dim=0).sum()).backward()
        self.weight.grad.add_(leaf.grad).sub_(other.grad)

    def by_functional_transforms(self) -> Any:
        hessian = torch.autograd.functional.hessian(lambda bias: (bias**3).sum(), self.bias)
        self.bias.grad.mul_(hessian.flatten())
        vector = ramp(self.weight)
        product = torch.autograd.functional.vjp(lambda p: p @ p.T @ p, self.weight, vector)[1]
        self.weight.grad.add_(product)
        return hessian

    @torch.no_grad()
    def written_by_functions(self) -> Any:
        F.relu(self.weight.grad, True)
        F.threshold_(self.other.grad, 0.0, 0.1)
        torch.clamp_(input=self.short.grad, min=-0.01, max=float("inf"))
        F.normalize(self.other.data, dim=1, out=self.other.data)
        torch.mul(self.weight.grad, 2, out=self.weight.grad)
        self.bias.grad.data.fill_(self.bias.grad.norm())
        self.other.copy_(self.other.flip(0))
        torch._foreach_mul_([self.weight.grad, self.other.grad], self.bias[0])
        torch._foreach_copy_([self.short.data], [ramp(self.short)])

    @torch.no_grad()
    def plain_gets_shards(self) -> Any:
        plain = ramp(self.weight)
        plain[plain < self.weight] = 0
        plain[1:3] = self.other[1:3]
        plain[0].add_(self.weight[0]).mul_(self.weight.grad[0].norm())
        plain *= self.other
        torch._foreach_lerp_([plain, self.weight.grad], [self.weight, ramp(self.weight)], 0.5)
        self.weight.sub_(plain)
        return plain

    def module_moved(self) -> Any:
        self.module.double().cpu().to("cpu")
        return self.weight.requires_grad, len(list(self.module.parameters()))

    def states_loaded(self) -> Any:
        """Weights and states are kept, spoilt and loaded again; some weights are loaded from plain tensors."""
        weights = copy.deepcopy(self.module.state_dict())
        states = copy.deepcopy(self.optimizer.state_dict())
        with torch.no_grad():
            for p in self.parameters:
                p.mul_(2)
                self.optimizer.state[p]["exp_avg"].zero_()
        self.module.load_state_dict({name: value * 0.5 for name, value in weights.items()})
        self.optimizer.load_state_dict(states)
        name = next(name for name, p in self.module.named_parameters() if p is self.other)
        self.module.load_state_dict({name: ramp(self.other)}, strict=False)
        return self.optimizer.state[self.weight]["exp_avg"].sum()

    @torch.no_grad()
    def sparse_and_dense(self) -> Any:
        sparse = self.weight.grad.to_sparse()
        values, indices = self.weight.grad.abs().flatten().sort(descending=True)
        self.weight.grad.view(-1)[indices[5:]] = 0
        return sparse.to_dense().sum(), values[:5], torch.nonzero(self.weight.grad, as_tuple=True)[0]


READS |= _methods(Reads)
WRITES |= _methods(Writes)
