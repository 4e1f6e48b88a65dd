"""States of optimizers, nested in any way, under the names of parameters, in every form and under both engines.

A tensor of its parameter's shape is loaded like the parameter, so a state that was saved under one
engine loads under the other. Where this rule would not restore a tensor as it was, the state holds a note
under its key:

- ``sharded``: a DTensor whose shape is not its parameter's, or that belongs to no parameter;
- ``whole``: a plain tensor of the whole shape of its sharded parameter.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.checkpoint.tree import Path
from lightning_automodel.internals.torch import without_wrappers

NOTES = "lightning_automodel"
"""Key of the notes in an optimizer's saved state, if it needs any."""

Names = list[list[Any]]
"""Names of an optimizer's parameters by group."""


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` under names without wrappers; those that optimizers have, if it is gathered."""
    return {
        without_wrappers(name): getattr(parameter, "shard", parameter)
        for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate)
    }


def parameter_names(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> Names:
    """Names of an optimizer's ``parameters`` by group; the number of one that is not among them."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: Names = []
    number = 0
    for group in optimizer.param_groups:
        found.append([])
        for parameter in group["params"]:
            found[-1].append(names.get(id(parameter), number))
            number += 1
    return found


def flat(names: Names) -> list[Any]:
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


def renamed(state: Any, new: Mapping[Any, Any]) -> Any:
    """``state`` with other ids of parameters in each state of torch's form, with as many ids, within it.

    Wrappers save the state of another optimizer within theirs.
    """
    if isinstance(state, list):
        return [renamed(item, new) for item in state]
    if type(state) is not dict:
        return state
    changed = {key: renamed(value, new) for key, value in state.items()}
    if has_groups(state) and len(ids_of(state)) == len(new):
        changed["state"] = {new.get(old, old): value for old, value in changed["state"].items()}
        changed["param_groups"] = [
            {**group, "params": [new.get(old, old) for old in group["params"]]}
            for group in changed["param_groups"]
        ]
    return changed


def by_name(state: Any, names: Iterable[Any]) -> Any:
    """An optimizer's state with parameters by name, even if they are numbered, as in plain optimizers' states."""
    return renamed(state, dict(enumerate(names)))


def owner_names(path: Path, tensor: Tensor, names: Names) -> Path:
    """Names among which is that of the parameter, if it has one, that a ``tensor`` of a state is like.

    The path leads into a parameter's state, or to an entry of a list in a group with an entry for each
    parameter, which have these ``names``.
    """
    if tensor.dim() == 0:  # a number
        return ()
    if path[0] == "param_groups" and isinstance(path[-1], int):
        return tuple(names[path[1]][path[-1] : path[-1] + 1])
    return path
