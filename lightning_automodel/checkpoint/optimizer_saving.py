"""The state of an optimizer that trains shards, as it is saved: all of it comes back, or the save is refused.

=========================================  ==================================================================
a tensor of the state                      how it is saved
=========================================  ==================================================================
sharded like its parameter                 in shards; it may load whole, under the other engine
sharded otherwise, or of no parameter      in shards, with the note "sharded": it comes back sharded
plain, equal on all ranks                  once; like its sharded parameter, with the note "whole"
plain, other values on each rank           refused
of a parameter that one rank steps whole   by that rank, its owner; the others have tensors without values
=========================================  ==================================================================
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint.errors import CheckpointError, some
from lightning_automodel.checkpoint.optimizer_names import NamedOptimizer, has_groups
from lightning_automodel.checkpoint.state_dict import whole
from lightning_automodel.checkpoint.tree import PLAIN, Path, keyed_tensors, mapped
from lightning_automodel.distributed.collectives import differences, gather_objects, gather_to_first
from lightning_automodel.distributed.process_group import group_rank

NOTES = "lightning_automodel"
"""Key of the notes in an optimizer's saved state, if it needs any: what loading cannot know of a tensor, by key."""


def state_to_save(
    named: NamedOptimizer, group: dist.ProcessGroup | None, for_one_file: bool
) -> dict[str, Any]:
    """The state of an optimizer that trains shards, by name and with notes. A collective.

    For parameters that are stepped whole, each rank returns the states of those that it owns, and for the
    others the numbers, and tensors without values; rank 0 all values, if they are ``for_one_file``.

    Args:
        named: The optimizer.
        group: Of all ranks, for objects; None in a single process.
        for_one_file: Whether rank 0 writes one file.

    Raises:
        CheckpointError: On every rank, if plain tensors of the state differ between ranks.
    """
    state = named.state()
    if not state:
        return state
    of_owned: dict[str, Any] = {}
    if has_groups(state):
        of_owned = {name: state["state"].pop(name) for name in named.owned if name in state["state"]}
    notes: dict[str, str] = {}
    digests: dict[str, str] = {}
    for key, path, tensor in keyed_tensors(state):
        is_shard = isinstance(tensor, DTensor)
        if not is_shard:
            digests[key] = _digest(tensor)
        if is_shard != isinstance(named.parameter_like(path, tensor), DTensor):
            notes[key] = "sharded" if is_shard else "whole"
    if group is not None:
        _check_equal(digests, group, type(named.optimizer).__name__)
    if notes:
        state[NOTES] = notes
    if named.owned:
        saved_here = _add_owned(state, of_owned, named, group)
        if for_one_file:
            for states_of_rank in gather_to_first(whole(saved_here, keep=True), group):
                state["state"].update(states_of_rank)
    return state


def _digest(tensor: Tensor) -> str:
    """A digest of a tensor's values, if it has any that can be compared."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return "not comparable"
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{list(tensor.shape)} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"


def _check_equal(digests: dict[str, str], group: dist.ProcessGroup, class_name: str) -> None:
    """Raise CheckpointError on every rank unless the plain tensors with these digests are equal on all."""
    for key, _, _ in differences(digests, group).values():
        raise CheckpointError(
            f"the optimizer {class_name} keeps another {key} on each rank, and a checkpoint would bring"
            " back rank 0's everywhere: keep a tensor that is sharded like its parameter"
            " (torch.zeros_like(parameter), in place of parameter.to_local()) or a value that all"
            " ranks have reduced, or pass data_parallel='ddp', under which all ranks have whole"
            " parameters"
        )


def _add_owned(
    state: dict[str, Any], of_owned: dict[str, Any], named: NamedOptimizer, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Add all owners' states of parameters that are stepped whole. Gathers small objects.

    Returns those of ``of_owned`` of which this rank is the first owner: replicas have owners of their own.
    """
    # A rank that owns nothing of a group may not have counted its steps.
    options_here = {
        index: {name: value for name, value in options.items() if isinstance(value, PLAIN)}
        for index, options in enumerate(state["param_groups"])
        if any(named.owned.get(name, False) for name in options["params"])
    }
    known: dict[int, dict[str, Any]] = {}
    owners: dict[str, int] = {}
    of_ranks = gather_objects((mapped(of_owned, _without_values), options_here), group)
    for rank, (states_of_rank, options_of_rank) in enumerate(of_ranks):
        for name, state_of_parameter in states_of_rank.items():
            state["state"].setdefault(name, state_of_parameter)
            owners.setdefault(name, rank)
        for index, options in options_of_rank.items():
            others = known.setdefault(index, options)
            if differing := [name for name in options if options[name] != others.get(name)]:
                raise CheckpointError(
                    f"the owners of parameters of {type(named.optimizer).__name__} have different options"
                    f" in group {index} ({some(differing)}), of which a checkpoint could bring back one:"
                    " pass data_parallel='ddp'"
                )
            state["param_groups"][index].update(options)
    state["state"].update(of_owned)
    return {name: of_owned[name] for name, rank in owners.items() if rank == group_rank()}


def _without_values(_: Path, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0:  # such as counters, which every rank writes
        return leaf.detach().cpu()
    return torch.empty_like(leaf, device="meta")
