"""Muon for matrices and AdamW for the rest, as the one optimizer that automatic optimization steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` in one: Muon's group of parameters comes first.

    State and groups are this optimizer's alone, so that schedulers, checkpoints and the strategy see one
    optimizer.

    Args:
        matrices: For Muon: weights of layers within the model, not of embeddings or the head.
        others: For AdamW.
        muon: Options of Muon.
        adamw: Options of AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        self._parts = [torch.optim.Muon(matrices, **muon), torch.optim.AdamW(others, **adamw)]
        super().__init__([part.param_groups[0] for part in self._parts], {})
        # For `AutomodelStrategy`: this optimizer looks at no parameter itself, so that owners may step the matrices.
        self.param_groups[0]["optimizer_step"] = "whole"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state = self.state
            part.step()
        return loss
