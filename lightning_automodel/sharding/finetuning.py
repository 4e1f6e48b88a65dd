"""Lightning's finetuning callbacks, with sharded weights."""

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_automodel.internals.patching import PatchStack


def finetune_by_identity(module: pl.LightningModule, patches: PatchStack) -> None:
    """Make finetuning callbacks of a sharded ``module`` look for parameters of an optimizer by identity.

    Lightning compares values, which takes a collective for each pair of sharded parameters, fails for a
    sharded and a replicated one, and takes two layers of equal weights for one.
    """
    if any(isinstance(callback, BaseFinetuning) for callback in module.trainer.callbacks):  # type: ignore[attr-defined]
        patches.set(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in_optimizer))


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    params = list(params)
    new = [parameter for parameter in params if parameter not in owned]
    if len(new) < len(params):
        rank_zero_warn(
            f"{len(params) - len(new)} parameters to be unfrozen belong to {type(optimizer).__name__}"
            " already, and stay in their group: give it only trainable parameters in configure_optimizers."
        )
    return new
