"""Optimizer steps on whole tensors: each sharded parameter has an owner, which steps the whole of it.

On shards every optimizer is right, but what needs whole matrices is gathered to every rank, which
computes all of it. Owners do that work once. Between steps an optimizer has the sharded parameters.
During its arithmetic those that are stepped whole are replaced by stand-ins, each on its owner alone:

    to the owners    gradients, which are final, and weights
    step             the optimizer sees whole tensors, and its state is the owner's
    to the holders   the new weights

For an optimizer that steps each parameter by itself, the step is that of one process.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.distributed.collectives import full
from lightning_automodel.gradients.owner_exchange import Holders, exchange, holders_of
from lightning_automodel.gradients.rescale_clip import lay_out_gradient
from lightning_automodel.internals import torch as torch_internals


@dataclass(eq=False)
class WholeParameter:
    """A sharded parameter that its owner steps whole.

    Attributes:
        parameter: The sharded one.
        holders: The ranks that hold the parts of this rank's copy.
        owner: A rank of the world, among the holders.
        stand_in: What the optimizer steps in its place; None on all ranks but the owner. It has memory
            during steps.
        version_before: The parameter's version when a step began.
    """

    parameter: nn.Parameter
    holders: Holders
    owner: int
    stand_in: nn.Parameter | None = None
    version_before: int = 0

    @property
    def shard(self) -> Tensor:
        """This rank's part of the weights, sharing their memory."""
        return torch_internals.local_tensor(self.parameter)


Travelling = tuple[WholeParameter, Tensor, Tensor | None]
"""A parameter, this rank's part of its weights or gradient, and on the owner all of them."""


def is_split(parameter: Tensor) -> bool:
    """Whether a parameter is sharded, be it over one rank."""
    return isinstance(parameter, DTensor) and not all(
        placement.is_replicate() for placement in parameter.placements
    )


OPTION = "optimizer_step"
"""The strategy's option, and the key of a group of parameters that has another value."""
_VALUES = ("auto", "shards", "whole")

_OF_MATRICES = {
    "torch": ("Muon",),
    "pytorch_optimizer": (
        "AdaGO",
        "AdaMuon",
        "Alice",
        "DASH",
        "Kron",
        "Muon",
        "NorMuon",
        "SCION",
        "SCIONLight",
        "SOAP",
        "ScalableShampoo",
        "Shampoo",
    ),
}
"""Optimizers that treat each parameter by itself, with much work on whole matrices, by their packages."""


def is_stepped_whole(optimizer: Optimizer, group: Mapping[str, Any], option: str) -> bool:
    """Whether owners step the parameters of one of the groups of ``optimizer``.

    Args:
        optimizer: Which may wrap others.
        group: Its own value of :data:`OPTION` counts, if it has one.
        option: ``"auto"``, ``"shards"`` or ``"whole"``.

    Raises:
        ValueError: If the group asks for another value.
    """
    requested = group.get(OPTION, option)
    if requested not in _VALUES:
        raise ValueError(
            f"A group of {type(optimizer).__name__} has {OPTION}={requested!r}; valid are"
            f" {', '.join(map(repr, _VALUES))}."
        )
    if requested == "shards" or not any(map(is_split, group["params"])):
        return False
    name = type(optimizer).__name__
    if requested == "auto":
        # Not within a wrapper, which may look at all parameters.
        package = type(optimizer).__module__.partition(".")[0]
        return name in _OF_MATRICES.get(package, ()) and group.get("use_muon", True)
    return True


