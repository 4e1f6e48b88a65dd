"""The package `pytorch_lightning`, which `lightning` installs beside itself, in place of `lightning`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import pytorch_lightning
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_automodel import AutomodelStrategy, destroy_global_state
from lightning_automodel.sharding.checks import check_callbacks

ALONE = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_checkpointing": False}

WITH_ALIASES = """
import lightning_automodel.alias_pytorch_lightning
import lightning.pytorch
import lightning_fabric.utilities.seed
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel

assert pl is lightning.pytorch and pl.__spec__.name == "lightning.pytorch"
assert lightning_fabric.utilities.seed is lightning.fabric.utilities.seed
try:
    import pytorch_lightning.absent
except ModuleNotFoundError:
    strategy = lightning_automodel.AutomodelStrategy(per_token_loss=False)
    callbacks = [ModelCheckpoint(monitor="train_loss", save_top_k=0)]
    pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, logger=False, callbacks=callbacks).fit(
        BoringModel()
    )
    print(int(strategy.last_step.num_micro_batches))
"""
"""What a library does, once its user has imported the aliases."""


class StepCounter(pytorch_lightning.Callback):
    """A callback of another library, written for either package."""


def test_its_trainer_says_whose_strategy_it_got() -> None:
    """It refuses the strategy before that could say anything; docs/troubleshooting.md has the message."""
    with pytest.raises(ValueError, match=r"<AutomodelStrategy, for lightning\.pytorch\.Trainer alone>"):
        pytorch_lightning.Trainer(strategy=AutomodelStrategy(), **ALONE)


@pytest.mark.parametrize("name", ["ModelCheckpoint", "EarlyStopping"])
def test_its_callbacks_are_refused(name: str) -> None:
    """Before set-up: nothing tells what they are for, and a checkpoint would come before the step's end."""
    callback = getattr(pytorch_lightning.callbacks, name)(monitor="loss")
    trainer = pl.Trainer(strategy=AutomodelStrategy(per_token_loss=False), callbacks=[callback], **ALONE)
    with pytest.raises(
        TypeError, match=rf"{name} comes from pytorch_lightning .* import it from lightning\.pytorch"
    ):
        trainer.fit(BoringModel())
    destroy_global_state()


def test_others_that_derive_from_its_base_are_taken() -> None:
    """Nobody asks what they are: they have hooks, and that is all."""
    check_callbacks([StepCounter()])


@pytest.mark.sweep
def test_aliases() -> None:
    """A library's Trainer, callbacks and modules are then those of `lightning`, each loaded once."""
    ended = subprocess.run([sys.executable, "-c", WITH_ALIASES], capture_output=True, text=True, check=False)
    assert ended.stdout.strip().endswith("1"), ended.stderr


def test_aliases_come_first() -> None:
    """Who has imported the package holds classes that no alias can replace."""
    with pytest.raises(
        ImportError, match=r"pytorch_lightning is already imported: import lightning_automodel\.alias"
    ):
        importlib.import_module("lightning_automodel.alias_pytorch_lightning")
