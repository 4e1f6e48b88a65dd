"""Private names of Lightning's trainer, loops and launchers, each with its reason."""

# ruff: noqa: F401 (other modules import these names from here)

import inspect
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.loops import fetchers
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.internals.patching import PatchStack, overwrite
from lightning_automodel.internals.torch import defined_in

_BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "pre_backward")


def has_hooks_before_backward(trainer: Trainer) -> bool:
    """Whether code of the user's runs between a step's forward and its backward, under automatic optimization."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    hooked = [trainer.lightning_module, trainer.strategy, trainer.precision_plugin, *callbacks]
    return any(
        not defined_in(getattr(owner, name), "lightning", "lightning_automodel")
        for owner in hooked
        for name in _BEFORE_BACKWARD
        if hasattr(owner, name)
    )


def draws_its_batches(step: Callable[..., Any]) -> bool:
    """Whether a step takes a ``dataloader_iter`` in place of a batch."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def current_hook(module: LightningModule) -> str | None:
    """Name of the running hook of ``module``; None between hooks."""
    return module._current_fx_name


def forget_hook(module: LightningModule) -> None:
    """No hook of ``module`` runs: where one has raised, Lightning still names it in the next run."""
    overwrite(module, "_current_fx_name", None)


def patch_signals(trainer: Trainer, ask_to_requeue: Callable[[], None], patches: PatchStack) -> None:
    """Stop ``trainer`` from broadcasting SIGTERM in each micro-batch, and from communicating in a signal handler.

    On SLURM's signal to requeue Lightning saves at once, which is a collective under FSDP2. No two ranks
    receive a signal at the same point of a step: ``ask_to_requeue`` is called instead.
    """
    patches.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda *_: None)
    patches.set(trainer._signal_connector, "_sigterm_notifier_fn", lambda *_: None)
    patches.set(trainer._signal_connector, "_slurm_sigusr_handler_fn", lambda *_: ask_to_requeue())


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Let ``module.device_mesh``, which has no setter, be ``mesh``."""
    overwrite(module, "_device_mesh", mesh)


def save_and_requeue(trainer: Trainer) -> None:
    """Do what Lightning does on SLURM's signal: save, and let rank 0 requeue the job. Every rank must call it."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # type: ignore[arg-type]


def keep_signal_handlers(trainer: Trainer) -> None:
    """Stop ``trainer`` from restoring signal handlers that it has not replaced, and that of SIGTERM.

    The supervisor removes its own handler of SIGTERM. Python does not know of those that ``faulthandler`` has set, so
    that Lightning would restore the default action: the next crash of the process would leave no stack.
    """
    found = trainer._signal_connector._original_handlers
    for signum, handler in list(found.items()):
        if signum == signal.SIGTERM or signal.getsignal(signum) == handler:
            del found[signum]


def patch_model_checkpoints(
    patches: PatchStack,
    trainer: Trainer,
    link: Callable[[str, str], None],
    is_pending: Callable[[str], bool],
) -> None:
    """Make each ``ModelCheckpoint`` see checkpoints that are still being written, and replace links without a gap.

    Lightning 2.6.6 looks for existing files, so that no two callbacks choose the same name, and removes the
    old link or directory before it makes the new one.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            patches.set(callback, "_link_checkpoint", lambda _, path, name: link(path, name))
            exists = callback.file_exists
            patches.set(
                callback, "file_exists", lambda path, of, exists=exists: is_pending(path) or exists(path, of)
            )


def patch_samplers(trainer: Trainer, resolve: Callable[..., Any], patches: PatchStack) -> None:
    """Let ``resolve(of_the_trainer, loader, shuffle, mode)`` choose the sampler that ``trainer`` puts into a loader."""
    connector = trainer._data_connector
    patches.set(connector, "_resolve_sampler", partial(resolve, connector._resolve_sampler))


def unindexed(batch_sampler: Any) -> Any:
    """The user's batch sampler, within Lightning's that notes what it predicts; any other unchanged."""
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def tell_sigterm(trainer: Trainer) -> None:
    """Make ``trainer`` leave its loop after the current batch with ``SIGTERMException``."""
    overwrite(trainer._signal_connector, "received_sigterm", True)


def is_trainer_drawing() -> bool:
    """Whether a loop of the Trainer iterates a loader now, rather than other code: whose call is the innermost.

    The running hook does not tell: those of a data module and loggers have no name, and LearningRateFinder
    runs a loop within one.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in (fetchers.__name__, call.__name__):
            return bool(module == fetchers.__name__)
        frame = frame.f_back
    return False


STEPS = "_batches_that_stepped"  # in the state of the loop of batches: what `logging_step` returns


def logging_step(trainer: Trainer) -> int:
    """The step number under which Lightning logs the values of this training batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def modes_before_validation(trainer: Trainer) -> dict[str, bool]:
    """By name, which modules were in training mode when the validation began that runs within the fit."""
    return trainer.fit_loop.epoch_loop.val_loop._module_mode.mode


def told_weights_only(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool | None:
    """What the user gave ``fit`` as ``weights_only``: Lightning drops it if a strategy loads after its set-up."""
    return inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
