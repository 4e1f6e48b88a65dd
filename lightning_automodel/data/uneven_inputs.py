"""Ranks whose data ends before another's: an error or padding in training; in evaluation each sample counts once."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.data.batches import (
    ERROR,
    JOIN,
    NO_BATCH,
    PAD,
    BatchHandle,
    PendingGather,
    TrackedLoader,
    is_stateful,
    ranks,
    unwrap_loader,
    without_evaluation_data,
)
from lightning_automodel.data.padding import ModuleState, log_neutral
from lightning_automodel.data.samplers import (
    Ranks,
    distributed_sampler,
    drawn_order,
    keeps_its_length,
    may_end_early,
    repeats,
    sampler_of_trainer,
    sharing_out,
    subset_number,
)
from lightning_automodel.data.window_ahead import WindowAhead
from lightning_automodel.distributed.collectives import full, gather_objects
from lightning_automodel.gradients.rank_agreement import DIFFERENT_ORDERS, DIFFERENT_UNITS
from lightning_automodel.internals import lightning as lightning_internals

_TRAIN = "train"


class UnevenInputs:
    """Synchronises ranks with unequal numbers of batches.

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
        self.ahead = ahead
        self._say = say
        self.seconds_drawing = 0.0  # spent on drawing batches ahead of their steps
        self.order = 0  # a number of that which samplers have drawn for the epoch that trains
        self._before_padding: ModuleState | None = None
        self._handle = NO_BATCH  # of the evaluation step, if ranks may have unequally many batches
        self._next = NO_BATCH  # to evaluate after it
        self._is_in_step = False
        self._num_evaluated = 0  # steps of evaluation in this run, also of others that this rank has joined
        self._has_evaluated = False  # some batch, since `take_evaluated` was called last
        self._is_of_all_ranks = False  # what is logged
        self._logging = ""  # the name of the value that is logged at the moment
        self._reduced = 0  # a number of the names of values that ranks have reduced as they logged them
        self._loaders: Any = None  # those of training that _begin_loaders has seen
        self._trained_loaders: list[Any] = []  # one after the other
        self._tracked: TrackedLoader | None = None  # of them, if there is but one

    def process(self, loader: Any) -> Any:
        """What to iterate instead of a loader of the current stage. A collective, so in the same order on all ranks.

        A copy, if its ``DistributedSampler`` would repeat samples to make ranks even. Tracked, if ranks may have
        unequally many batches, or if a training loader is counted ahead or has states to keep.
        """
        loader, pads = self._without_repeats(unwrap_loader(loader))
        processed = self._compared(loader, pads)
        if not self.is_training or (self.ahead is None and not is_stateful(loader)):
            return processed
        if processed is loader:
            processed = TrackedLoader(loader, self._group, self._trainer.fit_loop)
        if self.ahead is not None:
            processed.count_tokens = self.ahead.count_batch
        return processed

    def _without_repeats(self, loader: Any) -> tuple[Any, bool]:
        """A loader whose ``DistributedSampler`` repeats no samples, and whether a rank may pad where its data ends.

        In training, a sampler or an ``__iter__`` of the user's still repeats samples, unless ranks may pad. With
        ``drop_last``, an epoch ends with the last batch that is full on all ranks.
        """
        sampler = distributed_sampler(loader)
        if sampler is None:
            return loader, self._pads
        total = len(sampler.dataset)
        if not self.is_training:
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

    def _compared(self, loader: Any, pads: bool) -> Any:
        """The loader, tracked if ranks may have unequally many batches; ``pads``: in training, with padding batches.

        The Trainer's sampler then shares out one order of the same data on all ranks.
        """
        sampler = sampler_of_trainer(loader)
        seed = getattr(sampler, "seed", None)
        subset = None if sampler is None else subset_number(loader.dataset)
        told = gather_objects((sized_len(loader), may_end_early(loader), seed, subset), self._group)
        lengths: list[Any] = [length for length, *_ in told]
        if sampler is not None:
            if len({subset for *_, subset in told}) > 1:
                raise ValueError(
                    f"Ranks have different subsets of the {self._stage} data, so that the Trainer's sampler would use"
                    " some samples twice, and others not at all. Split the data alike on all ranks:"
                    " random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)). If each rank shall"
                    " have a part of its own, pass Trainer(use_distributed_sampler=False)."
                )
            sampler.seed = told[0][2]
        is_known = None not in lengths
        keep_length = is_known and not any(ends_early for _, ends_early, *_ in told)
        if len(lengths) == 1 or (keep_length and len(set(lengths)) == 1):
            return loader
        if not self.is_training:
            if empty := [rank for rank, length in enumerate(lengths) if length == 0]:
                raise ValueError(without_evaluation_data(empty))
            return TrackedLoader(loader, self._group, None, JOIN)
        if pads and (problem := self._against_padding(loader)) is not None:
            raise ValueError(
                f"The data of some ranks ends before that of others, which take padding batches then: {problem}, or"
                " give all ranks equally many batches, for example by drop_last=True."
            )
        tracked = TrackedLoader(loader, self._group, self._trainer.fit_loop, PAD if pads else ERROR)
        if keep_length:
            tracked.num_certain = min(lengths)
        if keep_length or (is_known and not pads):
            tracked.rank_lengths = lengths
        return tracked

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

    # --- Training -----------------------------------------------------------------------------------------------------

    def _begin_loaders(self) -> None:
        """Called at the first batch of new training loaders, when it is known how many there are."""
        loaders = CombinedLoader(self._loaders).flattened
        self._trained_loaders = loaders
        tracked = [loader for loader in loaders if isinstance(loader, TrackedLoader)]
        self._tracked = None
        if len(loaders) == len(tracked) == 1:
            self._tracked = tracked[0]
        elif self.ahead is not None or any(loader.uneven == PAD for loader in tracked):
            raise ValueError(
                "count_window_ahead=True, and padding batches where ranks have unequally many, need one training"
                " loader, not several: combine their data in one Dataset, or leave count_window_ahead out and give"
                " all ranks equally many batches (drop_last=True)."
            )

    def log(self, log: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
        """Call the ``log`` of what a loop collects, with whole tensors; what is of a padding batch does not count.

        Of a ``DTensor`` Lightning would read this rank's part. ``fx`` is the hook that has logged the value.
        """
        value = apply_to_collection(value, DTensor, full)
        self._logging = name
        try:
            if self._is_of_all_ranks or not self.is_training or "epoch" in fx or fx == "on_train_start":
                log(fx, name, value, **options)
                return
            log_batch = partial(log_neutral, log) if self.is_filler else log
            # A mean is over the ranks that have data.
            self._run_in_step(partial(log_batch, fx, name, value, **options))
        finally:
            self._logging = ""

    @contextmanager
    def logging_of_all_ranks(self) -> Iterator[None]:
        """Context in which values are logged that are of all ranks, whether or not this one has a padding batch."""
        self._is_of_all_ranks = True
        try:
            yield
        finally:
            self._is_of_all_ranks = False

    def note_reduction(self) -> None:
        """Note the name of a value that is reduced as it is logged: :meth:`compare_ranks` compares them."""
        if self._logging and self.num_with_data(self._group) == self._group.size():
            self._reduced = zlib.crc32(self._logging.encode(), self._reduced)

    def _run_in_step(self, step: Callable[[], Any]) -> Any:
        """Run ``step``, in which values are reduced and gathered as those of one batch of each rank."""
        is_in_step = self._is_in_step
        self._is_in_step = True
        try:
            return step()
        finally:
            self._is_in_step = is_in_step

    def begin_training_batch(self) -> None:
        """Called when a training batch is about to be used, after its hooks. If counted ahead, draws its window."""
        handle = self._training_handle()
        self.order = drawn_order(self._trained_loaders)
        if self.ahead is not None and self._tracked is not None:
            start = time.perf_counter()
            self.ahead.begin_batch(self._tracked, handle)
            self.seconds_drawing += time.perf_counter() - start

    def _training_handle(self) -> BatchHandle:
        """The newest training batch's, from the first of its hooks on."""
        trainer = self._trainer
        if trainer.train_dataloader is not self._loaders:
            self._loaders = trainer.train_dataloader
            self._begin_loaders()
        if self._tracked is None:
            return NO_BATCH
        return self._tracked.begin(trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    @property
    def is_filler(self) -> bool:
        """Whether this rank trains on a padding batch."""
        return self._trainer.training and self._training_handle().is_filler

    def num_with_data(self, group: dist.ProcessGroup) -> int:
        """How many ranks of ``group`` have no padding batch in this training step. Waits until all ranks have drawn."""
        if not (self._is_in_step and self.is_training):
            return group.size()
        handle = self._training_handle()
        if self._tracked is None or self._tracked.uneven == ERROR:
            return group.size()
        return len(set(dist.get_process_group_ranks(group)) - set(handle.ranks_without()))

    def train(self, step: Callable[[], Any]) -> Any:
        """Run a training step. What a padding batch changes in the module lasts until :meth:`end_padding`."""
        if not self.is_filler:
            return self._run_in_step(step)
        self._before_padding = ModuleState(self._trainer.lightning_module)
        with isolate_rng():
            return self._run_in_step(step)

    def end_padding(self) -> None:
        """Restore what a step on a padding batch, or its backward, has changed in the module."""
        state = self._before_padding
        self._before_padding = None
        if state is not None:
            state.restore()

    # --- Evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        begin: Callable[[], bool],
        join: Callable[[int], None],
    ) -> Any:
        """Run an evaluation step. After the last one of a loader, join the remaining steps of other ranks.

        A collective over the group if lengths differ or are unknown. ``begin`` is called before each step of
        any rank, and returns whether all ranks stop after it; ``join`` joins the collectives of a step of
        other ranks. Raises SIGTERMException if all ranks stop and this one has no batch left, before which
        Lightning would raise.
        """
        stops = begin()
        self._num_evaluated += 1
        self._begin_evaluated_batch(step.__name__, args)
        output = self._run_in_step(partial(step, *args))
        while self._next.is_filler and (leader := self._next.first_rank_with()) is not None:
            if stops:
                raise lightning_internals.SIGTERMException
            self._next.sent = PendingGather(self._group, False)
            stops = begin()
            self._num_evaluated += 1
            join(leader)
        return output

    def batch_comes(self) -> None:
        """A batch of the current stage is about to be used, before its hooks."""
        self._has_evaluated = not self.is_training

    def take_evaluated(self) -> bool:
        """Whether batches have been evaluated since this was called last, or since an evaluation has ended."""
        has_evaluated = self._has_evaluated
        self._has_evaluated = False
        return has_evaluated

    def find_leader(self) -> int | None:
        """The first rank with data in this step of evaluation, if another one has none.

        Waits until all have begun the step before.
        """
        return self._handle.first_rank_with()

    def compare_ranks(self, first_peer: int, unit_order: int) -> None:
        """Raise RuntimeError, on every rank, unless all have come through equally many evaluated steps. A collective.

        And unless they have drawn one order, have reduced values under the same names, and ranks with one
        ``first_peer`` have the same ``unit_order``; see :class:`.Engine`.
        """
        self._has_evaluated = False
        loaders = self._trained_loaders if self.is_training else self._evaluated_loaders
        own = self._num_evaluated, self._reduced, drawn_order(loaders), (first_peer, unit_order)
        told = gather_objects(own, self._group)
        found = [number for number, *_ in told]
        if len(set(found)) > 1:
            raise RuntimeError(
                f"The ranks have evaluated {found} batches, and results are of these alone: a hook or a data set has"
                " raised StopIteration on some ranks, which Lightning takes for the end of the data. Begin an"
                " iterator anew where it ends."
            )
        if len({order for *_, order, _ in told}) > 1:
            raise RuntimeError(DIFFERENT_ORDERS)
        if len({names for _, names, *_ in told}) > 1:
            raise RuntimeError(
                "Ranks have logged values with on_step=True and sync_dist=True under other names, or in another order,"
                " so that values of several names were reduced together: log the same names on all ranks, or with"
                " on_step=False, on_epoch=True, which reduces each over the ranks that have logged it, if all log some."
            )
        if len({units for *_, units in told}) > len({first for *_, (first, _) in told}):
            raise RuntimeError(DIFFERENT_UNITS)

    def _begin_evaluated_batch(self, step: str, args: tuple[Any, ...]) -> None:
        """Note the batch that ``step`` is about to evaluate, and the next one, where ranks may have unequally many.

        The other ranks are told whether this one has a next batch. ValueError if the loader is not known.
        """
        self._handle = NO_BATCH
        self._next = NO_BATCH
        trainer = self._trainer
        loaders = self._evaluated_loaders
        if not any(isinstance(loader, TrackedLoader) for loader in loaders):
            return
        is_one = len(loaders) == 1
        draws_its_batches = lightning_internals.draws_its_batches(getattr(trainer.lightning_module, step))
        # Of several loaders one after the other, Lightning passes the number.
        if draws_its_batches or not (is_one or len(args) > 2):
            raise ValueError(
                "Ranks may have unequally many batches, and the last one is not known in a step that takes a"
                " dataloader_iter, or batches of several loaders at once: let it take the batch, and evaluate one"
                " loader after the other (mode='sequential')."
            )
        index = 0 if is_one else args[2]
        loader = loaders[index]
        if not isinstance(loader, TrackedLoader):  # all ranks have equally many batches of it
            return
        self._handle = loader.begin(loader.num_begun + 1)
        limits = f"num_{self._stage}_batches"
        if trainer.sanity_checking:
            limits = "num_sanity_val_batches"
        # Known once the next batch is drawn. A limit that is a part of the batches differs between ranks.
        is_last = loader.num_begun >= getattr(trainer, limits)[index] or not loader.draw_ahead(1)
        self._next = BatchHandle(is_filler=True) if is_last else loader.draw_ahead(1)[0]
        self._next.sent = PendingGather(self._group, not is_last)

    def check_communication(self) -> None:
        """Raise RuntimeError, before user code communicates, if some ranks have ended and evaluate no batch."""
        if self.is_training:
            return
        where = lightning_internals.current_hook(self._trainer.lightning_module) or ""
        ended: list[int] = []
        if self._is_in_step or where.endswith("batch_end"):
            ended = self._handle.ranks_without()
        if not self._is_in_step and where.endswith(
            ("batch_start", "batch_end", "batch_transfer", "to_device")
        ):
            # A rank joins the next step of others before the last hook of its own last batch.
            ended = ended or self._next.ranks_without()
        if ended:
            raise RuntimeError(
                f"Ranks communicate within {where}, but not on {ranks(ended)}, whose data has ended: to reduce a"
                " value, to compute a metric, to read trainer.log_dir, to save, or to gather sharded weights, as a"
                " forward does. Log with on_step=False, on_epoch=True, do the rest in hooks of the epoch, call the"
                " model in the step, or give all ranks equally many batches."
            )

    def check_gathering(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Raise if a rank of ``group`` has a padding batch, or, over all ranks, unless all gather tensors of one shape.

        The latter is a collective over the host group of all ranks. Within training steps it looks at the
        last batch of an epoch alone, which may be shorter on some ranks: no other waits on the host.
        """
        members = group or self._group
        if self.num_with_data(members) < members.size():
            raise ValueError(
                "self.all_gather() in training_step while the data of a rank has ended: its padding batch, samples"
                " that were trained on before, would be gathered as if it were data. DataLoader(drop_last=True)"
                " leaves no such batch with the Trainer's sampler; with one of your own, give all ranks equally"
                " many batches. self.log(..., sync_dist=True) and strategy.reduce(x, reduce_op='mean') leave it out."
            )
        if group not in (None, dist.group.WORLD):
            return
        self.check_communication()
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if self._is_in_step and self.is_training and not progress.is_last_batch:
            return
        shapes = gather_objects(tuple(tensor.shape), self._group)
        if len(set(shapes)) > 1:
            raise ValueError(
                f"self.all_gather() of tensors of the shapes {shapes}: no sample"
                " is repeated, so that ranks may have unequally many. Pad them to one size, or call"
                " gather_all_tensors of torchmetrics.utilities.distributed, which takes unequal sizes, in"
                " on_validation_epoch_end, where no rank has ended, or use TorchMetrics. In training,"
                " DataLoader(drop_last=True) makes batches equal."
            )

    @property
    def _evaluated_loaders(self) -> list[Any]:
        return CombinedLoader(getattr(self._trainer, f"{self._stage}_dataloaders")).flattened

    @property
    def is_training(self) -> bool:
        """Whether the current stage trains."""
        return self._stage == _TRAIN

    @property
    def _stage(self) -> str:
        stage = self._trainer.state.stage
        return (None if stage is None else stage.dataloader_prefix) or _TRAIN
