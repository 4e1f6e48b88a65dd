"""The results of an exactness check in words: a verdict and its report."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_automodel.callbacks.exactness.recording import Recorder, copies_of
from lightning_automodel.data.samplers import Ranks, distributed_sampler, repeats
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_size

EXACT = "exact"
WRONG = "wrong"
NOT_CHECKED = "not checked"
_COPIES = 5
"""Copies of the parameters on a host: weights, and gradients of the run, of two replays and of a micro-batch."""
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
        repeats_batches: Whether all ranks had the same batches, and should have had different ones.
        slope: The change of the loss along the gradients, relative to what they promise, by forwards alone;
            None if it was not measured.
        is_wrong: Whether the gradients are off by more than rounding.
        problem: Why the gradients could not be judged.
    """

    counts: list[float]
    gradient_error: float = math.nan
    rounding: float = math.nan
    parameters: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    unequal: str = ""
    repeats_batches: bool = False
    slope: float | None = None
    is_wrong: bool = False
    problem: str = ""

    @property
    def keeps_promise(self) -> bool:
        """Whether the loss changes as the gradients promise."""
        return self.slope is not None and abs(self.slope - 1) < _SLOPE_OFF


def plural(noun: str, number: int = 2) -> str:
    """The plural of a countable noun, unless there is one of it."""
    if number == 1:
        return noun
    return noun + ("es" if noun.endswith("ch") else "s")


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


def explain(step: StepResult, factors: Tensor | None, recorder: Recorder) -> str:
    """Say what micro-batches weigh in the gradients, or which parameters are off.

    ``factors`` [k] are those of their right weights, None where these are no reason.
    """
    counts = torch.tensor(step.counts, dtype=torch.float64)
    right = counts / counts.sum().clamp_min(1e-300)
    share = f"their share of the {plural(recorder.counting.unit)}"
    if factors is not None:
        if recorder.run is None:
            remedy = "AutomodelStrategy weighs them so."
        else:
            remedy = "Look for a loss that the step divides or gathers."
        return (
            f"Micro-batches weigh {_range_of(factors * right)} in the gradients, where {_range_of(right)} is right,"
            f" {share}. {remedy}"
        )
    if not step.is_wrong:
        return f"Micro-batches weigh {_range_of(right)} in the gradients, {share}."
    named = [f"{name} ({percent(error)})" for name, error in step.parameters.items()]
    return f"Parameters that are off: {list_first(named, 4)}."


def conclude(
    steps: Sequence[StepResult], recorder: Recorder, seconds: float, reason: str
) -> tuple[str, str]:
    """The verdict, EXACT only if every step was checked, and the report. A collective over the world.

    ``reason`` is that against a training of which no step was compared.
    """
    if not steps:
        return NOT_CHECKED, f"ExactnessCheck: NOT CHECKED. {reason or 'There was no optimizer step'}."
    wrong_count = next(filter(None, collectives.gather_objects(recorder.counting.wrong())), "")
    verdict = EXACT
    if any(step.problem for step in steps):
        verdict = NOT_CHECKED
    if wrong_count or any(step.is_wrong or step.unequal for step in steps):
        verdict = WRONG
    return verdict, "\n  ".join(_lines(steps, recorder, seconds, verdict, wrong_count))


def _lines(
    steps: Sequence[StepResult], recorder: Recorder, seconds: float, verdict: str, wrong_count: str
) -> Iterator[str]:
    """The lines of the report: the verdict, and what it comes from."""
    counting = recorder.counting
    is_counted = counting.unit != "micro-batch"
    problems = [step.problem for step in steps if step.problem]
    checked = [step for step in steps if not step.problem]
    wrong = [step for step in checked if step.is_wrong]
    rests_on = _resting_on(steps[0], recorder) if verdict == EXACT else ""
    yield (
        f"ExactnessCheck: {verdict.upper()}{rests_on} in {len(steps)} {plural('window', len(steps))} on"
        f" {group_size()} {plural('rank', group_size())}."
    )
    if wrong_count:
        yield f"The count is wrong: {wrong_count}"
    if problems:
        yield f"Gradients of {len(problems)} of {len(steps)} windows cannot be judged: {problems[0]}."
    if checked:
        errors = ", ".join(percent(step.gradient_error) for step in checked)
        rounding = percent(max(step.rounding for step in checked))
        batch = "one batch that is weighted by this count" if wrong_count else "one batch"
        yield f"Gradients are {errors} off those of {batch} (rounding alone: {rounding})."
        which = "first wrong window" if wrong else "first window"
        found = (wrong or checked)[0].explanation
        if is_counted and not wrong and len({count for step in checked for count in step.counts}) == 1:
            found += " Unequal counts, as in a short last window, were not seen."
        yield f"In the {which}: {found}"
    unequal = next((step.unequal for step in steps if step.unequal), "")
    if unequal:
        yield f"Ranks hold different weights: {unequal}."
    if is_counted and checked and not wrong_count:
        doubt = counting.doubt()
        found = f"taken on trust, as {doubt}" if doubt else "agrees with the loss, which divides by it"
        yield f"Count ({plural(counting.unit)}): {found}."
    if steps[0].keeps_promise:
        yield (
            f"Along the gradients the loss changes by {steps[0].slope:.4g} of what they promise (1 is right), by"
            " forwards alone."
        )
    for sampler in map(distributed_sampler, CombinedLoader(recorder.trainer.train_dataloader).flattened):
        if sampler is not None and not isinstance(sampler.num_replicas, Ranks):
            yield f"{repeats(sampler)}: one process takes each once, which these steps do not show."
    if steps[-1].repeats_batches:
        yield (
            "All ranks had the same batches, so that each sample counts once for each rank. Share the data out: by the"
            " Trainer's sampler, or for a stream by split_dataset_by_node and the like."
        )
    mib = sum(part.nbytes for part in copies_of(recorder.parameters).values()) / 2**20
    yield (
        f"Compared in {seconds:.1f} s. Rank 0 held {mib:.3g} MiB more for gradients, and in host memory"
        f" {_COPIES * mib:.3g} MiB and its micro-batches."
    )


def _short_window(recorder: Recorder) -> str:
    """Says of a short last window that Lightning divides its losses by the length of a full one; "" without any."""
    num_batches = recorder.trainer.num_training_batches
    full = recorder.trainer.accumulate_grad_batches
    if recorder.run is not None or not isinstance(num_batches, int) or num_batches % full == 0:
        return ""
    return (
        f" but for the last window of each epoch, which has {num_batches % full} of {full} micro-batches, so that its"
        " gradients are too small"
    )


def _resting_on(first: StepResult, recorder: Recorder) -> str:
    """What an exact training rests on that was not compared."""
    text = _short_window(recorder)
    if not recorder.is_automatic:
        text = " for each manual_backward by itself"
    if recorder.counting.doubt():
        text += f" if each {recorder.counting.unit} counts the same"
    if first.keeps_promise or not recorder.is_sharded:
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
