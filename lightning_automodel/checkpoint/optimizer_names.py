"""States of optimizers have the names of parameters as ids, in every form of a checkpoint and under both engines."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.checkpoint.layouts import first_alike
from lightning_automodel.checkpoint.tree import Path
from lightning_automodel.internals.torch import without_wrappers


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` under names without wrappers; those that optimizers have, if it is gathered."""
    return {
        without_wrappers(name): getattr(parameter, "shard", parameter)
        for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate)
    }


class NamedOptimizer:
    """An optimizer of a run, and the names of its parameters.

    Args:
        model: The model whose parameters are trained.
        optimizer: The optimizer that trains them.
        owned: The parameters that it steps whole, and whether this rank owns them.

    Attributes:
        optimizer: The optimizer.
        parameters: The model's parameters by name.
        groups: The names of the optimizer's parameters by group; the number of one that the model lacks.
        names: All of these, group after group.
        owned: The names of those that are stepped whole, and whether this rank owns them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, owned: Mapping[nn.Parameter, bool]) -> None:
        self.optimizer = optimizer
        self.parameters = named_parameters(model)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        number = itertools.count()
        self.groups: list[list[Any]] = [
            [names.get(id(parameter), next(number)) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        self.names = list(itertools.chain(*self.groups))
        self.owned = {name: owned[value] for name, value in self.parameters.items() if value in owned}

    def state(self) -> dict[str, Any]:
        """Its state by name, with its own tensors; empty for Lightning's mock optimizer."""
        return by_name(self.optimizer.state_dict(), self.names)

    def parameter_like(self, path: Path, tensor: Tensor) -> Tensor | None:
        """The parameter to which a ``tensor`` of the state belongs, if it has that one's shape.

        The path leads into a parameter's state, or to an entry of a list in a group with an entry for each
        parameter.
        """
        if tensor.dim() == 0:  # a number
            return None
        names = path
        if path[0] == "param_groups" and isinstance(path[-1], int):
            names = tuple(self.groups[path[1]][path[-1] : path[-1] + 1])
        return first_alike(tensor, self.parameters, names)


def has_groups(state: Any) -> bool:
    """Whether the state of an optimizer has the form of torch's optimizers."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all("params" in group for group in groups)


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


def by_name(state: Any, names: Sequence[Any]) -> Any:
    """An optimizer's state with parameters by name, even if they are numbered, as in plain optimizers' states."""
    return renamed(state, dict(enumerate(names)))
