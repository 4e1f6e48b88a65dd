"""Every kind of training loader goes on where it stood when the checkpoint was written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool
from tests.resume.resuming import (
    Calm,
    Learner,
    Saver,
    Setting,
    StatefulDataLoader,
    compare,
    run,
)

WINDOWS = {"precision": "64-true", "accumulate_grad_batches": 2}
STOPS = (("on_train_batch_end", 4), ("on_train_epoch_end", 1))
REPEATED = (("on_train_batch_end", 3), ("on_train_batch_start", 8), ("on_after_backward", 11))


@pytest.mark.sweep
@pytest.mark.parametrize("loader", ["single rows", "workers", "persistent workers", "stateful"])
@pytest.mark.timeout(700)
def test_loader(pool2: RankPool, loader: str, tmp_path: Path) -> None:
    """Those that the search does not draw; a rank of the pool waits seconds for each worker to end."""
    if loader.startswith("stateful") and StatefulDataLoader is None:
        pytest.skip("torchdata is not installed")
    setting = Setting({"data_parallel": "ddp"}, WINDOWS, loader=loader)
    stops = (*STOPS, ("on_train_batch_end", 9 if loader == "stateful" else 10))
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=600):
        assert differing == []


@pytest.mark.parametrize("loader", ["quiet stateful stream", "quiet workers", "quiet stateful"])
@pytest.mark.timeout(700)
def test_window_begins_again(pool2: RankPool, loader: str, tmp_path: Path) -> None:
    """No batch is missed in the weights, and none is used twice. The loop draws one batch of a stream ahead."""
    if "stateful" in loader and StatefulDataLoader is None:
        pytest.skip("torchdata is not installed")
    trainer = {"precision": "64-true", "accumulate_grad_batches": 4}
    setting = Setting({"data_parallel": "ddp"}, trainer, module=Calm, loader=loader)
    for differing in pool2.run(compare, setting, tmp_path, *REPEATED, timeout_s=600):
        assert differing == []


class Drawing(Learner):
    def training_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return {"loss": loss, "num_label_tokens": int((batch["labels"] != -100).sum())}


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_step_that_draws_its_batches(pool2: RankPool, tmp_path: Path) -> None:
    setting = Setting({"data_parallel": "ddp"}, {"precision": "64-true"}, module=Drawing)
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
    setting = Setting({"data_parallel": "ddp"}, {"limit_train_batches": 4}, loader=kind)
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


@pytest.mark.parametrize("kind", ["wrapped stateful", "iterable", "max_size_cycle", "own iteration"])
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
