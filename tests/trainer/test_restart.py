"""`torchrun --max-restarts=1`: a rank fails, all leave with the cause, and the second attempt knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_automodel.stopping import NONE
from tests.trainer.restart_script import FAILING_RANK, NUM_STEPS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_second_attempt_trains_to_the_end(tmp_path: Path) -> None:
    """In the same store, which the launcher hosts: with new keys, all ranks, and no thread left at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "NODE_RANK"):
        environment.pop(name, None)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = ["-m", "tests.trainer.restart_script", str(tmp_path)]
    done = subprocess.run(
        [*launch, *meet, *script],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"rank {FAILING_RANK} on " in done.stdout
    assert "failed in on_train_batch_start: ValueError: no labels here" in done.stdout
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("attempt*.json")}
    clean = {"world_size": 2, "steps": NUM_STEPS, "threads": [], "failure": NONE.decode(), "ended": NONE.decode()}
    assert told == {f"attempt1_rank{rank}.json": {"rank": rank, **clean} for rank in range(2)}
