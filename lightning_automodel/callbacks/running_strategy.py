"""What callbacks, which work under any strategy, need to know of the Trainer's strategy if it is ours."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_automodel.context_parallel.steps import ContextParallelSteps
from lightning_automodel.gradients.token_loss import TokenWeighting
from lightning_automodel.strategy import AutomodelStrategy
from lightning_automodel.training_run import TrainingRun


def automodel(trainer: pl.Trainer) -> AutomodelStrategy | None:
    """The ``AutomodelStrategy`` of ``trainer``; None under another strategy."""
    if isinstance(trainer.strategy, AutomodelStrategy):
        return trainer.strategy
    return None


def options_of(trainer: pl.Trainer) -> Mapping[str, Any]:
    """The options of the ``AutomodelStrategy`` of ``trainer``; empty under another strategy."""
    strategy = automodel(trainer)
    if strategy is None:
        return {}
    return strategy.describe()["options"]


def weighting_of(trainer: pl.Trainer) -> TokenWeighting | None:
    """How ``AutomodelStrategy`` counts and weighs micro-batches in the present run; None under another strategy."""
    run = run_of(trainer)
    if run is None:
        return None
    return run.windows.weighting


def context_of(trainer: pl.Trainer) -> ContextParallelSteps | None:
    """The steps on slices of ``AutomodelStrategy`` in the present run; None without context parallelism."""
    run = run_of(trainer)
    if run is None:
        return None
    return run.micro_batches.context


def run_of(trainer: pl.Trainer) -> TrainingRun | None:
    """What ``AutomodelStrategy`` owns in the present run; None under another strategy."""
    strategy = automodel(trainer)
    if strategy is None:
        return None
    return strategy._run
