"""The change of the loss along the run's gradients, by forwards alone: evidence for gradients without a backward."""

import math

import torch

from lightning_automodel.callbacks.exactness.lockstep import LockStep
from lightning_automodel.callbacks.exactness.parts import Parts
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_size

_CHANGE = 2e-4  # of the loss, that a step along the gradients aims at
_MOVE = 1e-2  # of the entries of a parameter without a gradient


@torch.no_grad()
def slope_along(run: Parts, lockstep: LockStep) -> float:
    """The slope of a window's loss along the gradients, relative to what they promise: 1, unless they lack a part.

    Parameters without a gradient, or with zeros, move at random: they promise that the loss does not change.
    Called within :meth:`LockStep.apart`. A collective over the world.
    """
    norms = lockstep.norms(run)
    promised = sum(norm**2 for norm in norms.values())
    size = _CHANGE * abs(_loss(lockstep, lockstep.weights)) / promised
    steps = {name: size * gradient for name, gradient in run.items()}
    for name, parameter in lockstep.parameters.items():
        if norms[name] == 0 and parameter.requires_grad:
            generator = torch.Generator().manual_seed(0)  # the same on all ranks
            steps[name] = _MOVE * torch.randn(lockstep.weights[name].shape, generator=generator)

    change = 0.0
    for side in (1, -1):  # a step ahead and one behind
        moved = {name: side * step.to(lockstep.weights[name]) for name, step in steps.items()}
        weights = {name: weight + moved.get(name, 0) for name, weight in lockstep.weights.items()}
        change += side * _loss(lockstep, weights)
    return change / (2 * size * promised)


def _loss(lockstep: LockStep, weights: Parts) -> float:
    """The loss of one batch."""
    shares = [lockstep.compute(turn, [weights]).share for turn in lockstep.turns]
    finite = filter(math.isfinite, shares)  # a slice without label tokens has no loss
    return sum(collectives.gather_objects(sum(finite))) / group_size()
