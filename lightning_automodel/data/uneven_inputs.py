"""Ranks whose data ends before another's: an error or padding in training; in evaluation each sample counts once."""

import copy
import time
from collections.abc import Callable
from enum import Enum, IntEnum, auto
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lightning_automodel.data.batches import (
    BatchHandle,
    PendingGather,
    TrackedLoader,
    is_stateful,
    unwrap_loader,
)
from lightning_automodel.data.loader_lengths import has_no_certain_length, may_end_early, with_sampler
from lightning_automodel.data.padding import ModuleState, neutral
from lightning_automodel.data.window_ahead import WindowAhead
from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.failures import list_ranks
from lightning_automodel.internals import lightning as lightning_internals

_UNKNOWN = -1
_TRAIN = "train"
_STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}
_LOADERS = {"val": "val_dataloaders", "test": "test_dataloaders", "predict": "predict_dataloaders"}


class Exchanged(Enum):
    """What ranks tell each other of the data of a stage. ``UnevenInputs.process`` chooses it for each stage."""

    NOTHING = auto()  # all ranks have equally many batches, or padding makes them so
    LAST_BATCH = auto()  # with every batch, whether it is this rank's last
    WHAT_FOLLOWS = auto()  # in an epoch of training: a batch, a validation, or the epoch's end


class Next(IntEnum):
    """What a rank sends of itself; of LAST_BATCH the first three, of WHAT_FOLLOWS all but the second."""

    BATCH = 0
    LAST_BATCH = 1
    END = 2
    VALIDATION = 3


