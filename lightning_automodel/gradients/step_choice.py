"""Which parameters are stepped whole, as all ranks agree before the first batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_automodel.gradients.optimizer_trial import (
    GroupTrial,
    OptimizerTrial,
    Outcome,
    try_group,
    undisturbed,
)
from lightning_automodel.gradients.trial_tensors import can_train, distinct, scaled_down
from lightning_automodel.gradients.whole_tensors import is_split, sharding_of

OPTION = "optimizer_step"
"""The strategy's option, and the key of a group of parameters that has another value."""
VALUES = ("auto", "shards", "whole")

_IGNORED = ("params", "param_names", "lr", "initial_lr")
"""Of a group: what makes no difference to its trial."""


class GroupChoice(NamedTuple):
    """How one group of parameters is stepped, and why."""

    is_whole: bool
    reason: str


class _Tried(NamedTuple):
    optimizer: Optimizer
    group: int
    requested: str
    trial: OptimizerTrial
    found: GroupTrial


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
        sharded = [
            parameter for parameter in group["params"] if can_train(parameter) and is_split(parameter)
        ]
        if not sharded:
            return None
        options = sorted((name, repr(value)) for name, value in group.items() if name not in _IGNORED)
        shapes = sorted(
            {
                (scaled_down(like)[0], str(like.dtype), str(sharding_of(like)[1]))
                for like in distinct(sharded)
            }
        )
        return id(optimizer), str(options), str(sorted(shapes))

    def _try(self, optimizer: Optimizer, index: int) -> _Tried:
        requested = optimizer.param_groups[index].get(OPTION, self._option)
        if requested not in VALUES:
            raise ValueError(
                f"The group {index} of {type(optimizer).__name__} has {OPTION}={requested!r}; valid are"
                f" {', '.join(map(repr, VALUES))}."
            )
        trial, found = try_group(optimizer, index, self._device, tries_both=requested == "whole")
        return _Tried(optimizer, index, requested, trial, found)

    def _agree(self, tried: list[_Tried]) -> list[GroupChoice]:
        """The choices that all ranks make by what each of them has found. A collective over the world."""
        numbers = [
            [candidate.found.on_shards, candidate.found.alone, not candidate.found.is_tried]
            for candidate in tried
        ]
        worst = self._worst(numbers)
        found: list[GroupChoice] = []
        for candidate, (on_shards, alone, is_untried) in zip(tried, worst, strict=True):
            needs_collectives = (
                on_shards == Outcome.COMMUNICATES and alone != Outcome.RIGHT and not is_untried
            )
            if needs_collectives and candidate.requested == "auto":
                found.append(self._with_collectives(candidate))
            else:
                found.append(self._choice(candidate, on_shards, alone, bool(is_untried)))
        return found

    def _worst(self, numbers: list[list[int]]) -> list[list[int]]:
        worst = torch.tensor(numbers, dtype=torch.int64)
        if worst.numel() > 0:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._host_group)
        found: list[list[int]] = worst.tolist()
        return found

    def _choice(self, candidate: _Tried, on_shards: int, alone: int, is_untried: bool) -> GroupChoice:
        name = type(candidate.optimizer).__name__
        notes = candidate.found.notes
        if is_untried:
            self._say_once(
                f"{name} could not be tried on small tensors ({notes.get('untried', 'on another rank')}), so"
                " that nobody knows whether it computes on shards of parameters what it computes on whole"
                f" ones. It is left on shards: compare with {OPTION}='whole', or with data_parallel='ddp'."
            )
            return GroupChoice(candidate.requested == "whole", "it could not be tried")
        difference = notes.get("on shards", "found on another rank")
        if candidate.requested == "shards":
            if on_shards != Outcome.RIGHT:
                self._say_once(
                    f"{name} computes something else on shards of parameters than on whole ones"
                    f" ({difference}), and {OPTION}='shards' leaves it there: leave the option out."
                )
            return GroupChoice(False, f"{OPTION}='shards'")
        if on_shards == Outcome.RIGHT and candidate.requested == "auto":
            return GroupChoice(False, "it treats each element alone")
        if alone == Outcome.RIGHT:
            return GroupChoice(
                True, f"{OPTION}='whole'" if candidate.requested == "whole" else f"on shards: {difference}"
            )
        raise self._refusal(candidate)

    def _with_collectives(self, candidate: _Tried) -> GroupChoice:
        """A last trial, on shards that are summed over ranks. A collective: what one rank raises ends the run."""
        try:
            with undisturbed(self._device):
                outcome, note = candidate.trial.run_with_collectives()
        except Exception as error:
            candidate.found.notes["on shards"] = f"{type(error).__name__}: {error}"
            raise self._refusal(candidate) from error
        [[worst]] = self._worst([[outcome]])
        if worst != Outcome.RIGHT:
            candidate.found.notes["on shards"] = note or "found on another rank"
            raise self._refusal(candidate)
        return GroupChoice(False, "its sums over all parameters are right on shards")

    def _refusal(self, candidate: _Tried) -> ValueError:
        notes = candidate.found.notes
        return ValueError(
            f"{type(candidate.optimizer).__name__} (group {candidate.group}) cannot train sharded"
            " parameters. Before the first batch, its steps on small tensors that are sharded like its"
            " parameters were compared with the same steps on whole tensors. On shards:"
            f" {notes.get('on shards', 'found on another rank')}. With an owner that steps each parameter"
            f" alone: {notes.get('alone', 'found on another rank')}. Pass data_parallel='ddp', under which"
            " every rank steps whole parameters, or choose an optimizer that treats each parameter by"
            " itself."
        )
