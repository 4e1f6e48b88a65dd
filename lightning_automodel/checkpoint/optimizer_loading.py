"""Loads the saved state of one optimizer, whose parameters may have other names and another order in this run."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError, some
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    NamedOptimizer,
    by_name,
    has_groups,
    ids_of,
    renamed,
)
from lightning_automodel.checkpoint.tree import Path, keyed_tensors, leaves, mapped

_AS_SAVED = "configure the optimizers that the run was saved with"


def notes_of(saved: dict[str, Any]) -> dict[int, str]:
    """The notes on tensors of a ``saved`` state, by the id of the tensor: parameters may have other names here."""
    notes = saved.get(NOTES, {})
    return {id(tensor): notes[key] for key, _, tensor in keyed_tensors(saved) if key in notes}


def state_here(saved: dict[str, Any], named: NamedOptimizer, index: int) -> dict[str, Any]:
    """The ``saved`` state of optimizer ``index`` by this run's names, without what other ranks own.

    CheckpointError if it was saved for another optimizer.
    """
    state = by_name({key: value for key, value in saved.items() if key != NOTES}, named.names)
    if has_groups(state):
        _check_options(named.optimizer, state["param_groups"], index)
        state = renamed(state, _names_here(state["param_groups"], named, index))
        for name, is_owned in named.owned.items():
            if not is_owned:
                state["state"].pop(name, None)
    return state


def load_state(
    named: NamedOptimizer, state: dict[str, Any], saved_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Load a state of this run's names, with values. Not a collective.

    ``saved_dtypes`` are those of parameters in the checkpoint. Where a parameter has another one now, torch
    casts its state to that; elsewhere it stays as it was saved.
    """
    optimizer = named.optimizer
    numbered = renamed(state, {name: number for number, name in enumerate(named.names)})
    packed = optimizer.state_dict()
    if not has_groups(numbered) or not has_groups(packed):
        optimizer.load_state_dict(numbered)
        return
    # Options that were not saved stay this run's, such as flags that newer releases of torch have added.
    groups = zip(packed["param_groups"], numbered["param_groups"], strict=True)
    numbered["param_groups"] = [{**own, **saved, "params": own["params"]} for own, saved in groups]
    own_dtypes = {name: parameter.dtype for name, parameter in named.parameters.items()}
    keeps = [name in own_dtypes and own_dtypes[name] == saved_dtypes.get(name) for name in named.names]
    with _uncast(optimizer, keeps):
        optimizer.load_state_dict({**packed, **numbered})


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


def check_number(what: str, saved: int, own: int) -> None:
    """Raise CheckpointError unless the number that was saved is this run's own."""
    if saved != own:
        raise CheckpointError(f"it holds {saved} {what}, and this run has {own}: {_AS_SAVED}")


def _check_options(optimizer: Optimizer, saved: list[dict[str, Any]], index: int) -> None:
    """Raise CheckpointError unless the ``saved`` groups are as many as the optimizer's, and have its options.

    Flags may be missing: newer releases of torch have added some.
    """
    check_number(f"groups of parameters of optimizer {index}", len(saved), len(optimizer.param_groups))
    defaults = optimizer.defaults.items()
    needed = {name for name, value in defaults if value is not None and not isinstance(value, bool)}
    for options in saved:
        if missing := sorted(needed - options.keys()):
            raise CheckpointError(
                f"optimizer {index} is a {type(optimizer).__name__}, and the checkpoint lacks its"
                f" {some(missing)}: {_AS_SAVED}"
            )


def _names_here(saved: list[dict[str, Any]], named: NamedOptimizer, index: int) -> dict[Any, Any]:
    """This run's names of the parameters in the ``saved`` groups of an optimizer.

    Saved names that the model does not have are taken for renamed parameters, matched by position, if the
    group has as many parameters as the saved one. Raises CheckpointError if the optimizer trains other
    parameters.
    """
    found: dict[Any, Any] = {}
    for number, (options, here) in enumerate(zip(saved, named.groups, strict=True)):
        there = list(options["params"])
        followed = [old if old in named.parameters else new for old, new in zip(there, here, strict=False)]
        if set(there) == set(here):
            followed = there
        elif len(there) != len(here) or followed != here:
            raise CheckpointError(
                f"optimizer {index} trains other parameters in group {number} than when it was saved (only"
                f" saved: {_missing(there, here)}; only here: {_missing(here, there)}): {_AS_SAVED}"
            )
        found.update(zip(there, followed, strict=True))
    return found


def _missing(names: list[Any], others: list[Any]) -> str:
    return some([name for name in names if name not in others]) or "none"
