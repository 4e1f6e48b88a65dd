"""Everything in a checkpoint is of one moment: that at which a resumed run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

from lightning_automodel.sharding.weight_averaging import averaged_models
from tests.rank_pool import RankPool
from tests.resume.resuming import (
    Learner,
    Saver,
    Setting,
    differences,
    make_trainer,
    run,
    training_loader,
)

DDP = {"data_parallel": "ddp"}
FSDP2 = {"data_parallel": "fsdp2"}


def averaging() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.7)]


def buffers_within_a_validation(path: Path) -> list[tuple[float, ...]]:
    """Runs on every rank: a buffer and its average after a validation, and in a fit that resumes from within it."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 2}
    setting = Setting(DDP, trainer, callbacks=averaging)
    noted = Notes()
    run(setting, noted, Saver("on_validation_batch_end", 1, path))
    again = Notes()
    run(setting, again, ckpt_path=path)
    return [noted.values[2], again.values[0]]


class Notes(Callback):
    """Notes this rank's running statistics, and their averages, before each batch."""

    def __init__(self) -> None:
        self.values: list[tuple[float, ...]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Learner, *args: Any) -> None:
        averaged = next(iter(averaged_models(module))).module
        self.values.append(tuple(float(each.statistics.running_mean.sum()) for each in (module, averaged)))


def test_buffers_within_a_validation(pool2: RankPool, tmp_path: Path) -> None:
    """The module holds those of the average then, and the average those that are trained."""
    for calm, resumed in pool2.run(buffers_within_a_validation, tmp_path / "a.ckpt"):
        assert resumed == calm
        assert len(set(calm)) == 2


def batch_statistics(strategy: dict[str, Any], folder: Path) -> list[str]:
    """Runs on every rank: what a save between a forward and its backward, or within a window, changes in the fit."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 1}
    setting = Setting(strategy, {**trainer, "accumulate_grad_batches": 2}, callbacks=averaging)
    stops = (("on_before_zero_grad", 2), ("on_after_backward", 3), ("on_train_batch_end", 2))
    expected = run(setting)[1]
    savers = [Saver(hook, when, folder / hook) for hook, when in stops]
    saving = differences(expected, run(setting, *savers)[1])
    return saving + differences(expected, run(setting, seed=2, ckpt_path=savers[-1].path)[1])


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
@pytest.mark.every_case
def test_each_rank_keeps_its_buffers(pool2: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    """All ranks save the first one's: what a forward has used waits unchanged for the backward.

    Buffers that are not saved are the first rank's where a window begins, also after a validation with
    averages.
    """
    for differing in pool2.run(batch_statistics, strategy, tmp_path):
        assert differing == []


def ended(hook: str, folder: Path) -> tuple[int, int]:
    """Runs on every rank: steps of a fit, and of one that goes on from what a hook saved after its last step."""
    setting = Setting(DDP, {"precision": "64-true", "limit_train_batches": 4, "max_steps": 3})
    path = folder / "ended.ckpt"
    saved = run(setting, Saver(hook, 3 if hook == "on_train_batch_end" else 1, path))[0]
    return saved.global_step, run(setting, ckpt_path=path)[0].global_step


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
@pytest.mark.every_case
def test_saved_after_the_last_step(pool2: RankPool, hook: str, tmp_path: Path) -> None:
    """As under Lightning, a fit without a step left does nothing."""
    for steps in pool2.run(ended, hook, tmp_path):
        assert steps == (3, 3)


class WithoutLoops(Learner):
    """Saves what a new run begins with."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["loops"], checkpoint["callbacks"]


def begins_anew(path: Path) -> tuple[int, int]:
    """Runs on every rank: steps of a fit, and the number at which one ends that loads what the first one saved."""
    trainer = {"precision": "64-true", "limit_val_batches": 0, "max_epochs": 1, "limit_train_batches": 4}
    setting = Setting(FSDP2, {**trainer, "accumulate_grad_batches": 2}, module=WithoutLoops)
    saving, _ = run(setting, Saver("on_train_batch_end", 3, path))
    again = make_trainer(setting, [])
    again.fit(
        Learner(), training_loader("own generator", dist.get_rank(), dist.get_world_size()), ckpt_path=path
    )
    return saving.global_step, again.global_step


def test_hook_that_drops_loops(pool2: RankPool, tmp_path: Path) -> None:
    """As in plain Lightning, such a checkpoint brings weights and optimizer states to a run that begins."""
    for saving, again in pool2.run(begins_anew, tmp_path / "stopped.ckpt"):
        assert (saving, again) == (2, 2)
