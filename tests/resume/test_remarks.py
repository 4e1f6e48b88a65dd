"""What is said of a checkpoint that does not resume exactly, and of saving and loading at odd moments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from tests.trainer.runs import SILENT

HELD = "A checkpoint was saved while an optimizer held gradients that it has not stepped with"


class Saves(pl.LightningModule):
    def __init__(self, folder: Path, after: set[int]) -> None:
        super().__init__()
        self.folder = folder
        self.after = after
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
        self.automatic_optimization = False
        self.zeroes = zeroes
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


def _said(
    module: Saves,
    saves: ModelCheckpoint | None = None,
    ckpt_path: Path | None = None,
    about: str = HELD,
) -> list[str]:
    trainer = pl.Trainer(
        callbacks=saves,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=1 if isinstance(module, Adversaries) else 3,
        strategy=AutomodelStrategy(),
        **{**SILENT, "enable_checkpointing": saves is not None},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.randn(6, 1, 2), batch_size=None), ckpt_path=ckpt_path)
    destroy_global_state()
    return [str(warning.message) for warning in caught if about in str(warning.message)]


class Teaches(Saves):
    def __init__(self, folder: Path, after: set[int]) -> None:
        super().__init__(folder, after)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.teacher.weight.lerp_(self.model.weight.detach(), 0.1)
        super().on_train_batch_end(outputs, batch, batch_idx)


class Clamps(Saves):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.model.weight.clamp_(-0.1, 0.1)
        super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.parametrize("writes", [Teaches, Clamps])
@pytest.mark.parametrize(("after", "times"), [({0, 1}, 1), ({2, 5}, 0)])
def test_parameters_written_within_a_window(
    writes: Callable[[Path, set[int]], Saves], after: set[int], times: int, tmp_path: Path
) -> None:
    """A resumed run writes them twice. Windows are of three batches: between them all is exact."""
    about = (
        "A checkpoint was saved within an accumulation window or a validation, which a resumed run begins"
    )
    assert len(_said(writes(tmp_path, after), about=about)) == times


class Rolls(Saves):
    """Loads a checkpoint in the midst of a fit, and saves."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 3:
            self.trainer.strategy.load_model_state_dict(
                self.trainer.strategy.load_checkpoint(self.folder / "2.ckpt")
            )


def test_weights_loaded_within_a_fit(tmp_path: Path) -> None:
    """What is saved later resumes where the fit is, not where that checkpoint would."""
    _said(Rolls(tmp_path, {2, 5}))
    state = torch.load(tmp_path / "5.ckpt", weights_only=True)["lightning_automodel"]
    assert state["ranks"][0]["at"]["batches"] == 6


class SavesEarly(Saves):
    def on_train_start(self) -> None:
        self.trainer.save_checkpoint(self.folder / "early.ckpt")


def test_saved_before_a_resumed_fit_starts(tmp_path: Path) -> None:
    """It holds what it would have resumed from, as plain data."""
    _said(Saves(tmp_path, {2}))
    _said(SavesEarly(tmp_path, set()), ckpt_path=tmp_path / "2.ckpt")
    first, second = (
        torch.load(tmp_path / name, weights_only=True)["lightning_automodel"]
        for name in ("2.ckpt", "early.ckpt")
    )
    assert str(first) == str(second)


@pytest.mark.parametrize("zeroes", [False, True])
def test_gradients_of_another_optimizer(zeroes: bool, tmp_path: Path) -> None:
    """Said once, and not where no gradient is left."""
    said = _said(Adversaries(tmp_path, {1, 2}, zeroes))
    assert len(said) == (not zeroes)


class BetweenSteps(Adversaries):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.num_steps = 0
        super().training_step(batch, batch_idx)

    def manual_backward(self, *args: Any, **kwargs: Any) -> None:
        if self.num_steps == 1:
            self.trainer.save_checkpoint(self.folder / "between.ckpt")
        self.num_steps += 1
        super().manual_backward(*args, **kwargs)


def test_saved_between_two_optimizers(tmp_path: Path) -> None:
    """A resumed run would not step the second one."""
    assert len(_said(BetweenSteps(tmp_path, set(), zeroes=False))) == 1
