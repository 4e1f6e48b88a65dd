"""Optimizers that look at a whole tensor, and modules that train with them: on a part, they compute something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from tests.trainer.exactness import PLAN
from tests.trainer.plain import ModelModule, filled_decoder


class Looking(torch.optim.Optimizer):
    """Steps each parameter along the direction that a subclass finds."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(group, parameter, loss), alpha=group["lr"])
        return loss

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        return parameter.grad


class Muon64(Looking):
    """Muon with its Newton-Schulz iteration in the dtype of the weights; torch's is in bfloat16, which hides errors.

    Groups with ``is_elementwise`` have momentum alone.
    """

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 0.1)
        return momentum if group.get("is_elementwise") else _orthogonal(momentum)


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, by Newton-Schulz; other tensors divided by their norm."""
    scaled = matrix / (matrix.norm() + 1e-7)
    if matrix.ndim != 2:
        return scaled
    is_tall = matrix.size(0) > matrix.size(1)
    wide = scaled.T if is_tall else scaled
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if is_tall else wide


class NestedShampoo(Looking):
    """Preconditions each dimension; its state is nested, comes late, and has other shapes than its parameter."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        direction = parameter.grad
        if state["step"] == 1:
            return direction
        factors = state.setdefault("factors", {"of": [None] * parameter.ndim, "note": None})["of"]
        for dim in range(parameter.ndim):
            rows = direction.transpose(0, dim).flatten(1) if parameter.ndim > 1 else direction[:, None]
            if factors[dim] is None:
                factors[dim] = 0.1 * torch.eye(len(rows), dtype=rows.dtype)
            factors[dim] = factors[dim] + rows @ rows.T
            values, vectors = torch.linalg.eigh(factors[dim])
            root = vectors @ torch.diag(values.clamp(min=1e-3) ** -0.25) @ vectors.T
            direction = torch.tensordot(root, direction, dims=([1], [dim])).transpose(0, dim)
        return direction


class ByLoss(Looking):
    """Scales its steps by the loss that the closure returns."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        return parameter.grad * (1 + loss)


class Coupled(Looking):
    """One step size for all parameters, which it keeps in its group."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        group["seen"] = group.get("seen", 0.0) + parameter.grad.abs().sum().item()
        return parameter.grad / (1 + group["seen"])


def muon_and_momentum(model: nn.Module) -> Muon64:
    """Matrices of blocks, and the rest, as Muon is used; the vectors of the blocks are frozen in one group."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "blocks" in name]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "blocks" not in name]
    return Muon64([{"params": matrices}, {"params": rest, "is_elementwise": True, "lr": 0.05}])


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": muon_and_momentum,
    "shampoo": lambda model: NestedShampoo(_trained(model)),
    "adafactor": lambda model: torch.optim.Adafactor(_trained(model), lr=0.02),
    "by loss": lambda model: ByLoss(_trained(model)),
    "coupled": lambda model: Coupled(_trained(model)),
}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class WholeModule(ModelModule):
    """Trains a small decoder with one of the `KINDS`; ``tensor`` shares it between tensor-parallel ranks."""

    def __init__(self, kind: str, tensor: bool = False) -> None:
        super().__init__(filled_decoder())
        self.kind = kind
        self.tensor = tensor

    def configure_model(self) -> None:
        if self.tensor:
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KINDS[self.kind](self)
