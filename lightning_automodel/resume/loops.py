"""Where a fit is, by the counters of Lightning's loops, and counters from which the same loops go on there.

Lightning (2.6.6) guesses from its counters where a checkpoint was saved. Saved in a hook they lead it to skip a due
validation, the end of an epoch, or one step of the logger, so a checkpoint gets counters that leave nothing to guess.
"""

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_automodel import lightning_internals

EPOCH = "epoch"
BATCH = "batch"
STEP = "step"
VALIDATION = "validation"
"""What the stages mean: an epoch comes next, its hooks first; a batch comes next; a batch was just trained on, and a
validation may be due; that validation is over."""


@dataclass(frozen=True)
class Position:
    """Where a fit is.

    Attributes:
        stage: One of the names above.
        batches: Batches of the epoch that the loop has used.
        epochs: Epochs that are complete.
        is_epoch_ending: Whether the hooks that end an epoch run, so that what follows them is yet to be done.
    """

    stage: str
    batches: int
    epochs: int
    is_epoch_ending: bool = False


def position(trainer: "pl.Trainer") -> Position:
    """Where ``trainer`` is now."""
    fit_loop: Any = trainer.fit_loop  # its trackers are annotated as those without what is read here
    epochs = fit_loop.epoch_progress.current
    progress = fit_loop.epoch_loop.batch_progress
    batches = progress.current
    if epochs.started <= epochs.processed:
        if 0 < epochs.processed == epochs.ready and batches.processed and not is_last_batch(trainer):
            # max_steps, max_time or should_stop ended the epoch early: the rest of it comes when more is allowed.
            return Position(BATCH, batches.processed, epochs.processed - 1)
        return Position(EPOCH, batches.processed, epochs.processed, is_epoch_ending=epochs.completed < epochs.processed)
    if batches.completed < batches.ready:
        return Position(STEP, batches.ready, epochs.processed)
    if not trainer.validating:
        return Position(BATCH, batches.ready, epochs.processed)
    validated = fit_loop.epoch_loop.val_loop.batch_progress
    is_over = validated.is_last_batch and validated.current.completed == validated.current.ready
    return Position(VALIDATION if is_over else STEP, batches.ready, epochs.processed)


def is_last_batch(trainer: "pl.Trainer") -> bool:
    """Whether no batch of the epoch follows the newest one."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.is_last_batch or progress.current.ready >= trainer.num_training_batches


def steps_logged(trainer: "pl.Trainer") -> int:
    """Batches that stepped, by which loggers count."""
    return trainer.fit_loop.epoch_loop.on_save_checkpoint()["_batches_that_stepped"]


def set_steps_logged(trainer: "pl.Trainer", steps: int) -> None:
    """Set what :func:`steps_logged` returns."""
    trainer.fit_loop.epoch_loop.on_load_checkpoint(
        {**trainer.fit_loop.epoch_loop.on_save_checkpoint(), "_batches_that_stepped": steps}
    )


def counters_at(saved: dict[str, Any], at: Position, logged: int) -> dict[str, Any]:
    """The state of the fit loop with counters from which Lightning's loops go on at ``at``.

    Args:
        saved: What ``fit_loop.state_dict()`` returned when the fit was there, or in the window after that.
        at: Where to go on.
        logged: What :func:`steps_logged` is there.
    """
    in_epoch = at.stage != EPOCH
    epochs = dict.fromkeys(("ready", "started"), at.epochs + in_epoch)
    epochs |= dict.fromkeys(("processed", "completed"), at.epochs)
    batches = saved["epoch_loop.batch_progress"]
    validated = saved["epoch_loop.val_loop.batch_progress"]
    before = batches["total"]["processed"] - batches["current"]["processed"]
    validations = validated["total"]["completed"]
    counters: dict[str, Any] = {
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
        "epoch_loop.batch_progress": {
            **batches,
            "total": dict.fromkeys(batches["total"], before + at.batches),
            "current": dict.fromkeys(batches["current"], at.batches),
            "is_last_batch": batches["is_last_batch"] and at.stage != BATCH,
        },
        "epoch_loop.val_loop.batch_progress": {
            "total": dict.fromkeys(validated["total"], validations),
            "current": dict.fromkeys(validated["current"], 0),
            "is_last_batch": False,
        },
    }
    if at.stage == STEP:
        # By this, Lightning takes a validation that is due for one that was interrupted, and runs it.
        counters["epoch_loop.val_loop.batch_progress"]["total"] |= {
            "ready": validations + 1,
            "started": validations + 1,
        }
    for name in ("automatic_optimization.optim_progress", "manual_optimization.optim_step_progress"):
        counters[f"epoch_loop.{name}"] = _all_completed(saved[f"epoch_loop.{name}"])
    counters["epoch_loop.scheduler_progress"] = _all_completed(saved["epoch_loop.scheduler_progress"])
    # The loop counts the batch's step once a validation that may be due is over.
    counted = logged - 1 if at.stage in (STEP, VALIDATION) else logged
    counters["epoch_loop.state_dict"] = {**saved["epoch_loop.state_dict"], "_batches_that_stepped": counted}
    # Each rank has its own loaders' states, and Lightning would load those of rank 0 everywhere.
    counters["state_dict"] = {name: value for name, value in saved["state_dict"].items() if name != "combined_loader"}
    return {**saved, **counters}


def _all_completed(progress: dict[str, Any]) -> dict[str, Any]:
    """No event has begun and not ended."""
    if "completed" in progress:
        return dict.fromkeys(progress, progress["completed"])
    return {name: _all_completed(value) for name, value in progress.items()}


def finish_restart(trainer: "pl.Trainer", stage: str, logged: int) -> None:
    """Let the loops, restarted from :func:`counters_at`, forget that where it would mislead them.

    To be called once the run has started, in ``on_train_start``, with random states still to be restored.
    """
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    lightning_internals.forget_restart(fit_loop)
    if stage == EPOCH:
        fit_loop.reset_restart_stage()
        epoch_loop.restarting = False
        return
    validated = epoch_loop.val_loop.batch_progress.total
    validated.ready = validated.started = validated.completed
    if stage == BATCH or lightning_internals.is_validation_due(trainer):
        return
    # Restarted, the loop runs or passes over a validation that is due, and finishes the batch. Otherwise it draws the
    # next one at once.
    epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    set_steps_logged(trainer, logged)
    lightning_internals.skip_validation(epoch_loop.val_loop)


def prefetches(trainer: "pl.Trainer") -> bool:
    """Whether the loop draws one batch ahead, which it does where it cannot know otherwise which is the last."""
    return math.isinf(trainer.num_training_batches)
