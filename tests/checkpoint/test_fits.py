"""Checkpoints are written as the engine writes them, and a resumed run ends where the uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError
from tests.rank_pool import RankPool
from tests.trainer.exactness import Outcome, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import CASE, TOLERANCE, loader, make_trainer

ACCUMULATE = 3
ENGINES: dict[str, dict[str, Any]] = {
    "kept": {"reshard_during_accumulation": False},
    "resharded": {"reshard_during_accumulation": True},
    "offloaded": {"cpu_offload": True},
    "ddp": {"data_parallel": "ddp"},
}
SOME_ENGINES = [
    pytest.param(options, id=name, marks=() if name in ("kept", "ddp") else pytest.mark.sweep)
    for name, options in ENGINES.items()
]


def decoder(seed: int = CASE.seed) -> nn.Module:
    return TinyDecoder(seed).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose epsilon drowns the rounding noise of gradients that are exactly zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


class AdamModule(ModelModule):
    """Adam's moments, and a schedule that depends on the steps made so far."""

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def deviation(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return weight_error(Outcome(weights, None), Outcome(expected, None))


def _fit(
    options: dict[str, Any],
    make_module: type[ModelModule] = ModelModule,
    seed: int = CASE.seed,
    **kwargs: Any,
) -> tuple[Trainer, ModelModule]:
    module = make_module(decoder(seed))
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, **kwargs)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, module


def _resume(options: dict[str, Any], make_module: type[ModelModule], folder: str) -> tuple[Any, ...]:
    """An epoch, a checkpoint, and another epoch in a new run that starts from other weights; and both in one run."""
    path = Path(folder) / "end.ckpt"
    trainer, _ = _fit(options, make_module)
    trainer.save_checkpoint(path)
    resumed_trainer, resumed = _fit(options, make_module, seed=CASE.seed + 2, max_epochs=2, ckpt_path=path)
    assert resumed_trainer.global_step == 6
    _, uninterrupted = _fit(options, make_module, max_epochs=2)
    return full_weights(resumed.model), full_weights(uninterrupted.model), path.is_dir(), path.is_file()


@pytest.mark.parametrize("make_module", [pytest.param(ModelModule, marks=pytest.mark.sweep), AdamModule])
@pytest.mark.parametrize("options", SOME_ENGINES)
def test_resumes_where_it_stopped(
    pool2: RankPool, tmp_path: Path, make_module: type[ModelModule], options: dict[str, Any]
) -> None:
    """Weights, optimizer state, schedule and counters come back; a sharded model writes a directory, DDP one file."""
    for resumed, uninterrupted, is_directory, is_file in pool2.run(
        _resume, options, make_module, str(tmp_path)
    ):
        assert deviation(resumed, uninterrupted) <= TOLERANCE
        if make_module is ModelModule:
            assert deviation(uninterrupted, plain_weights(decoder(), ACCUMULATE, epochs=2)) <= TOLERANCE
        sharded = options.get("data_parallel") != "ddp"
        assert (is_directory, is_file) == (sharded, not sharded)


