"""A run goes on from what Lightning's own strategies have saved; `load_from_checkpoint` reads directories of shards."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lightning_automodel.checkpoint
from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError, load_any
from lightning_automodel.checkpoint.__main__ import main
from tests.checkpoint.checkpoints import (
    ACCUMULATE,
    FORMS,
    AdamModule,
    batches,
    load_only,
    resume,
    save,
    uninterrupted,
)
from tests.checkpoint.test_cli import MODEL, Custom, Holds, save_shards
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import CASE, TOLERANCE, make_trainer


class ShardingModule(AdamModule):
    """Shards as ``ModelParallelStrategy`` wants it done."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


SIZES = {"data_parallel_size": 2, "tensor_parallel_size": 1}
FOREIGN: dict[str, Any] = {
    "ddp": lambda: (DDPStrategy(), AdamModule()),
    "model parallel, shards": lambda: (ModelParallelStrategy(**SIZES), ShardingModule()),
    "model parallel, one file": lambda: (
        ModelParallelStrategy(**SIZES, save_distributed_checkpoint=False),
        ShardingModule(),
    ),
}
EXACT = ["ddp", "model parallel, one file"]
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"per_token_loss": False},
    "ddp": {"data_parallel": "ddp", "per_token_loss": False},
}


def save_with(kind: str, path: str) -> None:
    strategy, module = FOREIGN[kind]()
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, batches())
    trainer.save_checkpoint(path)


def _go_on(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return resume(options, path), uninterrupted(options)


@pytest.mark.parametrize("kind", EXACT)
def test_goes_on_from_what_lightning_saved(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """Weights, moments, schedule and counters come over, into either engine."""
    path = tmp_path / "foreign.ckpt"
    pool2.run(save_with, kind, str(path))
    for options in ENGINES.values():
        for weights, expected in pool2.run(_go_on, options, str(path)):
            assert weight_error(weights, expected) <= TOLERANCE


def _read_weights(path: str) -> tuple[dict[str, Tensor], str]:
    """Whole weights that ``validate`` loads, and what a fit says."""
    with pytest.raises(CheckpointError) as raised:
        resume({}, path)
    return load_only({}, path), str(raised.value)


def test_weights_of_shards_of_model_parallel(pool2: RankPool, tmp_path: Path) -> None:
    """Load; a fit says how to go on with the optimizers, which Lightning's own tool does not bring either."""
    paths = {
        kind: tmp_path / f"{kind}.ckpt" for kind in ("model parallel, shards", "model parallel, one file")
    }
    for kind, path in paths.items():
        pool2.run(save_with, kind, str(path))
    shards, file = paths.values()
    expected = torch.load(file, weights_only=True)["state_dict"]
    for weights, message in pool2.run(_read_weights, str(shards)):
        assert all(torch.equal(expected[f"model.{name}"], value) for name, value in weights.items())
        assert "let it write one file: save_distributed_checkpoint=False" in message
    with pytest.raises(KeyError, match="model"):
        _format_checkpoint(_load_distributed_checkpoint(shards))


def _lightning_goes_on(path: str) -> dict[str, Tensor]:
    module = AdamModule(CASE.seed + 2)
    trainer = make_trainer(DDPStrategy(), accumulate_grad_batches=ACCUMULATE, max_epochs=2)
    trainer.fit(module, batches(), ckpt_path=path)
    return full_weights(module.model)


def test_lightning_goes_on_from_a_consolidated_file(pool2: RankPool, tmp_path: Path) -> None:
    """So does this strategy, and the file's archive is sound."""
    directory = tmp_path / "run.ckpt"
    whole = tmp_path / "whole.ckpt"
    pool2.run(save, ENGINES["fsdp2"], str(directory))
    assert main(["consolidate", str(directory), str(whole)]) == 0
    assert zipfile.ZipFile(whole).testzip() is None
    expected = pool2.run(uninterrupted, ENGINES["fsdp2"])
    for weights, reference in zip(pool2.run(_lightning_goes_on, str(whole)), expected, strict=True):
        assert weight_error(weights, reference) <= TOLERANCE
    for options in ENGINES.values():
        for weights, reference in zip(pool2.run(resume, options, str(whole)), expected, strict=True):
            assert weight_error(weights, reference) <= TOLERANCE


# --- `load_from_checkpoint` -------------------------------------------------------------------------------------------


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


def test_importing_again_changes_nothing() -> None:
    """Lightning's function is replaced once, however often the package is loaded."""
    importlib.reload(lightning_automodel.checkpoint)
    assert saving.pl_load is load_any
