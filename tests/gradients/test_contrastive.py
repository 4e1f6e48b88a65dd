"""A contrastive loss over the batch, as CLIP has, of features gathered from all ranks: docs/tell_the_count.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Outcome, full_weights, relative_error, weight_error
from tests.trainer.plain import fill
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, make_trainer

STEPS = 3
ROWS = 4
FEATURES = 5


class Towers(nn.Module):
    """Features of two views, and a scale that only the gathered features meet."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(FEATURES, 3)
        self.text = nn.Linear(FEATURES, 3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        fill(self)

    def forward(self, batch: Tensor) -> Tensor:
        # [b, 2, d]
        return torch.stack([F.normalize(self.image(batch)), F.normalize(self.text(batch + 1))], dim=1)


def contrast(features: Tensor, scale: Tensor) -> Tensor:
    logits = scale.exp() * features[:, 0] @ features[:, 1].T  # [b, b]
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Contrastive(LightningModule):
    def __init__(self, own_gradients: bool = False) -> None:
        super().__init__()
        self.model = Towers()
        self.own_gradients = own_gradients

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        features = self.model(batch)
        if self.own_gradients:
            gathered = list(self.all_gather(features.detach()))
            gathered[self.global_rank] = features
            return contrast(torch.cat(gathered), self.model.scale)
        return contrast(self.all_gather(features, sync_grads=True).flatten(0, 1), self.model.scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def batches() -> Tensor:
    return torch.randn(
        STEPS, 2, ROWS, FEATURES, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )


def _train(options: dict[str, Any]) -> dict[str, Tensor]:
    module = Contrastive()
    data = DataLoader(list(batches()[:, dist.get_rank()]), batch_size=None)
    make_trainer(AutomodelStrategy(count="samples", **options)).fit(module, data)
    return full_weights(module)


@pytest.mark.parametrize(
    "options", by_default({**STRATEGIES, "ahead": {"count_window_ahead": True}}, "kept", "ddp")
)
def test_gathered_features_give_the_gradients_of_one_batch(pool2: RankPool, options: dict[str, Any]) -> None:
    """Without a factor: each rank's loss is that of the whole batch, and its weight the rank's share of the samples."""
    module = Contrastive()
    optimizer = module.configure_optimizers()
    for batch in batches().flatten(1, 2):
        optimizer.zero_grad()
        contrast(module.model(batch), module.model.scale).backward()
        optimizer.step()
    for weights in pool2.run(_train, options):
        assert weight_error(Outcome(weights, None), Outcome(full_weights(module), None)) <= TOLERANCE


def _step(own_gradients: bool) -> dict[str, Tensor]:
    """What one step changes."""
    module = Contrastive(own_gradients)
    before = full_weights(module)
    data = DataLoader(list(batches()[:1, dist.get_rank()]), batch_size=None)
    make_trainer(AutomodelStrategy(count="samples")).fit(module, data)
    return {name: weight - before[name] for name, weight in full_weights(module).items()}


def test_features_of_other_ranks_without_gradients_divide_them(pool2: RankPool) -> None:
    """By the number of ranks, as the page has it."""
    exact, _ = pool2.run(_step, False)
    divided, _ = pool2.run(_step, True)
    for name in ("model.image.weight", "model.text.weight"):
        assert relative_error(2 * divided[name], exact[name]) <= TOLERANCE
