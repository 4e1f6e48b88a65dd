"""StopIteration from user code on one of several ranks, which Lightning takes for the end of its data."""

import traceback
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import IterableDataset

from lightning_automodel.failure.position import main_thread_position
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack

EVALUATION_HOOKS = (
    "on_before_batch_transfer",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)
LOOPS = "lightning.pytorch.loops"
FETCHERS = "lightning.pytorch.loops.fetchers"
DATASETS = "torch.utils.data._utils.fetch"
RAISED_IN_WORKER = ("torch._utils", "reraise")


def explained(error: StopIteration, where: str | None = None) -> RuntimeError:
    """The error to raise for ``error``. It names the hook: Lightning's that it came through, else ``where``."""
    where = lightning_internals.failing_hook(error) or where or "what loads a batch"
    return RuntimeError(
        f"{where} raised StopIteration ({main_thread_position(error)[1]}). Lightning takes it for the end of"
        " the data and ends the epoch on this rank alone, while the others wait. Begin the iterator anew"
        " where it ends, or return -1 from on_train_batch_start on all ranks to end an epoch early."
    )


def explain_stop_iteration(trainer: "pl.Trainer", patches: PatchStack) -> None:
    """Raise what :func:`explained` returns if a hook of a fit, or of a batch of evaluation, raises StopIteration.

    The strategy does the same in its own hooks: steps of evaluation, and the transfer of batches.
    """
    module = trainer.lightning_module
    fit_loop = trainer.fit_loop
    ends_by_it = lightning_internals.draws_its_batches(module.training_step)
    advance = fit_loop.epoch_loop.advance
    patches.set(fit_loop.epoch_loop, "advance", partial(_run, advance, may_end=True, ends_by_it=ends_by_it))
    for loop, name in (
        (fit_loop.epoch_loop, "on_advance_end"),
        (fit_loop, "on_advance_start"),
        (fit_loop, "advance"),
        (fit_loop, "on_advance_end"),
    ):
        patches.set(loop, name, partial(_run, getattr(loop, name)))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    owners: list[Any] = [module, *callbacks]
    data_module = getattr(trainer, "datamodule", None)
    if data_module is not None:
        owners.append(data_module)
    for owner in owners:
        for name in EVALUATION_HOOKS:
            hook = getattr(owner, name, None)
            if hook is not None and not _is_lightnings(hook):
                patches.set(owner, name, update_wrapper(partial(_run, hook, hook_name=name), hook))


def _is_lightnings(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("lightning.pytorch.")


def _run(
    function: Callable[..., Any],
    *args: Any,
    may_end: bool = False,
    ends_by_it: bool = False,
    hook_name: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function``.

    ``may_end``: whether the data may end in it. ``ends_by_it``: whether the training step ends them by
    raising.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        if may_end and (is_end_of_data(error) or (ends_by_it and _is_of_step(error))):
            raise
        raise explained(error, hook_name) from error


def _is_of_step(error: StopIteration) -> bool:
    return lightning_internals.failing_hook(error) == "training_step"


def is_end_of_data(error: StopIteration) -> bool:
    """Whether a loader has ended, or a hook has asked for the end of the epoch."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    if modules[-1].startswith(LOOPS):  # raised there, as for a hook that returns -1
        return True
    for frame, module in zip(frames, modules, strict=True):
        dataset = getattr(frame.f_locals.get("self"), "dataset", None)
        if module == DATASETS and not isinstance(dataset, IterableDataset):
            return False
        if (module, frame.f_code.co_name) == RAISED_IN_WORKER:
            return False
    return FETCHERS in modules
