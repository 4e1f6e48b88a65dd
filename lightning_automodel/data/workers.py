"""Workers of loaders outlive the signals by which all ranks are asked to stop after the same step.

SLURM sends them to all processes of a job, also to workers. Without batches, a rank could not take that step.
"""

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class WorkerInit:
    """A loader's ``worker_init_fn`` during a run: its workers outlive the first of each of the ``signals``.

    The second one ends a worker: a rank sends SIGTERM to workers that do not end by themselves, and once more
    as it exits.
    """

    own: Callable[[int], None] | None
    rank: int
    signals: Collection[int]

    def __call__(self, worker: int) -> None:
        """Begin a worker with the user's ``own`` function or, without one, with Lightning's for this ``rank``."""
        for signum in self.signals:
            signal.signal(signum, _outlive)
        if self.own is not None:
            self.own(worker)
        elif int(os.environ.get("PL_SEED_WORKERS", 0)):
            pl_worker_init_function(worker, self.rank)


def _outlive(signum: int, frame: Any) -> None:
    signal.signal(signum, signal.SIG_DFL)


class LoaderWorkers:
    """The workers of the loaders of a Trainer's run, which outlive SIGTERM and SLURM's signal to requeue."""

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._rank = trainer.global_rank
        environment = getattr(trainer.strategy, "cluster_environment", None)
        self._signals = {signal.SIGTERM, getattr(environment, "requeue_signal", signal.SIGTERM)}
        self._loaders: WeakSet[DataLoader[Any]] = WeakSet()  # those loaded anew are not kept

    def take(self, loader: Any) -> None:
        """Let the workers that ``loader`` starts from now on outlive the signals."""
        if not isinstance(loader, DataLoader) or loader.num_workers == 0:
            return
        if not isinstance(loader.worker_init_fn, WorkerInit):
            loader.worker_init_fn = WorkerInit(loader.worker_init_fn, self._rank, self._signals)
            self._loaders.add(loader)

    def close(self) -> None:
        """Restore the loaders' own functions."""
        for loader in self._loaders:
            if isinstance(loader.worker_init_fn, WorkerInit):
                loader.worker_init_fn = loader.worker_init_fn.own
