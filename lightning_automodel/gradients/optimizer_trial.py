"""A trial of optimizers before the first batch: does it matter to them that parameters are sharded?

Each group of parameters is tried by itself, with the group's own options, on small tensors that are sharded
like its parameters. Three steps (more where a number among the options says that something comes later) are
taken

- on whole tensors: the reference;
- on this rank's shards, where no collective is allowed: right for an optimizer that treats each element
  alone;
- on each whole tensor alone: right for one that steps each parameter by itself, which an owner can do;
- on the shards again, with collectives, if neither was right: for one that needs one norm of all parameters.

All but the last is done by each rank alone, so that nothing can hang. Copies of the optimizer step: its own
state, its parameters and the random generators stay as they are.
"""

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.gradients.trial_tensors import TrialTensors
from lightning_automodel.gradients.whole_tensors import nested_optimizers
from lightning_automodel.gradients.windows import mixing_shards
from lightning_automodel.internals import torch as torch_internals

_NUM_STEPS = 3
_LATEST_STEP = 30
"""Numbers among the options up to this one may be steps at which something begins, and are waited for."""
_LEARNING_RATE = 0.01
"""A warm-up may begin at zero, where nothing could be seen."""
_RELATIVE_DIFFERENCE = 1e-4
"""Of the largest change of a parameter; what a real difference exceeds, and another order of additions does not."""


class Outcome(IntEnum):
    """How an optimizer's steps compare with the reference; the worst of all ranks counts."""

    RIGHT = 0
    COMMUNICATES = 1
    WRONG = 2


@dataclass
class GroupTrial:
    """What this rank has found out about one group of an optimizer's parameters.

    Attributes:
        on_shards: Steps on this rank's shards without collectives.
        alone: Steps of each whole tensor by itself.
        notes: What went wrong, in words, by what was tried.
        is_tried: False if the reference itself failed.
    """

    on_shards: Outcome = Outcome.RIGHT
    alone: Outcome = Outcome.RIGHT
    notes: dict[str, str] = field(default_factory=dict)
    is_tried: bool = True


# --- Copies of an optimizer -------------------------------------------------------------------------------------------


def _copied(
    optimizer: Optimizer, index: int, likes: Sequence[nn.Parameter], trained: list[nn.Parameter]
) -> Optimizer:
    """A copy of ``optimizer`` without parameters but in its group ``index``: ``trained``, which stand for ``likes``."""
    filler = nn.Parameter(torch.zeros(1))
    memo: dict[int, Any] = {
        id(parameter): filler for group in optimizer.param_groups for parameter in group["params"]
    }
    memo.update({id(like): new for like, new in zip(reversed(likes), reversed(trained), strict=True)})
    copied = _shallow(optimizer, memo, likes, trained)
    for number, group in enumerate(copied.param_groups):
        group["params"][:] = trained if number == index else []
        rate = group.get("lr")
        if isinstance(rate, float):
            group["lr"] = _LEARNING_RATE
        elif isinstance(rate, Tensor):
            group["lr"] = torch.full_like(rate, _LEARNING_RATE)
    return copied


def _shallow(
    optimizer: Optimizer,
    memo: dict[int, Any],
    likes: Sequence[nn.Parameter],
    trained: Sequence[nn.Parameter],
) -> Optimizer:
    """A copy without hooks, and without the large tensors of its state; ``memo`` is that of ``copy.deepcopy``."""
    new: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = new
    memo[id(optimizer.state)] = _small_state(optimizer.state, likes, trained)
    for inner in nested_optimizers(optimizer)[1:]:
        if id(inner) not in memo:
            _shallow(inner, memo, likes, trained)
    of_torch = vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))
    vars(new).update(of_torch)
    for name, value in vars(optimizer).items():
        is_hook = name in of_torch and name not in ("defaults", "state", "param_groups")
        is_patch = callable(value) and hasattr(type(optimizer), name)
        # Which the optimizer has asked for names: neither to be copied nor written.
        if isinstance(value, nn.Module):
            memo[id(value)] = nn.Module()
        if not is_hook and not is_patch:
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


