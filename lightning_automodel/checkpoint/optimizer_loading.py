"""Loads the saved state of one optimizer, whose tensors are read as shards where its parameters are sharded."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError, some
from lightning_automodel.checkpoint.layouts import Layouts
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    Names,
    by_name,
    flat,
    has_groups,
    ids_of,
    owner_names,
    renamed,
)
from lightning_automodel.checkpoint.tree import Path, keys_of, leaves, mapped

_AS_SAVED = "configure the optimizers that the run was saved with"


class OptimizerLoading:
    """Loads one optimizer.

    Args:
        saved: The saved state.
        optimizer: The optimizer.
        names: Names of its parameters by group.
        index: Number of the optimizer.
        layouts: The layouts of the model.
        owned: The names of parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: If the state was saved for another optimizer.

    Attributes:
        state: The state by this run's names, without what other ranks own.
    """

    def __init__(
        self,
        saved: dict[str, Any],
        optimizer: Optimizer,
        names: Names,
        index: int,
        layouts: Layouts,
        owned: Mapping[str, bool],
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._layouts = layouts
        self._owned = owned
        state = by_name({key: value for key, value in saved.items() if key != NOTES}, flat(names))
        notes = saved.get(NOTES, {})
        if "local" in notes.values():
            raise CheckpointError(
                f"optimizer {index} keeps plain tensors of a rank's part of its parameters, which only the"
                " version of lightning_automodel that saved them restores: resume with that version, or load"
                " the weights alone (load_from_checkpoint)"
            )
        # Of leaves, which live as long as the checkpoint: parameters may have other names here.
        keys = keys_of(state, with_values=True)
        self._notes = {id(leaf): notes.get(keys[path]) for path, leaf in leaves(state) if path in keys}
        if has_groups(state):
            groups = state["param_groups"]
            _check_groups(optimizer, groups, index)
            saved_names = [list(group["params"]) for group in groups]
            state = renamed(state, _new_names(saved_names, names, layouts.own, index))
            state["state"] = {
                name: value for name, value in state["state"].items() if owned.get(name) is not False
            }
        self.state = state

    def target(self, path: Path, leaf: Tensor) -> Tensor | None:
        """See :data:`.layouts.Target`."""
        note = self._notes.get(id(leaf))
        if note == "whole" or not self._owned.keys().isdisjoint(path[1:2]):
            return self._layouts.target(leaf, ())
        names = owner_names(path, leaf, self._names)
        return self._layouts.target(leaf, names, was_sharded=note == "sharded")

    def load(self, state: dict[str, Any], saved_dtypes: Mapping[str, torch.dtype]) -> None:
        """Load :attr:`state` with values. Not a collective.

        ``saved_dtypes`` are those of parameters in the checkpoint. Where a parameter has another one now,
        torch casts its state to that; elsewhere it stays as it was saved.
        """
        packed = self._optimizer.state_dict()
        names = flat(self._names)
        if not has_groups(state) or not has_groups(packed):
            numbers = {name: number for number, name in enumerate(names)}
            self._optimizer.load_state_dict(renamed(state, numbers))
            return
        groups = zip(packed["param_groups"], state["param_groups"], strict=True)
        numbered = renamed(state, dict(zip(names, ids_of(packed), strict=True)))
        # Options that were not saved stay this run's, such as flags that newer releases of torch have added.
        numbered["param_groups"] = [{**own, **saved, "params": own["params"]} for own, saved in groups]
        own = self._layouts.own
        keeps = [name in own and own[name].dtype == saved_dtypes.get(name) for name in names]
        with _uncast(self._optimizer, keeps):
            self._optimizer.load_state_dict({**packed, **numbered})


@contextmanager
def _uncast(optimizer: Optimizer, keeps: Collection[bool]) -> Iterator[None]:
    """Keep states as they are where torch's ``load_state_dict`` casts them to their parameter's dtype.

    It makes float32 states of bfloat16 parameters, counters and masks inexact, and loses strings and
    ordered dicts. ``keeps`` has the choice for each parameter of the ``optimizer``, in its order.
    """
    given: list[Mapping[str, Any]] = []

    def put_back(_: Optimizer) -> None:
        (state,) = given
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter, is_kept in zip(ids_of(state), parameters, keeps, strict=True):
            if is_kept and number in state["state"]:
                loaded = dict(leaves(optimizer.state[parameter]))
                saved = mapped(state["state"][number], partial(_as_saved, loaded))
                optimizer.state[parameter].update(saved)

    # The user's hooks come before and after: what they convert stays converted.
    handles = [
        optimizer.register_load_state_dict_pre_hook(lambda _, state: given.append(state)),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_saved(loaded: Mapping[Path, Any], path: Path, saved: Any) -> Any:
    """The value that was ``saved`` for a leaf, on the device of the one that was ``loaded`` for it."""
    value = loaded.get(path, saved)
    if not isinstance(value, Tensor):
        return saved
    # Torch's optimizers have a rule of their own for their steps.
    if not isinstance(saved, Tensor) or saved.dtype == value.dtype or path == ("step",):
        return value
    return saved.to(value.device)


def no_optimizer_state() -> CheckpointError:
    """The error for a checkpoint without states of optimizers."""
    return CheckpointError(
        "it holds no state of optimizer 0: it was saved with save_weights_only=True, or with fewer"
        " optimizers, or it is a directory of another program, of which weights alone are read (to"
        " go on from a run of ModelParallelStrategy, let it write one file:"
        " save_distributed_checkpoint=False; Lightning's consolidate_checkpoint reads FSDPStrategy's"
        " directories alone); validate, test and predict can load it"
    )


def check_number(what: str, saved: int, own: int) -> None:
    """Raise CheckpointError unless the number that was saved is this run's own."""
    if saved != own:
        raise CheckpointError(f"it holds {saved} {what}, and this run has {own}: {_AS_SAVED}")


