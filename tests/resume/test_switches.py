"""What hooks switched before the stop, in places that no state dict tells, is as it was after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torchmetrics import MeanMetric, MinMaxMetric, SumMetric
from torchmetrics.wrappers import Running

from tests.rank_pool import RankPool
from tests.resume.resuming import Learner, Setting, compare, compare_chain

DDP, FSDP2 = {"data_parallel": "ddp"}, {"data_parallel": "fsdp2"}
UNUSED = {**DDP, "ddp_kwargs": {"find_unused_parameters": True}}
DOUBLE = {"precision": "64-true", "max_epochs": 3}
HALF = {"precision": "bf16-true", "num_sanity_val_steps": 2}
SECOND_EPOCH = (("on_train_batch_end", 10), ("on_validation_end", 2))
AVERAGING = (("on_train_batch_end", 3), ("on_train_epoch_end", 1), ("on_train_batch_end", 10))


class WithBackbone(Learner):
    """Its blocks are frozen at first."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def finetuning() -> list[Callback]:
    return [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01)]


def accumulating() -> list[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 3})]


def averaging() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]


class Unnormed(Learner):
    """Has no batch statistics, for which another epoch would follow the average."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.statistics = nn.Identity()


class Switching(Learner):
    """Trains less of itself from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.statistics.eval()
            self.embedding.requires_grad_(False)


class Keeping(Learner):
    """Keeps a generator, metrics with more than states, and a metric of a group, which nobody can save."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = torch.Generator().manual_seed(5)
        self.extremes, self.newest = MinMaxMetric(MeanMetric()), Running(SumMetric(), window=3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"] = output["loss"] * (1 + torch.rand((), generator=self.generator))
        self.extremes(loss.detach())
        self.newest.update(loss.detach())
        self.log("newest", self.newest.compute())
        group = torch.distributed.group.WORLD
        self.log("of_group", loss, on_step=False, on_epoch=True, sync_dist=True, sync_dist_group=group)
        return output

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.logger.log_metrics({name: float(value) for name, value in self.extremes.compute().items()}, 0)


class Casting(Learner):
    """Tells the dtype that a metric casts to, which is another once the metric was logged."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        self.log("itemsize", float(self.running.dtype.itemsize))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("setting", "stops"),
    [
        (Setting(FSDP2, DOUBLE, callbacks=accumulating), SECOND_EPOCH),
        (Setting(FSDP2, DOUBLE, module=WithBackbone, callbacks=finetuning), SECOND_EPOCH),
        (Setting(UNUSED, DOUBLE, module=WithBackbone, callbacks=finetuning), SECOND_EPOCH),
        (Setting(DDP, DOUBLE, {"schedule": "epoch"}, Unnormed, callbacks=averaging), AVERAGING),
        (Setting(FSDP2, {**DOUBLE, "val_check_interval": 3}, module=Switching), SECOND_EPOCH),
        (Setting(DDP, DOUBLE, module=Keeping), (("on_train_batch_start", 5),)),
        (
            Setting(FSDP2, HALF, {"optimizer": "sgd"}, Casting, loader="distributed"),
            (("on_before_optimizer_step", 10),),
        ),
    ],
    ids=["accumulation", "backbone, sharded", "backbone, copied", "average", "modes", "kept", "dtype"],
)
@pytest.mark.timeout(400)
def test_switched(pool2: RankPool, setting: Setting, stops: Any, tmp_path: Path) -> None:
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []


@pytest.mark.timeout(400)
def test_switched_and_stopped_twice(pool2: RankPool, tmp_path: Path) -> None:
    """The second checkpoint, too, tells what was switched before the first."""
    setting, stops = Setting(FSDP2, DOUBLE, module=Switching), (("on_train_batch_end", 9), ("on_train_batch_end", 2))
    for differing in pool2.run(compare_chain, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []
