"""What a Trainer can be told, and what people write first: under both engines, as the plain loop does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, full_weights, weight_error
from tests.trainer.runs import (
    CASE,
    TOLERANCE,
    LabelledModule,
    first_by_default,
    loader,
    make_trainer,
    train_plainly,
)

ACCUMULATE = 3
EPOCH = [[0, 1, 2], [3, 4, 5], [6, 7]]
ENGINES = first_by_default(["fsdp2", "ddp"])


@dataclass(frozen=True)
class Feature:
    """Settings of a Trainer, the windows that they lead to, and how many batches a rank validates on."""

    settings: dict[str, Any]
    windows: list[list[int]]
    validated: int = CASE.num_batches


FEATURES = {
    "fast_dev_run-4": Feature({"fast_dev_run": 4}, [[0, 1, 2], [3]], validated=4),
    "overfit_batches": Feature({"overfit_batches": 2, "max_epochs": 2}, [[0, 1]] * 2, validated=4),
    "limit_train_batches-half": Feature({"limit_train_batches": 0.5}, [[0, 1, 2], [3]]),
    "limit_val_batches": Feature({"limit_val_batches": 2}, EPOCH, validated=2),
    "val_check_interval-quarter": Feature({"val_check_interval": 0.25}, EPOCH, validated=32),
    "val_check_interval-across-epochs": Feature(
        {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 2}, EPOCH * 2, validated=24
    ),
    "check_val_every_n_epoch": Feature({"check_val_every_n_epoch": 2, "max_epochs": 3}, EPOCH * 3),
    "min_steps": Feature({"min_steps": 4, "max_epochs": 2}, EPOCH * 2, validated=16),
    "max_time": Feature({"max_time": {"days": 1}}, EPOCH),
    "barebones": Feature({"barebones": True}, EPOCH),
}
"""`tests/search` draws the others."""


class Counts(LabelledModule):
    """Counts the batches that it validates on, and logs in every step."""

    validated = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.log("train_loss", loss.detach(), on_step=True, on_epoch=True, batch_size=1, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validation_loss", self(batch), batch_size=1)
        self.validated += 1


def _train(engine: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    module = Counts()
    strategy = AutomodelStrategy(data_parallel=engine)
    trainer = make_trainer(strategy, **{"accumulate_grad_batches": ACCUMULATE, **settings})
    trainer.fit(module, loader(), loader())
    return full_weights(module.model), module.validated, trainer.global_step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_feature(pool2: RankPool, feature: Feature, engine: str) -> None:
    expected = train_plainly(feature.windows)
    for weights, validated, steps in pool2.run(_train, engine, feature.settings):
        assert steps == len(feature.windows)
        assert weight_error(weights, expected) <= TOLERANCE
        assert validated == feature.validated


def test_a_copied_strategy_and_its_original_leave_plugins_to_the_trainer() -> None:
    """Libraries copy the arguments of a Trainer before each fit."""
    strategy = AutomodelStrategy()
    for each in (copy.deepcopy(strategy), strategy):
        plugins: list[Any] = [TorchCheckpointIO(), Precision(), LightningEnvironment()]
        trainer = Trainer(strategy=each, accelerator="cpu", devices=1, plugins=plugins, logger=False)
        assert trainer.strategy.checkpoint_io is plugins[0]
