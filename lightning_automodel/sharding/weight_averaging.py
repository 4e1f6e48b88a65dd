"""Lightning's callbacks that keep weights or replace them, with weights that are sharded: averages (EMA, SWA), pruning.

The averaging callbacks copy the module in their ``setup`` hook. That is before it is sharded, or after an earlier run
has sharded it, and then FSDP2 refuses; or before it has values, and then it cannot be moved. So the copy that they get
is empty at first, and filled as soon as the module is distributed. Each rank averages its own shards, which
communicates nothing.
"""

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_automodel import lightning_internals
from lightning_automodel.sharding import meta_init
from lightning_automodel.sharding.param_names import WRAPPED
from lightning_automodel.sharding.units import is_sharded


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
        """Copy the weights of ``module``, shards as shards, to where the empty copy was moved. Not a collective."""
        _copy_weights(module, self, {})
        moves, self._moves = self._moves or [], None
        for args, kwargs in moves:
            self.to(*args, **kwargs)


def _copy_weights(module: nn.Module, into: nn.Module, copies: dict[int, Any]) -> None:
    """Copy parameters and buffers, shared ones once, under names that leave out what merely wraps a module."""
    copies[id(module)] = into
    while wrapped := next((module._modules[name] for name in WRAPPED if name in module._modules), None):
        module = wrapped
        copies[id(module)] = into
    into.training = module.training
    into._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        into._parameters[name] = copies.get(id(parameter))
    for name, buffer in module._buffers.items():
        if buffer is not None and id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        into._buffers[name] = copies.get(id(buffer))
    for name, child in module._modules.items():
        if child is not None and id(child) not in copies:
            _copy_weights(child, _empty_copy(child), copies)
        into._modules[name] = copies.get(id(child))


class _ExtraState(nn.Module):
    """Part of a copy whose original keeps more than tensors: it has that as it was copied, or loaded since."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    @override
    def get_extra_state(self) -> Any:
        return self._state

    @override
    def set_extra_state(self, state: Any) -> None:
        self._state = state


def _empty_copy(module: nn.Module) -> nn.Module:
    while wrapped := next((module._modules[name] for name in WRAPPED if name in module._modules), None):
        module = wrapped
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return nn.Module()
    return _ExtraState(copy.deepcopy(module.get_extra_state()))


class AverageCopies:
    """Gives the averaging callbacks of a Trainer copies of the module that are distributed when it is."""

    def __init__(self) -> None:
        self._waiting: list[Callback] = []
        self._copies: list[WeightCopy] = []

    def prepare(self, module: pl.LightningModule, shards: bool) -> None:
        """Until :meth:`end_setup_hooks`, let a deep copy that such a callback makes in its set-up be an empty one.

        Args:
            module: The LightningModule, with its Trainer.
            shards: Whether it is to be sharded; else that holds for a copy of a module without values alone.
        """
        self._copies = []
        averaging = (WeightAveraging, StochasticWeightAveraging)
        self._waiting = [callback for callback in _callbacks(module) if isinstance(callback, averaging)]
        for callback in self._waiting:
            callback.__dict__["setup"] = partial(self._set_up, callback, shards)

    def _set_up(
        self, callback: Callback, shards: bool, trainer: pl.Trainer, module: pl.LightningModule, stage: str
    ) -> None:
        del callback.__dict__["setup"]
        module.__dict__["__deepcopy__"] = partial(self._copy, module, shards)
        try:
            callback.setup(trainer, module, stage=stage)
        finally:
            module.__dict__.pop("__deepcopy__", None)

    def _copy(self, module: pl.LightningModule, shards: bool, memo: dict[int, Any]) -> Any:
        if not shards and not meta_init.waiting(module):
            del module.__dict__["__deepcopy__"]
            return copy.deepcopy(module, memo)
        self._copies.append(WeightCopy())
        return self._copies[-1]

    def end_setup_hooks(self) -> None:
        """Let the callbacks be what they were, also where their set-up was never reached."""
        for callback in self._waiting:
            callback.__dict__.pop("setup", None)
        self._waiting = []

    def fill(self, module: pl.LightningModule) -> None:
        """Fill the copies with the weights of ``module``, which has values and its shards now. Not a collective."""
        for empty in self._copies:
            empty.fill(module)
        self._copies = []
        for averaged in filter(is_sharded, averaged_models(module)):
            averaged.update_parameters = _ByKind(averaged)  # type: ignore[method-assign]


def refuse_pruning(module: pl.LightningModule) -> None:
    """Raise ValueError if a callback is to prune ``module``, which is to be sharded."""
    if any(isinstance(callback, ModelPruning) for callback in _callbacks(module)):
        raise ValueError(
            "ModelPruning compares all elements of a parameter and puts a masked one in its place, but of a sharded"
            " parameter each rank holds a part: pass AutomodelStrategy(data_parallel='ddp'), or prune the trained"
            " model afterwards with torch.nn.utils.prune."
        )


def keeps_average(module: pl.LightningModule) -> bool:
    """Whether a callback will look for the average of the weights in a checkpoint, under ``state_dict``."""
    return bool(averaged_models(module))


def _callbacks(module: pl.LightningModule) -> list[Callback]:
    return module.trainer.callbacks  # type: ignore[attr-defined]


def averaged_models(module: pl.LightningModule) -> list[AveragedModel]:
    """The averages that callbacks keep of the weights of ``module``."""
    averaged = [lightning_internals.averaged_model(c) for c in _callbacks(module) if isinstance(c, WeightAveraging)]
    return [model for model in averaged if model is not None]


class _ByKind:
    """Updates an average in two goes, shards and plain tensors: torch's fused averaging takes no mixture of them."""

    def __init__(self, averaged: AveragedModel) -> None:
        self._averaged = averaged

    def __call__(self, model: nn.Module) -> None:
        averaged = self._averaged
        average, n_averaged = averaged.module, averaged.n_averaged.clone()
        kinds = {isinstance(tensor, DTensor) for tensor in (*average.parameters(), *average.buffers())}
        try:
            for sharded in kinds:
                averaged.n_averaged.copy_(n_averaged)
                averaged.module = _select(average, sharded)
                AveragedModel.update_parameters(averaged, _select(model, sharded))
        finally:
            averaged.module = average


def _select(model: nn.Module, sharded: bool) -> nn.Module:
    """The parameters and buffers of ``model`` that are sharded, or those that are not, themselves, in their order."""
    selected = nn.Module()
    for index, parameter in enumerate(model.parameters()):
        if isinstance(parameter, DTensor) == sharded:
            selected.register_parameter(str(index), parameter)
    for index, buffer in enumerate(model.buffers()):
        if isinstance(buffer, DTensor) == sharded:
            selected.register_buffer(f"buffer_{index}", buffer)
    return selected
