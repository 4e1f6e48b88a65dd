"""States of optimizers: any nesting, under the names of parameters, and with sharded tensors as whole ones mean them.

A tensor of its parameter's shape is saved and loaded like the parameter, so that what was saved under one engine is
loaded under the other. What that rule would not bring back as it was is noted, by the tensor's key:

- ``sharded``: a DTensor of another shape, or beside the state of a parameter;
- ``local``: a plain tensor of the rank's part of its parameter, which is saved as a DTensor;
- ``whole``: a plain tensor of the shape of its sharded parameter;
- ``owned``: a tensor that the owner of its parameter alone has, which steps the whole of it.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.trees import Path, hides_shards, joined, places, put_together, take_apart
from lightning_automodel.torch_internals import without_wrappers

NOTES = "lightning_automodel"
"""Key in an optimizer's saved state of its notes, if it needs any."""

OPTIMIZER_STATES = "lightning_automodel_optimizers"
"""Key in ``meta.pt`` of the states of optimizers by their keys, with a place for each tensor."""

PARAMETER_NAMES = "lightning_automodel_parameter_names"
"""Key in a file of a replicated model, whose optimizers number parameters: names by optimizer and group."""

_SIMPLE = (str, bytes, int, float, bool, complex, type(None), torch.dtype)
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


def restorable_state(
    model: nn.Module, optimizer: Optimizer, gather: Callable[[Any], list[Any]], owned: Mapping[nn.Parameter, bool]
) -> dict[str, Any]:
    """:func:`optimizer_state` of an optimizer that trains shards, with notes of what loading needs to know.

    A collective. Of parameters that are stepped whole, each rank returns the state of those that it owns, and tensors
    without values in place of the others.

    Args:
        model: Whose parameters are trained.
        optimizer: That trains them.
        gather: Collects what each rank knows, over all ranks.
        owned: The parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: On every rank, if something could not be brought back: plain tensors that differ between the
            ranks, or shards in an object that is no collection.
    """
    state = optimizer_state(model, optimizer)
    if not state:
        return state
    parameters = {without_wrappers(name): parameter for name, parameter in model.named_parameters()}
    names = parameter_names(model, optimizer)
    owned_names = names_of_owned(parameters, owned)
    of_owned: dict[str, Any] = {}
    if has_groups(state):
        of_owned = {name: state["state"].pop(name) for name in owned_names if name in state["state"]}
    found = _restorable(state, Owners(parameters, names), gather, type(optimizer).__name__)
    return _with_owned(found, of_owned, owned_names, gather, type(optimizer).__name__) if owned_names else found


def names_of_owned(parameters: Mapping[str, Tensor], owned: Mapping[nn.Parameter, bool]) -> dict[str, bool]:
    """The names of the parameters that are stepped whole, and whether this rank owns them."""
    by_id = {id(parameter): is_own for parameter, is_own in owned.items()}
    return {name: by_id[id(parameter)] for name, parameter in parameters.items() if id(parameter) in by_id}


def _with_owned(
    state: dict[str, Any],
    of_owned: dict[str, Any],
    owned_names: Mapping[str, bool],
    gather: Callable[[Any], list[Any]],
    class_name: str,
) -> dict[str, Any]:
    """``state`` with the states of parameters that are stepped whole, of all owners. A collective of small objects."""
    empty = apply_to_collection(of_owned, Tensor, lambda each: torch.empty_like(each, device="meta"))
    options = {
        index: {name: value for name, value in group.items() if isinstance(value, _SIMPLE)}
        for index, group in enumerate(state["param_groups"])
        if any(owned_names.get(name, False) for name in group["params"])
    }
    states = dict(state["state"])
    groups = [dict(group) for group in state["param_groups"]]
    noted: dict[int, dict[str, Any]] = {}
    for states_of_rank, options_of_rank in gather((empty, options)):
        for name, each in states_of_rank.items():
            states.setdefault(name, each)
        for index, each in options_of_rank.items():
            if noted.setdefault(index, each) != each:
                differing = [name for name in each if each[name] != noted[index].get(name)]
                raise CheckpointError(
                    f"the owners of parameters of {class_name} have different options in group {index}"
                    f" ({some(differing)}), of which a checkpoint could bring back one: pass data_parallel='ddp'"
                )
            groups[index].update(each)  # a rank that owns nothing of the group may not have counted
    states.update(of_owned)
    found = {**state, "state": states, "param_groups": groups}
    _, leaves = take_apart({key: value for key, value in found.items() if key != NOTES})
    owned = {
        joined(path): "owned"
        for path, leaf in leaves.items()
        if path[0] == "state" and path[1] in owned_names and isinstance(leaf, Tensor)
    }
    return {**found, NOTES: {**state.get(NOTES, {}), **owned}}


