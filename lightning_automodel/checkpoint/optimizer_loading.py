"""Loads the saved state of one optimizer, whose parameters may stand in another order in this run."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.checkpoint.errors import CheckpointError, some
from lightning_automodel.checkpoint.optimizers import NOTES, NamedOptimizer, by_name, has_groups, renamed
from lightning_automodel.checkpoint.tree import Path, keyed_tensors, leaves, mapped

AS_SAVED = "configure the optimizers that the run was saved with"


def notes_of(saved: dict[str, Any]) -> dict[int, str]:
    """The notes on tensors of a ``saved`` state, by the id of the tensor."""
    notes = saved.get(NOTES, {})
    return {id(tensor): notes[key] for key, _, tensor in keyed_tensors(saved) if key in notes}


def state_here(saved: dict[str, Any], named: NamedOptimizer, index: int) -> dict[str, Any]:
    """The ``saved`` state of optimizer ``index`` with parameters by name, without what other ranks own.

    CheckpointError if it was saved for another optimizer.
    """
    state = by_name({key: value for key, value in saved.items() if key != NOTES}, named.names)
    if has_groups(state):
        _check_groups(state["param_groups"], named, index)
        for name, is_owned in named.owned.items():
            if not is_owned:
                state["state"].pop(name, None)
    return state


def _check_groups(saved: list[dict[str, Any]], named: NamedOptimizer, index: int) -> None:
    """Raise CheckpointError unless the optimizer has the ``saved`` groups, with the same parameters and options.

    Flags may be missing: newer releases of torch have added some.
    """
    there = [group["params"] for group in saved]
    if list(map(set, there)) != list(map(set, named.groups)):
        only_saved = [name for names in there for name in names if name not in named.names]
        only_here = [name for name in named.names if not any(name in names for names in there)]
        raise CheckpointError(
            f"optimizer {index} trains other parameters, or in other groups, than when it was saved (only"
            f" saved: {some(only_saved) or 'none'}; only here: {some(only_here) or 'none'}): {AS_SAVED}, or"
            " change checkpoint['optimizer_states'] in on_load_checkpoint ([] starts them afresh)"
        )
    defaults = named.optimizer.defaults.items()
    needed = {name for name, value in defaults if value is not None and not isinstance(value, bool)}
    for group in saved:
        if missing := sorted(needed - group.keys()):
            raise CheckpointError(
                f"optimizer {index} is a {type(named.optimizer).__name__}, and the checkpoint lacks its"
                f" {some(missing)}: {AS_SAVED}"
            )


def load_state(
    named: NamedOptimizer, state: dict[str, Any], saved_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Load a state with parameters by name, and values. Not a collective.

    torch's ``load_state_dict`` casts states to the dtype of their parameter, which makes float32 states of
    bfloat16 parameters, counters and masks inexact, and loses strings and ordered dicts. They are put back,
    unless the parameter had another dtype in the checkpoint, of which ``saved_dtypes`` are.
    """
    optimizer = named.optimizer
    numbered = renamed(state, {name: number for number, name in enumerate(named.names)})
    if not has_groups(numbered):
        optimizer.load_state_dict(numbered)
        return
    for group in numbered["param_groups"]:
        group["params"] = sorted(group["params"])  # torch goes by the order
    optimizer.load_state_dict(numbered)
    for name, parameter in named.parameters.items():
        saved = state["state"].get(name)
        if saved is not None and parameter.dtype == saved_dtypes.get(name):
            loaded = optimizer.state[parameter]
            loaded.update(mapped(saved, partial(_as_saved, dict(leaves(loaded)))))


def _as_saved(loaded: Mapping[Path, Any], path: Path, saved: Any) -> Any:
    """The value that was ``saved`` for a leaf, on the device of the one that was ``loaded`` for it."""
    value = loaded.get(path, saved)
    if not isinstance(value, Tensor):
        return saved
    # Torch's optimizers have a rule of their own for their steps.
    if not isinstance(saved, Tensor) or saved.dtype == value.dtype or path == ("step",):
        return value
    return saved.to(value.device)
