"""Lightning's callbacks that average weights (EMA, SWA), with sharded weights.

They deep-copy the module in their ``setup`` hook, where it is not sharded yet, or has no values, or FSDP2
refuses the copy. So their hook runs once the module is distributed, with a copy that is distributed like it.
Each rank averages its own shards, without communication.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import without_wrappers
from lightning_automodel.sharding import meta_init
from lightning_automodel.sharding.units import class_name


class LateAverages:
    """Delays the ``setup`` of a Trainer's averaging callbacks until the module is distributed."""

    def __init__(self) -> None:
        self._delayed: list[Callable[[], None]] = []

    def delay(self, module: pl.LightningModule, shards: bool, patches: PatchStack) -> None:
        """Delay them until :meth:`set_up`, if ``module`` will be sharded or changes before it is trained.

        That is where some of its tensors have no values, or will be converted to float64: validations, which
        swap average and weights, would round these.
        """
        self._delayed = []
        is_converted = isinstance(module.trainer.precision_plugin, DoublePrecision)
        for callback in _callbacks(module):
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) and (
                shards or is_converted or meta_init.names_without_values(module)
            ):
                patches.set(callback, "setup", partial(self._delay, callback))

    def _delay(self, callback: Callback, *args: Any, **kwargs: Any) -> None:
        self._delayed.append(partial(type(callback).setup, callback, *args, **kwargs))

    def set_up(self, module: pl.LightningModule) -> None:
        """Run the delayed hooks, now that ``module`` is distributed. Not a collective."""
        with PatchStack() as while_copying:
            # Only within these calls: other callbacks that copy the module want it whole.
            while_copying.set(module, "__deepcopy__", partial(_copy_of, module), is_new=True)
            if is_overridden("configure_model", module):
                # WeightAveraging calls it, to have layers to copy.
                while_copying.set(module, "configure_model", lambda: None)
            for set_up in self._delayed:
                set_up()


def save_unswapped(module: pl.LightningModule, patches: PatchStack) -> Callable[[], bool]:
    """Make averaging callbacks save averages as averages while a validation has them in the module's place.

    Returns what tells whether that is so.
    """
    are_swapped = [
        _save_unswapped(callback, patches)
        for callback in _callbacks(module)
        if isinstance(callback, WeightAveraging)
    ]
    return lambda: any(is_swapped() for is_swapped in are_swapped)


def _save_unswapped(callback: WeightAveraging, patches: PatchStack) -> Callable[[], bool]:
    save = callback.on_save_checkpoint
    is_swapped = False

    def noting(hook: Callable[..., None], swaps: bool, *args: Any) -> None:
        nonlocal is_swapped
        hook(*args)
        is_swapped = swaps

    def save_then_swap(
        trainer: "pl.Trainer", module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        save(trainer, module, checkpoint)
        current = checkpoint.get("current_model_state")
        if is_swapped and current is not None:
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = current

    for name, swaps in {"on_validation_epoch_start": True, "on_validation_epoch_end": False}.items():
        patches.set(callback, name, partial(noting, getattr(callback, name), swaps))
    patches.set(callback, "on_save_checkpoint", save_then_swap)
    return lambda: is_swapped


def _copy_of(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The weights of ``module`` under their names, shards as shards, without wrappers and forwards."""
    copied = nn.Module()
    persistent = set(map(without_wrappers, module.state_dict(keep_vars=True)))
    copies: dict[Tensor, Tensor] = {}  # shared tensors stay shared
    for path, original in module.named_modules(remove_duplicate=False):
        if type(original).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{class_name(original)} has an extra state (get_extra_state), which an average of sharded"
                " weights would lose: keep it in buffers, or pass data_parallel='ddp'."
            )
        own_path = without_wrappers(f"{path}.").rstrip(".")
        parent, _, name = own_path.rpartition(".")
        # Parents come first; a wrapper and what it wraps have one path.
        if name and name not in dict(copied.get_submodule(parent).named_children()):
            copied.get_submodule(parent).register_module(name, nn.Module())
        into = copied.get_submodule(own_path)
        for name, parameter in original.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in copies:
                copies[parameter] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            into.register_parameter(name, cast(nn.Parameter, copies[parameter]))
        for name, buffer in original.named_buffers(recurse=False, remove_duplicate=False):
            is_persistent = f"{own_path}.{name}".removeprefix(".") in persistent
            into.register_buffer(name, copies.setdefault(buffer, buffer.detach().clone()), is_persistent)
    return copied


def _callbacks(module: pl.LightningModule) -> list[Callback]:
    return module.trainer.callbacks  # type: ignore[attr-defined]


def averaged_models(module: pl.LightningModule) -> list[AveragedModel]:
    """The averages that callbacks keep of the weights of ``module``."""
    averaging = [callback for callback in _callbacks(module) if isinstance(callback, WeightAveraging)]
    return [
        held for callback in averaging for held in vars(callback).values() if isinstance(held, AveragedModel)
    ]
