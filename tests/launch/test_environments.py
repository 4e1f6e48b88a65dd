"""Processes that something else has started: SLURM, torchrun on two nodes, or a cluster that sets a few variables."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from tests.doc_blocks import blocks
from tests.launch.launched import (
    ACCUMULATE,
    PATIENCE_S,
    Launched,
    Runs,
    assert_exact,
    fit_as_rank,
    program,
    start_selected,
    wait_until,
)
from tests.launch.two_nodes import ADDRESSES, connect_two_nodes
from tests.processes import ROOT, free_port, run_anew
from tests.trainer.exactness import weight_error
from tests.trainer.runs import CASE, TOLERANCE, train_plainly

REPEAT = 2
REPEATED = REPEAT * CASE.num_batches


def fit(
    folder: Path, variables: dict[str, str], settings: dict[str, Any], environment: str, **options: Any
) -> None:
    """What one rank does that finds these variables. Further options are the module's."""
    os.environ.update(variables)
    trainer = fit_as_rank(Launched(folder.parent, **options), {}, **settings)
    assert type(trainer.strategy.cluster_environment).__name__ == environment


def slurm(rank: int, port: int) -> dict[str, str]:
    """What `srun --ntasks-per-node=2 python train.py` lets a task find."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }


def kubernetes(rank: int, port: int) -> dict[str, str]:
    """Two pods with a process each, told apart by NODE_RANK."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**address, "LOCAL_RANK": "0", "NODE_RANK": str(rank), "WORLD_SIZE": "2"}


def kubeflow(rank: int, port: int) -> dict[str, str]:
    """Two pods of a PyTorchJob."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}


NODES = {"devices": 1, "num_nodes": 2}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "kubernetes": (kubernetes, {"settings": NODES, "environment": "LightningEnvironment"}),
    "kubeflow": (
        kubeflow,
        {"settings": {**NODES, "plugins": [KubeflowEnvironment()]}, "environment": "KubeflowEnvironment"},
    ),
    "slurm": (slurm, {"settings": {"devices": 2}, "environment": "SLURMEnvironment"}),
}


def start_both(
    stack: ExitStack, folder: Path, name: str, extra: dict[str, str] | None = None, **options: Any
) -> list[Any]:
    """Start two ranks that find themselves in the environment of this name."""
    variables, fixed = CASES[name]
    port = free_port()
    started = []
    for rank in range(2):
        (folder / str(rank)).mkdir(exist_ok=True)
        told = {"variables": {**variables(rank, port), **(extra or {})}, **fixed, **options}
        started.append(stack.enter_context(program(fit, folder / str(rank), **told)))
    return started


def logs(folder: Path) -> str:
    return "\n".join((folder / str(rank) / "log").read_text() for rank in range(2))


def run_both(
    folder: Path, name: str, extra: dict[str, str] | None = None, **options: Any
) -> list[int | None]:
    """Exit statuses of two ranks that train in the environment of this name."""
    with ExitStack() as stack:
        ranks = start_both(stack, folder, name, extra, **options)
        for process in ranks:
            process.join(PATIENCE_S)
        return [process.exitcode for process in ranks]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Both ranks of every selected environment, and of the jobs under SLURM that a signal stops; two at a time."""
    what = {"name": run_both, "stopped_by": stop_under_slurm, "requeued_by": requeue_under_slurm}
    yield from start_selected(request, tmp_path_factory, what, 2)


@pytest.mark.parametrize("name", ["kubeflow", pytest.param("kubernetes", marks=pytest.mark.sweep)])
def test_ranks_of_an_environment(runs: Runs, name: str) -> None:
    """They find each other, and train to the weights of one process; under SLURM, `test_requeueing_under_slurm`."""
    statuses, folder = runs["name", name].result()
    assert statuses == [0, 0], logs(folder)
    assert_exact(torch.load(folder / "weights.pt"))


