"""A fit that is stopped again and again, anywhere, ends as if it had never been stopped."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_automodel import AutomodelStrategy
from tests.launch import launched
from tests.rank_pool import RankPool
from tests.resume.resuming import (
    Calm,
    Learner,
    Recorder,
    Setting,
    Stop,
    differences,
    differences_of_weights,
    run,
    training_loader,
)
from tests.resume.test_stops import Writes

DDP = {"data_parallel": "ddp"}
FSDP2 = {"data_parallel": "fsdp2"}
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
        self.when = when
        self.calls = 0
        setattr(self, hook, self._called)

    def _called(self, trainer: Trainer, *args: Any) -> None:
        self.calls += not trainer.sanity_checking
        if self.calls == self.when and not trainer.sanity_checking:
            raise Stop


def stopped_again_and_again(setting: Setting, folder: Path, stops: list[StopAt]) -> list[str]:
    """Runs on every rank: what differs from a fit that is not stopped.

    After a "kill" the fit goes on from what ModelCheckpoint wrote last, otherwise from what the exception
    left.
    """
    expected = run(setting, ModelCheckpoint(folder / "whole", every_n_train_steps=1))[1]
    path = None
    for index, (hook, when, kind) in enumerate([*stops, ("on_fit_end", 0, "")]):
        saves = ModelCheckpoint(folder / f"{index}", every_n_train_steps=1, save_last=True)
        callbacks = [saves, OnExceptionCheckpoint(folder, f"raised{index}")] if kind == "raise" else [saves]
        try:
            ended, found = run(
                setting, Ends(hook, when), *callbacks, seed=index + 1 if path else 1, ckpt_path=path
            )
        except Stop:
            written = folder / f"raised{index}.ckpt" if kind == "raise" else folder / f"{index}/last.ckpt"
            path = written if written.exists() else path
        else:
            # An exception loses what was logged. Of a fit that was over, no more than its state dicts are
            # loaded, and these hold the first rank's buffers.
            if any(kind == "raise" for *_, kind in stops):  # within windows, which are begun again
                return differences_of_weights(expected, found)
            left_out = ("metrics",) if ended.logger.lines else ("metrics", "random", "seen", "statistics")
            return [name for name in differences(expected, found) if not name.startswith(left_out)]
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
    module = Learner
    kind = "kill"
    if seed % 2 == 0:
        module = Calm
        kind = "raise"
        loader = f"quiet {rng.choice(('distributed', 'own generator'))}"
    learner = {"optimizer": rng.choice(["adamw", "sgd"])}
    setting = Setting(rng.choice([DDP, FSDP2]), trainer, learner, module, loader)
    stops = [(rng.choice(HOOKS), rng.randint(1, 5), kind) for _ in range(rng.randint(2, 5))]
    return setting, stops


IN_A_WINDOW = [("on_after_backward", 5, "raise"), ("on_after_backward", 2, "raise")]


@pytest.mark.parametrize("engine", [pytest.param(DDP, marks=pytest.mark.sweep), FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.timeout(400)
def test_within_the_first_window_again(pool2: RankPool, engine: dict[str, Any], tmp_path: Path) -> None:
    """Each later checkpoint, too, holds where the loader was when the window began."""
    trainer = {"precision": "64-true", "accumulate_grad_batches": 3, "max_epochs": 1, "limit_val_batches": 0}
    setting = Setting(engine, trainer, module=Calm, loader="quiet own generator")
    for differing in pool2.run(stopped_again_and_again, setting, tmp_path, IN_A_WINDOW, timeout_s=300):
        assert differing == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(80))
@pytest.mark.timeout(700)
def test_random_sequence(pool2: RankPool, seed: int, tmp_path: Path) -> None:
    setting, stops = drawn(seed)
    for differing in pool2.run(stopped_again_and_again, setting, tmp_path, stops, timeout_s=600):
        assert differing == [], (setting, stops)


class Kills(Ends):
    """Kills this rank, or ends all, in a hook."""

    def __init__(self, hook: str, when: int, is_signal: bool) -> None:
        super().__init__(hook, when)
        self.is_signal = is_signal

    def _called(self, trainer: Trainer, *args: Any) -> None:
        try:
            super()._called(trainer)
        except Stop:
            if not self.is_signal:
                os._exit(7)
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, name: str, seed: int, stop: StopAt | None = None, ckpt_path: Path | None = None
) -> None:
    """A program: fit on two ranks, which it starts or which run it, until the stop; save each step."""
    trainer = Trainer(
        strategy=AutomodelStrategy(start_method="fork", timeout=1),
        accelerator="cpu",
        devices=2,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=random.Random(seed).randint(1, 4),
        logger=Recorder(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            Writes(folder, name, seed=1 if ckpt_path is None else 2),
            *([] if stop is None else [Kills(stop[0], stop[1], stop[2] == "raise")]),
            ModelCheckpoint(folder / name, every_n_train_steps=1, save_last=True),
        ],
        plugins=[LightningEnvironment()] if torch.distributed.is_initialized() else None,
    )
    trainer.fit(Learner(), training_loader("global generator", 0, 1), ckpt_path=ckpt_path)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.timeout(1500)
def test_killed_again_and_again(pool2: RankPool, seed: int, tmp_path: Path) -> None:
    """New processes each time, of which one or all are killed."""
    pool2.run(train, tmp_path, name="whole", seed=seed, timeout_s=200)
    stops = [stop for stop in drawn(seed)[1] if "validation" not in stop[0]]
    path = None
    for index, stop in enumerate([*stops, None]):
        status = launched.run(train, tmp_path, name=f"run{index}", seed=seed, stop=stop, ckpt_path=path)
        if status == 0:
            break
        written = tmp_path / f"run{index}" / "last.ckpt"
        path = written if written.exists() else path
    assert status == 0
    for rank in range(2):
        whole, resumed = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("whole", f"run{index}"))
        assert all(
            torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items()
        )
