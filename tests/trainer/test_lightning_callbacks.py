"""Lightning's own callbacks under both engines: what each is for comes out right, and training is what it should be.

Averages of weights are tested in `test_weight_averaging.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    RichModelSummary,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, train_model_plainly
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, loader, make_trainer, train_plainly

ACCUMULATE = 3
EPOCH = [[0, 1, 2], [3, 4, 5], [6, 7]]
ENGINES = ["fsdp2", "ddp"]
WRONG = 1e-6


class Recorder(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(dict(metrics))


def trainer_with(engine: str, callbacks: list[Callback], **settings: Any) -> Trainer:
    strategy = AutomodelStrategy(data_parallel=engine)
    return make_trainer(strategy, **{"accumulate_grad_batches": ACCUMULATE, "callbacks": callbacks, **settings})


def assert_trained(weights: dict[str, Tensor], windows: list[list[int]]) -> None:
    assert weight_error(Outcome(weights, None), Outcome(train_plainly(windows), None)) <= TOLERANCE


def _count_lambda_calls(engine: str) -> tuple[dict[str, Tensor], Any]:
    calls: list[int] = []
    callback = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: calls.append(index))
    return _fit(engine, [callback]), calls


def _fit(engine: str, callbacks: list[Callback], **settings: Any) -> dict[str, Tensor]:
    module = LabelledModule()
    trainer_with(engine, callbacks, **settings).fit(module, loader())
    return full_weights(module.model)


def _monitor_learning_rate(engine: str) -> tuple[dict[str, Tensor], Any]:
    recorder = Recorder()
    weights = _fit(engine, [LearningRateMonitor("step")], logger=recorder, log_every_n_steps=1)
    return weights, {metrics["lr-SGD"] for metrics in recorder.logged if "lr-SGD" in metrics}


def _monitor_device(engine: str) -> tuple[dict[str, Tensor], Any]:
    recorder = Recorder()
    weights = _fit(engine, [DeviceStatsMonitor(cpu_stats=True)], logger=recorder, log_every_n_steps=1)
    return weights, any("DeviceStatsMonitor.on_train_batch_end" in name for logged in recorder.logged for name in logged)


def _monitor_throughput(engine: str) -> tuple[dict[str, Tensor], Any]:
    recorder = Recorder()
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["labels"]), window_size=2)
    weights = _fit(engine, [monitor], logger=recorder, log_every_n_steps=1, accumulate_grad_batches=1)
    seen = [metrics["train/samples"] for metrics in recorder.logged if "train/samples" in metrics]
    return weights, seen[-1] == sum(len(batch["labels"]) for batch in micro_batches(CASE)[dist.get_rank()])


def _show_rich_summary(engine: str) -> tuple[dict[str, Tensor], Any]:
    return _fit(engine, [RichModelSummary(max_depth=2)], enable_model_summary=True), None


WATCHERS: dict[str, tuple[Callable[[str], Any], Any]] = {
    "LambdaCallback": (_count_lambda_calls, list(range(8))),
    "LearningRateMonitor": (_monitor_learning_rate, {LEARNING_RATE}),
    "DeviceStatsMonitor": (_monitor_device, True),
    "ThroughputMonitor": (_monitor_throughput, True),
    "RichModelSummary": (_show_rich_summary, None),
}
NEEDED = {"DeviceStatsMonitor": "psutil", "RichModelSummary": "rich"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", WATCHERS)
def test_watchers(pool2: RankPool, name: str, engine: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    watch, expected = WATCHERS[name]
    for weights, found in pool2.run(watch, engine):
        assert_trained(weights, [[index] for index in range(8)] if name == "ThroughputMonitor" else EPOCH)
        assert found == expected


class Summarised(ModelModule):
    """Shows the sizes of what goes through it."""

    def __init__(self) -> None:
        super().__init__(TinyDecoder(CASE.seed).double())
        self.example_input_array = torch.zeros(2, 5, dtype=torch.long)

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch) if isinstance(batch, Tensor) else super().forward(batch)


class KeepsSummary(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        summary = ModelSummary(pl_module, max_depth=3)
        names = [name.removeprefix("FSDP") for name in summary.layer_types]
        self.found = (summary.total_parameters, summary.param_nums, summary.out_sizes, summary.total_flops, names)


def _summarise(engine: str) -> tuple[Any, dict[str, Tensor]]:
    module, keeps = Summarised(), KeepsSummary()
    trainer_with(engine, [keeps]).fit(module, loader())
    return keeps.found, full_weights(module.model)


@pytest.mark.parametrize("engine", ENGINES)
def test_model_summary(pool2: RankPool, engine: str) -> None:
    """Counts of the whole model, whatever a rank holds; FSDP2 puts its own name before that of a unit's class."""
    summary = ModelSummary(Summarised(), max_depth=3)
    expected = (summary.total_parameters, summary.param_nums, summary.out_sizes, summary.total_flops)
    for found, weights in pool2.run(_summarise, engine):
        assert found == (*expected, summary.layer_types)
        assert_trained(weights, EPOCH)


