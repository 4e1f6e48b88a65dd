"""States of optimizers: any nesting, under the names of parameters, and with sharded tensors as whole ones mean them.

A tensor of its parameter's shape is saved and loaded like the parameter, so that what was saved under one engine is
loaded under the other. What that rule would not bring back as it was is noted, by the tensor's key:

- ``sharded``: a DTensor of another shape, or beside the state of a parameter;
- ``local``: a plain tensor of the rank's part of its parameter, which is saved as a DTensor;
- ``whole``: a plain tensor of the shape of its sharded parameter;
- ``owned``: a tensor that the owner of its parameter alone has, which steps the whole of it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.trees import Path, places, put_together
from lightning_automodel.internals.torch import without_wrappers

NOTES = "lightning_automodel"
"""Key in an optimizer's saved state of its notes, if it needs any."""

OPTIMIZER_STATES = "lightning_automodel_optimizers"
"""Key in ``meta.pt`` of the states of optimizers by their keys, with a place for each tensor."""

PARAMETER_NAMES = "lightning_automodel_parameter_names"
"""Key in a file of a replicated model, whose optimizers number parameters: names by optimizer and group."""

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
    names = {id(parameter): without_wrappers(name) for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def flat(names: Names) -> list[str]:
    """All names, one group behind the other."""
    return [name for group in names for name in group]


def has_groups(state: Any) -> bool:
    """Whether the state of an optimizer has torch's form."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(isinstance(each, Mapping) and "params" in each for each in groups)


def by_name(state: Any, names: list[str]) -> Any:
    """An optimizer's state with parameters by name, also where they are numbered, as plain optimizers do.

    So is the state of an optimizer within it, as wrappers save it, if it has as many parameters. CheckpointError if
    that at the top has more or fewer.
    """
    if has_groups(state):
        ids = [each for group in state["param_groups"] for each in group["params"]]
        if all(isinstance(each, int) for each in ids) and len(ids) != len(names):
            raise CheckpointError(f"the saved optimizer has {len(ids)} parameters, and this run's has {len(names)}")
    return _renamed(state, lambda ids: dict(zip(ids, names, strict=True)) if len(ids) == len(names) else {}, int)


def by_number(state: Any, numbers: Mapping[str, int]) -> Any:
    """The reverse of :func:`by_name`."""
    return _renamed(state, lambda names: {name: numbers[name] for name in names if name in numbers}, str)


def _renamed(state: Any, new_names: Callable[[list[Any]], Mapping[Any, Any]], kind: type) -> Any:
    if isinstance(state, list):
        return [_renamed(each, new_names, kind) for each in state]
    if type(state) is not dict:
        return state
    found = {key: _renamed(each, new_names, kind) for key, each in state.items()}
    if not has_groups(state):
        return found
    ids = [each for group in state["param_groups"] for each in group["params"]]
    if not all(isinstance(each, kind) for each in ids):
        return found
    new = new_names(ids)
    found["state"] = {new.get(each, each): value for each, value in state["state"].items()}
    found["param_groups"] = [
        {**group, "params": [new.get(each, each) for each in group["params"]]} for group in state["param_groups"]
    ]
    return found


def named_parameters(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, list[Names]]:
    """What to add to a file whose optimizers number parameters; empty if their names are not clear."""
    known = {id(parameter) for parameter in model.parameters()}
    own = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    if not own <= known or len({without_wrappers(name) for name, _ in model.named_parameters()}) < len(known):
        return {}
    return {PARAMETER_NAMES: [parameter_names(model, each) for each in optimizers]}


# --- Saving -------------------------------------------------------------------------------------------------------


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, with the optimizer's own tensors; empty for Lightning's stand-in for none."""
    state = optimizer.state_dict()
    return by_name(state, flat(parameter_names(model, optimizer))) if state else {}


class Owners:
    """Which parameter a tensor in an optimizer's state belongs to.

    Args:
        parameters: By name.
        names: Of the optimizer's parameters by group.
    """

    def __init__(self, parameters: Mapping[str, Tensor], names: Names) -> None:
        self._parameters, self._names = parameters, names
        self._own = [parameters[name] for name in flat(names)]

    def of(self, path: Path) -> Tensor | None:
        """By the path within the state: that of a parameter, or a list in a group with one entry for each."""
        for part, within in itertools.pairwise(path):
            if part == "state" and within in self._parameters:
                return self._parameters[str(within)]
        if path[0] != "param_groups" or not isinstance(path[1], int):
            return None
        group = self._names[path[1]] if path[1] < len(self._names) else []
        number = path[-1]
        return self._parameters[group[number]] if isinstance(number, int) and number < len(group) else None

    def any_like(self, shape: torch.Size) -> DTensor | None:
        """A sharded parameter of this shape, if there is one."""
        return next((each for each in self._sharded() if each.shape == shape), None)

    def any(self) -> DTensor | None:
        """A sharded parameter, if there is one."""
        return next(self._sharded(), None)

    def _sharded(self) -> Iterator[DTensor]:
        return (each for each in self._own if isinstance(each, DTensor))


# --- Checking -----------------------------------------------------------------------------------------------------


def no_optimizer_state(index: int) -> CheckpointError:
    """The error for an optimizer of which nothing was saved."""
    return CheckpointError(
        f"it holds no state of optimizer {index}: it was saved with save_weights_only=True, or with fewer"
        " optimizers; validate, test and predict can load it"
    )


def check_number(what: str, saved: int, own: int) -> None:
    """Raise CheckpointError unless as many were saved as this run has."""
    if saved != own:
        raise CheckpointError(f"it holds {saved} {what}, and this run has {own}: {_AS_SAVED}")


def check_groups(optimizer: Optimizer, saved: list[dict[str, Any]], index: int) -> None:
    """Raise CheckpointError unless as many groups were ``saved``, each with the options of this optimizer's type.

    Flags may be missing: newer releases of torch have added some.
    """
    check_number(f"groups of parameters of optimizer {index}", len(saved), len(optimizer.param_groups))
    needed = {name for name, value in optimizer.defaults.items() if not (value is None or isinstance(value, bool))}
    for settings in saved:
        if missing := sorted(needed - set(settings)):
            raise CheckpointError(
                f"optimizer {index} is a {type(optimizer).__name__}, and the checkpoint lacks its {some(missing)}:"
                f" {_AS_SAVED}"
            )


def new_names(saved: Names, own: Names, known: Mapping[str, Any], index: int) -> dict[str, str]:
    """This run's names of the ``saved`` parameters of an optimizer.

    Saved names that the model does not have are those of parameters that were renamed, if as many others are in their
    places. Raises CheckpointError if the optimizer trains other parameters than the saved one.

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
        differing = [
            f"{words} {some(names)}"
            for words, names in (
                ("only saved:", [name for name in there if name not in here]),
                ("only here:", [name for name in here if name not in there]),
            )
            if names
        ]
        raise CheckpointError(
            f"optimizer {index} trains other parameters in group {number} than when it was saved"
            f" ({'; '.join(differing)}): {_AS_SAVED}"
        )
    return renamed


def in_order(state: dict[str, Any], saved: Names, renamed: Mapping[str, str], own: Names) -> dict[str, Any]:
    """A saved state whose groups list parameters in this run's order, by which torch's optimizers match them."""
    groups: list[dict[str, Any]] = []
    for group, there, here in zip(state["param_groups"], saved, own, strict=True):
        id_of = {renamed[name]: each for name, each in zip(there, group["params"], strict=True)}
        groups.append({**group, "params": [id_of[name] for name in here]})
    return {**state, "param_groups": groups}


def some(names: list[str]) -> str:
    """The first of ``names``, and how many others there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- Loading ------------------------------------------------------------------------------------------------------


class Loading:
    """Loads one optimizer.

    Args:
        saved: Its saved state, with places for tensors.
        entries: Saved tensors by key.
        optimizer: The optimizer.
        parameters: All parameters of the model by name.
        names: Of the optimizer's parameters by group.
        index: Its number.
        owned: The names of parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: If it is another optimizer than the saved one.
    """

    def __init__(
        self,
        saved: dict[str, Any],
        entries: Mapping[str, Tensor | None],
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        names: Names,
        index: int,
        owned: Mapping[str, bool],
    ) -> None:
        self._optimizer, self._names = optimizer, flat(names)
        self._owned = owned
        self._notes: dict[str, str] = saved.get(NOTES, {})
        tree = {key: value for key, value in saved.items() if key != NOTES}
        if has_groups(tree):
            groups = tree["param_groups"]
            check_groups(optimizer, groups, index)
            there = [list(group["params"]) for group in groups]
            renamed = new_names(there, names, parameters, index)
            tree = _renamed(tree, lambda _: renamed, str)
            elsewhere = [name for name in tree["state"] if owned.get(name) is False]
            tree["state"] = {name: value for name, value in tree["state"].items() if name not in elsewhere}
        self._tree = tree
        self._owners = Owners(parameters, names)
        self._prefix = f"{optimizer_key(index)}."
        self._entries = entries
        self._targets: dict[str, Tensor] = {}

    def make_targets(self) -> dict[str, Tensor]:
        """Empty tensors by key, to be overwritten with what was saved before :meth:`finish`."""
        for path, key in places(self._tree):
            entry = self._entries[key]
            assert entry is not None
            self._targets[key] = self._target(entry, key, path)
        return self._targets

    def _target(self, entry: Tensor, key: str, path: Path) -> Tensor:
        """A shard for what is sharded like a parameter, else a whole tensor."""
        note = self._notes.get(key.removeprefix(self._prefix))
        owner = self._owners.of(path)
        is_stepped_whole = path[0] == "state" and path[1] in self._owned
        like_owner = owner is not None and entry.dim() and entry.shape == owner.shape
        if owner is not None and like_owner and note in (None, "local", "owned") and not is_stepped_whole:
            return torch.empty_like(owner, dtype=entry.dtype)
        empty = torch.empty(entry.shape, dtype=entry.dtype)
        if is_stepped_whole:
            return empty
        if note != "sharded" or (any_sharded := self._owners.any()) is None:
            return empty
        if (alike := self._owners.any_like(entry.shape)) is not None:
            return torch.empty_like(alike, dtype=entry.dtype)
        mesh = any_sharded.device_mesh
        return DTensor.from_local(empty.to(any_sharded.device), mesh, [Replicate()] * mesh.ndim, run_check=False)

    def finish(self) -> None:
        """Hand the optimizer what was read into the targets. Not a collective."""
        tree = put_together(self._tree, self._value)
        packed = self._optimizer.state_dict()
        if not has_groups(tree) or not has_groups(packed):
            numbers = {name: number for number, name in enumerate(self._names)}
            self._optimizer.load_state_dict(by_number(tree, numbers))
            return
        ids = [each for group in packed["param_groups"] for each in group["params"]]
        id_of = dict(zip(self._names, ids, strict=True))
        groups = zip(packed["param_groups"], tree["param_groups"], strict=True)
        found = by_number(tree, id_of)
        # Options that were not saved stay this run's: flags that newer releases of torch have added.
        found["param_groups"] = [{**own, **each, "params": own["params"]} for own, each in groups]
        self._optimizer.load_state_dict({**packed, **found})

    def _value(self, key: str) -> Tensor:
        tensor = self._targets[key]
        is_local = self._notes.get(key.removeprefix(self._prefix)) == "local"
        return tensor.to_local() if is_local and isinstance(tensor, DTensor) else tensor
