"""Checkpoints are written as the engine writes them, and a resumed run ends where the uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint.checkpoints import AdamModule, Saves, adamw, deviation
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import CASE, TOLERANCE, loader, make_trainer

ACCUMULATE = 3
OTHER_SEED = CASE.seed + 2
ENGINES: dict[str, dict[str, Any]] = {
    "kept": {"reshard_during_accumulation": False},
    "resharded": {"reshard_during_accumulation": True},
    "offloaded": {"cpu_offload": True},
    "ddp": {"data_parallel": "ddp"},
}


class Unscheduled(AdamModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def _fit(options: dict[str, Any], module: ModelModule, **kwargs: Any) -> tuple[Trainer, ModelModule]:
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, **kwargs)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, module


def _resume(options: dict[str, Any], folder: str) -> tuple[Any, ...]:
    """An epoch, a checkpoint, and another epoch in a new run that starts from other weights; and both in one run."""
    path = Path(folder) / "end.ckpt"
    trainer, _ = _fit(options, AdamModule())
    trainer.save_checkpoint(path)
    resumed_trainer, resumed = _fit(options, AdamModule(OTHER_SEED), max_epochs=2, ckpt_path=path)
    assert resumed_trainer.global_step == 6
    _, uninterrupted = _fit(options, AdamModule(), max_epochs=2)
    return full_weights(resumed.model), full_weights(uninterrupted.model), path.is_dir(), path.is_file()


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_resumes_where_it_stopped(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Weights, optimizer state, schedule and counters come back; a sharded model writes a directory, DDP one file."""
    for resumed, uninterrupted, is_directory, is_file in pool2.run(_resume, options, str(tmp_path)):
        assert deviation(resumed, uninterrupted) <= TOLERANCE
        sharded = options.get("data_parallel") != "ddp"
        assert (is_directory, is_file) == (sharded, not sharded)


def _save_before_the_first_step(
    options: dict[str, Any], folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    path = Path(folder) / "early.ckpt"
    _, saving = _fit(options, Unscheduled(), callbacks=[Saves("on_train_batch_end", 2, path)])
    module = Unscheduled(OTHER_SEED)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    return full_weights(saving.model), full_weights(module.model)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_saving_before_the_first_step_changes_nothing(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """No step of Adam is counted that nobody made, no gradient of the open window is lost, and the file can be read."""
    expected = plain_weights(AdamModule().model, ACCUMULATE, make_optimizer=adamw)
    for weights, validated in pool2.run(_save_before_the_first_step, options, str(tmp_path)):
        assert deviation(weights, expected) <= 1e-11
        assert deviation(validated, full_weights(AdamModule().model)) == 0


def _fit_with_the_trainers_own_checkpointing(folder: str) -> tuple[str, bool]:
    trainer, module = _fit({}, AdamModule(), enable_checkpointing=True, default_root_dir=folder)
    path = trainer.checkpoint_callback.best_model_path
    loaded = AdamModule(OTHER_SEED)
    make_trainer(AutomodelStrategy()).validate(loaded, loader(), ckpt_path=path, verbose=False)
    return path, deviation(full_weights(loaded.model), full_weights(module.model)) == 0


def test_default_checkpointing(pool2: RankPool, tmp_path: Path) -> None:
    """What a Trainer does without being asked leaves one sharded checkpoint of the last step, the same on all ranks."""
    ((path, is_bitwise),) = set(pool2.run(_fit_with_the_trainers_own_checkpointing, str(tmp_path)))
    assert is_bitwise
    assert Path(path).is_dir()
    assert Path(path).parent == tmp_path / "checkpoints"
    assert "step=3" in path


def _error_of_missing_checkpoint(options: dict[str, Any], folder: str) -> str:
    with pytest.raises(CheckpointError, match="No such file or directory") as raised:
        _fit(options, AdamModule(), ckpt_path=Path(folder) / "missing.ckpt")
    return str(raised.value)


@pytest.mark.parametrize("options", [ENGINES["kept"], ENGINES["ddp"]], ids=["fsdp2", "ddp"])
def test_a_missing_checkpoint_raises_on_every_rank(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    for message in pool2.run(_error_of_missing_checkpoint, options, str(tmp_path)):
        assert "missing.ckpt" in message


class NoOptimizer(AdamModule):
    """Trains nothing, as a run that gathers statistics does."""

    def configure_optimizers(self) -> None:
        return None


def _go_on_without_optimizer(options: dict[str, Any], other: dict[str, Any], folder: str) -> int:
    path = Path(folder) / "run.ckpt"
    trainer, _ = _fit(options, NoOptimizer())
    trainer.save_checkpoint(path)
    trainer, module = _fit(other, NoOptimizer(), ckpt_path=path, max_epochs=2)
    assert deviation(full_weights(module.model), full_weights(NoOptimizer().model)) == 0
    return trainer.current_epoch


@pytest.mark.parametrize("options", [ENGINES["kept"], ENGINES["ddp"]], ids=["fsdp2", "ddp to fsdp2"])
def test_no_optimizer(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """`configure_optimizers` that returns None: saved, and resumed from."""
    assert pool2.run(_go_on_without_optimizer, options, ENGINES["kept"], str(tmp_path)) == [2, 2]
