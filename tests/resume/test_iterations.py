"""In one process: data that other code iterates too, and what is said of saves from which no fit resumes exactly."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_automodel import AutomodelStrategy, destroy_global_state
from tests.checkpoint.checkpoints import Saves
from tests.rank_pool import RankPool
from tests.resume.resuming import StatefulDataLoader
from tests.trainer.runs import SILENT

NUM_ROWS = 8
needs_torchdata = pytest.mark.skipif(StatefulDataLoader is None, reason="torchdata is not installed")


class Notes(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)
        self.rows: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append(batch.item())
        return {"loss": self.model(batch).square().mean(), "num_label_tokens": 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peeks(Callback):
    """Looks at a batch of the training data within an epoch, and once at all of it."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            next(iter(trainer.train_dataloader))
        if batch_idx == 3:
            list(trainer.train_dataloader)


class PeeksInData(pl.LightningDataModule):
    """Looks at the training data in a hook of its own, which has no name for Lightning."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self.batches = 0

    def train_dataloader(self) -> Any:
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches += 1
        if self.batches % NUM_ROWS == 3:
            next(iter(self.trainer.train_dataloader))
        return batch


def _fit(
    module: pl.LightningModule,
    loader: Any,
    *callbacks: Callback,
    validated: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> list[str]:
    torch.manual_seed(5 if ckpt_path is None else 6)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    trainer = pl.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=1,
        strategy=AutomodelStrategy(),
        **SILENT,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader, validated, ckpt_path=ckpt_path)
        finally:
            destroy_global_state()
    return [str(warning.message) for warning in caught]


def _rows(cls: Any = DataLoader, workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(3)
    rows = torch.arange(float(NUM_ROWS))[:, None]
    return cls(rows, batch_size=1, shuffle=True, generator=generator, num_workers=workers)


@pytest.mark.parametrize(
    ("looks", "workers", "epoch"), [("callback", 0, 0), ("callback", 1, 1), ("data", 0, 1)]
)
def test_code_that_looks_at_the_data(looks: str, workers: int, epoch: int, tmp_path: Path) -> None:
    """Its iterations are not taken for those of training."""
    whole, resumed = Notes(), Notes()
    after = epoch * NUM_ROWS + 5
    path = tmp_path / "stopped.ckpt"
    callbacks: list[Callback] = [Peeks()] if looks == "callback" else []
    loaders = [_rows(workers=workers) for _ in range(2)]
    if looks == "data":
        loaders = list(map(PeeksInData, loaders))
    _fit(whole, loaders[0], *callbacks, Saves("on_train_batch_end", after, path))
    _fit(resumed, loaders[1], *callbacks, ckpt_path=path)
    assert resumed.rows[: NUM_ROWS - 5] == whole.rows[after : (epoch + 1) * NUM_ROWS]


@pytest.mark.parametrize("every", [3, 4])
def test_data_that_is_validated_too(every: int, tmp_path: Path) -> None:
    """One loader for both, of which a validation within the epoch draws another order."""
    whole, resumed = Notes(), Notes()
    path = tmp_path / "stopped.ckpt"
    loader = _rows()
    _fit(whole, loader, Saves("on_train_batch_end", 5, path), validated=loader, val_check_interval=every)
    loader = _rows()
    _fit(resumed, loader, validated=loader, val_check_interval=every, ckpt_path=path)
    assert whole.rows[5:] == resumed.rows


@needs_torchdata
@pytest.mark.parametrize("looks", ["callback", "data", "validation", None])
def test_state_that_another_iteration_changes(looks: str | None, tmp_path: Path) -> None:
    """It is not that of training any more: said at the save, and refused within an epoch. Alone it resumes."""
    path = tmp_path / "stopped.ckpt"
    loader = _rows(StatefulDataLoader)
    callbacks: list[Callback] = [Saves("on_train_batch_end", 5, path)]
    options: dict[str, Any] = {}
    if looks == "callback":
        callbacks.append(Peeks())
    if looks == "data":
        loader = PeeksInData(loader)
    if looks == "validation":
        options = {"validated": loader, "val_check_interval": 3}
    options["use_distributed_sampler"] = False
    said = _fit(Notes(), loader, *callbacks, **options)
    assert any("from where no run can be resumed" in text for text in said) == (looks is not None)
    if looks is None:
        return
    with pytest.raises(ValueError, match="no position"):
        _fit(Notes(), _rows(StatefulDataLoader), ckpt_path=path, use_distributed_sampler=False)


@needs_torchdata
def test_state_before_the_first_batch(tmp_path: Path) -> None:
    """A save in the first ``on_train_epoch_start`` holds the order that the loader has drawn by then."""
    whole, resumed = Notes(), Notes()
    path = tmp_path / "first.ckpt"
    rows = torch.arange(float(NUM_ROWS))[:, None]
    loaders = [StatefulDataLoader(rows, batch_size=1, shuffle=True) for _ in range(2)]
    options: dict[str, Any] = {"use_distributed_sampler": False}
    _fit(whole, loaders[0], Saves("on_train_epoch_start", 1, path), **options)
    _fit(resumed, loaders[1], ckpt_path=path, **options)
    assert whole.rows == resumed.rows


class GoesOn(IterableDataset):
    """An endless stream whose epochs go on where the last one has ended."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            yield torch.tensor([float(self.position)])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("stream", [True, False])
