"""How much each micro-batch should weigh, and whether its loss divides by that, as its graph tells."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_automodel.callbacks.exactness.words import plural
from lightning_automodel.gradients.loss_graph import LossTerm, averaged_parts
from lightning_automodel.gradients.loss_weights import FirstLooks
from lightning_automodel.gradients.token_loss import TokenWeighting

_SAME = 1e-4
_LOOKS = 100


@dataclass(frozen=True)
class Told:
    """What is known of the weight of a micro-batch: its count, if it can be counted, and the parts of its loss.

    ``backward`` tells losses of one step apart.
    """

    backward: int
    count: float | None
    parts: list[LossTerm]  # empty if the graph of the loss does not tell

    @property
    def divisor(self) -> float | None:
        """What all parts of the loss are divided by, if that is one number."""
        divisors = [part.divisor for part in self.parts]
        if divisors and math.isclose(min(divisors), max(divisors), rel_tol=_SAME):
            return divisors[0]
        return None


class Counting:
    """Counts micro-batches by ``weighting``; if that is not given, by what their losses divide by, where they tell."""

    def __init__(self, weighting: TokenWeighting, is_given: bool) -> None:
        self.weighting = weighting
        self.is_given = is_given
        self._by_graph = False
        self._looks = FirstLooks(_LOOKS)
        self._advice = ""
        self._told: list[Told] = []

    @property
    def unit(self) -> str:
        """What is counted, in singular."""
        if self._by_graph:
            return "loss term"
        return self.weighting.unit

    def look(self, module: pl.LightningModule, batch: Any, output: Any, loss: Tensor, backward: int) -> Told:
        """Look at a micro-batch of this rank."""
        count = None
        with suppress(ValueError, TypeError):
            count = float(self.weighting.count(batch, output))
        if count is not None and self.is_given:
            advice = self._looks.advice(module, self.weighting, loss, count, 1)
            self._advice = self._advice or advice or ""
        return Told(backward, count, averaged_parts(loss))

    def settle(self, told: list[Told]) -> list[float]:
        """The counts of a window's micro-batches, of all ranks, by what was told of each; empty if one is unknown."""
        divisors = [each.divisor for each in told]
        factors = {tuple(part.factor for part in each.parts) for each in told}
        self._by_graph = not self.is_given and None not in divisors and len(factors) == 1
        counts = divisors if self._by_graph else [each.count for each in told]
        found = [count for count in counts if count is not None]
        if len(found) < len(counts):
            return []
        self._told += told
        return found

    def wrong(self) -> str:
        """What to say of losses, some of them of this rank alone, that do not divide by the count; else empty."""
        if self._advice or not self.doubt():
            return self._advice
        factors = {part.factor for each in self._told for part in each.parts}
        shares = [(each.divisor or math.inf) / each.count for each in self._told if each.count]
        if len(factors) == 1 and min(shares) < 0.99 and max(shares) < 1.01:
            return (
                f"The loss divides by less than the number of {plural(self.unit)}. If it is a mean over rows,"
                " count='samples' is right, else give what it divides by as num_label_tokens."
            )
        return ""

    def doubt(self) -> str:
        """Why the count is taken on trust; empty if all losses divide by it."""
        if self._by_graph or not self.weighting.per_token_loss:
            return ""
        doubts = (self._doubt(backward) for backward in {each.backward for each in self._told})
        return next(filter(None, doubts), "")

    def _doubt(self, backward: int) -> str:
        counted = [each for each in self._told if each.count and each.backward == backward]
        kinds = {tuple(part.kind for part in each.parts) for each in counted}
        if () in kinds:
            return "the graph of the loss does not tell what it divides by"
        if len(kinds) > 1:
            return "losses differ in their parts"
        is_sum = self.weighting.loss_reduction == "sum"
        divisors = zip(
            *([part.divisor / part.factor for part in each.parts] for each in counted), strict=True
        )
        for of_part in divisors:
            ratios = [
                divisor / (1.0 if is_sum else each.count or 1.0)
                for divisor, each in zip(of_part, counted, strict=True)
            ]
            if not math.isclose(min(ratios), max(ratios), rel_tol=_SAME):
                unit = "micro-batch" if is_sum else self.unit
                return (
                    f"losses, or parts of them, divide by {min(ratios):.3g} to {max(ratios):.3g} numbers for"
                    f" each {unit}"
                )
        return ""

    def sentence(self) -> str:
        """What the report says of the count, if it is not wrong."""
        subject = f"Count ({plural(self.unit)})"
        if doubt := self.doubt():
            return f"{subject}: taken on trust, as {doubt}."
        return f"{subject}: agrees with the loss, which divides by it."
