"""States of optimizers, nested in any way, under the names of parameters, and independent of sharding.

A tensor of its parameter's shape is saved and loaded like the parameter, so a state that was saved under one
engine loads under the other. Where this rule would not restore a tensor as it was, the state holds a note
under its key:

- ``sharded``: a DTensor whose shape is not its parameter's, or that belongs to no parameter;
- ``local``: a plain tensor for the rank's part of its parameter, saved as a DTensor;
- ``whole``: a plain tensor of the whole shape of its sharded parameter;
- ``owned``: a tensor that only the parameter's owner has, since the owner steps the whole parameter.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.trees import Path
from lightning_automodel.internals.torch import without_wrappers

NOTES = "lightning_automodel"
"""Key of the notes in an optimizer's saved state, if it needs any."""

OPTIMIZER_STATES = "lightning_automodel_optimizers"
"""Key in ``meta.pt`` of the states of optimizers by their keys, with a place for each tensor."""

PARAMETER_NAMES = "lightning_automodel_parameter_names"
"""Key in a replicated model's file of parameter names by optimizer and group; its states have numbers."""

SIMPLE = (str, bytes, int, float, bool, complex, type(None), torch.dtype)
_AS_SAVED = "configure the optimizers that the run was saved with"

Names = list[list[str]]
"""Names of an optimizer's parameters by group."""


def optimizer_key(index: int) -> str:
    """Key of the state of the ``index``-th optimizer."""
    return f"optimizer_{index}"


def is_optimizer_key(key: str) -> bool:
    """Whether ``key`` is the key of an optimizer's state."""
    start, _, index = key.rpartition("_")
    return start == "optimizer" and index.isdecimal()


def parameter_names(model: nn.Module, optimizer: Optimizer) -> Names:
    """Names of an optimizer's parameters in its order, by group."""
    # Within a step modules have gathered parameters, and optimizers the shards.
    names = {
        id(getattr(parameter, "shard", parameter)): without_wrappers(name)
        for name, parameter in model.named_parameters()
    }
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def flat(names: Names) -> list[str]:
    """All names, group after group."""
    return [name for group in names for name in group]


def has_groups(state: Any) -> bool:
    """Whether the state of an optimizer has the form of torch's optimizers."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list):
        return False
    return all(isinstance(group, Mapping) and "params" in group for group in groups)


def ids_of(state: Mapping[str, Any]) -> list[Any]:
    """The ids of parameters in a state of torch's form, group after group."""
    return [parameter for group in state["param_groups"] for parameter in group["params"]]


def by_name(state: Any, names: list[str]) -> Any:
    """An optimizer's state with parameters by name, even if they are numbered, as in plain optimizers' states.

    Wrappers save the state of another optimizer within theirs: it is renamed too if it has as many
    parameters. Raises CheckpointError if the outermost state has more or fewer parameters.
    """

    def names_of(ids: list[Any]) -> Mapping[Any, str]:
        if len(ids) == len(names):
            return dict(zip(ids, names, strict=True))
        return {}

    if has_groups(state):
        ids = ids_of(state)
        if all(isinstance(number, int) for number in ids) and len(ids) != len(names):
            raise CheckpointError(
                f"the saved optimizer has {len(ids)} parameters, and this run's has {len(names)}"
            )
    return rename(state, names_of, int)


def by_number(state: Any, numbers: Mapping[str, int]) -> Any:
    """The reverse of :func:`by_name`."""
    return rename(state, lambda names: {name: numbers[name] for name in names if name in numbers}, str)


def rename(state: Any, new_names: Callable[[list[Any]], Mapping[Any, Any]], kind: type) -> Any:
    """``state`` with other ids of parameters in each state of torch's form whose ids are of this ``kind``."""
    if isinstance(state, list):
        return [rename(item, new_names, kind) for item in state]
    if type(state) is not dict:
        return state
    renamed = {key: rename(value, new_names, kind) for key, value in state.items()}
    if not has_groups(state):
        return renamed
    ids = ids_of(state)
    if not all(isinstance(old, kind) for old in ids):
        return renamed
    new = new_names(ids)
    renamed["state"] = {new.get(old, old): value for old, value in state["state"].items()}
    renamed["param_groups"] = [
        {**group, "params": [new.get(old, old) for old in group["params"]]}
        for group in state["param_groups"]
    ]
    return renamed


