"""Callbacks that change parameter groups and schedules, which must be theirs again before states are loaded into them.

They do it in ``on_fit_start``, which Lightning calls before it loads callbacks where a strategy loads checkpoints once
it is set up, and in ``on_train_epoch_start``, which it does not call again within an epoch.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging


def before_loading(trainer: "pl.Trainer", states: dict[str, Any]) -> None:
    """Let optimizers have the parameter groups, and the fit the schedules, that callbacks had given them.

    Args:
        trainer: Of the fit, set up, with nothing loaded yet.
        states: Of callbacks, by key, as a checkpoint holds them.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if isinstance(callback, BaseFinetuning) and state is not None:
            callback.load_state_dict(state)
            callback.on_fit_start(trainer, trainer.lightning_module)
        elif isinstance(callback, StochasticWeightAveraging) and state is not None and state["scheduler_state"]:
            callback._clear_schedulers(trainer)


def within_epoch(trainer: "pl.Trainer") -> None:
    """Let a schedule that a callback had set at the start of the epoch be that of a fit that goes on within it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (
            isinstance(callback, StochasticWeightAveraging)
            and callback._scheduler_state is not None
            and callback.swa_start <= trainer.current_epoch <= callback.swa_end
        ):
            groups = trainer.optimizers[0].param_groups
            before = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, loaded in zip(groups, before, strict=True):
                group.update(loaded)
