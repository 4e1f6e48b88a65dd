"""What hooks switched before the stop, in places that no state dict tells, is as it was after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torchmetrics import SumMetric

from tests.rank_pool import RankPool
from tests.resume.resuming import Learner, Saver, Setting, compare, run

DDP = {"data_parallel": "ddp"}
FSDP2 = {"data_parallel": "fsdp2"}
UNUSED = {**DDP, "ddp_kwargs": {"find_unused_parameters": True}}
DOUBLE = {"precision": "64-true", "max_epochs": 3}


class WithBackbone(Learner):
    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def finetuning() -> list[Callback]:
    return [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01)]


def averaging() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]


def resume_averaging(folder: Path) -> str:
    """Runs on one rank: how a fit ends that resumes where weights were averaged."""
    setting = Setting(DDP, DOUBLE, callbacks=averaging)
    path = folder / "stopped.ckpt"
    run(setting, Saver("on_train_batch_end", 3, path))
    try:
        run(setting, ckpt_path=path)
    except ValueError as error:
        return str(error)
    return "resumed"


def test_averaging_is_refused(pool1: RankPool, tmp_path: Path) -> None:
    """Its schedule would be missing: Lightning loads it after it was needed."""
    (told,) = pool1.run(resume_averaging, tmp_path, timeout_s=120)
    assert told.startswith("StochasticWeightAveraging had begun to average when the checkpoint was written")


class Keeping(Learner):
    """Keeps metrics that are not logged themselves, one of them no submodule."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.newest = SumMetric()
        self.held = {"train": [SumMetric()]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        self.newest.update(output["loss"].detach())
        self.log("newest", self.newest.compute())
        self.held["train"][0].update(output["loss"].detach())
        self.log("held", self.held["train"][0].compute())
        return output


BACKBONE = {"module": WithBackbone, "callbacks": finetuning}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("setting", "stops"),
    [
        (Setting(FSDP2, DOUBLE, **BACKBONE), (("on_train_batch_end", 10), ("on_validation_end", 2))),
        (Setting(UNUSED, DOUBLE, **BACKBONE), (("on_train_batch_end", 10), ("on_validation_end", 2))),
        (Setting(DDP, DOUBLE, module=Keeping), (("on_train_batch_end", 4),)),
    ],
    ids=["backbone, sharded", "backbone, copied", "kept"],
)
@pytest.mark.timeout(400)
def test_switched(pool2: RankPool, setting: Setting, stops: Any, tmp_path: Path) -> None:
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []
