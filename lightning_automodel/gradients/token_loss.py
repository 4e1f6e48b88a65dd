"""Counting label tokens, and weighing each micro-batch by them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.distributed.collectives import full

Count = int | float | Tensor
"""Number of label tokens (or their total weight): a Python number, or a tensor [] that stays on its device."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step trains on, summed over the data-parallel group and the windows since the previous step.

    All fields are 0-dimensional tensors on the training device. The report itself does not synchronise with
    the host; reading a field (``float(report.loss)``) does.

    Attributes:
        loss: Mean loss per label token, in the unit of the loss (nats for cross-entropy); per micro-batch
            where ``per_token_loss=False``. NaN for a window without any label token.
        num_label_tokens: Label tokens, float64 since a count may be a sum of class weights; 0 where
            ``per_token_loss=False``, which does not count them.
        num_micro_batches: Micro-batches (training steps).
        grad_norm: Global 2-norm of the gradients before clipping; None until the optimizer steps, and if no
            option needs it.
    """

    loss: Tensor
    num_label_tokens: Tensor
    num_micro_batches: Tensor
    grad_norm: Tensor | None


@dataclass(frozen=True)
class WindowTotals:
    """Totals over all ranks of a window that is counted ahead, and how many micro-batches are this rank's."""

    num_label_tokens: float
    num_micro_batches: float
    own_micro_batches: int


_NO_COUNTS = (torch.bool, torch.float16, torch.bfloat16)


class MissingCountError(ValueError):
    """Nothing tells how many label tokens a micro-batch has."""


