"""Lightning's callbacks that average weights (EMA, SWA), with sharded weights.

They deep-copy the module in their ``setup`` hook. A module that will be moved, sharded or converted to float64, or has
no values yet, is not what they would average, and FSDP2 refuses to copy a sharded one. So their hook runs later, and
gets a copy that is sharded like it. Each rank averages its own shards, without communication.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import copy_tensors, without_wrappers
from lightning_automodel.sharding.units import class_name, is_sharded


def delay_setup(module: pl.LightningModule, patches: PatchStack) -> None:
    """Delay the ``setup`` of averaging callbacks until :func:`set_up`, when ``module`` is what is trained."""
    for callback in _averaging(module):
        patches.set(callback, "setup", lambda *_, **__: None)


def set_up(module: pl.LightningModule) -> None:
    """Run the hooks that were delayed, now that ``module`` is what will be trained. Not a collective."""
    stage: Any = module.trainer.state.fn
    with PatchStack() as while_copying:
        if is_sharded(module):
            # Only within these calls: other callbacks that copy the module want it whole.
            while_copying.set(module, "__deepcopy__", partial(_copy_of, module), is_new=True)
        # WeightAveraging would call the user's, to have layers to copy.
        while_copying.set(module, "configure_model", partial(pl.LightningModule.configure_model, module))
        for callback in _averaging(module):
            if "setup" in vars(callback):  # else it was added since, and has run its own
                type(callback).setup(callback, module.trainer, module, stage)


def save_unswapped(module: pl.LightningModule, patches: PatchStack) -> Callable[[], bool]:
    """Make averaging callbacks save averages as averages while a validation has them in the module's place.

    Returns what tells whether that is so.
    """
    swapped: set[Callback] = set()

    def swap(callback: Callback, hook: Callable[..., None], *args: Any) -> None:
        hook(*args)
        swapped.symmetric_difference_update([callback])

    def save(callback: Callback, hook: Callable[..., None], *args: Any) -> None:
        hook(*args)
        checkpoint = args[-1]
        if callback in swapped and "current_model_state" in checkpoint:
            average = checkpoint["current_model_state"]
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = average

    following = {
        "on_validation_epoch_start": swap,
        "on_validation_epoch_end": swap,
        "on_save_checkpoint": save,
    }
    for callback in _averaging(module):
        if isinstance(callback, WeightAveraging):
            for name, follow in following.items():
                patches.set(callback, name, partial(follow, callback, getattr(callback, name)))
    return lambda: bool(swapped)


def _copy_of(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The weights of ``module`` under their names, shards as shards, without wrappers and forwards."""
    copied = nn.Module()
    for path, original in module.named_modules(remove_duplicate=False):
        if type(original).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{class_name(original)} has an extra state (get_extra_state), which an average of sharded"
                " weights would lose: keep it in buffers, or pass data_parallel='ddp'."
            )
        own_path = without_wrappers(f"{path}.").rstrip(".")
        into = copied
        if own_path:
            # A wrapper and what it wraps, which comes next and has the tensors, have one path.
            into = nn.Module()
            copied.set_submodule(own_path, into)
        copy_tensors(original, into, memo)  # with one memo: shared tensors stay shared
    return copied


def _averaging(module: pl.LightningModule) -> list[Callback]:
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    return [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]


def averaged_models(module: pl.LightningModule) -> list[AveragedModel]:
    """The averages that callbacks keep of the weights of ``module``."""
    held = [value for callback in _averaging(module) for value in vars(callback).values()]
    return [value for value in held if isinstance(value, AveragedModel)]
