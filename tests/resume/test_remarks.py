"""What is said of a checkpoint that does not resume where it was saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state

MIDDLE = "was saved in the middle of an accumulation window"
HELD = "was saved while an optimizer held gradients that it has not stepped with"


class Saves(pl.LightningModule):
    """Saves after each of the batches in ``after``."""

    def __init__(self, folder: Path, after: set[int]) -> None:
        super().__init__()
        self.folder, self.after = folder, after
        self.model = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.model(batch).square().mean(), "num_label_tokens": 1}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.after:
            self.trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adversaries(Saves):
    """The backward of the second optimizer leaves gradients in the first, as a generator's in its discriminator."""

    def __init__(self, folder: Path, after: set[int], zeroes: bool) -> None:
        super().__init__(folder, after)
        self.automatic_optimization, self.zeroes = False, zeroes
        self.other = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.model(self.other(batch)).square().mean(), num_label_tokens=1)
            optimizer.step()
        if self.zeroes:
            for parameter in self.parameters():
                parameter.grad = None

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model, self.other)]


def _said(module: Saves, caplog: pytest.LogCaptureFixture) -> list[str]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=1 if isinstance(module, Adversaries) else 3,
        strategy=AutomodelStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(module, DataLoader(torch.randn(6, 1, 2), batch_size=None))
    destroy_global_state()
    return [message for message in caplog.messages if MIDDLE in message or HELD in message]


def test_mid_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is named once it is there. Nothing is said where a window has ended."""
    (said,) = _said(Saves(tmp_path, {2, 4, 5}), caplog)
    assert said.startswith(f"{tmp_path / '4.ckpt'} {MIDDLE}")
    assert "at batch 3 of epoch 0" in said
    assert (tmp_path / "4.ckpt").exists()


@pytest.mark.parametrize("zeroes", [False, True])
def test_gradients_of_another_optimizer(zeroes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, and not where no gradient is left."""
    said = _said(Adversaries(tmp_path, {1, 2}, zeroes), caplog)
    assert [message.startswith(f"{tmp_path / '1.ckpt'} {HELD}") for message in said] == [True] * (not zeroes)
