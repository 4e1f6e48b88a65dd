"""Callbacks that save or stop at the end of a batch, or that must have their state before the fit starts."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, StochasticWeightAveraging, Timer

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import defined_in


def save_last(trainer: "pl.Trainer", is_within_window: Callable[[], bool], patches: PatchStack) -> None:
    """Make checkpoint callbacks save, and timers stop, after the module's own ``on_train_batch_end``, and after steps.

    Lightning calls all callbacks first, so what the module does there (the momentum update of a teacher,
    say) would be missing from the checkpoint and the resumed run. At the end of an epoch Lightning itself
    calls them last. Within a window, which a resumed run would begin again, Lightning's own hooks are not called.
    """
    module = trainer.lightning_module
    called_last: list[Any] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (Checkpoint, Timer)):
            # That of an instance may replace that of its class.
            called_last.append(callback.on_train_batch_end)
            patches.set(callback, "on_train_batch_end", lambda *_: None)

    def save_all(*args: Any) -> None:
        for save in called_last:
            # A user's own may count batches.
            if not (is_within_window() and defined_in(save, "lightning", "pytorch_lightning")):
                save(trainer, module, *args)

    if called_last:
        patches.call_after(module, "on_train_batch_end", save_all)


def load_early(trainer: "pl.Trainer", states: dict[str, Any]) -> None:
    """Repeat ``on_fit_start`` with the loaded state for those of Lightning's callbacks that read it there.

    If a strategy loads checkpoints after its set-up, Lightning calls that hook before it loads callbacks:
    parameter groups or a schedule would be missing when states are loaded, and an expired timer would allow
    another step.
    """
    kind: Any
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if not state:
            continue
        for kind in (BaseFinetuning, Timer):
            # Lightning's own methods alone: it calls those of a user's class itself, once.
            if isinstance(callback, kind):
                kind.load_state_dict(callback, state)
                kind.on_fit_start(callback, trainer, trainer.lightning_module)
        if isinstance(callback, StochasticWeightAveraging) and state["scheduler_state"] is not None:
            raise ValueError(
                "StochasticWeightAveraging had begun to average when the checkpoint was written, and cannot"
                " go on: resume from a checkpoint of an earlier epoch, or average with WeightAveraging,"
                " which resumes."
            )
