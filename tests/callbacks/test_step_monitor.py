"""StepMonitor logs each optimizer step once: what it trained on exactly, what it cost by the clock, to every logger."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel import AutomodelStrategy, StepMonitor
from tests.callbacks.test_evaluation_loss import Evaluated, count_labels
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT, Batch, TinyDecoder, micro_batches
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, make_trainer, mean_loss
from tests.trainer.test_lightning_callbacks import Recorder

COUNTS = (8, 5)  # batches of each rank; the rest are fillers
ACCUMULATE = 3
WINDOWS = [range(0, 3), range(3, 6), range(6, 8)]
TRAINING = ("data", "forward", "backward", "optimizer", "device")


def masked(batch: Batch) -> Batch:
    """With a mask that leaves out the last position of each row."""
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -1] = 0
    return {**batch, "attention_mask": mask}


def shares() -> list[list[Batch]]:
    return [
        list(map(masked, batches[:count]))
        for batches, count in zip(micro_batches(CASE), COUNTS, strict=True)
    ]


class Halves(LabelledModule):
    """Halves its learning rate with each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _monitor(engine: str) -> tuple[Any, ...]:
    monitor = StepMonitor(every_n_steps=1, flops=True, peak_flops=1e9)
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
    trainer.fit(Halves(), DataLoader(shares()[dist.get_rank()], batch_size=None))
    return monitor.history, recorder.logged, reports, trainer.callback_metrics


def _flops(batch: Batch) -> int:
    """Of one micro-batch in one process."""
    model = TinyDecoder(CASE.seed).double()
    with FlopCounterMode(display=False) as counter:
        mean_loss(model, batch).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_each_step(pool2: RankPool, engine: str) -> None:
    """Ragged batches, fillers, windows of three and a short one: counts, loss, norm, rate and operations."""
    results = pool2.run(_monitor, engine)
    micro_batch_flops = [list(map(_flops, own)) for own in shares()]
    for history, logged, reports, callback_metrics in results:
        assert [entry["step"] for entry in history] == [1, 2, 3]
        assert [{k: v for k, v in entry.items() if k.startswith("train/")} for entry in history] == logged
        assert float(callback_metrics["train/loss"]) == history[-1]["train/loss"]
        assert "train/peak_memory_gib" not in history[0]  # a CPU
        for step, (entry, window) in enumerate(zip(history, WINDOWS, strict=True)):
            batches = [batch for own in shares() for batch in own[window.start : window.stop]]
            label_tokens = sum(map(count_labels, batches))
            tokens = sum(b["input_ids"].numel() for b in batches)
            rows = sum(len(batch["input_ids"]) for batch in batches)
            assert entry["train/label_tokens"] == label_tokens
            assert entry["train/tokens"] == tokens
            assert entry["train/padding"] == pytest.approx(rows / tokens, rel=TOLERANCE)
            assert entry["train/learning_rate"] == 0.1 * 0.5**step
            assert {name: entry[name] for name in ("train/loss", "train/grad_norm")} == reports[step + 1]
            assert 0 < entry["train/data_wait"] < 1
            assert entry["train/tokens_per_second_per_device"] == entry["train/tokens_per_second"] / 2
            longest = max(sum(found[step]["seconds"][phase] for phase in TRAINING) for found, *_ in results)
            assert entry["train/tokens_per_second"] == pytest.approx(label_tokens / longest)
            flops = 0.0
            for (found, *_), own in zip(results, micro_batch_flops, strict=True):
                seconds = sum(found[step]["seconds"][phase] for phase in TRAINING)
                flops += sum(own[window.start : window.stop]) / seconds / 2
            assert entry["train/tflops_per_device"] == pytest.approx(flops / 1e12)
            assert entry["train/peak_flops_share"] == pytest.approx(flops / 1e9)


# --- Steps, windows and batches ---------------------------------------------------------------------------------------


