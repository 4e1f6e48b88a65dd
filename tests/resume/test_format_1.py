"""Checkpoints that were written before resuming ran on Lightning's own loops (commit f7936a2) still go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rank_pool import RankPool
from tests.resume.resuming import Setting, run

SETTING = Setting(
    {"data_parallel": "ddp"}, {"precision": "64-true", "accumulate_grad_batches": 2}, loader="global generator"
)


def difference(name: str) -> tuple[float, bool]:
    """Runs on one rank: of the weights, and whether all that is counted or drawn is the same."""
    expected = run(SETTING)[1]
    found = run(SETTING, seed=2, ckpt_path=Path(__file__).parent / "fixtures" / name)[1]
    pairs = [(tensor, found["tensors"][key]) for key, tensor in expected["tensors"].items()]
    largest = max(float((one.double() - other.double()).abs().max()) for one, other in pairs)
    return largest, all(expected[key] == found[key] for key in ("step", "epoch", "random", "lr"))


@pytest.mark.parametrize("name", ["format_1_batch.ckpt", "format_1_epoch.ckpt"])
def test_goes_on(pool1: RankPool, name: str) -> None:
    """Not bit for bit: other releases may round otherwise."""
    largest, is_same = pool1.run(difference, name, timeout_s=120)[0]
    assert largest < 1e-10
    assert is_same
    state = torch.load(Path(__file__).parent / "fixtures" / name, weights_only=True)
    assert state["lightning_automodel"]["format"] == 1
