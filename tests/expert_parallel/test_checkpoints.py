"""Checkpoints of spread experts: saved by some layout and resumed by another, as one file, exported, consolidated.

All ranks get the same micro-batches, so that every layout follows the same gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.checkpoint.__main__ import main
from tests.checkpoint.checkpoints import adamw, resume, save, uninterrupted
from tests.expert_parallel.mixtures import MixtureDecoder, SpreadModule
from tests.rank_pool import RankPool
from tests.trainer.exactness import weight_error
from tests.trainer.runs import TOLERANCE

ONE_FILE: dict[str, Any] = {"save_distributed_checkpoint": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two": {"expert_parallel_size": 2},
    "four": {"expert_parallel_size": 4},
    "replicas": {"expert_parallel_size": 2, "data_parallel_replicate_size": 2},
    "none": {},
}


class AdamMixture(SpreadModule):
    """Trained by AdamW; started elsewhere if it will be loaded."""

    def __init__(self, is_loaded: bool = False) -> None:
        super().__init__(MixtureDecoder())
        if is_loaded:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.fixture(scope="module")
def expected(pool4: RankPool) -> dict[str, Tensor]:
    """Weights after two epochs without a stop, without expert parallelism."""
    return pool4.run(uninterrupted, {}, AdamMixture)[0]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("saving", "resuming", "form"),
    [
        pytest.param("two", "four", {}, marks=pytest.mark.sweep),  # experts in shards
        ("four", "none", {}),
        ("none", "replicas", {}),
        ("replicas", "four", ONE_FILE),
    ],
)
def test_another_layout(
    pool4: RankPool,
    tmp_path: Path,
    expected: dict[str, Tensor],
    saving: str,
    resuming: str,
    form: dict[str, Any],
) -> None:
    """Consolidated, it is one file with whole experts."""
    path = tmp_path / "saved.ckpt"
    saved = pool4.run(save, {**LAYOUTS[saving], **form}, str(path), AdamMixture)[0]
    for weights in pool4.run(resume, {**LAYOUTS[resuming], **form}, str(path), AdamMixture, (True,)):
        assert weight_error(weights, expected) <= TOLERANCE
        assert weight_error(weights, saved) > 1e-6, "nothing was trained"
    if path.is_dir():
        assert main(["consolidate", str(path), str(tmp_path / "whole.ckpt")]) == 0
        found = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
        assert {name.removeprefix("model.") for name in found} == saved.keys()
        assert all(found[f"model.{name}"].equal(weight) for name, weight in saved.items())
