"""Checkpoints that Lightning's own strategies have written: a run goes on from them as if it had never stopped."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, fsdp
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.api import FullOptimStateDictConfig
from torch.optim import Optimizer

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from tests.checkpoint.checkpoints import (
    ACCUMULATE,
    AdamModule,
    batches,
    deviation,
    load_only,
    resume,
    save,
    uninterrupted,
)
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, TOLERANCE, make_trainer


def _whole_on_host(module: Any, *_: Any, **__: Any) -> Any:
    """Lightning's own context moves tensors to the host, which on the host keeps memory that FSDP1 then frees."""
    return FullyShardedDataParallel.state_dict_type(
        module,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )


class HostFSDP(FSDPStrategy):
    """On CPU: the Trainer refuses the class itself there, and torch wants to be told."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with mock.patch.object(fsdp, "_get_full_state_dict_context", _whole_on_host):
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with mock.patch.object(fsdp, "_get_full_state_dict_context", _whole_on_host):
            return super().optimizer_state(optimizer)

    def _setup_model(self, model: Any) -> Any:
        initialise = FullyShardedDataParallel.__init__

        def on_host(*args: Any, **kwargs: Any) -> None:
            initialise(*args, **{**kwargs, "device_id": torch.device("cpu")})

        with mock.patch.object(FullyShardedDataParallel, "__init__", on_host):
            return super()._setup_model(model)


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
    "fsdp, shards": lambda: (HostFSDP(state_dict_type="sharded"), AdamModule()),
    "fsdp, one file": lambda: (HostFSDP(state_dict_type="full"), AdamModule()),
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
            assert deviation(weights, expected) <= TOLERANCE


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


@pytest.mark.sweep
def test_goes_on_from_fsdp1(pool2: RankPool, tmp_path: Path) -> None:
    """From its one file, as from the one that Lightning's own tool makes of its shards, which are refused.

    Not as the run that never stopped: Lightning's ``FSDPStrategy`` has computed in float32 before.
    """
    paths = {each: tmp_path / f"{each}.ckpt" for each in ("shards", "one file")}
    for each, path in paths.items():
        pool2.run(save_with, f"fsdp, {each}", str(path))
        assert path.is_dir() == (each == "shards")
    with pytest.raises(
        CheckpointError, match=r"python -m lightning\.pytorch\.utilities\.consolidate_checkpoint"
    ):
        ShardDirectory(str(paths["shards"]), None)
    consolidated = tmp_path / "consolidated.ckpt"
    torch.save(_format_checkpoint(_load_distributed_checkpoint(paths["shards"])), consolidated)
    for options in ENGINES.values():
        expected = pool2.run(resume, options, str(consolidated))
        for (weights, uninterrupted_weights), from_file in zip(
            pool2.run(_go_on, options, str(paths["one file"])), expected, strict=True
        ):
            assert deviation(weights, from_file) <= TOLERANCE
            assert TOLERANCE < deviation(weights, uninterrupted_weights) <= 1e-5


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
        assert deviation(weights, reference) <= TOLERANCE
    for options in ENGINES.values():
        for weights, reference in zip(pool2.run(resume, options, str(whole)), expected, strict=True):
            assert deviation(weights, reference) <= TOLERANCE
