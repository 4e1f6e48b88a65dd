"""Lightning's callbacks that average weights (EMA, SWA), prune or unfreeze them, with sharded weights.

The averaging callbacks deep-copy the module in their ``setup`` hook. There it is not sharded yet; or it has no values,
so the copy cannot be moved; or an earlier run has sharded it, and FSDP2 refuses the copy. So the callbacks get an empty
copy, which is filled when the module is distributed. Each rank averages its own shards, without communication.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding import meta_init
from lightning_automodel.sharding.param_names import WRAPPED
from lightning_automodel.sharding.units import is_sharded
from lightning_automodel.torch_internals import local_tensor


class WeightCopy(nn.Module):
    """The weights of a module under their names, without a forward; empty until :meth:`fill`."""

    def __init__(self) -> None:
        super().__init__()
        self._moves: list[tuple[Any, Any]] | None = []

    @override
    def to(self, *args: Any, **kwargs: Any) -> "WeightCopy":
        if self._moves is None:
            return super().to(*args, **kwargs)
        self._moves.append((args, kwargs))
        return self

    def fill(self, module: nn.Module) -> None:
        """Copy the weights of ``module``, shards as shards, and move them as the empty copy was. Not a collective."""
        _copy_weights(module, self, {})
        moves, self._moves = self._moves or [], None
        for args, kwargs in moves:
            self.to(*args, **kwargs)


def _copy_weights(module: nn.Module, into: nn.Module, copies: dict[int, Any]) -> None:
    """Copy parameters and buffers, shared ones once, under names without the prefixes of wrappers."""
    copies[id(module)] = into
    while wrapped := _wrapped_by(module):
        module = wrapped
        copies[id(module)] = into
    into.training = module.training
    persistent = module.state_dict(keep_vars=True).keys()
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        into.register_parameter(name, copies[id(parameter)])
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        into.register_buffer(name, copies[id(buffer)], persistent=name in persistent)
    # Not named_children(), which leaves out a module's second name.
    for name, child in module._modules.items():
        if child is not None and id(child) not in copies:
            _copy_weights(child, _empty_copy(child), copies)
        into.register_module(name, copies.get(id(child)))


def _wrapped_by(module: nn.Module) -> nn.Module | None:
    return next((child for name, child in module.named_children() if name in WRAPPED), None)


def _empty_copy(module: nn.Module) -> nn.Module:
    while wrapped := _wrapped_by(module):
        module = wrapped
    keeps_more = type(module).get_extra_state is not nn.Module.get_extra_state
    return _ExtraState(copy.deepcopy(module.get_extra_state())) if keeps_more else nn.Module()


class _ExtraState(nn.Module):
    """Part of a copy whose original has an extra state: holds it as it was copied, or loaded since."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    @override
    def get_extra_state(self) -> Any:
        return self._state

    @override
    def set_extra_state(self, state: Any) -> None:
        self._state = state


class AverageCopies:
    """Gives the averaging callbacks of a Trainer copies of the module that are distributed like the module."""

    def __init__(self) -> None:
        self._patches = PatchStack()
        self._copies: list[WeightCopy] = []

    def prepare(self, module: pl.LightningModule, shards: bool) -> None:
        """Patch the averaging callbacks until :meth:`end_setup_hooks`: their deep copies in ``setup`` are empty.

        Args:
            module: The LightningModule, with its Trainer.
            shards: Whether it will be sharded. If not, this does nothing unless some of its tensors have no values.
        """
        self._copies = []
        if not shards and not meta_init.names_without_values(module):
            return
        for callback in _callbacks(module):
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                self._patches.set(callback, "setup", partial(self._set_up, callback))

    def _set_up(self, callback: Callback, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        patches = PatchStack()
        # Only within this call: other callbacks that copy the module want it whole.
        patches.set(module, "__deepcopy__", self._copy, is_new=True)
        try:
            type(callback).setup(callback, trainer, module, stage)
        finally:
            patches.restore()

    def _copy(self, memo: dict[int, Any]) -> WeightCopy:
        self._copies.append(WeightCopy())
        return self._copies[-1]

    def end_setup_hooks(self) -> None:
        """Restore the callbacks, also if their ``setup`` never ran."""
        self._patches.restore()

    def fill(self, module: pl.LightningModule) -> None:
        """Fill the copies with the weights of ``module``, now that it is distributed. Not a collective."""
        for empty in self._copies:
            empty.fill(module)
        self._copies = []
        for averaged in filter(is_sharded, averaged_models(module)):
            averaged.update_parameters = partial(_update_locally, averaged)  # type: ignore[method-assign]


def refuse_pruning(module: pl.LightningModule) -> None:
    """Raise ValueError if a callback would prune ``module``, which will be sharded."""
    if any(isinstance(callback, ModelPruning) for callback in _callbacks(module)):
        raise ValueError(
            "ModelPruning masks a parameter by comparing all its elements, but each rank holds only a part of a sharded"
            " one: pass AutomodelStrategy(data_parallel='ddp'), or prune the trained model afterwards with"
            " torch.nn.utils.prune."
        )


def finetune_by_identity(module: pl.LightningModule, patches: PatchStack) -> None:
    """Make finetuning callbacks of a sharded ``module`` look for parameters of an optimizer by identity.

    Lightning compares values, which takes a collective for each pair of sharded parameters, fails for a sharded and a
    replicated one, and takes two layers of equal weights for one.
    """
    if any(isinstance(callback, BaseFinetuning) for callback in _callbacks(module)):
        patches.set(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in_optimizer))


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    params = list(params)
    new = [parameter for parameter in params if parameter not in owned]
    if len(new) < len(params):
        rank_zero_warn(
            f"{len(params) - len(new)} parameters to be unfrozen belong to {type(optimizer).__name__} already, and stay"
            " in their group: give it only trainable parameters in configure_optimizers."
        )
    return new


def _callbacks(module: pl.LightningModule) -> list[Callback]:
    return module.trainer.callbacks  # type: ignore[attr-defined]


def averaged_models(module: pl.LightningModule) -> list[AveragedModel]:
    """The averages that callbacks keep of the weights of ``module``."""
    averaging = [callback for callback in _callbacks(module) if isinstance(callback, WeightAveraging)]
    return [held for callback in averaging for held in vars(callback).values() if isinstance(held, AveragedModel)]


def _update_locally(averaged: AveragedModel, model: nn.Module) -> None:
    """Update an average shard by shard: torch's fused averaging cannot mix shards and plain tensors."""
    average = averaged.module
    averaged.module = _local_tensors(average)
    try:
        AveragedModel.update_parameters(averaged, _local_tensors(model))
    finally:
        averaged.module = average


def _local_tensors(model: nn.Module) -> nn.Module:
    """This rank's parts of the parameters and buffers of ``model``, sharing their memory, in their order."""
    local = nn.Module()
    for index, parameter in enumerate(model.parameters()):
        local.register_parameter(str(index), nn.Parameter(local_tensor(parameter.detach()), requires_grad=False))
    for index, buffer in enumerate(model.buffers()):
        local.register_buffer(f"buffer_{index}", local_tensor(buffer))
    return local
