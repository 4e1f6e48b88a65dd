"""Judges the gradients of each step, and says in words what was found."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.callbacks.exactness.counting import Counting, plural
from lightning_automodel.data.samplers import Ranks, repeats
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_size

EXACT = "exact"
WRONG = "wrong"
NOT_CHECKED = "not checked"
_COPIES = 5  # on the host: weights, and gradients of the run, of two replays and of a micro-batch
_FACTOR = 4  # times the rounding that another order and scale show
_HALF = 1e-4
_DOUBTFUL = 2.5  # roundings in half precision
_LEAST = 16  # roundings that are no error
_MOST_ROUNDING = 0.01  # with which gradients in single precision still mean something
_SLOPE_OFF = 0.02  # by the curvature of the loss, and its rounding

Norms = Mapping[str, float]


@dataclass
class StepResult:
    """The result of one optimizer step, the same on all ranks. Errors are relative 2-norms: 0.01 is one percent.

    Attributes:
        counts: The count of each micro-batch.
        gradient_error: Distance of the gradients from those of one batch.
        rounding: The same for gradients that differ by rounding alone.
        parameters: Errors of single parameters that are larger than rounding.
        explanation: The weights of micro-batches in the gradients, in words, if they explain the difference.
        unequal: Weights that are not the same on all ranks.
        slope: The change of the loss along the gradients, relative to what they promise, by forwards alone;
            None if it was not measured.
        is_manual: Whether it is one of several windows of a step of manual optimization.
        is_sharded: Whether the replay is not independent of the strategy, since it computes with shards.
        is_half: Whether it is in half precision, where rounding may be as large as a small error.
        is_wrong: Whether the gradients are off by more than rounding.
        problem: Why the gradients could not be judged.
    """

    counts: list[float]
    gradient_error: float = math.nan
    rounding: float = math.nan
    parameters: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    unequal: list[str] = field(default_factory=list)
    slope: float | None = None
    is_manual: bool = False
    is_sharded: bool = False
    is_half: bool = False
    is_wrong: bool = False
    problem: str | None = None

    @property
    def keeps_promise(self) -> bool:
        """Whether the loss changes as the gradients promise."""
        return self.slope is not None and abs(self.slope - 1) < _SLOPE_OFF

    def judge(self, off: Norms, rounding: Norms, size: Norms, numel: Norms, eps: float) -> None:
        """Fill in errors from norms by parameter. ``eps`` is the rounding unit of what is trained in."""
        self.is_half = eps > _HALF
        total = math.hypot(*size.values())
        self.gradient_error = _relative(math.hypot(*off.values()), total)
        self.rounding = math.hypot(*rounding.values()) / max(total, 1e-300)
        least = eps if self.is_half else _LEAST * eps
        limit = _FACTOR * self.rounding + least
        num_trained = max(sum(numel[name] for name, norm in size.items() if norm), 1)
        for name in sorted(off, key=off.__getitem__, reverse=True):
            # Its rounding, and its share of all rounding: it may be zero but for rounding.
            share = math.sqrt(numel[name] / num_trained)
            if off[name] > _FACTOR * rounding[name] + least * size[name] + limit * total * share:
                self.parameters[name] = _relative(off[name], size[name])
        self.is_wrong = self.gradient_error > limit or bool(self.parameters)
        if not math.isfinite(self.gradient_error + self.rounding):
            self.problem = "gradients are not finite"
        elif self.rounding > _MOST_ROUNDING and not (self.is_half or self.is_wrong):
            self.problem = (
                f"another order and scale change them by {percent(self.rounding)}: by rounding, which"
                " precision='64-true' tells, or by a hook of the backward that is not linear"
            )

    def explain(self, samples: Sequence[Tensor], run: Tensor, unit: str) -> None:
        """Look for weights of micro-batches that explain the gradients.

        ``samples`` [k] are entries of what each micro-batch adds to those of one batch, ``run`` [k] the same
        entries of the run's.
        """
        if self.problem:
            return
        counts = torch.tensor(self.counts, dtype=torch.float64)
        parts = torch.stack(list(samples), dim=1)
        used = parts.any(dim=0).nonzero()[:, 0]
        parts = parts[:, used]
        factors = torch.linalg.lstsq(parts, run[:, None]).solution[:, 0]
        size = run.norm().clamp_min(1e-300)
        left = float((parts @ factors - run).norm() / size)
        direct = float((parts.sum(dim=1) - run).norm() / size)
        error = float((factors - 1).abs().max()) if len(used) else 0.0
        if left < 0.05 and left < 0.3 * direct and error > max(4 * left, 0 if self.is_wrong else 0.02):
            self.is_wrong = True  # by a weight that rounding does not explain, in half precision
            right = counts[used] / counts.sum()
            self.explanation = (
                f"Micro-batches weigh {_range_of(factors * right)} in them, where {_range_of(right)} is right,"
                f" as they hold that of the {plural(unit)}."
            )
        if self.is_half and not self.is_wrong and self.gradient_error > _DOUBTFUL * self.rounding:
            self.problem = (
                f"they are {percent(self.gradient_error)} off, which may be rounding (here"
                f" {percent(self.rounding)}) or not: check with precision='32-true'"
            )


def _relative(off: float, size: float) -> float:
    """``off`` relative to ``size``; infinite if only ``size`` is zero."""
    if size:
        return off / size
    return math.inf if off else 0.0


def verdict_of(steps: Sequence[StepResult], wrong_count: str) -> str:
    """EXACT only if every step was checked."""
    if wrong_count or any(step.unequal or (step.is_wrong and not step.problem) for step in steps):
        return WRONG
    if not steps or any(step.problem for step in steps):
        return NOT_CHECKED
    return EXACT


def report_of(steps: Sequence[StepResult], found: str, wrong_count: str, counting: Counting) -> list[str]:
    """The verdict in a sentence, and a line for each result. ``wrong_count`` is what is wrong with the count."""
    unit = counting.unit
    if not steps:
        return [f"ExactnessCheck: {found.upper()}. There was no optimizer step."]
    lines = [
        f"ExactnessCheck: {found.upper()}{_resting_on(steps[0], counting) if found == EXACT else ''} in"
        f" {_number_of(len(steps), 'window')} on {_number_of(group_size(), 'rank')}."
    ]
    if wrong_count:
        lines.append(f"The count is wrong: {wrong_count}")
    problems = [step.problem for step in steps if step.problem]
    checked = [step for step in steps if not step.problem]
    wrong = [step for step in checked if step.is_wrong]
    if problems:
        lines.append(f"{len(problems)} of {len(steps)} steps say nothing of the gradients: {problems[0]}.")
    if checked:
        errors = ", ".join(percent(step.gradient_error) for step in checked)
        rounding = percent(max(step.rounding for step in checked))
        batch = "one batch that is weighted by this count" if wrong_count else "one batch"
        lines.append(f"Gradients are {errors} off those of {batch} (rounding alone: {rounding}).")
    if wrong:
        named = list_first([f"{name} ({percent(error)})" for name, error in wrong[0].parameters.items()], 4)
        lines.append(wrong[0].explanation or f"Parameters that are off: {named}.")
    elif checked:
        lines.append(_of_counts(checked, unit))
    unequal = sorted({name for step in steps for name in step.unequal})
    if unequal:
        lines.append(f"Ranks hold different weights: {list_first(unequal, 4)}.")
    if checked and not wrong_count and unit != "micro-batch":
        lines.append(counting.sentence())
    if steps[0].keeps_promise:
        lines.append(
            f"Along them the loss changes by {steps[0].slope:.4g} of what they promise, by forwards alone."
        )
    return lines


def _resting_on(first: StepResult, counting: Counting) -> str:
    """What an exact training rests on that was not compared."""
    text = ""
    if first.is_manual:
        text = " for each manual_backward by itself"
    if counting.doubt():
        text += f" if each {counting.unit} counts the same"
    if first.keeps_promise or not first.is_sharded:
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


def _of_counts(steps: Sequence[StepResult], unit: str) -> str:
    """What micro-batches weigh in gradients that are exact."""
    counts = torch.tensor(steps[0].counts, dtype=torch.float64)
    weights = _range_of(counts / counts.sum().clamp_min(1e-300))
    everywhere = {count for step in steps for count in step.counts}
    text = f"Micro-batches weigh {weights} in them, as they hold that of the {plural(unit)}."
    if len(everywhere) == 1 and unit != "micro-batch":
        text += " Unequal counts, as in a short last window, were not seen."
    return text


def of_samples(samplers: Iterable[Any]) -> list[str]:
    """What to say of samplers that repeat samples of the training data; None stands for others."""
    return [
        f"{repeats(sampler)}: one process takes each once, which these steps do not show."
        for sampler in samplers
        if sampler is not None and not isinstance(sampler.num_replicas, Ranks)
    ]


def of_cost(seconds: float, size: int) -> str:
    """What the check has cost. ``size`` is that of this rank's part of the parameters in bytes."""
    mib = size / 2**20
    return (
        f"Compared in {seconds:.1f} s. Rank 0 held {mib:.3g} MiB more for gradients, and in host memory"
        f" {_COPIES * mib:.3g} MiB and its micro-batches."
    )


# --- Numbers in words -----------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.3g} %"


def _range_of(values: Tensor) -> str:
    """The smallest and the largest of some shares."""
    low = percent(float(values.min()))
    high = percent(float(values.max()))
    if low == high:
        return low
    return f"{low} to {high}"


def _number_of(number: int, noun: str) -> str:
    """A number with its noun, such as "2 ranks"."""
    return f"{number} {noun if number == 1 else plural(noun)}"
