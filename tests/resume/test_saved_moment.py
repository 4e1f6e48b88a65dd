"""Everything in a checkpoint is of one moment: that at which a resumed run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

from tests.rank_pool import RankPool
from tests.resume.resuming import (
    Learner,
    Saver,
    Setting,
    compare,
    differences,
    disturb,
    make_trainer,
    outcome,
    run,
    training_loader,
)

DDP = {"data_parallel": "ddp"}
FSDP2 = {"data_parallel": "fsdp2"}


def averaging() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.7)]


ONE_FILE_OF_SHARDS = FSDP2 | {"save_distributed_checkpoint": False}


@pytest.mark.parametrize("strategy", [FSDP2, DDP, pytest.param(ONE_FILE_OF_SHARDS, marks=pytest.mark.sweep)])
@pytest.mark.every_case
def test_averages_within_a_validation(pool2: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    """The module then holds the averages, and the callback the weights that are trained."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 2}
    setting = Setting(strategy, trainer, callbacks=averaging)
    for differing in pool2.run(compare, setting, tmp_path, ("on_validation_batch_end", 1)):
        assert differing == []


def test_buffers_within_a_validation_and_a_window(pool2: RankPool, tmp_path: Path) -> None:
    """Statistics are as before the window, where the average that the module holds instead has these values too."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 1}
    setting = Setting(FSDP2, {**trainer, "accumulate_grad_batches": 3}, callbacks=averaging)
    for differing in pool2.run(compare, setting, tmp_path, ("on_validation_batch_end", 1)):
        assert differing == []


def batch_statistics(strategy: dict[str, Any], folder: Path) -> list[str]:
    """Runs on every rank: what differs where a save comes between a forward and its backward, and within a window."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 1}
    setting = Setting(strategy, {**trainer, "accumulate_grad_batches": 2}, callbacks=averaging)
    return compare(
        setting, folder, ("on_before_zero_grad", 2), ("on_after_backward", 3), ("on_train_batch_end", 2)
    )


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
@pytest.mark.every_case
def test_each_rank_keeps_its_buffers(pool2: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    """All ranks save the first one's: what a forward has used waits unchanged for the backward.

    Buffers that are not saved are the first rank's where a window begins, also after a validation with
    averages.
    """
    for differing in pool2.run(batch_statistics, strategy, tmp_path):
        assert differing == []


def ended_by(limit: dict[str, Any], hooks: tuple[str, ...], folder: Path) -> list[str]:
    """Runs on every rank: what differs where a fit was saved after its last step, and resumed with the same limit."""
    trainer = {"precision": "64-true", "limit_train_batches": 4, "val_check_interval": 2, **limit}
    setting = Setting(DDP, trainer, {"schedule": "plateau"}, callbacks=averaging)
    found = compare(setting, folder, *((hook, 2 if hook == "on_train_batch_end" else 1) for hook in hooks))
    # A metric of the epoch is not logged again where no batch is left.
    return [differing for differing in found if not differing.partition(": ")[2].startswith("metrics:")]


@pytest.mark.parametrize(
    ("limit", "hooks"),
    [
        (
            {"max_steps": 2},
            ("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end", "on_train_end"),
        ),
        ({"max_epochs": 1}, ("on_train_epoch_end", "on_train_end")),
    ],
    ids=["steps", "epochs"],
)
@pytest.mark.every_case
def test_saved_after_the_last_step(
    pool2: RankPool, limit: dict[str, Any], hooks: tuple[str, ...], tmp_path: Path
) -> None:
    """What followed that hook comes, as the callback does that puts averages into the module; and no further step."""
    for differing in pool2.run(ended_by, limit, hooks, tmp_path):
        assert differing == []


class StepsByHand(Learner):
    """Steps its schedule with every batch, as warm-ups of batches do."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch", "frequency": 1000}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.lr_schedulers().step()


class CountingData(LightningDataModule):
    """Counts its batches, and keeps the count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_dataloader(self) -> Any:
        return training_loader("own generator", dist.get_rank(), dist.get_world_size())

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def with_data_module(strategy: dict[str, Any], path: Path) -> tuple[list[str], list[int]]:
    """Runs on every rank: what differs where a fit goes on that was saved within a window, and counts of batches."""
    trainer = {"precision": "64-true", "accumulate_grad_batches": 3, "limit_val_batches": 0, "max_epochs": 1}
    setting = Setting(strategy, trainer)
    outcomes = []
    counts = []
    for seed, ckpt_path in ((1, None), (2, path)):
        disturb(seed)
        fitting = make_trainer(
            setting, [Saver("on_train_batch_end", 5, path)][: 1 if ckpt_path is None else 0]
        )
        data = CountingData()
        fitting.fit(StepsByHand(), datamodule=data, ckpt_path=ckpt_path)
        outcomes.append(outcome(fitting))
        counts.append(data.count)
    return differences(*outcomes), counts


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
@pytest.mark.every_case
def test_schedule_and_data_module_within_a_window(
    pool2: RankPool, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """A resumed run repeats the window, so that what counts batches is as of its beginning."""
    for differing, counts in pool2.run(with_data_module, strategy, tmp_path / "stopped.ckpt"):
        assert differing == []
        assert counts == [7, 7]


class WithoutLoops(Learner):
    """Saves what a new run begins with."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["loops"], checkpoint["callbacks"]


def begins_anew(strategy: dict[str, Any], path: Path) -> tuple[int, int]:
    """Runs on every rank: steps of a fit, and the number at which one ends that loads what the first one saved."""
    trainer = {"precision": "64-true", "limit_val_batches": 0, "max_epochs": 1, "limit_train_batches": 4}
    setting = Setting(strategy, {**trainer, "accumulate_grad_batches": 2}, module=WithoutLoops)
    saving, _ = run(setting, Saver("on_train_batch_end", 3, path))
    again = make_trainer(setting, [])
    again.fit(
        Learner(), training_loader("own generator", dist.get_rank(), dist.get_world_size()), ckpt_path=path
    )
    return saving.global_step, again.global_step


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
@pytest.mark.every_case
def test_hook_that_drops_loops(pool2: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    """As in plain Lightning, such a checkpoint brings weights and optimizer states to a run that begins."""
    for saving, again in pool2.run(begins_anew, strategy, tmp_path / "stopped.ckpt"):
        assert (saving, again) == (2, 2)
