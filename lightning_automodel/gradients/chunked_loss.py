"""Cross-entropy from the last hidden states in chunks, without the logits of all positions or their gradient."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack


@torch_internals.not_compiled  # how many chunks there are depends on the labels
def token_loss(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_shift: int = 0,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_elements: int | None = None,
    skip_ignored: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of ``head(hidden)`` at the positions that carry a label, and their count.

    The same as ``F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), reduction="sum")`` in less
    memory: positions go through the head in chunks. A chunk's gradients are computed right after its loss,
    so that its logits are computed once and then freed; the head's are accumulated in float32 or wider. All
    chunks run within one call of ``head``, so FSDP2 gathers it once. The loss can be backpropagated only
    once, and not with ``create_graph=True``.

    If FSDP2 or tensor parallelism shards the head, every rank must call this, even one without labels.
    Logits that are sharded over the vocabulary stay sharded; the softmax needs an all-gather of a few
    numbers per position.

    Args:
        hidden: [..., s, d] hidden states, the input of ``head``.
        head: Maps [..., d] hidden states to [..., v] logits, each position independently. Hooks on its
            output see the loss instead.
        labels: [..., s] integers.
        ignore_index: Label of positions that do not count.
        label_shift: How many positions after the hidden state its label comes: 1 for Hugging Face causal
            language models, 0 if labels are already shifted.
        weight: [v] weight of each class. Multiplies the position's loss; the count is then the sum of the
            labels' weights.
        label_smoothing: As in ``F.cross_entropy``.
        z_loss: Coefficient of the squared log-partition function, added to each position's cross-entropy.
        chunk_elements: Logits of one chunk on one rank. A larger number gives fewer, larger matrix products.
            None: 2**22, or a quarter of the head's weight if that is more.
        skip_ignored: Whether positions without a label are left out, and the head computes nothing for them.
            How many there are is then read on the host, which waits for an accelerator. If False, zeros take
            the place of their hidden states, and the host waits for nothing. None: left out on a CPU alone.

    Returns:
        [] the sum, at least float32, and [] the count: positions, or the sum of their labels' weights.
        Without weights, ``loss / count.clamp(min=1)`` is the mean, and 0 without labels.

    Raises:
        ValueError: If shapes do not match, the head returns half precision, or one of its parameters has a
            gradient hook, which would see the chunks.
    """
    if chunk_elements is not None and chunk_elements < 1:
        raise ValueError(f"chunk_elements must be at least 1, got {chunk_elements}.")
    if skip_ignored is None:
        skip_ignored = labels.device.type == "cpu"
    positions = _Positions(labels, label_shift, ignore_index, skip_ignored)
    losses_of = partial(_cross_entropies, weight=weight, label_smoothing=label_smoothing, z_loss=z_loss)
    head = torch_internals.uncompiled(head)
    chunked = _ChunkedHead(head.forward, positions, losses_of, chunk_elements)
    with PatchStack() as patches:
        patches.set(head, "forward", chunked.forward)
        output = head(hidden)
    return chunked.total(output), positions.count(weight)


class _Positions:
    """The n positions whose losses are added up: those with a label, or all, where those without give zeros.

    Attributes:
        targets: [n] labels.
    """

    def __init__(self, labels: Tensor, label_shift: int, ignore_index: int, skips_ignored: bool) -> None:
        targets = labels[..., label_shift:]
        is_label = targets != ignore_index
        self._shape = labels.shape
        self._length = targets.shape[-1]
        self._is_label = is_label
        self._places: tuple[Tensor, ...] = ()
        self._ignored: Tensor | None = None  # [n]; None if there are only positions with a label
        if skips_ignored:
            self._places = is_label.nonzero(as_tuple=True)  # it makes the host wait for an accelerator
            self.targets = targets[self._places]
        else:
            self._ignored = ~is_label.flatten()
            self.targets = targets.flatten().masked_fill(self._ignored, 0)

    def rows_of(self, states: Tensor) -> Tensor:
        """[n, d] the rows of [..., s, d] hidden states. Raises ValueError if these do not match the labels."""
        if states.shape[:-1] != self._shape:
            raise ValueError(
                f"hidden {list(states.shape)} must be [..., s, d] for labels {list(self._shape)} [..., s]."
            )
        rows = states[..., : self._length, :]
        if self._ignored is None:
            return rows[self._places]
        # Zeros, not what stands at ignored positions: it may be NaN, and so would be zero times its
        # gradient.
        return rows.flatten(0, -2).masked_fill(self._ignored[:, None], 0.0)

    def sum(self, values: Tensor, chunk: slice) -> Tensor:
        """[] the sum of the values of a chunk of positions, without those that have no label."""
        if self._ignored is not None:
            values = values.masked_fill(self._ignored[chunk], 0.0)
        return values.sum()

    def count(self, weight: Tensor | None) -> Tensor:
        """[] how many labels there are, or the sum of their weights."""
        if weight is None:
            return self._is_label.sum()
        return self.sum(weight[self.targets], slice(None))