class StepsByHand(LabelledModule):
    """Each batch is a window of its own, each second one is followed by a step of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parts = (self.model.head, self.model.blocks)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.manual_backward(self(batch))
        if batch_idx % 2:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()


class CountsGathers(StepMonitor):
    """Counts what it communicates."""

    gathers = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        gather = trainer.strategy.all_gather

        def counting(tensor: Tensor) -> Tensor:
            self.gathers += 1
            return gather(tensor)

        trainer.strategy.all_gather = counting  # type: ignore[method-assign]


def _monitor_windows() -> tuple[Any, ...]:
    found = []
    for module, strategy, settings in (
        (StepsByHand(), AutomodelStrategy(), {"log_every_n_steps": 2}),
        (LabelledModule(), AutomodelStrategy(per_token_loss=False), {"log_every_n_steps": 3}),
        (LabelledModule(), AutomodelStrategy(), {"log_every_n_steps": 0}),
    ):
        monitor = CountsGathers()
        trainer = make_trainer(strategy, callbacks=[monitor], **settings)
        batches = [batch for batch in micro_batches(CASE)[dist.get_rank()] if count_labels(batch)][:4]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        found.append((monitor.history, monitor.gathers))
    return tuple(found)


def test_steps_are_not_windows_nor_batches(pool2: RankPool) -> None:
    """Two windows and two optimizers: their tokens count once. It communicates where it logs, at the Trainer's pace."""
    batches = [[batch for batch in own if count_labels(batch)][:4] for own in micro_batches(CASE)]
    for by_hand, by_batch, never in pool2.run(_monitor_windows):
        history, gathers = by_hand
        assert ([entry["step"] for entry in history], gathers) == ([2, 4], 2)
        for entry, window in zip(history, (slice(0, 2), slice(2, 4)), strict=True):
            num_label_tokens = sum(count_labels(batch) for own in batches for batch in own[window])
            assert entry["train/label_tokens"] * 2 == num_label_tokens  # of each of the two steps
        history, gathers = by_batch
        assert ([entry["step"] for entry in history], gathers) == ([3], 1)
        assert "train/loss" in history[0]
        assert not {"train/label_tokens", "train/tokens_per_second", "train/padding"} & set(history[0])
        assert never == ([], 0)


def _monitor_tensor_parallel() -> list[dict[str, Any]]:
    monitor = StepMonitor(every_n_steps=1, flops=True)
    trainer = make_trainer(AutomodelStrategy(tensor_parallel_size=2), callbacks=[monitor])
    trainer.fit(Evaluated(tensor_parallel=True), DataLoader(shares()[0][:2], batch_size=None))
    return monitor.history


def test_tensor_parallel_peers_count_once(pool2: RankPool) -> None:
    """Each holds all tokens, and carries out its own part of the operations."""
    for history in pool2.run(_monitor_tensor_parallel):
        assert [entry["train/tokens"] for entry in history] == [
            b["input_ids"].numel() for b in shares()[0][:2]
        ]
        assert [entry["train/label_tokens"] for entry in history] == list(map(count_labels, shares()[0][:2]))
        assert all(entry["train/tflops_per_device"] > 0 for entry in history)


class EndsEarly(LabelledModule):
    """Leaves its second batch by an error, or before its step."""

    raises = False

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx and not self.raises else None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx:
            raise RuntimeError("meant")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("raises", [False, True])
def test_counting_ends_with_the_batch(raises: bool) -> None:
    """Else everything that this process computes from then on would run through the counter."""
    module = EndsEarly()
    monitor = StepMonitor(every_n_steps=1, flops=True)
    module.raises = raises
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[monitor], max_epochs=1, **SILENT)
    with pytest.raises(RuntimeError, match="meant") if raises else nullcontext():
        trainer.fit(module, DataLoader(shares()[0], batch_size=None))
    assert [entry["train/tflops_per_device"] > 0 for entry in monitor.history] == [True]
    assert _get_current_dispatch_mode() is None


# --- Time -------------------------------------------------------------------------------------------------------------

NAP = 0.03


class SlowData(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(4 * NAP)
        return torch.ones(3)


class Slow(Evaluated):
    """Takes a known time in each phase."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(2 * NAP)
        return sum(parameter.sum() for parameter in self.parameters())  # type: ignore[return-value]

    def on_before_backward(self, loss: Tensor) -> None:
        time.sleep(3 * NAP)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        time.sleep(NAP)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        time.sleep(3 * NAP)


def test_time_by_phase(tmp_path: Path) -> None:
    """Under one process of Lightning's own: no loss is known, validation and saving are not the training's time."""
    monitor = StepMonitor(every_n_steps=1)

    def save(trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / "saved.ckpt")

    slow_save = LambdaCallback(on_save_checkpoint=lambda *_: time.sleep(5 * NAP), on_train_batch_end=save)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[monitor, slow_save],
        max_epochs=1,
        val_check_interval=1,
        num_sanity_val_steps=0,
        **SILENT,
    )
    trainer.fit(Slow(), DataLoader(SlowData()), DataLoader([0.0]))
    first, second = monitor.history
    expected = {"data": 4, "forward": 2, "backward": 3, "optimizer": 1}
    for name, naps in expected.items():
        assert naps * NAP <= first["seconds"][name] < (naps + 3) * NAP, name
    assert 3 * NAP <= second["seconds"]["validation"] < 6 * NAP
    assert second["seconds"]["checkpoint"] >= 5 * NAP
    assert 0.2 < first["train/data_wait"] < 0.6
    assert set(first) == {"step", "seconds", "train/data_wait", "train/learning_rate"}


def test_a_step_too_few() -> None:
    """The message has the value."""
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        StepMonitor(every_n_steps=0)
