"""States of optimizers, nested in any way, under the names of parameters, in every form and under both engines.

A tensor of its parameter's shape is loaded like the parameter, so a state that was saved under one
engine loads under the other. Where this rule would not restore a tensor as it was, the state holds a note
under its key:

- ``sharded``: a DTensor whose shape is not its parameter's, or that belongs to no parameter;
- ``whole``: a plain tensor of the whole shape of its sharded parameter.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.tree import Path
from lightning_automodel.internals.torch import without_wrappers

NOTES = "lightning_automodel"
"""Key of the notes in an optimizer's saved state, if it needs any."""

_AS_SAVED = "configure the optimizers that the run was saved with"

Names = list[list[Any]]
"""Names of an optimizer's parameters by group."""


def parameter_names(model: nn.Module, optimizer: Optimizer) -> Names:
    """Names of an optimizer's parameters by group; the number of one that is not the model's."""
    # Within a step modules have gathered parameters, and optimizers the shards.
    names = {
        id(getattr(parameter, "shard", parameter)): without_wrappers(name)
        for name, parameter in model.named_parameters()
    }
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


class Owners:
    """Which parameter a tensor in an optimizer's state belongs to.

    Args:
        parameters: Parameters of the model by name.
        names: Names of the optimizer's parameters by group.
    """

    def __init__(self, parameters: Mapping[Any, Tensor], names: Names) -> None:
        self.parameters = parameters
        self.names = names

    def of(self, path: Path) -> Tensor | None:
        """The parameter for a path within the state.

        The path leads into a parameter's state, or to an entry of a list in a group with an entry for each
        parameter.
        """
        for part, within in itertools.pairwise(path):
            if part == "state" and within in self.parameters:
                return self.parameters[within]
        if path[0] != "param_groups" or path[1] >= len(self.names):
            return None
        group = self.names[path[1]]
        number = path[-1]
        if not isinstance(number, int) or number >= len(group):
            return None
        return self.parameters.get(group[number])

    def like(self, path: Path, tensor: Tensor) -> Tensor | None:
        """The parameter that a tensor without a note is loaded like; None if it is loaded whole."""
        owner = self.of(path)
        if owner is None or owner.shape != tensor.shape or tensor.dim() == 0:
            return None
        return owner


def names_of_owned(parameters: Mapping[str, Tensor], owned: Mapping[nn.Parameter, bool]) -> dict[str, bool]:
    """The names of the parameters that are stepped whole, and whether this rank owns them."""
    by_id = {id(parameter): is_own for parameter, is_own in owned.items()}
    return {name: by_id[id(parameter)] for name, parameter in parameters.items() if id(parameter) in by_id}


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` under names without wrappers."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return {without_wrappers(name): parameter for name, parameter in named}


def note_on(owners: Owners, path: Path, tensor: Tensor) -> str | None:
    """The note that a tensor of an optimizer's state needs."""
    owner = owners.like(path, tensor)
    if isinstance(tensor, DTensor):
        return None if isinstance(owner, DTensor) else "sharded"
    return "whole" if isinstance(owner, DTensor) else None


# --- Checking ---------------------------------------------------------------------------------------------


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


def new_names(saved: Names, own: Names, known: Mapping[str, Any], index: int) -> dict[Any, Any]:
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


def some(names: list[Any]) -> str:
    """The first of ``names``, and how many others there are."""
    listed = ", ".join(map(str, names[:5]))
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    return listed
