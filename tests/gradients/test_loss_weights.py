"""Losses that do not divide by what is counted are told in the first micro-batches, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel import AutomodelStrategy
from lightning_automodel.gradients.loss_graph import LossTerm, loss_terms
from lightning_automodel.gradients.loss_weights import FirstLooks
from lightning_automodel.gradients.token_loss import StepReport, TokenWeighting, count_samples
from tests.gradients.test_foreign_gradients import Batch, Net, Trains, plainly
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import TOLERANCE, make_trainer, warnings_of

CLASSES = 3
WEIGHT = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
SOFT = torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0, 0.5, 0.5], [0.1, 0.9, 0]], dtype=torch.float64)


# --- Two micro-batches tell -------------------------------------------------------------------------------------------


def ce(labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(torch.ones(len(labels), CLASSES, requires_grad=True) * 1.0, labels, **kwargs)


def summed(labels: Tensor) -> Tensor:
    return ce(labels, reduction="sum")


def weighted(labels: Tensor) -> Tensor:
    return ce(labels, weight=WEIGHT.float())


def of_probabilities(labels: Tensor) -> Tensor:
    return ce(SOFT[: len(labels)].float(), weight=WEIGHT.float())


def of_an_image(labels: Tensor) -> Tensor:
    logits = torch.ones(1, CLASSES, len(labels), 1, requires_grad=True) * 1.0
    return F.cross_entropy(logits, labels[None, :, None])


def each(labels: Tensor) -> Tensor:
    return ce(labels, reduction="none")


def squares(labels: Tensor) -> Tensor:
    return torch.ones(len(labels), requires_grad=True).square()


def used(labels: Tensor) -> Tensor:
    return (labels >= 0).sum()


ONE = torch.tensor([0, 2, 2, 1])
OTHER = torch.tensor([1, 0, -100])
Case = tuple[dict[str, Any], Callable[[Tensor], Tensor], Callable[[Tensor], float], str | None]
SAID: dict[str, Case] = {
    "right": ({}, ce, used, None),
    "pixels as images": ({}, lambda y: ce(y.abs() % 3), lambda y: len(y) / 7, None),
    "one sample each": ({}, ce, lambda y: 1, None),
    "class weights": ({}, weighted, lambda y: WEIGHT[y[y >= 0]].sum(), None),
    "class weights as samples": ({}, weighted, len, "weight[labels].sum()"),
    "ignored labels as samples": ({}, ce, len, "ignore_index="),
    "probabilities": ({}, of_probabilities, len, None),
    "probabilities by class weights": (
        {},
        of_probabilities,
        lambda y: (SOFT[: len(y)] @ WEIGHT).sum(),
        "Give what the loss divides by as num_label_tokens",
    ),
    "a mixture": ({}, lambda y: len(y) / 9 * ce(y) + (1 - len(y) / 9) * ce(y.flip(0)), used, None),
    "a sum as a mean": ({}, summed, used, "pass loss_reduction='sum'"),
    "a sum over a factor": ({}, lambda y: summed(y) * (1 / used(y)), used, None),
    "a sum": ({"loss_reduction": "sum"}, summed, used, None),
    "a mean as a sum": ({"loss_reduction": "sum"}, ce, used, "leave it out where"),
    "not counted": ({"per_token_loss": False}, ce, lambda y: 1, None),
    "two divisors": ({}, lambda y: ce(y) + ce(y.abs() % 3), len, "no single count is right"),
    "all ranks' count": (
        {},
        lambda y: summed(y) / 8,
        used,
        "divided by 8 in one micro-batch and by 8 in another, where 4 and 2 label tokens are counted",
    ),
    "boxes of all ranks": ({}, lambda y: squares(y).sum() / (len(y) + 2), len, "as the num_boxes of DETR"),
    "boxes of this rank": ({}, lambda y: squares(y).sum() / torch.tensor(len(y)), len, None),
    "a penalty beside": ({}, lambda y: ce(y) + squares(y).sum() / 2, used, None),
    # Counted by samples, of which one label is ignored: what is read of the graph is told.
    "smoothed": ({}, lambda y: ce(y, label_smoothing=0.1), len, "by 4 in one micro-batch and by 2"),
    "in float64": ({}, lambda y: ce(y).double(), len, "by 4 in one micro-batch and by 2"),
    "an image": ({}, of_an_image, len, "by 4 in one micro-batch and by 2"),
    "a mean of two": ({}, lambda y: torch.stack([ce(y), ce(y)]).mean(), len, "divided by 8"),
    "a masked sum": ({}, lambda y: (squares(y) * (y >= 0)).sum() / used(y), len, "divided by 4"),
    "a mean by hand": ({}, lambda y: each(y).mean(), used, "by 4 in one micro-batch and by 3"),
    "a mean of sums": ({}, lambda y: each(y.repeat(2)).view(2, -1).sum(-1).mean(), used, "divided by 2"),
    # Nothing can be said of these.
    "weighed by a parameter": ({}, lambda y: torch.ones((), requires_grad=True) * ce(y), len, None),
    "not linear": ({}, lambda y: ce(y).square(), len, None),
    "a mean of others": ({}, lambda y: squares(y).mean(), used, None),
    "a mean of means": ({}, lambda y: squares(y.repeat(2)).view(-1, 2).mean(-1).mean(), used, None),
    "a mean of sums of others": ({}, lambda y: squares(y.repeat(2)).view(-1, 2).sum(-1).mean(), used, None),
}


@pytest.mark.parametrize(("options", "loss", "count", "said"), SAID.values(), ids=SAID)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_count_that_contradicts_the_loss_is_told(
    options: dict[str, Any],
    loss: Callable[[Tensor], Tensor],
    count: Callable[[Tensor], float],
    said: str | None,
    accumulate: int,
    as_tensor: bool,
) -> None:
    """Once, in words of what the loss does; nothing is of a release of torch that names its functions otherwise."""
    told: list[str] = []
    looks = FirstLooks(LightningModule(), TokenWeighting(**options))
    for labels in (ONE, OTHER, OTHER, ONE, OTHER):
        number = torch.as_tensor(count(labels)) if as_tensor else float(count(labels))
        told.append(looks.advice(loss(labels) / accumulate, number, accumulate))
    found = list(filter(None, told))
    assert len(found) == (said is not None)
    if said is not None:
        assert said in found[0]


@pytest.mark.parametrize(("num_own", "divisor", "is_told"), [(2, 2, True), (2, 1, False), (1, 1, False)])
def test_a_division_by_the_micro_batches_is_told(num_own: int, divisor: int, is_told: bool) -> None:
    looks = FirstLooks(LightningModule(), TokenWeighting(count_label_tokens=used))
    told = [looks.advice(ce(labels) / divisor, used(labels), 1) for labels in (ONE, OTHER)]
    report = StepReport(*[torch.tensor(7.0)] * 4)
    told.append(looks.advice_after(report, num_own))
    assert ["leave it out" in text for text in told] == [False, False, is_told]


def test_only_the_first_micro_batches_are_looked_at() -> None:
    """The host would wait for an accelerator."""
    looks = FirstLooks(LightningModule(), TokenWeighting(count_label_tokens=count_samples))
    for _ in range(4):
        looks.advice(weighted(ONE), 4, 1)
    unread = torch.empty((), device="meta")
    looks.advice(unread, unread, 1)


# --- Losses of all ranks ----------------------------------------------------------------------------------------------


def errors(net: Net, batch: Batch) -> Tensor:
    """[b] losses, which are no cross-entropies."""
    return (net(batch[0]).sum(1) - batch[1]).square()


class Gathering(Trains):
    """Averages its loss over the ranks in one of several ways."""

    def __init__(self, way: str, is_manual: bool = False) -> None:
        super().__init__()
        self.way = way
        self.automatic_optimization = not is_manual

    def loss(self, batch: Batch) -> Tensor:
        losses = errors(self.net, batch)
        own = losses.mean()
        ranks = dist.get_world_size()
        match self.way:
            case "all_gather":
                return self.all_gather(own, sync_grads=True).mean()
            case "all_reduce":
                return across.all_reduce(own) / ranks
            case "exact":
                parts = self.all_gather(
                    torch.stack([losses.sum(), losses.new_tensor(len(losses))]), sync_grads=True
                )
                return parts[:, 0].sum() / parts[:, 1].sum()
            case "features":
                return self.all_gather(losses.sum(), sync_grads=True).std() + own
        raise AssertionError(self.way)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None


def _train(way: str, is_manual: bool, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights, and what was told of the loss."""
    module = Gathering(way, is_manual)
    trainer = make_trainer(AutomodelStrategy(**{"count": "samples", **options}))
    said = warnings_of("The loss of ", trainer.fit, module)
    return full_weights(module.net), said


