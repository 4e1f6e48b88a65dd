"""The Trainer's steps on slices of sequences."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.attention import Slices
from lightning_automodel.context_parallel.check import FirstStepCheck
from lightning_automodel.context_parallel.hugging_face import let_models_attend_across
from lightning_automodel.context_parallel.slices import SequenceSlices
from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.gradients.loss_graph import averaged_parts
from lightning_automodel.gradients.token_loss import has_count
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding.tensor_parallel import check_same_batch


class ContextParallelSteps:
    """Gives each step its slice of the batch, and lets the step's attention cross the ranks of ``mesh``."""

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: DeviceMesh,
        options: StrategyOptions,
        plugin: Precision,
        patches: PatchStack,
    ) -> None:
        self._module = module
        self.group = mesh.get_group()
        self._plugin = plugin
        self._options = options
        adds_mask = let_models_attend_across(module, patches)
        self.slices = SequenceSlices(mesh.get_local_rank(), options, adds_mask)
        self._newest: Slices | None = None
        self._checked = set[str]()
        self.whole: Any = None  # the batch that was sliced last, for ExactnessCheck

    def slice(self, batch: Any) -> Any:
        """Cut this rank's slice out of the batch of the next step; see :meth:`SequenceSlices.slice`.

        The first call is a collective over the group, which compares the batches, and the counts of slices
        with that of the whole batch.
        """
        is_first = self._newest is None
        self._newest = self.slices.describe(batch, self.group)
        sliced = self.slices.slice(batch)
        self.whole = batch
        if not is_first:
            return sliced
        check_same_batch(batch, self.group, "context-parallel")
        count = self._options.count_label_tokens
        if count is not None:
            of_whole = float(count(self.slices.complete(batch)))
            counts = gather_objects(float(count(sliced)), self.group)
            if not math.isclose(sum(counts), of_whole, rel_tol=1e-6):
                raise ValueError(
                    f"count_label_tokens counts {', '.join(f'{count:g}' for count in counts)} on the"
                    f" {len(counts)} ranks that share a batch, and {of_whole:g} in the whole batch. Each"
                    " must count its slice, since the counts are added: count entries of the shape of"
                    " batch['input_ids'], which are slices; with a label_shift, batch['shift_labels']."
                )
        return sliced

    def check_count(self, output: Any) -> None:
        """Raise ValueError if a step has returned a count, or a ``manual_backward`` was given one."""
        if has_count(output):
            raise ValueError(
                f"num_label_tokens was given under context_parallel_size={self.group.size()}, where nothing"
                " tells whether it is that of the slice: leave it out: labels of slices are counted. Pass"
                " count_label_tokens=<function of the slice> to count something else; it is compared with"
                " the whole batch."
            )

    def about_padding(self, loss: Tensor) -> str:
        """What to tell of a ``loss`` [] that holds a mean over padding of the newest slice; else empty.

        Reads the device.
        """
        slices = self._newest
        assert slices is not None
        if (max(slices.chunks) + 1) * slices.chunk <= slices.length:
            return ""
        num_positions = math.prod(slices.shape)
        for part in averaged_parts(loss):
            if part.kind == "numbers" and part.divisor % num_positions == 0:
                return (
                    f"The loss holds a mean over the {num_positions} positions of a slice, some of which are padding:"
                    f" sequences of {slices.length} positions were padded, for slices of equal length. Multiply by a"
                    f" mask (labels != {self._options.ignore_index}) and divide by its sum, or let the collate function"
                    f" pad to a multiple of {2 * self.group.size()}."
                )
        return ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context of the step whose batch was sliced last.

        The first step of a kind is a collective, which ends in :class:`FirstStepCheck`: in training over all
        ranks, in evaluation, where some may have no batch, over the context peers.
        """
        slices = self._newest
        assert slices is not None
        if name in self._checked:
            with attention.computing_on(slices):
                yield
            return
        self._checked.add(name)
        check = FirstStepCheck(self._module, self._plugin, name, slices)
        with attention.computing_on(slices), check.recording():
            yield
        check.check(None if name == "training_step" else self.group)

    def backward(self) -> AbstractContextManager[None]:
        """Context of the backward of the step whose batch was sliced last: blocks may recompute their attention."""
        # A copy, so that recomputation does not count as attention of the step.
        return attention.computing_on(None if self._newest is None else replace(self._newest))
