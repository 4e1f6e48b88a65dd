"""Optimizer steps on whole tensors: each sharded parameter has an owner, which steps the whole of it.

Between steps an optimizer has the sharded parameters. During its arithmetic those that are stepped whole are
replaced by stand-ins, each on its owner alone:

    to the owners    gradients, which are final, and weights
    step             the optimizer sees whole tensors, and its state is the owner's
    to the holders   the new weights

The step is the same function of the same gradients as in one process, for an optimizer that steps each
parameter by itself. :mod:`.optimizer_trial` finds out which do.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.distributed.collectives import full
from lightning_automodel.gradients.owner_exchange import (
    Holders,
    Owned,
    OwnerExchange,
    group_of,
    holders_of,
)
from lightning_automodel.internals import torch as torch_internals


class WholeParameter(Owned):
    """A sharded parameter that its owner steps whole.

    Attributes:
        exchange: Between its holders.
        stand_in: What the optimizer steps in its place; None on all ranks but the owner. It has memory
            during steps.
    """

    def __init__(
        self, parameter: nn.Parameter, holders: Holders, exchange: OwnerExchange, owner: int
    ) -> None:
        super().__init__(holders, parameter.shape, owner)
        self.parameter = parameter
        self.exchange = exchange
        self.stand_in: nn.Parameter | None = None
        if owner == exchange.rank:
            empty = torch_internals.local_tensor(parameter).new_empty(0)
            self.stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)

    @property
    def shard(self) -> Tensor:
        """This rank's part of the weights, sharing their memory."""
        return torch_internals.local_tensor(self.parameter)

    def gradient_shard(self) -> Tensor:
        """This rank's part of the gradient."""
        gradient = self.parameter.grad
        assert gradient is not None
        mesh, placements = sharding_of(self.parameter)
        if not isinstance(gradient, DTensor):  # the user's, of the whole parameter
            return self.holders.part(gradient, self.exchange.rank)
        return torch_internals.local_tensor(gradient.redistribute(mesh, placements))


def sharding_of(parameter: Tensor) -> tuple[Any, Any]:
    """Mesh and placements of a sharded parameter."""
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh, parameter.placements


def is_split(parameter: Tensor) -> bool:
    """Whether a parameter is sharded, be it over one rank: optimizers that make plain tensors refuse that too."""
    return isinstance(parameter, DTensor) and not all(
        placement.is_replicate() for placement in parameter.placements
    )


