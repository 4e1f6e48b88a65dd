"""Callbacks that need their state before optimizers and schedulers are loaded.

Lightning gives it to them before ``on_fit_start``, or after, where a strategy loads checkpoints once it is set up: then
what they would do there with their state is left out.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging


def prepare(trainer: "pl.Trainer", states: dict[str, Any]) -> None:
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