def expected(weights_alike: bool) -> dict[str, Tensor]:
    """Weights of one process, by the mean of the ranks' means or by that of all samples."""
    if weights_alike:
        return plainly(1, sums=lambda net, batch: errors(net, batch).mean(), count=lambda batch: 1)
    return plainly(1, sums=lambda net, batch: errors(net, batch).sum())


ENGINES: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}
ALIKE = {"count": None, "per_token_loss": False}
"""Options by which micro-batches weigh the same."""


@pytest.mark.each_value
@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["all_gather", "all_reduce"])
def test_a_loss_of_all_ranks_is_told(pool2: RankPool, way: str, engine: str, is_manual: bool) -> None:
    """And with the option that the text names, gradients are those of the mean that the loss is."""
    (weights, told), _ = pool2.run(_train, way, is_manual, ENGINES[engine])
    assert len(told) == 1
    assert "per_token_loss=False" in told[0]
    assert weight_error(weights, expected(weights_alike=False)) > 1e-3
    for weights, told in pool2.run(_train, way, is_manual, ENGINES[engine] | ALIKE):
        assert weight_error(weights, expected(weights_alike=True)) < TOLERANCE
        assert not told


@pytest.mark.every_case
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_gathered_otherwise_is_not_told(pool2: RankPool, engine: str) -> None:
    """A loss that divides by the samples of all ranks is right; nor are statistics that it is not linear in."""
    for weights, told in pool2.run(_train, "exact", False, ENGINES[engine]):
        assert weight_error(weights, expected(weights_alike=False)) < TOLERANCE
        assert not told
    (_, told), _ = pool2.run(_train, "features", False, ENGINES[engine])
    assert not told


def test_a_dispatch_mode_does_not_disturb() -> None:
    """In it torch cannot read the tensors that it has made of Python numbers."""
    with FlopCounterMode(display=False):
        assert loss_terms(summed(ONE) / 7) == []
        assert loss_terms(ce(ONE)) == [LossTerm("labels", 4)]