def _small_state(
    state: Mapping[Any, Any], likes: Sequence[nn.Parameter], trained: Sequence[nn.Parameter]
) -> defaultdict[Any, Any]:
    """What an optimizer has made before its first step, for small tensors."""
    small: defaultdict[Any, Any] = defaultdict(dict)
    for like, new in zip(likes, trained, strict=True):
        for name, value in state[like].items() if like in state else ():
            if isinstance(value, Tensor) and value.shape == like.shape:
                local = torch_internals.local_tensor(value)
                if local.numel() > 0:
                    first = local.flatten()[0].item()
                else:
                    first = 0
                small[new][name] = torch.full_like(new.detach(), first, dtype=value.dtype)
            else:
                small[new][name] = copy.deepcopy(value)
    return small


# --- Steps ------------------------------------------------------------------------------------------------------------


class _CommunicatesError(Exception):
    """A collective, where none is allowed."""


class _TrialMode(torch_internals.TorchDispatchMode):
    """Refuses collectives unless they are allowed, and draws one number only, so that parts draw what a whole draws."""

    def __init__(self, allows_collectives: bool) -> None:
        super().__init__()
        self._allows_collectives = allows_collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local parts comes here again
        if "c10d" in func.namespace and not self._allows_collectives:
            raise _CommunicatesError(str(func))
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, Tensor):
            found.fill_(0.5)
        return found


def _step(
    optimizer: Optimizer,
    index: int,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Sequence[Tensor | None]],
    allows_collectives: bool = False,
    as_owner: bool = False,
) -> None:
    """Take a step of a copy, whose group ``index`` has the ``parameters``, with each of the ``gradients``.

    ``as_owner``: as in `whole_tensors`, where stand-ins come once the closure has run, for what has a
    gradient.
    """
    shown = optimizer.param_groups[index]["params"]
    for of_step in gradients:
        if as_owner:
            shown[:] = [nn.Parameter(torch.zeros(1)) for _ in parameters]

        def closure(of_step: Sequence[Tensor | None] = of_step) -> Tensor:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient
            if as_owner:
                shown[:] = [parameter for parameter in parameters if parameter.grad is not None]
            return torch.tensor(0.7)

        with mixing_shards(optimizer), _TrialMode(allows_collectives):
            type(optimizer).step(optimizer, closure)  # type: ignore[arg-type]  # a tensor is what Lightning returns


def _outcome(error: BaseException) -> Outcome:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _CommunicatesError):
            return Outcome.COMMUNICATES
        cause = cause.__cause__ or cause.__context__
    return Outcome.WRONG


