"""Steps of ranks whose data ends before another's: padding in training, joined steps in evaluation; and their logs."""

import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.data.batches import (
    ERROR,
    NO_BATCH,
    PAD,
    BatchHandle,
    PendingGather,
    TrackedLoader,
    ranks,
)
from lightning_automodel.data.padding import ModuleState, log_neutral
from lightning_automodel.data.samplers import drawn_order
from lightning_automodel.data.window_ahead import WindowAhead
from lightning_automodel.distributed.collectives import full, gather_objects
from lightning_automodel.gradients.rank_agreement import DIFFERENT_ORDERS, DIFFERENT_UNITS
from lightning_automodel.internals import lightning as lightning_internals


class UnevenInputs:
    """Runs the steps of ranks with unequal numbers of batches, whose loaders :class:`.LoaderProcessing` has made.

    ``group`` is the host group of all ranks. ``ahead`` counts windows, if they are counted ahead.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        group: dist.ProcessGroup,
        ahead: WindowAhead | None,
    ) -> None:
        self._trainer = trainer
        self._group = group
        self.ahead = ahead
        self.seconds_drawing = 0.0  # spent on drawing batches ahead of their steps
        self.order = 0  # a number of what samplers have drawn for the epoch that trains
        self._before_padding: ModuleState | None = None
        self._handle = NO_BATCH  # of the evaluation step, if ranks may have unequally many batches
        self._next = NO_BATCH  # to evaluate after it
        self._is_in_step = False
        self._num_evaluated = 0  # steps of evaluation in this run, also of others that this rank has joined
        self._has_evaluated = False  # some batch, since `take_evaluated` was called last
        self._logging = ""  # the name of the value that is logged at the moment
        self._reduced = 0  # a number of the names of values that ranks have reduced as they logged them
        self._loaders: Any = None  # those of training that _begin_loaders has seen
        self._trained_loaders: list[Any] = []  # each of them
        self._tracked: TrackedLoader | None = None  # of them, if there is but one

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

        Lightning would read this rank's part of a ``DTensor``. ``fx`` is the hook that has logged the value.
        """
        value = apply_to_collection(value, DTensor, full)
        self._logging = name
        try:
            if not self._trainer.training or "epoch" in fx or fx == "on_train_start":
                log(fx, name, value, **options)
                return
            log_batch = partial(log_neutral, log) if self.is_filler else log
            # A mean is over the ranks that have data.
            self._run_in_step(partial(log_batch, fx, name, value, **options))
        finally:
            self._logging = ""

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
        if not (self._is_in_step and self._trainer.training):
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
        self._has_evaluated = not self._trainer.training

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
        loaders = self._trained_loaders if self._trainer.training else self._evaluated_loaders
        own = self._num_evaluated, self._reduced, drawn_order(loaders), (first_peer, unit_order)
        evaluated, names, orders, units = zip(*gather_objects(own, self._group), strict=True)
        if len(set(evaluated)) > 1:
            raise RuntimeError(
                f"The ranks have evaluated {list(evaluated)} batches, and results are of these alone: a hook or a data"
                " set has raised StopIteration on some ranks, which Lightning takes for the end of the data. Begin an"
                " iterator anew where it ends."
            )
        if len(set(orders)) > 1:
            raise RuntimeError(DIFFERENT_ORDERS)
        if len(set(names)) > 1:
            raise RuntimeError(
                "Ranks have logged values with on_step=True and sync_dist=True under other names, or in another order,"
                " so that values of several names were reduced together: log the same names on all ranks, or with"
                " on_step=False, on_epoch=True, which reduces each over the ranks that have logged it, if all log some."
            )
        if len(set(units)) > len({first for first, _ in units}):
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
        # Lightning passes the number of the loader if there are several, one after the other.
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
        self._next = BatchHandle(is_filler=True)
        if loader.num_begun < getattr(trainer, limits)[index]:
            self._next = next(iter(loader.draw_ahead(1)), self._next)
        self._next.sent = PendingGather(self._group, not self._next.is_filler)

    def check_communication(self) -> None:
        """Raise RuntimeError, before user code communicates, if some ranks have ended and evaluate no batch."""
        if self._trainer.training:
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
        if (
            self._is_in_step
            and self._trainer.training
            and not self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ):
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
    def _stage(self) -> str:
        return str(self._trainer.state.stage.dataloader_prefix)  # type: ignore[union-attr]
