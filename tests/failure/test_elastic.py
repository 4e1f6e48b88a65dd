"""`torchrun --max-restarts=1`, a rank fails at a random moment: the job ends with the weights of a calm one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_saving import expected_weights
from tests.failure.elastic_script import NUM_STEPS
from tests.processes import run_anew


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "fault"), [(1, "exception"), *((seed, "SIGKILL") for seed in range(1, 4))])
def test_random_moments(tmp_path: Path, seed: int, fault: str) -> None:
    """Other victims, other batches. The second attempt knows nothing of the first but its newest checkpoint.

    Without torchrun, test_faults.py asks for the cause in each default run.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = ["-m", "tests.failure.elastic_script", str(tmp_path), str(seed), fault]
    status, printed = run_anew([*launch, *meet, *script], tmp_path, timeout_s=280)
    assert status == 0, printed
    if fault == "exception":
        assert "failed in on_before_backward: ValueError: no labels here" in printed
    expected = expected_weights(NUM_STEPS)[-1]
    for rank in range(2):
        end = torch.load(tmp_path / f"end{rank}.pt", weights_only=True)
        assert end["attempt"] == 1, "nobody failed"
        assert end["from"].endswith("last.ckpt"), "the second attempt began anew"
        assert end["world_size"] == 2
        for name, value in end["weights"].items():
            assert float((value - expected[f"model.{name}"]).abs().max()) <= 1e-10