class OptimizerTrial:
    """Tries one group of an optimizer's parameters.

    Args:
        optimizer: Of the run. Copies of it are tried.
        index: Of the group.
        dtype: Of the tensors; None is that of the parameters.
    """

    def __init__(self, optimizer: Optimizer, index: int, dtype: torch.dtype | None = None) -> None:
        self._optimizer = optimizer
        self._index = index
        group = optimizer.param_groups[index]
        self._num_steps = _num_steps(optimizer, group)
        self._tensors = TrialTensors(group["params"], self._num_steps, dtype)
        self._reference: list[Tensor] = []
        self._numbers: dict[str, float] = {}  # that the reference leaves in the group and the optimizer

    def run(self, tries_both: bool) -> GroupTrial:
        """Compare steps on this rank's shards with the reference, and if they differ, those of each tensor alone.

        Not a collective. ``tries_both``: also if they do not differ.
        """
        found = GroupTrial()
        if len(self._tensors) == 0:
            return found
        try:
            self._reference, self._numbers = self._stepped(range(len(self._tensors)), self._tensors.whole)
        except Exception as error:
            found.is_tried = False
            found.notes["untried"] = _in_words(error)
            return found
        found.on_shards, note = self._compare_shards()
        if found.on_shards is not Outcome.RIGHT:
            found.notes["on shards"] = note
        if found.on_shards is not Outcome.RIGHT or tries_both:
            found.alone, note = self._compare_alone()
            if found.alone is not Outcome.RIGHT:
                found.notes["alone"] = note
        return found

    def run_with_collectives(self) -> tuple[Outcome, str]:
        """Compare steps on shards, where all ranks take part. A collective, so that what a rank raises is raised."""
        chosen = range(len(self._tensors))
        return self._compared(
            chosen, *self._stepped(chosen, self._tensors.shard, allows_collectives=True), True
        )

    def _stepped(
        self, chosen: Sequence[int], form: Callable[[int, Tensor], Tensor], **how: bool
    ) -> tuple[list[Tensor], dict[str, float]]:
        """The chosen tensors, in the ``form`` of shards or whole ones, and the optimizer's numbers, after all steps."""
        tensors = self._tensors
        parameters = [nn.Parameter(form(index, tensors.values[index])) for index in chosen]
        likes = [tensors.likes[index] for index in chosen]
        optimizer = _copied(self._optimizer, self._index, likes, parameters)
        gradients: list[list[Tensor | None]] = [
            [form(index, of_step[index]) for index in chosen] for of_step in tensors.gradients
        ]
        if 0 in chosen:  # a parameter that a step has not used
            gradients[1][chosen.index(0)] = None
        _step(optimizer, self._index, parameters, gradients, **how)
        return [parameter.detach() for parameter in parameters], _numbers(optimizer, self._index)

    def _compare_shards(self) -> tuple[Outcome, str]:
        try:
            found = self._stepped(range(len(self._tensors)), self._tensors.shard)
            return self._compared(range(len(self._tensors)), *found, on_shards=True)
        except Exception as error:
            outcome = _outcome(error)
            communicates = "it asks other ranks for their shards"
            return outcome, communicates if outcome is Outcome.COMMUNICATES else _in_words(error)

    def _compare_alone(self) -> tuple[Outcome, str]:
        try:
            self._stepped([], self._tensors.whole, as_owner=True)  # a rank that owns nothing
            everything = list(range(len(self._tensors)))
            for chosen in (everything, *([index] for index in everything)):
                found = self._stepped(chosen, self._tensors.whole, as_owner=True)
                outcome, note = self._compared(chosen, *found, on_shards=False)
                if outcome is not Outcome.RIGHT:
                    return outcome, note
        except Exception as error:
            return Outcome.WRONG, _in_words(error)
        return Outcome.RIGHT, ""

    def _compared(
        self, chosen: Sequence[int], parameters: list[Tensor], numbers: dict[str, float], on_shards: bool
    ) -> tuple[Outcome, str]:
        for index, parameter in zip(chosen, parameters, strict=True):
            reference = self._reference[index]
            change = (reference - self._tensors.values[index]).abs().max().double()
            if on_shards:
                expected = self._tensors.part(index, reference)
            else:
                expected = reference
            found = torch_internals.local_tensor(parameter)
            allowed = (
                4 * torch.finfo(expected.dtype).eps * expected.abs().double() + _RELATIVE_DIFFERENCE * change
            )
            difference = (found - expected).abs().double()
            if not bool((difference <= allowed).all()):
                percent = 100 * float(difference.max() / change)
                return Outcome.WRONG, f"{percent:.2g} % of the largest change of a {list(reference.shape)}"
        for name, number in self._numbers.items():
            if not math.isclose(number, numbers.get(name, math.nan), rel_tol=_RELATIVE_DIFFERENCE):
                return Outcome.WRONG, f"{name} is {numbers.get(name)} instead of {number}"
        return Outcome.RIGHT, ""


def _numbers(optimizer: Optimizer, index: int) -> dict[str, float]:
    """What an optimizer keeps beside the states of parameters: a step size that it adapts to all of them, say."""
    found: dict[str, float] = {}
    for name, value in (*optimizer.param_groups[index].items(), *vars(optimizer).items()):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            found[name] = float(value)
    return found


def _num_steps(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """At least three, and one more than any number that may be the step at which something begins."""
    numbers = [value for value in (*group.values(), *vars(optimizer).values()) if type(value) is int]
    return 1 + max([_NUM_STEPS - 1, *(number for number in numbers if number <= _LATEST_STEP)])


def _in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Context that leaves random generators as they were, and says nothing."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(isolate_rng())
        if device.type not in ("cpu", "cuda"):
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        yield


def try_group(
    optimizer: Optimizer, index: int, device: torch.device, tries_both: bool
) -> tuple[OptimizerTrial, GroupTrial]:
    """Try one group of an optimizer on this rank; see :meth:`OptimizerTrial.run`. Not a collective."""
    with undisturbed(device):
        trial = OptimizerTrial(optimizer, index)
        found = trial.run(tries_both)
        is_half = any(parameter.dtype.itemsize < 4 for parameter in optimizer.param_groups[index]["params"])
        if not is_half or not found.is_tried:
            return trial, found
        in_float32 = OptimizerTrial(optimizer, index, torch.float32).run(tries_both)
    found.on_shards = max(found.on_shards, in_float32.on_shards)
    found.alone = max(found.alone, in_float32.alone)
    found.notes = {**in_float32.notes, **found.notes}
    return trial, found
