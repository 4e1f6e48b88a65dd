"""Counting a window ahead: all ranks know its label tokens before its first backward."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_automodel.data.batches import BatchHandle, PendingGather, TrackedLoader
from lightning_automodel.gradients.token_loss import WindowTotals


class WindowAhead:
    """Draws the batches of a window before its first forward, counts them, and sums the counts over all ranks.

    The all-gather over the host ``group`` runs during the first forward. ``copies`` is how many ranks draw
    the same batches (tensor-parallel peers) and therefore count them again. ``count_batch`` counts label
    tokens on the host; ``count`` are those of the newest batch.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        group: dist.ProcessGroup,
        copies: int,
        count_batch: Callable[[Any], float],
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._copies = copies
        self.count_batch = count_batch
        self._window: list[BatchHandle] = []
        self._own_micro_batches = 0
        self._sent: PendingGather
        self.count: float = 0

    def begin_batch(self, tracked: TrackedLoader, handle: BatchHandle) -> None:
        """Note the batch that is about to be trained on. If it begins a window, draw the rest of the window.

        This then starts a collective over the group, without waiting for it: windows of all ranks begin
        together.
        """
        self.count = handle.count or 0
        if handle in self._window:
            return
        trainer = self._trainer
        index = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        accumulate = trainer.accumulate_grad_batches
        size = int(min(accumulate - index % accumulate, trainer.num_training_batches - index))
        self._window = [handle, *tracked.draw_ahead(size - 1)]
        own = [batch.count for batch in self._window if batch.count is not None]
        self._own_micro_batches = len(own)
        self._sent = PendingGather(self._group, sum(own), len(own))

    def totals(self) -> WindowTotals:
        """Totals of the window that has begun. Waits until all ranks have begun it."""
        tokens, micro_batches = (self._sent.received().sum(0) / self._copies).tolist()
        return WindowTotals(tokens, micro_batches, self._own_micro_batches)
