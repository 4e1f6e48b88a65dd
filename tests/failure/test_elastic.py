"""`torchrun --max-restarts=1`, a rank fails at a random moment: the job ends with the weights of a calm one.

A default run plays torchrun: forked ranks find its environment and its store, twice. The sweep runs the real
one.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_automodel.distributed.meeting import NONE
from tests.checkpoint.killed import expected_weights
from tests.failure import elastic_script
from tests.failure.elastic_script import NUM_STEPS
from tests.failure.faults import become_rank, killed_at_the_end
from tests.processes import forked, free_port, run_anew


def run_job(folder: Path, seed: int, fault: str, how: str) -> str:
    """What both attempts of both ranks print; the job must end well."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = ["-m", "tests.failure.elastic_script", str(folder), str(seed), fault, how]
    status, printed = run_anew([*launch, *meet, *script], folder, timeout_s=280)
    assert status == 0, printed
    return printed


def check(folder: Path) -> None:
    """The second attempt went on from the newest checkpoint, and knew nothing else of the first, in the same store."""
    expected = expected_weights(NUM_STEPS)[-1]
    for rank in range(2):
        end = torch.load(folder / f"end{rank}.pt", weights_only=True)
        assert end["attempt"] == 1, "nobody failed"
        assert end["from"].endswith("last.ckpt"), "the second attempt began anew"
        assert (end["world_size"], end["found"], end["threads"]) == (2, [NONE] * 2, [])
        worst = max(
            float((value - expected[f"model.{name}"]).abs().max()) for name, value in end["weights"].items()
        )
        assert worst <= 1e-10


def be_rank(rank: int, attempt: int, port: int, folder: Path) -> None:
    """What torchrun lets a rank find, and what it runs."""
    logs = folder / f"attempt{attempt}"
    logs.mkdir(exist_ok=True)
    become_rank(rank, 2, port, logs)
    os.environ.update(
        GROUP_RANK="0",
        LOCAL_WORLD_SIZE="2",
        TORCHELASTIC_RUN_ID="job",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    elastic_script.main(folder, seed=1, fault="SIGKILL", options={"async_checkpoint": True})


@pytest.mark.sweep
def test_job_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """In the background too. One store, in this process, serves both attempts."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        ranks = [
            forked().Process(target=be_rank, args=(rank, attempt, store.port, tmp_path)) for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        with killed_at_the_end(ranks):
            wait([rank.sentinel for rank in ranks], 60)
            for rank in ranks:
                # As torchrun does it, once one has failed.
                if any(rank.exitcode for rank in ranks):
                    rank.terminate()
                rank.join(60)
        statuses = [rank.exitcode for rank in ranks]
        logs = "\n".join(path.read_text() for path in (tmp_path / f"attempt{attempt}").glob("*.log"))
        assert (0 in statuses) == (-signal.SIGKILL not in statuses) == (attempt == 1), logs
    check(tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["at_once", "in_background"])
@pytest.mark.parametrize("seed", range(1, 7))
def test_random_moments(tmp_path: Path, seed: int, how: str) -> None:
    """Other victims, other batches."""
    run_job(tmp_path, seed, "SIGKILL", how)
    check(tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_exception(tmp_path: Path) -> None:
    """All ranks leave with the cause; so they do in each default run, without torchrun, in test_faults.py."""
    printed = run_job(tmp_path, seed=1, fault="exception", how="at_once")
    assert "failed in on_before_backward: ValueError: no labels here" in printed
    check(tmp_path)
