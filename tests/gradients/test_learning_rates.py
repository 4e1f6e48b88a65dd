"""A scheduler that follows a metric must decide alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import LEARNING_RATE, Batch
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import LabelledModule, ManualModule, loader, make_trainer

METRICS = ([1.0, 5.0, 3.0], [6.0, 1.0, 2.0])
"""What each rank logs. By itself the first rank would halve its learning rate twice, the second one once."""


class FollowsItsMetric(LabelledModule):
    """Each rank logs a metric of its own. Its scheduler halves the learning rate as soon as the metric rises."""

    sync_dist = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        options = {"scheduler": scheduler, "monitor": "metric", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": options}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("metric", METRICS[dist.get_rank()][batch_idx], sync_dist=self.sync_dist)
        return super().training_step(batch, batch_idx)


class FollowsByHand(FollowsItsMetric, ManualModule):
    """As Lightning's documentation has it for manual optimization."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["metric"])


class FollowsTheMean(FollowsItsMetric):
    """Logs the metric as the message says: the means are 3.5, 3 and 2.5, each better than the one before."""

    sync_dist = True


REFUSED = {
    make.__name__: Refused(
        make,
        ("Ranks step with different options of their optimizers: lr of ", "sync_dist=True"),
        settings={"limit_train_batches": 3},
    )
    for make in (FollowsItsMetric, FollowsByHand)
}


def test_learning_rates_that_differ_are_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


def _last_learning_rate() -> float:
    trainer = make_trainer(AutomodelStrategy(), limit_train_batches=3)
    trainer.fit(FollowsTheMean(), loader())
    return trainer.optimizers[0].param_groups[0]["lr"]


def test_the_remedy(pool2: RankPool) -> None:
    assert pool2.run(_last_learning_rate) == [LEARNING_RATE] * 2
