"""Ranks whose data ends before another's: an error in training, and one count for each sample in evaluation."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lightning_automodel import lightning_internals
from lightning_automodel.data.draws import Draw, Draws, LoaderProxy, users_own
from lightning_automodel.data.exchange import Exchange
from lightning_automodel.data.fillers import neutral

_UNKNOWN = -1
_STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}
_LOADERS = {"val": "val_dataloaders", "test": "test_dataloaders", "predict": "predict_dataloaders"}
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
        pads: Whether a rank whose training data has ended goes on with fillers in place of an error.
        draws: Hands out training batches where they are padded.

    Attributes:
        is_filler: Whether this rank's newest training batch was a filler.
    """

    def __init__(self, trainer: "pl.Trainer", group: dist.ProcessGroup, pads: bool, draws: Draws) -> None:
        self._trainer, self._group, self._pads, self._draws = trainer, group, pads, draws
        self._may_differ: set[str] = set()
        self._sent: Exchange | None = None
        self._is_in_step = False
        self._draw: Draw | None = None
        self.is_filler = False

    def without_repeats(self, loader: Any) -> Any:
        """A loader whose sampler repeats samples to even the ranks out, with one that gives each rank only its own.

        The user's own are left alone, since training may use them too. Training repeats unless it pads. Evaluation
        repeats where there are fewer samples than ranks.
        """
        loader, is_training = users_own(loader), self.is_training
        batch_sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
        if (is_training and not self._pads) or not isinstance(sampler, DistributedSampler) or sampler.drop_last:
            return loader
        total = sized_len(sampler.dataset)
        if total is None or (total < sampler.num_replicas and not is_training):
            return loader
        own, loader, batch_sampler = copy.copy(sampler), copy.copy(loader), copy.copy(batch_sampler)
        own.total_size, own.num_samples = total, len(range(own.rank, total, own.num_replicas))
        # DataLoader refuses to have its samplers set once it is made.
        if batch_sampler is not None:
            vars(batch_sampler)["sampler"] = own
            vars(loader)["batch_sampler"] = batch_sampler
        if loader.sampler is sampler:
            vars(loader)["sampler"] = own
        return loader

    def process(self, loader: Any) -> Any:
        """Compare the lengths of a loader of the current stage.

        A collective over the group: all ranks process their loaders in one order.

        Returns:
            What is to be iterated in its place.
        """
        length = sized_len(loader)
        self._send(_UNKNOWN if length is None else length)
        lengths = self._answers()
        if len(lengths) > 1 and (_UNKNOWN in lengths or len(set(lengths)) > 1):
            if self.is_training and self._pads:
                self._check_padding(loader)
                self._draws.pads = True
                return LoaderProxy(loader, self._draws, None if _UNKNOWN in lengths else lengths)
            self._may_differ.add(self._stage)
            if not self.is_training:
                empty = (
                    f"The {self._stage} data of rank {self._group.rank()} holds no batch, and that of other ranks may"
                    " hold some, whose steps it could not take part in: give each rank at least one batch, or start"
                    " fewer ranks."
                )
                return LoaderProxy(loader, Draws(self._group, empty))
        return loader

    def _check_padding(self, loader: Any) -> None:
        """Raise ``ValueError`` for what a filler would change, or what could not know of one."""
        module = self._trainer.lightning_module
        problem = None
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            problem = "training_step(dataloader_iter) draws its batches itself: let it take the batch"
        elif isinstance(loader, lightning_internals.Stateful):
            problem = f"{type(loader).__name__} begins anew where it is resumed after its end: take torch's DataLoader"
        elif any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
            problem = "SyncBatchNorm would average over fillers: leave sync_batchnorm out"
        elif any(isinstance(each, Metric) and each.dist_sync_on_step for each in module.modules()):
            problem = "a metric with dist_sync_on_step=True would gather fillers: leave dist_sync_on_step out"
        if problem is not None:
            raise ValueError(f"uneven_inputs='pad': {problem}, or give all ranks equally many batches.")

    # --- Training -----------------------------------------------------------------------------------------------------

    def begin_training_batch(self, draw: Draw | None) -> None:
        """A training batch is about to be used.

        Args:
            draw: Of that batch; None where nobody has followed it.

        Raises:
            ValueError: If batches are padded that come from several loaders.
        """
        self._draw = draw
        self.is_filler = draw is not None and draw.is_filler
        if self._draws.pads and type(self._trainer.train_dataloader) is not LoaderProxy:
            raise ValueError(
                "uneven_inputs='pad' trains on one loader, and the loaders of a CombinedLoader have unequally many"
                " batches on the ranks: combine them in one Dataset, or give all ranks equally many batches."
            )

    def mean_factor(self) -> float:
        """What a mean over ranks must be multiplied by, so that fillers do not count. Waits for all to draw."""
        if self._draw is None or not self._draws.pads or not self._is_in_step or not self.is_training:
            return 1.0
        return self._group.size() / max(self._draw.num_real(), 1)

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Context for ``training_step``."""
        self._check_training_goes_on()
        self._is_in_step = True
        try:
            with neutral(self._trainer.lightning_module) if self.is_filler else nullcontext():
                yield
        finally:
            self._is_in_step = False

    def _check_training_goes_on(self) -> None:
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

    # --- Evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self, step: Callable[..., Any], args: tuple[Any, ...], begin: Callable[[], bool], join: Callable[[], None]
    ) -> Any:
        """Run an evaluation step, and after the last one of a loader those of other ranks, without data.

        A collective over the group where lengths differ or are unknown.

        Args:
            step: The step.
            args: Its arguments: batch, batch index, and the index of the loader where there are several.
            begin: Called before each step of any rank; returns whether all ranks stop after it.
            join: Takes part in what a step of other ranks communicates.

        Raises:
            SIGTERMException: If all stop, and this rank has no batch left before which Lightning would.
        """
        stops = begin()
        self._draw, self.is_filler = None, False
        is_last, self._sent = False, None
        if self._stage in self._may_differ:
            is_last = self._is_last(args[2] if len(args) > 2 else 0)
        self._is_in_step = True
        try:
            output = step(*args)
        finally:
            self._is_in_step = False
        if stops:
            self._answers()  # of ranks that lag behind, before this one leaves
        while is_last and _GOES_ON in self._answers():
            if stops:
                raise lightning_internals.SIGTERMException
            self._send(_HAS_ENDED)
            stops = begin()
            join()
        return output

    def _is_last(self, dataloader_idx: int) -> bool:
        """Whether the batch of the step that begins is this rank's last one of a loader, which the others are told."""
        trainer, stage = self._trainer, self._stage
        loader = CombinedLoader(getattr(trainer, _LOADERS[stage])).flattened[dataloader_idx]
        if type(loader) is not LoaderProxy:
            return False  # of equally many batches on all ranks
        draws: Draws = vars(loader)["draws"]
        step = getattr(trainer.lightning_module, _STEPS[stage])
        draws_in_step = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
        if draws_in_step:
            draws.handed_out.clear()
        else:
            draws.handed_out.popleft()
        # Of the step that begins: one that draws its batch itself has yet to do so.
        number = draws.num_handed_out - len(draws.handed_out) + draws_in_step
        is_last = (
            number >= self._evaluation_loop.max_batches[dataloader_idx]
            or len(draws.handed_out) + len(draws.ahead(1 + draws_in_step)) <= draws_in_step
        )
        self._send(_IS_LAST if is_last else _GOES_ON)
        return is_last

    def check_reduction(self) -> None:
        """Before a value is reduced or gathered over ranks: all of them must be in a step, or none.

        Raises:
            RuntimeError: If some have no data left.
        """
        if self.is_training or not self._is_in_step:
            return
        if ended := [rank for rank, sent in enumerate(self._answers()) if sent == _HAS_ENDED]:
            raise RuntimeError(
                f"A value is reduced or gathered over all ranks within an evaluation step, but not on"
                f" {_ranks(ended)}, whose data has ended: log it with on_step=False, on_epoch=True, or give all ranks"
                " equally many batches."
            )

    def check_gathering(self, tensor: Tensor) -> None:
        """Before a tensor is gathered within an evaluation step: all ranks must be in it, with tensors of one shape.

        A collective over the group within evaluation steps: without repeated samples, last batches differ in size.

        Raises:
            RuntimeError: If some have no data left.
            ValueError: If shapes differ.
        """
        if self.is_training or not self._is_in_step:
            return
        self.check_reduction()
        shapes: list[Any] = [None] * self._group.size()
        dist.all_gather_object(shapes, tuple(tensor.shape), self._group)
        if len(set(shapes)) > 1:
            raise ValueError(
                f"self.all_gather() of tensors of the shapes {shapes}: in evaluation no sample is repeated, so that"
                " last batches differ in size. Pad them to one size, keep them for on_validation_epoch_end, or use"
                " TorchMetrics."
            )

    def _send(self, mine: int) -> None:
        self._sent = Exchange(self._group, mine)

    def _answers(self) -> list[int]:
        return [] if self._sent is None else self._sent.numbers()

    @property
    def is_training(self) -> bool:
        """Whether the current stage trains."""
        return self._stage == "train"

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


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
