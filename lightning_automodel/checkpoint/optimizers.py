"""States of optimizers have the names of parameters as ids, in every form of a checkpoint and under both engines.

All of a state that trains shards comes back, or its save is refused:

=========================================  ==================================================================
a tensor of the state                      how it is saved
=========================================  ==================================================================
sharded                                    in shards; it comes back sharded like its parameter, else whole
plain, equal on all ranks                  once; in the shape of a sharded parameter it comes back sharded
a number or text, equal on all ranks       once
any other value on each rank               refused
of a parameter that one rank steps whole   by that rank, its owner; the others have tensors without values
=========================================  ==================================================================
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.tree import PLAIN, TreePath, leaves, mapped, moved, whole
from lightning_automodel.data.tensors import checksum
from lightning_automodel.distributed.collectives import disagreement, gather_objects, gather_to_first
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.gradients.window_records import optimizer_parameters
from lightning_automodel.internals.torch import without_wrappers

AS_SAVED = (
    "configure the optimizers that the run was saved with (what a checkpoint or on_load_checkpoint sets comes after"
    " configure_optimizers: change the module in setup or __init__)"
)


class NamedOptimizer:
    """An optimizer of a run, and the names of its parameters.

    Attributes:
        optimizer: Which trains parameters of the model.
        parameters: The model's parameters by name.
        names: The names of the optimizer's parameters in their order; the number of one that the model lacks.
        owned: The names of those that are stepped whole, and whether this rank owns them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, owned: Mapping[nn.Parameter, bool]) -> None:
        self.optimizer = optimizer
        self.parameters = {
            # Optimizers have the shard of a parameter that is gathered.
            without_wrappers(name): getattr(parameter, "shard", parameter)
            for name, parameter in model.named_parameters()
        }
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        trained = enumerate(optimizer_parameters(optimizer))
        self.names: list[Any] = [names.get(id(value), number) for number, value in trained]
        self.owned = {name: owned[value] for name, value in self.parameters.items() if value in owned}

    def state(self) -> dict[str, Any]:
        """Its state by name, with its own tensors; empty for Lightning's mock optimizer."""
        return renamed(self.optimizer.state_dict(), dict(enumerate(self.names)))

    def parameter_like(self, path: TreePath, tensor: Tensor) -> Tensor | None:
        """The parameter that a ``tensor`` of the state belongs to, if that is sharded like it.

        It has the same shape, and is not stepped whole. The path leads into a parameter's state.
        """
        for name in path:
            parameter = self.parameters.get(name)
            if parameter is not None and parameter.shape == tensor.shape and name not in self.owned:
                return parameter
        return None

    def state_to_save(self, group: dist.ProcessGroup, for_one_file: bool) -> dict[str, Any]:
        """The state of an optimizer that trains shards, by name. A collective over ``group``.

        For parameters that are stepped whole, each rank returns the states of those that it owns, and for
        the others the numbers, and tensors without values; rank 0 all values, if it writes one file. The
        group is for objects of all ranks.

        Raises:
            CheckpointError: On every rank, if other values than shards differ between ranks.
        """
        state = self.state()
        owned = {name: state["state"].pop(name) for name in self.owned if name in state["state"]}
        digests = {key: _digest(leaf) for key, _, leaf in leaves(state)}
        if difference := disagreement(digests, group):
            raise CheckpointError(
                f"the optimizer {type(self.optimizer).__name__} keeps other values on each rank, and a"
                f" checkpoint would bring back rank 0's everywhere ({difference}): keep a tensor that is"
                " sharded like its parameter (torch.zeros_like(parameter), in place of"
                " parameter.to_local()) or a value that all ranks have reduced, or pass data_parallel='ddp',"
                " under which all ranks have whole parameters"
            )
        if self.owned:
            of_ranks = gather_objects(mapped(owned, _without_values), group)
            if for_one_file:
                of_ranks += gather_to_first(whole(owned, keep=True), group)
            for states_of_rank in (*of_ranks, owned):
                state["state"].update(states_of_rank)
        return state


