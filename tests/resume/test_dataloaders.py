"""Every kind of training loader goes on where it stood when the checkpoint was written."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader, Subset

from lightning_automodel import AutomodelStrategy
from lightning_automodel.resume.dataloaders import RecordingSampler
from tests.rank_pool import RankPool
from tests.resume.resuming import (
    DDP,
    NUM_SAMPLES,
    Calm,
    Drawing,
    Learner,
    Saver,
    Setting,
    StatefulDataLoader,
    Still,
    collate,
    compare,
    make_trainer,
    run,
)
from tests.trainer import runs

STOPS = (("on_train_batch_end", 4), ("on_train_epoch_end", 1))
in_each_run = partial(pytest.param, marks=pytest.mark.every_case)
REPEATED = (("on_train_batch_end", 3), ("on_train_batch_start", 8), ("on_after_backward", 11))


class DrawsItsBatches(Learner):
    def training_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return {"loss": loss, "num_label_tokens": int((batch["labels"] != -100).sum())}


class SetsEpoch(Calm):
    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch + 5)


@pytest.mark.parametrize(
    ("loader", "module", "window", "stops"),
    [
        ("quiet stateful stream", Calm, 4, REPEATED),
        ("quiet stateful", Calm, 4, REPEATED),
        ("quiet workers", Calm, 4, REPEATED),
        ("single rows", Learner, 2, (*STOPS, ("on_train_batch_end", 10))),
        ("workers", Learner, 2, (*STOPS, ("on_train_batch_end", 10))),
        ("persistent workers", Learner, 2, (*STOPS, ("on_train_batch_end", 10))),
        ("quiet used before", Calm, 4, (("on_train_batch_end", 3),)),
        ("stateful", Learner, 2, (*STOPS, ("on_train_batch_end", 9))),
        ("own generator", DrawsItsBatches, 1, STOPS),
        # The epoch of a user's batch sampler is set by nobody but the user.
        in_each_run("quiet own batch sampler", SetsEpoch, 2, (*STOPS, ("on_train_batch_end", 10))),
        # Saved within a last batch that is padding: a save computes the epoch's metrics, which go on.
        in_each_run("quiet distributed", Calm, 4, (("on_train_batch_start", 8),)),
    ],
)
@pytest.mark.timeout(700)
def test_loader(
    pool2: RankPool, loader: str, module: type[Learner], window: int, stops: Any, tmp_path: Path
) -> None:
    """Those that the search does not draw: no batch is missed in the weights, and none is used twice.

    The loop draws one batch of a stream ahead. A rank of the pool waits seconds for each worker to end.
    """
    if "stateful" in loader and StatefulDataLoader is None:
        pytest.skip("torchdata is not installed")
    trainer = {"precision": "64-true", "accumulate_grad_batches": window}
    setting = Setting(DDP, trainer, module=module, loader=loader)
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=600):
        assert differing == []


def resumed_with(kind: str, other: str, folder: Path) -> str:
    """Runs on every rank: how a fit ends that goes on with another loader."""
    setting = Setting(DDP, loader=kind)
    path = folder / "stopped.ckpt"
    run(setting, Saver("on_train_batch_end", 5, path))
    try:
        run(replace(setting, loader=other), ckpt_path=path)
    except Exception as error:
        return str(error)
    return "resumed"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            "short own generator",
            "by (what, number of batches, batch size) [('indices', 2, 2)], and the checkpoint holds"
            " [('indices', 7, 2)]: pass loaders like those that were used",
        ),
        ("stream", "[('no position', None, None)], and the checkpoint holds [('indices', 7, 2)]"),
    ],
)
def test_another_loader(pool2: RankPool, other: str, told: str, tmp_path: Path) -> None:
    for found in pool2.run(resumed_with, "own generator", other, tmp_path, timeout_s=120):
        assert told in found


class Recorded(Learner):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        if not self.trainer.strategy.is_filler:
            self.started = [*getattr(self, "started", []), batch["input_ids"].sum().item()]
        return super().training_step(batch, batch_idx)


def refused(kind: str, folder: Path) -> tuple[list[str], list[str]]:
    """Runs on every rank: what is said of saves, and how fits end that go on within epochs, and after the first."""
    setting = Setting(DDP, {"limit_train_batches": 4}, loader=kind)
    stops = (("on_train_epoch_end", 1), ("on_train_batch_end", 7), ("on_train_batch_start", 8))
    savers = [Saver(hook, when, folder / hook) for hook, when in stops]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(setting, *savers)
    ends = []
    for saver in savers:
        try:
            run(setting, seed=2, ckpt_path=saver.path)
            ends.append("resumed")
        except ValueError as error:
            ends.append(str(error))
    return [str(warning.message) for warning in caught], ends


@pytest.mark.parametrize(
    "kind",
    [
        "wrapped stateful",
        "stream without a state",
        "iterable",
        "max_size_cycle",
        "own iteration",
        "as workers end",
    ],
)
@pytest.mark.every_case
def test_loaders_without_a_position(pool1: RankPool, kind: str, tmp_path: Path) -> None:
    """The first save within an epoch says so, and resuming there is refused; from the end of an epoch it goes on."""
    ((told, ends),) = pool1.run(refused, kind, tmp_path, timeout_s=120)
    about = "A checkpoint was saved within an epoch, from where no run can be resumed: a training loader is"
    assert len([text for text in told if text.startswith(about)]) == 1
    assert ends[0] == "resumed"
    for end in ends[1:]:
        assert "('no position'," in end
        assert "for others use torchdata's StatefulDataLoader" in end


# --- By the indices of their sampler ----------------------------------------------------------------------------------


def resumed_with_batch_size(folder: Path) -> str:
    """Runs on every rank: how a fit ends that goes on with another batch size, and as many batches."""
    setting = Setting(DDP, {"max_epochs": 1, "limit_val_batches": 0})
    saver = Saver("on_train_batch_end", 1, folder / "within.ckpt")
    first, second = (
        DataLoader(Subset(Still(), range(10)), batch_size=size, collate_fn=collate) for size in (7, 6)
    )
    make_trainer(setting, [saver]).fit(Learner(), first)
    with pytest.raises(ValueError, match="Training loaders go on within an epoch by") as raised:
        make_trainer(setting, []).fit(Learner(), second, ckpt_path=saver.path)
    return str(raised.value)


def test_other_batch_size(pool1: RankPool, tmp_path: Path) -> None:
    """Ten samples are two batches of seven, or of six: after the first one, a sample would never be seen."""
    (message,) = pool1.run(resumed_with_batch_size, tmp_path)
    assert "[('indices', 2, 6)], and the checkpoint holds [('indices', 2, 7)]" in message


def single_rows_under_another_seed(folder: Path) -> tuple[list[float], list[float]]:
    """Runs on every rank: sums of the batches of a fit, and of one that is resumed while PL_GLOBAL_SEED differs."""
    setting = Setting(DDP, loader="single rows", module=Recorded)
    path = folder / "stopped.ckpt"
    os.environ["PL_GLOBAL_SEED"] = "5"
    undisturbed, _ = run(setting, Saver("on_train_batch_end", 4, path))
    os.environ["PL_GLOBAL_SEED"] = "6"
    resumed, _ = run(setting, ckpt_path=path, seed=2)
    return undisturbed.lightning_module.started[4:], resumed.lightning_module.started


def test_single_rows_under_another_seed(pool2: RankPool, tmp_path: Path) -> None:
    """Without batches, the sampler is the loader's own."""
    for undisturbed, resumed in pool2.run(single_rows_under_another_seed, tmp_path):
        assert resumed == undisturbed


