"""What a Trainer can be told, and what people write first: under both engines, as the plain loop does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import (
    Batch,
    TinyDecoder,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.plain import ModelModule, train_model_plainly
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
    "nothing": Feature({}, EPOCH),
    "fast_dev_run": Feature({"fast_dev_run": True}, [[0]], validated=1),
    "fast_dev_run-4": Feature({"fast_dev_run": 4}, [[0, 1, 2], [3]], validated=4),
    "overfit_batches": Feature({"overfit_batches": 2, "max_epochs": 2}, [[0, 1]] * 2, validated=4),
    "limit_train_batches": Feature({"limit_train_batches": 5}, [[0, 1, 2], [3, 4]]),
    "limit_train_batches-half": Feature({"limit_train_batches": 0.5}, [[0, 1, 2], [3]]),
    "limit_val_batches": Feature({"limit_val_batches": 2}, EPOCH, validated=2),
    "limit_val_batches-0": Feature({"limit_val_batches": 0}, EPOCH, validated=0),
    "val_check_interval": Feature({"val_check_interval": 3}, EPOCH, validated=16),
    "val_check_interval-quarter": Feature({"val_check_interval": 0.25}, EPOCH, validated=32),
    "val_check_interval-across-epochs": Feature(
        {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 2}, EPOCH * 2, validated=24
    ),
    "check_val_every_n_epoch": Feature({"check_val_every_n_epoch": 2, "max_epochs": 3}, EPOCH * 3),
    "num_sanity_val_steps": Feature({"num_sanity_val_steps": 3}, EPOCH, validated=11),
    "max_steps": Feature({"max_steps": 4, "max_epochs": -1}, [*EPOCH, EPOCH[0]]),
    "min_steps": Feature({"min_steps": 4, "max_epochs": 2}, EPOCH * 2, validated=16),
    "max_time": Feature({"max_time": {"days": 1}}, EPOCH),
    "barebones": Feature({"barebones": True}, EPOCH),
    "detect_anomaly": Feature({"detect_anomaly": True}, EPOCH),
    "inference_mode-off": Feature({"inference_mode": False}, EPOCH),
    "sync_batchnorm-without-one": Feature({"sync_batchnorm": True}, EPOCH),
    "deterministic": Feature({"deterministic": True}, EPOCH),
    "benchmark": Feature({"benchmark": True}, EPOCH),
}


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


def _train(engine: str, settings: dict[str, Any], module: Any = None) -> tuple[dict[str, Tensor], int, int]:
    module = module or Counts()
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


class Measures(ModelModule):
    """Logs TorchMetrics: accuracy and token-weighted loss, in training and evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for stage in ("train", "validate", "test"):
            accuracy = torchmetrics.classification.MulticlassAccuracy(11, average="micro", ignore_index=-100)
            self.add_module(f"{stage}_accuracy", accuracy)
            self.add_module(f"{stage}_loss", torchmetrics.MeanMetric().set_dtype(torch.float64))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._measure("train", batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure("validate", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure("test", batch)

    def _measure(self, stage: str, batch: Batch) -> Tensor:
        accuracy = getattr(self, f"{stage}_accuracy")
        mean = getattr(self, f"{stage}_loss")
        logits = self.model(batch["input_ids"]).flatten(0, 1)
        labels = batch["labels"].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        tokens = (labels != -100).sum()
        accuracy(logits, labels)
        mean(loss.detach().nan_to_num(), tokens)
        self.log_dict({f"{stage}_accuracy": accuracy, f"{stage}_loss": mean}, on_step=False, on_epoch=True)
        return loss


def _measure(engine: str) -> dict[str, float]:
    module = Measures(TinyDecoder(CASE.seed).double())
    trainer = make_trainer(AutomodelStrategy(data_parallel=engine), accumulate_grad_batches=CASE.num_batches)
    trainer.fit(module, loader(), loader())
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, loader(), verbose=False)
    return measured | {name: float(value) for name, value in trainer.callback_metrics.items()}


def _measured_plainly(model: nn.Module, stage: str) -> dict[str, float]:
    batches = [batch for by_rank in micro_batches(CASE) for batch in by_rank]
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    with torch.no_grad():
        logits = torch.cat([model(batch["input_ids"]).flatten(0, 1) for batch in batches])
    used = labels != -100
    correct = (logits.argmax(dim=1) == labels)[used].double().mean().item()
    return {
        f"{stage}_accuracy": correct,
        f"{stage}_loss": nn.functional.cross_entropy(logits, labels).item(),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_torchmetrics(pool2: RankPool, engine: str) -> None:
    """Over ragged ranks they are what one process measures: counts are summed, never means of ranks averaged."""
    model = TinyDecoder(CASE.seed).double()
    expected = _measured_plainly(model, "train")
    train_model_plainly(model, CASE.num_batches)
    expected |= _measured_plainly(model, "validate") | _measured_plainly(model, "test")
    assert expected["train_loss"] != pytest.approx(expected["validate_loss"])
    for measured in pool2.run(_measure, engine):
        assert measured == pytest.approx(expected, rel=1e-6)


def _boring(engine: str) -> tuple[int, int]:
    """Everything that a Trainer can be asked for, on Lightning's own model and data."""
    strategy = AutomodelStrategy(per_token_loss=False, data_parallel=engine)
    trainer = make_trainer(strategy, use_distributed_sampler=True)
    module = BoringModel()
    data = BoringDataModule()
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    return trainer.global_step, len(trainer.predict(module, data))


@pytest.mark.parametrize("engine", ENGINES)
def test_boring_model(pool2: RankPool, engine: str) -> None:
    """Half of the 64 samples for each rank, one by one."""
    assert pool2.run(_boring, engine) == [(32, 32)] * 2


class Graphs(LightningModule):
    """One loss a graph; a rank's second batch has more nodes than graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.network(batch["nodes"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _count_graphs(engine: str, ahead: bool) -> None:
    sizes = (3, 3 + 6 * dist.get_rank(), 3)
    batches = [{"nodes": torch.ones(size, 5), "graph": torch.ones(3)} for size in sizes]
    strategy = AutomodelStrategy(count="samples", data_parallel=engine, count_window_ahead=ahead)
    make_trainer(strategy).fit(Graphs(), DataLoader(batches, batch_size=None))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ahead", first_by_default([True, False]))
def test_one_rank_whose_batch_is_not_of_samples(pool2: RankPool, engine: str, ahead: bool) -> None:
    """Every rank raises, the other one with this rank's error."""
    with pytest.raises(RankError) as raised:
        pool2.run(_count_graphs, engine, ahead)
    for rank in (0, 1):
        assert "has first dimensions of 9, 3: pass count_label_tokens" in raised.value.failures[rank]


def test_a_copied_strategy_and_its_original_leave_plugins_to_the_trainer() -> None:
    """Libraries copy the arguments of a Trainer before each fit."""
    strategy = AutomodelStrategy()
    for each in (copy.deepcopy(strategy), strategy):
        plugins: list[Any] = [TorchCheckpointIO(), Precision(), LightningEnvironment()]
        trainer = Trainer(strategy=each, accelerator="cpu", devices=1, plugins=plugins, logger=False)
        assert trainer.strategy.checkpoint_io is plugins[0]
