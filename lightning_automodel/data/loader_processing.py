"""What the Trainer iterates in place of each loader: ranks compare theirs, and none repeats samples."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch import nn

from lightning_automodel.data.batches import (
    ERROR,
    JOIN,
    PAD,
    TrackedLoader,
    is_stateful,
    unwrap_loader,
    without_evaluation_data,
)
from lightning_automodel.data.samplers import (
    Ranks,
    distributed_sampler,
    keeps_its_length,
    may_end_early,
    repeats,
    sampler_of_trainer,
    sharing_out,
    subset_number,
)
from lightning_automodel.data.window_ahead import WindowAhead
from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.internals import lightning as lightning_internals


class LoaderProcessing:
    """Makes of each loader what this rank iterates, by what the loaders of all ranks are.

    ==============================================  =====================================================
    loaders of the stage                            a rank whose data ends before another's
    ==============================================  =====================================================
    equally many batches                            there is none
    training, the Trainer has put its sampler in    draws one padding batch (`TrackedLoader`)
    training, other lengths or unknown ones         raises, or draws padding batches
    evaluation and prediction                       joins the steps of others, without data
    ==============================================  =====================================================

    A loader or sampler with an ``__iter__`` of its own may end before its length. Only a rank whose data
    ends waits for the other ranks' answers. If it raises, the others get its error when they next wait
    for it. ``group`` is the host group of all ranks. ``uneven`` is ``ERROR`` or ``PAD``. With ``ahead``,
    training loaders are counted ahead. ``say`` tells the user something, once.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        group: dist.ProcessGroup,
        uneven: str,
        ahead: WindowAhead | None,
        say: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._pads = uneven == PAD
        self._ahead = ahead
        self._say = say

    def process(self, loader: Any) -> Any:
        """What to iterate instead of a loader of the current stage. A collective, so in the same order on all ranks.

        A copy, if its ``DistributedSampler`` would repeat samples to make ranks even. Tracked, if ranks may have
        unequally many batches, or if a training loader is counted ahead or has states to keep.
        """
        loader, pads = self._without_repeats(unwrap_loader(loader))
        tracked = TrackedLoader(loader, self._group, self._trainer.fit_loop)
        self._compare(tracked, loader, pads)
        is_needed = tracked.uneven is not None
        if self._trainer.training:
            is_needed |= self._ahead is not None or is_stateful(loader)
            if self._ahead is not None:
                tracked.count_tokens = self._ahead.count_batch
        return tracked if is_needed else loader

    def _without_repeats(self, loader: Any) -> tuple[Any, bool]:
        """A loader whose ``DistributedSampler`` repeats no samples, and whether a rank may pad where its data ends.

        In training, a sampler or an ``__iter__`` of the user's still repeats samples, unless ranks may pad. With
        ``drop_last``, an epoch ends with the last batch that is full on all ranks.
        """
        sampler = distributed_sampler(loader)
        if sampler is None:
            return loader, self._pads
        total = len(sampler.dataset)
        if not self._trainer.training:
            return sharing_out(loader, sampler, total), False
        ends_early = may_end_early(loader)
        is_of_trainer = isinstance(sampler.num_replicas, Ranks)
        if not self._pads and (ends_early or not is_of_trainer):
            if is_of_trainer or keeps_its_length(sampler):
                self._say(
                    f"{repeats(sampler)}, which is not the Trainer's own, or over which an __iter__ of yours"
                    " iterates: leave that out, or pass AutomodelStrategy(uneven_inputs='pad')."
                )
            return loader, False
        if not is_of_trainer:
            self._say(
                f"{type(sampler).__name__} would repeat samples of the train data, so that the run uses a copy that"
                " does not. What code sets on a loader or sampler that it holds has no effect: set it on"
                " trainer.train_dataloader, its sampler or its batch_sampler."
            )
        # A loader's own drop_last is that of its batch sampler.
        if not ends_early and getattr(loader.batch_sampler, "drop_last", False):
            return sharing_out(loader, sampler, total - total % sampler.num_replicas), False
        return sharing_out(loader, sampler, total), True

    def _compare(self, tracked: TrackedLoader, loader: Any, pads: bool) -> None:
        """Note in ``tracked`` whether ranks may have unequally many batches; ``pads``: in training, padding batches.

        The Trainer's sampler then shares out one order of the same data on all ranks.
        """
        sampler = sampler_of_trainer(loader)
        seed = getattr(sampler, "seed", None)
        subset = None if sampler is None else subset_number(loader.dataset)
        own = sized_len(loader), may_end_early(loader), seed, subset
        lengths, may_end, seeds, subsets = zip(*gather_objects(own, self._group), strict=True)
        if sampler is not None:
            if len(set(subsets)) > 1:
                raise ValueError(
                    "Ranks have different subsets of the data, so that the Trainer's sampler would use"
                    " some samples twice, and others not at all. Split the data alike on all ranks:"
                    " random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)). If each rank shall"
                    " have a part of its own, pass Trainer(use_distributed_sampler=False)."
                )
            sampler.seed = seeds[0]
        is_known = None not in lengths
        keep_length = is_known and not any(may_end)
        if len(lengths) == 1 or (keep_length and len(set(lengths)) == 1):
            return
        if not self._trainer.training:
            if empty := [rank for rank, length in enumerate(lengths) if length == 0]:
                raise ValueError(without_evaluation_data(empty))
            tracked.uneven = JOIN
            return
        if pads and (problem := self._against_padding(loader)) is not None:
            raise ValueError(
                f"The data of some ranks ends before that of others, which take padding batches then: {problem}, or"
                " give all ranks equally many batches, for example by drop_last=True."
            )
        tracked.uneven = PAD if pads else ERROR
        tracked.num_certain = min(lengths) if keep_length else 0
        if keep_length or (is_known and not pads):
            tracked.rank_lengths = list(lengths)

    def _against_padding(self, loader: Any) -> str | None:
        """Why a padding batch would affect results, or cannot work, and what to do; None if it can."""
        module = self._trainer.lightning_module
        if lightning_internals.draws_its_batches(module.training_step):
            return "training_step(dataloader_iter) draws its batches itself: let it take the batch"
        if is_stateful(loader):
            return f"{type(loader).__name__} starts again when it is resumed after its end: use torch's DataLoader"
        parts = self._trainer.limit_train_batches, self._trainer.val_check_interval
        if may_end_early(loader) and any(isinstance(part, float) and part < 1 for part in parts):
            return (
                "limit_train_batches or val_check_interval is a part of the batches, and a stream, or a sampler or"
                " an __iter__ of yours, may end before its length: pass a number of batches"
            )
        for submodule in module.modules():
            if isinstance(submodule, nn.SyncBatchNorm):
                return "SyncBatchNorm would average over padding batches: leave sync_batchnorm out"
            if getattr(submodule, "dist_sync_on_step", False):
                return (
                    "a metric with dist_sync_on_step=True would gather padding batches: leave dist_sync_on_step"
                    " out"
                )
        return None
