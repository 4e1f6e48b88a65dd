"""The Trainer's steps on slices of sequences."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from lightning_automodel.data.sequence_slices import SequenceSlices
from lightning_automodel.sharding import context_parallel
from lightning_automodel.sharding.context_parallel import Slices
from lightning_automodel.sharding.context_parallel_check import FirstStepCheck
from lightning_automodel.sharding.tensor_parallel import check_same_batch
from lightning_automodel.sharding.units import class_name


class _Watch(TorchFunctionMode):
    """Refuses torch's own attention functions in a step: they attend only within this rank's slice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        if is_attention and context_parallel.is_sliced() and not context_parallel.is_attending():
            raise RuntimeError(
                f"{func.__name__} attends to this rank's slice of the sequence alone: call"
                " lightning_automodel.context_parallel_attention instead."
            )
        return func(*args, **(kwargs or {}))


class ContextParallelSteps:
    """Gives each step its slice of the batch, and lets the step's attention cross ranks.

    Args:
        module: The LightningModule.
        group: The ranks that share a batch.
        slices: Cuts batches into slices.
        device: This rank's device.
        num_layers: Least number of attention calls in a step; 0 if unknown.
        check: Compares the modules of the first training step in slices and on whole sequences.
        tell: Called with a warning for the user, if ``check`` could not compare everything.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        group: dist.ProcessGroup,
        slices: SequenceSlices,
        device: torch.device,
        num_layers: int,
        check: FirstStepCheck,
        tell: Callable[[str], None],
    ) -> None:
        self.slices = slices
        self._module, self._group, self._device = module, group, device
        self._num_layers = max(num_layers, 1)
        self._check, self._tell = check, tell
        self._newest: Slices | None = None
        self._shape = torch.Size()
        self._is_first = True
        self._watched: set[str] = set()

    def slice(self, batch: Any) -> Any:
        """Cut this rank's slice out of the batch of the next step; see :meth:`SequenceSlices.slice`.

        The first call is a collective over the group, which compares the batches.
        """
        if self._is_first:
            self._is_first = False
            check_same_batch(batch, self._group, self._device, "context-parallel")
        length = self.slices.length(batch)
        self._newest = Slices(
            self._group,
            self.slices.chunks,
            self.slices.chunk_length(length),
            length,
            self.slices.has_mask(batch),
            self.slices.documents(batch),
        )
        sliced = self.slices.slice(batch)
        self._shape = sliced["input_ids"].shape
        return sliced

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context of the step whose batch was sliced last. For the first ``training_step`` a collective over all ranks.

        Raises:
            RuntimeError: If its attention has stayed within the slice.
        """
        slices = self._newest
        assert slices is not None
        is_new = name not in self._watched
        self._watched.add(name)
        is_checked = is_new and name == "training_step"
        with ExitStack() as contexts:
            contexts.enter_context(context_parallel.computing_on(slices))
            if is_new:
                contexts.enter_context(_Watch())
            if is_checked:
                contexts.enter_context(self._check.recording(slices))
            yield
        if slices.num_calls < self._num_layers:
            raise RuntimeError(
                f"{class_name(self._module)}.{name} computed on slices of sequences, but attention crossed the"
                f" {self._group.size()} context-parallel ranks {slices.num_calls} times, not at least"
                f" {self._num_layers}: each layer must call lightning_automodel.context_parallel_attention(query, key,"
                " value)."
            )
        if is_checked and (advice := self._check.check(slices, self._shape)) is not None:
            self._tell(advice)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of the backward of the step whose batch was sliced last: blocks may recompute their attention."""
        slices = self._newest
        num_calls = 0 if slices is None else slices.num_calls
        self._check.is_paused = True
        try:
            with context_parallel.computing_on(slices):
                yield
        finally:
            self._check.is_paused = False
            if slices is not None:
                slices.num_calls = num_calls
