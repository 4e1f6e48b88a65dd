"""One rank of a real run fails in a chosen way in a chosen hook; what do the others do, and how soon?

Ranks are forked from one process that has imported everything, so that a run costs little more than what it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_automodel import AutomodelStrategy, context_parallel_attention
from tests.processes import forked
from tests.trainer.runs import SILENT

WORLD_SIZE = 3
TIMEOUT_S = 6.0
PATIENCE_S = 60.0
MESSAGE = "no labels here"
DATA_ENDS = "data ends"
ROWS_OF_LESS = 6
CALLED_ONCE = (
    "configure_callbacks",
    "prepare_data",
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

    Attributes:
        hook: Where it happens; ``"__getitem__"`` is the training data set's, ``"attend"`` the attention of a layer, and
            ``"test_step"`` is that of a test in which the last rank has less data than the others.
        fault: What happens: ``"exception"``, ``"sys.exit"``, ``"os._exit"``, a signal's name, or ``"data ends"`` before
            that of the others, which each rank raises.
        rank: Where it happens.
        data_parallel: Engine of the strategy.
        context: Ranks that share each batch: one, or all.
    """

    hook: str
    fault: str
    rank: int = 1
    data_parallel: str = "fsdp2"
    context: int = 1

    @property
    def failing_hook(self) -> str:
        """The Lightning hook in which it happens."""
        return "training_step" if self.hook == "attend" else self.hook

    @property
    def engine(self) -> str:
        """What the table calls it."""
        return self.data_parallel if self.context == 1 else f"{self.data_parallel}, context {self.context}"

    def __str__(self) -> str:
        return f"{self.hook}-{self.fault}-rank{self.rank}-{self.engine.replace(', ', '-')}"


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        statuses: Exit status by rank; negative is the number of a signal, None still running.
        outputs: Everything that each rank printed.
        seconds: From the fault until the last of the other ranks had left.
    """

    statuses: dict[int, int | None]
    outputs: dict[int, str]
    seconds: float


class Ragged(Dataset):
    """Rows of unequal numbers of label tokens."""

    def __init__(self, on_get: Callable[[], None], length: int = 4096) -> None:
        self._on_get, self._length = on_get, length

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


def happen(fault: str, folder: Path) -> None:
    """Make the fault happen to this process, and note when."""
    (folder / "happened").write_text(str(time.monotonic()))
    if fault == DATA_ENDS:
        return
    if fault == "exception":
        raise ValueError(MESSAGE)
    if fault == "sys.exit":
        sys.exit(3)
    if fault == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[fault])


def fail_in(hook: str, fault: str, folder: Path, rank: int) -> tuple[type[Model], Callable[[], None]]:
    """A model class that meets the fault in ``hook``, and what the data set calls for each row."""
    calls = {"left": ROWS_OF_LESS if fault == DATA_ENDS else 1 if hook in (*CALLED_ONCE, *CALLED_LAST) else 3}
    if hook == "attend":
        calls["left"] = 10  # in the second layer of the third step: the check of the first one calls both twice more

    def count_down(*_: Any, **__: Any) -> None:
        calls["left"] -= 1
        if calls["left"] == 0 and int(os.environ["RANK"]) == rank:
            happen(fault, folder)

    if hook == "__getitem__" or fault == DATA_ENDS:
        return Model, count_down
    original = getattr(Model, hook)

    def broken(self: Model, *args: Any, **kwargs: Any) -> Any:
        count_down()
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


def train(cell: Cell, rank: int, port: int, folder: Path) -> None:
    """What one rank does."""
    become_rank(rank, WORLD_SIZE, port, folder)
    model_class, on_get = fail_in(cell.hook, cell.fault, folder, cell.rank)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=AutomodelStrategy(
            data_parallel=cell.data_parallel,
            context_parallel_size=cell.context,
            timeout=timedelta(seconds=TIMEOUT_S),
        ),
        accumulate_grad_batches=2,
        max_steps=3 if cell.hook in CALLED_LAST else 200,
        val_check_interval=3 if cell.fault == DATA_ENDS else 4,  # at most the batches of an epoch
        use_distributed_sampler=False,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        **SILENT,
    )
    if cell.hook == "test_step":
        length = ROWS_OF_LESS if rank == WORLD_SIZE - 1 else 4096
        trainer.test(model_class(), DataLoader(Ragged(on_get, length), 2))
        return
    length = ROWS_OF_LESS if cell.fault == DATA_ENDS and rank == cell.rank else 4096
    trainer.fit(model_class(), DataLoader(Ragged(on_get, length), 2), DataLoader(Ragged(lambda: None), 2))


def run(cell: Cell, folder: Path) -> Outcome:
    """Run all ranks until the others have left, at most for ``PATIENCE_S`` seconds."""
    context = forked()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    processes = [context.Process(target=train, args=(cell, rank, port, folder)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    with killed_at_the_end(processes):
        others = {process.sentinel: rank for rank, process in enumerate(processes) if rank != cell.rank}
        deadline = time.monotonic() + PATIENCE_S
        while others and (ready := wait(list(others), max(0.0, deadline - time.monotonic()))):
            for sentinel in ready:
                del others[sentinel]
        end = time.monotonic()
        for process in processes:
            process.join(0 if process.is_alive() else None)
        statuses = {rank: process.exitcode for rank, process in enumerate(processes)}
    happened = folder / "happened"
    since = float(happened.read_text()) if happened.exists() else float("nan")
    outputs = {rank: (folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(WORLD_SIZE)}
    return Outcome(statuses, outputs, end - since)


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