@dataclass
class _ChunkedHead:
    """Runs a head on chunks of positions, and returns the sum of their losses in place of logits."""

    original: Callable[[Tensor], Tensor]
    positions: _Positions
    losses_of: Callable[[Tensor, Tensor], Tensor]
    chunk_elements: int | None
    mesh: DeviceMesh | None = None  # of tensor parallelism, once it has placed the hidden states

    @torch_internals.not_compiled
    def forward(self, states: Tensor) -> Tensor:
        """The head's forward while FSDP2 has gathered its parameters and tensor parallelism has placed ``states``."""
        num_ranks = 1
        if isinstance(states, DTensor):
            self.mesh = states.device_mesh
            num_ranks = self.mesh.size()
            states = states.full_tensor()
        rows = self.positions.rows_of(states)
        # Not under no_grad: autocast would cache a weight without its gradient.
        num_classes = self._logits_of(rows[:0]).shape[-1]
        num_rows = (self.chunk_elements or 2**22) * num_ranks // num_classes
        if self.chunk_elements is None:
            # Each chunk adds a gradient of the whole weight, so its logits may take as much memory.
            num_rows = max(num_rows, states.shape[-1] // 4)
        loss = _sum_over_chunks(self._loss_of, rows, max(num_rows, 1))
        # One copy per tensor-parallel rank, since the plan may shard the output or replicate it; averaged
        # in the total.
        if self.mesh is None:
            return loss
        return DTensor.from_local(loss.expand(num_ranks), self.mesh, [Replicate()])

    def total(self, output: Tensor) -> Tensor:
        """[] the sum of all losses, by what the head has returned. A collective where tensor parallelism shards it."""
        if self.mesh is not None and output.shape[0] < self.mesh.size():
            output = DTensor.from_local(output, self.mesh, [Shard(0)])
        loss = output.mean()
        if loss.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"The head casts its output to {loss.dtype}, too coarse for a sum of losses: leave"
                " output_dtype unset."
            )
        if isinstance(loss, DTensor):
            return loss.full_tensor()
        return loss

    def _logits_of(self, rows: Tensor) -> Tensor:
        if self.mesh is not None:
            rows = DTensor.from_local(rows, self.mesh, [Replicate()])
        return self.original(rows)

    def _loss_of(self, rows: Tensor, chunk: slice) -> Tensor:
        losses = self.losses_of(self._logits_of(rows), self.positions.targets[chunk])
        return self.positions.sum(losses, chunk)


