"""Faults where collectives are queued and return, as NCCL's: no rank hangs, and each leaves with the cause.

The second device's ranks wait where they read from it, nothing raises when a peer is gone, and shutting
groups down waits for ever (`tests/second_device/nccl_like.py`). At `timeout` the backend would end each
process by SIGABRT. `test_faults.py` asks whether all leave, in many hooks; here it is asked what each of
them prints, and in which order.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed import collectives
from tests import devices
from tests.failure.faults import (
    MESSAGE,
    Model,
    Ragged,
    become_rank,
    exit_statuses,
    killed_at_the_end,
    started_ranks,
)
from tests.trainer.runs import SILENT

WORLD_SIZE = 3
BAD = 1
BAD_STEP = 7
PATIENCE_S = 90.0


def raises(model: Faulty, batch: dict[str, Tensor]) -> None:
    if model.is_bad:
        raise ValueError(MESSAGE)


def raises_in_a_kernel(model: Faulty, batch: dict[str, Tensor]) -> None:
    """The device then raises in each later call."""
    if model.is_bad:
        batch["labels"][0, 0] = 99


def dies_before_its_first_heartbeat(model: Faulty, batch: dict[str, Tensor]) -> None:
    """Before it is asked to: once all have joined."""


class Faulty(Model):
    """Meets a fault in its seventh step."""

    def __init__(self, fault: Callable[..., None], folder: Path) -> None:
        super().__init__()
        self.fault = fault
        self.folder = folder
        self.num_calls = 0

    @property
    def is_bad(self) -> bool:
        return int(os.environ["RANK"]) == BAD

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.num_calls += 1
        if self.num_calls == BAD_STEP:
            note(self.folder)
            self.fault(self, batch)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()  # where hosts wait


class Gathers(pl.Callback):
    """After a failure, all ranks still meet on the host, as to save a checkpoint."""

    def on_exception(
        self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException
    ) -> None:
        group = collectives.host_group(timedelta(seconds=20))
        print(f"met {collectives.gather_objects(trainer.global_rank, group)} on the host")


def note(folder: Path) -> None:
    """When the first rank met the fault."""
    path = folder / "happened"
    if not path.exists():
        path.write_text(str(time.monotonic()))


@dataclass(frozen=True)
class Case:
    """A fault, the engine, what each of the other ranks prints (``HOST`` is the host), and the heartbeat timeout."""

    fault: Callable[..., None]
    engine: str
    says: str
    heartbeat_timeout_s: float = 20.0
    statuses: tuple[int, ...] = (1, 1, 1)
    limit_s: float = 12.0  # from the fault to the last end; the machine may be busy

    def __str__(self) -> str:
        return f"{self.fault.__name__}-{self.engine}"


CASES = [
    Case(raises, "fsdp2", f"rank 1 on HOST failed in training_step: ValueError: {MESSAGE}"),
    Case(
        raises_in_a_kernel, "ddp", "rank 1 on HOST failed in .*: RuntimeError: .*Target 99 is out of bounds"
    ),
    Case(
        dies_before_its_first_heartbeat,
        "fsdp2",
        "rank 1 on an unknown host missed heartbeats",
        3.0,
        (1, -signal.SIGKILL, 1),
    ),
]
"""What the cells of `fault_cells.py` lack."""


def _rank(case: Case, rank: int, port: int, folder: Path) -> None:
    become_rank(rank, WORLD_SIZE, port, folder)
    os.environ[devices.VARIABLE] = "nccl"
    strategy = AutomodelStrategy(
        data_parallel=case.engine,
        timeout=timedelta(seconds=40),
        heartbeat_timeout=timedelta(seconds=case.heartbeat_timeout_s),
    )
    if case.fault is dies_before_its_first_heartbeat:
        _replace_by_death(strategy._supervisor, "start_watch", rank, folder)
    trainer = pl.Trainer(
        accelerator=devices.accelerator(WORLD_SIZE),
        devices=WORLD_SIZE,
        strategy=strategy,
        accumulate_grad_batches=2,
        max_steps=2000,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[Gathers()] if case.fault is raises else [],
        **SILENT,
    )
    trainer.fit(Faulty(case.fault, folder), DataLoader(Ragged(lambda: None), 2))


def _replace_by_death(owner: Any, name: str, rank: int, folder: Path) -> None:
    """Let the bad rank be killed in place of this call."""

    def die(*args: Any, **kwargs: Any) -> None:
        note(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == BAD:
        setattr(owner, name, die)


@dataclass(frozen=True)
class Outcome:
    """Exit status and all that was printed, by rank; seconds from the fault to the last end."""

    statuses: tuple[int | None, ...]
    outputs: list[str]
    seconds: float


def _run(case: Case, folder: Path) -> Outcome:
    processes = started_ranks(_rank, case, folder)
    with killed_at_the_end(processes):
        statuses = exit_statuses(processes, PATIENCE_S)
        end = time.monotonic()
    happened = folder / "happened"
    since = float(happened.read_text()) if happened.exists() else float("nan")
    outputs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(WORLD_SIZE)]
    return Outcome(statuses, outputs, end - since)


@pytest.fixture(scope="module")
def outcomes(
    extension: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future]]:
    """Of each selected case, three at a time."""
    cases = [item.callspec.params["case"] for item in request.session.items if _is_own(item)]
    with ThreadPoolExecutor(max_workers=3) as executor:
        yield {case: executor.submit(_run, case, tmp_path_factory.mktemp("case")) for case in cases}


def _is_own(item: pytest.Item) -> bool:
    return item.function is test_all_leave_with_the_cause  # type: ignore[attr-defined]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.sweep)],  # it waits for heartbeats
    ids=str,
)
def test_all_leave_with_the_cause(case: Case, outcomes: dict[Case, Future]) -> None:
    """In time, none aborted; the failing rank with its user's line, the others with its name."""
    outcome: Outcome = outcomes[case].result()
    assert outcome.statuses == case.statuses, outcome.outputs
    assert outcome.seconds < case.limit_s, outcome
    others = [output for rank, output in enumerate(outcome.outputs) if rank != BAD]
    for output in others:
        assert re.search(case.says.replace("HOST", re.escape(socket.gethostname())), output), output
    if case.fault is not dies_before_its_first_heartbeat:
        printed = outcome.outputs[BAD]
        # First of all, and again at the end: nothing that clean-up raised takes its place.
        assert printed.index("rank 1 raised, and leaves:") < printed.index("in training_step")
        assert printed.rstrip().splitlines()[-1].startswith(("ValueError: ", "RuntimeError: "))
    if case.fault is raises:
        assert all("met [0, 1, 2] on the host" in output for output in outcome.outputs), outcome.outputs
