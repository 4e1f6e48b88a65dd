"""Checks whether the loss of a batch is the mean over the counted units, without trusting the count."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.callbacks.exactness.recording import RecordedMicroBatch, RecordedWindow
from lightning_automodel.callbacks.exactness.replay import Replay
from lightning_automodel.callbacks.exactness.results import (
    EXACT,
    NOT_CHECKED,
    WRONG,
    CountResult,
    described,
    percent,
)
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples

_TRIED = 3  # batches, at most
# Smallest singular value of normalised gradients. Below it, either part could have either weight.
_PARALLEL = 1e-3
_FITS = 1e-5
_AGREES = 1e-4


@dataclass
class _PartsFit:
    """The gradient of a batch as a weighted sum of the gradients of its parts."""

    factors: list[float]  # weights of the parts
    counts: list[float]
    left: float  # the part of the gradient that the sum leaves, relative to it
    noise: float  # rounding of the precision in which it was computed
    evaluates: bool  # with dropout and the like off
    is_random: str = ""  # why the fit means nothing
    is_of_means: bool = False  # doubling the batch does not change the gradient


class CountCheck:
    """Splits batches by rows, or joins two of one row, and fits the whole's gradient by the parts' gradients.

    Args:
        replay: The replay of the run.
        windows: Windows of all data-parallel ranks.
        weights: Weights before the window.
        weighting: How the run counts.
    """

    def __init__(
        self,
        replay: Replay,
        windows: list[RecordedWindow],
        weights: Mapping[str, Tensor],
        weighting: TokenWeighting,
    ) -> None:
        self._replay = replay
        self._windows = windows
        self._weights = weights
        self._weighting = weighting
        self.better: TokenWeighting | None = None  # a weighting that is right, if `weighting` is wrong

    def check(self) -> CountResult:
        """Check the batches whose parts differ most in their counts, at most three."""
        tried = self._splits()
        if not tried:
            return CountResult(
                NOT_CHECKED, "not checked, as no micro-batch has two rows that can be told apart"
            )
        checked: list[CountResult] = []
        for window, record, batch, parts in tried[:_TRIED]:
            checked.append(self._check_one(window, record, batch, parts))
            if checked[-1].verdict == WRONG:
                break
        return min(checked, key=lambda result: (WRONG, EXACT, NOT_CHECKED).index(result.verdict))

    def _splits(self) -> list[tuple[RecordedWindow, RecordedMicroBatch, Any, list[Any]]]:
        """Batches with two parts of each, those first whose parts differ most in their counts."""
        records = [(window, record) for window in self._windows for record in window.micro_batches]
        tried = []
        for window, record in records:
            parts = _split(record.arguments[0])
            if parts is not None:
                tried.append((window, record, record.arguments[0], parts))
        if not tried and len(records) > 1:
            parts = [records[0][1].arguments[0], records[1][1].arguments[0]]
            with suppress(Exception):
                tried = [(*records[0], self._join(parts), parts)]
        return sorted(tried, key=lambda split: -self._contrast(split[3]))

    def _contrast(self, parts: list[Any]) -> float:
        try:
            counts = [float(self._weighting.count_labels(part[self._weighting.label_key])) for part in parts]
        except Exception:
            counts = [float(_num_rows(part)) for part in parts]
        if not all(counts):
            return -1.0
        return abs(counts[0] / sum(counts) - 0.5) + 1e-3 * sum(map(_num_rows, parts))

    def _check_one(
        self, window: RecordedWindow, record: RecordedMicroBatch, batch: Any, parts: list[Any]
    ) -> CountResult:
        fit, failure = self._best_fit(window, record, batch, parts)
        if fit is None:
            return CountResult(NOT_CHECKED, f"not checked, as {failure}")
        if fit.is_random:
            return CountResult(NOT_CHECKED, f"not checked, as {fit.is_random}")
        if fit.left > max(_FITS, 10 * fit.noise):
            if fit.is_of_means:
                return CountResult(
                    NOT_CHECKED,
                    "no single count is right, as the loss has terms that are divided by different numbers,"
                    f" or by statistics of the batch ({percent(fit.left)} of the gradient of a batch is no"
                    " sum of those of its parts)",
                    is_decisive=True,
                )
            return CountResult(
                NOT_CHECKED,
                f"not checked, as a row's loss depends on the other rows of its batch ({percent(fit.left)}"
                " of its gradient), so that the verdict is for the count given",
            )
        tolerance = max(_AGREES, 20 * fit.noise)
        if fit.evaluates:
            where = " (compared in eval mode)"
        else:
            where = ""
        if _are_close(fit.factors, self._factors(self._weighting, fit.counts), tolerance):
            return CountResult(EXACT, f"agrees with the loss{where}")
        if any(abs(factor) < 1e-6 for factor in fit.factors):
            return CountResult(NOT_CHECKED, "not checked, as a part of a batch has no weight in its loss")
        if _has_shared_values(batch):
            return CountResult(
                NOT_CHECKED, "not checked, as a batch holds values that do not belong to single rows"
            )
        remedy = self._remedy(parts, fit.factors, tolerance)
        loss = _ratio(fit.factors)
        count = _ratio(fit.counts)
        text = f"two parts of a batch weigh {loss} in its loss, and {count} by their count{where}"
        return CountResult(WRONG, text, remedy)

    def _remedy(self, parts: list[Any], factors: list[float], tolerance: float) -> str:
        """The option that makes the count right, in words; sets ``better`` to it if it is known."""
        own = self._weighting
        plain = replace(own, loss_reduction="mean", count_label_tokens=None, label_shift=0)
        candidates = {
            "loss_reduction='sum', as the loss is a sum": replace(own, loss_reduction="sum"),
            "count='samples', as the loss is a mean over rows": replace(
                plain, count_label_tokens=count_samples
            ),
            "label_shift=0": plain,
            "label_shift=1": replace(plain, label_shift=1),
        }
        for option, weighting in candidates.items():
            with suppress(Exception):
                counts = [float(weighting.count(part)) for part in parts]
                if _are_close(factors, self._factors(weighting, counts), tolerance):
                    self.better = weighting
                    return option
        return "num_label_tokens, returned from training_step: the number that the loss is divided by"

    @staticmethod
    def _factors(weighting: TokenWeighting, counts: list[float]) -> list[float]:
        if weighting.loss_reduction == "sum":
            return [1.0] * len(counts)
        total = sum(counts)
        if not total:
            return [0.0] * len(counts)
        return [count / total for count in counts]

    # --- Fitting ------------------------------------------------------------------------------------------

    def _best_fit(
        self, window: RecordedWindow, record: RecordedMicroBatch, batch: Any, parts: list[Any]
    ) -> tuple[_PartsFit | None, str]:
        """The better of the fits in training and evaluation, and the reason if there is none.

        Evaluation is tried if the fit in training is not good, as where a row's loss depends on other rows.
        """
        best = None
        failure = "the gradients of two parts of a batch are parallel"
        for evaluates in (False, True):
            for dtype in (torch.float64, None):
                try:
                    fit = self._fit(window, record, batch, parts, evaluates, dtype)
                except ReplayError:
                    raise
                except Exception as error:  # such as code with a hard-coded dtype
                    failure = f"the step fails on a part of a batch ({described(error)})"
                    continue
                if fit is not None:
                    if best is None or (bool(fit.is_random), fit.left) < (bool(best.is_random), best.left):
                        best = fit
                    break
            if best is not None and not best.is_random and best.left < max(_FITS, 10 * best.noise):
                break
        return best, failure

    def _fit(
        self,
        window: RecordedWindow,
        record: RecordedMicroBatch,
        batch: Any,
        parts: list[Any],
        evaluates: bool,
        dtype: torch.dtype | None,
    ) -> _PartsFit | None:
        replay = self._replay
        replay.load(self._weights, dtype)
        if evaluates:
            replay.module.eval()
        trained = {name for name, value in replay.module.named_parameters() if value.requires_grad}
        sample = replay.sample(trained)

        def gradient(batch: Any, seed: int | None = None) -> tuple[Tensor, float]:
            replay.set_tensors(window, dtype)
            output = replay.call(record, batch, dtype, seed)
            loss, _ = replay.losses_of(output, self._weighting)
            return replay.sampled_gradient(loss, sample), float(self._weighting.count(batch, output))

        whole, _ = gradient(batch)
        gradients, counts = zip(*map(gradient, parts), strict=True)
        solved = _solved(torch.stack(gradients, dim=1), whole)
        if solved is None:
            return None
        factors, left = solved
        fit = _PartsFit(factors, list(counts), left, 0.0 if dtype else 1e-6, evaluates)
        if _are_apart(gradient(batch)[0], whole):
            fit.is_random = "training_step is not repeatable"
        elif _are_apart(gradient(batch, seed=1)[0], whole):
            fit.is_random = (
                "training_step draws random numbers, so that the parts of a batch cannot be compared with"
                " all of it"
            )
        if left > max(_FITS, 10 * fit.noise):
            with suppress(Exception):
                fit.is_of_means = not _are_apart(gradient(self._doubled(parts))[0], whole)
        return fit

    def _doubled(self, parts: list[Any]) -> Any:
        """Every row twice, in another order. A mean over rows, or a quotient of such means, does not change."""
        second, first = (self._join([part, part]) for part in parts)
        return self._join([first, second])

    def _join(self, parts: list[Any]) -> Any:
        return _joined(parts, {self._weighting.label_key: self._weighting.ignore_index})


def _solved(columns: Tensor, whole: Tensor) -> tuple[list[float], float] | None:
    """The factors with which ``columns`` sum up to ``whole``, and what is left; None if they are not unique."""
    if not (torch.isfinite(whole).all() and torch.isfinite(columns).all() and bool(whole.any())):
        return None
    spread = torch.linalg.svdvals(columns / columns.norm(dim=0).clamp_min(1e-300))
    if spread[-1] < _PARALLEL * spread[0]:
        return None
    factors = torch.linalg.lstsq(columns, whole[:, None]).solution[:, 0]
    return factors.tolist(), float((columns @ factors - whole).norm() / whole.norm())


def _are_apart(first: Tensor, second: Tensor) -> bool:
    return bool((first - second).norm() > 1e-6 * second.norm())


def _are_close(first: list[float], second: list[float], tolerance: float) -> bool:
    return max(abs(one - other) for one, other in zip(first, second, strict=True)) < tolerance


def _ratio(values: list[float]) -> str:
    first, second = values
    if first:
        return f"1 : {second / first:.3g}"
    return f"{first:.3g} : {second:.3g}"


# --- Parts of batches -------------------------------------------------------------------------------------


def _num_rows(batch: Any) -> int:
    sizes = [tensor.size(0) for tensor in tensors_in(batch) if tensor.ndim]
    if sizes:
        return max(set(sizes), key=sizes.count)
    return 1


def _has_shared_values(batch: Any) -> bool:
    """Whether a batch holds tensors or numbers that do not belong to single rows, which its parts have too."""
    rows = _num_rows(batch)
    entries: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        entries = batch.values()
    elif isinstance(batch, (list, tuple)):
        entries = batch
    if any(isinstance(entry, (int, float)) and not isinstance(entry, bool) for entry in entries):
        return True
    return any(not tensor.ndim or tensor.size(0) != rows for tensor in tensors_in(batch))


def _split(batch: Any) -> list[Any] | None:
    """Two parts of a batch, of unequal size if possible; None if it has no two rows."""
    try:
        rows = count_samples(batch)
        if rows < 2:
            return None
        at = max(1, rows // 3)
        return [_rows_of(batch, part, rows) for part in (slice(0, at), slice(at, rows))]
    except Exception:  # such as a user's class that cannot be built from parts
        return None


def _rows_of(value: Any, part: slice, rows: int) -> Any:
    """The rows ``part`` of a batch of ``rows``, or of an entry of it."""

    def inner(entry: Any) -> Any:
        return _rows_of(entry, part, rows)

    if isinstance(value, Tensor):
        if value.ndim and value.size(0) == rows:
            return value[part]
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return replace(value, **{name: inner(getattr(value, name)) for name in names})
    if hasattr(value, "keys"):
        entries = {key: inner(value[key]) for key in value.keys()}  # noqa: SIM118 (not all are mappings)
        try:
            return type(value)(entries)
        except Exception:
            if not isinstance(value, dict):
                raise
            return entries
    if isinstance(value, (list, tuple)):
        has_tensors = any(isinstance(item, Tensor) and item.ndim for item in value)
        has_item_per_row = len(value) == rows and not has_tensors
        if has_item_per_row:
            items = value[part]
        else:
            items = [inner(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def _joined(parts: Sequence[Any], fills: Mapping[Any, int], key: Any = None) -> Any:
    """Join two batches, or their entries ``key``, padding the ends of rows. Raises if they cannot be joined."""
    one, other = parts
    if isinstance(one, Tensor) and one.ndim:
        sizes = [max(pair) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
        return torch.cat([_padded(tensor, sizes, fills.get(key, 0)) for tensor in parts])
    if hasattr(one, "keys") and set(one.keys()) == set(other.keys()):
        return {name: _joined([one[name], other[name]], fills, name) for name in one.keys()}  # noqa: SIM118
    if isinstance(one, (list, tuple)) and key is None:
        return type(one)(
            _joined(pair, fills, index) for index, pair in enumerate(zip(one, other, strict=True))
        )
    if isinstance(one, list):
        return one + other
    if isinstance(one, (str, bool, type(None))) and one == other:
        return one
    raise TypeError(f"entries of {type(one).__name__} cannot be joined")


def _padded(rows: Tensor, sizes: list[int], fill: int) -> Tensor:
    amounts: list[int] = []
    for size, have in zip(reversed(sizes), reversed(rows.shape[1:]), strict=True):
        amounts += (0, size - have)
    return nn.functional.pad(rows, amounts, value=fill)
