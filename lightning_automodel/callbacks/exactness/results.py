"""Results of the check for each step, and the report in words."""

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

EXACT = "exact"
WRONG = "wrong"
NOT_CHECKED = "not checked"
_NAMED = 4  # parameters, at most


@dataclass
class StepResult:
    """The result of one optimizer step. Errors are relative 2-norms: 0.01 is one percent.

    Attributes:
        gradient_error: Distance of the gradients from those of one batch.
        rounding: The same for gradients that differ by rounding alone.
        parameters: Errors of single parameters that are larger than rounding.
        explanation: The weights of micro-batches in the gradients, in words, if they explain the difference.
        written: Weights that the steps have written differently from one process, with their errors.
        unequal: Weights that are not the same on all ranks.
        optimizer_error: Distance of the step from that of the same optimizer on whole tensors; None if not
            checked.
        optimizer_parameters: Errors of single parameters' steps that are larger than rounding.
        clipping_error: Distance of the clipped gradients from those of one process; None if not checked.
        clips_wrongly: Whether the clipping error is larger than rounding.
        is_wrong: Whether the gradients are off by more than rounding.
        problem: Why the gradients could not be judged.
        note: Why the optimizer's step could not be judged.
        counts: The count of each micro-batch.
    """

    gradient_error: float = math.nan
    rounding: float = math.nan
    parameters: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    written: dict[str, float] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)
    optimizer_error: float | None = None
    optimizer_parameters: dict[str, float] = field(default_factory=dict)
    clipping_error: float | None = None
    clips_wrongly: bool = False
    is_wrong: bool = False
    problem: str | None = None
    note: str = ""
    counts: list[float] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        """The known errors, for loggers."""
        values = {
            "exactness/gradient_error": self.gradient_error,
            "exactness/rounding": self.rounding,
            "exactness/optimizer_error": self.optimizer_error,
        }
        return {name: value for name, value in values.items() if value is not None and not math.isnan(value)}


@dataclass
class CountResult:
    """Whether the loss of a batch is the mean of its parts' losses, weighted by their counts.

    Attributes:
        verdict: EXACT, WRONG or NOT_CHECKED.
        text: The reason for the verdict.
        remedy: The option that makes the count right, if there is one.
        is_decisive: Whether the steps cannot be exact without a checked count.
    """

    verdict: str
    text: str
    remedy: str = ""
    is_decisive: bool = False


def verdict_of(steps: list[StepResult], count: CountResult | None) -> str:
    """The verdict on all ``steps``: EXACT only if everything that decides it was checked."""
    if (count is not None and count.verdict == WRONG) or any(_is_wrong(step) for step in steps):
        return WRONG
    if not steps or any(step.problem for step in steps) or (count is not None and count.is_decisive):
        return NOT_CHECKED
    return EXACT


def report_of(steps: list[StepResult], count: CountResult | None, unit: str, is_ours: bool) -> list[str]:
    """One line per result. ``unit`` names the counted units; ``is_ours``: ``AutomodelStrategy`` is in use."""
    lines: list[str] = []
    if count is not None and count.verdict == WRONG:
        lines.append(f"The count is wrong: {count.text}.{count.remedy and f' Right is {count.remedy}.'}")
    problems = [step.problem for step in steps if step.problem]
    checked = [step for step in steps if not step.problem]
    if problems:
        lines.append(f"{len(problems)} of {len(steps)} steps say nothing of the gradients: {problems[0]}.")
    if checked:
        gradients, *others = _of_gradients(checked)
        subject = "Gradients"
        if count is not None and (count.verdict == WRONG or count.is_decisive):
            subject = "By this count, gradients"
        lines += [f"{subject} {gradients}", *others]
    lines += _of_weights(steps)
    lines += _of_optimizer(steps)
    if count is not None and count.verdict != WRONG:
        lines.append(f"Count ({plural(unit)}): {count.text}.")
    counts = {number for step in checked for number in step.counts}
    if len(counts) == 1 and unit != "micro-batch" and not is_ours and not any(map(_is_wrong, steps)):
        lines.append(
            f"Every micro-batch held {number_of(counts.pop(), unit)}: micro-batches of unequal counts, as in"
            " a short last window, were not seen."
        )
    return lines