class SavesBeforeTheFirstStep(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            assert trainer.global_step == 0
            trainer.save_checkpoint(self.path)


class PlainAdamModule(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def _save_before_the_first_step(
    options: dict[str, Any], folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    path = Path(folder) / "early.ckpt"
    _, saving = _fit(options, PlainAdamModule, callbacks=[SavesBeforeTheFirstStep(path)])
    module = PlainAdamModule(decoder(CASE.seed + 2))
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    return full_weights(saving.model), full_weights(module.model)


@pytest.mark.parametrize("options", SOME_ENGINES)
def test_saving_before_the_first_step_changes_nothing(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """No step of Adam is counted that nobody made, no gradient of the open window is lost, and the file can be read."""
    expected = plain_weights(decoder(), ACCUMULATE, make_optimizer=adamw)
    for weights, validated in pool2.run(_save_before_the_first_step, options, str(tmp_path)):
        assert deviation(weights, expected) <= 1e-11
        assert deviation(validated, full_weights(decoder())) == 0


class SavesAtTheStart(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _resume_from_the_start(
    options: dict[str, Any], make_module: type[ModelModule], folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    path = Path(folder) / "start.ckpt"
    _, saving = _fit(options, make_module, callbacks=[SavesAtTheStart(path)])
    _, resumed = _fit(options, make_module, seed=CASE.seed + 2, ckpt_path=path)
    return full_weights(saving.model), full_weights(resumed.model)


@pytest.mark.parametrize(
    "make_module", [pytest.param(ModelModule, marks=pytest.mark.sweep), PlainAdamModule]
)
@pytest.mark.parametrize("options", [ENGINES["kept"], ENGINES["ddp"]], ids=["fsdp2", "ddp"])
def test_resumes_from_before_the_first_step(
    pool2: RankPool, tmp_path: Path, make_module: type[ModelModule], options: dict[str, Any]
) -> None:
    """An optimizer without state is saved and resumed without state, as the learning rate finder and others need."""
    for saving, resumed in pool2.run(_resume_from_the_start, options, make_module, str(tmp_path)):
        assert deviation(resumed, saving) <= TOLERANCE


def _fit_with_default_checkpointing(
    options: dict[str, Any], folder: str
) -> tuple[str, dict[str, Tensor], Any]:
    checkpointing = ModelCheckpoint(dirpath=folder, save_last=True)
    module = ModelModule(decoder())
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[checkpointing],
        enable_checkpointing=True,
        max_epochs=2,
    )
    trainer.fit(module, loader(), loader())
    trained = full_weights(module.model)
    fresh = ModelModule(decoder(CASE.seed + 2))
    make_trainer(AutomodelStrategy(**options)).validate(
        fresh, loader(), ckpt_path=checkpointing.last_model_path, verbose=False
    )
    return checkpointing.best_model_path, trained, full_weights(fresh.model)


@pytest.mark.parametrize("options", [ENGINES["kept"], ENGINES["ddp"]], ids=["fsdp2", "ddp"])
def test_model_checkpoint(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """The callback keeps the newest and a last one: same paths on all ranks, and weights that come back bitwise."""
    paths = set()
    for best, trained, loaded in pool2.run(_fit_with_default_checkpointing, options, str(tmp_path)):
        paths.add(best)
        assert all(torch.equal(trained[name], loaded[name]) for name in trained)
    (best,) = paths
    assert Path(best).is_file() == (options.get("data_parallel") == "ddp")
    assert len(list(tmp_path.glob("epoch*"))) == 1
    assert (tmp_path / "last.ckpt").exists()


def _fit_with_the_trainers_own_checkpointing(folder: str) -> str:
    trainer, _ = _fit({}, enable_checkpointing=True, default_root_dir=folder)
    return trainer.checkpoint_callback.best_model_path


def test_default_checkpointing(pool2: RankPool, tmp_path: Path) -> None:
    """What a Trainer does without being asked leaves one sharded checkpoint of the last step."""
    (path,) = set(pool2.run(_fit_with_the_trainers_own_checkpointing, str(tmp_path)))
    assert Path(path).is_dir()
    assert Path(path).parent == tmp_path / "checkpoints"
    assert "step=3" in path


def _error_of_missing_checkpoint(options: dict[str, Any], folder: str) -> str:
    with pytest.raises(CheckpointError, match="there is no such file or directory") as raised:
        _fit(options, ckpt_path=Path(folder) / "missing.ckpt")
    return str(raised.value)


@pytest.mark.parametrize(
    "options", [ENGINES["kept"], pytest.param(ENGINES["ddp"], marks=pytest.mark.sweep)], ids=["fsdp2", "ddp"]
)
def test_a_missing_checkpoint_raises_on_every_rank(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Naming the path."""
    for message in pool2.run(_error_of_missing_checkpoint, options, str(tmp_path)):
        assert "missing.ckpt" in message


class NoOptimizerModule(ModelModule):
    """Trains nothing, as a run that gathers statistics does."""

    def configure_optimizers(self) -> None:
        return None


def _go_on_without_optimizer(options: dict[str, Any], other: dict[str, Any], folder: str) -> int:
    path = Path(folder) / "run.ckpt"
    trainer, _ = _fit(options, NoOptimizerModule)
    trainer.save_checkpoint(path)
    trainer, module = _fit(other, NoOptimizerModule, ckpt_path=path, max_epochs=2)
    assert deviation(full_weights(module.model), full_weights(decoder())) == 0
    return trainer.current_epoch


@pytest.mark.parametrize(
    ("options", "other"),
    [
        (ENGINES["kept"], ENGINES["kept"]),
        (ENGINES["ddp"], ENGINES["kept"]),
        (ENGINES["kept"], ENGINES["ddp"]),
    ],
    ids=["fsdp2", "ddp to fsdp2", "fsdp2 to ddp"],
)
def test_no_optimizer(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any], other: dict[str, Any]
) -> None:
    """`configure_optimizers` that returns None: saved, and resumed from."""
    assert pool2.run(_go_on_without_optimizer, options, other, str(tmp_path)) == [2, 2]
