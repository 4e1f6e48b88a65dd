"""`torchrun --max-restarts=1`, a rank killed at a random moment: the job ends with the weights of a calm one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.elastic_script import NUM_STEPS
from tests.trainer.killed import expected_weights
from tests.trainer.torchrun import run_with_one_restart


def run_job(folder: Path, seed: int, how: str) -> None:
    run_with_one_restart("tests.trainer.elastic_script", [str(folder), str(seed), how], folder, timeout_s=280)


def check(folder: Path) -> None:
    expected = expected_weights(NUM_STEPS)[-1]
    for rank in range(2):
        end = torch.load(folder / f"end{rank}.pt", weights_only=True)
        assert end["attempt"] == 1, "nobody was killed"
        assert end["from"].endswith("last.ckpt"), "the second attempt began anew"
        worst = max(float((value - expected[f"model.{name}"]).abs().max()) for name, value in end["weights"].items())
        assert worst <= 1e-10


@pytest.mark.timeout(300)
def test_job_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """In the background too."""
    run_job(tmp_path, seed=1, how="in_background")
    check(tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["at_once", "in_background"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_random_moments(tmp_path: Path, seed: int, how: str) -> None:
    """Other victims, other batches."""
    run_job(tmp_path, seed, how)
    check(tmp_path)
