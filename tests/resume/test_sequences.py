"""A fit that is stopped again and again, anywhere, ends as if it had never been stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.rank_pool import RankPool
from tests.resume.resuming import Setting, Stop, differences, run

DDP, FSDP2 = {"data_parallel": "ddp"}, {"data_parallel": "fsdp2"}
HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)
LOADERS = ("distributed", "own generator", "global generator", "stateful")
StopAt = tuple[str, int, str]


class Ends(Callback):
    """Ends the run in a hook, when it is called for the ``when``-th time; ``was_called`` tells whether it did."""

    def __init__(self, hook: str, when: int) -> None:
        self.when, self.calls = when, 0
        setattr(self, hook, self._called)

    def _called(self, trainer: Trainer, *args: Any) -> None:
        self.calls += not trainer.sanity_checking
        if self.calls == self.when and not trainer.sanity_checking:
            raise Stop


def stopped_again_and_again(setting: Setting, folder: Path, stops: list[StopAt]) -> list[str]:
    """Runs on every rank: what differs from a fit that is not stopped.

    After a "kill" the fit goes on from what ModelCheckpoint wrote last, otherwise from what the exception left.
    """
    expected = run(setting, ModelCheckpoint(folder / "whole", every_n_train_steps=1))[1]
    path = None
    for index, (hook, when, kind) in enumerate([*stops, ("on_fit_end", 0, "")]):
        saves = ModelCheckpoint(folder / f"{index}", every_n_train_steps=1, save_last=True)
        callbacks = [saves, OnExceptionCheckpoint(folder, f"raised{index}")] if kind == "raise" else [saves]
        try:
            found = run(setting, Ends(hook, when), *callbacks, seed=index + 1 if path else 1, ckpt_path=path)[1]
        except Stop:
            written = folder / f"raised{index}.ckpt" if kind == "raise" else folder / f"{index}/last.ckpt"
            path = written if written.exists() else path
        else:
            # An exception loses what was logged, and a fit that had ended logs nothing.
            return [name for name in differences(expected, found) if not name.startswith("metrics")]
    raise AssertionError("the last run is not stopped")


def drawn(seed: int) -> tuple[Setting, list[StopAt]]:
    """A random setting, and up to five stops."""
    rng = random.Random(seed)
    trainer = {
        "precision": "64-true",
        "accumulate_grad_batches": rng.randint(1, 4),
        "max_epochs": rng.randint(2, 3),
        "num_sanity_val_steps": 0,
        "val_check_interval": rng.choice([1.0, 0.5, 3]),
    }
    loader = "workers" if seed % 10 == 9 else rng.choice(LOADERS)
    setting = Setting(rng.choice([DDP, FSDP2]), trainer, {"optimizer": rng.choice(["adamw", "sgd"])}, loader=loader)
    stops = [(rng.choice(HOOKS), rng.randint(1, 5), rng.choice(["raise", "kill"])) for _ in range(rng.randint(2, 5))]
    return setting, stops


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.sweep) for seed in range(80)])
@pytest.mark.timeout(700)
def test_random_sequence(pool2: RankPool, seed: int, tmp_path: Path) -> None:
    setting, stops = drawn(seed)
    for differing in pool2.run(stopped_again_and_again, setting, tmp_path, stops, timeout_s=600):
        assert differing == [], (setting, stops)