def test_indices_drawn_one_by_one_on_other_ranks() -> None:
    """Of another number of ranks no random states come back: those that are left out are not drawn again."""
    loader = DataLoader(range(NUM_SAMPLES), sampler=Drawing(6), batch_size=None)
    random.seed(3)
    expected = list(loader.sampler)[2:]
    recorder = RecordingSampler(loader, torch.device("cpu"), lambda: 2)
    recorder.begun = {}
    recorder.skipped = 2
    random.seed(3)
    assert list(loader.sampler) == expected


class WithWorkers(BoringModel):
    """Its loaders have a worker each."""

    def __init__(self, num_rows: int, is_persistent: bool) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.is_persistent = is_persistent
        self.num_workers: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = RandomDataset(32, self.num_rows)
        return DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=self.is_persistent)

    def on_train_epoch_start(self) -> None:
        self.num_workers.append(len(multiprocessing.active_children()))


def _workers(num_rows: int, is_persistent: bool) -> tuple[list[int], int]:
    """Runs on every rank: workers at the start of each epoch, and after the fit, without Python's collector."""
    module = WithWorkers(num_rows, is_persistent)
    gc.collect()
    gc.disable()
    try:
        options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1, "use_distributed_sampler": True}
        runs.make_trainer(AutomodelStrategy(per_token_loss=False), **options).fit(module)
        return module.num_workers, len(multiprocessing.active_children())
    finally:
        gc.enable()


@pytest.mark.each_value
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("num_rows", [12, 13])
def test_workers_end_with_their_loader(pool2: RankPool, num_rows: int, is_persistent: bool) -> None:
    """Also where ranks have unequally many rows."""
    for num_workers, num_left in pool2.run(_workers, num_rows, is_persistent):
        assert max(num_workers) <= 2
        assert num_left <= is_persistent
