"""Saved by some ranks in some layout, or by Lightning, resumed by others in another: training goes on exactly.

All ranks get the same micro-batches, so that any number of them follows the same gradients; each run saves
at the end of an epoch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

import lightning_automodel.checkpoint
from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint.loading import load_any
from tests.checkpoint import checkpoints
from tests.checkpoint.test_cli import save_shards
from tests.rank_pool import RankPool
from tests.trainer.exactness import PLAN, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, TOLERANCE, make_trainer

FSDP2: dict[str, Any] = {}
DDP: dict[str, Any] = {"data_parallel": "ddp"}
HSDP: dict[str, Any] = {"data_parallel_replicate_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
ONE_FILE: dict[str, Any] = {"save_distributed_checkpoint": False}
OFFLOADED: dict[str, Any] = {"cpu_offload": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2-2": (2, FSDP2),
    "fsdp2-4": (4, FSDP2),
    "hsdp-4": (4, HSDP),
    "tensor-4": (4, TENSOR),
    "tensor-4-file": (4, {**TENSOR, **ONE_FILE}),
    "ddp-2": (2, DDP),
    "ddp-2-directory": (2, {**DDP, "save_distributed_checkpoint": True}),
    "fsdp2-2-file": (2, ONE_FILE),
    "offloaded-2": (2, OFFLOADED),
}
RESUMING = ("fsdp2-2", "ddp-2", "fsdp2-4", "hsdp-4", "tensor-4", "offloaded-2")


class AnyLayoutModule(checkpoints.AdamModule):
    """Tensor-parallel by a plan where there are such ranks."""

    def configure_model(self) -> None:
        names = self.device_mesh.mesh_dim_names
        if "tensor_parallel" in names and self.device_mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


@pytest.fixture(scope="module")
def expected(pool2: RankPool) -> dict[str, Tensor]:
    return pool2.run(checkpoints.uninterrupted, DDP)[0]


# Every layout is saved and resumed in here once; all pairs are a sweep.
PAIRS: dict[str, tuple[str, ...]] = {
    "fsdp2-4": ("fsdp2-2", "ddp-2"),
    "hsdp-4": ("tensor-4",),
    "tensor-4": ("fsdp2-4",),
    "tensor-4-file": ("hsdp-4",),
    "ddp-2": ("fsdp2-2",),
    "ddp-2-directory": ("fsdp2-4",),
    "fsdp2-2-file": ("ddp-2",),
    "offloaded-2": ("offloaded-2",),
}


@pytest.mark.parametrize(
    ("saving", "resuming"),
    [*PAIRS.items(), *((saving, RESUMING) for saving in PAIRS)],
    ids=[*PAIRS, *(f"{saving} to all" for saving in PAIRS)],
)
@pytest.mark.timeout(900)
def test_another_shape(
    pool2: RankPool,
    pool4: RankPool,
    tmp_path: Path,
    expected: dict[str, Tensor],
    saving: str,
    resuming: tuple[str, ...],
) -> None:
    """Whatever wrote it, every layout goes on from it."""
    path = str(tmp_path / "saved.ckpt")
    pools = {2: pool2, 4: pool4}
    ranks, options = LAYOUTS[saving]
    saved = pools[ranks].run(checkpoints.save, options, path, AnyLayoutModule)[0]
    for name in resuming:
        ranks, other = LAYOUTS[name]
        checkpoints.assert_equal(
            pools[ranks].run(checkpoints.load_only, other, path, AnyLayoutModule), saved
        )
        for weights in pools[ranks].run(checkpoints.resume, other, path, AnyLayoutModule):
            assert weight_error(weights, expected) <= TOLERANCE, name
            assert weight_error(weights, saved) > 1e-6, "nothing was trained"


class LazyModule(ModelModule):
    """A head that gets gradients in the second epoch, a frozen layer, tied weights, two optimizers' worth of groups."""

    def __init__(self, seed: int = CASE.seed) -> None:
        model = TinyDecoder(seed).double()
        model.later = nn.Linear(3, 2).double()
        model.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        model.tied = model.embedding
        for parameter in (*model.later.parameters(), *model.frozen.parameters()):
            nn.init.constant_(parameter, 0.1 * seed)
        super().__init__(model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 0:
            return loss
        ones = torch.ones(1, 3, dtype=torch.float64, device=self.device)
        return loss + self.model.later(ones).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = dict(self.model.named_parameters())
        later = [parameter for name, parameter in named.items() if name.startswith("later")]
        rest = [parameter for name, parameter in named.items() if not name.startswith("later")]
        groups = [{"params": rest, "lr": 0.01}, {"params": later, "lr": 0.02, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, eps=1e-3)


def _lazy(
    options: dict[str, Any], other: dict[str, Any], path: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    checkpoints.save(options, path, LazyModule)
    trainer, module = checkpoints.fit(options, LazyModule(), max_epochs=2)
    expected = full_weights(module.model)
    return checkpoints.resume(other, path, LazyModule), expected, trainer.optimizers[0].param_groups[1]["lr"]


@pytest.mark.parametrize(
    ("options", "other"),
    [(FSDP2, FSDP2), (DDP, FSDP2), (ONE_FILE, DDP), (FSDP2, DDP)],
    ids=["fsdp2", "ddp to fsdp2", "file to ddp", "fsdp2 to ddp"],
)
def test_state_that_is_not_there_yet(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any], other: dict[str, Any]
) -> None:
    """Parameters without gradients so far, frozen ones and tied ones; groups keep their settings."""
    find = {"ddp_kwargs": {"find_unused_parameters": True}}
    options, other = ({**each, **find} if each == DDP else each for each in (options, other))
    for resumed, through, learning_rate in pool2.run(_lazy, options, other, str(tmp_path / "lazy.ckpt")):
        assert weight_error(resumed, through) <= TOLERANCE
        assert learning_rate == 0.02


def _weights_only(options: dict[str, Any], path: str) -> str:
    trainer, module = checkpoints.fit(options)
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises((RuntimeError, KeyError)) as raised:
        checkpoints.resume(options, path)
    checkpoints.assert_equal([checkpoints.load_only(options, path)], full_weights(module.model))
    return str(raised.value)


@pytest.mark.parametrize("options", [FSDP2, ONE_FILE, DDP], ids=["fsdp2", "file", "ddp"])
def test_weights_alone(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Can be evaluated; a fit says why it cannot go on from them."""
    for message in pool2.run(_weights_only, options, str(tmp_path / "weights.ckpt")):
        assert "save_weights_only" in message
        assert "let it write one file: save_distributed_checkpoint=False" in message


# --- What Lightning has saved, and what it reads ----------------------------------------------------------------------


class ShardingModule(checkpoints.AdamModule):
    """Shards as ``ModelParallelStrategy`` wants it done."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


TWO_RANKS = {"data_parallel_size": 2, "tensor_parallel_size": 1}
FOREIGN: dict[str, Any] = {
    "ddp": lambda: (DDPStrategy(), checkpoints.AdamModule()),
    "model parallel, shards": lambda: (ModelParallelStrategy(**TWO_RANKS), ShardingModule()),
    "model parallel, one file": lambda: (
        ModelParallelStrategy(**TWO_RANKS, save_distributed_checkpoint=False),
        ShardingModule(),
    ),
}
EXACT = ["ddp", "model parallel, one file"]
MEANS: dict[str, dict[str, Any]] = {
    "fsdp2": {"per_token_loss": False},
    "ddp": {"data_parallel": "ddp", "per_token_loss": False},
}


def save_with(kind: str, path: str) -> None:
    strategy, module = FOREIGN[kind]()
    trainer = make_trainer(strategy, accumulate_grad_batches=checkpoints.ACCUMULATE)
    trainer.fit(module, checkpoints.batches())
    trainer.save_checkpoint(path)


def _go_on(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return checkpoints.resume(options, path), checkpoints.uninterrupted(options)


@pytest.mark.parametrize("kind", EXACT)
def test_goes_on_from_what_lightning_saved(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """Weights, moments, schedule and counters come over, into either engine."""
    path = tmp_path / "foreign.ckpt"
    pool2.run(save_with, kind, str(path))
    for options in MEANS.values():
        for weights, expected in pool2.run(_go_on, options, str(path)):
            assert weight_error(weights, expected) <= TOLERANCE


def test_weights_of_shards_of_model_parallel(pool2: RankPool, tmp_path: Path) -> None:
    """Load. Why a fit cannot go on from them: `test_weights_alone`."""
    paths = {
        kind: tmp_path / f"{kind}.ckpt" for kind in ("model parallel, shards", "model parallel, one file")
    }
    for kind, path in paths.items():
        pool2.run(save_with, kind, str(path))
    shards, file = paths.values()
    expected = torch.load(file, weights_only=True)["state_dict"]
    for weights in pool2.run(checkpoints.load_only, {}, str(shards)):
        assert all(torch.equal(expected[f"model.{name}"], value) for name, value in weights.items())


# --- `load_from_checkpoint` -------------------------------------------------------------------------------------------


class Parametrised(checkpoints.AdamModule):
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
        return checkpoints.batches()

    def state_dict(self) -> dict[str, Any]:
        return {"position": 17}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def _save(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    module = Parametrised(seed=4, width=2.5)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=checkpoints.ACCUMULATE)
    trainer.fit(module, datamodule=Batches(size=3))
    trainer.save_checkpoint(path)
    return full_weights(module.model)


@pytest.mark.parametrize("form", ["shards", "one_file_of_shards", "replicated_directory"])
def test_module_and_datamodule(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Weights bitwise, hyperparameters and the hook as with a file; what is passed replaces what was saved."""
    path = tmp_path / "run.ckpt"
    weights, _ = pool2.run(_save, checkpoints.FORMS[form], str(path))
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


def test_importing_again_changes_nothing() -> None:
    """Lightning's function is replaced once, however often the package is loaded."""
    importlib.reload(lightning_automodel.checkpoint)
    assert saving.pl_load is load_any
