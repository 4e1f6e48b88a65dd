"""One rank of a real run fails in a chosen way in a chosen hook; what do the others do, and how soon?

Ranks are forked from one process that has imported everything, so that a run costs little more than what it
does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_automodel import AutomodelStrategy, context_parallel_attention
from lightning_automodel.distributed import collectives
from tests import devices
from tests.processes import forked, free_port
from tests.trainer.runs import SILENT

WORLD_SIZE = 3
TIMEOUT_S = 6.0
LONG_TIMEOUT_S = 12.0
HEARTBEAT_TIMEOUT_S = 3.0
PATIENCE_S = 60.0
NUM_ATTEMPTS = 3
MESSAGE = "no labels here"
NO_MEMORY = "Tried to allocate 20.00 MiB"
DATA_ENDS = "data ends"
CTRL_C = "Ctrl-C"
OUT_OF_MEMORY = "out of memory"
KERNEL = "error in a kernel"
HANG = "hang"
SKIP = "skip"
ROWS_OF_LESS = 6
CALLED_ONCE = (
    "prepare_data",
    "configure_callbacks",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
)
CALLED_LAST = ("on_train_end", "on_fit_end", "teardown")


@dataclass(frozen=True)
class Cell:
    """One fault.

    ``"__getitem__"`` is the training data set's, ``"attend"`` the attention of a layer, and ``"test_step"`` that of a
    test in which the last rank has less data than the others. ``CTRL_C`` comes to all ranks, ``HANG`` is in the rank's
    own code, ``SKIP`` is a collective of the others, and ``KERNEL`` a label out of range.
    """

    hook: str
    fault: str
    rank: int = 1
    data_parallel: str = "fsdp2"
    context: int = 1  # ranks that share each batch: one, or all
    device: str = "cpu"  # with gloo; or "nccl", the second device whose collectives behave as NCCL's

    @property
    def timeout_s(self) -> float:
        """That of the strategy: where no rank fails, rank 0 logs where all are when half of it has passed."""
        return LONG_TIMEOUT_S if self.fault in (HANG, SKIP) else TIMEOUT_S

    @property
    def leaves(self) -> bool:
        """Whether the rank itself is expected to leave."""
        return self.fault != "SIGSTOP"

    @property
    def meets_on_the_host(self) -> bool:
        """Whether all ranks still meet after the failure, though no collective of their devices ends any more."""
        return (self.hook, self.fault, self.device) == ("training_step", "exception", "nccl")

    @property
    def failing_hook(self) -> str:
        """The Lightning hook in which it happens."""
        return "training_step" if self.hook == "attend" else self.hook

    @property
    def engine(self) -> str:
        """What the table calls it."""
        return self.data_parallel if self.context == 1 else f"{self.data_parallel}, context {self.context}"

    def __str__(self) -> str:
        parts = [
            self.hook,
            self.fault,
            f"rank{self.rank}",
            self.engine,
            *([] if self.device == "cpu" else [self.device]),
        ]
        return "-".join(part.replace(", ", "-").replace(" ", "_") for part in parts)


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    # Exit status by rank; negative is the number of a signal, None still running.
    statuses: dict[int, int | None]
    outputs: dict[int, str]  # everything that each rank printed
    seconds: float  # from the fault until the last of the other ranks had left
    raised_s: float | None  # until the Trainer had raised on the last of them; None where it did not on one


class Ragged(Dataset):
    """Rows of unequal numbers of label tokens."""

    def __init__(self, on_get: Callable[[], None], length: int) -> None:
        self._on_get = on_get
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._on_get()
        labels = torch.full((8,), -100)
        labels[: 1 + index % 8] = index % 16
        return {"input_ids": torch.arange(8), "labels": labels}


class Model(pl.LightningModule):
    """Two layers and a head; `fail_in` breaks one of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = torch.relu(block(self.attend(hidden)))
        return self.head(hidden)

    def attend(self, hidden: Tensor) -> Tensor:
        return context_parallel_attention(*[hidden[:, None]] * 3)[:, 0]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gathers(pl.Callback):
    """After a failure, all ranks still meet on the host, as to save a checkpoint."""

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        group = collectives.host_group(timedelta(seconds=20))
        print(f"met {collectives.gather_objects(trainer.global_rank, group)} on the host")


