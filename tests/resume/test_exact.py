"""A fit that is stopped and resumed equals one that never stopped, bit for bit: weights, optimizer, log, randomness."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel.resume import snapshot
from lightning_automodel.resume.dataloaders import TrainingLoaders
from tests.rank_pool import RankPool
from tests.resume.resuming import (
    Learner,
    Saver,
    Setting,
    compare,
    compare_chain,
    make_trainer,
    run,
    training_loader,
)

DDP, FSDP2 = {"data_parallel": "ddp"}, {"data_parallel": "fsdp2"}
DOUBLE = {"precision": "64-true"}
WINDOWS = {"precision": "32-true", "accumulate_grad_batches": 3, "val_check_interval": 2}

EVERYWHERE = (
    ("on_fit_start", 1),
    ("on_train_start", 1),
    ("on_train_epoch_start", 2),
    ("on_train_batch_start", 5),
    ("on_before_optimizer_step", 2),
    ("on_train_batch_end", 2),
    ("on_train_batch_end", 3),
    ("on_train_batch_end", 7),
    ("on_train_batch_end", 10),
    ("on_validation_batch_end", 2),
    ("on_validation_end", 2),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_end", 2),
    ("on_train_end", 1),
)
SOMEWHERE = (("on_train_batch_end", 4), ("on_validation_end", 1), ("on_train_epoch_end", 1))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(FSDP2, WINDOWS, {"schedule": "plateau"}, loader="global generator"),
        Setting(DDP, WINDOWS, {"schedule": "epoch"}, loader="distributed"),
    ],
    ids=["fsdp2", "ddp"],
)
@pytest.mark.timeout(400)
def test_from_everywhere(pool2: RankPool, setting: Setting, tmp_path: Path) -> None:
    """Whatever hook saves, within a window or after it, before a validation or in the midst of it."""
    for differing in pool2.run(compare, setting, tmp_path, *EVERYWHERE, timeout_s=300):
        assert differing == []


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        (FSDP2, "64-true"),
        (FSDP2, "bf16-mixed"),
        (FSDP2, "bf16-true"),
        (FSDP2, "16-true"),
        (DDP, "64-true"),
        (DDP, "bf16-mixed"),
        (DDP, "16-true"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["data_parallel"],
)
@pytest.mark.timeout(400)
def test_precisions(pool2: RankPool, engine: dict[str, Any], precision: str, tmp_path: Path) -> None:
    # AdamW's epsilon is zero in float16: its weights would be NaN.
    setting = Setting(engine, {"precision": precision}, {"optimizer": "sgd"} if precision == "16-true" else {})
    for differing in pool2.run(compare, setting, tmp_path, *SOMEWHERE, timeout_s=300):
        assert differing == []


@pytest.mark.parametrize(
    "setting",
    [
        Setting(DDP, DOUBLE),
        Setting({"data_parallel_replicate_size": 2}, WINDOWS),
        Setting({"tensor_parallel_size": 2}, DOUBLE, {"tensor_parallel": True, "optimizer": "sgd"}),
    ],
    ids=["ddp", "replicas", "tensor parallel"],
)
@pytest.mark.timeout(400)
def test_layouts_of_four_ranks(pool4: RankPool, setting: Setting, tmp_path: Path) -> None:
    for differing in pool4.run(compare, setting, tmp_path, *SOMEWHERE, timeout_s=300):
        assert differing == []


HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)
LOADERS = ("own generator", "global generator", "distributed", "workers", "stream", "max_size_cycle")


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.timeout(400)
def test_random_stops(pool2: RankPool, seed: int, tmp_path: Path) -> None:
    """Stopped twice anywhere, in any setting."""
    rng = random.Random(seed)
    trainer = {
        "precision": rng.choice(["64-true", "32-true", "bf16-mixed", "bf16-true"]),
        "accumulate_grad_batches": rng.randint(1, 4),
        "max_epochs": rng.randint(2, 3),
        "log_every_n_steps": rng.randint(1, 3),
        "num_sanity_val_steps": rng.randint(0, 2),
    }
    loader = rng.choice(LOADERS)
    if loader == "stream":
        trainer |= {"val_check_interval": rng.choice([1.0, 3])}
    else:
        trainer |= {"val_check_interval": rng.choice([1.0, 0.5, 1, 2, 5]), "check_val_every_n_epoch": rng.randint(1, 2)}
    learner = {"schedule": rng.choice(["step", "epoch", "plateau"]), "optimizer": rng.choice(["adamw", "sgd"])}
    learner["schedule"] = learner["schedule"] if trainer.get("check_val_every_n_epoch", 1) == 1 else "step"
    setting = Setting(rng.choice([DDP, FSDP2]), trainer, learner, loader=loader)
    stops = [(rng.choice(HOOKS), rng.randint(1, 9)) for _ in range(2)]
    for differing in pool2.run(compare_chain, setting, tmp_path, *stops, timeout_s=300):
        assert differing == [], (setting, stops)


def compare_without(part: str, *args: Any) -> list[str]:
    """Runs on every rank: the same, with a part of the restoring left out."""
    owner, name = {
        "random states": (snapshot.random_state, "set_to"),
        "loaders": (TrainingLoaders, "remake_at"),
        "metrics": (snapshot.running_metrics.RunningMetrics, "restore"),
        "buffers": (snapshot.PlainBuffers, "restore"),
    }[part]
    kept = getattr(owner, name)
    setattr(owner, name, lambda *_, **__: None)
    try:
        return compare(*args)
    finally:
        setattr(owner, name, kept)


@pytest.mark.parametrize("part", ["random states", "loaders", "metrics", "buffers"])
@pytest.mark.timeout(400)
def test_each_part_is_needed(pool2: RankPool, part: str, tmp_path: Path) -> None:
    """The comparison notices where one is not restored."""
    setting = Setting(FSDP2, DOUBLE, loader="global generator")
    for differing in pool2.run(compare_without, part, setting, tmp_path, ("on_train_batch_start", 5), timeout_s=300):
        assert differing


class Anything:
    """What `weights_only` refuses to load."""


class Keeps(Learner):
    """Saves an object of some class."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["anything"] = Anything()


