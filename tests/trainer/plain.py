"""Any small language model, trained by the strategy and by a plain single-process loop over the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.trainer.cases import Case
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
)
from tests.trainer.runs import CASE, mean_loss

Gradients = list[dict[str, Tensor]]


def windows(case: Case, accumulate: int) -> list[list[int]]:
    """The micro-batch indices of each window of an epoch, the last one short."""
    indices = list(range(case.num_batches))
    return [indices[start : start + accumulate] for start in indices[::accumulate]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum over everything that is trainable."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trainable, lr=LEARNING_RATE, momentum=MOMENTUM)


class ModelModule(LightningModule):
    """Trains `model`, [b, s] ids to [b, s, v] logits, on the mean loss; tells it the step where it wants to know."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return mean_loss(self.model, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.model.step = batch_idx
        return self(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("validation_loss", self(batch), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def token_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """The sum of token losses of a micro-batch, and how many there are."""
    return mean_loss(model, batch, "sum"), (batch["labels"] != -100).sum()


def train_model_plainly(
    model: nn.Module,
    accumulate: int,
    case: Case = CASE,
    sums: Callable[[Any, Batch], tuple[Tensor, Any]] = token_sums,
    clip: Callable[[list[nn.Parameter]], Any] = lambda parameters: None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    epochs: int = 1,
    max_steps: int | None = None,
    by_rank: list[list[Batch]] | None = None,
) -> Gradients:
    """Train `model` in place over the token means of whole windows of all ranks; return each step's gradients.

    The model is told the rank and the step of a micro-batch, of which `sums` gives loss and count. The micro-batches
    may be others than those of the case, ``by_rank``. Gradients are
    divided after backward, not the loss before it: where a model computes in float32, rounding depends on the divisor.
    """
    optimizer = make_optimizer(model)
    seen: Gradients = []
    for window in (windows(case, accumulate) * epochs)[:max_steps]:
        optimizer.zero_grad()
        total = 0.0
        counted = 0.0
        for model.rank, batches in enumerate(by_rank or micro_batches(case)):
            for model.step in window:
                loss, count = sums(model, batches[model.step])
                loss.backward()
                total += loss.item()
                counted += float(count)
        divisor = max(counted, 1e-9)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        clip(list(model.parameters()))
        optimizer.step(lambda mean=total / divisor: mean)
    return seen


def plain_weights(model: nn.Module, accumulate: int, case: Case = CASE, **kwargs: Any) -> dict[str, Tensor]:
    """Weights of `model` after `train_model_plainly`."""
    train_model_plainly(model, accumulate, case, **kwargs)
    return full_weights(model)


def fill(model: nn.Module) -> None:
    """Give every parameter a seeded value away from zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    model.double()


def filled_decoder() -> nn.Module:
    """A decoder of three blocks."""
    model = TinyDecoder(seed=1)
    fill(model)
    return model


def differ_by_rank(model: nn.Module) -> None:
    """Leave what rank 0 starts with, and change everything elsewhere."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(dist.get_rank())


def prefixed(weights: dict[str, Tensor]) -> Outcome:
    """Weights of a model as those of the module that holds it."""
    return Outcome({f"model.{name}": weight for name, weight in weights.items()})
