"""What a user is told in one line when a run starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from torch import nn

from lightning_automodel.advice import Advice, summary
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples


def test_summary_is_one_line() -> None:
    """Engine, ranks, dtypes, denominator, and where the rest is."""
    described = {
        "data_parallel": "fsdp2",
        "mesh": {
            "data_parallel_replicate": 1,
            "data_parallel_shard": 4,
            "data_parallel": 4,
            "tensor_parallel": 2,
        },
        "precision": {"trainer": "bf16-mixed"},
        "gradient_denominator": "label token",
    }
    assert summary(described) == (
        "AutomodelStrategy: fsdp2 over data_parallel_shard=4, tensor_parallel=2, precision bf16-mixed,"
        " gradients per label token; trainer.strategy.describe() has the details."
    )


def test_what_gradients_are_divided_by() -> None:
    """One of them, in words that need no plural."""
    assert TokenWeighting().unit == "label token"
    assert TokenWeighting(count_label_tokens=count_samples).unit == "sample"
    assert TokenWeighting(per_token_loss=False).unit == "micro-batch"


@pytest.mark.parametrize(
    ("weight", "weighting", "output", "warns"),
    [
        (torch.ones(3), TokenWeighting(count_label_tokens=count_samples), None, True),
        (torch.ones(3), TokenWeighting(), None, True),
        (torch.ones(3), TokenWeighting(), {"num_label_tokens": 1}, False),
        (torch.ones(3), TokenWeighting(count_label_tokens=len), None, False),
        (torch.ones(3), TokenWeighting(per_token_loss=False), None, False),
        (None, TokenWeighting(), None, False),
        ("sum", TokenWeighting(), None, False),
    ],
)
def test_class_weights_are_no_count_of_labels(
    weight: Any, weighting: TokenWeighting, output: Any, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nn.CrossEntropyLoss(weight=...)` beside a count that weighs every label alike is wrong by a third, silently."""
    said: list[str] = []
    advice = Advice()
    monkeypatch.setattr(advice, "say_once", said.append)
    is_sum = isinstance(weight, str)
    loss = nn.CrossEntropyLoss(torch.ones(3) if is_sum else weight, reduction="sum" if is_sum else "mean")
    model = nn.Sequential(nn.Linear(2, 3), loss)
    for _ in range(2):
        advice.about_class_weights(model, weighting, output)
    assert len(set(said)) == warns
    assert all("Sequential.1 divides by the class weights of its labels" in message for message in said)


class Early(pl.LightningModule):
    def on_fit_start(self) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "callback", "named"),
    [
        (Early(), Timer(), ["Early.on_fit_start"]),
        (pl.LightningModule(), ModelCheckpoint(), []),
    ],
)
def test_hooks_before_a_checkpoint_is_loaded(
    module: pl.LightningModule, callback: Callback, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's own read their states once these are loaded."""
    said: list[str] = []
    advice = Advice()
    monkeypatch.setattr(advice, "say_once", said.append)
    module.trainer = SimpleNamespace(callbacks=[callback])
    advice.about_late_loading(module)
    assert [text.partition(":")[0] for text in said] == named