class WholeSteps:
    """The optimizers of a run some of whose parameters are stepped whole.

    Owners are chosen when a parameter is first stepped, the largest first, each on the rank that owns the
    fewest elements so far: alike on all ranks, and in every run of the same model and world. Among replicas
    each has its owners, so that nothing travels between them.

    Args:
        device: On which process groups communicate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[Optimizer, set[int]] = {}
        self._parameters: dict[nn.Parameter, WholeParameter] = {}
        # By mesh and placements: as many entries as ranks each.
        self._holders: dict[tuple[Any, Any], Holders] = {}
        self._exchanges: dict[dist.ProcessGroup, OwnerExchange] = {}
        self._stepping: dict[Optimizer, _Swapped] = {}

    def take(self, optimizer: Optimizer, groups: set[int]) -> None:
        """Step the parameters in these ``groups`` of an optimizer whole. A collective over the world."""
        self._groups[optimizer] = groups
        self._assign_owners(optimizer)

    def _assign_owners(self, optimizer: Optimizer) -> None:
        """Give an owner to each parameter that has none. A collective over the world where a group must be made."""
        new = [
            parameter for parameter in self._stepped_whole(optimizer) if parameter not in self._parameters
        ]
        for parameter in sorted(new, key=lambda parameter: -parameter.numel()):
            sharding = sharding_of(parameter)
            if sharding not in self._holders:
                self._holders[sharding] = holders_of(*sharding)
            holders = self._holders[sharding]
            group = group_of(sharding[0], holders)
            exchange = self._exchanges.setdefault(group, OwnerExchange(group, self._device))
            owner = exchange.choose_owner(parameter.numel())
            self._parameters[parameter] = WholeParameter(parameter, holders, exchange, owner)

    def _stepped_whole(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        groups = self._groups.get(optimizer, ())
        for index in groups:
            yield from filter(is_split, optimizer.param_groups[index]["params"])

    def of(self, optimizer: Optimizer) -> dict[nn.Parameter, bool]:
        """The parameters of an optimizer that are stepped whole, and whether this rank owns them."""
        return {
            parameter: self._parameters[parameter].stand_in is not None
            for parameter in self._stepped_whole(optimizer)
        }

    def elements_by_owner(self, optimizer: Optimizer) -> list[int]:
        """How many elements each rank of this rank's group owns; empty if the optimizer steps nothing whole."""
        counts: list[int] = []
        for parameter in self._stepped_whole(optimizer):
            whole = self._parameters[parameter]
            counts = counts or [0] * whole.exchange.group.size()
            counts[whole.owner] += parameter.numel()
        return counts

    # --- One step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        """Bring gradients and weights to their owners, and give ``optimizer`` the stand-ins.

        A collective over the holders of its parameters. Gradients must be final, and on all ranks for the
        same parameters. Called again, after an exception, it starts over.
        """
        _free(self._take_back(optimizer))
        if optimizer not in self._groups:
            return
        self._assign_owners(optimizer)
        parameters_of_groups = [
            self._parameters[parameter] for parameter in dict.fromkeys(self._stepped_whole(optimizer))
        ]
        optimizers = nested_optimizers(optimizer)
        for whole in parameters_of_groups:
            self._take_states(optimizers, whole)
        stepped = [whole for whole in parameters_of_groups if whole.parameter.grad is not None]
        for exchange, parameters in _by_exchange(stepped).items():
            gradients = [(whole, whole.gradient_shard()) for whole in parameters]
            weights = [(whole, whole.shard) for whole in parameters]
            wholes = exchange.to_owners(gradients + weights)
            num_parameters = len(parameters)
            pairs = zip(parameters, wholes[:num_parameters], wholes[num_parameters:], strict=True)
            for whole, gradient, weight in pairs:
                if whole.stand_in is not None and weight is not None:
                    whole.stand_in.data = weight
                    whole.stand_in.grad = gradient
        self._stepping[optimizer] = _Swapped(optimizers, self._groups[optimizer], self._parameters, stepped)

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        """Bring the stepped weights back, and give ``optimizer`` its sharded parameters. The same collective."""
        stepped = self._take_back(optimizer)
        for whole in stepped:
            if whole.stand_in is not None:
                whole.stand_in.grad = None  # its memory is needed while weights travel
        for exchange, parameters in _by_exchange(stepped).items():
            exchange.to_holders([(whole, whole.stand_in, whole.shard) for whole in parameters])
        if stepped:
            torch.autograd.graph.increment_version([whole.parameter for whole in stepped])
        _free(stepped)

    def abandon(self) -> None:
        """Give all optimizers their sharded parameters, after an exception in a step. Not a collective."""
        for optimizer in list(self._stepping):
            _free(self._take_back(optimizer))

    def _take_back(self, optimizer: Optimizer) -> list[WholeParameter]:
        """Give ``optimizer`` its sharded parameters. Returns those that were stepped whole."""
        swapped = self._stepping.pop(optimizer, None)
        if swapped is None:
            return []
        swapped.restore()
        return swapped.stepped

    def _take_states(self, optimizers: list[Optimizer], whole: WholeParameter) -> None:
        """Make the states of a parameter whole on its owner, and drop them elsewhere.

        A state that was made before the first step, or loaded by the user's code, may be sharded: then a
        collective.
        """
        for optimizer in optimizers:
            state = optimizer.state.get(whole.parameter)
            if not state:
                continue
            if any(isinstance(tensor, DTensor) for tensor in tensors_in(state)):
                optimizer.state[whole.parameter] = apply_to_collection(dict(state), DTensor, full)
            if whole.stand_in is None:
                del optimizer.state[whole.parameter]


class _Swapped:
    """An optimizer that has stand-ins in place of the parameters that are stepped whole.

    Lists of parameters are changed in place, since optimizers within an optimizer share them. A parameter
    without a gradient is left out, as optimizers leave it out.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        groups: set[int],
        whole_parameters: dict[nn.Parameter, WholeParameter],
        stepped: list[WholeParameter],
    ) -> None:
        self.stepped = stepped
        self._lists: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []
        self._optimizers = optimizers
        lists = {
            id(optimizer.param_groups[index]["params"]): optimizer.param_groups[index]["params"]
            for optimizer in self._optimizers
            for index in groups
            if index < len(optimizer.param_groups)
        }
        for parameters in lists.values():
            own = list(parameters)
            self._lists.append((parameters, own))
            parameters.clear()
            for parameter in own:
                whole = whole_parameters.get(parameter)
                if whole is None:
                    parameters.append(parameter)
                elif parameter.grad is not None and whole.stand_in is not None:
                    parameters.append(whole.stand_in)
        self._move_states(to_stand_ins=True)

    def restore(self) -> None:
        """Give the optimizer its own parameters and their states."""
        for parameters, own in self._lists:
            parameters[:] = own
        self._move_states(to_stand_ins=False)

    def _move_states(self, to_stand_ins: bool) -> None:
        for whole in self.stepped:
            if whole.stand_in is None:
                continue
            old, new = (
                (whole.parameter, whole.stand_in) if to_stand_ins else (whole.stand_in, whole.parameter)
            )
            for optimizer in self._optimizers:
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer``, and those that it wraps."""
    found = [optimizer]
    for wrapper in found:
        found += [
            inner for inner in vars(wrapper).values() if isinstance(inner, Optimizer) and inner not in found
        ]
    return found


def _by_exchange(parameters: list[WholeParameter]) -> dict[OwnerExchange, list[WholeParameter]]:
    found: dict[OwnerExchange, list[WholeParameter]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.exchange].append(parameter)
    return found


def _free(parameters: list[WholeParameter]) -> None:
    for parameter in parameters:
        if parameter.stand_in is not None:
            parameter.stand_in.grad = None
            parameter.stand_in.data = parameter.stand_in.new_empty(0)
