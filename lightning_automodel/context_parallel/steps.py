"""The Trainer's steps on slices of sequences."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.attention import Slices
from lightning_automodel.context_parallel.check import FirstStepCheck
from lightning_automodel.context_parallel.hugging_face import let_models_attend_across
from lightning_automodel.context_parallel.slices import SequenceSlices
from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.gradients.token_loss import TokenWeighting, has_count
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding.tensor_parallel import check_same_batch
from lightning_automodel.sharding.units import class_name

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _Watch(TorchFunctionMode):
    """Refuses torch's own attention functions in a step: they attend only within this rank's slice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
            and attention.current() is not None
        ):
            raise RuntimeError(
                f"{func.__name__} attends to this rank's slice of the sequence alone: call"
                " lightning_automodel.context_parallel_attention instead."
            )
        return func(*args, **(kwargs or {}))


class ContextParallelSteps:
    """Gives each step its slice of the batch, and lets the step's attention cross the ranks of ``mesh``.

    ``tell`` is called with a warning for the user, if the check of the first step could not compare
    everything.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: DeviceMesh,
        options: StrategyOptions,
        plugin: Precision,
        tell: Callable[[str], None],
        patches: PatchStack,
    ) -> None:
        for name in _STEPS:
            if lightning_internals.draws_its_batches(getattr(module, name)):
                raise ValueError(
                    f"context_parallel_size={mesh.size()} slices the batch that {name} gets: let it take the"
                    " batch, not dataloader_iter."
                )
        self._module = module
        self._group = mesh.get_group()
        self._tell = tell
        num_layers = let_models_attend_across(module, patches)
        self._num_layers = max(num_layers, 1)
        self.slices = SequenceSlices(mesh.get_local_rank(), options, adds_mask=num_layers > 0)
        self._check: FirstStepCheck | None = FirstStepCheck(module, plugin)
        self._unwatched = set(_STEPS)
        self._newest: Slices | None = None
        self._shape = torch.Size()
        self._is_first = True
        self._whole: Any = None
        self._counted: set[str] = set()

    def slice(self, batch: Any) -> Any:
        """Cut this rank's slice out of the batch of the next step; see :meth:`SequenceSlices.slice`.

        The first call is a collective over the group, which compares the batches.
        """
        if self._is_first:
            self._is_first = False
            check_same_batch(batch, self._group, self._module.device, "context-parallel")
        self._newest = self.slices.describe(batch, self._group)
        sliced = self.slices.slice(batch)
        self._shape = sliced["input_ids"].shape
        self._whole = batch
        return sliced

    def check_count(self, weighting: TokenWeighting, batch: Any, output: Any, step: str) -> None:
        """Raise, on every rank, if the label tokens of the batch that was sliced last are not counted in the slice.

        A collective until a count is not 0: in training over all ranks, in evaluation over the group.
        """
        whole = self._whole
        self._whole = None
        if step in self._counted or whole is None:
            return
        told = gather_objects(
            (float(weighting.count(batch, output, step)), weighting.num_labels(batch)), self._group
        )
        of_whole = _miscounted(weighting, told, batch, self.slices.complete(whole), has_count(output))
        outcome = of_whole, [count for count, _ in told]
        for of_whole, counts in gather_objects(outcome, None if step == "training_step" else self._group):
            if of_whole is not None:
                raise ValueError(
                    f"The {len(counts)} ranks that share a batch count"
                    f" {', '.join(f'{count:g}' for count in counts)} for {step}, and {of_whole:g} for the"
                    " whole batch. Each must count its slice, since the counts are added: count in the batch"
                    " that the step gets, where entries of the shape of batch['input_ids'] are slices; with"
                    " a label_shift, in its batch['shift_labels']."
                )
            if any(counts):
                self._counted.add(step)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context of the step whose batch was sliced last. For the first ``training_step`` a collective over all ranks.

        RuntimeError if its attention has stayed within the slice.
        """
        slices = self._newest
        assert slices is not None
        check = None
        if name == "training_step":
            check = self._check
            self._check = None
        # Once for each kind of step, since it is called for every function of torch.
        watch = _Watch() if name in self._unwatched else nullcontext()
        self._unwatched.discard(name)
        with (
            attention.computing_on(slices),
            watch,
            nullcontext() if check is None else check.recording(slices),
        ):
            yield
        if slices.num_calls < self._num_layers:
            raise RuntimeError(
                f"{class_name(self._module)}.{name} computed on slices of sequences, but attention crossed"
                f" the {self._group.size()} context-parallel ranks {slices.num_calls} times, not at least"
                f" {self._num_layers}: each layer must call"
                " lightning_automodel.context_parallel_attention(query, key, value)."
            )
        if check is not None and (advice := check.check(slices, self._shape)) is not None:
            self._tell(advice)

    def backward(self) -> AbstractContextManager[None]:
        """Context of the backward of the step whose batch was sliced last: blocks may recompute their attention."""
        # A copy, so that recomputation does not count as attention of the step.
        return attention.computing_on(None if self._newest is None else replace(self._newest))


def _miscounted(
    weighting: TokenWeighting,
    told: list[tuple[float, float | None]],
    batch: Any,
    whole: Any,
    is_returned: bool,
) -> float | None:
    """The whole batch's count, if the ``told`` counts (and labels) of its slices contradict it; else None.

    Those of a function must add up to it, with weights as well. What a step returned is wrong if it is the
    same on all ranks, a number of the whole batch, and not that of each slice's labels.
    """
    counts, labels = zip(*told, strict=True)
    if not is_returned:
        of_whole = torch.as_tensor(weighting.count(whole))
        if of_whole.is_floating_point():
            tolerance = 8 * torch.finfo(of_whole.dtype).eps
        else:
            tolerance = 0.0
        if math.isclose(sum(counts), of_whole, rel_tol=tolerance):
            return None
        return float(of_whole)
    if counts == labels or len(set(counts)) > 1 or counts[0] == 0:
        return None
    unsliced = [
        value for key, value in batch.items() if value is whole[key] and isinstance(value, Real | Tensor)
    ]
    known = {weighting.num_labels(whole), *(torch.as_tensor(value).sum().item() for value in unsliced)}
    if counts[0] in known:
        return counts[0]
    return None