def on_first_rank(
    state: dict[str, Any], receive: Callable[[Tensor, Any], Tensor], gather: Callable[[Any], list[Any]]
) -> dict[str, Any]:
    """``state`` of :func:`restorable_state`, with the tensors of all owners on rank 0. A collective, tensor by tensor.

    Args:
        state: With tensors without values for what other ranks own.
        receive: Sends a tensor from a rank to rank 0.
        gather: Collects what each rank knows, over all ranks.
    """
    notes = state.get(NOTES, {})
    tree, leaves = take_apart({key: value for key, value in state.items() if key != NOTES})
    by_key = {joined(path): leaf for path, leaf in leaves.items()}
    owned = [key for key, note in notes.items() if note == "owned"]
    if not owned:
        return state
    holders = gather([not by_key[key].is_meta for key in owned])
    for number, key in enumerate(owned):
        source = next(rank for rank, holds in enumerate(holders) if holds[number])
        by_key[key] = receive(by_key[key], source)
    return {**put_together(tree, by_key.__getitem__), NOTES: notes}


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


def _restorable(
    state: dict[str, Any], owners: Owners, gather: Callable[[Any], list[Any]], class_name: str
) -> dict[str, Any]:
    tree, leaves = take_apart(state)
    plain: dict[str, Tensor] = {}
    shapes: dict[str, _Shapes] = {}
    hidden: list[str] = []
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
            plain[joined(path)] = leaf
            shapes[joined(path)] = _shapes(leaf, owners.of(path))
        elif not isinstance(leaf, (*_SIMPLE, Tensor)) and hides_shards(leaf):
            hidden.append(joined(path))
    by_rank = gather((shapes, hidden))
    if hidden := list(dict.fromkeys(name for _, names in by_rank for name in names)):
        raise CheckpointError(
            f"the optimizer {class_name} keeps sharded tensors in objects that are no dicts, lists or tuples"
            f" ({some(hidden)}), and they could not be loaded again: keep them in those, or pass data_parallel='ddp',"
            " under which they are whole"
        )
    notes = _notes([shapes for shapes, _ in by_rank])
    _check_equal(gather({key: _digest(each) for key, each in plain.items() if notes.get(key) != "local"}), class_name)
    values: dict[str, Any] = {}
    for path, leaf in leaves.items():
        key, owner = joined(path), owners.of(path)
        if isinstance(leaf, DTensor) and (owner is None or owner.shape != leaf.shape):
            notes[key] = "sharded"
        values[key] = _as_shard(leaf, owner) if notes.get(key) == "local" and isinstance(owner, DTensor) else leaf
    found = put_together(tree, values.__getitem__)
    return {**found, NOTES: notes} if notes else found


_Shapes = tuple[list[int], list[int] | None, list[int] | None]
"""Shapes of a plain tensor, of this rank's part of its owner if that is sharded, and of the whole owner."""


def _shapes(tensor: Tensor, owner: Tensor | None) -> _Shapes:
    shape = list(tensor.shape)
    if not isinstance(owner, DTensor):
        return shape, None, None
    return shape, list(owner.to_local().shape), list(owner.shape)


def _notes(by_rank: list[dict[str, _Shapes]]) -> dict[str, str]:
    """Notes on plain tensors, by what all ranks know of theirs."""
    notes: dict[str, str] = {}
    for key in by_rank[0]:
        found = [shapes[key] for shapes in by_rank if key in shapes]
        has_parts = any(part != whole for _, part, whole in found)
        if len(found) == len(by_rank) and has_parts and all(shape == part for shape, part, _ in found):
            notes[key] = "local"
        elif all(shape == whole for shape, _, whole in found):
            notes[key] = "whole"
    return notes


def _digest(tensor: Tensor) -> str | None:
    """Of a tensor's values; None if it has none, or none that can be compared."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{list(tensor.shape)} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"


def _check_equal(by_rank: list[dict[str, str | None]], class_name: str) -> None:
    """Raise CheckpointError unless the plain tensors of all ranks, whose digests these are, are equal."""
    for key in dict.fromkeys(key for digests in by_rank for key in digests):
        if len({digests.get(key, "absent") for digests in by_rank}) > 1:
            raise CheckpointError(
                f"the optimizer {class_name} keeps another {key} on each rank, and a checkpoint would bring back"
                " rank 0's everywhere: keep a DTensor (torch.zeros_like(parameter)) or a value that all ranks have"
                " reduced, or pass data_parallel='ddp', under which all ranks have whole parameters"
            )


def _as_shard(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


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
