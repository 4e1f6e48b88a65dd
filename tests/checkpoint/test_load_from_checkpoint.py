"""`load_from_checkpoint` reads directories of shards, ours and Lightning's, and files as it ever did."""

from __future__ import annotations

import importlib
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
from tests.checkpoint.checkpoints import ACCUMULATE, FORMS, AdamModule, batches, load_only
from tests.checkpoint.test_cli import MODEL, Custom, Holds, damage_weight, save_shards
from tests.checkpoint.test_lightning_formats import save_with
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, make_trainer


class Parametrised(AdamModule):
    """Keeps what it was made with, and counts what was loaded."""

    def __init__(self, seed: int, width: float = 1.5) -> None:
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


def _save(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    module = Parametrised(seed=4, width=2.5)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, datamodule=Batches(size=3))
    trainer.save_checkpoint(path)
    return full_weights(module.model)


@pytest.mark.parametrize("form", ["shards", "one_file_of_shards", "replicated_directory"])
def test_module_and_datamodule(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Weights bitwise, hyperparameters and the hook as with a file; what is passed replaces what was saved."""
    path = tmp_path / "run.ckpt"
    weights, _ = pool2.run(_save, FORMS[form], str(path))
    assert path.is_dir() == (form != "one_file_of_shards")
    module = Parametrised.load_from_checkpoint(path)
    assert weights.keys() == dict(module.model.named_parameters()).keys()
    assert all(torch.equal(value, weights[name]) for name, value in module.model.named_parameters())
    assert (module.hparams.seed, module.hparams.width) == (4, 2.5)
    assert {"state_dict", "epoch", "loops", "callbacks", "lr_schedulers"} <= set(module.loaded)
    assert ("optimizer_states" in module.loaded) == (form == "one_file_of_shards")
    assert Parametrised.load_from_checkpoint(str(path), width=9.0).hparams.width == 9.0

    datamodule = Batches.load_from_checkpoint(path)
    assert (datamodule.hparams.size, datamodule.position) == (3, 17)


def test_lightnings_own_directories(pool2: RankPool, tmp_path: Path) -> None:
    """Which Lightning cannot read so itself."""
    path = tmp_path / "foreign.ckpt"
    pool2.run(save_with, "model parallel, shards", str(path))
    weights = pool2.run(load_only, {}, str(path))[0]
    module = AdamModule.load_from_checkpoint(path, seed=CASE.seed + 2)
    assert all(torch.equal(value, weights[name]) for name, value in module.model.named_parameters())
    assert not torch.equal(AdamModule(CASE.seed + 2).model.head.weight, module.model.head.weight)
    with pytest.raises(OSError, match="Is a directory"):
        saving.pl_load.__wrapped__(path, None, None)


def test_where_tensors_go(tmp_path: Path) -> None:
    """Where `map_location` says, if it is a device; else they stay on the host."""
    path = str(save_shards(tmp_path / "a.ckpt"))
    places: list[tuple[Any, str]] = [("meta", "meta"), (torch.device("meta"), "meta")]
    for asked, expected in (*places, (lambda storage, _: storage, "cpu")):
        found = saving.pl_load(path, map_location=asked)["state_dict"]
        assert {tensor.device.type for tensor in found.values()} == {expected}


def test_code_is_run_only_if_asked_for(tmp_path: Path) -> None:
    """As with a file; the error says what to do."""
    path = save_shards(tmp_path / "a.ckpt", custom=Custom())
    with pytest.raises(CheckpointError, match=r"(?s)weights_only.*Custom was not an allowed global"):
        Holds.load_from_checkpoint(path)
    assert torch.equal(
        Holds.load_from_checkpoint(path, weights_only=False).model.weight, MODEL["model.weight"]
    )


def test_damage_is_told(tmp_path: Path) -> None:
    """By name, before anything was made of it, also where nothing tells of the table of the shards."""
    path = save_shards(tmp_path / "run.ckpt")
    damage_weight(path / "__0_0.distcp")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp has changed since it was written"):
            Holds.load_from_checkpoint(path)
        (path / "manifest.json").unlink(missing_ok=True)


def test_importing_again_changes_nothing() -> None:
    """Lightning's function is replaced once, however often the package is loaded."""
    original = saving.pl_load.__wrapped__
    importlib.reload(lightning_automodel.checkpoint)
    assert saving.pl_load.__wrapped__ is original
    assert not hasattr(original, "__wrapped__")
