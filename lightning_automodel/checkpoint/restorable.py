"""States that optimizers save: shards, or equal on all ranks, or refused; owners save theirs."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError, some
from lightning_automodel.checkpoint.layouts import owner_of
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    by_name,
    flat,
    has_groups,
    named_parameters,
    owner_names,
    parameter_names,
)
from lightning_automodel.checkpoint.state_dict import whole
from lightning_automodel.checkpoint.tree import PLAIN, Path, keys_of, leaves, mapped
from lightning_automodel.distributed.collectives import gather_objects, gather_to_first
from lightning_automodel.distributed.process_group import group_rank


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, with the optimizer's tensors; empty for Lightning's mock optimizer."""
    state = optimizer.state_dict()
    if not state:
        return {}
    return by_name(state, flat(parameter_names(named_parameters(model), optimizer)))


def restorable_state(
    model: nn.Module,
    optimizer: Optimizer,
    group: dist.ProcessGroup | None,
    owned: Mapping[nn.Parameter, bool],
    for_one_file: bool,
) -> dict[str, Any]:
    """:func:`optimizer_state` of an optimizer that trains shards, with notes for loading.

    A collective. For parameters that are stepped whole, each rank returns the states of those that it owns,
    and for the others the numbers, and tensors without values; rank 0 all values, if they are
    ``for_one_file``.

    Args:
        model: The model whose parameters are trained.
        optimizer: The optimizer that trains them.
        group: Of all ranks, for objects; None in a single process.
        owned: The parameters that are stepped whole, and whether this rank owns them.
        for_one_file: Whether rank 0 writes one file.

    Raises:
        CheckpointError: On every rank, if plain tensors of the state differ between ranks.
    """
    state = optimizer_state(model, optimizer)
    if not state:
        return state
    parameters = named_parameters(model)
    names = parameter_names(parameters, optimizer)
    owned_names = {name: owned[value] for name, value in parameters.items() if value in owned}
    of_owned: dict[str, Any] = {}
    if has_groups(state):
        of_owned = {name: state["state"].pop(name) for name in owned_names if name in state["state"]}
    notes: dict[str, str] = {}
    digests: dict[str, str | None] = {}
    keys = keys_of(state, with_values=True)
    for path, leaf in leaves(state):
        if path not in keys:
            continue
        is_shard = isinstance(leaf, DTensor)
        if not is_shard:
            digests[keys[path]] = _digest(leaf)
        owner = owner_of(leaf, parameters, owner_names(path, leaf, names))
        if is_shard != isinstance(owner, DTensor):
            notes[keys[path]] = "sharded" if is_shard else "whole"
    class_name = type(optimizer).__name__
    _check_equal(gather_objects(digests, group), class_name)
    if notes:
        state[NOTES] = notes
    if owned_names:
        sent = _add_owned(state, of_owned, owned_names, group, class_name)
        if for_one_file:
            for states_of_rank in gather_to_first(whole(sent, keep=True), group):
                state["state"].update(states_of_rank)
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
    group: dist.ProcessGroup | None,
    class_name: str,
) -> dict[str, Any]:
    """Add all owners' states of parameters that are stepped whole. Gathers small objects.

    Returns those of ``of_owned`` of which this rank is the first owner: replicas have owners of their own.
    """

    def without_values(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0:  # such as counters, which every rank writes
            return leaf.detach().cpu()
        return torch.empty_like(leaf, device="meta")

    options = {
        index: {name: value for name, value in settings.items() if isinstance(value, PLAIN)}
        for index, settings in enumerate(state["param_groups"])
        if any(owned_names.get(name, False) for name in settings["params"])
    }
    options_of_owners: dict[int, dict[str, Any]] = {}
    owners: dict[str, int] = {}
    of_ranks = gather_objects((mapped(of_owned, without_values), options), group)
    for rank, (states_of_rank, options_of_rank) in enumerate(of_ranks):
        for name, state_of_parameter in states_of_rank.items():
            state["state"].setdefault(name, state_of_parameter)
            owners.setdefault(name, rank)
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
    return {name: of_owned[name] for name, rank in owners.items() if rank == group_rank()}
