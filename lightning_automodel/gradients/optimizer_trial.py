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
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.gradients.optimizer_copy import copy_optimizer
from lightning_automodel.gradients.trial_tensors import TrialTensor, trial_tensors
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
    UNTRIED = 3
    """The reference itself failed."""


class Finding(NamedTuple):
    """What this rank has found out, and what went wrong, in words."""

    outcome: Outcome = Outcome.RIGHT
    note: str = ""

    def or_worse(self, other: "Finding") -> "Finding":
        """The worse outcome of both, with the own note if there is one."""
        return Finding(max(self.outcome, other.outcome), self.note or other.note)


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
    copied = copy_optimizer(optimizer, memo, lambda own: _small_state(own.state, likes, trained))
    for number, group in enumerate(copied.param_groups):
        group["params"][:] = trained if number == index else []
        rate = group.get("lr")
        if isinstance(rate, float):
            group["lr"] = _LEARNING_RATE
        elif isinstance(rate, Tensor):
            group["lr"] = torch.full_like(rate, _LEARNING_RATE)
    return copied


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
    shown: list[nn.Parameter],
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    allows_collectives: bool = False,
    as_owner: bool = False,
) -> None:
    """Take a step of a copy with ``gradients`` of the ``parameters``; its group has them in the list ``shown``.

    ``as_owner``: as in `whole_tensors`, where stand-ins come once the closure has run, for what has a
    gradient.
    """
    if as_owner:
        shown[:] = [nn.Parameter(torch.zeros(1)) for _ in parameters]

    def closure() -> Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if as_owner:
            shown[:] = [parameter for parameter in parameters if parameter.grad is not None]
        return torch.tensor(0.7)

    with mixing_shards(optimizer), _TrialMode(allows_collectives):
        type(optimizer).step(optimizer, closure)  # type: ignore[arg-type]  # a tensor is what Lightning returns


def _finding(error: BaseException) -> Finding:
    """What an exception in steps on shards, where no collective is allowed, tells."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _CommunicatesError):
            return Finding(Outcome.COMMUNICATES, "it asks other ranks for their shards")
        cause = cause.__cause__ or cause.__context__
    return Finding(Outcome.WRONG, _in_words(error))


Form = Callable[[TrialTensor, Tensor], Tensor]


class Stepped(NamedTuple):
    """What a copy of the optimizer has made of tensors, and of the numbers that it keeps beside their states."""

    tensors: dict[TrialTensor, Tensor]
    numbers: dict[str, float]


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
        self._tensors = trial_tensors(group["params"], self._num_steps, dtype)
        self._reference = Stepped({}, {})

    def run(self, tries_both: bool) -> tuple[Finding, Finding]:
        """Compare steps on this rank's shards with the reference, and if they differ, those of each tensor alone.

        Not a collective. ``tries_both``: also if they do not differ.
        """
        on_shards = Finding()
        alone = Finding()
        if not self._tensors:
            return on_shards, alone
        try:
            self._reference = self._stepped(self._tensors, TrialTensor.whole)
        except Exception as error:
            return Finding(Outcome.UNTRIED, _in_words(error)), alone
        try:
            on_shards = self._compare_shards()
        except Exception as error:
            on_shards = _finding(error)
        if on_shards.outcome is not Outcome.RIGHT or tries_both:
            try:
                alone = self._compare_alone()
            except Exception as error:
                alone = Finding(Outcome.WRONG, _in_words(error))
        return on_shards, alone

    def run_with_collectives(self) -> Finding:
        """Compare steps on shards, where all ranks take part. A collective, so that what a rank raises is raised."""
        return self._compare_shards(allows_collectives=True)

    def _compare_shards(self, **how: bool) -> Finding:
        return self._compared(self._stepped(self._tensors, TrialTensor.shard, **how), TrialTensor.part)

    def _compare_alone(self) -> Finding:
        self._stepped([], TrialTensor.whole, as_owner=True)  # a rank that owns nothing
        for chosen in (self._tensors, *([tensor] for tensor in self._tensors)):
            stepped = self._stepped(chosen, TrialTensor.whole, as_owner=True)
            found = self._compared(stepped, TrialTensor.whole)
            if found.outcome is not Outcome.RIGHT:
                return found
        return Finding()

    def _stepped(self, chosen: Sequence[TrialTensor], form: Form, **how: bool) -> Stepped:
        """Take all steps of the chosen tensors, in the ``form`` of shards or whole ones."""
        parameters = [nn.Parameter(form(tensor, tensor.values)) for tensor in chosen]
        optimizer = _copied(self._optimizer, self._index, [tensor.like for tensor in chosen], parameters)
        shown = optimizer.param_groups[self._index]["params"]
        for step in range(self._num_steps):
            gradients = [(tensor, tensor.gradients[step]) for tensor in chosen]
            formed = [None if gradient is None else form(tensor, gradient) for tensor, gradient in gradients]
            _step(optimizer, shown, parameters, formed, **how)
        detached = [parameter.detach() for parameter in parameters]
        return Stepped(dict(zip(chosen, detached, strict=True)), _numbers(optimizer, self._index))

    def _compared(self, stepped: Stepped, form: Form) -> Finding:
        """How tensors compare with the reference, of which ``form`` makes what is expected."""
        for tensor, parameter in stepped.tensors.items():
            reference = self._reference.tensors[tensor]
            change = (reference - tensor.values).abs().max().double()
            expected = form(tensor, reference)
            allowed = (
                4 * torch.finfo(expected.dtype).eps * expected.abs().double() + _RELATIVE_DIFFERENCE * change
            )
            difference = (torch_internals.local_tensor(parameter) - expected).abs().double()
            if not bool((difference <= allowed).all()):
                percent = 100 * float(difference.max() / change)
                note = f"{percent:.2g} % of the largest change of a {list(reference.shape)}"
                return Finding(Outcome.WRONG, note)
        for name, number in self._reference.numbers.items():
            found = stepped.numbers.get(name, math.nan)
            if not math.isclose(number, found, rel_tol=_RELATIVE_DIFFERENCE):
                return Finding(Outcome.WRONG, f"{name} is {stepped.numbers.get(name)} instead of {number}")
        return Finding()


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


def _in_words(error: BaseException) -> str:
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
) -> tuple[OptimizerTrial, Finding, Finding]:
    """Try one group of an optimizer on this rank. Not a collective.

    Returns the trial in the dtype of the parameters, and what :meth:`OptimizerTrial.run` has found, in half
    precision the worse of that and of a trial in float32.
    """
    with undisturbed(device):
        trial = OptimizerTrial(optimizer, index)
        on_shards, alone = trial.run(tries_both)
        is_half = any(parameter.dtype.itemsize < 4 for parameter in optimizer.param_groups[index]["params"])
        if is_half and on_shards.outcome is not Outcome.UNTRIED:
            wide_on_shards, wide_alone = OptimizerTrial(optimizer, index, torch.float32).run(tries_both)
            if wide_on_shards.outcome is not Outcome.UNTRIED:
                on_shards = on_shards.or_worse(wide_on_shards)
                alone = alone.or_worse(wide_alone)
    return trial, on_shards, alone
