"""Compares the gradients of a window with those of one batch. :func:`compare` is a collective over the world.

The run's gradients are

- not judged (:class:`ReplayError`) if the window cannot be replayed, or rounding could hide or explain an error;
- wrong if they are off by more than rounding, in all or in one parameter, or a micro-batch weighs wrongly in them;
- right otherwise.

Rounding is what another order and scale of the replay change.
"""

import math
from contextlib import suppress

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_automodel.callbacks.exactness.recording import Parts, Recorder
from lightning_automodel.callbacks.exactness.replay import Replay, ReplayError, agree
from lightning_automodel.callbacks.exactness.report import StepResult, explain, percent
from lightning_automodel.distributed import collectives
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals

_ROUNDING_FACTOR = 4
"""An error is more than so many times the rounding that another order and scale of the replay show."""
_DOUBTFUL_FACTOR = 2.5
"""In half precision, more than so many times that rounding is not judged, if it is no error for certain."""
_LEAST_EPSILONS = 16
"""So many epsilons of the dtype are no error, though the replays may round alike."""
_MOST_ROUNDING = 0.01
"""With more rounding, relative to the gradients, those in single precision mean nothing."""
_INFINITE = 1e100
"""An error as large is that of gradients that are not finite."""
_UNEXPLAINED = 0.05
"""Share of the gradients that wrong weights of micro-batches may leave unexplained where they are the reason."""
_IMPROVEMENT = 0.3
"""The share of the error that these weights may leave."""
_WEIGHT_OFF = 0.02
"""A weight of a micro-batch that is off by more is an error, also where rounding hides it from the norms."""
_CHANGE = 2e-4
"""The share of the loss by which a step along the gradients should change it."""
_MOVE = 1e-2
"""The share by which that step moves entries of a parameter without a gradient."""


def training_problem(recorder: Recorder) -> str:
    """Why a training cannot be replayed; empty if there is no known reason."""
    strategy = type(recorder.trainer.strategy).__name__
    if isinstance(recorder.trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)) or "XLA" in strategy:
        return f"{strategy} keeps parameters in a form of its own"
    if not (recorder.is_automatic or recorder.run):
        return f"under manual optimization {strategy} does not tell which backwards belong together"
    if lightning_internals.draws_its_batches(recorder.module.training_step):
        return "training_step(dataloader_iter) draws its batches itself"
    return ""


def compare(replay: Replay, measures_slope: bool) -> StepResult:
    """Compare a window with one batch, by forwards alone too if ``measures_slope``."""
    recorder = replay.recorder
    sums = {f"the sum of {n}": f"{float(p.detach().double().sum())}" for n, p in recorder.plain.items()}
    step = StepResult(
        counts=[each.whole_count for each in replay.micro_batches],
        unequal=collectives.disagreement(sums),
        repeats_batches=replay.repeats_batches,
    )
    try:
        agree(_window_problem(replay))
        exact, samples = replay.one_batch(replay.micro_batches)
        again, _ = replay.one_batch(replay.micro_batches[::-1], scale=0.75)  # which rounds differently
        _measure(step, replay, exact, again)
        _weigh(step, replay, samples)
        if measures_slope and recorder.is_sharded and recorder.is_automatic and not recorder.is_half:
            with suppress(ReplayError, ArithmeticError):  # a step may differentiate by itself
                step.slope = _slope(replay)
    except ReplayError as error:
        step.problem = str(error)
        step.is_wrong = False
    finally:
        replay.write(replay.weights)
    return step


def _window_problem(replay: Replay) -> str:
    """Why this rank's part of a window cannot be replayed; empty if there is no known reason."""
    recorder = replay.recorder
    if replay.window.gradients is None:
        return "no backward of the loss that training_step has returned was seen"
    for name in replay.gradients:
        if name in recorder.plain and torch_internals.has_hooks(recorder.plain[name]):
            return (
                f"{name} has a hook (register_hook), which sees something else in each"
                " micro-batch than in one batch: use on_before_optimizer_step, or remove it for the check"
            )
    steps = [recorder.steps[each.step] for each in replay.window.micro_batches]
    weights = [step.weights[0] for step in steps if step.weights]
    if any(not torch.equal(each[name], weights[0][name]) for each in weights for name in replay.gradients):
        return "weights are written within a window that trains them"
    if not any(math.isnan(each.whole_count) for each in replay.micro_batches):
        return ""
    return (
        "no count was given, nothing in the batch can be counted, and the graph of the loss does not tell: pass"
        " ExactnessCheck(count_label_tokens=<function of the batch>), or per_token_loss=False if every micro-batch"
        " shall weigh the same"
    )


