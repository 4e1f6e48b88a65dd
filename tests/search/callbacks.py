"""Callbacks of a searched Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    Checkpoint,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from tests.search.cases import Case
from tests.search.reference import EMA_DECAY, SWA_LR


class Finetuning(BaseFinetuning):
    """Unfreezes the embedding after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.embedding)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.embedding, optimizer)


class SavesEachBatch(Callback):
    """Saves after every micro-batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "each.ckpt")


class Stops(Checkpoint):
    """Saves and stops after a micro-batch of the whole fit.

    A plain callback would save before the module's own ``on_train_batch_end``, which is not called again.
    """

    def __init__(self, after: int, path: Path) -> None:
        self.after = after
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch * pl_module.case.num_batches + batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def make_callbacks(case: Case, folder: Path) -> list[Callback]:
    """What the Trainer is given."""
    made: dict[str, Callable[[], Callback]] = {
        "checkpoint": lambda: ModelCheckpoint(folder / "steps", every_n_train_steps=1, save_top_k=1),
        "save_in_mid_window": lambda: SavesEachBatch(folder),
        "ema": lambda: EMAWeightAveraging(decay=EMA_DECAY),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=SWA_LR, swa_epoch_start=2, annealing_epochs=2),
        "monitor": LearningRateMonitor,
        "early": lambda: EarlyStopping("constant", patience=1, check_on_train_epoch_end=True),
        "finetuning": Finetuning,
    }
    callbacks = [made[name]() for name in case.callbacks if name in made]
    if len(case.accumulation) > 1:
        callbacks.append(GradientAccumulationScheduler(dict(enumerate(case.accumulation))))
    return callbacks