def test_streams_between_epochs(stream: bool, tmp_path: Path) -> None:
    """That a resumed run begins them anew is said at the save; of rows in memory nothing is."""
    path = tmp_path / "ended.ckpt"
    loader = DataLoader(GoesOn(), batch_size=1) if stream else _rows()
    said = _fit(Notes(), loader, Saves("on_train_epoch_end", 1, path), limit_train_batches=4)
    assert any("the training data is a stream with a state of its own" in text for text in said) == stream


class NeverSteps(Notes):
    """Under manual optimization, without a step; it may keep gradients. SIGTERM comes in the third batch."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.has_backward = backward

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch.item())
        if self.has_backward:
            self.manual_backward(self.model(batch).square().mean(), num_label_tokens=1)
        if batch_idx == 2 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if batch_idx >= 2:
            time.sleep(0.2)  # for the ranks to agree in time


def _stop(backward: bool) -> int:
    module = NeverSteps(backward)
    rows = DataLoader(torch.arange(2.0 * NUM_ROWS)[:, None], batch_size=1)
    trainer = pl.Trainer(
        strategy=AutomodelStrategy(data_parallel="ddp"), accelerator="cpu", devices=2, max_epochs=2, **SILENT
    )
    with pytest.raises(SystemExit):
        trainer.fit(module, rows)
    return len(module.rows)


@pytest.mark.every_case
@pytest.mark.parametrize("backward", [False, True])
def test_never_steps_and_stops(pool2: RankPool, backward: bool) -> None:
    """Soon after SIGTERM; with gradients that no optimizer steps with, at the end of the epoch."""
    first, second = pool2.run(_stop, backward)
    assert first == second
    assert first == NUM_ROWS if backward else 3 <= first < NUM_ROWS


# --- What is said of odd moments --------------------------------------------------------------------------------------


def _said(
    about: str, module: Notes, *savers: Callback, window: int = 3, ckpt_path: Path | None = None
) -> int:
    """How often something is said in an epoch of windows of so many batches."""
    told = _fit(module, _rows(), *savers, ckpt_path=ckpt_path, max_epochs=1, accumulate_grad_batches=window)
    return sum(about in text for text in told)


def _after(folder: Path, *batches: int) -> list[Callback]:
    """Save after each of these batches, before the module's own hook."""
    return [Saves("on_train_batch_end", batch + 1, folder / f"{batch}.ckpt") for batch in batches]


class Adversaries(Notes):
    """The backward of the second optimizer leaves gradients in the first, as a generator's in its discriminator.

    It may save between the two.
    """

    def __init__(self, zeroes: bool = False, path: Path | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.zeroes = zeroes
        self.path = path
        self.other = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            if number == 1 and self.path is not None:
                self.trainer.save_checkpoint(self.path)
            self.manual_backward(self.model(self.other(batch)).square().mean(), num_label_tokens=1)
            optimizer.step()
        if self.zeroes:
            for parameter in self.parameters():
                parameter.grad = None

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model, self.other)]


class Teaches(Notes):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(1, 1).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.teacher.weight.lerp_(self.model.weight.detach(), 0.1)


class Clamps(Notes):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.model.weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("writes", [Teaches, Clamps])
@pytest.mark.parametrize(("after", "times"), [((1, 4), 1), ((2, 5), 0)])
def test_parameters_written_within_a_window(
    writes: type[Notes], after: tuple[int, ...], times: int, tmp_path: Path
) -> None:
    """A resumed run writes them twice. Windows are of three batches: between them all is exact."""
    about = (
        "A checkpoint was saved within an accumulation window or a validation, which a resumed run begins"
    )
    assert _said(about, writes(), *_after(tmp_path, *after)) == times


class Rolls(Notes):
    """Loads a checkpoint in the midst of a fit."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            strategy = self.trainer.strategy
            strategy.load_model_state_dict(strategy.load_checkpoint(self.path))


def test_weights_loaded_within_a_fit(tmp_path: Path) -> None:
    """What is saved later resumes where the fit is, not where that checkpoint would."""
    _said("", Rolls(tmp_path / "2.ckpt"), *_after(tmp_path, 2, 5))
    state = torch.load(tmp_path / "5.ckpt", weights_only=True)["lightning_automodel"]
    assert state["ranks"][0]["at"]["batches"] == 6


def test_saved_before_a_resumed_fit_starts(tmp_path: Path) -> None:
    """It holds what it would have resumed from, as plain data."""
    paths = (tmp_path / "2.ckpt", tmp_path / "early.ckpt")
    _said("", Notes(), *_after(tmp_path, 2))
    _said("", Notes(), Saves("on_train_start", 1, paths[1]), ckpt_path=paths[0])
    first, second = (torch.load(path, weights_only=True)["lightning_automodel"] for path in paths)
    assert str(first) == str(second)


HELD = "A checkpoint was saved while an optimizer held gradients that it has not stepped with"


@pytest.mark.parametrize("zeroes", [False, True])
def test_gradients_of_another_optimizer(zeroes: bool, tmp_path: Path) -> None:
    """Said once, and not where no gradient is left."""
    assert _said(HELD, Adversaries(zeroes), *_after(tmp_path, 1, 2), window=1) == (not zeroes)


def test_saved_between_two_optimizers(tmp_path: Path) -> None:
    """A resumed run would not step the second one."""
    assert _said(HELD, Adversaries(path=tmp_path / "between.ckpt"), window=1) == 1