def _digest(leaf: Any) -> str:
    """A digest of a leaf's value, if that must be equal on all ranks and can be compared."""
    if isinstance(leaf, PLAIN):
        return repr(leaf)
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.is_meta:
        return "not compared"
    return f"{list(leaf.shape)} with checksum {checksum(leaf)}"


def _without_values(_: TreePath, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0:  # such as counters, which every rank writes
        return leaf.detach().cpu()
    return torch.empty_like(leaf, device="meta")


def has_groups(state: Any) -> bool:
    """Whether the state of an optimizer has the form of torch's optimizers."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def renamed(state: Any, new: Mapping[Any, Any]) -> Any:
    """``state`` with other ids of parameters in each state of torch's form, with as many ids, within it.

    Wrappers save the state of another optimizer within theirs.
    """
    if type(state) is not dict:
        return state
    changed = {key: renamed(value, new) for key, value in state.items()}
    if has_groups(state) and sum(len(group["params"]) for group in state["param_groups"]) == len(new):
        changed["state"] = {new.get(old, old): value for old, value in changed["state"].items()}
        changed["param_groups"] = [
            {**group, "params": [new.get(old, old) for old in group["params"]]}
            for group in changed["param_groups"]
        ]
    return changed


def state_here(saved: dict[str, Any], named: NamedOptimizer, index: int) -> dict[str, Any]:
    """The ``saved`` state of optimizer ``index`` with parameters by name, without what other ranks own.

    CheckpointError if it was saved for another optimizer.
    """
    state: dict[str, Any] = renamed(
        saved, dict(enumerate(named.names))
    )  # plain optimizers' files have numbers
    if not has_groups(state):
        return state
    there = [set(group["params"]) for group in state["param_groups"]]
    here = [set(group["params"]) for group in named.state()["param_groups"]]
    if there != here:
        other = sorted(set().union(*there) ^ set(named.names), key=str)
        raise CheckpointError(
            f"optimizer {index} trains other parameters, or in other groups, than when it was saved (saved or"
            f" trained alone: {list_first(other) or 'none'}): {AS_SAVED}, or change"
            " checkpoint['optimizer_states'] in on_load_checkpoint ([] starts them afresh)"
        )
    for name, is_owned in named.owned.items():
        if not is_owned:
            state["state"].pop(name, None)
    return state


def load_state(
    named: NamedOptimizer, state: dict[str, Any], saved_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Load a state with parameters by name, and values. Not a collective.

    torch's ``load_state_dict`` casts states to the dtype of their parameter, which makes float32 states of
    bfloat16 parameters, counters and masks inexact, and loses strings and ordered dicts. They are put back,
    unless the parameter had another dtype in the checkpoint, of which ``saved_dtypes`` are.
    """
    optimizer = named.optimizer
    numbered = renamed(state, {name: number for number, name in enumerate(named.names)})
    if not has_groups(numbered):
        optimizer.load_state_dict(numbered)
        return
    for group in numbered["param_groups"]:
        group["params"].sort()  # torch matches parameters by their order
    given: dict[Any, Any] = {}

    def take(_: Optimizer, state_dict: dict[str, Any]) -> None:
        given.update(state_dict["state"])

    def put_back(_: Optimizer) -> None:
        for number, name in enumerate(named.names):
            parameter = named.parameters.get(name)
            if number in given and parameter is not None and parameter.dtype == saved_dtypes.get(name):
                saved = moved(given[number], parameter.device)
                if isinstance(saved.get("step"), Tensor):
                    del saved["step"]  # for which torch has a rule of its own
                optimizer.state[parameter].update(saved)

    with ExitStack() as hooks:
        # Wrappers that do not call the constructor of `Optimizer` have none.
        with suppress(AttributeError):
            # After the hooks of the user's that change what is loaded, and before those that change what was.
            hooks.enter_context(optimizer.register_load_state_dict_pre_hook(take))
            hooks.enter_context(optimizer.register_load_state_dict_post_hook(put_back, prepend=True))
        optimizer.load_state_dict(numbered)
