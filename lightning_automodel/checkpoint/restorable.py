"""States that optimizers save: shards, or equal on all ranks, or refused; owners save theirs."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    Owners,
    by_name,
    flat,
    has_groups,
    named_parameters,
    names_of_owned,
    note_on,
    parameter_names,
    some,
)
from lightning_automodel.checkpoint.tree import PLAIN, Path, keys_of, leaves, mapped

Gather = Callable[[Any], list[Any]]
"""Gathers an object from each rank, by rank."""


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, with the optimizer's tensors; empty for Lightning's mock optimizer."""
    state = optimizer.state_dict()
    if not state:
        return {}
    return by_name(state, flat(parameter_names(model, optimizer)))


def restorable_state(
    model: nn.Module, optimizer: Optimizer, gather: Gather, owned: Mapping[nn.Parameter, bool]
) -> dict[str, Any]:
    """:func:`optimizer_state` of an optimizer that trains shards, with notes for loading.

    A collective. For parameters that are stepped whole, each rank returns the states of those that it owns,
    and for the others the numbers, and tensors without values.

    Args:
        model: The model whose parameters are trained.
        optimizer: The optimizer that trains them.
        gather: Gathers an object from each rank, by rank.
        owned: The parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: On every rank, if plain tensors of the state differ between ranks.
    """
    state = optimizer_state(model, optimizer)
    if not state:
        return state
    parameters = named_parameters(model)
    owners = Owners(parameters, parameter_names(model, optimizer))
    owned_names = names_of_owned(parameters, owned)
    of_owned: dict[str, Any] = {}
    if has_groups(state):
        of_owned = {name: state["state"].pop(name) for name in owned_names if name in state["state"]}
    notes: dict[str, str] = {}
    digests: dict[str, str | None] = {}
    keys = keys_of(state, with_values=True)
    for path, leaf in leaves(state):
        if path not in keys:
            continue
        key = keys[path]
        if not isinstance(leaf, DTensor):
            digests[key] = _digest(leaf)
        if (note := note_on(owners, path, leaf)) is not None:
            notes[key] = note
    class_name = type(optimizer).__name__
    _check_equal(gather(digests), class_name)
    if notes:
        state[NOTES] = notes
    if owned_names:
        _add_owned(state, of_owned, owned_names, gather, class_name)
    return state


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
                " back rank 0's everywhere: keep a tensor that is sharded like its parameter"
                " (torch.zeros_like(parameter), in place of parameter.to_local()) or a value that all"
                " ranks have reduced, or pass data_parallel='ddp', under which all ranks have whole"
                " parameters"
            )


def _add_owned(
    state: dict[str, Any],
    of_owned: dict[str, Any],
    owned_names: Mapping[str, bool],
    gather: Gather,
    class_name: str,
) -> None:
    """Add all owners' states of parameters that are stepped whole. Gathers small objects."""

    def without_values(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0:  # such as counters, which every rank writes
            return leaf.detach().cpu()
        return torch.empty_like(leaf, device="meta")

    options = {
        index: {name: value for name, value in group.items() if isinstance(value, PLAIN)}
        for index, group in enumerate(state["param_groups"])
        if any(owned_names.get(name, False) for name in group["params"])
    }
    options_of_owners: dict[int, dict[str, Any]] = {}
    for states_of_rank, options_of_rank in gather((mapped(of_owned, without_values), options)):
        for name, state_of_parameter in states_of_rank.items():
            state["state"].setdefault(name, state_of_parameter)
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
            state["param_groups"][index].update(settings)
    state["state"].update(of_owned)


def on_first_rank(
    state: dict[str, Any], receive: Callable[[Tensor, Any], Tensor], gather: Gather
) -> dict[str, Any]:
    """:func:`restorable_state`'s ``state`` with all owners' tensors on rank 0. A collective for each tensor.

    Args:
        state: The state, in which tensors of other owners have no values.
        receive: Sends a tensor from a rank to rank 0.
        gather: Gathers an object from each rank, by rank.
    """
    tensors = {path: leaf for path, leaf in leaves(state) if isinstance(leaf, Tensor)}
    holders = gather([not tensor.is_meta for tensor in tensors.values()])
    received: dict[Path, Tensor] = {}
    for number, (path, tensor) in enumerate(tensors.items()):
        ranks = [rank for rank, holds in enumerate(holders) if holds[number]]
        if ranks and ranks[0] != 0:
            received[path] = receive(tensor, ranks[0])
    return mapped(state, lambda path, leaf: received.get(path, leaf))