def _check_is_one_step(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that may do more than step parameters one by one. Reads its states."""
    if not all(map(_is_one_step, nested_optimizers(optimizer))):
        raise ValueError(
            f"{type(optimizer).__name__} has train() and eval(), does more than the step of its base class, or saves"
            " its states in a form of its own: it would do so with the parameters and states of one owner. Pass"
            f" {OPTION}='shards', with which it is right."
        )


def _is_one_step(optimizer: Optimizer) -> bool:
    """Whether nothing is known that an optimizer does around its step, and its states are where torch has them."""
    # Torch runs hooks in the steps of classes of which there were instances: in AdamW's and in Adam's, which are one.
    steps: list[Any] = [vars(base).get("step") for base in type(optimizer).__mro__]
    hooked = {inspect.unwrap(step) for step in steps if hasattr(step, "hooked")}
    return len(hooked) <= 1 and not hasattr(optimizer, "eval") and "state" in optimizer.state_dict()


def nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer``, and those that it wraps, be it in lists."""
    found = [optimizer]
    for wrapper in found:
        for value in vars(wrapper).values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            found += [member for member in inner if isinstance(member, Optimizer) and member not in found]
    return found


class WholeSteps:
    """The optimizers of a run some of whose parameters are stepped whole.

    Owners are chosen when a parameter is first stepped: the holders in turn, beginning with the largest
    parameter. That is alike on all ranks, and in every run of the same model and world. Among replicas each
    has its owners, so that nothing travels between them.

    Args:
        device: On which process groups communicate.
        option: ``"auto"``, ``"shards"`` or ``"whole"``, for groups that do not say.
    """

    def __init__(self, device: torch.device, option: str) -> None:
        self._device = device
        self._option = option
        self._parameters: dict[nn.Parameter, WholeParameter] = {}
        # What they step whole, and what gives them their own parameters back and frees the others.
        self._stepping: dict[Optimizer, tuple[list[WholeParameter], ExitStack]] = {}

    def of(self, optimizer: Optimizer) -> dict[nn.Parameter, bool]:
        """The parameters of an optimizer that are stepped whole, and whether this rank owns them. Not a collective.

        Chooses owners where there are none yet. Raises ValueError as :func:`is_stepped_whole` does, or if owners
        cannot step an optimizer for which they were asked.
        """
        parameters = [
            parameter
            for group in optimizer.param_groups
            if is_stepped_whole(optimizer, group, self._option)
            for parameter in filter(is_split, group["params"])
        ]
        new = [parameter for parameter in parameters if parameter not in self._parameters]
        if new and any(group.get(OPTION, self._option) == "whole" for group in optimizer.param_groups):
            _check_is_one_step(optimizer)
        find_holders = cache(holders_of)  # once for each layout
        for parameter in sorted(new, key=lambda parameter: -parameter.numel()):
            sharded: Any = parameter
            holders = find_holders(sharded.device_mesh, sharded.placements)
            ranks = sorted(holders.coordinates)
            owner = ranks[len(self._parameters) % len(ranks)]
            whole = self._parameters[parameter] = WholeParameter(parameter, holders, owner)
            if owner == dist.get_rank():
                whole.stand_in = nn.Parameter(whole.shard.new_empty(0), parameter.requires_grad)
        return {parameter: self._parameters[parameter].stand_in is not None for parameter in parameters}

    def describe(self, optimizers: list[Optimizer]) -> list[dict[str, Any]]:
        """For each optimizer: whether its groups of parameters are stepped as shards or whole."""
        described = []
        for optimizer in optimizers:
            groups = [
                "whole" if is_stepped_whole(optimizer, group, self._option) else "shards"
                for group in optimizer.param_groups
            ]
            described.append({"optimizer": type(optimizer).__name__, "groups": groups})
        return described

    # --- One step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        """Bring gradients and weights to their owners, and give ``optimizer`` the stand-ins.

        A collective over the world. Gradients must be final, and on all ranks for the same parameters.
        """
        # A parameter without a gradient is left out, as optimizers leave it out.
        shown: dict[nn.Parameter, nn.Parameter | None] = dict.fromkeys(self.of(optimizer))
        if not shown:
            return
        optimizers = nested_optimizers(optimizer)
        wholes = [self._parameters[parameter] for parameter in shown]
        for whole in wholes:
            _take_states(optimizers, whole)
        stepped = [whole for whole in wholes if whole.parameter.grad is not None]
        gradients: list[Travelling] = []
        for whole in stepped:
            sharded: Any = whole.parameter
            lay_out_gradient(sharded)
            gradient = None
            if whole.stand_in is not None:
                whole.stand_in.data = whole.shard.new_empty(sharded.shape)
                gradient = torch.empty_like(whole.stand_in)
                whole.stand_in.grad = gradient
            shown[sharded] = whole.stand_in
            whole.version_before = torch_internals.version(sharded)
            gradients.append((whole, torch_internals.local_tensor(sharded.grad), gradient))
        # One after the other, since what travels has memory twice.
        self._exchange(gradients, to_owners=True)
        self._exchange(_weights(stepped), to_owners=True)
        undo = _swap(optimizers, shown)
        undo.callback(_free, stepped)
        self._stepping[optimizer] = (stepped, undo)

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        """Bring back what owners have stepped, and give ``optimizer`` its sharded parameters. The same collective."""
        if optimizer not in self._stepping:
            return
        stepped, undo = self._stepping.pop(optimizer)
        with undo:
            for whole in stepped:
                if torch_internals.version(whole.parameter) != whole.version_before:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} has written sharded parameters, which it did not take from its"
                        " groups within the step, and owners would overwrite that: pass optimizer_step='shards'."
                    )
                if whole.stand_in is not None:
                    whole.stand_in.grad = None  # its memory is needed while weights travel
            self._exchange(_weights(stepped), to_owners=False)
            torch.autograd.graph.increment_version([whole.parameter for whole in stepped])

    def _exchange(self, tensors: list[Travelling], to_owners: bool) -> None:
        """Copy this rank's parts to the whole tensors that owners have, or back. A collective over the world."""
        ranks = range(dist.get_world_size())
        parts: list[list[Tensor]] = [[] for _ in ranks]  # by owner
        wholes: list[list[Tensor]] = [[] for _ in ranks]  # those of this rank, by holder
        for parameter, part, whole in tensors:
            parts[parameter.owner].append(part)
            if whole is not None:
                for rank in parameter.holders.coordinates:
                    wholes[rank].append(parameter.holders.part(whole, rank))
        if to_owners:
            exchange(parts, wholes, self._device)
        else:
            exchange(wholes, parts, self._device)

    def abandon(self) -> None:
        """Give all optimizers their sharded parameters, after an exception in a step. Not a collective."""
        for _, undo in self._stepping.values():
            undo.close()
        self._stepping.clear()


def _take_states(optimizers: list[Optimizer], whole: WholeParameter) -> None:
    """Make the states of a parameter whole on its owner, and drop them elsewhere.

    A collective if a state is sharded, as one that was made before the first step, or loaded by the user.
    """
    for optimizer in optimizers:
        state = optimizer.state.get(whole.parameter)
        if not state:
            continue
        if any(isinstance(tensor, DTensor) for tensor in tensors_in(state)):
            optimizer.state[whole.parameter] = apply_to_collection(dict(state), DTensor, full)
        if whole.stand_in is None:
            del optimizer.state[whole.parameter]


def _swap(optimizers: list[Optimizer], shown: dict[nn.Parameter, nn.Parameter | None]) -> ExitStack:
    """Give optimizers stand-ins, or nothing, in place of parameters. Closing what it returns undoes it.

    Lists of parameters are changed in place, since optimizers within an optimizer share them.
    """
    swapped = ExitStack()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters = group["params"]
            swapped.callback(parameters.__setitem__, slice(None), list(parameters))
            seen = [shown.get(parameter, parameter) for parameter in parameters]
            parameters[:] = [parameter for parameter in seen if parameter is not None]
    for parameter, stand_in in shown.items():
        if stand_in is not None:
            _move_states(optimizers, parameter, stand_in)
            swapped.callback(_move_states, optimizers, stand_in, parameter)
    return swapped


def _move_states(optimizers: list[Optimizer], old: nn.Parameter, new: nn.Parameter) -> None:
    for optimizer in optimizers:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _weights(stepped: list[WholeParameter]) -> list[Travelling]:
    return [(whole, whole.shard, whole.stand_in) for whole in stepped]


def _free(parameters: list[WholeParameter]) -> None:
    for parameter in parameters:
        if parameter.stand_in is not None:
            parameter.stand_in.grad = None
            parameter.stand_in.data = parameter.stand_in.new_empty(0)
