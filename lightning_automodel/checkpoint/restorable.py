"""States that optimizers on shards save, with notes for loading; owners of whole parameters save theirs."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    SIMPLE,
    Owners,
    has_groups,
    optimizer_state,
    parameter_names,
    some,
)
from lightning_automodel.checkpoint.trees import hides_shards, joined, put_together, take_apart
from lightning_automodel.internals.torch import without_wrappers


def restorable_state(
    model: nn.Module,
    optimizer: Optimizer,
    gather: Callable[[Any], list[Any]],
    owned: Mapping[nn.Parameter, bool],
) -> dict[str, Any]:
    """:func:`optimizer_state` of an optimizer that trains shards, with notes for loading.

    A collective. For parameters that are stepped whole, each rank returns the states of those that it owns,
    and tensors without values for the others.

    Args:
        model: The model whose parameters are trained.
        optimizer: The optimizer that trains them.
        gather: Gathers an object from each rank, by rank.
        owned: The parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: On every rank, if a part of the state could not be restored: plain tensors that
            differ between ranks, or shards in an object that is not a collection.
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
    class_name = type(optimizer).__name__
    restorable = _restorable(state, Owners(parameters, names), gather, class_name)
    if not owned_names:
        return restorable
    return _with_owned(restorable, of_owned, owned_names, gather, class_name)


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
    """``state`` with all owners' states of parameters that are stepped whole. Gathers small objects."""
    empty = apply_to_collection(of_owned, Tensor, lambda tensor: torch.empty_like(tensor, device="meta"))
    options = {
        index: {name: value for name, value in group.items() if isinstance(value, SIMPLE)}
        for index, group in enumerate(state["param_groups"])
        if any(owned_names.get(name, False) for name in group["params"])
    }
    states = dict(state["state"])
    groups = [dict(group) for group in state["param_groups"]]
    options_of_owners: dict[int, dict[str, Any]] = {}
    for states_of_rank, options_of_rank in gather((empty, options)):
        for name, state_of_parameter in states_of_rank.items():
            states.setdefault(name, state_of_parameter)
        for index, settings in options_of_rank.items():
            known = options_of_owners.setdefault(index, settings)
            if known != settings:
                differing = [name for name in settings if settings[name] != known.get(name)]
                raise CheckpointError(
                    f"the owners of parameters of {class_name} have different options in group {index}"
                    f" ({some(differing)}), of which a checkpoint could bring back one: pass"
                    " data_parallel='ddp'"
                )
            # A rank that owns nothing of the group may not have counted steps.
            groups[index].update(settings)
    states.update(of_owned)
    merged = {**state, "state": states, "param_groups": groups}
    _, leaves = take_apart({key: value for key, value in merged.items() if key != NOTES})
    notes = {
        joined(path): "owned"
        for path, leaf in leaves.items()
        if path[0] == "state" and path[1] in owned_names and isinstance(leaf, Tensor)
    }
    return {**merged, NOTES: {**state.get(NOTES, {}), **notes}}


def on_first_rank(
    state: dict[str, Any], receive: Callable[[Tensor, Any], Tensor], gather: Callable[[Any], list[Any]]
) -> dict[str, Any]:
    """:func:`restorable_state`'s ``state`` with all owners' tensors on rank 0. A collective for each tensor.

    Args:
        state: The state, in which tensors of other owners have no values.
        receive: Sends a tensor from a rank to rank 0.
        gather: Gathers an object from each rank, by rank.
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


def _restorable(
    state: dict[str, Any], owners: Owners, gather: Callable[[Any], list[Any]], class_name: str
) -> dict[str, Any]:
    """``state`` with its notes, and plain tensors for parts of parameters as shards. A collective."""
    tree, leaves = take_apart(state)
    plain: dict[str, Tensor] = {}
    shapes: dict[str, _Shapes] = {}
    hidden: list[str] = []
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
            plain[joined(path)] = leaf
            shapes[joined(path)] = _shapes(leaf, owners.of(path))
        elif not isinstance(leaf, (*SIMPLE, Tensor)) and hides_shards(leaf):
            hidden.append(joined(path))
    by_rank = gather((shapes, hidden))
    if hidden := list(dict.fromkeys(name for _, names in by_rank for name in names)):
        raise CheckpointError(
            f"the optimizer {class_name} keeps sharded tensors in objects that are no dicts, lists or tuples"
            f" ({some(hidden)}), and they could not be loaded again: keep them in those, or pass"
            " data_parallel='ddp', under which they are whole"
        )
    notes = _notes([shapes for shapes, _ in by_rank])
    digests = {key: _digest(tensor) for key, tensor in plain.items() if notes.get(key) != "local"}
    _check_equal(gather(digests), class_name)
    values: dict[str, Any] = {}
    for path, leaf in leaves.items():
        key = joined(path)
        owner = owners.of(path)
        if isinstance(leaf, DTensor) and (owner is None or owner.shape != leaf.shape):
            notes[key] = "sharded"
        if notes.get(key) == "local" and isinstance(owner, DTensor):
            leaf = _as_shard(leaf, owner)
        values[key] = leaf
    restorable = put_together(tree, values.__getitem__)
    if notes:
        restorable = {**restorable, NOTES: notes}
    return restorable


_Shapes = tuple[list[int], list[int] | None, list[int] | None]
"""Shapes of a plain tensor, of this rank's part of its owner if that is sharded, and of the whole owner."""


def _shapes(tensor: Tensor, owner: Tensor | None) -> _Shapes:
    shape = list(tensor.shape)
    if not isinstance(owner, DTensor):
        return shape, None, None
    return shape, list(owner.to_local().shape), list(owner.shape)


def _notes(by_rank: list[dict[str, _Shapes]]) -> dict[str, str]:
    """Notes on plain tensors, from the shapes on all ranks."""
    notes: dict[str, str] = {}
    for key in by_rank[0]:
        known = [shapes[key] for shapes in by_rank if key in shapes]
        has_parts = any(part != whole for _, part, whole in known)
        if len(known) == len(by_rank) and has_parts and all(shape == part for shape, part, _ in known):
            notes[key] = "local"
        elif all(shape == whole for shape, _, whole in known):
            notes[key] = "whole"
    return notes


def _digest(tensor: Tensor) -> str | None:
    """A digest of a tensor's values; None if it has none that can be compared."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{list(tensor.shape)} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"


def _check_equal(by_rank: list[dict[str, str | None]], class_name: str) -> None:
    """Raise CheckpointError unless the plain tensors with these digests are equal on all ranks."""
    for key in dict.fromkeys(key for digests in by_rank for key in digests):
        if len({digests.get(key, "absent") for digests in by_rank}) > 1:
            raise CheckpointError(
                f"the optimizer {class_name} keeps another {key} on each rank, and a checkpoint would bring"
                " back rank 0's everywhere: keep a DTensor (torch.zeros_like(parameter)) or a value that all"
                " ranks have reduced, or pass data_parallel='ddp', under which all ranks have whole"
                " parameters"
            )


def _as_shard(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
