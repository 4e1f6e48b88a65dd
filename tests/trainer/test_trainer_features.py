"""What a Trainer can be told, also by a YAML file, and evaluations around fits: as in a plain loop."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer import runs
from tests.trainer.exactness import (
    Batch,
    assert_exact,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, filled_decoder, plain_weights, prefixed, train_model_plainly

ACCUMULATE = 3
EPOCH = [[0, 1, 2], [3, 4, 5], [6, 7]]
ENGINES = runs.first_by_default(["fsdp2", "ddp"])


@dataclass(frozen=True)
class Feature:
    """Settings of a Trainer, the windows that they lead to, and how many batches a rank validates on."""

    settings: dict[str, Any]
    windows: list[list[int]]
    validated: int = runs.CASE.num_batches


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


class Counts(runs.LabelledModule):
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
    trainer = runs.make_trainer(strategy, **{"accumulate_grad_batches": ACCUMULATE, **settings})
    trainer.fit(module, runs.loader(), runs.loader())
    return full_weights(module.model), module.validated, trainer.global_step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_feature(pool2: RankPool, feature: Feature, engine: str) -> None:
    expected = runs.train_plainly(feature.windows)
    for weights, validated, steps in pool2.run(_train, engine, feature.settings):
        assert steps == len(feature.windows)
        assert weight_error(weights, expected) <= runs.TOLERANCE
        assert validated == feature.validated


def test_a_copied_strategy_and_its_original_leave_plugins_to_the_trainer() -> None:
    """Libraries copy the arguments of a Trainer before each fit."""
    strategy = AutomodelStrategy()
    for each in (copy.deepcopy(strategy), strategy):
        plugins: list[Any] = [TorchCheckpointIO(), Precision(), LightningEnvironment()]
        trainer = Trainer(strategy=each, accelerator="cpu", devices=1, plugins=plugins, logger=False)
        assert trainer.strategy.checkpoint_io is plugins[0]


# --- A YAML file; `tests/test_public_names.py` has registered names

YAML = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  accumulate_grad_batches: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  use_distributed_sampler: false
  plugins:
    - class_path: lightning.pytorch.plugins.environments.LightningEnvironment
  strategy:
    class_path: lightning_automodel.AutomodelStrategy
    init_args:
      data_parallel: fsdp2
      data_parallel_size: auto
      data_parallel_replicate_size: 2
      ddp_kwargs: {}
      per_token_loss: true
      loss_reduction: mean
      label_key: labels
      ignore_index: -100
      label_shift: 0
      count_label_tokens: null
      defer_fsdp_grad_sync: all_reduce
      reshard_during_accumulation: auto
      auto_wrap_policy: null
      reshard_after_forward: true
      mp_policy:
        param_dtype: torch.float64
        reduce_dtype: torch.float64
        cast_forward_inputs: false
      cpu_offload: false
      activation_checkpointing: [tests.trainer.exactness.Block, torch.nn.LayerNorm]
      track_grad_norm: true
      error_if_nonfinite: true
      process_group_backend: gloo
      timeout: '0:02:00'
"""


class FromCommandLine(runs.LabelledModule):
    """A module without arguments, with its own data."""

    def train_dataloader(self) -> Any:
        return runs.loader()


