"""`load_from_checkpoint` reads directories of shards, ours and Lightning's, and files as it ever did."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core import saving
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_automodel.checkpoint
from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint.checkpoints import ACCUMULATE, AdamModule, batches, load_only
from tests.checkpoint.test_damage import damage
from tests.checkpoint.test_lightning_formats import FOREIGN
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, make_trainer

FORMS: dict[str, dict[str, Any]] = {
    "directory": {},
    "file": {"save_distributed_checkpoint": False},
    "directory of ddp": {"data_parallel": "ddp", "save_distributed_checkpoint": True},
}


class Parametrised(AdamModule):
    """Keeps what it was made with, and counts what was loaded."""

    def __init__(self, seed: int, width: float = 1.5, extra: Any = None) -> None:
        super().__init__(seed)
        self.save_hyperparameters()
        self.loaded: list[str] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = sorted(checkpoint)


class Batches(LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.position = 0

    def train_dataloader(self) -> DataLoader:
        return batches()

    def state_dict(self) -> dict[str, Any]:
        return {"position": 17}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Secret:
    """No plain data."""


def _save(options: dict[str, Any], path: str, extra: Any = None) -> dict[str, Tensor]:
    module = Parametrised(seed=4, width=2.5, extra=extra)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, datamodule=Batches(size=3))
    trainer.save_checkpoint(path)
    return full_weights(module.model)


def _assert_holds(module: Parametrised, weights: dict[str, Tensor]) -> None:
    assert weights.keys() == dict(module.model.named_parameters()).keys()
    assert all(torch.equal(value, weights[name]) for name, value in module.model.named_parameters())


@pytest.mark.parametrize("form", FORMS)
def test_module_and_datamodule(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Weights bitwise, hyperparameters and the hook as with a file; what is passed replaces what was saved."""
    path = tmp_path / "run.ckpt"
    weights, _ = pool2.run(_save, FORMS[form], str(path))
    assert path.is_dir() == (form != "file")
    module = Parametrised.load_from_checkpoint(path)
    _assert_holds(module, weights)
    assert (module.hparams.seed, module.hparams.width) == (4, 2.5)
    assert {"state_dict", "epoch", "loops", "callbacks", "lr_schedulers"} <= set(module.loaded)
    assert ("optimizer_states" in module.loaded) == (form == "file")
    assert Parametrised.load_from_checkpoint(str(path), width=9.0).hparams.width == 9.0

    datamodule = Batches.load_from_checkpoint(path)
    assert (datamodule.hparams.size, datamodule.position) == (3, 17)


def test_where_tensors_go(pool2: RankPool, tmp_path: Path) -> None:
    """Where `map_location` says, if it is a device; else they stay on the host."""
    path = str(tmp_path / "run.ckpt")
    pool2.run(_save, {}, path)
    for device in ("meta", torch.device("meta")):
        found = saving.pl_load(path, map_location=device)["state_dict"]
        assert {tensor.device.type for tensor in found.values()} == {"meta"}
    found = saving.pl_load(path, map_location=lambda storage, _: storage)["state_dict"]
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}


def test_lightnings_own_directories(pool2: RankPool, tmp_path: Path) -> None:
    """Which Lightning cannot read so itself."""
    path = tmp_path / "foreign.ckpt"
    (weights, *_) = pool2.run(_save_foreign, "model parallel, shards", str(path))
    module = AdamModule.load_from_checkpoint(path, seed=CASE.seed + 2)
    assert all(torch.equal(value, weights[name]) for name, value in module.model.named_parameters())
    assert not torch.equal(AdamModule(CASE.seed + 2).model.head.weight, module.model.head.weight)
    with pytest.raises(OSError, match="Is a directory"):
        saving.pl_load.__wrapped__(path, None, None)


def _save_foreign(kind: str, path: str) -> dict[str, Tensor]:
    strategy, module = FOREIGN[kind]()
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, batches())
    trainer.save_checkpoint(path)
    return load_only({}, path)


def test_code_is_run_only_if_asked_for(pool2: RankPool, tmp_path: Path) -> None:
    """As with a file; the error says what to do."""
    path = tmp_path / "run.ckpt"
    pool2.run(_save, {}, str(path), extra=Secret())
    with pytest.raises(CheckpointError, match=r"(?s)weights_only.*Secret was not an allowed global"):
        Parametrised.load_from_checkpoint(path)
    assert isinstance(Parametrised.load_from_checkpoint(path, weights_only=False).hparams.extra, Secret)


def test_damage_is_told(pool2: RankPool, tmp_path: Path) -> None:
    """By name, before anything was made of it."""
    path = tmp_path / "run.ckpt"
    pool2.run(_save, {}, str(path))
    shard = path / "__1_0.distcp"
    for seed in range(40):  # some of them in entries of the model
        damage(shard, "flip", random.Random(seed))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp has changed since it was written"):
            Parametrised.load_from_checkpoint(path)
        (path / "manifest.json").unlink(missing_ok=True)  # which is for the table of the shards alone


def test_importing_again_changes_nothing() -> None:
    """Lightning's function is replaced once, however often the package is loaded."""
    original = saving.pl_load.__wrapped__
    importlib.reload(lightning_automodel.checkpoint)
    assert saving.pl_load.__wrapped__ is original
    assert not hasattr(original, "__wrapped__")
