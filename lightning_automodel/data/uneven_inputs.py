"""Ranks whose data ends before another's: noticed before the step in which they would wait for each other."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

_UNKNOWN = -1
_GOES_ON = -1


class UnevenInputs:
    """Raises on every rank where one rank's data ends before another's.

    A rank knows its last batch before the step on it. Where the loaders of a stage have the same length on all ranks,
    nothing more is needed. Else each rank sends with every batch whether it is the last, and only a rank whose data
    ends waits for the answers: those that go on learn of its error where they wait for it.

    Args:
        trainer: Of the run.
        group: All ranks, on the host.
    """

    def __init__(self, trainer: "pl.Trainer", group: dist.ProcessGroup) -> None:
        self._trainer, self._group = trainer, group
        self._may_differ: set[str] = set()
        self._pending: tuple[dist.Work | None, Tensor, Tensor] | None = None

    def process(self, loader: object) -> None:
        """Compare the lengths of a loader of the current stage.

        A collective over the group: all ranks process their loaders in one order.
        """
        length = sized_len(loader)
        lengths = torch.empty(self._group.size(), dtype=torch.int64)
        dist.all_gather_into_tensor(lengths, torch.tensor([_UNKNOWN if length is None else length]), self._group)
        if length is None or bool((lengths != lengths[0]).any()):
            self._may_differ.add(self._stage)

    def begin_batch(self) -> None:
        """A step on a batch is about to run. A collective over the group where lengths differ or are unknown.

        Raises:
            RuntimeError: If this rank's data ends with the batch, and that of another does not, which is told.
        """
        if self._stage not in self._may_differ:
            return
        progress = self._progress()
        number, is_last = progress.current.ready, progress.is_last_batch
        mine = torch.tensor([number if is_last else _GOES_ON])
        everyone = torch.empty(self._group.size(), dtype=torch.int64)
        work = dist.all_gather_into_tensor(everyone, mine, self._group, async_op=True)
        self._pending = work, mine, everyone  # must outlive the communication
        if not is_last:
            return
        if work is not None:
            work.wait()
        others = [rank for rank, last in enumerate(everyone.tolist()) if last == _GOES_ON]
        if others:
            ended = sorted(set(range(len(everyone))) - set(others))
            raise RuntimeError(
                f"The {self._stage} data of {_ranks(ended)} ends with batch {number}, and {_ranks(others)} would go on"
                " and wait for more: give all ranks equally many batches, for example by a DistributedSampler or"
                f" drop_last=True, or pass Trainer(limit_{self._stage}_batches={number})."
            )

    @property
    def _stage(self) -> str:
        stage = self._trainer.state.stage
        return (None if stage is None else stage.dataloader_prefix) or "train"

    def _progress(self) -> Any:
        trainer = self._trainer
        if self._stage == "train":
            return trainer.fit_loop.epoch_loop.batch_progress
        if trainer.state.fn == TrainerFn.FITTING:
            return trainer.fit_loop.epoch_loop.val_loop.batch_progress
        loops = {"val": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}
        return loops[self._stage].batch_progress


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
