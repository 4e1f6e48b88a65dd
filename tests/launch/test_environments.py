"""Processes that something else has started: SLURM, torchrun, or a cluster that sets a few variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from lightning_automodel import AutomodelStrategy
from tests.launch.launched import ACCUMULATE, PATIENCE_S, Launched, assert_exact, program, wait_until
from tests.processes import free_port
from tests.trainer.exactness import relative_error
from tests.trainer.runs import CASE, SILENT, TOLERANCE, train_plainly

REPEAT = 2
REPEATED = REPEAT * CASE.num_batches


def fit(
    folder: Path, settings: dict[str, Any], environment: str, kubeflow: bool = False, **options: Any
) -> None:
    """What one rank does; the first writes the whole weights. Further options are the module's."""
    trainer = pl.Trainer(
        strategy=AutomodelStrategy(timeout=1),
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        use_distributed_sampler=False,
        plugins=[KubeflowEnvironment()] if kubeflow else None,
        default_root_dir=folder,
        **settings,
        **SILENT,
    )
    assert type(trainer.strategy.cluster_environment).__name__ == environment
    module = Launched(folder, **options)
    trainer.fit(module)
    weights = {name: tensor.full_tensor() for name, tensor in module.model.named_parameters()}
    if trainer.is_global_zero:
        torch.save(weights, folder / "weights.pt")


def fit_in(folder: Path, variables: dict[str, str], **options: Any) -> None:
    """As `fit`, with these variables in the environment."""
    os.environ.update(variables)
    fit(folder.parent, **options)


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
        {"settings": NODES, "environment": "KubeflowEnvironment", "kubeflow": True},
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
        started.append(stack.enter_context(program(fit_in, folder / str(rank), **told)))
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
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, Future]]]:
    """Both ranks of every selected environment, and of the jobs under SLURM that a signal stops; two at a time."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    what = {"requeued": requeue_under_slurm, "stopped": stop_under_slurm}
    what |= {name: partial(run_both, name=name) for name in names}
    with ThreadPoolExecutor(max_workers=2) as executor:
        folders = {name: tmp_path_factory.mktemp(name) for name in what}
        yield {name: (folder, executor.submit(what[name], folder)) for name, folder in folders.items()}


@pytest.mark.parametrize("name", ["kubeflow", pytest.param("kubernetes", marks=pytest.mark.sweep)])
def test_ranks_of_an_environment(runs: dict[str, tuple[Path, Future]], name: str) -> None:
    """They find each other, and train to the weights of one process; under SLURM, `test_requeueing_under_slurm`."""
    folder, future = runs[name]
    assert future.result() == [0, 0], logs(folder)
    assert_exact(torch.load(folder / "weights.pt"))


def stop_under_slurm(folder: Path) -> list[int | None]:
    """Send SIGTERM to a rank while both train; returns the statuses."""
    with ExitStack() as stack:
        ranks = start_both(stack, folder, "slurm", repeat=100000)
        wait_until(lambda: all((folder / f"rank{rank}.on").exists() for rank in range(2)))
        os.kill(ranks[1].pid, signal.SIGTERM)
        for process in ranks:
            process.join(PATIENCE_S)
        return [process.exitcode for process in ranks]


def test_sigterm_under_slurm(runs: dict[str, tuple[Path, Future]]) -> None:
    """Lightning's handlers for requeueing run before the guard's: all ranks stop after the same step, whoever asked."""
    folder, statuses = runs["stopped"]
    assert statuses.result() == [128 + signal.SIGTERM] * 2, logs(folder)
    assert "Rank 1 received SIGTERM: all ranks stop after this step." in (folder / "0" / "log").read_text()


def requeue_under_slurm(folder: Path) -> tuple[list[int | None], str, list[int | None]]:
    """Send SLURM's signal to a rank, and run the job again: statuses and output of the first, statuses of the other."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {folder / 'requeued'}\n")
    scontrol.chmod(0o755)
    variables = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    # Slow steps: the ranks agree on one within a second or two.
    stopped = run_both(folder, "slurm", variables, fault="SIGUSR1", repeat=REPEAT, pause_s=0.4)
    told = logs(folder)
    return stopped, told, run_both(folder, "slurm", repeat=REPEAT)


def test_requeueing_under_slurm(runs: dict[str, tuple[Path, Future]]) -> None:
    """Whichever rank receives the signal, all save after the same step, rank 0 requeues the job, and that goes on."""
    folder, outcome = runs["requeued"]
    stopped, told, went_on = outcome.result()
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
    assert max(relative_error(found[name], weight) for name, weight in expected.items()) < TOLERANCE
