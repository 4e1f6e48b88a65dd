"""Compares the gradients of windows with those of one batch, and says in words what was found."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_automodel.callbacks.exactness.counting import percent, plural, range_of
from lightning_automodel.callbacks.exactness.lockstep import LockStep, ReplayError, agree
from lightning_automodel.callbacks.exactness.recording import Parts
from lightning_automodel.data.samplers import Ranks, distributed_sampler, repeats
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_size
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals

EXACT = "exact"
WRONG = "wrong"
NOT_CHECKED = "not checked"
_REMEDY = "AutomodelStrategy weighs them so."
_REMEDY_OF_A_LOSS = "Look for a loss that the step divides or gathers."
_COPIES = 5
"""Copies of the parameters on a host: weights, and gradients of the run, of two replays and of a micro-batch."""
_ROUNDING_FACTOR = 4
"""An error is more than so many times the rounding that another order and scale of the replay show."""
_HALF_EPSILON = 1e-4
"""A dtype with a larger epsilon is in half precision."""
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
"""Of the error without these weights, so much may be left with them."""
_WEIGHT_OFF = 0.02
"""A weight of a micro-batch that is off by more is an error, also where rounding hides it from the norms."""
_SLOPE_OFF = 0.02
"""The curvature of the loss, and its rounding, may move a slope by so much."""


@dataclass
class StepResult:
    """The result of one optimizer step, the same on all ranks. Errors are relative 2-norms: 0.01 is one percent.

    Attributes:
        counts: The count of each micro-batch.
        gradient_error: Distance of the gradients from those of one batch.
        rounding: The same for gradients that differ by rounding alone.
        parameters: Errors of single parameters that are larger than rounding.
        explanation: The weights of micro-batches in the gradients, or the parameters that are off, in words.
        unequal: Of weights that are not the same on all ranks the first, in words.
        slope: The change of the loss along the gradients, relative to what they promise, by forwards alone;
            None if it was not measured.
        is_half: Whether it is in half precision, where rounding may be as large as a small error.
        is_wrong: Whether the gradients are off by more than rounding.
        problem: Why the gradients could not be judged.
    """

    counts: list[float]
    gradient_error: float = math.nan
    rounding: float = math.nan
    parameters: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    unequal: str = ""
    slope: float | None = None
    is_half: bool = False
    is_wrong: bool = False
    problem: str = ""

    @property
    def keeps_promise(self) -> bool:
        """Whether the loss changes as the gradients promise."""
        return self.slope is not None and abs(self.slope - 1) < _SLOPE_OFF


def training_problem(lockstep: LockStep) -> str:
    """Why this training cannot be replayed; empty if there is no known reason."""
    strategy = type(lockstep.trainer.strategy).__name__
    if isinstance(lockstep.trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)) or "XLA" in strategy:
        return f"{strategy} keeps parameters in a form of its own"
    if not (lockstep.is_automatic or lockstep.run):
        return f"under manual optimization {strategy} does not tell which backwards belong together"
    if lightning_internals.draws_its_batches(lockstep.module.training_step):
        return "training_step(dataloader_iter) draws its batches itself"
    return ""


def compare(lockstep: LockStep, asks_forwards: bool) -> StepResult:
    """Compare the window with one batch, by forwards alone too if ``asks_forwards``. A collective over the world."""
    step = StepResult(counts=[turn.whole_count for turn in lockstep.turns], unequal=lockstep.unequal())
    run = lockstep.window.gradients or {}
    with lockstep.apart():
        try:
            agree(_window_problem(lockstep))
            _replay_and_judge(step, lockstep, run)
            if asks_forwards and lockstep.is_sharded and lockstep.is_automatic and not step.is_half:
                with suppress(ReplayError, ArithmeticError):  # a step may differentiate by itself
                    step.slope = lockstep.slope_along(run)
        except ReplayError as error:
            step.problem = str(error)
    return step


def _window_problem(lockstep: LockStep) -> str:
    """Why this rank's part of a window cannot be replayed; empty if there is no known reason."""
    window = lockstep.window
    if window.gradients is None:
        return "no backward of the loss that training_step has returned was seen"
    for name in window.gradients:
        if name in lockstep.plain and torch_internals.has_hooks(lockstep.plain[name]):
            return (
                f"{name} has a hook (register_hook), which sees something else in each"
                " micro-batch than in one batch: use on_before_optimizer_step, or remove it for the check"
            )
    weights = lockstep.step_weights
    found = [weights[each.step][0] for each in window.micro_batches if weights]
    if any(not torch.equal(each[name], found[0][name]) for each in found for name in window.gradients):
        return "weights are written within a window that trains them"
    if lockstep.is_counted:
        return ""
    return (
        "no count was given, nothing in the batch can be counted, and the graph of the loss does not tell: pass"
        " ExactnessCheck(count_label_tokens=<function of the batch>), or per_token_loss=False if every micro-batch"
        " shall weigh the same"
    )