@dataclass(frozen=True)
class TokenWeighting:
    """How label tokens are counted, and what the loss of ``training_step`` means, by the strategy's options."""

    per_token_loss: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    label_key: str = "labels"
    ignore_index: int = -100
    label_shift: int = 0
    count_label_tokens: Callable[..., Any] | None = None

    def count(self, batch: Any, output: Any = None, step: str = "training_step") -> Count:
        """Label tokens of one micro-batch on this rank, from the first source that has them; 1 if they are not counted.

        ``batch`` is what the ``step`` received, ``output`` what it returned. Raises MissingCountError without a
        count, ValueError for a negative one, and TypeError if it is neither a number nor a tensor of one element.
        """
        if not self.per_token_loss:
            return 1
        if has_count(output):
            return check_count(output["num_label_tokens"], f"the num_label_tokens that {step} returned")
        if self.count_label_tokens is not None:
            return check_count(self.count_label_tokens(batch), "what count_label_tokens(batch) returned")
        if isinstance(batch, Mapping) and self.label_key in batch:
            return self._count_labels(batch[self.label_key])
        raise MissingCountError(
            "AutomodelStrategy weighs each micro-batch by its number of label tokens and found no count (the"
            f" batch is {kind_and_keys(batch)}; label_key is {self.label_key!r}). If each row is one sample, as for a"
            " classifier or a GAN, pass AutomodelStrategy(count='samples'); with class weights return their sum over"
            " the labels as num_label_tokens instead. Give it in one of three ways: return {'loss': loss,"
            f" 'num_label_tokens': n}} from {step} (manual optimization: self.manual_backward(loss,"
            " num_label_tokens=n)); pass count_label_tokens=<function of the batch>; or put labels under"
            f" batch[{self.label_key!r}] with {self.ignore_index} where the loss ignores them (label_key=,"
            " ignore_index=). If every micro-batch should weigh the same instead, pass per_token_loss=False."
        )

    def count_on_host(self, batch: Any) -> float:
        """Label tokens of a batch that no step has seen; 1 where ``per_token_loss=False``."""
        try:
            count = self.count(batch)
        except MissingCountError:
            raise ValueError(
                "count_window_ahead=True counts a batch before training_step sees it, and found no count in"
                " it. Pass count_label_tokens=<function of the batch> or count='samples', or put labels"
                f" under batch[{self.label_key!r}] (label_key=, ignore_index=)."
            ) from None
        number = float(count)
        check_range(number)
        return number

    def check_counted_ahead(self, batch: Any, output: Any, counted: float, reads_device: bool) -> None:
        """Raise ValueError if a batch, or what a step returned for it, has another count than was ``counted`` before.

        A count on an accelerator is compared if ``reads_device``.
        """
        count = self.count(batch, output)
        if isinstance(count, Tensor) and count.device.type != "cpu" and not reads_device:
            return
        if not math.isclose(count, counted, rel_tol=1e-6):
            raise ValueError(
                f"count_window_ahead=True has counted {counted:g} label tokens in a batch as the loader"
                f" yielded it, and training_step has {float(count):g}: change labels in the Dataset or in"
                " collate_fn, not in on_before_batch_transfer or on_after_batch_transfer, and pass"
                " label_shift=, ignore_index= or count_label_tokens= so that a returned num_label_tokens is"
                " the same."
            )

    def aux_loss(self, output: Any, is_counted_ahead: bool) -> Tensor | None:
        """[] what ``training_step`` returned; None with ``per_token_loss=False``, which weighs all losses alike."""
        if not (self.per_token_loss and isinstance(output, Mapping) and output.get("aux_loss") is not None):
            return None
        aux = output["aux_loss"]
        if any(cls.__name__ == "ModelOutput" for cls in type(output).__mro__):
            raise ValueError(
                "training_step returned a Hugging Face output, whose 'aux_loss' is not multiplied by its"
                " coefficient yet: return {'loss': out.loss, 'aux_loss': model.config.router_aux_loss_coef *"
                " out.aux_loss, ...}."
            )
        if not is_counted_ahead:
            raise ValueError(
                "training_step returned 'aux_loss', whose weight beside a token loss depends on the label"
                " tokens of the whole window, which are not known at its first backward. Pass"
                " count_window_ahead=True, or per_token_loss=False, or leave 'aux_loss' out of the returned"
                " dict to have it weighed by label tokens like the rest of the loss."
            )
        if not isinstance(aux, Tensor) or aux.numel() != 1:
            raise TypeError(f"'aux_loss' must be a tensor of one element, a part of 'loss', got {aux!r}.")
        return aux.reshape(())

    def _count_labels(self, labels: Tensor) -> Tensor:
        """Positions of ``labels`` [..., s] that the loss uses: not ignored, and not among the first ``label_shift``."""
        if not isinstance(labels, Tensor):
            raise TypeError(
                f"batch[{self.label_key!r}] must be a tensor to count label tokens, got"
                f" {type(labels).__name__}; return num_label_tokens from training_step or pass"
                " count_label_tokens instead."
            )
        if self.label_shift and labels.ndim < 2:
            raise ValueError(
                f"label_shift={self.label_shift} drops the first label positions of each row [..., s], but"
                f" batch[{self.label_key!r}] has the shape {list(labels.shape)} without rows: leave"
                " label_shift at 0 where each sample has one label, add a dimension to single sequences"
                " (labels[None]), or return num_label_tokens from training_step."
            )
        if self.label_shift:
            labels = labels[..., self.label_shift :]
        return (labels != self.ignore_index).sum()

    def objective(
        self, loss: Tensor, count: Count, divided_by: int = 1, aux_loss: Tensor | None = None
    ) -> Tensor:
        """[] the sum of token losses behind the loss of a micro-batch, at least float32: half would round the count.

        ``divided_by`` is what Lightning has divided the loss by, after ``aux_loss`` [] was added to it.
        """
        if aux_loss is not None:
            loss = loss - aux_loss / divided_by
        token_losses = loss.to(torch.promote_types(loss.dtype, torch.float32))
        if self.per_token_loss and self.loss_reduction == "mean":
            token_losses = token_losses * count
        return token_losses * divided_by

    def evaluated(self, batch: Any, output: Any, step: str) -> Tensor:
        """[2] sum of losses and its denominator, of one evaluated batch; see :meth:`AutomodelStrategy.evaluated`."""
        loss = loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"The mean loss of the evaluation needs the loss of each batch, and {step} returned"
                f" {'None' if output is None else kind_and_keys(output)}: return {{'loss': loss,"
                f" 'num_label_tokens': n}}, or the scalar loss alone where AutomodelStrategy counts label"
                " tokens."
            )
        count = self.count(batch, output, step)
        return sums_of(self.objective(loss.detach(), count), count).flip(0)

    @property
    def unit(self) -> str:
        """What is counted for the denominator of a window's gradients, in singular."""
        if not self.per_token_loss:
            return "micro-batch"
        if self.count_label_tokens is count_samples:
            return "sample"
        return "label token"


def loss_of(output: Any) -> Any:
    """[] the loss in what a step returned; None in a mapping without one."""
    return output.get("loss") if isinstance(output, Mapping) else output


def has_count(output: Any) -> bool:
    """Whether what a step returned holds its number of label tokens."""
    return isinstance(output, Mapping) and "num_label_tokens" in output


def kind_and_keys(value: Any) -> str:
    """For messages: the class of a value, and the keys of a mapping."""
    text = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        text += f" with the keys {sorted(map(str, value))}"
    return text


