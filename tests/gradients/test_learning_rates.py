"""A scheduler that follows a metric decides alike on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import LEARNING_RATE, Batch
from tests.trainer.runs import LabelledModule, loader, make_trainer

METRICS = ([1.0, 5.0, 3.0], [6.0, 1.0, 2.0])
"""What each rank logs. By itself the first rank would halve its learning rate twice, the second one once."""


class FollowsItsMetric(LabelledModule):
    """Each rank logs a metric of its own. Its scheduler halves the learning rate as soon as the metric rises."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        options = {"scheduler": scheduler, "monitor": "metric", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": options}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("metric", METRICS[dist.get_rank()][batch_idx])
        return super().training_step(batch, batch_idx)


class FollowsByHand(FollowsItsMetric):
    """As Lightning's documentation has it for manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["metric"])


def _learning_rate(make_module: type[FollowsItsMetric]) -> tuple[float, bool, bool]:
    """The last learning rate, whether somebody was told, and whether torch's class is as before."""
    step = ReduceLROnPlateau.step
    module = make_module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(AutomodelStrategy(), limit_train_batches=3).fit(module, loader())
    optimizer = module.optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    is_told = any("monitors differs between ranks" in str(warning.message) for warning in caught)
    return optimizer.param_groups[0]["lr"], is_told, ReduceLROnPlateau.step is step


@pytest.mark.every_case
@pytest.mark.parametrize("make_module", [FollowsItsMetric, FollowsByHand])
def test_ranks_share_the_learning_rate(pool2: RankPool, make_module: type[FollowsItsMetric]) -> None:
    """The means are 3.5, 3 and 2.5: each is better than the one before, and the learning rate stays."""
    by_rank = pool2.run(_learning_rate, make_module)
    assert [rate for rate, _, _ in by_rank] == [LEARNING_RATE] * 2
    assert [is_told for _, is_told, _ in by_rank] == [True, False]
    assert all(is_restored for _, _, is_restored in by_rank)
