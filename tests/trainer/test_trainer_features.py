"""What a Trainer can be told: under both engines it trains on the batches that it should, as the plain loop does.

Callbacks are tested in `test_lightning_callbacks.py` and `test_tuning_callbacks.py`, averages of weights in
`test_weight_averaging.py`, evaluation around a fit in `test_evaluation.py`, `GradientAccumulationScheduler`
in the exactness sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    Batch,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
    relative_error,
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
    expected = Outcome(train_plainly(feature.windows), None)
    for weights, validated, steps in pool2.run(_train, engine, feature.settings):
        assert steps == len(feature.windows)
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
        assert validated == feature.validated


PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def _profile(engine: str, name: str, folder: str) -> tuple[dict[str, Tensor], str]:
    rank = dist.get_rank()
    profiler = PROFILERS[name](dirpath=f"{folder}/{rank}", filename="profile")
    weights, _, _ = _train(engine, {"profiler": profiler})
    return weights, "".join(path.read_text() for path in Path(folder, str(rank)).glob("*.txt"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", first_by_default(PROFILERS))
def test_profiler(pool2: RankPool, tmp_path: Path, name: str, engine: str) -> None:
    """It finds the strategy's steps, and changes nothing."""
    expected = Outcome(train_plainly(EPOCH), None)
    for weights, summary in pool2.run(_profile, engine, name, str(tmp_path)):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
        assert "[Strategy]AutomodelStrategy" in summary


class Reloads(LabelledModule):
    """Has its batches in reverse order in every second epoch."""

    def train_dataloader(self) -> DataLoader:
        batches = micro_batches(CASE)[dist.get_rank()]
        return DataLoader(batches[:: -1 if self.current_epoch % 2 else 1], batch_size=None)


def _reload(engine: str) -> dict[str, Tensor]:
    module = Reloads()
    strategy = AutomodelStrategy(data_parallel=engine)
    settings = {
        "max_epochs": 2,
        "reload_dataloaders_every_n_epochs": 1,
        "accumulate_grad_batches": ACCUMULATE,
    }
    make_trainer(strategy, **settings).fit(module)
    return full_weights(module.model)


@pytest.mark.parametrize("engine", ENGINES)
def test_reload_dataloaders_every_n_epochs(pool2: RankPool, engine: str) -> None:
    expected = Outcome(train_plainly([*EPOCH, [7, 6, 5], [4, 3, 2], [1, 0]]), None)
    for weights in pool2.run(_reload, engine):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


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


class Norms(LabelledModule):
    """Measures the norm of its gradients as Lightning's documentation shows it."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms = {name: float(norm) for name, norm in grad_norm(self.model, norm_type=2).items()}


def _norms(engine: str, utility: bool) -> Any:
    module = Norms() if utility else LabelledModule()
    strategy = AutomodelStrategy(data_parallel=engine, track_grad_norm=True)
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader())
    return float(strategy.last_step.grad_norm), getattr(module, "norms", None)


def test_norm_of_gradients(pool2: RankPool) -> None:
    """`track_grad_norm` and Lightning's utility are right for both engines."""
    gradients = train_model_plainly(TinyDecoder(CASE.seed).double(), ACCUMULATE)[-1]
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for engine in ("fsdp2", "ddp"):
        for norm, _ in pool2.run(_norms, engine, False):
            assert relative_error(norm, total) <= TOLERANCE
        for _, norms in pool2.run(_norms, engine, True):
            assert norms["grad_2.0_norm_total"] == pytest.approx(total.item())