def _fit_from_yaml(folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = Path(folder) / f"{dist.get_rank()}.yaml"
    path.write_text(YAML)
    cli = LightningCLI(FromCommandLine, args=["fit", "--config", str(path)], save_config_callback=None)
    return full_weights(cli.model), cli.trainer.strategy.describe()


def test_from_yaml(pool2: RankPool, tmp_path: Path) -> None:
    """Every option is read, dtypes by their names, and trained with exactly."""
    expected = prefixed(runs.train_plainly(EPOCH))
    for weights, described in pool2.run(_fit_from_yaml, str(tmp_path)):
        assert described["options"]["timeout"] == timedelta(minutes=2)
        assert described["precision"]["reduction"] == "torch.float64"
        assert described["mesh"].items() >= {"data_parallel_replicate": 2, "data_parallel_shard": 1}.items()
        recomputed = ["model.blocks.0 (Block)", "model.blocks.1 (Block)", "model.norm (LayerNorm)"]
        assert described["activation_checkpointing"] == recomputed
        assert weight_error(weights, expected) <= runs.TOLERANCE


# --- A module that is pickled and copied while it trains --------------------------------------------------------------


class _Module(runs.LabelledModule):
    """Pickles and copies itself in hooks, and uses what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._compare(batch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self._compare(None)

    def _compare(self, batch: Any) -> None:
        for other in (pickle.loads(pickle.dumps(self)), copy.deepcopy(self)):
            for name in ("zero_grad", "training_step", "on_validation_model_zero_grad", "toggle_optimizer"):
                if getattr(other, name).__self__ is not other:
                    self.differing.append(name)
            if batch is None:
                continue
            with torch.enable_grad():
                other(batch).backward()
            other.zero_grad()
            self.differing += [name for name, p in other.named_parameters() if p.grad is not None]


def _fit_and_copy() -> list[str]:
    module = _Module()
    trainer = runs.make_trainer(AutomodelStrategy(data_parallel="ddp"), accumulate_grad_batches=2)
    trainer.fit(module, runs.loader())
    return module.differing


def test_module_is_pickled_and_copied_during_a_fit(pool2: RankPool) -> None:
    assert pool2.run(_fit_and_copy) == [[], []]


class StartsAnew(ModelModule):
    """Makes its optimizers anew in the second epoch, as for another stage."""

    def __init__(self) -> None:
        super().__init__(filled_decoder())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


def test_optimizers_made_anew(pool2: RankPool) -> None:
    """Their momentum begins with zero."""
    model = filled_decoder()
    for _ in range(2):
        train_model_plainly(model, ACCUMULATE)
    settings = {"accumulate_grad_batches": ACCUMULATE, "max_epochs": 2}
    for options in ({}, {"data_parallel": "ddp"}):
        assert_exact(pool2.run(runs.fit_weights, StartsAnew, options, **settings), full_weights(model))


# --- Validation, test and prediction before, in and after training: right losses, and nothing left gathered or broken -

EVALUATED = {name: runs.STRATEGIES[name] for name in ("kept", "resharded", "ddp")}


class Evaluates(ModelModule):
    """Keeps the summed token loss of every batch that it evaluates, and predicts logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses: dict[str, list[float]] = {"validate": [], "test": []}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.losses["validate"].append(float(runs.mean_loss(self.model, batch, "sum")))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """With gradients: no backward comes that would free a unit."""
        with torch.enable_grad():
            self.losses["test"].append(float(runs.mean_loss(self.model, batch, "sum")))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"])

    def on_train_start(self) -> None:
        """Let another Trainer evaluate the module, as a callback may."""
        runs.make_trainer("auto", devices=1, limit_predict_batches=1).predict(self, runs.loader())

    def on_validation_epoch_end(self) -> None:
        """Call the model outside of every step, as one that prints a sample does."""
        self.sampled = self.model(micro_batches(runs.CASE)[0][0]["input_ids"].to(self.device))


def plain_losses(model: nn.Module) -> list[list[float]]:
    """By rank: the summed token loss of each batch."""
    return [
        [runs.mean_loss(model, batch, "sum").item() for batch in batches]
        for batches in micro_batches(runs.CASE)
    ]


def assert_losses(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    assert max(map(relative_error, actual, expected)) <= runs.TOLERANCE


def _around_fits(options: dict[str, Any], fresh: bool) -> tuple[Any, ...]:
    """Losses, predictions and weights by moment; in between, everything is sharded, or nothing is."""
    module = Evaluates(runs.decoder())
    settings = {"accumulate_grad_batches": ACCUMULATE, "num_sanity_val_steps": 2}
    trainers = [
        runs.make_trainer(AutomodelStrategy(**options), **settings) for _ in range(9 if fresh else 1)
    ]

    def trainer() -> Any:
        return trainers.pop() if fresh else trainers[0]

    predicted = []
    weights = []
    for _ in range(2):
        predicted.append(trainer().predict(module, runs.loader()))
        trainer().validate(module, runs.loader(), verbose=False)
        trainer().test(module, runs.loader(), verbose=False)
        assert len({isinstance(parameter, DTensor) for parameter in module.parameters()}) == 1
        trainer().fit(module, runs.loader())
        assert len({isinstance(parameter, DTensor) for parameter in module.parameters()}) == 1
        weights.append(full_weights(module.model))
        if not fresh:
            trainers[0].fit_loop.max_epochs += 1
    return module.losses, predicted, module.sampled, weights


@pytest.mark.parametrize("fresh", runs.first_by_default([False, True]), ids=["one-trainer", "new-trainers"])
@pytest.mark.parametrize("options", runs.by_default(EVALUATED, "kept", "ddp"))
def test_around_fits(pool2: RankPool, options: dict[str, Any], fresh: bool) -> None:
    """Losses and predictions are those of the weights before and after; a second fit goes on from the first one's."""
    model = runs.decoder()
    losses = []
    logits = []
    expected = []
    for _ in range(2):  # a new fit begins with a new optimizer, whose momentum is zero
        losses.append(plain_losses(model))
        logits.append(
            [[model(b["input_ids"]).detach() for b in batches] for batches in micro_batches(runs.CASE)]
        )
        expected.append(plain_weights(model, ACCUMULATE))
    results = pool2.run(_around_fits, options, fresh)
    for rank, (found_losses, predicted, sampled, weights) in enumerate(results):
        for kind in ("validate", "test"):
            assert_losses(found_losses[kind], losses[0][rank] + losses[1][rank])
        for found, of_model in zip(predicted, logits, strict=True):
            assert max(map(relative_error, found, of_model[rank])) <= runs.TOLERANCE
        assert relative_error(sampled, logits[1][0][0]) <= runs.TOLERANCE
        for found, right in zip(weights, expected, strict=True):
            assert weight_error(found, right) <= runs.TOLERANCE
