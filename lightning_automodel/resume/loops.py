"""The position of a fit, read from the counters of Lightning's loops, and counters to resume from.

Lightning (2.6.6) guesses from its counters where a checkpoint was saved. Counters saved in a hook make it
skip a due validation, the end of an epoch, or one step of the logger, so a checkpoint gets counters that
leave nothing to guess.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack

# Stages of a fit.
EPOCH = "epoch"  # an epoch comes next, its hooks first
BATCH = "batch"  # a batch comes next
STEP = "step"  # a batch was just trained on, and a validation may be due
VALIDATION = "validation"  # the validation after a batch is over


@dataclass(frozen=True)
class Position:
    """Position of a fit."""

    stage: str  # one of those above
    batches: int  # of the epoch that the loop has used
    epochs: int  # that are complete
    # The hooks that end an epoch are running, an epoch that comes next: what follows them is not done yet.
    is_epoch_ending: bool = False

    @property
    def is_iterated(self) -> bool:
        """Whether the loaders' iterators of the epoch exist: Lightning makes the first ones in set-up."""
        return self.stage != EPOCH or self.epochs == 0


def position(trainer: "pl.Trainer", has_stopped_before_validation: bool) -> Position:
    """Current position of ``trainer``. It may have stopped after a batch, before a validation that is due."""
    fit_loop: Any = trainer.fit_loop  # the annotations of its trackers lack attributes that are read here
    epochs = fit_loop.epoch_progress.current
    progress = fit_loop.epoch_loop.batch_progress
    batches = progress.current
    if epochs.started <= epochs.processed:
        if 0 < epochs.processed == epochs.ready and batches.processed and not is_last_batch(trainer):
            # max_steps, max_time or should_stop ended the epoch early: its rest comes when more steps are
            # allowed.
            return Position(BATCH, batches.processed, epochs.processed - 1)
        is_ending = epochs.completed < epochs.processed
        return Position(EPOCH, batches.processed, epochs.processed, is_ending)
    if batches.completed < batches.ready or has_stopped_before_validation:
        return Position(STEP, batches.ready, epochs.processed)
    if not trainer.validating:
        return Position(BATCH, batches.ready, epochs.processed)
    validated = fit_loop.epoch_loop.val_loop.batch_progress
    is_over = validated.is_last_batch and validated.current.completed == validated.current.ready
    return Position(VALIDATION if is_over else STEP, batches.ready, epochs.processed)


def is_last_batch(trainer: "pl.Trainer") -> bool:
    """Whether the newest batch is the last of the epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.is_last_batch or progress.current.ready >= trainer.num_training_batches


def counters_at(saved: dict[str, Any], at: Position, logged: int) -> dict[str, Any]:
    """A ``saved`` state of the fit loop, with counters from which Lightning's loops resume ``at`` a position."""
    counters = copy.deepcopy(saved)
    started = at.epochs + (at.stage != EPOCH)
    epochs = {"ready": started, "started": started, "processed": at.epochs, "completed": at.epochs}
    counters["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    batches = counters["epoch_loop.batch_progress"]
    before = batches["total"]["processed"] - batches["current"]["processed"]
    batches["total"] = dict.fromkeys(batches["total"], before + at.batches)
    batches["current"] = dict.fromkeys(batches["current"], at.batches)
    batches["is_last_batch"] &= at.stage != BATCH
    validated = counters["epoch_loop.val_loop.batch_progress"]
    validated["total"] = dict.fromkeys(validated["total"], validated["total"]["completed"])
    validated["current"] = dict.fromkeys(validated["current"], 0)
    validated["is_last_batch"] = False
    if at.stage == STEP:
        logged -= 1  # the step is counted when the batch is finished
    counters["epoch_loop.state_dict"][lightning_internals.STEPS] = logged
    # Each rank's loaders have their own states, and Lightning would load those of rank 0 on every rank.
    counters["state_dict"].pop("combined_loader", None)
    return counters


def finish_restart(
    trainer: "pl.Trainer", stage: str, iterate: Callable[[Any], None], patches: PatchStack
) -> None:
    """In ``on_train_start``, let the loops go on at ``stage``, rather than where they guess that they were stopped.

    ``iterate`` iterates the epoch's loaders again.
    """
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    start = epoch_loop.on_run_start

    def start_and_finish_batch(data_fetcher: Any) -> None:
        is_resuming = epoch_loop.restarting
        # In the first epoch set-up iterates, whether or not it has begun.
        if is_resuming or trainer.current_epoch == 0:
            iterate(data_fetcher)
        start(data_fetcher)
        if not is_resuming:
            return
        epoch_loop.restarting = False
        epoch_loop.on_iteration_done()
        if stage == STEP:
            progress = epoch_loop.batch_progress
            if progress.is_last_batch and isinstance(trainer.num_training_batches, int):
                # An epoch may have had another number of batches on other ranks; whether a validation is due
                # depends on it.
                vars(progress.current).update(
                    dict.fromkeys(vars(progress.current), trainer.num_training_batches)
                )
            epoch_loop.on_advance_end(data_fetcher)  # validates, if that is due
        elif stage == VALIDATION:
            epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    patches.set(epoch_loop, "on_run_start", start_and_finish_batch)
    if stage == EPOCH:
        fit_loop.on_iteration_done()
        epoch_loop.restarting = False
        return
    # The loop itself is not restarted, or it would skip schedulers at the epoch's end. Its children are, and
    # keep their counters.
    fit_loop.restarting = False
    epoch_loop.restarting = True


def step_plateau_schedulers(trainer: "pl.Trainer") -> None:
    """Do what Lightning does after the hooks that end an epoch; the checkpoint was saved in one of them."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    configs = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if all(config.monitor in trainer.callback_metrics for config in configs):
        epochs.completed -= 1
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1