class UnevenInputs:
    """Synchronises ranks with unequal numbers of batches.

    =============================================  ============  ========================================
    loaders of the stage                           comparison    a rank whose data ends before another's
    =============================================  ============  ========================================
    equally many batches                           NOTHING       there is none
    lengths that differ or are unknown, training   LAST_BATCH    raises
    the same, if it ``pads``                       NOTHING       draws padding batches (`TrackedLoader`)
    the same, evaluation and prediction            LAST_BATCH    joins the steps of others, without data
    may end before their length, training          WHAT_FOLLOWS  raises
    =============================================  ============  ========================================

    A loader or sampler with an ``__iter__`` of its own may end before its length. Only a rank whose data
    ends waits for the other ranks' answers. If it raises, the others get its error when they next wait for
    it. ``group`` is the host group of all ranks. With ``ahead``, training loaders are counted ahead.
    """

    def __init__(
        self, trainer: "pl.Trainer", group: dist.ProcessGroup, pads: bool, ahead: WindowAhead | None
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._pads = pads
        self.ahead = ahead
        self.seconds_drawing = 0.0  # spent on drawing batches ahead of their steps
        self._before_padding: ModuleState | None = None
        self._comparisons: dict[str, Exchanged] = {}  # of stages; NOTHING if they are missing
        self._sent: PendingGather | None = None
        self._is_in_step = False
        self._handle: BatchHandle | None = None
        self.is_filler = False  # whether this rank's newest training batch was a padding batch

    def without_repeats(self, loader: Any) -> Any:
        """A copy of the loader whose ``DistributedSampler`` repeats no samples to make ranks even.

        They are still repeated in training without padding, and in evaluation with fewer samples than ranks.
        """
        loader = unwrap_loader(loader)
        batch_sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
        if (
            (self.is_training and not self._pads)
            or not isinstance(sampler, DistributedSampler)
            or sampler.drop_last
        ):
            return loader
        total = sized_len(sampler.dataset)
        if total is None:
            return loader
        if total < sampler.num_replicas and not self.is_training:
            rank_zero_warn(
                f"The {self._stage} data holds {total} samples for {sampler.num_replicas} ranks, each of"
                " which needs one: some count twice. Evaluate more samples, or on fewer ranks.",
                category=PossibleUserWarning,
            )
            return loader
        own = copy.copy(sampler)
        own.total_size = total
        own.num_samples = len(range(own.rank, total, own.num_replicas))
        return with_sampler(loader, sampler, own)

    def process(self, loader: Any) -> Any:
        """What to iterate instead of a loader of the current stage. A collective, so in the same order on all ranks."""
        self._warn_of_batches_of_batches(loader)
        loader = self._tracked(loader)
        if self.ahead is not None and self.is_training:
            return self.ahead.process(loader)
        return loader

    def _tracked(self, loader: Any) -> Any:
        length = sized_len(loader)
        ends_by_itself = may_end_early(loader)
        told = (
            PendingGather(self._group, _UNKNOWN if length is None else length, ends_by_itself)
            .received()
            .long()
        )
        lengths = told[:, 0].tolist()
        may_end = bool(told[:, 1].any()) and _UNKNOWN not in lengths and len(lengths) > 1
        if may_end and self.is_training and not self._pads:
            self._comparisons[self._stage] = Exchanged.WHAT_FOLLOWS
            return loader
        if may_end:
            lengths = [_UNKNOWN] * len(lengths)
        if len(lengths) > 1 and (_UNKNOWN in lengths or len(set(lengths)) > 1):
            if self.is_training and self._pads:
                self._check_padding(loader)
                return TrackedLoader(loader, self._group, True, None if _UNKNOWN in lengths else lengths)
            self._comparisons.setdefault(self._stage, Exchanged.LAST_BATCH)
            if not self.is_training:
                empty = (
                    f"The {self._stage} data of rank {self._group.rank()} holds no batch, while other ranks"
                    " may have some, whose steps this rank could not join: give each rank at least one"
                    " batch, or start fewer ranks."
                )
                return TrackedLoader(loader, self._group, if_empty=empty)
        return loader

    def _warn_of_batches_of_batches(self, loader: Any) -> None:
        """Warn if the loader puts together what are batches already, since Lightning has changed its sampler."""
        if lightning_internals.shares_out_batches(loader) and loader.batch_size is not None:
            name = type(loader).__name__
            rank_zero_warn(
                f"The sampler of the {self._stage} data yields whole batches, and the {name} that Lightning"
                f" has made of it for several ranks collates batch_size={loader.batch_size} of them into"
                " one. If batches have fewer dimensions on one device, its library brings another sampler"
                " where the strategy's name has 'ddp' in it: pass Trainer(strategy='automodel_ddp'), or"
                " register such a name for other options."
            )

    def _check_padding(self, loader: Any) -> None:
        """Raise ``ValueError`` if a padding batch would affect results, or padding cannot work."""
        module = self._trainer.lightning_module
        problem = None
        if lightning_internals.draws_its_batches(module.training_step):
            problem = "training_step(dataloader_iter) draws its batches itself: let it take the batch"
        elif is_stateful(loader):
            problem = f"{type(loader).__name__} starts again when it is resumed after its end: use torch's DataLoader"
        elif any(isinstance(submodule, nn.SyncBatchNorm) for submodule in module.modules()):
            problem = "SyncBatchNorm would average over padding batches: leave sync_batchnorm out"
        elif any(
            isinstance(submodule, Metric) and submodule.dist_sync_on_step for submodule in module.modules()
        ):
            problem = "a metric with dist_sync_on_step=True would gather padding batches: leave dist_sync_on_step out"
        if problem is not None:
            raise ValueError(f"uneven_inputs='pad': {problem}, or give all ranks equally many batches.")

    # --- Training -----------------------------------------------------------------------------------------------------

    def begin_training_batch(self) -> None:
        """Called when a training batch is about to be used, after its hooks. If counted ahead, draws its window."""
        start = time.perf_counter()
        loader = self._trainer.train_dataloader
        prefetched = getattr(lightning_internals.training_data_fetcher(self._trainer), "batches", ())
        self._handle = handle = loader.begin(len(prefetched)) if isinstance(loader, TrackedLoader) else None
        self.is_filler = handle is not None and handle.is_filler
        if handle is None:
            several = CombinedLoader(loader).flattened
        else:
            several = []
        if any(isinstance(loader, TrackedLoader) and loader.pads for loader in several):
            raise ValueError(
                "uneven_inputs='pad' trains on one loader, and the loaders of a CombinedLoader have"
                " unequally many batches on the ranks: combine them in one Dataset, or give all ranks"
                " equally many batches."
            )
        if self.ahead is not None:
            self.ahead.begin_batch(handle)
            self.seconds_drawing += time.perf_counter() - start

    def mean_factor(self) -> float:
        """Factor for a mean over ranks that makes padding batches not count. Waits until all ranks have drawn."""
        if (
            self._handle is None
            or self._handle.has_batch is None
            or not self._is_in_step
            or not self.is_training
        ):
            return 1.0
        return self._group.size() / max(self._handle.num_real(), 1)

    def train(self, step: Callable[[], Any]) -> Any:
        """Run a training step. What a padding batch changes in the module lasts until :meth:`end_padding`."""
        self._is_in_step = True
        try:
            if not self.is_filler:
                return step()
            module = self._trainer.lightning_module
            self._before_padding = ModuleState(module)
            with neutral(module):
                return step()
        finally:
            self._is_in_step = False

    def end_padding(self) -> None:
        """Restore what a step on a padding batch, or its backward, has changed in the module."""
        state = self._before_padding
        self._before_padding = None
        if state is not None:
            state.restore()

    def before_validation(self) -> None:
        """Called before a validation within training; see :meth:`before_epoch_end`."""
        if not self._trainer.sanity_checking:
            self._compare(Next.VALIDATION)

    def before_epoch_end(self) -> None:
        """Called where the batches of an epoch have ended on this rank. Raises on it if they have not on another.

        A collective over the group if a loader may end before its length.
        """
        self._compare(Next.END)

    def _compare(self, following: Next) -> None:
        if self._comparisons.get(_TRAIN) is not Exchanged.WHAT_FOLLOWS:
            return
        number = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        received = PendingGather(self._group, following, number).received().long()
        ended = [rank for rank, sent in enumerate(received[:, 0].tolist()) if sent == Next.END]
        others = [rank for rank in range(self._group.size()) if rank not in ended]
        if ended and others:
            raise RuntimeError(
                f"The train data of {_ranks(ended)} has ended with batch {int(received[ended[0], 1])}, and"
                f" {_ranks(others)} would go on and wait for more: a training loader yields another number"
                " of batches than its len(), as one does that leaves batches out. Leave samples out of the"
                " dataset instead, give all ranks equally many batches, pass"
                " Trainer(limit_train_batches=...) with as many as each rank has, or let a rank whose data"
                " has ended take part without effect: AutomodelStrategy(uneven_inputs='pad')."
            )

    def check_training_goes_on(self) -> None:
        """Raise if the batch is the last of this rank, but not of all.

        A collective over the group if lengths may differ, so each rank calls it before every other
        collective of a step. Only a rank with its last batch waits for the others.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        number = progress.current.ready
        comparison = self._comparisons.get(_TRAIN, Exchanged.NOTHING)
        if comparison is Exchanged.NOTHING:
            return
        if comparison is Exchanged.WHAT_FOLLOWS:
            # Not waited for: a rank whose data has ended does, and its error ends the others.
            self._sent = PendingGather(self._group, Next.BATCH, number)
            return
        if not progress.is_last_batch:
            self._sent = PendingGather(self._group, Next.BATCH)
            return
        self._sent = PendingGather(self._group, Next.LAST_BATCH)
        if others := [rank for rank, sent in enumerate(self._answers()) if sent == Next.BATCH]:
            ended = sorted(set(range(self._group.size())) - set(others))
            raise RuntimeError(
                f"The train data of {_ranks(ended)} ends with batch {number}, and {_ranks(others)} would go"
                " on and wait for more: give all ranks equally many batches, for example by a"
                f" DistributedSampler or drop_last=True, or pass Trainer(limit_train_batches={number}), or"
                " let a rank whose data has ended take part without effect:"
                " AutomodelStrategy(uneven_inputs='pad')."
            )

    # --- Evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        begin: Callable[[], bool],
        join: Callable[[], None],
    ) -> Any:
        """Run an evaluation step. After the last one of a loader, join the remaining steps of other ranks.

        A collective over the group if lengths differ or are unknown. ``begin`` is called before each step of
        any rank, and returns whether all ranks stop after it; ``join`` joins the collectives of a step of
        other ranks. Raises SIGTERMException if all ranks stop and this one has no batch left, before which
        Lightning would raise.
        """
        stops = begin()
        self._handle = None
        self.is_filler = False
        is_last = False
        self._sent = None
        if self._comparisons.get(self._stage) is Exchanged.LAST_BATCH:
            is_last = self._is_last(args[2] if len(args) > 2 else 0)
            self._sent = PendingGather(self._group, Next.LAST_BATCH if is_last else Next.BATCH)
        self._is_in_step = True
        try:
            output = step(*args)
        finally:
            self._is_in_step = False
        if stops:
            self._answers()  # wait for slower ranks before this one leaves
        while is_last and Next.BATCH in self._answers():
            if stops:
                raise lightning_internals.SIGTERMException
            self._sent = PendingGather(self._group, Next.END)
            stops = begin()
            join()
        return output

    def _is_last(self, dataloader_idx: int) -> bool:
        """Whether the step that begins has this rank's last batch of a loader; ValueError if that is not known."""
        trainer = self._trainer
        stage = self._stage
        loop = self._evaluation_loop
        loaders = CombinedLoader(getattr(trainer, _LOADERS[stage])).flattened
        is_sequential = lightning_internals.is_sequential(loop)
        problem = None
        if lightning_internals.draws_its_batches(getattr(trainer.lightning_module, _STEPS[stage])):
            problem = "a step that takes a dataloader_iter: let it take the batch"
        elif (
            not is_sequential
            and lightning_internals.has_length(loop)
            and any(map(has_no_certain_length, loaders))
        ):
            problem = (
                "a stream that may end before a limit or another loader: evaluate one loader after the other"
                " (mode='sequential')"
            )
        if problem is not None:
            raise ValueError(f"The last batch of loaders of unequal lengths is not known with {problem}.")
        if not is_sequential:
            return bool(loop.batch_progress.is_last_batch)
        loader = loaders[dataloader_idx]
        # Without tracking, all ranks have equally many batches of this loader.
        return isinstance(loader, TrackedLoader) and loader.begin_last(loop.max_batches[dataloader_idx])

    def _where_in_batch(self) -> str | None:
        """Name of the running evaluation step or batch hook, which ranks without data do not run; else None."""
        where = lightning_internals.current_hook(self._trainer.lightning_module) or ""
        is_of_batch = self._is_in_step or where.endswith(("batch_start", "batch_end"))
        if is_of_batch and not self.is_training:
            return where
        return None

    def check_reduction(self) -> None:
        """Raise RuntimeError, before a reduction or gathering over ranks, if some are not in this step: they ended."""
        where = self._where_in_batch()
        answers = self._answers()
        if where is None or not (self._is_in_step or Next.BATCH in answers):
            return
        # Hooks of a rank's last batch run when all others have ended.
        here = (Next.BATCH, Next.LAST_BATCH) if self._is_in_step else (Next.BATCH,)
        if ended := [rank for rank, sent in enumerate(answers) if sent not in here]:
            raise RuntimeError(
                f"A value is reduced or gathered over all ranks within {where}, but not on {_ranks(ended)},"
                " whose data has ended: log it with on_step=False, on_epoch=True, or give all ranks equally"
                " many batches."
            )

    def check_gathering(self, tensor: Tensor) -> None:
        """Raise unless all ranks gather tensors of one shape. A collective over the group in evaluation steps."""
        if self._where_in_batch() is None:
            return
        self.check_reduction()
        shapes = gather_objects(tuple(tensor.shape), self._group)
        if len(set(shapes)) > 1:
            raise ValueError(
                f"self.all_gather() of tensors of the shapes {shapes}: in evaluation no sample is repeated,"
                " so that last batches differ in size. Pad them to one size, keep them for"
                " on_validation_epoch_end, or use TorchMetrics."
            )

    def _answers(self) -> list[int]:
        if self._sent is None:
            return []
        return self._sent.received()[:, 0].long().tolist()

    @property
    def is_training(self) -> bool:
        """Whether the current stage trains."""
        return self._stage == _TRAIN

    @property
    def _stage(self) -> str:
        stage = self._trainer.state.stage
        return (None if stage is None else stage.dataloader_prefix) or _TRAIN

    @property
    def _evaluation_loop(self) -> Any:
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            return trainer.fit_loop.epoch_loop.val_loop
        return {"val": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}[
            self._stage
        ]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"
