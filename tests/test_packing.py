"""Documents packed by `examples/packing.py` are as apart, and count as much, as in rows of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel import AutomodelStrategy, token_loss
from lightning_automodel.gradients.token_loss import TokenWeighting
from tests.rank_pool import RankPool
from tests.trainer.exactness import VOCABULARY, Batch, Outcome, full_weights, relative_error, weight_error
from tests.trainer.hugging_face import OwnLoss, untied_llama
from tests.trainer.plain import prefixed, sgd
from tests.trainer.runs import TOLERANCE, make_trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from packing import Document, Packer

LENGTH = 16
SIZES = [3, 7, 5, 2, 6, 1, 4]


def documents(seed: int = 0) -> list[Document]:
    """Random tokens, of which a prompt of one to three carries no label."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in SIZES:
        input_ids = torch.randint(VOCABULARY, (size,), generator=generator)
        labels = input_ids.clone()
        labels[: 1 + size % 3] = -100
        if size > 4:
            labels[0] = input_ids[0]  # which nothing predicts
        made.append({"input_ids": input_ids, "labels": labels})
    return made


def sums(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """[] loss and count, as README has it."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    return token_loss(hidden, model.lm_head, labels, label_shift=1)


def test_rows() -> None:
    """Every document once, whole, at positions of its own; rows are full but for the last ones."""
    batch = Packer(LENGTH, pad_token=9)(documents())
    assert batch["input_ids"].shape == (2, 16)
    assert batch["position_ids"].tolist() == [
        [*range(7), *range(6), *range(3)],
        [*range(5), *range(4), *range(2), *range(1), *range(4)],
    ]
    assert batch["input_ids"][1, 12:].tolist() == [9] * 4
    found = sorted(batch["input_ids"][batch["position_ids"] == 0].tolist())
    assert found == sorted([*(int(document["input_ids"][0]) for document in documents()), 9])
    assert (batch["labels"][batch["position_ids"] == 0] == -100).all()


def test_a_document_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="A document of 7 tokens does not fit into rows of 6"):
        Packer(6)(documents())


def test_documents_do_not_see_each_other() -> None:
    """Other tokens in the first document change nothing in those behind it; with a cache they do."""
    model = untied_llama()
    batch = Packer(LENGTH)(documents())
    batch.pop("labels")
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, :7] = (batch["input_ids"][0, :7] + 1) % VOCABULARY
    before, after = (model(**each, use_cache=False).logits for each in (batch, changed))
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.equal(before[0, :7], after[0, :7])
    before, after = (model(**each, use_cache=True).logits for each in (batch, changed))
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_as_in_rows_of_their_own() -> None:
    """Loss, count and gradients."""
    packed_model = untied_llama()
    model = untied_llama()
    packed = Packer(LENGTH)(documents())
    loss, count = sums(packed_model, packed)
    alone = [sums(model, {name: value[None] for name, value in each.items()}) for each in documents()]
    assert count == sum(int(each_count) for _, each_count in alone)
    assert count == TokenWeighting(label_shift=1).count(packed)
    expected = torch.stack([each for each, _ in alone]).sum()
    assert relative_error(loss, expected) <= 1e-7  # norms compute in float32
    loss.backward()
    expected.backward()
    for actual, wanted in zip(packed_model.parameters(), model.parameters(), strict=True):
        assert relative_error(actual.grad, wanted.grad) <= 1e-6


class Packed(OwnLoss):
    """Trains on packed rows."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss, count = sums(self.model, batch)
        return {"loss": loss, "num_label_tokens": count}


def fit_packed() -> dict[str, Tensor]:
    module = Packed(untied_llama())
    rank = torch.distributed.get_rank()
    data = [Packer(LENGTH)(documents(seed)[: 7 - rank]) for seed in (rank, 2 + rank)]
    strategy = AutomodelStrategy(loss_reduction="sum")
    make_trainer(strategy, accumulate_grad_batches=2).fit(
        module, torch.utils.data.DataLoader(data, batch_size=None)
    )
    return full_weights(module)


def test_trained_on_ranks(pool2: RankPool) -> None:
    model = untied_llama()
    optimizer = sgd(model)
    batches = [Packer(LENGTH)(documents(seed)[: 7 - seed % 2]) for seed in range(4)]
    count = 0
    for batch in batches:
        loss, each_count = sums(model, batch)
        loss.backward()
        count += int(each_count)
    for parameter in model.parameters():
        parameter.grad.div_(count)
    optimizer.step()
    for weights in pool2.run(fit_packed):
        assert weight_error(Outcome(weights), prefixed(full_weights(model))) <= TOLERANCE