def stop_under_slurm(folder: Path, name: str) -> list[int | None]:
    """Send a signal to a rank while both train; returns the statuses."""
    with ExitStack() as stack:
        ranks = start_both(stack, folder, "slurm", repeat=100000)
        wait_until(lambda: all((folder / f"rank{rank}.on").exists() for rank in range(2)))
        os.kill(ranks[1].pid, signal.Signals[name])
        for process in ranks:
            process.join(PATIENCE_S)
        return [process.exitcode for process in ranks]


@pytest.mark.parametrize("stopped_by", ["SIGTERM"])
def test_sigterm_under_slurm(runs: Runs, stopped_by: str) -> None:
    """Lightning's handlers for requeueing run before the guard's: all ranks stop after the same step, whoever asked."""
    statuses, folder = runs["stopped_by", stopped_by].result()
    assert statuses == [128 + signal.SIGTERM] * 2, logs(folder)
    assert "Rank 1 received SIGTERM: all ranks stop after this step." in (folder / "0" / "log").read_text()


def requeue_under_slurm(folder: Path, name: str) -> tuple[list[int | None], str, list[int | None]]:
    """Send SLURM's signal to a rank, and run the job again: statuses and output of the first, statuses of the other."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {folder / 'requeued'}\n")
    scontrol.chmod(0o755)
    variables = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    # Slow steps: the ranks agree on one within a second or two.
    stopped = run_both(folder, "slurm", variables, fault=name, repeat=REPEAT, pause_s=0.4)
    told = logs(folder)
    return stopped, told, run_both(folder, "slurm", repeat=REPEAT)


@pytest.mark.parametrize("requeued_by", ["SIGUSR1"])
def test_requeueing_under_slurm(runs: Runs, requeued_by: str) -> None:
    """Whichever rank receives the signal, all save after the same step, rank 0 requeues the job, and that goes on."""
    (stopped, told, went_on), folder = runs["requeued_by", requeued_by].result()
    assert stopped == [128 + signal.SIGTERM] * 2, told
    assert told.count("Rank 1 was told to save and requeue: all ranks stop after this step.") == 2, told
    assert (folder / "requeued").read_text().strip() == "requeue 4711"
    saved = torch.load(folder / "hpc_ckpt_1.ckpt" / "meta.pt", weights_only=False)
    assert 0 < saved["global_step"] < REPEATED // ACCUMULATE
    assert went_on == [0, 0], logs(folder)
    assert "hpc_ckpt_1.ckpt" in logs(folder), "the second job began anew"
    found = torch.load(folder / "weights.pt")
    windows = [list(range(REPEATED))[start : start + ACCUMULATE] for start in range(0, REPEATED, ACCUMULATE)]
    expected = train_plainly([[index % CASE.num_batches for index in window] for window in windows])
    assert weight_error(found, expected) <= TOLERANCE


# --- Two nodes with two ranks each, started by torchrun ---------------------------------------------------------------


@pytest.mark.sweep  # six processes import everything anew
def test_the_page_on_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script trains on two nodes, and on a second start goes on from the checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in blocks(ROOT / "docs" / "several_nodes.md", "python")))
    monkeypatch.setenv("DEVICES", "2")
    monkeypatch.setenv("NUM_NODES", "2")
    with connect_two_nodes() as nodes, ThreadPoolExecutor() as executor:

        def torchrun(node: int) -> tuple[int, str]:
            # This machine's interface does not lead to the other node.
            inside = ["ip", "netns", "exec", nodes.namespaces[node], "env", "-u", "GLOO_SOCKET_IFNAME"]
            launch = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2"]
            meet = [f"--master-addr={ADDRESSES[0]}", "--master-port=29519"]
            command = [*inside, sys.executable, "-m", "torch.distributed.run", *launch, *meet, str(script)]
            return run_anew(command, tmp_path, timeout_s=240)

        for _ in range(2):
            results = list(executor.map(torchrun, range(2)))
            assert [status for status, _ in results] == [0, 0], results
            assert "2 replicas of 2 ranks each" in results[0][1]
            assert (tmp_path / "shared" / "last.ckpt").exists()
