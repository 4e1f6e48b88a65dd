"""How much each micro-batch should weigh, and whether its loss divides by that, as its graph tells."""

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_automodel.gradients.loss_graph import LossTerm
from lightning_automodel.gradients.loss_weights import FirstLooks
from lightning_automodel.gradients.token_loss import TokenWeighting

_SAME = 1e-4
_LOOKS = 100


@dataclass
class MicroBatch:
    """One backward of a rank, and what is known of its loss.

    Attributes:
        step: The number of its training step, since recording began.
        backward: The number of its backward in that step.
        loss: Its value in the run.
        count: What it should weigh; NaN if it cannot be counted.
        parts: Those of its loss; empty if the graph does not tell.
        checksum: Of its batch.
        source: The rank that sends the batch to all: the first with the same data. Set for a replay.
        whole_count: The mean over all slices of the batch. Set for a replay.
    """

    step: int
    backward: int
    loss: float
    count: float
    parts: list[LossTerm]
    checksum: int
    source: int = 0
    whole_count: float = math.nan

    @property
    def divisor(self) -> float:
        """What all parts of the loss are divided by; NaN if that is not one number."""
        divisors = [part.divisor for part in self.parts]
        if divisors and math.isclose(min(divisors), max(divisors), rel_tol=_SAME):
            return divisors[0]
        return math.nan


class Counting:
    """Counts micro-batches by ``weighting``; if that is not given, by what their losses divide by, where they tell."""

    def __init__(self, module: pl.LightningModule, weighting: TokenWeighting | None) -> None:
        self.weighting = weighting or TokenWeighting()
        self._is_given = weighting is not None
        self._by_graph = False
        self._looks = FirstLooks(module, self.weighting, _LOOKS)
        self._advice = ""
        self._counted: list[MicroBatch] = []  # of all ranks

    @property
    def unit(self) -> str:
        """What is counted, in singular."""
        if self._by_graph:
            return "loss term"
        return self.weighting.unit

    def count(self, batch: Any, output: Any, loss: Tensor) -> float:
        """The count of a micro-batch of this rank; NaN without one."""
        try:
            count = float(self.weighting.count(batch, output))
        except (ValueError, TypeError):
            return math.nan
        if self._is_given:
            self._advice = self._advice or self._looks.advice(loss, count, 1)
        return count

    def settle(self, window: list[MicroBatch]) -> None:
        """Set the counts of a window's micro-batches, of all ranks."""
        divisors = [each.divisor for each in window]
        factors = {tuple(part.factor for part in each.parts) for each in window}
        self._by_graph = not (self._is_given or any(map(math.isnan, divisors)) or len(factors) > 1)
        if self._by_graph:
            for each in window:
                each.count = each.divisor
        if not any(math.isnan(each.count) for each in window):
            self._counted += window

    def wrong(self) -> str:
        """What to say of losses, some of them of this rank alone, that do not divide by the count; else empty."""
        if self._advice or not self.doubt():
            return self._advice
        factors = {part.factor for each in self._counted for part in each.parts}
        shares = [each.divisor / each.count for each in self._counted if each.count]
        if len(factors) == 1 and all(share < 1.01 for share in shares) and min(shares) < 0.99:
            return (
                f"The loss divides by less than the number of {self.unit}s. If it is a mean over rows,"
                " count='samples' is right, else give what it divides by as num_label_tokens."
            )
        # A count of samples may be right: where batches hold rows of one length, fewer rows are longer.
        divisors = {each.divisor for each in self._counted}
        is_constant = len(divisors) == 1 and math.isfinite(min(divisors))
        is_proportional = math.isclose(min(shares), max(shares), rel_tol=_SAME)
        is_mean_of_labels = self.unit == "label token" and self.weighting.loss_reduction == "mean"
        if self._is_given and is_mean_of_labels and is_constant and not is_proportional:
            return (
                f"The loss divides by {min(divisors):.3g} in every micro-batch, whatever it holds. For a sum that is"
                " scaled by a constant pass loss_reduction='sum', else give what it divides by as num_label_tokens."
            )
        return ""

    def doubt(self) -> str:
        """Why the count is taken on trust; empty if all losses divide by it."""
        if self._by_graph or not self.weighting.per_token_loss:
            return ""
        is_sum = self.weighting.loss_reduction == "sum"
        unit = "micro-batch" if is_sum else self.unit
        for backward in {each.backward for each in self._counted}:  # of each step
            counted = [each for each in self._counted if each.count and each.backward == backward]
            kinds = {tuple(part.kind for part in each.parts) for each in counted}
            if () in kinds:
                return "the graph of the loss does not tell what it divides by"
            if len(kinds) > 1:
                return "losses differ in their parts"
            ratios = [
                [part.divisor / part.factor / (1.0 if is_sum else each.count) for part in each.parts]
                for each in counted
            ]
            for of_part in zip(*ratios, strict=True):
                least = min(of_part)
                most = max(of_part)
                if not math.isclose(least, most, rel_tol=_SAME):
                    return f"losses, or parts of them, divide by {least:.3g} to {most:.3g} numbers for each {unit}"
        return ""
