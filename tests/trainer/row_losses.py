"""Models that give a loss for each row, trained for two windows of two batches, on ranks and in one plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.trainer.exactness import LEARNING_RATE, full_weights
from tests.trainer.runs import make_trainer

WIDTH = 6
WINDOWS = ((0, 1), (2, 3))


def rows(rank: int, index: int) -> Tensor:
    """[b, d], b from 2 to 6 differs by rank and index."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(2 + 3 * rank + index % 2, WIDTH, generator=generator, dtype=torch.float64)


def fill(model: nn.Module) -> nn.Module:
    """The same weights in every process."""
    generator = torch.Generator().manual_seed(3)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


class RowModule(LightningModule):
    """Steps after two batches. The model's ``losses`` takes rows [b, d] and returns [b]."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = fill(make_model())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model.losses(batch.clone()).mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            [rows(dist.get_rank(), index) for window in WINDOWS for index in window], batch_size=None
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.model)


class RowModuleByHand(RowModule):
    """The same under manual optimization."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        super().__init__(make_model)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(super().training_step(batch, batch_idx))
        self.after_backward(batch)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    def after_backward(self, batch: Tensor) -> None:
        """What a step does between its backward and the optimizer's step."""


def fit_rows(module: RowModule, options: dict[str, Any]) -> dict[str, Tensor] | str:
    """Weights after a fit on the ranks of the pool, or the message of its RuntimeError."""
    accumulate = 2 if module.automatic_optimization else 1
    try:
        make_trainer(AutomodelStrategy(count="samples", **options), accumulate_grad_batches=accumulate).fit(
            module
        )
    except RuntimeError as error:
        return str(error)
    return full_weights(module.model)


def train_rows_plainly(model: nn.Module) -> dict[str, Tensor]:
    """What one process makes of the rows of two ranks."""
    optimizer = sgd(fill(model))
    calls = 0
    for window in WINDOWS:
        optimizer.zero_grad()
        losses = []
        for index in window:
            for rank in range(2):
                model.calls = calls  # for models that count them, on each rank by itself
                losses.append(model.losses(rows(rank, index)))
            calls += 1
        torch.cat(losses).mean().backward()
        optimizer.step()
    return full_weights(model)
