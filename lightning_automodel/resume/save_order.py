"""Checkpoints at the end of a batch, written once everybody's work on it is done."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden


class LateSaves:
    """Lets checkpoint callbacks save after the module's own ``on_train_batch_end``, until :meth:`close`.

    Lightning calls all callbacks first, so that what the module does there (the momentum update of a teacher, say)
    would be missing from the checkpoint, and from the run that is resumed from it. At the end of an epoch it lets these
    callbacks come last itself.

    Args:
        trainer: Whose callbacks to follow.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._late: list[Any] = []
        if is_overridden("on_train_batch_end", self._module):
            self._late = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]  # type: ignore[attr-defined]
        if self._late:
            self._hook = self._module.on_train_batch_end
            self._module.on_train_batch_end = self._hook_then_saves  # type: ignore[assignment,method-assign]
        for callback in self._late:
            callback.on_train_batch_end = _wait

    def _hook_then_saves(self, *args: Any) -> None:
        self._hook(*args)
        for callback in self._late:
            type(callback).on_train_batch_end(callback, self._trainer, self._module, *args)

    def close(self) -> None:
        """Give hooks back."""
        if self._late:
            del self._module.__dict__["on_train_batch_end"]
        for callback in self._late:
            del callback.__dict__["on_train_batch_end"]
        self._late = []


def _wait(*_: Any) -> None:
    """Nothing yet."""
