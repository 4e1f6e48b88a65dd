"""`torchrun --max-restarts=1`: a rank fails, all leave with the cause, and the second attempt knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_automodel.stopping import NONE
from tests.trainer.restart_script import FAILING_RANK, NUM_STEPS
from tests.trainer.torchrun import run_with_one_restart


@pytest.mark.timeout(400)
def test_second_attempt_trains_to_the_end(tmp_path: Path) -> None:
    """In the same store, which the launcher hosts: with new keys, all ranks, and no thread left at the end."""
    printed = run_with_one_restart("tests.trainer.restart_script", [str(tmp_path)], tmp_path, timeout_s=360)
    assert f"rank {FAILING_RANK} on " in printed
    assert "failed in on_train_batch_start: ValueError: no labels here" in printed
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("attempt*.json")}
    clean = {"world_size": 2, "steps": NUM_STEPS, "threads": [], "failure": NONE.decode(), "ended": NONE.decode()}
    assert told == {f"attempt1_rank{rank}.json": {"rank": rank, **clean} for rank in range(2)}
