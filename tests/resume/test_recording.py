"""Loaders that go on by the indices of their sampler."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from lightning_automodel.resume.dataloaders import RecordingSampler
from tests.rank_pool import RankPool
from tests.resume.resuming import (
    NUM_SAMPLES,
    Drawing,
    Learner,
    Saver,
    Setting,
    Still,
    collate,
    make_trainer,
    run,
)
from tests.resume.test_dataloaders import Recorded


def resumed_with_batch_size(folder: Path) -> list[str]:
    """Runs on every rank: how fits end that go on with another batch size, and as many batches."""
    setting = Setting({"data_parallel": "ddp"}, {"max_epochs": 1, "limit_val_batches": 0})
    found = []
    for name, save_in in (("within", "on_train_batch_end"), ("at the end", "on_train_epoch_end")):
        path = folder / f"{name}.ckpt"
        trainer = make_trainer(setting, [Saver(save_in, 1, path)])
        trainer.fit(Learner(), DataLoader(Subset(Still(), range(10)), batch_size=7, collate_fn=collate))
        again = make_trainer(replace(setting, trainer={**setting.trainer, "max_epochs": 2}), [])
        other = DataLoader(Subset(Still(), range(10)), batch_size=6, collate_fn=collate)
        try:
            again.fit(Learner(), other, ckpt_path=path)
            found.append("resumed")
        except ValueError as error:
            found.append(str(error))
    return found


def test_other_batch_size(pool1: RankPool, tmp_path: Path) -> None:
    """Ten samples are two batches of seven, or of six: after the first one, a sample would never be seen."""
    ((within, at_the_end),) = pool1.run(resumed_with_batch_size, tmp_path)
    assert "[('indices', 2, 6)], and the checkpoint holds [('indices', 2, 7)]" in within
    assert at_the_end == "resumed"


def single_rows_under_another_seed(folder: Path) -> tuple[list[float], list[float]]:
    """Runs on every rank: sums of the batches of a fit, and of one that is resumed while PL_GLOBAL_SEED differs."""
    setting = Setting({"data_parallel": "ddp"}, loader="single rows", module=Recorded)
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
    recorder.iteration = (None, 0)
    recorder.skipped = 2
    random.seed(3)
    assert list(loader.sampler) == expected
