"""What callbacks need to know of the Trainer and its strategy, ours or another."""

import os

import lightning.pytorch as pl

from lightning_automodel.strategy import AutomodelStrategy
from lightning_automodel.training_run import TrainingRun


def automodel(trainer: pl.Trainer) -> AutomodelStrategy | None:
    """The ``AutomodelStrategy`` of ``trainer``; None under another strategy."""
    if isinstance(trainer.strategy, AutomodelStrategy):
        return trainer.strategy
    return None


def run_of(trainer: pl.Trainer) -> TrainingRun | None:
    """What ``AutomodelStrategy`` owns in the present run; None under another strategy."""
    strategy = automodel(trainer)
    if strategy is None:
        return None
    return strategy._run


def below_root(trainer: pl.Trainer, path: str) -> str:
    """``path``, if it is relative below the Trainer's ``default_root_dir``."""
    if "://" in path:
        return path
    return os.path.join(trainer.default_root_dir, path)