def check_count(count: Any, source: str) -> Count:
    """A user's count, checked without a host synchronisation: on an accelerator, a tensor's value is not read.

    See :func:`sums_of` for what becomes of a wrong one there.
    """
    if (
        isinstance(count, Tensor)
        and count.numel() == 1
        and not (count.dtype in _NO_COUNTS or count.is_complex())
    ):
        count = count.detach().reshape(())
        if count.device.type == "cpu":
            check_range(count.item(), source)
        return count
    if isinstance(count, bool) or not isinstance(count, Real):
        raise TypeError(
            f"{source} must be a number or a tensor of one element, and not in half precision, which rounds"
            f" it (mask.sum(dtype=torch.float32)), got {count!r}."
        )
    number = int(count) if isinstance(count, Integral) else float(count)
    check_range(number, source)
    return number


def check_range(count: float, source: str = "the number of label tokens") -> None:
    """Raise ValueError unless a count is finite and not negative."""
    if not 0 <= count < math.inf:
        raise ValueError(f"{source} must be finite and not negative, got {count}.")


def count_samples(batch: Any) -> int:
    """Rows of a batch: the first dimension of its tensors, which must agree in it.

    Scalars may stand beside the rest, and so may tensors [1, ...] beside others of two or more dimensions: 1 if these
    are all.
    """
    tensors = tensors_in(batch)
    sizes = {tensor.size(0) for tensor in tensors if tensor.ndim > 1}
    if len(sizes) > 1:
        sizes.discard(1)
    sizes |= {tensor.size(0) for tensor in tensors if tensor.ndim == 1}
    if len(sizes) > 1 or not tensors:
        if tensors:
            found = f"first dimensions of {', '.join(map(str, sorted(sizes)))}"
        else:
            found = "no tensors"
        raise ValueError(
            "count='samples' counts the rows that all tensors of a batch have in common, and this one"
            f" ({kind_and_keys(batch)}) has {found}: pass count_label_tokens=<function of the batch> instead,"
            " or return {'loss': loss, 'num_label_tokens': n} from the step."
        )
    return sizes.pop() if sizes else 1


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums_of(objective: Tensor, count: Count) -> Tensor:
    """[2] label tokens and sum of losses: what a micro-batch adds to its window, in float64 (exact up to 2**53).

    ``objective`` is the [] sum of its token losses, ignored if ``count`` is 0: a mean over nothing is NaN. A
    negative count on an accelerator, which nobody has read, becomes NaN, as do gradients of its window.
    """
    # Under loss_parallel it is a DTensor, the same on all tensor-parallel ranks.
    loss = full(objective.detach()).reshape(()).to(wide_dtype(objective.device))
    if isinstance(count, Tensor):
        tokens = count.to(loss.device, loss.dtype)
        tokens = tokens.masked_fill(tokens < 0, math.nan)
    else:
        tokens = torch.full_like(loss, count)
    return torch.stack([tokens, torch.where(tokens > 0, loss, 0.0)])


def reduce_loss(
    loss_store: list[Tensor],
    total_num_tokens: Tensor | int,
    per_token_loss: bool = True,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum losses and their denominator over the data-parallel ranks. Nothing is divided.

    A collective on ``dp_group``: every rank of it must call, and it is one all-reduce of two numbers. If a
    rank does not call it, the others raise when the group's timeout ends.

    Args:
        loss_store: Losses of this rank's micro-batches, each [] : sums of token losses where
            ``per_token_loss``, else one mean per micro-batch. May be empty.
        total_num_tokens: Label tokens of this rank, or a sum of class weights. Integers on all ranks, or
            floating-point numbers on all.
        per_token_loss: Whether the denominator is label tokens, else micro-batches.
        dp_group: Ranks that hold different data. None: no communication.

    Returns:
        [] the sum of the losses, at least float32 (float64 if there are none), and [] the denominator,
        int64, or float64 if the count is a floating-point one. Both are on the device of the losses, or of
        the count if there are no losses.

    Examples:
        >>> loss, denominator = reduce_loss([torch.tensor(6.0), torch.tensor(2.0)], torch.tensor(4))
        >>> float(loss / denominator)
        2.0
    """
    count = torch.as_tensor(total_num_tokens)
    device = [*loss_store, count][0].device
    sums = torch.zeros(2, dtype=wide_dtype(device), device=device)
    result_dtype = sums.dtype
    if loss_store:
        losses = torch.stack([loss.detach().to(device).reshape(()) for loss in loss_store])
        result_dtype = torch.promote_types(losses.dtype, torch.float32)
        sums[0] = losses.sum(dtype=sums.dtype)
    sums[1] = total_num_tokens if per_token_loss else len(loss_store)
    if dp_group is not None:
        dist.all_reduce(sums, group=dp_group)
    is_fractional = per_token_loss and count.is_floating_point()
    return sums[0].to(result_dtype), sums[1] if is_fractional else sums[1].round().to(torch.int64)
