"""Lightning's finetuning callbacks, with sharded weights."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_automodel.internals.patching import PatchStack


def finetune_by_identity(module: pl.LightningModule, patches: PatchStack) -> None:
    """Make finetuning callbacks of a sharded ``module`` look for parameters of an optimizer by identity.

    Lightning compares values, which gathers both parameters of each pair, and takes two layers of equal
    weights for one.
    """
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            unfreeze = partial(_unfreeze, callback.unfreeze_and_add_param_group)
            patches.set(callback, "unfreeze_and_add_param_group", unfreeze)


def _unfreeze(
    unfreeze: Callable[..., None], modules: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> None:
    """Let ``unfreeze`` see groups without parameters, so that it compares nothing, and add what is new."""
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}

    def add(group: dict[str, Any]) -> None:
        new = [parameter for parameter in group["params"] if parameter not in owned]
        num_owned = len(group["params"]) - len(new)
        if num_owned:
            rank_zero_warn(
                f"{num_owned} parameters to be unfrozen belong to {type(optimizer).__name__} already, and stay in"
                " their group: give it only trainable parameters in configure_optimizers."
            )
        if new:
            optimizer.add_param_group({**group, "params": new})

    groups = [{**group, "params": []} for group in optimizer.param_groups]
    unfreeze(modules, SimpleNamespace(param_groups=groups, add_param_group=add), *args, **kwargs)
