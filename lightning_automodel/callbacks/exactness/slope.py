"""The change of the loss along the run's gradients, by forwards alone: evidence for gradients without a backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from lightning_automodel.callbacks.exactness.lockstep import Gradients, LockStep, Turn, local_part
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_size

_CHANGE = 1e-3  # of the loss that steps aim at, and of a parameter without a gradient


@dataclass(frozen=True)
class Slope:
    """What the loss says of the gradients.

    Attributes:
        ratio: Its slope along the gradients, relative to what they promise: 1, unless something is detached.
        doubt: How much the ratio may be off.
        unmoved: Parameters without a gradient, or with zeros, that nevertheless change the loss.
    """

    ratio: float
    doubt: float
    unmoved: list[str]

    @property
    def is_one(self) -> bool:
        """Whether the loss changes as the gradients promise."""
        return abs(self.ratio - 1) < max(0.01, 4 * self.doubt) and not self.unmoved


class Slopes:
    """Measures the slopes of a window's loss within :meth:`LockStep.apart`. Collectives over the world."""

    def __init__(self, lockstep: LockStep, turns: Sequence[Turn], run: Gradients) -> None:
        self._lockstep = lockstep
        self._turns = turns
        self._parts = {name: local_part(p) for name, p in lockstep.trained.items()}
        self._run = run
        self._loss = self._value()
        self._noise = max(abs(self._value(reverse=True) - self._loss), 2.0**-23 * abs(self._loss))

    def measure(self) -> Slope:
        """Measure all of it."""
        squares = {name: norm**2 for name, norm in self._lockstep.norms(self._run).items()}
        promised = max(sum(squares.values()), 1e-300)
        step = _CHANGE * abs(self._loss) / promised
        near = self._central(self._run, step)
        far = self._central(self._run, 2 * step)
        doubt = abs(near - far) + 4 * self._noise / step
        unmoved = [name for name, square in squares.items() if not square and self._moves(name)]
        return Slope((4 * near - far) / (3 * promised), doubt / promised, unmoved)

    def _moves(self, name: str) -> bool:
        """Whether a parameter without a gradient changes the loss."""
        part = self._parts[name]
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        direction = torch.randn(part.shape, generator=generator)
        sizes = collectives.gather_objects(float(part.abs().mean().nan_to_num()))
        size = _CHANGE * (1 + max(sizes))
        return abs(self._central({name: direction}, size)) * size > 8 * self._noise

    def _central(self, directions: Gradients, step: float) -> float:
        return (self._at(directions, step) - self._at(directions, -step)) / (2 * step)

    def _at(self, directions: Gradients, step: float) -> float:
        """The loss of weights that are a step away."""
        before = {name: self._parts[name].clone() for name in directions}
        for name, direction in directions.items():
            self._parts[name].add_(direction.to(before[name]), alpha=step)
        value = self._value()
        for name, weight in before.items():
            self._parts[name].copy_(weight)
        return value

    @torch.no_grad()
    def _value(self, reverse: bool = False) -> float:
        total = 0.0
        for turn in sorted(self._turns, key=self._turns.index, reverse=reverse):
            objective, _ = self._lockstep.compute(turn, self._turns)
            if math.isfinite(objective):  # a slice without label tokens has no loss
                total += objective
        return sum(collectives.gather_objects(total)) / group_size()