def named_parameters(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, list[Names]]:
    """The entry to add to a file whose optimizers number parameters; empty if names are not unique."""
    known = {id(parameter) for parameter in model.parameters()}
    names = {without_wrappers(name) for name, _ in model.named_parameters()}
    trained = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    if not trained <= known or len(names) < len(known):
        return {}
    return {PARAMETER_NAMES: [parameter_names(model, optimizer) for optimizer in optimizers]}


# --- Saving -----------------------------------------------------------------------------------------------


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, with the optimizer's tensors; empty for Lightning's mock optimizer."""
    state = optimizer.state_dict()
    if not state:
        return {}
    return by_name(state, flat(parameter_names(model, optimizer)))


class Owners:
    """Which parameter a tensor in an optimizer's state belongs to.

    Args:
        parameters: Parameters of the model by name.
        names: Names of the optimizer's parameters by group.
    """

    def __init__(self, parameters: Mapping[str, Tensor], names: Names) -> None:
        self.parameters = parameters
        self.names = names
        self._own = [parameters[name] for name in flat(names)]

    def of(self, path: Path) -> Tensor | None:
        """The parameter for a path within the state.

        The path leads into a parameter's state, or to an entry of a list in a group with an entry for each
        parameter.
        """
        for part, within in itertools.pairwise(path):
            if part == "state" and within in self.parameters:
                return self.parameters[str(within)]
        if path[0] != "param_groups" or not isinstance(path[1], int) or path[1] >= len(self.names):
            return None
        group = self.names[path[1]]
        number = path[-1]
        if not isinstance(number, int) or number >= len(group):
            return None
        return self.parameters[group[number]]

    def sharded(self) -> list[DTensor]:
        """The optimizer's sharded parameters."""
        return [parameter for parameter in self._own if isinstance(parameter, DTensor)]


# --- Checking ---------------------------------------------------------------------------------------------


def no_optimizer_state() -> CheckpointError:
    """The error for a checkpoint without states of optimizers."""
    return CheckpointError(
        "it holds no state of optimizer 0: it was saved with save_weights_only=True, or with fewer"
        " optimizers; validate, test and predict can load it"
    )


def check_number(what: str, saved: int, own: int) -> None:
    """Raise CheckpointError unless the number that was saved is this run's own."""
    if saved != own:
        raise CheckpointError(f"it holds {saved} {what}, and this run has {own}: {_AS_SAVED}")


def check_groups(optimizer: Optimizer, saved: list[dict[str, Any]], index: int) -> None:
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


def new_names(saved: Names, own: Names, known: Mapping[str, Any], index: int) -> dict[str, str]:
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
    renamed: dict[str, str] = {}
    for number, (there, here) in enumerate(zip(saved, own, strict=True)):
        if set(there) == set(here):
            renamed.update(zip(there, there, strict=True))
            continue
        pairs = list(zip(there, here, strict=False))
        if len(there) == len(here) and all(old == new or old not in known for old, new in pairs):
            renamed.update(pairs)
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
    return renamed


def in_order(state: dict[str, Any], saved: Names, renamed: Mapping[str, str], own: Names) -> dict[str, Any]:
    """A saved state with its groups in this run's order of parameters; torch's optimizers match by order."""
    groups: list[dict[str, Any]] = []
    for group, there, here in zip(state["param_groups"], saved, own, strict=True):
        id_of = {renamed[name]: number for name, number in zip(there, group["params"], strict=True)}
        groups.append({**group, "params": [id_of[name] for name in here]})
    return {**state, "param_groups": groups}


def some(names: list[str]) -> str:
    """The first of ``names``, and how many others there are."""
    listed = ", ".join(names[:5])
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    return listed