def percent(value: float) -> str:
    """A share in percent, with two digits."""
    if not math.isfinite(value):
        return "infinitely much"
    value *= 100
    if not value:
        return "0 %"
    if abs(value) >= 10:
        return f"{value:.0f} %"
    if abs(value) >= 1e-7:
        return f"{float(f'{value:.2g}'):.9f}".rstrip("0").rstrip(".") + " %"
    return f"{value:.1e} %"


def range_of(values: Tensor) -> str:
    """The smallest and the largest of some shares."""
    low = percent(float(values.min()))
    high = percent(float(values.max()))
    if low == high:
        return low
    return f"{low} to {high}"


def relative(off: float, size: float) -> float:
    """``off`` relative to ``size``; infinite if only ``size`` is zero."""
    if size:
        return off / size
    if off:
        return math.inf
    return 0.0


def described(error: Exception) -> str:
    """An exception in one line, without a full stop."""
    message = textwrap.shorten(str(error), 300, placeholder=" [...]")
    return f"{type(error).__name__}: {message.rstrip('.')}"


def plural(noun: str) -> str:
    """The plural of a countable noun."""
    return noun + ("es" if noun.endswith("ch") else "s")


def number_of(number: float, noun: str) -> str:
    """A number with its noun, such as "2 ranks"."""
    if number != 1:
        noun = plural(noun)
    return f"{number:g} {noun}"


def _is_wrong(step: StepResult) -> bool:
    gradients = step.is_wrong and not step.problem
    return gradients or step.clips_wrongly or bool(step.written or step.unequal or step.optimizer_parameters)


def _of_gradients(steps: list[StepResult]) -> list[str]:
    rounding = percent(max(step.rounding for step in steps))
    wrong = [step for step in steps if step.is_wrong]
    if not wrong:
        off = percent(max(step.gradient_error for step in steps))
        return [f"are {off} off those of one batch, which is rounding ({rounding})."]
    errors = ", ".join(percent(step.gradient_error) for step in steps)
    lines = [f"are {errors} off those of one batch (rounding alone: {rounding})."]
    explanations = [step.explanation for step in wrong if step.explanation]
    if explanations:
        return lines + explanations[:1]
    parameters = {name: error for step in reversed(wrong) for name, error in step.parameters.items()}
    if parameters:
        lines.append(f"Parameters that are off: {_named(parameters)}.")
    return lines


def _of_weights(steps: list[StepResult]) -> list[str]:
    lines = []
    written = {name: error for step in steps for name, error in step.written.items()}
    if written:
        lines.append(
            f"Weights written in training_step are not those that one process writes: {_named(written)}."
        )
    unequal = sorted({name for step in steps for name in step.unequal})
    if unequal:
        lines.append(f"Ranks hold different weights: {_listed(unequal)}.")
    return lines


def _of_optimizer(steps: list[StepResult]) -> list[str]:
    lines = []
    checked = [step.optimizer_error for step in steps if step.optimizer_error is not None]
    wrong = {name: error for step in steps for name, error in step.optimizer_parameters.items()}
    if wrong:
        lines.append(
            f"The optimizer's step is {percent(max(checked))} off that on whole tensors, with the same"
            f" gradients: {_named(wrong)}."
        )
    elif checked:
        lines.append(f"The optimizer's steps are {percent(max(checked))} off those on whole tensors.")
    clipping = [step.clipping_error or 0.0 for step in steps if step.clips_wrongly]
    if clipping:
        lines.append(
            "What on_before_optimizer_step and clipping make of gradients is"
            f" {percent(max(clipping))} off what they make of whole ones."
        )
    notes = {step.note for step in steps if step.note}
    return lines + [f"The optimizer's step was not checked: {note}." for note in sorted(notes)]


def _named(errors: dict[str, float]) -> str:
    return _listed([f"{name} ({percent(error)})" for name, error in errors.items()])


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    listed = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        listed += f" and {len(names) - _NAMED} more"
    return listed
