"""`AutomodelStrategy` trains to the weights of one plain loop, however it learns the number of label tokens.

Combinations of options are drawn by `tests/search`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    TOLERANCE,
    Batch,
    TinyDecoder,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, sgd, windows
from tests.trainer.runs import loader, make_trainer

ACCUMULATE = 2
DDP = {"data_parallel": "ddp"}
SHIFTED = Case(seed=6, num_batches=5, gap="micro_batches", label_shift=1)
CASES = {
    "labels": SHIFTED,
    "label_key": replace(SHIFTED, telling="label_key", ignore_index=-1),
    "returned": replace(SHIFTED, telling="returned", gap="rank"),
    "callable": replace(SHIFTED, telling="callable"),
    "nothing_labelled": replace(SHIFTED, gap="everything"),
    "per_micro_batch": replace(SHIFTED, gap="none", per_token_loss=False),
}
Report = tuple[int, int, float]  # label tokens, micro-batches, loss


def token_loss(case: Case, model: Any, batch: Batch, reduction: str) -> Tensor:
    """[] cross entropy over the label tokens; NaN as a mean over none of them."""
    logits = model(batch["input_ids"])[:, : -case.label_shift].flatten(0, 1)
    labels = case.used_labels(batch).flatten()
    return F.cross_entropy(logits, labels, ignore_index=case.ignore_index, reduction=reduction)


class Told(ModelModule):
    """Trains on the mean of a micro-batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(TinyDecoder(case.seed).double())
        self.case = case

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = token_loss(self.case, self.model, batch, "mean")
        if self.case.telling != "returned":
            return loss
        return {"loss": loss, "num_label_tokens": self.case.num_label_tokens(batch)}


def fit(case: Case, options: dict[str, Any]) -> tuple[dict[str, Tensor], Report]:
    """Runs on every rank: the full weights, and the report of the last window."""
    module = Told(case)
    told: dict[str, Any] = {"per_token_loss": case.per_token_loss}
    if case.telling == "callable":
        told["count_label_tokens"] = case.num_label_tokens
    if case.telling.startswith("label"):
        told.update(label_key=case.label_key, ignore_index=case.ignore_index, label_shift=case.label_shift)
    strategy = AutomodelStrategy(**told | options)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, loader(case))
    last = strategy.last_step
    report = int(last.num_label_tokens), int(last.num_micro_batches), float(last.loss)
    return full_weights(module.model), report


def reference(case: Case) -> tuple[dict[str, Tensor], Report]:
    """The plain loop: token losses of a window over all ranks, divided by its label tokens."""
    model = TinyDecoder(case.seed).double()
    optimizer = sgd(model)
    for window in windows(case, ACCUMULATE):
        batches = [by_rank[index] for by_rank in micro_batches(case) for index in window]
        optimizer.zero_grad()
        count = sum(int(case.num_label_tokens(batch)) for batch in batches)
        reduction = "sum" if case.per_token_loss else "mean"
        losses = [token_loss(case, model, batch, reduction) for batch in batches]
        # A sum over no label token is zero, and so is its gradient, whatever it is divided by.
        loss = torch.stack(losses).sum() / (max(count, 1) if case.per_token_loss else len(batches))
        loss.backward()
        optimizer.step()
    return full_weights(model), (count, len(batches), loss.item())


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, DDP], ids=["fsdp2", "ddp"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_equal_one_process(pool2: RankPool, case: Case, options: dict[str, Any]) -> None:
    """Every rank ends with the weights of the plain loop, and reports its last window."""
    expected, (count, num_micro_batches, loss) = reference(case)
    for rank, (weights, report) in enumerate(pool2.run(fit, case, options)):
        error = weight_error(weights, expected)
        assert error <= TOLERANCE, f"rank {rank} is off by {error:.1e} for {case!r}"
        assert report[1] == num_micro_batches
        if case.per_token_loss:
            assert report[0] == count
        if count:
            assert relative_error(report[2], loss) <= TOLERANCE
