"""Context parallelism: attention over sequences that are sliced across ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from lightning_automodel.internals.torch import not_compiled


@dataclass
class Slices:
    """How the sequences of the current batch are sliced across ranks."""

    group: dist.ProcessGroup | None  # the ranks that share the batch; None if this rank holds all of it
    chunks: tuple[int, int]  # indices of the two chunks that this rank holds
    chunk: int  # number of positions in a chunk
    length: int  # number of positions in the whole sequence, without padding
    shape: tuple[int, ...] = ()  # [b, s] of this rank's slice
    is_masked: bool = False  # whether the batch has an ``attention_mask``
    # [b, w * s] the document of each position, or None: see ``SequenceSlices``.
    documents: Tensor | None = None
    num_calls: int = 0  # how often attention has crossed ranks

    def own_positions(self, device: torch.device) -> Tensor:
        """[s] this rank's positions in the whole sequence."""
        chunk = torch.arange(self.chunk, device=device)
        return torch.cat([index * self.chunk + chunk for index in self.chunks])

    def gather_mask(self, attention_mask: Tensor) -> Tensor:
        """[b, s] of each rank's positions to [b, w * s] of all. A collective over the ranks that share the batch."""
        return whole((attention_mask != 0)[..., None], self)[..., 0]


# Slices of the running step or backward. Not a context variable: autograd's threads may recompute.
_current: Slices | None = None


@contextmanager
def computing_on(slices: Slices | None) -> Iterator[None]:
    """Context in which attention crosses the ranks of ``slices``, or stays on this rank if that is None."""
    global _current
    before = _current
    _current = slices
    try:
        yield
    finally:
        _current = before


@not_compiled  # it would be recompiled in each step
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = True,
    attention_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product self-attention of a sequence, also where this rank holds only a slice of it.

    In a step under ``context_parallel_size`` > 1 it is a collective over the ranks that share the batch: one
    all-gather of keys and values, and one reduce-scatter of their gradients in backward. All ranks must make
    the same calls in the same order. If one fails, the others raise when its process leaves, or at the
    group's timeout. Elsewhere it is ``F.scaled_dot_product_attention``.

    Args:
        query: [b, h, s, d] of this rank's positions, after rotary embeddings by ``batch["position_ids"]``.
        key: [b, h_kv, s, d]; ``h_kv`` divides ``h``.
        value: [b, h_kv, s, d_v].
        is_causal: Whether a position attends only to itself and those before it.
        attention_mask: [b, s] of this rank's positions, nonzero where they may be attended to. A position
            always attends to itself.
        dropout_p: Dropout probability of the attention weights.
        scale: Factor of the query-key products. None: ``d ** -0.5``.

    Returns [b, h, s, d_v]. RuntimeError if the inputs are not a slice of the step's batch.
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
    options["enable_gqa"] = query.shape[-3] != key.shape[-3]
    slices = _current
    mask = None
    if attention_mask is not None:
        rows = torch.arange(query.shape[-2], device=query.device)
        if slices is not None:
            rows = slices.own_positions(query.device)
            attention_mask = slices.gather_mask(attention_mask)
        columns = torch.arange(attention_mask.shape[-1], device=query.device)
        mask = (attention_mask != 0)[:, None, None]
        if is_causal:
            mask = mask & (rows[:, None] >= columns)
        # To its own position too: the softmax over nothing would be NaN.
        mask = mask | (rows[:, None] == columns)
    if slices is None:
        is_causal = is_causal and mask is None
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, **options)
    return attend_across(query, key, value, mask, is_causal, options)


def attend_across(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any]
) -> Tensor:
    """[b, h, s, d_v] attention of this rank's positions to all. A collective over the ranks that share the batch.

    ``mask`` is [b, 1, s, w * s], True where a row attends; None: a row attends to all positions, or under
    ``is_causal`` to all up to its own. ``is_causal``: no row attends to a later column, by the mask too.
    """
    slices = _current
    assert slices is not None
    slices.num_calls += 1
    key, value = whole(torch.cat([key, value], dim=-1), slices).split(
        [key.shape[-1], value.shape[-1]], dim=-1
    )
    if mask is None:
        masks = (None, None)
    else:
        masks = mask.split(slices.chunk, dim=-2)
    parts = []
    with computing_on(None):  # torch's attention is right from here on
        for index, rows, part in zip(slices.chunks, query.split(slices.chunk, dim=-2), masks, strict=True):
            # Padding follows all other positions, so under a causal mask only rows of padding see it.
            end = (index + 1) * slices.chunk if is_causal else slices.length
            seen: Tensor | None = None
            if part is not None:
                seen = part[..., :end]
            elif is_causal:
                seen = _causal_bias(slices.chunk, end, query.device)
            parts.append(
                F.scaled_dot_product_attention(rows, key[..., :end, :], value[..., :end, :], seen, **options)
            )
    return torch.cat(parts, dim=-2)


def _causal_bias(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """A mask for the last ``num_rows`` of ``num_columns`` positions: each attends to those up to its own."""
    try:
        return causal_lower_right(num_rows, num_columns)
    except RuntimeError:
        # Torch (2.13) cannot make it under a dispatch mode: FlopCounterMode's, selective recomputation's.
        columns = torch.arange(num_columns, device=device)
        return columns <= columns[-num_rows:, None]


def current() -> Slices | None:
    """How the sequences of the step, or backward, that is running now are sliced; None if they are not."""
    return _current


def whole(part: Tensor, slices: Slices) -> Tensor:
    """[..., 2 c, d] of each rank to [..., w * 2 c, d] in the order of the sequence. A collective over the group.

    Raises RuntimeError if the part has another length.
    """
    if slices.group is None:
        return part
    if part.shape[-2] != 2 * slices.chunk:
        raise RuntimeError(
            f"Attention of {part.shape[-2]} positions, where this rank's slice of the batch has {2 * slices.chunk}:"
            " pass all of batch['input_ids'] to the model. To predict the next token, pass label_shift=1, and take"
            " batch['shift_labels'] in place of ids[:, 1:]."
        )
    chunks = _Gather.apply(part, slices.group).unflatten(-2, (2, slices.chunk))  # [w, ..., 2, c, d]
    first, second = chunks.unbind(-3)
    return torch.cat([first, second.flip(0)]).movedim(0, -3).flatten(-3, -2)


class _Gather(torch.autograd.Function):
    """All-gathers [...] of each rank to [w, ...]; the backward reduce-scatters the gradients by summing them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty((group.size(), *part.shape))
        dist.all_gather_single(whole, part.contiguous()[None], group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.new_empty((1, *gradient.shape[1:]))
        dist.reduce_scatter_single(part, gradient.contiguous(), group=ctx.group)
        return part[0], None
