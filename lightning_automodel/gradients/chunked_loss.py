"""Cross-entropy from the last hidden states in chunks, without the logits of all positions or their gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack


@torch_internals.not_compiled  # how many chunks there are depends on the size of the vocabulary
def token_loss(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_shift: int = 0,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of ``head(hidden)`` at the positions that carry a label, and their count.

    The same as ``F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), reduction="sum")`` in less
    memory: positions go through the head in chunks. A chunk's gradients are computed right after its loss,
    so that its logits are computed once and then freed; the head's are accumulated in float32 or wider. All
    chunks run within one call of ``head``, so FSDP2 gathers it once. Positions without a label go through
    it as zeros. The loss can be backpropagated only once, and not with ``create_graph=True``.

    If FSDP2 or tensor parallelism shards the head, every rank must call this, even one without labels. Logits
    that are sharded over the vocabulary are gathered chunk by chunk.

    Args:
        hidden: [..., s, d] hidden states, the input of ``head``.
        head: Maps [n, d] hidden states to [n, v] logits, each position independently. Hooks on its output
            see the loss instead.
        labels: [..., s] integers.
        ignore_index: Label of positions that do not count.
        label_shift: How many positions after the hidden state its label comes: 1 for Hugging Face causal
            language models, 0 if labels are already shifted.
        weight: [v] weight of each class, which multiplies the loss of its positions, and counts for them.
        label_smoothing: As in ``F.cross_entropy``.
        chunk_elements: Logits of one chunk. A larger number gives fewer, larger matrix products. None: 2**22,
            or a quarter of the head's weight if that is more.

    Returns:
        [] the sum, at least float32, and [] the count: positions, or the sum of their labels' weights.
        Without weights, ``loss / count.clamp(min=1)`` is the mean, and 0 without labels.

    Raises:
        ValueError: If shapes do not match, the head returns half precision, or one of its parameters has a
            gradient hook, which would see the chunks.
    """
    if chunk_elements is not None and chunk_elements < 1:
        raise ValueError(f"chunk_elements must be at least 1, got {chunk_elements}.")
    if label_shift < 0:
        raise ValueError(f"label_shift must be at least 0, got {label_shift}.")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)} must be [..., s, d] for labels {list(labels.shape)} [..., s]."
        )
    labels = labels[..., label_shift:]
    targets = labels.flatten()
    is_label = targets != ignore_index
    # Zeros, not what stands at ignored positions: it may be NaN, and so would be zero times its gradient.
    # All positions stay, since the host would wait for an accelerator to know how many have a label.
    rows = hidden[..., : labels.shape[-1], :].flatten(0, -2).masked_fill(~is_label[:, None], 0.0)
    head = torch_internals.uncompiled(head)
    original = head.forward
    mesh: DeviceMesh | None = None  # of tensor parallelism, if it shards the head

    def logits_of(rows: Tensor) -> Tensor:
        if mesh is not None:
            rows = DTensor.from_local(rows, mesh, [Replicate()])
        logits = original(rows)
        return logits.full_tensor() if isinstance(logits, DTensor) else logits

    def loss_of(rows: Tensor, chunk: slice) -> Tensor:
        logits = logits_of(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(
            logits,
            targets[chunk],
            None if weight is None else weight.to(logits.dtype),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    @torch_internals.not_compiled
    def forward(rows: Tensor) -> Tensor:
        """The head's forward while FSDP2 has gathered its parameters and tensor parallelism has placed ``rows``."""
        nonlocal mesh
        if isinstance(rows, DTensor):
            mesh = rows.device_mesh
            rows = rows.full_tensor()
        # Not under no_grad: autocast would cache a weight without its gradient.
        num_classes = logits_of(rows[:0]).shape[-1]
        num_rows = (chunk_elements or 2**22) // num_classes
        if chunk_elements is None:
            # Each chunk adds a gradient of the whole weight, so its logits may take as much memory.
            num_rows = max(num_rows, rows.shape[-1] // 4)
        loss = _sum_over_chunks(loss_of, rows, max(num_rows, 1))
        if mesh is None:
            return loss
        # One copy per tensor-parallel rank, since the plan may shard the output or replicate it.
        return DTensor.from_local(loss.expand(mesh.size()), mesh, [Replicate()])

    with PatchStack() as patches:
        patches.set(head, "forward", forward)
        loss = head(rows)
    if mesh is not None:
        if loss.shape[0] < mesh.size():
            loss = DTensor.from_local(loss, mesh, [Shard(0)])
        loss = loss.mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    if loss.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"The head casts its output to {loss.dtype}, too coarse for a sum of losses: leave"
            " output_dtype unset."
        )
    if weight is None:
        return loss, is_label.sum()
    weights = weight[targets.masked_fill(~is_label, 0)].masked_fill(~is_label, 0.0)
    return loss, weights.sum(dtype=torch.promote_types(weight.dtype, torch.float32))


def _sum_over_chunks(loss_of: Callable[[Tensor, slice], Tensor], rows: Tensor, num_rows: int) -> Tensor:
    """[] sum of ``loss_of`` over chunks of the [n, d] rows, and their places; one empty chunk if n is 0."""
    total = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
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
        scaled = (gradient.to(upstream.dtype).mul_(upstream) for gradient in gradients)
        return None, None, *(gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes, strict=True))


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors whose ``.grad`` a backward of ``loss`` would fill, each once."""
    for node in torch_internals.graph_nodes(loss):
        leaf = getattr(node, "variable", None)
        if leaf is None:
            continue
        if torch_internals.has_hooks(leaf):
            raise ValueError(
                f"A parameter {list(leaf.shape)} of the head has a gradient hook (register_hook), which"
                " would see each chunk's gradient: use register_post_accumulate_grad_hook, or change the"
                " gradient in on_after_backward."
            )
        yield leaf