def resume_with(engine: dict[str, Any], folder: Path, told: bool | None) -> str:
    """Runs on every rank: how a fit ends that is resumed from what holds more than tensors."""
    setting, path = Setting(engine, {"max_epochs": 1}, module=Keeps), folder / f"{engine['data_parallel']}.ckpt"
    run(setting, Saver("on_train_batch_end", 2, path))
    validation = training_loader("own generator", 0, 1)
    try:
        make_trainer(setting, []).fit(Keeps(), validation, validation, ckpt_path=path, weights_only=told)
    except Exception as error:
        return str(error)
    return "resumed"


@pytest.mark.parametrize("engine", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_weights_only_is_heeded(pool2: RankPool, engine: dict[str, Any], tmp_path: Path) -> None:
    """Lightning forgets it where checkpoints are loaded after set-up."""
    assert pool2.run(resume_with, engine, tmp_path, False, timeout_s=120) == ["resumed"] * 2
    for told in pool2.run(resume_with, engine, tmp_path, True, timeout_s=120):
        assert told != "resumed"


def saved_state(folder: Path) -> list[str]:
    """Runs on every rank: what a checkpoint of one file holds, read without unpickling code."""
    compare(Setting(DDP, WINDOWS), folder, ("on_train_batch_end", 2))
    checkpoint = torch.load(folder / "on_train_batch_end-2.ckpt", weights_only=True)
    state = checkpoint["lightning_automodel"]
    return [*state, *(rank["next"] for rank in state["ranks"]), str(state["sizes"]["data_parallel"])]


def test_state_is_plain(pool2: RankPool, tmp_path: Path) -> None:
    """One state a rank, all of it loadable with `weights_only`; in mid-window, the batch that began the window."""
    for told in pool2.run(saved_state, tmp_path, timeout_s=120):
        assert told == ["format", "sizes", "ranks", "batch", "batch", "2"]
