"""Checks whether a run's gradients are those of one batch, and finds out why if they are not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.callbacks.exactness.recording import RecordedWindow
from lightning_automodel.callbacks.exactness.replay import (
    Gradients,
    Replay,
    Replayed,
    Shares,
    distances,
    norm_of,
    wide,
)
from lightning_automodel.callbacks.exactness.results import StepResult, percent, plural, range_of, relative
from lightning_automodel.callbacks.running_strategy import context_of, options_of
from lightning_automodel.internals import lightning as lightning_internals

# Gradients may be off by this many times the rounding that the replay shows, which comes from one order of
# summation out of many. Single parameters may be off by this many times their own rounding times that
# factor.
_FACTOR = 4
_FACTOR_IF_PERTURBED = 8  # multiplies both if rounding is known only from perturbed weights
# This many roundings are no error even if the replay shows no rounding.
_LEAST = 16
_LEAST_IN_HALF = 2
_LOSS_TOLERANCE = 64  # roundings
_MOST_ROUNDING = 0.01  # largest rounding in single precision with which gradients still mean something
_HALF = 1e-4  # precisions that round more cannot tell a small error from rounding

_NOT_REPEATABLE = (
    "training_step is not repeatable, as it draws from something other than the global generators of torch,"
    " numpy and Python, or keeps a state that is no attribute of a module"
)


@dataclass(frozen=True)
class _WindowFit:
    """A run's gradients as a sum of those of its micro-batches.

    Attributes:
        given: The weight of each micro-batch in the gradients.
        right: The weight that each micro-batch should have.
        error: The largest relative error of a weight.
        left: The part of the gradients that the fit leaves, relative to them.
        explained: The share of the difference from one batch that wrong weights explain.
    """

    given: Tensor
    right: Tensor
    error: float
    left: float
    explained: float

    @property
    def explains(self) -> bool:
        """Whether the gradients are off because micro-batches have other weights."""
        return self.left < 0.05 and self.explained > 0.9 and self.error > 4 * self.left


class GradientCheck:
    """Compares the gradients of one step, on rank 0.

    Args:
        replay: The replay of the run.
        trainer: The run's Trainer.
        windows: Windows of all data-parallel ranks.
        shares: The count of each micro-batch.
        step: The result to fill in.
    """

    def __init__(
        self,
        replay: Replay,
        trainer: pl.Trainer,
        windows: list[RecordedWindow],
        shares: Shares,
        step: StepResult,
    ) -> None:
        self._replay = replay
        self._windows = windows
        self._shares = shares
        self._step = step
        self._records = [record for window in windows for record in window.micro_batches]
        self._precision = str(trainer.precision_plugin.precision)
        self._eps = _rounding_unit(trainer)
        self._is_half = self._eps > _HALF
        self._least = self._eps * (_LEAST_IN_HALF if self._is_half else _LEAST)
        self._has_slices = context_of(trainer) is not None

    def compare(self, run: Gradients, weights: dict[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Compare gradients ``run`` with those of one batch.

        ``weights`` are the weights before the window, which are dropped on the way; ``now`` are those that
        have changed since.
        """
        step = self._step
        replay = self._replay
        sample = replay.sample(set(run))
        dtype = replay.sharded_dtype
        replay.load(weights, dtype)
        replayed = replay.one_batch(self._windows, self._shares, weights, dtype, sample)
        for name, gradient in replayed.gradients.items():
            if gradient is not None:
                replayed.gradients[name] = gradient.cpu()
        step.written = self._written(replayed.written, weights, now)
        size = norm_of(distances(run, run, {}))
        direct = norm_of(distances(run, run, replayed.gradients)) / max(size, 1e-300)
        contributions = [replayed.contributions]  # from micro-batches that round like the run's
        if self._is_half and direct > _HALF:
            replay.load(weights, dtype)
            alike = replay.one_batch(self._windows, self._shares, weights, dtype, sample, alike=True)
            contributions.append(alike.contributions)
        exact, rounded, factor = self._one_batch(replayed, weights, dtype, sample)
        missing = self._compare(run, exact.gradients, rounded, factor)
        fit = min((self._fit(run, parts, sample) for parts in contributions), key=lambda fit: fit.left)
        if fit.explains:
            step.explanation = _weights_in_words(fit, plural(self._shares.weighting.unit))
        if self._is_half:
            self._judge_in_half(missing, direct, fit, factor)
        if factor == _FACTOR:
            dtype = torch.float64  # _one_batch has loaded the weights in it
        self._note_problem(replayed, direct, dtype, sample)

    def _note_problem(
        self, replayed: Replayed, direct: float, dtype: torch.dtype | None, sample: dict[str, Tensor]
    ) -> None:
        """Say in the step's result why the replay cannot judge the gradients, if it cannot."""
        step = self._step
        unequal_losses = self._unequal_losses(replayed)
        # If gradients are equal, the loss is only shown differently, as one over all ranks.
        is_equal = not step.is_wrong and direct < _HALF
        if unequal_losses and not (is_equal or step.written or step.unequal):
            step.gradient_error = math.nan
            step.problem = unequal_losses + self._why_unequal(dtype, sample)
        elif not self._repeats(dtype, sample):
            step.problem = _NOT_REPEATABLE
        elif not (step.is_wrong or self._is_half) and step.rounding > _MOST_ROUNDING:
            step.problem = f"rounding is {percent(step.rounding)} of them: check with precision='64-true'"

    def _one_batch(
        self,
        replayed: Replayed,
        weights: dict[str, Tensor],
        dtype: torch.dtype | None,
        sample: dict[str, Tensor],
    ) -> tuple[Replayed, Gradients, float]:
        """The gradients to compare with, the same with rounding, and how many times the rounding is no error."""
        replay = self._replay
        dtypes = {name: weight.dtype for name, weight in weights.items()}
        if self._precision != "64-true":
            replay.load(weights, torch.float64)
            # Weights in float64 leave little memory for others.
            for name in weights.keys() - replayed.written.keys():
                del weights[name]
            try:
                exact = replay.one_batch(self._windows, self._shares, weights, torch.float64, sample)
                if all(map(self._agree, replayed.losses, exact.losses)):
                    return exact, replayed.gradients, _FACTOR
            except ReplayError:
                raise
            except Exception:
                pass  # such as code with a hard-coded dtype
            own = replay.module.named_parameters()
            weights = {n: weights.get(n, p.detach().cpu()).to(dtypes[n]) for n, p in own}
        generator = torch.Generator().manual_seed(0)
        perturbed = {name: _perturbed(weight, self._eps, generator) for name, weight in weights.items()}
        replay.load(perturbed)
        other = replay.one_batch(self._windows, self._shares, perturbed, dtype, sample)
        return replayed, other.gradients, _FACTOR * _FACTOR_IF_PERTURBED

    def _compare(
        self, run: Gradients, exact: Gradients, rounded: Gradients, factor: float
    ) -> dict[str, float]:
        """Fill in errors. Returns the parameters without a gradient that have one in one batch."""
        step = self._step
        least = self._least
        off = distances(run, run, exact)
        rounding = distances(run, rounded, exact)
        norm = distances(run, exact, {})
        total = norm_of(norm)
        step.gradient_error = relative(norm_of(off), total)
        if total:
            step.rounding = norm_of(rounding) / total
        else:
            step.rounding = 0.0
        limit = factor * step.rounding + least
        size = sum(wide(exact[name]).numel() for name in run)
        missing = {}
        for name in sorted(off, key=off.__getitem__, reverse=True):
            # The parameter's rounding, and its share of all rounding: it may be zero but for rounding.
            share = math.sqrt(wide(exact[name]).numel() / max(size, 1))
            if off[name] > _FACTOR * factor * rounding[name] + least * norm[name] + limit * total * share:
                step.parameters[name] = relative(off[name], norm[name])
            is_zero = not bool(wide(run[name]).any())
            if is_zero and norm[name] > 10 * rounding[name] and norm[name] > 1e-3 * total:
                missing[name] = 1.0
        step.is_wrong = step.gradient_error > limit or bool(step.parameters)
        return missing

    def _judge_in_half(
        self, missing: dict[str, float], direct: float, fit: _WindowFit, factor: float
    ) -> None:
        """In half precision rounding may be as large as an error: call wrong only what it cannot explain."""
        step = self._step
        limit = factor * step.rounding + self._least
        if direct < _HALF:  # the replay in the run's precision agrees
            step.is_wrong = False
            step.parameters = {}
            step.gradient_error = direct
        elif missing:
            step.is_wrong = True
            step.parameters = missing
        elif fit.explains and fit.error > 0.02 and (fit.left < 1e-3 or step.gradient_error > limit):
            step.is_wrong = True
        elif step.is_wrong or step.gradient_error > 2 * step.rounding + self._eps / 2:
            step.is_wrong = False
            step.problem = (
                f"they are {percent(step.gradient_error)} off, which {self._precision} may do by rounding"
                f" (here {percent(step.rounding)}): check with precision='32-true'"
            )
        elif step.rounding > 0.1:
            step.problem = (
                f"rounding in {self._precision} is {percent(step.rounding)} of them: check with"
                " precision='32-true'"
            )

    def _fit(self, run: Gradients, contributions: list[Tensor], sample: dict[str, Tensor]) -> _WindowFit:
        """Fit the run's gradients by the contributions of micro-batches to the gradients of one batch."""
        counts = self._shares.counts
        used = [index for index, part in enumerate(contributions) if bool(part.any()) and counts[index]]
        if not used:
            return _WindowFit(torch.ones(0), torch.ones(0), 0.0, math.inf, 0.0)
        matrix = torch.stack([contributions[index] for index in used], dim=1)
        target = torch.cat([_entries(run[name], positions) for name, positions in sample.items()])
        factors = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]  # 1 where the weight is right
        left = float((matrix @ factors - target).norm() / target.norm().clamp_min(1e-300))
        difference = (target - matrix.sum(dim=1)).norm().clamp_min(1e-300)
        explained = float((matrix @ (factors - 1)).norm() / difference)
        right = torch.tensor(
            [counts[index] / self._shares.denominator for index in used], dtype=torch.float64
        )
        return _WindowFit(factors * right, right, float((factors - 1).abs().max()), left, explained)

    def _written(
        self, written: Mapping[str, Tensor], weights: Mapping[str, Tensor], now: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Weights that the run's window wrote differently from the replay of rank 0's steps, with the error."""
        differing = {}
        for name in written.keys() | now.keys():
            before = weights[name]
            replayed = written.get(name, before).double()
            off = float((now.get(name, before).double() - replayed).norm())
            moved = float((replayed - before.double()).norm())
            size = float(replayed.norm())
            is_lost = name not in now and moved > 4 * self._eps * size
            if is_lost or (off > _LOSS_TOLERANCE * self._eps * size and off > 1e-3 * moved):
                differing[name] = off / max(size, 1e-300)
        return differing

    def _unequal_losses(self, replayed: Replayed) -> str:
        pairs = [(record, loss) for record, loss in zip(self._records, replayed.losses, strict=True)]
        unequal = [(record, loss) for record, loss in pairs if not self._agree(record.loss, loss)]
        if not unequal:
            return ""
        record, loss = unequal[0]
        return (
            f"{len(unequal)} of {len(pairs)} losses differ in the replay, such as {record.loss:.6g} in the"
            f" run and {loss:.6g} in the replay: "
        )

    def _why_unequal(self, dtype: torch.dtype | None, sample: dict[str, Tensor]) -> str:
        for name, module in self._replay.module.named_modules():
            if isinstance(module, Metric) and module.dist_sync_on_step:
                return f"the metric {name} takes values of all ranks (dist_sync_on_step=True)"
        if not self._repeats(dtype, sample):
            return _NOT_REPEATABLE
        if self._has_slices:
            return "training_step depends on the rank, as by random numbers that each draws for its slice"
        return (
            "training_step depends on the rank, or on something other than weights, buffers and attributes"
        )

    def _repeats(self, dtype: torch.dtype | None, sample: dict[str, Tensor]) -> bool:
        """Whether a micro-batch has the same gradient twice."""
        replay = self._replay
        window = next(window for window in self._windows if window.micro_batches)
        record = window.micro_batches[0]
        gradients: list[Tensor] = []
        for _ in range(2):
            replay.set_tensors(window, dtype)
            output = replay.call(record, record.arguments[0], dtype)
            if output is None:
                return True
            loss, _ = replay.losses_of(output, self._shares.weighting)
            gradients.append(replay.sampled_gradient(loss, sample))
        first, second = gradients
        eps = torch.finfo(dtype or torch.float32).eps
        return bool((first - second).norm() <= max(1e-6, 64 * eps) * second.norm())

    def _agree(self, first: float | None, second: float | None) -> bool:
        if first is None or second is None:
            return True
        if math.isnan(first) and math.isnan(second):
            return True
        return abs(first - second) <= _LOSS_TOLERANCE * self._eps * max(abs(first), abs(second), 1e-3)


def _rounding_unit(trainer: pl.Trainer) -> float:
    """The relative size of a rounding in the run's precision."""
    precision = str(trainer.precision_plugin.precision)
    options = options_of(trainer)
    # These communicate in half precision.
    hooks = (
        lightning_internals.ddp_comm_hook(trainer),
        options.get("ddp_comm_hook"),
        options.get("mp_policy"),
    )
    if "bf16" in precision or any(hook is not None for hook in hooks):
        dtype = torch.bfloat16
    elif precision.startswith("16"):
        dtype = torch.float16
    elif precision.startswith("64"):
        dtype = torch.float64
    else:
        dtype = torch.float32
    return torch.finfo(dtype).eps


def _perturbed(weight: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """``weight`` with each entry moved by at most one rounding."""
    if not weight.is_floating_point():
        return weight
    moves = torch.randint(-1, 2, weight.shape, generator=generator)
    return (weight.double() * (1 + eps * moves.double())).to(weight.dtype)


def _weights_in_words(fit: _WindowFit, units: str) -> str:
    given = fit.given
    right = fit.right
    total = float(given.sum())
    mean = percent(float(given.mean()))
    if float(given.max() - given.min()) >= max(1e-3, 2 * fit.left) * abs(given.mean()):
        text = f"Micro-batches weigh {range_of(given)} in them, where {range_of(right)} is right by their {units}."
    elif right.max() - right.min() > 1e-3 * right.mean():
        text = f"Every micro-batch weighs {mean}, though they hold {range_of(right)} of the {units}."
    else:
        text = f"Every micro-batch weighs {mean}, where {percent(float(right.mean()))} is right."
    if abs(total - 1) < 0.01:
        return text
    return f"{text} Together they weigh {percent(total)} in place of 100 %."


def _entries(gradient: Tensor | None, positions: Tensor) -> Tensor:
    """[k] entries, in float64."""
    if gradient is None:
        return torch.zeros(len(positions), dtype=torch.float64)
    return gradient.flatten()[positions].double()
