"""Gives callbacks, which work under any strategy, the Trainer's strategy if it is ``AutomodelStrategy``."""

import lightning.pytorch as pl

from lightning_automodel.strategy import AutomodelStrategy
from lightning_automodel.training_run import TrainingRun


def automodel(trainer: pl.Trainer) -> AutomodelStrategy | None:
    """The ``AutomodelStrategy`` of ``trainer``; None under another strategy."""
    return trainer.strategy if isinstance(trainer.strategy, AutomodelStrategy) else None


def current_run(trainer: pl.Trainer) -> TrainingRun | None:
    """The :class:`.TrainingRun` of the ``AutomodelStrategy`` of ``trainer``; None under another strategy."""
    strategy = automodel(trainer)
    return None if strategy is None else strategy._run
