"""Callbacks that save at the end of a batch, or that must have their state before the fit starts."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, ModelCheckpoint, StochasticWeightAveraging, Timer
from torch import nn

from lightning_automodel.patching import PatchStack


def save_last(trainer: "pl.Trainer", patches: PatchStack, resumed_at: int | None) -> None:
    """Make checkpoint callbacks save after the module's own ``on_train_batch_end``, and no step twice.

    Lightning calls all callbacks first, so what the module does there (the momentum update of a teacher, say) would be
    missing from the checkpoint and the resumed run. At the end of an epoch Lightning itself calls them last. Nor does
    it store which step was saved last: ``ModelCheckpoint`` would save it again within the first window.

    Args:
        trainer: The Trainer that runs the fit.
        patches: Restores the methods.
        resumed_at: The global step that was resumed at, if any.
    """
    module = trainer.lightning_module
    saving: list[Any] = [each for each in trainer.callbacks if isinstance(each, Checkpoint)]  # type: ignore[attr-defined]
    hook = module.on_train_batch_end

    def hook_then_saves(*args: Any) -> None:
        hook(*args)
        for callback in saving:
            if trainer.global_step != resumed_at or not isinstance(callback, ModelCheckpoint):
                type(callback).on_train_batch_end(callback, trainer, module, *args)

    if saving:
        patches.set(module, "on_train_batch_end", hook_then_saves)
    for callback in saving:
        patches.set(callback, "on_train_batch_end", lambda *_: None)


def load_early(trainer: "pl.Trainer", states: dict[str, Any]) -> list[StochasticWeightAveraging]:
    """Repeat ``on_fit_start`` with the loaded state for the callbacks of Lightning that read it there.

    If a strategy loads checkpoints after its set-up, Lightning calls that hook before it loads callbacks: parameter
    groups would be missing when the optimizer's state is loaded, and an expired timer would allow another step.

    Args:
        trainer: The Trainer that runs the fit, set up, with nothing loaded yet.
        states: States of callbacks by key, as a checkpoint holds them.

    Returns:
        The callbacks that have replaced the schedule, for :func:`start_averaging`.
    """
    averaging = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if isinstance(callback, (BaseFinetuning, StochasticWeightAveraging, Timer)) and state is not None:
            # Shards of an average are not read yet: the callback keeps its own until Lightning loads callbacks.
            averages = [held for held in vars(callback).values() if isinstance(held, nn.Module)]
            if "average_model_state" in state and averages:
                state = {**state, "average_model_state": averages[0].state_dict()}
            callback.load_state_dict(state)
            max_epochs = trainer.fit_loop.max_epochs
            if isinstance(callback, StochasticWeightAveraging):
                if max_epochs != -1:  # its first on_fit_start may have added an epoch, which does not count as trained
                    trainer.fit_loop.max_epochs = int(callback.swa_end) + 1
                averaging += [callback] if state.get("scheduler_state") is not None else []
            callback.on_fit_start(trainer, trainer.lightning_module)
            trainer.fit_loop.max_epochs = max_epochs
    return averaging


def start_averaging(trainer: "pl.Trainer", averaging: list[StochasticWeightAveraging]) -> None:
    """Let these callbacks replace the schedule within an epoch, which they do at its start, with everything loaded."""
    for callback in averaging:
        groups = trainer.optimizers[0].param_groups
        loaded = [dict(group) for group in groups]
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
        for group, values in zip(groups, loaded, strict=True):
            group.update(values)  # making the schedule has set learning rates
