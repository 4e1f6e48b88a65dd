"""Every kind of training loader goes on where it stood when the checkpoint was written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.rank_pool import RankPool
from tests.resume.resuming import (
    Learner,
    Saver,
    Setting,
    StatefulDataLoader,
    compare,
    make_trainer,
    run,
    training_loader,
)

WINDOWS = {"precision": "64-true", "accumulate_grad_batches": 2}
STOPS = (
    ("on_train_batch_end", 3),
    ("on_train_batch_end", 4),
    ("on_train_epoch_end", 1),
    ("on_train_batch_end", 9),
)
FEW_STOPS = (("on_train_batch_end", 3), ("on_train_epoch_end", 1), ("on_train_batch_start", 8))
BY_DEFAULT = ("max_size_cycle", "stateful stream")


@pytest.mark.parametrize(
    ("loader", "stops"),
    [
        *((loader, FEW_STOPS) for loader in BY_DEFAULT),
        *(
            pytest.param(
                loader,
                STOPS[:3] if loader == "min_size" else (*STOPS, FEW_STOPS[-1]),
                marks=pytest.mark.sweep,
            )
            for loader in (
                *BY_DEFAULT,
                "single rows",
                "workers",  # a rank of the pool waits seconds for each worker to end
                "persistent workers",
                "min_size",
                "stateful sampler",
                "stateful",
            )
        ),
    ],
)
@pytest.mark.timeout(700)
def test_loader(pool2: RankPool, loader: str, stops: Any, tmp_path: Path) -> None:
    if loader.startswith("stateful") and StatefulDataLoader is None:
        pytest.skip("torchdata is not installed")
    setting = Setting({"data_parallel": "ddp"}, WINDOWS, loader=loader)
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=600):
        assert differing == []


class Drawing(Learner):
    """Draws its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return {"loss": loss, "num_label_tokens": int((batch["labels"] != -100).sum())}


@pytest.mark.sweep
@pytest.mark.parametrize("loader", ["own generator"])
@pytest.mark.timeout(400)
def test_step_that_draws_its_batches(pool2: RankPool, loader: str, tmp_path: Path) -> None:
    setting = Setting({"data_parallel": "ddp"}, {"precision": "64-true"}, module=Drawing, loader=loader)
    for differing in pool2.run(compare, setting, tmp_path, *STOPS, timeout_s=300):
        assert differing == []


def resumed_with(kind: str, other: str, folder: Path) -> str:
    """Runs on every rank: how a fit ends that goes on with another loader."""
    setting = Setting({"data_parallel": "ddp"}, loader=kind)
    path = folder / "stopped.ckpt"
    run(setting, Saver("on_train_batch_end", 5, path))
    try:
        run(replace(setting, loader=other), ckpt_path=path)
    except Exception as error:
        return str(error)
    return "resumed"


def test_fewer_batches(pool2: RankPool, tmp_path: Path) -> None:
    for told in pool2.run(resumed_with, "own generator", "short own generator", tmp_path, timeout_s=120):
        assert told.startswith(
            "The checkpoint was written after batch 5 of 7, and a training loader has 2 now"
        )


def test_loader_of_another_kind(pool2: RankPool, tmp_path: Path) -> None:
    for told in pool2.run(resumed_with, "own generator", "stream", tmp_path, timeout_s=120):
        assert told.startswith(
            "Training loaders go on within an epoch by ['no position'], and the checkpoint holds ['indices']"
        )


class Recorded(Learner):
    """Notes the indices of its batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.started = [*getattr(self, "started", []), batch["input_ids"].sum().item()]


def started_over(folder: Path) -> tuple[list[float], list[float], list[str]]:
    """Runs on one rank: what a stream brings to a fit, and to one that is resumed within the epoch; and warnings."""
    setting = Setting({"data_parallel": "ddp"}, {"max_epochs": 1, "limit_val_batches": 0})
    path = folder / "stopped.ckpt"
    batches = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ckpt_path in (None, path):
            learner = Recorded()
            callbacks = [ModelCheckpoint(folder, "last"), Saver("on_train_batch_end", 2, path)]
            trainer = make_trainer(setting, callbacks[: 1 if ckpt_path else 2])
            trainer.fit(learner, training_loader("stream", 0, 1), ckpt_path=ckpt_path)
            batches.append(learner.started)
    return *batches, [str(warning.message) for warning in caught]


def test_stream_starts_over(pool1: RankPool, tmp_path: Path) -> None:
    """The run says so at its set-up, where anything saves."""
    ((undisturbed, resumed, told),) = pool1.run(started_over, tmp_path, timeout_s=120)
    assert resumed[:2] == undisturbed[:2]
    assert any(
        "starts over with its DataLoader, which is neither a map-style DataLoader nor" in text
        for text in told
    )
