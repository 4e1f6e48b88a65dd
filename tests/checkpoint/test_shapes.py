"""Saved by some ranks in some layout, resumed by others in another: state and training go on exactly.

All ranks get the same micro-batches, so that any number of them follows the same gradients; each run saves
at the end of an epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from tests.checkpoint.checkpoints import (
    AdamModule,
    assert_equal,
    fit,
    load_only,
    resume,
    save,
    uninterrupted,
)
from tests.rank_pool import RankPool
from tests.trainer.exactness import PLAN, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, TOLERANCE

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


class AnyLayoutModule(AdamModule):
    """Tensor-parallel by a plan where there are such ranks."""

    def configure_model(self) -> None:
        names = self.device_mesh.mesh_dim_names
        if "tensor_parallel" in names and self.device_mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


@pytest.fixture(scope="module")
def expected(pool2: RankPool) -> dict[str, Tensor]:
    return pool2.run(uninterrupted, DDP)[0]


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
    saved = pools[ranks].run(save, options, path, AnyLayoutModule)[0]
    for name in resuming:
        ranks, other = LAYOUTS[name]
        assert_equal(pools[ranks].run(load_only, other, path, AnyLayoutModule), saved)
        for weights in pools[ranks].run(resume, other, path, AnyLayoutModule):
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
    save(options, path, LazyModule)
    trainer, module = fit(options, LazyModule(), max_epochs=2)
    expected = full_weights(module.model)
    return resume(other, path, LazyModule), expected, trainer.optimizers[0].param_groups[1]["lr"]


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
    trainer, module = fit(options)
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises((RuntimeError, KeyError)) as raised:
        resume(options, path)
    assert_equal([load_only(options, path)], full_weights(module.model))
    return str(raised.value)


@pytest.mark.parametrize("options", [FSDP2, ONE_FILE, DDP], ids=["fsdp2", "file", "ddp"])
def test_weights_alone(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Can be evaluated; a fit says why it cannot go on from them."""
    for message in pool2.run(_weights_only, options, str(tmp_path / "weights.ckpt")):
        assert "save_weights_only" in message
