"""Whether losses divide by what is counted: the first micro-batches of a run tell."""

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lightning_automodel.gradients.loss_graph import Kind, LossTerm, loss_terms
from lightning_automodel.gradients.token_loss import Count, StepReport, TokenWeighting

_ROUNDING = 1e-4
"""Relative difference between numbers that are the same: torch adds class weights up in float32."""

_GIVE = "Give what the loss divides by as num_label_tokens"
_SEVERAL = (
    " If parts of the loss divide by different numbers, no single count is right: see 'Losses with two"
    " denominators' in docs/recipes.md."
)
_OF_SUMS = (
    f"{_GIVE}. If it is a number of all ranks, as the num_boxes of DETR, pass per_token_loss=False"
    f" instead.{_SEVERAL}"
)
_REMEDIES: dict[Kind, str] = {
    "labels": (
        f"{_GIVE}, or say what to count by label_key=, ignore_index= or count_label_tokens=, and leave out"
        " count='samples' where each row has several labels. If the two numbers"
        " differ by the number of rows: a loss that shifts the labels, as a Hugging Face causal language model's,"
        f" needs label_shift=1, any other needs label_shift=0.{_SEVERAL}"
    ),
    "class weights": (
        "It divides by the class weights of its labels: give weight[labels].sum() as num_label_tokens, or by"
        " count_label_tokens=."
    ),
    "cross-entropies": _OF_SUMS,
    "numbers": _OF_SUMS,
}
_OF_PLAIN_SUMS = "It is a sum: pass loss_reduction='sum', or divide it by the label tokens."
_OF_MEANS = "loss_reduction='sum' expects a sum: leave it out where the loss is a mean."


class FirstLooks:
    """Looks at the losses of the first micro-batches of a run, which reads the device.

    Attributes:
        left: How many losses it still looks at; 0 once it has given its advice.
    """

    def __init__(self, module: nn.Module, weighting: TokenWeighting, num_looks: int = 4) -> None:
        self._name = type(module).__name__
        self._weighting = weighting
        self.left = num_looks
        # What the first loss of each kind divides by, and what was counted for it.
        self._first: dict[tuple[Kind, ...], tuple[list[LossTerm], float]] = {}
        # How much more than what is counted the newest loss divides by.
        self._excess = 0.0
        # A term that is taken from all ranks, of this rank's losses.
        self._over_ranks: _Comparison | None = None

    def advice(self, loss: Tensor, count: Count, accumulate: int) -> str:
        """What to tell of a loss [] that does not divide by what is counted, once; else empty.

        In one micro-batch a constant factor might be meant. A second one shows that one of the two weighs too
        much. ``accumulate`` is what Lightning has divided the loss by.
        """
        if not (self.left and self._weighting.per_token_loss):
            return ""
        self.left -= 1
        number = float(count)
        terms = [replace(term, divisor=term.divisor / accumulate) for term in loss_terms(loss)]
        if not all(0 < value < math.inf for value in (number, *(term.divisor for term in terms))):
            return ""
        if terms and terms[0].factor:
            self._excess = terms[0].divisor / terms[0].factor / number
        kinds = tuple(term.kind for term in terms)
        first_terms, first_number = self._first.setdefault(kinds, (terms, number))
        for first, term in zip(first_terms, terms, strict=True):
            found = _Comparison(self._name, self._weighting, (first, term), (first_number, number))
            if term.kind == "all ranks":
                self._over_ranks = found
            if text := found.of_all_ranks() or found.of_one_rank():
                self.left = 0
                return text
        return ""

    def advice_after(self, window: StepReport, num_own: int) -> str:
        """What to tell of losses that are divided by their number, ``num_own`` on this rank in the first window.

        Or of a loss of all ranks, if this rank counts as much in each micro-batch, and others do not. ``window`` is the
        report on that window, which is read.
        """
        if num_own > 1 and math.isclose(self._excess, num_own, rel_tol=_ROUNDING):
            return (
                f"The loss of {self._name} is divided by {num_own} times the {self._weighting.unit}s of its"
                f" micro-batch, and the window has {num_own} micro-batches. If that is a division by their number,"
                f" leave it out: gradients are divided by the sum of all counts of the window, and would be too small."
            )
        if self._over_ranks is None:
            return ""
        own, _ = self._over_ranks.counts
        mean = float(window.num_label_tokens / window.num_micro_batches)
        return replace(self._over_ranks, counts=(own, mean)).of_all_ranks()