def _replay_and_judge(step: StepResult, lockstep: LockStep, run: Parts) -> None:
    """Replay the window, and note in ``step`` what that shows of the gradients. ReplayError if it cannot be judged."""
    exact, samples = lockstep.one_batch(lockstep.turns)
    if "16" in str(lockstep.trainer.precision_plugin.precision):
        eps = torch.finfo(torch.bfloat16).eps
    else:
        eps = max((torch.finfo(gradient.dtype).eps for gradient in exact.values()), default=0.0)
    step.is_half = eps > _HALF_EPSILON
    agree(_unrepeatable(step, lockstep))
    again, _ = lockstep.one_batch(lockstep.turns[::-1], scale=0.75)  # which rounds differently
    _measure(step, lockstep, run, exact, again, eps)
    if step.rounding > _MOST_ROUNDING and not (step.is_half or step.is_wrong):
        raise ReplayError(
            f"another order and scale change them by {percent(step.rounding)}: by rounding, which"
            " precision='64-true' tells, or by a hook of the backward that is not linear"
        )
    factors, error = _fit_weights(samples, lockstep.sample(run))
    is_weighed_wrongly = error > (0 if step.is_wrong else _WEIGHT_OFF)
    step.is_wrong = (
        step.is_wrong or is_weighed_wrongly
    )  # in half precision, rounding does not explain a weight
    step.explanation = _explain(step, lockstep, factors if is_weighed_wrongly else None)
    if step.is_half and not step.is_wrong and step.gradient_error > _DOUBTFUL_FACTOR * step.rounding:
        raise ReplayError(
            f"they are {percent(step.gradient_error)} off, which may be rounding (here"
            f" {percent(step.rounding)}) or not: check with precision='32-true'"
        )


def _measure(
    step: StepResult, lockstep: LockStep, run: Parts, exact: Parts, again: Parts, eps: float
) -> None:
    """How far the ``run`` is off the ``exact`` gradients, and whether that is more than what rounds them ``again``."""
    off = lockstep.norms(run, exact)
    rounding = lockstep.norms(again, exact)
    size = lockstep.norms(exact, {})
    total = size.norm().clamp(min=1e-300)
    step.gradient_error = float(off.norm() / total)
    step.rounding = float(rounding.norm() / total)
    if not step.gradient_error + step.rounding < _INFINITE:
        raise ReplayError("gradients are not finite, or are zero in the replay alone")
    least = eps if step.is_half else _LEAST_EPSILONS * eps
    limit = _ROUNDING_FACTOR * step.rounding + least
    # Its rounding, and its share of all rounding: it may be zero but for rounding.
    share = (lockstep.numel / lockstep.numel[size > 0].sum().clamp(min=1)).sqrt()
    is_off = off > _ROUNDING_FACTOR * rounding + least * size + limit * total * share
    rows = zip(off.tolist(), (off / size).tolist(), is_off, lockstep.parameters, strict=True)
    step.parameters = {name: error for _, error, found, name in sorted(rows, reverse=True) if found}
    step.is_wrong = step.gradient_error > limit or bool(step.parameters)


def _unrepeatable(step: StepResult, lockstep: LockStep) -> str:
    """Why a replay says nothing of the run, as far as this rank can tell; empty if there is no known reason."""
    if lockstep.write(lockstep.weights) and lockstep.is_automatic:
        return "training_step writes weights, which a micro-batch would find as another wrote them"
    tolerance = 1e-2 if step.is_half else 1e-5
    for turn in lockstep.turns:
        if abs(turn.loss - turn.replayed_loss) > tolerance * abs(turn.loss):
            return (
                f"losses differ in the replay, such as {turn.loss:.6g} in the run and {turn.replayed_loss:.6g} in"
                " the replay: training_step is not repeatable, depends on the rank or on other ranks, or keeps a"
                " state that is no attribute of a module"
            )
    return ""


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


def _explain(step: StepResult, lockstep: LockStep, factors: Tensor | None) -> str:
    """Say what micro-batches weigh in the gradients, or which parameters are off.

    ``factors`` [k] are those of their right weights, None where these are no reason. ReplayError if the
    gradients may be meant so.
    """
    counts = torch.tensor(step.counts, dtype=torch.float64)
    right = counts / counts.sum().clamp_min(1e-300)
    share = f"their share of the {plural(lockstep.counting.unit)}"
    if factors is not None:
        return (
            f"Micro-batches weigh {range_of(factors * right)} in the gradients, where {range_of(right)} is right,"
            f" {share}. {_REMEDY if lockstep.run is None else _REMEDY_OF_A_LOSS}"
        )
    if not step.is_wrong:
        return f"Micro-batches weigh {range_of(right)} in the gradients, {share}."
    if is_overridden("backward", lockstep.module):
        raise ReplayError(
            f"they are {percent(step.gradient_error)} off, as LightningModule.backward may mean it"
        )
    named = [f"{name} ({percent(error)})" for name, error in step.parameters.items()]
    return f"Parameters that are off: {list_first(named, 4)}."