def _sum_over_chunks(loss_of: Callable[[Tensor, slice], Tensor], rows: Tensor, num_rows: int) -> Tensor:
    """[1] sum of ``loss_of`` over chunks of the [n, d] rows, and their places; one empty chunk if n is 0."""
    total = torch.zeros(1, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    # Keyed by the leaf tensors that the losses depend on. Allocated once, not per chunk: small tensors
    # between freed logits would keep that memory from being reused.
    gradients: dict[Tensor, Tensor] = {}
    for start in range(0, max(1, rows.shape[0]), num_rows):
        places = slice(start, start + num_rows)
        chunk = rows[places].detach().requires_grad_(rows.requires_grad)
        loss = loss_of(chunk, places)
        total += loss.detach()
        if not loss.requires_grad:
            continue
        leaves = list(_leaves(loss))
        for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
            if leaf is chunk:
                if rows not in gradients:
                    gradients[rows] = torch.empty_like(rows)
                gradients[rows][places] = gradient
            elif gradient is not None:
                if leaf not in gradients:  # float32 or wider: half precision would lose small addends
                    wide = torch.promote_types(leaf.dtype, torch.float32)
                    gradients[leaf] = torch.zeros_like(leaf, dtype=wide)
                gradients[leaf].add_(gradient)
    if gradients:
        return _WithGradients.apply(total, list(gradients.values()), *gradients)
    return total


class _WithGradients(torch.autograd.Function):
    """A value whose gradients with respect to ``inputs`` are already known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # they would be constants to the second derivative
            raise RuntimeError(
                "A token_loss has no second derivative (create_graph=True), as its logits are not kept: take"
                " F.cross_entropy of the head's output where a penalty differentiates gradients."
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "A token_loss can be backpropagated once: its gradients are not kept. Call it again."
            )
        gradients = ctx.gradients
        ctx.gradients = None
        # In place: the head's gradient is as large as its weight. In the dtype of the loss: half precision
        # would round the upstream gradient, which may be a number of tokens.
        scaled = (gradient.to(upstream.dtype).mul_(upstream[0]) for gradient in gradients)
        return None, None, *(gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes, strict=True))


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors whose ``.grad`` a backward of ``loss`` would fill, each once."""
    to_visit: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}  # next_functions holds None for inputs without a gradient
    while to_visit:
        node = to_visit.pop()
        if node in seen:
            continue
        seen.add(node)
        to_visit.extend(following for following, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            continue
        if torch_internals.has_gradient_hook(leaf):
            raise ValueError(
                f"A parameter {list(leaf.shape)} of the head has a gradient hook (register_hook), which"
                " would see each chunk's gradient: use register_post_accumulate_grad_hook, or change the"
                " gradient in on_after_backward."
            )
        yield leaf


def _cross_entropies(
    logits: Tensor, targets: Tensor, weight: Tensor | None, label_smoothing: float, z_loss: float
) -> Tensor:
    """[n] losses of the [n] targets, from [n, v] logits that may be sharded over the vocabulary."""
    mesh = None
    start = 0
    num_classes = logits.shape[-1]
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        logits = logits.redistribute(placements=[Shard(1)]).to_local()
        start = mesh.get_local_rank() * -(-num_classes // mesh.size())  # as DTensor shards
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if weight is not None:
        weight = weight.to(logits.dtype)
    log_partition = logits.logsumexp(-1)
    if mesh is None:
        label_logit = logits.gather(-1, targets[:, None]).squeeze(-1)
    else:
        own = (targets >= start) & (targets < start + logits.shape[-1])
        label_logit = logits.gather(-1, torch.where(own, targets - start, 0)[:, None]).squeeze(-1)
        label_logit = label_logit.masked_fill(~own, -torch.inf)
        # Only one rank has the label's logit, the others -inf, so log-sum-exp selects it. For a label out of
        # range no rank has it, and the loss is infinite.
        log_partition, label_logit = _from_all(torch.stack([log_partition, label_logit]), mesh).logsumexp(0)
    of_label = 1.0 if weight is None else weight[targets]
    losses = (log_partition - label_logit) * of_label
    if label_smoothing:
        classes = slice(start, start + logits.shape[-1])
        of_all = logits.sum(-1) if weight is None else logits @ weight[classes]
        of_all = of_all if mesh is None else _from_all(of_all, mesh).sum(0)
        total_weight = num_classes if weight is None else weight.sum()
        smooth = (total_weight * log_partition - of_all) / num_classes
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    if z_loss:
        losses = losses + z_loss * log_partition.square() * of_label
    return losses


def _from_all(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """[ranks, ...] the ``values`` of all tensor-parallel ranks, all-gathered; each rank gets its own gradient."""
    return DTensor.from_local(values[None], mesh, [Shard(0)]).full_tensor()
