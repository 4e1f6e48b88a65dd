"""Compares the gradients of one window with those of one batch."""

import math
from contextlib import suppress

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.lockstep import LockStep, ReplayError, agree
from lightning_automodel.callbacks.exactness.parts import Parts
from lightning_automodel.callbacks.exactness.verdict import StepResult, percent
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_size
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals

_CHANGE = 2e-4  # of the loss, that a step along the gradients aims at
_MOVE = 1e-2  # of the entries of a parameter without a gradient
_NO_COUNT = (
    "no count was given, nothing in the batch can be counted, and the graph of the loss does not tell, so that"
    " every micro-batch weighs the same here: pass ExactnessCheck(count_label_tokens=<function of the batch>),"
    " or per_token_loss=False if that is meant"
)


def reason_against(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Why this training cannot be replayed; None if there is no known reason."""
    strategy = type(trainer.strategy).__name__
    if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)) or "XLA" in strategy:
        return f"{strategy} keeps parameters in a form of its own"
    if not (module.automatic_optimization or automodel(trainer)):
        return f"under manual optimization {strategy} does not tell which backwards belong together"
    if lightning_internals.draws_its_batches(module.training_step):
        return "training_step(dataloader_iter) draws its batches itself"
    return None


def compare(lockstep: LockStep, unit: str, asks_forwards: bool) -> StepResult:
    """Compare a window with one batch, by forwards alone too if ``asks_forwards``. A collective over the world."""
    step = StepResult(
        counts=[turn.whole_count for turn in lockstep.turns],
        unequal=_unequal(lockstep.parameters),
        is_manual=not lockstep.module.automatic_optimization,
        is_sharded=lockstep.is_sharded,
    )
    run = lockstep.recorded.gradients or {}
    with lockstep.apart():
        try:
            agree(_reason_against(lockstep))
            _replay(step, lockstep, run, unit)
        except ReplayError as error:
            step.problem = str(error)
        if asks_forwards and step.is_sharded and not (step.problem or step.is_half or step.is_manual):
            with suppress(ReplayError, ArithmeticError):  # a step may differentiate by itself
                step.slope = _slope_along(run, lockstep)
    return step


def _reason_against(lockstep: LockStep) -> str | None:
    """Why this rank's part of a window cannot be replayed; None if there is no known reason."""
    recorded = lockstep.recorded
    if recorded.gradients is None:
        return "no backward of the loss that training_step has returned was seen"
    hooked = [
        name
        for name, parameter in lockstep.parameters.items()
        if name in recorded.gradients
        and not isinstance(parameter, DTensor)
        and torch_internals.has_hooks(parameter)
    ]
    if hooked:
        return (
            f"{list_first(hooked, 4)} has a hook (register_hook), which sees something else in each"
            " micro-batch than in one batch: use on_before_optimizer_step, or remove it for the check"
        )
    weights = lockstep.recorder.weights
    found = [weights[each.step][0] for each in recorded.micro_batches if weights]
    if any(not torch.equal(each[name], found[0][name]) for each in found for name in recorded.gradients):
        return "weights are written within a window that trains them"
    return None


def _replay(step: StepResult, lockstep: LockStep, run: Parts, unit: str) -> None:
    """Fill in what a replay shows. ReplayError if it cannot be judged."""
    exact, samples, losses = lockstep.one_batch(lockstep.turns)
    again, _, _ = lockstep.one_batch(lockstep.turns[::-1], scale=0.75)  # which rounds differently
    has_written = lockstep.write(lockstep.weights) and not step.is_manual
    if "16" in str(lockstep.module.trainer.precision_plugin.precision):
        eps = torch.finfo(torch.bfloat16).eps
    else:
        eps = max((torch.finfo(gradient.dtype).eps for gradient in exact.values()), default=0.0)
    numel = {name: parameter.numel() for name, parameter in lockstep.parameters.items()}
    step.judge(lockstep.norms(run, exact), lockstep.norms(again, exact), lockstep.norms(exact), numel, eps)
    step.explain(samples, lockstep.sample(run), unit)
    agree(_problem_of(step, lockstep, losses, has_written))


def _problem_of(step: StepResult, lockstep: LockStep, losses: list[float], has_written: bool) -> str | None:
    """Why what a replay shows is no verdict, as far as this rank can tell."""
    if has_written:
        return "training_step writes weights, which a micro-batch would find as another wrote them"
    tolerance = 1e-2 if step.is_half else 1e-5
    pairs = [
        (turn.loss, loss)
        for turn, loss in zip(lockstep.turns, losses, strict=True)
        if abs(turn.loss - loss) > tolerance * abs(turn.loss)
    ]
    if pairs:
        return (
            f"{len(pairs)} of {len(losses)} losses differ in the replay, such as {pairs[0][0]:.6g} in the"
            f" run and {pairs[0][1]:.6g} in the replay: training_step is not repeatable, depends on the"
            " rank or on other ranks, or keeps a state that is no attribute of a module"
        )
    if not lockstep.is_counted and (step.explanation or not step.is_wrong):
        return f"{_NO_COUNT}. {step.explanation}".rstrip(". ")
    if step.is_wrong and not step.explanation and is_overridden("backward", lockstep.module):
        return f"they are {percent(step.gradient_error)} off, as LightningModule.backward may mean it"
    return None


@torch.no_grad()
def _slope_along(run: Parts, lockstep: LockStep) -> float:
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


def _unequal(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Plain parameters of which ranks hold different values. A collective over the world."""
    sums = {
        name: float(parameter.detach().double().sum().nan_to_num())
        for name, parameter in parameters.items()
        if not isinstance(parameter, DTensor)
    }
    by_rank = collectives.gather_objects(sums)
    return [name for name in sums if len({of_rank[name] for of_rank in by_rank}) > 1]
