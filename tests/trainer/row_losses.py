"""Models that give a loss for each row, trained for two windows of two batches, on ranks and in one plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.gradients.test_foreign_gradients import ACCUMULATE, WIDTH, Batch, Trains, fit_or_error, plainly

__all__ = ["WIDTH", "RowModule", "RowModuleByHand", "fill", "fit_rows", "train_rows_plainly"]


def fill(model: nn.Module) -> nn.Module:
    """The same weights in every process."""
    generator = torch.Generator().manual_seed(3)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


class RowModule(Trains):
    """Steps after two batches. The model's ``losses`` takes rows [b, d] and returns [b]."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = fill(make_model())

    def loss(self, batch: Batch) -> Tensor:
        return self.net.losses(batch[0].clone()).mean()


class RowModuleByHand(RowModule):
    """The same under manual optimization."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        super().__init__(make_model)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        is_last = batch_idx % ACCUMULATE == ACCUMULATE - 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch))
        self.after_backward(batch)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    def after_backward(self, batch: Batch) -> None:
        """What a step does between its backward and the optimizer's step."""


def fit_rows(module: RowModule, options: dict[str, Any]) -> dict[str, Tensor] | str:
    """Weights after a fit on the ranks of the pool, or the message of its RuntimeError."""
    return fit_or_error(lambda: module, options, ACCUMULATE if module.automatic_optimization else 1)


def train_rows_plainly(model: nn.Module) -> dict[str, Tensor]:
    """What one process makes of the rows of two ranks."""
    return plainly(ACCUMULATE, sums=lambda net, batch: net.losses(batch[0]).sum(), net=fill(model))