def happen(fault: str, folder: Path) -> None:
    """Make the fault happen to this process, and note when."""
    (folder / "happened").write_text(str(time.monotonic()))
    if fault == "exception":
        raise ValueError(MESSAGE)
    if fault == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(NO_MEMORY)
    if fault == "sys.exit":
        sys.exit(3)
    if fault == "os._exit":
        os._exit(3)
    if fault == HANG:
        while True:
            time.sleep(0.2)
    if fault == CTRL_C:
        for each in folder.glob("pid*"):
            os.kill(int(each.read_text()), signal.SIGINT)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault])


def fail_in(hook: str, fault: str, folder: Path, rank: int) -> tuple[type[Model], Callable[[], None]]:
    """A model class that meets the fault in ``hook``, and what the data set calls for each row."""
    calls = {"left": 3}
    if fault == DATA_ENDS:
        calls["left"] = ROWS_OF_LESS
    elif hook in (*CALLED_ONCE, *CALLED_LAST):
        calls["left"] = 1
    elif hook == "attend":
        # In the second layer of the third step: the check of the first one calls both twice more.
        calls["left"] = 10
    elif fault in (HANG, SKIP):
        # In the fourth window, behind a validation: no step reads from the device any more.
        calls["left"] = 11

    def count_down(*arguments: Any) -> None:
        calls["left"] -= 1
        if calls["left"] != 0:
            return
        is_here = int(os.environ["RANK"]) == rank
        if is_here:
            happen(fault, folder)
        if is_here and fault == KERNEL:
            arguments[1]["labels"][0, 0] = 99
        if not is_here and fault == SKIP:
            dist.all_reduce(torch.ones(3, device=arguments[0].device))

    if hook == "__getitem__" or fault == DATA_ENDS:
        return Model, count_down
    original = getattr(Model, hook)

    def broken(self: Model, *args: Any, **kwargs: Any) -> Any:
        count_down(self, *args)
        return original(self, *args, **kwargs)

    # Not functools.wraps: Lightning takes a wrapped hook for one that is not overridden.
    return type("BrokenModel", (Model,), {hook: broken}), (lambda: None)


def become_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Let this process be a rank that a launcher has started: environment, log file and one thread."""
    with open(folder / f"rank{rank}.log", "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, closefd=False) for descriptor in (1, 2))
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )


def use_nccl_like_device(folder: Path) -> Any:
    """Let this process train on the second device with collectives that behave as NCCL's; returns its accelerator."""
    from tests.second_device.nccl_like import RUN_AHEAD

    # The host may then stand anywhere: it runs ahead of the device.
    os.environ.update({devices.VARIABLE: "nccl", RUN_AHEAD: str(folder / "happened")})
    return devices.accelerator(WORLD_SIZE)


def make_trainer(
    num_devices: int,
    timeout_s: float,
    heartbeat_timeout_s: float = 120.0,
    accelerator: Any = "cpu",
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> pl.Trainer:
    """A silent Trainer of a rank that has an environment of its own; ``options`` are the strategy's."""
    strategy = AutomodelStrategy(
        timeout=timedelta(seconds=timeout_s),
        heartbeat_timeout=timedelta(seconds=heartbeat_timeout_s),
        **(options or {}),
    )
    settings = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, **SILENT, **settings}
    return pl.Trainer(accelerator=accelerator, devices=num_devices, strategy=strategy, **settings)


def data(length: int = 4096, on_get: Callable[[], None] = lambda: None) -> DataLoader:
    return DataLoader(Ragged(on_get, length), 2)