def _check_groups(optimizer: Optimizer, saved: list[dict[str, Any]], index: int) -> None:
    """Raise CheckpointError unless the ``saved`` groups are as many as the optimizer's, and have its options.

    Flags may be missing: newer releases of torch have added some.
    """
    check_number(f"groups of parameters of optimizer {index}", len(saved), len(optimizer.param_groups))
    defaults = optimizer.defaults.items()
    needed = {name for name, value in defaults if value is not None and not isinstance(value, bool)}
    for settings in saved:
        if missing := sorted(needed - set(settings)):
            raise CheckpointError(
                f"optimizer {index} is a {type(optimizer).__name__}, and the checkpoint lacks its"
                f" {some(missing)}: {_AS_SAVED}"
            )


def _new_names(saved: Names, own: Names, known: Mapping[str, Any], index: int) -> dict[Any, Any]:
    """This run's names of the ``saved`` parameters of an optimizer.

    Saved names that the model does not have are taken for renamed parameters, matched by position, if the
    group has as many parameters as the saved one. Raises CheckpointError if the optimizer trains other
    parameters.

    Args:
        saved: Saved names by group.
        own: This run's names by group.
        known: Names of all parameters of this run's model.
        index: Number of the optimizer.
    """
    found: dict[Any, Any] = {}
    for number, (there, here) in enumerate(zip(saved, own, strict=True)):
        if set(there) == set(here):
            found.update(zip(there, there, strict=True))
            continue
        pairs = list(zip(there, here, strict=False))
        if len(there) == len(here) and all(old == new or old not in known for old, new in pairs):
            found.update(pairs)
            continue
        differing: list[str] = []
        if only_saved := [name for name in there if name not in here]:
            differing.append(f"only saved: {some(only_saved)}")
        if only_here := [name for name in here if name not in there]:
            differing.append(f"only here: {some(only_here)}")
        raise CheckpointError(
            f"optimizer {index} trains other parameters in group {number} than when it was saved"
            f" ({'; '.join(differing)}): {_AS_SAVED}"
        )
    return found
