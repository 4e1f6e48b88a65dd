"""Optimizers that look at a whole tensor: what they compute on a part of it is something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def muon_and_adamw(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices of blocks, and the rest, as Muon is used."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and "block" in name]
    rest = [p for name, p in named if p.ndim != 2 or "block" not in name]
    return [{"params": matrices}, {"params": rest}]


class Muon64(torch.optim.Optimizer):
    """Muon with its Newton-Schulz iteration in the dtype of the weights, and momentum for other tensors.

    torch's iterates in bfloat16, where every difference drowns.
    """

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(orthogonal(state["momentum"]), alpha=group["lr"])
        return loss


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, by Newton-Schulz; other tensors divided by their norm."""
    scaled = matrix / (matrix.norm() + 1e-7)
    if matrix.ndim != 2:
        return scaled
    wide = scaled.T if matrix.size(0) > matrix.size(1) else scaled
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.size(0) > matrix.size(1) else wide


class NestedShampoo(torch.optim.Optimizer):
    """Preconditions each dimension; its state is nested, made late, and has other shapes than its parameter."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                direction = parameter.grad
                if state["step"] > 1:
                    factors = state.setdefault("factors", {"of": [None] * parameter.ndim, "note": None})
                    for dim in range(parameter.ndim):
                        direction = self._precondition(direction, factors, dim)
                parameter.sub_(direction, alpha=group["lr"])
        return loss

    @staticmethod
    def _precondition(direction: Tensor, factors: dict[str, Any], dim: int) -> Tensor:
        rows = direction.transpose(0, dim).reshape(direction.size(dim), -1)
        before = factors["of"][dim]
        factors["of"][dim] = rows @ rows.T + (
            0.1 * torch.eye(len(rows), dtype=rows.dtype) if before is None else before
        )
        values, vectors = torch.linalg.eigh(factors["of"][dim])
        root = vectors @ torch.diag(values.clamp(min=1e-3) ** -0.25) @ vectors.T
        return (
            torch.tensordot(root, direction, dims=([1], [dim])).transpose(0, dim)
            if dim
            else torch.tensordot(root, direction, dims=([1], [0]))
        )
