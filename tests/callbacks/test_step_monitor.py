"""StepMonitor logs each optimizer step once, to every logger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, StepMonitor
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, micro_batches
from tests.trainer.runs import CASE, LabelledModule, ManualModule, count_labels, make_trainer, shares

STEP_COUNTS = (8, 5)  # batches of each rank; the rest are fillers
ACCUMULATE = 3
WINDOWS = [range(0, 3), range(3, 6), range(6, 8)]


class Recorder(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(dict(metrics))


class Halves(LabelledModule):
    """Halves its learning rate with each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _monitor(engine: str) -> tuple[Any, ...]:
    monitor = StepMonitor(every_n_steps=1)
    recorder = Recorder()
    reports: dict[int, dict[str, float]] = {}

    def keep(trainer: Trainer, *_: Any) -> None:
        report = trainer.strategy.last_step
        if trainer.global_step not in reports and report is not None:
            reports[trainer.global_step] = {
                "train/loss": float(report.loss),
                "train/grad_norm": float(report.grad_norm),
            }

    trainer = make_trainer(
        AutomodelStrategy(data_parallel=engine, uneven_inputs="pad", track_grad_norm=True),
        callbacks=[monitor, LambdaCallback(on_train_batch_end=keep)],
        logger=recorder,
        accumulate_grad_batches=ACCUMULATE,
    )
    trainer.fit(Halves(), DataLoader(shares(STEP_COUNTS)[dist.get_rank()], batch_size=None))
    return monitor.history, recorder.logged, reports, trainer.callback_metrics


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_each_step(pool2: RankPool, engine: str) -> None:
    """Ragged batches, fillers, windows of three and a short one: counts, loss, norm and rate, alike on all ranks."""
    results = pool2.run(_monitor, engine)
    for history, logged, reports, callback_metrics in results:
        assert [entry["step"] for entry in history] == [1, 2, 3]
        assert [{k: v for k, v in entry.items() if k.startswith("train/")} for entry in history] == logged
        assert float(callback_metrics["train/loss"]) == history[-1]["train/loss"]
        for step, (entry, window) in enumerate(zip(history, WINDOWS, strict=True)):
            batches = [batch for own in shares(STEP_COUNTS) for batch in own[window.start : window.stop]]
            assert entry["train/label_tokens"] == sum(map(count_labels, batches))
            assert entry["train/learning_rate"] == 0.1 * 0.5**step
            assert {name: entry[name] for name in ("train/loss", "train/grad_norm")} == reports[step + 1]
            assert set(entry) == {"step", *logged[step]}


class StepsByHand(ManualModule):
    """Each batch is a window of its own, each second one is followed by a step of two optimizers."""

    def configure_optimizers(self) -> Any:
        parts = (self.model.head, self.model.blocks)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.manual_backward(self(batch))
        if batch_idx % 2:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()


def _monitor_windows() -> list[list[dict[str, Any]]]:
    found = []
    for module, strategy, settings in (
        (StepsByHand(), AutomodelStrategy(), {"log_every_n_steps": 2}),
        (LabelledModule(), AutomodelStrategy(per_token_loss=False), {"log_every_n_steps": 3}),
        (LabelledModule(), AutomodelStrategy(), {"log_every_n_steps": 0}),
    ):
        monitor = StepMonitor()
        trainer = make_trainer(strategy, callbacks=[monitor], **settings)
        batches = [batch for batch in micro_batches(CASE)[dist.get_rank()] if count_labels(batch)][:4]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        found.append(monitor.history)
    return found


def test_steps_are_not_windows_nor_batches(pool2: RankPool) -> None:
    """Two windows and two optimizers: their tokens count once. It logs at the Trainer's pace."""
    batches = [[batch for batch in own if count_labels(batch)][:4] for own in micro_batches(CASE)]
    for by_hand, by_batch, never in pool2.run(_monitor_windows):
        assert [entry["step"] for entry in by_hand] == [2, 4]
        for entry, window in zip(by_hand, (slice(0, 2), slice(2, 4)), strict=True):
            num_label_tokens = sum(count_labels(batch) for own in batches for batch in own[window])
            assert entry["train/label_tokens"] * 2 == num_label_tokens  # of each of the two steps
        assert [entry["step"] for entry in by_batch] == [3]
        assert set(by_batch[0]) == {"step", "train/loss", "train/learning_rate"}
        assert never == []