def _measure(step: StepResult, replay: Replay, exact: Parts, again: Parts) -> None:
    """How far the run is off the ``exact`` gradients, and whether that is more than what rounds them ``again``."""
    recorder = replay.recorder
    size = _norms(replay, exact, {})
    total = size.norm().clamp(min=1e-300)
    off = _norms(replay, replay.gradients, exact) / total
    rounding = _norms(replay, again, exact) / total
    step.gradient_error = float(off.norm())
    step.rounding = float(rounding.norm())
    if not step.gradient_error + step.rounding < _INFINITE:
        raise ReplayError("gradients are not finite, or are zero in the replay alone")
    least = recorder.epsilon if recorder.is_half else _LEAST_EPSILONS * recorder.epsilon
    limit = _ROUNDING_FACTOR * step.rounding + least
    # A gradient may be zero up to rounding: its own, or its share of all rounding.
    numel = torch.tensor([parameter.numel() for parameter in recorder.parameters.values()])
    share = (numel / numel[size > 0].sum().clamp(min=1)).sqrt()
    size /= total
    is_off = off > _ROUNDING_FACTOR * rounding + least * size + limit * share
    rows = zip(off.tolist(), (off / size).tolist(), is_off, recorder.parameters, strict=True)
    step.parameters = {name: error for _, error, found, name in sorted(rows, reverse=True) if found}
    step.is_wrong = step.gradient_error > limit or bool(step.parameters)
    if step.rounding > _MOST_ROUNDING and not (recorder.is_half or step.is_wrong):
        raise ReplayError(
            f"another order and scale change them by {percent(step.rounding)}: by rounding, which"
            " precision='64-true' tells, or by a hook of the backward that is not linear"
        )


def _weigh(step: StepResult, replay: Replay, samples: list[Tensor]) -> None:
    """Whether micro-batches weigh wrongly in the run's gradients; these, or what else is off, in words."""
    recorder = replay.recorder
    factors, error = _fit_weights(samples, replay.sample(replay.gradients))
    # In half precision, rounding does not explain a weight.
    is_weighed_wrongly = error > (0 if step.is_wrong else _WEIGHT_OFF)
    off = f"they are {percent(step.gradient_error)} off"
    if step.is_wrong and not is_weighed_wrongly and is_overridden("backward", recorder.module):
        raise ReplayError(f"{off}, as LightningModule.backward may mean it")
    step.is_wrong = step.is_wrong or is_weighed_wrongly
    if recorder.is_half and not step.is_wrong and step.gradient_error > _DOUBTFUL_FACTOR * step.rounding:
        raise ReplayError(
            f"{off}, which may be rounding (here {percent(step.rounding)}) or not: check with precision='32-true'"
        )
    step.explanation = explain(step, factors if is_weighed_wrongly else None, recorder)


def _norms(replay: Replay, first: Parts, second: Parts) -> Tensor:
    """[p] 2-norms by parameter of the differences between two gradients, in float64."""
    zero = torch.zeros(())
    rows = []
    for name, parameter in replay.recorder.parameters.items():
        difference = first.get(name, zero).double() - second.get(name, zero).double()
        rows.append([float(difference.square().sum()), replay.weights[name].numel() / parameter.numel()])
    squares, copies = (
        torch.tensor(collectives.gather_objects(rows), dtype=torch.float64).sum(dim=0).unbind(1)
    )
    return (squares / copies.clamp(min=1e-300)).sqrt()  # what several ranks hold counts once


def _fit_weights(samples: list[Tensor], run: Tensor) -> tuple[Tensor, float]:
    """What micro-batches weigh in the run's gradients: factors [k] of their right weights, and the largest error.

    ``samples`` [k] are entries of what each micro-batch adds to the gradients of one batch, ``run`` the same
    entries of the run's. The error is zero where no weights explain what is off.
    """
    parts = torch.stack(samples, dim=1)
    solution = torch.linalg.lstsq(parts, run[:, None]).solution[:, 0]
    factors = torch.where(parts.any(dim=0), solution, 1.0)
    size = run.norm().clamp_min(1e-300)
    left = (parts @ factors - run).norm() / size
    unweighted = (parts.sum(dim=1) - run).norm() / size
    error = (factors - 1).abs().max()
    explains = left < _UNEXPLAINED and left < _IMPROVEMENT * unweighted and error > _ROUNDING_FACTOR * left
    return factors, float(error) if explains else 0.0


def _slope(replay: Replay) -> float:
    """The slope of the loss along the run's gradients, relative to what they promise: 1, unless they lack a part.

    Parameters without a gradient, or with zeros, move at random: they promise that the loss does not change.
    """
    norms = _norms(replay, replay.gradients, {})
    promised = float(norms.square().sum())
    size = _CHANGE * abs(replay.loss_at(replay.weights)) / promised
    along = dict(replay.gradients)
    for (name, parameter), norm in zip(replay.recorder.parameters.items(), norms, strict=True):
        if norm == 0 and parameter.requires_grad:
            generator = torch.Generator().manual_seed(0)  # the same on all ranks
            along[name] = _MOVE / size * torch.randn(replay.weights[name].shape, generator=generator)
    ahead, behind = (
        replay.loss_at({name: weight + step * along.get(name, 0) for name, weight in replay.weights.items()})
        for step in (size, -size)
    )
    return (ahead - behind) / (2 * size * promised)
