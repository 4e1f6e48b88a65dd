"""What a loss divides by, read from its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel.gradients.loss_graph import LossTerm, loss_terms

CLASSES = 3
WEIGHT = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
LABELS = torch.tensor([0, 2, -100, 1])
SOFT = torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0, 0.5, 0.5], [0.1, 0.9, 0]], dtype=torch.float64)


def logits() -> Tensor:
    return torch.linspace(-1, 1, 4 * CLASSES, dtype=torch.float64).view(4, CLASSES).requires_grad_()


def cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits(), *args, **kwargs)


def summed() -> Tensor:
    return cross_entropy(LABELS, reduction="sum")


def of_each_label() -> Tensor:
    return cross_entropy(LABELS, reduction="none")


def mean_of_two() -> Tensor:
    return torch.stack([cross_entropy(LABELS), cross_entropy(LABELS[:4])]).mean()


def of_an_image() -> Tensor:
    return F.cross_entropy(logits().T[None, :, :, None], LABELS[None, :, None])


TERMS: dict[str, tuple[Callable[[], Tensor], list[LossTerm]]] = {
    "labels": (lambda: cross_entropy(LABELS), [LossTerm("labels", 3)]),
    "class weights": (lambda: cross_entropy(LABELS, weight=WEIGHT), [LossTerm("class weights", 5.5)]),
    "smoothed": (
        lambda: cross_entropy(LABELS, label_smoothing=0.1),
        [LossTerm("labels", 3, 0.9), LossTerm("numbers", 3, 0.1 / 3)],
    ),
    "probabilities": (lambda: cross_entropy(SOFT), [LossTerm("cross-entropies", 4)]),
    "weighted probabilities": (lambda: cross_entropy(SOFT, weight=WEIGHT), [LossTerm("cross-entropies", 4)]),
    "mixed": (
        lambda: 0.3 * cross_entropy(LABELS) + 0.7 * cross_entropy(LABELS.flip(0)),
        [LossTerm("labels", 3, 0.7), LossTerm("labels", 3, 0.3)],
    ),
    "in float32": (lambda: cross_entropy(LABELS).float(), [LossTerm("labels", 3)]),
    "an image": (of_an_image, [LossTerm("labels", 3)]),
    "a sum": (summed, [LossTerm("cross-entropies", 1)]),
    "a sum over a number": (lambda: summed() / 7, [LossTerm("cross-entropies", 7)]),
    "a sum over a tensor": (lambda: summed() / torch.tensor(7), [LossTerm("cross-entropies", 7)]),
    "a mean by hand": (lambda: of_each_label().mean(), [LossTerm("cross-entropies", 4)]),
    "a mean of two": (mean_of_two, [LossTerm("labels", 6), LossTerm("labels", 6)]),
    "beside another": (lambda: cross_entropy(LABELS) + logits().square().mean(), [LossTerm("labels", 3)]),
    "weighed by a parameter": (lambda: torch.ones((), requires_grad=True) * cross_entropy(LABELS), []),
    "not linear": (lambda: cross_entropy(LABELS).square(), []),
    "a mean of others": (lambda: logits().square().mean(), []),
    "a sum of others": (lambda: logits().square().sum() / 5, [LossTerm("numbers", 5)]),
    "a mean of means": (lambda: logits().square().mean(-1).mean(), []),
    "a mean of sums": (lambda: logits().square().sum(-1).mean(), []),
    "a mean of sums of cross-entropies": (
        lambda: of_each_label().view(2, 2).sum(-1).mean(),
        [LossTerm("cross-entropies", 2)],
    ),
    "a masked sum": (lambda: (logits().square() * SOFT).sum() / SOFT.sum(), [LossTerm("numbers", 4)]),
}


def test_a_dispatch_mode_does_not_disturb() -> None:
    """In it torch cannot read the tensors that it has made of Python numbers."""
    with FlopCounterMode(display=False):
        assert loss_terms(cross_entropy(LABELS) / 7) == []
        assert loss_terms(cross_entropy(LABELS)) == [LossTerm("labels", 3)]


@pytest.mark.parametrize(("loss", "terms"), TERMS.values(), ids=TERMS)
def test_what_a_loss_divides_by(loss: Callable[[], Tensor], terms: list[LossTerm]) -> None:
    """Of a release of torch that names its functions otherwise, nothing would be known."""
    assert loss_terms(loss()) == terms