class ValidatesByRank(LabelledModule):
    """Logs values of its own: on rank 1 they stop falling after the second epoch, on rank 0 never."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        value = float(-self.current_epoch if dist.get_rank() == 0 else -min(self.current_epoch, 1))
        self.log("by_rank", value, batch_size=1)
        self.log("together", torch.tensor(value), batch_size=1, sync_dist=True)


def _stop_early(engine: str, monitor: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int, Any]:
    module, stopping = ValidatesByRank(), EarlyStopping(monitor, patience=1)
    trainer = trainer_with(engine, [stopping], max_epochs=4, **settings)
    trainer.fit(module, loader(), loader())
    return full_weights(module.model), stopping.stopped_epoch, trainer.callback_metrics["together"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_early_stopping(pool2: RankPool, engine: str) -> None:
    """What one rank alone sees stops all of them after the same epoch, unless `min_steps` is larger."""
    for weights, stopped_epoch, together in pool2.run(_stop_early, engine, "by_rank", {}):
        assert stopped_epoch == 2
        assert float(together) == -1.5
        assert_trained(weights, EPOCH * 3)
    for weights, stopped_epoch, _ in pool2.run(_stop_early, engine, "together", {}):
        assert stopped_epoch == 0
        assert_trained(weights, EPOCH * 4)
    for weights, _, _ in pool2.run(_stop_early, engine, "by_rank", {"min_steps": 10}):
        assert_trained(weights, EPOCH * 4)


class ChecksBest(ValidatesByRank):
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("tested", self(batch), batch_size=1)


def _keep_best(engine: str, folder: str) -> tuple[dict[str, Tensor], str, list[str]]:
    module = ChecksBest()
    keeps = ModelCheckpoint(folder, "{epoch}", monitor="together", mode="max", save_top_k=1, save_last=True)
    trainer = trainer_with(engine, [keeps], max_epochs=3, enable_checkpointing=True)
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), ckpt_path="best", verbose=False)
    return full_weights(module.model), Path(keeps.best_model_path).name, sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_model_checkpoint(pool2: RankPool, tmp_path: Path, engine: str) -> None:
    """The best by what all ranks logged, and its weights; the others have been removed."""
    for weights, best, names in pool2.run(_keep_best, engine, str(tmp_path)):
        assert (best, names) == ("epoch=0.ckpt", ["epoch=0.ckpt", "last.ckpt"])
        assert_trained(weights, EPOCH)


class HastyOnRank0(Timer):
    """A clock that only rank 0's Timer reads as an hour a batch."""

    batches = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: str = "train") -> float:
        return 3600.0 * self.batches * (dist.get_rank() == 0)


def _run_out_of_time(engine: str) -> tuple[dict[str, Tensor], int]:
    timer = HastyOnRank0(timedelta(hours=4))
    return _fit(engine, [timer]), timer.batches


@pytest.mark.parametrize("engine", ENGINES)
def test_timer(pool2: RankPool, engine: str) -> None:
    """All ranks stop after the same batch; the window that it leaves open does not step."""
    for weights, batches in pool2.run(_run_out_of_time, engine):
        assert batches == 4
        assert_trained(weights, [[0, 1, 2]])


class RatedModule(ModelModule):
    """Has a learning rate that can be found, and labels in every batch of a sequence that both ranks see."""

    def __init__(self) -> None:
        super().__init__(TinyDecoder(CASE.seed).double())
        self.lr, self.batch_size = LEARNING_RATE, 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=MOMENTUM)


class SuggestsTwice(LearningRateFinder):
    """Suggests twice the rate that the module came with, whatever the curve looks like."""

    def lr_find(self, trainer: Trainer, pl_module: Any) -> None:
        super().lr_find(trainer, pl_module)
        assert len(self.optimal_lr.results["lr"]) == 5


def _find_rate(engine: str, by_tuner: bool, folder: str) -> tuple[Any, float, dict[str, Tensor]]:
    module = RatedModule()
    search = {"min_lr": 1e-3, "max_lr": 0.5, "early_stop_threshold": None}
    finder = SuggestsTwice(num_training_steps=5, **search)
    trainer = trainer_with(engine, [] if by_tuner else [finder], default_root_dir=folder)
    if by_tuner:
        results = Tuner(trainer).lr_find(module, loader(), num_training=5, **search).results
    trainer.fit(module, loader())
    return results if by_tuner else finder.optimal_lr.results, module.lr, full_weights(module.model)
