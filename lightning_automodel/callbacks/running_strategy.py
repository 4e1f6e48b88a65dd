"""The strategy that a Trainer runs, if it is ours: callbacks work under others too."""

import lightning.pytorch as pl

from lightning_automodel.strategy import AutomodelStrategy


def automodel(trainer: pl.Trainer) -> AutomodelStrategy | None:
    """The ``AutomodelStrategy`` of ``trainer``; None under another strategy."""
    return trainer.strategy if isinstance(trainer.strategy, AutomodelStrategy) else None
