"""Which parameters are stepped whole, as all ranks agree before the first batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_automodel.gradients.optimizer_trial import (
    Finding,
    OptimizerTrial,
    Outcome,
    try_group,
    undisturbed,
)
from lightning_automodel.gradients.trial_tensors import kinds
from lightning_automodel.gradients.whole_tensors import is_split

OPTION = "optimizer_step"
"""The strategy's option, and the key of a group of parameters that has another value."""
VALUES = ("auto", "shards", "whole")

_IGNORED = ("params", "param_names", "lr", "initial_lr")
"""Of a group: what makes no difference to its trial."""
_ELSEWHERE = "found on another rank"


class GroupChoice(NamedTuple):
    """How one group of parameters is stepped, and why."""

    is_whole: bool
    reason: str


class _Tried(NamedTuple):
    """A group of an optimizer, the value of the option for it, and what this rank has found out.

    Attributes:
        on_shards: Of steps on this rank's shards without collectives.
        alone: Of steps of each whole tensor by itself.
    """

    optimizer: Optimizer
    group: int
    requested: str
    trial: OptimizerTrial
    on_shards: Finding
    alone: Finding


class StepChoices:
    """Decides for each group of parameters whether it is stepped on shards or whole.

    Args:
        option: ``"auto"``, ``"shards"`` or ``"whole"``, for groups that do not say.
        device: Of this rank.
        host_group: All ranks.
        say_once: Tells the user.
    """

    def __init__(
        self,
        option: str,
        device: torch.device,
        host_group: dist.ProcessGroup,
        say_once: Callable[[str], None],
    ) -> None:
        self._option = option
        self._device = device
        self._host_group = host_group
        self._say_once = say_once
        self.of: dict[Optimizer, list[GroupChoice]] = {}

    def choose(self, optimizers: list[Optimizer]) -> None:
        """Try the groups of ``optimizers`` that are new. A collective over the world, of a few numbers.

        Raises:
            ValueError: On every rank, if an optimizer is right neither on shards nor with whole parameters.
        """
        tried: dict[Any, _Tried] = {}
        keys: list[tuple[Optimizer, Any]] = []
        for optimizer in optimizers:
            for index in range(len(self.of.get(optimizer, [])), len(optimizer.param_groups)):
                key = self._key(optimizer, index)
                keys.append((optimizer, key))
                if key is not None and key not in tried:
                    tried[key] = self._try(optimizer, index)
        if not keys:
            return
        choices = dict(zip(tried, self._agree(list(tried.values())), strict=True))
        choices[None] = GroupChoice(False, "no parameter of it is sharded")
        for optimizer, key in keys:
            self.of.setdefault(optimizer, []).append(choices[key])

    def _key(self, optimizer: Optimizer, index: int) -> Any:
        """The same for groups whose trials would be; None for a group that needs no trial."""
        group = optimizer.param_groups[index]
        sharded = kinds(filter(is_split, group["params"]))
        if not sharded:
            return None
        options = sorted((name, repr(value)) for name, value in group.items() if name not in _IGNORED)
        return optimizer, tuple(options), frozenset(sharded)

    def _try(self, optimizer: Optimizer, index: int) -> _Tried:
        requested = optimizer.param_groups[index].get(OPTION, self._option)
        if requested not in VALUES:
            raise ValueError(
                f"The group {index} of {type(optimizer).__name__} has {OPTION}={requested!r}; valid are"
                f" {', '.join(map(repr, VALUES))}."
            )
        trial, on_shards, alone = try_group(optimizer, index, self._device, tries_both=requested == "whole")
        return _Tried(optimizer, index, requested, trial, on_shards, alone)

    def _agree(self, tried: list[_Tried]) -> list[GroupChoice]:
        """The choices that all ranks make by what each of them has found. A collective over the world."""
        if not tried:
            return []
        worst = self._worst([[group.on_shards.outcome, group.alone.outcome] for group in tried])
        return [
            self._choice(group, Outcome(on_shards), Outcome(alone))
            for group, (on_shards, alone) in zip(tried, worst, strict=True)
        ]

    def _worst(self, outcomes: list[list[int]]) -> list[list[int]]:
        worst = torch.tensor(outcomes, dtype=torch.int64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._host_group)
        found: list[list[int]] = worst.tolist()
        return found

    def _choice(self, tried: _Tried, on_shards: Outcome, alone: Outcome) -> GroupChoice:
        """What all ranks do about a group, by the worst outcomes of all. May be a collective over the world."""
        name = type(tried.optimizer).__name__
        own = tried.on_shards
        if on_shards is Outcome.UNTRIED:
            where = own.note if own.outcome is Outcome.UNTRIED else "on another rank"
            self._say_once(
                f"{name} could not be tried on small tensors ({where}), so that nobody knows whether it"
                " computes on shards of parameters what it computes on whole ones. It is left on shards:"
                f" compare with {OPTION}='whole', or with data_parallel='ddp'."
            )
            return GroupChoice(tried.requested == "whole", "it could not be tried")
        difference = own.note or _ELSEWHERE
        if tried.requested == "shards":
            if on_shards is not Outcome.RIGHT:
                self._say_once(
                    f"{name} computes something else on shards of parameters than on whole ones"
                    f" ({difference}), and {OPTION}='shards' leaves it there: leave the option out."
                )
            return GroupChoice(False, f"{OPTION}='shards'")
        if tried.requested == "auto" and on_shards is Outcome.RIGHT:
            return GroupChoice(False, "it treats each element alone")
        if alone is Outcome.RIGHT:
            reason = f"{OPTION}='whole'" if tried.requested == "whole" else f"on shards: {difference}"
            return GroupChoice(True, reason)
        if tried.requested == "auto" and on_shards is Outcome.COMMUNICATES:
            return self._with_collectives(tried)
        raise _refusal(tried, difference)

    def _with_collectives(self, tried: _Tried) -> GroupChoice:
        """A last trial, on shards that are summed over ranks. A collective: what one rank raises ends the run."""
        try:
            with undisturbed(self._device):
                found = tried.trial.run_with_collectives()
        except Exception as error:
            raise _refusal(tried, f"{type(error).__name__}: {error}") from error
        [[worst]] = self._worst([[found.outcome]])
        if worst != Outcome.RIGHT:
            raise _refusal(tried, found.note or _ELSEWHERE)
        return GroupChoice(False, "its sums over all parameters are right on shards")


def _refusal(tried: _Tried, on_shards: str) -> ValueError:
    return ValueError(
        f"{type(tried.optimizer).__name__} (group {tried.group}) cannot train sharded parameters. Before the"
        " first batch, its steps on small tensors that are sharded like its parameters were compared with"
        f" the same steps on whole tensors. On shards: {on_shards}. With an owner that steps each parameter"
        f" alone: {tried.alone.note or _ELSEWHERE}. Pass data_parallel='ddp', under which every rank"
        " steps whole parameters, or choose an optimizer that treats each parameter by itself."
    )
