"""Ranks whose data ends before another's: an error in training, and one count for each sample in evaluation."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DistributedSampler

_UNKNOWN = -1
_GOES_ON, _IS_LAST, _HAS_ENDED = range(3)


class UnevenInputs:
    """Keeps ranks together whose loaders have different lengths.

    Where the loaders of a stage have the same length on all ranks, nothing is communicated. Else each rank sends with
    every batch whether it is its last, which it knows before the step. Only a rank whose data ends waits for the
    answers. In training it raises, and those that go on learn of its error where they wait for it. In evaluation and
    prediction it takes part in what their steps communicate, without data, until all have ended.

    Args:
        trainer: Of the run.
        group: All ranks, on the host.
    """

    def __init__(self, trainer: "pl.Trainer", group: dist.ProcessGroup) -> None:
        self._trainer, self._group = trainer, group
        self._may_differ: set[str] = set()
        self._steps: Counter[int] = Counter()
        self._sent: tuple[dist.Work | None, Tensor, list[Tensor]] | None = None
        self._is_in_step = False

    def process(self, loader: object) -> None:
        """Compare the lengths of a loader of the current stage; in evaluation, let its sampler repeat nothing.

        A collective over the group: all ranks process their loaders in one order.
        """
        if self._stage != "train":
            _stop_repeating(loader)
        length = sized_len(loader)
        self._send(_UNKNOWN if length is None else length)
        if length is None or len(set(self._answers())) > 1:
            self._may_differ.add(self._stage)

    def begin_training_step(self) -> None:
        """A training step is about to run. A collective over the group where lengths differ or are unknown.

        Raises:
            RuntimeError: If this rank's data ends with its batch, and that of another does not, which is told.
        """
        if self._stage not in self._may_differ:
            return
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        number = progress.current.ready
        self._send(_IS_LAST if progress.is_last_batch else _GOES_ON)
        if not progress.is_last_batch:
            return
        others = [rank for rank, sent in enumerate(self._answers()) if sent == _GOES_ON]
        if others:
            ended = sorted(set(range(self._group.size())) - set(others))
            raise RuntimeError(
                f"The train data of {_ranks(ended)} ends with batch {number}, and {_ranks(others)} would go on"
                " and wait for more: give all ranks equally many batches, for example by a DistributedSampler or"
                f" drop_last=True, or pass Trainer(limit_train_batches={number})."
            )

    def evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], join: Callable[[], None]) -> Any:
        """Run an evaluation step, and after the last one of a loader those of other ranks, without data.

        A collective over the group where lengths differ or are unknown.

        Args:
            step: The step.
            args: Its arguments: batch, batch index, and the index of the loader where there are several.
            join: Takes part in what a step of other ranks communicates.
        """
        if self._stage not in self._may_differ:
            return step(*args)
        is_last = self._is_last(args[2] if len(args) > 2 else 0)
        self._send(_IS_LAST if is_last else _GOES_ON)
        self._is_in_step = True
        try:
            output = step(*args)
        finally:
            self._is_in_step = False
        while is_last and _GOES_ON in self._answers():
            self._send(_HAS_ENDED)
            join()
        return output

    def _is_last(self, dataloader_idx: int) -> bool:
        """Whether this rank has no batch of the loader after this one: loaders of a stage follow each other."""
        loop = self._evaluation_loop
        if loop.batch_progress.current.started <= 1:
            self._steps.clear()
        self._steps[dataloader_idx] += 1
        return loop.batch_progress.is_last_batch or self._steps[dataloader_idx] == loop.max_batches[dataloader_idx]

    def check_reduction(self) -> None:
        """Before a value is reduced over ranks: all of them must be in a step, or none.

        Raises:
            RuntimeError: If some have no data left.
        """
        if self._is_in_step and (ended := [rank for rank, sent in enumerate(self._answers()) if sent == _HAS_ENDED]):
            raise RuntimeError(
                f"A value is reduced over all ranks within an evaluation step, but not on {_ranks(ended)}, whose data"
                " has ended: log it with on_step=False, on_epoch=True, or give all ranks equally many batches."
            )

    def _send(self, mine: int) -> None:
        """Tell all ranks a number, and start to receive theirs."""
        sent = torch.tensor(mine)
        everyone = [torch.empty_like(sent) for _ in range(self._group.size())]
        work = dist.all_gather(everyone, sent, self._group, async_op=True)
        self._sent = work, sent, everyone  # must outlive the communication

    def _answers(self) -> list[int]:
        if self._sent is None:
            return []
        work, _, everyone = self._sent
        if work is not None:
            work.wait()
        return [int(each) for each in everyone]

    @property
    def _stage(self) -> str:
        stage = self._trainer.state.stage
        return (None if stage is None else stage.dataloader_prefix) or "train"

    @property
    def _evaluation_loop(self) -> Any:
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            return trainer.fit_loop.epoch_loop.val_loop
        return {"val": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}[self._stage]


def _stop_repeating(loader: object) -> None:
    """Let a sampler that repeats samples to even the ranks out give each rank only its own, if all ranks have some."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    total = sized_len(sampler.dataset)
    if total is not None and total >= sampler.num_replicas:
        sampler.total_size, sampler.num_samples = total, len(range(sampler.rank, total, sampler.num_replicas))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
