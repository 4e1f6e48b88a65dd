"""Attention of the last rows of a sequence without a mask, against the same with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_automodel.context_parallel import causal_attention
from lightning_automodel.context_parallel.causal_attention import attend_to_end

ROWS, COLUMNS = 5, 17
OPTIONS: dict[str, Any] = {"dropout_p": 0.0, "scale": 0.7, "enable_gqa": True}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def mask(dtype: torch.dtype) -> Tensor:
    """[rows, columns] 0 where a row sees a column."""
    seen = torch.ones(ROWS, COLUMNS, dtype=torch.bool).tril(COLUMNS - ROWS)
    return torch.zeros(ROWS, COLUMNS, dtype=dtype).masked_fill(~seen, -torch.inf)


def no_mask(dtype: torch.dtype) -> Tensor:
    raise AssertionError("made a mask")


def tensors(dtype: torch.dtype, num_values: int = 8) -> list[Tensor]:
    """Queries of four heads, keys and values of two; of the values, positions lie side by side."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(2, ROWS, 4, 8, generator=generator).transpose(1, 2)
    key = torch.randn(2, 2, COLUMNS, 8, generator=generator)
    value = torch.randn(2, 2, num_values, COLUMNS, generator=generator).transpose(-1, -2)
    return [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]


def with_gradients(mixed: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [mixed, *torch.autograd.grad(mixed.sin().sum(), inputs)]


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for own, other in zip(found, expected, strict=True):
        assert (own - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_prefix_and_block(dtype: torch.dtype) -> None:
    inputs = tensors(dtype)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask(dtype), **OPTIONS)
    found = attend_to_end(*inputs, no_mask, OPTIONS)
    assert found.dtype == dtype
    check(with_gradients(found, inputs), with_gradients(expected, inputs), TOLERANCES[dtype])


def test_autocast_holds_here_too() -> None:
    inputs = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask(torch.bfloat16), **OPTIONS)
        found = attend_to_end(*inputs, no_mask, OPTIONS)
    assert found.dtype == expected.dtype == torch.bfloat16
    check(with_gradients(found, inputs), with_gradients(expected, inputs), TOLERANCES[torch.bfloat16])


def test_values_of_another_width_have_a_mask() -> None:
    inputs = tensors(torch.float64, num_values=6)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask(torch.float64), **OPTIONS)
    found = attend_to_end(*inputs, mask, OPTIONS)
    check(with_gradients(found, inputs), with_gradients(expected, inputs), TOLERANCES[torch.float64])


def test_dropout_has_a_mask() -> None:
    inputs, options = tensors(torch.float64), {**OPTIONS, "dropout_p": 0.5}
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask(torch.float64), **options)
    torch.manual_seed(3)
    assert torch.equal(attend_to_end(*inputs, mask, options), expected)


def test_on_cuda_torch_aligns_the_last_row_itself() -> None:
    """The bias that half precision is given there means what the mask says; the device itself is not run."""
    bias = causal_attention.causal_lower_right(ROWS, COLUMNS)
    inputs = [tensor.repeat_interleave(4 // tensor.shape[1], dim=1) for tensor in tensors(torch.float64)]
    found = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask(torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
