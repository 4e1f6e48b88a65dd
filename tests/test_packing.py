"""Documents packed by `examples/packing.py` are as apart, and count as much, as in rows of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel import token_loss
from lightning_automodel.gradients.token_loss import TokenWeighting
from tests.trainer.exactness import VOCABULARY, Batch, relative_error
from tests.trainer.hugging_face import untied_llama

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


def sums(model: Any, batch: Batch, use_cache: bool = False) -> tuple[Tensor, Tensor]:
    """[] loss and count, as README has it."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=use_cache).last_hidden_state
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


def test_as_in_rows_of_their_own() -> None:
    """Loss, count and gradients; with a cache, documents would see those before them."""
    packed_model = untied_llama()
    model = untied_llama()
    packed = Packer(LENGTH)(documents())
    loss, count = sums(packed_model, packed)
    alone = [sums(model, {name: value[None] for name, value in each.items()}) for each in documents()]
    assert count == sum(int(each_count) for _, each_count in alone)
    assert count == TokenWeighting(label_shift=1).count(packed)
    expected = torch.stack([each for each, _ in alone]).sum()
    assert relative_error(loss, expected) <= 1e-7  # norms compute in float32
    assert relative_error(sums(model, packed, use_cache=True)[0], expected) > 1e-4
    loss.backward()
    expected.backward()
    for actual, wanted in zip(packed_model.parameters(), model.parameters(), strict=True):
        assert relative_error(actual.grad, wanted.grad) <= 1e-6