@dataclass(frozen=True)
class _Comparison:
    """Two micro-batches: what a term of their losses divides by, and what was counted for them."""

    name: str  # of the module's class
    weighting: TokenWeighting
    terms: tuple[LossTerm, LossTerm]
    counts: tuple[float, float]

    @property
    def kind(self) -> Kind:
        """Of the term, the same in both."""
        return self.terms[0].kind

    @property
    def divisors(self) -> tuple[float, float]:
        """What the sums are divided by; less the count, where a mean is multiplied by it."""
        first, second = self.terms
        if self._is_multiplied_by_count():
            return first.divisor / first.factor, second.divisor / second.factor
        return first.divisor, second.divisor

    def _has_one_factor(self) -> bool:
        return math.isclose(self.terms[0].factor, self.terms[1].factor, rel_tol=_ROUNDING)

    def _is_multiplied_by_count(self) -> bool:
        first, second = self.terms
        count, other = self.counts
        return not self._has_one_factor() and math.isclose(
            first.factor * other, second.factor * count, rel_tol=_ROUNDING
        )

    def of_one_rank(self) -> str:
        """What to tell of a sum, if the quotient of its divisor and the count is not the same in both; else empty."""
        if self.kind not in _REMEDIES or self._is_fair():
            return ""
        if self.weighting.loss_reduction == "sum":
            remedy = _OF_MEANS
        elif self.divisors == (1, 1):
            remedy = _OF_PLAIN_SUMS
        else:
            remedy = _REMEDIES[self.kind]
        return (
            f"The loss of {self.name} holds a sum of"
            f" {'numbers' if self.kind == 'numbers' else 'cross-entropies'} that is divided by"
            f" {self.divisors[0]:g} in one micro-batch and by {self.divisors[1]:g} in another, where"
            f" {self.counts[0]:g} and {self.counts[1]:g} {self.weighting.unit}s are counted: gradients are"
            f" not those of one batch. {remedy}"
        )

    def _is_fair(self) -> bool:
        """Whether what is summed weighs the same in both micro-batches, or is meant to weigh otherwise."""
        is_constant = math.isclose(*self.divisors, rel_tol=_ROUNDING)
        if is_constant and self.kind == "numbers":
            return True  # as a penalty on weights, which is no mean
        if self.kind in ("numbers", "cross-entropies") and not (
            self._has_one_factor() or self._is_multiplied_by_count()
        ):
            return True  # it is multiplied by one over a number, or a part of a mixture
        if self.weighting.loss_reduction == "sum":
            return is_constant
        first, second = (divisor / count for divisor, count in zip(self.divisors, self.counts, strict=True))
        if math.isclose(first, second, rel_tol=_ROUNDING):
            return True
        # Images weigh the same, whatever their pixels, if those of a batch have one size.
        is_whole = first == round(first) > 0 and second == round(second) > 0
        return is_whole and not is_constant and self.kind != "class weights"

    def of_all_ranks(self) -> str:
        """What to tell of a loss of all ranks, if it weighs the same in both, and the counts differ; else empty."""
        weighs_the_same = math.isclose(*self.divisors, rel_tol=_ROUNDING)
        counts_the_same = math.isclose(*self.counts, rel_tol=_ROUNDING)
        if self.kind != "all ranks" or counts_the_same or not weighs_the_same:
            return ""
        if self.weighting.loss_reduction == "sum":
            return ""
        unit = self.weighting.unit
        return (
            f"The loss of {self.name} is gathered from all ranks, with gradients, and each rank's"
            f" weighs the same, however many {unit}s it has: gradients are not those of one batch."
            f" Return this rank's loss, which the strategy weighs by its {unit}s (self.log(...,"
            " sync_dist=True) shows the mean over ranks). If each rank and each micro-batch shall weigh"
            " the same, pass per_token_loss=False."
        )