def train(cell: Cell, rank: int, port: int, folder: Path) -> None:
    """What one rank does."""
    become_rank(rank, WORLD_SIZE, port, folder)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    try:
        fit_or_test(cell, rank, folder)
    except BaseException:
        (folder / f"raised{rank}").write_text(str(time.monotonic()))
        raise


def fit_or_test(cell: Cell, rank: int, folder: Path) -> None:
    """Train, or test, until the fault ends it."""
    accelerator = use_nccl_like_device(folder) if cell.device == "nccl" else "cpu"
    model_class, on_get = fail_in(cell.hook, cell.fault, folder, cell.rank)
    trainer = make_trainer(
        WORLD_SIZE,
        cell.timeout_s,
        HEARTBEAT_TIMEOUT_S,
        accelerator,
        {"data_parallel": cell.data_parallel, "context_parallel_size": cell.context},
        accumulate_grad_batches=2,
        max_steps=3 if cell.hook in CALLED_LAST else 200,
        val_check_interval=3 if cell.fault == DATA_ENDS else 4,  # at most the batches of an epoch
        limit_val_batches=4,
        callbacks=[Gathers()] if cell.meets_on_the_host else [],
    )
    if cell.hook == "test_step":
        trainer.test(model_class(), data(ROWS_OF_LESS if rank == WORLD_SIZE - 1 else 4096, on_get))
        return
    length = ROWS_OF_LESS if cell.fault == DATA_ENDS and rank == cell.rank else 4096
    trainer.fit(model_class(), data(length, on_get), data())


def run(cell: Cell, folder: Path) -> Outcome:
    """Like `run_once`; again if the fault did not happen, since a busy machine was too slow for the ranks to join."""
    for attempt in range(NUM_ATTEMPTS):
        own = folder / f"attempt{attempt}"
        own.mkdir()
        outcome = run_once(cell, own)
        if (own / "happened").exists():
            break
    return outcome


def run_once(cell: Cell, folder: Path) -> Outcome:
    """Run all ranks until those that should have left, at most for ``PATIENCE_S`` seconds."""
    processes = started_ranks(train, cell, folder)
    others = [rank for rank in range(WORLD_SIZE) if rank != cell.rank]
    with killed_at_the_end(processes):
        exit_statuses([processes[rank] for rank in others], PATIENCE_S)
        end = time.monotonic()
        statuses = dict(enumerate(exit_statuses(processes, PATIENCE_S if cell.leaves else 0.0)))
    happened = folder / "happened"
    since = float(happened.read_text()) if happened.exists() else float("nan")
    outputs = dict(enumerate(outputs_in(folder, WORLD_SIZE)))
    raised = [folder / f"raised{rank}" for rank in others]
    all_raised = all(each.exists() for each in raised)
    raised_s = max(float(each.read_text()) for each in raised) - since if all_raised else None
    return Outcome(statuses, outputs, end - since, raised_s)


def started_ranks(
    target: Callable[..., None], case: Any, folder: Path, world_size: int = WORLD_SIZE
) -> list[Any]:
    """All ranks as processes, each of which runs ``target(case, rank, port, folder)``; the port is free."""
    context = forked()
    port = free_port()
    processes = [
        context.Process(target=target, args=(case, rank, port, folder)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def outputs_in(folder: Path, world_size: int) -> list[str]:
    """What each rank has printed."""
    return [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(world_size)]


def exit_statuses(processes: list[Any], patience_s: float) -> tuple[int | None, ...]:
    """How the processes have ended within ``patience_s``; None for one that has not."""
    running = {process.sentinel for process in processes}
    deadline = time.monotonic() + patience_s
    while running and (ended := wait(list(running), max(0.0, deadline - time.monotonic()))):
        running -= set(ended)
    for process in processes:
        process.join(0 if process.is_alive() else None)
    return tuple(process.exitcode for process in processes)


@contextlib.contextmanager
def killed_at_the_end(processes: list[Any]) -> Iterator[None]:
    """Kill the processes that are left when the block ends."""
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