# --- In words ----------------------------------------------------------------------------------------------------


def conclude(
    steps: Sequence[StepResult], lockstep: LockStep, seconds: float, reason: str
) -> tuple[str, list[str]]:
    """The verdict, EXACT only if every step was checked, and the lines of the report. A collective over the world.

    ``reason`` is that against a training of which no step was compared.
    """
    if not steps:
        return NOT_CHECKED, [f"ExactnessCheck: NOT CHECKED. {reason or 'There was no optimizer step'}."]
    counting = lockstep.counting
    wrong_count = next(filter(None, collectives.gather_objects(counting.wrong())), "")
    problems = [step.problem for step in steps if step.problem]
    checked = [step for step in steps if not step.problem]
    wrong = [step for step in checked if step.is_wrong]
    unequal = next((step.unequal for step in steps if step.unequal), "")
    if wrong_count or wrong or unequal:
        verdict = WRONG
    elif problems:
        verdict = NOT_CHECKED
    else:
        verdict = EXACT

    rests_on = _resting_on(steps[0], lockstep) if verdict == EXACT else ""
    lines = [
        f"ExactnessCheck: {verdict.upper()}{rests_on} in {len(steps)} {plural('window', len(steps))} on"
        f" {group_size()} {plural('rank', group_size())}."
    ]
    if wrong_count:
        lines.append(f"The count is wrong: {wrong_count}")
    if problems:
        lines.append(
            f"Gradients of {len(problems)} of {len(steps)} windows cannot be judged: {problems[0]}."
        )
    if checked:
        errors = ", ".join(percent(step.gradient_error) for step in checked)
        rounding = percent(max(step.rounding for step in checked))
        batch = "one batch that is weighted by this count" if wrong_count else "one batch"
        lines.append(f"Gradients are {errors} off those of {batch} (rounding alone: {rounding}).")
        which = "In the first wrong window" if wrong else "In the first window"
        lines.append(f"{which}: {(wrong or checked)[0].explanation}")
    if (
        not wrong
        and counting.unit != "micro-batch"
        and len({n for step in checked for n in step.counts}) == 1
    ):
        lines[-1] += " Unequal counts, as in a short last window, were not seen."
    if unequal:
        lines.append(f"Ranks hold different weights: {unequal}.")
    if checked and not wrong_count and counting.unit != "micro-batch":
        lines.append(counting.sentence())
    if steps[0].keeps_promise:
        lines.append(
            f"Along the gradients the loss changes by {steps[0].slope:.4g} of what they promise (1 is right), by"
            " forwards alone."
        )
    for sampler in map(distributed_sampler, CombinedLoader(lockstep.trainer.train_dataloader).flattened):
        if sampler is not None and not isinstance(sampler.num_replicas, Ranks):
            lines.append(f"{repeats(sampler)}: one process takes each once, which these steps do not show.")
    if lockstep.repeats_batches:
        lines.append(
            "All ranks had the same batches, so that each sample counts once for each rank. Share the data out: by the"
            " Trainer's sampler, or for a stream by split_dataset_by_node and the like."
        )
    mib = sum(part.nbytes for part in lockstep.weights.values()) / 2**20
    lines.append(
        f"Compared in {seconds:.1f} s. Rank 0 held {mib:.3g} MiB more for gradients, and in host memory"
        f" {_COPIES * mib:.3g} MiB and its micro-batches."
    )
    return verdict, lines


def _resting_on(first: StepResult, lockstep: LockStep) -> str:
    """What an exact training rests on that was not compared."""
    text = ""
    if not lockstep.is_automatic:
        text = " for each manual_backward by itself"
    if lockstep.counting.doubt():
        text += f" if each {lockstep.counting.unit} counts the same"
    if first.keeps_promise or not lockstep.is_sharded:
        return text
    text += " as far as a replay on shards can tell"
    if first.slope is None:
        return (
            f"{text} (forwards alone tell no more in half precision, in manual optimization, or in a step that"
            " differentiates)"
        )
    return (
        f"{text} (along the gradients the loss changes by {first.slope:.4g} of what they promise: is a part"
        " detached on purpose? Else check with data_parallel='ddp')"
    )
