"""What hooks switched before the stop, in places that no state dict tells, is as it was after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torchmetrics import SumMetric

from tests.rank_pool import RankPool
from tests.resume.resuming import Learner, Setting, compare, compare_chain

DDP, FSDP2 = {"data_parallel": "ddp"}, {"data_parallel": "fsdp2"}
UNUSED = {**DDP, "ddp_kwargs": {"find_unused_parameters": True}}
DOUBLE = {"precision": "64-true", "max_epochs": 3}
SECOND_EPOCH = (("on_train_batch_end", 10),)
VALIDATED = (("on_validation_end", 2),)
AVERAGING = (("on_train_batch_end", 3), ("on_train_epoch_end", 1))


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


def annealing() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=1, annealing_epochs=3)]


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
    """Keeps a generator and a metric that is not logged itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = torch.Generator().manual_seed(5)
        self.newest = SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"] = output["loss"] * (1 + torch.rand((), generator=self.generator))
        self.newest.update(loss.detach())
        self.log("newest", self.newest.compute())
        return output


class Zeroing(Learner):
    """Keeps gradients as zeros, with which weights that a batch does not use move on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Parameter(torch.ones(3))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        if batch_idx < 2:
            output["loss"] = output["loss"] + self.extra.square().sum()
        return output

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("setting", "stops"),
    [
        pytest.param(Setting(FSDP2, DOUBLE, callbacks=accumulating), SECOND_EPOCH + VALIDATED, marks=pytest.mark.sweep),
        (Setting(FSDP2, DOUBLE, module=WithBackbone, callbacks=finetuning), SECOND_EPOCH),
        pytest.param(
            Setting(UNUSED, DOUBLE, module=WithBackbone, callbacks=finetuning),
            SECOND_EPOCH + VALIDATED,
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            Setting(DDP, DOUBLE, {"schedule": "epoch"}, Unnormed, callbacks=averaging),
            AVERAGING,
            marks=pytest.mark.sweep,
        ),
        (
            Setting(DDP, {**DOUBLE, "max_epochs": 4}, {"schedule": "epoch"}, Unnormed, callbacks=annealing),
            AVERAGING[:1],
        ),
        pytest.param(
            Setting(FSDP2, {**DOUBLE, "max_epochs": 4}, {"schedule": "epoch"}, Unnormed, callbacks=annealing),
            (*AVERAGING, *SECOND_EPOCH),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            Setting(DDP, {**DOUBLE, "max_epochs": 2}, {"schedule": "epoch"}, callbacks=annealing),
            (*AVERAGING, *SECOND_EPOCH),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            Setting(FSDP2, {**DOUBLE, "val_check_interval": 3}, module=Switching), SECOND_EPOCH, marks=pytest.mark.sweep
        ),
        (Setting(UNUSED, DOUBLE, module=Zeroing), (("on_train_batch_end", 4),)),
        pytest.param(Setting(DDP, DOUBLE, module=Keeping), (("on_train_batch_start", 5),), marks=pytest.mark.sweep),
        pytest.param(
            Setting(FSDP2, DOUBLE, module=WithBackbone, callbacks=finetuning), VALIDATED, marks=pytest.mark.sweep
        ),
        pytest.param(
            Setting(FSDP2, {**DOUBLE, "val_check_interval": 3}, module=Switching), VALIDATED, marks=pytest.mark.sweep
        ),
    ],
    ids=[
        "accumulation",
        "backbone, sharded",
        "backbone, copied",
        "average",
        "schedule of averages",
        "schedule of averages, sharded",
        "schedule of averages, batch statistics",
        "modes",
        "zeroed gradients",
        "kept",
        "backbone, validated",
        "modes, validated",
    ],
)
@pytest.mark.timeout(400)
def test_switched(pool2: RankPool, setting: Setting, stops: Any, tmp_path: Path) -> None:
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_switched_and_stopped_twice(pool2: RankPool, tmp_path: Path) -> None:
    """The second checkpoint, too, tells what was switched before the first."""
    setting, stops = Setting(FSDP2, DOUBLE, module=Switching), (("on_train_batch_end", 9), ("on_train_batch_end", 2))
    for differing in pool2.run(compare_chain, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []
