"""Causal attention of a sequence's last rows to all of it, without a rows x columns mask where torch allows that."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from lightning_automodel import torch_internals


def attend_to_end(
    query: Tensor, key: Tensor, value: Tensor, mask: Callable[[torch.dtype], Tensor], options: dict[str, Any]
) -> Tensor:
    """Causal attention aligned to the end: the last row sees all columns, each row before it one column less.

    Args:
        query: [b, h, c, d]
        key: [b, h_kv, t, d] with t > c.
        value: [b, h_kv, t, d_v]
        mask: Makes the additive mask [c, t] in a dtype; called only where a kernel needs it.
        options: Further arguments of ``F.scaled_dot_product_attention``.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # Autocast casts for torch's public function only, not for the kernels that are called below.
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    if device == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        bias = causal_lower_right(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, **options)
    # The CPU kernel supports only these inputs, and does not always raise for others.
    fits = all(each.ndim == 4 and each.shape[-1] == query.shape[-1] for each in (query, key, value))
    if device == "cpu" and fits and not options["dropout_p"]:
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        return _PrefixAndBlock.apply(query, key, value, options["scale"])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask(query.dtype), **options)


class _PrefixAndBlock(torch.autograd.Function):
    """Attention to the columns before all rows, and causal attention to the rows' own columns, merged by log-sum-exp.

    Given the merged result and its log-sum-exp, the kernel's backward over some of the columns gives what these columns
    add to the gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        start = key.shape[-2] - query.shape[-2]
        attend = torch_internals.attention_with_lse
        first, first_lse = attend(query, key[..., :start, :], value[..., :start, :], False, scale)
        second, second_lse = attend(query, key[..., start:, :], value[..., start:, :], True, scale)
        share = (second_lse - first_lse).sigmoid()[..., None]  # at least float32
        merged = torch.lerp(first.to(share.dtype), second.to(share.dtype), share).to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, torch.logaddexp(first_lse, second_lse))
        ctx.start, ctx.scale = start, scale
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, merged, lse = ctx.saved_tensors
        upstream = upstream.contiguous()
        of_query, of_key, of_value = zip(
            *(
                torch_internals.attention_backward(
                    upstream, query, key[..., columns, :], value[..., columns, :], merged, lse, is_causal, ctx.scale
                )
                for columns, is_causal in ((slice(0, ctx.start), False), (slice(ctx.start, None), True))
            ),
            strict=True,
        )
        return of_query[0] + of_query[1], torch.cat(of_key, dim=-2), torch.cat(of_value, dim=-2), None
